"""Tiny runs: a random model of two layers, a few chat rows, recipes as text."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from finetune.recipe import Recipe, parse_recipe
from tests.tiny import tiny_model

METHODS = {
    "full": "{kind: full}",
    "lora": "{kind: lora, rank: 4, alpha: 8}",
    "qlora": "{kind: qlora, rank: 4, alpha: 8}",
}


def chat_rows(count: int = 24) -> list[dict[str, Any]]:
    """Conversations of clearly different lengths."""
    return [
        {
            "messages": [
                {"role": "user", "content": f"Say {n}"},
                {"role": "assistant", "content": "and " * (n % 7) + f"{n}"},
            ]
        }
        for n in range(count)
    ]


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("base") / "tiny", shards=2)


@pytest.fixture(scope="session")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("rows") / "rows.jsonl", chat_rows())


def recipe_text(
    base: Path, rows: Path, method: str = "lora", *, data: str = "", train: str = "", rest: str = ""
) -> str:
    return (
        f"model: {base}\nmethod: {METHODS.get(method, method)}\n"
        f"data: {{train: {rows}, max_length: 128{', ' if data else ''}{data}}}\n"
        f"train: {{epochs: 1, batch_size: 4, micro_batch: 2, learning_rate: 1e-2, log_every: 1"
        f"{', ' if train else ''}{train}}}\n"
        f"{rest}"
    )


def recipe(base: Path, rows: Path, method: str = "lora", **parts: str) -> Recipe:
    return parse_recipe(recipe_text(base, rows, method, **parts))


def losses(folder: Path) -> dict[int, float]:
    """Step -> loss from metrics.jsonl; a step that was trained twice keeps its last line."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def child(*arguments: str, cwd: Path, **environment: str) -> subprocess.Popen[str]:
    """`python -m finetune ...` in its own process group."""
    return subprocess.Popen(
        [sys.executable, "-m", "finetune", *arguments],
        cwd=cwd,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
