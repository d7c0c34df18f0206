"""The folder one run leaves behind; the only thing that one command hands to the next.

    runs/<recipe>-<time>/
      recipe.yaml          resolved, no auto left        plan.json      predicted buckets, choices and reasons
      data.json            counts and fingerprints       base.json      fingerprint of the weights it is trained on
      metrics.jsonl        one line per logged step      events.jsonl   start, resume, checkpoint, interrupt, end
      checkpoints/step-N/  complete only when its marker file is there (written last, after fsync)
      adapter/ or model/   what was trained
      result.json          losses, tokens, tokens/s, memory, versions; its presence means the run is finished

JSON files are replaced whole, so a reader never sees half of one. While a process trains, it holds a lock on the
folder that the operating system releases with the process, whatever ends it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from finetune.errors import RunError
from finetune.recipe import Recipe, dump_recipe, parse_recipe

MARKER = "complete.json"
_STEP = re.compile(r"step-(\d+)\Z")


@dataclass(frozen=True)
class Run:
    """One run folder. Cheap to make; nothing is read before it is asked for."""

    folder: Path

    # -- what is in it ----------------------------------------------------------------------------------------------
    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    @property
    def adapter(self) -> Path:
        return self.folder / "adapter"

    @property
    def model(self) -> Path:
        return self.folder / "model"

    @property
    def finished(self) -> bool:
        return (self.folder / "result.json").is_file()

    def recipe(self) -> Recipe:
        """The resolved recipe of this run."""
        file = self.folder / "recipe.yaml"
        return parse_recipe(file.read_text(encoding="utf-8"), str(file))

    def read(self, name: str) -> Any:
        """A JSON file of the folder, or None when it is not there (yet)."""
        file = self.folder / name
        return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None

    # -- writing ----------------------------------------------------------------------------------------------------
    def write(self, name: str, value: Any) -> None:
        """Replace a JSON file as a whole."""
        replace_text(self.folder / name, json.dumps(value, indent=2, ensure_ascii=False) + "\n")

    def event(self, kind: str, **fields: Any) -> None:
        """Append one line to events.jsonl."""
        self._append("events.jsonl", {"time": _now(), "event": kind, **fields})

    def metric(self, **fields: Any) -> None:
        """Append one line to metrics.jsonl."""
        self._append("metrics.jsonl", fields)

    def _append(self, name: str, value: dict[str, Any]) -> None:
        with (self.folder / name).open("a", encoding="utf-8") as file:
            file.write(json.dumps(value, ensure_ascii=False) + "\n")

    # -- checkpoints ------------------------------------------------------------------------------------------------
    def complete_checkpoints(self) -> list[Path]:
        """Checkpoints whose marker is there and whose files have the sizes it lists, oldest first."""
        return [path for _, path in self._steps() if _is_whole(path)]

    def broken_checkpoints(self) -> list[Path]:
        """Everything else under checkpoints/: saves that were cut off, or damaged afterwards."""
        whole = set(self.complete_checkpoints())
        return sorted(path for path in self.checkpoints.glob("*") if path not in whole)

    def last_checkpoint(self) -> Path | None:
        """The newest complete checkpoint."""
        whole = self.complete_checkpoints()
        return whole[-1] if whole else None

    def seal_checkpoint(self, saved: Path, step: int, keep: int) -> Path:
        """Make a saved folder the complete checkpoint `step-N` and drop the oldest beyond `keep`.

        Files are synced first, then the marker is written with their sizes, then the folder gets its name.
        """
        sizes = {str(file.relative_to(saved)): file.stat().st_size for file in _files(saved)}
        for file in _files(saved):
            _sync(file)
        replace_text(saved / MARKER, json.dumps({"step": step, "files": sizes}, indent=1))
        target = self.checkpoints / f"step-{step}"
        old = target.with_name(f"old-{target.name}")
        if target.exists():
            target.rename(old)
        saved.rename(target)
        _sync(self.checkpoints)
        shutil.rmtree(old, ignore_errors=True)
        for old in self.complete_checkpoints()[:-keep]:
            shutil.rmtree(old)
        return target

    def _steps(self) -> Iterator[tuple[int, Path]]:
        found = [(int(m[1]), p) for p in self.checkpoints.glob("step-*") if (m := _STEP.match(p.name))]
        return iter(sorted(found))


def open_or_create(recipe: Recipe, name: str, output: str | Path | None = None) -> tuple[Run, bool]:
    """The folder for a run of this (resolved) recipe, and whether it holds an unfinished run to go on with.

    Without `output` a new `runs/<name>-<time>` is made. Raises `RunError` when the folder holds something else.
    """
    if output is None:
        return _create(_free_name(Path("runs"), name), recipe), False
    folder = Path(output)
    check_output(folder)
    run = Run(folder)
    if not (folder / "recipe.yaml").is_file():
        return _create(folder, recipe), False
    if changed := _differences(run.recipe(), recipe):
        raise RunError(
            f"{folder} holds an unfinished run of another recipe ({', '.join(changed)} differ).",
            f"Go on with that one by `finetune train --resume {folder}`, or give another --output.",
        )
    return run, True


def check_output(folder: Path) -> None:
    """Raise `RunError` when `folder` cannot take a run: a file, a finished run, or a folder with other things."""
    if folder.is_file():
        raise RunError(f"{folder} is a file.", "Give the name of a folder that is new or empty.")
    if not folder.is_dir() or not any(folder.iterdir()):
        return
    if Run(folder).finished:
        raise RunError(f"{folder} holds a finished run.", "Give another --output, or remove that folder first.")
    if not (folder / "recipe.yaml").is_file():
        raise RunError(f"{folder} is not empty and holds no run.", "Give a folder that is new or empty.")


def open_run(name: str | Path) -> Run:
    """An existing run by folder, or by its name under runs/. Raises `RunError` with the newest ones otherwise."""
    for folder in (Path(name), Path("runs") / name):
        if (folder / "recipe.yaml").is_file():
            return Run(folder)
    known = [run.name for run in all_runs()][-3:]
    hint = (
        f"The newest runs are {', '.join(known)}."
        if known
        else "There is no run in ./runs yet; `finetune train` makes one."
    )
    raise RunError(f"There is no run folder {name}.", hint)


def run_around(path: Path) -> Run | None:
    """The run that a file, an adapter, a checkpoint of it or a model lies in: one or two folders up."""
    return next((Run(above) for above in path.resolve().parents[:2] if (above / "recipe.yaml").is_file()), None)


def all_runs(folder: Path = Path("runs")) -> list[Run]:
    """Every run under `folder`, oldest first."""
    found = [Run(path.parent) for path in folder.glob("*/recipe.yaml")]
    return sorted(found, key=lambda run: (run.folder / "recipe.yaml").stat().st_mtime)


def lock(run: Run) -> Any:
    """Hold the folder against a second process for as long as the returned lock lives.

    Raises `RunError` when another process trains there.
    """
    from filelock import FileLock, Timeout

    held = FileLock(run.folder / ".lock")
    try:
        held.acquire(timeout=0)
    except Timeout:
        raise RunError(
            f"Another process is training in {run.folder}.", "Wait for it or end it, or give another --output."
        ) from None
    return held


def replace_text(file: Path, text: str) -> None:
    """Write a text file so that it is old or new at any moment, never half."""
    aside = file.with_name(f".{file.name}.{os.getpid()}")
    with aside.open("w", encoding="utf-8") as out:
        out.write(text)
        out.flush()
        os.fsync(out.fileno())
    aside.replace(file)


def _create(folder: Path, recipe: Recipe) -> Run:
    folder.mkdir(parents=True, exist_ok=True)
    run = Run(folder)
    replace_text(folder / "recipe.yaml", dump_recipe(recipe))
    return run


def _free_name(parent: Path, name: str) -> Path:
    base = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    numbered = (f"{base}-{n}" for n in range(2, 1000))
    return next(parent / n for n in [base, *numbered] if not (parent / n).exists())


def _differences(old: Recipe, new: Recipe) -> list[str]:
    """Dotted names of the fields that a resumed run may not change; where it reports and serves may differ."""
    before, after = _flat(old.model_dump(mode="json")), _flat(new.model_dump(mode="json"))
    free = ("merge.", "serve.", "evaluate", "train.report_to", "train.log_every", "train.keep", "train.save_every")
    return sorted(
        key for key in before.keys() | after.keys() if before.get(key) != after.get(key) and not key.startswith(free)
    )


def _flat(value: dict[str, Any], above: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, item in value.items():
        flat |= _flat(item, f"{above}{key}.") if isinstance(item, dict) else {f"{above}{key}": item}
    return flat


def _is_whole(checkpoint: Path) -> bool:
    try:
        sizes = json.loads((checkpoint / MARKER).read_text(encoding="utf-8"))["files"]
        return bool(sizes) and all((checkpoint / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # cut off, or not what seal_checkpoint writes
        return False


def _files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.rglob("*") if file.is_file() and file.name != MARKER)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
