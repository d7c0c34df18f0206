"""How fast is this toolkit beside the same libraries used plainly? Writes docs/benchmarks/speed.md and speed.json.

    python scripts/bench.py                                      all of it; about 15 minutes on two quiet cores
    python scripts/bench.py --jobs home --arms trl finetune      a part, shown and not written
    python scripts/bench.py --steps 2 --repeat 1 --layers 2      quick, on the first layers of the model
    python scripts/bench.py --jobs common --peer unsloth --peer-python /tmp/venv/bin/python

Every arm trains SmolLM2-135M in fp32 on two threads, in a process of its own, by turns: A B C, C B A, A B C. All get
the same finished rows in the same optimizer steps and start from one saved adapter; an arm may lay out the rows of a
step as it likes. Import, load and a warm-up step are not in the times; memory is measured over one more step at the
end of the first repetition. Ratios are medians over repetitions of neighbours, because absolute times mean little on
machines that others use too; the ceiling of plain products is such a neighbour, measured before and after every arm.

The gate, before any time counts: the first step's loss is the same to 1e-5, the gradient of every adapter before
clipping to 1e-4 of its norm, and so are the counts of tokens and labels. To show that the gate can close, one arm is
run with the labels of one row moved by one place; the run ends when that is not noticed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

OUT = Path(__file__).parents[1] / "docs" / "benchmarks"
THREADS = 2
LOSS_LIMIT, GRADIENT_LIMIT, CURVE_LIMIT = 1e-5, 1e-4, 5e-3
LIMITS = LOSS_LIMIT, GRADIENT_LIMIT
SEEDS = 100  # among which a typical one is looked for
GRADIENT_TARGET = 1e-5
SHIFTED = "trl-best, labels of one row moved"
BY_TORCH = "finetune, products: false"

ARMS = {
    "trl": "SFTTrainer as it comes, but for bf16=False: checkpointing where the job does not forbid it, rows of a "
    "pass in the order of chance, padded to the longest",
    "trl-best": "SFTTrainer with the fastest settings found that change no number: no checkpointing, rows of a step "
    "sorted by length, laid end to end with padding_free (on a CPU 5 to 10 % less than padding them)",
    "finetune": "`finetune.train.train` of a recipe that fixes fp32 and the job's numbers and leaves the rest to the "
    "plan",
}
PEERS = {
    "unsloth": "FastLanguageModel and SFTTrainer under `import unsloth`, rows of a step sorted by length",
    "llamafactory": "`load_model`, CustomSeq2SeqTrainer and collator of LLaMA-Factory, which pads to multiples of 8; "
    "no checkpointing, rows of a step sorted by length",
    "axolotl": "takes file names and a YAML",
    "litgpt": "its loop is a script of its own; it prints the loss, but no gradient norm",
    "torchtune": "its loop is a recipe file of its own; it prints the loss, but no gradient norm",
    "ms-swift": "takes file names and arguments; it prints loss and gradient norm",
}


@dataclass(frozen=True)
class Job:
    """What is trained. `steps` are timed; the rows of one step are passed in parts of `micro`."""

    name: str
    about: str
    method: Mapping[str, Any]
    batch: int
    micro: int
    rate: float
    max_length: int
    steps: int
    rows: int = 256
    checkpointing: bool = True  # whether `trl` keeps its default
    precision: str = "fp32"  # of weights and products


ALL_LINEAR = {"kind": "lora", "rank": 16, "alpha": 32, "targets": "attention+mlp"}
JOBS = {
    job.name: job
    for job in (
        Job(
            "home", "the rows of the shipped recipe (home-intents), 4 a step; LoRA rank 16 on all linear layers",
            ALL_LINEAR, batch=4, micro=4, rate=1e-3, max_length=256, steps=12,
        ),
        Job(
            "third", "rows of 512 tokens, a third of them supervised, 1 a step; LoRA rank 16 on all linear layers",
            ALL_LINEAR, batch=1, micro=1, rate=2e-4, max_length=512, steps=4, rows=16,
        ),
        Job(
            "common", "instruction rows of 62 to 465 tokens, two passes of 4 a step; LoRA rank 8 on q_proj and "
            "v_proj; no checkpointing, in whatever arm",
            {"kind": "lora", "rank": 8, "alpha": 16, "targets": "qv"},
            batch=8, micro=4, rate=2e-4, max_length=512, steps=2, rows=512, checkpointing=False,
        ),
    )
}  # fmt: skip


# -------------------------------------------------------------------------------------------- the work all arms share


def make(
    job: Job, folder: Path, model: Path, steps: int, rows: Path | None = None, adapter: Path | None = None
) -> dict[str, Any]:
    """Write what every arm of a job gets: recipe, finished rows step by step, the adapter they start from.

    The rows of each step are those that the toolkit's own trainer takes; inside a step they are dealt anew. Their
    seed is one whose few timed steps are like all others (`_typical`). `adapter` is a folder to copy instead of
    drawing one.
    """
    os.environ["FINETUNE_CACHE"] = str(folder / "cache")  # prepared here once, then found by every process
    from dataclasses import asdict

    from finetune.batches import EpochOrder
    from finetune.data import prepare
    from finetune.facts import read_facts
    from finetune.lengths import of_rows
    from finetune.model import load_tokenizer, real_device
    from finetune.paths import lies_flat
    from finetune.plan import resolve
    from finetune.recipe import Recipe
    from finetune.speed import flop_per_token

    recipe = Recipe.model_validate(
        {
            "model": str(model), "load": {"dtype": {"fp32": "float32", "bf16": "bfloat16"}[job.precision]},
            "method": dict(job.method),
            "data": {"train": "home-intents", "max_length": job.max_length},
            "train": {
                "steps": steps, "batch_size": job.batch, "micro_batch": job.micro, "learning_rate": job.rate,
                "schedule": "constant", "warmup": 0.0, "precision": job.precision, "log_every": 1,
            },
        }
    )  # fmt: skip
    tokenizer = load_tokenizer(recipe)
    if rows is None and job.name != "home":
        rows = folder / "rows.jsonl"
        made = _rows(job, tokenizer)
        rows.write_text("".join(json.dumps(row) + "\n" for row in made), encoding="utf-8")
    if rows is not None:
        recipe = recipe.model_copy(update={"data": recipe.data.model_copy(update={"train": str(rows)})})
    data, facts = prepare(recipe, tokenizer), read_facts(recipe.model)
    found, plan = resolve(recipe, facts, real_device(), of_rows(data.train, "the rows"))
    flat = lies_flat(found)
    found = found.model_copy(update={"train": _typical(job, data.train, found.train, steps, flat=flat)})
    recipe = recipe.model_copy(update={"train": recipe.train.model_copy(update={"seed": found.train.seed})})
    order, dealt = (
        EpochOrder(data.train.lengths, found.train, flat=flat),
        _dealt(data.train, found.train, steps, flat),
    )
    path, apart = replace(plan.path, checkpointing=0), plan.path.attention == "documents"
    # Without its last MLP at a position that predicts nothing, one of the positions that run is this much less.
    sizes_of = {linear.name: linear.out_features * linear.in_features for linear in facts.linears()}
    last_mlp = sum(size for name, size in sizes_of.items() if f".{facts.layers - 1}.mlp." in name)
    unscored = last_mlp / sum(sizes_of.values()) if path.last else 0.0
    taken, counts = [], []
    for step, numbers in enumerate(dealt, 1):
        step_rows = [{"input_ids": data.train[n].input_ids, "labels": data.train[n].labels} for n in numbers]
        sizes = [(len(row["labels"]), supervised_in(row["labels"])) for row in step_rows]
        flop = sum(length * flop_per_token(found.method, facts, path, length, s / length) for length, s in sizes)
        tokens, supervised = (sum(column) for column in zip(*sizes, strict=True))
        head = 4 * facts.hidden_size * facts.vocab_size * supervised
        run = _run_by_us(order.rows_of(step), data.train, job.micro) if apart else tokens
        taken.append(step_rows)
        counts.append(
            {
                "tokens": tokens, "supervised": supervised, "flop": flop, "flop_head": head,
                "padded": _padded([length for length, _ in sizes], job.micro),
                "run": run - unscored * (run - supervised),
            }
        )  # fmt: skip
    layers = [[linear.out_features, linear.in_features] for linear in facts.linears()]
    work = {
        "recipe": recipe.model_dump(mode="json"), "steps": taken, "counts": counts,
        "job": {**asdict(job), "method": dict(job.method)}, "layers": layers,
        "head": [facts.vocab_size, facts.hidden_size],
    }  # fmt: skip
    if adapter is None:
        _save_adapter(found, facts, model, folder / "adapter")
    else:
        shutil.copytree(adapter, folder / "adapter")
    (folder / "work.json").write_text(json.dumps(work), encoding="utf-8")
    return work


def _dealt(rows: Any, train: Any, steps: int, flat: bool) -> Iterator[list[int]]:
    """The rows of each step by number, as arms that do not sort them take them."""
    from finetune.batches import EpochOrder

    order, dice = EpochOrder(rows.lengths, train, flat=flat), random.Random(7)
    for step in range(1, steps + 1):
        numbers = order.rows_of(step)
        dice.shuffle(numbers)
        yield numbers


def _padded(lengths: Sequence[int], micro: int) -> int:
    """Tokens of a step whose passes are padded to their longest row."""
    parts = [lengths[start : start + micro] for start in range(0, len(lengths), micro)]
    return sum(len(part) * max(part) for part in parts)


def _typical(job: Job, rows: Any, train: Any, steps: int, *, flat: bool) -> Any:
    """`train` with that one of 100 seeds whose timed steps are nearest to what all of them have in the mean: in
    tokens, supervised ones and padding. A few steps of any seed may have a tenth more or less of it than an epoch.
    """
    supervised = [supervised_in(row.labels) for row in map(rows.__getitem__, range(len(rows)))]
    found = {}
    for seed in range(train.seed, train.seed + SEEDS):
        trial = train.model_copy(update={"seed": seed})
        timed = list(_dealt(rows, trial, steps, flat))[1:-1] or list(_dealt(rows, trial, steps, flat))
        found[trial.seed] = (
            sum(rows.lengths[n] for numbers in timed for n in numbers),
            sum(supervised[n] for numbers in timed for n in numbers),
            sum(_padded([rows.lengths[n] for n in numbers], job.micro) for numbers in timed),
        )
    means = [statistics.mean(column) for column in zip(*found.values(), strict=True)]

    def apart(seed: int) -> float:
        return max(abs(value / mean - 1) for value, mean in zip(found[seed], means, strict=True))

    return train.model_copy(update={"seed": min(found, key=apart)})


def _run_by_us(numbers: Sequence[int], rows: Any, micro: int) -> int:
    """Tokens of a step that the toolkit runs: shared beginnings once, and nothing behind the last label."""
    from finetune.batches import laid_out

    passes = [rows.whole(numbers[start : start + micro]) for start in range(0, len(numbers), micro)]
    return sum(laid_out(part)["input_ids"].numel() for part in passes)


def supervised_in(labels: Sequence[int]) -> int:
    """Labels that give a loss: the first token of a row is predicted by nothing."""
    return sum(label != -100 for label in labels[1:])


def _rows(job: Job, tokenizer: Any) -> list[dict[str, Any]]:
    from bench_rows import common_rows, third_rows

    if job.name == "common":
        return common_rows(job.rows)
    from finetune import chat

    def measure(asked: str, said: str) -> tuple[int, int]:
        talk: Any = [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]
        row = chat.encode(tokenizer, talk)
        return len(row.input_ids), supervised_in(row.labels)

    return third_rows(job.rows, job.max_length, measure)


def _save_adapter(recipe: Any, facts: Any, model: Path, folder: Path) -> None:
    """A fresh adapter whose B is not zero: with B zero, A would have no gradient to compare."""
    import torch

    from finetune.model import load_model

    adapted: Any = load_model(recipe, model, facts)
    torch.manual_seed(3)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=1e-3)
        if parameter.requires_grad and recipe.train.precision == "bf16":  # what TRL makes of it on a 4-bit base
            parameter.data = parameter.data.bfloat16().float()
    adapted.save_pretrained(folder, save_embedding_layers=False)


def cut_model(source: Path, folder: Path, layers: int) -> Path:
    """The model's first layers, as a folder of their own."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, logging

    logging.set_verbosity_error()  # it would name every weight that is left over
    model: Any = AutoModelForCausalLM.from_pretrained(source, num_hidden_layers=layers, dtype="float32")
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    return folder


