"""finetune: plan, train, merge and serve fine-tuned language models on the stock Hugging Face libraries.

The modules in reading order, which is also the only legal direction of imports: a module imports those above it.

    errors        what a user can put right, and how
    strict_yaml   YAML text -> values with their lines
    faults        why a recipe is refused, in the words of its file
    recipe        the YAML file as frozen models
    tensors       one weight as a header describes it
    weight_files  safetensors files, tensor by tensor
    gguf_header   a GGUF file under Hugging Face's names
    gguf_blocks   a GGUF file's codes, scales and offsets beside the weights they make
    hub_headers   a model on the hub, without its weights
    facts         what a model is, from its headers
    run           the folder one run leaves behind
    origin        which weights it was trained on
    hub_weights   shards that arrive from the hub while they are used
    device        what this machine can hold
    steps         one training step: its micro-batch, and the path through model and loss
    method        full, LoRA, QLoRA: targets and trainable counts
    allocator     CUDA's caching allocator replayed
    ledger        live bytes through one step
    kernels       what kernels allocate inside themselves
    optimizers    what each optimizer keeps, and needs while it steps
    tape          autograd with sizes instead of numbers
    norms         norms in sizes
    linears       products with weights, in sizes
    attention     attention in sizes
    heads         output heads and losses in sizes
    decoder       one training step without torch
    memory        bytes, line by line
    paths         recipe + device -> the path that the trainer takes
    speed         floating-point operations and tokens per second
    footprint     memory of the host, and disk
    plan          recipe + facts + device -> a resolved recipe that fits
    fit           what would make it fit, cheapest first
    compare       one model in all ways of training it
    sharding      what several GPUs share
    start         the beginning of a recipe: init and the list of shipped ones
    embedded      the model that comes from a PyPI package
    home_words    its templates, names and wordings
    home_intents  the data set that comes from two PyPI packages
    strict_json   JSON text -> values, or why not
    turns         a list of messages -> turns in order, or a verdict
    formats       any row -> a conversation, or a verdict
    json_array    a JSON array of any size -> its values
    readers       one open file -> blocks of rows
    hub_rows      a data set on the hub -> the files of a split
    files         a file, glob or hub data set -> raw rows with their place
    templates     a chat template: what it writes, and what it cannot
    blind         templates that copy contents and never look at them
    replies       a conversation -> its text, and the places a model must write
    chat          messages -> token ids and labels
    pieces        token ids -> text that a person can read
    overlong      what becomes of a row that is too long
    packing       lengths -> packs, and the order of an epoch
    store         finished rows in a file that is mapped into memory
    encoding      chunks of raw rows -> finished rows, in one process or several
    data_cache    prepared rows kept by content
    data          files -> training and evaluation rows, with counts
    near          rows that are nearly the same
    duplicates    copies among the rows, and leaks into the held-out ones
    data_rows     the rows of a recipe to look at, from all of them down to one token
    data_report   what they are, in numbers
    scores        replies against references -> numbers
    adapter_file  a LoRA adapter as it lies on disk
    model_files   what stands beside the weights: configs, tokenizer, template
    model_card    what a merged model says of itself
    gate          who may ask a server, and what
    recorded      one answer of a run, asked again of an endpoint
    vllm_rules    what vLLM asks of an adapter
    converter     llama.cpp's own scripts
    ollama        a chat template in Ollama's language
    launch        several processes of one machine
    startup       what a process is told before torch is imported
    ---------------------------------------------------------------- above this line nothing imports torch
    fast.last      the last layer's MLP, on supervised positions only
    fast.products  products with a frozen weight, by the quickest library
    fast.again    activations that are made again from what is kept anyway
    fast.head     the loss on supervised rows only
    fast.blocks   attention's backward pass, by products of blocks
    fast.attention  rows that lie end to end, one by one
    fast.held     frozen weights as in their file, widened for each product
    fast.adapter  layers that share an input, as one autograd function
    fast.layers   norms and gated MLPs that keep little
    fast.host     freed memory stays with the process
    fast.compiled  decoder layers through torch.compile, and when that pays
    model         weights on the device, adapter attached
    lengths       how long the rows are, in the model's tokens
    measure       what a step really takes
    meta          the very model on the meta device
    as_cuda       what a GPU would run, for a trace without one
    simulate      one training step on meta tensors
    batches       finished rows -> the micro-batches of a run
    callbacks     what is watched while training
    trainer       everything above -> one SFTTrainer
    generate      a run or a model folder -> text
    infer         a file of questions -> a file of answers
    architecture  what the headers of a model do not say
    merge_layout  which tensor of a merge comes from where
    merge_math    W + scale * B @ A, some rows at a time
    combine       several adapters as one
    merge_folder  a folder that is complete or absent
    publish       a merged folder on the hub
    streamed      a model that reads its weights when it needs them
    proof         a merged model answers as base plus adapter
    fold          adapters folded into a base, folder to folder
    merge         the verb `merge`: runs and adapters to their base
    evaluate      held-out rows -> scores
    report        numbers -> what a person likes to read
    plan_page     a plan as a page and as a drawing
    plan_view     a plan in the terminal
    data_page     the rows as a page
    data_view     the rows in the terminal
    verify        two real steps against the plan
    planning      the verb `plan`, from all sides
    train         the story of one run
    talk          a chat in the terminal
    plain_adapter  an adapter with one rank and one scale
    gguf_check    is a GGUF file the same model
    export        a run for other programs: GGUF, Ollama, vLLM
    endpoint      existing servers as applications in this process
    serve         an OpenAI-compatible endpoint
    cli           the door
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["evaluate", "load_recipe", "merge", "plan", "train"]

if TYPE_CHECKING:
    from finetune.evaluate import evaluate as evaluate
    from finetune.merge import merge as merge
    from finetune.plan import plan as plan
    from finetune.recipe import load_recipe as load_recipe
    from finetune.train import train as train

_HOMES = {"load_recipe": "recipe"}


def __getattr__(name: str) -> Any:
    """The verbs, imported when they are first used: `import finetune` alone loads nothing."""
    if name not in __all__:
        raise AttributeError(f"module 'finetune' has no attribute '{name}'")
    return getattr(import_module(f"finetune.{_HOMES.get(name, name)}"), name)


class _Package(ModuleType):
    """Keeps `finetune.train` the verb: importing the module of the same name would bind the module here."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in __all__ and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
