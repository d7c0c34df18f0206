"""What a model is: shapes, parameter groups and architecture numbers, from its headers and never from a weight.

`read_facts` looks in this order and stops at the first that knows the model:

    a local folder        config.json + the headers of its safetensors files
    a .gguf file          its header, with llama.cpp's names turned into Hugging Face's
    a bundled fact file   smollm2-135m and the models of the shipped recipes, so that planning needs no network
    the hub's cache       a snapshot that was downloaded before
    the hub               config.json and, by range requests, the headers of the shards
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

from finetune import gguf_blocks, hub_headers
from finetune.errors import ModelError
from finetune.gguf_header import read_gguf
from finetune.tensors import GROUPS, Group, Tensor, group_of, in_tower, layer_of
from finetune.weight_files import read_model

Source = Literal["bundled", "local folder", "hub cache", "hub headers", "gguf"]


class Linear(NamedTuple):
    """One Linear layer: y[out_features] = W[out_features, in_features] @ x[in_features]."""

    name: str
    out_features: int
    in_features: int


class LinearKind(NamedTuple):
    """The Linear layers of one name and shape, and how many of them the model has."""

    name: str
    out_features: int
    in_features: int
    copies: int

    @property
    def parameters(self) -> int:
        """Weights of all of them, without biases."""
        return self.copies * self.out_features * self.in_features


class Stored(NamedTuple):
    """What is stored in one type."""

    tensors: int
    parameters: int
    bytes: int


@dataclass(frozen=True)
class Facts:
    """A model in numbers.

    `tensors` are the parameters that exist once the model is loaded: an output head that shares the embedding's
    weight (`tied`) and buffers that old files carry (rotary tables, causal masks) are not among them. `config` is the
    content of config.json. `memo` is for others to keep what they found out about these facts: a plan asks often.
    `blocks`: beside the weights lie the GGUF blocks that they come from (`gguf_blocks`).
    """

    model: str
    source: Source
    architecture: str
    model_type: str
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    max_position: int | None
    tied: bool
    tensors: tuple[Tensor, ...]
    config: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)
    memo: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)
    blocks: bool = False

    @property
    def parameters(self) -> int:
        """Number of parameters, a tied head counted once."""
        return sum(tensor.size for tensor in self.tensors)

    def by_group(self) -> dict[Group, int]:
        """Parameters per group, always with all keys of `GROUPS` in that order; `head` is 0 when it is tied."""
        groups = dict.fromkeys(GROUPS, 0)
        for tensor in self.tensors:
            groups[group_of(tensor.name)] += tensor.size
        return groups

    def weight_bytes(self) -> int:
        """Bytes of the weights as stored; of a GGUF file, as it unpacks (bfloat16)."""
        return sum(tensor.bytes for tensor in self.tensors)

    def by_dtype(self) -> dict[str, Stored]:
        """Tensors, parameters and bytes of each type, in safetensors' spelling, the largest first."""
        found = {name: [t for t in self.tensors if t.dtype == name] for name in {t.dtype for t in self.tensors}}
        stored = {
            name: Stored(len(those), sum(t.size for t in those), sum(t.bytes for t in those))
            for name, those in found.items()
        }
        return dict(sorted(stored.items(), key=lambda item: (-item[1].bytes, item[0])))

    @property
    def unpacked(self) -> bool:
        """Whether the files hold the weights packed in few bits, and `dtype` is what they unpack to."""
        return self.source == "gguf" or (self.source == "bundled" and self.model == EMBEDDED)

    def linears(self, *, towers: bool = False) -> list[Linear]:
        """The Linear layers of the decoder, without the output head; `towers` adds those of vision and audio parts.

        Experts and routers of mixture models are no Linear layers: transformers keeps them as stacked tensors.
        """
        return [linear for linear, in_a_tower in self._linears if towers or not in_a_tower]

    @cached_property
    def _linears(self) -> list[tuple[Linear, bool]]:
        """Found once: a plan asks for them many times."""
        return [(self._linear(tensor), in_tower(tensor.name)) for tensor in self.tensors if tensor.is_linear]

    def linear_kinds(self) -> list[LinearKind]:
        """The Linear layers by name and shape in the model's order, those of towers and the output head included.

        A decoder layer's part keeps the name it has inside the layer: `model.layers.0.mlp.up_proj` -> `mlp.up_proj`.
        """
        linears = [*self.linears(towers=True), *filter(None, [self.head()])]
        counts = Counter((_kind_of(name), rows, columns) for name, rows, columns in linears)
        return [LinearKind(*kind, copies) for kind, copies in counts.items()]

    @cached_property
    def linear_names(self) -> tuple[str, ...]:
        """The decoder's Linear layers as they are called inside their layer, each once: `self_attn.q_proj`."""
        return tuple(dict.fromkeys(_kind_of(linear.name) for linear in self.linears()))

    def head(self) -> Linear | None:
        """The output head as a Linear layer; None when it shares the embedding's weight."""
        for tensor in self.tensors:
            if group_of(tensor.name) == "head" and len(tensor.shape) == 2:
                return self._linear(tensor)
        return None

    @property
    def conv1d(self) -> bool:
        """Whether the layers are transformers' `Conv1D`, whose weights lie as [in, out]."""
        return self.model_type in ("gpt2", "openai-gpt", "imagegpt")

    @property
    def has_experts(self) -> bool:
        """Whether it is a mixture of experts."""
        return any(".experts." in tensor.name for tensor in self.tensors)

    @property
    def has_towers(self) -> bool:
        """Whether there are vision or audio parts beside the decoder."""
        return any(in_tower(tensor.name) for tensor in self.tensors)

    def document(self) -> dict[str, Any]:
        """Everything that `finetune facts --json` prints."""
        return {
            "model": self.model,
            "source": self.source,
            "architecture": self.architecture,
            "model_type": self.model_type,
            "parameters": self.parameters,
            "bytes": self.weight_bytes(),
            "tensors": len(self.tensors),
            "tied": self.tied,
            "unpacked": self.unpacked,
            "groups": {
                group: {"parameters": size, "share": size / self.parameters}
                for group, size in self.by_group().items()
            },
            "dtypes": {name: stored._asdict() for name, stored in self.by_dtype().items()},
            "numbers": {name: getattr(self, name) for name in _KEYS},
            "linears": [
                {"name": kind.name, "shape": [kind.out_features, kind.in_features], "count": kind.copies}
                for kind in self.linear_kinds()
            ],
        }

    def _linear(self, tensor: Tensor) -> Linear:
        rows, columns = tensor.shape
        flipped = self.conv1d and group_of(tensor.name) != "head"
        return Linear(tensor.module, columns, rows) if flipped else Linear(tensor.module, rows, columns)


