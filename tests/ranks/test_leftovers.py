"""Nothing stays behind: no gradient of a backward that raised, no NaN between parameters, no model
that nobody uses.
"""

import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn

from helpers.ranks import run_ranks
from lightning_zero3.strategies.communicators import make_collectives
from lightning_zero3.strategies.engine import Zero3Engine


class Raise(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ValueError("no gradient")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.raises = nn.Linear(6, 30), nn.Linear(30, 6), False

    def forward(self, x):
        y = x + self.down(torch.tanh(self.up(x)))
        return Raise.apply(y) if self.raises else y


def _engine(make=make_collectives):
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    device = torch.device("cpu")
    group = dist.group.WORLD if dist.is_initialized() else None
    engine = Zero3Engine(
        model, [optimizer], device=device, collectives=make(group, device), unit_policy=[Block]
    )
    return model, optimizer, engine


def _backward(engine, model, x, explicit):
    with engine.step():
        loss = model(x).square().mean()
    if explicit:
        with engine.backward():
            loss.backward()
    else:
        loss.backward()


def _gradients_after_an_exception(rank, world_size, explicit):
    model, optimizer, engine = _engine()
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(rank))
    _backward(engine, model, x, explicit)
    expected = [chunk.gradients.clone() for chunk in engine.gradients.chunks]
    optimizer.zero_grad()
    model[1].raises = True
    with pytest.raises(ValueError, match="no gradient"):
        _backward(engine, model, 100 * x, explicit)
    model[1].raises = False
    optimizer.zero_grad()
    _backward(engine, model, x, explicit)
    assert all(map(engine.gradients.has_gradient, engine.gradients.trained))
    for chunk, grad in zip(engine.gradients.chunks, expected, strict=True):
        torch.testing.assert_close(chunk.gradients, grad, rtol=0, atol=0)


@pytest.mark.parametrize("explicit", [True, False])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_gradients_of_a_backward_that_raised_are_gone(world_size, explicit):
    run_ranks(_gradients_after_an_exception, world_size, explicit)


def _padding(chunks):
    """Which elements of all shards [numel] are no parameter's."""
    masks = [torch.ones(chunk.values.numel(), dtype=torch.bool) for chunk in chunks]
    for chunk, mask in zip(chunks, masks, strict=True):
        for entry in chunk.entries:
            entry.part_of(mask).fill_(False)
    return torch.cat(masks)


def _padding_after_nan(rank, world_size):
    from lightning_zero3.strategies.numerics.precision import Zero3Precision

    model, optimizer, engine = _engine()
    clipping = Zero3Precision()
    clipping._step_of = engine.steps.__getitem__
    chunks = engine.gradients.chunks
    padding = _padding(chunks)

    def values():
        return torch.cat([chunk.values for chunk in chunks])

    def gradients():
        return torch.cat([chunk.gradients for chunk in chunks])

    assert (padding.any() or rank < world_size - 1) and not values()[padding].any()
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(rank))
    _backward(engine, model, x, explicit=True)
    expected = gradients()
    optimizer.zero_grad()
    _backward(engine, model, x if rank else x * torch.nan, explicit=True)
    clipping.clip_gradients(optimizer, 0.1)
    # all was scaled by NaN
    assert gradients()[~padding].isnan().all() and not gradients()[padding].any()
    optimizer.zero_grad()  # the step is skipped, as a scaler would
    _backward(engine, model, x, explicit=True)
    assert not gradients()[padding].any()
    torch.testing.assert_close(gradients(), expected, rtol=0, atol=0)
    optimizer.step()
    assert not values()[padding].any()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_padding_holds_nothing(world_size):
    run_ranks(_padding_after_nan, world_size)


def _gradients_without_an_optimizer(rank, world_size):
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(4)))
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model[2:].parameters(), lr=0.1)
    device = torch.device("cpu")
    group = dist.group.WORLD if dist.is_initialized() else None
    engine = Zero3Engine(
        model,
        [optimizer],
        device=device,
        collectives=make_collectives(group, device),
        unit_policy=[Block],
    )
    alias = model[3].down.weight.detach()
    alias.grad = torch.ones(alias.shape)  # as in torch, it is the alias's alone
    assert model[3].down.weight.grad is None and alias.grad.sum() == alias.numel()
    for step in range(4):
        if step == 2:
            model[:2].requires_grad_(True)
        _backward(engine, model, torch.ones(2, 6), explicit=True)
        with torch._C.DisableTorchFunctionSubclass():
            its_own = torch.Tensor.grad.__get__  # past the engine's property
            assert [its_own(p) for p in model[:2].parameters()] == [None] * 8
        with pytest.raises(RuntimeError, match="'1.down.weight'.* which no optimizer has"):
            model[1].down.weight.grad.norm()


def test_gradients_that_no_optimizer_has_are_dropped():
    run_ranks(_gradients_without_an_optimizer, 2)


def _train_and_forget(rank, world_size):
    model, optimizer, engine = _engine()
    _backward(engine, model, torch.ones(2, 6), explicit=True)
    optimizer.step()
    references = [
        weakref.ref(x)
        for x in (model, engine, engine.gradients.chunks[0].values, next(model.parameters()))
    ]
    del model, optimizer, engine
    gc.collect()
    assert [reference() for reference in references] == [None] * 4


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_model_is_freed_with_its_engine(world_size):
    run_ranks(_train_and_forget, world_size)


def _keep_one_parameter(rank, world_size):
    model, optimizer, engine = _engine()
    weight = next(model.parameters())
    expected = weight.detach().clone()
    del model, optimizer, engine
    gc.collect()
    assert torch.equal(weight.detach().clone(), expected)


def test_a_parameter_that_is_kept_alone_keeps_its_value():
    run_ranks(_keep_one_parameter, 2)


def test_a_scheduler_that_was_made_in_a_run_steps_with_the_next_engine():
    model, optimizer, engine = _engine()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)  # wraps `step` once more
    engine.steps[optimizer].close()
    device = torch.device("cpu")
    engine = Zero3Engine(
        model, [optimizer], device=device, collectives=make_collectives(None, device)
    )
    for rate in (0.1, 0.05):
        _backward(engine, model, torch.ones(2, 6), explicit=True)
        weight = model[0].down.weight
        expected = weight.detach() - rate * weight.grad.clone()
        optimizer.step()
        scheduler.step()
        torch.testing.assert_close(weight.detach(), expected)
        optimizer.zero_grad()
