"""The path and the micro-batch that the plan and the trainer share: by device, recipe and the rows' lengths."""

from __future__ import annotations

import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finetune.device import Device, named_device
from finetune.errors import InputError
from finetune.facts import Facts, facts_of, read_facts
from finetune.paths import (
    KEEPS_ROWS_APART,
    Lengths,
    batch_of,
    held_of,
    in_words,
    lies_flat,
    packing_of,
    path_of,
    why_not_held,
)
from finetune.plan import changed, resolve
from finetune.recipe import Recipe, parse_recipe
from finetune.steps import Batch

SMALL, LLAMA, GEMMA = "smollm2-135m", "meta-llama/Llama-2-7b-hf", "google/gemma-2-2b"
CPU = Device("cpu", "CPU", 16 * 2**30, bf16=False)
H100, T4 = named_device("h100"), named_device("t4")


def settled(model: str, device: Device, kind: str = "lora", **sets: Any) -> tuple[Recipe, Facts]:
    overrides = [f"{name.replace('__', '.')}={value}" for name, value in sets.items()]
    recipe = parse_recipe(f"model: {model}\nmethod: {{kind: {kind}}}\ndata: {{train: x}}\n", "recipe", overrides)
    facts = read_facts(model)
    return resolve(recipe, facts, device)[0], facts


# -------------------------------------------------------------------------------------------------------- lengths

TOKENS = st.one_of(st.integers(1, 5000), st.integers(1, 24))
ROW = TOKENS.flatmap(lambda tokens: st.tuples(st.just(tokens), st.integers(0, tokens)))
PAIRS = st.lists(ROW, min_size=1, max_size=60)


@given(PAIRS, st.integers(1, 12))
def test_a_histogram_counts_every_row_once(pairs: list[tuple[int, int]], bins: int) -> None:
    lengths = Lengths.read(pairs, "rows")
    found = lengths.histogram(bins)
    assert len(found) == bins
    assert sum(count for _, count in found) == len(pairs)
    ends = [0, *(end for end, _ in found)]
    widths = {after - before for before, after in zip(ends, ends[1:], strict=False)}
    assert len(widths) == 1
    assert ends[-1] >= lengths.longest
    for (end, count), start in zip(found, ends, strict=False):
        assert count == sum(start < tokens <= end for tokens, _ in pairs)


def test_a_row_as_long_as_a_bin_s_end_is_in_that_bin() -> None:
    lengths = Lengths.read([(tokens, 1) for tokens in (1, 10, 11, 20, 21, 40)], "rows")
    assert lengths.histogram(4) == [(10, 2), (20, 2), (30, 1), (40, 1)]


@given(PAIRS)
def test_lengths_are_in_order_and_lose_nothing(pairs: list[tuple[int, int]]) -> None:
    lengths = Lengths.read(pairs, "rows")
    assert sorted(lengths.pairs) == sorted(pairs)
    tokens = [count for count, _ in lengths.pairs]
    assert tokens == sorted(tokens, reverse=True)
    assert lengths.longest == max(tokens)
    assert lengths.mean == sum(tokens) / len(tokens)
    assert 0 <= lengths.trained_share <= 1
    assert (lengths.of, Lengths.read(pairs, "rows", 1000).of) == (len(pairs), 1000)


# ----------------------------------------------------------------------------------------------------- micro-batch

ROWS = Lengths.read([(100, 40), (300, 20), (200, 199)], "rows")


@pytest.mark.parametrize(
    ("device", "model", "micro", "batch"),
    [
        # The longest first; their trained tokens are counted, a row's first position gives no loss.
        (H100, LLAMA, 1, Batch(1, 300, 20)),
        (H100, LLAMA, 2, Batch(2, 300, 219, padded=True)),
        (H100, LLAMA, 4, Batch(4, 300, 20 + 199 + 40 + 40, padded=True)),  # fewer rows than asked: the last again
        (CPU, SMALL, 1, Batch(1, 300, 20, flat=True)),
        (CPU, SMALL, 2, Batch(1, 500, 219, flat=True)),
        (CPU, SMALL, 4, Batch(1, 300 + 200 + 100 + 100, 299, flat=True)),
    ],
)
def test_the_longest_rows_meet(device: Device, model: str, micro: int, batch: Batch) -> None:
    recipe, facts = settled(model, device, train__micro_batch=micro)
    assert batch_of(recipe, facts, device, ROWS) == batch


