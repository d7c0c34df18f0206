"""The command `finetune`, run inside the test's process."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from finetune.cli import main


def finetune(capsys: pytest.CaptureFixture[str], *arguments: Any) -> tuple[int, str, str]:
    """Exit code, stdout, stderr of one command."""
    capsys.readouterr()
    before, code = sys.argv, 0
    sys.argv = ["finetune", *map(str, arguments)]
    try:
        main()
    except SystemExit as stop:
        code = int(stop.code or 0)
    finally:
        sys.argv = before
    said = capsys.readouterr()
    return code, said.out, said.err
