"""The blocks of a GGUF file's Q4_1 tensors beside the fp32 weights that they unpack to.

    32 weights of a row = fp16 scale, fp16 offset, 32 codes of 4 bits;   w = scale x code + offset in fp32

`write` lays them into a file of their own under the names that the layers have in transformers, one byte a code, as
`fast.held` trains beside them: input by input, so that scales and offsets lie along the outputs as codes do. GGUF's
block is ggml's `block_q4_1`: the first 16 codes in the low halves of 16 bytes, the others in the high ones.
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
        parts: Any = _read(torch.from_numpy(tensor.data.copy()))
        if part in ("attn_q", "attn_k"):  # llama.cpp turns neighbouring pairs, transformers halves of a head
            parts = (_halves(each, heads if part == "attn_q" else kv_heads) for each in parts)
        codes, scale, offset = turned(*parts)
        if torch.equal(dense(codes, scale, offset, torch.empty(codes.numel())), model.get_submodule(name).weight):
            made |= {f"{name}.{kind}": each for kind, each in zip(PARTS, (codes, scale, offset), strict=True)}
    save_file(made, folder / FILE)
    return len(made) // len(PARTS)


def dense(codes: Any, scale: Any, offset: Any, room: Any) -> Any:
    """The weight [out, in] in fp32 of what `turned` returns, written into `room` [in x out]."""
    import torch

    made = room.view(len(scale), BLOCK, -1)
    made.copy_(codes.view(made.shape))
    torch.addcmul(offset, made, scale, out=made)
    return made.view(codes.shape).t()


def turned(codes: Any, scale: Any, offset: Any) -> tuple[Any, Any, Any]:
    """Codes [out, in], scale and offset [out, blocks] -> codes [in, out], the others in fp32 [blocks, 1, out]."""
    return codes.t().contiguous(), *(each.float().t().contiguous().unsqueeze(1) for each in (scale, offset))


def _read(rows: Any) -> tuple[Any, Any, Any]:
    """Bytes [out, 20 x blocks] -> codes [out, in] of one byte, scale and offset [out, blocks] in fp16."""
    import torch

    blocks = rows.unflatten(1, (-1, 20))
    scale, offset = (blocks[..., at : at + 2].contiguous().view(torch.float16).squeeze(-1) for at in (0, 2))
    packed = blocks[..., 4:]
    return torch.cat([packed & 15, packed >> 4], -1).flatten(1), scale, offset


def _halves(x: Any, heads: int) -> Any:
    """Rows of each head from (first, second half) pairs to all first, then all second."""
    return x.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2).contiguous()