@pytest.mark.parametrize(
    ("off", "micro", "tokens"),
    [
        ((), 1, 200),  # the row of 300 tokens ends after 150
        ((), 2, 200 + 150 - 30),  # 30 tokens are run once
        ((), 4, 200 + 150 + 90 + 90 - 3 * 30),
        (("prefix",), 2, 200 + 150),
        (("tail",), 2, 300 + 200 - 30),
        (("prefix", "tail"), 2, 300 + 200),
        (("attention",), 2, 300 + 200),  # one kernel over all rows takes them whole
    ],
)
def test_what_laid_out_rows_leave_out_is_not_planned(off: tuple[str, ...], micro: int, tokens: int) -> None:
    recipe, facts = settled(SMALL, CPU, train__micro_batch=micro)
    recipe = recipe.model_copy(update={"fast": recipe.fast.model_copy(update=dict.fromkeys(off, False))})
    rows = Lengths.read([(100, 40), (300, 20), (200, 199)], "rows", ends=[90, 150, 200], shared=30)
    found = batch_of(recipe, facts, CPU, rows)
    assert (found.rows, found.length, found.flat) == (1, tokens, True)
    padded, model = settled(LLAMA, H100, train__micro_batch=micro)
    assert batch_of(padded, model, H100, rows) == batch_of(padded, model, H100, ROWS)


def test_a_short_common_beginning_is_not_shared() -> None:
    recipe, facts = settled(SMALL, CPU, train__micro_batch=2)
    short, enough = (Lengths.read([(100, 40)] * 2, "rows", shared=shared) for shared in (15, 16))
    assert [batch_of(recipe, facts, CPU, rows).length for rows in (short, enough)] == [200, 184]


def test_a_trial_of_any_number_of_rows_is_counted_not_listed() -> None:
    recipe, facts = settled(SMALL, CPU)
    many = changed(recipe, "train.micro_batch", 10**7)  # `most_rows` asks for a hundred times as many
    tracemalloc.start()
    with_rows, without = batch_of(many, facts, CPU, ROWS), batch_of(many, facts, CPU)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert with_rows == Batch(1, 300 + 200 + (10**7 - 2) * 100, 20 + 199 + (10**7 - 2) * 40, flat=True)
    longest = recipe.data.max_length
    assert without == Batch(1, 10**7 * longest, 10**7 * (longest - 1), flat=True)
    assert most < 1_000_000


def test_rows_are_no_longer_than_the_recipe_lets_them_be() -> None:
    recipe, facts = settled(LLAMA, H100, train__micro_batch=2, data__max_length=150)
    assert batch_of(recipe, facts, H100, ROWS) == Batch(2, 150, 20 + 149)  # both cut, so none is padded


@pytest.mark.parametrize(("asked", "length"), [(100, 100), (4096, 4096), (9000, 4096)])
def test_unknown_rows_are_as_long_as_recipe_and_model_allow(asked: int, length: int) -> None:
    recipe, facts = settled(LLAMA, H100, train__micro_batch=2, data__max_length=asked)
    assert batch_of(recipe, facts, H100) == Batch(2, length, 2 * (length - 1))


def test_rows_that_train_nothing_still_make_a_batch() -> None:
    recipe, facts = settled(LLAMA, H100, train__micro_batch=1)
    assert batch_of(recipe, facts, H100, Lengths.read([(5, 0)], "rows")).supervised == 1


