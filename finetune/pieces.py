"""Token ids -> text that a person can read piece by piece, whatever stands in it.

ids      1           520        198  18       2            -100 is not trained
pieces   <|im_start|> assistant ⏎    Hi       <|im_end|>
         special                     trained  trained, special
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from finetune.chat import IGNORE

_LONGEST = 16  # tokens of one character; more is no character but a wrong byte
_BROKEN = "\ufffd"


@dataclass(frozen=True, slots=True)
class Piece:
    """One token, or the few that make up one character, as text."""

    text: str
    ids: tuple[int, ...]
    trained: bool
    special: bool


class Speller:
    """Writes the tokens of one tokenizer, each as it reads inside a text."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder
        self.special = {number for number, token in added.items() if token.special} | set(tokenizer.all_special_ids)
        # Behind another token: alone, or first in a text, many decoders take a token's own space away.
        self._anchor = tokenizer("a", add_special_tokens=False)["input_ids"][-1:]
        self._before = self._decode(self._anchor)
        self._known: dict[tuple[int, ...], str] = {}

    def pieces(self, ids: Sequence[int], labels: Sequence[int]) -> Iterator[Piece]:
        """The row piece by piece; the texts together are the row's text."""
        at = 0
        while at < len(ids):
            until = at + 1
            if _BROKEN in self.text(ids[at:until]):
                ends = range(at + 2, min(at + _LONGEST, len(ids)) + 1)
                until = next((end for end in ends if _BROKEN not in self.text(ids[at:end])), until)
            group = tuple(ids[at:until])
            trained = all(label != IGNORE for label in labels[at:until])
            yield Piece(self.text(group), group, trained, group[0] in self.special)
            at = until

    def text(self, ids: Sequence[int]) -> str:
        """What these tokens write inside a text."""
        key = tuple(ids)
        if key not in self._known:
            self._known[key] = self._decode([*self._anchor, *key]).removeprefix(self._before)
        return self._known[key]

    def has_letters(self, number: int) -> bool:
        """Whether a token brings a letter or a digit; part of a character counts as one."""
        text = "" if number in self.special else self.text([number])
        return _BROKEN in text or any(letter.isalnum() for letter in text)

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), clean_up_tokenization_spaces=False))


def visible(text: str) -> str:
    """Text without anything that could move the cursor, turn the line round or be overlooked; line breaks stay.

    Line feeds are marked, control characters shown as their pictures, invisible ones by their number.
    """
    return "".join(_VISIBLE.get(letter) or _shown(letter) for letter in text)


_VISIBLE = {"\n": "⏎\n", "\t": "⇥", " ": " "}


def _shown(letter: str) -> str:
    code = ord(letter)
    if code < 0x20 or code == 0x7F:
        return chr(0x2400 + code) if code < 0x20 else "␡"
    if (
        code > 0x7F
        and letter != "\u200d"
        and unicodedata.category(letter) in ("Cc", "Cf", "Zl", "Zp", "Cs", "Co", "Cn")
    ):
        return f"⟨U+{code:04X}⟩"
    return letter


__all__ = ["Piece", "Speller", "visible"]
