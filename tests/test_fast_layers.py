"""RMS norms and gated MLPs that keep little: transformers' numbers, and transformers' own code for all others."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch.nn.functional import cross_entropy

from finetune.fast import adapter, layers
from finetune.fast.again import made_from, what_to_keep
from finetune.fast.attention import documents
from tests.test_fast_adapter import (
    IDS,
    another,
    base,
    both,
    copied,
    distance,
    generated,
    gradients,
    in_4_bits,
    inferred,
    merged,
    mixed,
    switched_off,
    under_autocast,
    unpacked,
    whole,
    wrapped,
)

FAMILIES = ("llama", "qwen2", "mistral", "gemma", "gemma2")
NORMS = {"llama": 7, "qwen2": 7, "mistral": 7, "gemma": 7, "gemma2": 13}  # 2 a layer (Gemma 2: 4), and the last
QWEN3 = 13  # norms of queries and keys as well
BOTH = IDS, torch.randint(1, 128, (2, 24), generator=torch.Generator().manual_seed(2))


@pytest.fixture(autouse=True)
def _short_rows_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter, "FEW_TOKENS", 1)


def started(kind: str = "llama", dtype: torch.dtype = torch.float32, **fields: Any) -> Any:
    """A model whose norms scale every number by another weight."""
    model = base(kind, dtype, **fields)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data += 0.3 * torch.randn(parameter.shape).to(dtype)
    return model


def attached(model: Any) -> Any:
    adapter.attach(model)
    layers.attach(model)
    return model


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How often the functions ran forward, without the trial of each kind of norm."""
    counts = {"norm": 0, "mlp": 0}
    find = layers._norm_of

    def tried(module: Any) -> Any:
        before = counts["norm"]
        made = find(module)
        counts["norm"] = before
        return made

    monkeypatch.setattr(layers, "_norm_of", tried)
    for name, function in (("norm", layers._Norm), ("mlp", layers._MLP)):

        def watched(*args: Any, name: str = name, apply: Any = function.apply) -> Any:
            counts[name] += 1
            return apply(*args)

        monkeypatch.setattr(function, "apply", watched)
    return counts


# ------------------------------------------------------------------------------------------------------------ numbers


