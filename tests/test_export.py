"""What is written for other programs computes the same: adapters by peft's own logits, templates word for word."""

from __future__ import annotations

import hashlib
import io
import json
import re
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from finetune.chat import end_of_turn_ids
from finetune.converter import CHECKOUT, converter, unpack
from finetune.errors import InputError
from finetune.export import export, vllm_adapter
from finetune.generate import Target, find_target
from finetune.ollama import modelfile, pieces_of
from finetune.plain_adapter import plain_copy
from finetune.recipe import Full, LoRA, QLoRA
from finetune.templates import template_of
from finetune.vllm_rules import max_lora_rank, obstacle_of
from tests.tiny import tiny_model, tiny_tokenizer

# ---------------------------------------------------------------------------------------------------------- adapters


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("plain") / "base", tied=False)


def made(base: Path, folder: Path, **config: Any) -> Path:
    """An adapter of peft's with random A and B."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    settings: dict[str, Any] = {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "down_proj"], **config}
    model: Any = AutoModelForCausalLM.from_pretrained(base)
    adapted: Any = get_peft_model(model, LoraConfig(**settings))
    torch.manual_seed(3)
    for name, parameter in adapted.named_parameters():
        if "lora_A" in name or "lora_B" in name:
            parameter.data.normal_(std=0.3)
    adapted.peft_config["default"].base_model_name_or_path = str(base)
    adapted.save_pretrained(folder, save_embedding_layers=False)
    return folder


def logits(base: Path, adapter: Path) -> Any:
    """By peft alone."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model: Any = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)
    with torch.inference_mode():
        return model(torch.arange(20, 60)[None]).logits


