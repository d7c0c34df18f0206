"""What each optimizer keeps per trained tensor, and what it needs while it steps. All in bytes.

AdamW    two moments in fp32                                  torch, Loshchilov and Hutter 2019, arXiv:1711.05101
8 bit    one byte a value and an fp32 scale per 256           Dettmers et al. 2022, arXiv:2110.02861; tensors below
         4,096 values and embeddings keep 32 bits             bitsandbytes' `min_8bit_size`, transformers' override
Lion     one moment                                           Chen et al. 2023, arXiv:2302.06675
Adafactor  the second moment's row and column means           Shazeer and Stern 2018, arXiv:1804.04235
SGD      nothing
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from finetune.steps import Path
from finetune.tensors import group_of

BLOCK = 256
SMALL = 4096
PAGED_FROM = 100_000
"""Values from which bitsandbytes puts a tensor's state into unified memory; smaller ones stay on the device."""


def moments(optimizer: str) -> int:
    """Moments of the size of the weight that an optimizer keeps."""
    kind = optimizer.removeprefix("paged_").split("_")[0]
    return {"adamw": 2, "lion": 1, "adafactor": 0, "sgd": 0}[kind]


def is_paged(optimizer: str, size: int) -> bool:
    """Whether the state of a tensor of `size` values lies in unified memory."""
    return optimizer.startswith("paged_") and size >= PAGED_FROM


def state_sizes(optimizer: str, name: str, shape: Sequence[int]) -> list[int]:
    """Bytes of each tensor that the optimizer keeps for the trained tensor `name`."""
    size = math.prod(shape)
    if optimizer == "adafactor":  # with the root mean square of each weight
        if len(shape) < 2:
            return [4 * size, 4]
        return [4 * (size // shape[-1]), 4 * (size // shape[-2]), 4]
    count = moments(optimizer)
    if not in_8_bits(optimizer, name, size):
        counter = [4] if optimizer == "adamw_torch_fused" else []  # others keep their step counters on the host
        return [4 * size] * count + counter
    return [size] * count + [4 * -(-size // BLOCK)] * count


def in_8_bits(optimizer: str, name: str, size: int) -> bool:
    """Whether the state of the tensor `name` of `size` values is kept in 8 bits."""
    return optimizer.endswith("8bit") and size >= SMALL and group_of(name) != "embedding"


def step_temporaries(path: Path, trained: Sequence[tuple[str, Sequence[int]]]) -> list[int]:
    """Bytes that live at once inside `optimizer.step()` for fp32 tensors of these names and shapes, in this order.

    foreach AdamW (torch's default on CUDA) takes the root of all second moments at once. On a CPU it goes tensor by
    tensor, as transformers' Adafactor does everywhere, with two temporaries of the tensor's size; one of the tensor
    before is still held then. Fused and bitsandbytes' CUDA kernels work in place. bitsandbytes on a CPU (its
    backends/cpu/ops.py) holds three temporaries for 32-bit state and five for 8-bit state, which it unpacks.
    """
    sizes = [4 * math.prod(shape) for _, shape in trained]
    optimizer = path.optimizer
    if optimizer == "adamw_torch" and path.device == "cuda":
        return sizes
    if optimizer in ("adamw_torch", "adafactor"):
        groups = ([before, size, size] for before, size in zip([0, *sizes], sizes, strict=False))
        return max(groups, key=sum, default=[])
    if optimizer.endswith("bit") and path.device == "cpu":
        wide = [5 if in_8_bits(optimizer, name, math.prod(shape)) else 3 for name, shape in trained]
        return max(([size] * count for size, count in zip(sizes, wide, strict=True)), key=sum, default=[])
    return []
