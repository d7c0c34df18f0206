"""How well replies match their references: exact, as JSON, by intent and by slot.

    reference   {"intent": "HassTurnOn", "area": "office", "domain": "light"}
    prediction  {"intent": "HassTurnOn", "area": "study",  "domain": "light"}

    exact match no | valid JSON yes | intent right | slots: 1 of 2 predicted is right, 1 of 2 references is found

The numbers of a set are shares between 0 and 1 over its rows (slots: over all slots of all rows, "micro").
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from finetune.errors import DataError

_INTENT = "intent"


@dataclass(frozen=True)
class Scores:
    """Shares between 0 and 1; a number that is not defined for these references is None.

    With P, R the slots (key, value) of all predictions and references, and H those that agree row by row:
    precision = H / P, recall = H / R, F1 = 2 H / (P + R). A precision or recall of 0 / 0 counts as 0 when the other
    side has slots, and all three are None when neither side has any.
    """

    rows: int
    exact_match: float
    valid_json: float | None = None
    intent_accuracy: float | None = None
    slot_precision: float | None = None
    slot_recall: float | None = None
    slot_f1: float | None = None


def score(predictions: Sequence[str], references: Sequence[str]) -> Scores:
    """Score each prediction against the reference of the same row.

    When every reference is a JSON object:
      exact_match      equal JSON values / rows; the order of keys and the white space do not matter, types do
                       (20, 20.0, "20" differ, true is not 1)
      valid_json       predictions that are one JSON object and nothing else / rows; a repeated key, NaN, or text
                       before or after the object makes it invalid
      intent_accuracy  equal "intent" values / rows whose reference has an "intent"
      slot_*           all other top-level (key, value) pairs, see `Scores`; an invalid prediction has none
    Otherwise only exact_match is defined: equal text without the white space around it / rows.

    Raises `DataError` when there are no rows, `ValueError` when the lengths differ.
    """
    if len(predictions) != len(references):
        raise ValueError(f"{len(predictions)} predictions for {len(references)} references")
    if not references:
        raise DataError("There are 0 rows to score.", "Give at least one row with a reference answer.")
    wanted = [parse_object(text) for text in references]
    objects = [value for value in wanted if value is not None]
    if len(objects) < len(wanted):
        same = [given.strip() == text.strip() for given, text in zip(predictions, references, strict=True)]
        return Scores(rows=len(same), exact_match=_share(same))
    return _score_objects([parse_object(text) for text in predictions], objects)


def parse_object(text: str) -> dict[str, Any] | None:
    """The JSON object that is the whole of `text`, or None (also for a repeated key, NaN and Infinity)."""
    try:
        value = json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse)
        _canonical([[[[[[[[value]]]]]]]])  # what can be read can be compared later, with a few levels to spare
    except (ValueError, RecursionError):  # RecursionError: a model that repeats "[" for ever
        return None
    return value if isinstance(value, dict) else None


def _score_objects(given: list[dict[str, Any] | None], wanted: list[dict[str, Any]]) -> Scores:
    pairs = list(zip(given, wanted, strict=True))
    intents = [
        got is not None and _INTENT in got and _canonical(got[_INTENT]) == _canonical(want[_INTENT])
        for got, want in pairs
        if _INTENT in want
    ]
    slots = [(_slots(got or {}), _slots(want)) for got, want in pairs]
    hits = sum(len(got & want) for got, want in slots)
    predicted, expected = (sum(map(len, side)) for side in zip(*slots, strict=True))
    any_slots = predicted + expected > 0
    return Scores(
        rows=len(pairs),
        exact_match=_share([got is not None and _canonical(got) == _canonical(want) for got, want in pairs]),
        valid_json=_share([got is not None for got in given]),
        intent_accuracy=_share(intents) if intents else None,
        slot_precision=hits / max(predicted, 1) if any_slots else None,
        slot_recall=hits / max(expected, 1) if any_slots else None,
        slot_f1=2 * hits / (predicted + expected) if any_slots else None,
    )


def _slots(value: dict[str, Any]) -> set[tuple[str, str]]:
    return {(key, _canonical(item)) for key, item in value.items() if key != _INTENT}


def _canonical(value: Any) -> str:
    """One text per JSON value. Python's own `==` would call 1, 1.0 and True equal."""
    return json.dumps(value, sort_keys=True)


def _share(right: list[bool]) -> float:
    return sum(right) / len(right)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        raise ValueError("a key occurs twice")
    return value


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")
