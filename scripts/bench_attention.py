"""Up to which length is attention's backward pass quicker by blocks? Writes docs/benchmarks/attention.md.

    python scripts/bench_attention.py                    SmolLM2-135M's heads, rows of 32 to 2,048 tokens; a minute
    python scripts/bench_attention.py --lengths 64 512   some, shown and not written

One row, and four rows behind a common beginning, in fp32, on two threads: forward and backward of `fast.attention` by
torch's kernel and by blocks, in turns. Ratios are medians of neighbours. `paths.LONGEST_IN_BLOCKS` says which of the
two a run takes.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from datetime import date
from pathlib import Path

import bench

HEADS, GROUPS, DIM = 9, 3, 64
LENGTHS = (32, 64, 128, 192, 256, 384, 512, 640, 768, 1024, 2048)
SHARED = 24
TURNS = 31


def seconds(ends: list[int]) -> list[tuple[float, float]]:
    """Wall seconds of one pass forward and back, (by the kernel, by blocks), turn by turn; `ends` as in `by_rows`."""
    import torch

    from finetune.fast.attention import by_rows

    torch.manual_seed(0)
    length = ends[-1]
    q, k, v = (torch.randn(1, length, heads, DIM, requires_grad=True) for heads in (HEADS, GROUPS, GROUPS))
    cos, sin, grad = torch.randn(1, length, DIM), torch.randn(1, length, DIM), torch.randn(1, length, HEADS, DIM)

    def one(blocks: bool) -> float:
        began = time.perf_counter()
        by_rows(q, k, v, cos, sin, ends, None, blocks=blocks).backward(grad)
        return time.perf_counter() - began

    found = [(one(False), one(True)) for _ in range(TURNS + 3)]
    return found[3:]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, show, and write when every length was measured."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--lengths", type=int, nargs="+", metavar="TOKENS", help="rows of these lengths only")
    options = parser.parse_args(arguments)
    import torch

    torch.set_num_threads(2)
    lines = [
        "| tokens of a row | one row: kernel, ms | blocks, ms | ratio | four rows: kernel, ms | blocks, ms | ratio |",
        "| ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for length in options.lengths or LENGTHS:
        cells = [f"{length:,}"]
        for ends in ([0, length], [SHARED + number * length for number in range(5)]):
            turns = seconds(ends)
            cells += [f"{1e3 * statistics.median(times):.2f}" for times in zip(*turns, strict=True)]
            cells.append(f"{statistics.median(blocks / kernel for kernel, blocks in turns):.2f}")
        lines.append(f"| {' | '.join(cells)} |")
    print("\n".join(lines))
    if options.lengths:
        return
    text = (
        "# Attention's backward pass by blocks beside torch's kernel\n\n"
        f"Written by `scripts/bench_attention.py` on {date.today()}. {bench.machine()}, 2 threads. "
        f"torch {torch.__version__}.\n\n"
        f"One row, and four behind {SHARED} tokens that all begin with; fp32, {HEADS} heads over {GROUPS} of keys "
        f"and values, {DIM} wide. Forward by the kernel, backward by either; medians of {TURNS} turns.\n\n"
        + "\n".join(lines)
        + "\n"
    )
    target = Path(__file__).parents[1] / "docs/benchmarks/attention.md"
    target.write_text(text, encoding="utf-8")
    print(f"wrote {target}")


if __name__ == "__main__":
    main(sys.argv[1:])
