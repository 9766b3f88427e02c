"""`CUDABackendConfig`: sets precision, workspaces, caches and debugging of CUDA's libraries."""

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.fabric.utilities.rank_zero import WarningCache
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from typing_extensions import override

from .allocator.environment import EnvironmentChange

_WORKSPACE = re.compile(r"(:[0-9]+:[0-9]+)+")
DETERMINISTIC_WORKSPACES = (":4096:8", ":16:8")  # those that cuBLAS documents as reproducible


@dataclass(frozen=True)
class Setting:
    """A switch of torch: its name, the value to set, and functions that read and write it."""

    name: str
    value: Any
    read: Callable[[], Any]
    write: Callable[[Any], None]


class CUDABackendConfig(Callback):
    """Sets switches of torch's CUDA backends for the run, logs them in one line, puts them back.

    The constructor sets environment variables, so that launched processes inherit them; create the
    callback before anything touches the GPU. `setup` sets torch's own switches in every process
    when the run starts. An argument that is None changes nothing. Unlike the other callbacks this
    one may change the numbers of the training: TF32 and reduced-precision reductions round
    differently.

    Args:
        tf32_matmul: fp32 matrix products in TF32 (True) or full precision (False). Both of torch's
            interfaces are kept in step, so that code reading either sees this value.
        tf32_cudnn: the same for cuDNN's convolutions and recurrent layers.
        fp16_reduced_precision_reduction: let fp16 matrix products sum in fp16.
        fp16_split_k: let fp16 products split the summed dimension; needs
            `fp16_reduced_precision_reduction`.
        bf16_reduced_precision_reduction: let bf16 matrix products sum in bf16.
        bf16_split_k: let bf16 products split the summed dimension; needs
            `bf16_reduced_precision_reduction`.
        fp16_accumulation: let fp16 matrix products accumulate in fp16 throughout.
        cublas_workspace: `CUBLAS_WORKSPACE_CONFIG`: ":SIZE_IN_KIB:COUNT", repeated; ":0:0" for
            none.
        cufft_plan_cache_size: plans cached on every device, or {device index: plans}; 0 for none.
        kernel_cache: whether torch keeps kernels that it compiles at run time on disk.
        kernel_cache_path: folder for these kernels; created if it is missing.
        nvml_check: look for GPUs through NVML, which does not start CUDA
            (`PYTORCH_NVML_BASED_CUDA_CHECK`).
        deterministic: "on" or True raises where an operation has no reproducible form, "warn"
            warns, "off" or False.
        launch_blocking: wait for every kernel (`CUDA_LAUNCH_BLOCKING`), so that errors show where
            they happen; slow, for debugging.
        restore: put everything back at teardown.
    """

    def __init__(
        self,
        *,
        tf32_matmul: bool | None = None,
        tf32_cudnn: bool | None = None,
        fp16_reduced_precision_reduction: bool | None = None,
        fp16_split_k: bool | None = None,
        bf16_reduced_precision_reduction: bool | None = None,
        bf16_split_k: bool | None = None,
        fp16_accumulation: bool | None = None,
        cublas_workspace: str | None = None,
        cufft_plan_cache_size: int | dict[int, int] | None = None,
        kernel_cache: bool | None = None,
        kernel_cache_path: str | None = None,
        nvml_check: bool | None = None,
        deterministic: Literal["off", "warn", "on"] | bool | None = None,
        launch_blocking: bool | None = None,
        restore: bool = True,
    ) -> None:
        if isinstance(deterministic, bool):  # as YAML reads "on" and "off"
            deterministic = "on" if deterministic else "off"
        # before any other local exists
        self._said = WarningCache()  # a fit and a test after it tell the same once
        self.arguments = {
            name: value
            for name, value in locals().items()
            if value is not None and name not in ("self", "restore", "__class__")
        }
        self.restore = restore
        _check_types(self.arguments)
        _check_workspace(cublas_workspace, deterministic)
        _check_cufft(cufft_plan_cache_size)
        for name, base in (("fp16_split_k", "fp16"), ("bf16_split_k", "bf16")):
            if (
                self.arguments.get(name) is not None
                and f"{base}_reduced_precision_reduction" not in self.arguments
            ):
                raise ValueError(
                    f"{name}: torch sets it only together with {base}_reduced_precision_reduction;"
                    " set both"
                )
        if kernel_cache_path is not None and kernel_cache is False:
            raise ValueError(
                "kernel_cache_path: has no effect with kernel_cache=False; leave one of them out"
            )
        self._change = EnvironmentChange()
        self._before: list[tuple[Setting, Any]] = []
        self._set_environment()

    # ---- environment -------------------------------------------------------------------------

    def _variables(self) -> dict[str, str]:
        arguments, variables = self.arguments, {}
        for option, name in (
            ("kernel_cache", "USE_PYTORCH_KERNEL_CACHE"),
            ("nvml_check", "PYTORCH_NVML_BASED_CUDA_CHECK"),
            ("launch_blocking", "CUDA_LAUNCH_BLOCKING"),
        ):
            if option in arguments:
                variables[name] = "1" if arguments[option] else "0"
        if "kernel_cache_path" in arguments:
            variables["PYTORCH_KERNEL_CACHE_PATH"] = str(
                Path(arguments["kernel_cache_path"]).resolve()
            )
        if "cublas_workspace" in arguments:
            variables["CUBLAS_WORKSPACE_CONFIG"] = arguments["cublas_workspace"]
        elif arguments.get("deterministic") in ("on", "warn"):
            # With another workspace cuBLAS is not reproducible, and torch raises at the first
            # matrix product.
            if os.environ.get("CUBLAS_WORKSPACE_CONFIG") not in DETERMINISTIC_WORKSPACES:
                variables["CUBLAS_WORKSPACE_CONFIG"] = DETERMINISTIC_WORKSPACES[0]
        return variables

    def _set_environment(self) -> None:
        variables = self._variables()
        for name in ("CUDA_LAUNCH_BLOCKING", "CUBLAS_WORKSPACE_CONFIG"):
            is_late = (
                name in variables
                and torch.cuda.is_initialized()
                and os.environ.get(name) != variables[name]
            )
            if is_late:
                raise RuntimeError(
                    f"{name}={variables[name]} comes too late: CUDA has started in this process and"
                    " reads it once. Create the callback before anything touches the GPU, or set"
                    " the variable in the shell."
                )
        if "PYTORCH_KERNEL_CACHE_PATH" in variables:
            # torch silently keeps no cache where the folder is missing.
            Path(variables["PYTORCH_KERNEL_CACHE_PATH"]).mkdir(parents=True, exist_ok=True)
        for name, text in variables.items():
            self._change.set(os.environ, name, text)

    # ---- torch's switches --------------------------------------------------------------------

    def settings(self) -> list[Setting]:
        """Return the switches that the arguments ask for and this process has."""
        settings = [*self._precision_settings()]
        if "deterministic" in self.arguments:
            mode = {"off": 0, "warn": 1, "on": 2}[self.arguments["deterministic"]]
            settings.append(
                Setting(
                    "deterministic",
                    mode,
                    torch.get_deterministic_debug_mode,
                    torch.set_deterministic_debug_mode,
                )
            )
        return [*settings, *self._cufft_settings()]

    def _precision_settings(self) -> list[Setting]:
        matmul, settings = torch.backends.cuda.matmul, []
        if "tf32_matmul" in self.arguments:
            value = "tf32" if self.arguments["tf32_matmul"] else "ieee"
            settings.append(Setting("tf32_matmul", value, _read_tf32_matmul, _write_tf32_matmul))
        if "tf32_cudnn" in self.arguments:
            settings.append(
                Setting(
                    "tf32_cudnn", self.arguments["tf32_cudnn"], _read_tf32_cudnn, _write_tf32_cudnn
                )
            )
        for kind in ("fp16", "bf16"):
            name = f"{kind}_reduced_precision_reduction"
            if name in self.arguments:
                pair = (self.arguments[name], self.arguments.get(f"{kind}_split_k", True))
                settings.append(Setting(name, pair, *_access_reduction(f"allow_{name}")))
        if "fp16_accumulation" in self.arguments:
            settings.append(
                Setting(
                    "fp16_accumulation",
                    self.arguments["fp16_accumulation"],
                    lambda: matmul.allow_fp16_accumulation,
                    lambda value: setattr(matmul, "allow_fp16_accumulation", value),
                )
            )
        return settings

    def _cufft_settings(self) -> list[Setting]:
        sizes = self.arguments.get("cufft_plan_cache_size")
        if sizes is None or not torch.cuda.is_available():
            return []
        devices = range(torch.cuda.device_count())
        wanted = dict.fromkeys(devices, sizes) if isinstance(sizes, int) else sizes
        if missing := sorted(set(wanted) - set(devices)):
            raise ValueError(
                f"cufft_plan_cache_size: no devices {missing}, this process sees {len(devices)}"
            )
        return [
            Setting(f"cufft_plan_cache_size[{device}]", size, *_access_cufft_cache(device))
            for device, size in wanted.items()
        ]

    # ---- hooks -------------------------------------------------------------------------------

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if not self._change.written:  # the teardown of an earlier run has put the environment back
            self._set_environment()
        for setting in self.settings():
            self._before.append((setting, setting.read()))
            setting.write(setting.value)
            if setting.read() != setting.value:
                raise RuntimeError(
                    f"CUDABackendConfig: {setting.name}={setting.value} did not take effect, torch"
                    f" says {setting.read()}; leave the option out with this torch"
                )
        self._said.info(self.describe())

    def describe(self) -> str:
        """Return the line that `setup` logs."""
        parts = [f"{name}={value}" for name, value in self.arguments.items()]
        parts += [f"{name}={text}" for name, text in self._change.written.items()]
        where = "" if torch.cuda.is_available() else " (no CUDA here: without effect)"
        return f"CUDABackendConfig: {', '.join(parts) or 'nothing asked for'}{where}"

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self.restore:
            self.restore_now()

    def restore_now(self) -> None:
        """Put back the switches, the last one first, and the environment."""
        while self._before:
            setting, value = self._before.pop()
            setting.write(value)
        for name in self._change.undo(os.environ):
            rank_zero_warn(
                f"CUDABackendConfig: {name} was changed by someone else meanwhile and is left as"
                " it is"
            )

    def __getstate__(self) -> dict[str, Any]:
        # The process that set the switches puts them back, and closures cannot be pickled.
        return {**self.__dict__, "_before": []}


