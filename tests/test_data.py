"""Files -> rows and counts: the same rows whatever the file looks like, and no row lost in silence."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from finetune import files
from finetune.data import Prepared, prepare, read_conversations
from finetune.encoding import row_hash
from finetune.errors import DataError
from finetune.files import find
from finetune.formats import Conversation
from finetune.recipe import Data, Recipe
from finetune.store import Packs, Rows
from tests.tiny import tiny_tokenizer

TOKENIZER = tiny_tokenizer("smollm2")
BASE = tiny_tokenizer("none")


def pair(question: str = "Hi", answer: Any = "Hello") -> dict[str, Any]:
    return {"prompt": question, "completion": answer}


def chat(*texts: str) -> dict[str, Any]:
    return {"messages": [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(texts)]}


def jsonl(path: Path, *rows: Any) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def run(train: str | list[str] | dict[str, float], tokenizer: Any = TOKENIZER, **data: Any) -> Prepared:
    recipe = {"model": "any", "method": {"kind": "lora"}, "data": {"train": train, "format": "auto", **data}}
    return prepare(Recipe.model_validate(recipe), tokenizer)


def texts(rows: Rows | None, tokenizer: Any = TOKENIZER) -> list[str]:
    assert rows is not None
    return [tokenizer.decode(row.input_ids) for row in rows]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path_factory.mktemp("cache")))


def test_three_rows_by_hand(tmp_path: Path) -> None:
    rows = [{"text": "the"}, {"text": "Hello the"}, {"text": "a"}]
    file = Path(jsonl(tmp_path / "a.jsonl", *rows))
    prepared = run(str(file), BASE)
    assert texts(prepared.train, BASE) == ["<s>the</s>", "<s>Hello the</s>", "<s>a</s>"]
    assert [len(row.input_ids) for row in prepared.train] == [3, 4, 3]
    assert prepared.train.lengths.tolist() == [3, 4, 3]
    assert all(row.labels == row.input_ids for row in prepared.train)
    assert prepared.eval is None
    expected = {
        "format": "text",
        "format_reason": "column text",
        "files": [
            {
                "name": str(file),
                "rows_read": 3,
                "rows_kept": 3,
                "sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
            }
        ],
        "rows_read": 3,
        "rows_trained": 3,
        "rows_bad": {},
        "rows_overlong": 0,
        "rows_dropped": 0,
        "rows_cut": 0,
        "tokens_lost": 0,
        "tokens": 3 + 4 + 3,
        "trained_tokens": 2 + 3 + 2,  # nothing predicts a row's first token
        "trained_share": 0.7,
        "longest": 4,
        "rows_evaluated": 0,
        "eval": None,
        "first_tokens": ["<s>", "the", "</s>"],
    }
    assert {name: prepared.counts[name] for name in expected} == expected
    json.dumps(prepared.counts)


# ---------------------------------------------------------------------------------------------------- shapes of files

LINES = [json.dumps(chat("What?", text), ensure_ascii=False) for text in ("Bamboo.", "n-a-ï-v-e", "a\u2028b")]
PLAIN = "".join(line + "\n" for line in LINES).encode()


@pytest.mark.parametrize(
    "content",
    [
        b"\xef\xbb\xbf" + PLAIN,
        b"\xef\xbb\xbf" + PLAIN.replace(b"\n", b"\r\n"),
        PLAIN.rstrip(b"\n"),
        b"\n\n" + PLAIN.replace(b"\n", b"\n\n  \t\n"),
        ("[\n" + ",\n".join(LINES) + "\n]").encode(),
        b"\xef\xbb\xbf [" + ",".join(LINES).encode() + b"] \r\n",
        json.dumps([json.loads(line) for line in LINES], indent=1).encode(),
    ],
    ids=["bom", "bom_crlf", "no_newline", "blank_lines", "array", "array_bom", "array_indented"],
)
@pytest.mark.parametrize("suffix", [".jsonl", ".json"])
def test_the_look_of_a_file_makes_no_difference(tmp_path: Path, content: bytes, suffix: str) -> None:
    (tmp_path / "plain.jsonl").write_bytes(PLAIN)
    (tmp_path / f"other{suffix}").write_bytes(content)
    plain, other = run(str(tmp_path / "plain.jsonl")), run(str(tmp_path / f"other{suffix}"))
    assert len(plain.train) == 3
    assert list(plain.train) == list(other.train)
    assert not any("\ufeff" in text for text in texts(other.train))


def test_one_odd_cell_changes_no_other(tmp_path: Path) -> None:
    replies = ['{"a": 3, "b": null, "ok": true}', "007", "null", "2.50"]
    file = jsonl(tmp_path / "a.jsonl", *(chat("What?", reply) for reply in replies), chat("Two?", 4))  # type: ignore[arg-type]
    with pytest.raises(
        DataError, match=r"a.jsonl:5: messages\[1\].content \(assistant\) holds the number 4, not text"
    ):
        run(file)
    prepared = run(file, on_bad_row="skip")
    assert [text.partition("assistant\n")[2] for text in texts(prepared.train)] == [
        f"{r}<|im_end|>\n" for r in replies
    ]
    assert prepared.counts["rows_bad"] == {"not text": 1}
    assert prepared.counts["rows_read"] == 5
    assert prepared.counts["rows_trained"] == 4


def test_an_optional_column_may_be_null_first_and_filled_late(tmp_path: Path) -> None:
    rows = [{"system": None, **pair(f"p{n}")} for n in range(300)] + [{"system": "Be brief.", **pair()}]
    forward = texts(run(jsonl(tmp_path / "a.jsonl", *rows)).train)
    backward = texts(run(jsonl(tmp_path / "b.jsonl", *rows[::-1])).train)
    assert forward == backward[::-1]
    assert forward[-1].startswith("<|im_start|>system\nBe brief.<|im_end|>")


def test_csv_is_all_text(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_bytes(
        b'\xef\xbb\xbfinstruction,input,output\r\nAgent?,,007\r\n"Two\nlines, and",4,"say ""8"""\r\n\r\nShort\r\n'
    )
    with pytest.raises(DataError, match=r"a.csv:6: column 'output' is missing or null"):
        run(str(file))
    messages = read_conversations(str(file), Data(train="x", on_bad_row="skip"))
    assert [[turn["content"] for turn in talk.messages] for talk in messages] == [
        ["Agent?", "007"],
        ["Two\nlines, and\n4", 'say "8"'],
    ]
    tab = tmp_path / "a.tsv"
    tab.write_text("prompt\tcompletion\nHi, you\tHello\nx\ty\tz\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"a.tsv:3: 3 cells under 2 column names"):
        run(str(tab))


def test_csv_faults_are_named(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    for content, reason in [
        (b"prompt,prompt,completion\na,b,c\n", "stands twice in the header"),
        (b'prompt,completion\na,"b\n', "cannot be read to its end"),
        (b"prompt,completion\na,\xff\n", "cannot be read to its end"),
        (b"prompt,completion\n", "No row of"),
    ]:
        file.write_bytes(content)
        with pytest.raises(DataError, match=reason):
            run(str(file))
    file.write_text("prompt,completion\nx," + "y" * 200_000 + "\n", encoding="utf-8")
    [talk] = read_conversations(str(file), Data(train="x"))
    assert len(talk.messages[1]["content"]) == 200_000


def test_parquet(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [chat("Hi", "Hello"), {"messages": [{"role": "user", "content": "Hi"}]}]
    rows[0]["messages"][0]["name"] = None
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="a.parquet:row 2: there is no assistant message"):
        run(str(tmp_path / "a.parquet"))
    prepared = run(str(tmp_path / "a.parquet"), on_bad_row="skip")
    assert list(prepared.train) == list(run(jsonl(tmp_path / "a.jsonl", chat("Hi", "Hello"))).train)
    (tmp_path / "b.parquet").write_bytes(b"not parquet at all")
    with pytest.raises(DataError, match="cannot be read after row 0"):
        run(str(tmp_path / "b.parquet"))


# ----------------------------------------------------------------------------------------------------------- bad rows

DEEP = "[" * 100_000


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"prompt": "x", "completion": "y"', "not JSON: "),
        (b'{"prompt": "x", "completion": "y", "prompt": "z"}', "the key 'prompt' stands twice"),
        (b'{"prompt": "x", "completion": "y", "meta": {"a": 1, "a": 1}}', "the key 'a' stands twice"),
        (b'{"prompt": "x", "completion": NaN}', "NaN is no number"),
        (b'{"prompt": "x", "completion": "y", "score": -Infinity}', "-Infinity is no number"),
        (b'{"prompt": "x", "completion": "\\ud83d"}', "half of a surrogate pair"),
        (b'{"prompt": "x", "completion": "\xff"}', "byte 32 is not UTF-8"),
        (b'["x", "y"]', "not an object"),
        (b'"x"', "not an object"),
        (b'{"prompt": ' + DEEP.encode(), "nested deeper than 200 levels"),
    ],
)
def test_a_bad_line_is_named_and_may_be_skipped(tmp_path: Path, line: bytes, reason: str) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(json.dumps(pair()).encode() + b"\n\n" + line + b"\n" + json.dumps(pair("Bye")).encode() + b"\n")
    with pytest.raises(DataError) as error:
        run(str(file))
    assert f"a.jsonl:3: {reason}" in error.value.what
    assert "on_bad_row" in error.value.hint
    prepared = run(str(file), on_bad_row="skip")
    assert len(prepared.train) == 2
    assert sum(prepared.counts["rows_bad"].values()) == 1
    assert prepared.counts["bad_rows"][0].startswith(f"{file}:3: ")


