"""The gate alone, around an application that says what reached it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from finetune.gate import PLAIN, Gate

SEEN: list[dict[str, Any]] = []


async def inner(scope: Any, receive: Any, send: Any) -> None:
    """Answers with the body it was given."""
    message = await receive()
    length = dict(scope["headers"])[b"content-length"]
    SEEN.append({"path": scope["path"], "body": json.loads(message["body"]), "length": int(length)})
    assert int(length) == len(message["body"])
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": message["body"]})


def ask(
    gate: Gate, path: str, body: bytes | None = None, method: str = "POST", parts: int = 1, **headers: str
) -> tuple[int, Any]:
    """One request as a server hands it over, the body in `parts` pieces."""
    SEEN.clear()
    sent = [] if body is None else [body[n * len(body) // parts : (n + 1) * len(body) // parts] for n in range(parts)]
    messages = [{"type": "http.request", "body": piece, "more_body": n < parts} for n, piece in enumerate(sent, 1)]
    named = {"content_type": "application/json", **headers}
    scope = {
        "type": "http", "method": method, "path": path,
        "headers": [(key.replace("_", "-").encode(), value.encode()) for key, value in named.items()],
    }  # fmt: skip
    replies: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return messages.pop(0) if messages else {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        replies.append(message)

    asyncio.run(gate(scope, receive, send))
    return replies[0]["status"], json.loads(b"".join(reply.get("body", b"") for reply in replies))


CHAT = "/v1/chat/completions"
SAID = [{"role": "user", "content": "ä"}]
BODY = json.dumps({"model": "b", "messages": SAID, "prompt": "ä"}, ensure_ascii=False).encode()


def body(**fields: Any) -> bytes:
    return json.dumps({"messages": SAID, **fields}).encode()


@pytest.mark.parametrize("parts", [1, 3])
def test_what_is_asked_reaches_the_server(parts: int) -> None:
    status, answer = ask(Gate(inner, ["a", "b"]), CHAT, BODY, parts=parts)
    assert (status, answer) == (200, json.loads(BODY))
    assert SEEN[0]["path"] == CHAT


def test_without_a_name_the_first_model_is_meant() -> None:
    status, _ = ask(Gate(inner, ["a", "b"]), CHAT, body())
    assert status == 200
    assert SEEN[0]["body"]["model"] == "a"


@pytest.mark.parametrize(
    ("header", "status"),
    [
        ({}, 401),
        ({"authorization": "Bearer wrong"}, 401),
        ({"authorization": "sesame"}, 401),
        ({"authorization": "Bearer sesame2"}, 401),
        ({"authorization": "Bearer sesame"}, 200),
    ],
)
@pytest.mark.parametrize(("method", "path"), [("POST", CHAT), ("POST", "/v1/completions"), ("GET", "/v1/models")])
def test_the_key_opens_and_nothing_else_does(header: dict[str, str], status: int, method: str, path: str) -> None:
    gate = Gate(inner, ["a", "b"], key="sesame")
    found, answer = ask(gate, path, BODY, method, **header)
    assert found == status
    assert (status == 401) == (answer.get("error", {}).get("code") == "invalid_api_key")
    assert bool(SEEN) == (status == 200 and method == "POST")


def test_health_needs_no_key_and_waits_for_the_check() -> None:
    gate = Gate(inner, ["a"], key="sesame")
    assert ask(gate, "/health", method="GET")[0] == 503
    gate.ready = True
    assert ask(gate, "/health", method="GET") == (200, {"status": "ok", "models": ["a"]})


@pytest.mark.parametrize(
    ("path", "body", "headers", "status"),
    [
        ("/load_model", b'{"model": "x/y"}', {}, 404),
        ("/reset", b"{}", {}, 404),
        ("/v1/chat/completions/../../reset", b"{}", {}, 404),
        (CHAT, b'{"model": "c"}', {}, 404),
        (CHAT, b"{", {}, 400),
        (CHAT, b"[1]", {}, 400),
        (CHAT, BODY, {"content_type": "text/plain"}, 415),  # what a web page can send without asking
        (CHAT, body(n=2), {}, 400),
        (CHAT, body(response_format={"type": "json_object"}), {}, 400),
        (CHAT, body(presence_penalty=1), {}, 400),
        (CHAT, body(logit_bias={"30": -100}), {}, 400),
        (CHAT, body(max_tokens=-1), {}, 400),
        (CHAT, body(max_completion_tokens="many"), {}, 400),
        (CHAT, body(temperature="hot"), {}, 400),
        (CHAT, body(top_p=True), {}, 400),
        (CHAT, b"{}", {}, 400),
        (CHAT, b'{"messages": []}', {}, 400),
        (CHAT, b'{"messages": "hello"}', {}, 400),
        (CHAT, b'{"messages": ["hello"]}', {}, 400),
        ("/v1/completions", b"{}", {}, 400),
        ("/v1/completions", b'{"prompt": 5}', {}, 400),
        (CHAT, BODY, {"host": "evil.example"}, 403),  # a name that somebody made lead here
        (CHAT, BODY, {"host": "127.0.0.1.evil.example:8000"}, 403),
        (CHAT, b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', {}, 400),
    ],
)
def test_what_is_not_passed_on(path: str, body: bytes, headers: dict[str, str], status: int) -> None:
    found, answer = ask(Gate(inner, ["a", "b"], plain=PLAIN), path, body, **headers)
    assert found == status
    assert answer["error"]["message"]
    assert SEEN == []


def test_defaults_are_put_in_and_give_way() -> None:
    gate = Gate(inner, ["a"], defaults={"repeat_penalty": 1.0})
    ask(gate, CHAT, body())
    assert SEEN[0]["body"] == {"messages": SAID, "model": "a", "repeat_penalty": 1.0}
    ask(gate, CHAT, body(repeat_penalty=1.2))
    assert SEEN[0]["body"]["repeat_penalty"] == 1.2


def test_fields_that_change_nothing_are_passed_on() -> None:
    same = body(n=1, logprobs=False, response_format={"type": "text"}, temperature=0, presence_penalty=0.0)
    assert ask(Gate(inner, ["a"], plain=PLAIN), CHAT, same)[0] == 200


@pytest.mark.parametrize(
    "host", ["127.0.0.1:8000", "localhost", "LOCALHOST:80", "127.0.0.2:80", "[::1]:8000", "[::1]"]
)
def test_its_own_names_open_a_gate_without_a_key(host: str) -> None:
    assert ask(Gate(inner, ["a", "b"]), CHAT, BODY, host=host)[0] == 200


def test_with_a_key_it_has_any_name() -> None:
    gate = Gate(inner, ["a", "b"], key="sesame")
    assert ask(gate, CHAT, BODY, host="models.example", authorization="Bearer sesame")[0] == 200


@pytest.mark.parametrize(
    "body", [b'{"detail": "no such thing"}', b"no such thing", b'{"error": {"message": "no such thing"}}']
)
def test_the_servers_own_errors_are_in_the_clients_form(body: bytes) -> None:
    async def failing(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 422, "headers": [(b"content-length", b"3")]})
        await send({"type": "http.response.body", "body": body[:5], "more_body": True})
        await send({"type": "http.response.body", "body": body[5:]})

    status, answer = ask(Gate(failing, ["a", "b"]), CHAT, BODY)
    assert (status, answer["error"]["message"]) == (422, "no such thing")


def test_models_take_turns() -> None:
    """While one answer is on its way, no other model is chosen."""
    order: list[str] = []

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        name = json.loads((await receive())["body"])["model"]
        order.append(f"{name} begins")
        await asyncio.sleep(0.01)
        order.append(f"{name} ends")

    gate = Gate(slow, ["a", "b"], choose=lambda name: order.append(f"{name} chosen"))

    async def one(name: str) -> None:
        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": body(model=name)}

        headers = [(b"content-type", b"application/json")]
        await gate({"type": "http", "method": "POST", "path": CHAT, "headers": headers}, receive, lambda _: None)  # type: ignore[arg-type,return-value]

    async def both() -> None:
        await asyncio.gather(one("a"), one("b"))

    asyncio.run(both())
    assert order == ["a chosen", "a begins", "a ends", "b chosen", "b begins", "b ends"]
