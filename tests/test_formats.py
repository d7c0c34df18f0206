"""Rows -> messages: right values by hand, and a reason for every refusal."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finetune.errors import DataError
from finetune.formats import BadRow, Conversation, Message, check_columns, detect, renamed, to_conversation

USER = {"role": "user", "content": "Hi"}
REPLY = {"role": "assistant", "content": "Hello."}


def to_messages(row: Any, fmt: str, system: str | None = None) -> list[Message]:
    return to_conversation(row, fmt, system).messages


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


# -------------------------------------------------------------------------------------------------- tools and marks

CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Ulm", "days": [1, 2]}}}
ASKS = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": "12 degrees", "tool_call_id": "c1", "name": "weather"}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"city": {"type": "string"}}}}


def said(*turns: Any, **row: Any) -> Conversation:
    return to_conversation({"messages": list(turns), **row}, "messages")


def refusal(*turns: Any, **row: Any) -> BadRow:
    with pytest.raises(BadRow) as error:
        said(*turns, **row)
    return error.value


def test_calls_and_results_by_hand() -> None:
    talk = [{"role": "system", "content": "S"}, USER, ASKS, RESULT, RESULT, ASKS, RESULT, REPLY, USER, REPLY]
    assert said(*talk, tools=[TOOL]) == Conversation(talk, [TOOL])  # type: ignore[arg-type]
    assert said(USER, ASKS) == Conversation([USER, ASKS], None)  # type: ignore[list-item]
    with_text = {**ASKS, "content": "Let me look."}
    assert said(USER, with_text, RESULT, REPLY).messages[1] == with_text


@pytest.mark.parametrize(
    "written",
    [
        {**ASKS, "content": None},
        {"role": "assistant", "tool_calls": [CALL]},
        {**ASKS, "content": " "},
        {**ASKS, "tool_calls": [{**CALL, "index": 0}]},
        {**ASKS, "tool_calls": [{"id": "c1", "name": "weather", "arguments": {"city": "Ulm", "days": [1, 2]}}]},
        {**ASKS, "tool_calls": [{**CALL, "type": None, "function": {**CALL["function"]}}]},  # type: ignore[dict-item]
        {
            **ASKS,
            "tool_calls": [
                {"id": "c1", "function": {"name": "weather", "arguments": '{"city": "Ulm", "days": [1, 2]}'}}
            ],
        },
    ],
)
def test_one_call_in_many_spellings(written: dict[str, Any]) -> None:
    assert said(USER, written, RESULT, REPLY).messages == [USER, ASKS, RESULT, REPLY]


@pytest.mark.parametrize("given", [None, "", " ", {}, "{}"])
def test_a_call_without_arguments(given: Any) -> None:
    call = {"type": "function", "function": {"name": "now", "arguments": given}}
    (_, asked) = said(USER, {"role": "assistant", "tool_calls": [call]}).messages
    assert asked["tool_calls"] == [{"type": "function", "function": {"name": "now", "arguments": {}}}]


def test_sharegpt_calls() -> None:
    talk = [
        {"from": "human", "value": "Hi"},
        {"from": "function_call", "value": '{"name": "weather", "arguments": {"city": "Ulm", "days": [1, 2]}}'},
        {"from": "observation", "value": "12 degrees"},
        {"from": "gpt", "value": "Hello."},
    ]
    tools = '[{"name": "weather", "parameters": {"city": {"type": "string"}}}]'
    found = to_conversation({"conversations": talk, "tools": tools}, "messages")
    call = {name: value for name, value in CALL.items() if name != "id"}
    assert found.messages == [USER, {**ASKS, "tool_calls": [call]}, {"role": "tool", "content": "12 degrees"}, REPLY]
    assert found.tools == [TOOL]
    talk[1]["value"] = "{'name': 'weather'}"
    with pytest.raises(BadRow, match="text that should be JSON: not JSON: Expecting property name"):
        to_conversation({"conversations": talk}, "messages")


@pytest.mark.parametrize("tools", [None, "", " ", [], "[]", "null"])
def test_no_tools_in_many_spellings(tools: Any) -> None:
    assert said(USER, REPLY, tools=tools) == Conversation([USER, REPLY], None)  # type: ignore[list-item]


def called(**function: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": function}]}


BAD_TOOLS = [
    ([USER, RESULT, REPLY], {}, "a tool's result stands after the user and answers no call", "order of roles"),
    ([RESULT, REPLY], {}, "the tool speaks first", "order of roles"),
    ([USER, REPLY, RESULT, REPLY], {}, "after the assistant and answers no call", "order of roles"),
    ([USER, ASKS, REPLY], {}, "the assistant calls a tool and the assistant follows, not the", "order of roles"),
    ([USER, ASKS, USER, REPLY], {}, "the assistant calls a tool and the user follows", "order of roles"),
    ([USER, ASKS, RESULT, USER, REPLY], {}, "the user follows a tool's result", "order of roles"),
    ([USER, ASKS, RESULT], {}, "the last message is a tool's result and has no reply", "no reply"),
    ([USER, ASKS, {**RESULT, "tool_call_id": "c9"}, REPLY], {}, "answers call 'c9', which nobody made", "tool call"),
    ([USER, ASKS, {**RESULT, "content": {"t": 12}}, REPLY], {}, "holds the object", "not text"),
    ([USER, ASKS, {**RESULT, "content": None}, REPLY], {}, "is missing or null", "empty"),
    ([{**USER, "tool_calls": [CALL]}, REPLY], {}, "which only an assistant can have", "not supported"),
    ([USER, {**REPLY, "function_call": {"name": "f"}}], {}, "write it as tool_calls", "not supported"),
    ([USER, {"role": "function", "content": "4"}, REPLY], {}, "role 'function'", "unknown role"),
    ([USER, called(name="f", arguments="{'a': 1}")], {}, "arguments is text that should be JSON", "not JSON"),
    ([USER, called(name="f", arguments='{"a": NaN}')], {}, "NaN is no number", "not strict JSON"),
    ([USER, called(name="f", arguments='{"a": 1, "a": 2}')], {}, "the key 'a' stands twice", "not strict JSON"),
    ([USER, called(name="f", arguments="[1]")], {}, "arguments holds the list", "tool call"),
    ([USER, called(name="f", arguments=0)], {}, "arguments holds the number 0", "tool call"),
    ([USER, called(name="f", arguments=5)], {}, "arguments holds the number 5", "tool call"),
    ([USER, called(name="f", arguments={"a": float("inf")})], {}, "cannot be written as JSON", "tool call"),
    ([USER, called(name="f", arguments={"a": b"x"})], {}, "cannot be written as JSON", "tool call"),
    ([USER, called(arguments={})], {}, "names no function", "tool call"),
    ([USER, called(name=" ")], {}, "names no function", "tool call"),
    ([USER, {**ASKS, "tool_calls": "f()"}], {}, "is 'f()', not an object", "tool call"),
    ([USER, {**ASKS, "tool_calls": [{"type": "custom", "custom": {}}]}], {}, "is of type 'custom'", "tool call"),
    ([USER, REPLY], {"tools": "def f(): pass"}, "column 'tools' is text that should be JSON", "not JSON"),
    ([USER, REPLY], {"tools": {"name": "f"}}, "not a list of functions", "tools"),
    ([USER, REPLY], {"tools": ["f"]}, r"tools[0] is 'f', not an object", "tools"),
    ([USER, REPLY], {"tools": [{"type": "function"}]}, "names no function", "tools"),
    ([USER, REPLY], {"functions": [{"name": "f"}]}, "'functions' is filled and would be lost", "not supported"),
    ([USER, REPLY], {"images": ["x.png"]}, "'images' is filled and would be lost", "not supported"),
    ([{"role": "developer", "content": "S"}, USER, REPLY], {}, "'developer'; write system", "unknown role"),
    ([USER, {**REPLY, "train": "no"}], {}, "train holds 'no', not true or false", "not true or false"),
    ([USER, {**REPLY, "train": 0}], {}, "train holds the number 0, not true or false", "not true or false"),
    ([USER, {**REPLY, "weight": 0.5}], {}, "weight holds the number 0.5, not 0 or 1", "not true or false"),
    ([USER, {**REPLY, "weight": True}], {}, "weight holds true, not 0 or 1", "not true or false"),
    ([USER, {**REPLY, "weight": 1, "train": False}], {}, "contradict each other", "not true or false"),
    ([{**USER, "train": True}, REPLY], {}, "only the assistant's messages are", "not supported"),
    ([USER, {**REPLY, "train": False}], {}, "every assistant message is marked as not", "no reply"),
    ([USER, {**ASKS, "weight": 0}], {}, "every assistant message is marked as not", "no reply"),
    ([USER, {**REPLY, "thinking": 5}], {}, "thinking holds the number 5, not text", "not text"),
    ([USER, {**REPLY, "thinking": "a", "reasoning_content": "b"}], {}, "has both", "not supported"),
    ([{**USER, "thinking": "a"}, REPLY], {}, "which only an assistant can have", "not supported"),
    ([USER, {**REPLY, "content": "a\0b"}], {}, "holds a NUL character", "NUL character"),
    (
        [{**USER, "content": [{"type": "image_url", "image_url": {}}]}, REPLY],
        {},
        "of type 'image_url'",
        "not supported",
    ),
    ([{**USER, "content": [{"type": "text", "text": 5}]}, REPLY], {}, "holds the number 5, not text", "not text"),
    ([{**USER, "content": [{"type": "text", "text": " "}]}, REPLY], {}, "is blank", "empty"),
    ([{**USER, "content": []}, REPLY], {}, "holds the list [], not text", "not text"),
]


@pytest.mark.parametrize(("turns", "row", "reason", "kind"), BAD_TOOLS)
def test_what_is_refused_has_a_reason_and_a_kind(turns: list[Any], row: Any, reason: str, kind: str) -> None:
    error = refusal(*turns, **row)
    assert reason in error.reason
    assert error.kind == kind


def test_marks_and_thoughts_are_kept() -> None:
    row = [USER, {**REPLY, "weight": 0}, USER, {**REPLY, "weight": 1.0}, USER, {**REPLY, "train": False}, USER, REPLY]
    marks = [message.get("train") for message in said(*row).messages if message["role"] == "assistant"]
    assert marks == [False, True, False, None]
    for name in ("reasoning_content", "thinking"):
        assert said(USER, {**REPLY, name: "Hm."}).messages == [USER, {**REPLY, "reasoning_content": "Hm."}]
        assert said(USER, {**REPLY, name: " "}).messages == [USER, REPLY]
    assert said({**USER, "train": False, "weight": 0}, REPLY).messages == [USER, REPLY]


def test_parts_of_text_are_one_text() -> None:
    parts = [{"type": "text", "text": "H"}, {"type": "text", "text": "i", "image_url": None}]
    assert said({**USER, "content": parts}, REPLY).messages == [USER, REPLY]


def test_tools_stand_in_every_layout_but_text() -> None:
    assert to_conversation({"prompt": "Hi", "completion": [ASKS], "tools": [TOOL]}, "prompt-completion") == (
        [USER, ASKS],
        [TOOL],
    )
    assert to_conversation({"instruction": "Hi", "output": "Hello.", "tools": "[]"}, "alpaca") == (
        [USER, REPLY],
        None,
    )
    with pytest.raises(BadRow, match="plain text calls none"):
        to_conversation({"text": "x", "tools": [TOOL]}, "text")
    earlier = {"prompt": [USER, ASKS, RESULT, REPLY, USER], "completion": [REPLY]}
    assert [m.get("train") for m in to_conversation(earlier, "prompt-completion").messages] == [
        None, False, None, False, None, None,
    ]  # fmt: skip


ENTRIES = st.dictionaries(
    st.sampled_from(
        ["role", "content", "from", "value", "tool_calls", "tool_call_id", "train", "weight", "thinking", "name"]
    ),
    st.one_of(
        st.sampled_from(["user", "assistant", "tool", "system", "human", "gpt", "function_call", "", "{}"]),
        st.none(), st.booleans(), st.integers(-1, 2), st.text(max_size=3), st.just([CALL]), st.just(CALL),
    ),
)  # fmt: skip


@given(st.lists(ENTRIES, max_size=5), st.sampled_from([None, "[]", [TOOL], "x", 5]))
def test_anything_is_a_conversation_or_a_verdict(entries: list[dict[str, Any]], tools: Any) -> None:
    try:
        found = to_conversation({"messages": entries, "tools": tools}, "messages")
    except BadRow:
        return
    assert len(found.messages) == len(entries)
    for message, entry in zip(found.messages, entries, strict=True):
        assert message["role"] in ("system", "user", "assistant", "tool")
        written = entry["content"] if "role" in entry else entry["value"]
        assert message["content"] == written or message["tool_calls"]


# ------------------------------------------------------------------------------------------------- names of columns


@pytest.mark.parametrize(
    ("columns", "line"),
    [
        (["question", "answer"], "{prompt: question, completion: answer}"),
        (["id", "query", "response"], "{prompt: query, completion: response}"),
        (["instruction", "response"], "{output: response}"),
        (["instruction", "context", "response"], "{output: response, input: context}"),
        (["input", "output"], "{prompt: input, completion: output}"),
        (["prompt", "response"], "{completion: response}"),
        (["source", "target"], "{prompt: source, completion: target}"),
        (["Question", "Answer"], "{prompt: Question, completion: Answer}"),
        (["conversation"], "{messages: conversation}"),
        (["content", "url"], "{text: content}"),
        (["promt", "completion"], "{prompt: promt}"),
        ([" prompt", "completion"], '{prompt: " prompt"}'),
        (["User: says", "Assistant"], "{prompt: question, completion: answer}"),
    ],
)
def test_detect_gives_the_line_that_is_missing(columns: list[str], line: str) -> None:
    with pytest.raises(DataError) as error:
        detect(columns)
    assert f"data.columns: {line}." in error.value.hint


@given(st.lists(st.text(min_size=1, max_size=8), unique=True), st.data())
def test_the_line_given_is_right(others: list[str], data: Any) -> None:
    """Whatever else is there, the suggestion is YAML that makes the columns fit."""
    from finetune import strict_yaml

    names = [*others, *data.draw(st.sampled_from([("question", "answer"), ("Input", "Output"), ("chat",)]))]
    try:
        detect(names)
    except DataError as error:
        if "Set data.columns" in error.hint:
            columns = strict_yaml.parse(error.hint.removeprefix("Set data.").removesuffix(".")).value["columns"]
            assert detect(names, columns)


def test_columns_under_our_names() -> None:
    columns = {"prompt": "question", "completion": "answer"}
    assert detect(["question", "answer", "id"], columns) == ("prompt-completion", "columns prompt and completion")
    assert detect(["question", "answer", "text"], {**columns, "system": "text"})[0] == "prompt-completion"
    check_columns(["question", "answer"], "prompt-completion", columns)
    row = renamed({"question": "Hi", "answer": "Hello.", "id": 5}, columns)
    assert row == {"id": 5, "prompt": "Hi", "completion": "Hello."}
    assert to_messages(row, "prompt-completion") == [USER, REPLY]
    swapped = renamed({"input": "a", "output": "b"}, {"input": "output", "output": "input"})
    assert swapped == {"input": "b", "output": "a"}
    assert renamed({"prompt": "a"}, {"prompt": "prompt"}) == {"prompt": "a"}
    assert renamed({"a": "x"}, {"prompt": "a", "completion": "a"}) == {"prompt": "x", "completion": "x"}


def test_names_inside_messages() -> None:
    columns = {"messages": "talk", "role": "who", "content": "what"}
    said = [{"who": "user", "what": "Hi"}, {"who": "assistant", "what": "Hello."}]
    row = renamed({"talk": said}, columns)
    assert to_messages(row, "messages") == [USER, REPLY]
    assert said[0] == {"who": "user", "what": "Hi"}  # the row that came in is as it was
    assert detect(["talk"], columns) == ("messages", "column messages")
    assert to_messages(renamed({"prompt": said[:1], "completion": "Hello."}, columns), "prompt-completion")


@pytest.mark.parametrize("empty", [None, "", " "])
def test_a_column_that_is_there_twice(empty: Any) -> None:
    columns = {"completion": "answer"}
    with pytest.raises(BadRow, match="'answer' is to be read as 'completion', and both are filled") as error:
        renamed({"prompt": "a", "completion": "b", "answer": "c"}, columns)
    assert error.value.kind == "two columns for one"
    for row, kept in [({"completion": "b", "answer": empty}, "b"), ({"completion": empty, "answer": "c"}, "c")]:
        assert renamed(row, columns) == {"completion": kept}


def test_a_renamed_column_must_be_there() -> None:
    for check in (detect, lambda names, columns: check_columns(names, "prompt-completion", columns)):
        with pytest.raises(DataError) as error:
            check(["questions", "answer"], {"prompt": "question", "completion": "answer"})
        assert "no row has a column 'question' (there are questions, answer)" in error.value.what
        assert error.value.hint == "Did you mean 'questions'?"
