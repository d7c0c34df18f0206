"""Rows -> messages: right values by hand, and a reason for every refusal."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finetune.errors import DataError
from finetune.formats import BadRow, check_columns, detect, to_messages

USER = {"role": "user", "content": "Hi"}
REPLY = {"role": "assistant", "content": "Hello."}


@pytest.mark.parametrize(
    ("columns", "layout", "reason"),
    [
        (["messages", "id"], "messages", "column messages"),
        (["conversations"], "messages", "column conversations"),
        (["completion", "prompt", "system"], "prompt-completion", "columns prompt and completion"),
        (["instruction", "output"], "alpaca", "columns instruction and output"),
        (["instruction", "input", "output"], "alpaca", "columns instruction and output"),
        (["text"], "text", "column text"),
        (["prompt", "messages"], "messages", "column messages"),
    ],
)
def test_detect(columns: list[str], layout: str, reason: str) -> None:
    assert detect(columns) == (layout, reason)


@pytest.mark.parametrize(
    ("columns", "named"),
    [
        (["instruction", "output", "text"], ["alpaca", "text"]),
        (["messages", "prompt", "completion"], ["messages", "prompt-completion"]),
        (["messages", "conversations"], ["column messages", "column conversations"]),
        (["question", "answer"], ["question", "answer"]),
        ([], ["(none)"]),
    ],
)
def test_detect_names_what_is_unclear(columns: list[str], named: list[str]) -> None:
    with pytest.raises(DataError) as error:
        detect(columns)
    assert all(name in error.value.what for name in named)
    assert error.value.hint


def test_a_layout_set_by_hand_needs_its_columns() -> None:
    check_columns(["conversations"], "messages")
    with pytest.raises(DataError, match="completion is in no row"):
        check_columns(["prompt", "answer"], "prompt-completion")


@pytest.mark.parametrize("row", [{}, {"input": None}, {"input": ""}, {"input": " \n"}])
def test_absent_null_and_empty_input_are_the_same_prompt(row: dict[str, Any]) -> None:
    assert to_messages({"instruction": "Name a tree", "output": "Oak", **row}, "alpaca") == [
        {"role": "user", "content": "Name a tree"},
        {"role": "assistant", "content": "Oak"},
    ]


def test_filled_input_follows_the_instruction() -> None:
    user, reply = to_messages({"instruction": "Double it", "input": "4", "output": "8"}, "alpaca")
    assert (user["content"], reply["content"]) == ("Double it\n4", "8")


@pytest.mark.parametrize("text", ["007", "null", "true", "[1]", '{"a": 3, "b": null}', " 2.50 ", "N/A", "\ufeffx"])
def test_text_stays_the_very_text(text: str) -> None:
    assert to_messages({"prompt": text, "completion": text}, "prompt-completion") == [
        {"role": "user", "content": text},
        {"role": "assistant", "content": text},
    ]
    assert to_messages({"text": text}, "text") == [{"role": "text", "content": text}]


@given(st.text(), st.one_of(st.none(), st.text()))
def test_the_word_none_is_never_made_up(instruction: str, given_input: str | None) -> None:
    try:
        user, _ = to_messages({"instruction": instruction, "input": given_input, "output": "y"}, "alpaca")
    except BadRow:
        assert not instruction.strip() or "\0" in instruction + (given_input or "")
    else:
        assert user["content"].startswith(instruction)
        assert user["content"].replace(instruction, "", 1).strip() in ("", (given_input or "").strip())


def test_sharegpt_names_are_mapped_only_in_their_own_layout() -> None:
    said = [{"from": "system", "value": "S"}, {"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello."}]
    assert to_messages({"conversations": said}, "messages") == [{"role": "system", "content": "S"}, USER, REPLY]
    with pytest.raises(BadRow, match=r"messages\[0\] has the role 'human'"):
        to_messages({"messages": [{"role": "human", "content": "Hi"}, REPLY]}, "messages")


def test_system_from_column_recipe_or_message() -> None:
    row = {"prompt": "Hi", "completion": "Hello."}
    system = {"role": "system", "content": "Be brief."}
    assert to_messages({**row, "system": "Be brief."}, "prompt-completion", "Other.") == [system, USER, REPLY]
    for empty in (None, "", " "):
        assert to_messages({**row, "system": empty}, "prompt-completion", "Be brief.") == [system, USER, REPLY]
        assert to_messages({**row, "system": empty}, "prompt-completion") == [USER, REPLY]
    assert to_messages({"messages": [system, USER, REPLY]}, "messages", "Other.") == [system, USER, REPLY]
    with pytest.raises(BadRow, match="also a filled column 'system'"):
        to_messages({"messages": [system, USER, REPLY], "system": "Other."}, "messages")
    with pytest.raises(BadRow, match="column 'system' holds the number 3"):
        to_messages({**row, "system": 3}, "prompt-completion")


def test_only_the_completion_of_message_lists_is_trained() -> None:
    again = {"role": "user", "content": "And?"}
    row = {"prompt": [USER, REPLY, again], "completion": [REPLY]}
    assert to_messages(row, "prompt-completion") == [USER, {**REPLY, "train": False}, again, REPLY]
    with pytest.raises(BadRow, match="two assistant messages"):
        to_messages({"prompt": [USER, REPLY], "completion": "More."}, "prompt-completion")


BAD_CHATS = [
    ([USER, USER, REPLY], "two user messages stand in a row", "order of roles"),
    ([USER, REPLY, REPLY], "two assistant messages stand in a row", "order of roles"),
    ([USER, REPLY, USER], "the last message is the user's and has no reply", "no reply"),
    ([USER, {"role": "system", "content": "S"}, REPLY], "a system message stands after", "order of roles"),
    ([REPLY, USER, REPLY], "the assistant speaks first", "order of roles"),
    ([USER], "there is no assistant message", "no reply"),
    ([{"role": "system", "content": "S"}], "there is no assistant message", "no reply"),
    ([], "column 'messages' is empty", "empty"),
    (None, "column 'messages' is missing or null", "empty"),
    ("Hi", "holds 'Hi', not a list of messages", "not a message list"),
    (["Hi"], r"messages\[0\] is 'Hi', not a message", "not a message list"),
    ([{"role": "human", "content": "Hi"}, REPLY], "role 'human'", "unknown role"),
    ([{"content": "Hi"}, REPLY], "role null", "unknown role"),
    ([USER, {"role": "tool", "content": "4"}, REPLY], "a tool's result stands after the user", "order of roles"),
    ([USER, {"role": "assistant", "content": None}], r"messages\[1\].content \(assistant\) is missing", "empty"),
    ([USER, {"role": "assistant", "content": "  "}], "is blank", "empty"),
    ([{"role": "user", "content": ""}, REPLY], "is empty", "empty"),
    ([USER, {"role": "assistant", "content": 4}], "holds the number 4, not text", "not text"),
    ([USER, {"role": "assistant", "content": True}], "holds true, not text", "not text"),
    ([USER, {"role": "assistant", "content": ["2"]}], r"holds the list \['2'\], not text", "not text"),
    ([USER, {"role": "assistant", "content": {"a": 1}}], "holds the object", "not text"),
    ([USER, {**REPLY, "tool_calls": [{"name": "f"}]}], "'tool_calls', which would be lost", "not supported"),
    ([USER, {**REPLY, "thinking": "Hm"}], "'reasoning_content', which would be lost", "not supported"),
    ([USER, {**REPLY, "weight": 0}], "every assistant message is marked as not to be trained", "no reply"),
]


@pytest.mark.parametrize(("said", "reason", "kind"), BAD_CHATS)
def test_a_bad_conversation_has_a_reason(said: Any, reason: str, kind: str) -> None:
    with pytest.raises(BadRow, match=reason) as error:
        to_messages({"messages": said}, "messages")
    assert error.value.kind == kind


@pytest.mark.parametrize(
    ("row", "layout", "reason"),
    [
        ({"prompt": 42, "completion": "x"}, "prompt-completion", "column 'prompt' holds the number 42"),
        ({"prompt": "x", "completion": 2.5}, "prompt-completion", "column 'completion' holds the number 2.5"),
        ({"prompt": "x", "completion": ["2", "3"]}, "prompt-completion", "'2', not a message"),
        ({"instruction": None, "output": "y"}, "alpaca", "column 'instruction' is missing or null"),
        ({"instruction": "x", "output": ""}, "alpaca", "column 'output' is empty"),
        ({"instruction": "x", "output": None}, "alpaca", "column 'output' is missing or null"),
        ({"instruction": "x", "input": 4, "output": "y"}, "alpaca", "column 'input' holds the number 4"),
        ({"instruction": "x", "output": "y", "history": [["a", "b"]]}, "alpaca", "'history' is filled"),
        ({"text": " \n"}, "text", "column 'text' is blank"),
        ({"text": None}, "text", "column 'text' is missing or null"),
        ({"prompt": "x", "completion": "y", "tools": [{"name": "f"}]}, "prompt-completion", "'tools' is filled"),
    ],
)
def test_a_bad_row_names_column_and_value(row: dict[str, Any], layout: str, reason: str) -> None:
    with pytest.raises(BadRow, match=reason):
        to_messages(row, layout)


def test_null_keys_that_columnar_files_add_are_absent() -> None:
    said = [{**USER, "tool_calls": None}, {**REPLY, "tool_calls": [], "name": None}]
    assert to_messages({"messages": said, "tools": None}, "messages") == [USER, REPLY]


def test_a_long_value_is_shown_short() -> None:
    with pytest.raises(BadRow) as error:
        to_messages({"text": list(range(1000))}, "text")
    assert len(error.value.reason) < 120
