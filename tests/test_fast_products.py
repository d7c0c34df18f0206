"""Products with a frozen weight: those of fp64 to fp32's rounding, by oneDNN or by torch."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from finetune.fast import products
from finetune.fast.products import back, by_torch, onednn, product

HERE = onednn()
WIDTHS = st.sampled_from([1, 2, 3, 8, 31, 96])


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """One entry for each product that could go to oneDNN; none does."""
    questions: list[str] = []
    monkeypatch.setattr(products, "onednn", lambda: bool(questions.append("onednn")))
    return questions


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The calls of oneDNN's operator."""
    calls: list[str] = []
    op = torch.ops.mkldnn._linear_pointwise

    class Watched:
        def __call__(self, *args: Any) -> Any:
            calls.append("product")
            return op(*args)

        def binary(self, *args: Any) -> Any:
            calls.append("sum")
            return op.binary(*args)

    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", Watched())
    return calls


@pytest.fixture
def fresh() -> Iterator[None]:
    """`onednn` without what it remembers."""
    onednn.cache_clear()
    yield
    onednn.cache_clear()


def near(found: torch.Tensor, right: torch.Tensor) -> bool:
    return bool((found.double() - right).norm() <= 1e-6 * right.norm() + 1e-30)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 40), WIDTHS, WIDTHS, st.booleans(), st.booleans(), st.integers(0, 3))
def test_they_are_the_products_of_fp64(rows: int, width: int, out: int, turned: bool, deep: bool, seed: int) -> None:
    """Rows of any number, none as well, of any memory order, with one dimension more or not."""
    torch.manual_seed(seed)
    x = torch.randn(width, rows).t() if turned else torch.randn(rows, width)
    weight = torch.randn(width, out).t() if turned else torch.randn(out, width)
    right = x.double() @ weight.double().t()
    given = x[None] if deep else x
    found = product(given, weight)
    assert found.shape == (*given.shape[:-1], out)
    assert near(found.flatten(0, -2), right)
    grad, total = torch.randn(rows, out), torch.randn(rows, width)
    before = total.clone()
    wide = grad.double() @ weight.double()
    assert near(back(grad, weight), wide)
    made = back(grad, weight, total)
    assert near(made, wide + total.double())
    assert torch.equal(total, before)  # always a new tensor
    assert made.data_ptr() != total.data_ptr() or not rows


@pytest.mark.skipif(not HERE, reason="torch has no oneDNN operator here")
def test_fp32_matrices_on_a_cpu_go_to_onednn(served: list[str]) -> None:
    x, weight = torch.randn(5, 8), torch.nn.Parameter(torch.randn(3, 8), requires_grad=False)
    product(x, weight)
    back(product(x, weight), weight)
    back(torch.randn(5, 3), weight, x)
    assert served == ["product", "product", "product", "sum"]


@pytest.mark.skipif(not HERE, reason="torch has no oneDNN operator here")
@pytest.mark.parametrize(("terms", "taken"), [(4096, ["product", "sum", "product"]), (4097, [])])
def test_sums_over_a_vocabulary_go_to_torch(terms: int, taken: list[str], served: list[str]) -> None:
    grad, weight, total = torch.rand(6, terms), torch.randn(terms, 8), torch.randn(6, 8)
    back(grad, weight)
    back(grad, weight, total)
    product(grad, weight.t().contiguous())
    assert served == taken


