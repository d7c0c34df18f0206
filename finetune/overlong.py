"""What becomes of a row that is longer than max_length: one stated policy, and honest counts.

drop              the row is left out
truncate-end      the row ends at max_length; a reply that is cut loses its end
truncate-prompt   text is taken from the beginning of what is not trained, oldest first; every reply stays whole
split             a conversation is divided between its exchanges, a document anywhere; nothing trained is lost
                  except an exchange that is too long by itself

conversation  [system] [user reply] [user reply] [user reply]
split         [system] [user reply] [user reply]   +   [system] [user reply]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from finetune.chat import IGNORE, Encoded
from finetune.formats import DOCUMENT, Message

Encode = Callable[[Sequence[Message]], Encoded]  # may raise BadRow


@dataclass(frozen=True)
class Fitted:
    """What is left of an overlong row (nothing when it was dropped), and the tokens that were lost with it."""

    rows: list[Encoded]
    lost: int
    lost_trained: int


def fit(
    row: Encoded, messages: Sequence[Message], policy: str, max_length: int, encode: Encode, tokenizer: Any
) -> Fitted:
    """Apply a policy to a row of more than `max_length` tokens; `encode` is how its messages became tokens.

    A row that would keep no token with a loss is dropped, whatever the policy.
    """
    if policy == "truncate-end":
        kept = [Encoded(row.input_ids[:max_length], row.labels[:max_length])]
    elif policy == "truncate-prompt" and messages[0]["role"] != DOCUMENT:
        kept = _shorter_prompt(messages, row, max_length, encode, tokenizer)
    elif policy == "split":
        document = messages[0]["role"] == DOCUMENT
        kept = _pieces(row, max_length) if document else _exchanges(messages, max_length, encode)
    else:
        kept = []
    kept = [piece for piece in kept if supervised(piece)]
    lost = len(row.input_ids) - sum(len(piece.input_ids) for piece in kept)
    return Fitted(kept, max(lost, 0), max(supervised(row) - sum(map(supervised, kept)), 0))


def supervised(row: Encoded) -> int:
    """Tokens that give a loss. The first never does: nothing stands before it to predict it from."""
    return len(row.labels[1:]) - row.labels[1:].count(IGNORE)


def _pieces(row: Encoded, length: int) -> list[Encoded]:
    starts = range(0, len(row.input_ids), length)
    return [Encoded(row.input_ids[at : at + length], row.labels[at : at + length]) for at in starts]


def _exchanges(messages: Sequence[Message], length: int, encode: Encode) -> list[Encoded]:
    """Runs of exchanges, each as long as fits, the system message in front of every one."""
    system = list(messages[:1]) if messages[0]["role"] == "system" else []
    found: list[Encoded] = []
    run: list[Message] = []
    fits: Encoded | None = None
    for exchange in _by_user(messages[len(system) :]):
        longer = encode([*system, *run, *exchange])
        if len(longer.input_ids) > length and run:
            found += [fits] if fits else []
            run, longer = [], encode([*system, *exchange])
        if len(longer.input_ids) > length:  # too long by itself: left out, and its tokens are counted as lost
            run, fits = [], None
        else:
            run, fits = [*run, *exchange], longer
    return [*found, *([fits] if fits else [])]


def _by_user(messages: Sequence[Message]) -> list[list[Message]]:
    """The messages in groups, each beginning with a user's and ending with a reply."""
    groups: list[list[Message]] = []
    for message in messages:
        if message["role"] == "user" or not groups:
            groups.append([])
        groups[-1].append(message)
    return groups


def _shorter_prompt(
    messages: Sequence[Message], row: Encoded, length: int, encode: Encode, tokenizer: Any
) -> list[Encoded]:
    """The text before the last reply is shortened from its beginning, oldest message first; the system message stays.

    At least one token of each message stays, so that no turn becomes empty.
    """
    said = [dict(message) for message in messages]
    for message in said[:-1]:
        if message["role"] == "assistant" or message["role"] == "system":
            continue
        for _ in range(8):  # tokens at the cut may join otherwise than before, so the first try can miss by a few
            excess = len(row.input_ids) - length
            if excess <= 0:
                break
            shorter = _without_start(str(message["content"]), excess, tokenizer)
            if shorter == message["content"]:
                break
            message["content"] = shorter
            row = encode(said)  # type: ignore[arg-type]
        if len(row.input_ids) <= length:
            return [row]
    return []


def _without_start(text: str, tokens: int, tokenizer: Any) -> str:
    """The text without its first tokens, cut between words where one is near; something always stays."""
    places = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    if len(places) < 2:
        return text
    at = places[min(tokens, len(places) - 1)][0]
    rest = text[at:]
    space = rest.find(" ", 0, 24)
    shorter = rest[space + 1 :] if 0 <= space and rest[space + 1 :].strip() else rest
    return shorter if shorter.strip() else text
