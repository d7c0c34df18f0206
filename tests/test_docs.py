"""The documentation, run: shell lines are executed or parsed; recipes, rows, snippets, fields and links checked."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import typer

from finetune import formats
from finetune.cli import app
from finetune.recipe import load_recipe, parse_recipe
from finetune.recipe import schema as recipe_schema

ROOT = Path(__file__).resolve().parent.parent
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *(ROOT / "docs" / f"{name}.md" for name in ("recipe", "data", "serve")),
]
README = PAGES[0].read_text(encoding="utf-8")

Command = tuple[str, str, str]  # where it stands, the line, its comment

# What a CPU without a hub answers in a second or two; everything else is parsed.
QUICK = ("--help", "--version", "plan", "recipes", "runs", "schema", "init")
# Lines that other programs answer, by their first words; what can be checked of them is.
OTHERS = ("python3 -m venv ", ". .venv/bin/activate", "hf auth login", "pip install ")


# ------------------------------------------------------------------------------------------------ what the pages hold


def blocks(page: Path, language: str) -> list[tuple[int, str]]:
    """(line of the first line, text) of every fenced block in a language."""
    text = page.read_text(encoding="utf-8")
    found = re.finditer(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [(text.count("\n", 0, hit.start(1)) + 1, hit[1]) for hit in found]


def commands(page: Path) -> list[Command]:
    """Every line of every shell block, without its comment."""
    found = []
    for first, text in blocks(page, "sh"):
        for number, line in enumerate(text.splitlines(), first):
            command, _, comment = line.partition(" #")
            if command.strip():
                found.append((f"{page.name}:{number}", command.strip(), comment.strip()))
    return found


def finetune_lines(page: Path) -> list[Command]:
    return [found for found in commands(page) if found[1].startswith("finetune ")]


def subcommands() -> dict[str, Any]:
    group: Any = typer.main.get_command(app)
    return dict(group.commands)


def check_parses(arguments: Sequence[str]) -> None:
    """Parse what follows `finetune` with the real command line, without running it; recipes are checked too."""
    rest = [argument for argument in arguments if argument != "--debug"]
    if rest[0] in ("--help", "--version"):
        return
    group: Any = typer.main.get_command(app)
    command = subcommands()[rest[0]]
    context = command.make_context(rest[0], list(rest[1:]), parent=group.context_class(group, info_name="finetune"))
    if rest[0] == "launch":
        check_parses(context.args)
    else:
        assert not context.args
    overrides = context.params.get("set_") or []
    if (name := context.params.get("recipe")) and not str(name).endswith(".yaml"):
        load_recipe(name, overrides)


# ---------------------------------------------------------------------------------------------------- the shell lines


def run(line: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run one line as a reader with the environment activated would, away from this machine's cache, hub and runs."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    environment = {
        **os.environ,
        "PATH": path,
        "HF_HUB_OFFLINE": "1",
        "FINETUNE_CACHE": str(folder / "cache"),
        "COLUMNS": "120",
    }
    return subprocess.run(
        shlex.split(line),
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
    )


def test_quick_commands_of_the_readme_run_in_its_order(tmp_path: Path) -> None:
    ran = []
    for where, line, comment in finetune_lines(PAGES[0]):
        if shlex.split(line)[1] not in QUICK or "--verify" in line:  # tests/test_planning.py takes those two steps
            continue
        done = run(line, tmp_path)
        code = re.search(r"exit code (\d+)", comment)
        expected = {int(code[1])} if code else {0}
        if line.startswith("finetune plan") and "--device" not in line:
            expected |= {3}  # this machine may be a small one
        assert done.returncode in expected, f"{where}: {line}\n{done.stdout}{done.stderr}"
        assert "Traceback" not in done.stderr, where
        if done.returncode == 0:
            assert done.stdout.strip() or line == "finetune runs", f"{where}: {line} says nothing"
        if "--json" in line:
            json.loads(done.stdout)
        ran.append(line)
    assert len(ran) >= 10
    assert {shlex.split(line)[1] for line in ran} >= {"--help", "plan", "recipes", "init"}
    for written in tmp_path.glob("*.yaml"):
        load_recipe(written)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_finetune_lines_parse(page: Path) -> None:
    seen = finetune_lines(page)
    for where, line, _ in seen:
        try:
            check_parses(shlex.split(line)[1:])
        except Exception as error:
            pytest.fail(f"{where}: {line}: {type(error).__name__}: {error}")
    assert len(seen) >= (20 if page == PAGES[0] else 0)


def test_the_parser_of_this_test_refuses_what_is_wrong() -> None:
    wrong = [
        "train smollm2-lora --sett a=b",
        "trian x",
        "train smollm2-lora --set method.rnk=8",
        "train smollm3-lora",
        "launch -n x train smollm2-lora",
        "launch -n 2 train smollm2-lora --ouptut x",
    ]
    for line in wrong:
        with pytest.raises(Exception, match=r"."):
            check_parses(shlex.split(line))


def test_make_lines_expand_to_commands_that_parse() -> None:
    seen = []
    for where, line, _ in [found for page in PAGES for found in commands(page) if found[1].startswith("make ")]:
        words = shlex.split(line)
        extra = [] if any(word.startswith("RUN=") for word in words) else ["RUN=runs/example"]
        done = subprocess.run(
            ["make", "-n", *words[1:], *extra], cwd=ROOT, capture_output=True, text=True, timeout=60,
            env={key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "MFLAGS"))},
        )  # fmt: skip
        assert done.returncode == 0, f"{where}: {line}\n{done.stderr}"
        expanded = [found[1] for found in re.finditer(r"^\S*bin/finetune (.*)$", done.stdout, re.MULTILINE)]
        assert expanded or words[1] in ("test", "check"), f"{where}: {line} runs no finetune command"
        for arguments in expanded:
            check_parses(shlex.split(arguments))
        seen.append(words[1])
    assert {"train", "test", "plan", "check"} <= set(seen)


def test_every_make_target_named_in_the_pages_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = {name for page in PAGES for name in re.findall(r"`make ([a-z-]+)`", page.read_text(encoding="utf-8"))}
    assert len(named) >= 6
    assert named <= targets


def test_accelerate_lines_parse() -> None:
    from accelerate.commands.launch import launch_command_parser  # type: ignore[import-untyped]

    seen = [found for found in commands(PAGES[0]) if "accelerate launch" in found[1]]
    for where, line, _ in seen:
        words = shlex.split(line)
        while re.fullmatch(r"[A-Z_]+=\S+", words[0]):
            words.pop(0)
        parsed = launch_command_parser().parse_args(words[2:])
        assert (parsed.module, parsed.training_script) == (True, "finetune"), where
        check_parses(parsed.training_script_args)
    assert len(seen) >= 3


def test_other_lines_are_known_and_install_what_exists() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    extras = set(
        re.findall(r"^(\w+) = \[", project.partition("[project.optional-dependencies]")[2].partition("\n[")[0], re.M)
    )
    seen = 0
    for where, line, _ in [found for page in PAGES for found in commands(page)]:
        words = shlex.split(line)
        if line.startswith(("finetune ", "make ")) or "accelerate launch" in line:
            continue
        if words[0] == "python":
            assert (ROOT / words[1]).is_file(), f"{where}: {line}"
            continue
        assert line.startswith(OTHERS), f"{where}: this test does not know how to check `{line}`"
        for word in words:
            if hit := re.fullmatch(r"\.\[(.*)\]", word):
                assert set(hit[1].split(",")) <= extras, f"{where}: {line}"
        if "-c" in words:
            assert (ROOT / words[words.index("-c") + 1]).is_file(), where
        seen += 1
    assert seen >= 4


def test_every_command_is_in_the_readme() -> None:
    names = list(subcommands())
    assert len(names) >= 10
    assert [name for name in names if f"`finetune {name}`" not in README] == []
    named = set(re.findall(r"`?finetune ([a-z]+)", README)) & {
        "infer",
        "data",
        "compare",
        "sweep",
        "analyze",
        "facts",
        "doctor",
    }
    assert named <= set(names), "the README names commands that are not there yet"


# ------------------------------------------------------------------------------------ recipes, rows, snippets, fields


def test_recipes_in_the_pages_are_recipes() -> None:
    seen = [(page, *block) for page in PAGES for block in blocks(page, "yaml")]
    for page, line, text in seen:
        parse_recipe(text, f"{page.name}:{line}")
    assert seen


def test_rows_in_the_readme_are_one_of_each_layout() -> None:
    found = []
    for _, text in blocks(PAGES[0], "jsonl"):
        for line in text.splitlines():
            row = json.loads(line)
            layout, _ = formats.detect(row)
            assert formats.to_conversation(row, layout).messages
            found.append(layout)
    assert sorted(set(found)) == sorted({layout for layout, _ in formats.LAYOUTS})


def test_python_in_the_readme_runs_as_far_as_a_cpu_goes(tmp_path: Path) -> None:
    ran = 0
    for line, text in blocks(PAGES[0], "python"):
        tree = ast.parse(text, f"README.md:{line}")
        modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        if modules == {"finetune"}:
            done = subprocess.run(
                [sys.executable, "-c", text], cwd=tmp_path, capture_output=True, text=True, timeout=60
            )
            assert done.returncode == 0, done.stderr
            assert done.stdout
            ran += 1
    assert ran >= 1


def fields() -> Iterator[str]:
    """Dotted names of all fields of a recipe, from its JSON Schema."""
    document = recipe_schema()

    def walk(node: dict[str, Any], prefix: str) -> Iterator[str]:
        if "$ref" in node:
            node = document["$defs"][node["$ref"].rpartition("/")[2]]
        for branch in [*node.get("anyOf", []), *node.get("oneOf", [])]:
            yield from walk(branch, prefix)
        for name, below in node.get("properties", {}).items():
            yield f"{prefix}{name}"
            yield from walk(below, f"{prefix}{name}.")

    return walk(document, "")


def test_fields_named_in_the_pages_exist() -> None:
    known = set(fields())
    assert {"model", "method.rank", "method.double_quant", "train.optimizer", "evaluate.rows"} <= known
    parts = "|".join(sorted({name.partition(".")[0] for name in known}))
    named = {
        name
        for page in PAGES
        for name in re.findall(rf"`((?:{parts})\.\w+)(?::[^`]*)?`", page.read_text(encoding="utf-8"))
        if not name.endswith((".json", ".yaml", ".py"))
    }
    assert len(named) >= 30
    assert sorted(named - known) == ["plan.resolve"] * ("plan.resolve" in named)


def test_optimizers_are_listed_in_the_readme() -> None:
    listed = README.partition("<!-- begin optimizers -->")[2].partition("<!-- end optimizers -->")[0]
    choices = [
        choice
        for choice in json.dumps(recipe_schema()).split('"')
        if re.fullmatch(r"\w*(adam|lion|adafactor|sgd)\w*", choice)
    ]
    assert len(set(choices)) >= 9
    assert [choice for choice in choices if f"`{choice}`" not in listed] == []


# ---------------------------------------------------------------------------------------------------- links, pictures


def test_links_lead_somewhere() -> None:
    seen = 0
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        headings = [
            re.sub(r"[^\w\- ]", "", title).strip().lower().replace(" ", "-")
            for title in re.findall(r"^#+ (.*)$", text, re.M)
        ]
        for link in re.findall(r"\]\(([^)]+)\)", text):
            if link.startswith("https://"):
                continue
            path, _, anchor = link.partition("#")
            assert not path or (page.parent / path).exists(), f"{page.name}: {link}"
            assert path or anchor in headings, f"{page.name}: {link}"
            seen += 1
    assert seen >= 8


def test_pictures_stand_alone() -> None:
    pictures = re.findall(r"!\[[^\]]+\]\((\S+\.svg)\)", README)
    assert len(pictures) == 2
    for name in pictures:
        text = (ROOT / name).read_text(encoding="utf-8")
        assert "<svg" in text
        assert "@font-face" not in text
        assert re.findall(r"https?://[^\"' ]+", text) == ["http://www.w3.org/2000/svg"], name


@pytest.mark.parametrize("script", ["make_docs.py", "make_pictures.py"])
def test_what_is_generated_is_up_to_date(script: str) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / script), "--check"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
