"""Counts against hand arithmetic and against what peft and bitsandbytes really build on tiny random models."""

from __future__ import annotations

import functools
import math
import tempfile
from typing import Any

import pytest

from finetune.errors import InputError
from finetune.facts import Facts, read_facts
from finetune.method import (
    AdapterShape,
    Storage,
    adapter_shapes,
    constant_bytes,
    lora_config,
    quantization_config,
    scale,
    storage_bytes,
    target_modules,
    trainable_parameters,
)
from finetune.recipe import Full, LoRA, QLoRA
from finetune.tensors import Tensor

GEMMA, LLAMA = "google/gemma-2-2b", "meta-llama/Llama-2-7b-hf"
FULL = Full(kind="full")
STRATEGIES = ("qv", "attention", "attention+mlp")


def lora(**settings: Any) -> LoRA:
    return LoRA(**{"kind": "lora", "rank": 8, "alpha": 16, **settings})


def qlora(**settings: Any) -> QLoRA:
    return QLoRA(**{"kind": "qlora", "rank": 8, "alpha": 16, **settings})


# ------------------------------------------------------------------------------------------------- golden numbers


def test_gemma_rank_8_on_query_and_value():
    method, facts = lora(targets="qv"), read_facts(GEMMA)
    assert trainable_parameters(method, facts) == 26 * 8 * ((2304 + 2048) + (2304 + 1024)) == 1_597_440
    assert adapter_shapes(method, facts)[0] == AdapterShape("model.layers.0.self_attn.q_proj", 8, 2304, 2048)
    assert len(adapter_shapes(method, facts)) == 26 * 2


def test_llama_rank_8_on_all_seven_projections():
    per_layer = 4 * (4096 + 4096) + 3 * (4096 + 11008)
    for method in (lora(), qlora()):
        assert trainable_parameters(method, read_facts(LLAMA)) == 32 * 8 * per_layer == 19_988_480


def test_dora_adds_a_magnitude_per_output():
    outputs = 32 * (4 * 4096 + 2 * 11008 + 4096)
    assert trainable_parameters(lora(variant="dora"), read_facts(LLAMA)) == 19_988_480 + outputs


def test_full_trains_everything_and_has_no_adapters():
    facts = read_facts(GEMMA)
    assert trainable_parameters(FULL, facts) == 2_614_341_888
    assert (target_modules(FULL, facts), adapter_shapes(FULL, facts)) == ((), [])


def test_a_rank_above_the_layers_width_is_counted_like_any_other():
    facts = read_facts("smollm2-135m")
    per_layer = (576 + 576) + (576 + 192)
    assert trainable_parameters(lora(rank=4096, targets="qv"), facts) == 30 * 4096 * per_layer


def test_scale():
    assert scale(lora(rank=16, alpha=32)) == 2
    assert scale(qlora(rank=16, alpha=32, variant="dora")) == 2
    assert scale(lora(rank=16, alpha=32, variant="rslora")) == 8


# --------------------------------------------------------------------------------------------------------- storage


def test_16_and_32_bit_storage():
    facts = read_facts(GEMMA)
    assert storage_bytes(FULL, facts, "float32") == Storage(0, 0, 0, 0, 2_614_341_888, 4 * 2_614_341_888)
    assert storage_bytes(lora(), facts, "bfloat16").total == 2 * 2_614_341_888


