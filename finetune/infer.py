"""A file of questions -> a file of answers, one line for each line, in the same order.

    rows.jsonl --read--> prompts, the shortest first --model--> OUT.part --all there--> OUT
                                                                 {"input": ..., "model": ..., "settings": ...}
                                                                 {"line": 7, "answer": "...", "tokens": 3, ...}

Every batch is written down before the next one begins, so a killed run loses one batch at most; the same command goes
on from there. `OUT` itself appears whole. A row that cannot be asked gets its line too, with the reason.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from finetune import adapter_file, files, formats, readers, weight_files
from finetune.errors import DataError, InputError, Interrupted, RunError
from finetune.formats import BadRow, Conversation
from finetune.generate import Answer, Speaker, Target, find_target, load_speaker
from finetune.recipe import Data, Evaluate
from finetune.run import replace_text

Line = dict[str, Any]
Say = Callable[[str], None]
_PLACEHOLDER = "-"  # stands for the reply that a row of questions does not have


@dataclass(frozen=True)
class Inferred:
    """What a finished file of answers holds: `kept` of the answers are from before it was interrupted.

    `stop_rate` is the share of answers that the model ended by itself; `seconds` and `tokens` are of this call.
    """

    out: Path
    rows: int
    answered: int
    refused: int
    kept: int
    tokens: int
    seconds: float
    stop_rate: float

    def document(self) -> dict[str, Any]:
        """What `--json` prints."""
        return {**asdict(self), "out": str(self.out), "seconds": round(self.seconds, 1)}


def infer(
    name: str | Path,
    rows: Path,
    out: Path,
    *,
    max_new_tokens: int | None = None,
    system: str | None = None,
    base: bool = False,
    batch_tokens: int = 16_384,
    say: Say = lambda _: None,
) -> Inferred:
    """Ask a run, an adapter or a model every row of a file, and write the answers.

    Rows have the layouts of training rows; a reply that is there already is not shown to the model. `max_new_tokens`
    is the longest answer, by default the recipe's for evaluation, or 512. `system` is used by rows that bring none.
    `batch_tokens` bounds prompts and answers of one batch together. `base` asks the untrained model.

    Raises `InputError` when `out` exists, when an unfinished one belongs to other rows, another model or other
    settings, and what reading the rows or loading the model raises; `Interrupted` on Ctrl-C.
    """
    target = find_target(name)
    run = target.run or target.inside
    recipe = run.recipe() if run else None
    data = recipe.data if recipe else Data(train=str(rows))
    asked = recipe.evaluate if recipe else None
    longest = max_new_tokens or (asked.max_new_tokens if isinstance(asked, Evaluate) else 512)
    _check_out(out)
    source = _one_source(rows)
    system = system or target.system
    settings = {"max_new_tokens": longest, "system": system, "base": base}
    part = Part(out.with_name(f"{out.name}.part"), {
        "input": source.sha256(), "model": identity(target), "settings": settings,
    })  # fmt: skip
    with part.held():
        known = part.read()
        questions = list(_questions(source, data, system))
        speaker = load_speaker(name, base=base)
        prompts, lines = _prompts(speaker, questions, longest)
        kept = {line: known[line] for line in prompts if line in known}
        left = {line: ids for line, ids in prompts.items() if line not in known}
        if kept:
            say(f"{len(kept)} of {len(prompts)} answers are there already.")
        began = time.perf_counter()
        new = _ask(speaker, left, part, longest, batch_tokens, say)
        seconds = time.perf_counter() - began
        lines |= kept | new
        text = "".join(json.dumps(lines[line], ensure_ascii=False) + "\n" for line, _ in questions)
        replace_text(out, text)
        part.file.unlink(missing_ok=True)
    answered = [line for line in lines.values() if "answer" in line]
    return Inferred(
        out,
        rows=len(questions),
        answered=len(answered),
        refused=len(questions) - len(answered),
        kept=len(kept),
        tokens=sum(line["tokens"] for line in new.values()),
        seconds=seconds,
        stop_rate=sum(line["stopped"] for line in answered) / max(len(answered), 1),
    )


def identity(target: Target) -> str:
    """What changes when the answers would: fingerprints of the weights, the adapter and its config."""
    found = [weight_files.fingerprint(weight_files.read_model(target.model))]
    if target.adapter is not None:
        found += [
            weight_files.file_sha256(target.adapter / name) for name in (adapter_file.WEIGHTS, adapter_file.CONFIG)
        ]
    return " ".join(found)


def _check_out(out: Path) -> None:
    if out.exists():
        raise InputError(f"{out} exists already.", "Name another --out, or remove it.")
    if not out.absolute().parent.is_dir():
        raise InputError(f"There is no folder {out.absolute().parent}.", "Make it, or name another --out.")


def _one_source(rows: Path) -> files.Source:
    found = files.find(str(rows))
    if len(found) != 1 or found[0].path is None:
        raise DataError(f"{rows} is not one file on this machine.", "Give the path of one file of rows.")
    return found[0]


# ---------------------------------------------------------------------------------------------------------- questions


def _questions(source: files.Source, data: Data, system: str | None) -> Iterator[tuple[int, Conversation | BadRow]]:
    """Every line of the file with its conversation up to the reply, or why it cannot be asked."""
    for line, row in _every_line(source):
        try:
            if isinstance(row, BadRow):
                raise row
            yield line, question(row, data, system)
        except BadRow as error:
            yield line, error
        except DataError as error:  # which layout this is
            yield line, BadRow(error.what.rstrip("."), "layout")


def _every_line(source: files.Source) -> Iterator[tuple[int, readers.Row]]:
    """The rows and, among JSON lines, the blank ones, so that line n of the answers belongs to line n."""
    for chunk in files.chunks([source], None):
        block = chunk.block
        if not isinstance(block, readers.Lines):
            yield from block
            continue
        found = dict(readers.rows_of(block))
        count = block.text.count(b"\n") + (not block.text.endswith(b"\n"))
        for line in range(block.first, block.first + count):
            yield line, found.get(line, BadRow("the line is blank", "blank"))


def question(row: Mapping[str, Any], data: Data, system: str | None = None) -> Conversation:
    """What a row asks: its messages up to the last reply, which may be there or not; text is read as in training.

    Raises `BadRow` for a row without a question, and `DataError` when no layout or more than one fits its columns.
    """
    row = formats.renamed(row, data.columns)
    for column, asks in (("completion", "prompt"), ("output", "instruction")):
        if asks in row and not row.get(column):
            row[column] = _PLACEHOLDER
    for column in ("messages", "conversations"):
        if isinstance(said := row.get(column), list) and said and not _replied(said[-1]):
            key = {"from": "gpt", "value": _PLACEHOLDER} if "from" in said[-1] else None
            row[column] = [*said, key or {"role": "assistant", "content": _PLACEHOLDER}]
    found = formats.to_conversation(row, layout := _layout(row, data), system)
    if layout == "text":
        raise BadRow("a plain text asks nothing", "no question")
    return Conversation(found.messages[:-1], found.tools)


def _layout(row: Mapping[str, Any], data: Data) -> str:
    """The row's own layout: a run names one, that of its training rows, and questions may come in another."""
    fits = [layout for layout, needed in formats.LAYOUTS if set(needed) <= row.keys()]
    return data.format if len(fits) > 1 and data.format in fits else formats.detect(row)[0]


