"""Bytes, line by line, each with its formula in words and numbers.

static_lines   weights, gradients, optimizer state: they follow from shapes and are exact for every model
account        the same beside what one step has alive at its peak: activations, loss, temporaries, workspaces, and
               the peak of each phase, from the torch-free step (`decoder`)

The lines of an account add up to the peak of the step: `at_peak` says how much of a line is alive then.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from finetune import decoder
from finetune.facts import Facts
from finetune.ledger import Block, Peak
from finetune.method import held_linears, held_room, held_sizes, storage_bytes, trained_tensors
from finetune.optimizers import BLOCK, SMALL, is_paged, moments, state_sizes
from finetune.recipe import Full, Method, QLoRA
from finetune.steps import Batch, Path, Weights
from finetune.tensors import dtype_bytes

Bucket = Literal["weights", "gradients", "optimizer", "activations", "loss", "temporary", "outside"]
BUCKETS: tuple[Bucket, ...] = (
    "weights", "gradients", "optimizer", "activations", "loss", "temporary", "outside",
)  # fmt: skip

PHASES = ("forward", "backward", "optimizer")
CONTEXT = 500_000_000
"""CUDA's context and the libraries' code on the card, outside torch's allocator: 0.15 to 0.6 GB where it was seen."""


@dataclass(frozen=True)
class Line:
    """One part of the memory.

    `bytes` is its whole size and `at_peak` what of it is alive at the step's peak. `paged` lies in unified memory,
    which the driver can move to the host.
    """

    bucket: Bucket
    name: str
    bytes: int
    formula: str
    exact: bool = True
    at_peak: int | None = None
    paged: bool = False

    @property
    def alive(self) -> int:
        """Bytes of it at the peak."""
        return self.bytes if self.at_peak is None else self.at_peak


# ------------------------------------------------------------------------------------------------------------- static


def static_lines(
    method: Method, facts: Facts, dtype: str, optimizer: str, device: str = "cuda", held: Weights = "", every: int = 1
) -> list[Line]:
    """Weights, gradients and optimizer state of one device. Trained parameters are fp32.

    `held`: how the frozen weights of every `every`-th layer lie there (`steps.Path`).
    """
    return [
        *_weights(method, facts, dtype, held, every),
        *_gradients(method, facts),
        *_optimizer(method, facts, optimizer, device),
    ]


def _weights(method: Method, facts: Facts, dtype: str, held: Weights, every: int) -> list[Line]:
    trained = sum(_size(shape) for _, shape in trained_tensors(method, facts))
    if isinstance(method, Full):
        return [Line("weights", "weights", 4 * trained, f"4 bytes x {trained:,} (fp32, the master copy)")]
    stored = storage_bytes(method, facts, dtype)
    each = dtype_bytes(dtype)
    lines = []
    if isinstance(method, QLoRA):
        lines.append(Line("weights", "4-bit weights", stored.packed, f"0.5 bytes x {stored.packed_parameters:,}"))
        kind = "8 bit per 64 weights, fp32 per 16,384" if method.double_quant else "fp32 per 64 weights"
        lines.append(Line("weights", "quantisation constants", stored.constants + stored.tables, kind))
    plain, name = stored.plain_parameters, "other weights" if isinstance(method, QLoRA) or held else "frozen weights"
    if held:
        sizes = [linear.out_features * linear.in_features for linear in held_linears(facts, every)]
        kind = "1 byte + 2 x fp32 per 32 weights, as in the file" if held == "blocks" else "2 bytes, as in the file"
        total = sum(sum(held_sizes(size, held)) for size in sizes)
        lines.append(Line("weights", "layers' weights", total, f"({kind}) x {sum(sizes):,}"))
        lines.append(
            Line("weights", "room for a layer", held_room(facts, every), "4 bytes x the largest, made dense there")
        )
        plain -= sum(sizes)
    lines.append(Line("weights", name, int(plain * each), f"{each:g} bytes x {plain:,}"))
    lines.append(Line("weights", "adapter", 4 * trained, f"4 bytes x {trained:,} (fp32)"))
    return lines


def _gradients(method: Method, facts: Facts) -> list[Line]:
    trained = sum(_size(shape) for _, shape in trained_tensors(method, facts))
    return [Line("gradients", "gradients", 4 * trained, f"4 bytes x {trained:,} (fp32)")]


def _optimizer(method: Method, facts: Facts, optimizer: str, device: str) -> list[Line]:
    """One line for what stays on the device, and one for what lies in unified memory."""
    here: list[tuple[int, list[int]]] = []
    paged: list[tuple[int, list[int]]] = []
    for name, shape in trained_tensors(method, facts):
        size = _size(shape)
        home = paged if device == "cuda" and is_paged(optimizer, size) else here
        home.append((size, state_sizes(optimizer, name, shape)))
    lines = []
    if paged:
        lines.append(_state_line(f"{optimizer}, paged", optimizer, paged, paged=True))
    if here or not paged:
        lines.append(_state_line(f"{optimizer}, small tensors" if paged else optimizer, optimizer, here))
    return lines


