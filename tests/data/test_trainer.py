"""Inside the Trainer, on several ranks: kill and resume."""

import itertools
import warnings
from functools import partial

import pytest
from torchdata.stateful_dataloader import StatefulDataLoader

from data.datasets import Augmented, Indices, NoisyStream, make_loader, row_major
from data.trainers import fit, fit_and_resume, order_of
from helpers.ranks import run_ranks

pytestmark = pytest.mark.timeout(300)
WORLDS = (1, 2, 3, 4)


def flat(ranks, epoch):
    """All ranks' samples of an epoch, in the global order."""
    return row_major([[batch for e, _, batch in rank if e == epoch] for rank in ranks])


# ---- one world size, every way to run --------------------------------------------------------

WAYS = {
    "plain": {},
    "accumulation": {"accumulate_grad_batches": 2},
    "validation inside the epoch": {"val_check_interval": 2},
    "sanity check": {"num_sanity_val_steps": 2},
    "max_steps": {"max_steps": 11, "max_epochs": -1},
    "limit_train_batches": {"limit_train_batches": 3},
    "overfit_batches": {"overfit_batches": 2},
    "reload": {"reload_dataloaders_every_n_epochs": 1},
    "estimated_stepping_batches": {"asks_for_steps": True},
    "persistent workers": {},
    "StatefulDataLoader": {},
    "sharded checkpoints": {"checkpoint": "sharded"},
}
BATCH = 2


def samples(world):
    return 6 * world + 1  # four batches on every rank, the last of them not full


def resume_every_way(rank, world, folder):
    found = {}
    for way, kwargs in WAYS.items():
        loader = StatefulDataLoader if way == "StatefulDataLoader" else make_loader
        workers = (
            {"workers": 2, "persistent_workers": True, "prefetch_factor": 3}
            if way == "persistent workers"
            else {}
        )
        loaders = {
            "train": partial(
                loader, Indices(samples(world)), batch_size=BATCH, shuffle=True, **workers
            ),
            "validate": lambda: make_loader(Indices(7), batch_size=2),
        }
        found[way] = fit_and_resume(f"{folder}/{way}", loaders, **kwargs)
    return found


@pytest.mark.parametrize("world", [1, 2])
def test_resume_from_every_checkpoint_in_every_way(tmp_path, world):
    results = run_ranks(resume_every_way, world, str(tmp_path), timeout=240)
    n = samples(world)
    for way in WAYS:
        ranks = [result[way] for result in results]
        count = {
            "limit_train_batches": 3 * world * BATCH,
            "overfit_batches": 2 * world * BATCH,
        }.get(way, n)
        for epoch in (0, 1):
            # Lightning reads the data that is to be overfitted in its own order.
            expected = list(range(n)) if way == "overfit_batches" else order_of(epoch, n)
            assert (
                flat([rank["train"] for rank in ranks], epoch)[: min(count, n)] == expected[:count]
            ), way
        for rank in ranks:
            assert len(rank["differing"]) >= 3
            assert not any(rank["differing"].values()), (way, rank["differing"])
        if way == "estimated_stepping_batches":
            assert {rank["steps"] for rank in ranks} == {2 * 4}
        if world == 2 and way == "plain":
            assert not set(ranks[0]["draws"]) & set(ranks[1]["draws"]), (
                "ranks have dropout streams of their own"
            )


def resume_augmented(rank, world, folder):
    validate = lambda: make_loader(Augmented(4), 0, batch_size=2)  # noqa: E731
    found = {}
    for workers in (0, 2):
        for data in (Augmented, NoisyStream):
            loaders = {
                "train": partial(make_loader, data(samples(world)), workers, batch_size=BATCH),
                "validate": validate,
            }
            name = f"{data.__name__}-{workers}"
            kwargs = {"num_sanity_val_steps": 1} if workers else {"val_check_interval": 2}
            found[name] = fit_and_resume(f"{folder}/{name}", loaders, **kwargs)
    return found


@pytest.mark.filterwarnings("ignore:.*cannot go to a position", "ignore:.*reads the whole stream")
@pytest.mark.parametrize("world", [1, 2])
def test_augmentation_goes_on_after_every_checkpoint(tmp_path, world):
    for result in run_ranks(resume_augmented, world, str(tmp_path), timeout=240):
        for name, found in result.items():
            assert len(found["differing"]) >= 3
            assert not any(found["differing"].values()), (name, found["differing"])


def fit_in_other_ways(rank, world, folder):
    def shuffled(n=16):
        return make_loader(Indices(n), batch_size=2, shuffle=True)

    module, trainer = fit(folder, {"train": shuffled}, every=0, max_epochs=1)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module)
    found = {"second fit": module.seen["train"]}
    module, _ = fit(folder, {"train": lambda: make_loader(Indices(12), batch_size=2)}, every=0)
    found["not shuffled"] = module.seen["train"]
    loader = make_loader(Indices(8), batch_size=2)
    module, trainer = fit(
        folder, {"train": lambda: loader}, every=0, max_epochs=1, use_distributed_sampler=False
    )
    found["left alone"] = (
        [batch for _, _, batch in module.seen["train"]],
        trainer.train_dataloader is loader,
    )
    return found


