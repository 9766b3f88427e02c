"""Streams and several loaders inside the real Trainer."""

import pytest
from data.datasets import FlaggedStream, Indices, StatefulStream, make_loader, row_major
from data.trainers import Recorder, make_trainer
from lightning.pytorch.utilities import CombinedLoader

from helpers.ranks import run_ranks

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.filterwarnings("ignore:.*every rank reads the whole stream"),
]


def fit_stream(rank, world, folder, kind, length, workers, options, ckpt):
    def make():
        dataset = kind(13)
        if length:
            dataset.__class__ = type("Sized", (kind,), {"__len__": lambda self: 13})
        return make_loader(dataset, workers, batch_size=2)

    model = Recorder({"train": make})
    trainer = make_trainer(folder, options)
    trainer.fit(model, ckpt_path=ckpt)
    return model.seen["train"], trainer.current_epoch, trainer.global_step


def resume_stream(rank, world, folder, kind, length, workers, options):
    whole = fit_stream(rank, world, folder, kind, length, workers, options, None)
    args = (f"{folder}/again", kind, length, workers, options)
    return whole, [fit_stream(rank, world, *args, f"{folder}/step={step}.ckpt") for step in range(1, whole[2])]


@pytest.mark.parametrize("kind", [StatefulStream, FlaggedStream])
@pytest.mark.parametrize("length", [False, True])
@pytest.mark.parametrize("world, options", [(1, {}), (2, {}), (2, {"sharding": "dispatch"})])
def test_resume_from_every_checkpoint(tmp_path, kind, length, world, options):
    results = run_ranks(resume_stream, world, str(tmp_path), kind, length, 0, options, timeout=50)
    for epoch in (0, 1):
        ranks = [[b for e, _, b in whole[0] if e == epoch] for whole, _ in results]
        assert row_major(ranks)[:13] == list(range(13))
    for (seen, epoch, step), resumed in results:
        for done, (rest, epoch_again, step_again) in enumerate(resumed, start=1):
            assert rest == seen[done:], f"from step {done}"
            assert (epoch_again, step_again) == (epoch, step)


def fit_combined(rank, world, folder, mode, unsized, ckpt):
    def make():
        short = make_loader(StatefulStream(6) if unsized else Indices(6), batch_size=1, shuffle=None if unsized else True)
        return CombinedLoader({"long": make_loader(Indices(16), batch_size=2, shuffle=True), "short": short}, mode)

    model = Recorder({"train": make})
    trainer = make_trainer(folder, {})
    trainer.fit(model, ckpt_path=ckpt)
    return model.seen["train"], trainer.global_step


def resume_combined(rank, world, folder, mode, unsized):
    whole = fit_combined(rank, world, folder, mode, unsized, None)
    resumed = [
        fit_combined(rank, world, f"{folder}/again", mode, unsized, f"{folder}/step={step}.ckpt") for step in range(1, whole[1])
    ]
    return whole, resumed


@pytest.mark.parametrize("mode", ["max_size_cycle", "min_size", "max_size"])
@pytest.mark.parametrize("unsized", [False, True])
def test_combined_loaders_resume(tmp_path, mode, unsized):
    results = run_ranks(resume_combined, 2, str(tmp_path), mode, unsized, timeout=50)
    for (seen, _), resumed in results:
        for done, (rest, _) in enumerate(resumed, start=1):
            assert rest == seen[done:], f"from step {done}"
    longest = [[batch["long"] for e, _, batch in whole[0] if e == 0] for whole, _ in results]
    assert sorted(row_major(longest)) == list(range(16)) or mode == "min_size"


def evaluate_several(rank, world, folder):
    loaders = lambda: [make_loader(Indices(n), batch_size=2) for n in (7, 5)]  # noqa: E731
    model = Recorder({"test": loaders})
    model.test_step = lambda batch, batch_idx, dataloader_idx=0: model.seen["test"].append((dataloader_idx, batch.tolist()))
    trainer = make_trainer(folder, {}, every=0)
    trainer.test(model, verbose=False)
    return model.seen["test"]


def test_several_evaluation_loaders(tmp_path):
    results = run_ranks(evaluate_several, 2, str(tmp_path), timeout=30)
    for index, n in enumerate((7, 5)):
        assert row_major([[b for i, b in seen if i == index] for seen in results]) == list(range(n))
