"""The speed comparison on one GPU: what `gpu_check.py --bench` runs. Writes docs/benchmarks/speed-<card>.md, .json.

    python scripts/gpu_check.py --bench [--minutes 15]     every case; in 6 minutes, or in more with more repetitions
    python scripts/gpu_check.py --bench --only gemma-lora  some of them, shown and not written

Each case is a model's shapes with random weights and a method. The weights are drawn once into a temporary folder (19
GB of disk for all cases) and read from there by every arm. Watch, gate and sums are those of `bench.py`.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from datetime import date
from functools import partial
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

import bench
from bench_rows import PLAIN
from check_plan import BENCHMARKS, Case, chosen, cut, recipe_of, write
from random_model import random_model, small_tokenizer

from finetune.device import Device
from finetune.facts import read_facts
from finetune.paths import Lengths
from finetune.plan import Plan, changed, resolve
from finetune.recipe import QLoRA, Recipe

MODELS = {"gemma": "google/gemma-2-2b", "llama": "meta-llama/Llama-2-7b-hf"}
METHODS: dict[str, dict[str, Any]] = {
    "lora": bench.ALL_LINEAR,
    "qlora": {**bench.ALL_LINEAR, "kind": "qlora", "compute_dtype": "bfloat16"},
}
CASES = tuple(f"{model}-{method}" for model in MODELS for method in METHODS)
ARMS = {
    "trl": "SFTTrainer as it comes, given a folder: bf16 autocast over fp32 (QLoRA: 4-bit) weights, checkpointing",
    "trl-best": "SFTTrainer with its fastest options: weights in bf16, no checkpointing where that fits, fused "
    "AdamW, the flash-attention package where it is installed, else sdpa, which Gemma 2 does not have",
    "finetune": "`finetune.train.train` of a recipe that fixes bf16 and the case's numbers; the rest is the plan's",
}
LIMITS = (5e-4, 0.15)
"""The gate's, for the loss and for the gradient of every adapter, relative. A product rounded to bf16 is off by up to
2^-8, 0.2 % in the mean square, and arms round in different places. A gradient passes about 4 roundings a layer on its
way forth and back: over 32 layers sqrt(128) * 0.2 % = 2.5 % in one arm, sqrt(2) times as much between two. A CPU with
32 narrow layers and rows of 2,048 tokens showed 3.5 % at worst and 8e-5 of the loss, and 55 % with moved labels."""
SPREAD = 1.0
"""Random weights have a standard deviation of SPREAD / sqrt(hidden size). With more, as with Llama's own 0.02,
roundings grow from layer to layer, to 16 %; with half of it moved labels change gradients by no more than 10 %."""
NARROW = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
NARROW |= {"head_dim": 64, "vocab_size": 512}
Say = Callable[[str], None]
One = Callable[..., dict[str, Any]]


@dataclass(frozen=True)
class Setup:
    """How cases are run. A step has `rows` rows of `length` tokens in one pass; `seconds` are for all of it.

    `layers` cuts the models; `narrow` gives them small layers.
    """

    device: str = "cuda"
    layers: int | None = None
    narrow: bool = False
    rows: int = 4
    length: int = 2048
    steps: int = 6
    warm: int = 2  # the second step still asks the driver for memory, as the first one made the optimizer's state
    turns: int = 20
    seconds: float = 330
    threads: int = 1

    @property
    def all_steps(self) -> int:
        """Of a process, with one more to measure memory."""
        return self.warm + self.steps + 1


def tiny(layers: int) -> Setup:
    """What the tests run on the CPU."""
    return Setup("cpu", layers, narrow=True, length=96, steps=1, warm=1, turns=2, seconds=600)


def job_of(case: str, setup: Setup) -> bench.Job:
    """The work of a case in the words of `bench.py`."""
    model, method = case.split("-")
    about = f"The shapes of {MODELS[model]} with random weights; {method} of rank 16 on all linear layers"
    return bench.Job(
        case, about, METHODS[method], batch=setup.rows, micro=setup.rows, rate=2e-4, max_length=setup.length,
        steps=setup.steps, rows=setup.rows * setup.all_steps, precision="bf16",
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------------------- what fits


def planned(case: str, setup: Setup, device: Device, checkpointing: Any, dtype: str, *, plainly: bool = True) -> Plan:
    """The plan of a case; `plainly` is by peft's and transformers' own code, as TRL runs it."""
    model, method = case.split("-")
    facts = read_facts(MODELS[model])
    facts = facts if setup.layers is None else cut(facts, setup.layers)
    shape = Case(case, MODELS[model], METHODS[method], setup.rows, setup.length, checkpointing)
    recipe = changed(recipe_of(shape), "load.dtype", dtype)
    for field in ("fast.adapters", "fast.layers"):
        recipe = changed(recipe, field, not plainly)
    rows = [(setup.length, setup.length // 3)] * setup.rows
    return resolve(recipe, facts, device, Lengths.read(rows, "the case"))[1]


def with_room(cases: Sequence[str], setup: Setup, device: Device) -> tuple[dict[str, bool], list[str]]:
    """The cases of which every arm fits, each with whether `trl-best` must checkpoint, and a line on the others."""
    kept, left_out = {}, []
    for case in cases:
        plain = planned(case, setup, device, True, "float32")
        ours = planned(case, setup, device, "auto", "bfloat16", plainly=False)
        # Whatever becomes of them, the weights are drawn on the card in 16 bits.
        needed = max(plain.total, ours.total, int(2.2 * plain.parameters))
        if needed <= plain.room:
            kept[case] = not planned(case, setup, device, False, "bfloat16").fits
        else:
            left_out.append(f"{case} needs {needed / 1e9:.0f} GB")
    return kept, left_out


# -------------------------------------------------------------------------------------------------------- one process


def child(spec: Mapping[str, Any]) -> Any:
    """What one process does: make the work of one model, measure the ceiling, or run one arm."""
    setup, work = Setup(**spec["setup"]), Path(spec["work"])
    if spec["do"] == "make":
        return make(spec["model"], [c for c in spec["cases"] if c.startswith(spec["model"])], setup, work)
    if spec["do"] == "ceiling":
        return {case: bench.ceiling(bench._work(work / case), setup.device, "bfloat16") for case in spec["cases"]}
    folder, grads = work / spec["case"], Path(spec["grads"]) if spec["grads"] else None
    watch = bench.Watch(folder, grads, spec["begun"], spec["timed"], spec["measure"], setup.device, setup.warm)
    return run_arm(spec["arm"], folder, watch, checkpointing=spec["checkpointing"])


def make(model: str, cases: Sequence[str], setup: Setup, work: Path) -> None:
    """Write the random model of some cases, and what their arms get. All of them start from one adapter."""
    _write_model(MODELS[model], setup, work / model)
    adapter = None
    for case in cases:
        (work / case).mkdir()
        bench.make(job_of(case, setup), work / case, work / model, setup.all_steps, adapter=adapter)
        adapter = work / case / "adapter"


def _write_model(name: str, setup: Setup, folder: Path) -> None:
    import torch

    from finetune.model import training_device

    facts = read_facts(name)
    config = {**facts.config, **(NARROW if setup.narrow else {})}
    config["initializer_range"] = SPREAD / config["hidden_size"] ** 0.5
    if setup.layers is not None:
        kinds = {"layer_types": config["layer_types"][: setup.layers]} if "layer_types" in config else {}
        config |= {"num_hidden_layers": setup.layers, **kinds}
    tokenizer = small_tokenizer()
    tokenizer.add_tokens([f" {word}" for word in PLAIN])  # what the rows are made of
    config |= {key: getattr(tokenizer, key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    parts = {"method": {"kind": "full"}, "load": {"dtype": "bfloat16", "attention": "eager"}, "data": {"train": "-"}}
    recipe = Recipe.model_validate({"model": name, **parts})
    model = random_model(recipe, replace(facts, config=config), training_device())
    model.save_pretrained(folder, max_shard_size="2GB")  # a shard is in the host's memory while it is written
    tokenizer.save_pretrained(folder)
    model.to("meta")  # leaves the device, whoever still holds it
    if setup.device == "cuda":
        torch.cuda.empty_cache()


def run_arm(arm: str, folder: Path, watch: bench.Watch, *, checkpointing: bool) -> dict[str, Any]:
    """Train the steps that `watch` asks for; `checkpointing` is whether `trl-best` must."""
    work = bench._work(folder)
    if arm == "finetune":
        return bench._finetune(work, folder, watch)
    from peft import LoraConfig

    from finetune.method import quantization_config

    best, method = arm != "trl", Recipe.model_validate(work["recipe"]).method
    adapter = LoraConfig.from_pretrained(folder / "adapter")
    adapter.inference_mode = False  # as it is saved
    load: dict[str, Any] = {}
    on_cpu = watch.device == "cpu"
    options = {"bf16": True, "use_cpu": on_cpu, "dataloader_pin_memory": not on_cpu, "model_init_kwargs": load}
    if isinstance(method, QLoRA):
        load["quantization_config"] = quantization_config(method, "bfloat16")
    if best:
        flash = not on_cpu and find_spec("flash_attn")
        load |= {"dtype": "bfloat16"} | ({"attn_implementation": "flash_attention_2"} if flash else {})
        options |= {"optim": "adamw_torch_fused", "logging_nan_inf_filter": False}
        options |= {} if checkpointing else bench._no_checkpointing()
    rows = bench.ordered(work["steps"], longest_first=best, shifted=arm == bench.SHIFTED)
    given = {"model": work["recipe"]["model"], "peft_config": adapter}
    return bench._sft(work, bench._tokenizer(work["recipe"]), watch, rows, options, **given)


# ---------------------------------------------------------------------------------------------------------- all of it


def take_turns(
    cases: Sequence[str], setup: Setup, work: Path, one: One, say: Say, ends: float, clock: Any = time.monotonic
) -> dict[str, Any]:
    """Every case once, then again with the arms in the other order, until `ends` (of `clock`): A B C, C B A, ...

    `one` runs an arm in a process of its own. An arm that fails, or that the gate refuses, is left out from then on.
    Ends the script when moved labels pass the gate, which the first case tries.
    """
    found: dict[str, Any] = {
        case: {"steps": setup.steps, "gate": {}, "failed": {}, "runs": {arm: [] for arm in ARMS}} for case in cases
    }
    took: dict[str, float] = {}
    for turn in range(setup.turns):
        for case in cases:
            began, runs, folder = clock(), found[case]["runs"], work / case
            if began + took.get(case, 0.0) > ends or not runs:
                continue
            _turn(case, found[case], turn, setup.steps, folder, partial(one, case), say)
            if turn == 0 and runs:
                found[case]["gate"] = bench._gate(list(runs), folder, runs, say, LIMITS, may_differ=ARMS)
                if "trl-best" in runs and not any("shifted" in result for result in found.values()):
                    found[case]["shifted"] = bench._shifted(folder, runs, partial(one, case), say, LIMITS)
                for arm, verdict in found[case]["gate"].items():
                    if verdict["refused"]:
                        del runs[arm]
            took[case] = clock() - began
    return found


def _turn(case: str, found: dict[str, Any], turn: int, steps: int, folder: Path, one: One, say: Say) -> None:
    arms, results = list(found["runs"]), {}
    for arm in arms if turn % 2 == 0 else arms[::-1]:
        try:
            results[arm] = one(arm, steps, folder / f"{arm}.safetensors" if turn == 0 else None, turn == 0)
            say(f"{case}, {arm}: {statistics.median(results[arm]['wall_s']):.3f} s a step")
        except SystemExit as error:
            lines = str(error).strip().splitlines()
            found["failed"][arm] = next((line for line in lines if "out of memory" in line), lines[-1]).strip()
            del found["runs"][arm]
            say(f"{case}, {arm}: FAILED, {found['failed'][arm]}")
    for arm, taken in found["runs"].items():
        taken.append(results[arm])


def run(cases: Mapping[str, bool], setup: Setup, device: Device, say: Say) -> dict[str, Any]:
    """Make the work, pass the gate, take the times. `cases` says of each whether `trl-best` must checkpoint."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gpu-bench-") as folder:
        work = Path(folder)

        def process(do: str, **more: Any) -> Any:
            spec = {"do": do, "setup": asdict(setup), "work": folder, "cases": list(cases), **more}
            return bench.process(spec, setup.threads, script=__file__, card=setup.device == "cuda", seconds=180)

        def one(case: str, arm: str, timed: int, grads: Path | None, measure: bool) -> dict[str, Any]:
            more = {"timed": timed, "grads": str(grads) if grads else None, "measure": measure}
            return dict(process("arm", case=case, arm=arm, checkpointing=cases[case], **more))

        models = {case.split("-")[0] for case in cases}
        with ThreadPoolExecutor() as pool:  # nothing is timed yet
            list(pool.map(lambda model: process("make", model=model), models))
        tops = [process("ceiling")]
        found = take_turns(list(cases), setup, work, one, say, began + setup.seconds)
        tops.append(process("ceiling"))
        for case, result in found.items():
            result["trl_best_checkpoints"] = cases[case]
            if any(result["runs"].values()):  # bench.summarize leaves out one step to warm up itself
                counts = bench._work(work / case)["counts"][setup.warm - 1 :]
                for measured in chain.from_iterable(result["runs"].values()):
                    measured["ceiling"] = bench.mean_of([top[case] for top in tops])
                bench.summarize(result, counts)
                for arm, row in result["arms"].items():
                    row["reserved_bytes"] = result["runs"][arm][0]["reserved_bytes"]
                    flops = result["flop_per_step"] / row["wall_s"]
                    row["mfu"] = flops / (device.tflops * 1e12) if device.tflops else None
    minutes, machine = round((time.monotonic() - began) / 60, 1), f"{device.name}, {device.memory / 1e9:.0f} GB"
    about = {"machine": machine, "date": date.today().isoformat(), "versions": bench.versions(), "minutes": minutes}
    return {**about, "setup": asdict(setup), "limits": LIMITS, "cases": found}


