"""Merges against arithmetic, against peft's own merge, and against everything that must be refused."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from finetune.adapter_file import lora_scale, pattern_value
from finetune.errors import FinetuneError, InputError, ModelError, RunError
from finetune.fold import Merged, Options
from finetune.fold import merge_adapter as real_merge
from finetune.model_files import repair_generation
from finetune.weight_files import fingerprint, read_model
from tests.tiny import tiny_model, tiny_tokenizer

Q = "model.layers.0.self_attn.q_proj"
IDS = torch.arange(30, 60)[None]
ROWS = [list(range(30, 70)), list(range(120, 140))]

pytestmark = pytest.mark.usefixtures("one_thread")


def merge_adapter(base: Path, adapter: Any, output: Path, *, progress: Any = None, **options: Any) -> Merged:
    """The merge under test, with its options by name."""
    return real_merge(base, adapter, output, Options(**options), progress=progress)


def load_model(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    return model.eval()


def write_adapter(
    base: Path, folder: Path, *, seed: int = 1, targets: Any = ("q_proj", "v_proj"), **config: Any
) -> Path:
    """A peft adapter whose every tensor is random and not zero, saved by peft itself."""
    from peft import LoraConfig, get_peft_model

    fields = {"r": 4, "lora_alpha": 12, "target_modules": targets if isinstance(targets, str) else list(targets)}
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)  # peft draws A: the same one whichever tests ran before
        warnings.simplefilter("ignore")  # peft warns of tied weights, which is what some of these tests are about
        model = get_peft_model(load_model(base), LoraConfig(task_type="CAUSAL_LM", **{**fields, **config}))
        generator = torch.Generator().manual_seed(seed)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
        model.save_pretrained(str(folder))
    return folder


def with_peft(base: Path, adapter: Path) -> Any:
    from peft import PeftModel

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return PeftModel.from_pretrained(load_model(base), str(adapter)).eval()


def weights(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("model*.safetensors")):
        tensors = load_file(file)
        assert not set(tensors) & set(found), "a tensor is stored twice"
        found.update(tensors)
    return found


def edit(file: Path, **fields: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def rewrite(adapter: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    file = adapter / "adapter_model.safetensors"
    save_file(change(load_file(file)), file)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(IDS).logits
    return found


def assert_same_answers(base: Path, adapter: Path, merged: Path) -> None:
    """The merged model answers as base + adapter, and not as the base."""
    expected = logits(with_peft(base, adapter))
    assert (expected - logits(load_model(base))).abs().max() > 1e-2, (
        "this adapter changes too little to prove anything"
    )
    assert (expected - logits(load_model(merged))).abs().max() < 1e-4


def partials(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if ".part-" in path.name]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A float32 tied base and an adapter for it, not to be changed."""
    folder = tmp_path_factory.mktemp("pair")
    base = tiny_model(folder / "base")
    return base, write_adapter(base, folder / "adapter")


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """Sharded float32 bases by whether they are tied, not to be changed."""
    folder = tmp_path_factory.mktemp("bases")
    return {tied: tiny_model(folder / str(tied), tied=tied, shards=2) for tied in (True, False)}


@pytest.fixture
def own(pair: tuple[Path, Path], tmp_path: Path) -> tuple[Path, Path]:
    """The same, to be broken."""
    return shutil.copytree(pair[0], tmp_path / "base"), shutil.copytree(pair[1], tmp_path / "adapter")


# ----------------------------------------------------------------------------------------------------- the arithmetic


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_tensor_is_the_arithmetic_rounded_once(tmp_path: Path, dtype: str) -> None:
    base = tiny_model(tmp_path / "base", dtype=dtype)
    adapter = write_adapter(base, tmp_path / "adapter", targets=["q_proj", "down_proj"])
    result = merge_adapter(base, adapter, tmp_path / "out")
    before, after, change = weights(base), weights(result.folder), load_file(adapter / "adapter_model.safetensors")
    assert set(after) == set(before)
    changed = 0
    for name, weight in before.items():
        module = f"base_model.model.{name.removesuffix('.weight')}"
        expected = weight
        if f"{module}.lora_A.weight" in change:
            step = (change[f"{module}.lora_B.weight"] @ change[f"{module}.lora_A.weight"]) * 3.0
            expected = (weight.float() + step).to(weight.dtype)
            assert not torch.equal(expected, weight)
            changed += 1
        assert after[name].dtype == weight.dtype
        assert torch.equal(after[name], expected), name
    size = sum(tensor.numel() * tensor.element_size() for tensor in before.values())
    assert changed == 4
    assert result == Merged(tmp_path / "out", len(before), 4, size, result.seconds, 3.0, ())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_bits_are_those_of_pefts_merge(tmp_path: Path, dtype: str) -> None:
    """peft adds a float32 change to a 16-bit weight with one rounding too."""
    base = tiny_model(tmp_path / "base", dtype=dtype, shards=3)
    adapter = write_adapter(base, tmp_path / "adapter", targets="all-linear")
    merge_adapter(base, adapter, tmp_path / "out")
    peft = with_peft(base, adapter).merge_and_unload().state_dict()
    after = weights(tmp_path / "out")
    assert set(after) == set(peft) - {"lm_head.weight"}
    for name, weight in after.items():
        assert torch.equal(weight, peft[name]), name


def test_bf16_adapter_is_rounded_once(tmp_path: Path) -> None:
    base = tiny_model(tmp_path / "base", dtype="bfloat16")
    adapter = write_adapter(base, tmp_path / "adapter")
    rewrite(adapter, lambda tensors: {name: tensor.bfloat16() for name, tensor in tensors.items()})
    merge_adapter(base, adapter, tmp_path / "out")
    change = load_file(adapter / "adapter_model.safetensors")
    a, b = (change[f"base_model.model.{Q}.lora_{part}.weight"].double() for part in "AB")
    exact = weights(base)[f"{Q}.weight"].double() + 3.0 * b @ a
    assert torch.equal(weights(tmp_path / "out")[f"{Q}.weight"], exact.to(torch.bfloat16))


