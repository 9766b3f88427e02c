"""ModelExport under every strategy, with its options, and the command, against the eager model."""

import os
import subprocess
import sys

import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from export.models import Changing, Lora, Model, Tied, features, fit, tokens
from helpers.parity import trainer
from helpers.ranks import run_ranks
from lightning_zero3 import CheckpointOptions, Zero3Strategy
from lightning_zero3.__main__ import main
from lightning_zero3.callbacks import ModelExport


class Mlp(Model):
    """With parts, a validation, and a buffer that no state dict has and training changes."""

    def build(self):
        self.encoder = nn.Sequential(nn.Linear(6, 8), nn.Tanh())
        self.heads = nn.ModuleDict({"a": nn.Linear(8, 3), "b": nn.Linear(8, 3)})
        self.register_buffer("scale", torch.ones(6), persistent=False)
        self.doubled = False
        self.example_input_array = features(1, 4, 6)

    def forward(self, x):
        y = self.encoder(x * self.scale)
        return self.heads["a"](y) + (2 if self.doubled else 1) * self.heads["b"](y)

    def on_train_batch_start(self, batch, batch_idx):
        self.scale += 1

    def validation_step(self, batch, batch_idx):
        loss = self(batch[0]).square().mean()
        self.log("loss", loss, sync_dist=True)

    def val_dataloader(self):
        return DataLoader(TensorDataset(features(2, 6, 6)), batch_size=3)


def outputs(file, *args):
    with torch.no_grad():
        return torch.export.load(file).module()(*args)


def eager(model, checkpoint, *args, **attributes):
    module = model.load_from_checkpoint(checkpoint, weights_only=True).eval()
    for name, value in attributes.items():
        setattr(module, name, value)
    with torch.no_grad():
        return module(*args)


YAML = """
trainer:
  accelerator: cpu
  devices: {devices}
  strategy: {strategy}
  max_epochs: 1
  logger: false
  enable_progress_bar: false
  enable_model_summary: false
  callbacks:
    - class_path: lightning.pytorch.callbacks.ModelCheckpoint
      init_args: {{dirpath: {folder}, filename: it}}
    - class_path: lightning_zero3.callbacks.ModelExport
      init_args: {{dynamic_shapes: {{x: {{0: batch}}}}}}
"""


def from_yaml(rank, world_size, folder, strategy):
    config = folder / f"{rank}.yaml"
    text = YAML.format(devices=world_size, strategy=strategy, folder=folder)
    config.write_text(text)
    LightningCLI(Mlp, args=["fit", "--config", str(config)], save_config_callback=None)


@pytest.mark.parametrize("strategy, devices", [("auto", 1), ("ddp", 2), ("zero3", 2)])
def test_the_best_checkpoint_of_a_run_from_yaml(strategy, devices, tmp_path):
    if devices == 1:
        from_yaml(0, 1, tmp_path, strategy)
    else:
        run_ranks(from_yaml, devices, tmp_path, strategy)
    x = features(3, 5, 6)
    assert torch.equal(outputs(tmp_path / "it.pt2", x), eager(Mlp, tmp_path / "it.ckpt", x))


def keep_two(rank, world_size, folder):
    keep = ModelCheckpoint(folder, "{epoch}", monitor="loss", mode="max", save_top_k=2)
    options = {"max_epochs": 3, "limit_val_batches": 2, "enable_checkpointing": True}
    export = ModelExport(modules=["encoder", "heads.b"])
    runner = trainer(Zero3Strategy(), world_size, callbacks=[export, keep], **options)
    runner.fit(Mlp())
    return sorted(os.path.basename(path) for path in keep.best_k_models)


