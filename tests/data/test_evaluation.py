"""Evaluation counts every sample once: on any number of ranks, with any number of samples, as one
process does.
"""

import itertools
from functools import partial

import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader

from data.datasets import Indices, SizedStream, Stream, make_loader, row_major
from data.trainers import Recorder, make_trainer
from helpers.models import ForceField
from helpers.parity import RTOL, trainer
from helpers.ranks import run_ranks
from lightning_zero3.strategies.collectives import GroupCollectives

pytestmark = [
    pytest.mark.timeout(300),
]

# ---- which samples ---------------------------------------------------------------------------

SIZES = [(7, 2), (13, 4), (10, 3), (9, 2), (5, 1), (1, 1), (2, 4), (3, 1)]  # samples, batch size


LOADERS = {
    "map": lambda n, batch: make_loader(Indices(n), batch_size=batch),
    "stream": lambda n, batch: make_loader(Stream(n), batch_size=batch),
    "sized stream": lambda n, batch: make_loader(SizedStream(n), batch_size=batch),
}

FEW = [size for size in SIZES if size[0] <= 5]
CASES = [
    *itertools.product(("validate", "test", "predict"), ["map"], ["batch"], SIZES),
    *itertools.product(["validate"], LOADERS, ["batch", "dispatch"], FEW),
    *itertools.product(["predict"], LOADERS, ["batch", "dispatch"], [(5, 1)]),
]


def evaluate(rank, world, folder):
    found = {}
    for stage, kind, sharding, (n, batch) in CASES:
        module = Recorder({stage: partial(LOADERS[kind], n, batch)})
        output = getattr(make_trainer(folder, {"sharding": sharding}, every=0), stage)(module)
        result = output if stage == "predict" else output[0]["mean"]
        found[stage, kind, sharding, n, batch] = module.seen[stage], result
    loaders = {"test": lambda: [make_loader(Indices(n), batch_size=2) for n in (7, 1, 5)]}
    module = Recorder(loaders)
    module.test_step = lambda batch, batch_idx, dataloader_idx=0: module.seen["test"].append(
        (dataloader_idx, batch.tolist())
    )
    make_trainer(folder, {}, every=0, limit_test_batches=2).test(module, verbose=False)
    return found, module.seen["test"], exchanges_beside_nccl(folder, world) if world > 1 else []