# ------------------------------------------------------------------------------------------------------- what it says

HEADER = (
    "arm", "s a step", "tokens /s", "supervised /s", "peak GB", "reserved GB", "s to first step", "MFU",
    "of the ceiling", "loss off by", "times trl", "times trl-best",
)  # fmt: skip


def cells(found: Mapping[str, Any]) -> Iterator[list[str]]:
    """The lines of a case's table."""
    for arm, row in found["arms"].items():
        memory = [f"{row[key] / 1e9:,.2f}" if row[key] else "-" for key in ("peak_bytes", "reserved_bytes")]
        yield [
            arm, f"{row['wall_s']:.3f}", f"{row['tokens_per_s']:,.0f}", f"{row['supervised_per_s']:,.0f}", *memory,
            f"{row['first_step_s']:.1f}", f"{row['mfu']:.1%}" if row["mfu"] else "-",
            f"{row['share_of_ceiling']:.1%}", f"{row['curve']:.2%}",
            *(f"{row['times'][other]['wall']:.2f}" if other in row["times"] else "-" for other in list(ARMS)[:2]),
        ]  # fmt: skip


def words(found: Mapping[str, Any]) -> Iterator[str]:
    """What stands below a case's table."""
    yield from (f"`{arm}` is left out: {why.rstrip('.')}." for arm, why in found["failed"].items())
    for arm, verdict in found["gate"].items():
        word = "refused it, and it has no times" if verdict["refused"] else "passed"
        yield f"Gate, {arm} against {verdict['against']}, {word}: {verdict['said']}."
    if shifted := found.get("shifted"):
        apart = f"loss {shifted['loss']:.1e}, gradients {shifted['gradient']:.1e} apart"
        yield f"With the labels of one row moved by one place the gate refused: {apart}."
    if "arms" not in found:
        yield "No times: none was left, or no arm ran."
        return
    top, turns = found["ceiling"], len(next(iter(found["runs"].values())))
    yield (
        f"{turns} process{'es by turns' if turns > 1 else ''} an arm; `trl-best` runs "
        f"{'with' if found['trl_best_checkpoints'] else 'without'} checkpointing. "
        f"A step has {found['tokens_per_step']:,.0f} tokens, {found['supervised_per_step']:,.0f} of them supervised, "
        f"and {found['flop_per_step'] / 1e12:,.2f} TFLOP (finetune.speed). Plain bf16 products reach "
        f"{top['layers'] / 1e12:,.1f} TFLOP/s at the layers' shapes and {top['head'] / 1e12:,.1f} at the head's: "
        f"{found['seconds_at_ceiling']:.3f} s a step."
    )


