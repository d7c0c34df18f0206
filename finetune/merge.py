"""Fold a LoRA adapter into its base: W + scale * B @ A, tensor by tensor, straight from file to file.

    headers of base and adapter -> layout        everything that can be refused is refused before the first weight
    <output>.part-<pid>/        <- shard by shard, side files, mark, index last
    <output>/                   <- the same folder, renamed in one step

The model is never built, and a tensor that does not change is copied as bytes, so memory stays near the largest
tensor that does. Whenever the process is stopped, `output` is complete or absent.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from finetune import __version__, adapter_file, weight_files
from finetune.adapter_file import Adapter, read_adapter
from finetune.errors import FinetuneError, InputError, RunError
from finetune.merge_layout import STORED, Layout, Piece, plan_layout, read_architecture
from finetune.model import model_folder
from finetune.model_files import MARK, SideFiles, read_json, side_files
from finetune.recipe import Dtype, Full, QLoRA
from finetune.run import Run, open_run
from finetune.weight_files import Shard, Tensor, read_model

if TYPE_CHECKING:
    import torch

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Merged:
    """What a merge left: `merged` of `tensors` weights were changed, `bytes` counts all weights.

    `scale` is alpha / r, or alpha / sqrt(r) with rsLoRA, of modules that no pattern names.
    """

    folder: Path
    tensors: int
    merged: int
    bytes: int
    seconds: float
    scale: float
    notes: tuple[str, ...]

    def document(self) -> dict[str, Any]:
        """What `--json` prints."""
        return {**asdict(self), "folder": str(self.folder)}


def merge_adapter(
    base: Path, adapter: Path, output: Path, *, dtype: Dtype = "auto", progress: Progress | None = None
) -> Merged:
    """Write `base` with `adapter` folded in to the new folder `output`.

    Every changed weight is W + scale * B @ A (with DoRA its rows are then given their trained lengths), computed in
    float32 and rounded once to `dtype`; "auto" keeps each tensor's own type. `progress` is called with the bytes
    written so far and in all. The same merge again returns the finished folder unchanged.

    Raises `InputError` when adapter and base do not fit, `ModelError` for a broken base, and `RunError` when `output`
    is in use or `base` is itself a merge result.
    """
    started = time.monotonic()
    base, adapter, output = Path(base), Path(adapter), Path(output).resolve()
    if (base / MARK).exists():
        raise RunError(
            f"{base} is already a merge result, of {_made_of(base)}.",
            f"Merge into the original base; to add a second adapter on purpose, first remove its {MARK}.",
        )
    shards, lora = read_model(base), read_adapter(adapter)
    inputs = _inputs(base, shards, lora, dtype)
    if done := _finished(output, inputs):
        return done
    layout = plan_layout(base, shards, lora, read_architecture(base), dtype)
    beside = side_files(base, adapter, dtype=None if dtype == "auto" else dtype, untied=layout.untied)
    notes = [*beside.notes, *_check_values(lora)]
    mark = {**inputs, **_counts(layout), "scale": lora.scale, "notes": notes, **_when()}
    _check_space(output, mark["bytes"])
    with _new_folder(output) as part:
        _write_weights(part, layout, mark["bytes"], progress)
        _write_beside(part, beside, mark)
        if len(layout.files) > 1:
            _write_index(part, layout, mark["bytes"])
    return _as_merged(output, {**mark, "notes": [*notes, *_leftovers(output)]}, time.monotonic() - started)


def merge(run: Run | str | Path, output: Path | None = None, *, dtype: str | None = None) -> Merged:
    """Fold the adapter of a run into its base; by default into `<run>/merged` and in the type the recipe names.

    Raises `InputError` for a fully fine-tuned run, `RunError` for one without an adapter yet, and what
    `merge_adapter` raises.
    """
    run = run if isinstance(run, Run) else open_run(run)
    recipe = run.recipe()
    if isinstance(recipe.method, Full):
        raise InputError(
            f"{run.name} was fully fine-tuned, so there is nothing to merge.", f"Its model is ready in {run.model}."
        )
    if not run.adapter.is_dir():
        raise RunError(
            f"{run.folder} has no trained adapter yet.", f"Finish it: `finetune train --resume {run.folder}`."
        )
    chosen = (dtype or recipe.merge.dtype).replace("keep", "auto")
    if chosen not in get_args(Dtype):
        raise InputError(f"'{chosen}' is no type to merge into.", "Give keep, float32, bfloat16 or float16.")
    base = model_folder(recipe.model, recipe.load.revision)
    merged = merge_adapter(base, run.adapter, output or run.folder / "merged", dtype=chosen)  # type: ignore[arg-type]
    if not isinstance(recipe.method, QLoRA):
        return merged
    note = (
        "The adapter was trained beside 4-bit weights and is merged into the 16- or 32-bit ones they were made from."
    )
    return replace(merged, notes=(*merged.notes, note))


# --------------------------------------------------------------------------------------------- the arithmetic (torch)


def _load(tensor: Tensor) -> torch.Tensor:
    """A stored tensor in its own type."""
    import torch

    name = next(name for name, stored in STORED.items() if stored == tensor.dtype)
    dtype: torch.dtype = getattr(torch, name)
    if not tensor.size:
        return torch.empty(tensor.shape, dtype=dtype)
    return torch.frombuffer(tensor.read(), dtype=dtype).view(tensor.shape)


def _finite(values: torch.Tensor) -> bool:
    """Whether all values are numbers: isfinite of the extremes is several times faster than of every value."""
    return not values.numel() or all(bool(end.isfinite()) for end in values.aminmax())


def merged_weight(piece: Piece) -> torch.Tensor:
    """The weight of one piece in its final type.

        W' = W + scale * B @ A                                    Hu et al. 2021 (arXiv:2106.09685)
        W' = m * (W + scale * B @ A) / |W + scale * B @ A|        DoRA, norms by row; Liu et al. 2024 (2402.09353)

    Float32 throughout, whatever base and adapter are stored in, and one rounding at the end.
    """
    import torch

    weight = _load(piece.source)
    result = weight
    if pair := piece.pair:
        change = _load(pair.b).float() @ _load(pair.a).float()
        result = change.T if piece.transposed else change
        result *= pair.scale
        result += weight
        if pair.magnitude:
            rows = result.T if piece.transposed else result
            rows *= (_load(pair.magnitude).float() / torch.linalg.norm(rows, dim=1))[:, None]
    name = next(name for name, stored in STORED.items() if stored == piece.dtype)
    rounded = result.to(getattr(torch, name))
    if not _finite(rounded) and _finite(weight):
        raise InputError(
            f"'{piece.name}' would hold NaN or infinity as {name}, and the base does not.",
            "Choose dtype bfloat16 or float32; if that changes nothing, the adapter is broken.",
        )
    return rounded


def _check_values(lora: Adapter) -> list[str]:
    """Refuse NaN and infinity by name; note an adapter that changes nothing."""
    changes = bool(lora.whole)
    factors = {pair.b for pair in lora.pairs.values()}
    for tensor in lora.tensors:
        values = _load(tensor)
        if not _finite(values):
            raise InputError(
                f"'{tensor.name}' of the adapter {lora.folder} holds NaN or infinity.",
                "This training went wrong; merge an earlier checkpoint.",
            )
        changes = changes or (tensor in factors and bool(values.any()))
    return [] if changes else ["Every B of this adapter is zero: the merged model is the base."]


def _bytes_of(piece: Piece) -> Iterator[Any]:
    """The bytes of one piece of the result; unchanged ones are passed on as they are."""
    import torch

    if piece.pair is None and piece.dtype == piece.source.dtype:
        yield from piece.source.chunks()
    else:
        values: Any = merged_weight(piece).contiguous().reshape(-1).view(torch.uint8).numpy()
        yield memoryview(values)


# --------------------------------------------------------------------------------------------- what was merged before


def _inputs(base: Path, shards: list[Shard], lora: Adapter, dtype: str) -> dict[str, Any]:
    """What decides the weights of a merge; equal fingerprints give equal weights."""
    return {
        "base": {"path": str(base.resolve()), "sha256": weight_files.fingerprint(shards)},
        "adapter": {
            "path": str(lora.folder.resolve()),
            "sha256": weight_files.file_sha256(lora.folder / adapter_file.WEIGHTS),
            "config_sha256": weight_files.file_sha256(lora.folder / adapter_file.CONFIG),
        },
        "dtype": dtype,
    }


def _identity(inputs: Mapping[str, Any]) -> list[Any]:
    """Fingerprints and type, without the paths: a moved base is the same base."""
    adapter = inputs["adapter"]
    return [inputs["base"]["sha256"], adapter["sha256"], adapter["config_sha256"], inputs["dtype"]]


def _made_of(folder: Path) -> str:
    mark = read_json(folder / MARK)
    base, adapter = (mark.get(part, {}).get("path", "?") for part in ("base", "adapter"))
    return f"base {base} and adapter {adapter}"


def _finished(output: Path, inputs: Mapping[str, Any]) -> Merged | None:
    """The result that is there already, or None when `output` is free; raises `RunError` for anything else."""
    if os.path.ismount(output):
        raise RunError(
            f"The output {output} is a mount point and cannot be put in place.", "Name a folder inside it."
        )
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return None
    choose = "Choose another output, or remove this one."
    if not (output / MARK).is_file():
        raise RunError(f"The output {output} exists and is not an empty folder.", choose)
    mark = read_json(output / MARK)
    if "bytes" not in mark or _identity(mark) != _identity(inputs):
        raise RunError(f"The output {output} holds another merge, of {_made_of(output)}.", choose)
    if sum(tensor.size for shard in read_model(output) for tensor in shard.tensors.values()) != mark["bytes"]:
        raise RunError(f"The output {output} is this very merge, and weights are missing from it.", choose)
    again = f"{output} already holds exactly this merge, made {mark['date']}; nothing was done."
    return _as_merged(output, {**mark, "notes": [*mark["notes"], again]}, 0.0)


def _as_merged(folder: Path, mark: Mapping[str, Any], seconds: float) -> Merged:
    return Merged(
        folder, mark["tensors"], mark["merged"], mark["bytes"], seconds, mark["scale"], tuple(mark["notes"])
    )


def _counts(layout: Layout) -> dict[str, int]:
    pieces = layout.pieces
    return {
        "tensors": len(pieces),
        "merged": sum(piece.changed for piece in pieces),
        "bytes": sum(piece.size for piece in pieces),
    }


def _when() -> dict[str, Any]:
    packages = {name: version(name) for name in ("torch", "transformers")}
    versions = {"finetune": __version__, "python": platform.python_version(), **packages}
    return {"date": datetime.now(timezone.utc).isoformat(timespec="seconds"), "versions": versions}


# ------------------------------------------------------------------------------------------------------------ writing


@contextmanager
def _new_folder(output: Path) -> Iterator[Path]:
    """A folder beside `output` that takes its name when the block ends well, and disappears when it does not."""
    part = output.with_name(f"{output.name}.part-{os.getpid()}")
    shutil.rmtree(part, ignore_errors=True)  # of a dead process that had this number
    try:
        part.mkdir(parents=True)
        yield part
        weight_files.flush_folder(part)
        part.rename(output)
        weight_files.flush_folder(output.parent)
    except OSError as error:
        shutil.rmtree(part, ignore_errors=True)
        raise FinetuneError(
            f"The merge into {output} stopped: {error}.", "Nothing is left of it; merge again."
        ) from error
    except BaseException:  # KeyboardInterrupt too
        shutil.rmtree(part, ignore_errors=True)
        raise


def _leftovers(output: Path) -> list[str]:
    """A note on folders that killed merges left; they are not removed, as another machine may be writing one."""
    mine = f"{output.name}.part-{os.getpid()}"
    left = [path.name for path in output.parent.glob(f"{output.name}.part-*") if path.name != mine]
    return [f"Left by merges that did not end: {', '.join(sorted(left))} in {output.parent}."] if left else []


def _check_space(output: Path, needed: int) -> None:
    there = next(folder for folder in output.parents if folder.exists())
    if (free := shutil.disk_usage(there).free) < needed:
        raise RunError(
            f"The merged weights need {needed / 1e9:.1f} GB and {there} has {free / 1e9:.1f} GB free.",
            "Free some space or choose another output.",
        )


def _write_weights(part: Path, layout: Layout, total: int, progress: Progress | None) -> None:
    done = 0
    for name, pieces in layout.files.items():
        header = [(piece.name, piece.dtype, piece.source.shape, piece.size) for piece in pieces]
        with (part / name).open("wb") as file:
            file.write(weight_files.header_bytes(header, layout.metadata[name]))
            for piece in pieces:
                for chunk in _bytes_of(piece):
                    file.write(chunk)
                    done += len(chunk)
                    if progress:
                        progress(done, total)
            weight_files.flush(file)
        weight_files.read_shard(part / name)  # the header's promise against what was written


def _write_beside(part: Path, beside: SideFiles, mark: Mapping[str, Any]) -> None:
    for name, source in beside.copied.items():
        (part / name).parent.mkdir(exist_ok=True)
        with source.open("rb") as original, (part / name).open("wb") as copy:
            shutil.copyfileobj(original, copy)
            weight_files.flush(copy)
    for name, value in {**beside.written, MARK: mark}.items():
        _write_json(part / name, value)


def _write_index(part: Path, layout: Layout, total: int) -> None:
    place = {piece.name: name for name, pieces in layout.files.items() for piece in pieces}
    _write_json(
        part / weight_files.INDEX, {"metadata": {"total_size": total}, "weight_map": dict(sorted(place.items()))}
    )


def _write_json(file: Path, value: Mapping[str, Any]) -> None:
    with file.open("wb") as target:
        target.write((json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode())
        weight_files.flush(target)