def _check_types(arguments: dict[str, Any]) -> None:
    words = ("cublas_workspace", "cufft_plan_cache_size", "kernel_cache_path", "deterministic")
    for name, value in arguments.items():
        if name not in words and not isinstance(value, bool):
            raise ValueError(f"{name}: expected True or False, got {value!r}")
    value = arguments.get("deterministic", "off")
    if value not in ("off", "warn", "on"):
        raise ValueError(f"deterministic: expected off, warn or on, got {value!r}")


def _check_workspace(workspace: str | None, deterministic: str | None) -> None:
    if workspace is None:
        return
    if not isinstance(workspace, str) or not _WORKSPACE.fullmatch(workspace):
        raise ValueError(
            "cublas_workspace: expected :SIZE_IN_KIB:COUNT, once or repeated, such as"
            f" :4096:2:16:8; got {workspace!r}"
        )
    if deterministic in ("on", "warn") and workspace not in DETERMINISTIC_WORKSPACES:
        allowed = " or ".join(DETERMINISTIC_WORKSPACES)
        raise ValueError(
            f"cublas_workspace: deterministic={deterministic!r} needs {allowed}, got {workspace!r}"
        )


def _check_cufft(sizes: int | dict[int, int] | None) -> None:
    values = sizes.values() if isinstance(sizes, dict) else [0 if sizes is None else sizes]
    for size in values:
        if not isinstance(size, int) or isinstance(size, bool) or size < 0:
            raise ValueError(
                f"cufft_plan_cache_size: expected a whole number of plans, at least 0, got {size!r}"
            )


