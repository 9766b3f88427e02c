"""`AllocatorConfig`: in time, merged, proved, compared between ranks, put back; and what it
refuses.
"""

import os
from pathlib import Path

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel

from helpers.parity import trainer
from helpers.ranks import run_ranks
from helpers.tracking import needs_cuda
from lightning_zero3.callbacks import AllocatorConfig
from lightning_zero3.callbacks.allocator.advice import GIB, RunFigures
from lightning_zero3.callbacks.allocator.environment import NAMES, READ_NAMES, merge
from lightning_zero3.callbacks.allocator.grammar import (
    AllocatorOptionError,
    parse,
    roundup_table,
    to_text,
)
from lightning_zero3.callbacks.allocator.readback import (
    CUDAAllocator,
    compare_ranks,
    prove,
    undo_text,
)
from lightning_zero3.callbacks.allocator.rules import Surroundings, check_conflicts, find_remarks

NEWEST = (2, 13)


class RecordedAllocator:
    """Answers as torch does: settings in the form of the snapshot, defaults for what is left
    out.
    """

    DEFAULTS = {
        "PYTORCH_CUDA_ALLOC_CONF": "",
        "max_split_size": -1,
        "garbage_collection_threshold": 0.0,
        "expandable_segments": False,
        "pinned_num_register_threads": 1,
        "release_lock_on_cudamalloc": False,
        "pinned_use_cuda_host_register": False,
        "roundup_power2_divisions": {str(2**power): 0 for power in range(16)},
        "graph_capture_record_stream_reuse": False,
    }
    RESET_BY_EVERY_PARSE = (
        "max_split_size",
        "garbage_collection_threshold",
        "roundup_power2_divisions",
    )

    def __init__(self, text="", deaf=()):
        self.current = dict(self.DEFAULTS)
        self.fraction = 1.0
        self.deaf = deaf  # options that never take effect
        self.applied = []
        self.apply(text)
        self.applied.clear()

    def backend(self):
        return "native"

    def settings(self):
        return self.current

    def memory_fraction(self):
        return self.fraction

    def set_memory_fraction(self, fraction):
        self.fraction = fraction

    def apply(self, text):
        self.applied.append(text)
        for name in self.RESET_BY_EVERY_PARSE:
            self.current[name] = self.DEFAULTS[name]
        self.current["PYTORCH_CUDA_ALLOC_CONF"] = text
        for name, value in parse(text, NEWEST).items():
            if name in self.deaf:
                continue
            if name == "max_split_size_mb":
                self.current["max_split_size"] = value * 2**20
            elif name == "roundup_power2_divisions":
                table = roundup_table(value)
                self.current[name] = {str(2**power): table[power] for power in range(16)}
            elif name in self.current:
                self.current[name] = value


class WithRecorded(AllocatorConfig):
    recorded = None

    def make_allocator(self, device):
        return self.recorded


def fit(*callbacks, tmp_path, **options):
    fitter = trainer(max_steps=2, callbacks=list(callbacks), default_root_dir=tmp_path, **options)
    fitter.fit(BoringModel())
    return fitter


# ---- conflicts
# ------------------------------------------------------------------------------------

