"""The first step of real rows on the real model in fp32: every adapter's gradient beside TRL's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "check_gradients.py"


@pytest.mark.long
@pytest.mark.parametrize("job", ["home", "third"])
def test_gradients_are_trls(job: str) -> None:
    done = subprocess.run([sys.executable, str(SCRIPT), "--jobs", job], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    arms = [line.split("|")[2].strip() for line in done.stdout.splitlines() if line.startswith(f"| {job} |")]
    assert arms == ["trl", "finetune", "finetune, products: false"]
