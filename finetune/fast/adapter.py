"""LoRA layers that read one input, as one autograd function: query, key and value; gate and up; any other alone.

    c = x [A_q; A_k; A_v]^T              one narrow product for all
    y_i = x W_i^T + bias_i + s_i c_i B_i^T    the adapter's share is added into the base's product
    backward keeps x and c;  dx = sum_i dy_i W_i + (s_i dy_i B_i)_i [A_q; A_k; A_v], added up in place

peft keeps a copy of x in the adapter's type for each layer, and a second product as wide as the output. Weights are
frozen: they get no gradient and are kept as they lie in memory; 4-bit ones are unpacked again in the backward pass.

`attach` puts a forward of its own on each of peft's layers. Module tree, names and state_dict stay as they are, and
whatever is not plain LoRA (another adapter, merged or switched off, dropout, DoRA, ...) goes to peft's own forward.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

# An autograd function must inherit from torch's; this hot module is imported when adapters are attached.
import torch  # noqa: TID253
from torch.autograd.function import once_differentiable  # noqa: TID253

from finetune.method import FEW_TOKENS

log = logging.getLogger(__name__)

SHARED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names of the children of one module that read the same input."""


class _Together(torch.autograd.Function):
    """The outputs of `layers`, each with its one active adapter. Products run in `low` (autocast) or in x's type."""

    @staticmethod
    def forward(ctx: Any, x: Any, low: Any, layers: Any, *adapters: Any) -> Any:
        count = len(layers)
        inner = x if low is None else x.to(low)
        narrow = inner @ _stacked(adapters[:count], inner.dtype).t()
        outputs = []
        for layer, b, part in zip(layers, adapters[count:], _parts(narrow, adapters[:count]), strict=True):
            output = layer.base_layer(inner)
            _flat(output).addmm_(_flat(part), b.to(inner.dtype).t(), alpha=_scale(layer))
            outputs.append(output)
        weights = [layer.base_layer.weight for layer in layers]
        ctx.save_for_backward(inner, narrow, *adapters, *weights)
        ctx.states = [getattr(weight, "quant_state", None) for weight in weights]
        ctx.scales = [_scale(layer) for layer in layers]
        ctx.dtype = x.dtype
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        inner, narrow, *rest = ctx.saved_tensors
        count, dtype = len(grads), inner.dtype
        a, b, weights = rest[:count], rest[count : 2 * count], rest[2 * count :]
        back: list[Any] = [None if grad is None else _flat(grad) for grad in grads]  # None: nobody used that output
        narrow_back = torch.zeros_like(_flat(narrow))
        b_grads: list[Any] = [None] * count
        for n, (c, c_back) in enumerate(zip(_parts(_flat(narrow), a), _parts(narrow_back, a), strict=True)):
            if back[n] is not None:
                c_back.addmm_(back[n], b[n].to(dtype), alpha=ctx.scales[n])
                b_grads[n] = (back[n].t() @ c).to(b[n].dtype).mul_(ctx.scales[n])
        all_a = (narrow_back.t() @ _flat(inner)).to(a[0].dtype).split([len(part) for part in a])
        a_grads = [part if grad is not None else None for part, grad in zip(all_a, back, strict=True)]
        x_grad = None
        if ctx.needs_input_grad[0]:
            for grad, weight, state in zip(back, weights, ctx.states, strict=True):
                if grad is not None:
                    dense = _dense(weight, state, dtype)
                    x_grad = grad @ dense if x_grad is None else x_grad.addmm_(grad, dense)
                    del dense
            if x_grad is not None:
                x_grad = x_grad.addmm_(narrow_back, _stacked(a, dtype)).view(inner.shape).to(ctx.dtype)
        return x_grad, None, None, *a_grads, *b_grads


def _flat(x: Any) -> Any:
    """[..., width] -> [rows, width]."""
    return x.reshape(-1, x.shape[-1])


def _stacked(a: Any, dtype: Any) -> Any:
    """All A as one [sum of ranks, in] matrix."""
    return a[0].to(dtype) if len(a) == 1 else torch.cat([part.to(dtype) for part in a])


def _parts(x: Any, a: Any) -> Any:
    """The columns of each adapter."""
    return x.split([len(part) for part in a], dim=-1)


def _dense(weight: Any, state: Any, dtype: Any) -> Any:
    """The frozen weight [out, in] in the type of the products."""
    if state is None:
        return weight.to(dtype)
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(weight.view(-1, 1), state).to(dtype)


# -------------------------------------------------------------------------------------------------------- peft's side


def _scale(layer: Any) -> float:
    return float(layer.scaling[layer.active_adapters[0]])


def _adapter(layer: Any) -> tuple[Any, Any]:
    name = layer.active_adapters[0]
    return layer.lora_A[name].weight, layer.lora_B[name].weight


