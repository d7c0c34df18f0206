"""Bytes -> rows with lines: every kind of file gives the same texts, and every fault is named where it stands."""

from __future__ import annotations

import csv
import gzip
import io
import json
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from finetune import strict_json
from finetune.errors import DataError
from finetune.formats import BadRow
from finetune.readers import Lines, blocks, cut, kind_of, rows_of

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

WILD = [
    "007",
    "null",
    "true",
    "2.50",
    "",
    " ",
    "N/A",
    '{"a": 3, "b": null}',
    "[1]",
    "a\u2028b",
    "\ufeffx",
    "a\rb",
    "x\r\ny",
]
TEXT = st.one_of(st.sampled_from(WILD), st.text(st.characters(exclude_categories=["Cs"]), max_size=20))
ROWS = st.lists(st.fixed_dictionaries({"prompt": TEXT, "completion": TEXT, "Größe": TEXT}), max_size=12)


def packed(data: bytes, packing: str) -> bytes:
    if packing == ".zst":
        return bytes(pa.compress(data, codec="zstd", asbytes=True))
    return gzip.compress(data) if packing else data


def read(data: bytes, kind: str, packing: str = "", size: int = 1 << 20) -> list[tuple[int, Any]]:
    file = io.BytesIO(packed(data, packing))
    return [row for block in blocks("a" + kind, file, kind, packing, size) for row in rows_of(block)]


def stop(data: bytes, kind: str, packing: str = "") -> str:
    """Why the file cannot be read to its end."""
    with pytest.raises(DataError) as error:
        _ = [list(rows_of(block)) for block in blocks("a" + kind, io.BytesIO(data), kind, packing, 1 << 20)]
    assert error.value.what.endswith(".")
    assert error.value.hint.endswith(".")
    return error.value.what


def bad(line: bytes | str) -> BadRow:
    """The verdict on one line of JSON between two good ones."""
    line = line if isinstance(line, bytes) else line.encode()
    (first, one), (second, verdict), (third, other) = read(b'{"a": 1}\n' + line + b'\n{"a": 2}', ".jsonl")
    assert (first, second, third, one, other) == (1, 2, 3, {"a": 1}, {"a": 2})
    assert isinstance(verdict, BadRow)
    return verdict


def as_csv(rows: list[dict[str, Any]], delimiter: str = ",") -> bytes:
    text = io.StringIO()
    writer = csv.writer(text, delimiter=delimiter, quoting=csv.QUOTE_ALL)
    writer.writerow(["prompt", "completion", "Größe"])
    writer.writerows([row["prompt"], row["completion"], row["Größe"]] for row in rows)
    return text.getvalue().encode()


def as_parquet(rows: list[dict[str, Any]], **settings: Any) -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), file, **settings)
    return file.getvalue()


# ------------------------------------------------------------------------------------------------------- round trips


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("rows.jsonl", (".jsonl", "")),
        ("data/Rows.JSON.GZ", (".json", ".gz")),
        ("x.y.tsv.zst", (".tsv", ".zst")),
        ("a.parquet", (".parquet", "")),
        ("a.parquet.gz", ("", ".gz")),
        ("a.txt", ("", "")),
        ("jsonl", ("", "")),
        ("a.gz", ("", "")),
    ],
)
def test_kinds_of_names(name: str, kind: tuple[str, str]) -> None:
    assert kind_of(name) == kind


@given(ROWS, st.sampled_from(["", ".gz", ".zst"]), st.sampled_from([1, 5, 64, 1 << 20]), st.booleans())
@settings(deadline=None)
def test_every_kind_gives_the_very_texts(
    rows: list[dict[str, str]], packing: str, size: int, ascii_only: bool
) -> None:
    lines = [json.dumps(row, ensure_ascii=ascii_only) for row in rows]
    one_a_line = "".join(line + "\n" for line in lines).encode()
    array = json.dumps(rows, ensure_ascii=ascii_only, indent=1).encode()
    assert read(one_a_line, ".jsonl", packing, size) == list(enumerate(rows, 1))
    assert read(one_a_line, ".json", packing, size) == list(enumerate(rows, 1))
    assert read(array, ".json", packing, size) == [(2 + 5 * number, row) for number, row in enumerate(rows)]
    assert [row for _, row in read(("[" + ",".join(lines) + "]").encode(), ".jsonl", packing, size)] == rows
    assert [row for _, row in read(as_csv(rows), ".csv", packing, size)] == rows
    assert [row for _, row in read(as_csv(rows, "\t"), ".tsv", packing, size)] == rows
    if rows:
        assert read(as_parquet(rows, row_group_size=5), ".parquet", size=size) == list(enumerate(rows, 1))


