"""Allocator settings live in the environment: each test starts without them and leaves none behind."""

import os

import pytest


@pytest.fixture(autouse=True)
def clean_environment():
    before = dict(os.environ)
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"):
        os.environ.pop(name, None)
    yield
    os.environ.clear()
    os.environ.update(before)
