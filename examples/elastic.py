"""A run that loses a host and goes on with the one that is left, until the other one is back.

    python examples/elastic.py    # both hosts are this machine; about a minute

On hosts of your own start this on each of them, and again on one that comes back:

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    torchrun --nnodes 1:2 --nproc-per-node 1 --max-restarts 9 --rdzv-id 1 --rdzv-backend c10d \\
        --rdzv-endpoint FIRST_HOST:29400 examples/elastic.py SHARED_FOLDER

(Without the variable torch 2.13 tells a host that comes later no address, and both wait in vain.)
torchrun starts the processes again whenever a host goes or comes, and `ckpt_path="last"` goes on
with the next sample. The batch of a step stays the same, because each rank's is a part of it: so do
the losses, which are compared with those of a run that nothing happens to.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

import lightning_zero3  # noqa: F401  registers the strategy "zero3"

SAMPLES, BATCH, EPOCHS = 96, 8, 12
LOST_IN, BACK_AFTER = 6, 12  # steps


class Regression(LightningModule):
    """Learns y = 3x, and writes down what each step was."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(1, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1)
        )

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        if os.environ.get("LOSE_THIS_HOST") and self.global_step == LOST_IN:
            os.kill(os.getppid(), signal.SIGKILL)  # torchrun
            os.kill(os.getpid(), signal.SIGKILL)
        samples, x = batch
        loss = torch.nn.functional.mse_loss(self.model(x), 3 * x)
        ranks, rank = self.trainer.world_size, self.global_rank
        record = {"ranks": ranks, "samples": samples.tolist(), "loss": loss.item()}
        file = self.folder / f"step-{self.global_step + 1}-rank-{rank}.json"
        file.write_text(json.dumps(record))  # anew where an attempt repeats a step
        if ranks == 1:
            time.sleep(1)  # the other host needs its time to come back
        return loss

    def train_dataloader(self) -> DataLoader:
        x = torch.linspace(-1, 1, SAMPLES).unsqueeze(1)  # [SAMPLES, 1]
        return DataLoader(
            TensorDataset(torch.arange(SAMPLES), x),
            batch_size=BATCH // self.trainer.world_size,
            shuffle=True,
            generator=torch.Generator().manual_seed(3),
        )

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def train(folder: Path) -> None:
    """What each rank does, in every attempt."""
    trainer = Trainer(
        accelerator="cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        strategy="zero3",
        max_epochs=EPOCHS,
        callbacks=[ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_last=True)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Regression(folder), ckpt_path="last")


# ---- two hosts on one machine --------------------------------------------------------------------


def start_host(number: int, port: int, folder: Path, lose: bool = False) -> subprocess.Popen:
    """Start torchrun as on a host of its own."""
    options = [
        *("--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=9", f"--rdzv-id={folder.name}"),
        *("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--local-addr=127.0.0.1"),
        # the first host keeps the store; a host is lost after three seconds without a sign
        f"--rdzv-conf=is_host={int(number == 1)},last_call_timeout=2,keep_alive_interval=1",
    ]
    environ = {
        **os.environ,
        "LOSE_THIS_HOST": "1" if lose else "",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "torch.distributed.run", *options, __file__, str(folder)]
    return subprocess.Popen(command, env=environ)


def read(folder: Path) -> list[dict]:
    """Each step as the last attempt at it was, all its ranks together."""
    steps = []
    while (first := folder / f"step-{len(steps) + 1}-rank-0.json").exists():
        ranks = json.loads(first.read_text())["ranks"]
        files = [first.with_name(f"step-{len(steps) + 1}-rank-{r}.json") for r in range(ranks)]
        parts = [json.loads(file.read_text()) for file in files]
        samples = [sample for part in parts for sample in part["samples"]]
        loss = sum(part["loss"] for part in parts) / ranks
        steps.append({"ranks": ranks, "samples": samples, "loss": loss})
    return steps


def main() -> None:
    """Run both, and compare them."""
    whole, folder = Path("elastic", "undisturbed").resolve(), Path("elastic", "lost").resolve()
    whole.mkdir(parents=True)
    folder.mkdir()
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    subprocess.run([*torchrun, "--nproc-per-node=2", __file__, str(whole)], check=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    first, second = start_host(1, port, folder), start_host(2, port, folder, lose=True)
    second.wait()
    print("host 2 is lost", flush=True)
    while not (folder / f"step-{BACK_AFTER}-rank-0.json").exists():
        if first.poll() is not None:
            raise SystemExit("host 1 has ended, too")
        time.sleep(0.1)
    second = start_host(2, port, folder)
    print("host 2 is back", flush=True)
    if first.wait() or second.wait():
        raise SystemExit("the run failed")
    expected, steps = read(whole), read(folder)
    per_epoch = SAMPLES // BATCH
    for epoch in range(EPOCHS):
        parts = [step["samples"] for step in steps[epoch * per_epoch : (epoch + 1) * per_epoch]]
        assert sorted(sum(parts, [])) == list(range(SAMPLES)), f"epoch {epoch}: {parts}"
    print("step  ranks  loss      undisturbed")
    for number, (step, other) in enumerate(zip(steps, expected, strict=True), start=1):
        if number in (1, len(steps)) or step["ranks"] != steps[number - 2]["ranks"]:
            print(f"{number:4}  {step['ranks']:5}  {step['loss']:.6f}  {other['loss']:.6f}")
    worst = max(abs(a["loss"] / b["loss"] - 1) for a, b in zip(steps, expected, strict=True))
    print(f"each sample once in each of {EPOCHS} epochs; losses differ by at most {worst:.1e}")


if __name__ == "__main__":
    if sys.argv[1:]:
        train(Path(sys.argv[1]))
    else:
        main()
