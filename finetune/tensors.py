"""One weight as a header describes it: name, shape, type; and what its name says of the part it belongs to."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import cache
from typing import Literal

from finetune.errors import ModelError

Group = Literal["embedding", "head", "attention", "mlp", "norm", "other"]

GROUPS: tuple[Group, ...] = ("embedding", "head", "attention", "mlp", "norm", "other")

# Bits per value by safetensors name; https://github.com/huggingface/safetensors `Dtype`.
_BITS = {"F64": 64, "F32": 32, "F16": 16, "BF16": 16, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F4": 4}
_SPELLINGS = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}


def dtype_bytes(dtype: str) -> float:
    """Bytes of one value; understands safetensors' spelling ("BF16") and torch's ("bfloat16").

    Raises `ModelError` for a type that no weight to be trained has.
    """
    bits = _BITS.get(_SPELLINGS.get(dtype, dtype))
    if bits is None:
        raise ModelError(f"There is no weight type '{dtype}'.", f"Known are {', '.join([*_SPELLINGS, *_BITS])}.")
    return bits / 8


@dataclass(frozen=True)
class Tensor:
    """One named weight as its header describes it; `dtype` in safetensors' spelling."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def size(self) -> int:
        """Number of values."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Bytes as stored."""
        return int(self.size * dtype_bytes(self.dtype))

    @property
    def module(self) -> str:
        """Name of the module that holds it: `model.norm.weight` -> `model.norm`."""
        return self.name.rpartition(".")[0]

    @property
    def is_linear(self) -> bool:
        """Whether it is the matrix of a Linear layer other than the output head."""
        matrix = len(self.shape) == 2 and self.name.endswith(".weight")
        # A tower's own embeddings count as "other", so the name has to say it once more.
        embedding = group_of(self.name) == "embedding" or "embed" in self.module.rpartition(".")[2]
        return matrix and not embedding and group_of(self.name) != "head" and not _EXPERT.search(self.module)

    @property
    def is_parameter(self) -> bool:
        """Whether this is a weight, not a buffer that older checkpoints also store."""
        rotary = "rotary_emb." in self.name or self.name.endswith(".inv_freq")
        mask = re.search(r"\.(attn|attention)\.(masked_)?bias$", self.name) and len(self.shape) in (0, 4)
        return self.dtype in _BITS and not rotary and not mask


# --------------------------------------------------------------------------------------------------- what a name says

TOWER = r"(^|.*\.)(vision|visual|audio|image|speech|multi_modal|multimodal|mm_)[^.]*\..*"
"""Full-match pattern of module names beside the text decoder; the same text serves peft as `exclude_modules`."""

_HEADS = ("lm_head", "embed_out", "output_layer")
_LAYER = re.compile(r"(?:^|\.)(?:layers|layer|h|blocks|block)\.(\d+)\.")
_EXPERT = re.compile(r"\.experts\.|\.(gate|router|router\.classifier|router\.layer)$")


@cache
def in_tower(name: str) -> bool:
    """Whether a tensor belongs to a vision or audio part."""
    return re.fullmatch(TOWER, name) is not None


@cache
def group_of(name: str) -> Group:
    """The group that a tensor of this name is counted in."""
    parts = name.split(".")[:-1]
    leaf = parts[-1] if parts else ""
    if in_tower(name):
        return "other"
    if leaf in _HEADS:
        return "head"
    if re.search(r"norm|^ln(_|\d|$)", leaf):
        return "norm"
    if "embed" in leaf or leaf in ("wte", "wpe"):
        return "embedding"
    if any(re.search(r"attn|attention", part) for part in parts):
        return "attention"
    if any(re.search(r"mlp|feed_forward|ffn|moe|^fc(\d|_)", part) for part in parts):
        return "mlp"
    return "other"


def layer_of(name: str) -> int | None:
    """The number of the decoder layer that a tensor lies in, counted from 0; None outside of them."""
    hit = None if in_tower(name) else _LAYER.search(name)
    return int(hit[1]) if hit else None
