"""Bytes against hand arithmetic: 16 per parameter trained in fp32, 0.5159 per packed one, one per 8-bit moment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from finetune.facts import Facts, read_facts
from finetune.memory import BUCKETS, Line, activation_lines, static_lines
from finetune.method import adapter_shapes
from finetune.recipe import Full, LoRA, Method, QLoRA
from tests.tiny import tiny_model

FULL = Full(kind="full")
GEMMA_N, LLAMA_N = 2_614_341_888, 6_738_415_616
GEMMA_QV_8 = 1_597_440  # LoRA rank 8 on query and value
LLAMA_ALL_8 = 19_988_480  # rank 8 on all seven projections
LLAMA_LINEAR = 32 * (4 * 4096 * 4096 + 3 * 4096 * 11008)


@pytest.fixture(scope="module")
def gemma() -> Facts:
    return read_facts("google/gemma-2-2b")


@pytest.fixture(scope="module")
def llama() -> Facts:
    return read_facts("meta-llama/Llama-2-7b-hf")


def lora(**settings: Any) -> LoRA:
    return LoRA(**{"kind": "lora", "rank": 8, "targets": "qv", **settings})


def qlora(**settings: Any) -> QLoRA:
    return QLoRA(**{"kind": "qlora", "rank": 8, **settings})


def buckets(lines: list[Line]) -> dict[str, int]:
    return {bucket: sum(line.bytes for line in lines if line.bucket == bucket) for bucket in BUCKETS}


def static(method: Method, facts: Facts, dtype: str = "float32", optimizer: str = "adamw_torch") -> dict[str, int]:
    return buckets(static_lines(method, facts, dtype, optimizer))


def optimizer(method: Method, facts: Facts, name: str) -> int:
    return static(method, facts, "bfloat16", name)["optimizer"]


# ----------------------------------------------------------------------------------------------------- golden numbers


def test_gemma_full_in_fp32_is_16_bytes_per_parameter(gemma: Facts) -> None:
    found = static(FULL, gemma)
    assert found == {
        "weights": 4 * GEMMA_N, "gradients": 4 * GEMMA_N, "optimizer": 8 * GEMMA_N, "activations": 0, "loss": 0,
    }  # fmt: skip
    assert round(found["weights"] / 1e9, 1) == 10.5
    assert round(sum(found.values()) / 1e9, 1) == 41.8


def test_gemma_lora_on_a_frozen_fp32_base(gemma: Facts) -> None:
    found = static(lora(), gemma)
    assert found["weights"] == 4 * GEMMA_N + 4 * GEMMA_QV_8
    assert found["gradients"] == 4 * GEMMA_QV_8
    assert found["optimizer"] == 8 * GEMMA_QV_8
    assert round(4 * GEMMA_N / 1e9, 2) == 10.46
    assert round(sum(found.values()) / 1e9, 1) == 10.5
    assert round(4 * GEMMA_QV_8 / 1e6, 1) == 6.4  # the adapter file


def test_llama_full_is_16_bytes_per_parameter_whatever_the_products_are(llama: Facts) -> None:
    # fp32 weights under bf16 autocast: 4 + 4 + 8; the same 16 as bf16 weights and gradients with an fp32 master.
    for dtype in ("float32", "bfloat16"):
        assert sum(static(FULL, llama, dtype).values()) == 16 * LLAMA_N


def test_llama_lora_on_16_bit_weights(llama: Facts) -> None:
    found = static(lora(targets="attention+mlp"), llama, "bfloat16")
    assert sum(found.values()) == 2 * LLAMA_N + 16 * LLAMA_ALL_8


@pytest.mark.parametrize(
    ("double", "per_weight", "tables"), [(True, 0.5 + 1 / 64 + 4 / (64 * 256), 272), (False, 0.5625, 16)]
)
def test_llama_in_4_bits(llama: Facts, double: bool, per_weight: float, tables: int) -> None:
    found = static(qlora(double_quant=double), llama, "bfloat16")
    tensors = 32 * 7
    kept_back = tensors * 4 * tables + tensors * 4 * double  # value tables, and the mean of the scales
    rest = 2 * (LLAMA_N - LLAMA_LINEAR)
    assert found["weights"] == LLAMA_LINEAR * per_weight + kept_back + rest + 4 * LLAMA_ALL_8
    assert found["gradients"] + found["optimizer"] == 12 * LLAMA_ALL_8
    assert LLAMA_LINEAR == 6_476_005_376


def test_the_lines_add_up_and_show_their_arithmetic(llama: Facts) -> None:
    lines = static_lines(qlora(), llama, "bfloat16", "paged_adamw_8bit")
    assert [line.name for line in lines] == [
        "4-bit weights", "quantisation constants", "other weights", "adapter", "gradients",
        "paged_adamw_8bit (unified memory)",
    ]  # fmt: skip
    assert lines[0] == Line("weights", "4-bit weights", LLAMA_LINEAR // 2, "0.5 bytes x 6,476,005,376")
    assert lines[2].formula == f"2 bytes x {LLAMA_N - LLAMA_LINEAR:,}"
    assert all(line.exact and line.bytes > 0 for line in lines)


# --------------------------------------------------------------------------------------------------------- optimizers


def in_8_bits(size: int) -> int:
    """One moment: a byte per value and an fp32 scale per 256 of them; below 4096 values it stays fp32."""
    return size + 4 * -(-size // 256) if size >= 4096 else 4 * size


def test_8_bit_moments_of_an_adapter(gemma: Facts) -> None:
    # Per layer: q has A [8, 2304], B [2048, 8]; v has A [8, 2304], B [1024, 8].
    layer = (18_432 + 4 * 72) + (16_384 + 4 * 64) + (18_432 + 4 * 72) + (8_192 + 4 * 32)
    assert optimizer(lora(), gemma, "adamw_8bit") == 2 * 26 * layer == 3_244_800
    assert optimizer(lora(), gemma, "paged_adamw_8bit") == 2 * 26 * layer
    assert optimizer(lora(), gemma, "lion_8bit") == 26 * layer
    assert optimizer(lora(), gemma, "paged_lion_8bit") == 26 * layer


def test_small_tensors_keep_32_bit_state(gemma: Facts) -> None:
    # Rank 1: A has 2304 values, B 2048 and 1024; all are below 4096.
    assert optimizer(lora(rank=1), gemma, "adamw_8bit") == 2 * 4 * 26 * (2304 + 2048 + 2304 + 1024)
    # Rank 3: only v's B, 3072 values, is small; the blocks of the others are counted whole.
    layer = in_8_bits(3 * 2304) * 2 + in_8_bits(3 * 2048) + 4 * 3 * 1024
    assert optimizer(lora(rank=3), gemma, "adamw_8bit") == 2 * 26 * layer


def test_8_bit_moments_of_a_whole_model_leave_the_embedding_in_32(gemma: Facts) -> None:
    matrices, embedding, norms = 368_050_176 + 1_656_225_792, 589_824_000, 241_920
    expected = 2 * (matrices + matrices // 64) + 8 * embedding + 8 * norms
    assert optimizer(FULL, gemma, "adamw_8bit") == expected
    lines = [line for line in static_lines(FULL, gemma, "float32", "adamw_8bit") if line.bucket == "optimizer"]
    assert [line.bytes for line in lines] == [expected - 8 * embedding, 8 * embedding]


def test_8_bit_state_is_what_the_trainer_keeps(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

    folder = tiny_model(tmp_path / "model", hidden_size=128)
    model = AutoModelForCausalLM.from_pretrained(folder)
    arguments = TrainingArguments(str(tmp_path / "out"), optim="adamw_8bit", use_cpu=True, report_to=[])
    adam = Trainer(model, arguments).create_optimizer()
    tokens = torch.arange(8)[None]
    model(input_ids=tokens, labels=tokens).loss.backward()
    adam.step()
    state = [tensors for parameter in model.parameters() for tensors in adam.state[parameter].items()]
    held = sum(tensor.nbytes for name, tensor in state if name.startswith(("state", "absmax")))
    assert held == optimizer(FULL, read_facts(str(folder)), "adamw_8bit")


def test_other_optimizers(gemma: Facts) -> None:
    assert optimizer(FULL, gemma, "sgd") == 0
    for name in ("adamw_torch", "adamw_torch_fused", "paged_adamw_32bit"):
        assert optimizer(FULL, gemma, name) == 8 * GEMMA_N
    layer = 2 * (2048 + 2304) + 2 * (1024 + 2304) + 3 * (9216 + 2304) + 4 * 2304
    assert optimizer(FULL, gemma, "adafactor") == 4 * (26 * layer + 256_000 + 2304 + 2304)


def test_paged_state_is_named_so(gemma: Facts) -> None:
    for name in ("paged_adamw_8bit", "paged_adamw_32bit", "paged_lion_8bit"):
        assert static_lines(lora(), gemma, "bfloat16", name)[-1].name == f"{name} (unified memory)"
    assert static_lines(lora(), gemma, "bfloat16", "adamw_8bit")[-1].name == "adamw_8bit"


def test_dora_trains_a_magnitude_per_output(gemma: Facts) -> None:
    outputs = 26 * (2048 + 1024)
    assert static(lora(variant="dora"), gemma)["gradients"] == 4 * (GEMMA_QV_8 + outputs)
    assert optimizer(lora(variant="dora"), gemma, "adamw_torch") == 8 * (GEMMA_QV_8 + outputs)


# ----------------------------------------------------------------------------------------- activations, closed forms


def active(method: Method, facts: Facts, **settings: Any) -> dict[str, int]:
    usual = {"dtype": "bfloat16", "rows": 2, "length": 100, "checkpointing": False, "eager": False}
    lines = activation_lines(method, facts, **{**usual, **settings})
    assert not any(line.exact for line in lines)
    return buckets(lines)


H, MLP, Q, HEADS = 4096, 11008, 4096, 32  # Llama 7B; keys are as wide as queries
FULL_LAYER = 2 * (8 * H + 4) + 4 * Q + 4 * Q + 4 * HEADS + 8 * MLP
FROZEN_LAYER = 2 * (4 * H + 4) + 4 * Q + 4 * Q + 4 * HEADS + 6 * MLP


def test_activations_grow_with_layers_rows_and_length(llama: Facts) -> None:
    assert active(FULL, llama)["activations"] == 32 * FULL_LAYER * 200
    assert active(FULL, llama, rows=4)["activations"] == 32 * FULL_LAYER * 400
    assert active(FULL, llama, length=50)["activations"] == 32 * FULL_LAYER * 100


def test_fp32_doubles_them(llama: Facts) -> None:
    assert active(FULL, llama, dtype="float32")["activations"] == 2 * 32 * FULL_LAYER * 200


def test_adapters_keep_their_inputs(llama: Facts) -> None:
    method = lora(rank=16, targets="attention+mlp")
    kept = 20 * H + 4 * Q + 4 * MLP + 28 * 16
    assert len(adapter_shapes(method, llama)) == 7 * 32
    assert active(method, llama)["activations"] == 32 * (FROZEN_LAYER + kept) * 200
    assert active(qlora(rank=16), llama)["activations"] == 32 * (FROZEN_LAYER + kept) * 200


def test_checkpointing_keeps_one_input_per_layer_and_one_layer(llama: Facts) -> None:
    assert active(FULL, llama, checkpointing=True)["activations"] == (32 * 2 * H + FULL_LAYER) * 200


def test_eager_attention_keeps_the_scores(llama: Facts) -> None:
    more = active(FULL, llama, eager=True)["activations"] - active(FULL, llama)["activations"]
    assert more == 32 * 2 * 2 * HEADS * 100 * 200


def test_the_loss_head_holds_a_tile_of_the_vocabulary(llama: Facts, gemma: Facts) -> None:
    assert active(FULL, llama)["loss"] == 3 * 4 * 32_000 * 200
    assert active(FULL, gemma)["loss"] == 3 * 4 * 32_768 * 200
