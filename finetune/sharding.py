"""What several GPUs share of each bucket, per GPU.

    strategy    weights        gradients      optimizer      besides, on each GPU
    ddp         all            all            all            a copy of the gradients in buckets
    zero2       all            1/N            1/N            one bucket of gradients on the way (reduce-scatter)
    zero3       1/N            1/N            1/N            the whole weights of the layers that run now
    fsdp2       1/N            1/N            1/N            the same: this layer's and, prefetched, the next one's

Activations, logits and temporaries are each GPU's own. Rajbhandari et al. 2020, arXiv:1910.02054 (ZeRO); Zhao et al.
2023, arXiv:2304.11277 (FSDP). 4-bit weights can be sharded by FSDP2 when they are stored as a float type.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

from finetune.errors import InputError
from finetune.facts import Facts
from finetune.memory import Line
from finetune.plan import Plan, spare_line
from finetune.tensors import layer_of

Strategy = Literal["ddp", "fsdp2", "zero2", "zero3"]
STRATEGIES: tuple[Strategy, ...] = ("ddp", "fsdp2", "zero2", "zero3")

_SHARED: dict[str, tuple[str, ...]] = {
    "ddp": (),
    "zero2": ("gradients", "optimizer"),
    "zero3": ("weights", "gradients", "optimizer"),
    "fsdp2": ("weights", "gradients", "optimizer"),
}
_BUCKET_BYTES = {"zero2": 2 * 500_000_000, "ddp": 0}
"""DeepSpeed's default `reduce_bucket_size` of 5e8 values, in 16 bits."""


def per_gpu(plan: Plan, facts: Facts, strategy: str, gpus: int) -> list[Line]:
    """The plan's lines as one of `gpus` GPUs holds them. Raises `InputError` for an unknown strategy."""
    if strategy not in _SHARED:
        raise InputError(f"There is no sharding '{strategy}'.", f"Take one of {', '.join(STRATEGIES)}.")
    if gpus < 1:
        raise InputError(f"{gpus} GPUs cannot train.", "Give at least 1.")
    return _with_spare(list(_lines(plan, facts, strategy, gpus)))


def _with_spare(lines: list[Line]) -> list[Line]:
    """The lines and the allocator's spare pieces, by the plan's own rule for what comes and goes."""
    moving = sum(line.alive for line in lines if line.bucket != "outside" and not _lies_there(line))
    return [*lines, spare_line(moving)]


def _lies_there(line: Line) -> bool:
    """Whether it is there before the first step; autocast's copies of weights come and go."""
    return line.bucket == "weights" and "copies" not in line.name


def _lines(plan: Plan, facts: Facts, strategy: str, gpus: int) -> Iterator[Line]:
    for line in plan.lines:
        if line.name.startswith(("buckets of Distributed", "spare pieces")):
            continue  # said again below
        if line.bucket in _SHARED[strategy] and gpus > 1:
            yield replace(
                line, bytes=-(-line.bytes // gpus), at_peak=-(-line.alive // gpus), formula=f"{line.formula} / {gpus}"
            )
        else:
            yield line
    if gpus == 1:
        return
    gradients = sum(line.bytes for line in plan.lines if line.bucket == "gradients")
    if strategy == "ddp":
        yield Line("gradients", "buckets of DistributedDataParallel", gradients, "a copy of the gradients")
    elif strategy == "zero2":
        size = min(gradients, _BUCKET_BYTES["zero2"])
        yield Line("temporary", "bucket of gradients", size, "at most 5e8 values in 16 bits", exact=False)
    else:
        layer = _largest_layer(plan, facts)
        yield Line("temporary", "gathered layers", 2 * layer, f"this one and the next: 2 x {layer:,} bytes")


def _largest_layer(plan: Plan, facts: Facts) -> int:
    """Bytes of one decoder layer's weights as they lie in memory, or of embedding and head, whichever is larger."""
    weights = sum(line.bytes for line in plan.lines if _lies_there(line))
    inside = sum(tensor.size for tensor in facts.tensors if layer_of(tensor.name) is not None)
    one = inside / max(facts.layers, 1) / facts.parameters
    return int(weights * one)
