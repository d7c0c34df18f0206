"""What kernels allocate inside themselves, from their sources: no trace of operations can see it.

Each formula is in bytes and names its source in torch or bitsandbytes.
"""

from __future__ import annotations

import math
from typing import Any

from finetune.steps import Path

PRODUCTS = ("aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm", "bitsandbytes::gemm_4bit")
_KIB = 1024


def cublas_workspace(path: Path) -> int:
    """cuBLAS's workspace of one thread: `:4096:2:16:8` KiB, on Hopper and newer `:4096:8`.

    Source: `getChosenWorkspaceSize`, aten/src/ATen/cuda/CublasHandlePool.cpp.
    """
    return 4096 * 8 * _KIB if path.capability[0] in (9, 10) else (4096 * 2 + 16 * 8) * _KIB


def unpacked_weight(args: Any, kwargs: Any) -> list[int]:
    """Bytes that bitsandbytes' `gemm_4bit` holds beside its output when it unpacks the weight for the product."""
    activations, shape = args[0], args[2]
    out, inner = int(shape[0]), int(shape[1])
    sizes = [out * inner * activations.element_size()]
    if kwargs.get("absmax_8bit") is not None:
        sizes.insert(0, out * inner // 64 * 4)  # the scales unpacked to fp32
    return sizes


def inside(path: Path, name: str, args: Any) -> list[list[int]]:
    """Groups of bytes that live together inside a kernel beside its inputs and outputs."""
    if path.device != "cuda":
        return []
    if name == "aten::_softmax_backward_data":
        grad = args[0]
        return [[grad.numel() * grad.element_size()]]  # `tmp = grad * output`, aten/native/cuda/SoftMax.cu
    if name == "aten::_scaled_dot_product_efficient_attention_backward":
        return efficient_backward(*args[1].shape, value_width=args[3].shape[-1], width=args[1].element_size())
    if name == "aten::_scaled_dot_product_flash_attention_backward":
        query, key = args[1], args[2]
        shared = key.shape[1] != query.shape[1]
        return [flash_backward(*query.shape, width=query.element_size(), shared=shared)]
    if name == "aten::embedding_dense_backward":
        return [[8 * args[1].numel()] * 4]  # sorted indices and their counts, aten/native/cuda/Embedding.cu
    return []


def efficient_backward(
    rows: int, heads: int, length: int, dim: int, *, value_width: int, width: int
) -> list[list[int]]:
    """The memory-efficient kernel's backward: `delta`, then the split accumulators of dQ (and of dK, dV when the head
    is wider than 64 and they do not stay in registers). Source: kernel_backward.h, GradQTempStorage."""
    groups = []
    if width != 2:
        groups.append([rows * length * heads * value_width * 4, rows * length * heads * 4])
    blocks = math.ceil(length / 64)
    query = blocks * math.ceil(dim / 64) * (16 + 64 * 64 * 4)
    key = 2 * blocks * 64 * math.ceil(dim / 64) * 64 * 4 if width == 2 and dim > 64 else 0
    groups.append([rows * heads * length * 4, rows * heads * (query + key)])
    return groups


def flash_backward(rows: int, heads: int, length: int, dim: int, *, width: int, shared: bool) -> list[int]:
    """The flash kernel's backward: dQ in fp32 and the softmax's sums, with lengths rounded up to 128 and dims to 32,
    and dK, dV per query head where heads share them. Source: flash_api.cpp, `mha_bwd`."""
    long = math.ceil(length / 128) * 128
    sizes = [rows * heads * long * math.ceil(dim / 32) * 32 * 4, rows * heads * long * 4]
    return sizes + [rows * length * heads * dim * width] * 2 if shared else sizes
