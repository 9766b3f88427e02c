"""Inside the real Trainer, on several ranks: resume, evaluation, lengths."""

import warnings

import pytest
import torch
from data.datasets import Indices, make_loader, row_major
from data.trainers import SEED, Killed, Recorder, StopAfter, make_trainer

from helpers.ranks import run_ranks

pytestmark = pytest.mark.timeout(120)


def order_of(epoch, n):
    return torch.randperm(n, generator=torch.Generator().manual_seed(SEED + epoch)).tolist()


def flat(ranks, epoch):
    """All ranks' samples of an epoch, in the global order."""
    return row_major([[batch for e, _, batch in rank if e == epoch] for rank in ranks])


def fit_and_stop(rank, world, folder, n, batch, stop, options, trainer_kwargs, ckpt=None, shuffle=True, workers=0):
    torch.manual_seed(11)
    loaders = {
        "train": lambda: make_loader(Indices(n), workers, batch_size=batch, shuffle=shuffle),
        "validate": lambda: make_loader(Indices(7), 0, batch_size=2),
    }
    model = Recorder(loaders)
    callbacks = [StopAfter(stop)] if stop else []
    trainer = make_trainer(folder, options, callbacks=callbacks, **trainer_kwargs)
    try:
        trainer.fit(model, ckpt_path=ckpt)
    except Killed:
        pass
    return {
        "train": model.seen["train"],
        "validate": model.seen["validate"],
        "draws": model.draws,
        "epoch": trainer.current_epoch,
        "step": trainer.global_step,
        "accumulate": trainer.accumulate_grad_batches,
    }


def resume_everywhere(rank, world, folder, n, batch, options, trainer_kwargs, workers=0):
    """One whole run, then a resume from every one of its checkpoints."""
    args = (n, batch, None, options, trainer_kwargs)
    whole = fit_and_stop(rank, world, folder, *args, workers=workers)
    resumed = {}
    for step in range(1, whole["step"]):
        resumed[step] = fit_and_stop(rank, world, f"{folder}/again", *args, ckpt=f"{folder}/step={step}.ckpt", workers=workers)
    return whole, resumed


