"""What a plan's drawing and page say: the right numbers, all buckets, nothing from elsewhere, well-formed."""

from __future__ import annotations

import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from functools import cache
from html.parser import HTMLParser

import pytest

from finetune.compare import Row, compare
from finetune.device import Device, named_device
from finetune.facts import Facts, read_facts
from finetune.fit import Fit, fit
from finetune.memory import BUCKETS, Line
from finetune.paths import Lengths
from finetune.plan import CARDS, Plan, resolve
from finetune.plan_page import (
    beside,
    choices_of,
    fit_in_words,
    gb,
    needed,
    parts_of,
    percent,
    plan_html,
    plan_svg,
    short,
    speed_in_words,
    verdict,
    would_fit,
)
from finetune.recipe import Recipe, load_recipe

CPU = Device("cpu", "CPU, 2 cores", 16 * 2**30, bf16=False)
ROWS = Lengths.read([(10 + n, 5 + n // 2) for n in range(90)], "my rows")
VOID = {"meta", "br", "img", "link", "input", "hr"}
DRAWN = "{http://www.w3.org/2000/svg}"


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
def compared(name: str, device: str) -> list[Row]:
    return compare(load_recipe(name), *made(name, device)[1:3])


PLANS = [("gemma2b-qlora", "24GB", None), ("llama7b-full", "24GB", None), ("llama7b-lora", "rtx4090", None)]
PLANS += [("smollm2-lora", "cpu", None), ("smollm2-lora", "cpu", ROWS)]


class Page(HTMLParser):
    """Reads a page, refuses elements that are not closed in order, and keeps its words."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.words: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


# ---------------------------------------------------------------------------------------------- what a picture says


@pytest.mark.parametrize(
    ("count", "said"),
    [
        (0, "0.00 GB"),
        (1, "<0.01 GB"),
        (4_999_999, "<0.01 GB"),
        (5_000_000, "0.01 GB"),
        (1_201_000_000_000, "1,201.00 GB"),
    ],
)
def test_gigabytes_are_decimal_and_a_trace_is_not_nothing(count: int, said: str) -> None:
    assert gb(count) == said


@pytest.mark.parametrize(
    ("count", "said"),
    [
        (512, "512 bytes"),
        (6_389_760, "6.39 MB"),
        (13_476_831_232, "13.5 GB"),
        (1.4e12, "1.40 TB"),
        (159_907_840, "160 MB"),
    ],
)
def test_short_sizes_have_three_digits(count: float, said: str) -> None:
    assert short(count) == said


def test_shares() -> None:
    assert [percent(share) for share in (0, 1e-5, 0.0005, 0.7871, 1)] == [
        "0.0 %",
        "<0.1 %",
        "0.1 %",
        "78.7 %",
        "100.0 %",
    ]


@pytest.mark.parametrize(("name", "device", "lengths"), PLANS)
def test_the_parts_add_up_to_the_buckets_and_the_buckets_to_the_total(
    name: str, device: str, lengths: Lengths | None
) -> None:
    plan = planned(name, device, lengths)
    parts = parts_of(plan)
    held = {line.bucket for line in plan.lines}
    assert [part.bucket for part in parts] == [bucket for bucket in BUCKETS if bucket in held]
    for part in parts:
        assert sum(line.alive for line in (*part.lines, *part.smaller)) == part.bytes
        assert len(part.smaller) != 1, "one line is named, not counted"
        assert all(line.alive < 0.005 * plan.total for line in part.smaller)
        assert all(line.alive == line.bytes for line in part.smaller), "what is not alive at the peak is news"
    assert sum(part.bytes for part in parts) == plan.total


def test_only_empty_lines_are_left_out() -> None:
    for name, device, lengths in PLANS:
        plan = planned(name, device, lengths)
        told = {line.name for part in parts_of(plan) for line in (*part.lines, *part.smaller)}
        assert {line.name for line in plan.lines if line.bytes} <= told


def test_a_line_says_when_it_is_not_there_at_the_peak() -> None:
    whole = Line("gradients", "gradients", 83_066_880, "4 bytes x 20,766,720", at_peak=83_066_880)
    assert beside(whole) == whole.formula
    assert beside(replace(whole, at_peak=0)) == "4 bytes x 20,766,720 = 83.1 MB, not there at the peak"
    assert beside(replace(whole, at_peak=1_000_000)).endswith("= 83.1 MB, 1.00 MB of it at the peak")
    paged = beside(Line("optimizer", "paged", 23_362_560, "f", at_peak=0, paged=True))
    assert paged == "f = 23.4 MB in unified memory, which can move to the host"


def test_the_verdict_says_by_how_much() -> None:
    plan = planned("gemma2b-qlora", "24GB")
    assert verdict(plan) == f"fits, {(24e9 - plan.total) / 1e9:.2f} GB to spare"
    tight = replace(plan, device=named_device("8GB"))
    assert verdict(tight) == f"does not fit, {(plan.total - 8e9) / 1e9:.2f} GB too much"


def test_how_much_would_fit() -> None:
    plan = planned("gemma2b-qlora", "24GB")
    assert would_fit(plan, None, None) == ""
    assert would_fit(plan, 1, 2496) == "Up to 1 row of 2,048 tokens a pass, or one row of 2,496 tokens, would fit."
    assert would_fit(plan, 12, None) == "Up to 12 rows of 2,048 tokens a pass would fit."
    assert would_fit(plan, 0, 1216) == "Not even one row of 2,048 tokens would fit; one row of 1,216 tokens would."
    assert would_fit(plan, 0, 0) == "Not even one row of 2,048 tokens would fit."
    flat = planned("smollm2-lora", "cpu", ROWS)
    assert flat.batch.flat
    assert would_fit(flat, 53, None) == "Up to 53 rows of 99 tokens a pass would fit."


def test_speed_is_an_estimate_or_not_known() -> None:
    assert "--device" in speed_in_words(planned("gemma2b-qlora", "24GB"))
    plan = planned("llama7b-lora", "rtx4090")
    assert plan.speed is not None
    said = speed_in_words(plan)
    assert said.startswith(
        f"~{plan.speed.expected:,.0f} tokens/s at {100 * plan.speed.utilisation:.0f} % of the peak"
    )
    assert f"at most {plan.speed.floor:,.0f};" in said


def test_the_needed_changes_are_those_of_the_recipe_that_comes_out() -> None:
    answer = fitted("llama7b-full", "24GB")
    assert answer.plan.fits
    takes = [change.field for change, takes in needed(answer) if takes]
    assert sorted(takes) == sorted(answer.needed)
    assert gb(answer.plan.total) in fit_in_words(answer)


def test_of_a_field_that_is_changed_twice_the_last_value_is_needed() -> None:
    answer = fitted("llama7b-full", "24GB")
    first = replace(answer.changes[-1], value="dora", fits=False)
    twice = needed(replace(answer, changes=(first, *answer.changes)))
    assert [takes for change, takes in twice if change.field == first.field] == [False, True]


def test_nothing_is_needed_when_nothing_helps() -> None:
    answer = fitted("llama7b-full", "2GB")
    assert not answer.plan.fits
    assert not any(takes for _, takes in needed(answer))
    assert fit_in_words(answer).startswith("All of it together still takes ")


def test_a_reason_is_given_once() -> None:
    plan = planned("gemma2b-qlora", "24GB")
    told = choices_of(plan)
    assert [field for field, _, _ in told] == [choice.field for choice in plan.choices]
    assert {choice.because for choice in plan.choices} == {because for _, _, because in told} - {"″"}
    assert all(value.islower() for _, value, _ in told if value.lower() in ("true", "false"))


# ------------------------------------------------------------------------------------------------------- the drawing


def texts(svg: str) -> list[str]:
    return ["".join(node.itertext()) for node in ElementTree.fromstring(svg).iter(f"{DRAWN}text")]


@pytest.mark.parametrize(("name", "device", "lengths"), PLANS)
def test_the_drawing_is_xml_with_every_bucket_and_phase(name: str, device: str, lengths: Lengths | None) -> None:
    plan = planned(name, device, lengths)
    told = texts(plan_svg(plan))
    for bucket, size in plan.buckets().items():
        assert told[told.index(bucket) + 1].lstrip("~") == gb(size)
        assert told[told.index(bucket) + 2] == percent(size / plan.total)
    for phase, size in plan.account.phases.items():
        assert told[len(told) - 1 - told[::-1].index(phase) - 1] == gb(size).removesuffix(" GB")
    assert any(text.startswith(f"~{gb(plan.total)}") for text in told)
    assert ("does not fit" in told) == (not plan.fits)
    assert "1 GB = 1e9 bytes" in " ".join(told)  # it may be broken over two lines


@pytest.mark.parametrize(("name", "device", "lengths"), PLANS)
def test_the_long_bar_is_to_scale(name: str, device: str, lengths: Lengths | None) -> None:
    """Each bucket begins where those before it end, and the whole is the device or the larger plan."""
    plan = planned(name, device, lengths)
    root = ElementTree.fromstring(plan_svg(plan))
    [clipped] = [node for node in root.iter(f"{DRAWN}g") if "clip-path" in node.attrib]
    [frame] = root.iter(f"{DRAWN}clipPath")
    left, whole = float(frame[0].attrib["x"]), float(frame[0].attrib["width"])
    starts = {bar.attrib["class"]: float(bar.attrib["x"]) for bar in clipped if bar.attrib["class"] in BUCKETS}
    before = 0
    for bucket, size in plan.buckets().items():
        if size:
            assert starts[bucket] == pytest.approx(left + whole * before / max(plan.room, plan.total), abs=0.01)
        before += size


def test_the_drawing_shows_the_lengths_of_the_rows() -> None:
    told = texts(plan_svg(planned("smollm2-lora", "cpu", ROWS)))
    for end, rows in ROWS.histogram():
        assert told[told.index(f"≤ {end:,}") - 1] == f"{rows:,}"
    assert "≤" not in "".join(texts(plan_svg(planned("smollm2-lora", "cpu"))))


def test_the_drawing_marks_where_a_device_ends() -> None:
    assert any("the device ends here, 24.00 GB" in text for text in texts(plan_svg(planned("llama7b-full", "24GB"))))
    assert not any("ends here" in text for text in texts(plan_svg(planned("gemma2b-qlora", "24GB"))))


@pytest.mark.parametrize("name", ["a/<b>&\"c'", "x" * 200, "日本語/モデル"])
def test_any_model_name_can_be_drawn(name: str) -> None:
    plan = replace(planned("gemma2b-qlora", "24GB"), model=name)
    assert name in "".join(ElementTree.fromstring(plan_svg(plan)).itertext())  # whole in the title at least
    assert name in Page(plan_html(plan)).text


@pytest.mark.parametrize("size", ["1GB", "900GB", "0.5GB"])
def test_any_device_can_be_drawn(size: str) -> None:
    told = texts(plan_svg(replace(planned("smollm2-lora", "24GB"), device=named_device(size))))
    marks = [text for text in told if text.removesuffix(" GB").replace(".", "").isdigit() and text.endswith(" GB")]
    assert 2 <= len(marks)


# ---------------------------------------------------------------------------------------------------------- the page


@pytest.mark.parametrize(("name", "device", "lengths"), PLANS)
def test_the_page_has_every_line_with_its_formula(name: str, device: str, lengths: Lengths | None) -> None:
    plan = planned(name, device, lengths)
    said = Page(plan_html(plan)).text
    for line in plan.lines:
        if line.bytes:
            assert line.name in said
            assert " ".join(line.formula.split()) in said
    for choice in plan.choices:
        assert choice.field in said
        assert choice.because in said
    for bucket, size in plan.buckets().items():
        assert f"{bucket} {gb(size)} {percent(size / plan.total)}" in said
    assert verdict(plan) in said


def test_the_page_of_a_plan_that_does_not_fit_shows_the_changes() -> None:
    answer = fitted("llama7b-full", "24GB")
    said = Page(plan_html(planned("llama7b-full", "24GB"), answer)).text
    for change in answer.changes:
        assert f"{change.field}: {change.value} {gb(change.alone)} {gb(change.together)} {change.cost}" in said
    assert "finetune plan RECIPE --fit FILE" in said
    assert fit_in_words(answer) in said


def test_the_page_compares() -> None:
    rows = compared("llama7b-lora", "24GB")
    page = Page(plan_html(planned("llama7b-lora", "24GB"), rows=rows))
    for row in rows:
        marks = ["✓" if card in row.cards else "↻" if card in row.recomputing else "✗" for card in CARDS]
        assert f"{gb(row.plan.total).removesuffix(' GB')} {' '.join(marks)}" in page.text
    assert page.text.count("✓") == sum(len(row.cards) for row in rows)
    again = sum(len(row.recomputing) for row in rows)
    assert page.text.count("↻") == again + 1  # and in the note that says what it means
    assert page.text.count("✓") + page.text.count("✗") + again == len(rows) * len(CARDS)
    assert "recomputed" in page.text


@pytest.mark.parametrize(("name", "device", "lengths"), PLANS)
def test_nothing_comes_from_elsewhere(name: str, device: str, lengths: Lengths | None) -> None:
    plan = planned(name, device, lengths)
    for document in (plan_svg(plan), plan_html(plan, rows=compared("llama7b-lora", "24GB"))):
        rest = document.replace('xmlns="http://www.w3.org/2000/svg"', "")
        for word in ("http", "//", "@import", "url(", "src=", "href=", "<script", "<link"):
            assert word not in rest.replace("url(#", "")
        assert "prefers-color-scheme:dark" in document


def test_the_page_is_made_without_rich_and_torch() -> None:
    code = (
        "import sys\nfrom finetune.plan import plan\nfrom finetune.plan_page import plan_html, plan_svg\n"
        "p = plan('gemma2b-qlora', '24GB')\nassert plan_svg(p) and plan_html(p)\n"
        "print([name for name in ('rich', 'torch', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
