"""What a run needs beside the device: memory of the host while it loads, trains, saves and merges, and disk.

All are upper ends: what lies there at the same time in the worst case of each phase.
"""

from __future__ import annotations

from collections.abc import Iterator

from finetune.device import Device
from finetune.facts import Facts
from finetune.memory import Account, Line
from finetune.paths import Lengths
from finetune.recipe import Full, Recipe
from finetune.tensors import dtype_bytes

LIBRARIES = {"cpu": 900_000_000, "cuda": 2_500_000_000}
"""torch, transformers and their libraries in a process; on a GPU CUDA's libraries besides. As it is in practice."""


def host_lines(
    recipe: Recipe, facts: Facts, device: Device, held: Account, lengths: Lengths | None
) -> Iterator[Line]:
    """Memory of the host, for each process. On a CPU the device's own lines are in it too, and not said again."""
    trained = sum(line.bytes for line in held.lines if line.bucket == "gradients")
    yield Line("outside", "Python and libraries", LIBRARIES[device.kind], "as it is in practice", exact=False)
    if lengths is not None:
        tokens = int(lengths.mean * lengths.of)
        yield Line("outside", "rows", 24 * tokens, f"3 x 8 bytes x {tokens:,} tokens", exact=False)
    largest = max(tensor.size for tensor in facts.tensors)
    if device.kind == "cuda":
        each = dtype_bytes(recipe.load.dtype)
        yield Line(
            "outside", "while loading", int(2 * each * largest), f"largest weight, 2 x {each:g} x {largest:,}",
            exact=False,
        )  # fmt: skip
        if held.paged:
            yield Line("outside", "paged optimizer state", held.paged, "if the driver moves all of it out")
        yield Line("outside", "while saving", trained, "a copy of what is trained")
    if not isinstance(recipe.method, Full):
        yield Line(
            "outside", "while merging", 12 * largest, f"the largest weight, 3 x 4 bytes x {largest:,}", exact=False
        )


def disk_lines(recipe: Recipe, facts: Facts, held: Account) -> Iterator[Line]:
    """Disk that a run takes: the download, checkpoints, what it leaves, and a merged copy."""
    full = isinstance(recipe.method, Full)
    stored = facts.weight_bytes()
    if facts.source in ("bundled", "hub headers"):
        yield Line("outside", "the model", stored, f"{len(facts.tensors):,} weights as they are stored")
    trained = sum(line.bytes for line in held.lines if line.bucket == "gradients")
    state = sum(line.bytes for line in held.lines if line.bucket == "optimizer")
    kept = recipe.train.keep + 1
    yield Line(
        "outside", "checkpoints", kept * (trained + state),
        f"{kept} x ({trained / 1e9:.2f} GB trained + {state / 1e9:.2f} GB optimizer state), one while it is written",
    )  # fmt: skip
    yield Line("outside", "model" if full else "adapter", stored if full else trained, "what the run leaves")
    if not full:
        each = dtype_bytes(recipe.merge.dtype) if recipe.merge.dtype != "keep" else stored / facts.parameters
        yield Line("outside", "merged copy", int(each * facts.parameters), f"{each:g} bytes x {facts.parameters:,}")
