"""Runs that are killed, interrupted or damaged go on from the last complete checkpoint to the same weights."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from finetune.errors import RunError
from finetune.run import Run
from finetune.train import train
from tests.flow.conftest import chat_rows, child, losses, recipe, recipe_text, write_rows

STEPS = "steps: 12, epochs: 2, save_every: 2, keep: 3"  # 24 rows, 4 a step: the second epoch begins at step 6


def settings(text: str) -> str:
    """The recipe's own `epochs: 1` gives way to the one in STEPS."""
    return text.replace("epochs: 1, ", "")


@pytest.fixture(scope="module")
def straight(base: Path, rows: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The run that nothing disturbs."""
    from finetune.recipe import parse_recipe

    text = settings(recipe_text(base, rows, train=STEPS))
    return train(parse_recipe(text), output=tmp_path_factory.mktemp("straight") / "run")


def assert_same_end(run: Run, straight: Run) -> None:
    assert losses(run.folder) == losses(straight.folder)
    ours, theirs = (load_file(r.adapter / "adapter_model.safetensors") for r in (run, straight))
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor), name


def start(tmp_path: Path, base: Path, rows: Path) -> tuple[Path, object]:
    file = tmp_path / "r.yaml"
    file.write_text(settings(recipe_text(base, rows, train=STEPS)))
    return tmp_path / "run", child("train", str(file), "--output", str(tmp_path / "run"), cwd=tmp_path)


def wait_for(folder: Path, name: str, process: object, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not (folder / "checkpoints" / name).is_dir():
        assert time.monotonic() < end, f"no {name} after {seconds} s"
        assert process.poll() is None, process.communicate()  # type: ignore[attr-defined]
        time.sleep(0.02)


def test_a_killed_run_resumes_to_the_very_same_weights(base: Path, rows: Path, tmp_path: Path, straight: Run) -> None:
    folder, process = start(tmp_path, base, rows)
    wait_for(folder, "step-8", process)
    os.killpg(process.pid, signal.SIGKILL)  # type: ignore[attr-defined]
    process.communicate(timeout=30)  # type: ignore[attr-defined]
    run = Run(folder)
    if run.finished:
        pytest.skip("the run was over before the signal came")
    train(run.recipe(), output=folder)
    assert_same_end(run, straight)


def test_ctrl_c_saves_exits_130_and_resumes(base: Path, rows: Path, tmp_path: Path, straight: Run) -> None:
    folder, process = start(tmp_path, base, rows)
    wait_for(folder, "step-2", process)
    process.send_signal(signal.SIGINT)  # type: ignore[attr-defined]
    _, errors = process.communicate(timeout=60)  # type: ignore[attr-defined]
    assert process.returncode == 130, errors  # type: ignore[attr-defined]
    assert "finetune train --resume" in errors
    assert "Traceback" not in errors
    run = Run(folder)
    assert run.last_checkpoint() is not None
    resumed = child("train", "--resume", str(folder), cwd=tmp_path)
    out, errors = resumed.communicate(timeout=120)
    assert resumed.returncode == 0, errors
    assert "Going on from step-" in out
    assert_same_end(run, straight)


@pytest.mark.parametrize("damage", ["halved", "emptied", "no marker", "state gone", "empty folder"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(
    base: Path, rows: Path, tmp_path: Path, straight: Run, damage: str
) -> None:
    """What a kill during a save leaves; the newest complete checkpoint is used, never step 0 in silence."""
    run = Run(tmp_path / "run")
    shutil.copytree(straight.folder, run.folder)
    (run.folder / "result.json").unlink()
    shutil.rmtree(run.adapter)
    newest = run.complete_checkpoints()[-1]
    weights = newest / "adapter_model.safetensors"
    if damage == "halved":
        weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    elif damage == "emptied":
        weights.write_bytes(b"")
    elif damage == "no marker":
        (newest / "complete.json").unlink()
    elif damage == "state gone":
        (newest / "trainer_state.json").unlink()
    else:
        shutil.rmtree(newest)
        newest.mkdir()
    said: list[str] = []
    train(run.recipe(), output=run.folder, say=said.append)
    assert any(newest.name in line and "incomplete" in line for line in said)
    assert "Going on from step-10" in said
    assert_same_end(run, straight)


def test_a_run_that_was_stopped_after_its_last_step_only_finishes(tmp_path: Path, straight: Run) -> None:
    run = Run(tmp_path / "run")
    shutil.copytree(straight.folder, run.folder)
    (run.folder / "result.json").unlink()
    shutil.rmtree(run.adapter)
    train(run.recipe(), output=run.folder)
    assert_same_end(run, straight)
    ours, theirs = run.read("result.json"), straight.read("result.json")
    assert (ours["steps"], ours["tokens"]) == (theirs["steps"], theirs["tokens"]) == (12, theirs["tokens"])
    assert ours["loss"] == pytest.approx(theirs["loss"])


def test_rows_that_changed_are_not_gone_on_with(base: Path, tmp_path: Path) -> None:
    file = write_rows(tmp_path / "rows.jsonl", chat_rows(8))
    run = train(recipe(base, file), output=tmp_path / "run")
    (run.folder / "result.json").unlink()
    write_rows(file, chat_rows(9)[1:])
    with pytest.raises(RunError, match="rows have changed"):
        train(run.recipe(), output=run.folder)


def test_resume_with_qlora_is_exact_too(base: Path, rows: Path, tmp_path: Path) -> None:
    """TRL makes 4-bit runs' adapters bf16 once and not again on resume; ours are fp32 both times."""
    whole = recipe(base, rows, "qlora", train="steps: 6, save_every: 3, keep: 2")
    first = train(whole, output=tmp_path / "first")
    second = Run(tmp_path / "second")
    shutil.copytree(first.folder, second.folder)
    (second.folder / "result.json").unlink()
    shutil.rmtree(second.checkpoints / "step-6")
    train(second.recipe(), output=second.folder)
    assert_same_end(second, first)
    kinds = [json.loads(line)["event"] for line in (second.folder / "events.jsonl").read_text().splitlines()]
    assert "resume" in kinds
