"""What this machine can hold, found without torch.

`this_device` asks the driver's own tool (`nvidia-smi`) for a GPU and the operating system for the CPU; `named_device`
reads what a user writes behind `--device`.
"""

from __future__ import annotations

import difflib
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from finetune.errors import InputError

GIB = 2**30
_CARDS = {  # usable memory in GiB and whether the card has bf16 units (compute capability 8.0 and above)
    "t4": (15, False),
    "v100": (16, False),
    "v100-32gb": (32, False),
    "rtx3060": (12, True),
    "rtx3090": (24, True),
    "rtx4070": (12, True),
    "rtx4080": (16, True),
    "rtx4090": (24, True),
    "rtx5090": (32, True),
    "a10": (24, True),
    "l4": (24, True),
    "a40": (48, True),
    "l40s": (48, True),
    "a100-40gb": (40, True),
    "a100-80gb": (80, True),
    "h100": (80, True),
    "h200": (141, True),
    "b200": (180, True),
}


@dataclass(frozen=True)
class Device:
    """Where training runs. `memory` in bytes, of one device; `bf16` says whether it multiplies bfloat16 natively."""

    kind: Literal["cpu", "cuda"]
    name: str
    memory: int
    bf16: bool
    count: int = 1


def this_device(count: int | None = None) -> Device:
    """The first visible CUDA card, or this machine's CPU and memory.

    `count` is the number of processes that train together; by default what the launcher put into WORLD_SIZE.
    """
    processes = count or int(os.environ.get("WORLD_SIZE", "1"))
    if os.environ.get("ACCELERATE_USE_CPU", "").lower() not in ("1", "true", "yes") and (card := _first_card()):
        name, memory, bf16 = card
        return Device("cuda", name, memory, bf16, processes)
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
    """`auto`, a size such as `24GB` or `16GiB`, or a card such as `rtx4090`.

    Raises `InputError` for anything else, with the nearest card.
    """
    word = name.strip().lower()
    if word == "auto":
        return this_device()
    if word in _CARDS:
        gib, bf16 = _CARDS[word]
        return Device("cuda", word, gib * GIB, bf16)
    if size := re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*(gb|gib)", word):
        unit = GIB if size[2] == "gib" else 10**9
        return Device("cuda", name, int(float(size[1]) * unit), True)
    if re.fullmatch(r"[0-9.]+", word):
        raise InputError(f"'{name}' has no unit.", f"Write {word}GB (1e9 bytes) or {word}GiB (2**30 bytes).")
    near = [card for card in _CARDS if word and card.startswith(word)] or difflib.get_close_matches(word, _CARDS, n=1)
    examples = f"Write a size such as 24GB, or one of {', '.join(_CARDS)}."
    raise InputError(
        f"'{name}' is neither a size nor a known card.", f"Did you mean {' or '.join(near)}?" if near else examples
    )


def _first_card() -> tuple[str, int, bool] | None:
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
        return name, int(mib) * 2**20, float(capability) >= 8.0
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None


def _cpu_has_bf16() -> bool:
    """bf16 pays on a CPU only with matrix instructions for it; elsewhere fp32 is about three times faster."""
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return "avx512_bf16" in flags or "amx_bf16" in flags
