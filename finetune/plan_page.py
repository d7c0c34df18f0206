"""A plan as a drawing (`plan_svg`) and as a page (`plan_html`), each one file that needs nothing from elsewhere.

Both follow the reader's choice of light or dark. What a picture of a plan says (which lines stand alone, what is said
beside them, the verdict) is settled in the first half, for the terminal's `plan_view` as well.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from finetune.memory import BUCKETS, Line
from finetune.paths import in_words
from finetune.plan import CARDS, Plan

if TYPE_CHECKING:
    from finetune.compare import Row
    from finetune.fit import Change, Fit

UNITS = "1 GB = 1e9 bytes; ~ marks an estimate"
NAMES = {"qlora": "QLoRA", "lora": "LoRA", "full": "full fine-tuning"}
ABOUT = {
    "weights": "frozen, trained, and copies in other types",
    "gradients": "one number for each trained weight",
    "optimizer": "what the optimizer remembers of each trained weight",
    "activations": "what the forward pass leaves for the backward pass",
    "loss": "the output head and the loss",
    "temporary": "what comes and goes inside a step",
    "outside": "driver, libraries, the allocator's spare pieces",
}
STATIC = ("weights", "gradients", "optimizer")
_SMALL = 0.005  # of the total: lines below are told together

# ---------------------------------------------------------------------------------------------- what a picture says


def gb(count: float) -> str:
    """Bytes in GB (1e9) with two digits after the point; a trace is not shown as nothing."""
    return "<0.01 GB" if 0 < count < 5e6 else f"{count / 1e9:,.2f} GB"


def short(count: float) -> str:
    """Bytes with three digits in the largest unit that keeps them: 6.39 MB, 13.5 GB, 1.4 TB."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{three(count / size)} {unit}"
    return f"{count:.0f} bytes"


def counted(number: float) -> str:
    """A number of parameters with three digits: 20.8 M, 6.74 B."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{three(number / size)} {unit}"
    return f"{number:.0f}"


def three(number: float) -> str:
    """A number with three digits."""
    return f"{number:,.{0 if number >= 99.95 else 1 if number >= 9.995 else 2}f}"


def percent(share: float) -> str:
    """A share of the whole; a trace is not shown as nothing."""
    return "<0.1 %" if 0 < share < 0.0005 else f"{100 * share:.1f} %"


def trained_share(plan: Plan) -> str:
    """Trained parameters of all, with three digits."""
    return f"{100 * plan.trainable / plan.parameters:.3g} %"


def about(plan: Plan, bucket: str) -> bool:
    """Whether a bucket's bytes are an estimate."""
    return any(not line.exact and line.alive for line in plan.lines if line.bucket == bucket)


@dataclass(frozen=True)
class Part:
    """One bucket as it is told: its bytes at the peak, the lines that stand alone, and the others together."""

    bucket: str
    bytes: int
    lines: tuple[Line, ...]
    smaller: tuple[Line, ...]


def parts_of(plan: Plan) -> list[Part]:
    """The buckets that have lines; lines below half a percent of the total are told together.

    A line that is not wholly alive at the peak stands alone, since that is news.
    """
    parts = []
    for bucket, total in plan.buckets().items():
        lines = lines_of(plan, bucket)
        small = [line for line in lines if line.alive < _SMALL * plan.total and line.alive == line.bytes]
        if len(small) < 2:
            small = []
        if lines:
            parts.append(Part(bucket, total, tuple(line for line in lines if line not in small), tuple(small)))
    return parts


def lines_of(plan: Plan, bucket: str) -> list[Line]:
    """The lines of a bucket, the largest first, without empty ones beside others."""
    lines = sorted((line for line in plan.lines if line.bucket == bucket), key=lambda line: -line.alive)
    return [line for line in lines if line.bytes] or lines[:1]