CONFLICTS = [
    ("backend:cudaMallocAsync,max_split_size_mb:64", "max_split_size_mb", "ignores"),
    ("backend:cudaMallocAsync,expandable_segments:True", "expandable_segments", "ignores"),
    (
        "backend:cudaMallocAsync,garbage_collection_threshold:0.5",
        "garbage_collection_threshold",
        "ignores",
    ),
    ("expandable_segments:True,max_split_size_mb:64", "max_split_size_mb", "123548"),
    (
        "max_split_size_mb:32,large_segment_size_mb:64",
        "max_split_size_mb",
        "at least large_segment_size_mb",
    ),
    (
        "max_split_size_mb:64,max_non_split_rounding_mb:20,large_segment_size_mb:32",
        "max_non_split_rounding_mb",
        "32",
    ),
    (
        "max_non_split_rounding_mb:64",
        "max_non_split_rounding_mb",
        "no effect without max_split_size_mb",
    ),
    (
        "garbage_collection_threshold:0.8",
        "garbage_collection_threshold",
        "per_process_memory_fraction",
    ),
    (
        "garbage_collection_threshold:0.8,per_process_memory_fraction:1.0",
        "garbage_collection_threshold",
        "below 1",
    ),
    ("throw_on_cudamalloc_oom:True", "throw_on_cudamalloc_oom", "per_process_memory_fraction"),
    (
        "pinned_num_register_threads:8",
        "pinned_num_register_threads",
        "pinned_use_cuda_host_register",
    ),
    ("pinned_max_round_threshold_mb:64", "pinned_max_round_threshold_mb", "192722"),
    (
        "pinned_max_round_threshold_mb:64,pinned_max_cached_size_mb:65",
        "pinned_max_round_threshold_mb",
        "192722",
    ),
]


@pytest.mark.parametrize(("text", "option", "reason"), CONFLICTS)
def test_conflicts_are_refused_with_the_reason(text, option, reason):
    with pytest.raises(AllocatorOptionError, match=reason) as caught:
        check_conflicts(parse(text, NEWEST), Surroundings(NEWEST))
    assert caught.value.option == option


@pytest.mark.parametrize(
    "text",
    [
        "backend:cudaMallocAsync",
        "backend:cudaMallocAsync,pinned_use_cuda_host_register:True",
        "backend:cudaMallocAsync,per_process_memory_fraction:0.5",
        "expandable_segments:False,max_split_size_mb:64",
        "garbage_collection_threshold:0.8,per_process_memory_fraction:0.9",
        "throw_on_cudamalloc_oom:False",
        "pinned_max_round_threshold_mb:64,pinned_max_cached_size_mb:64",
        "pinned_max_cached_size_mb:64",
    ],
)
def test_neighbours_of_the_conflicts_pass(text):
    check_conflicts(parse(text, NEWEST), Surroundings(NEWEST))


def test_the_process_can_make_an_option_impossible():
    options = {"expandable_segments": True}
    with pytest.raises(AllocatorOptionError, match="PYTORCH_NO_CUDA_MEMORY_CACHING"):
        check_conflicts(options, Surroundings(NEWEST, caching_disabled=True))
    with pytest.raises(AllocatorOptionError, match="pluggable"):
        check_conflicts(options, Surroundings(NEWEST, pluggable=True))


def test_remarks_for_graphs_and_for_unnamed_sizes():
    assert find_remarks({"garbage_collection_threshold": 0.8}, with_cuda_graphs=False) == []
    assert (
        "captured" in find_remarks({"garbage_collection_threshold": 0.8}, with_cuda_graphs=True)[0]
    )
    assert find_remarks({"max_split_size_mb": 64}, with_cuda_graphs=True) == []
    assert (
        "[512]"
        in find_remarks(
            {"roundup_power2_divisions": {"256": 1, "1024": 2}}, with_cuda_graphs=False
        )[0]
    )


# ---- the environment
# ------------------------------------------------------------------------------

BOTH = {
    "PYTORCH_CUDA_ALLOC_CONF": "roundup_power2_divisions:[256:1,512:2],expandable_segments:False"
}


def test_merge_policies():
    ours = {"expandable_segments": True, "release_lock_on_cudamalloc": True}
    theirs = {"256": 1, "512": 2}
    merged, decisions = merge(ours, BOTH, "merge", NEWEST)
    assert merged == {**ours, "roundup_power2_divisions": theirs}
    assert decisions == ["expandable_segments=True: the argument wins over PYTORCH_CUDA_ALLOC_CONF"]
    merged, decisions = merge(ours, BOTH, "respect", NEWEST)
    assert merged == {**ours, "roundup_power2_divisions": theirs, "expandable_segments": False}
    assert decisions == [
        "expandable_segments=False: PYTORCH_CUDA_ALLOC_CONF wins over the argument"
    ]
    assert merge(ours, BOTH, "replace", NEWEST) == (ours, [])
    with pytest.raises(AllocatorOptionError, match="expandable_segments.*make them agree"):
        merge(ours, BOTH, "refuse", NEWEST)
    assert merge({"expandable_segments": False}, BOTH, "refuse", NEWEST)[1] == []


