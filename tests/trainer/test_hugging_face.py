"""Models of Hugging Face's on the meta device: initialised as by their constructors, loaded by
parts, written as `from_pretrained` loads them.
"""

import re
import subprocess
import sys
from pathlib import Path

import lightning.pytorch as pl
import peft
import pytest
import torch
import transformers
from torch.utils.data import DataLoader

from checkpoints.runs import full_weights
from helpers.parity import assert_same_tensors, trainer, zero3
from helpers.ranks import run_ranks
from lightning_zero3 import CheckpointOptions
from lightning_zero3.__main__ import main

SMALL = {
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 64,
}
MODELS = {
    "llama": (
        transformers.LlamaForCausalLM,
        transformers.LlamaConfig(**SMALL, tie_word_embeddings=False),
    ),
    "tied llama": (
        transformers.LlamaForCausalLM,
        transformers.LlamaConfig(**SMALL, tie_word_embeddings=True),
    ),
    "opt": (
        transformers.OPTForCausalLM,
        transformers.OPTConfig(
            **{k: v for k, v in SMALL.items() if k != "intermediate_size"},
            ffn_dim=96,
            word_embed_proj_dim=48,
            max_position_embeddings=32,
        ),
    ),
    "vit": (
        transformers.ViTModel,
        transformers.ViTConfig(
            **{k: v for k, v in SMALL.items() if k != "vocab_size"}, image_size=32, patch_size=8
        ),
    ),
}


class Made(pl.LightningModule):
    def __init__(self, name, weights=None):
        super().__init__()
        self.name, self.weights, self.model = name, weights, None

    def configure_model(self):
        if self.model is None:
            build, config = MODELS[self.name]
            with torch.device("meta"):
                self.model = build(config)
            if self.weights is not None:
                self.trainer.strategy.load_weights(self.weights, {"^": "model."})

    def on_fit_start(self):
        self.begun = full_weights(self.trainer)
        self.made = {n: b.clone() for n, b in self.model.named_buffers()}

    def training_step(self, batch, batch_idx):
        if self.name == "vit":
            return self.model(torch.ones(1, 3, 32, 32)).last_hidden_state.square().mean()
        return self.model(input_ids=batch, labels=batch).loss

    def train_dataloader(self):
        return DataLoader(torch.arange(32).view(2, 16))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def initialise(rank, world_size):
    found = {}
    for name in MODELS:
        module = Made(name)
        pl.seed_everything(3, verbose=False)
        trainer(zero3(unit_policy=None), world_size, max_steps=1).fit(module)
        found[name] = module.begun, module.made
    return found


def test_on_the_meta_device_a_model_has_the_distribution_of_its_constructor():
    found, *_ = run_ranks(initialise, 2, timeout=100)
    for name, (build, config) in MODELS.items():
        torch.manual_seed(4)
        expected = build(config)
        values, buffers = found[name]
        assert values.keys() == {f"model.{key}" for key in expected.state_dict()}
        for key, value in expected.state_dict().items():
            mine = values[f"model.{key}"]
            if value.std() == 0 or value.numel() < 2:  # norms, biases
                torch.testing.assert_close(mine, value, msg=f"{name}: {key}")
            elif value.numel() > 40:
                assert 0.75 < mine.std() / value.std() < 1.33, (name, key)
                assert abs(mine.mean()) < 0.3 * value.std(), (name, key)
        for key, value in expected.named_buffers():
            torch.testing.assert_close(buffers[key], value, msg=f"{name}: {key}")


# `save_pretrained` of a ViT writes the names of older versions, for which a mapping is needed
LOADED = [name for name in MODELS if name != "vit"]


def load(rank, world_size, folder):
    found = {}
    for name in LOADED:
        module = Made(name, f"{folder}/{name}")
        runner = trainer(zero3(unit_policy=None), world_size, max_steps=1)
        runner.fit(module)
        runner.strategy.save_weights(f"{folder}/{name} out", {r"^model\.": ""})
        runner.save_checkpoint(f"{folder}/{name}.ckpt")
        found[name] = module.begun, full_weights(runner)
    return found


def test_from_a_folder_to_a_folder(tmp_path):
    for name in LOADED:
        build, config = MODELS[name]
        build(config).save_pretrained(tmp_path / name)
    found, *_ = run_ranks(load, 2, str(tmp_path), timeout=100)
    for name in LOADED:
        build, config = MODELS[name]
        begun, end = found[name]
        begin = build.from_pretrained(tmp_path / name).state_dict()
        assert_same_tensors(begun, {f"model.{key}": value for key, value in begin.items()})
        paths = [str(tmp_path / f"{name}.ckpt"), str(tmp_path / f"{name} out too")]
        assert main(["consolidate", "--safetensors", "--strip-prefix", "model.", *paths]) == 0
        for out in ("out", "out too"):
            config.save_pretrained(tmp_path / f"{name} {out}")
            again, report = build.from_pretrained(
                tmp_path / f"{name} {out}", output_loading_info=True
            )
            assert not report["missing_keys"] and not report["unexpected_keys"], (name, report)
            state = {f"model.{key}": value for key, value in again.state_dict().items()}
            assert_same_tensors(state, end)


