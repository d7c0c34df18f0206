"""Linear layers of a training step in sizes, as peft, bitsandbytes and autocast run them.

x ─┬─> [autocast's copy] ─> W x ───────────────┬─> + ─> y        a frozen W keeps nothing of x
   └─> [peft's fp32 copy] ─> A x ─> B A x ─> s ┘                 A keeps its input, B keeps A x

x ─┬─> W x ──┬─> y       the same as `fast.adapter` runs it (`Path.grouped`): layers that read one x keep it once,
   └─> A x ─>┘           and nothing else but A x; B A x is added into y
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from finetune.ledger import Block
from finetune.method import BLOCK
from finetune.norms import Norms
from finetune.tape import Parameter, Shape, Tensor


class Weight(NamedTuple):
    """A Linear layer as it lies in memory, with its adapter."""

    weight: Parameter
    packed: bool
    a: Parameter | None
    b: Parameter | None
    magnitude: Parameter | None


class Linears(Norms):
    """The products with weights."""

    def _lowered(self, x: Tensor) -> Tensor:
        """What autocast does to the input of a product."""
        return self.tape.cast(x, self.low, "low copy") if self.low and x.width > self.low else x

    def _low_weight(self, weight: Parameter) -> Tensor | None:
        """Autocast's copy of an fp32 weight, kept until the forward pass is over if the weight is trained.

        Its gradient is cast back when the product has let go of what it kept.
        """
        if not self.low or weight.width <= self.low:
            return None
        known = self.low_copies.get(id(weight))
        if known is None:
            tape, shape, width = self.tape, weight.shape, weight.width
            known = tape.new("low copies of trained weights", shape, self.low)
            known.storage.block.bucket = "copies"

            def rule(grad: Tensor) -> list[Tensor | None]:
                return [tape.new("gradient", shape, width)]

            tape.record(known, [weight if weight.trained else None], rule)
            if weight.trained and self.casting:
                self.low_copies[id(weight)] = known
        return known

    def _leave_autocast(self) -> None:
        """The model's forward is over, and with it autocast's cache of low copies."""
        self.low_copies.clear()
        self.casting = False

    def _linears(self, x: Tensor, layers: Sequence[tuple[Weight, str]]) -> list[Tensor]:
        """The outputs of layers that read one input. The first of a group computes the others' too."""
        together = [number for number, (layer, _) in enumerate(layers) if self._joins(layer)]
        made: dict[int, Tensor] = {}
        for number, (layer, name) in enumerate(layers):
            if number not in made:
                if number in together:
                    outputs = self._together(x, [layers[other] for other in together])
                    made.update(zip(together, outputs, strict=True))
                else:
                    made[number] = self._linear(x, layer, name)
        return [made[number] for number in range(len(layers))]

    def _joins(self, layer: Weight) -> bool:
        """Whether `fast.adapter` runs a layer: one with an adapter, or a frozen one that is not packed."""
        return self.grouped and (layer.a is not None or not (layer.packed or layer.weight.trained))

    def _linear(self, x: Tensor, layer: Weight, what: str) -> Tensor:
        tape = self.tape
        if self._joins(layer):
            return self._together(x, [(layer, what)])[0]
        result = self._packed_product(x, layer, what) if layer.packed else self._plain(x, layer, what)
        if layer.a is None or layer.b is None:
            return result
        width = result.width
        if layer.packed:
            result = tape.copy(result, what)  # peft clones a 4-bit layer's output
        converts = not (layer.packed and self.peft_sees_autocast)
        casts = self.path.adapter_casts and converts
        inner = tape.cast(x, 4, "adapter input") if casts else x
        if layer.magnitude is not None:
            change = self._dora(result, inner, layer)
        else:
            change = tape.scaled(self._change(inner, layer), "adapter output")
        del inner
        if layer.packed and converts:
            change = tape.cast(change, width)
        result = tape.add(result, change, what)
        del change
        return tape.cast(result, width, what)

    def _together(self, x: Tensor, layers: Sequence[tuple[Weight, str]]) -> list[Tensor]:
        """`fast.adapter`'s function: one node that waits for the gradients of all its outputs."""
        tape = self.tape
        a, b = _adapters(layers)
        with tape.silent():
            inner = self._lowered(Tensor(x.storage, x.shape, x.width))
            outputs, narrow = self._forward_of(inner, layers)
        kept = (x.again or (inner,)) if a else ()
        grads: list[Tensor | None] = [None] * len(layers)
        needs_x, x_width, shape, low, again = x.source is not None, x.width, inner.shape, inner.width, bool(x.again)
        del inner

        def rule(all_there: Tensor) -> list[Tensor | None]:
            back, downs, ups = self._backward_of(
                layers, narrow, shape, low, needs_x=needs_x, made=lambda: self._again(kept, low) if again else None
            )
            grads.clear()
            return [None if back is None else tape.cast(back, x_width), *downs, *ups]

        together = tape.record(tape.new("all outputs", (0,), 1), [x.source, *a, *b], rule)
        for number, output in enumerate(outputs):

            def arrived(grad: Tensor, number: int = number) -> list[Tensor | None]:
                grads[number] = grad  # alive until the node has run
                return [tape.new("gradient", (0,), 1)]

            tape.record(output, [together.source], arrived)
        return outputs

    def _forward_of(self, inner: Tensor, layers: Sequence[tuple[Weight, str]]) -> tuple[list[Tensor], Tensor | None]:
        """`fast.adapter.Linears.forward`: the outputs, and the narrow products with all A."""
        tape = self.tape
        a, b = _adapters(layers)
        outputs = []
        for layer, name in layers:
            outputs.append((self._packed_product if layer.packed else self._plain)(inner, layer, name))
        if not a:
            return outputs, None
        stacked = self._stacked(a, inner.width)
        narrow = tape.new("adapter, narrow", (*inner.shape[:-1], sum(part.shape[0] for part in a)), inner.width)
        del stacked
        for up in b:
            tape.passing("low copy", inner.width * math.prod(up.shape) if inner.width < up.width else 0)
        return outputs, narrow

    def _backward_of(
        self, layers: Sequence[tuple[Weight, str]], narrow: Tensor | None, shape: Shape, low: int, *,
        needs_x: bool, made: Callable[[], object],
    ) -> tuple[Tensor | None, list[Tensor | None], list[Tensor | None]]:  # fmt: skip
        """`fast.adapter.Linears.backward`: gradients of the input, of all A and of all B."""
        tape = self.tape
        a, b = _adapters(layers)
        downs: list[Tensor | None] = []
        ups: list[Tensor | None] = []
        narrow_back = None
        if narrow is not None:
            narrow_back = tape.new("gradient", narrow.shape, low)
            for up in b:
                tape.passing("low copy", low * math.prod(up.shape) if low < up.width else 0)
                ups.append(tape.cast(tape.new("gradient", up.shape, low), up.width))
            inner = made()
            all_a = tape.cast(tape.new("gradient", (narrow.shape[-1], shape[-1]), low), a[0].width)
            del inner
            downs = [tape.view(all_a, part.shape) for part in a]
        back = None
        if needs_x:
            for layer, _ in layers:
                dense = self._dense(layer, low)
                back = tape.new("gradient", shape, low)  # what was there goes when the sum is there
                del dense
            if a:
                stacked = self._stacked(a, low)
                del stacked
        del narrow_back
        return back, downs, ups

    def _again(self, kept: tuple[Tensor, ...], low: int) -> Tensor:
        """The output of a lean norm, made once more in the backward pass."""
        return self.tape.cast(self._normed(kept[0], kept[0].width), low)

    def _gated(self, x: Tensor, pair: Sequence[tuple[Weight, str]], last: tuple[Weight, str]) -> Tensor:
        """`fast.layers`' MLP: keeps gate and up; what is made of them is made again."""
        tape = self.tape
        (a1, b1), (a2, b2) = _adapters(pair), _adapters([last])
        with tape.silent():
            inner = self._lowered(Tensor(x.storage, x.shape, x.width))
            (gate, up), narrow = self._forward_of(inner, pair)
            product = tape.new("MLP product", gate.shape, gate.width)
            (out,), narrow_last = self._forward_of(product, [last])
            del product
        kept = (x.again or (inner,)) if a1 else ()
        needs_x, x_width, shape, low, again = x.source is not None, x.width, inner.shape, inner.width, bool(x.again)
        del inner

        def rule(grad: Tensor) -> list[Tensor | None]:
            act = tape.new("MLP activation", gate.shape, low)
            inner, downs2, ups2 = self._backward_of(
                [last],
                narrow_last,
                gate.shape,
                low,
                needs_x=True,
                made=lambda: tape.new("MLP product", up.shape, low),
            )
            gate_grad = tape.new("gradient", gate.shape, low)
            del inner
            back, downs, ups = self._backward_of(
                pair, narrow, shape, low, needs_x=needs_x, made=lambda: self._again(kept, low) if again else None
            )
            del act, gate_grad
            return [None if back is None else tape.cast(back, x_width), *downs, *ups, *downs2, *ups2]

        return tape.record(out, [x.source, *a1, *b1, *a2, *b2], rule)

    def _stacked(self, a: Sequence[Parameter], width: int) -> list[Tensor]:
        """All A as one matrix in the products' type; nothing new where one A has that type already."""
        parts = [self.tape.new("low copy", part.shape, width) for part in a if part.width > width]
        if len(a) > 1:
            return [self.tape.new("A of all", (sum(part.shape[0] for part in a), a[0].shape[1]), width)]
        return parts

    def _dense(self, layer: Weight, width: int) -> Tensor | None:
        """A frozen weight as the backward pass multiplies with it; None where it lies there like that."""
        tape, weight = self.tape, layer.weight
        if layer.packed:
            scales = tape.new("scales", (math.prod(weight.shape) // BLOCK,), 4) if self.double else None
            unpacked = tape.new("unpacked weight", weight.shape, self.compute)
            del scales
            return tape.cast(unpacked, width)
        return tape.new("low copy", weight.shape, width) if weight.width > width else None

    def _change(self, x: Tensor, layer: Weight) -> Tensor:
        """B A x, some of x set to zero before A."""
        assert layer.a is not None
        assert layer.b is not None
        mask_width = 1 if self.path.device == "cuda" else x.width
        dropped = self.tape.dropout(x, mask_width) if self.drops else x
        narrow = self._matmul(dropped, layer.a, "adapter, narrow")
        del dropped
        return self._matmul(narrow, layer.b, "adapter output")

    def _dora(self, base: Tensor, x: Tensor, layer: Weight) -> Tensor:
        """(m - 1) W x + m s B A x with m = magnitude / ||W + s B A||, of whose norm no gradient is taken.

        peft makes B A as a dense matrix for the norm, from an identity that it sends through the adapter.
        """
        tape, magnitude = self.tape, layer.magnitude
        assert magnitude is not None
        out, inner = layer.weight.shape
        dense = [tape.new("identity for DoRA", (inner, inner), 4), tape.new("dense B A for DoRA", (out, inner), 4)]
        unpacked = [4 * out * inner] if layer.packed or self.stored != 4 else []
        tape.passing("DoRA's norm", 4 * out * inner, 4 * out * inner, *unpacked)
        scale = tape.new("DoRA scale", (1, out), 4)

        def rule(grad: Tensor) -> list[Tensor | None]:
            return [tape.new("gradient", magnitude.shape, 4)]

        tape.record(scale, [magnitude], rule)
        change = self._change(x, layer)
        base = tape.mul(base, tape.scaled(scale), "DoRA, base")
        change = tape.scaled(tape.mul(change, scale, "DoRA, adapter"), "DoRA, adapter")
        del dense
        return tape.add(base, change, "DoRA")

    def _plain(self, x: Tensor, layer: Weight, what: str) -> Tensor:
        return self._matmul(x, layer.weight, what)

    def _matmul(self, x: Tensor, weight: Parameter, what: str) -> Tensor:
        """x @ weight^T. The input is kept if the weight is trained; the weight's low copy if the input needs it."""
        tape = self.tape
        x = self._lowered(x)
        copy = self._low_weight(weight)
        source = weight if copy is None or copy.source is None else copy.source
        out = tape.new(what, (*x.shape[:-1], weight.shape[0]), x.width)
        kept = Tensor(x.storage, x.shape, x.width) if weight.trained else None
        needs_x, shape = x.source is not None, x.shape
        kept_weight = copy if needs_x else None
        del copy

        def rule(grad: Tensor) -> list[Tensor | None]:
            _ = kept_weight
            own = tape.new("gradient", weight.shape, grad.width) if kept is not None else None
            back = tape.new("gradient", shape, grad.width) if needs_x else None
            return [own, back]

        return tape.record(out, [source if weight.trained else None, x.source], rule)

    def _packed_product(self, x: Tensor, layer: Weight, what: str) -> Tensor:
        """bitsandbytes' 4-bit product: the weight is unpacked for it, and again for the backward pass."""
        tape, weight = self.tape, layer.weight
        inner = tape.cast(x, self.compute, "compute copy")
        size = math.prod(weight.shape)
        scales = [4 * (size // BLOCK)] if self.double else []
        buffer = [*scales, size * self.compute]
        blocks = [self.ledger.take(Block("temporary", "unpacked weight", part)) for part in buffer]
        out = tape.new(what, (*x.shape[:-1], weight.shape[0]), self.compute)
        for block in blocks:
            self.ledger.give(block)
        shape = inner.shape

        def rule(grad: Tensor) -> list[Tensor | None]:
            held = [tape.new("scales", (part // 4,), 4) for part in scales]
            unpacked = tape.new("unpacked weight", weight.shape, self.compute)
            del held
            made = tape.new("gradient", shape, grad.width)
            del unpacked
            return [made]

        tape.record(out, [inner.source], rule)
        return tape.cast(out, x.width, what)


def _adapters(layers: Sequence[tuple[Weight, str]]) -> tuple[list[Parameter], list[Parameter]]:
    """All A and all B."""
    pairs = [(layer.a, layer.b) for layer, _ in layers if layer.a is not None and layer.b is not None]
    return [a for a, _ in pairs], [b for _, b in pairs]
