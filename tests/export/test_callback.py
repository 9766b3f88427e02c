"""ModelExport under every strategy, with its options, and the command, against the eager model."""

import argparse
import os
import pickle
import subprocess
import sys
import warnings

import pytest
import torch
import torch.distributed as dist
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


@pytest.mark.parametrize(
    "strategy, devices",
    [pytest.param("auto", 1, marks=pytest.mark.variant), ("ddp", 2), ("zero3", 2)],
)
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


class Masked(Mlp):
    """With a buffer of a megabyte, which no state dict has."""

    def build(self):
        super().build()
        self.register_buffer("mask", torch.ones(2**18), persistent=False)

    def forward(self, x):
        return super().forward(x) * self.mask[0]


def run_weighed(rank, world_size, folder):
    """Return the buffers, and the bytes of the largest object that this rank sent."""
    sizes, gather = [], dist.all_gather_object

    def weigh(found, value, *args, **kwargs):
        sizes.append(len(pickle.dumps(value)))
        return gather(found, value, *args, **kwargs)

    dist.all_gather_object = weigh
    try:
        return run_with(rank, world_size, folder, Masked, {}, {}, {"every": "end"}), max(sizes)
    finally:
        dist.all_gather_object = gather


def test_buffers_that_no_checkpoint_has_are_those_of_the_end(tmp_path):
    """They are not sent to the other ranks."""
    (buffers, size), _ = run_ranks(run_weighed, 2, tmp_path)
    x, scale = features(3, 4, 6), buffers["scale"]
    assert scale.min() > 1 and size < 100_000
    assert torch.equal(
        outputs(tmp_path / "model.pt2", x), eager(Masked, tmp_path / "it.ckpt", x, scale=scale)
    )


def test_a_checkpoint_is_read_once_for_all_parts(tmp_path, monkeypatch):
    opened, load = [], torch.load
    monkeypatch.setattr(torch, "load", lambda *a, **k: opened.append(a) or load(*a, **k))
    module = Mlp()
    fit(module, tmp_path, callbacks=[ModelExport(modules=["encoder", "heads.a", "heads.b"])])
    assert len(opened) == 1
    x = features(3, 4, 8)
    with torch.no_grad():
        for name in ("a", "b"):
            assert torch.equal(outputs(tmp_path / f"it.heads.{name}.pt2", x), module.heads[name](x))


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


class Small(Model):
    """A layer, whose output is divided by a plain number that changes in training."""

    def build(self):
        self.layer, self.rate = nn.Linear(6, 6), 1.0
        self.example_input_array = features(1, 4, 6)

    def forward(self, x):
        return self.layer(x) / self.rate

    def validation_step(self, batch, batch_idx):
        self.log("loss", self(batch[0]).mean())

    def val_dataloader(self):
        return DataLoader(TensorDataset(features(2, 4, 6)), batch_size=4)


class Changed(Small):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.rate /= 2


def test_best_checkpoints_have_the_graph_of_the_start_with_a_warning(tmp_path):
    with pytest.warns(UserWarning, match="programs have that of the start.\n.*every='end'"):
        fit(Changed(), tmp_path, callbacks=[ModelExport()])
    x = features(3, 4, 6)
    assert torch.equal(outputs(tmp_path / "it.pt2", x), eager(Small, tmp_path / "it.ckpt", x))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="ModelExport")
        fit(Small(), tmp_path / "same", callbacks=[ModelExport()])


def test_a_model_that_cannot_be_traced_at_the_end_has_the_program_of_the_start(tmp_path):
    class Held(Small):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            self.batches = (x for x in batch)  # cannot be copied

    with pytest.warns(UserWarning, match="is that of the start"):
        fit(Held(), tmp_path, callbacks=[ModelExport(every="end")])
    x = features(3, 4, 6)
    assert torch.equal(outputs(tmp_path / "model.pt2", x), eager(Small, tmp_path / "it.ckpt", x))


class Tanh(Small):
    def forward(self, x):
        return self.layer(x).tanh()


def test_two_runs_in_a_folder_and_one_that_is_resumed(tmp_path, capsys):
    fit(Tanh(), tmp_path, callbacks=[ModelExport(), ModelExport(dirpath=str(tmp_path / "b"))])
    fit(Small(), tmp_path, callbacks=[ModelExport()])
    out, checkpoint = tmp_path / "out.pt2", tmp_path / "it-v1.ckpt"
    assert main(["export", str(tmp_path / "it.ckpt"), str(out)]) == 1
    assert "another run" in capsys.readouterr().err and not out.exists()
    more = trainer(
        max_epochs=2,
        enable_checkpointing=True,
        callbacks=[ModelCheckpoint(tmp_path, "more"), ModelExport()],
    )
    more.fit(Small(), ckpt_path=checkpoint)
    for path in (checkpoint, tmp_path / "more.ckpt"):
        assert main(["export", str(path), str(out)]) == 0
        x = features(3, 4, 6)
        assert torch.equal(outputs(out, x), eager(Small, path, x))


