"""The embedded model for real: each method trains a few steps on a CPU, and what it leaves is proven."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from finetune import embedded
from finetune.facts import read_facts
from finetune.measure import live_bytes
from finetune.merge import merge
from finetune.method import trainable_parameters
from finetune.recipe import load_recipe
from finetune.run import Run
from finetune.train import train
from tests.flow.conftest import losses

# Four rows make a step, so every epoch is one step on the same rows.
FEW = ["data.limit=4", "train.epochs=3", "train.log_every=1", "evaluate.after_training=false"]


@pytest.fixture(scope="module")
def folder() -> Path:
    return embedded.model_folder("smollm2-135m")


def run_recipe(name: str, output: Path) -> Run:
    """A run whose peak, by torch's allocation events, is within 2 % of the plan for the same rows."""
    earlier = live_bytes()  # what other tests left in this process is measured with it
    run = train(load_recipe(name, FEW), output=output)
    memory = run.read("result.json")["memory"]
    peak = memory["peak_bytes"] - earlier
    assert peak > 110_000_000  # at least the weights: 28 M in 16 bits and 106 M in 4
    assert abs(memory["predicted_bytes"] / peak - 1) < 0.02
    return run


def logits(model: Any, text: str, tokenizer: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(**tokenizer(text, return_tensors="pt")).logits.float()


def test_it_is_the_real_model(folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.num_parameters() == 134_515_008
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    answer = model.generate(**asked, max_new_tokens=12, do_sample=False)[0, asked["input_ids"].shape[1] :]
    assert tokenizer.decode(answer, skip_special_tokens=True) == "The capital of France is Paris."


@pytest.mark.parametrize("name", ["smollm2-lora", "smollm2-qlora"])
def test_adapters_train_load_and_merge_exactly(name: str, folder: Path, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run = run_recipe(name, tmp_path / "run")
    assert losses(run.folder)[3] < losses(run.folder)[1]
    recipe = run.recipe()
    tokenizer = AutoTokenizer.from_pretrained(run.adapter)
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), run.adapter)
    adapters = sum(p.numel() for n, p in model.named_parameters() if "lora_" in n)
    assert adapters == trainable_parameters(recipe.method, read_facts("smollm2-135m")) == 4_884_480
    expected = logits(model, "turn on the kitchen light", tokenizer)
    merged = merge(run)
    got = logits(
        AutoModelForCausalLM.from_pretrained(merged.folder, dtype=torch.float32),
        "turn on the kitchen light",
        tokenizer,
    )
    assert (got - expected).abs().max() < 1e-4
    assert merged.merged == 210


def test_every_layer_can_lie_in_memory_as_the_blocks_of_its_file(folder: Path) -> None:
    from safetensors.torch import load_file

    from finetune.fast.held import held
    from finetune.model import load_model, real_device
    from finetune.paths import held_of
    from finetune.plan import resolve

    sets = ["load.dtype=float32", "train.precision=fp32", "fast.weights=true"]
    facts = read_facts("smollm2-135m")
    recipe, _ = resolve(load_recipe("smollm2-lora", sets), facts, real_device())
    assert held_of(recipe, facts, real_device()) == "blocks"
    base = load_model(recipe, folder, facts).get_base_model()  # type: ignore[operator]
    stored = load_file(folder / "model.safetensors")
    linears = [(name, module) for name, module in base.named_modules() if type(module) is torch.nn.Linear]
    packed = [(name, module.weight) for name, module in linears if held(module.weight)]
    assert len(packed) == 210
    for name, weight in packed:
        dense = held(weight).dense(weight)  # type: ignore[union-attr]
        assert torch.equal(dense, stored[f"{name.removesuffix('.base_layer')}.weight"])
    in_memory = sum(weight.nbytes for _, weight in packed)
    assert in_memory == 106_168_320  # a byte a weight; scales and offsets are an eighth more


def test_full_fine_tuning_trains_every_weight(folder: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    run = run_recipe("smollm2-full", tmp_path / "run")
    assert losses(run.folder)[3] < losses(run.folder)[1]
    before = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    after = AutoModelForCausalLM.from_pretrained(run.model).state_dict()
    assert all(not torch.equal(before[name], after[name]) for name in before)
