"""State and temporaries of every optimizer against the real objects, on a CPU."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from finetune.measure import Gauge
from finetune.optimizers import BLOCK, PAGED_FROM, SMALL, in_8_bits, is_paged, moments, state_sizes, step_temporaries
from finetune.recipe import Optimizer
from finetune.steps import Path

Shape = tuple[int, ...]
NAMES = get_args(Optimizer)


def real(name: str, parameters: list[nn.Parameter]) -> Any:
    """The optimizer as transformers' Trainer makes it."""
    from bitsandbytes import optim as bnb
    from transformers.optimization import Adafactor

    makers: dict[str, Callable[[], Any]] = {
        "adamw_torch": lambda: torch.optim.AdamW(parameters),
        "adamw_torch, foreach": lambda: torch.optim.AdamW(parameters, foreach=True),
        "adamw_torch_fused": lambda: torch.optim.AdamW(parameters, fused=True),
        "adamw_8bit": lambda: bnb.AdamW8bit(parameters),
        "paged_adamw_8bit": lambda: bnb.PagedAdamW8bit(parameters),
        "paged_adamw_32bit": lambda: bnb.PagedAdamW32bit(parameters),
        "lion_8bit": lambda: bnb.Lion8bit(parameters),
        "paged_lion_8bit": lambda: bnb.PagedLion8bit(parameters),
        "adafactor": lambda: Adafactor(parameters, scale_parameter=False, relative_step=False, lr=1e-3),
        "sgd": lambda: torch.optim.SGD(parameters, lr=0.1),
    }
    # Overrides are kept by a parameter's address; one of another test's may have had the same.
    bnb.GlobalOptimManager.get_instance().initialize()
    return makers[name]()


def stepped(name: str, shapes: Sequence[Shape]) -> tuple[Any, list[nn.Parameter]]:
    """An optimizer over parameters of these shapes after its first step."""
    parameters = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizer = real(name, parameters)
    optimizer.step()
    return optimizer, parameters


def kept(optimizer: Any, parameter: nn.Parameter) -> dict[str, int]:
    """Bytes of each tensor that is kept for a parameter.

    Without the two tables of 256 values that bitsandbytes' tensors share, and without AdamW's step counters that lie
    on the host when training runs on a card.
    """
    fused = optimizer.defaults.get("fused")
    left_out = ("qmap1", "qmap2") if fused else ("qmap1", "qmap2", "step")
    state = optimizer.state[parameter]
    return {key: item.nbytes for key, item in state.items() if torch.is_tensor(item) and key not in left_out}


@pytest.fixture(scope="module", autouse=True)
def _quiet() -> Iterator[None]:
    """Collecting garbage looks only at what a test makes."""
    stepped("paged_adamw_8bit", [(SMALL,)])  # imports
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


# ----------------------------------------------------------------------------------------------------------- state

SHAPES = st.one_of(
    st.integers(1, 9000).map(lambda n: (n,)),
    st.tuples(st.integers(1, 130), st.integers(1, 130)),
    st.sampled_from([(4095,), (4096,), (4097,), (64, 64), (63, 65), (1, 4096), (256, 17)]),
)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=15, deadline=None)
@given(st.lists(SHAPES, min_size=1, max_size=3))
def test_the_state_is_what_the_optimizer_keeps(name: str, shapes: list[Shape]) -> None:
    optimizer, parameters = stepped(name, shapes)
    for parameter, shape in zip(parameters, shapes, strict=True):
        expected = sorted(state_sizes(name, "model.layers.0.mlp.up_proj.weight", shape))
        assert sorted(kept(optimizer, parameter).values()) == expected


@pytest.mark.parametrize(
    ("name", "bytes_"),
    [
        ("adamw_torch", 2 * 4 * 576 * 1536),
        ("adamw_torch_fused", 2 * 4 * 576 * 1536 + 4),
        ("paged_adamw_32bit", 2 * 4 * 576 * 1536),
        ("adamw_8bit", 2 * (576 * 1536 + 4 * 3456)),  # 884,736 / 256 = 3,456 blocks
        ("paged_adamw_8bit", 2 * (576 * 1536 + 4 * 3456)),
        ("lion_8bit", 576 * 1536 + 4 * 3456),
        ("paged_lion_8bit", 576 * 1536 + 4 * 3456),
        ("adafactor", 4 * (576 + 1536 + 1)),
        ("sgd", 0),
    ],
)
def test_an_mlp_matrix_by_hand(name: str, bytes_: int) -> None:
    assert sum(state_sizes(name, "model.layers.0.mlp.up_proj.weight", (1536, 576))) == bytes_
    assert moments(name) == (0 if name in ("sgd", "adafactor") else 1 if "lion" in name else 2)


