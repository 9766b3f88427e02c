"""What a model may do, as small programs that run under several engines."""

from importlib import import_module

THEMES = (
    "access",
    "resting",
    "root",
    "states",
    "outputs",
    "autograd",
    "gradients",
    "modules",
    "layers",
    "buffers",
    "graphs",
    "optimizers",
    "memory",
)


def load_cases() -> None:
    """Import the modules that fill `harness.CASES` and `harness.ENGINES`."""
    for theme in THEMES:
        import_module(f"{__name__}.cases_{theme}")
    import_module(f"{__name__}.faults")
