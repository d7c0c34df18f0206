"""Any dataset row -> a list of chat messages, or a verdict.

    {"messages": [{"role": "user", ...}]}                     -> as they are          messages
    {"conversations": [{"from": "human", "value": ...}]}      -> user, assistant      messages (ShareGPT layout)
    {"prompt": "Hi", "completion": "Hello."}                  -> user, assistant      prompt-completion
    {"instruction": "Double it", "input": "4", "output": "8"} -> user, assistant      alpaca
    {"text": "Once upon a time"}                              -> one document         text

A row is taken whole or refused with a reason (`BadRow`); text stays the very text, and nothing but text becomes text:
the number 8 may have been written 8, 8.0 or 8e0, and only the file's author knows which one was meant.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypedDict

from finetune.errors import DataError

ROLES = ("system", "user", "assistant")
DOCUMENT = "text"  # role of the single message that stands for a row of plain text
LAYOUTS: list[tuple[str, tuple[str, ...]]] = [
    ("messages", ("messages",)),
    ("messages", ("conversations",)),
    ("prompt-completion", ("prompt", "completion")),
    ("alpaca", ("instruction", "output")),
    ("text", ("text",)),
]
_RENAME = "Rename them to messages, to prompt and completion, to instruction and output, or to text."
_SHAREGPT = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
_NOT_TRAINED = ("tools", "functions", "images", "videos", "audio")  # columns that would change what a row means
_NOT_IN_MESSAGE = ("tool_calls", "function_call", "reasoning_content", "thinking", "weight")


class _Said(TypedDict):
    role: str
    content: str


class Message(_Said, total=False):
    """One turn. `train: False` marks an assistant turn that belongs to the prompt."""

    train: bool


class BadRow(DataError):
    """This row cannot be trained: `reason` in words, `kind` a short name to count by."""

    def __init__(self, reason: str, kind: str = "content") -> None:
        self.reason = reason
        self.kind = kind
        super().__init__(f"A row cannot be trained: {reason}.", "Correct the row, or set data.on_bad_row: skip.")


def detect(columns: Iterable[str]) -> tuple[str, str]:
    """The layout of a file from the names of its columns, and why.

    Raises `DataError` when no layout fits, or when two do: which one was meant only the user knows.
    """
    names = list(dict.fromkeys(columns))
    found = [(layout, needed) for layout, needed in LAYOUTS if set(needed) <= set(names)]
    reasons = [f"{'columns' if len(needed) > 1 else 'column'} {' and '.join(needed)}" for _, needed in found]
    if len(found) == 1:
        return found[0][0], reasons[0]
    if found:
        both = "; ".join(f"{layout} ({reason})" for (layout, _), reason in zip(found, reasons, strict=True))
        raise DataError(
            f"The rows fit more than one layout: {both}.",
            "Set data.format to the one that is meant, or remove the columns that are not.",
        )
    raise DataError(f"No layout fits the columns {', '.join(names) or '(none)'}.", _RENAME)


def check_columns(columns: Iterable[str], fmt: str) -> None:
    """Raise `DataError` when a layout chosen by hand lacks its columns in every row."""
    names = set(columns)
    wanted = [needed for layout, needed in LAYOUTS if layout == fmt]
    if not any(set(needed) <= names for needed in wanted):
        absent = ", ".join(column for column in wanted[0] if column not in names)
        raise DataError(
            f"Layout {fmt} needs the columns {' and '.join(wanted[0])}; {absent} is in no row "
            f"(there are {', '.join(sorted(names)) or 'none'}).",
            "Rename the columns, or set data.format to the layout of this file.",
        )


def to_messages(row: Mapping[str, Any], fmt: str, system: str | None = None) -> list[Message]:
    """The conversation in one row of layout `fmt`; `system` is used when the row brings none.

    Raises `BadRow` with the reason. A row of plain text becomes a single message of role "text".
    """
    for name in _NOT_TRAINED:
        if row.get(name):
            raise BadRow(f"column '{name}' is filled and would be lost", "not supported")
    if fmt == "text":
        return [{"role": DOCUMENT, "content": _required(row, "text")}]
    if fmt == "alpaca":
        turns = _alpaca(row)
    elif fmt == "prompt-completion":
        turns = _prompt_completion(row)
    else:
        turns = _chat(row)
    return _with_system(turns, _optional(row, "system"), system)


def _alpaca(row: Mapping[str, Any]) -> list[Message]:
    if row.get("history"):
        raise BadRow("column 'history' is filled and would be lost", "not supported")
    asked, given = _required(row, "instruction"), _optional(row, "input")
    prompt = f"{asked}\n{given}" if given.strip() else asked
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": _required(row, "output")}]


def _prompt_completion(row: Mapping[str, Any]) -> list[Message]:
    """Only the completion is trained, so assistant turns of a prompt that is a list are marked `train: False`."""
    prompt, completion = row.get("prompt"), row.get("completion")
    turns: list[Message] = (
        [_untrained(message) for message in _said(prompt, "prompt")]
        if isinstance(prompt, list)
        else [{"role": "user", "content": _required(row, "prompt")}]
    )
    turns += (
        _said(completion, "completion")
        if isinstance(completion, list)
        else [{"role": "assistant", "content": _required(row, "completion")}]
    )
    return _checked(turns)


def _untrained(message: Message) -> Message:
    return {**message, "train": False} if message["role"] == "assistant" else message


def _chat(row: Mapping[str, Any]) -> list[Message]:
    column = "messages" if row.get("messages") is not None or "conversations" not in row else "conversations"
    return _checked(_said(row.get(column), column))


def _said(value: Any, column: str) -> list[Message]:
    """The entries of a message list, each {role, content} or ShareGPT's {from, value}."""
    if value is None or value == []:
        raise BadRow(f"column '{column}' is {'empty' if value == [] else 'missing or null'}", "empty")
    if not isinstance(value, list):
        raise BadRow(f"column '{column}' holds {_show(value)}, not a list of messages", "not a message list")
    return [_message(entry, f"{column}[{number}]") for number, entry in enumerate(value)]


