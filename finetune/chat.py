"""Messages -> token ids and labels.

    text     <|im_start|>  assistant  \\n    Hi   <|im_end|>   \\n
    ids           1           520     2      7       3         2
    labels      -100         -100   -100     7       3       -100

A token is trained when the model itself must write it: all that follows the generation prompt, up to and including
the token that ends the turn. The places come from the template (the text with and without a reply is compared), never
from token values, so a padding token that equals the end token changes nothing, and no template needs special marks.
`prompt_ids` gives what stands before the reply, token by token what training saw; evaluation, chat and server use it.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from weakref import WeakKeyDictionary

from finetune.errors import DataError
from finetune.formats import DOCUMENT, BadRow, Message
from finetune.replies import Layout, Span, TrainOn, layout, starts
from finetune.templates import Template, Tools, named_templates, template_of

IGNORE = -100  # the label of a token that is not trained


@dataclass(frozen=True, slots=True)
class Encoded:
    """One row of token ids and, at the same places, labels."""

    input_ids: list[int]
    labels: list[int]


def encode(
    tokenizer: Any,
    messages: Sequence[Message],
    *,
    tools: Tools | None = None,
    train_on: TrainOn = "assistant",
    prompt: int = 0,
) -> Encoded:
    """Ids and labels of one conversation, or of one plain text (a single message of role "text", trained whole).

    `train_on` says which tokens get a label: those of every reply that is not marked `train: False` (assistant), of
    the last reply (last), all (all), or all from the first unmarked reply at or after message number `prompt` to the
    end of the last one (completion). Raises `BadRow` when the tokenizer or its template cannot carry this row,
    `DataError` when they cannot carry any.
    """
    [row] = _encode(tokenizer, [(messages, tools)], train_on, prompt)
    if isinstance(row, BadRow):
        raise row
    return row


def encode_many(
    tokenizer: Any,
    conversations: Iterable[tuple[Sequence[Message], Tools | None]],
    train_on: TrainOn = "assistant",
) -> list[Encoded | BadRow]:
    """`encode` for many (messages, tools) at once: for each conversation its ids and labels, or why there are none.

    Raises `DataError` when the tokenizer or its template can carry no row at all.
    """
    return _encode(tokenizer, conversations, train_on, 0)


def prompt_ids(tokenizer: Any, messages: Sequence[Message], tools: Tools | None = None) -> list[int]:
    """Ids of a conversation up to the next reply: exactly what `encode` puts before that reply."""
    template = template_of(tokenizer, tools)
    template.check(messages, tools)
    text = template.render(messages, tools, reply_follows=True)
    [ids] = _ids(tokenizer, [text])
    return _cutter(tokenizer, template).cut(tokenizer, text, ids, starts(template, messages, tools, text))[0]


def end_of_turn_ids(tokenizer: Any) -> list[int]:
    """The tokens generation must stop at: the trained ends of a turn, then the tokenizer's own end of text."""
    endings = [*template_of(tokenizer).endings, *template_of(tokenizer, _ANY_TOOL).endings]
    turns = [int(tokenizer.convert_tokens_to_ids(ending)) for ending in endings]
    eos = tokenizer.eos_token_id
    return list(dict.fromkeys(turns if eos is None else [*turns, int(eos)]))


def template_to_save(tokenizer: Any) -> Any:
    """The chat template as it was trained, for the saved tokenizer: servers apply it and add nothing.

    The default is written out, and a template that prints no bos gets the one that training put in front.
    """
    named = named_templates(tokenizer.chat_template)
    if not named:
        template = template_of(tokenizer)
        return "{{ bos_token }}" * template.silent_bos + template.text
    used = {
        template.text: template.silent_bos for template in (template_of(tokenizer), template_of(tokenizer, _ANY_TOOL))
    }
    return {name: "{{ bos_token }}" * used.get(text, False) + text for name, text in named.items()}


def notes(tokenizer: Any) -> list[str]:
    """What is worth telling about this tokenizer's template, one sentence each."""
    template = template_of(tokenizer)
    found = []
    if template.is_default:
        found.append('The tokenizer has no chat template; the plain one is used ("User: ...", "Assistant: ...").')
    if named := named_templates(tokenizer.chat_template):
        tool_use = ", and tool_use for rows with tools" if "tool_use" in named else ""
        found.append(f"The tokenizer has {len(named)} chat templates; the one named default is used{tool_use}.")
    if template.folds_system:
        found.append("The template knows no system message; its text is put in front of the first user message.")
    if template.silent_bos:
        found.append(f"The template prints no {template.bos}; one is put in front, as the tokenizer does by itself.")
    if "strftime_now" in template.text:
        found.append(f"The template writes the date into every prompt; these rows have {datetime.now():%Y-%m-%d}.")
    try:
        plain = layout(template, _ASKED)
    except BadRow as error:
        return [*found, f"A plain reply will be refused: {error.reason}."]
    head = plain.text[plain.spans[0].start :].partition("Pong")[0]
    if head.strip():
        found.append(f"The template writes {head!r} before a reply; the model must write it too, so it is trained.")
    try:
        layout(template, [*_ASKED, *_ASKED])
    except BadRow as error:
        found.append(f"Trained on every reply, rows with several are refused: {error.reason}.")
    return found


