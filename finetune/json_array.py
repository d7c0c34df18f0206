"""A JSON array of any size -> its values one after the other, each with the line it begins on.

    [{"prompt": "Hi", ...}, {"prompt": "Bye", ...}, {"pro            the buffer: what is read and not yet let go
                             ^ at                        ^ more is read when a value ends here too early

Python's own parser wants the whole text. Here it is shown a piece, and a longer one where the piece was too short.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from typing import IO, Any

from finetune import strict_json
from finetune.errors import DataError

_SPACE = re.compile(r"[ \t\r\n]*")
_NEAR = 16  # characters: a number, word or escape that stands so near to the end may go on behind it


def elements(name: str, file: IO[bytes], start: bytes, line: int, size: int) -> Iterator[tuple[int, Any, int]]:
    """(line, value or `Refused`, length in characters) of each element; `start` is what was read, from `line` on.

    Raises `DataError` where the array cannot be read on.
    """
    text = _Text(name, file, start, line, size)
    text.at = text.buffer.index("[") + 1
    while text.next() != "]":
        begin = text.line()
        value, length = text.value()
        yield begin, value, length
        if text.next() == ",":
            text.at += 1
        elif text.next() != "]":
            raise text.fault("it has no end or lacks a comma")
    text.at += 1
    if text.next():
        raise DataError(
            f"{name}: something stands behind the JSON array.", "Remove it, or write one object per line."
        )


class _Text:
    """The text of a file from `buffer[at]` on."""

    def __init__(self, name: str, file: IO[bytes], start: bytes, line: int, size: int) -> None:
        self._name, self._file, self._line, self._size = name, file, line, size
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._whole = False  # the file is read to its end
        self._read = line  # the line that what was read ends in
        self.buffer = self._decoded(start)
        self.at = self._counted = 0

    def line(self) -> int:
        self._line += self.buffer.count("\n", self._counted, self.at)
        self._counted = self.at
        return self._line

    def next(self) -> str:
        """The next character that is no space, where `at` then stands; "" at the end of the file."""
        while True:
            if found := _SPACE.match(self.buffer, self.at):
                self.at = found.end()
            if self.at < len(self.buffer) or not self._more():
                return self.buffer[self.at : self.at + 1]

    def value(self) -> tuple[Any, int]:
        """The value that begins here, or why it is refused, and its length; `at` then stands behind it."""
        while True:
            try:
                value, end = strict_json.loads_at(self.buffer, self.at)
                unsure = not isinstance(value, dict) and end > len(self.buffer) - _NEAR
            except json.JSONDecodeError as error:
                unsure = error.msg.startswith("Unterminated") or error.pos > len(self.buffer) - _NEAR
                if not unsure or not self._more():
                    raise self.fault(error.msg) from None
                continue
            except strict_json.Refused as error:
                raise self.fault(error) from None
            if not unsure or not self._more():
                length, self.at = end - self.at, end
                return value, length

    def fault(self, reason: object) -> DataError:
        return _fault(self._name, self.line(), reason)

    def _more(self) -> bool:
        """Read at least as much as waits already, so that a long value is looked at few times."""
        if self._whole:
            return False
        self.line()
        block = self._file.read(max(self._size, len(self.buffer) - self.at))
        self._whole = not block
        more = self._decoded(block)
        if block:
            self.buffer = self.buffer[self.at :] + more
            self.at = self._counted = 0
        return not self._whole

    def _decoded(self, block: bytes) -> str:
        try:
            text = self._decoder.decode(block, final=self._whole)
        except UnicodeDecodeError as error:
            line = self._read + error.object[: error.start].count(b"\n")
            raise _fault(self._name, line, f"byte 0x{error.object[error.start]:02x} is not UTF-8") from None
        self._read += block.count(b"\n")
        return text


def _fault(name: str, line: int, reason: object) -> DataError:
    return DataError(f"{name}:{line}: the JSON array cannot be read on: {reason}.", "Correct the file there.")
