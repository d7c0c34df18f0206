"""Bytes against hand arithmetic: 16 per parameter trained in fp32, 0.5159 per packed one, one per 8-bit moment."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from finetune.decoder import KNOWN, constant_sizes
from finetune.device import Device
from finetune.facts import Facts, facts_of, read_facts
from finetune.heads import CHUNK
from finetune.memory import BUCKETS, PHASES, Line, account, static_lines
from finetune.method import lora_config
from finetune.model import load_model
from finetune.plan import resolve
from finetune.recipe import Data, Full, Load, LoRA, Method, Optimizer, QLoRA, Recipe
from finetune.steps import Batch
from finetune.steps import Path as StepPath
from tests.tiny import tiny_model

FULL = Full(kind="full")
GEMMA_N, LLAMA_N = 2_614_341_888, 6_738_415_616
GEMMA_QV_8 = 1_597_440  # LoRA rank 8 on query and value
LLAMA_ALL_8 = 19_988_480  # rank 8 on all seven projections
LLAMA_LINEAR = 32 * (4 * 4096 * 4096 + 3 * 4096 * 11008)


@pytest.fixture(scope="module")
def gemma() -> Facts:
    return read_facts("google/gemma-2-2b")


@pytest.fixture(scope="module")
def llama() -> Facts:
    return read_facts("meta-llama/Llama-2-7b-hf")


def lora(**settings: Any) -> LoRA:
    return LoRA(**{"kind": "lora", "rank": 8, "targets": "qv", **settings})


def qlora(**settings: Any) -> QLoRA:
    return QLoRA(**{"kind": "qlora", "rank": 8, **settings})


def buckets(lines: list[Line]) -> dict[str, int]:
    return {bucket: sum(line.bytes for line in lines if line.bucket == bucket) for bucket in BUCKETS}


def static(method: Method, facts: Facts, dtype: str = "float32", optimizer: str = "adamw_torch") -> dict[str, int]:
    return buckets(static_lines(method, facts, dtype, optimizer))


def optimizer(method: Method, facts: Facts, name: str) -> int:
    return static(method, facts, "bfloat16", name)["optimizer"]


# ----------------------------------------------------------------------------------------------------- golden numbers


def test_gemma_full_in_fp32_is_16_bytes_per_parameter(gemma: Facts) -> None:
    found = static(FULL, gemma)
    assert {bucket: size for bucket, size in found.items() if size} == {
        "weights": 4 * GEMMA_N, "gradients": 4 * GEMMA_N, "optimizer": 8 * GEMMA_N,
    }  # fmt: skip
    assert round(found["weights"] / 1e9, 1) == 10.5
    assert round(sum(found.values()) / 1e9, 1) == 41.8


def test_gemma_lora_on_a_frozen_fp32_base(gemma: Facts) -> None:
    found = static(lora(), gemma)
    assert found["weights"] == 4 * GEMMA_N + 4 * GEMMA_QV_8
    assert found["gradients"] == 4 * GEMMA_QV_8
    assert found["optimizer"] == 8 * GEMMA_QV_8
    assert round(4 * GEMMA_N / 1e9, 2) == 10.46
    assert round(sum(found.values()) / 1e9, 1) == 10.5
    assert round(4 * GEMMA_QV_8 / 1e6, 1) == 6.4  # the adapter file


def test_llama_full_is_16_bytes_per_parameter_whatever_the_products_are(llama: Facts) -> None:
    # fp32 weights under bf16 autocast: 4 + 4 + 8; the same 16 as bf16 weights and gradients with an fp32 master.
    for dtype in ("float32", "bfloat16"):
        assert sum(static(FULL, llama, dtype).values()) == 16 * LLAMA_N


def test_llama_lora_on_16_bit_weights(llama: Facts) -> None:
    found = static(lora(targets="attention+mlp"), llama, "bfloat16")
    assert sum(found.values()) == 2 * LLAMA_N + 16 * LLAMA_ALL_8


@pytest.mark.parametrize(
    ("double", "per_weight", "tables"), [(True, 0.5 + 1 / 64 + 4 / (64 * 256), 272), (False, 0.5625, 16)]
)
def test_llama_in_4_bits(llama: Facts, double: bool, per_weight: float, tables: int) -> None:
    found = static(qlora(double_quant=double), llama, "bfloat16")
    tensors = 32 * 7
    kept_back = tensors * 4 * tables + tensors * 4 * double  # value tables, and the mean of the scales
    rest = 2 * (LLAMA_N - LLAMA_LINEAR)
    assert found["weights"] == LLAMA_LINEAR * per_weight + kept_back + rest + 4 * LLAMA_ALL_8
    assert found["gradients"] + found["optimizer"] == 12 * LLAMA_ALL_8
    assert LLAMA_LINEAR == 6_476_005_376


def test_the_lines_add_up_and_show_their_arithmetic(llama: Facts) -> None:
    lines = static_lines(qlora(), llama, "bfloat16", "paged_adamw_8bit")
    assert [line.name for line in lines] == [
        "4-bit weights", "quantisation constants", "other weights", "adapter", "gradients", "paged_adamw_8bit",
    ]  # fmt: skip
    assert not lines[-1].paged  # at rank 8 no tensor has the 1e5 values from which bitsandbytes pages
    assert lines[0] == Line("weights", "4-bit weights", LLAMA_LINEAR // 2, "0.5 bytes x 6,476,005,376")
    assert lines[2].formula == f"2 bytes x {LLAMA_N - LLAMA_LINEAR:,}"
    assert all(line.exact and line.bytes > 0 for line in lines)


# --------------------------------------------------------------------------------------------------------- optimizers


def in_8_bits(size: int) -> int:
    """One moment: a byte per value and an fp32 scale per 256 of them; below 4096 values it stays fp32."""
    return size + 4 * -(-size // 256) if size >= 4096 else 4 * size


def test_8_bit_moments_of_an_adapter(gemma: Facts) -> None:
    # Per layer: q has A [8, 2304], B [2048, 8]; v has A [8, 2304], B [1024, 8].
    layer = (18_432 + 4 * 72) + (16_384 + 4 * 64) + (18_432 + 4 * 72) + (8_192 + 4 * 32)
    assert optimizer(lora(), gemma, "adamw_8bit") == 2 * 26 * layer == 3_244_800
    assert optimizer(lora(), gemma, "paged_adamw_8bit") == 2 * 26 * layer
    assert optimizer(lora(), gemma, "lion_8bit") == 26 * layer
    assert optimizer(lora(), gemma, "paged_lion_8bit") == 26 * layer


def test_small_tensors_keep_32_bit_state(gemma: Facts) -> None:
    # Rank 1: A has 2304 values, B 2048 and 1024; all are below 4096.
    assert optimizer(lora(rank=1), gemma, "adamw_8bit") == 2 * 4 * 26 * (2304 + 2048 + 2304 + 1024)
    # Rank 3: only v's B, 3072 values, is small; the blocks of the others are counted whole.
    layer = in_8_bits(3 * 2304) * 2 + in_8_bits(3 * 2048) + 4 * 3 * 1024
    assert optimizer(lora(rank=3), gemma, "adamw_8bit") == 2 * 26 * layer


def test_8_bit_moments_of_a_whole_model_leave_the_embedding_in_32(gemma: Facts) -> None:
    matrices, embedding, norms = 368_050_176 + 1_656_225_792, 589_824_000, 241_920
    expected = 2 * (matrices + matrices // 64) + 8 * embedding + 8 * norms
    assert optimizer(FULL, gemma, "adamw_8bit") == expected
    line = static_lines(FULL, gemma, "float32", "adamw_8bit")[-1]
    assert line.formula == (
        f"2 x (1 byte + fp32 per 256) x {matrices:,} + 2 x 4 bytes x {embedding + norms:,} "
        "(embeddings and tensors below 4,096)"
    )


def test_other_optimizers(gemma: Facts) -> None:
    assert optimizer(FULL, gemma, "sgd") == 0
    for name in ("adamw_torch", "paged_adamw_32bit"):
        assert optimizer(FULL, gemma, name) == 8 * GEMMA_N
    assert optimizer(FULL, gemma, "adamw_torch_fused") == 8 * GEMMA_N + 4 * 288
    layer = 2 * (2048 + 2304) + 2 * (1024 + 2304) + 3 * (9216 + 2304) + 4 * 2304
    # And the root mean square of each of the 288 weights.
    assert optimizer(FULL, gemma, "adafactor") == 4 * (26 * layer + 256_000 + 2304 + 2304 + 288)


def test_large_tensors_are_paged_and_small_ones_stay(gemma: Facts) -> None:
    """bitsandbytes pages a state of at least 1e5 values: of q and v at rank 64 both A (64 x 2304), and both B."""
    for name in ("paged_adamw_8bit", "paged_adamw_32bit", "paged_lion_8bit"):
        lines = [line for line in static_lines(lora(rank=64), gemma, "bfloat16", name) if line.bucket == "optimizer"]
        small = 64 * 1024  # v's B
        assert [line.paged for line in lines] == [True, False]
        moments = 1 if "lion" in name else 2
        each = 4 * small if "32bit" in name else small + 4 * small // 256
        assert lines[1].bytes == 26 * moments * each
    assert not any(line.paged for line in static_lines(lora(rank=64), gemma, "bfloat16", "adamw_8bit"))
    assert not any(line.paged for line in static_lines(lora(rank=64), gemma, "float32", "paged_adamw_8bit", "cpu"))


def test_dora_trains_a_magnitude_per_output(gemma: Facts) -> None:
    outputs = 26 * (2048 + 1024)
    assert static(lora(variant="dora"), gemma)["gradients"] == 4 * (GEMMA_QV_8 + outputs)
    assert optimizer(lora(variant="dora"), gemma, "adamw_torch") == 8 * (GEMMA_QV_8 + outputs)


# ---------------------------------------------------------------------------------------------------------- one step

H, MLP, Q, HEADS = 4096, 11008, 4096, 32  # Llama 7B; keys are as wide as queries


def kept(method: Method, facts: Facts, **settings: Any) -> dict[str, int]:
    """Bytes alive at the peak by name, of one row of 128 tokens on a GPU in bf16 without autocast."""
    usual: dict[str, Any] = {
        "device": "cuda", "weights": "bfloat16", "autocast": None, "attention": "flash", "loss": "library",
        "checkpointing": 0, "optimizer": "adamw_torch_fused", "adapter_casts": False,
    }  # fmt: skip
    found = account(method, facts, Batch(1, 128, 127), StepPath(**{**usual, **settings}))
    return {line.name: line.alive for line in found.lines}


def test_what_a_frozen_llama_layer_keeps_of_a_token(llama: Facts) -> None:
    """2-byte values, 128 tokens, 32 layers: two norms in fp32, q, k, v, attention, four MLP tensors."""
    found = kept(lora(targets="attention+mlp"), llama, loss="tiled")
    tokens, layers = 128, 32
    assert found["query, rotated"] == found["key, rotated"] == found["attention"] == 2 * Q * tokens * layers
    assert found["softmax sums"] == 4 * HEADS * tokens * layers
    for name in ("MLP gate", "MLP activation", "MLP up", "MLP product"):
        assert found[name] == 2 * MLP * tokens * layers
    # Of the first layer's first norm nothing: its input, the embedding, is frozen.
    assert found["norm in fp32"] == pytest.approx(4 * H * tokens * (2 * layers), rel=0.02)


def test_checkpointing_keeps_one_input_per_layer(llama: Facts) -> None:
    found = kept(lora(), llama, checkpointing=1, input_grads=True)
    assert found["residual stream"] + found["embedding"] == 2 * H * 128 * 32  # the first layer's is the embedding


def test_transformers_loss_holds_12_bytes_of_the_vocabulary_a_token(llama: Facts) -> None:
    """log-softmax, the scattered gradient and the gradient of the logits, in fp32 each."""
    found = kept(lora(), llama)
    wide = 4 * 32_000 * 128
    names = ("log-probabilities", "gradient of log-probabilities", "gradient of logits")
    assert [found[name] for name in names] == [wide] * 3


def test_supervised_rows_pay_for_their_own_logits_only(llama: Facts) -> None:
    path = StepPath(
        device="cpu", weights="float32", autocast=None, attention="cpu", loss="supervised", checkpointing=0,
        optimizer="sgd",
    )  # fmt: skip
    few, many = (account(lora(), llama, Batch(1, 128, n), path).peak for n in (100, 127))
    # Log-probabilities, their gradient and that of the logits. The frozen head keeps nothing of its input.
    assert many - few == 27 * 3 * 4 * 32_000


def step_on_a_cpu(**settings: Any) -> StepPath:
    usual: dict[str, Any] = {
        "device": "cpu", "weights": "float32", "autocast": None, "attention": "cpu", "loss": "onepass",
        "checkpointing": 0, "optimizer": "sgd",
    }  # fmt: skip
    return StepPath(**{**usual, **settings})


def test_one_pass_in_bf16_holds_the_chunk_in_two_types(gemma: Facts) -> None:
    low = step_on_a_cpu(weights="bfloat16", autocast="bfloat16")
    few, some = (account(lora(), gemma, Batch(1, 512, n), low).peak for n in (100, CHUNK))
    # Logits in bf16, in fp32, and the capped ones; in bf16 the hidden states, their gradient, and that of the chunk.
    assert some - few == 28 * (256_000 * (2 + 4 + 4) + 2304 * 2 * 3)


@pytest.mark.parametrize("checkpointing", [0, 1])
@pytest.mark.parametrize(("model_type", "low"), [("llama", False), ("llama", True), ("gemma2", False)])
def test_the_fast_ways_take_what_their_real_code_takes(model_type: str, checkpointing: int, low: bool) -> None:
    from finetune.simulate import simulate

    facts = small(model_type)
    types = {"weights": "bfloat16", "autocast": "bfloat16"} if low else {}
    apart = "eager" if model_type == "gemma2" else "documents"
    for batch, attention, blocks in (
        (Batch(2, 192, 300), "eager" if model_type == "gemma2" else "cpu", False),
        (Batch(1, 384, 60, flat=True), apart, False),
        (Batch(1, 384, 60, flat=True), apart, apart == "documents" and not low),
    ):
        path = step_on_a_cpu(
            **types, attention=attention, checkpointing=checkpointing, input_grads=checkpointing > 0,
            turned=attention == "documents", last=attention == "documents" and not checkpointing, blocks=blocks,
        )  # fmt: skip
        for method in (lora(targets="attention+mlp"), qlora(compute_dtype=path.weights)):
            traced = max(simulate(facts, method, batch, path).peaks[phase].bytes for phase in PHASES)
            assert account(method, facts, batch, path).peak == pytest.approx(traced, rel=0.02 if low else 0.003)


def test_eager_attention_keeps_the_scores(llama: Facts) -> None:
    found = kept(lora(targets="attention+mlp"), llama, attention="eager", loss="tiled")
    # The softmax in fp32 and its copy in bf16, for each head, token and layer.
    assert found["attention weights"] == (4 + 2) * HEADS * 128 * 128 * 32


def test_the_lines_of_an_account_add_up_to_its_peak(llama: Facts, gemma: Facts) -> None:
    for facts in (llama, gemma):
        for method in (FULL, lora(), qlora()):
            for checkpointing in (0, 1, 3):
                path = StepPath(
                    device="cuda", weights="bfloat16", autocast="bfloat16", attention="flash", loss="tiled",
                    checkpointing=checkpointing, optimizer="paged_adamw_8bit",
                )  # fmt: skip
                found = account(method, facts, Batch(2, 64, 100), path)
                assert sum(line.alive for line in found.lines) == found.peak
                assert all(line.alive >= 0 for line in found.lines)
                assert found.peak == max(found.phases[phase] for phase in ("forward", "backward", "optimizer"))
                assert found.phases["load"] < found.phases["optimizer"] <= found.peak


def small(model_type: str, inner: int = 700) -> Facts:
    """A model of four narrow layers, known by its shapes."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        model_type, vocab_size=4000, hidden_size=256, intermediate_size=inner, num_hidden_layers=4, head_dim=32,
        num_attention_heads=8, num_key_value_heads=2, pad_token_id=0,
    )  # fmt: skip
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    return facts_of(model_type, config.to_dict(), shapes, "F32")


