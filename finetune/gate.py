"""What stands in front of a server: who may ask, for which model, and by which routes. No torch.

    GET  /health                 200 once the first answer was checked, 503 before; needs no key
    GET  /v1/models              the names that are served
    POST /v1/chat/completions    passed on, with the model's name checked
    POST /v1/completions         passed on, with the model's name checked
    anything else                404: what else a server can do (load any model, reset) is not for its clients

With a key every route but /health wants `Authorization: Bearer KEY`. Without one the server listens on this machine
alone, and answers only to its names for itself: to a web page in somebody's browser it has another name, whatever
address that leads to. Only JSON is taken, which such a page cannot send without asking first.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import json
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Scope = Mapping[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

ASKING = ("/v1/chat/completions", "/v1/completions")
_LARGEST = 32 << 20  # bytes of a request
# Parts of a request that change what an answer is; a server that does not know them would pass over them in silence.
PLAIN: dict[str, tuple[Any, ...]] = {
    "n": (1,), "logprobs": (False, 0), "top_logprobs": (0,), "response_format": ({"type": "text"},),
    "functions": ([],), "modalities": (["text"],), "logit_bias": ({},),
    "presence_penalty": (0,),
}  # fmt: skip
_NUMBERS = {"max_tokens": 1, "max_completion_tokens": 1, "temperature": 0, "top_p": 0}
"""Fields that hold a number, and the least of it."""


@dataclass(frozen=True)
class Refused(Exception):
    """A request that is not passed on: the status and OpenAI's words for it."""

    status: int
    code: str
    message: str


@dataclass
class Gate:
    """An ASGI application around another one.

    `choose(name)` makes the server below answer as that model; requests then go through one at a time. `plain` says
    which fields of a request are refused, with the values that mean the same as leaving them out; `defaults` are put
    into a request that does not have them.
    """

    app: App
    names: Sequence[str]
    key: str | None = None
    choose: Callable[[str], None] | None = None
    plain: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    ready: bool = False
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, refuse, or pass on."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return
        try:
            await self._answer(scope, receive, send)
        except Refused as error:
            kind = "invalid_request_error"
            await _reply(send, error.status, {"error": {"message": error.message, "type": kind, "code": error.code}})

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        method, path = scope["method"], scope["path"].rstrip("/")
        if (method, path) == ("GET", "/health"):
            state = {"status": "ok" if self.ready else "starting", "models": list(self.names)}
            return await _reply(send, 200 if self.ready else 503, state)
        self._check_key(scope)
        if (method, path) == ("GET", "/v1/models"):
            found = [{"id": name, "object": "model", "created": 0, "owned_by": "finetune"} for name in self.names]
            return await _reply(send, 200, {"object": "list", "data": found})
        if method != "POST" or path not in ASKING:
            raise Refused(404, "not_found", f"There is no {method} {scope['path']} here.")
        body = await _json_body(scope, receive)
        name = self._checked(body, path)
        content = json.dumps({**self.defaults, **body, "model": name}).encode()
        below = {**scope, "path": path, "raw_path": path.encode(), "headers": _with_length(scope, len(content))}
        if self.choose is None:
            return await self.app(below, _again(content, receive), _openai_errors(send))
        async with self._turn:
            self.choose(name)
            await self.app(below, _again(content, receive), _openai_errors(send))

    def _check_key(self, scope: Scope) -> None:
        if self.key is None:
            host = _header(scope, b"host").decode(errors="replace").lower()
            if host and not _is_own(host):
                said = "Without a key this server answers to localhost and its own addresses only."
                raise Refused(403, "wrong_host", said)
            return
        given = _header(scope, b"authorization")
        if not hmac.compare_digest(given, b"Bearer " + self.key.encode()):
            raise Refused(401, "invalid_api_key", "This server wants its API key as `Authorization: Bearer KEY`.")

    def _checked(self, body: Mapping[str, Any], path: str) -> str:
        """The model's name; without one the first is meant."""
        name = body.get("model") or self.names[0]
        if name not in self.names:
            raise Refused(404, "model_not_found", f"There is no model {name} here, only {', '.join(self.names)}.")
        for part, same in self.plain.items():
            if body.get(part) is not None and body[part] not in same:
                raise Refused(400, "unsupported_value", f"'{part}' is not supported by this server.")
        for part, least in _NUMBERS.items():
            value = body.get(part)
            if value is not None and (type(value) not in (int, float) or value < least):
                raise Refused(400, "invalid_value", f"'{part}' is a number of at least {least}.")
        if path != ASKING[0]:
            if not body.get("prompt") or not isinstance(body["prompt"], (str, list)):
                raise Refused(400, "invalid_value", "'prompt' is missing, or is no text.")
            return str(name)
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages or not all(isinstance(each, dict) for each in messages):
            raise Refused(400, "invalid_value", "'messages' is a list of messages, and not empty.")
        for message in messages:
            parts = message.get("content")
            for part in parts if isinstance(parts, list) else ():
                if not isinstance(part, dict) or part.get("type") != "text":
                    raise Refused(400, "unsupported_value", "Only text can be asked here, in content parts as well.")
        return str(name)


