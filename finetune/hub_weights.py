"""Weights that lie on the hub, and arrive shard by shard while the earlier ones are used.

    headers, by range requests     all that they show can be refused before a weight is fetched
    the first read of a tensor     its shard, and after it all others, are fetched one by one in their order
    every further read             waits until its shard is in the hub's cache

A shard that the cache holds already is used as it is.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from finetune import hub_headers
from finetune.errors import ModelError
from finetune.origin import commit_of
from finetune.weight_files import INDEX, SINGLE, Shard, Tensor, read_index, read_model, read_shard

_AT_ONCE = 8  # headers asked for side by side


@contextmanager
def open_weights(model: str, folder: Path) -> Iterator[list[Shard]]:
    """The shards of a model folder, which may be a snapshot in the hub's cache that still lacks some of them.

    Raises `ModelError` when they are neither here nor on the hub, or cannot be read.
    """
    arrivals = None
    try:
        shards = read_model(folder)
    except ModelError as error:
        if commit_of(folder) is None:
            raise
        arrivals = _Arrivals(model, folder, _names(model, folder, error))
        shards = arrivals.shards()
    try:
        yield shards
    finally:
        if arrivals:
            arrivals.stop()


def _names(model: str, folder: Path, missing: ModelError) -> list[str]:
    """The files that hold the weights, as transformers would choose them."""
    import huggingface_hub

    try:
        if huggingface_hub.file_exists(model, SINGLE, revision=folder.name):
            return [SINGLE]
    except Exception as error:  # the hub library raises a dozen types
        raise hub_headers.refusal(error, model, folder.name, ()) from None
    if not (folder / INDEX).is_file():
        raise missing
    return sorted(set(read_index(folder).values()))


class _Arrivals:
    """Fetches the files of one commit in their order, from the moment that one of them is waited for."""

    def __init__(self, model: str, folder: Path, names: Sequence[str]) -> None:
        self.model, self.folder = model, folder
        self.files: dict[str, Future[None]] = {name: Future() for name in names}
        self.starting, self.thread = threading.Lock(), threading.Thread(target=self._fetch_all, daemon=True)
        self.stopped = False

    def shards(self) -> list[Shard]:
        """All shards by their headers."""
        try:
            with ThreadPoolExecutor(_AT_ONCE) as pool:
                headers = dict(zip(self.files, pool.map(self._header, self.files), strict=True))
        except Exception as error:  # the hub library raises a dozen types
            raise hub_headers.refusal(error, self.model, self.folder.name, ()) from None
        return read_model(self.folder, headers)

    def wait(self, file: Path) -> None:
        """Return when a file is here. Raises `ModelError` when it cannot be fetched."""
        with self.starting:
            if self.thread.ident is None:
                self.thread.start()
        self.files[file.name].result()

    def stop(self) -> None:
        """Fetch no further file."""
        self.stopped = True

    def _header(self, name: str) -> Shard:
        import huggingface_hub as hub

        file = self.folder / name
        if file.is_file():
            return read_shard(file)
        known = hub.HfApi().parse_safetensors_file_metadata(self.model, name, revision=self.folder.name)
        size = hub.get_hf_file_metadata(hub.hf_hub_url(self.model, name, revision=self.folder.name)).size
        offset = (size or 0) - max((tensor.data_offsets[1] for tensor in known.tensors.values()), default=0)
        return Shard(file, {key: self._tensor(file, key, known.tensors[key], offset) for key in sorted(
            known.tensors, key=lambda key: known.tensors[key].data_offsets)}, known.metadata)  # fmt: skip

    def _tensor(self, file: Path, name: str, known: Any, offset: int) -> Tensor:
        begin, end = known.data_offsets
        return Tensor(file, name, known.dtype, tuple(known.shape), offset + begin, end - begin, self.wait)

    def _fetch_all(self) -> None:
        for name, arrived in self.files.items():
            if self.stopped:
                arrived.cancel()
                continue
            try:
                self._fetch(name)
                arrived.set_result(None)
            except BaseException as error:  # handed to whoever waits for the file
                arrived.set_exception(error)

    def _fetch(self, name: str) -> None:
        import huggingface_hub

        try:
            huggingface_hub.hf_hub_download(self.model, name, revision=self.folder.name)
        except Exception as error:  # the hub library raises a dozen types
            said = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
            raise ModelError(
                f"{name} of {self.model} could not be fetched: {said}.",
                "Try again: what has arrived stays in the hub's cache.",
            ) from None
        read_shard(self.folder / name)  # raises what is wrong with it
