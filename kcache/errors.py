"""Errors: the exceptions of kcache."""

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
    """No installed backend has the given name."""


class BackendError(KcacheError):
    """A backend could not carry out an operation, for example because permission was denied.

    The engine catches and counts these errors, so that no method of `KernelCache` raises them.
    """


class FullError(BackendError):
    """A backend has no room for a value although its size is allowed by the cap.

    Free space can be too fragmented, for example. The engine evicts a tenth of the stored bytes and
    tries once more.
    """


class DiskFullError(FullError):
    """A backend has no room for a value because the disk is full or the user's quota is used up.

    The engine does the same as for a FullError, and logs a warning once per process.
    """


class CorruptEntryError(BackendError):
    """The bytes under a key are not a valid entry: they are damaged, or belong to another key."""


class IncompatibleEntryError(CorruptEntryError):
    """The bytes under a key are an undamaged entry, but of another format version or producer."""


class BundleError(BackendError):
    """A file is not a valid bundle. The message names the file. No part of the file is used."""


class CompilerNotFoundError(KcacheError, ImportError):
    """NVRTC is not installed, or can't be used here. The message says what to do."""


#: How many lines of the compiler's log the text of an error includes at most.
_LOG_LINES = 40


class CompileError(KcacheError):
    """The compiler rejected a kernel, crashed, or took longer than `compile_timeout`.

    Attributes:
        log: the compiler's full log, as text.
        source_name: the name under which the source was compiled.
        result: NVRTC's result code, or None if it is unknown.
        raw_log: the log as NVRTC returned it, including NUL characters, or None if it is unknown.
        hint: what to do about the error; empty if that is not known.

    The first line of the error's text states the first error, followed by the hint. After that
    come at most 40 lines of the log.
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
            shown.append(f"... (the log has {len(lines)} lines; all are in the attribute log)")
        super().__init__("\n".join(shown))
        self.log = log
        self.source_name = source_name
        self.result = result
        self.raw_log = raw_log
        self.hint = hint


class CompileOptionError(CompileError, ConfigError):
    """The compiler rejected an option or an architecture, not the source."""


class MissError(CompileError):
    """A kernel is not in the cache, and is not compiled because of `on_miss="error"`.

    The message has the reason of the miss.
    """


class DropinError(KcacheError):
    """kcache can't answer calls of NVRTC in this process or program; the message has the reason."""


class DeviceError(KcacheError):
    """Either there is no usable GPU or driver, or the GPU rejected an operation."""


class StaleKernelError(DeviceError):
    """A loaded kernel belongs to a context that no longer exists."""
