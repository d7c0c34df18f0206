"""One training step without torch: decoder, adapters and loss as transformers, peft, bitsandbytes and TRL run them.

Each method follows a forward of theirs line by line, in sizes (`tape`). Known are the Llama kind (Llama, Mistral,
Qwen 2, SmolLM, ...: RMS norm, rotary positions, gated MLP) and Gemma 1 and 2 (norms in fp32, scaled embedding, norms
after each block, softcapped scores). `simulate` runs the real code and must agree; a test holds that.

    forward    embedding -> layer 0 -> layer 1 -> [the others, in a lump] -> last layer -> norm -> loss
    backward   loss -> last layer -> [the lump's activations go, its gradients come] -> layer 1 -> layer 0

All layers between the second and the last keep the same bytes, and the live bytes change evenly from layer to layer,
so no peak lies among them: they are entered as one lump. Where only some layers have adapters, none is left out.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from finetune import kernels
from finetune.facts import Facts, Linear
from finetune.heads import Heads
from finetune.ledger import Block, Ledger
from finetune.linears import Weight
from finetune.method import (
    BLOCK,
    SCALE_BLOCK,
    AdapterShape,
    adapter_shapes,
    held_linears,
    held_room,
    held_sizes,
    saved_tensors,
    trained_tensors,
)
from finetune.optimizers import is_paged, state_sizes, step_temporaries
from finetune.recipe import Full, Method, QLoRA
from finetune.steps import Batch, Path
from finetune.tape import Parameter, Tensor
from finetune.tensors import Group, group_of, in_tower, layer_of

KNOWN = ("llama", "mistral", "qwen2", "gemma", "gemma2")
"""Model types whose layers are written down here; others are planned as Llama's and say "estimate"."""

_NAMES: dict[Group, str] = {
    "embedding": "embedding", "head": "output head", "attention": "attention", "mlp": "MLP", "norm": "norms",
    "other": "other weights",
}  # fmt: skip


@dataclass
class Step:
    """A step's ledger after the run. Peaks are read from it by phase."""

    ledger: Ledger
    resident: int
    paged: int


def run_step(facts: Facts, method: Method, batch: Batch, path: Path) -> Step:
    """Follow one optimizer step of `method` in sizes; the optimizer's state exists already."""
    return _Decoder(facts, method, batch, path).run()


