"""The rows of a recipe in a terminal. Every function returns a renderable, prints nothing.

data_view   what is trained, how long, what stands twice, what stands out, and the first rows token by token
row_view    one row: what stands in the file, what becomes of it, and every token with its label
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rich.bar import Bar as Filled
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.constrain import Constrain
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from finetune.chat import IGNORE
from finetune.data_report import Bin, Report
from finetune.data_rows import Asked, Shown
from finetune.duplicates import Copies, Leak, Pair
from finetune.pieces import Piece, visible

_WIDEST = 110  # columns; longer lines are harder to read
_LISTED = 10  # bad rows in words
_RAW = 4000  # characters of a bad row
_TRAINED, _ALSO, _READ, _SPECIAL = "green", "bold green", "dim", "magenta"
_OPEN, _CLOSE = "⟦", "⟧"  # around what is trained, where there is no colour


def data_view(report: Report, first: int = 3) -> RenderableType:
    """All numbers, and so many of the first rows."""
    rows = report.first(first)
    warnings = report.warnings()
    parts: list[list[RenderableType]] = [
        [_header(report), _totals(report)],
        [_heading("Where they come from"), _sources(report)],
        [_heading("How long they are", "rows by their tokens"), _histogram(report), _percentiles(report)],
        [_heading("What stands twice"), _twice(report.copies, report.leaks)],
        [_heading("What stands out"), _warnings(warnings)] if warnings else [],
        [_heading("As the model sees them"), *_rows(rows)] if rows else [],
        [Text(f"· {visible(note)}", style="dim") for note in report.notes],
    ]
    shown = [Group(*part) for part in parts if part]
    return Constrain(Group(shown[0], *(Padding(part, (1, 0, 0, 0)) for part in shown[1:])), _WIDEST)


def row_view(asked: Asked) -> RenderableType:
    """One row of the file."""
    parts: list[RenderableType] = [
        Text.assemble(
            (f"row {asked.number:,}", "bold"), f"  {visible(asked.place)}  ", (visible(asked.verdict), "dim")
        )
    ]
    if asked.messages:
        table = _grid("left", "wraps")
        for message in asked.messages:
            rest = {name: value for name, value in message.items() if name not in ("role", "content") and value}
            said = str(message["content"]) + (f"\n{rest}" if rest else "")
            table.add_row(Text(message["role"], style="cyan"), Text(visible(said)))
        if asked.tools:
            table.add_row(Text("tools", style="cyan"), Text(visible(str(asked.tools)), style="dim"))
        parts += ["", table]
    elif asked.raw is not None:
        parts += ["", Text(visible(json.dumps(asked.raw, ensure_ascii=False, default=str)[:_RAW]))]
    for shown in asked.shown:
        parts += ["", *_rows([shown]), "", _Tokens(shown)]
    return Constrain(Group(*parts), _WIDEST)


# ------------------------------------------------------------------------------------------------------------ numbers


def _header(report: Report) -> Text:
    taken = report.taken
    names = ", ".join(taken.recipe.data.sources)
    return Text.assemble((visible(names), "bold"), f"  in the tokens of {visible(taken.recipe.model)}")


def _totals(report: Report) -> Text:
    taken, train = report.taken, report.taken.train
    held = f", {len(taken.held):,} held out" if taken.held else ""
    packed, batch = taken.recipe.data.packing is True, taken.recipe.train.batch_size
    each = f"packs of up to {taken.recipe.data.max_length:,} tokens" if packed else "rows"
    return Text.assemble(
        (f"{len(train):,} row{'s' * (len(train) != 1)}", "bold"), f" trained{held}; ",
        (f"{train.rows.tokens:,} tokens", "bold"), f" an epoch, {train.rows.trained_tokens:,} of them ",
        (f"trained ({_percent(report.trained_share)})", f"bold {_TRAINED}"), "\n",
        (f"{report.steps:,} step{'s' * (report.steps != 1)}", "bold"), f" an epoch, of {batch:,} {each} each",
    )  # fmt: skip


def _warnings(said: Sequence[str]) -> Table:
    table = _grid("left", "wraps", gap=1)
    for line in said:
        table.add_row(Text("▲", style="yellow"), Text(visible(line)))
    return table


def _sources(report: Report) -> Table:
    counts = report.taken.prepared.counts
    table = _grid("left", "wraps")
    for name, found in (("data.train", counts), ("data.eval", counts["eval"] or {})):
        files = [file for file in report.sources if file["of"] == name]
        for number, file in enumerate(files):
            kinds = {"trained": "trained", "held_out": "held out"}
            told = [f"{file['rows_read']:,} rows read"]
            told += [f"{file[key]:,} {word}" for key, word in kinds.items() if file[key]]
            title = Text(name if not number else "", style="cyan")
            table.add_row(title, Text.assemble((visible(file["name"]), "bold"), f"  {', '.join(told)}"))
        if files:
            table.add_row("", Text(f"layout {found['format']}: {found['format_reason']}", style="dim"))
            _add_bad(table, found)
            _add_long(table, found)
    if report.longer:
        most = report.taken.recipe.data.max_length
        said = f"{_are(report.longer)} longer than data.max_length {most:,}, and data.overlong is error"
        table.add_row(Text("too long", style="red"), Text(said))
    return table


def _add_bad(table: Table, counts: dict[str, Any]) -> None:
    if not counts["rows_bad"]:
        return
    total = sum(counts["rows_bad"].values())
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in counts["rows_bad"].items())
    table.add_row(Text("bad", style="red"), Text(f"{total:,}: {kinds}"))
    for line in counts["bad_rows"][:_LISTED]:
        table.add_row("", Text(visible(line), style="dim"))
    if more := total - min(_LISTED, len(counts["bad_rows"])):
        table.add_row("", Text(f"and {more:,} more", style="dim"))


def _add_long(table: Table, counts: dict[str, Any]) -> None:
    if not counts["rows_overlong"]:
        return
    kinds = {"rows_dropped": "dropped", "rows_cut": "cut", "rows_split": "split"}
    told = ", ".join(f"{counts[key]:,} {word}" for key, word in kinds.items() if counts[key])
    table.add_row(
        Text("too long", style="yellow"),
        Text(
            f"{_are(counts['rows_overlong'])} longer than {counts['max_length']:,} tokens, the longest "
            f"{counts['longest_read']:,} ({visible(str(counts['longest_at']))}): {told}; "
            f"{counts['tokens_lost']:,} tokens lost, {counts['trained_tokens_lost']:,} of them trained"
        ),
    )


def _histogram(report: Report) -> Table:
    """A bar for each bin; what lies beyond max_length is red."""
    most, top = report.taken.recipe.data.max_length, max(part.rows for part in report.histogram)
    table = _grid("right", "right", "right", "bar")
    marked = False
    for part in report.histogram:
        beyond = part.start > most
        if beyond and not marked:
            table.add_row(*_mark(most))
            marked = True
        share = part.rows / len(report.taken.train)
        table.add_row(
            Text(_range(part), style="dim"), f"{part.rows:,}", Text(_percent(share), style="dim"),
            _Row(part.rows / top, "red" if beyond else "blue"),
        )  # fmt: skip
    if not marked:
        table.add_row(*_mark(most, last=True))
    return table


def _mark(most: int, last: bool = False) -> tuple[RenderableType, ...]:
    said = "data.max_length; nothing is longer" if last else "data.max_length; what is below it is longer"
    return Text(f"{most:,}", style="yellow"), "", "", Text(f"◂ {said}", style="yellow")


def _range(part: Bin) -> str:
    return f"{part.start:,}–{part.end:,}" if part.start < part.end else f"{part.end:,}"


class _Row:
    """A bar of one colour; what is there at all is seen."""

    def __init__(self, share: float, style: str) -> None:
        self.share, self.style = share, style

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        least = 1 / (8 * options.max_width) if self.share else 0
        yield Filled(1, 0, max(self.share, least), color=self.style)


def _percentiles(report: Report) -> Text:
    lengths = report.taken.lengths
    told = [("half of the rows up to ", "50"), ("90 % up to ", "90"), ("99 % up to ", "99"), ("the longest ", "max")]
    text = Text()
    for number, (words, key) in enumerate(told):
        text.append(", " * bool(number) + words, style="dim").append(f"{lengths[key]:,}", style="bold")
    return text.append(" tokens", style="dim")


def _twice(copies: Copies, leaks: Sequence[Leak]) -> Table:
    table = _grid("left", "right", "wraps")
    often = "\n".join(f"{visible(one)} and {visible(other)}, {count:,} times" for count, one, other in copies.most)
    looked = f"\n{copies.looked:,} of {copies.rows - copies.exact:,} rows looked at" * (
        copies.looked < copies.rows - copies.exact
    )
    at_least = "" if copies.complete else "at least "
    _add_found(table, "exact copies", copies.exact, often)
    _add_found(table, "near copies", copies.near, _alike(copies.pairs) + looked, at_least)
    if copies.replies:
        _add_found(table, "same question", copies.replies, "rows whose question has another reply in another row")
    for leak in leaks:
        said = (
            f"of {leak.rows:,} rows: {leak.same:,} whole, {leak.question:,} by their question, {leak.near:,} nearly"
        )
        alike = _alike(leak.pairs)
        _add_found(table, f"{leak.name} in training", leak.leaked, said + (f"\n{alike}" if alike else ""))
    return table


def _add_found(table: Table, name: str, count: int, said: str, before: str = "") -> None:
    number = Text(f"{before}{count:,}", style="bold yellow" if count else "bold green")
    table.add_row(Text(name), number, Text(said, style="dim"))


def _alike(pairs: Iterable[Pair]) -> str:
    return "\n".join(f"{visible(p.one)} and {visible(p.other)} ({100 * p.similarity:.0f} % alike)" for p in pairs)


# --------------------------------------------------------------------------------------------------------------- rows


def _rows(rows: Sequence[Shown]) -> Iterator[RenderableType]:
    yield _Legend()
    for shown in rows:
        marks = "".join(f", {mark}" for mark in shown.marks)
        said = f"{shown.side}{marks}, {len(shown.row.input_ids):,} tokens, {shown.trained:,} give a loss"
        yield Text.assemble("\n", (visible(shown.place), "bold"), (f"  {said}", "dim"))
        yield Padding(_Pieces(shown.pieces), (0, 0, 0, 2))


def _plain(console: Console) -> bool:
    """Whether colour cannot say what is trained."""
    return console.no_color or console.color_system is None


class _Legend:
    """What the colours mean, or the brackets where there are none."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if _plain(console):
            yield Text(f"{_OPEN}trained{_CLOSE}, the rest is only read; ⏎ is a line feed")
            return
        yield Text.assemble(
            ("trained", _TRAINED), " ", ("token", _ALSO), " ", ("by", _TRAINED), " ", ("token", _ALSO),
            ("   only read", _READ), "   ", ("special", _SPECIAL), ("   ⏎ line feed", _READ),
        )  # fmt: skip


