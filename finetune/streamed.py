"""A model that reads its weights when it needs them: transformers and peft compute, from files, in little memory.

    empty model (parameters without bytes)  +  Files (where each of them lies)  ->  feed  ->  a model that runs

Each module reads its own parameters for the moment it runs: a linear layer some rows at a time, an embedding only the
rows it is asked for. So the memory is that of the largest other module, whatever the model's size.
"""

from __future__ import annotations

import ctypes
import platform
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.architecture import read_architecture
from finetune.merge_layout import FourBits, Weighted
from finetune.merge_math import VALUES, four_bits, load, torch_dtype
from finetune.weight_files import Tensor, read_model

if TYPE_CHECKING:
    import torch

ROWS = 16 * VALUES
"""Values of the rows that a linear layer reads at once, about."""

_ADAPTER = re.compile(r"\.(?P<name>adapter\d+)(?=\.|$)")
_EXPERTS = re.compile(r"(?P<module>.*\.experts)\.(?P<part>gate_up_proj|down_proj)")
_BASE_MODEL = "base_model.model."
_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD of malloc.h


class NotProvable(Exception):
    """A model cannot be run here from its files; says why in a few words."""


def give_back_freed_memory() -> None:
    """Let glibc's malloc hand freed blocks of 1 MiB and more to the kernel at once, until this process ends.

    By itself it learns to keep blocks of up to 32 MiB, and weights of many sizes leave holes between them.
    """
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, 1 << 20)


def empty_model(folder: Path, like: Path | None) -> tuple[Any, str]:
    """A model of parameters without bytes, and the prefix that its files may leave out."""
    import torch
    from accelerate import init_empty_weights
    from transformers import AutoConfig, AutoModelForCausalLM

    build: Any = AutoModelForCausalLM
    config = AutoConfig.from_pretrained(folder)
    if like is not None:  # an adapter may bring a vocabulary of another size
        text = AutoConfig.from_pretrained(like).get_text_config()
        config.get_text_config().vocab_size = text.vocab_size
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with init_empty_weights(include_buffers=False):
        model: Any = build.from_config(config, dtype=torch.float32)
    model.tie_weights()  # building without bytes has made two of each tied matrix
    return model.eval(), f"{model.base_model_prefix}."


def with_adapters(model: Any, adapters: Sequence[Weighted]) -> Any:
    """peft around it, all adapters at work with their weights."""
    import warnings

    from peft import LoraConfig, PeftModel

    names = [f"adapter{number}" for number in range(len(adapters))]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of tied weights and of what peft would do at a start
        for name, each in zip(names, adapters, strict=True):
            config: Any = LoraConfig.from_pretrained(str(each.adapter.folder))
            config.init_lora_weights, config.inference_mode = False, True
            if name == names[0]:
                model = PeftModel(model, config, adapter_name=name, low_cpu_mem_usage=True)
            else:
                model.add_adapter(name, config, low_cpu_mem_usage=True)
    model.base_model.set_adapter(names)
    for module in model.modules():
        for name, each in zip(names, adapters, strict=True):
            if isinstance(scaling := getattr(module, "scaling", None), dict) and name in scaling:
                scaling[name] *= each.weight
    return model.eval()


def twins_of(model: Any) -> dict[str, list[str]]:
    """For each parameter the names under which it is the same one."""
    by_id: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        by_id.setdefault(id(parameter), []).append(name)
    return {name: names for names in by_id.values() for name in names}


# ------------------------------------------------------------------------------------------------- weights from files