def beside(line: Line) -> str:
    """The line's formula, and where it is when it is not on the device at the peak."""
    if line.paged:
        return f"{line.formula} = {short(line.bytes)} in unified memory, which can move to the host"
    if line.alive == line.bytes:
        return line.formula
    now = "not there at the peak" if not line.alive else f"{short(line.alive)} of it at the peak"
    return f"{line.formula} = {short(line.bytes)}, {now}"


def told_together(lines: Sequence[Line]) -> tuple[str, str]:
    """(how many smaller parts, their names)"""
    return f"{len(lines)} smaller parts", "; ".join(line.name for line in lines)


def verdict(plan: Plan) -> str:
    """Whether it fits, and by how much."""
    apart = plan.room - plan.total
    return f"fits, {gb(apart)} to spare" if plan.fits else f"does not fit, {gb(-apart)} too much"


def place(plan: Plan) -> str:
    """`of 24.00 GB on each of 8 rtx4090`."""
    device = plan.device
    if device.kind == "cpu":
        return f"of the {gb(plan.room)} that training may use ({device.name})"
    name = "" if device.name[:1].isdigit() else device.name  # named by nothing but its size
    each = f"each of {device.count} {name or 'cards'}" if device.count > 1 else name
    return f"of {gb(plan.room)}" + (f" on {each}" if each else "")


def peak_of(plan: Plan) -> tuple[str, str]:
    """(the phase with the peak, what happens there)"""
    phase, _, what = plan.account.during.partition(": ")
    return phase, what


def phase_name(phase: str) -> str:
    """A phase of the step in words."""
    return {"forward": "forward pass", "backward": "backward pass", "optimizer": "optimizer step"}.get(phase, phase)


def modelled(plan: Plan) -> str:
    """One sentence on the pass that the plan follows."""
    return f"{_pass(plan)}: {in_words(plan.path, plan.batch)}."


def _pass(plan: Plan) -> str:
    rows, length = plan.batch.rows, f"{plan.batch.length:,} tokens"
    return length if plan.batch.flat else f"{rows:,} row{'s' * (rows > 1)} of {length}"


def rows_in_words(plan: Plan) -> str:
    """Which row lengths the plan is made with."""
    if plan.lengths is None:
        return "Every row is taken to be data.max_length tokens long."
    lengths = plan.lengths
    read = f"{len(lengths.pairs):,} of {lengths.of:,}" if len(lengths.pairs) < lengths.of else f"{lengths.of:,}"
    return (
        f"{read} rows of {lengths.source}: {lengths.mean:,.0f} tokens on average, {lengths.longest:,} at most, "
        f"{_whole_percent(lengths.trained_share)} of them trained."
    )


def speed_in_words(plan: Plan) -> str:
    """Tokens per second at the peak and expected."""
    if plan.speed is None:
        return "Not known of a card named by its size; name one, for example `--device rtx4090`."
    speed = plan.speed
    return (
        f"~{_tokens(speed.expected)} tokens/s at {_whole_percent(speed.utilisation)} of the peak, at most "
        f"{_tokens(speed.floor)}; {speed.flop_per_token / 1e9:,.2f} GFLOP a token{_duration(plan)}."
    )


def _duration(plan: Plan) -> str:
    """How long the training takes at that speed, where its tokens are known."""
    if plan.hours is None or plan.tokens is None:
        return ""
    span = f"{plan.hours:,.1f} hours" if plan.hours >= 1 else f"{max(1, round(60 * plan.hours))} minutes"
    return f"; about {span} for {plan.tokens:,} tokens"


def host_in_words(plan: Plan) -> str:
    """Memory of the host beside the device, at its most in each phase."""
    return "~" + _sizes(plan.host) + "."


def disk_in_words(plan: Plan) -> str:
    """What a run writes, and the download before it."""
    total = sum(line.bytes for line in plan.disk)
    return f"{short(total)} in all: {_sizes(plan.disk)}."


