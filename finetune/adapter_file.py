"""What a peft LoRA adapter holds: its config, its scale, and the place of each of its tensors. No torch.

base_model.model.<module>.lora_A.weight           r x in        a pair: W + scale * B @ A
base_model.model.<module>.lora_B.weight           out x r
base_model.model.<module>.lora_embedding_A / _B   r x rows, width x r: the same for an embedding, transposed
base_model.model.<module>.lora_magnitude_vector   out           DoRA: the length of each row
base_model.model.<module>.base_layer.weight                     the base weight, kept beside a pair
base_model.model.<module>.weight                                trained whole (modules_to_save): replaces the base's
base_model.model.<module>.token_adapter.trainable_tokens_delta  some rows of an embedding: each replaces the base's
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.errors import InputError
from finetune.weight_files import FLOATS, Tensor, read_shard

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

_PREFIX = "base_model.model."
_PART = re.compile(
    r"(?P<module>.+)\.(?P<part>lora_[AB](?=\.weight)|lora_embedding_[AB]|lora_magnitude_vector)(\.weight)?"
)
# Each changes what the adapted model computes in a way that W + scale * B @ A does not say.
_UNSUPPORTED = (
    "alora_invocation_tokens", "arrow_config", "kasa_config", "layer_replication", "lora_bias", "megatron_config",
    "monteclora_config", "target_parameters", "use_bdlora", "use_qalora",
)  # fmt: skip
# These start values move a part of the base into the adapter: the change is relative to what is left of the base.
# What PiSSA and OLoRA leave follows from the weight alone; the others drew random numbers or asked data.
_RESIDUAL = ("pissa", "olora", "corda", "loftq", "lora_ga")
_KNOWN_RESIDUAL = ("pissa", "olora")
_KEPT = ".token_adapter.base_layer."
_TOKENS = ".token_adapter.trainable_tokens_delta"


@dataclass(frozen=True)
class Pair:
    """One low-rank change of one weight."""

    module: str
    a: Tensor
    b: Tensor
    scale: float
    embedding: bool
    magnitude: Tensor | None
    base: Tensor | None

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of B @ A."""
        return self.b.shape[0], self.a.shape[1]


@dataclass(frozen=True)
class Tokens:
    """Rows of an embedding or head that were trained alone: row `indices[n]` becomes row n of `values`."""

    module: str
    values: Tensor
    indices: tuple[int, ...]


@dataclass(frozen=True)
class Adapter:
    """An adapter by its headers: `pairs` and `tokens` by module, `whole` tensors by name, and keys that fit none."""

    folder: Path
    config: dict[str, Any]
    pairs: dict[str, Pair]
    tokens: dict[str, Tokens]
    whole: dict[str, Tensor]
    strange: tuple[str, ...]
    tensors: tuple[Tensor, ...]

    @property
    def start(self) -> str:
        """`pissa` or `olora` when the pairs stand beside what that start left of the base, else nothing."""
        start = str(self.config.get("init_lora_weights")).lower()
        return start if start in _KNOWN_RESIDUAL else ""

    @property
    def plain(self) -> bool:
        """Whether it only adds: then it can be weighted, and added to others."""
        magnitudes = any(pair.magnitude or pair.base for pair in self.pairs.values())
        return not (self.tokens or self.whole or self.start or magnitudes)

    @property
    def scale(self) -> float:
        """The scale of modules that no pattern names."""
        return lora_scale(self.config)


def pattern_value(patterns: Mapping[str, Any] | None, module: str, default: Any) -> Any:
    """The value of the first pattern that is a regular expression for the module's name or for its last parts.

    peft's own rule (`peft.utils.other.get_pattern_key`), for `rank_pattern` and `alpha_pattern`.
    """
    found = (value for key, value in (patterns or {}).items() if re.match(rf"(.*\.)?({key})$", module))
    return next(found, default)


def lora_scale(config: Mapping[str, Any], module: str = "") -> float:
    """The factor before B @ A: alpha / r (Hu et al. 2021), or alpha / sqrt(r) with rsLoRA (Kalajdzievski 2023)."""
    rank = pattern_value(config.get("rank_pattern"), module, config["r"])
    alpha = pattern_value(config.get("alpha_pattern"), module, config["lora_alpha"])
    return float(alpha / (math.sqrt(rank) if config.get("use_rslora") else rank))


