"""Every kind of adapter: the merged folder answers as peft's base plus adapter does, and the proof says so."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from finetune import combine
from finetune.errors import InputError, RunError
from finetune.merge_layout import FourBits
from finetune.merge_math import four_bits, residual
from tests.test_merge import (
    IDS,
    ROWS,
    assert_same_answers,
    edit,
    load_model,
    logits,
    merge_adapter,
    rewrite,
    weights,
    with_peft,
    write_adapter,
)
from tests.tiny import tiny_model

Q = "model.layers.0.self_attn.q_proj"

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """Float32 bases by whether they are tied, not to be changed."""
    folder = tmp_path_factory.mktemp("bases")
    return {tied: tiny_model(folder / str(tied), tied=tied) for tied in (True, False)}


def says_tied(folder: Path) -> bool:
    return bool(json.loads((folder / "config.json").read_text())["tie_word_embeddings"])


# ------------------------------------------------------------------------------------------- tokens, old ones and new


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("spelling", [[3, 31], {"embed_tokens": [31, 3]}], ids=["list", "by module"])
def test_rows_trained_alone(tmp_path: Path, bases: dict[bool, Path], tied: bool, spelling: Any) -> None:
    """IDS holds token 31; in a tied model the head's row changes with the embedding's."""
    adapter = write_adapter(bases[tied], tmp_path / "adapter", trainable_token_indices=spelling)
    result = merge_adapter(bases[tied], adapter, tmp_path / "out", rows=ROWS)
    assert_same_answers(bases[tied], adapter, result.folder)
    assert says_tied(result.folder) is tied
    before, after = (weights(folder)["model.embed_tokens.weight"] for folder in (bases[tied], result.folder))
    assert [row for row in range(len(before)) if not torch.equal(before[row], after[row])] == [3, 31]
    assert result.proof is not None
    assert result.proof.difference < 1e-4
    assert ("lm_head.weight" in weights(result.folder)) is not tied


def test_rows_of_a_head_that_is_stored_beside_its_twin(tmp_path: Path, bases: dict[bool, Path]) -> None:
    base = shutil.copytree(bases[True], tmp_path / "base")
    tensors = load_file(base / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    adapter = write_adapter(base, tmp_path / "adapter", trainable_token_indices=[31])
    result = merge_adapter(base, adapter, tmp_path / "out", rows=ROWS)
    assert_same_answers(base, adapter, result.folder)
    after = weights(result.folder)
    assert torch.equal(after["lm_head.weight"], after["model.embed_tokens.weight"])


def grown_adapter(base: Path, folder: Path, more: int, **config: Any) -> tuple[Path, Any]:
    """An adapter trained with `more` new tokens, and the peft model that it was saved from."""
    from peft import LoraConfig, get_peft_model

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = load_model(base)
        torch.manual_seed(3)
        model.resize_token_embeddings(model.config.vocab_size + more, mean_resizing=False)
        fields = {"target_modules": ["q_proj"], **config}
        peft = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=12, **fields))
        generator = torch.Generator().manual_seed(1)
        for parameter in peft.parameters():
            if parameter.requires_grad:
                parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
        peft.save_pretrained(str(folder))
    return folder, peft.eval()


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize(
    "config",
    [
        pytest.param({}, id="frozen embeddings"),
        pytest.param({"modules_to_save": ["embed_tokens", "lm_head"]}, id="both trained"),
        pytest.param({"trainable_token_indices": [31, 321]}, id="some rows trained"),
    ],
)
def test_new_tokens(tmp_path: Path, bases: dict[bool, Path], tied: bool, config: dict[str, Any]) -> None:
    """319 tokens became 324: the merged model has them all, and its config says so."""
    adapter, peft = grown_adapter(bases[tied], tmp_path / "adapter", 5, **config)
    result = merge_adapter(bases[tied], adapter, tmp_path / "out", rows=[*ROWS, [30, 321, 323, 40]])
    assert json.loads((result.folder / "config.json").read_text())["vocab_size"] == 324
    assert any("324 tokens" in note for note in result.notes)
    ids = torch.tensor([[30, 321, 323, 40]])
    with torch.no_grad():
        expected, got = peft(ids).logits, load_model(result.folder)(ids).logits
    assert got.shape[-1] == 324
    assert (expected - got).abs().max() < 1e-4
    assert result.proof is not None


def test_an_embedding_that_grew_without_its_head_is_refused(tmp_path: Path, bases: dict[bool, Path]) -> None:
    adapter, _ = grown_adapter(bases[False], tmp_path / "adapter", 5)
    rewrite(adapter, lambda tensors: {name: t for name, t in tensors.items() if "lm_head" not in name})
    with pytest.raises(InputError, match=r"324 rows in 'model.embed_tokens.weight' and 319 rows in 'lm_head.weight'"):
        merge_adapter(bases[False], adapter, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("indices", "says"),
    [
        ([3], "names 1 trainable tokens"),
        ([3, 999], "weight of 1000 x 64"),
        ({"lm_head": [3, 5]}, "names 0 trainable"),
    ],
)
def test_rows_that_cannot_be_are_refused(tmp_path: Path, bases: dict[bool, Path], indices: Any, says: str) -> None:
    adapter = write_adapter(bases[True], tmp_path / "adapter", trainable_token_indices=[3, 31])
    edit(adapter / "adapter_config.json", trainable_token_indices=indices)
    with pytest.raises(InputError, match=says):
        merge_adapter(bases[True], adapter, tmp_path / "out")


# ------------------------------------------------------------------------------- starts that take a part of the base


@pytest.mark.parametrize("start", ["pissa", "olora"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_starts_that_leave_a_residual(tmp_path: Path, start: str, dtype: str) -> None:
    """peft takes the start off the base when it loads such an adapter, and so does the merge."""
    base = tiny_model(tmp_path / "base", dtype=dtype)
    adapter = write_adapter(base, tmp_path / "adapter", init_lora_weights=start)
    result = merge_adapter(base, adapter, tmp_path / "out", rows=ROWS)
    expected = with_peft(base, adapter).merge_and_unload().state_dict()
    for name, weight in weights(result.folder).items():
        assert (weight.float() - expected[name].float()).abs().max() < (1e-5 if dtype == "float32" else 2e-3), name
    if dtype == "float32":
        assert_same_answers(base, adapter, result.folder)
    assert result.proof is not None


@pytest.mark.parametrize("start", ["pissa", "olora"])
def test_a_start_without_training_gives_the_base_back(tmp_path: Path, bases: dict[bool, Path], start: str) -> None:
    """W - scale * B0 @ A0 + scale * B0 @ A0 = W, which alpha / r alone would not give."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=12, target_modules=["q_proj"], init_lora_weights=start)  # type: ignore[arg-type]
    get_peft_model(load_model(bases[True]), config).save_pretrained(str(tmp_path / "adapter"))
    merge_adapter(bases[True], tmp_path / "adapter", tmp_path / "out")
    before, after = weights(bases[True]), weights(tmp_path / "out")
    assert (before[f"{Q}.weight"] - after[f"{Q}.weight"]).abs().max() < 1e-6


