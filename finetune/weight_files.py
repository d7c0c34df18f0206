"""safetensors files by their headers: which tensors lie where, and their bytes. No torch, no mapped memory.

`read_model` alone says which files of a folder are the model; plans and merges both ask it.

    | 8 bytes: header length | JSON header: name -> dtype, shape, [begin, end) | bytes of all tensors, no gaps |

Offsets count from the end of the header. Reading with plain `read` keeps the memory of a pass over a model at one
tensor; mapped files would count every page that was touched.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from finetune.errors import ModelError

WIDTH = {
    "F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "BF16": 2, "F16": 2, "I16": 2, "U16": 2,
    "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1,
}  # fmt: skip
FLOATS = ("F32", "BF16", "F16")
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"

_AGAIN = "Download or save it again."
_CHUNK = 8 << 20
_AT_ONCE = 1 << 20
_HASHED_WHOLE = 10**9  # bytes
_SAMPLE = 4096


@dataclass(frozen=True)
class Tensor:
    """Where one tensor lies: `size` bytes from byte `start` of `file`.

    `arrive` waits for a file that is still on its way.
    """

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    size: int
    arrive: Callable[[Path], None] | None = field(default=None, compare=False, repr=False)

    def wait(self) -> None:
        """Return when its file is here."""
        if self.arrive:
            self.arrive(self.file)

    def read(self, begin: int = 0, size: int | None = None) -> bytearray:
        """Its bytes, or `size` of them from byte `begin`, in memory that may be written to."""
        self.wait()
        data = bytearray(self.size - begin if size is None else size)
        with self.file.open("rb", buffering=0) as source:
            source.seek(self.start + begin)
            view, done = memoryview(data), 0
            while done < len(data):
                got = source.readinto(view[done : done + _AT_ONCE])
                if not got:
                    raise _cut_short(self.file, f"tensor '{self.name}' ends {len(data) - done:,} bytes early")
                done += got
        return data

    def chunks(self) -> Iterator[bytes]:
        """Its bytes in pieces of at most 8 MiB."""
        self.wait()
        with self.file.open("rb", buffering=0) as source:
            source.seek(self.start)
            left = self.size
            while left:
                chunk = source.read(min(left, _CHUNK))
                if not chunk:
                    raise _cut_short(self.file, f"tensor '{self.name}' ends {left:,} bytes early")
                left -= len(chunk)
                yield chunk


@dataclass(frozen=True)
class Shard:
    """One file: its tensors by name, and the text fields of its header."""

    file: Path
    tensors: dict[str, Tensor]
    metadata: dict[str, str]


def read_model(folder: Path, arriving: Mapping[str, Shard] | None = None) -> list[Shard]:
    """The weights of a model folder: the files that transformers would load, each tensor exactly once.

    `arriving` are files that are not there yet, by name.

    That is model.safetensors, or the shards of the index. Others beside them (Mistral's consolidated.safetensors, an
    adapter, a file that an index forgot) are no weights of the model. Raises `ModelError` naming the file when there
    are none, one is missing, cut short or no safetensors file, or the index and the shards disagree.
    """
    known = arriving or {}
    if SINGLE in known or (folder / SINGLE).is_file():
        return [known.get(SINGLE) or read_shard(folder / SINGLE)]
    if not (folder / INDEX).is_file():
        raise _no_weights(folder)
    place = read_index(folder)
    names = sorted(set(place.values()))
    if missing := [name for name in names if name not in known and not (folder / name).is_file()]:
        raise ModelError(
            f"The folder {folder} lacks {len(missing)} of its {len(names)} shards: {', '.join(missing[:3])}.", _AGAIN
        )
    return [_indexed(known.get(name) or read_shard(folder / name), place) for name in names]


def _no_weights(folder: Path) -> ModelError:
    if others := sorted(path.name for path in folder.glob("*.safetensors")):
        return ModelError(
            f"The folder {folder} has {others[0]}, and neither {SINGLE} nor {INDEX} to say what the model is.", _AGAIN
        )
    if old := sorted(path.name for path in folder.glob("pytorch_model*.bin")):
        return ModelError(
            f"The folder {folder} has its weights as {old[0]} only, and finetune reads safetensors.",
            "Load it once with transformers and `save_pretrained` it, which writes model.safetensors.",
        )
    return ModelError(
        f"There are no safetensors weights in {folder}.", f"Download it whole: {SINGLE}, or {INDEX} and its shards."
    )


def read_index(folder: Path) -> dict[str, str]:
    """Tensor -> the shard it lies in. Raises `ModelError` for an index that cannot be used."""
    try:
        place: dict[str, str] = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
        names = {name: Path(name).name for name in place.values()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise ModelError(f"{folder / INDEX} is not a weights index.", _AGAIN) from None
    if outside := sorted(name for name, inside in names.items() if name != inside):
        raise ModelError(f"{folder / INDEX} names '{outside[0]}' outside its folder.", _AGAIN)
    if not place:
        raise ModelError(f"{folder / INDEX} names no weights.", _AGAIN)
    return place


def _indexed(shard: Shard, place: Mapping[str, str]) -> Shard:
    """A shard with the tensors that the index looks for in it.

    One that the index assigns to another shard is a leftover copy; keeping it would count and write it twice.
    """
    file = shard.file
    mine = {name: tensor for name, tensor in shard.tensors.items() if place.get(name) == file.name}
    if lost := sorted(name for name, home in place.items() if home == file.name and name not in mine):
        raise ModelError(
            f"{file} lacks {len(lost)} of the tensors that {INDEX} places there, '{lost[0]}' first.", _AGAIN
        )
    return Shard(file, mine, shard.metadata)


def read_shard(file: Path) -> Shard:
    """The header of one safetensors file, its tensors in file order, checked against the file's size.

    Raises `ModelError` naming the file when it is missing, cut short, or no safetensors file.
    """
    try:
        with file.open("rb") as source:
            size = os.fstat(source.fileno()).st_size
            start = source.read(8)
            end = 8 + int.from_bytes(start, "little")
            if start == b"version ":
                raise ModelError(f"{file} is a Git LFS pointer, not the weights.", "Fetch them with `git lfs pull`.")
            if size < 8 or end > size:
                what = f"it has {size:,} bytes and its header alone claims {end:,}"
                raise ModelError(f"{file} is cut short or no safetensors file: {what}.", _AGAIN)
            text = source.read(end - 8)
    except FileNotFoundError:
        raise ModelError(f"The weights file {file} is missing.", _AGAIN) from None
    except OSError as error:
        raise ModelError(
            f"{file} cannot be read: {error.strerror}.", "Check who may read it, and the disk."
        ) from None
    try:
        header = json.loads(text)
        metadata = header.pop("__metadata__", {})
        tensors = [_tensor(file, name, item, end) for name, item in header.items()]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ModelError(f"The header of {file} cannot be read as safetensors.", _AGAIN) from None
    end = max((tensor.start + tensor.size for tensor in tensors), default=end)
    if end != size:
        wrong = "cut short" if size < end else "too long"
        what = f"its header describes {end:,} bytes and the file has {size:,}"
        raise ModelError(f"{file} is {wrong}: {what}.", _AGAIN)
    in_file_order = sorted(tensors, key=lambda tensor: tensor.start)
    return Shard(file, {tensor.name: tensor for tensor in in_file_order}, metadata)


def _tensor(file: Path, name: str, item: Any, offset: int) -> Tensor:
    begin, end = item["data_offsets"]
    dtype, shape = item["dtype"], tuple(item["shape"])
    if dtype in WIDTH and math.prod(shape) * WIDTH[dtype] != end - begin:
        raise ValueError(f"{dtype} of shape {shape} in {end - begin} bytes")
    return Tensor(file, name, dtype, shape, offset + begin, end - begin)


def _cut_short(file: Path, what: str) -> ModelError:
    return ModelError(f"{file} is cut short: {what}.", _AGAIN)


def fingerprint(shards: Sequence[Shard]) -> str:
    """sha256 over every tensor's name, dtype, shape and bytes, whatever file it lies in.

    Of a model of more than 1 GB the first 4 KiB of each tensor are read: hashing a 140 GB base would take as long as
    merging it. Headers alone are equal for all fine-tunes of one architecture; with a sample of every tensor two of
    them differ, and the cost stays at a few megabytes.
    """
    large = sum(tensor.size for shard in shards for tensor in shard.tensors.values()) > _HASHED_WHOLE
    found = []
    for shard in shards:
        for tensor in shard.tensors.values():
            digest = hashlib.sha256(repr((tensor.name, tensor.dtype, tensor.shape)).encode())
            for chunk in [tensor.read(0, min(tensor.size, _SAMPLE))] if large else tensor.chunks():
                digest.update(chunk)
            found.append(digest.digest())
    return hashlib.sha256(b"".join(sorted(found))).hexdigest()


def file_sha256(file: Path) -> str:
    """sha256 of a whole file, the same number that `sha256sum` prints."""
    digest = hashlib.sha256()
    with file.open("rb") as source:
        while chunk := source.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def header_bytes(tensors: Iterable[tuple[str, str, tuple[int, ...], int]], metadata: Mapping[str, str]) -> bytes:
    """Length and header of a safetensors file for (name, dtype, shape, size) in the order their bytes will follow.

    Padded with spaces to 8 bytes, so that tensors sorted by falling width are aligned in memory maps.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, dtype, shape, size in tensors:
        begin, end = end, end + size
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def flush(file: BinaryIO) -> None:
    """Push a written file to the disk itself."""
    file.flush()
    os.fsync(file.fileno())


def flush_folder(folder: Path) -> None:
    """Push a folder's list of names to the disk, so that a rename survives a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def parents_of(path: Path) -> Iterator[None]:
    """The folders above `path`, made where they are not there; when the block fails, the new ones go if empty."""
    new = [folder for folder in path.parents if not folder.exists()]
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        with suppress(OSError):  # somebody else has put something there
            for folder in new:
                folder.rmdir()
        raise