def accumulated(model: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The logits of two micro-batches, and the gradient that both add up to."""
    model.zero_grad(set_to_none=True)
    outs = []
    for ids in BOTH:
        logits = model(input_ids=ids, use_cache=False).logits
        cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="sum").div(92).backward()
        outs.append(logits.detach())
    return torch.cat(outs), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", FAMILIES)
def test_outputs_and_gradients_are_transformers(kind: str, tied: bool, calls: dict[str, int]) -> None:
    model = wrapped(started(kind, tie_word_embeddings=tied))
    right, right_grads = accumulated(model)
    adapter.attach(model)
    assert layers.attach(model) == (NORMS[kind], 3)
    found, grads = accumulated(model)
    assert calls == {"norm": 2 * NORMS[kind], "mlp": 2 * 3}
    assert (found - right).norm() < 1e-5 * right.norm()
    assert len(grads) == 3 * 7 * 2
    assert distance(grads, right_grads) < 1e-5


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_recomputing_changes_nothing(kind: str, every: int, calls: dict[str, int]) -> None:
    model = wrapped(started(kind))
    _, right = accumulated(model)
    attached(model)
    inner = model.get_base_model()
    enable = getattr(inner, "activation_checkpointing_enable", None) or inner.gradient_checkpointing_enable
    enable({"use_reentrant": False, **({"every_n_layers": every} if every > 1 else {})})
    assert distance(accumulated(model)[1], right) < 1e-5
    assert calls["mlp"] == 2 * (3 + 3)  # every layer twice, by itself or with its neighbour


def test_families_with_norms_of_queries_and_keys(calls: dict[str, int]) -> None:
    model = wrapped(started("qwen3"))
    right, right_grads = accumulated(model)
    adapter.attach(model)
    assert layers.attach(model) == (QWEN3, 3)
    found, grads = accumulated(model)
    assert calls == {"norm": 2 * QWEN3, "mlp": 6}
    assert (found - right).norm() < 1e-5 * right.norm()
    assert distance(grads, right_grads) < 1e-5


@pytest.mark.parametrize(
    "config",
    [
        {"target_modules": ["q_proj", "v_proj"]},
        {"target_modules": ["up_proj"]},
        {"target_modules": ["down_proj", "gate_proj"]},
        {"rank_pattern": {"gate_proj": 3, "down_proj": 5}, "alpha_pattern": {"up_proj": 4}},
        {"layers_to_transform": [1], "target_modules": ["v_proj", "gate_proj", "down_proj"]},
    ],
)
def test_any_plain_lora_has_transformers_gradients(config: dict[str, Any], calls: dict[str, int]) -> None:
    """Adapters on some layers, or of other ranks."""
    model = wrapped(started(), **config)
    _, right = accumulated(model)
    assert distance(accumulated(attached(model))[1], right) < 1e-5
    assert calls["mlp"] == 2 * 3


def test_biases_are_added(calls: dict[str, int]) -> None:
    model = wrapped(started("llama", mlp_bias=True, attention_bias=True))
    _, right = accumulated(model)
    assert distance(accumulated(attached(model))[1], right) < 1e-5
    assert calls == {"norm": 14, "mlp": 6}


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_under_autocast_they_are_as_exact_as_transformers(kind: str, dtype: torch.dtype) -> None:
    model = wrapped(started(kind, dtype))
    _, right = gradients(copy.deepcopy(model).double())
    _, stock = gradients(model, low=True)
    _, mine = gradients(attached(model), low=True)
    assert {gradient.dtype for gradient in mine.values()} == {torch.float32}
    assert whole(mine, right) < 1.2 * whole(stock, right)


@pytest.mark.parametrize("low", [False, True])
def test_4_bit_gradients_are_those_of_the_unpacked_weights(low: bool, calls: dict[str, int]) -> None:
    dtype = torch.bfloat16 if low else torch.float32
    packed = in_4_bits(started("llama", dtype), dtype)
    dense = wrapped(unpacked(packed))
    model = wrapped(packed)
    _, right = gradients(copy.deepcopy(dense).double())
    _, stock = gradients(model, low=low)
    _, mine = gradients(attached(model), low=low)
    assert calls == {"norm": 7, "mlp": 3}
    assert whole(mine, right) < 1.2 * whole(stock, right) if low else distance(mine, right) < 1e-5


# ---------------------------------------------------------------------------------------------------- the functions


def norms() -> list[Any]:
    from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
    from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
    from transformers.models.llama.modeling_llama import LlamaRMSNorm
    from transformers.models.mistral.modeling_mistral import MistralRMSNorm
    from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

    torch.manual_seed(0)
    found = [kind(12, eps=1e-5) for kind in (LlamaRMSNorm, Qwen2RMSNorm, MistralRMSNorm, GemmaRMSNorm, Gemma2RMSNorm)]
    for norm in found:
        torch.nn.init.normal_(norm.weight).requires_grad_(False)
    return found


def test_a_norm_by_hand() -> None:
    """3 and 4: a mean square of 12.5, which eps makes 16, so r is 1/4."""
    x, weight = torch.tensor([[3.0, 4.0]]), torch.tensor([2.0, -1.0])
    y, root = layers._Norm.apply(x, weight, 3.5, False)  # type: ignore[no-untyped-call]
    assert (y.tolist(), root.tolist()) == ([[1.5, -1.0]], [[0.25]])
    y, _ = layers._Norm.apply(x, weight, 3.5, True)  # type: ignore[no-untyped-call]
    assert y.tolist() == [[2.25, 0.0]]


@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
def test_norms_have_the_bits_of_transformers(given: torch.dtype, weights: torch.dtype, calls: dict[str, int]) -> None:
    """Outputs are equal, in value and type, and so is what is made of them again; gradients are within rounding."""
    x = 3 * torch.randn(2, 9, 12, generator=torch.Generator().manual_seed(1))
    for norm in norms():
        norm.to(weights)
        inputs = [x.to(given).clone().requires_grad_() for _ in range(2)]
        right = norm(inputs[0])
        assert layers.attach(norm) == (1, 0)
        found = norm(inputs[1])
        assert found.dtype == right.dtype
        assert torch.equal(found, right)
        again = what_to_keep(found, None)
        assert torch.equal(again.make(*again.sources), right)
        for out in (right, found):
            out.float().sin().sum().backward()
        close = 1e-5 if given == right.dtype == torch.float32 else 2**-7
        grad, right_grad = inputs[1].grad, inputs[0].grad
        assert grad is not None
        assert right_grad is not None
        assert (grad.float() - right_grad.float()).norm() < close * right_grad.float().norm()
    assert calls["norm"] == 5


@pytest.mark.parametrize("one_plus", [False, True])
@pytest.mark.parametrize("shape", [(4, 5), (2, 3, 5), (1, 2, 2, 5)])
def test_a_norm_s_derivatives_are_right(one_plus: bool, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(shape, dtype=torch.float64, requires_grad=True), torch.randn(5, dtype=torch.float64)

    def run(x: torch.Tensor) -> Any:
        return layers._Norm.apply(x, weight, 1e-3, one_plus)[0]  # type: ignore[no-untyped-call]

    assert torch.autograd.gradcheck(run, (x,))


def small_mlp(adapted: list[str], act: Any = None) -> Any:
    torch.manual_seed(0)

    class SmallMLP(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_proj, self.up_proj = torch.nn.Linear(5, 7, bias=False), torch.nn.Linear(5, 7)
            self.down_proj, self.act_fn = torch.nn.Linear(7, 4), act or torch.nn.SiLU()

        def forward(self, x: Any) -> Any:
            return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))

    model = SmallMLP().requires_grad_(False)
    if adapted:
        ranks = {"up_proj": 3} if "up_proj" in adapted else {}
        config = LoraConfig(r=2, lora_alpha=6, target_modules=adapted, rank_pattern=ranks)
        model = get_peft_model(model, config).get_base_model()
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.5)
    return model


@pytest.mark.parametrize("gelu", [False, True])
@pytest.mark.parametrize("needs_x", [False, True])
@pytest.mark.parametrize(
    "adapted", [["gate_proj", "up_proj", "down_proj"], ["gate_proj"], ["up_proj"], ["down_proj"], []]
)
def test_an_mlp_s_derivatives_are_right(adapted: list[str], gelu: bool, needs_x: bool) -> None:
    if not (adapted or needs_x):
        pytest.skip("nothing has a gradient")
    act = torch.nn.GELU(approximate="tanh") if gelu else torch.nn.SiLU()
    model = small_mlp(adapted, act).double()
    pair, last = [model.gate_proj, model.up_proj], [model.down_proj]
    halves = [*adapter.adapters_of(pair), *adapter.adapters_of(last)]
    assert len(halves) == 2 * len(adapted)

    def run(x: torch.Tensor, *halves: torch.Tensor) -> Any:
        of = adapter.Linears.of
        return layers._MLP.apply(x, None, gelu, of(pair), of(last), *halves)  # type: ignore[no-untyped-call]

    x = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=needs_x)
    torch.testing.assert_close(run(x, *halves), model(x), rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradcheck(run, (x, *halves))


# ------------------------------------------------------------------------------------------------------------- notes


def test_a_note_holds_until_its_tensor_changes() -> None:
    x = torch.tensor([1.0, 2.0])
    y = made_from(x * 3, lambda x: x * 3, x)
    kept = what_to_keep(y, y)
    assert kept.sources == (x,)
    assert torch.equal(kept.make(*kept.sources), y)
    assert what_to_keep(y + 0, y).sources == (y,)  # another tensor, without a note
    y.add_(1)
    kept = what_to_keep(y, y)
    assert (kept.sources, kept.make(*kept.sources)) == ((y,), y)


def test_a_norm_s_output_may_be_changed_before_an_adapter_reads_it() -> None:
    class Changes(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.q_proj = norms()[0], torch.nn.Linear(12, 6)

        def forward(self, x: Any) -> Any:
            return self.q_proj(self.norm(x).add_(x))

    block = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([Changes()])})
    model = get_peft_model(block, LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    x = torch.randn(5, 12)
    grads = []
    for prepare in (lambda model: model, attached):
        layer = prepare(model).get_base_model()["layers"][0]
        layer(x).sin().sum().backward()
        grads.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        model.zero_grad()
    for right, found in zip(*grads, strict=True):
        torch.testing.assert_close(found, right)


# --------------------------------------------------------------------------------------------------- whose turn it is


def test_trained_norms_keep_transformers_forward(calls: dict[str, int]) -> None:
    """Those before the MLPs are trained here, the others are not."""
    model = wrapped(started())
    for name, parameter in model.named_parameters():
        if "post_attention_layernorm" in name:
            parameter.requires_grad_(True)
    _, right = accumulated(model)
    assert sum("norm" in name for name in right) == 3
    _, found = accumulated(attached(model))
    assert calls["norm"] == 2 * 4
    assert distance(found, right) < 1e-5


def test_norms_that_peft_trains_beside_the_adapters(calls: dict[str, int]) -> None:
    """It keeps the frozen norm and trains a copy."""
    model = wrapped(started(), modules_to_save=["model.norm"])
    _, right = accumulated(model)
    _, found = accumulated(attached(model))
    assert any(name.endswith("modules_to_save.default.weight") for name in right)
    assert distance(found, right) < 1e-5
    assert calls["norm"] == 2 * 6


def test_trained_layers_of_an_mlp_keep_transformers_forward(calls: dict[str, int]) -> None:
    model = wrapped(started(), target_modules=["q_proj", "down_proj"])
    model.get_base_model().model.layers[1].mlp.up_proj.weight.requires_grad_(True)
    _, right = accumulated(model)
    _, found = accumulated(attached(model))
    assert calls["mlp"] == 2 * 2
    assert distance(found, right) < 1e-5


def test_without_gradients_transformers_code_runs(calls: dict[str, int]) -> None:
    model = attached(wrapped(started()))
    with torch.no_grad():
        model(IDS)
    assert calls == {"norm": 0, "mlp": 0}


class HalvedRMSNorm(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = torch.nn.Parameter(torch.ones(4)), 1e-6

    def forward(self, x: Any) -> Any:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) / 2


class GatedRMSNorm(HalvedRMSNorm):
    def forward(self, x: Any, gate: Any) -> Any:  # type: ignore[override]
        return super().forward(x) * gate


class EndlessRMSNorm(HalvedRMSNorm):
    def __init__(self) -> None:
        super().__init__()
        del self.eps


class PlainRMSNorm(HalvedRMSNorm):
    def __init__(self) -> None:
        super().__init__()
        del self.weight


class ClampedMLP(torch.nn.Module):
    def __init__(self, act: Any = None) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = (torch.nn.Linear(4, 4) for _ in range(3))
        self.act_fn = act or torch.nn.SiLU()

    def forward(self, x: Any) -> Any:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x).clamp(max=1))


class RoutedMLP(ClampedMLP):
    def forward(self, x: Any, weights: Any) -> Any:  # type: ignore[override]
        return super().forward(x) * weights


@pytest.mark.parametrize(
    "make",
    [
        HalvedRMSNorm, GatedRMSNorm, EndlessRMSNorm, PlainRMSNorm, ClampedMLP, RoutedMLP,
        lambda: torch.nn.LayerNorm(4), lambda: small_mlp([], torch.nn.ReLU()), lambda: small_mlp([], torch.nn.GELU()),
    ],
)  # fmt: skip
def test_what_computes_something_else_keeps_its_own_forward(make: Callable[[], Any]) -> None:
    module = make()
    assert layers.attach(torch.nn.Sequential(module)) == (0, 0)
    assert "forward" not in vars(module)


def test_each_kind_is_judged_by_itself() -> None:
    """One model with norms of two eps and MLPs of two activations beside one that is unknown."""
    first, second = norms()[0], norms()[0]
    second.variance_epsilon = 0.5
    parts = [first, second, HalvedRMSNorm(), small_mlp([]), small_mlp([], torch.nn.GELU(approximate="tanh"))]
    x = torch.randn(3, 12)
    right = [norm(x) for norm in parts[:2]]
    assert layers.attach(torch.nn.ModuleList(parts)) == (2, 2)
    for norm, expected in zip(parts[:2], right, strict=True):
        assert torch.equal(norm(x), expected)
    assert parts[4].forward.gelu
    assert not parts[3].forward.gelu


def test_layers_with_hooks_are_called(calls: dict[str, int]) -> None:
    """peft tells layers by hooks which adapter each row takes; others look at activations or gradients."""
    model = small_mlp(["gate_proj"])
    layers.attach(model)
    x, seen = torch.randn(3, 5, requires_grad=True), []
    right = model(x)
    assert calls["mlp"] == 1
    for register in ("forward_pre_hook", "forward_hook", "full_backward_hook", "full_backward_pre_hook"):
        hook = getattr(model.up_proj, f"register_{register}")(lambda *_: seen.append(1))
        torch.testing.assert_close(model(x), right)
        model(x).sum().backward()
        hook.remove()
    assert len(seen) == 2 * 2 + 1 + 1
    assert calls["mlp"] == 1
    model(x)
    assert calls["mlp"] == 2


def test_few_tokens_are_not_worth_it(monkeypatch: pytest.MonkeyPatch, calls: dict[str, int]) -> None:
    monkeypatch.setattr(adapter, "FEW_TOKENS", 7)
    model = small_mlp(["up_proj"])
    layers.attach(model)
    model(torch.randn(2, 3, 5))
    assert calls["mlp"] == 0
    model(torch.randn(1, 7, 5))
    assert calls["mlp"] == 1


def test_attaching_draws_no_random_numbers_and_changes_no_name() -> None:
    model = wrapped(started())
    names = [name for name, _ in model.named_modules()], [name for name, _ in model.named_parameters()]
    values = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(7)
    before = torch.random.get_rng_state()
    attached(model)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert ([name for name, _ in model.named_modules()], [name for name, _ in model.named_parameters()]) == names
    assert list(model.state_dict()) == list(values)
    assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())


def test_files_are_pefts(tmp_path: Path) -> None:
    model = attached(wrapped(started()))
    accumulated(model)
    model.save_pretrained(tmp_path)
    plain: Any = PeftModel.from_pretrained(started(), str(tmp_path)).eval()
    loaded = attached(PeftModel.from_pretrained(started(), str(tmp_path), is_trainable=True))
    right = plain(IDS).logits
    torch.testing.assert_close(model(IDS).logits, right, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(loaded(IDS).logits, right, rtol=1e-5, atol=1e-5)
    united = model.merge_and_unload()
    assert list(united.state_dict()) == list(started().state_dict())
    torch.testing.assert_close(united(IDS).logits, right, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "run", [switched_off, merged, another, both, mixed, generated, inferred, copied, under_autocast]
)
def test_every_other_use_of_the_model_is_pefts(run: Callable[[Any], Any]) -> None:
    model = wrapped(started())
    right = run(model).detach()
    after = model.train()(IDS).logits.detach()
    model = attached(wrapped(started()))
    torch.testing.assert_close(run(model).detach(), right, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(model.train()(IDS).logits.detach(), after, rtol=1e-4, atol=1e-4)


# ------------------------------------------------------------------------------------------------------------- memory


def kept(model: Any, tokens: int, *, apart: bool = False) -> int:
    """Bytes that the backward pass keeps beside the parameters, every storage counted once."""
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    found: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if (place := tensor.untyped_storage().data_ptr()) not in own:
            found[place] = tensor
        return tensor

    inputs: dict[str, Any] = {"input_ids": torch.arange(1, tokens + 1)[None], "use_cache": False}
    if apart:
        inputs["cu_seq_lens_q"] = torch.tensor([0, tokens // 2, tokens])
        inputs["position_ids"] = torch.cat([torch.arange(tokens // 2)] * 2)[None]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(**inputs)
    return sum(tensor.untyped_storage().nbytes() for tensor in found.values())


@pytest.mark.parametrize("kind", ["llama", "gemma"])
def test_what_a_layer_keeps_of_a_token(kind: str) -> None:
    """hidden 64, MLP 96, 4 heads of 16 over 2 of keys and values, adapters of rank 8 on all seven layers."""
    attention = 64 + 32 + 32 + 64 + 4  # q, k and v turned; out, sums
    narrow = 7 * 8  # A x of each adapter
    norm = 64 + 1  # what it takes in, and the root
    mine = 2 * norm + attention + narrow + 2 * 96  # gate and up
    # Beside those, what adapters read: the outputs of both norms, act(gate) and its product with up.
    stock = mine + 2 * 64 + 2 * 96
    for floats, prepare in ((mine, attached), (stock, lambda model: model)):
        sizes = []
        for count in (2, 3):
            model = prepare(wrapped(started(kind, layers=count, attn_implementation="sdpa")))
            with documents(model) if prepare is attached else nullcontext():
                sizes.append(kept(model, 40, apart=prepare is attached))
        # The weight of Gemma's norms is added to 1, in a tensor of its own.
        own = 2 * 64 if kind == "gemma" and prepare is not attached else 0
        assert sizes[1] - sizes[0] == 4 * (40 * floats + own)
