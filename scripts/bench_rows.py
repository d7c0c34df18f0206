"""The rows of the speed benchmark: written by chance with a fixed seed, so nothing has to be fetched.

`common_rows` has the shape of an instruction set: with SmolLM2's template and tokenizer a row has 62 to 465 tokens,
203 in the mean, 111 of them the reply; two in five have no input. `third_rows` are of one length, a third supervised.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

ASKED = (
    "Answer the question using only the note.", "Say it again so that a child of ten could follow.",
    "Correct what is wrong and explain each change.", "Put the figures into a table and comment on them.",
    "Give the people involved three practical hints.", "Explain what happened and why it matters.",
    "Sum the note up in one or two sentences.", "List the main facts as short bullet points.",
    "Turn the paragraph into a polite letter.", "Write a short story along this outline.",
)  # fmt: skip
WHO = (
    "The night nurse", "A junior accountant", "An apprentice plumber", "A small dairy farm", "The county library",
    "The survey team", "The robotics club", "A retired geologist", "The bakery by the mill", "The harbour master",
)  # fmt: skip
DID = ("compared", "translated", "recorded", "repaired", "ordered", "planned", "inspected", "measured")
WHAT = (
    "the drift of the antenna", "the temperature of each oven", "a leaking copper joint", "three ledgers of receipts",
    "the milk yield per cow", "a shelf of basalt samples", "the wheel encoders", "the monthly budget",
)  # fmt: skip
WHEN = (
    "twice in one day", "before the inspection", "on Monday morning", "in under forty minutes", "after a long delay",
    "for the annual report", "with help from a neighbour", "in the second week of March",
)  # fmt: skip
WHY = (
    "despite the heavy rain", "because the earlier figures were wrong", "so that the next team could continue",
    "in order to answer a simple question", "since nobody else was available", "to keep the costs below the limit",
)  # fmt: skip
PLAIN = (
    "the of and to in is that for it as was with be by on not he his but at are this have from or had an they which "
    "one you were all her she there would their we him been has when who will no more if out so up said what its "
    "about than into them can only other time new some could these two may first then do any like my now over such"
).split()


def _sentence(dice: random.Random) -> str:
    if dice.random() < 0.242:
        total, days = dice.randint(20, 990), dice.randint(3, 60)
        return f"The total came to {total} units over {days} days, or about {total / days:.1f} a day."
    return f"{' '.join(map(dice.choice, (WHO, DID, WHAT, WHEN)))}, {dice.choice(WHY)}."


def _sentences(dice: random.Random, middle: float, spread: float, most: int) -> str:
    """A text whose number of sentences is lognormal: `middle` in the median, from one to `most`."""
    count = min(max(round(middle * dice.lognormvariate(0, spread)), 1), most)
    return " ".join(_sentence(dice) for _ in range(count))


def common_rows(count: int, seed: int = 11) -> list[dict[str, str]]:
    """Rows of instruction, input and output as in the common job."""
    dice = random.Random(seed)
    rows = []
    for _ in range(count):
        given = "" if dice.random() < 0.4 else _sentences(dice, 3.4, 0.6, 12)
        left = 18 - given.count(". ") - bool(given)  # so that no row is much longer than the longest there
        rows.append(
            {
                "instruction": dice.choice(ASKED),
                "input": given,
                "output": _sentences(dice, 4.2, 0.65, min(left, 16)),
            }
        )
    return rows


def third_rows(
    count: int, length: int, measure: Callable[[str, str], tuple[int, int]], seed: int = 12
) -> list[dict[str, Any]]:
    """Questions and replies of `length` tokens each, a third of them supervised.

    `measure` says how many tokens a question and a reply become and how many of those give a loss. Words are added
    or taken away until both are right, so a tokenizer that splits some of them does no harm.
    """
    dice = random.Random(seed)
    rows: list[dict[str, Any]] = []
    for number in range(count):
        asked, said = dice.choices(PLAIN, k=length * 2 // 3), dice.choices(PLAIN, k=length // 3)
        asked[0] = f"{number}:"
        for _ in range(20):
            tokens, supervised = measure(" ".join(asked), " ".join(said))
            more = length // 3 - supervised
            said = _longer(dice, said, more)
            asked = _longer(dice, asked, length - tokens - more)
            if (tokens, supervised) == (length, length // 3):
                break
        else:
            raise ValueError(f"no row of {length} tokens with {length // 3} supervised was found")
        rows.append({"prompt": " ".join(asked), "completion": " ".join(said)})
    return rows


def _longer(dice: random.Random, words: list[str], by: int) -> list[str]:
    return words + dice.choices(PLAIN, k=by) if by > 0 else words[: len(words) + by]
