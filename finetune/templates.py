"""A tokenizer's chat template: text of a conversation, where its replies stand in it, and what nobody writes down.

    <|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\nHello<|im_end|>\\n
    |---- the generation prompt of the reply ----------------|--- span ---|tail|

Templates are foreign programs. They drop what they do not know (tools, thoughts), rewrite turns once the conversation
goes on, and raise whatever they like. So each row is rendered with and without each reply and compared, and whatever
does not come out as it went in makes the row a `BadRow` with the reason.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from os.path import commonprefix
from typing import Any, Literal
from weakref import WeakKeyDictionary, ref

from finetune.errors import DataError
from finetune.formats import BadRow, Message

TrainOn = Literal["assistant", "last", "all", "completion"]
Tools = Sequence[Mapping[str, Any]]

DEFAULT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] | capitalize + ': ' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)  # for base models that bring none; the space before a reply is the reply's, as byte-level vocabularies have it


@dataclass(frozen=True, slots=True)
class Span:
    """Trained text: `text[start:end]`, the last characters being `ending`; "" when the span ends with the text."""

    start: int
    end: int
    ending: str
    head: str = ""  # what the template itself writes between the generation prompt and the reply's text


@dataclass(frozen=True, slots=True)
class Layout:
    """A rendered conversation, where every reply in it starts, and what of it is trained."""

    text: str
    starts: list[int]
    spans: list[Span]


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


def _probe_talk(result_role: str = "tool") -> list[dict[str, Any]]:
    return [
        {"role": "user", "content": "Ping"},
        {"role": "assistant", "content": "", "tool_calls": _PROBE_CALL},
        {"role": result_role, "content": "qzresult", "name": "qzcall", "tool_call_id": "abcdefghi"},
        {"role": "assistant", "content": "Pong"},
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
    """One chat template of a tokenizer, with the few things about it that one has to find out by trying."""

    def __init__(self, tokenizer: Any, text: str | None) -> None:
        self._tokenizer = ref(tokenizer)  # weak, or the cache above would keep its own keys alive
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
            for value in _leaves([v for key, v in message.items() if key in _CARRIED]) if len(message) > 2 else ():
                self._check_text(str(value), number, message)
        if tools:
            if found := self.control.search(json.dumps(tools, ensure_ascii=False)):
                raise BadRow(f"the tools hold {found[0]!r}, a control token of this tokenizer", "control token")
            self._needs("tools", str(_function(tools[0]).get("name")))
        for message in messages:
            said: Mapping[str, Any] = message
            if said.get("tool_calls"):
                self._needs("call", str(_function(said["tool_calls"][0]).get("name")))
            if said["role"] == "tool":
                self._needs("result", str(said.get("name") or said["content"][:40]))

    def _check_text(self, text: str, number: int, message: Message) -> None:
        if found := self.control.search(text):
            raise BadRow(
                f"{_where(number, message)} holds {found[0]!r}, a control token of this tokenizer", "control token"
            )

    # -------------------------------------------------------------------------------------------------------- replies

    def layout(
        self,
        messages: Sequence[Message],
        tools: Tools | None = None,
        train_on: TrainOn = "assistant",
        prompt: int = 0,
    ) -> Layout:
        """The rendered conversation and the trained spans in it.

        A reply starts where the generation prompt ends and ends with the control token that ends its turn. The text
        before both places must be what the template gives for the conversation so far: only then will the model meet
        at inference what it was trained on.
        """
        tail = self.tail  # first: a template that can carry no reply at all is refused as such
        self.check(messages, tools)
        wanted = _wanted(messages, train_on, prompt)
        text = self.render(messages, tools)
        if self.opens_thought:
            text = self._continued(messages, tools, text)
        self._complete(messages, tools, text, thoughts=train_on == "all")
        starts: list[int] = []
        spans: list[Span] = []
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            start = self._start(messages[:number], tools, text)
            if number in wanted:
                whole = number == len(messages) - 1
                until = text if whole else self.render(messages[: number + 1], tools)
                if start is None:
                    before = self.render(messages[:number], tools, reply_follows=True)
                    raise BadRow(_REWRITES if until.startswith(before) else _OTHER_PROMPT, _REWRITTEN)
                span = self._span(until, start, number, message, tail)
                if not whole and not text.startswith(until[: span.end]):
                    raise BadRow(_REWRITES, _REWRITTEN)
                spans.append(span)
            if start is not None:
                starts.append(start)
        if train_on == "completion":
            spans = [Span(spans[0].start, spans[-1].end, spans[-1].ending)]
        return Layout(text, starts, spans if train_on != "all" else [Span(0, len(text), "")])

    def _continued(self, messages: Sequence[Message], tools: Tools | None, text: str) -> str:
        """Where the prompt ends with "<think>" and the template drops thoughts: the last reply put behind the prompt.

        That is what the model meets and must write. It is known only when the reply brings its thought.
        """
        last: Mapping[str, Any] = messages[-1]
        content = last["content"].lstrip()
        if thought := last.get("reasoning_content"):
            content = f"<think>\n{thought.strip()}\n</think>\n\n{content}"
        if not content.startswith("<think>") or last["role"] != "assistant" or last.get("tool_calls"):
            return text
        prompt = self.render(messages[:-1], tools, reply_follows=True)
        return text if text.startswith(prompt) else prompt + content[len("<think>") :].lstrip("\n") + self.tail

    def starts(self, messages: Sequence[Message], tools: Tools | None, text: str) -> list[int]:
        """Where the replies begin that already stand in a prompt (needed to cut tokens as in training)."""
        found = (
            self._start(messages[:number], tools, text)
            for number, message in enumerate(messages)
            if message["role"] == "assistant"
        )
        return [start for start in found if start is not None]

    def _start(self, before: Sequence[Message], tools: Tools | None, text: str) -> int | None:
        """Where the reply to `before` begins in `text`; None when `text` tells the conversation in other words."""
        try:
            prompt = self.render(before, tools, reply_follows=True)
        except BadRow:
            return None
        return len(prompt) if text.startswith(prompt) else None

    def _span(self, text: str, start: int, number: int, message: Mapping[str, Any], tail: str) -> Span:
        """The reply that begins at `start`; `text` ends with its turn."""
        calls = message.get("tool_calls")
        if text.endswith(tail) and start <= len(text) - len(tail):
            ending, stop = self.ending, len(text) - len(tail)
        else:
            stripped = text.rstrip()
            ending = self.tools.ending if calls else ""
            stop = len(stripped) - len(ending)
            if not ending or not stripped.endswith(ending) or stop < start:
                raise BadRow("the chat template changes the reply's text", "changed by the template")
        body = text[start:stop].rstrip()
        where = _where(number, message)
        thought, answer = message.get("reasoning_content") or "", message["content"].strip()
        if self.misplaces_thought and _split_thought(answer):
            raise BadRow(f"{where} holds a thought in its text; give it as reasoning_content", "thought in the text")
        if not (answer in body if calls else body.endswith(answer)):
            inline, answer = _split_thought(answer) or ("", answer)
            thought += inline
        if not (answer in body if calls else body.endswith(answer)):
            raise BadRow("the chat template changes the reply's text", "changed by the template")
        head = body if calls else body.removesuffix(answer)
        if thought.strip() not in head:
            raise BadRow(f"the chat template drops the thought of {where}", "changed by the template")
        if lost := _lost(body, calls or ()):
            raise BadRow(f"the chat template drops {lost} of the tool call of {where}", "changed by the template")
        return Span(start, text.index(ending, stop) + len(ending), ending, head)

    def _complete(self, messages: Sequence[Message], tools: Tools | None, text: str, thoughts: bool) -> None:
        """Every message's text is in the rendered conversation, in order; `thoughts`: those of all turns, too.

        Otherwise the thought of an earlier turn may be missing, as many templates leave it out at inference as well;
        a trained turn's thought is looked for in its own span.
        """
        at = 0
        for number, message in enumerate(messages):
            said: Mapping[str, Any] = message
            where, begin, content = _where(number, message), at, message["content"].strip()
            forms = _forms(content) if message["role"] == "tool" else [content]
            thought = said.get("reasoning_content", "")
            if message["role"] == "assistant" and (parts := _split_thought(content)):
                thought += parts[0]
                forms.append(parts[1])
            at = min((found + len(form) for form in forms if (found := text.find(form, begin)) >= 0), default=-1)
            if at < 0 or (thoughts and text.find(thought.strip(), begin) < 0):
                raise BadRow(f"the chat template drops or changes the text of {where}", "changed by the template")
            if lost := _lost(text[begin:], said.get("tool_calls") or ()):
                raise BadRow(f"the chat template drops {lost} of the tool call of {where}", "changed by the template")
        for tool in tools or ():
            if str(name := _function(tool).get("name")) not in text:
                raise BadRow(f"the chat template drops the tool '{name}'", "changed by the template")

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
        ask, call, result, _ = _probe_talk()

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
_REWRITTEN = "template rewrites turns"
_REWRITES = (
    "the chat template writes an earlier reply differently once the conversation goes on, so it would be trained as "
    "the model never has to write it; data.train_on: last trains the last reply of such rows"
)
_OTHER_PROMPT = (
    "the chat template begins this reply otherwise than its own generation prompt says; where that opens a thought, "
    "the reply must bring one, as reasoning_content or as <think>...</think> in its text"
)


def _wanted(messages: Sequence[Message], train_on: TrainOn, prompt: int) -> set[int]:
    """The replies that are trained, by their places."""
    replies = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
    wanted = {n for n in replies if messages[n].get("train", True)}
    if train_on == "all":
        return set()
    if train_on == "last":
        wanted &= set(replies[-1:])
    if train_on == "completion":
        wanted = {n for n in wanted if n >= prompt}
        if gaps := [n for n in replies if wanted and n > min(wanted) and n not in wanted]:
            raise BadRow(
                f"{_where(gaps[0], messages[gaps[0]])} stands in the completion and is marked as not trained; "
                "data.train_on: assistant leaves it out",
                "mark inside the completion",
            )
    if not wanted:
        raise BadRow("there is no reply to train", "no reply")
    return wanted


def _where(number: int, message: Mapping[str, Any]) -> str:
    return f"message {number + 1} ({message['role']})"


def _fold(messages: Sequence[Message]) -> Sequence[Message]:
    """The system text moved into the first user message."""
    if len(messages) < 2 or messages[0]["role"] != "system":
        return messages
    system, user, *rest = messages
    return [{"role": "user", "content": f"{system['content']}\n\n{user['content']}"}, *rest]


def _split_thought(content: str) -> tuple[str, str] | None:
    """Thought and answer of a text that begins with a thought, as templates take it apart; else None."""
    before, mark, answer = content.partition("</think>")
    opening, _, thought = before.rpartition("<think>")
    if not mark or opening.strip() or "</think>" in answer or "<think>" in answer:
        return None
    return thought.strip(), answer.strip()


def _function(entry: Mapping[str, Any]) -> Mapping[str, Any]:
    inner = entry.get("function")
    return inner if isinstance(inner, Mapping) else entry


def _with_text(call: Mapping[str, Any]) -> dict[str, Any]:
    function = _function(call)
    arguments = json.dumps(function.get("arguments"), ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}


def _lost(text: str, calls: Sequence[Mapping[str, Any]]) -> str:
    """The first name or value of the calls that is not in `text`, in any of the ways to write it; "" for none."""
    for call in calls:
        function = _function(call)
        for value in [function.get("name"), *_leaves(function.get("arguments"))]:
            if all(form not in text for form in _forms(value)):
                return f"{str(value)[:60]!r}"
    return ""


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield key
            yield from _leaves(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _leaves(inner)
    else:
        yield value


def _forms(value: Any) -> list[str]:
    """The ways in which templates write a value: as it is, as JSON, as JSON in JSON, as Python."""
    if not isinstance(value, str):
        return [json.dumps(value), str(value), str(value).lower()]
    once = json.dumps(value, ensure_ascii=False)[1:-1]
    return [value.strip(), once, json.dumps(value)[1:-1], json.dumps(once)[1:-1], repr(value)[1:-1]]