def why_not(layer: Any) -> str | None:
    """Why peft's own forward must serve a layer of peft's, or None when it is plain LoRA on a frozen Linear."""
    from peft.tuners.lora import Linear, LoraLayer

    if not isinstance(layer, LoraLayer):
        return "it is no LoRA layer"
    base: Any = layer.base_layer
    packed = type(base).__name__ == "Linear4bit"
    if not (packed or (type(layer) is Linear and type(base) is torch.nn.Linear)):
        return f"LoRA on {type(base).__name__}"
    if layer.disable_adapters or layer.merged_adapters:
        return "adapters are merged or switched off"
    names = layer.active_adapters
    if len(names) != 1 or names[0] not in layer.lora_A:
        return "another number of adapters than one"
    name = names[0]
    if type(layer.lora_dropout[name]) is not torch.nn.Identity:
        return "dropout"
    if name in layer.lora_variant:
        return f"the variant {type(layer.lora_variant[name]).__name__.removesuffix('LinearVariant')}"
    a, b = layer.lora_A[name], layer.lora_B[name]
    if a.bias is not None or b.bias is not None or layer.fan_in_fan_out:
        return "adapters with a bias or a turned weight"
    if type(a) is not torch.nn.Linear or type(b) is not torch.nn.Linear:
        return "adapters wrapped by another library"
    if base.weight.requires_grad or (base.bias is not None and base.bias.requires_grad):
        return "weights that are trained beside their adapter"
    if base.weight.device != a.weight.device:
        return "weights on another device than their adapter"
    if packed and getattr(base.weight, "quant_state", None) is None:
        return "weights that are not quantised yet"
    return None


class _Group:
    """Layers that read one input. The first one called with a tensor computes all, the others take theirs."""

    def __init__(self, layers: list[Any]) -> None:
        self.layers = layers
        self.alone: set[int] = set()
        self.waiting: dict[int, tuple[Any, Any]] = {}  # place of a layer -> its output, and what that hangs on
        self.input: Any = None
        for place, layer in enumerate(layers):
            layer.forward = _Forward(self, place)

    def run(self, place: int, x: Any, low: Any) -> Any:
        """The output of one layer."""
        if self.input is x:
            output, state = self.waiting.pop(place, (None, None))
            if not self.waiting:
                self.input = None
            if output is not None and state == self._state(place, x, low):
                return output
        places = [other for other in range(len(self.layers)) if other == place or self._fits(other, place)]
        layers = [self.layers[other] for other in places]
        a, b = zip(*map(_adapter, layers), strict=True)
        outputs: Any = _Together.apply(x, low, layers, *a, *b)  # type: ignore[no-untyped-call]
        made = {other: (y, self._state(other, x, low)) for other, y in zip(places, outputs, strict=True)}
        output, _ = made.pop(place)
        self.waiting, self.input = made, x if made else None
        return output

    def _fits(self, other: int, place: int) -> bool:
        if other in self.alone or place in self.alone or why_not(self.layers[other]) is not None:
            return False
        return bool(_adapter(self.layers[other])[0].dtype == _adapter(self.layers[place])[0].dtype)

    def _state(self, place: int, x: Any, low: Any) -> tuple[Any, ...]:
        """A change of this between computing and taking makes an output stale."""
        layer = self.layers[place]
        tensors = (x, *_adapter(layer), layer.base_layer.weight)
        return (low, torch.is_grad_enabled(), _scale(layer), *((id(t), t._version) for t in tensors))

    def done(self, parent: Any, inputs: Any, output: Any) -> None:
        """The module around has run, or broken off (then there is no output). A layer it did not call runs alone."""
        if output is not None:
            self.alone.update(self.waiting)
        self.waiting, self.input = {}, None


class _Forward:
    """The forward of one of peft's layers."""

    def __init__(self, group: _Group, place: int) -> None:
        self.group, self.place = group, place

    def __call__(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        layer = self.group.layers[self.place]
        enough = x.numel() >= FEW_TOKENS * x.shape[-1] and not (args or kwargs or x.is_inference())
        if enough and why_not(layer) is None:
            kind = x.device.type
            low = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
            if _same_types(layer, x, low):
                return self.group.run(self.place, x, low)
        return type(layer).forward(layer, x, *args, **kwargs)


def _same_types(layer: Any, x: Any, low: Any) -> bool:
    """Whether results have the types of peft's. Beside a 16-bit base without autocast it computes adapters in fp32;
    a 4-bit layer gives its output the type of its input."""
    if low is None:
        return bool(x.dtype == _adapter(layer)[0].dtype)
    return x.dtype == low or type(layer.base_layer) is torch.nn.Linear


def attach(model: Any) -> int:
    """Give every LoRA layer of a peft model its forward; returns for how many, and logs what stays peft's."""
    from peft.tuners.lora import LoraLayer

    layers: list[Any] = []
    for parent in list(model.modules()):
        found = {name: child for name, child in parent.named_children() if isinstance(child, LoraLayer)}
        layers += found.values()
        for names in SHARED:
            together = [found.pop(name) for name in names if name in found]
            if len(together) > 1:
                parent.register_forward_hook(_Group(together).done, always_call=True)
            elif together:
                _Group(together)
        for child in found.values():
            _Group([child])
    reasons = Counter(filter(None, map(why_not, layers)))
    if reasons:
        said = ", ".join(f"{why} ({count} layers)" for why, count in reasons.items())
        log.info("peft's own code runs adapters: %s.", said)
    return len(layers) - sum(reasons.values())
