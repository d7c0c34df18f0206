"""Fold a LoRA adapter into its base: W + scale * B @ A, block by block, straight from file to file.

    headers of base and adapter -> layout        everything that can be refused is refused before the first weight
    layout -> <output>.part-<pid>/               weights, side files, index; then the proof, the card and the mark
    <output>/                                    the same folder, renamed in one step

The model is never built, and a tensor that does not change is copied as bytes. Whenever the process is stopped,
`output` is complete or absent.
"""

from __future__ import annotations

import os
import platform
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any, get_args

from finetune import __version__, adapter_file, embedded, hub_headers, weight_files
from finetune.adapter_file import Adapter, read_adapter
from finetune.data import prepare
from finetune.errors import FinetuneError, InputError, ModelError, RunError
from finetune.facts import read_facts
from finetune.merge_folder import (
    Progress,
    check_space,
    new_folder,
    write_beside,
    write_index,
    write_json,
    write_text,
    write_weights,
)
from finetune.merge_layout import STORED, FourBits, Layout, Weighted, plan_layout, read_architecture
from finetune.merge_math import finite, load
from finetune.model import load_tokenizer, model_folder
from finetune.model_card import CARD, About, base_name, licence_of, model_card
from finetune.model_files import MARK, SideFiles, read_json, side_files
from finetune.proof import NotProvable, Proof, prove
from finetune.recipe import Dtype, Full, QLoRA, Recipe
from finetune.run import Run, open_run
from finetune.weight_files import Shard, read_model

_PROOF_ROWS = 8
_SENTENCES = (
    "The capital of France is Paris, and the capital of Italy is",
    "To merge an adapter into a model, the product of two small matrices is added to each weight.",
    "1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144,",
    'def add(a, b):\n    """The sum of two numbers."""\n    return',
)


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
    was trained beside in 4 bits, and with `like_training` the merge is made from these.
    """

    dtype: Dtype = "auto"
    max_shard: int | None = None
    rows: Sequence[Sequence[int]] | None = None
    trained: Mapping[str, FourBits] | None = None
    like_training: bool = False


def merge_adapter(
    base: Path,
    adapter: Path | Sequence[tuple[Path, float]],
    output: Path,
    options: Options = Options(),  # noqa: B008  (frozen)
    *,
    about: About | None = None,
    progress: Progress | None = None,
) -> Merged:
    """Write `base` with `adapter`, or with several adapters each times its weight, to the new folder `output`.

    Every changed weight is W + sum of weight * scale * B @ A (`merge_math` has all formulas), computed in float32 and
    rounded once. `about` goes into the model card. `progress` is called with the bytes written so far and in all. The
    same merge again returns the finished folder unchanged.

    Raises `InputError` when adapter and base do not fit, `ModelError` for a broken base, `RunError` when `output` is
    in use or `base` is itself a merge result, and `FinetuneError` when the proof fails.
    """
    started = time.monotonic()
    base, output = Path(base), Path(output).resolve()
    given = [(Path(adapter), 1.0)] if isinstance(adapter, (str, Path)) else adapter
    _check_unmerged(base)
    shards = read_model(base)
    adapters = [Weighted(read_adapter(folder), weight) for folder, weight in given]
    inputs = _inputs(base, shards, adapters, options)
    if done := _finished(output, inputs):
        return done
    used = (options.trained or {}) if options.like_training else {}
    layout = plan_layout(base, shards, adapters, read_architecture(base), options.dtype, used)
    if options.max_shard is not None:
        layout = layout.in_shards(options.max_shard)
    dtype = None if options.dtype == "auto" else options.dtype
    first = adapters[0].adapter.folder
    beside = side_files(base, first, dtype=dtype, untied=layout.untied, vocabulary=layout.vocabulary)
    notes = [*beside.notes, *_check_values([each.adapter for each in adapters])]
    more = layout.bytes - sum(tensor.size for shard in shards for tensor in shard.tensors.values())
    if layout.untied and dtype is None and more > 0:
        notes.append(f"The output head is a matrix of its own now, which makes the model {more / 1e6:.1f} MB larger.")
    check_space(output, layout.bytes + beside.bytes)
    with new_folder(output) as part:
        write_weights(part, layout, progress)
        write_beside(part, beside)
        if len(layout.files) > 1:
            write_index(part, layout)
        proof, said = _prove(base, adapters, part, options, used)
        notes += said
        mark = {**inputs, **_counts(layout), "scale": adapters[0].adapter.scale, "notes": notes, **_when()}
        mark["proof"] = None if proof is None else asdict(proof)
        write_text(part / CARD, model_card(_about(about, output, base, layout, beside, proof)))
        write_json(part / MARK, mark)
    return replace(_as_merged(output, mark), seconds=time.monotonic() - started)


def _check_unmerged(base: Path) -> None:
    if (base / MARK).exists():
        raise RunError(
            f"{base} is already a merge result, of {_made_of(base)}.",
            f"Merge into the original base; to add a second adapter on purpose, first remove its {MARK}.",
        )


def _check_values(adapters: Sequence[Adapter]) -> list[str]:
    """Refuse NaN and infinity by name; note an adapter that changes nothing."""
    changes = False
    for adapter in adapters:
        changes = changes or bool(adapter.whole or adapter.tokens or adapter.start)
        factors = {pair.b for pair in adapter.pairs.values()}
        for tensor in adapter.tensors:
            values = load(tensor)
            if not finite(values):
                raise InputError(
                    f"'{tensor.name}' of the adapter {adapter.folder} holds NaN or infinity.",
                    "This training went wrong; merge an earlier checkpoint.",
                )
            changes = changes or (tensor in factors and bool(values.any()))
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
    }


def _identity(inputs: Mapping[str, Any]) -> list[Any]:
    """Fingerprints and options, without the paths: a moved base is the same base."""
    adapters = [inputs["adapter"], *inputs.get("other_adapters", ())]
    made = [[each["sha256"], each["config_sha256"], each.get("weight", 1.0)] for each in adapters]
    options = [inputs["dtype"], inputs.get("max_shard"), inputs.get("like_training", False)]
    return [inputs["base"]["sha256"], *made, *options]


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
    return _as_merged(output, {**mark, "notes": [*mark["notes"], again]})


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


# -------------------------------------------------------------------------------------------------------- of a run


def size_of(text: str) -> int:
    """`5GB` (1e9 bytes), `500MB`, `4GiB` (2**30 bytes) in bytes. Raises `InputError` for anything else."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([kmg])(i?)b", text.strip().lower())
    size = float(found[1]) * (1024 if found[3] else 1000) ** " kmg".index(found[2]) if found else 0.0
    if size < 1:
        raise InputError(f"'{text}' is no size of a file.", "Write 5GB (1e9 bytes), 500MB or 4GiB (2**30 bytes).")
    return int(size)