def test_each_checkpoint_callback_that_has_a_monitor(tmp_path):
    """Programs lie beside the checkpoints, whose hyperparameters may be anything."""

    class Told(Small):
        def __init__(self, folder=tmp_path, options=argparse.Namespace(rate=1)):  # noqa: B008
            super().__init__()
            self.save_hyperparameters()

    keep = [ModelCheckpoint(tmp_path / "regular", "all", every_n_train_steps=1)]
    for mode in ("min", "max"):
        keep.append(ModelCheckpoint(tmp_path / mode, "{step}", monitor="loss", mode=mode))
    options = {"max_epochs": 3, "limit_val_batches": 1, "enable_checkpointing": True}
    trainer(callbacks=[ModelExport(), *keep], **options).fit(Told())
    found = sorted(tmp_path.rglob("*.pt2"))
    assert [file.parent.name for file in found] == ["max", "min"]
    x = features(3, 4, 6)
    for file in found:
        module = Small()
        state = torch.load(file.with_suffix(".ckpt"), weights_only=False)["state_dict"]
        module.load_state_dict(state)
        with torch.no_grad():
            assert torch.equal(outputs(file, x), module.eval()(x))


def test_no_checkpoint_was_kept(tmp_path):
    keep = ModelCheckpoint(tmp_path, every_n_train_steps=1000)
    runner = trainer(callbacks=[ModelExport(), keep], enable_checkpointing=True)
    with pytest.warns(UserWarning, match="nothing is exported"):
        runner.fit(Small())


class Several(Small):
    """Returns what is not floating, too; a part has no parameters, another says nothing."""

    def build(self):
        super().build()
        self.silent = Silent()
        self.register_buffer("empty", torch.empty(0, 6), persistent=False)

    def forward(self, x):
        self.silent(x)
        y = torch.cat([self.layer(x), self.empty])
        return y, y > 0

    def loss(self, x):
        return self(x)[0].square().mean()

    def validation_step(self, batch, batch_idx):
        self(batch[0])


class Branched(Small):
    """Goes a way that cannot be traced after its part, which can."""

    def forward(self, x):
        y = self.layer(x)
        return y if y.sum() > 0 else -y


def test_a_part_before_what_cannot_be_exported(tmp_path):
    module = Branched()
    fit(module, tmp_path, callbacks=[ModelExport(every="end", modules=["layer"])])
    x = features(3, 4, 6)
    with torch.no_grad():
        assert torch.equal(outputs(tmp_path / "layer.pt2", x), module.layer(x))


class Silent(nn.Module):
    def forward(self, x):
        return None


def test_outputs_of_any_kind_are_compared(tmp_path):
    x = features(3, 4, 6)
    for options in ({}, {"verify": True}, {"verify": True, "modules": ["silent"]}):
        every = "end" if options else "best"
        fit(
            Several(), tmp_path / str(len(options)), callbacks=[ModelExport(every=every, **options)]
        )
    for file in (tmp_path / "0" / "it.pt2", tmp_path / "1" / "model.pt2"):
        expected = eager(Several, file.parent / "it.ckpt", x)
        assert all(torch.equal(a, b) for a, b in zip(outputs(file, x), expected, strict=True))


class Uneven(Several):
    def val_dataloader(self):
        return DataLoader(TensorDataset(features(2, 5, 6)), batch_size=4)


class Stopped(Several):
    def training_step(self, batch, batch_idx):
        raise ValueError("stop")


def test_verify_with_a_batch_of_another_size_and_after_a_failure(tmp_path):
    with pytest.raises(RuntimeError, match="does not run on the batch.*\n.*`dynamic_shapes`"):
        export = ModelExport(every="end", verify=True)
        fit(Uneven(), tmp_path, callbacks=[export], limit_val_batches=2)
    module = Stopped()
    with pytest.raises(ValueError, match="stop"):
        fit(module, tmp_path, callbacks=[ModelExport(every="end", verify=True)])
    assert not module._forward_pre_hooks


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


