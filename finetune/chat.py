"""Messages -> token ids and labels; the one place where chat templates and end tokens are known.

    text     <|im_start|>  assistant  \\n    Hi   <|im_end|>   \\n
    ids           1           520     2      7       3         2
    labels      -100         -100   -100     7       3       -100

A token is trained when the model itself must write it: all that follows the generation prompt, up to and including
the token that ends the turn. The places come from the template (the text with and without a reply is compared), never
from token values, so a padding token that equals the end token changes nothing, and no template needs special marks.
`prompt_ids` gives what stands before the reply, token by token what training saw; evaluation, chat and server use it.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal
from weakref import WeakKeyDictionary, ref

from finetune.errors import DataError
from finetune.formats import DOCUMENT, BadRow, Message

IGNORE = -100  # the label of a token that is not trained

DEFAULT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] | capitalize + ': ' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)  # for base models that bring none; the space before a reply is the reply's, as byte-level vocabularies have it


@dataclass(frozen=True, slots=True)
class Encoded:
    """One row of token ids and, at the same places, labels."""

    input_ids: list[int]
    labels: list[int]


@dataclass(frozen=True, slots=True)
class Reply:
    """Where a trained reply stands in the rendered text: `text[start:end]`, the last characters being `ending`."""

    start: int
    end: int
    ending: str
    head: str  # what the template itself writes between the generation prompt and the reply's text


TrainOn = Literal["assistant", "last", "all", "completion"]
Tools = Sequence[Mapping[str, Any]]


def encode_many(
    tokenizer: Any,
    conversations: Iterable[tuple[Sequence[Message], Tools | None]],
    train_on: TrainOn = "assistant",
) -> list[Encoded | BadRow]:
    """`encode` for many (messages, tools) at once: for each conversation its ids and labels, or why there are none.

    Raises `DataError` when the tokenizer or its template can carry no row at all.
    """
    results: list[Encoded | BadRow] = []
    for messages, tools in conversations:
        try:
            results.append(encode(tokenizer, messages, tools=tools, train_on=train_on))
        except BadRow as error:
            results.append(error)
    return results


def encode(
    tokenizer: Any,
    messages: Sequence[Message],
    *,
    tools: Tools | None = None,
    train_on: TrainOn = "assistant",
    prompt: int = 0,
) -> Encoded:
    """Ids and labels of one conversation, or of one plain text (a single message of role "text", trained whole).

    Raises `BadRow` when the tokenizer or its template cannot carry this row, `DataError` when they cannot carry any.
    """
    if tools or train_on != "assistant" or prompt:
        raise BadRow("tools and data.train_on are not carried yet", "not supported")
    if len(messages) == 1 and messages[0]["role"] == DOCUMENT:
        return _encode_document(tokenizer, messages[0]["content"])
    chat = _chat_of(tokenizer)
    text, replies = chat.layout(messages)
    ids, places = _tokenize(tokenizer, text, [reply.start for reply in replies])
    labels = [IGNORE] * len(ids)
    for reply, place in zip(replies, places, strict=True):
        written = text[reply.start : reply.end]
        stop = place
        for _ in range(written.count(reply.ending)):  # more than once when the template's own head has it too
            stop = ids.index(tokenizer.convert_tokens_to_ids(reply.ending), stop) + 1
        labels[place:stop] = ids[place:stop]
        _same_text(tokenizer, ids[place:stop], written)
    return Encoded(ids, labels)


def prompt_ids(tokenizer: Any, messages: Sequence[Message], tools: Tools | None = None) -> list[int]:
    """Ids of a conversation up to the next reply: exactly what `encode` puts before that reply."""
    if tools:
        raise BadRow("tools are not carried yet", "not supported")
    chat = _chat_of(tokenizer)
    text = chat.render(messages, reply_follows=True)
    return _tokenize(tokenizer, text, chat.earlier_starts(messages, text))[0]


def end_of_turn_ids(tokenizer: Any) -> list[int]:
    """The tokens generation must stop at: the trained end of a turn, then the tokenizer's own end of text."""
    turn = int(tokenizer.convert_tokens_to_ids(_chat_of(tokenizer).ending))
    eos = tokenizer.eos_token_id
    return [turn] if eos is None or eos == turn else [turn, int(eos)]


def template_to_save(tokenizer: Any) -> Any:
    """The chat template as it was trained, for the saved tokenizer: servers apply it and add nothing.

    The default is written out, and a template that prints no bos gets the one that training put in front.
    """
    chat = _chat_of(tokenizer)
    template = DEFAULT_TEMPLATE if chat.is_default else tokenizer.chat_template
    silent = chat.adds_bos and not chat.template_text(_PROBE[1:]).startswith(chat.bos)
    return "{{ bos_token }}" + template if silent and isinstance(template, str) else template


