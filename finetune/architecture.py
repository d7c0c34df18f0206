"""What the headers of a model do not say: asked of transformers' own classes."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.model_files import CONFIG, read_json

_TIES = {"lm_head.weight": "model.embed_tokens.weight"}


@dataclass(frozen=True)
class Architecture:
    """What headers do not say: tied matrices, names that differ from the modules', and transposed linear layers.

    Files may leave out `prefix`, and `renamings` are transformers' own from a file's names to a module's.
    """

    tied: bool
    embedding: str
    head: str
    prefix: str
    conv1d: bool | None
    quantised: bool
    renamings: tuple[Any, ...] = ()

    def module_name(self, name: str) -> str:
        """The name under which transformers and peft know a tensor of the files."""
        for renaming in self.renamings:
            name = renaming.rename_source_key(name)[0]
        return name


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
    packed = bool(config.get("quantization_config"))
    return Architecture(
        bool(tied), ties[head], head, prefix, conv1d, packed, _renamings(base, made, config.get("model_type"))
    )


def _renamings(base: Path, made: Any, model_type: str | None) -> tuple[Any, ...]:
    """Gemma 3 and other models with a vision part are stored under names of older versions of transformers.

    Only an empty model knows all of transformers' rules for it; most models have none, and none is built for them.
    """
    import torch
    from transformers import AutoConfig, conversion_mapping, core_model_loading

    known: Any = conversion_mapping.get_checkpoint_conversion_mapping
    if made is None or not (known(model_type) or known(made.__name__)):
        return ()
    with torch.device("meta"):
        model = made._from_config(AutoConfig.from_pretrained(base))
    found = conversion_mapping.get_model_conversion_mapping(model)
    return tuple(each for each in found if isinstance(each, core_model_loading.WeightRenaming))
