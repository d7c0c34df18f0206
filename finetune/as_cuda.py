"""What a step on a GPU (or CPU) would run, for a trace on meta tensors: kernels, casts, masks and workspaces.

Meta tensors have no device, so torch would take its portable paths for them. Each context manager here puts one real
path in place for the time of a trace, by replacing a function of torch, transformers or TRL and putting it back. A
TorchFunctionMode would not do: it is off while `backward` recomputes checkpointed layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from finetune.steps import Batch, Path

if TYPE_CHECKING:
    import torch


@contextmanager
def traced(path: Path, batch: Batch) -> Iterator[LowCopies]:
    """All of them. Yields autocast's cache of weights, which is kept during a forward pass only."""
    import torch

    with ExitStack() as stack:
        stack.enter_context(_masks(batch))
        stack.enter_context(_attention(path))
        copies = LowCopies()
        if path.autocast:
            stack.enter_context(_autocast(path, copies))
        else:  # torch itself does not know the word meta here
            stack.enter_context(_swapped(torch, is_autocast_enabled=lambda device_type="cuda": False))
        if path.device == "cuda":
            stack.enter_context(_half_softmax())
            stack.enter_context(_byte_dropout())
        if path.loss == "tiled":
            stack.enter_context(_tiles(path))
        yield copies


class LowCopies:
    """Autocast's low copies of fp32 weights that require a gradient: kept until the outermost autocast region ends.

    A layer that checkpointing runs again in the backward pass casts for itself.
    """

    def __init__(self) -> None:
        self.keeping = False
        self._kept: dict[int, torch.Tensor] = {}

    def __enter__(self) -> LowCopies:
        self.keeping = True
        return self

    def __exit__(self, *_: object) -> None:
        self.keeping = False
        self._kept.clear()

    def of(self, weight: torch.Tensor, low: torch.dtype) -> torch.Tensor:
        """The copy of a weight, made when it is first asked for."""
        if not (self.keeping and weight.is_leaf and weight.requires_grad):
            return weight.to(low)
        if id(weight) not in self._kept:
            self._kept[id(weight)] = weight.to(low)
        return self._kept[id(weight)]


@contextmanager
def _swapped(owner: Any, **new: Any) -> Iterator[None]:
    before = {name: getattr(owner, name, None) for name in new}
    for name, value in new.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


@contextmanager
def _masks(batch: Batch) -> Iterator[None]:
    """Answers what transformers would read from the batch: is a row padded, do several rows lie in one."""
    from transformers import masking_utils

    def rows_of(position_ids: torch.Tensor) -> torch.Tensor | None:
        return position_ids.new_zeros(position_ids.shape) if batch.flat else None

    with _swapped(
        masking_utils,
        find_packed_sequence_indices=rows_of,
        is_tracing=lambda tensor=None: False,
        fast_all=lambda tensor: not batch.padded,
    ):
        yield


# ---------------------------------------------------------------------------------------------------------- attention


@contextmanager
def _attention(path: Path) -> Iterator[None]:
    """`scaled_dot_product_attention` goes to the kernel that the path names."""
    from torch.nn import functional

    def attend(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: Any = None, dropout_p: float = 0.0,
        is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    ) -> Any:  # fmt: skip
        return _kernel(path, query, key, value, attn_mask, dropout_p, is_causal, scale)

    with _swapped(functional, scaled_dot_product_attention=attend):
        yield


def _kernel(
    path: Path, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, dropout: float,
    causal: bool, scale: float | None,
) -> Any:  # fmt: skip
    import torch

    aten = torch.ops.aten
    kind = path.attention
    if kind == "flash" and (mask is not None or query.dtype == torch.float32 or query.shape[-1] > 256):
        kind = "efficient"  # the flash kernel takes no mask, no fp32 and no wider head
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), float("-inf"))
    if kind == "flash":
        pad = -query.shape[-1] % 8
        if pad:
            scale = scale or query.shape[-1] ** -0.5
            query, key, value = (torch.nn.functional.pad(x, (0, pad)) for x in (query, key, value))
        out = aten._scaled_dot_product_flash_attention(query, key, value, dropout, causal, False, scale=scale)[0]
        return out[..., :-pad] if pad else out
    if kind in ("cpu", "documents"):
        return aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, dropout, causal, attn_mask=mask, scale=scale
        )[0]
    groups = query.shape[-3] // key.shape[-3]
    if groups > 1:  # these kernels know no shared heads
        key, value = (x.repeat_interleave(groups, dim=-3) for x in (key, value))
    if kind == "efficient":
        if mask is not None:
            mask = mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
        needs = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
        return aten._scaled_dot_product_efficient_attention(
            query, key, value, mask, needs, dropout, causal, scale=scale
        )[0]
    return aten._scaled_dot_product_attention_math(query, key, value, mask, dropout, causal, scale=scale)[0]


