"""The house itself: reading order is import order, the cold half stays cold, the verbs are there."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import finetune

PACKAGE = Path(finetune.__file__).parent
HEAVY = ("torch", "transformers", "datasets", "trl", "peft", "bitsandbytes", "accelerate")


def listed() -> tuple[list[str], int]:
    """Modules of the docstring in order, and how many stand above the line."""
    names: list[str] = []
    cold = 0
    for line in (finetune.__doc__ or "").splitlines():
        if line.strip().startswith("-----"):
            cold = len(names)
        elif match := re.match(r"    ([a-z_.]+)  +\S", line):
            names.append(match[1])
    return names, cold


def files() -> dict[str, Path]:
    found = {".".join(p.relative_to(PACKAGE).with_suffix("").parts): p for p in PACKAGE.rglob("*.py")}
    return {name: path for name, path in found.items() if not name.endswith(("__init__", "__main__"))}


def imported(path: Path) -> set[str]:
    """Modules of the package that a file imports, at the top or inside functions, but not for types only."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "finetune":
            inside = node.module.removeprefix("finetune").lstrip(".")
            found |= (
                {inside} if inside and inside != "fast" else {f"{inside}.{a.name}".lstrip(".") for a in node.names}
            )
    return found & files().keys()


def test_every_module_is_listed_once() -> None:
    names, cold = listed()
    assert sorted(names) == sorted(files())
    assert 15 < cold < len(names)


def test_imports_point_up_only() -> None:
    names, _ = listed()
    seen = 0
    for name, path in files().items():
        for other in imported(path):
            seen += 1
            assert names.index(other) < names.index(name), f"{name} imports {other}, which stands below it"
    assert seen > 50


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    return done.stdout


@pytest.mark.parametrize("what", ["finetune.cli", *[f"finetune.{name}" for name in listed()[0][: listed()[1]]]])
def test_the_cold_half_imports_no_heavy_library(what: str) -> None:
    code = f"import sys, {what}; print([m for m in {HEAVY} if m in sys.modules])"
    assert run_python(code).strip() == "[]"


def test_help_and_plan_import_no_torch() -> None:
    code = (
        "import sys\nfrom finetune.cli import main\n"
        "for arguments in (['--help'], ['plan', 'gemma2b-qlora', '--device', '24GB'], ['recipes'], ['schema']):\n"
        "    sys.argv = ['finetune', *arguments]\n"
        "    try: main()\n    except SystemExit as stop: assert not stop.code, stop.code\n"
        f"print('HEAVY', [m for m in {HEAVY} if m in sys.modules])"
    )
    assert run_python(code).splitlines()[-1] == "HEAVY []"


def test_the_verbs_stay_functions_whatever_was_imported_before() -> None:
    code = (
        "import finetune.plan, finetune.recipe, finetune.merge, finetune\n"
        "from finetune import load_recipe, plan, merge\n"
        "print(callable(finetune.plan), callable(plan), callable(load_recipe), callable(merge))"
    )
    assert run_python(code).split() == ["True"] * 4
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = finetune.trian
