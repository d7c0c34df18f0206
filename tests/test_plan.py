"""Plans of every shipped recipe on every card, the choices behind them, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import socket
from collections.abc import Iterator
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from finetune.device import _CARDS, Device, named_device
from finetune.errors import DoesNotFit, InputError
from finetune.facts import Facts, facts_of, read_facts
from finetune.memory import BUCKETS
from finetune.method import lora_config, trained_tensors
from finetune.paths import Lengths
from finetune.plan import Plan, changed, plan, require_fit, resolve
from finetune.recipe import Optimizer, Recipe, load_recipe, parse_recipe, shipped_recipes

GIB = 2**30
GEMMA, LLAMA, SMALL = "google/gemma-2-2b", "meta-llama/Llama-2-7b-hf", "smollm2-135m"
CPU = Device("cpu", "CPU, 2 cores", 16 * GIB, bf16=False)
CPU_BF16 = Device("cpu", "CPU, 2 cores", 16 * GIB, bf16=True)
CARDS = {card.memory: card for card in map(named_device, reversed(_CARDS))}  # one of each size, the T4 among them
T4, RTX, H100 = (named_device(card) for card in ("t4", "rtx3090", "h100"))


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """No plan may ask the network."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the plan went to the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def recipe(kind: str = "lora", model: str = LLAMA, **sets: Any) -> Recipe:
    overrides = [f"{name.replace('__', '.')}={value}" for name, value in sets.items()]
    return parse_recipe(f"model: {model}\nmethod: {{kind: {kind}}}\ndata: {{train: x}}\n", "recipe", overrides)


def resolved(asked: Recipe, device: Device) -> tuple[Recipe, Plan]:
    return resolve(asked, facts(asked.model), device)


def facts(model: str) -> Facts:
    if model not in _FACTS:
        _FACTS[model] = read_facts(model)
    return _FACTS[model]


_FACTS: dict[str, Facts] = {}


