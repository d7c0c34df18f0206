"""A hub on 127.0.0.1 with the few addresses that fetching a model asks for; what was asked is remembered.

GET   /api/models/{id}/revision/{revision}      the commit
GET   /api/models/{id}/tree/{commit}            the files
HEAD  /{id}/resolve/{revision}/{file}           size, checksum, commit
GET   /{id}/resolve/{commit}/{file}             its bytes, or a range of them
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Lock, Thread

COMMIT = "0123456789abcdef" * 2 + "01234567"


class FakeHub:
    """One repository `org/model` with the files of a folder. `hold` names files that wait for `go`, `broken` 500s."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.asked: list[tuple[str, str, str]] = []
        self.hold: set[str] = set()
        self.broken: set[str] = set()
        self.go = Event()
        self.lock = Lock()
        self.url = ""

    def environment(self, home: Path) -> dict[str, str]:
        """What a child needs to meet this hub and nothing else."""
        return {
            "HF_ENDPOINT": self.url, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1", "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1",
        }  # fmt: skip

    def whole(self) -> list[str]:
        """The weight files that were sent whole, in order."""
        return [
            name for kind, name, part in self.asked if kind == "GET" and name.endswith("safetensors") and not part
        ]


@contextmanager
def fake_hub(folder: Path) -> Iterator[FakeHub]:
    """Serve a model folder until the block ends."""
    hub = FakeHub(folder)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.go.set()
        server.shutdown()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments: object) -> None:
        """Quiet."""

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, *, body: bool) -> None:
        hub, path = self.hub, self.path.partition("?")[0]
        files = {file.name: file for file in hub.folder.iterdir()}
        if re.fullmatch(r"/api/models/org/model(/revision/[^/]+)?", path):
            return self.send({"id": "org/model", "sha": COMMIT, "siblings": [{"rfilename": name} for name in files]})
        if path.startswith("/api/models/org/model/tree/"):
            return self.send([
                {"type": "file", "path": name, "size": file.stat().st_size, "oid": _sha(file)[:40]}
                for name, file in files.items()
            ])  # fmt: skip
        found = re.fullmatch(r"/org/model/resolve/[^/]+/([^/]+)", path)
        name, part = found[1] if found else "", self.headers.get("Range") or ""
        with hub.lock:
            hub.asked.append((self.command, name or path, part))
        if name not in files:
            return self.empty(404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
        whole = body and not part
        if name in hub.broken and whole:
            return self.empty(500, {})
        if name in hub.hold and whole:
            hub.go.wait(60)
        content = files[name].read_bytes()
        headers = {"ETag": f'"{_sha(files[name])}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        status = 200
        if part:
            begin, end = (int(number) for number in re.findall(r"\d+", part))
            status, total = 206, len(content)
            content = content[begin : end + 1]
            headers["Content-Range"] = f"bytes {begin}-{begin + len(content) - 1}/{total}"
        self.begin(status, len(content), headers)
        if body:
            self.wfile.write(content)
        return None

    def send(self, value: object) -> None:
        text = json.dumps(value).encode()
        self.begin(200, len(text), {"Content-Type": "application/json"})
        self.wfile.write(text)

    def empty(self, status: int, headers: dict[str, str]) -> None:
        self.begin(status, 0, headers)

    def begin(self, status: int, size: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(size)}.items():
            self.send_header(key, value)
        self.end_headers()


def _sha(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
