"""What is watched while training: the run folder, the progress line, a loss that is no number, the user's Ctrl-C."""

from __future__ import annotations

import math
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

# The one hot module whose classes must inherit from a library's: it is imported by `trainer` only.
from transformers import TrainerCallback  # noqa: TID253

from finetune.errors import FinetuneError
from finetune.fast.head import IGNORED, labels_of
from finetune.measure import Gauge
from finetune.run import Run
from finetune.steps import Batch

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState, TrainingArguments


class Clock(TrainerCallback):
    """Seconds spent in training steps, without evaluations and saves."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.first_step: float | None = None
        self._began = time.perf_counter()
        self._created = self._began

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._began = time.perf_counter()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        now = time.perf_counter()
        self.seconds += now - self._began
        if self.first_step is None:
            self.first_step = now - self._created


class Measure(TrainerCallback):
    """The memory that a step really takes, and the micro-batches it took it with.

    On a GPU the allocator's peak since training began. On a CPU torch's allocation events over one step, the second:
    in the first one the optimizer's state is still missing.
    """

    def __init__(self, device: str) -> None:
        self.gauge = Gauge(device)
        self.batches: list[Batch] = []
        self.peak: int | None = None
        self._on_cpu, self._seen, self._most, self._running = device == "cpu", 0, 0, False

    def saw(self, inputs: dict[str, Any]) -> None:
        """A micro-batch of training. On a GPU only one larger than those before is looked into: that waits for it."""
        rows, length = inputs["input_ids"].shape
        if not (self._running or (not self._on_cpu and rows * length > self._most)):
            return
        self._most = max(self._most, rows * length)
        mask = inputs.get("attention_mask")
        trained = int((labels_of(inputs) != IGNORED).sum())
        padded = mask is not None and not bool(mask.all())
        self.batches.append(Batch(rows, length, max(trained, 1), flat="position_ids" in inputs, padded=padded))

    @property
    def largest(self) -> Batch | None:
        """The largest micro-batch measured."""
        return max(self.batches, key=lambda batch: (batch.tokens, batch.supervised), default=None)

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if not self._on_cpu:
            self.gauge.start()

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._seen += 1
        if self._on_cpu and self._seen == 2:
            self.gauge.start()
            self._running = True

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self._running:
            self._running = False
            self.peak = self.gauge.stop()

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if not self._on_cpu:
            self.peak = self.gauge.stop()


class Record(TrainerCallback):
    """Writes metrics.jsonl and events.jsonl, and turns each save into a complete checkpoint."""

    def __init__(self, run: Run, keep: int, clock: Clock) -> None:
        self.run, self.keep, self.clock = run, keep, clock

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if state.is_world_process_zero:
            kind = "resume" if state.global_step else "start"
            self.run.event(kind, step=state.global_step, of=state.max_steps, processes=args.world_size)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **_: Any,
    ) -> None:
        if not state.is_world_process_zero or not logs or "train_runtime" in logs:
            return
        shown = {key: value for key, value in logs.items() if key not in ("epoch", "total_flos")}
        self.run.metric(
            step=state.global_step, epoch=logs.get("epoch"), **shown, seconds=round(self.clock.seconds, 3)
        )

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        # The loss is logged, and so found finite, before weights are saved; nothing is left unlogged at the end.
        if control.should_save or state.global_step >= state.max_steps:
            control.should_log = True

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        control.should_log = True

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        _wait_for_all()
        if state.is_world_process_zero:
            saved = Path(str(args.output_dir)) / f"checkpoint-{state.global_step}"
            sealed = self.run.seal_checkpoint(saved, state.global_step, self.keep)
            self.run.event("checkpoint", step=state.global_step, folder=sealed.name)
        _wait_for_all()


class FiniteLoss(TrainerCallback):
    """Ends the run when the loss is no number any more, before more weights are lost."""

    def __init__(self, run: Run, places: Callable[[int, int], list[str]]) -> None:
        self.run, self.places = run, places
        self.good = 0  # the last step whose loss was logged and finite

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.good = state.global_step

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **_: Any,
    ) -> None:
        loss = (logs or {}).get("loss")
        if loss is None:
            return
        if math.isfinite(float(loss)):
            self.good = state.global_step
            return
        last = self.run.last_checkpoint()
        rows = self.places(self.good + 1, state.global_step)
        more = f" and {len(rows) - 8} more" * (len(rows) > 8)
        raise FinetuneError(
            f"The loss at step {state.global_step} is {loss}; training stopped. The rows trained since step "
            f"{self.good}: {', '.join(rows[:8])}{more}.",
            f"Lower train.learning_rate; the last good checkpoint is {last.name if last else 'none yet'}.",
        )


class Interrupt(TrainerCallback):
    """The first Ctrl-C (or SIGTERM) ends the step, saves and stops; the second one stops at once."""

    def __init__(self) -> None:
        self.asked = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupt:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._ask)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        sys.stderr.write("\nStopping after this step and saving a checkpoint; press Ctrl-C again to stop at once.\n")

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if _any_process(self.asked):
            self.asked = True
            control.should_save = control.should_training_stop = True

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self.asked:  # the step has been saved already
            control.should_save = control.should_evaluate = False


class Progress(TrainerCallback):
    """One calm line: step, loss, learning rate, tokens/s, time left, memory.

    In a terminal the line renews itself; elsewhere (a log file) a line is printed about twenty times.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.loss: float | None = None
        self.rate = self.tokens = 0.0
        self._at_start = 0
        self._bar: Any = None

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._at_start = state.global_step
        if not state.is_world_process_zero:
            return
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as Bar

        console = Console(stderr=True)
        if console.is_terminal:
            self._bar = Bar(
                TextColumn("{task.description}"), BarColumn(28), TextColumn("{task.fields[said]}"), console=console
            )
            self._bar.start()
            self._bar.add_task("training", total=state.max_steps, completed=state.global_step, said="")

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if not state.is_world_process_zero:
            return
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=state.global_step, said=self.line(state))
        elif state.global_step % max(1, state.max_steps // 20) == 0 or state.global_step == state.max_steps:
            sys.stderr.write(self.line(state) + "\n")

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **_: Any,
    ) -> None:
        logs = logs or {}
        self.loss = float(logs["loss"]) if "loss" in logs else self.loss
        self.rate = float(logs.get("learning_rate", self.rate))
        if "num_tokens" in logs and self.clock.seconds:
            self.tokens = float(logs["num_tokens"]) / self.clock.seconds

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.close()

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def say(self, line: str) -> None:
        """A line above the one that renews itself."""
        if self._bar is not None:
            self._bar.console.print(line, highlight=False)
        else:
            sys.stderr.write(line + "\n")

    def line(self, state: TrainerState) -> str:
        """`step 120/250  loss 0.412  lr 1.0e-03  212 tok/s  1:07 left  1.9 GB`."""
        done = state.global_step - self._at_start
        left = (state.max_steps - state.global_step) * self.clock.seconds / done if done else 0.0
        parts = [
            f"step {state.global_step}/{state.max_steps}",
            "loss -" if self.loss is None else f"loss {self.loss:.3f}",
            f"lr {self.rate:.1e}",
            f"{self.tokens:,.0f} tok/s",
            f"{int(left) // 60}:{int(left) % 60:02d} left",
            f"{memory_in_use() / 1e9:.1f} GB",
        ]
        return "  ".join(parts)


def memory_in_use() -> int:
    """Peak bytes of this process: CUDA's allocator on a GPU, resident memory on a CPU."""
    import torch

    if torch.cuda.is_available() and torch.cuda.max_memory_allocated():
        return int(torch.cuda.max_memory_allocated())
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _wait_for_all() -> None:
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        dist.barrier()


def _any_process(asked: bool) -> bool:
    """Whether any process was asked to stop, so that all of them stop at the same step."""
    import torch
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return asked
    flag = torch.tensor(int(asked), device="cuda" if dist.get_backend() == "nccl" else "cpu")
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag.item())
