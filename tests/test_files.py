"""Names -> sources -> chunks: what is found, what is read, and where each row stands."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from finetune import hub_rows
from finetune.errors import DataError
from finetune.files import Source, chunks, find
from finetune.formats import BadRow


def rows(sources: list[Source], limit: int | None) -> Iterator[tuple[str, Any]]:
    """All rows with their places in words."""
    for chunk in chunks(sources, limit):
        for line, row in chunk.rows():
            yield sources[chunk.source].where(line), row


def jsonl(path: Path, *found: Any) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in found), encoding="utf-8")
    return str(path)


def pairs(*texts: str) -> list[dict[str, Any]]:
    return [{"prompt": text, "completion": "007"} for text in texts]


# ---------------------------------------------------------------------------------------------------------- chunks


def mixed(folder: Path) -> list[Source]:
    """Twelve rows of five kinds of files, two of them bad, and the same places whatever the chunks are."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    jsonl(folder / "a.jsonl", *pairs("a1", "a2"))
    (folder / "b.json").write_text(json.dumps([*pairs("b1"), 5, *pairs("b2")], indent=1), encoding="utf-8")
    (folder / "c.csv").write_text("prompt,completion\nc1,007\n\nc2,007\n", encoding="utf-8")
    (folder / "d.jsonl.gz").write_bytes(gzip.compress(b'\n{"prompt": "d1", "completion": "007"}\nx\n'))
    pq.write_table(pa.Table.from_pylist(pairs("e1", "e2", "e3")), folder / "e.parquet")
    return find([str(folder / name) for name in ("a.jsonl", "b.json", "c.csv", "d.jsonl.gz", "e.parquet")])


PLACES = [
    "a.jsonl:1", "a.jsonl:2", "b.json:2", "b.json:6", "b.json:7", "c.csv:2", "c.csv:4", "d.jsonl.gz:2",
    "d.jsonl.gz:3", "e.parquet:row 1", "e.parquet:row 2", "e.parquet:row 3",
]  # fmt: skip


@pytest.mark.parametrize("size", [1, 30, 1 << 20])
@pytest.mark.parametrize("limit", [None, 0, 1, 3, 4, 9, 12, 99])
def test_rows_and_places_do_not_hang_on_the_chunks(tmp_path: Path, size: int, limit: int | None) -> None:
    sources = mixed(tmp_path)
    found = [
        (sources[chunk.source].where(line), row)
        for chunk in chunks(sources, limit, size)
        for line, row in pickle.loads(pickle.dumps(chunk)).rows()
    ]
    assert [Path(where).name for where, _ in found] == PLACES[:limit]
    texts = [None if isinstance(row, BadRow) else row["prompt"] for _, row in found]
    assert texts == ["a1", "a2", "b1", None, "b2", "c1", "c2", "d1", None, "e1", "e2", "e3"][:limit]
    assert [where for where, _ in rows(sources, limit)] == [where for where, _ in found]


def test_chunks_are_small_and_few(tmp_path: Path) -> None:
    source = find(jsonl(tmp_path / "a.jsonl", *pairs(*("x" * 1000 for _ in range(3000)))))
    sizes = [len(pickle.dumps(chunk)) for chunk in chunks(source, None)]
    assert len(sizes) == 3
    assert max(sizes) < 1.1 * 2**20


def test_a_fingerprint_is_the_content(tmp_path: Path) -> None:
    file = Path(jsonl(tmp_path / "a.jsonl", *pairs("x")))
    (source,) = find(str(file))
    assert source.fingerprint() == hashlib.sha256(file.read_bytes()).hexdigest()
    assert source.note is None


# --------------------------------------------------------------------------------------------------- what is found


def test_compressed_files_are_looked_into(tmp_path: Path) -> None:
    for name, content, reason in [
        ("a.jsonl.gz", gzip.compress(b""), "is empty"),
        ("b.jsonl.gz", b"never compressed", "cannot be read: "),
        ("c.csv.gz", gzip.compress("a,b".encode("utf-16")), "is UTF-16"),
        ("d.jsonl", gzip.compress(b"{}"), "is compressed, and its name does not say so"),
        ("e.json.zst", b"\x28\xb5", "cannot be read: "),
        ("f.parquet.gz", gzip.compress(b"PAR1"), "of a kind that cannot be read"),
        ("g.zip", b"PK", "of a kind that cannot be read"),
    ]:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=reason) as error:
            find(str(tmp_path / name))
        assert name in error.value.what
        assert error.value.hint.endswith(".")


