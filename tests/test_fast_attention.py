"""Rows that lie end to end, attended one by one: against each row alone, against one mask over all."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from finetune.fast import attention
from finetune.fast.attention import TURNED, _Rows, attend, by_rows, documents
from finetune.paths import KEEPS_ROWS_APART
from tests.tiny import tiny_model

FAMILIES = [name for name in KEEPS_ROWS_APART if name != "gemma2"]  # whose scores are softcapped, in eager attention
LENGTHS = [7, 1, 12, 4]


def load(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa").train()


def flat(lengths: list[int]) -> dict[str, Any]:
    """As TRL's padding-free collator gives it."""
    torch.manual_seed(3)
    ends = torch.tensor([0, *lengths]).cumsum(0).int()
    return {
        "input_ids": torch.randint(20, 300, (1, sum(lengths))),
        "position_ids": torch.cat([torch.arange(n) for n in lengths])[None],
        "cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": max(lengths), "max_length_k": max(lengths),
    }  # fmt: skip


def learned(model: Any, batches: list[dict[str, Any]], weights: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """All outputs end to end, and the gradient of all parameters."""
    outs = []
    for inputs, weight in zip(batches, weights, strict=True):
        out = model(**inputs, use_cache=False).logits[0]
        (out * weight).sum().backward()
        outs.append(out.detach())
    grads = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    return torch.cat(outs), grads


def near(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool((a - b).norm() <= 5e-6 * b.norm())


@pytest.fixture(params=[False, True], ids=["kernel", "blocks"])
def blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """By torch's kernel, or in blocks so short that rows of these tests are several."""
    monkeypatch.setattr("finetune.steps.BLOCK_QUERIES", 3)
    return bool(request.param)


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("arch", FAMILIES)
def test_rows_learn_what_they_learn_alone(tmp_path: Path, arch: str, again: bool, blocks: bool) -> None:
    """Of every family that takes this way; also with windows shorter than a row, and when layers run again."""
    window = {"sliding_window": 5} if arch in ("mistral", "gemma3_text") else {}
    folder = tiny_model(tmp_path / "m", arch=arch, **window)  # type: ignore[arg-type]
    whole, alone = load(folder), load(folder)
    if again:
        enable = getattr(whole, "activation_checkpointing_enable", None) or whole.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    inputs = flat(LENGTHS)
    weight = torch.randn(sum(LENGTHS), whole.config.vocab_size)
    apart = [{"input_ids": ids} for ids in inputs["input_ids"].split(LENGTHS, 1)]
    expected = learned(alone, apart, list(weight.split(LENGTHS)))
    with documents(whole, blocks=blocks):
        found = learned(whole, [inputs], [weight])
    assert near(found[0], expected[0])
    assert near(found[1], expected[1])


def shared(beginning: int, lengths: list[int]) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """Rows that begin alike, as `batches.laid_out` lays them (`lengths` without what is shared), and each row."""
    torch.manual_seed(3)
    first, *rest = (torch.randint(20, 300, (1, n)) for n in (beginning, *lengths))
    positions = [range(beginning), *(range(beginning, beginning + n) for n in lengths)]
    inputs = {
        "input_ids": torch.cat([first, *rest], 1),
        "position_ids": torch.tensor([[n for part in positions for n in part]]),
        "cu_seq_lens_q": torch.tensor([beginning, *lengths]).cumsum(0).int(),
    }
    return inputs, [torch.cat([first, row], 1) for row in rest]


@pytest.mark.parametrize("arch", FAMILIES)
def test_rows_that_share_a_beginning_learn_what_they_learn_alone(tmp_path: Path, arch: str, blocks: bool) -> None:
    """What is shared stands in the batch once; alone, only the first row scores it. Rows of 20, 14 and 25 tokens."""
    window = {"sliding_window": 15} if arch in ("mistral", "gemma3_text") else {}
    folder = tiny_model(tmp_path / "m", arch=arch, **window)  # type: ignore[arg-type]
    together, alone = load(folder), load(folder)
    inputs, rows = shared(13, [7, 1, 12])
    weight = torch.randn(13 + 20, together.config.vocab_size)
    first, *own = weight.split([13, 7, 1, 12])
    weights = [torch.cat([first, own[0]]), *(torch.cat([torch.zeros(13, w.shape[1]), w]) for w in own[1:])]
    expected = learned(alone, [{"input_ids": row} for row in rows], weights)
    with documents(together, blocks=blocks):
        found = learned(together, [inputs], [weight])
    places = [*range(20), 20 + 13, *range(20 + 14 + 13, 20 + 14 + 25)]
    assert near(found[0], expected[0][places])
    assert near(found[1], expected[1])


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, bool]]:
    """(queries, keys, causal) of each call of the kernel."""
    calls: list[tuple[int, int, bool]] = []
    kernel = attention._kernel

    def watched(q: Any, k: Any, v: Any, dropout: float, causal: bool, **rest: Any) -> Any:
        calls.append((q.shape[2], k.shape[2], causal))
        return kernel(q, k, v, dropout, causal, **rest)

    monkeypatch.setattr(attention, "_kernel", watched)
    return calls


