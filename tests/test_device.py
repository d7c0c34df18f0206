"""Names and sizes a user writes, and a machine that is asked through a made-up nvidia-smi."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from finetune.device import _CARDS, Device, named_device, this_device
from finetune.errors import InputError

GIB = 2**30


@pytest.mark.parametrize(
    ("name", "memory"),
    [
        ("24GB", 24 * 10**9),
        ("24gb", 24 * 10**9),
        (" 24 GB ", 24 * 10**9),
        ("16GiB", 16 * GIB),
        ("79.5GiB", int(79.5 * GIB)),
        ("0.5GB", 500_000_000),
    ],
)
def test_a_size_says_which_unit(name: str, memory: int) -> None:
    assert named_device(name) == Device("cuda", name, memory, bf16=True, count=1)


@pytest.mark.parametrize(
    ("name", "gib", "bf16"),
    [("t4", 15, False), ("v100", 16, False), ("rtx4090", 24, True), ("A100-80GB", 80, True), ("H200", 141, True)],
)
def test_a_card_is_known_by_name(name: str, gib: int, bf16: bool) -> None:
    device = named_device(name)
    assert (device.kind, device.name, device.memory, device.bf16) == ("cuda", name.lower(), gib * GIB, bf16)


def test_every_card_has_memory() -> None:
    assert len(_CARDS) > 10
    for card in _CARDS:
        assert named_device(card).memory >= 12 * GIB


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("24", "'24' has no unit. Write 24GB (1e9 bytes) or 24GiB (2**30 bytes)."),
        ("rtx409", "'rtx409' is neither a size nor a known card. Did you mean rtx4090?"),
        ("h20", "'h20' is neither a size nor a known card. Did you mean h200?"),
        ("a100", "'a100' is neither a size nor a known card. Did you mean a100-40gb or a100-80gb?"),
    ],
)
def test_what_cannot_be_read_is_refused_with_a_way_out(name: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        named_device(name)
    assert str(caught.value) == message
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("name", ["toaster", "24TB", "-3GB", "GB", "", "1.2.3GB", "24GB80"])
def test_nonsense_is_refused_with_examples(name: str) -> None:
    with pytest.raises(
        InputError, match=r"neither a size nor a known card\. (Write a size such as 24GB, or one of t4, |Did you)"
    ):
        named_device(name)


# ------------------------------------------------------------------------------------------------------- this machine


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without nvidia-smi and the launcher's variables; a script in the folder gives it a driver."""
    for name in ("CUDA_VISIBLE_DEVICES", "ACCELERATE_USE_CPU", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def driver(folder: Path, body: str) -> None:
    tool = folder / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{body}\n")
    tool.chmod(0o755)


def test_without_a_card_it_is_the_cpu_with_all_its_memory(machine: Path) -> None:
    device = this_device()
    assert (device.kind, device.count) == ("cpu", 1)
    assert device.memory == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert device.name == f"CPU, {os.cpu_count()} cores"
    assert named_device("auto") == device


def test_the_drivers_answer_is_read(machine: Path) -> None:
    driver(machine, "echo 'NVIDIA H200, 143771, 9.0'; echo 'Tesla T4, 15360, 7.5'")
    assert this_device() == Device("cuda", "NVIDIA H200", 143771 * 2**20, bf16=True)


def test_an_old_card_has_no_bf16(machine: Path) -> None:
    driver(machine, "echo 'Tesla T4, 15360, 7.5'")
    assert this_device() == Device("cuda", "Tesla T4", 15360 * 2**20, bf16=False)


def test_the_first_visible_card_is_asked_for(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver(machine, 'for a in "$@"; do last=$a; done; echo "card $last, 1000, 8.0"')
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,0")
    assert this_device().name == "card --id=2"


@pytest.mark.parametrize("visible", ["", "-1"])
def test_hidden_cards_are_not_used(machine: Path, monkeypatch: pytest.MonkeyPatch, visible: str) -> None:
    driver(machine, "echo 'NVIDIA H200, 143771, 9.0'")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert this_device().kind == "cpu"


def test_accelerate_may_ask_for_the_cpu(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver(machine, "echo 'NVIDIA H200, 143771, 9.0'")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    assert this_device().kind == "cpu"
    monkeypatch.setenv("ACCELERATE_USE_CPU", "false")
    assert this_device().kind == "cuda"


@pytest.mark.parametrize("body", ["exit 9", "echo 'No devices were found'", "echo 'X, [N/A], 9.0'", "true"])
def test_a_driver_without_an_answer_means_cpu(machine: Path, body: str) -> None:
    driver(machine, body)
    assert this_device().kind == "cpu"


def test_the_launchers_processes_are_counted(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert this_device().count == 8
    assert this_device(count=2).count == 2