def test_each_of_the_best_and_each_part(tmp_path):
    kept = run_ranks(keep_two, 2, tmp_path)[0]
    assert len(kept) == 2
    x, y = features(3, 4, 6), features(4, 4, 8)
    for name in kept:
        stem = name.removesuffix(".ckpt")
        module = Mlp.load_from_checkpoint(tmp_path / name).eval()
        with torch.no_grad():
            assert torch.equal(outputs(tmp_path / f"{stem}.encoder.pt2", x), module.encoder(x))
            b = module.heads["b"](y)
        assert torch.equal(outputs(tmp_path / f"{stem}.heads.b.pt2", y), b)
    found = {file.name for file in tmp_path.glob("*.pt2")}
    assert found == {
        f"{n.removesuffix('.ckpt')}.{p}.pt2" for n in kept for p in ("encoder", "heads.b")
    }


def run_with(rank, world_size, folder, model, strategy, options, export):
    """Train; `export` are arguments of the callback. Returns the buffers."""
    if isinstance(strategy, dict):
        strategy = Zero3Strategy(**strategy)
    callbacks = [ModelExport(**export)]
    if options.pop("average", False):
        callbacks.append(EMAWeightAveraging(decay=0.5))
    module = fit(model(), folder, strategy, world_size, callbacks, **options).lightning_module
    return dict(module.named_buffers())


SHARDED = {"checkpoint": CheckpointOptions(kind="sharded")}


@pytest.mark.parametrize(
    "ranks, strategy, options",
    [
        pytest.param(2, {}, {}, id="zero3", marks=pytest.mark.variant),
        pytest.param(4, {"shard_size": 2}, {}, id="hybrid", marks=pytest.mark.variant),
        pytest.param(2, SHARDED, {}, id="sharded"),
        pytest.param(2, {"offload": "parameters"}, {}, id="offload", marks=pytest.mark.variant),
        pytest.param(2, {}, {"precision": "bf16-true"}, id="bfloat16"),
        pytest.param(2, "ddp", {}, id="ddp", marks=pytest.mark.variant),
    ],
)
def test_the_end_is_the_last_checkpoint(ranks, strategy, options, tmp_path):
    run_ranks(run_with, ranks, tmp_path, Tied, strategy, options, {"every": "end"})
    assert main(["export", str(tmp_path / "it.ckpt"), str(tmp_path / "out.pt2")]) == 0
    assert (tmp_path / "out.pt2").read_bytes() == (tmp_path / "model.pt2").read_bytes()
    state = torch.export.load(tmp_path / "model.pt2").state_dict
    assert state["embed.weight"].data_ptr() == state["head.weight"].data_ptr()
    if (tmp_path / "it.ckpt").is_dir():
        assert main(["consolidate", str(tmp_path / "it.ckpt"), str(tmp_path / "one.ckpt")]) == 0
        (tmp_path / "one.ckpt").replace(tmp_path / "it.file")
    else:
        (tmp_path / "it.ckpt").replace(tmp_path / "it.file")
    module = Tied().to(state["embed.weight"].dtype)
    module.load_state_dict(torch.load(tmp_path / "it.file", weights_only=True)["state_dict"])
    with torch.no_grad():
        assert torch.equal(outputs(tmp_path / "model.pt2", tokens(5)), module.eval()(tokens(5)))


def test_buffers_that_no_checkpoint_has_are_those_of_the_end(tmp_path):
    scale = run_ranks(run_with, 2, tmp_path, Mlp, {}, {}, {"every": "end"})[0]["scale"]
    x = features(3, 4, 6)
    assert scale.min() > 1
    assert torch.equal(
        outputs(tmp_path / "model.pt2", x), eager(Mlp, tmp_path / "it.ckpt", x, scale=scale)
    )


class Transposed(Mlp):
    """With a buffer that is not contiguous, and no state dict has."""

    def build(self):
        super().build()
        self.register_buffer("turn", torch.arange(36.0).reshape(6, 6).t(), persistent=False)

    def forward(self, x):
        return super().forward(x @ self.turn)


