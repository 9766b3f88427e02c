"""Random states in CUDA graphs, with a model of torch's Philox generator, and with its own on a
GPU.
"""

import struct
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from helpers.tracking import needs_cuda
from lightning_zero3.callbacks.graphs.device import CudaGraph, CudaGraphs


class Device:
    """A generator, and graphs that draw from it: each kernel is known by its seed and offset.

    In a capture the generator counts from zero, and may be set to another offset, not to another
    seed. A replay counts from where the generator is; one of a graph that ends where it began is
    told nothing. Its own offset is never set, as cuDNN would begin its random states anew; that of
    another generator of its state is.
    """

    def __init__(self, monkeypatch):
        self.seed, self.offset, self.graph = 7, 40, None
        monkeypatch.setattr(torch.cuda, "default_generators", (self,))
        monkeypatch.setattr(torch.cuda, "get_rng_state", self.get_state)
        monkeypatch.setattr(torch.cuda, "set_rng_state", self.set_state)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: Graph(self))
        monkeypatch.setattr(torch.cuda, "graph", self.capture)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
        monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None, raising=False)

    @contextmanager
    def capture(self, graph, *options):
        self.graph, graph.drawn = graph, 0
        yield
        self.graph = None

    def get_state(self):
        offset = self.offset if self.graph is None else self.graph.drawn
        return torch.tensor(list(struct.pack("<qq", self.seed, offset)), dtype=torch.uint8)

    def set_state(self, state):
        seed, offset = struct.unpack("<qq", bytes(state.tolist()))
        if self.graph is None:
            self.seed, self.offset = seed, offset
        else:
            assert seed == self.seed
            self.graph.drawn = offset

    def graphsafe_get_state(self):
        assert self.graph is None
        return SimpleNamespace(
            get_state=self.get_state,
            set_state=self.set_state,
            get_offset=lambda: self.offset,
            set_offset=partial(setattr, self, "offset"),
        )

    def draw(self, count):
        if self.graph is None:
            self.offset += count
            return self.seed, self.offset - count
        self.graph.kernels.append(self.graph.drawn)
        self.graph.drawn += count
        return None


class Graph:
    def __init__(self, generator):
        self.generator, self.kernels, self.reset = generator, [], None
        self.begin = None, 0

    def replay(self):
        if self.drawn:
            self.begin = self.generator.seed, self.generator.offset
        seed, offset = self.begin
        self.results = [(seed, offset + k) for k in self.kernels]
        self.generator.offset += self.drawn


class Gpu:
    """The same, of the real thing."""

    def draw(self, count):
        return torch.rand(count, device="cuda")


def step(device):
    """Two checkpoints, with other random numbers around and between them; the backward runs the
    last one first. The second has one inside, which is run a third time.
    """
    saved = []

    def forward():
        drawn = [device.draw(4)]
        for count in (8, 12):
            saved.append((torch.cuda.get_rng_state(), count))
            drawn += [device.draw(count), device.draw(4)]
        return drawn

    def rerun(state, count, depth):
        found = torch.cuda.get_rng_state()
        torch.cuda.set_rng_state(state)
        inner = torch.cuda.get_rng_state()
        drawn = [device.draw(count)]
        drawn += rerun(inner, count, depth - 1) if depth else []
        torch.cuda.set_rng_state(found)
        return drawn

    def backward():
        drawn = [device.draw(16)]
        for depth, (state, count) in enumerate(reversed(saved)):
            drawn += rerun(state, count, depth)
        return [*drawn, device.draw(4)]

    return forward, backward


def begin_at(seed, device):
    torch.cuda.set_rng_state(torch.tensor(list(struct.pack("<qq", seed, 60)), dtype=torch.uint8))
    device.draw(20)
    return torch.cuda.get_rng_state()


def test_replays_draw_what_eager_steps_draw(monkeypatch):
    device = Device(monkeypatch)
    forward = CudaGraph(None, torch.device("cuda", 0))
    pair = forward, CudaGraph(None, torch.device("cuda", 0), forward)
    for graph, program in zip(pair, step(device), strict=True):
        with graph.capture():
            program()
    assert device.offset == 40
    for seed in (7, 7, 23):  # the user may seed anew between steps
        begin = begin_at(seed, device)
        for graph in pair:
            graph.replay()
        end = torch.cuda.get_rng_state()
        torch.cuda.set_rng_state(begin)
        drawn = [program() for program in step(device)]
        assert [graph._graph.results for graph in pair] == drawn
        assert torch.equal(torch.cuda.get_rng_state(), end)


