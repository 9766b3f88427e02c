"""Names for the phases of a step in the traces of `torch.profiler`."""

# `torch.profiler.record_function` takes 5 to 20 us while no profiler runs, this one 0.2 us and no
# Python call. torch's own compiled code uses it; it is there from torch 2.1 to 2.13.
from torch._C._profiler import _RecordFunctionFast


def profile_range(phase: str, subject: str = "") -> _RecordFunctionFast:
    """Make a range `zero3::<phase> <subject>`, as "zero3::unshard blocks.0", to enter by `with`.

    It may be made once and entered again and again. Without a profiler entering it does nothing.
    """
    return _RecordFunctionFast(f"zero3::{phase} {subject}".rstrip())
