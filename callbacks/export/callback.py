"""The callback that exports the model of a run."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

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
    commit,
    export_checkpoint,
    run_on_all_ranks,
)
from .command import CHECK
from .onnx_graph import archive_of, write_graph
from .report import explain
from .skeleton import Inputs, inputs_of, script, trace

_SUFFIXES = {"pt2": ".pt2", "torchscript": ".pt", "onnx": ".onnx"}


class ModelExport(Callback):
    """Exports the trained model as a program that needs neither its class nor this package.

    Before the first step rank 0 traces the model without weights, so that one that cannot be
    exported is an error at once, with the line of its code and what to write instead. The graph is
    written beside the checkpoints (``model.pt2.skeleton``). When training has ended, all ranks fill
    one with the weights of their shards, or rank 0 does with those of the best checkpoints; no rank
    holds more of them than one tensor. ``python -m lightning_zero3 export`` does the latter at any
    time.

    The program is the model's ``forward`` in evaluation mode, without autocast, for the CPU
    (``torch.export.passes.move_to_device_pass`` moves it). What ``forward`` reads beside weights,
    buffers and its arguments is a constant in it: for ``every="end"`` as at the end, for "best" as
    at the start, with a warning where it has changed.

    Args:
        format: "pt2", for `torch.export.load`; "torchscript", for `torch.jit.load`; "onnx", with
            the weights in a file beside the graph (needs the packages ``onnx`` and ``onnxscript``).
        modules: names of parts of the model to export, each for itself; by default the model.
        example_input: of the model's ``forward``: a tensor, a tuple of arguments, or a dict by
            name; by default the module's ``example_input_array``. TorchScript needs none.
        dynamic_shapes: as `torch.export.export` takes them: ``{"x": {0: "batch"}}``. A string names
            a dimension; "auto" is ``Dim.AUTO``.
        dirpath: of the files; by default the folder of the checkpoints.
        every: "best": each checkpoint that a `ModelCheckpoint` with a monitor, or else the first
            one, has kept, when training has ended, with its name, by default beside it; "end": the
            weights at the end, as ``model.pt2``.
        check: a model that cannot be exported is an error at the start. With False it is a
            warning, and nothing is exported.
        average: of a checkpoint of Lightning's ``WeightAveraging`` take the averages; with False
            the weights that it averages, for ``every="best"``.
        verify: run the program, too, on rank 0's last validation batch (the example input, if
            there was none; for a part zeros), and require what the model says, by the tolerances of
            `torch.testing.assert_close`. Rank 0 holds all of it. For ``every="end"``.

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
        is_offered &= not verify or (every == "end" and format != "onnx")
        if not is_offered or (every == "end" and not average):
            options = f"format={format!r}, every={every!r}, verify={verify}, average={average}"
            raise ValueError(
                f"ModelExport({options}) is not offered.\n"
                f"The formats are {', '.join(_SUFFIXES)}; every is 'best' or 'end'; verify is for"
                " every='end', and runs no ONNX; average=False is for every='best'."
            )
        self.format, self.parts, self.example_input = format, modules or [""], example_input
        self.dynamic_shapes, self.dirpath, self.every = dynamic_shapes, dirpath, every
        self.check, self.average, self.verify = check, average, verify
        self._run = ""  # an id, the same after resuming
        self._is_traced = False
        self._inputs: dict[str, Inputs] = {}  # by name of the part, "" for the model
        self._hooks: list[RemovableHandle] = []

    @property
    @override
    def state_key(self) -> str:
        names = ("format", "parts", "every", "dirpath")
        return self._generate_state_key(**{name: getattr(self, name) for name in names})

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"run": self._run}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._run = state_dict["run"]

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.prepare(trainer)
        for name in self.parts if self.verify and self._is_traced else ():
            hook = partial(self._note_inputs, name)
            part = pl_module.get_submodule(name)
            self._hooks.append(part.register_forward_pre_hook(hook, with_kwargs=True))

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._remove_hooks()
        self.export(trainer)

    @override
    def on_exception(self, trainer: Trainer, pl_module: Any, exception: BaseException) -> None:
        self._remove_hooks()

    def _remove_hooks(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()

    def prepare(self, trainer: Trainer) -> None:
        """Trace the model as it is now, and write its skeletons; collective.

        The callback does so when training begins.

        Raises:
            CheckpointError: on all ranks, if ``check`` is set and the model cannot be exported.
            ValueError: on all ranks, if there will be nothing to export.
        """
        self._require_checkpoints(trainer)
        self._run = self._run or trainer.strategy.broadcast(uuid4().hex)

        def write(trainer: Trainer) -> None:
            for name, skeleton in self._trace(trainer).items():
                if not _is_tried(trainer):
                    replace(skeleton, run=self._run).write(self._skeleton(trainer, name))

        message = ""
        try:
            self._on_rank_zero(trainer, write)
        except CheckpointError as error:
            message = str(error)
            if self.check and CHECK not in os.environ:
                raise
            rank_zero_warn(message)
        if CHECK in os.environ:
            if trainer.is_global_zero:
                Path(os.environ[CHECK]).write_text(message)
            raise CheckpointError("The script was run to check its model, which is done.")
        self._is_traced = not message and not _is_tried(trainer)

    def export(self, trainer: Trainer) -> None:
        """Write the programs; collective. The callback does so when training has ended.

        Raises:
            CheckpointError: on all ranks, if a file cannot be written, or ``verify`` finds other
                outputs than the model's. The program is then left beside, as ``unverified-*``.
        """
        if not self._is_traced:
            return
        if self.every == "best":
            return self._on_rank_zero(trainer, self._export_best)
        programs: dict[str, Skeleton] = {}

        def trace(trainer: Trainer) -> dict[str, Any]:
            programs.update(self._trace_again(trainer))
            return {name: program.weights for name, program in programs.items()}

        state = dict(trainer.lightning_module.named_buffers(remove_duplicate=False))
        state |= trainer.strategy.lightning_module_state_dict()
        replica = getattr(trainer.strategy, "replica", (0, 1))  # of zero3's hybrid sharding
        for name, weights in self._on_rank_zero(trainer, trace).items():
            file = self._file(trainer, name)
            stage = file.with_name(f"unverified-{file.name}") if self.verify else archive_of(file)
            program = programs.get(name, Skeleton({}, weights))
            ArchiveSave(program, state, stage, replica).write()
            if self.verify:
                self._compare(trainer, name, stage)
            self._on_rank_zero(trainer, partial(self._finish, stage, file))

    def _finish(self, archive: Path, file: Path, trainer: Trainer) -> None:
        if self.verify:
            commit(archive, file)
        if self.format == "onnx":
            write_graph(file)
        rank_zero_info(f"ModelExport: {file}")

    def _on_rank_zero(self, trainer: Trainer, work: Callable[[Trainer], Any]) -> Any:
        """Return what ``work`` returns on rank 0, on all ranks, or raise its error there."""
        action = f"ModelExport(format={self.format!r})"
        return run_on_all_ranks(action, lambda: trainer.is_global_zero and work(trainer))[0]

    def _trace(self, trainer: Trainer) -> dict[str, Skeleton]:
        """Return the skeleton of each part."""
        module, skeletons = trainer.lightning_module, {}
        part: nn.Module = module
        is_script, inputs = self.format == "torchscript", {}
        try:
            if not is_script or self.verify:
                inputs = inputs_of(module, self.parts, self._example(trainer))
            for name in self.parts:
                part = module.get_submodule(name)
                if is_script:
                    skeletons[name] = script(module, name, self._file(trainer, name).parent)
                else:
                    options = inputs[name], self.dynamic_shapes, self.format == "onnx"
                    skeletons[name] = trace(module, name, *options)
        except Exception as error:
            raise CheckpointError(explain(error, part, is_script)) from error
        self._inputs = inputs | self._inputs
        return skeletons

    def _trace_again(self, trainer: Trainer) -> dict[str, Skeleton]:
        """Return skeletons of the model as it is now, or as it was for ``every="best"``."""
        now = None
        try:
            now = self._trace(trainer)
        except CheckpointError as error:
            rank_zero_warn(f"ModelExport: the program is that of the start: {error}")
        if now and self.every == "end":
            return now
        start = {name: Skeleton.read(self._skeleton(trainer, name)) for name in self.parts}
        if now and now != start:
            rank_zero_warn(
                "ModelExport: what `forward` does or reads beside weights and its arguments has"
                " changed in training, and the programs have that of the start.\nMake it a buffer"
                " that is saved, or choose every='end'."
            )
        return start

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

    def _export_best(self, trainer: Trainer) -> None:
        """Write programs of the checkpoints that were kept; local."""
        paths: list[str] = []
        for kept in _checkpoints(trainer):
            paths += [*kept.best_k_models] or filter(None, [kept.best_model_path])
        if not paths:
            rank_zero_warn("ModelExport: no checkpoint was kept, so nothing is exported.")
            return
        programs = self._trace_again(trainer)
        for path in map(Path, dict.fromkeys(paths)):
            files = {self._file(trainer, name, path): program for name, program in programs.items()}
            archives = {archive_of(file): program for file, program in files.items()}
            export_checkpoint(path, archives, self.average)
            for file in files:
                self._finish(file, file, trainer)

    def _note_inputs(self, name: str, part: nn.Module, args: Any, kwargs: Any) -> None:
        if not part.training:
            self._inputs[name] = args, kwargs

    def _compare(self, trainer: Trainer, name: str, file: Path) -> None:
        """Require that the model and the program of a file say the same; collective."""
        inputs = trainer.strategy.broadcast(_move(self._inputs.get(name), "cpu"))
        device = trainer.strategy.root_device
        args, kwargs = _move(inputs, device)
        part = trainer.lightning_module.get_submodule(name)
        modes = {module: module.training for module in part.modules()}
        try:
            with torch.no_grad():
                expected = part.eval()(*args, **kwargs)
        finally:
            for module, mode in modes.items():
                module.training = mode

        def require(trainer: Trainer) -> None:
            try:
                with torch.no_grad():
                    found = self._load(file, device)(*args, **kwargs)
            except Exception as error:
                raise CheckpointError(
                    f"{file} does not run on the batch that the model ran on: {error}\nA batch of"
                    " another size than the example's needs `dynamic_shapes`."
                ) from error
            pairs = [
                [x for x in tree_leaves(y) if isinstance(x, Tensor)] for y in (found, expected)
            ]
            gaps = [
                (a.double() - b.double()).abs().max().item()
                for a, b in zip(*pairs, strict=True)
                if a.is_floating_point() and a.numel()
            ]
            difference = f"the largest difference is {max(gaps, default=0):.2g}"
            rank_zero_info(f"ModelExport: {file}: {difference}")
            torch.testing.assert_close(
                *pairs,
                equal_nan=True,
                msg=lambda text: (
                    f"{file} is not the model, {difference}: {' '.join(text.split())}\nRename the"
                    " file if you can use it, or look for what `forward` does only while traced."
                ),
            )

        self._on_rank_zero(trainer, require)

    def _load(self, file: Path, device: torch.device) -> Callable[..., Any]:
        """Return the program of a file, on a device, so that it runs the same kernels."""
        if self.format == "torchscript":
            return torch.jit.load(str(file), map_location=device)
        from torch.export.passes import move_to_device_pass

        return move_to_device_pass(torch.export.load(file), device).module()

    def _require_checkpoints(self, trainer: Trainer) -> None:
        """Raise a ValueError if there is no folder, or there will be no checkpoints to export."""
        kept, folders = _checkpoints(trainer), [self._folder(trainer)]
        if self.every == "best":
            if not (kept or _is_tried(trainer)):
                raise ValueError(
                    "ModelExport(every='best') exports what a ModelCheckpoint has kept, and there"
                    " is none.\nAdd one, or choose every='end'."
                )
            if getattr(trainer.strategy, "leaves_weights_out", False):
                raise ValueError(
                    "ModelExport(every='best') exports checkpoints, and exclude_frozen leaves"
                    " weights out of them.\nChoose every='end'."
                )
            folders += [str(checkpoint.dirpath) for checkpoint in kept]
        for folder in folders:
            if "://" in folder:
                raise ValueError(
                    f"ModelExport works in a file system that all ranks see, and {folder} is none."
                    "\nGive `dirpath`; with remote checkpoints every='end', too."
                )

    def _folder(self, trainer: Trainer) -> str:
        first = next(iter(_checkpoints(trainer)), None)
        return str(self.dirpath or getattr(first, "dirpath", trainer.default_root_dir))

    def _skeleton(self, trainer: Trainer, name: str) -> Path:
        file = self._file(trainer, name)
        return file.with_name(f"{file.name}.skeleton")

    def _file(self, trainer: Trainer, name: str, checkpoint: Path | None = None) -> Path:
        """Return the file for a part, of the model or of a checkpoint."""
        folder = Path(self._folder(trainer))
        if checkpoint and not self.dirpath:
            folder = checkpoint.parent
        stem = ".".join(filter(None, (checkpoint.stem if checkpoint else "", name))) or "model"
        return folder / f"{stem}{_SUFFIXES[self.format]}"


def _checkpoints(trainer: Trainer) -> list[ModelCheckpoint]:
    """Return the callbacks whose checkpoints are exported."""
    found = [c for c in trainer.checkpoint_callbacks if isinstance(c, ModelCheckpoint)]
    return [c for c in found if c.monitor] or found[:1]


def _is_tried(trainer: Trainer) -> bool:
    return bool(getattr(trainer, "fast_dev_run", False))


def _move(inputs: Any, device: Any) -> Any:
    return tree_map_only(Tensor, lambda tensor: tensor.detach().to(device), inputs)
