"""What every tensor of a merged model is made of, decided from headers alone; what cannot fit is refused here.

base headers ----+
adapter headers -+-> Layout: file -> [Piece(name, source bytes, change, type), ...]
architecture ----+
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from finetune.adapter_file import Adapter, Pair
from finetune.errors import InputError, ModelError
from finetune.model_files import CONFIG, read_json
from finetune.recipe import Dtype
from finetune.weight_files import FLOATS, WIDTH, Shard, Tensor

STORED = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}

_TIES = {"lm_head.weight": "model.embed_tokens.weight"}
_PLAIN = (*FLOATS, "F64", "I64", "BOOL")


@dataclass(frozen=True)
class Architecture:
    """What headers do not say: tied matrices, the prefix some files leave out, and transposed linear layers."""

    tied: bool
    embedding: str
    head: str
    prefix: str
    conv1d: bool | None
    quantised: bool


@dataclass(frozen=True)
class Piece:
    """One tensor of the result: the bytes of `source`, `pair` added to them, stored as `dtype`."""

    name: str
    source: Tensor
    dtype: str
    pair: Pair | None = None
    transposed: bool = False
    replaced: bool = False

    @property
    def changed(self) -> bool:
        """Whether the adapter has a part in it."""
        return self.pair is not None or self.replaced

    @property
    def size(self) -> int:
        """Bytes in the result."""
        return self.source.size // WIDTH.get(self.source.dtype, 1) * WIDTH.get(self.dtype, 1)


@dataclass(frozen=True)
class Layout:
    """The result, file by file; `untied` when it has an output head of its own and the base had not."""

    files: dict[str, list[Piece]]
    metadata: dict[str, dict[str, str]]
    untied: bool

    @property
    def pieces(self) -> list[Piece]:
        """All tensors of the result."""
        return [piece for pieces in self.files.values() for piece in pieces]


def read_architecture(base: Path) -> Architecture:
    """Ask transformers' own classes; a model they do not know gets the common answers. Imports transformers."""
    import transformers

    config = read_json(base / CONFIG)
    tied = config.get("tie_word_embeddings")
    if tied is None:  # left out of the file, it means the default of the model's own config class
        try:
            tied = transformers.AutoConfig.from_pretrained(base).get_text_config().tie_word_embeddings
        except (OSError, ValueError, KeyError):
            tied = False
    made = getattr(transformers, (config.get("architectures") or ["?"])[0], None)
    ties = getattr(made, "_tied_weights_keys", None)
    ties = ties if isinstance(ties, dict) and ties else _TIES
    head = next((name for name in ties if "head" in name), next(iter(ties)))
    # GPT-2 and its kin keep linear weights as in x out, in a class that their module imports by this name.
    conv1d = None if made is None else hasattr(sys.modules[made.__module__], "Conv1D")
    prefix = getattr(made, "base_model_prefix", "model")
    return Architecture(bool(tied), ties[head], head, prefix, conv1d, bool(config.get("quantization_config")))


def plan_layout(base: Path, shards: list[Shard], lora: Adapter, model: Architecture, dtype: Dtype = "auto") -> Layout:
    """Give every adapter tensor its place and say what each tensor of the result is made of.

    Raises `InputError` for adapter tensors without a place, shapes of another base, or LoRA on a tied matrix, and
    `ModelError` for a base that is stored quantised.
    """
    return _Planner(base, shards, lora, model, dtype).layout()


