"""LoadedKernel: a kernel on a device, ready to launch."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

from kcache.errors import ArgumentTypeError, ConfigError, DeviceError
from kcache.launch.addresses import address_of
from kcache.launch.arguments import dimensions, pack, shared_bytes, threads_in

if TYPE_CHECKING:
    from kcache.launch.contexts import Context
    from kcache.launch.modules import Function, Module

__all__ = ["LoadedKernel", "core"]

#: The meaning of a stream's address of 0 to 2: the default stream, legacy and per thread (cuda.h).
_LEGACY, _PER_THREAD = 1, 2


@cache
def core() -> Any:  # noqa: ANN401  optional, and typed by its own stubs
    """Return cuda.core.

    Raises:
        DeviceError: it is not installed.
    """
    try:
        return import_module("cuda.core")
    except ImportError as error:
        from kcache.util.distribution import how_to_install

        raise DeviceError(
            "the package cuda-core is missing, which loads and launches kernels: "
            f"{how_to_install('cu13,launch')} (CUDA 12: cu12,launch); {error}"
        ) from error


class LoadedKernel:
    """A kernel on a device, ready to launch. Made by `CompiledKernel.load`.

    Threads: safe to share. Fork: a child can't use it; a launch there raises an error.

    Its module stays loaded as long as the handle lives; keep the handle, too, as long as a CUDA
    graph has its launches. The handle is stale, and every use but of `name`, `device`, `key` and
    `generation` raises StaleKernelError, once `kcache.launch.reset` was called for its device or
    the driver no longer has its context. The driver does not tell if a primary context was reset
    (`cuDevicePrimaryCtxReset`, `cudaDeviceReset`) and created again between two uses. If your
    program does that, call `kcache.launch.reset` afterwards.

    Attributes:
        name: the kernel's name in its module: mangled, unless it is `extern "C"`.
        device: the device's number.
        key: the key of the compiled kernel.
        generation: how often the device's contexts had been reset when the kernel was loaded.
    """

    __slots__ = ("_context", "_function", "_module", "key", "name")

    def __init__(self, module: Module, function: Function, key: str) -> None:
        self._module = module  # keeps it loaded
        self._function = function
        self._context: Context = module.context
        self.name = function.name
        self.key = key

    @property
    def device(self) -> int:
        """The device's number."""
        return self._context.device

    @property
    def generation(self) -> int:
        """How often the device's contexts had been reset when the kernel was loaded."""
        return self._context.generation

    def _fresh(self) -> Function:
        self._context.check()
        return self._function

    @property
    def kernel(self) -> Any:  # noqa: ANN401  optional, and typed by its own stubs
        """cuda.core's `Kernel`, for more features: occupancy, clusters, cooperative launches.

        It works as long as this handle is kept.
        """
        return self._fresh().kernel

    @property
    def max_threads_per_block(self) -> int:
        """The most threads that a block of this kernel can have."""
        return self._fresh().max_threads

    @property
    def registers(self) -> int:
        """Registers per thread."""
        return self._fresh().registers

    @property
    def static_shared_memory(self) -> int:
        """Bytes of shared memory per block that the kernel declares itself."""
        return self._fresh().static_shared

    @property
    def max_shared_memory(self) -> int:
        """The most bytes of dynamic shared memory that a launch can ask for on this device."""
        return self._fresh().most_shared

    @property
    def local_memory(self) -> int:
        """Bytes of memory that each thread spills registers and keeps indexed arrays in."""
        return self._fresh().local

    def launch(
        self,
        grid: int | tuple[int, ...],
        block: int | tuple[int, ...],
        *args: object,
        stream: object = None,
        shared_memory: int = 0,
    ) -> None:
        """Launch the kernel; returns at once, the kernel runs in the order of its stream.

        A Python int or float becomes the type that the kernel declares for the parameter, for
        example a `float`, a `short` or a `long long`, and is refused if it does not fit. The type
        comes from the kernel's PTX. For a kernel that has only a CUBIN, which no compile of kcache
        returns, only the sizes are known. Then an int becomes an integer of the parameter's size,
        and a float a floating-point number. numpy and ctypes scalars are passed as they are and
        must have the parameter's size.

        Device memory is a cuda.core `Buffer`, anything with `__cuda_array_interface__` or DLPack,
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
        context = self._context
        context.check()
        cuda = core()
        size = shared_bytes(shared_memory, context.shared_memory)
        shape = self._block(block)
        config = cuda.LaunchConfig(grid=dimensions("grid", grid), block=shape, shmem_size=size)
        order = self._stream(cuda, stream)
        if context.driver.current() == context.address:
            self._launch(cuda, order, config, args)
        else:
            with context.current():
                self._launch(cuda, order, config, args)

    def _launch(self, cuda: Any, stream: Any, config: Any, args: tuple[object, ...]) -> None:  # noqa: ANN401
        context, function = self._context, self._function

        def address(value: object, where: int) -> int | None:
            return address_of(value, where, context.device, stream)

        values = pack(function.parameters, args, address)
        function.reserve(config.shmem_size)
        try:
            cuda.launch(stream, config, function.kernel, *values)
        except TypeError as error:
            raise ArgumentTypeError(f"{self.name}: {error}") from error
        except Exception as error:  # cuda.core's CUDAError has no public name
            context.check()  # if the context is gone, this says so
            raise DeviceError(f"{self.name} could not be launched: {error}") from error

    def _block(self, block: object) -> tuple[int, int, int]:
        shape = dimensions("block", block)
        if threads_in(shape) > self._function.max_threads:
            raise ConfigError(
                f"block={block!r} is not allowed; allowed for this kernel: "
                f"{self._function.max_threads} threads"
            )
        return shape

    def _stream(self, cuda: Any, stream: object) -> Any:  # noqa: ANN401  cuda.core's
        """Return a stream as cuda.core's.

        Raises:
            ConfigError: it belongs to another context, into which the kernel would be launched.
        """
        if stream is None:
            return cuda.LEGACY_DEFAULT_STREAM
        own = _as_stream(cuda, stream)
        address = int(own.handle)
        context = self._context
        if address > _PER_THREAD and context.driver.context_of_stream(address) != context.address:
            raise ConfigError(
                f"stream={stream!r} is of another context than the kernel, which is on device "
                f"{context.device}"
            )
        return own

    def __repr__(self) -> str:
        return f"LoadedKernel({self.name!r}, device={self.device}, generation={self.generation})"


def _as_stream(cuda: Any, stream: object) -> Any:  # noqa: ANN401  cuda.core's
    """Return a stream as cuda.core's.

    Raises:
        ArgumentTypeError: it is none.
    """
    if isinstance(stream, cuda.Stream):
        return stream
    address: object = stream
    protocol: Any = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        address = cast("tuple[int, object]", protocol() if callable(protocol) else protocol)[1]
    if not isinstance(address, int) or isinstance(address, bool) or address < 0:
        raise ArgumentTypeError(
            f"stream={stream!r} is not allowed; allowed: a cuda.core Stream, an object with "
            "__cuda_stream__, a stream's address, None"
        )
    if address <= _LEGACY:
        return cuda.LEGACY_DEFAULT_STREAM
    if address == _PER_THREAD:
        return cuda.PER_THREAD_DEFAULT_STREAM
    return cuda.Stream.from_handle(address)
