"""How long a step takes at the least: floating-point operations counted honestly, against what the card can do.

Per token, with N weights in matrix products, P adapter weights, hidden H, vocabulary V, layers L, query width Q,
length T and the supervised share s:

    forward             2 N + attention             attention = 2 * 2 * Q * T / 2 a layer (causal: half the square)
    backward, inputs    2 N + 2.5 * attention       the kernels compute the scores once more
    backward, weights   2 N if they are trained, else nothing
    adapters            6 P                          forward, inputs, weights
    recomputing         2 N + attention of the layers that run again
    output head         s * 4 H V frozen, s * 6 H V trained

The usual 6 N counts weight gradients that LoRA never computes, and a head on every position.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from finetune.device import Device
from finetune.facts import Facts
from finetune.method import trainable_parameters
from finetune.recipe import Full, Method, QLoRA
from finetune.steps import Path

UTILISATION = {"cuda": 0.3, "cpu": 0.5}
"""Share of the peak that training reaches; plain stacks were measured at 16-31 % of a GPU, tuned ones at 40-60 %."""
CPU_FLOPS = 45e9
"""fp32 operations per second of one CPU core with AVX2, where nothing better is known."""


@dataclass(frozen=True)
class Speed:
    """An estimate. `floor` is tokens/s at the card's peak, `expected` at `utilisation` of it."""

    flop_per_token: float
    peak_flops: float
    utilisation: float

    @property
    def floor(self) -> float:
        """Tokens per second that no implementation can pass."""
        return self.peak_flops / self.flop_per_token

    @property
    def expected(self) -> float:
        """Tokens per second to plan with."""
        return self.floor * self.utilisation


def flop_per_token(method: Method, facts: Facts, path: Path, length: int, supervised: float) -> float:
    """Operations of forward and backward for one token in rows of `length`, of which `supervised` give a loss."""
    matrices = sum(linear.in_features * linear.out_features for linear in facts.linears())
    attention = facts.layers * 2 * facts.heads * facts.head_dim * length
    head = facts.hidden_size * facts.vocab_size
    full = isinstance(method, Full)
    again = 1 / path.checkpointing if path.checkpointing else 0.0
    flop = (4 + 2 * full + 2 * again) * matrices + (3.5 + again) * attention
    flop += supervised * (6 if full else 4) * head
    return flop if full else flop + 6 * trainable_parameters(method, facts)


def speed_of(
    method: Method, facts: Facts, path: Path, device: Device, length: int, supervised: float
) -> Speed | None:
    """The estimate for a device; None for a card whose peak is not known."""
    flop = flop_per_token(method, facts, path, length, supervised)
    if device.kind == "cpu":
        return Speed(flop, CPU_FLOPS * (os.cpu_count() or 1), UTILISATION["cpu"])
    if device.tflops is None:
        return None
    share = UTILISATION["cuda"] * (0.8 if isinstance(method, QLoRA) else 1.0)  # unpacking 4-bit weights takes time
    return Speed(flop, device.tflops * 1e12, share)