class _Planner:
    """The inputs of one layout under the names that the base's files use."""

    def __init__(self, base: Path, shards: list[Shard], lora: Adapter, model: Architecture, dtype: Dtype) -> None:
        self.base, self.shards, self.lora, self.model, self.dtype = base, shards, lora, model, dtype
        self.stored = {name: tensor for shard in shards for name, tensor in shard.tensors.items()}
        # `transformer.` of GPT-2 stands in front of no name in its files; where it stands, it is part of every name.
        self.headless = not any(name.startswith(f"{model.prefix}.") for name in self.stored)
        self.embedding, self.head = self.place(model.embedding), self.place(model.head)
        self.pairs = {self.place(f"{module}.weight"): pair for module, pair in lora.pairs.items()}
        self.whole = {self.place(name): tensor for name, tensor in lora.whole.items()}
        self.tied = model.tied and self.embedding in self.stored
        if self.tied and self.head in self.stored:  # transformers ties two stored matrices only if they are equal
            self.tied = same_bytes(self.stored[self.embedding], self.stored[self.head])

    def place(self, name: str) -> str:
        """Name in the base's files."""
        return name.removeprefix(f"{self.model.prefix}.") if self.headless else name

    def layout(self) -> Layout:
        self.check_places()
        self.check_ties()
        self.check_base()
        self.check_shapes()
        untied = self.is_untied()
        files = {shard.file.name: [self.piece(tensor) for tensor in shard.tensors.values()] for shard in self.shards}
        if untied and self.head not in self.stored:
            self.add_head(files)
        for pieces in files.values():  # falling width keeps every tensor aligned for readers that map the file
            pieces.sort(key=lambda piece: -WIDTH.get(piece.dtype, 1))
        return Layout(files, {shard.file.name: shard.metadata for shard in self.shards}, untied)

    def piece(self, source: Tensor) -> Piece:
        dtype = source.dtype if self.dtype == "auto" or source.dtype not in FLOATS else STORED[self.dtype]
        if pair := self.pairs.get(source.name):
            return Piece(source.name, pair.base or source, dtype, pair, self.is_transposed(pair, source))
        replaced = source.name in self.whole
        return Piece(source.name, self.whole.get(source.name, source), dtype, replaced=replaced)

    def is_transposed(self, pair: Pair, weight: Tensor) -> bool:
        """Whether the base keeps this weight as in x out, so that B @ A has to be turned."""
        if pair.embedding or pair.shape[0] != pair.shape[1]:
            return weight.shape == pair.shape[::-1]
        # peft writes fan_in_fan_out for the layer it saw last, so the model's own class is asked first.
        return bool(self.lora.config.get("fan_in_fan_out")) if self.model.conv1d is None else self.model.conv1d

    def is_untied(self) -> bool:
        """Whether a tied base gets two different matrices from tensors that were trained whole."""
        if not self.tied or not {self.embedding, self.head} & set(self.whole):
            return False
        embedding = self.whole.get(self.embedding, self.stored[self.embedding])
        return not same_bytes(embedding, self.whole.get(self.head, self.stored[self.embedding]))

    def add_head(self, files: Mapping[str, list[Piece]]) -> None:
        """Put the output head beside the input embedding, which has its shape and type."""
        for pieces in files.values():
            for like in pieces:
                if like.name == self.embedding:
                    source = self.whole.get(self.head, self.stored[self.embedding])
                    pieces.append(Piece(self.head, source, like.dtype, replaced=self.head in self.whole))
                    return

    # ---- what is refused

    def check_places(self) -> None:
        homes = {*self.stored, self.head} if self.tied else {*self.stored}
        lost = list(self.lora.strange)
        for name, pair in self.pairs.items():
            lost += [part.name for part in (pair.a, pair.b, pair.magnitude) if part and name not in homes]
        lost += [tensor.name for name, tensor in self.whole.items() if name not in homes or name in self.pairs]
        if lost:
            raise InputError(
                f"{len(lost)} of the {len(self.lora.tensors)} tensors in the adapter {self.lora.folder} have no "
                f"place in the base {self.base}: {_first(lost)}.",
                f"Merge into the base it was trained on ({self.trained_on()}), and with keys as peft's "
                "save_pretrained writes them, `base_model.model.<module>.lora_A.weight`.",
            )

    def check_ties(self) -> None:
        name = next((name for name in (self.embedding, self.head) if self.tied and name in self.pairs), None)
        if name:
            raise InputError(
                f"The adapter {self.lora.folder} changes '{self.pairs[name].module}', and the base {self.base} uses "
                "one matrix for input embedding and output head, so a merge would change both.",
                "Train without this target, or name it in modules_to_save, which gives the result two matrices.",
            )

    def check_base(self) -> None:
        for name, tensor in self.stored.items():
            touched = name in self.pairs or name in self.whole
            if tensor.dtype not in (FLOATS if touched else _PLAIN) and (touched or self.model.quantised):
                raise ModelError(
                    f"'{name}' of the base {self.base} is stored as {tensor.dtype}, in which nothing can be added.",
                    "Merge into the float32, bfloat16 or float16 weights of this model.",
                )

    def check_shapes(self) -> None:
        for name, pair in self.pairs.items():
            shape, fits = self.stored[name].shape, (pair.shape, pair.shape[::-1])
            if shape not in (fits[1:] if pair.embedding else fits):
                self.refuse_shape(pair.a, _by(pair.shape), name)
            if pair.magnitude and pair.magnitude.shape != pair.shape[:1]:
                self.refuse_shape(pair.magnitude, _by(pair.magnitude.shape), name)
            if pair.base and pair.base.shape != shape:
                self.refuse_shape(pair.base, _by(pair.base.shape), name)
        for name, tensor in self.whole.items():
            like = self.stored.get(name, self.stored.get(self.embedding))
            if like and tensor.shape != like.shape:
                self.refuse_shape(tensor, _by(tensor.shape), like.name)

    def refuse_shape(self, tensor: Tensor, found: str, name: str) -> None:
        hint = f"Merge into the base it was trained on ({self.trained_on()})"
        if name == self.embedding:
            hint += "; if its vocabulary was resized, resize the base first (resize_token_embeddings) and save it"
        raise InputError(
            f"'{tensor.name}' of the adapter {self.lora.folder} is made for a weight of {found}, and '{name}' of the "
            f"base {self.base} has {_by(self.stored[name].shape)}.",
            f"{hint}.",
        )

    def trained_on(self) -> str:
        return str(self.lora.config.get("base_model_name_or_path") or "its config does not say which")


def same_bytes(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors hold the same bytes in the same type."""
    if one == other:
        return True
    if (one.dtype, one.size) != (other.dtype, other.size):
        return False
    return all(left == right for left, right in zip(one.chunks(), other.chunks(), strict=True))


def _first(names: list[str], count: int = 3) -> str:
    more = f" and {len(names) - count} more" if len(names) > count else ""
    return ", ".join(f"'{name}'" for name in names[:count]) + more


def _by(shape: Iterable[int]) -> str:
    return " x ".join(str(size) for size in shape)
