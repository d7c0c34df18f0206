"""On a CUDA card: the small cases of scripts/gpu_check.py within its limit, and its comparison on two layers."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "scripts"))
try:
    import check_plan
    import gpu_bench
    import gpu_check
finally:
    sys.path.pop(0)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; torch sees none here"),
]
FEW = ("smollm2-lora", "smollm2-qlora-checkpointing", "llama-qlora", "gemma-qlora-checkpointing")


@pytest.mark.parametrize("name", FEW)
def test_a_step_on_this_card_takes_what_was_predicted(name: str) -> None:
    cases, left_out = gpu_check.with_room(check_plan.chosen(gpu_check.CASES, [name]), check_plan.this_machine())
    if left_out:
        pytest.skip(left_out[0])
    bench = check_plan.Bench(Path(gpu_check.__file__), 1, 4, 300, 300)
    results = check_plan.run_all(cases, bench, check_plan.this_machine())
    assert "error" not in results[name], results[name]
    assert check_plan.off(results) == [], check_plan.table(cases, results)


@pytest.mark.parametrize("case", ["gemma-lora", "llama-qlora"])
def test_arms_do_the_same_work_on_this_card_and_moved_labels_do_not(case: str) -> None:
    device = check_plan.this_machine()
    if not device.bf16:
        pytest.skip(f"{device.name} has no bf16 units")
    setup = gpu_bench.Setup(layers=2, steps=1, turns=1, threads=4)
    cases, left_out = gpu_bench.with_room([case], setup, device)
    if left_out:
        pytest.skip(left_out[0])
    found = gpu_bench.run(cases, setup, device, print)["cases"][case]
    assert found["failed"] == {}
    assert found["shifted"]["refused"]
    assert found["arms"].keys() == gpu_bench.ARMS.keys(), found["gate"]
    for row in found["arms"].values():
        assert 0 < row["peak_bytes"] <= row["reserved_bytes"] <= device.memory
        assert 0 < row["share_of_ceiling"] < 1.1
