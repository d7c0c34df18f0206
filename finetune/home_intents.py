"""The embedded data set: a smart-home command -> the Home Assistant intent as JSON.

    set the desk lamp to 40 percent   ->   {"intent": "HassLightSet", "brightness": 40, "name": "desk lamp"}

The sentence templates come from the PyPI package home-assistant-intents, their parser from hassil (both Apache-2.0).

    templates --- sampled with a seed ---> command + label --- read back by hassil's recogniser ---> row, or rejected

Three things keep the task honest and learnable. Every label can be read off its command: templates that need a hidden
context are left out, and a row is kept only if every reading the recogniser finds is the label. Intents are balanced.
Half of the test rows name only rooms, devices and things that no training row names; no test command is in training.

`python -m finetune.home_intents --out DIR` writes the files.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from finetune.errors import DataError, FinetuneError
from finetune.home_words import (
    DEVICES,
    DROPPED_TEMPLATES,
    INTENTS,
    NUMBERS,
    ROOMS_AND_FLOORS,
    SAID,
    UNNATURAL,
    VOCABULARY,
    WORDING,
)

Split = Literal["train", "test"]
Row = dict[str, list[dict[str, str]]]

SEED = 11
ROWS: dict[Split, int] = {"train": 640, "test": 200}
SYSTEM = "Reply with the Home Assistant intent as JSON."
_REVISION = 2  # raise it whenever the same packages and seed give other files (a test with a fingerprint will tell)
_TRIES = 1000  # draws for one row before we say that the templates have changed too much


@dataclass(frozen=True)
class DataSet:
    """The rows of both splits and what `about.json` says of them."""

    train: list[Row]
    test: list[Row]
    about: dict[str, Any]


def rows(split: Split, *, seed: int = SEED) -> list[Row]:
    """The rows of one split, generated; each is {"messages": [system, user, assistant]}."""
    made = generate(seed)
    return made.train if split == "train" else made.test


def generate(seed: int = SEED) -> DataSet:
    """Make both splits. The same seed and package versions give the same rows on every machine.

    Raises `DataError` when the packages are missing or their templates no longer fit.
    """
    data = _package_data()
    writer = _Writer(data, seed)
    train = writer.take("train", lambda number: False)
    # One intent after another, and for each by turns held out and seen: exactly half of the rows are held out.
    test = writer.take("test", lambda number: (number + number // len(INTENTS)) % 2 == 1)
    about = {
        **_identity(seed),
        "system": SYSTEM,
        "rows": {"train": len(train), "test": len(test)},
        "intents": {"train": _per_intent(train), "test": _per_intent(test)},
        "held_out": {kind: unseen.split(", ") for kind, (_, unseen) in VOCABULARY.items()},
        "held_out_test_rows": [number for number, made in enumerate(test) if made.held_out],
        "checked_by_recogniser": len(train) + len(test),
        "rejected_by_recogniser": writer.rejected,
    }
    return DataSet([made.row() for made in train], [made.row() for made in test], about)


# ----------------------------------------------------------------------------------------------------------- packages


def _package_data() -> dict[str, Any]:
    """English sentences, rules and lists of home-assistant-intents."""
    try:
        from importlib.resources import files

        import hassil  # noqa: F401  (asked for here, so that one message covers both)

        text = (files("home_assistant_intents") / "data" / "en.json").read_text(encoding="utf-8")
    except ModuleNotFoundError as error:
        raise _missing(error.name) from None
    data: dict[str, Any] = json.loads(text)
    return data


def _missing(package: str | None) -> DataError:
    return DataError(
        f"The embedded data set needs the package '{package}', which is not installed.",
        "Install both it comes from: pip install home-assistant-intents hassil",
    )


def _identity(seed: int) -> dict[str, Any]:
    """All that the bytes of the files depend on."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        versions = {package: version(package) for package in ("home-assistant-intents", "hassil")}
    except PackageNotFoundError as error:
        raise _missing(error.name) from None
    return {"packages": versions, "revision": _REVISION, "seed": seed}


# ----------------------------------------------------------------------------------------------------------- sampling