@pytest.mark.parametrize("every", ["best", "end"])
def test_a_model_that_lightning_compiles(every, tmp_path):
    module = Transposed()
    compiled = torch.compile(module, backend="eager")
    fit(compiled, tmp_path, callbacks=[ModelExport(every=every, dirpath=str(tmp_path))])
    x = features(3, 4, 6)
    scale = module.scale if every == "end" else torch.ones(6)
    found = outputs(next(tmp_path.glob("*.pt2")), x)
    expected = eager(Transposed, tmp_path / "it.ckpt", x, scale=scale)
    torch.testing.assert_close(found, expected)  # a turned factor is multiplied in another order


@pytest.mark.parametrize("devices", [1, 2])
def test_averages_of_weights_and_what_they_average(devices, tmp_path):
    strategy = "auto" if devices == 1 else {}
    if devices == 1:
        run_with(0, 1, tmp_path, Changing, strategy, {"average": True}, {})
    else:
        run_ranks(run_with, 2, tmp_path, Changing, strategy, {"average": True}, {})
    checkpoint = torch.load(tmp_path / "it.ckpt", weights_only=True)
    x, found = features(3, 4, 6), {}
    out = str(tmp_path / "out.pt2")
    assert main(["export", str(tmp_path / "it.ckpt"), out, "--current"]) == 0
    for file, key in (("it.pt2", "state_dict"), ("out.pt2", "current_model_state")):
        module = Changing().eval()
        module.load_state_dict(checkpoint[key])
        with torch.no_grad():
            found[key] = module(x)
        assert torch.equal(outputs(tmp_path / file, x), found[key])
    assert not torch.equal(*found.values())


class Noisy(Mlp):
    def build(self):
        super().build()
        self.encoder.append(nn.Dropout(0.5))


@pytest.mark.parametrize("format", ["pt2", "torchscript", "onnx"])
def test_a_run_is_the_same_with_it(format, tmp_path):
    states = []
    for callbacks in ([], [ModelExport(format, modules=["encoder"], every="end")]):
        folder = tmp_path / str(len(callbacks))
        fit(Noisy(), folder, callbacks=callbacks)
        states.append(torch.load(folder / "it.ckpt", weights_only=True)["state_dict"])
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(value, states[1][key]) for key, value in states[0].items())


class Switched(Mlp):
    """Goes another way after the first step than before."""

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.doubled = True


def verify(rank, world_size, folder, model):
    export = ModelExport(every="end", verify=True, dynamic_shapes={"x": {0: "batch"}})
    options = {"callbacks": [export], "limit_val_batches": 2, "enable_checkpointing": False}
    runner = trainer(Zero3Strategy(), world_size, default_root_dir=folder, **options)
    error = None
    try:
        runner.fit(model())
    except RuntimeError as raised:
        error = str(raised)
    export.verify = False  # and again, as the model is now
    export.prepare(runner)
    export.export(runner)
    with torch.no_grad():
        mine = runner.lightning_module.eval()(features(3, 4, 6))
    return error, mine


@pytest.mark.parametrize("model", [Mlp, Switched])
def test_the_program_is_compared_with_the_model(model, tmp_path):
    (error, mine), (other, _) = run_ranks(verify, 2, tmp_path, model)
    if model is Mlp:
        assert error is None and other is None
    else:
        assert error == other and "not close" in error and "model.pt2" in error, error
    assert torch.equal(outputs(tmp_path / "model.pt2", features(3, 4, 6)), mine)


def merge(rank, world_size, folder):
    module = Lora()
    export = ModelExport(every="end")
    runner = fit(module, folder, Zero3Strategy(), world_size, [export])
    before = outputs(folder / "model.pt2", tokens(2))
    module.model.merge_adapter()
    export.prepare(runner)
    export.export(runner)
    with torch.no_grad():
        return before, module.eval()(tokens(2))


