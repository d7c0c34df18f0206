"""One training step without torch: decoder, adapters and loss as transformers, peft, bitsandbytes and TRL run them.

Each method follows a forward of theirs line by line, in sizes (`tape`). Known are the Llama kind (Llama, Mistral,
Qwen 2, SmolLM, ...: RMS norm, rotary positions, gated MLP) and Gemma 1 and 2 (norms in fp32, scaled embedding, norms
after each block, softcapped scores). `simulate` runs the real code and must agree; a test holds that.

    forward    embedding -> layer 0 -> layer 1 -> [the others, in a lump] -> last layer -> norm -> loss
    backward   loss -> last layer -> [the lump's activations go, its gradients come] -> layer 1 -> layer 0

All layers between the second and the last keep the same bytes, and the live bytes change evenly from layer to layer,
so no peak lies among them: they are entered as one lump.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from finetune import kernels
from finetune.facts import Facts, Linear
from finetune.ledger import Block, Ledger
from finetune.method import BLOCK, SCALE_BLOCK, AdapterShape, adapter_shapes, saved_tensors, trained_tensors
from finetune.optimizers import is_paged, state_sizes, step_temporaries
from finetune.recipe import Full, Method, QLoRA
from finetune.steps import Batch, Path
from finetune.tape import Parameter, Tape, Tensor
from finetune.tensors import Group, dtype_bytes, group_of, in_tower, layer_of

KNOWN = ("llama", "mistral", "qwen2", "gemma", "gemma2")
"""Model types whose layers are written down here; others are planned as Llama's and say "estimate"."""

VOCABULARY_TILE = 32_768
TOKEN_TILE = 4_096
_NAMES: dict[Group, str] = {
    "embedding": "embedding", "head": "output head", "attention": "attention", "mlp": "MLP", "norm": "norms",
    "other": "other weights",
}  # fmt: skip


class Weight(NamedTuple):
    """A Linear layer as it lies in memory, with its adapter."""

    weight: Parameter
    packed: bool
    a: Parameter | None
    b: Parameter | None


@dataclass
class Step:
    """A step's ledger after the run. Peaks are read from it by phase."""

    ledger: Ledger
    resident: int
    paged: int


def run_step(facts: Facts, method: Method, batch: Batch, path: Path) -> Step:
    """Follow one optimizer step of `method` in sizes; the optimizer's state exists already."""
    return _Decoder(facts, method, batch, path).run()


