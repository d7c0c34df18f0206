"""A chat in the terminal: streaming, with the whole conversation as context."""

from __future__ import annotations

import sys
from pathlib import Path

from finetune.formats import Message
from finetune.generate import load_speaker


def talk(target: str | Path, *, system: str | None = None, max_new_tokens: int = 512) -> None:
    """Read questions from stdin and stream the answers to stdout until end of file; `/new` starts over."""
    speaker = load_speaker(target)
    system = system if system is not None else speaker.system
    interactive = sys.stdin.isatty()
    if interactive:
        sys.stdout.write("Ask away; /new starts over, Ctrl-D ends.\n")
    history = _fresh(system)
    while (question := _ask(interactive)) is not None:
        if question == "/new":
            history = _fresh(system)
            continue
        if not question:
            continue
        history.append({"role": "user", "content": question})
        said = ""
        for piece in speaker.stream(history, max_new_tokens=max_new_tokens):
            sys.stdout.write(piece)
            sys.stdout.flush()
            said += piece
        sys.stdout.write("\n")
        history.append({"role": "assistant", "content": said})


def _ask(interactive: bool) -> str | None:
    try:
        return input("> " if interactive else "").strip()
    except EOFError:
        return None


def _fresh(system: str | None) -> list[Message]:
    return [{"role": "system", "content": system}] if system else []