def notes(tokenizer: Any) -> list[str]:
    """What is worth telling about this tokenizer's template, one sentence each."""
    chat = _chat_of(tokenizer)
    found = []
    if chat.is_default:
        found.append('The tokenizer has no chat template; the plain one is used ("User: ...", "Assistant: ...").')
    if chat.folds_system:
        found.append("The template knows no system message; its text is put in front of the first user message.")
    if chat.adds_bos and not chat.template_text(_PROBE[1:]).startswith(chat.bos):
        found.append(f"The template prints no {chat.bos}; one is put in front, as the tokenizer does by itself.")
    try:
        head = chat.layout(_PROBE[1:])[1][0].head
    except BadRow as error:
        return [*found, f"A plain reply will be refused: {error.reason}."]
    if head.strip():
        found.append(f"The template writes {head!r} before a reply; the model must write it too, so it is trained.")
    return found


# ----------------------------------------------------------------------------------------------------- template facts

_PROBE: list[Message] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Ping"},
    {"role": "assistant", "content": "Pong"},
]
_known: WeakKeyDictionary[Any, tuple[Any, _Chat]] = WeakKeyDictionary()


def _chat_of(tokenizer: Any) -> _Chat:
    """The facts about a tokenizer's template, found once per tokenizer and template."""
    state = (tokenizer.chat_template, tokenizer.bos_token, tokenizer.eos_token, len(tokenizer))
    cached = _known.get(tokenizer)
    if cached is None or cached[0] != state:
        cached = (state, _Chat(tokenizer))
        _known[tokenizer] = cached
    return cached[1]


class _Chat:
    """A tokenizer's chat template, with the few things about it that one has to find out by trying."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = ref(tokenizer)  # weak, or the cache below would keep its own keys alive
        self.is_default = not tokenizer.chat_template
        if self.is_default and not tokenizer.eos_token:
            raise DataError(
                "The tokenizer has no chat template and no end-of-text token, so a reply would have no end.",
                "Give it an eos_token or a chat_template in its tokenizer_config.json.",
            )
        self.bos: str = tokenizer.bos_token or ""
        self.adds_bos = bool(self.bos) and tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]
        special = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
        special |= {str(token) for token in tokenizer.all_special_tokens}
        longest_first = sorted(special, key=lambda token: (-len(token), token))
        self.control = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self.folds_system = not self._takes_system()

    @property
    def ending(self) -> str:
        """The control token that ends an assistant's turn."""
        found = self.control.search(self.tail)
        if found is None:
            raise DataError(
                "The chat template puts no control token after a reply, so the model would never learn to stop.",
                "Use a template that ends each assistant turn with a special token, such as the eos_token.",
            )
        return found[0]

    def _takes_system(self) -> bool:
        try:
            return _PROBE[0]["content"] in self.template_text(_PROBE)
        except BadRow:
            return False

    @cached_property  # late, for a document needs no template
    def tail(self) -> str:
        """What the template writes after the last reply, e.g. "<|im_end|>\n"."""
        try:
            _, found, tail = self.template_text(_PROBE[1:]).rpartition(_PROBE[-1]["content"])
            reason = "it leaves the answer out"
        except BadRow as error:
            found, reason = "", error.reason
        if not found:
            raise DataError(
                f"The tokenizer's chat template cannot carry a question and its answer: {reason}.",
                "Use the model's own template, or remove chat_template to get the plain default.",
            )
        return tail

    def template_text(self, messages: Sequence[Message], reply_follows: bool = False) -> str:
        """The template's own output; `BadRow` with the template's words when it refuses."""
        from jinja2.exceptions import TemplateError

        plain = [{"role": message["role"], "content": message["content"]} for message in messages]
        tokenizer = self._tokenizer()
        assert tokenizer is not None
        template = DEFAULT_TEMPLATE if self.is_default else None
        try:
            text: str = tokenizer.apply_chat_template(
                plain, chat_template=template, tokenize=False, add_generation_prompt=reply_follows
            )
        except (TemplateError, TypeError) as error:
            raise BadRow(f"the chat template refuses it: {error}", "refused by the template") from None
        return text

    def render(self, messages: Sequence[Message], reply_follows: bool = False) -> str:
        """The conversation as text with exactly one BOS where the model wants one, every message's text in it."""
        for number, message in enumerate(messages):
            if found := self.control.search(message["content"]):
                raise BadRow(
                    f"message {number + 1} ({message['role']}) holds {found[0]!r}, a control token of this tokenizer",
                    "control token",
                )
        folded = _fold(messages) if self.folds_system else messages
        text = self.template_text(folded, reply_follows)
        if self.adds_bos and not text.startswith(self.bos):
            text = self.bos + text
        return text

    def layout(self, messages: Sequence[Message]) -> tuple[str, list[Reply]]:
        """The rendered conversation and the trained replies in it.

        A reply starts where the generation prompt ends and ends with the first control token after its text. The text
        before both places must be what the template gives for the conversation so far: only then will the model meet
        at inference what it was trained on.
        """
        tail = self.tail  # first: a template that can carry no reply at all is refused as such
        text = self.render(messages)
        self._complete(messages, text)
        replies = []
        for number, message in enumerate(messages):
            if message["role"] != "assistant" or not message.get("train", True):
                continue
            prompt = self.render(messages[:number], reply_follows=True)
            last = number == len(messages) - 1
            until = text if last else self.render(messages[: number + 1])
            content = message["content"].strip()
            reply = self._reply(until, len(prompt), content, tail) if until.startswith(prompt) else None
            if reply is None or not text.startswith(until[: reply.end]):
                raise BadRow(_OTHER_PROMPT if reply is None else _REWRITES, "template rewrites turns")
            replies.append(reply)
        return text, replies

    def _reply(self, text: str, start: int, content: str, tail: str) -> Reply:
        """The reply that begins at `start`; `text` ends with its turn."""
        end = len(text) - len(tail)
        written = text[start:end].rstrip()
        if not (text.endswith(tail) and written.endswith(content)):
            raise BadRow("the chat template changes the reply's text", "changed by the template")
        ending = self.ending
        return Reply(start, text.index(ending, end) + len(ending), ending, written.removesuffix(content))

    def earlier_starts(self, messages: Sequence[Message], text: str) -> list[int]:
        """Where the replies begin that already stand in a prompt (needed to cut tokens as `encode` does)."""
        starts = []
        for number, message in enumerate(messages):
            if message["role"] == "assistant" and message.get("train", True):
                prompt = self.render(messages[:number], reply_follows=True)
                starts += [len(prompt)] if text.startswith(prompt) else []
        return starts

    def _complete(self, messages: Sequence[Message], text: str) -> None:
        """Every message's text is in the rendered conversation, in order."""
        at = 0
        for number, message in enumerate(messages):
            content = message["content"].strip()
            found = text.find(content, at)
            if found < 0:
                where = f"message {number + 1} ({message['role']})"
                raise BadRow(f"the chat template drops or changes the text of {where}", "changed by the template")
            at = found + len(content)