def read_adapter(folder: Path) -> Adapter:
    """Read the headers of a peft LoRA adapter and check it against its own config.

    Raises `InputError` for a folder that is no adapter, another kind of adapter, a variant that cannot be merged,
    half a pair, a rank that contradicts the config, or a target module with nothing in the file.
    """
    config = read_config(folder)
    if not (folder / WEIGHTS).exists():
        raise InputError(
            f"The adapter {folder} has no {WEIGHTS}.",
            "Give a folder written by peft's save_pretrained; convert an adapter_model.bin by loading and saving it.",
        )
    tensors = tuple(read_shard(folder / WEIGHTS).tensors.values())
    parts, whole, strange = _sort(tensors)
    rows = {name: whole.pop(name) for name in [*whole] if name.endswith(_TOKENS)}
    pairs = {module: _pair(folder, config, module, found) for module, found in parts.items()}
    tokens = {
        module: Tokens(module, tensor, _indices(folder, config, module, tensor))
        for module, tensor in ((name.removesuffix(_TOKENS), tensor) for name, tensor in rows.items())
    }
    adapter = Adapter(folder, config, pairs, tokens, whole, strange, tensors)
    if wrong := next((tensor for tensor in tensors if tensor.dtype not in FLOATS), None):
        raise InputError(
            f"'{wrong.name}' of the adapter {folder} is stored as {wrong.dtype}.",
            "Save the adapter in float32, bfloat16 or float16.",
        )
    if not strange:  # with wrong keys every target looks empty, and the keys are the better message
        _check_filled(adapter)
    return adapter


_EXPONENTS = {
    "F64": ("<u8", 0x7FF0 << 48),
    "F32": ("<u4", 0x7F80 << 16),
    "F16": ("<u2", 0x7C00),
    "BF16": ("<u2", 0x7F80),
}
"""By type, how a value is read as an integer, and its exponent's bits: with all of them it is NaN or infinity."""


def check_finite(folder: Path) -> None:
    """Raise `InputError` when a tensor of the adapter in `folder` holds NaN or infinity."""
    import numpy as np

    for tensor in read_shard(folder / WEIGHTS).tensors.values():
        kind, exponent = _EXPONENTS.get(tensor.dtype, ("", 0))
        for chunk in tensor.chunks() if kind else ():
            if bool(((np.frombuffer(chunk, kind) & np.array(exponent, kind)) == exponent).any()):
                raise InputError(
                    f"'{tensor.name}' of the adapter {folder} holds NaN or infinity.",
                    "This training went wrong; take an earlier checkpoint.",
                )


def read_config(folder: Path) -> dict[str, Any]:
    """The config of a peft LoRA adapter. Raises `InputError` for any other, and for what peft would not write."""
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(
            f"{folder} is not an adapter: it has no {CONFIG}.", "Give the folder that peft's save_pretrained wrote."
        ) from None
    except (ValueError, OSError) as error:
        raise InputError(f"{folder / CONFIG} cannot be read: {error}.", "Save the adapter again.") from None
    if not isinstance(config, dict):
        raise InputError(f"{folder / CONFIG} holds no JSON object.", "Save the adapter again.")
    if config.get("peft_type") != "LORA":
        raise InputError(
            f"The adapter {folder} is of type {config.get('peft_type')}.", "Only LoRA adapters can be merged here."
        )
    if not all(isinstance(config.get(name), (int, float)) and config[name] > 0 for name in ("r", "lora_alpha")):
        raise InputError(f"{folder / CONFIG} has no usable r and lora_alpha.", "Save the adapter again.")
    if wrong := _misshapen(config):
        raise InputError(f"'{wrong}' in {folder / CONFIG} is not what peft writes there.", "Save the adapter again.")
    if used := [name for name in _UNSUPPORTED if config.get(name)]:
        raise InputError(
            f"The adapter {folder} uses {', '.join(used)}, which this merge does not know.",
            "Merge it with peft's merge_and_unload.",
        )
    start = str(config.get("init_lora_weights")).lower()
    if start.startswith(_RESIDUAL) and start not in _KNOWN_RESIDUAL:
        raise InputError(
            f"The adapter {folder} starts from '{start}', so it fits the residual of the base and not the base.",
            "Save it with path_initial_model_for_weight_conversion, which makes it a plain LoRA adapter.",
        )
    return dict(config)


def _misshapen(config: Mapping[str, Any]) -> str | None:
    """The first field whose value peft would not have written."""
    if not isinstance(config["r"], int):
        return "r"
    for name in ("rank_pattern", "alpha_pattern"):
        patterns = config.get(name) or {}
        if not isinstance(patterns, dict) or not all(
            _is_pattern(key) and isinstance(value, (int, float)) and value > 0 for key, value in patterns.items()
        ):
            return name
    targets = config.get("target_modules")
    if isinstance(targets, str) and not _is_pattern(targets):
        return "target_modules"
    base = config.get("base_model_name_or_path")
    return None if base is None or isinstance(base, str) else "base_model_name_or_path"


def _is_pattern(text: str) -> bool:
    try:
        re.compile(text)
    except re.error:
        return False
    return True


