"""What one of several GPUs holds, by hand."""

from __future__ import annotations

import pytest

from finetune.device import named_device
from finetune.errors import InputError
from finetune.facts import read_facts
from finetune.plan import plan
from finetune.recipe import load_recipe
from finetune.sharding import STRATEGIES, per_gpu

LLAMA = "meta-llama/Llama-2-7b-hf"
N = 6_738_415_616


def held(strategy: str, gpus: int, recipe: str = "llama7b-full") -> dict[str, int]:
    planned = plan(load_recipe(recipe, ["train.optimizer=adamw_torch"]), named_device("a100-80gb"))
    totals: dict[str, int] = {}
    for line in per_gpu(planned, read_facts(LLAMA), strategy, gpus):
        if "copies of trained" not in line.name:
            totals[line.bucket] = totals.get(line.bucket, 0) + line.bytes
    return totals


def test_one_gpu_shares_nothing() -> None:
    for strategy in STRATEGIES:
        alone = held(strategy, 1)
        assert (alone["weights"], alone["gradients"], alone["optimizer"]) == (4 * N, 4 * N, 8 * N)


@pytest.mark.parametrize(
    ("strategy", "weights", "gradients", "optimizer"),
    [
        ("ddp", 4 * N, 2 * 4 * N, 8 * N),  # the gradients and a copy of them in buckets
        ("zero2", 4 * N, 4 * N // 8, 8 * N // 8),
        ("zero3", 4 * N // 8, 4 * N // 8, 8 * N // 8),
        ("fsdp2", 4 * N // 8, 4 * N // 8, 8 * N // 8),
    ],
)
def test_full_fine_tuning_on_8_gpus(strategy: str, weights: int, gradients: int, optimizer: int) -> None:
    found = held(strategy, 8)
    assert found["weights"] == pytest.approx(weights, abs=8)
    assert found["gradients"] == pytest.approx(gradients, abs=8)
    assert found["optimizer"] == pytest.approx(optimizer, abs=8)


def test_gathered_layers_are_two_of_32() -> None:
    """A decoder layer of Llama 7B has 4 x 4096^2 + 3 x 4096 x 11008 weights and two norms."""
    layer = 4 * 4096 * 4096 + 3 * 4096 * 11008 + 2 * 4096
    planned = plan("llama7b-full", named_device("a100-80gb"))
    gathered = next(
        line for line in per_gpu(planned, read_facts(LLAMA), "fsdp2", 8) if line.name == "gathered layers"
    )
    assert gathered.bytes == pytest.approx(2 * 4 * layer, rel=1e-3)


def test_activations_are_each_gpu_s_own() -> None:
    alone = held("ddp", 1, "llama7b-lora")["activations"]
    assert {held(strategy, 8, "llama7b-lora")["activations"] for strategy in STRATEGIES} == {alone}


def test_unknown_strategies_are_refused() -> None:
    planned = plan("llama7b-lora", "24GB")
    with pytest.raises(InputError, match=r"There is no sharding 'zero4'\. Take one of ddp, fsdp2, zero2, zero3\."):
        per_gpu(planned, read_facts(LLAMA), "zero4", 2)
