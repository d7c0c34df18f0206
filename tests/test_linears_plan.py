"""Adapters that share an input: trace, torch-free step and a real step of `fast.adapter` take the same bytes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from finetune.memory import account
from finetune.recipe import LoRA, Method, QLoRA
from finetune.simulate import simulate
from finetune.steps import Batch
from finetune.steps import Path as StepPath
from tests.test_memory import small
from tests.test_simulate import AGAIN, LOW, SMALL, cpu, cut, real_step

LORA = LoRA(kind="lora", rank=8)
QV = LORA.model_copy(update={"targets": "qv"})
QLORA, LOW_QLORA = (QLoRA(kind="qlora", rank=8, compute_dtype=dtype) for dtype in ("float32", "bfloat16"))
BATCH = Batch(4, 64, 100)
CASES: dict[str, tuple[Method, Batch, StepPath]] = {
    "lora": (LORA, BATCH, cpu()),
    "lora, too short to be worth it": (LORA, Batch(2, 60, 20), cpu()),
    "lora, checkpointing": (LORA, BATCH, cpu(**AGAIN)),
    "lora, without input gradients": (LORA, BATCH, cpu(checkpointing=1)),
    "lora, accumulating": (LORA, BATCH, cpu(accumulates=True)),
    "lora, eager": (LORA, Batch(2, 128, 60), cpu(attention="eager")),
    "q and v": (QV, BATCH, cpu()),
    "q and v, bf16": (QV, BATCH, cpu(**LOW)),
    "lora, bf16": (LORA, BATCH, cpu(**LOW)),
    "lora, bf16, long": (LORA, Batch(1, 512, 20), cpu(**LOW)),
    "lora, bf16, checkpointing": (LORA, BATCH, cpu(**LOW, **AGAIN)),
    "lora, bf16 beside fp32": (LORA, BATCH, cpu(autocast="bfloat16")),
    "lora, 16-bit weights": (LORA, BATCH, cpu(held="half")),
    "lora, 16-bit weights, checkpointing": (LORA, BATCH, cpu(held="half", **AGAIN)),
    "lora, 16-bit weights, few tokens": (LORA, Batch(1, 24, 20), cpu(held="half")),
    "lora, blocks": (LORA, BATCH, cpu(held="blocks")),
    "lora, blocks, accumulating": (LORA, BATCH, cpu(held="blocks", accumulates=True)),
    "lora, blocks, few tokens": (LORA, Batch(1, 24, 20), cpu(held="blocks")),
    "q and v, blocks": (QV, BATCH, cpu(held="blocks")),
    "qlora": (QLORA, BATCH, cpu()),
    "qlora, one scale": (QLORA.model_copy(update={"double_quant": False}), BATCH, cpu()),
    "qlora, bf16": (LOW_QLORA, BATCH, cpu(**LOW)),
    "qlora, bf16, long": (LOW_QLORA, Batch(1, 512, 20), cpu(**LOW)),
    "qlora, bf16, checkpointing": (LOW_QLORA, BATCH, cpu(**LOW, **AGAIN)),
}


@pytest.mark.parametrize("name", CASES)
def test_a_real_step_takes_what_was_predicted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    method, batch, path = CASES[name]
    path = replace(path, grouped=True)
    facts = cut(SMALL, 4)
    attached(monkeypatch)
    measured, batch = real_step(facts, method, batch, path)
    assert simulate(facts, method, batch, path).peak.bytes == pytest.approx(measured, rel=0.002)
    assert account(method, facts, batch, path).peak == pytest.approx(measured, rel=0.003)


def attached(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every model that peft wraps runs its adapters together."""
    import peft

    from finetune.fast.adapter import attach

    wrap = peft.get_peft_model

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        model = wrap(*args, **kwargs)
        if next(model.parameters()).device.type != "meta":  # the trace attaches by itself
            assert attach(model) > 0
        return model

    monkeypatch.setattr(peft, "get_peft_model", wrapped)


@pytest.mark.parametrize("model_type", ["gemma", "gemma2", "mistral", "qwen2"])
def test_other_families_agree_with_their_trace(model_type: str) -> None:
    facts = small(model_type)
    card: dict[str, Any] = {
        "device": "cuda", "weights": "bfloat16", "autocast": "bfloat16", "attention": "flash", "loss": "tiled",
        "optimizer": "adamw_torch_fused",
    }  # fmt: skip
    eager = "eager" if model_type == "gemma2" else "flash"
    for method in (LORA, QV, LOW_QLORA):
        for again in ({}, AGAIN):
            path = StepPath(**{**card, "attention": eager, "checkpointing": 0, **again}, grouped=True)
            traced = simulate(facts, method, Batch(2, 192, 200), path).peak.bytes
            found = account(method, facts, Batch(2, 192, 200), path)
            assert found.peak == pytest.approx(traced, rel=0.005)


@pytest.mark.parametrize("how", ["half", "blocks"])
@pytest.mark.parametrize("model_type", ["llama", "gemma2"])
def test_held_weights_agree_with_their_trace(model_type: str, how: str) -> None:
    facts = small(model_type, inner=704)
    cpu_path = StepPath("cpu", "float32", None, "eager" if model_type == "gemma2" else "cpu", "onepass", 0,
                        "adamw_torch_fused", grouped=True, lean=True, held=how)  # type: ignore[arg-type]  # fmt: skip
    for method, batch, path in (
        (LORA, Batch(2, 192, 200), cpu_path),
        (QV, Batch(2, 192, 200), replace(cpu_path, checkpointing=1, held_every=3)),
        (LORA, Batch(1, 20, 19), cpu_path),
    ):
        traced = simulate(facts, method, batch, path).peak.bytes
        assert account(method, facts, batch, path).peak == pytest.approx(traced, rel=0.005)


def test_it_keeps_less_than_peft_wherever_products_are_narrower_than_adapters() -> None:
    facts = cut(SMALL, 4)
    for method in (LORA, LOW_QLORA):
        path = cpu(**LOW)
        plain, grouped = (
            account(method, facts, Batch(1, 1024, 20), replace(path, grouped=g)).peak for g in (False, True)
        )
        assert grouped < plain
