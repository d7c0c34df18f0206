"""Files -> rows and counts: the same rows whatever the file looks like, and no row lost in silence."""

from __future__ import annotations

import hashlib
import json
import random
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from finetune.data import Prepared, Rows, prepare, read_messages, row_hash
from finetune.errors import DataError
from finetune.files import find
from finetune.recipe import Data, Recipe
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


def run(train: str | list[str], tokenizer: Any = TOKENIZER, **data: Any) -> Prepared:
    recipe = {"model": "any", "method": {"kind": "lora"}, "data": {"train": train, "format": "auto", **data}}
    return prepare(Recipe.model_validate(recipe), tokenizer)


def texts(rows: Rows | None, tokenizer: Any = TOKENIZER) -> list[str]:
    assert rows is not None
    return [tokenizer.decode(row.input_ids) for row in rows]


def test_three_rows_by_hand(tmp_path: Path) -> None:
    rows = [{"text": "the"}, {"text": "Hello the"}, {"text": "a"}]
    file = Path(jsonl(tmp_path / "a.jsonl", *rows))
    prepared = run(str(file), BASE)
    assert texts(prepared.train, BASE) == ["<s>the</s>", "<s>Hello the</s>", "<s>a</s>"]
    assert [len(row.input_ids) for row in prepared.train] == [3, 4, 3]
    assert prepared.train.lengths == [3, 4, 3]
    assert prepared.train.labels == prepared.train.input_ids
    assert prepared.eval is None
    expected = {
        "format": "text",
        "format_reason": "column text",
        "files": [{"name": str(file), "sha256": hashlib.sha256(file.read_bytes()).hexdigest()}],
        "rows_read": 3,
        "rows_trained": 3,
        "rows_bad": {},
        "rows_overlong": 0,
        "rows_dropped": 0,
        "rows_cut": 0,
        "tokens_cut": 0,
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
    assert plain.train.input_ids == other.train.input_ids
    assert plain.train.labels == other.train.labels
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
    messages = read_messages(str(file), Data(train="x", on_bad_row="skip"))
    assert [[turn["content"] for turn in talk] for talk in messages] == [
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
    assert len(read_messages(str(file), Data(train="x"))[0][1]["content"]) == 200_000


def test_parquet(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [chat("Hi", "Hello"), {"messages": [{"role": "user", "content": "Hi"}]}]
    rows[0]["messages"][0]["name"] = None
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="a.parquet:row 2: there is no assistant message"):
        run(str(tmp_path / "a.parquet"))
    prepared = run(str(tmp_path / "a.parquet"), on_bad_row="skip")
    assert prepared.train.input_ids == run(jsonl(tmp_path / "a.jsonl", chat("Hi", "Hello"))).train.input_ids
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
        (b'{"prompt": ' + DEEP.encode(), "not JSON: "),
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
    assert (dropped["tokens"], dropped["tokens_dropped"], dropped["longest"]) == (5 + 32, 52, 32)
    assert dropped["longest_read"] == 52
    cut = run(file, BASE, max_length=32, overlong="truncate-end")
    assert cut.train.lengths == [5, 32, 32]
    assert (cut.counts["rows_cut"], cut.counts["tokens_cut"], cut.counts["rows_dropped"]) == (1, 20, 0)
    assert texts(cut.train, BASE)[2] == "<s>" + "a" * 31


def test_a_row_whose_reply_is_cut_away_is_dropped(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "a.jsonl", pair("x" * 200, "lost"), pair("Hi", "kept"))
    whole = run(file)
    fits = whole.train.lengths[1]
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
    expected = hashlib.sha256(b'[{"content":"H\\u00e9","role":"user"}]').hexdigest()
    assert row_hash([{"role": "user", "content": "Hé"}]) == expected


def test_read_messages(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "a.jsonl", pair("One?", "1"), pair("Two?", 2))
    data = Data(train="x", system="Be brief.", limit=1)
    with pytest.raises(DataError, match="a.jsonl:2"):
        read_messages(file, data)
    skipping = data.model_copy(update={"on_bad_row": "skip"})
    assert read_messages(file, skipping) == [
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


def test_a_hub_data_set(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load_dataset(name: str, split: str) -> list[dict[str, Any]]:
        asked.append((name, split))
        if name == "nobody/nothing":
            raise ConnectionError("Couldn't reach the Hub\nand more")
        return [pair("One?", "1"), pair("Two?", 2)]

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    prepared = run("some/pairs:test", on_bad_row="skip")
    assert len(prepared.train) == 1
    assert prepared.counts["files"] == [{"name": "some/pairs:test", "sha256": None}]
    assert prepared.counts["bad_rows"][0].startswith("some/pairs:test:row 2: column 'completion'")
    with pytest.raises(DataError) as error:
        run("nobody/nothing")
    assert "There is no file nobody/nothing" in error.value.what
    assert "Couldn't reach the Hub." in error.value.what
    assert "and more" not in error.value.what
    assert set(asked) == {("some/pairs", "test"), ("nobody/nothing", "train")}


# -------------------------------------------------------------------------------------------------------------- bones


def test_rows_come_back_as_they_went_in() -> None:
    from finetune.chat import Encoded

    rows = Rows()
    for row in (Encoded([1, 2, 3], [-100, 2, 3]), Encoded([4], [4]), Encoded([5, 6], [-100, -100])):
        rows.append(row)
    assert list(rows) == [rows[0], rows[1], rows[-1]]
    assert rows.input_ids == [[1, 2, 3], [4], [5, 6]]
    assert rows.labels == [[-100, 2, 3], [4], [-100, -100]]
    assert (rows.lengths, rows.tokens, rows.trained_tokens) == ([3, 1, 2], 6, 2)
    assert list(rows.take([2, 0])) == [rows[2], rows[0]]
    with pytest.raises(IndexError):
        rows[3]


def test_the_cold_half_stays_cold() -> None:
    import subprocess

    script = (
        "import sys; import finetune.formats, finetune.chat, finetune.data; "
        "hot = {'torch', 'transformers', 'datasets', 'trl', 'peft', 'pyarrow', 'jinja2'} & set(sys.modules); "
        "assert not hot, hot"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=Path(__file__).parents[1])
