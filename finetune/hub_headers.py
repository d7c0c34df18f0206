"""A model on the hub: its config.json, a few kilobytes of each shard, and the hub's refusals in two sentences.

huggingface_hub is imported when the hub is asked, so that planning a bundled model stays instant.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection
from pathlib import Path

from finetune.errors import ModelError


def cached_config(model: str, revision: str | None) -> Path | None:
    """The config.json of a snapshot in the hub's cache; None when there is none."""
    import huggingface_hub

    config = huggingface_hub.try_to_load_from_cache(model, "config.json", revision=revision)
    return Path(config) if isinstance(config, str) else None


def download_config(model: str, revision: str | None) -> Path:
    """The config.json of a model, through the hub's cache. Raises what huggingface_hub raises: see `refusal`."""
    import huggingface_hub

    return Path(huggingface_hub.hf_hub_download(model, "config.json", revision=revision))


def read_headers(model: str, revision: str | None) -> list[tuple[str, tuple[int, ...], str]]:
    """Name, shape and dtype of every tensor, shard by shard, by range requests. Raises as `download_config` does."""
    import huggingface_hub

    files = huggingface_hub.get_safetensors_metadata(model, revision=revision).files_metadata
    shards = [files[name].tensors for name in sorted(files)]
    return [(name, tuple(tensor.shape), tensor.dtype) for shard in shards for name, tensor in shard.items()]


def refusal(error: Exception, model: str, revision: str | None, offline: Collection[str]) -> Exception:
    """The hub's refusal in two sentences; an error that is not the hub's comes back as it is.

    `offline` are the models that need no hub, for a near miss and as what still works without a network.
    """
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
        near = difflib.get_close_matches(model, offline, n=1, cutoff=0.7)
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
            f"Check the connection, or name a local folder; planning works offline for {', '.join(offline)}.",
        )
    return error
