"""`fast.compile`: the same training through torch.compile, and a line that says when it pays."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo import lookup_backend
from torch._dynamo.utils import counters
from transformers import TrainerControl, TrainerState, TrainingArguments

from finetune.fast import compiled
from finetune.fast.compiled import CompileLayers, Gain, Span, layers_of
from finetune.train import train
from tests.flow.conftest import losses, recipe
from tests.tiny import tiny_model

pytestmark = [
    pytest.mark.usefixtures("workdir", "one_thread"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # torch about its own
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),  # dynamo looks at it
]


@pytest.fixture(autouse=True)
def _nothing_compiled_stays() -> Iterator[None]:
    """Dynamo would keep the models of these tests alive."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


STEPS = "precision: fp32, steps: 16, optimizer: sgd"  # Adam would make a whole step of a rounding
WIDE = "load: {dtype: float32}\n"
LINE = re.compile(r"Compiled layers: \d+ s to compile, .*( at step 16|nothing gained)")


def test_the_break_even_of_three_spans() -> None:
    # 0.1 s a token before and 0.05 after; 40 tokens in 20 s would have taken 2 s, so 18 s are the price, which 360
    # tokens win back: 18 steps of 20 tokens, behind the 6 that come first.
    gain = Gain.of(Span(10, 100), Span(20, 40), Span(3, 60), tokens=20)
    assert gain == Gain(pytest.approx(18), pytest.approx(2), pytest.approx(1), 24)
    assert gain.in_words(100).endswith("18 s to compile, 1 s a step, 2 before: it has paid at step 24, and this run "
                                       "ends at step 100.")  # fmt: skip
    assert gain.in_words(20).endswith("it has paid at step 24, and this run is over before, at step 20.")


def test_layers_that_are_not_quicker_never_pay() -> None:
    gain = Gain.of(Span(3, 60), Span(20, 40), Span(10, 100), tokens=20)
    assert gain.pays_at is None
    assert gain.in_words(100).endswith("nothing gained, so leave fast.compile off here.")


def test_training_is_the_same_and_what_it_gains_is_said(
    base: Path, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Dynamo and autograd as in real life; only the last stage, which writes C++, is left out.
    backend = lookup_backend("aot_eager")
    graphs: list[Any] = []

    def kept(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return backend(graph, inputs)

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=kept))
    asked = {"data": "eval: 0.2", "train": f"{STEPS}, eval_every: 8"}
    runs = [
        train(recipe(base, rows, rest=f"{WIDE}fast: {{compile: {way}}}", **asked), output=tmp_path / way)
        for way in ("false", "true")
    ]
    # A layer has 7 products with weights, each with A and B: 9 before attention, 3 right behind it, 9 in the MLP.
    products = [sum(node.target is torch.nn.functional.linear for node in graph.graph.nodes) for graph in graphs]
    assert (products.count(9), products.count(3)) >= (2, 1)
    plain, through = (losses(run.folder) for run in runs)
    assert through.keys() == plain.keys() == set(range(1, 17))
    assert list(through.values()) == pytest.approx(list(plain.values()), rel=1e-5)
    assert runs[1].read("result.json")["eval_loss"] == pytest.approx(
        runs[0].read("result.json")["eval_loss"], rel=1e-5
    )
    assert LINE.search(capsys.readouterr().err)
    (event,) = (event for event in events(runs[1].folder) if event["event"] == "compiled")
    assert event["step"] == 15
    assert event["seconds"] > 0


