"""Train a LoRA adapter of a sharded model, and save the adapter alone.

python examples/lora.py        # 2 processes on the CPU; `pip install transformers peft`
"""

import tempfile

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from peft import LoraConfig, PeftModel, get_peft_model
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_zero3 import Zero3Strategy

CONFIG = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=3,
    num_attention_heads=4,
)


def make_base() -> LlamaForCausalLM:
    """The base, which would be `from_pretrained(...)`."""
    seed_everything(1, verbose=False)
    return LlamaForCausalLM(CONFIG)


class Lora(LightningModule):
    """Learns to count, by an adapter."""

    def __init__(self, out: str) -> None:
        super().__init__()
        self.out = out
        self.model = get_peft_model(make_base(), LoraConfig(r=8, target_modules="all-linear"))

    def training_step(self, tokens: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.model(input_ids=tokens, labels=tokens).loss

    def on_train_end(self) -> None:
        # The adapter's weights alone are gathered; rank 0's files count.
        lora = {name: p for name, p in self.model.named_parameters() if "lora_" in name}
        with self.trainer.strategy.gathered(list(lora.values())):
            if self.trainer.is_global_zero:
                self.model.save_pretrained(self.out, state_dict=lora)

    def train_dataloader(self) -> DataLoader:
        starts = torch.arange(64).unsqueeze(1)  # [sequences, 1]
        return DataLoader((starts + torch.arange(16)) % 64, batch_size=8, shuffle=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.AdamW(trained, lr=2e-2)


@torch.no_grad()
def loss_of(model: torch.nn.Module) -> float:
    """Compute the loss of counting from 0."""
    tokens = torch.arange(16).unsqueeze(0)
    return model(input_ids=tokens, labels=tokens).loss.item()


def main() -> tuple[float, float]:
    """Train, and return the loss of the base, and of the base with the adapter that was saved."""
    with tempfile.TemporaryDirectory() as out:
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
        trainer.fit(Lora(out))
        before = loss_of(make_base())
        after = loss_of(PeftModel.from_pretrained(make_base(), out))
    print(f"loss: {before:.2f} before, {after:.2f} with the adapter")
    return before, after


if __name__ == "__main__":
    main()
