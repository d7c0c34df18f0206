"""Recipes as people write them: what is accepted, and for all else the line, the name and what to write instead."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from finetune.errors import RecipeError
from finetune.recipe import (
    Full,
    LoRA,
    QLoRA,
    Recipe,
    dump_recipe,
    find_recipe,
    load_recipe,
    parse_recipe,
    schema,
    shipped_recipes,
)

GOOD = """\
model: some/model
method:
  kind: lora
  rank: 8
data:
  train: rows.jsonl
train:
  batch_size: 4
"""


def read(text: str, *overrides: str) -> Recipe:
    return parse_recipe(text, "my.yaml", overrides)


def faults(text: str, *overrides: str) -> list[str]:
    """The lines of the message that a user sees, after checking what every such message has in common."""
    with pytest.raises(RecipeError) as caught:
        read(text, *overrides)
    error = caught.value
    assert error.exit_code == 2
    lines = error.what.splitlines()
    count = f"these {len(lines)} lines" if len(lines) > 1 else "this line"
    assert error.hint == f"Correct {count}; `finetune schema` shows every field."
    for line in lines:
        assert line.endswith((".", "?")), line
        said = line.partition(": ")[2]
        assert not any(slip in said for slip in ("?.", "..", ".;", "  ", " . ", "Input should", "literal[")), line
    return lines


def field(path: str, value: str) -> str:
    """GOOD with one field more (or another value) at a dotted path."""
    part, _, name = path.rpartition(".")
    lines = [line for line in GOOD.splitlines() if not line.startswith(f"  {name}:" if part else f"{name}:")]
    if not part:
        return "\n".join([*lines, f"{name}: {value}"])
    if f"{part}:" not in lines:
        lines.append(f"{part}:")
    lines.insert(lines.index(f"{part}:") + 1, f"  {name}: {value}")
    return "\n".join(lines)


def value_of(recipe: Recipe, path: str) -> Any:
    found: Any = recipe
    for name in path.split("."):
        found = getattr(found, name)
    return found


# ------------------------------------------------------------------------------------------------------- what is read


def test_a_small_recipe_and_its_defaults() -> None:
    recipe = read(GOOD)
    assert recipe.model == "some/model"
    assert recipe.method == LoRA(kind="lora", rank=8)
    assert (recipe.train.batch_size, recipe.train.micro_batch, recipe.train.optimizer) == (4, "auto", "auto")
    assert (recipe.data.eval, recipe.data.overlong, recipe.data.on_bad_row) == (None, "error", "error")
    assert recipe.evaluate is None


@pytest.mark.parametrize(
    ("path", "text", "value"),
    [
        ("train.learning_rate", "1e-4", 0.0001),
        ("train.learning_rate", "1E-2", 0.01),
        ("train.learning_rate", "5", 5.0),
        ("train.weight_decay", ".1", 0.1),
        ("train.steps", "1_000", 1000),
        ("train.epochs", "0.5", 0.5),
        ("train.checkpointing", "true", True),
        ("train.checkpointing", "auto", "auto"),
        ("train.micro_batch", "2", 2),
        ("train.report_to", "[wandb, mlflow]", ["wandb", "mlflow"]),
        ("method.targets", "[q_proj, v_proj]", ["q_proj", "v_proj"]),
        ("method.targets", "attention+mlp", "attention+mlp"),
        ("method.alpha", "16", 16.0),
        ("data.train", "[a.jsonl, 'b/*.csv']", ["a.jsonl", "b/*.csv"]),
        ("data.eval", "0.05", 0.05),
        ("data.eval", "held_out.jsonl", "held_out.jsonl"),
        ("data.eval", "none", None),
        ("data.eval", "None", None),
        ("data.eval", "null", None),
        ("data.system", "NO", "NO"),
        ("data.system", '"1e-4"', "1e-4"),
        ("load.revision", '"0123456"', "0123456"),
    ],
)
def test_values_that_people_write(path: str, text: str, value: Any) -> None:
    found = value_of(read(field(path, text)), path)
    assert found == value
    assert type(found) is type(value)


def test_one_file_serves_every_command() -> None:
    recipe = read(GOOD + "merge:\n  dtype: bfloat16\nserve:\n  port: 8090\n")
    assert (recipe.merge.dtype, recipe.serve.port) == ("bfloat16", 8090)


def test_anchors_may_be_used() -> None:
    assert (
        read(field("data.system", "&hello Be brief.") + "\nload: {revision: *hello}\n").load.revision == "Be brief."
    )


def test_four_bit_settings_exist_on_qlora_only() -> None:
    assert isinstance(read(GOOD.replace("lora", "qlora")).method, QLoRA)
    assert faults(field("method.double_quant", "true")) == [
        "my.yaml:3: 'double_quant' is not known in 'method'; known are kind, rank, alpha, dropout, targets, variant,"
        " modules_to_save."
    ]


def test_a_recipe_cannot_be_changed() -> None:
    recipe = read(GOOD)
    for part, name in ((recipe, "model"), (recipe.train, "epochs"), (recipe.method, "rank")):
        with pytest.raises(ValidationError, match="frozen"):
            setattr(part, name, 1)


# ---------------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("path", "text", "message"),
    [
        # Numbers that are text, or not what they seem.
        ("train.max_grad_norm", '"1.0"', "cannot be '1.0'. Gradients are clipped to this norm; 0 switches it off."
         " It stands in quotes and is text; write 1.0 without them."),
        ("train.learning_rate", "'1e-4'", "cannot be '1e-4'. Peak learning rate."
         " It stands in quotes and is text; write 1e-4 without them."),
        ("train.batch_size", "4.0", "cannot be 4.0. Rows per optimizer step over all devices. Write 4."),
        ("train.batch_size", "4.5", "cannot be 4.5. Rows per optimizer step over all devices."),
        ("train.steps", "1e3", "cannot be 1000.0. Stop after this many optimizer steps, whatever `epochs` says."
         " Write 1000."),
        ("method.dropout", "0,05", "cannot be '0,05'. Dropout before A; above 0 costs about 1.2x time."
         " Write the decimal point as 0.05."),
        ("train.batch_size", "0,05", "cannot be '0,05'. Rows per optimizer step over all devices."),
        ("train.epochs", "true", "cannot be true. Passes over the training rows."),
        ("train.learning_rate", ".inf", "cannot be inf. Peak learning rate."),
        # Bounds.
        ("train.batch_size", "0", "is 0 but must be at least 1. Rows per optimizer step over all devices."),
        ("train.micro_batch", "0", "is 0 but must be at least 1."
         " Rows per device and forward pass: auto or a whole number; the rest is accumulated."),
        ("train.learning_rate", "-1e-4", "is -0.0001 but must be above 0. Peak learning rate."),
        ("method.dropout", "1", "is 1 but must be below 1. Dropout before A; above 0 costs about 1.2x time."),
        ("serve.port", "70000", "is 70000 but must be at most 65535. Port to listen on."),
        ("train.seed", "4294967296", "is 4294967296 but must be at most 4294967295."
         " Seed of adapters, row order and dropout."),
        # Booleans and nothing.
        ("load.trust_remote_code", "yes", "cannot be 'yes'. Run Python code that comes with the model repository."
         " 'yes' is text here; write true."),
        ("load.trust_remote_code", '"false"', "cannot be 'false'. Run Python code that comes with the model"
         " repository."
         " It stands in quotes and is text; write false without them."),
        ("load.trust_remote_code", "0", "cannot be 0. Run Python code that comes with the model repository."),
        ("train.checkpointing", "Off",
         "cannot be 'Off'. Recompute activations in the backward pass: auto, true, false,"
         " or n for every n-th layer only."
         " 'Off' is text here; write false."),
        ("train.schedule", "NO", "cannot be 'NO'. Learning rate after the warm-up."),
        ("data.limit", "None", "cannot be 'None'. Use only the first rows of the training data."
         " 'None' is text here; write null."),
        ("train.batch_size", "None", "cannot be 'None'. Rows per optimizer step over all devices."),
        ("data.system", "None", "is 'None': this is text; write null for nothing."
         " System message for conversations that bring none."),
        ("model", "", "cannot be empty. Hub id, local folder, .gguf file, or the embedded smollm2-135m."),
        ("data.train", "", "cannot be empty. Training rows: a file or glob (.jsonl, .json, .csv, .tsv, .parquet, also"
         " .gz or .zst), a hub data set, or home-intents; several as a list, or as a mapping to how often each row"
         " is taken."),
        ("data.columns", "{promt: question}", "cannot be 'promt'; did you mean 'prompt'? This toolkit's column names"
         " and the file's, such as {prompt: question, completion: answer}."),
        # A share, a path, or none.
        ("data.eval", "5", "is 5: a share must lie between 0 and 1."
         " Evaluation rows: a share such as 0.05, a path, or none."),
        ("data.eval", "0,05", "is '0,05': this is text and would be a path; write a share as a plain number"
         " such as 0.05."
         " Evaluation rows: a share such as 0.05, a path, or none."),
        ("data.eval", '"0.05"', "is '0.05': this is text and would be a path; write a share as a plain number such as"
         " 0.05. Evaluation rows: a share such as 0.05, a path, or none."),
        ("data.eval", "5%", "is '5%': this is text and would be a path; write a share as a plain number such as 0.05."
         " Evaluation rows: a share such as 0.05, a path, or none."),
        ("data.eval", "NO", "is 'NO': this is text and would be a path; write none for no evaluation rows."
         " Evaluation rows: a share such as 0.05, a path, or none."),
        # Lists and words.
        ("method.targets", "q_proj, v_proj", "cannot be 'q_proj, v_proj'. Linear layers that get an adapter:"
         " qv, attention, attention+mlp, or a list of module names. Write a list as [q_proj, v_proj]."),
        ("method.targets", "q_proj", "cannot be 'q_proj'. Linear layers that get an adapter:"
         " qv, attention, attention+mlp, or a list of module names. Write a list as [q_proj]."),
        ("method.targets", "atention", "cannot be 'atention'; did you mean 'attention'? Linear layers that get an"
         " adapter: qv, attention, attention+mlp, or a list of module names."),
        ("train.report_to", "wandb", "cannot be 'wandb'. Experiment trackers: tensorboard, trackio, wandb, mlflow."
         " Write a list as [wandb]."),
        ("train.optimizer", "adamw_8bits", "cannot be 'adamw_8bits'; did you mean 'adamw_8bit'?"
         " auto, or one of the optimizers listed in the README."),
        ("load.revision", "1.5", "cannot be 1.5. Branch, tag or commit of a hub model."
         " Write it in quotes if it is text: '1.5'."),
        ("train", "3", "cannot be 3. The optimisation."),
        ("data", "rows.jsonl", "cannot be 'rows.jsonl'. The rows."),
    ],
)  # fmt: skip
def test_a_wrong_value_is_named_with_what_to_write(path: str, text: str, message: str) -> None:
    written = field(path, text)
    if path in ("train", "data"):
        written = "\n".join([f"{path}: {text}", *(GOOD.replace(f"{path}:\n  ", "#").splitlines())])
    key = f"{path.rpartition('.')[2]}:"
    line = next(n for n, found in enumerate(written.splitlines(), 1) if found.strip() == f"{key} {text}".strip())
    assert faults(written) == [f"my.yaml:{line}: {path} {message}"]


@pytest.mark.parametrize(("weight", "what"), [("0", "is 0 but must be above 0."), ("yes", "cannot be 'yes'.")])
def test_a_wrong_weight_is_named_with_its_file(weight: str, what: str) -> None:
    [message] = faults(field("data.train", f"{{a.jsonl: 1, b.jsonl: {weight}}}"))
    assert message.startswith(f"my.yaml:6: data.train.b.jsonl {what} Training rows: a file or glob")
    assert message.endswith("how often each row is taken.")


def test_one_fault_inside_a_list_is_one_message() -> None:
    [message] = faults(field("method.targets", "[q_proj, 3]"))
    assert message.startswith("my.yaml:3: method.targets.1 cannot be 3.")
    [message] = faults(field("train.report_to", "[mlflow, tensorbord]"))
    assert message.startswith("my.yaml:8: train.report_to.1 cannot be 'tensorbord'; did you mean 'tensorboard'?")


@pytest.mark.parametrize(
    ("path", "text", "message"),
    [
        ("modle", "x", "'modle' is not known at the top level; did you mean 'model'?"),
        ("trian", "{epochs: 1}", "'trian' is not known at the top level; did you mean 'train'?"),
        ("train.learing_rate", "5.0e-6", "'learing_rate' is not known in 'train'; did you mean 'learning_rate'?"),
        ("method.rnak", "64", "'rnak' is not known in 'method'; did you mean 'rank'?"),
        ("data.max_lenght", "64", "'max_lenght' is not known in 'data'; did you mean 'max_length'?"),
        ("serve.prot", "1", "'prot' is not known in 'serve'; did you mean 'port'?"),
        # The right name at the wrong level.
        ("rank", "8", "'rank' is not known at the top level; it belongs in 'method.rank'."),
        ("learning_rate", "1e-4", "'learning_rate' is not known at the top level; it belongs in"
         " 'train.learning_rate'."),
        ("eval", "0.05", "'eval' is not known at the top level; it belongs in 'data.eval'."),
        ("train.max_length", "64", "'max_length' is not known in 'train'; it belongs in 'data.max_length'."),
        ("method.learning_rate", "1", "'learning_rate' is not known in 'method'; it belongs in"
         " 'train.learning_rate'."),
        ("train.model", "x", "'model' is not known in 'train'; 'model' stands at the top level."),
        # Nothing like it anywhere.
        ("serve.workers", "2", "'workers' is not known in 'serve'; known are host, port."),
        ("flux", "1", "'flux' is not known at the top level;"
         " known are model, load, method, data, train, fast, evaluate, merge, serve."),
    ],
)  # fmt: skip
def test_an_unknown_key_is_named_with_the_nearest(path: str, text: str, message: str) -> None:
    written = field(path, text)
    line = written.splitlines().index(f"{'  ' * path.count('.')}{path.rpartition('.')[2]}: {text}") + 1
    assert faults(written) == [f"my.yaml:{line}: {message}"]


def test_a_misspelt_required_key_is_one_fault() -> None:
    assert faults(GOOD.replace("method:", "methd:")) == [
        "my.yaml:2: 'methd' is not known at the top level; did you mean 'method'?"
    ]
    assert faults(GOOD.replace("  train:", "  trian:")) == [
        "my.yaml:6: 'trian' is not known in 'data'; did you mean 'train'?"
    ]
    assert faults(GOOD.replace("kind:", "knd:")) == [
        "my.yaml:3: 'knd' is not known in 'method'; did you mean 'kind'?"
    ]


def test_what_is_missing_is_described() -> None:
    assert faults("method: {kind: full}\ndata:\n  eval: none\n") == [
        "my.yaml: 'model' is missing. Hub id, local folder, .gguf file, or the embedded smollm2-135m.",
        "my.yaml:2: 'data.train' is missing. Training rows: a file or glob (.jsonl, .json, .csv, .tsv, .parquet, also"
        " .gz or .zst), a hub data set, or home-intents; several as a list, or as a mapping to how often each row is"
        " taken.",
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("kind: lroa", "my.yaml:3: method.kind is 'lroa'; it must be full, lora or qlora."),
        ("kind: LoRA", "my.yaml:3: method.kind is 'LoRA'; it must be full, lora or qlora."),
        ("kind: 3", "my.yaml:3: method.kind is 3; it must be full, lora or qlora."),
        ("alpha: 3", "my.yaml:2: method.kind is missing; it must be full, lora or qlora."),
    ],
)
def test_an_unknown_kind(line: str, message: str) -> None:
    assert faults(GOOD.replace("kind: lora", line)) == [message]


@pytest.mark.parametrize("text", ["kind:", "kind: [lora]"])
def test_a_kind_that_is_no_word(text: str) -> None:
    [message] = faults(GOOD.replace("kind: lora", text))
    assert "full, lora or qlora" in message


def test_a_method_that_is_only_a_word() -> None:
    [message] = faults("model: m\nmethod: lora\ndata: {train: x}\n")
    assert message.startswith("my.yaml:2: method cannot be 'lora'. full, lora or qlora with their settings.")


def test_a_duplicate_key() -> None:
    assert faults(GOOD + "  batch_size: 2\n") == ["my.yaml:9: key 'batch_size' is written twice, first on line 8."]


def test_every_fault_is_told_at_once_in_the_order_of_the_file() -> None:
    text = """\
