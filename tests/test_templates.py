"""Every chat template of the trl wheel, tools, thoughts, and templates that misbehave."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from finetune import chat
from finetune.errors import DataError
from finetune.formats import BadRow
from finetune.replies import TrainOn
from finetune.templates import DEFAULT_TEMPLATE, template_of
from tests.tiny import CONTROL, SMOLLM2, tiny_tokenizer

SPEC = importlib.util.find_spec("trl")
assert SPEC is not None
assert SPEC.origin is not None
FOLDER = Path(SPEC.origin).parent / "chat_templates"
NAMES = sorted(path.stem for path in FOLDER.glob("*.jinja") if not path.stem.endswith("_training"))
MARK = re.compile(r"<[｜|][^<>\s'\"{}]{1,40}[｜|]>|<\|[a-z_]+>|<[a-z_]+\|>|<(?:start|end)_of_turn>|<sop>|\[gMASK\]")
EOS = ("<|return|>", "<turn|>", "<｜end▁of▁sentence｜>", "<|END_OF_TURN_TOKEN|>", "<|eot|>", "<|eot_id|>")


def tokenizer_for(template: str) -> Any:
    """The tiny tokenizer with the control tokens that a template writes."""
    from transformers import PreTrainedTokenizerFast

    core = tiny_tokenizer("smollm2").backend_tokenizer
    core.add_special_tokens([mark for mark in sorted(set(MARK.findall(template))) if mark not in CONTROL])
    eos = next((mark for mark in EOS if mark in template), "<|im_end|>")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token=eos)
    tokenizer.chat_template = template
    return tokenizer


TOKENIZERS = {name: tokenizer_for((FOLDER / f"{name}.jinja").read_text(encoding="utf-8")) for name in NAMES}
TOKENIZERS["smollm2"] = tiny_tokenizer("smollm2")

# ------------------------------------------------------------------------------------------------------ conversations

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather now.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "description": "Where."}, "days": {"type": "integer"}},
                "required": ["city"],
            },
        },
    }
]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def call(text: str = "", city: str = 'Delft "é"', **more: Any) -> dict[str, Any]:
    function = {"name": "get_weather", "arguments": {"city": city, "days": 3}}
    return assistant(text, tool_calls=[{"id": "call12345", "type": "function", "function": function}], **more)


def result(text: str = '18 degrees "C"') -> dict[str, Any]:
    return {"role": "tool", "content": text, "name": "get_weather", "tool_call_id": "call12345"}


SINGLE = [user("Hi"), assistant("Hello")]
SYSTEM = [{"role": "system", "content": "Be brief."}, *SINGLE]
SEVERAL = [*SINGLE, user("And?"), assistant("Bye")]
THOUGHT = [user("Hi"), assistant("Hello", reasoning_content="Hmm, so")]
INLINE = [user("Hi"), assistant("<think>\nHmm, so\n</think>\n\nHello")]
CALL = [user("Hi"), call(), result(), assistant("It is 18")]


def encode(name: str, messages: list[dict[str, Any]], tools: Any = None, train_on: TrainOn = "assistant") -> Any:
    return chat.encode(TOKENIZERS[name], messages, tools=tools, train_on=train_on)  # type: ignore[arg-type]


def trained(name: str, row: chat.Encoded) -> list[str]:
    spans: list[list[int]] = [[]]
    for token, label in zip(row.input_ids, row.labels, strict=True):
        assert label in (token, -100)
        if label != -100:
            spans[-1].append(token)
        elif spans[-1]:
            spans.append([])
    return [TOKENIZERS[name].decode(span) for span in spans if span]


# -------------------------------------------------------------------------------- each template of the wheel, by name

END, TURN, EOT = "<|im_end|>", "<turn|>", "<|eot_id|>"
NO_THOUGHT = re.compile("begins this reply otherwise than its own generation prompt says; where that opens a thought")
REWRITES = re.compile("writes an earlier reply differently once the conversation goes on.* data.train_on: last")
NO_TOOLS = re.compile(r"drops the tools \(here 'get_weather'\)")
NO_CALLS = re.compile(r"drops the tool call \(here 'get_weather'\)")
NO_ROLE = re.compile("does not know the role 'tool'")
DROPS_THOUGHT = re.compile(r"drops the thought of message 2 \(assistant\)")
NO_END = re.compile("puts no control token after a (reply|tool call)")
PICTURES = re.compile("cannot carry a question and its answer")
QWEN3 = "<think>\n\n</think>\n\n"
JSON_CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Delft \\"é\\"", "days": 3}}\n</tool_call>'
XML_CALL = (
    '<tool_call>\n<function=get_weather>\n<parameter=city>\nDelft "é"\n</parameter>\n'
    "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"
)
GEMMA_CALL = '<|tool_call>call:get_weather{city:<|"|>Delft "é"<|"|>,days:3}<tool_call|><|tool_response>'
LFM_CALL = "<|tool_call_start|>[get_weather(city='Delft \"é\"', days=3)]<|tool_call_end|>"
LLAMA_CALL = '{"name": "get_weather", "parameters": {"city": "Delft \\"é\\"", "days": 3}}'
MUSE_CALL = (
    ' to=get_weather<|message|><atem:function_calls>\n<atem:invoke name="get_weather">\n'
    '<atem:parameter name="city">Delft "é"</atem:parameter>\n<atem:parameter name="days">3</atem:parameter>\n'
    "</atem:invoke>\n</atem:function_calls><|eot|>"
)
HARMONY_CALL = (
    ' to=functions.get_weather<|channel|>commentary json<|message|>{"city": "Delft \\"é\\"", "days": 3}<|call|>'
)
FINAL = "<|channel|>final<|message|>"
ANALYSIS = f"<|channel|>analysis<|message|>Hmm, so<|end|><|start|>assistant{FINAL}"
SPOKEN = " to=user<|message|>"
TO_SELF = f" to=self<|message|>Hmm, so<|eom|><|start|>assistant{SPOKEN}"
CLOSED, CLOSES, SHUT = "\n</think>\n\n", "Hmm, so\n</think>\n\n", "<｜end▁of▁sentence｜>"

# name -> what stands before a plain reply, what ends it, several replies, a thought, and a call with its result; a
# plain string is the trained text (of the call, for the last column), a pattern the refusal
TABLE: dict[str, tuple[Any, ...]] = {
    "cohere": ("", "<|END_OF_TURN_TOKEN|>", True, DROPS_THOUGHT, NO_TOOLS),
    "cohere2": ("", "<|END_RESPONSE|><|END_OF_TURN_TOKEN|>", True, DROPS_THOUGHT, NO_TOOLS),
    "deepseek_r1_distill": (NO_THOUGHT, SHUT, NO_THOUGHT, CLOSES, NO_TOOLS),
    "deepseekv3": (NO_THOUGHT, SHUT, NO_THOUGHT, CLOSES, NO_TOOLS),
    "diffusion_gemma": ("", TURN, True, "<|channel>thought\nHmm, so\n<channel|>", GEMMA_CALL),
    "gemma": ("", "<end_of_turn>", True, DROPS_THOUGHT, NO_TOOLS),
    "gemma3": ("", "<end_of_turn>", True, DROPS_THOUGHT, NO_TOOLS),
    "gemma4": ("", TURN, True, DROPS_THOUGHT, GEMMA_CALL),
    "gemma4_v2": ("", TURN, True, DROPS_THOUGHT, NO_ROLE),
    "gemma4_v3": ("", TURN, True, DROPS_THOUGHT, GEMMA_CALL),
    "gemma4_v4": ("", TURN, True, DROPS_THOUGHT, GEMMA_CALL),
    "gemma4_v5": ("", TURN, True, "<|channel>thought\nHmm, so\n<channel|>", GEMMA_CALL),
    "glm4moe": (NO_END, "", NO_END, NO_END, NO_END),
    "gptoss": (FINAL, "<|return|>", REWRITES, ANALYSIS, HARMONY_CALL),
    "idefics3": (PICTURES, "", PICTURES, PICTURES, PICTURES),
    "lfm2": ("", END, True, DROPS_THOUGHT, NO_CALLS),
    "lfm2_2_5": ("", END, True, "<think>Hmm, so</think>", NO_ROLE),
    "lfm2_2_5_v2": ("", END, True, "<think>Hmm, so</think>", NO_ROLE),
    "lfm2_2_5_vl": ("", END, True, "<think>Hmm, so</think>", NO_ROLE),
    "lfm2_v2": ("", END, True, DROPS_THOUGHT, LFM_CALL + END),
    "llama3": ("", EOT, True, DROPS_THOUGHT, NO_TOOLS),
    "llama3_1": ("", EOT, True, DROPS_THOUGHT, LLAMA_CALL + EOT),
    "llama3_2": ("", EOT, True, DROPS_THOUGHT, LLAMA_CALL + EOT),
    "llava_next": (PICTURES, "", PICTURES, PICTURES, PICTURES),
    "muse_glimmer": (SPOKEN, "<|eot|>", True, TO_SELF, MUSE_CALL),
    "nemotron_3_5_lightning": (NO_THOUGHT, END, NO_THOUGHT, "Hmm, so</think>", NO_THOUGHT),
    "nemotron_3_nano": (NO_THOUGHT, END, NO_THOUGHT, "Hmm, so\n</think>\n", NO_THOUGHT),
    "nemotron_3_super": (NO_THOUGHT, END, NO_THOUGHT, "Hmm, so\n</think>\n", NO_THOUGHT),
    "nemotron_3_ultra": (NO_THOUGHT, END, NO_THOUGHT, "Hmm, so</think>", NO_THOUGHT),
    "phi3": ("", "<|end|>", True, DROPS_THOUGHT, NO_TOOLS),
    "phi3_5": ("", "<|end|>", True, DROPS_THOUGHT, NO_TOOLS),
    "qwen2_5": ("", END, True, DROPS_THOUGHT, JSON_CALL + END),
    "qwen2_5_vl": ("", END, True, DROPS_THOUGHT, NO_TOOLS),
    "qwen3": (QWEN3, END, REWRITES, "<think>\nHmm, so\n</think>\n\n", REWRITES),
    "qwen3_5_nothink": ("", END, REWRITES, NO_THOUGHT, XML_CALL + END),
    "qwen3_5_think": (CLOSED, END, REWRITES, CLOSES, CLOSED + XML_CALL + END),
    "qwen3_6": (CLOSED, END, REWRITES, CLOSES, CLOSED + XML_CALL + END),
    "qwen3_8": (CLOSED, END, True, CLOSES, CLOSED + XML_CALL + END),
    "qwen3_instruct_2507": ("", END, True, DROPS_THOUGHT, JSON_CALL + END),
    "qwen3_vl": ("", END, True, DROPS_THOUGHT, JSON_CALL + END),
    "smolvlm": (PICTURES, "", PICTURES, PICTURES, PICTURES),
}  # fmt: skip


def test_the_table_is_whole() -> None:
    assert sorted(TABLE) == NAMES


def outcome(name: str, *arguments: Any, **more: Any) -> list[str] | str:
    """The trained stretches, or the words of the refusal; anything but a `DataError` is a crash."""
    try:
        return trained(name, encode(name, *arguments, **more))
    except DataError as error:
        return f"{error.what} {error.hint}"


@pytest.mark.parametrize("name", NAMES)
def test_a_template_of_the_wheel(name: str) -> None:
    head, end, several, thought, called = TABLE[name]

    def holds(found: list[str] | str, wanted: Any, replies: list[str]) -> bool:
        if isinstance(wanted, re.Pattern):
            return isinstance(found, str) and bool(wanted.search(found))
        return found == replies

    single = [f"{head}Hello{end}"]
    assert holds(outcome(name, SINGLE), head, single)
    assert holds(outcome(name, SYSTEM), head, single)
    assert holds(outcome(name, SEVERAL), several, [*single, f"{head}Bye{end}"])
    assert holds(outcome(name, SEVERAL, train_on="last"), head, [f"{head}Bye{end}"])
    assert holds(outcome(name, THOUGHT), thought, [f"{thought}Hello{end}"])
    again = {"diffusion_gemma": "<|turn>model\n"}.get(name, head)
    assert holds(outcome(name, CALL, TOOLS), called, [called, f"{again}It is 18{end}"])


@pytest.mark.parametrize("name", NAMES)
def test_rendering_is_that_of_apply_chat_template(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    for messages, tools in ((SINGLE, None), (SYSTEM, TOOLS), (SEVERAL, None), (THOUGHT, None), (CALL, TOOLS)):
        for reply_follows in (False, True):
            template = template_of(tokenizer, tools)
            try:
                mine = template.raw(messages, tools, reply_follows)
            except BadRow:
                continue
            given = messages
            if template.tools.as_text or not template.tools.keep_empty:
                given = [template._plain(message, None) for message in messages]
            theirs = tokenizer.apply_chat_template(
                given, tools=tools, tokenize=False, add_generation_prompt=reply_follows
            )
            assert mine == theirs


@pytest.mark.parametrize("name", NAMES)
def test_prompts_and_stops_are_those_of_training(name: str) -> None:
    """Ids before each trained reply are the prompt's; the token that ends it is one that generation stops at."""
    checked = 0
    for messages, tools in ((SINGLE, None), (SYSTEM, TOOLS), (SEVERAL, None), (THOUGHT, None), (CALL, TOOLS)):
        for train_on in ("assistant", "last"):
            try:
                row = encode(name, messages, tools, train_on)  # type: ignore[arg-type]
            except DataError:
                continue
            stops = chat.end_of_turn_ids(TOKENIZERS[name])
            replies = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
            for number in replies if train_on == "assistant" else replies[-1:]:
                prompt = chat.prompt_ids(TOKENIZERS[name], messages[:number], tools)  # type: ignore[arg-type]
                assert row.input_ids[: len(prompt)] == prompt
                assert row.labels[len(prompt) - 1] == -100
                assert row.labels[len(prompt)] != -100
                stop = next(n for n in range(len(prompt), len(row.labels) + 1) if [*row.labels, -100][n] == -100)
                assert row.input_ids[stop - 1] in stops
                checked += 1
    assert checked or isinstance(TABLE[name][0], re.Pattern)


