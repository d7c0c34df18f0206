"""Frozen weights that lie in memory as they lie in their file, and are widened to fp32 one product at a time.

    half      a bf16 or fp16 number is an fp32 number whose last bits are 0      2 bytes a weight instead of 4
    blocks    w = scale x code + offset, as GGUF's Q4_1 has them (`gguf_blocks`)  1 1/4 bytes

Both give every weight back to the bit, so results are those of fp32 weights. A layer's `weight` is then a tensor of
bytes with a note how to read it; peft takes it for a packed one and leaves it alone. `hold_half` and
`hold_blocks` do so for the Linear layers of a decoder before adapters are attached; embedding, head and norms are
fp32.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

# This hot module is imported with the adapters.
import torch  # noqa: TID253

from finetune.gguf_blocks import BLOCK, FILE, PARTS, dense
from finetune.tensors import layer_of

log = logging.getLogger(__name__)

_NOTE = "_held_by_finetune"


class Held(NamedTuple):
    """How the bytes of a weight are read: as numbers of `low`, or as codes with a scale and an offset a block.

    `room`: where all layers of a model make theirs dense, one after the other. It stays in the processor's caches.
    """

    room: torch.Tensor
    low: torch.dtype | None = None
    scale: torch.Tensor | None = None
    offset: torch.Tensor | None = None

    def dense(self, weight: torch.Tensor) -> torch.Tensor:
        """The weight [out, in] in fp32. The next call, of any layer, writes over it."""
        if self.low is not None:
            low = weight.view(self.low)
            return self.room[: low.numel()].view(low.shape).copy_(low)
        made: torch.Tensor = dense(weight, self.scale, self.offset, self.room[: weight.numel()])
        return made


class _Forward:
    """The forward of a Linear layer whose weight is held, where no group of `fast.adapter` runs it."""

    def __init__(self, layer: Any, how: Held) -> None:
        self.layer, self.how = layer, how

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        layer, weight = self.layer, self.how.dense(self.layer.weight)
        if torch.is_grad_enabled():  # autograd keeps it
            weight = weight.clone()
        return torch.nn.functional.linear(x, weight, layer.bias)


def held(weight: Any) -> Held | None:
    """The note on a weight; None where the weight is what it looks like."""
    return getattr(weight, _NOTE, None)


def tensors_of(module: Any) -> Iterator[torch.Tensor]:
    """What a held weight keeps beside its bytes; the room is everyone's."""
    if (how := held(getattr(module, "weight", None))) is not None:
        yield from (tensor for tensor in (how.scale, how.offset, how.room) if tensor is not None)


def room_for(linears: list[tuple[str, Any]]) -> torch.Tensor:
    """Room for the largest of these layers in fp32, flat."""
    return torch.empty(max((layer.weight.numel() for _, layer in linears), default=0))


def hold_half(model: Any, every: int = 1) -> None:
    """Hold the Linear layers of a model in 16 bits as they are, and turn everything else into fp32.

    `every`: those of every n-th decoder layer only.
    """
    linears = linears_of(model, every)
    room = room_for(linears)
    for _, layer in linears:
        put(layer, layer.weight.data.view(torch.uint8), Held(room, layer.weight.dtype))
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.float()
    model.config.dtype = torch.float32


def hold_blocks(model: Any, folder: Path, every: int = 1) -> None:
    """Hold the fp32 weights of a model as the blocks that lie in `folder`, where these are their very bits.

    Whatever was changed since the blocks were written stays as it is. `every`: of every n-th decoder layer only.
    """
    from safetensors import SafetensorError, safe_open

    linears = linears_of(model, every)
    room = room_for(linears)
    try:
        with safe_open(folder / FILE, framework="pt") as file:
            for name, layer in linears:
                _hold_in_blocks(layer, file, name, room)
    except SafetensorError as error:  # a file that was cut off, or lacks a layer
        log.warning("%s cannot be read (%s).", folder / FILE, error)
    for parameter in model.parameters():  # what stays is copied, so that the file of the fp32 weights can go
        if parameter.is_floating_point():
            parameter.data = parameter.data.clone()
    if others := sum(held(layer.weight) is None for _, layer in linears):
        log.warning(
            "%d weights are not those of %s, so they lie in memory as fp32, and a step takes more than planned.",
            others,
            folder / FILE,
        )


def _hold_in_blocks(layer: Any, file: Any, name: str, room: torch.Tensor) -> None:
    codes, scale, offset = (file.get_tensor(f"{name}.{part}") for part in PARTS)
    inputs, outputs = layer.in_features, layer.out_features
    of_blocks = (inputs // BLOCK, 1, outputs)
    if (codes.shape, scale.shape, offset.shape) != ((inputs, outputs), of_blocks, of_blocks):
        return
    how = Held(room, scale=scale, offset=offset)
    if torch.equal(how.dense(codes), layer.weight):
        put(layer, codes, how)


def linears_of(model: Any, every: int = 1) -> list[tuple[str, Any]]:
    """The Linear layers by name of every n-th decoder layer, from the first on."""
    head = model.get_output_embeddings()
    linears = [(name, m) for name, m in model.named_modules() if type(m) is torch.nn.Linear and m is not head]
    return [(name, m) for name, m in linears if (layer_of(name + ".") or 0) % every == 0]


def put(layer: Any, data: torch.Tensor, how: Held) -> None:
    """Let the bytes `data` be the weight of a Linear layer."""
    layer.weight = torch.nn.Parameter(data, requires_grad=False)
    setattr(layer.weight, _NOTE, how)
    layer.forward = _Forward(layer, how)