def words(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every field of a recipe under its dotted name."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from words(item, f"{path}.{key}".lstrip("."))
    else:
        yield path, value


# ------------------------------------------------------------------------------------------ every recipe and card


@pytest.mark.parametrize("name", sorted(shipped_recipes()))
def test_every_shipped_recipe_plans_on_every_card_without_a_network(name: str) -> None:
    asked = load_recipe(name)
    for device in [*CARDS.values(), CPU, CPU_BF16]:
        answer, planned = resolved(asked, device)
        open_ = {field for field, value in words(answer.model_dump()) if value == "auto"}
        assert open_ <= {"data.format"}  # answered by the rows, when they are read
        assert isinstance(answer.train.micro_batch, int)
        assert answer.train.batch_size % answer.train.micro_batch == 0
        assert planned.total == sum(planned.buckets().values()) > 0
        assert tuple(planned.buckets()) == BUCKETS
        assert planned.total == planned.account.peak + sum(line.bytes for line in planned.outside)
        assert planned.account.peak == sum(line.alive for line in planned.account.lines)
        assert planned.account.peak == max(planned.account.phases[p] for p in ("forward", "backward", "optimizer"))
        assert planned.fits == (planned.total <= (0.9 if device.kind == "cpu" else 1) * device.memory)
        assert not planned.account.estimated
        assert all(choice.because and "auto" not in str(choice.value) for choice in planned.choices)
        assert json.loads(json.dumps(planned.document()))["total"] == planned.total


def test_the_smallest_model_fits_everywhere() -> None:
    for device in (named_device("8GB"), CPU):
        for name in shipped_recipes():
            if name.startswith("smollm2"):
                require_fit(resolved(load_recipe(name), device)[1])


def test_the_verb_takes_names() -> None:
    planned = plan("gemma2b-qlora", "24GB")
    assert (planned.model, planned.method, planned.device.memory) == (GEMMA, "qlora", 24 * 10**9)
    assert planned == plan(load_recipe("gemma2b-qlora"), named_device("24GB"))
    assert planned.parameters == 2_614_341_888
    assert planned.trainable == 16 * 26 * (2 * (2304 + 2048) + 2 * (2304 + 1024) + 3 * (2304 + 9216))


def whole(planned: Plan) -> dict[str, int]:
    """Each bucket's full size, alive at the peak or not, without autocast's copies."""
    lines = [line for line in planned.lines if "copies" not in line.name]
    return {bucket: sum(line.bytes for line in lines if line.bucket == bucket) for bucket in BUCKETS}


def test_the_buckets_of_a_plan_are_the_golden_numbers() -> None:
    gemma = whole(plan(recipe("full", GEMMA, train__optimizer="adamw_torch"), "80GB"))
    n = 2_614_341_888
    assert (gemma["weights"], gemma["gradients"], gemma["optimizer"]) == (4 * n, 4 * n, 8 * n)
    qv = recipe(
        "lora", GEMMA, method__rank=8, method__targets="qv", load__dtype="float32", train__optimizer="adamw_torch"
    )
    lora = whole(plan(qv, "80GB"))
    assert lora["weights"] + lora["gradients"] + lora["optimizer"] == 4 * n + 16 * 1_597_440
    llama = whole(plan(recipe("full", train__optimizer="adamw_torch"), "141GB"))
    assert llama["weights"] + llama["gradients"] + llama["optimizer"] == 16 * 6_738_415_616


def test_full_fine_tuning_under_autocast_holds_a_16_bit_copy_of_its_products() -> None:
    copies = [line for line in plan(recipe("full"), "141GB").lines if "copies" in line.name]
    # Of all seven projections of the 32 layers; the head is cast tile by tile.
    assert [line.bytes for line in copies] == [2 * 32 * (4 * 4096 * 4096 + 3 * 4096 * 11008)]


def test_known_rows_count_with_their_own_lengths() -> None:
    lengths = Lengths.read([(100, 40)] * 30 + [(500, 100)], "rows.jsonl")
    assert (lengths.longest, lengths.of, round(lengths.trained_share, 3)) == (500, 31, round(1300 / 3500, 3))
    asked = recipe("lora", LLAMA, train__micro_batch=2)
    known = resolve(asked, facts(LLAMA), H100, lengths)[1]
    # The longest rows meet in one micro-batch; the shorter one is padded.
    assert (known.batch.rows, known.batch.length, known.batch.supervised, known.batch.padded) == (2, 500, 140, True)
    assert known.total < resolved(asked, H100)[1].total
    flat = resolve(recipe("lora", SMALL, train__micro_batch=2), facts(SMALL), CPU, lengths)[1]
    assert (flat.batch.rows, flat.batch.length, flat.batch.flat) == (1, 600, True)
    assert known.tokens == 3500


def test_an_unknown_architecture_keeps_exact_statics_and_says_estimate() -> None:
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config(n_layer=3))
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    found = facts_of("a-gpt2", {"model_type": "gpt2", "n_layer": 3, "n_head": 12, "n_embd": 768}, shapes, "F32")
    asked = recipe("lora", "a-gpt2", method__rank=8, method__targets="attention", train__micro_batch=1)
    planned = resolve(asked, found, H100)[1]
    assert planned.account.estimated
    assert not all(line.exact for line in planned.lines if line.bucket == "activations")
    trained = 3 * 8 * ((768 + 3 * 768) + (768 + 768))
    assert planned.trainable == trained
    assert whole(planned)["gradients"] == 4 * trained
    assert planned.total > planned.account.phases["load"]


