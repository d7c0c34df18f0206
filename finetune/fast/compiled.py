"""Decoder layers through `torch.compile`, after a few steps without: one run shows cost and gain.

    steps 1 to 5    as they are; the first is not timed, since it warms caches
    steps 6 to 8    compiled when they are first called, forward and backward: what they take longer is the price
    steps 9 to 14   compiled: seconds a token beside those of steps 2 to 5

A run that goes on from a later checkpoint compiles at once, so that it trains as the run that it goes on with.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

# The callback must inherit from transformers'; this hot module is imported by `trainer` only.
from transformers import TrainerCallback  # noqa: TID253

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState, TrainingArguments

AS_THEY_ARE, COMPILING, COMPILED = 5, 3, 6
"""Steps before compiling, steps that compile, and steps that are timed after it."""

ALL = AS_THEY_ARE + COMPILING + COMPILED


def why_not() -> str | None:
    """Why `torch.compile` does not work on this machine, or None: one small function is compiled and run."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.compile(torch.sin)(torch.ones(2, device=device))
    except Exception as error:  # no C++ compiler, no Triton, a broken toolchain: each raises its own kind
        return str(error).strip().splitlines()[0].rstrip(".") or type(error).__name__
    return None


@dataclass(frozen=True)
class Span:
    """Seconds of some steps, and the tokens that they trained."""

    seconds: float
    tokens: float

    def since(self, earlier: Span) -> Span:
        """What came after an earlier account."""
        return Span(self.seconds - earlier.seconds, self.tokens - earlier.tokens)


def break_even(before: Span, compiling: Span, after: Span) -> tuple[float, float]:
    """(Seconds that compiling took, tokens after which they are won back).

    The tokens are `inf` where compiled layers are not quicker.
    """
    slow, quick = (span.seconds / span.tokens for span in (before, after))
    price = max(compiling.seconds - compiling.tokens * quick, 0.0)
    return price, price / (slow - quick) if quick < slow else float("inf")


class CompileLayers(TrainerCallback):
    """Compiles the decoder layers of `model`, and says after how many steps of this run that pays.

    `so_far` tells the seconds spent in steps and the tokens trained, and `say` takes the line.
    """

    def __init__(self, model: Any, so_far: Callable[[], Span], say: Callable[[str], None]) -> None:
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        kinds = base._no_split_modules or ()  # the classes of its layers, by which accelerate splits a model too
        self._layers = [module for module in base.modules() if type(module).__name__ in kinds]
        self._so_far, self._say = so_far, say
        self._modules: list[Any] = []
        self._compiled = self._resumed = False
        self._ends: list[Span] = []

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._resumed = state.global_step > 0

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if not self._compiled and state.global_step >= AS_THEY_ARE:
            import torch

            self._compiled = True
            torch._dynamo.config.suppress_errors = True  # what cannot be compiled runs as it is, and torch warns
            self._modules = [module for layer in self._layers for module in _parts(layer)]
            for module in self._modules:
                module.forward = torch.compile(module.forward, dynamic=True)  # batches differ in length

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if not self._resumed and len(self._ends) < ALL:
            self._ends.append(self._so_far())
            if len(self._ends) == ALL and state.is_world_process_zero:
                self._say(self._in_words(state.max_steps))

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        for module in self._modules:  # what is asked of the model after training runs as ever
            del module.forward
        if not self._resumed and len(self._ends) < ALL and state.is_world_process_zero:
            self._say("Compiled layers: the run is too short to tell what they gain.")

    def _in_words(self, steps: int) -> str:
        warm, as_they_are, compiling, last = (
            self._ends[count - 1] for count in (1, AS_THEY_ARE, AS_THEY_ARE + COMPILING, ALL)
        )
        before, after = as_they_are.since(warm), last.since(compiling)
        price, tokens = break_even(before, compiling.since(as_they_are), after)
        a_step = last.since(warm).tokens / (ALL - 1)
        slow, quick = (a_step * span.seconds / span.tokens for span in (before, after))
        said = f"Compiled layers: {price:.0f} s to compile, {quick:.2f} s a step instead of {slow:.2f}"
        if tokens == float("inf"):
            return f"{said}: nothing gained, leave fast.compile off here."
        return f"{said}: it pays after {tokens / a_step:,.0f} steps, and this run has {steps:,}."


def _parts(layer: Any) -> list[Any]:
    """What of a layer is compiled: all of it, or, since checkpointing begins inside its forward, what that calls."""
    return list(layer.children()) if getattr(layer, "gradient_checkpointing", False) else [layer]
