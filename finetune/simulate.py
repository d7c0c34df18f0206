"""One training step of the very model on meta tensors: the exact bytes, the most at once, and where.

A meta tensor has a shape, a type and a storage, and no memory. `Watch` sees every operation of forward and backward
below autograd, enters each new storage into the ledger, and strikes it out when torch lets go of it. What a kernel
allocates inside, which no trace can see, is entered from its formula (`kernels`).
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

# The dispatch mode must inherit from torch's; this hot module is imported by the commands that simulate only.
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: TID253

from finetune import kernels
from finetune.allocator import CachingAllocator
from finetune.as_cuda import LowCopies, fused_4_bit, traced
from finetune.facts import Facts
from finetune.fast import last, layers
from finetune.fast.adapter import attach
from finetune.fast.attention import documents
from finetune.fast.head import onepass_loss, supervised_loss
from finetune.heads import Logits, logits_of
from finetune.ledger import Block, Ledger, Peak, by_bucket
from finetune.meta import constants_of, meta_model, model_config
from finetune.optimizers import is_paged, state_sizes, step_temporaries
from finetune.recipe import Method
from finetune.steps import Batch, Path

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig

PHASES = ("forward", "backward", "optimizer")


@dataclass(frozen=True)
class Simulation:
    """What one simulated step needs, in bytes. `resident` is what lies there before the step."""

    path: Path
    batch: Batch
    resident: int
    peaks: dict[str, Peak]
    buckets: dict[str, int]
    held: tuple[Block, ...]
    reserved: int
    operations: int
    seconds: float

    @property
    def peak(self) -> Peak:
        """The highest phase."""
        return max((self.peaks[name] for name in PHASES), key=lambda peak: peak.allocated or peak.bytes)

    def document(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "peak": self.peak.allocated or self.peak.bytes,
            "during": f"{self.peak.phase}: {self.peak.during}",
            "resident": self.resident,
            "phases": {name: self.peaks[name].allocated or self.peaks[name].bytes for name in PHASES},
            "reserved": self.reserved,
            "buckets": self.buckets,
            "operations": self.operations,
            "seconds": round(self.seconds, 2),
        }


def simulate(
    facts: Facts, method: Method, batch: Batch, path: Path, *, config: PreTrainedConfig | None = None,
    warm_up: bool = False,
) -> Simulation:  # fmt: skip
    """Run one optimizer step of `method` on the model of `facts` without its weights.

    `config` overrides what `facts` says of the architecture. On a GPU the caching allocator is replayed as well; with
    `warm_up` over a step that creates the optimizer's state after its backward pass, as torch does, and a second one
    that is read. Without it the state is there from the beginning: half the time, and the same live bytes.
    """
    import torch

    began = time.process_time()
    config = config or model_config(facts)
    attention = "eager" if path.attention == "eager" else "sdpa"
    model = meta_model(
        config, method, facts, dtype=path.weights, attention=attention, upcast=path.upcast, held=path.held,
        every=path.held_every,
    )  # fmt: skip
    _prepare(model, path)
    ledger = Ledger(cuda=path.device == "cuda", allocator=CachingAllocator() if path.device == "cuda" else None)
    watch = Watch(ledger, path, logits_of(facts) or Logits())
    _load(watch, model, path)
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    for parameter in trained.values():
        parameter.register_post_accumulate_grad_hook(lambda p: watch.rename(p.grad, "gradients"))
    watch.follow(model)
    apart = (
        documents(model, blocks=path.blocks, turned=path.turned) if path.attention == "documents" else nullcontext()
    )
    with apart, torch.device("meta"), traced(path, batch) as copies, watch:
        ids = torch.empty(batch.rows, batch.length, dtype=torch.long)
        if warm_up:
            _step(watch, model, trained, ids, batch, path, copies, first=True)
        else:
            _create_state(watch, trained, path)
            watch.take_workspaces()
        _step(watch, model, trained, ids, batch, path, copies, first=False)
    ledger.finish()
    result = Simulation(
        path, batch, ledger.peaks["load"].bytes, {name: ledger.peaks[name] for name in PHASES}, {}, (), 0,
        watch.operations, 0.0,
    )  # fmt: skip
    held = tuple(ledger.held(result.peak))
    return Simulation(
        path, batch, watch.resident, result.peaks, by_bucket(iter(held)), held,
        ledger.allocator.most_reserved if ledger.allocator else 0, watch.operations, time.process_time() - began,
    )  # fmt: skip


def _prepare(model: Any, path: Path) -> None:
    """What the trainer switches on."""
    if path.checkpointing:
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        enable = getattr(base, "activation_checkpointing_enable", None) or base.gradient_checkpointing_enable
        enable({"use_reentrant": False}, **({"every_n_layers": path.checkpointing} if path.checkpointing > 1 else {}))
    if path.input_grads:
        model.enable_input_require_grads()
    if path.grouped:
        attach(model)
    if path.lean:
        layers.attach(model)
    if path.last and not path.checkpointing:
        last.attach(model)
    if not path.adapter_casts:
        for module in model.modules():
            if hasattr(module, "cast_input_dtype_enabled"):
                module.cast_input_dtype_enabled = False


def _load(watch: Watch, model: Any, path: Path) -> None:
    """Enter the weights in the order in which loading allocates them, so that the allocator's pieces lie as there."""
    ledger, allocator = watch.ledger, watch.ledger.allocator
    base = [(name, p) for name, p in model.named_parameters() if "lora_" not in name]
    adapter = [(name, p) for name, p in model.named_parameters() if "lora_" in name]
    packed = {id(m.weight): m for m in model.modules() if next(constants_of(m), None) is not None}
    half: dict[int, Any] = {}
    if allocator is not None and packed:  # transformers allocates the model's size once and lets it go again
        sizes = (p.numel() if id(p) in packed else 2 * p.numel() for _, p in base)
        allocator.give(allocator.take(sum(sizes)))
    for name, parameter in base:
        if id(parameter) in packed:
            wide = allocator.take(4 * parameter.numel()) if allocator else None  # 16 bits a weight, before packing
            watch.enter(parameter, "weights", name)
            for constant in constants_of(packed[id(parameter)]):
                watch.enter(constant, "weights", "quantisation constants")
            if allocator is not None and wide is not None:
                allocator.give(wide)
        elif path.upcast and allocator is not None and packed:
            half[id(parameter)] = allocator.take(2 * parameter.numel())
        else:
            watch.enter(parameter, "weights", name)
    for name, parameter in base:
        if id(parameter) in half and allocator is not None:
            watch.enter(parameter, "weights", name)
            allocator.give(half[id(parameter)])
    for name, buffer in model.named_buffers():
        watch.enter(buffer, "weights", name)
    for name, parameter in adapter:
        watch.enter(parameter, "weights", name)
    watch.resident = ledger.live


