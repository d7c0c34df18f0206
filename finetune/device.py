"""What this machine can hold, found without torch.

`this_device` asks the driver's own tool (`nvidia-smi`) for a GPU and the operating system for the CPU; `named_device`
reads what a user writes behind `--device`. Both take what a card can compute from one table.
"""

from __future__ import annotations

import difflib
import os
import re
import shutil
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

from finetune.errors import InputError

GIB = 2**30


class Card(NamedTuple):
    """A card as its maker describes it.

    `gib` is the memory that the driver shows: with error correction on, GDDR cards keep a sixteenth for it.
    `tflops` is the dense tensor-core peak of bfloat16 products summed in fp32, in TFLOP/s; of float16 where the card
    has no bfloat16, and outside of tensor cores where it has none of those (P100). `bandwidth` in GB/s (1e9).
    """

    gib: float
    capability: tuple[int, int]
    multiprocessors: int
    tflops: float
    bandwidth: float
    also: tuple[str, ...] = ()


# From NVIDIA's data sheets and architecture papers, whose peaks with sparsity are halved here. Where one row stands
# for two boards (V100 and A100 as SXM and PCIe), it has the SXM one; their peaks lie within an eighth. `also` are the
# names that the driver prints, without the maker's, and the other spellings of people.
_CARDS = {
    "t4": Card(15, (7, 5), 40, 65, 320, ("t4 16gb",)),
    "p100": Card(16, (6, 0), 56, 18.7, 732, ("p100-pcie-16gb", "p100-sxm2-16gb", "p100 16gb")),
    "v100": Card(16, (7, 0), 80, 125, 900, ("v100-sxm2-16gb", "v100-pcie-16gb", "v100 16gb")),
    "v100-32gb": Card(32, (7, 0), 80, 125, 900, ("v100-sxm2-32gb", "v100-pcie-32gb")),
    "rtx3060": Card(12, (8, 6), 28, 25.5, 360, ("rtx 3060 12gb",)),
    "rtx3070": Card(8, (8, 6), 46, 40.6, 448, ("rtx 3070 8gb",)),
    "rtx3080": Card(10, (8, 6), 68, 59.5, 760, ("rtx 3080 10gb",)),
    "rtx3090": Card(24, (8, 6), 82, 71.2, 936, ("rtx 3090 24gb",)),
    "rtx4060": Card(8, (8, 9), 24, 30.2, 272, ("rtx 4060 8gb",)),
    "rtx4060ti-16gb": Card(16, (8, 9), 34, 44.1, 288, ("rtx 4060 ti",)),
    "rtx4070": Card(12, (8, 9), 46, 58.3, 504, ("rtx 4070 12gb",)),
    "rtx4080": Card(16, (8, 9), 76, 97.5, 717, ("rtx 4080 16gb",)),
    "rtx4090": Card(24, (8, 9), 128, 165.2, 1008, ("rtx 4090 24gb",)),
    "rtx5070": Card(12, (12, 0), 48, 61.7, 672, ("rtx 5070 12gb",)),
    "rtx5080": Card(16, (12, 0), 84, 112.6, 960, ("rtx 5080 16gb",)),
    "rtx5090": Card(32, (12, 0), 170, 209.5, 1792, ("rtx 5090 32gb",)),
    "a10": Card(22.5, (8, 6), 72, 125, 600, ("a10 24gb",)),
    "a10g": Card(22.5, (8, 6), 80, 70, 600, ("a10g 24gb",)),
    "l4": Card(22.5, (8, 9), 58, 121, 300, ("l4 24gb",)),
    "a40": Card(45, (8, 6), 84, 149.7, 696, ("a40 48gb",)),
    "a6000": Card(48, (8, 6), 84, 154.8, 768, ("rtx a6000", "a6000 48gb")),
    "l40s": Card(45, (8, 9), 142, 362, 864, ("l40s 48gb",)),
    "a100-40gb": Card(40, (8, 0), 108, 312, 1555, ("a100-sxm4-40gb", "a100-pcie-40gb")),
    "a100-80gb": Card(80, (8, 0), 108, 312, 2039, ("a100-sxm4-80gb", "a100 80gb pcie")),
    "h100": Card(79.6, (9, 0), 132, 989, 3350, ("h100 80gb hbm3", "h100 80gb", "h100 sxm")),
    "h200": Card(140.4, (9, 0), 132, 989, 4800, ("h200 141gb", "h200 sxm")),
    "b200": Card(179, (10, 0), 148, 2250, 8000, ("b200 180gb",)),
}


def _squeezed(name: str) -> str:
    """`NVIDIA GeForce RTX 4090`, `rtx-4090` and `RTX4090` are one name."""
    return re.sub(r"nvidia|geforce|tesla|[\s_-]", "", name.lower())


