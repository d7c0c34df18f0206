"""Loading: the right types, the right refusals, and weights that stay trainable."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from finetune.device import Device
from finetune.errors import ModelError
from finetune.facts import read_facts
from finetune.model import load_model, load_tokenizer, model_folder
from finetune.paths import path_of
from finetune.plan import resolve
from finetune.recipe import Recipe, parse_recipe
from tests.tiny import tiny_model


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("m") / "tiny")


LAPTOP = Device("cpu", "test", 10**9, bf16=False)


def resolved(base: Path, method: str, more: str = "") -> Recipe:
    recipe = parse_recipe(f"model: {base}\nmethod: {method}\ndata: {{train: x.jsonl, max_length: 64}}\n{more}\n")
    return resolve(recipe, read_facts(str(base)), LAPTOP)[0]


def test_4_bit_weights_are_not_repacked_by_an_evaluation(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On CPUs with AVX512-BF16 bitsandbytes would repack them in place, and the next backward pass would be wrong."""
    monkeypatch.setattr("bitsandbytes.nn.modules.has_avx512bf16", lambda: True)
    model = load_model(resolved(base, "{kind: qlora, rank: 4}"), base, read_facts(str(base)))
    with torch.no_grad():
        model.eval()(input_ids=torch.arange(30, 40)[None])
    packed = [m for m in model.modules() if type(m).__module__.startswith("bitsandbytes")]
    assert len(packed) == 14
    assert not any(getattr(m.weight.quant_state, "packing_format_for_cpu", False) for m in packed)


@pytest.mark.parametrize("method", ["{kind: lora, rank: 4}", "{kind: qlora, rank: 4}", "{kind: full}"])
def test_what_is_trained_is_fp32(base: Path, method: str) -> None:
    model = load_model(resolved(base, method), base, read_facts(str(base)))
    trained = [p for p in model.parameters() if p.requires_grad]
    assert trained
    assert {p.dtype for p in trained} == {torch.float32}


@pytest.mark.parametrize("fast", [True, False])
def test_recomputing_goes_no_lower_than_the_lowest_adapter(base: Path, fast: bool) -> None:
    """TRL and transformers ask for a gradient at the embedding; the result is the same without, bit by bit."""
    found = []
    for asks in (True, False):
        recipe = resolved(base, "{kind: lora, rank: 4, targets: [layers.1.mlp.down_proj]}")
        recipe = recipe.model_copy(update={"fast": recipe.fast.model_copy(update={"adapters": fast})})
        model: Any = load_model(recipe, base, read_facts(str(base))).train()
        inner = model.get_base_model()
        if asks:
            del inner.enable_input_require_grads
        model.enable_input_require_grads()
        enable = getattr(inner, "activation_checkpointing_enable", None) or inner.gradient_checkpointing_enable
        enable({"use_reentrant": False})
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.constant_(parameter, 0.1)
        reached: list[bool] = []
        inner.model.layers[0].register_forward_hook(lambda m, i, out, r=reached: r.append(out.requires_grad))
        ids = torch.arange(30, 46)[None]
        model(input_ids=ids, labels=ids).loss.backward()
        assert reached[0] is asks
        found.append([p.grad for p in model.parameters() if p.requires_grad])
    assert len(found[0]) == 2
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize(
    ("method", "more", "together"),
    [
        ("{kind: lora, rank: 4}", "", True),
        ("{kind: qlora, rank: 4, variant: rslora}", "", True),
        ("{kind: lora, rank: 4, modules_to_save: [norm]}", "", True),
        ("{kind: lora, rank: 4}", "fast: {adapters: false}", False),
        ("{kind: lora, rank: 4, dropout: 0.1}", "", False),
        ("{kind: lora, rank: 4, variant: dora}", "", False),
        ("{kind: lora, rank: 4}", "load: {dtype: bfloat16}", False),
        ("{kind: qlora, rank: 4}", "load: {dtype: float32}\ntrain: {precision: bf16}", False),
    ],
)
def test_the_plan_says_what_the_model_does(
    base: Path, method: str, more: str, together: bool, caplog: pytest.LogCaptureFixture
) -> None:
    recipe, facts = resolved(base, method, more), read_facts(str(base))
    with caplog.at_level("INFO", logger="finetune"):
        model: Any = load_model(recipe, base, facts)
    adapted = [m for m in model.modules() if hasattr(m, "lora_A")]
    assert len(adapted) == 14
    assert {"forward" in vars(m) for m in adapted} == {together}
    assert path_of(recipe, facts, LAPTOP).grouped is together
    assert len([said for said in caplog.messages if "peft's own code" in said]) == (not together)


def test_the_seed_decides_the_adapter(base: Path) -> None:
    recipe = resolved(base, "{kind: lora, rank: 4}")
    other = recipe.model_copy(update={"train": recipe.train.model_copy(update={"seed": 7})})
    first, second, third = (
        next(p for n, p in load_model(r, base, read_facts(str(base))).named_parameters() if "lora_A" in n)
        for r in (recipe, recipe, other)
    )
    assert torch.equal(first, second)
    assert not torch.equal(first, third)


@pytest.mark.parametrize("name", ["/nowhere/model", "./nowhere", "no-owner", "gone.gguf", "a/b/c"])
def test_a_model_that_is_not_here_is_refused(name: str) -> None:
    with pytest.raises(ModelError, match="There is no model"):
        model_folder(name)


def test_a_hub_model_without_a_hub_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelError, match="google/gemma-2-2b is not on this machine") as refusal:
        model_folder("google/gemma-2-2b")
    assert "hf auth login" in refusal.value.hint


def test_a_missing_pad_token_becomes_the_end_token(tmp_path: Path) -> None:
    from tests.tiny import tiny_tokenizer

    tokenizer = tiny_tokenizer(pad=None)
    folder = tiny_model(tmp_path / "m")
    tokenizer.save_pretrained(folder)
    loaded = load_tokenizer(resolved(folder, "{kind: lora}"))
    assert loaded.pad_token == loaded.eos_token
