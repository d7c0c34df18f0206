"""plan -> data -> train -> evaluate -> merge on a tiny random model, for every method."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from finetune.errors import DataError, FinetuneError, RunError
from finetune.evaluate import evaluate
from finetune.formats import Conversation
from finetune.generate import load_speaker
from finetune.merge import merge
from finetune.recipe import Recipe
from finetune.run import Run, open_run
from finetune.train import train
from tests.flow.conftest import METHODS, losses, recipe, write_rows
from tests.tiny import tiny_model

pytestmark = pytest.mark.usefixtures("workdir")


def logits(model: Any, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=torch.tensor([ids])).logits.float()


@pytest.fixture(scope="module", params=sorted(METHODS))
def run(request: pytest.FixtureRequest, base: Path, rows: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    evaluation = f"evaluate: {{data: {rows}, rows: 4, few_shot: 2, max_new_tokens: 4, after_training: false}}\n"
    output = tmp_path_factory.mktemp("out") / request.param
    return train(recipe(base, rows, request.param, data="eval: 0.2", rest=evaluation), output=output)


def test_the_run_folder_remembers_everything(run: Run) -> None:
    kind = run.recipe().method.kind
    there = {path.name for path in run.folder.iterdir() if not path.name.startswith(".")}
    expected = {
        "recipe.yaml",
        "plan.json",
        "data.json",
        "base.json",
        "metrics.jsonl",
        "events.jsonl",
        "checkpoints",
        "result.json",
    }
    assert there == expected | {"model" if kind == "full" else "adapter"}
    assert "auto" not in (run.folder / "recipe.yaml").read_text()
    result = run.read("result.json")
    assert result["steps"] == max(losses(run.folder))
    assert result["tokens"] == run.read("data.json")["tokens"]  # one epoch: every token once, padding not counted
    assert result["eval_loss"] > 0
    events = [json.loads(line)["event"] for line in (run.folder / "events.jsonl").read_text().splitlines()]
    assert (events[0], events[-1]) == ("start", "end")
    assert run.complete_checkpoints()


def test_training_learns(run: Run) -> None:
    series = losses(run.folder)
    assert series[max(series)] < series[min(series)]


def test_what_was_trained_loads_with_the_plain_library(run: Run, base: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    untrained = AutoModelForCausalLM.from_pretrained(base)
    ids = list(range(40, 60))
    before = logits(untrained, ids)
    if run.recipe().method.kind == "full":
        after = logits(AutoModelForCausalLM.from_pretrained(run.model), ids)
        assert AutoTokenizer.from_pretrained(run.model).chat_template
    else:
        after = logits(PeftModel.from_pretrained(untrained, run.adapter), ids)
        assert AutoTokenizer.from_pretrained(run.adapter).chat_template
    assert (after - before).abs().max() > 1e-2


def test_adapters_are_fp32_and_all_of_them_moved(run: Run) -> None:
    if run.recipe().method.kind == "full":
        pytest.skip("full fine-tuning has no adapter")
    from safetensors.torch import load_file

    tensors = load_file(run.adapter / "adapter_model.safetensors")
    assert len(tensors) == 2 * 7 * 2  # A and B of seven projections in two layers
    assert {t.dtype for t in tensors.values()} == {torch.float32}
    assert all(t.abs().max() > 0 for name, t in tensors.items() if "lora_B" in name)


def test_merged_logits_equal_base_plus_adapter(run: Run, base: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    if run.recipe().method.kind == "full":
        with pytest.raises(FinetuneError, match="nothing to merge"):
            merge(run)
        return
    merged = merge(run)
    assert merged.folder == run.folder / "merged"
    ids = list(range(30, 70))
    expected = logits(PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), run.adapter), ids)
    got = logits(AutoModelForCausalLM.from_pretrained(merged.folder), ids)
    assert (got - expected).abs().max() < 1e-4


def test_evaluation_asks_untrained_and_tuned(run: Run) -> None:
    result = evaluate(run)
    assert [arm.name for arm in result.arms] == ["untrained, zero-shot", "untrained, 2-shot", "tuned"]
    assert all(len(arm.answers) == 4 for arm in result.arms)
    # The untrained arms must not see the adapter: the base model alone gives the same answers.
    base_answers = load_speaker(run.folder, base=True).answer(
        [Conversation([{"role": "user", "content": q}]) for q in result.questions], max_new_tokens=4
    )
    assert [a.text for a in base_answers] == result.arms[0].answers
    assert run.read("evaluation.json")["rows"] == 4


def test_every_way_to_cut_a_batch_gives_the_same_weights(base: Path, rows: Path, tmp_path: Path) -> None:
    """8 rows at once, 2 x 4 and 8 x 1: one division by all trained tokens, not a mean of means."""
    from safetensors.torch import load_file

    adapters, norms = [], []
    for micro in (8, 4, 1):
        whole = recipe(base, rows, rest="load: {dtype: float32}")
        run = train(_with(whole, batch_size=8, micro_batch=micro, precision="fp32"), output=tmp_path / str(micro))
        adapters.append(load_file(run.adapter / "adapter_model.safetensors"))
        norms.append(
            [json.loads(line).get("grad_norm") for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
        )
    for other, norm in zip(adapters[1:], norms[1:], strict=True):
        assert norm == pytest.approx(norms[0], rel=1e-4)
        for name, tensor in adapters[0].items():
            torch.testing.assert_close(other[name], tensor, rtol=1e-3, atol=1e-5)


def _with(whole: Recipe, **fields: Any) -> Recipe:
    return whole.model_copy(update={"train": whole.train.model_copy(update=fields)})


def test_the_evaluation_loss_is_per_label_whatever_the_batches(base: Path, rows: Path, tmp_path: Path) -> None:
    """In fp32, after a step too small to matter: Adam's first goes by signs, which rounding turns."""
    found = []
    for micro in (1, 2, 4):
        whole = recipe(base, rows, data="eval: 0.3", train="steps: 1, precision: fp32", rest="load: {dtype: float32}")
        run = train(_with(whole, micro_batch=micro, learning_rate=1e-9), output=tmp_path / str(micro))
        found.append(run.read("result.json")["eval_loss"])
    assert found[1:] == pytest.approx([found[0]] * 2, rel=1e-6)


