"""Rows come back from the file as they went in; packs are whole rows end to end."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from finetune.chat import Encoded
from finetune.store import Packs, Rows, Writer, batch

THREE = [Encoded([1, 2, 3], [-100, 2, 3]), Encoded([4], [4]), Encoded([5, 6], [-100, 6])]
ROW = st.lists(st.tuples(st.integers(0, 2**31 - 1), st.booleans()), min_size=1, max_size=12).map(
    lambda tokens: Encoded([i for i, _ in tokens], [i if kept else -100 for i, kept in tokens])
)


def test_three_rows_by_hand() -> None:
    rows = Rows.of(THREE)
    assert list(rows) == THREE
    assert rows[-1] == THREE[2]
    assert rows.lengths.tolist() == [3, 1, 2]
    assert rows.pairs == [(3, 2), (1, 0), (2, 1)]  # nothing predicts a row's first token
    assert (rows.tokens, rows.trained_tokens) == (6, 3)
    assert list(rows.take([2, 0])) == [THREE[2], THREE[0]]
    assert rows.take([2, 0]).take([1]).pairs == [(3, 2)]
    assert rows.take([1, 1]).tokens == 2
    assert rows.ids(0).tolist() == [1, 2, 3]
    assert rows.whole([2, 0, 2]) == [THREE[2], THREE[0], THREE[2]]
    with pytest.raises(IndexError):
        rows[3]


@given(st.lists(st.lists(ROW, max_size=5), max_size=4))
def test_any_rows_come_back_from_any_batches(parts: list[list[Encoded]]) -> None:
    import tempfile

    whole = [row for part in parts for row in part]
    with tempfile.TemporaryDirectory() as folder:
        with Writer(Path(folder) / "rows.arrow") as file:
            for part in parts:
                file.write(batch(part))
        rows = Rows.open(Path(folder) / "rows.arrow")
        assert len(rows) == len(whole)
        assert list(rows) == whole
        assert rows.pairs == [(len(r.input_ids), sum(label != -100 for label in r.labels[1:])) for r in whole]
        backwards = list(range(len(whole)))[::-1]
        assert list(rows.take(backwards)) == whole[::-1]


def test_places_digests_and_keys_stay_with_their_rows(tmp_path: Path) -> None:
    with Writer(tmp_path / "rows.arrow") as file:
        file.write(batch(THREE[:2], source=0, lines=[3, 9], digests=[2**64 - 1, 7], keys=[1, 2]))
        file.write(batch(THREE[2:], source=1, lines=[4], digests=[8], keys=[3]))
    rows = Rows.open(tmp_path / "rows.arrow", lambda source, line: f"{'ab'[source]}.jsonl:{line}")
    assert [rows.place(n) for n in range(3)] == ["a.jsonl:3", "a.jsonl:9", "b.jsonl:4"]
    chosen = rows.take([2, 0])
    assert chosen.place(0) == "b.jsonl:4"
    assert chosen.column("digest").tolist() == [8, 2**64 - 1]
    assert chosen.column("key").tolist() == [3, 1]


def test_packs_by_hand() -> None:
    packs = Packs(Rows.of(THREE), [[2, 0], [1]])
    assert len(packs) == 2
    assert packs[0] == Encoded([5, 6, 1, 2, 3], [-100, 6, -100, 2, 3])
    assert packs.lengths.tolist() == [5, 1]
    assert packs.pairs == [(5, 3), (1, 0)]
    assert packs.ids(0).tolist() == [5, 6, 1, 2, 3]
    assert packs.examples([1, 0]) == {
        "input_ids": [[4], [5, 6, 1, 2, 3]],
        "labels": [[4], [-100, 6, -100, 2, 3]],
        "seq_lengths": [[1], [2, 3]],
    }
    assert packs.whole([1, 0]) == [THREE[1], THREE[2], THREE[0]]  # the rows in them
    assert packs.take([1])[0] == THREE[1]
    assert packs.column("supervised").dtype.kind == "i"
    assert np.array_equal(packs.lengths, [5, 1])
