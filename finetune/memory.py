"""Bytes, line by line, each with its formula in words and numbers.

Weights, gradients and optimizer state follow from shapes and are exact. Activations and logits are closed forms for
decoder layers of the Llama kind and say "estimate".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from finetune.facts import Facts
from finetune.method import adapter_shapes, storage_bytes, trainable_parameters
from finetune.recipe import Full, Method, QLoRA
from finetune.tensors import dtype_bytes, group_of

Bucket = Literal["weights", "gradients", "optimizer", "activations", "loss"]
BUCKETS: tuple[Bucket, ...] = ("weights", "gradients", "optimizer", "activations", "loss")

_BLOCK = 256  # values per scale of bitsandbytes' 8-bit optimizers
_SMALL = 4096  # tensors below this size keep 32-bit state there
_VOCABULARY_TILE = 32_768  # entries of the vocabulary that TRL's loss head scores at a time


@dataclass(frozen=True)
class Line:
    """One part of the memory: `bytes`, the bucket it belongs to, and the arithmetic behind it."""

    bucket: Bucket
    name: str
    bytes: int
    formula: str
    exact: bool = True


def static_lines(method: Method, facts: Facts, dtype: str, optimizer: str) -> list[Line]:
    """Weights, gradients and optimizer state of one device. Trained parameters are fp32."""
    return [*_weights(method, facts, dtype), *_gradients(method, facts), *_optimizer(method, facts, optimizer)]


def _weights(method: Method, facts: Facts, dtype: str) -> list[Line]:
    trainable = trainable_parameters(method, facts)
    if isinstance(method, Full):
        return [Line("weights", "weights", 4 * trainable, f"4 bytes x {trainable:,} (fp32 while trained)")]
    stored = storage_bytes(method, facts, dtype)
    each = dtype_bytes(dtype)
    lines = []
    if isinstance(method, QLoRA):
        lines.append(Line("weights", "4-bit weights", stored.packed, f"0.5 bytes x {stored.packed_parameters:,}"))
        kind = "8 bit per 64 weights, fp32 per 16,384" if method.double_quant else "fp32 per 64 weights"
        lines.append(Line("weights", "quantisation constants", stored.constants + stored.tables, kind))
    name = "other weights" if isinstance(method, QLoRA) else "frozen weights"
    lines.append(Line("weights", name, stored.plain, f"{each:g} bytes x {stored.plain_parameters:,}"))
    lines.append(Line("weights", "adapter", 4 * trainable, f"4 bytes x {trainable:,} (fp32)"))
    return lines


def _gradients(method: Method, facts: Facts) -> list[Line]:
    trainable = trainable_parameters(method, facts)
    return [Line("gradients", "gradients", 4 * trainable, f"4 bytes x {trainable:,} (fp32)")]


def _optimizer(method: Method, facts: Facts, optimizer: str) -> list[Line]:
    sizes = trained_sizes(method, facts)
    total = sum(size for size, _ in sizes)
    moments = {"lion": 1, "sgd": 0, "adafactor": 0}.get(optimizer.replace("paged_", "").split("_")[0], 2)
    paged = " (unified memory)" if optimizer.startswith("paged_") else ""
    if optimizer == "adafactor":
        factored = sum(4 * sum(shape) if len(shape) > 1 else 4 * size for size, shape in sizes)
        return [
            Line("optimizer", "Adafactor rows and columns", factored, "4 bytes x (rows + columns) of each weight")
        ]
    if moments == 0:
        return [Line("optimizer", "SGD", 0, "no state")]
    if optimizer.endswith("8bit"):
        embeddings = _embeddings(method, facts)
        state = moments * (sum(_in_8_bits(size) for size, _ in sizes) - sum(map(_in_8_bits, embeddings)))
        formula = f"{moments} x (1 byte + fp32 per {_BLOCK}) x {total - sum(embeddings):,}"
        lines = [Line("optimizer", f"{optimizer}{paged}", state, formula)]
        if embeddings:
            wide = sum(embeddings)
            formula = f"{moments} moments x 4 bytes x {wide:,}"
            lines.append(Line("optimizer", f"the embedding's in 32 bits{paged}", 4 * moments * wide, formula))
        return lines
    return [Line("optimizer", f"{optimizer}{paged}", 4 * moments * total, f"{moments} moments x 4 bytes x {total:,}")]


def _embeddings(method: Method, facts: Facts) -> list[int]:
    """Sizes of the trained embeddings, whose state transformers keeps in 32 bits (`Trainer.create_optimizer`)."""
    return [t.size for t in facts.tensors if group_of(t.name) == "embedding"] if isinstance(method, Full) else []


def _in_8_bits(size: int) -> int:
    """Bytes of one moment of a tensor."""
    return size + 4 * -(-size // _BLOCK) if size >= _SMALL else 4 * size


def trained_sizes(method: Method, facts: Facts) -> list[tuple[int, tuple[int, ...]]]:
    """(values, shape) of every trained tensor."""
    if isinstance(method, Full):
        return [(tensor.size, tensor.shape) for tensor in facts.tensors]
    sizes: list[tuple[int, tuple[int, ...]]] = []
    for shape in adapter_shapes(method, facts):
        pairs = [(shape.rank, shape.in_features), (shape.out_features, shape.rank)]
        sizes += [(a * b, (a, b)) for a, b in pairs]
        if method.variant == "dora":
            sizes.append((shape.out_features, (shape.out_features,)))
    return sizes


def activation_lines(
    method: Method, facts: Facts, *, dtype: str, rows: int, length: int, checkpointing: bool, eager: bool
) -> list[Line]:
    """What one forward pass of `rows` x `length` tokens leaves for the backward pass, and the loss head's tiles.

    Per token and layer, with 2-byte activations, hidden h, intermediate i, queries q = heads x dim, keys kv =
    kv_heads x dim, heads n and rank r (derived from the tensors that autograd saves in a Llama layer):
      full   2(8h + 4) + 4q + 4kv + 4n + 8i
      LoRA   2(4h + 4) + 4q + 4kv + 4n + 6i, and for fp32 adapters on all linear layers 20h + 4q + 4i + 28r
      with checkpointing 2h, and one layer of the above
    """
    h, i, n = facts.hidden_size, facts.intermediate_size, facts.heads
    q, kv = n * facts.head_dim, facts.kv_heads * facts.head_dim
    wide = dtype_bytes(dtype) / 2
    if isinstance(method, Full):
        layer = wide * (2 * (8 * h + 4) + 4 * q + 4 * kv + 4 * n + 8 * i)
    else:
        shapes = adapter_shapes(method, facts)
        layer = wide * (2 * (4 * h + 4) + 4 * q + 4 * kv + 4 * n + 6 * i)
        # Each adapter saves its own fp32 input (peft casts it) and the narrow product A x.
        layer += sum(4 * s.in_features + 4 * s.rank for s in shapes) / facts.layers
    if eager:
        layer += 2 * 2 * wide * n * length
    tokens = rows * length
    kept = f"{layer:,.0f} bytes x {facts.layers} layers"
    per_token = layer * facts.layers
    if checkpointing:
        per_token = 2 * wide * h * facts.layers + layer
        kept = f"({2 * wide * h:,.0f} bytes x {facts.layers} layers + one layer's {layer:,.0f})"
    tile = min(facts.vocab_size, _VOCABULARY_TILE)
    return [
        Line(
            "activations", "activations", int(per_token * tokens), f"{kept} x {rows} x {length:,} tokens", exact=False
        ),
        Line(
            "loss",
            "logits of the loss head",
            3 * 4 * tile * tokens,
            f"3 x 4 bytes x {tile:,} x {tokens:,}",
            exact=False,
        ),
    ]
