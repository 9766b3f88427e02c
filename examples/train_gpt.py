"""Train a 10-million-parameter GPT on the source code of the Python standard library.

    python examples/train_gpt.py                       # ZeRO-3, under four minutes on two cores
    python examples/train_gpt.py --strategy ddp        # the same run, every rank holding everything
    python examples/train_gpt.py --resume --minutes 5  # five more minutes from the last checkpoint
    torchrun --nproc-per-node 2 examples/train_gpt.py  # another launcher, nothing else changes

The text is on every machine that can run this file, so nothing is downloaded. A CPU machine trains
with two processes, a GPU machine with all its GPUs. You see a progress bar with the loss, and at
the end a table: what one rank holds of the model and its optimizer, against the 16Ψ/N bytes that
ZeRO-3 promises, speed, memory, how well the model predicts text it has not seen, and some text it
wrote.

`GPT` is an ordinary LightningModule and `Trainer` an ordinary Trainer. What makes the run sharded
is `import lightning_zero3` and `strategy="zero3"`.
"""

import argparse
import json
import lzma
import math
import os
import re
import sys
import sysconfig
import time
import warnings
import zlib
from collections import Counter
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from lightning import Callback, LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint, RichProgressBar, Timer
from lightning.pytorch.utilities import rank_zero_info
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchmetrics import SumMetric

OUTPUT = Path(__file__).resolve().parent / "output" / "train_gpt"
STARTED = time.monotonic()
IGNORED = -100  # target that cross_entropy leaves out

# ------------------------------------------------------------------------------------ the text

NOT_READ = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
# A newline with its indentation, a word with the space before it, a run of signs, ... : every byte
# of any text belongs to exactly one piece.
PIECE = re.compile(rb"\n[ \t]*| ?[A-Za-z]+|_+[A-Za-z]*| ?[0-9]| +| ?[^\sA-Za-z0-9_]+|\s")


