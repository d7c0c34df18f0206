"""What `finetune data` counts, by hand on small files, and what it says when training would stop."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from finetune.chat import IGNORE, Encoded
from finetune.data_report import Bin, Report, histogram, look
from finetune.data_rows import Taken, ask, percentiles, take
from finetune.duplicates import Pair, Prints, Side, question
from finetune.errors import DataError, InputError
from finetune.pieces import Speller, visible
from finetune.recipe import Recipe
from finetune.store import Rows
from tests.tiny import tiny_tokenizer

TOKENIZER = tiny_tokenizer("smollm2")
BASE = tiny_tokenizer("none")
LONG = "Hello the Hello the Hello the Hello the"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


def write(name: str, *rows: Any) -> str:
    lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
    Path(name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return name


def pair(question: str, answer: str) -> dict[str, str]:
    return {"prompt": question, "completion": answer}


def words(seed: int, count: int = 60) -> str:
    chance = random.Random(seed)
    return "".join(chance.choice("abcdefghijklmnopqrstuvwxyz ") for _ in range(count)).strip()


def taken(tokenizer: Any = TOKENIZER, batch_size: int = 2, evaluate: str | None = None, **data: Any) -> Taken:
    recipe = {
        "model": "any", "method": {"kind": "lora"}, "data": data, "train": {"batch_size": batch_size},
        "evaluate": {"data": evaluate} if evaluate else None,
    }  # fmt: skip
    return take(Recipe.model_validate(recipe), tokenizer)


def report(tokenizer: Any = TOKENIZER, **fields: Any) -> Report:
    return look(taken(tokenizer, **fields))


# -------------------------------------------------------------------------------------------------------- by hand


def test_five_rows_by_hand() -> None:
    texts = ["the", "Hello the", "a", "the", LONG]  # 1, 2, 1, 1 and 2 + 3 * 3 tokens between <s> and </s>
    found = report(BASE, train=write("a.jsonl", *({"text": text} for text in texts)))
    assert [len(row.input_ids) for row in found.taken.train.rows] == [3, 4, 3, 3, 13]
    document = found.document(first=2)
    json.dumps(document)
    expected = {
        "model": "any",
        "refusal": None,
        "rows": {"trained": 5, "held_out": 0},
        "tokens": 3 + 4 + 3 + 3 + 13,
        "trained_tokens": 2 + 3 + 2 + 2 + 12,  # nothing predicts a row's first token
        "trained_share": round(21 / 26, 4),
        "steps_per_epoch": 3,  # 5 rows, 2 a step
        "lengths": {"50": 3, "90": 13, "99": 13, "max": 13},
        "longer": 0,
        "leaks": [],
        "warnings": ["1 of 5 rows are exact copies, which weigh the more for it."],
    }
    assert {name: document[name] for name in expected} == expected
    assert [(part["start"], part["end"], part["rows"]) for part in document["histogram"]] == [
        (n, n, {3: 3, 4: 1, 13: 1}.get(n, 0)) for n in range(3, 14)
    ]
    assert (found.copies.exact, found.copies.most, found.copies.near) == (1, [(2, "a.jsonl:1", "a.jsonl:4")], 0)
    assert found.copies.marked == {3}
    assert [row["place"] for row in document["first"]] == ["a.jsonl:1", "a.jsonl:2"]
    assert document["first"][1]["pieces"] == [["<s>", 1], ["Hello", 1], [" the", 1], ["</s>", 1]]
    assert document["sources"][0]["trained"] == document["sources"][0]["rows_read"] == 5


def test_packed_rows_make_fewer_steps() -> None:
    file = write("a.jsonl", *({"text": LONG} for _ in range(9)))  # 13 tokens each
    assert report(BASE, train=file, max_length=40).steps == 5
    packed = report(BASE, train=file, max_length=40, packing=True)
    assert packed.steps == 2  # three rows a pack, two packs a step
    assert len(packed.taken.train) == 9


def test_percentiles_are_the_nearest_rank() -> None:
    assert percentiles(range(1, 101)) == {"50": 50, "90": 90, "99": 99, "max": 100}
    assert percentiles([7]) == {"50": 7, "90": 7, "99": 7, "max": 7}


def test_histogram() -> None:
    assert histogram([5], 100) == [Bin(5, 5, 1)]
    assert histogram([41, 60, 61, 187], 512) == [
        Bin(41 + 20 * n, 60 + 20 * n, rows) for n, rows in enumerate([2, 1, 0, 0, 0, 0, 0, 1])
    ]
    doubling = histogram([10] * 9 + [16, 17, 900], 2048)
    assert [(part.start, part.end, part.rows) for part in doubling] == [
        (9, 16, 10), (17, 32, 1), (33, 64, 0), (65, 128, 0), (129, 256, 0), (257, 512, 0), (513, 1024, 1),
    ]  # fmt: skip
    cut = histogram([10, 20, 30, 40], 25)
    assert [part.end for part in cut if part.end == 25] == [25]
    assert sum(part.rows for part in cut if part.start > 25) == 2
    for lengths in ([1], [1, 1, 2], [3, 3000], list(range(1, 500)), [1000] * 3, [8, 9, 4096]):
        for most in (8, 100, 4096):
            bins = histogram(lengths, most)
            assert sum(part.rows for part in bins) == len(lengths)
            assert all(one.end + 1 == other.start for one, other in zip(bins, bins[1:], strict=False))
            assert bins[0].start <= min(lengths)
            assert bins[-1].end >= max(lengths)


# ------------------------------------------------------------------------------------------------- copies and leaks


def test_copies_leave_out_what_all_rows_begin_with() -> None:
    """With a long system message all rows would be near copies of each other."""
    system = "You are a model and the user is the user " * 10
    rows = [{"system": system, **pair(words(n), words(n + 50))} for n in range(6)]
    other = [{**rows[0], "completion": words(90 + n, 200)} for n in range(2)]
    found = report(train=write("a.jsonl", *rows, *other))
    assert found.copies.exact == 0
    assert found.copies.near == 0
    assert TOKENIZER.decode(Prints.of(found.taken.train).start).endswith("<|im_start|>user\n")
    assert found.copies.replies == 3
    both = report(train=write("b.jsonl", *rows, {**rows[1], "completion": rows[1]["completion"] + "?"}))
    assert both.copies.near == 1
    assert both.copies.pairs[0] == Pair("b.jsonl:2", "b.jsonl:7", both.copies.pairs[0].similarity)
    assert 0.8 <= both.copies.pairs[0].similarity < 1


def test_rows_taken_twice_by_weight_are_no_copies() -> None:
    found = report(train={write("a.jsonl", pair("What?", "That"), pair("Who?", "Me")): 3})
    assert len(found.taken.train) == 6
    assert (found.copies.rows, found.copies.exact, found.copies.near) == (2, 0, 0)


def test_leaks_into_held_out_rows() -> None:
    base = [pair(words(n), words(n + 50)) for n in range(5)]
    nearly = {**base[2], "prompt": base[2]["prompt"] + "!"}
    held = write("held.jsonl", base[0], {**base[1], "completion": "Another"}, nearly, pair("New", "Not seen"))
    found = report(train=write("a.jsonl", *base), eval=held, evaluate=held)
    [evaluation, questions] = found.leaks
    assert (evaluation.name, evaluation.rows) == ("data.eval", 4)
    assert (evaluation.same, evaluation.question, evaluation.near, evaluation.leaked) == (1, 1, 1, 3)
    assert [(p.one, p.other) for p in evaluation.pairs] == [("held.jsonl:3", "a.jsonl:3")]
    assert (questions.name, questions.leaked) == ("evaluate.data", 3)
    assert [(p.one, p.other) for p in questions.pairs] == [("held.jsonl row 3", "a.jsonl:3")]
    assert found.warnings() == [
        sentence
        for name in ("data.eval", "evaluate.data")
        for sentence in (
            f"2 of 4 rows of {name} are trained too, in whole or in their question. That flatters every score; take "
            "them out of one side.",
            f"1 of 4 rows of {name} nearly equal a trained row.",
        )
    ]


def test_a_share_held_out_leaks_nothing_by_itself() -> None:
    rows = [pair(words(n), f"{n * n}") for n in range(60)]
    found = report(train=write("a.jsonl", *rows, *rows), eval=0.3)
    assert found.taken.held is not None
    assert [(leak.same, leak.question) for leak in found.leaks] == [(0, 0)]
    assert found.sources[0]["trained"] + found.sources[0]["held_out"] == 120
    assert found.sources[0]["held_out"] == len(found.taken.held) > 0


def test_evaluation_rows_that_cannot_be_read_are_a_note() -> None:
    found = report(train=write("a.jsonl", pair("What?", "That")), evaluate="gone.jsonl")
    assert found.leaks == []
    assert any("evaluate.data gone.jsonl: There is no file gone.jsonl." in note for note in found.notes)


def test_the_question_is_what_stands_before_the_first_trained_token() -> None:
    assert question(Encoded([5, 6, 7, 8], [IGNORE, IGNORE, 7, 8])) == 2
    assert question(Encoded([5, 6], [5, 6])) == question(Encoded([5], [IGNORE])) == 0
    assert Side("x", Rows.of([Encoded([1], [1])] * 2), "file").place(1) == "file row 2"


# ----------------------------------------------------------------------------------------------------------- warnings


def test_what_stands_out() -> None:
    rows = [pair("Hello", f'{{"a": {n}}}') for n in range(5)]
    said = report(train=write("a.jsonl", *rows)).warnings()
    assert said == ["All 5 replies begin with '{\"a\": ', 6 tokens."]
    assert report(train="a.jsonl", train_on="all").warnings() == []
    same = report(train=write("b.jsonl", *(pair(f"{n}", "Sorry.") for n in range(5)), pair("6", "Yes"))).warnings()
    assert same == ["5 of 6 rows have the same reply, 'Sorry.<|im_end|>'."]
    empty = report(train=write("c.jsonl", *(pair(f"{n}", "." * n) for n in range(1, 5)))).warnings()
    assert empty == ["4 of 4 replies hold no letter and no digit."]
    tail = report(train=write("d.jsonl", *(pair("a", f"{n}") for n in range(9)), pair("a", "z" * 2000))).warnings()
    assert any(line.startswith("The longest row has 2,0") for line in tail)
    share = report(train=write("e.jsonl", pair("q" * 2000, "a"))).warnings()
    assert any(line.startswith("Only 0.0") for line in share)
    assert all(line.count("  ") == 0 and line.endswith(".") for line in [*said, *same, *empty, *tail, *share])


def test_rows_without_an_end_are_counted() -> None:
    file = write("a.jsonl", pair("Hi", "x" * 99), pair("Hi", "y"))
    found = report(BASE, train=file, max_length=60, overlong="truncate-end")
    assert found.replies.endless == 1
    assert any("train no end token" in line for line in found.warnings())
    assert report(train=write("b.jsonl", pair("Hi", "x"), pair("Hi", "y"))).replies.endless == 0


# ------------------------------------------------------------------------------------------------ training would stop


def test_bad_rows_are_told_and_the_rest_is_shown() -> None:
    found = report(train=write("a.jsonl", pair("Hi", "Hello"), pair("Hi", ""), "not json", pair("a", "the")))
    assert len(found.taken.train) == 2
    assert found.taken.refusal is not None
    with pytest.raises(DataError) as error:
        found.taken.require_trainable()
    assert error.value.what == "Training would stop: 2 of 4 rows cannot be trained (1 empty, 1 not JSON)."
    assert error.value.hint == "Correct them, or set data.on_bad_row: skip to leave them out and count them."
    assert found.document()["counts"]["bad_rows"][0].startswith("a.jsonl:2: ")
    taken(train="a.jsonl", on_bad_row="skip").require_trainable()


def test_rows_that_are_too_long_are_in_the_histogram() -> None:
    found = report(BASE, train=write("a.jsonl", pair("Hi", "Hello"), pair("Hi", "x" * 99)), max_length=60)
    assert len(found.taken.train) == 2
    assert found.longer == 1
    assert sum(part.rows for part in found.histogram if part.start > 60) == 1
    with pytest.raises(
        DataError, match=r"Training would stop: 1 of 2 rows are longer than data.max_length 60 tokens"
    ):
        found.taken.require_trainable()
    assert found.shown(found.taken.train, 1).marks == ("long",)


def test_nothing_to_show_is_an_error() -> None:
    with pytest.raises(DataError, match="There is no file gone.jsonl"):
        taken(train="gone.jsonl")
    with pytest.raises(DataError, match="1 of 1 rows cannot be trained"):
        taken(train=write("a.jsonl", pair("Hi", "")))


# ------------------------------------------------------------------------------------------------------------ one row


def test_ask_for_a_row() -> None:
    file = write("a.jsonl", pair("Hi", "Hello"), pair("Hi", ""), "", pair("Hi", "x" * 99))
    rows = taken(BASE, train=file, on_bad_row="skip", max_length=60, overlong="drop")
    first, second, third = (ask(rows, number) for number in (1, 2, 3))
    length = len(rows.train.rows[0].input_ids)
    assert (first.place, first.verdict) == ("a.jsonl:1", f"trained, {length} tokens")
    assert [message["content"] for message in first.messages] == ["Hi", "Hello"]
    [shown] = first.shown
    assert "".join(piece.text for piece in shown.pieces if piece.trained) == " Hello</s>"
    assert shown.trained == 3
    json.dumps(first.document())
    assert (second.place, second.shown, second.raw) == ("a.jsonl:2", (), pair("Hi", ""))
    assert second.verdict.startswith("cannot be trained (empty): ")
    assert third.place == "a.jsonl:4"
    assert third.verdict.startswith("left out, ")
    assert third.verdict.endswith("longer than data.max_length 60 (data.overlong: drop)")
    with pytest.raises(InputError, match=r"There is no row 4; the training data has 3. Give --row 1 to --row 3."):
        ask(rows, 4)


def test_a_row_that_is_split_is_shown_in_all_its_parts() -> None:
    talk = [{"role": ("user", "assistant")[n % 2], "content": chr(97 + n) * 20} for n in range(6)]
    rows = taken(BASE, train=write("a.jsonl", {"messages": talk}), max_length=130, overlong="split")
    asked = ask(rows, 1)
    assert len(asked.shown) == len(rows.train) > 1


# ------------------------------------------------------------------------------------------------------------- pieces


@pytest.mark.parametrize("family", ["smollm2", "gemma", "llama3", "qwen3", "phi3"])
def test_pieces_together_are_the_text(family: str) -> None:
    tokenizer = tiny_tokenizer(family)
    speller = Speller(tokenizer)
    text = "Hello the naïve 日本 👩‍👩‍👧 \n\n  and\x00 \u202eabc"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    pieces = list(speller.pieces(ids, [IGNORE] * len(ids)))
    assert "".join(piece.text for piece in pieces) == text
    assert [number for piece in pieces for number in piece.ids] == ids
    assert any(len(piece.ids) > 1 for piece in pieces)
    assert not any(piece.special or piece.trained for piece in pieces)


def test_bytes_that_are_no_character_stay_single() -> None:
    speller = Speller(TOKENIZER)
    half = TOKENIZER("日", add_special_tokens=False)["input_ids"][:2]
    pieces = list(speller.pieces([*half, *half, TOKENIZER.eos_token_id], [1] * 5))
    assert [number for piece in pieces for number in piece.ids] == [*half, *half, TOKENIZER.eos_token_id]
    assert pieces[-1].special
    assert speller.has_letters(half[0])
    assert not speller.has_letters(TOKENIZER.eos_token_id)


def test_visible() -> None:
    assert visible("a\n\tb\x00\x1b[1m\x7f") == "a⏎\n⇥b␀␛[1m␡"
    assert visible("\u202e\u200b\x9b\ufeff") == "⟨U+202E⟩⟨U+200B⟩⟨U+009B⟩⟨U+FEFF⟩"
    assert visible("naïve 日本 عربي 👩‍👧") == "naïve 日本 عربي 👩‍👧"