@dataclass(frozen=True)
class Source:
    """One thing to merge: an adapter folder, and the run it belongs to where there is one."""

    adapter: Path
    run: Run | None

    @property
    def name(self) -> str:
        """What the user knows it by."""
        return self.run.name if self.run else self.adapter.name


def find_source(name: str | Path | Run) -> Source:
    """A run by folder or name, a checkpoint of it, or a folder with an adapter.

    Raises `InputError` for a fully fine-tuned run, and `RunError` for one without an adapter yet or nothing at all.
    """
    if not isinstance(name, Run) and (Path(name) / adapter_file.CONFIG).is_file():
        folder = Path(name).resolve()
        above = (Run(parent) for parent in folder.parents[:2] if (parent / "recipe.yaml").is_file())
        return Source(Path(name), next(above, None))
    run = name if isinstance(name, Run) else open_run(name)
    if isinstance(run.recipe().method, Full):
        raise InputError(
            f"{run.name} was fully fine-tuned, so there is nothing to merge.", f"Its model is ready in {run.model}."
        )
    if not run.adapter.is_dir():
        raise RunError(
            f"{run.folder} has no trained adapter yet.", f"Finish it: `finetune train --resume {run.folder}`."
        )
    return Source(run.adapter, run)


def merge(
    run: Run | str | Path,
    output: Path | None = None,
    *,
    dtype: str | None = None,
    others: Sequence[str | Path] = (),
    weights: Sequence[float] = (),
    base: str | None = None,
    max_shard: int | None = None,
    like_training: bool = False,
    verify: bool = True,
    name: str | None = None,
    progress: Progress | None = None,
) -> Merged:
    """Fold the adapter of a run into its base; by default into `<run>/merged` and in the type the recipe names.

    `run` may also be an adapter folder; `others` are added to it, each (it first) times its number in `weights`.
    `base` names the base of an adapter that came without a run. `name` is what the model card calls the result.

    Raises `InputError` for a fully fine-tuned run or what does not go together, `RunError` for a run without an
    adapter yet, and what `merge_adapter` raises.
    """
    sources = [find_source(each) for each in (run, *others)]
    if weights and len(weights) != len(sources):
        raise InputError(
            f"There are {len(sources)} adapters and {len(weights)} weights.", "Give one weight for each, in order."
        )
    first = sources[0]
    recipe = first.run.recipe() if first.run else None
    if output is None and (first.run is None or others or weights):
        raise InputError("This merge has no folder of its own.", "Name one with --output.")
    folder, model, notes = _base_of(sources, base)
    chosen = (dtype or (recipe.merge.dtype if recipe else "keep")).replace("keep", "auto")
    if chosen not in get_args(Dtype):
        raise InputError(f"'{chosen}' is no type to merge into.", "Give keep, float32, bfloat16 or float16.")
    target = output or sources[0].adapter.parent / "merged"
    said: list[str] = []
    trained = _four_bits(recipe, folder)
    if like_training and trained is None:
        raise InputError(
            f"{first.name} was not trained beside 4-bit weights.", "Leave --like-training out; it is for QLoRA runs."
        )
    rows = None
    if verify:
        rows, said = _rows(recipe, folder)
    options = Options(chosen, max_shard, rows, trained, like_training)  # type: ignore[arg-type]
    pairs = [(each.adapter, weight) for each, weight in zip(sources, weights or [1.0] * len(sources), strict=True)]
    about = _known(name or Path(target).resolve().name, model, folder, first.run)
    merged = merge_adapter(folder, pairs, target, options, about=about, progress=progress)
    return replace(merged, notes=(*notes, *said, *merged.notes))


