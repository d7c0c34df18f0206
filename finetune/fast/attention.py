"""Attention of rows that lie end to end, one row after another: no mask over all of them, no product between two.

    keys      A1 A2 A3 B1 B2             A1 .. B2: two rows of 3 and 2 tokens in one
    A1        x                          masked   25 products, of which 9 count, and a mask of 25 entries
    A2        x  x                       apart    9 + 4 in two causal kernels, no mask
    A3        x  x  x
    B1                 x                 Rows that begin alike share that beginning, S. Then a row's queries meet S's
    B2                 x  x              keys too, and the two softmaxes are put together by their sums.

The ends of the rows come from the collator (`cu_seq_lens_q`) through the model's keyword arguments. While `documents`
is in force the model asks for `attend` by name; outside of it, and in what is saved, the name is the old one. Layers
of the Llama kind also turn queries and keys by their positions inside the same autograd function, in half the passes.

Kept for the backward pass: queries, keys and values as the kernel takes them (keys and values once per group of
heads, not once per head), the output and the sums of the softmax. Short rows in fp32 go backward by products of
blocks instead (`fast.blocks`), and keep neither output nor sums.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

# An autograd function must inherit from torch's; this hot module is imported when training starts.
import torch  # noqa: TID253
from torch.autograd.function import once_differentiable  # noqa: TID253

from finetune.fast.blocks import by_group, gradients, rows_of

TURNED = ("LlamaAttention", "MistralAttention", "Qwen2Attention", "GemmaAttention")
"""Attention whose forward is q, k, v -> rotation of all of q and k -> attention -> o, and nothing else."""

NAME = "finetune_documents"


@contextmanager
def documents(model: Any, *, blocks: bool = False, turned: bool = True, compiled: bool = False) -> Iterator[None]:
    """Let `model` (a transformers model, or peft's around one) attend row by row. Every batch must lie flat.

    `blocks`: in fp32 the backward pass is that of `fast.blocks`, which is quicker for short rows. `turned`: layers of
    the Llama kind turn queries and keys here too. `compiled`: the layers go through `torch.compile`, which leaves
    attention out.
    """
    from transformers import AttentionInterface

    # transformers builds no mask for a name that has none in its AttentionMaskInterface (`create_causal_mask`).
    run = partial(attend, blocks=blocks)
    AttentionInterface.register(NAME, torch.compiler.disable(run) if compiled else run)  # type: ignore[no-untyped-call]
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    before = base.config._attn_implementation
    base.set_attn_implementation(NAME)
    modules = [module for module in base.modules() if type(module).__name__ in TURNED and turned]
    for module in modules:
        module.forward = _TurnedForward(module, blocks)
    try:
        yield
    finally:
        for module in modules:
            del module.forward
        base.set_attn_implementation(before)


def attend(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: torch.Tensor | None,
    dropout: float = 0.0, scaling: float | None = None, cu_seq_lens_q: Any = None, sliding_window: int | None = None,
    blocks: bool = False, **_: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """Causal attention of [1, heads, tokens, dim] within each row, as [1, tokens, heads, dim].

    `cu_seq_lens_q`: where each row begins, and the end of the last; a tensor or a list. What stands before the first
    of them is the beginning of every row. With a `sliding_window` a token sees that many tokens, itself included.
    Raises `ValueError` without ends of rows, which nothing else tells.
    """
    if cu_seq_lens_q is None or attention_mask is not None:
        raise ValueError(f"{NAME} attention needs rows that lie end to end, with cu_seq_lens_q and without a mask")
    ends = _list(cu_seq_lens_q)
    slides = sliding_window and _longest(ends) > sliding_window
    if slides or dropout or query.device.type == "cuda":
        return _by_torch(query, key, value, ends, dropout, scaling, sliding_window), None
    # Under autocast torch's attention takes 16 bits; a rotation by fp32 tables has left queries and keys in fp32.
    low = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else query.dtype
    q, k, v = (x.to(low).transpose(1, 2) for x in (query, key, value))
    return by_rows(q, k, v, None, None, ends, scaling, blocks=blocks), None


def _list(ends: Any) -> list[int]:
    made: list[int] = ends if isinstance(ends, list) else ends.tolist()
    return made


def _longest(ends: list[int]) -> int:
    """Tokens of the longest row, with what all rows share."""
    return ends[0] + max((end - start for start, end in zip(ends, ends[1:], strict=False)), default=0)


def _by_torch(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, ends: list[int], dropout: float,
    scaling: float | None, sliding_window: int | None,
) -> torch.Tensor:  # fmt: skip
    """Row by row through torch's own function, as [1, tokens, heads, dim]."""
    shared = ends[0]
    lengths = [row.stop - row.start for row in rows_of(ends)]
    # Split, not sliced: a slice's gradient is a tensor of zeros over all rows.
    parts = list(zip(*(torch.split(x, lengths, 2) for x in (query, key, value)), strict=True))
    out = []
    for number, (q, k, v) in enumerate(parts):
        if shared and number:
            k, v = torch.cat([parts[0][1], k], 2), torch.cat([parts[0][2], v], 2)
        wide, seen = sliding_window and k.shape[2] > sliding_window, k.shape[2] - q.shape[2]
        mask = _mask(q.shape[2], k.shape[2], sliding_window, query) if wide or seen else None
        attended = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=mask is None, scale=scaling,
            enable_gqa=q.shape[1] != k.shape[1],
        )  # fmt: skip
        out.append(attended.transpose(1, 2))
    return torch.cat(out, 1)