KINDS: dict[str, tuple[Any, Any]] = {
    "fp64": (torch.randn(5, 8).double(), torch.randn(3, 8).double()),
    "bf16": (torch.randn(5, 8).bfloat16(), torch.randn(3, 8).bfloat16()),
    "meta": (torch.randn(5, 8, device="meta"), torch.randn(3, 8, device="meta")),
    "one row": (torch.randn(5, 8), torch.randn(1, 8)),
    "one column": (torch.randn(5, 1), torch.randn(3, 1)),
    "nothing": (torch.randn(0, 8), torch.randn(3, 8)),
    "a tensor of another class": (torch.nn.Parameter(torch.randn(5, 8), requires_grad=False), torch.randn(3, 8)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_onednn_does_not_take_goes_to_torch(kind: str, asked: list[str], served: list[str]) -> None:
    x, weight = KINDS[kind]
    total = torch.zeros_like(x)
    grad = torch.ones(len(x), len(weight), dtype=x.dtype, device=x.device)
    found = product(x, weight), back(grad, weight), back(grad, weight, total)
    right = x @ weight.t(), grad @ weight, torch.addmm(total, grad, weight)
    for made, expected in zip(found, right, strict=True):
        assert (made.dtype, made.shape, made.device) == (expected.dtype, expected.shape, expected.device)
        assert made.is_meta or torch.equal(made, expected)
    assert served == []
    # Only the gradient beside an input of another class is a tensor that oneDNN takes.
    assert (asked != []) == (kind == "a tensor of another class")


def test_without_onednn_torch_multiplies(asked: list[str], served: list[str]) -> None:
    x, weight, grad = torch.randn(5, 8), torch.randn(3, 8), torch.randn(5, 3)
    assert torch.equal(product(x, weight), x @ weight.t())
    assert torch.equal(back(grad, weight), grad @ weight)
    assert torch.equal(back(grad, weight, x), torch.addmm(x, grad, weight))
    assert (len(asked), served) == (3, [])


def test_torch_multiplies_where_it_is_asked_to(asked: list[str]) -> None:
    x, weight, grad = torch.randn(5, 8), torch.randn(3, 8), torch.randn(5, 3)
    with by_torch():
        with pytest.raises(KeyError), by_torch():
            raise KeyError
        assert torch.equal(product(x, weight), x @ weight.t())
        assert torch.equal(back(grad, weight, x), torch.addmm(x, grad, weight))
    assert asked == []
    product(x, weight)
    assert asked == ["onednn"]


# --------------------------------------------------------------------------------------------------- is it here


@pytest.mark.usefixtures("fresh")
def test_it_is_tried_once(served: list[str]) -> None:
    assert [onednn(), onednn()] == [HERE, HERE]
    assert served == (["product", "sum"] if HERE else [])


@pytest.mark.usefixtures("fresh")
def test_it_draws_no_random_numbers() -> None:
    before = torch.random.get_rng_state()
    onednn()
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("machine", ["arm64", "aarch64", ""])
def test_other_processors_do_not_ask(machine: str, monkeypatch: pytest.MonkeyPatch, served: list[str]) -> None:
    monkeypatch.setattr("platform.machine", lambda: machine)
    assert not onednn()
    assert served == []


@pytest.mark.usefixtures("fresh")
def test_a_torch_built_without_it(monkeypatch: pytest.MonkeyPatch, served: list[str]) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr(torch._C, "_has_mkldnn", False)
    assert not onednn()
    assert served == []


def missing(*_: Any) -> Any:
    raise RuntimeError("no such operator")


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize(
    "operator",
    [
        missing,  # refuses
        torch.ops.aten.relu,  # takes other arguments
        lambda x, w, *_: x @ w.t(),  # has no `binary`
    ],
)
def test_another_operator_of_that_name(operator: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr(torch._C, "_has_mkldnn", True)
    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", operator)
    assert not onednn()


@pytest.mark.usefixtures("fresh")
def test_a_torch_that_knows_no_such_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr(torch._C, "_has_mkldnn", True)
    monkeypatch.setattr(torch.ops, "mkldnn", SimpleNamespace())
    assert not onednn()


class Rough:
    """Products in bf16, or one of the two a little off."""

    def __init__(self, product: float, total: float, low: bool = False) -> None:
        self.product, self.total, self.low = product, total, low

    def __call__(self, x: Any, w: Any, *_: Any) -> Any:
        made = (x.bfloat16() @ w.bfloat16().t()).float() if self.low else x @ w.t()
        return made * self.product

    def binary(self, x: Any, total: Any, w: Any, *_: Any) -> Any:
        return (x @ w.t() + total) * self.total


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize(
    ("operator", "right"),
    [
        (Rough(1, 1), True),
        (Rough(1.00001, 1), False),
        (Rough(1, 1.00001), False),
        (Rough(1, 1, low=True), False),
    ],
)
def test_products_in_less_than_fp32_are_not_taken(
    operator: Any, right: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.machine", lambda: "AMD64")
    monkeypatch.setattr(torch._C, "_has_mkldnn", True)
    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", operator)
    assert onednn() is right