def _base_of(sources: Sequence[Source], given: str | None) -> tuple[Path, str, list[str]]:
    """The base of all sources: its folder, its name, and what could not be held against it.

    Raises `InputError` when they were trained on different ones, or on another than the one given.
    """
    named = [(each.name, *_named_base(each)) for each in sources]
    model, revision = (given, None) if given is not None else (named[0][1], named[0][2])
    if model is None:
        raise InputError(f"The adapter {sources[0].adapter} does not say what its base is.", "Name it with --base.")
    folder = model_folder(model, revision)
    _check_unmerged(folder)
    own, notes = None, []
    for name, other, its_revision in named:
        if other is None or (other, its_revision) == (model, revision):
            continue
        theirs = _fingerprint_here(other, its_revision)
        own = own or weight_files.fingerprint(read_model(folder))
        if theirs is None:
            notes.append(f"{name} names {other} as its base; whether {model} is the same cannot be seen here.")
        elif theirs != own:
            raise InputError(
                f"The adapter of {name} was trained on {other}, and {model} holds other weights.",
                "Merge it into its own base; adapters for different bases cannot be added.",
            )
    return folder, model, notes


def _named_base(source: Source) -> tuple[str | None, str | None]:
    """The base that a run or an adapter names, and its revision."""
    if source.run:
        recipe = source.run.recipe()
        return recipe.model, recipe.load.revision
    config = read_json(source.adapter / adapter_file.CONFIG)
    return config.get("base_model_name_or_path") or None, config.get("revision")


def _fingerprint_here(model: str, revision: str | None) -> str | None:
    """The fingerprint of a model that lies on this machine; None for any other."""
    config = None if Path(model).is_dir() else hub_headers.cached_config(model, revision)
    try:
        folder = config.parent if config else model_folder(model, revision) if _is_local(model) else None
        return None if folder is None else weight_files.fingerprint(read_model(folder))
    except ModelError:
        return None


def _is_local(model: str) -> bool:
    return Path(model).exists() or model in embedded.NAMES


def _four_bits(recipe: Recipe | None, base: Path) -> dict[str, FourBits] | None:
    """How QLoRA held the weights of a run while it trained, by tensor; None for any other method."""
    if recipe is None or not isinstance(recipe.method, QLoRA):
        return None
    dtype = "float32" if recipe.load.dtype == "auto" else recipe.load.dtype
    how = FourBits(recipe.method.quant, recipe.method.double_quant, dtype)
    return {f"{linear.name}.weight": how for linear in read_facts(str(base)).linears(towers=True)}


def _rows(recipe: Recipe | None, base: Path) -> tuple[list[list[int]], list[str]]:
    """Token ids to prove a merge on: rows of the run, or sentences where they are not here any more."""
    if recipe is not None:
        few = min(recipe.data.limit or _PROOF_ROWS, _PROOF_ROWS)
        data = recipe.data.model_copy(update={"limit": few, "eval": None, "packing": False})
        try:
            train = prepare(recipe.model_copy(update={"data": data}), load_tokenizer(recipe)).train
            return [row.input_ids for row in train], []
        except FinetuneError as error:
            return _sentences(base), [f"Proved on sentences, not on the run's rows: {error.what}"]
    return _sentences(base), []


def _sentences(base: Path) -> list[list[int]]:
    """A few sentences in the base's tokens; numbers where it has no tokenizer."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(base)
        return [list(tokenizer(text)["input_ids"]) for text in _SENTENCES]
    except (OSError, ValueError, KeyError):
        vocabulary = read_facts(str(base)).vocab_size
        return [[(7919 * place + number) % vocabulary for place in range(24)] for number in range(4)]


def _known(name: str, model: str, folder: Path, run: Run | None) -> About:
    """What the card tells of a run and its base."""
    left = {key: run.read(f"{key}.json") for key in ("data", "result", "evaluation")} if run else {}
    return About(name, base_name(model), licence_of(model, folder), "", (), run.recipe() if run else None, **left)
