"""`fast.compile`: the same training through torch.compile, and a line that says when it pays."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import TrainerControl, TrainerState, TrainingArguments

from finetune.fast import compiled
from finetune.fast.compiled import CompileLayers, Span, break_even
from finetune.train import train
from tests.flow.conftest import losses, recipe
from tests.tiny import tiny_model

pytestmark = [
    pytest.mark.usefixtures("workdir", "one_thread"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # torch about its own
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),  # dynamo looks at it
]

STEPS = "precision: fp32, steps: 16, optimizer: sgd"  # Adam would make a whole step of a rounding
WIDE = "load: {dtype: float32}\n"
LINE = re.compile(r"Compiled layers: \d+ s to compile, .*(this run has 16|nothing gained)")


def test_the_break_even_of_three_spans() -> None:
    # 0.1 s a token before and 0.05 after; 40 tokens in 20 s would have taken 2 s, so 18 s are the price.
    price, tokens = break_even(Span(10, 100), Span(20, 40), Span(3, 60))
    assert (price, tokens) == (pytest.approx(18), pytest.approx(360))


def test_layers_that_are_not_quicker_never_pay() -> None:
    assert break_even(Span(3, 60), Span(20, 40), Span(10, 100))[1] == float("inf")


def test_training_is_the_same_and_the_line_is_said(
    base: Path, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Dynamo and autograd as in real life; only the last stage, which writes C++, is left out.
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()  # no graphs of other tests
    counters.clear()
    runs = [
        train(recipe(base, rows, train=STEPS, rest=f"{WIDE}fast: {{compile: {way}}}\n"), output=tmp_path / way)
        for way in ("false", "true")
    ]
    assert counters["stats"]["unique_graphs"] > 1  # more than the function that `why_not` tries
    plain, through = (losses(run.folder) for run in runs)
    assert through.keys() == plain.keys() == set(range(1, 17))
    assert list(through.values()) == pytest.approx(list(plain.values()), rel=1e-5)
    assert LINE.search(capsys.readouterr().err)
    memory = runs[1].read("result.json")["memory"]
    assert 0 < memory["peak_bytes"] <= memory["predicted_bytes"]


def test_compiling_that_does_not_work_steps_aside(
    base: Path, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(function: object) -> None:
        raise RuntimeError("no C++ compiler here\nand a long story")

    monkeypatch.setattr(torch, "compile", broken)
    run = train(recipe(base, rows, train="steps: 7", rest="fast: {compile: true}\n"), output=tmp_path / "run")
    assert len(losses(run.folder)) == 7
    assert "fast.compile steps aside, and layers run as they are: no C++ compiler here." in caplog.text


class _Layered(torch.nn.Module):
    """Two layers, named as transformers names them."""

    _no_split_modules = ("Linear",)

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(2, 2) for _ in range(2)])


@pytest.mark.parametrize(("resumed_at", "compiles_before"), [(0, 6), (9, 10), (3, 6)])
def test_a_run_that_goes_on_compiles_where_the_whole_one_would(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resumed_at: int, compiles_before: int
) -> None:
    monkeypatch.setattr(torch, "compile", lambda forward, dynamic: forward)
    model, said = _Layered(), list[str]()
    callback = CompileLayers(model, lambda: Span(1.0, 1.0), said.append)
    arguments, state, control = TrainingArguments(str(tmp_path)), TrainerState(max_steps=12), TrainerControl()
    state.global_step = resumed_at
    callback.on_train_begin(arguments, state, control)
    compiled_at = None
    for step in range(resumed_at, 12):
        callback.on_step_begin(arguments, state, control)
        if compiled_at is None and "forward" in vars(model.layers[0]):
            compiled_at = step + 1
        state.global_step = step + 1
        callback.on_step_end(arguments, state, control)
    callback.on_train_end(arguments, state, control)
    assert compiled_at == compiles_before
    assert "forward" not in vars(model.layers[0])  # what is asked afterwards runs as ever
    assert said == ([] if resumed_at else ["Compiled layers: the run is too short to tell what they gain."])


@pytest.mark.long
@pytest.mark.parametrize(
    ("arch", "method", "train_more"),
    [
        ("llama", "lora", ""),
        ("gemma2", "lora", ""),
        ("llama", "qlora", ", checkpointing: true"),
        ("llama", "full", ""),
        ("llama", "{kind: lora, rank: 4, alpha: 8, dropout: 0.0, variant: dora}", ""),
    ],
)
def test_the_whole_compiler_trains_the_same(
    rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arch: str, method: str, train_more: str
) -> None:
    assert compiled.why_not() is None, "no C++ compiler"
    base = tiny_model(tmp_path / "base", arch=arch)
    torch._dynamo.reset()  # no graphs of other tests
    counters.clear()
    plain, through = (
        losses(
            train(
                recipe(base, rows, method, train=STEPS + train_more, rest=f"{WIDE}fast: {{compile: {way}}}\n"),
                output=tmp_path / way,
            ).folder
        )
        for way in ("false", "true")
    )
    assert counters["stats"]["unique_graphs"] > 1  # more than the function that `why_not` tries
    assert list(through.values()) == pytest.approx(list(plain.values()), rel=1e-4)
    assert LINE.search(capsys.readouterr().err)
