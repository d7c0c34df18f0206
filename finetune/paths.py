"""Recipe + device -> the path that the trainer takes, and the micro-batch it takes it with.

The trainer asks here too (which loss, are rows laid flat), so that what is planned is what runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from finetune.device import Device
from finetune.facts import Facts
from finetune.heads import head_is_frozen, logits_of
from finetune.method import why_alone
from finetune.recipe import Full, LoRA, Recipe
from finetune.steps import Attention, Batch, Loss, Path, Weights

# Families whose masks follow position_ids in eager and sdpa attention; each is tested against separate rows.
KEEPS_ROWS_APART = ("llama", "gemma", "gemma2", "gemma3_text", "mistral", "qwen2", "qwen3", "phi3")
WORTH_SHARING = 16
"""Tokens to save at least when a common beginning runs once: it takes one more kernel in every layer."""
LONGEST_IN_BLOCKS = 768
"""Tokens of rows up to which attention's backward pass is left to blocks: of most lengths the quicker way
(`scripts/bench_attention.py`)."""
_AUTOCAST = {"bf16": "bfloat16", "fp16": "float16", "fp32": None}


@dataclass(frozen=True)
class Lengths:
    """Tokens and trained tokens of the rows that will be trained, as (tokens, trained) pairs, longest first.

    `of` is how many rows the pairs stand for: all of them, or the ones read of a larger file. `ends` are the tokens
    up to the last one that predicts a label, as (tokens, trained) pairs too, and `shared` how many tokens all rows
    begin with before any predicts one: what `batches.laid_out` runs. Without them rows are taken to run whole.
    """

    pairs: tuple[tuple[int, int], ...]
    source: str
    of: int
    ends: tuple[tuple[int, int], ...] = ()
    shared: int = 0

    @classmethod
    def read(
        cls, pairs: Sequence[tuple[int, int]], source: str, of: int | None = None, ends: Sequence[int] = (),
        shared: int = 0,
    ) -> Lengths:  # fmt: skip
        """Sorts the rows; `ends` stand in the order of `pairs`."""
        run = [
            (end, trained) for end, (_, trained) in zip(ends or [tokens for tokens, _ in pairs], pairs, strict=True)
        ]
        return cls(
            tuple(sorted(pairs, reverse=True)), source, of or len(pairs), tuple(sorted(run, reverse=True)), shared
        )

    @property
    def longest(self) -> int:
        """Tokens of the longest row."""
        return self.pairs[0][0]

    @property
    def mean(self) -> float:
        """Tokens of a row on average."""
        return sum(tokens for tokens, _ in self.pairs) / len(self.pairs)

    @property
    def trained_share(self) -> float:
        """Share of the tokens that give a loss."""
        return sum(trained for _, trained in self.pairs) / sum(tokens for tokens, _ in self.pairs)

    def histogram(self, bins: int = 8) -> list[tuple[int, int]]:
        """(upper end in tokens, rows) of equal bins up to the longest row."""
        width = -(-self.longest // bins)
        counts = [0] * bins
        for tokens, _ in self.pairs:
            counts[min((tokens - 1) // width, bins - 1)] += 1
        return [((number + 1) * width, count) for number, count in enumerate(counts)]


def packing_of(recipe: Recipe, model_type: str, device: Device) -> tuple[Literal["step", False], str]:
    """What data.packing: auto means here, and why. It never packs across steps, which would change them."""
    if model_type not in KEEPS_ROWS_APART:
        return False, f"models of type {model_type} are not known to keep rows apart that lie end to end"
    if device.kind == "cpu":
        return "step", "on a CPU the mask that keeps rows apart costs less than padding"
    if recipe.load.attention == "flash_attention_2":
        return "step", "flash-attention takes the ends of rows instead of padding"
    return False, "padded rows of about one length cost less here than one mask over all of them"


def lies_flat(recipe: Recipe) -> bool:
    """Whether the rows of a micro-batch are laid end to end instead of padded to the longest."""
    return recipe.data.packing is True or recipe.data.packing == "step"


def batch_of(recipe: Recipe, facts: Facts, device: Device, lengths: Lengths | None = None) -> Batch:
    """The largest micro-batch of a run: the longest rows together, or `max_length` while the rows are not known.

    What rows share is what all of them do; those of one micro-batch may share more, so it may run fewer tokens.
    """
    rows = int(recipe.train.micro_batch)
    longest = min(recipe.data.max_length, facts.max_position or recipe.data.max_length)
    if lengths is None:
        taken, spared = [(longest, longest - 1)], 0
    else:
        apart = attention_of(recipe, facts, device) == "documents"
        known = lengths.ends if apart and recipe.fast.tail and lengths.ends else lengths.pairs
        taken = [(min(tokens, longest), min(trained, longest - 1)) for tokens, trained in known[:rows]]
        spared = (rows - 1) * lengths.shared if apart and recipe.fast.prefix else 0
    more = rows - len(taken)  # counted, not listed: a trial of `most_rows` may ask for billions
    trained = max(sum(count for _, count in taken) + more * taken[-1][1], 1)
    if lies_flat(recipe):
        tokens = sum(tokens for tokens, _ in taken) + more * taken[-1][0]
        return Batch(1, tokens - (spared if spared >= WORTH_SHARING else 0), trained, flat=True)
    return Batch(rows, taken[0][0], trained, padded=taken[0][0] != taken[-1][0])


def path_of(recipe: Recipe, facts: Facts, device: Device) -> Path:
    """The path of a resolved recipe."""
    train = recipe.train
    checkpointing = int(train.checkpointing) if train.checkpointing != "auto" else 0
    card: dict[str, Any] = {}
    if device.capability is not None:
        card["capability"] = device.capability
    if device.multiprocessors is not None:
        card["multiprocessors"] = device.multiprocessors
    micro = int(train.micro_batch)
    return Path(
        device=device.kind,
        weights=recipe.load.dtype,
        autocast=_AUTOCAST[train.precision],
        attention=attention_of(recipe, facts, device),
        loss=loss_of(recipe, facts, device),
        checkpointing=checkpointing,
        optimizer=train.optimizer,
        accumulates=train.batch_size > micro * device.count,
        grouped=why_alone(recipe, facts) is None,
        lean=lean_of(recipe, facts),
        turned=turned_of(recipe, facts, device),
        blocks=blocks_of(recipe, facts, device),
        last=not checkpointing and last_of(recipe, facts, device),
        held=held_of(recipe, facts, device),
        held_every=max(int(recipe.fast.weights), 1) if recipe.fast.weights != "auto" else 1,
        **card,
    )


def lean_of(recipe: Recipe, facts: Facts) -> bool:
    """Whether norms and gated MLPs keep only what they take in: around adapters, in families that are known."""
    activation = facts.config.get("hidden_activation") or facts.config.get("hidden_act", "silu")
    if facts.model_type in ("gemma", "gemma2", "gemma3_text"):
        activation = facts.config.get("hidden_activation") or "gelu_pytorch_tanh"
    known = facts.model_type in KEEPS_ROWS_APART and activation in ("silu", "swish", "gelu_pytorch_tanh")
    return known and recipe.fast.layers and why_alone(recipe, facts) is None


def turned_of(recipe: Recipe, facts: Facts, device: Device) -> bool:
    """Whether attention row by row turns queries and keys as well: where these and the tables have one type."""
    kind = facts.model_type in ("llama", "mistral", "qwen2", "gemma")
    weights = _weights_of(recipe)
    one_type = weights == (_AUTOCAST[recipe.train.precision] or weights)
    return kind and one_type and not recipe.fast.compile and attention_of(recipe, facts, device) == "documents"


def _weights_of(recipe: Recipe) -> str:
    """The type that weights have in a layer; trained ones are fp32."""
    return "float32" if isinstance(recipe.method, Full) else recipe.load.dtype


def blocks_of(recipe: Recipe, facts: Facts, device: Device) -> bool:
    """Whether attention row by row goes backward in blocks of queries: fp32 throughout, and rows are short."""
    wide = _weights_of(recipe) == "float32" and recipe.train.precision == "fp32"
    short = recipe.data.max_length <= LONGEST_IN_BLOCKS
    return wide and short and attention_of(recipe, facts, device) == "documents"


def last_of(recipe: Recipe, facts: Facts, device: Device) -> bool:
    """Whether the last layer's MLP runs on supervised positions only, where its layers are not run again."""
    kind = facts.model_type in ("llama", "mistral", "qwen2", "gemma")
    flat = attention_of(recipe, facts, device) == "documents"
    asked = recipe.fast.tail and not recipe.fast.compile
    return kind and flat and asked and loss_of(recipe, facts, device) == "onepass"


