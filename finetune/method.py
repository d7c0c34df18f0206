"""All that differs between full fine-tuning, LoRA and QLoRA: targets, trainable counts, storage, peft's own settings.

target_modules          which Linear layers get an adapter, as the name endings that peft matches
adapter_shapes          the adapters that come of it, layer by layer
trainable_parameters    their exact count
storage_bytes           the frozen weights in memory, packed or not
scale                   the factor before B @ A, said once
why_alone               whether adapters that share an input run together
lora_config, quantization_config    the same in peft's and bitsandbytes' words
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from finetune.errors import InputError
from finetune.facts import Facts, Linear
from finetune.gguf_blocks import BLOCK as GGUF_BLOCK
from finetune.recipe import Full, LoRA, Method, QLoRA, Recipe
from finetune.steps import Weights
from finetune.tensors import TOWER, Tensor, dtype_bytes, group_of, layer_of

if TYPE_CHECKING:
    import torch
    from peft import LoraConfig
    from transformers import BitsAndBytesConfig

# ------------------------------------------------------------------------------------------------------------ targets

# What architectures call their layers. Endings are long enough to tell attention's from the MLP's: GPT-2 calls both
# `c_proj`, and Falcon's `dense` would also match a pooler.
_QUERY = ("q_proj",)
_KEY = ("k_proj",)
_VALUE = ("v_proj",)
_FUSED_QKV = ("qkv_proj", "query_key_value", "c_attn", "Wqkv")
_OUTPUT = (
    "o_proj",
    "attn.out_proj",
    "self_attn.out_proj",
    "attention.out_proj",
    "attention.dense",
    "self_attention.dense",
    "self_attn.dense",
    "attn.c_proj",
)
_MLP = (
    "gate_proj",
    "up_proj",
    "gate_up_proj",
    "down_proj",
    "fc1",
    "fc2",
    "fc_in",
    "fc_out",
    "mlp.c_fc",
    "mlp.c_proj",
    "dense_h_to_4h",
    "dense_4h_to_h",
)


def target_modules(method: Method, facts: Facts) -> tuple[str, ...]:
    """The name endings of the layers that get an adapter; empty for full fine-tuning.

    Where query, key and value are one fused layer, `qv` takes that layer, as peft does: there is nothing smaller.
    Raises `InputError` when the strategy finds no such layers, or a listed name matches no Linear layer.
    """
    if isinstance(method, Full):
        return ()
    if not isinstance(method.targets, str):
        return _listed(method.targets, facts)
    names = facts.linear_names
    query_value = _present(_QUERY, names) + _present(_VALUE, names)
    fused = _present(_FUSED_QKV, names)
    attention = (_present(_QUERY + _KEY + _VALUE, names) + fused, _present(_OUTPUT, names))
    wanted = {
        "qv": (query_value or fused,),
        "attention": attention,
        "attention+mlp": (*attention, _present(_MLP, names)),
    }[method.targets]
    if facts.has_experts and method.targets == "attention+mlp":
        raise InputError(
            f"targets: attention+mlp cannot reach the experts of {facts.model}: they are no Linear layers.",
            "Take targets: attention, or list the Linear layers to adapt by name.",
        )
    if not all(wanted):
        raise InputError(
            f"targets: {method.targets} does not suit {facts.model}, which has {_kinds(facts.linears())}.",
            "List the ones to adapt by name under method.targets, or take a smaller strategy.",
        )
    return tuple(name for role in wanted for name in role)


def _present(wanted: Iterable[str], names: Sequence[str]) -> tuple[str, ...]:
    return tuple(target for target in wanted if any(_matches(name, target) for name in names))


def _matches(module: str, target: str) -> bool:
    """peft's rule for a list: the whole name, or an ending after a dot."""
    return module == target or module.endswith(f".{target}")


def _listed(names: Sequence[str], facts: Facts) -> tuple[str, ...]:
    """Names from the recipe, each held against the model."""
    linears = [*facts.linears(), *filter(None, [facts.head()])]
    wrong = [name for name in names if not any(_matches(linear.name, name) for linear in linears)]
    if facts.tied and any(name.rpartition(".")[2] == "lm_head" for name in wrong):
        raise InputError(
            f"lm_head of {facts.model} is its input embedding too, so merging an adapter would change both.",
            "Take lm_head out of method.targets.",
        )
    if wrong:
        known = {part: None for linear in linears for part in (linear.name.rpartition(".")[2], linear.name)}
        near = dict.fromkeys(hit for name in wrong for hit in difflib.get_close_matches(name, known, n=2, cutoff=0.6))
        raise InputError(
            f"method.targets names {_quoted(wrong)}, and {facts.model} has no Linear layer of that name.",
            f"Did you mean {_quoted(near)}?" if near else f"It has {_kinds(linears)}.",
        )
    return tuple(dict.fromkeys(names))


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(f"'{name}'" for name in names)


def _kinds(linears: Sequence[Linear]) -> str:
    """The layers' last names, each once: `q_proj, k_proj, ...`."""
    return ", ".join(dict.fromkeys(linear.name.rpartition(".")[2] for linear in linears)) or "none"


