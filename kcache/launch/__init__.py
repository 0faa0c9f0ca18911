"""Loads kernels onto a GPU, each once for each context, and launches them through cuda.core.

This package imports nothing of CUDA by itself. `CompiledKernel.load` first looks for the driver.
"""

from __future__ import annotations

from collections.abc import Mapping

from kcache.errors import ArgumentTypeError, ConfigError
from kcache.launch.loaded_kernel import Code, Context, LoadedKernel, generations, load_module, on

__all__ = ["LoadedKernel", "generation", "reset"]


def load(
    code: tuple[bytes | None, bytes | None, bytes | None],
    key: str,
    names: Mapping[str, str],
    device: int | None,
    name: str | None,
) -> LoadedKernel:
    """Return a kernel on a device, loaded there on the first call; see `CompiledKernel.load`.

    Threads: safe; threads that load the same kernel at the same time load it once.
    """
    if name is not None and not isinstance(name, str):
        raise ArgumentTypeError(f"name: expected None or text, got {name!r}")
    with on(device) as number:
        module = load_module(Context.of(number), key, Code(*code))
        return LoadedKernel(module, _pick(names, name, module.names), key)


def reset(device: int | None = None) -> None:
    """Make every kernel loaded on a device stale; its handles raise StaleKernelError from now on.

    Call it after the device's context was destroyed or created again, while nothing is being
    launched. The context itself is not changed.

    Args:
        device: the device's number; None is the current context's device, or else device 0.

    Raises:
        ConfigError: the device does not exist.
        DeviceError: there is no driver or no GPU.
    """
    with on(device) as number:
        generations[number] += 1


def generation(device: int | None = None) -> int:
    """Return how often the contexts of a device were reset.

    Raises:
        ConfigError: the device does not exist.
        DeviceError: there is no driver or no GPU.
    """
    with on(device) as number:
        return generations[number]


def _pick(lowered: Mapping[str, str], name: str | None, kernels: list[str]) -> str:
    """Return the name of the kernel to load from a module; `name` is what the caller passed.

    Raises:
        ConfigError: no name was passed, and the module does not have exactly one kernel.
    """
    if name is not None:
        return lowered.get(name, name)
    only = list(lowered.values()) or kernels
    if len(only) == 1:
        return only[0]
    own = [kernel for kernel in kernels if kernel not in lowered.values()]
    found = (*lowered, *own)
    listed = ", ".join(found) or "none"
    raise ConfigError(f"name: the module has {len(found)} kernels; expected one of {listed}")