def test_paired_surrogates_are_one_character(tmp_path: Path) -> None:
    assert "\\ud83d\\ude00" in Path(jsonl(tmp_path / "a.jsonl", pair("Hi", "😀"))).read_text(encoding="utf-8")
    assert texts(run(str(tmp_path / "a.jsonl")).train)[0].endswith("😀<|im_end|>\n")


def test_bad_rows_of_an_array_have_lines(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text(
        '[\n {"prompt": "x",\n  "completion": "y"},\n {"prompt": "x", "completion": 8}, 5\n]', encoding="utf-8"
    )
    with pytest.raises(DataError) as error:
        run(str(file))
    assert "a.json:4: column 'completion' holds the number 8" in error.value.what
    assert "a.json:4: not an object" in error.value.what
    for content, reason in [
        ('[{"prompt": "x"}', "no end or lacks a comma"),
        ('[{"prompt": "x"},\n {"a": }]', "a.json:2: the JSON array cannot be read on"),
        ("[] {}", "something stands behind"),
        ("[]", "No row of"),
        ('{\n "prompt": "x"\n}', "one JSON object spread over many lines"),
    ]:
        file.write_text(content, encoding="utf-8")
        with pytest.raises(DataError, match=reason):
            run(str(file))


def test_a_row_of_50_megabytes_gets_a_verdict(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "a.jsonl", pair(), pair("x " * 25_000_000), pair("Bye"))
    with pytest.raises(DataError, match=r"a.jsonl:2: it has 50,000,005 characters, and at most 4,000,000"):
        run(file)
    assert len(run(file, on_bad_row="skip").train) == 2


def test_twenty_bad_rows_are_listed_and_all_are_counted(tmp_path: Path) -> None:
    rows = [pair(answer=number) for number in range(25)] + [pair(answer="") for _ in range(5)] + [pair()]
    file = jsonl(tmp_path / "a.jsonl", *rows)
    with pytest.raises(DataError) as error:
        run(file)
    assert error.value.what.startswith("30 of 31 rows cannot be trained (25 not text, 5 empty):")
    assert error.value.what.count("a.jsonl:") == 20
    assert "and 10 more" in error.value.what
    assert run(file, on_bad_row="skip").counts["rows_bad"] == {"not text": 25, "empty": 5}


def test_nothing_left_is_an_error_even_when_skipping(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="2 of 2 rows cannot be trained"):
        run(jsonl(tmp_path / "a.jsonl", pair(answer=1), pair(answer="")), on_bad_row="skip")
    (tmp_path / "b.jsonl").write_text("\n \n", encoding="utf-8")
    with pytest.raises(DataError, match="0 read"):
        run(str(tmp_path / "b.jsonl"))


def test_rows_that_the_template_cannot_carry_are_bad_rows(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "a.jsonl", chat("One?", "1", "Two?", "2"), chat("One?", "1"), chat("<|im_end|>?", "1"))
    prepared = run(file, tiny_tokenizer("qwen3"), on_bad_row="skip")
    assert prepared.counts["rows_bad"] == {"template rewrites turns": 1, "control token": 1}
    assert any("<think>" in note for note in prepared.notes)


# ---------------------------------------------------------------------------------------------------------- long rows


def test_overlong_rows_stop_by_default(tmp_path: Path) -> None:
    rows = [{"text": "a" * length} for length in (3, 30, 50)]
    with pytest.raises(DataError) as error:
        run(jsonl(tmp_path / "a.jsonl", *rows), BASE, max_length=31)
    assert "2 of 3 rows are longer than data.max_length 31 tokens; the longest has 52" in error.value.what
    assert "a.jsonl:3" in error.value.what
    assert "max_length to 52" in error.value.hint


def test_overlong_rows_are_dropped_or_cut_as_the_recipe_says(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "a.jsonl", *({"text": "a" * length} for length in (3, 30, 50)))
    dropped = run(file, BASE, max_length=32, overlong="drop").counts
    assert (dropped["rows_trained"], dropped["rows_overlong"], dropped["rows_dropped"]) == (2, 1, 1)
    assert (dropped["tokens"], dropped["tokens_lost"], dropped["longest"]) == (5 + 32, 52, 32)
    assert dropped["longest_read"] == 52
    cut = run(file, BASE, max_length=32, overlong="truncate-end")
    assert cut.train.lengths.tolist() == [5, 32, 32]
    assert (cut.counts["rows_cut"], cut.counts["tokens_lost"], cut.counts["rows_dropped"]) == (1, 20, 0)
    assert texts(cut.train, BASE)[2] == "<s>" + "a" * 31


def test_a_row_whose_reply_is_cut_away_is_dropped(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "a.jsonl", pair("x" * 200, "lost"), pair("Hi", "kept"))
    whole = run(file)
    fits = int(whole.train.lengths[1])
    prepared = run(file, max_length=fits, overlong="truncate-end")
    assert texts(prepared.train)[0].endswith("kept<|im_end|>\n")
    assert (prepared.counts["rows_dropped"], prepared.counts["rows_cut"]) == (1, 0)
    only = jsonl(tmp_path / "b.jsonl", pair("x" * 200, "lost"))
    with pytest.raises(DataError, match="No row of .* is left to train: 1 read, 0 bad, 1 dropped"):
        run(only, max_length=fits, overlong="truncate-end")


def test_a_long_conversation_keeps_the_replies_before_the_cut(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "a.jsonl", chat("Hi", "Hello", "x" * 200, "lost"))
    prepared = run(file, max_length=120, overlong="truncate-end")
    (row,) = prepared.train
    assert TOKENIZER.decode([label for label in row.labels if label != -100]) == "Hello<|im_end|>"


# -------------------------------------------------------------------------------------------------------- evaluation


def test_a_share_is_held_out_by_content(tmp_path: Path) -> None:
    rows = [pair(f"Question {number}?", f"{number}") for number in range(400)]
    rows += rows[:100]
    random.Random(0).shuffle(rows)
    prepared = run(jsonl(tmp_path / "a.jsonl", *rows), eval=0.2)
    train, held = texts(prepared.train), texts(prepared.eval)
    assert len(train) + len(held) == 500
    assert not set(train) & set(held)
    assert 60 <= len(held) <= 140  # 100 expected; fixed by the hashes, so this never flickers
    assert prepared.counts["rows_evaluated"] == prepared.counts["eval"]["rows"] == len(held)
    assert prepared.counts["rows_copied"] == 100
    assert "100 of 500 rows are exact copies" in prepared.notes[0]
    fewer = run(jsonl(tmp_path / "b.jsonl", *rows[:250]), eval=0.2)
    assert set(texts(fewer.eval)) <= set(held)
    assert set(texts(fewer.train)) <= set(train)


@pytest.mark.parametrize("share", [0.001, 0.999])
def test_a_share_leaves_no_side_empty(tmp_path: Path, share: float) -> None:
    prepared = run(jsonl(tmp_path / "a.jsonl", pair("One?"), pair("Two?")), eval=share)
    assert prepared.eval is not None
    assert (len(prepared.train), len(prepared.eval)) == (1, 1)
    with pytest.raises(DataError, match="only one to train on"):
        run(jsonl(tmp_path / "b.jsonl", pair(), pair()), eval=share)


def test_an_evaluation_file_of_another_layout(tmp_path: Path) -> None:
    train = jsonl(tmp_path / "a.jsonl", pair("One?", "1"), pair("Two?", "2"))
    held = jsonl(tmp_path / "b.jsonl", chat("Two?", "2"), chat("Three?", "3"), chat("Four?", "4"))
    prepared = run(train, eval=held, limit=1)
    assert (len(prepared.train), prepared.counts["rows_evaluated"]) == (1, 3)
    prepared = run(train, eval=held)
    assert prepared.counts["eval"]["also_trained"] == 1
    assert prepared.counts["eval"]["format"] == "messages"
    assert "1 evaluation rows are also trained" in prepared.notes[0]
    assert run(train, eval="none").eval is None


def test_the_hash_is_the_same_everywhere() -> None:
    expected = hashlib.sha256(b'[[{"content":"H\\u00e9","role":"user"}],null]').digest()[:8]
    assert row_hash(Conversation([{"role": "user", "content": "Hé"}])) == int.from_bytes(expected, "big")


def test_read_conversations(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "a.jsonl", pair("One?", "1"), pair("Two?", 2))
    data = Data(train="x", system="Be brief.", limit=1)
    with pytest.raises(DataError, match="a.jsonl:2"):
        read_conversations(file, data)
    skipping = data.model_copy(update={"on_bad_row": "skip"})
    assert [talk.messages for talk in read_conversations(file, skipping)] == [
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "One?"},
            {"role": "assistant", "content": "1"},
        ]
    ]