class _Decoder:
    def __init__(self, facts: Facts, method: Method, batch: Batch, path: Path) -> None:
        self.facts, self.method, self.batch, self.path = facts, method, batch, path
        self.ledger = Ledger(cuda=path.device == "cuda")
        self.tape = Tape(self.ledger, accumulates=path.accumulates)
        self.parameters: list[Parameter] = []  # their gradients live until the optimizer has stepped
        self.casting = False  # inside the forward pass, where autocast keeps low copies of trained weights
        self.stored = int(dtype_bytes("float32" if path.upcast or isinstance(method, Full) else path.weights))
        self.compute = int(dtype_bytes(path.weights))  # what 4-bit weights are unpacked to
        self.low = int(dtype_bytes(path.autocast)) if path.autocast else 0
        self.gemma = facts.model_type in ("gemma", "gemma2")
        self.full = isinstance(method, Full)
        self.double = isinstance(method, QLoRA) and method.double_quant
        self.trained = trained_tensors(method, facts)
        self.saved = [] if isinstance(method, Full) else [tensor.shape for tensor in saved_tensors(method, facts)]
        self.rows, self.length = batch.rows, batch.length
        self.low_copies: dict[int, Tensor] = {}
        self.mask: list[Tensor] = []
        self.lump: dict[Block, Block] = {}
        self.lump_gradients: list[Block] = []
        self.layers = self._layers()

    # ----------------------------------------------------------------------------------------------------- weights

    def _layers(self) -> list[dict[str, Weight]]:
        """The Linear layers of those decoder layers that are shown, by short name."""
        count, period = self.facts.layers, max(int(self.path.checkpointing), 1)
        tail = (count - 1) % period + 1
        self.skipped = max(count - 2 * period - tail, 0)  # a multiple of the period
        self.lumped = 2 * period - 1 if self.skipped else -1  # the lump follows this one of `shown`
        self.lump_starts = period
        self.shown = [n for n in range(count) if n <= self.lumped or n >= count - tail or not self.skipped]
        adapters = {shape.module: shape for shape in adapter_shapes(self.method, self.facts)}
        layers: list[dict[str, Weight]] = [{} for _ in self.shown]
        for linear in self.facts.linears():
            number = layer_of(linear.name + ".")
            if number is None or number not in self.shown:
                continue
            short = linear.name.rpartition(".")[2]
            layers[self.shown.index(number)][short] = self._weight(linear, adapters.get(linear.name))
        return [layer if _is_written_down(layer) else self._likely(layer) for layer in layers]

    def _weight(self, linear: Linear, adapter: AdapterShape | None) -> Weight:
        weight = self._parameter(
            linear.name, (linear.out_features, linear.in_features), self.stored, trained=self.full
        )
        a = b = None
        if adapter is not None:
            a = self._parameter("adapter", (adapter.rank, linear.in_features), 4, trained=True)
            b = self._parameter("adapter", (linear.out_features, adapter.rank), 4, trained=True)
        return Weight(weight, isinstance(self.method, QLoRA), a, b)

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
        key = ("resident", repr(self.method), self.stored, self.path.optimizer, self.path.device)
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
        found: Counter[tuple[str, str, int]] = Counter()
        for tensor in self.facts.tensors:
            name = _NAMES[group_of(tensor.name)]
            if tensor.module in packed and tensor.name.endswith(".weight"):
                found["weights", f"{name}, 4 bit", -(-tensor.size // 2)] += 1
                for size in constant_sizes(tensor.size, double=self.double):
                    found["weights", "quantisation constants", size] += 1
            else:
                found["weights", name, tensor.size * self.stored] += 1
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

    def _parameter(self, name: str, shape: tuple[int, ...], width: int, *, trained: bool) -> Parameter:
        parameter = Parameter(name, shape, width, trained=trained)
        if trained:
            self.parameters.append(parameter)
        return parameter

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
        self.ledger.passing(step_temporaries(self.path, trained), "optimizer step")
        del kept
        for block in earlier:
            self.ledger.give(block)
        for parameter in self.parameters:
            parameter.grad = None
        for block in self.lump_gradients:
            self.ledger.give(block)
        self.ledger.begin("evaluation")
        with self.tape.silent():
            self._forward()
        self.ledger.finish()
        return Step(self.ledger, resident, paged)

    def _forward_backward(self) -> object:
        tape = self.tape
        self.ledger.begin("forward")
        loss, output = self._forward()
        self.ledger.begin("backward")
        for shape in self.saved:  # whole modules beside the adapters: when their gradients come is not followed
            self.lump_gradients.append(self.ledger.take(Block("gradients", "gradients", 4 * _size(shape))))
        tape.where = "backward of the loss"
        tape.backward(loss)
        self.mask = []
        return output if self.path.keeps_output else None

    def _forward(self) -> tuple[Tensor, Tensor | None]:
        """The loss, and the logits where the path makes them all."""
        tape = self.tape
        tape.bucket, tape.where = "activations", "forward"
        self.casting = True
        beside = [tape.new("token ids", (self.rows, self.length), 8)]
        hidden = self._embedding()
        self._masks(hidden.width)
        table = (self.rows if self.batch.flat else 1, self.length, self.facts.head_dim)
        beside += [tape.new("rotary tables", table, hidden.width) for _ in range(2)]
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
        tape.bucket, tape.where = "loss", "the loss"
        loss, output = self._loss(hidden)
        del beside
        self.low_copies.clear()
        self.casting = False
        for block in [block for block in self.lump if not block.live]:
            self.ledger.give(self.lump.pop(block))  # what went with autocast's cache goes in the skipped layers too
        return loss, output if self.path.keeps_output else None

    def _lump(self, kept: list[Block]) -> dict[Block, Block]:
        """Enter what one period of layers keeps once more for every period between it and the last."""
        times = self.skipped // self.lump_starts
        copies = {b: Block(b.bucket, b.what, b.size, b.shape, b.width, times * b.count) for b in kept}
        return {block: self.ledger.take(copy) for block, copy in copies.items()}

    def _run_layer(self, x: Tensor, index: int) -> Tensor:
        layer, number = self.layers[index], self.shown[index]

        def run(inner: Tensor) -> Tensor:
            return self._layer(inner, layer)

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
            table.first_is_view = self.path.loss != "tiled"  # a linear layer's; TRL's head makes its own
            self.table = table
            tokens = self.batch.tokens

            def rule(grad: Tensor) -> list[Tensor | None]:
                if self.path.device == "cuda":
                    tape.passing("embedding backward", *[8 * tokens] * 4)
                return [tape.new("gradient", table.shape, table.width)]

            tape.record(out, [table], rule)
        elif self.path.input_grads:
            leaf = Parameter("embedding output", shape, out.width, trained=True)
            leaf.value = Tensor(out.storage, shape, out.width)
            out.source = leaf
        return tape.scaled(out, "scaled embedding") if self.gemma else out

    def _masks(self, width: int) -> None:
        """The masks that transformers builds: for eager always, for sdpa when rows are padded or share one."""
        kinds = 2 if self.facts.model_type == "gemma2" else 1
        shape = (self.rows, 1, self.length, self.length)
        if self.path.attention == "eager":
            self.mask = [self.tape.new("attention mask", shape, width) for _ in range(kinds)]
        elif self.batch.flat or self.batch.padded:
            self.mask = [self.tape.new("attention mask", shape, 1) for _ in range(kinds)]

    def _norm_weight(self, trained: bool) -> Parameter:
        return self._parameter("norms", (self.facts.hidden_size,), self.stored, trained=trained)

    def _norm(self, x: Tensor, weight: Parameter) -> Tensor:
        """RMS norm (Zhang and Sennrich 2019). Llama multiplies by its weight in the input's type, Gemma in fp32."""
        tape = self.tape
        wide = tape.cast(x, 4, "norm in fp32")
        root = self._inverse_root(wide)
        out = tape.mul(wide, root, "normalised")
        del wide, root
        if self.gemma:
            scaled = self._weighted(out, weight, 4)
            return tape.cast(scaled, x.width, "norm output")
        narrow = tape.cast(out, x.width, "normalised")
        del out
        return self._weighted(narrow, weight, max(x.width, weight.width))

    def _inverse_root(self, x: Tensor) -> Tensor:
        """rsqrt(mean(x^2) + eps), [rows, length, 1]. The square goes as soon as its mean is known."""
        tape = self.tape
        small = (*x.shape[:-1], 1)
        squares = tape.new("squares", x.shape, 4)
        out = tape.new("inverse root", small, 4)
        del squares
        kept = Tensor(x.storage, x.shape, 4)
        size = 4 * x.size

        def rule(grad: Tensor) -> list[Tensor | None]:
            nonlocal kept
            spread = tape.new("gradient", kept.shape, 4)  # of the mean
            tape.passing("square's derivative", size, size)
            del spread
            return [tape.new("gradient", kept.shape, 4)]

        return tape.record(out, [x.source], rule)

    def _weighted(self, x: Tensor, weight: Parameter, width: int) -> Tensor:
        """weight * x along the last side."""
        tape = self.tape
        out = tape.new("norm output", x.shape, width)
        kept = Tensor(x.storage, x.shape, x.width) if weight.trained else None
        needs_x, x_width = x.source is not None, x.width

        def rule(grad: Tensor) -> list[Tensor | None]:
            nonlocal kept
            own = None
            if kept is not None:
                full = tape.new("gradient", grad.shape, grad.width)
                own = full
            back = tape.new("gradient", grad.shape, grad.width) if needs_x else None
            if own is not None:
                own = tape.new("gradient", weight.shape, 4)
            if back is not None and back.width != x_width:
                back = tape.new("gradient", grad.shape, x_width)
            return [own, back]

        return tape.record(out, [weight if weight.trained else None, x.source], rule)

    # ------------------------------------------------------------------------------------------------------- layers

    def _layer(self, x: Tensor, layer: dict[str, Weight]) -> Tensor:
        tape = self.tape
        post = self.facts.model_type == "gemma2"
        inner = self._norm(x, self._norm_weight(self.full))
        inner = self._attention(inner, layer)
        if post:
            inner = self._norm(inner, self._norm_weight(self.full))
        x = tape.add(x, inner, "residual stream")
        del inner
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
        return self._linear(
            self.tape.mul(
                self._activated(self._linear(x, layer["gate_proj"], "MLP gate")),
                self._linear(x, layer["up_proj"], "MLP up"),
                "MLP product",
            ),
            layer["down_proj"],
            "MLP down",
        )

    def _activated(self, gate: Tensor) -> Tensor:
        return self.tape.unary(gate, "MLP activation")

    def _attention(self, x: Tensor, layer: dict[str, Weight]) -> Tensor:
        facts, tape = self.facts, self.tape
        heads, kv, dim = facts.heads, facts.kv_heads, facts.head_dim
        if "qkv_proj" in layer:
            whole = self._linear(x, layer["qkv_proj"], "query, key, value")
            query = tape.view(whole, (self.rows, heads, self.length, dim))
            key = value = tape.view(whole, (self.rows, kv, self.length, dim))
        else:
            query = self._heads(self._linear(x, layer["q_proj"], "query"), heads)
            key = self._heads(self._linear(x, layer["k_proj"], "key"), kv)
            value = self._heads(self._linear(x, layer["v_proj"], "value"), kv)
        query, key = self._rotated(query, "query"), self._rotated(key, "key")
        attend = self._eager if self.path.attention in ("eager", "math") else self._kernel
        out = attend(query, key, value)
        out = self._linear(out, layer["o_proj"], "attention output")
        del query, key, value
        return out

    def _heads(self, x: Tensor, heads: int) -> Tensor:
        """[rows, length, heads * dim] -> [rows, heads, length, dim], a view whose gradient is copied back."""
        tape = self.tape
        out = tape.view(x, (self.rows, heads, self.length, self.facts.head_dim))
        flat = x.shape

        def rule(grad: Tensor) -> list[Tensor | None]:
            return [tape.new("gradient", flat, grad.width)]

        return tape.record(out, [x.source], rule)

    def _rotated(self, x: Tensor, what: str) -> Tensor:
        """x * cos + rotate_half(x) * sin."""
        tape = self.tape
        straight = tape.new("rotation", x.shape, x.width)
        half = tape.new("rotation", (*x.shape[:-1], x.shape[-1] // 2), x.width)
        turned = tape.new("rotation", x.shape, x.width)
        del half
        product = tape.new("rotation", x.shape, x.width)
        del turned
        out = tape.new(f"{what}, rotated", x.shape, x.width)
        del straight, product
        shape, width = x.shape, x.width
        size = x.size * width

        def rule(grad: Tensor) -> list[Tensor | None]:
            one = tape.new("gradient", shape, width)
            tape.passing("backward of the rotation", size, size)
            del one
            other = tape.new("gradient", shape, width)
            tape.passing("backward of the rotation", size)
            return [other]

        return tape.record(out, [x.source], rule)

    def _spread(self, x: Tensor, what: str) -> Tensor:
        """Key or value heads repeated for each query head of their group."""
        tape, heads = self.tape, self.facts.heads
        if x.shape[1] == heads:
            return x
        out = tape.new(what, (self.rows, heads, self.length, self.facts.head_dim), x.width)
        shape = x.shape

        def rule(grad: Tensor) -> list[Tensor | None]:
            return [tape.new("gradient", shape, grad.width)]

        return tape.record(out, [x.source], rule)

    def _eager(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Scores in full: softmax(q k^T * scale [softcapped] + mask) v, the softmax in fp32."""
        tape = self.tape
        key, value = self._spread(key, "keys per head"), self._spread(value, "values per head")
        copied = tape.copy(query, "query, contiguous")
        scores = self._scaled_scores(copied, key)
        del copied
        cap = self.facts.config.get("attn_logit_softcapping", 50.0) if self.facts.model_type == "gemma2" else None
        if cap:
            scores = tape.scaled(scores, "scores / cap")
            scores = tape.tanh(scores, "capped scores")
            scores = tape.scaled(scores, "capped scores")
        masked = self._masked(scores)
        del scores
        weights = self._softmax(masked)
        del masked
        out = self._product(
            weights, value, "attention", (self.rows, self.facts.heads, self.length, self.facts.head_dim)
        )
        out = tape.copy(out, "attention, contiguous")
        return self._flat(out)

    def _scaled_scores(self, query: Tensor, key: Tensor) -> Tensor:
        shape = (self.rows, self.facts.heads, self.length, self.length)
        return self.tape.scaled(self._product(query, key, "scores", shape), "scores")

    def _masked(self, scores: Tensor) -> Tensor:
        """Adding the mask: a new tensor, whose gradient is handed on as it is."""
        tape = self.tape
        out = tape.new("masked scores", scores.shape, scores.width)

        def rule(grad: Tensor) -> list[Tensor | None]:
            return [grad]

        return tape.record(out, [scores.source], rule)

    def _product(self, a: Tensor, b: Tensor, what: str, shape: tuple[int, ...]) -> Tensor:
        """A batched matrix product; each factor is kept for the other's gradient. Autocast casts wide factors."""
        tape = self.tape
        a, b = self._lowered(a), self._lowered(b)
        out = tape.new(what, shape, min(a.width, b.width))
        needs = a.source is not None, b.source is not None
        keep = (Tensor(a.storage, a.shape, a.width), Tensor(b.storage, b.shape, b.width))
        shapes = a.shape, b.shape

        def rule(grad: Tensor) -> list[Tensor | None]:
            _ = keep
            return [tape.new("gradient", shapes[n], grad.width) if needs[n] else None for n in (0, 1)]

        return tape.record(out, [a.source, b.source], rule)

    def _softmax(self, x: Tensor) -> Tensor:
        """softmax(x, dtype=fp32).to(x's type). On CUDA fp16 goes to fp32 inside the kernel, other types in a copy."""
        tape = self.tape
        width = x.width
        fused = self.path.device == "cuda" and width == 2 and self.path.weights == "float16"
        wide = x if fused else tape.cast(x, 4, "scores in fp32")
        out = tape.new("attention weights", x.shape, 4)
        kept = Tensor(out.storage, out.shape, 4)
        back = 2 if fused else 4
        cuda = self.path.device == "cuda"

        def rule(grad: Tensor) -> list[Tensor | None]:
            _ = kept
            made = tape.new("gradient", grad.shape, back)
            if cuda:
                tape.passing("softmax backward", 4 * grad.size)
            return [made]

        tape.record(out, [wide.source], rule)
        del wide
        return tape.cast(out, width, "attention weights")

    def _flat(self, x: Tensor) -> Tensor:
        return self.tape.view(x, (self.rows, self.length, self.facts.heads * self.facts.head_dim))

    def _kernel(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """A fused kernel: keeps its inputs, its output and the softmax's sums."""
        tape, path = self.tape, self.path
        query, key, value = self._lowered(query), self._lowered(key), self._lowered(value)
        kind = path.attention
        masks = list(self.mask)
        if kind == "flash" and (masks or query.width == 4 or self.facts.head_dim > 256):
            kind = "efficient"
        if kind == "efficient" or masks:
            key, value = self._spread(key, "keys per head"), self._spread(value, "values per head")
        bias = tape.new("attention mask", masks[0].shape, query.width) if masks else None
        shape = (self.rows, self.facts.heads, self.length, self.facts.head_dim)
        out = tape.new("attention", shape, query.width)
        sums = tape.new("softmax sums", (self.rows, self.facts.heads, self.length), 4)
        keep = [Tensor(t.storage, t.shape, t.width) for t in (query, key, value, out, sums, bias) if t is not None]
        shapes = [(t.shape, t.width) for t in (query, key, value)]
        needs = [t.source is not None for t in (query, key, value)]
        dim, width, groups = self.facts.head_dim, query.width, key.shape[1] != self.facts.heads

        def rule(grad: Tensor) -> list[Tensor | None]:
            _ = keep
            made = [tape.new("gradient", *shape) for shape in shapes]
            if kind == "efficient":
                for sizes in kernels.efficient_backward(
                    self.rows, self.facts.heads, self.length, dim, value_width=dim, width=width
                ):
                    tape.passing("attention backward", *sizes)
            elif kind == "flash":
                tape.passing(
                    "attention backward",
                    *kernels.flash_backward(
                        self.rows, self.facts.heads, self.length, dim, width=width, shared=groups
                    ),
                )
            return [made[n] if needs[n] else None for n in (0, 1, 2)]

        tape.record(out, [query.source, key.source, value.source], rule)
        return self._flat(out)

    # ------------------------------------------------------------------------------------------------- linear layers

    def _lowered(self, x: Tensor) -> Tensor:
        """What autocast does to the input of a product."""
        return self.tape.cast(x, self.low, "low copy") if self.low and x.width > self.low else x

    def _low_weight(self, weight: Parameter) -> tuple[Tensor | None, bool]:
        """Autocast's copy of an fp32 weight, kept until the forward pass is over if the weight is trained."""
        if not self.low or weight.width <= self.low:
            return None, False
        known = self.low_copies.get(id(weight))
        if known is None:
            known = self.tape.new("low copies of trained weights", weight.shape, self.low)
            known.storage.block.bucket = "copies"
            if weight.trained and self.casting:
                self.low_copies[id(weight)] = known
        return known, True

    def _linear(self, x: Tensor, layer: Weight, what: str) -> Tensor:
        tape = self.tape
        result = self._packed_product(x, layer, what) if layer.packed else self._plain(x, layer, what)
        if layer.a is None or layer.b is None:
            return result
        width = result.width
        if layer.packed:
            result = tape.copy(result, what)  # peft clones a 4-bit layer's output
        casts = self.path.adapter_casts and not (layer.packed and self.low)
        inner = tape.cast(x, 4, "adapter input") if casts else x
        narrow = self._matmul(inner, layer.a, "adapter, narrow")
        del inner
        change = tape.scaled(self._matmul(narrow, layer.b, "adapter output"), "adapter output")
        del narrow
        if layer.packed and not self.low:
            change = tape.cast(change, width)
        result = tape.add(result, change, what)
        del change
        return tape.cast(result, width, what)

    def _plain(self, x: Tensor, layer: Weight, what: str) -> Tensor:
        return self._matmul(x, layer.weight, what)

    def _matmul(self, x: Tensor, weight: Parameter, what: str) -> Tensor:
        """x @ weight^T. The input is kept if the weight is trained; the weight's low copy if the input needs it."""
        tape = self.tape
        x = self._lowered(x)
        copy, lowered = self._low_weight(weight)
        out = tape.new(what, (*x.shape[:-1], weight.shape[0]), x.width)
        kept = Tensor(x.storage, x.shape, x.width) if weight.trained else None
        needs_x, shape = x.source is not None, x.shape
        kept_weight = copy if needs_x else None
        del copy

        def rule(grad: Tensor) -> list[Tensor | None]:
            nonlocal kept, kept_weight
            own = None
            if kept is not None:
                own = tape.new("gradient", weight.shape, grad.width)
            back = tape.new("gradient", shape, grad.width) if needs_x else None
            if own is not None and lowered:
                own = tape.new("gradient", weight.shape, weight.width)
            return [own, back]

        return tape.record(out, [weight if weight.trained else None, x.source], rule)

    def _packed_product(self, x: Tensor, layer: Weight, what: str) -> Tensor:
        """bitsandbytes' 4-bit product: the weight is unpacked for it, and again for the backward pass."""
        tape, weight = self.tape, layer.weight
        inner = tape.cast(x, self.compute, "compute copy")
        size = _size(weight.shape)
        scales = [4 * (size // BLOCK)] if self.double else []
        buffer = [*scales, size * self.compute]
        blocks = [self.ledger.take(Block("temporary", "unpacked weight", part)) for part in buffer]
        out = tape.new(what, (*x.shape[:-1], weight.shape[0]), self.compute)
        for block in blocks:
            self.ledger.give(block)
        shape = inner.shape

        def rule(grad: Tensor) -> list[Tensor | None]:
            held = [tape.new("scales", (part // 4,), 4) for part in scales]
            unpacked = tape.new("unpacked weight", weight.shape, self.compute)
            del held
            made = tape.new("gradient", shape, grad.width)
            del unpacked
            return [made]

        tape.record(out, [inner.source], rule)
        return tape.cast(out, x.width, what)

    # ---------------------------------------------------------------------------------------------------------- loss

    def _loss(self, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        return {"supervised": self._supervised, "tiled": self._tiled, "library": self._library}[self.path.loss](
            hidden
        )

    def _head(self) -> Parameter:
        shape = (self.facts.vocab_size, self.facts.hidden_size)
        if self.full and self.facts.tied:
            return self.table
        return self._parameter("output head", shape, self.stored, trained=self.full)

    def _chosen(self, hidden: Tensor) -> Tensor:
        """The rows of supervised positions; their gradient is put back among zeros, and once more for the slice."""
        tape = self.tape
        out = tape.new("supervised rows", (self.batch.supervised, hidden.shape[-1]), hidden.width)
        shape = hidden.shape
        short = (shape[0], shape[1] - 1, shape[2])

        def rule(grad: Tensor) -> list[Tensor | None]:
            placed = tape.new("gradient", short, grad.width)
            back = tape.new("gradient", shape, grad.width)
            del placed
            return [back]

        return tape.record(out, [hidden.source], rule)

    def _capped(self, logits: Tensor) -> Tensor:
        if self.facts.model_type != "gemma2":
            return logits
        logits = self.tape.scaled(logits, "logits / cap")
        logits = self.tape.tanh(logits, "capped logits")
        return self.tape.scaled(logits, "capped logits")

    def _supervised(self, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        """This toolkit's head: logits of supervised rows in fp32, log-softmax, gather."""
        chosen = self._chosen(hidden)
        logits = self._capped(self._matmul(chosen, self._head(), "logits"))
        del chosen
        wide = self.tape.cast(logits, 4, "logits in fp32")
        del logits
        return self._cross_entropy(wide), None

    def _cross_entropy(self, logits: Tensor, held: tuple[Tensor, ...] = ()) -> Tensor:
        """log_softmax keeps its output; backward: the gathered gradient among zeros, then log_softmax's own."""
        tape = self.tape
        out = tape.new("log-probabilities", logits.shape, 4)
        loss = tape.new("loss", (1,), 4)
        kept = Tensor(out.storage, out.shape, 4)
        shape = logits.shape

        def rule(grad: Tensor) -> list[Tensor | None]:
            nonlocal kept
            sparse = tape.new("gradient of log-probabilities", shape, 4)
            made = tape.new("gradient of logits", shape, 4)
            del sparse
            return [made]

        return tape.record(loss, [logits.source], rule)

    def _library(self, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        """transformers' own loss: all logits, in fp32 beside the model's type."""
        logits = self._capped(self._matmul(hidden, self._head(), "logits"))
        wide = self.tape.cast(logits, 4, "logits in fp32")
        return self._cross_entropy(wide), logits

    def _tiled(self, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        """TRL's head: tiles of 4,096 tokens by 32,768 entries of the vocabulary, made again in the backward pass."""
        tape, facts = self.tape, self.facts
        chosen = self._chosen(hidden)
        tokens = chosen.shape[0]
        width = self.low or chosen.width
        tile = (min(tokens, TOKEN_TILE), VOCABULARY_TILE)
        head = self._head()
        buffer = tape.new("logits of one tile", tile, width)
        if head.width != width:
            tape.passing("part of the head", min(facts.vocab_size, VOCABULARY_TILE) * facts.hidden_size * width)
        del buffer
        loss = tape.new("loss", (1,), 4)
        kept = Tensor(chosen.storage, chosen.shape, chosen.width)
        shape, given = chosen.shape, chosen.width
        trained, needs = head.trained, chosen.source is not None

        def rule(grad: Tensor) -> list[Tensor | None]:
            nonlocal kept
            total = tape.new("gradient", shape, 4) if needs else None
            own = tape.new("gradient", head.shape, 4) if trained else None
            work = tape.new("logits of one tile", tile, width)
            if head.width != width:
                tape.passing("part of the head", min(facts.vocab_size, VOCABULARY_TILE) * facts.hidden_size * width)
            del work
            back = tape.cast(total, given) if total is not None else None
            del total
            return [own, back]

        tape.record(loss, [head if trained else None, chosen.source], rule)
        return loss, None


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
    plain = isinstance(method, Full) or (
        method.variant != "dora" and not method.dropout and not method.modules_to_save
    )
    return facts.model_type in KNOWN and plain and not facts.has_towers and not facts.has_experts


def _size(shape: tuple[int, ...]) -> int:
    return math.prod(shape)