JSON_VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), TEXT),
    lambda below: st.one_of(st.lists(below, max_size=4), st.dictionaries(TEXT, below, max_size=4)),
    max_leaves=20,
)


@given(st.lists(JSON_VALUES, max_size=8), st.integers(1, 40), st.sampled_from([None, 1]))
@settings(deadline=None)
def test_an_array_read_in_pieces_is_the_array(values: list[Any], size: int, indent: int | None) -> None:
    found = read(json.dumps(values, indent=indent).encode(), ".json", size=size)
    assert [row if isinstance(row, dict) else None for _, row in found] == [
        value if isinstance(value, dict) else None for value in values
    ]
    assert all(row.kind == "not an object" for _, row in found if isinstance(row, BadRow))


@given(JSON_VALUES)
def test_strict_json_reads_what_json_reads(value: Any) -> None:
    text = json.dumps(value)
    assert json.dumps(strict_json.loads(text)) == text


@given(st.text('{}[]",:\\ abu0123456789.eE+-NaInfityrls\r\n\t', max_size=30))
@settings(max_examples=500)
def test_strict_json_never_reads_more_than_json_does(text: str) -> None:
    try:
        value = strict_json.loads(text)
    except strict_json.Refused:
        return
    assert json.dumps(value) == json.dumps(json.loads(text))
    assert "NaN" not in json.dumps(value) or "NaN" in json.dumps(str(value))


ROW = '{"prompt": "What?", "completion": "n-a-ï"}'


@pytest.mark.parametrize(
    ("content", "lines"),
    [
        (ROW + "\n" + ROW + "\n", [1, 2]),
        (ROW + "\n" + ROW, [1, 2]),
        ("\ufeff" + ROW + "\r\n" + ROW + "\r\n", [1, 2]),
        ("\n \t\n" + ROW + "\n\r\n\n" + ROW + "\n\n", [3, 6]),
        (ROW + "\n\ufeff" + ROW, [1, 2]),  # two files put into one
        ("[" + ROW + ",\n\n" + ROW + "\n]\n", [1, 3]),
        ("\ufeff\n [\n" + ROW + "," + ROW + ",\n] \r\n", [3, 3]),
    ],
    ids=["plain", "no_final_newline", "bom_crlf", "blank_lines", "two_boms", "array", "array_bom"],
)
@pytest.mark.parametrize("size", [1, 8, 1 << 20])
def test_the_look_of_a_file_makes_no_difference(content: str, lines: list[int], size: int) -> None:
    row = {"prompt": "What?", "completion": "n-a-ï"}
    assert read(content.encode(), ".jsonl", size=size) == [(line, row) for line in lines]


def test_a_column_may_change_its_type_and_be_null_first() -> None:
    cells: list[Any] = [None] * 3000 + [8, "six", "007", True, 2.5, ["2", "3"], {"a": 1}]
    data = "".join(json.dumps({"system": cell}) + "\n" for cell in cells).encode()
    assert [row["system"] for _, row in read(data, ".jsonl", size=1000)] == cells
    assert [row["system"] for _, row in read(data[::1], ".jsonl")] == cells


def test_a_row_of_fifty_megabytes() -> None:
    text = "word \u00fc " * 7_000_000
    data = json.dumps({"text": text}, ensure_ascii=False).encode()
    assert len(data) > 50e6
    small = b'{"text": "x"}'
    for content, kind in [
        (small + b"\n" + data + b"\n" + small, ".jsonl"),
        (b"[" + small + b",\n" + data + b",\n" + small + b"]", ".json"),
        (b'text\nx\n"' + text.encode() + b'"\nx\n', ".csv"),
        (as_parquet([{"text": "x"}, {"text": text}, {"text": "x"}]), ".parquet"),
    ]:
        assert [len(row["text"]) for _, row in read(content, kind)] == [1, len(text), 1]


