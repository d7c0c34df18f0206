"""The very model of a recipe on the meta device: shapes, types and autograd, and not a byte of memory.

from_config on meta -> 4-bit layers with hand-made constants, or weights as in their file -> peft's adapter
-> trained parameters in fp32
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from finetune import method as methods
from finetune.errors import ModelError
from finetune.facts import Facts
from finetune.recipe import Full, Method, QLoRA
from finetune.steps import Weights

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PreTrainedConfig, PreTrainedModel


def model_config(facts: Facts) -> PreTrainedConfig:
    """transformers' configuration of a model, from what its config.json says.

    Raises `ModelError` when transformers knows no such architecture.
    """
    from transformers import AutoConfig

    try:
        return AutoConfig.for_model(**{key: value for key, value in facts.config.items() if key != "architectures"})
    except (ValueError, KeyError, TypeError) as error:
        raise ModelError(
            f"transformers cannot build {facts.model} from its config.json ({error}).",
            "Plan it without --simulate: weights, gradients and optimizer state are exact there too.",
        ) from None


def meta_model(
    config: PreTrainedConfig,
    method: Method,
    facts: Facts,
    *,
    dtype: str,
    attention: str,
    upcast: bool = False,
    held: Weights = "",
    every: int = 1,
) -> PreTrainedModel | Any:
    """The model as `load_model` would give it to the trainer, on the meta device.

    `attention` is transformers' name (eager, sdpa). With `upcast`, 16-bit weights become fp32 as peft's
    `prepare_model_for_kbit_training` makes them. `held`: how the weights of every `every`-th
    layer lie in memory.
    """
    import torch
    from transformers import AutoModelForCausalLM

    config._attn_implementation = attention
    config.use_cache = False
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
        if isinstance(method, QLoRA):
            _in_4_bits(model, method, compute=getattr(torch, _compute_dtype(method, dtype)))
        model.requires_grad_(isinstance(method, Full))
        if held and not isinstance(method, Full):
            _hold(model, held, every)
        if upcast:
            for parameter in model.parameters():
                if parameter.dtype in (torch.float16, torch.bfloat16):
                    parameter.data = parameter.data.float()
        if not isinstance(method, Full):
            from peft import get_peft_model

            model = get_peft_model(model, methods.lora_config(method, facts))
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()
    return model.train()


def _hold(model: Any, how: Weights, every: int) -> None:
    """What `fast.held` makes of the layers' weights."""
    import torch

    from finetune.fast.held import Held, linears_of, put, room_for
    from finetune.gguf_blocks import BLOCK

    room = room_for(linears_of(model, every))
    for _, layer in linears_of(model, every):
        rows, columns = layer.weight.shape
        if how == "half":
            put(layer, torch.empty(rows, 2 * columns, dtype=torch.uint8), Held(room, torch.bfloat16))
        else:
            scale, offset = (torch.empty(columns // BLOCK, 1, rows) for _ in range(2))
            put(layer, torch.empty(columns, rows, dtype=torch.uint8), Held(room, scale=scale, offset=offset))


def _compute_dtype(method: QLoRA, dtype: str) -> str:
    return dtype if method.compute_dtype == "auto" else method.compute_dtype


def _in_4_bits(model: Any, method: QLoRA, compute: torch.dtype) -> None:
    """Replace every Linear layer but the head by bitsandbytes' 4-bit one, with constants of the right sizes."""
    import torch
    from bitsandbytes.nn import Linear4bit  # type: ignore[attr-defined]

    # peft knows a 4-bit weight by this name, and copies it for DoRA's first norm; its constants must stay with it.
    params = type("Params4bit", (torch.nn.Parameter,), {"__deepcopy__": lambda self, memo: self})
    head = model.get_output_embeddings()
    for name, layer in list(model.named_modules()):
        if not isinstance(layer, torch.nn.Linear) or layer is head:
            continue
        shape = layer.weight.shape
        packed = Linear4bit(
            layer.in_features, layer.out_features, bias=layer.bias is not None, compute_dtype=compute,
            compress_statistics=method.double_quant, quant_type=method.quant, device="meta",
        )  # fmt: skip
        packed.bias = layer.bias
        # bitsandbytes' own Params4bit quantises when it is moved; this one has the packed shape from the start.
        weight: Any = params(torch.empty((shape.numel() + 1) // 2, 1, dtype=torch.uint8), requires_grad=False)
        weight.quant_state = _constants(shape, compute, method)
        weight.compress_statistics, weight.quant_type, weight.bnb_quantized = method.double_quant, method.quant, True
        packed.weight = weight
        packed.support_avx512bf16_for_cpu = False
        parent = model.get_submodule(name.rpartition(".")[0])
        setattr(parent, name.rpartition(".")[2], packed)
    model.is_loaded_in_4bit = model.is_quantized = True


def _constants(shape: torch.Size, compute: torch.dtype, method: QLoRA) -> Any:
    import torch
    from bitsandbytes.functional import QuantState

    scales = -(-shape.numel() // methods.BLOCK)
    fp32: dict[str, Any] = {"dtype": torch.float32}
    common: dict[str, Any] = {
        "shape": shape,
        "dtype": compute,
        "blocksize": methods.BLOCK,
        "quant_type": method.quant,
    }
    if not method.double_quant:
        return QuantState(torch.empty(scales, **fp32), code=torch.empty(16, **fp32), **common)
    second = QuantState(
        torch.empty(-(-scales // methods.SCALE_BLOCK), **fp32), code=torch.empty(256, **fp32),
        blocksize=methods.SCALE_BLOCK, dtype=torch.float32,
    )  # fmt: skip
    return QuantState(
        torch.empty(scales, dtype=torch.uint8), code=torch.empty(16, **fp32), offset=torch.empty((), **fp32),
        state2=second, **common,
    )  # fmt: skip


def constants_of(module: nn.Module) -> Iterator[torch.Tensor]:
    """The tensors that a layer keeps beside its packed or held weight."""
    from finetune.fast.held import tensors_of

    yield from tensors_of(module)
    state = getattr(getattr(module, "weight", None), "quant_state", None)
    if state is not None:
        yield state.absmax
        yield state.code
        if state.nested:
            yield state.offset
            yield state.state2.absmax
            yield state.state2.code