# ------------------------------------------------------------------------------------------------------ finding files


def test_globs_lists_and_limit(tmp_path: Path) -> None:
    for number in (2, 1, 3):
        jsonl(tmp_path / f"part-{number}.jsonl", pair(f"{number}a"), pair(f"{number}b"))
    (tmp_path / "part-9.jsonl").mkdir()  # a folder that fits the pattern is no file
    prepared = run([str(tmp_path / "part-[12].jsonl"), str(tmp_path / "part-3.jsonl")], limit=5)
    asked = [text.partition("user\n")[2].partition("<")[0] for text in texts(prepared.train)]
    assert asked == ["1a", "1b", "2a", "2b", "3a"]
    assert [Path(file["name"]).name for file in prepared.counts["files"]] == [f"part-{n}.jsonl" for n in (1, 2, 3)]
    with pytest.raises(DataError, match="named twice"):
        find([str(tmp_path / "part-?.jsonl"), str(tmp_path / "part-3.jsonl")])


def test_what_cannot_be_read_says_so_in_two_sentences(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "wide.jsonl").write_bytes("{}".encode("utf-16"))
    (tmp_path / "book.docx").write_bytes(b"PK")
    closed = Path(jsonl(tmp_path / "closed.jsonl", pair()))
    real = Path.open

    def guarded(self: Path, *args: Any, **more: Any) -> Any:  # the tests may run as root, for whom no file is closed
        if self.name == closed.name:
            raise PermissionError(13, "Permission denied")
        return real(self, *args, **more)

    monkeypatch.setattr(Path, "open", guarded)
    for name, reason in [
        (f"{tmp_path}/none.jsonl", "There is no file"),
        ("data/none.jsonl", "There is no file data/none.jsonl"),
        (f"{tmp_path}/none", "There is no file"),
        (f"{tmp_path}/*.parquet", "No file fits"),
        (str(tmp_path), "is a folder"),
        (f"{tmp_path}/empty.jsonl", "is empty"),
        (f"{tmp_path}/wide.jsonl", "is UTF-16"),
        (f"{tmp_path}/book.docx", "of a kind that cannot be read"),
        (str(closed), "cannot be read: Permission denied"),
        ("home-intents:dev", "has no part 'dev'"),
    ]:
        with pytest.raises(DataError, match=reason) as error:
            find(name)
        assert error.value.what.endswith(".")
        assert error.value.hint.endswith(".")