def test_llama_in_4_bits():
    facts = read_facts(LLAMA)
    linear = 32 * (4 * 4096 * 4096 + 3 * 4096 * 11008)  # embedding, head and norms stay 16 bit
    rest = 2 * 32000 * 4096 + 65 * 4096
    single = storage_bytes(qlora(double_quant=False), facts, "bfloat16")
    assert (single.packed_parameters, single.packed, single.plain) == (linear, linear // 2, 2 * rest)
    assert single.packed + single.constants == linear * 0.5625
    assert single.tables == 32 * 7 * 4 * 16
    double = storage_bytes(qlora(), facts, "bfloat16")
    offsets = 32 * 7 * 4
    assert double.packed + double.constants - offsets == linear * (0.5 + 1 / 64 + 4 / (64 * 256))
    saved = (single.constants - double.constants + offsets) * 8 / linear
    assert saved == pytest.approx(0.373, abs=5e-4)  # bit per weight, QLoRA paper section 3
    assert double.total == double.packed + double.constants + double.tables + double.plain


def test_partial_blocks_are_counted_whole():
    assert constant_bytes(1, double_quant=False) == 4
    assert constant_bytes(65, double_quant=False) == 2 * 4
    assert constant_bytes(65, double_quant=True) == 2 + 4 + 4
    assert constant_bytes(64 * 257, double_quant=True) == 257 + 2 * 4 + 4


# ----------------------------------------------------------------------------------------------- real tiny models

BASE = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GPT = {"vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4, "bos_token_id": 1, "eos_token_id": 2}
LLAMA_LIKE = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
FUSED_DENSE = ("query_key_value", "self_attention.dense", "dense_h_to_4h", "dense_4h_to_h")

# model type -> (its config, number of targets that `qv` and `attention` take, what attention+mlp takes)
KINDS: dict[str, tuple[dict[str, Any], int, int, tuple[str, ...]]] = {
    "llama": (BASE, 2, 4, LLAMA_LIKE),
    "gemma2": ({**BASE, "head_dim": 16}, 2, 4, LLAMA_LIKE),
    "gemma3_text": ({**BASE, "head_dim": 16}, 2, 4, LLAMA_LIKE),
    "qwen2": ({**BASE, "tie_word_embeddings": True}, 2, 4, LLAMA_LIKE),
    "qwen3": ({**BASE, "head_dim": 16}, 2, 4, LLAMA_LIKE),
    "mistral": (BASE, 2, 4, LLAMA_LIKE),
    "olmo2": (BASE, 2, 4, LLAMA_LIKE),
    "phi3": (BASE, 1, 2, ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")),
    "phi": (BASE, 2, 4, ("q_proj", "k_proj", "v_proj", "self_attn.dense", "fc1", "fc2")),
    "gpt2": (GPT, 1, 2, ("c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")),
    "gpt_bigcode": (GPT, 1, 2, ("c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")),
    "gptj": ({**GPT, "rotary_dim": 4}, 2, 4, ("q_proj", "k_proj", "v_proj", "attn.out_proj", "fc_in", "fc_out")),
    "gpt_neox": (BASE, 1, 2, ("query_key_value", "attention.dense", "dense_h_to_4h", "dense_4h_to_h")),
    "falcon": (
        {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
        1,
        2,
        FUSED_DENSE,
    ),
    "bloom": ({"vocab_size": 96, "hidden_size": 32, "n_layer": 2, "n_head": 4}, 1, 2, FUSED_DENSE),
    "opt": (
        {
            "vocab_size": 96, "hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
            "word_embed_proj_dim": 16, "max_position_embeddings": 64,
        },
        2,
        4,
        ("q_proj", "k_proj", "v_proj", "self_attn.out_proj", "fc1", "fc2"),
    ),
    "mpt": (
        {"vocab_size": 96, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64},
        1,
        2,
        ("Wqkv", "attn.out_proj", "up_proj", "down_proj"),
    ),
}  # fmt: skip

# peft reads a property that this transformers version calls by a new name.
peft_reads_an_old_name = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")


def build(kind: str, config: dict[str, Any]) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **config))


def facts_of(model: Any) -> Facts:
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return read_facts(folder)


@functools.cache
def facts_of_kind(kind: str) -> Facts:
    return facts_of(build(kind, KINDS[kind][0]))


def built(kind: str, method: LoRA | QLoRA) -> int:
    """Trainable parameters of the peft model that the toolkit's own LoraConfig gives."""
    from peft import get_peft_model

    model = get_peft_model(build(kind, KINDS[kind][0]), lora_config(method, facts_of_kind(kind)))
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


@pytest.mark.parametrize("kind", KINDS)
def test_facts_are_those_of_the_loaded_model(kind: str):
    import torch
    from transformers.pytorch_utils import Conv1D

    model, facts = build(kind, KINDS[kind][0]), facts_of_kind(kind)
    assert facts.parameters == sum(parameter.numel() for parameter in model.parameters())
    head = model.get_output_embeddings()
    real = {
        name: tuple(module.weight.shape[::-1] if isinstance(module, Conv1D) else module.weight.shape)
        for name, module in model.named_modules()
        if isinstance(module, (torch.nn.Linear, Conv1D)) and module is not head
    }
    assert {name: (out, into) for name, out, into in facts.linears()} == real
    assert facts.tied == model.config.tie_word_embeddings
    assert facts.head() is None if facts.tied else facts.head()
    assert facts.layers == 2
    assert facts.heads == 4
    assert facts.head_dim == KINDS[kind][0].get("head_dim", 8)


@peft_reads_an_old_name
@pytest.mark.parametrize("kind", KINDS)
def test_strategies_build_what_is_counted(kind: str):
    _, qv, attention, everything = KINDS[kind]
    sizes = [len(target_modules(lora(targets=strategy), facts_of_kind(kind))) for strategy in STRATEGIES]
    assert sizes == [qv, attention, len(everything)]
    assert target_modules(lora(targets="attention+mlp"), facts_of_kind(kind)) == everything
    for strategy in STRATEGIES:
        method = lora(rank=3, targets=strategy, variant="dora" if strategy == "attention+mlp" else "lora")
        assert trainable_parameters(method, facts_of_kind(kind)) == built(kind, method)


def test_qv_takes_what_peft_would_take():
    from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as PEFT

    checked = 0
    for kind in KINDS:
        # peft adds phi's MLP to its default; the attention part must still agree.
        theirs = {name for name in PEFT.get(kind, ()) if name not in ("fc1", "fc2")}
        if theirs:
            assert set(target_modules(lora(targets="qv"), facts_of_kind(kind))) == theirs, kind
            checked += 1
    assert checked >= 14


@peft_reads_an_old_name
@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("llama", ["q_proj", "layers.1.mlp.down_proj", "model.layers.0.self_attn.k_proj", "q_proj"]),
        ("llama", ["lm_head"]),
        ("gpt2", ["c_proj"]),
    ],
)
def test_listed_names_match_as_in_peft(kind: str, names: list[str]):
    method = lora(rank=3, targets=names)
    assert trainable_parameters(method, facts_of_kind(kind)) == built(kind, method)
    assert target_modules(method, facts_of_kind(kind)) == tuple(dict.fromkeys(names))


