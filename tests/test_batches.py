"""Rows laid end to end without what changes nothing: by hand, and against each row alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import cache
from typing import Any
from unittest.mock import patch

import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from finetune import batches
from finetune.batches import Collator, laid_out
from finetune.chat import IGNORE, Encoded
from finetune.data import Prepared
from finetune.fast import adapter, last, layers
from finetune.fast.attention import documents
from finetune.fast.head import onepass_loss, supervised_loss
from finetune.lengths import of_rows
from finetune.recipe import Fast
from finetune.store import Packs, Rows
from finetune.store import batch as stored
from tests.test_fast_adapter import base, wrapped
from tests.tiny import tiny_tokenizer

O = IGNORE  # noqa: E741
SYSTEM = [*range(10, 30)]  # 20 tokens, enough to share


@pytest.fixture
def _any_saving(monkeypatch: pytest.MonkeyPatch) -> None:
    """Share what saves a single token."""
    monkeypatch.setattr(batches, "WORTH_SHARING", 1)


def row(ids: Sequence[int], first: int, last: int | None = None) -> Encoded:
    """A row whose tokens from `first` to before `last` give a loss."""
    last = len(ids) if last is None else last
    return Encoded(list(ids), [i if first <= n < last else IGNORE for n, i in enumerate(ids)])


def lists(batch: dict[str, Any]) -> tuple[list[int], list[int], list[int], list[int]]:
    """Tokens, positions, the label that each token predicts, and the ends of the rows."""
    for name in ("input_ids", "position_ids", "shift_labels"):
        assert batch[name].shape == batch["input_ids"].shape
        assert (batch[name].dtype, batch[name].dim(), len(batch[name])) == (torch.int64, 2, 1)
    assert batch["cu_seq_lens_q"].dtype == torch.int32
    assert torch.equal(batch["labels"], batch["shift_labels"])
    names = ("input_ids", "position_ids", "shift_labels")
    ids, positions, labels = (batch[name][0].tolist() for name in names)
    return ids, positions, labels, batch["cu_seq_lens_q"].tolist()


# ----------------------------------------------------------------------------------------------------------- by hand


def test_rows_without_anything_in_common_lie_end_to_end() -> None:
    """The last token of a row predicts nothing, so it is left out as well."""
    batch = laid_out([row([5, 6, 7], 1), row([8, 9], 1)])
    assert lists(batch) == ([5, 6, 8], [0, 1, 0], [6, 7, 9], [0, 2, 3])
    assert int(batch["row_tokens"]) == 5


def test_everything_stays_with_the_switches_off() -> None:
    rows = [row([5, 6, 7, 1], 1, 2), row([5, 6, 9, 2], 3)]
    batch = laid_out(rows, prefix=False, tail=False)
    assert lists(batch) == ([5, 6, 7, 1, 5, 6, 9, 2], [0, 1, 2, 3] * 2, [6, O, O, O, O, O, 2, O], [0, 4, 8])
    assert int(batch["row_tokens"]) == 8


@pytest.mark.parametrize(
    ("scored", "kept"),
    [
        (row([1, 2, 3, 4, 5], 2, 4), [1, 2, 3]),  # 3 predicts 4, the last label
        (row([1, 2, 3, 4, 5], 4), [1, 2, 3, 4]),
        (row([1, 2, 3, 4, 5], 1, 2), [1]),
        (row([1, 2, 3, 4, 5], 0, 1), [1]),  # nothing predicts a row's first token
        (row([1, 2, 3, 4, 5], 5), [1]),  # no label at all
        (row([1], 0), [1]),
        (Encoded([1, 2, 3, 4, 5], [O, 2, O, 4, O]), [1, 2, 3]),
    ],
)
def test_what_comes_after_the_last_label_is_left_out(scored: Encoded, kept: list[int]) -> None:
    ids, positions, labels, ends = lists(laid_out([scored]))
    assert ids == kept
    assert positions == [*range(len(kept))]
    assert ends == [0, len(kept)]
    assert [label for label in labels if label != O] == [label for label in scored.labels[1:] if label != O]
    assert lists(laid_out([scored], tail=False))[0] == scored.input_ids
    assert int(laid_out([scored])["row_tokens"]) == len(scored.input_ids)


def test_what_all_rows_begin_with_stands_once() -> None:
    """20 tokens that three rows share save 40; positions go on behind them, and each row ends before its last."""
    rows = [row([*SYSTEM, 1, 2, 3], 22), row([*SYSTEM, 4, 5], 21), row([*SYSTEM, 6, 7, 8, 9], 21, 23)]
    batch = laid_out(rows)
    assert lists(batch) == (
        [*SYSTEM, 1, 2, 4, 6, 7],
        [*range(20), 20, 21, 20, 20, 21],
        [*[O] * 20, O, 3, 5, 7, 8],
        [20, 22, 23, 25],
    )
    assert int(batch["row_tokens"]) == 23 + 22 + 24


def test_a_token_that_gives_a_loss_is_never_shared() -> None:
    """In the second row the 17th token predicts a label (in the prompt, say), so 16 are shared."""
    rows = [row([*SYSTEM, 1, 2], 21), row([*SYSTEM, 1, 2], 17)]
    ids, positions, labels, ends = lists(laid_out(rows))
    assert ids == [*SYSTEM[:16], *SYSTEM[16:], 1, *SYSTEM[16:], 1]
    assert positions == [*range(16), *range(16, 21), *range(16, 21)]
    assert labels == [*[O] * 16, *[O] * 4, 2, *SYSTEM[17:], 1, 2]
    assert ends == [16, 21, 26]


def test_what_saves_too_little_is_not_shared() -> None:
    assert batches.WORTH_SHARING == 16
    assert lists(laid_out([row([*SYSTEM[:15], n, n], 16) for n in (1, 2)]))[3][0] == 0  # saves 15
    assert lists(laid_out([row([*SYSTEM[:16], n, n], 17) for n in (1, 2)]))[3][0] == 16
    assert lists(laid_out([row([*SYSTEM[:8], n, n], 9) for n in (1, 2, 3)]))[3][0] == 8  # saves 16


def test_a_row_alone_shares_with_nobody() -> None:
    assert lists(laid_out([row([*SYSTEM, 1, 2], 21)]))[3] == [0, 21]


@pytest.mark.usefixtures("_any_saving")
def test_equal_rows_keep_a_token_of_their_own() -> None:
    """The one that predicts: a row's label hangs on it."""
    batch = laid_out([row([1, 2, 3, 4], 3)] * 2)
    assert lists(batch) == ([1, 2, 3, 3], [0, 1, 2, 2], [O, O, 4, 4], [2, 3, 4])


