"""Fold adapters into a base, folder to folder: W + scale * B @ A, block by block.

    headers of base and adapter -> layout        everything that can be refused is refused before the first weight
    layout -> <output>.part-<16 digits>/         weights, side files, index; then the proof, the card and the mark
    <output>/                                    the same folder, renamed in one step

The model is never built, and a tensor that does not change is copied as bytes. Whenever the process is stopped,
`output` is complete or absent.
"""

from __future__ import annotations

import os
import platform
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from finetune import __version__, adapter_file, weight_files
from finetune.adapter_file import Adapter, check_finite, read_adapter
from finetune.architecture import read_architecture
from finetune.combine import combine, density_of
from finetune.errors import FinetuneError, ModelError, RunError
from finetune.merge_folder import (
    Progress,
    check_space,
    new_folder,
    remove_leftovers,
    write_beside,
    write_index,
    write_json,
    write_text,
    write_weights,
)
from finetune.merge_layout import STORED, FourBits, Layout, Weighted, plan_layout
from finetune.merge_math import load
from finetune.model_card import CARD, About, base_name, licence_of, model_card
from finetune.model_files import MARK, SideFiles, read_json, side_files
from finetune.proof import Proof, prove
from finetune.recipe import Dtype
from finetune.streamed import NotProvable
from finetune.weight_files import Shard, read_model

_WEIGHTS = "weights"


@dataclass(frozen=True)
class Merged:
    """What a merge left: `merged` of `tensors` weights were changed, `bytes` counts all weights.

    `scale` is alpha / r, or alpha / sqrt(r) with rsLoRA, of modules that no pattern names. `proof` is None where
    none was asked for, or none could be had; then a note says why.
    """

    folder: Path
    tensors: int
    merged: int
    bytes: int
    seconds: float
    scale: float
    notes: tuple[str, ...]
    proof: Proof | None = None

    def document(self) -> dict[str, Any]:
        """What `--json` prints."""
        return {**asdict(self), "folder": str(self.folder)}


@dataclass(frozen=True)
class Options:
    """How to merge. `dtype` auto keeps each tensor's own type, `max_shard` (bytes) None the base's files.

    `rows` are token ids to prove the result on; None proves nothing. `trained` names the weights that the adapter
    was trained beside in 4 bits, and with `like_training` the merge is made from these. `combine` and `density` say
    how several adapters become one: `combine.KINDS`.
    """

    dtype: Dtype = "auto"
    max_shard: int | None = None
    rows: Sequence[Sequence[int]] | None = None
    trained: Mapping[str, FourBits] | None = None
    like_training: bool = False
    combine: str = "sum"
    density: float | None = None


def merge_adapter(
    base: Path,
    adapter: Path | Sequence[tuple[Path, float]],
    output: Path,
    options: Options = Options(),  # noqa: B008  (frozen)
    *,
    shards: list[Shard] | None = None,
    about: About | None = None,
    progress: Progress | None = None,
) -> Merged:
    """Write `base` with `adapter`, or with several adapters each times its weight, to the new folder `output`.

    Every changed weight is W + sum of weight * scale * B @ A (`merge_math` has all formulas, `combine` other ways of
    putting several together), computed in float32 and rounded once. `shards` are those of `base` where some are still
    on their way. `about` goes into the model card. `progress` is called with the bytes written so far and in all. The
    same merge again returns the finished folder unchanged.

    Raises `InputError` when adapter and base do not fit, `ModelError` for a broken base, `RunError` when `output` is
    in use or `base` is itself a merge result, and `FinetuneError` when the proof fails.
    """
    started = time.monotonic()
    base, output = Path(base), Path(output).resolve()
    given = [(Path(adapter), 1.0)] if isinstance(adapter, (str, Path)) else adapter
    check_unmerged(base)
    shards = read_model(base) if shards is None else shards
    adapters = [Weighted(read_adapter(folder), weight) for folder, weight in given]
    options = replace(options, density=density_of(options.combine, options.density, len(adapters)))
    inputs = partial(_inputs, base, shards, adapters, options)
    used = (options.trained or {}) if options.like_training else {}
    if done := _finished(output, inputs):
        with _as_one(adapters, options) as taken:
            return _proved_now(done, base, taken, options, used)
    layout = _layout(base, shards, adapters, options, used)
    dtype = None if options.dtype == "auto" else options.dtype
    first = adapters[0].adapter.folder
    beside = side_files(base, first, dtype=dtype, untied=layout.untied, vocabulary=layout.vocabulary)
    notes = [*beside.notes, *_check_values([each.adapter for each in adapters])]
    more = layout.bytes - sum(tensor.size for shard in shards for tensor in shard.tensors.values())
    if layout.untied and dtype is None and more > 0:
        notes.append(f"The output head is a matrix of its own now, which makes the model {more / 1e6:.1f} MB larger.")
    remove_leftovers(output)  # before the space is looked at
    coming = sum(t.size for shard in shards for t in shard.tensors.values() if not t.file.is_file())
    check_space(output, layout.bytes + beside.bytes, base, coming)
    with _as_one(adapters, options) as taken, new_folder(output) as part:
        if taken is not adapters:
            layout = _layout(base, shards, taken, options, used)
            notes.append(_combined(len(adapters), options))
        write_weights(part, layout, progress)
        write_beside(part, beside)
        if set(layout.files) != {weight_files.SINGLE}:
            write_index(part, layout)
        made_of = inputs()  # reads what is left of the base, before the proof looks for it
        proof, said = _prove(base, taken, part, options, used)
        notes += said
        mark = {**made_of, **_counts(layout), "scale": taken[0].adapter.scale, "notes": notes, **_when()}
        mark["proof"] = None if proof is None else asdict(proof)
        mark["files"] = _files(part)
        write_text(part / CARD, model_card(_about(about, output, base, layout, beside, proof)))
        write_json(part / MARK, mark)
    return replace(_as_merged(output, mark), seconds=time.monotonic() - started)


