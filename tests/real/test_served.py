"""SmolLM2 as a GGUF file: by llama.cpp's own converter, loaded back, and run in llama.cpp where it is installed."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from finetune import embedded
from finetune.converter import converter
from finetune.errors import FinetuneError, InputError
from finetune.export import export
from finetune.formats import Conversation, Message
from finetune.generate import Target, load_speaker
from finetune.gguf_check import check_adapter, check_model
from finetune.merge import merge
from finetune.recipe import load_recipe
from finetune.run import Run
from finetune.train import train

pytestmark = pytest.mark.long

# Enough that the adapter changes answers: twelve rows in three steps, and a high learning rate.
FEW = [
    "data.limit=12",
    "train.epochs=1",
    "train.warmup=0",
    "evaluate.after_training=false",
    "load.dtype=float32",
    "train.precision=fp32",
]
ASKED = ["turn on the lights in the kitchen", "What is the capital of France?", "set a timer for 5 minutes"]


@pytest.fixture(scope="module", autouse=True)
def _converter() -> None:
    try:
        converter()
    except InputError as error:
        pytest.skip(f"llama.cpp's converter is not here: {error}")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    recipe = load_recipe("smollm2-lora", [*FEW, "train.learning_rate=3e-3"])
    return train(recipe, output=tmp_path_factory.mktemp("served") / "home")


@pytest.fixture(scope="module")
def file(run: Run) -> Path:
    [file] = export(run.folder, "gguf").files
    return file


def conversations() -> list[Conversation]:
    system: Message = {"role": "system", "content": "Reply with the Home Assistant intent as JSON."}
    return [Conversation([system, {"role": "user", "content": question}]) for question in ASKED]


@pytest.fixture(scope="module")
def answers(run: Run) -> list[str]:
    """By base plus adapter in float32."""
    found = [answer.text for answer in load_speaker(run.folder).answer(conversations(), max_new_tokens=24)]
    bare = [answer.text for answer in load_speaker(run.folder).answer(conversations(), max_new_tokens=24, bare=True)]
    assert found != bare
    return found


def test_the_file_holds_the_merged_model(run: Run, file: Path) -> None:
    """Every weight by transformers' own reader: the merged one rounded to 16 bits, and nothing else."""
    import torch
    from transformers import AutoModelForCausalLM

    assert file == run.folder / "gguf" / "home-f16.gguf"
    read: Any = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    merged: Any = AutoModelForCausalLM.from_pretrained(merge(run).folder, dtype=torch.float32)
    wanted = merged.state_dict()
    assert read.state_dict().keys() == wanted.keys()
    for name, weight in read.state_dict().items():
        assert torch.equal(weight, wanted[name].half().float() if weight.dim() > 1 else wanted[name]), name
    difference, same = check_model(file, Target("home", merge(run).folder), "f16") or (1.0, 0.0)
    assert difference < 0.005
    assert same > 0.98


def test_another_model_is_found_out(run: Run, file: Path, tmp_path: Path) -> None:
    """Rows of one matrix in another order, as a converter that forgets llama.cpp's permutation writes them."""
    from safetensors.torch import load_file, save_file

    folder = shutil.copytree(merge(run).folder, tmp_path / "other")
    weights = load_file(folder / "model.safetensors")
    for layer in range(30):
        name = f"model.layers.{layer}.self_attn.q_proj.weight"
        weights[name] = weights[name].roll(1, 0).contiguous()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(FinetuneError, match="does not answer as the model"):
        check_model(file, Target("home", folder), "q8_0")


def test_a_file_names_the_trained_end_of_a_turn(tmp_path: Path) -> None:
    """Case E1: the base says that <|endoftext|> ends a text, and its turns end with <|im_end|>."""
    from gguf import GGUFReader

    folder = shutil.copytree(embedded.model_folder("smollm2-135m"), tmp_path / "base")
    for name, setting in (
        ("tokenizer_config.json", "<|endoftext|>"),
        ("config.json", 0),
        ("generation_config.json", 0),
    ):
        settings = json.loads((folder / name).read_text())
        settings["eos_token" if isinstance(setting, str) else "eos_token_id"] = setting
        (folder / name).write_text(json.dumps(settings))
    [file] = export(folder, "gguf", tmp_path / "out", kind="q8_0").files
    assert GGUFReader(file).fields["tokenizer.ggml.eos_token_id"].contents() == 2
    assert json.loads((folder / "tokenizer_config.json").read_text())["eos_token"] == "<|endoftext|>"


def test_the_adapter_alone(run: Run, tmp_path: Path) -> None:
    done = export(run.folder, "gguf", adapter=True)
    assert done.difference is not None
    assert done.difference < 1e-3
    assert str(Path.home()) not in done.files[0].read_bytes()[:4096].decode(
        errors="replace"
    )  # no path of this machine
    twice = shutil.copytree(run.adapter, tmp_path / "twice")
    config = json.loads((twice / "adapter_config.json").read_text())
    (twice / "adapter_config.json").write_text(json.dumps({**config, "lora_alpha": 2 * config["lora_alpha"]}))
    assert check_adapter(done.files[0], twice) > 0.4  # half the size it should have


@pytest.mark.skipif(not importlib.util.find_spec("llama_cpp"), reason="llama-cpp-python is not installed")
def test_llama_cpp_gives_the_same_answers(run: Run, file: Path, answers: list[str], tmp_path: Path) -> None:
    """The merged file, and the file of the base with the adapter beside it."""
    from llama_cpp import Llama  # type: ignore[import-not-found]

    [base] = export("smollm2-135m", "gguf", tmp_path / "base").files
    [adapter] = export(run.folder, "gguf", tmp_path / "adapter", adapter=True).files
    for how in ({"model_path": str(file)}, {"model_path": str(base), "lora_path": str(adapter)}):
        model = Llama(**how, n_ctx=1024, verbose=False)
        asked = {"max_tokens": 24, "temperature": 0, "repeat_penalty": 1.0}
        found = [model.create_chat_completion(talk.messages, **asked)["choices"][0] for talk in conversations()]
        assert [choice["message"]["content"] for choice in found] == answers