INTRO = """\
Every arm trains the same rows from one adapter, in processes of its own; a step ends when the card is done with it.
All rows have one length, so nothing is padded, and a third of their tokens is supervised. Seconds are medians over
processes, ratios medians over neighbours: times trl is how many times faster than `trl` an arm is. Peak is
`torch.cuda.max_memory_allocated` over one more step, reserved what the allocator held. The first step counts from the
start of the process, with imports and loading. MFU is the share of the data sheet's bf16 peak, the ceiling what plain
bf16 products reach on this card; what is computed again counts in neither. Loss off by compares timed steps.

The gate, before any time counts: in the first step tokens and labels are as many, the loss is the same to {0:.0e} and
the gradient of every adapter to {1:.0%} of its norm. In bf16 a product is off by up to 0.4 %, arms round in different
places, and a gradient has passed the roundings of all layers twice."""


def document(results: Mapping[str, Any], left_out: Sequence[str]) -> str:
    """docs/benchmarks/speed-<card>.md."""
    libraries = ", ".join(f"{name} {number}" for name, number in results["versions"].items())
    setup = Setup(**results["setup"])
    parts = [
        "# Speed on a GPU beside TRL",
        f"Written by `python scripts/gpu_check.py --bench` on {results['date']} in {results['minutes']} minutes. "
        f"{results['machine']}. {libraries}. A process takes {setup.warm} steps of {setup.rows} rows of "
        f"{setup.length:,} tokens to warm up and {setup.steps} by the clock.",
        INTRO.format(*results["limits"]),
        "\n".join(f"- `{arm}`: {about}." for arm, about in ARMS.items()),
        *([f"Left out for want of room: {'; '.join(left_out)}."] if left_out else []),
    ]
    for case, found in results["cases"].items():
        parts += [f"## {case}", f"{job_of(case, setup).about}."]
        if "arms" in found:
            rule = ["---", *["---:"] * (len(HEADER) - 1)]
            parts.append("\n".join("| " + " | ".join(row) + " |" for row in [HEADER, rule, *cells(found)]))
        parts.append("\n".join(f"- {line}" for line in words(found)))
    return "\n\n".join(parts) + "\n"


