"""Merge an adapter with this toolkit and with peft, and copy the files; write docs/benchmarks/merge.md and .json.

    python scripts/bench_merge.py              a base of 1.5 billion parameters (3 GB), 2 rounds; about 8 minutes
    python scripts/bench_merge.py --big        and one of 3 billion (6 GB), for its memory; needs 20 GB of disk

The base has Qwen2's shapes, random bf16 weights and six files, and the adapter rank 16 on all linear layers. Each arm
is a process of its own; before it the base is dropped from the page cache, and its time ends when the result is on
the disk (fsync). Peak memory is what /proc/self/status calls VmHWM. The gate: every tensor of both results is the
same, byte for byte.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

OUT = Path(__file__).parents[1] / "docs" / "benchmarks"
ARMS = ("copy", "finetune", "peft", "finetune, proved")
SHARDS, RANK = 6, 16


@dataclass(frozen=True)
class Size:
    """The numbers of a Qwen2 model with tied embeddings."""

    name: str
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int = 151_936

    def config(self) -> dict[str, Any]:
        """Its config.json."""
        return {
            "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "dtype": "bfloat16",
            "hidden_size": self.hidden, "intermediate_size": self.inner, "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads, "num_key_value_heads": self.kv_heads, "vocab_size": self.vocabulary,
            "max_position_embeddings": 4096, "tie_word_embeddings": True, "bos_token_id": 0, "eos_token_id": 0,
        }  # fmt: skip

    def linears(self) -> Iterator[tuple[str, int, int]]:
        """(module, out, in) of every linear layer."""
        kv = self.hidden // self.heads * self.kv_heads
        for layer in range(self.layers):
            for part, out, into in (
                ("self_attn.q_proj", self.hidden, self.hidden), ("self_attn.k_proj", kv, self.hidden),
                ("self_attn.v_proj", kv, self.hidden), ("self_attn.o_proj", self.hidden, self.hidden),
                ("mlp.gate_proj", self.inner, self.hidden), ("mlp.up_proj", self.inner, self.hidden),
                ("mlp.down_proj", self.hidden, self.inner),
            ):  # fmt: skip
                yield f"model.layers.{layer}.{part}", out, into

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Name and shape of every tensor."""
        yield "model.embed_tokens.weight", (self.vocabulary, self.hidden)
        for module, out, into in self.linears():
            yield f"{module}.weight", (out, into)
            if module.endswith(("q_proj", "k_proj", "v_proj")):
                yield f"{module}.bias", (out,)
        for layer in range(self.layers):
            for norm in ("input_layernorm", "post_attention_layernorm"):
                yield f"model.layers.{layer}.{norm}.weight", (self.hidden,)
        yield "model.norm.weight", (self.hidden,)


SIZES = {"1.5B": Size("1.5B", 1536, 8960, 28, 12, 2), "3B": Size("3B", 2048, 11008, 36, 16, 2)}


# ------------------------------------------------------------------------------------------------------- the inputs


