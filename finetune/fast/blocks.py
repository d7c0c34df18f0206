"""Causal attention within rows in fp32, by products of blocks of queries with the keys that they see.

    row of 5, blocks of 2     keys 1 2 3 4 5
                   queries 1   x .                 a product of 2 x 2, one of its halves masked
                           2   x x
                           3   x x x .             2 x 4
                           4   x x x x
                           5   x x x x x           1 x 5

torch's CPU kernel works on 32 to 256 queries of one head at a time. Here the heads that share keys are one matrix,
so products are larger and take a fifth to a quarter less time for rows of 100 to 500 tokens. Scores of a block are
made again in the backward pass; nothing is kept but queries, keys and values. 16-bit types keep the kernel, which
holds its scores in fp32.
"""

from __future__ import annotations

from typing import Any

# An autograd function must inherit from torch's; this hot module is imported when training starts.
import torch  # noqa: TID253
from torch.autograd.function import once_differentiable  # noqa: TID253

from finetune.steps import BLOCK_QUERIES


class Blocks(torch.autograd.Function):
    """Causal attention within rows: q [1, tokens, heads, dim], k and v with fewer heads, out as q.

    `ends`: where each row begins, and the end of the last; what stands before the first belongs to every row.
    With `cos` and `sin` [1, tokens, dim] queries and keys are turned first (Su et al. 2021, halves as in Llama).
    Inside, queries lie as [groups, tokens x heads of a group, dim] and carry the scaling.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Any, k: Any, v: Any, cos: Any, sin: Any, ends: list[int], scaling: float | None
    ) -> torch.Tensor:
        groups, each = k.shape[2], q.shape[2] // k.shape[2]
        ctx.ends, ctx.scaling = ends, q.shape[-1] ** -0.5 if scaling is None else scaling
        queries = _turned(_by_group(q, groups), cos, sin, ctx.scaling).flatten(1, 2)
        keys, values = k[0].transpose(0, 1), v[0].transpose(0, 1)
        if cos is not None:
            keys = _turned(keys.unsqueeze(2), cos, sin).squeeze(2)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        places, future = _by_group(out, groups), _future(q)
        for row, before in _rows(ends):
            row_keys, row_values = _seen(keys, row, before), _seen(values, row, before)
            for part, seen in _blocks(row, before):
                shares = _shares(_part(queries, part, each), row_keys[:, :seen], each, future)
                places[:, part] = torch.bmm(shares, row_values[:, :seen]).view(groups, -1, each, q.shape[3])
                del shares
        ctx.save_for_backward(queries, keys, v, cos, sin)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Any) -> Any:
        queries, keys, v, cos, sin = ctx.saved_tensors
        groups, each = len(keys), queries.shape[1] // keys.shape[1]
        values, future = v[0].transpose(0, 1), _future(v)
        grads = _by_group(grad, groups).flatten(1, 2)
        q_made, k_made, v_made = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (queries, keys, v))
        for row, before in _rows(ctx.ends):
            row_keys, row_values = _seen(keys, row, before), _seen(values, row, before)
            k_row: Any = None
            v_row: Any = None
            for part, seen in reversed(_blocks(row, before)):  # the first one taken sees the whole row
                q, g = _part(queries, part, each), _part(grads, part, each)
                shares = _shares(q, row_keys[:, :seen], each, future)
                v_row = _plus(v_row, shares, g)
                score = torch.bmm(g, row_values[:, :seen].transpose(1, 2))
                score = torch._softmax_backward_data(score, shares, -1, score.dtype)
                torch.bmm(score, row_keys[:, :seen], out=_part(q_made, part, each))
                k_row = _plus(k_row, score, q)
                del shares, score
            for made, of_row in ((k_made, k_row), (v_made[0].transpose(0, 1), v_row)):
                made[:, row] = of_row[:, before:]
                if before:
                    made[:, :before] += of_row[:, :before]
            del k_row, v_row, of_row
        del grads, q, g
        q_grad = torch.empty((*v.shape[:2], groups * each, v.shape[3]), dtype=v.dtype, device=v.device)
        _turned(
            q_made.view(groups, -1, each, v.shape[3]), cos, sin, ctx.scaling, out=_by_group(q_grad, groups), back=True
        )
        if cos is not None:
            k_made = _turned(k_made.unsqueeze(2), cos, sin, back=True).squeeze(2)
        return q_grad, k_made.transpose(0, 1)[None], v_made, None, None, None, None


def rows_of(ends: list[int]) -> list[slice]:
    """Where causal attention runs by itself: each row, and before them what all rows share."""
    starts = [0, *ends] if ends[0] else ends
    return [slice(start, end) for start, end in zip(starts, starts[1:], strict=False)]


def _rows(ends: list[int]) -> list[tuple[slice, int]]:
    """Each row, and how many tokens of the common beginning it sees before its own."""
    return [(row, ends[0] if row.start else 0) for row in rows_of(ends) if row.stop > row.start]


def _blocks(row: slice, before: int) -> list[tuple[slice, int]]:
    """Queries of equal blocks of a row, and how many keys a block sees of what its row does."""
    length = row.stop - row.start
    size = -(-length // -(-length // BLOCK_QUERIES))
    starts = range(0, length, size)
    ends = [min(start + size, length) for start in starts]
    return [
        (slice(row.start + start, row.start + end), before + end) for start, end in zip(starts, ends, strict=True)
    ]


def _by_group(x: Any, groups: int) -> Any:
    """[1, tokens, heads, dim] -> [groups, tokens, heads of a group, dim], a view."""
    return x[0].unflatten(1, (groups, -1)).transpose(0, 1)


def _part(x: Any, tokens: slice, each: int) -> Any:
    """Some tokens of [groups, tokens x heads of a group, dim]."""
    return x[:, tokens.start * each : tokens.stop * each]


def _seen(x: Any, row: slice, before: int) -> Any:
    """Keys or values [groups, tokens, dim] that a row sees."""
    return torch.cat([x[:, :before], x[:, row]], 1) if before else x[:, row]


def _future(like: Any) -> Any:
    """What is added to the scores of a block with itself [tokens, 1, tokens]: nothing before the next token."""
    return (
        torch.full((BLOCK_QUERIES, BLOCK_QUERIES), float("-inf"), dtype=like.dtype, device=like.device)
        .triu_(1)
        .unsqueeze(1)
    )


def _shares(queries: Any, keys: Any, each: int, future: Any) -> Any:
    """The softmax of a block's scores [groups, tokens x heads of a group, keys]; its own tokens are the last keys."""
    scores = torch.bmm(queries, keys.transpose(1, 2))
    length = queries.shape[1] // each
    scores.view(len(scores), length, each, -1)[..., -length:] += future[:length, :, :length]
    return torch.softmax(scores, -1)


