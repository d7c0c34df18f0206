"""Any dataset row -> a conversation: chat messages and the tools they may call, or a verdict.

    {"messages": [{"role": "user", ...}], "tools": [...]}     -> as they are          messages
    {"conversations": [{"from": "human", "value": ...}]}      -> user, assistant      messages (ShareGPT layout)
    {"prompt": "Hi", "completion": "Hello."}                  -> user, assistant      prompt-completion
    {"instruction": "Double it", "input": "4", "output": "8"} -> user, assistant      alpaca
    {"text": "Once upon a time"}                              -> one document         text

A row is taken whole or refused with a reason (`BadRow`); text stays the very text, and nothing but text becomes text:
the number 8 may have been written 8, 8.0 or 8e0, and only the file's author knows which one was meant.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from finetune import turns
from finetune.errors import DataError
from finetune.faults import nearest
from finetune.turns import ROLES as ROLES
from finetune.turns import BadRow as BadRow
from finetune.turns import Message as Message
from finetune.turns import filled, show

DOCUMENT = "text"  # role of the single message that stands for a row of plain text
LAYOUTS: list[tuple[str, tuple[str, ...]]] = [
    ("messages", ("messages",)),
    ("messages", ("conversations",)),
    ("prompt-completion", ("prompt", "completion")),
    ("alpaca", ("instruction", "output")),
    ("text", ("text",)),
]
_NOT_TRAINED = ("functions", "images", "videos", "audio")  # columns that would change what a row means
_LISTS = ("messages", "conversations", "prompt", "completion")  # columns that may hold messages
_IN_MESSAGES = ("role", "content")  # names of data.columns that stand inside messages

# What other people call these columns, to suggest the line of data.columns that is missing.
_ASKED = ("prompt", "instruction", "question", "query", "input", "source", "user", "human", "problem")
_REPLIED = ("completion", "response", "answer", "output", "target", "reply", "assistant", "solution")
_TALKED = ("conversation", "chat", "dialog", "dialogue", "turns", "message")
_WRITTEN = ("content", "document", "body", "article")


class Conversation(NamedTuple):
    """The messages of one row, and the functions that its assistant may call."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None


# -------------------------------------------------------------------------------------------------- names of columns


def detect(columns: Iterable[str], renames: Mapping[Any, str] | None = None) -> tuple[str, str]:
    """The layout of a file from the names of its columns, and why; `renames` is data.columns {our name: the file's}.

    Raises `DataError` when no layout fits, or when two do: which one was meant only the user knows.
    """
    names = _renamed_columns(columns, renames or {})
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
    raise DataError(f"No layout fits the columns {', '.join(names) or '(none)'}.", _advice(names, renames or {}))


def check_columns(columns: Iterable[str], fmt: str, renames: Mapping[Any, str] | None = None) -> None:
    """Raise `DataError` when a layout chosen by hand lacks its columns in every row."""
    names = set(_renamed_columns(columns, renames or {}))
    wanted = [needed for layout, needed in LAYOUTS if layout == fmt]
    if not any(set(needed) <= names for needed in wanted):
        absent = ", ".join(column for column in wanted[0] if column not in names)
        raise DataError(
            f"Layout {fmt} needs the columns {' and '.join(wanted[0])}; {absent} is in no row "
            f"(there are {', '.join(sorted(names)) or 'none'}).",
            "Name the file's columns in data.columns, or set data.format to the layout of this file.",
        )


def renamed(row: Mapping[str, Any], renames: Mapping[Any, str]) -> dict[str, Any]:
    """The row under this toolkit's names; `role` and `content` are renamed inside messages.

    Raises `BadRow` when a column of the new name is there already and both are filled.
    """
    if not renames:
        return dict(row)
    row = _renamed(row, {ours: name for ours, name in renames.items() if ours not in _IN_MESSAGES})
    inside = {ours: name for ours, name in renames.items() if ours in _IN_MESSAGES}
    for column in _LISTS if inside else ():
        if isinstance(row.get(column), list):
            row[column] = [_renamed(e, inside) if isinstance(e, Mapping) else e for e in row[column]]
    return row


def _renamed(row: Mapping[str, Any], renames: Mapping[Any, str]) -> dict[str, Any]:
    taken = set(renames.values())
    found = {name: value for name, value in row.items() if name not in taken}
    for ours, name in renames.items():
        if name not in row:
            continue
        if filled(found.get(ours)) and filled(row[name]):
            raise BadRow(f"'{name}' is to be read as '{ours}', and both are filled", "two columns for one")
        if filled(row[name]) or ours not in found:
            found[ours] = row[name]
    return found


def _renamed_columns(columns: Iterable[str], renames: Mapping[Any, str]) -> list[str]:
    names = list(dict.fromkeys(columns))
    outer = {ours: name for ours, name in renames.items() if ours not in _IN_MESSAGES}
    for ours, name in outer.items():
        if name not in names:
            near = nearest(name, names)
            raise DataError(
                f"data.columns reads '{name}' as {ours}, and no row has a column '{name}' "
                f"(there are {', '.join(names) or 'none'}).",
                f"Did you mean '{near}'?" if near else "Give the name as it stands in the file.",
            )
    taken = set(outer.values())
    return list(dict.fromkeys([*(name for name in names if name not in taken), *outer]))