@pytest.mark.parametrize("model_type", sorted({*KNOWN} - {"llama", "gemma2"}))
def test_every_family_written_down_takes_what_its_real_code_takes(model_type: str) -> None:
    """Against the trace of the real code; tests/test_simulate.py holds the families of the shipped recipes so."""
    from finetune.simulate import simulate

    facts = small(model_type)
    laptop: dict[str, Any] = {
        "device": "cpu", "weights": "float32", "autocast": None, "attention": "cpu", "loss": "supervised"
    }  # fmt: skip
    card = {"device": "cuda", "weights": "bfloat16", "autocast": "bfloat16", "attention": "flash", "loss": "tiled"}
    for method, batch, place, checkpointing in (
        (FULL, Batch(2, 192, 200, padded=True), laptop, 0),
        (lora(targets="attention+mlp"), Batch(2, 192, 200), card, 0),
        (lora(targets="attention"), Batch(2, 192, 200), laptop, 1),
    ):
        path = StepPath(
            **place, checkpointing=checkpointing, optimizer="adamw_torch_fused", input_grads=checkpointing > 0
        )
        traced = max(simulate(facts, method, batch, path).peaks[phase].bytes for phase in PHASES)
        found = account(method, facts, batch, path)
        assert found.peak == pytest.approx(traced, rel=0.006)
        assert not found.estimated


