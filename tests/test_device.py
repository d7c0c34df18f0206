"""Names and sizes a user writes, and a machine that is asked through a made-up nvidia-smi."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from finetune.device import _CARDS, Device, known_card, named_device, this_device
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


def test_a_size_says_nothing_of_the_card() -> None:
    device = named_device("24GB")
    assert (device.capability, device.multiprocessors, device.tflops, device.bandwidth) == (None, None, None, None)


@pytest.mark.parametrize(
    ("name", "gib", "bf16"),
    [("t4", 15, False), ("v100", 16, False), ("rtx4090", 24, True), ("A100-80GB", 80, True), ("L4", 22.5, True)],
)
def test_a_card_is_known_by_name(name: str, gib: float, bf16: bool) -> None:
    device = named_device(name)
    assert (device.kind, device.name, device.memory, device.bf16) == ("cuda", name.lower(), gib * GIB, bf16)


@pytest.mark.parametrize(
    ("name", "card"),
    [
        ("RTX 4090", "rtx4090"),
        ("rtx-4090", "rtx4090"),
        ("rtx_4090", "rtx4090"),
        ("4090", "rtx4090"),
        (" NVIDIA GeForce RTX 4090 ", "rtx4090"),
        ("RTX 4060 Ti", "rtx4060ti-16gb"),
        ("RTX 3060 12GB", "rtx3060"),
        ("A100 80GB", "a100-80gb"),
        ("a100-sxm4-40gb", "a100-40gb"),
        ("Tesla T4", "t4"),
        ("V100 16GB", "v100"),
        ("V100-32GB", "v100-32gb"),
        ("RTX A6000", "a6000"),
        ("H100 80GB", "h100"),
    ],
)
def test_a_card_has_many_spellings(name: str, card: str) -> None:
    assert named_device(name) == named_device(card)
    assert named_device(name).name == card


# Multiply-adds that one multiprocessor does in a clock on bfloat16 (float16 before Ampere) summed in fp32, and the
# boost clock in MHz, both from the architecture papers: tensor peak = 2 * multiprocessors * multiply-adds * clock.
CLOCKS = {
    "t4": (40, 512, 1590),
    "p100": (56, 128, 1303),  # no tensor cores: two float16 in each of 64 lanes
    "v100": (80, 512, 1530),
    "v100-32gb": (80, 512, 1530),
    "rtx3060": (28, 256, 1777),
    "rtx3070": (46, 256, 1725),
    "rtx3080": (68, 256, 1710),
    "rtx3090": (82, 256, 1695),
    "rtx4060": (24, 256, 2460),
    "rtx4060ti-16gb": (34, 256, 2535),
    "rtx4070": (46, 256, 2475),
    "rtx4080": (76, 256, 2505),
    "rtx4090": (128, 256, 2520),
    "rtx5070": (48, 256, 2512),
    "rtx5080": (84, 256, 2617),
    "rtx5090": (170, 256, 2407),
    "a10": (72, 512, 1695),
    "a10g": (80, 256, 1710),
    "l4": (58, 512, 2040),
    "a40": (84, 512, 1740),
    "a6000": (84, 512, 1800),
    "l40s": (142, 512, 2490),
    "a100-40gb": (108, 1024, 1410),
    "a100-80gb": (108, 1024, 1410),
    "h100": (132, 2048, 1830),
    "h200": (132, 2048, 1830),
    "b200": (148, 4096, 1855),
}

# Width of the memory bus in bits and its rate in Gbit/s on each line.
BUSES = {
    "t4": (256, 10), "p100": (4096, 1.43), "v100": (4096, 1.754), "v100-32gb": (4096, 1.754), "rtx3060": (192, 15),
    "rtx3070": (256, 14), "rtx3080": (320, 19), "rtx3090": (384, 19.5), "rtx4060": (128, 17),
    "rtx4060ti-16gb": (128, 18), "rtx4070": (192, 21), "rtx4080": (256, 22.4), "rtx4090": (384, 21),
    "rtx5070": (192, 28), "rtx5080": (256, 30), "rtx5090": (512, 28), "a10": (384, 12.5), "a10g": (384, 12.5),
    "l4": (192, 12.5), "a40": (384, 14.5), "a6000": (384, 16), "l40s": (384, 18), "a100-40gb": (5120, 2.43),
    "a100-80gb": (5120, 3.186), "h100": (5120, 5.234), "h200": (6144, 6.25), "b200": (8192, 7.8),
}  # fmt: skip


@pytest.mark.parametrize("card", CLOCKS)
def test_the_peaks_follow_from_units_and_clocks(card: str) -> None:
    device = named_device(card)
    multiprocessors, fma, mhz = CLOCKS[card]
    bits, rate = BUSES[card]
    assert device.multiprocessors == multiprocessors
    assert device.tflops == pytest.approx(2 * multiprocessors * fma * mhz * 1e6 / 1e12, rel=0.01)
    assert device.bandwidth == pytest.approx(bits / 8 * rate, rel=0.01)


def test_every_card_is_whole() -> None:
    assert set(_CARDS) == set(CLOCKS) == set(BUSES)
    for card in _CARDS:
        device = named_device(card)
        assert device.memory >= 8 * GIB
        assert device.capability is not None
        assert device.bf16 == (device.capability[0] >= 8)


@pytest.mark.parametrize(
    ("card", "capability"),
    [
        ("p100", (6, 0)), ("v100", (7, 0)), ("t4", (7, 5)), ("a100-40gb", (8, 0)), ("rtx3090", (8, 6)),
        ("rtx4070", (8, 9)), ("l4", (8, 9)), ("h200", (9, 0)), ("b200", (10, 0)), ("rtx5070", (12, 0)),
    ],
)  # fmt: skip
def test_capabilities(card: str, capability: tuple[int, int]) -> None:
    assert named_device(card).capability == capability


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("24", "'24' has no unit. Write 24GB (1e9 bytes) or 24GiB (2**30 bytes)."),
        ("rtx409", "'rtx409' is neither a size nor a known card. Did you mean rtx4090?"),
        ("h20", "'h20' is neither a size nor a known card. Did you mean h200?"),
        ("a100", "'a100' is neither a size nor a known card. Did you mean a100-40gb or a100-80gb?"),
        ("RTX 4095", "'RTX 4095' is neither a size nor a known card. Did you mean rtx4090?"),
        ("4091", "'4091' has no unit. Write 4091GB (1e9 bytes) or 4091GiB (2**30 bytes)."),
    ],
)
def test_what_cannot_be_read_is_refused_with_a_way_out(name: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        named_device(name)
    assert str(caught.value) == message
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("name", ["toaster", "24TB", "-3GB", "GB", "", "1.2.3GB", "24GB80", "rtx", "-"])
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
    assert this_device() == Device(
        "cuda", "NVIDIA H200", 143771 * 2**20, bf16=True, count=1,
        capability=(9, 0), multiprocessors=132, tflops=989, bandwidth=4800,
    )  # fmt: skip


def test_an_old_card_has_no_bf16(machine: Path) -> None:
    driver(machine, "echo 'Tesla T4, 15360, 7.5'")
    device = this_device()
    assert (device.name, device.memory, device.bf16) == ("Tesla T4", 15360 * 2**20, False)
    assert (device.capability, device.tflops) == ((7, 5), 65)


@pytest.mark.parametrize(
    ("answer", "card"),
    [
        ("NVIDIA GeForce RTX 4090, 24564, 8.9", "rtx4090"),
        ("NVIDIA GeForce RTX 3060, 12288, 8.6", "rtx3060"),
        ("NVIDIA GeForce RTX 4060 Ti, 16380, 8.9", "rtx4060ti-16gb"),
        ("NVIDIA GeForce RTX 5090, 32607, 12.0", "rtx5090"),
        ("NVIDIA RTX A6000, 49140, 8.6", "a6000"),
        ("NVIDIA A100-SXM4-80GB, 81920, 8.0", "a100-80gb"),
        ("NVIDIA A100 80GB PCIe, 81920, 8.0", "a100-80gb"),
        ("A100-SXM4-40GB, 40536, 8.0", "a100-40gb"),
        ("NVIDIA H100 80GB HBM3, 81559, 9.0", "h100"),
        ("NVIDIA B200, 183359, 10.0", "b200"),
        ("NVIDIA A10G, 23028, 8.6", "a10g"),
        ("NVIDIA L4, 23034, 8.9", "l4"),
        ("NVIDIA L40S, 46068, 8.9", "l40s"),
        ("Tesla V100-SXM2-16GB, 16160, 7.0", "v100"),
        ("Tesla P100-PCIE-16GB, 16280, 6.0", "p100"),
    ],
)
def test_the_drivers_names_are_in_the_table(machine: Path, answer: str, card: str) -> None:
    driver(machine, f"echo '{answer}'")
    found, named = this_device(), named_device(card)
    assert found.name == answer.split(",")[0]
    assert found.capability == named.capability
    assert (found.multiprocessors, found.tflops, found.bandwidth) == (
        named.multiprocessors,
        named.tflops,
        named.bandwidth,
    )
    assert found.memory == pytest.approx(named.memory, rel=0.02)


@pytest.mark.parametrize(
    "answer",
    [
        "NVIDIA GeForce RTX 4090 Laptop GPU, 16376, 8.9",  # another chip
        "NVIDIA GeForce RTX 3060, 8192, 8.6",  # the same name on another card
        "NVIDIA H100 PCIe, 81559, 9.0",
        "NVIDIA TITAN RTX, 24576, 7.5",
    ],
)
def test_the_peaks_of_another_card_are_not_guessed(machine: Path, answer: str) -> None:
    driver(machine, f"echo '{answer}'")
    device = this_device()
    name, mib, capability = answer.split(", ")
    major, minor = capability.split(".")
    assert device == Device("cuda", name, int(mib) * 2**20, bf16=int(major) >= 8, capability=(int(major), int(minor)))
    assert known_card(name, device.memory) is None


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


@pytest.mark.parametrize(
    "body", ["exit 9", "echo 'No devices were found'", "echo 'X, [N/A], 9.0'", "echo 'X, 1000, [N/A]'", "true"]
)
def test_a_driver_without_an_answer_means_cpu(machine: Path, body: str) -> None:
    driver(machine, body)
    assert this_device().kind == "cpu"


def test_the_launchers_processes_are_counted(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert this_device().count == 8
    assert this_device(count=2).count == 2