def _replied(message: Any) -> bool:
    """Whether a list of messages ends with a reply, which is then the reference and not part of the question."""
    return not isinstance(message, Mapping) or message.get("role", message.get("from")) in ("assistant", "gpt")


def _prompts(
    speaker: Speaker, questions: list[tuple[int, Conversation | BadRow]], longest: int
) -> tuple[dict[int, list[int]], dict[int, Line]]:
    """Token ids by line, and the finished lines of the rows that cannot be asked."""
    room = getattr(speaker.model.config.get_text_config(), "max_position_embeddings", None)
    prompts: dict[int, list[int]] = {}
    refused: dict[int, Line] = {}
    for line, asked in questions:
        try:
            if isinstance(asked, BadRow):
                raise asked
            ids = speaker.prompt(asked)
            if room and len(ids) + longest > room:
                raise BadRow(
                    f"{len(ids)} tokens and {longest} for the answer are more than the model's {room}", "long"
                )
            prompts[line] = ids
        except BadRow as error:
            refused[line] = {"line": line, "error": error.reason}
    return prompts, refused


# ------------------------------------------------------------------------------------------------------------ answers


def _ask(
    speaker: Speaker, prompts: Mapping[int, list[int]], part: Part, longest: int, batch_tokens: int, say: Say
) -> dict[int, Line]:
    places = list(prompts)
    done: dict[int, Line] = {}
    said = time.monotonic()
    try:
        for batch in speaker.batches(list(prompts.values()), max_new_tokens=longest, tokens=batch_tokens):
            new = [_line(places[index], answer) for index, answer in batch]
            part.append(new)
            done |= {line["line"]: line for line in new}
            if time.monotonic() - said > 10:
                said = time.monotonic()
                say(f"{len(done)} of {len(places)} rows answered")
    except KeyboardInterrupt:
        raise Interrupted(
            f"Stopped after {len(done)} of {len(places)} rows.", "The same command goes on from there."
        ) from None
    return done


def _line(line: int, answer: Answer) -> Line:
    return {"line": line, "answer": answer.text, "tokens": answer.tokens, "stopped": answer.stopped}


@dataclass(frozen=True)
class Part:
    """The answers so far: a first line that says to what, then one line per answer in the order they came."""

    file: Path
    about: dict[str, Any]

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep a second process from writing the same answers. Raises `RunError` when one does."""
        from filelock import FileLock, Timeout

        place = self.file.with_name(f".{self.file.name}.lock")
        try:
            lock = FileLock(place).acquire(timeout=0)
        except Timeout:
            raise RunError(
                f"Another process is writing {self.file}.", "Wait for it, or name another --out."
            ) from None
        with lock:
            yield
        place.unlink(missing_ok=True)

    def read(self) -> dict[int, Line]:
        """The answers by line; a last line that was cut off is dropped, here and from the file.

        Raises `InputError` when they answer other rows, or another model gave them, or under other settings.
        """
        if not self.file.is_file():
            self._begin([])
            return {}
        found = [_whole(text) for text in self.file.read_text(encoding="utf-8", errors="replace").split("\n")]
        about, lines = (found[0] if found else None), [line for line in found[1:] if line is not None]
        if about is None:
            lines = []
        elif changed := [name for name in self.about if about.get(name) != self.about[name]]:
            words = {"input": "other rows", "model": "another model", "settings": "other settings"}
            raise InputError(
                f"{self.file} holds answers of an unfinished call with {' and '.join(words[c] for c in changed)}.",
                "Remove it to start over, or name another --out.",
            )
        self._begin(lines)
        return {line["line"]: line for line in lines}

    def append(self, lines: list[Line]) -> None:
        """Write lines down for good."""
        with self.file.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
            file.flush()
            os.fsync(file.fileno())

    def _begin(self, lines: list[Line]) -> None:
        replace_text(self.file, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in [self.about, *lines]))


def _whole(text: str) -> Line | None:
    """A line as it was written, or None when the process was killed inside it."""
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
