"""`finetune plan` from all sides, through the command itself."""

from __future__ import annotations

import json
import subprocess
import sys
import xml.etree.ElementTree
from pathlib import Path
from typing import Any

import pytest

from finetune.recipe import load_recipe

ROWS = [
    {"messages": [{"role": "user", "content": "Say hi."}, {"role": "assistant", "content": "hi " * n}]}
    for n in (1, 2, 3, 40)
]


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    code = "import sys; from finetune.cli import main; sys.argv[0] = 'finetune'; main()"
    return subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, cwd=folder, timeout=300, check=False
    )


def document(folder: Path, *words: str, code: int = 0) -> Any:
    done = run(folder, *words, "--json")
    assert done.returncode == code, done.stderr
    return json.loads(done.stdout)


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
    return file


def test_a_recipe_that_does_not_fit_is_changed_until_it_does(tmp_path: Path) -> None:
    found = document(tmp_path, "plan", "llama7b-full", "--device", "24GB", "--fit", "small.yaml")
    assert not found["fits"]
    assert found["total_with_changes"] <= 24e9 < found["total"]
    changes = [change["field"] for change in found["changes"]]
    assert changes[0] == "train.optimizer"  # the cheapest first
    assert set(found["needed"]) <= set(changes)
    again = document(tmp_path, "plan", "small.yaml", "--device", "24GB")
    assert again["fits"]
    assert again["total"] == found["total_with_changes"]
    changed = load_recipe(tmp_path / "small.yaml")
    assert (changed.method.kind, changed.load.dtype) == ("lora", "bfloat16")
    refused = run(tmp_path, "plan", "llama7b-full", "--device", "24GB", "--fit", "small.yaml")
    assert (refused.returncode, refused.stderr) == (
        2, "finetune: small.yaml exists already.\nName another file, or remove it.\n",
    )  # fmt: skip


def test_what_does_not_fit_ends_with_3_and_its_remedies(tmp_path: Path) -> None:
    done = run(tmp_path, "plan", "llama7b-lora", "--device", "12GB")
    assert done.returncode == 3
    assert "does not fit" in done.stdout
    assert "method" in done.stdout
    assert "Traceback" not in done.stderr


def test_a_model_too_large_for_any_change_says_so(tmp_path: Path) -> None:
    done = run(tmp_path, "plan", "llama7b-qlora", "--device", "3GB")
    assert done.returncode == 3
    assert "take a smaller model" in done.stderr


def test_comparison(tmp_path: Path) -> None:
    words = ("plan", "gemma2b-qlora", "--device", "24GB", "--rank", "4,16", "--set", "train.optimizer=adamw_torch")
    compared = document(tmp_path, *words)["compared"]
    assert [(row["method"], row["rank"]) for row in compared] == [
        ("full", None), *[(kind, rank) for kind in ("lora", "qlora") for _ in range(3) for rank in (4, 16)],
    ]  # fmt: skip
    full = compared[0]
    assert full["trainable"] == 2_614_341_888
    assert full["static"] == 16 * 2_614_341_888
    qv = next(row for row in compared if (row["method"], row["targets"], row["rank"]) == ("lora", "qv", 4))
    assert qv["trainable"] == 4 * 26 * (2304 + 2048 + 2304 + 1024)
    assert qv["adapter_file"] == 4 * qv["trainable"]
    assert 24 in qv["fits"] + qv["fits_recomputing"]
    assert run(tmp_path, "plan", "gemma2b-qlora", "--compare", "--device", "8GB").returncode == 0


def test_a_13b_model_against_a_24_gb_card(tmp_path: Path) -> None:
    words = ("plan", "llama7b-lora", "--set", "model=meta-llama/Llama-2-13b-hf", "--device", "24GB", "--compare")
    rows = {(row["method"], row["targets"]): row for row in document(tmp_path, *words)["compared"]}
    full, lora, qlora = (
        rows["full", "every weight"], rows["lora", "attention+mlp"], rows["qlora", "attention+mlp"],
    )  # fmt: skip
    n, packed = 13_015_864_320, 40 * (4 * 5120 * 5120 + 3 * 5120 * 13824)
    trained = 16 * 40 * (4 * 2 * 5120 + 3 * (5120 + 13824))
    assert lora["trainable"] == qlora["trainable"] == trained
    assert full["static"] > 16 * n - 1e6
    assert lora["static"] == pytest.approx(2 * n + 16 * trained, rel=1e-3)
    assert 0.515 * packed < qlora["static"] < 0.53 * packed + 2 * (n - packed) + 16 * trained
    assert 24 not in full["fits"] + full["fits_recomputing"]
    assert 24 not in lora["fits"] + lora["fits_recomputing"]
    assert 24 in qlora["fits"] + qlora["fits_recomputing"]


