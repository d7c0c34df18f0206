"""Attention of a training step in sizes: scores in full, or a kernel that never holds them."""

from __future__ import annotations

import math

from finetune import kernels
from finetune.linears import Linears, Weight
from finetune.steps import block_of
from finetune.tape import Tensor


class Attention(Linears):
    """From the normed hidden states to the attention's output."""

    mask: list[Tensor]
    tables: list[Tensor]
    """Cosine and sine of every position."""

    def _attention(self, x: Tensor, layer: dict[str, Weight]) -> Tensor:
        facts, tape = self.facts, self.tape
        heads, kv, dim = facts.heads, facts.kv_heads, facts.head_dim
        if "qkv_proj" in layer:
            whole = self._linear(x, layer["qkv_proj"], "query, key, value")
            query = tape.view(whole, (self.rows, heads, self.length, dim))
            key = value = tape.view(whole, (self.rows, kv, self.length, dim))
        else:
            three = [(layer["q_proj"], "query"), (layer["k_proj"], "key"), (layer["v_proj"], "value")]
            query, key, value = self._linears(x, three)
            if self.path.turned:
                return self._linear(self._rows(query, key, value), layer["o_proj"], "attention output")
            query, key, value = self._heads(query, heads), self._heads(key, kv), self._heads(value, kv)
        query, key = self._rotated(query, "query"), self._rotated(key, "key")
        kinds = {"eager": self._eager, "math": self._eager, "documents": self._rows}
        attend = kinds.get(self.path.attention, self._kernel)
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
        tables = list(self.tables)

        def rule(grad: Tensor) -> list[Tensor | None]:
            _ = tables
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

    def _rows(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """`fast.attention`'s function: turns query and key, and keeps what it does not get that way, as one row."""
        tape, turned = self.tape, self.path.turned
        query, key, value = self._lowered(query), self._lowered(key), self._lowered(value)
        needs, sources = value.source is not None, [query.source, key.source, value.source]
        shapes = [(t.shape, t.width) for t in (query, key, value)]
        if turned:
            query, key = (tape.new("turned", t.shape, t.width) for t in (query, key))
        out = tape.new("attention", query.shape, query.width)
        tape.passing("attention of one row", out.size * out.width)
        sums = tape.new("softmax sums", (self.rows, self.facts.heads, self.length), 4)
        kept = (query, key, value) if self.path.blocks else (query, key, value, out, sums)
        keep = [Tensor(t.storage, t.shape, t.width) for t in kept]
        del sums, kept
        tables = list(self.tables) if turned else []

        queries, _, values = (width * math.prod(shape) for shape, width in shapes)
        if self.path.blocks:  # one row's keys, their gradient and that of its values; one block's queries and scores
            length, width = self.batch.length, query.width
            block = width * self.facts.heads * block_of(length)
            passing = [values] * 3 + [block * self.facts.head_dim] * 2 + [block * length] * 3
        else:  # the kernel's gradients: keys and values for every head
            passing = [queries] * 3

        def rule(grad: Tensor) -> list[Tensor | None]:
            _ = keep, tables
            made = [tape.new("gradient", *shape) for shape in shapes]
            tape.passing("attention backward", *passing)
            if turned:
                made[:2] = [tape.new("gradient", *shape) for shape in shapes[:2]]
            return [*made] if needs else [None] * 3

        tape.record(out, sources, rule)
        return self._flat(out)
