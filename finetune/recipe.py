"""The recipe: one YAML file as frozen models, each field said once, in one sentence.

`load_recipe` finds a shipped recipe by name or a file by path, applies `--set` overrides, and reports every fault at
once with its line. What comes out is immutable; "auto" is still in it until `plan.resolve` answers it.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo

from finetune import strict_yaml
from finetune.errors import RecipeError

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

    train: str | Annotated[list[str], Field(min_length=1)] = Field(
        description="Training rows: a file or glob (.jsonl, .json, .csv, .parquet), a hub data set, or home-intents."
    )
    eval: Annotated[float | str | None, AfterValidator(_eval_rows)] = Field(
        None, description="Evaluation rows: a share such as 0.05, a path, or none."
    )
    format: Literal["auto", "messages", "prompt-completion", "alpaca", "text"] = Field(
        "auto", description="Layout of a row: auto, messages, prompt-completion, alpaca or text."
    )
    system: OptionalText = Field(None, description="System message for conversations that bring none.")
    max_length: int = Field(2048, ge=8, description="Longest row in tokens.")
    overlong: Literal["error", "drop", "truncate-end"] = Field(
        "error", description="What happens to a longer row: error, drop or truncate-end; always counted."
    )
    on_bad_row: Literal["error", "skip"] = Field(
        "error", description="What happens to a row that cannot be trained: error or skip; always counted."
    )
    limit: int | None = Field(None, ge=1, description="Use only the first rows of the training data.")


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
    checkpointing: Auto | bool = Field(
        "auto", description="Recompute activations in the backward pass to save memory."
    )
    seed: int = Field(42, ge=0, le=2**32 - 1, description="Seed of adapters, row order and dropout.")
    log_every: int = Field(10, ge=1, description="Steps between two lines of metrics.jsonl.")
    eval_every: int | None = Field(None, ge=1, description="Steps between evaluations; without it, once per epoch.")
    save_every: int | None = Field(None, ge=1, description="Steps between checkpoints; without it, once per epoch.")
    keep: int = Field(2, ge=1, description="Checkpoints kept.")
    report_to: list[Tracker] = Field([], description="Experiment trackers: tensorboard, trackio, wandb, mlflow.")


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
    near = _nearest(name, shipped_recipes())
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


def parse_recipe(text: str, source: str = "recipe", overrides: Sequence[str] = ()) -> Recipe:
    """Check recipe text and overrides; `source` is named in the messages."""
    document = strict_yaml.parse(text)
    faults = [(line, f"{source}:{line}: {fault}.") for line, fault in document.faults]
    value = document.value
    if not isinstance(value, dict):
        if value is None and not faults:
            faults.append((0, f"{source}: the file is empty."))
        elif not faults:
            found = "a list" if isinstance(value, list) else _show(value)
            faults.append((1, f"{source}:1: a recipe is a list of `key: value` lines, and this is {found}."))
        raise _recipe_error(faults)
    where: _Places = {path: (line, f"{source}:{line}") for path, line in document.lines.items()}
    where[()] = (0, source)
    for number, override in enumerate(overrides):
        faults += _apply(override, _AFTER + number, value, where)
    recipe = None
    try:
        recipe = Recipe.model_validate(value)
    except ValidationError as error:
        faults += _faults(error, value, where)
    if faults or recipe is None:
        raise _recipe_error(faults)
    return recipe


# Where a path of the recipe was written: a line to sort by, and the words that name the place.
_Places = dict[strict_yaml.Path, tuple[int, str]]
_Fault = tuple[int, str]
_AFTER = 10**9  # the "line" of the first --set: after the file


def _recipe_error(faults: list[_Fault]) -> RecipeError:
    """All faults in the order of the file, those of the overrides last."""
    one = len(faults) == 1
    hint = f"Correct {'this line' if one else f'these {len(faults)} lines'}; `finetune schema` shows every field."
    return RecipeError("\n".join(text for _, text in sorted(faults, key=lambda fault: fault[0])) + "\n", hint)


def _apply(override: str, line: int, value: dict[str, Any], where: _Places) -> list[_Fault]:
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
            return [(line, f"{source}: '{'.'.join(keys[:depth])}' is {_show(below)} and has no fields.")]
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


# -------------------------------------------------------------------------------------------------------- messages

_Key = str | int
_BOUNDS = {
    "greater_than_equal": "must be at least {ge}",
    "greater_than": "must be above {gt}",
    "less_than_equal": "must be at most {le}",
    "less_than": "must be below {lt}",
}


def _faults(error: ValidationError, value: dict[str, Any], where: _Places) -> list[_Fault]:
    """One fault per faulty place: several pydantic errors of one union field are one, a key and its near miss too."""
    items = [(_path_of(item, value), item) for item in error.errors()]
    meant = {(*path[:-1], _meant(path, value)) for path, item in items if item["type"] == "extra_forbidden"}
    messages: dict[strict_yaml.Path, str] = {}
    for path, item in items:
        if item["type"] == "missing" and path in meant:
            continue
        if path not in messages or item["type"] in _BOUNDS:
            messages[path] = _sentence(item, path, value)
    around = {path[:n] for path in messages for n in range(len(path))}
    faults = []
    for path, message in messages.items():
        if path not in around:
            line, place = next(where[path[:n]] for n in range(len(path), -1, -1) if path[:n] in where)
            faults.append((line, f"{place}: {message}"))
    return faults


def _path_of(item: Any, value: dict[str, Any]) -> strict_yaml.Path:
    """The place in the file that an error is about; for an unknown or missing `kind` the key or its near miss."""
    path = _in_file(item["loc"], value, missing=item["type"] == "missing")
    if item["type"] == "union_tag_invalid":
        return (*path, "kind")
    if item["type"] == "union_tag_not_found" and isinstance(item["input"], dict):
        return (*path, next((key for key in item["input"] if _nearest(key, ["kind"])), "kind"))
    return path


def _in_file(loc: tuple[_Key, ...], value: Any, *, missing: bool) -> strict_yaml.Path:
    """pydantic's location without the union tags it inserts ('method', 'lora', 'rank' -> 'method', 'rank')."""
    path: list[_Key] = []
    for number, key in enumerate(loc):
        last = number == len(loc) - 1
        if isinstance(value, dict) and (key in value or (missing and last)):
            path.append(key)
            value = value.get(str(key))
        elif isinstance(value, list) and isinstance(key, int) and key < len(value):
            path.append(key)
            value = value[key]
    return tuple(path)


