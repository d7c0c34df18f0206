"""What do frozen weights cost that lie in memory as in their file? Writes docs/benchmarks/weights.md.

    python scripts/bench_weights.py                    SmolLM2-135M, passes of 64 to 1,024 tokens; about four minutes
    python scripts/bench_weights.py --tokens 64 512    some, shown and not written

One pass forward and back of LoRA on all linear layers in fp32, on two threads, a third of the tokens supervised: with
every weight in fp32, with the layers' in 16 bits, and with the blocks of the GGUF file, in turns. Ratios are medians
of neighbours. `plan._TOKENS_HELD` says in how many layers a run takes blocks.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import date
from pathlib import Path
from typing import Any

import bench

from finetune.startup import SPINS

TOKENS = (64, 128, 256, 512, 1024)
TURNS = 9
WAYS = ("fp32", "16 bits", "blocks")


def models(folder: Path) -> dict[str, Any]:
    """The model with its weights held in each way. In 16 bits they are rounded, so its numbers are others."""
    import torch
    from transformers import AutoModelForCausalLM

    from finetune.facts import read_facts
    from finetune.model import load_model, model_folder, real_device
    from finetune.plan import resolve
    from finetune.recipe import Recipe

    whole = model_folder("smollm2-135m")
    AutoModelForCausalLM.from_pretrained(whole, dtype=torch.bfloat16).save_pretrained(folder)
    made = {}
    for way in WAYS:
        name = str(folder if way == "16 bits" else whole)
        recipe = Recipe.model_validate(
            {
                "model": name, "load": {"dtype": "float32"}, "method": {"kind": "lora"}, "data": {"train": "x"},
                "train": {"precision": "fp32"}, "fast": {"weights": way != "fp32"},
            }
        )  # fmt: skip
        facts = read_facts(name)
        recipe, plan = resolve(recipe, facts, real_device())
        assert plan.path.held == {"fp32": "", "16 bits": "half", "blocks": "blocks"}[way]
        made[way] = load_model(recipe, Path(name), facts).train()
    return made


def seconds(models: dict[str, Any], tokens: int) -> list[tuple[float, ...]]:
    """Processor seconds of one pass with each model, turn by turn."""
    import torch

    from finetune.fast.attention import documents
    from finetune.fast.head import onepass_loss
    from finetune.heads import Logits

    torch.manual_seed(0)
    ids = torch.randint(0, 40_000, (1, tokens))
    labels = torch.where(torch.arange(tokens) % 3 == 0, ids, -100)
    inputs = {
        "input_ids": ids, "labels": labels, "position_ids": torch.arange(tokens)[None], "cu_seq_lens_q": [0, tokens],
    }  # fmt: skip

    def one(model: Any) -> float:
        began = time.process_time()
        onepass_loss(model, dict(inputs), logits=Logits()).backward()  # type: ignore[no-untyped-call]
        return time.process_time() - began

    with ExitStack() as stack:
        for model in models.values():
            stack.enter_context(documents(model, blocks=tokens <= 768))
        return [tuple(one(models[way]) for way in WAYS) for _ in range(TURNS + 2)][2:]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, show, and write when every length was measured."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--tokens", type=int, nargs="+", metavar="TOKENS", help="passes of these lengths only")
    options = parser.parse_args(arguments)
    os.environ.setdefault("GOMP_SPINCOUNT", SPINS)  # as the command does, before torch is there
    import torch

    from finetune.fast.host import keep_freed_memory

    torch.set_num_threads(2)
    keep_freed_memory()
    lines = [
        "| tokens of a pass | fp32, CPU-s | 16 bits, CPU-s | ratio | blocks, CPU-s | ratio |",
        "| ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    with tempfile.TemporaryDirectory(prefix="bench-weights-") as folder:
        made = models(Path(folder))
        for tokens in options.tokens or TOKENS:
            turns = seconds(made, tokens)
            wide, half, blocks = (statistics.median(times) for times in zip(*turns, strict=True))
            ratios = [statistics.median(turn[n] / turn[0] for turn in turns) for n in (1, 2)]
            lines.append(
                f"| {tokens:,} | {wide:.2f} | {half:.2f} | {ratios[0]:.3f} | {blocks:.2f} | {ratios[1]:.3f} |"
            )
            print(lines[-1], flush=True)
    if options.tokens:
        return
    text = (
        "# Weights that lie in memory as in their file\n\n"
        f"Written by `scripts/bench_weights.py` on {date.today()}. {bench.machine()}, 2 threads. "
        f"torch {torch.__version__}.\n\n"
        "SmolLM2-135M, LoRA on all linear layers in fp32, one pass forward and back with a third of the tokens "
        "supervised. Their weights in fp32 (425 MB), in 16 bits (212 MB) or as blocks of the GGUF file (133 MB), "
        f"made dense for each product; medians of {TURNS} turns.\n\n" + "\n".join(lines) + "\n"
    )
    target = Path(__file__).parents[1] / "docs/benchmarks/weights.md"
    target.write_text(text, encoding="utf-8")
    print(f"wrote {target}")


if __name__ == "__main__":
    main(sys.argv[1:])
