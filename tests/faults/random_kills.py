"""Kills and stops at random moments of a run; resumed, it gives the weights of the undisturbed.

python tests/faults/random_kills.py [ROUNDS] [SEED]

Two ranks that the Trainer starts train with loader workers, noise from all generators, accumulation
and a validation inside the epoch, and save every third step. A round ends well if after 30 seconds
no process is left (but those that are stopped for good, which nothing but SIGKILL ends), and the
run that goes on from `ckpt_path="last"` ends with bitwise the same weights. A table of all rounds
comes last. Before Python 3.10.15 and 3.11.10 a round may stand still; docs/FAULTS.md says why.
"""

import faulthandler
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from faults.harness import _in_groups, wait_until

LEFT_S, MOST_S = 30, 300  # after a run was disturbed, and for a whole run on a busy machine
HOW = ("SIGKILL", "SIGTERM", "SIGINT", "SIGSTOP for good", "SIGSTOP for a while")
WHOM = ("one", "all", "main")
BATCHES = 48  # of a rank, in two epochs


def train(folder: Path) -> None:
    """The program of one process."""
    rank = os.environ.get("LOCAL_RANK", "0")
    faulthandler.register(signal.SIGUSR1)
    (folder / f"pid.{rank}").write_text(str(os.getpid()))
    import lightning.pytorch as pl
    import numpy as np
    import torch
    from lightning.pytorch.callbacks import ModelCheckpoint
    from torch import nn
    from torch.utils.data import DataLoader, Dataset

    from lightning_zero3 import WatchOptions, Zero3Strategy

    torch.set_num_threads(1)

    class Noisy(Dataset):
        def __len__(self):
            return 96

        def __getitem__(self, index):
            noise = [random.random(), np.random.rand(), torch.rand(()).item()]
            return torch.tensor([index / 96, *noise])

    class Model(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.1), nn.Linear(16, 1))

        def training_step(self, batch, batch_idx):
            if self.trainer.is_global_zero:
                (folder / "batches").write_text(
                    "x" * (BATCHES // 2 * self.current_epoch + batch_idx + 1)
                )
            time.sleep(0.03)
            return self.net(batch).square().mean()

        def validation_step(self, batch, batch_idx):
            self.log("loss", self.net(batch).square().mean(), sync_dist=True)

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=0.01)

        def train_dataloader(self):
            return DataLoader(Noisy(), 2, shuffle=True, num_workers=1)

        def val_dataloader(self):
            return DataLoader(Noisy(), 24)

    pl.seed_everything(1, verbose=False)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=Zero3Strategy(watch=WatchOptions(lost=6)),
        max_epochs=2,
        accumulate_grad_batches=2,
        val_check_interval=8,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[ModelCheckpoint(folder, every_n_train_steps=3, save_last=True)],
    )
    model = Model()
    trainer.fit(model, ckpt_path="last")
    with trainer.strategy.gathered():
        if trainer.is_global_zero:
            torch.save(model.state_dict(), folder / "weights.new")
            os.replace(folder / "weights.new", folder / "weights")


@dataclass
class Round:
    how: str
    whom: str
    batches: int  # after so many, or in the start
    delay_s: float
    seconds: float = 0.0  # from the signal to the end of the last process
    codes: tuple[int, int] = (0, 0)  # of the disturbed run and of the one that went on
    left: int = 0
    same: bool = False

    @property
    def is_well(self) -> bool:
        return self.same and self.left == 0 and self.codes[1] == 0