@pytest.mark.parametrize(
    "world, workers, kwargs",
    [
        (1, 0, {}),
        (2, 0, {}),
        (2, 0, {"accumulate_grad_batches": 2}),
        (2, 0, {"val_check_interval": 2}),
        (2, 0, {"max_steps": 11, "max_epochs": -1}),
        (2, 2, {}),
    ],
)
def test_resume_from_every_checkpoint(tmp_path, world, workers, kwargs):
    n, batch = 13, 2
    results = run_ranks(resume_everywhere, world, str(tmp_path), n, batch, {}, kwargs, workers, timeout=100)
    per_epoch = -(-n // (batch * world))
    accumulate = kwargs.get("accumulate_grad_batches", 1)
    steps_per_epoch = -(-per_epoch // accumulate)
    for epoch in (0, 1):
        assert flat([whole["train"] for whole, _ in results], epoch)[:n] == order_of(epoch, n)
    for whole, resumed in results:
        assert len(resumed) >= 3
        for step, again in resumed.items():
            epoch, within = divmod(step, steps_per_epoch)
            done = epoch * per_epoch + min(within * accumulate, per_epoch)
            assert again["train"] == whole["train"][done:], f"from step {step}"
            assert again["draws"] == whole["draws"][done:], f"from step {step}"
            assert (again["epoch"], again["step"]) == (whole["epoch"], whole["step"])
    draws = [whole["draws"] for whole, _ in results]
    assert world == 1 or not set(draws[0]) & set(draws[1]), "ranks have dropout streams of their own"


def test_epochs_are_not_shuffled_if_the_user_did_not_ask(tmp_path):
    results = run_ranks(fit_and_stop, 2, str(tmp_path), 12, 2, None, {}, {}, None, False)
    assert flat([r["train"] for r in results], 0) == flat([r["train"] for r in results], 1) == list(range(12))


@pytest.mark.parametrize("save, load", [(4, 1), (4, 2), (4, 3), (1, 4), (3, 2), (2, 3)])
def test_resume_on_another_world(tmp_path, save, load):
    n, batch = 26, 2
    stop = 2
    saved = run_ranks(fit_and_stop, save, str(tmp_path), n, batch, stop, {}, {}, timeout=60)
    ckpt = f"{tmp_path}/step={stop}.ckpt"
    results = run_ranks(fit_and_stop, load, str(tmp_path / "again"), n, batch, None, {}, {}, ckpt, timeout=60)
    handed = flat([r["train"] for r in saved], 0)
    assert handed == order_of(0, n)[: stop * save * batch]
    rest = flat([r["train"] for r in results], 0)
    assert rest[: n - len(handed)] == order_of(0, n)[len(handed) :]
    assert len(rest) < n - len(handed) + load * batch
    assert flat([r["train"] for r in results], 1)[:n] == order_of(1, n)
    per_epoch = -(-n // (load * batch))
    for result in results:
        first = [index for epoch, index, _ in result["train"] if epoch == 0]
        assert first[-1] == per_epoch - 1 and result["epoch"] == 2
        assert [index for epoch, index, _ in result["train"] if epoch == 1] == list(range(per_epoch))


def test_the_global_batch_is_kept_by_accumulation(tmp_path):
    saved = run_ranks(fit_and_stop, 4, str(tmp_path), 32, 2, 2, {}, {})
    options = {"on_world_change": "keep_global_batch"}
    ckpt = f"{tmp_path}/step=2.ckpt"
    results = run_ranks(fit_and_stop, 2, str(tmp_path / "again"), 32, 2, None, options, {}, ckpt)
    assert {r["accumulate"] for r in results} == {2}
    assert {r["step"] for r in results} == {8}
    assert flat([r["train"] for r in results], 0) == order_of(0, 32)[16:]
    assert flat([r["train"] for r in saved], 0) == order_of(0, 32)[:16]
    with pytest.raises(AssertionError, match=r"3 ranks and 6 \(6 x 1\).*8 / 6 is none"):
        run_ranks(fit_and_stop, 3, str(tmp_path / "no"), 32, 2, None, options, {}, ckpt)


def evaluate(rank, world, folder, n, batch, stage):
    model = Recorder({stage: lambda: make_loader(Indices(n), 0, batch_size=batch)})
    trainer = make_trainer(folder, {}, every=0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        output = getattr(trainer, stage)(model)
    assert not any("exactly once" in str(w.message) for w in caught)
    return model.seen[stage], output[0]["mean"] if stage != "predict" else None


@pytest.mark.parametrize("world, n, batch", [(2, 7, 2), (3, 13, 4), (3, 10, 3), (4, 9, 2), (2, 5, 1)])
def test_evaluation_counts_every_sample_once(tmp_path, world, n, batch):
    for stage in ("validate", "test", "predict"):
        results = run_ranks(evaluate, world, str(tmp_path), n, batch, stage)
        assert row_major([seen for seen, _ in results]) == list(range(n))
        if stage != "predict":
            assert {mean for _, mean in results} == {sum(range(n)) / n}


def steps_asked_for(rank, world, folder, ckpt):
    model = Recorder({"train": lambda: make_loader(Indices(16), batch_size=2, shuffle=True)}, asks_for_steps=True)
    trainer = make_trainer(folder, {})
    trainer.fit(model, ckpt_path=ckpt)
    return model.seen["train"], model.steps


def test_asking_for_the_number_of_steps_loses_no_state(tmp_path):
    whole = run_ranks(steps_asked_for, 2, str(tmp_path), None)
    again = run_ranks(steps_asked_for, 2, str(tmp_path / "again"), f"{tmp_path}/step=3.ckpt")
    for (seen, steps), (rest, steps_again) in zip(whole, again, strict=True):
        assert rest == seen[3:] and steps == steps_again == 8


def fit_without_sharding(rank, world, folder):
    loader = make_loader(Indices(8), batch_size=2)
    model = Recorder({"train": lambda: loader})
    trainer = make_trainer(folder, {}, use_distributed_sampler=False, max_epochs=1)
    trainer.fit(model)
    return [batch for _, _, batch in model.seen["train"]], trainer.train_dataloader is loader


def test_a_user_who_shards_is_left_alone(tmp_path):
    assert run_ranks(fit_without_sharding, 2, str(tmp_path)) == [([[0, 1], [2, 3], [4, 5], [6, 7]], True)] * 2


def fit_in_other_ways(rank, world, folder):
    """Options of the Trainer that touch loaders; returns what was seen under each."""
    seen = {}

    def fit(name, **kwargs):
        loaders = {"train": lambda: make_loader(Indices(16), batch_size=2, shuffle=True)}
        loaders["validate"] = lambda: make_loader(Indices(5), batch_size=2)
        model = Recorder(loaders)
        trainer = make_trainer(folder, {}, every=0, **kwargs)
        trainer.fit(model)
        seen[name] = model.seen["train"]
        return trainer, model

    fit("limit", limit_train_batches=2)
    fit("overfit", overfit_batches=2)
    fit("reload", reload_dataloaders_every_n_epochs=1)
    fit("sanity", num_sanity_val_steps=2)
    trainer, model = fit("twice", max_epochs=1)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(model)
    seen["twice"] = model.seen["train"]
    return seen


def test_other_ways_to_fit(tmp_path):
    results = run_ranks(fit_in_other_ways, 2, str(tmp_path))
    for name in ("limit", "overfit", "reload", "sanity", "twice"):
        count = 8 if name in ("limit", "overfit") else 16
        for epoch in (0, 1):
            expected = list(range(16)) if name == "overfit" else order_of(epoch, 16)
            assert flat([r[name] for r in results], epoch) == expected[:count], name
