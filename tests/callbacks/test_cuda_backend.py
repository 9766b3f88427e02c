"""`CUDABackendConfig`: every switch takes effect in the run and is put back after it."""

import os
import pickle
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel

from helpers.parity import trainer
from lightning_zero3.callbacks import CUDABackendConfig

VARIABLES = (
    "CUBLAS_WORKSPACE_CONFIG",
    "USE_PYTORCH_KERNEL_CACHE",
    "PYTORCH_KERNEL_CACHE_PATH",
    "PYTORCH_NVML_BASED_CUDA_CHECK",
    "CUDA_LAUNCH_BLOCKING",
)
matmul = torch.backends.cuda.matmul


def read_switches():
    return {
        "matmul": matmul.fp32_precision,
        "legacy matmul": matmul.allow_tf32,
        "cudnn": torch.backends.cudnn.allow_tf32,
        "cudnn conv": torch.backends.cudnn.conv.fp32_precision == "tf32",
        "cudnn rnn": torch.backends.cudnn.rnn.fp32_precision == "tf32",
        "fp16": matmul.allow_fp16_reduced_precision_reduction,
        "bf16": matmul.allow_bf16_reduced_precision_reduction,
        "fp16 accumulation": matmul.allow_fp16_accumulation,
        "deterministic": torch.get_deterministic_debug_mode(),
        **{name: os.environ.get(name) for name in VARIABLES},
    }


class Look(Callback):
    def on_train_start(self, trainer, pl_module):
        self.seen = read_switches()
        # Lightning reads it; torch raises where the interfaces disagree
        torch.get_float32_matmul_precision()


def run(config, tmp_path):
    look = Look()
    trainer(max_steps=1, callbacks=[config, look], default_root_dir=tmp_path).fit(BoringModel())
    return look.seen


CASES = [
    ({"tf32_matmul": True}, {"matmul": "tf32", "legacy matmul": True}),
    ({"tf32_matmul": False}, {"matmul": "ieee", "legacy matmul": False}),
    ({"tf32_cudnn": False}, {"cudnn": False, "cudnn conv": False, "cudnn rnn": False}),
    ({"fp16_reduced_precision_reduction": False}, {"fp16": False}),
    ({"bf16_reduced_precision_reduction": False}, {"bf16": False}),
    ({"fp16_accumulation": True}, {"fp16 accumulation": True}),
    ({"deterministic": "on"}, {"deterministic": 2, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}),
    (
        {"deterministic": "warn", "cublas_workspace": ":16:8"},
        {"deterministic": 1, "CUBLAS_WORKSPACE_CONFIG": ":16:8"},
    ),
    ({"deterministic": "off"}, {"deterministic": 0}),
    ({"cublas_workspace": ":4096:2:16:8"}, {"CUBLAS_WORKSPACE_CONFIG": ":4096:2:16:8"}),
    ({"kernel_cache": False}, {"USE_PYTORCH_KERNEL_CACHE": "0"}),
    ({"nvml_check": True}, {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}),
    ({"launch_blocking": True}, {"CUDA_LAUNCH_BLOCKING": "1"}),
    ({"cufft_plan_cache_size": 16}, {}),
]


@pytest.mark.parametrize(("arguments", "expected"), CASES)
def test_in_effect_during_the_run_and_put_back_after(arguments, expected, tmp_path):
    before = read_switches()
    config = CUDABackendConfig(**arguments)
    for _ in range(2):  # a second run of the same trainer's callbacks starts from the same place
        assert run(config, tmp_path) == {**before, **expected}
        assert read_switches() == before


def test_the_kernel_cache_folder_is_created(tmp_path):
    folder = tmp_path / "a" / "b"
    assert run(CUDABackendConfig(kernel_cache_path=str(folder)), tmp_path)[
        "PYTORCH_KERNEL_CACHE_PATH"
    ] == str(folder)
    assert folder.is_dir()


def test_split_k(tmp_path, monkeypatch):
    config = CUDABackendConfig(fp16_reduced_precision_reduction=False, fp16_split_k=False)
    (setting,) = config.settings()
    assert setting.value == (False, False)