@dataclass(frozen=True)
class Files:
    """Where the parameters of a model lie: in the adapters, or in the folder of the base.

    With `rounded` each is first rounded to the type that is named for it; `four_bits` as in training.
    """

    folder: Path
    adapters: Sequence[Weighted] = ()
    rounded: Mapping[str, str] | None = None
    four_bits: Mapping[str, FourBits] | None = None
    prefix: str = ""
    twins: Mapping[str, list[str]] | None = None

    @cached_property
    def stored(self) -> dict[str, Tensor]:
        """The folder's tensors by their modules' names."""
        known = read_architecture(self.folder)
        found = (tensor for shard in read_model(self.folder) for tensor in shard.tensors.values())
        return {known.module_name(tensor.name): tensor for tensor in found}

    @cached_property
    def own(self) -> list[dict[str, Tensor]]:
        """The adapters' tensors by name."""
        return [{tensor.name: tensor for tensor in each.adapter.tensors} for each in self.adapters]

    def find(self, name: str) -> Tensor:
        """The tensor of a parameter; raises `NotProvable` when no file has it."""
        for each in (name, *(self.twins or {}).get(name, ())):
            if tensor := self._of_adapter(each) or self._of_base(each):
                return tensor
        raise NotProvable(f"its files have no '{_in_base(name)}'")

    def _of_adapter(self, name: str) -> Tensor | None:
        found = _ADAPTER.search(name)
        number = int(found["name"].removeprefix("adapter")) if found else 0
        if number >= len(self.own) or ".original_module." in name:
            return None
        key = _ADAPTER.sub("", name).replace(".modules_to_save", "")
        return self.own[number].get(key) or self.own[number].get(key.removesuffix(".weight"))

    def _of_base(self, name: str) -> Tensor | None:
        plain = _in_base(name)
        return self.stored.get(plain) or self.stored.get(plain.removeprefix(self.prefix))

    def get(self, name: str, begin: int = 0, end: int | None = None, *, exact: bool = False) -> torch.Tensor:
        """A parameter, or some rows of it, in float32; with `exact` neither rounded nor widened."""
        if experts := _EXPERTS.fullmatch(_in_base(name)):
            return self._packed(experts["module"], experts["part"])
        tensor = self.find(name)
        how = (self.four_bits or {}).get(tensor.name)
        values = four_bits(load(tensor), how)[begin:end] if how else load(tensor, begin, end)
        if exact:
            return values
        if self.rounded is not None and (dtype := self.type_of(name)):
            values = values.to(torch_dtype(dtype))
        return values.float() if values.is_floating_point() else values

    def _packed(self, module: str, part: str) -> torch.Tensor:
        """All experts of a layer as transformers packs them, [experts, out, in], from files that keep each alone."""
        import torch

        names = [name for name in self.stored if re.fullmatch(rf"{re.escape(module)}\.\d+\.down_proj\.weight", name)]
        if not names:
            raise NotProvable(f"its files have no '{module}.{part}'")
        parts = part.replace("gate_up_proj", "gate_proj,up_proj").split(",")
        packed = [
            torch.cat([self.get(f"{module}.{number}.{each}.weight") for each in parts])
            for number in range(len(names))
        ]
        return torch.stack(packed)

    def type_of(self, name: str) -> str | None:
        """The type that a parameter is rounded to; none for those of adapters."""
        for each in (name, *(self.twins or {}).get(name, ())):
            if tensor := self._of_base(each.replace(".trainable_tokens_delta", ".weight")):
                return (self.rounded or {}).get(tensor.name)
        return None


def _in_base(name: str) -> str:
    """The name in the base's files of a parameter inside peft's wrappers."""
    name = _ADAPTER.sub("", name).removeprefix(_BASE_MODEL)
    return re.sub(r"\.(base_layer|original_module|modules_to_save|token_adapter)(?=\.)", "", name)


# --------------------------------------------------------------------------------------------------- feeding a model


def feed(model: Any, files: Files, adapters: Sequence[Weighted]) -> None:
    """Let every module of an empty model read its parameters when it runs, and forget them after."""
    import torch

    for name, module in _units(model):
        feed = _whole(name, module, files, adapters)
        if type(module) is torch.nn.Linear:
            feed = _linear(name, module, files)
        elif isinstance(module, torch.nn.Embedding):
            feed = _embedding(name, module, files)
        setattr(module, "forward", feed)  # noqa: B010  (types know a method)