def held_of(recipe: Recipe, facts: Facts, device: Device) -> Weights:
    """How the layers' frozen weights lie in memory: "" in the type of the products, else as in their file."""
    asked = recipe.fast.weights not in ("auto", False)
    return "" if not asked or why_not_held(recipe, facts, device) else _kept_as(facts)


def why_not_held(recipe: Recipe, facts: Facts, device: Device) -> str | None:
    """Why `fast.weights` does not apply, or None: products are fp32, and nobody but `fast.adapter` runs them."""
    method = recipe.method
    if device.kind != "cpu" or recipe.load.dtype != "float32" or recipe.train.precision != "fp32":
        return "products are not fp32 on a CPU"
    if not isinstance(method, LoRA):
        return "the method is not lora"
    if method.modules_to_save:
        return "method.modules_to_save trains whole modules"
    if (alone := why_alone(recipe, facts)) is not None:
        return alone
    if facts.model_type not in KEEPS_ROWS_APART or facts.has_towers:
        return f"models of type {facts.model_type} were not tried with it"
    return None if _kept_as(facts) else "the file holds its weights in fp32"


def _kept_as(facts: Facts) -> Weights:
    """How the file has the weights, where that is smaller than fp32."""
    if facts.blocks:
        return "blocks"
    return "half" if {tensor.dtype for tensor in facts.tensors} in ({"BF16"}, {"F16"}) else ""