def _mask(queries: int, keys: int, window: int | None, like: torch.Tensor) -> torch.Tensor:
    """True where a token sees another: itself and those before it, window - 1 at most. The last see all."""
    ones = torch.ones(queries, keys, dtype=torch.bool, device=like.device)
    seen = ones.tril(keys - queries)
    return seen.triu(keys - queries + 1 - window) if window else seen


def by_rows(
    q: Any, k: Any, v: Any, cos: Any, sin: Any, ends: list[int], scaling: float | None, *, blocks: bool
) -> torch.Tensor:
    """`_Rows`, in `blocks` where the type allows it."""
    blocks = blocks and torch.finfo(q.dtype).bits > 16
    out: torch.Tensor = _Rows.apply(q, k, v, cos, sin, ends, scaling, blocks)  # type: ignore[no-untyped-call]
    return out


class _Rows(torch.autograd.Function):
    """Causal attention within rows: q [1, tokens, heads, dim], k and v with fewer heads, out as q; `ends` as above.

    With `cos` and `sin` [1, tokens, dim] queries and keys are turned first (Su et al. 2021, halves as in Llama).
    """

    @staticmethod
    def forward(
        ctx: Any, q: Any, k: Any, v: Any, cos: Any, sin: Any, ends: list[int], scaling: float | None, blocks: bool
    ) -> torch.Tensor:
        if cos is not None:
            q, k = _turned(q, cos, sin), _turned(k, cos, sin)
        shared, rows = ends[0], rows_of(ends)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        queries, keys, values = _grouped(q, k, v)
        places, sums = _spread(out, k.shape[2]), []
        for row in rows:
            places[:, :, row], row_sums = _kernel(
                queries[:, :, row], keys[:, :, row], values[:, :, row], 0.0, True, scale=scaling
            )
            sums.append(row_sums)
        all_sums = torch.cat(sums, -1)
        if shared:
            other, other_sums = _kernel(
                queries[:, :, shared:], keys[:, :, :shared], values[:, :, :shared], 0.0, False, scale=scaling
            )
            own = all_sums[:, :, shared:]
            both = torch.logaddexp(own, other_sums)
            weight = (own - both).exp_().unsqueeze(-1).to(out.dtype)
            places[:, :, shared:] = torch.lerp(other, places[:, :, shared:], weight)
            own.copy_(both)
        ctx.save_for_backward(q, k, v, cos, sin, *((None, None) if blocks else (out, all_sums)))
        ctx.ends, ctx.scaling = ends, scaling
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Any) -> Any:
        q, k, v, cos, sin, out, sums = ctx.saved_tensors
        if out is None:
            made = gradients(grad, q, k, v, ctx.ends, ctx.scaling)
        else:
            made = _by_kernel(grad, q, k, v, out, sums, ctx.ends, ctx.scaling)
        if cos is not None:
            made[0], made[1] = _turned(made[0], cos, sin, back=True), _turned(made[1], cos, sin, back=True)
        return *made, None, None, None, None, None


