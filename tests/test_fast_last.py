"""The last layer's MLP on supervised positions only, against the model's own loss over all of them."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch

from finetune.fast import last
from finetune.fast.head import onepass_loss
from finetune.method import FEW_TOKENS

FAMILIES = ("llama", "mistral", "qwen2", "gemma")
TOKENS, LABELS = 60, 40


def model(kind: str, **config: Any) -> Any:
    """Two layers in fp64 whose head is frozen; everything below it is trained."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(
            kind, vocab_size=90, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=8, pad_token_id=0, tie_word_embeddings=False, **config,
        ),
        dtype=torch.float64, attn_implementation="eager" if kind == "gemma2" else "sdpa",
    )  # fmt: skip
    made.get_output_embeddings().requires_grad_(False)
    return made.train()


def inputs(rows: int = 1, labels: int = LABELS) -> dict[str, torch.Tensor]:
    """Labels everywhere from position 5 on, some places left out between them."""
    dice = torch.Generator().manual_seed(2)
    ids = torch.randint(1, 90, (rows, TOKENS), generator=dice)
    marked = torch.full_like(ids, -100)
    places = (torch.randperm(TOKENS - 5, generator=dice)[:labels] + 5).sort().values
    marked[:, places] = ids[:, places]
    return {"input_ids": ids, "labels": marked}


def widths(made: Any) -> list[int]:
    """Positions that each call of the last MLP gets."""
    seen: list[int] = []
    made.model.layers[-1].mlp.register_forward_pre_hook(lambda _, given: seen.append(given[0].shape[1]))
    return seen


def gradients(made: Any) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in made.parameters() if p.requires_grad])


@pytest.mark.parametrize("kind", FAMILIES)
def test_loss_and_gradients_are_the_models_own(kind: str) -> None:
    right, found, given = model(kind), model(kind), inputs()
    assert last.attach(found)
    seen = widths(found)
    whole = right(**given).loss
    whole.backward()
    loss = onepass_loss(found, given)
    loss.backward()  # type: ignore[no-untyped-call]
    assert seen == [LABELS]
    assert loss.item() == pytest.approx(whole.item(), rel=1e-6)  # transformers takes the loss in fp32
    assert (gradients(found) - gradients(right)).norm() <= 1e-6 * gradients(right).norm()


def test_it_computes_less_and_changes_nothing_to_twelve_digits() -> None:
    both = []
    for attached in (False, True):
        made = model("llama")
        if attached:
            last.attach(made)
        seen = widths(made)
        loss = onepass_loss(made, inputs())
        loss.backward()  # type: ignore[no-untyped-call]
        both.append((loss.item(), gradients(made)))
        assert seen == [LABELS if attached else TOKENS]
    assert both[0][0] == pytest.approx(both[1][0], rel=1e-12)
    assert (both[0][1] - both[1][1]).norm() <= 1e-12 * both[0][1].norm()


@pytest.mark.parametrize(("rows", "labels"), [(2, LABELS), (1, FEW_TOKENS - 1), (1, 0)])
def test_other_batches_run_whole(rows: int, labels: int) -> None:
    """Several rows, and so few labels that the adapters behind would not run together."""
    made, given = model("llama"), inputs(rows, labels)
    plain = onepass_loss(made, given, 1)
    last.attach(made)
    seen = widths(made)
    assert onepass_loss(made, given, 1).item() == plain.item()
    assert seen == [TOKENS]


def test_outside_of_the_loss_and_after_an_error_the_layer_is_its_own() -> None:
    made, given = model("llama"), inputs()
    right = made(given["input_ids"]).logits
    last.attach(made)
    with (
        patch.object(made.model.layers[-1].mlp, "forward", side_effect=ZeroDivisionError),
        pytest.raises(ZeroDivisionError),
    ):
        onepass_loss(made, given)
    assert torch.equal(made(given["input_ids"]).logits, right)
    assert made.generate(given["input_ids"], max_new_tokens=2, do_sample=False).shape == (1, TOKENS + 2)


@pytest.mark.parametrize("kind", ["gemma2", "qwen3", "phi3"])
def test_layers_of_another_make_are_left_alone(kind: str) -> None:
    made = model(kind)
    assert not last.attach(made)
    assert "forward" not in vars(made.model.layers[-1])