def _step(
    watch: Watch, model: Any, trained: dict[str, torch.nn.Parameter], ids: torch.Tensor, batch: Batch, path: Path,
    copies: LowCopies, *, first: bool,
) -> None:  # fmt: skip
    """One optimizer step. On the first, the optimizer's state is created, as torch does, after the backward pass."""
    ledger = watch.ledger
    if path.accumulates:
        _forward_backward(watch, model, ids, batch, path, copies)
    output = _forward_backward(watch, model, ids, batch, path, copies)
    ledger.begin("optimizer")
    if first:
        _create_state(watch, trained, path)
    ledger.passing(step_temporaries(path, [(name, tuple(p.shape)) for name, p in trained.items()]), "optimizer step")
    for parameter in trained.values():
        parameter.grad = None
    del output


def _create_state(watch: Watch, trained: dict[str, torch.nn.Parameter], path: Path) -> None:
    """Moments on the device; paged ones lie in unified memory."""
    for name, parameter in trained.items():
        if path.device == "cuda" and is_paged(path.optimizer, parameter.numel()):
            continue
        for size in state_sizes(path.optimizer, name, tuple(parameter.shape)):
            watch.ledger.take(Block("optimizer", name, size))


def _forward_backward(
    watch: Watch, model: Any, ids: torch.Tensor, batch: Batch, path: Path, copies: LowCopies
) -> Any:
    watch.ledger.begin("forward")
    watch.bucket, watch.where = "activations", "forward"
    loss, output = _loss(model, ids, batch, path, copies, watch.logits)
    kept = output if path.keeps_output else None
    del output
    watch.ledger.begin("backward")
    watch.bucket, watch.where = "temporary", "backward of the loss"
    loss.backward()
    del loss
    return kept