def test_rows_lie_flat_on_a_cpu_when_the_model_keeps_them_apart() -> None:
    recipe = parse_recipe(f"model: {LLAMA}\nmethod: {{kind: lora}}\ndata: {{train: x}}\n")
    for family in KEEPS_ROWS_APART:
        assert packing_of(recipe, family, CPU)[0] == "step"
        assert packing_of(recipe, family, H100)[0] is False
    assert packing_of(recipe, "gpt2", CPU)[0] is False
    flash = changed(recipe, "load.attention", "flash_attention_2")
    assert packing_of(flash, "llama", H100)[0] == "step"


def test_a_row_alone_lies_flat_too_where_rows_do() -> None:
    for packing, flat in (("step", [True, True]), (True, [True, True]), (False, [False, False])):
        found = [
            lies_flat(settled(LLAMA, CPU, train__micro_batch=micro, data__packing=str(packing).lower())[0])
            for micro in (1, 2)
        ]
        assert found == flat
    recipe, facts = settled(LLAMA, H100, train__micro_batch=2, data__packing="true", data__max_length=512)
    assert batch_of(recipe, facts, H100) == Batch(1, 1024, 1022, flat=True)


@pytest.mark.parametrize("packing", ["true", "step"])
def test_models_that_may_mix_rows_are_not_packed(packing: str) -> None:
    recipe = parse_recipe(f"model: any\nmethod: {{kind: full}}\ndata: {{train: x, packing: {packing}}}\n")
    config = {
        "model_type": "gpt_neox",
        "num_hidden_layers": 1,
        "hidden_size": 8,
        "vocab_size": 8,
        "num_attention_heads": 1,
    }
    with pytest.raises(InputError, match=f"data.packing is {packing}, but models of type gpt_neox are not known"):
        resolve(
            recipe,
            facts_of(
                "any", config, {"gpt_neox.embed_in.weight": (8, 8), "gpt_neox.layers.0.mlp.weight": (8, 8)}, "F32"
            ),
            H100,
        )


# ------------------------------------------------------------------------------------------------------------ path


@pytest.mark.parametrize(
    ("device", "model", "sets", "expected"),
    [
        (H100, LLAMA, {}, ("bfloat16", "bfloat16", "flash", "tiled")),
        (H100, LLAMA, {"train__precision": "fp32"}, ("float32", None, "efficient", "tiled")),  # products in fp32
        (
            H100,
            LLAMA,
            {"train__precision": "fp32", "load__dtype": "bfloat16"},
            ("bfloat16", None, "flash", "tiled"),
        ),
        (H100, LLAMA, {"load__attention": "eager"}, ("bfloat16", "bfloat16", "eager", "tiled")),
        (H100, GEMMA, {}, ("bfloat16", "bfloat16", "eager", "tiled")),
        (T4, LLAMA, {}, ("float16", "float16", "efficient", "tiled")),
        (named_device("24GB"), LLAMA, {}, ("bfloat16", "bfloat16", "flash", "tiled")),
        # The embedded model's micro-batches lie flat on a CPU, those of one row as well.
        (CPU, SMALL, {"train__micro_batch": "2"}, ("float32", None, "documents", "onepass")),
        (CPU, SMALL, {"train__micro_batch": "1"}, ("float32", None, "documents", "onepass")),
        (CPU, SMALL, {"data__packing": "false"}, ("float32", None, "cpu", "onepass")),
        (CPU, SMALL, {"load__attention": "eager"}, ("float32", None, "eager", "onepass")),
        (CPU, SMALL, {"fast__head": "false", "fast__attention": "false"}, ("float32", None, "cpu", "supervised")),
        (CPU, GEMMA, {"train__micro_batch": "2"}, ("float32", None, "eager", "onepass")),
    ],
)
def test_types_kernels_and_loss(
    device: Device, model: str, sets: dict[str, str], expected: tuple[str, str | None, str, str]
) -> None:
    recipe, facts = settled(model, device, **sets)
    path = path_of(recipe, facts, device)
    assert (path.weights, path.autocast, path.attention, path.loss) == expected
    assert (path.device, path.optimizer) == (device.kind, recipe.train.optimizer)


