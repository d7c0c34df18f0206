"""The loss on supervised rows against the model's own loss on all rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from finetune.fast.head import supervised_loss
from tests.tiny import tiny_model

# Softcapping lives in Gemma 2's forward, behind the head; tied and untied heads take other ways to their gradient.
MODELS = {
    "llama": {"arch": "llama"},
    "untied": {"arch": "llama", "tied": False},
    "gemma2": {"arch": "gemma2", "final_logit_softcapping": 5.0},
}


def load(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").train()


def batch() -> dict[str, torch.Tensor]:
    """Two rows, the second padded; 4 + 2 supervised positions, and a label at position 0 that nothing predicts."""
    torch.manual_seed(1)
    ids = torch.randint(20, 300, (2, 9))
    labels = torch.full_like(ids, -100)
    labels[0, 0] = ids[0, 0]
    labels[0, 4:8] = ids[0, 4:8]
    labels[1, 3:5] = ids[1, 3:5]
    mask = torch.ones_like(ids)
    mask[1, 6:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_equal_the_models_own(tmp_path: Path, name: str) -> None:
    folder = tiny_model(tmp_path / name, **MODELS[name])  # type: ignore[arg-type]
    own, ours, inputs = load(folder), load(folder), batch()
    expected = own(**inputs).loss  # transformers' mean over the labels that something predicts
    expected.backward()
    loss = supervised_loss(ours, inputs)
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    for (key, a), (_, b) in zip(own.named_parameters(), ours.named_parameters(), strict=True):
        torch.testing.assert_close(b.grad, a.grad, rtol=1e-4, atol=1e-7, msg=key)


def test_the_given_count_divides_the_sum(tmp_path: Path) -> None:
    model, inputs = load(tiny_model(tmp_path / "m")), batch()
    mean = supervised_loss(model, inputs)
    assert supervised_loss(model, inputs, 60).item() == pytest.approx(mean.item() * 6 / 60, rel=1e-6)


def test_a_shifted_label_changes_the_loss(tmp_path: Path) -> None:
    model, inputs = load(tiny_model(tmp_path / "m")), batch()
    before = supervised_loss(model, inputs).item()
    inputs["labels"] = inputs["labels"].roll(1, dims=1)
    assert abs(supervised_loss(model, inputs).item() - before) > 1e-3


def test_no_label_gives_zero_loss_and_zero_gradients(tmp_path: Path) -> None:
    model, inputs = load(tiny_model(tmp_path / "m")), batch()
    inputs["labels"].fill_(-100)
    loss = supervised_loss(model, inputs, 0)
    loss.backward()
    assert loss.item() == 0
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


def test_the_hook_is_gone_afterwards_even_after_an_error(tmp_path: Path) -> None:
    model, inputs = load(tiny_model(tmp_path / "m")), batch()
    supervised_loss(model, inputs)
    with pytest.raises(ValueError, match="input_ids"):
        supervised_loss(model, {**inputs, "input_ids": None})
    full = model(input_ids=inputs["input_ids"]).logits
    assert full.shape[:2] == (2, 9)


@pytest.mark.parametrize("arch", ["llama", "gemma2", "qwen2"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_rows_laid_flat_do_not_see_each_other(tmp_path: Path, arch: str, attention: str) -> None:
    """The promise behind `trainer._KEEPS_ROWS_APART`: the loss of two rows end to end equals that of each alone."""
    if (arch, attention) == ("gemma2", "sdpa"):
        pytest.skip("transformers has no sdpa for Gemma 2's softcapping")
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        tiny_model(tmp_path / arch, arch=arch), attn_implementation=attention
    ).train()
    torch.manual_seed(2)
    rows = [torch.randint(20, 300, (1, n)) for n in (7, 4)]
    alone = sum(supervised_loss(model, {"input_ids": r, "labels": r}, 1).item() for r in rows)
    flat = torch.cat(rows, dim=1)
    positions = torch.tensor([[*range(7), *range(4)]])
    labels = flat.clone()
    labels[0, [0, 7]] = -100
    together = supervised_loss(model, {"input_ids": flat, "position_ids": positions, "labels": labels}, 1)
    assert together.item() == pytest.approx(alone, rel=1e-5)
