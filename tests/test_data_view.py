"""The rows in the terminal and as a page, and the command: everything is shown, and nothing in a row can hurt."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console, RenderableType

from finetune.data_page import data_html
from finetune.data_report import Report, look
from finetune.data_rows import ask, take
from finetune.data_view import data_view, row_view
from finetune.pieces import visible
from finetune.recipe import Recipe
from tests.tiny import tiny_tokenizer

TOKENIZER = tiny_tokenizer("smollm2")
HOSTILE = [
    '</script><script>alert("1")</script>',
    "</pre></article></main></body> <!-- --> &amp; &#0; ]]>",
    "\" onmouseover='alert(1)' x=\"",
    "turned \u202eround\u202c and \u2066kept\u2069, שלום and مرحبا",
    "\x1b[31mred\x1b[0m \x07 bell \x9b2J tab\tand\r\nlines\n\n\u200bzero",
    "日本語 naïve 👩‍👩‍👧 \U0001f600",
    "[bold red]no markup[/] {braces} %s",
]


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FINETUNE_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


def write(name: str, rows: list[tuple[str, str]]) -> str:
    text = "".join(json.dumps({"prompt": asked, "completion": said}) + "\n" for asked, said in rows)
    Path(name).write_text(text, encoding="utf-8")
    return name


def report(rows: list[tuple[str, str]], **data: Any) -> Report:
    recipe = {"model": "any", "method": {"kind": "lora"}, "data": {"train": write("a.jsonl", rows), **data}}
    return look(take(Recipe.model_validate(recipe), TOKENIZER))


def hostile() -> Report:
    return report([(text, text) for text in HOSTILE])


def drawn(view: RenderableType, width: int = 120, **console: Any) -> str:
    screen = Console(file=io.StringIO(), width=width, **console)
    screen.print(view)
    assert isinstance(screen.file, io.StringIO)
    return screen.file.getvalue()


# ----------------------------------------------------------------------------------------------------------- terminal


def test_the_view_tells_what_is_trained() -> None:
    found = report([("Hi", "Hello"), ("Who are you?", "The model"), ("Hi", "Hello")], max_length=512)
    text = drawn(data_view(found, first=2))
    assert "a.jsonl  in the tokens of any" in text
    assert "3 rows trained; " in text
    assert "1 step an epoch, of 16 rows each" in text
    assert "layout prompt-completion: columns prompt and completion" in text
    assert re.search(r"exact copies +1 +a.jsonl:1 and a.jsonl:3, 2 times", text)
    assert "512" in text
    assert "⟦Hello<|im_end|>⟧⏎" in text
    assert "⟦The model<|im_end|>⟧⏎" in text
    assert text.count("a.jsonl:2  trained, ") == 1
    assert "a.jsonl:3  trained" not in text


def test_colour_says_what_is_trained_where_there_is_any() -> None:
    text = drawn(data_view(report([("Hi", "Hello")])), force_terminal=True, color_system="standard")
    assert "⟦" not in text
    assert re.search("\x1b\\[[0-9;]*m[^\x1b]*Hello", text)


@pytest.mark.parametrize("width", [40, 80, 200])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    for line in drawn(data_view(hostile(), first=9), width=width).splitlines():
        assert len(line) <= width + 4  # wide letters count twice there


def test_nothing_in_a_row_reaches_the_terminal_as_a_command() -> None:
    found = hostile()
    shown = [
        drawn(data_view(found, first=9)),
        *(drawn(row_view(ask(found.taken, n + 1))) for n in range(len(HOSTILE))),
    ]
    for text in shown:
        assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\u200b]", text)
    assert "[bold red]no markup[/]" in shown[0]


def test_one_row_with_all_tokens() -> None:
    found = report([("Hi", "Hello"), ("a", "the")])
    text = drawn(row_view(ask(found.taken, 2)))
    assert text.startswith("row 2  a.jsonl:2  trained, ")
    [row] = ask(found.taken, 2).shown
    for number in row.row.input_ids:
        assert f" {number} " in text
    assert text.count("✓") == row.trained == 2
    assert re.search(r"user +a +\n", text)


def test_a_bad_row_is_shown_as_it_stands_in_the_file() -> None:
    found = report([("Hi", "Hello"), ("a\x1bb", "")])
    text = drawn(row_view(ask(found.taken, 2)))
    assert text.startswith("row 2  a.jsonl:2  cannot be trained (empty): ")
    assert '{"prompt": "a\\u001bb", "completion": ""}' in text


def test_bad_and_overlong_rows_are_told() -> None:
    rows = [("Hi", "Hello"), ("Hi", ""), ("Hi", "x" * 600)]
    text = drawn(data_view(report(rows, max_length=300)))
    assert "1: 1 empty" in text
    assert "a.jsonl:2: " in text
    assert "1 row is longer than data.max_length 300, and data.overlong is error" in text
    assert "◂ data.max_length; what is below it is longer" in text
    text = drawn(data_view(report(rows, max_length=300, overlong="drop", on_bad_row="skip")))
    text = " ".join(text.split())
    assert re.search(r"1 row is longer than 300 tokens, .*: 1 dropped; \d+ tokens lost, 601 of them trained", text)


# --------------------------------------------------------------------------------------------------------------- page


class Page(HTMLParser):
    """Reads a page as a browser would, and refuses what is not closed in order."""

    VOID = ("meta", "br", "input")

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.rows: list[str] = []
        self.spans: list[tuple[str, str, str]] = []  # (tag, its ids, its text)
        self.places: list[str] = []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))
        if tag not in self.VOID and tag not in ("rect", "path"):
            self.open.append(tag)
        if tag == "article":
            self.rows.append("")
        if ids := dict(attributes).get("data-ids"):
            self.spans.append((tag, ids, ""))

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag: str) -> None:
        if tag in ("rect", "path"):
            return
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "article" in self.open and "pre" in self.open:
            self.rows[-1] += data
            tag, ids, text = self.spans[-1]
            self.spans[-1] = (tag, ids, text + data)


def test_hostile_rows_come_back_from_the_page() -> None:
    found = hostile()
    text = data_html(found)
    page = Page(text)
    assert len(page.rows) == len(HOSTILE)
    for row, said in zip(page.rows, HOSTILE, strict=True):
        assert row.count(visible(said)) == 2
    names = [tag for tag, _ in page.tags]
    assert names.count("script") == 1
    assert not any(name.startswith("on") for _, attributes in page.tags for name in attributes)
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\u200b]", text)


def test_the_page_needs_nothing_from_elsewhere() -> None:
    text = data_html(report([("Hi", "Hello")]))
    assert "http" not in text.replace("http-equiv", "")
    assert not re.search(r"\b(src|href|import|url|fetch)\b\s*[=(]", text)
    assert "default-src 'none'" in text


def test_the_spans_of_a_row_hold_its_ids() -> None:
    found = hostile()
    page = Page(data_html(found))
    spans = iter(page.spans)
    for index, row in enumerate(found.taken.train.rows):
        ids: list[int] = []
        trained: list[int] = []
        text = ""
        while len(ids) < len(row.input_ids):
            tag, pairs, said = next(spans)
            lengths, numbers = zip(*(map(int, pair.split(":")) for pair in pairs.split()), strict=True)
            assert sum(lengths) == len(said.encode("utf-16-le")) // 2
            ids += numbers
            trained += [number if tag in "bu" else -100 for number in numbers]
            text += said
        assert ids == row.input_ids
        assert trained == row.labels
        assert text == page.rows[index]


def test_of_many_rows_the_telling_ones_are_on_the_page() -> None:
    rows = [(f"question {n}", f"reply {n * n}") for n in range(60)]
    rows[40] = rows[3]
    rows[50] = ("long", "word " * 200)
    found = report(rows)
    text = data_html(found, rows=20)
    assert "20 of 60 rows: the longest, some copies and held-out ones, and the first." in text
    kinds = [attributes["data-is"] for tag, attributes in Page(text).tags if tag == "article"]
    assert len(kinds) == 20
    assert kinds.count("trained copy") == 1
    assert kinds[-1] == "trained long"
    assert "All 60 rows." in data_html(found)


def test_held_out_rows_are_on_the_page() -> None:
    found = report([(f"question {n}", f"reply {n * n}") for n in range(60)], eval=0.3)
    kinds = [attributes["data-is"] for tag, attributes in Page(data_html(found)).tags if tag == "article"]
    assert found.taken.held is not None
    assert kinds.count("held") == len(found.taken.held) > 0
    assert len(kinds) == 60


def test_a_refusal_is_on_the_page() -> None:
    text = data_html(report([("Hi", "Hello"), ("Hi", "")]))
    assert "Training would stop" in text
    assert "a.jsonl:2: column &#x27;completion&#x27; is empty" in text


# ------------------------------------------------------------------------------------------------------------ command


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "NO_COLOR": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "finetune", "data", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


def recipe(rows: list[tuple[str, str]]) -> str:
    TOKENIZER.save_pretrained("model")
    write("a.jsonl", rows)
    Path("my.yaml").write_text("model: ./model\nmethod: {kind: lora}\ndata: {train: a.jsonl}\n", encoding="utf-8")
    return "my.yaml"


def test_the_command() -> None:
    name = recipe([("Hi", "Hello"), ("a", "the")])
    done = run(name, "--rows", "1", "--html", "rows.html")
    assert (done.returncode, done.stderr) == (0, "")
    assert "⟦Hello<|im_end|>⟧" in done.stdout
    assert "⟦the<|im_end|>⟧" not in done.stdout
    assert len(Page(Path("rows.html").read_text(encoding="utf-8")).rows) == 2
    done = run(name, "--json", "--set", "train.batch_size=1")
    document = json.loads(done.stdout)
    assert (done.returncode, document["rows"], document["steps_per_epoch"]) == (0, {"trained": 2, "held_out": 0}, 2)
    assert document["first"][0]["labels"].count(-100) == len(document["first"][0]["ids"]) - 2
    row = json.loads(run(name, "--row", "2", "--json").stdout)
    assert (row["number"], row["place"], row["messages"][0]) == (2, "a.jsonl:2", {"role": "user", "content": "a"})


def test_the_command_where_training_would_stop() -> None:
    done = run(recipe([("Hi", "Hello"), ("a", "")]), "--json")
    assert done.returncode == 2
    assert json.loads(done.stdout)["rows"]["trained"] == 1
    assert done.stderr.splitlines() == [
        "finetune: Training would stop: 1 of 2 rows cannot be trained (1 empty).",
        "Correct them, or set data.on_bad_row: skip to leave them out and count them.",
    ]
    done = run("my.yaml", "--row", "3")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("finetune: There is no row 3; the training data has 2.")