def test_checkpointing_changes_nothing_but_memory(base: Path, rows: Path, tmp_path: Path) -> None:
    plain = train(recipe(base, rows, train="steps: 3, checkpointing: false"), output=tmp_path / "plain")
    again = train(recipe(base, rows, train="steps: 3, checkpointing: true"), output=tmp_path / "again")
    assert list(losses(again.folder).values()) == pytest.approx(list(losses(plain.folder).values()), rel=1e-5)
    assert all(
        json.loads(line)["grad_norm"] > 0 for line in (again.folder / "metrics.jsonl").read_text().splitlines()
    )


def without(record: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in record.items() if name != key}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_weights_that_lie_as_in_their_file_change_nothing_but_memory(rows: Path, tmp_path: Path, dtype: str) -> None:
    base = tiny_model(tmp_path / "base", dtype=dtype)
    asked = f"load: {{dtype: float32}}\nevaluate: {{data: {rows}, rows: 4, few_shot: 0, max_new_tokens: 4}}\n"
    runs = [
        train(
            recipe(base, rows, train="precision: fp32", rest=asked + f"fast: {{weights: {way}}}\n"),
            output=tmp_path / way,
        )
        for way in ("false", "auto")
    ]
    assert runs[1].recipe().fast.weights is True
    assert losses(runs[0].folder) == losses(runs[1].folder)
    plain, held = (load_file(run.adapter / "adapter_model.safetensors") for run in runs)
    assert all(torch.equal(held[name], plain[name]) for name in plain)
    answers = [[without(arm, "seconds") for arm in run.read("evaluation.json")["arms"]] for run in runs]
    assert answers[0] == answers[1]
    memory = [run.read("result.json")["memory"] for run in runs]
    weights = 2 * (64 * (64 + 32 + 32 + 64) + 3 * 64 * 128)  # of two layers
    spared = 2 * weights - 4 * 64 * 128  # two bytes of each, less the room for one layer
    assert memory[0]["peak_bytes"] - memory[1]["peak_bytes"] == pytest.approx(spared, rel=0.05)
    assert memory[0]["predicted_bytes"] - memory[1]["predicted_bytes"] == spared


