"""Adapters that share an input: peft's numbers and names, and peft's own code wherever they are not plain LoRA."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from finetune.fast import adapter
from finetune.fast.adapter import attach

IDS = torch.randint(1, 128, (2, 24), generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def _short_rows_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter, "FEW_TOKENS", 1)


FAMILIES = ("llama", "gemma2", "qwen2", "phi3", "mistral")


def base(kind: str = "llama", dtype: torch.dtype = torch.float32, layers: int = 3, **fields: Any) -> Any:
    torch.manual_seed(0)
    usual: dict[str, Any] = {"attn_implementation": "eager", "intermediate_size": 96}
    config = AutoConfig.for_model(
        kind, hidden_size=64, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, vocab_size=128, bos_token_id=1, eos_token_id=2, pad_token_id=0,
        **{**usual, **fields},
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):  # Qwen's start at zero
            torch.nn.init.normal_(parameter, std=0.1)
    return model.to(dtype)


def wrapped(model: Any, **config: Any) -> Any:
    usual: dict[str, Any] = {"r": 8, "lora_alpha": 16, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
    torch.manual_seed(1)
    model = get_peft_model(model, LoraConfig(**{**usual, **config}))
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    return model.train()


def in_4_bits(model: Any, compute: torch.dtype) -> Any:
    import bitsandbytes as bnb

    for name, layer in list(model.named_modules()):
        if isinstance(layer, torch.nn.Linear) and name != "lm_head":
            packed = bnb.nn.Linear4bit(
                layer.in_features, layer.out_features, bias=layer.bias is not None, compute_dtype=compute,
                quant_type="nf4",
            )  # fmt: skip
            packed.weight = bnb.nn.Params4bit(layer.weight.data, requires_grad=False, **vars(packed.weight))
            packed.bias = layer.bias
            packed.to("cpu")
            packed.support_avx512bf16_for_cpu = False
            setattr(model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2], packed)
    model.is_loaded_in_4bit = model.is_quantized = True
    return model


def unpacked(model: Any) -> Any:
    """The same model with its 4-bit weights as dense ones."""
    from bitsandbytes.functional import dequantize_4bit

    model = copy.deepcopy(model)
    for name, layer in list(model.named_modules()):
        if type(layer).__name__ == "Linear4bit" and hasattr(layer, "compute_dtype"):
            dense = torch.nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None)
            dense.weight = torch.nn.Parameter(dequantize_4bit(layer.weight.data, layer.weight.quant_state))
            dense.bias = layer.bias
            setattr(model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2], dense)
    model.is_loaded_in_4bit = model.is_quantized = False
    return model


def gradients(model: Any, *, low: bool = False) -> tuple[float, dict[str, torch.Tensor]]:
    model.zero_grad(set_to_none=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=low):
        loss = model(input_ids=IDS, labels=IDS, use_cache=False).loss
    loss.backward()
    return loss.item(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def distance(found: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    """The worst relative error of a gradient."""
    assert found.keys() == right.keys()
    return max(float((found[n].double() - right[n].double()).norm() / right[n].double().norm()) for n in right)


def whole(found: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    """The relative error of all gradients as one vector."""
    off = sum(float((found[n].double() - right[n].double()).square().sum()) for n in right)
    return (off / sum(float(right[n].double().square().sum()) for n in right)) ** 0.5


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many outputs each call of the function gives, one for each layer that it serves."""
    calls: list[int] = []
    apply = adapter._Together.apply

    def watched(*args: Any) -> Any:
        outputs = apply(*args)  # type: ignore[no-untyped-call]
        calls.append(len(outputs))
        return outputs

    with monkeypatch.context() as patch:
        patch.setattr(adapter._Together, "apply", watched)
        yield calls


