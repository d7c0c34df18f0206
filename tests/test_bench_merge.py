"""The benchmark of merging on a model of a few megabytes: its inputs, its gate, its page."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
sys.path.insert(0, str(SCRIPTS))
try:
    import bench_merge
finally:
    sys.path.pop(0)

SIZE = bench_merge.Size("tiny", 64, 128, 2, 4, 2, 300)


def test_the_sizes_are_those_of_the_published_models() -> None:
    """Qwen2 1.5B has 1,543,714,304 parameters and Qwen2.5 3B 3,085,938,688, by their model cards' files."""
    counts = {
        name: sum(torch.Size(shape).numel() for _, shape in size.tensors())
        for name, size in bench_merge.SIZES.items()
    }
    assert counts == {"1.5B": 1_543_714_304, "3B": 3_085_938_688}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bench")
    bench_merge.write_base(folder / "base", SIZE)
    bench_merge.write_adapter(folder / "adapter", folder / "base", SIZE)
    for arm in bench_merge.ARMS:
        found = bench_merge.run_arm(arm, folder / "base", folder / "adapter", folder / arm)
        assert found["wall_s"] > 0
        assert found["peak_bytes"] > 10**7
        assert ("Proved on" in str(found.get("proof"))) is (arm == "finetune, proved")
    return folder


def test_the_gate_passes_equal_work_and_refuses_one_changed_bit(folder: Path, tmp_path: Path) -> None:
    files = sorted(file.name for file in (folder / "base").glob("*.safetensors"))
    assert len(files) == 6
    ours, theirs = folder / "finetune", folder / "peft"
    same, of = bench_merge.same_tensors(ours, theirs)
    assert same == of == 26
    assert bench_merge.same_tensors(folder / "copy", theirs)[0] == of - 14  # the linear layers were changed
    name = files[-1]
    tensors = load_file(ours / name)
    changed = next(iter(tensors))
    tensors[changed].view(torch.int16).view(-1)[0] ^= 1
    save_file(tensors, ours / name, metadata={"format": "pt"})
    assert bench_merge.same_tensors(ours, theirs) == (25, 26)


def test_the_page_has_a_row_for_each_arm() -> None:
    arms: dict[str, Any] = {
        arm: {"wall_s": 10.0 * number, "cpu_s": 1.0, "peak_bytes": number * 10**9}
        for number, arm in enumerate(bench_merge.ARMS, 1)
    }
    size = {
        "parameters": 10**9,
        "bytes": 2 * 10**9,
        "same_tensors": 3,
        "tensors": 3,
        "arms": arms,
        "proof": "Proved.",
    }
    text = bench_merge.page({"made": "Made.", "sizes": {"1B": json.loads(json.dumps(size))}})
    assert "| finetune | 20.0 | 2.00 | 1.0 | 2.00 | 0.67 |" in text
    assert text.count("\n| ") == 2 + len(arms)
