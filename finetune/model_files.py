"""The files beside the weights of a merged model: config, generation config, tokenizer, chat template, licence.

The tokenizer is the adapter's where it brings one, since it was trained with that one; what the adapter does not
bring comes from the base. transformers is imported only to ask whether it would accept a generation config.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.errors import ModelError

CONFIG, GENERATION, MARK = "config.json", "generation_config.json", "finetune_merge.json"

_TOKENIZER = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "vocab.txt", "merges.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "tekken.json",
)  # fmt: skip
_TEMPLATES = ("chat_template.jinja", "chat_template.json")
_NAMED_TEMPLATES = "additional_chat_templates"
# Weights in any format, a cached folder's own marker, and the base's model card, which describes another model.
_LEFT_OUT = re.compile(
    r"adapter_config\.json|complete|.*\.(safetensors|bin|pt|pth|gguf|onnx|h5|msgpack|ckpt|npz)|.*\.index\.json|README.*|\..*",
    re.IGNORECASE,
)
# Sampling switches and the values with which transformers ignores them.
_SAMPLING: dict[str, tuple[Any, ...]] = {
    "temperature": (None, 1.0), "top_p": (None, 1.0), "top_k": (None, 50), "min_p": (None,), "top_h": (None,),
    "typical_p": (None, 1.0), "epsilon_cutoff": (None, 0.0), "eta_cutoff": (None, 0.0),
}  # fmt: skip
_KEPT = {"eos_token_id", "bos_token_id", "pad_token_id", "max_length", "do_sample"}


@dataclass(frozen=True)
class SideFiles:
    """What is written (name -> JSON) and what is copied (name -> where from)."""

    written: dict[str, dict[str, Any]]
    copied: dict[str, Path]
    notes: tuple[str, ...]

    @property
    def stops(self) -> list[int]:
        """The tokens at which a server ends an answer."""
        said = self.written.get(GENERATION, {}).get("eos_token_id", self.written[CONFIG].get("eos_token_id"))
        return _ids(said)

    @property
    def bytes(self) -> int:
        """Size of the copied files."""
        return sum(file.stat().st_size for file in self.copied.values())


def read_json(file: Path) -> dict[str, Any]:
    """One JSON object; raises `ModelError` naming the file."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"The file {file} is missing.", "Give a complete model folder.") from None
    except ValueError as error:
        raise ModelError(f"{file} cannot be read: {error}.", "Correct this file or download it again.") from None
    if not isinstance(value, dict):
        raise ModelError(f"{file} holds no JSON object.", "Correct this file or download it again.")
    return value


def side_files(
    base: Path, adapter: Path, *, dtype: str | None, untied: bool, vocabulary: int | None = None
) -> SideFiles:
    """Everything beside the weights, decided before the first weight is read.

    `dtype` is the new type of all weights, or None when each keeps its own; `untied` says that the result has an
    output head of its own, `vocabulary` that it has another number of tokens.
    """
    config = read_json(base / CONFIG)
    trained = _ids(_optional_json(adapter / GENERATION).get("eos_token_id"))
    generation, notes = _generation(_optional_json(base / GENERATION), config, trained)
    if config.pop("quantization_config", None) is not None:
        notes.append("quantization_config is left out of config.json: the merged weights are not quantised.")
    if dtype is not None:
        _set_dtype(config, dtype)
    if untied:
        for part in (config, config.get("text_config")):
            if part is config or (isinstance(part, dict) and "tie_word_embeddings" in part):
                part["tie_word_embeddings"] = False
        notes.append("tie_word_embeddings is now false: the trained input embedding and output head differ.")
    if vocabulary is not None:
        for part in (config, config.get("text_config")):
            if isinstance(part, dict) and "vocab_size" in part:
                part["vocab_size"] = vocabulary
        notes.append(f"The vocabulary has {vocabulary:,} tokens now, as the adapter brings them.")
    if set(trained) - set(_ids(config.get("eos_token_id"))):
        config["eos_token_id"] = _union(_ids(config.get("eos_token_id")), trained)
    written, copied = {CONFIG: config}, _copied(base, adapter)
    if generation:
        written[GENERATION] = generation
    if trained and (ending := _ending(copied, trained[0])):
        for name, found in _with_ending(copied, ending).items():
            written[name] = found
            del copied[name]
            notes.append(f"{name}: eos_token is now {ending}, at which answers were trained to end.")
    return SideFiles(written, copied, tuple(notes))


def _ending(copied: Mapping[str, Path], token: int) -> str | None:
    """The text of a token that was added to the vocabulary, unless a chat template says `eos_token` itself.

    Such a template would print another text with another `eos_token`.
    """
    config = _optional_json(copied.get("tokenizer_config.json", Path("/nowhere")))
    templates = [config.get("chat_template")]
    templates += [file.read_text(encoding="utf-8") for name, file in copied.items() if "chat_template" in name]
    if "eos_token" in str(templates):
        return None
    added = _optional_json(copied.get("tokenizer.json", Path("/nowhere"))).get("added_tokens") or []
    known = {each.get("id"): each.get("content") for each in added if isinstance(each, dict)}
    decoder = config.get("added_tokens_decoder") or {}
    found = known.get(token) or (decoder.get(str(token)) or {}).get("content")
    return found if isinstance(found, str) else None


