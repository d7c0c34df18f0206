"""A chat in the terminal: streaming, with the whole conversation as context, beside the untrained model if wanted."""

from __future__ import annotations

import sys
from pathlib import Path

from finetune.formats import BadRow, Message
from finetune.generate import Speaker, find_target, load_speaker


def talk(name: str | Path, *, system: str | None = None, base: bool = False, max_new_tokens: int = 512) -> None:
    """Read questions from stdin and stream the answers to stdout until end of file.

    `/new` starts over; Ctrl-C ends an answer, and between answers the chat. `system` is the system message, by
    default the run's; an empty one leaves it out. With `base` the untrained model answers first, each model in a
    conversation of its own. Raises what `load_speaker` does.
    """
    speakers = _speakers(name, base)
    given = system if system is not None else speakers[-1][1].system
    interactive = sys.stdin.isatty()
    if interactive:
        sys.stdout.write("Ask away; /new starts over, Ctrl-D ends.\n")
    talks = [_fresh(given) for _ in speakers]
    while (question := _ask(interactive)) is not None:
        if question == "/new":
            talks = [_fresh(given) for _ in speakers]
            continue
        if not question:
            continue
        for number, (title, speaker, bare) in enumerate(speakers):
            sys.stdout.write(f"{title}: " if len(speakers) > 1 else "")
            talks[number] = _answer(speaker, talks[number], question, bare, max_new_tokens)


def _speakers(name: str | Path, base: bool) -> list[tuple[str, Speaker, bool]]:
    """(title, model, adapter off) of each that answers; without an adapter to switch off, two models are loaded."""
    tuned = load_speaker(name)
    if not base:
        return [("tuned", tuned, False)]
    if find_target(name).adapter is not None:
        return [("base", tuned, True), ("tuned", tuned, False)]
    return [("base", load_speaker(name, base=True), False), ("tuned", tuned, False)]


def _answer(speaker: Speaker, talk: list[Message], question: str, bare: bool, longest: int) -> list[Message]:
    """Stream one answer; the conversation with it, or as it was when the question cannot be asked."""
    asked: list[Message] = [*talk, {"role": "user", "content": question}]
    said = ""
    pieces = speaker.stream(asked, max_new_tokens=longest, bare=bare)
    try:
        for piece in pieces:
            sys.stdout.write(piece)
            sys.stdout.flush()
            said += piece
    except BadRow as error:
        sys.stdout.write(f"({error.reason})\n")
        return talk
    except KeyboardInterrupt:
        pieces.close()
        sys.stdout.write(" (stopped)")
    sys.stdout.write("\n")
    return [*asked, {"role": "assistant", "content": said}]


def _ask(interactive: bool) -> str | None:
    try:
        return input("> " if interactive else "").strip()
    except (EOFError, KeyboardInterrupt):
        return None


def _fresh(system: str | None) -> list[Message]:
    return [{"role": "system", "content": system}] if system else []
