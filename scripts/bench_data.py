"""Prepare the same chat rows with this toolkit and with TRL; write docs/benchmarks/data.md and data.json.

    python scripts/bench_data.py                      20,000 rows a process, 4 interleaved pairs; about 3 minutes
    python scripts/bench_data.py --million            one million rows with this toolkit, for its memory

Each process reads one JSONL file and leaves finished rows on disk: this toolkit by `data.prepare` (every row judged,
its reply proved by decoding), TRL by `load_dataset` and `SFTTrainer._prepare_dataset`, in the two ways in which it
knows the reply: rows of prompt and completion, and messages with a template marked for generation. Imports and the
tokenizer are not counted; processor time is that of a process and all its children, whatever else the machine does.

The gate: the token ids of all three ways must be the same. TRL also trains the newline behind the end of a reply, so
labels are compared without it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

OUT = Path(__file__).parents[1] / "docs" / "benchmarks"
ARMS = ("finetune", "trl, prompt and completion", "trl, marked template")
MARKED = (  # SmolLM2's template with marks around what is trained, written for TRL
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n"
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}"
    "{% if message['role'] == 'assistant' %}{{ '<|im_start|>assistant\n' }}{% generation %}{{ message['content'] + "
    "'<|im_end|>' }}{% endgeneration %}{{ '\n' }}{% else %}{{'<|im_start|>' + message['role'] + '\n' + "
    "message['content'] + '<|im_end|>' + '\n'}}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
WORDS = (
    "the of and to in is that for it as was with be by on not he his but at are this have from or had an they "
    "which one you were all her she there would their we him been has when who will no more if out so up said "
    "what its about than into them can only other time new some could these two may first then do any like my "
    "now over such our man most made after also did many fine tuning language model weather kitchen lamp "
    "number reply question answer "
).split()


def write_rows(path: Path, count: int, layout: str, seed: int = 5) -> None:
    """Chat rows of about 200 tokens, no two alike: a question and a reply."""
    dice = random.Random(seed)
    with path.open("w", encoding="utf-8") as file:
        for number in range(count):
            asked = f"{number}: " + " ".join(dice.choices(WORDS, k=dice.randint(60, 110)))
            said = " ".join(dice.choices(WORDS, k=dice.randint(40, 90))) + "."
            user, reply = {"role": "user", "content": asked}, {"role": "assistant", "content": said}
            row = {"messages": [user, reply]} if layout == "messages" else {"prompt": [user], "completion": [reply]}
            file.write(json.dumps(row) + "\n")


# ----------------------------------------------------------------------------------------------------- one process


def processor_seconds() -> float:
    """Of this process and its children that have ended."""
    kinds = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return sum(use.ru_utime + use.ru_stime for use in map(resource.getrusage, kinds))


class Peak(threading.Thread):
    """The most memory that this process and its children held together (proportional set size), sampled."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.bytes, self._done = 0, threading.Event()

    def run(self) -> None:
        import psutil

        me = psutil.Process()
        while not self._done.wait(0.2):
            total = 0
            for process in [me, *me.children(recursive=True)]:
                try:
                    total += process.memory_full_info().pss
                except psutil.Error:
                    continue
            self.bytes = max(self.bytes, total)

    def stop(self) -> int:
        self._done.set()
        return self.bytes


def run_arm(arm: str, rows: Path, cache: Path) -> dict[str, Any]:
    """Prepare a file and say what it took."""
    os.environ.update(FINETUNE_CACHE=str(cache), HF_HOME=str(cache / "hf"), HF_DATASETS_DISABLE_PROGRESS_BARS="1")
    from finetune.model import load_tokenizer
    from finetune.recipe import Recipe

    recipe = Recipe.model_validate(
        {"model": "smollm2-135m", "method": {"kind": "lora"}, "data": {"train": str(rows), "max_length": 512}}
    )
    os.environ.pop("FINETUNE_CACHE")  # the unpacked model is found where it always lies
    tokenizer = load_tokenizer(recipe)
    os.environ["FINETUNE_CACHE"] = str(cache)
    prepare = _ours if arm == ARMS[0] else _trl(arm)
    prepare(recipe, tokenizer, None)  # warm: imports, compiled template, first touch
    peak = Peak()
    peak.start()
    began, used = time.perf_counter(), processor_seconds()
    made = prepare(recipe, tokenizer, rows)
    wall, used = time.perf_counter() - began, processor_seconds() - used
    return {"arm": arm, "cpu_s": used, "wall_s": wall, "peak_bytes": peak.stop(), **made()}


