"""The rows of a recipe as a page: one file that needs nothing from elsewhere, to scroll and to search.

Rows are hostile: every text goes through `visible` and `escape`, and none of it stands inside a script. The page's
own script shows and hides rows, and finds the token under the pointer: a stretch of equally trained tokens is one
element, with "length:id" of each of its tokens in `data-ids` (length as the browser counts, in UTF-16 units).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape as _escape
from itertools import groupby
from pathlib import Path

from finetune.data_report import Report
from finetune.data_rows import Shown
from finetune.duplicates import Pair
from finetune.pieces import Piece, visible

EMBEDDED = 500  # rows on the page; a browser searches so many while one types

_LIGHT = {
    "back": "#f6f7f9", "paper": "#ffffff", "edge": "#e3e6ec", "ink": "#14181f", "soft": "#5d6675", "bar": "#3a74e8",
    "good": "#12824c", "bad": "#cc2b3b", "warn": "#a06200", "learn": "#0d7a46", "tint": "#dff5e8", "mark": "#8a3ff0",
    "find": "#ffe27a", "track": "#eef0f4",
}  # fmt: skip
_DARK = {
    "back": "#0b0e13", "paper": "#12161d", "edge": "#272d38", "ink": "#eef1f6", "soft": "#98a3b5", "bar": "#5b93ff",
    "good": "#46cf8b", "bad": "#ff7480", "warn": "#f4b740", "learn": "#7fe5b0", "tint": "#123526", "mark": "#c4a5ff",
    "find": "#6b5600", "track": "#222833",
}  # fmt: skip

_LEGEND = (
    '<pre class="legend"><b>trained</b>   <s>only read</s>   <i>special</i>   ⏎ line feed   '
    "point at a token for its id</pre>"
)


def data_html(report: Report, rows: int = EMBEDDED) -> str:
    """The page, with at most so many rows on it."""
    shown, chosen = _chosen(report, rows)
    names = ", ".join(report.taken.recipe.data.sources)
    parts = [
        f"<h1>{escape(names)}</h1>",
        f'<p class="soft">in the tokens of {escape(report.taken.recipe.model)}</p>',
        _tiles(report),
        *_refusal(report),
        *_warnings(report),
        f"<h2>How long they are</h2><div class='card'>{_histogram(report)}</div>",
        f"<h2>Where they come from</h2><div class='card'>{_sources(report)}</div>",
        f"<h2>What stands twice</h2><div class='card'>{_twice(report)}</div>",
        f"<h2>As the model sees them</h2><p class='soft'>{escape(chosen)}</p>{_LEGEND}",
        _controls(shown),
        "<section>",
        *map(_row, shown),
        "</section>",
        "<footer>Written by <code>finetune data</code>. <kbd>/</kbd> searches, <kbd>j</kbd> and <kbd>k</kbd> go from "
        "row to row, <kbd>Enter</kbd> lists a row's tokens.</footer>",
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; "
        "script-src 'unsafe-inline'\">\n"
        f"<title>Rows of {escape(names)}</title>\n<style>\n{_colours()}{_bundled('data_page.css')}</style>\n"
        "</head>\n<body>\n<main>\n"
        + "\n".join(parts)
        + f'\n</main>\n<div id="tip" hidden></div>\n<script>\n{_bundled("data_page.js")}</script>\n</body>\n</html>\n'
    )


def escape(text: str) -> str:
    """Any text for an element or an attribute: nothing in it can end either, hide, or turn the line round."""
    return _escape(visible(text), quote=True)


def _bundled(name: str) -> str:
    return (Path(__file__).parent / "bundled" / name).read_text(encoding="utf-8")


def _colours() -> str:
    def rule(palette: dict[str, str]) -> str:
        return ":root{" + "".join(f"--{name}:{colour};" for name, colour in palette.items()) + "}"

    return f"{rule(_LIGHT)}\n@media(prefers-color-scheme:dark){{{rule(_DARK)}}}\n"


# ------------------------------------------------------------------------------------------------------------ summary


def _tiles(report: Report) -> str:
    train, held = report.taken.train, len(report.taken.held or ())
    step = "packs" if report.taken.recipe.data.packing is True else "rows"
    tiles = [
        (f"{len(train):,}", "rows trained" + (f", {held:,} held out" if held else "")),
        (f"{train.rows.tokens:,}", "tokens an epoch"),
        (_percent(report.trained_share), f"of them trained, {train.rows.trained_tokens:,}"),
        (f"{report.steps:,}", f"steps an epoch, {report.taken.recipe.train.batch_size} {step} each"),
        (f"{report.taken.lengths['50']:,}", f"tokens in the median row, {report.taken.lengths['max']:,} at most"),
    ]
    return '<div class="tiles">' + "".join(
        f'<div class="tile"><b>{number}</b><span class="soft">{words}</span></div>' for number, words in tiles
    ) + "</div>"  # fmt: skip


def _refusal(report: Report) -> list[str]:
    if report.taken.refusal is None:
        return []
    said = report.taken.refusal
    lines = "<br>".join(escape(line) for line in said.what.strip().splitlines())
    return [
        '<h2 class="bad">Training would stop</h2>'
        f'<div class="card"><p>{lines}</p><p class="soft">{escape(said.hint)}</p></div>'
    ]


def _warnings(report: Report) -> list[str]:
    said = report.warnings()
    items = "".join(f"<li>{escape(line)}</li>" for line in said)
    return [f'<h2>What stands out</h2><div class="card"><ul>{items}</ul></div>'] if said else []


def _histogram(report: Report) -> str:
    """Lying bars, the longest rows below; what is longer than max_length is red."""
    most, lengths = report.taken.recipe.data.max_length, report.taken.lengths
    top = max(part.rows for part in report.histogram)
    drawn, y, marked = [], 20, False
    for part in report.histogram:
        if part.start > most and not marked:
            drawn.append(_limit(y, most, "data.max_length; what is below it is longer"))
            marked, y = True, y + 30
        name = f"{part.start:,}–{part.end:,}"
        share = _percent(part.rows / len(report.taken.train))
        width = max(620 * part.rows / top, 1.5 * bool(part.rows))
        fill, tip = "over" if part.start > most else "bar", f"{part.rows:,} rows of {name} tokens"
        bar = f'x="136" y="{y - 12}" height="16" rx="4"'
        drawn += [
            f'<text x="120" y="{y}" class="soft end">{name}</text><rect {bar} width="620" class="track"/>',
            f'<rect {bar} width="{width:.1f}" class="{fill}"><title>{tip}</title></rect>',
            f'<text x="836" y="{y}" class="end">{part.rows:,}</text>',
            f'<text x="910" y="{y}" class="soft end">{share}</text>',
        ]
        y += 26
    if not marked:
        drawn.append(_limit(y, most, "data.max_length; nothing is longer"))
        y += 30
    told = ", ".join(f"{part} % up to {lengths[part]:,}" for part in ("50", "90", "99"))
    drawn.append(f'<text x="136" y="{y + 2}" class="soft">{told}, the longest {lengths["max"]:,} tokens</text>')
    return f'<svg viewBox="0 0 930 {y + 14}" role="img"><title>Rows by their tokens</title>{"".join(drawn)}</svg>'


def _limit(y: int, most: int, said: str) -> str:
    return (
        f'<text x="120" y="{y + 1}" class="warn end">{most:,}</text>'
        f'<text x="136" y="{y + 1}" class="warn">◂ {said}</text>'
    )


def _sources(report: Report) -> str:
    rows = []
    for file in report.sources:
        told = f"{file['rows_read']:,} rows read, {file['trained']:,} trained, {file['held_out']:,} held out"
        rows.append((file["of"], escape(file["name"]), told))
    counts = report.taken.prepared.counts
    for found in (counts, counts["eval"] or {}):
        if "format" not in found:
            continue
        rows.append(("layout", escape(found["format"]), escape(found["format_reason"])))
        if found["rows_bad"]:
            kinds = ", ".join(f"{count:,} {escape(kind)}" for kind, count in found["rows_bad"].items())
            lines = "<br>".join(escape(line) for line in found["bad_rows"])
            rows.append(("bad", kinds, lines))
        if found["rows_overlong"]:
            rows.append((
                "too long", f"{found['rows_overlong']:,} rows",
                f"{found['rows_dropped']:,} dropped, {found['rows_cut']:,} cut, {found['rows_split']:,} split; "
                f"{found['tokens_lost']:,} tokens lost, {found['trained_tokens_lost']:,} of them trained",
            ))  # fmt: skip
    rows += [("note", "", escape(note)) for note in report.notes]
    body = "".join(f'<tr><th>{a}</th><td>{b}</td><td class="soft">{c}</td></tr>' for a, b, c in rows)
    return f"<table>{body}</table>"


def _twice(report: Report) -> str:
    copies = report.copies
    often = [f"{one} and {other}, {count:,} times" for count, one, other in copies.most]
    looked = copies.rows - copies.exact
    part = [f"{copies.looked:,} of {looked:,} rows looked at"] if copies.looked < looked else []
    rows = [
        ("exact copies", f"{copies.exact:,}", often),
        ("near copies", f"{copies.near:,}" + ("" if copies.complete else " or more"), [*_alike(copies.pairs), *part]),
        ("same question, another reply", f"{copies.replies:,}", []),
    ]
    for leak in report.leaks:
        said = (
            f"of {leak.rows:,} rows: {leak.same:,} whole, {leak.question:,} by their question, {leak.near:,} nearly"
        )
        rows.append((f"{leak.name} in training", f"{leak.leaked:,}", [said, *_alike(leak.pairs)]))
    body = "".join(
        f'<tr><th>{name}</th><td class="n {"good" if count == "0" else "warn"}">{count}</td>'
        f'<td class="soft">{"<br>".join(map(escape, said))}</td></tr>'
        for name, count, said in rows
    )
    return f"<table>{body}</table>"


def _alike(pairs: Iterable[Pair]) -> list[str]:
    return [f"{pair.one} and {pair.other}, {100 * pair.similarity:.0f} % alike" for pair in pairs]


def _percent(share: float) -> str:
    return "<0.1 %" if 0 < share < 0.0005 else f"{100 * share:.1f} %"


# --------------------------------------------------------------------------------------------------------------- rows


def _chosen(report: Report, most: int) -> tuple[list[Shown], str]:
    """The rows on the page, and in words which they are: of many, the copies, the longest and some held out first."""
    train, held = report.taken.train, report.taken.held
    total = len(train) + len(held or ())
    kept = list(range(len(held or ())))
    trained = list(range(len(train)))
    said = f"All {total:,} rows."
    if total > most:
        lengths, kept = train.rows.lengths, kept[: most // 5]
        longest = sorted(trained, key=lambda row: -int(lengths[row]))[: most // 10]
        first = [*longest, *sorted(report.copies.marked)[: most // 5], *trained[:most]]
        trained = sorted(list(dict.fromkeys(first))[: most - len(kept)])
        said = f"{most:,} of {total:,} rows: the longest, some copies and held-out ones, and the first."
    rows = [report.shown(train, row) for row in trained]
    return rows + [report.shown(held, row) for row in kept if held is not None], said


def _controls(rows: Sequence[Shown]) -> str:
    kinds = [("", "all"), ("trained", "trained"), ("held", "held out"), ("copy", "copies"), ("long", "long")]
    counts = {kind: sum(kind in _is(row).split() for row in rows) if kind else len(rows) for kind, _ in kinds}
    buttons = "".join(
        f'<button data-only="{kind}" aria-pressed="{"false" if kind else "true"}">{name} '
        f'<span class="soft">{counts[kind]:,}</span></button>'
        for kind, name in kinds
        if counts[kind]
    )
    box = '<input id="find" type="search" placeholder="Search the rows" aria-label="Search" autocomplete="off">'
    return f'<div class="tools">{box}{buttons}<span id="said" class="soft" role="status"></span></div>'


def _is(row: Shown) -> str:
    return " ".join([row.side.split()[0], *row.marks])


def _row(row: Shown) -> str:
    tags = "".join(f'<span class="tag {mark}">{mark}</span>' for mark in row.marks)
    numbers = f"{row.side}, {len(row.row.input_ids):,} tokens, {row.trained:,} give a loss"
    parts = groupby(row.pieces, key=lambda piece: (piece.trained, piece.special))
    text = "".join(_part(list(pieces), trained, special) for (trained, special), pieces in parts)
    return (
        f'<article class="row" tabindex="0" data-is="{_is(row)}">'
        f"<header><b>{escape(row.place)}</b><span>{numbers}</span>{tags}"
        '<button class="ids" title="Its tokens (Enter)">ids</button></header>'
        f"<pre>{text}</pre></article>"
    )


def _part(pieces: Sequence[Piece], trained: bool, special: bool) -> str:
    """A stretch of tokens that are alike: read (s), trained (b), special (i), special and trained (u)."""
    tag = {(False, False): "s", (True, False): "b", (False, True): "i", (True, True): "u"}[trained, special]
    ids = [
        f"{_units(visible(piece.text)) if not nth else 0}:{number}"
        for piece in pieces
        for nth, number in enumerate(piece.ids)
    ]
    text = "".join(escape(piece.text) for piece in pieces)
    return f'<{tag} data-ids="{" ".join(ids)}">{text}</{tag}>'


def _units(text: str) -> int:
    """Length as JavaScript counts it."""
    return len(text.encode("utf-16-le", "surrogatepass")) // 2


__all__ = ["EMBEDDED", "data_html"]
