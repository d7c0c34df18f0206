"""What every tensor of a merged model is made of, decided from headers alone; what cannot fit is refused here.

base headers ----+
adapter headers -+-> Layout: file -> [Piece(name, source bytes, change, type), ...]
architecture ----+
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from finetune.adapter_file import Adapter, Pair, Tokens
from finetune.architecture import Architecture
from finetune.errors import InputError, ModelError
from finetune.recipe import Dtype
from finetune.weight_files import FLOATS, SINGLE, WIDTH, Shard, Tensor

STORED = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}

_PLAIN = (*FLOATS, "F64", "I64", "BOOL")


@dataclass(frozen=True)
class FourBits:
    """How QLoRA held a weight: bitsandbytes' `kind` (nf4 or fp4), made from the weight as `dtype`."""

    kind: str
    double: bool
    dtype: str


@dataclass(frozen=True)
class Weighted:
    """An adapter and how much of its change is taken."""

    adapter: Adapter
    weight: float = 1.0


@dataclass(frozen=True)
class Piece:
    """One tensor of the result: the bytes of `source`, `pairs` added to them, `tokens` put in, stored as `dtype`.

    `start` (pissa, olora) is taken off before, and `four_bits` says that the source is first rounded as in training.
    """

    name: str
    source: Tensor
    dtype: str
    pairs: tuple[Pair, ...] = ()
    tokens: Tokens | None = None
    transposed: bool = False
    replaced: bool = False
    start: str = ""
    four_bits: FourBits | None = None

    @property
    def changed(self) -> bool:
        """Whether the adapter has a part in it."""
        return bool(self.pairs or self.tokens or self.replaced)

    @property
    def copied(self) -> bool:
        """Whether the bytes of the source are the result."""
        return not (self.pairs or self.tokens or self.four_bits) and self.dtype == self.source.dtype

    @property
    def size(self) -> int:
        """Bytes in the result."""
        return self.source.size // WIDTH.get(self.source.dtype, 1) * WIDTH.get(self.dtype, 1)

    @property
    def by_rows(self) -> bool:
        """Whether some rows can be made without the others."""
        norms = self.transposed and any(pair.magnitude for pair in self.pairs)
        return len(self.source.shape) > 1 and not (norms or self.start or self.four_bits)


@dataclass(frozen=True)
class Layout:
    """The result, file by file; `untied` when it has an output head of its own and the base had not.

    `vocabulary` is the new number of tokens where an adapter brings more or fewer than the base has.
    """

    files: dict[str, list[Piece]]
    metadata: dict[str, dict[str, str]]
    untied: bool
    vocabulary: int | None = None

    @property
    def pieces(self) -> list[Piece]:
        """All tensors of the result."""
        return [piece for pieces in self.files.values() for piece in pieces]

    @property
    def bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(piece.size for piece in self.pieces)

    def in_shards(self, largest: int) -> Layout:
        """The same tensors in files of at most `largest` bytes, or of one tensor that is larger.

        They keep their order, so what lies together in the base stays together.
        """
        groups: list[list[Piece]] = [[]]
        filled = 0
        for piece in self.pieces:
            if groups[-1] and filled + piece.size > largest:
                groups.append([])
                filled = 0
            groups[-1].append(piece)
            filled += piece.size
        metadata = next(iter(self.metadata.values()))
        files = {shard_name(number, len(groups)): pieces for number, pieces in enumerate(groups, 1)}
        return replace(self, files=files, metadata=dict.fromkeys(files, metadata))


def shard_name(number: int, of: int) -> str:
    """transformers' name of one of several weight files."""
    return SINGLE if of == 1 else f"model-{number:05d}-of-{of:05d}.safetensors"


def plan_layout(
    base: Path,
    shards: list[Shard],
    adapters: Sequence[Weighted],
    model: Architecture,
    dtype: Dtype = "auto",
    four_bits: Mapping[str, FourBits] | None = None,
) -> Layout:
    """Give every adapter tensor its place and say what each tensor of the result is made of.

    `four_bits` names the weights to round as in training, by tensor. Raises `InputError` for adapter tensors without
    a place, shapes of another base, or adapters that cannot be added up, and `ModelError` for a base that is stored
    quantised.
    """
    for each in adapters:
        if not each.adapter.plain and (len(adapters) > 1 or each.weight != 1):
            raise InputError(
                f"The adapter {each.adapter.folder} replaces weights (whole modules, tokens, DoRA's lengths, or its "
                "own start), so it cannot be weighted or added to another.",
                "Merge it alone with weight 1, or take plain LoRA adapters.",
            )
    return _Planner(base, shards, adapters, model, dtype, four_bits or {}).layout()


