"""Archives of `torch.export` and TorchScript: a skeleton without weights, which all ranks fill."""

from __future__ import annotations

import io
import json
import os
import pickle
import zipfile
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from ..state_dicts.collective_errors import CheckpointError, without_other_ranks
from ..support.torch_internals import ArchiveWriter, archive_names
from .manifest import require_file
from .regions import Place, allocate
from .single_file import FileSave
from .stand_ins import StandIn, StandInUnpickler
from .storage import begin, commit
from .weights import open_checkpoint
from .zip_file import read_records

WEIGHTS_CONFIG = archive_names.WEIGHTS_CONFIG_FILENAME_FORMAT.format("model")
_CONSTANTS_CONFIG = archive_names.CONSTANTS_CONFIG_FILENAME_FORMAT.format("model")


class Weight(NamedTuple):
    """A tensor in an archive: its key in the model's state dict, its shape, its dtype's name."""

    key: str
    shape: list[int]
    dtype: str

    @classmethod
    def of(cls, key: str, tensor: Tensor) -> Weight:
        """Describe ``tensor``."""
        return cls(key, list(tensor.size()), str(tensor.dtype).removeprefix("torch."))


@dataclass(frozen=True)
class Skeleton:
    """All of an archive but the values of its weights.

    Attributes:
        records: name -> content. A weight's is what it has where a state dict lacks its key.
        weights: name of its record -> weight. Tied ones have one record.
        run: an id of the training run, which its checkpoints have, too.
    """

    records: dict[str, bytes]
    weights: Mapping[str, Weight]
    run: str = field(default="", compare=False)

    @classmethod
    def of_program(cls, stream: Any, tensors: Mapping[str, Tensor], prefix: str) -> Skeleton:
        """Take what ``torch.export.save`` has written.

        Args:
            stream: the file; its weights are fake tensors.
            tensors: all parameters and buffers of the module, by name.
            prefix: of these names in the state dict of the whole model.
        """
        # torch gives all fake tensors of a dtype one record, without content
        is_weight = f"{archive_names.WEIGHTS_DIR}{archive_names.WEIGHT_FILENAME_PREFIX}"
        records = _read(stream, lambda name: not name.startswith(is_weight))
        config = json.loads(records[WEIGHTS_CONFIG])
        constants = json.loads(records[_CONSTANTS_CONFIG])
        numbers: dict[int, int] = {}
        for key, entry in config["config"].items():
            number = numbers.setdefault(id(tensors[key]), len(numbers))
            entry["path_name"] = f"{archive_names.WEIGHT_FILENAME_PREFIX}{number}"
        records[WEIGHTS_CONFIG] = json.dumps(config).encode()
        # a state dict lacks some buffers, and training may change them
        pairs = [
            (key, folder + entry["path_name"])
            for folder, content in (
                (archive_names.WEIGHTS_DIR, config),
                (archive_names.CONSTANTS_DIR, constants),
            )
            for key, entry in content["config"].items()
        ]
        return cls(records, _table(pairs, tensors, prefix))

    @classmethod
    def of_script(
        cls, file: str, tensors: Mapping[str, Tensor], prefix: str, saved: Container[str]
    ) -> Skeleton:
        """Take what ``torch.jit.save`` has written, without values of the names in ``saved``.

        The other arguments are as of :meth:`of_program`.
        """
        pickled = _read(file, "data.pkl".__eq__)["data.pkl"]
        module = _Storages(io.BytesIO(pickled)).load()
        pairs = [(key, f"data/{number}") for key, number in _named(module)]
        left_out = {record for key, record in pairs if key in saved}
        left_out.add(".data/serialization_id")  # of the values; the writer makes another
        return cls(_read(file, lambda name: name not in left_out), _table(pairs, tensors, prefix))

    def write(self, path: Path) -> None:
        """Write the skeleton to a file, which appears when it is complete."""
        texts = {name: content.decode("latin1") for name, content in self.records.items()}
        stage = begin(path)
        stage.write_text(json.dumps([self.run, self.weights, texts]), encoding="utf-8")
        commit(stage, path)

    @classmethod
    def read(cls, path: Path) -> Skeleton:
        """Read what :meth:`write` has written.

        Raises:
            CheckpointError: it is something else.
        """
        try:
            run, table, texts = json.loads(require_file(path).read_text(encoding="utf-8"))
            records = {name: text.encode("latin1") for name, text in texts.items()}
            return cls(records, {name: Weight(*weight) for name, weight in table.items()}, run)
        except (AttributeError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{path} is no skeleton of `ModelExport`: {error}\nName the *.skeleton of the run."
            ) from error


def _read(file: Any, is_wanted: Callable[[str], bool]) -> dict[str, bytes]:
    with zipfile.ZipFile(file) as archive:
        named = {name.partition("/")[2]: name for name in archive.namelist()}
        return {name: archive.read(full) for name, full in named.items() if is_wanted(name)}


def _table(
    pairs: Iterable[tuple[str, str]], tensors: Mapping[str, Tensor], prefix: str
) -> dict[str, Weight]:
    """Return record -> weight of pairs of a name and its record; of tied ones the first."""
    found: dict[str, Weight] = {}
    for key, record in pairs:
        if key in tensors:
            found.setdefault(record, Weight.of(prefix + key, tensors[key]))
    return found


