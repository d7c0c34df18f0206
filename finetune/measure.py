"""What a step really takes: the peak of live bytes, by torch's own account.

On a GPU the caching allocator knows. On a CPU every allocation and release that torch makes is an event of its
profiler; the sum of them, on top of what was live before, is exact to the byte. Resident memory is not: it counts
libraries and pages that nobody uses any more.
"""

from __future__ import annotations

import gc
import os
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any

from finetune.facts import Facts
from finetune.memory import account
from finetune.recipe import Method
from finetune.steps import Batch, Path


def live_bytes() -> int:
    """Bytes of all storages that live tensors on the CPU hold, each storage once."""
    import torch

    gc.collect()
    seen: dict[int, int] = {}
    for item in gc.get_objects():
        # isinstance() would ask lazy module proxies for their class, which imports them.
        if issubclass(type(item), torch.Tensor) and item.layout == torch.strided:
            storage = item.untyped_storage()
            if storage.device.type == "cpu":  # what `torch.compile` traced with says cpu too, over a meta storage
                seen[storage.data_ptr()] = storage.nbytes()
    seen.pop(0, None)
    return sum(seen.values())


class Gauge:
    """Measures the most live bytes between `start` and `stop`, also as a context manager. `peak` is in bytes."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.peak = self.before = 0
        self._profile: Any = None

    def start(self) -> None:
        """Begin; on a GPU torch's peak statistics are reset."""
        import torch

        if self.device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self.before = torch.cuda.memory_allocated()
            return
        self.before = live_bytes()
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler would announce itself on stderr
        self._profile = torch.autograd.profiler.profile(profile_memory=True, use_cpu=True, record_shapes=False)
        self._profile.__enter__()

    def stop(self) -> int:
        """End, and return the peak."""
        import torch

        if self.device == "cuda":
            torch.cuda.synchronize()
            self.peak = torch.cuda.max_memory_allocated()
            return self.peak
        profile, self._profile = self._profile, None
        profile.__exit__(None, None, None)
        events = [event for event in profile.kineto_results.events() if event.name() == "[memory]"]
        most = now = 0
        for event in sorted(events, key=lambda event: event.start_ns()):
            now += event.nbytes()
            most = max(most, now)
        self.peak = self.before + most
        return self.peak

    def __enter__(self) -> Gauge:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.stop()


@dataclass(frozen=True)
class Measured:
    """A measured peak beside the one predicted for the very micro-batches of that step, in bytes."""

    peak: int
    predicted: int
    batch: Batch
    during: str

    @property
    def difference(self) -> float:
        """Predicted over measured, minus one."""
        return self.predicted / self.peak - 1

    def document(self) -> dict[str, Any]:
        """For result.json."""
        return {
            "peak_bytes": self.peak,
            "predicted_bytes": self.predicted,
            "difference": round(self.difference, 5),
            "batch": asdict(self.batch),
            "predicted_during": self.during,
        }


def held_against(peak: int, batch: Batch, path: Path, method: Method, facts: Facts) -> Measured:
    """A measured step beside its prediction."""
    predicted = account(method, facts, batch, path)
    return Measured(peak, predicted.peak, batch, predicted.during)
