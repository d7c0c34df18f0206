"""Is a GGUF file the same model, or the same adapter, as what it was made of?"""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from typing import Any

from finetune import adapter_file, chat
from finetune.adapter_file import read_adapter
from finetune.errors import FinetuneError
from finetune.generate import Target, load_tokenizer_of
from finetune.recorded import recorded

# How far the logits may be from the merged model's, as a share of their spread. Rounding of SmolLM2's weights gives
# 0.002 (f16) and 0.06 (q8_0); a tensor in the wrong place gives about 1.
FAR: dict[str, float] = {"f32": 1e-3, "f16": 1e-2, "bf16": 5e-2, "q8_0": 0.25}
_TEXTS = (
    "The quick brown fox jumps over the lazy dog, 12 times in 345 days.",
    "def mean(values):\n    return sum(values) / len(values)\n",
    "Zürich, Kraków und São Paulo: 7 °C, €3.50 - 雨.",
)


def check_model(file: Path, target: Target, kind: str) -> tuple[float, float] | None:
    """(distance of the logits as a share of their spread, share of equal most likely tokens) of a GGUF file.

    The model in `target.model` is the measure, both in float32, on a recorded prompt of the run and a few texts. None
    when transformers cannot read such a file. Raises `FinetuneError` when they are not the same model.
    """
    tokenizer = load_tokenizer_of(target)
    rows = [tokenizer(text)["input_ids"] for text in _TEXTS]
    sample = recorded(target.run) if target.run else None
    if sample is not None:
        rows.append(chat.prompt_ids(tokenizer, sample.conversation.messages, sample.conversation.tools))
    try:
        with tempfile.TemporaryDirectory() as alone:  # transformers would take an adapter beside it too
            (Path(alone) / file.name).symlink_to(file.resolve())
            found = _logits(Path(alone), rows, gguf_file=file.name)
    except (ValueError, NotImplementedError) as error:
        if "not supported" in str(error):
            return None
        raise
    wanted = _logits(target.model, rows)
    difference = float((found - wanted).norm() / (wanted - wanted.mean(-1, keepdim=True)).norm())
    same = float((found.argmax(-1) == wanted.argmax(-1)).float().mean())
    if not difference <= FAR[kind]:
        raise FinetuneError(
            f"The GGUF file does not answer as the model: its logits are {difference:.1%} of their spread away, "
            f"and {kind} explains {FAR[kind]:.1%}.",
            "The converter does not handle this model rightly; try a newer llama.cpp with --llama-cpp.",
        )
    return difference, same


def _logits(folder: Path, rows: list[list[int]], **how: Any) -> Any:
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **how)
    model.eval()
    with torch.inference_mode():
        return torch.cat([model(input_ids=torch.tensor([ids])).logits[0] for ids in rows])


def check_adapter(file: Path, source: Path) -> float:
    """The largest relative difference in size between the changes scale * B @ A of a GGUF adapter and its source.

    The sizes (Frobenius norms) are compared in order, for llama.cpp has other names and permutes rows. Infinite when
    the number of changes differs.
    """
    from gguf import GGUFReader
    from gguf.quants import dequantize
    from safetensors.torch import load_file

    reader = GGUFReader(file)
    alpha = float(reader.fields["adapter.lora.alpha"].contents())
    read = {tensor.name: dequantize(tensor.data, tensor.tensor_type) for tensor in reader.tensors}
    heads = [name.removesuffix(".lora_a") for name in read if name.endswith(".lora_a")]
    written = sorted(
        alpha / read[f"{head}.lora_a"].shape[0] * _size(read[f"{head}.lora_a"], read[f"{head}.lora_b"])
        for head in heads
    )
    weights = load_file(source / adapter_file.WEIGHTS)
    pairs = read_adapter(source).pairs.values()
    wanted = sorted(
        pair.scale * _size(weights[pair.a.name].float().numpy(), weights[pair.b.name].float().numpy())
        for pair in pairs
    )
    if len(written) != len(wanted):
        return math.inf
    largest = max(wanted) or 1.0
    return max((abs(a - b) / largest for a, b in zip(written, wanted, strict=True)), default=math.inf)


def _size(a: Any, b: Any) -> float:
    """|B @ A|, by the small products only: its square is the sum of (B'B) * (AA')."""
    import numpy as np

    a, b = a.astype(np.float64), b.astype(np.float64)
    return math.sqrt(max(float(((b.T @ b) * (a @ a.T)).sum()), 0.0))
