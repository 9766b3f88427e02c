"""Ten models as people write them, each with an input, and how they are trained for the tests."""

import importlib.util
from pathlib import Path
from types import SimpleNamespace

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, DataLoader, TensorDataset

from helpers.parity import trainer

ROOT = Path(__file__).resolve().parents[2]


def tokens(seed: int, batch: int = 4, length: int = 8) -> Tensor:
    return torch.randint(0, 64, (batch, length), generator=torch.Generator().manual_seed(seed))


def features(seed: int, *size: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


class Model(pl.LightningModule):
    """Trains on its own example input, twice: two samples on each of two ranks, four on one."""

    dynamic_shapes = None

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.build()

    def loss(self, x):
        return self(x).square().mean()

    def training_step(self, batch, batch_idx):
        return self.loss(batch[0])

    def train_dataloader(self):
        return self.loader(self.example_input_array)

    def loader(self, *inputs):
        data = TensorDataset(*inputs)
        return DataLoader(ConcatDataset([data, data]), batch_size=4 // self.trainer.world_size)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.05)


class Gpt(Model):
    """That of examples/train_gpt.py: buffers that no state dict has."""

    def build(self):
        spec = importlib.util.spec_from_file_location("gpt", ROOT / "examples" / "train_gpt.py")
        example = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(example)
        corpus = SimpleNamespace(
            tokenizer=SimpleNamespace(vocabulary=range(64)), length=8, token_counts=torch.ones(64)
        )
        self.net = example.GPT(corpus, 64, 2, 97, 0.01)
        self.example_input_array = tokens(1)

    def forward(self, x):
        return self.net(x)


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )

    def forward(self, x):
        return F.relu(x + self.layers(x))


class ResNet(Model):
    """Running statistics change in training, in memory of channels last."""

    def build(self):
        self.stem = nn.Conv2d(3, 8, 3, 2, 1)
        self.blocks = nn.Sequential(*(Residual(8) for _ in range(2)))
        self.head = nn.Linear(8, 5)
        self.to(memory_format=torch.channels_last)
        self.example_input_array = features(1, 4, 3, 16, 16)

    def forward(self, x):
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


class Lstm(Model):
    def build(self):
        self.embed = nn.Embedding(64, 12)
        self.lstm = nn.LSTM(12, 16, num_layers=2, batch_first=True, dropout=0.1)
        self.head = nn.Linear(16, 7)
        self.example_input_array = tokens(1)

    def forward(self, x):
        return self.head(self.lstm(self.embed(x))[0])


SMALL = {
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


class Llama(Model):
    def build(self):
        import transformers

        config = transformers.LlamaConfig(**SMALL, vocab_size=64, use_cache=False)
        self.model = transformers.LlamaForCausalLM(config)
        self.example_input_array = tokens(1)

    def forward(self, x):
        return self.model(input_ids=x).logits


class Bert(Model):
    """Takes a mask by name, and returns tensors by name."""

    def build(self):
        import transformers

        config = transformers.BertConfig(**SMALL, vocab_size=64, max_position_embeddings=16)
        self.model = transformers.BertForSequenceClassification(config)
        mask = torch.ones(4, 8, dtype=torch.long)
        mask[2:, 5:] = 0
        self.example_input_array = {"x": tokens(1), "mask": mask}

    def forward(self, x, mask):
        return dict(self.model(input_ids=x, attention_mask=mask))

    def training_step(self, batch, batch_idx):
        return self(*batch)["logits"].square().mean()

    def train_dataloader(self):
        return self.loader(*self.example_input_array.values())


class Vit(Model):
    def build(self):
        import transformers

        config = transformers.ViTConfig(**SMALL, image_size=16, patch_size=4, num_labels=3)
        self.model = transformers.ViTForImageClassification(config)
        self.example_input_array = features(1, 4, 3, 16, 16)

    def forward(self, x):
        return self.model(pixel_values=x).logits


class Dynamic(Model):
    """Serves batches of any size, and any length."""

    dynamic_shapes = {"x": {0: "batch", 1: "auto"}}

    def build(self):
        self.embed = nn.Embedding(64, 12)
        self.mixer = nn.TransformerEncoderLayer(12, 3, 24, batch_first=True)
        self.example_input_array = tokens(1)

    def forward(self, x):
        return self.mixer(self.embed(x)).mean(1)


class Tied(Model):
    """One matrix is the embedding and the head, and another one's transpose is used."""

    def build(self):
        self.embed, self.head = nn.Embedding(64, 12), nn.Linear(12, 64, bias=False)
        self.head.weight = self.embed.weight
        self.first, self.second = nn.Linear(12, 12), nn.Linear(12, 12)
        self.second.weight = self.first.weight
        self.example_input_array = tokens(1)

    def forward(self, x):
        x = self.second(self.first(self.embed(x)).tanh())
        return self.head(x @ self.first.weight.t())


class Changing(Model):
    """Training changes two buffers; the state dict lacks another one, and a plain attribute."""

    def build(self):
        self.layer = nn.Linear(6, 6)
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("scale", torch.full((6,), 2.0), persistent=False)
        self.shift = torch.arange(6.0)
        self.example_input_array = features(1, 4, 6)

    def forward(self, x):
        if self.training:
            self.mean.lerp_(x.detach().mean(0), 0.1)
            self.steps += 1
        return self.layer((x - self.mean) * self.scale + self.shift) * self.steps


class Lora(Model):
    def build(self):
        import peft
        import transformers

        config = transformers.LlamaConfig(**SMALL, vocab_size=64, use_cache=False)
        model = transformers.LlamaForCausalLM(config)
        adapters = peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=4)
        self.model = peft.get_peft_model(model, adapters)
        self.example_input_array = tokens(1)

    def forward(self, x):
        return self.model(input_ids=x).logits


MODELS = {
    model.__name__: model
    for model in (Gpt, ResNet, Lstm, Llama, Bert, Vit, Dynamic, Tied, Changing, Lora)
}


def fit(module, folder, strategy="auto", devices=1, callbacks=(), **options):
    """Train two steps, and save a checkpoint as "it.ckpt"."""
    runner = trainer(
        strategy,
        devices,
        enable_checkpointing=True,
        use_distributed_sampler=True,
        callbacks=[*callbacks, ModelCheckpoint(folder, "it")],
        **options,
    )
    runner.fit(module)
    return runner
