"""The verb `merge`: runs, checkpoints or adapter folders -> their base, rows to prove the result on, and `fold`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import get_args

from finetune import adapter_file, embedded, hub_headers, weight_files
from finetune.combine import density_of
from finetune.data import prepare
from finetune.errors import FinetuneError, InputError, ModelError, RunError
from finetune.facts import Facts, read_facts
from finetune.fold import Merged, Options, check_unmerged, merge_adapter
from finetune.hub_weights import open_weights
from finetune.merge_folder import Progress
from finetune.merge_layout import FourBits
from finetune.model import load_tokenizer, model_folder
from finetune.model_card import About, base_name, licence_of
from finetune.origin import commit_of, other_weights, read_origin
from finetune.recipe import Dtype, Full, QLoRA, Recipe
from finetune.run import Run, open_run, run_around
from finetune.weight_files import Shard, read_model

_PROOF_ROWS = 8
_SENTENCES = (
    "The capital of France is Paris, and the capital of Italy is",
    "To merge an adapter into a model, the product of two small matrices is added to each weight.",
    "1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144,",
    'def add(a, b):\n    """The sum of two numbers."""\n    return',
)


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
        return Source(Path(name), run_around(Path(name)))
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
    combine: str = "sum",
    density: float | None = None,
    verify: bool = True,
    name: str | None = None,
    progress: Progress | None = None,
) -> Merged:
    """Fold the adapter of a run into its base; by default into `<run>/merged` and in the type the recipe names.

    `run` may also be an adapter folder; `others` are added to it, each (it first) times its number in `weights`, or
    put together in another of the ways in `finetune.combine`, some of which keep only the share `density` of values.
    `base` names the base of an adapter that came without a run. `name` is what the model card calls the result.

    Raises `InputError` for a fully fine-tuned run or what does not go together, `RunError` for a run without an
    adapter yet, and what `merge_adapter` raises.
    """
    sources = [find_source(each) for each in (run, *others)]
    if weights and len(weights) != len(sources):
        raise InputError(
            f"There are {len(sources)} adapters and {len(weights)} weights.", "Give one weight for each, in order."
        )
    density_of(combine, density, len(sources))
    first = sources[0]
    recipe = first.run.recipe() if first.run else None
    if output is None and (first.run is None or others or weights):
        raise InputError("This merge has no folder of its own.", "Name one with --output.")
    model, revision = _base_name(sources, base)
    chosen = (dtype or (recipe.merge.dtype if recipe else "keep")).replace("keep", "auto")
    if chosen not in get_args(Dtype):
        raise InputError(f"'{chosen}' is no type to merge into.", "Give keep, float32, bfloat16 or float16.")
    target = output or sources[0].adapter.parent / "merged"
    pairs = [(each.adapter, weight) for each, weight in zip(sources, weights or [1.0] * len(sources), strict=True)]
    folder = model_folder(model, revision, weights=False)
    check_unmerged(folder)
    with open_weights(model, folder) as shards:
        notes = _check_bases(sources, model, revision, shards)
        trained = _four_bits(recipe, model, folder)
        if like_training and trained is None:
            raise InputError(
                f"{first.name} was not trained beside 4-bit weights.",
                "Leave --like-training out; it is for QLoRA runs.",
            )
        rows, said = _rows(recipe, model, folder) if verify else (None, [])
        options = Options(chosen, max_shard, rows, trained, like_training, combine, density)  # type: ignore[arg-type]
        about = _known(name or Path(target).resolve().name, model, folder, first.run)
        merged = merge_adapter(folder, pairs, target, options, shards=shards, about=about, progress=progress)
    return replace(merged, notes=(*notes, *said, *merged.notes))


def _base_name(sources: Sequence[Source], given: str | None) -> tuple[str, str | None]:
    """The base that is given or that the first source names, and its revision."""
    model, revision = _named_base(sources[0])
    if given not in (None, model):
        model, revision = given, None
    if model is None:
        raise InputError(f"The adapter {sources[0].adapter} does not say what its base is.", "Name it with --base.")
    return model, revision


def _check_bases(sources: Sequence[Source], model: str, revision: str | None, shards: Sequence[Shard]) -> list[str]:
    """Hold the base's weights against those that each source was trained on; returns what could not be seen.

    Raises `InputError` when they were trained on different ones, or on another than the one given.
    """
    own = cache(partial(weight_files.fingerprint, shards))  # reads the weights, also those still on the hub
    on_hub = any(tensor.arrive for shard in shards for tensor in shard.tensors.values())
    notes = []
    for source in sources:
        origin, (other, its_revision) = read_origin(source.adapter, source.run), _named_base(source)
        same = other is None or (other, its_revision) == (model, revision)
        wrong = False
        if origin is not None:
            by_commit = on_hub and same and origin.commit is not None  # the hub gives a commit its own weights
            wrong = not by_commit and origin.sha256 != own()
        elif not same and other is not None:
            theirs = _fingerprint_here(other, its_revision)
            wrong = theirs is not None and theirs != own()
            if theirs is None:
                said = f"{source.name} names {other} as its base; whether {model} is the same cannot be seen here."
                notes.append(said)
        if wrong and origin is not None and other == model:
            raise other_weights(source.name, origin, model)
        if wrong:
            raise InputError(
                f"The adapter of {source.name} was trained on {other or 'another base'}, and {model} holds other "
                "weights.",
                "Merge it into its own base; adapters for different bases cannot be added.",
            )
        if origin is None and source.run is not None:
            notes.append(
                f"{source.name} does not say what the weights of its base were; whether {model} still holds them "
                "cannot be seen."
            )
    return notes


def _named_base(source: Source) -> tuple[str | None, str | None]:
    """The base that a run or an adapter names, and its revision: the commit that it had at the training, if known."""
    origin = read_origin(source.adapter, source.run)
    commit = origin.commit if origin else None
    if source.run:
        recipe = source.run.recipe()
        return recipe.model, commit or recipe.load.revision
    config = adapter_file.read_config(source.adapter)
    return config.get("base_model_name_or_path") or None, commit or config.get("revision")


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


def _facts(model: str, folder: Path) -> Facts:
    """Of the base, whether its weights are here or still on the hub."""
    commit = None if Path(model).exists() else commit_of(folder)
    return read_facts(model, commit) if commit else read_facts(str(folder))


def _four_bits(recipe: Recipe | None, model: str, folder: Path) -> dict[str, FourBits] | None:
    """How QLoRA held the weights of a run while it trained, by tensor; None for any other method."""
    if recipe is None or not isinstance(recipe.method, QLoRA):
        return None
    dtype = "float32" if recipe.load.dtype == "auto" else recipe.load.dtype
    how = FourBits(recipe.method.quant, recipe.method.double_quant, dtype)
    return {f"{linear.name}.weight": how for linear in _facts(model, folder).linears(towers=True)}


def _rows(recipe: Recipe | None, model: str, folder: Path) -> tuple[list[list[int]], list[str]]:
    """Token ids to prove a merge on: rows of the run, or sentences where they are not here any more."""
    if recipe is not None:
        few = min(recipe.data.limit or _PROOF_ROWS, _PROOF_ROWS)
        data = recipe.data.model_copy(update={"limit": few, "eval": None, "packing": False})
        try:
            train = prepare(recipe.model_copy(update={"data": data}), load_tokenizer(recipe)).train
            return [row.input_ids for row in train], []
        except FinetuneError as error:
            return _sentences(model, folder), [f"Proved on sentences, not on the run's rows: {error.what}"]
    return _sentences(model, folder), []


def _sentences(model: str, folder: Path) -> list[list[int]]:
    """A few sentences in the base's tokens; numbers where it has no tokenizer."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        return [list(tokenizer(text)["input_ids"]) for text in _SENTENCES]
    except (OSError, ValueError, KeyError):
        vocabulary = _facts(model, folder).vocab_size
        return [[(7919 * place + number) % vocabulary for place in range(24)] for number in range(4)]


def _known(name: str, model: str, folder: Path, run: Run | None) -> About:
    """What the card tells of a run and its base."""
    left = {key: run.read(f"{key}.json") for key in ("data", "result", "evaluation")} if run else {}
    return About(name, base_name(model), licence_of(model, folder), "", (), run.recipe() if run else None, **left)