# -------------------------------------------------------------------------------------------------------------- tools


@pytest.mark.parametrize(
    ("messages", "tools", "reason"),
    [
        (SINGLE, TOOLS, r"drops the tools \(here 'get_weather'\)"),
        (CALL, None, r"drops the tool call \(here 'get_weather'\)"),
        (
            [user("Hi"), result(), assistant("It is 18")],
            None,
            r"does not know the role 'tool' \(here 'get_weather'\)",
        ),
    ],
)
@pytest.mark.parametrize("name", ["smollm2", "llama3"])
def test_a_template_without_tools_says_so(name: str, messages: list[dict[str, Any]], tools: Any, reason: str) -> None:
    for train_on in ("assistant", "last", "all", "completion"):
        with pytest.raises(BadRow, match=reason) as error:
            encode(name, messages, tools, train_on)  # type: ignore[arg-type]
        assert error.value.kind == "no tools in the template"


def test_a_call_that_the_template_writes_in_part_is_refused() -> None:
    """Llama 3.1's template writes one call a turn, and no text beside it."""
    with pytest.raises(BadRow, match=r"drops or changes the text of message 2 \(assistant\)"):
        encode("llama3_1", [user("Hi"), call("I shall look."), result(), assistant("It is 18")], TOOLS)
    two = call()
    two["tool_calls"] = two["tool_calls"] * 2
    with pytest.raises(BadRow, match="only supports single tool-calls"):
        encode("llama3_1", [user("Hi"), two, result(), assistant("It is 18")], TOOLS)
    # gpt-oss writes only the first call
    other = call(city="Gouda")["tool_calls"]
    with pytest.raises(BadRow, match="drops 'Gouda' of the tool call of message 2"):
        encode("gptoss", [user("Hi"), assistant("", tool_calls=call()["tool_calls"] + other)], TOOLS)


