"""Every number here is worked out by hand."""

from __future__ import annotations

import subprocess
import sys

import pytest

from finetune.errors import DataError
from finetune.scores import Scores, parse_object, score

ON = '{"intent": "HassTurnOn", "area": "office", "domain": "light"}'


def exact(prediction: str, reference: str) -> bool:
    return score([prediction], [reference]).exact_match == 1.0


def test_a_perfect_reply():
    assert score([ON], [ON]) == Scores(1, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0)


def test_the_drawing_in_the_docstring():
    reply = '{"intent": "HassTurnOn", "area": "study", "domain": "light"}'
    assert score([reply], [ON]) == Scores(1, 0.0, 1.0, 1.0, 0.5, 0.5, 0.5)


def test_four_rows_micro_averaged():
    references = [
        ON,  # 2 slots
        '{"intent": "HassStartTimer", "minutes": 5}',  # 1 slot
        '{"intent": "HassGetWeather"}',  # 0 slots
        '{"intent": "HassLightSet", "name": "desk lamp", "brightness": 40}',  # 2 slots
    ]
    predictions = [
        ON,  # right: 2 of 2
        '{"intent": "HassStartTimer", "minutes": "5"}',  # text for a number: 0 of 1
        '{"intent": "HassGetWeather", "name": "oslo"}',  # one slot too many
        "I set the desk lamp to 40.",  # not JSON: 0 slots
    ]
    # predicted 2 + 1 + 1 + 0 = 4, expected 2 + 1 + 0 + 2 = 5, agreeing 2
    assert score(predictions, references) == Scores(
        rows=4,
        exact_match=1 / 4,
        valid_json=3 / 4,
        intent_accuracy=3 / 4,
        slot_precision=2 / 4,
        slot_recall=2 / 5,
        slot_f1=2 * 2 / 9,
    )


def test_f1_is_the_harmonic_mean():
    got = score(['{"a": 1, "b": 2, "c": 3}'], ['{"a": 1, "b": 5}'])
    assert got.slot_precision == 1 / 3
    assert got.slot_recall == 1 / 2
    assert got.slot_f1 == pytest.approx(2 / (3 + 2))  # harmonic mean of 1/3 and 1/2
    assert got.intent_accuracy is None  # the reference has no intent


def test_the_intent_is_scored_alone_and_the_slots_do_not_wait_for_it():
    got = score(['{"intent": "HassTurnOff", "area": "office", "domain": "light"}'], [ON])
    assert (got.intent_accuracy, got.slot_f1, got.exact_match) == (0.0, 1.0, 0.0)


@pytest.mark.parametrize(
    ("prediction", "reference", "same"),
    [
        ('{"b": 2, "a": 1}', '{"a": 1, "b": 2}', True),
        ('  {"a":1}\n', '{"a": 1}', True),
        ('{"a": "caf\\u00e9"}', '{"a": "café"}', True),
        ('{"a": {"y": 1, "x": 2}}', '{"a": {"x": 2, "y": 1}}', True),
        ('{"a": [1, 2]}', '{"a": [2, 1]}', False),
        ('{"a": 1}', '{"a": "1"}', False),
        ('{"a": 1.0}', '{"a": 1}', False),
        ('{"a": true}', '{"a": 1}', False),
        ('{"a": "Office"}', '{"a": "office"}', False),
        ('{"a": 1, "b": null}', '{"a": 1}', False),
    ],
)
def test_exact_match_compares_values(prediction, reference, same):
    assert exact(prediction, reference) is same


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        '{"a": 1} and more',
        '{"a": 1}{"a": 1}',
        'Sure: {"a": 1}',
        '```json\n{"a": 1}\n```',
        '{"a": 1, "a": 1}',
        '{"b": {"a": 1, "a": 2}}',
        '{"a": NaN}',
        '{"a": -Infinity}',
        "{'a': 1}",
        '["a", 1]',
        "3",
        "null",
        '{"a": ' + "[" * 200_000,
        '{"a": ' + "1" * 10_000 + "}" * 2,
    ],
)
def test_not_one_json_object(text):
    assert parse_object(text) is None
    got = score([text], ['{"a": 1}'])
    assert (got.valid_json, got.exact_match, got.slot_recall) == (0.0, 0.0, 0.0)


def test_every_depth_of_nesting_is_judged():
    for depth in range(800, 1200):  # across the interpreter's limit, wherever this stack puts it
        assert score(['{"a": ' + "[" * depth + "]" * depth + "}"], ['{"a": 1}']).exact_match == 0.0


def test_no_slots_on_either_side_leaves_the_slot_numbers_open():
    got = score(['{"intent": "HassGetWeather"}'], ['{"intent": "HassGetWeather"}'])
    assert got == Scores(1, 1.0, 1.0, 1.0, None, None, None)


def test_slots_on_one_side_only_count_as_zero():
    invented = score(['{"intent": "X", "a": 1}'], ['{"intent": "X"}'])
    forgotten = score(['{"intent": "X"}'], ['{"intent": "X", "a": 1}'])
    assert (invented.slot_precision, invented.slot_recall, invented.slot_f1) == (0.0, 0.0, 0.0)
    assert (forgotten.slot_precision, forgotten.slot_recall, forgotten.slot_f1) == (0.0, 0.0, 0.0)


def test_a_missing_intent_is_a_wrong_intent_even_when_the_reference_says_null():
    assert score(['{"a": 1}'], ['{"intent": null, "a": 1}']).intent_accuracy == 0.0


def test_text_references_have_an_exact_match_and_nothing_else():
    got = score([" Paris.\n", "paris.", '{"a":1}'], ["Paris.", "Paris.", '{"a": 1}'])
    assert got == Scores(rows=3, exact_match=1 / 3)


def test_nothing_to_score_is_said():
    with pytest.raises(DataError, match="There are 0 rows"):
        score([], [])
    with pytest.raises(ValueError, match="1 predictions for 2 references"):
        score(["a"], ["a", "b"])


def test_scoring_needs_no_torch():
    code = "import sys, finetune.scores; print(sorted({'torch', 'transformers', 'datasets'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
