"""What every test gets: an own cache and working folder for runs, no hub, and few threads (the products are tiny)."""

from __future__ import annotations

import os

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"


@pytest.fixture
def workdir(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> object:
    """An empty current folder, so that `runs/` is the test's own."""
    monkeypatch.chdir(str(tmp_path))
    return tmp_path
