"""The speed comparison on a GPU, run on the CPU with narrow layers: its arms, its gate, its turns, what it writes."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from finetune.device import named_device

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
sys.path.insert(0, str(SCRIPTS))
try:
    import bench
    import gpu_bench
    import gpu_check
finally:
    sys.path.pop(0)

# TRL's own default, taken as it comes.
pytestmark = pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated:FutureWarning")
SETUP = gpu_bench.tiny(1)
H200 = named_device("h200")


# ------------------------------------------------------------------------------------------------------ the machinery


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> Iterator[Path]:
    """A random Gemma 2 of one narrow layer, and the work of both of its cases."""
    import bitsandbytes  # noqa: F401  (a LoRA run in this process would keep it out)

    folder = tmp_path_factory.mktemp("work")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FINETUNE_CACHE", "")
        patch.setenv("ACCELERATE_USE_CPU", "true")
        gpu_bench.make("gemma", ["gemma-lora", "gemma-qlora"], SETUP, folder)
        yield folder


def run(arm: str, folder: Path) -> tuple[dict[str, Any], Path]:
    grads = folder / f"{arm}.safetensors"
    spec = {
        "do": "arm", "setup": gpu_bench.asdict(SETUP), "work": str(folder.parent), "case": folder.name, "arm": arm,
        "grads": str(grads), "begun": time.time(), "timed": 1, "measure": False, "checkpointing": False,
    }  # fmt: skip
    return gpu_bench.child(spec), grads


@pytest.mark.parametrize("case", ["gemma-lora", "gemma-qlora"])
def test_arms_do_the_same_work_in_bf16_and_moved_labels_do_not(
    case: str, work: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = work / case
    made = json.loads((folder / "work.json").read_text())
    found = {arm: run(arm, folder) for arm in (*gpu_bench.ARMS, bench.SHIFTED)}
    theirs, their_grads = found["trl"]
    assert theirs["tokens"] == made["counts"][0]["tokens"] == SETUP.rows * SETUP.length
    assert theirs["supervised"] == SETUP.rows * (SETUP.length // 3)
    for arm, (result, grads) in found.items():
        verdict = bench.gate(result, theirs, grads, their_grads, gpu_bench.LIMITS)
        assert verdict.counts
        assert verdict.passed == (arm != bench.SHIFTED), f"{arm}: {verdict}"
        assert len(result["wall_s"]) == len(result["losses"]) == 1
    # Nothing is equal for want of gradients, and bf16 is what ran.
    rounded = bench.gate(*(found[arm][0] for arm in ("trl-best", "trl")), found["trl-best"][1], their_grads)
    assert rounded.gradient > 1e-4
    assert found["finetune"][0]["loss"] != pytest.approx(theirs["loss"], rel=1e-9)


def test_all_cases_of_a_model_start_from_one_adapter_that_bf16_can_hold(work: Path) -> None:
    from safetensors.torch import load_file

    first, second = (
        load_file(work / case / "adapter" / "adapter_model.safetensors") for case in ("gemma-lora", "gemma-qlora")
    )
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert tensor.equal(second[name])
        assert tensor.equal(tensor.bfloat16().float())
        assert tensor.abs().sum() > 0


def test_a_process_after_more_steps_to_warm_up_times_as_many(work: Path, capfd: pytest.CaptureFixture[str]) -> None:
    watch = bench.Watch(work / "gemma-lora", None, time.time(), 1, False, "cpu", warm=2)
    found = gpu_bench.run_arm("trl-best", work / "gemma-lora", watch, checkpointing=True)
    assert watch.steps == len(watch.stamps) == 3
    assert len(found["wall_s"]) == len(found["losses"]) == 1


def test_on_a_card_the_clock_waits_for_it_and_its_allocator_is_asked(
    work: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """There is no card here: what torch is asked is counted, and the step itself runs on the CPU."""
    import torch
    from peft import LoraConfig

    waits: list[int] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waits.append(1))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    for number, name in enumerate(("memory_allocated", "max_memory_allocated", "max_memory_reserved")):
        monkeypatch.setattr(torch.cuda, name, lambda number=number: number)
    folder = work / "gemma-lora"
    made = bench._work(folder)
    watch = bench.Watch(folder, None, time.time(), 1, True, "cuda")
    adapter = LoraConfig.from_pretrained(folder / "adapter")
    adapter.inference_mode = False
    found = bench._sft(
        made, bench._tokenizer(made["recipe"]), watch, bench.ordered(made["steps"], longest_first=False), {},
        model=made["recipe"]["model"], peft_config=adapter,
    )  # fmt: skip
    assert (found["peak_bytes"], found["reserved_bytes"]) == (1, 2)
    assert len(waits) == 3 + 2  # at the end of each step, and around the one that is measured


def test_the_ceiling_is_measured_at_the_model_s_own_shapes(work: Path) -> None:
    spec = {"do": "ceiling", "setup": gpu_bench.asdict(SETUP), "work": str(work), "cases": ["gemma-lora"]}
    top = gpu_bench.child(spec)["gemma-lora"]
    assert (top["tokens"], top["supervised"]) == (4 * 96, 4 * 32)
    assert top["layers"] > 1e9
    assert top["head"] > 1e9
    assert "onednn" not in top


@pytest.mark.long
def test_the_whole_path_runs_on_a_cpu_by_turns(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPTS / "gpu_check.py"), "--bench", "--tiny", "1", "--only", "llama-qlora"]
    command += ["--output", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = tmp_path.glob("speed-*.json")
    found = json.loads(file.read_text())["cases"]["llama-qlora"]
    assert found["shifted"]["refused"]
    assert found["arms"].keys() == gpu_bench.ARMS.keys()
    for arm, row in found["arms"].items():
        assert len(found["runs"][arm]) == 2
        assert row["wall_s"] > 0
        assert row["peak_bytes"] > 1e6
    assert "| finetune | " in file.with_suffix(".md").read_text()


# ----------------------------------------------------------------------------------------------------- turns and gate


class Processes:
    """Stands for processes: each takes ten seconds, and says what it is told."""

    def __init__(self, folder: Path, **answers: Any) -> None:
        self.folder, self.answers, self.now = folder, answers, 0.0
        self.calls: list[str] = []

    def one(self, case: str, arm: str, timed: int, grads: Path | None, measure: bool) -> dict[str, Any]:
        import numpy as np
        from safetensors.numpy import save_file

        self.now += 10
        self.calls.append(arm)
        answer = self.answers.get(arm.replace("-", "_"), 1.0)
        if isinstance(answer, str):
            raise SystemExit(f"{arm} ended with 1:\n  File x\n{answer}")
        if grads is not None:
            grads.parent.mkdir(exist_ok=True)
            gradient = 2.0 if arm == bench.SHIFTED and "blind" not in self.answers else answer
            save_file({"a": np.full(4, gradient, np.float32)}, grads)
        return {"loss": 5.0, "tokens": 9, "supervised": 3, "wall_s": [answer]}

    def turns(self, cases: list[str], ends: float, turns: int = 3) -> dict[str, Any]:
        setup = replace(SETUP, turns=turns)
        return gpu_bench.take_turns(cases, setup, self.folder, self.one, lambda line: None, ends, lambda: self.now)


def test_arms_run_in_turns_as_long_as_the_time_lasts(tmp_path: Path) -> None:
    processes = Processes(tmp_path)
    found = processes.turns(["gemma-lora", "llama-lora"], ends=140)
    there = list(gpu_bench.ARMS)
    # The first case tries the gate; its second turn ends at 110 s, by its first at most, and a third would at 150 s.
    assert processes.calls == [*there, bench.SHIFTED, *there, *there[::-1], *there[::-1]]
    assert {arm: len(taken) for arm, taken in found["gemma-lora"]["runs"].items()} == dict.fromkeys(there, 2)
    assert "shifted" not in found["llama-lora"]


def test_a_case_without_time_is_not_begun(tmp_path: Path) -> None:
    found = Processes(tmp_path).turns(["gemma-lora", "llama-lora"], ends=35)
    assert not any(found["llama-lora"]["runs"].values())
    assert list(gpu_bench.words(found["llama-lora"])) == ["No times: none was left, or no arm ran."]


def test_an_arm_that_fails_or_does_other_work_is_left_out_and_named(tmp_path: Path) -> None:
    memory = "torch.OutOfMemoryError: CUDA out of memory."
    found = Processes(tmp_path, trl=memory, finetune=1.2).turns(["gemma-lora"], ends=1e9, turns=2)["gemma-lora"]
    assert {arm: len(taken) for arm, taken in found["runs"].items()} == {"trl-best": 2}
    assert found["failed"] == {"trl": memory}
    assert found["gate"]["finetune"]["refused"]
    said = list(gpu_bench.words(found))
    assert said[0] == f"`trl` is left out: {memory}"
    assert said[1].startswith("Gate, finetune against trl-best, refused it, and it has no times: loss 0.0e+00")


def test_a_gate_that_does_not_see_moved_labels_ends_the_script(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="the gate did not notice"):
        Processes(tmp_path, blind=True).turns(["gemma-lora"], ends=1e9)


# ------------------------------------------------------------------------------------------------------- what it does


def test_on_an_h200_every_case_fits_and_on_smaller_cards_some_are_left_out() -> None:
    kept, left_out = gpu_bench.with_room(gpu_bench.CASES, gpu_bench.Setup(), H200)
    assert kept == dict.fromkeys(gpu_bench.CASES, False)
    assert left_out == []
    kept, left_out = gpu_bench.with_room(gpu_bench.CASES, gpu_bench.Setup(), named_device("24GB"))
    assert kept == {"gemma-lora": True, "gemma-qlora": True, "llama-qlora": True}  # trl-best must checkpoint
    (line,) = left_out
    assert line.startswith("llama-lora needs 3")


def results(setup: Any) -> dict[str, Any]:
    """What `run` gives when every arm of every case had two turns, with the toolkit twice as fast."""
    cases: dict[str, Any] = {}
    top = dict.fromkeys(("layers", "head", "layers_cpu", "head_cpu"), 6e14) | {"tokens": 8192, "supervised": 2728}
    for case in gpu_bench.CASES:
        taken = {
            arm: [
                {
                    "wall_s": [seconds], "cpu_s": [seconds], "losses": [2.0], "peak_bytes": 10**10,
                    "reserved_bytes": 2 * 10**10, "rss_bytes": 1, "first_step_s": 9.0, "ceiling": top,
                }
            ] * 2
            for arm, seconds in zip(gpu_bench.ARMS, (1.0, 0.8, 0.5), strict=True)
        }  # fmt: skip
        found = {"steps": 1, "gate": {}, "failed": {}, "runs": taken, "trl_best_checkpoints": False}
        count = {"tokens": 8192, "padded": 8192, "supervised": 2728, "flop": 2e14, "flop_head": 1e13, "run": 8192}
        bench.summarize(found, [{}, count])
        for row in found["arms"].values():
            row |= {"reserved_bytes": 2 * 10**10, "mfu": 2e14 / row["wall_s"] / 989e12}
        cases[case] = found
    cases["gemma-lora"]["shifted"] = {"loss": 0.01, "gradient": 0.5, "refused": True}
    return {
        "machine": "a card", "date": "today", "versions": {"torch": "2"}, "minutes": 5, "limits": gpu_bench.LIMITS,
        "setup": gpu_bench.asdict(setup), "cases": cases,
    }  # fmt: skip


def options(**changed: Any) -> argparse.Namespace:
    return argparse.Namespace(**{"only": None, "tiny": None, "layers": None, "minutes": 6, "output": None, **changed})


@pytest.mark.parametrize(
    ("changed", "written"),
    [({}, True), ({"minutes": 15}, True), ({"only": ["gemma-lora"]}, False), ({"layers": 2}, False),
     ({"minutes": 1}, False)],
)  # fmt: skip
def test_only_a_whole_run_is_written(
    changed: dict[str, Any], written: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(gpu_bench, "BENCHMARKS", tmp_path)
    monkeypatch.setattr(gpu_bench, "run", lambda cases, setup, device, say: results(setup))
    gpu_bench.compare(options(**changed), gpu_check.file_name("NVIDIA H200", "speed"), H200)
    files = sorted(file.name for file in tmp_path.iterdir())
    assert files == (["speed-h200.json", "speed-h200.md"] if written else [])
    line = "| finetune | 0.500 | 16,384 | 5,456 | 10.00 | 20.00 | 9.0 | 40.4% | 66.7% | 0.00% | 2.00 | 1.60 |"
    assert line in capsys.readouterr().out
    if written:
        assert line in (tmp_path / "speed-h200.md").read_text()
        assert json.loads((tmp_path / "speed-h200.json").read_text())["cases"].keys() == set(gpu_bench.CASES)


def test_an_arm_without_times_is_not_written_and_ends_with_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = results(gpu_bench.Setup())
    del found["cases"]["llama-lora"]["arms"]["finetune"]
    monkeypatch.setattr(gpu_bench, "BENCHMARKS", tmp_path)
    monkeypatch.setattr(gpu_bench, "run", lambda *_: found)
    with pytest.raises(SystemExit, match="without a result: finetune of llama-lora"):
        gpu_bench.compare(options(), "speed-x", H200)
    assert list(tmp_path.iterdir()) == []
    found["cases"]["llama-lora"]["failed"]["finetune"] = "torch.OutOfMemoryError: CUDA out of memory."
    gpu_bench.compare(options(), "speed-x", H200)
    assert "`finetune` is left out: torch.OutOf" in (tmp_path / "speed-x.md").read_text()


def test_an_unknown_case_is_refused_with_the_known_ones() -> None:
    with pytest.raises(SystemExit, match="no case smollm2. There are gemma-lora, .*llama-qlora"):
        gpu_bench.compare(options(only=["smollm2"]), "speed-x", H200)


def test_without_a_card_it_says_so_in_one_line_and_ends_well() -> None:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(SCRIPTS / "gpu_check.py"), "--bench"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=True)
    assert done.stdout.startswith("gpu_check is skipped: torch ")
    assert done.stdout.count("\n") == 1


def test_a_card_without_bf16_is_skipped_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_check, "why_not", lambda: None)
    monkeypatch.setattr(gpu_check, "this_machine", lambda: named_device("t4"))
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--bench"])
    gpu_check.main()
    assert capsys.readouterr().out.count("\n") == 1


def test_children_see_a_card_only_where_they_are_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    script, said = tmp_path / "script.py", tmp_path / "said"
    script.write_text(
        f"import os; open({str(said)!r}, 'w').write("
        "f\"{os.environ['CUDA_VISIBLE_DEVICES']} {os.environ.get('ACCELERATE_USE_CPU')}\")"
    )
    for card, expected in ((True, "0 None"), (False, " true")):
        bench.run_script([str(script)], 1, card=card)
        assert said.read_text() == expected
    script.write_text("import time; time.sleep(60)")
    with pytest.raises(SystemExit, match="an arm was stopped after 1 s"):
        bench.run_script([str(script)], 1, name="an arm", seconds=1)


def test_rows_have_their_full_length_with_the_tokenizer_of_a_random_model(work: Path) -> None:
    tokenizer = bench._tokenizer({"model": str(work / "gemma")})
    rows = bench._rows(replace(gpu_bench.job_of("gemma-lora", gpu_bench.Setup()), rows=2), tokenizer)
    assert len(rows) == 2
    assert all(len(tokenizer(row["prompt"])["input_ids"]) > 1300 for row in rows)