def test_listed_names_that_match_nothing():
    facts = read_facts(GEMMA)
    with pytest.raises(InputError, match="names 'q_porj', and google/gemma-2-2b has no Linear layer") as caught:
        target_modules(lora(targets=["v_proj", "q_porj"]), facts)
    assert "'q_proj'" in caught.value.hint
    with pytest.raises(InputError, match="names 'q_porj', 'up_porj', and"):
        target_modules(lora(targets=["q_porj", "v_proj", "up_porj"]), facts)
    for name in ("proj", "model.layers.26.mlp.up_proj", "embed_tokens", "mlp"):
        with pytest.raises(InputError, match=f"'{name}'"):
            target_modules(lora(targets=[name]), facts)
    with pytest.raises(InputError, match="It has q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj"):
        target_modules(lora(targets=["xyzzy"]), facts)


def test_the_head_is_a_target_only_where_it_is_its_own():
    with pytest.raises(InputError, match="is its input embedding too"):
        target_modules(lora(targets=["q_proj", "lm_head"]), read_facts(GEMMA))
    assert trainable_parameters(lora(targets=["lm_head"]), read_facts(LLAMA)) == 8 * (4096 + 32000)


def made_up(*names: str) -> Facts:
    tensors = [
        Tensor("embed.weight", (4, 4), "F32"),
        *(Tensor(f"layers.0.{name}.weight", (4, 4), "F32") for name in names),
    ]
    return Facts("org/odd", "bundled", "Odd", "odd", 4, 4, 1, 1, 1, 4, 4, None, True, tuple(tensors))


def test_a_strategy_that_does_not_suit():
    odd = made_up("mixer.w_in", "mixer.w_out")
    for strategy in STRATEGIES:
        with pytest.raises(InputError, match="which has w_in, w_out") as caught:
            target_modules(lora(targets=strategy), odd)
        assert "method.targets" in caught.value.hint
    assert target_modules(lora(targets=["w_in"]), odd) == ("w_in",)


@peft_reads_an_old_name
@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("mixtral", {"num_local_experts": 4}),
        ("qwen2_moe", {"num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}),
    ],
)
def test_experts_and_routers_are_no_linear_layers(kind: str, more: dict[str, int]):
    import torch
    from peft import get_peft_model

    model = build(kind, {**BASE, **more})
    facts, method = facts_of(model), lora(rank=3, targets="attention")
    assert facts.parameters == sum(parameter.numel() for parameter in model.parameters())
    head = model.get_output_embeddings()
    linear = [name for name, m in model.named_modules() if isinstance(m, torch.nn.Linear) and m is not head]
    assert sorted(linear) == sorted(layer.name for layer in facts.linears())
    with pytest.raises(InputError, match="cannot reach the experts"):
        target_modules(lora(targets="attention+mlp"), facts)
    adapted = get_peft_model(model, lora_config(method, facts))
    assert trainable_parameters(method, facts) == sum(p.numel() for p in adapted.parameters() if p.requires_grad)


