"""`AllocatorConfig` in time: every launcher, the module that comes before torch, allocators from a
library.
"""

import os
import pickle
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel

from helpers.tracking import needs_cuda
from lightning_zero3.callbacks import AllocatorConfig, PluggableAllocator, allocator_early
from lightning_zero3.callbacks.allocator.environment import READ_NAMES
from lightning_zero3.callbacks.allocator.grammar import AllocatorOptionError

# ---- launchers and the early module
# ---------------------------------------------------------------


def run_script(tmp_path, source, *before, **environ):
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(source))
    clean = {name: value for name, value in os.environ.items() if name not in READ_NAMES}
    command = [sys.executable, *(before or ()), str(script)]
    return subprocess.run(
        command, env={**clean, **environ}, capture_output=True, text=True, timeout=100
    )


def test_early_main_starts_the_script_with_the_options_before_torch(tmp_path):
    source = """
        import os, sys
        assert "torch" not in sys.modules
        print(os.environ["PYTORCH_CUDA_ALLOC_CONF"], os.environ["PYTORCH_ALLOC_CONF"])
    """
    early = ("-m", "lightning_zero3.callbacks.allocator_early", "backend:cudaMallocAsync", "--")
    result = run_script(tmp_path, source, *early)
    assert result.stdout.split() == ["backend:cudaMallocAsync"] * 2, result.stderr
    with pytest.raises(AllocatorOptionError, match="native or cudaMallocAsync"):
        allocator_early.main(["backend:async", "--", "script.py"])


def test_early_ensure_restarts_the_process_once(tmp_path):
    source = """
        import os, sys
        print("start", flush=True)
        from lightning_zero3.callbacks import allocator_early
        allocator_early.ensure("backend:cudaMallocAsync")
        print(os.environ["PYTORCH_CUDA_ALLOC_CONF"])
    """
    result = run_script(tmp_path, source)
    assert result.stdout.split() == ["start", "start", "backend:cudaMallocAsync"], result.stderr


def test_early_ensure_refuses_to_loop(monkeypatch):
    monkeypatch.setenv(allocator_early.MARKER, "backend:native")
    with pytest.raises(
        RuntimeError, match="restarted with 'backend:native' and now 'backend:cudaMallocAsync'"
    ):
        allocator_early.ensure("backend:cudaMallocAsync")
    monkeypatch.delenv(allocator_early.MARKER)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(RuntimeError, match="too late.*CUDA has started"):
        allocator_early.ensure("backend:cudaMallocAsync")


def test_a_backend_that_comes_too_late_says_how_to_be_in_time(monkeypatch):
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda.memory, "get_allocator_backend", lambda: "native")
    with pytest.raises(
        AllocatorOptionError, match="too late.*allocator_early backend:cudaMallocAsync -- script.py"
    ):
        AllocatorConfig(backend="cudaMallocAsync")
    AllocatorConfig(backend="native").restore_now()


LAUNCHED = """
    import os, torch
    from multiprocessing.util import Finalize
    from lightning.pytorch import Trainer, Callback
    from lightning.pytorch.demos.boring_classes import BoringModel
    from lightning_zero3.callbacks import AllocatorConfig

    class Show(Callback):
        def setup(self, trainer, pl_module, stage):
            # A process that exits with gloo's threads alive may abort, and `ddp` leaves its group to that.
            Finalize(None, torch.distributed.destroy_process_group, exitpriority=10)
            # As the allocator would read it: from this process's environment, by torch's own reader (which 2.11 does not show).
            read = getattr(torch._C, "_accelerator_getAllocatorSettings", lambda: os.environ["PYTORCH_ALLOC_CONF"])
            text = read()
            with open(f"{__file__}.{trainer.global_rank}", "w") as file:
                file.write(f"{text} {os.environ['PYTORCH_CUDA_ALLOC_CONF']}")

    if __name__ == "__main__":
        callbacks = [AllocatorConfig(release_lock_on_cudamalloc=True, max_split_size_mb=64), Show()]
        trainer = Trainer(max_steps=1, accelerator="cpu", devices=2, strategy=os.environ["STRATEGY"], logger=False,
                          callbacks=callbacks, enable_checkpointing=False, enable_progress_bar=False,
                          enable_model_summary=False, limit_val_batches=0)
        trainer.fit(BoringModel())
"""


LAUNCHERS = ("ddp", "ddp_spawn", "ddp_fork")


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """What came of each launcher, and in which folder: beside each other, as most of their time is
    starting.
    """
    folders = [tmp_path_factory.mktemp(strategy) for strategy in LAUNCHERS]

    def launch(folder, strategy):
        return run_script(folder, LAUNCHED, STRATEGY=strategy, GLOO_SOCKET_IFNAME="lo"), folder

    with ThreadPoolExecutor(len(LAUNCHERS)) as pool:
        return dict(zip(LAUNCHERS, pool.map(launch, folders, LAUNCHERS), strict=True))


