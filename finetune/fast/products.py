"""Products with a frozen weight, by the quickest library that is here.

    product    x W^T            [rows, in] @ [out, in]^T    the output head, forward; some layers, forward
    back       g W [+ total]    [rows, out] @ [out, in]     the backward pass to the input of head and layers

torch multiplies fp32 matrices on a CPU by MKL. oneDNN, which torch carries too, takes the same weights as they lie
and is the quicker one on the machines tried: by a tenth to a quarter in the backward pass, by a twentieth to a tenth
in the forward pass; `scripts/bench.py` prints the speed of both. Both are plain fp32 sums, in another order, and
oneDNN's is the less exact one the longer a sum is. What the forward pass of the layers rounds goes into every
gradient: sums of more than `LONGEST_FORWARD` terms stay with torch there, and so do queries, keys and values, whose
errors a softmax enlarges; sums over a vocabulary always do (`LONGEST`). Gradients then are as far from TRL's as these
are from fp64's (`scripts/check_gradients.py`). Everything but fp32 on an x86 CPU is torch's. `by_torch` leaves all of
it to torch.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


LONGEST = 4096
"""Terms of a sum that oneDNN takes. Over a vocabulary, also in parts of this size, gradients come out 5e-5 off."""
LONGEST_FORWARD = 1024
"""The same in the forward pass of a layer."""
_by_torch = False


@contextmanager
def by_torch() -> Iterator[None]:
    """Multiply as torch does, in the order of sums of every other trainer."""
    global _by_torch
    before, _by_torch = _by_torch, True
    try:
        yield
    finally:
        _by_torch = before


def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [..., in] times the transpose of `weight` [out, in]. Keeps nothing for a backward pass."""
    import torch

    if _quick(x, weight, weight.shape[1]):
        made: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
        return made
    return x @ weight.t()


def back(grad: torch.Tensor, weight: torch.Tensor, total: torch.Tensor | None = None) -> torch.Tensor:
    """grad [rows, out] times `weight` [out, in], added to `total` [rows, in]; always a new tensor."""
    import torch

    if not _quick(grad, weight, len(weight)):
        return grad @ weight if total is None else torch.addmm(total, grad, weight)
    op, turned = torch.ops.mkldnn._linear_pointwise, weight.t()
    made: torch.Tensor = (
        op(grad, turned, None, "none", [], "") if total is None else op.binary(grad, total, turned, None, "add")
    )
    return made


def _quick(x: Any, weight: Any, terms: int) -> bool:
    """Whether oneDNN takes this product. Its operator knows plain CPU tensors only, and not a weight of one row."""
    import torch

    return bool(
        not _by_torch
        and x.dtype == weight.dtype == torch.float32
        and x.device.type == weight.device.type == "cpu"
        and type(x) is torch.Tensor
        and x.numel()
        and min(weight.shape) > 1
        and terms <= LONGEST
        and onednn()
    )


@cache
def onednn() -> bool:
    """Whether torch's oneDNN operator is here and multiplies in full fp32, tried on small matrices."""
    import torch

    if platform.machine().lower() not in ("x86_64", "amd64") or not torch._C._has_mkldnn:
        return False
    try:
        op = torch.ops.mkldnn._linear_pointwise
        dice = torch.Generator().manual_seed(0)
        x, w = torch.randn(8, 96, generator=dice), torch.randn(32, 96, generator=dice)
        forth = op(x, w, None, "none", [], "")
        again = op.binary(forth, x, w.t(), None, "add")
    except (AttributeError, RuntimeError):  # another torch, or one built without it
        return False
    wide = x.double(), w.double()
    right = wide[0] @ wide[1].t()
    both = ((forth, right), (again, right @ wide[1] + wide[0]))
    return all(bool((made - exact).abs().max() < 1e-6 * exact.abs().max()) for made, exact in both)
