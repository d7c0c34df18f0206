"""Floating-point operations of a token against hand arithmetic."""

from __future__ import annotations

import pytest

from finetune.device import named_device
from finetune.facts import read_facts
from finetune.recipe import Full, LoRA
from finetune.speed import flop_per_token, speed_of
from finetune.steps import Path

GEMMA, LLAMA, SMALL = "google/gemma-2-2b", "meta-llama/Llama-2-7b-hf", "smollm2-135m"
LORA = LoRA(kind="lora", rank=16)


def path(checkpointing: int = 0) -> Path:
    return Path(
        device="cuda", weights="bfloat16", autocast="bfloat16", attention="flash", loss="tiled",
        checkpointing=checkpointing, optimizer="adamw_torch_fused",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("model", "length", "gflop"), [(GEMMA, 2048, 11.34), (LLAMA, 2048, 28.55), (SMALL, 512, 0.63)]
)
def test_floors_worked_out_elsewhere(model: str, length: int, gflop: float) -> None:
    """Rank 16 on all linear layers, every position supervised."""
    found = flop_per_token(LORA, read_facts(model), path(), length, 1.0)
    assert found / 1e9 == pytest.approx(gflop, abs=0.006)


def test_llama_by_hand() -> None:
    facts = read_facts(LLAMA)
    matrices = 32 * (4 * 4096 * 4096 + 3 * 4096 * 11008)
    attention = 32 * 2 * 4096 * 1000  # forward, half the square: 2 products x 2 flop x 4096 x 1000 / 2
    head = 4096 * 32_000
    adapters = 16 * 32 * (4 * 2 * 4096 + 3 * (4096 + 11008))
    lora = 4 * matrices + 3.5 * attention + 0.25 * 4 * head + 6 * adapters
    assert flop_per_token(LORA, facts, path(), 1000, 0.25) == lora
    full = 6 * matrices + 3.5 * attention + 0.25 * 6 * head
    assert flop_per_token(Full(kind="full"), facts, path(), 1000, 0.25) == full
    # Every layer, and every second one, once more forward.
    assert flop_per_token(LORA, facts, path(1), 1000, 0.25) - lora == 2 * matrices + attention
    assert flop_per_token(LORA, facts, path(2), 1000, 0.25) - lora == (2 * matrices + attention) / 2


def test_what_a_card_can_do_at_the_most() -> None:
    facts = read_facts(LLAMA)
    speed = speed_of(LORA, facts, path(), named_device("h100"), 2048, 1.0)
    assert speed is not None
    assert speed.floor == pytest.approx(989e12 / 28.55e9, rel=1e-3)
    assert 0 < speed.expected < speed.floor
    assert speed_of(LORA, facts, path(), named_device("24GB"), 2048, 1.0) is None  # a size has no peak
