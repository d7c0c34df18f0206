"""Activations that the backward pass makes again from what is kept anyway.

    x ── norm ──> y ── adapter      kept: x for the norm and y for the gradient of A
                                    with a note on y: x alone, and y is made again

An adapter's gradient needs the layer's input. Where that is cheap to make from tensors that are kept besides (a
norm's output, a gated product), its maker notes so on it, and the layer keeps those.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

_NOTE = "_made_by_finetune"


class Made(NamedTuple):
    """`make(*sources)` has the values of the tensor that carries this note."""

    make: Callable[..., Any]
    sources: tuple[Any, ...]


def made_from(x: Any, make: Callable[..., Any], *sources: Any) -> Any:
    """Note on a tensor how it can be made again, and return it. An operation's result has no note."""
    setattr(x, _NOTE, (Made(make, sources), x._version))
    return x


def what_to_keep(x: Any, otherwise: Any) -> Made:
    """The sources of a tensor with a note that holds; `otherwise` the tensor of that name, as it is."""
    made, version = getattr(x, _NOTE, (None, None))
    if made is not None and version == x._version:  # not changed in place since
        return made  # type: ignore[no-any-return]
    return Made(lambda same: same, (otherwise,))