# ------------------------------------------------------------------------------------------------ NF4, by arithmetic


def test_double_quantisation_saves_0_373_bit_a_weight(llama: Facts) -> None:
    single, double = (static(qlora(double_quant=on), llama, "bfloat16")["weights"] for on in (False, True))
    assert 0.5 + 4 / 64 == 0.5625
    assert round(0.5 + 1 / 64 + 4 / (64 * 256), 4) == 0.5159
    # Besides, each of the 224 layers has a table of 256 values and the mean of its scales.
    saved = single - double + 224 * 4 * (256 + 1)
    assert saved * 8 / LLAMA_LINEAR == 0.5 - 1 / 8 - 1 / 512
    assert round(0.5 - 1 / 8 - 1 / 512, 3) == 0.373


def test_llama_in_three_regimes(llama: Facts) -> None:
    """112 GB, 14.3 GB and about 4 GB, as the texts say; the 112 are 16 bytes of a round 7e9."""
    assert (16 * 7e9, round(16 * LLAMA_N / 1e9, 1)) == (112e9, 107.8)
    assert sum(static(FULL, llama).values()) == 16 * LLAMA_N
    assert round((2 * 7e9 + 16 * LLAMA_ALL_8) / 1e9, 1) == 14.3
    assert sum(static(lora(targets="attention+mlp"), llama, "bfloat16").values()) == 2 * LLAMA_N + 16 * LLAMA_ALL_8
    assert sum(static(qlora(), llama, "bfloat16", "paged_adamw_8bit").values()) == pytest.approx(4e9, rel=0.02)


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 700), st.integers(1, 90), st.booleans(), st.sampled_from(["nf4", "fp4"]))
def test_constants_are_those_of_a_real_4_bit_layer(rows: int, columns: int, double: bool, quant: str) -> None:
    from bitsandbytes.nn import Linear4bit

    layer = Linear4bit(columns, rows, bias=False, compress_statistics=double, quant_type=quant).to("cpu")
    assert layer.weight.nbytes == -(-rows * columns // 2)
    assert sorted(tensor.nbytes for tensor in tensors_of(layer.weight.quant_state)) == sorted(
        constant_sizes(rows * columns, double=double)
    )


def tensors_of(state: Any) -> Iterator[torch.Tensor]:
    """Every tensor that bitsandbytes keeps beside a packed weight, whatever it is called."""
    for item in vars(state).values():
        if isinstance(item, torch.Tensor):
            yield item
        elif type(item) is type(state):
            yield from tensors_of(item)


# ---------------------------------------------------------------------------------------------- against real models

LAPTOP = Device("cpu", "CPU", 2**40, bf16=False)
NAMES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


MODELS = ("llama, tied", "llama, untied", "qwen2, tied", "qwen2, untied", "gemma2, tied")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Facts]:
    """Tiny models by architecture, and whether head and embedding are one."""
    found = {}
    for name in MODELS:
        arch, tied = name.split(", ")
        folder = tmp_path_factory.mktemp("model")
        tiny_model(folder, arch=arch, tied=tied == "tied", hidden_size=96, intermediate_size=130)
        found[name] = read_facts(str(folder))
    return found


