"""Near copies: what is found is what comparing each row with each finds, and nothing else."""

from __future__ import annotations

import random

import numpy as np
import pytest

from finetune import near
from finetune.near import Near, across, near_pairs

Rows = list[list[int]]


def shingles(row: list[int]) -> set[tuple[int, ...]]:
    return {tuple(row[at : at + 5]) for at in range(max(len(row) - 4, 1))}


def alike(one: list[int], other: list[int]) -> float:
    a, b = shingles(one), shingles(other)
    return len(a & b) / len(a | b)


def brute(rows: Rows, threshold: float = 0.8) -> dict[tuple[int, int], float]:
    pairs = ((i, j) for i in range(len(rows)) for j in range(i + 1, len(rows)))
    return {(i, j): found for i, j in pairs if (found := alike(rows[i], rows[j])) >= threshold}


def drawn(count: int, seed: int = 0, words: int = 500) -> Rows:
    chance = random.Random(seed)
    return [[chance.randrange(words) for _ in range(chance.randrange(3, 120))] for _ in range(count)]


def changed(row: list[int], places: int, seed: int) -> list[int]:
    chance, row = random.Random(seed), list(row)
    for _ in range(places):
        row[chance.randrange(len(row))] = 900 + chance.randrange(90)
    return row


def test_by_hand() -> None:
    one, other = [1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 5, 6, 8]
    assert near.jaccard(near.shingles(one), near.shingles(other)) == 0.5  # 12345 and 23456 of four in all
    assert near_pairs([one, other]).pairs == []
    one, other = list(range(24)), [*range(23), 99]
    assert near_pairs([one, other]) == Near([(0, 1, 19 / 21)])  # 20 shingles each, all but the last of them shared
    assert near_pairs([one, other], threshold=0.91).pairs == []
    assert near_pairs([one, one, [9]]).pairs == [(0, 1, 1.0)]
    assert near_pairs([]) == near_pairs([one]) == Near([])


def test_rows_shorter_than_a_shingle() -> None:
    assert near_pairs([[1, 2], [1, 2], [1, 3], [], [], [2, 1]]).pairs == [(0, 1, 1.0), (3, 4, 1.0)]


def test_as_comparing_each_with_each() -> None:
    rows = drawn(300)
    rows += [changed(row, max(1, len(row) // 50), seed) for seed, row in enumerate(rows[:150])]
    rows = [rows[at] for at in np.random.default_rng(0).permutation(len(rows))]
    expected, found = brute(rows), near_pairs(rows)
    assert len(expected) > 80
    assert {(i, j): round(part, 9) for i, j, part in found.pairs}.items() <= {
        pair: round(part, 9) for pair, part in expected.items()
    }.items()
    assert len(found.pairs) >= 0.97 * len(expected)
    assert found.complete


def test_rows_from_one_template() -> None:
    """Many rows that all resemble each other a little, and some of them much."""
    chance = random.Random(1)
    template = list(range(1000, 1060))
    rows = []
    for _ in range(500):
        row = list(template)
        for slot in (10, 30, 50):
            row[slot] = chance.randrange(25)
        rows.append(row)
    expected, found = brute(rows), near_pairs(rows)
    assert len(expected) > 100
    assert {(i, j) for i, j, _ in found.pairs} <= expected.keys()
    assert found.copies >= 0.97 * len({j for _, j in expected})


def test_the_same_answer_every_time() -> None:
    rows = drawn(100) + drawn(100)
    assert near_pairs(rows) == near_pairs([np.array(row, dtype=np.int32) for row in rows])
    assert near_pairs(rows).copies == 100


def test_too_many_pairs_keep_the_most_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    base = list(range(100))
    rows = [base, changed(base, 2, 1), changed(base, 3, 2), base[:-1]]
    assert len(near_pairs(rows, 0.5).pairs) > 1
    monkeypatch.setattr(near, "MOST", 1)
    assert near_pairs(rows, 0.5) == Near([(0, 3, 95 / 96)], complete=False)


def test_across_two_sets() -> None:
    train, held = drawn(200), drawn(20, seed=1)
    held += [changed(train[7], 1, 0), train[9], train[9]]
    train += [held[0], held[0]]
    expected = {
        (i, j): alike(row, other)
        for i, row in enumerate(train)
        for j, other in enumerate(held)
        if alike(row, other) >= 0.8
    }
    found = across(train, held)
    assert {(i, j): part for i, j, part in found.pairs} == expected
    assert found.copies == len({j for _, j in expected}) >= 3


def test_one_trained_row_among_many_held_out_copies() -> None:
    row = list(range(50))
    assert across([row], [row] * 40).copies == 40
    assert across([row] * 40, [row]).copies == 1


def test_digest() -> None:
    assert near.digest([1, 2]) == near.digest(np.array([1, 2], dtype=np.int32))
    assert len({near.digest(row) for row in ([], [0], [0, 0], [1, 2], [2, 1], [12])}) == 6
