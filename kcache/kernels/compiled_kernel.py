"""CompiledKernel: the result of a compile, or the same result from the cache."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from kcache.entry import Entry
from kcache.errors import CorruptEntryError
from kcache.gpu_code import arch_of, kernels_of
from kcache.nvrtc import names_and_log, text_of_log
from kcache.nvrtc.places import log_at, portable_log
from kcache.util.forks import importing
from kcache.util.hints import did_you_mean
from kcache.util.units import format_size

if TYPE_CHECKING:
    from kcache.entry import JSON
    from kcache.launch import LoadedKernel
    from kcache.nvrtc.artifact import File
    from kcache.nvrtc.compiler import Compiled
    from kcache.nvrtc.search import HeaderSearch

_OUTPUTS = ("ptx", "cubin", "ltoir")
#: Maximum number of kernels of a module that `repr` names.
_SHOWN_NAMES = 3


class _NoSuchNameError(KeyError):
    """A name expression is unknown; the message lists the name expressions of the kernel."""

    def __str__(self) -> str:
        return str(self.args[0])  # KeyError shows it in quotes


class _LoweredNames(dict[str, str]):
    """Name expression -> mangled name. The error for a missing name lists the existing ones."""

    __slots__ = ()

    def __missing__(self, name: object) -> str:
        more = did_you_mean(name, self) if isinstance(name, str) else ""
        there = ", ".join(map(repr, self))
        hint = f"expected one of: {there}" if there else "it was compiled without name expressions"
        raise _NoSuchNameError(f"{name!r} is not a name expression of this kernel{more}; {hint}")


class CompiledKernel(NamedTuple):
    """A compiled kernel. Immutable.

    Attributes:
        ptx: PTX, as `bytes` of UTF-8 text without a trailing NUL (`ptx.decode()` returns a `str`).
            None if the compile produced no PTX, such as with the option `lto`.
        cubin: machine code. None if the compile produced none, such as for the target `compute_NN`
            or with the option `lto`.
        ltoir: LTOIR. None unless the option `lto` was set.
        lowered_names: name expression -> mangled name of the kernel.
        log: the log of the compile that produced the kernel, including warnings. Paths in the log
            are those of this request, even if the kernel was compiled in another directory.
        key: the key that the kernel is cached under, 64 hexadecimal digits.
        cached: whether the kernel came from the cache.
        compile_seconds: wall time of the compile that produced the kernel, in seconds.
        dependencies: absolute paths of the headers that were read from disk, sorted.
        raw_log: the same log as `log`, but as the bytes that NVRTC returns, including NULs. None if
            the log is empty or unknown.
        files: the files that nvcc wrote; empty if NVRTC compiled the kernel.
    """

    ptx: bytes | None
    cubin: bytes | None
    ltoir: bytes | None
    lowered_names: Mapping[str, str]
    log: str
    key: str
    cached: bool
    compile_seconds: float
    dependencies: tuple[str, ...] = ()
    raw_log: bytes | None = None
    files: tuple[File, ...] = ()

    def __reduce__(self) -> tuple[Any, ...]:
        """Return the data for `pickle`.

        In the data, the names are in a dict, because a read-only mapping can't be pickled.
        """
        return _made, (dict(self.lowered_names), self._replace(lowered_names={})[:])

    def __repr__(self) -> str:
        """Return a text with the names, architecture, sizes and key of the kernel, but no code."""
        return f"{type(self).__name__}({', '.join(self._described())})"

    def _described(self) -> Iterator[str]:
        names = self.functions()
        yield from map(repr, names[:_SHOWN_NAMES])
        if len(names) > _SHOWN_NAMES:
            yield f"and {len(names) - _SHOWN_NAMES} more"
        arch = arch_of(self.ptx)
        if arch is not None:
            yield f"arch={arch!r}"
        yield from (f"{name}={format_size(len(data))}" for name, data in self._outputs().items())
        yield f"cached={self.cached}"
        yield f"key={self.key[:12]!r}"

    def functions(self) -> list[str]:
        """Return all kernels of the module: the name expressions, then the names of the others."""
        named = {*self.lowered_names.values()}
        own = (name for name in kernels_of(self.ptx, self.cubin) if name not in named)
        return [*self.lowered_names, *own]

    def load(self, device: int | None = None, name: str | None = None) -> LoadedKernel:
        """Load the kernel onto a GPU, and return it ready to launch.

        This needs the extra `launch` and a driver. The kernel is loaded once for each context of
        the process, and stays loaded until the process ends. Later calls take microseconds.

        Args:
            device: the number of the device; None for the device of the current context, or device
                0 if there is no current context.
            name: a name expression that the kernel was compiled with, or a kernel's name in the
                module (mangled, or `extern "C"`); None if the module has only one kernel.

        Raises:
            ConfigError: the device or the kernel does not exist; the message lists those that do.
            DeviceError: there is no driver or no GPU, cuda-core is missing, or the driver rejects
                the kernel, for example because it is for another architecture. The message has the
                reason.
        """
        with importing:
            from kcache.launch import load  # noqa: PLC0415  4 ms

        code = self.cubin, self.ptx, self.ltoir
        return load(code, self.key, self.lowered_names, device, name)

    @classmethod
    def of(cls, compiled: Compiled, key: str, dependencies: tuple[str, ...] = ()) -> CompiledKernel:
        """Return the kernel that a compile has just produced, to be stored under `key`."""
        artifact = compiled.artifact
        return cls(
            artifact.ptx,
            artifact.cubin,
            artifact.ltoir,
            MappingProxyType(_LoweredNames(artifact.lowered_names)),
            artifact.log,
            key,
            False,
            artifact.seconds,
            dependencies,
            artifact.raw_log,
            artifact.files,
        )

    def to_entry(self, about: Mapping[str, JSON], search: HeaderSearch) -> Entry:
        """Return the entry that contains this kernel; its metadata also contains `about`.

        In the entry's log, placeholders replace the directories of `search`.
        """
        metadata: dict[str, JSON] = {
            "kind": "kernel",
            "compile_seconds": self.compile_seconds,
            "lowered_names": dict(self.lowered_names),
            "functions": [*self.functions()],
            **about,
        }
        if self.raw_log is not None:  # JSON needs text, but the log may have any bytes
            metadata["log"] = portable_log(search, self.raw_log).decode("latin-1")
        payload = self._outputs()
        if self.files:
            metadata["files"] = [[*file[:4]] for file in self.files]
            payload |= {f"file{n}": file.content for n, file in enumerate(self.files)}
        return Entry(payload, metadata)

    def _outputs(self) -> dict[str, bytes]:
        found = {name: getattr(self, name) for name in _OUTPUTS}
        return {name: data for name, data in found.items() if data is not None}

    @classmethod
    def from_entry(
        cls, entry: Entry, key: str, dependencies: tuple[str, ...], search: HeaderSearch
    ) -> CompiledKernel:
        """Return the kernel in `entry`.

        In its log, the directories of `search` replace the placeholders.

        Raises:
            CorruptEntryError: `entry` does not have the form that `to_entry` returns.
        """
        payload = entry.payload
        files = () if "files" not in entry.metadata else _files(entry)
        if not files and not any(name in payload for name in _OUTPUTS):
            raise CorruptEntryError("the entry contains no kernel")
        outputs = payload.get("ptx"), payload.get("cubin"), payload.get("ltoir")
        lowered, stored = names_and_log(entry)
        names = MappingProxyType(_LoweredNames(lowered))
        log, raw_log = "", None
        if stored:
            raw_log = log_at(search, stored)
            log = text_of_log(raw_log)
        return cls(*outputs, names, log, key, True, entry.cost, dependencies, raw_log, files)


def _files(entry: Entry) -> tuple[File, ...]:
    """Return the files of nvcc that are stored in `entry`.

    Raises:
        CorruptEntryError: the list of files does not have the form that `to_entry` returns.
    """
    with importing:
        from kcache.nvrtc.artifact import File, Form  # noqa: PLC0415  1 ms

    listed = entry.metadata["files"]
    found: list[File] = []
    for number, each in enumerate(listed if isinstance(listed, list) else ()):
        content = entry.payload.get(f"file{number}")
        match each:
            case [str(path), int(mode), bool(is_new), int(form)] if (
                content is not None and 0 <= form <= 2
            ):
                found.append(File(path, mode & 0o777, is_new, Form(form), content))
            case _:
                raise CorruptEntryError("the entry's list of files is malformed")
    return tuple(found)


def _made(lowered_names: dict[str, str], fields: tuple[Any, ...]) -> CompiledKernel:
    names = MappingProxyType(_LoweredNames(lowered_names))
    return CompiledKernel(*fields)._replace(lowered_names=names)