def test_a_tool_that_the_template_leaves_out_is_refused() -> None:
    template = SMOLLM2.replace(
        "{% for message in messages %}", "{{ (tools or [])[:1] | tojson }}{% for message in messages %}", 1
    )
    tokenizer = tiny_tokenizer(template)
    both = [*TOOLS, {"type": "function", "function": {"name": "buy", "parameters": {}}}]
    assert chat.encode(tokenizer, SINGLE, tools=TOOLS)  # type: ignore[arg-type]
    with pytest.raises(BadRow, match="drops the tool 'buy'"):
        chat.encode(tokenizer, SINGLE, tools=both)  # type: ignore[arg-type]


def test_arguments_as_text_where_the_template_wants_text() -> None:
    template = SMOLLM2.replace(
        "+ message['content'] +",
        "+ message['content'] + ('' if not message.tool_calls else '@' + message.tool_calls[0].function.name + "
        "message.tool_calls[0].function.arguments) +",
    ).replace(
        "'<|im_start|>' + message['role']", "'<|im_start|>' + ('result' if message.role == 'tool' else message.role)"
    )
    tokenizer = tiny_tokenizer(template)
    assert template_of(tokenizer).tools.as_text
    row = chat.encode(tokenizer, CALL)  # type: ignore[arg-type]
    TOKENIZERS["as_text"] = tokenizer
    assert trained("as_text", row)[0] == '@get_weather{"city": "Delft \\"é\\"", "days": 3}<|im_end|>'