def _sizes(lines: Sequence[Line]) -> str:
    return ", ".join(f"{short(line.bytes)} {line.name}" for line in lines)


def _whole_percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _tokens(number: float) -> str:
    return f"{number:,.0f}" if number >= 10 else f"{number:.1f}"


def would_fit(plan: Plan, rows: int | None, longest: int | None) -> str:
    """How much of the recipe's rows, and how long a single one, the device could hold."""
    known = plan.lengths.longest if plan.lengths else None if plan.batch.flat else plan.batch.length
    size = f" of {known:,} tokens" if known else ""
    most = f"{rows:,} row{'s' * (rows > 1)}{size} a pass" if rows else ""
    alone = f"one row of {longest:,} tokens" if longest else ""
    if rows == 0:
        return f"Not even one row{size} would fit" + (f"; {alone} would." if alone else ".")
    if most and alone:
        return f"Up to {most}, or {alone}, would fit."
    return f"Up to {most or alone} would fit." if most or alone else ""


def needed(fit: Fit) -> list[tuple[Change, bool]]:
    """The changes in order, each with whether it is one of those that it takes: the last one of its field."""
    last = {change.field: number for number, change in enumerate(fit.changes)}
    return [(c, fit.plan.fits and c.field in fit.needed and last[c.field] == n) for n, c in enumerate(fit.changes)]


def fit_in_words(fit: Fit) -> str:
    """What comes out of the changes."""
    if not fit.plan.fits:
        return f"All of it together still takes {gb(fit.plan.total)} {place(fit.plan)}."
    takes = [f"{change.field}: {as_written(change.value)}" for change, takes in needed(fit) if takes]
    return f"It takes {' and '.join(takes)}; then the total is {gb(fit.plan.total)} {place(fit.plan)}."


def as_written(value: object) -> str:
    """A value as the recipe writes it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def compare_note(rows: Sequence[Row]) -> str:
    """What the rows of a comparison have in common, and what their columns mean."""
    first = rows[0].plan
    again = {0: "nothing recomputed", 1: "every layer recomputed"}.get(
        first.path.checkpointing, f"one layer in {first.path.checkpointing} recomputed"
    )
    note = (
        f"Each planned with {_pass(first)} a pass and {again}. File: the adapter's, in fp32. Rest: activations, "
        "loss, temporary and outside. Cards of so many GB (1e9 bytes); many hold a little more."
    )
    if any(row.recomputing for row in rows):
        note += " ↻ fits when every layer is run again in the backward pass, for about 30 % more time."
    paged = any(line.paged for row in rows for line in row.plan.lines)
    return note + " Paged optimizer state lies in unified memory and is not in the totals." * paged


def choices_of(plan: Plan) -> list[tuple[str, str, str]]:
    """(field, value, because), with a reason that was just given left out."""
    told, before = [], ""
    for choice in plan.choices:
        told.append((choice.field, as_written(choice.value), "″" if choice.because == before else choice.because))
        before = choice.because
    return told


# ------------------------------------------------------------------------------------------------------- the drawing

_LIGHT = {
    "paper": "#ffffff", "edge": "#e3e6ec", "ink": "#14181f", "soft": "#5d6675", "track": "#eef0f4", "good": "#12824c",
    "bad": "#cc2b3b", "weights": "#3a74e8", "gradients": "#e8a317", "optimizer": "#8a5cf0", "activations": "#16a772",
    "loss": "#14b2cc", "temporary": "#f0694f", "outside": "#98a2b3", "plain": "#c3cbd8",
    "strong": "#465064",
}  # fmt: skip
_DARK = {
    "paper": "#12161d", "edge": "#272d38", "ink": "#eef1f6", "soft": "#98a3b5", "track": "#222833", "good": "#46cf8b",
    "bad": "#ff7480", "weights": "#5b93ff", "gradients": "#f4b740", "optimizer": "#a585ff", "activations": "#32c48d",
    "loss": "#3acbe0", "temporary": "#ff8a6e", "outside": "#6c7687", "plain": "#465064",
    "strong": "#c3cbd8",
}  # fmt: skip
_SANS = "system-ui,-apple-system,'Segoe UI',Roboto,'Helvetica Neue',Arial,sans-serif"

_WIDE, _PAD = 920, 40
_INNER = _WIDE - 2 * _PAD


def plan_svg(plan: Plan) -> str:
    """The plan as a drawing: the device's memory, a bar per bucket, the phases of a step, the lengths of the rows."""
    name = plan.model if len(plan.model) <= 46 else "…" + plan.model[-45:]
    said = verdict(plan).split(",")[0]
    pill = 7.4 * len(said) + 30
    top = [
        _text(_PAD, 60, name, "t1"),
        _text(_PAD, 86, _subtitle(plan), "soft"),
        f'<rect x="{_WIDE - _PAD - pill:.1f}" y="38" width="{pill:.1f}" height="28" rx="14" '
        f'class="{_mood(plan)} tint"/>',
        _text(_WIDE - _PAD - pill / 2, 57, said, f"{_mood(plan)} mid b"),
        f'<text x="{_PAD}" y="150"><tspan class="t0">~{_gb(plan.total)}</tspan><tspan class="t1"> GB</tspan>'
        f'<tspan dx="14" class="soft">{escape(_after_total(plan))}</tspan></text>',
    ]
    drawn, height = _chart(plan, 172)
    y, notes = height + 20, []
    for line in textwrap.wrap(f"A pass of {modelled(plan)} {rows_in_words(plan)} {UNITS}.", 126):
        notes.append(_text(_PAD, y, line, "s soft"))
        y += 18
    card = f'<rect x=".5" y=".5" width="{_WIDE - 1}" height="{y + 13}" rx="18" class="paper"/>'
    return _svg(plan, [card, *top, *drawn, *notes], y + 14)


