"""The caching allocator's replay: sequences worked out by hand, and torch's rules once more, written plainly."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from finetune.allocator import CachingAllocator, Piece, rounded

KIB, MIB = 2**10, 2**20


def counts(allocator: CachingAllocator) -> tuple[int, int]:
    return allocator.allocated, allocator.reserved


# --------------------------------------------------------------------------------------------------- one request


@pytest.mark.parametrize(
    ("asked", "counted"), [(0, 0), (1, 512), (511, 512), (512, 512), (513, 1024), (MIB + 1, MIB + 512)]
)
def test_sizes_are_rounded_up_to_512_bytes(asked: int, counted: int) -> None:
    assert rounded(asked) == counted


@pytest.mark.parametrize(
    ("asked", "allocated", "reserved"),
    [
        (1, 512, 2 * MIB),  # small pool: segments of 2 MiB
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),  # large pool: 20 MiB for what is below 10 MiB
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),  # larger requests get a segment of their own, in steps of 2 MiB
        (11 * MIB, 12 * MIB, 12 * MIB),  # the rest of 1 MiB is not split off, so it counts as allocated
        (11 * MIB - 512, 11 * MIB - 512, 12 * MIB),  # 1 MiB + 512 is
        (10 * MIB + 1, 10 * MIB + 512, 12 * MIB),
        (100 * MIB + 1, 100 * MIB + 512, 102 * MIB),
    ],
)
def test_the_first_request_decides_its_segment(asked: int, allocated: int, reserved: int) -> None:
    allocator = CachingAllocator()
    allocator.take(asked)
    assert counts(allocator) == (allocated, reserved)


# ----------------------------------------------------------------------------------------------------- sequences


def test_small_requests_share_a_segment_until_it_is_full() -> None:
    allocator = CachingAllocator()
    for number in range(1, 5):
        allocator.take(512 * KIB)
        assert counts(allocator) == (number * 512 * KIB, 2 * MIB)
    allocator.take(1)  # the fifth finds nothing
    assert counts(allocator) == (2 * MIB + 512, 4 * MIB)


def test_small_and_large_requests_never_share_a_segment() -> None:
    allocator = CachingAllocator()
    allocator.take(2 * MIB)  # 18 MiB of this segment are free
    allocator.take(MIB)
    assert counts(allocator) == (3 * MIB, 22 * MIB)
    allocator.take(2 * MIB)
    assert counts(allocator) == (5 * MIB, 22 * MIB)


def test_a_small_rest_of_512_bytes_is_split_off_and_a_large_one_of_1_mib_is_not() -> None:
    small = CachingAllocator()
    small.take(MIB)
    small.take(MIB - 512)
    assert counts(small) == (2 * MIB - 512, 2 * MIB)
    small.take(512)  # fills the rest
    assert counts(small) == (2 * MIB, 2 * MIB)

    large = CachingAllocator()
    for size in (9 * MIB, 9 * MIB):
        large.take(size)
    assert counts(large) == (18 * MIB, 20 * MIB)
    large.take(MIB + 512)  # of the 2 MiB left, 1 MiB - 512 would remain: too little to split off
    assert counts(large) == (20 * MIB, 20 * MIB)


def test_the_smallest_free_block_that_is_large_enough_is_taken() -> None:
    allocator = CachingAllocator()
    first = allocator.take(4 * MIB)
    allocator.take(2 * MIB)  # keeps its neighbours apart
    second = allocator.take(3 * MIB)
    allocator.take(2 * MIB)
    # Free behind them: 9 MiB of the 20.
    allocator.give(first)
    allocator.give(second)
    at = second.address
    assert allocator.take(3 * MIB - 512).address == at  # 3 MiB fit best, not 4 or 9
    assert counts(allocator) == (7 * MIB, 20 * MIB)  # taken whole
    assert allocator.take(3 * MIB).address == first.address  # of 4 MiB, and 1 MiB too little to split off
    assert counts(allocator) == (11 * MIB, 20 * MIB)


def test_of_equal_blocks_the_lowest_address_is_taken() -> None:
    allocator = CachingAllocator()
    pieces = [allocator.take(256 * KIB) for _ in range(8)]
    for number in (5, 1, 3):
        allocator.give(pieces[number])
    assert [allocator.take(256 * KIB).address for _ in range(3)] == [pieces[n].address for n in (1, 3, 5)]


def test_of_equal_blocks_in_two_segments_the_newer_one_is_taken() -> None:
    """The driver hands out falling addresses."""
    allocator = CachingAllocator()
    older, newer = allocator.take(20 * MIB), allocator.take(20 * MIB)
    allocator.give(newer)
    allocator.give(older)
    assert allocator.take(20 * MIB).address == newer.address < older.address


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (1, 0, 2), (2, 1, 0)])
def test_free_neighbours_become_one_block(order: tuple[int, ...]) -> None:
    allocator = CachingAllocator()
    pieces = [allocator.take(6 * MIB) for _ in range(3)]  # 18 of 20 MiB
    start = min(piece.address for piece in pieces)
    for number in order:
        allocator.give(pieces[number])
    assert counts(allocator) == (0, 20 * MIB)
    whole = allocator.take(20 * MIB)
    assert (whole.address, whole.size, allocator.reserved) == (start, 20 * MIB, 20 * MIB)


def test_blocks_that_are_apart_do_not_add_up() -> None:
    allocator = CachingAllocator()
    first, _, third = (allocator.take(6 * MIB) for _ in range(3))
    allocator.give(first)
    allocator.give(third)  # 6 and 8 MiB are free, 14 in all
    allocator.take(9 * MIB)
    assert counts(allocator) == (15 * MIB, 40 * MIB)


def test_peaks_start_again_at_what_is_held() -> None:
    allocator = CachingAllocator()
    large = allocator.take(40 * MIB)
    allocator.take(30 * MIB)
    allocator.give(large)
    assert (allocator.most_allocated, allocator.most_reserved) == (70 * MIB, 70 * MIB)
    allocator.restart_peaks()
    assert (allocator.most_allocated, allocator.most_reserved) == (30 * MIB, 70 * MIB)
    allocator.take(2 * MIB)  # out of the 40 MiB that are kept
    assert (allocator.most_allocated, allocator.most_reserved) == (32 * MIB, 70 * MIB)


# ---------------------------------------------------------------------------------------------------- properties


@dataclass
class Plain:
    """The rules once more, without sorted lists and links: segments are lists of [size, used]."""

    segments: list[tuple[bool, list[list[int]]]] = field(default_factory=list)

    @property
    def allocated(self) -> int:
        return sum(size for _, blocks in self.segments for size, used in blocks if used)

    @property
    def reserved(self) -> int:
        return sum(size for _, blocks in self.segments for size, _ in blocks)

    def take(self, asked: int) -> list[int]:
        size = -(-asked // 512) * 512
        small = size <= MIB
        # Newer segments lie below older ones.
        free = [
            (block[0], -number, place, block, blocks)
            for number, (kind, blocks) in enumerate(self.segments)
            for place, block in enumerate(blocks)
            if kind == small and not block[1] and block[0] >= size
        ]
        if free:
            *_, block, blocks = min(free, key=lambda found: found[:3])
        else:
            length = 2 * MIB if small else 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
            block = [length, 0]
            blocks = [block]
            self.segments.append((small, blocks))
        rest = block[0] - size
        if rest >= 512 and (small or rest > MIB):
            block[0] = size
            blocks.insert(next(n for n, other in enumerate(blocks) if other is block) + 1, [rest, 0])
        block[1] = 1
        return block

    def give(self, block: list[int]) -> None:
        block[1] = 0
        for _, blocks in self.segments:
            for place in range(len(blocks) - 1, 0, -1):
                if not blocks[place][1] and not blocks[place - 1][1]:
                    blocks[place - 1][0] += blocks.pop(place)[0]


SIZES = st.one_of(
    st.integers(1, 4 * KIB), st.integers(1, 2 * MIB), st.integers(MIB, 24 * MIB), st.sampled_from([MIB, 10 * MIB])
)
STEPS = st.lists(st.one_of(SIZES.map(lambda size: ("take", size)), st.integers(0, 99).map(lambda n: ("give", n))))


def apart(pieces: list[Piece]) -> bool:
    by_address = sorted(pieces, key=lambda piece: piece.address)
    return all(a.address + a.size <= b.address for a, b in zip(by_address, by_address[1:], strict=False))


@settings(max_examples=200, deadline=None)
@given(STEPS)
def test_any_sequence_obeys_the_rules(steps: list[tuple[str, int]]) -> None:
    allocator, plain = CachingAllocator(), Plain()
    used: list[tuple[Piece, list[int]]] = []
    segments: list[int] = []
    most = 0
    for verb, number in steps:
        before = allocator.reserved
        if verb == "take":
            piece = allocator.take(number)
            assert piece.size >= rounded(number)
            used.append((piece, plain.take(number)))
            segments += [allocator.reserved - before] if allocator.reserved > before else []
        elif used:
            piece, block = used.pop(number % len(used))
            allocator.give(piece)
            plain.give(block)
        assert apart([piece for piece, _ in used])
        assert allocator.allocated == sum(piece.size for piece, _ in used) == plain.allocated
        assert allocator.reserved == sum(segments) == plain.reserved
        assert allocator.reserved >= max(before, allocator.allocated)
        most = max(most, allocator.allocated)
        assert (allocator.most_allocated, allocator.most_reserved) == (most, allocator.reserved)
    for piece, _ in used:
        allocator.give(piece)
    assert allocator.allocated == 0
    # Every segment is one piece again: all of them are filled to the last byte without a new one.
    for length in sorted(segments, reverse=True):
        for size in [MIB, MIB] if length == 2 * MIB else [length]:
            assert allocator.take(size).size == size
    assert counts(allocator) == (sum(segments), sum(segments))
