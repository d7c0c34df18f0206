"""The step traced on meta tensors: against real steps, against the torch-free step, against other people's GPU."""

from __future__ import annotations

import csv
import dataclasses
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from finetune.device import Device, named_device
from finetune.facts import Facts, facts_of, read_facts
from finetune.fast.head import IGNORED, supervised_loss
from finetune.measure import Gauge, live_bytes
from finetune.memory import account
from finetune.meta import meta_model, model_config
from finetune.method import lora_config, trainable_parameters
from finetune.paths import batch_of, path_of
from finetune.plan import changed, resolve
from finetune.recipe import Full, LoRA, Method, QLoRA, Recipe, load_recipe, shipped_recipes
from finetune.simulate import PHASES, Simulation, simulate
from finetune.steps import Batch
from finetune.steps import Path as StepPath
from finetune.tensors import layer_of
from tests.test_memory import small

ROOT = Path(__file__).resolve().parent.parent
SMALL, GEMMA, LLAMA = "smollm2-135m", "google/gemma-2-2b", "meta-llama/Llama-2-7b-hf"
LAPTOP = Device("cpu", "CPU", 16 * 10**9, bf16=False)


def cut(model: str, layers: int) -> Facts:
    """The same model with fewer layers."""
    facts = read_facts(model)
    shapes = {t.name: t.shape for t in facts.tensors if (layer_of(t.name) or 0) < layers}
    return facts_of(model, {**facts.config, "num_hidden_layers": layers}, shapes, "F32")


def cpu(**settings: Any) -> StepPath:
    usual: dict[str, Any] = {
        "device": "cpu", "weights": "float32", "autocast": None, "attention": "cpu", "loss": "supervised",
        "checkpointing": 0, "optimizer": "adamw_torch_fused",
    }  # fmt: skip
    return StepPath(**{**usual, **settings})


# ------------------------------------------------------------------------------------------------ against real steps