def test_wrong_columns(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "a.jsonl", {"question": "Hi", "answer": "Hello"})
    with pytest.raises(DataError, match="No layout fits the columns question, answer"):
        run(file)
    with pytest.raises(DataError, match="completion is in no row"):
        run(file, format="prompt-completion")
    with pytest.raises(DataError, match="no place for a system message"):
        run(jsonl(tmp_path / "b.jsonl", {"text": "Once"}), BASE, system="Be brief.")


def test_home_intents_names_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from finetune import home_intents

    asked = []

    def path(split: str) -> Path:
        asked.append(split)
        return Path(jsonl(tmp_path / f"{split}.jsonl", chat(split, "{}")))

    monkeypatch.setattr(home_intents, "path", path)
    prepared = run("home-intents", eval="home-intents:test")
    assert asked == ["train", "test"]
    assert (len(prepared.train), len(prepared.eval or ())) == (1, 1)


# -------------------------------------------------------------------------------------------------------------- bones


# ------------------------------------------------------------------------------------------ splits, weights, packs


def test_rows_of_one_group_stay_on_one_side(tmp_path: Path) -> None:
    rows = [{**pair(f"Question {n}?", f"{n}"), "user": n % 40} for n in range(400)]
    prepared = run(jsonl(tmp_path / "a.jsonl", *rows), eval=0.3, eval_group="user")
    assert prepared.eval is not None
    sides = [
        {int(text.split("Question ")[1].split("?")[0]) % 40 for text in texts(r)}
        for r in (prepared.train, prepared.eval)
    ]
    assert not sides[0] & sides[1]
    assert len(sides[0] | sides[1]) == 40
    assert 40 <= len(prepared.eval) <= 200  # 12 of 40 users expected
    with pytest.raises(DataError, match="names the column 'usr', which is in no row"):
        run(jsonl(tmp_path / "b.jsonl", *rows), eval=0.3, eval_group="usr")
    with pytest.raises(DataError, match="only one value of user"):
        run(jsonl(tmp_path / "c.jsonl", *({**row, "user": 1} for row in rows[:5])), eval=0.3, eval_group="user")


