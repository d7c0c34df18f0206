"""Autograd in sizes against torch's own: the same small graphs, each written once and run on both.

Torch's side is its profiler's account of every allocation and release on a CPU. Sizes are counted in squares of
64 x 64 values, in fp32, and rounded to halves of them, so that scalars do not matter.
"""

from __future__ import annotations

import gc
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from finetune.ledger import Ledger
from finetune.tape import Node, Parameter, Tape, Tensor

SIDE = 64
SQUARE = 4 * SIDE * SIDE
MARK = 12_345  # bytes of an allocation that stands between forward and backward

Graph = Callable[..., Any]  # (operations, x, w, v, c) -> loss


class Seen(NamedTuple):
    """In squares: what the forward pass keeps, its peak, what the backward pass leaves, its peak."""

    kept: float
    forward: float
    left: float
    backward: float


# ---------------------------------------------------------------------------------------------------------- torch


class InTorch:
    """The operations as torch has them."""

    def leaf(self, trained: bool) -> torch.Tensor:
        return torch.ones(SIDE, SIDE, requires_grad=trained)

    def mul(self, a: Any, b: Any) -> Any:
        return a * b

    def add(self, a: Any, b: Any) -> Any:
        return a + b

    def silu(self, a: Any) -> Any:
        return torch.nn.functional.silu(a)

    def tanh(self, a: Any) -> Any:
        return torch.tanh(a)

    def scaled(self, a: Any) -> Any:
        return a * 2.0

    def copy(self, a: Any) -> Any:
        return a.clone()

    def cast(self, a: Any, width: int) -> Any:
        return a.to(torch.bfloat16 if width == 2 else torch.float32)

    def linear(self, x: Any, w: Any) -> Any:
        return torch.nn.functional.linear(x, w)

    def checkpoint(self, run: Callable[[Any], Any], x: Any) -> Any:
        return checkpoint(run, x, use_reentrant=False, preserve_rng_state=False)

    def total(self, a: Any) -> Any:
        return a.sum()


def in_torch(graph: Graph, trained: Sequence[bool]) -> Seen:
    operations = InTorch()
    leaves = [operations.leaf(each) for each in trained]
    gc.collect()
    gc.disable()  # garbage of before would be released in between
    try:
        with torch.autograd.profiler.profile(profile_memory=True, use_cpu=True) as profile:
            loss = graph(operations, *leaves)
            torch.empty(MARK, dtype=torch.uint8)
            loss.backward()
    finally:
        gc.enable()
    events = [event for event in profile.kineto_results.events() if event.name() == "[memory]"]
    sizes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    middle = sizes.index(MARK)
    before, after = sizes[:middle], sizes[middle + 2 :]
    kept = sum(before)
    return Seen(*map(squares, (kept, most(0, before), kept + sum(after), most(kept, after))))


def most(start: int, sizes: Sequence[int]) -> int:
    return max(itertools.accumulate(sizes, initial=start))


def squares(size: int) -> float:
    return size * 2 // SQUARE / 2


# ----------------------------------------------------------------------------------------------------------- sizes