@pytest.mark.parametrize(
    ("config", "rank", "alpha"),
    [
        ({}, 4, 6.0),
        ({"use_rslora": True}, 4, 12.0),  # 6 / sqrt(4) = 3 = 12 / 4
        ({"rank_pattern": {"down_proj": 2}}, 4, 4.0),  # scales 6/4 and 6/2: into B
        ({"rank_pattern": {"down_proj": 2}, "alpha_pattern": {"down_proj": 3}}, 4, 6.0),  # both 1.5: B stays
        ({"alpha_pattern": {"layers.0.self_attn.q_proj": 60}, "use_rslora": True}, 4, 4.0),
        ({"layers_to_transform": [1]}, 4, 6.0),
    ],
)
def test_a_plain_adapter_computes_the_same(
    base: Path, tmp_path: Path, config: dict[str, Any], rank: int, alpha: float
) -> None:
    """Case S1: with one rank, one alpha and no flag, programs that only know alpha / r are right."""
    import torch

    source, plain = made(base, tmp_path / "source", **config), tmp_path / "plain"
    plain.mkdir()
    plain_copy(source, plain, "base")
    written = json.loads((plain / "adapter_config.json").read_text())
    assert (written["r"], written["lora_alpha"]) == (rank, pytest.approx(alpha))
    assert not written["use_rslora"]
    assert "rank_pattern" not in written
    expected = logits(base, source)
    torch.testing.assert_close(logits(base, plain), expected, atol=2e-5, rtol=2e-5)
    assert (expected - logits(base, made(base, tmp_path / "other", lora_alpha=1))).abs().max() > 0.05


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"use_dora": True}, "DoRA"),
        ({"modules_to_save": ["lm_head"]}, "trained whole"),
        ({"target_modules": ["q_proj", "embed_tokens"]}, "embedding"),
        ({"trainable_token_indices": [3]}, "trained whole"),
    ],
)
def test_what_a_plain_adapter_cannot_say_is_refused(
    base: Path, tmp_path: Path, config: dict[str, Any], why: str
) -> None:
    source = made(base, tmp_path / "source", **config)
    with pytest.raises(InputError, match=why):
        export(source, "vllm", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_vllms_ranks() -> None:
    assert [max_lora_rank(rank) for rank in (1, 2, 8, 9, 16, 300, 320, 512)] == [1, 8, 8, 16, 16, 320, 320, 512]
    assert max_lora_rank(513) is None
    lora = {"kind": "lora"}
    assert obstacle_of(LoRA.model_validate({**lora, "rank": 512, "variant": "rslora"})) is None
    assert "512" in str(obstacle_of(LoRA.model_validate({**lora, "rank": 513})))
    assert "DoRA" in str(obstacle_of(QLoRA.model_validate({"kind": "qlora", "variant": "dora"})))
    assert "whole" in str(obstacle_of(LoRA.model_validate({**lora, "modules_to_save": ["lm_head"]})))
    assert obstacle_of(Full(kind="full")) is None


@pytest.mark.parametrize(
    ("setting", "said"),
    [("method.variant=dora", "DoRA"), ("method.rank=520", "above vLLM's 512"), ("method.alpha=8", None)],
)
def test_the_plan_says_what_vllm_will_not_load(setting: str, said: str | None) -> None:
    from finetune.planning import answer
    from finetune.recipe import load_recipe

    planned = answer(load_recipe("gemma2b-lora", [setting]), device="a100-80gb", rows="none")
    views = " ".join(view for view in planned.views() if isinstance(view, str))
    if said is None:
        assert (planned.notes, views) == ([], "")
        assert "notes" not in planned.document()
    else:
        assert said in planned.document()["notes"][0]
        assert said in views


def test_the_folder_for_vllm(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = made(base, tmp_path / "source", r=9, use_rslora=True)
    done = export(source, "vllm", tmp_path / "out")
    assert "--max-lora-rank 16" in done.notes[0]
    assert f"vllm serve {base} " in done.notes[0]
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= {
        file.name for file in (tmp_path / "out").iterdir()
    }
    assert "--generation-config" not in done.notes[0]  # nobody said where answers end
    (source / "generation_config.json").write_text('{"eos_token_id": [5, 2]}')
    done = export(source, "vllm", tmp_path / "stops")
    assert f"--generation-config {tmp_path / 'stops'}" in done.notes[0]
    assert json.loads((tmp_path / "stops/generation_config.json").read_text())["eos_token_id"] == [5, 2]
    with pytest.raises(InputError, match="exists already"):
        export(source, "vllm", tmp_path / "out")
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))
    ready = vllm_adapter(find_target(source))
    assert ready.max_lora_rank == 16
    assert (ready.folder / "adapter_model.safetensors").read_bytes() == (
        tmp_path / "out" / "adapter_model.safetensors"
    ).read_bytes()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_an_adapter_with_nan_goes_nowhere(base: Path, tmp_path: Path, dtype: torch.dtype, value: float) -> None:
    """Whatever answers with an adapter or hands it on asks `find_target`."""
    source = made(base, tmp_path / "source")
    file = source / "adapter_model.safetensors"
    tensors = {name: tensor.to(dtype) for name, tensor in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})
    assert find_target(source).adapter == source
    name = sorted(tensors)[-1]
    tensors[name][-1, -1] = value
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(InputError, match=f"'{name}' of the adapter .* NaN or infinity"):
        find_target(source)


# --------------------------------------------------------------------------------------------------------- Modelfile


