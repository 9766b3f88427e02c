"""Streams and several loaders inside the Trainer: resumed from every checkpoint."""

import itertools
from functools import partial

import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader

from data.datasets import (
    FlaggedStream,
    FunctionStream,
    Indices,
    RankStream,
    ShuffledStream,
    StatefulStream,
    make_loader,
    row_major,
)
from data.trainers import Recorder, fit, fit_and_resume, make_trainer
from helpers.ranks import run_ranks

pytestmark = pytest.mark.timeout(300)


def items(world):
    return 6 * world + 1  # four batches on every rank, the last of them not full


class SizedStatefulStream(StatefulStream):
    def __len__(self):
        return self.size


class SizedFlaggedStream(FlaggedStream):
    def __len__(self):
        return self.size


KINDS = [StatefulStream, SizedStatefulStream, FlaggedStream, SizedFlaggedStream]


def make_stream(kind, size, workers):
    return make_loader(kind(size), workers, batch_size=2)


def resume_streams(rank, world, folder):
    found = {}
    for kind, sharding, workers in [
        *itertools.product(KINDS, ("batch", "dispatch"), (0,)),
        (StatefulStream, "batch", 2),
    ]:
        key = f"{kind.__name__}-{sharding}-{workers}"
        loaders = {"train": partial(make_stream, kind, items(world), workers)}
        found[key] = fit_and_resume(f"{folder}/{key}", loaders, {"sharding": sharding})
    return found


@pytest.mark.parametrize("world", [1, 2])
def test_streams_resume_from_every_checkpoint(tmp_path, world):
    results = run_ranks(resume_streams, world, str(tmp_path), timeout=240)
    for key in results[0]:
        ranks = [result[key] for result in results]
        for epoch in (0, 1):
            seen = row_major([[b for e, _, b in rank["train"] if e == epoch] for rank in ranks])
            expected = list(range(items(world)))
            # Two workers read in turns, and each fills its own last step.
            assert (
                sorted(set(seen)) == expected
                if key.endswith("2")
                else seen[: len(expected)] == expected
            ), key
        for rank in ranks:
            assert len(rank["differing"]) >= 5 and not any(rank["differing"].values()), (
                key,
                rank["differing"],
            )


def combined(mode, unsized):
    short = make_loader(
        StatefulStream(6) if unsized else Indices(6),
        batch_size=1,
        shuffle=None if unsized else True,
    )
    return CombinedLoader(
        {"long": make_loader(Indices(16), batch_size=2, shuffle=True), "short": short}, mode
    )


def resume_combined(rank, world, folder):
    found = {}
    for mode, unsized in itertools.product(
        ("max_size_cycle", "min_size", "max_size"), (False, True)
    ):
        loaders = {"train": lambda mode=mode, unsized=unsized: combined(mode, unsized)}
        found[mode, unsized] = fit_and_resume(f"{folder}/{mode}-{unsized}", loaders)
    return found


def test_combined_loaders_resume_in_every_mode_of_training(tmp_path):
    results = run_ranks(resume_combined, 2, str(tmp_path), timeout=240)
    for key in results[0]:
        ranks = [result[key] for result in results]
        for rank in ranks:
            assert len(rank["differing"]) >= 5 and not any(rank["differing"].values()), (
                key,
                rank["differing"],
            )
        first = [[batch for e, _, batch in rank["train"] if e == 0] for rank in ranks]
        if key[0] != "min_size":
            assert sorted(row_major([[batch["long"] for batch in rank] for rank in first])) == list(
                range(16)
            )


def call_all(functions):
    return torch.tensor([function() for function in functions])


def train_on_streams(rank, world, folder):
    """Samples that this rank has seen, or the error, by case."""
    by_rank = lambda workers=0: make_loader(RankStream(16, rank, world), workers, batch_size=2)  # noqa: E731
    cases = {
        "by rank": (by_rank, {}),
        "by rank, workers": (partial(by_rank, 2), {}),
        "beside another loader": (
            lambda: CombinedLoader([make_loader(Indices(8), batch_size=2), by_rank()], "min_size"),
            {},
        ),
        "own": (by_rank, {"streams": "own"}),
        "own, workers": (partial(by_rank, 2), {"streams": "own"}),
        "cut": (by_rank, {"streams": "cut"}),
        "shuffled": (lambda: make_loader(ShuffledStream(16), batch_size=2), {}),
        "not pickled": (
            lambda: make_loader(FunctionStream(16, rank, world), batch_size=2, collate_fn=call_all),
            {},
        ),
    }
    found = {}
    for case, (make, options) in cases.items():
        try:
            module, _ = fit(folder, {"train": make}, options, every=0, max_epochs=1)
            found[case] = [i for _, _, batch in module.seen["train"] for i in batch]
        except ValueError as error:
            found[case] = str(error)
    for stage in ("validate", "test", "predict"):
        trainer = make_trainer(folder, {}, every=0)
        try:
            getattr(trainer, stage)(Recorder({stage: by_rank}))
        except ValueError as error:
            found[stage] = str(error)
    return found


def test_ranks_that_read_different_streams_are_told(tmp_path):
    results = run_ranks(train_on_streams, 2, str(tmp_path), timeout=120)
    for rank, found in enumerate(results):
        for case in ("by rank", "by rank, workers", "beside another loader"):
            assert f"rank {rank}, fit dataloader (RankStream): the ranks read" in found[case], case
            assert 'streams="own"' in found[case]
        for stage in ("validate", "test", "predict"):
            assert f"rank {rank}, {stage} dataloader (RankStream): the ranks" in found[stage]
        for case in ("own", "own, workers"):
            assert sorted(found[case]) == list(range(rank, 16, 2)), case
        for case in ("cut", "not pickled"):
            assert len(found[case]) == 4, case
    assert sorted(results[0]["shuffled"] + results[1]["shuffled"]) == list(range(16))
