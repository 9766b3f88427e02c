"""Random states in CUDA graphs, with a model of torch's Philox generator, and with its own on a
GPU.
"""

import struct

import pytest
import torch

from helpers.tracking import needs_cuda
from lightning_zero3.callbacks.graphs.device import CudaGraphs
from lightning_zero3.callbacks.graphs.random_states import CapturedRandomStates, note_offsets


class State:
    """What `at::CUDAGeneratorState` holds."""

    def __init__(self, seed, offset):
        self.seed, self.offset = seed, offset


class Generator:
    """`torch.Generator` of a CUDA device, by torch's own names."""

    def __init__(self, state):
        self.state = state

    def graphsafe_get_state(self):
        return Generator(self.state)

    def graphsafe_set_state(self, other):
        self.state = other.state

    def clone_state(self):
        return Generator(State(self.state.seed, self.state.offset))

    def initial_seed(self):
        return self.state.seed

    def get_offset(self):
        return self.state.offset

    def manual_seed(self, seed):
        self.state.seed, self.state.offset = seed, 0

    def set_offset(self, offset):
        self.state.offset = offset


class Device:
    """Draws numbers: each kernel is known by its seed and offset."""

    def __init__(self, monkeypatch):
        self.generator = Generator(State(7, 40))
        self.kernels = None  # of the graph that is captured
        monkeypatch.setattr(torch.cuda, "default_generators", (self.generator,))
        monkeypatch.setattr(torch.cuda, "get_rng_state", self.get)
        monkeypatch.setattr(torch.cuda, "set_rng_state", self.set)

    def get(self):
        assert self.kernels is None, "reads the state in a capture"
        return torch.tensor(
            list(struct.pack("<qq", self.generator.state.seed, self.generator.state.offset)),
            dtype=torch.uint8,
        )

    def set(self, state):
        assert self.kernels is None, "writes the state in a capture"
        self.generator.state.seed, self.generator.state.offset = struct.unpack(
            "<qq", bytes(state.tolist())
        )

    def draw(self, count):
        state = self.generator.state
        if self.kernels is not None:
            self.kernels.append(
                (state, sum(n for other, _, n in self.kernels if other is state), count)
            )
            return None
        state.offset += count
        return state.seed, state.offset - count

    def capture(self, states, program, forward):
        self.kernels = []
        try:
            with states.track_calls(not forward):
                program()
            return self.kernels
        finally:
            self.kernels = None

    def replay(self, kernels):
        """As `CUDAGraph.replay`: states that kernels draw from move on by what the graph draws."""
        drawn = [(state.seed, state.offset + before) for state, before, _ in kernels]
        for state, _, count in kernels:
            state.offset += count
        return drawn


def step(device):
    """Two checkpoints, with other random numbers around and between them; the backward runs the
    last one first.
    """
    saved = []

    def forward():
        drawn = [device.draw(4)]
        for count in (8, 12):
            saved.append((torch.cuda.get_rng_state(), count))
            drawn += [device.draw(count), device.draw(4)]
        return drawn

    def backward():
        drawn = [device.draw(16)]
        for state, count in reversed(saved):
            found = torch.cuda.get_rng_state()
            torch.cuda.set_rng_state(state)
            drawn.append(device.draw(count))
            torch.cuda.set_rng_state(found)
        return [*drawn, device.draw(4)]

    return forward, backward


def test_replays_draw_what_eager_steps_draw(monkeypatch):
    device, offsets = Device(monkeypatch), []
    forward, backward = step(device)
    with note_offsets(offsets):
        forward()
    backward()
    assert offsets == [4, 16]

    states = CapturedRandomStates(torch.device("cuda", 0), offsets)
    forward, backward = step(device)
    captured = (
        device.capture(states, forward, True),
        device.capture(states, backward, False),
    )
    for seed in (7, 7, 23):  # the user may seed anew between steps
        begin = torch.tensor(
            list(struct.pack("<qq", seed, device.generator.state.offset + 20)), dtype=torch.uint8
        )
        torch.cuda.set_rng_state(begin)
        states.begin(False)
        replayed = device.replay(captured[0])
        states.begin(True)
        replayed += device.replay(captured[1])
        end = torch.cuda.get_rng_state()
        torch.cuda.set_rng_state(begin)
        forward, backward = step(device)
        assert replayed == forward() + backward()
        assert torch.equal(torch.cuda.get_rng_state(), end)


class Gpu:
    """The same, of the real thing."""

    def draw(self, count):
        return torch.rand(count, device="cuda")


@pytest.mark.gpu
@needs_cuda
def test_replays_on_a_gpu_draw_what_eager_steps_draw():
    graphs = CudaGraphs(torch.device("cuda", torch.cuda.current_device()))
    # a capture leaves the generator's numbers to be written in its stream: replays must come after
    # that
    with graphs.in_stream():
        compare_replays(graphs)


def compare_replays(graphs):
    offsets = []
    forward, backward = step(Gpu())
    with note_offsets(offsets):
        forward()
    backward()
    pair, captured = graphs.make_pair(offsets), []
    for graph, program in zip(pair, step(Gpu()), strict=True):
        with graph.capture():
            captured += program()
    for seed in (7, 7, 23):
        torch.cuda.manual_seed(seed)
        Gpu().draw(20)
        begin = torch.cuda.get_rng_state()
        for graph in pair:
            graph.replay()
        end = torch.cuda.get_rng_state()
        torch.cuda.set_rng_state(begin)
        forward, backward = step(Gpu())
        for mine, reference in zip(captured, forward() + backward(), strict=True):
            assert torch.equal(mine, reference)
        assert torch.equal(torch.cuda.get_rng_state(), end)


def test_a_capture_that_saves_other_states_is_an_error(monkeypatch):
    device = Device(monkeypatch)
    states = CapturedRandomStates(torch.device("cuda", 0), [4])
    with pytest.raises(RuntimeError, match="saved other random states than in eager steps"):
        device.capture(states, step(device)[0], True)


def test_a_state_that_no_graph_can_go_back_to_is_an_error(monkeypatch):
    """A checkpoint inside of another's second computation saves, sets and draws."""
    device, saved = Device(monkeypatch), []
    states = CapturedRandomStates(torch.device("cuda", 0), [0])

    def forward():
        saved.append(torch.cuda.get_rng_state())
        device.draw(4)

    def backward():
        torch.cuda.get_rng_state()
        torch.cuda.set_rng_state(saved[0])
        inner = torch.cuda.get_rng_state()
        device.draw(4)
        torch.cuda.set_rng_state(inner)

    device.capture(states, forward, True)
    home = device.generator.state
    with pytest.raises(RuntimeError, match="Make the outer one with `use_reentrant=False`"):
        device.capture(states, backward, False)
    assert device.generator.state is home
