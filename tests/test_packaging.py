"""The wheel holds every package, and trains from an environment and a folder of its own."""

import os
import shutil
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import lightning
import numpy
import pytest
import torch

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # a dependency of pytest there

ROOT = Path(__file__).resolve().parents[1]
SHIPPED = ["pyproject.toml", "README.md", "LICENSE", "strategies", "callbacks"]

TRAIN = """
import sys
from pathlib import Path

import lightning.pytorch as pl
import lightning_zero3
import torch
from torch import nn
from torch.utils.data import DataLoader


class Toy(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))

    def training_step(self, batch, batch_idx):
        return self.net(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


if __name__ == "__main__":
    torch.set_num_threads(1)
    installed = Path(lightning_zero3.__file__).resolve()
    assert Path(sys.prefix).resolve() in installed.parents, installed
    trainer = pl.Trainer(
        strategy="zero3", accelerator="cpu", devices=2, max_steps=2, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )
    torch.manual_seed(0)
    trainer.fit(Toy(), DataLoader(torch.randn(16, 8), batch_size=2))
    assert isinstance(trainer.strategy, lightning_zero3.Zero3Strategy)
    print(f"rank {trainer.global_rank} of {trainer.world_size}: {trainer.global_step} steps")
"""


def run(*command: object, cwd: Path, timeout: float = 120) -> str:
    """Run to the end, or kill the command with all that it started. Returns its output."""
    # The checkout must not be importable, and a launcher must not take us for its child.
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHONPATH", "PYTEST"))}
    process = subprocess.Popen(
        [str(part) for part in command],
        cwd=cwd,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise
    assert process.returncode == 0, f"{command} failed:\n{output}"
    return output


def packages_on_disk() -> dict[str, str]:
    """Import name to folder of every folder that holds Python files."""
    files = [*ROOT.glob("strategies/**/*.py"), *ROOT.glob("callbacks/**/*.py")]
    folders = {file.parent.relative_to(ROOT).as_posix() for file in files}
    found = {}
    for folder in folders:
        name = folder.removeprefix("strategies/") if "lightning_zero3" in folder else folder
        dotted = name.replace("/", ".")
        found[dotted if name != folder else f"lightning_zero3.{dotted}"] = folder
    return found


def wheel_path(package: str, folder: str, file: Path) -> str:
    return f"{package.replace('.', '/')}/{file.relative_to(ROOT / folder).as_posix()}"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built through the source distribution, as for a release, and away from the checkout."""
    source = tmp_path_factory.mktemp("source")
    for name in SHIPPED:
        if (ROOT / name).is_dir():
            shutil.copytree(
                ROOT / name,
                source / name,
                ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"),
            )
        else:
            shutil.copy(ROOT / name, source / name)
    out = tmp_path_factory.mktemp("dist")
    # No isolation: the build requirement comes with the test extra, so no network is needed.
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, source, cwd=out)
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed_python(wheel, tmp_path_factory) -> Path:
    """An environment with the wheel, seeing this one's dependencies but not its editable install.

    A .pth line adds a folder to the path without reading the .pth files inside that folder, and
    an editable install is reached only through its .pth file.
    """
    venv = tmp_path_factory.mktemp("venv")
    run(sys.executable, "-m", "venv", "--without-pip", venv, cwd=venv)
    python = venv / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python]
    run(*pip, "install", "--quiet", "--no-deps", "--no-index", wheel, cwd=venv)
    (site_packages,) = venv.glob("lib/python*/site-packages")
    homes = {str(Path(package.__file__).parents[1]) for package in (torch, lightning, numpy)}
    (site_packages / "dependencies.pth").write_text("\n".join(sorted(homes)))
    return python


def test_the_package_list_is_what_is_on_disk():
    setuptools_config = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert sorted(setuptools_config["packages"]) == sorted(packages_on_disk())
    for folder in packages_on_disk().values():
        assert (ROOT / folder / "__init__.py").exists(), f"{folder} has no __init__.py"


def test_the_wheel_holds_every_source_file_and_nothing_else(wheel):
    inside = set(zipfile.ZipFile(wheel).namelist())
    metadata = {name for name in inside if ".dist-info/" in name}
    expected = {
        wheel_path(package, folder, file)
        for package, folder in packages_on_disk().items()
        for file in (ROOT / folder).glob("*.py")
    }
    assert inside - metadata == expected | {"lightning_zero3/py.typed"}
    assert any(name.endswith("/LICENSE") for name in metadata)


def test_the_installed_wheel_is_typed_and_complete(installed_python, tmp_path):
    program = (
        "import importlib.metadata as m, importlib.resources as r, lightning_zero3 as z;"
        " import lightning_zero3.callbacks, lightning_zero3.strategies.data;"
        " assert r.files(z).joinpath('py.typed').is_file();"
        " assert m.version('lightning-zero3') == z.__version__; print(z.__file__)"
    )
    output = run(installed_python, "-W", "error::ImportWarning", "-c", program, cwd=tmp_path)
    imported_from = Path(output.splitlines()[-1]).resolve()
    assert ROOT not in imported_from.parents
    assert installed_python.parents[1].resolve() in imported_from.parents


def test_the_installed_wheel_trains_on_two_processes(installed_python, tmp_path):
    (tmp_path / "train.py").write_text(TRAIN)
    output = run(installed_python, "train.py", cwd=tmp_path)
    for rank in range(2):
        assert f"rank {rank} of 2: 2 steps" in output, output
