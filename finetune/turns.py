"""A list of messages as a file has it -> turns in an order that a model can learn, or a verdict.

    system?  user  ( assistant with tool_calls  tool+ )*  assistant  user ...                     the last one replies

    {"role": "assistant", "content": null, "tool_calls": [{"function": {"name": "f", "arguments": "{\\"a\\": 1}"}}]}
        -> {"role": "assistant", "content": "", "tool_calls": [{"type": "function",
                                                   "function": {"name": "f", "arguments": {"a": 1}}}]}
    {"from": "human", "value": "Hi"}  -> {"role": "user", "content": "Hi"}                         (ShareGPT layout)
    {..., "weight": 0}                -> {..., "train": False}                               (OpenAI's fine-tuning)

Absent, null and empty are one and the same: files with columns fill every key that another row has.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypedDict

from finetune import strict_json
from finetune.errors import DataError

ROLES = ("system", "user", "assistant", "tool")
_SHAREGPT = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system",
    "function_call": "assistant", "observation": "tool", "tool": "tool",
}  # fmt: skip
_THOUGHTS = ("reasoning_content", "thinking")


class _Said(TypedDict):
    role: str
    content: str


class Message(_Said, total=False):
    """One turn. `train: False` marks an assistant turn that is read and not learned."""

    tool_calls: list[dict[str, Any]]  # [{"type": "function", "function": {"name": ..., "arguments": {...}}}]
    tool_call_id: str
    name: str
    reasoning_content: str
    train: bool


class BadRow(DataError):
    """This row cannot be trained: `reason` in words, `kind` a short name to count by."""

    def __init__(self, reason: str, kind: str = "content") -> None:
        self.reason = reason
        self.kind = kind
        super().__init__(f"A row cannot be trained: {reason}.", "Correct the row, or set data.on_bad_row: skip.")

    def __reduce__(self) -> tuple[type[BadRow], tuple[str, str]]:
        """Verdicts travel between processes."""
        return BadRow, (self.reason, self.kind)


def said(value: Any, column: str) -> list[Message]:
    """The entries of a message list, each {role, content} or ShareGPT's {from, value}. Raises `BadRow`."""
    if value is None or value == []:
        raise BadRow(f"column '{column}' is {'empty' if value == [] else 'missing or null'}", "empty")
    if not isinstance(value, list):
        raise BadRow(f"column '{column}' holds {show(value)}, not a list of messages", "not a message list")
    return [_message(entry, f"{column}[{number}]") for number, entry in enumerate(value)]


def checked(turns: list[Message]) -> list[Message]:
    """The same turns if they stand in the order above and one reply is left to train. Raises `BadRow`."""
    talk = turns[1:] if turns[0]["role"] == "system" else turns
    roles = [message["role"] for message in talk]
    if "system" in roles:
        raise BadRow("a system message stands after the first place", "order of roles")
    if "assistant" not in roles:
        raise BadRow("there is no assistant message", "no reply")
    if roles[0] != "user":
        raise BadRow(f"the {roles[0]} speaks first", "order of roles")
    for before, after in zip(talk, talk[1:], strict=False):
        _check_pair(before, after)
    if roles[-1] == "user":
        raise BadRow("the last message is the user's and has no reply", "no reply")
    if roles[-1] == "tool":
        raise BadRow("the last message is a tool's result and has no reply", "no reply")
    if not any(message["role"] == "assistant" and message.get("train", True) for message in talk):
        raise BadRow("every assistant message is marked as not to be trained", "no reply")
    _check_ids(talk)
    return turns


def _check_pair(before: Message, after: Message) -> None:
    calls = bool(before.get("tool_calls"))
    if after["role"] == "tool":
        if before["role"] != "tool" and not calls:
            raise BadRow(f"a tool's result stands after the {before['role']} and answers no call", "order of roles")
    elif calls:
        raise BadRow(f"the assistant calls a tool and the {after['role']} follows, not the result", "order of roles")
    elif before["role"] == "tool" and after["role"] != "assistant":
        raise BadRow(f"the {after['role']} follows a tool's result, which nobody has used", "order of roles")
    elif before["role"] == after["role"]:
        raise BadRow(f"two {after['role']} messages stand in a row", "order of roles")