def standard_library(limit: int | None) -> tuple[bytes, bytes]:
    """Return (training text, validation text): whole files, chosen by a checksum of their names."""
    root = Path(sysconfig.get_paths()["stdlib"])
    names = [path.relative_to(root) for path in root.rglob("*.py")]
    names = sorted(name.as_posix() for name in names if not NOT_READ & set(name.parts))
    texts: dict[bool, list[bytes]] = {True: [], False: []}
    for name in names:
        texts[zlib.crc32(name.encode()) % 32 == 0].append((root / name).read_bytes())
    train, validation = b"".join(texts[False])[:limit], b"".join(texts[True])
    if min(len(train), len(validation)) < 100_000:
        raise SystemExit(
            f"Found {len(names)} Python files in {root}; expected the standard library's sources."
        )
    return train, validation if limit is None else validation[: limit // 16]


class Tokenizer:
    """The most frequent pieces of the text, then frequent parts of the others, and all 256
    bytes.
    """

    def __init__(self, text: bytes, size: int):
        counts = Counter(PIECE.findall(text))
        whole = [piece for piece, _ in counts.most_common(size * 4 // 5) if len(piece) > 1]
        known = set(whole)
        parts: Counter[bytes] = Counter()
        for piece, count in counts.items():
            for length in (2, 3, 4) if piece not in known else ():
                for start in range(len(piece) - length + 1):
                    parts[piece[start : start + length]] += count * (length - 1)
        ranked = [part for part, _ in parts.most_common() if part not in known]
        self.vocabulary = [bytes([i]) for i in range(256)] + whole + ranked
        del self.vocabulary[size:]
        self.ids = {piece: i for i, piece in enumerate(self.vocabulary)}
        self.longest = max(map(len, self.vocabulary))
        self.fingerprint = zlib.crc32(b"\0".join(self.vocabulary))

    def encode(self, text: bytes) -> torch.Tensor:
        seen: dict[bytes, list[int]] = {}
        tokens: list[int] = []
        for piece in PIECE.findall(text):
            if piece not in seen:
                seen[piece] = self._split(piece)
            tokens += seen[piece]
        return torch.tensor(tokens, dtype=torch.int32)

    def _split(self, piece: bytes) -> list[int]:
        """Take the longest known part, again and again; single bytes are always known."""
        tokens, start = [], 0
        while start < len(piece):
            stop = min(len(piece), start + self.longest)
            while piece[start:stop] not in self.ids:
                stop -= 1
            tokens.append(self.ids[piece[start:stop]])
            start = stop
        return tokens

    def decode(self, tokens: list[int]) -> str:
        return b"".join(self.vocabulary[token] for token in tokens).decode(errors="replace")


class Windows(Dataset):
    """(inputs, targets) of `length` tokens. Over all windows each token is a target exactly
    once.
    """

    def __init__(self, tokens: torch.Tensor, length: int, multiple_of: int = 1):
        count = math.ceil(len(tokens) / length)
        count = math.ceil(count / multiple_of) * multiple_of
        # The first token is predicted from token 0 (a zero byte); the end is filled with targets
        # that do not count.
        fill = torch.full((count * length - len(tokens),), IGNORED, dtype=torch.int32)
        self.targets = torch.cat([tokens, fill]).view(count, length)
        inputs = torch.cat([tokens.new_zeros(1), self.targets.flatten()[:-1]])
        self.inputs = inputs.clamp(min=0).view(count, length)

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.inputs[index].long(), self.targets[index].long()


class Corpus(LightningDataModule):
    def __init__(self, vocabulary_size: int, length: int, batch_size: int, limit: int | None):
        super().__init__()
        self.length, self.batch_size = length, batch_size
        self.train_text, self.validation_text = standard_library(limit)
        self.tokenizer = Tokenizer(self.train_text, vocabulary_size)
        self.train_tokens = self.tokenizer.encode(self.train_text)
        self.token_counts = torch.bincount(self.train_tokens, minlength=vocabulary_size) + 1
        self.validation_tokens = self.tokenizer.encode(self.validation_text)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(
            Windows(self.train_tokens, self.length), self.batch_size, shuffle=True, drop_last=True
        )

    def val_dataloader(self) -> DataLoader:
        # A distributed sampler repeats windows when their number is not a multiple of the ranks,
        # and the sum over ranks would count those twice. Empty windows make it a multiple.
        windows = Windows(self.validation_tokens, self.length, multiple_of=self.trainer.world_size)
        return DataLoader(windows, 2 * self.batch_size)

    def yardsticks(self) -> dict[str, float]:
        """Bits per byte of the validation text for methods that learn nothing about order, and for
        lzma.
        """

        def unigram(train: np.ndarray, validation: np.ndarray, symbols: int) -> float:
            counts = np.bincount(train, minlength=symbols) + 1
            return -np.log2(counts / counts.sum())[validation].sum() / len(self.validation_text)

        as_bytes = [
            np.frombuffer(text, np.uint8) for text in (self.train_text, self.validation_text)
        ]
        as_tokens = [tokens.numpy() for tokens in (self.train_tokens, self.validation_tokens)]
        packed = lzma.compress(self.validation_text, preset=9 | lzma.PRESET_EXTREME)
        return {
            "unigram_bytes": unigram(*as_bytes, 256),
            "unigram_tokens": unigram(*as_tokens, len(self.tokenizer.vocabulary)),
            "lzma": 8 * len(packed) / len(self.validation_text),
        }


# ----------------------------------------------------------------------------------- the model


class Block(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each [batch, heads, length, width // heads]
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.relu(self.up(self.norm2(x))).square())


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding: turn pairs of channels by an angle that grows with the
    position.
    """
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1).type_as(x)


class GPT(LightningModule):
    def __init__(self, corpus: Corpus, width: int, depth: int, pairs: int, lr: float):
        super().__init__()
        self.tokenizer, self.length, self.pairs, self.lr = (
            corpus.tokenizer,
            corpus.length,
            pairs,
            lr,
        )
        self.embed = nn.Embedding(len(self.tokenizer.vocabulary), width)
        # A second table is indexed by a hash of the last two tokens. A lookup costs next to
        # nothing, and it spares the first layers from having to learn which tokens follow which.
        self.pair_embed = nn.Embedding(pairs, width)
        self.blocks = nn.ModuleList(Block(width, heads=width // 64) for _ in range(depth))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, len(self.tokenizer.vocabulary))
        angles = torch.outer(torch.arange(self.length), 10000 ** (-torch.arange(0, 64, 2) / 64))
        self.register_buffer("cos", angles.cos(), persistent=False)  # [length, 32]
        self.register_buffer("sin", angles.sin(), persistent=False)
        self.val_nats = SumMetric().set_dtype(torch.float64)
        # how much of this run's budget is used, 0 to 1; the Budget callback sets it
        self.progress = 0.0
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.5 if "embed" in name else width**-0.5)
            if name.endswith(("out.weight", "down.weight", "head.weight")):
                nn.init.zeros_(parameter)  # every block starts as the identity
        with torch.no_grad():  # and every token as likely as it is frequent
            self.head.bias.copy_((corpus.token_counts / corpus.token_counts.sum()).log())

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        before = F.pad(tokens, (1, -1))
        x = self.embed(tokens) + self.pair_embed((before * 31337 + tokens) % self.pairs)
        length = tokens.shape[1]
        for block in self.blocks:
            x = block(x, self.cos[:length], self.sin[:length])
        return self.head(self.norm(x))

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], _: int) -> torch.Tensor:
        inputs, targets = batch
        loss = F.cross_entropy(
            self(inputs).flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED
        )
        self.log("loss", loss, prog_bar=True, sync_dist=True)
        return loss

    def validation_step(self, batch: tuple[torch.Tensor, torch.Tensor], _: int) -> None:
        inputs, targets = batch
        logits = self(inputs).flatten(0, 1).float()
        self.val_nats.update(
            F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED, reduction="sum")
        )

    def on_validation_epoch_end(self) -> None:
        # Nats of every token of the text, over all ranks, per byte of the text: no average of
        # averages.
        bits = self.val_nats.compute() / math.log(2)
        self.val_nats.reset()
        bits_per_byte = bits / len(self.trainer.datamodule.validation_text)
        self.log("val_bpb", bits_per_byte.float(), prog_bar=True, sync_dist=True)

    def configure_optimizers(self):
        matrices = [p for p in self.parameters() if p.ndim >= 2]
        vectors = [p for p in self.parameters() if p.ndim < 2]
        groups = [
            {"params": matrices, "weight_decay": 0.1},
            {"params": vectors, "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=self.lr, betas=(0.9, 0.95), fused=True)

        def scale(step: int) -> float:
            """Warm up for 20 steps, hold, and fall to a twentieth over the second half of the
            budget.
            """
            return min((step + 1) / 20, 1.0) * min(1.0, 0.05 + 1.9 * (1 - self.progress))

        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, scale)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    @torch.no_grad()
    def generate(self, prompt: str, count: int) -> str:
        """Continue `prompt`. All ranks call this together: under ZeRO-3 each forward gathers the
        weights.
        """
        tokens = self.tokenizer.encode(prompt.encode()).long().to(self.device)[None]
        random = torch.Generator().manual_seed(0)
        for _ in range(count):
            logits = self(tokens[:, -self.length :])[0, -1].float().cpu()
            token = torch.multinomial((logits / 0.7).softmax(0), 1, generator=random)
            tokens = torch.cat([tokens, token[None].to(self.device)], dim=1)
        return self.tokenizer.decode(tokens[0].tolist())

    def on_save_checkpoint(self, checkpoint: dict) -> None:
        checkpoint["vocabulary"] = self.tokenizer.fingerprint

    def on_load_checkpoint(self, checkpoint: dict) -> None:
        if checkpoint["vocabulary"] != self.tokenizer.fingerprint:
            raise ValueError(
                "The checkpoint was trained with another vocabulary (another Python or --smoke)."
            )


# ------------------------------------------------------------------------- time, and the report


class Budget(Timer):
    """Lightning's `max_time`, counted anew in a resumed run; or a number of steps in all, if
    given.
    """

    def __init__(self, minutes: float, steps: int | None):
        super().__init__(None if steps else timedelta(minutes=minutes))
        self.steps = steps

    def on_train_batch_start(self, trainer: Trainer, model: GPT, *_) -> None:
        if self.steps:
            model.progress = trainer.global_step / self.steps
            trainer.should_stop = trainer.global_step + 1 >= self.steps
        else:  # clocks differ, and ranks with different learning rates would train different models
            model.progress = trainer.strategy.broadcast(self.time_elapsed() / self._duration)

    def load_state_dict(self, state_dict: dict) -> None:
        """Forget how long earlier runs took."""


class Bar(RichProgressBar):
    """The budget ends the run, so the number of epochs that there could be is not shown."""

    def _get_train_description(self, current_epoch: int) -> str:
        return f"Epoch {current_epoch}"


class Report(Callback):
    """Measures the run, into `result`. It changes nothing."""

    def __init__(self, corpus: Corpus):
        self.corpus = corpus
        self.state_bytes = self.train_seconds = self.timed_steps = self.steps_here = 0
        self.clock: float | None = None
        self.losses: list[torch.Tensor] = []
        self.history: list[tuple[int, float]] = []

    def on_train_start(self, trainer: Trainer, model: GPT) -> None:
        self.first_step, self.base_bytes = trainer.global_step, peak_bytes()

    def on_before_optimizer_step(
        self, trainer: Trainer, model: GPT, optimizer: torch.optim.Optimizer
    ) -> None:
        # gradients are still here
        self.state_bytes = max(self.state_bytes, live_state_bytes(trainer, optimizer))

    def on_train_batch_start(self, *_) -> None:
        if self.clock is None and self.steps_here >= 3:  # the first steps allocate and connect
            self.clock = synchronized_time()

    def on_train_batch_end(self, trainer: Trainer, model: GPT, *_) -> None:
        self.steps_here += 1
        self.timed_steps += self.clock is not None
        self.losses.append(trainer.callback_metrics["loss"])

    def stop_clock(self) -> None:
        if self.clock is not None:
            self.train_seconds += synchronized_time() - self.clock
            self.clock = None

    def on_validation_start(self, *_) -> None:
        self.stop_clock()

    def on_validation_end(self, trainer: Trainer, model: GPT) -> None:
        self.history.append((trainer.global_step, trainer.callback_metrics["val_bpb"].item()))

    def on_train_end(self, trainer: Trainer, model: GPT) -> None:
        self.stop_clock()
        model.eval()
        # on every rank
        sample = model.generate("\nclass Reader:\n    def __init__(self, ", count=100)
        mine = torch.tensor([self.state_bytes, peak_bytes(), self.base_bytes], dtype=torch.int64)
        state, peak, base = model.all_gather(mine.to(model.device)).view(-1, 3).amax(0).tolist()
        self.result = self.summary(trainer, model, sample, state, peak, base)

    def summary(
        self, trainer: Trainer, model: GPT, sample: str, state: int, peak: int, base: int
    ) -> dict:
        ranks, parameters = trainer.world_size, sum(p.numel() for p in model.parameters())
        tokens = self.timed_steps * self.corpus.batch_size * self.corpus.length * ranks
        losses = torch.stack(self.losses).tolist()
        return {
            "strategy": type(trainer.strategy).__name__,
            "ranks": ranks,
            "parameters": parameters,
            "first_step": self.first_step,
            "last_step": trainer.global_step,
            "first_loss": losses[0],
            "last_loss": sum(losses[-5:]) / len(losses[-5:]),
            "state_bytes_per_rank": state,
            "state_bytes_formula": 16 * parameters / ranks,
            "peak_bytes": peak,
            "peak_bytes_before_training": base,
            "tokens_per_second": tokens / max(self.train_seconds, 1e-9),
            "bits_per_byte": {"model": self.history[-1][1], **self.corpus.yardsticks()},
            "history": self.history,
            "sample": sample,
            "seconds": time.monotonic() - STARTED,
        }


def show(result: dict) -> None:
    ranks, bits = result["ranks"], result["bits_per_byte"]
    in_bytes = (
        "state_bytes_per_rank",
        "state_bytes_formula",
        "peak_bytes",
        "peak_bytes_before_training",
    )
    state, formula, peak, base = (result[name] / 2**20 for name in in_bytes)
    ideal = f"16Ψ/{ranks}: {formula:.1f} MiB"
    table = Table(title=f"{result['strategy']}: one of {ranks} ranks", title_justify="left")
    table.add_column("measured")
    table.add_column("value", justify="right")
    table.add_column("against")
    for row in [
        ("parameters Ψ", f"{result['parameters'] / 1e6:.2f} M", ""),
        (
            "weights, gradients, Adam",
            f"{state:.1f} MiB",
            f"{ideal}, ratio {state / formula:.4f}",
        ),
        ("peak memory", f"{peak:.0f} MiB", f"{base:.0f} MiB before the first step"),
        ("tokens a second, all ranks", f"{result['tokens_per_second']:,.0f}", ""),
        (
            "steps",
            f"{result['last_step']:,}",
            f"of them {result['last_step'] - result['first_step']:,} in this run",
        ),
        (
            "training loss, nats per token",
            f"{result['last_loss']:.3f}",
            f"{result['first_loss']:.3f} at its start",
        ),
        (
            "validation, bits per byte",
            f"[bold]{bits['model']:.3f}[/bold]",
            "files it has not seen",
        ),
        ("   by lzma, of the same text", f"{bits['lzma']:.3f}", "8 would be no compression"),
        (
            "   by frequency of each token",
            f"{bits['unigram_tokens']:.3f}",
            "counted in the training text",
        ),
        (
            "   by frequency of each byte",
            f"{bits['unigram_bytes']:.3f}",
            "counted in the training text",
        ),
        (
            "time since start",
            f"{result['seconds']:.0f} s",
            "with start-up and sample",
        ),
    ]:
        table.add_row(*row)
    console = Console() if sys.stdout.isatty() else Console(width=120)
    console.print(table, "\n[bold]The model writes[/bold], after a prompt of two lines:")
    console.print(result["sample"], markup=False, highlight=False)


def live_state_bytes(trainer: Trainer, optimizer: torch.optim.Optimizer) -> int:
    """Bytes of this rank's parameters, gradients and optimizer state."""
    if hasattr(trainer.strategy, "memory_ledger"):
        ledger = trainer.strategy.memory_ledger()
        return sum(ledger[kind] for kind in ("parameters", "gradients", "optimizer_state"))
    tensors = [p for group in optimizer.param_groups for p in group["params"]]
    tensors += [p.grad for p in tensors if p.grad is not None]
    tensors += [
        value
        for state in optimizer.state.values()
        for value in state.values()
        if torch.is_tensor(value)
    ]
    storages = (tensor.untyped_storage() for tensor in tensors)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def peak_bytes() -> int:
    """Peak memory so far: PyTorch's own on a GPU, the process's resident set on a CPU."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def synchronized_time() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.monotonic()


# ------------------------------------------------------------------------------------- the run


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    on_gpu = torch.cuda.is_available()
    devices = int(os.environ.get("LOCAL_WORLD_SIZE", torch.cuda.device_count() if on_gpu else 2))
    parser.add_argument(
        "--strategy", default="zero3", help="zero3 (default), ddp, or any other of Lightning's"
    )
    parser.add_argument(
        "--minutes", type=float, default=2.5, help="training time, 2.5 if not given"
    )
    parser.add_argument(
        "--steps", type=int, help="train to this step instead, counted over all runs"
    )
    parser.add_argument("--resume", action="store_true", help="continue from the last checkpoint")
    parser.add_argument("--devices", type=int, default=devices, help="processes on this machine")
    parser.add_argument("--precision", default="bf16-mixed" if on_gpu else "32-true")
    parser.add_argument(
        "--smoke", action="store_true", help="a tiny model on little text, for tests"
    )
    parser.add_argument("--output", type=Path, default=OUTPUT, help="folder of the checkpoints")
    parser.add_argument("--json", help="also write the figures of the table to this file")
    return parser.parse_args()


def main() -> None:
    args, on_gpu = parse(), torch.cuda.is_available()
    if args.strategy == "zero3":
        import lightning_zero3  # noqa: F401  (registers the strategy)
    warnings.filterwarnings("ignore", message=".*(many workers|not empty|deprecated).*")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    torch.set_num_threads(max(1, cores // args.devices))
    seed_everything(1, verbose=False)

    last = args.output / "checkpoints" / "last.ckpt"
    if args.resume and not last.exists():
        raise SystemExit(f"--resume: there is no {last}")
    rank_zero_info("Reading the standard library's sources ...")
    if args.smoke:
        shape, corpus = {"width": 64, "depth": 2, "pairs": 512}, Corpus(512, 64, 4, limit=2**20)
    else:
        shape, corpus = (
            {"width": 256, "depth": 4, "pairs": 20000},
            Corpus(4096, 128, 32 if on_gpu else 8, limit=None),
        )
    report = Report(corpus)
    trainer = Trainer(
        strategy=args.strategy,
        accelerator="gpu" if on_gpu else "cpu",
        devices=args.devices,
        num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", 1)),
        precision=args.precision,
        gradient_clip_val=1.0,
        max_epochs=1000,
        val_check_interval=1000 if on_gpu else 100,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        log_every_n_steps=1,
        logger=False,
        default_root_dir=args.output,
        callbacks=[
            Budget(args.minutes, args.steps),
            ModelCheckpoint(
                last.parent, filename="newest", save_last="link", enable_version_counter=False
            ),
            Bar(),
            report,
        ],
    )
    model = GPT(corpus, lr=2e-3, **shape)
    trainer.fit(model, datamodule=corpus, ckpt_path="last" if args.resume else None)
    if trainer.is_global_zero:
        show(report.result)
        if args.json:
            Path(args.json).write_text(json.dumps(report.result, indent=2))


if __name__ == "__main__":
    main()