def go(template: str, messages: list[dict[str, str]]) -> str:
    """What Go's text/template makes of the few actions used here: range, if, else, end, eq, strings, fields."""
    tokens = re.findall(r'\{\{-? *((?:"(?:\\.|[^"\\])*"|[^"}])*?) *\}\}|([^{]+)', template)
    position = 0

    def truth(test: str, number: int, message: dict[str, str]) -> bool:
        match = re.fullmatch(r'eq (\$i|\$m\.Role) ("\w+"|\d+)', test)
        assert match, test
        left: Any = number if match[1] == "$i" else message["role"]
        return bool(left == json.loads(match[2]))

    def block(number: int, message: dict[str, str], live: bool) -> str:
        """Up to and without the `end` or `else` that closes this block."""
        nonlocal position
        text = ""
        while True:
            action, plain = tokens[position]
            if action == "end" or action.startswith("else"):
                return text
            position += 1
            if plain:
                text += plain
            elif action.startswith("if "):
                text += branches(action[3:], number, message, live)
            elif action == "$m.Content":
                text += message["content"]
            elif action.startswith('"'):
                text += json.loads(action)
            else:
                raise AssertionError(action)

    def branches(test: str, number: int, message: dict[str, str], live: bool) -> str:
        nonlocal position
        text, done = "", False
        while True:
            take = live and not done and (test == "" or truth(test, number, message))
            inside = block(number, message, take)
            text += inside if take else ""
            done = done or take
            action = tokens[position][0]
            position += 1
            if action == "end":
                return text
            test = action.removeprefix("else").strip().removeprefix("if ").strip()

    assert tokens[0][0] == "range $i, $m := .Messages"
    text = ""
    for number, message in enumerate(messages):
        position = 1
        text += block(number, message, True)
    position += 1
    return text + block(0, {}, True) if position < len(tokens) and not tokens.append(("end", "")) else text


TALK = [
    {"role": "system", "content": 'Be\n"brief".'},
    {"role": "user", "content": "Hello, what is 2 + 2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "And {{ 3 }} + 3?"},
]


@pytest.mark.parametrize("family", ["smollm2", "qwen2_5", "llama3", "gemma", "phi3", "none"])
@pytest.mark.parametrize("first", [0, 1], ids=["system", "no system"])
@pytest.mark.parametrize("last", [2, 4])
def test_ollamas_template_writes_what_training_wrote(family: str, first: int, last: int) -> None:
    """The Go text, run by the small reading of Go above, is the prompt of training; bos is llama.cpp's to add."""
    tokenizer = tiny_tokenizer(family if family != "none" else None)
    text, _ = modelfile(tokenizer, "m.gguf", system=None, context=4096)
    written = re.search(r'TEMPLATE """(.*?)"""\n', text, re.DOTALL)
    assert written
    asked: Any = TALK[first:last]
    template = template_of(tokenizer)
    if template.folds_system and first == 0:
        assert family == "gemma"
    bos = template.bos if template.adds_bos else ""
    assert bos + go(written[1], asked) == template.render(asked, reply_follows=True)


def test_a_modelfile_names_the_stops_and_the_system_message() -> None:
    tokenizer = tiny_tokenizer("llama3")
    text, notes = modelfile(tokenizer, "m.gguf", system="Be brief.", context=4096)
    assert text.splitlines()[0] == "FROM ./m.gguf"
    assert 'PARAMETER stop "<|eot_id|>"' in text
    assert 'SYSTEM """Be brief."""' in text
    assert "PARAMETER num_ctx 4096" in text
    assert "PARAMETER repeat_penalty 1\n" in text
    assert "<|begin_of_text|>" not in text  # llama.cpp adds it
    assert any("trims" in note for note in notes)
    quoted, notes = modelfile(tokenizer, "m.gguf", system='Say """ often.', context=4096)
    assert "SYSTEM" not in quoted
    assert any("three quotes" in note for note in notes)


def test_a_base_whose_turn_ender_is_not_its_eos_stops_in_ollama_too() -> None:
    """Case E1."""
    tokenizer = tiny_tokenizer("smollm2", eos="<|endoftext|>")
    text, _ = modelfile(tokenizer, "m.gguf", system=None, context=4096)
    assert len(end_of_turn_ids(tokenizer)) == 2
    assert 'PARAMETER stop "<|im_end|>"' in text
    assert 'PARAMETER stop "<|endoftext|>"' in text


def test_a_template_that_cannot_be_taken_apart_is_refused() -> None:
    shouting = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
        "{% if messages|length > 3 %} (long){% endif %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    with pytest.raises(InputError, match="cannot be said"):
        modelfile(tiny_tokenizer(shouting), "m.gguf", system=None, context=4096)
    assert pieces_of(template_of(tiny_tokenizer("smollm2"))).end == "<|im_end|>\n<|im_start|>assistant\n"


# --------------------------------------------------------------------------------------------------------- converter


def archive(folder: Path) -> Path:
    """A source package in small."""
    file = folder / "package.tar.gz"
    inside = {
        "p-1/vendor/llama.cpp/convert_hf_to_gguf.py": b"one", "p-1/vendor/llama.cpp/convert_lora_to_gguf.py": b"two",
        "p-1/vendor/llama.cpp/conversion/base.py": b"three", "p-1/vendor/llama.cpp/gguf-py/gguf/x.py": b"four",
        "p-1/vendor/llama.cpp/conversion/../../../../../evil": b"out", "p-1/vendor/llama.cpp/src/llama.cpp": b"large",
        "p-1/setup.py": b"no",
    }  # fmt: skip
    with tarfile.open(file, "w:gz") as tar:
        for name, content in inside.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return file


def test_only_the_known_archive_is_unpacked_and_only_the_converter(tmp_path: Path) -> None:
    file, out = archive(tmp_path), tmp_path / "out"
    out.mkdir()
    with pytest.raises(InputError, match="SHA-256"):
        unpack(file, out)
    assert not any(out.iterdir())
    unpack(file, out, hashlib.sha256(file.read_bytes()).hexdigest())
    found = sorted(str(path.relative_to(out)) for path in out.rglob("*") if path.is_file())
    assert found == ["conversion/base.py", "convert_hf_to_gguf.py", "convert_lora_to_gguf.py", "gguf-py/gguf/x.py"]
    assert not (tmp_path.parent / "evil").exists()


def test_a_checkout_of_the_users_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="has no convert_hf_to_gguf"):
        converter(tmp_path)
    for name in ("convert_hf_to_gguf.py", "convert_lora_to_gguf.py"):
        (tmp_path / name).write_text("")
    monkeypatch.setenv(CHECKOUT, str(tmp_path))
    assert converter() == tmp_path


