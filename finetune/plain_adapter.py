"""A LoRA adapter in its plainest form, for programs that know one rank and alpha / rank and nothing else.

    rsLoRA: alpha / sqrt(r)        ->  alpha' = scale * r', so that alpha' / r' is the same scale
    rank_pattern: A of 4 and 8     ->  zeros below A and beside B up to the largest rank: B @ A is unchanged
    alpha_pattern: several scales  ->  alpha' = r', and each B times its own scale

llama.cpp and vLLM scale by alpha / r of the whole adapter; a pattern or a flag that they pass over would make the
answers weaker without a word (case S1).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from finetune import adapter_file
from finetune.adapter_file import Adapter, read_adapter
from finetune.errors import InputError
from finetune.vllm_rules import obstacle


def plain_copy(source: Path, folder: Path, base_name: str) -> Adapter:
    """Write the adapter in `source` as a plain one into the existing `folder`; what it computes is the same.

    `base_name` is what its config says of the base. Raises `InputError` when it is more than pairs of A and B.
    """
    import torch
    from safetensors.torch import load_file, save_file

    adapter = read_adapter(source)
    require_pairs(adapter)
    weights = load_file(source / adapter_file.WEIGHTS)
    rank = max(pair.a.shape[0] for pair in adapter.pairs.values())
    scales = {pair.scale for pair in adapter.pairs.values()}
    scale = scales.pop() if len(scales) == 1 else 1.0
    written: dict[str, Any] = {}
    for pair in adapter.pairs.values():
        a, b = weights[pair.a.name], weights[pair.b.name]
        missing = rank - a.shape[0]
        if pair.scale != scale:
            b = (b.float() * pair.scale).to(b.dtype)
        written[pair.a.name] = torch.cat([a, a.new_zeros(missing, a.shape[1])]) if missing else a
        written[pair.b.name] = torch.cat([b, b.new_zeros(b.shape[0], missing)], dim=1) if missing else b
    save_file(written, folder / adapter_file.WEIGHTS, metadata={"format": "pt"})
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "inference_mode": True, "base_model_name_or_path": base_name,
        "r": rank, "lora_alpha": scale * rank, "lora_dropout": 0.0, "bias": "none", "fan_in_fan_out": False,
        "use_rslora": False, "use_dora": False, "modules_to_save": None, "target_modules": _targets(adapter),
    }  # fmt: skip
    (folder / adapter_file.CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return adapter


def require_pairs(adapter: Adapter) -> None:
    """Raise `InputError` when an adapter changes its base by more than `scale * B @ A` on linear layers."""
    if adapter.strange:
        raise InputError(
            f"The adapter {adapter.folder} has tensors with no place, such as {adapter.strange[0]}.",
            "Write it again with peft's save_pretrained.",
        )
    dora = any(pair.magnitude for pair in adapter.pairs.values())
    embedding = any(pair.embedding for pair in adapter.pairs.values())
    why = obstacle(rank=1, dora=dora, whole=bool(adapter.whole or adapter.tokens)) or (
        f"it starts from {adapter.start}, so it does not fit the base itself" if adapter.start else None
    )
    if why or embedding or not adapter.plain:
        raise InputError(
            f"The adapter {adapter.folder} cannot be used outside of peft, because "
            f"{why or 'it changes an embedding or keeps base weights'}.",
            "Merge it, and export or serve the merged model.",
        )


def _targets(adapter: Adapter) -> list[str]:
    """The names in its config when they stand for all modules everywhere, else every module by its whole name."""
    given = adapter.config.get("target_modules")
    some = ("layers_to_transform", "exclude_modules", "layers_pattern")
    if isinstance(given, list) and not any(adapter.config.get(name) for name in some):
        return sorted(given)
    return sorted(adapter.pairs)