def _units(module: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """The modules that are fed as one: those with parameters of their own, and peft's with all they hold."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    if isinstance(module, BaseTunerLayer) or any(parameter is not None for parameter in module._parameters.values()):
        yield name, module
        return
    for inner, child in module.named_children():
        yield from _units(child, f"{name}.{inner}".removeprefix("."))


def _linear(name: str, module: Any, files: Files) -> Callable[[Any], Any]:
    """A linear layer that reads its weight a few rows at a time."""
    import torch

    def forward(values: torch.Tensor) -> torch.Tensor:
        step = max(ROWS // module.in_features, 1)
        result = torch.empty(*values.shape[:-1], module.out_features)
        for begin in range(0, module.out_features, step):
            end = min(begin + step, module.out_features)
            result[..., begin:end] = values @ files.get(f"{name}.weight", begin, end).T
        return result if module.bias is None else result.add_(files.get(f"{name}.bias"))

    return forward


def _embedding(name: str, module: Any, files: Files) -> Callable[[Any], Any]:
    """An embedding that reads only the rows it is asked for."""
    import torch

    compute = module.forward

    def forward(ids: torch.Tensor) -> Any:
        rows, places = torch.unique(ids, return_inverse=True)
        read = torch.cat([files.get(f"{name}.weight", row, row + 1) for row in rows.tolist()])
        empty, padding = module.weight, module.padding_idx
        module.weight, module.padding_idx = torch.nn.Parameter(read, requires_grad=False), None
        try:
            return compute(places)
        finally:
            module.weight, module.padding_idx = empty, padding

    return forward


def _whole(name: str, module: Any, files: Files, adapters: Sequence[Weighted]) -> Callable[..., Any]:
    """Any other module: everything below it is read, it runs, and everything is let go."""
    import torch

    compute = module.forward
    pairs = hasattr(module, "lora_A")

    def forward(*arguments: Any, **keywords: Any) -> Any:
        empty = []
        try:
            for path, owner, key in _parameters(module):
                exact = pairs and path == "base_layer.weight"
                values = files.get(f"{name}.{path}", exact=exact)
                empty.append((owner, key, owner._parameters[key]))
                owner._parameters[key] = torch.nn.Parameter(values, requires_grad=False)
            if pairs:
                _prepare(name, module, files, adapters)
            return compute(*arguments, **keywords)
        finally:
            for owner, key, parameter in empty:
                owner._parameters[key] = parameter
            if pairs:
                module.merged_adapters.clear()

    return forward


def _parameters(module: Any) -> list[tuple[str, Any, str]]:
    """(path, the module that has it, its name there) of every parameter below a module."""
    return [
        (f"{path}.{key}".removeprefix("."), owner, key)
        for path, owner in module.named_modules()
        for key, parameter in owner._parameters.items()
        if parameter is not None
    ]


def _prepare(name: str, module: Any, files: Files, adapters: Sequence[Weighted]) -> None:
    """A layer with pairs: take off what its start took off, and merge and round where that is asked for."""
    layer, embedding = module.base_layer, bool(getattr(module, "lora_embedding_A", None))
    start = adapters[0].adapter.start
    if start and not embedding:
        trained = (
            {key: module.lora_A[key].weight.data for key in module.lora_A},
            {key: module.lora_B[key].weight.data for key in module.lora_B},
        )
        (module.pissa_init if start == "pissa" else module.olora_init)("adapter0", *["pissa"] * (start == "pissa"))
        for kept, own in zip(trained, (module.lora_A, module.lora_B), strict=True):
            for key, values in kept.items():
                own[key].weight.data = values
    layer.weight.data = layer.weight.data.float()
    if files.rounded is not None:
        module.merge()
        dtype = files.type_of(f"{name}.base_layer.weight")
        layer.weight.data = layer.weight.data.to(torch_dtype(dtype or "F32")).float()


def first_line(error: Exception) -> str:
    """What an error says first, without its full stop."""
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__
