"""Whatever is wrong with the input: exit code 2, two sentences, no traceback, nothing left behind."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from finetune import cli
from tests.flow.conftest import recipe_text, write_rows

Case = Callable[[Path, Path, Path], str]


def no_such_rows(base: Path, rows: Path, tmp: Path) -> str:
    return recipe_text(base, tmp / "nothing.jsonl")


def a_folder_as_rows(base: Path, rows: Path, tmp: Path) -> str:
    (tmp / "folder.jsonl").mkdir()
    return recipe_text(base, tmp / "folder.jsonl")


def empty_rows(base: Path, rows: Path, tmp: Path) -> str:
    (tmp / "empty.jsonl").touch()
    return recipe_text(base, tmp / "empty.jsonl")


def binary_rows(base: Path, rows: Path, tmp: Path) -> str:
    (tmp / "b.jsonl").write_bytes(b"\xff\xfe\x00\x01" * 10)
    return recipe_text(base, tmp / "b.jsonl")


def no_known_column(base: Path, rows: Path, tmp: Path) -> str:
    return recipe_text(base, write_rows(tmp / "c.jsonl", [{"question": "Hi", "reply": "Ho"}]))


def a_column_that_is_not_there(base: Path, rows: Path, tmp: Path) -> str:
    return recipe_text(base, rows, data="format: alpaca")


def rows_too_long(base: Path, rows: Path, tmp: Path) -> str:
    long = [{"prompt": "Hi", "completion": "word " * 400}]
    return recipe_text(base, write_rows(tmp / "l.jsonl", long))


def no_weights(base: Path, rows: Path, tmp: Path) -> str:
    shutil.copytree(base, tmp / "bare", ignore=shutil.ignore_patterns("*.safetensors*"))
    return recipe_text(tmp / "bare", rows)


def a_cut_shard(base: Path, rows: Path, tmp: Path) -> str:
    shutil.copytree(base, tmp / "cut")
    shard = next((tmp / "cut").glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-100])
    return recipe_text(tmp / "cut", rows)


def no_config(base: Path, rows: Path, tmp: Path) -> str:
    shutil.copytree(base, tmp / "bare", ignore=shutil.ignore_patterns("config.json"))
    return recipe_text(tmp / "bare", rows)


def no_such_model(base: Path, rows: Path, tmp: Path) -> str:
    return recipe_text(tmp / "nowhere", rows)


def no_tokenizer(base: Path, rows: Path, tmp: Path) -> str:
    shutil.copytree(base, tmp / "mute", ignore=shutil.ignore_patterns("tokenizer*", "*.jinja", "special*"))
    return recipe_text(tmp / "mute", rows)


def rank_zero(base: Path, rows: Path, tmp: Path) -> str:
    return recipe_text(base, rows, "{kind: lora, rank: 0}")


def no_such_target(base: Path, rows: Path, tmp: Path) -> str:
    return recipe_text(base, rows, "{kind: lora, targets: [q_porj]}")


def an_unknown_key(base: Path, rows: Path, tmp: Path) -> str:
    return recipe_text(base, rows, rest="learning_rate: 1e-3\n")


def a_tracker_that_is_missing(base: Path, rows: Path, tmp: Path) -> str:
    return recipe_text(base, rows, train="report_to: [mlflow]")


def evaluation_rows_that_are_missing(base: Path, rows: Path, tmp: Path) -> str:
    return recipe_text(base, rows, rest=f"evaluate: {{data: {tmp / 'none.jsonl'}}}\n")


CASES: dict[Case, str] = {
    no_such_rows: "nothing.jsonl",
    a_folder_as_rows: "folder.jsonl",
    empty_rows: "empty.jsonl",
    binary_rows: "b.jsonl",
    no_known_column: "question",
    a_column_that_is_not_there: "instruction",
    rows_too_long: "128",
    no_weights: "bare",
    a_cut_shard: "safetensors",
    no_config: "config.json",
    no_such_model: "nowhere",
    no_tokenizer: "tokenizer",
    rank_zero: "rank is 0",
    no_such_target: "q_porj",
    an_unknown_key: "train.learning_rate",
    a_tracker_that_is_missing: "mlflow",
    evaluation_rows_that_are_missing: "none.jsonl",
}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_refused_in_two_sentences(
    case: Case,
    base: Path,
    rows: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.yaml").write_text(case(base, rows, tmp_path))
    before = sorted(path for path in tmp_path.rglob("*"))
    code, errors = call(["train", "r.yaml"], monkeypatch, capsys)
    assert code == 2, errors
    assert CASES[case] in errors
    assert "Traceback" not in errors
    assert len([line for line in errors.splitlines() if line.strip()]) >= 2  # what is so, and what to do
    assert sorted(path for path in tmp_path.rglob("*")) == before


def call(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> tuple[int, str]:
    monkeypatch.setattr("sys.argv", ["finetune", *arguments])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    return int(stop.value.code or 0), capsys.readouterr().err


def test_an_output_in_use_is_refused(
    base: Path, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.yaml").write_text(recipe_text(base, rows))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("precious")
    code, errors = call(["train", "r.yaml", "--output", "mine"], monkeypatch, capsys)
    assert code == 2
    assert "holds no run" in errors
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize("command", [["merge", "no-run"], ["eval", "no-run"], ["train", "--resume", "no-run"]])
def test_a_missing_run_is_named(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    code, errors = call(command, monkeypatch, capsys)
    assert code == 2
    assert "no-run" in errors


def test_json_stays_one_document(
    base: Path, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.yaml").write_text(recipe_text(base, rows, train="steps: 1"))
    monkeypatch.setattr("sys.argv", ["finetune", "train", "r.yaml", "--output", "out", "--json"])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert not stop.value.code
    assert json.loads(capsys.readouterr().out)["steps"] == 1
