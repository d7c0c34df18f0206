"""Floating-point operations of a token against hand arithmetic."""

from __future__ import annotations

import pytest

from finetune.device import Device, named_device
from finetune.facts import read_facts
from finetune.paths import Lengths
from finetune.plan import plan
from finetune.recipe import Full, LoRA, QLoRA, load_recipe
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


def test_small_models_are_mostly_head() -> None:
    """SmolLM2: 30 layers of 576, q 576, k and v 192, MLP 1,536, a tied head of 49,152 that every position pays."""
    facts = read_facts(SMALL)
    layer = 2 * 576 * 576 + 2 * 576 * 192 + 3 * 576 * 1536
    adapters = 16 * 30 * (2 * (576 + 576) + 2 * (576 + 192) + 3 * (576 + 1536))
    attention = 30 * 2 * 576 * 512
    head = 576 * 49_152
    whole = 4 * 30 * layer + 3.5 * attention + 4 * head + 6 * adapters
    assert flop_per_token(LORA, facts, path(), 512, 1.0) == whole
    # A third of the positions supervised: two thirds of the head's share are saved.
    assert whole - flop_per_token(LORA, facts, path(), 512, 1 / 3) == pytest.approx(4 * head * 2 / 3)


def test_qlora_counts_as_many_operations_and_expects_fewer_tokens() -> None:
    facts, card = read_facts(LLAMA), named_device("a100-80gb")
    packed = QLoRA(kind="qlora", rank=16)
    assert flop_per_token(packed, facts, path(), 2048, 1.0) == flop_per_token(LORA, facts, path(), 2048, 1.0)
    plain, slower = (speed_of(method, facts, path(), card, 2048, 1.0) for method in (LORA, packed))
    assert plain is not None
    assert slower is not None
    assert slower.floor == plain.floor
    assert slower.expected < plain.expected


def test_every_card_of_the_table_has_a_floor_in_proportion_to_its_peak() -> None:
    facts = read_facts(SMALL)
    floors = {}
    for name in ("t4", "rtx4090", "a100-80gb", "h100", "b200"):
        speed = speed_of(LORA, facts, path(), named_device(name), 512, 1.0)
        assert speed is not None
        floors[name] = speed.floor
    assert floors["h100"] / floors["a100-80gb"] == pytest.approx(989 / 312)
    assert floors["t4"] < floors["a100-80gb"] < floors["h100"] < floors["b200"]


def test_a_cpu_is_as_fast_as_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = Device("cpu", "CPU", 2**34, bf16=False)
    floors = []
    for cores in (2, 8):
        monkeypatch.setattr("os.cpu_count", lambda cores=cores: cores)
        speed = speed_of(LORA, read_facts(SMALL), path(), cpu, 512, 1.0)
        assert speed is not None
        floors.append(speed.floor)
    assert floors[1] == 4 * floors[0]


@pytest.mark.parametrize("recipe", ["llama7b-lora", "smollm2-lora"])
def test_hours_are_tokens_over_speed(recipe: str) -> None:
    lengths = Lengths.read([(500, 100)] * 1000, "rows")
    asked = load_recipe(recipe, ["train.epochs=3"])
    unknown = plan(asked, "h100")
    assert (unknown.tokens, unknown.hours) == (None, None)
    known = plan(asked, "h100", lengths)
    assert known.tokens == 3 * 500 * 1000
    assert known.speed is not None
    assert known.hours == pytest.approx(1_500_000 / known.speed.expected / 3600)
    steps = plan(load_recipe(recipe, ["train.steps=10", "train.batch_size=4"]), "h100", lengths)
    assert steps.tokens == 10 * 4 * 500
