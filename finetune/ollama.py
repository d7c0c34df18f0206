"""A chat template in Ollama's language, as far as that can say it, and the Modelfile around it.

The template is tried on conversations, and what it puts in front of each message is written down:

    <|im_start|>system\\n Be brief. <|im_end|>\\n<|im_start|>user\\n Ping <|im_end|>\\n<|im_start|>assistant\\n
    ----- system -------           --------- after_system --------      ------------- reply -----------

Go's template then writes these pieces as quoted strings. Ollama has no Jinja: whatever a template computes from its
messages beyond that (tools, thoughts, trimmed spaces) is found by comparing and said.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from finetune.chat import end_of_turn_ids
from finetune.errors import InputError
from finetune.formats import BadRow, Message
from finetune.templates import Template, template_of

_SYSTEM, _FIRST, _REPLY, _SECOND = "Qz system.", "Qz first.", "Qz reply.", "Qz second."


@dataclass(frozen=True)
class Pieces:
    """The text in front of: a system message, a first question without and with one, a later question, a reply; and
    the text at the end, where the model goes on. `system` is None for templates that take no system message."""

    system: str | None
    first: str
    after_system: str
    later: str
    reply: str
    end: str

    def render(self, messages: Sequence[Message]) -> str:
        """What the Go template below writes."""
        text = ""
        for number, message in enumerate(messages):
            before = {0: self.first, 1: self.after_system}.get(number, self.later)
            before = {"system": self.system or "", "user": before, "assistant": self.reply}[message["role"]]
            text += before + message["content"]
        return text + self.end

    def go(self) -> str:
        """The same in Ollama's template language."""
        parts = [
            _quoted(piece) for piece in (self.system or "", self.first, self.after_system, self.later, self.reply)
        ]
        system, first, after_system, later, reply = parts
        return (
            '{{- range $i, $m := .Messages }}{{ if eq $m.Role "system" }}' + system
            + '{{ else if eq $m.Role "user" }}{{ if eq $i 0 }}' + first
            + "{{ else if eq $i 1 }}" + after_system + "{{ else }}" + later + "{{ end }}"
            + '{{ else if eq $m.Role "assistant" }}' + reply
            + "{{ end }}{{ $m.Content }}{{ end }}" + _quoted(self.end)
        )  # fmt: skip


def _quoted(piece: str) -> str:
    """A piece as a Go string, which keeps its spaces and line ends whatever stands around it."""
    return "{{ " + json.dumps(piece, ensure_ascii=False).replace('"""', '\\"\\"\\"') + " }}" if piece else ""


def pieces_of(template: Template) -> Pieces:
    """The pieces of a template. Raises `InputError` when it cannot be taken apart like this.

    A bos at the very start is left out where the tokenizer adds it by itself, as llama.cpp does then too.
    """
    talk: list[Message] = [_user(_FIRST), {"role": "assistant", "content": _REPLY}, _user(_SECOND)]
    first, reply, later, end = _between(template, talk, (_FIRST, _REPLY, _SECOND))
    try:
        system_talk: list[Message] = [{"role": "system", "content": _SYSTEM}, *talk]
        system, after, *rest = _between(template, system_talk, (_SYSTEM, _FIRST, _REPLY, _SECOND))
        if rest != [reply, later, end]:
            raise _not_sayable("a system message changes what follows it")
    except BadRow:
        system, after = None, first
    if template.adds_bos:
        first = first.removeprefix(template.bos)
        system = None if system is None else system.removeprefix(template.bos)
    return Pieces(system, first, after, later, reply, end)


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _between(template: Template, messages: Sequence[Message], contents: Sequence[str]) -> list[str]:
    text = template.render(messages, reply_follows=True)
    found = []
    for content in contents:
        before, there, text = text.partition(content)
        if not there:
            raise _not_sayable(f"it does not write {content!r}")
        found.append(before)
    return [*found, text]


def _not_sayable(why: str) -> InputError:
    return InputError(
        f"The chat template cannot be said in Ollama's language: {why}.",
        "Export a GGUF file, which carries the template itself, and serve it with llama.cpp.",
    )


def _lost(template: Template, pieces: Pieces) -> list[str]:
    """What the Modelfile does not do as training did, one sentence each. Raises `InputError` when it is the plain."""
    bos = template.bos if template.adds_bos else ""
    system: list[Message] = [] if pieces.system is None else [{"role": "system", "content": "Be brief."}]
    talk: list[Message] = []
    for turn in range(3):
        talk.append(_user(f"Question {turn}?"))
        for asked in ([*talk], [*system, *talk]):
            wanted = template.render(asked, reply_follows=True)
            if bos + pieces.render(asked) != wanted:
                raise _not_sayable("a conversation of plain questions comes out differently")
        talk.append({"role": "assistant", "content": f"Answer {turn}."})
    notes = []
    spaced: list[Message] = [_user("  two spaces  "), {"role": "assistant", "content": " one "}, _user("none")]
    if bos + pieces.render(spaced) != template.render(spaced, reply_follows=True):
        notes.append("Spaces around a message stay; the template of training trims them.")
    if pieces.system is None:
        notes.append("The template takes no system message; one that is sent is written without any frame.")
    if "tools" not in template.tools.drops:
        notes.append("Tools and tool calls are not in it; the template of training can write them.")
    if "reasoning_content" in template.text or "<think>" in template.text:
        notes.append("Thoughts are not told apart from answers.")
    if "strftime_now" in template.text:
        notes.append("The date in every prompt stays that of the export.")
    return notes


def modelfile(tokenizer: Any, weights: str, *, system: str | None, context: int) -> tuple[str, list[str]]:
    """The text of a Modelfile for a GGUF file beside it, and what it cannot express.

    `context` is the number of tokens that prompt and answer may have; Ollama cuts longer ones without a word.
    Raises `InputError` when the template cannot be written in Ollama's language at all.
    """
    template = template_of(tokenizer)
    pieces = pieces_of(template)
    notes = _lost(template, pieces)
    stops = [tokenizer.decode([token], skip_special_tokens=False) for token in end_of_turn_ids(tokenizer)]
    lines = [
        f"FROM ./{weights}",
        f'TEMPLATE """{pieces.go()}"""',
        *(f"PARAMETER stop {json.dumps(stop, ensure_ascii=False)}" for stop in stops),
        f"PARAMETER num_ctx {context}",
        "# The scores of the run are of greedy answers; the usual penalty of 1.1 on what comes again spoils JSON.",
        "PARAMETER temperature 0",
        "PARAMETER repeat_penalty 1",
    ]
    if system and '"""' in system:
        notes.append(
            "The system message is left out: it holds three quotes in a row, which end a text in a Modelfile."
        )
    elif system:
        lines.append(f'SYSTEM """{system}"""')
    return "\n".join([*lines, *(f"# {note}" for note in notes)]) + "\n", notes
