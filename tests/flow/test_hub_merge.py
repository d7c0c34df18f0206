"""A base on the hub: refused by its headers, merged while its shards arrive, from the cache where it can be."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file

from finetune.merge import merge
from tests.fake_hub import COMMIT, FakeHub, fake_hub
from tests.flow.conftest import recipe_text
from tests.test_merge import edit, weights, write_adapter
from tests.tiny import tiny_model

SHARDS = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("published") / "base", shards=3, dtype="bfloat16")


@pytest.fixture(scope="module")
def adapter(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_adapter(base, tmp_path_factory.mktemp("published") / "adapter")
    edit(folder / "adapter_config.json", base_model_name_or_path="org/model")
    return folder


@pytest.fixture
def hub(base: Path) -> Iterator[FakeHub]:
    with fake_hub(base) as hub:
        yield hub


def begin(hub: FakeHub, folder: Path, *arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "finetune", *map(str, arguments)],
        cwd=folder, env={**os.environ, "FINETUNE_CACHE": str(folder / "cache"), **hub.environment(folder / "home")},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def finetune(hub: FakeHub, folder: Path, *arguments: object) -> tuple[int, str, str]:
    process = begin(hub, folder, *arguments)
    out, err = process.communicate(timeout=600)
    return process.returncode, out, err


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 300
    while not true():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_shard_is_merged_while_the_next_one_is_on_its_way(
    hub: FakeHub, base: Path, adapter: Path, tmp_path: Path
) -> None:
    hub.hold = set(SHARDS[1:])
    process = begin(hub, tmp_path, "merge", adapter, "--output", "out")
    first = base / SHARDS[0]

    def written() -> bool:
        return any(file.stat().st_size == first.stat().st_size for file in tmp_path.glob(f"out.part-*/{first.name}"))

    until(written)
    assert hub.whole()[0] == SHARDS[0]
    assert SHARDS[2] not in hub.whole()
    hub.go.set()
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    assert "Proved on 4 rows" in out
    assert hub.whole() == SHARDS, "each once, for the proof too"
    here = weights(merge(adapter, tmp_path / "here", base=str(base), verify=False).folder)
    there = weights(tmp_path / "out")
    assert here.keys() == there.keys()
    assert all(here[name].equal(there[name]) for name in here)
    marks = [json.loads((tmp_path / name / "finetune_merge.json").read_text()) for name in ("here", "out")]
    assert marks[0]["base"]["sha256"] == marks[1]["base"]["sha256"]
    asked = len(hub.asked)
    code, again, err = finetune(hub, tmp_path, "merge", adapter, "--output", "out", "--no-verify")
    assert (code, len(hub.asked)) == (0, asked), err
    assert "already holds exactly this merge" in again


def test_an_interrupt_waits_for_no_download(hub: FakeHub, adapter: Path, tmp_path: Path) -> None:
    hub.hold = set(SHARDS)
    process = begin(hub, tmp_path, "merge", adapter, "--output", "out")
    until(lambda: hub.whole() == SHARDS[:1])
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=600)
    assert not hub.go.is_set()
    assert process.returncode == 130, err
    assert not list(tmp_path.glob("out*"))


def test_what_headers_show_is_refused_before_a_weight_is_fetched(hub: FakeHub, adapter: Path, tmp_path: Path) -> None:
    narrow = tiny_model(tmp_path / "narrow", hidden_size=32)
    other = write_adapter(narrow, tmp_path / "other")
    edit(other / "adapter_config.json", base_model_name_or_path="org/model")
    code, _, err = finetune(hub, tmp_path, "merge", other, "--output", "out")
    assert code == 2, err
    assert "is made for a weight of 64 x 32" in err
    assert hub.whole() == []
    assert not list(tmp_path.glob("out*"))


def test_a_download_that_breaks_off_leaves_nothing_and_goes_on(hub: FakeHub, adapter: Path, tmp_path: Path) -> None:
    hub.broken = {SHARDS[1]}
    code, _, err = finetune(hub, tmp_path, "merge", adapter, "--output", "out", "--no-verify")
    assert code == 2
    assert f"finetune: {SHARDS[1]} of org/model could not be fetched: " in err
    assert err.endswith("Try again: what has arrived stays in the hub's cache.\n")
    assert not list(tmp_path.glob("out*"))
    hub.broken = set()
    before = len(hub.whole())
    assert finetune(hub, tmp_path, "merge", adapter, "--output", "out", "--no-verify")[0] == 0
    assert hub.whole()[before:] == SHARDS[1:], "the first one is in the cache"


def test_a_run_takes_the_commit_it_was_trained_on(hub: FakeHub, rows: Path, tmp_path: Path) -> None:
    """QLoRA, whose linear layers are asked of the headers too."""
    (tmp_path / "recipe.yaml").write_text(recipe_text(Path("org/model"), rows, "qlora", train="steps: 2"))
    code, _, err = finetune(hub, tmp_path, "train", "recipe.yaml", "--output", "run")
    assert code == 0, err
    assert json.loads((tmp_path / "run" / "base.json").read_text())["commit"] == COMMIT
    shutil.rmtree(tmp_path / "home")
    hub.asked.clear()
    code, out, err = finetune(hub, tmp_path, "merge", "run")
    assert code == 0, err
    assert "cannot be seen" not in out
    assert hub.whole() == SHARDS
    assert load_file(tmp_path / "run" / "merged" / SHARDS[0])
