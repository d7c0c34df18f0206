"""Batched answers equal one-by-one answers, whatever the prompts share and however long they are."""

from __future__ import annotations

from typing import Any

import pytest

from finetune.formats import Conversation, Message
from finetune.generate import Speaker, _batches, _shared
from tests.tiny import tiny_model


@pytest.fixture(scope="module", params=["llama", "gemma2"])
def speaker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Speaker:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tiny_model(
        tmp_path_factory.mktemp("m") / request.param, arch=request.param, tied=False, initializer_range=0.3
    )
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    return Speaker(model, AutoTokenizer.from_pretrained(folder))


def asked(*questions: str, system: str = "") -> list[Conversation]:
    head: list[Message] = [{"role": "system", "content": system}] if system else []
    return [Conversation([*head, {"role": "user", "content": question}]) for question in questions]


QUESTIONS = ("Hi", "Hello there, how are you?", "a" * 70, "12", "Hello there, who are you?")


@pytest.mark.parametrize("system", ["", "Answer in one word, and never the same word twice."])
def test_a_batch_gives_the_same_answers_as_one_by_one(speaker: Speaker, system: str) -> None:
    together = speaker.answer(asked(*QUESTIONS, system=system), max_new_tokens=12)
    alone = [speaker.answer(asked(q, system=system), max_new_tokens=12)[0] for q in QUESTIONS]
    assert together == alone
    assert len({answer.text for answer in together}) > 1  # the model does look at the question


def test_equal_questions_work(speaker: Speaker) -> None:
    first, second = speaker.answer(asked("Hi", "Hi"), max_new_tokens=5)
    assert first == second


def test_streaming_gives_the_same_text(speaker: Speaker) -> None:
    question = asked("Hello there")[0]
    assert (
        "".join(speaker.stream(question.messages, max_new_tokens=9))
        == speaker.answer([question], max_new_tokens=9)[0].text
    )


def test_an_end_token_stops_the_answer(speaker: Speaker, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from finetune import chat

    prompt = torch.tensor([chat.prompt_ids(speaker.tokenizer, asked("Hi")[0].messages)])
    ids = speaker.model.generate(prompt, max_new_tokens=8, do_sample=False)[0, prompt.shape[1] :].tolist()
    monkeypatch.setattr(chat, "end_of_turn_ids", lambda tokenizer: [ids[2]])
    ended = speaker.answer(asked("Hi"), max_new_tokens=8)[0]
    assert (ended.stopped, ended.tokens) == (True, ids.index(ids[2]))


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        ([[1] * 20, [1] * 20], 19),  # equal prompts keep one token each
        ([[1] * 10 + [2], [1] * 10 + [3, 4]], 10),
        ([[1] * 10, [1] * 10 + [3]], 9),  # one is the beginning of the other
        ([[1, 2, 3], [1, 2, 4]], 0),  # too little to pay
        ([[1] * 20], 0),
    ],
)
def test_shared_beginnings(prompts: list[list[int]], expected: int) -> None:
    assert _shared(prompts) == expected


def test_batches_keep_order_and_stay_within_the_tokens() -> None:
    lengths = [3, 5, 8, 8, 20, 50]
    batches: list[Any] = list(_batches(list(range(6)), lengths, 24))
    assert batches == [[0, 1, 2], [3], [4], [5]]  # 3 x 8 = 24; a row that is too long alone still gets its turn