@pytest.mark.parametrize("model_type", ["phi3", "gpt_neox", "starcoder2"])
@pytest.mark.parametrize("kind", ["full", "lora", "qlora"])
def test_other_architectures_have_exact_statics_against_the_real_ones(model_type: str, kind: str) -> None:
    """transformers' model and peft's adapters on meta tensors; the step itself is an estimate, and says so."""
    import torch
    from peft import get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        model_type, vocab_size=1000, hidden_size=64, intermediate_size=128, num_hidden_layers=4,
        num_attention_heads=4, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    named = dict(model.named_parameters())
    found = facts_of(model_type, config.to_dict(), {name: tuple(p.shape) for name, p in named.items()}, "F32")
    assert found.parameters == sum(p.numel() for p in named.values())
    asked = recipe(kind, model_type, train__optimizer="adamw_torch", train__micro_batch=1)
    for device in (H100, CPU):
        answer, planned = resolve(asked, found, device)
        trained = found.parameters
        if kind != "full":
            with torch.device("meta"):
                base = AutoModelForCausalLM.from_config(config)
                adapted = get_peft_model(base, lora_config(answer.method, found))
            trained = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
        sizes = whole(planned)
        assert planned.trainable == trained
        assert (sizes["gradients"], sizes["optimizer"]) == (4 * trained, 8 * trained)
        if kind != "qlora":
            each = 2 if kind == "lora" and device is H100 else 4
            frozen = 0 if kind == "full" else found.parameters
            assert sizes["weights"] == each * frozen + 4 * trained
        assert planned.account.estimated
        assert planned.total == sum(planned.buckets().values())
        assert all(not line.exact for line in planned.account.lines if line.bucket in ("activations", "loss"))
        statics = ("weights", "gradients", "optimizer")
        said = [line for line in planned.lines if line.bucket in statics and "copies" not in line.name]
        assert all(line.exact for line in said)


# ------------------------------------------------------------------------------------------- any recipe, any device

SETTINGS = st.lists(
    st.one_of(
        st.sampled_from([1, 2, 8]).map(lambda n: f"train.micro_batch={n}"),
        st.sampled_from(["false", "true", "2", "7", "64"]).map(lambda n: f"train.checkpointing={n}"),
        st.sampled_from(get_args(Optimizer)).map(lambda name: f"train.optimizer={name}"),
        st.sampled_from([8, 300, 4096]).map(lambda n: f"data.max_length={n}"),
        st.sampled_from(["float32", "bfloat16", "float16"]).map(lambda name: f"load.dtype={name}"),
        st.sampled_from(["fp32", "bf16"]).map(lambda name: f"train.precision={name}"),
        st.just("load.attention=eager"),
    ),
    max_size=4,
)
ADAPTED = st.lists(
    st.one_of(
        st.sampled_from([1, 12, 256]).map(lambda n: f"method.rank={n}"),
        st.sampled_from(["dora", "rslora"]).map(lambda name: f"method.variant={name}"),
        st.just("method.dropout=0.1"),
        st.sampled_from(["qv", "[down_proj]", "[model.layers.1.self_attn.q_proj]"]).map(
            lambda targets: f"method.targets={targets}"
        ),
        st.just("method.modules_to_save=[model.norm]"),
    ),
    max_size=3,
)
DEVICES = st.one_of(
    st.sampled_from(sorted(_CARDS)).map(named_device),
    st.integers(1, 141).map(lambda size: named_device(f"{size}GB")),
    st.builds(Device, st.just("cpu"), st.just("CPU"), st.integers(2**31, 2**36), st.booleans()),
)


@settings(max_examples=12, deadline=None)
@given(st.sampled_from(sorted(shipped_recipes())), SETTINGS, ADAPTED, DEVICES)
def test_every_byte_of_a_plan_is_on_a_line(name: str, sets: list[str], own: list[str], device: Device) -> None:
    asked = load_recipe(name, ["train.batch_size=16", *sets, *([] if name.endswith("full") else own)])
    answer, planned = resolved(asked, device)
    held = planned.account
    assert sum(line.alive for line in held.lines) == held.peak
    assert sum(planned.buckets().values()) == planned.total
    assert all(0 <= line.alive <= line.bytes for line in planned.lines)
    assert held.phases["load"] <= min(held.phases[phase] for phase in ("forward", "backward", "optimizer"))
    # Rounding is rounding: nothing on a CPU, and on a card less than 512 bytes for each tensor that may be alive.
    [rounding] = [line.bytes for line in held.lines if line.name == "rounding"]
    found = facts(answer.model)
    tensors = 6 * len(found.tensors) + 8 * len(trained_tensors(answer.method, found)) + 200 * found.layers
    assert 0 <= rounding < (1 if device.kind == "cpu" else 512 * tensors)


# ------------------------------------------------------------------------------------------------ the rows' lengths


