"""Which weights a run was trained on: written down when it trains, held against what is there when it is used.

    <run>/base.json                     {"sha256": ..., "commit": ...}     commit: of a model from the hub
    <run>/adapter/finetune_base.json    the same, for an adapter that leaves its run

An adapter beside other weights of the same shapes loads, answers and merges, and is wrong everywhere.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path

from finetune.errors import InputError, RunError
from finetune.run import Run
from finetune.weight_files import fingerprint, read_model

IN_RUN, BESIDE = "base.json", "finetune_base.json"


@dataclass(frozen=True)
class Origin:
    """The fingerprint of a base (`weight_files.fingerprint`) and, where it is from the hub, its commit."""

    sha256: str
    commit: str | None = None


def origin_of(folder: Path) -> Origin:
    """Of the weights in a folder. Raises what `read_model` does."""
    return Origin(fingerprint(read_model(folder)), commit_of(folder))


def commit_of(folder: Path) -> str | None:
    """The commit of a snapshot in the hub's cache; None of any other folder."""
    found = folder.parent.name == "snapshots" and re.fullmatch("[0-9a-f]{40}", folder.name)
    return folder.name if found else None


def write_origin(run: Run, origin: Origin) -> None:
    """Write it into a run. Raises `RunError` when the run was started on other weights."""
    before = _read(run.folder / IN_RUN)
    if before and before.sha256 != origin.sha256:
        raise RunError(
            f"The weights of the base have changed since {run.name} was started.",
            "Restore them, or start a new run.",
        )
    run.write(IN_RUN, asdict(origin))


def write_beside(adapter: Path, run: Run) -> None:
    """Let an adapter folder carry what its run says."""
    (adapter / BESIDE).write_text((run.folder / IN_RUN).read_text(encoding="utf-8"), encoding="utf-8")


def read_origin(adapter: Path, run: Run | None) -> Origin | None:
    """What an adapter was trained on; None where nobody wrote it down."""
    return (_read(run.folder / IN_RUN) if run else None) or _read(adapter / BESIDE)


def check_origin(name: str, origin: Origin | None, model: str, folder: Path) -> None:
    """Raise `InputError` when an adapter, known as `name`, was trained on other weights than those in `folder`."""
    if origin is not None and origin.sha256 != fingerprint(read_model(folder)):
        raise other_weights(name, origin, model)


def other_weights(name: str, origin: Origin, model: str) -> InputError:
    """What is said of a base that keeps its name and has other weights."""
    commit = f": commit {origin.commit} of its repository" if origin.commit else ""
    return InputError(
        f"The weights of {model} are not those that {name} was trained on.",
        f"Restore the base it was trained on{commit}; or train again on this one.",
    )


def _read(file: Path) -> Origin | None:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        return Origin(str(found["sha256"]), found.get("commit"))
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise RunError(f"{file} cannot be read.", "Remove it; what the base was is then not checked.") from None