def loaded(facts: Facts, method: Method, dtype: str) -> Any:
    """The model as training has it."""
    load = Load(dtype=dtype, attention="eager")  # type: ignore[arg-type]
    recipe, _ = resolve(Recipe(model=facts.model, method=method, data=Data(train="x"), load=load), facts, LAPTOP)
    return load_model(recipe, Path(facts.model), facts)


def weights_of(model: Any) -> int:
    """Bytes of all weights and of what bitsandbytes keeps beside them."""
    held = [getattr(getattr(module, "weight", None), "quant_state", None) for module in model.modules()]
    states = {id(state): state for state in held if state is not None}  # an adapted layer shows its base's weight too
    constants = [tensor for state in states.values() for tensor in tensors_of(state)]
    return sum(tensor.nbytes for tensor in [*model.parameters(), *constants])


def backward(model: Any) -> None:
    """As training runs it: products of fp32 copies beside 16-bit weights need autocast."""
    tokens = torch.arange(8)[None]
    with torch.autocast("cpu", torch.bfloat16, enabled=model.dtype == torch.bfloat16):
        loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()


@pytest.mark.parametrize(
    ("name", "method", "dtype"),
    [
        ("llama, tied", FULL, "float32"),
        ("qwen2, untied", FULL, "float32"),
        ("llama, untied", LoRA(kind="lora", rank=1, targets="qv"), "bfloat16"),
        ("gemma2, tied", LoRA(kind="lora", rank=40, variant="dora", modules_to_save=["model.norm"]), "float32"),
        ("qwen2, untied", LoRA(kind="lora", modules_to_save=["embed_tokens", "lm_head"]), "bfloat16"),
        ("qwen2, tied", QLoRA(kind="qlora", rank=3, targets=["o_proj", "down_proj"], variant="dora"), "float32"),
        ("llama, untied", QLoRA(kind="qlora", double_quant=False, modules_to_save=["lm_head"]), "bfloat16"),
    ],
)
def test_weights_and_gradients_are_those_of_the_real_model(
    models: dict[str, Facts], name: str, method: Method, dtype: str
) -> None:
    found = static(method, models[name], dtype)
    model = loaded(models[name], method, dtype)
    assert found["weights"] == weights_of(model)
    backward(model)
    assert found["gradients"] == sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)