def test_a_mixture_takes_rows_as_often_as_their_file_weighs(tmp_path: Path) -> None:
    files = {name: jsonl(tmp_path / f"{name}.jsonl", *(pair(f"{name}{n}") for n in range(200))) for name in "abc"}
    prepared = run({files["a"]: 2.0, files["b"]: 0.25, files["c"]: 1.0})
    asked = [text.split("user\n")[1].split("<")[0] for text in texts(prepared.train)]
    counts = {name: [asked.count(f"{name}{n}") for n in range(200)] for name in "abc"}
    assert set(counts["a"]) == {2}
    assert set(counts["c"]) == {1}
    assert set(counts["b"]) == {0, 1}
    assert 30 <= sum(counts["b"]) <= 70  # 50 expected; fixed by the hashes
    assert prepared.counts["rows_trained"] == len(asked)
    assert [file["rows_kept"] for file in prepared.counts["files"]] == [200, 200, 200]
    held = run({files["a"]: 3.0}, eval=0.2)
    assert not set(texts(held.train)) & set(texts(held.eval))
    assert len(set(texts(held.eval))) == len(texts(held.eval))  # a held-out row is asked once, whatever it weighs


def test_packs_hold_whole_rows(tmp_path: Path) -> None:
    rows = [pair("x" * (n % 30 + 1), "y" * (n % 17 + 1)) for n in range(120)]
    plain = run(jsonl(tmp_path / "a.jsonl", *rows), max_length=200)
    packed = run(jsonl(tmp_path / "a.jsonl", *rows), max_length=200, packing=True)
    assert isinstance(packed.train, Packs)
    assert sorted(row for pack in packed.train.packs for row in pack) == list(range(120))
    assert max(packed.train.lengths) <= 200
    assert packed.train.tokens == plain.train.tokens
    assert packed.train.trained_tokens == plain.train.trained_tokens
    fill = plain.train.tokens / (200 * len(packed.train))
    assert packed.counts["fill"] == pytest.approx(fill, abs=1e-4)
    assert fill > 0.95
    assert any(f"{fill:.1%} filled" in note for note in packed.notes)
    assert packed.train.packs == run(jsonl(tmp_path / "a.jsonl", *rows), max_length=200, packing=True).train.packs  # type: ignore[attr-defined]