def test_merged_adapters(tmp_path):
    before, merged = run_ranks(merge, 2, tmp_path)[0]
    found = outputs(tmp_path / "model.pt2", tokens(2))
    assert torch.equal(found, merged)
    torch.testing.assert_close(found, before, rtol=1e-4, atol=1e-5)
    program = torch.export.load(tmp_path / "model.pt2")
    assert not any("lora" in str(node.args) for node in program.graph.nodes if node.op != "output")


SCRIPT = """
import sys
sys.path.insert(0, {tests!r})
from export.models import Changing, fit
from lightning_zero3.callbacks import ModelExport

class Model(Changing):
    def training_step(self, batch, batch_idx):
        raise AssertionError("it is trained")

class Broken(Model):
    def forward(self, x):
        return x if x.sum() > 0 else -x

fit({model}(), {folder!r}, callbacks=[ModelExport()])
"""


@pytest.mark.parametrize("model", ["Broken", pytest.param("Model", marks=pytest.mark.variant)])
def test_a_script_is_checked_without_training(model, tmp_path):
    tests, script = os.path.dirname(os.path.dirname(__file__)), tmp_path / "train.py"
    script.write_text(SCRIPT.format(tests=tests, model=model, folder=str(tmp_path)))
    command = [sys.executable, "-m", "lightning_zero3", "export", "--check", str(script)]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == (model == "Broken") and "it is trained" not in run.stderr, run.stderr
    said = "can be exported" if model == "Model" else "13: `return x if x.sum() > 0 else -x`"
    assert said in run.stderr, run.stderr


def test_what_the_command_cannot_do(tmp_path, capsys):
    run_with(0, 1, tmp_path, Changing, "auto", {}, {})
    run_with(0, 1, tmp_path / "tied", Tied, "auto", {}, {})
    checkpoint, out = str(tmp_path / "it.ckpt"), str(tmp_path / "out.pt2")
    for command, said in (
        (["export"], "give a checkpoint"),
        (["export", checkpoint, str(tmp_path / "out.onnx")], "model.onnx.skeleton"),
        (["export", checkpoint, out, "--skeleton", checkpoint], "is no skeleton"),
        (
            ["export", checkpoint, str(tmp_path / "out.pt"), "--skeleton"]
            + [str(tmp_path / "model.pt2.skeleton")],
            "is of a .pt2 file, and",
        ),
        (
            ["export", checkpoint, out, "--skeleton", str(tmp_path / "tied/model.pt2.skeleton")],
            "has 'embed.weight' of ([64, 12], 'float32'), and what is to be written has none",
        ),
    ):
        assert main(command) == 1
        error = capsys.readouterr().err
        assert said in error and error.count("\n") == 1, error
    assert not (tmp_path / "out.pt2").exists()


def test_files_go_where_all_ranks_see_them(tmp_path):
    with pytest.raises(ValueError, match="s3://bucket is none.\nGive"):
        fit(Tied(), tmp_path, callbacks=[ModelExport(dirpath="s3://bucket")])


def test_the_best_needs_a_checkpoint_callback(tmp_path):
    runner = trainer(default_root_dir=tmp_path, callbacks=[ModelExport()])
    with pytest.raises(ValueError, match="there is none.\nAdd one, or choose every='end'"):
        runner.fit(Tied())
    trainer(fast_dev_run=True, default_root_dir=tmp_path, callbacks=[ModelExport()]).fit(Tied())
    assert [file.name for file in tmp_path.iterdir()] == ["model.pt2.skeleton"]


def fsdp2(rank, world_size, folder):
    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    runner = trainer(strategy, 2, default_root_dir=folder, callbacks=[ModelExport(every="end")])
    with pytest.raises(RuntimeError, match="does not support deepcopy"):
        runner.fit(Fsdp())


class Fsdp(Mlp):
    def configure_model(self):
        fully_shard(self.encoder, mesh=self.device_mesh["data_parallel"])


@pytest.mark.variant
def test_a_model_that_cannot_be_copied_is_an_error_at_the_start(tmp_path):
    run_ranks(fsdp2, 2, tmp_path)
