"""Write the bundled fact files `finetune/bundled/facts/*.json`.

    python scripts/make_facts.py

Each model is built by transformers on the meta device (shapes without memory) from its published numbers, and its
parameters are written down once per layer. `tests/test_facts.py` builds them again and compares.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent.parent / "finetune" / "bundled" / "facts"

MODELS: dict[str, dict[str, Any]] = {
    # https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct
    "smollm2-135m": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
    # Gemma 2 report, table 1: https://arxiv.org/abs/2408.00118
    "gemma-2-2b": {
        "architectures": ["Gemma2ForCausalLM"],
        "model_type": "gemma2",
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 256000,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
    # Llama 2 report, section 2: https://arxiv.org/abs/2307.09288
    "llama-2-13b": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 5120,
        "intermediate_size": 13824,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
        "num_key_value_heads": 40,
        "head_dim": 128,
        "vocab_size": 32000,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    },
    # GPT-3 paper, table 2.1: https://arxiv.org/abs/2005.14165. No weights are public; its layers are GPT-2's.
    "gpt3-175b": {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_embd": 12288,
        "n_layer": 96,
        "n_head": 96,
        "n_positions": 2048,
        "vocab_size": 50257,
        "tie_word_embeddings": True,
    },
    "llama-2-7b": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "vocab_size": 32000,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    },
}


def fact_file(name: str) -> dict[str, Any]:
    """The content of one fact file: config numbers, shapes outside the layers, shapes of one layer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**{key: value for key, value in MODELS[name].items() if key != "architectures"})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    shapes = {key: list(parameter.shape) for key, parameter in model.named_parameters()}
    pattern = re.compile(r"(\.(?:layers|h)\.)\d+(\.)")
    layer = {pattern.sub(r"\1{}\2", key): shape for key, shape in shapes.items() if pattern.search(key)}
    outside = {key: shape for key, shape in shapes.items() if not pattern.search(key)}
    # One block stands for all layers: hold that no layer differs and none is missing.
    assert len(shapes) == len(outside) + len(layer) * config.num_hidden_layers
    assert all(shape == layer[pattern.sub(r"\1{}\2", key)] for key, shape in shapes.items() if pattern.search(key))
    return {"config": MODELS[name], "outside": outside, "layer": layer}


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name in MODELS:
        text = json.dumps(fact_file(name), indent=1)
        # Shapes on one line each.
        text = re.sub(r"\[\s+([^\[\]]*?)\s+\]", lambda hit: "[" + re.sub(r"\s+", " ", hit[1]) + "]", text)
        (FOLDER / f"{name}.json").write_text(text + "\n", encoding="utf-8")
        print(f"wrote {FOLDER.name}/{name}.json")


if __name__ == "__main__":
    main()
