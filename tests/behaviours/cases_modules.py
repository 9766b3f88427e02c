"""Modules that treat their parameters, buffers or randomness in a special way."""

import warnings
from unittest import mock

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize, prune
from torch.nn.utils.fusion import fuse_linear_bn_eval

from .harness import DIM, STEPS, Block, Case, Chain, Run, case, seeded, under_a_mode
from .trainer_modules import sync_batch_norm


class Up(Case):
    """`change` applied to one layer of every block"""

    def change(self, layer: nn.Linear) -> nn.Module:
        raise NotImplementedError

    def model(self):
        model = Chain()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for block in model.blocks:
                block.up = self.change(block.up)
        return model


@case
class WeightNorm(Up):
    """`parametrizations.weight_norm`"""

    pitfalls = (38,)

    def change(self, layer):
        return parametrizations.weight_norm(layer)


@case
class OldWeightNorm(Up):
    """`nn.utils.weight_norm`, which sets the weight as an attribute"""

    pitfalls = (38,)

    def change(self, layer):
        return nn.utils.weight_norm(layer)


@case
class SpectralNorm(Up):
    """`parametrizations.spectral_norm`"""

    pitfalls = (38,)

    def change(self, layer):
        return parametrizations.spectral_norm(layer)


@case
class OldSpectralNorm(Up):
    """`nn.utils.spectral_norm`"""

    pitfalls = (38,)

    def change(self, layer):
        return nn.utils.spectral_norm(layer)


@case
class Orthogonal(Up):
    """`parametrizations.orthogonal`"""

    pitfalls = (38,)

    def change(self, layer):
        return parametrizations.orthogonal(layer)


@case
class OwnParametrization(Up):
    """A parametrization of the user's own, cached during the forward"""

    pitfalls = (38,)

    class Symmetric(nn.Module):
        def forward(self, weight):
            return weight + weight.flip(0)

    def change(self, layer):
        parametrize.register_parametrization(layer, "weight", self.Symmetric())
        return layer

    def loss(self, model, batch):
        with parametrize.cached():
            return super().loss(model, batch) + model.blocks[0].up.weight.norm()