def _svg(plan: Plan, inside: Sequence[str], height: float) -> str:
    title = f"{plan.method} of {plan.model}: about {gb(plan.total)} {place(plan)}, {verdict(plan)}"
    body = "\n".join(inside)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="drawing" viewBox="0 0 {_WIDE} {height:g}" width="{_WIDE}" '
        f'role="img">\n<title>{escape(title)}</title>\n<style>{_drawing_style()}</style>\n{body}\n</svg>\n'
    )


def _drawing_style() -> str:
    fixed = (
        f".drawing text{{font:15px {_SANS};fill:#14181f;font-variant-numeric:tabular-nums}}"
        ".drawing .t0{font-size:46px;font-weight:700;letter-spacing:-.02em}"
        ".drawing .t1{font-size:24px;font-weight:650;letter-spacing:-.01em}"
        ".drawing .h{font-size:13px;font-weight:650}.drawing .b{font-weight:650}.drawing .s{font-size:12.5px}"
        ".drawing .end{text-anchor:end}.drawing .mid{text-anchor:middle}.drawing .tint{fill-opacity:.14}"
        ".drawing .veil{fill-opacity:.6;stroke:none}"
    )

    def colours(palette: dict[str, str]) -> str:
        rules = [f".drawing .{name}{{fill:{colour}}}" for name, colour in palette.items()]
        rules += [f".drawing text,.drawing .ink{{fill:{palette['ink']}}}"]
        rules += [f".drawing text.{name}{{fill:{palette[name]}}}" for name in ("soft", "good", "bad")]
        rules += [f".drawing tspan.soft{{fill:{palette['soft']}}}"]
        rules += [f".drawing .paper{{stroke:{palette['edge']}}}.drawing .limit{{stroke:{palette['bad']}}}"]
        return "".join(rules)

    return f"{fixed}{colours(_LIGHT)}@media(prefers-color-scheme:dark){{{colours(_DARK)}}}"