# ------------------------------------------------------------------------------------------------------------ numbers


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj"], ["down_proj"]])
def test_whose_forward_pass_may_sum_in_another_order(targets: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not queries, keys and values, and not the long sums of a down projection; with an adapter or without."""
    model = wrapped(base(layers=1, intermediate_size=1100), target_modules=targets)
    names = {id(adapter.base_of(m).weight): n for n, m in model.named_modules() if n.endswith("_proj")}
    seen: list[str] = []

    def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        seen.append(names[id(weight)].rpartition(".")[2])
        return x @ weight.t()

    monkeypatch.setattr(adapter, "product", product)
    attach(model)
    gradients(model)
    assert sorted(seen) == ["gate_proj", "o_proj", "up_proj"]


@pytest.mark.parametrize("packed", [False, True])
def test_its_derivatives_are_right(packed: bool) -> None:
    torch.manual_seed(0)
    model: Any = torch.nn.Module()
    for name, out in (("q_proj", 64), ("k_proj", 32), ("v_proj", 32)):
        setattr(model, name, torch.nn.Linear(64, out, bias=name == "q_proj"))
    if packed:
        model = in_4_bits(model, torch.float32)
        dense = unpacked(model)
    wide = get_peft_model(model, LoraConfig(r=2, lora_alpha=8, target_modules=["q_proj", "k_proj", "v_proj"]))
    for name, parameter in wide.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    x = torch.randn(3, 64)
    if packed:  # against the dense copy, whose derivatives the other case has shown to be right
        other = get_peft_model(dense, LoraConfig(r=2, lora_alpha=8, target_modules=["q_proj", "k_proj", "v_proj"]))
        other.load_state_dict(
            {name: value for name, value in wide.state_dict().items() if "lora_" in name}, strict=False
        )
        for inner in (wide, other):
            attach(inner)
        given = [x.clone().requires_grad_() for _ in range(2)]
        for inner, value in zip((wide, other), given, strict=True):
            layers = inner.get_base_model()
            (layers.q_proj(value).sin().sum() + (layers.k_proj(value) * layers.v_proj(value)).sum()).backward()
        torch.testing.assert_close(given[0].grad, given[1].grad, rtol=1e-5, atol=1e-5)
        right = dict(other.named_parameters())
        for name, parameter in wide.named_parameters():
            if parameter.requires_grad:
                torch.testing.assert_close(parameter.grad, right[name].grad, rtol=1e-5, atol=1e-5)
        return
    wide.double()
    layers = [getattr(wide.get_base_model(), name) for name in ("q_proj", "k_proj", "v_proj")]
    adapters = [*(part.lora_A["default"].weight for part in layers), *(p.lora_B["default"].weight for p in layers)]

    def run(x: torch.Tensor, *weights: torch.Tensor) -> Any:
        return adapter._Together.apply(x, None, adapter.Linears.of(layers), *weights)  # type: ignore[no-untyped-call]

    assert torch.autograd.gradcheck(run, (x.double().requires_grad_(), *adapters))


@pytest.mark.parametrize("adapted", [["k_proj"], ["q_proj", "v_proj"], []])
def test_its_derivatives_are_right_with_frozen_layers_beside_it(adapted: list[str]) -> None:
    torch.manual_seed(0)
    model: Any = torch.nn.Module()
    for name, out in (("q_proj", 5), ("k_proj", 3), ("v_proj", 3)):
        setattr(model, name, torch.nn.Linear(6, out, bias=name == "q_proj"))
    model.requires_grad_(False)
    if adapted:
        model = get_peft_model(model, LoraConfig(r=2, lora_alpha=6, target_modules=adapted)).get_base_model()
    model.double()
    layers = [model.q_proj, model.k_proj, model.v_proj]
    halves = adapter.adapters_of(layers)
    assert len(halves) == 2 * len(adapted)
    for half in halves:
        torch.nn.init.normal_(half, std=0.3)

    def run(x: torch.Tensor, *weights: torch.Tensor) -> Any:
        return adapter._Together.apply(x, None, adapter.Linears.of(layers), *weights)  # type: ignore[no-untyped-call]

    x = torch.randn(2, 2, 6, dtype=torch.float64, requires_grad=True)
    for found, layer in zip(run(x, *halves), layers, strict=True):
        torch.testing.assert_close(found, layer(x), rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradcheck(run, (x, *halves))


@pytest.mark.parametrize("kind", FAMILIES)
def test_gradients_are_pefts_in_fp32(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = wrapped(base(kind))
    loss, right = gradients(model)
    assert attach(model) == (12 if kind == "phi3" else 21)
    with counted(monkeypatch) as calls:
        found, mine = gradients(model)
    # The first call serves q, k and v (phi3 has one product for them), then o, then gate and up, then down.
    assert calls == ([1, 1, 1, 1] if kind == "phi3" else [3, 1, 2, 1]) * 3
    assert found == pytest.approx(loss, rel=1e-6)
    assert distance(mine, right) < 1e-5


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_under_autocast_they_are_as_exact_as_pefts(kind: str, dtype: torch.dtype) -> None:
    model = wrapped(base(kind, dtype))
    _, right = gradients(copy.deepcopy(model).double())
    _, stock = gradients(model, low=True)
    attach(model)
    _, mine = gradients(model, low=True)
    assert {gradient.dtype for gradient in mine.values()} == {torch.float32}
    assert whole(mine, right) < 1.2 * whole(stock, right)


@pytest.mark.parametrize("low", [False, True])
def test_4_bit_gradients_are_those_of_the_unpacked_weights(low: bool) -> None:
    dtype = torch.bfloat16 if low else torch.float32
    packed = in_4_bits(base("qwen2", dtype), dtype)
    dense = wrapped(unpacked(packed))
    model = wrapped(packed)
    _, right = gradients(copy.deepcopy(dense).double())
    _, stock = gradients(model, low=low)
    assert attach(model) == 21
    _, mine = gradients(model, low=low)
    if low:
        assert whole(mine, right) < 1.2 * whole(stock, right)
    else:
        assert distance(mine, right) < 1e-5
        assert distance(mine, stock) < 1e-5


@pytest.mark.parametrize(
    "config",
    [
        {"target_modules": ["q_proj", "v_proj"]},
        {"target_modules": ["k_proj", "down_proj", "gate_proj"]},
        {"rank_pattern": {"k_proj": 3, "up_proj": 5}, "alpha_pattern": {"v_proj": 4}},
        {"use_rslora": True},
        {"layers_to_transform": [1], "target_modules": ["q_proj", "k_proj", "down_proj"]},
        {"target_modules": ["q_proj", "v_proj"], "modules_to_save": ["lm_head"]},
    ],
)
def test_any_plain_lora_has_pefts_gradients(config: dict[str, Any]) -> None:
    model = wrapped(base(), **config)
    _, right = gradients(model)
    assert attach(model) > 0
    assert distance(gradients(model)[1], right) < 1e-5


@pytest.mark.parametrize(
    ("config", "adapters", "served"),
    [
        # Frozen layers join the call of those that read the same input, and run alone where none does.
        ({"target_modules": ["q_proj", "v_proj"]}, 6, [3, 1, 2, 1] * 3),
        ({"target_modules": ["down_proj"]}, 3, [3, 1, 2, 1] * 3),
        # Layers without any adapter stay torch's.
        ({"layers_to_transform": [1], "target_modules": ["q_proj"]}, 1, [3, 1, 2, 1]),
    ],
)
def test_frozen_layers_join_the_adapters_beside_them(
    config: dict[str, Any], adapters: int, served: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = wrapped(base(), **config)
    assert attach(model) == adapters
    with counted(monkeypatch) as calls:
        gradients(model)
    assert calls == served


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("inputs", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputing_changes_nothing(every: int, inputs: bool, reentrant: bool) -> None:
    model = wrapped(base())
    _, right = gradients(model)
    attach(model)
    if reentrant and (every > 1 or not inputs):
        pytest.skip("transformers offers every_n_layers and no inputs' gradients without reentrant checkpoints only")
    options = {"every_n_layers": every} if every > 1 else {}
    inner = model.get_base_model()
    enable = getattr(inner, "activation_checkpointing_enable", None) or inner.gradient_checkpointing_enable
    enable({"use_reentrant": reentrant, **options})
    if inputs:
        model.enable_input_require_grads()
    for _ in range(2):
        assert distance(gradients(model)[1], right) < 1e-5


@pytest.mark.parametrize(("low", "close"), [(False, 1e-5), (True, 1e-3)])
def test_thirty_steps_have_pefts_losses(low: bool, close: float) -> None:
    curves: list[list[float]] = []
    for fast in (False, True):
        model = wrapped(base("llama", torch.bfloat16 if low else torch.float32))
        if fast:
            attach(model)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
        curve = []
        for _ in range(30):
            for _ in range(2):  # accumulated
                with torch.autocast("cpu", torch.bfloat16, enabled=low):
                    loss = model(input_ids=IDS, labels=IDS, use_cache=False).loss
                (loss / 2).backward()
            optimizer.step()
            optimizer.zero_grad()
            curve.append(loss.item())
        curves.append(curve)
    assert curves[0][-1] < 0.9 * curves[0][0]
    assert sum(curves[1]) == pytest.approx(sum(curves[0]), rel=close)
    assert curves[1][-1] == pytest.approx(curves[0][-1], rel=5 * close)


# ---------------------------------------------------------------------------------------------- whose turn it is


def test_names_and_files_are_pefts(tmp_path: Path) -> None:
    model = wrapped(base())
    names = [name for name, _ in model.named_modules()], list(model.state_dict())
    attach(model)
    assert ([name for name, _ in model.named_modules()], list(model.state_dict())) == names
    model.save_pretrained(tmp_path)
    plain: Any = PeftModel.from_pretrained(base(), str(tmp_path)).eval()
    with torch.no_grad():
        found, right = model.eval()(IDS).logits, plain(IDS).logits
    torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-5)
    merged = model.merge_and_unload()
    with torch.no_grad():
        torch.testing.assert_close(merged(IDS).logits, right, rtol=1e-4, atol=1e-4)


def switched_off(model: Any) -> Any:
    with model.disable_adapter():
        return model(IDS).logits


def merged(model: Any) -> Any:
    model.merge_adapter()
    out = model(IDS).logits
    model.unmerge_adapter()
    return out


def another(model: Any) -> Any:
    if "other" not in model.peft_config:
        torch.manual_seed(5)
        model.add_adapter("other", LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
        for name, parameter in model.named_parameters():
            if "lora_B.other" in name:
                torch.nn.init.normal_(parameter, std=0.05)
    model.set_adapter("other")
    out = model(IDS).logits
    model.set_adapter("default")
    return out


def both(model: Any) -> Any:
    another(model)
    model.base_model.set_adapter(["default", "other"])
    out = model(IDS).logits
    model.set_adapter("default")
    return out


def mixed(model: Any) -> Any:
    return model.eval()(IDS, adapter_names=["default", "__base__"]).logits


def generated(model: Any) -> Any:
    model.config.use_cache = True
    return model.eval().generate(input_ids=IDS, max_new_tokens=5, do_sample=False).float()


def inferred(model: Any) -> Any:
    with torch.inference_mode():
        return model(IDS).logits


def copied(model: Any) -> Any:
    model(IDS)
    return copy.deepcopy(model)(IDS).logits


def under_autocast(model: Any) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        return model(IDS).logits.float() / 100  # bf16's own error


@pytest.mark.parametrize(
    "run", [switched_off, merged, another, both, mixed, generated, inferred, copied, under_autocast]
)
def test_every_other_use_of_the_model_is_pefts(run: Callable[[Any], Any]) -> None:
    model = wrapped(base())
    right = run(model).detach()
    after = model.train()(IDS).logits.detach()
    model = wrapped(base())
    attach(model)
    torch.testing.assert_close(run(model).detach(), right, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(model.train()(IDS).logits.detach(), after, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"lora_dropout": 0.5}, "dropout"),
        ({"use_dora": True}, "Dora"),
        ({"bias": "lora_only", "target_modules": ["q_proj"]}, "trained beside"),
        ({"target_modules": ["embed_tokens"]}, "Embedding"),
        ({"target_modules": ["lm_head"]}, "outside of the layers"),
    ],
)
def test_what_it_cannot_stays_pefts_and_the_log_says_why(
    config: dict[str, Any], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    kind = "qwen2" if "bias" in config else "llama"
    model = wrapped(base(kind), **config)
    torch.manual_seed(3)
    _, right = gradients(model)
    with caplog.at_level(logging.INFO, logger="finetune"):
        assert attach(model) == 0
    assert len(caplog.messages) == 1
    assert why in caplog.messages[0]
    torch.manual_seed(3)
    assert distance(gradients(model)[1], right) == 0


def test_a_16_bit_base_without_autocast_is_pefts() -> None:
    model = wrapped(base("llama", torch.bfloat16))
    _, right = gradients(model)
    attach(model)
    assert distance(gradients(model)[1], right) == 0


# ------------------------------------------------------------------------------------------------- sharing one input


def attention() -> Any:
    model = wrapped(base(layers=1))
    attach(model)
    return model.get_base_model().model.layers[0].self_attn


def test_any_order_and_any_share_of_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    part = attention()
    x, other = torch.randn(2, 3, 64), torch.randn(2, 3, 64)
    right = {n: type(layer).forward(layer, x) for n, layer in part.named_children()}
    with counted(monkeypatch) as calls:
        for name in ("k_proj", "q_proj", "v_proj"):
            torch.testing.assert_close(getattr(part, name)(x), right[name])
        assert calls == [3]
        part.q_proj(other)
        torch.testing.assert_close(part.k_proj(x), right["k_proj"])  # not of the other input
        torch.testing.assert_close(part.k_proj(x), right["k_proj"])  # and twice
        assert calls == [3, 3, 3, 3]


def test_few_tokens_are_not_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter, "FEW_TOKENS", 7)
    part = attention()
    with counted(monkeypatch) as calls:
        part.q_proj(torch.randn(2, 3, 64))
        assert calls == []
        part.q_proj(torch.randn(1, 7, 64))
        assert calls == [3]


def test_nothing_stale_is_taken() -> None:
    part = attention()
    x = torch.randn(2, 3, 64)
    changes: list[Callable[[], Any]] = [
        lambda: part.k_proj.lora_B["default"].weight.add_(1),
        lambda: x.add_(1),
        lambda: part.k_proj.set_scale("default", 3.0),
    ]
    for change in changes:
        part.q_proj(x)
        with torch.no_grad():
            change()
        torch.testing.assert_close(part.k_proj(x), type(part.k_proj).forward(part.k_proj, x))
    with torch.no_grad():
        part.q_proj(x)
    assert part.k_proj(x).requires_grad


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
def test_an_exception_half_way_changes_nothing(kind: type[BaseException], monkeypatch: pytest.MonkeyPatch) -> None:
    model = wrapped(base(layers=1))
    attach(model)
    part = model.get_base_model().model.layers[0].self_attn
    group = part.q_proj.forward.group
    _, right = gradients(model)

    def broken(*args: Any) -> Any:
        raise kind

    with monkeypatch.context() as patch:
        patch.setattr(part.k_proj, "forward", broken)
        with pytest.raises(kind):
            model(IDS)
    if kind is ValueError:  # torch runs the hook that clears up for these; the next input does it otherwise
        assert (group.waiting, group.input) == ({}, None)
    assert not group.alone
    assert distance(gradients(model)[1], right) == 0


def test_a_layer_that_is_not_called_runs_alone_from_then_on(monkeypatch: pytest.MonkeyPatch) -> None:
    class Half(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q_proj, self.k_proj = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

        def forward(self, x: Any) -> Any:
            return self.q_proj(x)

    whole = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([Half()])})
    model = get_peft_model(whole, LoraConfig(target_modules=["q_proj", "k_proj"])).get_base_model()
    attach(model)
    with counted(monkeypatch) as calls:
        for _ in range(3):
            model["layers"][0](torch.randn(2, 8)).sum().backward()
    assert calls == [2, 1, 1]


def test_it_keeps_x_once_and_what_is_a_rank_wide() -> None:
    part = attention()
    x, kept = torch.randn(2, 50, 64, requires_grad=True), {}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.setdefault(id(t), t), lambda t: t):
        part.q_proj(x), part.k_proj(x), part.v_proj(x)
    parameters = {id(p) for p in part.parameters()}
    assert sorted(t.numel() for t in kept.values() if id(t) not in parameters) == [100 * 3 * 8, 100 * 64]