def _check_ids(talk: list[Message]) -> None:
    """A result that names its call must name one of the calls before it."""
    known: set[str] = set()
    for message in talk:
        if message["role"] == "assistant":
            known = {call["id"] for call in message.get("tool_calls", []) if "id" in call}
        elif known and message.get("tool_call_id", next(iter(known))) not in known:
            raise BadRow(f"a tool's result answers call '{message['tool_call_id']}', which nobody made", "tool call")


# ---------------------------------------------------------------------------------------------------- one message


def _message(entry: Any, where: str) -> Message:
    if not isinstance(entry, Mapping):
        raise BadRow(f"{where} is {show(entry)}, not a message", "not a message list")
    if filled(entry.get("function_call")):
        raise BadRow(f"{where} has 'function_call', which would be lost; write it as tool_calls", "not supported")
    sharegpt = "from" in entry and "role" not in entry
    spoken = entry.get("from" if sharegpt else "role")
    role = _SHAREGPT.get(spoken) if sharegpt and isinstance(spoken, str) else spoken
    if role not in ROLES:
        advice = "; write system" if spoken == "developer" else f"; known are {', '.join(ROLES)}"
        raise BadRow(f"{where} has the role {show(spoken)}{advice}", "unknown role")
    key = "value" if sharegpt else "content"
    content, place = entry.get(key), f"{where}.{key} ({spoken})"
    calls = entry.get("tool_calls")
    if sharegpt and spoken == "function_call":
        content, calls = None, _from_text(text(content, place), place)
    if role != "assistant":
        for name in ("tool_calls", *_THOUGHTS):
            if filled(entry.get(name)):
                raise BadRow(f"{where} has '{name}', which only an assistant can have", "not supported")
    message: Message = {"role": str(role), "content": ""}
    if filled(calls):
        message["tool_calls"] = _calls(calls, f"{where}.tool_calls")
    if "tool_calls" not in message or filled(content):
        message["content"] = text(_joined(content, place), place)
    mark = _mark(entry, where)
    if role == "assistant":
        _add_thoughts(message, entry, where)
        if mark is not None:
            message["train"] = mark
    elif entry.get("train"):
        raise BadRow(f"{where} is marked to be trained, and only the assistant's messages are", "not supported")
    if role == "tool":
        for name in ("tool_call_id", "name"):
            if filled(entry.get(name)):
                message[name] = text(entry[name], f"{where}.{name}")  # type: ignore[literal-required]
    return message


def _joined(content: Any, where: str) -> Any:
    """OpenAI's list of parts as one text, when all of them are text."""
    if not (isinstance(content, list) and content and all(isinstance(p, Mapping) and "type" in p for p in content)):
        return content
    for part in content:
        if part["type"] != "text":
            raise BadRow(f"{where} has a part of type {show(part['type'])}; only text is trained", "not supported")
        if not isinstance(part.get("text"), str):
            raise BadRow(f"{where} has a part that holds {show(part.get('text'))}, not text", "not text")
    return "".join(part["text"] for part in content)


def _add_thoughts(message: Message, entry: Mapping[str, Any], where: str) -> None:
    found = [name for name in _THOUGHTS if filled(entry.get(name))]
    if len(found) > 1:
        raise BadRow(f"{where} has both {' and '.join(found)}", "not supported")
    for name in found:
        message["reasoning_content"] = text(entry[name], f"{where}.{name}")


def _mark(entry: Mapping[str, Any], where: str) -> bool | None:
    """`train: false` or OpenAI's `weight: 0`; anything but yes and no is refused."""
    train, weight = entry.get("train"), entry.get("weight")
    if train is not None and not isinstance(train, bool):
        raise BadRow(f"{where}.train holds {show(train)}, not true or false", "not true or false")
    if weight is None:
        return train
    if isinstance(weight, bool) or weight not in (0, 1):
        raise BadRow(f"{where}.weight holds {show(weight)}, not 0 or 1", "not true or false")
    if train is not None and train != (weight == 1):
        raise BadRow(f"{where} has a train and a weight that contradict each other", "not true or false")
    return bool(weight == 1)