model: 7
method:
  kind: qlora
  rnak: 64
  dropout: 0,05
lora_dropout: 0.1
data:
  train: rows.jsonl
  eval: 2
  limit: 010
train:
  epochs: 0
  batch_size: 4
  batch_size: "8"
  seed: yes
"""
    found = faults(text, "train.keep=0", "data.nothing=1", "what")
    assert [message.partition(": ")[0] for message in found] == [
        *[f"my.yaml:{line}" for line in (1, 4, 5, 6, 9, 10, 12, 14, 15)],
        *["--set train.keep=0", "--set data.nothing=1", "--set what"],
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "my.yaml: the file is empty."),
        ("# nothing yet\n", "my.yaml: the file is empty."),
        ("- a\n- b\n", "my.yaml:1: a recipe is a list of `key: value` lines, and this is a list."),
        ("gemma2b-qlora\n", "my.yaml:1: a recipe is a list of `key: value` lines, and this is 'gemma2b-qlora'."),
        ("model: a\nmethod: [1, 2\n", "my.yaml:3: this is not YAML: expected ',' or ']', but got '<stream end>'."),
        ("&x [*x]", "my.yaml:1: an alias contains itself."),
    ],
)
def test_files_that_are_no_recipe(text: str, message: str) -> None:
    assert faults(text) == [message]


def test_a_self_referencing_alias_ends_in_a_message() -> None:
    found = faults(GOOD + "load: &loop\n  revision: *loop\n")
    assert found[0] == "my.yaml:9: an alias contains itself."


# ------------------------------------------------------------------------------------------------------------- --set


def test_set_replaces_and_creates() -> None:
    recipe = read(
        GOOD,
        "train.batch_size=8",
        "train.learning_rate=1e-4",
        "load.dtype=float16",
        "evaluate.data=home-intents:test",
        "data.train=a=b.jsonl",
        "method.targets=[q_proj]",
        "data.eval=none",
        "train.batch_size=32",
    )
    assert (recipe.train.batch_size, recipe.train.learning_rate) == (32, 0.0001)
    assert recipe.load.dtype == "float16"
    assert recipe.evaluate is not None
    assert recipe.evaluate.data == "home-intents:test"
    assert (recipe.data.train, recipe.data.eval) == ("a=b.jsonl", None)
    assert isinstance(recipe.method, LoRA)
    assert recipe.method.targets == ["q_proj"]


def test_set_can_replace_a_whole_block_and_mend_a_file() -> None:
    assert read(GOOD, "method={kind: full}").method == Full(kind="full")
    assert read(GOOD.replace("model: some/model\n", ""), "model=other/model").model == "other/model"
    assert read(field("train.epochs", "yes"), "train.epochs=2").train.epochs == 2


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.bach_size=8", "'bach_size' is not known in 'train'; did you mean 'batch_size'?"),
        ("trian.batch_size=8", "'trian' is not known at the top level; did you mean 'train'?"),
        ("rank=8", "'rank' is not known at the top level; it belongs in 'method.rank'."),
        ("train.batch_size='8'", "train.batch_size cannot be '8'. Rows per optimizer step over all devices."
         " It stands in quotes and is text; write 8 without them."),
        ("train.batch_size=8.0", "train.batch_size cannot be 8.0. Rows per optimizer step over all devices."
         " Write 8."),
        ("train.batch_size=", "train.batch_size cannot be empty. Rows per optimizer step over all devices."),
        ("train.batch_size", "this is not of the form a.b=c."),
        ("=8", "this is not of the form a.b=c."),
        ("train..epochs=8", "this is not of the form a.b=c."),
        ("train.batch_size.x=1", "'train.batch_size' is 4 and has no fields."),
        ("model.x=1", "'model' is 'some/model' and has no fields."),
        ("train.seed=010", "'010' starts with a zero and could mean two numbers; write 10, or '010' in"
         " quotes for text."),
        ("method.kind=lroa", "method.kind is 'lroa'; it must be full, lora or qlora."),
        ("method.kind=full", "'rank' is not known in 'method'; known are kind."),
    ],
)  # fmt: skip
def test_set_is_as_strict_as_the_file(override: str, message: str) -> None:
    place = "my.yaml:4" if override == "method.kind=full" else f"--set {override}"
    assert faults(GOOD, override) == [f"{place}: {message}"]


# ----------------------------------------------------------------------------------------------------------- by name


def test_shipped_recipes_are_found_by_name_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert len(shipped_recipes()) == 15
    assert find_recipe("gemma2b-qlora").name == "gemma2b-qlora.yaml"
    assert load_recipe("gemma2b-qlora").model == "google/gemma-2-2b"


def test_a_recipe_of_ones_own_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("recipes").mkdir()
    Path("recipes/gemma2b-qlora.yaml").write_text(GOOD)
    assert load_recipe("gemma2b-qlora").model == "some/model"
    assert load_recipe(Path("recipes/gemma2b-qlora.yaml")).model == "some/model"
    assert load_recipe(f".{os.sep}recipes/gemma2b-qlora.yaml", ["model=x"]).model == "x"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gemma2b-qlra", "There is no recipe named 'gemma2b-qlra'. Did you mean 'gemma2b-qlora'?"
         " `finetune recipes` lists them."),
        ("xyz", "There is no recipe named 'xyz'. `finetune recipes` lists them."),
        ("no/such.yaml", "There is no recipe file no/such.yaml. Check the path, or write one with `finetune init`."),
        ("gone.yaml", "There is no recipe file gone.yaml. Check the path, or write one with `finetune init`."),
    ],
)  # fmt: skip
def test_no_such_recipe(name: str, message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe(name)
    assert str(caught.value) == message


def test_a_file_with_a_byte_order_mark_is_read_and_one_that_is_no_text_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_bytes(b"\xef\xbb\xbf" + GOOD.replace("\n", "\r\n").encode())
    assert load_recipe(file) == read(GOOD)
    file.write_bytes(b"model: \xff\xfe\n")
    with pytest.raises(RecipeError, match=r"a\.yaml cannot be read: .*utf-8.*UTF-8 text\."):
        load_recipe(file)


# --------------------------------------------------------------------------------------------------------- round trip

TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12).filter(lambda text: text != "None")
NAMES = st.sampled_from(["google/gemma-2-2b", "1e-4", "007", "7e12345", "true", "~", "a #b", "x: y", "été"]) | TEXT
ADAPTER = {
    "rank": st.integers(1, 4096),
    "alpha": st.floats(1e-3, 1e6),
    "dropout": st.floats(0, 1, exclude_max=True),
    "targets": st.sampled_from(["qv", "attention", "attention+mlp"]) | st.lists(NAMES, min_size=1, max_size=3),
    "variant": st.sampled_from(["lora", "rslora", "dora"]),
}
METHODS = (
    st.just(Full(kind="full"))
    | st.builds(LoRA, kind=st.just("lora"), **ADAPTER)
    | st.builds(QLoRA, kind=st.just("qlora"), double_quant=st.booleans(), **ADAPTER)
)


@st.composite
def recipes(draw: st.DrawFn) -> Recipe:
    small = st.integers(1, 10**9)
    return Recipe.model_validate(
        {
            "model": draw(NAMES),
            "method": draw(METHODS),
            "load": {"revision": draw(st.none() | NAMES), "trust_remote_code": draw(st.booleans())},
            "data": {
                "train": draw(NAMES | st.lists(NAMES, min_size=1, max_size=3)),
                "eval": draw(st.none() | st.floats(1e-9, 0.999) | st.sampled_from(["held.jsonl", "1e-4", "true"])),
                "system": draw(st.none() | NAMES),
                "limit": draw(st.none() | small),
            },
            "train": {
                "epochs": draw(st.floats(1e-6, 1e300)),
                "learning_rate": draw(st.floats(0, 1, exclude_min=True)),
                "micro_batch": draw(st.just("auto") | small),
                "checkpointing": draw(st.just("auto") | st.booleans()),
                "seed": draw(st.integers(0, 2**32 - 1)),
                "report_to": draw(st.lists(st.sampled_from(["wandb", "mlflow"]), unique=True)),
            },
            "evaluate": draw(st.none() | st.builds(dict, data=NAMES)),
        }
    )


@given(recipes())
def test_a_written_recipe_reads_back_the_same(recipe: Recipe) -> None:
    assert parse_recipe(dump_recipe(recipe)) == recipe


@pytest.mark.parametrize("name", sorted(shipped_recipes()))
def test_shipped_recipes_read_back_the_same(name: str) -> None:
    recipe = load_recipe(name)
    assert parse_recipe(dump_recipe(recipe)) == recipe


def test_the_schema_describes_every_field_in_one_sentence() -> None:
    document = schema()
    seen = 0
    for part in [document, *document["$defs"].values()]:
        assert part["additionalProperties"] is False
        for name, described in part["properties"].items():
            seen += 1
            shared = document["$defs"].get(described.get("$ref", "").rpartition("/")[2], {})
            assert described.get("description", shared.get("description", "")).endswith("."), name
    assert seen > 50
    assert document["required"] == ["model", "method", "data"]
    json.dumps(document)
