"""Messages -> ids and labels, over the real templates of eleven families and a base model that has none."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from finetune import chat, replies
from finetune.errors import DataError
from finetune.formats import BadRow, Message
from finetune.templates import DEFAULT_TEMPLATE, template_of
from tests.tiny import FAMILIES, template_text, tiny_tokenizer

TOKENIZERS = {family: tiny_tokenizer(family) for family in FAMILIES}
MULTI_TURN = [family for family in FAMILIES if family != "qwen3"]  # Qwen3 rewrites earlier replies
THINK = "<think>\n\n</think>\n\n"
ENDINGS = {
    "smollm2": "<|im_end|>",
    "gemma": "<end_of_turn>",
    "gemma2": "<end_of_turn>",
    "gemma3": "<end_of_turn>",
    "llama2": "</s>",
    "llama3": "<|eot_id|>",
    "llama3_1": "<|eot_id|>",
    "mistral": "</s>",
    "qwen2_5": "<|im_end|>",
    "qwen3": "<|im_end|>",
    "phi3": "<|end|>",
    "none": "</s>",
}


def said(*turns: str, system: str | None = None) -> list[Message]:
    roles = ("user", "assistant")
    first: list[Message] = [{"role": "system", "content": system}] if system else []
    return first + [{"role": roles[number % 2], "content": text} for number, text in enumerate(turns)]


def trained(tokenizer: object, row: chat.Encoded) -> list[str]:
    """The trained stretches of a row as text; labels are the ids or -100."""
    assert len(row.input_ids) == len(row.labels)
    stretches: list[list[int]] = [[]]
    for token, label in zip(row.input_ids, row.labels, strict=True):
        assert label in (token, -100)
        if label != -100:
            stretches[-1].append(token)
        elif stretches[-1]:
            stretches.append([])
    return [tokenizer.decode(stretch) for stretch in stretches if stretch]  # type: ignore[attr-defined]


def written(family: str, reply: str) -> str:
    """What the model has to write for a reply, by what each template is known to do with it."""
    if family in ("gemma", "gemma2", "gemma3", "llama3", "llama3_1"):
        reply = reply.strip()
    elif family == "llama2":
        reply = f" {reply.strip()} "
    elif family == "phi3":  # its <|assistant|> token takes in the white space behind it
        reply = reply.lstrip()
    elif family == "qwen3":
        reply = THINK + reply.lstrip("\n")
    elif family in ("none", "mistral"):
        reply = " " + reply
    return reply + ENDINGS[family]


def test_smollm2_by_hand() -> None:
    tokenizer = TOKENIZERS["smollm2"]
    row = chat.encode(tokenizer, said("Hi", "Hello", system="the"))
    tokens = tokenizer.convert_ids_to_tokens(row.input_ids)
    assert tokens == [
        "<|im_start|>", "system", "Ċ", "the", "<|im_end|>", "Ċ",
        "<|im_start|>", "user", "Ċ", "H", "i", "<|im_end|>", "Ċ",
        "<|im_start|>", "assistant", "Ċ", "Hello", "<|im_end|>", "Ċ",
    ]  # fmt: skip
    assert row.labels == [-100] * 16 + row.input_ids[16:18] + [-100]


@pytest.mark.parametrize("family", FAMILIES)
def test_single_turn(family: str) -> None:
    tokenizer = TOKENIZERS[family]
    row = chat.encode(tokenizer, said("Where are you?", "Hello\n\nthe end"))
    assert trained(tokenizer, row) == [written(family, "Hello\n\nthe end")]


TEXT = st.text(
    st.sampled_from("aHeloth \n\t.:'{}\"<|>é中😀") | st.characters(min_codepoint=33, exclude_categories=["C", "Z"])
)
SPOKEN = TEXT.filter(lambda text: bool(text.strip()))


@given(
    family=st.sampled_from(MULTI_TURN),
    pairs=st.lists(st.tuples(SPOKEN, SPOKEN), min_size=1, max_size=3),
    system=st.one_of(st.none(), SPOKEN),
)
@settings(max_examples=150, deadline=None)
def test_any_conversation(family: str, pairs: list[tuple[str, str]], system: str | None) -> None:
    tokenizer = TOKENIZERS[family]
    messages = said(*(text for pair in pairs for text in pair), system=system)
    row = chat.encode(tokenizer, messages)
    assert trained(tokenizer, row) == [written(family, reply) for _, reply in pairs]
    if tokenizer.bos_token and family != "smollm2":  # whose bos is also the start of every turn
        prints = {"phi3": 0, "llama2": len(pairs)}  # Llama 2's puts one before each question
        assert row.input_ids.count(tokenizer.bos_token_id) == prints.get(family, 1)
    for number, message in enumerate(messages):
        if message["role"] == "assistant":
            prompt = chat.prompt_ids(tokenizer, messages[:number])
            assert row.input_ids[: len(prompt)] == prompt
            assert row.labels[len(prompt) - 1] == -100
            assert row.labels[len(prompt)] != -100


@given(family=st.sampled_from(list(FAMILIES)), turns=st.lists(SPOKEN, min_size=2, max_size=6))
@settings(max_examples=100, deadline=None)
def test_any_last_turn(family: str, turns: list[str]) -> None:
    """Also with a template that rewrites earlier replies: the last one is what the model is asked for."""
    messages = said(*turns[: len(turns) // 2 * 2])
    row = chat.encode(TOKENIZERS[family], messages, train_on="last")
    assert trained(TOKENIZERS[family], row) == [written(family, messages[-1]["content"])]
    prompt = chat.prompt_ids(TOKENIZERS[family], messages[:-1])
    assert row.input_ids[: len(prompt)] == prompt
    assert row.labels[len(prompt)] != -100


# ------------------------------------------------------------------------------------------------ what is trained


def test_train_on_by_hand() -> None:
    tokenizer = TOKENIZERS["smollm2"]
    messages = said("Hi", "Hello", "the", "and", system="a")
    rows = {on: chat.encode(tokenizer, messages, train_on=on) for on in ("assistant", "last", "all", "completion")}
    assert len({tuple(row.input_ids) for row in rows.values()}) == 1
    assert trained(tokenizer, rows["assistant"]) == ["Hello<|im_end|>", "and<|im_end|>"]
    assert trained(tokenizer, rows["last"]) == ["and<|im_end|>"]
    assert rows["all"].labels == rows["all"].input_ids
    between = "<|im_start|>user\nthe<|im_end|>\n<|im_start|>assistant\n"
    assert trained(tokenizer, rows["completion"]) == [f"Hello<|im_end|>\n{between}and<|im_end|>"]
    assert chat.encode(tokenizer, messages, train_on="completion", prompt=3) == rows["last"]
    messages[2]["train"] = False  # as the prompt of a prompt-completion row has it
    assert chat.encode(tokenizer, messages, train_on="completion") == rows["last"]
    assert chat.encode(tokenizer, messages, train_on="assistant") == rows["last"]
    assert chat.encode(tokenizer, messages, train_on="all") == rows["all"]


def test_marks_that_leave_nothing_or_a_gap() -> None:
    tokenizer = TOKENIZERS["smollm2"]
    messages = said("Hi", "Hello", "the", "and")
    messages[3]["train"] = False
    assert trained(tokenizer, chat.encode(tokenizer, messages)) == ["Hello<|im_end|>"]
    with pytest.raises(BadRow, match="no reply to train") as error:
        chat.encode(tokenizer, messages, train_on="last")
    assert error.value.kind == "no reply"
    with pytest.raises(BadRow, match=r"message 4 \(assistant\) stands in the completion and is marked"):
        chat.encode(tokenizer, messages, train_on="completion")
    for on in ("assistant", "last", "completion"):
        with pytest.raises(BadRow, match="no reply"):
            chat.encode(tokenizer, said("Hi"), train_on=on)  # type: ignore[arg-type]


@given(
    family=st.sampled_from(MULTI_TURN),
    turns=st.lists(SPOKEN, min_size=2, max_size=6),
    marks=st.lists(st.booleans(), min_size=3, max_size=3),
    on=st.sampled_from(["assistant", "last", "all", "completion"]),
)
@settings(max_examples=100, deadline=None)
def test_ids_hang_on_the_conversation_alone(
    family: str, turns: list[str], marks: list[bool], on: replies.TrainOn
) -> None:
    """What is trained changes labels only; untrained replies that begin with a line break are cut as at inference."""
    plain = said(*turns[: len(turns) // 2 * 2])
    marked = [{**message, "train": marks[n // 2]} if n % 2 else message for n, message in enumerate(plain)]
    [row] = chat.encode_many(TOKENIZERS[family], [(marked, None)], train_on=on)  # type: ignore[list-item]
    if isinstance(row, BadRow):
        assert row.kind in ("no reply", "mark inside the completion")
    else:
        assert row.input_ids == chat.encode(TOKENIZERS[family], plain).input_ids


# ----------------------------------------------------------------------------------------------------- many at once

CONTROLLED = SPOKEN | st.sampled_from(["<|im_end|> and more", "\nHello", "\n\n the", "</s>", "<|end|>"])


@given(
    family=st.sampled_from(list(FAMILIES)),
    talks=st.lists(st.lists(CONTROLLED, min_size=1, max_size=4), max_size=4),
    on=st.sampled_from(["assistant", "last", "all", "completion"]),
)
@settings(max_examples=100, deadline=None)
def test_many_are_what_each_is(family: str, talks: list[list[str]], on: replies.TrainOn) -> None:
    tokenizer = TOKENIZERS[family]
    conversations = [(said(*turns), None) for turns in talks]
    conversations.append(([{"role": "text", "content": "Once\n\nthe"}], None))
    found = chat.encode_many(tokenizer, conversations, train_on=on)
    for (messages, _), row in zip(conversations, found, strict=True):
        if isinstance(row, BadRow):
            with pytest.raises(BadRow) as error:
                chat.encode(tokenizer, messages, train_on=on)
            assert (error.value.reason, error.value.kind) == (row.reason, row.kind)
        else:
            assert row == chat.encode(tokenizer, messages, train_on=on)


@given(
    family=st.sampled_from(list(FAMILIES)),
    turns=st.lists(CONTROLLED.filter(lambda text: "|>" not in text and "</s>" not in text), min_size=1, max_size=6),
)
@settings(max_examples=150, deadline=None)
def test_the_quick_cut_is_the_plain_one(family: str, turns: list[str]) -> None:
    tokenizer = TOKENIZERS[family]
    template = template_of(tokenizer)
    messages = said(*turns)
    text = template.render(messages, reply_follows=len(turns) % 2 == 1)
    starts = replies.starts(template, messages, None, text)
    [ids] = chat._ids(tokenizer, [text])
    assert ids == tokenizer(text, add_special_tokens=False)["input_ids"]
    cut = chat._cutter(tokenizer, template).cut(tokenizer, text, ids, starts)
    assert cut == chat.cut_plainly(tokenizer, text, ids, starts)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_quick_cut_is_the_one_that_is_taken(family: str) -> None:
    """Unless the tokenizer joins, or parts, what stands on the two sides of a start."""
    tokenizer = TOKENIZERS[family]
    template = template_of(tokenizer)
    taken = []
    for reply in ("Hello", "\n\nHello"):
        layout = replies.layout(template, said("Hi", reply))
        [ids] = chat._ids(tokenizer, [layout.text])
        taken.append(bool(chat._cutter(tokenizer, template)._quick(tokenizer, layout.text, ids, layout.starts)))
    if family.startswith("llama3"):  # its prompt ends with two line breaks: one token alone, two before a word
        assert taken == [False, False]
    else:
        joins = family in ("smollm2", "qwen2_5")  # the prompt ends with a line break and the reply is not stripped
        assert taken == [True, not joins]


@pytest.mark.parametrize("spaces", ["first", "always", "never", "legacy"])
@given(
    turns=st.lists(
        st.text("abH .\né", min_size=1, max_size=6).filter(lambda t: bool(t.strip())), min_size=2, max_size=4
    )
)
@settings(max_examples=40, deadline=None)
def test_the_quick_cut_with_the_spaces_of_sentencepiece(spaces: str, turns: list[str]) -> None:
    """Such tokenizers put a space in front of a text, of each stretch between control tokens, or of neither."""
    tokenizer = _sentencepiece(spaces)
    template = template_of(tokenizer)
    messages = said(*turns[: len(turns) // 2 * 2])
    layout = replies.layout(template, messages)
    [ids] = chat._ids(tokenizer, [layout.text])
    cutter = chat._cutter(tokenizer, template)
    assert cutter._anchor is not None
    cut = cutter.cut(tokenizer, layout.text, ids, layout.starts)
    assert cut == chat.cut_plainly(tokenizer, layout.text, ids, layout.starts)
    row = chat.encode(tokenizer, messages)
    assert len(trained(tokenizer, row)) == len(messages) // 2
    prompt = chat.prompt_ids(tokenizer, messages[:-1])
    assert row.input_ids[: len(prompt)] == prompt


@cache
def _sentencepiece(spaces: str) -> Any:
    from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    letters = sorted(set("abH.\n▁é" + (template_text("smollm2") or "")) - {" "})
    pairs = [("▁", "a"), ("▁", "b"), ("\n", "▁"), ("▁", "▁"), ("\n", "\n"), ("\n", "a"), ("▁", "H")]
    tokens = ["<unk>", "<|im_start|>", "<|im_end|>", *letters, *(a + b for a, b in pairs)]
    core = Tokenizer(BPE({token: n for n, token in enumerate(tokens)}, pairs, unk_token="<unk>", fuse_unk=True))
    core.add_special_tokens(["<unk>", "<|im_start|>", "<|im_end|>"])
    if spaces == "legacy":
        core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        core.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()])
    else:
        core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=spaces, split=False)
        core.decoder = decoders.Metaspace(prepend_scheme=spaces, split=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>", unk_token="<unk>")
    tokenizer.chat_template = template_text("smollm2")
    return tokenizer


def test_an_anchor_that_another_token_can_reach_into_is_not_trusted() -> None:
    from tokenizers import AddedToken

    tokenizer = tiny_tokenizer("smollm2")
    tokenizer.add_tokens([AddedToken("Hello<|im", normalized=False)])  # "Hello<|im_end|>" is now two tokens
    assert chat._anchor(tokenizer, template_of(tokenizer)) is None
    row = chat.encode(tokenizer, said("Hi", "Hell"))
    assert trained(tokenizer, row) == ["Hell<|im_end|>"]
    with pytest.raises(BadRow, match=r"does not write '<\|im_end\|>' as one token|cannot write the reply"):
        chat.encode(tokenizer, said("Hi", "Hello"))


def test_leftover_padding_and_truncation_do_nothing() -> None:
    tokenizer = tiny_tokenizer("smollm2")
    want = chat.encode_many(tokenizer, [(said("Hi", "Hello"), None), (said("Hi", "Hello and Hello"), None)])
    tokenizer(["a", "a b c"], padding=True, truncation=True, max_length=2)
    assert chat.encode_many(tokenizer, [(said("Hi", "Hello"), None), (said("Hi", "Hello and Hello"), None)]) == want


def test_a_template_that_rewrites_earlier_replies_is_refused() -> None:
    tokenizer = TOKENIZERS["qwen3"]
    messages = said("One?", "1", "Two?", "2")
    with pytest.raises(BadRow, match="writes an earlier reply differently"):
        chat.encode(tokenizer, messages)
    messages[1]["train"] = False
    row = chat.encode(tokenizer, messages)
    assert trained(tokenizer, row) == [written("qwen3", "2")]
    head, several = chat.notes(tokenizer)
    assert head == f"The template writes {THINK!r} before a reply; the model must write it too, so it is trained."
    assert several.startswith(
        "Trained on every reply, rows with several are refused: the chat template writes an earlier reply"
    )
    assert several.endswith("data.train_on: last trains the last reply of such rows.")


def test_prompt_turns_of_the_assistant_are_not_trained() -> None:
    tokenizer = TOKENIZERS["llama3"]
    messages = said("One?", "1", "Two?", "2")
    messages[1]["train"] = False
    row = chat.encode(tokenizer, messages)
    assert trained(tokenizer, row) == ["2<|eot_id|>"]
    prompt = chat.prompt_ids(tokenizer, messages[:-1])
    assert row.input_ids[: len(prompt)] == prompt


@pytest.mark.parametrize("family", FAMILIES)
def test_no_label_depends_on_pad_being_eos(family: str) -> None:
    messages = said("Yes or no?", "yes", "Sure?", "yes")[: 2 if family == "qwen3" else 4]
    other = tiny_tokenizer(family, pad="<unk>")
    equal = tiny_tokenizer(family, pad=other.eos_token)
    assert equal.pad_token_id == equal.eos_token_id != other.pad_token_id
    assert chat.encode(equal, messages) == chat.encode(other, messages)
    ending = equal.convert_tokens_to_ids(ENDINGS[family])
    assert chat.encode(equal, messages).labels.count(ending) == len(messages) // 2


@pytest.mark.parametrize("printed", [True, False])
@pytest.mark.parametrize("added", [True, False])
def test_exactly_one_bos(printed: bool, added: bool) -> None:
    template = ("{{ bos_token }}" if printed else "") + DEFAULT_TEMPLATE
    tokenizer = tiny_tokenizer(template, bos="<bos>", eos="<eos>", add_bos=added)
    messages = said("One?", "1", system="Be brief.")
    row = chat.encode(tokenizer, messages)
    assert row.input_ids.count(tokenizer.bos_token_id) == int(printed or added)
    assert (row.input_ids[0] == tokenizer.bos_token_id) == (printed or added)
    prompt = chat.prompt_ids(tokenizer, messages[:-1])
    assert row.input_ids[: len(prompt)] == prompt
    document = chat.encode(tokenizer, [{"role": "text", "content": "Once"}])
    assert document.input_ids.count(tokenizer.bos_token_id) == int(added)
    assert bool(chat.notes(tokenizer)) == (added and not printed)


@pytest.mark.parametrize("family", ["gemma", "none"])
def test_a_document_is_trained_whole(family: str) -> None:
    tokenizer = TOKENIZERS[family]
    row = chat.encode(tokenizer, [{"role": "text", "content": "Once\n\nthe"}])
    assert tokenizer.decode(row.input_ids) == f"{tokenizer.bos_token}Once\n\nthe{tokenizer.eos_token}"
    assert row.labels == row.input_ids
    assert chat.encode(tiny_tokenizer("{{ raise_exception('no') }}"), [{"role": "text", "content": "Once"}])
    whole = f"{tokenizer.bos_token}Once\n\nthe{tokenizer.eos_token}"
    assert chat.encode(tokenizer, [{"role": "text", "content": whole}]) == row


def test_a_template_without_system_gets_it_in_the_first_user_turn() -> None:
    tokenizer = TOKENIZERS["gemma"]
    row = chat.encode(tokenizer, said("Hi", "Hello", system="Be brief."))
    assert tokenizer.decode(row.input_ids) == (
        "<bos><start_of_turn>user\nBe brief.\n\nHi<end_of_turn>\n<start_of_turn>model\nHello<end_of_turn>\n"
    )
    assert len(chat.notes(tokenizer)) == 1
    assert not chat.notes(TOKENIZERS["gemma3"])


def test_a_base_model_gets_the_plain_template() -> None:
    tokenizer = TOKENIZERS["none"]
    row = chat.encode(tokenizer, said("Hi", "Hello", "the", "and", system="Be brief."))
    assert tokenizer.decode(row.input_ids) == (
        "<s>System: Be brief.\nUser: Hi\nAssistant: Hello</s>\nUser: the\nAssistant: and</s>\n"
    )
    assert tokenizer.decode(chat.prompt_ids(tokenizer, said("Hi"))) == "<s>User: Hi\nAssistant:"
    assert "no chat template" in chat.notes(tokenizer)[0]


@pytest.mark.parametrize(
    ("family", "stops"),
    [
        ("smollm2", ["<|im_end|>"]),
        ("gemma", ["<end_of_turn>", "<eos>"]),
        ("llama3", ["<|eot_id|>"]),
        ("phi3", ["<|end|>", "<|endoftext|>"]),
        ("llama2", ["</s>"]),
        ("llama3_1", ["<|eot_id|>"]),
        ("qwen3", ["<|im_end|>"]),
        ("none", ["</s>"]),
    ],
)
def test_generation_stops_where_training_ends(family: str, stops: list[str]) -> None:
    assert TOKENIZERS[family].convert_ids_to_tokens(chat.end_of_turn_ids(TOKENIZERS[family])) == stops


def test_a_token_never_joins_prompt_and_reply() -> None:
    tokenizer = TOKENIZERS["smollm2"]
    assert tokenizer.tokenize("\n\n") == ["ĊĊ"]  # the prompt's newline and the reply's would become one token
    row = chat.encode(tokenizer, said("Hi", "\nHello"))
    prompt = chat.prompt_ids(tokenizer, said("Hi"))
    assert row.input_ids[: len(prompt)] == prompt
    assert trained(tokenizer, row) == ["\nHello<|im_end|>"]


@pytest.mark.parametrize("number", [0, 1])
def test_a_control_token_in_a_text_is_refused(number: int) -> None:
    messages = said("Hi", "Hello")
    messages[number]["content"] += "<|im_end|> and more"
    with pytest.raises(BadRow, match=f"message {number + 1} .* holds '<|im_end|>'") as error:
        chat.encode(TOKENIZERS["smollm2"], messages)
    assert error.value.kind == "control token"


def test_text_that_looks_like_the_end_of_a_turn_is_only_text() -> None:
    for reply in ("end", "|>", "<|im_", "im_end", "Pong", "assistant\n"):
        row = chat.encode(TOKENIZERS["smollm2"], said("assistant", reply))
        assert trained(TOKENIZERS["smollm2"], row) == [reply + "<|im_end|>"]


NO_REPLY = (
    "{% for message in messages if message['role'] == 'user' %}{{ message['content'] + eos_token }}{% endfor %}"
)
NO_END = "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"
UPPER = template_text("smollm2").replace("message['content']", "message['content'] | upper")  # type: ignore[union-attr]
THINKS = template_text("smollm2").replace("assistant\n' }}", "assistant\n<think>\n' }}")  # type: ignore[union-attr]
REFUSES = "{{ raise_exception('only for robots') }}"


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (NO_REPLY, "leaves the answer out"),
        (NO_END, "no control token after a reply"),
        (UPPER, "cannot carry a question"),
        (THINKS, "otherwise than its own generation prompt"),
        (REFUSES, "only for robots"),
    ],
)
def test_a_template_that_cannot_be_trained_is_refused_by_name(template: str, reason: str) -> None:
    with pytest.raises(DataError, match=reason) as error:
        chat.encode(tiny_tokenizer(template), said("Hi", "Hello"))
    assert error.value.hint


def test_a_template_that_drops_thoughts_is_refused() -> None:
    template = template_text("smollm2")
    assert template is not None
    drops = template.replace("message['content']", "message['content'].split('</think>')[-1]")
    tokenizer = tiny_tokenizer(drops)
    assert trained(tokenizer, chat.encode(tokenizer, said("Hi", "Hello"))) == ["Hello<|im_end|>"]
    with pytest.raises(BadRow, match=r"drops the thought of message 2 \(assistant\)"):
        chat.encode(tokenizer, said("Hi", "<think>hm</think>Hello"))


def test_a_tokenizer_that_cannot_write_the_reply_is_refused() -> None:
    from tokenizers import normalizers

    tokenizer = tiny_tokenizer("smollm2")
    tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()
    with pytest.raises(BadRow, match="cannot write the reply"):
        chat.encode(tokenizer, said("hi", "Hello"))
    assert chat.encode(tokenizer, said("Hi", "hello"))


def test_a_changed_template_is_noticed() -> None:
    tokenizer = tiny_tokenizer("smollm2")
    chat.encode(tokenizer, said("Hi", "Hello"))
    tokenizer.chat_template = template_text("gemma")
    assert trained(tokenizer, chat.encode(tokenizer, said("Hi", "Hello"))) == ["Hello<end_of_turn>"]
