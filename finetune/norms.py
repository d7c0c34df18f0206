"""Norms of a training step in sizes: as transformers runs them, and as `fast.layers` does (`Path.lean`).

x ──> [fp32] ──> x r ──> [weight] ──> y        kept: x, r, x r, and y by whoever needs its input
                                               lean: x and r, from which y is made again
"""

from __future__ import annotations

from finetune.facts import Facts
from finetune.ledger import Ledger
from finetune.method import FEW_TOKENS
from finetune.recipe import Full, Method, QLoRA
from finetune.steps import Batch, Path
from finetune.tape import Parameter, Tape, Tensor
from finetune.tensors import dtype_bytes


class Norms:
    """What every part of a step shares, and the norms."""

    def __init__(self, facts: Facts, method: Method, batch: Batch, path: Path) -> None:
        self.facts, self.method, self.batch, self.path = facts, method, batch, path
        self.rows, self.length = batch.rows, batch.length
        self.ledger = Ledger(cuda=path.device == "cuda")
        self.tape = Tape(self.ledger, accumulates=path.accumulates)
        self.parameters: list[Parameter] = []  # their gradients live until the optimizer has stepped
        self.casting = False  # inside the forward pass, where autocast keeps low copies of trained weights
        self.low_copies: dict[int, Tensor] = {}
        self.stored = int(dtype_bytes("float32" if path.upcast or isinstance(method, Full) else path.weights))
        self.held = path.held if not isinstance(method, Full) else ""
        self.compute = int(dtype_bytes(path.weights))  # what 4-bit weights are unpacked to
        self.low = int(dtype_bytes(path.autocast)) if path.autocast else 0
        self.grouped = path.grouped and (batch.tokens >= FEW_TOKENS or bool(path.held))
        self.last = path.last and not path.checkpointing and batch.flat and batch.supervised >= FEW_TOKENS
        # peft's 4-bit layer leaves types to autocast if `torch.is_autocast_enabled()` (peft/tuners/lora/bnb.py).
        # Without a device that asks for CUDA's: on a CPU it casts all the same.
        self.peft_sees_autocast = bool(path.autocast) and path.device == "cuda"
        self.gemma = facts.model_type in ("gemma", "gemma2")
        self.full = isinstance(method, Full)
        self.drops = not isinstance(method, Full) and method.dropout > 0  # until the evaluation
        self.double = isinstance(method, QLoRA) and method.double_quant

    def _parameter(self, name: str, shape: tuple[int, ...], width: int, *, trained: bool) -> Parameter:
        parameter = Parameter(name, shape, width, trained=trained)
        if trained:
            self.parameters.append(parameter)
        return parameter

    def _norm_weight(self, trained: bool) -> Parameter:
        return self._parameter("norms", (self.facts.hidden_size,), self.stored, trained=trained)

    def _norm(self, x: Tensor, weight: Parameter) -> Tensor:
        """RMS norm (Zhang and Sennrich 2019). Llama multiplies by its weight in the input's type, Gemma in fp32."""
        tape = self.tape
        if self.path.lean and not weight.trained and tape.recording:
            return self._lean_norm(x, weight)
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

    def _lean_norm(self, x: Tensor, weight: Parameter) -> Tensor:
        """`fast.layers`' norm: keeps x and the roots; its output can be made again from them."""
        tape = self.tape
        kept = Tensor(x.storage, x.shape, x.width)
        root = tape.new("inverse root", (*x.shape[:-1], 1), 4)
        tape.passing("squares", *([4 * x.size] * (2 if x.width < 4 else 1)))
        out = self._normed(x, max(x.width, weight.width) if not self.gemma else x.width)
        shape, width = x.shape, x.width

        def rule(grad: Tensor) -> list[Tensor | None]:
            _ = kept, root
            wide = tape.new("norm in fp32", shape, 4) if width < 4 else None
            copy = tape.new("norm in fp32", shape, 4) if grad.width < 4 else None
            made = tape.new("gradient", shape, 4)
            del copy
            tape.passing("backward of the norm", 4 * kept.size)
            del wide
            return [tape.cast(made, width)]

        tape.record(out, [x.source], rule)
        out.again = (kept, root)
        return out

    def _normed(self, x: Tensor, width: int) -> Tensor:
        """What the lean norm computes from x and its roots."""
        tape = self.tape
        if x.width == 4:
            return tape.new("norm output", x.shape, 4)
        scaled = tape.new("normalised", x.shape, 4)
        tape.passing("norm in fp32", 4 * x.size)
        low = tape.new("norm output", x.shape, x.width)
        del scaled
        return low if width == x.width else tape.new("norm output", x.shape, width)

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
            tape.passing("square's derivative", size, size, size)  # x, 2x and the product, in one C++ expression
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
