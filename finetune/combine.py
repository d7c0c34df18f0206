"""Several adapters -> one, by peft's own functions, target by target, as its `add_weighted_adapter` does.

    sum                                      W + sum of weight * scale * B @ A: exact, and nothing has to be made
    linear, ties, dare_linear, dare_ties,    of all A and of all B, each times sqrt(weight * scale), and then B @ A:
    magnitude_prune                          cross terms B1 @ A2 come with it, and all ranks must be equal
    svd, ties_svd, dare_linear_svd, ...      of the products scale * B @ A, cut to the largest rank

TIES: Yadav et al. 2023 (arXiv:2306.01708); DARE: Yu et al. 2023 (2311.03099). What DARE draws depends on the target's
name alone, so the same merge gives the same weights.
"""

from __future__ import annotations

import json
import math
import re
import warnings
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.adapter_file import CONFIG, WEIGHTS, Adapter, Pair, read_adapter
from finetune.errors import InputError
from finetune.merge_layout import Weighted
from finetune.merge_math import load

if TYPE_CHECKING:
    import torch

_PRUNING = ("ties", "dare_linear", "dare_ties", "magnitude_prune")
_FACTORS = ("linear", *_PRUNING)
_PRODUCTS = ("svd", *(f"{name}_svd" for name in _PRUNING))
KINDS = ("sum", *_FACTORS, *_PRODUCTS)
DENSITY = 0.5


def density_of(kind: str, density: float | None, adapters: int) -> float | None:
    """The share of values that a kind keeps; None where it keeps all.

    Raises `InputError` for an unknown kind, a density that is none, and a kind without anything to combine.
    """
    if kind not in KINDS:
        raise InputError(f"'{kind}' is no way to combine adapters.", f"Give {', '.join(KINDS[:-1])} or {KINDS[-1]}.")
    if kind != "sum" and adapters < 2:
        raise InputError(f"There is one adapter, and nothing to combine it with by {kind}.", "Name two or more.")
    prunes = kind.removesuffix("_svd") in _PRUNING
    if density is not None and not prunes:
        raise InputError(
            f"{kind} keeps all values, so it has no density.", f"Leave it out, or take {', '.join(_PRUNING)}."
        )
    if density is not None and not 0 < density <= 1:
        raise InputError(f"{density:g} is no density.", "Give the share of values to keep: above 0, and at most 1.")
    return (DENSITY if density is None else density) if prunes else None


def combine(adapters: Sequence[Weighted], kind: str, density: float | None, folder: Path) -> Adapter:
    """Write one adapter, of scale 1, that stands for all of them into an empty folder.

    Raises `InputError` when the factors of a target cannot be put together.
    """
    import torch
    from safetensors.torch import save_file

    tensors, ranks = {}, {}
    for module in dict.fromkeys(name for each in adapters for name in each.adapter.pairs):
        parts = [(each.adapter.pairs[module], each.weight) for each in adapters if module in each.adapter.pairs]
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # peft's, that a density of 1 prunes nothing
            torch.manual_seed(seed_of(module))
            a, b = (_products if kind in _PRODUCTS else _factors)(parts, kind, density, _largest_rank(adapters))
        first = parts[0][0]
        tensors[first.a.name], tensors[first.b.name], ranks[module] = a.contiguous(), b.contiguous(), a.shape[0]
    usual = max(ranks.values())
    others = {re.escape(module): rank for module, rank in ranks.items() if rank != usual}
    config = adapters[0].adapter.config | {
        "r": usual, "lora_alpha": usual, "rank_pattern": others, "alpha_pattern": others, "use_rslora": False,
        "target_modules": list(ranks), "exclude_modules": None, "layers_to_transform": None, "layers_pattern": None,
    }  # fmt: skip
    (folder / CONFIG).write_text(json.dumps(config), encoding="utf-8")
    save_file(tensors, folder / WEIGHTS)
    return read_adapter(folder)


def seed_of(module: str) -> int:
    """What the draws of one target begin with."""
    return zlib.crc32(module.encode())


def _largest_rank(adapters: Sequence[Weighted]) -> int:
    configs = [each.adapter.config for each in adapters]
    return max(int(rank) for each in configs for rank in (each["r"], *(each.get("rank_pattern") or {}).values()))


def _factors(
    parts: Sequence[tuple[Pair, float]], kind: str, density: float | None, rank: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """A and B of one target, made of the As and of the Bs."""
    ranks = [pair.a.shape[0] for pair, _ in parts]
    if len(set(ranks)) > 1:
        module, said = parts[0][0].module, " and ".join(map(str, ranks))
        raise InputError(
            f"{kind} adds the factors themselves, and those of '{module}' have the ranks {said}.",
            f"Take sum, or {'svd' if kind == 'linear' else f'{kind}_svd'}, which add the products.",
        )
    shares = [pair.scale * weight for pair, weight in parts]
    roots = [math.sqrt(abs(share)) for share in shares]
    signed = [math.copysign(root, share) for root, share in zip(roots, shares, strict=True)]
    return (
        _by_peft(kind, [load(pair.a).float() for pair, _ in parts], signed, density),
        _by_peft(kind, [load(pair.b).float() for pair, _ in parts], roots, density),
    )


def _products(
    parts: Sequence[tuple[Pair, float]], kind: str, density: float | None, rank: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """A and B of one target, made of the products."""
    import torch

    products = [load(pair.b).float() @ load(pair.a).float() * pair.scale for pair, _ in parts]
    if embedding := parts[0][0].embedding:  # peft draws for an embedding's rows
        products = [product.T for product in products]
    whole = _by_peft(kind.removesuffix("_svd"), products, [weight for _, weight in parts], density)
    whole = whole.T if embedding else whole
    left, strength, right = torch.linalg.svd(whole, full_matrices=False)
    return right[:rank], left[:, :rank] * strength[:rank]


def _by_peft(kind: str, tensors: list[torch.Tensor], weights: Sequence[float], density: float | None) -> torch.Tensor:
    import torch
    from peft.utils import merge_utils

    work: Any = getattr(merge_utils, "task_arithmetic" if kind in ("linear", "svd") else kind)
    found: torch.Tensor = work(tensors, torch.tensor(weights), *([] if density is None else [density]))
    return found
