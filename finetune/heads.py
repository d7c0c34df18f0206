"""Output heads and losses of a training step in sizes: this toolkit's, TRL's, and transformers' own."""

from __future__ import annotations

from finetune.attention import Attention
from finetune.tape import Parameter, Tensor

VOCABULARY_TILE = 32_768
TOKEN_TILE = 4_096


class Heads(Attention):
    """From the last hidden states to the loss."""

    table: Parameter

    def _loss(self, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        return {"supervised": self._supervised, "tiled": self._tiled, "library": self._library}[self.path.loss](
            hidden
        )

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

    def _capped(self, logits: Tensor) -> Tensor:
        if self.facts.model_type != "gemma2":
            return logits
        logits = self.tape.scaled(logits, "logits / cap")
        logits = self.tape.tanh(logits, "capped logits")
        return self.tape.scaled(logits, "capped logits")

    def _supervised(self, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        """This toolkit's head: logits of supervised rows in fp32, log-softmax, gather.

        The loss is taken outside of the model, where autocast has ended.
        """
        chosen = self._chosen(hidden)
        logits = self._capped(self._matmul(chosen, self._head(), "logits"))
        del chosen
        self._leave_autocast()
        wide = self.tape.cast(logits, 4, "logits in fp32")
        del logits
        return self._cross_entropy(wide), None

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

    def _library(self, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        """transformers' own loss: all logits, in fp32 beside the model's type."""
        logits = self._capped(self._matmul(hidden, self._head(), "logits"))
        wide = self.tape.cast(logits, 4, "logits in fp32")
        return self._cross_entropy(wide), logits

    def _tiled(self, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        """TRL's head: tiles of 4,096 tokens by 32,768 entries of the vocabulary, made again in the backward pass."""
        tape, facts = self.tape, self.facts
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
