"""What a run needs beside the device: memory of the host while it loads, trains, saves and merges, and disk.

All are upper ends: what lies there at the same time in the worst case of each phase.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from finetune.device import Device
from finetune.facts import Facts
from finetune.memory import Account, Line
from finetune.method import adapter_shapes, held_sizes
from finetune.paths import Lengths
from finetune.recipe import Full, LoRA, QLoRA, Recipe
from finetune.tensors import dtype_bytes

LIBRARIES = {"cpu": 900_000_000, "cuda": 2_500_000_000}
"""torch, transformers and their libraries in a process; on a GPU CUDA's libraries besides. As it is in practice."""

THREADS, BLOCK, FACTORS, ROWS, PLACES = 8, 1 << 19, 16, 1 << 23, 64
"""What a merge holds at most: `merge_folder`'s threads and factors, `merge_math`'s values of a block; `streamed`'s
values of some rows and `proof`'s places."""

MODULES = 20_000_000
"""A model of modules without weights. As it is in practice."""


def host_lines(
    recipe: Recipe, facts: Facts, device: Device, held: Account, lengths: Lengths | None
) -> Iterator[Line]:
    """Memory of the host, for each process. On a CPU the device's own lines are in it too, and not said again."""
    trained = sum(line.bytes for line in held.lines if line.bucket == "gradients")
    yield Line("outside", "Python and libraries", LIBRARIES[device.kind], "as it is in practice", exact=False)
    if lengths is not None:
        tokens = int(lengths.mean * lengths.of)
        yield Line("outside", "rows", 24 * tokens, f"3 x 8 bytes x {tokens:,} tokens", exact=False)
    if device.kind == "cuda":
        largest = max(tensor.size for tensor in facts.tensors)
        each = dtype_bytes(recipe.load.dtype)
        yield Line(
            "outside", "while loading", int(2 * each * largest), f"largest weight, 2 x {each:g} x {largest:,}",
            exact=False,
        )  # fmt: skip
        if held.paged:
            yield Line("outside", "paged optimizer state", held.paged, "if the driver moves all of it out")
        yield Line("outside", "while saving", trained, "a copy of what is trained")
    if not isinstance(recipe.method, Full):
        yield while_merging(recipe, facts)


def while_merging(recipe: Recipe, facts: Facts) -> Line:
    """Blocks of a few threads while weights are written, or one module and some logits while they are proved.

    peft adds a pair to a whole weight: the weight, the product and the scaled product, in float32; with DoRA three
    more for its norms. Of other weights some rows are read, and widened. A layer's experts are one module, and are
    stacked. Of three runs the logits are kept, and two more of that size compare them.
    """
    adapted = adapter_shapes(recipe.method, facts)
    largest = max((shape.in_features * shape.out_features for shape in adapted), default=0)
    longest = max((shape.rank * max(shape.in_features, shape.out_features) for shape in adapted), default=0)
    experts: Counter[str] = Counter()
    for tensor in facts.tensors:
        if ".experts." in tensor.name:
            experts[tensor.name.partition(".experts.")[0]] += tensor.size
    most = max(experts.values(), default=0)
    rows = min(ROWS, max(tensor.size for tensor in facts.tensors))
    copies = 6 if isinstance(recipe.method, (LoRA, QLoRA)) and recipe.method.variant == "dora" else 3
    module, said = max(
        (4 * copies * largest, f"the largest adapted weight, {copies} x 4 bytes x {largest:,}"),
        (8 * rows, f"rows of a weight, 2 x 4 bytes x {rows:,}"),
        (8 * most, f"a layer's experts, 2 x 4 bytes x {most:,}"),
    )
    writing, logits = THREADS * 16 * BLOCK + FACTORS * 4 * longest, 5 * 4 * PLACES * facts.vocab_size
    proving = MODULES + module + logits
    formula = f"{said}, + logits, 5 x 4 bytes x {PLACES} places x {facts.vocab_size:,}, + 20 MB, in the proof"
    if writing > proving:
        formula = f"{THREADS} threads x 16 bytes x {BLOCK:,} values + {FACTORS} factors x 4 bytes x {longest:,}"
    return Line("outside", "while merging", max(writing, proving), formula, exact=False)


def disk_lines(recipe: Recipe, facts: Facts, held: Account) -> Iterator[Line]:
    """Disk that a run takes: the download, checkpoints, what it leaves, and a merged copy."""
    full = isinstance(recipe.method, Full)
    stored = facts.weight_bytes()
    if facts.source in ("bundled", "hub headers"):
        yield Line("outside", "the model", stored, f"{len(facts.tensors):,} weights as they are stored")
    if facts.source == "bundled" and facts.blocks:
        sizes = [linear.out_features * linear.in_features for linear in facts.linears()]
        beside = sum(sum(held_sizes(size, "blocks")) for size in sizes)
        yield Line(
            "outside", "blocks of its GGUF file", beside, f"(1 byte + 2 x fp32 per 32 weights) x {sum(sizes):,}"
        )
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