def _sentence(item: Any, path: strict_yaml.Path, root: dict[str, Any]) -> str:
    name = ".".join(str(part) for part in path) or "the recipe"
    kind = item["type"]
    if kind == "extra_forbidden":
        return _unknown_key(path, root)
    if kind == "missing":
        described = _field(path, root)
        return f"'{name}' is missing. {described.description if described else ''}".strip()
    if kind == "union_tag_invalid":
        return f"method.kind is {_show(item['input'].get('kind'))}; it must be full, lora or qlora."
    if kind == "union_tag_not_found":
        if path[-1] not in ("method", "kind"):
            return _unknown_key(path, root)
        return "method.kind is missing; it must be full, lora or qlora."
    got = item["input"] if path else root
    described = _field(path, root)
    said = f" {described.description}" if described and described.description else ""
    if kind in _BOUNDS:
        bound = {word: int(n) if float(n).is_integer() else n for word, n in item["ctx"].items()}
        return f"{name} is {_show(got)} but {_BOUNDS[kind].format(**bound)}.{said}"
    if kind == "value_error":
        return f"{name} is {_show(got)}: {item['ctx']['error']}.{said}"
    if near := _near_choice(got, described):
        return f"{name} cannot be {_show(got)}; did you mean '{near}'?{said}"
    return f"{name} cannot be {_show(got)}.{said}{_hint(got, described)}"


def _near_choice(got: Any, described: FieldInfo | None) -> str | None:
    choices = _choices(described.annotation) if described else []
    return _nearest(got, choices) if isinstance(got, str) and got not in choices else None


def _choices(annotation: Any) -> list[str]:
    """All words a field's type admits."""
    if getattr(annotation, "__origin__", None) is Literal:
        return [str(choice) for choice in get_args(annotation)]
    return [choice for part in get_args(annotation) if not isinstance(part, str) for choice in _choices(part)]


def _types(annotation: Any) -> list[Any]:
    """The types a field admits: unions opened, `list` for any list."""
    origin = get_origin(annotation)
    if origin is list or origin is Literal:
        return [origin]
    parts = get_args(annotation)[: 1 if origin is Annotated else None]
    return [kind for part in parts for kind in _types(part)] if parts else [annotation]


