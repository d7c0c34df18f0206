"""The story of one run."""

from __future__ import annotations

import gc
import math
import os
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib.metadata import version
from pathlib import Path
from typing import Any

from finetune import __version__, chat
from finetune.callbacks import Interrupt, memory_in_use
from finetune.data import Prepared, prepare
from finetune.device import Device
from finetune.errors import FinetuneError, Interrupted, RunError
from finetune.evaluate import check_questions, evaluate
from finetune.facts import Facts, read_facts
from finetune.fast.compiled import why_not
from finetune.generate import Speaker
from finetune.launch import check_launched
from finetune.lengths import of_rows
from finetune.measure import Measured, held_against
from finetune.model import load_model, load_tokenizer, model_folder, real_device, training_device
from finetune.origin import origin_of, write_beside, write_origin
from finetune.plan import Plan, changed, require_fit, resolve
from finetune.recipe import Full, Recipe
from finetune.run import Run, check_output, lock, open_or_create
from finetune.store import Packs
from finetune.trainer import Trainer, build_trainer, check_trackers

Say = Callable[[str], None]


def train(
    recipe: Recipe, *, name: str = "run", output: str | Path | None = None, say: Say = lambda line: None
) -> Run:
    """Run one recipe end to end and return the folder it leaves.

    An `output` that holds an unfinished run of the same recipe is gone on with from its last complete checkpoint.
    Nothing is written before the recipe, the model's headers, the data and the output have been found good. `say`
    gets the story, one line a step.

    Raises `InputError` for what the user can put right, `DoesNotFit` when the plan is larger than the device, and
    `Interrupted` after Ctrl-C, with a checkpoint to go on from.
    """
    check_launched()
    if output is not None:
        check_output(Path(output))
    facts = read_facts(recipe.model, recipe.load.revision)
    device = real_device()
    _first_look(recipe, facts, device)
    check_trackers(recipe)
    if recipe.evaluate:
        check_questions(recipe)
    _join(device)
    tokenizer = load_tokenizer(recipe)
    data = prepare(recipe, tokenizer)
    recipe = _compiled_if_possible(recipe, say)
    recipe, plan = resolve(recipe, facts, device, of_rows(data.train, "the rows themselves"))
    require_fit(plan)
    _tell_plan(plan, say)
    _tell_data(data, say)
    recipe = recipe.model_copy(update={"data": recipe.data.model_copy(update={"format": data.counts["format"]})})
    folder = model_folder(recipe.model, recipe.load.revision)
    model = load_model(recipe, folder, facts)
    run, resumed = _same_folder_everywhere(recipe, name, output, device)
    with _lock(run), Interrupt() as interrupt:
        if _first():
            _check_same_rows(run, data)
            write_origin(run, origin_of(folder))
            run.write("plan.json", plan.document())
            run.write("data.json", data.counts)
        trainer = build_trainer(recipe, model, tokenizer, data, run, device, interrupt, facts)
        say(f"Training on {device.count} process{'es' * (device.count > 1)} ({device.name}) into {run.folder}")
        checkpoint = _checkpoint(run, say) if resumed else None
        loss = trainer.fit(checkpoint)
        if trainer.state.global_step < trainer.state.max_steps:
            raise _interrupted(run, trainer)
        if not math.isfinite(loss):
            raise FinetuneError(f"The mean loss is {loss}.", "Lower train.learning_rate and train again.")
        if _first():
            _save(run, trainer, tokenizer, facts, recipe, documents=data.counts["format"] == "text")
            measured = _measured(trainer, plan, recipe, facts)
            result = _result(trainer, plan, data, loss, measured)
            run.write("result.json", result)
            run.event("end", step=result["steps"])
            say(f"{result['steps']} steps in {result['train_seconds']:.0f} s; mean loss {result['loss']:.3f}")
            if measured is not None:
                say(_in_words(measured))
    if _first() and recipe.evaluate and recipe.evaluate.after_training:
        say(f"Asking {recipe.evaluate.rows} held-out questions, of the untrained model and of the tuned one")
        if isinstance(recipe.method, Full):  # gradients and moments would not leave room for a second model
            del trainer, model
            gc.collect()
            evaluate(run)
        else:
            evaluate(run, speaker=Speaker(trainer.accelerator.unwrap_model(trainer.model), tokenizer))
    return run


