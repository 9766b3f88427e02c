"""Where elements lie: every rule of the layouts, for all world sizes from 1 to 16."""

import random
from itertools import product

import pytest

from lightning_zero3.strategies.engine.layout import (
    ALIGN_BYTES,
    REGION_BYTES,
    ChunkLayout,
    RegionLayout,
    Span,
    overlap,
    round_up,
)

WORLD_SIZES = range(1, 17)


def chunks():
    """Sizes around every border, and random ones."""
    cases = [[n] for n in (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65)]
    cases += [[a, b] for a, b in product((1, 3, 4, 16, 17), repeat=2)]
    generator = random.Random(0)
    cases += [
        [generator.randint(1, 100) for _ in range(generator.randint(1, 8))] for _ in range(60)
    ]
    return cases


def test_round_up():
    for value, multiple in product(range(40), range(1, 9)):
        assert round_up(value, multiple) == min(
            x for x in range(value, value + multiple) if x % multiple == 0
        )


@pytest.mark.parametrize("itemsize", [1, 2, 4, 8, 16, 32])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_chunk(world_size, itemsize):
    align = max(ALIGN_BYTES // itemsize, 1)
    for numels in chunks():
        layout = ChunkLayout.build(numels, world_size, itemsize)
        # Who has each element of the chunk, said three times: by the offsets, the gaps and the
        # spans.
        owner = [None] * layout.numel
        for index, (offset, numel) in enumerate(zip(layout.offsets, numels, strict=True)):
            assert offset % align == 0
            for k in range(offset, offset + numel):
                assert owner[k] is None, "parameters overlap"
                owner[k] = index
        assert list(layout.offsets) == sorted(layout.offsets)
        free = [k for k in range(layout.numel) if owner[k] is None]
        assert [k for start, stop in layout.gaps() for k in range(start, stop)] == free
        assert layout.numel == layout.shard_numel * world_size and layout.shard_numel % align == 0
        assert layout.shard_numel >= align, "a rank has nothing"
        # The padding: less than an aligned element behind each parameter, and one more for each
        # rank.
        assert len(free) < align * (len(numels) + world_size)
        for rank in range(world_size):
            check_rank(layout, numels, rank, owner)


def check_rank(layout, numels, rank, owner):
    low = rank * layout.shard_numel
    held = [None] * layout.shard_numel  # (parameter, element) as the spans say
    for index in range(len(numels)):
        span = layout.span(index, rank)
        expected = [k for k in range(layout.shard_numel) if owner[low + k] == index]
        if span is None:
            assert not expected
            continue
        assert expected == list(range(span.shard_start, span.shard_start + span.stop - span.start))
        for k in expected:
            held[k] = (index, span.start + k - span.shard_start)
            assert layout.offsets[index] + held[k][1] == low + k
    # Pieces cover the shard without holes, in order; every element is in the piece of its
    # parameter's group.


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_real_sizes_waste_below_a_thousandth(world_size):
    w = 512
    numels = [w, w, 3 * w * w, 3 * w, w * w, w, 4 * w * w, 4 * w, 4 * w * w, w]
    layout = ChunkLayout.build(numels, world_size, 2)
    assert sum(numels) <= layout.numel <= sum(numels) * 1.001


def test_chunk_by_hand():
    # fp32: four elements are 16 bytes. Parameters of 5, 2 and 6 elements; the last two are of
    # another group.
    layout = ChunkLayout.build([5, 2, 6], 2, 4)
    assert layout.offsets == (0, 8, 12)
    # 18 elements in use, 9 a rank, rounded up
    assert (layout.shard_numel, layout.numel) == (
        12,
        24,
    )
    assert layout.gaps() == [(5, 8), (10, 12), (18, 24)]
    assert [layout.span(i, 0) for i in range(3)] == [Span(0, 5, 0), Span(0, 2, 8), None]
    assert [layout.span(i, 1) for i in range(3)] == [None, None, Span(0, 6, 0)]


def pools():
    generator = random.Random(1)
    cases = [
        ([], []),
        ([0, 0], [False, False]),
        ([1], [True]),
        ([1], [False]),
        ([300, 1, 5000], [False] * 3),
    ]
    for _ in range(200):
        count = generator.randint(1, 9)
        sizes = [generator.choice([0, 1, 255, 256, 257, 1000, 4096, 100_000]) for _ in range(count)]
        cases.append((sizes, [generator.random() < 0.2 for _ in range(count)]))
    return cases


@pytest.mark.parametrize("ends", [1, 2])
def test_arena(ends):
    for sizes, separate in pools():
        layout = RegionLayout.build(sizes, separate, ends)
        for region, size in zip(layout.regions, sizes, strict=True):
            assert (
                region.start % REGION_BYTES == 0
                and len(region) >= size
                and region.stop <= layout.nbytes
            )
        for i, a in enumerate(layout.regions):
            for j, b in enumerate(layout.regions):
                common = max(a.start, b.start) < min(a.stop, b.stop)
                assert overlap(a, b) == common
                assert i == j or not (common and separate[i])
        shared = [i for i, own in enumerate(separate) if not own]
        rounded = [round_up(s, REGION_BYTES) for s in sizes]
        own = sum(rounded[i] for i, alone in enumerate(separate) if alone)
        if ends == 2:
            for i, j in zip(shared, shared[1:], strict=False):
                assert not overlap(layout.regions[i], layout.regions[j]), (
                    "neighbours must be alive together"
                )
            pairs = [rounded[i] + rounded[j] for i, j in zip(shared, shared[1:], strict=False)]
            area = max(pairs, default=max((rounded[i] for i in shared), default=0))
        else:
            area = max((rounded[i] for i in shared), default=0)
        assert layout.nbytes == area + own


def test_arena_by_hand():
    layout = RegionLayout.build([256, 700, 512, 10], [False, True, False, False])
    # Shared: 256, 512, 10 -> 256; the largest neighbours are 256 + 512 and 512 + 256. Unit 1 stands
    # behind them.
    assert layout.regions == (range(0, 256), range(768, 1536), range(256, 768), range(0, 256))
    assert layout.nbytes == 1536
