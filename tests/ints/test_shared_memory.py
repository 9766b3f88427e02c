"""Parameters that begin at one place are refused; those that lie between each other's elements are
not.
"""

import pytest
import torch
from torch import nn

from lightning_zero3.strategies.engine.build import check_memory


def model(*tensors):
    """The first two are parameters, others buffers."""
    result = nn.Module()
    for name, tensor in zip("abcd", tensors, strict=False):
        if name in "ab":
            result.register_parameter(name, nn.Parameter(tensor))
        else:
            result.register_buffer(name, tensor)
    return result


def test_what_shares_no_element_is_right():
    matrix = torch.randn(8, 24)
    check_memory(model(*matrix.chunk(3, dim=1)))
    check_memory(model(matrix[::2], matrix[1::2]))
    check_memory(model(matrix[0], matrix[1], torch.ones(1).expand(4)))
    # buffers may: both rest whole on every rank
    check_memory(model(matrix[0], matrix[1], matrix[2:], matrix[2:]))


@pytest.mark.parametrize(
    "pick",
    [
        lambda m: (m, m),
        lambda m: (m, torch.ones(1), m.t()),
        lambda m: (m[:1, :1].expand(3, 3), torch.ones(1), m[0]),
    ],
)
def test_a_common_start_is_refused(pick):
    with pytest.raises(ValueError, match=r"'\w' and 'a' share memory"):
        check_memory(model(*pick(torch.randn(8, 24))))
