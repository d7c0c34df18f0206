"""Hold the plan against GPU memory that others measured.

    python scripts/validate_plan.py ROWS.csv [--processes N] [--markdown FILE] [--json FILE]

Each row of the file is one measured training step: model numbers, method, lengths, and the allocator's peaks of the
forward pass, the backward pass and the optimizer step, in MiB. Its protocol is followed as it was run: 16-bit weights
without autocast, LoRA on named layers, gradient checkpointing, transformers' own loss over all logits (which stay
alive), eager or memory-efficient attention, and for 4-bit rows bitsandbytes' NF4 without double quantisation after
peft's `prepare_model_for_kbit_training`. No number here or in the package was fitted to such rows.

"Simulated" is the step traced on meta tensors with the caching allocator replayed, "closed" the torch-free step that
`finetune plan` uses, by its live bytes.
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
from importlib.metadata import version
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
    made = simulate(facts, method, batch, path, config=config, warm_up=True)
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
    parser.add_argument("--markdown", type=Path, help="write the tables here")
    parser.add_argument("--json", type=Path, help="write every row's numbers here")
    options = parser.parse_args()
    with options.rows.open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row.get("role") != "excluded"]
    jobs = {key(row): row for row in rows}
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        made = dict(pool.imap_unordered(_one, jobs.items()))
    text = "\n".join(tables(rows, made))
    print(text)
    seconds = [found["seconds"] for found in made.values()]
    print(
        f"{sum(seconds):.0f} s of CPU for {len(made)} simulations, {max(seconds):.1f} s the longest", file=sys.stderr
    )
    if options.markdown:
        options.markdown.write_text(page(text, options.rows.name), encoding="utf-8")
    if options.json:
        options.json.write_text(json.dumps(made, indent=1), encoding="utf-8")


HEADS = (*PHASES, "peak", "reserved")


def tables(rows: Sequence[dict[str, str]], made: dict[str, dict[str, Any]]) -> list[str]:
    """Means and worst cases of both ways, then every row."""
    found = {which: [errors(row, made[key(row)], which) for row in rows] for which in ("simulated", "closed")}
    lines = [f"| {len(rows)} measured steps | " + " | ".join(HEADS) + " |", "| --- |" + " ---: |" * len(HEADS)]
    for which, values in found.items():
        heads = HEADS if which == "simulated" else HEADS[:-1]
        for name, number in (("mean", 0), ("worst", 1)):
            cells = [f"{summary(values, head)[number]:.2f} %" for head in heads]
            cells += ["-"] * (len(HEADS) - len(cells))
            lines.append(f"| {which}, {name} error | " + " | ".join(cells) + " |")
    lines += ["", "| model | base | attention | rows x length | measured MiB | simulated | closed | reserved |"]
    lines.append("| --- | --- | --- | ---: | ---: | ---: | ---: | ---: |")
    for row, simulated, closed in zip(rows, found["simulated"], found["closed"], strict=True):
        base = "16 bit" if row["quantization"] == "none" else row["quantization"]
        cells = [
            row["model_id"].rpartition("/")[2], base, row["attn_impl"], f"{row['batch_size']} x {row['seq_len']}",
            f"{float(row['peak_allocated_mib']):,.1f}", f"{simulated['peak']:+.2f} %", f"{closed['peak']:+.2f} %",
            f"{simulated['reserved']:+.1f} %",
        ]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def page(text: str, rows: str) -> str:
    """The tables with what they are and with which versions they were made."""
    libraries = ("torch", "transformers", "peft", "bitsandbytes")
    versions = ", ".join(f"{name} {version(name)}" for name in libraries)
    return (
        "# The plan against peaks measured on a GPU by others\n\n"
        "Runs of the public project fitcheck (github: Anassbzdd/fitcheck, MIT, 2026) on one Tesla T4: the peaks of "
        "`torch.cuda.max_memory_allocated` in one LoRA or QLoRA training step. Nothing in the plan was fitted to "
        "them. `simulated` traces the step on meta tensors and replays CUDA's caching allocator; `closed` is the "
        "torch-free step of `finetune plan`, its live bytes. Reserved memory differs between equal runs (one 7B by "
        "1.4 GB), so it is given with its spread only.\n\n"
        f"Made by `python scripts/validate_plan.py {rows} --markdown FILE` with {versions}.\n\n{text}\n"
    )


if __name__ == "__main__":
    main()
