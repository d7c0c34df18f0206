"""The recipe: one YAML file as frozen models, each field said once, in one sentence.

`load_recipe` finds a shipped recipe by name or a file by path, applies `--set` overrides, and reports every fault at
once with its line. What comes out is immutable; "auto" is still in it until `plan.resolve` answers it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from finetune import strict_yaml
from finetune.errors import RecipeError
from finetune.faults import Fault, Places, faults_of, nearest, recipe_error, show

Auto = Literal["auto"]
Strategy = Literal["qv", "attention", "attention+mlp"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Optimizer = Literal[
    "paged_adamw_8bit",
    "paged_adamw_32bit",
    "adamw_8bit",
    "adamw_torch",
    "adamw_torch_fused",
    "paged_lion_8bit",
    "lion_8bit",
    "adafactor",
    "sgd",
]
Tracker = Literal["tensorboard", "trackio", "wandb", "mlflow"]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, validate_default=True, allow_inf_nan=False)


class Full(_Part):
    """Train every weight."""

    kind: Literal["full"] = Field(description="Train every weight of the model.")


class LoRA(_Part):
    """Train a low-rank change `scale * B @ A` beside frozen weights (Hu et al. 2021, arXiv:2106.09685)."""

    kind: Literal["lora"] = Field(description="Train low-rank adapters beside frozen 16- or 32-bit weights.")
    rank: int = Field(16, ge=1, le=4096, description="Rank r of every adapter; a whole number of at least 1.")
    alpha: float = Field(32, gt=0, description="The change is scaled by alpha / rank (rslora: alpha / sqrt(rank)).")
    dropout: float = Field(0.0, ge=0, lt=1, description="Dropout before A; above 0 costs about 1.2x time.")
    targets: Strategy | Annotated[list[str], Field(min_length=1)] = Field(
        "attention+mlp",
        description="Linear layers that get an adapter: qv, attention, attention+mlp, or a list of module names.",
    )
    variant: Literal["lora", "rslora", "dora"] = Field("lora", description="Which LoRA: lora, rslora or dora.")
    modules_to_save: list[str] = Field(
        [], description="Modules trained whole beside the adapters, such as lm_head; peft keeps a copy of each."
    )


class QLoRA(_Part):
    """LoRA beside weights held in 4 bits (Dettmers et al. 2023, arXiv:2305.14314)."""

    kind: Literal["qlora"] = Field(description="Train low-rank adapters beside frozen 4-bit weights.")
    rank: int = Field(16, ge=1, le=4096, description="Rank r of every adapter; a whole number of at least 1.")
    alpha: float = Field(32, gt=0, description="The change is scaled by alpha / rank (rslora: alpha / sqrt(rank)).")
    dropout: float = Field(0.0, ge=0, lt=1, description="Dropout before A; above 0 costs about 1.2x time.")
    targets: Strategy | Annotated[list[str], Field(min_length=1)] = Field(
        "attention+mlp",
        description="Linear layers that get an adapter: qv, attention, attention+mlp, or a list of module names.",
    )
    variant: Literal["lora", "rslora", "dora"] = Field("lora", description="Which LoRA: lora, rslora or dora.")
    modules_to_save: list[str] = Field(
        [], description="Modules trained whole beside the adapters, such as lm_head; peft keeps a copy of each."
    )
    quant: Literal["nf4", "fp4"] = Field("nf4", description="4-bit data type of the frozen weights: nf4 or fp4.")
    double_quant: bool = Field(True, description="Quantise the scales too; saves 0.373 bit per weight.")
    compute_dtype: Dtype = Field("auto", description="Type that 4-bit weights are unpacked to for each product.")


Method = Annotated[Full | LoRA | QLoRA, Field(discriminator="kind")]


def _eval_rows(value: float | str | None) -> float | str | None:
    if isinstance(value, float) and not 0 < value < 1:
        raise ValueError("a share must lie between 0 and 1")
    if isinstance(value, str) and re.fullmatch(r"[0-9.,]+ *%?", value):
        raise ValueError("this is text and would be a path; write a share as a plain number such as 0.05")
    if isinstance(value, str) and value.lower() in ("", "no", "off", "false"):
        raise ValueError("this is text and would be a path; write none for no evaluation rows")
    return None if isinstance(value, str) and value.lower() == "none" else value


def _not_the_word(value: str | None) -> str | None:
    if value == "None":
        raise ValueError("this is text; write null for nothing")
    return value


OptionalText = Annotated[str | None, AfterValidator(_not_the_word)]


Weight = Annotated[float, Field(gt=0, le=100)]
Column = Literal[
    "messages", "conversations", "prompt", "completion", "instruction", "input", "output", "text", "system", "tools",
    "role", "content",
]  # fmt: skip


class Load(_Part):
    """How the model is read."""

    revision: OptionalText = Field(None, description="Branch, tag or commit of a hub model.")
    dtype: Dtype = Field("auto", description="Type of the weights in memory: auto, float32, bfloat16 or float16.")
    attention: Literal["auto", "eager", "sdpa", "flash_attention_2", "flex_attention"] = Field(
        "auto", description="Attention implementation; auto takes what the model supports best on the device."
    )
    trust_remote_code: bool = Field(False, description="Run Python code that comes with the model repository.")


class Data(_Part):
    """Which rows are trained and how they are read."""

    train: str | Annotated[list[str], Field(min_length=1)] | Annotated[dict[str, Weight], Field(min_length=1)] = (
        Field(
            description="Training rows: a file or glob (.jsonl, .json, .csv, .tsv, .parquet, also .gz or .zst), a "
            "hub data set, or home-intents; several as a list, or as a mapping to how often each row is taken."
        )
    )
    eval: Annotated[float | str | None, AfterValidator(_eval_rows)] = Field(
        None, description="Evaluation rows: a share such as 0.05, a path, or none."
    )
    eval_group: OptionalText = Field(
        None, description="Column whose equal values stay together when a share is held out, such as a user's id."
    )
    format: Literal["auto", "messages", "prompt-completion", "alpaca", "text"] = Field(
        "auto", description="Layout of a row: auto, messages, prompt-completion, alpaca or text."
    )
    columns: dict[Column, str] = Field(
        {}, description="This toolkit's column names and the file's, such as {prompt: question, completion: answer}."
    )
    system: OptionalText = Field(None, description="System message for conversations that bring none.")
    train_on: Literal["assistant", "last", "all", "completion"] = Field(
        "assistant",
        description="Which tokens give a loss: every reply (assistant), the last one (last), all tokens (all), or "
        "all that follows the prompt of a prompt-completion row (completion).",
    )
    max_length: int = Field(2048, ge=8, description="Longest row in tokens.")
    overlong: Literal["error", "drop", "truncate-prompt", "truncate-end", "split"] = Field(
        "error",
        description="What happens to a longer row: error, drop, truncate-prompt, truncate-end or split; always "
        "counted.",
    )
    packing: Auto | Literal["step"] | bool = Field(
        "auto",
        description="step lays the rows of a pass end to end; true fills sequences of max_length with whole rows, "
        "and batch_size counts those; false pads; auto takes step where that is cheaper than padding.",
    )
    on_bad_row: Literal["error", "skip"] = Field(
        "error", description="What happens to a row that cannot be trained: error or skip; always counted."
    )
    limit: int | None = Field(None, ge=1, description="Use only the first rows of the training data.")

    @property
    def sources(self) -> dict[str, float]:
        """What `train` names, each with its weight."""
        if isinstance(self.train, dict):
            return dict(self.train)
        return dict.fromkeys([self.train] if isinstance(self.train, str) else self.train, 1.0)


class Train(_Part):
    """The optimisation."""

    epochs: float = Field(1.0, gt=0, description="Passes over the training rows.")
    steps: int | None = Field(None, ge=1, description="Stop after this many optimizer steps, whatever `epochs` says.")
    batch_size: int = Field(16, ge=1, description="Rows per optimizer step over all devices.")
    micro_batch: Auto | Annotated[int, Field(ge=1)] = Field(
        "auto", description="Rows per device and forward pass: auto or a whole number; the rest is accumulated."
    )
    learning_rate: float = Field(2e-4, gt=0, description="Peak learning rate.")
    schedule: Literal["cosine", "linear", "constant"] = Field(
        "cosine", description="Learning rate after the warm-up."
    )
    warmup: float = Field(0.03, ge=0, lt=1, description="Share of the steps in which the learning rate rises from 0.")
    weight_decay: float = Field(0.0, ge=0, description="Decoupled weight decay.")
    max_grad_norm: float = Field(1.0, ge=0, description="Gradients are clipped to this norm; 0 switches it off.")
    optimizer: Auto | Optimizer = Field("auto", description="auto, or one of the optimizers listed in the README.")
    precision: Auto | Literal["fp32", "bf16", "fp16"] = Field(
        "auto", description="Type of the products (autocast): auto, fp32, bf16 or fp16."
    )
    checkpointing: Auto | bool | Annotated[int, Field(ge=2, le=64)] = Field(
        "auto",
        description="Recompute activations in the backward pass: auto, true, false, or n for every n-th layer only.",
    )
    seed: int = Field(42, ge=0, le=2**32 - 1, description="Seed of adapters, row order and dropout.")
    log_every: int = Field(10, ge=1, description="Steps between two lines of metrics.jsonl.")
    eval_every: int | None = Field(None, ge=1, description="Steps between evaluations; without it, once per epoch.")
    save_every: int | None = Field(None, ge=1, description="Steps between checkpoints; without it, once per epoch.")
    keep: int = Field(2, ge=1, description="Checkpoints kept.")
    report_to: list[Tracker] = Field([], description="Experiment trackers: tensorboard, trackio, wandb, mlflow.")


class Fast(_Part):
    """Faster ways to the same gradients; each is taken where it applies, and the log says so."""

    head: bool = Field(True, description="Logits and their gradient in one pass over the rows that give a loss.")
    attention: bool = Field(True, description="Rows that lie end to end attend one by one, without a mask over all.")
    adapters: bool = Field(True, description="The adapters that share an input run as one autograd function.")
    layers: bool = Field(True, description="Norms and gated MLPs keep for the backward pass only what they take in.")
    products: bool = Field(True, description="On an x86 CPU oneDNN takes most fp32 products with frozen weights.")
    weights: Auto | bool | Annotated[int, Field(ge=2, le=64)] = Field(
        "auto",
        description="On a CPU, frozen weights lie as in their file and become fp32 product by product; n: of every "
        "n-th layer.",
    )
    compile: bool = Field(
        False,
        description="Decoder layers go through torch.compile, in place of adapters, layers, weights and the last "
        "MLP's tail.",
    )
    prefix: bool = Field(True, description="What all rows of a micro-batch begin with, a system prompt, runs once.")
    memory: bool = Field(True, description="On a CPU, freed memory stays with the process until the next step.")
    tail: bool = Field(
        True,
        description="What leads to no trained token is not run: later tokens, others in the last MLP.",
    )


class Evaluate(_Part):
    """What is asked of the model before and after training."""

    data: str = Field(description="Held-out rows with the right replies: a file, or home-intents:test.")
    rows: int = Field(100, ge=1, description="How many of them.")
    few_shot: int = Field(
        4, ge=0, description="Training rows shown to the untrained model as a baseline; 0 leaves it out."
    )
    max_new_tokens: int = Field(128, ge=1, description="Longest answer in tokens.")
    after_training: bool = Field(True, description="Score at the end of `train`, without a separate `eval`.")


class Merge(_Part):
    """How adapters are folded into the base."""

    dtype: Literal["keep", "float32", "bfloat16", "float16"] = Field(
        "keep", description="Type of the merged weights: keep (the base's own), float32, bfloat16 or float16."
    )


class Serve(_Part):
    """Where the endpoint listens."""

    host: str = Field("127.0.0.1", description="Address to listen on.")
    port: int = Field(8000, ge=1, le=65535, description="Port to listen on.")


class Recipe(_Part):
    """One run, whole."""

    model: str = Field(min_length=1, description="Hub id, local folder, .gguf file, or the embedded smollm2-135m.")
    load: Load = Field(Load(), description="How the model is read.")
    method: Method = Field(description="full, lora or qlora with their settings.")
    data: Data = Field(description="The rows.")
    train: Train = Field(Train(), description="The optimisation.")
    fast: Fast = Field(Fast(), description="Faster ways to the same gradients.")
    evaluate: Evaluate | None = Field(None, description="Questions asked before and after training.")
    merge: Merge = Field(Merge(), description="How adapters are folded into the base.")
    serve: Serve = Field(Serve(), description="Where the endpoint listens.")


# --------------------------------------------------------------------------------------------- finding and reading


def recipe_folders() -> list[Path]:
    """Folders searched for a recipe by name: `recipes/` here, then the ones that ship with the package."""
    package = Path(__file__).parent
    shipped = [package / "recipes", package.parent / "recipes"]
    return [folder for folder in [Path("recipes"), *shipped] if folder.is_dir()]


def find_recipe(name: str) -> Path:
    """The file of a recipe given by name or path.

    Raises `RecipeError` with the nearest shipped names when there is none.
    """
    path = Path(name)
    if path.suffix in (".yaml", ".yml") or os.sep in name:
        if not path.is_file():
            raise RecipeError(
                f"There is no recipe file {name}.", "Check the path, or write one with `finetune init`."
            )
        return path
    for folder in recipe_folders():
        if (found := folder / f"{name}.yaml").is_file():
            return found
    near = nearest(name, shipped_recipes())
    raise RecipeError(
        f"There is no recipe named '{name}'.",
        f"Did you mean '{near}'? " * bool(near) + "`finetune recipes` lists them.",
    )


def shipped_recipes() -> dict[str, Path]:
    """Name -> file of every recipe found by name, sorted."""
    found: dict[str, Path] = {}
    for folder in recipe_folders():
        for file in folder.glob("*.yaml"):
            found.setdefault(file.stem, file)
    return dict(sorted(found.items()))


def load_recipe(name: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe by name or path and apply `a.b=c` overrides.

    Raises `RecipeError` with all faults of the file and the overrides, each with its line.
    """
    path = find_recipe(str(name))
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(
            f"{path} cannot be read: {error}.", "Check the file's rights and that it is UTF-8 text."
        ) from None
    return parse_recipe(text, str(path), overrides)


