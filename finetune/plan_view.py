"""A plan, a comparison and a sharding as pictures in a terminal. Every function returns a renderable, prints nothing.

plan_view       where the memory of a device goes, when, why, and what would make it fit
compare_view    one model in all ways of training it, against the common cards
sharding_view   what each of several GPUs holds
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.constrain import Constrain
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from finetune import plan_page as words
from finetune.compare import Row
from finetune.facts import Facts
from finetune.fit import Fit
from finetune.memory import BUCKETS
from finetune.method import storage_bytes
from finetune.plan import CARDS, Plan
from finetune.plan_page import gb, short
from finetune.recipe import QLoRA
from finetune.sharding import STRATEGIES, per_gpu
from finetune.tensors import dtype_bytes

_COLOURS = {
    "weights": "blue", "gradients": "yellow", "optimizer": "magenta", "activations": "green", "loss": "cyan",
    "temporary": "dark_orange", "outside": "bright_black",
}  # fmt: skip
_WIDEST = 110  # columns; longer bars and lines are harder to read
_EIGHTHS = " ▏▎▍▌▋▊▉"


# ------------------------------------------------------------------------------------------------------------- bars


class _Bar:
    """One bar as long as its share of the column, to an eighth of a cell; what is there at all is seen."""

    def __init__(self, share: float, style: str) -> None:
        self.share, self.style = share, style

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        eighths = max(round(8 * options.max_width * self.share), 1) if self.share > 0 else 0
        yield Text("█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip(), style=self.style, no_wrap=True)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(8, options.max_width)


class _Stack:
    """Buckets end to end in their colours, against `full` bytes; what lies beyond `limit` is drawn thinner."""

    def __init__(self, buckets: Mapping[str, int], full: int, limit: int) -> None:
        self.buckets, self.full, self.limit = buckets, full, limit

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width, end, before, bar = options.max_width, 0, 0, Text(no_wrap=True)
        edge = round(width * self.limit / self.full)
        for bucket, size in self.buckets.items():
            end += size
            cell = round(width * end / self.full)
            inside = max(0, min(cell, edge) - before)
            bar.append("█" * inside + "▒" * (cell - before - inside), style=_COLOURS[bucket])
            before = cell
        yield bar.append("░" * (min(width, edge) - before), style="bright_black")

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(10, options.max_width)


class _Mark:
    """Says where a device ends under a bar that is longer than it."""

    def __init__(self, full: int, limit: int) -> None:
        self.full, self.limit = full, limit

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        said = f"▲ the device ends here, {gb(self.limit)}"
        before = round(options.max_width * self.limit / self.full) - 1
        if before + len(said) > options.max_width:
            said = f"{gb(self.limit)}, the device ends here ▲"
            before -= len(said) - 1
        yield Text(" " * max(before, 0) + said, style="red")


class _FirstThatFits:
    """The first of several forms that needs no more columns than there are; else the last."""

    def __init__(self, *forms: RenderableType) -> None:
        self.forms = forms

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        unlimited = options.update_width(1000)
        fitting = (f for f in self.forms if Measurement.get(console, unlimited, f).maximum <= options.max_width)
        yield next(fitting, self.forms[-1])


def _grid(*columns: str, gap: int = 2) -> Table:
    """A table without lines. Columns: "left" and "right" keep their lines whole, "wraps" may break them, "bar" takes
    what room is left; `right 9` is at least so wide."""
    table = Table(box=None, padding=(0, gap, 0, 0), show_header=False, pad_edge=False, expand="bar" in columns)
    for column in columns:
        kind, _, least = column.partition(" ")
        side, keeps = ("right" if kind == "right" else "left"), kind in ("left", "right")
        table.add_column(
            justify=side,  # type: ignore[arg-type]
            no_wrap=keeps,
            ratio=1 if kind == "bar" else None,
            min_width=int(least) if least else None,
        )
    return table


def _table(gap: int, *columns: tuple[str | Text, str]) -> Table:
    """A table without lines under (title, side) of each column."""
    table = Table(box=None, padding=(0, gap, 0, 0), header_style="", pad_edge=False)
    for title, side in columns:
        table.add_column(Text(title, style="dim") if isinstance(title, str) else title, justify=side, no_wrap=True)  # type: ignore[arg-type]
    return table


def _dot(bucket: str) -> Text:
    return Text("■", style=_COLOURS[bucket])


def _heading(said: str, aside: str = "") -> Text:
    return Text.assemble((said, "bold"), (f"  {aside}" if aside else "", "dim"))


# ------------------------------------------------------------------------------------------------------------- plan


def plan_view(
    plan: Plan, fit: Fit | None = None, rows: int | None = None, longest: int | None = None
) -> RenderableType:
    """Where the memory goes, when, why, and what would make it fit.

    `rows` is the largest micro-batch and `longest` the longest single row that fit (`finetune.fit`).
    """
    fitting = words.would_fit(plan, rows, longest)
    parts: list[list[RenderableType]] = [
        [_header(plan), "", *_whole(plan)],
        [_bucket_bars(plan)],
        [_heading("One step", "what torch holds, without what lies outside"), _phase_bars(plan)],
        [_heading("What it is made of", f"{words.UNITS}; --json has every line"), _lines(plan)],
        _choices(plan),
        [_heading("What is planned"), *_planned(plan)],
        [Text(fitting, style="bold")] if fitting else [],
        _changes(fit) if fit is not None else [],
    ]
    shown = [Group(*part) for part in parts if part]
    return Constrain(Group(shown[0], *(Padding(part, (1, 0, 0, 0)) for part in shown[1:])), _WIDEST)


def _header(plan: Plan) -> Text:
    return Text.assemble(
        (plan.model, "bold"), f"  {words.NAMES[plan.method]}, {plan.parameters:,} parameters, ",
        (f"{plan.trainable:,} trained", "bold"), f" ({words.trained_share(plan)})",
    )  # fmt: skip


def _whole(plan: Plan) -> list[RenderableType]:
    """The device's memory from end to end, and the verdict."""
    full = max(plan.room, plan.total)
    bar = _Stack(dict(plan.buckets()), full, plan.room)
    said = Text.assemble(
        (f"~{gb(plan.total)}", "bold"), f" {words.place(plan)}: ",
        (words.verdict(plan), "bold green" if plan.fits else "bold red"),
    )  # fmt: skip
    return [bar, bar, *([] if plan.fits else [_Mark(full, plan.room)]), said]


