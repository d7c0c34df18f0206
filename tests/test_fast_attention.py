"""Rows that lie end to end, attended one by one: against each row alone, against one mask over all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from finetune.fast.attention import attend, documents
from finetune.paths import KEEPS_ROWS_APART
from tests.tiny import tiny_model

FAMILIES = [name for name in KEEPS_ROWS_APART if name != "gemma2"]  # whose scores are softcapped, in eager attention
LENGTHS = [7, 1, 12, 4]


def load(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa").train()


def flat(lengths: list[int]) -> dict[str, Any]:
    """As TRL's padding-free collator gives it."""
    torch.manual_seed(3)
    ends = torch.tensor([0, *lengths]).cumsum(0).int()
    return {
        "input_ids": torch.randint(20, 300, (1, sum(lengths))),
        "position_ids": torch.cat([torch.arange(n) for n in lengths])[None],
        "cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": max(lengths), "max_length_k": max(lengths),
    }  # fmt: skip


def learned(model: Any, batches: list[dict[str, Any]], weights: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """All outputs end to end, and the gradient of all parameters."""
    outs = []
    for inputs, weight in zip(batches, weights, strict=True):
        out = model(**inputs, use_cache=False).logits[0]
        (out * weight).sum().backward()
        outs.append(out.detach())
    grads = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    return torch.cat(outs), grads


def near(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool((a - b).norm() <= 5e-6 * b.norm())


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("arch", FAMILIES)
def test_rows_learn_what_they_learn_alone(tmp_path: Path, arch: str, again: bool) -> None:
    """Of every family that takes this way; also with windows shorter than a row, and when layers run again."""
    window = {"sliding_window": 5} if arch in ("mistral", "gemma3_text") else {}
    folder = tiny_model(tmp_path / "m", arch=arch, **window)  # type: ignore[arg-type]
    whole, alone = load(folder), load(folder)
    if again:
        enable = getattr(whole, "activation_checkpointing_enable", None) or whole.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    inputs = flat(LENGTHS)
    weight = torch.randn(sum(LENGTHS), whole.config.vocab_size)
    apart = [{"input_ids": ids} for ids in inputs["input_ids"].split(LENGTHS, 1)]
    expected = learned(alone, apart, list(weight.split(LENGTHS)))
    with documents(whole):
        found = learned(whole, [inputs], [weight])
    assert near(found[0], expected[0])
    assert near(found[1], expected[1])


def test_the_mask_over_all_rows_is_not_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, masks = load(tiny_model(tmp_path / "m")), []
    attention = torch.nn.functional.scaled_dot_product_attention

    def watched(*args: Any, attn_mask: Any = None, **kwargs: Any) -> Any:
        masks.append(attn_mask)
        return attention(*args, attn_mask=attn_mask, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    with documents(model):
        model(**flat(LENGTHS))
    assert len(masks) == model.config.num_hidden_layers * len(LENGTHS)
    assert all(mask is None for mask in masks)


def test_the_name_is_in_force_inside_only_and_never_saved(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(load(tiny_model(tmp_path / "m")), LoraConfig(target_modules=["q_proj"]))
    inside = model.get_base_model()
    with documents(model):
        assert inside.config._attn_implementation == "finetune_documents"
        inside.save_pretrained(tmp_path / "saved")
        model.save_pretrained(tmp_path / "adapter")
    assert inside.config._attn_implementation == "sdpa"
    for file in (tmp_path / "saved/config.json", tmp_path / "adapter/adapter_config.json"):
        assert "finetune_documents" not in json.dumps(json.loads(file.read_text()))


def test_rows_without_ends_are_refused(tmp_path: Path) -> None:
    model = load(tiny_model(tmp_path / "m"))
    with documents(model), pytest.raises(ValueError, match="cu_seq_lens_q"):
        model(input_ids=torch.tensor([[3, 4, 5]]))


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(1, 17), min_size=1, max_size=6), st.sampled_from([(1, 1), (4, 2), (3, 1)]),
    st.one_of(st.none(), st.integers(1, 20)),
)  # fmt: skip
def test_any_rows_equal_one_mask_over_all(lengths: list[int], heads: tuple[int, int], window: int | None) -> None:
    torch.manual_seed(0)
    total = sum(lengths)
    query = torch.randn(1, heads[0], total, 8, requires_grad=True)
    key, value = (torch.randn(1, heads[1], total, 8, requires_grad=True) for _ in range(2))
    row = torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)])
    at = torch.arange(total)
    seen = (row[:, None] == row[None]) & (at[:, None] >= at[None])
    if window is not None:
        seen &= at[:, None] - at[None] < window
    expected = scaled_dot_product_attention(query, key, value, attn_mask=seen, scale=0.4, enable_gqa=True)
    ends = torch.tensor([0, *lengths]).cumsum(0)
    found, _ = attend(None, query, key, value, None, scaling=0.4, cu_seq_lens_q=ends, sliding_window=window)
    assert found.shape == (1, total, heads[0], 8)
    weight = torch.randn_like(found)
    grads = [
        torch.autograd.grad((out * weight).sum(), (query, key, value)) for out in (found, expected.transpose(1, 2))
    ]
    torch.testing.assert_close(found, expected.transpose(1, 2), rtol=1e-5, atol=2e-6)
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=5e-6)