@pytest.mark.parametrize(
    "format", ["pt2", "torchscript", pytest.param("onnx", marks=pytest.mark.variant)]
)
def test_a_run_is_the_same_with_it(format, tmp_path):
    states = []
    for callbacks in ([], [ModelExport(format, modules=["encoder"], every="end")]):
        folder = tmp_path / str(len(callbacks))
        fit(Noisy(), folder, callbacks=callbacks)
        states.append(torch.load(folder / "it.ckpt", weights_only=True)["state_dict"])
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(value, states[1][key]) for key, value in states[0].items())


class Switched(Mlp):
    """Goes another way after the first step than before, with other numbers."""

    def build(self):
        super().build()
        self.rate, self.mean = 1.0, torch.zeros(6)

    def forward(self, x):
        if self.training:
            self.mean.lerp_(x.detach().mean(0), 0.5)
        return super().forward(x - self.mean) * self.rate

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.doubled, self.rate = True, self.rate / 2


class Traced(Mlp):
    """Its program computes something else, by little."""

    def forward(self, x):
        y = super().forward(x).softmax(1)
        return y + 0.003 if torch.compiler.is_exporting() else y


def verify(rank, world_size, folder):
    """Return what each model's fit raises, and what it says in the end."""
    found = []
    for model in (Mlp, Switched, Traced):
        export = ModelExport(every="end", verify=True, dynamic_shapes={"x": {0: "batch"}})
        options = {"callbacks": [export], "limit_val_batches": 2, "enable_checkpointing": False}
        runner = trainer(
            Zero3Strategy(), world_size, default_root_dir=folder / model.__name__, **options
        )
        module, error = model(), None
        if model is Traced and not rank:
            (folder / "Traced").mkdir()
            (folder / "Traced" / "model.pt2").write_text("of an earlier run")
        try:
            runner.fit(module)
        except RuntimeError as raised:
            error = str(raised)
            module = None
        with torch.no_grad():
            found.append((error, module and module.eval()(features(3, 4, 6))))
    return found


def test_the_program_is_compared_with_the_model(tmp_path):
    first, second = run_ranks(verify, 2, tmp_path)
    for name, (error, mine) in zip(("Mlp", "Switched"), first, strict=False):
        assert error is None
        assert torch.equal(outputs(tmp_path / name / "model.pt2", features(3, 4, 6)), mine)
        assert sorted(file.name for file in (tmp_path / name).iterdir()) == [
            "model.pt2",
            "model.pt2.skeleton",
        ]
    error, other = first[-1][0], second[-1][0]
    assert error == other and "not the model" in error and "0.003" in error, error
    folder = tmp_path / "Traced"
    assert (folder / "model.pt2").read_text() == "of an earlier run"
    assert (folder / "unverified-model.pt2").exists() and "\nRename" in error


def merge(rank, world_size, folder):
    module = Lora()
    export = ModelExport(every="end")
    runner = fit(module, folder, Zero3Strategy(), world_size, [export])
    before = outputs(folder / "model.pt2", tokens(2))
    module.model.merge_adapter()
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

if __name__ == "__main__":
    fit({model}(), {folder!r}, {strategy!r}, {devices}, callbacks=[{callback}])
