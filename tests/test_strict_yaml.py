"""What people write in YAML files, what it becomes, and which spellings are faults with a line."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finetune.strict_yaml import dump, parse, quoted, scalar


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 0.0001),
        ("1E-2", 0.01),
        ("1.0e-08", 1e-8),
        (".1", 0.1),
        ("-.5", -0.5),
        ("2.", 2.0),
        ("+3.25", 3.25),
        ("4.0", 4.0),
        ("1_000", 1000),
        ("-12_345_678", -12345678),
        ("0", 0),
        ("-0", 0),
        ("0.05", 0.05),
        (".inf", math.inf),
        ("true", True),
        ("FALSE", False),
        ("null", None),
        ("~", None),
    ],
)
def test_numbers_and_words_in_any_common_spelling(text: str, value: Any) -> None:
    assert scalar(text) == value
    assert type(scalar(text)) is type(value)
    assert parse(f"key: {text}").value == {"key": value}


@pytest.mark.parametrize(
    "text", "yes NO on Off y None 0,05 1_ _1 1__0 0_ 0x10 1.2.3 1e 1e- 2k 12:30 2026-11-29 1_000.5 tRUE".split()
)
def test_everything_else_is_text(text: str) -> None:
    document = parse(f"key: {text}")
    assert document.value == {"key": text}
    assert document.faults == []


@pytest.mark.parametrize("text", ['"1e-4"', "'false'", '"010"', '""', "'~'"])
def test_quotes_make_text(text: str) -> None:
    assert parse(f"key: {text}").value == {"key": text[1:-1]}


@pytest.mark.parametrize(("text", "decimal"), [("010", 10), ("-007", -7), ("0_1", 1), ("00", 0)])
def test_a_leading_zero_is_a_fault_that_names_both_ways_out(text: str, decimal: int) -> None:
    document = parse(f"first: 1\nkey: {text}\n")
    assert document.faults == [
        (
            2,
            f"'{text}' starts with a zero and could mean two numbers;"
            f" write {decimal}, or '{text}' in quotes for text",
        )
    ]


def test_every_path_has_its_line() -> None:
    document = parse("a: 1\nb:\n  c:\n    - x\n    - {d: 2}\n\n# note\ne: |\n  two\n  lines\n")
    assert document.value == {"a": 1, "b": {"c": ["x", {"d": 2}]}, "e": "two\nlines\n"}
    assert document.lines == {
        (): 1,
        ("a",): 1,
        ("b",): 2,
        ("b", "c"): 3,
        ("b", "c", 0): 4,
        ("b", "c", 1): 5,
        ("b", "c", 1, "d"): 5,
        ("e",): 8,
    }


def test_a_key_written_twice_is_a_fault_at_every_level() -> None:
    document = parse("a: 1\nb: {c: 1, c: 2}\na: 3\n")
    assert document.faults == [
        (2, "key 'c' is written twice, first on line 2"),
        (3, "key 'a' is written twice, first on line 1"),
    ]
    assert document.value == {"a": 1, "b": {"c": 1}}


def test_anchors_carry_their_value() -> None:
    document = parse("a: &rate 1e-4\nb: *rate\nc: &block {d: 1}\ne: *block\n")
    assert document.value == {"a": 0.0001, "b": 0.0001, "c": {"d": 1}, "e": {"d": 1}}
    assert document.faults == []
    assert document.lines["e",] == 4


@pytest.mark.parametrize("text", ["a: &x [1, *x]", "a: &x {b: *x}", "&x [*x]"])
def test_an_alias_of_itself_is_a_fault(text: str) -> None:
    assert parse(text).faults == [(1, "an alias contains itself")]


def test_a_key_must_be_one_word() -> None:
    assert parse("a: 1\n? [b, c]\n: 2\n").faults == [(2, "a key must be one word")]


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("a: 1\nb: [1, 2\n", 3, "this is not YAML"),
        ("a: b: c\n", 1, "mapping values are not allowed here"),
        ("a: 1\n\tb: 2\n", 2, "cannot start any token"),
        ("a: *gone\n", 1, "undefined alias"),
        ("a: 1\n---\nb: 2\n", 2, "a second document begins here"),
        ("a: \0\n", 1, "special characters are not allowed"),
    ],
)
def test_syntax_errors_have_a_line(text: str, line: int, words: str) -> None:
    document = parse(text)
    assert document.value is None
    [(found, fault)] = document.faults
    assert found == line
    assert words in fault


@pytest.mark.parametrize("text", ["", "\n\n", "# only a comment\n", "---\n", "~"])
def test_nothing_is_none(text: str) -> None:
    assert parse(text).value is None
    assert parse(text).faults == []


TEXT = st.text(st.characters(exclude_categories=["Cs"]))
AWKWARD = [
    "1e-4",
    "7e12345",
    "010",
    "0_1",
    "true",
    "None",
    "~",
    "",
    " x ",
    "a: b",
    "a #b",
    "- x",
    "yes",
    "1:30",
    "*x",
    "é",
]


@pytest.mark.parametrize("text", AWKWARD)
def test_text_that_looks_like_something_else_is_written_in_a_way_that_reads_back(text: str) -> None:
    document = parse(f"key: {quoted(text)}  # note\n")
    assert (document.value, document.faults) == ({"key": text}, [])
    assert parse(dump({"key": text})).value == {"key": text}


def test_plain_text_stays_plain() -> None:
    assert quoted("google/gemma-2-2b") == "google/gemma-2-2b"
    assert dump({"a": 1e-05, "b": [True, None], "c": "x"}) == "a: 1.0e-05\nb:\n- true\n- null\nc: x\n"


def test_equal_parts_are_written_out_twice() -> None:
    same = [1]
    assert dump({"a": same, "b": same}) == "a:\n- 1\nb:\n- 1\n"


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(TEXT, VALUES, max_size=4))
def test_dump_and_parse_are_each_others_inverse(value: dict[str, Any]) -> None:
    document = parse(dump(value))
    assert document.faults == []
    assert document.value == value


@given(TEXT)
def test_any_text_at_all_is_parsed_or_has_a_fault(text: str) -> None:
    document = parse(text)
    assert all(line >= 1 and fault for line, fault in document.faults)
