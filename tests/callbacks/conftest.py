"""Settings live in the environment: each test starts without them."""

import os

import pytest

from lightning_zero3.callbacks.allocator.early import MARKER
from lightning_zero3.callbacks.allocator.environment import READ_NAMES

NAMES = (
    *READ_NAMES,
    MARKER,
    "CUBLAS_WORKSPACE_CONFIG",
    "CUDA_LAUNCH_BLOCKING",
    "NCCL_GRAPH_REGISTER",
    "PYTORCH_KERNEL_CACHE_PATH",
    "PYTORCH_NO_CUDA_MEMORY_CACHING",
    "PYTORCH_NVML_BASED_CUDA_CHECK",
    "USE_PYTORCH_KERNEL_CACHE",
)


@pytest.fixture(autouse=True)
def clean_environment():
    for name in NAMES:
        os.environ.pop(name, None)