class _Number(str):
    """Of the record of a tensor's storage."""


def _named(module: StandIn, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the name and the record's number of each tensor."""
    for name, value in vars(module).items():
        if isinstance(value, StandIn):
            yield from _named(value, f"{prefix}{name}.")
        elif isinstance(value, _Number):
            yield prefix + name, value


class _Storages(StandInUnpickler):
    """Reads a scripted module's attributes, a number for each tensor."""

    def load_reduce(self) -> None:
        """Call a constructor, also that of an enum, whose argument TorchScript puts in no tuple."""
        arguments = self.stack.pop()
        is_tuple = isinstance(arguments, tuple)
        self.stack[-1] = self.stack[-1](*(arguments if is_tuple else (arguments,)))

    dispatch = {**StandInUnpickler.dispatch, pickle.REDUCE[0]: load_reduce}

    def find_class(self, module: str, name: str) -> Any:
        is_tensor = name == "_rebuild_tensor_v2"
        return (lambda storage, *_: storage) if is_tensor else super().find_class(module, name)

    def persistent_load(self, saved: Any) -> Any:
        return _Number(saved[2])


class ArchiveSave(FileSave):
    """Fill a skeleton.

    Args:
        skeleton: the same on all ranks.
        state: key -> tensor or slice; it may have more than the skeleton needs.
        path: of the archive.
        replica: see :class:`~.regions.ParallelSave`.
    """

    def __init__(
        self,
        skeleton: Skeleton,
        state: Mapping[str, Any],
        path: Path,
        replica: tuple[int, int] = (0, 1),
    ) -> None:
        self._skeleton = skeleton
        keys = [weight.key for weight in skeleton.weights.values()]
        super().__init__({key: state[key] for key in keys if key in state}, path, replica)

    @override
    def reserve(self, tree: Any, stage: Path) -> Iterable[tuple[Tensor, Place]]:
        records, holes = dict(self._skeleton.records), {}
        # the writer has a record of its own for it, whose name depends on the version
        version = records.pop("version", None) or records.pop(".data/version")
        for name, weight in self._skeleton.weights.items():
            value = tree.get(weight.key)
            if value is None and name in records:
                # a buffer that no state dict has, as it was when the skeleton was made
                value = torch.frombuffer(bytearray(records[name] + b"."), dtype=torch.uint8)[:-1]
            elif value is None or weight != Weight.of(weight.key, value):
                raise CheckpointError(
                    f"the exported model has {weight.key!r} of {weight[1:]}, and what is to be"
                    " written has none.\nTake the skeleton of the same run. Of checkpoints that"
                    " leave weights out nothing can be exported: choose every='end'."
                )
            holes[name] = value
        with open(stage, "x+b") as stream:
            writer = ArchiveWriter(stream)
            writer.set_min_version(int(version))
            # one order, wherever values come from: torch makes an id of the file of them
            for name, content in {**records, **holes}.items():
                if name in holes:
                    writer.write_record_metadata(name, holes[name].nbytes)
                else:
                    writer.write_record(name, content, len(content))
            writer.write_end_of_file()
            allocate(stream, stream.seek(0, os.SEEK_END))
            starts = {r.name.partition("/")[2]: r.start for r in read_records(stream)}
        return [(value, Place("", starts[name])) for name, value in holes.items()]


@without_other_ranks()
def export_checkpoint(path: Path, programs: Mapping[Path, Skeleton], average: bool = True) -> None:
    """Fill skeletons with the weights of a checkpoint; local.

    Args:
        path: of the checkpoint, a file or sharded. Of what is not tensors and plain values nothing
            is read.
        programs: archive -> skeleton, of the model that was trained. Each archive appears when it
            is complete.
        average: take what `load_from_checkpoint` would; False for the weights that Lightning's
            `WeightAveraging` averages.

    Raises:
        CheckpointError: the checkpoint is broken, or is another model's or run's.
    """
    classes: list[Any] = [(StandIn, name) for name in _unknown_classes(path)]
    with torch.serialization.safe_globals(classes):
        checkpoint = open_checkpoint(path)
    callbacks = checkpoint.get("callbacks", {})
    runs = [state.get("run") for key, state in callbacks.items() if key.startswith("ModelExport")]
    state = checkpoint.get("state_dict", checkpoint)
    if not average:
        state = checkpoint.get("current_model_state", state)
    for out, skeleton in programs.items():
        if out.exists() and out.samefile(path):
            raise CheckpointError(f"{out} is the checkpoint itself.\nGive another name.")
        if any(runs) and skeleton.run not in runs:
            raise CheckpointError(
                f"{path} is of another run than the skeleton, whose model may compute something"
                " else.\nGive each run a folder of its own, and name the skeleton of this one."
            )
        ArchiveSave(skeleton, state, out).write()


def _unknown_classes(path: Path) -> list[str]:
    """Return what a checkpoint has of classes that torch does not call harmless."""
    from .writer import TRAINER_STATE

    file = path / TRAINER_STATE if path.is_dir() else path
    try:
        return torch.serialization.get_unsafe_globals_in_checkpoint(file)
    except Exception:  # who opens it will say what is wrong
        return []
