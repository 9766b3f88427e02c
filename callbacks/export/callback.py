"""The callback that exports the model of a run."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from ...strategies.checkpoints import (
    ArchiveSave,
    CheckpointError,
    Skeleton,
    export_checkpoint,
    run_on_all_ranks,
)
from .command import CHECK
from .onnx_graph import archive_of, write_graph
from .report import explain
from .skeleton import Inputs, inputs_of, script, trace

_SUFFIXES = {"pt2": ".pt2", "torchscript": ".pt", "onnx": ".onnx"}
_REMEDY = (
    "Where the model's code takes another way than when training began, call `prepare` and `export`"
    " again; a batch of another size needs `dynamic_shapes`."
)


class ModelExport(Callback):
    """Exports the trained model as a program that needs neither its class nor this package.

    Before the first step rank 0 traces the model without weights, so that one that cannot be
    exported is an error at once, with the line of its code and what to write instead. The graph is
    written beside the checkpoints (``model.pt2.skeleton``). When training has ended, all ranks fill
    it with the weights of their shards, or rank 0 does with those of the best checkpoints; no rank
    holds more of them than one tensor. ``python -m lightning_zero3 export`` does the latter at any
    time.

    The program is the model's ``forward`` in evaluation mode, without autocast, for the CPU
    (``torch.export.passes.move_to_device_pass`` moves it).

    Args:
        format: "pt2", for `torch.export.load`; "torchscript", for `torch.jit.load`; "onnx", with
            the weights in a file beside the graph (needs the packages ``onnx`` and ``onnxscript``).
        modules: names of parts of the model to export, each for itself; by default the model.
        example_input: of the model's ``forward``: a tensor, a tuple of arguments, or a dict by
            name; by default the module's ``example_input_array``. TorchScript needs none.
        dynamic_shapes: as `torch.export.export` takes them: ``{"x": {0: "batch"}}``. A string names
            a dimension; "auto" is ``Dim.AUTO``.
        dirpath: of the files; by default the folder of the checkpoints.
        every: "best": each checkpoint that the trainer's `ModelCheckpoint` has kept as one of the
            best, when training has ended, with its name; "end": the weights at the end, as
            ``model.pt2``.
        check: a model that cannot be exported is an error at the start. With False it is a
            warning, and nothing is exported.
        average: of a checkpoint of Lightning's ``WeightAveraging`` take the averages; with False
            the weights that it averages.
        verify: run the program, too, on rank 0's last validation batch (the example input, if
            there was none), and require what the model says. For ``every="end"``.

    Raises:
        ValueError: an option has another value.
    """

    def __init__(
        self,
        format: Literal["pt2", "torchscript", "onnx"] = "pt2",
        modules: list[str] | None = None,
        example_input: Any = None,
        dynamic_shapes: Any = None,
        dirpath: str | None = None,
        every: Literal["best", "end"] = "best",
        check: bool = True,
        average: bool = True,
        verify: bool = False,
    ) -> None:
        is_offered = format in _SUFFIXES and every in ("best", "end")
        if not is_offered or verify and (every == "best" or format == "onnx"):
            options = f"format={format!r}, every={every!r}, verify={verify}"
            raise ValueError(
                f"ModelExport({options}) is not offered.\n"
                f"The formats are {', '.join(_SUFFIXES)}; every is 'best' or 'end'; verify is for"
                " every='end', and runs no ONNX."
            )
        self.format, self.parts, self.example_input = format, modules or [""], example_input
        self.dynamic_shapes, self.dirpath, self.every = dynamic_shapes, dirpath, every
        self.check, self.average, self.verify = check, average, verify
        self._skeletons: dict[str, Skeleton] = {}  # by name of the part, "" for the model
        self._inputs: dict[str, Inputs] = {}
        self._hooks: list[RemovableHandle] = []

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.prepare(trainer)
        for name in self._skeletons if self.verify else ():
            hook = partial(self._note_inputs, name)
            part = pl_module.get_submodule(name)
            self._hooks.append(part.register_forward_pre_hook(hook, with_kwargs=True))

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        while self._hooks:
            self._hooks.pop().remove()
        self.export(trainer)

    def prepare(self, trainer: Trainer) -> None:
        """Trace the model as it is now, and write its skeletons; collective.

        The callback does so when training begins. Do it again before :meth:`export` if the model's
        code takes another way since then, as when adapters were merged.

        Raises:
            CheckpointError: on all ranks, if ``check`` is set and the model cannot be exported.
        """
        self._file(trainer, "")  # its error, and this one, are for all ranks
        is_tried = getattr(trainer, "fast_dev_run", False)
        if self.every == "best" and not (_best(trainer) or is_tried):
            raise ValueError(
                "ModelExport(every='best') exports what a ModelCheckpoint has kept, and there is"
                " none.\nAdd one, or choose every='end'."
            )
        self._skeletons, is_check = {}, CHECK in os.environ
        try:
            self._skeletons = self._on_rank_zero(trainer, self._trace)
        except CheckpointError as error:
            if self.check and not is_check:
                raise
            rank_zero_warn(str(error))
        if is_check:
            if self._skeletons:
                rank_zero_info("ModelExport: the model can be exported")
            raise SystemExit(0 if self._skeletons else 1)

    def export(self, trainer: Trainer) -> None:
        """Write the programs; collective. The callback does so when training has ended.

        Raises:
            CheckpointError: on all ranks, if a file cannot be written, or ``verify`` finds other
                outputs than the model's.
        """
        if self.every == "end":
            state = dict(trainer.lightning_module.named_buffers(remove_duplicate=False))
            state |= trainer.strategy.lightning_module_state_dict()
            replica = getattr(trainer.strategy, "replica", (0, 1))  # of zero3's hybrid sharding
            for name, skeleton in self._skeletons.items():
                archive = archive_of(self._file(trainer, name))
                ArchiveSave(skeleton, state, archive, replica).write()
        self._on_rank_zero(trainer, self._finish)
        for name in self._skeletons if self.verify else ():
            self._compare(trainer, name)

    def _on_rank_zero(self, trainer: Trainer, work: Callable[[Trainer], Any]) -> Any:
        """Return what ``work`` returns on rank 0, on all ranks, or raise its error there."""
        action = f"ModelExport(format={self.format!r})"
        return run_on_all_ranks(action, lambda: trainer.is_global_zero and work(trainer))[0]

    def _trace(self, trainer: Trainer) -> dict[str, Skeleton]:
        module, skeletons = trainer.lightning_module, {}
        part: nn.Module = module
        is_script = self.format == "torchscript"
        try:
            if not is_script or self.verify:
                self._inputs = inputs_of(module, self.parts, self._example(trainer))
            for name in self.parts:
                part = module.get_submodule(name)
                if is_script:
                    skeletons[name] = script(module, name, self._file(trainer, name).parent)
                else:
                    options = self._inputs[name], self.dynamic_shapes, self.format == "onnx"
                    skeletons[name] = trace(module, name, *options)
        except Exception as error:
            raise CheckpointError(explain(error, part, is_script)) from error
        for name, skeleton in skeletons.items():
            file = self._file(trainer, name)
            skeleton.write(file.with_name(f"{file.name}.skeleton"))
        return skeletons

    def _example(self, trainer: Trainer) -> Inputs:
        """Return arguments for the model's ``forward``, by place and by name, on the CPU."""
        value = self.example_input
        if value is None:
            value = trainer.lightning_module.example_input_array
        if value is None:
            raise ValueError("there is no example input")
        value = trainer.precision_plugin.convert_input(_move(value, "cpu"))
        if isinstance(value, dict):
            return (), value
        return (tuple(value) if isinstance(value, tuple | list) else (value,)), {}

    def _finish(self, trainer: Trainer) -> None:
        """Write what rank 0 writes alone; local."""
        paths, kept = [""], _best(trainer)
        if self.every == "best":
            found = [*kept.best_k_models] or [kept.best_model_path] if kept else []
            paths = list(filter(None, found))
        for path in paths:
            for name, skeleton in self._skeletons.items():
                file = self._file(trainer, name, Path(path).stem)
                if path:
                    export_checkpoint(Path(path), skeleton, archive_of(file), self.average)
                if self.format == "onnx":
                    write_graph(file)
                rank_zero_info(f"ModelExport: {file}")

    def _note_inputs(self, name: str, part: nn.Module, args: Any, kwargs: Any) -> None:
        if not part.training:
            self._inputs[name] = args, kwargs

    def _compare(self, trainer: Trainer, name: str) -> None:
        """Run the model and the program on the same inputs; collective."""
        inputs = trainer.strategy.broadcast(_move(self._inputs.get(name), "cpu"))
        part = trainer.lightning_module.get_submodule(name)
        modes = {module: module.training for module in part.modules()}
        args, kwargs = _move(inputs, next(part.parameters()).device)
        with torch.no_grad():
            expected = part.eval()(*args, **kwargs)
        for module, mode in modes.items():
            module.training = mode

        def require(trainer: Trainer) -> None:
            file = self._file(trainer, name)
            load: Any = torch.jit.load if self.format == "torchscript" else torch.export.load
            program = load(str(file))
            with torch.no_grad():
                found = getattr(program, "module", lambda: program)()(*inputs[0], **inputs[1])
            pairs = zip(tree_leaves(found), tree_leaves(expected), strict=True)
            gaps = [abs(a.cpu() - b.cpu()).max().item() for a, b in pairs if isinstance(a, Tensor)]
            rank_zero_info(f"ModelExport: {file}: the largest difference is {max(gaps):.2g}")
            bound = 1e-3 if trainer.precision in ("32-true", "64-true") else 0.05
            torch.testing.assert_close(
                found,
                expected,
                rtol=bound,
                atol=bound,
                check_device=False,
                msg=lambda text: f"{file} is not the model: {text}\n{_REMEDY}",
            )

        self._on_rank_zero(trainer, require)

    def _file(self, trainer: Trainer, name: str, stem: str = "") -> Path:
        folder = str(self.dirpath or getattr(_best(trainer), "dirpath", trainer.default_root_dir))
        if "://" in folder:
            raise ValueError(
                f"ModelExport writes to a file system that all ranks see, and {folder} is none.\n"
                "Give `dirpath`; with remote checkpoints every='end', too."
            )
        Path(folder).mkdir(parents=True, exist_ok=True)
        stem = ".".join(filter(None, (stem, name))) or "model"
        return Path(folder) / f"{stem}{_SUFFIXES[self.format]}"


def _best(trainer: Trainer) -> ModelCheckpoint | None:
    return next((c for c in trainer.checkpoint_callbacks if isinstance(c, ModelCheckpoint)), None)


def _move(inputs: Any, device: Any) -> Any:
    return tree_map_only(Tensor, lambda tensor: tensor.detach().to(device), inputs)