@pytest.mark.parametrize(
    "config",
    [
        pytest.param({}, id="lora"),
        pytest.param({"use_rslora": True}, id="rslora"),
        pytest.param({"use_dora": True}, id="dora"),
        pytest.param({"use_dora": True, "use_rslora": True, "targets": "all-linear"}, id="dora, rslora, all-linear"),
        pytest.param({"rank_pattern": {"v_proj": 2}, "alpha_pattern": {r"0\.self_attn\.q_proj": 40}}, id="patterns"),
        pytest.param({"targets": r".*layers\.1\.mlp\.(up|down)_proj"}, id="target expression"),
        pytest.param({"modules_to_save": ["embed_tokens", "lm_head"]}, id="both saved"),
        pytest.param({"modules_to_save": ["embed_tokens"]}, id="embedding saved"),
        pytest.param({"modules_to_save": ["lm_head"]}, id="head saved"),
        pytest.param({"modules_to_save": ["norm"]}, id="norm saved"),
    ],
)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_merged_answers_as_base_and_adapter(
    tmp_path: Path, bases: dict[bool, Path], config: dict[str, Any], tied: bool
) -> None:
    base = bases[tied]
    adapter = write_adapter(base, tmp_path / "adapter", **config)
    result = merge_adapter(base, adapter, tmp_path / "out", rows=ROWS)
    assert_same_answers(base, adapter, result.folder)
    assert result.proof is not None
    assert result.proof.difference < 1e-4
    assert result.proof.same == result.proof.places == 32  # 16 of each row
    saved = set(config.get("modules_to_save", [])) & {"embed_tokens", "lm_head"}
    untied = tied and bool(saved) and "ensure_weight_tying" not in config
    says = json.loads((result.folder / "config.json").read_text())["tie_word_embeddings"]
    assert says is (tied and not untied)
    assert ("lm_head.weight" in weights(result.folder)) is (untied or not tied)
    if untied:
        assert any("tie_word_embeddings" in note for note in result.notes)


def test_matrices_that_were_trained_as_one_stay_one(tmp_path: Path, bases: dict[bool, Path]) -> None:
    tying: dict[str, Any] = {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}
    adapter = write_adapter(bases[True], tmp_path / "adapter", **tying)
    assert "base_model.model.lm_head.weight" in load_file(adapter / "adapter_model.safetensors")
    result = merge_adapter(bases[True], adapter, tmp_path / "out")
    assert_same_answers(bases[True], adapter, result.folder)
    assert json.loads((result.folder / "config.json").read_text())["tie_word_embeddings"] is True
    assert set(weights(result.folder)) == set(weights(bases[True]))


@pytest.mark.parametrize("arch", ["gemma2", "qwen2"])
def test_ties_that_the_config_file_leaves_out(tmp_path: Path, arch: str) -> None:
    """Gemma's config class ties by default and Qwen2's does not; published files leave the field out."""
    tied = arch == "gemma2"
    base = tiny_model(tmp_path / "base", tied=tied, arch=arch)
    config = json.loads((base / "config.json").read_text())
    del config["tie_word_embeddings"]
    (base / "config.json").write_text(json.dumps(config))
    adapter = write_adapter(base, tmp_path / "adapter", modules_to_save=["lm_head"])
    result = merge_adapter(base, adapter, tmp_path / "out")
    assert_same_answers(base, adapter, result.folder)
    assert json.loads((result.folder / "config.json").read_text()).get("tie_word_embeddings", "out") == (
        False if tied else "out"
    )


def test_lora_on_embedding_and_head_of_an_untied_base(tmp_path: Path) -> None:
    base = tiny_model(tmp_path / "base", tied=False)
    adapter = write_adapter(base, tmp_path / "adapter", targets=["embed_tokens", "lm_head", "q_proj"])
    result = merge_adapter(base, adapter, tmp_path / "out")
    assert result.merged == 4
    assert_same_answers(base, adapter, result.folder)


def gpt2(folder: Path, *, headless: bool = False) -> Path:
    """GPT-2 keeps its linear weights as in x out; hub copies of it leave `transformer.` out of the names."""
    from transformers import GPT2Config, GPT2LMHeadModel, GPT2Model

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=len(tiny_tokenizer()), n_embd=32, n_layer=2, n_head=2, n_positions=64)
    config.bos_token_id = config.eos_token_id = config.pad_token_id = 3
    config.architectures = ["GPT2LMHeadModel"]
    if headless:
        GPT2Model(config).save_pretrained(folder)
        edit(folder / "config.json", architectures=["GPT2LMHeadModel"])
    else:
        GPT2LMHeadModel(config).save_pretrained(folder)
    return folder


def test_a_model_with_a_vision_part(tmp_path: Path) -> None:
    """Gemma 3's files say `language_model.model.layers`, its modules and adapters `model.language_model.layers`."""
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    tokenizer = tiny_tokenizer()
    size = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    text = {**size, "vocab_size": len(tokenizer) + 4, "num_hidden_layers": 2, "head_dim": 16}
    vision = {**size, "num_hidden_layers": 1, "image_size": 16, "patch_size": 4}
    config: Any = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=320)  # type: ignore[arg-type]
    torch.manual_seed(0)
    Gemma3ForConditionalGeneration(config).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    adapter = write_adapter(tmp_path / "base", tmp_path / "adapter", targets=r".*language_model.*(q_proj|up_proj)")
    result = merge_adapter(tmp_path / "base", adapter, tmp_path / "out", rows=ROWS)
    assert result.merged == 4
    assert set(weights(result.folder)) == set(weights(tmp_path / "base"))
    assert any(name.startswith("language_model.model.layers.0.") for name in weights(result.folder))
    assert_same_answers(tmp_path / "base", adapter, result.folder)
    assert result.proof is not None, result.notes


