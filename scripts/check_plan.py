"""Hold the plan against real training steps on this machine's CPU, and write docs/benchmarks/plan-cpu.md and .json.

    python scripts/check_plan.py                     every case; about 6 minutes on two cores
    python scripts/check_plan.py --only lora qlora   some of them, shown and not written
    python scripts/check_plan.py --layers 2          the first layers of the model, with random weights

Each case trains two optimizer steps through `finetune.verify`, which is the trainer's own path, in a process of its
own, so that nothing is left over from the case before. Measured is the most that torch's allocator had given out
during the second step. Beside it stand the torch-free step (what `finetune plan` says) and the step traced on meta
tensors (`finetune plan --simulate`), both for the very micro-batch that was measured.

`gpu_check.py` runs the same on a GPU, with the parts written here.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

from random_model import random_model, small_tokenizer

from finetune.device import Device
from finetune.facts import Facts, facts_of, read_facts
from finetune.paths import Lengths
from finetune.plan import Plan, resolve
from finetune.recipe import Recipe
from finetune.tensors import layer_of

ROOT = Path(__file__).resolve().parent.parent
BENCHMARKS = ROOT / "docs" / "benchmarks"
LIMIT = 0.02
"""Largest difference between a prediction and the measured peak that counts as right."""
PREDICTIONS = {"predicted": "the plan", "simulated": "the simulation"}
SMOLLM2 = "smollm2-135m"
PACKAGES = ("torch", "transformers", "peft", "trl", "bitsandbytes", "accelerate")


# -------------------------------------------------------------------------------------------------------------- cases


@dataclass(frozen=True)
class Case:
    """One training step to be measured: a model, a method and the shape of a micro-batch.

    `random`: weights are drawn on the device instead of read. `padded`: rows of unequal length. `held`: products
    are fp32 and the layers' weights lie as in their file. `environment`: set for this case's process.
    """

    name: str
    model: str
    method: Mapping[str, Any]
    rows: int = 1
    length: int = 512
    checkpointing: bool = False
    attention: str = "auto"
    padded: bool = False
    random: bool = False
    held: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)


FULL: dict[str, Any] = {"kind": "full"}
LORA: dict[str, Any] = {"kind": "lora"}
QLORA: dict[str, Any] = {"kind": "qlora"}
QV, ATTENTION = {**LORA, "targets": "qv"}, {**LORA, "targets": "attention"}


def _both(name: str, method: Mapping[str, Any]) -> Iterator[Case]:
    yield Case(name, SMOLLM2, method)
    yield Case(f"{name}-checkpointing", SMOLLM2, method, checkpointing=True)


CASES: tuple[Case, ...] = (
    *_both("full", FULL),
    *_both("lora-qv", QV),
    *_both("lora-attention", ATTENTION),
    *_both("lora", LORA),
    *_both("qlora", QLORA),
    Case("qlora-one-scale", SMOLLM2, {**QLORA, "double_quant": False}),
    Case("dora", SMOLLM2, {**LORA, "variant": "dora"}),
    Case("lora-flat", SMOLLM2, LORA, rows=4, length=128),
    Case("lora-flat-checkpointing", SMOLLM2, LORA, rows=4, length=128, checkpointing=True),
    Case("lora-held", SMOLLM2, LORA, held=True),
    Case("lora-qv-held-checkpointing", SMOLLM2, QV, held=True, checkpointing=True),
    Case("lora-eager", SMOLLM2, LORA, attention="eager"),
)
"""On a CPU several rows in a micro-batch are laid flat; padded ones exist on a GPU only."""


def chosen(cases: Sequence[Case], names: Sequence[str] | None) -> tuple[Case, ...]:
    """The cases of these names, all of them without names. Ends the script when there is none of a name."""
    known = {case.name: case for case in cases}
    if unknown := [name for name in names or () if name not in known]:
        raise SystemExit(f"There is no case {' or '.join(unknown)}. There are {', '.join(known)}.")
    return tuple(known[name] for name in dict.fromkeys(names)) if names else tuple(cases)


def recipe_of(case: Case) -> Recipe:
    """The recipe of a case; what a user would leave to the plan is left to it."""
    return Recipe.model_validate(
        {
            "model": case.model,
            "method": dict(case.method),
            "load": {"attention": case.attention, "dtype": "float32" if case.held else "auto"},
            "fast": {"weights": case.held or "auto"},
            "data": {"train": "random.jsonl", "max_length": case.length},
            "train": {
                "batch_size": case.rows,
                "micro_batch": case.rows,
                "checkpointing": case.checkpointing,
                "precision": "fp32" if case.held else "auto",
            },
        }
    )


def planned(case: Case, device: Device, layers: int | None = None) -> tuple[Recipe, Facts, Plan]:
    """The resolved recipe of a case and its plan; `layers` cuts the model."""
    recipe = recipe_of(case)
    facts = read_facts(recipe.model)
    if layers is not None:
        facts = cut(facts, layers)
    long, short = (case.length, case.length - 1), (case.length - 1, case.length - 2)
    pairs = [short if case.padded and number % 2 else long for number in range(case.rows)]
    recipe, plan = resolve(recipe, facts, device, Lengths.read(pairs, "the case"))
    return recipe, facts, plan


def cut(facts: Facts, layers: int) -> Facts:
    """The same model with its first layers only."""
    shapes = {t.name: t.shape for t in facts.tensors if (layer_of(t.name) or 0) < layers}
    config = {**facts.config, "num_hidden_layers": layers}
    if "layer_types" in config:
        config["layer_types"] = config["layer_types"][:layers]
    return facts_of(facts.model, config, shapes, facts.tensors[0].dtype)


# ------------------------------------------------------------------------------------------------- one case, measured


def this_machine() -> Device:
    """What this process trains on, with all that the plan asks about a card."""
    import torch

    from finetune.model import real_device

    device = real_device()
    if device.kind == "cpu":
        return device
    card = torch.cuda.get_device_properties(0)
    return replace(device, capability=(card.major, card.minor), multiprocessors=card.multi_processor_count)


def check(case: Case, layers: int | None = None) -> dict[str, Any]:
    """Train two steps of a case in this process, and predict them in both ways. Sizes in bytes."""
    import torch

    from finetune.measure import live_bytes
    from finetune.model import load_model, load_tokenizer, model_folder, training_device
    from finetune.simulate import simulate
    from finetune.verify import verify

    began = time.perf_counter()
    device = this_machine()
    others = live_bytes() if device.kind == "cpu" else 0  # tensors of whoever else lives in this process
    recipe, facts, plan = planned(case, device, layers)
    drawn = case.random or layers is not None
    found = verify(
        recipe, facts, plan, device,
        small_tokenizer() if drawn else load_tokenizer(recipe),
        lambda: random_model(recipe, facts, training_device())
        if drawn
        else load_model(recipe, model_folder(recipe.model), facts),
    )  # fmt: skip
    reserved = torch.cuda.max_memory_reserved() if device.kind == "cuda" else None
    stepped = time.perf_counter()
    traced = simulate(facts, recipe.method, found.batch, plan.path, warm_up=device.kind == "cuda")
    result = {
        "batch": asdict(found.batch),
        "path": asdict(plan.path),
        "measured": found.peak - others,
        "predicted": found.predicted,
        "estimated": plan.account.estimated,
        "simulated": traced.peak.allocated or traced.peak.bytes,
        "predicted_during": found.during,
        "simulated_during": f"{traced.peak.phase}: {traced.peak.during}",
        "seconds": round(stepped - began, 1),
        "seconds_simulated": round(traced.seconds, 1),
    }
    if reserved is not None:
        kernel = attention_kernel(plan, facts, training_device())
        result |= {"reserved": reserved, "reserved_simulated": traced.reserved, "kernel": kernel}
    return result


def attention_kernel(plan: Plan, facts: Facts, device: str) -> str:
    """Which kernel torch's `scaled_dot_product_attention` takes for a plan's micro-batch on this card."""
    import torch
    from torch.nn.attention import SDPBackend

    if plan.path.attention in ("eager", "math"):
        return plan.path.attention
    batch, masked = plan.batch, plan.batch.padded or plan.batch.flat
    options: dict[str, Any] = {"dtype": getattr(torch, plan.path.autocast or plan.path.weights), "device": device}
    query = torch.empty(batch.rows, facts.heads, batch.length, facts.head_dim, requires_grad=True, **options)
    # transformers repeats shared heads itself where there is a mask.
    heads = facts.heads if masked else facts.kv_heads
    key = torch.empty(batch.rows, heads, batch.length, facts.head_dim, requires_grad=True, **options)
    mask = torch.ones(batch.rows, 1, batch.length, batch.length, dtype=torch.bool, device=device) if masked else None
    choose: Any = torch._fused_sdp_choice
    name = SDPBackend(choose(query, key, key, mask, 0.0, not masked, enable_gqa=heads != facts.heads)).name
    return name.removesuffix("_ATTENTION").lower()


# ----------------------------------------------------------------------------------------- every case, each by itself


class Room:
    """Bytes of a device that are handed to cases; one that asks for more than there is waits until it is alone."""

    def __init__(self, size: int) -> None:
        self.size, self.used = size, 0
        self._freed = threading.Condition()

    @contextmanager
    def take(self, size: int) -> Iterator[None]:
        """Hold `size` bytes."""
        with self._freed:
            self._freed.wait_for(lambda: not self.used or self.used + size <= self.size)
            self.used += size
        try:
            yield
        finally:
            with self._freed:
                self.used -= size
                self._freed.notify_all()


@dataclass(frozen=True)
class Bench:
    """How cases are run: `jobs` at once, `threads` each, `seconds` for one and `budget` seconds for all."""

    script: Path
    jobs: int
    threads: int
    seconds: float
    budget: float
    layers: int | None = None


def run_all(
    cases: Sequence[Case], bench: Bench, device: Device, say: Callable[[str], None] = print
) -> dict[str, dict[str, Any]]:
    """Run every case in its own process, as many at once as fit into the device together.

    Each process has its own allocator, so cases that share a device do not change each other's numbers.
    """
    room, ends = Room(int(0.9 * device.memory)), time.monotonic() + bench.budget

    def one(case: Case) -> dict[str, Any]:
        with room.take(planned(case, device, bench.layers)[2].total):
            left = min(bench.seconds, ends - time.monotonic())
            result = _process(case, bench, left) if left > 10 else {"error": "not begun: the time was up"}
        say(f"{case.name}: {_short(result)}")
        return result

    with ThreadPoolExecutor(bench.jobs) as pool:
        return dict(zip((case.name for case in cases), pool.map(one, cases), strict=True))


def _process(case: Case, bench: Bench, seconds: float) -> dict[str, Any]:
    """The result of a case, or a word on why there is none."""
    with tempfile.TemporaryDirectory(prefix="check-plan-") as folder:
        file = Path(folder) / "result.json"
        command = [sys.executable, str(bench.script), "--child", case.name, str(file)]
        command += ["--layers", str(bench.layers)] if bench.layers is not None else []
        environment = {
            **os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
            "OMP_NUM_THREADS": str(bench.threads), **case.environment,
        }  # fmt: skip
        try:
            subprocess.run(command, env=environment, capture_output=True, text=True, timeout=seconds, check=True)
        except subprocess.TimeoutExpired:
            return {"error": f"stopped after {seconds:.0f} s"}
        except subprocess.CalledProcessError as error:
            lines = [line for line in error.stderr.splitlines() if line.strip()]
            return {"error": lines[-1] if lines else f"exit code {error.returncode}"}
        result: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return result


def child(cases: Sequence[Case], name: str, file: str, layers: int | None) -> None:
    """What `_process` starts: one case, its result as JSON."""
    result = check(chosen(cases, [name])[0], layers)
    Path(file).write_text(json.dumps(result), encoding="utf-8")


def _short(result: Mapping[str, Any]) -> str:
    if "error" in result:
        return f"FAILED, {result['error']}"
    return (
        f"{result['measured'] / 1e9:.3f} GB measured; {difference(result, 'predicted'):+.2%} predicted, "
        f"{difference(result, 'simulated'):+.2%} simulated; {result['seconds']:.0f} s"
    )


# ------------------------------------------------------------------------------------------------------- what it says


def difference(result: Mapping[str, Any], what: str, measured: str = "measured") -> float:
    """A prediction over the measured peak, minus one."""
    return float(result[what] / result[measured] - 1)


def promised(result: Mapping[str, Any], what: str) -> bool:
    """Whether a case ran and this prediction is one that the plan does not call an estimate."""
    return "error" not in result and not (what == "predicted" and result["estimated"])


def off(results: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Cases without a result, and those where a prediction is off by more than the limit."""
    return [
        name
        for name, result in results.items()
        if "error" in result
        or any(abs(difference(result, what)) > LIMIT for what in PREDICTIONS if promised(result, what))
    ]


