"""Pickles of objects with tensors in them.

A tensor is bytes here. For small ones this is ten times as quick to load as torch's own pickles.
"""

from __future__ import annotations

import io
import pickle
import zlib
from typing import Any

import torch
from torch.utils._pytree import tree_map_only


class _TensorPickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is not torch.Tensor or obj.layout is not torch.strided:
            return NotImplemented
        data = obj.detach().cpu().reshape(-1)
        if data.stride(0) != 1:
            data = data.clone(memory_format=torch.contiguous_format)
        return _rebuild_tensor, (data.view(torch.uint8).numpy(), obj.dtype, obj.shape)


def _rebuild_tensor(data: Any, dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
    return torch.from_numpy(data).view(dtype).reshape(shape)


def dump(obj: Any) -> Any:
    """Pickle the object into a buffer.

    `pickle.loads` gives its tensors back on the CPU, without gradients.
    """
    file = io.BytesIO()
    _TensorPickler(file, pickle.HIGHEST_PROTOCOL).dump(obj)
    return file.getbuffer()


def checksum(obj: Any) -> int | None:
    """Compute a checksum that equal objects of two processes share; None if it cannot be pickled.

    Tensors of other classes count as plain ones: torch's own pickles of them contain addresses.
    """
    try:
        plain = tree_map_only(torch.Tensor, lambda tensor: tensor.as_subclass(torch.Tensor), obj)
        return zlib.crc32(dump(plain))
    except Exception:
        return None