def test_only_completions_know_their_prompt(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="rows of layout messages do not say where their prompt ends"):
        run(jsonl(tmp_path / "a.jsonl", chat("Hi", "Hello")), train_on="completion")


def test_renamed_columns_and_a_late_column_decide_the_layout(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "a.jsonl", *({"question": f"{n}?", "answer": "Yes."} for n in range(3)))
    named = run(file, columns={"prompt": "question", "completion": "answer"})
    assert texts(named.train)[0].endswith("user\n0?<|im_end|>\n<|im_start|>assistant\nYes.<|im_end|>\n")
    big = [{"prompt": "x" * 2000, "completion": "y"} for _ in range(700)]  # more than a chunk
    late = jsonl(tmp_path / "b.jsonl", *big, {**chat("Hi", "Hello"), "prompt": None})
    with pytest.raises(DataError, match="fit more than one layout"):
        run(late, max_length=4096)


# -------------------------------------------------------------------------------------------------------------- cache


def entries() -> list[Path]:
    return sorted((Path(os.environ["FINETUNE_CACHE"]) / "data").glob("*/rows.arrow"))


def test_the_same_rows_are_prepared_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = jsonl(tmp_path / "a.jsonl", pair("One?", "1"), pair("Two?", 2), pair("Three?", "3"))
    first = run(file, on_bad_row="skip")
    assert len(entries()) == 1

    def refuse(*_: Any) -> Any:
        raise AssertionError("the rows were read again")

    with monkeypatch.context() as patch:
        patch.setattr("finetune.data.encode_chunks", refuse)
        second = run(file, on_bad_row="skip")
    assert list(second.train) == list(first.train)
    assert second.counts == first.counts
    assert second.train.place(1) == f"{file}:3"
    assert any("come from" in note for note in second.notes)