class _Decoder(Heads):
    def __init__(self, facts: Facts, method: Method, batch: Batch, path: Path) -> None:
        super().__init__(facts, method, batch, path)
        self.trained = trained_tensors(method, facts)
        self.saved = [] if isinstance(method, Full) else [tensor.shape for tensor in saved_tensors(method, facts)]
        self.mask: list[Tensor] = []
        self.tables: list[Tensor] = []
        self.lump: dict[Block, Block] = {}
        self.lump_gradients: list[Block] = []
        self.layers = self._layers()

    # ----------------------------------------------------------------------------------------------------- weights

    def _layers(self) -> list[dict[str, Weight]]:
        """The Linear layers of those decoder layers that are shown, by short name."""
        count, period = self.facts.layers, max(int(self.path.checkpointing), 1)
        adapters = {shape.module: shape for shape in adapter_shapes(self.method, self.facts)}
        tail = (count - 1) % period + 1
        self.skipped = max(count - 2 * period - tail, 0) if self._alike(adapters) else 0  # a multiple of the period
        self.lumped = 2 * period - 1 if self.skipped else -1  # the lump follows this one of `shown`
        self.lump_starts = period
        self.shown = [n for n in range(count) if n <= self.lumped or n >= count - tail or not self.skipped]
        layers: list[dict[str, Weight]] = [{} for _ in self.shown]
        for linear in self.facts.linears():
            number = layer_of(linear.name + ".")
            if number is None or number not in self.shown:
                continue
            short = linear.name.rpartition(".")[2]
            layers[self.shown.index(number)][short] = self._weight(linear, adapters.get(linear.name))
        return [layer if _is_written_down(layer) else self._likely(layer) for layer in layers]

    def _alike(self, adapters: Mapping[str, AdapterShape]) -> bool:
        """Whether all layers have the same adapters; targets may name some of them only."""
        found: dict[int, set[tuple[str, int]]] = {number: set() for number in range(self.facts.layers)}
        for name, adapter in adapters.items():
            number = layer_of(name + ".")
            if number in found and not in_tower(name):
                found[number].add((name.rpartition(".")[2], adapter.rank))
        return len({frozenset(kinds) for kinds in found.values()}) == 1

    def _weight(self, linear: Linear, adapter: AdapterShape | None) -> Weight:
        weight = self._parameter(
            linear.name, (linear.out_features, linear.in_features), self.stored, trained=self.full
        )
        a = b = magnitude = None
        if adapter is not None:
            a = self._parameter("adapter", (adapter.rank, linear.in_features), 4, trained=True)
            b = self._parameter("adapter", (linear.out_features, adapter.rank), 4, trained=True)
            if getattr(self.method, "variant", "") == "dora":
                magnitude = self._parameter("adapter", (linear.out_features,), 4, trained=True)
        return Weight(weight, isinstance(self.method, QLoRA), a, b, magnitude)

    def _likely(self, layer: dict[str, Weight]) -> dict[str, Weight]:
        """A layer of another make, planned as Llama's with the model's own widths; its adapters where they may be."""
        facts = self.facts
        hidden, inner = facts.hidden_size, facts.intermediate_size
        query, key = facts.heads * facts.head_dim, facts.kv_heads * facts.head_dim
        shapes = {
            "q_proj": (query, hidden), "k_proj": (key, hidden), "v_proj": (key, hidden), "o_proj": (hidden, query),
            "gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner),
        }  # fmt: skip
        rank = 0 if isinstance(self.method, Full) else self.method.rank
        adapted = sum(weight.a is not None for weight in layer.values())
        first = ("q_proj", "v_proj", "o_proj", "up_proj", "down_proj", "k_proj", "gate_proj")[:adapted]
        return {
            name: self._weight(
                Linear(name, *shape), AdapterShape(name, rank, shape[1], shape[0]) if name in first else None
            )
            for name, shape in shapes.items()
        }

    def _enter_weights(self) -> int:
        """Enter everything that lies there before the step. Returns bytes of paged optimizer state."""
        path = self.path
        key = ("resident", repr(self.method), self.stored, self.held, path.held_every, path.optimizer, path.device)
        if key not in self.facts.memo:
            self.facts.memo[key] = self._resident()
        found, paged = self.facts.memo[key]
        for (bucket, what, size), count in found.items():
            self.ledger.take(Block(bucket, what, size, count=count))
        return int(paged)

    def _resident(self) -> tuple[Counter[tuple[str, str, int]], int]:
        """How many tensors of each kind and size there are, and the bytes that lie in unified memory."""
        packs = isinstance(self.method, QLoRA)
        packed = {linear.name for linear in self.facts.linears(towers=True)} if packs else set()
        every = self.path.held_every
        held = {linear.name for linear in held_linears(self.facts, every)} if self.held else set()
        found: Counter[tuple[str, str, int]] = Counter()
        for tensor in self.facts.tensors:
            name = _NAMES[group_of(tensor.name)]
            if tensor.module in held and tensor.name.endswith(".weight"):
                for size in held_sizes(tensor.size, self.held):
                    found["weights", name, size] += 1
            elif tensor.module in packed and tensor.name.endswith(".weight"):
                found["weights", f"{name}, 4 bit", -(-tensor.size // 2)] += 1
                for size in constant_sizes(tensor.size, double=self.double):
                    found["weights", "quantisation constants", size] += 1
            else:
                found["weights", name, tensor.size * self.stored] += 1
        if self.held:
            found["weights", "one layer in fp32", held_room(self.facts, every)] += 1
        paged = 0
        for name, shape in self.trained:
            if not self.full:
                found["weights", "adapter", 4 * _size(shape)] += 1
            sizes = state_sizes(self.path.optimizer, name, shape)
            if self.path.device == "cuda" and is_paged(self.path.optimizer, _size(shape)):
                paged += sum(sizes)
                continue
            for size in sizes:
                found["optimizer", "optimizer state", size] += 1
        return found, paged

    # -------------------------------------------------------------------------------------------------------- step

    def run(self) -> Step:
        """The whole step."""
        paged = self._enter_weights()
        resident = sum(b.size * b.count for b in self.ledger.since(0) if b.bucket == "weights")
        trained = [shape for _, shape in self.trained]
        if self.path.device == "cuda":
            self.ledger.take(Block("workspace", "cuBLAS, forward thread", kernels.cublas_workspace(self.path)))
            self.ledger.take(Block("workspace", "cuBLAS, backward thread", kernels.cublas_workspace(self.path)))
        earlier: list[Block] = []
        if self.path.accumulates:
            earlier += (self.ledger.take(Block("gradients", "of earlier passes", 4 * _size(s))) for s in trained)
        kept = self._forward_backward()
        self.ledger.begin("optimizer")
        self.ledger.passing(step_temporaries(self.path, self.trained), "optimizer step")
        del kept
        for block in earlier:
            self.ledger.give(block)
        for parameter in self.parameters:
            parameter.grad = None
        for block in self.lump_gradients:
            self.ledger.give(block)
        self.ledger.begin("evaluation")
        self.drops = False
        with self.tape.silent():
            self._forward()
        self.ledger.finish()
        return Step(self.ledger, resident, paged)

    def _forward_backward(self) -> object:
        tape = self.tape
        self.ledger.begin("forward")
        loss, output = self._forward()
        self.ledger.begin("backward")
        bucket = "temporary" if self.path.accumulates else "gradients"
        for shape in self.saved:  # whole modules beside the adapters: when their gradients come is not followed
            block = Block(bucket, "gradients of whole modules", 4 * _size(shape), shape, 4)
            self.lump_gradients.append(self.ledger.take(block))
        tape.where = "backward of the loss"
        tape.backward(loss)
        self.mask, self.tables = [], []
        return output if self.path.keeps_output else None

    def _forward(self) -> tuple[Tensor, Tensor | None]:
        """The loss, and the logits where the path makes them all."""
        tape = self.tape
        tape.bucket, tape.where = "activations", "forward"
        self.casting = True
        ids = tape.new("token ids", (self.rows, self.length), 8)
        hidden = self._embedding()
        self._masks(hidden.width)
        table = (self.rows if self.batch.flat else 1, self.length, self.facts.head_dim)
        self.tables = [tape.new("rotary tables", table, hidden.width) for _ in range(2)]
        for index, number in enumerate(self.shown):
            tape.where = f"layer {number}"
            if index == self.lump_starts:
                before, entered = self.ledger.mark(), hidden.storage.block
            hidden = self._run_layer(hidden, index)
            if index == self.lumped:
                # A layer's output is the next one's input: it counts only where it is kept.
                kept = [block for block in self.ledger.since(before) if block is not hidden.storage.block]
                self.lump = self._lump([*kept, *([entered] if entered.live else [])])
        tape.where = "the last norm"
        hidden = self._norm(hidden, self._norm_weight(self.full))
        if not self.path.checkpointing:  # layers that run again need them again
            self.mask, self.tables = [], []
        tape.bucket, tape.where = "loss", "the loss"
        last = [hidden]
        del hidden
        loss, output = self._loss(last)
        del ids
        self._leave_autocast()
        return loss, output if self.path.keeps_output else None

    def _leave_autocast(self) -> None:
        super()._leave_autocast()
        for block in [block for block in self.lump if not block.live]:
            self.ledger.give(self.lump.pop(block))  # what went with autocast's cache goes in the skipped layers too

    def _lump(self, kept: list[Block]) -> dict[Block, Block]:
        """Enter what one period of layers keeps once more for every period between it and the last."""
        times = self.skipped // self.lump_starts
        copies = {b: Block(b.bucket, b.what, b.size, b.shape, b.width, times * b.count) for b in kept}
        return {block: self.ledger.take(copy) for block, copy in copies.items()}

    def _run_layer(self, x: Tensor, index: int) -> Tensor:
        layer, number = self.layers[index], self.shown[index]

        def run(inner: Tensor) -> Tensor:
            return self._layer(inner, layer, last=self.last and number == self.facts.layers - 1)

        every = int(self.path.checkpointing)
        out = self.tape.checkpoint(run, x, trains=True) if every and number % every == 0 else run(x)

        def rule(grad: Tensor) -> list[Tensor | None]:
            """The gradient has reached the layer's output."""
            self.tape.bucket = "temporary"
            self.tape.where = f"backward of layer {number}"
            if index == self.lumped:
                self._let_lump_go()
            return [grad]

        return self.tape.record(self.tape.view(out, out.shape), [out.source], rule)

    def _let_lump_go(self) -> None:
        """The skipped layers have run backward: their activations are gone, their gradients have come."""
        for block in self.lump.values():
            self.ledger.give(block)
        self.lump = {}
        if not self.path.accumulates:
            for shape in self._trained_in_layer():
                block = Block("gradients", "gradients", 4 * _size(shape), count=self.skipped)
                self.lump_gradients.append(self.ledger.take(block))

    def _trained_in_layer(self) -> list[tuple[int, ...]]:
        """Shapes of what layer 1 trains."""
        return [shape for name, shape in self.trained if layer_of(name) == 1 and not in_tower(name)]

    # ------------------------------------------------------------------------------------------------ around layers

    def _embedding(self) -> Tensor:
        tape, facts = self.tape, self.facts
        shape = (self.rows, self.length, facts.hidden_size)
        out = tape.new("embedding", shape, self.stored)
        if self.full:
            table = self._parameter("embedding", (facts.vocab_size, facts.hidden_size), self.stored, trained=True)
            table.shared = facts.tied
            # A linear layer's is a transposed view; TRL's head makes its own, autocast casts it back to fp32.
            table.first_is_view = self.path.loss != "tiled" and not self.low
            self.table = table
            tokens = self.batch.tokens

            def rule(grad: Tensor) -> list[Tensor | None]:
                self.mask, self.tables = [], []  # no layer runs again
                if self.path.device == "cuda":
                    tape.passing("embedding backward", *[8 * tokens] * 4)
                return [tape.new("gradient", table.shape, table.width)]

            tape.record(out, [table], rule)
        if self.gemma:  # inside the embedding's own module
            out = tape.scaled(out, "scaled embedding")
        if not self.full and self.path.input_grads:
            leaf = Parameter("embedding output", shape, out.width, trained=True)
            leaf.value = Tensor(out.storage, shape, out.width)
            out.source = leaf
        return out

    def _masks(self, width: int) -> None:
        """The masks that transformers builds: for eager always, for sdpa when rows are padded or share one."""
        kinds = 2 if self.facts.model_type == "gemma2" else 1
        shape = (self.rows, 1, self.length, self.length)
        if self.path.attention == "eager":
            self.mask = [self.tape.new("attention mask", shape, width) for _ in range(kinds)]
        elif self.path.attention != "documents" and (self.batch.flat or self.batch.padded):
            self.mask = [self.tape.new("attention mask", shape, 1) for _ in range(kinds)]

    # ------------------------------------------------------------------------------------------------------ layers

    def _layer(self, x: Tensor, layer: dict[str, Weight], *, last: bool) -> Tensor:
        tape = self.tape
        post = self.facts.model_type == "gemma2"
        inner = self._norm(x, self._norm_weight(self.full))
        inner = self._attention(inner, layer)
        if post:
            inner = self._norm(inner, self._norm_weight(self.full))
        x = tape.add(x, inner, "residual stream")
        del inner
        if last:
            x = self._scored(x)
        inner = self._norm(x, self._norm_weight(self.full))
        inner = self._mlp(inner, layer)
        if post:
            inner = self._norm(inner, self._norm_weight(self.full))
        return tape.add(x, inner, "residual stream")

    def _mlp(self, x: Tensor, layer: dict[str, Weight]) -> Tensor:
        if "gate_up_proj" in layer:
            both = self._linear(x, layer["gate_up_proj"], "MLP gate and up")
            half = (*both.shape[:-1], both.shape[-1] // 2)
            gate, up = self.tape.view(both, half), self.tape.view(both, half)
            return self._linear(
                self.tape.mul(up, self._activated(gate), "MLP product"), layer["down_proj"], "MLP down"
            )
        pair, last = (
            [(layer["gate_proj"], "MLP gate"), (layer["up_proj"], "MLP up")],
            (layer["down_proj"], "MLP down"),
        )
        if self.path.lean and self.tape.recording and all(self._joins(part) for part, _ in (*pair, last)):
            return self._gated(x, pair, last)
        if not self.grouped:
            gate = self._activated(self._linear(x, layer["gate_proj"], "MLP gate"))
            up = self._linear(x, layer["up_proj"], "MLP up")
        else:
            gate, up = self._linears(x, pair)
            gate = self._activated(gate)
        product = self.tape.mul(gate, up, "MLP product")
        del gate, up
        return self._linear(product, layer["down_proj"], "MLP down")

    def _activated(self, gate: Tensor) -> Tensor:
        return self.tape.unary(gate, "MLP activation")


def constant_sizes(size: int, *, double: bool) -> list[int]:
    """Bytes of each tensor that bitsandbytes keeps beside a packed weight of `size` values (section 3 of QLoRA)."""
    scales = -(-size // BLOCK)
    if not double:
        return [4 * scales, 4 * 16]
    return [scales, 4 * 16, 4, 4 * -(-scales // SCALE_BLOCK), 4 * 256]


def _is_written_down(layer: dict[str, Weight]) -> bool:
    """Whether the layer has the parts that `_layer` follows."""
    attention = {"q_proj", "k_proj", "v_proj"} <= layer.keys() or "qkv_proj" in layer
    mlp = {"gate_proj", "up_proj"} <= layer.keys() or "gate_up_proj" in layer
    return attention and mlp and {"o_proj", "down_proj"} <= layer.keys()


def is_exact(facts: Facts, method: Method) -> bool:
    """Whether the model's layers, and what the method adds to them, are written down here as they run."""
    plain = isinstance(method, Full) or (method.variant != "dora" and not method.modules_to_save)
    return facts.model_type in KNOWN and plain and not facts.has_towers and not facts.has_experts


def _size(shape: tuple[int, ...]) -> int:
    return math.prod(shape)