def _advice(names: list[str], renames: Mapping[Any, str]) -> str:
    """The line of data.columns that would make these columns fit, as far as their names tell."""
    here = {name.strip().lower(): name for name in reversed(names)}

    def first(known: Iterable[str]) -> str | None:
        return next((here[word] for word in known if word in here), None)

    asked, replied = first(_ASKED), first(word for word in _REPLIED if word in here)
    lines: dict[str, str] = {}
    if talked := first((*_TALKED, "messages", "conversations")):
        lines = {"messages": talked}
    elif asked and replied and asked.lower() == "instruction":
        lines = {"instruction": asked, "output": replied}
        if "input" not in names and (given := first(("input", "context"))):
            lines["input"] = given
    elif asked and replied:
        lines = {"prompt": asked, "completion": replied}
    elif written := first((*_WRITTEN, "text")):
        lines = {"text": written}
    else:
        for layout, needed in LAYOUTS:
            near = {column: column if column in names else nearest(column, names) for column in needed}
            if layout != "text" and all(near.values()):
                lines = {column: str(name) for column, name in near.items()}
                break
    lines = {**renames, **{ours: name for ours, name in lines.items() if ours != name}}
    if lines == renames:
        return (
            "Name them in data.columns as messages, prompt and completion, instruction and output, or text, "
            "for instance data.columns: {prompt: question, completion: answer}."
        )
    return f"Set data.columns: {{{', '.join(f'{ours}: {_yaml(name)}' for ours, name in lines.items())}}}."


def _yaml(name: str) -> str:
    """Quoted where YAML would read something else than this text."""
    plain = re.fullmatch(r"[A-Za-z_][\w ./-]*\w", name) and name.lower() not in ("yes", "no", "on", "off", "true")
    return name if plain else json.dumps(name, ensure_ascii=False)


# ------------------------------------------------------------------------------------------------ a row as messages


def to_conversation(row: Mapping[str, Any], fmt: str, system: str | None = None) -> Conversation:
    """The conversation in one row of layout `fmt`; `system` is used when the row brings none.

    Raises `BadRow` with the reason. A row of plain text becomes a single message of role "text".
    """
    for name in _NOT_TRAINED:
        if row.get(name):
            raise BadRow(f"column '{name}' is filled and would be lost", "not supported")
    tools = turns.tools_of(row.get("tools"))
    if fmt == "text":
        if tools:
            raise BadRow("column 'tools' is filled, and plain text calls none", "not supported")
        return Conversation([{"role": DOCUMENT, "content": _required(row, "text")}])
    if fmt == "alpaca":
        said = _alpaca(row)
    elif fmt == "prompt-completion":
        said = _prompt_completion(row)
    else:
        said = _chat(row)
    return Conversation(_with_system(said, _optional(row, "system"), system), tools)


def _alpaca(row: Mapping[str, Any]) -> list[Message]:
    if row.get("history"):
        raise BadRow("column 'history' is filled and would be lost", "not supported")
    asked, given = _required(row, "instruction"), _optional(row, "input")
    prompt = f"{asked}\n{given}" if given.strip() else asked
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": _required(row, "output")}]


def _prompt_completion(row: Mapping[str, Any]) -> list[Message]:
    """Only the completion is trained, so assistant turns of a prompt that is a list are marked `train: False`."""
    prompt, completion = row.get("prompt"), row.get("completion")
    said: list[Message] = (
        [_untrained(message) for message in turns.said(prompt, "prompt")]
        if isinstance(prompt, list)
        else [{"role": "user", "content": _required(row, "prompt")}]
    )
    said += (
        turns.said(completion, "completion")
        if isinstance(completion, list)
        else [{"role": "assistant", "content": _required(row, "completion")}]
    )
    return turns.checked(said)


def _untrained(message: Message) -> Message:
    return {**message, "train": False} if message["role"] == "assistant" else message


def _chat(row: Mapping[str, Any]) -> list[Message]:
    column = "messages" if row.get("messages") is not None or "conversations" not in row else "conversations"
    return turns.checked(turns.said(row.get(column), column))


def _with_system(said: list[Message], column: str, default: str | None) -> list[Message]:
    own = said[0]["role"] == "system"
    if own and column.strip():
        raise BadRow("there is a system message and also a filled column 'system'", "two system messages")
    text = column if column.strip() else default
    if own or text is None or not text.strip():
        return said
    return [{"role": "system", "content": text}, *said]


def _required(row: Mapping[str, Any], column: str) -> str:
    return turns.text(row.get(column), f"column '{column}'")


def _optional(row: Mapping[str, Any], column: str) -> str:
    """Absent, null and empty are one and the same."""
    value = row.get(column)
    if value is not None and not isinstance(value, str):
        raise BadRow(f"column '{column}' holds {show(value)}, not text", "not text")
    return turns.text(value, f"column '{column}'") if value and value.strip() else ""