@pytest.mark.usefixtures("_any_saving")
@pytest.mark.parametrize("tail", [False, True])
def test_a_row_without_labels_beside_others(tail: bool) -> None:
    """With its tail it may share all but its last token; without, one token is left of it, which it keeps."""
    nothing, other = row([1, 2, 3, 4], 4), row([1, 2, 3, 5, 6], 4)
    found = lists(laid_out([nothing, other], tail=tail))
    if tail:
        assert found == ([1, 1, 2, 3, 5], [0, 0, 1, 2, 3], [O, O, O, O, 6], [0, 1, 5])
    else:
        assert found == ([1, 2, 3, 4, 5, 6], [0, 1, 2, 3, 3, 4], [O, O, O, O, 6, O], [3, 4, 6])
    assert lists(laid_out([nothing, nothing], tail=False))[0] == [1, 2, 3, 4, 4]


@pytest.mark.usefixtures("_any_saving")
def test_a_row_that_ends_inside_what_others_share() -> None:
    rows = [row([1, 2, 3, 4, 5, 6], 5), row([1, 2, 3, 4], 3), row([1, 2, 3, 4, 7, 8], 5)]
    assert lists(laid_out(rows)) == (
        [1, 2, 3, 4, 5, 3, 3, 4, 7],
        [0, 1, 2, 3, 4, 2, 2, 3, 4],
        [O, O, O, O, 6, 4, O, O, 8],
        [2, 5, 6, 9],
    )


