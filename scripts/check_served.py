"""Ask a trained run the same held-out questions in every way it can be served, and compare the answers.

    python scripts/check_served.py RUN [--rows 50] [--out FILE]

base + adapter      by transformers and peft: what the others are measured by
merged              the merged folder, by transformers
endpoint            `finetune serve RUN/merged`, asked by the openai client, whole and streamed
llama.cpp           a GGUF file of it behind `finetune serve FILE.gguf`, where llama-cpp-python is installed

All in float32 on a CPU (the GGUF file in f16), greedy. Ends with 1 when the first three do not agree everywhere.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from finetune.data import read_conversations
from finetune.export import export
from finetune.formats import Conversation
from finetune.generate import load_speaker
from finetune.merge import merge
from finetune.run import Run, open_run
from finetune.scores import score


def questions(run: Run, rows: int) -> tuple[list[Conversation], list[str], int]:
    """The first held-out conversations up to their reply, those replies, and the longest answer in tokens."""
    recipe = run.recipe()
    assert recipe.evaluate is not None, "the run has no held-out rows"
    talks = read_conversations(recipe.evaluate.data, recipe.data)[:rows]
    prompts = [Conversation(talk.messages[:-1], talk.tools) for talk in talks]
    return prompts, [talk.messages[-1]["content"] for talk in talks], recipe.evaluate.max_new_tokens


@contextmanager
def serving(name: str) -> Iterator[str]:
    """`finetune serve NAME` until it is healthy; gives its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    process = subprocess.Popen(
        [sys.executable, "-m", "finetune", "serve", name, "--port", str(port)], start_new_session=True
    )
    url = f"http://127.0.0.1:{port}"
    try:
        while not healthy(url):
            assert process.poll() is None, "the server ended by itself"
            time.sleep(0.5)
        yield url
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(30)


def healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def ask(url: str, prompts: list[Conversation], longest: int, *, stream: bool) -> list[str]:
    """All answers by the openai client."""
    from openai import OpenAI

    client = OpenAI(base_url=f"{url}/v1", api_key="none", timeout=600)
    model = next(iter(client.models.list())).id
    answers = []
    for prompt in prompts:
        said: Any = prompt.messages
        reply: Any = client.chat.completions.create(
            model=model, messages=said, max_tokens=longest, temperature=0, stream=stream
        )
        if stream:
            answers.append("".join(piece.choices[0].delta.content or "" for piece in reply if piece.choices))
        else:
            answers.append(reply.choices[0].message.content)
    return answers


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run")
    parser.add_argument("--rows", type=int, default=50)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    run = open_run(arguments.run)
    prompts, references, longest = questions(run, arguments.rows)
    arms: dict[str, list[str]] = {}
    seconds: dict[str, float] = {}

    def arm(name: str, answers: Any) -> None:
        began = time.perf_counter()
        arms[name] = answers()
        seconds[name] = time.perf_counter() - began
        same = sum(a == b for a, b in zip(arms[name], arms["base + adapter"], strict=True))
        exact = score(arms[name], references).exact_match
        print(f"{name:20} {same} of {len(prompts)} the same, {exact:.0%} exact, {seconds[name]:.1f} s", flush=True)

    def spoken(folder: Path) -> Any:
        return lambda: [a.text for a in load_speaker(folder).answer(prompts, max_new_tokens=longest)]

    merged = merge(run).folder
    arm("base + adapter", spoken(run.adapter))
    arm("merged", spoken(merged))
    with serving(str(merged)) as url:
        arm("endpoint", lambda: ask(url, prompts, longest, stream=False))
        arm("endpoint, streamed", lambda: ask(url, prompts, longest, stream=True))
    if importlib.util.find_spec("llama_cpp"):
        file = run.folder / "gguf" / f"{run.name}-f16.gguf"
        if not file.exists():
            export(run.folder, "gguf")
        with serving(str(file)) as url:
            arm("llama.cpp", lambda: ask(url, prompts, longest, stream=False))
            arm("llama.cpp, streamed", lambda: ask(url, prompts, longest, stream=True))
    else:
        print("llama.cpp            not installed here (pip install 'llama-cpp-python[server]')")
    if arguments.out:
        arguments.out.write_text(json.dumps({"seconds": seconds, "answers": arms}, indent=1, ensure_ascii=False))
    ours = [found for name, found in arms.items() if not name.startswith("llama")]
    return 0 if all(found == ours[0] for found in ours) else 1


if __name__ == "__main__":
    sys.exit(main())