@peft_reads_an_old_name
def test_a_vision_tower_gets_no_adapters():
    from peft import get_peft_model

    small = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = {
        "text_config": {**small, "vocab_size": 96, "num_key_value_heads": 2, "head_dim": 16},
        "vision_config": {**small, "image_size": 28, "patch_size": 14},
        "mm_tokens_per_image": 4, "boi_token_index": 90, "eoi_token_index": 91, "image_token_index": 92,
    }  # fmt: skip
    model = build("gemma3", config)
    facts, method = facts_of(model), lora(rank=3)
    assert facts.has_towers
    assert facts.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert len(facts.linears()) == 2 * 7
    assert len(facts.linears(towers=True)) == 2 * 7 + 2 * 6 + 3  # + q, k, v, out, fc1, fc2; and the pooling head
    adapted = get_peft_model(model, lora_config(method, facts))
    trained = [name for name, parameter in adapted.named_parameters() if parameter.requires_grad]
    assert trained
    assert not any("vision" in name for name in trained)
    assert trainable_parameters(method, facts) == sum(p.numel() for p in adapted.parameters() if p.requires_grad)


# ------------------------------------------------------------------------------------------- the libraries' settings


@peft_reads_an_old_name
@pytest.mark.parametrize("variant", ["lora", "rslora", "dora"])
def test_scale_is_the_one_that_peft_uses(variant: str):
    from peft import get_peft_model

    method = lora(rank=4, alpha=6, variant=variant)
    model = get_peft_model(build("llama", BASE), lora_config(method, facts_of_kind("llama")))
    layers = [module for module in model.modules() if hasattr(module, "lora_A")]
    assert len(layers) == 2 * 7
    assert all(math.isclose(layer.scaling["default"], scale(method)) for layer in layers)


def test_lora_config():
    config = lora_config(lora(rank=4, alpha=16.0, dropout=0.1, targets="qv"), read_facts(LLAMA))
    assert (config.r, config.lora_alpha, config.lora_dropout, config.bias) == (4, 16, 0.1, "none")
    assert isinstance(config.lora_alpha, int)
    assert config.target_modules == {"q_proj", "v_proj"}
    assert config.exclude_modules is None
    assert not config.use_dora
    assert not config.use_rslora
    assert lora_config(lora(alpha=0.5), read_facts(LLAMA)).lora_alpha == 0.5
    assert lora_config(qlora(variant="dora"), read_facts(LLAMA)).use_dora


def test_quantization_config():
    import torch

    config = quantization_config(qlora(quant="fp4", double_quant=False), "bfloat16")
    assert config.load_in_4bit
    assert config.bnb_4bit_quant_type == "fp4"
    assert not config.bnb_4bit_use_double_quant
    assert config.bnb_4bit_compute_dtype == torch.bfloat16
    assert config.bnb_4bit_quant_storage == torch.uint8
    sharded = quantization_config(qlora(), torch.float16, "bfloat16")
    assert (sharded.bnb_4bit_compute_dtype, sharded.bnb_4bit_quant_storage) == (torch.float16, torch.bfloat16)


@pytest.mark.parametrize("kind", ["llama", "gemma2", "qwen2", "gpt2", "phi3"])
@pytest.mark.parametrize("double", [False, True])
def test_storage_is_what_bitsandbytes_holds(kind: str, double: bool):
    """Every byte of a model really loaded in 4 bits, packed weights with their quantisation state."""
    import torch
    from transformers import AutoModelForCausalLM

    method = qlora(double_quant=double)
    with tempfile.TemporaryDirectory() as folder:
        build(kind, KINDS[kind][0]).save_pretrained(folder)
        options = {"quantization_config": quantization_config(method, "float32"), "dtype": torch.bfloat16}
        model = AutoModelForCausalLM.from_pretrained(folder, **options)
    packed = constants = tables = plain = 0
    for parameter in model.parameters():
        if (state := getattr(parameter, "quant_state", None)) is None:
            plain += parameter.nbytes
            continue
        packed += parameter.nbytes
        constants += state.absmax.nbytes
        tables += state.code.nbytes
        if double:
            constants += state.state2.absmax.nbytes + state.offset.nbytes
            tables += state.state2.code.nbytes
    predicted = storage_bytes(method, facts_of_kind(kind), "bfloat16")
    assert (predicted.packed, predicted.constants, predicted.tables, predicted.plain) == (
        packed,
        constants,
        tables,
        plain,
    )
    assert packed > 0