def _layout(
    base: Path, shards: list[Shard], adapters: Sequence[Weighted], options: Options, used: Mapping[str, FourBits]
) -> Layout:
    layout = plan_layout(base, shards, adapters, read_architecture(base), options.dtype, used)
    return layout if options.max_shard is None else layout.in_shards(options.max_shard)


@contextmanager
def _as_one(adapters: Sequence[Weighted], options: Options) -> Iterator[Sequence[Weighted]]:
    """The adapters, or the one that they are combined to."""
    if options.combine == "sum":
        yield adapters
        return
    with tempfile.TemporaryDirectory(prefix="finetune-combined-") as folder:
        yield [Weighted(combine(adapters, options.combine, options.density, Path(folder)))]


def _combined(adapters: int, options: Options) -> str:
    density = "" if options.density is None else f" at density {options.density:g}"
    return f"The {adapters} adapters were made one by {options.combine}{density}, and that one is merged and proved."


def check_unmerged(base: Path) -> None:
    """Raise `RunError` when a base is itself a merge result: the change would be in it twice."""
    if (base / MARK).exists():
        raise RunError(
            f"{base} is already a merge result, of {_made_of(base)}.",
            f"Merge into the original base; to add a second adapter on purpose, first remove its {MARK}.",
        )


def _check_values(adapters: Sequence[Adapter]) -> list[str]:
    """Refuse NaN and infinity by name; note an adapter that changes nothing."""
    for adapter in adapters:
        check_finite(adapter.folder)
    changes = any(
        adapter.whole or adapter.tokens or adapter.start or any(load(pair.b).any() for pair in adapter.pairs.values())
        for adapter in adapters
    )
    return [] if changes else ["Every B of this adapter is zero: the merged model is the base."]


def _prove(
    base: Path, adapters: Sequence[Weighted], part: Path, options: Options, used: Mapping[str, FourBits]
) -> tuple[Proof | None, list[str]]:
    """The proof of a finished folder and what there is to say about it."""
    if options.rows is None:
        return None, []
    try:
        proof = prove(base, adapters, part, options.rows, used=used, trained=options.trained)
    except NotProvable as why:
        return None, [f"Not proved: {why}. Compare some answers yourself."]
    notes = []
    if proof.trained is not None and used:
        notes.append(
            "The weights are the 4-bit ones that the adapter was trained beside, unpacked; "
            f"against the training the logits differ by up to {proof.trained:.2g}, and the most likely token is the "
            f"same in {proof.trained_same} of {proof.places} places."
        )
    elif proof.trained is not None:
        notes.append(
            "The adapter was trained beside 4-bit weights and is merged into the 16- or 32-bit ones they were made "
            f"from: against the training the logits differ by up to {proof.trained:.2g}, and the most likely token "
            f"is the same in {proof.trained_same} of {proof.places} places. "
            "--like-training merges into the 4-bit ones."
        )
    return proof, notes


def _proved_now(
    done: Merged, base: Path, adapters: Sequence[Weighted], options: Options, used: Mapping[str, FourBits]
) -> Merged:
    """A finished result that was made without a proof, with the one that is asked for now."""
    if done.proof is not None or options.rows is None:
        return done
    try:
        proof, said = _prove(base, adapters, done.folder, options, used)
    except FinetuneError:
        shutil.rmtree(done.folder)
        raise
    if proof is not None:
        write_json(done.folder / MARK, {**read_json(done.folder / MARK), "proof": asdict(proof)})
    return replace(done, proof=proof, notes=(*done.notes, *said))


