"""What vLLM asks of a LoRA adapter, in one place: for the plan, the export and the server. No torch.

Its own checks (vllm/lora/peft_helper.py, vllm/config/lora.py): no DoRA, no modules_to_save, no bias, a rank of at
most 512; the server is started with one of a few ranks that is no smaller than the adapter's.
"""

from __future__ import annotations

from finetune.recipe import LoRA, Method, QLoRA

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


def max_lora_rank(rank: int) -> int | None:
    """The value of --max-lora-rank for an adapter of this rank; None when there is none."""
    return next((allowed for allowed in RANKS if allowed >= rank), None)


def obstacle(*, rank: int, dora: bool, whole: bool) -> str | None:
    """Why vLLM would not load such an adapter, in words that follow "because"; None when it would."""
    if dora:
        return "it has DoRA's lengths, which only peft knows"
    if whole:
        return "it holds modules or tokens trained whole, which vLLM does not take from an adapter"
    if max_lora_rank(rank) is None:
        return f"its rank {rank} is above vLLM's {RANKS[-1]}"
    return None


def obstacle_of(method: Method) -> str | None:
    """The same for an adapter that a recipe's method would train."""
    if not isinstance(method, LoRA | QLoRA):
        return None
    return obstacle(rank=method.rank, dora=method.variant == "dora", whole=bool(method.modules_to_save))