class Endless(io.RawIOBase):
    """A file that is made while it is read: `head`, then `row` again and again, then `tail`."""

    def __init__(self, head: bytes, row: bytes, count: int, tail: bytes) -> None:
        self._pieces: Iterator[bytes] = iter([head, *[row * 1000] * (count // 1000), tail])
        self._left = b""

    def read(self, size: int = -1) -> bytes:
        while not self._left:
            if (piece := next(self._pieces, None)) is None:
                return b""
            self._left = piece
        block, self._left = self._left[:size], self._left[size:]
        return block


@pytest.mark.parametrize(("kind", "head", "tail"), [(".json", b"[", b'{"a": "b"}]'), (".jsonl", b"", b'{"a": "b"}')])
def test_memory_stays_flat(kind: str, head: bytes, tail: bytes) -> None:
    row = b'{"a": "' + b"x" * 488 + (b'"},\n' if kind == ".json" else b'"}\n')
    peaks = []
    for count in (8000, 40_000):  # 4 and 20 MB
        file: Any = Endless(head, row, count, tail)
        tracemalloc.start()
        assert sum(1 for block in blocks("a", file, kind, "", 1 << 18) for _ in rows_of(block)) == count + 1
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.1 * peaks[0] < 4e6


# ------------------------------------------------------------------------------------------------- faults of one row


@pytest.mark.parametrize(
    ("line", "reason", "kind"),
    [
        (b'{"a": "y"', "not JSON: Expecting ',' delimiter", "not JSON"),
        (b'{"a": 1, "b": 2, "a": 3}', "the key 'a' stands twice in one object", "not strict JSON"),
        (b'{"b": {"a": 1, "a": 1}}', "the key 'a' stands twice in one object", "not strict JSON"),
        (b'{"\\u0061": 1, "a": 1}', "the key 'a' stands twice in one object", "not strict JSON"),
        (b'{"a": NaN}', "NaN is no number in JSON", "not strict JSON"),
        (b'{"a": [-Infinity]}', "-Infinity is no number in JSON", "not strict JSON"),
        (b'{"a": "\\ud83d"}', "half of a surrogate pair stands alone", "not strict JSON"),
        (b'{"\\uDE00": "a"}', "half of a surrogate pair stands alone", "not strict JSON"),
        (b'{"a": "\xff"}', "byte 8 is not UTF-8", "not UTF-8"),
        (b'{"a": "\xed\xa0\xbd"}', "byte 8 is not UTF-8", "not UTF-8"),  # a surrogate as three bytes
        (b'{"a": "x\ty"}', "not JSON: Invalid control character", "not JSON"),
        (b'{"a": "x\0y"}', "not JSON: Invalid control character", "not JSON"),
        (b'{"a": 1}\r{"a": 2}', "a lone carriage return ends no line", "not JSON"),
        (b'{"a": 1} {"a": 2}', "not JSON: Extra data", "not JSON"),
        (b"{'a': 1}", "not JSON: Expecting property name", "not JSON"),
        (b'["x", "y"]', "not an object with named columns", "not an object"),
        (b"null", "not an object with named columns", "not an object"),
        (b'{"a": ' + b"9" * 5000 + b"}", "a number cannot be read: Exceeds the limit", "not strict JSON"),
        (b'{"a": ' + b"[" * 100_000, "nested deeper than 200 levels", "not strict JSON"),
        (b'{"a": ' + b"[" * 200 + b"]" * 200 + b"}", "nested deeper than 200 levels", "not strict JSON"),
        (b'{"a": ' * 100_000, "nested deeper than 200 levels", "not strict JSON"),
    ],
)
def test_a_line_that_is_refused_harms_no_other(line: bytes, reason: str, kind: str) -> None:
    verdict = bad(line)
    assert reason in verdict.reason
    assert verdict.kind == kind
    assert len(verdict.reason) < 300


def test_what_is_just_allowed() -> None:
    deep: Any = "x"
    for _ in range(199):
        deep = [deep]
    lines = [json.dumps({"a": deep}), '{"a": "\\ud83d\\ude00 \\\\ud83d"}', '{"a": "\\u0000"}', '{"a": 1e999}']
    values = [row["a"] for _, row in read("\n".join(lines).encode(), ".jsonl")]
    assert values == [deep, "\U0001f600 \\ud83d", "\0", float("inf")]


@pytest.mark.parametrize("size", [1, 3, 17, 1 << 20])
def test_bad_elements_of_an_array_harm_no_other(size: int) -> None:
    plain, number = "not an object with named columns", "a number cannot be read: "
    expected: list[tuple[str, Any]] = [
        ('{"a": 1}', {"a": 1}),
        ('{"a": 1,\n "a": 2}', "the key 'a' stands twice in one object"),
        ('{"a": NaN}', "NaN is no number in JSON"),
        ("5", plain),
        ('"x"', plain),
        ("-1.5e3", plain),
        ("null", plain),
        ("[" + "9" * 5000 + "]", number),
        ('{"a": "\\ud83d"}', "half of a surrogate pair stands alone, which is no text"),
        ("[" * 300 + "]" * 300, "nested deeper than 200 levels"),
        ("NaN", "NaN is no number in JSON"),
        ("12", plain),
        ('{"a": "€"}', {"a": "€"}),
    ]
    found = read(("[" + ",\n".join(text for text, _ in expected) + "]").encode(), ".json", size=size)
    assert [line for line, _ in found] == [1, 2, *range(4, 15)]
    for (_, row), (_, right) in zip(found, expected, strict=True):
        assert row.reason.startswith(right) if isinstance(row, BadRow) else row == right


def test_verdicts_travel_between_processes() -> None:
    import pickle

    verdict = pickle.loads(pickle.dumps(bad('{"a": NaN}')))
    assert (verdict.reason, verdict.kind) == ("NaN is no number in JSON", "not strict JSON")
    assert verdict.what == "A row cannot be trained: NaN is no number in JSON."


# ----------------------------------------------------------------------------------------------- faults of the file


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ('[{"a": 1}', "a.json:1: the JSON array cannot be read on: it has no end or lacks a comma."),
        ('[{"a": 1},\n', "a.json:2: the JSON array cannot be read on: Expecting value."),
        ('[{"a": 1} {"a": 1}]', "a.json:1: the JSON array cannot be read on: it has no end or lacks a comma."),
        ('[\n{"a": 1},\n {"a": }]', "a.json:3: the JSON array cannot be read on: Expecting value."),
        ('[\n{"a": "x', "a.json:2: the JSON array cannot be read on: Unterminated string starting at."),
        ('[\n{"a": "x\ny"}]', "a.json:2: the JSON array cannot be read on: Invalid control character at."),
        ('[\n\n' + "[" * 100_000, "a.json:3: the JSON array cannot be read on: nested deeper than 200 levels."),
        ("[] {}", "a.json: something stands behind the JSON array."),
        ('{\n "a": 1\n}', "a.json is one JSON object spread over many lines."),
    ],
)  # fmt: skip
def test_an_array_that_cannot_be_read_on(content: str, reason: str) -> None:
    assert stop(content.encode(), ".json") == reason


def test_a_broken_array_is_not_read_to_its_end() -> None:
    file: Any = Endless(b'[{"a": }, ', b'{"a": 1}, ', 10**6, b"{}]")
    with pytest.raises(DataError, match="Expecting value"):
        list(blocks("a.json", file, ".json", "", 1 << 16))
    assert next(file._pieces)  # something is left


def test_text_that_is_not_utf8_ends_arrays_and_csv_with_the_line() -> None:
    assert stop(b'[{"a": 1},\n\n{"a": "\xff"}]', ".json").startswith("a.json:3: ")
    assert "byte 0xff is not UTF-8" in stop(b'[{"a": 1},\n{"a": "\xff"}]', ".json")
    assert "stops in line 3: byte 0xe4 is not UTF-8" in stop(b"a,b\nx,y\nGr\xe4n,y\n", ".csv")
    many = b"a,b\n" + b"x,y\n" * 50_000
    assert "stops in line 50002: byte 0xe4 is not UTF-8" in stop(many + b"x,\xe4\nx,y\n", ".csv")
    assert stop(b'[{"a": "\xc3', ".json").startswith("a.json:1: ")


@pytest.mark.parametrize("packing", [".gz", ".zst"])
def test_a_compressed_file_that_is_cut_off(packing: str) -> None:
    from random import Random

    draw = Random(0)
    lines = [json.dumps({"a": draw.getrandbits(800)}).encode() for _ in range(5000)]
    whole = packed(b"\n".join(lines), packing)
    for kind in (".jsonl", ".csv"):
        reason = stop(whole[: len(whole) // 2], kind, packing)
        assert "cannot be read to its end; it stops after line" in reason
        line = int(reason.partition("after line ")[2].partition(":")[0])
        assert 1500 < line < 2600
    assert "stops after line 0" in stop(whole[:2], ".jsonl", packing)
    assert "stops after line 0" in stop(b"never compressed", ".jsonl", packing)
    assert "cannot be read to its end" in stop(whole + b"rubbish", ".jsonl", packing)
    assert len(read_raw(whole + whole, packing)) == 9999  # two files in one; their two middle lines are one


def read_raw(data: bytes, packing: str) -> list[Any]:
    found = blocks("a.jsonl", io.BytesIO(data), ".jsonl", packing, 1 << 20)
    return [row for block in found for row in rows_of(block)]


# -------------------------------------------------------------------------------------------------------------- CSV


def test_csv_by_hand() -> None:
    data = b'\xef\xbb\xbf\r\nprompt,completion\r\nAgent?,007\r\n"Two\nlines, and","say ""8"""\r\n'
    data += b"\r\n  \r\nShort\r\nx,y,z\r\n"
    found = read(data, ".csv")
    assert found[:3] == [
        (3, {"prompt": "Agent?", "completion": "007"}),
        (4, {"prompt": "Two\nlines, and", "completion": 'say "8"'}),
        (8, {"prompt": "Short", "completion": None}),
    ]
    line, verdict = found[3]
    assert isinstance(verdict, BadRow)
    assert (line, verdict.reason) == (9, "3 cells under 2 column names")
    assert read(b"text\n\nx\n", ".csv") == [(3, {"text": "x"})]
    assert read(b"a\tb\nx, y\tz\n", ".tsv") == [(2, {"a": "x, y", "b": "z"})]


def test_columns_without_a_name() -> None:
    assert read(b",prompt,completion\n0,x,y\n", ".csv") == [(2, {"prompt": "x", "completion": "y"})]
    assert read(b"prompt,completion,,\nx,y,,\nx,y\n", ".csv") == [
        (2, {"prompt": "x", "completion": "y"}),
        (3, {"prompt": "x", "completion": "y"}),
    ]
    ((_, verdict),) = read(b"prompt,completion,\nHi, you,Hello\n", ".csv")
    assert isinstance(verdict, BadRow)
    assert verdict.reason == "a filled cell stands under no column name"
    assert stop(b",,\nx,y,z\n", ".csv") == "a.csv:1: the header names no column."
    assert stop(b"a,b,a\nx,y,z\n", ".csv") == "a.csv:1: a column name stands twice in the header: a."


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b'a,b\nx,y\nx,"y\nz,z\n', "a.csv cannot be read to its end; it stops in line 3: a quote opens in this row"),
        (b'a,b\nx,"y"z\n', "it stops in line 2: ',' expected after '\"'"),
        (b"a,b\nx\ry,z\n", "it stops in line 2: a carriage return stands alone outside quotes"),
        (b"a,b\rx,y\rx,y\r", "it stops in line 1: a carriage return stands alone outside quotes"),
    ],
)
def test_csv_that_cannot_be_read_on(content: bytes, reason: str) -> None:
    assert reason in stop(content, ".csv")