_AFTER = 10**9  # the "line" of the first --set: after the file


def parse_recipe(text: str, source: str = "recipe", overrides: Sequence[str] = ()) -> Recipe:
    """Check recipe text and overrides; `source` is named in the messages."""
    document = strict_yaml.parse(text)
    faults = [(line, f"{source}:{line}: {fault}.") for line, fault in document.faults]
    value = document.value
    if not isinstance(value, dict):
        raise recipe_error(faults or [_no_mapping(value, source)])
    where: Places = {path: (line, f"{source}:{line}") for path, line in document.lines.items()}
    where[()] = (0, source)
    for number, override in enumerate(overrides):
        faults += _apply(override, _AFTER + number, value, where)
    try:
        recipe = Recipe.model_validate(value)
    except ValidationError as error:
        raise recipe_error(faults + faults_of(error, value, where, Recipe)) from None
    if faults:
        raise recipe_error(faults)
    return recipe


def _no_mapping(value: Any, source: str) -> Fault:
    if value is None:
        return 0, f"{source}: the file is empty."
    found = "a list" if isinstance(value, list) else show(value)
    return 1, f"{source}:1: a recipe is a list of `key: value` lines, and this is {found}."


def _apply(override: str, line: int, value: dict[str, Any], where: Places) -> list[Fault]:
    """Put one `a.b=c` into the raw mapping; the strict check comes afterwards, with the file's."""
    key, equals, text = override.partition("=")
    source = f"--set {override}"
    keys = tuple(key.strip().split("."))
    if not equals or not all(keys):
        return [(line, f"{source}: this is not of the form a.b=c.")]
    parsed = strict_yaml.parse(text)
    if parsed.faults:
        return [(line, f"{source}: {fault}.") for _, fault in parsed.faults]
    here = value
    for depth, part in enumerate(keys[:-1], 1):
        below = here.setdefault(part, {})
        where.setdefault(keys[:depth], (line, source))
        if not isinstance(below, dict):
            return [(line, f"{source}: '{'.'.join(keys[:depth])}' is {show(below)} and has no fields.")]
        here = below
    here[keys[-1]] = parsed.value
    stale = [path for path in where if path[: len(keys)] == keys]
    for path in stale:
        del where[path]
    where[keys] = (line, source)
    return []


def dump_recipe(recipe: Recipe) -> str:
    """A recipe as YAML text that `parse_recipe` reads back to the same value."""
    return strict_yaml.dump(recipe.model_dump(mode="json"))


def schema() -> dict[str, Any]:
    """JSON Schema of a recipe, for editors."""
    document = Recipe.model_json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **document, "title": "finetune recipe"}


__all__ = [
    "Data", "Dtype", "Evaluate", "Full", "Load", "LoRA", "Merge", "Method", "Optimizer", "QLoRA", "Recipe", "Serve",
    "Train", "dump_recipe", "find_recipe", "load_recipe", "parse_recipe", "recipe_folders", "schema",
    "shipped_recipes",
]  # fmt: skip
