"""What a model is: shapes, parameter groups and architecture numbers, from its headers and never from a weight.

`read_facts` looks in this order and stops at the first that knows the model:

    a local folder        config.json + the header of every *.safetensors file
    a .gguf file          its header, with llama.cpp's names turned into Hugging Face's
    a bundled fact file   smollm2-135m and the models of the shipped recipes, so that planning needs no network
    the hub's cache       a snapshot that was downloaded before
    the hub               config.json and, by range requests, the headers of the shards
"""

from __future__ import annotations

import difflib
import json
import math
import re
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

from finetune.errors import ModelError

Source = Literal["bundled", "local folder", "hub cache", "hub headers", "gguf"]
Group = Literal["embedding", "head", "attention", "mlp", "norm", "other"]

GROUPS: tuple[Group, ...] = ("embedding", "head", "attention", "mlp", "norm", "other")

# Bits per value by safetensors name; https://github.com/huggingface/safetensors `Dtype`.
_BITS = {"F64": 64, "F32": 32, "F16": 16, "BF16": 16, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F4": 4}
_SPELLINGS = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}


def dtype_bytes(dtype: str) -> float:
    """Bytes of one value; understands safetensors' spelling ("BF16") and torch's ("bfloat16").

    Raises `ModelError` for a type that no weight to be trained has.
    """
    bits = _BITS.get(_SPELLINGS.get(dtype, dtype))
    if bits is None:
        raise ModelError(f"There is no weight type '{dtype}'.", f"Known are {', '.join([*_SPELLINGS, *_BITS])}.")
    return bits / 8


@dataclass(frozen=True)
class Tensor:
    """One named weight as its header describes it; `dtype` in safetensors' spelling."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def size(self) -> int:
        """Number of values."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Bytes as stored."""
        return int(self.size * dtype_bytes(self.dtype))

    @property
    def module(self) -> str:
        """Name of the module that holds it: `model.norm.weight` -> `model.norm`."""
        return self.name.rpartition(".")[0]


class Linear(NamedTuple):
    """One Linear layer: y[out_features] = W[out_features, in_features] @ x[in_features]."""

    name: str
    out_features: int
    in_features: int