def _plus(total: Any, a: Any, b: Any) -> Any:
    """a^T b, added to the first rows of `total` where there is one."""
    if total is None:
        return torch.bmm(a.transpose(1, 2), b)
    total[:, : a.shape[2]].baddbmm_(a.transpose(1, 2), b)
    return total


def _turned(x: Any, cos: Any, sin: Any, scaling: float = 1.0, *, out: Any = None, back: bool = False) -> Any:
    """x [groups, tokens, heads, dim] turned by its positions, times `scaling`, in memory of this order or in `out`.

        y1 = x1 cos1 - x2 sin1,  y2 = x2 cos2 + x1 sin2        `back`: the transpose of that; without tables y = x
    """  # fmt: skip
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    if cos is None:
        return torch.mul(x, scaling, out=out)
    cos, sin = (table[0].unsqueeze(1) * scaling for table in (cos, sin))
    torch.mul(x, cos, out=out)
    (x1, x2), (y1, y2), (sin1, sin2) = x.chunk(2, -1), out.chunk(2, -1), sin.chunk(2, -1)
    if back:
        y1.addcmul_(x2, sin2)
        y2.addcmul_(x1, sin1, value=-1)
    else:
        y1.addcmul_(x2, sin1, value=-1)
        y2.addcmul_(x1, sin2)
    return out
