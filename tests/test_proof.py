"""The proof: it passes what is right, says what rounding costs, and fails whatever a merge can do wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from finetune import merge_math
from finetune.adapter_file import read_adapter
from finetune.errors import FinetuneError
from finetune.fold import Merged, Options, merge_adapter
from finetune.merge_layout import Weighted
from finetune.proof import Proof, prove, take
from finetune.streamed import Files, NotProvable
from tests.test_merge import ROWS, edit, gpt2, load_model, with_peft, write_adapter
from tests.tiny import tiny_model

Tensors = dict[str, torch.Tensor]
Q = "model.layers.0.self_attn.q_proj.weight"

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tied bf16 base and an adapter on all its linear layers, not to be changed."""
    folder = tmp_path_factory.mktemp("pair")
    base = tiny_model(folder / "base", dtype="bfloat16")
    return base, write_adapter(base, folder / "adapter", targets="all-linear")


def weigh(adapter: Path) -> list[Weighted]:
    return [Weighted(read_adapter(adapter))]


def test_the_numbers_are_those_of_whole_models(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """The same three numbers from models that transformers and peft load as a whole."""
    base, adapter = pair
    result = merge_adapter(base, adapter, tmp_path / "out", Options(rows=ROWS))
    proof = result.proof
    assert proof is not None
    ids = torch.tensor(take(ROWS))
    assert ids.shape == (2, 20)
    places = list(range(19, 3, -1))
    with torch.no_grad():
        merged = load_model(result.folder).float()(ids).logits[:, places]
        expected = with_peft(base, adapter).float()(ids).logits[:, places]
    assert proof.rounding == pytest.approx(float((merged - expected).abs().max()), rel=1e-3)
    assert proof.largest == pytest.approx(float(merged.abs().max()), rel=1e-3)
    assert proof.same == int((merged.argmax(-1) == expected.argmax(-1)).sum())
    assert (proof.rows, proof.places) == (2, 32)
    assert proof.difference < 1e-5 < 1e-3 < proof.rounding
    assert "rounding to its type moves them by up to" in proof.sentence()


def swap(one: str, other: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        tensors[one], tensors[other] = tensors[other], tensors[one]

    return change


def times(name: str, factor: float) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        tensors[name] = tensors[name] * factor

    return change


FAULTS: dict[str, Callable[[Tensors], None]] = {
    "two layers changed places": swap(Q, Q.replace(".0.", ".1.")),
    "one weight a twentieth larger": times(Q, 1.05),
    "one norm of zeros": times("model.norm.weight", 0),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_one_wrong_weight_fails(pair: tuple[Path, Path], tmp_path: Path, fault: str) -> None:
    base, adapter = pair
    merge_adapter(base, adapter, tmp_path / "out")
    assert prove(base, weigh(adapter), tmp_path / "out", ROWS).passed
    file = tmp_path / "out" / "model.safetensors"
    tensors = load_file(file)
    FAULTS[fault](tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(
        FinetuneError, match=r"does not answer as base \+ adapter: on 2 rows .* of 32 places"
    ) as caught:
        prove(base, weigh(adapter), tmp_path / "out", ROWS)
    assert caught.value.exit_code == 1


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(lambda pair: replace(pair, scale=pair.scale * 2), id="scale"),
        pytest.param(lambda pair: replace(pair, scale=-pair.scale), id="sign"),
        pytest.param(lambda pair: replace(pair, scale=0.0), id="left out"),
    ],
)
def test_a_wrong_merge_is_removed(
    pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Callable[[Any], Any]
) -> None:
    """peft computes what is compared, so a fault in this toolkit's own arithmetic cannot hide."""
    whole = merge_math.merged_rows

    def wrong(piece: Any, *rest: Any) -> torch.Tensor:
        pairs = tuple(map(fault, piece.pairs)) if piece.name == Q else piece.pairs
        return whole(replace(piece, pairs=pairs), *rest)

    monkeypatch.setattr(merge_math, "merged_rows", wrong)
    with pytest.raises(FinetuneError, match="does not answer") as caught:
        merge_adapter(*pair, tmp_path / "out", Options(rows=ROWS))
    assert "removed" in caught.value.hint
    assert list(tmp_path.iterdir()) == []


def test_an_adapter_that_changed_after_the_merge_fails(pair: tuple[Path, Path], tmp_path: Path) -> None:
    merge_adapter(*pair, tmp_path / "out")
    other = write_adapter(pair[0], tmp_path / "other", seed=9, targets="all-linear")
    with pytest.raises(FinetuneError, match="does not answer"):
        prove(pair[0], weigh(other), tmp_path / "out", ROWS)


@pytest.mark.parametrize("arch", ["gemma2", "qwen2", "gpt2", "headless"])
def test_other_architectures(tmp_path: Path, arch: str) -> None:
    """Scaled embeddings, capped logits, biases; transposed weights, and files that leave the prefix out."""
    if arch in ("gpt2", "headless"):
        base = gpt2(tmp_path / "base", headless=arch == "headless")
        config: dict[str, Any] = {"targets": ["c_attn", "c_proj"], "fan_in_fan_out": True}
    else:
        base, config = tiny_model(tmp_path / "base", arch=arch), {"targets": "all-linear"}
    adapter = write_adapter(base, tmp_path / "adapter", **config)
    result = merge_adapter(base, adapter, tmp_path / "out", Options(rows=ROWS))
    assert result.proof is not None, result.notes
    assert result.proof.difference < 1e-4


def test_memory_is_that_of_one_module(
    pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every tensor is read for a moment: at no time are two large modules' parameters alive."""
    import gc

    merge_adapter(*pair, tmp_path / "out")

    def alive() -> int:
        found = [t for t in gc.get_objects() if type(t) is torch.nn.Parameter and t.device.type == "cpu"]
        return sum(t.numel() * t.element_size() for t in found)

    most: list[int] = []
    gc.collect()
    before = alive()  # models of other tests
    whole, calls = Files.get, iter(range(10**6))

    def watched(self: Any, name: str, *rest: Any, **more: Any) -> torch.Tensor:
        if next(calls) % 25 == 0:  # looking at all objects takes its time
            most.append(alive())
        return whole(self, name, *rest, **more)

    monkeypatch.setattr(Files, "get", watched)
    prove(pair[0], weigh(pair[1]), tmp_path / "out", ROWS[:1])
    assert len(most) > 3
    assert 0 < max(most) - before < 4 * 64 * (128 + 4 * 3), "more than one linear layer with its pair, in float32"


def test_what_cannot_be_run_is_said_and_kept(pair: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(NotProvable, match="no rows"):
        prove(pair[0], weigh(pair[1]), pair[0], [])
    base = tiny_model(tmp_path / "base")
    adapter = write_adapter(base, tmp_path / "adapter")
    edit(base / "config.json", model_type="unheard_of")
    result: Merged = merge_adapter(base, adapter, tmp_path / "out", Options(rows=ROWS))
    assert result.proof is None
    assert any(note.startswith("Not proved: transformers cannot build it") for note in result.notes)


def test_rows_are_cut_to_one_length() -> None:
    assert take([[1, 2, 3], [4, 5], [6]]) == [[1, 2], [4, 5]]
    assert take([list(range(100))] * 9) == [list(range(48))] * 4
    assert take([[], [7]]) == [[7]]
    assert take([]) == []


def test_a_nan_is_no_proof() -> None:
    good = Proof(rows=1, places=1, largest=1.0, difference=1e-5, rounding=1e-5, same=1)
    assert good.passed
    assert not replace(good, difference=float("nan")).passed
    assert not replace(good, difference=2e-3).passed
    assert replace(good, difference=2e-3, largest=10.0).passed