def test_where_compiling_does_not_work_everything_else_is_as_ever(
    base: Path, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(function: object) -> None:
        raise AssertionError

    monkeypatch.setattr(torch, "compile", broken)
    said: list[str] = []
    run = train(
        recipe(base, rows, train="steps: 1", rest="fast: {compile: true}\n"), output=tmp_path / "run", say=said.append
    )
    assert not run.recipe().fast.compile
    assert any(line.startswith("torch.compile does not work here (AssertionError), so layers run") for line in said)


def events(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("error", "why"), [(RuntimeError("no compiler.\nmore"), "no compiler"), (OSError(), "OSError")]
)
def test_why_it_does_not_work(monkeypatch: pytest.MonkeyPatch, error: Exception, why: str) -> None:
    def broken(function: object) -> None:
        raise error

    monkeypatch.setattr(torch, "compile", broken)
    assert compiled.why_not("cpu") == why


@pytest.mark.parametrize(
    ("kind", "layer"),
    [
        ("LlamaConfig", "LlamaDecoderLayer"), ("Gemma2Config", "Gemma2DecoderLayer"), ("GPT2Config", "GPT2Block"),
        ("OPTConfig", "OPTDecoderLayer"), ("GPTNeoXConfig", "GPTNeoXLayer"),
    ],
)  # fmt: skip
def test_the_layers_of_a_model_are_found(kind: str, layer: str) -> None:
    import transformers

    config = getattr(transformers, kind)(num_hidden_layers=3)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    assert [type(module).__name__ for module in layers_of(model)] == [layer] * 3
    model._no_split_modules = None
    assert layers_of(model) == []


class _Outer(torch.nn.Module):
    """A layer whose part has a name that is listed too."""

    _no_split_modules = ("Sequential", "Linear")

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Sequential(torch.nn.Linear(2, 2)) for _ in range(2)])


def test_of_layers_within_layers_the_outer_ones_are_compiled() -> None:
    model = _Outer()
    assert layers_of(model) == list(model.layers)


def _times(step: int) -> float:
    """Seconds of each step: the first two are slow, as they are while caches warm and memory is measured."""
    return 50.0 if step <= 2 else 2.0 if step <= 6 else 7.0 if step == 7 else 1.0


@pytest.mark.parametrize(
    ("resumed_at", "compiles_before", "steps"), [(0, 7, 16), (10, 11, 16), (3, 7, 16), (0, 7, 9)]
)
def test_when_a_run_compiles_and_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resumed_at: int, compiles_before: int, steps: int
) -> None:
    monkeypatch.setattr(torch, "compile", lambda forward, dynamic: forward)
    layer, said, noted, spent = torch.nn.Linear(2, 2), list[str](), list[dict[str, Any]](), [0.0, 0.0]
    callback = CompileLayers(
        [layer], lambda: Span(*spent), said.append, lambda kind, **fields: noted.append({"event": kind, **fields})
    )
    arguments, state, control = TrainingArguments(str(tmp_path)), TrainerState(max_steps=steps), TrainerControl()
    state.global_step = resumed_at
    callback.on_train_begin(arguments, state, control)
    compiled_at = None
    for step in range(resumed_at + 1, steps + 1):
        callback.on_step_begin(arguments, state, control)
        if compiled_at is None and "forward" in vars(layer):
            compiled_at = step
        spent[0], spent[1] = spent[0] + _times(step), spent[1] + 10
        state.global_step = step
        callback.on_step_end(arguments, state, control)
    callback.on_train_end(arguments, state, control)
    assert compiled_at == compiles_before
    assert "forward" not in vars(layer)  # what is asked afterwards runs as ever
    if resumed_at:
        assert not said
    elif steps < 15:
        assert said == ["fast.compile: after 9 steps it cannot be told what it gains; 15 would do."]
    else:  # 2 s before, 1 s after; 9 s for three steps are 6 too many, and 6 steps win them back
        assert noted == [
            {"event": "compiled", "step": 15, "seconds": 6.0, "before": 2.0, "after": 1.0, "pays_at": 12}
        ]
        assert len(said) == 1


def test_passes_without_gradients_are_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda forward, dynamic: lambda x: forward(x) + 100)
    layer = torch.nn.Linear(2, 2)
    callback = CompileLayers([layer], lambda: Span(0, 0), print, print)
    right = layer(torch.ones(2))
    callback.on_step_begin(TrainingArguments(), TrainerState(global_step=6), TrainerControl())
    assert torch.equal(layer(torch.ones(2)), right + 100)
    with torch.no_grad():
        assert torch.equal(layer(torch.ones(2)), right)


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
    assert compiled.why_not("cpu") is None, "no C++ compiler"
    base = tiny_model(tmp_path / "base", arch=arch)
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
