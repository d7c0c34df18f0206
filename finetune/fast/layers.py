"""RMS norms and gated MLPs that keep little: what they take in, and nothing that can be made from it.

    norm    y = w x r,  r = 1 / sqrt(mean(x^2) + eps)      kept: x and r           transformers: x, x r and y
            dx = r g - x r^3 mean(g x),  g = w dy
    MLP     down(h),  h = act(gate(x)) up(x)               kept: gate and up       transformers: act(gate) and h too

y carries a note how it is made again (`again`), so the adapters behind it keep nothing new. `attach` puts a forward
on each module that does exactly this, which is tried on a few numbers; other modules keep theirs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

# An autograd function must inherit from torch's; this hot module is imported when a model is made ready to train.
import torch  # noqa: TID253
from torch.autograd.function import once_differentiable  # noqa: TID253

from finetune.fast.adapter import Linears, adapters_of, enough, products_type, same_types, why_not
from finetune.fast.again import made_from, what_to_keep

_CLOSE = 1e-5


# --------------------------------------------------------------------------------------------------------------- norm


class _Norm(torch.autograd.Function):
    """x [..., width] over the root of its mean square, times a frozen weight [width]; returns r too."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, eps: float, one_plus: bool) -> Any:
        root = _wide(x).pow(2).mean(-1, keepdim=True).add_(eps).rsqrt_()
        ctx.save_for_backward(x, root, weight)
        ctx.one_plus = one_plus
        ctx.mark_non_differentiable(root)
        return _normed(x, root, weight, one_plus), root

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Any, _: Any) -> Any:
        x, root, weight = ctx.saved_tensors
        wide = _wide(x)
        grad = _wide(grad) * _factor(weight, wide.dtype, ctx.one_plus)
        share = (grad * wide).mean(-1, keepdim=True).mul_(root.pow(3))
        return grad.mul_(root).addcmul_(wide, share, value=-1).to(x.dtype), None, None, None