def _is_own(host: str) -> bool:
    """Whether a Host header names this machine to itself."""
    name = re.sub(r":[0-9]+$", "", host).strip("[]")
    try:
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _header(scope: Scope, name: bytes) -> bytes:
    return next((bytes(value) for key, value in scope["headers"] if key.lower() == name), b"")


def _with_length(scope: Scope, length: int) -> list[tuple[bytes, bytes]]:
    kept = [pair for pair in scope["headers"] if pair[0].lower() not in (b"content-length", b"transfer-encoding")]
    return [*kept, (b"content-length", str(length).encode())]


async def _json_body(scope: Scope, receive: Receive) -> dict[str, Any]:
    if _header(scope, b"content-type").partition(b";")[0].strip().lower() != b"application/json":
        raise Refused(415, "unsupported_media_type", "Send JSON, with `Content-Type: application/json`.")
    content = b""
    more = True
    while more:
        message = await receive()
        content += message.get("body", b"")
        more = message.get("more_body", False)
        if len(content) > _LARGEST:
            raise Refused(413, "too_large", f"A request may have {_LARGEST} bytes.")
    try:
        body = json.loads(content)
    except ValueError as error:
        raise Refused(400, "invalid_json", f"The request is not JSON: {error}.") from None
    if not isinstance(body, dict):
        raise Refused(400, "invalid_json", "The request is JSON, but no object.")
    return body


def _again(content: bytes, receive: Receive) -> Receive:
    """A `receive` that gives this body first, and then what the client still sends (that it has left)."""
    left = [{"type": "http.request", "body": content, "more_body": False}]

    async def next_message() -> dict[str, Any]:
        return left.pop() if left else await receive()

    return next_message


def _openai_errors(send: Send) -> Send:
    """A `send` that puts the server's own errors ({"detail": ...}) into the form that OpenAI's clients read."""
    failed: list[dict[str, Any]] = []

    async def send_message(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start" and message["status"] >= 400:
            failed.append(message)
        if not failed:
            return await send(message)
        if message["type"] != "http.response.body":
            return
        failed[0]["body"] = failed[0].get("body", b"") + message.get("body", b"")
        if not message.get("more_body", False):
            status, said = failed[0]["status"], _detail(failed[0]["body"])
            if status >= 500:  # a traceback is for the log
                said = (said.strip().splitlines() or ["The server failed."])[-1]
            await _refuse(send, Refused(status, "server_error" if status >= 500 else "invalid_request", said))

    return send_message


def _detail(content: bytes) -> str:
    """The words of an error reply, whatever its form."""
    try:
        value = json.loads(content)
    except ValueError:
        return content.decode(errors="replace")
    for key in ("detail", "error", "message"):
        value = value.get(key, value) if isinstance(value, dict) else value
    return value if isinstance(value, str) else json.dumps(value)


async def _refuse(send: Send, error: Refused) -> None:
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    await _reply(send, error.status, {"error": {"message": error.message, "type": kind, "code": error.code}})


async def _reply(send: Send, status: int, value: Any) -> None:
    content = json.dumps(value).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": content})