def compare(options: Any, name: str, device: Device) -> None:
    """Run what the options ask for, show it, and write `name`.md and .json after a whole run.

    Ends with 1 when an arm has no times, unless it had no room.
    """
    seconds = 60 * options.minutes - 30  # for the ceiling at the end
    setup = Setup(layers=options.layers, seconds=seconds, threads=os.cpu_count() or 1)
    names = [job.name for job in chosen([job_of(case, setup) for case in CASES], options.only)]
    cases, left_out = with_room(names, setup, device)
    if options.tiny:
        setup, cases, left_out = tiny(options.tiny), dict.fromkeys(names, False), []
    if not cases:
        sys.exit(f"No case fits on {device.name}: {'; '.join(left_out)}.")
    results = run(cases, setup, device, lambda line: print(line, flush=True))
    text = document(results, left_out)
    print(f"\n{text}")
    missed = [] if any("shifted" in found for found in results["cases"].values()) else ["the moved labels"]
    for case, found in results["cases"].items():
        timed = [*found.get("arms", ()), *(arm for arm, why in found["failed"].items() if "out of memory" in why)]
        missed += [f"{arm} of {case}" for arm in ARMS if arm not in timed]
    whole = setup == Setup(seconds=seconds, threads=setup.threads) and seconds >= Setup.seconds
    if folder := options.output or (BENCHMARKS if whole and not options.only and not missed else None):
        write(folder, name, text, {**results, "left_out": left_out})
    if missed:
        sys.exit(f"without a result: {', '.join(missed)}")


if __name__ == "__main__":
    spec_file, answer_file = map(Path, sys.argv[2:])  # as `bench.process` calls it
    answer_file.write_text(json.dumps(child(json.loads(spec_file.read_text(encoding="utf-8")))), encoding="utf-8")
