"""LoadedKernel: a kernel on a device, ready to launch."""

from __future__ import annotations

from functools import partial
from typing import Any

from kcache.errors import ArgumentTypeError, ConfigError, DeviceError
from kcache.launch.arguments import address_of, pack
from kcache.launch.contexts import core
from kcache.launch.modules import Module

#: The address of CUDA's default stream (CU_STREAM_LEGACY of cuda.h).
_LEGACY = 1


class LoadedKernel:
    """A kernel on a device, ready to launch. Made by `CompiledKernel.load`.

    Threads: safe to share. Fork: a child can't use it; a launch there raises an error.

    Its code stays loaded until the process ends. The handle is stale, and a launch and `kernel`
    raise StaleKernelError, once `kcache.launch.reset` was called for its device or the driver no
    longer has its context. The driver does not tell if a primary context was reset
    (`cuDevicePrimaryCtxReset`, `cudaDeviceReset`) and created again between two uses. If your
    program does that, call `kcache.launch.reset` afterwards.

    Attributes:
        name: the kernel's name in its module: mangled, unless it is `extern "C"`.
        device: the device's number.
        key: the key of the compiled kernel.
        generation: how often the device's contexts had been reset when the kernel was loaded.
    """

    __slots__ = ("_context", "_function", "device", "generation", "key", "name")

    def __init__(self, module: Module, name: str, key: str) -> None:
        self._function = module.function(name)
        self._context = module.context
        self.name = name
        self.device = module.context.device
        self.key = key
        self.generation = module.context.generation

    @property
    def kernel(self) -> Any:  # noqa: ANN401  optional, and typed by its own stubs
        """cuda.core's `Kernel`, for more: attributes, occupancy, clusters, cooperative launches."""
        with self._context.current():
            return self._function.kernel

    def launch(
        self,
        grid: int | tuple[int, ...],
        block: int | tuple[int, ...],
        *args: object,
        stream: object = None,
        shared_memory: int = 0,
    ) -> None:
        """Launch the kernel; returns at once, the kernel runs in the order of its stream.

        A Python int becomes an integer of the parameter's size, and a Python float a `float` or a
        `double`; both are refused if they do not fit. The driver tells the sizes of the parameters,
        not their types: pass `2.0`, not `2`, for a `float`. numpy and ctypes scalars are passed as
        they are and must have the parameter's size.

        Device memory is a cuda.core `Buffer`, anything with DLPack or `__cuda_array_interface__`,
        an address (int) or None, the null pointer. Its element type, shape and strides are ignored:
        the kernel gets the address of the first element. The caller keeps the memory until the
        kernel is done.

        Args:
            grid: blocks, an int or up to three.
            block: threads per block, an int or up to three.
            args: one value for each parameter.
            stream: a cuda.core `Stream`, anything with `__cuda_stream__`, a stream's address as
                other libraries give it, or None: the default stream of CUDA.
            shared_memory: bytes of dynamic shared memory per block; may exceed 48 KiB.

        Raises:
            StaleKernelError: the kernel's context no longer exists; load the kernel again.
            ConfigError: a value is not allowed; the message names it.
            DeviceError: the driver refused the launch, or an earlier kernel has failed.
        """
        cuda, kernel = core(), self._function.kernel
        with self._context.current():
            order = _as_stream(stream)
            address = partial(address_of, device=self.device, stream=int(order.handle))
            values = pack(self._function.sizes, args, address)
            try:
                config = cuda.LaunchConfig(grid=grid, block=block, shmem_size=shared_memory)
                cuda.launch(order, config, kernel, *values)
            except (TypeError, ValueError, OverflowError) as error:
                raise ConfigError(f"{self.name} can't be launched: {error}") from error
            except Exception as error:  # cuda.core's CUDAError has no public name
                how = f"grid={grid!r}, block={block!r}, shared_memory={shared_memory!r}"
                raise DeviceError(f"{self.name} was not launched with {how}: {error}") from error

    def __repr__(self) -> str:
        return f"LoadedKernel({self.name!r}, device={self.device}, generation={self.generation})"


def _as_stream(stream: Any) -> Any:  # noqa: ANN401  cuda.core's
    """Return a stream as cuda.core's.

    Raises:
        ArgumentTypeError: it is none.
    """
    made = core().Stream
    if isinstance(stream, made):
        return stream
    address = stream.__cuda_stream__()[1] if hasattr(stream, "__cuda_stream__") else stream or 0
    if type(address) is not int or address < 0:
        raise ArgumentTypeError(
            f"stream={stream!r} is not allowed; allowed: a cuda.core Stream, an object with "
            "__cuda_stream__, a stream's address, None"
        )
    return made.from_handle(address or _LEGACY)
