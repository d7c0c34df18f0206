"""The loss on supervised rows only: a position whose label is ignored never meets the output head.

    input   <s>  Hi   ?   assistant  Yes  <end>            labels   -    -    -     -     Yes  <end>
    hidden  h0   h1   h2     h3      h4    h5     rows that predict a label: h3 -> Yes, h4 -> <end>
    head                     h3      h4           2 of 6 rows are multiplied by the vocabulary

The model runs its own forward, head and softcapping; a hook hands the head fewer rows, so it works for any causal
language model, frozen or trained head, and under DistributedDataParallel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

IGNORED = -100


def supervised_loss(
    model: Any,
    inputs: dict[str, Any],
    items: torch.Tensor | int | None = None,
    places: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Cross entropy of `inputs["labels"]` [rows, length], summed and divided by `items` (default: the labels here).

    `model` is called with everything else in `inputs`; it may be wrapped. A batch without a single label gives zero.
    `places` are row and column of every scored position, for a caller that knows them (a trace without values).
    """
    from torch.nn.functional import cross_entropy

    labels = inputs["labels"][:, 1:]
    if places is None:
        places = (labels != IGNORED).nonzero(as_tuple=True)

    def fewer_rows(head: Any, arguments: tuple[Any, ...]) -> Any:
        return (arguments[0][:, :-1][places].unsqueeze(0), *arguments[1:])

    hook = output_head(model).register_forward_pre_hook(fewer_rows)
    try:
        # With a cache, transformers would not look for several rows in one and would let them see each other.
        rest = {**{key: value for key, value in inputs.items() if key != "labels"}, "use_cache": False}
        logits = model(**rest).logits[0]
    finally:
        hook.remove()
    total = cross_entropy(logits.float(), labels[places], reduction="sum")
    count = len(places[0]) if items is None else items
    return total / max(int(count), 1)


def output_head(model: Any) -> Any:
    """The module that turns hidden states into logits, through peft and distributed wrappers."""
    inner = getattr(model, "module", model)
    inner = inner.get_base_model() if hasattr(inner, "get_base_model") else inner
    return inner.get_output_embeddings()
