"""What torch has no public name for, in one place: no other file reaches into its C modules.

All of it is there, and means the same, in torch 2.11, 2.12 and 2.13, and torch's own Python code
uses it. Where a public function does the same at the same price, that one is used instead.
"""

from __future__ import annotations

from typing import Any

import torch

# Inside these no `__torch_function__` of a subclass is asked; none, and no mode of a user's; no
# transform of torch.func.
DisableTorchFunctionSubclass = torch._C.DisableTorchFunctionSubclass
DisableTorchFunction = torch._C.DisableTorchFunction
DisableFuncTorch = torch._C._DisableFuncTorch
# `torch.inference_mode` takes five Python calls more, for each unit.
InferenceMode = torch._C._InferenceMode

# Questions that each forward or backward asks; without a Python call.
dispatch_modes = torch._C._len_torch_dispatch_stack  # how many are on
graph_task = torch._C._current_graph_task_id  # identity of the backward that runs in this thread
NO_GRAPH_TASK = -1
transform = torch._C._functorch.maybe_current_level  # of torch.func; dynamo can tell it
tracing_state = torch._C._get_tracing_state  # of `torch.jit.trace`, if it runs

# The hooks on saved tensors that are on top, and why there must be none in this thread (None: there
# may be).
top_hooks = torch._C._autograd._top_saved_tensors_default_hooks
hooks_refused = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message

use_count = torch._C._storage_Use_Count  # tensors that share a storage
# Makes it an error to write where nobody asks the dispatcher.
refuse_writes = torch._C._set_throw_on_mutable_data_ptr

# `torch.profiler.record_function` takes 5 to 20 us while no profiler runs, this one 0.2 us and no
# Python call. torch's own compiled code uses it.
RecordFunctionFast: Any = torch._C._profiler._RecordFunctionFast

# As `torch.export.pt2_archive.constants`, whose import takes a second; and the reader and writer of
# such an archive, of which torch wraps whole files alone.
archive_names = torch._C._export.pt2_archive_constants
ArchiveReader: Any = torch._C.PyTorchFileReader
ArchiveWriter: Any = torch._C.PyTorchFileWriter

# A replay touches no version counters, and is not autocast a second time.
AutoDispatchBelowAutograd = torch._C._AutoDispatchBelowAutograd
DisableAutocast = torch._C._DisableAutocast


def without_versions() -> Any:
    """Make a guard inside which writing to a tensor leaves its version as it is."""
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)
    return torch._C._ExcludeDispatchKeyGuard(keys)


def clear_cublas_workspaces() -> None:
    """Free the workspaces of cuBLAS, which are made anew where they are needed next."""
    torch._C._cuda_clearCublasWorkspaces()


def attach_out_of_memory_observer(observer: Any) -> None:
    """Have `observer(device, wanted, limit, free)` called on each out-of-memory error."""
    torch._C._cuda_attach_out_of_memory_observer(observer)  # type: ignore[attr-defined]


def set_allocator_settings(text: str) -> None:
    """Give the allocator options in the form of `PYTORCH_ALLOC_CONF`."""
    torch._C._accelerator_setAllocatorSettings(text)