@pytest.mark.parametrize("strategy", LAUNCHERS)
def test_every_launcher_gets_the_options_into_every_process(launched, strategy):
    result, folder = launched[strategy]
    assert result.returncode == 0, result.stderr[-3000:]
    expected = "max_split_size_mb:64,release_lock_on_cudamalloc:True"
    for rank in range(2):
        assert (folder / f"script.py.{rank}").read_text() == f"{expected} {expected}"


def test_the_callback_survives_pickling():
    config = AllocatorConfig(max_split_size_mb=64)
    copy = pickle.loads(pickle.dumps(config))
    config.restore_now()
    assert copy.options == {"max_split_size_mb": 64}


# ---- pluggable
# ------------------------------------------------------------------------------------


def compile_library(
    folder, source="void* alloc(long size, int device, void* stream) {return 0;} void free_it() {}"
):
    (folder / "a.c").write_text(source)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", folder / "a.so", folder / "a.c"], check=True)
    return str(folder / "a.so")


def test_a_pluggable_library_is_checked_before_torch_sees_it(tmp_path):
    with pytest.raises(ValueError, match="no file.*missing.so"):
        PluggableAllocator("missing.so")
    library = compile_library(tmp_path)
    PluggableAllocator(library, free="free_it").check_symbols()
    with pytest.raises(ValueError, match="no function 'nothing'.*alloc="):
        PluggableAllocator(library, alloc="nothing", free="free_it").check_symbols()
    with pytest.raises(AllocatorOptionError, match="pluggable"):
        AllocatorConfig(
            pluggable=PluggableAllocator(library, free="free_it"), expandable_segments=True
        )


def test_a_pluggable_allocator_is_installed_once_and_not_too_late(tmp_path, monkeypatch):
    from lightning_zero3.callbacks.allocator import pluggable

    installed = []
    monkeypatch.setattr(torch.cuda.memory, "CUDAPluggableAllocator", lambda *arguments: arguments)
    monkeypatch.setattr(torch.cuda.memory, "change_current_allocator", installed.append)
    monkeypatch.setattr(pluggable, "_installed", None)
    plug = PluggableAllocator(compile_library(tmp_path), free="free_it")
    plug.install()
    plug.install()
    assert installed == [(str(tmp_path / "a.so"), "alloc", "free_it")]
    with pytest.raises(RuntimeError, match="too late.*another one"):
        PluggableAllocator(plug.library, alloc="free_it", free="free_it").install()
    monkeypatch.setattr(pluggable, "_installed", None)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(RuntimeError, match="too late.*CUDA has started"):
        plug.install()


def test_a_pluggable_allocator_from_yaml(tmp_path):
    text = f"""
trainer:
  callbacks:
    - class_path: lightning_zero3.callbacks.AllocatorConfig
      init_args: {{pluggable: {{library: {compile_library(tmp_path)}, free: free_it}}}}
"""
    (tmp_path / "config.yaml").write_text(text)
    trainer = LightningCLI(
        BoringModel, run=False, args=["--config", str(tmp_path / "config.yaml")]
    ).trainer
    (config,) = (
        callback for callback in trainer.callbacks if isinstance(callback, AllocatorConfig)
    )
    assert config.pluggable == PluggableAllocator(str(tmp_path / "a.so"), "alloc", "free_it")


COUNTING = """
int cudaMalloc(void** pointer, unsigned long size);
int cudaFree(void* pointer);
long served = 0;
void* alloc(long size, int device, void* stream) { void* pointer = 0; cudaMalloc(&pointer, size); served++; return pointer; }
void free_it(void* pointer, long size, int device, void* stream) { cudaFree(pointer); }
"""

PLUGGED = """
    import ctypes, sys
    from lightning.pytorch import Trainer
    from lightning.pytorch.demos.boring_classes import BoringModel
    from lightning_zero3.callbacks import AllocatorConfig, CUDAMemoryTracker, PluggableAllocator

    library = __file__.replace("script.py", "a.so")
    config = AllocatorConfig(pluggable=PluggableAllocator(library, free="free_it"))
    tracker = CUDAMemoryTracker()
    Trainer(max_steps=2, accelerator="gpu", devices=1, logger=False, callbacks=[config, tracker], enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, limit_val_batches=0).fit(BoringModel())
    print(tracker.run_figures().source, ctypes.c_long.in_dll(ctypes.CDLL(library), "served").value)
"""


@needs_cuda
@pytest.mark.gpu
def test_a_pluggable_allocator_serves_a_run_on_the_gpu(tmp_path):
    compile_library(tmp_path, COUNTING)
    result = run_script(tmp_path, PLUGGED)
    assert result.returncode == 0, result.stderr[-3000:]
    source, served = result.stdout.split()[-2:]
    assert source == "driver" and int(served) > 0
