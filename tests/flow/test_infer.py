"""A file of questions becomes a file of answers: every line in its place, whatever stops it on the way."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from finetune import generate
from finetune.errors import InputError, Interrupted
from finetune.formats import Conversation
from finetune.generate import load_speaker
from finetune.infer import infer, question
from finetune.recipe import Data
from finetune.run import Run
from finetune.train import train
from tests.flow.conftest import child, recipe
from tests.tiny import tiny_model


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights so large that every question gets an answer of its own."""
    return tiny_model(tmp_path_factory.mktemp("loud") / "tiny", tied=False, initializer_range=0.1)


@pytest.fixture(scope="module")
def run(base: Path, rows: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return train(
        recipe(base, rows, train="steps: 4", data="system: Count"), output=tmp_path_factory.mktemp("asked") / "run"
    )


def lines_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").split("\n") if line]


def alone(run: Run, *questions: str) -> list[str]:
    """The answers of a speaker that knows nothing of files, one question at a time."""
    speaker = load_speaker(run.folder)
    asked = [
        Conversation([{"role": "system", "content": "Count"}, {"role": "user", "content": text}])
        for text in questions
    ]
    return [speaker.answer([one], max_new_tokens=8)[0].text for one in asked]


def test_every_line_has_its_answer_or_its_reason(run: Run, tmp_path: Path) -> None:
    """Five layouts of a question, a reply that must not be shown, and five lines that cannot be asked."""
    written = [
        '{"prompt": "Say 3 and then some more of the same"}',
        '{"messages": [{"role": "user", "content": "Say 11"}]}',
        "",
        '{"messages": [{"role": "user", "content": "Say 11"}, {"role": "assistant", "content": "never shown"}]}',
        '{"prompt": ',
        '{"instruction": "Say", "input": "20", "output": ""}',
        '{"conversations": [{"from": "human", "value": "Say 3"}]}',
        '{"prompt": 7}',
        '{"prompt": "<|im_end|>"}',
        '{"weather": "fine"}',
        '{"prompt": "' + "a" * 2100 + '"}',
    ]
    source, out = tmp_path / "q.jsonl", tmp_path / "a.jsonl"
    source.write_text("\n".join(written) + "\n", encoding="utf-8")
    done = infer(run.folder, source, out, max_new_tokens=8)
    found = lines_of(out)
    assert [line["line"] for line in found] == list(range(1, 12))
    long, eleven, twenty, three = alone(run, "Say 3 and then some more of the same", "Say 11", "Say\n20", "Say 3")
    answers = [line.get("answer") for line in found]
    assert answers == [long, eleven, None, eleven, None, twenty, three, None, None, None, None]
    assert len({long, eleven, twenty, three}) == 4
    reasons = {n: found[n - 1]["error"] for n in (3, 5, 8, 9, 10, 11)}
    assert "blank" in reasons[3]
    assert "not JSON" in reasons[5]
    assert "number 7" in reasons[8]
    assert "control token" in reasons[9]
    assert "weather" in reasons[10]
    assert "2048" in reasons[11]
    assert (done.rows, done.answered, done.refused, done.kept) == (11, 5, 6, 0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "q.jsonl"]


def questions(folder: Path, count: int = 40) -> Path:
    file = folder / "q.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"Say {n} {'and ' * (n % 5)}"}) + "\n" for n in range(count)))
    return file


def test_a_killed_call_goes_on_and_ends_the_same(run: Run, tmp_path: Path) -> None:
    source, out = questions(tmp_path, 200), tmp_path / "a.jsonl"
    whole = tmp_path / "whole.jsonl"
    infer(run.folder, source, whole, max_new_tokens=16, batch_tokens=60)
    process = child(
        "infer", str(run.folder), "--rows", str(source), "--out", str(out), "--max-new-tokens", "16",
        "--batch-tokens", "60", cwd=tmp_path, OMP_NUM_THREADS="1",
    )  # fmt: skip
    part, end = tmp_path / "a.jsonl.part", time.monotonic() + 300
    while not (part.is_file() and part.read_text().count("\n") > 5):
        assert process.poll() is None
        assert time.monotonic() < end
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not out.exists()
    with part.open("a", encoding="utf-8") as file:
        file.write('{"line": 199, "answer": "cut o')  # inside a line
    saved = [json.loads(line) for line in part.read_text().split("\n")[1:-1]]
    done = infer(run.folder, source, out, max_new_tokens=16, batch_tokens=60)
    assert done.kept == len(saved) > 4
    assert out.read_bytes() == whole.read_bytes()
    assert not part.exists()


def test_what_was_answered_is_not_asked_again(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped by Ctrl-C after three batches: those lines are there, word for word, and nobody asks them twice."""
    source, out = questions(tmp_path), tmp_path / "a.jsonl"
    batch, calls = generate.Speaker._batch, []

    def three_times(self: Any, prompts: Any, longest: int) -> Any:
        if len(calls) == 3:
            raise KeyboardInterrupt
        calls.append(len(prompts))
        return batch(self, prompts, longest)

    monkeypatch.setattr(generate.Speaker, "_batch", three_times)
    with pytest.raises(Interrupted, match=f"Stopped after {8 * 3} of 40"):
        infer(run.folder, source, out, max_new_tokens=8, batch_tokens=8 * 40)
    asked: list[int] = []
    monkeypatch.setattr(
        generate.Speaker,
        "_batch",
        lambda self, prompts, longest: asked.append(len(prompts)) or batch(self, prompts, longest),
    )
    done = infer(run.folder, source, out, max_new_tokens=8, batch_tokens=8 * 40)
    assert (done.kept, sum(asked)) == (sum(calls), 40 - sum(calls))
    assert [line["line"] for line in lines_of(out)] == list(range(1, 41))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rows": "other"}, "other rows"),
        ({"longest": 9}, "other settings"),
        ({"base": True}, "other settings"),
        ({"model": "other"}, "another model"),
    ],
)
def test_answers_to_something_else_are_never_mixed_in(
    run: Run, base: Path, rows: Path, tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    import shutil

    folder = shutil.copytree(run.folder, tmp_path / "run")
    source, out = questions(tmp_path, 3), tmp_path / "a.jsonl"
    infer(folder, source, out, max_new_tokens=8)
    first = tmp_path / "first.jsonl"
    out.rename(first)
    # an unfinished call, as a kill leaves it: made by the module itself, stopped before the second batch
    with pytest.MonkeyPatch.context() as patch:
        batch, seen = generate.Speaker._batch, []

        def once(self: Any, prompts: Any, longest: int) -> Any:
            if seen:
                raise KeyboardInterrupt
            seen.append(1)
            return batch(self, prompts, longest)

        patch.setattr(generate.Speaker, "_batch", once)
        with pytest.raises(Interrupted):
            infer(folder, source, out, max_new_tokens=8, batch_tokens=1)
    if change.get("rows"):
        source.write_text(source.read_text() + '{"prompt": "one more"}\n')
    if change.get("model"):
        config = folder / "adapter" / "adapter_config.json"
        config.write_text(config.read_text().replace('"lora_alpha": 8', '"lora_alpha": 16'))
    before = (tmp_path / "a.jsonl.part").read_bytes()
    with pytest.raises(InputError, match=said):
        infer(folder, source, out, max_new_tokens=change.get("longest", 8), base=change.get("base", False))
    assert (tmp_path / "a.jsonl.part").read_bytes() == before
    assert not out.exists()


def test_the_untrained_model_answers_with_base(run: Run, base: Path, tmp_path: Path) -> None:
    source = questions(tmp_path, 4)
    infer(run.folder, source, tmp_path / "base.jsonl", max_new_tokens=8, base=True)
    infer(base, source, tmp_path / "plain.jsonl", max_new_tokens=8, system="Count")
    assert (tmp_path / "base.jsonl").read_text() == (tmp_path / "plain.jsonl").read_text()


def test_the_command_prints_one_document(run: Run, tmp_path: Path) -> None:
    source = questions(tmp_path, 5)
    process = child(
        "infer",
        str(run.folder),
        "--rows",
        str(source),
        "--out",
        "a.jsonl",
        "--json",
        cwd=tmp_path,
        OMP_NUM_THREADS="1",
    )
    printed, errors = process.communicate(timeout=500)
    assert process.returncode == 0, errors
    document = json.loads(printed)
    assert (document["rows"], document["answered"], document["refused"]) == (5, 5, 0)
    assert document["tokens"] == sum(line["tokens"] for line in lines_of(tmp_path / "a.jsonl"))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--rows", "none.jsonl", "--out", "a.jsonl"], "none.jsonl"),
        (["--rows", "q.jsonl", "--out", "q.jsonl"], "exists already"),
        (["--rows", "q.jsonl", "--out", "nowhere/a.jsonl"], "no folder"),
    ],
)
def test_wrong_input_ends_in_two_sentences(run: Run, tmp_path: Path, arguments: list[str], said: str) -> None:
    questions(tmp_path, 1)
    process = child("infer", str(run.folder), *arguments, cwd=tmp_path, OMP_NUM_THREADS="1")
    printed, errors = process.communicate(timeout=500)
    assert process.returncode == 2
    assert said in errors
    assert "Traceback" not in errors
    assert [path.name for path in tmp_path.iterdir()] == ["q.jsonl"]


def test_a_question_is_read_as_a_training_row_is() -> None:
    """The same words in three layouts, with the file's own names for the columns."""
    named = Data(train="x", columns={"prompt": "question", "completion": "answer"})
    for row in ({"question": "Hi"}, {"question": "Hi", "answer": None}, {"question": "Hi", "answer": "Hello."}):
        assert question(row, named, "Be brief.").messages == [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hi"},
        ]
    talk = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"},
                         {"role": "user", "content": "c"}]}  # fmt: skip
    assert [m["content"] for m in question(talk, Data(train="x")).messages] == ["a", "b", "c"]
