"""A tokenizer's chat template: what it writes for a conversation, and the few facts that one finds by trying.

Templates are foreign programs. They drop what they do not know (tools, thoughts, system messages) and raise whatever
they like; both are verdicts on a row here, and no crash.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from os.path import commonprefix
from typing import Any
from weakref import WeakKeyDictionary

from finetune.errors import DataError
from finetune.formats import BadRow, Message

Tools = Sequence[Mapping[str, Any]]

DEFAULT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] | capitalize + ': ' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)  # for base models that bring none; the space before a reply is the reply's, as byte-level vocabularies have it


_known: WeakKeyDictionary[Any, dict[str, tuple[Any, Template]]] = WeakKeyDictionary()


def template_of(tokenizer: Any, tools: Tools | None = None) -> Template:
    """The template for conversations with or without tools, found once per tokenizer and template."""
    name, text = _chosen(tokenizer.chat_template, bool(tools))
    state = (text, tokenizer.special_tokens_map, len(tokenizer))
    cached = _known.setdefault(tokenizer, {})
    if name not in cached or cached[name][0] != state:
        cached[name] = (state, Template(tokenizer, text))
    return cached[name][1]


def named_templates(chat_template: Any) -> dict[str, str]:
    """The templates of a tokenizer that has several, by name."""
    if isinstance(chat_template, list | tuple):
        return {entry["name"]: entry["template"] for entry in chat_template}
    return dict(chat_template) if isinstance(chat_template, Mapping) else {}


def _chosen(chat_template: Any, tools: bool) -> tuple[str, str | None]:
    named = named_templates(chat_template)
    if not named:
        return "", chat_template or None
    name = "tool_use" if tools and "tool_use" in named else "default"
    if name not in named:
        raise DataError(
            f"The tokenizer has the chat templates {', '.join(sorted(named))}, and none is named default.",
            "Set chat_template in its tokenizer_config.json to the one that is meant.",
        )
    return name, named[name]


# ------------------------------------------------------------------------------------------------------------- probes

_PROBE: list[Message] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Ping"},
    {"role": "assistant", "content": "Pong"},
]
_PROBE_TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "qztool",
            "description": "Looks up.",
            "parameters": {"type": "object", "properties": {"place": {"type": "string", "description": "Where."}}},
        },
    }
]
_PROBE_CALL: list[dict[str, Any]] = [
    {"id": "abcdefghi", "type": "function", "function": {"name": "qzcall", "arguments": {"place": "qzvalue"}}}
]


_PROBE_TALK: list[dict[str, Any]] = [
    {"role": "user", "content": "Ping"},
    {"role": "assistant", "content": "", "tool_calls": _PROBE_CALL},
    {"role": "tool", "content": "qzresult", "name": "qzcall", "tool_call_id": "abcdefghi"},
]


@dataclass(frozen=True, slots=True)
class ToolFacts:
    """How a template wants tools, and what of them it drops all the same."""

    keep_empty: bool = True  # the empty content of a turn that only calls is passed as ""; else the key is left out
    as_text: bool = False  # arguments are passed as JSON text; else as an object
    ending: str = ""  # the control token that ends a turn that calls
    drops: dict[str, str] = field(default_factory=dict)  # tools, call or result -> what is wrong, in words


# ------------------------------------------------------------------------------------------------------ the template


class Template:
    """One chat template of a tokenizer, with the few things about it that one has to find out by trying.

    It keeps nothing of the tokenizer itself, or the cache above would keep its own keys alive.
    """

    def __init__(self, tokenizer: Any, text: str | None) -> None:
        self.is_default = text is None
        if self.is_default and not tokenizer.eos_token:
            raise DataError(
                "The tokenizer has no chat template and no end-of-text token, so a reply would have no end.",
                "Give it an eos_token or a chat_template in its tokenizer_config.json.",
            )
        self.text: str = text or DEFAULT_TEMPLATE
        self.bos: str = tokenizer.bos_token or ""
        self.adds_bos = bool(self.bos) and tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]
        special = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
        special |= {str(token) for token in tokenizer.all_special_tokens}
        longest_first = sorted(special, key=lambda token: (-len(token), token))
        self.control = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._names = dict(tokenizer.special_tokens_map)

    @cached_property  # late, for a document needs no template
    def folds_system(self) -> bool:
        """Whether the template knows no system message, so that its text goes in front of the first user message."""
        try:
            return _PROBE[0]["content"] not in self.raw(_PROBE)
        except BadRow:
            return True

    @cached_property
    def silent_bos(self) -> bool:
        """Whether the model wants a BOS that the template does not print."""
        return self.adds_bos and not self.raw(_PROBE[1:]).startswith(self.bos)

    @cached_property
    def tail(self) -> str:
        """What the template writes after the last reply, e.g. "<|im_end|>\n"."""
        try:
            _, found, tail = self.raw(_PROBE[1:]).rpartition(_PROBE[-1]["content"])
            reason = "it leaves the answer out"
        except BadRow as error:
            found, reason = "", error.reason
        if not found:
            raise DataError(
                f"The tokenizer's chat template cannot carry a question and its answer: {reason}.",
                "Use the model's own template, or remove chat_template to get the plain default.",
            )
        return tail

    @cached_property
    def ending(self) -> str:
        """The control token that ends an assistant's turn."""
        found = self.control.search(self.tail)
        if found is None:
            raise DataError(
                "The chat template puts no control token after a reply, so the model would never learn to stop.",
                "Use a template that ends each assistant turn with a special token, such as the eos_token.",
            )
        while more := self.control.match(self._lasting_tail, found.end()):  # Command R7B ends a turn with two
            found = more
        return found[0]

    @cached_property
    def _lasting_tail(self) -> str:
        """What of the tail is still there when the conversation goes on."""
        try:
            _, _, rest = self.raw([*_PROBE[1:], *_PROBE[1:]]).partition(_PROBE[-1]["content"])
        except BadRow:
            return ""
        return commonprefix([self.tail, rest])

    @cached_property
    def endings(self) -> list[str]:
        """All control tokens that end a turn: of a reply, then of a tool call where that is another one."""
        return list(dict.fromkeys(filter(None, [self.ending, self.tools.ending])))

    @cached_property
    def opens_thought(self) -> bool:
        """Whether the generation prompt begins the thought that the model goes on with."""
        try:
            return self.raw(_PROBE[1:2], reply_follows=True).rstrip().endswith("<think>")
        except BadRow:
            return False

    @cached_property
    def misplaces_thought(self) -> bool:
        """Whether the template has a place for thoughts and leaves one that stands in the content somewhere else."""
        thought, answer = "qzthought", _PROBE[-1]["content"]
        try:
            apart = self.raw([_PROBE[1], {**_PROBE[2], "reasoning_content": thought}])
            inside = self.raw([_PROBE[1], {**_PROBE[2], "content": f"<think>\n{thought}\n</think>\n\n{answer}"}])
        except BadRow:
            return False
        return thought in apart and apart.translate(_NO_SPACE) != inside.translate(_NO_SPACE)

    # ---------------------------------------------------------------------------------------------------- rendering

    def raw(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Tools | None = None,
        reply_follows: bool = False,
        style: ToolFacts | None = None,
    ) -> str:
        """What `apply_chat_template` gives; `BadRow` with the template's words when it refuses."""
        from transformers.utils.chat_template_utils import render_jinja_template

        plain = [self._plain(message, style) for message in messages]
        try:
            rendered: Any = render_jinja_template(
                conversations=[plain],
                tools=list(tools) if tools else None,  # type: ignore[arg-type]
                chat_template=self.text,
                add_generation_prompt=reply_follows,
                **self._names,
            )
        except Exception as error:  # a foreign program may raise anything
            raise BadRow(f"the chat template refuses it: {error}", "refused by the template") from None
        return str(rendered[0][0])

    def _plain(self, message: Mapping[str, Any], style: ToolFacts | None) -> dict[str, Any]:
        plain = {"role": message["role"], "content": message["content"]}
        if len(message) > 2:
            plain |= {key: message[key] for key in ("reasoning_content", "tool_call_id", "name") if message.get(key)}
            if calls := message.get("tool_calls"):
                style = style or self.tools
                plain["tool_calls"] = [_with_text(call) for call in calls] if style.as_text else calls
                if not (plain["content"] or style.keep_empty):
                    del plain["content"]
        return plain

    def render(self, messages: Sequence[Message], tools: Tools | None = None, reply_follows: bool = False) -> str:
        """The conversation as text, with exactly one BOS where the model wants one."""
        text = self.raw(_fold(messages) if self.folds_system else messages, tools, reply_follows)
        if self.adds_bos and not text.startswith(self.bos):
            text = self.bos + text
        return text

    def check(self, messages: Sequence[Message], tools: Tools | None) -> None:
        """Raise `BadRow` when a text holds a control token, or the template drops what this row needs."""
        for number, message in enumerate(messages):
            self._check_text(message["content"], number, message)
            for value in leaves([v for key, v in message.items() if key in _CARRIED]) if len(message) > 2 else ():
                self._check_text(str(value), number, message)
        if tools:
            if found := self.control.search(json.dumps(tools, ensure_ascii=False)):
                raise BadRow(f"the tools hold {found[0]!r}, a control token of this tokenizer", "control token")
            self._needs("tools", str(function_of(tools[0]).get("name")))
        for message in messages:
            said: Mapping[str, Any] = message
            if said.get("tool_calls"):
                self._needs("call", str(function_of(said["tool_calls"][0]).get("name")))
            if said["role"] == "tool":
                self._needs("result", str(said.get("name") or said["content"][:40]))

    def _check_text(self, text: str, number: int, message: Message) -> None:
        if found := self.control.search(text):
            raise BadRow(
                f"{where(number, message)} holds {found[0]!r}, a control token of this tokenizer", "control token"
            )

    # ---------------------------------------------------------------------------------------------------------- tools

    def _needs(self, what: str, name: str) -> None:
        if reason := self.tools.drops.get(what):
            raise BadRow(f"the chat template {reason} (here '{name}')", "no tools in the template")

    @cached_property
    def tools(self) -> ToolFacts:
        """Found by trying: arguments as an object or as text, an empty content there or not."""
        found = [
            self._tried(ToolFacts(keep_empty, as_text))
            for as_text, keep_empty in product((False, True), (True, False))
        ]
        return min(found, key=lambda facts: len(facts.drops))  # the first of the best

    def _tried(self, style: ToolFacts) -> ToolFacts:
        """The same facts with what is lost by them."""
        drops: dict[str, str] = {}
        ending = ""
        ask, call, result = _PROBE_TALK

        def text(messages: Sequence[Mapping[str, Any]], reply_follows: bool = False) -> str:
            return self.raw(messages, None if "tools" in drops else _PROBE_TOOLS, reply_follows, style)

        try:
            if "qztool" not in text(_PROBE[1:]):
                drops["tools"] = "drops the tools"
        except BadRow as error:
            drops["tools"] = f"takes no tools: {error.reason}"
        try:
            written = text([ask, call])
            if any(word not in written for word in ("qzcall", "qzvalue")):
                drops["call"] = "drops the tool call"
            elif (found := [*self.control.finditer(written)]) and found[-1].end() == len(written.rstrip()):
                ending = self.ending if written.endswith(self.tail) else found[-1][0]
            else:
                drops["call"] = "puts no control token after a tool call"
        except BadRow as error:
            drops["call"] = f"takes no tool calls: {error.reason}"
        try:
            written = text([ask, call, result], reply_follows=True)
            if "qzresult" not in written:
                drops["result"] = "drops the tool's result"
            elif self._prints_any_role(written, lambda role: text([ask, call, {**result, "role": role}], True)):
                drops["result"] = "does not know the role 'tool'"
        except BadRow as error:
            drops["result"] = f"takes no tool's result: {error.reason}"
        return replace(style, ending=ending, drops=drops)

    def _prints_any_role(self, written: str, with_role: Callable[[str], str]) -> bool:
        """Whether a tool's result is written as that of a role that nobody knows would be."""
        try:
            other = with_role("qzrole")
        except BadRow:
            return False
        return other.replace("qzrole", "tool") == written


_NO_SPACE = dict.fromkeys(map(ord, " \n\t"))
_CARRIED = ("reasoning_content", "tool_calls", "tool_call_id", "name")


def where(number: int, message: Mapping[str, Any]) -> str:
    return f"message {number + 1} ({message['role']})"


def _fold(messages: Sequence[Message]) -> Sequence[Message]:
    """The system text moved into the first user message."""
    if len(messages) < 2 or messages[0]["role"] != "system":
        return messages
    system, user, *rest = messages
    return [{"role": "user", "content": f"{system['content']}\n\n{user['content']}"}, *rest]


def function_of(entry: Mapping[str, Any]) -> Mapping[str, Any]:
    inner = entry.get("function")
    return inner if isinstance(inner, Mapping) else entry


def _with_text(call: Mapping[str, Any]) -> dict[str, Any]:
    function = function_of(call)
    arguments = json.dumps(function.get("arguments"), ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}


def leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield key
            yield from leaves(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from leaves(inner)
    else:
        yield value