_Item = TypeVar("_Item")


def _pick(rng: random.Random, items: Sequence[_Item], weights: Sequence[float] | None = None) -> _Item:
    """One item by weight. Only `random()` is promised to be the same on every Python, so only it is used."""
    weights = weights or [1.0] * len(items)
    point = rng.random() * sum(weights)
    for item, weight in zip(items, weights, strict=True):
        point -= weight
        if point < 0:
            return item
    return items[-1]


@dataclass(frozen=True)
class _Made:
    """One command with its label."""

    command: str
    label: dict[str, Any]
    held_out: bool

    def row(self) -> Row:
        answer = json.dumps(self.label, ensure_ascii=False)
        return {
            "messages": [
                {"role": "system", "content": SYSTEM},
                {"role": "user", "content": self.command},
                {"role": "assistant", "content": answer},
            ]
        }


def _per_intent(made: list[_Made]) -> dict[str, int]:
    return dict(sorted(Counter(one.label["intent"] for one in made).items()))


class _Writer:
    """Draws rows until they are new, natural and confirmed by the recogniser."""

    def __init__(self, data: dict[str, Any], seed: int) -> None:
        self.data = data
        self.rng = random.Random(seed)
        self.templates = _all_templates(data)
        self.recogniser = Recogniser(data)
        self.taken: set[str] = set()
        self.rejected = 0
        self.parsed: dict[str, Any] = {}

    def take(self, split: Split, held_out: Callable[[int], bool]) -> list[_Made]:
        """Rows of one split in random order, every intent equally often."""
        names = list(INTENTS)
        made = [self.one(names[number % len(names)], held_out(number)) for number in range(ROWS[split])]
        return sorted(made, key=lambda _: self.rng.random())

    def one(self, intent: str, held_out: bool) -> _Made:
        cells = INTENTS[intent]
        for _ in range(_TRIES):
            cell = _pick(self.rng, cells, [weight for _, _, weight in cells])
            draw = _Draw(self, cell[1], held_out)
            template, fixed = _pick(self.rng, self.templates[intent, cell[0], cell[1]])
            command = " ".join(draw.text(self.parse(template)).split())
            label = {"intent": intent, **dict(sorted({**fixed, **draw.slots}.items()))}
            if command.lower() in self.taken or UNNATURAL.search(command) or (held_out and not draw.names):
                continue
            if not self.recogniser.agrees(command, label):
                self.rejected += 1
                continue
            self.taken.add(command.lower())
            return _Made(command, label, held_out)
        raise DataError(
            f"{_TRIES} draws gave no new command for {intent}.",
            "The templates of the installed home-assistant-intents are too few; install another version of it.",
        )

    def parse(self, template: str) -> Any:
        from hassil.parse_expression import parse_sentence

        if template not in self.parsed:
            self.parsed[template] = parse_sentence(template).expression
        return self.parsed[template]


_Templates = dict[tuple[str, str, str | None], list[tuple[str, dict[str, Any]]]]


def _all_templates(data: dict[str, Any]) -> _Templates:
    """(intent, combination, kind) -> its (template, fixed slots)."""
    found: _Templates = {}
    for intent, cells in INTENTS.items():
        blocks = data["intents"].get(intent, {}).get("data", [])
        for combination, kind, _ in cells:
            found[intent, combination, kind] = [
                (template, block.get("slots", {}))
                for block in blocks
                if _fits(block, combination, kind)
                for template in block["sentences"]
                if not DROPPED_TEMPLATES.search(template)
            ]
            if not found[intent, combination, kind]:
                raise DataError(
                    f"The installed home-assistant-intents has no sentence for {intent} ({combination}, {kind}).",
                    "Install one from 2026.6.24 on: pip install --upgrade home-assistant-intents",
                )
    return found


def _fits(block: dict[str, Any], combination: str, kind: str | None) -> bool:
    """Whether a block of sentences fills these slots, for this kind of device, and needs no speaker's room."""
    if block.get("metadata", {}).get("slot_combination") != combination or not _stands_alone(block):
        return False
    domain = block.get("requires_context", {}).get("domain") or block.get("slots", {}).get("domain")
    return kind in domain if isinstance(domain, list) else kind == domain