ADAPTERS = st.builds(
    LoRA,
    kind=st.just("lora"),
    rank=st.integers(1, 64),
    targets=st.one_of(
        st.sampled_from(["qv", "attention", "attention+mlp"]),
        st.lists(st.sampled_from([*NAMES, "layers.1.self_attn.q_proj"]), min_size=1, max_size=4, unique=True),
    ),
    variant=st.sampled_from(["lora", "rslora", "dora"]),
    modules_to_save=st.lists(st.sampled_from(["model.norm", "lm_head", "embed_tokens"]), max_size=2, unique=True),
)


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(MODELS), ADAPTERS, st.sampled_from(["float32", "bfloat16"]))
def test_any_adapter_takes_what_peft_makes_of_it(
    models: dict[str, Facts], name: str, method: LoRA, dtype: str
) -> None:
    """peft's own model, without numbers in it."""
    from peft import get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    facts = models[name]
    if facts.tied and method.modules_to_save:
        method = method.model_copy(update={"modules_to_save": ["model.norm"]})  # the others are one weight: refused
    with torch.device("meta"):
        base = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(facts.model), dtype=getattr(torch, dtype))
        frozen = sum(p.nbytes for p in base.parameters())
        model = get_peft_model(base, lora_config(method, facts))
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert static(method, facts, dtype) == {
        **dict.fromkeys(BUCKETS, 0),
        "weights": frozen + 4 * trained, "gradients": 4 * trained, "optimizer": 8 * trained,
    }  # fmt: skip