def test_short_rows_make_larger_passes_than_the_longest_that_is_allowed() -> None:
    asked = recipe("lora", LLAMA, data__max_length=2048, train__checkpointing="true", train__batch_size=32)
    card = named_device("24GB")
    short = Lengths.read([(100, 50)] * 64, "rows")
    unknown, known = (resolve(asked, facts(LLAMA), card, lengths)[1] for lengths in (None, short))
    assert known.micro_batch > unknown.micro_batch
    assert known.batch.rows == known.micro_batch
    assert known.batch.tokens == 100 * known.micro_batch
    assert known.batch.supervised == 50 * known.micro_batch
    assert unknown.batch.supervised == 2047 * unknown.micro_batch
    assert "rows of 100 tokens" in next(c.because for c in known.choices if c.field == "train.micro_batch")
    assert known.document()["lengths"]["trained_share"] == 0.5


def test_one_long_row_among_short_ones_decides() -> None:
    asked = recipe("lora", LLAMA, train__micro_batch=1, train__checkpointing="false")
    short = [(100, 50)] * 500
    totals = [
        resolve(asked, facts(LLAMA), H100, Lengths.read(pairs, "rows"))[1].total
        for pairs in (short, [*short, (2000, 50)], [(2000, 50)])
    ]
    assert totals[0] < totals[1] == totals[2]


# ------------------------------------------------------------------------------------------------------------ choices

ALWAYS = {
    "train.precision", "load.dtype", "load.attention", "train.optimizer", "train.micro_batch", "train.checkpointing",
    "data.packing",
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "device", "precision", "dtype", "optimizer"),
    [
        ("lora", H100, "bf16", "bfloat16", "adamw_torch_fused"),
        ("qlora", RTX, "bf16", "bfloat16", "paged_adamw_8bit"),
        ("full", H100, "bf16", "float32", "adamw_torch_fused"),
        ("lora", T4, "fp16", "float16", "adamw_torch_fused"),
        ("qlora", T4, "fp16", "float16", "paged_adamw_8bit"),
        ("full", T4, "fp16", "float32", "adamw_torch_fused"),
        ("lora", CPU, "fp32", "float32", "adamw_torch_fused"),
        ("qlora", CPU, "fp32", "float32", "adamw_torch_fused"),
        ("full", CPU, "fp32", "float32", "adamw_torch_fused"),
        ("lora", CPU_BF16, "bf16", "bfloat16", "adamw_torch_fused"),
        ("full", CPU_BF16, "bf16", "float32", "adamw_torch_fused"),
    ],
)
def test_types_and_optimizers(kind: str, device: Device, precision: str, dtype: str, optimizer: str) -> None:
    answer, planned = resolved(recipe(kind, SMALL), device)
    assert (answer.train.precision, answer.load.dtype, answer.train.optimizer) == (precision, dtype, optimizer)
    fields = [choice.field for choice in planned.choices]
    more = {"method.compute_dtype"} if kind == "qlora" else set()
    if (kind, device) == ("lora", CPU):
        more.add("fast.weights")
    assert sorted(fields) == sorted(ALWAYS | more)
    given = dict(words(answer.model_dump()))
    assert all(given[choice.field] == choice.value for choice in planned.choices)


@pytest.mark.parametrize("kind", ["lora", "qlora", "full"])
@pytest.mark.parametrize("device", [H100, CPU_BF16, T4], ids=lambda device: device.name)
def test_products_in_fp32_have_weights_in_fp32(kind: str, device: Device) -> None:
    answer, planned = resolved(recipe(kind, SMALL, train__precision="fp32"), device)
    assert answer.load.dtype == "float32"
    assert getattr(answer.method, "compute_dtype", "float32") == "float32"
    because = {choice.because for choice in planned.choices if choice.field in ("load.dtype", "method.compute_dtype")}
    assert because == {"train.precision is fp32"}


def test_what_the_user_wrote_stays() -> None:
    asked = recipe(
        "qlora", SMALL, train__precision="fp32", load__dtype="float16", load__attention="eager",
        train__optimizer="sgd", train__micro_batch=2, train__checkpointing="true", method__compute_dtype="float32",
        data__packing="false", fast__weights="false",
    )  # fmt: skip
    answer, planned = resolved(asked, H100)
    assert (answer, planned.choices) == (asked, ())