@case
class LowRankAdapter(Up):
    """Low-rank adapters over frozen layers"""

    class Adapter(nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.layer = layer.requires_grad_(False)
            self.a = nn.Parameter(torch.randn(2, DIM))
            self.b = nn.Parameter(torch.zeros(2 * DIM, 2))

        def forward(self, x):
            return self.layer(x) + F.linear(F.linear(x, self.a), self.b)

    def change(self, layer):
        return self.Adapter(layer)

    def optimizers(self, model):
        return [
            torch.optim.SGD(
                [p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9
            )
        ]


class Sequences(Case):
    """A layer on sequences between stem and head"""

    def layer(self) -> nn.Module:
        raise NotImplementedError

    def model(self):
        return Chain(*(self.layer() for _ in range(3)))

    def batch(self, step, rank):
        return super().batch(step, rank)[:, None, :] * torch.linspace(-1, 1, 5)[None, :, None]

    def loss(self, model, batch):
        x = model.stem(batch)
        for layer in model.blocks:
            x = self.call(layer, x)
        return model.head(x).square().mean()

    def call(self, layer, x):
        return layer(x)


@case
class Lstm(Sequences):
    """LSTM, with projections"""

    pitfalls = (38,)

    def layer(self):
        return nn.LSTM(DIM, 2 * DIM, num_layers=2, proj_size=DIM, batch_first=True)

    def call(self, layer, x):
        return layer(x)[0]


@case
class Gru(Lstm):
    """Bidirectional GRU, `flatten_parameters` called in every step"""

    def layer(self):
        return nn.GRU(DIM, DIM // 2, bidirectional=True, batch_first=True)

    def call(self, layer, x):
        layer.flatten_parameters()
        return layer(x)[0]


@case
class RnnCell(Sequences):
    """Recurrent cells called once for each time"""

    pitfalls = (15,)

    def layer(self):
        return nn.LSTMCell(DIM, DIM)

    def call(self, layer, x):
        state, out = None, []
        for t in range(x.shape[1]):
            state = layer(x[:, t], state)
            out.append(state[0])
        return torch.stack(out, 1)


@case
class Attention(Sequences):
    """`nn.MultiheadAttention`"""

    pitfalls = (38,)

    def layer(self):
        return nn.MultiheadAttention(DIM, 2, batch_first=True)

    def call(self, layer, x):
        return layer(x, x, x)[0]


@case
class AttentionInEval(Attention):
    """`nn.MultiheadAttention` in eval, where torch has a fast path"""

    def call(self, layer, x):
        return layer(x, x, x, need_weights=False)[0]

    def train(self, run):
        super().train(run)
        run.model.eval()
        with mock.patch.object(
            torch, "_native_multi_head_attention", wraps=torch._native_multi_head_attention
        ) as fast:
            for mode in (torch.no_grad, torch.inference_mode):
                with mode():
                    run.log(
                        run.step(lambda model: self.loss(model, self.batch(5, run.rank))).clone()
                    )
        # under autocast torch does not take it
        assert fast.call_count or type(run) is not Run or under_a_mode()
        run.model.train()
        super().train(run)


@case
class TransformerLayer(Sequences):
    """`TransformerEncoderLayer`; in eval the numbers of torch's fast path, which hooks switch
    off
    """

    pitfalls = (38,)

    def layer(self):
        return nn.TransformerEncoderLayer(DIM, 2, 2 * DIM, dropout=0.1, batch_first=True)

    def train(self, run):
        super().train(run)
        run.model.eval()
        with mock.patch.object(
            torch, "_transformer_encoder_layer_fwd", wraps=torch._transformer_encoder_layer_fwd
        ) as fast:
            for mode in (torch.no_grad, torch.inference_mode):
                with mode():
                    run.log(
                        run.step(lambda model: self.loss(model, self.batch(5, run.rank))).clone()
                    )
        assert fast.call_count or not run.is_reference or under_a_mode()
        run.model.train()
        super().train(run)


@case
class Transformer(Sequences):
    """`nn.Transformer` with encoder and decoder"""

    pitfalls = (38,)

    def layer(self):
        return nn.Transformer(DIM, 2, 1, 1, 2 * DIM, dropout=0.0, batch_first=True)

    def call(self, layer, x):
        return layer(x, x)


@case
class BatchNorm(Case):
    """BatchNorm: each rank normalizes by its own batch, and rank 0's running statistics are kept"""

    pitfalls = (39,)

    def model(self):
        return Chain(
            *(nn.Sequential(nn.Linear(DIM, DIM), nn.BatchNorm1d(DIM), nn.ReLU()) for _ in range(3))
        )

    def train(self, run):
        super().train(run)
        if run.rank == 0:  # the others' are rank 0's
            run.log(*run.model.buffers())


@case
class FusedForEvaluation(BatchNorm):
    """`fuse_linear_bn_eval` after set-up"""

    pitfalls = (38,)

    def fuse(self, run):
        return [fuse_linear_bn_eval(linear, norm) for linear, norm, _ in run.model.blocks]

    def train(self, run):
        super().train(run)
        run.model.eval()
        fused = self.fuse(run)
        run.model.train()
        if run.rank == 0:  # who has the running statistics
            run.log(*(layer(self.batch(0, 0)) for layer in fused))
        super().train(run)


@case
class FusedWhenGathered(FusedForEvaluation):
    """`fuse_linear_bn_eval` inside `gathered`"""

    refused = None

    def fuse(self, run):
        with run.gathered(run.model):
            return super().fuse(run)


@case
class SyncBatchNorm(BatchNorm):
    """SyncBatchNorm; on the CPU, where torch has none, what it computes: statistics over all
    ranks
    """

    pitfalls = (39,)

    class OverRanks(nn.BatchNorm1d):
        forward = sync_batch_norm

    def model(self):
        norm = nn.SyncBatchNorm if torch.get_default_device().type == "cuda" else self.OverRanks
        return Chain(*(nn.Sequential(nn.Linear(DIM, DIM), norm(DIM), nn.ReLU()) for _ in range(3)))


@case
class Buffers(Case):
    """Buffers, persistent and not, changed in forward and shared"""

    pitfalls = (39,)

    class Counting(Block):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.zeros(()))
            self.register_buffer("table", torch.arange(DIM).float(), persistent=False)

        def forward(self, x):
            self.seen += 1
            return super().forward(x * self.table) / self.seen

    def model(self):
        return Chain(*(self.Counting() for _ in range(3)))

    def train(self, run):
        super().train(run)
        run.log(*run.model.buffers(), *sorted(dict(run.model.named_buffers())))


@case
class GrowingBuffers(Case):
    """Buffers registered anew in forward, in other sizes on each rank"""

    pitfalls = (39,)

    class Table(Block):
        def __init__(self):
            super().__init__()
            self.grow(2)

        def grow(self, rows):
            places = torch.arange(rows)[:, None] / torch.arange(1, DIM + 1)
            self.register_buffer("cos", places.cos(), persistent=False)
            self.register_buffer("sin", places.sin(), persistent=False)

        def forward(self, x):
            if len(x) > len(self.cos):
                self.grow(len(x))
            return super().forward(x * self.cos[: len(x)] + self.sin[: len(x)])

    def model(self):
        return Chain(*(self.Table() for _ in range(3)))

    def batch(self, step, rank):
        rows = [[3, 7], [8, 7], [9, 9], [2, 4]][step][rank % 2]  # other, other, the same, none
        return torch.randn(rows, DIM, generator=seeded(1000 * step + rank))

    def train(self, run):
        for step in range(4):
            run.train_step(lambda model, step=step: self.loss(model, self.batch(step, run.rank)))


@case
class Dropout(Case):
    """Dropout, other masks on every rank"""

    def model(self):
        return Chain(*(nn.Sequential(Block(), nn.Dropout(0.5)) for _ in range(4)))


@case
class OtherNorms(Case):
    """GroupNorm, InstanceNorm, RMSNorm, PReLU"""

    def model(self):
        def block():
            norms = (
                nn.GroupNorm(2, DIM),
                nn.InstanceNorm1d(DIM, affine=True),
                nn.Flatten(1),
                nn.RMSNorm(DIM),
            )
            return nn.Sequential(nn.Linear(DIM, DIM), nn.Unflatten(1, (DIM, 1)), nn.Upsample(scale_factor=2.0), *norms[:2],
                                 nn.AvgPool1d(2), norms[2], norms[3], nn.PReLU())  # fmt: skip

        return Chain(*(block() for _ in range(3)))


@case
class Convolutions(Case):
    """Convolutions, channels-last model and input"""

    pitfalls = (35,)

    def model(self):
        def block():
            layers = (
                nn.Conv2d(4, 4, 3, padding=1),
                nn.BatchNorm2d(4),
                nn.ReLU(inplace=True),
                nn.ConvTranspose2d(4, 4, 1),
            )
            return nn.Sequential(*layers)

        model = Chain(*(block() for _ in range(3)))
        model.stem, model.head = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 2, 1)
        return model.to(memory_format=torch.channels_last)

    def batch(self, step, rank):
        generator = seeded(step * 10 + rank)
        return torch.randn(2, 3, 6, 6, generator=generator).to(memory_format=torch.channels_last)


@case
class EmbeddingWithMaxNorm(Case):
    """`Embedding(max_norm=...)`, which writes its weight in forward"""

    def model(self):
        model = Chain()
        model.stem = nn.Embedding(16, DIM, max_norm=1.0)
        return model

    def batch(self, step, rank):
        return torch.arange(16)


@case
class EmbeddingWithMaxNormOfOtherTokens(EmbeddingWithMaxNorm):
    """`Embedding(max_norm=...)` with other tokens on each rank, which change other rows"""

    refused = "a value written to parameter 'stem.weight'.* other values on each.*gathered"
    worlds = (2,)

    def batch(self, step, rank):
        return torch.randint(0, 16, (5,), generator=seeded(100 * step + rank))


@case
class EmbeddingBag(Case):
    """EmbeddingBag and padding index"""

    def model(self):
        model = Chain()
        model.stem = nn.EmbeddingBag(16, DIM, padding_idx=0)
        return model

    def batch(self, step, rank):
        return torch.randint(0, 16, (4, 3), generator=seeded(100 * step + rank))


class Experts(nn.Module):
    """The experts are this module's, so they are gathered together."""

    def __init__(self, count=3):
        super().__init__()
        self.gate = nn.Linear(DIM, count)
        self.experts = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(count))

    def forward(self, x):
        weights = self.gate(x).softmax(-1)
        chosen = weights.argmax(-1)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            mine = chosen == i
            if mine.any():
                out[mine] = expert(x[mine]) * weights[mine, i, None]
        return x + out