def real_step(facts: Facts, method: Method, batch: Batch, path: StepPath) -> tuple[int, Batch]:
    """The measured peak of the second of two optimizer steps, run plainly, and the batch with its real labels."""
    from accelerate.utils import convert_outputs_to_fp32
    from transformers import AutoModelForCausalLM

    before = live_bytes()  # what other tests have left alive
    torch.manual_seed(0)
    config = model_config(facts)
    config._attn_implementation = "eager" if path.attention == "eager" else "sdpa"
    model: Any = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, path.weights))
    model.config.use_cache = False
    if isinstance(method, QLoRA):
        pack(model, method)
    if path.held:
        hold(model, path.held)
    if not isinstance(method, Full):
        from peft import get_peft_model

        model.requires_grad_(False)
        model = get_peft_model(model, lora_config(method, facts))
    if path.checkpointing:
        base = model if isinstance(method, Full) else model.get_base_model()
        enable = getattr(base, "activation_checkpointing_enable", None) or base.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    if path.autocast:  # as accelerate does it
        model.forward = convert_outputs_to_fp32(torch.autocast("cpu", torch.bfloat16)(model.forward))
    model.train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=path.optimizer.endswith("fused"))
    ids = torch.randint(0, 1000, (batch.rows, batch.length))
    labels = torch.full_like(ids, IGNORED)
    labels[:, -(batch.supervised // batch.rows) :] = 5
    inputs: dict[str, Any] = {"input_ids": ids, "labels": labels}
    if batch.flat:
        inputs["position_ids"] = torch.arange(batch.length // 4).repeat(4)[None]
    elif batch.padded:
        inputs["attention_mask"] = torch.ones_like(ids)
        inputs["attention_mask"][0, -3:] = 0

    def step() -> None:
        for _ in range(1 + path.accumulates):
            supervised_loss(model, inputs).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    step()
    with Gauge("cpu") as gauge:
        step()
    return gauge.peak - before, dataclasses.replace(batch, supervised=int((labels[:, 1:] != IGNORED).sum()))


def hold(model: Any, how: str) -> None:
    from finetune.fast.held import Held, linears_of, put, room_for

    room = room_for(linears_of(model))
    for _, layer in linears_of(model):
        rows, columns = layer.weight.shape
        if how == "half":
            put(layer, layer.weight.data.bfloat16().view(torch.uint8), Held(room, torch.bfloat16))
        else:
            codes = torch.randint(0, 16, (columns, rows), dtype=torch.uint8)
            scale, offset = (torch.full((columns // 32, 1, rows), 0.01) for _ in range(2))
            put(layer, codes, Held(room, scale=scale, offset=offset))


def pack(model: Any, method: QLoRA) -> None:
    import bitsandbytes as bnb

    for name, layer in list(model.named_modules()):
        if isinstance(layer, torch.nn.Linear) and name != "lm_head":
            packed = bnb.nn.Linear4bit(
                layer.in_features, layer.out_features, bias=False, compute_dtype=getattr(torch, method.compute_dtype),
                compress_statistics=method.double_quant, quant_type=method.quant,
            )  # fmt: skip
            # From the layer's own weight, whose type bitsandbytes unpacks to in the backward pass.
            packed.weight = bnb.nn.Params4bit(layer.weight.data, requires_grad=False, **vars(packed.weight))
            packed.to("cpu")
            packed.support_avx512bf16_for_cpu = False
            setattr(model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2], packed)
    model.is_loaded_in_4bit = model.is_quantized = True


FULL = Full(kind="full")
LORA = LoRA(kind="lora", rank=8)
LOW: dict[str, Any] = {"weights": "bfloat16", "autocast": "bfloat16"}
AGAIN: dict[str, Any] = {"checkpointing": 1, "input_grads": True}
CASES: dict[str, tuple[Method, Batch, StepPath]] = {
    "full": (FULL, Batch(4, 64, 100), cpu()),
    "full, few tokens": (FULL, Batch(1, 32, 10), cpu()),
    "full, accumulating": (FULL, Batch(2, 64, 60), cpu(accumulates=True)),
    "full, plain AdamW": (FULL, Batch(2, 64, 60), cpu(optimizer="adamw_torch")),
    "lora": (LORA, Batch(4, 64, 100), cpu()),
    "lora, checkpointing": (LORA, Batch(4, 64, 100), cpu(checkpointing=1, input_grads=True)),
    "lora, q and v": (LORA.model_copy(update={"targets": "qv"}), Batch(4, 64, 100), cpu()),
    "lora, attention": (LORA.model_copy(update={"targets": "attention"}), Batch(4, 64, 100), cpu()),
    "lora, rows laid flat": (LORA, Batch(1, 256, 100, flat=True), cpu()),
    "lora, padded": (LORA, Batch(4, 64, 100, padded=True), cpu()),
    "lora, eager": (LORA, Batch(2, 128, 60), cpu(attention="eager")),
    "qlora": (QLoRA(kind="qlora", rank=8, compute_dtype="float32"), Batch(4, 64, 100), cpu()),
    "qlora, one scale": (
        QLoRA(kind="qlora", rank=8, compute_dtype="float32", double_quant=False), Batch(4, 64, 100), cpu(),
    ),
    # On a CPU with bf16 instructions; others run it too, only slower.
    "full, bf16": (FULL, Batch(4, 64, 100), cpu(autocast="bfloat16")),
    "full, bf16, checkpointing": (FULL, Batch(1, 64, 20), cpu(autocast="bfloat16", **AGAIN)),
    "full, bf16, accumulating": (FULL, Batch(2, 64, 60), cpu(autocast="bfloat16", accumulates=True)),
    "lora, bf16": (LORA, Batch(4, 64, 100), cpu(**LOW)),
    "lora, bf16, checkpointing": (LORA, Batch(4, 64, 100), cpu(**LOW, **AGAIN)),
    "qlora, bf16": (QLoRA(kind="qlora", rank=8, compute_dtype="bfloat16"), Batch(4, 64, 100), cpu(**LOW)),
    "qlora, bf16, checkpointing": (
        QLoRA(kind="qlora", rank=8, compute_dtype="bfloat16"), Batch(4, 64, 100), cpu(**LOW, **AGAIN),
    ),
    "lora, dropout": (LORA.model_copy(update={"dropout": 0.1}), Batch(4, 64, 100), cpu()),
    "qlora, bf16, dropout": (
        QLoRA(kind="qlora", rank=8, dropout=0.1, compute_dtype="bfloat16"), Batch(4, 64, 100), cpu(**LOW),
    ),
    "qlora, bf16 beside fp32": (
        QLoRA(kind="qlora", rank=8, compute_dtype="float32"), Batch(4, 64, 100), cpu(autocast="bfloat16"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_real_step_on_a_cpu_takes_what_was_predicted(name: str) -> None:
    method, batch, path = CASES[name]
    facts = cut(SMALL, 4)
    measured, batch = real_step(facts, method, batch, path)
    traced = simulate(facts, method, batch, path).peak.bytes
    assert traced == pytest.approx(measured, rel=0.002)
    assert account(method, facts, batch, path).peak == pytest.approx(measured, rel=0.005)


def test_autocast_has_let_its_copies_go_when_the_loss_is_taken() -> None:
    """With many supervised rows, the copies of recomputed layers would make the forward pass the highest phase."""
    facts, batch, path = small("llama"), Batch(1, 1024, 500), cpu(autocast="bfloat16", **AGAIN)
    measured, batch = real_step(facts, FULL, batch, path)
    traced, found = simulate(facts, FULL, batch, path), account(FULL, facts, batch, path)
    assert traced.peak.bytes == pytest.approx(measured, rel=0.002)
    assert found.peak == pytest.approx(measured, rel=0.005)
    assert found.phases["forward"] == pytest.approx(traced.peaks["forward"].bytes, rel=0.015)


# ------------------------------------------------------------------------------------- against the torch-free step


def planned(
    name: str, facts: Facts, rows: int, length: int, checkpointing: bool, compiled: bool = False
) -> tuple[Recipe, Batch, StepPath]:
    recipe = load_recipe(name)
    for field, value in (
        ("train.micro_batch", rows), ("data.max_length", length), ("train.checkpointing", checkpointing),
        ("fast.compile", compiled),
    ):  # fmt: skip
        recipe = changed(recipe, field, value)
    device = LAPTOP if recipe.model == SMALL else named_device("a100-80gb")
    recipe, _ = resolve(recipe, facts, device)
    return recipe, batch_of(recipe, facts, device), path_of(recipe, facts, device)


def agree(name: str, facts: Facts, rows: int, length: int, checkpointing: bool, compiled: bool = False) -> None:
    recipe, batch, path = planned(name, facts, rows, length, checkpointing, compiled)
    traced = simulate(facts, recipe.method, batch, path)
    found = account(recipe.method, facts, batch, path)
    assert found.peak == pytest.approx(max(traced.peaks[phase].bytes for phase in PHASES), rel=0.01)
    assert found.phases["load"] == pytest.approx(traced.resident, rel=0.001)
    assert not found.estimated


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(("rows", "length"), [(2, 512)])
@pytest.mark.parametrize("name", sorted(shipped_recipes()))
def test_both_ways_agree_on_every_shipped_recipe(name: str, rows: int, length: int, checkpointing: bool) -> None:
    agree(name, cut(load_recipe(name).model, 4), rows, length, checkpointing)


@pytest.mark.parametrize("name", ["smollm2-lora", "smollm2-full", "gemma2b-lora", "llama7b-qlora"])
def test_both_ways_agree_on_layers_that_will_be_compiled(name: str) -> None:
    agree(name, cut(load_recipe(name).model, 4), 2, 512, checkpointing=False, compiled=True)


@pytest.mark.long
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(("rows", "length"), [(1, 2048), (4, 2048), (1, 512), (4, 512)])
@pytest.mark.parametrize("name", sorted(shipped_recipes()))
def test_both_ways_agree_at_full_size(name: str, rows: int, length: int, checkpointing: bool) -> None:
    agree(name, read_facts(load_recipe(name).model), rows, length, checkpointing)


@pytest.mark.parametrize("every", [2, 3])
def test_both_ways_agree_when_only_some_layers_are_recomputed(every: int) -> None:
    facts = cut(SMALL, 9)
    for method in (FULL, LORA):
        path = cpu(checkpointing=every, input_grads=True)
        batch = Batch(4, 128, 200)
        traced = simulate(facts, method, batch, path)
        assert account(method, facts, batch, path).peak == pytest.approx(traced.peak.bytes, rel=0.005)


@pytest.mark.parametrize("path", [cpu(), cpu(grouped=True), cpu(**AGAIN), cpu(checkpointing=2, input_grads=True)])
@pytest.mark.parametrize(
    "targets",
    [
        ["model.layers.1.self_attn.q_proj"],
        [f"layers.{number}.self_attn.{name}" for number in range(5, 9) for name in ("q_proj", "v_proj")],
        [f"layers.{number}.mlp.{name}" for number in (2, 4, 6) for name in ("gate_proj", "up_proj")],
    ],
    ids=["layer 1", "the last four", "every second"],
)
def test_both_ways_agree_where_only_some_layers_have_adapters(targets: list[str], path: StepPath) -> None:
    facts, batch = cut(SMALL, 9), Batch(4, 64, 100)
    method = LORA.model_copy(update={"rank": 64, "targets": targets})
    traced = simulate(facts, method, batch, path)
    assert account(method, facts, batch, path).peak == pytest.approx(traced.peak.bytes, rel=0.002)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", ["llama7b-lora", "gemma2b-qlora"])
def test_both_ways_agree_on_dropout(name: str, checkpointing: bool) -> None:
    recipe, batch, path = planned(name, cut(load_recipe(name).model, 4), 2, 512, checkpointing)
    facts, method = cut(recipe.model, 4), recipe.method.model_copy(update={"dropout": 0.05})
    path = dataclasses.replace(path, grouped=False, lean=False)  # peft's own code runs them
    traced, found = simulate(facts, method, batch, path), account(method, facts, batch, path)
    assert found.peak == pytest.approx(max(traced.peaks[phase].bytes for phase in PHASES), rel=0.01)
    assert not found.estimated


# ------------------------------------------------------------------------------------------------ against a real GPU


def t4_rows() -> list[dict[str, str]]:
    """Four of the 45 public runs on a Tesla T4 that scripts/validate_plan.py is held against; MiB.

    Measured by the project fitcheck (github: Anassbzdd/fitcheck, MIT, 2026).
    """
    with (ROOT / "tests" / "t4_rows.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def both_kinds() -> list[Any]:
    """An eager one in 4 bits and one in 16 bits with the memory-efficient kernel; the other two run in test-long."""
    quick = [("nf4", "eager"), ("none", "sdpa")]
    found = []
    for row in t4_rows():
        kind = (row["quantization"], row["attn_impl"])
        found.append(pytest.param(row, id="-".join(kind), marks=[] if kind in quick else [pytest.mark.long]))
    return found


@pytest.mark.parametrize("row", both_kinds())
def test_peaks_measured_on_a_real_gpu(row: dict[str, str]) -> None:
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        import validate_plan
    finally:
        sys.path.pop(0)
    made = validate_plan.predict(row)
    simulated, closed = (validate_plan.errors(row, made, which) for which in ("simulated", "closed"))
    assert abs(simulated["peak"]) < 1
    assert all(abs(simulated[phase]) < 1.5 for phase in PHASES)
    assert abs(closed["peak"]) < 3


# ----------------------------------------------------------------------------------------------------- what it says


@pytest.fixture(scope="module")
def traced() -> Simulation:
    return simulate(cut(SMALL, 4), LORA, Batch(2, 64, 30), cpu())


def test_the_meta_model_trains_what_the_plan_counts() -> None:
    facts = cut(SMALL, 4)
    for method in (FULL, LORA, LoRA(kind="lora", variant="dora"), QLoRA(kind="qlora")):
        model = meta_model(model_config(facts), method, facts, dtype="float32", attention="sdpa")
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        assert trained == trainable_parameters(method, facts)
        assert all(p.device.type == "meta" for p in model.parameters())


def test_a_trace_holds_what_it_says(traced: Simulation) -> None:
    assert sum(block.size * block.count for block in traced.held) + traced.peak.passing == traced.peak.bytes
    assert sum(traced.buckets.values()) == traced.peak.bytes - traced.peak.passing
    # Weights: 4 bytes of every parameter and of the rank-8 adapters; two Adam moments and a counter of each of these.
    adapters = trainable_parameters(LORA, cut(SMALL, 4))
    assert traced.buckets["optimizer"] == 8 * adapters + 4 * 2 * 7 * 4
    parameters = cut(SMALL, 4).parameters
    rotary = 2 * 4 * 32  # inverse frequencies, twice
    assert traced.resident == 4 * (parameters + adapters) + rotary
    assert traced.peak.during


def test_nothing_stays_patched(traced: Simulation) -> None:
    from transformers import masking_utils

    assert "finetune" not in torch.nn.functional.scaled_dot_product_attention.__module__
    assert masking_utils.is_tracing.__module__.startswith("transformers")
    x = torch.ones(1, 1, 2, 2)
    assert torch.nn.functional.scaled_dot_product_attention(x, x, x).shape == x.shape


def test_an_unknown_architecture_is_refused_in_two_sentences() -> None:
    from finetune.errors import ModelError

    facts = dataclasses.replace(cut(SMALL, 2), config={"model_type": "never-heard-of"})
    with pytest.raises(ModelError, match=r"cannot build smollm2-135m.*\. Plan it without --simulate"):
        model_config(facts)