_ANY_TOOL: Tools = [{}]  # asks for the template of conversations with tools
_ASKED: list[Message] = [{"role": "user", "content": "Ping"}, {"role": "assistant", "content": "Pong"}]


# --------------------------------------------------------------------------------------------------------------- rows


def _encode(
    tokenizer: Any, conversations: Iterable[tuple[Sequence[Message], Tools | None]], train_on: TrainOn, prompt: int
) -> list[Encoded | BadRow]:
    """Render all, tokenise all at once, put the labels, and prove all at once that they say the replies."""
    results: list[Any] = []
    templates: dict[bool, Template] = {}
    for messages, tools in conversations:
        if (template := templates.get(bool(tools))) is None:
            template = templates[bool(tools)] = template_of(tokenizer, tools)
        try:
            if len(messages) == 1 and messages[0]["role"] == DOCUMENT:
                results.append((template, _document(tokenizer, template, messages[0]["content"])))
            else:
                results.append((template, layout(template, messages, tools, train_on, prompt)))
        except BadRow as error:
            results.append(error)
    good = [n for n, result in enumerate(results) if not isinstance(result, BadRow)]
    encoded = _ids(tokenizer, [results[n][1].text for n in good])
    trained: list[tuple[int, list[int], str]] = []
    for n, ids in zip(good, encoded, strict=True):
        template, rendered = results[n]
        ids, places = _cutter(tokenizer, template).cut(tokenizer, rendered.text, ids, rendered.starts)
        results[n] = _labelled(tokenizer, rendered, ids, places, n, trained)
    written = _texts(tokenizer, [ids for _, ids, _ in trained])
    for (n, _, text), back in zip(trained, written, strict=True):
        if back != text and _plain(back) != _plain(text):
            # The trained ids must say the reply, or the row would teach something else than what stands in the file.
            reason = f"the tokenizer cannot write the reply: {text[:60]!r} comes back as {back[:60]!r}"
            results[n] = BadRow(reason, "changed by the tokenizer")
    return results


def _labelled(
    tokenizer: Any,
    found: Layout,
    ids: list[int],
    places: list[int],
    n: int,
    trained: list[tuple[int, list[int], str]],
) -> Encoded | BadRow:
    """Ids with labels; the trained stretches and their texts are added to `trained` for the proof."""
    labels = [IGNORE] * len(ids)
    at = dict(zip(found.starts, places, strict=True))
    for span in found.spans:
        place = stop = at.get(span.start, 0)
        text = found.text[span.start : span.end]
        if span.ending:
            ending = tokenizer.convert_tokens_to_ids(span.ending)
            try:
                for _ in range(text.count(span.ending)):  # more than once when a thought or a completion has it too
                    stop = ids.index(ending, stop) + 1
            except ValueError:
                return BadRow(
                    f"the tokenizer does not write {span.ending!r} as one token", "changed by the tokenizer"
                )
        else:
            stop = len(ids)
        labels[place:stop] = ids[place:stop]
        trained.append((n, ids[place:stop], text))
    return Encoded(ids, labels) if ids else BadRow("there is no reply to train", "no reply")


def _document(tokenizer: Any, template: Template, text: str) -> Layout:
    """BOS (where the tokenizer wants one), the text, EOS; a text that brings its own gets no second."""
    eos = tokenizer.eos_token
    if not eos:
        raise DataError(
            "The tokenizer has no end-of-text token, so a plain text would have no end.",
            "Give it an eos_token in its tokenizer_config.json.",
        )
    if template.adds_bos and not text.startswith(template.bos):
        text = template.bos + text
    text = text if text.endswith(eos) else text + eos
    return Layout(text, [], [Span(0, len(text), "")])


# ------------------------------------------------------------------------------------------------------------- tokens


