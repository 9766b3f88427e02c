"""Parameters that the model itself has, beside its layers: they are in use during the whole
step.
"""

import copy

import torch
from torch import nn

from .harness import DIM, STEPS, Case, Chain, case


class Scaled(Chain):
    def __init__(self, depth=4):
        super().__init__(depth=depth)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, DIM))

    def forward(self, x):
        return super().forward(x) * self.scale


class Manual(Case):
    """Backward and the optimizer's step inside the step (manual optimization)"""

    manual = True
    pitfalls = (26,)

    def model(self):
        return Scaled()

    def touch(self, run, model):
        """Between backward and the optimizer's step."""

    def train(self, run):
        for step in range(STEPS):
            run.step(lambda model, step=step: self.work(run, model, self.batch(step, run.rank)))

    def work(self, run, model, batch):
        model.zero_grad()
        loss = self.loss(model, batch)
        with run.backward():
            loss.backward()
        self.touch(run, model)
        run.optimizer.step()
        run.log(loss, model.scale)


@case
class RootGradClippedInStep(Manual):
    """`model.zero_grad()` and `clip_grad_norm_(model.parameters())` inside the step (manual
    optimization)
    """

    pitfalls = (18, 26)

    def touch(self, run, model):
        run.log(nn.utils.clip_grad_norm_(model.parameters(), 0.01), model.scale.grad)


@case
class RootGradChangedInStep(Manual):
    """`p.grad.mul_()` and other changes in place of the model's own parameters inside the step"""

    def touch(self, run, model):
        model.scale.grad.mul_(10)
        model.scale.grad += 0.01
        model.scale.grad[0] = 0
        run.log(model.scale.grad)


@case
class RootGradAssignedInStep(Manual):
    """`p.grad = ...` and `del p.grad` of the model's own parameters and others inside the step"""

    def touch(self, run, model):
        model.scale.grad = torch.ones(DIM)
        del model.head.bias.grad
        assert model.head.bias.grad is None
        if len(run.logged) > 2:
            del model.scale.grad
            assert model.scale.grad is None


@case
class RootGradAccumulatedInStep(Manual):
    """Two backwards inside the step, gradients of the model's own parameters read in between and in
    hooks
    """

    pitfalls = (14, 16, 43)

    def loss(self, model, batch):
        def double(p):
            p.grad.mul_(2)

        self.handle = model.scale.register_post_accumulate_grad_hook(double)
        return super().loss(model, batch)

    def touch(self, run, model):
        run.log(model.scale.grad)
        self.handle.remove()
        loss = super().loss(model, self.batch(7, run.rank))
        with run.backward():
            loss.backward()
        run.log(model.scale.grad)


@case
class RootClampedBeforeTheStep(Manual):
    """The model's own parameters clamped inside the step, before and after `optimizer.step()`"""

    def touch(self, run, model):
        with torch.no_grad():
            model.scale.clamp_(0.6, 1.2)

    def work(self, run, model, batch):
        super().work(run, model, batch)
        with torch.no_grad():
            model.scale.data.clamp_(0.7, 1.3)
            model.head.weight.copy_(model.head.weight * 0.5)
            model.scale.mul_(0.9)
        run.log(model.scale)


@case
class RootClampedBetweenTwoSteps(RootClampedBeforeTheStep):
    """The model's own parameters clamped between the steps of two optimizers"""

    def optimizers(self, model):
        others = [p for p in model.parameters() if p is not model.scale]
        return [torch.optim.SGD(others, lr=0.1), torch.optim.Adam([model.scale], lr=0.1)]

    def touch(self, run, model):
        run.optimizers[0].step()
        super().touch(run, model)
        run.optimizers[1].step()


@case
class RootTargetNetwork(Case):
    """A frozen copy of a model with parameters of its own that follows them by `copy_` in the step
    (an EMA teacher)
    """

    pitfalls = (34,)

    def model(self):
        model = nn.Module()
        model.student = Scaled(depth=2)
        model.teacher = copy.deepcopy(model.student).requires_grad_(False)
        with torch.no_grad():
            for p in model.teacher.parameters():
                p.mul_(0.5)  # else the first loss is a rounding error
        return model

    def units(self, model):
        return [*model.student.blocks, *model.teacher.blocks]

    def optimizers(self, model):
        return [torch.optim.SGD(model.student.parameters(), lr=0.1)]

    def loss(self, model, batch):
        with torch.no_grad():
            for slow, fast in zip(
                model.teacher.parameters(), model.student.parameters(), strict=True
            ):
                slow.copy_(0.9 * slow + 0.1 * fast)
            wanted = model.teacher(batch)
        return (model.student(batch) - wanted).square().mean()


@case
class RootTargetNetworkLate(RootTargetNetwork):
    """The same after the forward that it follows"""

    def loss(self, model, batch):
        out = model.student(batch)
        with torch.no_grad():
            for slow, fast in zip(
                model.teacher.parameters(), model.student.parameters(), strict=True
            ):
                slow.copy_(0.9 * slow + 0.1 * fast)
            wanted = model.teacher(batch)
        return (out - wanted).square().mean()


@case
class RootUsedInBlocks(Case):
    """A parameter of the model itself in a function that one rank compiles again (aot_eager),
    gradients accumulated
    """

    pitfalls = (16, 41)
    timeout = 60.0

    def model(self):
        model = Scaled(depth=2)
        model.blocks[1] = torch.compile(model.blocks[1], backend="aot_eager")
        return model

    def prepare(self, model):
        self.scaled = torch.compile(
            lambda x, scale: x * scale + scale.square(), backend="aot_eager"
        )

    def loss(self, model, batch):
        return self.scaled(model(batch), model.scale).square().mean()

    def train(self, run):
        for step in range(STEPS):
            # compiled again for other rows, on one rank alone
            for micro, rows in enumerate((4, 3, 4 + run.rank)):
                batch = self.batch(10 * step + micro, run.rank).repeat(2, 1)[:rows]
                loss = run.step(lambda model, batch=batch: self.loss(model, batch))
                self.backward(run, loss)
                run.log(loss)
            run.optimizer.step()
            self.clear(run)