def _kind_of(module: str) -> str:
    """A layer's name without its number: `model.layers.3.mlp.up_proj` -> `mlp.up_proj`, `vision.blocks.*.fc1`."""
    layer = layer_of(module)
    inside = module if layer is None else module.split(f".{layer}.", 1)[1]
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", inside)


# ------------------------------------------------------------------------------------- config.json + tensors -> Facts

# The same number under the names that architectures give it.
_KEYS = {
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "intermediate_size": ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"),
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads"),
    "head_dim": ("head_dim",),
    "vocab_size": ("vocab_size",),
    "max_position": ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"),
}

# Types whose class ties head and embedding when config.json does not say; it matters for files that store both.
_TIED_BY_DEFAULT = frozenset(
    "bloom cohere cohere2 falcon gemma gemma2 gemma3 gemma3_text gpt2 gpt_bigcode gpt_neo lfm2 openai-gpt opt smollm3"
    " starcoder2".split()
)


def _facts(model: str, source: Source, config: Mapping[str, Any], tensors: Iterable[Tensor]) -> Facts:
    """Facts from a config.json and the tensors of the headers; numbers the config leaves out are read off shapes."""
    if quantised := _group(config, "quantization_config"):
        kind = quantised.get("quant_method", "unknown")
        raise ModelError(
            f"{model} is already quantised ({kind}), so its files do not show the weights to train.",
            "Name the original 16-bit model; `kind: qlora` quantises it while loading.",
        )
    text = {**config, **_group(config, "text_config")}
    kept = [tensor for tensor in tensors if tensor.is_parameter]
    heads = [tensor for tensor in kept if group_of(tensor.name) == "head" and len(tensor.shape) == 2]
    tied = not heads or _says_tied(config, text)
    kept = [tensor for tensor in kept if not (tied and tensor in heads)]
    if not any(group_of(tensor.name) == "embedding" and len(tensor.shape) == 2 for tensor in kept):
        raise ModelError(
            f"{model} has no token embedding among its {len(kept)} weights.",
            "finetune trains decoder language models; check that the name is right and every file is there.",
        )
    model_type = text.get("model_type") or config.get("model_type") or "unknown"
    architecture = (config.get("architectures") or [model_type])[0]
    blank = Facts(model, source, architecture, model_type, 0, 0, 0, 0, 0, 0, 0, None, tied, tuple(kept), config)
    return _with_numbers(blank, text)


