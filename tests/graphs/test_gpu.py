"""What the other files here test with the software graph, on the real thing: `pytest -m gpu tests/graphs`."""

import pytest
import torch
from lightning.pytorch import Callback
from torch import nn

from helpers.recorded import Net, assert_same_run, fit
from lightning_zero3 import Zero3Strategy
from lightning_zero3.callbacks import CUDAGraphStep
from lightning_zero3.callbacks.graph_check import GraphCaptureError

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

CASES = {
    "200 steps": ({}, {"max_epochs": 19}),
    "accumulation": ({}, {"accumulate_grad_batches": 4}),
    "clipping": ({}, {"gradient_clip_val": 0.1}),
    "ragged last batch": ({"batch_size": 8}, {"accumulate_grad_batches": 4, "max_epochs": 6}),
    "validation in the middle": ({}, {"val_check_interval": 3, "accumulate_grad_batches": 2}),
    "scheduler": ({"scheduled": True}, {}),
    "bf16-mixed, activation checkpointing": ({"checkpointed": True}, {"precision": "bf16-mixed"}),
    "16-mixed": ({}, {"precision": "16-mixed", "max_epochs": 4}),
}


class Counting(CUDAGraphStep):
    """Keeps the figures of the run."""

    def on_train_end(self, trainer, pl_module):
        self.replays, self.memory = self._runner.replays, self.memory_bytes()
        super().on_train_end(trainer, pl_module)


def train(arguments, options, *callbacks, strategy="auto"):
    torch.cuda.manual_seed(5)
    strategy = Zero3Strategy() if strategy == "zero3" else strategy
    return fit(Net(**arguments), *callbacks, accelerator="gpu", strategy=strategy, **options)


@pytest.mark.parametrize("strategy", ["auto", "zero3"])
@pytest.mark.parametrize("case", CASES)
def test_a_captured_run_is_the_eager_run(case, strategy):
    reference = train(*CASES[case], strategy=strategy)
    callback = Counting(strict=True)
    mine = train(*CASES[case], callback, strategy=strategy)
    assert callback.replays >= 5 and callback.memory["pool"] > 0
    assert_same_run(mine, reference)


def adamw(parameters):
    rate = torch.tensor(0.01, device="cuda")
    return torch.optim.AdamW(parameters, lr=rate, capturable=True)


def cosine(optimizer):
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)


class Stepped(Net):
    def configure_optimizers(self):
        optimizer = adamw(self.parameters())
        return [optimizer], [{"scheduler": cosine(optimizer), "interval": "step"}]


@pytest.mark.parametrize("strategy", ["auto", "zero3"])
def test_the_optimizer_in_a_graph_of_its_own(strategy):
    made = [Zero3Strategy() if strategy == "zero3" else strategy for _ in range(2)]
    options = {"accelerator": "gpu", "gradient_clip_val": 0.1, "max_epochs": 4}
    reference = fit(Stepped(), strategy=made[0], **options)
    assert_same_run(fit(Stepped(), CUDAGraphStep(strict=True, optimizer=True), strategy=made[1], **options), reference)


def test_single_modules():
    options = {"accumulate_grad_batches": 2}
    reference = train({}, options)
    assert_same_run(train({}, options, CUDAGraphStep(strict=True, modules=["net", "head"])), reference)


class Frees(Callback):
    """Other work on the device between replays may not touch their memory."""

    def on_train_batch_end(self, *_):
        torch.cuda.empty_cache()
        torch.full((1 << 20,), float("nan"), device="cuda")


def test_memory_of_graphs_is_left_alone():
    assert_same_run(train({}, {}, CUDAGraphStep(strict=True), Frees()), train({}, {}, Frees()))


class Scaled(Net):
    """A hook of the backward, which runs in a thread of autograd's, reads a number that changes in the middle of an epoch."""

    alpha = 1.0

    def forward(self, x):
        scores = super().forward(x)
        if scores.requires_grad:
            scores.register_hook(lambda gradient: gradient * self.alpha)
        return scores


class Halves(Callback):
    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        pl_module.alpha = 1.0 if trainer.global_step < 8 else 0.5


