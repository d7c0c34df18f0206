"""Hold the plan against real training steps on this machine's GPU, and write docs/benchmarks/plan-<card>.md, .json.

    python scripts/gpu_check.py                    every case; under 5 minutes on one H200
    python scripts/gpu_check.py --only llama-lora  some of them, shown and not written
    python scripts/gpu_check.py --bench            speed beside TRL instead, see gpu_bench.py; under 6 minutes

SmolLM2 has its real weights; Gemma 2 2B and Llama 2 7B have random ones of the real shapes and a tokenizer made here,
so nothing is fetched. Where there is no CUDA device it says so in one line and ends with 0. Cases that the card has
no room for are left out and named.

Each case runs as in `check_plan.py`: two steps of the trainer's own path in a process of its own. Measured is
`torch.cuda.max_memory_allocated` over them, and `max_memory_reserved` beside it. Several cases share the card while
they fit together: each process has its own allocator.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from check_plan import (
    FULL,
    LORA,
    QLORA,
    SMOLLM2,
    Bench,
    Case,
    child,
    chosen,
    finish,
    parser_of,
    planned,
    run_all,
    this_machine,
)
from gpu_bench import MODELS, compare

from finetune.device import Device, cpu_device

GEMMA, LLAMA = MODELS["gemma"], MODELS["llama"]
SECONDS, BUDGET = 150, 285
"""Of one case, and of all of them."""


def _both(case: Case) -> tuple[Case, Case]:
    return case, replace(case, name=f"{case.name}-checkpointing", checkpointing=True)


def _large(name: str, model: str, method: dict[str, str], **more: object) -> tuple[Case, Case]:
    return _both(Case(name, model, method, **{"length": 2048, "random": True, **more}))  # type: ignore[arg-type]


FLASH = {"TORCH_CUDNN_SDPA_DEPRIORITIZED": "1"}
"""On Hopper and its successor torch prefers cuDNN's attention to its flash kernel, unless this is set."""

# The largest first, so that none of them is left alone at the end.
CASES: tuple[Case, ...] = (
    *_large("gemma-full", GEMMA, FULL),
    *_large("llama-lora", LLAMA, LORA),
    *_large("llama-qlora", LLAMA, QLORA),
    *_large("gemma-lora", GEMMA, LORA),
    *_large("gemma-qlora", GEMMA, QLORA),
    Case("llama-lora-eager", LLAMA, LORA, length=2048, attention="eager", random=True),
    Case("llama-lora-flash", LLAMA, LORA, length=2048, random=True, environment=FLASH),
    Case("llama-qlora-one-scale", LLAMA, {**QLORA, "double_quant": False}, length=2048, random=True),
    Case("llama-qlora-4-rows", LLAMA, QLORA, rows=4, length=2048, checkpointing=True, random=True),
    Case("llama-qlora-padded", LLAMA, QLORA, rows=2, length=2048, checkpointing=True, padded=True, random=True),
    *_both(Case("smollm2-full", SMOLLM2, FULL, rows=8)),
    *_both(Case("smollm2-lora", SMOLLM2, LORA, rows=8)),
    *_both(Case("smollm2-qlora", SMOLLM2, QLORA, rows=8)),
    Case("smollm2-lora-eager", SMOLLM2, LORA, rows=8, attention="eager"),
    Case("smollm2-lora-padded", SMOLLM2, LORA, rows=8, padded=True),
)

INTRO = """\
Two optimizer steps are trained on this card, each case in a process of its own, by the code that `finetune train`
runs: SmolLM2-135M with its real weights, Gemma 2 2B and Llama 2 7B with random ones of the real shapes. Measured is
`torch.cuda.max_memory_allocated` over both steps. `plan` is what `finetune plan` says without torch, `simulated` the
step traced on meta tensors with CUDA's caching allocator replayed, `reserved` what the allocator held of the card.
`attention` is the kernel that torch took. What the libraries hold outside of torch's allocator is in none of them."""


def why_not() -> str | None:
    """Why nothing can be measured here; None where there is a card."""
    import torch

    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    if os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes"):
        return "ACCELERATE_USE_CPU is set"
    return None if torch.cuda.is_available() else "torch sees no CUDA device"


def with_room(cases: Sequence[Case], device: Device, layers: int | None = None) -> tuple[list[Case], list[str]]:
    """The cases whose plan fits on the card, and a line on each of the others."""
    kept, left_out = [], []
    for case in cases:
        plan = planned(case, device, layers)[2]
        if plan.fits:
            kept.append(case)
        else:
            left_out.append(f"{case.name} needs {plan.total / 1e9:.0f} GB")
    return kept, left_out


def file_name(card: str, what: str = "plan") -> str:
    """`NVIDIA H200` -> `plan-h200`."""
    return f"{what}-" + re.sub(r"[^a-z0-9]+", "-", card.lower().replace("nvidia", "")).strip("-")


def main() -> None:
    parser = parser_of(__doc__ or "")
    parser.add_argument("--bench", action="store_true", help="compare the speed of training with TRL's")
    parser.add_argument("--minutes", type=float, default=6, metavar="N", help="time for --bench (6)")
    parser.add_argument("--tiny", type=int, metavar="LAYERS", help=argparse.SUPPRESS)  # --bench on the CPU, for tests
    options = parser.parse_args()
    if options.child:
        child(CASES, options.child[0], options.child[1], options.layers)
        return
    if (reason := why_not()) and not options.tiny:
        print(f"gpu_check is skipped: {reason}.")
        return
    import torch

    device = cpu_device() if options.tiny else this_machine()
    if options.bench:
        if not device.bf16 and not options.tiny:
            print(f"gpu_check --bench is skipped: {device.name} has no bf16 units.")
            return
        compare(options, file_name(device.name, "speed"), device)
        return
    cases, left_out = with_room(chosen(CASES, options.only), device, options.layers)
    if left_out:
        print(f"Left out, as {device.name} has {device.memory / 1e9:.0f} GB: {'; '.join(left_out)}.")
    if not cases:
        sys.exit("No case fits.")
    cores = os.cpu_count() or 1
    jobs = options.jobs or max(1, min(4, cores // 2))
    bench = Bench(Path(__file__), jobs, max(1, cores // jobs), SECONDS, BUDGET, options.layers)
    results = run_all(cases, bench, device)
    major, minor = device.capability or (0, 0)
    machine = f"{device.name}, {device.memory / 1e9:.0f} GB, capability {major}.{minor}, CUDA {torch.version.cuda}"
    intro = INTRO + (f" Left out for want of room: {'; '.join(left_out)}." if left_out else "")
    finish(options, file_name(device.name), f"The plan against {device.name}", intro, machine, cases, results)


if __name__ == "__main__":
    main()