def test_a_converter_that_fails_leaves_nothing(base: Path, tmp_path: Path) -> None:
    from finetune.errors import FinetuneError

    checkout = tmp_path / "llama.cpp"
    checkout.mkdir()
    for name in ("convert_hf_to_gguf.py", "convert_lora_to_gguf.py"):
        (checkout / name).write_text(
            "import sys\nopen(sys.argv[sys.argv.index('--outfile') + 1], 'w').write('half')\n"
            "sys.exit('this model is unknown')\n"
        )
    with pytest.raises(FinetuneError, match="this model is unknown") as failure:
        export(base, "gguf", tmp_path / "deep" / "out", llama_cpp=checkout)
    assert "this model is unknown" in str(failure.value.__cause__)  # with --debug all of its words are shown
    with pytest.raises(FinetuneError, match="this model is unknown"):
        export(base, "ollama", tmp_path / "out", llama_cpp=checkout)
    assert [path.name for path in tmp_path.iterdir()] == ["llama.cpp"]


@pytest.mark.parametrize(
    ("to", "more", "said"),
    [
        ("onnx", {}, "Nothing is known of 'onnx'"),
        ("gguf", {"kind": "q4_k_m"}, "no type of GGUF"),
        ("vllm", {}, "has no adapter"),
        ("gguf", {"adapter": True}, "has no adapter"),
    ],
)
def test_what_cannot_be_exported(base: Path, tmp_path: Path, to: str, more: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        export(base, to, tmp_path / "out", **more)
    assert not (tmp_path / "out").exists()


def test_an_adapter_beside_the_gguf_file_is_not_taken_for_its_own(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers looks for an adapter_config.json in the folder that it loads from."""
    from finetune import gguf_check

    seen: list[list[str]] = []

    def logits(folder: Path, rows: Any, **how: Any) -> Any:
        seen.append(sorted(path.name for path in folder.iterdir()))
        return torch.ones(1, 2).cumsum(-1)

    monkeypatch.setattr(gguf_check, "_logits", logits)
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "m.gguf").write_text("")
    assert gguf_check.check_model(tmp_path / "m.gguf", Target("m", base), "f16") == (0.0, 1.0)
    assert seen[0] == ["m.gguf"]