@case
class MixtureOfExperts(Case):
    """A mixture of experts with data-dependent routing, experts inside the repeated block"""

    pitfalls = (2, 29)
    worlds = (1, 2, 3)

    def model(self):
        return Chain(*(Experts() for _ in range(3)))


@case
class ExpertsAsUnits(Case):
    """A mixture of experts whose experts are units of their own"""

    pitfalls = (29,)
    refused = "The ranks run different things: rank .*experts"

    class Big(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Experts(4)
            self.inner.experts = nn.ModuleList(Block() for _ in range(4))

        def forward(self, x):
            return self.inner(x)

    def model(self):
        return self.Big()

    def units(self, model):
        return list(model.inner.experts)


@case
class Frozen(Case):
    """Parameters frozen from the start, some in every unit, some whole units"""

    pitfalls = (21, 23)

    def model(self):
        model = Chain()
        for block in model.blocks:
            block.up.requires_grad_(False)
        model.blocks[1].requires_grad_(False)
        return model


@case
class FrozenLater(Case):
    """A block frozen during training, by `requires_grad_`"""

    pitfalls = (23,)

    def train(self, run):
        super().train(run)
        run.model.blocks[1].requires_grad_(False)
        run.model.head.bias.requires_grad = False
        super().train(run)


@case
class UnfrozenLater(Case):
    """Frozen blocks that the optimizer has, trained later"""

    pitfalls = (23,)

    def model(self):
        model = Chain()
        model.blocks[:2].requires_grad_(False)
        return model

    def train(self, run):
        super().train(run)
        run.model.blocks[:2].requires_grad_(True)
        super().train(run)


@case
class UnfrozenIntoNewGroup(Case):
    """Frozen blocks without an optimizer, unfrozen by `add_param_group` (`BaseFinetuning`)"""

    pitfalls = (23, 24)

    def model(self):
        model = Chain()
        model.blocks[:2].requires_grad_(False)
        return model

    def optimizers(self, model):
        return [
            torch.optim.SGD(
                [p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9
            )
        ]

    def train(self, run):
        super().train(run)
        run.model.blocks[:2].requires_grad_(True)
        run.optimizer.add_param_group(
            {"params": list(run.model.blocks[:2].parameters()), "lr": 0.05}
        )
        super().train(run)


@case
class ToggledEveryStep(Case):
    """`requires_grad` switched in every step"""

    pitfalls = (23,)

    def train(self, run):
        for step in range(2 * STEPS):
            for i, block in enumerate(run.model.blocks):
                block.requires_grad_((i + step) % 2 == 0)
            run.train_step(lambda model, step=step: self.loss(model, self.batch(step, run.rank)))


@case
class BlocksReplacedByIdentity(Case):
    """A block taken out of the model after set-up"""

    refused = refused_on_one = (
        "'blocks.1.norm.weight' was added, replaced or removed after the model was sharded.*configure_model"
    )

    def train(self, run):
        super().train(run)
        run.model.blocks[1] = nn.Identity()
        for step in range(STEPS):
            run.train_step(lambda model, step=step: self.loss(model, self.batch(step, run.rank)))

    compare_gradients = False


@case
class PrunedDuringTraining(Case):
    """`torch.nn.utils.prune` and `prune.remove` in `gathered(modify=True)` during training"""

    pitfalls = (38,)

    def train(self, run):
        layer = run.model.blocks[0].up
        super().train(run)
        with run.gathered(layer, modify=True):
            prune.l1_unstructured(layer, "weight", 0.5)
        super().train(run)
        with run.gathered(layer, modify=True):
            prune.remove(layer, "weight")
        super().train(run)


@case
class PrunedThenRegrouped(Case):
    """`add_param_group` after pruning during training"""

    def optimizers(self, model):
        model.head.bias.requires_grad_(False)
        return [
            torch.optim.SGD(
                [p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9
            )
        ]

    def train(self, run):
        with run.gathered(run.model.stem, modify=True):
            prune.l1_unstructured(run.model.stem, "weight", 0.5)
        super().train(run)
        run.optimizer.add_param_group({"params": [run.model.head.bias.requires_grad_(True)]})
        super().train(run)
