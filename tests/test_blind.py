"""Which templates only copy, and that what is found once for the same roles is what each row would give."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from finetune import replies
from finetune.blind import only_copies
from finetune.errors import DataError
from finetune.formats import BadRow
from finetune.templates import DEFAULT_TEMPLATE, template_of
from tests.tiny import FAMILIES, SMOLLM2, template_text, tiny_tokenizer

TALK = "{% for message in messages %}{{ message.role + ':' }}"
END = "{{ eos_token }}{% endfor %}{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"

COPIES = {
    "as it is": TALK + "{{ message.content }}" + END,
    "stripped": TALK + "{{ message['content'].strip() }}" + END,
    "from the left": TALK + "{{ message['content'].lstrip() }}" + END,
    "from the right": TALK + "{{ (' ' ~ message['content']).rstrip() }}" + END,
    "with its frame": TALK + "{{ ('\n' + message['content'] + '\n') | trim }}" + END,
    "through a name": TALK + "{% set said = message.content %}{% set said = said | trim %}{{ said }}" + END,
    "through a block": TALK + "{% set said %}<{{ message.content }}>{% endset %}{{ said }}" + END,
    "through a macro": "{% macro say(x) %}{{ x }}{% endmacro %}" + TALK + "{{ say(message.content) }}" + END,
    "through a namespace": "{% set ns = namespace(x='') %}"
    + TALK
    + "{% set ns.x = message.content %}{{ ns.x }}"
    + END,
    "twice": TALK + "{{ message.content + message['content'] }}" + END,
    "by get": TALK + "{{ message.get('content') }}" + END,
    "text and parts": TALK
    + "{% if message.content is string %}{{ message.content }}{% else %}"
    + "{% for part in message.content %}{{ part.text }}{% endfor %}{% endif %}"
    + END,
    "by role": TALK
    + "{{ message.content if message.role == 'user' else message.content | trim }}"
    + "{% if message.role == 'tool' %}{{ message.content | tojson }}{% endif %}"
    + END,
    "absent keys": TALK
    + "{% if message.tool_calls %}{{ message | tojson }}{% endif %}{{ message.content }}"
    + "{% if 'name' in message %}{{ message | string }}{% endif %}"
    + END,
    "tools": "{% if tools %}{{ messages | tojson }}{% endif %}" + TALK + "{{ message.content }}" + END,
    "if there is any": TALK + "{% if message.content %}{{ message.content or 'nothing' }}{% endif %}" + END,
    "the end stripped": "{% set x %}"
    + TALK.replace("+ ':'", "+ ':' + eos_token if message.role == 'assistant'")
    + "{{ message.content }}{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}{% endset %}"
    + "{% if add_generation_prompt %}{{ x | trim }}{% else %}{{ x }}{% endif %}",
    "others": TALK + "{{ messages[0].content + (messages | last).content + messages[1:][0].content }}" + END,
}

UPPER = "{% macro say(x) %}{{ x | upper }}{% endmacro %}"
LOOKS = {
    "length": TALK + "{{ message.content | length }}{{ message.content }}" + END,
    "in": TALK + "{% if '</think>' in message.content %}!{% endif %}{{ message.content }}" + END,
    "equal": TALK + "{% if message.content == 'Hi' %}!{% endif %}{{ message.content }}" + END,
    "equal through a name": "{% set first = messages[0].content | trim %}" + TALK
    + "{{ 'x' if first == 'Hi' }}{{ message.content }}" + END,
    "startswith": TALK + "{{ message.content.startswith('H') }}{{ message.content }}" + END,
    "split": TALK + "{{ message.content.split('e')[0] }}" + END,
    "upper": TALK + "{{ message.content | upper }}" + END,
    "replace": TALK + "{{ message.content | replace('e', 'o') }}" + END,
    "strip of letters": TALK + "{{ message.content.strip('H') }}" + END,
    "trim of letters": TALK + "{{ message.content | trim('H') }}" + END,
    "slice": TALK + "{{ message.content[:2] }}" + END,
    "letters": TALK + "{% for letter in message.content %}{{ letter }}.{% endfor %}" + END,
    "json": TALK + "{{ message.content | tojson }}" + END,
    "whole message": TALK + "{{ message | tojson }}" + END,
    "whole list": "{{ messages }}" + TALK + END,
    "values": TALK + "{{ message.values() | list }}" + END,
    "items": TALK + "{% for key, value in message.items() %}{{ value | upper }}{% endfor %}" + END,
    "key by name": "{% set key = 'content' %}" + TALK + "{{ message[key] | upper }}{{ message[key] }}" + END,
    "attr": TALK + "{{ (message | attr('get'))('content') | upper }}" + END,
    "map": "{{ messages | map(attribute='content') | join | upper }}" + TALK + END,
    "macro": UPPER + TALK + "{{ say(message.content) }}" + END,
    "macro by another name": UPPER + "{% set f = say %}" + TALK + "{{ f(message.content) }}" + END,
    "two macros": UPPER + "{% if false %}{% macro say(x) %}{{ x }}{% endmacro %}{% endif %}"
    + TALK + "{{ say(message.content) }}" + END,
    "surplus arguments": "{% macro say(x) %}{{ varargs[0] | upper }}{% endmacro %}" + TALK
    + "{{ say('', message.content) }}" + END,
    "namespace": "{% set ns = namespace(x='') %}" + TALK + "{% set ns.x = message.content %}{{ ns.x | upper }}" + END,
    "namespace by another name": "{% set ns = namespace(x='') %}{% set other = ns %}" + TALK
    + "{% set ns.x = message.content %}{{ other.x | upper }}" + END,
    "neighbour": TALK + "{{ message.content }}{{ loop.nextitem.content | upper if loop.nextitem }}" + END,
    "neighbour by another name": TALK + "{% set l = loop %}{{ (l.previtem or message).content | upper }}" + END,
    "list": "{% set all = [messages[0].content] %}{{ all[0] | upper }}" + TALK + END,
    "appended": "{% set all = [] %}" + TALK + "{{ all.append(message.content) }}" + END + "{{ all | join | upper }}",
    "block": TALK + "{% set x %}{{ message.content }}{% endset %}{{ x | upper }}" + END,
    "filter block": TALK + "{% filter upper %}{{ message.content }}{% endfilter %}" + END,
    "as a format": TALK + "{{ message.content % () }}" + END,
    "times": TALK + "{{ message.content * 2 }}" + END,
    "test": TALK + "{% if message.content is upper %}!{% endif %}{{ message.content }}" + END,
    "error": TALK + "{{ raise_exception(message.content) if 'x' in message.content }}" + END,
    "date": "{{ strftime_now('%S') }}" + TALK + "{{ message.content }}" + END,
    "luck": "{{ [1, 2] | random }}" + TALK + "{{ message.content }}" + END,
}  # fmt: skip


@pytest.mark.parametrize("name", COPIES)
def test_it_copies(name: str) -> None:
    assert only_copies(COPIES[name])


@pytest.mark.parametrize("name", LOOKS)
def test_it_looks(name: str) -> None:
    assert not only_copies(LOOKS[name])


def test_families() -> None:
    assert {family for family in FAMILIES if not only_copies(template_text(family) or DEFAULT_TEMPLATE)} == {"qwen3"}
    assert not only_copies("{% if %}")


TOKENIZERS = {name: tiny_tokenizer(template, bos="<bos>", eos="<eos>") for name, template in COPIES.items()}
TOKENIZERS |= {family: tiny_tokenizer(family) for family in FAMILIES}
WORDS = st.text(
    st.sampled_from("aHe \n\t\u2003\x0b\x1c\u00a0\ue000\ue0011.:'{}\"<|>é中😀")
    | st.characters(exclude_categories=["C"]),
    max_size=8,
)


@given(
    name=st.sampled_from(sorted(TOKENIZERS)),
    turns=st.lists(WORDS, min_size=1, max_size=6),
    system=st.none() | WORDS,
    marks=st.lists(st.booleans(), min_size=3, max_size=3),
    on=st.sampled_from(["assistant", "last", "all", "completion"]),
)
@settings(max_examples=400, deadline=None)
def test_a_frame_is_what_each_row_gives(
    name: str, turns: list[str], system: str | None, marks: list[bool], on: replies.TrainOn
) -> None:
    """Also blank contents, for which no frame is taken, and white space of all sorts."""
    messages: list[Any] = [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(turns)]
    for message, mark in zip(messages[1::2], marks, strict=False):
        message["train"] = mark
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    template = template_of(TOKENIZERS[name])

    def result() -> Any:
        try:
            return replies.layout(template, messages, None, on)
        except DataError as error:
            return error.what

    quick = result()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replies, "_frame_of", lambda *_: None)
        assert quick == result()


@pytest.mark.parametrize("name", sorted(TOKENIZERS))
def test_the_frame_is_taken(name: str) -> None:
    template = template_of(TOKENIZERS[name])
    said: list[Any] = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": " Hello "}]
    try:
        plain = replies.compared(template, said, None, {1})
    except BadRow:  # "twice": the reply is not what the row says
        assert name in ("twice", "others", "with its frame")
        return
    frame = replies._frame_of(template, said)
    assert (frame is None) == (name in ("qwen3", "the end stripped"))  # whose prompt hangs on white space at its end
    if frame is not None:
        assert frame.filled(said, {1}) == plain


def test_tools_calls_and_thoughts_take_no_frame() -> None:
    template = template_of(tiny_tokenizer(SMOLLM2))
    plain: dict[str, Any] = {"role": "assistant", "content": "Hello"}
    hi: dict[str, Any] = {"role": "user", "content": "Hi"}
    for more in ({"tool_calls": [{}]}, {"reasoning_content": "Hm"}, {"content": " "}, {"role": "tool"}):
        assert replies._frame_of(template, [hi, plain | more]) is None  # type: ignore[list-item]
    assert replies._frame_of(template, [hi, plain | {"train": False}]) is not None  # type: ignore[list-item]