# torch has two interfaces to TF32. After a write to the newer one alone torch raises at a read of
# the older one ("mix of the legacy and new APIs"), and Lightning's `_check_cuda_matmul_precision`
# reads it when it sets up a GPU. So we write the older one first and then the newer one with the
# same meaning, which keeps both readable.


def _read_tf32_matmul() -> str:
    return torch.backends.cuda.matmul.fp32_precision


def _write_tf32_matmul(value: str) -> None:
    # both agree again, whatever was written before
    torch.backends.cuda.matmul.fp32_precision = "none"
    torch.backends.cuda.matmul.allow_tf32 = value == "tf32"
    torch.backends.cuda.matmul.fp32_precision = value


def _read_tf32_cudnn() -> bool:
    # torch makes `conv` when it is imported; its stub lacks it
    return torch.backends.cudnn.conv.fp32_precision == "tf32"  # type: ignore[attr-defined]


def _write_tf32_cudnn(value: bool) -> None:
    # This sets convolutions and recurrent layers in both interfaces.
    torch.backends.cudnn.allow_tf32 = value


def _access_reduction(attribute: str) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    matmul = torch.backends.cuda.matmul

    def read() -> tuple[bool, bool]:
        return getattr(matmul, attribute), getattr(matmul, f"{attribute}_split_k", True)

    def write(value: tuple[bool, bool]) -> None:
        setattr(matmul, attribute, value)

    return read, write


def _access_cufft_cache(device: int) -> tuple[Callable[[], int], Callable[[int], None]]:
    cache = torch.backends.cuda.cufft_plan_cache[device]
    return lambda: cache.max_size, lambda size: setattr(cache, "max_size", size)
