"""What every test gets: an own cache and working folder for runs, no hub, and few threads (the products are tiny)."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# A suite in the background of a shell ignores Ctrl-C, and so would the runs that it starts and interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def workdir(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> object:
    """An empty current folder, so that `runs/` is the test's own."""
    monkeypatch.chdir(str(tmp_path))
    return tmp_path


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Threads that wait for each other on a busy machine cost more than small products take."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