class _Planner:
    """The inputs of one layout under the names that the base's files use."""

    def __init__(
        self,
        base: Path,
        shards: list[Shard],
        adapters: Sequence[Weighted],
        model: Architecture,
        dtype: Dtype,
        four_bits: Mapping[str, FourBits],
    ) -> None:
        self.base, self.shards, self.model, self.dtype, self.four_bits = base, shards, model, dtype, four_bits
        self.adapters = [each.adapter for each in adapters]
        self.stored = {name: tensor for shard in shards for name, tensor in shard.tensors.items()}
        self.files = {model.module_name(name): name for name in self.stored}
        # `transformer.` of GPT-2 stands in front of no name in its files; where it stands, it is part of every name.
        self.headless = not any(name.startswith(f"{model.prefix}.") for name in self.files)
        self.embedding, self.head = self.place(model.embedding), self.place(model.head)
        self.pairs: dict[str, list[Pair]] = {}
        self.whole: dict[str, Tensor] = {}
        self.tokens: dict[str, Tokens] = {}
        for each in adapters:
            for module, pair in each.adapter.pairs.items():
                scaled = replace(pair, scale=pair.scale * each.weight)
                self.pairs.setdefault(self.place(f"{module}.weight"), []).append(scaled)
            self.whole |= {self.place(name): tensor for name, tensor in each.adapter.whole.items()}
            self.tokens |= {self.place(f"{module}.weight"): rows for module, rows in each.adapter.tokens.items()}
        self.tied = model.tied and self.embedding in self.stored
        if self.tied and self.head in self.stored:  # transformers ties two stored matrices only if they are equal
            self.tied = same_bytes(self.stored[self.embedding], self.stored[self.head])

    def place(self, name: str) -> str:
        """Name in the base's files."""
        return self.files.get(name) or (name.removeprefix(f"{self.model.prefix}.") if self.headless else name)

    def layout(self) -> Layout:
        self.check_places()
        self.check_base()
        self.check_shapes()
        files = {shard.file.name: [self.piece(tensor) for tensor in shard.tensors.values()] for shard in self.shards}
        if self.untied and self.head not in self.stored:
            for pieces in files.values():  # beside the input embedding, which has its shape and type
                if any(piece.name == self.embedding for piece in pieces):
                    pieces.append(self.piece(replace(self.stored[self.embedding], name=self.head)))
        for pieces in files.values():  # falling width keeps every tensor aligned for readers that map the file
            pieces.sort(key=lambda piece: -WIDTH.get(piece.dtype, 1))
        return Layout(files, {shard.file.name: shard.metadata for shard in self.shards}, self.untied, self.vocabulary)

    def piece(self, stored: Tensor) -> Piece:
        """What becomes of one tensor of the base; a head that stays tied gets what its embedding gets."""
        name = self.embedding if self.tied and not self.untied and stored.name == self.head else stored.name
        dtype = stored.dtype if self.dtype == "auto" or stored.dtype not in FLOATS else STORED[self.dtype]
        source, pairs = self.source(name, stored), tuple(self.pairs.get(name, ()))
        start = self.adapters[0].start if pairs and not pairs[0].embedding else ""
        return Piece(
            stored.name, source, dtype, pairs, self.tokens.get(name),
            transposed=bool(pairs) and self.is_transposed(pairs[0], source), replaced=name in self.whole,
            start=start, four_bits=self.four_bits.get(name),
        )  # fmt: skip

    def source(self, name: str, stored: Tensor) -> Tensor:
        """The tensor that changes are added to: trained whole, kept beside a pair, or the base's own."""
        kept = next((pair.base for pair in self.pairs.get(name, ()) if pair.base), None)
        if name == self.head and self.untied and name not in self.whole and not kept:  # what it was tied to
            return self.resized or stored
        return self.whole.get(name) or kept or stored

    def is_transposed(self, pair: Pair, weight: Tensor) -> bool:
        """Whether the base keeps this weight as in x out, so that B @ A has to be turned."""
        if pair.embedding or pair.shape[0] != pair.shape[1]:
            return weight.shape == pair.shape[::-1]
        # peft writes fan_in_fan_out for the layer it saw last, so the model's own class is asked first.
        said = bool(self.adapters[0].config.get("fan_in_fan_out"))
        return said if self.model.conv1d is None else self.model.conv1d

    @cached_property
    def untied(self) -> bool:
        """Whether a tied base gets two different matrices: by whole tensors, or a change to one of them."""
        if not self.tied:
            return False
        ends = {self.embedding, self.head}
        if ends & set(self.pairs) or self.head in self.tokens:  # peft ties rows trained of the embedding alone
            return True
        if not ends & set(self.whole):
            return False
        embedding = self.whole.get(self.embedding, self.stored[self.embedding])
        if self.head not in self.whole and self.resized:
            return False
        return not same_bytes(embedding, self.whole.get(self.head, self.stored[self.embedding]))

    @cached_property
    def resized(self) -> Tensor | None:
        """The input embedding that an adapter brings with another number of rows than the base's."""
        kept = [pair.base for pair in self.pairs.get(self.embedding, ()) if pair.base]
        found = self.whole.get(self.embedding) or next(iter(kept), None)
        like = self.stored.get(self.embedding)
        return found if found and like and found.shape[0] != like.shape[0] else None

    @property
    def vocabulary(self) -> int | None:
        return self.resized.shape[0] if self.resized else None

    # ---- what is refused

    def check_places(self) -> None:
        homes = {*self.stored, self.head} if self.tied else {*self.stored}
        for adapter in self.adapters:
            lost = list(adapter.strange)
            for module, pair in adapter.pairs.items():
                if self.place(f"{module}.weight") not in homes:
                    lost += [part.name for part in (pair.a, pair.b, pair.magnitude) if part]
            lost += [rows.values.name for m, rows in adapter.tokens.items() if self.place(f"{m}.weight") not in homes]
            places = {self.place(name): tensor for name, tensor in adapter.whole.items()}
            lost += [tensor.name for name, tensor in places.items() if name not in homes or name in self.pairs]
            if lost:
                raise InputError(
                    f"{len(lost)} of the {len(adapter.tensors)} tensors in the adapter {adapter.folder} have no "
                    f"place in the base {self.base}: {_first(lost)}.",
                    f"Merge into the base it was trained on ({trained_on(adapter)}), and with keys as peft's "
                    "save_pretrained writes them, `base_model.model.<module>.lora_A.weight`.",
                )

    def check_base(self) -> None:
        for name, tensor in self.stored.items():
            touched = name in self.pairs or name in self.whole or name in self.tokens
            if tensor.dtype not in (FLOATS if touched else _PLAIN) and (touched or self.model.quantised):
                raise ModelError(
                    f"'{name}' of the base {self.base} is stored as {tensor.dtype}, in which nothing can be added.",
                    "Merge into the float32, bfloat16 or float16 weights of this model.",
                )

    def check_shapes(self) -> None:
        for name, pairs in self.pairs.items():
            stored = self.stored.get(name) or self.stored[self.embedding]
            for pair in pairs:
                shape, fits = self.source(name, stored).shape, (pair.shape, pair.shape[::-1])
                if shape not in (fits[1:] if pair.embedding else fits):
                    self.refuse_shape(pair.a, pair.shape, name)
                if pair.magnitude and pair.magnitude.shape != pair.shape[:1]:
                    self.refuse_shape(pair.magnitude, pair.magnitude.shape, name)
                if pair.base and not self.fits(name, pair.base):
                    self.refuse_shape(pair.base, pair.base.shape, name)
        for name, tensor in self.whole.items():
            if not self.fits(name, tensor):
                self.refuse_shape(tensor, tensor.shape, name)
        for name, rows in self.tokens.items():
            shape = self.source(name, self.stored.get(name) or self.stored[self.embedding]).shape
            if rows.values.shape[1:] != shape[1:] or max(rows.indices) >= shape[0]:
                self.refuse_shape(rows.values, (max(rows.indices) + 1, *rows.values.shape[1:]), name)
        self.check_vocabulary()

    def fits(self, name: str, tensor: Tensor) -> bool:
        """Whether a tensor of an adapter can stand in the base's place; a vocabulary may be another."""
        like = self.stored.get(name) or self.stored[self.embedding]
        resizable = name in (self.embedding, self.head) and len(tensor.shape) == len(like.shape) == 2
        return tensor.shape[1:] == like.shape[1:] if resizable else tensor.shape == like.shape

    def check_vocabulary(self) -> None:
        """Refuse an embedding and a head of two sizes, where an adapter brings one of them in another size."""
        sizes, resized = {}, False
        for name in (self.embedding, self.head):
            like = self.stored.get(name) or (self.stored.get(self.embedding) if self.tied else None)
            if like:
                follows = name == self.head and self.tied and name not in self.whole and name not in self.pairs
                sizes[name] = self.source(self.embedding if follows else name, like).shape[0]
                resized = resized or sizes[name] != like.shape[0]
        if resized and len(set(sizes.values())) > 1:
            said = " and ".join(f"{count:,} rows in '{name}'" for name, count in sizes.items())
            raise InputError(
                f"With the adapter {self.adapters[0].folder} the merged model would have {said}.",
                "Save the adapter with both (peft's save_embedding_layers=True), or resize the base and save it.",
            )

    def refuse_shape(self, tensor: Tensor, found: tuple[int, ...], name: str) -> None:
        adapter = next(adapter for adapter in self.adapters if tensor in adapter.tensors)
        hint = f"Merge into the base it was trained on ({trained_on(adapter)})"
        if name in (self.embedding, self.head):
            hint += "; if its vocabulary was resized, resize the base first (resize_token_embeddings) and save it"
        like = self.stored.get(name) or self.stored[self.embedding]
        raise InputError(
            f"'{tensor.name}' of the adapter {adapter.folder} is made for a weight of {_by(found)}, and "
            f"'{like.name}' of the base {self.base} has {_by(like.shape)}.",
            f"{hint}.",
        )


def trained_on(adapter: Adapter) -> str:
    """The base that an adapter names."""
    return str(adapter.config.get("base_model_name_or_path") or "its config does not say which")


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