def _bucket_bars(plan: Plan) -> Table:
    table = _grid("left", "left 14", "right 9", "right 6", "bar")
    for bucket, size in plan.buckets().items():
        share, sign = size / plan.total, "~" if words.about(plan, bucket) else ""
        table.add_row(
            _dot(bucket), bucket, Text(sign + gb(size), style="bold"), words.percent(share),
            _Bar(share, _COLOURS[bucket]),
        )  # fmt: skip
    return table


def _phase_bars(plan: Plan) -> Table:
    """The most of each phase, on the scale of the buckets."""
    peak, what = words.peak_of(plan)
    table = _grid("left", "left 14", "right 9", "right 6", "bar")
    for phase, size in plan.account.phases.items():
        style, mark = ("bold", "peak") if phase == peak else ("", "")
        bar = _Bar(size / plan.total, style or "bright_black")
        table.add_row(" ", words.phase_name(phase), Text(gb(size), style=style), Text(mark, style=style), bar)
        if mark:
            table.add_row("", "", "", "", Text(f"at: {what}", style="dim"))
    return table


def _lines(plan: Plan) -> Table:
    table = _grid("left", "wraps", "right 9", "wraps")
    table.columns[1].max_width = 34
    for part in words.parts_of(plan):
        told = _told(part)
        alone = ": ".join(filter(None, (told[0][0] * (told[0][0] != part.bucket), told[0][2])))
        about = words.ABOUT[part.bucket] if len(told) > 1 else alone
        sign = "~" if words.about(plan, part.bucket) else ""
        size = Text(sign + gb(part.bytes), style="bold")
        table.add_row(_dot(part.bucket), Text(part.bucket, style="bold"), size, Text(about, style="dim"))
        for name, bytes_, note in told if len(told) > 1 else []:
            table.add_row("", Text(name), bytes_, Text(note, style="dim"))
    return table


def _told(part: words.Part) -> list[tuple[str, str, str]]:
    """(name, bytes, what stands beside it) of the lines and of the smaller ones together."""
    told = [(line.name, ("" if line.exact else "~") + gb(line.alive), words.beside(line)) for line in part.lines]
    if part.smaller:
        name, names = words.told_together(part.smaller)
        told.append((name, gb(sum(line.alive for line in part.smaller)), names))
    return told


def _choices(plan: Plan) -> list[RenderableType]:
    if not plan.choices:
        return []
    table = _grid("left", "left", "wraps")
    for field, value, because in words.choices_of(plan):
        table.add_row(Text(field, style="cyan"), Text(value), Text(because, style="dim"))
    return [_heading("What was left to the plan"), table]


