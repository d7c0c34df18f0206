"""The run folder: what counts as complete, who may write, and which folder a run may go into."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from finetune.errors import RunError
from finetune.recipe import Recipe, dump_recipe, parse_recipe
from finetune.run import MARKER, Run, all_runs, check_output, lock, open_or_create, open_run, replace_text

TEXT = """\
model: some/model
method: {kind: lora, rank: 8}
data: {train: rows.jsonl}
train: {batch_size: 4}
"""
RECIPE = parse_recipe(TEXT)


def recipe(*overrides: str) -> Recipe:
    return parse_recipe(TEXT, "recipe", overrides)


def refused(run: RunError) -> str:
    assert run.exit_code == 2
    assert run.what.endswith(".")
    assert run.hint.endswith(".")
    return str(run)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return open_or_create(RECIPE, "x", tmp_path / "run")[0]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every test works in an empty folder of its own."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


# ---------------------------------------------------------------------------------------------------- making folders


def test_a_new_run_is_named_after_its_recipe_and_the_time() -> None:
    first, resumed = open_or_create(RECIPE, "gemma2b-qlora")
    assert not resumed
    assert re.fullmatch(r"gemma2b-qlora-\d{8}-\d{6}", first.name)
    assert first.folder.parent == Path("runs")
    assert first.recipe() == RECIPE
    assert not first.finished
    others = {open_or_create(RECIPE, "gemma2b-qlora")[0].folder for _ in range(3)}
    assert len({first.folder, *others}) == 4  # the same second never gives the same folder


def test_an_output_folder_is_made_with_its_parents_and_an_empty_one_is_taken(here: Path) -> None:
    run, resumed = open_or_create(RECIPE, "x", here / "a" / "b")
    assert (run.folder, resumed) == (here / "a" / "b", False)
    (here / "empty").mkdir()
    assert open_or_create(RECIPE, "x", here / "empty")[1] is False


def test_the_same_recipe_goes_on_with_an_unfinished_run(run: Run) -> None:
    again, resumed = open_or_create(RECIPE, "x", run.folder)
    assert (again, resumed) == (run, True)


def test_where_a_run_reports_and_serves_may_change(run: Run) -> None:
    changed = recipe("train.log_every=1", "train.keep=5", "train.save_every=7", "serve.port=1", "merge.dtype=float16")
    assert open_or_create(changed, "x", run.folder)[1]
    assert open_or_create(recipe("evaluate.data=home-intents:test"), "x", run.folder)[1]
    assert open_or_create(recipe("train.report_to=[wandb]"), "x", run.folder)[1]


def test_another_recipe_is_refused_with_the_fields_that_differ(run: Run) -> None:
    other = recipe("train.batch_size=8", "method.rank=16", "data.max_length=64", "serve.port=1")
    with pytest.raises(RunError) as caught:
        open_or_create(other, "x", run.folder)
    assert refused(caught.value) == (
        f"{run.folder} holds an unfinished run of another recipe"
        " (data.max_length, method.rank, train.batch_size differ)."
        f" Go on with that one by `finetune train --resume {run.folder}`, or give another --output."
    )
    assert run.recipe() == RECIPE


def test_another_method_names_what_it_has_more_or_less(run: Run) -> None:
    with pytest.raises(
        RunError, match=r"\(method\.alpha, method\.dropout, method\.kind, method\.modules_to_save, method\.rank, "
    ):
        open_or_create(recipe("method={kind: full}"), "x", run.folder)


def test_a_finished_run_is_refused(run: Run) -> None:
    run.write("result.json", {"loss": 1.0})
    assert run.finished
    with pytest.raises(RunError) as caught:
        open_or_create(RECIPE, "x", run.folder)
    assert refused(caught.value).startswith(f"{run.folder} holds a finished run. Give another --output")


def test_a_folder_with_other_things_and_a_file_are_refused(here: Path) -> None:
    foreign = here / "thesis"
    foreign.mkdir()
    (foreign / "chapter1.txt").write_text("dear to somebody")
    with pytest.raises(RunError) as caught:
        check_output(foreign)
    assert refused(caught.value) == (f"{foreign} is not empty and holds no run. Give a folder that is new or empty.")
    with pytest.raises(RunError, match="is a file"):
        open_or_create(RECIPE, "x", foreign / "chapter1.txt")
    assert [file.name for file in foreign.iterdir()] == ["chapter1.txt"]


# ---------------------------------------------------------------------------------------------------- finding folders


def test_a_run_is_found_by_name_and_by_path(here: Path) -> None:
    made, _ = open_or_create(RECIPE, "mine")
    assert open_run(made.name).folder == made.folder
    assert open_run(made.folder) == made
    assert open_run(f"{here / made.folder}/").name == made.name


def test_no_such_run_names_the_newest() -> None:
    with pytest.raises(RunError) as caught:
        open_run("gone")
    assert refused(caught.value).startswith("There is no run folder gone. There is no run in ./runs yet")
    for name in "abcd":
        open_or_create(RECIPE, name, Path("runs") / name)
        os.utime(Path("runs") / name / "recipe.yaml", (ord(name), ord(name)))
    with pytest.raises(RunError) as caught:
        open_run("gone")
    assert refused(caught.value) == "There is no run folder gone. The newest runs are b, c, d."


def test_all_runs_are_listed_oldest_first(here: Path) -> None:
    assert all_runs() == []
    for age, name in enumerate(["newest", "middle", "oldest"]):
        open_or_create(RECIPE, name, here / "runs" / name)
        os.utime(here / "runs" / name / "recipe.yaml", (1000 - age, 1000 - age))
    (here / "runs" / "something else").mkdir()
    assert [run.name for run in all_runs()] == ["oldest", "middle", "newest"]


# ------------------------------------------------------------------------------------------------------------ writing


def test_json_files_and_lines(run: Run) -> None:
    assert run.read("plan.json") is None
    run.write("plan.json", {"größe": [1, None]})
    assert run.read("plan.json") == {"größe": [1, None]}
    run.metric(step=1, loss=2.5)
    run.metric(step=2, loss=2.25)
    run.event("start", step=0)
    lines = (run.folder / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [{"step": 1, "loss": 2.5}, {"step": 2, "loss": 2.25}]
    event = json.loads((run.folder / "events.jsonl").read_text())
    assert (event["event"], event["step"]) == ("start", 0)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", event["time"])


def test_a_failed_write_leaves_the_old_text(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = here / "a.json"
    replace_text(file, "old")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        replace_text(file, "new")
    assert file.read_text() == "old"


def test_a_reader_never_sees_half_a_file(here: Path) -> None:
    file = here / "a.json"
    texts = [letter * 200_000 for letter in "ab"]
    replace_text(file, texts[0])
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            for text in texts:
                replace_text(file, text)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        assert all(file.read_text() in texts for _ in range(100))
    finally:
        stop.set()
        writer.join()
    assert [found.name for found in here.iterdir()] == ["a.json"]


# ------------------------------------------------------------------------------------------------------------ locking

CHILD = """
import sys, time
from pathlib import Path
from finetune.errors import RunError
from finetune.run import Run, lock
try:
    held = lock(Run(Path(sys.argv[1])))
    print("held", flush=True)
    time.sleep(float(sys.argv[2]))