def test_a_mixture_of_experts(tmp_path: Path) -> None:
    """The files keep each expert alone, and transformers packs them when it loads."""
    from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

    config = Qwen2MoeConfig(
        vocab_size=len(tiny_tokenizer()), hidden_size=32, intermediate_size=64, moe_intermediate_size=16,
        shared_expert_intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        num_experts=3, num_experts_per_tok=2, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    Qwen2MoeForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "base")
    assert "model.layers.0.mlp.experts.2.down_proj.weight" in weights(tmp_path / "base")
    adapter = write_adapter(tmp_path / "base", tmp_path / "adapter", targets=["q_proj", "o_proj"])
    result = merge_adapter(tmp_path / "base", adapter, tmp_path / "out", rows=ROWS)
    peft = with_peft(tmp_path / "base", adapter).merge_and_unload().state_dict()
    changed = [name for name in weights(result.folder) if "self_attn" in name]
    assert all(torch.equal(weights(result.folder)[name], peft[name]) for name in changed)
    assert result.proof is not None, result.notes
    assert result.proof.difference < 1e-5


@pytest.mark.parametrize("headless", [False, True])
@pytest.mark.parametrize(
    "config",
    [
        pytest.param({}, id="lora"),
        pytest.param({"use_dora": True}, id="dora"),
        pytest.param({"modules_to_save": ["lm_head"]}, id="head saved"),
        pytest.param({"bias": "all"}, id="biases"),
    ],
)
def test_transposed_weights_of_gpt2(tmp_path: Path, headless: bool, config: dict[str, Any]) -> None:
    base = gpt2(tmp_path / "base", headless=headless)
    adapter = write_adapter(base, tmp_path / "adapter", targets=["c_attn", "c_proj"], fan_in_fan_out=True, **config)
    result = merge_adapter(base, adapter, tmp_path / "out")
    assert_same_answers(base, adapter, result.folder)


def test_a_square_transposed_weight_does_not_trust_the_flag(tmp_path: Path) -> None:
    """peft writes the flag of the last layer it saw, so a file may say false for a transposed weight."""
    base = gpt2(tmp_path / "base")
    adapter = write_adapter(base, tmp_path / "adapter", targets=["attn.c_proj"], fan_in_fan_out=True)
    edit(adapter / "adapter_config.json", fan_in_fan_out=False)
    merge_adapter(base, adapter, tmp_path / "out")
    assert_same_answers(base, adapter, tmp_path / "out")


def test_scale_follows_pefts_patterns() -> None:
    config = {
        "r": 16,
        "lora_alpha": 16,
        "rank_pattern": {"v_proj": 4, r"1\.q_proj": 64},
        "alpha_pattern": {"^a.0": 8},
    }
    assert lora_scale(config) == 1.0
    assert lora_scale({**config, "use_rslora": True}) == 4.0
    assert lora_scale(config, "layers.0.v_proj") == 16 / 4
    assert lora_scale(config, "layers.1.q_proj") == 16 / 64
    assert lora_scale(config, "layers.11.q_proj") == 1.0
    assert lora_scale(config, "layers.0.my_v_proj") == 1.0
    peft_rule = pytest.importorskip("peft.utils.other").get_pattern_key
    for patterns in ({"v_proj": 1}, {"^layers.0.v_proj": 1}, {"0.v_proj": 2, "v_proj": 1}, {"v": 1}, {".*v_proj": 3}):
        for module in ("layers.0.v_proj", "v_proj", "layers.10.v_proj", "layers.0.q_proj"):
            expected = patterns.get(peft_rule(patterns.keys(), module), 0)
            assert pattern_value(patterns, module, 0) == expected


def test_asked_dtype_is_rounded_from_float32(own: tuple[Path, Path], tmp_path: Path) -> None:
    base, adapter = own
    edit(base / "config.json", text_config={"torch_dtype": "float32"})
    full = weights(merge_adapter(base, adapter, tmp_path / "full").folder)
    half = merge_adapter(base, adapter, tmp_path / "half", dtype="bfloat16")
    assert half.bytes * 2 == sum(tensor.numel() * 4 for tensor in full.values())
    for name, weight in weights(half.folder).items():
        assert torch.equal(weight, full[name].bfloat16()), name
    config = json.loads((half.folder / "config.json").read_text())
    assert config["dtype"] == config["text_config"]["torch_dtype"] == "bfloat16"


def test_overflow_in_float16_is_refused(own: tuple[Path, Path], tmp_path: Path) -> None:
    base, adapter = own
    rewrite(adapter, lambda tensors: {name: tensor * 1e4 for name, tensor in tensors.items()})
    with pytest.raises(InputError, match=f"'{Q}.weight' would hold NaN or infinity as float16"):
        merge_adapter(base, adapter, tmp_path / "out", dtype="float16")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "base"]
    assert merge_adapter(base, adapter, tmp_path / "out", dtype="bfloat16").merged == 4


# --------------------------------------------------------------------------------------------------------- the folder