def test_a_number_that_a_backward_reads():
    reference, mine = (fit(Scaled(), Halves(), *extra, accelerator="gpu") for extra in ([], [CUDAGraphStep(strict=True)]))
    assert_same_run(mine, reference)


class CopiesFromHost(Net):
    def training_step(self, batch, batch_idx):
        output = super().training_step(batch, batch_idx)
        return {**output, "loss": output["loss"] * torch.tensor(2.0, device="cuda")}


class HostTensor(Net):
    def training_step(self, batch, batch_idx):
        output = super().training_step(batch, batch_idx)
        return {**output, "loss": output["loss"] * torch.tensor(2.0)}


class ToHost(Net):
    def training_step(self, batch, batch_idx):
        output = super().training_step(batch, batch_idx)
        output["scores"].cpu()
        return output


class CountsOnHost(Net):
    seen = torch.zeros(())

    def training_step(self, batch, batch_idx):
        self.seen.add_(1)
        return super().training_step(batch, batch_idx)


class LogsFromHost(Net):
    def training_step(self, batch, batch_idx):
        self.log("ones", torch.ones(()))
        return super().training_step(batch, batch_idx)


class Solves(Net):
    def training_step(self, batch, batch_idx):
        output = super().training_step(batch, batch_idx)
        matrix = torch.eye(16, device=self.device) + self.net[4].weight * 0.01
        return {**output, "loss": output["loss"] + torch.linalg.solve(matrix, self.net[4].bias).sum()}


class WaitsUnseen(Net):
    def training_step(self, batch, batch_idx):
        torch.cuda.current_stream().synchronize()
        return super().training_step(batch, batch_idx)


REFUSED = {
    CopiesFromHost: "Python numbers are copied",
    HostTensor: "reads a tensor on cpu",
    ToHost: "copies a tensor to cpu",
    CountsOnHost: r"(?s)aten\.add_ writes to a tensor on cpu.*self\.seen\.add_\(1\)",
    LogsFromHost: r"(?s)`self\.log\('ones', \.\.\.\)` gets a tensor on cpu.*self\.log\(",
    Solves: r"(?s)_linalg_check_errors needs a value.*torch\.linalg\.solve",
    WaitsUnseen: r"(?s)The host waits for the device here.*\.synchronize\(\)",
}


@pytest.mark.parametrize("module", REFUSED)
def test_what_waits_or_happens_on_the_host_is_refused(module):
    with pytest.raises(GraphCaptureError, match=REFUSED[module]):
        fit(module(), CUDAGraphStep(strict=True), accelerator="gpu")


class Attention(nn.Module):
    """Of a batch to itself, with a mask: in fp32 its seed lies on the host, outside of captures."""

    def __init__(self):
        super().__init__()
        self.projection = nn.Linear(16, 48)

    def forward(self, x):  # [batch, 16]
        query, key, value = self.projection(x).view(1, len(x), 2, 24).transpose(1, 2).chunk(3, -1)
        mask = torch.ones(len(x), len(x), dtype=torch.bool, device=x.device).tril()
        dropout = 0.1 if self.training else 0.0
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, mask, dropout)
        return mixed.transpose(1, 2).reshape(x.shape)


class Attends(Net):
    def __init__(self, **arguments):
        super().__init__(**arguments)
        self.net[2] = Attention()


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_attention_with_a_mask_and_dropout(precision):
    options, callback = {"accelerator": "gpu", "precision": precision}, Counting(strict=True)
    torch.cuda.manual_seed(5)
    reference = fit(Attends(batch_size=8), **options)
    torch.cuda.manual_seed(5)
    assert_same_run(fit(Attends(batch_size=8), callback, **options), reference)
    assert callback.replays > 2


class LooksBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * (3 if gradient.sum().item() > 1e9 else 2)


class Looks(nn.Module):
    def forward(self, x):
        return LooksBack.apply(x)


class HasLooks(Net):
    def __init__(self):
        super().__init__()
        self.net[2] = Looks()


def test_a_backward_that_waits_leaves_its_module_eager_and_others_captured():
    runs = []
    for extra in ([], [CUDAGraphStep(modules=["net", "head"]), Frees()]):
        torch.cuda.manual_seed(5)
        runs.append(fit(HasLooks(), *extra, accelerator="gpu"))
    assert_same_run(runs[1], runs[0])