class _Pieces:
    """A row as coloured text: two greens by turns show where one trained token ends and the next begins."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self.pieces = pieces

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        plain, inside, text = _plain(console), False, Text(overflow="fold")
        for number, piece in enumerate(self.pieces):
            if plain and piece.trained != inside:
                text.append(_OPEN if piece.trained else _CLOSE)
                inside = piece.trained
            text.append(visible(piece.text), style=_style(piece, number))
        text.rstrip()  # the last line feed is marked; an empty line behind it says nothing
        yield text.append(_CLOSE) if inside else text


def _style(piece: Piece, number: int) -> str:
    if piece.special:
        return f"bold {_SPECIAL}" if piece.trained else f"dim {_SPECIAL}"
    return (_TRAINED, _ALSO)[number % 2] if piece.trained else _READ


class _Tokens:
    """Every token: its place, its id, whether it gives a loss, its text; in as many columns as there is room for."""

    def __init__(self, shown: Shown) -> None:
        self.cells: list[tuple[RenderableType, ...]] = []
        for number, piece in enumerate(shown.pieces):
            text = visible(piece.text).replace(" ", "·").replace("\n", "")
            for nth, token in enumerate(piece.ids):
                at = len(self.cells)
                loss = at > 0 and shown.row.labels[at] != IGNORE
                said = Text(text if not nth else "″", style=_style(piece, number))
                self.cells.append((Text(f"{at}", style="dim"), f"{token}", Text("✓" * loss, style=_TRAINED), said))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        unlimited = options.update_width(1000)
        forms = map(self._table, (5, 4, 3, 2))
        fits = (form for form in forms if Measurement.get(console, unlimited, form).maximum <= options.max_width)
        yield next(fits, self._table(1))

    def _table(self, columns: int) -> Table:
        height = -(-len(self.cells) // columns)
        table = _grid(*["right", "right", "left", "left"] * columns)
        for line in range(height):
            table.add_row(*(cell for four in self.cells[line::height] for cell in four))
        return table


def _grid(*columns: str, gap: int = 2) -> Table:
    """A table without lines: "left" and "right" keep lines whole, "wraps" may break them, "bar" takes the rest."""
    table = Table(box=None, padding=(0, gap, 0, 0), show_header=False, pad_edge=False, expand="bar" in columns)
    for column in columns:
        side: Any = "right" if column == "right" else "left"
        table.add_column(justify=side, no_wrap=column in ("left", "right"), ratio=1 if column == "bar" else None)
    return table


def _heading(said: str, aside: str = "") -> Text:
    return Text.assemble((said, "bold"), (f"  {aside}" if aside else "", "dim"))


def _are(rows: int) -> str:
    return "1 row is" if rows == 1 else f"{rows:,} rows are"


def _percent(share: float) -> str:
    return "<0.1 %" if 0 < share < 0.0005 else f"{100 * share:.1f} %"


__all__ = ["data_view", "row_view"]
