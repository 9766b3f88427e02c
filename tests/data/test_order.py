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
    return [v for v in VECTORS if v["kind"] == kind]


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
    tail = "wrap" if vector.get("even_batches", True) else "uneven"
    return RowPlan(vector["n"], batch, vector["world"], tail, vector["drop_last"])


@pytest.mark.parametrize("vector", of_kind("BatchSamplerShard"), ids=lambda v: v["id"])
def test_batch_sampler_vectors(vector):
    if "error" in vector:
        assert vector["batch_size"] % vector["world"], "the only refusal is an indivisible batch"
        return
    plan = plan_of(vector)
    assert cut(plan, range(plan.items)) == vector["per_process"]
    assert cut_stream(plan, range(plan.items)) == vector["per_process"]
    # Accelerate's len is known to be wrong in split mode without even_batches; ours never is.
    assert plan.batches_per_rank() == [len(batches) for batches in vector["per_process"]]


@pytest.mark.parametrize(
    "vector", of_kind("BatchSamplerShard_custom_no_batch_size"), ids=lambda v: v["id"]
)
def test_custom_batch_vectors(vector):
    batches = vector["batches"]
    plan = RowPlan(len(batches), 1, vector["world"], "wrap" if vector["even_batches"] else "uneven")
    assert [[b for (b,) in rank] for rank in cut(plan, batches)] == vector["per_process"]
    assert plan.batches_per_rank() == vector["len"]


@pytest.mark.parametrize("vector", of_kind("IterableDatasetShard"), ids=lambda v: v["id"])
def test_iterable_vectors(vector):
    if "error" in vector:
        assert vector["batch_size"] % vector["world"]
        return
    ranks = cut_stream(plan_of(vector), range(vector["n"]))
    assert [[i for batch in rank for i in batch] for rank in ranks] == vector["per_process"]


@pytest.mark.parametrize(
    "vector",
    [v for v in VECTORS if v["kind"].startswith("dispatch")],
    ids=lambda v: v["id"],
)
def test_dispatcher_vectors(vector):
    batch = vector["batch_size"]
    if vector["config"].get("split_batches"):
        batch //= vector["world"]
    plan = RowPlan(vector["n"], batch, vector["world"], "level", vector["drop_last"])
    expected = [rank[0] for rank in vector["per_process"]]
    assert cut(plan, range(plan.items)) == expected
    assert cut_stream(plan, range(plan.items)) == expected


@pytest.mark.parametrize("tail", ["wrap", "level", "balance", "uneven"])
def test_every_item_is_handed_over_once(tail):
    for world in WORLDS:
        for batch in (1, 2, 3, 5):
            for n in range(0, 3 * world * batch + 2, max(1, world // 3)):
                plan = RowPlan(n, batch, world, tail)
                ranks = cut(plan, range(n))
                seen = [i for rank in ranks for cell in rank for i in cell]
                assert set(seen) == set(range(n))
                if tail in ("balance", "uneven"):
                    assert len(seen) == n
                if tail == "level":
                    assert len(seen) - n < world
                assert max((len(c) for r in ranks for c in r), default=0) <= batch
                assert [len(r) for r in ranks] == plan.batches_per_rank()
                assert ranks == cut_stream(plan, range(n))


def test_global_order_is_the_same_on_every_world():
    for tail in ("balance", "uneven"):
        for world in WORLDS:
            for n in (0, 1, 7, 16, 50):
                plan = RowPlan(n, 3, world, tail)
                rows = [
                    [i for rank in range(world) for i in read_cell(range(n), plan, row, rank)]
                    for row in range(plan.rows)
                ]
                assert [i for row in rows for i in row] == list(range(n))


def test_balance_gives_every_rank_equally_many_batches():
    for world in WORLDS:
        for batch in range(1, 6):
            for n in range(4 * world * batch + 2):
                counts = RowPlan(n, batch, world, "balance").batches_per_rank()
                uneven = len(set(counts)) > 1
                unavoidable = n < world or batch == 1
                assert not uneven or (unavoidable and max(counts) - min(counts) == 1)


def test_drop_last_drops_less_than_one_row():
    for world in WORLDS:
        plan = RowPlan(100, 3, world, "wrap", drop_last=True)
        seen = sorted(i for rank in cut(plan, range(100)) for cell in rank for i in cell)
        assert seen == list(range(100 - 100 % (3 * world)))


@pytest.mark.parametrize("tail", ["wrap", "level", "balance", "uneven"])
def test_continued_on_another_world_exactly_the_rest_remains(tail):
    rng = random.Random(0)
    for _ in range(2000):
        n, batch, world = rng.randint(1, 90), rng.randint(1, 5), rng.randint(1, 16)
        before = RowPlan(n, batch, world, tail)
        rows = rng.randint(0, before.rows)
        handed = before.items_after(rows)
        first = {
            i
            for row in range(rows)
            for r in range(world)
            for i in read_cell(range(n), before, row, r)
        }
        assert first == set(range(handed))
        after = RowPlan(n, rng.randint(1, 5), rng.randint(1, 16), tail, start=handed)
        cells = [
            read_cell(range(n), after, row, r)
            for row in range(after.rows)
            for r in range(after.world)
        ]
        rest = [i for cell in cells for i in cell]
        repeats = len(rest) - (n - handed)
        # Repeats stand at the very end only; before them comes the rest of the order, in order.
        assert rest[: n - handed] == list(range(handed, n)) and repeats >= 0
        assert repeats == 0 or tail in ("wrap", "level")


def test_lengths_add_up_when_an_epoch_is_continued():
    for world in (1, 2, 3, 4):
        for n in (1, 8, 26, 27, 31):
            plan = RowPlan(n, 2, world)
            for rows in range(plan.rows + 1):
                rest = replace(plan, start=plan.items_after(rows))
                done = [plan.batches(rank) - rest.batches(rank) for rank in range(world)]
                assert done == [rows] * world


def test_a_stream_resumes_from_every_row():
    for tail in ("wrap", "level", "balance", "uneven"):
        for n in range(30):
            for world in (1, 2, 3, 5):
                shape = RowPlan(0, 2, world, tail)
                read = 0

                def counted(begin, n=n):
                    nonlocal read
                    read = begin
                    for i in range(begin, n):
                        read = i + 1
                        yield i

                whole = list(stream_rows(counted(0), shape, lambda: read))  # noqa: B023
                head = list(range(min(n, shape.row_items)))
                for k, (_, (mark, rows_to_skip, _)) in enumerate(whole[:-1]):
                    begin = mark or 0
                    again = stream_rows(counted(begin), shape, lambda: read, head, begin)  # noqa: B023
                    rest = [cells for cells, _ in again][rows_to_skip:]
                    assert rest == [cells for cells, _ in whole[k + 1 :]]
                assert not whole or whole[-1][1] == (n, 0, True)
