"""The last layer's MLP on supervised positions only: nothing else of what it makes is read.

    x  = x + attention(norm(x))     all positions: keys and values of one are read by the others
    s  = x[supervised]              a third of 512 rows, for example
    s  = s + mlp(norm(s))           the other positions would go into logits that nobody asks for
    -> the model's last norm, and the head (`onepass_loss`, which says which positions these are)

`attach` puts a forward on the last decoder layer; unless `rows` are set it is the layer's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# This hot module is imported when a model is made ready to train.
import torch  # noqa: TID253

from finetune.method import FEW_TOKENS

KINDS = ("LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "GemmaDecoderLayer")
"""Layers whose forward is norm, attention, sum, norm, MLP, sum, and nothing else."""


class LastForward:
    """The forward of a last decoder layer: from [1, tokens, width] to [1, n, width] while `rows` [n] are set."""

    def __init__(self, module: Any) -> None:
        self.module = module
        self.rows: torch.Tensor | None = None

    def __call__(self, hidden_states: torch.Tensor, **kwargs: Any) -> Any:
        module = self.module
        if self.rows is None:
            return type(module).forward(module, hidden_states, **kwargs)
        attended, _ = module.self_attn(hidden_states=module.input_layernorm(hidden_states), **kwargs)
        x = torch.index_select(hidden_states + attended, 1, self.rows)
        del hidden_states, attended
        return x + module.mlp(module.post_attention_layernorm(x))


def attach(model: Any) -> bool:
    """Give the last decoder layer of a model, peft's around it or not, its forward; whether there is one for it."""
    layer = _last_layer(model)
    if type(layer).__name__ not in KINDS:
        return False
    layer.forward = LastForward(layer)
    return True


@contextmanager
def scored(model: Any, at: tuple[torch.Tensor, ...], shape: tuple[int, ...]) -> Iterator[bool]:
    """While it is in force the last layer returns the positions `at` (row, column) of a batch of `shape`, if True."""
    forward = getattr(_last_layer(model), "forward", None)
    if not isinstance(forward, LastForward) or shape[0] != 1 or len(at[1]) < FEW_TOKENS:
        yield False
        return
    forward.rows = at[1]
    try:
        yield True
    finally:
        forward.rows = None


def _last_layer(model: Any) -> Any:
    inner = getattr(model, "module", model)  # of DistributedDataParallel
    inner = inner.get_base_model() if hasattr(inner, "get_base_model") else inner
    layers = getattr(getattr(inner, "model", None), "layers", None)
    return layers[-1] if isinstance(layers, torch.nn.ModuleList) and len(layers) else None
