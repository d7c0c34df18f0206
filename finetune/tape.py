"""Autograd with sizes instead of numbers: which tensors a step allocates, keeps for the backward pass, and lets go.

    x ──> linear ──> y          y is new; x is kept if the weight is trained, the weight is there anyway
    grad of x <── linear <── grad of y        the gradients are new; what was kept is let go when the node is done

A `Tensor` here has a shape and a width in bytes and nothing else. Its storage leaves the ledger when Python lets go
of the last tensor that uses it, so code that follows a model's forward line by line has torch's lifetimes too.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from finetune.ledger import Block, Ledger

Shape = tuple[int, ...]
Rule = Callable[["Tensor"], "Sequence[Tensor | None]"]


class Storage:
    """Bytes in the ledger for as long as somebody refers to them."""

    __slots__ = ("block", "ledger", "users")

    def __init__(self, ledger: Ledger, block: Block) -> None:
        self.ledger, self.block, self.users = ledger, ledger.take(block), 0

    def __del__(self) -> None:
        self.ledger.give(self.block)


class Tensor:
    """A shape, the bytes of one value, and where its gradient goes: a `Node`, a `Parameter`, or nowhere.

    `again`: the tensors it can be made from in the backward pass, for those who would keep it (`fast.again`).
    """

    __slots__ = ("again", "shape", "source", "storage", "width")

    def __init__(self, storage: Storage, shape: Shape, width: int, source: Node | Parameter | None = None) -> None:
        self.storage, self.shape, self.width, self.source = storage, shape, width, source
        self.again: tuple[Tensor, ...] | None = None
        storage.users += 1

    def __del__(self) -> None:
        self.storage.users -= 1

    @property
    def size(self) -> int:
        """Number of values."""
        return math.prod(self.shape)


class Parameter:
    """A weight. `trained` ones collect a gradient, `shared` ones from two places; `width` is of a stored value."""

    __slots__ = ("first", "first_is_view", "grad", "name", "shape", "shared", "trained", "value", "width")

    def __init__(self, name: str, shape: Shape, width: int, *, trained: bool) -> None:
        self.name, self.shape, self.width, self.trained = name, shape, width, trained
        self.grad: Tensor | None = None
        self.value: Tensor | None = None
        self.shared = self.first_is_view = False
        self.first: Tensor | None = None


class Node:
    """One operation of the graph: `rule` turns the gradient of its output into those of its inputs."""

    __slots__ = ("grad", "inputs", "order", "rule")

    def __init__(self, order: int, inputs: Sequence[Node | Parameter | None], rule: Rule) -> None:
        self.order, self.inputs, self.rule = order, inputs, rule
        self.grad: Tensor | None = None


class Tape:
    """Makes tensors, records what needs a gradient, and runs the backward pass in torch's order."""

    def __init__(self, ledger: Ledger, *, accumulates: bool = False) -> None:
        self.ledger, self.accumulates = ledger, accumulates
        self.bucket, self.where = "activations", ""
        self.recording = True
        self._order = 0

    # ------------------------------------------------------------------------------------------------------ making

    def new(self, what: str, shape: Shape, width: int) -> Tensor:
        """A fresh tensor. In the backward pass it counts as temporary, unless checkpointing makes it again."""
        block = Block(self.bucket, what, math.prod(shape) * width, shape, width)
        return Tensor(Storage(self.ledger, block), shape, width)

    def passing(self, what: str, *sizes: int) -> None:
        """Bytes that live together inside one kernel."""
        self.ledger.passing(list(sizes), f"{what}, {self.where}")

    def view(self, x: Tensor, shape: Shape) -> Tensor:
        """The same storage under another shape."""
        return Tensor(x.storage, shape, x.width, x.source)

    def record(self, out: Tensor, inputs: Sequence[Node | Parameter | None], rule: Rule) -> Tensor:
        """Make `out` the result of an operation on `inputs`, if any of them needs a gradient."""
        if self.recording and any(source is not None for source in inputs):
            self._order += 1
            out.source = Node(self._order, inputs, rule)
        return out

    # ------------------------------------------------------------------------------------------------- element-wise

    def add(self, a: Tensor, b: Tensor, what: str = "sum") -> Tensor:
        """a + b of equal shape; the gradient is handed to both as it is."""
        out = self.new(what, a.shape, max(a.width, b.width))
        narrow_a, narrow_b = a.width < out.width, b.width < out.width
        a_width, b_width = a.width, b.width
        needs = a.source is not None, b.source is not None

        def rule(grad: Tensor) -> list[Tensor | None]:
            return [
                (self._cast(grad, a_width) if narrow_a else self.view(grad, grad.shape)) if needs[0] else None,
                (self._cast(grad, b_width) if narrow_b else self.view(grad, grad.shape)) if needs[1] else None,
            ]

        return self.record(out, [a.source, b.source], rule)

    def mul(self, a: Tensor, b: Tensor, what: str = "product") -> Tensor:
        """a * b; `b` may be smaller (broadcast). Each factor is kept if the other needs a gradient."""
        out = self.new(what, a.shape, max(a.width, b.width))
        keep_a, keep_b = (a if b.source is not None else None), (b if a.source is not None else None)
        needs = a.source is not None, b.source is not None
        b_shape = b.shape

        def rule(grad: Tensor) -> list[Tensor | None]:
            nonlocal keep_a, keep_b
            left = self.new("gradient", grad.shape, grad.width) if needs[0] else None
            right = self.new("gradient", grad.shape, grad.width) if needs[1] else None
            if right is not None and b_shape != grad.shape:
                right = self.new("gradient", b_shape, grad.width)
            return [left, right]

        return self.record(out, [a.source, b.source], rule)

    def scaled(self, x: Tensor, what: str = "scaled") -> Tensor:
        """x times a constant."""
        return self._unary(x, what, keep=False)

    def unary(self, x: Tensor, what: str) -> Tensor:
        """A function whose derivative needs its input: silu, gelu, and the like."""
        return self._unary(x, what, keep=True)

    def tanh(self, x: Tensor, what: str = "tanh") -> Tensor:
        """A function whose derivative needs its output."""
        return self._unary(x, what, keep=False, keep_out=True)

    def _unary(self, x: Tensor, what: str, *, keep: bool, keep_out: bool = False) -> Tensor:
        out = self.new(what, x.shape, x.width)
        kept = Tensor(x.storage, x.shape, x.width) if keep else None
        if keep_out:
            kept = Tensor(out.storage, out.shape, out.width)

        def rule(grad: Tensor) -> list[Tensor | None]:
            _ = kept
            return [self.new("gradient", grad.shape, grad.width)]

        return self.record(out, [x.source], rule)

    def dropout(self, x: Tensor, mask_width: int) -> Tensor:
        """Some of x set to zero. The mask is kept if x needs a gradient: of x's type on a CPU, of bytes on a GPU."""
        mask = self.new("dropout mask", x.shape, mask_width)
        out = self.new("adapter input after dropout", x.shape, x.width)

        def rule(grad: Tensor) -> list[Tensor | None]:
            _ = mask
            return [self.new("gradient", grad.shape, grad.width)]

        return self.record(out, [x.source], rule)

    def cast(self, x: Tensor, width: int, what: str = "cast") -> Tensor:
        """x in another type; the same tensor when it has that type already."""
        if x.width == width:
            return x
        out = self._cast(x, width, what)
        back = x.width

        def rule(grad: Tensor) -> list[Tensor | None]:
            return [self._cast(grad, back)]

        return self.record(out, [x.source], rule)

    def _cast(self, x: Tensor, width: int, what: str = "cast") -> Tensor:
        return self.new(what, x.shape, width)

    def copy(self, x: Tensor, what: str, shape: Shape | None = None) -> Tensor:
        """A copy in another layout; the gradient goes back as it is."""
        out = self.new(what, shape or x.shape, x.width)

        def rule(grad: Tensor) -> list[Tensor | None]:
            return [grad]

        return self.record(out, [x.source], rule)

    # ---------------------------------------------------------------------------------------------------- backward

    def backward(self, loss: Tensor) -> None:
        """Run the graph below `loss` in reverse; the gradients of trained parameters stay on them."""
        if not isinstance(loss.source, Node):
            return
        self.bucket = "temporary"
        loss.source.grad = self.new("gradient", loss.shape, loss.width)
        heap = [(-loss.source.order, loss.source)]
        self._run(heap)

    def _run(self, heap: list[tuple[int, Node]]) -> None:
        while heap:
            _, node = heapq.heappop(heap)
            grad, node.grad = node.grad, None
            assert grad is not None
            grads = list(node.rule(grad))
            del grad
            node.rule = _spent
            for number, source in enumerate(node.inputs):
                given, grads[number] = grads[number], None
                if source is None or given is None:
                    continue
                if isinstance(source, Node) and source.grad is None:
                    source.grad = given
                    if source.order > 0:
                        heapq.heappush(heap, (-source.order, source))
                else:
                    self._accumulate(source, given)
                del given

    def _accumulate(self, source: Node | Parameter, given: Tensor) -> None:
        """Add a gradient to what is there: in place when nobody else holds that (torch's input_buffer.cpp)."""
        if isinstance(source, Parameter):
            if not source.trained:
                return
            if source.shared:  # autograd waits for both and adds the second to the first, unless that is a view
                if source.first is None:
                    source.first = given
                    return
                given = self.new("gradient", given.shape, given.width) if source.first_is_view else source.first
                source.first = None
            if source.grad is None and not (self.accumulates and source.value is None):
                block = given.storage.block
                if source.value is None:
                    block.bucket, block.what = "gradients", source.name
                else:
                    block.bucket, block.what = "temporary", f"gradient of the {source.name}"
                source.grad = given
            return
        assert source.grad is not None
        if source.grad.storage.users == 1:
            return
        source.grad = self.new("gradient", given.shape, given.width)

    @contextmanager
    def silent(self) -> Iterator[None]:
        """Nothing is recorded inside."""
        before, self.recording = self.recording, False
        try:
            yield
        finally:
            self.recording = before

    def checkpoint(self, run: Callable[[Tensor], Tensor], x: Tensor, trains: bool) -> Tensor:
        """`run(x)` of which only the input is kept; the backward pass runs it again first (Chen et al. 2016)."""
        with self.silent():
            out = run(x)
        kept = Tensor(x.storage, x.shape, x.width)
        if not (self.recording and (trains or x.source is not None)):
            return out
        self._order += 1
        origin = x.source
        node = Node(self._order, [origin], _spent)

        def hand_on(grad: Tensor) -> list[Tensor | None]:
            _ = kept  # until the layer's first operation has run backward
            return [grad]

        def rule(grad: Tensor) -> list[Tensor | None]:
            """Runs the layer again and lets the pass go on in what that recorded, down to the input's own node."""
            before, self.bucket = self.bucket, "activations"
            again = run(self.record(kept, [origin], hand_on))
            node.inputs = [again.source]
            del again  # torch stops before it computes the layer's output again
            self.bucket = before
            return [grad]

        node.rule = rule
        out.source = node
        return out


def _spent(grad: Tensor) -> Sequence[Tensor | None]:
    """What a node that has run keeps: nothing."""
    return ()