_NAMES = {_squeezed(name): card for card, row in _CARDS.items() for name in (card, *row.also)}


@dataclass(frozen=True)
class Device:
    """Where training runs. `memory` in bytes, of one device; `bf16` says whether it multiplies bfloat16 natively.

    What is not known is None: of a card that was named by its size only, of one that the table lacks, of a CPU.
    `capability` is CUDA's (major, minor); `tflops` and `bandwidth` are the peaks that `Card` describes.
    """

    kind: Literal["cpu", "cuda"]
    name: str
    memory: int
    bf16: bool
    count: int = 1
    capability: tuple[int, int] | None = None
    multiprocessors: int | None = None
    tflops: float | None = None
    bandwidth: float | None = None


def this_device(count: int | None = None) -> Device:
    """The first visible CUDA card, or this machine's CPU and memory.

    `count` is the number of processes that train together; by default what the launcher put into WORLD_SIZE.
    """
    processes = count or int(os.environ.get("WORLD_SIZE", "1"))
    if os.environ.get("ACCELERATE_USE_CPU", "").lower() not in ("1", "true", "yes") and (card := _first_card()):
        return replace(card, count=processes)
    return cpu_device(processes)


def cpu_device(processes: int = 1) -> Device:
    """This machine's CPU with the memory that one of `processes` may use: of the machine, or of its container."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        memory = min(memory, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    except (OSError, ValueError):
        pass  # no container, or one without a limit
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return Device("cpu", f"CPU, {os.cpu_count()} cores", memory // here, _cpu_has_bf16(), processes)


def named_device(name: str) -> Device:
    """`auto`, a size such as `24GB` or `16GiB`, or a card such as `rtx4090`, `RTX 4090` or `A100 80GB`.

    Raises `InputError` for anything else, with the nearest card.
    """
    word = name.strip().lower()
    if word == "auto":
        return this_device()
    if card := _named_card(name):
        return described(card, card, int(_CARDS[card].gib * GIB), _CARDS[card].capability)
    if size := re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*(gb|gib)", word):
        unit = GIB if size[2] == "gib" else 10**9
        return Device("cuda", name, int(float(size[1]) * unit), True)
    if re.fullmatch(r"[0-9.]+", word):
        raise InputError(f"'{name}' has no unit.", f"Write {word}GB (1e9 bytes) or {word}GiB (2**30 bytes).")
    near = _near_cards(_squeezed(name))
    examples = f"Write a size such as 24GB, or one of {', '.join(_CARDS)}."
    raise InputError(
        f"'{name}' is neither a size nor a known card.", f"Did you mean {' or '.join(near)}?" if near else examples
    )


def known_card(name: str, memory: int) -> str | None:
    """The table's name of a card that the driver calls `name` and gives `memory` bytes; None when it is not there.

    Makers sell one name with several memories and chips (RTX 3060 and 3080), so the memory has to be about right.
    """
    card = _named_card(name)
    return card if card and 0.9 < memory / (_CARDS[card].gib * GIB) < 1.1 else None


def _named_card(name: str) -> str | None:
    """The table's name for any spelling; `4090` is enough, as no other maker's card is called that."""
    return _NAMES.get(_squeezed(name)) or _NAMES.get(f"rtx{_squeezed(name)}")


def _near_cards(key: str) -> list[str]:
    """Up to four cards that begin like a name, else the one that looks most like it."""
    begun = dict.fromkeys(card for name, card in _NAMES.items() if key and name.startswith(key))
    if begun:
        return list(begun) if len(begun) <= 4 else []
    keys = {_squeezed(card): card for card in _CARDS}
    return [keys[hit] for hit in difflib.get_close_matches(key, keys, n=1)]


def described(name: str, card: str | None, memory: int, capability: tuple[int, int]) -> Device:
    """A card of this memory and capability, with the peaks of the table where it has them."""
    device = Device("cuda", name, memory, bf16=capability >= (8, 0), capability=capability)
    if card is None:
        return device
    row = _CARDS[card]
    return replace(device, multiprocessors=row.multiprocessors, tflops=row.tflops, bandwidth=row.bandwidth)


def _first_card() -> Device | None:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1"):
        return None
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    query = [tool, "--query-gpu=name,memory.total,compute_cap", "--format=csv,noheader,nounits"]
    if visible:
        query.append(f"--id={visible.split(',')[0]}")
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
        name, mib, capability = (part.strip() for part in answer.splitlines()[0].split(","))
        memory, (major, minor) = int(mib) * 2**20, (int(part) for part in capability.split("."))
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None
    return described(name, known_card(name, memory), memory, (major, minor))


def _cpu_has_bf16() -> bool:
    """bf16 pays on a CPU only with matrix instructions for it; elsewhere fp32 is about three times faster."""
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return "avx512_bf16" in flags or "amx_bf16" in flags