class _Autocast:
    """A model as accelerate wraps it: autocast and its cache end with the forward pass, whose outputs become fp32."""

    def __init__(self, model: Any, copies: LowCopies) -> None:
        self.module, self.copies = model, copies

    def __call__(self, **inputs: Any) -> Any:
        from accelerate.utils import convert_outputs_to_fp32

        return convert_outputs_to_fp32(self._forward)(**inputs)

    def _forward(self, **inputs: Any) -> Any:
        with self.copies:
            return self.module(**inputs)


def _loss(
    model: Any, ids: torch.Tensor, batch: Batch, path: Path, copies: LowCopies, logits: Logits
) -> tuple[torch.Tensor, Any]:
    """The loss by the path's own head, and the output that the trainer may keep."""
    import torch

    inputs: dict[str, Any] = {"input_ids": ids, "labels": ids}
    if batch.flat:
        inputs["position_ids"] = ids
        if path.attention == "documents":  # how many there are makes no difference to the bytes
            inputs["cu_seq_lens_q"] = [0, batch.length]
    elif batch.padded:
        inputs["attention_mask"] = torch.empty(ids.shape, dtype=torch.long)
    if path.loss == "library":
        with copies:
            output = model(**inputs)
        return output.loss, output
    places = (torch.empty(batch.supervised, dtype=torch.long), torch.empty(batch.supervised, dtype=torch.long))
    wrapped = _Autocast(model, copies) if path.autocast else model
    if path.loss == "supervised":
        return supervised_loss(wrapped, inputs, batch.supervised, places), None
    if path.loss == "onepass":
        return onepass_loss(wrapped, inputs, batch.supervised, places, logits), None
    with copies:  # inside of the model's forward
        return _tiled_loss(model, inputs, places), None


