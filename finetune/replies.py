"""A conversation -> its text, and the places in it that a model must write.

    <|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n
    |---- the generation prompt of the reply ----------------|--- span ---|tail|

Each row is rendered with and without each of its replies, and the texts are compared: only where the one begins with
the other will the model meet at inference what it was trained on. Whatever does not come out of the template as it
went in makes the row a `BadRow` with the reason. A template that only copies (`blind`) has this done once for all
conversations with the same roles; the `Frame` found is then filled with each row's contents.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal
from weakref import WeakKeyDictionary

from finetune import blind
from finetune.formats import BadRow, Message
from finetune.templates import Template, Tools, function_of, leaves, where

TrainOn = Literal["assistant", "last", "all", "completion"]


@dataclass(frozen=True, slots=True)
class Span:
    """Trained text: `text[start:end]`, the last characters being `ending`; "" when the span ends with the text."""

    start: int
    end: int
    ending: str


@dataclass(frozen=True, slots=True)
class Layout:
    """A rendered conversation, where every reply in it starts, and what of it is trained."""

    text: str
    starts: list[int]
    spans: list[Span]


def layout(
    template: Template,
    messages: Sequence[Message],
    tools: Tools | None = None,
    train_on: TrainOn = "assistant",
    prompt: int = 0,
) -> Layout:
    """The rendered conversation and the trained spans in it; raises `BadRow` when there are none to rely on."""
    _ = template.tail  # a template that can carry no reply at all is refused as such
    template.check(messages, tools)
    wanted = _wanted(messages, train_on, prompt)
    frame = None if tools else _frame_of(template, messages)
    if frame is not None:
        return _trained(frame.filled(messages, wanted), train_on)
    return _trained(compared(template, messages, tools, wanted, thoughts=train_on == "all"), train_on)


def starts(template: Template, messages: Sequence[Message], tools: Tools | None, text: str) -> list[int]:
    """Where the replies begin that already stand in a prompt (needed to cut tokens as in training)."""
    found = (
        _start(template, messages[:number], tools, text)
        for number, message in enumerate(messages)
        if message["role"] == "assistant"
    )
    return [start for start in found if start is not None]


def _wanted(messages: Sequence[Message], train_on: TrainOn, prompt: int) -> set[int]:
    """The replies that are trained, by their places."""
    if train_on == "all":
        return set()
    replies = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
    wanted = {n for n in replies if messages[n].get("train", True)}
    if train_on == "last":
        wanted &= set(replies[-1:])
    if train_on == "completion":
        wanted = {n for n in wanted if n >= prompt}
        if gaps := [n for n in replies if wanted and n > min(wanted) and n not in wanted]:
            raise BadRow(
                f"{where(gaps[0], messages[gaps[0]])} stands in the completion and is marked as not trained; "
                "data.train_on: assistant leaves it out",
                "mark inside the completion",
            )
    if not wanted:
        raise BadRow("there is no reply to train", "no reply")
    return wanted


def _trained(found: Layout, train_on: TrainOn) -> Layout:
    spans = found.spans
    if train_on == "all":
        spans = [Span(0, len(found.text), "")]
    elif train_on == "completion":
        spans = [Span(spans[0].start, spans[-1].end, spans[-1].ending)]
    return Layout(found.text, found.starts, spans)


# -------------------------------------------------------------------------------------------------- with and without


def compared(
    template: Template, messages: Sequence[Message], tools: Tools | None, wanted: set[int], thoughts: bool = False
) -> Layout:
    """Text, starts, and the spans of the replies in `wanted`; `thoughts`: those of all turns must be in the text.

    A reply starts where the generation prompt ends and ends with the control token that ends its turn. The text
    before both places must be what the template gives for the conversation so far.
    """
    text = template.render(messages, tools)
    if template.opens_thought:
        text = _continued(template, messages, tools, text)
    _complete(messages, tools, text, thoughts)
    begins: list[int] = []
    spans: list[Span] = []
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        start = _start(template, messages[:number], tools, text)
        if number in wanted:
            spans.append(_reply(template, messages, tools, text, number, start))
        if start is not None:
            begins.append(start)
    return Layout(text, begins, spans)


_REWRITTEN = "template rewrites turns"
_REWRITES = (
    "the chat template writes an earlier reply differently once the conversation goes on, so it would be trained as "
    "the model never has to write it; data.train_on: last trains the last reply of such rows"
)
_OTHER_PROMPT = (
    "the chat template begins this reply otherwise than its own generation prompt says; where that opens a thought, "
    "the reply must bring one, as reasoning_content or as <think>...</think> in its text"
)


def _start(template: Template, before: Sequence[Message], tools: Tools | None, text: str) -> int | None:
    """Where the reply to `before` begins in `text`; None when `text` tells the conversation in other words."""
    try:
        prompt = template.render(before, tools, reply_follows=True)
    except BadRow:
        return None
    return len(prompt) if text.startswith(prompt) else None


def _reply(
    template: Template, messages: Sequence[Message], tools: Tools | None, text: str, number: int, start: int | None
) -> Span:
    """Where reply `number` stands in `text`, if it is there what it is when it is the last."""
    whole = number == len(messages) - 1
    until = text if whole else template.render(messages[: number + 1], tools)
    if start is None:
        before = template.render(messages[:number], tools, reply_follows=True)
        raise BadRow(_REWRITES if until.startswith(before) else _OTHER_PROMPT, _REWRITTEN)
    span = _span(template, until, start, number, messages[number])
    if not whole and not text.startswith(until[: span.end]):
        raise BadRow(_REWRITES, _REWRITTEN)
    return span


def _continued(template: Template, messages: Sequence[Message], tools: Tools | None, text: str) -> str:
    """Where the prompt ends with "<think>" and the template drops thoughts: the last reply put behind the prompt.

    That is what the model meets and must write. It is known only when the reply brings its thought.
    """
    last: Mapping[str, Any] = messages[-1]
    content = last["content"].lstrip()
    if thought := last.get("reasoning_content"):
        content = f"<think>\n{thought.strip()}\n</think>\n\n{content}"
    if not content.startswith("<think>") or last["role"] != "assistant" or last.get("tool_calls"):
        return text
    prompt = template.render(messages[:-1], tools, reply_follows=True)
    return text if text.startswith(prompt) else prompt + content[len("<think>") :].lstrip("\n") + template.tail


def _span(template: Template, text: str, start: int, number: int, message: Mapping[str, Any]) -> Span:
    """The reply that begins at `start`; `text` ends with its turn."""
    calls, place = message.get("tool_calls"), where(number, message)
    if text.endswith(template.tail) and start <= len(text) - len(template.tail):
        ending, stop = template.ending, len(text) - len(template.tail)
    else:
        stripped = text.rstrip()
        ending = template.tools.ending if calls else ""
        stop = len(stripped) - len(ending)
        if not ending or not stripped.endswith(ending) or stop < start:
            raise BadRow("the chat template changes the reply's text", _CHANGED)
    body = text[start:stop].rstrip()
    thought, answer = message.get("reasoning_content") or "", message["content"].strip()
    if template.misplaces_thought and _split_thought(answer):
        raise BadRow(f"{place} holds a thought in its text; give it as reasoning_content", "thought in the text")
    if not (answer in body if calls else body.endswith(answer)):
        inline, answer = _split_thought(answer) or ("", answer)
        thought += inline
    if not (answer in body if calls else body.endswith(answer)):
        raise BadRow("the chat template changes the reply's text", _CHANGED)
    if thought.strip() not in (body if calls else body.removesuffix(answer)):
        raise BadRow(f"the chat template drops the thought of {place}", _CHANGED)
    if lost := _lost(body, calls or ()):
        raise BadRow(f"the chat template drops {lost} of the tool call of {place}", _CHANGED)
    return Span(start, text.index(ending, stop) + len(ending), ending)


_CHANGED = "changed by the template"


def _complete(messages: Sequence[Message], tools: Tools | None, text: str, thoughts: bool) -> None:
    """Every message's text is in the rendered conversation, in order.

    Without `thoughts` the thought of an earlier turn may be missing, as many templates leave it out at inference as
    well; a trained turn's thought is looked for in its own span.
    """
    at = 0
    for number, message in enumerate(messages):
        said: Mapping[str, Any] = message
        begin, content = at, message["content"].strip()
        forms = _forms(content) if message["role"] == "tool" else [content]
        thought = said.get("reasoning_content", "")
        if message["role"] == "assistant" and (parts := _split_thought(content)):
            thought += parts[0]
            forms.append(parts[1])
        at = min((found + len(form) for form in forms if (found := text.find(form, begin)) >= 0), default=-1)
        if at < 0 or (thoughts and text.find(thought.strip(), begin) < 0):
            raise BadRow(f"the chat template drops or changes the text of {where(number, message)}", _CHANGED)
        if lost := _lost(text[begin:], said.get("tool_calls") or ()):
            place = where(number, message)
            raise BadRow(f"the chat template drops {lost} of the tool call of {place}", _CHANGED)
    for tool in tools or ():
        if str(name := function_of(tool).get("name")) not in text:
            raise BadRow(f"the chat template drops the tool '{name}'", _CHANGED)


def _split_thought(content: str) -> tuple[str, str] | None:
    """Thought and answer of a text that begins with a thought, as templates take it apart; else None."""
    before, mark, answer = content.partition("</think>")
    opening, _, thought = before.rpartition("<think>")
    if not mark or opening.strip() or "</think>" in answer or "<think>" in answer:
        return None
    return thought.strip(), answer.strip()


def _lost(text: str, calls: Sequence[Mapping[str, Any]]) -> str:
    """The first name or value of the calls that is not in `text`, in any of the ways to write it; "" for none."""
    for call in calls:
        function = function_of(call)
        for value in [function.get("name"), *leaves(function.get("arguments"))]:
            if all(form not in text for form in _forms(value)):
                return f"{str(value)[:60]!r}"
    return ""


def _forms(value: Any) -> list[str]:
    """The ways in which templates write a value: as it is, as JSON, as JSON in JSON, as Python."""
    if not isinstance(value, str):
        return [json.dumps(value), str(value), str(value).lower()]
    once = json.dumps(value, ensure_ascii=False)[1:-1]
    python = repr('"' + value)[2:-1]  # the mark in front makes it write single quotes always
    return [value.strip(), once, json.dumps(value)[1:-1], json.dumps(once)[1:-1], python]


# ------------------------------------------------------------------------------------------- once for the same roles

_Place = tuple[int, int]  # number of a piece, and characters into it


@dataclass(frozen=True, slots=True)
class Frame:
    """What a template that only copies writes around the contents of all conversations with the same roles.

    `pieces` are literal text, or the number of a message and how its content is copied (as it is, or stripped).
    """

    pieces: list[str | tuple[int, Callable[[str], str]]]
    spans: dict[int, tuple[_Place, _Place, str]]

    def filled(self, messages: Sequence[Message], wanted: set[int]) -> Layout:
        texts = [p if isinstance(p, str) else p[1](messages[p[0]]["content"]) for p in self.pieces]
        ends = list(accumulate(map(len, texts), initial=0))
        spans = {
            number: Span(ends[start[0]] + start[1], ends[end[0]] + end[1], ending)
            for number, (start, end, ending) in self.spans.items()
        }
        begins = [span.start for span in spans.values()]
        return Layout("".join(texts), begins, [span for number, span in spans.items() if number in wanted])


_frames: WeakKeyDictionary[Template, dict[tuple[str, ...], Frame | None]] = WeakKeyDictionary()
_MOST_FRAMES = 1000  # kept for one template
_STRIPS: dict[tuple[bool, bool], Callable[[str], str]] = {
    (True, True): str,
    (False, True): str.lstrip,
    (True, False): str.rstrip,
    (False, False): str.strip,
}
_SPACE = "\u2003"  # white space that no template writes: where it is missing, a content was stripped
_MARK = re.compile(f"({_SPACE}?)\ue000(\\d+)\ue001({_SPACE}?)")


def _frame_of(template: Template, messages: Sequence[Message]) -> Frame | None:
    """The frame for these roles, if the template only copies and the messages are of the simple sort."""
    if not blind.only_copies(template.text) or template.opens_thought or template.misplaces_thought:
        return None
    for message in messages:
        simple = len(message) == 2 or message.keys() <= {"role", "content", "train"}
        if not simple or not message["content"].strip() or message["role"] not in blind.ROLES:
            return None
    roles = tuple([message["role"] for message in messages])
    known = _frames.setdefault(template, {})
    if roles not in known and len(known) < _MOST_FRAMES:
        known[roles] = _frame(template, roles)
    return known.get(roles)


def _frame(template: Template, roles: Sequence[str]) -> Frame | None:
    """Found with marks in place of contents, by the very comparison that other rows go through one by one."""
    marked: list[Message] = [
        {"role": role, "content": f"{_SPACE}\ue000{number}\ue001{_SPACE}"} for number, role in enumerate(roles)
    ]
    try:
        text = compared(template, marked, None, set()).text
    except BadRow:
        return None
    pieces: list[str | tuple[int, Callable[[str], str]]] = []
    begins: list[tuple[int, int]] = []  # where each piece begins, and its number; literal ones only
    at = 0
    for match in [*_MARK.finditer(text), None]:
        begins.append((at, len(pieces)))
        pieces.append(text[at : match.start() if match else len(text)])
        if match:
            pieces.append((int(match[2]), _STRIPS[bool(match[1]), bool(match[3])]))
            at = match.end()
    first = pieces[0]
    assert isinstance(first, str)
    begin_of_text = first.removeprefix(template.bos)
    if template.adds_bos and begin_of_text and template.bos.startswith(begin_of_text):
        return None  # whether a BOS has to be put in front could hang on the content

    def place(offset: int) -> _Place:
        begin, piece = max(entry for entry in begins if entry[0] <= offset)
        if offset - begin > len(str(pieces[piece])):
            raise BadRow("a reply begins in the white space of another message")  # then it hangs on the content
        return piece, offset - begin

    spans: dict[int, tuple[_Place, _Place, str]] = {}
    try:  # all replies or none: one that is not found among marks may still be found among other contents
        for number in [n for n, role in enumerate(roles) if role == "assistant"]:
            start = _start(template, marked[:number], None, text)
            span = _reply(template, marked, None, text, number, start)
            spans[number] = place(span.start), place(span.end), span.ending
    except BadRow:
        return None
    return Frame(pieces, spans)
