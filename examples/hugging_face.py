"""Train a model of Hugging Face's from a folder of weights to another, and never hold it whole.

    python examples/hugging_face.py        # 2 processes on the CPU; `pip install transformers`

The model is made on the meta device, where it needs no memory; each process reads its part of the
weights from the folder, and writes its part of the new ones. (The folder to begin with is made
here, with random weights.)
"""

import tempfile
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_zero3 import Zero3Strategy

CONFIG = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=3,
    num_attention_heads=4,
    tie_word_embeddings=True,
)


class Finetune(LightningModule):
    """Learns to count."""

    def __init__(self, weights: Path, out: Path) -> None:
        super().__init__()
        self.weights, self.out, self.model = weights, out, None

    def configure_model(self) -> None:
        if self.model is None:
            with torch.device("meta"):
                self.model = LlamaForCausalLM(CONFIG)
            self.trainer.strategy.load_weights(self.weights, key_mapping={"^": "model."})

    def training_step(self, tokens: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.model(input_ids=tokens, labels=tokens).loss

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.log("grad_norm", self.trainer.strategy.gradient_norm())  # of the whole model

    def on_train_end(self) -> None:
        self.trainer.strategy.save_weights(self.out, key_mapping={r"^model\.": ""})
        if self.trainer.is_global_zero:
            self.model.config.save_pretrained(self.out)

    def train_dataloader(self) -> DataLoader:
        starts = torch.arange(64).unsqueeze(1)  # [sequences, 1]
        return DataLoader((starts + torch.arange(16)) % 64, batch_size=8, shuffle=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


@torch.no_grad()
def loss_of(folder: Path) -> float:
    """Let Hugging Face load a folder, and compute the loss of its model."""
    tokens = torch.arange(16).unsqueeze(0)
    model = LlamaForCausalLM.from_pretrained(folder)
    return model(input_ids=tokens, labels=tokens).loss.item()


def main() -> tuple[float, float]:
    """Train, and return the loss of what Hugging Face loads, before and after."""
    seed_everything(1, verbose=False)
    with tempfile.TemporaryDirectory() as parent:
        weights, out = Path(parent, "weights"), Path(parent, "out")
        LlamaForCausalLM(CONFIG).save_pretrained(weights)
        trainer = Trainer(
            accelerator="cpu",
            devices=2,
            strategy=Zero3Strategy(start_method="spawn"),
            max_epochs=10,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(Finetune(weights, out))
        before, after = loss_of(weights), loss_of(out)
    print(f"loss of what `from_pretrained` loads: {before:.2f} before, {after:.2f} after")
    return before, after


if __name__ == "__main__":
    main()