def _by_kernel(
    grad: Any, q: Any, k: Any, v: Any, out: Any, sums: Any, ends: list[int], scaling: float | None
) -> list[Any]:
    """What `gradients` returns, by torch's kernel."""
    queries, keys, values = _grouped(q, k, v)
    heads, shared = k.shape[2], ends[0]
    grad, out = _spread(grad, heads), _spread(out, heads)
    made = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v)]
    q_grad, k_grad, v_grad = _spread(made[0], heads), made[1][0].transpose(0, 1), made[2][0].transpose(0, 1)
    for row in rows_of(ends):
        q_row, k_row, v_row = _kernel_backward(
            grad[:, :, row], queries[:, :, row], keys[:, :, row], values[:, :, row], out[:, :, row],
            sums[:, :, row], 0.0, True, scale=scaling,
        )  # fmt: skip
        q_grad[:, :, row] = q_row
        torch.sum(k_row, 1, out=k_grad[:, row])
        torch.sum(v_row, 1, out=v_grad[:, row])
    if shared:
        later, first = slice(shared, None), slice(shared)
        q_row, k_row, v_row = _kernel_backward(
            grad[:, :, later], queries[:, :, later], keys[:, :, first], values[:, :, first], out[:, :, later],
            sums[:, :, later], 0.0, False, scale=scaling,
        )  # fmt: skip
        q_grad[:, :, later] += q_row
        k_grad[:, first] += k_row.sum(1)
        v_grad[:, first] += v_row.sum(1)
    return made


_kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_kernel_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def _spread(x: Any, groups: int) -> Any:
    """[1, tokens, heads, dim] -> [groups, heads of a group, tokens, dim], a view."""
    return by_group(x, groups).transpose(1, 2)


def _grouped(q: Any, k: Any, v: Any) -> tuple[Any, ...]:
    """The kernel's inputs: its batch is the groups, and every head of a group reads the same keys and values."""
    queries = _spread(q, k.shape[2])
    return queries, *(_spread(x, k.shape[2]).expand(-1, queries.shape[1], -1, -1) for x in (k, v))


def _turned(x: Any, cos: Any, sin: Any, *, back: bool = False) -> Any:
    """x [1, tokens, heads, dim] times cos, plus its halves changed over and one turned round, times sin.

        y1 = x1 cos1 - x2 sin1,  y2 = x2 cos2 + x1 sin2        `back`: the transpose of that
    """  # fmt: skip
    cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
    y = x * cos
    (x1, x2), (y1, y2), (sin1, sin2) = x.chunk(2, -1), y.chunk(2, -1), sin.chunk(2, -1)
    if back:
        y1.addcmul_(x2, sin2)
        y2.addcmul_(x1, sin1, value=-1)
    else:
        y1.addcmul_(x2, sin1, value=-1)
        y2.addcmul_(x1, sin2)
    return y


class _TurnedForward:
    """The forward of one attention layer whose rows lie end to end."""

    def __init__(self, module: Any, blocks: bool) -> None:
        self.module, self.blocks = module, blocks

    def __call__(self, hidden_states: torch.Tensor, **kwargs: Any) -> Any:
        module = self.module
        cos_sin, ends = kwargs.get("position_embeddings"), kwargs.get("cu_seq_lens_q")
        others = any(kwargs.get(name) is not None for name in ("attention_mask", "cache", "past_key_values"))
        if others or cos_sin is None or ends is None or not self._plain(cos_sin[0], ends := _list(ends)):
            return type(module).forward(module, hidden_states, **kwargs)
        shape = (*hidden_states.shape[:-1], -1, module.head_dim)
        q, k, v = (project(hidden_states).view(shape) for project in (module.q_proj, module.k_proj, module.v_proj))
        if cos_sin[0].dtype != q.dtype:
            return type(module).forward(module, hidden_states, **kwargs)
        out = by_rows(q, k, v, cos_sin[0], cos_sin[1], ends, module.scaling, blocks=self.blocks)
        return module.o_proj(out.flatten(2)), None

    def _plain(self, cos: torch.Tensor, ends: list[int]) -> bool:
        """No dropout, the whole of a head is turned, no row is longer than the window, and the kernel is a CPU's."""
        module = self.module
        window = getattr(module, "sliding_window", getattr(module.config, "sliding_window", None))
        return bool(
            not (module.training and module.attention_dropout)
            and cos.shape[-1] == module.head_dim
            and (not window or _longest(ends) <= window)
            and cos.device.type != "cuda"
        )
