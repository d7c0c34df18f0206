"""One recorded answer of a run, asked again of an endpoint: does what is served answer as what was trained?"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from finetune.data import read_conversations
from finetune.errors import DataError, FinetuneError
from finetune.formats import Conversation
from finetune.run import Run


@dataclass(frozen=True)
class Place:
    """Where the endpoint listens, and the key that its clients must send."""

    host: str
    port: int
    key: str | None = None

    @property
    def url(self) -> str:
        """The endpoint as a process of this machine reaches it."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}"


@dataclass(frozen=True)
class Sample:
    """A held-out question and how it was answered after training; `untrained` is the base's answer."""

    conversation: Conversation
    answer: str
    untrained: str | None
    max_new_tokens: int


def recorded(run: Run) -> Sample | None:
    """The first held-out question of a run and its answers, or None when there are none or the rows have changed."""
    asked, answers = run.recipe().evaluate, run.folder / "answers.jsonl"
    if asked is None or not answers.is_file():
        return None
    try:
        first = json.loads(answers.read_text(encoding="utf-8").partition("\n")[0])
        talks = read_conversations(asked.data, run.recipe().data)
    except (ValueError, DataError):
        return None
    found = next((talk for talk in talks if talk.messages[-1]["role"] == "assistant"), None)
    if found is None or found.messages[-2]["content"] != first.get("question") or "tuned" not in first:
        return None
    prompt = Conversation(found.messages[:-1], found.tools)
    return Sample(prompt, first["tuned"], first.get("untrained, zero-shot"), asked.max_new_tokens)


def compare(name: str, run: Run | None, place: Place) -> list[str]:
    """Ask the endpoint the recorded question of a run, and say whether the answer is the recorded one.

    Raises `FinetuneError` when it is the untrained model's instead, or when there is no answer at all.
    """
    sample = recorded(run) if run is not None else None
    if sample is None:
        return [f"{name}: no recorded answer to compare with (`finetune eval` records some)."]
    answer = ask(place, name, sample)
    if answer == sample.answer:
        return [f"{name}: the first held-out question is answered as after training."]
    if answer == sample.untrained:
        raise FinetuneError(
            f"{name} answers a held-out question as the untrained model does: {answer[:200]!r}.",
            "The trained weights are not in what was served; merge or export the run again.",
        )
    return [
        f"{name}: a held-out question is not answered as after training, which rounding alone can cause:",
        f"  recorded {sample.answer[:200]!r}",
        f"  served   {answer[:200]!r}",
    ]


def ask(place: Place, name: str, sample: Sample) -> str:
    """One greedy answer of the endpoint. Raises `FinetuneError` with the server's words when it gives none."""
    body: dict[str, Any] = {
        "model": name,
        "messages": [_as_openai(message) for message in sample.conversation.messages],
        "temperature": 0,
        "max_tokens": sample.max_new_tokens,
    }
    if sample.conversation.tools:
        body["tools"] = sample.conversation.tools
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {place.key}"} if place.key else {})
    request = urllib.request.Request(f"{place.url}/v1/chat/completions", json.dumps(body).encode(), headers)
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=600) as reply:
            return str(json.loads(reply.read())["choices"][0]["message"]["content"] or "")
    except urllib.error.HTTPError as error:
        said = error.read().decode(errors="replace")[:300]
    except OSError as error:
        said = str(error)
    raise FinetuneError(f"The endpoint gave no answer to its first question ({said}).", "See the messages above.")


def _as_openai(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as clients write it: the arguments of calls are text there."""
    sent = {key: value for key, value in message.items() if key != "train"}
    if calls := sent.get("tool_calls"):
        sent["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
            for call in calls
        ]
    return sent
