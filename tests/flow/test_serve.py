"""The endpoint answers what the run answers, and the chat streams it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from finetune.errors import InputError
from finetune.formats import Conversation
from finetune.generate import load_speaker
from finetune.run import Run
from finetune.serve import server_command
from finetune.train import train
from tests.flow.conftest import recipe

QUESTIONS = ["Say 3", "Say 11", "Say 20"]


@pytest.fixture(scope="module")
def run(base: Path, rows: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return train(recipe(base, rows, train="steps: 4"), output=tmp_path_factory.mktemp("served") / "run")


@pytest.fixture(scope="module")
def answers(run: Run) -> list[str]:
    asked = [Conversation([{"role": "user", "content": q}]) for q in QUESTIONS]
    return [a.text for a in load_speaker(run.folder).answer(asked, max_new_tokens=8)]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def endpoint(run: Run) -> Iterator[str]:
    """`finetune serve RUN` in a process group of its own; merges first."""
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-m", "finetune", "serve", str(run.folder), "--port", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    url = f"http://127.0.0.1:{port}"
    try:
        end = time.monotonic() + 180
        while not healthy(url):
            assert process.poll() is None, "the server ended by itself"
            assert time.monotonic() < end, "the server did not get ready"
            time.sleep(0.3)
        yield url
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(20)


def healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=2) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def test_the_openai_client_gets_the_runs_answers(endpoint: str, run: Run, answers: list[str]) -> None:
    from openai import OpenAI

    client = OpenAI(base_url=f"{endpoint}/v1", api_key="none", timeout=60)
    model = str(run.folder / "merged")
    for question, expected in zip(QUESTIONS, answers, strict=True):
        asked = [{"role": "user", "content": question}]
        whole = client.chat.completions.create(model=model, messages=asked, max_tokens=8, temperature=0)  # type: ignore[arg-type]
        assert whole.choices[0].message.content == expected
        pieces = client.chat.completions.create(model=model, messages=asked, max_tokens=8, temperature=0, stream=True)  # type: ignore[call-overload]
        assert "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices) == expected


def test_the_chat_streams_the_same_answers(run: Run, answers: list[str]) -> None:
    asked = "\n/new\n".join(QUESTIONS)
    done = subprocess.run(
        [sys.executable, "-m", "finetune", "chat", str(run.folder), "--max-new-tokens", "8"],
        input=asked, capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert done.stdout == "".join(answer + "\n" for answer in answers)


def test_a_taken_port_is_refused(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(InputError, match="cannot be listened on"):
            server_command(tmp_path, "127.0.0.1", taken.getsockname()[1])


def test_the_merged_folder_stops_by_itself(run: Run) -> None:
    """Generation with nothing but the saved files ends at the turn's end token."""
    from finetune.merge import merge

    saved = json.loads((merge(run).folder / "generation_config.json").read_text())
    ids = saved["eos_token_id"]
    ids = ids if isinstance(ids, list) else [ids]
    tokenizer = load_speaker(run.folder).tokenizer
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") in ids