def test_a_glob_takes_compressed_files_too(tmp_path: Path) -> None:
    jsonl(tmp_path / "part-1.jsonl", *pairs("x"))
    (tmp_path / "part-2.jsonl.gz").write_bytes(gzip.compress(b'{"prompt": "y", "completion": "z"}'))
    found = find(f"{tmp_path}/part-*")
    assert [row["prompt"] for _, row in rows(found, None) if isinstance(row, dict)] == ["x", "y"]


@pytest.mark.parametrize("name", ["data/none.jsonl", "none.csv.gz", "a b", "x/y/z", "org/name:a:b:c", "org/name:"])
def test_what_is_no_data_set_is_a_file_that_is_not_there(name: str) -> None:
    with pytest.raises(DataError, match="There is no file"):
        find(name)


def test_a_file_that_goes_away(tmp_path: Path) -> None:
    found = find(jsonl(tmp_path / "a.jsonl", *pairs("x")))
    (tmp_path / "a.jsonl").unlink()
    with pytest.raises(DataError, match=r"a.jsonl cannot be read: .*No such file"):
        list(rows(found, None))


# --------------------------------------------------------------------------------------------------------- the hub


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that `datasets` reads as the repository org/name."""
    import datasets

    build = datasets.load_dataset_builder
    asked = []

    def builder(name: str, config: str | None = None) -> Any:
        asked.append((name, config))
        if name != "org/name":
            raise ConnectionError("Couldn't reach the Hub\nand more")
        return build(str(tmp_path), config, cache_dir=str(tmp_path / "cache"))

    monkeypatch.setattr(datasets, "load_dataset_builder", builder)
    hub_rows.files_of.cache_clear()
    yield tmp_path
    hub_rows.files_of.cache_clear()


def prompts(name: str) -> list[Any]:
    return [row["prompt"] for _, row in rows(find(name), None) if isinstance(row, dict)]


def test_a_hub_data_set_is_read_as_it_is_written(hub: Path) -> None:
    jsonl(hub / "train.jsonl", *pairs("x", "y"), {"prompt": "z", "completion": 7})
    jsonl(hub / "test.jsonl", *pairs("t"))
    assert [row["completion"] for _, row in rows(find("org/name"), None) if isinstance(row, dict)] == [
        "007",
        "007",
        7,
    ]
    assert prompts("org/name:train") == ["x", "y", "z"]
    assert prompts("org/name:test") == ["t"]
    with pytest.raises(DataError, match="has no split 'dev'; there are train, test") as error:
        find("org/name:dev")
    assert "org/name:configuration:split" in error.value.hint


def test_a_hub_data_set_with_configurations(hub: Path) -> None:
    (hub / "README.md").write_text(
        "---\nconfigs:\n- config_name: en\n  data_files:\n  - split: train\n    path: en.jsonl\n"
        "- config_name: de\n  data_files:\n  - split: test\n    path: de.jsonl\n---\n"
    )
    jsonl(hub / "en.jsonl", *pairs("hello"))
    jsonl(hub / "de.jsonl", *pairs("hallo"))
    assert prompts("org/name:en:train") == ["hello"]
    assert prompts("org/name:de:test") == ["hallo"]
    with pytest.raises(DataError, match="has several configurations: .'en', 'de'.") as error:
        find("org/name")
    assert "org/name:configuration:train" in error.value.hint
    with pytest.raises(DataError, match="has no split 'train'; there are test"):
        find("org/name:de:train")


def test_what_only_datasets_can_read_is_said(hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    (hub / "train.txt").write_text("one\ntwo\n")

    def load(name: str, config: str | None, split: str, streaming: bool) -> list[dict[str, str]]:
        assert (name, config, split, streaming) == ("org/name", None, "train", True)
        return [{"text": "one"}, {"text": "two"}]

    monkeypatch.setattr(datasets, "load_dataset", load)
    (source,) = find("org/name")
    assert list(rows([source], None)) == [("org/name:row 1", {"text": "one"}), ("org/name:row 2", {"text": "two"})]
    assert list(rows([source], 1)) == [("org/name:row 1", {"text": "one"})]
    assert source.fingerprint() is None
    assert "datasets" in (source.note or "")


def test_options_of_datasets_own_readers_are_left_to_it(hub: Path) -> None:
    (hub / "README.md").write_text("---\nconfigs:\n- config_name: x\n  field: data\n  data_files: a.json\n---\n")
    (hub / "a.json").write_text('{"data": [{"prompt": "x"}]}')
    assert find("org/name") == [Source("org/name")]


def test_an_unknown_data_set_says_so_in_two_sentences(hub: Path) -> None:
    with pytest.raises(DataError) as error:
        find("nobody/nothing")
    assert error.value.what == (
        "There is no file nobody/nothing, and no data set of that name could be read from the hub: "
        "ConnectionError: Couldn't reach the Hub."
    )
    assert error.value.hint.endswith("the connection.")


def test_files_at_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    import fsspec
    import pyarrow as pa
    import pyarrow.parquet as pq

    system = fsspec.filesystem("memory")
    system.pipe("/name@5f0e/data/a.jsonl.gz", gzip.compress(b'{"prompt": "x"}\n{"prompt": "y"}\n'))
    with system.open("/name@5f0e/b.parquet", "wb") as file:
        pq.write_table(pa.table({"prompt": ["z"] * 3}), file)
    addresses = ("memory://name@5f0e/data/a.jsonl.gz", "memory://name@5f0e/b.parquet")
    monkeypatch.setattr(hub_rows, "files_of", lambda name: addresses)
    found = find("org/name:test")
    assert [where for where, _ in rows(found, None)] == [
        "org/name/data/a.jsonl.gz:1",
        "org/name/data/a.jsonl.gz:2",
        *(f"org/name/b.parquet:row {number}" for number in (1, 2, 3)),
    ]
    size = len(gzip.compress(b'{"prompt": "x"}\n{"prompt": "y"}\n'))
    assert found[0].fingerprint() == f"memory://name@5f0e/data/a.jsonl.gz {size}"
    system.rm("/name@5f0e", recursive=True)
    with pytest.raises(DataError, match="org/name/data/a.jsonl.gz cannot be read"):
        list(rows(found, None))
    with pytest.raises(DataError, match="cannot be read"):
        found[0].fingerprint()


SHA = "5f0e" * 10
README = b"---\nconfigs:\n- config_name: default\n  data_files:\n  - split: train\n    path: data/a.jsonl\n---\n"


class FakeHub(BaseHTTPRequestHandler):
    """The few answers of the hub that a data set of two files needs."""

    protocol_version = "HTTP/1.1"
    files = {"README.md": README, "data/a.jsonl": b'{"prompt": "x", "completion": "007"}\n' * 3}

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path.startswith("/api/datasets/org/name/tree/"):
            self.answer(200, json.dumps([self.entry("data/a.jsonl")]).encode())
        elif path.startswith("/api/datasets/org/name/revision"):
            known = [{"rfilename": name} for name in self.files]
            self.answer(200, json.dumps({"id": "org/name", "sha": SHA, "siblings": known, "tags": []}).encode())
        elif (name := path.partition("/resolve/")[2].partition("/")[2]) in self.files:
            body = self.files[name]
            if (span := self.headers.get("Range", "")).startswith("bytes="):
                first, last = span.removeprefix("bytes=").split("-")
                part = body[int(first) : int(last) + 1]
                self.answer(206, part, **{"Content-Range": f"bytes {first}-{last}/{len(body)}"})
            else:
                self.answer(200, body)
        else:
            self.answer(404, **{"X-Error-Code": "EntryNotFound"})

    def entry(self, name: str) -> dict[str, Any]:
        return {"type": "file", "path": name, "size": len(self.files[name]), "oid": "a" * 40}

    def answer(self, code: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(code)
        fixed = {"Content-Length": str(len(body)), "ETag": f'"{"c" * 40}"', "X-Repo-Commit": SHA}
        for name, value in (fixed | headers).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


def test_over_the_wire(tmp_path: Path) -> None:
    """A data set of a hub on this machine, by the libraries' own ways; in a process of its own, for its address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), FakeHub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    script = (
        "import json; from finetune import files; found = files.find('org/name'); "
        "print(json.dumps([found[0].name, found[0].fingerprint(), "
        "[[found[c.source].where(n), r] for c in files.chunks(found, None) for n, r in c.rows()]]))"
    )
    environment = {**os.environ, "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": str(tmp_path)}
    for name in ("HF_HUB_OFFLINE", "HF_TOKEN", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        environment.pop(name, None)
    try:
        done = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, env=environment
        )
    finally:
        server.shutdown()
        server.server_close()
    assert done.returncode == 0, done.stderr
    name, fingerprint, found = json.loads(done.stdout.splitlines()[-1])
    assert name == "org/name/data/a.jsonl"
    assert fingerprint == f"hf://datasets/org/name@{SHA}/data/a.jsonl {len(FakeHub.files['data/a.jsonl'])}"
    assert found == [[f"org/name/data/a.jsonl:{line}", *pairs("x")] for line in (1, 2, 3)]


def test_the_cold_half_stays_cold() -> None:
    script = "import sys, finetune.files; assert not {'datasets', 'pyarrow', 'fsspec'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True)