# ----------------------------------------------------------------------------------------------------------- adapters


class AdapterShape(NamedTuple):
    """One adapter: A is [rank, in_features], B is [out_features, rank]."""

    module: str
    rank: int
    in_features: int
    out_features: int


def adapter_shapes(method: Method, facts: Facts) -> list[AdapterShape]:
    """The adapters that peft will build, in the model's order; none for full fine-tuning."""
    if isinstance(method, Full):
        return []
    targets = target_modules(method, facts)
    endings = tuple(f".{target}" for target in targets)
    linears = [*facts.linears(), *filter(None, [facts.head()])]
    return [
        AdapterShape(linear.name, method.rank, linear.in_features, linear.out_features)
        for linear in linears
        if linear.name.endswith(endings) or linear.name in targets
    ]


def trained_tensors(method: Method, facts: Facts) -> list[tuple[str, tuple[int, ...]]]:
    """Name and shape of every trained tensor, in the model's order.

    LoRA trains A [rank, in] and B [out, rank] of each adapted layer (Hu et al. 2021, section 4.2); DoRA a magnitude
    per output besides (Liu et al. 2024, arXiv:2402.09353). Full trains every parameter, a tied head once. The
    weights of `modules_to_save` come last.
    """
    key = ("trained", repr(method))
    if key not in facts.memo:
        facts.memo[key] = _trained_tensors(method, facts)
    return list(facts.memo[key])


def _trained_tensors(method: Method, facts: Facts) -> list[tuple[str, tuple[int, ...]]]:
    if isinstance(method, Full):
        return [(tensor.name, tensor.shape) for tensor in facts.tensors]
    found: list[tuple[str, tuple[int, ...]]] = []
    for shape in adapter_shapes(method, facts):
        found.append((f"{shape.module}.lora_A.weight", (shape.rank, shape.in_features)))
        found.append((f"{shape.module}.lora_B.weight", (shape.out_features, shape.rank)))
        if method.variant == "dora":
            found.append((f"{shape.module}.lora_magnitude_vector.weight", (shape.out_features,)))
    return [*found, *((tensor.name, tensor.shape) for tensor in saved_tensors(method, facts))]


def saved_tensors(method: LoRA | QLoRA, facts: Facts) -> list[Tensor]:
    """The weights of `modules_to_save`, of which peft trains a copy in fp32 beside the frozen original.

    Raises `InputError` for a name that the model does not have, and for a half of tied embedding and head.
    """
    found: list[Tensor] = []
    for name in method.modules_to_save:
        hits = [tensor for tensor in facts.tensors if _matches(tensor.module, name)]
        tied = facts.tied and (name.rpartition(".")[2] == "lm_head" or any(_embeds(tensor) for tensor in hits))
        if tied:
            raise InputError(
                f"{name} of {facts.model} is input embedding and output head in one, and a trained copy would be "
                "only one of the two.",
                "Take it out of method.modules_to_save, or train with method.kind: full.",
            )
        if not hits:
            near = difflib.get_close_matches(name, _module_names(facts), n=1, cutoff=0.6)
            raise InputError(
                f"method.modules_to_save names '{name}', and {facts.model} has no module of that name.",
                f"Did you mean '{near[0]}'?" if near else "Name a module such as lm_head or embed_tokens.",
            )
        found += hits
    return found


def _embeds(tensor: Tensor) -> bool:
    return group_of(tensor.name) == "embedding"


def _module_names(facts: Facts) -> list[str]:
    """The last name of every module that holds weights, each once."""
    return list(dict.fromkeys(tensor.module.rpartition(".")[2] for tensor in facts.tensors))


def trainable_parameters(method: Method, facts: Facts) -> int:
    """Exact number of trained parameters."""
    return sum(math.prod(shape) for _, shape in trained_tensors(method, facts))


def scale(method: LoRA | QLoRA) -> float:
    """The factor before B @ A: alpha / r, for rslora alpha / sqrt(r) (Kalajdzievski 2023, arXiv:2312.03732)."""
    return method.alpha / (math.sqrt(method.rank) if method.variant == "rslora" else method.rank)


FEW_TOKENS = 32
"""Below this many in a pass, finding out which adapters run together costs more than it saves."""


def why_alone(recipe: Recipe, facts: Facts) -> str | None:
    """Why peft's own code runs the adapters of a resolved recipe; None where `fast.adapter` does."""
    method = recipe.method
    products = {"bf16": "bfloat16", "fp16": "float16"}.get(recipe.train.precision)
    if isinstance(method, Full) or not recipe.fast.adapters:
        return "there are none" if isinstance(method, Full) else "fast.adapters is false"
    if recipe.fast.compile:
        return "fast.compile is true"
    if method.dropout:
        return "method.dropout is above 0"
    if method.variant == "dora":
        return "method.variant is dora"
    if facts.conv1d:
        return "the model's layers are no Linear layers"
    if products is None and recipe.load.dtype != "float32":
        return "16-bit weights without autocast get adapters in fp32"
    if isinstance(method, QLoRA) and recipe.load.dtype != (products or "float32"):
        return "4-bit products have another type than the rest"
    return None