def test_residuals_by_hand() -> None:
    """Of diag(5, 3, 1), PiSSA takes the largest singular value and OLoRA the first direction of the columns."""
    weight = torch.diag(torch.tensor([3.0, 5.0, 1.0]))
    assert torch.allclose(residual(weight, "pissa", 1, 2.0), torch.diag(torch.tensor([3.0, 0.0, 1.0])), atol=1e-6)
    assert torch.allclose(residual(weight, "olora", 1, 1.0), torch.diag(torch.tensor([0.0, 5.0, 1.0])), atol=1e-6)


# ---------------------------------------------------------------------------------------------------------- several


def test_several_adapters_are_added_with_their_weights(tmp_path: Path, bases: dict[bool, Path]) -> None:
    """W + sum of w * scale * B @ A: what peft calls `cat`, and what its active adapters do together."""
    base = bases[True]
    one = write_adapter(base, tmp_path / "one", seed=1)
    two = write_adapter(
        base, tmp_path / "two", seed=2, targets=["q_proj", "up_proj"], r=2, lora_alpha=2, use_rslora=True
    )
    result = merge_adapter(base, [(one, 0.75), (two, -0.5)], tmp_path / "out", rows=ROWS)
    before, after = weights(base), weights(result.folder)
    expected = before[f"{Q}.weight"].double()
    for folder, factor in ((one, 0.75 * 12 / 4), (two, -0.5 * 2 / 2**0.5)):
        change = load_file(folder / "adapter_model.safetensors")
        a, b = (change[f"base_model.model.{Q}.lora_{part}.weight"].double() for part in "AB")
        expected += factor * b @ a
    assert (after[f"{Q}.weight"] - expected).abs().max() < 1e-5
    peft = with_peft(base, one)
    peft.load_adapter(str(two), "two")
    peft.add_weighted_adapter(["default", "two"], [0.75, -0.5], "both", combination_type="cat")
    peft.set_adapter("both")
    assert (logits(peft) - logits(load_model(result.folder))).abs().max() < 1e-4
    assert result.proof is not None
    mark = json.loads((result.folder / "finetune_merge.json").read_text())
    assert (mark["adapter"]["weight"], [each["weight"] for each in mark["other_adapters"]]) == (0.75, [-0.5])


