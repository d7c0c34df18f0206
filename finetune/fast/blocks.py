"""The backward pass of causal attention within rows, by products of blocks of queries with the keys that they see.

    row of 5, blocks of 2     keys 1 2 3 4 5
                   queries 1   x .                 a product of 2 x 2, one of its halves masked
                           2   x x
                           3   x x x .             2 x 4
                           4   x x x x
                           5   x x x x x           1 x 5

torch's CPU kernel works on 32 to 256 queries of one head at a time. Here the heads that share keys are one matrix, so
products are larger. Rows of 256 to 768 tokens are quicker, by as much as a fifth, and behind a common beginning those
from 128 on; shorter ones are slower by a few hundredths (docs/benchmarks/attention.md). Scores of a block are made
again, so nothing is kept for this pass but queries, keys and values. Not for 16-bit types, whose scores the kernel
holds in fp32. The forward pass stays the kernel's, whose rounding is that of every other trainer.
"""

from __future__ import annotations

from typing import Any

# This hot module is imported when training starts.
import torch  # noqa: TID253

from finetune.steps import block_of


def gradients(grad: Any, q: Any, k: Any, v: Any, ends: list[int], scaling: float | None) -> list[Any]:
    """Gradients of q [1, tokens, heads, dim], k and v with fewer heads, for `grad` of the output, which is as q.

    `ends`: where each row begins, and the end of the last; what stands before the first belongs to every row.

        P = softmax(scaling Q K^T),  dV = P^T dO,  dS = P (dO V^T - sum(P dO V^T)),  dQ = scaling dS K,
        dK = scaling dS^T Q          (Dao et al. 2022, appendix B)
    """
    groups, each = k.shape[2], q.shape[2] // k.shape[2]
    scaling = q.shape[3] ** -0.5 if scaling is None else scaling
    queries, grads, (keys, values) = (
        by_group(q, groups),
        by_group(grad, groups),
        (x[0].transpose(0, 1) for x in (k, v)),
    )
    made = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v)]
    q_made, (k_made, v_made) = by_group(made[0], groups), (x[0].transpose(0, 1) for x in made[1:])
    rows = rows_of(ends)
    future = _future(max(block_of(row.stop - row.start) for row in rows), q)
    for row in rows:
        before = ends[0] if row.start else 0
        row_keys, row_values = _seen(keys, row, before) * scaling, _seen(values, row, before)
        k_row: Any = None
        v_row: Any = None
        for part, seen in reversed(_blocks(row, before)):  # the first one taken sees the whole row
            block, over = queries[:, part].flatten(1, 2), grads[:, part].flatten(1, 2)
            shares = _shares(block, row_keys[:, :seen], each, future)
            v_row = _plus(v_row, shares, over)
            score = torch.bmm(over, row_values[:, :seen].transpose(1, 2))
            score = torch._softmax_backward_data(score, shares, -1, score.dtype)
            q_made[:, part] = torch.bmm(score, row_keys[:, :seen]).view(groups, -1, each, q.shape[3])
            k_row = _plus(k_row, score, block)
            del shares, score
        for whole, of_row in ((k_made, k_row), (v_made, v_row)):
            whole[:, row] = of_row[:, before:]
            if before:
                whole[:, :before] += of_row[:, :before]
    k_made *= scaling
    return made


def rows_of(ends: list[int]) -> list[slice]:
    """Where causal attention runs by itself: each row, and before them what all rows share."""
    starts = [0, *ends] if ends[0] else ends
    return [slice(start, end) for start, end in zip(starts, starts[1:], strict=False)]


def by_group(x: Any, groups: int) -> Any:
    """[1, tokens, heads, dim] -> [groups, tokens, heads of a group, dim], a view."""
    return x[0].unflatten(1, (groups, -1)).transpose(0, 1)


def _blocks(row: slice, before: int) -> list[tuple[slice, int]]:
    """Queries of equal blocks of a row, and how many keys a block sees of what its row does."""
    size = block_of(row.stop - row.start)
    starts = range(row.start, row.stop, size)
    ends = [min(start + size, row.stop) for start in starts]
    return [(slice(start, end), before + end - row.start) for start, end in zip(starts, ends, strict=True)]


def _seen(x: Any, row: slice, before: int) -> Any:
    """Keys or values [groups, tokens, dim] that a row sees."""
    return torch.cat([x[:, :before], x[:, row]], 1) if before else x[:, row]


def _future(tokens: int, like: Any) -> Any:
    """What is added to the scores of a block with itself [tokens, 1, tokens]: nothing before the next token."""
    future = torch.full((tokens, tokens), float("-inf"), dtype=like.dtype, device=like.device)
    return future.triu_(1).unsqueeze(1)


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
