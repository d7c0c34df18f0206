"""Decoder layers through `torch.compile`, after some steps without: one run shows what that costs and gains.

    steps 1 to 6    as they are; the first two are not timed, since one warms caches and one is measured (`Measure`)
    steps 7 to 9    compiled when they are first called, forward and backward: what they take longer is the price
    steps 10 to 15  compiled: seconds a token beside those of steps 3 to 6

Passes without gradients, as in an evaluation, run as they are: they would be compiled once more for a few rows. A run
that goes on from a later checkpoint compiles at once, so that it trains as the run that it goes on with.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

# The callback must inherit from transformers'; this hot module is imported by `trainer` only.
from transformers import TrainerCallback  # noqa: TID253

from finetune.errors import first_line

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState, TrainingArguments

WARM, AS_THEY_ARE, COMPILING, COMPILED = 2, 6, 3, 6
"""Steps that are not timed, steps before compiling (these among them), steps that compile, and steps after it."""

ALL = AS_THEY_ARE + COMPILING + COMPILED


def why_not(device: str) -> str | None:
    """Why `torch.compile` does not work for a device here, or None: one small function is compiled and run."""
    import torch
    from torch._dynamo import config

    try:
        with config.patch(suppress_errors=False):
            torch.compile(torch.sin)(torch.ones(2, device=device))
    except Exception as error:  # no C++ compiler, no Triton, a broken toolchain: each raises its own kind
        return first_line(error)
    return None


def layers_of(model: Any) -> list[Any]:
    """The decoder layers of a model, or of peft's around one: the classes by which accelerate splits it too."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    kinds = getattr(base, "_no_split_modules", None) or ()
    found: dict[str, Any] = {}
    for name, module in base.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in found)
        if type(module).__name__ in kinds and not inside:
            found[name] = module
    return list(found.values())


@dataclass(frozen=True)
class Span:
    """Seconds of some steps, and the tokens that they trained."""

    seconds: float
    tokens: float

    def since(self, earlier: Span) -> Span:
        """What came after an earlier account."""
        return Span(self.seconds - earlier.seconds, self.tokens - earlier.tokens)


@dataclass(frozen=True)
class Gain:
    """Seconds that compiling took, seconds of a step before and after, and the step at which it has paid, if ever."""

    seconds: float
    before: float
    after: float
    pays_at: int | None

    @classmethod
    def of(cls, before: Span, compiling: Span, after: Span, tokens: float) -> Gain:
        """From three spans and the tokens of a step."""
        slow, quick = (span.seconds / span.tokens for span in (before, after))
        price = max(compiling.seconds - compiling.tokens * quick, 0.0)
        pays_at = AS_THEY_ARE + round(price / ((slow - quick) * tokens)) if quick < slow else None
        return cls(price, slow * tokens, quick * tokens, pays_at)

    def in_words(self, steps: int) -> str:
        """For a run of so many steps."""
        said = (
            f"Compiled layers: {self.seconds:.0f} s to compile, {self.after:.3g} s a step, {self.before:.3g} before"
        )
        if self.pays_at is None:
            return f"{said}: nothing gained, so leave fast.compile off here."
        return f"{said}: it has paid at step {self.pays_at:,}, and this run {_until(self.pays_at, steps)} {steps:,}."


def _until(pays_at: int, steps: int) -> str:
    return "ends at step" if pays_at < steps else "is over before, at step"


class CompileLayers(TrainerCallback):
    """Compiles `layers`, and says at which step of the run that has paid.

    `so_far` tells the seconds spent in steps and the tokens trained, `say` takes the line, `note` its numbers.
    """

    def __init__(
        self, layers: list[Any], so_far: Callable[[], Span], say: Callable[[str], None], note: Callable[..., None]
    ) -> None:
        self._layers, self._so_far, self._say, self._note = layers, so_far, say, note
        self._modules: list[Any] = []
        self._resumed = False
        self._ends: list[Span] = []

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._resumed = state.global_step > 0

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if not self._modules and state.global_step >= AS_THEY_ARE:
            self._modules = [module for layer in self._layers for module in _parts(layer)]
            for module in self._modules:
                module.forward = _Compiled(module)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self._resumed or len(self._ends) == ALL:
            return
        self._ends.append(self._so_far())
        if len(self._ends) == ALL and state.is_world_process_zero:
            gain = self._gain()
            self._note("compiled", step=state.global_step, **asdict(gain))
            self._say(gain.in_words(state.max_steps))

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        for module in self._modules:  # what is asked of the model after training runs as ever
            del module.forward
        if not self._resumed and len(self._ends) < ALL and state.is_world_process_zero:
            self._say(
                f"fast.compile: after {state.global_step} steps it cannot be told what it gains; {ALL} would do."
            )

    def _gain(self) -> Gain:
        warm, as_they_are, compiling, last = (
            self._ends[count - 1] for count in (WARM, AS_THEY_ARE, AS_THEY_ARE + COMPILING, ALL)
        )
        tokens = last.since(warm).tokens / (ALL - WARM)
        return Gain.of(as_they_are.since(warm), compiling.since(as_they_are), last.since(compiling), tokens)


def _parts(layer: Any) -> list[Any]:
    """What of a layer is compiled: all of it, or, since checkpointing begins inside its forward, what that calls."""
    return list(layer.children()) if getattr(layer, "gradient_checkpointing", False) else [layer]


class _Compiled:
    """The forward of one module: compiled where gradients are wanted."""

    def __init__(self, module: Any) -> None:
        import torch

        self.plain = module.forward
        self.compiled = torch.compile(module.forward, dynamic=True)  # batches differ in length

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        import torch

        return (self.compiled if torch.is_grad_enabled() else self.plain)(*args, **kwargs)