def _ours(recipe: Any, tokenizer: Any, rows: Path | None) -> Any:
    from finetune.data import prepare

    if rows is None:
        return None
    train = prepare(recipe, tokenizer).train

    def made() -> dict[str, Any]:
        first = [train[n] for n in range(min(2000, len(train)))]
        return {"rows": len(train), "tokens": train.tokens, "first": [[r.input_ids, r.labels] for r in first]}

    return made


def _trl(arm: str) -> Any:
    """`SFTTrainer._prepare_dataset` without a model: it reads only the arguments and the tokenizer."""
    import datasets
    from trl import SFTConfig, SFTTrainer

    marked = arm == ARMS[2]

    def prepare(recipe: Any, tokenizer: Any, rows: Path | None) -> Any:
        if rows is None:
            return None
        config = SFTConfig(
            output_dir=tempfile.mkdtemp(), max_length=512, assistant_only_loss=marked, use_cpu=True, report_to="none"
        )
        trainer = SFTTrainer.__new__(SFTTrainer)
        trainer.args, trainer._is_vlm, trainer._tokenizer = config, False, tokenizer
        trainer.completion_only_loss, trainer.chat_template = not marked, None
        trainer.template_kwargs = {}
        if marked:
            tokenizer.chat_template = MARKED
        data = datasets.load_dataset("json", data_files=str(rows), split="train")
        done = trainer._prepare_dataset(data, tokenizer, config, False, None, "train")

        def made() -> dict[str, Any]:
            first = done.select(range(min(2000, len(done))))
            tokens = sum(len(ids) for ids in done["input_ids"])
            pairs = [[r["input_ids"], r["labels"]] for r in first]
            return {"rows": len(done), "tokens": tokens, "first": pairs}

        return made

    return prepare


# ------------------------------------------------------------------------------------------------------- the whole


def _process(arm: str, rows: Path) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="bench-data-") as cache:
        command = [sys.executable, __file__, "--arm", arm, "--file", str(rows), "--cache", cache]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found


def _gate(found: dict[str, dict[str, Any]]) -> None:
    """All arms made the same tokens and train the same ones, but for TRL's newline after the end."""
    ours = found[ARMS[0]]
    for arm in ARMS[1:]:
        other = found[arm]
        assert (ours["rows"], ours["tokens"]) == (other["rows"], other["tokens"]), arm
        for (ids, labels), (theirs, their_labels) in zip(ours["first"], other["first"], strict=True):
            assert ids == theirs, arm
            assert labels[:-1] == their_labels[:-1], arm


def compare(count: int, pairs: int) -> dict[str, Any]:
    """The arms by turns, forwards and backwards."""
    runs: dict[str, list[dict[str, Any]]] = {arm: [] for arm in ARMS}
    with tempfile.TemporaryDirectory(prefix="bench-rows-") as folder:
        files = {layout: Path(folder) / f"{layout}.jsonl" for layout in ("messages", "pairs")}
        for layout, file in files.items():
            write_rows(file, count, layout)
        for number in range(pairs):
            for arm in ARMS if number % 2 == 0 else ARMS[::-1]:
                found = _process(arm, files["pairs" if arm == ARMS[1] else "messages"])
                runs[arm].append(found)
                print(f"{arm}: {found['cpu_s']:.1f} s of processor time, {found['wall_s']:.1f} s", file=sys.stderr)
            _gate({arm: runs[arm][-1] for arm in ARMS})
    rows: dict[str, Any] = {}
    for arm in ARMS:
        ratios = [theirs["cpu_s"] / ours["cpu_s"] for ours, theirs in zip(runs[ARMS[0]], runs[arm], strict=True)]
        rows[arm] = {
            "rows_per_cpu_s": round(statistics.median(found["rows"] / found["cpu_s"] for found in runs[arm])),
            "peak_mb": round(max(found["peak_bytes"] for found in runs[arm]) / 1e6),
            "times_ours": round(statistics.median(ratios), 2),
        }
    return {"rows": count, "pairs": pairs, "tokens": runs[ARMS[0]][0]["tokens"], "arms": rows}