@pytest.mark.parametrize(
    ("device", "model", "kind", "sets", "lean", "turned"),
    [
        (CPU, SMALL, "lora", {}, True, True),
        (CPU, SMALL, "lora", {"train__precision": "bf16", "load__dtype": "bfloat16"}, True, True),
        # Products in bf16 beside rotation tables in fp32: transformers turns.
        (CPU, SMALL, "lora", {"train__precision": "bf16", "load__dtype": "float32"}, True, False),
        (CPU, SMALL, "lora", {"fast__layers": "false"}, False, True),
        (CPU, SMALL, "lora", {"fast__adapters": "false"}, False, True),
        (CPU, SMALL, "lora", {"fast__attention": "false"}, True, False),
        (CPU, SMALL, "lora", {"data__packing": "false"}, True, False),
        (CPU, SMALL, "full", {}, False, True),  # trained norms and MLPs are transformers'
        (CPU, GEMMA, "lora", {}, True, False),  # its attention is eager
        (H100, LLAMA, "lora", {}, True, False),
    ],
)
def test_which_layers_run_lean_and_where_attention_turns(
    device: Device, model: str, kind: str, sets: dict[str, str], lean: bool, turned: bool
) -> None:
    recipe, facts = settled(model, device, kind, **sets)
    path = path_of(recipe, facts, device)
    assert (path.lean, path.turned) == (lean, turned)


@pytest.mark.parametrize(
    ("device", "model", "kind", "sets", "blocks"),
    [
        (CPU, SMALL, "lora", {"data__max_length": "768"}, True),
        (CPU, SMALL, "lora", {"data__max_length": "769"}, False),  # the kernel is quicker for longer rows
        (CPU, SMALL, "full", {"data__max_length": "512"}, True),
        (CPU, SMALL, "lora", {"data__max_length": "64", "train__precision": "bf16"}, False),
        (CPU, SMALL, "lora", {"data__max_length": "64", "load__dtype": "bfloat16"}, False),
        (CPU, SMALL, "lora", {"data__max_length": "64", "fast__attention": "false"}, False),
        (CPU, SMALL, "lora", {"data__max_length": "64", "data__packing": "false"}, False),
        (CPU, GEMMA, "lora", {"data__max_length": "64"}, False),
        (H100, LLAMA, "lora", {"data__max_length": "64"}, False),
    ],
)
def test_where_attention_runs_in_blocks(
    device: Device, model: str, kind: str, sets: dict[str, str], blocks: bool
) -> None:
    recipe, facts = settled(model, device, kind, **sets)
    path = path_of(recipe, facts, device)
    assert path.blocks == blocks
    assert ("blocks" in in_words(path, batch_of(recipe, facts, device))) == blocks


@pytest.mark.parametrize(
    ("device", "model", "kind", "sets", "last"),
    [
        (CPU, SMALL, "lora", {}, True),
        (CPU, SMALL, "lora", {"train__precision": "bf16", "load__dtype": "bfloat16"}, True),
        (CPU, SMALL, "lora", {"fast__tail": "false"}, False),
        (CPU, SMALL, "lora", {"fast__head": "false"}, False),  # the head would look for all positions
        (CPU, SMALL, "lora", {"fast__attention": "false"}, False),
        (CPU, SMALL, "lora", {"data__packing": "false"}, False),  # several rows, not one
        (CPU, SMALL, "lora", {"train__checkpointing": "true"}, False),  # layers run again, without being told
        (CPU, SMALL, "full", {}, False),  # its head is trained, by autograd
        (CPU, GEMMA, "lora", {}, False),
        (H100, LLAMA, "lora", {}, False),
    ],
)
def test_where_the_last_mlp_runs_on_supervised_positions_only(
    device: Device, model: str, kind: str, sets: dict[str, str], last: bool
) -> None:
    recipe, facts = settled(model, device, kind, **sets)
    assert path_of(recipe, facts, device).last == last


FP32 = {"load__dtype": "float32", "train__precision": "fp32", "fast__weights": "true"}


