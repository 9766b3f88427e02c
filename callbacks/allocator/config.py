"""`AllocatorConfig`: sets the CUDA allocator's options in time, proves them, and puts them back."""

import os
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.fabric.utilities.rank_zero import WarningCache
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from typing_extensions import override

from .advice import RunFigures, Suggestion, suggest
from .early import torch_version
from .environment import NAMES, POLICIES, EnvironmentChange, Policy, find_text, merge
from .grammar import OPTIONS, AllocatorOptionError, Value, check, parse, to_text
from .pluggable import PluggableAllocator
from .readback import Allocator, CUDAAllocator, Proof, compare_ranks, prove, undo_text
from .rules import Surroundings, check_conflicts, find_remarks

_EARLY = "python -m lightning_zero3.callbacks.allocator_early {text} -- script.py"


class AllocatorConfig(Callback):
    """Sets the options of torch's CUDA allocator and proves on every rank that they are in effect.

    Create it before anything touches the GPU: the constructor puts the options into the
    environment, where this process and every process that a launcher starts will read them. Where
    CUDA runs already, the callback hands them to the running allocator instead, which obeys all but
    `backend`. At the start of the run it reads the allocator's own settings and compares them with
    the options, and between ranks; a difference is an error. Without CUDA it checks the options and
    does nothing else.

    Sizes are in MB as torch understands them (2**20 bytes). The callback does not touch an option
    that is None.

    Args:
        backend: "native" or "cudaMallocAsync" (the driver's pool). Fixed when torch is imported:
            see `lightning_zero3.callbacks.allocator_early` for setting it in time.
        large_segment_size_mb: size of the segments that large blocks share, above 10. torch: 20.
        max_split_size_mb: blocks above this size are never split; at least `large_segment_size_mb`.
        max_non_split_rounding_mb: how much larger than the request an unsplit block may be.
        roundup_power2_divisions: round sizes up to one of so many steps between two powers of two;
            one number, or a division for each size in MB, such as {"256": 1, "512": 2, ">": 4}, or
            the same as text, "[256:1,512:2,>:4]".
        garbage_collection_threshold: between 0 and 1, both excluded: free unused blocks above this
            share of the allowed memory; needs `per_process_memory_fraction`.
        expandable_segments: segments that grow; the first remedy against fragmentation.
        per_process_memory_fraction: share of the device this process may use, 0 to 1.
        throw_on_cudamalloc_oom: (torch 2.12) fail at the fraction without asking the driver.
        graph_capture_record_stream_reuse: reuse recorded blocks while a CUDA graph is captured.
        release_lock_on_cudamalloc: let other threads allocate during cudaMalloc.
        pinned_use_cuda_host_register: pin host memory with cudaHostRegister.
        pinned_num_register_threads: power of two up to 128; needs `pinned_use_cuda_host_register`.
        pinned_use_background_threads: query the events of pinned blocks on a thread of their own.
        pinned_reserve_segment_size_mb: pinned memory to reserve at the first pinned allocation.
        pinned_max_round_threshold_mb: (torch 2.13) larger pinned blocks are not rounded up to a
            power of two.
        pinned_max_cached_size_mb: (torch 2.13) larger pinned blocks are given back at once.
        pinned_free_catch_all: (torch 2.12) take back pinned blocks whose owner is unknown.
        pluggable: an allocator from a shared library instead of torch's.
        environment: what to do with options that the environment has already: "merge" keeps those
            without an argument and overrides the others, "respect" lets the environment win,
            "replace" drops them all, "refuse" raises where an argument has another value.
        restore: put the environment and the running allocator back at teardown. In the process that
            starts a "spawn" launcher no hook runs at the end; call `restore_now()` there.

    Attributes:
        options: the options in effect: the arguments joined with those of the environment.
        decisions: one sentence for each option of both, which of the two won.
        proof: the comparison with the allocator's own settings; None without CUDA.
    """

    options: dict[str, Value]
    decisions: list[str]
    proof: Proof | None = None
    _allocator: Allocator | None = None  # the running allocator, which has our options
    _previous_text = ""  # options in the environment before ours
    _previous_fraction: float | None = None
    _is_in_place = False  # the environment has our options
    _is_late = False  # CUDA ran before the environment had our options

    def __init__(
        self,
        *,
        backend: Literal["native", "cudaMallocAsync"] | None = None,
        large_segment_size_mb: int | None = None,
        max_split_size_mb: int | None = None,
        max_non_split_rounding_mb: int | None = None,
        roundup_power2_divisions: int | str | dict[str, int] | None = None,
        garbage_collection_threshold: float | None = None,
        expandable_segments: bool | None = None,
        per_process_memory_fraction: float | None = None,
        throw_on_cudamalloc_oom: bool | None = None,
        graph_capture_record_stream_reuse: bool | None = None,
        release_lock_on_cudamalloc: bool | None = None,
        pinned_use_cuda_host_register: bool | None = None,
        pinned_num_register_threads: int | None = None,
        pinned_use_background_threads: bool | None = None,
        pinned_reserve_segment_size_mb: int | None = None,
        pinned_max_round_threshold_mb: int | None = None,
        pinned_max_cached_size_mb: int | None = None,
        pinned_free_catch_all: bool | None = None,
        pluggable: PluggableAllocator | None = None,
        environment: Policy = "merge",
        restore: bool = True,
    ) -> None:
        given = locals()  # read before any other local exists
        if environment not in POLICIES:
            raise ValueError(
                f"environment: expected one of {', '.join(POLICIES)}, got {environment!r}"
            )
        self.version = torch_version()
        self.arguments = {
            name: self._check(name, given[name]) for name in OPTIONS if given[name] is not None
        }
        self.pluggable = pluggable
        self.policy: Policy = environment
        self.restore = restore
        self._said = WarningCache()  # a fit and a test after it tell the same once
        self._change = EnvironmentChange()
        self._put_in_place()

    def _check(self, name: str, value: Any) -> Value:
        if name == "roundup_power2_divisions" and isinstance(value, str):
            return parse(f"{name}:{value}", self.version)[name]
        if isinstance(value, dict):
            # YAML reads 256 as a number
            value = {str(size): division for size, division in value.items()}
        return check(name, value, self.version)

    # ---- before the run ----------------------------------------------------------------------

    def _put_in_place(self) -> None:
        """Put the options into the environment, so that processes started from now on have them."""
        self.options, self.decisions = merge(self.arguments, os.environ, self.policy, self.version)
        check_conflicts(self.options, self._surroundings())
        self._check_backend()
        self._previous_text = "" if self.policy == "replace" else find_text(os.environ)[1]
        if self.options or self.policy == "replace":
            for name in NAMES:
                self._change.set(os.environ, name, to_text(self.options))
        self._install_pluggable()
        self._is_in_place, self._is_late = True, torch.cuda.is_initialized()

    def _surroundings(self) -> Surroundings:
        return Surroundings(
            version=self.version,
            caching_disabled=bool(os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING")),
            pluggable=self.pluggable is not None,
        )

    def _check_backend(self) -> None:
        """Refuse another `backend` than the running one, which torch chose when it was imported.

        Without this check torch would fail at the first allocation.
        """
        wanted = self.options.get("backend")
        if wanted is None or not torch.backends.cuda.is_built():
            return
        running = torch.cuda.memory.get_allocator_backend()
        if wanted != running:
            early = _EARLY.format(text=to_text(self.options))
            raise AllocatorOptionError(
                "backend",
                f"{wanted} comes too late: torch was imported with {running}, and the backend"
                f" cannot be changed afterwards. Start the script with: {early}, or call"
                " lightning_zero3.callbacks.allocator_early.ensure(...) first thing in it",
            )

    def _install_pluggable(self) -> None:
        if self.pluggable is not None and torch.cuda.is_available():
            self.pluggable.install()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the callback in a spawned process, before CUDA starts there."""
        self.__dict__.update(state)
        self._allocator = self._previous_fraction = None  # those of the other process
        self._install_pluggable()

    # ---- at the start of the run -------------------------------------------------------------

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if not self._is_in_place:  # an earlier run's teardown put everything back
            self._put_in_place()
        self._check_graphs(trainer)
        self._allocator = allocator = self.make_allocator(trainer.strategy.root_device)
        proof = self._bring_into_effect(allocator) if allocator is not None else None
        self._compare_ranks(proof)
        self.proof = proof
        for decision in self.decisions:
            self._said.info(f"AllocatorConfig: {decision}")
        self._said.info(f"AllocatorConfig: {self._describe(proof)}")

    def make_allocator(self, device: torch.device) -> Allocator | None:
        """Return the allocator whose settings are read; None where the run uses no CUDA."""
        return CUDAAllocator(device) if device.type == "cuda" else None

    def _bring_into_effect(self, allocator: Allocator) -> Proof:
        fraction = self.options.get("per_process_memory_fraction")
        if isinstance(fraction, (int, float)):
            # torch reads the option of this name only when CUDA starts.
            self._previous_fraction = allocator.memory_fraction()
            allocator.set_memory_fraction(fraction)
        proof = prove(self.options, allocator)
        if "backend" not in proof.wrong and (self._is_late or proof.wrong):
            # The running allocator accepts all options but `backend`. Hand over all of them, as
            # some cannot be read back.
            allocator.apply(to_text(self.options))
            proof = prove(self.options, allocator)
        return proof

    def _compare_ranks(self, proof: Proof | None) -> None:
        """Raise on all ranks if options differ between ranks, or did not take effect on any.

        hazard: a rank that raised before the gather would leave the others waiting in it.
        """
        mine: dict[str, Any] = dict(self.options)
        wrong = dict(proof.wrong) if proof else {}
        gathered: list[Any] = [(mine, wrong)]
        if dist.is_available() and dist.is_initialized():
            gathered = [None] * dist.get_world_size()
            dist.all_gather_object(gathered, (mine, wrong))
        if table := compare_ranks([options for options, _ in gathered]):
            raise RuntimeError(
                f"AllocatorConfig: ranks would run with different allocator options:\n{table}\n"
                "Give every rank the same environment, or pass environment='replace'."
            )
        faults = [
            f"  rank {rank}: {name}: asked for {expected!r}, the allocator has {found!r}"
            for rank, (_, wrong) in enumerate(gathered)
            for name, (expected, found) in wrong.items()
        ]
        if faults:
            early = _EARLY.format(text=to_text(self.options))
            raise RuntimeError(
                "AllocatorConfig: options did not take effect:\n"
                + "\n".join(faults)
                + f"\nCUDA had started before they could be set. Start the script with: {early}"
            )

    def _check_graphs(self, trainer: Trainer) -> None:
        """Warn of options that disturb CUDA graphs, and keep NCCL from registering its buffers.

        With CUDA graphs and expandable segments over several ranks NCCL hangs if it registers them.

        Raises:
            AllocatorOptionError: the user has set `NCCL_GRAPH_REGISTER` otherwise.
        """
        classes = [cls for callback in trainer.callbacks for cls in type(callback).__mro__]  # type: ignore[attr-defined]
        has_graphs = any("cudagraph" in cls.__name__.lower() for cls in classes)
        for remark in find_remarks(self.options, has_graphs):
            rank_zero_warn(f"AllocatorConfig: {remark}")
        if not (has_graphs and self.options.get("expandable_segments") and trainer.world_size > 1):
            return
        register = os.environ.get("NCCL_GRAPH_REGISTER")
        if register not in (None, "0"):
            raise AllocatorOptionError(
                "expandable_segments",
                f"with CUDA graphs it hangs in NCCL while NCCL_GRAPH_REGISTER={register}; set"
                " NCCL_GRAPH_REGISTER=0",
            )
        self._change.set(os.environ, "NCCL_GRAPH_REGISTER", "0")

    def _describe(self, proof: Proof | None) -> str:
        if self.pluggable is not None:
            return f"allocator from {self.pluggable.library}" + (
                "" if torch.cuda.is_available() else " (not loaded: this run uses no CUDA)"
            )
        if proof is None:
            options = to_text(self.options) if self.options else "no options"
            return f"{options} (no CUDA here: without effect)"
        return proof.describe()

    # ---- at the end --------------------------------------------------------------------------

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self.restore:
            self.restore_now()

    def restore_now(self) -> None:
        """Put back the environment and, where it was changed, the running allocator's options."""
        for name in self._change.undo(os.environ):
            rank_zero_warn(
                f"AllocatorConfig: {name} was changed by someone else meanwhile and is left as"
                " it is"
            )
        if self._allocator is not None:
            self._allocator.apply(undo_text(self.options, self._previous_text, self.version))
            if self._previous_fraction is not None:
                self._allocator.set_memory_fraction(self._previous_fraction)
        self._allocator = self._previous_fraction = None
        self._is_in_place = False

    def suggest(self, figures: RunFigures) -> list[Suggestion]:
        """Suggest after a run which options would have helped, and why; see `advice.suggest`.

        `figures` come from `CUDAMemoryTracker.run_figures()`.
        """
        return suggest(figures, self.options, self.version)
