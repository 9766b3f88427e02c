"""Pickles of objects with tensors in them.

A tensor is bytes here. For small ones this is ten times as quick to load as torch's own pickles.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch


class _TensorPickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is not torch.Tensor or obj.layout is not torch.strided:
            return NotImplemented
        # a single element may have any stride, also in what is contiguous
        data = obj.detach().cpu().contiguous().as_strided((obj.numel(),), (1,))
        return _rebuild_tensor, (data.view(torch.uint8).numpy(), obj.dtype, obj.shape)


def _rebuild_tensor(data: Any, dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
    return torch.from_numpy(data).view(dtype).reshape(shape)


def dump(obj: Any) -> memoryview:
    """Pickle the object; `pickle.loads` gives its tensors back on the CPU, without gradients."""
    file = io.BytesIO()
    _TensorPickler(file, pickle.HIGHEST_PROTOCOL).dump(obj)
    return file.getbuffer()
