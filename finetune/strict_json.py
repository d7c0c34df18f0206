"""JSON text -> values; what the standard forbids but Python accepts is refused.

    {"a": 1, "a": 2}    the key 'a' stands twice in one object        {"a": NaN}       NaN is no number in JSON
    "\\ud83d"            half of a surrogate pair, which is no text    [[[[ ... ]]]]    nested deeper than 200 levels

All of it is found while the text is read once: rows are many, and a second look at each would double the time.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

DEEPEST = 200  # levels; a fixed number, so that the verdict does not hang on how deep Python's own stack is


class Refused(ValueError):
    """The text is no JSON (`kind` "not JSON"), or more than JSON allows ("not strict JSON")."""

    def __init__(self, reason: str, kind: str = "not strict JSON") -> None:
        self.kind = kind
        super().__init__(reason)


def loads(text: str) -> Any:
    """The value that the whole text stands for. Raises `Refused`."""
    try:
        value = _STRICT.decode(text)
    except json.JSONDecodeError as error:
        raise Refused(f"not JSON: {error}{_lone_return(text, error.pos)}", "not JSON") from None
    except RecursionError:
        raise _too_deep() from None
    except Refused:
        raise
    except ValueError as error:  # a whole number of more digits than Python reads
        raise Refused(f"a number cannot be read: {error}") from None
    _check(value, text)
    return value


def loads_at(text: str, at: int) -> tuple[Any | Refused, int]:
    """The value that begins at `at`, or why it is refused, and where it ends.

    Raises `json.JSONDecodeError` where the text cannot be read on, and `Refused` where its end cannot be found.
    """
    try:
        try:
            value, end = _STRICT.raw_decode(text, at)
            _check(value, text[at:end])
            return value, end
        except json.JSONDecodeError:
            raise
        except ValueError as error:
            why = error if isinstance(error, Refused) else Refused(f"a number cannot be read: {error}")
            return why, _LENIENT.raw_decode(text, at)[1]
    except RecursionError:
        raise _too_deep() from None


def _pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
    known = dict(items)
    if len(known) < len(items):
        twice = next(key for key, count in Counter(key for key, _ in items).items() if count > 1)
        raise Refused(f"the key '{twice}' stands twice in one object")
    return known


def _constant(name: str) -> None:
    raise Refused(f"{name} is no number in JSON")


_STRICT = json.JSONDecoder(object_pairs_hook=_pairs, parse_constant=_constant)
_LENIENT = json.JSONDecoder(parse_int=len)  # finds the end of what was refused; its values are thrown away
_ENCODER = json.JSONEncoder(ensure_ascii=False)


def _check(value: Any, text: str) -> None:
    if text.count("[") + text.count("{") > DEEPEST and _depth(value) > DEEPEST:
        raise _too_deep()
    if "\\ud" in text or "\\uD" in text:  # only an escape can bring a surrogate into text that came from UTF-8
        try:
            _ENCODER.encode(value).encode()
        except UnicodeEncodeError:
            raise Refused("half of a surrogate pair stands alone, which is no text") from None


def _depth(value: Any) -> int:
    levels, here = 0, [value]
    while here := [held for held in here if isinstance(held, (list, dict))]:
        levels += 1
        here = [below for held in here for below in (held.values() if isinstance(held, dict) else held)]
    return levels


def _too_deep() -> Refused:
    return Refused(f"nested deeper than {DEEPEST} levels")


def _lone_return(text: str, at: int) -> str:
    """Lines that end as on an old Mac are one line to everybody else, which the JSON error does not tell."""
    return " (a lone carriage return ends no line)" if "\r" in text[max(at - 1, 0) : at] else ""
