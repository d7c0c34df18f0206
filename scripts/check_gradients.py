"""How far are the gradients of a step from those in double precision? Writes docs/benchmarks/gradients.md.

    python scripts/check_gradients.py                 all jobs of scripts/bench.py; about five minutes
    python scripts/check_gradients.py --jobs home     some, shown and not written

The first optimizer step of each job is taken by TRL and by this toolkit in fp32, and once more by transformers and
peft in fp64, row by row, without any code of this toolkit. The distance of an adapter's gradient is the norm of the
difference over the norm; the worst and the median over all adapters are shown, and the worst distance from TRL's.
It ends with 1 when this toolkit's gradients are further than 1e-5 from TRL's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from datetime import date
from pathlib import Path

import bench

ARMS = ("trl", "finetune", bench.BY_TORCH)


def truth(folder: Path) -> None:
    """Write the gradients of the first step of the work in `folder` in fp64 to truth.safetensors."""
    import torch
    from peft import PeftModel
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    work = json.loads((folder / "work.json").read_text(encoding="utf-8"))
    base = AutoModelForCausalLM.from_pretrained(
        work["recipe"]["model"], dtype=torch.float64, attn_implementation="eager"
    )
    model = PeftModel.from_pretrained(base, folder / "adapter", is_trainable=True).double()
    rows = work["steps"][0]
    count = sum(bench.supervised_in(row["labels"]) for row in rows)
    for row in rows:
        logits = model(input_ids=torch.tensor([row["input_ids"]])).logits[0, :-1]
        labels = torch.tensor(row["labels"][1:])
        (torch.nn.functional.cross_entropy(logits, labels, ignore_index=-100, reduction="sum") / count).backward()
    grads = {bench.plain(name): p.grad for name, p in model.named_parameters() if p.grad is not None}
    save_file({name: grad.clone() for name, grad in grads.items()}, folder / "truth.safetensors")


def distances(found: Path, right: Path) -> list[float]:
    """Of every adapter's gradient, the largest first."""
    from safetensors.torch import load_file

    mine, other = load_file(found), load_file(right)
    return sorted(
        (float((mine[n].double() - grad.double()).norm() / grad.double().norm()) for n, grad in other.items()),
        reverse=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", nargs="+", choices=bench.JOBS, metavar="JOB")
    parser.add_argument("--truth", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.truth:
        truth(options.truth)
        return
    names = options.jobs or list(bench.JOBS)
    far = 0.0
    lines = ["| job | arm | from fp64: worst | median | from TRL: worst |", "| --- | --- | ---: | ---: | ---: |"]
    with tempfile.TemporaryDirectory(prefix="bench-work-") as work:
        steps = dict.fromkeys(names, 2)
        bench.process({"do": "make", "folder": work, "jobs": steps, "layers": None, "rows": None}, bench.THREADS)
        for name in names:
            folder = Path(work) / name
            bench.run_script([__file__, "--truth", str(folder)], bench.THREADS)
            for arm in ARMS:
                file = folder / f"{arm}.safetensors"
                spec = {"do": "arm", "arm": arm, "folder": str(folder), "timed": 0, "measure": False}
                bench.process({**spec, "grads": str(file)}, bench.THREADS)
                off, apart = (distances(file, folder / f"{other}.safetensors") for other in ("truth", "trl"))
                far = max(far, apart[0])
                lines.append(
                    f"| {name} | {arm} | {off[0]:.1e} | {statistics.median(off):.1e} | "
                    f"{'' if arm == 'trl' else f'{apart[0]:.1e}'} |"
                )
                print(lines[-1], flush=True)
    if not options.jobs:
        _write(lines)
    if far > bench.GRADIENT_TARGET:
        sys.exit(f"A gradient is {far:.1e} from TRL's, and the aim is {bench.GRADIENT_TARGET:.0e}.")


def _write(lines: Sequence[str]) -> None:
    libraries = ", ".join(f"{name} {number}" for name, number in bench.versions().items())
    text = (
        "# Gradients in fp32 beside the same step in double precision\n\n"
        f"Written by `scripts/check_gradients.py` on {date.today().isoformat()}. {bench.machine()}, {bench.THREADS} "
        f"threads. {libraries}.\n\nSmolLM2-135M, the jobs of [speed.md](speed.md). The distance of an adapter's "
        "gradient is the norm of the difference over the norm.\n\n" + "\n".join(lines) + "\n"
    )
    (bench.OUT / "gradients.md").write_text(text, encoding="utf-8")
    print(f"wrote {bench.OUT / 'gradients.md'}", file=sys.stderr)


if __name__ == "__main__":
    main()