def test_plan_caches_of_several_devices(monkeypatch):
    caches = [SimpleNamespace(max_size=4096) for _ in range(2)]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.backends.cuda, "cufft_plan_cache", caches)
    for size, expected in (({1: 8}, [4096, 8]), (16, [16, 16])):
        config = CUDABackendConfig(cufft_plan_cache_size=size)
        config.setup(None, None, "fit")
        assert [cache.max_size for cache in caches] == expected
        config.restore_now()
        assert [cache.max_size for cache in caches] == [4096, 4096]
    with pytest.raises(ValueError, match=r"no devices \[2\], this process sees 2"):
        CUDABackendConfig(cufft_plan_cache_size={2: 8}).setup(None, None, "fit")


WRONG = [
    ({"cublas_workspace": "4096:8"}, "cublas_workspace.*:SIZE_IN_KIB:COUNT"),
    ({"cublas_workspace": ":4096"}, "cublas_workspace"),
    (
        {"cublas_workspace": ":4096:2", "deterministic": "on"},
        "cublas_workspace.*needs :4096:8 or :16:8",
    ),
    ({"cufft_plan_cache_size": -1}, "cufft_plan_cache_size.*at least 0"),
    ({"cufft_plan_cache_size": {0: True}}, "cufft_plan_cache_size"),
    ({"deterministic": "always"}, "deterministic.*off, warn or on"),
    ({"tf32_matmul": "high"}, "tf32_matmul.*True or False"),
    ({"fp16_split_k": False}, "fp16_split_k.*set both"),
    ({"kernel_cache": False, "kernel_cache_path": "x"}, "kernel_cache_path.*no effect"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG)
def test_wrong_arguments(arguments, message):
    before = read_switches()
    with pytest.raises(ValueError, match=message):
        CUDABackendConfig(**arguments)
    assert read_switches() == before


@pytest.mark.parametrize("arguments", [{"launch_blocking": True}, {"cublas_workspace": ":16:8"}])
def test_variables_that_cuda_reads_once_come_too_late(arguments, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(RuntimeError, match="too late.*set the variable in the shell"):
        CUDABackendConfig(**arguments)


def test_one_line_says_it_all():
    config = CUDABackendConfig(tf32_matmul=True, launch_blocking=True)
    line = config.describe()
    config.restore_now()
    assert "\n" not in line and "tf32_matmul=True" in line and "CUDA_LAUNCH_BLOCKING=1" in line


def test_pickling_leaves_the_closures_behind(tmp_path):
    config = CUDABackendConfig(tf32_matmul=True)
    config.setup(None, None, "fit")
    assert pickle.loads(pickle.dumps(config))._before == []
    config.restore_now()


def test_from_yaml(tmp_path):
    (tmp_path / "config.yaml").write_text("""
trainer:
  callbacks:
    - class_path: lightning_zero3.callbacks.CUDABackendConfig
      init_args: {tf32_matmul: true, deterministic: warn, cufft_plan_cache_size: {0: 8}, cublas_workspace: ":16:8"}
""")
    trainer = LightningCLI(
        BoringModel, run=False, args=["--config", str(tmp_path / "config.yaml")]
    ).trainer
    (config,) = (
        callback for callback in trainer.callbacks if isinstance(callback, CUDABackendConfig)
    )
    config.restore_now()
    assert config.arguments == {
        "tf32_matmul": True,
        "deterministic": "warn",
        "cufft_plan_cache_size": {0: 8},
        "cublas_workspace": ":16:8",
    }


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs one CUDA device")
@pytest.mark.gpu
def test_on_the_gpu(tmp_path):
    """TF32 changes the product, full precision does not; the plan cache has the size."""
    a = torch.randn(512, 512, device="cuda")
    exact = (a.double() @ a.double()).float()
    errors = {}
    for value in (False, True):
        config = CUDABackendConfig(tf32_matmul=value, cufft_plan_cache_size=3)
        config.setup(None, None, "fit")
        errors[value] = (a @ a - exact).abs().max().item()
        assert torch.backends.cuda.cufft_plan_cache[0].max_size == 3
        config.restore_now()
    assert errors[True] > 5 * errors[False]