def _stands_alone(block: dict[str, Any]) -> bool:
    """Whether a block of sentences can be understood without knowing the room of the speaker."""
    return "area" not in block.get("requires_context", {})


class _Draw:
    """One walk through a template: the text, and the slots it fills on the way."""

    def __init__(self, writer: _Writer, kind: str | None, held_out: bool) -> None:
        self.writer = writer
        self.rng = writer.rng
        self.kind = kind
        self.held_out = held_out
        self.slots: dict[str, Any] = {}
        self.names = 0  # rooms, devices and things named

    def text(self, part: Any) -> str:
        from hassil.expression import Alternative, ListReference, RuleReference, Sequence, TextChunk

        if isinstance(part, TextChunk):
            return part.original_text
        if isinstance(part, Alternative):
            return self.text(self.choice(part))
        if isinstance(part, Sequence):
            return "".join(self.text(item) for item in part.items)
        if isinstance(part, RuleReference):
            rule = WORDING.get(part.rule_name) or self.writer.data["expansion_rules"][part.rule_name]
            return self.text(self.writer.parse(rule))
        if isinstance(part, ListReference):
            said, value = self.value(part.list_name)
            self.slots[part.slot_name] = value
            return said
        raise DataError(f"hassil gave a {type(part).__name__}, which is not sampled here.", "Install hassil 3.")

    def choice(self, part: Any) -> Any:
        """The first wording is the commonest: each next one is half as likely. Optional parts are said by `SAID`."""
        items = part.items
        if part.is_optional:
            *items, silence = items
            if self.rng.random() >= SAID.get(_begins(items[0]), 0.5):
                return silence
        return _pick(self.rng, items, [0.5**place for place in range(len(items))])

    def value(self, list_name: str) -> tuple[str, Any]:
        """What is said for a list, and the slot's value."""
        vocabulary = self.kind if list_name == "name" else list_name
        if vocabulary in VOCABULARY:
            self.names += 1
            name = _pick(self.rng, VOCABULARY[vocabulary][self.held_out].split(", "))
            return name, name
        if list_name in NUMBERS:
            number = _pick(self.rng, NUMBERS[list_name])
            return str(number), number
        entry = _pick(self.rng, self.writer.data["lists"][list_name]["values"])
        return self.text(self.writer.parse(entry["in"])), entry["out"]


def _begins(part: Any) -> str:
    """The first rule or word of an optional part, to look up in `SAID`."""
    while getattr(part, "items", None):
        part = part.items[0]
    rule = getattr(part, "rule_name", None)
    return f"<{rule}>" if rule else str(getattr(part, "text", "")).strip()


# ----------------------------------------------------------------------------------------------------------- checking


class Recogniser:
    """hassil's own recogniser over the eight intents, with all their templates and our rooms and devices.

    It knows nothing of how a row was made: it reads the command as Home Assistant does when the speaker's room is not
    known. (Templates that need it could not match then; they are left out to save a third of the time.)
    """

    def __init__(self, data: dict[str, Any]) -> None:
        from hassil.intents import Intents, SlotList, TextSlotList

        intents = {name: {"data": [*filter(_stands_alone, data["intents"][name]["data"])]} for name in INTENTS}
        self.intents = Intents.from_dict({**data, "intents": intents})
        devices = [(name, name, {"domain": kind}) for kind in DEVICES for name in _all_names(kind)]
        self.lists: dict[str, SlotList] = {
            **{place: TextSlotList.from_strings(_all_names(place), name=place) for place in ROOMS_AND_FLOORS},
            "name": TextSlotList.from_tuples(devices, name="name"),
        }

    def readings(self, command: str) -> list[dict[str, Any]]:
        """Every reading of a command, as labels."""
        from hassil.recognize import recognize_all

        found = recognize_all(command, self.intents, slot_lists=self.lists, language="en")
        return [{"intent": one.intent.name, **{slot.name: slot.value for slot in one.entities_list}} for one in found]

    def agrees(self, command: str, label: dict[str, Any]) -> bool:
        """Whether the recogniser finds a reading and all readings it finds are the label.

        No reading is preferred over another: a command that can be read in two ways is not a fair question.
        """
        readings = self.readings(command)
        return bool(readings) and all(reading == label for reading in readings)


