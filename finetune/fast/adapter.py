"""Linear layers that read one input, as one autograd function: query, key and value; gate and up; any other alone.

    c = x [A_q; A_k; A_v]^T              one narrow product for all adapters
    y_i = x W_i^T + bias_i + s_i c_i B_i^T    the adapter's share is added into the base's product
    backward keeps c and x, or what x is made from;  dx = sum_i dy_i W_i + (s_i dy_i B_i)_i [A_q; A_k; A_v]

peft keeps a copy of x in the adapter's type for each layer, and a second product as wide as the output. Weights are
frozen: they get no gradient and are kept as they lie in memory; 4-bit ones, and those that lie as in their file
(`fast.held`), are made dense again in the backward pass.

`attach` puts a forward of its own on each of peft's layers, and on frozen layers beside them. Module tree, names and
state_dict stay as they are, and whatever is not plain LoRA (another adapter, merged or switched off, dropout, DoRA,
...) goes to peft's own forward.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

# An autograd function must inherit from torch's; this hot module is imported when adapters are attached.
import torch  # noqa: TID253
from torch.autograd.function import once_differentiable  # noqa: TID253

from finetune.fast.again import what_to_keep
from finetune.fast.held import Held, held
from finetune.fast.products import LONGEST_FORWARD, back, product
from finetune.method import FEW_TOKENS

log = logging.getLogger(__name__)

SHARED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names of the children of one module that read the same input."""


class Linears(NamedTuple):
    """Layers that read one input, as the passes of an autograd function see them.

    `adapted` are the places of those with an adapter, `scales` theirs; `states` say how to read weights that are
    packed in 4 bits or held as in their file. `quick`: the forward pass may sum in an order of its own.
    """

    layers: tuple[Any, ...]
    adapted: tuple[int, ...]
    scales: tuple[float, ...]
    states: tuple[Any, ...]
    quick: bool

    @classmethod
    def of(cls, layers: Any, *, quick: bool = True) -> Linears:
        """Reads the layers as they are now."""
        adapted = tuple(n for n, layer in enumerate(layers) if base_of(layer) is not layer)
        weights = [base_of(layer).weight for layer in layers]
        states = tuple(held(weight) or getattr(weight, "quant_state", None) for weight in weights)
        return cls(tuple(layers), adapted, tuple(_scale(layers[n]) for n in adapted), states, quick)

    @property
    def weights(self) -> list[Any]:
        """The frozen weight of each layer."""
        return [base_of(layer).weight for layer in self.layers]

    def forward(self, inner: Any, a: Any, b: Any) -> tuple[list[Any], Any]:
        """The outputs for `inner` [..., in] and the narrow products with all A (None without adapters)."""
        outputs = [
            _base_output(base_of(layer), state, inner, self.quick)
            for layer, state in zip(self.layers, self.states, strict=True)
        ]
        if not self.adapted:
            return outputs, None
        narrow = inner @ _stacked(a, inner.dtype).t()
        for n, part, up, scale in zip(self.adapted, _parts(narrow, a), b, self.scales, strict=True):
            _flat(outputs[n]).addmm_(_flat(part), up.to(inner.dtype).t(), alpha=scale)
        return outputs, narrow

    def backward(
        self,
        grads: Any,
        inner: Callable[[], Any],
        narrow: Any,
        a: Any,
        b: Any,
        weights: Any,
        dtype: Any,
        *,
        needs_x: bool,
    ) -> tuple[Any, list[Any], list[Any]]:
        """Gradients of the input [rows, in] (None where not needed), of all A and of all B.

        A layer whose output nobody used has None for a gradient, and its adapter gets none. `inner` makes the input.
        """
        flat = [None if grad is None else _flat(grad) for grad in grads]
        a_grads: list[Any] = [None] * len(a)
        b_grads: list[Any] = [None] * len(b)
        narrow_back = None
        if self.adapted:
            narrow_back = torch.zeros_like(_flat(narrow))
            parts = zip(self.adapted, b, self.scales, _parts(_flat(narrow), a), _parts(narrow_back, a), strict=True)
            for n, (place, up, scale, c, c_back) in enumerate(parts):
                if (grad := flat[place]) is not None:
                    c_back.addmm_(grad, up.to(dtype), alpha=scale)
                    b_grads[n] = (grad.t() @ c).to(up.dtype).mul_(scale)
            all_a = (narrow_back.t() @ _flat(inner().to(dtype))).to(a[0].dtype).split([len(part) for part in a])
            a_grads = [part if grad is not None else None for part, grad in zip(all_a, b_grads, strict=True)]
        x_grad = None
        if needs_x:
            for grad, weight, state in zip(flat, weights, self.states, strict=True):
                if grad is not None:
                    x_grad = back(grad, _dense(weight, state, dtype), x_grad)
            if x_grad is not None and narrow_back is not None:
                x_grad.addmm_(narrow_back, _stacked(a, dtype))
        return x_grad, a_grads, b_grads


