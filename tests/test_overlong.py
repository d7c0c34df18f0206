"""What is left of a row that is too long: no reply is cut in silence, none is trained twice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from finetune import chat
from finetune.chat import Encoded
from finetune.formats import Message
from finetune.overlong import Fitted, fit, supervised
from tests.tiny import tiny_tokenizer

TOKENIZER = tiny_tokenizer("qwen2_5")
LONG = "one two three four five six seven eight nine ten"


def talk(*texts: str, system: str | None = None) -> list[Message]:
    first: list[Message] = [{"role": "system", "content": system}] if system else []
    return first + [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(texts)]


def encode(messages: Sequence[Message]) -> Encoded:
    return chat.encode(TOKENIZER, messages)


def fitted(messages: list[Message], policy: str, length: int) -> Fitted:
    return fit(encode(messages), messages, policy, length, encode, TOKENIZER)


def said(row: Encoded) -> str:
    return str(TOKENIZER.decode(row.input_ids))


def replies(rows: list[Encoded]) -> list[str]:
    """The trained stretches of rows, as text."""
    found: list[list[int]] = []
    for row in rows:
        before = -100
        for label in row.labels:
            if label != -100 and before == -100:
                found.append([])
            if label != -100:
                found[-1].append(label)
            before = label
    return [str(TOKENIZER.decode(ids)) for ids in found]


def test_dropped_rows_are_counted_whole() -> None:
    messages = talk(LONG, "Yes.")
    whole = encode(messages)
    assert fitted(messages, "drop", 20) == Fitted([], len(whole.input_ids), supervised(whole))


def test_an_end_that_is_cut_is_counted() -> None:
    messages = talk("Hi", LONG)
    whole = encode(messages)
    cut = fitted(messages, "truncate-end", len(whole.input_ids) - 10)
    assert cut.rows == [Encoded(whole.input_ids[:-10], whole.labels[:-10])]
    assert cut.lost == 10
    assert (
        cut.lost_trained == supervised(whole) - supervised(cut.rows[0]) == 9
    )  # the newline after the end is not trained
    assert fitted(talk(LONG, "Yes."), "truncate-end", 20).rows == []  # nothing of the reply would be left


def test_a_prompt_is_shortened_from_its_beginning_and_the_reply_stays_whole() -> None:
    messages = talk(LONG, "Yes.", system="Be brief.")
    whole = encode(messages)
    limit = len(whole.input_ids) - 12
    [row] = fitted(messages, "truncate-prompt", limit).rows
    assert len(row.input_ids) <= limit
    assert replies([row]) == ["Yes.<|im_end|>"]
    text = said(row)
    assert "Be brief." in text
    assert "one" not in text
    kept = text.partition("user\n")[2].partition("<|im_end|>")[0]
    assert LONG.endswith(kept)
    assert kept.split() == LONG.split()[-len(kept.split()) :]  # cut between words
    assert fitted(messages, "truncate-prompt", limit).lost_trained == 0


def test_the_oldest_user_turn_gives_first() -> None:
    messages = talk("alpha beta gamma delta", "A", "epsilon zeta", "B")
    [row] = fitted(messages, "truncate-prompt", len(encode(messages).input_ids) - 4).rows
    assert "epsilon zeta" in said(row)
    assert "alpha" not in said(row)
    assert replies([row]) == ["A<|im_end|>", "B<|im_end|>"]


def test_a_reply_that_does_not_fit_is_not_shortened() -> None:
    assert fitted(talk("Hi", LONG), "truncate-prompt", 20).rows == []


def test_a_conversation_is_split_between_exchanges_by_hand() -> None:
    messages = talk("a", "A", "b", "B", "c", "C", system="S")
    two = len(encode(messages[:5]).input_ids)
    result = fitted(messages, "split", two)
    assert [said(row) for row in result.rows] == [
        said(encode(messages[:5])),
        said(encode([messages[0], *messages[5:]])),
    ]
    assert replies(result.rows) == [f"{text}<|im_end|>" for text in "ABC"]
    assert result.lost_trained == 0


def test_an_exchange_too_long_by_itself_is_lost_and_counted() -> None:
    messages = talk("a", "A", "b", LONG, "c", "C")
    limit = len(encode(messages[:2]).input_ids) + 4
    result = fitted(messages, "split", limit)
    assert replies(result.rows) == ["A<|im_end|>", "C<|im_end|>"]
    assert result.lost_trained == supervised(encode(messages[2:4]))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12)), min_size=1, max_size=6), st.integers(40, 90))
def test_split_trains_every_reply_once_or_counts_it(sizes: list[tuple[int, int]], limit: int) -> None:
    texts = [
        f"{word * count} {number}"
        for number, pair in enumerate(sizes)
        for word, count in zip("xy", pair, strict=True)
    ]
    messages = talk(*texts)
    whole = encode(messages)
    if len(whole.input_ids) <= limit:
        return
    result = fitted(messages, "split", limit)
    assert all(len(row.input_ids) <= limit for row in result.rows)
    found = replies(result.rows)
    assert len(set(found)) == len(found)
    assert set(found) <= set(replies([whole]))
    assert sum(map(supervised, result.rows)) + result.lost_trained == supervised(whole)


@pytest.mark.parametrize("policy", ["split", "truncate-end"])
def test_a_document_is_split_anywhere_and_nothing_is_lost(policy: str) -> None:
    messages: list[Message] = [{"role": "text", "content": LONG}]
    whole = encode(messages)
    result = fitted(messages, policy, 7)
    ids = [token for row in result.rows for token in row.input_ids]
    assert ids == (whole.input_ids[: len(ids)] if policy == "split" else whole.input_ids[:7])
    assert all(len(row.input_ids) <= 7 for row in result.rows)
    lost = len(whole.input_ids) - len(ids)
    assert result.lost == lost
    assert lost <= 1 or policy == "truncate-end"  # a piece of a single token has nothing that predicts it


def test_a_document_has_no_prompt_to_shorten() -> None:
    document: Any = [{"role": "text", "content": LONG}]
    assert fitted(document, "truncate-prompt", 7).rows == []