def _about(
    about: About | None, output: Path, base: Path, layout: Layout, beside: SideFiles, proof: Proof | None
) -> About:
    """All that the card tells."""
    stored = {piece.dtype: name for piece in layout.pieces for name, short in STORED.items() if short == piece.dtype}
    said = about or About(output.name, base_name(str(base)), licence_of(str(base), base), "", ())
    sentence = None if proof is None else proof.sentence()
    return replace(said, dtype=" and ".join(sorted(stored.values())), stops=beside.stops, proof=sentence)


# --------------------------------------------------------------------------------------------- what was merged before


def _inputs(base: Path, shards: list[Shard], adapters: Sequence[Weighted], options: Options) -> dict[str, Any]:
    """What decides the weights of a merge; equal fingerprints give equal weights."""
    first, *others = [
        {
            "path": str(each.adapter.folder.resolve()),
            "sha256": weight_files.file_sha256(each.adapter.folder / adapter_file.WEIGHTS),
            "config_sha256": weight_files.file_sha256(each.adapter.folder / adapter_file.CONFIG),
            "weight": each.weight,
        }
        for each in adapters
    ]
    return {
        "base": {"path": str(base.resolve()), "sha256": weight_files.fingerprint(shards)},
        "adapter": first,
        "other_adapters": others,
        "dtype": options.dtype,
        "max_shard": options.max_shard,
        "like_training": options.like_training,
        "combine": options.combine,
        "density": options.density,
    }


def _identity(inputs: Mapping[str, Any]) -> list[Any]:
    """Fingerprints and options, without the paths: a moved base is the same base."""
    adapters = [inputs["adapter"], *inputs.get("other_adapters", ())]
    made = [[each["sha256"], each["config_sha256"], each.get("weight", 1.0)] for each in adapters]
    options = [inputs["dtype"], inputs.get("max_shard"), inputs.get("like_training", False)]
    options += [inputs.get("combine", "sum"), inputs.get("density")]
    return [inputs["base"]["sha256"], *made, *options]


def _made_of(folder: Path) -> str:
    mark = read_json(folder / MARK)
    base, adapter = (mark.get(part, {}).get("path", "?") for part in ("base", "adapter"))
    return f"base {base} and adapter {adapter}"


def _finished(output: Path, inputs: Callable[[], Mapping[str, Any]]) -> Merged | None:
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
    if "files" not in mark or _identity(mark) != _identity(inputs()):
        raise RunError(f"The output {output} holds another merge, of {_made_of(output)}.", choose)
    if changed := _changed(output, mark["files"]):
        raise RunError(
            f"The output {output} is this very merge, and its {changed} changed since it was written.", choose
        )
    again = f"{output} already holds exactly this merge, made {mark['date']}; nothing was done."
    return _as_merged(output, {**mark, "notes": [*mark["notes"], again]})


def _files(folder: Path) -> dict[str, str]:
    """What a result holds: the fingerprint of its weights, and the hash of every other file but card and mark."""
    others = [file for file in sorted(folder.rglob("*")) if file.is_file() and file.suffix != ".safetensors"]
    names = [str(file.relative_to(folder)) for file in others if file.name not in (CARD, MARK)]
    return {_WEIGHTS: weight_files.fingerprint(read_model(folder)), **{name: _hash(folder, name) for name in names}}


def _changed(folder: Path, written: Mapping[str, str]) -> str | None:
    """The first of the written files that is missing or another one now."""
    return next((name for name, before in written.items() if _hash(folder, name) != before), None)


def _hash(folder: Path, name: str) -> str:
    """Of one file, or of the weights; nothing where it is not there any more."""
    try:
        if name == _WEIGHTS:
            return weight_files.fingerprint(read_model(folder))
        return weight_files.file_sha256(folder / name)
    except (ModelError, OSError):
        return ""


def _as_merged(folder: Path, mark: Mapping[str, Any]) -> Merged:
    proof = Proof(**mark["proof"]) if mark.get("proof") else None
    notes = tuple(mark["notes"])
    return Merged(folder, mark["tensors"], mark["merged"], mark["bytes"], 0.0, mark["scale"], notes, proof)


def _counts(layout: Layout) -> dict[str, int]:
    pieces = layout.pieces
    return {"tensors": len(pieces), "merged": sum(piece.changed for piece in pieces), "bytes": layout.bytes}


def _when() -> dict[str, Any]:
    packages = {name: version(name) for name in ("torch", "transformers")}
    versions = {"finetune": __version__, "python": platform.python_version(), **packages}
    return {"date": datetime.now(timezone.utc).isoformat(timespec="seconds"), "versions": versions}