def _all_names(kind: str) -> list[str]:
    return ", ".join(VOCABULARY[kind]).split(", ")


# -------------------------------------------------------------------------------------------------------------- files


def path(split: Split) -> Path:
    """The file of one split in the cache ($FINETUNE_CACHE or ~/.cache/finetune), made when it is not there."""
    key = hashlib.sha256(json.dumps(_identity(SEED), sort_keys=True).encode()).hexdigest()[:12]
    cache = Path(os.environ.get("FINETUNE_CACHE") or "~/.cache/finetune").expanduser()
    return ensure(cache / f"home-intents-{key}")[split]


def ensure(folder: Path) -> dict[str, Path]:
    """train.jsonl, test.jsonl and about.json in `folder`, by the names train, test and about.

    A folder made from the same packages, seed and revision is used as it is. An older or incomplete one is replaced
    as a whole: the new one is written beside it and renamed. Files that this function did not write, or that were
    edited since, are never touched: then it raises `DataError`.
    """
    folder = folder.expanduser().resolve()
    found = {"train": folder / "train.jsonl", "test": folder / "test.jsonl", "about": folder / "about.json"}
    try:
        if not _is_current(folder):
            _refuse_foreign(folder)
            _write_and_rename(generate(), folder)
    except OSError as error:
        raise DataError(f"{folder} cannot be written: {error.strerror}.", "Name another folder.") from None
    return found


def _write_and_rename(made: DataSet, folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        _write(made, aside)
        _replace(folder, aside)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _write(made: DataSet, folder: Path) -> None:
    """The three files, on the disk for good before the folder gets its name."""
    texts = {
        name: "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in split)
        for name, split in (("train.jsonl", made.train), ("test.jsonl", made.test))
    }
    sums = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in texts.items()}
    texts["about.json"] = json.dumps({**made.about, "sha256": sums}, indent=1, ensure_ascii=False) + "\n"
    for name, text in texts.items():
        with open(folder / name, "wb") as file:
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())
    folder.chmod(0o755)  # mkdtemp makes it private, and a cache may be shared


def _replace(folder: Path, aside: Path) -> None:
    """Give `aside` the name `folder`; a process that was quicker has made the same files."""
    old = aside.with_name(aside.name + "-old")
    try:
        with contextlib.suppress(FileNotFoundError):
            os.replace(folder, old)
        os.replace(aside, folder)
    except OSError:
        if not _is_current(folder):
            raise
    finally:
        shutil.rmtree(old, ignore_errors=True)


def _about(folder: Path) -> dict[str, Any]:
    try:
        value = json.loads((folder / "about.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _is_current(folder: Path) -> bool:
    about = _about(folder)
    same = all(about.get(key) == value for key, value in _identity(SEED).items())
    return same and {name: _sum(folder / name) for name in ("train.jsonl", "test.jsonl")} == about.get("sha256")


def _refuse_foreign(folder: Path) -> None:
    """Raise when replacing `folder` would lose something that cannot be made again."""
    if not folder.exists():
        return
    sums = _about(folder).get("sha256")
    ours = sums if isinstance(sums, dict) else {}
    for file in sorted(folder.iterdir()):
        if not (ours and file.name == "about.json") and (file.name not in ours or ours[file.name] != _sum(file)):
            raise DataError(
                f"{file} was not written by finetune or was changed since, and would be lost.",
                "Name another folder, or move the file away.",
            )


def _sum(file: Path) -> str | None:
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError:
        return None


def main(arguments: list[str] | None = None) -> int:
    """Write the data set into a folder of the user's choice."""
    parser = argparse.ArgumentParser("python -m finetune.home_intents", description="Write the embedded data set.")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to make")
    folder = parser.parse_args(arguments).out
    try:
        files = ensure(folder)
    except FinetuneError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    sys.stdout.write("".join(f"{file}\n" for file in files.values()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