def test_sharded_base_keeps_its_files_and_index(tmp_path: Path) -> None:
    base = tiny_model(tmp_path / "base", shards=4, dtype="bfloat16")
    adapter = write_adapter(base, tmp_path / "adapter", modules_to_save=["lm_head"])
    result = merge_adapter(base, adapter, tmp_path / "out")
    index = json.loads((result.folder / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in base.glob("*.safetensors"))
    assert sorted(path.name for path in result.folder.glob("*.safetensors")) == files
    assert len(files) == 4
    after = weights(result.folder)
    assert set(index["weight_map"]) == set(after) == {*weights(base), "lm_head.weight"}
    for name, file in index["weight_map"].items():
        assert name in load_file(result.folder / file)
    assert index["metadata"]["total_size"] == result.bytes == sum(t.numel() * 2 for t in after.values())
    assert load_model(result.folder).dtype == torch.bfloat16


def test_progress_counts_bytes_to_the_end(pair: tuple[Path, Path], tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    result = merge_adapter(*pair, tmp_path / "out", progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (result.bytes, result.bytes)
    assert seen == sorted(set(seen))
    assert {total for _, total in seen} == {result.bytes}


def test_config_tokenizer_and_licence_come_along(own: tuple[Path, Path], tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    base, adapter = own
    edit(base / "config.json", quantization_config={"quant_method": "bitsandbytes"})
    (base / "LICENSE").write_text("yes")
    (base / "README.md").write_text("the base's card")
    (base / "pytorch_model.bin").write_text("weights")
    result = merge_adapter(base, adapter, tmp_path / "out")
    assert "quantization_config" not in json.loads((result.folder / "config.json").read_text())
    assert any("quantization_config" in note for note in result.notes)
    names = {path.name for path in result.folder.iterdir()}
    assert "LICENSE" in names
    assert not names & {"pytorch_model.bin", "adapter_config.json"}
    assert "the base's card" not in (result.folder / "README.md").read_text()
    assert AutoTokenizer.from_pretrained(result.folder).chat_template == tiny_tokenizer().chat_template


def test_the_adapters_tokenizer_and_template_win_whole(own: tuple[Path, Path], tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    base, adapter = own
    (base / "added_tokens.json").write_text('{"<base only>": 400}')
    other = tiny_tokenizer("qwen3")
    other.save_pretrained(adapter)
    merge_adapter(base, adapter, tmp_path / "out")
    loaded = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert loaded.chat_template == other.chat_template
    assert loaded.pad_token == other.pad_token
    assert not (tmp_path / "out" / "added_tokens.json").exists()


def test_template_inside_the_adapters_tokenizer_config_is_not_overruled(
    own: tuple[Path, Path], tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    base, adapter = own
    tiny_tokenizer("qwen3").save_pretrained(adapter)
    template = (adapter / "chat_template.jinja").read_text()
    (adapter / "chat_template.jinja").unlink()
    edit(adapter / "tokenizer_config.json", chat_template=template)
    merge_adapter(base, adapter, tmp_path / "out")
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template == template


def test_trained_stop_tokens_are_joined_with_the_bases(own: tuple[Path, Path], tmp_path: Path) -> None:
    from transformers import GenerationConfig

    base, adapter = own
    edit(base / "generation_config.json", eos_token_id=[6, 7], max_length=99)
    (adapter / "generation_config.json").write_text('{"eos_token_id": [8, 6]}')
    result = merge_adapter(base, adapter, tmp_path / "out")
    generation = GenerationConfig.from_pretrained(result.folder)
    assert (generation.eos_token_id, generation.max_length) == ([6, 7, 8], 99)
    assert set(json.loads((result.folder / "config.json").read_text())["eos_token_id"]) >= {6, 8}
    assert any("[8]" in note for note in result.notes)


@pytest.mark.parametrize("mentions", [False, True])
def test_the_tokenizer_names_the_trained_end_too(own: tuple[Path, Path], tmp_path: Path, mentions: bool) -> None:
    """llama.cpp's converter reads nothing else. A template that prints its eos_token keeps the one it has."""
    from transformers import AutoTokenizer

    base, adapter = own
    tokenizer = tiny_tokenizer("qwen3")
    ending = tokenizer.convert_tokens_to_ids("<|im_end|>")
    other = next(token for token in tokenizer.all_special_tokens if token != "<|im_end|>")
    tokenizer.eos_token = other
    tokenizer.chat_template = "{{ eos_token }}" * mentions + "{{ messages }}"
    tokenizer.save_pretrained(adapter)
    (adapter / "generation_config.json").write_text(json.dumps({"eos_token_id": [ending, tokenizer.eos_token_id]}))
    result = merge_adapter(base, adapter, tmp_path / "out")
    found = AutoTokenizer.from_pretrained(result.folder)
    assert found.eos_token == (other if mentions else "<|im_end|>")
    assert any("eos_token is now <|im_end|>" in note for note in result.notes) != mentions
    assert found("Hello <|im_end|>").input_ids == tokenizer("Hello <|im_end|>").input_ids


def test_stop_tokens_without_a_generation_config_in_the_base(own: tuple[Path, Path], tmp_path: Path) -> None:
    base, adapter = own
    (base / "generation_config.json").unlink()
    (adapter / "generation_config.json").write_text('{"eos_token_id": 8}')
    merge_adapter(base, adapter, tmp_path / "out")
    eos = json.loads((base / "config.json").read_text())["eos_token_id"]
    assert json.loads((tmp_path / "out/generation_config.json").read_text())["eos_token_id"] == [eos, 8]


def test_generation_config_that_transformers_would_not_save(own: tuple[Path, Path], tmp_path: Path) -> None:
    from transformers import GenerationConfig

    base, adapter = own
    broken = {"do_sample": False, "temperature": 0.9, "top_p": 0.6, "eos_token_id": [2, 5], "max_length": 4096}
    (base / "generation_config.json").write_text(json.dumps(broken))
    with pytest.raises(ValueError, match="temperature"):
        GenerationConfig(**broken).save_pretrained(tmp_path / "no")  # type: ignore[no-untyped-call]
    result = merge_adapter(base, adapter, tmp_path / "out")
    generation = GenerationConfig.from_pretrained(result.folder)
    generation.max_length = 4095  # transformers judges a config that was changed after loading
    generation.save_pretrained(tmp_path / "yes")
    generation.max_length = 4096
    assert (generation.eos_token_id, generation.max_length, generation.temperature) == ([2, 5], 4096, 0.9)
    assert any("do_sample" in note for note in result.notes)


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ({"temperature": 0, "do_sample": True, "top_p": 0.9}, {"do_sample": False}),
        ({"temperature": 1.0, "top_k": 50}, {"temperature": 1.0, "top_k": 50}),
        ({"top_k": 20}, {"top_k": 20, "do_sample": True}),
        ({"num_beams": 1, "early_stopping": True, "eos_token_id": 3}, {"num_beams": 1, "eos_token_id": 3}),
        ({"max_new_tokens": -1, "max_length": 7}, {"max_length": 7}),
    ],
)
def test_generation_repairs(given: dict[str, Any], kept: dict[str, Any]) -> None:
    from transformers import GenerationConfig

    fixed, notes = repair_generation(given)
    assert fixed == kept
    assert bool(notes) is (given != kept)
    GenerationConfig(**fixed).validate(strict=True)  # type: ignore[no-untyped-call]


# -------------------------------------------------------------------------------------------------- twice, and in use


def test_the_same_merge_again_is_returned_untouched(own: tuple[Path, Path], tmp_path: Path) -> None:
    base, adapter = own
    first = merge_adapter(base, adapter, tmp_path / "out")
    stamps = {path: path.stat().st_mtime_ns for path in first.folder.iterdir()}
    moved = base.rename(tmp_path / "moved")
    again = merge_adapter(moved, adapter, tmp_path / "out")
    assert {path: path.stat().st_mtime_ns for path in first.folder.iterdir()} == stamps
    assert (again.tensors, again.merged, again.bytes, again.scale) == (first.tensors, 4, first.bytes, 3.0)
    assert "already holds exactly this merge" in again.notes[-1]
    (tmp_path / "out/model.safetensors").unlink()
    with pytest.raises(RunError, match="its weights changed since"):
        merge_adapter(moved, adapter, tmp_path / "out")


@pytest.mark.parametrize("other", ["base", "adapter", "scale", "dtype"])
def test_another_merge_in_the_output_is_refused(own: tuple[Path, Path], tmp_path: Path, other: str) -> None:
    base, adapter = own
    merge_adapter(base, adapter, tmp_path / "out")
    before = weights(tmp_path / "out")
    if other == "base":  # equal headers, other weights
        base = tiny_model(tmp_path / "second", seed=5)
    elif other == "adapter":
        adapter = write_adapter(base, tmp_path / "second", seed=5)
    elif other == "scale":
        edit(adapter / "adapter_config.json", lora_alpha=13)
    with pytest.raises(RunError, match="holds another merge, of base .*") as caught:
        merge_adapter(base, adapter, tmp_path / "out", dtype="bfloat16" if other == "dtype" else "auto")
    assert caught.value.exit_code == 2
    assert all(torch.equal(weight, before[name]) for name, weight in weights(tmp_path / "out").items())


def test_output_with_something_in_it_is_refused(pair: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full/notes.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "empty").mkdir()
    for name in ("full", "file"):
        with pytest.raises(RunError, match="exists and is not an empty folder"):
            merge_adapter(*pair, tmp_path / name)
    merge_adapter(*pair, tmp_path / "empty")
    with pytest.raises(RunError, match="exists and is not"):
        merge_adapter(*pair, pair[0])
    assert not partials(tmp_path)


def test_a_full_disk_is_seen_before_the_work(
    pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=1000))
    with pytest.raises(RunError, match="needs 0.0 GB and .* has 0.0 GB free"):
        merge_adapter(*pair, tmp_path / "new" / "out")
    assert list(tmp_path.iterdir()) == []


def test_merging_into_a_merged_folder_is_refused(pair: tuple[Path, Path], tmp_path: Path) -> None:
    merge_adapter(*pair, tmp_path / "once")
    with pytest.raises(RunError, match="already a merge result, of base .*pair.* and adapter .*pair"):
        merge_adapter(tmp_path / "once", pair[1], tmp_path / "twice")
    mark = json.loads((tmp_path / "once/finetune_merge.json").read_text())
    assert mark["base"]["sha256"] == fingerprint(read_model(pair[0]))
    assert len(mark["adapter"]["sha256"]) == 64
    assert (mark["scale"], mark["versions"]["torch"]) == (3.0, torch.__version__)
    (tmp_path / "once/finetune_merge.json").unlink()  # the explicit yes
    merge_adapter(tmp_path / "once", pair[1], tmp_path / "twice")


def test_a_change_of_zero_is_said(own: tuple[Path, Path], tmp_path: Path) -> None:
    base, adapter = own
    rewrite(adapter, lambda tensors: {n: t * 0 if "lora_B" in n else t for n, t in tensors.items()})
    assert "Every B of this adapter is zero" in merge_adapter(base, adapter, tmp_path / "out").notes[0]


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(28, "No space left on device"), ZeroDivisionError])
def test_any_failure_leaves_nothing(pair: tuple[Path, Path], tmp_path: Path, error: Any) -> None:
    def fail(done: int, total: int) -> None:
        if done > total // 2:
            raise error

    expected = FinetuneError if isinstance(error, OSError) else error
    with pytest.raises(expected):
        merge_adapter(*pair, tmp_path / "deep" / "out", progress=fail)
    assert not (tmp_path / "deep").exists()
    (tmp_path / "deep/out.part-0123456789abcdef").mkdir(parents=True)  # of a merge that was killed
    merge_adapter(*pair, tmp_path / "deep" / "out")
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["out"]


def test_a_merge_that_still_runs_is_left_alone(pair: tuple[Path, Path], tmp_path: Path) -> None:
    part = tmp_path / "out.part-0123456789abcdef"
    part.mkdir()
    handle = os.open(part, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)  # as its process does while it lives
    try:
        merge_adapter(*pair, tmp_path / "out")
        assert part.is_dir()
    finally:
        os.close(handle)


def test_what_is_like_a_leftover_and_is_none_stays(pair: tuple[Path, Path], tmp_path: Path) -> None:
    others = [tmp_path / name for name in ("out.part-two", "out.part-2", "out2.part-0123456789abcdef", "out")]
    for other in others[:-1]:
        other.mkdir()
        (other / "mine").write_text("mine")
    merge_adapter(*pair, tmp_path / "out")
    assert sorted(tmp_path.iterdir()) == sorted(others)
    assert all((other / "mine").is_file() for other in others[:-1])


def test_leftovers_go_before_the_space_is_looked_at(
    pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = tmp_path / "out.part-0123456789abcdef"
    part.mkdir()
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=0 if part.exists() else 10**12))
    assert merge_adapter(*pair, tmp_path / "out").merged


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (lambda out: (out / "tokenizer.json").unlink(), "tokenizer.json"),
        (lambda out: (out / "config.json").write_text("{}"), "config.json|weights"),
        (lambda out: zeroed(max(out.glob("*.safetensors"))), "weights"),
        (lambda out: max(out.glob("*.safetensors")).unlink(), "weights"),
    ],
)
def test_a_result_that_has_changed_is_not_taken_for_finished(
    own: tuple[Path, Path], tmp_path: Path, spoil: Callable[[Path], object], named: str
) -> None:
    tiny_tokenizer("smollm2").save_pretrained(own[1])
    out = merge_adapter(*own, tmp_path / "out").folder
    (out / "notes-of-mine.txt").write_text("people may add files")
    assert "already holds exactly this merge" in merge_adapter(*own, out).notes[-1]
    spoil(out)
    with pytest.raises(RunError, match=named):
        merge_adapter(*own, out)


