"""One model in all ways of training it: the numbers of the papers and texts, from arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest

from finetune.compare import TARGETS, Row, compare
from finetune.device import named_device
from finetune.facts import Facts, facts_of, read_facts
from finetune.memory import static_lines
from finetune.paths import Lengths
from finetune.plan import CARDS, plan, resolve
from finetune.recipe import LoRA, Recipe, load_recipe, parse_recipe

GEMMA_N, LLAMA_N, LLAMA_13B_N = 2_614_341_888, 6_738_415_616, 13_015_864_320


def recipe(model: str, kind: str = "lora", **sets: Any) -> Recipe:
    overrides = [f"{name.replace('__', '.')}={value}" for name, value in sets.items()]
    return parse_recipe(f"model: {model}\nmethod: {{kind: {kind}}}\ndata: {{train: x}}\n", "recipe", overrides)


@cache
def rows(model: str, card: str, ranks: tuple[int, ...] = (), **sets: Any) -> list[Row]:
    return compare(recipe(model, **sets), read_facts(model), named_device(card), ranks)


def row(found: Sequence[Row], method: str, targets: str = "every weight") -> Row:
    return next(row for row in found if (row.method, row.targets) == (method, targets))


# -------------------------------------------------------------------------------------------------- known numbers


def test_gemma_2_2b_in_fp32() -> None:
    """41.8 GB for everything, 10.5 GB with adapters of rank 8 on q and v, whose file has 6.4 MB."""
    found = rows("google/gemma-2-2b", "80GB", method__rank=8, load__dtype="float32", train__optimizer="adamw_torch")
    full, lora = row(found, "full"), row(found, "lora", "qv")
    assert full.static == 16 * GEMMA_N
    assert lora.static == 4 * GEMMA_N + 16 * 1_597_440
    assert lora.adapter_file == 4 * 1_597_440
    assert [round(size / 1e9, 1) for size in (full.static, lora.static)] == [41.8, 10.5]
    assert round(lora.adapter_file / 1e6, 1) == 6.4
    assert round(100 * lora.document()["share"], 3) == 0.061


def test_llama_2_7b() -> None:
    """107.8 GB (the 112 of the texts are of a round 7e9), 13.8, and about 4."""
    found = rows("meta-llama/Llama-2-7b-hf", "141GB", method__rank=8, train__optimizer="adamw_torch")
    assert row(found, "full").static == 16 * LLAMA_N
    assert row(found, "lora", "attention+mlp").static == 2 * LLAMA_N + 16 * 19_988_480
    linear = 32 * (4 * 4096 * 4096 + 3 * 4096 * 11008)
    nf4 = linear * (0.5 + 1 / 64 + 4 / (64 * 256)) + 224 * 4 * (16 + 256 + 1)
    packed = nf4 + 2 * (LLAMA_N - linear) + 16 * 19_988_480
    assert row(found, "qlora", "attention+mlp").static == packed
    assert packed / 1e9 == pytest.approx(4, abs=0.25)


def llama_13b() -> Facts:
    """Llama 2 13B from its numbers."""
    h, i = 5120, 13824
    layer = {f"self_attn.{name}_proj": (h, h) for name in "qkvo"}
    layer |= {"mlp.gate_proj": (i, h), "mlp.up_proj": (i, h), "mlp.down_proj": (h, i)}
    layer |= {"input_layernorm": (h,), "post_attention_layernorm": (h,)}  # type: ignore[dict-item]
    shapes: dict[str, Sequence[int]] = {
        f"model.layers.{n}.{name}.weight": shape for n in range(40) for name, shape in layer.items()
    }
    shapes |= {"model.embed_tokens.weight": (32000, h), "model.norm.weight": (h,), "lm_head.weight": (32000, h)}
    config = {
        "model_type": "llama", "hidden_size": h, "intermediate_size": i, "num_hidden_layers": 40,
        "num_attention_heads": 40, "vocab_size": 32000, "max_position_embeddings": 4096, "tie_word_embeddings": False,
    }  # fmt: skip
    return facts_of("llama-13b", config, shapes, "F16")


def test_13_billion_on_a_card_of_24_gb() -> None:
    """Rank 16 on all linear layers: full and LoRA do not fit, QLoRA does."""
    facts, card = llama_13b(), named_device("24GB")
    assert facts.parameters == LLAMA_13B_N
    assert {*facts.tensors} == {*read_facts("meta-llama/Llama-2-13b-hf").tensors}
    adapters = 16 * 40 * (4 * (5120 + 5120) + 3 * (5120 + 13824))
    answers = {}
    for kind in ("full", "lora", "qlora"):
        asked = recipe("llama-13b", kind, **({} if kind == "full" else {"method__rank": 16}))
        answers[kind] = resolve(asked, facts, card)[1]
    assert [answers[kind].fits for kind in ("full", "lora", "qlora")] == [False, False, True]
    assert answers["full"].account.phases["load"] >= 4 * LLAMA_13B_N > 2 * card.memory
    assert answers["lora"].account.phases["load"] >= 2 * LLAMA_13B_N + 4 * adapters > card.memory
    assert answers["lora"].trainable == answers["qlora"].trainable == adapters == 62_586_880
    static = static_lines(LoRA(kind="lora", rank=16), facts, "bfloat16", "adamw_torch")
    assert sum(line.bytes for line in static) == 2 * LLAMA_13B_N + 16 * adapters


def test_gpt_3_from_1_2_tb_to_350_gb() -> None:
    """Hu et al. 2021, section 4.2: full training with Adam takes 1.2 TB, LoRA 350 GB, the weights in 16 bits."""
    facts = read_facts("gpt3-175b")
    h, layers = 12288, 96
    block = 12 * h * h + 13 * h  # c_attn, c_proj, two MLP layers of 4h with biases, two norms
    n = layers * block + (50257 + 2048) * h + 2 * h
    assert facts.parameters == n
    assert 2 * n == pytest.approx(350e9, rel=0.005)
    assert 6 * n < 1.2e12 < 8 * n
    found = rows("gpt3-175b", "80GB", method__rank=4, train__optimizer="adamw_torch")
    lora = row(found, "lora", "qv")
    # q and v have 4 x 2 x 2 x 12,288 a layer; one fused layer of q, k and v as much: 4 x (12,288 + 36,864).
    assert lora.plan.trainable == layers * 4 * (h + 3 * h) == 4 * 2 * 2 * h * layers
    assert lora.static == 2 * n + 16 * lora.plan.trainable
    assert lora.static == pytest.approx(350e9, rel=0.005)
    # In 16 bits the paper's checkpoint of about 35 MB (MiB).
    assert lora.adapter_file / 2 / 2**20 == pytest.approx(35, abs=1.1)
    assert row(found, "full").static == 16 * n
    assert not any(found.cards for found in found if found.method != "qlora")


# ------------------------------------------------------------------------------------------------------- the table


def test_rows_come_in_order_for_every_rank() -> None:
    found = rows("smollm2-135m", "24GB", (4, 64))
    expected = [("full", "every weight", None)]
    expected += [(kind, targets, rank) for kind in ("lora", "qlora") for targets in TARGETS for rank in (4, 64)]
    assert [(row.method, row.targets, row.rank) for row in found] == expected
    for row in found[1:]:
        assert row.adapter_file == 4 * row.plan.trainable
    by_rank = {row.rank: row.plan.trainable for row in found if (row.method, row.targets) == ("lora", "attention")}
    assert by_rank[64] == 16 * by_rank[4]  # type: ignore[index]


def test_the_recipe_s_own_rank_and_variant_are_kept() -> None:
    found = rows("smollm2-135m", "24GB", method__rank=12, method__variant="dora")
    assert {row.rank for row in found} == {None, 12}
    h, kv, layers = 576, 192, 30
    lora = 12 * (h + h) + 12 * (h + kv)
    assert row(found, "lora", "qv").plan.trainable == layers * (lora + h + kv)  # a magnitude per output
    asked = load_recipe("smollm2-full")
    assert {row.rank for row in compare(asked, read_facts(asked.model), named_device("24GB"))} == {None, 16}


@pytest.mark.parametrize("model", ["meta-llama/Llama-2-7b-hf", "smollm2-135m"])
def test_every_row_fits_where_its_own_plan_fits(model: str) -> None:
    for found in rows(model, "48GB"):
        for recomputing in (False, True):
            asked = recipe(
                model, found.method, train__micro_batch=1, train__checkpointing=str(recomputing).lower(),
                **({} if found.method == "full" else {"method__targets": found.targets, "method__rank": found.rank}),
            )  # fmt: skip
            fits = tuple(card for card in CARDS if plan(asked, f"{card}GB").fits)
            if recomputing:
                assert found.recomputing == tuple(card for card in fits if card not in found.cards)
            else:
                assert found.cards == fits
    assert found.document()["fits"] == list(found.cards)


def test_rows_are_those_of_the_recipe_s_batch_and_lengths() -> None:
    lengths = Lengths.read([(300, 100)] * 40, "rows")
    asked = recipe("smollm2-135m", train__micro_batch=4, train__checkpointing=2)
    facts, card = read_facts("smollm2-135m"), named_device("24GB")
    for found in compare(asked, facts, card, lengths=lengths):
        assert (found.plan.batch.rows, found.plan.batch.length, found.plan.path.checkpointing) == (4, 300, 2)
        assert found.plan.lengths == lengths
        document = found.document()
        assert document["total"] == sum(document["buckets"].values()) == found.plan.total


def test_strategies_that_a_model_has_no_layers_for_are_left_out() -> None:
    h = 64
    shapes: dict[str, Sequence[int]] = {"model.embed_tokens.weight": (100, h), "model.norm.weight": (h,)}
    for n in range(2):
        shapes |= {f"model.layers.{n}.self_attn.{name}_proj.weight": (h, h) for name in "qkvo"}
        shapes |= {f"model.layers.{n}.mlp.experts.{name}": (4, 128, h) for name in ("gate_up_proj", "down_proj")}
    config = {"model_type": "mixtral", "num_hidden_layers": 2, "num_attention_heads": 4}
    facts = facts_of("experts", config, shapes, "BF16")
    found = compare(recipe("experts"), facts, named_device("24GB"))
    assert [(row.method, row.targets) for row in found] == [
        ("full", "every weight"), ("lora", "qv"), ("lora", "attention"), ("qlora", "qv"), ("qlora", "attention"),
    ]  # fmt: skip
    assert row(found, "full").static == 16 * facts.parameters + 4 * len(facts.tensors)
    assert all(found.plan.account.estimated for found in found)


def test_a_full_recipe_and_an_adapter_recipe_give_the_same_table() -> None:
    facts, card = read_facts("smollm2-135m"), named_device("24GB")
    adapter, full = (compare(recipe("smollm2-135m", kind), facts, card) for kind in ("lora", "full"))
    assert [found.plan for found in adapter] == [found.plan for found in full]