class _Cutter:
    """Finds the token at which a reply starts.

    The ids before a start are always those of the text before it alone, which is all a model has at inference. Where
    the tokenizer would join across (prompt "...\\n", reply "\\nHi" -> one token "\\n\\n"), the text is cut there:

        text     assistant \\n | \\n H i        joined:  [assistant] [\\n\\n] [H] [i]
                                               cut:     [assistant] [\\n] | [\\n] [H] [i]

    Tokenising each prompt again would double the work. But a tokenizer cuts the text at added tokens first and then
    encodes what lies between by itself. So the ids before a start are those up to the last added token, which are
    known, and those of the few characters from there on ("<|im_start|>assistant\\n"), the same in almost every row.
    """

    def __init__(self, anchor: tuple[str, int] | None) -> None:
        self._anchor = anchor
        self._known: dict[str, list[int]] = {}

    def cut(self, tokenizer: Any, text: str, ids: list[int], starts: Sequence[int]) -> tuple[list[int], list[int]]:
        """Ids of `text`, cut where need be, and the index of the first token at each of `starts`."""
        places = self._quick(tokenizer, text, ids, starts)
        return cut_plainly(tokenizer, text, ids, starts) if places is None else (ids, places)

    def _quick(self, tokenizer: Any, text: str, ids: list[int], starts: Sequence[int]) -> list[int] | None:
        if self._anchor is None:
            return None
        word, number = self._anchor
        if text.count(word) != ids.count(number):
            return None
        places: list[int] = []
        end = at = 0  # text and ids up to here are the same
        place = -1
        for start in starts:
            begin = text.rfind(word, end, start)
            if begin < 0:
                return None
            for _ in range(text.count(word, at, begin + len(word))):
                place = ids.index(number, place + 1)
            at = begin + len(word)
            short = text[begin:start]
            if (head := self._known.get(short)) is None:
                [head] = _ids(tokenizer, [short])
                if len(self._known) < 1000:
                    self._known[short] = head
            if ids[place : place + len(head)] != head:
                return None
            places.append(place + len(head))
            end = start
        return places


_cutters: WeakKeyDictionary[Template, _Cutter] = WeakKeyDictionary()


def _cutter(tokenizer: Any, template: Template) -> _Cutter:
    if (cutter := _cutters.get(template)) is None:
        cutter = _cutters[template] = _Cutter(_anchor(tokenizer, template))
    return cutter


def _anchor(tokenizer: Any, template: Template) -> tuple[str, int] | None:
    """The last added token of the generation prompt, if the text on both sides of it is always encoded by itself."""
    if getattr(tokenizer, "split_special_tokens", False) or not getattr(tokenizer, "is_fast", False):
        return None
    try:
        opening = template.render(_ASKED[:1], reply_follows=True)
    except BadRow:
        return None
    added = {str(token): (number, token) for number, token in tokenizer.added_tokens_decoder.items()}
    sure = [
        (opening.rfind(word), word, number)
        for word, (number, token) in added.items()
        if word in opening and not (token.single_word or token.normalized)
        # no other token can reach into it from the left, or hold it
        if not any(
            other != word and (word in other or any(other.endswith(word[:n]) for n in range(1, len(word))))
            for other in added
        )
    ]
    return max(sure)[1:] if sure else None


def cut_plainly(tokenizer: Any, text: str, ids: list[int], starts: Sequence[int]) -> tuple[list[int], list[int]]:
    """The definition: the text before each start is tokenised by itself."""
    done: list[int] = []
    places: list[int] = []
    base, rest = 0, ids
    for start in starts:
        [head] = _ids(tokenizer, [text[base:start]])
        if rest[: len(head)] != head:
            done, base, head = done + head, start, []
            [rest] = _ids(tokenizer, [text[start:]])
        places.append(len(done) + len(head))
    return done + rest, places


def _ids(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    """Ids of texts without anything added; for fast tokenizers without the character offsets, which cost a third."""
    core = _core(tokenizer)
    if not texts:
        return []
    if core is None:
        return [list(tokenizer(text, add_special_tokens=False)["input_ids"]) if text else [] for text in texts]
    return [encoding.ids for encoding in core.encode_batch_fast(texts, add_special_tokens=False)]


def _texts(tokenizer: Any, rows: list[list[int]]) -> list[str]:
    core = _core(tokenizer)
    if core is None:
        return [tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False) for ids in rows]
    return list(core.decode_batch(rows, skip_special_tokens=False)) if rows else []


def _core(tokenizer: Any) -> Any:
    """The fast tokenizer inside, ready to encode as `tokenizer(text)` does; None when there is none."""
    if not getattr(tokenizer, "is_fast", False) or getattr(tokenizer, "split_special_tokens", False):
        return None
    core = tokenizer.backend_tokenizer
    if core.padding is not None:
        core.no_padding()
    if core.truncation is not None:
        core.no_truncation()
    core.encode_special_tokens = False
    return core


def _plain(text: str) -> str:
    """Without what tokenizers are known to normalise: white space at seams, and composed characters."""
    return "".join(unicodedata.normalize("NFKC", text).split())
