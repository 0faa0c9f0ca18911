"""Every exception that kcache raises."""

from __future__ import annotations


class KcacheError(Exception):
    """Base class of every exception that kcache raises on purpose."""


class ConfigError(KcacheError, ValueError):
    """A setting or an argument has a value that is not allowed.

    The message names the setting or argument, the value and what is allowed.
    """


class ArgumentTypeError(ConfigError, TypeError):
    """An argument has a type that is not allowed."""


class UnknownBackendError(KcacheError, LookupError):
    """No backend is registered under the given name."""


class BackendError(KcacheError):
    """A backend could not carry out an operation (disk full, permission denied, ...).

    The engine catches and counts these errors; methods of `KernelCache` do not raise them.
    """


class FullError(BackendError):
    """A backend has no room for a value although the cap allows it (it is fragmented).

    The engine evicts a tenth of the stored bytes and tries once more.
    """


class DiskFullError(FullError):
    """A backend has no room for a value because the disk, or the user's quota, is full.

    The engine also warns, once per process.
    """


class CorruptEntryError(BackendError):
    """Stored bytes are not a valid entry: damaged, truncated, extended or of another key."""


class IncompatibleEntryError(CorruptEntryError):
    """Stored bytes are an undamaged entry of another format version or producer."""


class BundleError(BackendError):
    """A file is not a sound bundle; the message names the file. No part of it is used."""


class CompilerNotFoundError(KcacheError, ImportError):
    """NVRTC is not installed, or can't be used here; the message has the remedy."""


#: How many lines of the compiler's log an error's text includes.
_LOG_LINES = 40


class CompileError(KcacheError):
    """The compiler rejected a kernel, crashed, or took longer than `compile_timeout`.

    Attributes:
        log: the compiler's full log, as text.
        source_name: the name under which the source was compiled.
        result: NVRTC's result code, or None if it is unknown.
        raw_log: the log as NVRTC returned it, its NULs included, or None if it is unknown.
        hint: the remedy, a clause at the end of the text's first line; empty if none is known.

    The first line of the text states the first error. At most 40 lines of the log follow.
    """

    def __init__(
        self,
        message: str,
        *,
        log: str = "",
        source_name: str = "",
        result: int | None = None,
        raw_log: bytes | None = None,
        hint: str = "",
    ) -> None:
        lines = log.splitlines() if "\n" in log else []
        shown = [f"{message}; {hint}" if hint else message, *lines[:_LOG_LINES]]
        if len(lines) > _LOG_LINES:
            shown.append(f"... ({len(lines)} lines; the attribute log has all of them)")
        super().__init__("\n".join(shown))
        self.log = log
        self.source_name = source_name
        self.result = result
        self.raw_log = raw_log
        self.hint = hint


class CompileOptionError(CompileError, ConfigError):
    """The compiler rejected an option or an architecture, not the source."""


class MissError(CompileError):
    """A kernel is not in the cache, and `on_miss="error"` allows no compile; see the message."""


class DropinError(KcacheError):
    """NVRTC can't be answered from the cache in this process or program; see the message."""


class DeviceError(KcacheError):
    """No usable GPU or driver, or the GPU rejected an operation."""


class StaleKernelError(DeviceError):
    """A loaded kernel belongs to a context that no longer exists."""
