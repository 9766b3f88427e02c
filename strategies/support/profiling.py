"""Names for the phases of a step in the traces of `torch.profiler`."""

from .torch_internals import RecordFunctionFast


def profile_range(phase: str, subject: str = "") -> RecordFunctionFast:
    """Make a range `zero3::<phase> <subject>`, as "zero3::unshard blocks.0", to enter by `with`.

    It may be made once and entered again and again. Without a profiler entering it does nothing.
    """
    return RecordFunctionFast(f"zero3::{phase} {subject}".rstrip())
