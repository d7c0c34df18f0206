"""Hold the plan against GPU memory that others measured.

    python scripts/validate_plan.py ROWS.csv [--markdown FILE] [--processes N] [--only closed|simulated]

Each row of the file is one measured training step: model numbers, method, lengths, and the allocator's peaks of the
forward pass, the backward pass and the optimizer step, in MiB. Its protocol is simulated as it was run: 16-bit weights
without autocast, LoRA on named layers, gradient checkpointing, transformers' own loss over all logits (which stay
alive), eager or memory-efficient attention, and for 4-bit rows bitsandbytes' NF4 without double quantisation after
peft's `prepare_model_for_kbit_training`. No number here or in the package was fitted to such rows.
"""

from __future__ import annotations

import argparse
import csv
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

MIB = 2**20
PHASES = ("forward", "backward", "optimizer")
# What decides the memory of a row; rows that agree in it are repeats.
KEY = (
    "model_id", "hidden_size", "num_layers", "quantization", "double_quant", "attn_impl", "seq_len", "batch_size",
    "lora_rank", "lora_targets", "grad_checkpoint", "optimizer",
)  # fmt: skip
T4 = {"capability": (7, 5), "multiprocessors": 40}


def config_of(row: dict[str, str]) -> dict[str, Any]:
    """The content of config.json, from the row's numbers; the family is read off the model's name."""
    name = row["model_id"].lower()
    family = next((kind for word, kind in FAMILIES.items() if word in name), "llama")
    config: dict[str, Any] = {
        "model_type": family,
        "hidden_size": int(row["hidden_size"]),
        "intermediate_size": int(row["intermediate_size"]),
        "num_hidden_layers": int(row["num_layers"]),
        "num_attention_heads": int(row["num_attention_heads"]),
        "num_key_value_heads": int(row["num_kv_heads"]),
        "head_dim": int(row["head_dim"]),
        "vocab_size": int(row["vocab_size"]),
        "max_position_embeddings": 32768,
        "tie_word_embeddings": row["tie_word_embeddings"] == "true",
    }
    if family == "mistral":
        config["sliding_window"] = None
    return config


FAMILIES = {
    "qwen3": "qwen3", "qwen2": "qwen2", "qwen1.5": "qwen2", "mistral": "mistral", "gemma-2": "gemma2",
    "gemma-3": "gemma3_text", "gemma": "gemma", "phi-3": "phi3",
}  # fmt: skip


def predict(row: dict[str, str]) -> dict[str, Any]:
    """Simulated and closed-form peaks of a row, in MiB."""
    import torch

    torch.set_num_threads(1)
    from transformers import AutoConfig, AutoModelForCausalLM

    from finetune.decoder import run_step
    from finetune.facts import facts_of
    from finetune.recipe import LoRA, QLoRA
    from finetune.simulate import simulate
    from finetune.steps import Batch
    from finetune.steps import Path as StepPath

    numbers = config_of(row)
    config = AutoConfig.for_model(**numbers)
    with torch.device("meta"):
        shapes = {n: tuple(p.shape) for n, p in AutoModelForCausalLM.from_config(config).named_parameters()}
    facts = facts_of(row["model_id"], {**numbers, "model_type": config.model_type}, shapes, "F16")
    packed = row["quantization"] == "nf4"
    settings: dict[str, Any] = {
        "rank": int(row["lora_rank"]), "alpha": float(2 * int(row["lora_rank"])),
        "targets": row["lora_targets"].split(),
    }  # fmt: skip
    method = (
        QLoRA(kind="qlora", double_quant=row["double_quant"] == "true", compute_dtype="float16", **settings)
        if packed
        else LoRA(kind="lora", **settings)
    )
    rows, length = int(row["batch_size"]), int(row["seq_len"])
    batch = Batch(rows, length, rows * (length - 1))
    checkpointing = row["grad_checkpoint"] == "true"
    path = StepPath(
        device="cuda", weights="float16", autocast=None,
        attention="eager" if row["attn_impl"] == "eager" else "efficient", loss="library",
        checkpointing=checkpointing, optimizer="adamw_torch", upcast=packed, keeps_output=True,
        input_grads=checkpointing, **T4,
    )  # fmt: skip
    closed = run_step(facts, method, batch, path).ledger.peaks
    began = time.process_time()
    made = simulate(facts, method, batch, path, config=config)
    return {
        "simulated": {name: made.peaks[name].allocated / MIB for name in PHASES},
        "closed": {name: closed[name].bytes / MIB for name in PHASES},
        "live": {name: made.peaks[name].bytes / MIB for name in PHASES},
        "during": made.peak.during,
        "load": made.resident / MIB,
        "reserved": made.reserved / MIB,
        "seconds": time.process_time() - began,
        "parameters": facts.parameters,
    }


def errors(row: dict[str, str], made: dict[str, Any], which: str = "simulated") -> dict[str, float]:
    """Relative errors in percent: the step's peak and each phase, and what was reserved."""
    measured = {name: float(row[f"peak_{name}_mib"]) for name in PHASES}
    values = {name: 100 * (made[which][name] / measured[name] - 1) for name in PHASES}
    values["peak"] = 100 * (max(made[which].values()) / float(row["peak_allocated_mib"]) - 1)
    values["reserved"] = 100 * (made["reserved"] / float(row["peak_reserved_mib"]) - 1)
    return values


def summary(found: Iterable[dict[str, float]], what: str) -> tuple[float, float]:
    """Mean and worst absolute error in percent."""
    sizes = [abs(values[what]) for values in found]
    return statistics.fmean(sizes), max(sizes)


def _one(job: tuple[str, dict[str, str]]) -> tuple[str, dict[str, Any]]:
    return job[0], predict(job[1])


def key(row: dict[str, str]) -> str:
    return " ".join(row[name] for name in KEY)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", type=Path)
    parser.add_argument("--processes", type=int, default=min(4, os.cpu_count() or 1))
    parser.add_argument("--json", type=Path, help="write every row's numbers here")
    options = parser.parse_args()
    with options.rows.open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row.get("role") != "excluded"]
    jobs = {key(row): row for row in rows}
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        made = dict(pool.imap_unordered(_one, jobs.items()))
    found = [(row, errors(row, made[key(row)])) for row in rows]
    report(found, made)
    if options.json:
        options.json.write_text(json.dumps(made, indent=1))


def report(found: Sequence[tuple[dict[str, str], dict[str, float]]], made: dict[str, dict[str, Any]]) -> None:
    """One line a row and the means."""
    heads = ("forward", "backward", "optimizer", "peak", "reserved")
    print(f"{'model':34}{'base':6}{'attention':10}{'rows x length':>14}" + "".join(f"{h:>11}" for h in heads))
    for row, values in found:
        shape = f"{row['batch_size']} x {row['seq_len']}"
        cells = "".join(f"{values[head]:+10.2f}%" for head in heads)
        print(f"{row['model_id'][-33:]:34}{row['quantization']:6}{row['attn_impl']:10}{shape:>14}{cells}")
    for head in heads:
        mean, worst = summary([values for _, values in found], head)
        print(f"{head:10} mean {mean:.2f} %  worst {worst:.2f} %")
    print(f"{len(found)} rows, {sum(m['seconds'] for m in made.values()):.0f} s of CPU", file=sys.stderr)


if __name__ == "__main__":
    main()