def _wide(x: Any) -> Any:
    """Norms are taken in fp32, or in fp64 for a check of gradients."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _factor(weight: Any, dtype: Any, one_plus: bool) -> Any:
    return weight.to(dtype).add(1) if one_plus else weight.to(dtype)


def _normed(x: Any, root: Any, weight: Any, one_plus: bool) -> Any:
    """In Llama's order of casts, or in Gemma's, whose weight stands for 1 + weight."""
    scaled = _wide(x) * root
    if one_plus:
        return scaled.mul_(_factor(weight, scaled.dtype, one_plus)).to(x.dtype)
    scaled = scaled.to(x.dtype)
    return scaled.mul_(weight) if weight.dtype == scaled.dtype else scaled * weight


class _NormForward:
    """The forward of one norm module."""

    def __init__(self, module: Any, eps: float, one_plus: bool) -> None:
        self.module, self.eps, self.one_plus = module, eps, one_plus

    def __call__(self, x: Any) -> Any:
        weight = self.module.weight
        if weight.requires_grad or not torch.is_grad_enabled():
            return type(self.module).forward(self.module, x)
        y, root = _Norm.apply(x, weight, self.eps, self.one_plus)  # type: ignore[no-untyped-call]
        one_plus = self.one_plus
        return made_from(y, lambda x, root, weight: _normed(x, root, weight, one_plus), x, root, weight)


# ---------------------------------------------------------------------------------------------------------------- MLP


class _MLP(torch.autograd.Function):
    """down(act(gate(x)) * up(x)), act SiLU or the tanh form of GELU; adapters of `pair`, then of `last`."""

    @staticmethod
    def forward(ctx: Any, x: Any, low: Any, gelu: bool, pair: Linears, last: Linears, *adapters: Any) -> Any:
        inner = x if low is None else x.to(low)
        ctx.places = places = _places(pair, last)
        a1, b1, a2, b2 = (adapters[place] for place in places)
        (gate, up), narrow = pair.forward(inner, a1, b1)
        (y,), narrow_last = last.forward(_gated(gate, up, gelu), a2, b2)
        ctx.make, sources = what_to_keep(x, inner) if a1 else (None, ())
        ctx.save_for_backward(gate, up, narrow, narrow_last, *adapters, *pair.weights, *last.weights, *sources)
        ctx.pair, ctx.last, ctx.gelu = pair, last, gelu
        ctx.shape, ctx.given, ctx.dtype = x.shape, x.dtype, inner.dtype
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Any) -> Any:
        gate, up, narrow, narrow_last, *rest = ctx.saved_tensors
        pair, last, dtype = ctx.pair, ctx.last, ctx.dtype
        count = ctx.places[-1].stop
        adapters, weights, sources = rest[:count], rest[count : count + 3], rest[count + 3 :]
        a1, b1, a2, b2 = (adapters[place] for place in ctx.places)
        act = _activated(gate, ctx.gelu)
        inner, a2_grads, b2_grads = last.backward(
            (grad,), lambda: act * up, narrow_last, a2, b2, weights[2:], dtype, needs_x=True
        )
        inner = inner.view(gate.shape)
        up_grad = act.mul_(inner)
        inner.mul_(up)
        if ctx.gelu:
            gate_grad = torch.ops.aten.gelu_backward(inner, gate, approximate="tanh")
        else:
            gate_grad = torch.ops.aten.silu_backward(inner, gate)
        del inner
        x_grad, a1_grads, b1_grads = pair.backward(
            (gate_grad, up_grad), lambda: ctx.make(*sources), narrow, a1, b1, weights[:2], dtype,
            needs_x=ctx.needs_input_grad[0],
        )  # fmt: skip
        if x_grad is not None:
            x_grad = x_grad.view(ctx.shape).to(ctx.given)
        return x_grad, None, None, None, None, *a1_grads, *b1_grads, *a2_grads, *b2_grads


def _places(pair: Linears, last: Linears) -> tuple[slice, ...]:
    """Where A and B of gate and up, and of down, stand among all adapters."""
    first, second = len(pair.adapted), len(last.adapted)
    ends = [0, first, 2 * first, 2 * first + second, 2 * first + 2 * second]
    return tuple(slice(start, end) for start, end in zip(ends, ends[1:], strict=False))


def _activated(gate: Any, gelu: bool) -> Any:
    f = torch.nn.functional
    return f.gelu(gate, approximate="tanh") if gelu else f.silu(gate)


def _gated(gate: Any, up: Any, gelu: bool) -> Any:
    return _activated(gate, gelu).mul_(up)


class _MLPForward:
    """The forward of one gated MLP."""

    def __init__(self, module: Any, gelu: bool) -> None:
        self.module, self.gelu = module, gelu

    def __call__(self, x: Any) -> Any:
        module = self.module
        layers = module.gate_proj, module.up_proj, module.down_proj
        low = products_type(x)
        if (
            torch.is_grad_enabled()
            and enough(x, layers[0])
            and not any(why_not(each) or not same_types(each, x, low) or _hooked(each) for each in layers)
        ):
            pair, last = layers[:2], layers[2:]
            adapters = *adapters_of(pair), *adapters_of(last)
            return _MLP.apply(x, low, self.gelu, Linears.of(pair), Linears.of(last), *adapters)  # type: ignore[no-untyped-call]
        return type(module).forward(module, x)


def _hooked(layer: Any) -> bool:
    """Whether somebody waits for this layer to be called; peft does, for rows that take several adapters."""
    return bool(
        layer._forward_pre_hooks or layer._forward_hooks or layer._backward_hooks or layer._backward_pre_hooks
    )


# ------------------------------------------------------------------------------------------------------------- attach


def attach(model: Any) -> tuple[int, int]:
    """Give the norms and gated MLPs of a model their forward; returns how many norms and how many MLPs.

    A kind of module is tried once, on a few numbers: one that computes something else keeps its own forward.
    """
    known: dict[tuple[Any, ...], Callable[[Any], Any] | None] = {}
    kind: tuple[Any, ...]
    norms = gated = 0
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm") and getattr(module, "weight", None) is not None:
            kind, find = (type(module), module.weight.shape, _eps(module)), _norm_of
        elif all(hasattr(module, name) for name in ("gate_proj", "up_proj", "down_proj", "act_fn")):
            kind, find = (type(module), type(module.act_fn)), _mlp_of
        else:
            continue
        if kind not in known:
            known[kind] = find(module)
        if (made := known[kind]) is not None:
            module.forward = made(module)
            norms, gated = norms + (find is _norm_of), gated + (find is _mlp_of)
    return norms, gated


def _eps(module: Any) -> float | None:
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    return float(eps) if isinstance(eps, (int, float)) else None


def _norm_of(module: Any) -> Callable[[Any], Any] | None:
    """What makes the forward of this kind of norm: Llama's or Gemma's, whichever gives the module's own numbers."""
    eps, width = _eps(module), module.weight.shape[-1]
    if eps is None or module.weight.dim() != 1:
        return None
    copy = _small_copy(module)
    x = torch.linspace(-2, 3, 3 * width).reshape(3, width).sin()
    try:
        right = type(module).forward(copy, x)
    except Exception:  # a norm that wants more than one argument: whatever it raises, it stays as it is
        return None
    for one_plus in (False, True):
        made = _Norm.apply(x, copy.weight.detach(), eps, one_plus)[0]  # type: ignore[no-untyped-call]
        if torch.allclose(made, right, rtol=_CLOSE, atol=_CLOSE):
            return lambda module: _NormForward(module, eps, one_plus)
    return None


def _small_copy(module: Any) -> Any:
    """A norm like this one on the CPU, in fp32, with numbers for a weight."""
    import copy

    other = copy.copy(module)
    other._parameters = {
        "weight": torch.nn.Parameter(torch.linspace(0.5, 1.5, module.weight.shape[-1]), requires_grad=False)
    }
    return other


def _mlp_of(module: Any) -> Callable[[Any], Any] | None:
    """What makes the forward of this kind of MLP: with SiLU or GELU, whichever gives the module's own numbers."""
    import copy

    other = copy.copy(module)
    parts: dict[str, Any] = {}
    for number, name in enumerate(("gate_proj", "up_proj", "down_proj")):
        parts[name] = torch.nn.utils.skip_init(  # type: ignore[no-untyped-call]  # draws no random numbers
            torch.nn.Linear, 4, 4, bias=False
        )
        parts[name].weight.data = torch.linspace(-1, 1 + number, 16).sin().reshape(4, 4)
    other._modules = {**module._modules, **parts}
    x = torch.linspace(-4, 4, 32).reshape(8, 4)
    with torch.no_grad():
        try:
            right = type(module).forward(other, x)
        except Exception:  # an MLP that reads more of itself than these parts: it stays as it is
            return None
        for gelu in (False, True):
            made = parts["down_proj"](_gated(parts["gate_proj"](x), parts["up_proj"](x), gelu))
            if torch.allclose(made, right, rtol=_CLOSE, atol=_CLOSE):
                return lambda module: _MLPForward(module, gelu)
    return None
