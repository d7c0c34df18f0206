"""Attention of rows that lie end to end, one row after another: no mask over all of them, no product between two.

    keys      A1 A2 A3 B1 B2             A1 .. B2: two rows of 3 and 2 tokens in one
    A1        x                          masked   25 products, of which 9 count, and a mask of 25 entries
    A2        x  x                       apart    9 + 4 in two causal kernels, no mask
    A3        x  x  x
    B1                 x
    B2                 x  x

The ends of the rows come from the collator (`cu_seq_lens_q`) through the model's keyword arguments. While `documents`
is in force the model asks for this function by name; outside of it, and in what is saved, the name is the old one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

NAME = "finetune_documents"


@contextmanager
def documents(model: Any) -> Iterator[None]:
    """Let `model` (a transformers model, or peft's around one) attend row by row. Every batch must lie flat."""
    from transformers import AttentionInterface

    # transformers builds no mask for a name that has none in its AttentionMaskInterface (`create_causal_mask`).
    AttentionInterface.register(NAME, attend)
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    before = base.config._attn_implementation
    base.set_attn_implementation(NAME)
    try:
        yield
    finally:
        base.set_attn_implementation(before)


def attend(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: torch.Tensor | None,
    dropout: float = 0.0, scaling: float | None = None, cu_seq_lens_q: Any = None, sliding_window: int | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """Causal attention of [1, heads, tokens, dim] within each row, as [1, tokens, heads, dim].

    `cu_seq_lens_q`: where each row begins, and the end of the last; a tensor or a list. With a `sliding_window` a
    token sees that many tokens, itself included. Raises `ValueError` without ends of rows, which nothing else tells.
    """
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    if cu_seq_lens_q is None or attention_mask is not None:
        raise ValueError(f"{NAME} attention needs rows that lie end to end, with cu_seq_lens_q and without a mask")
    ends = cu_seq_lens_q if isinstance(cu_seq_lens_q, list) else cu_seq_lens_q.tolist()
    lengths = [end - start for start, end in zip(ends, ends[1:], strict=False)]
    # Split, not sliced: a slice's gradient is a tensor of zeros over all rows.
    parts = zip(*(torch.split(x, lengths, 2) for x in (query, key, value)), strict=True)
    out = []
    for length, (q, k, v) in zip(lengths, parts, strict=True):
        mask = _window(length, sliding_window, query) if sliding_window and length > sliding_window else None
        attended = scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=mask is None, scale=scaling,
            enable_gqa=q.shape[1] != k.shape[1],
        )  # fmt: skip
        out.append(attended.transpose(1, 2))
    return torch.cat(out, 1), None


def _window(length: int, window: int, like: torch.Tensor) -> torch.Tensor:
    """True where a token sees another: itself and the window - 1 before it."""
    import torch

    ones = torch.ones(length, length, dtype=torch.bool, device=like.device)
    return ones.tril().triu(1 - window)
