"""What a step does on the host, which replays on a device would not: found on a GPU, and with
"meta" in its place.
"""

import re
import warnings
from contextlib import suppress
from importlib.util import find_spec

import pytest
import torch

from helpers.recorded import Net
from helpers.tracking import needs_cuda, on_cuda
from lightning_zero3.callbacks.graphs import source_lines
from lightning_zero3.callbacks.graphs.device import CudaGraphs, report_waits
from lightning_zero3.callbacks.graphs.source_lines import describe_line, user_line
from lightning_zero3.callbacks.graphs.watch import Watch


def program():
    """What returns the outputs below."""


class OutOfTheHost:
    """Lines that mix devices, where one may need no GPU."""

    def scalar(self, x):
        return x * torch.tensor(2.0)

    def copied(self, x):  # what is seen of it on CUDA, and not on "meta"
        return x * (
            torch.tensor(2.0, device=x.device) if x.is_cuda else torch.ops.aten.lift_fresh(x)
        )

    def moved(self, x):
        return torch.ones(2).to(x.device) + x

    def fetched(self, x):
        return x.cpu()

    def counted(self, x):
        SEEN.add_(1)

    def drawn(self, x):
        return torch.rand(())

    def logged(self, x):
        MODULE.log("length", torch.ones(()))


SEEN, MODULE = torch.zeros(()), Net()


@pytest.mark.parametrize("device", ["meta", on_cuda])
@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "scalar",
            (
                r"(?s)aten\.mul reads a tensor on cpu, and the graph would keep its value.*x \*"
                r" torch\.tensor"
            ),
        ),
        (
            "copied",
            (
                r"(?s)Python numbers are copied to the device, which ends a"
                r" capture.*torch\.tensor\(2\.0, device"
            ),
        ),
        ("moved", r"(?s)aten\._to_copy reads a tensor on cpu.*torch\.ones\(2\)\.to"),
        (
            "fetched",
            r"(?s)aten\._to_copy copies a tensor to cpu, which waits for the device.*x\.cpu\(\)",
        ),
        (
            "counted",
            r"(?s)aten\.add_ writes to a tensor on cpu, and replays would not.*SEEN\.add_\(1\)",
        ),
        (
            "drawn",
            (
                r"(?s)aten\.rand draws random numbers on the host, and replays would"
                r" not.*torch\.rand\(\(\)\)"
            ),
        ),
        ("logged", r"(?s)`self\.log\('length', \.\.\.\)` gets a tensor on cpu.*MODULE\.log\("),
    ],
)
def test_tensors_of_the_host_are_named_with_their_line(line, message, device):
    x = torch.ones(2, device=device)
    watch = Watch(x.device, x)
    # there is no data on "meta"
    with (
        watch.watching(MODULE, forward=True),
        suppress(NotImplementedError),
    ):
        getattr(OutOfTheHost(), line)(x)
    assert re.search(message, "\n".join(map(str, watch.problems))), watch.problems


def test_tensors_of_the_host_are_returned_only_if_they_came_with_the_batch():
    x, lengths = torch.ones(2, device="meta"), torch.ones(2)
    watch = Watch(x.device, [x, lengths])
    with watch.watching(None, forward=True):
        made = torch.zeros(2).add_(1)  # and written, in memory of the step's own
        torch.rand(2, device="meta", generator=None)
    watch.note_output({"lengths": lengths, "x": x}, program)
    assert watch.problems == []
    watch.note_output({"made": made}, program)
    assert re.search(
        r"(?s)A tensor on cpu is returned, .*def program", "\n".join(map(str, watch.problems))
    )


def test_generators_of_the_host_are_none_of_the_graphs():
    x = torch.ones(2, device="meta")
    watch = Watch(x.device, x)
    with watch.watching(None, forward=True):
        torch.rand(2, generator=torch.Generator())
    assert watch.generators == [] and "draws random numbers on the host" in str(watch.problems[0])


def test_seeds_that_attention_leaves_on_the_host_are_no_problem():
    """As that of CUDA outside of a capture; inside they are on the device."""
    x = torch.ones(2, device="meta")
    watch = Watch(x.device, x)
    with torch.library._scoped_library("graph_tests", "DEF") as library:
        library.define("attend(Tensor x) -> (Tensor, Tensor)")
        library.define("attend_backward(Tensor x, Tensor seed) -> Tensor")
        library.impl(
            "attend", lambda x: (torch.empty_like(x), torch.zeros((), dtype=torch.int64)), "Meta"
        )
        library.impl("attend_backward", lambda x, seed: torch.empty_like(x), "Meta")
        with watch.watching(None, forward=True):
            attended, seed = torch.ops.graph_tests.attend(x)
            torch.ops.graph_tests.attend_backward(attended, seed)
        assert watch.problems == []
        with watch.watching(None, forward=True):
            torch.ops.graph_tests.attend_backward(attended, torch.zeros((), dtype=torch.int64))
    assert "graph_tests.attend_backward reads a tensor on cpu" in str(watch.problems[0])


WAIT = "called a synchronizing CUDA operation (Triggered internally at CUDAFunctions.cpp:1.)"


@pytest.fixture
def modes(monkeypatch):
    """Torch's debug modes that were set, without CUDA."""
    modes = []
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    return modes


def test_each_wait_is_told_with_its_line_and_other_warnings_go_on(modes):
    lines = []
    with pytest.warns(UserWarning) as others:
        with report_waits(lambda frame: lines.append(describe_line(user_line(frame)))):
            for _ in range(2):
                warnings.warn(WAIT, stacklevel=1)
            warnings.warn("something else", stacklevel=1)
    assert modes == ["warn", 0] and [str(each.message) for each in others] == ["something else"]
    assert len(lines) == 2 and all(
        "warnings.warn(WAIT" in line and "test_host_tensors.py" in line for line in lines
    )


def test_waits_that_no_operation_shows_are_problems_but_not_those_of_logging(modes, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: torch.zeros(16, dtype=torch.uint8))
    watch = Watch(torch.device("cuda"), [])

    def log(name, value, **options):
        warnings.warn(WAIT, stacklevel=1)

    module = Net()
    module.log = log
    with watch.watching(module, forward=True):
        module.log("constant", 1.0)
        warnings.warn(WAIT, stacklevel=1)  # as of a library
    [problem] = watch.problems
    assert re.search(r"(?s)The host waits for the device here.*# as of a library", str(problem))
    with watch.watching(None, forward=False, capturing=True):
        pass
    assert modes == ["warn", 0]


@pytest.mark.gpu
@needs_cuda
def test_waits_that_no_operation_shows_on_a_gpu():
    watch = Watch(torch.device("cuda"), [])
    with watch.watching(None, forward=True):
        torch.cuda.current_stream().synchronize()
    [problem] = watch.problems
    assert re.search(
        r"(?s)The host waits for the device here.*current_stream\(\)\.synchronize\(\)", str(problem)
    )


def test_an_allocator_that_tells_nothing_of_pools(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda pool: [{"total_size": 3}])
    graphs = CudaGraphs(torch.device("cuda"))
    for backend, nbytes in (("native", 3), ("cudaMallocAsync", 0)):
        monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda backend=backend: backend)
        assert graphs.pool_nbytes() == nbytes


def test_the_engine_is_known_by_modules_that_exist():
    assert all(find_spec(name) for name in source_lines._ENGINE)
