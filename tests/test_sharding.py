"""What one of several GPUs holds, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from finetune.device import named_device
from finetune.errors import InputError
from finetune.facts import read_facts
from finetune.memory import BUCKETS, Line
from finetune.plan import Plan, plan
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


# ----------------------------------------------------------------------------------------------------- to the byte


@pytest.fixture(scope="module")
def eight() -> Plan:
    """Full fine-tuning of Llama 7B, planned for one of eight cards."""
    return plan(load_recipe("llama7b-full", ["train.optimizer=adamw_torch"]), replace(named_device("h200"), count=8))


def alive(lines: list[Line]) -> dict[str, int]:
    found = dict.fromkeys(BUCKETS, 0)
    for line in lines:
        found[line.bucket] += line.alive
    return found


def test_what_eight_gpus_share_of_llama_7b(eight: Plan) -> None:
    """fp32 weights 4 N, gradients 4 N, AdamW 8 N; its peak lies where autocast's copies are gone."""
    facts = read_facts(LLAMA)
    layer = 4 * (4 * 4096 * 4096 + 3 * 4096 * 11008 + 2 * 4096)
    share = {strategy: per_gpu(eight, facts, strategy, 8) for strategy in STRATEGIES}

    def size(strategy: str, bucket: str) -> int:
        return sum(line.bytes for line in share[strategy] if line.bucket == bucket)

    assert size("ddp", "weights") == size("zero2", "weights") == 4 * N
    assert size("zero3", "weights") == size("fsdp2", "weights") == 4 * N / 8
    assert size("ddp", "gradients") == 2 * 4 * N
    assert size("zero2", "gradients") == size("zero3", "gradients") == size("fsdp2", "gradients") == 4 * N / 8
    assert size("ddp", "optimizer") == 8 * N
    assert size("zero2", "optimizer") == size("zero3", "optimizer") == size("fsdp2", "optimizer") == 8 * N / 8
    # What is alive at the peak is shared as evenly, line by line.
    once = {line.name: line.alive for line in eight.lines}
    for line in share["fsdp2"]:
        if line.bucket in ("weights", "gradients", "optimizer"):
            assert line.alive == pytest.approx(once[line.name] / 8, abs=1)
    whole = {strategy: {line.name: line.bytes for line in lines} for strategy, lines in share.items()}
    assert whole["zero2"]["bucket of gradients"] == 2 * 500_000_000
    for strategy in ("zero3", "fsdp2"):
        assert whole[strategy]["gathered layers"] == pytest.approx(2 * layer, rel=1e-6)
        assert "bucket of gradients" not in whole[strategy]


def test_small_gradients_fill_a_part_of_the_bucket_only() -> None:
    planned = plan("llama7b-lora", "80GB")
    lines = {line.name: line for line in per_gpu(planned, read_facts(LLAMA), "zero2", 4)}
    assert lines["bucket of gradients"].bytes == 4 * planned.trainable < 2 * 500_000_000


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", ["llama7b-full", "llama7b-qlora", "gemma2b-lora"])
def test_more_gpus_never_hold_more_each(name: str, strategy: str) -> None:
    """From two on, of what is shared an even part; what is each GPU's own stays as it is."""
    planned = plan(name, "141GB")
    facts = read_facts(planned.model)
    found = [alive(per_gpu(planned, facts, strategy, gpus)) for gpus in (2, 4, 8, 64)]
    for before, after in zip(found, found[1:], strict=False):
        assert all(after[bucket] <= before[bucket] for bucket in BUCKETS)
        assert all(after[bucket] == before[bucket] for bucket in ("activations", "loss"))
    # One alone holds the plan; the spare pieces are a share that leaves roundings out.
    assert alive(per_gpu(planned, facts, strategy, 1)) == pytest.approx(planned.buckets(), abs=500_000)


def test_a_share_says_what_it_is_of(eight: Plan) -> None:
    lines = {line.name: line for line in per_gpu(eight, read_facts(LLAMA), "fsdp2", 8)}
    assert lines["gradients"].formula == f"4 bytes x {N:,} (fp32) / 8"


def test_buckets_of_ddp_are_said_once(eight: Plan) -> None:
    names = [line.name for line in eight.lines]
    assert names.count("buckets of DistributedDataParallel") == 1
    shared = [line.name for line in per_gpu(eight, read_facts(LLAMA), "ddp", 8)]
    assert shared.count("buckets of DistributedDataParallel") == 1
    assert sorted(names) == sorted(shared)


@pytest.mark.parametrize("gpus", [0, -3])
def test_no_gpus_cannot_train(gpus: int) -> None:
    with pytest.raises(InputError, match=rf"{gpus} GPUs cannot train\. Give at least 1\."):
        per_gpu(plan("llama7b-lora", "24GB"), read_facts(LLAMA), "ddp", gpus)
