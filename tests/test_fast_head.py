"""The loss on supervised rows against the model's own loss on all rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy

from finetune.facts import read_facts
from finetune.fast.head import _OnePass, is_plain, onepass_loss, output_head, supervised_loss
from finetune.heads import CHUNK, Logits, logits_of
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


# ---------------------------------------------------------------------------------------------------------- one pass


def plain_loss(rows: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, logits: Logits) -> torch.Tensor:
    """What the function stands for, by autograd."""
    z = rows @ weight.t() * logits.scale
    if logits.cap:
        z = logits.cap * torch.tanh(z / logits.cap)
    return cross_entropy(z, labels, reduction="sum")


def onepass(rows: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, logits: Logits) -> torch.Tensor:
    found: torch.Tensor = _OnePass.apply(rows, weight, labels, logits, weight.dtype)  # type: ignore[no-untyped-call]
    return found


@pytest.mark.parametrize("logits", [Logits(), Logits(cap=2.0), Logits(scale=0.3), Logits(scale=3.0, cap=1.5)])
def test_the_gradient_is_the_derivative_in_fp64(logits: Logits) -> None:
    torch.manual_seed(0)
    rows = torch.randn(7, 5, dtype=torch.float64, requires_grad=True)
    weight, labels = torch.randn(11, 5, dtype=torch.float64), torch.randint(0, 11, (7,))
    assert torch.autograd.gradcheck(lambda x: onepass(x, weight, labels, logits), (rows,))


@settings(max_examples=60, deadline=None)
@given(
    st.one_of(st.integers(0, 20), st.sampled_from([CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 2 * CHUNK + 3])),
    st.integers(1, 40),
    st.integers(2, 300),
    st.sampled_from([Logits(), Logits(cap=5.0), Logits(scale=0.5)]),
    st.integers(0, 9),
)
def test_any_shape_equals_torch_s_cross_entropy(
    count: int, hidden: int, vocabulary: int, logits: Logits, seed: int
) -> None:
    torch.manual_seed(seed)
    ours = torch.randn(count, hidden, requires_grad=True)
    theirs = ours.detach().clone().requires_grad_()
    weight, labels = torch.randn(vocabulary, hidden), torch.randint(0, vocabulary, (count,))
    expected = plain_loss(theirs, weight, labels, logits)
    found = onepass(ours, weight, labels, logits)
    (found / 7).backward()  # type: ignore[no-untyped-call]
    (expected / 7).backward()  # type: ignore[no-untyped-call]
    assert found.item() == pytest.approx(expected.item(), rel=1e-5, abs=1e-5)
    assert ours.grad is not None
    assert theirs.grad is not None
    assert (ours.grad - theirs.grad).norm() <= 1e-5 * theirs.grad.norm() + 1e-6


def test_a_label_that_the_model_finds_impossible_has_a_finite_loss() -> None:
    weight, rows = torch.tensor([[1.0], [-1.0]]), torch.tensor([[400.0]], requires_grad=True)
    loss = onepass(rows, weight, torch.tensor([1]), Logits())
    loss.backward()  # type: ignore[no-untyped-call]
    assert (loss.item(), rows.grad) == (800.0, torch.tensor([[2.0]]))


def frozen_head(folder: Path, attention: str = "eager") -> Any:
    """A model whose layers are trained and whose head, with what shares its weight, is not."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=attention).train()
    model.get_output_embeddings().weight.requires_grad_(False)
    return model


FAMILIES = {
    **MODELS,
    **{name: {"arch": name} for name in ("mistral", "qwen2", "qwen3", "phi3", "gemma", "gemma3_text")},
    "gemma3_text, capped": {"arch": "gemma3_text", "final_logit_softcapping": 3.0},
    "granite": {"arch": "granite", "logits_scaling": 7.0},
    "cohere": {"arch": "cohere", "logit_scale": 0.4},
}


@pytest.mark.parametrize("name", FAMILIES)
def test_one_pass_equals_the_model_s_own_loss(tmp_path: Path, name: str) -> None:
    """Of every family that `logits_of` knows, with all that its forward does behind the head."""
    folder = tiny_model(tmp_path / "m", **FAMILIES[name])  # type: ignore[arg-type]
    own, ours, inputs = frozen_head(folder), frozen_head(folder), batch()
    logits = logits_of(read_facts(str(folder)))
    assert logits is not None
    expected = own(**inputs).loss
    expected.backward()
    loss = onepass_loss(ours, inputs, logits=logits)
    loss.backward()  # type: ignore[no-untyped-call]
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    a, b = (torch.cat([p.grad.flatten() for p in m.parameters() if p.requires_grad]) for m in (own, ours))
    assert (a - b).norm() <= 1e-5 * a.norm()


def test_one_pass_under_autocast_is_as_near_as_autograd(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / "m")
    grads = {}
    for loss_of in (supervised_loss, onepass_loss):
        model = frozen_head(folder)
        wrapped = torch.autocast("cpu", torch.bfloat16)(model.forward)
        model.forward = wrapped
        loss = loss_of(model, batch())
        loss.backward()  # type: ignore[no-untyped-call]
        grads[loss_of] = (loss.item(), torch.cat([p.grad.flatten() for p in model.parameters() if p.requires_grad]))
    (a, x), (b, y) = grads.values()
    assert b == pytest.approx(a, rel=1e-3)
    assert (x - y).norm() < 0.01 * x.norm()


def test_without_gradients_one_pass_gives_the_loss_alone(tmp_path: Path) -> None:
    model, inputs = frozen_head(tiny_model(tmp_path / "m")), batch()
    with torch.no_grad():
        alone = onepass_loss(model, inputs)
    assert not alone.requires_grad
    assert alone.item() == onepass_loss(model, inputs).item()
    assert onepass_loss(model, inputs, 60).item() == pytest.approx(alone.item() * 6 / 60)
    inputs["labels"].fill_(-100)
    nothing = onepass_loss(model, inputs, 0)
    nothing.backward()  # type: ignore[no-untyped-call]
    assert nothing.item() == 0
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())
    assert model(input_ids=inputs["input_ids"]).logits.shape[:2] == (2, 9)  # the hook is gone


def test_a_head_with_more_to_it_is_not_plain(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    model = load(tiny_model(tmp_path / "m", tied=False))
    assert not is_plain(output_head(model))  # trained
    model.requires_grad_(False)
    assert is_plain(output_head(model))
    assert is_plain(output_head(get_peft_model(load_frozen(tmp_path / "m"), LoraConfig(target_modules=["q_proj"]))))
    adapted = get_peft_model(load_frozen(tmp_path / "m"), LoraConfig(target_modules=["lm_head"]))
    assert not is_plain(output_head(adapted))
    assert not is_plain(torch.nn.Linear(2, 3).requires_grad_(False))


def load_frozen(folder: Path) -> Any:
    return load(folder).requires_grad_(False)


# --------------------------------------------------------------------------------------------------- rows laid flat


@pytest.mark.parametrize("arch", ["llama", "gemma2", "qwen2"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_rows_laid_flat_do_not_see_each_other(tmp_path: Path, arch: str, attention: str) -> None:
    """The promise behind `paths.KEEPS_ROWS_APART`: the loss of two rows end to end equals that of each alone."""
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