def _first_look(recipe: Recipe, facts: Facts, device: Device) -> None:
    """Refuse what cannot work whatever the rows are, before they are read."""
    _, plan = resolve(recipe, facts, device)
    if plan.account.phases["load"] > plan.room:
        require_fit(plan)


def _compiled_if_possible(recipe: Recipe, say: Say) -> Recipe:
    """Without `fast.compile` where torch.compile does not work, so that everything else takes its usual way."""
    if not recipe.fast.compile or (why := why_not(training_device())) is None:
        return recipe
    if _first():
        say(
            f"torch.compile does not work here ({why}), so layers run without it. "
            "Install a C++ compiler, for a GPU Triton too, or leave fast.compile off."
        )
    return changed(recipe, "fast.compile", False)


def _tell_plan(plan: Plan, say: Say) -> None:
    share = 100 * plan.trainable / plan.parameters
    say(f"{plan.model}: {plan.parameters:,} parameters, {plan.trainable:,} trained ({share:.3g} %) by {plan.method}")
    for choice in plan.choices:
        say(f"  {choice.field}: {_word(choice.value)}, because {choice.because}")
    gb = plan.total / 1e9
    say(f"Planned memory about {gb:.2f} GB of {plan.device.memory / 1e9:.1f} GB")


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _tell_data(data: Prepared, say: Say) -> None:
    tokens, trained = data.train.tokens, data.train.trained_tokens
    held = f"; {len(data.eval):,} evaluation rows" if data.eval is not None else ""
    what = "packs" if isinstance(data.train, Packs) else "rows"
    say(f"{len(data.train):,} {what}, {tokens:,} tokens, {trained:,} of them trained ({trained / tokens:.0%}){held}")
    for note in [*_left_out(data.counts), *data.notes]:
        say(f"  {note}")
    say(f"  The first row begins with {' '.join(map(repr, data.counts['first_tokens']))}")


def _left_out(counts: dict[str, Any]) -> list[str]:
    """What was read and is not trained as it stands."""
    said = []
    if counts["rows_bad"]:
        kinds = ", ".join(f"{number:,} {kind}" for kind, number in counts["rows_bad"].items())
        said.append(f"Skipped as bad: {kinds}; the first of them stand in data.json.")
    if counts["rows_overlong"]:
        names = (("dropped", "rows_dropped"), ("cut", "rows_cut"), ("split", "rows_split"))
        ways = ", ".join(f"{counts[name]:,} {way}" for way, name in names if counts[name])
        said.append(
            f"Longer than {counts['max_length']:,} tokens: {ways}; {counts['tokens_lost']:,} tokens are lost, "
            f"{counts['trained_tokens_lost']:,} of them of replies."
        )
    return said


def _same_folder_everywhere(recipe: Recipe, name: str, output: str | Path | None, device: Device) -> tuple[Run, bool]:
    """Process 0 makes or opens the run folder and tells the others which one."""
    if device.count == 1:
        return open_or_create(recipe, name, output)
    import torch.distributed as dist

    box: list[Any] = [None]
    if dist.get_rank() == 0:
        run, resumed = open_or_create(recipe, name, output)
        box = [(str(run.folder), resumed)]
    dist.broadcast_object_list(box, src=0)
    return Run(Path(box[0][0])), bool(box[0][1])


def _join(device: Device) -> None:
    """Let the processes meet before anything is put on a device, so that each uses its own card."""
    if device.count == 1:
        return
    import torch.distributed as dist
    from accelerate import PartialState

    PartialState(cpu=device.kind == "cpu")
    if not dist.is_initialized():
        raise FinetuneError(
            f"WORLD_SIZE says {device.count} processes, but they cannot reach each other.",
            "Start them with `finetune launch`, or see 'Several processes' in the README.",
        )


def _check_same_rows(run: Run, data: Prepared) -> None:
    """A resumed run goes on with the very rows it began with. Raises `RunError` when a file has changed."""
    before, now = run.read("data.json"), data.counts
    if before and (before["files"], before["rows_trained"]) != (now["files"], now["rows_trained"]):
        raise RunError(
            f"The training rows have changed since {run.name} was started.", "Restore the file, or start a new run."
        )


def _first() -> bool:
    """Whether this is process 0, the one that writes."""
    return os.environ.get("RANK", "0") == "0"


def _lock(run: Run) -> AbstractContextManager[Any]:
    return lock(run) if _first() else nullcontext()


