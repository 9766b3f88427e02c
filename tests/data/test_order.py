"""The row layouts, against Accelerate's vectors, plain lists, and as properties."""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_zero3.strategies.data.order import RowPlan, read_cell, stream_rows

VECTORS = json.loads((Path(__file__).parent / "vectors" / "accelerate.json").read_text())["vectors"]
WORLDS = range(1, 17)


def of_kind(kind):
    """Vectors whose last row is filled up; another end of Accelerate's leaves ranks without one."""
    return [v for v in VECTORS if v["kind"] == kind and v.get("even_batches", True)]


def cut(plan, items):
    """Every rank's batches, cells without items left out."""
    return [
        [cell for row in range(plan.rows) if (cell := read_cell(items, plan, row, rank))]
        for rank in range(plan.world)
    ]


def cut_stream(plan, items):
    rows = list(stream_rows(iter(items), plan, lambda: None))
    return [[cells[rank] for cells, _ in rows if cells[rank]] for rank in range(plan.world)]


def plan_of(vector):
    batch = vector["batch_size"]
    if vector["split_batches"]:
        batch //= vector["world"]
    return RowPlan(vector["n"], batch, vector["world"], drop_last=vector["drop_last"])


@pytest.mark.parametrize("vector", of_kind("BatchSamplerShard"), ids=lambda v: v["id"])
def test_batch_sampler_vectors(vector):
    if "error" in vector:
        assert vector["batch_size"] % vector["world"], "the only refusal is an indivisible batch"
        return
    plan = plan_of(vector)
    assert cut(plan, range(plan.items)) == vector["per_process"]
    assert plan.batches_per_rank() == [len(batches) for batches in vector["per_process"]]


@pytest.mark.parametrize(
    "vector", of_kind("BatchSamplerShard_custom_no_batch_size"), ids=lambda v: v["id"]
)
def test_custom_batch_vectors(vector):
    batches = vector["batches"]
    plan = RowPlan(len(batches), 1, vector["world"])
    assert [[b for (b,) in rank] for rank in cut(plan, batches)] == vector["per_process"]
    assert plan.batches_per_rank() == vector["len"]


@pytest.mark.parametrize("vector", of_kind("IterableDatasetShard"), ids=lambda v: v["id"])
def test_iterable_vectors(vector):
    """But for what fills the last row: Accelerate takes the stream's first items."""
    if "error" in vector:
        assert vector["batch_size"] % vector["world"]
        return
    plan, n = plan_of(vector), vector["n"]
    new = n - n % plan.row_items
    for rank, expected in zip(cut_stream(plan, range(n)), vector["per_process"], strict=True):
        items = [i for batch in rank for i in batch]
        assert len(items) == len(expected)
        for ours, theirs in zip(items, expected, strict=True):
            assert ours == theirs or ours >= new > theirs


@pytest.mark.parametrize("batch", [1, 2, 4])
def test_a_streams_last_row_is_filled_with_its_own_items(batch):
    ranks = cut_stream(RowPlan(0, batch, 2), range(4 * batch + 1))
    assert [rank[-1] for rank in ranks] == [[4 * batch] * batch] * 2
    assert [[i for b in rank[:-1] for i in b] for rank in ranks] == [
        [*range(k * batch, (k + 1) * batch), *range((k + 2) * batch, (k + 3) * batch)]
        for k in (0, 1)
    ]