@pytest.mark.parametrize(
    ("count", "is_forked"),
    [(8, False), (8, True), (0, False)],
    ids=["drawing", "ends where it began", "not drawing"],
)
def test_others_may_draw_between_a_forward_and_its_backward(monkeypatch, count, is_forked):
    """As the rest of a step does around a captured module."""
    device = Device(monkeypatch)
    forward = CudaGraph(None, torch.device("cuda", 0))
    backward = CudaGraph(None, torch.device("cuda", 0), forward)
    with forward.capture():
        state = torch.cuda.get_rng_state()
        device.draw(count)
        if is_forked:
            torch.cuda.set_rng_state(state)
    with backward.capture():
        found = torch.cuda.get_rng_state()
        torch.cuda.set_rng_state(state)
        device.draw(count)
        torch.cuda.set_rng_state(found)
    for _ in range(2):
        start = device.offset
        forward.replay()
        device.draw(12)
        backward.replay()
        assert forward._graph.results == [(7, start)]
        assert backward._graph.results == [(7, start)]
        assert device.offset == start + 12 + (0 if is_forked else count)


@pytest.mark.gpu
@needs_cuda
def test_replays_on_a_gpu_draw_what_eager_steps_draw():
    graphs = CudaGraphs(torch.device("cuda", torch.cuda.current_device()))
    # a capture leaves the generator's numbers to be written in its stream: replays must come after
    # that
    with graphs.in_stream():
        compare_replays(graphs)


def compare_replays(graphs):
    for program in step(Gpu()):
        program()
    pair, captured = graphs.make_pair(), []
    for graph, program in zip(pair, step(Gpu()), strict=True):
        with graph.capture():
            captured += program()
    for seed in (7, 7, 23):
        begin = begin_at(seed, Gpu())
        for graph in pair:
            graph.replay()
        end = torch.cuda.get_rng_state()
        torch.cuda.set_rng_state(begin)
        forward, backward = step(Gpu())
        for mine, reference in zip(captured, forward() + backward(), strict=True):
            assert torch.equal(mine, reference)
        assert torch.equal(torch.cuda.get_rng_state(), end)


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("is_forked", [False, True])
def test_a_checkpoint_of_torch_in_a_graph_draws_on_a_gpu_what_it_draws_in_an_eager_step(is_forked):
    """Saves and restores the state in the capture, as torch does itself since 2.10; the forward may
    end where it began.
    """
    graphs = CudaGraphs(torch.device("cuda", torch.cuda.current_device()))
    x = torch.ones(64, device="cuda", requires_grad=True)

    def forward():
        def run(y):
            return torch.nn.functional.dropout(y * y)

        with torch.random.fork_rng([x.get_device()]) if is_forked else nullcontext():
            y = torch.nn.functional.dropout(x)
            for _ in range(2):
                y = torch.utils.checkpoint.checkpoint(run, y, use_reentrant=False)
        return y.sum()

    with graphs.in_stream():
        torch.autograd.grad(forward(), x)
        pair = graphs.make_pair()
        with pair[0].capture():
            loss = forward()
        with pair[1].capture():
            [gradient] = torch.autograd.grad(loss, x)
        for seed in (7, 23):
            begin = begin_at(seed, Gpu())
            pair[0].replay()
            between = torch.rand(8, device="cuda")
            pair[1].replay()
            end = torch.cuda.get_rng_state()
            torch.cuda.set_rng_state(begin)
            expected = forward()
            assert torch.equal(between, torch.rand(8, device="cuda"))
            assert torch.equal(loss, expected)
            assert torch.equal(gradient, torch.autograd.grad(expected, x)[0])
            assert torch.equal(torch.cuda.get_rng_state(), end)


@pytest.mark.gpu
@needs_cuda
def test_replays_on_a_gpu_leave_the_random_states_of_eager_recurrent_layers():
    """These are cuDNN's: it begins them anew when the default generator is set."""
    graphs = CudaGraphs(torch.device("cuda", torch.cuda.current_device()))
    layer = torch.nn.LSTM(8, 8, num_layers=2, dropout=0.5, device="cuda")
    x = torch.ones(4, 4, 8, device="cuda")
    with graphs.in_stream(), torch.no_grad():
        torch.rand(8, device="cuda")
        pair = graphs.make_pair()
        for graph in pair:
            with graph.capture():
                torch.rand(8, device="cuda")
        found = []
        for replayed in ([], pair):
            torch.manual_seed(5)
            found.append(layer(x)[0])
            for graph in replayed:
                graph.replay()
            found.append(layer(x)[0])
    assert torch.equal(found[0], found[2]) and torch.equal(found[1], found[3])
    assert not torch.equal(found[0], found[1])