def _message(entry: Any, where: str) -> Message:
    if not isinstance(entry, Mapping):
        raise BadRow(f"{where} is {_show(entry)}, not a message", "not a message list")
    for name in _NOT_IN_MESSAGE:
        if entry.get(name) is not None and entry.get(name) != []:
            raise BadRow(f"{where} has '{name}', which would be lost", "not supported")
    sharegpt = "from" in entry and "role" not in entry
    role = entry.get("from" if sharegpt else "role")
    known = _SHAREGPT.get(role) if sharegpt and isinstance(role, str) else role
    if known not in ROLES:
        raise BadRow(f"{where} has the role {_show(role)}; known are {', '.join(ROLES)}", "unknown role")
    key = "value" if sharegpt else "content"
    return {"role": str(known), "content": _text(entry.get(key), f"{where}.{key} ({role})")}


def _checked(turns: list[Message]) -> list[Message]:
    """An optional system message, then user and assistant in turn, the assistant last."""
    roles = [message["role"] for message in turns]
    talk = roles[1:] if roles[0] == "system" else roles
    if "system" in talk:
        raise BadRow("a system message stands after the first place", "order of roles")
    if "assistant" not in talk:
        raise BadRow("there is no assistant message", "no reply")
    if talk[0] == "assistant":
        raise BadRow("the assistant speaks first", "order of roles")
    for before, after in zip(talk, talk[1:], strict=False):
        if before == after:
            raise BadRow(f"two {after} messages stand in a row", "order of roles")
    if talk[-1] == "user":
        raise BadRow("the last message is the user's and has no reply", "no reply")
    return turns


def _with_system(turns: list[Message], column: str, default: str | None) -> list[Message]:
    own = turns[0]["role"] == "system"
    if own and column.strip():
        raise BadRow("there is a system message and also a filled column 'system'", "two system messages")
    text = column if column.strip() else default
    if own or text is None or not text.strip():
        return turns
    return [{"role": "system", "content": text}, *turns]


def _required(row: Mapping[str, Any], column: str) -> str:
    return _text(row.get(column), f"column '{column}'")


def _optional(row: Mapping[str, Any], column: str) -> str:
    """Absent, null and empty are one and the same."""
    value = row.get(column)
    if value is not None and not isinstance(value, str):
        raise BadRow(f"column '{column}' holds {_show(value)}, not text", "not text")
    return value or ""


def _text(value: Any, where: str) -> str:
    if value is None:
        raise BadRow(f"{where} is missing or null", "empty")
    if not isinstance(value, str):
        raise BadRow(f"{where} holds {_show(value)}, not text", "not text")
    if not value.strip():
        raise BadRow(f"{where} is {'blank' if value else 'empty'}", "empty")
    return value


def _show(value: Any) -> str:
    """What stands in a cell, in words and at most about 60 characters."""
    if value is None:
        return "null"
    kind = {bool: "", int: "the number ", float: "the number ", list: "the list ", dict: "the object ", str: ""}
    text = {True: "true", False: "false"}[value] if isinstance(value, bool) else repr(value)
    return kind.get(type(value), "") + (text if len(text) <= 60 else text[:57] + "...")
