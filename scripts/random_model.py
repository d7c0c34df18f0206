"""A model of real shapes without its weights: random numbers, so that nothing has to be fetched to measure a step."""

from __future__ import annotations

from typing import Any

from finetune.facts import Facts
from finetune.recipe import Full, QLoRA, Recipe


def small_tokenizer() -> Any:
    """A tokenizer of bytes for models whose own one is not here; the rows are random numbers anyway."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = ["<pad>", "<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    core = Tokenizer(models.BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast: Any = PreTrainedTokenizerFast
    return fast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>")


def random_model(recipe: Recipe, facts: Facts, device: str) -> Any:
    """What `finetune.model.load_model` gives, with random weights of the same shapes.

    The model is built on the meta device and filled module by module. A layer that becomes 4-bit is drawn in 16 bits,
    packed, and let go before the next one is drawn, so the 16-bit model is never there as a whole.
    """
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.integrations.accelerate import expand_device_map
    from transformers.modeling_utils import caching_allocator_warmup
    from transformers.quantizers.auto import AutoHfQuantizer

    from finetune.meta import model_config
    from finetune.method import quantization_config
    from finetune.model import attach_adapter

    torch.manual_seed(recipe.train.seed)
    config, quantizer = model_config(facts), None
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(
            config, dtype=getattr(torch, recipe.load.dtype), attn_implementation=recipe.load.attention
        )
    if isinstance(recipe.method, QLoRA):
        quantizer = AutoHfQuantizer.from_config(quantization_config(recipe.method, recipe.method.compute_dtype))
        quantizer.preprocess_model(model, device_map={"": device})
    # from_pretrained asks the driver for the whole model at once first; what is reserved later depends on it.
    caching_allocator_warmup(model, expand_device_map({"": device}, list(model.state_dict())), quantizer)
    made: dict[int, Any] = {}
    for module in model.modules():
        _fill(model, module, device, getattr(torch, recipe.load.dtype), made)
    model.config.use_cache = False
    if quantizer is not None:
        model.hf_quantizer = quantizer
        quantizer.postprocess_model(model)
    if isinstance(recipe.method, Full):
        return model.requires_grad_(True)
    return attach_adapter(model, recipe, facts)


def _fill(model: Any, module: Any, device: str, dtype: Any, made: dict[int, Any]) -> None:
    """Put a module's own parameters and buffers on the device; `made` keeps tied ones tied."""
    import bitsandbytes
    import torch

    layers: Any = bitsandbytes.nn
    if isinstance(module, layers.Linear4bit):
        wide = torch.empty(module.out_features, module.in_features, dtype=dtype, device=device)
        wide.normal_(0.0, model.config.initializer_range)
        # As transformers packs a weight that it has just read.
        module.weight = layers.Params4bit(wide, requires_grad=False, **module.weight.__dict__).to(device)
        if module.bias is not None:
            module.bias = torch.nn.Parameter(torch.zeros_like(module.bias, device=device), requires_grad=False)
        return
    for name, parameter in module.named_parameters(recurse=False):
        if id(parameter) not in made:
            empty = torch.empty_like(parameter, device=device)
            # The meta parameter is kept, so that no later one gets its id.
            made[id(parameter)] = torch.nn.Parameter(empty, requires_grad=parameter.requires_grad), parameter
        setattr(module, name, made[id(parameter)][0])
    for name, buffer in module.named_buffers(recurse=False):
        module._buffers[name] = torch.empty_like(buffer, device=device)
    with torch.no_grad():
        model._init_weights(module)