def _hint(got: Any, described: FieldInfo | None) -> str:
    """Why a value that looks right is not: quotes, a comma, a YAML 1.1 word, a number for text."""
    admits = _types(described.annotation) if described else []
    if isinstance(got, float) and got.is_integer() and int in admits:
        return f" Write {int(got)}."
    if isinstance(got, (int, float)) and str in admits:
        return f" Write it in quotes if it is text: '{_show(got)}'."
    return _hint_for_text(got.strip(), admits) if isinstance(got, str) and got.strip() else ""


def _hint_for_text(got: str, admits: list[Any]) -> str:
    plain = strict_yaml.scalar(got)
    if bool in admits and got.lower() in ("yes", "no", "on", "off"):
        return f" '{got}' is text here; write {'true' if got.lower() in ('yes', 'on') else 'false'}."
    if type(None) in admits and got == "None":
        return " 'None' is text here; write null."
    if type(plain) in admits or (isinstance(plain, int) and float in admits):
        return f" It stands in quotes and is text; write {got} without them."
    if float in admits and re.fullmatch(r"[0-9]+,[0-9]+", got):
        return f" Write the decimal point as {got.replace(',', '.')}."
    return f" Write a list as [{got}]." if list in admits else ""


def _unknown_key(path: strict_yaml.Path, root: dict[str, Any]) -> str:
    key, parent = str(path[-1]), path[:-1]
    model = _model_at(parent, root)
    inside = f"in '{'.'.join(str(part) for part in parent)}'" if parent else "at the top level"
    if near := _meant(path, root):
        return f"'{key}' is not known {inside}; did you mean '{near}'?"
    homes = [home for home in _homes(key) if home.rpartition(".")[0] != ".".join(map(str, parent))]
    if homes:
        place = f"it belongs in '{homes[0]}'" if "." in homes[0] else f"'{homes[0]}' stands at the top level"
        return f"'{key}' is not known {inside}; {place}."
    fields = ", ".join(model.model_fields) if model else ""
    return f"'{key}' is not known {inside}; known are {fields}."


def _meant(path: strict_yaml.Path, root: dict[str, Any]) -> str | None:
    """The field beside an unknown key that it is a near miss of."""
    model = _model_at(path[:-1], root)
    return _nearest(str(path[-1]), model.model_fields) if model else None


def _models() -> dict[str, list[type[_Part]]]:
    return {
        "": [Recipe], "load": [Load], "method": [LoRA, QLoRA, Full], "data": [Data], "train": [Train],
        "evaluate": [Evaluate], "merge": [Merge], "serve": [Serve],
    }  # fmt: skip


def _homes(key: str) -> Iterable[str]:
    """Dotted places where a field of (nearly) this name exists."""
    for parent, models in _models().items():
        for model in models:
            if near := _nearest(key, model.model_fields, cutoff=0.85):
                yield f"{parent}.{near}".lstrip(".")


def _model_at(path: strict_yaml.Path, root: dict[str, Any]) -> type[_Part] | None:
    name = ".".join(str(part) for part in path)
    models = _models().get(name)
    if name == "method":
        kind = root["method"].get("kind") if isinstance(root.get("method"), dict) else None
        known: dict[Any, type[_Part]] = {"full": Full, "lora": LoRA}
        return known.get(kind if isinstance(kind, str) else None, QLoRA)
    return models[0] if models else None


def _field(path: strict_yaml.Path, root: dict[str, Any]) -> FieldInfo | None:
    for depth in range(len(path), 0, -1):
        model = _model_at(path[: depth - 1], root)
        if model and (found := model.model_fields.get(str(path[depth - 1]))):
            return found
    return None


def _nearest(word: str, known: Iterable[str], cutoff: float = 0.7) -> str | None:
    found = difflib.get_close_matches(word, list(known), n=1, cutoff=cutoff)
    return found[0] if found else None


def _show(value: Any) -> str:
    if value is None:
        return "empty"
    if isinstance(value, dict):
        return "a group of fields"
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"'{value}'" if isinstance(value, str) else str(value)


def schema() -> dict[str, Any]:
    """JSON Schema of a recipe, for editors."""
    document = Recipe.model_json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **document, "title": "finetune recipe"}


__all__ = [
    "Data", "Dtype", "Evaluate", "Full", "Load", "LoRA", "Merge", "Method", "Optimizer", "QLoRA", "Recipe", "Serve",
    "Train", "dump_recipe", "find_recipe", "load_recipe", "parse_recipe", "recipe_folders", "schema",
    "shipped_recipes",
]  # fmt: skip