def _checkpoint(run: Run, say: Say) -> Path | None:
    """The checkpoint to go on from; what is broken is named, and starting from zero is said aloud."""
    for broken in run.broken_checkpoints():
        say(f"  {broken.name} is incomplete and is left out")
        if _first():
            run.event("broken checkpoint", folder=broken.name)
    last = run.last_checkpoint()
    say(f"Going on from {last.name}" if last else "No complete checkpoint there; starting from step 0")
    return last


def _interrupted(run: Run, trainer: Trainer) -> Interrupted:
    step, of = trainer.state.global_step, trainer.state.max_steps
    if _first():
        run.event("interrupt", step=step)
    return Interrupted(
        f"Training stopped at step {step} of {of}, and a checkpoint was saved.",
        f"Go on with `finetune train --resume {run.folder}`.",
    )


def _save(run: Run, trainer: Trainer, tokenizer: Any, facts: Facts, recipe: Recipe, *, documents: bool) -> None:
    """Adapter or model with tokenizer and the stop tokens that were trained; visible only when it is whole."""
    from transformers import GenerationConfig

    model = trainer.accelerator.unwrap_model(trainer.model)
    target = run.model if isinstance(recipe.method, Full) else run.adapter
    aside = target.with_name(f".{target.name}")
    shutil.rmtree(aside, ignore_errors=True)
    if documents:
        stops = [tokenizer.eos_token_id]
    else:
        stops = chat.end_of_turn_ids(tokenizer)
        tokenizer.chat_template = chat.template_to_save(tokenizer)
    generation = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=stops, pad_token_id=tokenizer.pad_token_id
    )
    if isinstance(recipe.method, Full):
        import torch

        stored = facts.tensors[0].dtype
        model.to({"BF16": torch.bfloat16, "F16": torch.float16}.get(stored, torch.float32))
        model.generation_config = generation
        model.config.use_cache = True
        model.save_pretrained(aside)
    else:
        # The name that the recipe gives, so that others find the base too; a folder stays a folder.
        config = model.peft_config["default"]
        config.base_model_name_or_path = (
            recipe.model if facts.source.startswith("hub") else config.base_model_name_or_path
        )
        model.save_pretrained(aside, save_embedding_layers=False)
        write_beside(aside, run)
    tokenizer.save_pretrained(aside)
    generation.save_pretrained(aside)
    if target.exists():
        shutil.rmtree(target)
    aside.rename(target)


def _measured(trainer: Trainer, plan: Plan, recipe: Recipe, facts: Facts) -> Measured | None:
    """The memory that was measured beside the prediction for the same micro-batches; None where none was measured."""
    measure = trainer.measure
    if measure.peak is None or measure.largest is None:
        return None
    return held_against(measure.peak, measure.largest, plan.path, recipe.method, facts)


def _in_words(measured: Measured) -> str:
    return (
        f"Memory at the peak of a step: {measured.peak / 1e9:.3f} GB measured, {measured.predicted / 1e9:.3f} GB "
        f"predicted for its rows ({measured.difference:+.1%})"
    )


def _result(trainer: Trainer, plan: Plan, data: Prepared, loss: float, measured: Measured | None) -> dict[str, Any]:
    history = trainer.state.log_history
    evaluations = [entry["eval_loss"] for entry in history if "eval_loss" in entry]
    tokens = int(trainer._total_train_tokens)
    seconds = trainer.clock.seconds
    here = tokens - trainer.tokens_before
    return {
        "steps": trainer.state.global_step,
        "loss": loss,
        "last_loss": next((entry["loss"] for entry in reversed(history) if "loss" in entry), None),
        "eval_loss": evaluations[-1] if evaluations else None,
        "tokens": tokens,
        "trained_tokens_per_epoch": data.train.trained_tokens,
        "train_seconds": round(seconds, 2),
        "seconds_to_first_step": round(trainer.clock.first_step or 0.0, 2),
        "tokens_per_second": round(here / seconds, 1) if seconds else None,
        "planned_bytes": plan.total,
        "memory": None if measured is None else measured.document(),
        "process_peak_bytes": memory_in_use(),
        "processes": plan.device.count,
        "versions": {"finetune": __version__, **{p: version(p) for p in _PACKAGES}},
    }


_PACKAGES = ("torch", "transformers", "peft", "trl", "bitsandbytes", "accelerate", "datasets")