def test_a_lone_return_inside_quotes_is_text() -> None:
    assert read(b'a,b\n"x\ry","z\r\nz"\n', ".csv") == [(2, {"a": "x\ry", "b": "z\r\nz"})]


# ---------------------------------------------------------------------------------------------------------- Parquet


def test_parquet_values_stay_what_they_are() -> None:
    import datetime
    import decimal

    row = {
        "t": "007",
        "d": datetime.date(2026, 1, 2),
        "m": decimal.Decimal("2.50"),
        "b": b"\xff",
        "n": None,
        "f": 2.5,
    }
    assert read(as_parquet([row]), ".parquet") == [(1, row)]
    big = pa.table({"t": pa.array(["x"], pa.large_string()), "c": pa.array(["y"]).dictionary_encode()})
    file = io.BytesIO()
    pq.write_table(big, file)
    assert read(file.getvalue(), ".parquet") == [(1, {"t": "x", "c": "y"})]


def test_structs_lose_the_nulls_that_other_rows_gave_them() -> None:
    rows = [
        {"tools": [{"name": "f", "parameters": {"city": {"type": "string"}}}], "system": None},
        {"tools": [{"name": "g", "parameters": {"day": {"type": "string"}}}], "system": "Be brief."},
    ]
    assert read(as_parquet(rows), ".parquet") == list(enumerate(rows, 1))


