"""YAML text -> plain values, each with the line it stands on.

Scalars follow the YAML 1.2 core schema, widened to the spellings people use for numbers (`1e-4`, `.1`, `1_000`), so
that a number is a number and `NO` is text. What older readers change in silence is a fault here: a key written twice,
and a number with leading zeros (`010` is 8 for some readers and 10 for others).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import yaml

Path = tuple[str | int, ...]

_INT = re.compile(r"[-+]?(0|[1-9][0-9]*(_[0-9]+)*)\Z")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?\Z")
_LEADING_ZERO = re.compile(r"[-+]?0(_?[0-9])+\Z")
_WORDS: dict[str, Any] = {"": None, "~": None, "null": None, "Null": None, "NULL": None}
_WORDS |= {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_WORDS |= {".inf": float("inf"), "-.inf": float("-inf"), ".nan": float("nan")}


@dataclass
class Document:
    """A parsed file: its value, the line (from 1) of every path in it, and the faults met on the way."""

    value: Any
    lines: dict[Path, int] = field(default_factory=dict)
    faults: list[tuple[int, str]] = field(default_factory=list)


def scalar(text: str) -> Any:
    """The value of an unquoted YAML scalar.

    >>> [scalar(t) for t in ("1e-4", ".1", "1_000", "NO", "true", "~")]
    [0.0001, 0.1, 1000, 'NO', True, None]
    """
    if text in _WORDS:
        return _WORDS[text]
    if _INT.match(text):
        return int(text)
    if _FLOAT.match(text) and not _LEADING_ZERO.match(text):
        return float(text)
    return text


def dump(value: Any) -> str:
    """YAML text that `parse` reads back to the same value: `1e-4` as text is put in quotes, as a number it is not."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)


def quoted(text: str) -> str:
    """One text as it is written in a file: plain where it reads back as that text, else in quotes."""
    return yaml.dump([text], Dumper=_Dumper, allow_unicode=True, width=10**6)[2:].rstrip("\n")


class _Dumper(yaml.SafeDumper):
    """PyYAML's own dumper leaves text plain that is a number to `scalar`."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    style = None if isinstance(scalar(text), str) and not _LEADING_ZERO.match(text) else "'"
    if re.search("[\x85\u2028\u2029]", text):
        style = '"'  # line ends of Unicode, which PyYAML folds to spaces outside double quotes
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def parse(text: str) -> Document:
    """Read one YAML document. Syntax errors and duplicate keys become `faults` with their line."""
    document = Document(None)
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        if problem == "but found another document":
            problem = "a second document begins here"
        document.faults.append((mark.line + 1 if mark else 1, f"this is not YAML: {problem}"))
        return document
    if root is not None:
        document.value = _build(root, (), document, frozenset())
    return document


def _build(node: yaml.Node, path: Path, document: Document, above: frozenset[int]) -> Any:
    line = node.start_mark.line + 1
    document.lines.setdefault(path, line)
    if id(node) in above:
        document.faults.append((line, "an alias contains itself"))
        return None
    above = above | {id(node)}
    if isinstance(node, yaml.ScalarNode):
        if node.style is not None:
            return node.value
        if _LEADING_ZERO.match(node.value):
            document.faults.append(
                (
                    line,
                    f"'{node.value}' starts with a zero and could mean two numbers; write {int(node.value)}, or"
                    f" '{node.value}' in quotes for text",
                )
            )
            return int(node.value)
        return scalar(node.value)
    if isinstance(node, yaml.SequenceNode):
        return [_build(item, (*path, i), document, above) for i, item in enumerate(node.value)]
    mapping: dict[str, Any] = {}
    for key_node, value_node in node.value:
        if not isinstance(key_node, yaml.ScalarNode):
            document.faults.append((key_node.start_mark.line + 1, "a key must be one word"))
            continue
        key = key_node.value
        key_line = key_node.start_mark.line + 1
        here = (*path, key)
        if key in mapping:
            document.faults.append((key_line, f"key '{key}' is written twice, first on line {document.lines[here]}"))
            continue
        document.lines[here] = key_line
        mapping[key] = _build(value_node, here, document, above)
    return mapping