"""


@pytest.mark.parametrize(
    "model, strategy, callback, code, said",
    [
        ("Broken", "auto", "ModelExport()", 1, "13: `return x if x.sum() > 0 else -x`"),
        pytest.param(
            *("Model", "zero3_spawn", "ModelExport()", 0, "can be exported"),
            marks=pytest.mark.variant,
        ),
        pytest.param(
            *("Model", "ddp_spawn", "ModelExport()", 0, "can be exported"),
            marks=pytest.mark.variant,
        ),
        pytest.param(
            *("Model", "auto", "", 1, "has checked no model"),
            marks=pytest.mark.variant,
        ),
    ],
)
def test_a_script_is_checked_without_training(model, strategy, callback, code, said, tmp_path):
    tests, script = os.path.dirname(os.path.dirname(__file__)), tmp_path / "train.py"
    devices, folder = 1 if strategy == "auto" else 2, str(tmp_path)
    text = SCRIPT.format(
        **{"tests": tests, "model": model, "folder": folder, "strategy": strategy},
        **{"devices": devices, "callback": callback},
    )
    script.write_text(text)
    command = [sys.executable, "-m", "lightning_zero3", "export", "--check", str(script)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert run.returncode == code and said in run.stdout + run.stderr, run.stderr
    assert ("it is trained" in run.stderr) == (not callback), run.stderr


def test_what_the_command_cannot_do(tmp_path, capsys):
    run_with(0, 1, tmp_path, Changing, "auto", {}, {})
    run_with(0, 1, tmp_path / "tied", Tied, "auto", {}, {})
    checkpoint, out = str(tmp_path / "it.ckpt"), str(tmp_path / "out.pt2")
    (tmp_path / "folder.pt2").mkdir()
    (tmp_path / "folder.pt2" / "file").touch()
    content = torch.load(checkpoint, weights_only=True)
    torch.save({"state_dict": {}}, tmp_path / "empty.ckpt")
    torch.save(content, tmp_path / "copy.pt2")
    kept = {name: (tmp_path / name).read_bytes() for name in ("it.pt2", "copy.pt2")}
    for command, said in (
        (["export"], "Give a checkpoint"),
        (["export", checkpoint, str(tmp_path / "out.onnx")], "model.onnx.skeleton"),
        (["export", checkpoint, out, "--skeleton", checkpoint], "is no skeleton"),
        (
            ["export", checkpoint, str(tmp_path / "out.pt"), "--skeleton"]
            + [str(tmp_path / "model.pt2.skeleton")],
            "is of a .pt2 file, and",
        ),
        (
            ["export", checkpoint, out, "--skeleton", str(tmp_path / "tied/model.pt2.skeleton")],
            "is of another run",
        ),
        (["export", checkpoint, str(tmp_path / "folder.pt2")], "is a folder"),
        (["export", str(tmp_path / "empty.ckpt"), str(tmp_path / "it.pt2")], "has none.\nTake"),
        (["export", str(tmp_path / "copy.pt2"), str(tmp_path / "copy.pt2")], "checkpoint itself"),
    ):
        assert main(command) == 1
        error = capsys.readouterr().err
        assert said in error and error.count("\n") == 2, error
    assert not (tmp_path / "out.pt2").exists() and (tmp_path / "folder.pt2" / "file").exists()
    assert all((tmp_path / name).read_bytes() == before for name, before in kept.items())


class Code:
    """Writes a file when it is unpickled."""

    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return exec, (f"open({str(self.file)!r}, 'w')",)


def test_code_in_a_checkpoint_is_not_run(tmp_path):
    fit(Small(), tmp_path, callbacks=[ModelExport()])
    content, ran = torch.load(tmp_path / "it.ckpt", weights_only=True), tmp_path / "ran"
    torch.save({**content, "hyper_parameters": {"x": Code(ran)}}, tmp_path / "other.ckpt")
    assert main(["export", str(tmp_path / "other.ckpt"), str(tmp_path / "out.pt2")]) == 0
    assert not ran.exists()
    assert (tmp_path / "out.pt2").read_bytes() == (tmp_path / "it.pt2").read_bytes()
    torch.load(tmp_path / "other.ckpt", weights_only=False)
    assert ran.exists()  # it would have


def test_files_go_where_all_ranks_see_them(tmp_path):
    with pytest.raises(ValueError, match="s3://bucket is none.\nGive"):
        fit(Tied(), tmp_path, callbacks=[ModelExport(dirpath="s3://bucket")])
    with pytest.raises(ValueError, match="memory://bucket is none.\nGive"):
        fit(Tied(), "memory://bucket", callbacks=[ModelExport(dirpath=str(tmp_path))])


def test_weights_that_are_not_saved_are_an_error_at_the_start(tmp_path):
    class Frozen(Tied):
        def state_dict(self, *args, **kwargs):
            state = super().state_dict(*args, **kwargs)
            return {key: value for key, value in state.items() if "embed" not in key}

    strategy = Zero3Strategy(checkpoint=CheckpointOptions(exclude_frozen=True))
    for model, options, said in (
        (Frozen, {}, "lacks 'embed.weight'.*\n.*modules"),
        (Tied, {"strategy": strategy}, "exclude_frozen.*\n.*every='end'"),
    ):
        with pytest.raises((RuntimeError, ValueError), match=said):
            fit(model(), tmp_path, callbacks=[ModelExport()], **options)
    assert list(tmp_path.iterdir()) == []


def test_the_best_needs_a_checkpoint_callback(tmp_path):
    runner = trainer(default_root_dir=tmp_path, callbacks=[ModelExport()])
    with pytest.raises(ValueError, match="there is none.\nAdd one, or choose every='end'"):
        runner.fit(Tied())
    for every in ("best", "end"):  # is checked, and nothing of a long run is replaced
        export = [ModelExport(every=every)]
        trainer(fast_dev_run=True, default_root_dir=tmp_path, callbacks=export).fit(Tied())
    assert [file.name for file in tmp_path.iterdir()] == []


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
