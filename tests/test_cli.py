"""The door as a user meets it: child processes, exit codes, two sentences on stderr, one JSON document on stdout."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import finetune
from finetune.facts import read_facts
from finetune.recipe import parse_recipe, shipped_recipes
from finetune.run import open_or_create
from tests.test_facts import CONFIG, gguf, write_model

GOOD = "model: smollm2-135m\nmethod: {kind: lora}\ndata: {train: home-intents}\n"


class Door:
    """`python -m finetune` in an empty folder, without a network and without a terminal."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        hidden = ("RANK", "WORLD_SIZE", "FORCE_COLOR", "COLUMNS")
        self.environment = {name: value for name, value in os.environ.items() if name not in hidden}
        self.environment |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "hub"), "NO_COLOR": "1", "TERM": "dumb"}

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.python("-m", "finetune", *arguments)

    def python(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *arguments]
        return subprocess.run(
            command, cwd=self.folder, env=self.environment, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=120,
        )  # fmt: skip

    def said(self, *arguments: str) -> str:
        """What a command that worked wrote."""
        done = self.run(*arguments)
        assert (done.returncode, done.stderr) == (0, ""), done.stderr
        return done.stdout

    def document(self, *arguments: str) -> Any:
        return json.loads(self.said(*arguments))

    def refused(self, code: int, *arguments: str) -> list[str]:
        """The lines on stderr of a command that was refused."""
        done = self.run(*arguments)
        assert done.returncode == code, done.stderr
        assert "Traceback" not in done.stderr
        assert done.stderr.startswith("finetune: ")
        lines = done.stderr.removeprefix("finetune: ").splitlines()
        assert all(line.endswith((".", "?")) for line in lines), lines
        return lines


@pytest.fixture
def door(tmp_path: Path) -> Door:
    return Door(tmp_path)


# ------------------------------------------------------------------------------------------------------------ answers


def test_version_and_help(door: Door) -> None:
    assert door.said("--version") == f"{finetune.__version__}\n"
    text = door.said("--help")
    way, ground = text.index("The way of a run"), text.index("The ground")
    assert 0 < way < ground
    shown = re.findall(r"^\W*([a-z]+)  ", text[way:], re.MULTILINE)
    assert shown == [
        "init", "plan", "data", "train", "eval", "chat", "merge", "serve", "infer", "export",
        "recipes", "facts", "runs", "schema", "launch",
    ]  # fmt: skip


def test_without_arguments_it_helps(door: Door) -> None:
    done = door.run()
    assert "The way of a run" in done.stdout + done.stderr


def test_recipes(door: Door) -> None:
    found = door.document("recipes", "--json")
    assert list(found) == list(shipped_recipes())
    assert found["gemma2b-qlora"][0] == "QLoRA, 4-bit base with rank 16 on attention and MLP, of Gemma 2 2B."
    text = door.said("recipes")
    assert all(name in text for name in found)


def test_facts(door: Door) -> None:
    document = door.document("facts", "google/gemma-2-2b", "--json")
    assert document == read_facts("google/gemma-2-2b").document()
    text = door.said("facts", "google/gemma-2-2b")
    for group, share in (("embedding", "22.6 %"), ("attention", "14.1 %"), ("MLP", "63.4 %")):
        assert re.search(rf"{group} .* {share}", text)
    folder = write_model(door.folder / "mine")
    assert door.document("facts", folder, "--json")["source"] == "local folder"


FACTS = """
import sys
from finetune.cli import main
for model in sys.argv[1:]:
    sys.argv = ["finetune", "facts", model]
    try:
        main()
    except SystemExit as stop:
        print("exit", stop.code or 0)
    heavy = ("torch", "transformers", "datasets", "trl", "peft", "numpy", "finetune.plan")
    print("loaded", [name for name in heavy if name in sys.modules])
"""


def test_facts_load_nothing_heavy(door: Door) -> None:
    """Of a bundled model, a folder, a GGUF file and one on the hub, which cannot be reached here."""
    models = ["smollm2-135m", write_model(door.folder / "mine"), str(gguf(door.folder / "mine.gguf")), "org/model"]
    done = door.python("-c", FACTS, *models)
    lines = [line for line in done.stdout.splitlines() if line.startswith(("exit", "loaded"))]
    assert lines == ["exit 0", "loaded []"] * 3 + ["exit 2", "loaded []"]
    what, hint = done.stderr.splitlines()
    assert what.startswith("finetune: The hub could not be reached for org/model")
    assert hint.startswith("Check the connection, or name a local folder;")