def test_a_changed_byte_field_or_template_means_new_rows(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "a.jsonl", pair("One?", "1"))
    run(file)
    for change in ({"system": "Be brief."}, {"max_length": 512}, {"train_on": "all"}, {"limit": 1}):
        before = len(entries())
        run(file, **change)
        assert len(entries()) == before + 1
    run(file, tiny_tokenizer("qwen2_5"))
    Path(file).write_text(Path(file).read_text().replace("One", "Ore"))
    assert "Ore?" in texts(run(file).train)[0]
    assert len(entries()) == 7
    run(file, eval="none", packing=True)  # made from the same rows
    assert len(entries()) == 7


def test_a_refused_file_leaves_nothing_behind(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "a.jsonl", pair("One?", "1"), pair("Two?", 2))
    with pytest.raises(DataError):
        run(file)
    left = [path for path in (Path(os.environ["FINETUNE_CACHE"]) / "data").iterdir() if path.suffix != ".lock"]
    assert left == []


def test_a_killed_preparation_leaves_no_half_rows(tmp_path: Path) -> None:
    """The process is killed while it writes; the next one starts anew and is right."""
    file = jsonl(tmp_path / "a.jsonl", *(pair(f"Question {n}?" + "x" * 500, f"{n}") for n in range(3000)))
    script = (
        "import os, signal\n"
        "from finetune import store\n"
        "from tests.test_data import run\n"
        "write = store.Writer.write\n"
        "def die(self, rows):\n"
        "    write(self, rows)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "store.Writer.write = die\n"
        f"run({file!r}, max_length=4096)\n"
    )
    killed = subprocess.run([sys.executable, "-c", script], cwd=Path(__file__).parents[1], timeout=120, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert entries() != []
    assert list((Path(os.environ["FINETUNE_CACHE"]) / "data").glob("*/about.json")) == []
    assert len(run(file, max_length=4096).train) == 3000
    assert [path.parent.suffix for path in entries()] == [""]


def test_several_processes_make_the_same_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dice = random.Random(2)
    rows = [pair("x" * dice.randrange(1, 3000), f"{n}") if n % 50 else pair("x", n) for n in range(400)]
    file = jsonl(tmp_path / "a.jsonl", *rows)
    alone = run(file, max_length=4096, on_bad_row="skip", limit=399)
    monkeypatch.setattr("finetune.encoding.WORTH_IT", 1)
    monkeypatch.setattr("finetune.data.files.chunks", partial(files.chunks, size=1 << 16))
    together = run(file, max_length=4096, on_bad_row="skip", limit=399, eval_group="prompt")
    assert list(together.train) == list(alone.train)
    assert together.counts == alone.counts
    assert together.counts["rows_bad"] == {"not text": 8}
    assert together.counts["bad_rows"][1].startswith(f"{file}:51: ")


def test_the_cold_half_stays_cold() -> None:
    script = (
        "import sys; import finetune.formats, finetune.chat, finetune.data; "
        "hot = {'torch', 'transformers', 'datasets', 'trl', 'peft', 'pyarrow', 'jinja2'} & set(sys.modules); "
        "assert not hot, hot"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=Path(__file__).parents[1])


def test_every_module_that_decides_what_a_row_becomes_is_in_the_key() -> None:
    """What `encoding` and `data` import of this package, directly or not, down to what a recipe is."""
    import ast

    from finetune import data_cache

    root = Path(data_cache.__file__).parent
    deciders: set[str] = set()
    waiting = ["data", "encoding"]
    while waiting:
        name = waiting.pop()
        if name in deciders:
            continue
        deciders.add(name)
        for node in ast.walk(ast.parse((root / f"{name}.py").read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module == "finetune":
                waiting += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("finetune."):
                waiting.append(str(node.module).split(".")[1])
    aside = {
        "errors",
        "faults",
        "strict_yaml",
        "recipe",
        "data_cache",
        "embedded",
        "gguf_blocks",
        "packing",
        "home_intents",
        "home_words",
    }
    assert set(data_cache._MAKERS) == deciders - aside
