"""Held-out rows -> scores, for the untrained model (zero-shot and few-shot) and the tuned one."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from dataclasses import fields as dataclass_fields
from pathlib import Path
from typing import Any

from finetune.data import read_conversations
from finetune.errors import InputError
from finetune.formats import Conversation, Message
from finetune.generate import Answer, Speaker, load_speaker
from finetune.recipe import Evaluate, Full, Recipe
from finetune.run import Run, open_run, replace_text
from finetune.scores import Scores, score


@dataclass(frozen=True)
class Arm:
    """One way of asking: its scores, its answers in row order, and the share of answers that ended by themselves."""

    name: str
    scores: Scores
    answers: list[str]
    stop_rate: float
    seconds: float


@dataclass(frozen=True)
class Evaluation:
    """All arms on the same questions."""

    questions: list[str]
    references: list[str]
    arms: list[Arm]

    def document(self) -> dict[str, Any]:
        """What evaluation.json holds and `--json` prints."""
        arms = [
            {"name": a.name, **asdict(a.scores), "stop_rate": a.stop_rate, "seconds": round(a.seconds, 1)}
            for a in self.arms
        ]
        return {"rows": len(self.questions), "arms": arms}


def evaluate(run: Run | str | Path, *, rows: int | None = None, speaker: Speaker | None = None) -> Evaluation:
    """Score a finished run on its recipe's held-out rows and write evaluation.json and answers.jsonl beside it.

    `speaker` is the model with its adapter when it is in memory already. Raises `InputError` when the recipe names no
    rows.
    """
    run = run if isinstance(run, Run) else open_run(run)
    recipe = run.recipe()
    asked = recipe.evaluate
    if asked is None:
        raise InputError(
            f"The recipe of {run.name} has no held-out rows.",
            "Name them with `--set evaluate.data=FILE` when training.",
        )
    rows = rows or asked.rows
    prompts, references = _questions(asked.data, recipe, rows)
    # An adapter can be switched off; after full fine-tuning the two models are loaded one after the other.
    full = isinstance(recipe.method, Full)
    untrained = load_speaker(run.folder, base=True) if full else speaker or load_speaker(run.folder)
    arms = [_ask("untrained, zero-shot", untrained, prompts, references, asked, bare=True)]
    examples = _examples(recipe, asked.few_shot)
    if examples:
        shown = [_with_examples(prompt, examples) for prompt in prompts]
        arms.append(_ask(f"untrained, {len(examples)}-shot", untrained, shown, references, asked, bare=True))
    tuned = untrained
    if full:
        del untrained, tuned
        tuned = load_speaker(run.folder)
    arms.append(_ask("tuned", tuned, prompts, references, asked, bare=False))
    result = Evaluation([prompt.messages[-1]["content"] for prompt in prompts], references, arms)
    _save(run, result)
    return result


def read_evaluation(folder: Path) -> Evaluation:
    """The evaluation that `evaluate` left in a run folder."""
    arms = json.loads((folder / "evaluation.json").read_text(encoding="utf-8"))["arms"]
    rows = [json.loads(line) for line in (folder / "answers.jsonl").read_text(encoding="utf-8").splitlines()]
    fields = [field.name for field in dataclass_fields(Scores)]
    return Evaluation(
        [row["question"] for row in rows],
        [row["reference"] for row in rows],
        [
            Arm(
                arm["name"],
                Scores(**{f: arm[f] for f in fields}),
                [row[arm["name"]] for row in rows],
                arm["stop_rate"],
                arm["seconds"],
            )
            for arm in arms
        ],
    )


def check_questions(recipe: Recipe) -> None:
    """Raise now, before training, what reading the held-out rows would raise after it."""
    if recipe.evaluate is not None:
        _questions(recipe.evaluate.data, recipe, 1)


def _questions(source: str, recipe: Recipe, rows: int) -> tuple[list[Conversation], list[str]]:
    """The first `rows` conversations up to their last reply, and those replies."""
    found = [(c.messages, c.tools) for c in read_conversations(source, recipe.data)]
    talks = [(said, tools) for said, tools in found if said[-1]["role"] == "assistant" and said[-1]["content"]][:rows]
    if not talks:
        raise InputError(
            f"{source} has no row that ends with a reply.", "Give held-out rows in the format of the training rows."
        )
    return [Conversation(said[:-1], tools) for said, tools in talks], [said[-1]["content"] for said, _ in talks]


def _examples(recipe: Recipe, count: int) -> list[list[Message]]:
    """Up to `count` training rows of one question and one reply, the first of each kind of reply."""
    chosen: dict[str, list[Message]] = {}
    for talk in (c for source in recipe.data.sources for c in read_conversations(source, recipe.data)):
        turns = [m for m in talk.messages if m["role"] != "system"]
        if len(turns) == 2 and len(chosen) < count:
            chosen.setdefault(_kind(turns[1]["content"]), turns)
    return list(chosen.values())


def _with_examples(prompt: Conversation, examples: list[list[Message]]) -> Conversation:
    """The prompt with the examples between its system message and its question."""
    said = prompt.messages
    at = int(said[0]["role"] == "system")
    return prompt._replace(messages=[*said[:at], *(m for turns in examples for m in turns), *said[at:]])


def _kind(reply: str) -> str:
    """The intent of a JSON reply, so that examples differ; any other reply is its own kind."""
    try:
        value = json.loads(reply)
    except ValueError:
        return reply
    return str(value.get("intent", reply)) if isinstance(value, dict) else reply


def _ask(
    name: str, speaker: Speaker, prompts: list[Conversation], references: list[str], asked: Evaluate, *, bare: bool
) -> Arm:
    began = time.perf_counter()
    answers: list[Answer] = speaker.answer(prompts, max_new_tokens=asked.max_new_tokens, bare=bare)
    texts = [answer.text for answer in answers]
    stopped = sum(answer.stopped for answer in answers) / len(answers)
    return Arm(name, score(texts, references), texts, stopped, time.perf_counter() - began)


def _save(run: Run, result: Evaluation) -> None:
    run.write("evaluation.json", result.document())
    lines = [
        json.dumps(
            {"question": q, "reference": r, **{arm.name: arm.answers[n] for arm in result.arms}}, ensure_ascii=False
        )
        for n, (q, r) in enumerate(zip(result.questions, result.references, strict=True))
    ]
    replace_text(run.folder / "answers.jsonl", "\n".join(lines) + "\n")