# --------------------------------------------------------------------------------------------------- one arm, watched


@dataclass
class Watch:
    """What is noted of one process: everything an arm does goes by here, and costs next to nothing.

    `begun` is when the process was started (`time.time`). After `warm` steps to warm up `timed` steps are taken by
    the clock; `measure` adds one for memory. The gradients of the first step go to `grads`. On `device` cuda a step
    has ended when the card is done with it.
    """

    folder: Path
    grads: Path | None
    begun: float
    timed: int
    measure: bool = False
    device: str = "cpu"
    warm: int = 1

    def __post_init__(self) -> None:
        self.loss = 0.0
        self.tokens = self.supervised = 0
        self.stamps: list[tuple[float, float]] = []
        self.first_step_s = 0.0
        self.peak: int | None = None
        self.reserved: int | None = None

    @property
    def steps(self) -> int:
        """All of them."""
        return self.warm + self.timed + self.measure

    def attach(self, trainer: Any) -> None:
        """Give the trainer's model the saved adapter, and note its first step and the end of each."""
        from transformers import TrainerCallback

        load_adapter(trainer.model, self.folder / "adapter")
        watch = self

        class Ends(TrainerCallback):
            def on_step_end(self, *_: Any, **__: Any) -> None:
                _finish(watch.device)
                watch.stamps.append((time.process_time(), time.perf_counter()))
                watch.first_step_s = watch.first_step_s or time.time() - watch.begun

        if self.measure:
            self._measure(trainer)
        trainer.add_callback(Ends())
        compute, clip = trainer.compute_loss, trainer.accelerator.clip_grad_norm_

        def first_loss(model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
            mask, labels, counted = (inputs.get(key) for key in ("attention_mask", "shift_labels", "row_tokens"))
            labels = inputs["labels"][:, 1:] if labels is None else labels
            tokens = inputs["input_ids"].numel() if mask is None else mask.sum()
            self.tokens += int(tokens if counted is None else counted)  # of the rows, whatever is run of them
            self.supervised += int((labels != -100).sum())
            loss = compute(model, inputs, *args, **kwargs)
            self.loss += float(loss.detach())
            return loss

        def first_clip(parameters: Any, *args: Any, **kwargs: Any) -> Any:
            if self.grads is not None:
                from safetensors.torch import save_file

                named = trainer.accelerator.unwrap_model(trainer.model).named_parameters()
                save_file({plain(n): p.grad.clone().float() for n, p in named if p.grad is not None}, self.grads)
            del trainer.compute_loss
            trainer.accelerator.clip_grad_norm_ = clip
            return clip(parameters, *args, **kwargs)

        trainer.compute_loss, trainer.accelerator.clip_grad_norm_ = first_loss, first_clip

    def _measure(self, trainer: Any) -> None:
        """The peak of live bytes over the last step, by the toolkit's own gauge in whatever arm."""
        try:
            from finetune.measure import Gauge
        except ImportError:  # a peer's environment may lack what it needs
            return
        from transformers import TrainerCallback

        gauge, seen, watch = Gauge(self.device), [0], self

        class Last(TrainerCallback):
            def on_step_begin(self, *_: Any, **__: Any) -> None:
                seen[0] += 1
                if seen[0] == watch.steps:
                    gauge.start()

            def on_step_end(self, *_: Any, **__: Any) -> None:
                if seen[0] == watch.steps:
                    watch.peak = gauge.stop()
                    if watch.device == "cuda":
                        import torch

                        watch.reserved = torch.cuda.max_memory_reserved()

        trainer.add_callback(Last())

    def found(self, history: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """What was noted, for the report."""
        import resource

        timed = slice(self.warm, self.warm + self.timed)
        ends = self.stamps[self.warm - 1 : timed.stop]
        pairs = list(zip(ends, ends[1:], strict=False))
        rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return {
            "loss": self.loss, "tokens": self.tokens, "supervised": self.supervised,
            "cpu_s": [after[0] - before[0] for before, after in pairs],
            "wall_s": [after[1] - before[1] for before, after in pairs],
            "peak_bytes": self.peak, "reserved_bytes": self.reserved,
            "rss_bytes": rss if sys.platform == "darwin" else rss * 1024,
            "first_step_s": self.first_step_s,
            "losses": [float(entry["loss"]) for entry in history if "loss" in entry][timed],
        }  # fmt: skip


def _finish(device: str) -> None:
    """Wait until a card has done what it was given; a CPU has."""
    if device == "cuda":
        import torch

        torch.cuda.synchronize()


def plain(name: str) -> str:
    """A parameter's name without what wrappers put in front."""
    return name[name.find("model.layers.") :].replace(".default.", ".") if "model.layers." in name else name


def load_adapter(model: Any, folder: Path) -> None:
    """Copy the saved adapter into a model that has one of the same shape. Raises `ValueError` when it has another."""
    import torch
    from safetensors.torch import load_file

    saved = {plain(name): tensor for name, tensor in load_file(folder / "adapter_model.safetensors").items()}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(saved.pop(plain(name)))
    if saved:
        raise ValueError(f"the arm has no place for {next(iter(saved))} and {len(saved) - 1} more")


def run_arm(arm: str, folder: Path, watch: Watch) -> dict[str, Any]:
    """Train the steps that `watch` asks for of the work in `folder`, and return what was noted."""
    work = json.loads((folder / "work.json").read_text(encoding="utf-8"))
    if arm == "finetune":
        return _finetune(work, folder, watch)
    if arm == BY_TORCH:
        work["recipe"]["fast"] = {"products": False}
        return _finetune(work, folder, watch)
    if arm in ("trl", "trl-best", SHIFTED):
        return _trl(work, folder, watch, best=arm != "trl", shifted=arm == SHIFTED)
    return DRIVERS[arm](work, folder, watch)


def _finetune(work: Mapping[str, Any], folder: Path, watch: Watch) -> dict[str, Any]:
    """The toolkit's own story of a run; it is stopped once, to hand its trainer to the watch."""
    os.environ["FINETUNE_CACHE"] = str(folder / "cache")
    from finetune.recipe import Recipe
    from finetune.startup import prepare_process

    recipe = Recipe.model_validate(work["recipe"])
    prepare_process(recipe)  # as the command does
    story = import_module("finetune.train")  # the package has a function of the same name
    recipe = recipe.model_copy(update={"train": recipe.train.model_copy(update={"steps": watch.steps})})
    build, built = story.build_trainer, []

    def watched(*args: Any, **kwargs: Any) -> Any:
        trainer = build(*args, **kwargs)
        trainer.remove_callback(trainer.measure)  # the watch measures in the first repetition, in all arms alike
        watch.attach(trainer)
        built.append(trainer)
        return trainer

    with tempfile.TemporaryDirectory(prefix="bench-run-") as runs:
        story.build_trainer = watched
        try:
            story.train(recipe, output=Path(runs) / "run")
        finally:
            story.build_trainer = build
    return watch.found(built[0].state.log_history)


def _trl(work: Mapping[str, Any], folder: Path, watch: Watch, *, best: bool, shifted: bool) -> dict[str, Any]:
    import torch
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM

    recipe, adapter = work["recipe"], LoraConfig.from_pretrained(folder / "adapter")
    adapter.inference_mode = False  # as it is saved
    model = AutoModelForCausalLM.from_pretrained(recipe["model"], dtype=torch.float32)
    keep = work["job"]["checkpointing"] and not best
    options: dict[str, Any] = {} if keep else _no_checkpointing()
    if best:
        options |= {"logging_nan_inf_filter": False, "padding_free": work["job"]["micro"] > 1}
    rows = ordered(work["steps"], longest_first=best, shifted=shifted)
    return _sft(work, _tokenizer(recipe), watch, rows, options, model=model, peft_config=adapter)


def _unsloth(work: Mapping[str, Any], folder: Path, watch: Watch) -> dict[str, Any]:
    """Unsloth's model and its patched SFTTrainer, in Unsloth's own environment."""
    from unsloth import FastLanguageModel  # isort: skip  (it patches trl, so it comes first)
    import torch

    recipe, adapter = work["recipe"], _adapter_config(folder)
    model, tokenizer = FastLanguageModel.from_pretrained(
        recipe["model"], max_seq_length=recipe["data"]["max_length"], dtype=torch.float32, load_in_4bit=False
    )
    model = FastLanguageModel.get_peft_model(
        model, r=adapter["r"], lora_alpha=adapter["lora_alpha"], target_modules=sorted(adapter["target_modules"]),
        lora_dropout=0, bias="none", use_gradient_checkpointing=False,
    )  # fmt: skip
    rows = ordered(work["steps"], longest_first=True)
    return _sft(work, tokenizer, watch, rows, _no_checkpointing(), model=model)


def _llamafactory(work: Mapping[str, Any], folder: Path, watch: Watch) -> dict[str, Any]:
    """LLaMA-Factory's own workflow of an SFT run, from its arguments on, but with finished rows for a dataset."""
    from datasets import Dataset
    from llamafactory.data import SFTDataCollatorWith4DAttentionMask, get_template_and_fix_tokenizer
    from llamafactory.hparams import get_train_args
    from llamafactory.model import load_model, load_tokenizer
    from llamafactory.train.sft.trainer import CustomSeq2SeqTrainer

    recipe, job, adapter = work["recipe"], work["job"], _adapter_config(folder)
    rows = ordered(work["steps"], longest_first=True)
    with tempfile.TemporaryDirectory(prefix="bench-llamafactory-") as output:
        settings = {
            "stage": "sft", "do_train": True, "finetuning_type": "lora", "model_name_or_path": recipe["model"],
            "dataset": "rows", "template": "empty", "cutoff_len": recipe["data"]["max_length"],
            "lora_rank": adapter["r"], "lora_alpha": adapter["lora_alpha"], "lora_dropout": 0.0,
            "lora_target": ",".join(sorted(adapter["target_modules"])),
            "disable_gradient_checkpointing": True, "disable_shuffling": True,
            "max_steps": watch.steps, "per_device_train_batch_size": job["micro"],
            "gradient_accumulation_steps": job["batch"] // job["micro"], "learning_rate": job["rate"],
            "lr_scheduler_type": "constant", "warmup_steps": 0, "bf16": False, "use_cpu": True, "report_to": "none",
            "save_strategy": "no", "logging_steps": 1, "disable_tqdm": True, "dataloader_pin_memory": False,
            "output_dir": output,
        }  # fmt: skip
        model_args, data_args, training_args, finetuning_args, _ = get_train_args(settings)
        loaded = load_tokenizer(model_args)
        template = get_template_and_fix_tokenizer(loaded["tokenizer"], data_args)
        model = load_model(loaded["tokenizer"], model_args, finetuning_args, is_trainable=True)
        collator = SFTDataCollatorWith4DAttentionMask(
            template=template, model=model, pad_to_multiple_of=8, label_pad_token_id=-100,
            attn_implementation=model.config._attn_implementation, compute_dtype=model_args.compute_dtype, **loaded,
        )  # fmt: skip
        trainer = CustomSeq2SeqTrainer(
            model=model, args=training_args, finetuning_args=finetuning_args, data_collator=collator,
            train_dataset=Dataset.from_list([{**row, "attention_mask": [1] * len(row["labels"])} for row in rows]),
            **loaded,
        )  # fmt: skip
        watch.attach(trainer)
        trainer.train()
    return watch.found(trainer.state.log_history)


DRIVERS = {"unsloth": _unsloth, "llamafactory": _llamafactory}  # of the peers that can be run


def _adapter_config(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "adapter" / "adapter_config.json").read_text(encoding="utf-8"))
    return config


def _no_checkpointing() -> dict[str, bool]:
    """transformers 5.18 renamed it."""
    from dataclasses import fields

    from trl import SFTConfig

    names = {field.name for field in fields(SFTConfig)}
    return {name: False for name in ("activation_checkpointing", "gradient_checkpointing") if name in names}


def _tokenizer(recipe: Mapping[str, Any]) -> Any:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(recipe["model"])
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return tokenizer


def ordered(
    steps: Sequence[Sequence[dict[str, Any]]], *, longest_first: bool, shifted: bool = False
) -> list[dict[str, Any]]:
    """All rows in the order of training; `shifted` moves the labels of the first one to the left by one place."""
    key = (lambda row: -len(row["labels"])) if longest_first else (lambda row: 0)
    rows = [row for step in steps for row in sorted(step, key=key)]
    if shifted:
        rows[0] = {**rows[0], "labels": [*rows[0]["labels"][1:], -100]}
    return rows


def _sft(
    work: Mapping[str, Any], tokenizer: Any, watch: Watch, rows: list[dict[str, Any]],
    options: Mapping[str, Any], **kwargs: Any,
) -> dict[str, Any]:  # fmt: skip
    """Train finished rows with TRL's trainer, in their order; `options` override what is set here."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    job = work["job"]
    with tempfile.TemporaryDirectory(prefix="bench-trl-") as output:
        settings: dict[str, Any] = {
            "output_dir": output, "max_steps": watch.steps, "per_device_train_batch_size": job["micro"],
            "gradient_accumulation_steps": job["batch"] // job["micro"], "learning_rate": job["rate"],
            "lr_scheduler_type": "constant", "seed": 42, "bf16": False, "use_cpu": True, "report_to": "none",
            "save_strategy": "no", "logging_steps": 1, "disable_tqdm": True, "dataloader_pin_memory": False,
            "max_length": None, "train_sampling_strategy": "sequential",
            "dataset_kwargs": {"skip_prepare_dataset": True},
        }  # fmt: skip
        config = SFTConfig(**{**settings, **options})
        trainer = SFTTrainer(args=config, train_dataset=Dataset.from_list(rows), processing_class=tokenizer, **kwargs)
        watch.attach(trainer)
        trainer.train()
    return watch.found(trainer.state.log_history)


# -------------------------------------------------------------------------------------------------------- the ceiling


def ceiling(work: Mapping[str, Any], device: str = "cpu", dtype: str = "float32") -> dict[str, float]:
    """Operations per second that plain products reach, at a job's shapes, by wall time and by processor time.

    Products of the forward pass and of the backward pass to the inputs, over six layers' weights so that they come
    from memory as in training, each at the fastest of several tries.
    """
    import torch

    from finetune.fast import products

    def rate(
        shapes: Sequence[tuple[int, int]], tokens: int, copies: int, *, plain: bool = True
    ) -> tuple[float, float]:
        made: Any = {"device": device, "dtype": getattr(torch, dtype)}
        weights = [torch.randn(rows, columns, **made) for _ in range(copies) for rows, columns in shapes]
        inputs = {size: torch.randn(tokens, size, **made) for size in {side for shape in shapes for side in shape}}
        flop = sum(4 * tokens * weight.numel() for weight in weights)
        wall, cpu = [], []
        for _ in range(6):
            _finish(device)
            began, used = time.perf_counter(), time.process_time()
            for weight in weights:
                forth, back = inputs[weight.shape[1]], inputs[weight.shape[0]]
                forth @ weight.T
                if plain:
                    back @ weight
                else:
                    products.back(back, weight)
            _finish(device)
            wall.append(time.perf_counter() - began)
            cpu.append(time.process_time() - used)
        return flop / min(wall), flop / min(cpu)

    job, counts = work["job"], work["counts"]
    passes = len(counts) * job["batch"] // job["micro"]
    tokens, supervised = (max(1, round(sum(c[key] for c in counts) / passes)) for key in ("tokens", "supervised"))
    shapes = [tuple(shape) for shape in work["layers"][:7]]
    layers, head = rate(shapes, tokens, 6), rate([tuple(work["head"])], supervised, 1)
    found: dict[str, float] = {"tokens": tokens, "supervised": supervised}
    if dtype == "float32":
        found["onednn"] = rate(shapes, tokens, 6, plain=False)[0]
    for number, key in enumerate(("", "_cpu")):
        found |= {f"layers{key}": layers[number], f"head{key}": head[number]}
    return found


# ---------------------------------------------------------------------------------------------------------- processes


def child(spec: dict[str, Any]) -> Any:
    """What one process does."""
    sys.path.insert(0, str(Path(__file__).parent))
    if spec["do"] == "make":
        from finetune.model import model_folder

        folder = Path(spec["folder"])
        model = model_folder("smollm2-135m")
        if spec["layers"]:
            model = cut_model(model, folder / "model", spec["layers"])
        for name, steps in spec["jobs"].items():
            (folder / name).mkdir()
            make(JOBS[name], folder / name, model, steps, Path(spec["rows"]) if spec["rows"] else None)
        return None
    folder = Path(spec["folder"])
    if spec["do"] == "ceiling":
        return ceiling(_work(folder))
    grads = Path(spec["grads"]) if spec["grads"] else None
    return run_arm(spec["arm"], folder, Watch(folder, grads, spec["begun"], spec["timed"], spec["measure"]))


def _work(folder: Path) -> dict[str, Any]:
    work: dict[str, Any] = json.loads((folder / "work.json").read_text(encoding="utf-8"))
    return work


def process(
    spec: dict[str, Any], threads: int, python: str = sys.executable, script: str = __file__, *, card: bool = False,
    seconds: float | None = None,
) -> Any:  # fmt: skip
    """Run a script's `child` in a process of its own. Ends the script with its last words when it fails."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        file, answer = Path(folder) / "spec.json", Path(folder) / "answer.json"
        file.write_text(json.dumps({**spec, "begun": time.time()}), encoding="utf-8")
        name = spec.get("arm", spec["do"])
        run_script([script, "--child", str(file), str(answer)], threads, python, name, card=card, seconds=seconds)
        return json.loads(answer.read_text(encoding="utf-8"))


def run_script(
    arguments: Sequence[str], threads: int, python: str = sys.executable, name: str = "the script", *,
    card: bool = False, seconds: float | None = None,
) -> None:  # fmt: skip
    """Run a script offline, with so many threads, without a card or with one, for so long at most."""
    environment = {
        **os.environ, "OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_DISABLE_PROGRESS_BARS": "1", "KINETO_LOG_LEVEL": "99",
        "PYTHONPATH": str(Path(__file__).parents[1]),
    }  # fmt: skip
    if card:
        environment.setdefault("CUDA_VISIBLE_DEVICES", "0")
    else:
        environment |= {"ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""}
    command = [python, str(Path(arguments[0]).resolve()), *arguments[1:]]
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        try:
            done = subprocess.run(
                command, env=environment, cwd=folder, capture_output=True, text=True, timeout=seconds
            )
        except subprocess.TimeoutExpired:
            raise SystemExit(f"{name} was stopped after {seconds:.0f} s") from None
    if done.returncode:
        last = "\n".join(done.stderr.strip().splitlines()[-12:])
        raise SystemExit(f"{name} ended with {done.returncode}:\n{last}")


# --------------------------------------------------------------------------------------------------------------- gate


@dataclass(frozen=True)
class Verdict:
    """One arm's first step beside another's; differences are relative."""

    loss: float
    gradient: float
    worst: str
    counts: bool
    limits: tuple[float, float] = LIMITS

    @property
    def passed(self) -> bool:
        """Whether both did the same work."""
        return self.counts and self.loss <= self.limits[0] and self.gradient <= self.limits[1]

    def __str__(self) -> str:
        counts = "same counts" if self.counts else "other counts"
        return f"loss {self.loss:.1e}, gradients {self.gradient:.1e} at worst ({self.worst}), {counts}"


def gate(
    ours: Mapping[str, Any], theirs: Mapping[str, Any], our_grads: Path, their_grads: Path,
    limits: tuple[float, float] = LIMITS,
) -> Verdict:  # fmt: skip
    """Hold one first step against another: loss, counts and the gradient of every adapter, each to its limit."""
    import numpy as np
    from safetensors.numpy import load_file

    counts = all(ours[key] == theirs[key] > 0 for key in ("tokens", "supervised"))
    loss = abs(ours["loss"] / theirs["loss"] - 1)
    mine, other = load_file(our_grads), load_file(their_grads)
    if mine.keys() != other.keys() or not mine:
        return Verdict(loss, float("inf"), "not the same adapters", counts, limits)
    differences = {}
    for name, grad in other.items():
        norm = float(np.linalg.norm(grad.astype(np.float64)))
        off = float(np.linalg.norm(mine[name].astype(np.float64) - grad))
        differences[name] = off / norm if norm else float("inf")
    worst = max(differences, key=lambda name: differences[name])
    at = worst.removeprefix("model.").removesuffix(".weight")
    return Verdict(loss, differences[worst], at, counts, limits)


# ---------------------------------------------------------------------------------------------------------- all of it


@dataclass(frozen=True)
class Run:
    """What was asked for."""

    jobs: Sequence[str]
    arms: Sequence[str]
    repeat: int
    steps: int | None
    layers: int | None
    rows: Path | None
    pythons: Mapping[str, str]
    threads: int = THREADS

    @property
    def whole(self) -> bool:
        """Whether the result may be written."""
        return (
            list(self.jobs) == list(JOBS)
            and set(ARMS) <= set(self.arms)
            and self.repeat >= 3
            and self.threads == THREADS
            and not (self.steps or self.layers or self.rows)
        )

    def arms_of(self, job: str) -> list[str]:
        """Peers run in the common job, for which their numbers are known."""
        return [arm for arm in self.arms if arm not in PEERS or job == "common" or len(self.jobs) == 1]

    def timed(self, job: str) -> int:
        """Steps timed in each process."""
        return self.steps or JOBS[job].steps


def bench(run: Run, say: Callable[[str], None]) -> dict[str, Any]:
    """Make the work, pass the gate, take the times."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="bench-work-") as work:
        folder = Path(work)
        steps = {name: run.timed(name) + 2 for name in run.jobs}
        rows = str(run.rows.resolve()) if run.rows else None
        process({"do": "make", "folder": work, "jobs": steps, "layers": run.layers, "rows": rows}, run.threads)
        jobs = {}
        for name in run.jobs:
            jobs[name] = _job(run, folder / name, name, say, shift=name == run.jobs[0])
            summarize(jobs[name], _work(folder / name)["counts"])
    return {
        "machine": machine(), "threads": run.threads, "date": date.today().isoformat(), "versions": versions(),
        "repetitions": run.repeat, "minutes": round((time.perf_counter() - began) / 60, 1), "jobs": jobs,
    }  # fmt: skip


def mean_of(tops: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """What plain products reached in the mean of several measurements."""
    return {key: statistics.fmean(top[key] for top in tops) for key in tops[0]}


def _job(run: Run, folder: Path, name: str, say: Callable[[str], None], *, shift: bool) -> dict[str, Any]:
    timed = run.timed(name)
    found: dict[str, Any] = {
        "about": JOBS[name].about,
        "steps": timed,
        "runs": {arm: [] for arm in run.arms_of(name)},
    }

    def one(arm: str, timed: int, grads: Path | None, measure: bool) -> dict[str, Any]:
        spec = {
            "do": "arm", "arm": arm, "folder": str(folder), "timed": timed, "measure": measure,
            "grads": str(grads) if grads else None,
        }  # fmt: skip
        result: dict[str, Any] = process(spec, run.threads, run.pythons.get(arm, sys.executable))
        return result

    def top() -> dict[str, float]:
        return dict(process({"do": "ceiling", "folder": str(folder)}, run.threads))

    for repetition in range(run.repeat):
        first, arms, tops = repetition == 0, list(found["runs"]), [top()]
        for arm in arms if repetition % 2 == 0 else arms[::-1]:
            result = one(arm, timed, folder / f"{arm}.safetensors" if first else None, first)
            tops.append(top())
            found["runs"][arm].append({**result, "ceiling": mean_of(tops[-2:])})
            cpu, wall = (statistics.fmean(result[key]) for key in ("cpu_s", "wall_s"))
            say(f"{name}, {arm}: {cpu:.2f} CPU-s and {wall:.2f} s a step")
        if first:
            found["gate"] = _gate(arms, folder, found["runs"], say)
            for arm, verdict in found["gate"].items():
                if verdict["refused"]:
                    del found["runs"][arm]
            if shift:
                found["shifted"] = _shifted(folder, found["runs"], one, say)
    return found


def _gate(
    arms: Sequence[str], folder: Path, runs: Mapping[str, Any], say: Callable[[str], None],
    limits: tuple[float, float] = LIMITS, may_differ: Collection[str] = tuple(PEERS),
) -> dict[str, Any]:  # fmt: skip
    """Hold every arm against the first one. Ends the script when one did other work; some are left out instead."""
    reference, found = arms[0], {}
    for arm in arms[1:]:
        files = (folder / f"{arm}.safetensors", folder / f"{reference}.safetensors")
        verdict = gate(runs[arm][0], runs[reference][0], *files, limits)
        say(f"  gate, {arm} against {reference}: {verdict}")
        if not verdict.passed and arm not in may_differ:
            raise SystemExit(f"{arm} and {reference} did not do the same work: {verdict}. No times are given.")
        found[arm] = {
            "against": reference, "loss": verdict.loss, "gradient": verdict.gradient, "at": verdict.worst,
            "refused": not verdict.passed, "said": str(verdict),
        }  # fmt: skip
    return found


def _shifted(
    folder: Path, runs: Mapping[str, Any], one: Callable[..., dict[str, Any]], say: Callable[[str], None],
    limits: tuple[float, float] = LIMITS,
) -> dict[str, Any]:  # fmt: skip
    """Prove that the gate closes. Ends the script when moved labels pass."""
    reference, grads = next(iter(runs)), folder / "shifted.safetensors"
    result = one(SHIFTED, 0, grads, False)
    verdict = gate(result, runs[reference][0], grads, folder / f"{reference}.safetensors", limits)
    say(f"  gate, {SHIFTED}, against {reference}: {verdict}; refused: {not verdict.passed}")
    if verdict.passed:
        raise SystemExit("The labels of one row were moved and the gate did not notice. No times are given.")
    return {"loss": verdict.loss, "gradient": verdict.gradient, "refused": True}


def summarize(found: dict[str, Any], counts: Sequence[Mapping[str, float]]) -> None:
    """Medians, ratios of neighbours, and the share of what plain products reach; added to a job's results.

    The share is the median over processes, each beside the ceiling measured around it. It is of the work that the job
    asks for, `share_run` of those operations of it that an arm really runs.
    """
    runs, arms = found["runs"], {}
    done = counts[1 : 1 + found["steps"]]
    keys = ("tokens", "padded", "supervised", "flop", "flop_head", "run")
    total = {key: sum(count[key] for count in done) for key in keys}
    run = total["run"] / total["tokens"]
    tops = [result["ceiling"] for taken in runs.values() for result in taken]
    found |= {
        **{f"{key}_per_step": total[key] / len(done) for key in ("tokens", "padded", "supervised", "flop", "run")},
        "ceiling": {key: statistics.median(top[key] for top in tops) for key in tops[0]},
    }  # fmt: skip

    def least(top: Mapping[str, float], suffix: str, run: float = 1.0) -> float:
        layers = (total["flop"] - total["flop_head"]) / top[f"layers{suffix}"]
        return layers * run + total["flop_head"] / top[f"head{suffix}"]

    def share(taken: Sequence[Mapping[str, Any]], what: str, suffix: str, run: float = 1.0) -> float:
        return statistics.median(least(result["ceiling"], suffix, run) / sum(result[what]) for result in taken)

    for what, suffix in (("seconds", ""), ("cpu_s", "_cpu")):
        found[f"{what}_at_ceiling"] = least(found["ceiling"], suffix) / len(done)
    first = next(iter(runs.values()))[0]["losses"]
    for arm, taken in runs.items():
        cpu, wall = (statistics.median(sum(result[key]) for result in taken) for key in ("cpu_s", "wall_s"))
        losses = taken[0]["losses"]
        part = run if arm == "finetune" else 1.0
        arms[arm] = {
            "cpu_s": cpu / len(done), "wall_s": wall / len(done),
            "share_of_ceiling": share(taken, "wall_s", ""), "share_of_ceiling_cpu": share(taken, "cpu_s", "_cpu"),
            "share_run": share(taken, "wall_s", "", part),
            "share_run_cpu": share(taken, "cpu_s", "_cpu", part),
            **{f"{what}_per_s": total[what] / wall for what in ("tokens", "supervised")},
            **{f"{what}_per_cpu_s": total[what] / cpu for what in ("tokens", "supervised")},
            "peak_bytes": taken[0]["peak_bytes"],
            # The first process has measured, which takes memory itself.
            "rss_bytes": max(result["rss_bytes"] for result in taken[1:] or taken),
            "first_step_s": statistics.median(result["first_step_s"] for result in taken),
            "curve": max(abs(a / b - 1) for a, b in zip(losses, first, strict=True)), "last_loss": losses[-1],
        }  # fmt: skip
        arms[arm]["times"] = {other: _times(taken, runs[other]) for other in runs if other != arm}
    found["arms"] = arms


def _times(ours: Sequence[Mapping[str, Any]], theirs: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """How many times as long the other arm took, in the median of neighbours."""
    return {
        key: statistics.median(
            sum(other[f"{key}_s"]) / sum(mine[f"{key}_s"]) for mine, other in zip(ours, theirs, strict=True)
        )
        for key in ("cpu", "wall")
    }


# ------------------------------------------------------------------------------------------------------- what it says

HEADER = (
    "arm", "CPU-s a step", "s a step", "tokens /s", "trained /s", "tokens /CPU-s", "trained /CPU-s", "peak MB",
    "RSS MB", "s to first step", "of the ceiling: CPU, wall", "in work run: CPU, wall", "loss off by",
)  # fmt: skip
PLAIN = ("trl", "trl-best", *DRIVERS)


def cells(found: Mapping[str, Any]) -> Iterator[list[str]]:
    """The table of one job, its header first."""
    plainly = [arm for arm in PLAIN if arm in found["arms"]]
    yield [*HEADER, *(f"times {arm}: CPU, wall" for arm in plainly)]
    for arm, row in found["arms"].items():
        peak = f"{row['peak_bytes'] / 1e6:,.0f}" if row["peak_bytes"] else "-"
        numbers = [row[f"{what}_per_{per}"] for per in ("s", "cpu_s") for what in ("tokens", "supervised")]
        yield [
            arm, f"{row['cpu_s']:.2f}", f"{row['wall_s']:.2f}", *(f"{number:,.1f}" for number in numbers), peak,
            f"{row['rss_bytes'] / 1e6:,.0f}", f"{row['first_step_s']:.1f}",
            f"{row['share_of_ceiling_cpu']:.0%}, {row['share_of_ceiling']:.0%}",
            f"{row['share_run_cpu']:.0%}, {row['share_run']:.0%}",
            f"{row['curve']:.3%}" + " !" * (row["curve"] > CURVE_LIMIT),
            *(_ratio(row["times"].get(other)) for other in plainly),
        ]  # fmt: skip


def _ratio(times: Mapping[str, float] | None) -> str:
    return "1" if times is None else f"{times['cpu']:.2f}, {times['wall']:.2f}"


def words(name: str, found: Mapping[str, Any]) -> Iterator[str]:
    """What stands around a job's table."""
    top, job = found["ceiling"], JOBS[name]
    yield (
        f"{name}: {found['about']}. {found['steps']} steps a process, {found['tokens_per_step']:,.0f} tokens a step "
        f"({found['padded_per_step']:,.0f} where passes are padded), {found['supervised_per_step']:,.0f} of them "
        f"supervised, as in the mean of all steps, {job.batch // job.micro} pass(es)."
    )
    for arm, verdict in found["gate"].items():
        if verdict["refused"]:
            yield f"{arm} did not do the same work as {verdict['against']} and is left out: {verdict['said']}."
            continue
        met = "" if verdict["gradient"] <= GRADIENT_TARGET else f" (the aim is {GRADIENT_TARGET:.0e})"
        yield (
            f"Gate, {arm} against {verdict['against']}: first loss {verdict['loss']:.1e} apart, gradients "
            f"{verdict['gradient']:.1e} at worst{met}, counts equal."
        )
    if shifted := found.get("shifted"):
        yield (
            f"With the labels of one row moved by one place the gate refused: loss {shifted['loss']:.1e}, gradients "
            f"{shifted['gradient']:.1e} apart."
        )
    yield (
        f"Share of the ceiling = seconds of the job's operations at the speed of plain products, measured before and "
        f"after each process / seconds of that process; the median of them. "
        f"A step asks for {found['flop_per_step'] / 1e9:,.0f} GFLOP (finetune.speed: 4 N + 6 P a token, attention, "
        f"4 H V a supervised token). Plain fp32 products reach {top['layers'] / 1e9:,.0f} GF/s at the layers' shapes "
        f"with {top['tokens']:,.0f} tokens and {top['head'] / 1e9:,.0f} GF/s at the head's with "
        f"{top['supervised']:,.0f}, so it would take {found['seconds_at_ceiling']:.2f} s, by processor time "
        f"{found['cpu_s_at_ceiling']:.2f}. "
        f"`finetune` runs as much as {found['run_per_step']:,.0f} of the tokens, because what leads to no label or "
        f"stands at the beginning of all rows is not run again; the share in work run counts only that. Its own "
        f"products in the layers, with oneDNN's backward, reach {top['onednn'] / 1e9:,.0f} GF/s there."
    )


def document(results: Mapping[str, Any]) -> str:
    """docs/benchmarks/speed.md."""
    libraries = ", ".join(f"{name} {number}" for name, number in results["versions"].items())
    arms = dict.fromkeys(arm for found in results["jobs"].values() for arm in found["arms"])
    parts = [
        "# Speed beside the same libraries used plainly",
        f"Written by `make bench` on {results['date']} in {results['minutes']} minutes. {results['machine']}, "
        f"{results['threads']} threads. {libraries}.",
        "SmolLM2-135M in fp32. Every arm trains the same rows in the same optimizer steps from one adapter, in a "
        f"process of its own, by turns, {results['repetitions']} times. Seconds are medians; ratios are medians over "
        "neighbours and say more than seconds do. Tokens are real ones, without padding; trained are the supervised "
        "ones. Peak is the most that torch's tensors held during one step, RSS the process's own peak. Times "
        "trl is how many times faster than `trl` an arm is, by processor and by wall time; below 1 it is slower. The "
        "first step is counted from the start of the process, with imports and loading; no arm tokenizes.",
        "\n".join(f"- `{arm}`: {(ARMS | PEERS)[arm]}." for arm in arms),
    ]
    for name, found in results["jobs"].items():
        said = list(words(name, found))
        rows = list(cells(found))
        rule = ["---", *["---:"] * (len(rows[0]) - 1)]
        table = "\n".join("| " + " | ".join(row) + " |" for row in [rows[0], rule, *rows[1:]])
        parts += [f"## {name}", said[0], table, "\n".join(f"- {line}" for line in said[1:])]
    return "\n\n".join(parts) + "\n"


def show(results: Mapping[str, Any]) -> None:
    """The tables in the terminal."""
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 200)
    for name, found in results["jobs"].items():
        first, *rest = words(name, found)
        header, *rows = cells(found)
        table = Table(title=first, title_justify="left")
        for column, head in enumerate(header):
            table.add_column(head, justify="right" if column else "left")
        for row in rows:
            table.add_row(*row)
        console.print(table)
        for line in rest:
            console.print(f"  {line}", highlight=False)
    console.print(f"{results['minutes']} minutes; {results['machine']}; {results['threads']} threads")


def machine() -> str:
    """The processor in words."""
    from check_plan import cpu_words

    return f"{cpu_words()}, {platform.machine()}"


def versions() -> dict[str, str]:
    """Of everything that trains."""
    found = {"python": platform.python_version()}
    for name in ("finetune", "torch", "transformers", "trl", "peft", "accelerate", "tokenizers"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def chosen(options: argparse.Namespace) -> Run:
    """The options, checked."""
    pythons: dict[str, str] = {}
    for peer, python in zip(options.peer, options.peer_python or [], strict=False):
        pythons[peer] = python
    for peer in options.peer:
        if peer not in DRIVERS:
            raise SystemExit(
                f"There is no driver for {peer} yet: {PEERS[peer]}. It must take finished rows and give "
                "the first loss and the gradients of every adapter, or the gate cannot pass it."
            )
        if peer not in pythons:
            raise SystemExit(f"{peer} needs an environment of its own: give --peer-python /path/to/its/bin/python.")
    jobs = [name for name in JOBS if name in (options.jobs or JOBS)]
    arms = [name for name in ARMS if name in (options.arms or ARMS)] + options.peer
    if options.rows and jobs != ["common"]:
        raise SystemExit("--rows is the common job's file: add --jobs common.")
    return Run(jobs, arms, options.repeat, options.steps, options.layers, options.rows, pythons, options.threads)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", nargs="+", choices=JOBS, metavar="JOB", help=f"some of {', '.join(JOBS)}")
    parser.add_argument("--arms", nargs="+", choices=ARMS, metavar="ARM", help=f"some of {', '.join(ARMS)}")
    parser.add_argument("--steps", type=int, metavar="K", help="timed steps a process, instead of the job's own")
    parser.add_argument("--repeat", type=int, default=3, metavar="N", help="processes of every arm (3)")
    parser.add_argument("--layers", type=int, metavar="N", help="cut the model to its first N layers")
    parser.add_argument("--threads", type=int, default=THREADS, metavar="N", help=f"threads of every arm ({THREADS})")
    parser.add_argument("--rows", type=Path, metavar="FILE", help="other rows for the common job")
    parser.add_argument("--peer", action="append", default=[], choices=PEERS, help="another toolkit as one more arm")
    parser.add_argument("--peer-python", action="append", metavar="PATH", help="the Python of that toolkit")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="write there, whatever was run")
    parser.add_argument("--child", nargs=2, type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        spec, answer = options.child
        answer.write_text(json.dumps(child(json.loads(spec.read_text(encoding="utf-8")))), encoding="utf-8")
        return
    run = chosen(options)
    results = bench(run, lambda line: print(line, file=sys.stderr, flush=True))
    show(results)
    if folder := options.output or (OUT if run.whole else None):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "speed.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        (folder / "speed.md").write_text(document(results), encoding="utf-8")
        print(f"wrote {folder / 'speed.md'} and speed.json")
    slow = [
        f"{arm} in {name}"
        for name, found in results["jobs"].items()
        for arm, row in found["arms"].items()
        if row["curve"] > CURVE_LIMIT
    ]
    if slow:
        sys.exit(f"The loss curves are more than {CURVE_LIMIT:.1%} apart: {', '.join(slow)}.")


if __name__ == "__main__":
    main()