def test_a_malformed_or_contradictory_environment_is_refused_by_name():
    with pytest.raises(AllocatorOptionError, match="max_split_size_mb.*64MB.*PYTORCH_ALLOC_CONF"):
        merge({}, {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64MB"}, "merge", NEWEST)
    differing = {
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64",
    }
    with pytest.raises(AllocatorOptionError, match="disagree"):
        merge({}, differing, "merge", NEWEST)
    assert merge({}, differing, "replace", NEWEST) == ({}, [])
    same = dict.fromkeys(READ_NAMES, "max_split_size_mb:64")
    assert merge({}, same, "refuse", NEWEST)[0] == {"max_split_size_mb": 64}


def test_the_constructor_writes_every_name_and_teardown_puts_them_back(monkeypatch, tmp_path):
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:64")
    config = AllocatorConfig(roundup_power2_divisions={"256": 1, ">": 4})
    expected = "max_split_size_mb:64,roundup_power2_divisions:[256:1,>:4]"
    assert {os.environ[name] for name in NAMES} == {expected}
    fit(config, tmp_path=tmp_path)
    assert os.environ["PYTORCH_ALLOC_CONF"] == "max_split_size_mb:64"
    assert "PYTORCH_CUDA_ALLOC_CONF" not in os.environ
    # A second run has the options again, and again puts them back.
    seen = []
    config.make_allocator = lambda device: seen.append(os.environ["PYTORCH_CUDA_ALLOC_CONF"])
    fit(config, tmp_path=tmp_path)
    assert seen == [expected] and "PYTORCH_CUDA_ALLOC_CONF" not in os.environ


def test_restore_leaves_alone_what_someone_else_changed(monkeypatch):
    config = AllocatorConfig(expandable_segments=True)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "foreign")
    with pytest.warns(UserWarning, match="PYTORCH_ALLOC_CONF was changed by someone else"):
        config.restore_now()
    assert (
        os.environ["PYTORCH_ALLOC_CONF"] == "foreign"
        and "PYTORCH_CUDA_ALLOC_CONF" not in os.environ
    )


def test_wrong_arguments_name_the_option_and_leave_the_environment_alone():
    for arguments, message in [
        ({"max_split_size_mb": 19}, "max_split_size_mb.*at least 20"),
        ({"roundup_power2_divisions": "[256:3]"}, "roundup_power2_divisions.*powers of two"),
        ({"environment": "ours"}, "environment.*merge"),
        ({"max_split_size_mb": 64, "expandable_segments": True}, "123548"),
    ]:
        with pytest.raises(ValueError, match=message):
            AllocatorConfig(**arguments)
        assert not any(name in os.environ for name in READ_NAMES)


# ---- proof
# ----------------------------------------------------------------------------------------

EVERYTHING = (
    "max_split_size_mb:64,garbage_collection_threshold:0.8,roundup_power2_divisions:[256:1,512:2,>:4],"
    "per_process_memory_fraction:0.5,release_lock_on_cudamalloc:True,graph_capture_record_stream_reuse:True,"
    "pinned_use_cuda_host_register:True,pinned_num_register_threads:8,pinned_use_background_threads:True"
)


def test_every_readable_option_is_confirmed_and_the_rest_is_named():
    options = parse(EVERYTHING, NEWEST)
    allocator = RecordedAllocator(EVERYTHING)
    allocator.fraction = 0.5
    proof = prove(options, allocator)
    assert proof.wrong == {}
    assert set(proof.confirmed) == set(options) - {"pinned_use_background_threads"}
    assert proof.unreadable == ("pinned_use_background_threads",)
    assert "no way to read back: pinned_use_background_threads" in proof.describe()


def test_every_option_that_did_not_take_effect_is_found():
    options = parse(EVERYTHING, NEWEST)
    proof = prove(options, RecordedAllocator())
    assert set(proof.wrong) == set(options) - {"pinned_use_background_threads"}
    assert proof.wrong["max_split_size_mb"] == (64, -1 / 2**20)


def test_set_too_late_is_applied_at_run_time_proved_and_undone(tmp_path):
    config = WithRecorded(
        expandable_segments=True, roundup_power2_divisions=4, per_process_memory_fraction=0.5
    )
    config.recorded = allocator = RecordedAllocator()
    fit(config, tmp_path=tmp_path)
    assert allocator.applied[0] == to_text(config.options)
    assert set(config.proof.confirmed) == set(config.options)
    assert allocator.current == {
        **RecordedAllocator.DEFAULTS,
        "PYTORCH_CUDA_ALLOC_CONF": allocator.applied[-1],
    }
    assert allocator.fraction == 1.0


def test_an_option_that_cannot_be_read_back_is_handed_to_a_running_allocator(tmp_path, monkeypatch):
    for running in (False, True):
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda running=running: running)
        config = WithRecorded(pinned_use_background_threads=True)
        config.recorded = allocator = RecordedAllocator()
        fit(config, tmp_path=tmp_path)
        undone = "pinned_use_background_threads:False"
        assert (
            allocator.applied == ["pinned_use_background_threads:True", undone]
            if running
            else [undone]
        )


