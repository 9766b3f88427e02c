"""The same tests with the software graph on the CPU and with CUDA graphs on a GPU:
`pytest -m gpu tests/graphs`.
"""

import pytest

from helpers import recorded
from helpers.tracking import on_cuda


@pytest.fixture(params=["cpu", on_cuda])
def device(request, monkeypatch):
    """Where `fit` and `train` train."""
    monkeypatch.setattr(recorded, "DEVICE", request.param)
    return request.param
