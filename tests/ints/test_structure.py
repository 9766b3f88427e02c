"""What a model consists of is compared by identity, and an identity is nobody else's."""

import pytest
from torch import nn

from lightning_zero3.strategies.engine.module_tree import Structure


def test_a_container_in_the_memory_of_the_one_before():
    model = nn.Module()
    model.body = nn.Sequential(nn.Linear(4, 4))
    structure = Structure(model, lambda: None)
    structure.check()
    new = nn.Linear(4, 4)
    del model.body
    model.body = nn.Sequential(new)
    with pytest.raises(
        ValueError,
        match=r"Parameter 'body\.0\.weight' was added, replaced or removed after the model was sharded",
    ):
        structure.check()