def test_an_option_without_effect_stops_the_run(tmp_path):
    config = WithRecorded(expandable_segments=True)
    config.recorded = RecordedAllocator(deaf=("expandable_segments",))
    with pytest.raises(
        RuntimeError,
        match="rank 0: expandable_segments: asked for True.*False(.|\n)*allocator_early",
    ):
        fit(config, tmp_path=tmp_path)


def test_undo_names_the_defaults_that_torch_keeps():
    asked = {"expandable_segments": True, "max_split_size_mb": 64, "large_segment_size_mb": 32}
    text = undo_text(asked, "release_lock_on_cudamalloc:True", NEWEST)
    assert (
        text == "release_lock_on_cudamalloc:True,expandable_segments:False,large_segment_size_mb:20"
    )


def test_compare_ranks_shows_only_what_differs():
    assert compare_ranks([{"a": 1}, {"a": 1}]) is None
    assert compare_ranks([{"a": 1, "b": 2}, {"a": 1}]) == "  b: rank 0: 2, rank 1: 'absent'"


def differing_ranks(rank, world_size, folder):
    if rank == 1:
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "release_lock_on_cudamalloc:True"
    try:
        fit(
            AllocatorConfig(expandable_segments=True),
            tmp_path=folder,
            devices=world_size,
            strategy="ddp",
        )
    except RuntimeError as error:
        return str(error)


def test_ranks_with_different_options_all_stop(tmp_path):
    for message in run_ranks(differing_ranks, 2, tmp_path):
        assert "release_lock_on_cudamalloc: rank 0: 'absent', rank 1: True" in message


@needs_cuda
@pytest.mark.gpu
def test_proof_on_the_gpu():
    """Every option that may change at run time, read back from the real allocator, then undone."""
    device = torch.device("cuda", 0)
    torch.zeros(1, device=device)
    allocator = CUDAAllocator(device)
    before = {
        name: value
        for name, value in allocator.settings().items()
        if name != "PYTORCH_CUDA_ALLOC_CONF"
    }
    options = parse(EVERYTHING, NEWEST)
    allocator.apply(
        to_text({name: options[name] for name in options if name != "per_process_memory_fraction"})
    )
    allocator.set_memory_fraction(0.5)
    proof = prove(options, allocator)
    allocator.set_memory_fraction(1.0)
    allocator.apply(undo_text(options, "", NEWEST))
    assert proof.wrong == {} and proof.unreadable == ("pinned_use_background_threads",)
    after = {
        name: value
        for name, value in allocator.settings().items()
        if name != "PYTORCH_CUDA_ALLOC_CONF"
    }
    assert after == before