def test_a_control_token_inside_a_call_is_refused() -> None:
    for messages, where in (
        ([user("Hi"), call(city="<|im_end|>"), result(), assistant("It is 18")], "message 2"),
        ([user("Hi"), call(), result("<|im_end|>"), assistant("It is 18")], "message 3"),
        ([user("Hi"), assistant("Hello", reasoning_content="<|im_end|>")], "message 2"),
    ):
        with pytest.raises(BadRow, match=rf"{where} .*holds '<\|im_end\|>'"):
            encode("qwen3", messages, TOOLS)
    with pytest.raises(BadRow, match=r"the tools hold '<\|im_end\|>'"):
        encode("qwen3", SINGLE, [{"type": "function", "function": {"name": "f", "description": "<|im_end|>"}}])


WORDS = st.text(
    st.sampled_from("aHeloth \n\t.:'{}\"\\é中😀") | st.characters(min_codepoint=33, exclude_categories=["C", "Z"])
)
WORD = WORDS.filter(lambda text: bool(text.strip()) and "<" not in text)


@given(
    name=st.sampled_from(["qwen2_5", "llama3_1", "gptoss", "lfm2_v2", "qwen3_8", "gemma4_v5"]),
    words=st.lists(WORD, min_size=4, max_size=4),
)
@settings(max_examples=80, deadline=None)
def test_any_call(name: str, words: list[str]) -> None:
    """Whatever a call and its result say, the trained text is the template's and the prompt is that of inference."""
    asked, city, found, reply = words
    messages = [user(asked), call(city=city), result(found), assistant(reply)]
    row = encode(name, messages, TOOLS)
    template = template_of(TOKENIZERS[name], TOOLS)
    text = template.render(messages, TOOLS)  # type: ignore[arg-type]
    first, second = trained(name, row)
    assert first in text
    assert second in text
    assert "get_weather" in first
    assert second.rstrip().removesuffix(template.ending).rstrip().endswith(reply.strip())
    for number in (1, 3):
        prompt = chat.prompt_ids(TOKENIZERS[name], messages[:number], TOOLS)  # type: ignore[arg-type]
        assert row.input_ids[: len(prompt)] == prompt
    assert chat.encode_many(TOKENIZERS[name], [(SINGLE, None), (messages, TOOLS)])[1] == row  # type: ignore[list-item]