def test_half_an_adapter_lies_half_way(tmp_path: Path, bases: dict[bool, Path]) -> None:
    adapter = write_adapter(bases[True], tmp_path / "adapter")
    half = weights(merge_adapter(bases[True], [(adapter, 0.5)], tmp_path / "half").folder)
    whole = weights(merge_adapter(bases[True], adapter, tmp_path / "whole").folder)
    name = f"{Q}.weight"
    assert torch.allclose(half[name], (weights(bases[True])[name] + whole[name]) / 2, atol=1e-6)


@pytest.mark.parametrize(
    "config", [{"use_dora": True}, {"modules_to_save": ["norm"]}, {"init_lora_weights": "pissa"}]
)
def test_what_replaces_cannot_be_added(tmp_path: Path, bases: dict[bool, Path], config: dict[str, Any]) -> None:
    odd = write_adapter(bases[True], tmp_path / "odd", **config)
    plain = write_adapter(bases[True], tmp_path / "plain")
    for given in ([(plain, 1.0), (odd, 1.0)], [(odd, 0.5)]):
        with pytest.raises(InputError, match="odd replaces weights"):
            merge_adapter(bases[True], given, tmp_path / "out")
    assert merge_adapter(bases[True], [(odd, 1.0)], tmp_path / "out").merged > 0