_REWRITES = (
    "the chat template writes an earlier reply differently once the conversation goes on, so it would be trained as "
    "the model never has to write it; give the row as prompt-completion with message lists to train its last reply"
)
_OTHER_PROMPT = "the chat template begins this reply otherwise than its own generation prompt says"


def _fold(messages: Sequence[Message]) -> Sequence[Message]:
    """The system text moved into the first user message."""
    if len(messages) < 2 or messages[0]["role"] != "system":
        return messages
    system, user, *rest = messages
    return [{"role": "user", "content": f"{system['content']}\n\n{user['content']}"}, *rest]


# ------------------------------------------------------------------------------------------------------------- tokens


def _ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []


def _tokenize(tokenizer: Any, text: str, starts: Sequence[int]) -> tuple[list[int], list[int]]:
    """Ids of `text`, and the index of the first token at each of `starts`.

    The ids before a start are always those of the text before it alone, which is all a model has at inference. Where
    the tokenizer would join across (prompt "...\\n", reply "\\nHi" -> one token "\\n\\n"), the text is cut there:

        text     assistant \\n | \\n H i        joined:  [assistant] [\\n\\n] [H] [i]
                                               cut:     [assistant] [\\n] | [\\n] [H] [i]
    """
    ids: list[int] = []
    places: list[int] = []
    base, rest = 0, _ids(tokenizer, text)
    for start in starts:
        head = _ids(tokenizer, text[base:start])
        if rest[: len(head)] != head:
            ids, base, rest, head = ids + head, start, _ids(tokenizer, text[start:]), []
        places.append(len(ids) + len(head))
    return ids + rest, places


def _same_text(tokenizer: Any, ids: list[int], text: str) -> None:
    """The trained ids must say the reply; else the row would teach something else than what stands in the file."""
    back = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    if back != text and _plain(back) != _plain(text):
        raise BadRow(
            f"the tokenizer cannot write the reply: {text[:60]!r} comes back as {back[:60]!r}",
            "changed by the tokenizer",
        )


def _plain(text: str) -> str:
    """Without what tokenizers are known to normalise: white space at seams, and composed characters."""
    return "".join(unicodedata.normalize("NFKC", text).split())


def _encode_document(tokenizer: Any, text: str) -> Encoded:
    """BOS (where the tokenizer wants one), the text, EOS; a text that brings its own gets no second."""
    chat = _chat_of(tokenizer)
    eos = tokenizer.eos_token
    if not eos:
        raise DataError(
            "The tokenizer has no end-of-text token, so a plain text would have no end.",
            "Give it an eos_token in its tokenizer_config.json.",
        )
    if chat.adds_bos and not text.startswith(chat.bos):
        text = chat.bos + text
    ids = _ids(tokenizer, text if text.endswith(eos) else text + eos)
    _same_text(tokenizer, ids, text if text.endswith(eos) else text + eos)
    return Encoded(ids, list(ids))