def test_facts_of_what_is_no_model(door: Door) -> None:
    mine = Path(write_model(door.folder / "mine", {**CONFIG, "vocab_size": 32_000}))
    assert door.refused(2, "facts", "mine") == [
        "mine says vocab_size 32,000 in its config.json, and its embedding has 12 rows.",
        "The weights are another model's; download or save both again.",
    ]
    (mine / "model.safetensors").unlink()
    assert door.refused(2, "facts", "mine", "--json") == [
        "There are no safetensors weights in mine.",
        "Download it whole: model.safetensors, or model.safetensors.index.json and its shards.",
    ]
    assert door.refused(2, "facts", "./gone") == [
        "There is no folder ./gone.", "Check the path, or name a hub model as owner/name.",
    ]  # fmt: skip
    assert door.refused(2, "facts", "mine", "--revision", "main") == [
        "mine does not come from the hub, so it has no revision 'main'.", "Leave the revision out.",
    ]  # fmt: skip


def test_schema(door: Door) -> None:
    document = door.document("schema")
    assert document["title"] == "finetune recipe"
    assert set(document["properties"]) >= {"model", "method", "data", "train"}


def test_plan(door: Door) -> None:
    document = door.document("plan", "gemma2b-qlora", "--device", "24GB", "--set", "train.micro_batch=1", "--json")
    assert document["fits"] is True
    assert (
        document["total"] == sum(document["buckets"].values()) == sum(line["at_peak"] for line in document["lines"])
    )
    assert document["device"]["memory"] == 24 * 10**9
    assert "train.micro_batch" not in [choice["field"] for choice in document["choices"]]
    text = door.said("plan", "gemma2b-qlora", "--device", "24GB")
    assert "2,614,341,888 parameters" in text
    assert "fits" in text
    assert "does not fit" not in text