def facts_of(model: str, config: Mapping[str, Any], shapes: Mapping[str, Sequence[int]], dtype: str) -> Facts:
    """Facts of a model that is known by its numbers only: the content of its config.json and its weights' shapes."""
    tensors = [Tensor(name, tuple(shape), dtype) for name, shape in shapes.items()]
    return _facts(model, "bundled", config, tensors)


def _group(config: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = config.get(key)
    return value if isinstance(value, dict) else {}


def _says_tied(config: Mapping[str, Any], text: Mapping[str, Any]) -> bool:
    """transformers obeys the outer config when a model has two."""
    for place in (config, text):
        if isinstance(said := place.get("tie_word_embeddings"), bool):
            return said
    return config.get("model_type") in _TIED_BY_DEFAULT


def _with_numbers(facts: Facts, config: Mapping[str, Any]) -> Facts:
    """Fills in the architecture numbers: what config.json says, else what the shapes say.

    Raises `ModelError` when neither says, or when fewer layers lie in the files than the config names.
    """
    said = {name: _first(config, keys) for name, keys in _KEYS.items()}
    if said["intermediate_size"] and facts.model_type == "recurrent_gemma":
        said["intermediate_size"] //= 2  # its config counts the gate and the up projection as one
    _check_sizes(facts, said)
    linear = {layer.name.rpartition(".")[2]: layer.out_features for layer in facts.linears()}
    vocab, width = next(t.shape for t in facts.tensors if group_of(t.name) == "embedding" and len(t.shape) == 2)
    per_head = next((t.shape[0] for t in facts.tensors if t.name.endswith("self_attn.q_norm.weight")), None)
    found = {number for t in facts.tensors if (number := layer_of(t.name)) is not None}
    layers = said["layers"] or max(found, default=-1) + 1
    if len(found) < layers:
        raise ModelError(
            f"{facts.model} has weights for {len(found)} of the {layers} layers that its {_paper(facts)} names.",
            "Download or save the model again; files are missing.",
        )
    hidden = said["hidden_size"] or width
    heads, head_dim = said["heads"], said["head_dim"]
    if heads is None and "q_proj" in linear and (head_dim := head_dim or per_head):
        heads = linear["q_proj"] // head_dim
    if not heads:
        raise ModelError(
            f"The {_paper(facts)} of {facts.model} does not say how many attention heads it has.",
            "finetune trains decoder language models with attention; check its num_attention_heads.",
        )
    head_dim = head_dim or max(linear.get("q_proj", hidden) // heads, 1)
    kv_heads = 1 if config.get("multi_query") and not config.get("new_decoder_architecture") else said["kv_heads"]
    up = next((linear[name] for name in _UP if name in linear), None)
    return replace(
        facts,
        hidden_size=hidden,
        intermediate_size=said["intermediate_size"] or up or 4 * hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads or linear.get("k_proj", heads * head_dim) // head_dim,
        head_dim=head_dim,
        vocab_size=said["vocab_size"] or vocab,
        max_position=said["max_position"],
    )


# What architectures call the layers into and out of the MLP's inner size.
_UP = ("up_proj", "fc1", "fc_in", "c_fc", "dense_h_to_4h")
_DOWN = ("down_proj", "fc2", "fc_out", "dense_4h_to_h")


def _check_sizes(facts: Facts, said: Mapping[str, int | None]) -> None:
    """Raises `ModelError` when config.json names a size that no weight has: it belongs to another model.

    Only what every model must have is asked for. A vocabulary may be smaller than its padded embedding, a factorised
    embedding narrower than the norms (OPT 350M), and a mixture of experts need not have one layer of the plain
    intermediate size (Qwen3 MoE).
    """
    tables = [t.shape for t in facts.tensors if group_of(t.name) in ("embedding", "head") and len(t.shape) == 2]
    rows, columns = {shape[0] for shape in tables}, {shape[1] for shape in tables}
    norms = {t.size for t in facts.tensors if "norm" in t.name.lower() and not in_tower(t.name)}
    mlps = [layer for layer in facts.linears() if layer.name.rpartition(".")[2] in _UP + _DOWN]
    # Both sides, as some architectures (Jais) store [in, out].
    inner = {size for layer in mlps for size in (layer.out_features, layer.in_features) if not facts.has_experts}
    wide, vocab, mlp = said["hidden_size"], said["vocab_size"], said["intermediate_size"]
    if wide and wide not in columns | norms:
        raise _contradiction(facts, "hidden_size", wide, f"its embedding is {_or(columns)} wide")
    if vocab and vocab > max(rows):
        raise _contradiction(facts, "vocab_size", vocab, f"its embedding has {max(rows):,} rows")
    if mlp and inner and mlp not in inner:
        raise _contradiction(facts, "intermediate_size", mlp, f"its MLP layers are {_or(inner - {wide})} wide inside")


def _or(sizes: Iterable[int]) -> str:
    return " or ".join(f"{size:,}" for size in sorted(sizes))


def _contradiction(facts: Facts, key: str, size: int, has: str) -> ModelError:
    return ModelError(
        f"{facts.model} says {key} {size:,} in its {_paper(facts)}, and {has}.",
        "The weights are another model's; download or save both again.",
    )


def _paper(facts: Facts) -> str:
    """Where a model says what it is."""
    return "header" if facts.source == "gguf" else "config.json"


def _first(config: Mapping[str, Any], keys: Iterable[str]) -> int | None:
    """The first whole number under one of the keys; of a list with one number per layer, the largest."""
    for key in keys:
        value: Any = config.get(key)
        if isinstance(value, list) and value and all(isinstance(item, int) for item in value):
            return int(max(value))
        if isinstance(value, int) and not isinstance(value, bool):
            return int(value)
    return None


# ---------------------------------------------------------------------------------------------------- finding a model

EMBEDDED = "smollm2-135m"
"""The name of the model that comes from a package, packed in few bits."""

# Name -> (fact file, stored dtype). A tuned variant has its base's shapes; the embedded model unpacks to F32.
_BUNDLED = {
    EMBEDDED: ("smollm2-135m", "F32"),
    "google/gemma-2-2b": ("gemma-2-2b", "F32"),
    "google/gemma-2-2b-it": ("gemma-2-2b", "BF16"),
    "gpt3-175b": ("gpt3-175b", "F16"),  # to plan only: its weights are not public
    "meta-llama/Llama-2-13b-hf": ("llama-2-13b", "F16"),
    "meta-llama/Llama-2-7b-hf": ("llama-2-7b", "F16"),
    "meta-llama/Llama-2-7b-chat-hf": ("llama-2-7b", "F16"),
}


def read_facts(model: str, revision: str | None = None) -> Facts:
    """The facts of a local folder, a .gguf file, a bundled model or a hub id (at `revision`: branch, tag or commit).

    A bundled model has the same shapes at every revision. Raises `ModelError` when there is no such model, it has no
    readable weights, it contradicts its config.json, or it may not be read; and for a revision of what has none.
    """
    path = Path(model).expanduser()
    if revision is not None and (path.exists() or path.suffix == ".gguf" or model == EMBEDDED):
        raise ModelError(
            f"{model} does not come from the hub, so it has no revision '{revision}'.", "Leave the revision out."
        )
    if path.is_dir():
        return _from_folder(path, model, "local folder")
    if path.suffix == ".gguf":
        return _from_gguf(path, model)
    if path.is_file():
        raise ModelError(
            f"{model} is a file, and a model is a folder.", "Name the folder it lies in, or a .gguf file."
        )
    if model in _BUNDLED:
        return _from_bundle(model)
    hub_id = re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", model)
    beside_folders = path.parent != Path() and path.parent.is_dir()
    if not hub_id or beside_folders:
        raise ModelError(f"There is no folder {model}.", "Check the path, or name a hub model as owner/name.")
    return _from_hub(model, revision)


def bundled_models() -> Iterator[str]:
    """The names that need no network."""
    yield from _BUNDLED


def _from_bundle(model: str) -> Facts:
    file, dtype = _BUNDLED[model]
    content = json.loads((Path(__file__).parent / "bundled" / "facts" / f"{file}.json").read_text(encoding="utf-8"))
    config = content["config"]
    layers = range(config.get("num_hidden_layers") or config["n_layer"])
    shapes = dict(content["outside"])
    shapes |= {name.format(layer): shape for layer in layers for name, shape in content["layer"].items()}
    return replace(facts_of(model, content["config"], shapes, dtype), blocks=model == EMBEDDED)


def _from_gguf(path: Path, model: str) -> Facts:
    config, shapes = read_gguf(path, model)
    # What is packed in few bits is trained as the bfloat16 it unpacks to.
    return _facts(model, "gguf", config, [Tensor(name, shape, "BF16") for name, shape in shapes.items()])


def _from_folder(folder: Path, model: str, source: Source) -> Facts:
    if not (folder / "config.json").is_file():
        raise _no_config(folder)
    config = _read_json(folder / "config.json")
    stored = [tensor for shard in read_model(folder) for tensor in shard.tensors.values()]
    facts = _facts(model, source, config, [Tensor(tensor.name, tensor.shape, tensor.dtype) for tensor in stored])
    return replace(facts, blocks=(folder / gguf_blocks.FILE).is_file())


def _no_config(folder: Path) -> ModelError:
    what = f"The folder {folder} has no config.json."
    if (folder / "adapter_config.json").is_file():
        base = _read_json(folder / "adapter_config.json").get("base_model_name_or_path")
        return ModelError(f"The folder {folder} holds an adapter, not a model.", f"Name its base model, {base}.")
    if ggufs := sorted(folder.glob("*.gguf")):
        return ModelError(what, f"Name the file itself: {ggufs[0]}.")
    return ModelError(what, "Name the folder that `save_pretrained` wrote, or a hub model as owner/name.")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}.", "Download or save the model again.") from None
    if not isinstance(content, dict):
        raise ModelError(f"{path} is not a JSON object.", "Download or save the model again.")
    return content


def _from_cache(model: str, revision: str | None) -> Facts | None:
    """Facts of a snapshot that the hub's cache holds whole; None sends the caller to the hub."""
    config = hub_headers.cached_config(model, revision)
    if config is None:
        return None
    try:
        return _from_folder(config.parent, model, "hub cache")
    except ModelError:
        return None


def _from_hub(model: str, revision: str | None) -> Facts:
    """Facts from the hub's cache, or by range requests: config.json and a few kilobytes of each shard."""
    try:
        if cached := _from_cache(model, revision):
            return cached
        config = _read_json(hub_headers.download_config(model, revision))
        tensors = [Tensor(*entry) for entry in hub_headers.read_headers(model, revision)]
    except Exception as error:
        raise hub_headers.refusal(error, model, revision, _BUNDLED) from None
    return _facts(model, "hub headers", config, tensors)