def no_mask(*_: Any, **__: Any) -> None:
    raise AssertionError("a mask was made")


@pytest.mark.parametrize("arch", ["llama", "qwen3"])
def test_no_product_between_rows_and_no_mask_over_all(
    tmp_path: Path, arch: str, kernels: list[tuple[int, int, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two layers; llama's attention is turned inside the function, qwen3's is not."""
    model = load(tiny_model(tmp_path / "m", arch=arch))
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", no_mask)
    monkeypatch.setattr("transformers.masking_utils.sdpa_mask", no_mask)
    with documents(model):
        model(**flat(LENGTHS), use_cache=False)
        assert kernels == [(n, n, True) for n in LENGTHS] * 2
        kernels.clear()
        model(**shared(13, [7, 1, 12])[0], use_cache=False)
    # The beginning once, each row by itself, and all rows' queries against the beginning's keys.
    assert kernels == [(13, 13, True), (7, 7, True), (1, 1, True), (12, 12, True), (20, 13, False)] * 2


def test_a_block_of_queries_meets_the_keys_that_it_sees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the backward pass, those that see all of their row first. A row of 7 tokens has blocks of 3, 3 and 1."""
    from finetune.fast import blocks

    model, seen = load(tiny_model(tmp_path / "m", arch="llama")), list[tuple[int, int]]()
    monkeypatch.setattr("finetune.steps.BLOCK_QUERIES", 3)
    monkeypatch.setattr(attention, "_kernel_backward", no_mask)
    shares = blocks._shares

    def watched(queries: Any, keys: Any, each: int, future: Any) -> Any:
        seen.append((queries.shape[1] // each, keys.shape[1]))
        return shares(queries, keys, each, future)

    monkeypatch.setattr(blocks, "_shares", watched)
    with documents(model, blocks=True):
        model(**flat([7, 1, 6]), use_cache=False).logits.sum().backward()
        assert seen == [(1, 7), (3, 6), (3, 3), (1, 1), (3, 6), (3, 3)] * 2
        seen.clear()
        model(**shared(5, [2, 4])[0], use_cache=False).logits.sum().backward()
    # The 5 tokens that all begin with, then each row behind them.
    assert seen == [(2, 5), (3, 3), (2, 7), (2, 9), (2, 7)] * 2


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each call of the function turns queries and keys itself."""
    calls: list[bool] = []
    apply = _Rows.apply

    def watched(q: Any, k: Any, v: Any, cos: Any, *rest: Any) -> Any:
        calls.append(cos is not None)
        return apply(q, k, v, cos, *rest)  # type: ignore[no-untyped-call]

    monkeypatch.setattr(_Rows, "apply", watched)
    return calls


@pytest.mark.parametrize("arch", FAMILIES)
def test_which_families_turn_inside(tmp_path: Path, arch: str, turns: list[bool]) -> None:
    """Qwen 3 and Gemma 3 norm queries and keys before they turn, Phi 3 has one product for all three."""
    assert TURNED == ("LlamaAttention", "MistralAttention", "Qwen2Attention", "GemmaAttention")
    model = load(tiny_model(tmp_path / "m", arch=arch))
    with documents(model):
        model(**flat(LENGTHS), use_cache=False)
        assert turns == [arch in ("llama", "mistral", "qwen2", "gemma")] * 2
        assert all("forward" in vars(m) for m in model.modules() if type(m).__name__ in TURNED)
    assert not any("forward" in vars(module) for module in model.modules())


def test_what_turns_otherwise_is_left_to_transformers(tmp_path: Path, turns: list[bool]) -> None:
    """Dropout, a window shorter than a row, a cache, tables of another type than the queries."""
    model = load(tiny_model(tmp_path / "m", arch="mistral", sliding_window=12))
    layer = model.model.layers[0].self_attn
    with documents(model):
        model(**flat(LENGTHS), use_cache=False)
        assert turns == [True] * 2  # no row is longer than the window
        turns.clear()
        for module in model.modules():
            if type(module).__name__ == "MistralAttention":
                module.attention_dropout = 0.5
        model(**flat(LENGTHS), use_cache=False)
        assert turns == []  # torch's own attention drops
        layer.attention_dropout = 0.0
        model(**flat(LENGTHS), use_cache=False)
        assert turns == [True]
        model.eval()(**flat(LENGTHS), use_cache=False)
        assert turns == [True] * 3
        turns.clear()
        model(**flat([13, 2]), use_cache=False)
        assert turns == []
        model(**flat(LENGTHS), use_cache=True)  # a cache holds keys that are turned
        assert turns == [False] * 2
        turns.clear()
        with torch.autocast("cpu", torch.bfloat16):
            model(**flat(LENGTHS), use_cache=False)
        assert turns == [False] * 2


@pytest.mark.parametrize("arch", ["llama", "qwen3"])
def test_weights_in_fp32_under_autocast_learn_as_exactly_as_transformers(tmp_path: Path, arch: str) -> None:
    """The rotation's tables are fp32 there, so queries and keys come in fp32 beside values in bf16."""
    folder = tiny_model(tmp_path / "m", arch=arch)
    inputs = flat(LENGTHS)
    weight = torch.randn(sum(LENGTHS), load(folder).config.vocab_size)
    _, right = learned(load(folder), [inputs], [weight])
    found = []
    for apart in (False, True):
        model = load(folder)
        with torch.autocast("cpu", torch.bfloat16), documents(model) if apart else nullcontext():
            found.append(learned(model, [inputs], [weight])[1])
    stock, mine = (float((grads - right).norm()) for grads in found)
    assert 0 < mine < 1.2 * stock


def test_the_name_is_in_force_inside_only_and_never_saved(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(load(tiny_model(tmp_path / "m")), LoraConfig(target_modules=["q_proj"]))
    inside = model.get_base_model()
    with documents(model):
        assert inside.config._attn_implementation == "finetune_documents"
        inside.save_pretrained(tmp_path / "saved")
        model.save_pretrained(tmp_path / "adapter")
    assert inside.config._attn_implementation == "sdpa"
    for file in (tmp_path / "saved/config.json", tmp_path / "adapter/adapter_config.json"):
        assert "finetune_documents" not in json.dumps(json.loads(file.read_text()))


def test_rows_without_ends_are_refused(tmp_path: Path) -> None:
    model = load(tiny_model(tmp_path / "m"))
    with documents(model), pytest.raises(ValueError, match="cu_seq_lens_q"):
        model(input_ids=torch.tensor([[3, 4, 5]]))


# --------------------------------------------------------------------------------------------------- the function


def sees(beginning: int, lengths: list[int], window: int | None = None) -> torch.Tensor:
    """Which token sees which: those before it in its row, and in what all rows share."""
    row = torch.tensor([0] * beginning + [n for n, length in enumerate(lengths, 1) for _ in range(length)])
    at = torch.tensor([*range(beginning), *(beginning + n for length in lengths for n in range(length))])
    seen = ((row[:, None] == row[None]) | (row == 0)[None]) & (at[:, None] >= at[None])
    return seen if window is None else seen & (at[:, None] - at[None] < window)


def test_the_mask_that_others_are_measured_by_is_right() -> None:
    """One token that two rows of 2 and 1 tokens share."""
    assert sees(1, [2, 1]).int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 0, 1]]
    assert sees(0, [2, 1]).int().tolist() == [[1, 0, 0], [1, 1, 0], [0, 0, 1]]


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(1, 17), min_size=1, max_size=6), st.sampled_from([(1, 1), (4, 2), (3, 1)]),
    st.one_of(st.none(), st.integers(1, 20)), st.sampled_from([0, 0, 1, 5, 16]),
    st.one_of(st.none(), st.integers(1, 20)),
)  # fmt: skip
def test_any_rows_equal_one_mask_over_all(
    lengths: list[int], heads: tuple[int, int], window: int | None, beginning: int, blocks: int | None
) -> None:
    torch.manual_seed(0)
    total = beginning + sum(lengths)
    query = torch.randn(1, heads[0], total, 8, requires_grad=True)
    key, value = (torch.randn(1, heads[1], total, 8, requires_grad=True) for _ in range(2))
    seen = sees(beginning, lengths, window)
    expected = scaled_dot_product_attention(query, key, value, attn_mask=seen, scale=0.4, enable_gqa=True)
    ends = torch.tensor([beginning, *lengths]).cumsum(0)
    words: dict[str, Any] = {"scaling": 0.4, "cu_seq_lens_q": ends, "sliding_window": window}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("finetune.steps.BLOCK_QUERIES", blocks or 1)
        found, _ = attend(None, query, key, value, None, blocks=blocks is not None, **words)
        assert found.shape == (1, total, heads[0], 8)
        weight = torch.randn_like(found)
        both = (found, expected.transpose(1, 2))
        grads = [torch.autograd.grad((out * weight).sum(), (query, key, value)) for out in both]
    torch.testing.assert_close(found, expected.transpose(1, 2), rtol=1e-5, atol=2e-6)
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=5e-6)


ENDS = [[0, 3, 4, 7], [2, 5, 7], [3, 7], [0, 7]]


def tensors(dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """q, k and v of seven tokens, four heads over two of keys and values."""
    torch.manual_seed(4)
    return [torch.randn(1, 7, heads, 6, dtype=dtype, requires_grad=True) for heads in (4, 2, 2)]


def angles(positions: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [1, tokens, 6] as Llama has them: both halves turn by the same three angles."""
    angle = torch.tensor(positions, dtype=torch.float64)[:, None] * torch.tensor([1.0, 0.3, 0.1]).double()
    both = torch.cat([angle, angle], -1)[None]
    return both.cos(), both.sin()


def rows(
    q: Any, k: Any, v: Any, tables: Any, ends: list[int], scaling: float | None = None, blocks: bool = False
) -> torch.Tensor:
    return by_rows(q, k, v, *(tables or (None, None)), ends, scaling, blocks=blocks)


@pytest.mark.parametrize("ends", ENDS)
@pytest.mark.parametrize("turned", [False, True])
def test_its_values_are_those_of_a_mask_and_transformers_rotation(
    ends: list[int], turned: bool, blocks: bool
) -> None:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    q, k, v = tensors()
    lengths = [end - start for start, end in zip(ends, ends[1:], strict=False)]
    tables = angles([*range(ends[0]), *(ends[0] + n for length in lengths for n in range(length))])
    heads = [x.transpose(1, 2) for x in (q, k, v)]
    if turned:
        heads[:2] = apply_rotary_pos_emb(*heads[:2], *tables)
    seen = sees(ends[0], lengths)
    expected = scaled_dot_product_attention(*heads, attn_mask=seen, scale=0.3, enable_gqa=True).transpose(1, 2)
    found = rows(q, k, v, tables if turned else None, ends, 0.3, blocks)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("ends", ENDS)
@pytest.mark.parametrize("turned", [False, True])
def test_its_derivatives_are_right_in_fp64(ends: list[int], turned: bool, blocks: bool) -> None:
    # Any tables, not only those of a rotation: the backward pass is the transpose of what the forward pass does.
    dice = torch.Generator().manual_seed(5)
    tables = [torch.randn(1, 7, 6, dtype=torch.float64, generator=dice) for _ in range(2)] if turned else None
    assert torch.autograd.gradcheck(lambda q, k, v: rows(q, k, v, tables, ends, blocks=blocks), tensors())


def test_it_keeps_keys_and_values_once_per_group_of_heads(blocks: bool) -> None:
    """Floats of one token: q 4 x 6 turned, k and v 2 x 6 each, cos and sin 6; the kernel's out 4 x 6 and 4 sums."""
    q, k, v = tensors(torch.float32)
    tables = [table.float() for table in angles([*range(7)])]
    kept: dict[int, torch.Tensor] = {}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.setdefault(t.data_ptr(), t), lambda t: t):
        rows(q, k, v, tables, [0, 3, 7], blocks=blocks)
    more = 0 if blocks else 24 + 4
    assert sum(t.untyped_storage().nbytes() for t in kept.values()) == 4 * 7 * (24 + 12 + 12 + 6 + 6 + more)


def test_bf16_is_right_within_its_rounding(blocks: bool) -> None:
    """In bf16 the kernel runs either way; fp64, which it is held against, takes either."""

    exact = [x.detach().bfloat16() for x in tensors()]
    tables = [table.bfloat16() for table in angles([0, 1, 2, 3, 4, 3, 4])]
    results = []
    for dtype in (torch.float64, torch.bfloat16):
        given = [x.to(dtype).requires_grad_() for x in exact]
        out = rows(*given, [table.to(dtype) for table in tables], [3, 5, 7], blocks=blocks)
        out.sin().sum().backward()  # type: ignore[no-untyped-call]
        results.append([out.detach(), *(x.grad for x in given)])
    for right, found in zip(*results, strict=True):
        assert right is not None
        assert found is not None
        assert found.dtype == torch.bfloat16
        assert (found.double() - right).norm() < 2**-6 * right.norm()