def test_embeddings_keep_32_bit_state_and_other_layers_of_that_size_do_not() -> None:
    shape = (1000, 64)
    for name in ("model.embed_tokens.weight", "transformer.wte.weight"):
        assert state_sizes("adamw_8bit", name, shape) == [256_000, 256_000]
    assert state_sizes("adamw_8bit", "lm_head.weight", shape) == [64_000, 64_000, 1000, 1000]
    assert [in_8_bits("adamw_8bit", "lm_head.weight", size) for size in (SMALL - 1, SMALL)] == [False, True]


def test_the_constants_are_the_libraries_own() -> None:
    """bitsandbytes pages from 1e5 values and quantises in blocks of 256 from 4,096."""
    from bitsandbytes import optim

    optimizer = optim.PagedAdamW8bit([nn.Parameter(torch.zeros(4096))])
    assert optimizer.args.min_8bit_size == SMALL
    assert PAGED_FROM == 1e5
    optimizer, [parameter] = stepped("adamw_8bit", [(SMALL,)])
    assert kept(optimizer, parameter)["absmax1"] == 4 * SMALL // BLOCK


def test_large_tensors_of_paged_optimizers_lie_in_unified_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked of bitsandbytes itself: the sizes that it hands to its paged allocator. "meta" stands in for a card."""
    from bitsandbytes import functional, optim

    paged: list[int] = []

    def get_paged(*shape: int, dtype: torch.dtype, device: Any) -> torch.Tensor:
        paged.append(math.prod(shape))
        return torch.empty(shape, dtype=dtype, device=device)

    monkeypatch.setattr(functional, "get_paged", get_paged)
    monkeypatch.setattr(functional, "fill", lambda *_: None)
    sizes = [PAGED_FROM - 1, PAGED_FROM, 3 * PAGED_FROM]
    weights = [nn.Parameter(torch.empty(size, device="meta")) for size in sizes]
    for name, maker in (("paged_adamw_8bit", optim.PagedAdamW8bit), ("adamw_8bit", optim.AdamW8bit)):
        paged.clear()
        optimizer = maker(weights)
        for weight in weights:
            optimizer.get_state_buffer(weight, dtype=torch.uint8)
        assert paged == [size for size in sizes if is_paged(name, size)]
        assert bool(paged) == name.startswith("paged")


# ----------------------------------------------------------------------------------------------------- temporaries


def path(name: str, device: str = "cpu") -> Path:
    return Path(device, "float32", None, "cpu", "supervised", 0, name)  # type: ignore[arg-type]


def measured(name: str, shapes: Sequence[Shape]) -> int:
    """Bytes that one step takes beyond what is there before."""
    optimizer, _ = stepped(name, shapes)
    with Gauge("cpu") as gauge:
        optimizer.step()
    return gauge.peak - gauge.before


def named(shapes: Sequence[Shape]) -> list[tuple[str, Shape]]:
    return [(f"layers.{number}.mlp.up_proj.weight", shape) for number, shape in enumerate(shapes)]


WIDE, HIGH, SHORT = (400, 300), (500, 200), (1000,)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "shapes", [[WIDE], [WIDE, WIDE], [WIDE, HIGH], [HIGH, WIDE], [SHORT, WIDE, SHORT], [WIDE, SHORT, WIDE]]
)
def test_a_step_takes_what_it_takes(name: str, shapes: list[Shape]) -> None:
    """Within 3 %: row means, scales and scalars come on top."""
    planned = sum(step_temporaries(path(name), named(shapes)))
    assert measured(name, shapes) == pytest.approx(planned, rel=0.03, abs=100)


def test_on_a_card_adamw_takes_all_roots_at_once() -> None:
    """torch's foreach form, which it takes there; here it is asked for."""
    shapes = [WIDE, HIGH, SHORT]
    planned = step_temporaries(path("adamw_torch", "cuda"), named(shapes))
    assert planned == [4 * 120_000, 4 * 100_000, 4000]
    assert measured("adamw_torch, foreach", shapes) == pytest.approx(sum(planned), abs=100)


def test_on_a_card_the_others_work_in_place_and_adafactor_does_not() -> None:
    for name in NAMES:
        planned = sum(step_temporaries(path(name, "cuda"), named([WIDE, WIDE])))
        assert planned == {"adamw_torch": 2, "adafactor": 3}.get(name, 0) * 4 * math.prod(WIDE)


@pytest.mark.parametrize("name", NAMES)
def test_nothing_trained_takes_nothing(name: str) -> None:
    for device in ("cpu", "cuda"):
        assert step_temporaries(path(name, device), []) == []