def start(folder: Path) -> subprocess.Popen:
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK", "RANK", "WORLD_SIZE")
    }
    with (folder / "log").open("a") as log:
        return subprocess.Popen(
            [sys.executable, __file__, "train", str(folder)],
            stdout=log,
            stderr=log,
            env={**environment, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
            start_new_session=True,
            # a background job's processes would ignore it
            preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
        )


def end(main: subprocess.Popen, after_s: float) -> int:
    """Wait for the processes of a run, end those that are left, and count them."""
    wait_until(lambda: main.poll() is not None and not _in_groups([main.pid]), after_s)
    left = _in_groups([main.pid])
    if left:
        os.killpg(main.pid, signal.SIGUSR1)  # their stacks, for the log
        time.sleep(1)
        os.killpg(main.pid, signal.SIGKILL)
    main.wait()
    return left


def disturb(folder: Path, main: subprocess.Popen, how: str, whom: str) -> None:
    """Send the signal; what was stopped for good is killed when the others have ended."""
    rank_1 = folder / "pid.1"
    one = int(rank_1.read_text()) if whom == "one" and rank_1.exists() else main.pid
    number = getattr(signal, how.split()[0])

    def send(number: int) -> None:
        try:
            (os.killpg if whom == "all" else os.kill)(one, number)
        except ProcessLookupError:
            pass

    send(number)
    if how == "SIGSTOP for a while":
        time.sleep(random.uniform(0.5, 4))
        send(signal.SIGCONT)
    elif how == "SIGSTOP for good":
        # Its loader's worker goes with it.
        wait_until(lambda: main.poll() is not None or _in_groups([main.pid]) <= 2, LEFT_S)
        send(signal.SIGKILL)


def batches(folder: Path) -> int:
    file = folder / "batches"
    return file.stat().st_size if file.exists() else 0


def play(found: Round, expected: bytes) -> Round:
    folder = Path(tempfile.mkdtemp(prefix="kills-"))
    how, whom = found.how, found.whom
    try:
        main = start(folder)
        wait_until(lambda: batches(folder) >= found.batches, 60)
        time.sleep(found.delay_s)
        begin = time.monotonic()
        disturb(folder, main, how, whom)
        # A run that was stopped for a while goes on.
        found.left = end(main, MOST_S if how == "SIGSTOP for a while" else LEFT_S)
        found.seconds = time.monotonic() - begin
        again = start(folder)
        found.left += end(again, MOST_S)
        found.codes = main.returncode, again.returncode
        weights = folder / "weights"
        found.same = weights.exists() and weights.read_bytes() == expected
        if not found.is_well:
            print((folder / "log").read_text(errors="replace")[-6000:], flush=True)
        return found
    finally:
        shutil.rmtree(folder)


def reference() -> tuple[bytes, float]:
    """The weights of the undisturbed run, and how long it takes to begin."""
    folder = Path(tempfile.mkdtemp(prefix="kills-"))
    try:
        begin = time.monotonic()
        main = start(folder)
        wait_until(lambda: batches(folder), MOST_S)
        seconds, left = time.monotonic() - begin, end(main, MOST_S)
        assert left == 0 and main.returncode == 0, (folder / "log").read_text()
        return (folder / "weights").read_bytes(), seconds
    finally:
        shutil.rmtree(folder)


def play_rounds(rounds: int, seed: int) -> list[Round]:
    random.seed(seed)
    expected, seconds = reference()
    played = []
    for number in range(rounds):
        # A third comes while the processes start, and some as they end.
        after = random.choice((0, random.randint(1, BATCHES), random.randint(1, BATCHES)))
        delay_s = random.uniform(0, 0.3) if after else random.uniform(0.3, seconds)
        found = Round(HOW[number % len(HOW)], random.choice(WHOM), after, delay_s)
        played.append(play(found, expected))
        print(f"{number + 1}: {played[-1]}", flush=True)
    return played


def table(played: list[Round]) -> list[str]:
    """One row for each round."""
    rows = []
    for number, found in enumerate(played, start=1):
        when = f"batch {found.batches}" if found.batches else f"start, {found.delay_s:.0f} s"
        codes = " ".join(map(str, found.codes))
        same = "the same" if found.same else "NOT the same"
        rows.append(
            f"| {number} | {found.how} | {found.whom} | {when} | {found.seconds:.0f} | {codes} |"
            f" {found.left} | {same} |"
        )
    names = f"| {len(rows)} | signal | to | after | seconds | codes | left | weights |"
    return [names, "|-" * 8 + "|", *rows]


if __name__ == "__main__":
    if sys.argv[1:2] == ["train"]:
        train(Path(sys.argv[2]))
    else:
        rounds, seed = [*map(int, sys.argv[1:]), *(40, 1)[len(sys.argv) - 1 :]]
        played = play_rounds(rounds, seed)
        wrong = [found for found in played if not found.is_well]
        print("\n".join(table(played)))
        print(f"{rounds - len(wrong)} of {rounds} as promised.")
        sys.exit(bool(wrong))