# ------------------------------------------------------------------------------------------------------------ storage

BLOCK = 64
"""Weights that share one scale; bitsandbytes' default and the QLoRA paper's."""

SCALE_BLOCK = 256
"""Scales that share one second-level scale under double quantisation."""


@dataclass(frozen=True)
class Storage:
    """Bytes of the model's own weights as they lie in memory during training, without adapters.

    `tables` are the value tables that bitsandbytes keeps with every packed tensor.
    """

    packed_parameters: int
    packed: int
    constants: int
    tables: int
    plain_parameters: int
    plain: int

    @property
    def total(self) -> int:
        """All bytes."""
        return self.packed + self.constants + self.tables + self.plain


def storage_bytes(method: Method, facts: Facts, dtype: str) -> Storage:
    """The model's weights in memory, with what is not packed in `dtype` ("bfloat16" or "BF16").

    Only QLoRA packs, and only the Linear layers: embeddings, norms, biases and the head stay in `dtype`.
    """
    linears = facts.linears(towers=True) if isinstance(method, QLoRA) else []
    sizes = [linear.out_features * linear.in_features for linear in linears]
    double = isinstance(method, QLoRA) and method.double_quant
    plain = facts.parameters - sum(sizes)
    return Storage(
        packed_parameters=sum(sizes),
        packed=sum(_ceil(size, 2) for size in sizes),
        constants=sum(constant_bytes(size, double_quant=double) for size in sizes),
        tables=len(sizes) * 4 * (16 + 256 * double),
        plain_parameters=plain,
        plain=int(plain * dtype_bytes(dtype)),
    )


def held_sizes(size: int, held: Weights) -> list[int]:
    """Bytes of the tensors that hold a weight of `size` values as its file does (`fast.held`).

    blocks: a byte a code, then fp32 scales and offsets; half: the 16-bit numbers.
    """
    if held == "blocks":
        return [size, 4 * (size // GGUF_BLOCK), 4 * (size // GGUF_BLOCK)]
    return [2 * size]


def held_linears(facts: Facts, every: int) -> list[Linear]:
    """The Linear layers of every `every`-th decoder layer, whose weights may be held."""
    return [linear for linear in facts.linears() if (layer_of(linear.name + ".") or 0) % every == 0]


def held_room(facts: Facts, every: int) -> int:
    """Bytes of the room in which held weights are made dense: the largest layer in fp32."""
    sizes = [linear.out_features * linear.in_features for linear in held_linears(facts, every)]
    return 4 * max(sizes, default=0)


def constant_bytes(size: int, *, double_quant: bool) -> int:
    """Bytes of the scales of one packed tensor of `size` weights (Dettmers et al. 2023, section 3).

    Single: an fp32 scale per 64 weights. Double: one byte per 64 weights, an fp32 scale per 256 of those bytes, and
    the fp32 mean that was taken off before. Per weight 4/64, against 1/64 + 4/(64*256): 0.373 bit less.
    """
    scales = _ceil(size, BLOCK)
    return scales + 4 * _ceil(scales, SCALE_BLOCK) + 4 if double_quant else 4 * scales


def _ceil(size: int, by: int) -> int:
    return -(-size // by)


# -------------------------------------------------------------------------------------------- in the libraries' words


def lora_config(method: LoRA | QLoRA, facts: Facts) -> LoraConfig:
    """peft's settings for this method on this model.

    Raises `InputError` for what `target_modules` refuses.
    """
    from peft import LoraConfig

    return LoraConfig(
        task_type="CAUSAL_LM",
        r=method.rank,
        # A whole number stays one in adapter_config.json: servers read it as an integer.
        lora_alpha=int(method.alpha) if float(method.alpha).is_integer() else method.alpha,  # type: ignore[arg-type]
        lora_dropout=method.dropout,
        target_modules=list(target_modules(method, facts)),
        modules_to_save=list(method.modules_to_save) or None,
        # A decoder's layer names also occur in vision towers, which text does not train.
        exclude_modules=TOWER if facts.has_towers else None,
        fan_in_fan_out=facts.conv1d,
        bias="none",
        use_rslora=method.variant == "rslora",
        use_dora=method.variant == "dora",
    )


def quantization_config(
    method: QLoRA, compute_dtype: str | torch.dtype, storage_dtype: str | torch.dtype = "uint8"
) -> BitsAndBytesConfig:
    """transformers' settings for 4-bit loading; products are computed in `compute_dtype`, "bfloat16" for example.

    FSDP shards packed weights only under a float `storage_dtype`, the same as the other weights' type.
    """
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(  # type: ignore[no-untyped-call]
        load_in_4bit=True,
        bnb_4bit_quant_type=method.quant,
        bnb_4bit_use_double_quant=method.double_quant,
        bnb_4bit_compute_dtype=compute_dtype,
        bnb_4bit_quant_storage=storage_dtype,
    )