def test_other_ways_to_fit(tmp_path):
    results = run_ranks(fit_in_other_ways, 2, str(tmp_path), timeout=120)
    for epoch in (0, 1):
        assert flat([r["second fit"] for r in results], epoch) == order_of(epoch, 16)
        assert flat([r["not shuffled"] for r in results], epoch) == list(range(12))
    assert [r["left alone"] for r in results] == [([[0, 1], [2, 3], [4, 5], [6, 7]], True)] * 2


# ---- from every world size to every other ----------------------------------------------------

SMALL, WORKERS = 10, (0, 2)


def small_loaders(workers):
    kwargs = {"persistent_workers": True} if workers else {}
    return {
        "train": lambda: make_loader(Indices(SMALL), workers, batch_size=2, shuffle=True, **kwargs)
    }


def save_every_step(rank, world, folder):
    """The samples of one epoch with each number of workers, with a checkpoint after each step."""
    seen = {}
    for workers in WORKERS:
        module, _ = fit(f"{folder}/{world}-{workers}", small_loaders(workers), max_epochs=1)
        seen[workers] = module.seen["train"]
    return seen


def resume_all(rank, world, folder):
    """What each checkpoint of each world size continues with, to the end of the second epoch."""
    rest = {}
    for save, workers in itertools.product(WORLDS, WORKERS):
        for step in range(1, rows_of(SMALL, save) + 1):
            ckpt = f"{folder}/{save}-{workers}/step={step}.ckpt"
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                module, trainer = fit(f"{folder}/again", small_loaders(workers), ckpt=ckpt, every=0)
            derived = [str(w.message) for w in told if "number of ranks is" in str(w.message)]
            rest[save, workers, step] = (
                module.seen["train"],
                trainer.current_epoch,
                trainer.num_training_batches,
                derived,
            )
    return rest


def rows_of(n, world):
    return -(-n // (2 * world))


@pytest.mark.filterwarnings("ignore")
def test_kill_at_every_batch_and_resume_on_every_world(tmp_path):
    handed = {}  # (world, workers) -> samples handed over, in the global order
    for world in WORLDS:
        results = run_ranks(save_every_step, world, str(tmp_path), timeout=120)
        for workers in WORKERS:
            handed[world, workers] = flat([r[workers] for r in results], 0)
            assert handed[world, workers][:SMALL] == order_of(0, SMALL)
    cases = 0
    for load in WORLDS:
        results = run_ranks(resume_all, load, str(tmp_path), timeout=240)
        for key in results[0]:
            save, workers, step = key
            done = min(step * save * 2, SMALL)
            told = [len(result[key][3]) for result in results]
            assert told == [int(save != load)] + [0] * (load - 1), (
                "rank 0 says that dropout goes on from derived seeds"
            )
            assert (
                save == load
                or f"number of ranks is {load}, in the checkpoint {save}:" in results[0][key][3][0]
            )
            ranks = [result[key][0] for result in results]
            rest = flat(ranks, 0)
            # Exactly the rest, each sample once and in order; then the wrap-around that fills the
            # last step.
            assert rest[: SMALL - done] == order_of(0, SMALL)[done:], (key, load)
            assert len(rest) < SMALL - done + load * 2 and (done < SMALL or not rest), (key, load)
            assert flat(ranks, 1)[:SMALL] == order_of(1, SMALL), (key, load)
            for result in results:
                seen, epoch, total, _ = result[key]
                assert epoch == 2 and total == rows_of(SMALL, load), (
                    "the progress bar's total is that of a whole epoch"
                )
                indices = [index for e, index, _ in seen if e == 0]
                assert indices == list(
                    range(rows_of(SMALL, load) - len(indices), rows_of(SMALL, load))
                ), (key, load)
                assert [index for e, index, _ in seen if e == 1] == list(
                    range(rows_of(SMALL, load))
                )
            cases += 1
    assert cases == len(WORLDS) * len(WORKERS) * sum(rows_of(SMALL, save) for save in WORLDS)


def keep_global_batch(rank, world, folder, ckpt):
    """Stops after two steps if there is no checkpoint to continue from."""
    loaders = {"train": lambda: make_loader(Indices(32), batch_size=2, shuffle=True)}
    options = {"on_world_change": "keep_global_batch"}
    module, trainer = fit(folder, loaders, options, ckpt, max_steps=-1 if ckpt else 2)
    return module.seen["train"], trainer.accumulate_grad_batches, trainer.global_step


def test_the_global_batch_is_kept_by_accumulation_or_refused(tmp_path):
    saved = run_ranks(keep_global_batch, 4, str(tmp_path), None, timeout=100)
    assert flat([seen for seen, _, _ in saved], 0) == order_of(0, 32)[:16]
    ckpt = f"{tmp_path}/step=2.ckpt"
    results = run_ranks(keep_global_batch, 2, str(tmp_path / "again"), ckpt, timeout=100)
    assert {(accumulate, step) for _, accumulate, step in results} == {(2, 8)}
    assert flat([seen for seen, _, _ in results], 0) == order_of(0, 32)[16:]
    with pytest.raises(AssertionError, match=r"3 ranks and 6 \(6 x 1\).*8 / 6 is none"):
        run_ranks(keep_global_batch, 3, str(tmp_path / "no"), ckpt, timeout=100)
