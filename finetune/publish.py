"""A merged folder on the hub: asked before the work, private unless told otherwise, without paths of this machine."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from finetune.errors import FinetuneError, InputError, first_line
from finetune.model_files import MARK, read_json

_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


def check_hub(name: str) -> None:
    """Raise `InputError` when nobody is signed in, the name is none, or the hub has another model of that name."""
    if not _HUB_ID.fullmatch(name):
        raise InputError(f"'{name}' is no name on the hub.", "Write it as owner/name.")
    api = _api()
    try:
        account = api.whoami()["name"]
    except Exception as error:
        raise InputError(
            f"{name} cannot be written to the hub: {first_line(error)}.",
            "Sign in with `hf auth login` (a token that may write), and check the connection.",
        ) from None
    try:
        there = set(api.list_repo_files(name)) if api.repo_exists(name) else set()
    except Exception as error:
        raise InputError(
            f"The hub does not show {name} to {account}: {first_line(error)}.", "Give a name under your own account."
        ) from None
    if MARK not in there and any(file.endswith(".safetensors") for file in there):
        raise InputError(
            f"The hub already has a model {name}, and it was not merged by finetune.",
            "Choose another name, or delete that one first.",
        )


def push(folder: Path, name: str, *, public: bool) -> str:
    """Upload a merged folder as `name` and return its address; a new repository is private unless `public`.

    Raises `FinetuneError` when the upload fails; the folder is whole, and the same command goes on from there.
    """
    api = _api()
    mark = {**read_json(folder / MARK)}
    for part in ("base", "adapter"):
        mark[part] = _without_path(mark[part])
    mark["other_adapters"] = [_without_path(each) for each in mark.get("other_adapters", ())]
    try:
        api.create_repo(name, private=not public, exist_ok=True)
        api.upload_folder(
            repo_id=name, folder_path=str(folder), ignore_patterns=[MARK], commit_message="Merged model"
        )
        text = json.dumps({**mark, "notes": []}, indent=2).encode()
        api.upload_file(repo_id=name, path_or_fileobj=text, path_in_repo=MARK, commit_message="What it was made of")
    except Exception as error:
        raise FinetuneError(
            f"The model is merged in {folder}, and its upload as {name} stopped: {first_line(error)}.",
            "The same command goes on with the upload.",
        ) from error
    return f"{api.endpoint}/{name}"


def _without_path(made_of: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in made_of.items() if key != "path"}


def _api() -> Any:
    from huggingface_hub import HfApi

    return HfApi()