def _sort(tensors: Iterable[Tensor]) -> tuple[dict[str, dict[str, Tensor]], dict[str, Tensor], tuple[str, ...]]:
    """Tensors into parts of pairs by module, whole tensors by name, and keys that follow no rule."""
    parts: dict[str, dict[str, Tensor]] = {}
    whole: dict[str, Tensor] = {}
    strange = []
    for tensor in tensors:
        name = tensor.name.removeprefix(_PREFIX)
        found = _PART.fullmatch(name)
        if ".original_module." in name:  # the frozen copy that peft keeps beside a module trained whole
            continue
        if ".modules_to_save." in name:  # its second name, written beside the first when a vocabulary was resized
            continue
        if name == tensor.name or (".lora_" in name and not found):
            strange.append(tensor.name)
        elif found:
            parts.setdefault(found["module"], {})[found["part"].replace("lora_embedding", "embedding")] = tensor
        else:
            whole[name] = tensor
    for name in [name for name in whole if _KEPT in name]:  # the weight beside rows that were trained alone
        whole[name.replace(_KEPT, ".")] = whole.pop(name)
    for name in [name for name in whole if ".base_layer." in name]:
        module, _, leaf = name.rpartition(".base_layer.")
        if module in parts and leaf == "weight":
            parts[module]["base"] = whole.pop(name)
        else:  # a bias trained beside a pair
            whole[f"{module}.{leaf}"] = whole.pop(name)
    return parts, whole, tuple(strange)


def _pair(folder: Path, config: Mapping[str, Any], module: str, parts: Mapping[str, Tensor]) -> Pair:
    embedding = "embedding_A" in parts or "embedding_B" in parts
    a, b = (parts.get(f"{'embedding' if embedding else 'lora'}_{letter}") for letter in "AB")
    if a is None or b is None:
        raise InputError(
            f"The adapter {folder} has only one half of the pair A, B for '{module}'.", "Save the adapter again."
        )
    if len(a.shape) != 2 or len(b.shape) != 2:
        raise InputError(
            f"The adapter {folder} changes '{module}', whose A has shape {a.shape}.",
            "Only linear layers and embeddings can be merged here.",
        )
    rank = pattern_value(config.get("rank_pattern"), module, config["r"])
    if not rank == a.shape[0] == b.shape[1]:
        raise InputError(
            f"'{module}' of the adapter {folder} has A {a.shape} and B {b.shape}, and its config says rank {rank}.",
            f"Put the {CONFIG} beside it that was written with these weights.",
        )
    magnitude = parts.get("lora_magnitude_vector")
    if bool(config.get("use_dora")) != (magnitude is not None):
        raise InputError(
            f"The config of the adapter {folder} says use_dora {config.get('use_dora')}, and '{module}' has "
            f"{'a' if magnitude else 'no'} magnitude vector.",
            f"Put the {CONFIG} beside it that was written with these weights.",
        )
    return Pair(module, a, b, lora_scale(config, module), embedding, magnitude, parts.get("base"))


def _indices(folder: Path, config: Mapping[str, Any], module: str, values: Tensor) -> tuple[int, ...]:
    """Which rows `values` are: `trainable_token_indices` is a list for the input embedding, or a list by module."""
    said = config.get("trainable_token_indices") or []
    found = said if isinstance(said, list) else next((said[key] for key in said if _ends(module, key)), [])
    if len(values.shape) != 2 or len(found) != values.shape[0]:
        raise InputError(
            f"'{values.name}' of the adapter {folder} has shape {values.shape}, and its config names {len(found)} "
            "trainable tokens.",
            f"Put the {CONFIG} beside it that was written with these weights.",
        )
    return tuple(found)


def _ends(module: str, name: str) -> bool:
    return f".{module}".endswith(f".{name}")


def _check_filled(adapter: Adapter) -> None:
    """Refuse an adapter in which a name in `target_modules` or `modules_to_save` has nothing."""
    targets = adapter.config.get("target_modules")
    if isinstance(targets, str):  # a regular expression for the whole name, or peft's shorthand for all of them
        found = adapter.pairs and (
            targets == "all-linear" or any(re.fullmatch(targets, name) for name in adapter.pairs)
        )
        empty = [] if found else [targets]
    else:
        empty = [name for name in targets or () if not any(_ends(pair, name) for pair in adapter.pairs)]
    saved = adapter.config.get("modules_to_save") or ()
    empty += [name for name in saved if not any(f".{name}." in f".{tensor}" for tensor in adapter.whole)]
    tokens = adapter.config.get("trainable_token_indices") or {}
    named = tokens if isinstance(tokens, dict) else {"": tokens}
    empty += [
        name or "trainable_token_indices"
        for name in named
        if not any(_ends(m, name) or not name for m in adapter.tokens)
    ]
    if empty:
        names = ", ".join(f"'{name}'" for name in sorted(empty))
        raise InputError(
            f"The adapter {adapter.folder} names {names} in its config and holds nothing for it.",
            f"The file is incomplete or the {CONFIG} belongs to another one; save the adapter again.",
        )