def _tiled_loss(model: Any, inputs: dict[str, Any], places: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """TRL's loss head on the supervised positions, as its patched forward calls it."""
    from trl.kernels import ChunkedLogProbFunction
    from trl.trainer import utils

    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    labels = inputs.pop("labels")
    hidden = base.base_model(**inputs, use_cache=False).last_hidden_state[:, :-1]
    mask = labels[:, 1:] != -100
    text = base.config.get_text_config()
    head = base.get_output_embeddings()
    outputs = ChunkedLogProbFunction.apply(
        hidden[places], head.weight, head.bias, labels[:, 1:][places], 1.0, utils._CHUNKED_LOGPROB_CHUNK_SIZE,
        getattr(text, "final_logit_softcapping", None), 1.0, ("entropy", "is_top1"),
    )  # fmt: skip
    kept = [x.new_zeros(mask.shape).masked_scatter(mask, x) for x in outputs if x is not None]
    return cast("torch.Tensor", -kept[0].sum() / len(places[0]))


class Watch(TorchDispatchMode):
    """Sees each operation below autograd and keeps the ledger of storages."""

    def __init__(self, ledger: Ledger, path: Path, logits: Logits) -> None:
        super().__init__()
        self.ledger, self.path, self.logits = ledger, path, logits
        self.bucket, self.where = "weights", "load"
        self.operations = self.resident = 0
        self._live: dict[int, tuple[weakref.ref[Any], Block]] = {}
        self._handles: set[str] = set()

    def enter(self, tensor: Any, bucket: str, what: str) -> None:
        """Enter a tensor's storage if it is new."""
        storage = tensor.untyped_storage()
        known = self._live.get(id(storage))
        if (known is not None and known[0]() is storage) or not storage.nbytes():
            return
        block = Block(bucket, what, storage.nbytes(), tuple(tensor.shape), tensor.element_size())
        self.ledger.take(block, f"{what} in {self.where}")

        def gone(_: Any, key: int = id(storage)) -> None:
            entry = self._live.pop(key, None)
            if entry is not None:
                self.ledger.give(entry[1])

        self._live[id(storage)] = (weakref.ref(storage, gone), block)

    def rename(self, tensor: Any, bucket: str) -> None:
        """Put a tensor's block into another bucket."""
        entry = self._live.get(id(tensor.untyped_storage()))
        if entry is not None:
            entry[1].bucket = bucket

    def follow(self, model: Any) -> None:
        """Let hooks say which layer runs, and where the loss begins and ends."""
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        decoder = base.base_model
        for number, layer in enumerate(decoder.layers):
            layer.register_forward_pre_hook(lambda module, args, n=number: self._at(f"layer {n}"))
            layer.register_forward_hook(lambda module, args, out, n=number: self._back(out, f"backward of layer {n}"))
        decoder.register_forward_hook(lambda module, args, out: self._loss_begins(out))

    def _at(self, where: str) -> None:
        if self.bucket != "temporary":
            self.where = where

    def _back(self, out: Any, where: str) -> None:
        out = out[0] if isinstance(out, tuple) else out
        if out.requires_grad and self.bucket != "temporary":
            out.register_hook(lambda grad: setattr(self, "where", where))

    def _loss_begins(self, out: Any) -> None:
        self.bucket, self.where = "loss", "the loss"
        hidden = out.last_hidden_state
        if hidden.requires_grad:
            hidden.register_hook(lambda grad: self._loss_ends())

    def _loss_ends(self) -> None:
        self.bucket, self.where = "temporary", "backward of the last norm"

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        import torch
        from torch.utils._pytree import tree_leaves

        kwargs = kwargs or {}
        if function is torch.ops.prim.device.default:
            return function(*args, **kwargs)
        self.operations += 1
        name = function.name()
        cuda = self.path.device == "cuda"
        if cuda:
            self._workspace(name)
        if (reused := self._in_place(function, args)) is not None:
            return reused
        unpacks = name == "bitsandbytes::gemm_4bit" and not (cuda and fused_4_bit(self.path, args[0], args[2]))
        with self._beside(kernels.unpacked_weight(args, kwargs) if unpacks else []):
            out = function(*args, **kwargs)
            bucket = self.bucket
            if bucket == "temporary" and torch.is_grad_enabled():
                bucket = "activations"  # recomputed by checkpointing
            for tensor in tree_leaves(out):
                if isinstance(tensor, torch.Tensor):
                    self.enter(tensor, bucket, name)
        for together in kernels.inside(self.path, name, args):
            self.ledger.passing(together, f"{name} in {self.where}")
        return out

    @contextmanager
    def _beside(self, sizes: list[int]) -> Iterator[None]:
        """Bytes that a kernel allocates before its output and frees after it."""
        blocks = [self.ledger.take(Block("temporary", "kernel buffer", size)) for size in sizes]
        yield
        for block in blocks:
            self.ledger.give(block)

    def take_workspaces(self) -> None:
        """Those of cuBLAS, which an earlier step would have taken."""
        if self.path.device == "cuda":
            for thread in ("forward", "backward"):
                self._take_workspace(thread)

    def _workspace(self, name: str) -> None:
        """cuBLAS takes a workspace at the first product of each thread, and keeps it; backward has its own thread."""
        if name in kernels.PRODUCTS:
            self._take_workspace("backward" if self.ledger.phase == "backward" else "forward")

    def _take_workspace(self, thread: str) -> None:
        if thread not in self._handles:
            self._handles.add(thread)
            self.ledger.take(Block("workspace", f"cuBLAS, {thread} thread", kernels.cublas_workspace(self.path)))

    def _in_place(self, function: Any, args: Any) -> Any:
        """Autograd adds a second gradient to the first in place when nobody else holds the first and it is no view.
        A dispatch mode keeps it from that (torch/csrc/autograd/input_buffer.cpp): a trace sees one tensor too many.

        The first one's count is then 4: the engine's buffer, this call's arguments, and two of torch's own while it
        calls Python.
        """
        import torch

        if function is not torch.ops.aten.add.Tensor or self.ledger.phase != "backward" or torch.is_grad_enabled():
            return None
        first, second = args[0], args[1]
        if not isinstance(second, torch.Tensor) or first.shape != second.shape or first.dtype != second.dtype:
            return None
        if first._use_count() != 4 or first._is_view() or not first.is_contiguous():
            return None
        self.ledger.passing([0], "gradients added in place")
        return first