def test_gpt3_in_the_lora_paper(tmp_path: Path) -> None:
    """1.2 TB down to 350 GB: the paper's table 4 setting, whose 350 GB are the 16-bit weights."""
    words = ("plan", "llama7b-lora-qv", "--set", "model=gpt3-175b", "--set", "method.rank=4", "--device", "141GB")
    found = document(tmp_path, *words, "--compare")
    assert found["parameters"] == 174_604_259_328
    lora = next(row for row in found["compared"] if (row["method"], row["targets"]) == ("lora", "qv"))
    assert lora["static"] == pytest.approx(350e9, rel=0.01)
    assert 6 * found["parameters"] < 1.2e12 < 8 * found["parameters"]


def test_several_gpus(tmp_path: Path) -> None:
    found = document(tmp_path, "plan", "llama7b-full", "--device", "a100-80gb", "--gpus", "8", code=3)
    n = 6_738_415_616
    assert found["per_gpu"]["ddp"]["optimizer"] >= 8 * n
    assert found["per_gpu"]["zero2"]["optimizer"] == pytest.approx(8 * n / 8, rel=1e-5)
    assert found["per_gpu"]["fsdp2"]["gradients"] == pytest.approx(4 * n / 8, rel=1e-5)


def test_the_rows_that_lie_here_count(tmp_path: Path, rows: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("model: smollm2-135m\nmethod: {kind: lora}\ndata: {train: rows.jsonl}\n", encoding="utf-8")
    known = document(tmp_path, "plan", "mine.yaml")
    assert known["lengths"]["rows"] == 4
    assert known["lengths"]["longest"] < 200
    assert sum(count for _, count in known["lengths"]["histogram"]) == 4
    unknown = document(tmp_path, "plan", "mine.yaml", "--rows", "none")
    assert unknown["lengths"] is None
    assert known["allocated"] < unknown["allocated"]
    named = document(tmp_path, "plan", "smollm2-lora", "--rows", str(rows))
    assert named["lengths"]["rows"] == 4


def test_files(tmp_path: Path) -> None:
    done = run(tmp_path, "plan", "gemma2b-qlora", "--device", "24GB", "--svg", "plan.svg", "--html", "plan.html")
    assert done.returncode == 0, done.stderr
    xml.etree.ElementTree.parse(tmp_path / "plan.svg")
    assert "2,614,341,888" in (tmp_path / "plan.html").read_text(encoding="utf-8")


def test_a_trace_beside_the_plan(tmp_path: Path) -> None:
    found = document(tmp_path, "plan", "smollm2-lora", "--simulate", "--set", "data.max_length=64")
    assert found["simulated"]["peak"] == pytest.approx(found["allocated"], rel=0.01)
    shown = run(tmp_path, "plan", "smollm2-lora", "--simulate", "--set", "data.max_length=64").stdout
    assert "simulated" in shown


def test_two_real_steps_beside_the_plan(tmp_path: Path) -> None:
    found = document(tmp_path, "plan", "smollm2-lora", "--verify", "--set", "data.max_length=32")
    measured = found["measured"]
    assert abs(measured["difference"]) < 0.02
    assert measured["batch"]["length"] == 4 * 31  # the last token of a row predicts nothing and is not run
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "what", "hint"),
    [
        (["--device", "rtx4900"], "'rtx4900' is neither a size nor a known card.", "Did you mean"),
        (["--device", "24"], "'24' has no unit.", "Write 24GB"),
        (["--rank", "4,x"], "--rank 4,x is no list of ranks.", "Write whole numbers"),
        (["--rows", "gone.jsonl"], "gone.jsonl", ""),
        (["--set", "model=./gone"], "There is no folder ./gone.", "Check the path"),
        (["--set", "method.targets=[q_porj]"], "method.targets names 'q_porj'", "Did you mean 'q_proj'"),
        (["--device", "24GB", "--verify"], "--verify runs on this machine's", "Leave --device and --gpus out."),
    ],
)
def test_bad_input_is_two_sentences(tmp_path: Path, words: list[str], what: str, hint: str) -> None:
    done = run(tmp_path, "plan", "smollm2-lora", *words)
    assert done.returncode == 2, done.stderr
    assert what in done.stderr
    assert hint in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 2
