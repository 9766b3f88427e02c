"""Replace torch's allocator by one from a shared library (`CUDAPluggableAllocator`)."""

import ctypes
from dataclasses import dataclass
from pathlib import Path

import torch

# The allocator of this process. torch can replace its own only once.
_installed: "PluggableAllocator | None" = None


@dataclass(frozen=True)
class PluggableAllocator:
    """A shared library and the names of its two functions.

    Args:
        library: path of the `.so`.
        alloc: name of `void* alloc(ssize_t size, int device, cudaStream_t stream)`.
        free: name of `void free(void* ptr, ssize_t size, int device, cudaStream_t stream)`.
    """

    library: str
    alloc: str = "alloc"
    free: str = "free"

    def __post_init__(self) -> None:
        if not Path(self.library).is_file():
            raise ValueError(
                f"pluggable: no file {self.library!r}; give the path of the compiled shared library"
            )

    def check_symbols(self) -> None:
        """Require that the library has both functions.

        torch would report a missing one as a bare AttributeError.

        Raises:
            ValueError: the library lacks a function.
        """
        library = ctypes.CDLL(str(Path(self.library).resolve()))
        for option, symbol in (("alloc", self.alloc), ("free", self.free)):
            if not hasattr(library, symbol):
                raise ValueError(
                    f"pluggable: {self.library} has no function {symbol!r}; export it with extern"
                    f' "C", or name it with {option}='
                )

    def install(self) -> None:
        """Make this the allocator of the process, before anything is on the GPU.

        Raises:
            ValueError: the library lacks a function.
            RuntimeError: another one is installed, or CUDA has started in this process.
        """
        global _installed
        if _installed == self:
            return
        self.check_symbols()
        if _installed is not None or torch.cuda.is_initialized():
            reason = (
                "another one is installed" if _installed is not None else "CUDA has started already"
            )
            raise RuntimeError(
                f"pluggable: too late to install {self.library}, {reason} in this process. Create"
                " the callback before anything touches the GPU."
            )
        allocator = torch.cuda.memory.CUDAPluggableAllocator(
            str(Path(self.library).resolve()), self.alloc, self.free
        )
        torch.cuda.memory.change_current_allocator(allocator)
        _installed = self