def _text(x: float, y: float, words: str, style: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{style}">{escape(words)}</text>'


def _bar(x: float, y: float, width: float, height: float, style: str, tip: str = "", round_: float = 3) -> str:
    tip = f"<title>{escape(tip)}</title>" if tip else ""
    size = f'width="{width:.2f}" height="{height:g}" rx="{round_:g}"'
    return f'<rect x="{x:.2f}" y="{y:g}" {size} class="{style}">{tip}</rect>'


def _gb(count: float) -> str:
    return gb(count).removesuffix(" GB")


def _subtitle(plan: Plan) -> str:
    return (
        f"{NAMES[plan.method]} · {plan.parameters:,} parameters · {plan.trainable:,} trained ({trained_share(plan)})"
    )


def _after_total(plan: Plan) -> str:
    return f"{place(plan)}, {verdict(plan).split(', ')[1]}"


def _mood(plan: Plan) -> str:
    return "good" if plan.fits else "bad"


def _chart(plan: Plan, y: float) -> tuple[list[str], float]:
    """The drawing below the title, from `y` on, and where it ends."""
    drawn = [*_whole_bar(plan, y)]
    y += 104
    for bucket, size in plan.buckets().items():
        share = size / plan.total
        tip = f"{bucket}: {ABOUT[bucket]}"
        drawn += [
            _bar(_PAD, y - 11, 12, 12, bucket, tip),
            _text(_PAD + 24, y, bucket),
            _bar(_PAD + 130, y - 10, 524, 10, "track", round_=5),
            _bar(_PAD + 130, y - 10, max(524 * share, 2 * bool(size)), 10, bucket, tip, 5 if share > 0.02 else 1),
            _text(_WIDE - _PAD - 84, y, ("~" if about(plan, bucket) else "") + gb(size), "end b"),
            _text(_WIDE - _PAD, y, percent(share), "end soft"),
        ]
        y += 30
    y += 20
    phase, what = peak_of(plan)
    columns = [
        (name, size, _gb(size), "strong" if name == phase else "plain") for name, size in plan.account.phases.items()
    ]
    half = _INNER if plan.lengths is None else (_INNER - 44) / 2
    drawn += _columns(_PAD, y, half, f"GB in torch, by phase; most at: {what}", columns)
    if plan.lengths is not None:
        bins = [(f"≤ {end:,}", rows, f"{rows:,}", "plain") for end, rows in plan.lengths.histogram()]
        drawn += _columns(_PAD + half + 44, y, half, "Rows, by their tokens", bins)
    return drawn, y + 170


def _whole_bar(plan: Plan, y: float) -> Iterator[str]:
    """The device's memory from end to end; what a larger plan needs beyond it lies behind a mark."""
    full = max(plan.room, plan.total)
    yield f'<clipPath id="whole"><rect x="{_PAD}" y="{y:g}" width="{_INNER}" height="44" rx="9"/></clipPath>'
    yield _bar(_PAD, y, _INNER, 44, "track", round_=9)
    yield '<g clip-path="url(#whole)">'
    x = float(_PAD)
    for bucket, size in plan.buckets().items():
        width = _INNER * size / full
        if size:
            yield _bar(x, y, max(width - (1.5 if width > 4 else 0), 0.5), 44, bucket, f"{bucket} {gb(size)}", 0)
        x += width
    if not plan.fits:
        at = _INNER * plan.room / full
        yield f'<rect x="{_PAD + at:.2f}" y="{y:g}" width="{_INNER - at:.2f}" height="44" class="paper veil"/>'
    yield "</g>"
    step = _step(full / 1e9)
    number = 0.0
    while number * 1e9 <= full * 1.0001:
        at = _PAD + _INNER * number * 1e9 / full
        style = "mid" if _PAD < at < _WIDE - _PAD - 12 else "end" if number else ""
        if plan.fits or abs(at - _PAD - _INNER * plan.room / full) > 140:
            yield _text(at, y + 64, f"{number:g}" + (" GB" if number else ""), f"s soft {style}")
        number += step
    if not plan.fits:
        at = _PAD + _INNER * plan.room / full
        yield f'<line x1="{at:.2f}" x2="{at:.2f}" y1="{y - 6:g}" y2="{y + 50:g}" class="limit" stroke-width="2.5"/>'
        yield _text(at, y + 66, f"the device ends here, {gb(plan.room)}", "s bad b " + ("mid" if at > 160 else ""))


def _step(full: float) -> float:
    """A round distance of marks, four to eight of them."""
    size = 10.0 ** len(str(int(full)))
    while full / size < 4:
        size = next(size * part for part in (0.5, 0.4, 0.2) if full / (size * part) >= 4 or part == 0.2)
    return size


def _columns(
    x: float, y: float, width: float, heading: str, columns: Sequence[tuple[str, float, str, str]]
) -> Iterator[str]:
    """(label, height, number, colour) as standing bars, 96 units high."""
    yield _text(x, y, heading, "h soft")
    top = max((size for _, size, _, _ in columns), default=0) or 1
    gap = 10 if len(columns) < 7 else 6
    each = (width + gap) / len(columns) - gap
    small = "s " if each < 90 else ""
    for number, (label, size, said, style) in enumerate(columns):
        at, tall = x + number * (each + gap), 84 * size / top
        yield _bar(at, y + 126 - tall, each, max(tall, 1), style, f"{label}: {said}")
        yield _text(at + each / 2, y + 119 - tall, said, f"{small}mid b")
        yield _text(at + each / 2, y + 146, label, "s mid soft")


# ---------------------------------------------------------------------------------------------------------- the page

_PAGE_STYLE = """\
*{box-sizing:border-box}
body{margin:0;background:var(--back);color:var(--ink);font:15px/1.55 SANS;font-variant-numeric:tabular-nums}
main{max-width:1160px;margin:0 auto;padding:48px 20px 80px}
h1{font-size:32px;line-height:1.2;letter-spacing:-.02em;margin:0;overflow-wrap:anywhere}
h2{font-size:18px;letter-spacing:-.01em;margin:44px 0 12px}
p{margin:6px 0}.soft,footer{color:var(--soft)}footer{font-size:13px;margin-top:44px}
.good{color:var(--good)}.bad{color:var(--bad)}
.big{display:flex;flex-wrap:wrap;align-items:baseline;gap:4px 14px;margin:26px 0 14px}
.big b{font-size:52px;line-height:1;letter-spacing:-.03em}.big b small{font-size:26px;letter-spacing:0}
.card{background:var(--paper);border:1px solid var(--edge);border-radius:16px;padding:8px 20px;overflow-x:auto}
.card svg{display:block;width:100%;min-width:700px;height:auto;margin:-4px -20px;width:calc(100% + 40px)}
table{border-collapse:collapse;width:100%;min-width:660px}
td,th{padding:7px 12px 7px 0;text-align:left;vertical-align:top;border-bottom:1px solid var(--edge)}
tr:last-child td{border-bottom:0}tbody+tbody tr:first-child td,tbody+tbody tr:first-child th{padding-top:18px}
th{font-weight:600;color:var(--soft);white-space:nowrap}tbody th{color:var(--ink)}
td.n,th.n{text-align:right;white-space:nowrap}td.c,th.c{text-align:center;padding-right:6px}
td.n b{font-weight:650}.w,.key{white-space:nowrap}.key{margin-right:14px}
code{font:13px ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}
.dot{display:inline-block;width:11px;height:11px;border-radius:3px;margin-right:9px}
.in{padding-left:20px}
.over td{border-bottom:0;padding-bottom:3px}
.mix{display:flex;height:9px;border-radius:4px;overflow:hidden;margin-bottom:6px}
.mix i{display:block;height:100%}
"""


def plan_html(plan: Plan, fit: Fit | None = None, rows: Sequence[Row] | None = None) -> str:
    """The plan as a page: the drawing, every line with its formula, the choices, and what else is given."""
    drawn, end = _chart(plan, 20)
    parts = [
        f"<h1>{escape(plan.model)}</h1>",
        f'<p class="soft">{escape(_subtitle(plan))}</p>',
        f'<p class="big"><b>~{_gb(plan.total)}<small> GB</small></b><span><span class="soft">{escape(place(plan))}:'
        f'</span> <strong class="{_mood(plan)}">{escape(verdict(plan))}</strong></span></p>',
        f'<div class="card">{_svg(plan, drawn, end - 4)}</div>',
        *_fit_section(fit),
        *_compare_section(rows),
        "<h2>Every part</h2>",
        f'<div class="card">{_lines_table(plan)}</div>',
        *_choices_section(plan),
        "<h2>What is planned</h2>",
        f"<p>A pass of {escape(modelled(plan))}</p><p>{escape(rows_in_words(plan))}</p>",
        f"<p>Speed: {_ticked(speed_in_words(plan))}</p>",
        f"<footer>{UNITS}. Bytes are those of one device at the peak of one optimizer step.</footer>",
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>Memory plan of {escape(plan.model)}</title>\n<style>\n{_page_style()}</style>\n</head>\n"
        "<body>\n<main>\n" + "\n".join(parts) + "\n</main>\n</body>\n</html>\n"
    )


def _page_style() -> str:
    def colours(palette: dict[str, str], back: str) -> str:
        return ":root{" + "".join(f"--{name}:{colour};" for name, colour in palette.items()) + f"--back:{back}}}\n"

    dark = f"@media(prefers-color-scheme:dark){{{colours(_DARK, '#0b0e13').strip()}}}\n"
    return colours(_LIGHT, "#f6f7f9") + dark + _PAGE_STYLE.replace("SANS", _SANS)


def _table(head: Sequence[tuple[str, str]], bodies: Sequence[Sequence[str]]) -> str:
    """(title, class) of the columns, and the rows in groups."""
    titles = "".join(f'<th class="{style}">{escape(title)}</th>' for title, style in head)
    inside = "".join(f"<tbody>{''.join(body)}</tbody>" for body in bodies)
    return f"<table><thead><tr>{titles}</tr></thead>{inside}</table>"


def _ticked(words: str) -> str:
    """Escaped, with `code` as code."""
    pieces = escape(words).split("`")
    return "".join(f"<code>{piece}</code>" if number % 2 else piece for number, piece in enumerate(pieces))


def _dot(bucket: str) -> str:
    return f'<span class="dot" style="background:var(--{bucket})"></span>'


def _lines_table(plan: Plan) -> str:
    bodies = []
    for bucket in BUCKETS:
        lines = lines_of(plan, bucket)
        size = sum(line.alive for line in lines)
        body = [
            f'<tr><th>{_dot(bucket)}{bucket}</th><td class="n"><b>{gb(size)}</b></td>'
            f'<td class="n soft">{percent(size / plan.total)}</td><td class="soft">{ABOUT[bucket]}</td></tr>'
        ]
        for line in lines:
            sign = "" if line.exact else "~"
            body.append(
                f'<tr><td class="in">{escape(line.name)}</td><td class="n">{sign}{_size(line.alive)}</td>'
                f'<td class="n soft">{percent(line.alive / plan.total)}</td>'
                f'<td class="soft">{escape(beside(line))}</td></tr>'
            )
        bodies.append(body)
    total = (
        f'<tr><th>in all</th><td class="n"><b>~{gb(plan.total)}</b></td><td class="n soft">100 %</td><td></td></tr>'
    )
    head = [("part", ""), ("at the peak", "n"), ("share", "n"), ("how it comes about", "")]
    return _table(head, [*bodies, [total]])


def _size(count: int) -> str:
    return gb(count) if count >= 1e7 or not count else short(count)


def _choices_section(plan: Plan) -> list[str]:
    if not plan.choices:
        return []
    body = [
        f"<tr><td><code>{escape(field)}</code></td><td><b>{escape(value)}</b></td>"
        f'<td class="soft">{escape(why)}</td></tr>'
        for field, value, why in choices_of(plan)
    ]
    table = _table([("field", ""), ("value", ""), ("because", "")], [body])
    return ["<h2>What was left to the plan</h2>", f'<div class="card">{table}</div>']


def _fit_section(fit: Fit | None) -> list[str]:
    if fit is None:
        return []
    body = []
    for change, takes in needed(fit):
        mark = '<b class="good">✓</b>' if takes else ""
        fits = ' class="n good"' if change.fits else ' class="n"'
        what = escape(f"{change.field}: {as_written(change.value)}")
        body.append(
            f'<tr><td class="c">{mark}</td><td><code>{what}</code></td>'
            f'<td class="n">{gb(change.alone)}</td><td{fits}>{gb(change.together)}</td>'
            f'<td class="soft">{escape(change.cost)}</td></tr>'
        )
    head = [("", "c"), ("change", ""), ("alone", "n"), ("with those above", "n"), ("what it costs", "")]
    write = "<p>To write the changed recipe: <code>finetune plan RECIPE --fit FILE</code></p>"
    return [
        "<h2>What would make it fit, the cheapest first</h2>",
        f'<div class="card">{_table(head, [body])}</div>',
        f"<p>{escape(fit_in_words(fit))}</p>" + (write if fit.plan.fits else ""),
    ]


def _compare_section(rows: Sequence[Row] | None) -> list[str]:
    if not rows:
        return []
    largest = max(row.plan.total for row in rows)
    head = [("method", ""), ("targets", ""), ("rank", "n"), ("trained", "n"), ("share", "n"), ("file", "n")]
    head += [(bucket, "n") for bucket in (*STATIC, "rest", "total")]
    head += [(str(card), "c") for card in CARDS]
    legend = " ".join(f'<span class="key">{_dot(bucket)}{bucket}</span>' for bucket in BUCKETS)
    return [
        "<h2>All ways of training it, and the cards that hold them</h2>",
        f'<div class="card">{_table(head, [[_compare_row(row, largest) for row in rows]])}</div>',
        f'<p class="soft">{legend}</p><p class="soft">{escape(compare_note(rows))}</p>',
    ]


def _compare_row(row: Row, largest: int) -> str:
    buckets = row.plan.buckets()
    mix = "".join(
        f'<i style="width:{100 * size / largest:.2f}%;background:var(--{bucket})" title="{bucket} {gb(size)}"></i>'
        for bucket, size in buckets.items()
    )
    cells = [
        row.rank or "",
        counted(row.plan.trainable),
        trained_share(row.plan),
        short(row.adapter_file) if row.adapter_file else "–",
        *(_gb(buckets[bucket]) for bucket in STATIC),
        _gb(row.plan.total - sum(buckets[bucket] for bucket in STATIC)),
    ]
    numbers = "".join(f'<td class="n">{cell}</td>' for cell in cells)
    cards = "".join(
        '<td class="c good">✓</td>'
        if card in row.cards
        else '<td class="c">↻</td>'
        if card in row.recomputing
        else '<td class="c bad">✗</td>'
        for card in CARDS
    )
    return (
        f'<tr class="over"><td class="w">{row.method}</td><td class="w">{escape(row.targets)}</td>{numbers}'
        f'<td class="n"><b>{_gb(row.plan.total)}</b></td>{cards}</tr>\n'
        f'<tr><td colspan="{11 + len(CARDS)}"><div class="mix">{mix}</div></td></tr>\n'
    )


__all__ = ["plan_html", "plan_svg"]
