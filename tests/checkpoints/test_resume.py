"""Interrupted in the middle of an epoch, resumed with or without changes."""

import warnings

import pytest
import torch
from checkpoints.runs import Shuffled, Watch, full_weights, optimizer_states, train
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.precision import MixedPrecision

from helpers.parity import assert_same_tensors, trainer, zero3
from helpers.ranks import run_ranks

STOP = 4  # steps, of 6 in an epoch; or of 3 with accumulation


class Two(Shuffled):
    """Two optimizers, of two kinds, taking turns."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        optimizer = self.optimizers()[batch_idx % 2]
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()

    def configure_optimizers(self):
        return [torch.optim.AdamW(self.net[0].parameters(), 0.01), torch.optim.SGD(self.net[3:].parameters(), 0.05, 0.9)]


def scaler():
    return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**40, growth_interval=3))


CASES = {
    "plain": (Shuffled, dict),
    "accumulation": (Shuffled, lambda: {"accumulate_grad_batches": 2}),
    "scaler": (Shuffled, lambda: {"plugins": [scaler()]}),
    "two optimizers": (Two, dict),
}


def fit(world_size, case, folder=None, read=None, epochs=3):
    build, options = CASES[case]
    module, callbacks = build(), []
    if folder is not None:
        callbacks = [ModelCheckpoint(folder, "{step}", every_n_train_steps=STOP, save_top_k=-1)]
    runner = trainer(
        zero3(unit_policy=None),
        world_size,
        max_epochs=epochs,
        enable_checkpointing=bool(callbacks),
        use_distributed_sampler=True,
        callbacks=callbacks,
        **options(),
    )
    runner.fit(module, ckpt_path=read)
    found = getattr(runner.precision_plugin, "scaler", None)
    return module.losses, full_weights(runner), torch.get_rng_state(), found and found.state_dict()


def both(rank, world_size, folder):
    """An uninterrupted run that leaves checkpoints, and one that starts from the first of them."""
    results = {}
    for case in CASES:
        whole = fit(world_size, case, f"{folder}/{case}")
        results[case] = whole, fit(world_size, case, read=f"{folder}/{case}/step={STOP}.ckpt")
    return results


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return run_ranks(both, 2, str(tmp_path_factory.mktemp("resume")), timeout=100)


@pytest.mark.parametrize("case", CASES)
def test_the_rest_of_the_run_is_the_same_to_the_bit(case, runs):
    for rank in runs:
        whole, resumed = rank[case]
        assert 0 < len(resumed[0]) < len(whole[0]) and resumed[0] == whole[0][-len(resumed[0]) :]
        assert_same_tensors(resumed[1], whole[1])
        assert torch.equal(resumed[2], whole[2])
        assert resumed[3] == whole[3]
    if case == "scaler":
        assert runs[0][case][0][3]["scale"] not in (0, 2.0**40), "the scale never changed"


# ---- changes between save and load ---------------------------------------------------------------------------------------


class Changed(Shuffled):
    """The same model, with other groups and another frozen part."""

    def __init__(self, change):
        super().__init__()
        self.change = change
        if change == "frozen now":
            self.net[0].requires_grad_(False)

    def configure_optimizers(self):
        first, rest = [*self.net[0].parameters()], [*self.net[3].parameters(), *self.net[5].parameters()]
        if self.change == "other groups":  # one became two, of which one lies across
            return torch.optim.AdamW([{"params": rest[1:]}, {"params": [*first, rest[0]], "lr": 0.5}], lr=0.5)
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.01)


def change(rank, world_size, folder):
    saved = train(world_size, Changed(None), 1, write=f"{folder}/a.ckpt", strategy=zero3(unit_policy=None))
    train(world_size, Changed("frozen now"), 1, write=f"{folder}/frozen.ckpt", strategy=zero3(unit_policy=None))
    runs = {
        "trained now": dict(module=Changed(None), path=f"{folder}/frozen.ckpt"),
        "other groups": dict(module=Changed("other groups")),
        "frozen now": dict(module=Changed("frozen now")),
        "other units": dict(module=Changed(None), strategy=zero3(unit_policy=lambda m: [m.net[0], [m.net[3], m.net[5]]])),
        "other precision": dict(module=Changed(None), precision="bf16-true"),
    }
    results = {}
    for name, options in runs.items():
        watch, module = Watch(), options.pop("module")
        strategy = options.pop("strategy", None) or zero3(unit_policy=None)
        path = options.pop("path", f"{folder}/a.ckpt")
        runner = trainer(strategy, world_size, max_epochs=2, callbacks=[watch], **options)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            runner.fit(module, ckpt_path=path)
        results[name] = watch.weights, watch.optimizers, [str(w.message) for w in caught]
        if name == "trained now":
            trained_now = *results.pop(name), full_weights(runner), optimizer_states(runner)
    return saved.weights, saved.optimizers, results, trained_now


@pytest.fixture(scope="module")
def changes(tmp_path_factory):
    return run_ranks(change, 2, str(tmp_path_factory.mktemp("change")), timeout=100)[0]


def test_state_follows_the_names_of_parameters(changes):
    weights, (before,), results, _ = changes
    assert len(before["state"]) == 6
    for name, (loaded, (after,), _) in results.items():
        assert_same_tensors(loaded, {k: v.bfloat16() if name == "other precision" else v for k, v in weights.items()})
        expected = {k: v for k, v in before["state"].items() if name != "frozen now" or not k.startswith("net.0.")}
        assert after["state"].keys() == expected.keys()
        for parameter, state in expected.items():
            for key, value in state.items():
                mine = after["state"][parameter][key]
                assert torch.equal(mine, value.to(mine.dtype)), (name, parameter, key)


def test_groups_take_the_options_of_those_that_their_parameters_came_from(changes):
    _, _, results, _ = changes
    for name, (_, (after,), _) in results.items():
        assert [group["lr"] for group in after["param_groups"]] == [0.01] * len(after["param_groups"]), name


def test_what_is_not_used_is_said(changes):
    _, _, results, _ = changes
    [told] = [text for text in results["frozen now"][2] if "saved state" in text]
    assert "'net.0.bias', 'net.0.weight' is not used: optimizer 0 does not train them" in told
    assert not [text for name in ("other groups", "other units") for text in results[name][2] if "optimizer 0" in text.lower()]


def test_what_is_trained_from_now_on_starts_without_state(changes):
    loaded, (start,), told, weights, (end,) = changes[3]
    assert start["state"].keys() == {"net.3.weight", "net.3.bias", "net.5.weight", "net.5.bias"}
    assert end["state"].keys() == start["state"].keys() | {"net.0.weight", "net.0.bias"}
    for name, state in end["state"].items():
        steps = state["step"] - (start["state"][name]["step"] if name in start["state"] else 0)
        assert steps == 12 and not torch.equal(weights[name], loaded[name])
    [remark] = [text for text in told if "starts without state" in text]
    assert remark.startswith("Optimizer 0 starts without state for 'net.0.bias', 'net.0.weight'")