except RunError as error:
    print(error, flush=True)
"""


def child(run: Run, seconds: float) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", CHILD, str(run.folder), str(seconds)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_a_second_process_is_refused_until_the_first_lets_go(run: Run) -> None:
    held = lock(run)
    answer, _ = child(run, 0).communicate(timeout=60)
    assert answer.strip() == (
        f"Another process is training in {run.folder}. Wait for it or end it, or give another --output."
    )
    held.release()
    assert child(run, 0).communicate(timeout=60)[0].strip() == "held"


def test_a_killed_process_leaves_no_lock(run: Run) -> None:
    with child(run, 60) as other:
        assert other.stdout is not None
        assert other.stdout.readline().strip() == "held"
        with pytest.raises(RunError) as caught:
            lock(run)
        assert "Another process is training" in refused(caught.value)
        other.send_signal(signal.SIGKILL)
        other.wait(timeout=60)
        with lock(run):
            pass


# -------------------------------------------------------------------------------------------------------- checkpoints


def save(run: Run, step: int) -> Path:
    """What a trainer leaves behind for one step, not sealed yet."""
    folder = run.checkpoints / f"checkpoint-{step}"
    (folder / "adapter").mkdir(parents=True)
    (folder / "adapter" / "weights.safetensors").write_bytes(b"w" * 1000)
    (folder / "optimizer.pt").write_bytes(b"o" * 500)
    (folder / "empty.txt").write_bytes(b"")
    return folder


def seal(run: Run, *steps: int, keep: int = 10) -> list[Path]:
    return [run.seal_checkpoint(save(run, step), step, keep) for step in steps]


def names(paths: list[Path]) -> list[str]:
    return [path.name for path in paths]


def test_without_checkpoints(run: Run) -> None:
    assert run.complete_checkpoints() == run.broken_checkpoints() == []
    assert run.last_checkpoint() is None


def test_a_sealed_checkpoint_is_complete_and_lists_its_sizes(run: Run) -> None:
    [sealed] = seal(run, 5)
    assert sealed == run.checkpoints / "step-5" == run.last_checkpoint()
    assert json.loads((sealed / MARKER).read_text()) == {
        "step": 5,
        "files": {"adapter/weights.safetensors": 1000, "empty.txt": 0, "optimizer.pt": 500},
    }
    assert run.broken_checkpoints() == []


def test_the_newest_is_the_highest_step_not_the_last_name(run: Run) -> None:
    seal(run, 9, 100, 20)
    assert names(run.complete_checkpoints()) == ["step-9", "step-20", "step-100"]
    assert run.last_checkpoint() == run.checkpoints / "step-100"


def test_keep_drops_the_oldest(run: Run) -> None:
    seal(run, 1, 2, 3, 4, keep=2)
    assert names(sorted(run.checkpoints.iterdir())) == ["step-3", "step-4"]
    seal(run, 5, keep=1)
    assert names(sorted(run.checkpoints.iterdir())) == ["step-5"]


def test_keep_never_counts_a_broken_one(run: Run) -> None:
    seal(run, 1, 2)
    (run.checkpoints / "step-2" / MARKER).unlink()
    seal(run, 3, keep=2)
    assert names(run.complete_checkpoints()) == ["step-1", "step-3"]
    assert names(run.broken_checkpoints()) == ["step-2"]


def test_sealing_the_same_step_again_replaces_it(run: Run) -> None:
    seal(run, 3)
    (run.checkpoints / "step-3" / "optimizer.pt").write_bytes(b"half")
    assert names(seal(run, 3)) == ["step-3"]
    assert names(run.complete_checkpoints()) == ["step-3"]


def halve(folder: Path) -> None:
    os.truncate(folder / "adapter" / "weights.safetensors", 500)


def grow(folder: Path) -> None:
    (folder / "optimizer.pt").write_bytes(b"o" * 501)


def lose(folder: Path) -> None:
    (folder / "optimizer.pt").unlink()


def unmark(folder: Path) -> None:
    (folder / MARKER).unlink()


def clear(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


def mark(text: str) -> object:
    return lambda folder: (folder / MARKER).write_text(text)


@pytest.mark.parametrize(
    "damage",
    [
        halve,
        grow,
        lose,
        unmark,
        clear,
        *map(mark, ["", '{"step": 2, "fi', "[]", "null", "{}", '{"files": {}}', '{"files": 3}']),
    ],
)
def test_a_damaged_newest_checkpoint_gives_way_to_the_one_before(run: Run, damage: object) -> None:
    seal(run, 1, 2)
    assert callable(damage)
    damage(run.checkpoints / "step-2")
    assert run.last_checkpoint() == run.checkpoints / "step-1"
    assert names(run.broken_checkpoints()) == ["step-2"]


def test_what_a_killed_save_leaves_is_broken_and_never_used(run: Run) -> None:
    seal(run, 1)
    save(run, 2)  # never sealed
    (run.checkpoints / "step-3").write_text("a file")
    (run.checkpoints / "step-x").mkdir()
    (run.checkpoints / "tmp-step-4").mkdir()
    assert names(run.complete_checkpoints()) == ["step-1"]
    assert names(run.broken_checkpoints()) == ["checkpoint-2", "step-3", "step-x", "tmp-step-4"]


def test_a_killed_seal_leaves_the_old_name(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    seal(run, 1)
    saved = save(run, 2)

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "rename", killed)
    with pytest.raises(KeyboardInterrupt):
        run.seal_checkpoint(saved, 2, keep=1)
    monkeypatch.undo()
    assert run.last_checkpoint() is not None
    assert names(run.complete_checkpoints()) == ["step-1"]


def test_the_recipe_in_the_folder_reads_back_the_same(run: Run) -> None:
    awkward = recipe("load.revision='7e12345'", "data.system='a: b # c'", "method.targets=['010', q_proj]")
    made, _ = open_or_create(awkward, "x", run.folder.parent / "awkward")
    assert made.recipe() == awkward
    assert (made.folder / "recipe.yaml").read_text() == dump_recipe(awkward)
    assert open_or_create(awkward, "x", made.folder)[1]
