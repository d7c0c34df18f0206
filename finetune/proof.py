"""Does the merged folder answer as base plus adapter? Both are run in float32 on the same rows and compared.

    base + adapter            by peft, nothing merged                             what was trained
    base + adapter, rounded   by peft's own merge, each weight rounded            what a right merge must hold
    merged                    the folder alone, as a server reads it

Merged and rounded must agree to the last digits of float32: a weight left out, added twice, scaled wrongly or tied
to another shows here. Merged and unrounded differ by what a 16-bit type costs, which is measured and told.

The models are built without weights, and each module reads its own from the files for the moment it runs, so the
memory is that of the largest module, whatever the model's size. transformers and peft compute; this file only feeds.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.errors import FinetuneError
from finetune.merge_layout import FourBits, Weighted, read_architecture
from finetune.merge_math import VALUES, four_bits, load, torch_dtype
from finetune.weight_files import FLOATS, Tensor, read_model

if TYPE_CHECKING:
    import torch

ROWS = 4
"""Rows that are compared."""

ROW = 48
"""Tokens of one row; of a longer one the first are taken."""

PLACES = 16
"""Places of each row, spread over it, whose logits are compared."""

TOLERANCE = 1e-3
"""Largest difference, beside a largest logit of 1, that float32 itself explains."""

_ADAPTER = re.compile(r"\.(?P<name>adapter\d+)(?=\.|$)")
_EXPERTS = re.compile(r"(?P<module>.*\.experts)\.(?P<part>gate_up_proj|down_proj)")
_BASE_MODEL = "base_model.model."


class NotProvable(Exception):
    """The models cannot be run here; says why in a few words."""


@dataclass(frozen=True)
class Proof:
    """What was compared, in `places` places of `rows` rows.

    `difference` is the largest between the merged folder's logits and those of base + adapter with each weight
    rounded as the folder's; `rounding` the largest to base + adapter as it is, and `same` in how many places the
    most likely token is the same. `trained` and `trained_same` are the same two beside the 4-bit base of the
    training. `largest` is the largest logit.
    """

    rows: int
    places: int
    largest: float
    difference: float
    rounding: float
    same: int
    trained: float | None = None
    trained_same: int | None = None

    @property
    def passed(self) -> bool:
        """Whether the folder holds what it should; false for NaN."""
        return self.difference <= TOLERANCE * max(1.0, self.largest)

    def sentence(self) -> str:
        """The proof in words."""
        rounds = self.rounding > 2 * self.difference and self.rounding > 1e-4
        moved = f"; rounding to its type moves them by up to {self.rounding:.2g}" if rounds else ""
        return (
            f"Proved on {self.rows} rows: logits equal base + adapter to {self.difference:.1g} of {self.largest:.3g}"
            f"{moved}; the most likely token is the same in {self.same} of {self.places} places."
        )


def prove(
    base: Path,
    adapters: Sequence[Weighted],
    merged: Path,
    rows: Sequence[Sequence[int]],
    *,
    used: Mapping[str, FourBits] | None = None,
    trained: Mapping[str, FourBits] | None = None,
) -> Proof:
    """Run `merged` against `base` with `adapters` on `rows` of token ids.

    `used` names the 4-bit weights that the merge was made from, `trained` those that the adapter was trained beside.
    Raises `NotProvable` where transformers cannot run the model from its files, `FinetuneError` when it does not
    answer as base + adapter.
    """
    import torch

    taken = take(rows)
    if not taken:
        raise NotProvable("there are no rows")
    sizes = {tensor.name: tensor.dtype for shard in read_model(merged) for tensor in shard.tensors.values()}
    with torch.inference_mode():
        got = _answers(_Files(merged), merged, (), taken)
        files = _Files(base, adapters, four_bits=used or {})
        plain = _answers(files, base, adapters, taken, like=merged)
        rounded = plain
        if any(dtype in FLOATS and dtype != "F32" for dtype in sizes.values()):
            rounded = _answers(replace(files, rounded=sizes), base, adapters, taken, like=merged)
        found = Proof(
            rows=len(taken),
            places=len(got),
            largest=float(rounded.abs().max()),
            difference=_largest(got, rounded),
            rounding=_largest(got, plain),
            same=_same(got, plain),
        )
        if trained is not None:
            other = plain
            if trained != (used or {}):
                other = _answers(replace(files, four_bits=trained), base, adapters, taken, like=merged)
            found = replace(found, trained=_largest(got, other), trained_same=_same(got, other))
    if not found.passed:
        raise FinetuneError(
            f"The merged model does not answer as base + adapter: on {found.rows} rows its logits differ by up to "
            f"{found.difference:.2g} (of {found.largest:.3g}), and the most likely token is the same in {found.same} "
            f"of {found.places} places.",
            "It was removed. Check that base and adapter have not changed meanwhile, and merge again.",
        )
    return found


def take(rows: Sequence[Sequence[int]]) -> list[list[int]]:
    """The first tokens of some rows, all of one length; the longer ones are preferred to short ones."""
    longest = max((len(row) for row in rows), default=0)
    good = [row for row in rows if 2 * len(row) >= min(longest, ROW)][:ROWS]
    width = min([ROW, *map(len, good)])
    return [[int(token) for token in row[:width]] for row in good]


def _largest(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).abs().max())


def _same(one: torch.Tensor, other: torch.Tensor) -> int:
    return int((one.argmax(-1) == other.argmax(-1)).sum())


# ------------------------------------------------------------------------------------------- models without weights


def _answers(
    files: _Files, folder: Path, adapters: Sequence[Weighted], rows: Sequence[Sequence[int]], like: Path | None = None
) -> torch.Tensor:
    """Logits [places, vocabulary] at the compared places of the rows, float32."""
    import torch

    try:
        model, prefix = _empty_model(folder, like)
        if adapters:
            model = _with_adapters(model, adapters)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise NotProvable(f"transformers cannot build it ({_first_line(error)})") from None
    _stream(model, replace(files, prefix=prefix, twins=_twins(model)), adapters)
    places = list(range(len(rows[0])))[:: -max(len(rows[0]) // PLACES, 1)][:PLACES]
    head = model.get_output_embeddings()
    if fewer := type(head) is torch.nn.Linear:  # the logits of all places would be larger than any module
        whole = head.forward
        setattr(head, "forward", lambda values: whole(values[:, places]))  # noqa: B010  (types know a method)
    try:
        logits: torch.Tensor = model(input_ids=torch.tensor(rows), use_cache=False).logits
        logits = (logits if fewer else logits[:, places]).flatten(0, 1).float()
    except (NotImplementedError, RuntimeError) as error:
        if "meta" not in str(error):
            raise
        raise NotProvable(f"its modules read each other's weights ({_first_line(error)})") from None
    return logits


def _empty_model(folder: Path, like: Path | None) -> tuple[Any, str]:
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


def _with_adapters(model: Any, adapters: Sequence[Weighted]) -> Any:
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


def _twins(model: Any) -> dict[str, list[str]]:
    """For each parameter the names under which it is the same one."""
    by_id: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        by_id.setdefault(id(parameter), []).append(name)
    return {name: names for names in by_id.values() for name in names}


# ------------------------------------------------------------------------------------------------- weights from files


@dataclass(frozen=True)
class _Files:
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


def _stream(model: Any, files: _Files, adapters: Sequence[Weighted]) -> None:
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


def _linear(name: str, module: Any, files: _Files) -> Callable[[Any], Any]:
    """A linear layer that reads its weight a few rows at a time."""
    import torch

    def forward(values: torch.Tensor) -> torch.Tensor:
        step = max(16 * VALUES // module.in_features, 1)
        result = torch.empty(*values.shape[:-1], module.out_features)
        for begin in range(0, module.out_features, step):
            end = min(begin + step, module.out_features)
            result[..., begin:end] = values @ files.get(f"{name}.weight", begin, end).T
        return result if module.bias is None else result.add_(files.get(f"{name}.bias"))

    return forward


def _embedding(name: str, module: Any, files: _Files) -> Callable[[Any], Any]:
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


def _whole(name: str, module: Any, files: _Files, adapters: Sequence[Weighted]) -> Callable[..., Any]:
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


def _prepare(name: str, module: Any, files: _Files, adapters: Sequence[Weighted]) -> None:
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


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__
