"""Write the pictures of the README: the plan as it is drawn, and a terminal in which an evaluation was shown.

python scripts/make_pictures.py            docs/images/plan.svg
python scripts/make_pictures.py RUN        also docs/images/before-after.svg, from an evaluated run folder
python scripts/make_pictures.py --check    fail when plan.svg is not what `finetune plan` draws today
"""

from __future__ import annotations

import argparse
import io
import re
import sys
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.terminal_theme import TerminalTheme
from rich.text import Text

from finetune.plan import plan
from finetune.plan_page import plan_svg
from finetune.report import evaluation_view

IMAGES = Path(__file__).resolve().parent.parent / "docs" / "images"
RECIPE, CARD = "gemma2b-qlora", "rtx4090"
_WIDEST = 110  # characters; more would be too small to read in a page's column

# Brings its own background, so it reads the same on a light and on a dark page.
_THEME = TerminalTheme(
    (22, 27, 34),
    (230, 237, 243),
    [
        (72, 79, 88),
        (255, 123, 114),
        (63, 185, 80),
        (227, 179, 65),
        (88, 166, 255),
        (188, 140, 255),
        (57, 197, 207),
        (177, 186, 196),
    ],
    [
        (110, 118, 129),
        (255, 161, 152),
        (86, 211, 100),
        (240, 198, 87),
        (121, 192, 255),
        (210, 168, 255),
        (86, 212, 221),
        (255, 255, 255),
    ],
)

# rich's own form without its title bar, and without fonts from elsewhere, which a page would not load anyway.
_FORM = """\
<svg viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg" xml:space="preserve">
<style>
.{unique_id}-matrix {{ font: {char_height}px/{line_height}px ui-monospace, SFMono-Regular, Menlo, Consolas, \
"DejaVu Sans Mono", "Liberation Mono", monospace; white-space: pre; }}
{styles}
</style>
<rect width="{width}" height="{height}" rx="10" fill="#161b22" stroke="#30363d" />
<g transform="translate(16, 14)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""
_TITLE_BAR = 40  # height that rich leaves for it


def picture(command: str, view: RenderableType, name: str) -> str:
    """SVG of a terminal in which `command` has just shown `view`, as wide as the view wants to be."""
    whole = Group(Text.assemble(("$ ", "dim"), (command, "bold")), "", view)
    console = Console(
        record=True, file=io.StringIO(), width=_widest_line(whole) + 2, force_terminal=True, color_system="truecolor",
        legacy_windows=False,
    )  # fmt: skip
    console.print(whole)
    svg = console.export_svg(theme=_THEME, code_format=_FORM, unique_id=name, font_aspect_ratio=0.602)
    return _cropped(svg)


def _widest_line(view: RenderableType) -> int:
    """Characters of the longest line when the view has all the room it may take."""
    lines = Console(file=io.StringIO(), width=_WIDEST, force_terminal=True).render_lines(view, pad=False)
    return max(len("".join(segment.text for segment in line).rstrip()) for line in lines)


def _cropped(svg: str) -> str:
    """Take off the height of the title bar and the clipping of every line, and give all sides the same margin."""
    svg = re.sub(r' clip-path="[^"]*"', "", svg)
    svg = re.sub(r"<text [^>]*>\s*</text>", "", svg)  # line ends
    size = re.search(r'viewBox="0 0 (\d+) ([\d.]+)"', svg)
    assert size is not None
    width, height = float(size[1]) + 16, float(size[2]) - _TITLE_BAR + 20
    svg = svg.replace(size[0], f'viewBox="0 0 {width:g} {height:g}" width="{width:g}"', 1)
    return re.sub(
        r'<rect width="\d+" height="[\d.]+" rx', f'<rect width="{width:g}" height="{height:g}" rx', svg, count=1
    )


def plan_picture() -> str:
    """The plan of one recipe and card, drawn as `finetune plan --svg` draws it."""
    return plan_svg(plan(RECIPE, CARD))


def before_after_picture(run: Path) -> str:
    """What `finetune eval` showed at the end of a run."""
    from finetune.evaluate import read_evaluation

    return picture(f"finetune eval {run.name}", evaluation_view(read_evaluation(run)), "before-after")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", nargs="?", type=Path)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    file = IMAGES / "plan.svg"
    if options.check:
        if not file.is_file() or file.read_text(encoding="utf-8") != plan_picture():
            sys.exit("docs/images/plan.svg is not what `finetune plan --svg` draws. Run scripts/make_pictures.py.")
        return
    made = {"plan.svg": plan_picture()}
    if options.run is not None:
        made["before-after.svg"] = before_after_picture(options.run)
    IMAGES.mkdir(parents=True, exist_ok=True)
    for name, svg in made.items():
        (IMAGES / name).write_text(svg, encoding="utf-8")
        print(f"wrote docs/images/{name}")


if __name__ == "__main__":
    main()
