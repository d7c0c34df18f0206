"""A data set on the hub -> the files that hold one of its splits.

    org/name              split train                 hf://datasets/org/name@5f0e.../data/train-0000.parquet
    org/name:test         split test           ->     hf://datasets/org/name@5f0e.../data/train-0001.parquet
    org/name:en:test      of configuration en

`datasets` is asked only which files belong to a split, as the repository's own configuration says. It does not read
them: its readers want one type per column and bend text to it ("007" -> 7, a JSON reply -> an object).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from functools import cache
from typing import IO, Any

from finetune.errors import DataError

_NAME = re.compile(r"(?P<repository>[\w.-]+(?:/[\w.-]+)?)(?::(?P<config>[\w.+|-]+)(?=:))?(?::(?P<split>[\w.-]+))?")
_NO_OPTION = ("name", "version", "data_dir", "data_files", "description", "features")  # of a builder's configuration


def is_name(name: str) -> bool:
    """Whether this may be the name of a data set."""
    return _NAME.fullmatch(name) is not None


@cache
def files_of(name: str) -> tuple[str, ...]:
    """Addresses of a split's files, with the commit in them; none where `datasets` itself must read them.

    The same all through a process, so that every pass reads the same rows. Raises `DataError` when there is no such
    data set or split, or no connection.
    """
    repository, config, split = _parts(name)
    try:
        import datasets

        settings = datasets.load_dataset_builder(repository, config).config
    except Exception as error:  # datasets raises a dozen unrelated types for "not there" and "no connection"
        raise _unreadable(name, error) from None
    if not settings.data_files or _has_options(settings):
        return ()
    parts = {str(part): files for part, files in settings.data_files.items()}
    if split not in parts:
        raise DataError(
            f"The data set {repository} has no split '{split}'; there are {', '.join(parts)}.",
            f"Name one of them, as in {repository}:{next(iter(parts))} (or {repository}:configuration:split).",
        )
    return tuple(str(file) for file in parts[split])


def open_file(address: str) -> IO[bytes]:
    """A file at an address, read in pieces as they are needed. Raises whatever the connection raises."""
    import fsspec  # type: ignore[import-untyped]

    opened: IO[bytes] = fsspec.open(address, "rb").open()
    return opened


def size_of(address: str) -> int:
    """Bytes of a file at an address. Raises `DataError` when it cannot be asked for."""
    import fsspec

    try:
        system, path = fsspec.url_to_fs(address)
        return int(system.info(path)["size"])
    except Exception as error:  # connections raise what they like
        raise DataError(f"{address} cannot be read: {_first_line(error)}.", "Check the connection.") from None


def stream(name: str) -> Iterator[dict[str, Any]]:
    """The rows as `datasets` reads them, for kinds of files that this toolkit does not know."""
    repository, config, split = _parts(name)
    try:
        import datasets

        yield from datasets.load_dataset(repository, config, split=split, streaming=True)
    except Exception as error:
        raise _unreadable(name, error) from None


def _parts(name: str) -> tuple[str, str | None, str]:
    found = _NAME.fullmatch(name)
    assert found is not None, name
    return found["repository"], found["config"], found["split"] or "train"


def _has_options(settings: Any) -> bool:
    """Whether the repository sets an option of datasets' own readers, such as another separator."""
    return any(
        getattr(settings, field.name) != field.default
        for field in dataclasses.fields(settings)
        if field.name not in _NO_OPTION and field.default is not dataclasses.MISSING
    )


def _unreadable(name: str, error: Exception) -> DataError:
    if "Config name is missing" in str(error):
        offered = re.search(r"\[.*\]", str(error))
        return DataError(
            f"The data set {name} has several configurations{f': {offered[0]}' if offered else ''}.",
            "Name one of them and the split, as in org/name:configuration:train.",
        )
    return DataError(
        f"There is no file {name}, and no data set of that name could be read from the hub: "
        f"{type(error).__name__}: {_first_line(error)}.",
        "Check the path if a file is meant; else check the data set's name, its split and the connection.",
    )


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0].rstrip(".") if str(error) else "no reason given"
