"""Runs that are killed at random moments, also inside saves: each next start goes on by itself, to
the same end.
"""

import os
import random
import re
import signal
import threading
from contextlib import suppress
from pathlib import Path

from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint

from checkpoints.runs import Shuffled, full_weights
from helpers.parity import assert_same_tensors, trainer, zero3
from helpers.ranks import run_ranks
from lightning_zero3 import CheckpointOptions
from lightning_zero3.strategies.checkpoints.storage import damage

KILLS = int(os.environ.get("LIGHTNING_ZERO3_KILLS", 3))  # 20 take minutes
EPOCHS = 2 + KILLS // 2
STEPS = 6 * EPOCHS


class Killer(Callback):
    """Kills its process a moment after a step has ended; the step's checkpoint is written
    meanwhile.
    """

    def __init__(self, step, delay):
        self.step, self.delay = step, delay

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == self.step:
            threading.Timer(self.delay, os.kill, (os.getpid(), signal.SIGKILL)).start()


def go_on(rank, world_size, folder, kill, step=None, delay=None, background=False):
    module = Shuffled()
    saver = ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=1, save_last=True)
    runner = trainer(
        zero3(unit_policy=None, checkpoint=CheckpointOptions(background=background)),
        world_size,
        max_epochs=EPOCHS,
        enable_checkpointing=True,
        use_distributed_sampler=True,
        callbacks=[saver, *([Killer(step, delay)] if rank in kill else [])],
    )
    runner.fit(module, ckpt_path="last")
    return runner.global_step, len(module.losses), full_weights(runner)


def test_a_killed_run_goes_on_from_a_complete_checkpoint(tmp_path):
    whole = run_ranks(go_on, 2, str(tmp_path / "whole"), (), timeout=100)
    assert whole[0][:2] == (STEPS, STEPS)
    chance, folder, done = random.Random(5), tmp_path / "killed", 0
    for number in range(KILLS):
        step, delay = done + chance.randint(1, 3), chance.uniform(0, 0.12)
        assert step < STEPS
        with suppress(AssertionError):  # the run was killed, unless the moment came after its end
            kill = [(0,), (1,), (0, 1)][number % 3]
            run_ranks(go_on, 2, str(folder), kill, step, delay, number % 2 == 1, timeout=60)
        visible = [path for path in Path(folder).glob("*.ckpt")]
        assert not [found for path in visible if (found := damage(path))]
        steps = [int(found[1]) for path in visible if (found := re.match(r"step=(\d+)", path.name))]
        assert max(steps, default=0) >= done, "a checkpoint was lost"
        done = max([done, *steps])
    results = run_ranks(go_on, 2, str(folder), (), timeout=100)
    assert done > 0 and results[0][0] == STEPS
    assert results[0][1] <= STEPS - done + 1, "it began again from the start"
    assert_same_tensors(results[0][2], whole[0][2])