def test_a_base_with_nan_is_named_as_that(own: tuple[Path, Path], tmp_path: Path) -> None:
    file = own[0] / "model.safetensors"
    tensors = load_file(file)
    tensors[f"{Q}.weight"][0, 0] = float("nan")
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(FinetuneError, match="gives NaN or infinity"):
        merge_adapter(*own, tmp_path / "out", rows=ROWS)
    assert not (tmp_path / "out").exists()
    assert partials(tmp_path) == []


def test_a_single_shard_of_any_name_is_found_again(
    pair: tuple[Path, Path], own: tuple[Path, Path], tmp_path: Path
) -> None:
    """As some bases have it: one file that is named as the first of one, and an index."""
    base, adapter = own
    (base / "model.safetensors").rename(base / "model-00001-of-00001.safetensors")
    names = load_file(base / "model-00001-of-00001.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, "model-00001-of-00001.safetensors")}
    (base / "model.safetensors.index.json").write_text(json.dumps(index))
    found, right = (
        merge_adapter(base, adapter, tmp_path / "out").folder,
        merge_adapter(*pair, tmp_path / "right").folder,
    )
    for name, weight in load_model(found).state_dict().items():
        assert torch.equal(weight, load_model(right).state_dict()[name])


def zeroed(file: Path) -> None:
    with file.open("r+b") as opened:
        opened.seek(-64, os.SEEK_END)
        opened.write(bytes(64))


def test_a_result_without_a_proof_is_proved_when_that_is_asked(pair: tuple[Path, Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert merge_adapter(*pair, out).proof is None
    proved = merge_adapter(*pair, out, rows=ROWS)
    assert proved.proof is not None
    assert proved.proof.passed
    assert merge_adapter(*pair, out).proof == proved.proof


# ---------------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("r", 4.0), ("rank_pattern", ["q_proj"]), ("rank_pattern", {"q_(": 2}), ("rank_pattern", {"q_proj": "two"}),
        ("alpha_pattern", "q_proj"), ("target_modules", "q_("), ("base_model_name_or_path", 5),
    ],
)  # fmt: skip
def test_a_config_that_peft_would_not_write(
    own: tuple[Path, Path], tmp_path: Path, field: str, value: object
) -> None:
    edit(own[1] / "adapter_config.json", **{field: value})
    with pytest.raises(InputError, match=f"'{field}' in .*adapter_config.json"):
        merge_adapter(*own, tmp_path / "out")
    (own[1] / "adapter_config.json").write_text("[]")
    with pytest.raises(InputError, match="no JSON object"):
        merge_adapter(*own, tmp_path / "out")


Change = Callable[[Path, Path], None]


def keys(old: str, new: str) -> Change:
    """Rename keys of the adapter."""
    return lambda base, adapter: rewrite(adapter, lambda ts: {name.replace(old, new): t for name, t in ts.items()})


def drop(part: str) -> Change:
    return lambda base, adapter: rewrite(adapter, lambda ts: {name: t for name, t in ts.items() if part not in name})


def says(**fields: Any) -> Change:
    return lambda base, adapter: edit(adapter / "adapter_config.json", **fields)


def poison(value: float) -> Change:
    def change(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        tensors[f"base_model.model.{Q}.lora_B.weight"][3, 2] = value
        return tensors

    return lambda base, adapter: rewrite(adapter, change)


def cut(name: str, size: int) -> Change:
    def change(base: Path, adapter: Path) -> None:
        file = (adapter if name.startswith("adapter") else base) / name
        file.write_bytes(file.read_bytes()[:size])

    return change


def remove(name: str) -> Change:
    return lambda base, adapter: ((adapter if name.startswith("adapter") else base) / name).unlink()


def quantised(base: Path, adapter: Path) -> None:
    tensors = load_file(base / "model.safetensors")
    tensors[f"{Q}.weight"] = tensors[f"{Q}.weight"].to(torch.uint8)
    save_file(tensors, base / "model.safetensors")


LOST_ALL = r"8 of the 8 tensors .* have no place in the base .*: 'base_model.model.{}.*' and 5 more"
REFUSED: dict[str, tuple[Change, type[InputError], str]] = {
    "wrong prefix": (
        keys("base_model.model.", "base_model.model.language_model."),
        InputError,
        LOST_ALL.format("language_model.model.layers.0"),
    ),
    "one level too deep": (keys("model.layers", "model.model.layers"), InputError, LOST_ALL.format("")),
    "adapter name in keys": (
        keys(".weight", ".default.weight"),
        InputError,
        LOST_ALL.format("model.layers.0.self_attn.q_proj.lora_A.default.weight"),
    ),
    "prefix missing": (keys("base_model.model.", ""), InputError, "8 of the 8 tensors"),
    "one tensor astray": (keys("layers.1.self_attn.q_proj", "layers.7.self_attn.q_proj"), InputError, "2 of the 8"),
    "half a pair": (drop("0.self_attn.q_proj.lora_A"), InputError, f"only one half of the pair A, B for '{Q}'"),
    "empty target": (drop("v_proj"), InputError, "names 'v_proj' in its config and holds nothing"),
    "empty module_to_save": (says(modules_to_save=["lm_head"]), InputError, "names 'lm_head' in its config"),
    "other rank": (says(r=8), InputError, f"'{Q}' of the adapter .* says rank 8"),
    "no rank": (says(r=None), InputError, "no usable r and lora_alpha"),
    "other peft type": (says(peft_type="IA3"), InputError, "is of type IA3"),
    "unknown variant": (says(layer_replication=[[0, 2]]), InputError, "uses layer_replication"),
    "random start": (says(init_lora_weights="pissa_niter_4"), InputError, "starts from 'pissa_niter_4'"),
    "dora without magnitudes": (says(use_dora=True), InputError, "use_dora True"),
    "nan": (poison(float("nan")), InputError, f"'base_model.model.{Q}.lora_B.weight' .* holds NaN or infinity"),
    "infinity": (poison(float("-inf")), InputError, f"'base_model.model.{Q}.lora_B.weight'"),
    "no adapter config": (remove("adapter_config.json"), InputError, "is not an adapter"),
    "no adapter weights": (remove("adapter_model.safetensors"), InputError, "has no adapter_model.safetensors"),
    "adapter cut short": (
        cut("adapter_model.safetensors", 900),
        ModelError,
        "adapter_model.safetensors is cut short",
    ),
    "base cut short": (cut("model.safetensors", -100), ModelError, "base/model.safetensors is cut short"),
    "base cut in its header": (cut("model.safetensors", 100), ModelError, "base/model.safetensors is cut short"),
    "base emptied": (
        cut("model.safetensors", 0),
        ModelError,
        "base/model.safetensors is cut short .* it has 0 bytes",
    ),
    "no base weights": (remove("model.safetensors"), ModelError, "no safetensors weights in .*base"),
    "no base config": (remove("config.json"), ModelError, "config.json is missing"),
    "broken generation config": (
        cut("generation_config.json", 5),
        ModelError,
        "generation_config.json cannot be read",
    ),
    "quantised base": (quantised, ModelError, f"'{Q}.weight' of the base .* is stored as U8"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_before_anything_is_written(own: tuple[Path, Path], tmp_path: Path, case: str) -> None:
    change, kind, message = REFUSED[case]
    change(*own)
    with pytest.raises(kind, match=message) as caught:
        merge_adapter(*own, tmp_path / "out")
    assert caught.value.exit_code == 2
    assert caught.value.what.endswith(".")
    assert caught.value.hint.endswith(".")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "base"]


def test_adapter_of_another_size_is_refused(pair: tuple[Path, Path], tmp_path: Path) -> None:
    wide = tiny_model(tmp_path / "wide", hidden_size=96)
    adapter = write_adapter(wide, tmp_path / "lora")
    with pytest.raises(InputError, match=r"weight of 64 x 96, and '.*q_proj.weight' of the base .* has 64 x 64\."):
        merge_adapter(pair[0], adapter, tmp_path / "out")
    adapter = write_adapter(pair[0], tmp_path / "whole", modules_to_save=["embed_tokens"])
    rewrite(adapter, lambda tensors: {n: t.repeat(1, 2) if "embed" in n else t for n, t in tensors.items()})
    with pytest.raises(InputError, match=r"'model.embed_tokens.weight' of the base .* resize the base first"):
        merge_adapter(pair[0], adapter, tmp_path / "out")


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens"])
@pytest.mark.parametrize("stored", [False, True], ids=["one matrix", "stored twice"])
def test_lora_on_a_tied_matrix_unties_it(own: tuple[Path, Path], tmp_path: Path, target: str, stored: bool) -> None:
    base, _ = own
    adapter = write_adapter(base, tmp_path / "head", targets=[target, "q_proj"])
    if stored:
        tensors = load_file(base / "model.safetensors")
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        save_file(tensors, base / "model.safetensors")
    result = merge_adapter(base, adapter, tmp_path / "out", rows=ROWS)
    assert_same_answers(base, adapter, result.folder)
    before, after = weights(base)["model.embed_tokens.weight"], weights(result.folder)
    other = {"lm_head": "model.embed_tokens", "embed_tokens": "lm_head"}[target]
    assert torch.equal(after[f"{other}.weight"], before)
    assert json.loads((result.folder / "config.json").read_text())["tie_word_embeddings"] is False
    assert any("tie_word_embeddings" in note for note in result.notes)


def test_shards_and_index_that_disagree(pair: tuple[Path, Path], tmp_path: Path) -> None:
    base = tiny_model(tmp_path / "base", shards=3)
    second = base / "model-00002-of-00003.safetensors"
    whole = second.read_bytes()
    second.unlink()
    with pytest.raises(ModelError, match="lacks 1 of its 3 shards: model-00002-of-00003.safetensors"):
        merge_adapter(base, pair[1], tmp_path / "out")
    second.write_bytes(whole[:-1])
    with pytest.raises(ModelError, match="model-00002-of-00003.safetensors is cut short"):
        merge_adapter(base, pair[1], tmp_path / "out")
    shutil.copy(base / "model-00001-of-00003.safetensors", second)
    with pytest.raises(ModelError, match="model-00002-of-00003.safetensors lacks .* tensors that .* places there"):
        merge_adapter(base, pair[1], tmp_path / "out")


# ------------------------------------------------------------------------------------------- memory, and being killed


# Without these two lines a child spends most of its time importing transformers.
PRELUDE = """
import sys
sys.path[:0] = [{source!r}]
from pathlib import Path
from finetune import fold as merge
from finetune import weight_files
from finetune.architecture import Architecture

answer = Architecture(False, "model.embed_tokens.weight", "lm_head.weight", "model", False, False)
merge.read_architecture = lambda base: answer
"""


def run_child(code: str, *arguments: Any, **environment: str) -> str:
    text = PRELUDE.format(source=str(Path(__file__).parents[1])) + textwrap.dedent(code)
    command = [sys.executable, "-c", text, *map(str, arguments)]
    environment = {**os.environ, **environment}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def write_large(base: Path, adapter: Path, *, shards: int, tensors: int, width: int) -> None:
    """A bf16 model of `shards` files with `tensors` square weights each, and an adapter for all of them."""
    base.mkdir()
    adapter.mkdir()
    names = [f"model.layers.{number}.mlp.up_proj" for number in range(shards * tensors)]
    where = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        mine = [f"{name}.weight" for name in names[shard * tensors : (shard + 1) * tensors]]
        save_file({name: torch.ones(width, width, dtype=torch.bfloat16) for name in mine}, base / file)
        where.update(dict.fromkeys(mine, file))
    (base / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    (base / "config.json").write_text("{}")
    low = {f"base_model.model.{name}.lora_A.weight": torch.ones(2, width) for name in names}
    low |= {f"base_model.model.{name}.lora_B.weight": torch.ones(width, 2) for name in names}
    save_file(low, adapter / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["up_proj"]}
    (adapter / "adapter_config.json").write_text(json.dumps(config))


@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="the peak of a process is read from Linux' /proc"
)
def test_memory_stays_below_one_shard(tmp_path: Path) -> None:
    """8 shards of 30 MB with 10 tensors each: a merge that holds a whole shard, or all of them, fails this."""
    write_large(tmp_path / "base", tmp_path / "adapter", shards=8, tensors=10, width=1228)
    write_large(tmp_path / "small", tmp_path / "small-adapter", shards=1, tensors=1, width=64)
    measured = run_child(
        """
        def memory(field):
            lines = Path("/proc/self/status").read_text().splitlines()
            return next(int(line.split()[1]) / 1000 for line in lines if line.startswith(field))

        folder = Path(sys.argv[1])
        merge.merge_adapter(folder / "small", folder / "small-adapter", folder / "warm")  # imports and thread pools
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
        before = memory("VmRSS")
        merge.merge_adapter(folder / "base", folder / "adapter", folder / "out")
        print(memory("VmHWM") - before)
        """,
        tmp_path,
        MALLOC_MMAP_THRESHOLD_="1000000",  # memory that is freed goes back at once, as with weights of real size
    )
    total = sum(tensor.size for shard in read_model(tmp_path / "out") for tensor in shard.tensors.values()) / 1e6
    assert total > 240
    assert 1 < float(measured) < 30, f"{float(measured):.0f} MB for a model of {total:.0f} MB"


def test_a_kill_leaves_the_target_absent_or_complete(tmp_path: Path) -> None:
    """One child forks a merge for every moment, and the merge kills itself there."""
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    write_large(base, adapter, shards=3, tensors=4, width=64)
    out = run_child(
        """
        import os, signal
        import torch  # once, before the forks

        base, adapter, out = map(Path, sys.argv[1:])

        def kill():
            os.kill(os.getpid(), signal.SIGKILL)

        def at_share(share):
            return lambda done, total: kill() if done >= share * total else None

        def in_step(module, name, after):
            whole = getattr(module, name)
            def wrapped(*arguments):
                if after:
                    whole(*arguments)
                kill()
            setattr(module, name, wrapped)

        def moment(number):
            if number < 4:
                return at_share((0, 0.3, 0.7, 1)[number])
            steps = [(merge, "write_beside", False), (merge, "write_beside", True), (merge, "write_index", True),
                     (weight_files, "flush_folder", False), (Path, "rename", False), (Path, "rename", True)]
            in_step(*steps[number - 4])

        for number in range(10):
            if not (child := os.fork()):
                merge.merge_adapter(base, adapter, out / f"out{number}", progress=moment(number))
                os._exit(0)
            _, status = os.waitpid(child, 0)
            print(number, os.WTERMSIG(status))
        """,
        base, adapter, tmp_path,
    )  # fmt: skip
    assert out.split("\n")[:-1] == [f"{number} 9" for number in range(10)]
    complete = [number for number in range(10) if (tmp_path / f"out{number}").exists()]
    assert complete == [9]
    whole = merge_adapter(base, adapter, tmp_path / "out9")
    assert "already holds exactly this merge" in whole.notes[-1]
    assert len(partials(tmp_path)) > 5
    again = merge_adapter(base, adapter, tmp_path / "out1")
    assert not list(tmp_path.glob("out1.part-*")), "the dead one's half is removed"
    for name, weight in weights(again.folder).items():
        assert torch.equal(weight, weights(whole.folder)[name])


def test_kills_at_random_moments(tmp_path: Path) -> None:
    """Ten merges into one place are killed whenever it happens to be; it is empty or whole after each of them."""
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    write_large(base, adapter, shards=4, tensors=6, width=256)
    out = run_child(
        """
        import os, random, signal, time
        import torch  # once, before the forks

        base, adapter, out = map(Path, sys.argv[1:])

        def slow(done, total):
            time.sleep(0.01)

        def start(target):
            if not (child := os.fork()):
                merge.merge_adapter(base, adapter, target, progress=slow)
                os._exit(0)
            return child

        began = time.monotonic()
        os.waitpid(start(out / "whole"), 0)
        seconds = time.monotonic() - began
        dice = random.Random(os.urandom(8))
        for _ in range(10):
            share = dice.random()
            child = start(out / "target")
            time.sleep(share * seconds)
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            there = (out / "target").exists()
            parts = len(list(out.glob("target.part-*")))
            print(f"{share:.3f}", "whole" if there else "absent", parts)
            if there:
                (out / "target").rename(out / f"kept-{share:.3f}")
        """,
        base, adapter, tmp_path,
    )  # fmt: skip
    lines = [line.split() for line in out.splitlines()]
    assert len(lines) == 10
    assert all(int(parts) <= 1 for _, _, parts in lines), "what the last one left is removed by the next"
    expected = weights(tmp_path / "whole")
    for kept in tmp_path.glob("kept-*"):
        assert (kept / "finetune_merge.json").is_file()
        assert all(torch.equal(weight, expected[name]) for name, weight in weights(kept).items())
    again = merge_adapter(base, adapter, tmp_path / "target")
    assert set(weights(again.folder)) == set(expected)
    assert not partials(tmp_path), lines