def loss_of(recipe: Recipe, facts: Facts, device: Device) -> Loss:
    """On a CPU the toolkit's own heads on supervised rows; TRL's would score every position there."""
    if device.kind != "cpu":
        return "tiled"
    known = logits_of(facts) is not None and head_is_frozen(facts, recipe.method)
    return "onepass" if recipe.fast.head and known else "supervised"


def attention_of(recipe: Recipe, facts: Facts, device: Device) -> Attention:
    """What runs under transformers' name for it."""
    if recipe.load.attention == "eager":
        return "eager"
    if device.kind == "cpu":
        known = facts.model_type in KEEPS_ROWS_APART and not facts.config.get("use_bidirectional_attention")
        apart = known and lies_flat(recipe) and not _slides(recipe, facts)
        return "documents" if recipe.fast.attention and apart else "cpu"
    # torch's flash kernel needs 16-bit inputs and a card from 2020 on; older ones take the memory-efficient kernel.
    modern = device.capability is None or device.capability >= (8, 0)
    wide = recipe.train.precision == "fp32" and recipe.load.dtype == "float32"
    return "flash" if modern and not wide else "efficient"


def _slides(recipe: Recipe, facts: Facts) -> bool:
    """Whether a row may be longer than what a token of some layer sees. Qwen has a window that it does not use."""
    config, kind = facts.config, facts.model_type
    if not config.get("use_sliding_window", kind not in ("qwen2", "qwen3")):
        return False
    window = config.get("sliding_window", 4096 if kind in ("mistral", "gemma3_text") else None)
    return window is not None and int(window) < min(recipe.data.max_length, facts.max_position or 2**62)


def in_words(path: Path, batch: Batch) -> str:
    """One sentence on what the plan models."""
    attention = {
        "eager": "eager attention (scores in full)", "math": "torch's portable attention",
        "cpu": "torch's CPU attention kernel", "documents": "torch's CPU attention kernel for each row by itself",
        "flash": "the flash attention kernel",
        "efficient": "the memory-efficient attention kernel",
    }[path.attention]  # fmt: skip
    if path.blocks:
        attention += ", backward in blocks"
    loss = {
        "onepass": "logits of supervised rows and their gradient in one pass",
        "supervised": "logits of supervised rows only", "tiled": "TRL's loss head in tiles",
        "library": "transformers' loss over all logits",
    }[path.loss]  # fmt: skip
    rows = (
        "rows laid end to end"
        if batch.flat
        else "rows padded to the longest"
        if batch.padded
        else "rows of one length"
    )
    cast = f"{path.autocast} products" if path.autocast else f"{path.weights} throughout"
    return f"{attention}, {loss}, {rows}, {cast}"
