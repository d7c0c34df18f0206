"""The header of a GGUF file, with llama.cpp's names turned into Hugging Face's; never a weight.

| magic, version, counts | metadata: key -> typed value | tensors: name, shape, packing, place | data |
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any, BinaryIO

from finetune.errors import ModelError

# llama.cpp's tensor names -> Hugging Face's, for architectures with llama's layout.
# https://github.com/ggml-org/llama.cpp/blob/master/gguf-py/gguf/tensor_mapping.py
_OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Gemma 2 and 3 have two more norms, and the one before the MLP bears another name.
_FOUR_NORMS = {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
# GGUF architecture -> model type and class of transformers.
_TYPES = {
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "gemma": ("gemma", "GemmaForCausalLM"),
    "gemma2": ("gemma2", "Gemma2ForCausalLM"),
    "gemma3": ("gemma3_text", "Gemma3ForCausalLM"),
}
# Key of config.json -> metadata key, after the architecture.
_KEYS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "max_position_embeddings": "context_length",
}
# Value types of the format by number: struct codes of the scalars; 8 is text, 9 an array.
# https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


def read_gguf(path: Path, model: str) -> tuple[dict[str, Any], dict[str, tuple[int, ...]]]:
    """What config.json would say of the model in the file, and the shapes of its weights, rows first.

    Raises `ModelError`, which calls the file `model`, when it is missing, no GGUF file, or of an architecture whose
    names are not known.
    """
    if not path.is_file():
        raise ModelError(f"There is no file {model}.", "Check the path.")
    try:
        with path.open("rb") as file:
            values, shapes = _read_header(file)
    except (struct.error, ValueError, OSError, MemoryError, OverflowError):
        raise ModelError(f"The header of {model} cannot be read as GGUF.", "Download the file again.") from None
    kind = values.get("general.architecture")
    if kind not in _TYPES:
        raise ModelError(
            f"{model} holds a model of the GGUF architecture '{kind}'.",
            f"Of GGUF files finetune reads {', '.join(_TYPES)}; take this model in safetensors.",
        )
    model_type, architecture = _TYPES[kind]
    config: dict[str, Any] = {ours: values.get(f"{kind}.{theirs}") for ours, theirs in _KEYS.items()}
    config |= {
        "model_type": model_type,
        "architectures": [architecture],
        "tie_word_embeddings": "output.weight" not in shapes,
    }
    # A rope table is a buffer, not a weight.
    return config, {_from_llama_cpp(n, kind): s for n, s in shapes.items() if not n.startswith("rope_")}


def _from_llama_cpp(name: str, kind: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`."""
    module, _, leaf = name.rpartition(".")
    if module in _OUTSIDE:
        return f"{_OUTSIDE[module]}.{leaf}"
    names = {**_LAYER, **_FOUR_NORMS} if kind in ("gemma2", "gemma3") else _LAYER
    block, layer, short = module.split(".") if module.count(".") == 2 else ("", "", "")
    if block != "blk" or short not in names:
        raise ModelError(
            f"The GGUF file has a tensor '{name}' that {kind} does not have.", "Take the model in safetensors."
        )
    return f"model.layers.{layer}.{names[short]}.{leaf}"


def _read_header(file: BinaryIO) -> tuple[dict[str, Any], dict[str, tuple[int, ...]]]:
    """Metadata (long arrays such as the vocabulary left out) and tensor shapes, rows first as torch has them."""
    magic, version, tensors, entries = _take(file, "4sIQQ")
    if magic != b"GGUF" or version not in (2, 3):
        raise ValueError("not GGUF 2 or 3")
    values = {_text(file): _value(file, *_take(file, "I")) for _ in range(entries)}
    return values, dict(_tensor(file) for _ in range(tensors))


def _tensor(file: BinaryIO) -> tuple[str, tuple[int, ...]]:
    name = _text(file)
    (dimensions,) = _take(file, "I")
    shape = _take(file, f"{dimensions}Q")
    _take(file, "IQ")  # its packing and its place in the file
    return name, shape[::-1]


def _take(file: BinaryIO, layout: str) -> tuple[Any, ...]:
    return struct.unpack(f"<{layout}", file.read(struct.calcsize(f"<{layout}")))


def _text(file: BinaryIO) -> str:
    (length,) = _take(file, "Q")
    return file.read(length).decode()


def _value(file: BinaryIO, kind: int) -> Any:
    if kind == 8:
        return _text(file)
    if kind != 9:
        return _take(file, _SCALARS.get(kind, "!"))[0]
    inner, count = _take(file, "IQ")
    if inner in _SCALARS and count <= 1024:
        return list(_take(file, f"{count}{_SCALARS[inner]}"))
    _skip(file, inner, count)
    return None


def _skip(file: BinaryIO, kind: int, count: int) -> None:
    if kind in _SCALARS:
        file.seek(count * struct.calcsize(f"<{_SCALARS[kind]}"), 1)
        return
    for _ in range(count):
        _value(file, kind)
