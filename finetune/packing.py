"""Lengths -> packs of whole rows, and the order in which rows are trained.

`packs` fills sequences of one length over the whole set, best fit decreasing: the longest row first, each into the
fullest pack that still takes it. Nothing is cut. It uses at most 11/9 of the best possible
number of packs, plus one (Dosa 2007); of rows of mixed lengths it uses a few thousandths more.

`epoch_order` shuffles rows and then sorts only inside each optimizer step, so the rows of a step are the ones that
chance chose, and its passes are as even as they can be:

    a step of 6 rows, 2 a pass     lengths  9 1 4 8 2 5
    padded                         9 8 | 5 4 | 2 1        little is filled up
    laid end to end                9 1 | 8 2 | 5 4        passes of about equal size
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np


def packs(lengths: Sequence[int] | np.ndarray, capacity: int, seed: int) -> list[list[int]]:
    """Indices of the rows in each pack of at most `capacity` tokens; every row is in exactly one.

    Raises `ValueError` when a row is longer than a pack. Rows of equal length come in an order drawn with `seed`.
    """
    import numpy as np

    lengths = np.asarray(lengths)
    if len(lengths) and int(lengths.max()) > capacity:
        raise ValueError(f"a row of {int(lengths.max())} tokens does not fit into a pack of {capacity}")
    drawn = np.random.default_rng(seed).permutation(len(lengths))
    found: list[list[int]] = []
    open_packs: dict[int, list[int]] = {}  # room left -> packs that have it
    rooms: list[int] = []  # the keys of `open_packs`, in order
    for row in drawn[np.argsort(-lengths[drawn], kind="stable")].tolist():
        length = int(lengths[row])
        place = bisect_left(rooms, length)
        if place == len(rooms):
            pack, room = len(found), capacity
            found.append([])
        else:
            room = rooms[place]
            pack = open_packs[room].pop()
            if not open_packs[room]:
                del open_packs[room], rooms[place]
        found[pack].append(row)
        left = room - length
        if left:
            if left not in open_packs:
                open_packs[left] = []
                insort(rooms, left)
            open_packs[left].append(pack)
    return found


def epoch_order(
    lengths: Sequence[int] | np.ndarray, step: int, rows_per_pass: int, *, flat: bool, seed: int, epoch: int
) -> list[int]:
    """All rows once, in the order in which an epoch trains them; `step` rows make an optimizer step."""
    import numpy as np

    lengths = np.asarray(lengths)
    drawn = np.random.default_rng([seed, epoch]).permutation(len(lengths))
    order: list[int] = []
    for start in range(0, len(drawn), step):
        rows = drawn[start : start + step]
        rows = rows[np.argsort(-lengths[rows], kind="stable")]
        order += (_dealt(rows, rows_per_pass) if flat else rows).tolist()
    return order


def _dealt(rows: np.ndarray, rows_per_pass: int) -> np.ndarray:
    """Rows from the longest to the shortest, dealt to the passes to and fro; a rest that fills none stays last."""
    import numpy as np

    passes = len(rows) // rows_per_pass
    if passes < 2:
        return rows
    dealt, rest = rows[: passes * rows_per_pass].reshape(rows_per_pass, passes), rows[passes * rows_per_pass :]
    dealt[1::2] = dealt[1::2, ::-1].copy()
    return np.concatenate([dealt.T.reshape(-1), rest])
