"""However rows lie in memory, the same is learned from them, and no row sees another."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from finetune.batches import Collator, EpochOrder
from finetune.chat import Encoded
from finetune.data import Prepared
from finetune.fast import products
from finetune.recipe import Recipe
from finetune.run import Run
from finetune.store import Packs, Rows
from finetune.train import train
from tests.flow.conftest import chat_rows, losses, recipe, write_rows
from tests.tiny import tiny_tokenizer

ROWS = [Encoded([5, 6, 7], [-100, 6, 7]), Encoded([8, 9], [-100, 9]), Encoded([3, 4, 2, 1], [-100, -100, 2, 1])]


def trained(base: Path, rows: Path, output: Path, packing: Any, **fields: Any) -> Run:
    """A run in fp32, where equal sums are equal to the last digits."""
    whole = recipe(base, rows, rest="load: {dtype: float32}")
    data = whole.data.model_copy(update={"packing": packing, "max_length": 512})
    settings = whole.train.model_copy(update={"precision": "fp32", **fields})
    return train(whole.model_copy(update={"data": data, "train": settings}), output=output)


def same_adapter(one: Run, other: Run) -> None:
    from safetensors.torch import load_file

    a, b = (load_file(run.adapter / "adapter_model.safetensors") for run in (one, other))
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=1e-3, atol=2e-5)


def test_rows_end_to_end_teach_what_padded_rows_teach(base: Path, rows: Path, tmp_path: Path) -> None:
    """The rows of a step are the same, and every step divides by all its trained tokens."""
    fields = {"batch_size": 8, "micro_batch": 4, "epochs": 2.0}
    flat = trained(base, rows, tmp_path / "flat", "step", **fields)
    padded = trained(base, rows, tmp_path / "padded", False, **fields)
    assert flat.read("result.json")["loss"] == pytest.approx(padded.read("result.json")["loss"], rel=1e-5)
    assert flat.read("result.json")["tokens"] == padded.read("result.json")["tokens"]
    same_adapter(flat, padded)


def test_one_pack_teaches_what_its_rows_teach(base: Path, tmp_path: Path) -> None:
    """All rows fit into one pack, so a step of one pack is a step of all rows."""
    rows = write_rows(tmp_path / "rows.jsonl", chat_rows(4))
    packed = trained(base, rows, tmp_path / "packed", True, batch_size=1, micro_batch=1)
    apart = trained(base, rows, tmp_path / "apart", False, batch_size=4, micro_batch=4)
    assert packed.read("data.json")["packs"] == 1
    assert packed.read("result.json")["steps"] == apart.read("result.json")["steps"] == 1
    assert packed.read("result.json")["loss"] == pytest.approx(apart.read("result.json")["loss"], rel=1e-5)
    same_adapter(packed, apart)


def test_the_fast_ways_log_the_losses_and_tokens_of_the_plain_ones(base: Path, tmp_path: Path) -> None:
    """Rows share a system prompt, which the fast run computes once; both count it in every row."""
    talks = [
        [{"role": "system", "content": "You are a user of the model. " * 2}, *row["messages"]] for row in chat_rows()
    ]
    rows = write_rows(tmp_path / "rows.jsonl", [{"messages": talk} for talk in talks])
    whole = recipe(base, rows, train="precision: fp32", rest="load: {dtype: float32}")
    off = dict.fromkeys(type(whole.fast).model_fields, False)
    plain = whole.model_copy(update={
        "fast": whole.fast.model_copy(update=off), "data": whole.data.model_copy(update={"packing": False}),
    })  # fmt: skip
    runs = [train(each, output=tmp_path / name) for name, each in (("fast", whole), ("plain", plain))]
    found, right = (losses(run.folder) for run in runs)
    assert found.keys() == right.keys() == set(range(1, 7))
    assert list(found.values()) == pytest.approx(list(right.values()), rel=1e-4)
    counts = [
        [line["num_tokens"] for line in map(json.loads, (run.folder / "metrics.jsonl").read_text().splitlines())
         if "num_tokens" in line]
        for run in runs
    ]  # fmt: skip
    assert counts[0] == counts[1]
    assert counts[0][-1] == runs[0].read("data.json")["tokens"] == runs[0].read("result.json")["tokens"]
    same_adapter(*runs)


@pytest.mark.parametrize("on", [True, False])
def test_a_run_may_leave_all_products_to_torch(
    base: Path, rows: Path, tmp_path: Path, on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(products, "onednn", lambda: bool(asked.append(True)))
    whole = recipe(base, rows, train="precision: fp32", rest=f"load: {{dtype: float32}}\nfast: {{products: {on}}}")
    train(whole, output=tmp_path / "run")
    assert bool(asked) == on


def collate(data: Prepared, numbers: list[int], *, flat: bool) -> dict[str, Any]:
    return Collator(data, tiny_tokenizer("smollm2"), flat=flat)([{"row": number} for number in numbers])


def test_a_pack_as_the_model_gets_it() -> None:
    packed = Packs(Rows.of(ROWS), [[2, 0], [1]])
    batch = collate(Prepared(packed, None, {}, []), [0], flat=True)
    assert batch["input_ids"].tolist() == [[3, 4, 2, 1, 5, 6, 7]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 0, 1, 2]]
    assert batch["labels"].tolist() == [[-100, -100, 2, 1, -100, 6, 7]]
    assert "attention_mask" not in batch
    both = collate(Prepared(packed, None, {}, []), [1, 0], flat=True)
    assert both["position_ids"].tolist() == [[0, 1, 0, 1, 2, 3, 0, 1, 2]]


def test_evaluation_rows_are_numbered_behind_the_trained_ones() -> None:
    data = Prepared(Rows.of(ROWS[:1]), Rows.of(ROWS[1:]), {}, [])
    batch = collate(data, [2, 1], flat=False)
    assert batch["input_ids"].tolist() == [[3, 4, 2, 1], [8, 9, batch["input_ids"][1, 2], batch["input_ids"][1, 3]]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]
    assert batch["labels"].tolist() == [[-100, -100, 2, 1], [-100, 9, -100, -100]]


def test_the_rows_of_a_step_can_be_named(base: Path, rows: Path) -> None:
    settled: Recipe = recipe(base, rows, train="seed: 3")
    order = EpochOrder([n % 7 + 1 for n in range(10)], settled.train, flat=True)
    assert settled.train.batch_size == 4
    first = list(order)
    order.set_epoch(1)
    second = list(order)
    assert [order.rows_of(step) for step in (1, 2, 3)] == [first[:4], first[4:8], first[8:]]
    assert [order.rows_of(step) for step in (4, 6)] == [second[:4], second[8:]]
    assert first != second