@pytest.mark.parametrize(
    "optimizer",
    ["paged_adamw_8bit", "paged_adamw_32bit", "adamw_8bit", "adamw_torch", "adafactor", "sgd", "lion_8bit"],
)
def test_every_optimizer_takes_a_step(base: Path, rows: Path, tmp_path: Path, optimizer: str) -> None:
    run = train(recipe(base, rows, train=f"steps: 2, optimizer: {optimizer}"), output=tmp_path / "run")
    assert len(losses(run.folder)) == 2


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
def test_schedules_warm_up_and_end_where_they_should(base: Path, rows: Path, tmp_path: Path, schedule: str) -> None:
    run = train(recipe(base, rows, train=f"steps: 6, warmup: 0.34, schedule: {schedule}"), output=tmp_path / "run")
    rates = [json.loads(line)["learning_rate"] for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    # Three of six steps warm up (0.34 x 6, rounded up); the logged rate is the one the step was made with.
    assert rates[:4] == pytest.approx([0, 1e-2 / 3, 2e-2 / 3, 1e-2])
    last = {"cosine": 1e-2 * 0.25, "linear": 1e-2 / 3, "constant": 1e-2}[schedule]
    assert rates[5] == pytest.approx(last)


def test_a_loss_that_is_no_number_stops_the_run(base: Path, rows: Path, tmp_path: Path) -> None:
    # A learning rate that throws the weights out of range at once.
    with pytest.raises(FinetuneError, match="The loss at step"):
        train(
            _with(recipe(base, rows, "full"), learning_rate=1e30, warmup=0.0, max_grad_norm=0.0),
            output=tmp_path / "run",
        )
    assert not (tmp_path / "run" / "result.json").exists()


def test_a_bad_loss_between_two_log_lines_is_found_before_anything_is_saved(
    base: Path, rows: Path, tmp_path: Path
) -> None:
    whole = recipe(base, rows, "full")
    bad = _with(whole, learning_rate=1e30, warmup=0.0, max_grad_norm=0.0, log_every=500)
    with pytest.raises(FinetuneError, match="The loss at step"):
        train(bad, output=tmp_path / "run")
    assert not Run(tmp_path / "run").complete_checkpoints()
    assert not (tmp_path / "run" / "model").exists()


def test_rows_without_a_reply_are_an_error_and_leave_nothing(base: Path, tmp_path: Path) -> None:
    empty = write_rows(tmp_path / "bad.jsonl", [{"messages": [{"role": "user", "content": "Hi"}]}])
    with pytest.raises(DataError):
        train(recipe(base, empty), output=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_finished_run_is_not_written_over(run: Run, base: Path, rows: Path) -> None:
    with pytest.raises(RunError, match="finished"):
        train(recipe(base, rows), output=run.folder)
    assert open_run(run.folder).finished


def test_modules_to_save_are_trained_whole_and_merged(rows: Path, tmp_path: Path) -> None:
    """An untied head beside the adapters: the run trains it, and the merge puts the trained one in its place."""
    from safetensors.torch import load_file

    base = tiny_model(tmp_path / "untied", tied=False)
    method = "{kind: lora, rank: 4, alpha: 8, modules_to_save: [lm_head]}"
    run = train(recipe(base, rows, method), output=tmp_path / "run")
    saved = load_file(run.adapter / "adapter_model.safetensors")
    trained = next(tensor for name, tensor in saved.items() if "lm_head" in name)
    before = load_file(base / "model.safetensors")["lm_head.weight"]
    assert trained.shape == before.shape
    assert not torch.equal(trained, before.float())
    merged = merge(run)
    after = load_file(merged.folder / "model.safetensors")["lm_head.weight"]
    assert torch.equal(after, trained.to(after.dtype))
