"""Batches on the device: any nesting; on CUDA also the copy stream."""

import dataclasses
from collections import OrderedDict, defaultdict, namedtuple

import pytest
import torch

from data.datasets import Indices, make_loader
from lightning_zero3.strategies.data import DataOptions, shard_dataloader
from lightning_zero3.strategies.data.device import place_on

Pair = namedtuple("Pair", "a b")


@dataclasses.dataclass
class Sample:
    x: torch.Tensor
    name: str
    parts: list


class Custom:
    def __init__(self, x):
        self.x = x

    def to(self, device, non_blocking=False):
        return Custom(self.x.to(device))


class Text(dict):
    """A mapping with a ``to`` of its own, as tokenizers return it."""

    def to(self, device):
        return Text({key: value.to(device) for key, value in self.items()})


def make_batch():
    one = torch.ones(2)
    counts = defaultdict(int)
    counts["x"] = one
    return {
        "tuple": (one, "text", None),
        "pair": Pair(one, [one, 3]),
        "sample": Sample(one, "name", [one]),
        "ordered": OrderedDict(x=one),
        "default": counts,
        "custom": Custom(one),
        "text": Text(ids=one),
    }


def check(batch, device):
    assert batch["tuple"][0].device.type == device and batch["tuple"][1:] == ("text", None)
    assert (
        type(batch["pair"]) is Pair
        and batch["pair"].b[0].device.type == device
        and batch["pair"].b[1] == 3
    )
    assert type(batch["sample"]) is Sample and batch["sample"].parts[0].device.type == device
    assert type(batch["ordered"]) is OrderedDict and batch["ordered"]["x"].device.type == device
    assert batch["default"]["x"].device.type == device and batch["default"].default_factory is int
    assert batch["custom"].x.device.type == device and type(batch["text"]) is Text
    assert batch["text"]["ids"].device.type == device


def test_any_nesting_is_moved_and_the_original_is_not():
    batch = make_batch()
    pairs = place_on(torch.device("meta"), iter([(batch, 0)]), ahead=False)
    check(next(pairs)[0], "meta")
    check(batch, "cpu")


def test_batches_arrive_on_the_device_unless_opted_out():
    for prefetch, expected in ((True, "meta"), (False, "cpu")):
        loader = shard_dataloader(
            make_loader(Indices(6), batch_size=2),
            rank=0,
            world_size=1,
            stage="fit",
            options=DataOptions(prefetch_to_device=prefetch),
            device=torch.device("meta"),
        )
        assert [batch.device.type for batch in loader] == [expected] * 3


def cuda_loader(**options):
    return shard_dataloader(
        make_loader(Indices(10), 2, batch_size=2),
        rank=0,
        world_size=1,
        stage="fit",
        options=DataOptions(seed=0, **options),
        device=torch.device("cuda", 0),
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs one CUDA device")
def test_what_is_ahead_does_not_count():
    loader = cuda_loader()
    batches = iter(loader)
    assert next(batches).tolist() == [0, 1] and next(batches).is_cuda
    resumed = cuda_loader()
    resumed.load_state_dict(loader.state_dict())
    assert [batch.tolist() for batch in resumed] == [[4, 5], [6, 7], [8, 9]]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs one CUDA device")
def test_no_batch_is_overwritten_while_it_is_read():
    device = torch.device("cuda", 0)
    size = 1 << 22
    pairs = ((torch.full((size,), float(k)).pin_memory(), k) for k in range(30))
    sums = []
    for batch, _ in place_on(device, pairs, ahead=True):
        torch.cuda._sleep(3_000_000)  # the compute stream reads late, the next copies are long done
        sums.append(batch.sum())
        del batch
    assert [s.item() / size for s in sums] == [float(k) for k in range(30)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs one CUDA device")
def test_every_nesting_on_cuda_and_an_error():
    def pairs():
        yield make_batch(), 0
        yield make_batch(), 1
        raise OSError("gone")

    placed = place_on(torch.device("cuda", 0), pairs(), ahead=True)
    check(next(placed)[0], "cuda")
    with pytest.raises(OSError, match="gone"):  # of the batch ahead
        next(placed)
    with pytest.raises(StopIteration):
        next(placed)
