"""Frozen weights that lie in memory as in their file: the bits of fp32 weights in everything that is computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file

from finetune import gguf_blocks
from finetune.fast import layers
from finetune.fast.adapter import attach
from finetune.fast.held import Held, held, hold_blocks, hold_half, linears_of, put
from tests.test_fast_adapter import FAMILIES, IDS, base, wrapped

QV = {"target_modules": ["q_proj", "v_proj"]}


def pair(kind: str, dtype: torch.dtype = torch.bfloat16, **config: Any) -> tuple[Any, Any]:
    """A model of 16-bit numbers in fp32, and the same one held in 16 bits; both with the same adapters."""
    wide, narrow = base(kind, dtype).float(), base(kind, dtype)
    hold_half(narrow)
    models = tuple(wrapped(model, **config) for model in (wide, narrow))
    for model in models:
        attach(model)
        layers.attach(model)
    return models[0], models[1]


def step(model: Any, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return {"loss": loss.detach(), **{n: p.grad for n, p in model.named_parameters() if p.grad is not None}}


@pytest.mark.parametrize("targets", ["all-linear", "q and v"])
@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize("ids", [IDS, IDS[:1, :7]], ids=["48 tokens", "7 tokens"])
def test_a_step_has_the_very_bits_of_fp32_weights(kind: str, targets: str, ids: torch.Tensor) -> None:
    config = {} if targets == "all-linear" or kind == "phi3" else QV  # Phi 3 has one layer for q, k and v
    wide, narrow = pair(kind, **config)
    expected, found = step(wide, ids), step(narrow, ids)
    assert len(expected) > 5
    assert expected.keys() == found.keys()
    if len(ids) == 1:  # so few that peft's own code runs beside fp32 weights
        assert all(torch.allclose(found[name], expected[name], rtol=1e-4, atol=1e-6) for name in expected)
    else:
        assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_take_half_the_memory_and_everything_else_is_fp32(dtype: torch.dtype) -> None:
    _, model = pair("qwen2", dtype)
    names = [name for name, _ in linears_of(base("qwen2"))]
    assert len(names) == 3 * 7
    for name in names:
        layer = model.get_base_model().get_submodule(name)
        weight = layer.base_layer.weight
        assert weight.nbytes == 2 * layer.in_features * layer.out_features
        assert torch.equal(held(weight).dense(weight), base("qwen2", dtype).get_submodule(name).weight)  # type: ignore[union-attr]
    others = [p for p in model.parameters() if p.dtype != torch.uint8]
    assert {p.dtype for p in others} == {torch.float32}
    assert any(name.endswith("q_proj.base_layer.bias") for name, _ in model.named_parameters())


@pytest.mark.parametrize("ids", [IDS, IDS[:1, :7]], ids=["48 tokens", "7 tokens"])
@pytest.mark.parametrize("config", [{}, QV], ids=["all layers", "q and v"])
def test_no_dense_weight_is_kept_for_the_backward_pass(config: dict[str, Any], ids: torch.Tensor) -> None:
    _, model = pair("llama", **config)
    shapes = {tuple(layer.weight.shape) for _, layer in linears_of(base("llama"))}
    kept: list[Any] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append((tensor.dtype, tuple(tensor.shape)))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(input_ids=ids, labels=ids).loss.backward()
    dense = shapes | {shape[::-1] for shape in shapes}
    assert torch.uint8 in {dtype for dtype, _ in kept}
    assert not [shape for dtype, shape in kept if dtype == torch.float32 and shape in dense]


def test_answers_are_those_of_fp32_weights_with_and_without_the_adapter() -> None:
    wide, narrow = (model.eval() for model in pair("llama"))

    def answer(model: Any) -> list[int]:
        made = model.generate(input_ids=IDS[:1, :5], max_new_tokens=12, do_sample=False)
        return list(made[0].tolist())

    tuned = answer(wide)
    assert answer(narrow) == tuned
    with wide.disable_adapter(), narrow.disable_adapter():
        assert answer(wide) == answer(narrow) != tuned


def test_adapters_beside_held_weights_begin_with_the_numbers_that_they_have_beside_fp32_ones() -> None:
    wide, narrow = base("llama", torch.bfloat16).float(), base("llama", torch.bfloat16)
    hold_half(narrow)
    config = LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
    made = []
    for model in (wide, narrow):
        torch.manual_seed(3)
        model = get_peft_model(model, config)
        made.append({name: p for name, p in model.named_parameters() if "lora_" in name})
    assert len(made[0]) == 42
    assert all(torch.equal(made[1][name], p) and made[1][name].dtype == p.dtype for name, p in made[0].items())


# ------------------------------------------------------------------------------------------------------------- blocks


def read(codes: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    codes, scale, offset = gguf_blocks.turned(codes, scale, offset)
    return Held(torch.empty(codes.numel()), scale=scale, offset=offset).dense(codes)


def test_a_block_worked_by_hand() -> None:
    # scale 0.5, offset -1; byte n has n % 16 in its low half and 15 - n % 16 in its high half
    block = np.frombuffer(
        np.array([0.5, -1], np.float16).tobytes() + bytes(n + 16 * (15 - n) for n in range(16)), "u1"
    )
    codes, scale, offset = gguf_blocks._read(torch.tensor(block.copy()).reshape(1, 20))
    assert codes.tolist() == [[*range(16), *range(15, -1, -1)]]
    dense = read(codes, scale, offset)
    assert dense.tolist() == [[0.5 * n - 1 for n in [*range(16), *range(15, -1, -1)]]]


@given(st.integers(0, 2**32 - 1), st.integers(1, 5), st.integers(1, 4))
def test_blocks_give_the_weights_of_llama_cpp_s_own_reader(seed: int, rows: int, blocks: int) -> None:
    dice = np.random.default_rng(seed)
    raw = dice.integers(0, 256, (rows, blocks, 20), dtype=np.uint8)
    raw[..., :4] = dice.normal(0, 1, (rows, blocks, 2)).astype(np.float16).view(np.uint8)
    raw = raw.reshape(rows, -1)
    right = dequantize(raw, GGMLQuantizationType.Q4_1)
    codes, scale, offset = gguf_blocks._read(torch.from_numpy(raw))
    assert torch.equal(read(codes, scale, offset), torch.from_numpy(right))


def in_blocks(model: Any, folder: Path) -> dict[str, torch.Tensor]:
    """Give a model weights that come from blocks, and write these."""
    dice, made = torch.Generator().manual_seed(5), {}
    for name, layer in linears_of(model):
        rows, columns = layer.weight.shape
        codes = torch.randint(0, 16, (rows, columns), dtype=torch.uint8, generator=dice)
        scale, offset = (torch.randn(rows, columns // 32, generator=dice).mul(0.02).half() for _ in range(2))
        codes, scale, offset = gguf_blocks.turned(codes, scale, offset)
        layer.weight.data = Held(torch.empty(codes.numel()), scale=scale, offset=offset).dense(codes).contiguous()
        made |= {f"{name}.codes": codes, f"{name}.scale": scale, f"{name}.offset": offset}
    save_file(made, folder / gguf_blocks.FILE)
    return made


def test_a_step_beside_blocks_has_the_very_bits_of_fp32_weights(tmp_path: Path) -> None:
    wide, narrow = base("llama"), base("llama")
    in_blocks(wide, tmp_path)
    in_blocks(narrow, tmp_path)
    hold_blocks(narrow, tmp_path)
    models = [wrapped(wide), wrapped(narrow)]
    for model in models:
        attach(model)
        layers.attach(model)
    expected, found = (step(model, IDS) for model in models)
    assert len(expected) == 43
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_weights_that_are_not_those_of_the_blocks_stay(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = base("llama")
    in_blocks(model, tmp_path)
    (name, changed), *_ = linears_of(model)
    changed.weight.data[3, 5] = torch.nextafter(changed.weight[3, 5], torch.tensor(9.0))
    before = changed.weight.clone()
    hold_blocks(model, tmp_path)
    assert torch.equal(changed.weight, before)
    assert [n for n, layer in linears_of(model) if held(layer.weight) is None] == [name]
    assert "1 weights are not those of" in caplog.text


@pytest.mark.parametrize("fault", ["cut off", "a layer is missing", "another layout"])
def test_blocks_that_cannot_be_used_leave_the_weights_as_they_are(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    model = base("llama")
    made, file = in_blocks(model, tmp_path), tmp_path / gguf_blocks.FILE
    if fault == "cut off":
        file.write_bytes(file.read_bytes()[:-100])
    elif fault == "a layer is missing":
        save_file({name: tensor for name, tensor in made.items() if ".2.mlp.down_proj" not in name}, file)
    else:
        save_file({name: tensor.transpose(0, -1).contiguous() for name, tensor in made.items()}, file)
    before = {name: layer.weight.clone() for name, layer in linears_of(model)}
    hold_blocks(model, tmp_path)
    stays = [name for name, layer in linears_of(model) if held(layer.weight) is None]
    assert stays == (["model.layers.2.mlp.down_proj"] if fault == "a layer is missing" else list(before))
    assert all(torch.equal(model.get_submodule(name).weight, before[name]) for name in stays)
    assert f"{len(stays)} weights are not those of" in caplog.text


def test_a_layer_whose_weight_is_held_works_alone() -> None:
    layer = torch.nn.Linear(64, 32)
    right = layer.weight.data.bfloat16().float()
    put(layer, layer.weight.data.bfloat16().view(torch.uint8), Held(torch.empty(64 * 32), torch.bfloat16))
    x = torch.randn(3, 64, requires_grad=True)
    (x_grad,) = torch.autograd.grad(layer(x).sum(), x)
    assert torch.equal(layer(x), torch.nn.functional.linear(x, right, layer.bias))
    assert torch.allclose(x_grad, right.sum(0).expand(3, -1), atol=1e-6)
