"""Numbers -> what a person likes to read in a terminal. Every function returns a renderable and prints nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from finetune.evaluate import Evaluation
    from finetune.facts import Facts
    from finetune.ledger import Block
    from finetune.measure import Measured
    from finetune.plan import Plan
    from finetune.simulate import Simulation

_BAR = 40  # cells that stand for all parameters: a row fits 80 columns


def gb(count: float) -> str:
    """Bytes in GB (1e9)."""
    return f"{count / 1e9:.2f} GB"


def simulation_view(simulation: Simulation, plan: Plan) -> RenderableType:
    """The trace of one step beside the plan: the peak of each phase, and who held it."""
    table = Table(box=None, padding=(0, 3, 0, 0), header_style="bold")
    for name in ("one step, simulated", "simulated", "planned", "difference"):
        table.add_column(name, justify="left" if name.startswith("one") else "right")
    for phase, peak in simulation.peaks.items():
        traced, planned = peak.allocated or peak.bytes, plan.account.phases[phase]
        mark = "  <- peak" if phase == simulation.peak.phase else ""
        table.add_row(phase + mark, gb(traced), gb(planned), f"{planned / traced - 1:+.2%}")
    told = [f"the most in {simulation.peak.during}", f"{simulation.operations:,} operations"]
    if simulation.reserved:
        told.append(f"{gb(simulation.reserved)} reserved by the allocator")
    held = Table(box=None, padding=(0, 3, 0, 0), show_header=False)
    for bucket, what, shape, count, size in _largest(simulation.held, 8):
        held.add_row(Text(bucket, style="cyan"), what, shape, f"x {count:,}", Text(gb(size), style="bold"))
    return Group("", table, Text(", ".join(told), style="dim"), "", Text("Held at that moment", style="bold"), held)


def _largest(held: Iterable[Block], count: int) -> list[tuple[str, str, str, int, int]]:
    """The kinds of blocks that hold the most: bucket, operation, shape, how many, bytes."""
    kinds: dict[tuple[str, str, str], list[int]] = {}
    for block in held:
        what = block.what if block.bucket not in ("weights", "optimizer", "gradients") else "-"
        shape = " x ".join(f"{side:,}" for side in block.shape) if what != "-" else ""
        entry = kinds.setdefault((block.bucket, what, shape), [0, 0])
        entry[0] += block.count
        entry[1] += block.size * block.count
    ranked = sorted(kinds.items(), key=lambda item: -item[1][1])[:count]
    return [(*kind, number, size) for kind, (number, size) in ranked]


def measured_view(measured: Measured) -> RenderableType:
    """Two real steps beside the plan."""
    batch = measured.batch
    rows = f"{batch.tokens:,} tokens, {batch.supervised:,} of them trained"
    return Text.assemble(
        "\nMeasured in two real steps: ", (gb(measured.peak), "bold"), f" at the peak ({rows}); predicted ",
        (gb(measured.predicted), "bold"), f", {measured.difference:+.2%}",
    )  # fmt: skip


_GROUPS = {
    "embedding": ("embedding", "blue"),
    "head": ("output head", "cyan"),
    "attention": ("attention", "yellow"),
    "mlp": ("MLP", "green"),
    "norm": ("norms", "magenta"),
    "other": ("other", "white"),
}
_SOURCES = {
    "bundled": "known to finetune, so nothing was read",
    "local folder": "from the headers in this folder",
    "hub cache": "from the headers in the hub's cache",
    "hub headers": "from the hub, by range requests",
    "gguf": "from the header of this file",
}
_EIGHTHS = " ▏▎▍▌▋▊▉"


def facts_view(facts: Facts) -> RenderableType:
    """A model as parameters by group, the types they are stored in, its numbers and its Linear layers."""
    title = Text.assemble(
        (facts.model, "bold"), f"  {facts.parameters:,} parameters, ", (gb(facts.weight_bytes()), "bold"),
        f" in {len(facts.tensors):,} tensors",
    )  # fmt: skip
    about = Text(f"{facts.architecture}, {_SOURCES[facts.source]}; 1 GB = 1e9 bytes", style="dim")
    parts: list[RenderableType] = [title, about, "", _group_rows(facts), "", _stored_rows(facts), ""]
    parts += [_number_rows(facts), "", _linear_rows(facts)]
    if facts.has_experts:
        parts.append(
            Text("Experts and routers are stacked tensors, no Linear layers; they count as MLP.", style="dim")
        )
    return Group(*parts)


def _group_rows(facts: Facts) -> Table:
    """One row and one bar for each group."""
    table = _plain("left", "left", "right", "right", "left")
    for group, size in facts.by_group().items():
        label, colour = _GROUPS[group]
        if group == "head" and facts.tied:
            table.add_row("", label, "", "", Text("shares the embedding's weight", style="dim"))
        elif size:
            share = size / facts.parameters
            bar = Text(_blocks(_BAR * share), style=colour)
            table.add_row(Text("■", style=colour), label, Text(f"{size:,}", style="bold"), _share(share), bar)
    return table


def _blocks(length: float) -> str:
    """A bar of this many cells, to an eighth; what is there at all is seen."""
    eighths = max(1, round(8 * length))
    return "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()


def _share(share: float) -> str:
    """In percent; a trace is not shown as nothing."""
    return f"{100 * share:.1f} %" if share >= 0.0005 else "< 0.1 %"


def _stored_rows(facts: Facts) -> Table:
    table = _plain("left", "left", "right", "right", "right")
    title = "unpacks to" if facts.unpacked else "stored as"
    for name, stored in facts.by_dtype().items():
        counts = (f"{stored.tensors:,} tensors", f"{stored.parameters:,} parameters", gb(stored.bytes))
        table.add_row(Text(title, style="dim"), Text(name, style="bold"), *counts)
        title = ""
    return table


def _number_rows(facts: Facts) -> Table:
    """The architecture, three numbers to a line."""
    longest = "not said" if facts.max_position is None else f"{facts.max_position:,}"
    numbers = [
        ("layers", f"{facts.layers:,}"),
        ("hidden size", f"{facts.hidden_size:,}"),
        ("MLP width", f"{facts.intermediate_size:,}"),
        ("attention heads", f"{facts.heads:,}"),
        ("key-value heads", f"{facts.kv_heads:,}"),
        ("head dimension", f"{facts.head_dim:,}"),
        ("vocabulary", f"{facts.vocab_size:,}"),
        ("longest position", longest),
        ("model type", facts.model_type),
    ]
    table = _plain(*["left", "right"] * 3)
    for first in range(0, len(numbers), 3):
        cells = [(Text(name, style="dim"), value) for name, value in numbers[first : first + 3]]
        table.add_row(*(cell for pair in cells for cell in pair))
    return table


def _linear_rows(facts: Facts) -> Table:
    table = Table(box=None, padding=(0, 3, 0, 0), header_style="dim")
    table.add_column("Linear layer", overflow="fold")
    for name in ("[out, in]", "how many", "parameters"):
        table.add_column(Text(name), justify="right", no_wrap=True)
    for kind in facts.linear_kinds():
        shape = Text(f"[{kind.out_features}, {kind.in_features}]", style="bold")
        table.add_row(Text(kind.name), shape, f"{kind.copies:,}", f"{kind.parameters:,}")
    return table


def _plain(*columns: str) -> Table:
    """A table without lines and header, one column for each of "left" and "right"."""
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    for side in columns:
        table.add_column(justify=side, no_wrap=True)  # type: ignore[arg-type]
    return table


def evaluation_view(evaluation: Evaluation, examples: int = 3) -> RenderableType:
    """Scores of every arm in one table, then a few questions with all answers under each other."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column(f"{len(evaluation.questions)} held-out rows")
    columns = [
        ("exact match", "exact_match"),
        ("valid JSON", "valid_json"),
        ("intent", "intent_accuracy"),
        ("slot F1", "slot_f1"),
    ]
    for title, _ in columns:
        table.add_column(title, justify="right")
    table.add_column("stopped", justify="right")
    for arm in evaluation.arms:
        style = "bold green" if arm.name == "tuned" else ""
        cells = [_percent(getattr(arm.scores, field)) for _, field in columns]
        table.add_row(arm.name, *cells, _percent(arm.stop_rate), style=style)
    shown = [_example(evaluation, n) for n in _spread(len(evaluation.questions), examples)]
    return Group(table, *(Padding(example, (1, 0, 0, 0)) for example in shown))


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def _spread(total: int, count: int) -> list[int]:
    """`count` row numbers, evenly over the rows and the same every time."""
    return [n * total // count for n in range(min(count, total))]


def _example(evaluation: Evaluation, row: int) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(max_width=110, overflow="fold")
    grid.add_row("asked", Text(evaluation.questions[row], style="bold"))
    right = evaluation.references[row]
    for arm in evaluation.arms:
        answer = " ".join(arm.answers[row].split()) or "(nothing)"
        good = arm.answers[row].strip() == right
        grid.add_row(arm.name, Text(answer[:84] + "…" * (len(answer) > 84), style="green" if good else "red"))
    grid.add_row("right", Text(right, style="green"))
    return grid


def next_steps(commands: Iterable[tuple[str, str]]) -> RenderableType:
    """Commands to try, each with what it does."""
    grid = Table.grid(padding=(0, 3))
    for command, what in commands:
        grid.add_row(Text(command, style="bold cyan", no_wrap=True), Text(what, style="dim"))
    return Group(Text("Next", style="bold"), grid)


def rows_view(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> RenderableType:
    """A plain list of rows under a header."""
    table = Table(box=None, padding=(0, 3, 0, 0), header_style="bold")
    for name in header:
        table.add_column(name)
    for row in rows:
        table.add_row(*(str(cell) for cell in row))
    return table