class InSizes:
    """The same on a tape; a linear layer and a sum are recorded here as a model's code would do it."""

    def __init__(self, tape: Tape) -> None:
        self.tape = tape

    def leaf(self, trained: bool) -> Tensor:
        value = self.tape.new("leaf", (SIDE, SIDE), 4)
        if trained:
            value.source = Parameter("leaf", (SIDE, SIDE), 4, trained=True)
        return value

    def mul(self, a: Tensor, b: Tensor) -> Tensor:
        return self.tape.mul(a, b)

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        return self.tape.add(a, b)

    def silu(self, a: Tensor) -> Tensor:
        return self.tape.unary(a, "silu")

    def tanh(self, a: Tensor) -> Tensor:
        return self.tape.tanh(a)

    def scaled(self, a: Tensor) -> Tensor:
        return self.tape.scaled(a)

    def copy(self, a: Tensor) -> Tensor:
        return self.tape.copy(a, "copy")

    def cast(self, a: Tensor, width: int) -> Tensor:
        return self.tape.cast(a, width)

    def linear(self, x: Tensor, w: Tensor) -> Tensor:
        tape = self.tape
        out = tape.new("product", (x.shape[0], w.shape[0]), 4)
        keeps = [Tensor(t.storage, t.shape, 4) for t, other in ((x, w), (w, x)) if other.source is not None]
        wanted = [t.shape if t.source is not None else None for t in (w, x)]

        def rule(grad: Tensor) -> list[Tensor | None]:
            _ = keeps
            return [shape and tape.new("gradient", shape, 4) for shape in wanted]

        return tape.record(out, [w.source, x.source], rule)

    def checkpoint(self, run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        return self.tape.checkpoint(run, x, trains=True)

    def total(self, a: Tensor) -> Tensor:
        shape = a.shape
        return self.tape.record(
            self.tape.new("loss", (1,), 4), [a.source], lambda grad: [self.tape.view(grad, shape)]
        )


def in_sizes(graph: Graph, trained: Sequence[bool]) -> Seen:
    ledger = Ledger()
    tape = Tape(ledger)
    operations = InSizes(tape)
    leaves = [operations.leaf(each) for each in trained]
    before = ledger.live
    ledger.begin("forward")
    loss = graph(operations, *leaves)
    kept = ledger.live
    ledger.begin("backward")
    tape.backward(loss)
    peaks = [ledger.peaks[phase].bytes for phase in ("forward", "backward")]
    return Seen(*(squares(size - before) for size in (kept, peaks[0], ledger.live, peaks[1])))


@pytest.fixture(scope="module", autouse=True)
def _quiet() -> Iterator[None]:
    """Collecting garbage looks only at what a test makes; the profiler keeps silent."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    in_torch(recomputed, [False, True, True, False])  # the first call leaves things behind
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
    torch.set_num_threads(threads)


# ------------------------------------------------------------------------------------------ graphs worked out by hand
# x is data or trained, w and v are weights, c a constant. The loss is sum(... * c): then the first gradient is real.


def product(o: Any, x: Any, w: Any, v: Any, c: Any) -> Any:
    return o.total(o.mul(o.mul(x, w), c))


def residual(o: Any, x: Any, w: Any, v: Any, c: Any) -> Any:
    x = o.mul(x, w)
    return o.total(o.mul(o.add(x, o.silu(x)), c))


def linear(o: Any, x: Any, w: Any, v: Any, c: Any) -> Any:
    return o.total(o.mul(o.linear(o.scaled(x), w), c))


def two_linear(o: Any, x: Any, w: Any, v: Any, c: Any) -> Any:
    return o.total(o.mul(o.linear(o.tanh(o.linear(o.scaled(x), w)), v), c))


def casts(o: Any, x: Any, w: Any, v: Any, c: Any) -> Any:
    return o.total(o.mul(o.cast(o.silu(o.cast(o.mul(x, w), 2)), 4), c))


def recomputed(o: Any, x: Any, w: Any, v: Any, c: Any) -> Any:
    def layer(y: Any) -> Any:
        return o.silu(o.linear(o.tanh(o.silu(y)), v))

    return o.total(o.mul(o.checkpoint(layer, o.mul(x, w)), c))


def recomputed_tanh(o: Any, x: Any, w: Any, v: Any, c: Any) -> Any:
    return o.total(o.mul(o.checkpoint(lambda y: o.silu(o.tanh(y)), o.mul(x, w)), c))


def used_often(o: Any, x: Any, w: Any, v: Any, c: Any) -> Any:
    x = o.mul(x, w)
    y = o.add(x, x)
    return o.total(o.mul(o.add(o.add(o.scaled(y), x), y), c))


@pytest.mark.parametrize(
    ("graph", "trained", "seen"),
    [
        # kept: the leaves are there anyway. Peak of the forward: both products.
        # Backward: the gradient of x * w, then one for each of the two that want it.
        (product, "xw", Seen(0, 2, 2, 3)),
        (product, "w", Seen(0, 2, 1, 2)),
        (product, "x", Seen(0, 2, 1, 2)),
        # silu keeps x * w. Forward: x * w, silu, their sum; the last product comes when silu is gone.
        # Backward: x * w, the gradient of the sum, the one through silu; added to the former; then those of x and w.
        (residual, "w", Seen(1, 3, 1, 3)),
        (residual, "xw", Seen(1, 3, 2, 3)),
        # A trained weight keeps its input, a frozen one does not: its gradient needs the weight alone.
        (linear, "w", Seen(1, 3, 1, 3)),
        (linear, "x", Seen(0, 2, 1, 2)),
        (linear, "xw", Seen(1, 3, 2, 4)),
        # Only the second weight is trained: nothing of the first layer is kept but what the second needs.
        (two_linear, "v", Seen(1, 3, 1, 3)),
        # Both: the scaled x, and tanh, which is kept as its own output and as the second's input, once.
        # Backward: these two, the gradient of the second's output, its weight's and its input's.
        (two_linear, "wv", Seen(2, 4, 2, 5)),
        # Only the input is kept: x * w. Backward: it, tanh and the product again, the gradients of silu's output and
        # input. When silu's are gone: x * w, tanh, and the gradients of the product, of v and of tanh.
        (recomputed, "wv", Seen(1, 3, 2, 5)),
        (recomputed, "w", Seen(1, 3, 1, 5)),
        # tanh does not keep its input, the checkpoint does: it, the output's gradient, tanh again, tanh's gradient.
        (recomputed_tanh, "w", Seen(1, 3, 1, 4)),
        # Sums hand their gradient g on as it is. x and y hold g together, so the one through the constant cannot be
        # added to it in place: g, that one and their sum. Forward: x, y, the scaled y, a sum and the next.
        (used_often, "w", Seen(0, 4, 1, 3)),
        # silu keeps the product in two bytes. Forward: that, the last cast and the last product. Backward: that, the
        # gradient in four bytes and in two.
        (casts, "w", Seen(0.5, 2.5, 1, 2)),
    ],
)
def test_graphs_worked_out_by_hand(graph: Graph, trained: str, seen: Seen) -> None:
    chosen = [name in trained for name in "xwvc"]
    assert in_sizes(graph, chosen) == seen
    assert in_torch(graph, chosen) == seen


def test_a_cast_to_its_own_type_is_the_tensor_itself() -> None:
    tape = Tape(Ledger())
    x = tape.new("x", (4, 4), 2)
    assert tape.cast(x, 2) is x


# ------------------------------------------------------------------------------------------------------ any graph

Program = list[tuple[Any, ...]]
ONE = st.sampled_from([("silu",), ("tanh",), ("scaled",), ("copy",)])
WEIGHT = st.tuples(st.sampled_from(["mul", "linear"]), st.booleans())  # with a weight of its own, trained or not
RESIDUAL = st.tuples(st.just("add"), st.integers(0, 2))  # of one of the last three values
STEPS = st.one_of(ONE, WEIGHT, RESIDUAL)
LAYER = st.tuples(st.just("checkpoint"), st.lists(STEPS, max_size=3))
PROGRAMS = st.lists(st.one_of(STEPS, LAYER), min_size=1, max_size=6)


def weights_of(program: Program) -> list[bool]:
    """Whether each weight of a program is trained, in order."""
    found: list[bool] = []
    for verb, *rest in program:
        found += weights_of(rest[0]) if verb == "checkpoint" else rest if verb in ("mul", "linear") else []
    return found


def run(o: Any, program: Program, x: Any, weights: list[Any]) -> Any:
    past = [x]
    for verb, *rest in program:
        if verb == "checkpoint":
            own = [weights.pop(0) for _ in weights_of(rest[0])]
            # torch runs a layer again only up to the last value it has to keep: here silu's input.
            x = o.checkpoint(lambda y, inner=rest[0], own=own: o.silu(run(o, inner, y, list(own))), x)
            past = [x]  # only the layer uses its input
            continue
        if verb == "add":
            x = o.add(x, past[rest[0] % len(past)])
        elif rest:
            x = getattr(o, verb)(x, weights.pop(0))
        else:
            x = getattr(o, verb)(x)
        past = [*past[-2:], x]
    return x


@settings(max_examples=60, deadline=None)
@given(PROGRAMS, st.booleans())
def test_any_chain_takes_what_torch_takes(program: Program, x: bool) -> None:
    def graph(o: Any, x: Any, w: Any, c: Any, *weights: Any) -> Any:
        return o.total(o.mul(run(o, program, o.mul(x, w), list(weights)), c))

    trained = [x, True, False, *weights_of(program)]
    assert in_sizes(graph, trained) == in_torch(graph, trained)


# ---------------------------------------------------------------------------------------------- what torch cannot say


def test_every_byte_leaves_the_ledger_with_the_last_tensor() -> None:
    ledger = Ledger()
    tape = Tape(ledger)
    x = tape.new("x", (4, 4), 4)
    seen = tape.view(x, (16,))
    del x
    assert ledger.live == 64
    del seen
    assert ledger.live == 0


def test_nothing_is_recorded_where_nothing_needs_a_gradient() -> None:
    tape = Tape(Ledger())
    x, w = tape.new("x", (4,), 4), InSizes(tape).leaf(trained=True)
    with tape.silent():
        assert tape.mul(w, w).source is None
    assert tape.scaled(x).source is None
    assert isinstance(tape.scaled(w).source, Node)


def test_blocks_say_what_they_are() -> None:
    """Activations in the forward pass, temporary in the backward pass, gradients once they are a weight's own."""
    ledger = Ledger()
    tape = Tape(ledger)
    w = Parameter("layer.weight", (SIDE, SIDE), 4, trained=True)
    value = tape.new("w", w.shape, 4)
    value.source = w
    loss = tape.tanh(value)
    ledger.begin("backward")
    tape.backward(loss)
    assert w.grad is not None
    assert [(b.bucket, b.what) for b in ledger.since(0)] == [
        ("activations", "w"), ("activations", "tanh"), ("gradients", "layer.weight"),
    ]  # fmt: skip


def test_gradients_of_earlier_passes_take_the_new_ones_up() -> None:
    ledger = Ledger()
    tape = Tape(ledger, accumulates=True)
    w = Parameter("w", (SIDE, SIDE), 4, trained=True)
    value = tape.new("w", w.shape, 4)
    value.source = w
    tape.backward(tape.scaled(value))
    assert w.grad is None
    assert ledger.live == SQUARE


@pytest.mark.parametrize(("first_is_view", "peak"), [(True, 3), (False, 2)])
def test_a_weight_used_twice_gets_the_sum(first_is_view: bool, peak: int) -> None:
    """Both gradients and their sum when the first cannot be added to (torch: a tied head's is a transposed view)."""
    ledger = Ledger()
    tape = Tape(ledger)
    w = Parameter("table", (SIDE, SIDE), 4, trained=True)
    w.shared, w.first_is_view = True, first_is_view
    values = [tape.new("w", w.shape, 4) for _ in range(2)]
    for value in values:
        value.source = w
    out = tape.new("loss", (1,), 4)
    loss = tape.record(out, [w, w], lambda grad: [tape.new("gradient", w.shape, 4) for _ in range(2)])
    del values, value
    ledger.begin("backward")
    tape.backward(loss)
    assert ledger.peaks["backward"].bytes // SQUARE == peak
    assert w.grad is not None
    assert ledger.live // SQUARE == 1