# ----------------------------------------------------------------------------------------------------------- thoughts


def test_a_thought_in_the_text_is_the_thought() -> None:
    for name in ("qwen3", "qwen3_5_think", "qwen3_6"):
        assert encode(name, INLINE) == encode(name, THOUGHT)
    for name in ("deepseek_r1_distill", "deepseekv3"):
        assert trained(name, encode(name, INLINE)) == ["Hmm, so\n</think>\n\nHello<｜end▁of▁sentence｜>"]
        assert encode(name, INLINE) == encode(name, THOUGHT)
        with pytest.raises(
            BadRow, match=NO_THOUGHT.pattern
        ):  # only the last reply stands where the model would write it
            encode(name, [*INLINE, *INLINE])
        assert encode(name, [*INLINE, *INLINE], train_on="last").labels.count(-100) > 10
    assert trained("qwen2_5", encode("qwen2_5", INLINE)) == ["<think>\nHmm, so\n</think>\n\nHello<|im_end|>"]


@pytest.mark.parametrize("name", ["gptoss", "qwen3_8", "gemma4_v5", "muse_glimmer"])
def test_a_thought_in_the_text_at_the_wrong_place_is_refused(name: str) -> None:
    with pytest.raises(BadRow, match="holds a thought in its text; give it as reasoning_content"):
        encode(name, INLINE)


def test_text_around_a_thought_is_not_lost() -> None:
    for text in (
        "Well. <think>Hmm</think>Hello",
        "<think>a</think>b</think>Hello",
        "<think>a</think><think>b</think>c",
    ):
        with pytest.raises(BadRow, match="drops or changes the text of message 2"):
            encode("qwen3", [user("Hi"), assistant(text)])


