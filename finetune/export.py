"""A run for other programs: a GGUF file for llama.cpp, a folder for Ollama, an adapter that vLLM loads.

    --to gguf             the merged model by llama.cpp's converter; loaded back, its logits are compared
    --to gguf --adapter   the adapter alone; read back, every B @ A must have the size it had
    --to ollama           the GGUF file and a Modelfile with template, stops and system message
    --to vllm             the adapter with one rank and one scale, and the tokenizer beside it

What is written appears under its name when it is whole and has been checked.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from finetune import adapter_file, chat
from finetune.adapter_file import read_adapter
from finetune.converter import LORA, MODEL, convert
from finetune.embedded import cache_folder, make_once
from finetune.errors import FinetuneError, InputError
from finetune.generate import Target, find_target, load_tokenizer_of
from finetune.gguf_check import FAR, check_adapter, check_model
from finetune.merge import merge
from finetune.model_files import CONFIG, GENERATION, read_json
from finetune.ollama import modelfile
from finetune.plain_adapter import plain_copy
from finetune.vllm_rules import max_lora_rank, obstacle
from finetune.weight_files import file_sha256, parents_of

Kind = Literal["f16", "q8_0", "bf16", "f32"]
Say = Callable[[str], None]


@dataclass(frozen=True)
class Exported:
    """What an export wrote. `difference` and `same` compare logits and most likely tokens, where they were."""

    files: tuple[Path, ...]
    difference: float | None = None
    same: float | None = None
    notes: tuple[str, ...] = ()

    def document(self) -> dict[str, Any]:
        """What `--json` prints."""
        return {**asdict(self), "files": [str(file) for file in self.files]}

    def lines(self) -> list[str]:
        """What to tell a person."""
        lines = [*self.notes]
        if self.same is not None:
            checked = f"Loaded back by transformers: the most likely token is the same in {self.same:.1%} of places, "
            lines.insert(0, f"{checked}logits differ by {self.difference:.2%} of their spread.")
        elif self.difference is not None:
            lines.insert(0, f"Read back: every change of a weight has its size to {self.difference:.2%}.")
        return lines


@dataclass(frozen=True)
class ForVllm:
    """A folder that vLLM loads with `--enable-lora`, and the `--max-lora-rank` it needs."""

    folder: Path
    max_lora_rank: int


def export(
    name: str | Path,
    to: str,
    output: Path | None = None,
    *,
    kind: str = "f16",
    adapter: bool = False,
    llama_cpp: Path | None = None,
    say: Say = lambda _: None,
) -> Exported:
    """Write a run (or a model folder) for `to`: gguf, ollama or vllm; by default into `<run>/<to>`.

    `kind` is the type of the weights in a GGUF file, `adapter` takes the adapter instead of the merged model, and
    `llama_cpp` names a checkout whose converter is used. Raises `InputError` for what cannot be written in that form
    or is there already, and `FinetuneError` when the converter fails or its result is not the same model.
    """
    if to not in ("gguf", "ollama", "vllm"):
        raise InputError(f"Nothing is known of '{to}'.", "Give --to gguf, ollama or vllm.")
    if kind not in get_args(Kind):
        raise InputError(f"'{kind}' is no type of GGUF weights here.", f"Give {', '.join(get_args(Kind))}.")
    target = find_target(name)
    folder = output or (target.run.folder / to if target.run else Path(f"{target.name}-{to}"))
    if to == "vllm":
        return _export_vllm(target, folder)
    if to == "ollama":
        return _export_ollama(target, folder, kind, llama_cpp, say)
    file = folder / f"{target.name}-{'adapter-' if adapter else ''}{kind}.gguf"
    with _new(file) as part:
        if adapter:
            return _adapter_gguf(target, file, part, kind, llama_cpp)
        return _model_gguf(target, file, part, kind, llama_cpp, say)


@contextmanager
def _new(path: Path) -> Iterator[Path]:
    """A file or folder beside `path` that takes its name when the block ends well, and else disappears."""
    if path.exists():
        raise InputError(f"{path} exists already.", "Name another --output, or remove it.")
    part = path.with_name(f".{path.name}.part-{os.getpid()}")
    with parents_of(path):
        try:
            yield part
            part.rename(path)
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            part.unlink(missing_ok=True)
            raise


# -------------------------------------------------------------------------------------------------------------- GGUF


def _whole(target: Target) -> Target:
    """The target with whole weights; a run's adapter is merged first."""
    if target.adapter is None:
        return target
    if target.run is None:
        raise InputError(
            f"{target.adapter} is an adapter without its run.",
            f"Merge it first: `finetune merge {target.adapter} --output FOLDER`, then export FOLDER.",
        )
    return Target(target.name, merge(target.run).folder, run=target.run)


def _model_gguf(target: Target, file: Path, part: Path, kind: str, llama_cpp: Path | None, say: Say) -> Exported:
    target = _whole(target)
    say("Converting with llama.cpp's converter (the first time it is fetched, about 80 MB) ...")
    with _with_trained_end(target) as folder:
        convert(
            MODEL,
            [str(folder), "--outfile", str(part), "--outtype", kind, "--model-name", target.name],
            checkout=llama_cpp,
        )
    say("Loading it back ...")
    found = check_model(part, target, kind)
    if found is None:
        note = "transformers cannot read this architecture from GGUF, so the file was not compared."
        return Exported((file,), notes=(note,))
    return Exported((file,), *found)


