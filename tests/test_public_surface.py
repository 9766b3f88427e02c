"""What users may rely on: the names, and an import that registers "zero3" and does nothing else."""

import re
import subprocess
import sys
import types
from pathlib import Path

import lightning_zero3
import lightning_zero3.strategies
import pytest
from lightning.pytorch.strategies import Strategy, StrategyRegistry

ROOT = Path(__file__).resolve().parents[1]

PUBLIC = {
    "lightning_zero3": {"Zero3Strategy", "__version__"},
    "lightning_zero3.strategies": {"Zero3Strategy"},
}

REGISTER_FOREIGN = """
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
class Foreign(DDPStrategy):
    pass
StrategyRegistry.register("zero3", Foreign)
"""


def run_python(program: str, *options: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *options, "-c", program], capture_output=True, text=True, timeout=120
    )


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
    assert shown == {"Zero3Strategy"}


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
import numpy, torch, torchmetrics, lightning.pytorch, lightning.pytorch.strategies

def state():
    return {
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "native threads": len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self") else 0,
        "children": [open(f).read() for f in glob.glob("/proc/self/task/*/children")],
        "cuda": torch.cuda.is_initialized(),
        "process group": torch.distributed.is_initialized(),
        "environment": dict(os.environ),
        "random": (random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()),
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


def test_registering_again_is_harmless():
    done = run_python("""
import importlib, sys
import lightning_zero3, lightning_zero3.strategies
from lightning.pytorch.strategies import StrategyRegistry
importlib.reload(lightning_zero3.strategies)
assert StrategyRegistry["zero3"]["strategy"] is lightning_zero3.Zero3Strategy
for name in [name for name in sys.modules if name.startswith("lightning_zero3")]:
    del sys.modules[name]
import lightning_zero3
assert StrategyRegistry["zero3"]["strategy"] is lightning_zero3.Zero3Strategy
""")
    assert done.returncode == 0, done.stderr


def test_a_name_taken_by_another_package_is_an_error_that_says_so():
    done = run_python(REGISTER_FOREIGN + "import lightning_zero3")
    assert done.returncode != 0
    assert '"zero3" is already taken by __main__.Foreign' in done.stderr
    assert "lightning_zero3.strategies.zero3.Zero3Strategy" in done.stderr
    assert 'StrategyRegistry.remove("zero3")' in done.stderr


def test_the_errors_advice_works():
    done = run_python(
        REGISTER_FOREIGN
        + 'StrategyRegistry.remove("zero3")\nimport lightning_zero3\n'
        + 'print(StrategyRegistry["zero3"]["strategy"] is lightning_zero3.Zero3Strategy)'
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "True\n"


@pytest.mark.parametrize("order", ["strategies, lightning_zero3", "lightning_zero3, strategies"])
def test_one_file_under_two_names_is_an_error(order):
    done = run_python(f"import sys\nsys.path.insert(0, {str(ROOT)!r})\nimport {order}")
    assert done.returncode != 0
    assert "already taken by" in done.stderr
    assert "one file was imported under two names" in done.stderr
