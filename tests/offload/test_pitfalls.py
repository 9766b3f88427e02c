"""What went wrong in other engines' offload: the test that covers it here, or why it cannot happen.

In the dictionary: a test of this folder ("file::test" or "file::test[case]"), or a sentence.
"""

import re
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

from helpers.parity import trainer, zero3
from helpers.ranks import run_ranks
from lightning_zero3.strategies.engine import streams
from offload.test_trainer import Lit, full_weights

PITFALLS = {
    # of optimizer state and parameters
    "options of the step that is queued, not of when it runs": "test_engine::test_bit_for_bit",
    "several groups with different options": "test_trainer::test_every_number_as_without[clipped]",
    "a rank that owns nothing of a parameter": "test_trainer::test_every_number_as_without[4-clipped]",
    "gradients of later micro-batches are dropped": "test_bytes::test_transfers",
    "a norm of a part, or on another device": "test_trainer::test_every_number_as_without[clipped]",
    "an infinity is found when units have stepped": "test_trainer::test_every_number_as_without[scaled]",
    "loading state peaks on the device": "State is cut on the host, one parameter at a time.",
    "state that cannot be loaded elsewhere": "test_trainer::test_every_number_as_without[clipped]",
    "`.to(device)` after set-up": "`model_to_device` does nothing, and modules hold no shards.",
    "`module.device` is the host": "test_pitfalls::test_moments",
    "what is kept in fp32 is rounded": "test_trainer::test_every_number_as_without[bfloat16]",
    "frozen parameters are copied back, or stepped": "test_bytes::test_transfers",
    "streams are made in each step": "test_pitfalls::test_moments",
    "memory is pinned inside of hooks": "It is registered at set-up, and for activations between"
    " steps.",
    "pinned memory is rounded to powers of two": "It is registered in one piece, never by torch's"
    " allocator, whose options for the host do not matter.",
    "an error of the worker is lost": "test_engine::test_an_error_of_the_worker_is_raised",
    "the worker takes all cores": "test_engine::test_the_worker_takes_half_of_the_cores",
    "workers of loaders are forked": "test_pitfalls::test_moments",
    "an exception, or SIGTERM, while a step is pending": "test_pitfalls::test_moments",
    "everything is copied to the device at once": "A unit is copied when it is unsharded.",
    "CUDA graphs replay without the copies": "test_trainer::test_what_needs_the_device_is_refused",
    "replicas step more than once": "test_trainer::test_every_number_as_without[hybrid]",
    "fused optimizers are not clipped": "test_trainer::test_every_number_as_without[bfloat16]",
    "a slow optimizer is not told": "test_trainer::test_what_is_told",
    "averages": "test_trainer::test_every_number_as_without[averaged]",
    "SWA": "test_trainer::test_every_number_as_without[weights averaged]",
    "pruning": "test_trainer::test_every_number_as_without[pruned]",
    "added groups": "test_trainer::test_every_number_as_without[added]",
    "memory is written while it is read": "test_engine::test_memory_that_is_still_read_is_not_written_to",
    # of activations
    "forwards without gradients": "test_activations::test_bit_for_bit[without gradients between]",
    "two forwards before a backward": "test_activations::test_bit_for_bit[two forwards]",
    "views, changes in place": "test_activations::test_bit_for_bit[plain]",
    "double backward": "test_activations::test_bit_for_bit[double backward]",
    "the last unit leaves in vain": "test_activations::test_what_is_on_the_device",
    "the host's memory is made anew in each step": "test_activations::test_what_is_on_the_device",
    "memory is used again before its copy has ended": "test_activations::test_a_wait_that_is_missing_shows",
    "weights are moved": "They are saved as places in their unit's buffer, before anything moves.",
}


def test_the_tests_exist():
    for covered in PITFALLS.values():
        if found := re.fullmatch(r"(test_\w+)::(test_\w+)(?:\[(?:\d-)?(.+)\])?", covered):
            file, name, case = found.groups()
            text = Path(__file__).with_name(f"{file}.py").read_text()
            assert f"def {name}(" in text and (case is None or f'"{case}"' in text), covered
        else:
            assert covered.endswith("."), covered


class Ends(Exception):
    """The end of a run."""


class Eventful(Lit):
    """Looks at its device, and ends when a step has just been queued."""

    def training_step(self, batch, batch_idx):
        assert self.device == next(self.parameters()).device == self.trainer.strategy.root_device
        return super().training_step(batch, batch_idx)

    def train_dataloader(self):
        return DataLoader(super().train_dataloader().dataset, batch_size=2, num_workers=1)


class End(pl.Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if batch_idx == 2:
            raise Ends

    def on_exception(self, trainer, module, exception):
        self.weights = full_weights(trainer)


def end_early(rank, world_size):
    found, made = [], []
    start = streams.Stream.__init__

    def counted(self, device):
        made.append(self)
        start(self, device)

    streams.Stream.__init__ = counted
    for offload in (None, "optimizer"):
        end, module = End(), Eventful()
        runner = trainer(zero3(offload=offload), world_size, callbacks=[end])
        try:
            runner.fit(module)
        except Ends:
            found.append((module.losses, end.weights))
        assert len(made) == 2, "of unshards and of reductions, for all steps"
        made.clear()
    return found


def test_moments():
    for (losses, weights), (its, there) in run_ranks(end_early, 2, timeout=100):
        assert its == losses and len(losses) == 3
        assert all(torch.equal(there[name], value) for name, value in weights.items())