def row_of(case: Case, result: Mapping[str, Any]) -> list[str]:
    """A case's line of the table."""
    if "error" in result:
        return [case.name, result["error"]]
    batch = result["batch"]
    shape = f"{batch['rows']} x {batch['length']:,}" + ", flat" * batch["flat"] + ", padded" * batch["padded"]
    cells = [case.name, shape, f"{result['measured'] / 1e6:,.1f}"]
    for what in PREDICTIONS:
        sign = "" if promised(result, what) else "~"
        cells += [f"{sign}{result[what] / 1e6:,.1f}", f"{100 * difference(result, what):+.2f} %"]
    if "reserved" in result:
        cells += [f"{result['reserved'] / 1e6:,.0f}", f"{100 * _reserved_off(result):+.1f} %", result["kernel"]]
    return [*cells, result["simulated_during"].replace("aten::", "").replace("bitsandbytes::", "")]


def _reserved_off(result: Mapping[str, Any]) -> float:
    return difference(result, "reserved_simulated", "reserved")


def table(cases: Sequence[Case], results: Mapping[str, Mapping[str, Any]]) -> str:
    """All cases as a Markdown table."""
    gpu = any("reserved" in result for result in results.values())
    header = ["case", "micro-batch", "measured, MB", "plan", "", "simulated", ""]
    header += ["reserved, MB", "simulated", "attention"] * gpu + ["operation at the peak"]
    rule = ["---", "---", "---:", "---:", "---:", "---:", "---:", *["---:", "---:", "---"] * gpu, "---"]
    rows = [row_of(case, results[case.name]) for case in cases]
    full = [row + [""] * (len(header) - len(row)) for row in rows]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in [header, rule, *full]
    )


