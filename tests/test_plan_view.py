"""What the terminal shows of a plan, a comparison and a sharding: the right numbers, at every width."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from functools import cache

import pytest
from rich.cells import cell_len
from rich.console import Console, RenderableType

from finetune.compare import Row, compare
from finetune.device import Device, named_device
from finetune.facts import Facts, read_facts
from finetune.fit import Fit, fit
from finetune.memory import BUCKETS
from finetune.paths import Lengths
from finetune.plan import CARDS, Plan, resolve
from finetune.plan_page import beside, counted, gb, needed, parts_of, percent, three, trained_share, verdict
from finetune.plan_view import compare_view, plan_view, sharding_view
from finetune.recipe import Recipe, load_recipe
from finetune.sharding import STRATEGIES, per_gpu

CPU = Device("cpu", "CPU, 2 cores", 16 * 2**30, bf16=False)
ROWS = Lengths.read([(10 + n, 5 + n // 2) for n in range(90)], "my rows")
PLANS = [("gemma2b-qlora", "24GB", None), ("llama7b-full", "24GB", None), ("llama7b-lora", "rtx4090", None)]
PLANS += [("smollm2-lora", "cpu", None), ("smollm2-lora", "cpu", ROWS)]
WIDTHS = (80, 100, 140)


@cache
def made(name: str, device: str, lengths: Lengths | None = None) -> tuple[Recipe, Facts, Device, Plan]:
    asked = load_recipe(name)
    facts, on = read_facts(asked.model), CPU if device == "cpu" else named_device(device)
    recipe, plan = resolve(asked, facts, on, lengths)
    return recipe, facts, on, plan


def planned(name: str, device: str, lengths: Lengths | None = None) -> Plan:
    return made(name, device, lengths)[3]


@cache
def fitted(name: str, device: str) -> Fit:
    return fit(*made(name, device)[:3])


@cache
def compared(name: str, device: str, ranks: tuple[int, ...] = ()) -> list[Row]:
    return compare(load_recipe(name), *made(name, device)[1:3], ranks)


def shown(view: RenderableType, width: int = 140, *, colour: bool = False) -> str:
    """What a terminal of `width` columns shows; no line may be wider or cut."""
    file = io.StringIO()
    system = "truecolor" if colour else None
    Console(
        file=file, width=width, force_terminal=colour, color_system=system, legacy_windows=False, highlight=False
    ).print(view)
    text = file.getvalue()
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    assert max(map(cell_len, plain.splitlines())) <= width
    assert "…" not in plain
    return text


def flat(text: str) -> str:
    return " ".join(text.split())


# ------------------------------------------------------------------------------------------------------------- plan


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(("name", "device", "lengths"), PLANS)
def test_every_bucket_and_phase_has_its_bytes(name: str, device: str, lengths: Lengths | None, width: int) -> None:
    plan = planned(name, device, lengths)
    lines = [flat(line) for line in shown(plan_view(plan), width).splitlines()]
    for bucket, size in plan.buckets().items():
        [row] = [line for line in lines if re.match(f"■ {bucket} .* %", line)]
        assert f" {gb(size)} {percent(size / plan.total)}" in row.replace("~", "")
    for size in plan.account.phases.values():
        assert any(gb(size) in line for line in lines)
    assert flat(verdict(plan)) in flat(" ".join(lines))
    assert sum(" peak █" in line for line in lines) == 1


@pytest.mark.parametrize(("name", "device", "lengths"), PLANS)
def test_the_longer_bar_is_the_larger_bucket(name: str, device: str, lengths: Lengths | None) -> None:
    plan = planned(name, device, lengths)
    lines = shown(plan_view(plan), 100).splitlines()
    rows = {bucket: next(line for line in lines if re.match(f"■ +{bucket} .* % ", line)) for bucket in BUCKETS}
    widest = max(row.count("█") for row in rows.values())
    largest = max(plan.buckets().values())
    for bucket, size in plan.buckets().items():
        assert rows[bucket].count("█") == pytest.approx(widest * size / largest, abs=1.1)
        assert bool(re.search("[▏▎▍▌▋▊▉█]", rows[bucket])) == (size > 0)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(("name", "device", "lengths"), PLANS)
def test_the_long_bar_is_the_device(name: str, device: str, lengths: Lengths | None, width: int) -> None:
    plan = planned(name, device, lengths)
    bar = next(line for line in shown(plan_view(plan), width).splitlines() if line[:1] in "█▒░" and line.strip())
    cells, full = len(bar), max(plan.room, plan.total)
    assert cells == min(width, 110)
    assert bar.count("█") == pytest.approx(cells * min(plan.room, plan.total) / full, abs=1)
    assert bar.count("▒") == pytest.approx(cells * max(plan.total - plan.room, 0) / full, abs=1)
    assert bar.count("░") == pytest.approx(cells * max(plan.room - plan.total, 0) / full, abs=1)


@pytest.mark.parametrize(("name", "device", "lengths"), PLANS)
def test_large_lines_have_their_formula_and_small_ones_are_counted(
    name: str, device: str, lengths: Lengths | None
) -> None:
    plan = planned(name, device, lengths)
    said = flat(shown(plan_view(plan), 140))
    for part in parts_of(plan):
        for line in part.lines:
            assert flat(beside(line)) in said
        if part.smaller:
            assert f"{len(part.smaller)} smaller parts" in said
            assert all(line.name in said for line in part.smaller)
    for choice in plan.choices:
        assert choice.field in said
        assert choice.because in said
    assert said.count("1 GB = 1e9 bytes") == 1


def test_what_is_not_there_at_the_peak_says_so() -> None:
    assert "in unified memory" in flat(shown(plan_view(planned("gemma2b-qlora", "24GB"))))
    plan = planned("smollm2-lora", "cpu")
    account = replace(
        plan.account,
        lines=tuple(replace(line, at_peak=0) if line.bucket == "gradients" else line for line in plan.account.lines),
    )
    size = sum(line.bytes for line in plan.lines if line.bucket == "gradients")
    assert f"= {size / 1e6:.1f} MB, not there at the peak" in flat(shown(plan_view(replace(plan, account=account))))


def test_the_lengths_are_drawn_when_they_are_known() -> None:
    said = flat(shown(plan_view(planned("smollm2-lora", "cpu", ROWS)), 80))
    assert "90 rows of my rows: 54 tokens on average, 99 at most" in said
    bins = ROWS.histogram()
    assert "rows " + " ".join(f"{count}" for _, count in bins) in said
    assert "tokens up to " + " ".join(f"{end}" for end, _ in bins) in said
    assert "tokens up to" not in shown(plan_view(planned("smollm2-lora", "cpu")))


@pytest.mark.parametrize("width", WIDTHS)
def test_a_plan_that_does_not_fit_shows_what_would(width: int) -> None:
    plan, answer = planned("llama7b-full", "24GB"), fitted("llama7b-full", "24GB")
    text = shown(plan_view(plan, answer, 0, 0), width)
    assert "the device ends here, 24.00 GB" in text
    rows = [line for line in text.splitlines() if " → " in line]
    assert len(rows) == len(answer.changes)
    for row, (change, takes) in zip(rows, needed(answer), strict=True):
        assert f"{change.field} → {change.value} {gb(change.alone)} {gb(change.together)} " in flat(row)
        assert ("✓" in row) == takes
    assert "finetune plan RECIPE --fit FILE" in text
    assert f"{gb(answer.plan.total)} of 24.00 GB." in flat(text)
    assert "Not even one row of 2,048 tokens would fit." in flat(text)


def test_when_nothing_helps_no_command_is_offered() -> None:
    text = shown(plan_view(planned("llama7b-full", "2GB"), fitted("llama7b-full", "2GB")))
    assert "All of it together still takes" in text
    assert "--fit" not in text


def test_names_are_not_read_as_markup() -> None:
    assert "[bold]x[/bold]" in shown(plan_view(replace(planned("gemma2b-qlora", "24GB"), model="[bold]x[/bold]")))


def test_an_odd_terminal_is_no_reason_to_fail() -> None:
    for width in (20, 40, 60):
        console = Console(file=io.StringIO(), width=width)
        console.print(plan_view(planned("llama7b-full", "24GB"), fitted("llama7b-full", "24GB"), 0, 0))
        console.print(compare_view(compared("llama7b-lora", "24GB"), made("llama7b-lora", "24GB")[1]))


# ---------------------------------------------------------------------------------------------------------- compare


@pytest.mark.parametrize("width", [100, 140])
def test_a_comparison_has_a_tick_or_a_cross_for_every_card(width: int) -> None:
    rows, facts = compared("llama7b-lora", "24GB"), made("llama7b-lora", "24GB")[1]
    lines = shown(compare_view(rows, facts), width).splitlines()
    head = next(number for number, line in enumerate(lines) if line.startswith("method"))
    assert flat(lines[head]).split()[-len(CARDS) :] == [str(card) for card in CARDS]
    for row, line in zip(rows, lines[head + 1 :], strict=False):
        total = row.plan.total / 1e9
        marks = ["✓" if card in row.cards else "↻" if card in row.recomputing else "✗" for card in CARDS]
        told = f"{three(total)} " + " ".join(marks)
        assert told in flat(line)
        assert row.targets in line
        assert counted(row.plan.trainable) in line
        assert trained_share(row.plan) in line


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("ranks", [(), (4, 16, 64)])
def test_a_comparison_fits_any_terminal(width: int, ranks: tuple[int, ...]) -> None:
    rows, facts = compared("llama7b-lora", "24GB", ranks), made("llama7b-lora", "24GB")[1]
    lines = shown(compare_view(rows, facts), width).splitlines()
    head = next(number for number, line in enumerate(lines) if line.startswith("method"))
    assert ("rank" in lines[head]) == (len(ranks) > 1)
    table = lines[head + 1 : head + 1 + len(rows)]
    assert all(line.strip() for line in table), "a row is one line"
    assert not lines[head + 1 + len(rows)].strip()
    for row, line in zip(rows, table, strict=True):
        held = row.plan.buckets()
        numbers = [held["weights"], held["gradients"], held["optimizer"]]
        numbers += [row.plan.total - sum(numbers), row.plan.total]
        assert " ".join(three(number / 1e9) for number in numbers) in flat(line)
        if "✓" not in line and "✗" not in line:
            smallest = min([*row.cards, *row.recomputing], default=None)
            assert (f"{smallest} GB" if smallest else "none") in line


def test_the_rule_of_thumb_is_arithmetic() -> None:
    """16, 2 and 0.516 bytes of each parameter, and the 8 and 6 of papers (DESIGN.md, section 4)."""
    facts = made("llama7b-lora", "24GB")[1]
    said = flat(shown(compare_view(compared("llama7b-lora", "24GB"), facts)))
    n = 6_738_415_616
    assert facts.parameters == n
    assert f"full 16 N = {16 * n / 1e9:.0f} GB" in said
    assert f"2 N = {2 * n / 1e9:.1f} GB" in said
    assert f"{0.5 + 1 / 64 + 4 / (64 * 256):.3f} bytes for each" in said
    assert f"8 N = {8 * n / 1e9:.1f} GB" in said
    assert f"6 N = {6 * n / 1e9:.1f} GB" in said
    assert "175B" not in said
    large = flat(shown(compare_view(compared("llama7b-lora", "24GB"), _as_large_as_gpt3(facts))))
    assert "1.2 TB" in large
    assert "6 N = 1.05 TB" in large


def _as_large_as_gpt3(facts: Facts) -> Facts:
    class Large(Facts):
        parameters = 175_000_000_000  # type: ignore[assignment]

    return Large(**{name: getattr(facts, name) for name in facts.__dataclass_fields__})


# ---------------------------------------------------------------------------------------------------------- sharding


@pytest.mark.parametrize("width", WIDTHS)
def test_each_strategy_has_what_one_gpu_holds(width: int) -> None:
    plan, facts = planned("llama7b-full", "24GB"), made("llama7b-full", "24GB")[1]
    lines = shown(sharding_view(plan, facts, 8), width).splitlines()
    for name in STRATEGIES:
        [line] = [line for line in lines if line.startswith(f"{name} ") and "." in line.split()[1]]
        parts = per_gpu(plan, facts, name, 8)
        sizes = [sum(part.alive for part in parts if part.bucket == bucket) for bucket in BUCKETS]
        numbers = [three(size / 1e9) for size in (*sizes, sum(sizes))]
        assert line.split()[1 : len(numbers) + 2] == [*numbers, "✓" if sum(sizes) <= plan.room else "✗"]
    assert any(line.startswith("one GPU") for line in lines)


def test_buckets_have_the_same_colour_everywhere() -> None:
    text = shown(plan_view(planned("llama7b-full", "24GB")), 100, colour=True)
    [dots] = {tuple(re.findall(r"\x1b\[([0-9;]+)m■", text))[n : n + 7] for n in (0, 7)}
    assert len(set(dots)) == len(BUCKETS)