def exchanges_beside_nccl(folder, world):
    """What the watch may compare after each of three steps (with NCCL nobody else does), of which
    the last rank has two.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "lightning_zero3.strategies.zero3.make_collectives",
            lambda group, device: GroupCollectives(group),
        )
        module, traces = (
            Recorder({"test": lambda: make_loader(Indices(3 * world - 1), batch_size=1)}),
            [],
        )

        def step(batch, batch_idx):
            module.layer(batch.float()[:, None])
            traces.append(list(module.trainer.strategy.engine.collectives.exchange_log.trace))

        module.test_step = step
        make_trainer(folder, {}, every=0).test(module, verbose=False)
    return traces


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_every_sample_counts_once(tmp_path, world):
    results = run_ranks(evaluate, world, str(tmp_path), timeout=240)
    for key in results[0][0]:
        stage, _, _, n, _ = key
        ranks = [found[key] for found, *_ in results]
        assert row_major([seen for seen, _ in ranks]) == list(range(n)), key
        for seen, output in ranks:
            expected = (
                [torch.tensor(cell) for cell in seen] if stage == "predict" else sum(range(n)) / n
            )
            assert str(output) == str(expected), key
    for index, n in enumerate((7, 1, 5)):  # several loaders, and a limit
        assert row_major([[b for i, b in seen if i == index] for _, seen, _ in results]) == list(
            range(min(n, 4 * world))
        )
    if world > 1:
        first, *others, last = (traces for *_, traces in results)
        # Where all ranks run a step they compare it by its number; where one is lacking they
        # cannot.
        assert 0 < first[0][0] < first[1][0] and len(first[0]) > 1 and first[2][0] == -1
        assert last == first[:2] and all(traces == first for traces in others)


# ---- metrics of a sharded model --------------------------------------------------------------


def vectors(n):
    return list(torch.randn(max(n, 1), 6, generator=torch.Generator().manual_seed(n)))[:n]


class VectorStream(Stream):
    def __iter__(self):
        return iter(vectors(self.size))


def validate(rank, world, folder, alone):
    """All metrics of every way to validate, and the forces that are predicted."""

    def runner_for(**kwargs):
        kwargs = {"limit_val_batches": 1.0, **kwargs}
        return trainer(**kwargs) if alone else make_trainer(folder, {}, every=0, **kwargs)

    found = {}
    loaders = {
        "1 sample": lambda: make_loader(vectors(1), batch_size=2),
        "2 samples": lambda: make_loader(vectors(2), batch_size=1),
        "5 samples": lambda: make_loader(vectors(5), batch_size=1),
        "several loaders": lambda: [make_loader(vectors(n), batch_size=1) for n in (5, 1, 2)],
        "combined": lambda: CombinedLoader(
            [make_loader(vectors(n), batch_size=1) for n in (5, 7)], "min_size"
        ),
        "stream of 1": lambda: make_loader(VectorStream(1), batch_size=1),
        "stream of 5": lambda: make_loader(VectorStream(5), batch_size=1),
        "streams and others": lambda: [
            make_loader(d, batch_size=1) for d in (VectorStream(2), vectors(4), VectorStream(4))
        ],
    }
    for name, make in loaders.items():
        module, runner = ForceField(), runner_for()
        runner.validate(module, make(), verbose=False)
        found[name] = {key: value.item() for key, value in runner.callback_metrics.items()}
    module, runner = ForceField(), runner_for(num_sanity_val_steps=2, max_epochs=2)
    runner.fit(
        module,
        make_loader(vectors(12), batch_size=12 // world),
        make_loader(vectors(1), batch_size=1),
    )
    # more than there are: the stream ends before the limit
    limited = runner_for(limit_val_batches=10)
    limited.validate(ForceField(), make_loader(VectorStream(5), batch_size=1), verbose=False)
    found["limited stream"] = {key: value.item() for key, value in limited.callback_metrics.items()}
    found["fit"] = {key: value.item() for key, value in runner.callback_metrics.items()}
    return found, runner_for().predict(ForceField(), make_loader(vectors(5), batch_size=1))


@pytest.mark.parametrize("world", [2, 3])
def test_metrics_are_those_of_one_process(tmp_path, world):
    ((expected, forces),) = run_ranks(validate, 1, str(tmp_path), True, timeout=120)
    everyone = run_ranks(validate, world, str(tmp_path), False, timeout=240)
    for found, _ in everyone:
        assert found.keys() == expected.keys()
        for name, metrics in expected.items():
            assert found[name] == pytest.approx(metrics, rel=2 * RTOL), name
    assert len(expected["several loaders"]) == 4 * 3 + 2
    torch.testing.assert_close(
        torch.stack(row_major([mine for _, mine in everyone])), torch.cat(forces)
    )


# ---- what cannot be right --------------------------------------------------------------------


class LogsEachStep(ForceField):
    def validation_step(self, batch, batch_idx):
        self.log("step", self(batch)[0].mean(), on_step=True, sync_dist=True, batch_size=1)


def log_each_step(rank, world, folder):
    make_trainer(folder, {}, every=0).validate(
        LogsEachStep(), make_loader(vectors(3), batch_size=1), verbose=False
    )


def validate_combined(rank, world, folder):
    loaders = CombinedLoader([make_loader(vectors(n), batch_size=1) for n in (4, 1)], "max_size")
    make_trainer(folder, {}, every=0).validate(LogsEachStep(), loaders, verbose=False)


def test_what_cannot_be_right_is_an_error(tmp_path):
    with pytest.raises(
        AssertionError,
        match="(?s)reduce a value over the ranks.*Not every rank has a batch",
    ):
        run_ranks(log_each_step, 2, str(tmp_path), timeout=100)
    with pytest.raises(
        AssertionError,
        match=r"rank \d, validate dataloader \(list, 1 samples\): rank 1 has no sample.*max_size",
    ):
        run_ranks(validate_combined, 2, str(tmp_path), timeout=100)