def verdict(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Mean and worst difference, and what failed."""
    done = [result for result in results.values() if "error" not in result]
    parts = []
    for what, word in PREDICTIONS.items():
        if sizes := [abs(difference(result, what)) for result in done if promised(result, what)]:
            parts.append(f"{word} is off by {statistics.fmean(sizes):.2%} in the mean and {max(sizes):.2%} at worst")
    if any("reserved" in result for result in done):
        sizes = [abs(_reserved_off(result)) for result in done]
        parts.append(f"reserved memory by {statistics.fmean(sizes):.1%} and {max(sizes):.1%}")
    failed = len(results) - len(done)
    said = f"{len(done)} of {len(results)} cases ran" if failed else f"All {len(done)} cases ran"
    return f"{said}; {'; '.join(parts)}." if parts else f"{said}."


def versions() -> dict[str, str]:
    """Of Python and the libraries whose tensors are counted."""
    return {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}}


def cpu_words() -> str:
    """The processor in words."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        name = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        name = platform.processor() or platform.machine()
    return f"{name}, {os.cpu_count()} cores"


def page(
    title: str,
    intro: str,
    machine: str,
    command: str,
    cases: Sequence[Case],
    results: Mapping[str, Mapping[str, Any]],
) -> str:
    """The file in docs/benchmarks."""
    libraries = ", ".join(f"{name} {number}" for name, number in versions().items())
    return "\n\n".join(
        [
            f"# {title}",
            f"Written by `{command}` on {date.today().isoformat()}. Machine: {machine}. {libraries}.",
            intro,
            table(cases, results),
            verdict(results) + " 1 MB = 1e6 bytes; ~ marks what the plan itself calls an estimate, not counted "
            "in the sentence before. The operation is where the simulation has its peak.",
        ]
    ) + "\n"  # fmt: skip


def document(
    machine: str, command: str, cases: Sequence[Case], results: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """The same for programs; sizes in bytes."""
    return {
        "machine": machine,
        "command": command,
        "date": date.today().isoformat(),
        "versions": versions(),
        "cases": [{**asdict(case), **results[case.name]} for case in cases],
    }


def write(folder: Path, name: str, text: str, content: Mapping[str, Any]) -> None:
    """`name`.md and `name`.json in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.md").write_text(text, encoding="utf-8")
    (folder / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {name}.md and {name}.json")


INTRO = """\
Two optimizer steps of SmolLM2-135M are trained on this machine's CPU, each case in a process of its own, by the code
that `finetune train` runs. Measured is the most that torch's allocator had given out during the second step: weights,
gradients, optimizer state, activations and temporaries, without Python and the libraries. `plan` is what
`finetune plan` says without torch, `simulated` the same step traced on meta tensors (`--simulate`), both for the
micro-batch that was measured."""


def parser_of(text: str) -> argparse.ArgumentParser:
    """The options that both scripts have."""
    parser = argparse.ArgumentParser(description=text.splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", help="run these cases and write nothing")
    parser.add_argument("--layers", type=int, metavar="N", help="cut the model to N layers, with random weights")
    parser.add_argument("--jobs", type=int, metavar="N", help="cases at once")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="write there, whatever was run")
    parser.add_argument("--child", nargs=2, metavar=("NAME", "FILE"), help=argparse.SUPPRESS)
    return parser


def finish(
    options: argparse.Namespace, name: str, title: str, intro: str, machine: str, cases: Sequence[Case],
    results: Mapping[str, Mapping[str, Any]],
) -> None:  # fmt: skip
    """Show the table, write it where that is asked for, and end with 1 when a case is off."""
    command = f"python scripts/{Path(sys.argv[0]).name}"
    print(f"\n{table(cases, results)}\n\n{verdict(results)}")
    partial = options.only or options.layers is not None
    if folder := options.output or (None if partial else BENCHMARKS):
        text = page(title, intro, machine, command, cases, results)
        write(folder, name, text, document(machine, command, cases, results))
    if missed := off(results):
        sys.exit(f"off by more than {LIMIT:.0%}, or without a result: {', '.join(missed)}")


def main() -> None:
    options = parser_of(__doc__ or "").parse_args()
    if options.child:
        os.environ["ACCELERATE_USE_CPU"] = "true"
        child(CASES, options.child[0], options.child[1], options.layers)
        return
    from finetune.device import cpu_device

    device, cores = cpu_device(), os.cpu_count() or 1
    cases = chosen(CASES, options.only)
    jobs = options.jobs or min(4, cores)
    bench = Bench(Path(__file__), jobs, max(1, cores // jobs), 600, 3600, options.layers)
    results = run_all(cases, bench, device)
    machine = f"{cpu_words()}, {device.memory / 1e9:.0f} GB, {'bf16' if device.bf16 else 'fp32'}"
    finish(options, "plan-cpu", "The plan against real steps on a CPU", INTRO, machine, cases, results)


if __name__ == "__main__":
    main()