def _planned(plan: Plan) -> list[RenderableType]:
    table = _grid("left", "wraps")
    told = (
        ("pass", words.modelled), ("rows", words.rows_in_words), ("speed", words.speed_in_words),
        ("host", words.host_in_words), ("disk", words.disk_in_words),
    )  # fmt: skip
    for name, said in told:
        table.add_row(Text(name, style="cyan"), Text(said(plan).replace("`", "")))
    return [table] if plan.lengths is None else [table, "", _histogram(plan.lengths.histogram())]


def _histogram(bins: Sequence[tuple[int, int]], height: int = 4) -> Table:
    """Rows by their tokens, as standing bars of `height` lines."""
    table = _grid("left", *["left"] * len(bins), gap=1)
    top = max(count for _, count in bins) or 1
    wide = max(6, *(len(f"{number:,}") for pair in bins for number in pair))
    eighths = [max(round(8 * height * count / top), 1) if count else 0 for _, count in bins]
    for line in reversed(range(height)):
        cells = (" ▁▂▃▄▅▆▇█"[max(0, min(8, tall - 8 * line))] * wide for tall in eighths)
        table.add_row("", *(Text(cell, style="blue") for cell in cells))
    table.add_row(Text("rows", style="dim"), *(f"{count:,}".center(wide) for _, count in bins))
    ends = (Text(f"{end:,}".center(wide), style="dim") for end, _ in bins)
    table.add_row(Text("tokens up to", style="dim"), *ends)
    return table


def _changes(fit: Fit) -> list[RenderableType]:
    """What was tried, the cheapest first, with what it takes marked, and the memory after it."""
    table = _table(2, ("", "left"), ("change", "left"), ("alone", "right"), ("together", "right"))
    table.add_column(Text("what it costs", style="dim"))
    for change, takes in words.needed(fit):
        value = (f" → {words.as_written(change.value)}", "bold" if takes else "")
        together = Text(gb(change.together), style="green" if change.fits else "red")
        table.add_row(
            Text("✓" if takes else "", style="bold green"), Text.assemble((change.field, "cyan"), value),
            gb(change.alone), together, Text(change.cost, style="dim"),
        )  # fmt: skip
    after, full = fit.plan, max(fit.plan.room, fit.plan.total)
    told = Text(words.fit_in_words(fit), style="bold green" if after.fits else "bold red")
    write = Text.assemble("Write it: ", ("finetune plan RECIPE --fit FILE", "bold cyan"))
    return [
        _heading("What would make it fit, the cheapest first", "alone, and with those above"),
        *([table] if fit.changes else []),
        "",
        _Stack(dict(after.buckets()), full, after.room),
        told,
        *([write] if after.fits else []),
    ]


# ---------------------------------------------------------------------------------------------------------- compare


def compare_view(rows: Sequence[Row], facts: Facts) -> RenderableType:
    """One line for each way of training, with what it holds and the cards it fits on; as wide as there is room."""
    forms = [
        _compared(rows, gap=2, cards=True, bars=True),
        _compared(rows, gap=2, cards=True),
        _compared(rows, gap=1, cards=True),
        _compared(rows, gap=2),
        _compared(rows, gap=1),
        _compared(rows, gap=1, share=False),
    ]
    head = Text.assemble((facts.model, "bold"), f"  {facts.parameters:,} parameters; bytes in GB, 1 GB = 1e9 bytes")
    below = Group(Text(words.compare_note(rows), style="dim"), "", *_rules(rows, facts))
    return Group(head, "", _FirstThatFits(*forms), "", Constrain(below, _WIDEST))


def _compared(rows: Sequence[Row], *, gap: int, cards: bool = False, bars: bool = False, share: bool = True) -> Table:
    """`cards`: a column for each card, else the smallest that holds it; `bars`: the buckets as a bar, too."""
    ranks = len({row.rank for row in rows if row.rank}) > 1
    numbers = ["rank"] * ranks + ["trained"] + ["share"] * share + ["file"]
    static = zip(("weights", "grads", "optim", "rest"), (*words.STATIC, "activations"), strict=True)
    table = _table(
        gap,
        ("method", "left"),
        ("targets", "left"),
        *((title, "right") for title in numbers),
        *((Text(title, style=_COLOURS[bucket]), "right") for title, bucket in static),
        ("total", "right"),
        *((str(title), "right") for title in (CARDS if cards else ["card"])),
    )
    if bars:
        table.add_column("", width=20)
    before, largest = "", max(row.plan.total for row in rows)
    for row in rows:
        plan, buckets = row.plan, row.plan.buckets()
        held = [buckets[bucket] for bucket in words.STATIC]
        name = Text("" if row.method == before else row.method, style="bold")
        before = row.method
        stack = [_Stack(dict(buckets), largest, plan.total)] if bars else []
        table.add_row(
            name,
            Text(row.targets),
            *[str(row.rank or "")] * ranks,
            words.counted(plan.trainable),
            *[words.trained_share(plan)] * share,
            short(row.adapter_file) if row.adapter_file else "–",
            *(words.three(size / 1e9) for size in (*held, plan.total - sum(held))),
            Text(words.three(plan.total / 1e9), style="bold"),
            *(_ticks(row) if cards else [_smallest(row)]),
            *stack,
        )
    return table