class _Together(torch.autograd.Function):
    """The outputs of `linears`. Products run in `low` or in x's type; `adapters` are all A, then all B."""

    @staticmethod
    def forward(ctx: Any, x: Any, low: Any, linears: Linears, *adapters: Any) -> Any:
        inner = x if low is None else x.to(low)
        a, b = _halves(adapters)
        outputs, narrow = linears.forward(inner, a, b)
        ctx.make, sources = what_to_keep(x, inner) if a else (None, ())
        ctx.save_for_backward(narrow, *adapters, *linears.weights, *sources)
        ctx.linears, ctx.shape, ctx.given, ctx.dtype = linears, x.shape, x.dtype, inner.dtype
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        narrow, *rest = ctx.saved_tensors
        count = 2 * len(ctx.linears.adapted)
        adapters, weights, sources = rest[:count], rest[count : count + len(grads)], rest[count + len(grads) :]
        a, b = _halves(adapters)
        x_grad, a_grads, b_grads = ctx.linears.backward(
            grads, lambda: ctx.make(*sources), narrow, a, b, weights, ctx.dtype, needs_x=ctx.needs_input_grad[0]
        )
        if x_grad is not None:
            x_grad = x_grad.view(ctx.shape).to(ctx.given)
        return x_grad, None, None, *a_grads, *b_grads