def million(count: int) -> dict[str, Any]:
    """A million rows with this toolkit: memory of all its processes together."""
    with tempfile.TemporaryDirectory(prefix="bench-rows-") as folder:
        file = Path(folder) / "rows.jsonl"
        write_rows(file, count, "messages")
        size = file.stat().st_size
        found = _process(ARMS[0], file)
    return {
        "rows": found["rows"], "tokens": found["tokens"], "file_mb": round(size / 1e6),
        "peak_mb": round(found["peak_bytes"] / 1e6), "cpu_s": round(found["cpu_s"]), "wall_s": round(found["wall_s"]),
    }  # fmt: skip


def document(results: dict[str, Any]) -> str:
    """The table of docs/benchmarks/data.md."""
    lines = [
        "# Preparing rows", "",
        "From a JSONL file to finished rows on disk, in processor seconds of all processes (imports not counted). "
        "Chat rows of one question and one reply, SmolLM2's tokenizer; the token ids of all three are the same, and "
        "checked. This toolkit also judges every row and proves every reply by decoding it.", "",
    ]  # fmt: skip
    if found := results.get("compare"):
        mean = found["tokens"] / found["rows"]
        lines += [
            f"{found['rows']:,} rows of {mean:.0f} tokens on average, medians of {found['pairs']} interleaved runs.",
            "", "| | rows per processor second | processor time, ours = 1 | peak memory, MB |",
            "| --- | ---: | ---: | ---: |",
        ]  # fmt: skip
        for arm, row in found["arms"].items():
            lines.append(f"| {arm} | {row['rows_per_cpu_s']:,} | {row['times_ours']:.2f} | {row['peak_mb']:,} |")
    if found := results.get("million"):
        lines += [
            "", f"{found['rows']:,} rows ({found['tokens']:,} tokens, a file of {found['file_mb']:,} MB) with this "
            f"toolkit: peak memory of all processes together {found['peak_mb']:,} MB, {found['cpu_s']} s of "
            f"processor time, {found['wall_s']} s.",
        ]  # fmt: skip
    lines += ["", f"Made by `make bench` ({results['machine']}; {results['versions']}; {results['date']}).", ""]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=20_000, help="rows a process in the comparison")
    parser.add_argument("--pairs", type=int, default=4)
    parser.add_argument(
        "--million", nargs="?", type=int, const=1_000_000, help="rows for the memory, and nothing else"
    )
    parser.add_argument("--arm", help=argparse.SUPPRESS)
    parser.add_argument("--file", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--cache", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.arm:
        print(json.dumps(run_arm(asked.arm, asked.file, asked.cache)))
        return
    kept = OUT / "data.json"
    results = json.loads(kept.read_text()) if kept.is_file() else {}
    if asked.million:
        results["million"] = million(asked.million)
    else:
        results["compare"] = compare(asked.rows, asked.pairs)
    names = ("finetune", "tokenizers", "transformers", "trl", "datasets", "pyarrow")
    results["versions"] = ", ".join(f"{name} {version(name)}" for name in names)
    results["machine"] = f"{os.cpu_count()} cores, {platform.machine()}"
    results["date"] = str(date.today())
    kept.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    (OUT / "data.md").write_text(document(results), encoding="utf-8")
    print(document(results))


if __name__ == "__main__":
    main()