@pytest.mark.parametrize(
    ("device", "kind", "sets", "why"),
    [
        (CPU, "lora", {}, None),
        (H100, "lora", {}, "products are not fp32 on a CPU"),
        (CPU, "lora", {"train__precision": "bf16"}, "products are not fp32 on a CPU"),
        (CPU, "qlora", {}, "the method is not lora"),
        (CPU, "full", {}, "the method is not lora"),
        (CPU, "lora", {"method__modules_to_save": "[model.norm]"}, "method.modules_to_save trains whole modules"),
        (CPU, "lora", {"method__dropout": "0.1"}, "method.dropout is above 0"),
        (CPU, "lora", {"fast__adapters": "false"}, "fast.adapters is false"),
    ],
)
def test_weights_lie_as_in_their_file_or_it_is_said_why_not(
    device: Device, kind: str, sets: dict[str, str], why: str | None
) -> None:
    recipe, facts = settled(SMALL, device, kind, **{**FP32, **sets})
    assert why_not_held(recipe, facts, device) == why
    assert held_of(recipe, facts, device) == ("" if why else "blocks")


@pytest.mark.parametrize(("dtype", "how"), [("BF16", "half"), ("F16", "half"), ("F32", "")])
def test_the_type_of_the_file_says_how_weights_lie(dtype: str, how: str) -> None:
    small = read_facts(SMALL)
    shapes = {tensor.name: tensor.shape for tensor in small.tensors}
    facts = facts_of("org/small", small.config, shapes, dtype)
    recipe, _ = settled(SMALL, CPU, "lora", **FP32)
    assert held_of(recipe, facts, CPU) == how
    assert (why_not_held(recipe, facts, CPU) == "the file holds its weights in fp32") == (not how)


def test_full_fine_tuning_is_in_fp32_under_autocast() -> None:
    recipe, facts = settled(LLAMA, H100, "full")
    path = path_of(recipe, facts, H100)
    assert (path.weights, path.autocast) == ("float32", "bfloat16")


def test_the_card_says_which_kernels_libraries_take() -> None:
    recipe, facts = settled(LLAMA, T4)
    path = path_of(recipe, facts, T4)
    assert (path.capability, path.multiprocessors) == ((7, 5), 40)


@pytest.mark.parametrize(("said", "every"), [("false", 0), ("true", 1), ("2", 2), ("7", 7)])
def test_recomputing_needs_no_gradient_at_the_embedding(said: str, every: int) -> None:
    recipe, facts = settled(LLAMA, H100, train__checkpointing=said)
    path = path_of(recipe, facts, H100)
    assert (path.checkpointing, path.input_grads) == (every, False)


@pytest.mark.parametrize(
    ("micro", "batch", "count", "accumulates"),
    [(4, 16, 1, True), (16, 16, 1, False), (4, 16, 4, False), (4, 16, 2, True), (1, 1, 1, False)],
)
def test_gradients_wait_when_a_step_takes_several_passes(
    micro: int, batch: int, count: int, accumulates: bool
) -> None:
    device = Device("cuda", "h100", 80 * 2**30, bf16=True, count=count)
    recipe, facts = settled(SMALL, device, train__micro_batch=micro, train__batch_size=batch)
    assert path_of(recipe, facts, device).accumulates is accumulates


@pytest.mark.parametrize(
    ("device", "model", "batch", "words"),
    [
        (H100, LLAMA, Batch(2, 9, 9),
         "the flash attention kernel, TRL's loss head in tiles, rows of one length, bfloat16 products"),
        (CPU, SMALL, Batch(1, 9, 9, flat=True),
         "torch's CPU attention kernel for each row by itself, logits of supervised rows and their gradient "
         "in one pass, rows laid end to end, float32 throughout"),
        (H100, GEMMA, Batch(2, 9, 9, padded=True),
         "eager attention (scores in full), TRL's loss head in tiles, rows padded to the longest, bfloat16 products"),
    ],
)  # fmt: skip
def test_what_is_planned_is_said_in_a_sentence(device: Device, model: str, batch: Batch, words: str) -> None:
    recipe, facts = settled(model, device)
    assert in_words(path_of(recipe, facts, device), batch) == words