class Adapted(pl.LightningModule):
    """A Llama with LoRA, whose adapter alone is gathered and saved, as the guide says."""

    def __init__(self, folder):
        super().__init__()
        torch.manual_seed(0)
        build, config = MODELS["llama"]
        lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
        self.folder, self.model = folder, peft.get_peft_model(build(config), lora)

    def training_step(self, batch, batch_idx):
        return self.model(input_ids=batch, labels=batch).loss

    def train_dataloader(self):
        return DataLoader(torch.arange(64).view(4, 16))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)

    def on_train_end(self):
        self.trainer.save_checkpoint(f"{self.folder}/a.ckpt")
        lora = {n: p for n, p in self.model.named_parameters() if "lora_" in n}
        with self.trainer.strategy.gathered(list(lora.values())):
            if self.trainer.is_global_zero:
                self.model.save_pretrained(self.folder, state_dict=lora)


def adapt(rank, world_size, folder):
    strategy = zero3(unit_policy=None, checkpoint=CheckpointOptions(exclude_frozen=True))
    trainer(strategy, world_size, max_epochs=1).fit(Adapted(folder))


def test_an_adapter_is_saved_alone(tmp_path):
    run_ranks(adapt, 2, str(tmp_path), timeout=60)
    build, config = MODELS["llama"]
    loaded = peft.PeftModel.from_pretrained(build(config), tmp_path).state_dict()
    state = torch.load(tmp_path / "a.ckpt", weights_only=True)["state_dict"]
    assert len(state) == 8 and all("lora_" in key for key in state)
    for key, value in state.items():
        assert torch.equal(loaded[key.removeprefix("model.")], value)
    assert any("lora_B" in key and value.any() for key, value in state.items())


class AdaptedOnMeta(Adapted):
    """On a base that is never whole on a rank."""

    is_given_values = True

    def __init__(self, folder):
        pl.LightningModule.__init__(self)
        self.folder = folder

    def configure_model(self):
        build, config = MODELS["llama"]
        with torch.device("meta"):
            model = build(config)
        lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
        self.model = peft.get_peft_model(model, lora)
        for layer in self.model.modules():
            if self.is_given_values and hasattr(layer, "reset_lora_parameters"):
                layer.lora_A.to_empty(device="cpu")
                layer.lora_B.to_empty(device="cpu")
                layer.reset_lora_parameters("default", True)
        renamed = r"\1.base_layer.weight"
        names = {"^": "model.base_model.model.", r"(q_proj|v_proj)\.weight$": renamed}
        self.trainer.strategy.load_weights(self.folder, key_mapping=names, strict=False)

    def on_fit_start(self):
        self.start = full_weights(self.trainer)


def adapt_on_meta(rank, world_size, folder):
    module = AdaptedOnMeta(folder)
    module.is_given_values = False
    told = r"lora_A.default.weight' is of an adapter that was added on the meta device"
    with pytest.raises(ValueError, match=told):
        trainer(zero3(unit_policy=None), world_size, max_epochs=1).fit(module)
    module = AdaptedOnMeta(folder)
    trainer(zero3(unit_policy=None), world_size, max_epochs=1).fit(module)
    return module.start


def test_an_adapter_on_a_base_that_is_never_whole(tmp_path):
    build, config = MODELS["llama"]
    torch.manual_seed(1)
    base = build(config)
    base.save_pretrained(tmp_path)
    start, _ = run_ranks(adapt_on_meta, 2, str(tmp_path), timeout=60)
    for key, value in base.state_dict().items():
        renamed = re.sub(r"(q_proj|v_proj)\.weight$", r"\1.base_layer.weight", key)
        assert torch.equal(start[f"model.base_model.model.{renamed}"], value), key
    for key, value in start.items():
        if "lora_" in key:
            assert value.any() == ("lora_A" in key), key


def test_the_lora_example(tmp_path):
    example = Path(__file__).parents[2] / "examples" / "lora.py"
    done = subprocess.run(
        [sys.executable, example], cwd=tmp_path, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    before, after = done.stdout.split("loss: ")[1].split(" before, ")
    assert float(after.split()[0]) < float(before) - 0.3


def test_the_example(tmp_path):
    example = Path(__file__).parents[2] / "examples" / "hugging_face.py"
    done = subprocess.run(
        [sys.executable, example], cwd=tmp_path, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    before, after = done.stdout.split("loads: ")[1].split(" before, ")
    assert float(before) > 4 and float(after.split()[0]) < 2