@contextmanager
def _with_trained_end(target: Target) -> Iterator[Path]:
    """The model folder, its tokenizer naming the trained end of a turn as eos: the one end that GGUF surely keeps."""
    tokenizer = load_tokenizer_of(target)
    ends = chat.end_of_turn_ids(tokenizer)
    if ends[0] == tokenizer.eos_token_id:
        yield target.model
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / target.name
        folder.mkdir()
        for file in target.model.iterdir():
            (folder / file.name).symlink_to(file.resolve())
        for name in ("tokenizer_config.json", CONFIG, "generation_config.json"):
            if not (target.model / name).is_file():
                continue
            settings = read_json(target.model / name)
            word = tokenizer.convert_ids_to_tokens(ends[0])
            settings |= {"eos_token": word} if name.startswith("tok") else {"eos_token_id": ends[0]}
            (folder / name).unlink()
            (folder / name).write_text(json.dumps(settings), encoding="utf-8")
        yield folder


def _adapter_gguf(target: Target, file: Path, part: Path, kind: str, llama_cpp: Path | None) -> Exported:
    source = _adapter_of(target)
    with tempfile.TemporaryDirectory() as temporary:
        plain = Path(temporary) / target.name
        plain.mkdir()
        plain_copy(source, plain, _base_of(target))
        convert(
            LORA,
            [str(plain), "--base", str(target.model), "--outfile", str(part), "--outtype", kind],
            checkout=llama_cpp,
        )
    difference = check_adapter(part, source)
    if not difference <= FAR[kind]:
        raise FinetuneError(
            f"The GGUF adapter is not the adapter: its changes differ by {difference:.1%} in size.",
            "The converter does not handle this adapter rightly; export the merged model instead.",
        )
    return Exported((file,), difference, notes=(f"Use it with the GGUF file of its base, {_base_of(target)}.",))


def _adapter_of(target: Target) -> Path:
    if target.adapter is None:
        raise InputError(
            f"{target.name} has no adapter; its weights are whole.",
            "Export the model itself to gguf or ollama; vLLM serves its folder as it is.",
        )
    return target.adapter


def _base_of(target: Target) -> str:
    """What a config may say of the base: the recipe's name for it, not a path of this machine."""
    return target.run.recipe().model if target.run else target.model.name


# ------------------------------------------------------------------------------------------------------------ Ollama


def _export_ollama(target: Target, folder: Path, kind: str, llama_cpp: Path | None, say: Say) -> Exported:
    tokenizer = load_tokenizer_of(target)
    weights = f"{target.name}-{kind}.gguf"
    text, notes = modelfile(tokenizer, weights, system=target.system, context=_context(target))
    with _new(folder) as part:
        part.mkdir()
        done = _model_gguf(target, folder / weights, part / weights, kind, llama_cpp, say)
        (part / "Modelfile").write_text(text, encoding="utf-8")
    how = f"ollama create {target.name.lower()} -f {folder / 'Modelfile'}"
    return Exported(
        (folder / weights, folder / "Modelfile"), done.difference, done.same, (*done.notes, *notes, f"Next: {how}")
    )


def _context(target: Target) -> int:
    """Tokens for prompt and answer: twice the longest row of training, at least 4,096, at most what the model has."""
    config = read_json(target.model / CONFIG)
    most = config.get("max_position_embeddings") or config.get("text_config", {}).get("max_position_embeddings")
    wanted = max(4096, 2 * target.run.recipe().data.max_length if target.run else 0)
    return min(wanted, most) if isinstance(most, int) else wanted


# -------------------------------------------------------------------------------------------------------------- vLLM


def vllm_adapter(target: Target) -> ForVllm:
    """The adapter of a target as vLLM loads it, made once in the cache. Raises `InputError` when vLLM cannot."""
    source = _adapter_of(target)
    rank = _vllm_rank(source)
    made_of = "-".join(file_sha256(source / name)[:16] for name in (adapter_file.WEIGHTS, adapter_file.CONFIG))
    folder = make_once(cache_folder() / f"vllm-{made_of}", lambda aside: _write_vllm(target, aside))
    return ForVllm(folder, rank)


def _vllm_rank(source: Path) -> int:
    adapter = read_adapter(source)
    rank = max((pair.a.shape[0] for pair in adapter.pairs.values()), default=0)
    dora = any(pair.magnitude for pair in adapter.pairs.values())
    allowed = max_lora_rank(rank)
    if (why := obstacle(rank=rank, dora=dora, whole=bool(adapter.whole or adapter.tokens))) or allowed is None:
        raise InputError(
            f"vLLM would not load the adapter {source}, because {why}.", "Merge it and serve the merged model there."
        )
    return allowed


def _write_vllm(target: Target, folder: Path) -> None:
    source = _adapter_of(target)
    plain_copy(source, folder, str(read_json(source / adapter_file.CONFIG).get("base_model_name_or_path") or ""))
    load_tokenizer_of(target).save_pretrained(folder)
    if (source / GENERATION).is_file():
        shutil.copyfile(source / GENERATION, folder / GENERATION)


def _export_vllm(target: Target, folder: Path) -> Exported:
    rank = _vllm_rank(_adapter_of(target))
    with _new(folder) as part:
        part.mkdir()
        _write_vllm(target, part)
    base = read_json(folder / adapter_file.CONFIG)["base_model_name_or_path"]
    how = (
        f"vllm serve {base} --enable-lora --max-lora-rank {rank} --lora-modules {target.name}={folder} "
        f"--tokenizer {folder}"
    )
    if (folder / GENERATION).is_file():  # the stop tokens that were trained
        how += f" --generation-config {folder}"
    return Exported(tuple(sorted(folder.iterdir())), notes=(f"Next: {how}",))