def _halves(adapters: Any) -> tuple[Any, Any]:
    """All A, all B."""
    return adapters[: len(adapters) // 2], adapters[len(adapters) // 2 :]


def adapters_of(layers: Any) -> list[Any]:
    """The A of all layers that have an adapter, then their B."""
    pairs = [pair for pair in map(_adapter, layers) if pair]
    return [half for side in zip(*pairs, strict=True) for half in side]


def _base_output(base: Any, state: Any, inner: Any, quick: bool) -> Any:
    """x W^T + bias, summed as every other trainer does unless `quick`; a 4-bit layer unpacks its own weight."""
    if not isinstance(state, Held) and (type(base) is not torch.nn.Linear or inner.dtype != base.weight.dtype):
        return base(inner)
    weight = _dense(base.weight, state, inner.dtype)
    if quick and base.bias is None and base.in_features <= LONGEST_FORWARD:
        return product(inner, weight)
    return torch.nn.functional.linear(inner, weight, base.bias)  # its own forward may be one of ours


def _flat(x: Any) -> Any:
    """[..., width] -> [rows, width]."""
    return x.reshape(-1, x.shape[-1])


def _stacked(a: Any, dtype: Any) -> Any:
    """All A as one [sum of ranks, in] matrix."""
    return a[0].to(dtype) if len(a) == 1 else torch.cat([part.to(dtype) for part in a])


def _parts(x: Any, a: Any) -> Any:
    """The columns of each adapter."""
    return x.split([len(part) for part in a], dim=-1) if a else ()


def _dense(weight: Any, state: Any, dtype: Any) -> Any:
    """The frozen weight [out, in] in the type of the products."""
    if isinstance(state, Held):
        return state.dense(weight).to(dtype)
    if state is None:
        return weight.to(dtype)
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(weight.view(-1, 1), state).to(dtype)


# -------------------------------------------------------------------------------------------------------- peft's side


def base_of(layer: Any) -> Any:
    """The layer without its adapter; itself when it has none."""
    return layer if type(layer) is torch.nn.Linear else layer.base_layer


def _scale(layer: Any) -> float:
    return float(layer.scaling[layer.active_adapters[0]])


def _adapter(layer: Any) -> tuple[Any, ...]:
    """A and B, or nothing."""
    if base_of(layer) is layer:
        return ()
    name = layer.active_adapters[0]
    return layer.lora_A[name].weight, layer.lora_B[name].weight


def why_not(layer: Any) -> str | None:
    """Why its own forward must serve a layer, or None when it is a frozen Linear, with plain LoRA or without."""
    from peft.tuners.lora import Linear, LoraLayer

    if type(layer) is torch.nn.Linear:
        trained = layer.weight.requires_grad or (layer.bias is not None and layer.bias.requires_grad)
        return "weights that are trained" if trained else None
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

    def __init__(self, layers: list[Any], *, quick: bool = True) -> None:
        self.layers, self.quick = layers, quick
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
        linears = Linears.of(layers, quick=self.quick)
        outputs: Any = _Together.apply(x, low, linears, *adapters_of(layers))  # type: ignore[no-untyped-call]
        made = {other: (y, self._state(other, x, low)) for other, y in zip(places, outputs, strict=True)}
        output, _ = made.pop(place)
        self.waiting, self.input = made, x if made else None
        return output

    def _fits(self, other: int, place: int) -> bool:
        if other in self.alone or place in self.alone or why_not(self.layers[other]) is not None:
            return False
        return len({half.dtype for n in (other, place) for half in _adapter(self.layers[n])}) < 2

    def _state(self, place: int, x: Any, low: Any) -> tuple[Any, ...]:
        """A change of this between computing and taking makes an output stale."""
        layer = self.layers[place]
        adapter = _adapter(layer)
        tensors = (x, *adapter, base_of(layer).weight)
        scale = _scale(layer) if adapter else None
        return (low, torch.is_grad_enabled(), scale, *((id(t), t._version) for t in tensors))

    def done(self, parent: Any, inputs: Any, output: Any) -> None:
        """The module around has run, or broken off (then there is no output). A layer it did not call runs alone."""
        if output is not None:
            self.alone.update(self.waiting)
        self.waiting, self.input = {}, None


class _Forward:
    """The forward of one layer."""

    def __init__(self, group: _Group, place: int) -> None:
        self.group, self.place = group, place
        layer = group.layers[place]
        self.own = layer.__dict__.get("forward")  # of a held weight

    def __call__(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        layer = self.group.layers[self.place]
        if not (args or kwargs) and enough(x, layer) and why_not(layer) is None:
            low = products_type(x)
            if same_types(layer, x, low):
                return self.group.run(self.place, x, low)
        return type(layer).forward(layer, x, *args, **kwargs) if self.own is None else self.own(x)


def enough(x: Any, layer: Any) -> bool:
    """Whether an input is worth the search for what runs together.

    With a held weight every one is that wants a gradient: autograd would keep the weight dense.
    """
    if x.is_inference():
        return False
    many = x.numel() >= FEW_TOKENS * x.shape[-1]
    return bool(many or (torch.is_grad_enabled() and held(getattr(layer, "weight", None)) is not None))


def products_type(x: Any) -> Any:
    """The type that autocast computes products in, None without autocast."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def same_types(layer: Any, x: Any, low: Any) -> bool:
    """Whether results have the types of peft's. Beside a 16-bit base without autocast it computes adapters in fp32;
    a 4-bit layer gives its output the type of its input."""
    if low is None:
        first = (*_adapter(layer), base_of(layer).weight)[0]
        return held(first) is not None or bool(x.dtype == first.dtype)
    return x.dtype == low or type(base_of(layer)) is torch.nn.Linear


def attach(model: Any) -> int:
    """Give every LoRA layer of a peft model its forward, and every frozen Linear beside one.

    Returns for how many adapters, and logs what stays peft's. The output head and what no adapter touches (a vision
    tower) stay as they are.
    """
    from peft.tuners.lora import LoraLayer

    layers: list[Any] = []
    for parent in _blocks(model):
        found = {n: c for n, c in parent.named_children() if isinstance(c, LoraLayer) or type(c) is torch.nn.Linear}
        layers += (child for child in found.values() if isinstance(child, LoraLayer))
        for names in SHARED:
            together = [found.pop(name) for name in names if name in found]
            if together:
                group = _Group(together, quick="q_proj" not in names)  # a softmax makes more of what they round
                if len(together) > 1:
                    parent.register_forward_hook(group.done, always_call=True)
        for child in found.values():
            _Group([child])
    reasons = Counter(filter(None, map(why_not, layers)))
    served = len(layers) - sum(reasons.values())
    others = [m for m in model.modules() if isinstance(m, LoraLayer) and m not in layers]
    reasons.update(why_not(other) or "outside of the layers" for other in others)
    if reasons:
        said = ", ".join(f"{why} ({count} layers)" for why, count in reasons.items())
        log.info("peft's own code runs adapters: %s.", said)
    return served


def _blocks(model: Any) -> list[Any]:
    """The modules in those decoder layers that have an adapter or a held weight; no Linear is looked into."""
    from peft.tuners.lora import LoraLayer

    def ours(module: Any) -> bool:
        return isinstance(module, LoraLayer) or held(getattr(module, "weight", None)) is not None

    def inside(module: Any) -> list[Any]:
        deeper = [c for c in module.children() if not isinstance(c, (LoraLayer, torch.nn.Linear))]
        return [module, *(found for child in deeper for found in inside(child))]

    lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
    layers = [layer for each in lists for layer in each if any(map(ours, layer.modules()))]
    return list(dict.fromkeys(module for layer in layers for module in inside(layer)))