# ---- YAML
# -----------------------------------------------------------------------------------------

YAML = """
trainer:
  callbacks:
    - class_path: lightning_zero3.callbacks.AllocatorConfig
      init_args:
        max_split_size_mb: 64
        garbage_collection_threshold: 0.8
        per_process_memory_fraction: 0.9
        roundup_power2_divisions: {256: 1, 512: 2, ">": 4}
        environment: respect
"""


def from_yaml(tmp_path, text):
    (tmp_path / "config.yaml").write_text(text)
    return LightningCLI(
        BoringModel, run=False, args=["--config", str(tmp_path / "config.yaml")]
    ).trainer


def test_from_yaml(tmp_path):
    trainer = from_yaml(tmp_path, YAML)
    (config,) = (
        callback for callback in trainer.callbacks if isinstance(callback, AllocatorConfig)
    )
    config.restore_now()
    assert to_text(config.arguments) == (
        "max_split_size_mb:64,roundup_power2_divisions:[256:1,512:2,>:4],garbage_collection_threshold:0.8,"
        "per_process_memory_fraction:0.9"
    )
    assert config.policy == "respect"
    text = YAML.replace('{256: 1, 512: 2, ">": 4}', '"[256:1,512:2,>:4]"')
    trainer = from_yaml(tmp_path, text)
    (again,) = (callback for callback in trainer.callbacks if isinstance(callback, AllocatorConfig))
    again.restore_now()
    assert again.arguments == config.arguments


# ---- suggest
# --------------------------------------------------------------------------------------

QUIET = dict(
    source="cuda",
    peak_allocated=60 * GIB,
    peak_reserved=64 * GIB,
    capacity=80 * GIB,
    worst_waste=4 * GIB,
)
QUIET |= dict(reserved_at_worst=64 * GIB, retries=0, ooms=0)
SUGGESTIONS = [
    ({}, {}, "none", "no retries"),
    ({"source": "process"}, {}, "none", "process memory"),
    (
        {"retries": 3, "worst_waste": 20 * GIB},
        {},
        "expandable_segments",
        "31%.*3 allocation retries",
    ),
    (
        {"ooms": 1, "worst_waste": 20 * GIB},
        {"expandable_segments": True},
        "roundup_power2_divisions",
        "although",
    ),
    ({"retries": 3}, {}, "none", "really in use"),
    ({"retries": 3, "worst_waste": 20 * GIB}, {"backend": "cudaMallocAsync"}, "none", "driver"),
    (
        {"pinned_reserved": 8 * GIB, "pinned_allocated": 4 * GIB},
        {},
        "pinned_max_round_threshold_mb",
        "powers of two",
    ),
]


@pytest.mark.parametrize(("figures", "options", "option", "reason"), SUGGESTIONS)
def test_suggest(figures, options, option, reason):
    config = AllocatorConfig()
    config.options = options
    for config.version in ((2, 11), NEWEST):
        suggestions = config.suggest(RunFigures(**{**QUIET, **figures}))
        together = {
            suggestion.option: suggestion.value
            for suggestion in suggestions
            if suggestion.value is not None
        }
        assert parse(to_text(together), config.version) == together  # advice must be followable
        check_conflicts({**options, **together}, Surroundings(config.version))
    assert suggestions[0].option == option
    assert __import__("re").search(reason, suggestions[0].reason)


def test_no_number_changes(tmp_path):
    """Without CUDA the callback is harmless: the same weights with and without it."""

    def weights(*callbacks):
        torch.manual_seed(0)
        model: LightningModule = fit(*callbacks, tmp_path=Path(tmp_path)).lightning_module
        return [parameter.detach().clone() for parameter in model.parameters()]

    with_it = weights(AllocatorConfig(expandable_segments=True))
    assert all(torch.equal(a, b) for a, b in zip(with_it, weights(), strict=True))