def test_earlier_thoughts_may_go_and_the_trained_one_may_not() -> None:
    messages = [*THOUGHT, user("And?"), assistant("Bye", reasoning_content="Right")]
    row = encode("qwen3", messages, train_on="last")
    assert trained("qwen3", row) == ["<think>\nRight\n</think>\n\nBye<|im_end|>"]
    assert "Hmm" not in TOKENIZERS["qwen3"].decode(row.input_ids)
    prompt = chat.prompt_ids(TOKENIZERS["qwen3"], messages[:3])  # type: ignore[arg-type]
    assert row.input_ids[: len(prompt)] == prompt
    with pytest.raises(BadRow, match="drops or changes"):  # "all" trains it, and so must have it
        encode("qwen3", messages, train_on="all")


# -------------------------------------------------------------------------------------------------- several, odd, bad


def test_named_templates() -> None:
    plain, tool_use = SMOLLM2, (FOLDER / "qwen2_5.jinja").read_text(encoding="utf-8")
    as_dict, as_list = tiny_tokenizer("smollm2"), tiny_tokenizer("smollm2")
    as_dict.chat_template = {"default": plain, "tool_use": tool_use, "rag": "{{ documents }}"}
    as_list.chat_template = [{"name": name, "template": text} for name, text in as_dict.chat_template.items()]
    alone = tiny_tokenizer("smollm2")
    for tokenizer in (as_dict, as_list):
        assert chat.encode(tokenizer, SINGLE) == chat.encode(alone, SINGLE)  # type: ignore[arg-type]
        row = chat.encode(tokenizer, CALL, tools=TOOLS)  # type: ignore[arg-type]
        assert row == encode("qwen2_5", CALL, TOOLS)
        [note, *_] = chat.notes(tokenizer)
        assert note == (
            "The tokenizer has 3 chat templates; the one named default is used, and tool_use for rows with tools."
        )
        assert chat.template_to_save(tokenizer) == as_dict.chat_template
    as_dict.chat_template = {"rag": plain, "other": plain}
    with pytest.raises(DataError, match="has the chat templates other, rag, and none is named default"):
        chat.encode(as_dict, SINGLE)  # type: ignore[arg-type]


def test_a_bos_that_the_template_forgets_is_saved_with_it() -> None:
    tokenizer = tiny_tokenizer(DEFAULT_TEMPLATE, bos="<bos>", eos="<eos>", add_bos=True)
    assert chat.template_to_save(tokenizer) == "{{ bos_token }}" + DEFAULT_TEMPLATE
    tokenizer.chat_template = {"default": DEFAULT_TEMPLATE, "tool_use": "{{ bos_token }}" + DEFAULT_TEMPLATE}
    assert chat.template_to_save(tokenizer) == {
        "default": "{{ bos_token }}" + DEFAULT_TEMPLATE,
        "tool_use": "{{ bos_token }}" + DEFAULT_TEMPLATE,
    }


@pytest.mark.parametrize(
    "fault",
    [
        "{{ 1 / 0 }}",
        "{{ messages[9]['content'] + 'x' }}",
        "{{ messages[0].content + 1 }}",
        "{{ messages[0].content | round }}",
        "{{ messages.append(1) }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ 'abc' | nothing }}",
        "{% if %}",
        "{{ range(10 ** 9) }}",
        "{{ messages[0].nothing.more }}",
    ],
)
def test_a_template_that_fails_is_a_verdict_and_no_crash(fault: str) -> None:
    with pytest.raises(DataError, match="cannot carry a question and its answer: the chat template refuses it"):
        chat.encode(tiny_tokenizer(fault + SMOLLM2), SINGLE)  # type: ignore[arg-type]
    late = "{% if messages | length > 2 %}" + fault + "{% endif %}" + SMOLLM2
    if fault not in ("{% if %}", "{{ 'abc' | nothing }}"):  # those are found when the template is read
        with pytest.raises(BadRow, match="refuses it"):
            chat.encode(tiny_tokenizer(late), SEVERAL)  # type: ignore[arg-type]
        [row] = chat.encode_many(tiny_tokenizer(late), [(SEVERAL, None)])  # type: ignore[list-item]
        assert isinstance(row, BadRow)


def test_a_date_is_told() -> None:
    assert any("writes the date into every prompt" in note for note in chat.notes(TOKENIZERS["llama3_2"]))
    assert not any("date" in note for note in chat.notes(TOKENIZERS["llama3"]))


def test_a_dead_tokenizer_is_forgotten() -> None:
    import gc
    import weakref

    tokenizer = tiny_tokenizer("smollm2")
    chat.encode(tokenizer, SINGLE)  # type: ignore[arg-type]
    watch = weakref.ref(tokenizer)
    del tokenizer
    gc.collect()
    assert watch() is None