@pytest.mark.parametrize(
    "kind", [FULL, pytest.param(LoRA(kind="lora", rank=50, targets="qv", variant="dora"), marks=pytest.mark.long)]
)
@pytest.mark.parametrize("name", get_args(Optimizer))
def test_state_is_what_the_trainer_keeps(
    models: dict[str, Facts], tmp_path: Path, name: str, kind: Method, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bitsandbytes.optim import GlobalOptimManager
    from transformers import Trainer, TrainingArguments

    # transformers asks for 32 bits for embeddings in a table of bitsandbytes' that knows weights by their address; an
    # earlier test's embedding may have lain where a weight lies now.
    monkeypatch.setattr(GlobalOptimManager, "_instance", None)
    facts = models["llama, untied"]
    model = loaded(facts, kind, "float32")
    arguments = TrainingArguments(str(tmp_path), optim=name, use_cpu=True, report_to=[], learning_rate=1e-3)
    real = Trainer(model, arguments).create_optimizer()
    backward(model)
    real.step()
    # bitsandbytes' two value tables are one for all tensors; AdamW's step counters lie on the host beside a card.
    aside = ("qmap1", "qmap2") if name.endswith("fused") else ("qmap1", "qmap2", "step")
    held = [item for state in real.state.values() for key, item in state.items() if key not in aside]
    assert sum(item.nbytes for item in held if torch.is_tensor(item)) == optimizer(kind, facts, name)