def test_runs(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    assert door.document("runs", "--json") == []
    monkeypatch.chdir(door.folder)
    open_or_create(parse_recipe(GOOD), "x", Path("runs/first"))
    done, _ = open_or_create(parse_recipe(GOOD), "x", Path("runs/second"))
    done.write("result.json", {"steps": 12, "loss": 1.25})
    assert door.document("runs", "--json") == [
        {"run": "first", "finished": False},
        {"run": "second", "finished": True, "steps": 12, "loss": 1.25},
    ]
    lines = [line.split() for line in door.said("runs").splitlines()]
    assert lines[1:] == [["first", "unfinished"], ["second", "finished", "12", "1.250"]]


def test_init_writes_what_plan_reads(door: Door) -> None:
    assert door.said("init") == "Wrote recipe.yaml; next: finetune plan recipe.yaml\n"
    assert door.document("plan", "recipe.yaml", "--device", "24GB", "--json")["model"] == "smollm2-135m"
    assert door.refused(2, "init") == ["recipe.yaml is there already.", "Give another name, or remove it first."]


@pytest.mark.parametrize("kind", ["full", "lora", "qlora"])
def test_init_takes_flags(door: Door, kind: str) -> None:
    door.said(
        "init",
        "my.yaml",
        "--model",
        "google/gemma-2-2b",
        "--method",
        kind,
        "--data",
        "rows #1.jsonl",
        "--targets",
        "qv",
    )
    document = door.document("plan", "my.yaml", "--device", "80GB", "--json")
    assert (document["model"], document["method"]) == ("google/gemma-2-2b", kind)


# --------------------------------------------------------------------------------------------------------- exit codes


def test_a_wrong_recipe(door: Door) -> None:
    (door.folder / "my.yaml").write_text(GOOD + "trian: {epochs: 1}\nload: {dtype: flaot16}\n")
    assert door.refused(2, "plan", "my.yaml", "--set", "train.seed=yes") == [
        "my.yaml:4: 'trian' is not known at the top level; did you mean 'train'?",
        "my.yaml:5: load.dtype cannot be 'flaot16'; did you mean 'float16'?"
        " Type of the weights in memory: auto, float32, bfloat16 or float16.",
        "--set train.seed=yes: train.seed cannot be 'yes'. Seed of adapters, row order and dropout.",
        "Correct these 3 lines; `finetune schema` shows every field.",
    ]


@pytest.mark.parametrize(
    ("arguments", "lines"),
    [
        (["plan", "gone.yaml"], ["There is no recipe file gone.yaml.",
                                 "Check the path, or write one with `finetune init`."]),
        (["plan", "gemma2b-qlor"], ["There is no recipe named 'gemma2b-qlor'.",
                                    "Did you mean 'gemma2b-qlora'? `finetune recipes` lists them."]),
        (["plan", "smollm2-lora", "--device", "24"], ["'24' has no unit.",
                                                      "Write 24GB (1e9 bytes) or 24GiB (2**30 bytes)."]),
        (["plan", "smollm2-lora", "--json", "--set", "train.batch_size=5", "--set", "train.micro_batch=4"], [
            "train.batch_size 5 is no multiple of 4 rows x 1 devices.",
            "Set train.batch_size to 4 or 8, or give another train.micro_batch."]),
        (["train"], ["`train` takes a RECIPE or --resume RUN.", "Write `finetune train smollm2-lora`, for example."]),
        (["train", "--resume", "gone"], ["There is no run folder gone.",
                                         "There is no run in ./runs yet; `finetune train` makes one."]),
        (["launch", "-n", "2", "plan", "x"], ["`launch` starts `finetune train ...`.",
                                              "Write `finetune launch -n 2 train RECIPE`."]),
        (["init", "--method", "lroa"], ["recipe.yaml:6: method.kind is 'lroa'; it must be full, lora or qlora.",
                                        "Correct this line; `finetune schema` shows every field."]),
    ],
)  # fmt: skip
def test_wrong_input_is_two_sentences_and_exit_2(door: Door, arguments: list[str], lines: list[str]) -> None:
    assert door.refused(2, *arguments) == lines
    assert list(door.folder.iterdir()) == []


def test_an_unknown_command_or_option_is_exit_2(door: Door) -> None:
    for arguments in (["trian"], ["plan"], ["plan", "smollm2-lora", "--devise", "x"]):
        done = door.run(*arguments)
        assert done.returncode == 2
        assert "Traceback" not in done.stderr
        assert done.stdout == ""


def test_what_does_not_fit_is_shown_and_exit_3(door: Door) -> None:
    what, hint = door.refused(3, "plan", "llama7b-full", "--device", "24GB")
    assert what.startswith("full of meta-llama/Llama-2-7b-hf needs 12")
    assert hint.startswith("`finetune plan` lists what would make it fit")
    done = door.run("plan", "llama7b-full", "--device", "24GB", "--json")
    assert done.returncode == 3
    assert json.loads(done.stdout)["fits"] is False
    assert "does not fit" in door.run("plan", "llama7b-full", "--device", "24GB").stdout


def test_debug_shows_the_traceback(door: Door) -> None:
    done = door.run("--debug", "plan", "gone.yaml")
    assert done.returncode != 0
    assert "Traceback" in done.stderr
    assert "RecipeError" in done.stderr


TWICE = """
import sys
from finetune.cli import main
for words in (["train", "gemma2b-qlora"], ["train", "smollm2-lora", "--output", "mine"]):
    sys.argv = ["finetune", *words]
    try:
        main()
    except SystemExit as stop:
        sys.stderr.write(f"exit {stop.code}\\n")
"""


def test_train_is_refused_before_anything_is_written(door: Door) -> None:
    """One process for both, since importing the training libraries takes most of the time."""
    mine = door.folder / "mine"
    mine.mkdir()
    (mine / "notes.txt").write_text("dear to somebody")
    done = door.python("-c", TWICE)
    what, hint, code, *rest = done.stderr.splitlines()
    assert what.startswith("finetune: The model google/gemma-2-2b is not on this machine")
    assert re.search("`hf (auth login|download google/gemma-2-2b)`", hint)
    assert "https://huggingface.co/google/gemma-2-2b" in hint
    assert code == "exit 2"
    assert rest == [
        "finetune: mine is not empty and holds no run.", "Give a folder that is new or empty.", "exit 2",
    ]  # fmt: skip
    assert sorted(path.name for path in door.folder.iterdir() if path.name != "hub") == ["mine"]
    assert [file.name for file in mine.iterdir()] == ["notes.txt"]
