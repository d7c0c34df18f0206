"""A run knows the weights it was trained on: beside others that look the same, nothing is merged, served or asked."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from finetune.errors import RunError
from finetune.merge import merge
from finetune.run import Run
from finetune.train import train
from finetune.weight_files import fingerprint, read_model
from tests.command import finetune
from tests.flow.conftest import recipe, write_rows
from tests.tiny import tiny_model

COMMANDS: dict[str, list[str]] = {
    "merge": [], "chat": [], "serve": ["--port", "18999"], "export": ["--to", "vllm"],
    "infer": ["--rows", "questions.jsonl", "--out", "answers.jsonl"],
}  # fmt: skip


@pytest.fixture(scope="module")
def run(rows: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Trained on a base of its own, in three files."""
    folder = tmp_path_factory.mktemp("origin")
    base = tiny_model(folder / "base", shards=3, seed=5)
    return train(recipe(base, rows, train="steps: 1"), output=folder / "run")


@pytest.fixture
def base(run: Run) -> Iterator[Path]:
    """The base, to be changed; put back afterwards."""
    folder = Path(run.recipe().model)
    kept = shutil.copytree(folder, folder.with_name("kept"))
    yield folder
    shutil.rmtree(folder)
    kept.rename(folder)


def swap_a_byte(base: Path) -> None:
    """The last byte of the last file, which is no byte of a header and of no first row."""
    file = sorted(base.glob("*.safetensors"))[-1]
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def test_it_is_written_where_the_adapter_is(run: Run) -> None:
    sha256 = fingerprint(read_model(Path(run.recipe().model)))
    assert run.read("base.json") == {"sha256": sha256, "commit": None}
    assert json.loads((run.adapter / "finetune_base.json").read_text()) == run.read("base.json")


@pytest.mark.parametrize("command", COMMANDS)
def test_one_other_byte_is_another_base(
    run: Run, base: Path, workdir: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a run, and of its adapter where that is all there is."""
    write_rows(workdir / "questions.jsonl", [{"prompt": "Say 3", "completion": ""}])
    adapter = shutil.copytree(run.adapter, workdir / "adapter")
    swap_a_byte(base)
    for name, more in ((run.folder, []), (adapter, ["--output", "out"] if command in ("merge", "export") else [])):
        code, _, said = finetune(capsys, command, name, *COMMANDS[command], *more)
        assert code == 2, said
        assert said == (
            f"finetune: The weights of {base} are not those that {name.name} was trained on.\n"
            "Restore the base it was trained on; or train again on this one.\n"
        )
    assert sorted(path.name for path in workdir.iterdir()) == ["adapter", "questions.jsonl"]
    assert not (run.folder / "merged").exists()


def test_another_base_is_refused_where_the_first_one_is_gone(
    run: Run, base: Path, workdir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    moved = shutil.move(base, workdir / "moved")
    other = tiny_model(workdir / "other", seed=6)
    assert merge(run, workdir / "out", base=str(moved), verify=False).merged
    code, _, said = finetune(capsys, "merge", run.folder, "--base", other, "--output", "no")
    assert code == 2
    assert f"was trained on {base}, and {other} holds other weights.\nMerge it into its own base" in said
    shutil.copytree(moved, base)  # for the fixture to remove


def test_the_same_weights_in_other_files_are_the_same_base(run: Run, base: Path, workdir: Path) -> None:
    for file in base.glob("*.safetensors*"):
        file.unlink()
    tiny_model(base, seed=5)
    result = merge(run, workdir / "out", verify=False)
    assert not any("cannot be seen" in note for note in result.notes)


def test_a_run_without_it_merges_and_says_so(run: Run, workdir: Path) -> None:
    old = Run(shutil.copytree(run.folder, workdir / "old"))
    (old.folder / "base.json").unlink()
    (old.adapter / "finetune_base.json").unlink()
    result = merge(old, verify=False)
    assert any(note.startswith("old does not say what the weights of its base were") for note in result.notes)


def test_a_run_goes_on_with_the_weights_it_began_with(run: Run, base: Path, workdir: Path, rows: Path) -> None:
    half = Run(shutil.copytree(run.folder, workdir / "half"))
    (half.folder / "result.json").unlink()
    swap_a_byte(base)
    with pytest.raises(RunError, match="base have changed since half was started. Restore them, or start a new run"):
        train(recipe(base, rows, train="steps: 1"), output=half.folder)


def test_a_large_model_is_sampled(run: Run, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the first bytes of every tensor count, and no others."""
    from finetune import weight_files

    whole = fingerprint(read_model(base))
    monkeypatch.setattr(weight_files, "_HASHED_WHOLE", 1000)
    sampled = fingerprint(read_model(base))
    assert sampled != whole
    tensor = max((t for shard in read_model(base) for t in shard.tensors.values()), key=lambda t: t.size)
    for place, seen in ((tensor.size - 1, False), (4096, False), (4095, True)):
        content = bytearray(tensor.file.read_bytes())
        content[tensor.start + place] ^= 1
        tensor.file.write_bytes(content)
        assert (fingerprint(read_model(base)) != sampled) is seen
