"""Packs lose and mix nothing; an epoch trains every row once, and chance alone decides the rows of a step."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finetune.packing import epoch_order, packs

LENGTHS = st.lists(st.integers(1, 64), min_size=1, max_size=80)


def test_best_fit_decreasing_by_hand() -> None:
    """7 opens a pack of 10, 5 another, 4 goes to the 5 (room 1 left, not 3), 3 to the 7, 2 opens the third."""
    lengths = [4, 7, 2, 5, 3]
    found = packs(lengths, 10, seed=0)
    assert [[lengths[row] for row in pack] for pack in found] == [[7, 3], [5, 4], [2]]


def test_the_fullest_pack_that_still_takes_a_row_gets_it() -> None:
    """After 6 and 5 a row of 4 fits both packs; the one with 6 has less room."""
    lengths = [5, 6, 4]
    assert [[lengths[row] for row in pack] for pack in packs(lengths, 10, seed=3)] == [[6, 4], [5]]


@given(LENGTHS, st.integers(64, 100), st.integers(0, 5))
def test_every_row_is_in_one_pack_and_none_is_cut(lengths: list[int], capacity: int, seed: int) -> None:
    found = packs(lengths, capacity, seed)
    assert sorted(row for pack in found for row in pack) == list(range(len(lengths)))
    assert all(0 < sum(lengths[row] for row in pack) <= capacity for pack in found)
    assert found == packs(lengths, capacity, seed)
    # Two packs at most half full would have been one.
    assert sum(2 * sum(lengths[row] for row in pack) <= capacity for pack in found) <= 1


def test_rows_of_one_length_are_drawn_with_the_seed() -> None:
    assert packs([5] * 40, 10, seed=1) != packs([5] * 40, 10, seed=2)


def test_a_row_longer_than_a_pack_is_refused() -> None:
    with pytest.raises(ValueError, match="a row of 11 tokens does not fit into a pack of 10"):
        packs([3, 11], 10, seed=0)


@given(LENGTHS, st.integers(1, 4), st.integers(1, 4), st.booleans(), st.integers(0, 3))
def test_an_epoch_trains_every_row_once(lengths: list[int], micro: int, passes: int, flat: bool, epoch: int) -> None:
    step = micro * passes
    order = epoch_order(lengths, step, micro, flat=flat, seed=7, epoch=epoch)
    assert sorted(order) == list(range(len(lengths)))
    other = epoch_order(lengths, step, micro, flat=not flat, seed=7, epoch=epoch)
    for start in range(0, len(lengths), step):  # however they lie, the rows of a step are the same
        assert set(order[start : start + step]) == set(other[start : start + step])
    if not flat:
        sizes = [lengths[row] for row in order]
        assert all(sizes[n] >= sizes[n + 1] for n in range(len(sizes) - 1) if (n + 1) % step)


def test_epochs_and_seeds_give_other_orders() -> None:
    orders = {tuple(epoch_order(range(1, 50), 4, 2, flat=True, seed=s, epoch=e)) for s in (1, 2) for e in (0, 1)}
    assert len(orders) == 4


def test_passes_of_a_step_are_even_by_hand() -> None:
    """9 8 5 dealt to three passes, then 4 2 1 the other way round."""
    lengths = [9, 1, 4, 8, 2, 5]
    order = epoch_order(lengths, 6, 2, flat=True, seed=0, epoch=0)
    assert [lengths[row] for row in order] == [9, 1, 8, 2, 5, 4]
    padded = epoch_order(lengths, 6, 2, flat=False, seed=0, epoch=0)
    assert [lengths[row] for row in padded] == [9, 8, 5, 4, 2, 1]


def test_no_pass_is_much_larger_than_the_mean() -> None:
    dice = random.Random(5)
    lengths = [dice.randrange(20, 400) for _ in range(320)]
    order = epoch_order(lengths, 16, 4, flat=True, seed=0, epoch=0)
    sizes = [sum(lengths[row] for row in order[at : at + 4]) for at in range(0, 320, 4)]
    for at in range(0, len(sizes), 4):  # the spread within a step is less than its longest row
        assert max(sizes[at : at + 4]) - min(sizes[at : at + 4]) < 400