def test_one_value_that_cannot_be_read_harms_no_other() -> None:
    text = pa.array([b"good", b"\xff\xfe", b"fine"], pa.binary()).view(pa.string())
    file = io.BytesIO()
    pq.write_table(pa.table({"text": text}), file)
    (_, one), (_, verdict), (_, other) = read(file.getvalue(), ".parquet")
    assert (one, other) == ({"text": "good"}, {"text": "fine"})
    assert isinstance(verdict, BadRow)
    assert "a value cannot be read" in verdict.reason


def test_parquet_faults_of_the_file() -> None:
    assert "a.parquet cannot be read after row 0" in stop(b"not parquet at all", ".parquet")
    whole = as_parquet([{"a": f"text {n}" * 9} for n in range(5000)], row_group_size=1000, compression="zstd")
    middle = len(whole) // 2
    reason = stop(whole[:middle] + b"\xff" * 500 + whole[middle + 500 :], ".parquet")
    assert "cannot be read after row 2000: " in reason
    twice = io.BytesIO()
    pq.write_table(pa.table([pa.array(["x"]), pa.array(["y"])], names=["a", "a"]), twice)
    assert stop(twice.getvalue(), ".parquet") == "a.parquet: a column name stands twice: a."


def test_wide_rows_come_in_small_blocks() -> None:
    data = as_parquet([{"a": f"{n}" + "x" * 100_000} for n in range(64)], use_dictionary=False)
    sizes = [len(block) for block in blocks("a", io.BytesIO(data), ".parquet", "", 1 << 20)]
    assert sum(sizes) == 64
    assert max(sizes) <= 10