@pytest.mark.parametrize("wraps", [True, False])
def test_every_item_is_handed_over_once(wraps):
    for world in WORLDS:
        for batch in (1, 2, 3, 5):
            for n in range(0, 3 * world * batch + 2, max(1, world // 3)):
                plan = RowPlan(n, batch, world, wraps)
                ranks = cut(plan, range(n))
                seen = [i for rank in ranks for cell in rank for i in cell]
                assert set(seen) == set(range(n))
                if not wraps:
                    assert len(seen) == n
                assert max((len(c) for r in ranks for c in r), default=0) <= batch
                assert [len(r) for r in ranks] == plan.batches_per_rank()
                streamed = cut_stream(plan, range(n))
                assert [[len(c) for c in r] for r in ranks] == [
                    [len(c) for c in r] for r in streamed
                ]
                assert {i for rank in streamed for cell in rank for i in cell} == set(range(n))
                if not wraps:
                    assert ranks == streamed


def test_global_order_is_the_same_on_every_world():
    for world in WORLDS:
        for n in (0, 1, 7, 16, 50):
            plan = RowPlan(n, 3, world, wraps=False)
            rows = [
                [i for rank in range(world) for i in read_cell(range(n), plan, row, rank)]
                for row in range(plan.rows)
            ]
            assert [i for row in rows for i in row] == list(range(n))


def test_balance_gives_every_rank_equally_many_batches():
    for world in WORLDS:
        for batch in range(1, 6):
            for n in range(4 * world * batch + 2):
                counts = RowPlan(n, batch, world, wraps=False).batches_per_rank()
                uneven = len(set(counts)) > 1
                unavoidable = n < world or batch == 1
                assert not uneven or (unavoidable and max(counts) - min(counts) == 1)


def test_drop_last_drops_less_than_one_row():
    for world in WORLDS:
        plan = RowPlan(100, 3, world, drop_last=True)
        seen = sorted(i for rank in cut(plan, range(100)) for cell in rank for i in cell)
        assert seen == list(range(100 - 100 % (3 * world)))


@pytest.mark.parametrize("wraps", [True, False])
def test_continued_on_another_world_exactly_the_rest_remains(wraps):
    rng = random.Random(0)
    for _ in range(2000):
        n, batch, world = rng.randint(1, 90), rng.randint(1, 5), rng.randint(1, 16)
        before = RowPlan(n, batch, world, wraps)
        rows = rng.randint(0, before.rows)
        handed = before.items_after(rows)
        first = {
            i
            for row in range(rows)
            for r in range(world)
            for i in read_cell(range(n), before, row, r)
        }
        assert first == set(range(handed))
        after = RowPlan(n, rng.randint(1, 5), rng.randint(1, 16), wraps, start=handed)
        cells = [
            read_cell(range(n), after, row, r)
            for row in range(after.rows)
            for r in range(after.world)
        ]
        rest = [i for cell in cells for i in cell]
        repeats = len(rest) - (n - handed)
        # Repeats stand at the very end only; before them comes the rest of the order, in order.
        assert rest[: n - handed] == list(range(handed, n)) and repeats >= 0
        assert repeats == 0 or wraps


def test_lengths_add_up_when_an_epoch_is_continued():
    for world in (1, 2, 3, 4):
        for n in (1, 8, 26, 27, 31):
            plan = RowPlan(n, 2, world)
            for rows in range(plan.rows + 1):
                rest = replace(plan, start=plan.items_after(rows))
                done = [plan.batches(rank) - rest.batches(rank) for rank in range(world)]
                assert done == [rows] * world


@pytest.mark.parametrize("wraps", [True, False])
def test_a_stream_resumes_from_every_row(wraps):
    for n in range(30):
        for world in (1, 2, 3, 5):
            shape = RowPlan(0, 2, world, wraps)
            read = 0

            def counted(begin, n=n):
                nonlocal read
                read = begin
                for i in range(begin, n):
                    read = i + 1
                    yield i

            whole = list(stream_rows(counted(0), shape, lambda: (read, None)))  # noqa: B023
            for k, (_, (mark, rows_to_skip, _)) in enumerate(whole[:-1]):
                again = stream_rows(counted(mark[0]), shape, lambda: (read, None), mark)  # noqa: B023
                rest = [cells for cells, _ in again][rows_to_skip:]
                assert rest == [cells for cells, _ in whole[k + 1 :]]
            assert not whole or whole[-1][1] == ((n, None), 0, True)
