"""The loss on supervised rows only: a position whose label is ignored never meets the output head.

    input   <s>  Hi   ?   assistant  Yes  <end>            labels   -    -    -     -     Yes  <end>
    hidden  h0   h1   h2     h3      h4    h5     rows that predict a label: h3 -> Yes, h4 -> <end>
    head                     h3      h4           2 of 6 rows are multiplied by the vocabulary

The model runs its own forward; a hook on its head picks the rows, so it works for any causal language model and under
DistributedDataParallel. `supervised_loss` hands them to the model's head and softcapping, trained or frozen.
`onepass_loss` takes them out and needs a head that is a frozen matrix: with it the gradient of the rows is known as
soon as their logits are, and no tensor as wide as the vocabulary outlives its chunk.

    chunk   z = h W^T   [cap]   p = softmax(z)   loss -= log p[label]   gradient of h = (p - onehot) W
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

# The function must inherit from torch's; this hot module is imported by the commands that train or simulate only.
import torch  # noqa: TID253

from finetune import chat
from finetune.fast.last import scored
from finetune.fast.products import back, product
from finetune.heads import Logits, chunk_of

if TYPE_CHECKING:
    from collections.abc import Callable

IGNORED = chat.IGNORE


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
    labels, at = _scored(inputs, places)

    def fewer_rows(head: Any, arguments: tuple[Any, ...]) -> Any:
        return (arguments[0][:, : labels.shape[1]][at].unsqueeze(0), *arguments[1:])

    logits = _run(model, inputs, fewer_rows).logits[0]
    total = torch.nn.functional.cross_entropy(logits.float(), labels[at], reduction="sum")
    return total / _count(items, at)


def onepass_loss(
    model: Any,
    inputs: dict[str, Any],
    items: torch.Tensor | int | None = None,
    places: tuple[torch.Tensor, torch.Tensor] | None = None,
    logits: Logits = Logits(),  # noqa: B008  (frozen)
) -> torch.Tensor:
    """`supervised_loss` in two products instead of three passes; for a model whose head `is_plain`.

    `logits` is what the model's forward does to them behind its head. Without gradients the second product is left
    out.
    """
    labels, at = _scored(inputs, places)
    taken: list[Any] = []
    given = inputs.get("input_ids")

    def no_rows(head: Any, arguments: tuple[Any, ...]) -> Any:
        """Keeps the rows, and lets the model go on with none of them."""
        rows = arguments[0].flatten(0, 1) if only_these else arguments[0][:, : labels.shape[1]][at]
        kind = rows.device.type
        low = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else head.weight.dtype
        taken.extend((rows, low))
        return (arguments[0][:, :0], *arguments[1:])

    with scored(model, at, () if given is None else tuple(given.shape)) as only_these:
        _run(model, inputs, no_rows)
    rows, low = taken
    apply: Any = _OnePass.apply
    total: torch.Tensor = apply(rows, output_head(model).weight, labels[at], logits, low)
    return total / _count(items, at)


def output_head(model: Any) -> Any:
    """The module that turns hidden states into logits, through peft and distributed wrappers."""
    inner = getattr(model, "module", model)
    inner = inner.get_base_model() if hasattr(inner, "get_base_model") else inner
    return inner.get_output_embeddings()


def is_plain(head: Any) -> bool:
    """Whether a head is one frozen matrix: no adapter, no bias, not packed, nothing hooked to it."""
    return (
        type(head) is torch.nn.Linear
        and head.bias is None
        and not head.weight.requires_grad
        and not head._forward_hooks
        and not head._forward_pre_hooks
    )


def labels_of(inputs: dict[str, Any]) -> torch.Tensor:
    """The label that each position predicts, [rows, positions]: `shift_labels`, or the labels of the next tokens.

    In the second case the last position, which predicts nothing, is left out.
    """
    shifted: torch.Tensor | None = inputs.get("shift_labels")
    return inputs["labels"][:, 1:] if shifted is None else shifted


def _scored(
    inputs: dict[str, Any], places: tuple[torch.Tensor, torch.Tensor] | None
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """The labels, and where there are some."""
    labels = labels_of(inputs)
    return labels, (labels != IGNORED).nonzero(as_tuple=True) if places is None else places


_NOT_THE_MODELS = ("labels", "shift_labels", "row_tokens")


def _run(model: Any, inputs: dict[str, Any], at_head: Callable[[Any, tuple[Any, ...]], Any]) -> Any:
    """The model's own forward, with a hook before its head."""
    hook = output_head(model).register_forward_pre_hook(at_head)
    try:
        # With a cache, transformers would not look for several rows in one and would let them see each other.
        return model(
            **{**{key: value for key, value in inputs.items() if key not in _NOT_THE_MODELS}, "use_cache": False}
        )
    finally:
        hook.remove()


def _count(items: torch.Tensor | int | None, places: tuple[torch.Tensor, ...]) -> int:
    return max(int(len(places[0]) if items is None else items), 1)


class _OnePass(torch.autograd.Function):
    """Summed cross entropy of rows [n, hidden] behind a frozen head [vocabulary, hidden]; products in type `low`."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, logits: Logits, low: torch.dtype
    ) -> torch.Tensor:
        ctx.given = rows.dtype
        low_rows, head = rows.to(low), weight.to(low)
        gradient = torch.empty_like(low_rows) if ctx.needs_input_grad[0] else None
        wide = torch.promote_types(low, torch.float32)  # sums in fp32, or fp64 for a check of the gradient
        total = torch.zeros((), dtype=wide, device=rows.device)
        chunk, cap = chunk_of(len(rows)), logits.cap
        for start in range(0, len(rows), max(chunk, 1)):
            label = labels[start : start + chunk, None]
            low_z = product(low_rows[start : start + chunk], head)
            z = low_z.to(wide)
            if logits.scale != 1:
                z.mul_(logits.scale)
            tanh = torch.tanh(z.div_(cap)) if cap else None
            if tanh is not None:
                torch.mul(tanh, cap, out=z)  # type: ignore[arg-type]  # no cap, no tanh
            # Not torch's log_softmax: on a CPU its fp32 sum over a vocabulary is off by 1e-5, a pairwise sum by 1e-8.
            right, top = z.gather(1, label), z.amax(1, keepdim=True)
            norm = z.sub_(top).exp_().sum(1, keepdim=True)
            total += (norm.log() + top - right).sum()
            if gradient is not None:
                z.div_(norm).scatter_add_(1, label, z.new_full(label.shape, -1.0))
                if tanh is not None:
                    z.mul_(tanh.mul_(tanh).neg_().add_(1))
                if logits.scale != 1:
                    z.mul_(logits.scale)
                gradient[start : start + chunk] = back(low_z.copy_(z), head)
            del low_z, z, tanh  # before the next chunk's
        ctx.save_for_backward(gradient)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return (gradient * grads[0]).to(ctx.given), None, None, None, None