def write_base(folder: Path, size: Size) -> int:
    """Random weights in six files, one at a time; returns the number of parameters."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(size.config()))
    named = list(size.tensors())
    counts = [torch.Size(shape).numel() for _, shape in named]
    noise = torch.randn(1 << 22, generator=torch.Generator().manual_seed(1)).mul_(0.02).bfloat16()
    place, groups, filled = {}, [[]], 0
    for (name, shape), count in zip(named, counts, strict=True):
        if filled >= sum(counts) / SHARDS * len(groups) and len(groups) < SHARDS:
            groups.append([])
        groups[-1].append((name, shape))
        filled += count
    for number, group in enumerate(groups, 1):
        file = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        tensors = {}
        for seed, (name, shape) in enumerate(group):
            count = torch.Size(shape).numel()
            moved = noise.roll(7919 * (1000 * number + seed))  # no two tensors alike
            tensors[name] = moved.repeat(-(-count // len(noise)))[:count].view(shape).contiguous()
            place[name] = file
        save_file(tensors, folder / file, metadata={"format": "pt"})
        del tensors
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": place}))
    return sum(counts)


def write_adapter(folder: Path, base: Path, size: Size) -> None:
    """Rank 16 on all linear layers, float32, A and B random."""
    import torch
    from peft import LoraConfig
    from safetensors.torch import save_file

    dice = torch.Generator().manual_seed(2)
    tensors = {}
    for module, out, into in size.linears():
        tensors[f"base_model.model.{module}.lora_A.weight"] = torch.randn(RANK, into, generator=dice) * 0.02
        tensors[f"base_model.model.{module}.lora_B.weight"] = torch.randn(out, RANK, generator=dice) * 0.02
    names = sorted({module.rpartition(".")[2] for module, _, _ in size.linears()})
    config = LoraConfig(
        task_type="CAUSAL_LM", r=RANK, lora_alpha=2 * RANK, target_modules=names, base_model_name_or_path=str(base)
    )
    config.save_pretrained(str(folder))
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})


# ---------------------------------------------------------------------------------------------------------- one arm


def forget(folder: Path) -> None:
    """Drop a folder's files from the page cache, so that they are read from the disk."""
    for file in folder.iterdir():
        handle = os.open(file, os.O_RDONLY)
        os.fsync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def peak_bytes() -> int:
    """Largest resident memory of this process so far."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def run_arm(arm: str, base: Path, adapter: Path, out: Path) -> dict[str, Any]:
    """Do the work of one arm; imports count for none of them."""
    work = _copy if arm == "copy" else _peft() if arm == "peft" else _ours(proved="proved" in arm)
    began, used = time.perf_counter(), time.process_time()
    said = work(base, adapter, out)
    return {
        "arm": arm, "wall_s": time.perf_counter() - began, "cpu_s": time.process_time() - used,
        "peak_bytes": peak_bytes(), **(said or {}),
    }  # fmt: skip


def _copy(base: Path, adapter: Path, out: Path) -> None:
    out.mkdir()
    for file in sorted(base.iterdir()):
        shutil.copyfile(file, out / file.name)
        _flush(out / file.name)


def _ours(*, proved: bool) -> Any:
    import accelerate  # noqa: F401
    import peft  # noqa: F401
    from transformers import Qwen2ForCausalLM  # noqa: F401

    from finetune.facts import read_facts
    from finetune.fold import Options, merge_adapter

    def work(base: Path, adapter: Path, out: Path) -> dict[str, Any]:
        vocabulary = read_facts(str(base)).vocab_size
        rows = [[(7919 * place + number) % vocabulary for place in range(48)] for number in range(4)]
        merged = merge_adapter(base, adapter, out, Options(rows=rows if proved else None))
        return {"proof": merged.proof.sentence() if merged.proof else None, "notes": merged.notes}

    return work


def _peft() -> Any:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, Qwen2ForCausalLM  # noqa: F401  (imported before the clock starts)

    def work(base: Path, adapter: Path, out: Path) -> None:
        model = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
        merged = PeftModel.from_pretrained(model, str(adapter)).merge_and_unload()
        merged.save_pretrained(out, max_shard_size="600MB")
        for file in out.iterdir():
            _flush(file)

    return work


def _flush(file: Path) -> None:
    handle = os.open(file, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


# ------------------------------------------------------------------------------------------------------- all of them


def child(arm: str, folder: Path) -> dict[str, Any]:
    """One arm in a process of its own; its result lies in `folder / <arm>`."""
    forget(folder / "base")
    command = [sys.executable, __file__, "--arm", arm, "--folder", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{arm} failed:\n{done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def same_tensors(one: Path, other: Path) -> tuple[int, int]:
    """(tensors with the same bytes in two model folders, tensors of the first)."""
    from finetune.merge_layout import same_bytes
    from finetune.weight_files import read_model

    left, right = (
        {name: tensor for shard in read_model(folder) for name, tensor in shard.tensors.items()}
        for folder in (one, other)
    )
    right.pop("lm_head.weight", None)
    equal = sum(same_bytes(tensor, right[name]) for name, tensor in left.items() if name in right)
    return (equal if set(left) == set(right) else 0), len(left)


def measure(size: Size, rounds: int, folder: Path, arms_of_it: Sequence[str] = ARMS) -> dict[str, Any]:
    """Base and adapter of one size, the arms in turn, and the gate."""
    parameters = write_base(folder / "base", size)
    write_adapter(folder / "adapter", folder / "base", size)
    found: dict[str, list[dict[str, Any]]] = {arm: [] for arm in arms_of_it}
    gate = (0, 0)
    for number in range(rounds):
        for arm in arms_of_it if number % 2 == 0 else reversed(arms_of_it):
            found[arm].append(child(arm, folder))
            last = found[arm][-1]
            wall, used, peak = last["wall_s"], last["cpu_s"], last["peak_bytes"] / 1e9
            print(f"{size.name} {arm:16} {wall:6.1f} s, {used:.1f} s of processor, {peak:.2f} GB", flush=True)
            if number == 0 and arm in ("finetune", "peft"):
                continue
            shutil.rmtree(folder / arm)
        if number == 0:
            gate = same_tensors(folder / "finetune", folder / "peft")
            for arm in ("finetune", "peft"):
                shutil.rmtree(folder / arm)
    arms = {
        arm: {
            "wall_s": round(statistics.median(each["wall_s"] for each in runs), 2),
            "cpu_s": round(statistics.median(each["cpu_s"] for each in runs), 2),
            "peak_bytes": max(each["peak_bytes"] for each in runs),
            "runs": [round(each["wall_s"], 2) for each in runs],
        }
        for arm, runs in found.items()
    }
    proof = found.get("finetune, proved", [{}])[-1]
    return {
        "parameters": parameters, "bytes": sum(f.stat().st_size for f in (folder / "base").glob("*.safetensors")),
        "same_tensors": gate[0], "tensors": gate[1], "arms": arms, "proof": proof.get("proof") or proof.get("notes"),
    }  # fmt: skip


# ---------------------------------------------------------------------------------------------------------- the page


def page(results: dict[str, Any]) -> str:
    """docs/benchmarks/merge.md."""
    lines = [
        "# Merging",
        "",
        "A base of Qwen2's shapes with random bf16 weights in six files, and an adapter of rank 16 on all linear "
        "layers. The base is read from the disk, not from the page cache, and the clock stops when the result is on "
        "the disk. `copy` copies the base's files and does nothing else; `peft` is `merge_and_unload` and "
        "`save_pretrained`.",
    ]
    for name, result in results["sizes"].items():
        arms = result["arms"]
        lines += [
            "",
            f"## {name}: {result['parameters'] / 1e9:.2f} billion parameters, {result['bytes'] / 1e9:.2f} GB",
            "",
            f"{result['same_tensors']} of {result['tensors']} tensors are the same in both results, byte for byte.",
            "",
            "| | seconds | copying = 1 | processor seconds | peak memory, GB | peft = 1 |",
            "| --- | ---: | ---: | ---: | ---: | ---: |",
        ]
        for arm in arms:
            wall, peak = arms[arm]["wall_s"], arms[arm]["peak_bytes"]
            lines.append(
                f"| {arm} | {wall:.1f} | {wall / arms['copy']['wall_s']:.2f} | {arms[arm]['cpu_s']:.1f} "
                f"| {peak / 1e9:.2f} | {peak / arms['peft']['peak_bytes']:.2f} |"
            )
        if result["proof"]:
            lines += ["", f"The proof of this merge: {result['proof']}"]
    return "\n".join([*lines, "", results["made"], ""])


def made(rounds: int) -> str:
    """What the numbers were made with."""
    packages = ", ".join(f"{name} {version(name)}" for name in ("finetune", "torch", "transformers", "peft"))
    cores = len(os.sched_getaffinity(0))
    return (
        f"Made by `python scripts/bench_merge.py --big` ({cores} core{'s' * (cores > 1)}, {platform.machine()}; "
        f"{packages}; medians of {rounds} round{'s' * (rounds > 1)}, the large one once; {date.today()})."
    )


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--big", action="store_true", help="3 billion parameters as well")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument(
        "--work", type=Path, help="where 10 GB (with --big 20 GB) may lie; by default a temporary folder"
    )
    parser.add_argument("--arm", choices=ARMS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.arm:
        folder = asked.folder
        print(json.dumps(run_arm(asked.arm, folder / "base", folder / "adapter", folder / asked.arm)))
        return
    results: dict[str, Any] = {"made": made(asked.rounds), "sizes": {}}
    for name in ("1.5B", "3B") if asked.big else ("1.5B",):
        with tempfile.TemporaryDirectory(prefix="finetune-merge-", dir=asked.work) as folder:
            small = name == "1.5B"  # the large one is for memory, and its proof takes minutes
            arms = ARMS if small else ARMS[:3]
            results["sizes"][name] = measure(SIZES[name], asked.rounds if small else 1, Path(folder), arms)
        OUT.mkdir(parents=True, exist_ok=True)
        (OUT / "merge.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        (OUT / "merge.md").write_text(page(results), encoding="utf-8")
    print(page(results))


if __name__ == "__main__":
    main()