# ---------------------------------------------------------------------------------------------------- calls and tools


def tools_of(value: Any, column: str = "tools") -> list[dict[str, Any]] | None:
    """The functions a conversation may call, each {"type": "function", "function": {"name": ...}}.

    A function without that frame gets it: templates are written for it, and servers always send it.
    """
    if isinstance(value, str) and value.strip():
        value = _from_text(value, f"column '{column}'")
    if not filled(value):
        return None
    if not isinstance(value, list):
        raise BadRow(f"column '{column}' holds {show(value)}, not a list of functions", "tools")
    return [_framed(tool, f"{column}[{number}]", "tools") for number, tool in enumerate(value)]


def _calls(value: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        value = [value]
    calls = []
    for number, entry in enumerate(value):
        place = f"{where}[{number}]"
        call = _framed(entry, place, "tool call")
        function = call["function"]
        given = function.get("arguments")
        arguments = given if filled(given) else {}
        if isinstance(arguments, str):
            arguments = _from_text(arguments, f"{place}.arguments")
        if not isinstance(arguments, dict):
            raise BadRow(f"{place}.arguments holds {show(arguments)}, not an object", "tool call")
        _check_values(arguments, f"{place}.arguments")
        ident = {"id": text(call["id"], f"{place}.id")} if filled(call.get("id")) else {}
        calls.append({**ident, "type": "function", "function": {"name": function["name"], "arguments": arguments}})
    return calls


def _framed(entry: Any, where: str, kind: str) -> dict[str, Any]:
    """A function or call as {"type": "function", "function": {"name": ..., ...}, ...}."""
    if not isinstance(entry, Mapping):
        raise BadRow(f"{where} is {show(entry)}, not an object", kind)
    framed = dict(entry)
    if not filled(entry.get("function")):
        outer = ("id", "type")
        framed = {name: value for name, value in entry.items() if name in outer}
        framed["function"] = {name: value for name, value in entry.items() if name not in outer}
    if framed.get("type", "function") not in ("function", None):
        raise BadRow(f"{where} is of type {show(framed['type'])}; only functions are known", kind)
    function = framed["function"]
    if not isinstance(function, Mapping) or not isinstance(name := function.get("name"), str) or not name.strip():
        raise BadRow(f"{where} names no function", kind)
    _check_values(function, where)
    return {**framed, "type": "function", "function": dict(function)}


def _check_values(value: Any, where: str) -> None:
    """Templates write these values as JSON, so they must be such that JSON can say them."""
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise BadRow(f"{where} cannot be written as JSON: {error}", "tool call") from None


def _from_text(written: str, where: str) -> Any:
    try:
        return strict_json.loads(written)
    except strict_json.Refused as error:
        raise BadRow(f"{where} is text that should be JSON: {error}", error.kind) from None


# ---------------------------------------------------------------------------------------------------- words


def filled(value: Any) -> bool:
    return value is not None and value != [] and value != {} and not (isinstance(value, str) and not value.strip())


def text(value: Any, where: str) -> str:
    """The very text, or a `BadRow` that says what stands there instead."""
    if value is None:
        raise BadRow(f"{where} is missing or null", "empty")
    if not isinstance(value, str):
        raise BadRow(f"{where} holds {show(value)}, not text", "not text")
    if not value.strip():
        raise BadRow(f"{where} is {'blank' if value else 'empty'}", "empty")
    if "\0" in value:
        raise BadRow(f"{where} holds a NUL character", "NUL character")
    return value


def show(value: Any) -> str:
    """What stands in a cell, in words and at most about 60 characters."""
    if value is None:
        return "null"
    kind = {bool: "", int: "the number ", float: "the number ", list: "the list ", dict: "the object ", str: ""}
    written = {True: "true", False: "false"}[value] if isinstance(value, bool) else repr(value)
    return kind.get(type(value), "") + (written if len(written) <= 60 else written[:57] + "...")
