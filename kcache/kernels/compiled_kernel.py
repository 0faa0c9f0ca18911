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
#: How many kernels of a module `repr` names.
_SHOWN_NAMES = 3


class _NoSuchNameError(KeyError):
    """A name expression does not exist; the message lists those of the kernel."""

    def __str__(self) -> str:
        return str(self.args[0])  # KeyError shows it in quotes


class _LoweredNames(dict[str, str]):
    """Name expression -> mangled name. The error for a missing name lists the existing ones."""

    __slots__ = ()

    def __missing__(self, name: object) -> str:
        more = did_you_mean(name, self) if isinstance(name, str) else ""
        there = ", ".join(map(repr, self)) or "none: it was compiled without names"
        raise _NoSuchNameError(
            f"{name!r} is not a name expression of this kernel{more}; expected one of: {there}"
        )


class CompiledKernel(NamedTuple):
    """A compiled kernel. Immutable.

    Attributes:
        ptx: PTX, as `bytes` of UTF-8 text (`ptx.decode()` makes a `str` of it) without a NUL at the
            end. None if the target has none (LTOIR).
        cubin: machine code, or None if the target has none (`compute_NN`, LTOIR).
        ltoir: LTOIR, or None unless `lto` was asked for.
        lowered_names: name expression -> mangled name of the kernel.
        log: the log of the compile that made it, warnings included, with the paths of this request.
        key: the key that the kernel is cached under, 64 hexadecimal digits.
        cached: whether it came from the cache.
        compile_seconds: wall time of the compile that made it, in seconds.
        dependencies: absolute paths of the headers that were read from disk, sorted.
        raw_log: the same log in the form of NVRTC, with NULs; None if it is empty or unknown.
        files: the files that nvcc wrote; empty for a kernel of NVRTC.
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
        """Return how to rebuild the kernel, because a read-only mapping can't be pickled."""
        return _made, (dict(self.lowered_names), self._replace(lowered_names={})[:])

    def __repr__(self) -> str:
        """Return names, architecture, sizes and key, never the code."""
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
        """Return the names of all kernels: name expressions, then the names of other kernels."""
        named = {*self.lowered_names.values()}
        own = (name for name in kernels_of(self.ptx, self.cubin) if name not in named)
        return [*self.lowered_names, *own]

    def load(self, device: int | None = None, name: str | None = None) -> LoadedKernel:
        """Return the kernel on a GPU, ready to launch; needs the extra `launch` and a driver.

        It is loaded once for each context of the process, and stays loaded until the process ends.
        Later calls take microseconds.

        Args:
            device: the device's number; None is the current context's device, otherwise device 0.
            name: a name expression that it was compiled with, or a kernel's name in the module
                (mangled, or `extern "C"`); None if the module has only one kernel.

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
        """Return the kernel that a compile just made."""
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
        """Return the entry that holds this kernel; `about` is added to its metadata.

        The entry's log has placeholders for the directories of `search`.
        """
        metadata: dict[str, JSON] = {
            "kind": "kernel",
            "compile_seconds": self.compile_seconds,
            "lowered_names": dict(self.lowered_names),
            "functions": [*self.functions()],
            **about,
        }
        if self.raw_log is not None:  # any bytes, as text for JSON
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
        """Return the kernel in an entry; its log has the directories of `search`.

        Raises:
            CorruptEntryError: the entry is not what `to_entry` makes.
        """
        payload = entry.payload
        files = () if "files" not in entry.metadata else _files(entry)
        if not files and not any(name in payload for name in _OUTPUTS):
            raise CorruptEntryError("the entry holds no kernel")
        outputs = payload.get("ptx"), payload.get("cubin"), payload.get("ltoir")
        lowered, stored = names_and_log(entry)
        names = MappingProxyType(_LoweredNames(lowered))
        log, raw_log = "", None
        if stored:
            raw_log = log_at(search, stored)
            log = text_of_log(raw_log)
        return cls(*outputs, names, log, key, True, entry.cost, dependencies, raw_log, files)


def _files(entry: Entry) -> tuple[File, ...]:
    """Return the files in an entry.

    Raises:
        CorruptEntryError: the entry is not what `to_entry` makes.
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
                raise CorruptEntryError("malformed list of files")
    return tuple(found)


def _made(lowered_names: dict[str, str], fields: tuple[Any, ...]) -> CompiledKernel:
    names = MappingProxyType(_LoweredNames(lowered_names))
    return CompiledKernel(*fields)._replace(lowered_names=names)