# ----------------------------------------------------------------------------------------------------------- blocks


def test_blocks_are_whole_lines_with_the_number_of_the_first() -> None:
    data = b'{"a": 1}\n\n{"a": 2}\n{"a": 3}'
    found = list(blocks("a", io.BytesIO(data), ".jsonl", "", 4))
    assert found == [Lines(1, b'{"a": 1}\n'), Lines(2, b'\n{"a": 2}\n'), Lines(4, b'{"a": 3}')]


@given(st.lists(st.sampled_from(["", " ", "{}", "x", "\ufeff", "[]"]), max_size=8), st.integers(0, 9))
def test_a_cut_block_has_the_first_rows(lines: list[str], rows: int) -> None:
    block = Lines(5, "\n".join(lines).encode())
    whole = list(rows_of(block))
    short, count = cut(block, rows)
    kept = list(rows_of(short))
    assert len(kept) == count == min(rows, len(whole))
    assert [line for line, _ in kept] == [line for line, _ in whole[:rows]]
    parsed = [(1, {"a": 1}), (2, {"a": 2})]
    assert cut(parsed, 1) == ([(1, {"a": 1})], 1)  # type: ignore[arg-type]


def test_the_file_may_be_a_path_too(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"a": 1}')
    with (tmp_path / "a.jsonl").open("rb") as file:
        assert list(blocks("a", file, ".jsonl", "", 100)) == [Lines(1, b'{"a": 1}')]
