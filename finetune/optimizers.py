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
    if optimizer == "adafactor":
        if len(shape) < 2:
            return [4 * size]
        return [4 * (size // shape[-1]), 4 * (size // shape[-2])]
    count = moments(optimizer)
    if not optimizer.endswith("8bit") or size < SMALL or group_of(name) == "embedding":
        counter = [4] if optimizer == "adamw_torch_fused" else []  # others keep their step counters on the host
        return [4 * size] * count + counter
    return [size] * count + [4 * -(-size // BLOCK)] * count


def step_temporaries(path: Path, shapes: Sequence[Sequence[int]]) -> list[int]:
    """Bytes that live at once inside `optimizer.step()` for fp32 tensors of these shapes.

    foreach AdamW (torch's default on CUDA) takes the root of all second moments at once; on a CPU it goes tensor by
    tensor, with the root and the quotient of one. Fused and bitsandbytes' kernels work in place. transformers'
    Adafactor holds the update and its square of one tensor.
    """
    sizes = [4 * math.prod(shape) for shape in shapes]
    if path.optimizer == "adamw_torch":
        return sizes if path.device == "cuda" else [max(sizes, default=0)] * 2
    if path.optimizer == "adafactor":
        return [max(sizes, default=0)] * 2
    return []