# ------------------------------------------------------------------------------------------------------ for the plan

KINDS = st.builds(
    lambda begin, ids, scored: Encoded(
        [*SYSTEM[:begin], *ids], [i if n in scored else IGNORE for n, i in enumerate([*SYSTEM[:begin], *ids])]
    ),
    st.integers(0, 6), st.lists(st.integers(10, 13), min_size=1, max_size=6), st.frozensets(st.integers(0, 11)),
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(st.lists(KINDS, min_size=1, max_size=5), st.integers(0, 5), st.randoms(use_true_random=False))
def test_rows_know_what_will_run_of_them(rows: list[Encoded], cut: int, dice: Any) -> None:
    """Read from the file, in whatever batches it was written and whichever rows are taken, by `laid_out` itself."""
    table = pa.Table.from_batches([batch for part in (rows[:cut], rows[cut:]) if (batch := stored(part)).num_rows])
    order = dice.sample(range(len(rows)), dice.randint(1, len(rows)))
    ends, shared = Rows(table).take(order).laid_out()
    taken = [rows[number] for number in order]
    assert ends == [len(lists(laid_out([row]))[0]) for row in taken]
    with patch.object(batches, "WORTH_SHARING", 1):
        ids, _, _, bounds = lists(laid_out(taken))
    assert len(order) == 1 or bounds[0] == shared
    assert len(ids) == sum(ends) - shared * (len(order) - 1)


def test_packs_know_it_too() -> None:
    """23 + 22 + 24 tokens: the last of each is not run, nor are two of those after the last label; 20 are shared."""
    rows = Rows.of([row([*SYSTEM, 1, 2, 3], 22), row([*SYSTEM, 4, 5], 21), row([*SYSTEM, 6, 7, 8, 9], 21, 23)])
    assert rows.laid_out() == ([22, 21, 22], 20)
    packs = of_rows(Packs(rows, [[0, 2], [1]]), "packs")
    assert (packs.ends, packs.shared) == (((22 + 22 - 20, 3), (21, 1)), 20)
    few = Rows.of([row([*SYSTEM[:15], n, n], 16) for n in (1, 2)])
    assert of_rows(Packs(few, [[0, 1]]), "packs").ends == ((32, 2),)  # 15 saved are too few
    assert Rows.of([]).laid_out() == ([], 0)


# ---------------------------------------------------------------------------------------------------------- collator

TRAINED = [row([*SYSTEM, 1, 2, 3], 22), row([*SYSTEM, 4, 5], 21), row([7, 8, 9], 1)]


def collated(data: Rows, numbers: list[int], fast: Fast | None, evaluation: Rows | None = None) -> dict[str, Any]:
    collator = Collator(Prepared(data, evaluation, {}, []), tiny_tokenizer("smollm2"), flat=True, apart=fast)
    return collator([{"row": number} for number in numbers])


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("prefix", [False, True])
@pytest.mark.parametrize("tail", [False, True])
def test_the_collator_reads_the_recipe_s_switches(prefix: bool, tail: bool) -> None:
    found = collated(Rows.of(TRAINED), [1, 0], Fast(prefix=prefix, tail=tail))
    assert same(found, laid_out([TRAINED[1], TRAINED[0]], prefix=prefix, tail=tail))
    assert found["input_ids"].numel() == 45 - 20 * prefix - 2 * tail


def test_the_rows_of_packs_are_laid_out_one_by_one() -> None:
    """A pack of the first two rows and one of the third; together they begin alike in nothing."""
    packs = Packs(Rows.of(TRAINED), [[1, 0], [2]])
    assert packs.whole([1, 0]) == [TRAINED[2], TRAINED[1], TRAINED[0]]
    assert same(collated(packs, [0], Fast()), laid_out([TRAINED[1], TRAINED[0]]))
    assert same(collated(packs, [1, 0], Fast()), laid_out([TRAINED[2], TRAINED[1], TRAINED[0]]))


def test_evaluation_rows_are_numbered_behind_the_trained_ones() -> None:
    found = collated(Rows.of(TRAINED[:1]), [2, 1], Fast(), Rows.of(TRAINED[1:]))
    assert same(found, laid_out([TRAINED[2], TRAINED[1]]))


def test_without_attention_row_by_row_trl_collates() -> None:
    found = collated(Rows.of(TRAINED), [0, 1], None)
    assert "shift_labels" not in found
    assert found["input_ids"].tolist() == [[*TRAINED[0].input_ids, *TRAINED[1].input_ids]]


# ----------------------------------------------------------------------------------------- each row alone, summed


@cache
def pair() -> tuple[Any, Any]:
    """Transformers' and peft's model, and the same one with all that is fast."""
    models = [wrapped(base(layers=2, attn_implementation="sdpa", tie_word_embeddings=True)) for _ in range(2)]
    make_fast(models[1])
    return models[0], models[1]


def make_fast(model: Any) -> None:
    adapter.attach(model)
    layers.attach(model)
    assert last.attach(model)


@cache
def wide() -> Any:
    """The fast model in fp64. Transformers takes norms in fp32, so it is its own measure there, a row at a time."""
    model = wrapped(base(layers=2, attn_implementation="sdpa"))
    make_fast(model)
    return model.double()


@st.composite
def any_rows(draw: st.DrawFn) -> list[Encoded]:
    """One to five rows of a small alphabet, most of which begin alike; labels anywhere, or nowhere."""
    beginning = draw(st.lists(st.integers(3, 9), max_size=24))
    rows = []
    for _ in range(draw(st.integers(1, 5))):
        own = draw(st.lists(st.integers(3, 9), min_size=1, max_size=12))
        ids = [*beginning, *own] if draw(st.integers(0, 5)) else own
        first = draw(st.one_of(st.just(len(beginning)), st.integers(0, len(ids))))
        holes = draw(st.sets(st.integers(0, len(ids)), max_size=4))
        labels = [i if n >= first and n not in holes else IGNORE for n, i in enumerate(ids)]
        rows.append(Encoded(ids, labels))
    return rows


def apart_and_together(
    own: Any, fast: Any, rows: list[Encoded], switches: tuple[bool, bool], head: Any
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The summed loss and all gradients: of each row alone by `own`, of all laid out by `fast`."""
    loss = torch.zeros((), dtype=next(own.parameters()).dtype)
    own.zero_grad()
    for each in rows:
        ids, labels = torch.tensor([each.input_ids]), torch.tensor([each.labels])
        if len(each.input_ids) > 1:
            loss = loss + head(own, {"input_ids": ids, "labels": labels}, 1)
    if loss.requires_grad:
        loss.backward()  # type: ignore[no-untyped-call]
    yield loss.detach(), gradient(own)
    fast.zero_grad()
    with documents(fast, blocks=True):
        loss = onepass_loss(fast, laid_out(rows, prefix=switches[0], tail=switches[1]), 1)
    loss.backward()  # type: ignore[no-untyped-call]
    yield loss.detach(), gradient(fast)


def gradient(model: Any) -> torch.Tensor:
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in trained])


def all_fast() -> ExitStack:
    """Takes the fast ways for batches of a few tokens too, and shares the least beginning."""
    stack = ExitStack()
    stack.enter_context(patch.object(adapter, "FEW_TOKENS", 1))
    stack.enter_context(patch.object(last, "FEW_TOKENS", 1))
    stack.enter_context(patch.object(batches, "WORTH_SHARING", 1))
    return stack


SWITCHES = st.tuples(st.booleans(), st.booleans()) | st.just((True, True))


@settings(max_examples=30, deadline=None)
@given(any_rows(), SWITCHES)
def test_they_teach_what_each_row_teaches_alone(rows: list[Encoded], switches: tuple[bool, bool]) -> None:
    """Against the plain libraries in fp32."""
    with all_fast():
        right, found = apart_and_together(*pair(), rows, switches, supervised_loss)
    assert float(found[0]) == pytest.approx(float(right[0]), rel=1e-5)
    assert (found[1] - right[1]).norm() <= 1e-5 * right[1].norm()


@settings(max_examples=30, deadline=None)
@given(any_rows(), SWITCHES)
def test_they_teach_it_to_nine_digits_in_fp64(rows: list[Encoded], switches: tuple[bool, bool]) -> None:
    with all_fast():
        right, found = apart_and_together(wide(), wide(), rows, switches, onepass_loss)
    assert float(found[0]) == pytest.approx(float(right[0]), rel=1e-9)
    assert (found[1] - right[1]).norm() <= 1e-9 * right[1].norm()


def test_a_label_shifted_by_one_is_noticed() -> None:
    rows = [row([*SYSTEM, 1, 2, 3], 21), row([*SYSTEM, 4, 5, 6], 21)]
    moved = [Encoded(each.input_ids, [O, *each.labels[:-1]]) for each in rows]
    with all_fast():
        right, _ = apart_and_together(*pair(), rows, (True, True), supervised_loss)
        _, found = apart_and_together(*pair(), moved, (True, True), supervised_loss)
    assert abs(float(found[0] - right[0])) > 1e-2
    assert (found[1] - right[1]).norm() > 0.1 * right[1].norm()


def test_a_hundred_steps_have_the_losses_of_the_plain_libraries() -> None:
    """Two micro-batches of three rows a step; rows begin alike, as with a system prompt, and end in any length."""
    curves: list[list[float]] = []
    for fast in (False, True):
        model = wrapped(base(layers=2, attn_implementation="sdpa"))
        if fast:
            adapter.attach(model)
            layers.attach(model)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-3)
        dice = torch.Generator().manual_seed(9)
        curve = []
        for _ in range(100):
            step = [drawn(dice) for _ in range(6)]
            items = sum(label != O for each in step for label in each.labels[1:])
            losses = []
            for rows in (step[:3], step[3:]):
                loss = passed(model, rows, items, fast=fast)
                loss.backward()  # type: ignore[no-untyped-call]
                losses.append(loss.item())
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            curve.append(sum(losses))
        curves.append(curve)
    plain, mine = (torch.tensor(curve, dtype=torch.float64) for curve in curves)
    assert plain[-10:].mean() < 0.9 * plain[:10].mean()
    assert ((mine - plain).abs() < 5e-3 * plain).all()
    assert abs(float(mine.mean() / plain.mean()) - 1) < 1e-5


def drawn(dice: torch.Generator) -> Encoded:
    """The system prompt, a question of 1 to 20 tokens, an answer that counts up from it, and a tail."""
    asked = torch.randint(30, 60, (int(torch.randint(1, 20, (1,), generator=dice)),), generator=dice).tolist()
    answer = [60 + (asked[0] + n) % 30 for n in range(4)]
    return row([*SYSTEM, *asked, *answer, 1, 2], len(SYSTEM) + len(asked), len(SYSTEM) + len(asked) + 4)


def passed(model: Any, rows: list[Encoded], items: int, *, fast: bool) -> torch.Tensor:
    """The loss of a micro-batch: laid out, or padded to the longest row."""
    if fast:
        with documents(model, blocks=True):
            return onepass_loss(model, laid_out(rows), items)
    width = max(len(each.input_ids) for each in rows)
    ids = torch.tensor([[*each.input_ids, *[0] * (width - len(each.input_ids))] for each in rows])
    labels = torch.tensor([[*each.labels, *[O] * (width - len(each.labels))] for each in rows])
    out = model(input_ids=ids, attention_mask=(ids != 0).long(), use_cache=False).logits
    loss: torch.Tensor = torch.nn.functional.cross_entropy(out[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    return loss * (labels[:, 1:] != O).sum() / items
