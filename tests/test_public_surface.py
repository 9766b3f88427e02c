"""What users may rely on: the names, and an import that registers "zero3" and does nothing else."""

import json
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest
from lightning.pytorch.strategies import Strategy, StrategyRegistry

import lightning_zero3
import lightning_zero3.callbacks
import lightning_zero3.strategies

ROOT = Path(__file__).resolve().parents[1]

STRATEGIES = {
    "CheckpointError",
    "CheckpointOptions",
    "DataOptions",
    "DivergenceError",
    "LaunchError",
    "ResidencyError",
    "WatchOptions",
    "World",
    "Zero3Strategy",
    "current_world",
}
PUBLIC = {
    "lightning_zero3": {*STRATEGIES, "__version__"},
    "lightning_zero3.strategies": STRATEGIES,
    "lightning_zero3.callbacks": {
        "AllocatorConfig",
        "CUDABackendConfig",
        "CUDAGraphStep",
        "CUDAMemoryTracker",
        "ModelExport",
        "PluggableAllocator",
        "StepTimer",
    },
}

REGISTER_FOREIGN = """
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
class Foreign(DDPStrategy):
    pass
StrategyRegistry.register("zero3", Foreign)
"""

RELOAD = """
import importlib, sys
import lightning_zero3, lightning_zero3.strategies
from lightning.pytorch.strategies import StrategyRegistry
importlib.reload(lightning_zero3.strategies)
assert StrategyRegistry["zero3"]["strategy"] is lightning_zero3.Zero3Strategy
for name in [name for name in sys.modules if name.startswith("lightning_zero3")]:
    del sys.modules[name]
import lightning_zero3
assert StrategyRegistry["zero3"]["strategy"] is lightning_zero3.Zero3Strategy
"""

REMOVE = """
StrategyRegistry.remove("zero3")
import lightning_zero3
assert StrategyRegistry["zero3"]["strategy"] is lightning_zero3.Zero3Strategy
"""

CHECKOUT_ON_PATH = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"

# Each needs an interpreter that has not imported lightning_zero3 yet.
PROGRAMS = {
    "reload": RELOAD,
    "taken": REGISTER_FOREIGN + "import lightning_zero3",
    "removed": REGISTER_FOREIGN + REMOVE,
    "folder first": CHECKOUT_ON_PATH + "import strategies, lightning_zero3",
    "package first": CHECKOUT_ON_PATH + "import lightning_zero3, strategies",
}

# Importing Lightning takes seconds, so one process does it and forks for each program.
FORK_FOR_EACH = """
import json, os, sys, traceback
import lightning.pytorch
folder, programs = sys.argv[1], json.loads(sys.argv[2])
codes = {}
for name, program in programs.items():
    child = os.fork()
    if not child:
        os.dup2(os.open(os.path.join(folder, name), os.O_WRONLY | os.O_CREAT), 2)
        code = 0
        try:
            exec(program, {"__name__": "__main__"})
        except BaseException:
            traceback.print_exc()
            code = 1
        os._exit(code)  # an orderly end would take seconds, for nothing
    codes[name] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
print(json.dumps(codes))
"""


def run_python(program: str, *args: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", program, *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> dict[str, tuple[int, str]]:
    """Exit code and error output of each of `PROGRAMS`."""
    folder = tmp_path_factory.mktemp("errors")
    done = run_python(FORK_FOR_EACH, str(folder), json.dumps(PROGRAMS))
    assert done.returncode == 0, done.stderr
    return {
        name: (code, (folder / name).read_text()) for name, code in json.loads(done.stdout).items()
    }


@pytest.mark.parametrize("module_name", PUBLIC)
def test_public_names_are_exactly_these(module_name):
    module = sys.modules[module_name]
    assert set(module.__all__) == PUBLIC[module_name]
    assert len(module.__all__) == len(set(module.__all__))


def test_the_root_package_shows_nothing_but_its_public_names():
    shown = {
        name
        for name, value in vars(lightning_zero3).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }
    assert shown == STRATEGIES


def test_version_is_the_one_in_pyproject():
    pyproject = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    declared = re.search(r'^version = "(.+)"$', pyproject, re.MULTILINE)
    assert declared is not None and lightning_zero3.__version__ == declared[1]


def test_import_registers_the_public_class():
    assert StrategyRegistry["zero3"]["strategy"] is lightning_zero3.Zero3Strategy
    assert issubclass(lightning_zero3.Zero3Strategy, Strategy)
    assert lightning_zero3.strategies.Zero3Strategy is lightning_zero3.Zero3Strategy


# Everything is compared with the state after importing what the package stands on, because
# those imports are the user's in any case and are not ours to judge.
CHEAP_IMPORT = """
import glob, logging, os, random, sys, threading, warnings
from pathlib import Path
import numpy, torch, torchmetrics, lightning.pytorch, lightning.pytorch.strategies

def state():
    return {
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "native threads": len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self") else 0,
        "children": [Path(f).read_text() for f in glob.glob("/proc/self/task/*/children")],
        "cuda": torch.cuda.is_initialized(),
        "process group": torch.distributed.is_initialized(),
        "environment": dict(os.environ),
        "random": random.getstate(),
        "numpy random": numpy.random.get_state()[1].tolist(),
        "torch random": torch.get_rng_state().tolist(),
        "torch threads": torch.get_num_threads(),
        "default dtype": torch.get_default_dtype(),
        "root handlers": list(logging.getLogger().handlers),
        "warning filters": list(warnings.filters),
    }

warnings.simplefilter("error")
before, modules_before = state(), set(sys.modules)
import lightning_zero3
after = state()
changed = [name for name in before if before[name] != after[name]]
assert not changed, {name: (before[name], after[name]) for name in changed}
assert not after["cuda"]

packages = {name.partition(".")[0] for name in set(sys.modules) - modules_before}
foreign = packages - {"lightning_zero3"} - set(sys.stdlib_module_names)
print("foreign:", sorted(foreign))
"""


def test_import_is_cheap_and_changes_nothing():
    done = run_python(CHEAP_IMPORT)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "foreign: []\n" and done.stderr == ""


@pytest.mark.parametrize("program", ["reload", "removed"])
def test_registering_again_is_harmless(program, outcomes):
    assert outcomes[program] == (0, "")


# a class of another package; one file that was imported under two names
@pytest.mark.parametrize("program", ["taken", "folder first", "package first"])
def test_a_name_that_another_class_has_is_an_error(program, outcomes):
    code, error = outcomes[program]
    assert code == 1 and "'zero3' is already present in the registry" in error


OTHER_PACKAGE = """
import pytorch_lightning as pl
import lightning_zero3
for name in ("zero3", "zero3_spawn", "zero3_notebook"):
    try:
        pl.Trainer(strategy=name, accelerator="cpu", logger=False)
    except ImportError as error:
        print(error)
"""


def test_the_other_package_says_what_to_import():
    command = [sys.executable, "-c", OTHER_PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Write `import lightning.pytorch as pl`") == 3, done.stdout