def _with_ending(copied: Mapping[str, Path], ending: str) -> dict[str, dict[str, Any]]:
    """The tokenizer's files that name another `eos_token`, with this one: llama.cpp's converter reads only these."""
    found = {}
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        config = _optional_json(copied[name]) if name in copied else {}
        said = config.get("eos_token")
        if "eos_token" in config and (said.get("content") if isinstance(said, dict) else said) != ending:
            found[name] = {**config, "eos_token": {**said, "content": ending} if isinstance(said, dict) else ending}
    return found


def _optional_json(file: Path) -> dict[str, Any]:
    return read_json(file) if file.exists() else {}


def _set_dtype(config: dict[str, Any], dtype: str) -> None:
    """Write the type under the name the config uses: `dtype`, or `torch_dtype` before transformers 5."""
    keys = [key for key in ("dtype", "torch_dtype") if key in config] or ["dtype"]
    for key in keys:
        config[key] = dtype
    for part in config.values():
        if isinstance(part, dict) and ("dtype" in part or "torch_dtype" in part):
            _set_dtype(part, dtype)


# -------------------------------------------------------------------------------------------------- generation config


def _ids(value: Any) -> list[int]:
    """Token ids of an `eos_token_id`: a number, a list, or nothing; what is no number is left out."""
    return [each for each in (value if isinstance(value, list) else [value]) if type(each) is int]


def _union(first: list[int], second: list[int]) -> int | list[int]:
    both = list(dict.fromkeys([*first, *second]))
    return both[0] if len(both) == 1 else both


def _generation(
    generation: dict[str, Any], config: Mapping[str, Any], trained: list[int]
) -> tuple[dict[str, Any], list[str]]:
    """The base's generation config with the trained stop tokens, in a form that transformers agrees to save."""
    notes = []
    known = _ids(generation.get("eos_token_id", config.get("eos_token_id")))
    if new := [token for token in trained if token not in known]:
        generation = {**generation, "eos_token_id": _union(known, trained)}
        notes.append(f"Generation also stops at the trained end tokens {new}.")
    if generation:
        generation, repairs = repair_generation(generation)
        notes += repairs
    return generation, notes


def repair_generation(generation: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """A generation config that transformers accepts, and what was changed.

    transformers loads a config with `temperature: 0.6` and no `do_sample`, and refuses to save it. Servers use such a
    temperature whatever `do_sample` says, so the switch is turned on. Other rejected fields are left out one by one.
    """
    from transformers import GenerationConfig

    fixed, notes = dict(generation), []
    used = [key for key, ignored in _SAMPLING.items() if fixed.get(key) not in ignored]
    if fixed.get("temperature") == 0:  # means greedy, and is refused when sampling
        fixed = {key: value for key, value in fixed.items() if key not in used}
        fixed["do_sample"] = False
        notes.append(f"{GENERATION}: temperature 0 means greedy; do_sample is false and {', '.join(used)} left out.")
    elif used and fixed.get("do_sample") is not True:
        fixed["do_sample"] = True
        notes.append(f"{GENERATION}: do_sample is now true, without which {', '.join(used)} would not be accepted.")
    while True:
        try:
            GenerationConfig(**fixed).validate(strict=True)  # type: ignore[no-untyped-call]
            return fixed, notes
        except (ValueError, TypeError) as error:
            named = [key for key in re.findall(r"`(\w+)`", str(error)) if key in fixed and key not in _KEPT]
            if not named:
                return fixed, [*notes, f"{GENERATION}: transformers does not accept it: {error}."]
            notes.append(f"{GENERATION}: {named[0]} {fixed.pop(named[0])} is left out; transformers refuses it.")


# ------------------------------------------------------------------------------------------------------- copied files


def _copied(base: Path, adapter: Path) -> dict[str, Path]:
    """Files of the base except weights; tokenizer and chat template from the adapter's folder where it has them."""
    files = {
        file.name: file for file in sorted(base.iterdir()) if file.is_file() and not _LEFT_OUT.fullmatch(file.name)
    }
    for name in (CONFIG, GENERATION, MARK):
        files.pop(name, None)
    own = {name: adapter / name for name in _TOKENIZER if (adapter / name).is_file()}
    if own:  # whole sets only: files of two tokenizers do not fit together
        files = {name: file for name, file in files.items() if name not in _TOKENIZER}
    template = {name: adapter / name for name in _TEMPLATES if (adapter / name).is_file()}
    has_template = bool(template or _optional_json(adapter / "tokenizer_config.json").get("chat_template"))
    if has_template:
        files = {name: file for name, file in files.items() if name not in _TEMPLATES}
    more = sorted(((adapter if has_template else base) / _NAMED_TEMPLATES).glob("*.jinja"))
    return {**files, **own, **template, **{f"{_NAMED_TEMPLATES}/{file.name}": file for file in more}}
