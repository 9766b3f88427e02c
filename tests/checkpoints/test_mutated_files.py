"""Files with random damage: each is an error of ours, or has what its own names say.

Here are a few of each kind; with `--all` a thousand.
"""

import json
import random
import resource
import time
import zipfile

import pytest
import torch
from safetensors.torch import save_file

from lightning_zero3.__main__ import main
from lightning_zero3.strategies.checkpoints.weights import open_weights
from lightning_zero3.strategies.state_dicts.collective_errors import CheckpointError

WEIGHTS = {
    "net.weight": torch.arange(12.0).view(3, 4),
    "net.bias": torch.ones(3, dtype=torch.bfloat16),
    "count": torch.tensor([7]),
    "empty": torch.empty(0, 4),
}
MOST_S, MOST_BYTES = 2.0, 300 << 20  # for one file, and for all


def mutate(data, rng, places):
    """Change some bytes, most of them at ``places``: where the format keeps its numbers and names."""
    data = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.choice(places) if rng.random() < 0.8 else rng.randrange(len(data))
        at = min(max(at + rng.randint(-4, 4), 0), len(data) - 1)
        kind = rng.randrange(5)
        if kind == 0:
            data[at] = rng.randrange(256)
        elif kind == 1:
            data[at : at + 4] = rng.choice((0, 1, 8, 2**31, 2**32 - 1)).to_bytes(4, "little")
        elif kind == 2:
            del data[at : at + rng.randint(1, 8)]
        elif kind == 3:
            other = rng.randrange(len(data))
            data[at:at] = data[other : other + rng.randint(1, 40)]
        else:
            data[at:at] = rng.choice((b"0", b"9999999999", b"-", b"[", b'"', b"PK\x01\x02"))
    return bytes(data) or b"\0"


class Bounds:
    """Counts what is read and what is refused, in bounded time and memory."""

    def __init__(self):
        self.read = self.refused = 0
        self.peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def open(self, path):
        begin = time.monotonic()
        try:
            tensors = open_weights(path, weights_only=True)
            found = {
                key: value.read() if hasattr(value, "read") else value.clone()
                for key, value in tensors.items()
                if isinstance(value, torch.Tensor)
            }
            self.read += 1
            return found
        except CheckpointError:
            self.refused += 1
            return None
        finally:
            assert time.monotonic() - begin < MOST_S

    def check(self, rounds):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        assert (peak - self.peak) << 10 < MOST_BYTES
        assert self.read + self.refused == rounds and self.refused > rounds / 2


ROUNDS = [60, pytest.param(1000, marks=pytest.mark.variant)]


@pytest.mark.parametrize("rounds", ROUNDS)
def test_files_of_torch_save(rounds, tmp_path, capsys):
    file, rng, bounds = tmp_path / "it.ckpt", random.Random(1), Bounds()
    torch.save({"epoch": 1, "global_step": 5, "state_dict": WEIGHTS}, file)
    whole = file.read_bytes()
    with zipfile.ZipFile(file) as archive:
        places = [
            record.header_offset + n for record in archive.infolist() for n in (8, 14, 22, 26)
        ]
        places += [archive.start_dir + 10, archive.start_dir + 20, len(whole) - 12]
    places += range(archive.start_dir, len(whole), 7)
    pickle = whole.index(b"state_dict")
    places += range(pickle, pickle + 200, 20)
    for _ in range(rounds):
        file.write_bytes(mutate(whole, rng, places))
        found = bounds.open(file)
        # What is read is what was written: of all records there are checksums.
        for name, value in (found or {}).items():
            assert name in WEIGHTS and torch.equal(value, WEIGHTS[name])
        assert main(["inspect", str(file)]) in (0, 1)
        assert capsys.readouterr().err.count("\n") <= 1
    bounds.check(rounds)


@pytest.mark.parametrize("what", ["header", "index"])
@pytest.mark.parametrize("rounds", ROUNDS)
def test_safetensors(rounds, what, tmp_path):
    file, index = tmp_path / "model-1.safetensors", tmp_path / "model.safetensors.index.json"
    save_file(WEIGHTS, file)
    index.write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(WEIGHTS, file.name)}))
    target = file if what == "header" else index
    whole, rng, bounds = target.read_bytes(), random.Random(2), Bounds()
    end = 8 + int.from_bytes(whole[:8], "little") if what == "header" else len(whole)
    for _ in range(rounds):
        target.write_bytes(mutate(whole[:end], rng, range(end)) + whole[end:])
        for name, value in (bounds.open(tmp_path) or {}).items():
            # A name or a type may be another; there are no other bytes than the file's.
            assert type(name) is str and value.nbytes <= len(whole)
    bounds.check(rounds)