@contextmanager
def _half_softmax() -> Iterator[None]:
    """CUDA turns fp16 scores into an fp32 softmax in one kernel (fp16 only, not bf16); elsewhere there are two."""
    import torch
    from torch.nn import functional

    plain = functional.softmax

    def softmax(x: torch.Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: Any = None) -> Any:
        if x.dtype == torch.float16 and dtype == torch.float32:
            return torch.ops.aten._softmax(x, dim, True)
        return plain(x, dim=dim, dtype=dtype)

    with _swapped(functional, softmax=softmax):
        yield


@contextmanager
def _byte_dropout() -> Iterator[None]:
    """CUDA drops in one kernel and keeps a mask of bytes; elsewhere it multiplies by numbers of the input's type."""
    import torch
    from torch.nn import functional

    plain = functional.dropout

    def dropout(x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
        if training and 0 < p < 1 and not inplace:
            return torch.ops.aten.native_dropout(x, p, True)[0]
        return plain(x, p, training, inplace)

    with _swapped(functional, dropout=dropout):
        yield


# ----------------------------------------------------------------------------------------------------------- autocast


@contextmanager
def _autocast(path: Path, copies: LowCopies) -> Iterator[None]:
    """Autocast, which does not know meta tensors: products take their inputs in the low type."""
    import torch
    from torch.nn import functional

    low = getattr(torch, str(path.autocast))

    def cast(x: Any) -> Any:
        return copies.of(x, low) if isinstance(x, torch.Tensor) and x.dtype == torch.float32 else x

    def lowered(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def run(*args: Any, **kwargs: Any) -> torch.Tensor:
            return function(*map(cast, args), **{key: cast(value) for key, value in kwargs.items()})

        return run

    attend = functional.scaled_dot_product_attention
    with (
        _swapped(functional, linear=lowered(functional.linear), scaled_dot_product_attention=lowered(attend)),
        _swapped(
            torch,
            matmul=lowered(torch.matmul),
            bmm=lowered(torch.bmm),
            is_autocast_enabled=lambda device_type="cuda": device_type in (path.device, "meta"),
            get_autocast_dtype=lambda device_type="cuda": low,
        ),
    ):
        yield


# --------------------------------------------------------------------------------------------------------- TRL's head


@contextmanager
def _tiles(path: Path) -> Iterator[None]:
    """TRL's loss head as it runs with Triton: its kernels work in place on one tile and allocate nothing."""
    import torch
    from trl.kernels import chunked_logprob as head
    from trl.trainer import utils

    nothing = _Kernel()

    def add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
        if a.dtype == torch.float32:
            total.addmm_(a, b)
        else:  # cuBLAS adds the product of 16-bit inputs to an fp32 total without a copy
            total.add_(0)

    with ExitStack() as stack:
        if path.device == "cuda":
            stack.enter_context(_swapped(utils, _use_triton=lambda device: True))
            stack.enter_context(
                _swapped(
                    head,
                    _use_triton=lambda device: True,
                    _forward_kernel=nothing,
                    _backward_kernel=nothing,
                    _addmm_fp32=add_product,
                    triton=SimpleNamespace(cdiv=lambda a, b: -(-a // b)),
                )
            )
        yield


class _Kernel:
    """Stands for a Triton kernel: `kernel[grid](...)` does nothing."""

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *args, **kwargs: None


# ----------------------------------------------------------------------------------------------- bitsandbytes' choice


def fused_4_bit(path: Path, activations: torch.Tensor, shape: Sequence[int]) -> bool:
    """Whether bitsandbytes multiplies with a packed weight as it is, by its own rule for the card and the shapes."""
    out, inner = int(shape[0]), int(shape[1])
    rows = activations.numel() // inner
    if rows > _FUSED_ROWS:
        return False
    return _fused_4_bit(path.capability, path.multiprocessors, activations.dtype, rows, out, inner)


_FUSED_ROWS = 1536


@cache
def _fused_4_bit(
    capability: tuple[int, int], multiprocessors: int, dtype: torch.dtype, rows: int, out: int, inner: int
) -> bool:
    import torch

    missing = not hasattr(torch._C, "_cuda_getCurrentRawStream")
    if missing:  # a CPU build of torch; the module only stores the function
        setattr(torch._C, "_cuda_getCurrentRawStream", None)  # noqa: B010
    try:
        from bitsandbytes.backends.cuda import ops
    finally:
        if missing:
            delattr(torch._C, "_cuda_getCurrentRawStream")  # noqa: B043
    with _swapped(ops, _gpu_dispatch_props=lambda index: (multiprocessors, *capability)):
        return bool(ops._gemm_4bit_use_custom_cuda.__wrapped__(0, dtype, rows, out, inner))
