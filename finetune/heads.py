"""Output heads and losses of a training step in sizes: this toolkit's, TRL's, and transformers' own."""

from __future__ import annotations

from dataclasses import dataclass

from finetune.attention import Attention
from finetune.facts import Facts
from finetune.method import adapter_shapes, saved_tensors
from finetune.recipe import Full, Method
from finetune.tape import Parameter, Tensor

VOCABULARY_TILE = 32_768
TOKEN_TILE = 4_096
CHUNK = 128
"""Rows that `fast.head` takes at once: the least with which the products are about as fast as with more."""


def chunk_of(rows: int) -> int:
    """The size of equal chunks of at least `CHUNK` rows: a short last one would cost as much as a whole one."""
    return -(-rows // max(rows // CHUNK, 1))


@dataclass(frozen=True)
class Logits:
    """What a model does to its logits behind the head: times `scale`, then `cap` * tanh(logits / `cap`)."""

    scale: float = 1.0
    cap: float | None = None


def logits_of(facts: Facts) -> Logits | None:
    """Known for families whose forward was read and is tested; None for others, which may do anything."""
    config, kind = facts.config, facts.model_type
    if kind in ("llama", "mistral", "qwen2", "qwen3", "gemma", "phi3"):
        return Logits()
    if kind in ("gemma2", "gemma3_text"):
        return Logits(cap=config.get("final_logit_softcapping", 30.0 if kind == "gemma2" else None))
    if kind == "granite":
        return Logits(1 / config.get("logits_scaling", 1.0))
    if kind == "cohere":
        return Logits(config.get("logit_scale", 0.0625))
    return None


def head_is_frozen(facts: Facts, method: Method) -> bool:
    """Whether the output head is the base model's own matrix, which nothing trains."""
    if isinstance(method, Full):
        return False
    head = facts.head()
    touched = {shape.module for shape in adapter_shapes(method, facts)}
    touched |= {tensor.module for tensor in saved_tensors(method, facts)}
    return head is None or head.name not in touched  # tied to the embedding, which takes no adapter


class Heads(Attention):
    """From the last hidden states to the loss."""

    table: Parameter

    def _loss(self, last: list[Tensor]) -> tuple[Tensor, Tensor | None]:
        """Takes the last hidden states out of `last`: nobody else holds them when the model's forward is over."""
        loss = {
            "onepass": self._onepass, "supervised": self._supervised, "tiled": self._tiled, "library": self._library
        }[self.path.loss]  # fmt: skip
        return loss(last)

    def _head(self) -> Parameter:
        shape = (self.facts.vocab_size, self.facts.hidden_size)
        if self.full and self.facts.tied:
            return self.table
        return self._parameter("output head", shape, self.stored, trained=self.full)

    def _chosen(self, hidden: Tensor) -> Tensor:
        """The rows of supervised positions; their gradient is put back among zeros, and once more for the slice."""
        tape = self.tape
        out = tape.new("supervised rows", (self.batch.supervised, hidden.shape[-1]), hidden.width)
        shape = hidden.shape
        short = (shape[0], shape[1] - 1, shape[2])

        def rule(grad: Tensor) -> list[Tensor | None]:
            placed = tape.new("gradient", short, grad.width)
            back = tape.new("gradient", shape, grad.width)
            del placed
            return [back]

        return tape.record(out, [hidden.source], rule)

    def _scored(self, x: Tensor) -> Tensor:
        """`fast.last`: the supervised positions; their gradient is added into zeros."""
        tape, shape = self.tape, x.shape
        out = tape.new("supervised positions", (1, self.batch.supervised, shape[-1]), x.width)
        return tape.record(out, [x.source], lambda grad: [tape.new("gradient", shape, grad.width)])

    def _capped(self, logits: Tensor) -> Tensor:
        known = logits_of(self.facts)
        if known is None or not known.cap:
            return logits
        logits = self.tape.scaled(logits, "logits / cap")
        logits = self.tape.tanh(logits, "capped logits")
        return self.tape.scaled(logits, "capped logits")

    def _supervised(self, last: list[Tensor]) -> tuple[Tensor, Tensor | None]:
        """This toolkit's head: logits of supervised rows in fp32, log-softmax, gather.

        The loss is taken outside of the model, where autocast has ended.
        """
        hidden = last.pop()
        chosen = self._chosen(hidden)
        logits = self._capped(self._matmul(chosen, self._head(), "logits"))
        del chosen, hidden
        self._leave_autocast()
        wide = self.tape.cast(logits, 4, "logits in fp32")
        del logits
        return self._cross_entropy(wide), None

    def _onepass(self, last: list[Tensor]) -> tuple[Tensor, Tensor | None]:
        """This toolkit's head on a frozen matrix: a chunk's logits in two types, and the gradient of the rows."""
        tape, facts = self.tape, self.facts
        hidden = last.pop()
        flat = (self.batch.supervised, hidden.shape[-1])
        chosen = tape.view(hidden, flat) if self.last else self._chosen(hidden)
        del hidden
        self._leave_autocast()
        head = self._head()
        low = self.low or head.width
        rows = self._passed(chosen, low, "supervised rows")
        copy = tape.new("low copy of the head", head.shape, low) if head.width != low else None
        made = tape.new("gradient of supervised rows", chosen.shape, low) if chosen.source is not None else None
        size = (chunk_of(self.batch.supervised), facts.vocab_size)
        known = logits_of(facts)
        widths = [low, *([4] if low != 4 else []), *([4] if known and known.cap else [])]
        buffers = [tape.new("logits of one chunk", size, width) for width in widths]
        part = tape.new("gradient of one chunk", (size[0], facts.hidden_size), low) if made is not None else None
        del part, buffers, copy, rows
        loss = tape.new("loss", (1,), 4)
        given = chosen.width

        def rule(grad: Tensor) -> list[Tensor | None]:
            assert made is not None
            return [self._passed(tape.new("gradient", made.shape, low), given, "gradient")]

        return tape.record(loss, [chosen.source], rule), None

    def _passed(self, x: Tensor, width: int, what: str) -> Tensor:
        """x in another type, outside of autograd."""
        return x if x.width == width else self.tape.new(what, x.shape, width)

    def _cross_entropy(self, logits: Tensor, held: tuple[Tensor, ...] = ()) -> Tensor:
        """log_softmax keeps its output; backward: the gathered gradient among zeros, then log_softmax's own."""
        tape = self.tape
        out = tape.new("log-probabilities", logits.shape, 4)
        loss = tape.new("loss", (1,), 4)
        kept = Tensor(out.storage, out.shape, 4)
        shape = logits.shape

        def rule(grad: Tensor) -> list[Tensor | None]:
            nonlocal kept
            sparse = tape.new("gradient of log-probabilities", shape, 4)
            made = tape.new("gradient of logits", shape, 4)
            del sparse
            return [made]

        return tape.record(loss, [logits.source], rule)

    def _library(self, last: list[Tensor]) -> tuple[Tensor, Tensor | None]:
        """transformers' own loss: all logits, in fp32 beside the model's type."""
        logits = self._capped(self._matmul(last.pop(), self._head(), "logits"))
        wide = self.tape.cast(logits, 4, "logits in fp32")
        return self._cross_entropy(wide), logits

    def _tiled(self, last: list[Tensor]) -> tuple[Tensor, Tensor | None]:
        """TRL's head: tiles of 4,096 tokens by 32,768 entries of the vocabulary, made again in the backward pass."""
        tape, facts = self.tape, self.facts
        hidden = last.pop()
        chosen = self._chosen(hidden)
        tokens = chosen.shape[0]
        width = self.low or chosen.width
        tile = (min(tokens, TOKEN_TILE), VOCABULARY_TILE)
        head = self._head()
        buffer = tape.new("logits of one tile", tile, width)
        if head.width != width:
            tape.passing("part of the head", min(facts.vocab_size, VOCABULARY_TILE) * facts.hidden_size * width)
        del buffer
        loss = tape.new("loss", (1,), 4)
        kept = Tensor(chosen.storage, chosen.shape, chosen.width)
        shape, given = chosen.shape, chosen.width
        trained, needs = head.trained, chosen.source is not None

        def rule(grad: Tensor) -> list[Tensor | None]:
            nonlocal kept
            total = tape.new("gradient", shape, 4) if needs else None
            own = tape.new("gradient", head.shape, 4) if trained else None
            work = tape.new("logits of one tile", tile, width)
            if head.width != width:
                tape.passing("part of the head", min(facts.vocab_size, VOCABULARY_TILE) * facts.hidden_size * width)
            del work
            back = tape.cast(total, given) if total is not None else None
            del total
            return [own, back]

        tape.record(loss, [head if trained else None, chosen.source], rule)
        return loss, None