@dataclass(frozen=True)
class Facts:
    """A model in numbers.

    `tensors` are the parameters that exist once the model is loaded: an output head that shares the embedding's
    weight (`tied`) and buffers that old files carry (rotary tables, causal masks) are not among them.
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

    def linears(self, *, towers: bool = False) -> list[Linear]:
        """The Linear layers of the decoder, without the output head; `towers` adds those of vision and audio parts.

        Experts and routers of mixture models are no Linear layers: transformers keeps them as stacked tensors.
        """
        found = [tensor for tensor in self.tensors if _is_linear(tensor)]
        return [self._linear(tensor) for tensor in found if towers or not in_tower(tensor.name)]

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

    def _linear(self, tensor: Tensor) -> Linear:
        rows, columns = tensor.shape
        flipped = self.conv1d and group_of(tensor.name) != "head"
        return Linear(tensor.module, columns, rows) if flipped else Linear(tensor.module, rows, columns)


# --------------------------------------------------------------------------------------------------- what a name says

TOWER = r"(^|.*\.)(vision|visual|audio|image|speech|multi_modal|multimodal|mm_)[^.]*\..*"
"""Full-match pattern of module names beside the text decoder; the same text serves peft as `exclude_modules`."""

_HEADS = ("lm_head", "embed_out", "output_layer")
_LAYER = re.compile(r"(?:^|\.)(?:layers|layer|h|blocks|block)\.(\d+)\.")
_EXPERT = re.compile(r"\.experts\.|\.(gate|router|router\.classifier|router\.layer)$")


@cache
def in_tower(name: str) -> bool:
    """Whether a tensor belongs to a vision or audio part."""
    return re.fullmatch(TOWER, name) is not None


@cache
def group_of(name: str) -> Group:
    """The group that a tensor of this name is counted in."""
    parts = name.split(".")[:-1]
    leaf = parts[-1] if parts else ""
    if in_tower(name):
        return "other"
    if leaf in _HEADS:
        return "head"
    if re.search(r"norm|^ln(_|\d|$)", leaf):
        return "norm"
    if "embed" in leaf or leaf in ("wte", "wpe"):
        return "embedding"
    if any(re.search(r"attn|attention", part) for part in parts):
        return "attention"
    if any(re.search(r"mlp|feed_forward|ffn|moe|^fc(\d|_)", part) for part in parts):
        return "mlp"
    return "other"


def _is_linear(tensor: Tensor) -> bool:
    matrix = len(tensor.shape) == 2 and tensor.name.endswith(".weight")
    # A tower's own embeddings count as "other", so the name has to say it once more.
    embedding = group_of(tensor.name) == "embedding" or "embed" in tensor.module.rpartition(".")[2]
    return matrix and not embedding and group_of(tensor.name) != "head" and not _EXPERT.search(tensor.module)


def _is_parameter(tensor: Tensor) -> bool:
    """Whether this is a weight, not a buffer that older checkpoints also store."""
    name = tensor.name
    rotary = "rotary_emb." in name or name.endswith(".inv_freq")
    mask = re.search(r"\.(attn|attention)\.(masked_)?bias$", name) and len(tensor.shape) in (0, 4)
    return tensor.dtype in _BITS and not rotary and not mask


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
    kept = [tensor for tensor in tensors if _is_parameter(tensor)]
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
    blank = Facts(model, source, architecture, model_type, 0, 0, 0, 0, 0, 0, 0, None, tied, tuple(kept))
    return _with_numbers(blank, text)


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
    linear = {layer.name.rpartition(".")[2]: layer.out_features for layer in facts.linears()}
    vocab, width = next(t.shape for t in facts.tensors if group_of(t.name) == "embedding" and len(t.shape) == 2)
    per_head = next((t.shape[0] for t in facts.tensors if t.name.endswith("self_attn.q_norm.weight")), None)
    found = [int(hit[1]) + 1 for t in facts.tensors if not in_tower(t.name) and (hit := _LAYER.search(t.name))]
    layers = said["layers"] or max(found, default=0)
    if len(set(found)) < layers:
        raise ModelError(
            f"{facts.model} has weights for {len(set(found))} of the {layers} layers that its config.json names.",
            "Download or save the model again; files are missing.",
        )
    hidden = said["hidden_size"] or width
    heads, head_dim = said["heads"], said["head_dim"]
    if heads is None and "q_proj" in linear and (head_dim := head_dim or per_head):
        heads = linear["q_proj"] // head_dim
    if not heads:
        raise ModelError(
            f"The config.json of {facts.model} does not say how many attention heads it has.",
            "finetune trains decoder language models with attention; check the file's num_attention_heads.",
        )
    head_dim = head_dim or max(linear.get("q_proj", hidden) // heads, 1)
    kv_heads = 1 if config.get("multi_query") and not config.get("new_decoder_architecture") else said["kv_heads"]
    up = next((linear[name] for name in ("up_proj", "fc1", "fc_in", "c_fc", "dense_h_to_4h") if name in linear), None)
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

# Name -> (fact file, stored dtype). A tuned variant has its base's shapes; the embedded model unpacks to F32.
_BUNDLED = {
    "smollm2-135m": ("smollm2-135m", "F32"),
    "google/gemma-2-2b": ("gemma-2-2b", "F32"),
    "google/gemma-2-2b-it": ("gemma-2-2b", "BF16"),
    "meta-llama/Llama-2-7b-hf": ("llama-2-7b", "F16"),
    "meta-llama/Llama-2-7b-chat-hf": ("llama-2-7b", "F16"),
}


def read_facts(model: str, revision: str | None = None) -> Facts:
    """The facts of a local folder, a .gguf file, a bundled model or a hub id (at `revision`: branch, tag or commit).

    Raises `ModelError` when there is no such model, it has no readable weights, or it may not be read.
    """
    path = Path(model).expanduser()
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


def _from_bundle(model: str) -> Facts:
    file, dtype = _BUNDLED[model]
    content = json.loads((Path(__file__).parent / "bundled" / "facts" / f"{file}.json").read_text(encoding="utf-8"))
    layers = range(content["config"]["num_hidden_layers"])
    shapes = dict(content["outside"])
    shapes |= {name.format(layer): shape for layer in layers for name, shape in content["layer"].items()}
    tensors = [Tensor(name, tuple(shape), dtype) for name, shape in shapes.items()]
    return _facts(model, "bundled", content["config"], tensors)


def _from_folder(folder: Path, model: str, source: Source) -> Facts:
    if not (folder / "config.json").is_file():
        raise _no_config(folder)
    config = _read_json(folder / "config.json")
    tensors = [tensor for shard in _shards(folder) for tensor in read_safetensors(shard)]
    return _facts(model, source, config, tensors)


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


def _shards(folder: Path) -> list[Path]:
    """The files that transformers would load: those of the index, or model.safetensors, or whatever there is.

    Others beside them (Mistral's consolidated.safetensors, an adapter) hold no further weights of the model.
    """
    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    if index.is_file():
        shards = [folder / name for name in sorted(set(_read_json(index).get("weight_map", {}).values()))]
        if missing := [shard.name for shard in shards if not shard.is_file()]:
            raise ModelError(
                f"The folder {folder} lacks {len(missing)} of its {len(shards)} shards: {', '.join(missing[:3])}.",
                "Download or save the model again.",
            )
    else:
        shards = [
            p for p in sorted(folder.glob("*.safetensors")) if not p.name.startswith(("adapter_", "consolidated"))
        ]
    if shards:
        return shards
    if old := sorted(folder.glob("*.bin")):
        raise ModelError(
            f"The folder {folder} has its weights as {old[0].name} only, and finetune reads safetensors.",
            "Load it once with transformers and `save_pretrained` it, which writes model.safetensors.",
        )
    raise ModelError(f"The folder {folder} has a config.json but no weights (*.safetensors).", "Download it whole.")


def _from_cache(model: str, revision: str | None) -> Facts | None:
    """Facts of a snapshot that the hub's cache holds whole; None sends the caller to the hub."""
    import huggingface_hub

    config = huggingface_hub.try_to_load_from_cache(model, "config.json", revision=revision)
    if not isinstance(config, str):
        return None
    try:
        return _from_folder(Path(config).parent, model, "hub cache")
    except ModelError:
        return None


def _from_hub(model: str, revision: str | None) -> Facts:
    """Facts from the hub's cache, or by range requests: config.json and a few kilobytes of each shard."""
    import huggingface_hub

    try:
        if cached := _from_cache(model, revision):
            return cached
        config = _read_json(Path(huggingface_hub.hf_hub_download(model, "config.json", revision=revision)))
        files = huggingface_hub.get_safetensors_metadata(model, revision=revision).files_metadata
    except Exception as error:
        raise _hub_error(error, model, revision) from None
    tensors = [
        Tensor(n, tuple(t.shape), t.dtype)
        for file in dict(sorted(files.items())).values()
        for n, t in file.tensors.items()
    ]
    return _facts(model, "hub headers", config, tensors)


def _hub_error(error: Exception, model: str, revision: str | None) -> Exception:
    """The hub's refusal in two sentences; an error that is not the hub's comes back as it is."""
    from huggingface_hub import errors as hub

    page = f"https://huggingface.co/{model}"
    if isinstance(error, hub.HFValidationError):
        return ModelError(f"There is no folder {model}, and no hub model can have that name.", "Check the spelling.")
    if isinstance(error, hub.GatedRepoError):
        return ModelError(
            f"{model} is gated: its licence has not been accepted with this account.",
            f"Accept it at {page} and sign in with `hf auth login`.",
        )
    if isinstance(error, hub.RepositoryNotFoundError):
        near = difflib.get_close_matches(model, _BUNDLED, n=1, cutoff=0.7)
        return ModelError(
            f"The hub has no model {model} that this account may see, and there is no folder of that name.",
            (f"Did you mean '{near[0]}'? " if near else "")
            + "A local folder works too; `hf auth login` opens private models.",
        )
    if isinstance(error, hub.RevisionNotFoundError):
        return ModelError(f"{model} has no revision '{revision}'.", f"Its branches and tags are at {page}/tree/main.")
    if isinstance(error, hub.RemoteEntryNotFoundError):
        return ModelError(f"{model} has no config.json.", "Name a model in transformers' format, or a local folder.")
    if isinstance(error, (hub.NotASafetensorsRepoError, hub.SafetensorsParsingError)):
        return ModelError(
            f"{model} has no readable safetensors weights.",
            "Take a model whose files end in .safetensors, or convert it with `save_pretrained` and name the folder.",
        )
    # LocalEntryNotFoundError is how the hub library reports that it could not even ask.
    # Its HTTP client has changed package between versions, so the client's base error is taken from there.
    http_error = getattr(hub, "HTTPError", OSError)
    if isinstance(error, (hub.LocalEntryNotFoundError, hub.OfflineModeIsEnabled, http_error, OSError)):
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        return ModelError(
            f"The hub could not be reached for {model}: {reason}.",
            f"Check the connection, or name a local folder; planning works offline for {', '.join(_BUNDLED)}.",
        )
    return error


# -------------------------------------------------------------------------------------------------------- safetensors


def read_safetensors(path: Path) -> list[Tensor]:
    """The tensors of one file, from its header: 8 bytes of length (little endian), JSON, then the data.

    Raises `ModelError` naming the file when it is not one, or not as long as its header says.
    """
    again = "Download or save the model again."
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        if start == b"version ":
            raise ModelError(f"{path} is a Git LFS pointer, not the weights.", "Fetch them with `git lfs pull`.")
        length = int.from_bytes(start, "little")
        if size < 8 or length > size - 8:
            raise ModelError(
                f"{path} is cut short or no safetensors file: its header does not fit {size:,} bytes.", again
            )
        try:
            header = json.loads(file.read(length))
            entries = [(name, entry) for name, entry in header.items() if name != "__metadata__"]
            tensors = [Tensor(name, tuple(entry["shape"]), entry["dtype"]) for name, entry in entries]
            end = 8 + length + max((entry["data_offsets"][1] for _, entry in entries), default=0)
        except (ValueError, AttributeError, KeyError, TypeError):
            raise ModelError(f"The header of {path} cannot be read.", again) from None
    if end != size:
        wrong = "cut short" if size < end else "too long"
        raise ModelError(f"{path} is {wrong}: its header describes {end:,} bytes and the file has {size:,}.", again)
    return tensors


# --------------------------------------------------------------------------------------------------------------- GGUF

# llama.cpp's tensor names -> Hugging Face's, for architectures with llama's layout.
# https://github.com/ggml-org/llama.cpp/blob/master/gguf-py/gguf/tensor_mapping.py
_GGUF_OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_GGUF_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Gemma 2 and 3 have two more norms, and the one before the MLP bears another name.
_GGUF_FOUR_NORMS = {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GGUF_TYPES = {
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "gemma": ("gemma", "GemmaForCausalLM"),
    "gemma2": ("gemma2", "Gemma2ForCausalLM"),
    "gemma3": ("gemma3_text", "Gemma3ForCausalLM"),
}
_GGUF_KEYS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "max_position_embeddings": "context_length",
}
# Value types of the format by number: struct codes of the scalars; 8 is text, 9 an array.
# https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
_GGUF_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


def _from_gguf(path: Path, model: str) -> Facts:
    if not path.is_file():
        raise ModelError(f"There is no file {model}.", "Check the path.")
    try:
        with path.open("rb") as file:
            values, shapes = _read_gguf(file)
    except (struct.error, ValueError, OSError, MemoryError, OverflowError):
        raise ModelError(f"The header of {model} cannot be read as GGUF.", "Download the file again.") from None
    kind = values.get("general.architecture")
    if kind not in _GGUF_TYPES:
        raise ModelError(
            f"{model} holds a model of the GGUF architecture '{kind}'.",
            f"Of GGUF files finetune reads {', '.join(_GGUF_TYPES)}; take this model in safetensors.",
        )
    model_type, architecture = _GGUF_TYPES[kind]
    config: dict[str, Any] = {ours: values.get(f"{kind}.{theirs}") for ours, theirs in _GGUF_KEYS.items()}
    config |= {
        "model_type": model_type,
        "architectures": [architecture],
        "tie_word_embeddings": "output.weight" not in shapes,
    }
    # A rope table is a buffer, not a weight. What is packed in few bits is trained as the bfloat16 it unpacks to.
    tensors = [Tensor(_from_llama_cpp(n, kind), s, "BF16") for n, s in shapes.items() if not n.startswith("rope_")]
    return _facts(model, "gguf", config, tensors)


def _from_llama_cpp(name: str, kind: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`."""
    module, _, leaf = name.rpartition(".")
    if module in _GGUF_OUTSIDE:
        return f"{_GGUF_OUTSIDE[module]}.{leaf}"
    names = {**_GGUF_LAYER, **_GGUF_FOUR_NORMS} if kind in ("gemma2", "gemma3") else _GGUF_LAYER
    block, layer, short = module.split(".") if module.count(".") == 2 else ("", "", "")
    if block != "blk" or short not in names:
        raise ModelError(
            f"The GGUF file has a tensor '{name}' that {kind} does not have.", "Take the model in safetensors."
        )
    return f"model.layers.{layer}.{names[short]}.{leaf}"


def _read_gguf(file: BinaryIO) -> tuple[dict[str, Any], dict[str, tuple[int, ...]]]:
    """Metadata (long arrays such as the vocabulary left out) and tensor shapes, rows first as torch has them."""
    magic, version, tensors, entries = _take(file, "4sIQQ")
    if magic != b"GGUF" or version not in (2, 3):
        raise ValueError("not GGUF 2 or 3")
    values = {_text(file): _value(file, *_take(file, "I")) for _ in range(entries)}
    return values, dict(_gguf_tensor(file) for _ in range(tensors))


def _gguf_tensor(file: BinaryIO) -> tuple[str, tuple[int, ...]]:
    name = _text(file)
    (dimensions,) = _take(file, "I")
    shape = _take(file, f"{dimensions}Q")
    _take(file, "IQ")  # its packing and its place in the file
    return name, shape[::-1]


def _take(file: BinaryIO, layout: str) -> tuple[Any, ...]:
    return struct.unpack(f"<{layout}", file.read(struct.calcsize(f"<{layout}")))


def _text(file: BinaryIO) -> str:
    (length,) = _take(file, "Q")
    return file.read(length).decode()


def _value(file: BinaryIO, kind: int) -> Any:
    if kind == 8:
        return _text(file)
    if kind != 9:
        return _take(file, _GGUF_SCALARS.get(kind, "!"))[0]
    inner, count = _take(file, "IQ")
    if inner in _GGUF_SCALARS and count <= 1024:
        return list(_take(file, f"{count}{_GGUF_SCALARS[inner]}"))
    _skip(file, inner, count)
    return None


def _skip(file: BinaryIO, kind: int, count: int) -> None:
    if kind in _GGUF_SCALARS:
        file.seek(count * struct.calcsize(f"<{_GGUF_SCALARS[kind]}"), 1)
        return
    for _ in range(count):
        _value(file, kind)


def bundled_models() -> Iterator[str]:
    """The names that need no network."""
    yield from _BUNDLED
