"""The ledger: the peak of each phase, who was live then, what passes inside a kernel, blocks that stand for many."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from finetune.allocator import CachingAllocator
from finetune.ledger import Block, Ledger, by_bucket

MIB = 2**20


def block(size: int, what: str = "x", bucket: str = "activations", count: int = 1) -> Block:
    return Block(bucket, what, size, count=count)


def held(ledger: Ledger, *phases: str) -> list[str]:
    return [block.what for block in ledger.held(ledger.peak(*phases))]


def story() -> Ledger:
    """load 100; forward to 160; backward to 190 in the gradient; optimizer to 175 inside its kernel."""
    ledger = Ledger()
    ledger.take(block(100, "weights", "weights"))
    ledger.begin("forward")
    first = ledger.take(block(40, "first"))
    second = ledger.take(block(20, "second"), during="the second layer")
    ledger.begin("backward")
    gradient = ledger.take(block(30, "gradient", "gradients"))
    ledger.give(second)
    ledger.give(first)
    ledger.begin("optimizer")
    ledger.passing([25, 20], "the step")
    ledger.give(gradient)
    ledger.finish()
    return ledger


# --------------------------------------------------------------------------------------------------------- phases


def test_each_phase_has_its_peak_and_the_operation_of_it() -> None:
    ledger = story()
    assert {name: peak.bytes for name, peak in ledger.peaks.items()} == {
        "load": 100, "forward": 160, "backward": 190, "optimizer": 175,
    }  # fmt: skip
    assert [peak.during for peak in ledger.peaks.values()] == ["weights", "the second layer", "gradient", "the step"]
    assert ledger.live == 100
    assert ledger.phase == "optimizer"


def test_a_phase_starts_at_what_is_live() -> None:
    ledger = Ledger()
    large = ledger.take(block(50))
    ledger.begin("forward")
    ledger.give(large)
    ledger.take(block(10))
    assert ledger.peaks["forward"].bytes == 50
    assert [b.size for b in ledger.held(ledger.peak("forward"))] == [50]


def test_a_phase_begun_again_starts_over() -> None:
    ledger = Ledger()
    ledger.begin("forward")
    ledger.give(ledger.take(block(70)))
    ledger.begin("backward")
    ledger.begin("forward")
    ledger.take(block(30))
    assert ledger.peaks["forward"].bytes == 30
    assert list(ledger.peaks) == ["load", "forward", "backward"]


def test_the_peak_is_of_all_phases_or_of_those_that_are_named() -> None:
    ledger = story()
    assert ledger.peak().phase == "backward"
    assert ledger.peak("forward", "optimizer").phase == "optimizer"
    with pytest.raises(KeyError):
        ledger.peak("evaluation")


# ---------------------------------------------------------------------------------------------------------- blocks


def test_what_was_live_at_a_peak_is_known_afterwards() -> None:
    ledger = story()
    assert held(ledger) == ["weights", "first", "second", "gradient"]
    assert held(ledger, "forward") == ["weights", "first", "second"]
    assert held(ledger, "optimizer") == ["weights", "gradient"]
    assert by_bucket(ledger.held(ledger.peak())) == {"weights": 100, "activations": 60, "gradients": 30}


def test_what_passes_is_beside_the_blocks_of_a_peak() -> None:
    peak = story().peaks["optimizer"]
    assert (peak.bytes, peak.passing) == (175, 45)
    assert story().peaks["backward"].passing == 0


def test_a_lower_point_changes_nothing() -> None:
    ledger = story()
    before = [(peak.bytes, peak.during, peak.at) for peak in ledger.peaks.values()]
    ledger.passing([75], "as high as before, and no higher")
    assert [(peak.bytes, peak.during, peak.at) for peak in ledger.peaks.values()] == before
    ledger.passing([76], "a byte more")
    assert (ledger.peaks["optimizer"].bytes, ledger.peaks["optimizer"].during) == (176, "a byte more")


def test_a_block_may_stand_for_many() -> None:
    ledger = Ledger()
    many = ledger.take(block(10, "layers", count=24))
    one = ledger.take(block(10, "last"))
    assert ledger.live == 250
    assert by_bucket(iter([many, one])) == {"activations": 250}
    ledger.give(many)
    assert ledger.live == 10


def test_the_blocks_since_a_mark_are_those_that_are_live() -> None:
    ledger = Ledger()
    before = ledger.take(block(1, "before"))
    mark = ledger.mark()
    gone = ledger.take(block(2, "gone"))
    kept = ledger.take(block(4, "kept"))
    ledger.give(before)
    ledger.give(gone)
    assert ledger.since(mark) == [kept]
    assert [b.live for b in (before, gone, kept)] == [False, False, True]


# -------------------------------------------------------------------------------------------- as a CUDA card counts


def test_a_card_counts_512_bytes_at_a_time_for_each_block() -> None:
    ledger = Ledger(cuda=True)
    ledger.take(block(1, count=3))  # 512 each
    ledger.take(block(513))
    assert ledger.live == 3 * 512 + 1024
    ledger.passing([1, 0, 600], "two buffers, and an empty one that is none")
    assert ledger.peak().bytes == 3 * 512 + 1024 + 512 + 1024


def test_the_allocator_sees_the_same_and_its_own_peak_is_kept_per_phase() -> None:
    ledger = Ledger(cuda=True, allocator=CachingAllocator())
    ledger.begin("forward")
    kept = ledger.take(block(19 * MIB))  # of a 20 MiB segment; the rest of 1 MiB is not split off
    ledger.passing([11 * MIB], "a buffer")  # a segment of 12 MiB, whole
    ledger.begin("backward")
    ledger.give(kept)
    ledger.take(block(MIB))
    ledger.finish()
    forward, backward = ledger.peaks["forward"], ledger.peaks["backward"]
    assert (forward.bytes, forward.allocated) == (30 * MIB, 32 * MIB)
    assert (backward.bytes, backward.allocated) == (19 * MIB, 20 * MIB)
    assert ledger.allocator is not None
    assert ledger.allocator.allocated == ledger.live == MIB


def test_an_empty_tensor_asks_the_allocator_for_nothing() -> None:
    allocator = CachingAllocator()
    ledger = Ledger(cuda=True, allocator=allocator)
    ledger.give(ledger.take(block(0)))
    assert (allocator.allocated, allocator.reserved) == (0, 0)


# ------------------------------------------------------------------------------------------------------ properties

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("take"), st.integers(0, 5000), st.integers(1, 3)),
        st.tuples(st.just("give"), st.integers(0, 99), st.just(0)),
        st.tuples(st.just("passing"), st.integers(0, 5000), st.just(0)),
        st.tuples(st.just("begin"), st.integers(0, 3), st.just(0)),
    )
)


@settings(max_examples=200, deadline=None)
@given(STEPS, st.booleans())
def test_peaks_and_what_they_hold_agree_with_a_plain_account(steps: list[tuple[str, int, int]], cuda: bool) -> None:
    ledger = Ledger(cuda=cuda)
    step = 512 if cuda else 1
    live: list[Block] = []
    phase, points = "load", {"load": [(0, [])]}  # per phase: bytes, and sizes of the blocks then
    for verb, number, count in steps:
        passing = 0
        if verb == "take":
            live.append(ledger.take(block(number, count=count)))
        elif verb == "give":
            if live:
                ledger.give(live.pop(number % len(live)))
        elif verb == "passing":
            passing = -(-number // step) * step
            ledger.passing([number], "kernel")
        else:
            phase = f"phase {number}"
            ledger.begin(phase)
            points[phase] = []
        now = sum(b.size * b.count for b in live)
        assert ledger.live == now
        points[phase].append((now + passing, list(live)))
    for name, seen in points.items():
        peak = ledger.peaks[name]
        assert peak.bytes == max(size for size, _ in seen)
        first = next(blocks for size, blocks in seen if size == peak.bytes)
        assert sum(b.size * b.count for b in ledger.held(peak)) == peak.bytes - peak.passing
        assert {id(b) for b in ledger.held(peak) if b.size} == {id(b) for b in first if b.size}