def _ticks(row: Row) -> list[Text]:
    return [Text("↻", style="yellow") if card in row.recomputing else _tick(card in row.cards) for card in CARDS]


def _tick(fits: bool) -> Text:
    return Text("✓", style="green") if fits else Text("✗", style="red")


def _smallest(row: Row) -> Text:
    if row.recomputing and (not row.cards or min(row.recomputing) < min(row.cards)):
        return Text(f"{min(row.recomputing)} GB↻", style="yellow")
    return Text(f"{min(row.cards)} GB", style="green") if row.cards else Text("none", style="red")


def _rules(rows: Sequence[Row], facts: Facts) -> list[Text]:
    """Bytes per parameter of the three methods, and how papers count."""
    n = facts.parameters
    each = next((dtype_bytes(row.plan.path.weights) for row in rows if row.method == "lora"), 2)
    stored = storage_bytes(QLoRA(kind="qlora"), facts, "bfloat16")
    packed = (stored.packed + stored.constants) / max(stored.packed_parameters, 1)
    rule = Text.assemble(
        ("Before activations", "bold"),
        f", with N = {words.counted(n)} parameters and P trained: full 16 N = {short(16 * n)}; "
        f"LoRA {each:g} N + 16 P, with {each:g} N = {short(each * n)}; QLoRA {packed:.3f} bytes for each of the "
        f"{words.counted(stored.packed_parameters)} in Linear layers and 2 for the others, {short(stored.total)}, "
        "+ 16 P.",
    )
    papers = Text(
        "Papers often count everything in 16 bits: weights, gradients and two moments are then "
        f"8 N = {short(8 * n)}, without gradients 6 N = {short(6 * n)}, frozen weights 2 N = {short(2 * n)}.",
        style="dim",
    )
    if n > 1e11:
        papers.append(" The LoRA paper's 1.2 TB for GPT-3 175B lies between 6 N and 8 N; its 350 GB are 2 N.")
    return [rule, papers]


# ---------------------------------------------------------------------------------------------------------- sharding


def sharding_view(plan: Plan, facts: Facts, gpus: int) -> RenderableType:
    """What one of `gpus` GPUs holds of each bucket, by strategy, with one GPU alone for comparison."""
    lines = {"one GPU": per_gpu(plan, facts, "ddp", 1)}
    lines |= {strategy: per_gpu(plan, facts, strategy, gpus) for strategy in STRATEGIES}
    held = {
        name: {str(bucket): sum(line.alive for line in parts if line.bucket == bucket) for bucket in BUCKETS}
        for name, parts in lines.items()
    }
    forms = (_sharded(plan, held, gap=gap, bars=bars) for gap, bars in ((2, True), (2, False), (1, False)))
    head = Text.assemble((plan.model, "bold"), f"  {words.NAMES[plan.method]} on {gpus} GPUs, GB (1e9 bytes) on each")
    note = Text(
        "ddp holds everything on each GPU. zero2 shares gradients and optimizer; zero3 and fsdp2 share the weights "
        f"too and gather a layer while it runs. ✓ fits into {gb(plan.room)}, ✗ does not.",
        style="dim",
    )
    return Group(head, "", _FirstThatFits(*forms), "", Constrain(note, _WIDEST))


def _sharded(plan: Plan, held: Mapping[str, Mapping[str, int]], *, gap: int, bars: bool) -> Table:
    titles = ((Text(bucket, style=_COLOURS[bucket]), "right") for bucket in BUCKETS)
    table = _table(gap, ("", "left"), *titles, ("total", "right"), ("", "left"))
    if bars:
        table.add_column("", width=36)
    full = max(plan.room, *(sum(sizes.values()) for sizes in held.values()))
    for name, sizes in held.items():
        total = sum(sizes.values())
        numbers = (words.three(size / 1e9) for size in sizes.values())
        stack = [_Stack(sizes, full, plan.room)] if bars else []
        bold = (Text(name, style="bold"), Text(words.three(total / 1e9), style="bold"))
        table.add_row(bold[0], *numbers, bold[1], _tick(total <= plan.room), *stack)
    return table


__all__ = ["compare_view", "plan_view", "sharding_view"]
