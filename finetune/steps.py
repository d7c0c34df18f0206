"""What one training step looks like: the micro-batch, and the path that the trainer takes through model and loss.

The torch-free step (`tape`), the simulation on meta tensors (`simulate`) and the measurement all read the same two
values, so that they speak of the same step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Attention = Literal["eager", "math", "cpu", "documents", "flash", "efficient"]
Loss = Literal["onepass", "supervised", "tiled", "library"]
Weights = Literal["", "half", "blocks"]


@dataclass(frozen=True)
class Batch:
    """One micro-batch: `rows` of `length` tokens, of which `supervised` give a loss.

    `flat`: several rows lie end to end in one, told apart by their positions (then `rows` is 1).
    `padded`: shorter rows are filled up, so attention needs a mask.
    """

    rows: int
    length: int
    supervised: int
    flat: bool = False
    padded: bool = False

    @property
    def tokens(self) -> int:
        """Positions that run through the model, padding included."""
        return self.rows * self.length


BLOCK_QUERIES = 96
"""Most queries of a block in `fast.blocks`: fewer make small products, more compute what the mask throws away."""


def block_of(length: int) -> int:
    """Queries of a block of a row of `length` tokens, which is cut into equal ones; the last may be smaller."""
    return -(-length // -(-length // BLOCK_QUERIES))


@dataclass(frozen=True)
class Path:
    """How the trainer runs a step.

    weights        type of the model's frozen weights (full fine-tuning: of all of them)
    autocast       type that autocast computes products in; None without autocast
    attention      eager (scores and mask in full), or the kernel behind sdpa: cpu, flash, efficient, math;
                   documents is cpu for each of the rows that lie end to end (`fast.attention`)
    checkpointing  0 keeps all activations; n recomputes every n-th layer in the backward pass
    loss           onepass (this toolkit's head on supervised rows, its gradient made in the forward pass),
                   supervised (the same rows, by autograd), tiled (TRL's head, vocabulary in tiles),
                   library (transformers' own: all logits at once)
    accumulates    gradients of earlier micro-batches are alive during this one
    upcast         peft's prepare_model_for_kbit_training has turned 16-bit weights into fp32
    keeps_output   the model's output (logits) stays alive until the optimizer has stepped
    input_grads    the embedding's output requires a gradient (reentrant checkpointing needs it, and TRL asks for it)
    grouped        the layers that share an input run as one autograd function (`fast.adapter`)
    lean           norms and gated MLPs keep only what they take in (`fast.layers`)
    turned         `documents` attention turns queries and keys itself
    blocks         `documents` attention goes backward in blocks of queries and keeps no output (`fast.blocks`)
    last           the last layer's MLP runs on supervised positions only (`fast.last`)
    held           layers' frozen weights lie as in their file (`fast.held`): half (16 bits), blocks (of GGUF)
    held_every     those of every n-th layer, from the first on
    adapter_casts  peft casts each adapter's input to the adapter's type
    capability, multiprocessors   of the card: libraries choose kernels and workspaces by them
    """

    device: Literal["cpu", "cuda"]
    weights: str
    autocast: str | None
    attention: Attention
    loss: Loss
    checkpointing: int
    optimizer: str
    accumulates: bool = False
    upcast: bool = False
    keeps_output: bool = False
    input_grads: bool = False
    adapter_casts: bool = True
    grouped: bool = False
    lean: bool = False
    turned: bool = False
    blocks: bool = False
    last: bool = False
    held: Weights = ""
    held_every: int = 1
    capability: tuple[int, int] = (8, 9)
    multiprocessors: int = 128
