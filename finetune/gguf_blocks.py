"""The blocks of a GGUF file's Q4_1 tensors beside the fp32 weights that they unpack to.

    32 weights of a row = fp16 scale, fp16 offset, 32 codes of 4 bits;   w = scale x code + offset in fp32

`write` lays them into a file of their own, one byte a code, under the names that the layers have in transformers;
`fast.held` trains beside them. Layout of a block: ggml's `block_q4_1` (the first 16 codes in the low halves of 16
bytes, the others in the high halves).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

BLOCK = 32
"""Weights that share a scale and an offset."""
FILE = "blocks.safetensors"
"""Name of the file in a model's folder; transformers does not read it."""
PARTS = ("codes", "scale", "offset")
"""What the file holds of a layer, each under `<layer>.<part>`."""
_LAYERS = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}  # fmt: skip


def write(gguf: Path, folder: Path, model: Any) -> int:
    """Write the blocks of `gguf` into `folder` for those layers of `model` whose weights they are, to the bit.

    Returns for how many. `model` is what transformers unpacked from the file, in fp32.
    """
    import torch
    from gguf import GGMLQuantizationType, GGUFReader
    from safetensors.torch import save_file

    heads, kv_heads = model.config.num_attention_heads, model.config.num_key_value_heads
    made: dict[str, Any] = {}
    for tensor in GGUFReader(gguf).tensors:
        _, _, rest = tensor.name.partition("blk.")
        number, _, part = rest.removesuffix(".weight").partition(".")
        if part not in _LAYERS or tensor.tensor_type != GGMLQuantizationType.Q4_1:
            continue
        name = f"model.layers.{number}.{_LAYERS[part]}"
        parts = _read(torch.from_numpy(tensor.data.copy()))
        if part in ("attn_q", "attn_k"):  # llama.cpp turns neighbouring pairs, transformers halves of a head
            parts = tuple(_halves(each, heads if part == "attn_q" else kv_heads) for each in parts)
        codes, scale, offset = parts
        dense = (codes.unflatten(1, (-1, BLOCK)).float() * scale.float() + offset.float()).flatten(1)
        if torch.equal(dense, model.get_submodule(name).weight):
            made |= {f"{name}.{kind}": each for kind, each in zip(PARTS, parts, strict=True)}
    save_file(made, folder / FILE)
    return len(made) // len(PARTS)


def _read(rows: Any) -> tuple[Any, ...]:
    """Bytes [out, 20 x blocks] -> codes [out, in] of one byte, scale and offset [out, blocks, 1] in fp16."""
    import torch

    blocks = rows.unflatten(1, (-1, 20))
    scale, offset = (blocks[..., at : at + 2].contiguous().view(torch.float16) for at in (0, 2))
    packed = blocks[..., 4:]
    codes = torch.cat([packed & 15, packed >> 4], -1).flatten(1)
    return codes, scale, offset


def _halves(x: Any, heads: int) -> Any:
    """Rows of each head from (first, second half) pairs to all first, then all second."""
    return x.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2).contiguous()
