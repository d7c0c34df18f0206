"""Prepared rows kept by content: what was made of the same files, tokenizer and recipe fields is not made again.

    $FINETUNE_CACHE/data/<key>/rows.arrow     the finished rows
                               about.json     what happened to the others; written last, so its presence says "whole"

The key is a hash of everything that decides the result, the code that makes it included. An entry is made aside under
a lock and renamed when it is whole, so an interrupted preparation leaves nothing, and of several processes one works
and the others wait for it. Entries not used for 30 days are removed when a new one is made.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from finetune import embedded
from finetune.errors import FinetuneError
from finetune.recipe import Data

ROWS, ABOUT = "rows.arrow", "about.json"
_KEPT_DAYS = 30
# The modules that decide what becomes of a row; their text is part of the key.
_MAKERS = (
    "strict_json", "turns", "formats", "json_array", "readers", "hub_rows", "files", "templates", "blind", "replies",
    "chat", "overlong", "store", "encoding", "data",
)  # fmt: skip
_LIBRARIES = ("transformers", "tokenizers", "jinja2")
_DECIDES = ("format", "columns", "system", "train_on", "max_length", "overlong", "on_bad_row", "eval_group")


def key_of(sources: Sequence[tuple[str, str]], data: Data, tokenizer: Any, limit: int | None) -> str:
    """Name of the entry for sources (name, fingerprint), fields and tokenizer; a changed byte gives another."""
    code = hashlib.sha256()
    for name in _MAKERS:
        code.update(Path(__file__).with_name(f"{name}.py").read_bytes())
    fields = {name: getattr(data, name) for name in _DECIDES}
    libraries = {name: version(name) for name in _LIBRARIES}
    whole = [list(sources), fields, limit, _of_tokenizer(tokenizer), code.hexdigest(), libraries]
    return hashlib.sha256(json.dumps(whole, sort_keys=True, default=str).encode()).hexdigest()[:32]


def _of_tokenizer(tokenizer: Any) -> str:
    """Hash of all that decides which ids a text gets, the chat template included."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    inside = backend.to_str() if backend is not None else json.dumps(sorted(tokenizer.get_vocab().items()))
    outside = [
        tokenizer.chat_template,
        tokenizer.special_tokens_map,
        repr(type(tokenizer)),
        tokenizer("a")["input_ids"],
    ]
    return hashlib.sha256((inside + json.dumps(outside, sort_keys=True, default=str)).encode()).hexdigest()


def cached(key: str, make: Callable[[Path], dict[str, Any]]) -> tuple[Path, dict[str, Any], bool]:
    """The rows' file, what is known about it, and whether it was there before or made now by `make(file)`.

    Raises whatever `make` raises; then nothing is left behind.
    """
    from filelock import FileLock

    folder = embedded.cache_folder() / "data"
    entry = folder / key
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / f"{key}.lock"):
            if not (there := (entry / ABOUT).is_file()):
                _prune(folder)
                _make(entry, make)
            os.utime(entry / ABOUT)
    except OSError as error:
        raise FinetuneError(
            f"Prepared rows cannot be kept in {folder}: {error.strerror or error}.",
            "Make room there, or set FINETUNE_CACHE to a folder that can be written.",
        ) from None
    return entry / ROWS, json.loads((entry / ABOUT).read_text(encoding="utf-8")), there


def _make(entry: Path, make: Callable[[Path], dict[str, Any]]) -> None:
    aside = entry.with_name(f"{entry.name}.part")
    for folder in (aside, entry):  # what an earlier, interrupted try has left
        shutil.rmtree(folder, ignore_errors=True)
    aside.mkdir()
    try:
        about = make(aside / ROWS)
        (aside / ABOUT).write_text(json.dumps(about), encoding="utf-8")
        aside.rename(entry)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _prune(folder: Path) -> None:
    """Remove entries that nobody has used for a long time."""
    before = time.time() - _KEPT_DAYS * 86400
    for about in folder.glob(f"*/{ABOUT}"):
        if about.stat().st_mtime < before:
            shutil.rmtree(about.parent, ignore_errors=True)
            about.parent.with_name(f"{about.parent.name}.lock").unlink(missing_ok=True)
