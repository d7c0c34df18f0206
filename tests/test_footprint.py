"""Memory of the host and disk beside a run, as arithmetic; and that a merge holds no more."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from finetune import footprint
from finetune.device import cpu_device
from finetune.facts import Facts, facts_of, read_facts
from finetune.memory import Line
from finetune.plan import plan
from finetune.recipe import parse_recipe
from tests.test_merge import run_child, write_adapter
from tests.tiny import tiny_model

GB = 10**9


def while_merging(facts: Facts, method: str = "{kind: lora, rank: 16}") -> Line:
    recipe = parse_recipe(f"model: {facts.model}\nmethod: {method}\ndata: {{train: rows.jsonl}}\n")
    return footprint.while_merging(recipe, facts)


def test_a_merge_needs_no_whole_model() -> None:
    """Gemma 2 2B: its embedding is 27 times its largest linear layer, and is never whole in memory."""
    line = while_merging(read_facts("google/gemma-2-2b"))
    assert line.bytes == 12 * 9_216 * 2_304 + 5 * 4 * 64 * 256_000 + 20_000_000
    assert line.formula.startswith("the largest adapted weight, 3 x 4 bytes x 21,233,664, + logits")
    assert line.bytes < 0.61 * GB
    dora = while_merging(read_facts("google/gemma-2-2b"), "{kind: lora, variant: dora}")
    assert dora.bytes == line.bytes + 12 * 9_216 * 2_304


def test_of_a_small_model_rows_are_most() -> None:
    line = while_merging(read_facts("smollm2-135m"), "{kind: lora, rank: 8, targets: attention}")
    assert line.bytes == 8 * 2**23 + 5 * 4 * 64 * 49_152 + 20_000_000 > 12 * 576 * 576
    assert line.formula.startswith("rows of a weight, 2 x 4 bytes x 8,388,608, + logits")


def test_of_a_large_rank_blocks_and_factors_are_most() -> None:
    line = while_merging(read_facts("smollm2-135m"), "{kind: lora, rank: 2048}")
    assert line.bytes == 8 * 16 * 2**19 + 16 * 4 * 2048 * 1536
    assert line.formula == "8 threads x 16 bytes x 524,288 values + 16 factors x 4 bytes x 3,145,728"


def test_the_experts_of_a_layer_are_one_module() -> None:
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (1000, 512), "model.norm.weight": (512,)}
    layer = "model.layers.0"
    shapes |= {f"{layer}.self_attn.{part}_proj.weight": (512, 512) for part in "qkvo"}
    for number in range(64):
        parts = {"gate_proj": (1024, 512), "up_proj": (1024, 512), "down_proj": (512, 1024)}
        shapes |= {f"{layer}.mlp.experts.{number}.{part}.weight": shape for part, shape in parts.items()}
    config: Mapping[str, Any] = {
        "model_type": "mixtral", "hidden_size": 512, "num_hidden_layers": 1, "num_attention_heads": 8,
        "vocab_size": 1000,
    }  # fmt: skip
    line = while_merging(facts_of("org/experts", config, shapes, "BF16"), "{kind: lora, rank: 8, targets: attention}")
    assert line.bytes == 8 * 64 * 3 * 1024 * 512 + 5 * 4 * 64 * 1000 + 20_000_000
    assert line.formula.startswith("a layer's experts, 2 x 4 bytes x 100,663,296")


def test_the_numbers_are_those_of_the_merge() -> None:
    from finetune import merge_folder, merge_math, proof, streamed

    assert merge_math.VALUES == footprint.BLOCK
    assert streamed.ROWS == footprint.ROWS
    assert proof.ROWS * proof.PLACES == footprint.PLACES
    assert (merge_folder.THREADS, merge_folder.FACTORS) == (footprint.THREADS, footprint.FACTORS)


def test_it_stands_in_the_plan_of_an_adapter_only() -> None:
    for method, there in (("{kind: lora}", True), ("{kind: full}", False)):
        recipe = parse_recipe(f"model: smollm2-135m\nmethod: {method}\ndata: {{train: rows.jsonl}}\n")
        made = plan(recipe, device=cpu_device(1))
        assert any(line.name == "while merging" for line in made.host) is there


@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="the peak of a process is read from Linux' /proc"
)
def test_a_real_merge_with_its_proof_stays_below(tmp_path: Path) -> None:
    """A model of 58 MB whose embedding is most of it; the first merge brings the libraries in."""
    big = {"hidden_size": 768, "intermediate_size": 3072, "head_dim": 192, "num_hidden_layers": 1}
    base = tiny_model(tmp_path / "base", dtype="bfloat16", vocab_size=24_000, **big)
    write_adapter(base, tmp_path / "adapter", targets="all-linear", r=16)
    small = tiny_model(tmp_path / "small")
    write_adapter(small, tmp_path / "small-adapter", targets="all-linear")
    measured = run_child(
        """
        from finetune.architecture import read_architecture
        merge.read_architecture = read_architecture

        def memory(field):
            lines = Path("/proc/self/status").read_text().splitlines()
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))

        folder = Path(sys.argv[1])
        rows = merge.Options(rows=[list(range(30, 78))] * 4)
        merge.merge_adapter(folder / "small", folder / "small-adapter", folder / "warm", rows)
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
        before = memory("VmRSS")
        assert merge.merge_adapter(folder / "base", folder / "adapter", folder / "out", rows).proof
        print(memory("VmHWM") - before)
        """,
        tmp_path,
    )
    line = while_merging(read_facts(str(base)))
    assert 10**6 < int(measured) < line.bytes
