"""The scripts that hold the plan against real steps: their cases, their random models, what they write."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from finetune.callbacks import Record
from finetune.device import Device, named_device
from finetune.facts import Facts, facts_of
from finetune.fast.head import IGNORED
from finetune.measure import Gauge, live_bytes
from finetune.plan import resolve
from finetune.recipe import Recipe
from finetune.verify import _rows

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
sys.path.insert(0, str(SCRIPTS))
try:
    import check_plan
    import gpu_check
    import random_model
finally:
    sys.path.pop(0)

LAPTOP = Device("cpu", "CPU", 16 * 10**9, bf16=False)
DONE: dict[str, Any] = {
    "batch": {"rows": 1, "length": 2048, "supervised": 2047, "flat": False, "padded": False}, "seconds": 3.0,
    "measured": 1_000_000_000, "predicted": 1_010_000_000, "estimated": False, "simulated": 999_000_000,
    "simulated_during": "backward: aten::mm",
}  # fmt: skip
ON_GPU = {**DONE, "reserved": 1_200_000_000, "reserved_simulated": 1_260_000_000, "kernel": "flash"}


@pytest.fixture
def laptop(monkeypatch: pytest.MonkeyPatch) -> None:
    """fp32 whatever this processor is; some have bf16 products, which take their own scratch memory."""
    monkeypatch.setattr(check_plan, "this_machine", lambda: LAPTOP)


def case(name: str) -> check_plan.Case:
    return check_plan.chosen([*check_plan.CASES, *gpu_check.CASES], [name])[0]


# -------------------------------------------------------------------------------------------------------------- cases


def test_each_case_has_a_name_of_its_own_and_a_recipe_that_resolves() -> None:
    for cases, device in ((check_plan.CASES, LAPTOP), (gpu_check.CASES, named_device("h200"))):
        assert len({each.name for each in cases}) == len(cases)
        for each in cases:
            recipe, _, plan = check_plan.planned(each, device, layers=2)
            assert recipe.train.checkpointing == each.checkpointing
            assert plan.batch.padded == each.padded
            assert plan.batch.tokens == each.rows * each.length
            if each.attention != "auto":
                assert recipe.load.attention == each.attention


def test_the_cases_are_those_that_were_promised() -> None:
    def shapes(cases: Any) -> set[tuple[Any, ...]]:
        return {(c.model, c.method["kind"], c.method.get("targets", "all"), c.checkpointing) for c in cases}

    small = {("full", "all"), ("lora", "qv"), ("lora", "attention"), ("lora", "all"), ("qlora", "all")}
    on_cpu = shapes(check_plan.CASES)
    assert {("smollm2-135m", *method, on) for method in small for on in (False, True)} <= on_cpu
    on_gpu = shapes(gpu_check.CASES)
    for model in (gpu_check.GEMMA, gpu_check.LLAMA):
        assert {(model, kind, "all", on) for kind in ("lora", "qlora") for on in (False, True)} <= on_gpu
    assert {("smollm2-135m", kind, "all", False) for kind in ("full", "lora", "qlora")} <= on_gpu
    large = [c for c in gpu_check.CASES if c.model != "smollm2-135m"]
    assert all(c.random and c.length == 2048 for c in large)


def test_a_smaller_card_leaves_out_what_it_has_no_room_for() -> None:
    kept, left_out = gpu_check.with_room(gpu_check.CASES, named_device("24GB"))
    assert "llama-qlora-checkpointing" in {c.name for c in kept}
    assert any(line.startswith("gemma-full needs 5") for line in left_out)
    assert len(kept) + len(left_out) == len(gpu_check.CASES)
    assert gpu_check.with_room(gpu_check.CASES, named_device("h200"))[1] == []


def test_an_unknown_case_is_refused_with_the_known_ones() -> None:
    with pytest.raises(SystemExit, match="no case loar. There are full, .*lora-eager"):
        check_plan.chosen(check_plan.CASES, ["loar"])


def test_a_file_is_named_after_the_card() -> None:
    assert gpu_check.file_name("NVIDIA H200") == "plan-h200"
    assert gpu_check.file_name("NVIDIA GeForce RTX 4090") == "plan-geforce-rtx-4090"


# ------------------------------------------------------------------------------------------------------ random models


def small(**config: Any) -> Facts:
    """A few layers of 256, and a vocabulary that weighs little beside them."""
    from transformers import AutoConfig, AutoModelForCausalLM

    numbers: dict[str, Any] = {
        "model_type": "llama", "vocab_size": 320, "hidden_size": 256, "intermediate_size": 1024,
        "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, **config,
    }  # fmt: skip
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(**numbers))
    return facts_of("small", numbers, {name: tuple(p.shape) for name, p in model.named_parameters()}, "F32")


def resolved(method: dict[str, Any], facts: Facts) -> Recipe:
    recipe = Recipe.model_validate(
        {"model": "small", "method": method, "data": {"train": "x.jsonl", "max_length": 32},
         "train": {"batch_size": 1, "micro_batch": 1}}
    )  # fmt: skip
    return resolve(recipe, facts, LAPTOP)[0]


@pytest.mark.parametrize("double", [True, False])
def test_a_random_4_bit_model_never_holds_the_16_bit_one(double: bool) -> None:
    from bitsandbytes.nn import Linear4bit  # type: ignore[attr-defined]

    facts = small(num_hidden_layers=4)
    recipe = resolved({"kind": "qlora", "double_quant": double}, facts)
    before = live_bytes()
    with Gauge("cpu") as gauge:
        model = random_model.random_model(recipe, facts, "cpu")
    layer = 4 * 256 * 1024  # the largest one in fp32
    packed = live_bytes() - before
    assert gauge.peak - before < packed + 4 * layer
    assert gauge.peak - before < 0.5 * 4 * facts.parameters
    layers = [module for module in model.modules() if isinstance(module, Linear4bit)]
    assert len(layers) == 7 * 4
    assert all(each.weight.quant_state.nested == double for each in layers)
    assert all(p.device.type == "cpu" and not p.is_meta for p in model.parameters())
    assert (model.is_loaded_in_4bit, model.is_quantized, model.hf_quantizer.is_trainable) == (True, True, True)
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}


@pytest.mark.parametrize("kind", ["full", "lora", "qlora"])
@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_a_random_model_computes(kind: str, architecture: str) -> None:
    facts = small(model_type=architecture, num_hidden_layers=2)
    model = random_model.random_model(resolved({"kind": kind}, facts), facts, "cpu")
    ids = torch.arange(16)[None]
    out = model(input_ids=ids, labels=ids)
    assert out.loss.item() == pytest.approx(torch.log(torch.tensor(320.0)).item(), rel=0.1)
    out.loss.backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    assert (head.weight is table.weight) == facts.tied


def test_a_random_model_equals_one_from_transformers_in_its_buffers() -> None:
    from transformers import AutoModelForCausalLM

    from finetune.meta import model_config

    facts = small(model_type="gemma2", num_hidden_layers=2)
    made = random_model.random_model(resolved({"kind": "full"}, facts), facts, "cpu")
    true: Any = AutoModelForCausalLM.from_config(model_config(facts))
    found = dict(made.named_buffers())
    assert found.keys() == dict(true.named_buffers()).keys()
    for name, buffer in true.named_buffers():
        torch.testing.assert_close(found[name], buffer)


def test_the_small_tokenizer_reads_and_pads() -> None:
    tokenizer = random_model.small_tokenizer()
    batch = tokenizer(["one", "and two"], padding=True)
    assert len(set(batch["input_ids"][1])) == len("andtwo") + 1
    assert batch["attention_mask"][0] == [1, 1, 1, 0, 0, 0, 0]


# ----------------------------------------------------------------------------------------------------- measured cases


@pytest.mark.usefixtures("laptop")
@pytest.mark.parametrize("name", ["lora-qv", "qlora-checkpointing"])
def test_a_case_on_a_cut_model_is_what_was_predicted(name: str) -> None:
    result = check_plan.check(dataclasses.replace(case(name), length=128), layers=1)
    assert check_plan.off({name: result}) == []
    assert abs(check_plan.difference(result, "simulated")) < 0.002
    # The last of 128 tokens predicts nothing and is not run.
    assert (result["batch"]["rows"], result["batch"]["length"], result["batch"]["supervised"]) == (1, 127, 127)
    assert json.loads(json.dumps(result))["measured"] == result["measured"]


def test_two_real_steps_save_no_checkpoint(laptop: None, monkeypatch: pytest.MonkeyPatch) -> None:
    saved: list[Any] = []
    monkeypatch.setattr(Record, "on_save", lambda self, *args, **kwargs: saved.append(args))
    check_plan.check(dataclasses.replace(case("lora-qv"), length=16), layers=1)
    assert saved == []


def test_rows_of_a_padded_plan_are_all_unequal_and_those_of_another_all_equal() -> None:
    lengths = {}
    for name in ("smollm2-lora-padded", "smollm2-lora"):
        plan = check_plan.planned(case(name), named_device("h200"), layers=2)[2]
        rows = _rows(plan, 8, 1000)
        lengths[name] = rows.lengths.tolist()
        assert all(
            0 < sum(label != IGNORED for label in labels) < len(labels) for labels in (row.labels for row in rows)
        )
    assert lengths["smollm2-lora-padded"] == [512 - number for number in range(16)]
    assert lengths["smollm2-lora"] == [512] * 16


@pytest.mark.usefixtures("laptop")
def test_a_case_of_the_gpu_runs_here_too_with_its_rows_laid_flat() -> None:
    short = dataclasses.replace(case("smollm2-lora-padded"), rows=2, length=64)
    result = check_plan.check(short, layers=1)
    assert check_plan.off({short.name: result}) == []
    assert (result["batch"]["flat"], result["batch"]["padded"]) == (True, False)


def test_a_case_in_its_own_process_that_fails_or_takes_too_long_is_a_line_of_the_table(tmp_path: Path) -> None:
    each = case("lora")
    script = tmp_path / "script.py"
    bench = check_plan.Bench(script, 2, 1, 60, 60)
    said: list[str] = []
    for text, expected in (
        ("import json, sys; json.dump({'measured': 1}, open(sys.argv[3], 'w'))", {"measured": 1}),
        ("print('x'); raise ValueError('no room')", {"error": "ValueError: no room"}),
        ("raise SystemExit(3)", {"error": "exit code 3"}),
    ):
        script.write_text(text)
        assert check_plan._process(each, bench, 60) == expected
    script.write_text("import time; time.sleep(60)")
    assert check_plan._process(each, bench, 1) == {"error": "stopped after 1 s"}
    late = check_plan.run_all([each], dataclasses.replace(bench, budget=0), LAPTOP, said.append)
    assert late == {"lora": {"error": "not begun: the time was up"}}
    assert said == ["lora: FAILED, not begun: the time was up"]


def test_each_case_gets_its_environment_and_its_share_of_the_threads(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import json, os, sys; json.dump(dict(os.environ, args=sys.argv[1:]), open(sys.argv[3], 'w'))")
    found = check_plan._process(case("llama-lora-flash"), check_plan.Bench(script, 2, 3, 60, 60, layers=4), 60)
    assert found["TORCH_CUDNN_SDPA_DEPRIORITIZED"] == "1"
    assert found["OMP_NUM_THREADS"] == "3"
    assert [*found["args"][:2], *found["args"][3:]] == ["--child", "llama-lora-flash", "--layers", "4"]


def test_cases_wait_until_there_is_room() -> None:
    room, order = check_plan.Room(10), []
    inside = threading.Event()

    def second() -> None:
        inside.set()
        with room.take(7):
            order.append("second")

    with room.take(5), room.take(5):
        thread = threading.Thread(target=second)
        thread.start()
        inside.wait(5)
        order.append("first")
    thread.join(5)
    assert order == ["first", "second"]
    with room.take(11):  # larger than all there is: alone
        assert room.used == 11


# ----------------------------------------------------------------------------------------------------- what it writes


def test_the_table_has_a_line_for_each_case() -> None:
    cases = [case("lora"), case("full"), case("dora")]
    far = {**DONE, "predicted": 700_000_000, "estimated": True}
    results = {"lora": DONE, "full": {"error": "stopped after 9 s"}, "dora": far}
    lines = check_plan.table(cases, results).splitlines()
    assert lines[0] == "| case | micro-batch | measured, MB | plan |  | simulated |  | operation at the peak |"
    assert lines[2] == "| lora | 1 x 2,048 | 1,000.0 | 1,010.0 | +1.00 % | 999.0 | -0.10 % | backward: mm |"
    assert lines[3] == "| full | stopped after 9 s |  |  |  |  |  |  |"
    assert "| ~700.0 | -30.00 % |" in lines[4]
    assert {line.count("|") for line in lines} == {9}
    assert check_plan.off(results) == ["full"]
    assert check_plan.off({"lora": {**DONE, "predicted": 1_030_000_000}}) == ["lora"]
    assert check_plan.verdict(results) == (
        "2 of 3 cases ran; the plan is off by 1.00% in the mean and 1.00% at worst; "
        "the simulation is off by 0.10% in the mean and 0.10% at worst."
    )


def test_on_a_gpu_the_table_shows_what_was_reserved_and_which_kernel_ran() -> None:
    padded = {**ON_GPU, "batch": {**DONE["batch"], "rows": 2, "padded": True}}
    lines = check_plan.table([case("llama-lora")], {"llama-lora": padded}).splitlines()
    assert "2 x 2,048, padded" in lines[2]
    assert "| 1,200 | +5.0 % | flash |" in lines[2]
    assert "reserved memory by 5.0% and 5.0%" in check_plan.verdict({"llama-lora": ON_GPU})


def test_the_page_says_where_and_with_what_it_was_measured(tmp_path: Path) -> None:
    cases, results = [case("lora")], {"lora": DONE}
    text = check_plan.page("Title", "Intro.", "a machine", "python scripts/check_plan.py", cases, results)
    assert text.startswith("# Title\n\nWritten by `python scripts/check_plan.py` on 2")
    assert f"torch {torch.__version__}" in text
    content = check_plan.document("a machine", "python scripts/check_plan.py", cases, results)
    check_plan.write(tmp_path / "new", "plan-x", text, content)
    read = json.loads((tmp_path / "new" / "plan-x.json").read_text())
    assert (read["cases"][0]["name"], read["cases"][0]["measured"]) == ("lora", 1_000_000_000)
    assert (tmp_path / "new" / "plan-x.md").read_text() == text


def test_torch_is_asked_which_attention_kernel_it_takes() -> None:
    recipe, facts, plan = check_plan.planned(dataclasses.replace(case("lora"), length=64), LAPTOP)
    assert check_plan.attention_kernel(plan, facts, "cpu") in ("flash", "math")
    eager = check_plan.planned(dataclasses.replace(case("lora-eager"), length=64), LAPTOP)
    assert check_plan.attention_kernel(eager[2], eager[1], "cpu") == "eager"


def test_without_a_gpu_it_says_so_in_one_line_and_ends_well() -> None:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(SCRIPTS / "gpu_check.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=True)
    assert done.stdout.startswith("gpu_check is skipped: torch ")
    assert done.stdout.count("\n") == 1


@pytest.mark.parametrize(
    ("cuda", "set_", "there", "reason"),
    [
        (None, "", False, "built without CUDA"),
        ("13.0", "true", True, "ACCELERATE_USE_CPU is set"),
        ("13.0", "", False, "torch sees no CUDA device"),
        ("13.0", "", True, None),
    ],
)
def test_why_nothing_is_measured(
    cuda: str | None, set_: str, there: bool, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    monkeypatch.setenv("ACCELERATE_USE_CPU", set_)
    said = gpu_check.why_not()
    assert said is None if reason is None else reason in str(said)
