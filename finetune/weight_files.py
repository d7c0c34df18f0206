"""safetensors files by their headers: which tensors lie where, and their bytes. No torch, no mapped memory.

    | 8 bytes: header length | JSON header: name -> dtype, shape, [begin, end) | bytes of all tensors, no gaps |

Offsets count from the end of the header. Reading with plain `read` keeps the memory of a pass over a model at one
tensor; mapped files would count every page that was touched.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

from finetune.errors import ModelError

WIDTH = {
    "F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "BF16": 2, "F16": 2, "I16": 2, "U16": 2,
    "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1,
}  # fmt: skip
FLOATS = ("F32", "BF16", "F16")
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"

_CHUNK = 8 << 20
_SAMPLE = 4096


@dataclass(frozen=True)
class Tensor:
    """Where one tensor lies: `size` bytes from byte `start` of `file`."""

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    size: int

    def read(self) -> bytearray:
        """Its bytes, in memory that may be written to."""
        data = bytearray(self.size)
        with self.file.open("rb", buffering=0) as source:
            source.seek(self.start)
            view, done = memoryview(data), 0
            while done < self.size:
                got = source.readinto(view[done : done + _CHUNK])
                if not got:
                    raise _incomplete(self.file, f"tensor '{self.name}' ends {self.size - done:,} bytes early")
                done += got
        return data

    def chunks(self) -> Iterator[bytes]:
        """Its bytes in pieces of at most 8 MiB."""
        with self.file.open("rb", buffering=0) as source:
            source.seek(self.start)
            left = self.size
            while left:
                chunk = source.read(min(left, _CHUNK))
                if not chunk:
                    raise _incomplete(self.file, f"tensor '{self.name}' ends {left:,} bytes early")
                left -= len(chunk)
                yield chunk


@dataclass(frozen=True)
class Shard:
    """One file: its tensors by name, and the text fields of its header."""

    file: Path
    tensors: dict[str, Tensor]
    metadata: dict[str, str]


Fault = Literal["no room", "pointer", "garbled", "length"]


class HeaderError(Exception):
    """Why a file is no whole safetensors file. `read_shard` and `facts` each tell their user what that means.

    "no room"   the header would end at byte `claimed` of a file of `size` bytes
    "pointer"   the same, because a Git LFS pointer lies in the file's place
    "garbled"   the header is not what the format says
    "length"    the last tensor should end at byte `claimed` of a file of `size` bytes
    """

    def __init__(self, fault: Fault, claimed: int = 0, size: int = 0) -> None:
        self.fault, self.claimed, self.size = fault, claimed, size
        super().__init__(fault)


def read_header(file: Path) -> Shard:
    """The header of one safetensors file, its tensors in the header's own order, checked against the file's size.

    Raises `HeaderError` for a file that is cut short or no safetensors file, and `OSError` when it cannot be opened.
    """
    with file.open("rb") as source:
        size = os.fstat(source.fileno()).st_size
        start = source.read(8)
        end = 8 + int.from_bytes(start, "little")
        if size < 8 or end > size:
            raise HeaderError("pointer" if start == b"version " else "no room", end, size)
        text = source.read(end - 8)
    try:
        header = json.loads(text)
        metadata = header.pop("__metadata__", {})
        tensors = {name: _tensor(file, name, item, end) for name, item in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        raise HeaderError("garbled") from None
    end = max((tensor.start + tensor.size for tensor in tensors.values()), default=end)
    if end != size:
        raise HeaderError("length", end, size)
    return Shard(file, tensors, metadata)


def _tensor(file: Path, name: str, item: Any, offset: int) -> Tensor:
    begin, end = item["data_offsets"]
    dtype, shape = item["dtype"], tuple(item["shape"])
    if dtype in WIDTH and math.prod(shape) * WIDTH[dtype] != end - begin:
        raise ValueError(f"{dtype} of shape {shape} in {end - begin} bytes")
    return Tensor(file, name, dtype, shape, offset + begin, end - begin)


def read_shard(file: Path) -> Shard:
    """The header of one safetensors file, its tensors in file order, checked against the file's size.

    Raises `ModelError` naming the file when it is missing, cut short, or not a safetensors file.
    """
    try:
        shard = read_header(file)
    except FileNotFoundError:
        raise ModelError(f"The weights file {file} is missing.", "Download or copy it again.") from None
    except HeaderError as error:
        if error.fault == "garbled":
            raise ModelError(f"{file} is not a safetensors file.", "Download or convert it again.") from None
        what = f"it has {error.size:,} bytes and its header alone claims {error.claimed:,}"
        if error.fault == "length":
            what = f"its header claims {error.claimed:,} bytes and the file has {error.size:,}"
        raise _incomplete(file, what) from None
    in_file_order = sorted(shard.tensors.items(), key=lambda entry: entry[1].start)
    return Shard(file, dict(in_file_order), shard.metadata)


def _incomplete(file: Path, what: str) -> ModelError:
    return ModelError(
        f"The weights file {file} is incomplete: {what}.",
        "Download or copy this file again; for a git-lfs pointer run `git lfs pull`.",
    )


def read_model(folder: Path) -> list[Shard]:
    """All shards of a model folder, each tensor exactly once. Prefers one file over an index, as transformers does.

    Raises `ModelError` when there are no safetensors weights, or the index and the shards disagree.
    """
    if (folder / SINGLE).exists() or not (folder / INDEX).exists():
        if not (folder / SINGLE).exists():
            raise ModelError(
                f"There are no safetensors weights in {folder}.",
                f"Give a model folder with {SINGLE} or {INDEX}; other formats have to be converted first.",
            )
        return [read_shard(folder / SINGLE)]
    try:
        place: dict[str, str] = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
    except (ValueError, KeyError, TypeError):
        raise ModelError(f"{folder / INDEX} is not a weights index.", "Download or copy this file again.") from None
    if outside := sorted(name for name in set(place.values()) if Path(name).name != name):
        raise ModelError(f"{folder / INDEX} names '{outside[0]}' outside its folder.", "Download the model again.")
    shards = []
    for name in sorted(set(place.values())):
        shard = read_shard(folder / name)
        # A tensor that the index assigns to another shard is a leftover copy; keeping it would write it twice.
        mine = {key: tensor for key, tensor in shard.tensors.items() if place.get(key) == name}
        if lost := sorted(key for key, home in place.items() if home == name and key not in mine):
            raise _incomplete(
                shard.file, f"{len(lost)} tensors that {INDEX} places there are not in it, '{lost[0]}' first"
            )
        shards.append(Shard(shard.file, mine, shard.metadata))
    return shards


def fingerprint(shards: Iterable[Shard]) -> str:
    """sha256 over every tensor's name, dtype, shape and place, and the first 4 KiB of its bytes.

    Hashing a 140 GB base would take as long as merging it. Headers alone are equal for all fine-tunes of one
    architecture; with a sample of every tensor two of them differ, and the cost stays at a few megabytes.
    """
    digest = hashlib.sha256()
    for shard in shards:
        digest.update(shard.file.name.encode())
        with shard.file.open("rb") as source:
            for tensor in shard.tensors.values():
                about = (tensor.name, tensor.dtype, tensor.shape, tensor.start, tensor.size)
                digest.update(repr(about).encode())
                source.seek(tensor.start)
                digest.update(source.read(min(tensor.size, _SAMPLE)))
    return digest.hexdigest()


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