@pytest.fixture(scope="module")
def several(bases: dict[bool, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Adapters for the untied base."""
    folder, base = tmp_path_factory.mktemp("several"), bases[False]
    one = write_adapter(base, folder / "one", targets=["q_proj", "v_proj", "embed_tokens"])
    rewrite(one, lambda tensors: {name: tensor for name, tensor in tensors.items() if ".base_layer." not in name})
    made = {"one": one}
    for name, rank in (("two", 4), ("lower rank", 2)):
        targets = ["q_proj", "up_proj"]
        made[name] = write_adapter(base, folder / name, seed=2, targets=targets, r=rank, lora_alpha=2)
    return made


def by_peft(base: Path, adapters: list[Path], shares: list[float], kind: str, density: float | None) -> Any:
    """peft's own combination, merged; what DARE draws for a target begins as in the merge under test."""
    from peft.tuners.lora import LoraModel

    model = with_peft(base, adapters[0])
    model.load_adapter(str(adapters[1]), "two")
    names = {id(module): name.removeprefix("base_model.model.") for name, module in model.named_modules()}
    with pytest.MonkeyPatch.context() as patch:
        for kind_of_it in ("", "svd_"):
            method = f"_{kind_of_it}generalized_task_arithmetic_weighted_adapter"
            whole = getattr(LoraModel, method)

            def seeded(self: Any, *arguments: Any, whole: Any = whole, **more: Any) -> Any:
                target = next(each for each in arguments if id(each) in names)
                torch.manual_seed(combine.seed_of(names[id(target)]))
                return whole(self, *arguments, **more)

            patch.setattr(LoraModel, method, seeded)
        model.add_weighted_adapter(["default", "two"], shares, "both", combination_type=kind, density=density)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return model.merge_and_unload(adapter_names=["both"])


@pytest.mark.parametrize("kind", combine.KINDS[1:])
def test_adapters_are_combined_as_peft_does(
    tmp_path: Path, bases: dict[bool, Path], several: dict[str, Path], kind: str
) -> None:
    """Targets of one alone, different scales, a negative weight; and other ranks where products are added."""
    base, one, two = bases[False], several["one"], several["lower rank" if kind.endswith("svd") else "two"]
    density = None if kind in ("linear", "svd") else 0.3
    given = [(one, 0.75), (two, -0.5)]
    result = merge_adapter(base, given, tmp_path / "out", rows=ROWS, combine=kind, density=density)
    expected = by_peft(base, [one, two], [0.75, -0.5], kind, density).state_dict()
    got, before = weights(result.folder), weights(base)
    assert set(got) == set(expected)
    furthest = max(float((got[name] - expected[name]).abs().max()) for name in got)
    assert furthest < (1e-5 if kind.endswith("svd") else 1e-6), "of changes up to 6"
    changed = {name for name in got if not torch.equal(got[name], before[name])}
    assert {name.split(".")[-2] for name in changed} == {"q_proj", "v_proj", "up_proj", "embed_tokens"}
    assert result.proof is not None
    assert result.scale == 1
    assert any(note.startswith(f"The 2 adapters were made one by {kind}") for note in result.notes)
    again = merge_adapter(base, given, tmp_path / "out", combine=kind, density=density)
    assert "already holds exactly this merge" in again.notes[-1]


def test_the_same_draws_every_time(tmp_path: Path, bases: dict[bool, Path]) -> None:
    """And the dice of whoever merges are left as they were; at density 1 nothing is drawn."""
    base = bases[True]
    given = [(write_adapter(base, tmp_path / str(seed), seed=seed), 1.0) for seed in (1, 2)]
    before = torch.random.get_rng_state()
    made = [
        weights(merge_adapter(base, given, tmp_path / name, combine=kind, density=density).folder)[f"{Q}.weight"]
        for name, kind, density in (
            ("a", "dare_ties", None), ("b", "dare_ties", 0.5), ("c", "dare_linear", 1.0), ("d", "linear", None)
        )
    ]  # fmt: skip
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(made[0], made[1])
    assert torch.equal(made[2], made[3])
    with pytest.raises(RunError, match="a holds another merge"):
        merge_adapter(base, given, tmp_path / "a", combine="dare_ties", density=0.7)


@pytest.mark.parametrize(
    ("kind", "density", "says"),
    [
        ("average", None, "'average' is no way to combine adapters. Give sum, linear, ties"),
        ("ties", 0.0, "0 is no density. Give the share"),
        ("ties", 1.5, "1.5 is no density"),
        ("dare_ties_svd", float("nan"), "nan is no density"),
        ("linear", 0.5, "linear keeps all values"),
        ("sum", 0.5, "sum keeps all values"),
        ("linear", None, "linear adds the factors themselves, and those of 'model.layers.0.self_attn.q_proj' have"),
        ("ties", None, "ranks 4 and 2. Take sum, or ties_svd"),
    ],
)
def test_what_cannot_be_combined(
    tmp_path: Path, bases: dict[bool, Path], several: dict[str, Path], kind: str, density: float | None, says: str
) -> None:
    base = bases[False]
    given = [(several["one"], 1.0), (several["lower rank"], 1.0)]
    with pytest.raises(InputError) as caught:
        merge_adapter(base, given, tmp_path / "out", combine=kind, density=density)
    assert says in str(caught.value)
    if kind not in ("sum", "average"):
        with pytest.raises(InputError, match="one adapter, and nothing to combine it with"):
            merge_adapter(base, given[:1], tmp_path / "out", combine=kind)
    assert not (tmp_path / "out").exists()


# ------------------------------------------------------------------------------------------------- 4-bit training

LINEARS = [f"model.layers.{n}.{part}.weight" for n in range(2) for part in (
    *(f"self_attn.{p}_proj" for p in "qkvo"), *(f"mlp.{p}_proj" for p in ("gate", "up", "down")))]  # fmt: skip


def in_four_bits(base: Path, dtype: torch.dtype, double: bool) -> Any:
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    how = BitsAndBytesConfig(  # type: ignore[no-untyped-call]
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=double,
        bnb_4bit_compute_dtype=torch.float32,
    )
    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=dtype, quantization_config=how)
    return model.eval()


@pytest.mark.parametrize("double", [True, False])
def test_like_training_takes_the_weights_that_qlora_saw(
    tmp_path: Path, bases: dict[bool, Path], double: bool
) -> None:
    """transformers and bitsandbytes load the base in 4 bits, peft puts the adapter on it: so the merge answers."""
    from peft import PeftModel

    base = bases[False]
    adapter = write_adapter(base, tmp_path / "adapter")
    how = dict.fromkeys(LINEARS, FourBits("nf4", double, "float32"))
    plain = merge_adapter(base, adapter, tmp_path / "plain", rows=ROWS, trained=how)
    like = merge_adapter(base, adapter, tmp_path / "like", rows=ROWS, trained=how, like_training=True)
    # In training mode, with gradients: for inference some CPUs get products in bfloat16.
    training = PeftModel.from_pretrained(in_four_bits(base, torch.float32, double), str(adapter), is_trainable=True)
    trained = training.train()(IDS).logits.detach()
    far, near = ((trained - logits(load_model(result.folder))).abs().max() for result in (plain, like))
    assert near < 1e-4 < 1e-2 < far
    assert like.proof is not None
    assert plain.proof is not None
    assert plain.proof.trained is not None
    assert plain.proof.trained > 1e-2 > 1e-4 > (like.proof.trained or 0)
    assert like.proof.trained_same == like.proof.places
    assert any("--like-training merges into the 4-bit ones" in note for note in plain.notes)
    assert any("The weights are the 4-bit ones" in note for note in like.notes)
    before, after = weights(base), weights(like.folder)
    changed = sorted(name for name in before if not torch.equal(before[name], after[name]))
    assert changed == sorted(LINEARS)  # embedding, norms and head were never packed


def test_four_bits_are_those_of_a_loaded_layer(tmp_path: Path, bases: dict[bool, Path]) -> None:
    from bitsandbytes.functional import dequantize_4bit

    layer = in_four_bits(bases[False], torch.bfloat16, True).model.layers[0].mlp.up_proj
    expected = dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    weight = weights(bases[False])["model.layers.0.mlp.up_proj.weight"]
    assert torch.equal(four_bits(weight, FourBits("nf4", True, "bfloat16")), expected)