def _state_line(name: str, optimizer: str, parts: list[tuple[int, list[int]]], *, paged: bool = False) -> Line:
    total = sum(sum(sizes) for _, sizes in parts)
    values = sum(size for size, _ in parts)
    count = moments(optimizer)
    if optimizer == "adafactor":
        formula = "4 bytes x (rows + columns + 1) of each weight"
    elif not count:
        formula = "no state"
    elif optimizer.endswith("8bit"):
        wide = sum(size for size, sizes in parts if sum(sizes) == 4 * size * count)
        formula = f"{count} x (1 byte + fp32 per {BLOCK}) x {values - wide:,}"
        if wide:
            formula += f" + {count} x 4 bytes x {wide:,} (embeddings and tensors below {SMALL:,})"
    else:
        formula = f"{count} moments x 4 bytes x {values:,}"
        if total > 4 * count * values:
            formula += f" + {len(parts):,} step counters"
    return Line("optimizer", name, total, formula, paged=paged)


# ------------------------------------------------------------------------------------------------------------ account


@dataclass(frozen=True)
class Account:
    """What one device holds through one optimizer step. `lines` add up to `peak`, in bytes."""

    lines: tuple[Line, ...]
    phases: dict[str, int]
    during: str
    estimated: bool

    @property
    def peak(self) -> int:
        """The most live bytes of the step, as torch's allocator counts them."""
        return max(self.phases[phase] for phase in PHASES)

    @property
    def paged(self) -> int:
        """Optimizer state in unified memory, which is not in the peak."""
        return sum(line.bytes for line in self.lines if line.paged)


def account(method: Method, facts: Facts, batch: Batch, path: Path) -> Account:
    """Follow one step and say who holds what at its peak."""
    step = decoder.run_step(facts, method, batch, path)
    ledger = step.ledger
    peak = ledger.peak(*PHASES)
    held = list(ledger.held(peak))
    estimated = not decoder.is_exact(facts, method)
    key = ("static", repr(method), path.weights, path.optimizer, path.device, path.held, path.held_every)
    if key not in facts.memo:
        facts.memo[key] = static_lines(
            method, facts, path.weights, path.optimizer, path.device, path.held, path.held_every
        )
    static: list[Line] = facts.memo[key]
    alive_gradients = sum(block.size * block.count for block in held if block.bucket == "gradients")
    lines = [_placed(line, alive_gradients) for line in static]
    lines += _grouped(held, exact=not estimated)
    if peak.passing:
        lines.append(
            Line("temporary", f"inside a kernel: {peak.during}", peak.passing, "its own buffers", not estimated)
        )
    rest = peak.bytes - sum(line.alive for line in lines)
    lines.append(
        Line("temporary", "rounding", rest, "every tensor to 512 bytes" if path.device == "cuda" else "none")
    )
    phases = {"load": step.resident, **{name: ledger.peaks[name].bytes for name in (*PHASES, "evaluation")}}
    return Account(tuple(lines), phases, _during(peak), estimated)


def _placed(line: Line, alive_gradients: int) -> Line:
    alive = 0 if line.paged else min(alive_gradients, line.bytes) if line.bucket == "gradients" else line.bytes
    return Line(line.bucket, line.name, line.bytes, line.formula, line.exact, alive, line.paged)


_BUCKET: dict[str, Bucket] = {
    "workspace": "temporary", "temporary": "temporary", "loss": "loss", "copies": "weights",
}  # fmt: skip


def _grouped(held: Iterable[Block], *, exact: bool) -> list[Line]:
    """One line for all blocks of a kind: `2 bytes x 1 x 2,048 x 9,216 x 26`."""
    kinds: dict[tuple[str, str], list[Block]] = {}
    for block in held:
        if block.bucket not in ("weights", "gradients", "optimizer"):
            kinds.setdefault((block.bucket, block.what), []).append(block)
    lines = []
    for (bucket, what), blocks in kinds.items():
        total = sum(block.size * block.count for block in blocks)
        lines.append(Line(_BUCKET.get(bucket, "activations"), what, total, _formula(blocks), exact))
    return sorted(lines, key=lambda line: (BUCKETS.index(line.bucket), -line.bytes))


def _formula(blocks: list[Block]) -> str:
    shapes = {(block.shape, block.width) for block in blocks if block.shape}
    count = sum(block.count for block in blocks)
    if len(shapes) != 1:
        return f"{count:,} tensor" + "s" * (count > 1)
    shape, width = shapes.pop()
    sides = " x ".join(f"{side:,}" for side in shape)
    return f"{width:g} bytes x {sides}" + (f" x {count:,}" if count > 1 else "")


def _during(peak: Peak) -> str:
    return f"{peak.phase}: {peak.during}"


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for side in shape:
        size *= side
    return size