@pytest.mark.parametrize(
    ("length", "memory", "weights", "because"),
    [
        (64, 16, 13, "weights are 82% of the peak; costs up to 2 % more time"),  # every 13th: 800 tokens / 64
        (200, 16, 4, "weights are 69% of the peak; costs"),
        (512, 16, False, "weights are 54% of the peak, and"),
        (2048, 1.5, True, "more fits that way"),
    ],
)
def test_as_many_weights_lie_as_in_their_file_as_are_worth_the_time(
    length: int, memory: float, weights: bool | int, because: str
) -> None:
    device = dataclasses.replace(CPU, memory=int(memory * 2**30))
    asked = recipe("lora", SMALL, data__max_length=length, train__micro_batch=1, train__batch_size=1)
    answer, planned = resolved(asked, device)
    choice = next(choice for choice in planned.choices if choice.field == "fast.weights")
    assert (answer.fast.weights, choice.value, choice.because[: len(because)]) == (weights, weights, because)
    plain = resolved(changed(asked, "fast.weights", False), device)[1]
    if weights is True:
        assert (planned.fits, plain.fits) == (True, False)
    layers = -(-30 // weights) if weights else 0
    each = 106_168_320 // 30
    room = 4 * 1536 * 576 if weights else 0
    assert plain.account.peak - planned.account.peak == layers * each * (4 - 1 - 2 * 4 / 32) - room


def test_resolving_twice_changes_nothing() -> None:
    for kind in ("full", "lora", "qlora"):
        first, planned = resolved(recipe(kind, SMALL), H100)
        second, again = resolved(first, H100)
        assert second == first
        assert again.choices == ()
        assert again.lines == planned.lines


def test_the_asked_recipe_is_not_changed() -> None:
    asked = recipe("qlora")
    resolved(asked, H100)
    assert asked == recipe("qlora")


def test_softcapped_scores_need_eager_attention() -> None:
    answer, planned = resolved(recipe("lora", GEMMA), H100)
    assert answer.load.attention == "eager"
    assert "gemma2 caps its scores" in next(c.because for c in planned.choices if c.field == "load.attention")
    assert resolved(recipe("lora", LLAMA), H100)[0].load.attention == "sdpa"


def test_the_reasons_name_the_device() -> None:
    _, planned = resolved(recipe("lora", SMALL), T4)
    assert {c.field: c.because for c in planned.choices}["train.precision"] == "t4 has no bf16 units"


# -------------------------------------------------------------------------------------------------------------- batch


def test_a_large_card_takes_more_rows_and_needs_no_recomputing() -> None:
    asked = recipe("lora", LLAMA, data__max_length=2048)
    recomputed, rows = [], []
    for card in ("16GB", "24GB", "48GB", "80GB", "141GB"):
        train = resolved(asked, named_device(card))[0].train
        every = int(train.checkpointing)
        recomputed.append(1 / every if every else 0)
        rows.append(int(train.micro_batch))
    assert recomputed == sorted(recomputed, reverse=True)
    assert recomputed[0] == 1
    assert recomputed[-1] == 0
    assert rows[-1] > 1


def test_only_as_many_layers_as_needed_are_recomputed() -> None:
    asked = recipe("lora", LLAMA, train__micro_batch=1)
    seen = set()
    for gigabytes in range(15, 32):
        device = named_device(f"{gigabytes}GB")
        answer, planned = resolved(asked, device)
        every = int(answer.train.checkpointing)
        seen.add(every)
        if planned.fits and every:
            less = {1: "2", 2: "3", 3: "4", 4: "false"}[every]
            assert not resolved(recipe("lora", LLAMA, train__micro_batch=1, train__checkpointing=less), device)[
                1
            ].fits
    assert {0, 1} < seen


def test_rows_per_pass_are_the_most_that_fit() -> None:
    asked = recipe("lora", LLAMA, train__checkpointing="true", train__batch_size=32)
    answer, planned = resolved(asked, named_device("24GB"))
    rows = int(answer.train.micro_batch)
    assert planned.fits
    assert rows < 32
    assert not resolved(recipe("lora", LLAMA, train__checkpointing="true", train__batch_size=32,
                               train__micro_batch=2 * rows), named_device("24GB"))[1].fits  # fmt: skip


def test_a_model_reads_no_longer_rows_than_it_can() -> None:
    long, limit = (
        resolved(recipe("lora", LLAMA, data__max_length=n, train__micro_batch=1), H100)[1].total
        for n in (100_000, 4096)
    )
    assert long == limit


@pytest.mark.parametrize(
    ("count", "batch", "micro", "message"),
    [
        (1, 16, 3, "train.batch_size 16 is no multiple of 3 rows x 1 devices."
         " Set train.batch_size to 15 or 18, or give another train.micro_batch."),
        (4, 16, 8, "train.batch_size 16 is no multiple of 8 rows x 4 devices."
         " Set train.batch_size to 32, or give another train.micro_batch."),
        (4, 6, "auto", "train.batch_size 6 is no multiple of 1 rows x 4 devices."
         " Set train.batch_size to 4 or 8, or give another train.micro_batch."),
        (8, 4, "auto", "train.batch_size 4 is no multiple of 1 rows x 8 devices."
         " Set train.batch_size to 8, or give another train.micro_batch."),
    ],
)  # fmt: skip
def test_a_batch_that_does_not_divide_is_refused(count: int, batch: int, micro: Any, message: str) -> None:
    device = Device("cuda", "h100", 80 * GIB, bf16=True, count=count)
    with pytest.raises(InputError) as caught:
        resolved(recipe("lora", SMALL, train__batch_size=batch, train__micro_batch=micro), device)
    assert str(caught.value) == message


@pytest.mark.parametrize("count", [1, 2, 4, 8, 16])
def test_the_batch_is_shared_by_all_devices(count: int) -> None:
    device = Device("cuda", "h100", 80 * GIB, bf16=True, count=count)
    answer, planned = resolved(recipe("lora", SMALL, data__max_length=64), device)
    assert answer.train.micro_batch == 16 // count
    assert planned.fits


# ------------------------------------------------------------------------------------------------------- does not fit


@pytest.mark.parametrize(
    ("asked", "device", "largest"),
    [
        (recipe("full"), "24GB", "optimizer with 53.9 GB"),
        (recipe("lora"), "8GB", "weights with 13.6 GB"),
        (recipe("qlora"), "2GB", "weights with 4."),
        (recipe("lora", SMALL, train__batch_size=64, train__micro_batch=64, train__checkpointing="false"), "16GB",
         "activations with "),
    ],
)  # fmt: skip
def test_what_does_not_fit_says_how_much_and_where_to_look(asked: Recipe, device: str, largest: str) -> None:
    planned = plan(asked, device)
    assert not planned.fits
    with pytest.raises(DoesNotFit) as caught:
        require_fit(planned)
    error = caught.value
    assert error.exit_code == 3
    assert error.what.startswith(
        f"{asked.method.kind} of {asked.model} needs {planned.total / 1e9:.1f} GB and {device} has "
        f"{planned.device.memory / 1e9:.1f} GB for it; the largest part is {largest}"
    )
    assert error.what.endswith(" GB.")
    assert error.hint == (
        "`finetune plan` lists what would make it fit, cheapest first, and `finetune plan --fit FILE` writes it."
    )


def test_the_advice_works() -> None:
    """Full does not fit, LoRA does not fit, QLoRA does: the path that the hints describe."""
    fits = [plan(recipe(kind), "12GB").fits for kind in ("full", "lora", "qlora")]
    assert fits == [False, False, True]


def test_even_the_fewest_rows_do_not_fit() -> None:
    answer, planned = resolved(recipe("full"), RTX)
    assert (answer.train.micro_batch, answer.train.checkpointing) == (1, True)
    assert "even they do not fit" in next(c.because for c in planned.choices if c.field == "train.micro_batch")


def test_targets_that_the_model_does_not_have_are_refused_before_anything_else() -> None:
    with pytest.raises(InputError, match=r"method\.targets names 'q_porj'.* Did you mean 'q_proj'"):
        plan(recipe("lora", LLAMA, method__targets="[q_porj]"), "24GB")
