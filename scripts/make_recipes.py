"""Write recipes/*.yaml and recipes/recipe.schema.json from one table, with the plan's numbers in their first lines.

python scripts/make_recipes.py            write them
python scripts/make_recipes.py --check    fail when a file is not what this script writes
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from finetune.device import Device
from finetune.plan import plan
from finetune.recipe import parse_recipe, schema

FOLDER = Path(__file__).parent.parent / "recipes"
LAPTOP = Device("cpu", "CPU without bf16", 16 * 10**9, bf16=False)
CARDS = (8, 12, 16, 24, 40, 48, 80, 141)  # GB

MODELS = {
    "gemma2b": (
        "google/gemma-2-2b",
        "Gemma 2 2B",
        "  # gated: accept the licence on its hub page, then `hf auth login`",
    ),
    "llama7b": (
        "meta-llama/Llama-2-7b-hf",
        "Llama 2 7B",
        "  # gated: accept the licence on its hub page, then `hf auth login`",
    ),
    "smollm2": ("smollm2-135m", "SmolLM2-135M-Instruct", "  # comes from a PyPI package, no hub needed"),
}
METHODS = {
    "full": ("full", None, "Full fine-tuning"),
    "lora": ("lora", "attention+mlp", "LoRA, rank 16 on attention and MLP"),
    "lora-attention": ("lora", "attention", "LoRA, rank 16 on all attention projections"),
    "lora-qv": ("lora", "qv", "LoRA, rank 16 on the query and value projections"),
    "qlora": ("qlora", "attention+mlp", "QLoRA, 4-bit base with rank 16 on attention and MLP"),
}


def body(model: str, method: str) -> str:
    """The YAML of one recipe."""
    name, _, note = MODELS[model]
    kind, targets, _ = METHODS[method]
    small = model == "smollm2"
    lines = [f"model: {name}{note}", "method:", f"  kind: {kind}"]
    if targets:
        lines += ["  rank: 16", "  alpha: 32", f"  targets: {targets}"]
    if kind == "qlora":
        lines += ["  quant: nf4", "  double_quant: true"]
    lines += ["data:", "  train: home-intents  # put your own file here", f"  max_length: {256 if small else 2048}"]
    lines += ["train:", "  epochs: 1", f"  batch_size: {4 if small else 16}", "  micro_batch: auto"]
    lines += [f"  learning_rate: {_rate(small, kind)}", "  schedule: cosine"]
    lines += [f"  optimizer: {'paged_adamw_8bit' if kind == 'qlora' and not small else 'auto'}"]
    if small:
        lines += ["evaluate:", "  data: home-intents:test", "  rows: 100", "  few_shot: 4", "  max_new_tokens: 48"]
    else:
        lines += ["evaluate:", "  data: home-intents:test", "  after_training: false"]
    return "\n".join(lines) + "\n"


def _rate(small: bool, kind: str) -> str:
    if kind == "full":
        return "2e-4" if small else "1e-5"
    return "1e-3" if small else "2e-4"


def recipe(model: str, method: str) -> str:
    """Schema line, three comment lines, body."""
    text = body(model, method)
    if model == "smollm2":
        result, card, where = plan(parse_recipe(text), LAPTOP), "none needed, a laptop CPU does", "on a CPU"
    else:
        planned = {gb: plan(parse_recipe(text), f"{gb}GB") for gb in CARDS}
        smallest = next(gb for gb in CARDS if planned[gb].fits)
        result, card = planned[smallest], f"{smallest} GB and up"
        where = f"on a card of {smallest} GB"
    share = 100 * result.trainable / result.parameters
    what = f"{METHODS[method][2]}, of {MODELS[model][1]}"
    expect = f"{result.trainable:,} trained parameters ({share:.3g} %), planned memory {result.total / 1e9:.1f} GB"
    head = [
        "# yaml-language-server: $schema=./recipe.schema.json",
        f"# What: {what}.",
        f"# Card: {card}.",
        f"# Expect: {expect} {where}.",
    ]
    return "\n".join(head) + "\n" + text


def files() -> dict[str, str]:
    """File name -> content of everything in recipes/."""
    made = {f"{model}-{method}.yaml": recipe(model, method) for model in MODELS for method in METHODS}
    return {**made, "recipe.schema.json": json.dumps(schema(), indent=2) + "\n"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    made = files()
    stale = [
        name for name, text in made.items() if not (FOLDER / name).is_file() or (FOLDER / name).read_text() != text
    ]
    if check and stale:
        sys.exit(f"not what scripts/make_recipes.py writes: {', '.join(stale)}")
    for name in stale:
        (FOLDER / name).write_text(made[name])
        print(f"wrote recipes/{name}")


if __name__ == "__main__":
    main()
