"""Config: all settings. Each is from an argument, the environment, `kcache.json` or a default.

Of all Python modules, only this one, `kcache.environment` and `kcache.dropin.run_environment` read
the environment.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from kcache.backend import require_backend
from kcache.environment import REMOTE_TOKEN
from kcache.errors import ConfigError, UnknownBackendError
from kcache.util.forks import importing
from kcache.util.hints import did_you_mean, nearest
from kcache.util.units import parse_flag, parse_seconds, parse_size

if TYPE_CHECKING:
    from kcache.remote.address import Address

T = TypeVar("T")

DEFAULT_MAX_SIZE = 1 << 30
DEFAULT_MEMORY_SIZE = 64 << 20
#: Seconds to wait for another process's compile before compiling alone. CUTLASS and FlashAttention
#: kernels take some minutes. Without a limit, a stopped process would block the others for ever.
DEFAULT_WAIT = 300.0

#: The largest cap, 1 EiB; a larger value is reduced to this. No file system is larger, and sums of
#: sizes then stay below 2**63.
_MAX_BYTES = 1 << 60


def _parse_choice(value: str, *, name: str, allowed: tuple[str, ...]) -> str:
    text = value.strip().lower() if isinstance(value, str) else value  # pyright: ignore
    if text not in allowed:
        raise ConfigError(f"{name}: expected one of {', '.join(allowed)}, got {value!r}")
    return text


def _parse_cap(value: str | int, *, name: str) -> int:
    return min(parse_size(value, name=name, least=1), _MAX_BYTES)


def _parse_workers(value: str | int, *, name: str) -> int:
    text = str(value).strip()
    if isinstance(value, bool) or not (text.isascii() and text.isdecimal() and len(text) < 5):
        raise ConfigError(f"{name}: expected a number of processes from 0, got {value!r}")
    return int(text)


def parse_directory(value: str | os.PathLike[str], *, name: str) -> str:
    """Return `value` as an absolute path; raise ConfigError if it is not a path.

    `name` is the name of the setting or variable that has this value; the errors mention it.
    """
    text = os.fspath(value) if isinstance(value, (str, os.PathLike)) else None  # pyright: ignore[reportUnnecessaryIsInstance]
    if not isinstance(text, str) or not text.strip() or "\0" in text:  # pyright: ignore
        raise ConfigError(f"{name}: expected a non-empty path, got {value!r}")
    expanded = os.path.expanduser(text)
    if expanded.startswith("~"):
        raise ConfigError(
            f"{name}: expected a path, got {value!r}, and the home directory that its ~ stands for "
            "does not exist; if the ~ is part of a name, write ./~"
        )
    try:
        return os.path.abspath(expanded)  # only once, because the working directory may change
    except OSError as error:
        raise ConfigError(
            f"{name}: expected an absolute path, because the working directory does not exist, "
            f"got {value!r}"
        ) from error


def _parse_key_file(value: str | os.PathLike[str], *, name: str) -> str:
    """Return `value` as an absolute path, or `value` as text if it is not a path.

    A text that is not a path is not replaced by the default (no key file), because then kernels
    without a signature would be accepted. The text can't be read as a key file, so no kernel from
    elsewhere is accepted.
    """
    try:
        return parse_directory(value, name=name)
    except ConfigError:
        return str(value)


def _parse_remote(value: object, *, name: str) -> tuple[Address, ...]:
    if not value:
        return ()
    with importing:
        from kcache.remote.address import parse_addresses  # noqa: PLC0415  3 ms

    return parse_addresses(value, name=name)


class Setting(NamedTuple, Generic[T]):
    """The value of a setting, and its source.

    The source is `argument`, the name of an environment variable, `kcache.json` or `default`.
    """

    value: T
    source: str


class Variable(NamedTuple):
    """An environment variable that kcache reads.

    Attributes:
        setting: the field of `Config` that the variable sets.
        allowed: the allowed values, in words.
        meaning: what the setting does, in words.
        parse: converts a text or an argument to the setting's value; raises ConfigError.
        default: the setting's value if neither an argument nor the variable sets one.
    """

    setting: str
    allowed: str
    meaning: str
    parse: Callable[..., Any]
    default: object = None

    @property
    def name(self) -> str:
        """The name of the variable: `KCACHE_` and the setting's name, or `KCACHE_DIR`."""
        return "KCACHE_DIR" if self.setting == "directory" else f"KCACHE_{self.setting.upper()}"


def _flag(setting: str, meaning: str) -> Variable:
    """Return the variable for a setting that is either on or off, and off by default."""
    return Variable(setting, "1 or 0", meaning, parse_flag, False)


def _choice(
    setting: str, words: tuple[str, ...], meaning: str, default: str | None = None
) -> Variable:
    """Return the variable for a setting whose value is one of `words`."""
    allowed = f"{', '.join(words[:-1])} or {words[-1]}"
    return Variable(setting, allowed, meaning, partial(_parse_choice, allowed=words), default)


VARIABLES: tuple[Variable, ...] = (
    Variable(
        "backend",
        "file, zstd, lmdb, zstd+lmdb, or a name that another package registers",
        "The backend that stores the entries.",
        require_backend,
        "file",
    ),
    Variable(
        "directory",
        "a path",
        "The directory of the cache. By default, it is in the user's cache directory; without a "
        "home directory, `$TMPDIR/kcache-UID`.",
        parse_directory,
    ),
    Variable(
        "max_size",
        "bytes, or a size such as 512MB or 2GiB",
        "The cap. The stored bytes never exceed the cap; with the backends file and zstd, each "
        "concurrent writer may exceed it by one entry.",
        _parse_cap,
        DEFAULT_MAX_SIZE,
    ),
    Variable(
        "memory_size",
        "bytes, or a size; 0 switches it off",
        "The size of the memory tier in each process.",
        parse_size,
        DEFAULT_MEMORY_SIZE,
    ),
    _flag("read_only", "Use the entries that are there, and write nothing."),
    _flag("disable", "Compile every time, and neither read nor write the cache."),
    _flag("recache", "Compile every time, and replace the entries that are there."),
    _choice(
        "header_check",
        ("always", "once"),
        "Check the headers on every request, or once per process.",
        "always",
    ),
    _choice(
        "relocation",
        ("on", "off"),
        "Whether a kernel that shows no path may be used in another directory, container or "
        "machine.",
        "on",
    ),
    Variable(
        "wait",
        "seconds; with 0, never wait",
        "The time limit of a wait while another thread or process compiles the same kernel.",
        parse_seconds,
        DEFAULT_WAIT,
    ),
    Variable(
        "workers",
        "a number; with 0, the program compiles in its own process, and the results are not cached",
        "How many compiles may run at a time. Each runs in a separate process.",
        _parse_workers,
    ),
    Variable(
        "compile_timeout",
        "seconds",
        "The time limit of one compile.",
        partial(parse_seconds, zero=False),
    ),
    _choice(
        "on_miss",
        ("compile", "error"),
        "Compile a kernel that is not in the cache, or fail with the reason.",
        "compile",
    ),
    Variable(
        "signing_key_file",
        "a path",
        "The keys that sign kernels for other machines. Unsigned kernels from there are not used.",
        _parse_key_file,
    ),
    Variable(
        "remote",
        "addresses, with spaces or commas between them",
        "Layers and remotes, asked in this order before a kernel is compiled.",
        _parse_remote,
        (),
    ),
    Variable(
        "record",
        "a path",
        "A file to record every requested kernel in, for kcache warm.",
        parse_directory,
    ),
    _choice(
        "log",
        ("debug", "info", "warning", "error"),
        "Log messages of this level and above to standard error.",
    ),
)


#: The settings that can be saved in a cache's directory. Of the others, some are for one run of a
#: program (read_only, disable, recache, on_miss, record, log). The rest decide whose kernels are
#: trusted and who gets this user's kernels (remote, signing_key_file).
SAVED = (
    *("backend", "max_size", "memory_size", "header_check", "relocation"),
    *("wait", "workers", "compile_timeout"),
)

#: The prefix of the variables that `kcache run` sets for the program that it starts.
_OF_DROPIN = "KCACHE_DROPIN_"
_PREFIX = "KCACHE_"


class Config(NamedTuple):
    """Every setting with its source. `VARIABLES` describes what each setting means.

    `directory` is None if neither an argument nor the environment names a directory. Then the cache
    uses the first default directory that is usable.
    """

    backend: Setting[str]
    directory: Setting[str | None]
    max_size: Setting[int]
    memory_size: Setting[int]
    read_only: Setting[bool]
    disable: Setting[bool]
    recache: Setting[bool]
    header_check: Setting[str]
    relocation: Setting[str]
    wait: Setting[float]
    workers: Setting[int | None]
    compile_timeout: Setting[float | None]
    on_miss: Setting[str]
    signing_key_file: Setting[str | None]
    remote: Setting[tuple[Address, ...]]
    record: Setting[str | None]
    log: Setting[str | None]

    @classmethod
    def load(
        cls,
        arguments: Mapping[str, object] | None = None,
        *,
        environ: Mapping[str, str] | None = None,
        complain: Callable[[str], object] | None = None,
    ) -> Config:
        """Return each setting from `arguments`, or else from the environment, or else its default.

        An argument that is None counts as not given. If `complain` is given, a variable whose value
        is not allowed is ignored, and `complain` is called with a sentence about it. If this
        variable is `KCACHE_DIR`, the setting `directory` is None with the source `KCACHE_DIR`.
        `complain` is also called for each variable whose name looks like a misspelt name of one of
        kcache's variables.

        Raises:
            ConfigError: the value of an argument is not allowed; without `complain`, also: the
                value of a variable is not allowed.
            UnknownBackendError: such a value names a backend that is not installed.
        """
        environment = os.environ if environ is None else environ
        if complain is not None:
            for name, meant in unknown_variables(environment).items():
                if meant:
                    complain(f"kcache has no setting {name} (did you mean {meant!r}?)")
        settings: dict[str, Setting[Any]] = {}
        for variable in VARIABLES:
            name = variable.setting
            argument, text = (arguments or {}).get(name), environment.get(variable.name)
            if argument is not None:
                settings[name] = Setting(variable.parse(argument, name=name), "argument")
            elif text:
                settings[name] = _from_variable(variable, text, complain)
            else:
                settings[name] = Setting(variable.default, "default")
        return cls(**settings)

    @property
    def layers(self) -> tuple[Address, ...]:
        """Those addresses in the setting `remote` that are layers: directories and bundles."""
        return tuple(each for each in self.remote.value if each.kind == "layer")

    @property
    def remotes(self) -> tuple[Address, ...]:
        """Those addresses in the setting `remote` that are not layers, such as HTTP servers."""
        return tuple(each for each in self.remote.value if each.kind != "layer")

    @property
    def forbids_writing(self) -> bool:
        """Whether the settings forbid changes to the cache: `read_only` or `disable` is on."""
        return self.read_only.value or self.disable.value

    def with_saved(
        self, saved: Mapping[str, object], path: str, complain: Callable[[str], object]
    ) -> Config:
        """Return the settings, with the settings in `saved` in place of defaults.

        Args:
            saved: maps names of settings to their values, as text.
            path: the file that has the saved settings.
            complain: called with a sentence for each saved setting that is not allowed; such a
                setting is ignored.
        """
        found: dict[str, Setting[Any]] = {}
        for name, text in saved.items():
            try:
                value = parse_saved(name, text)
            except (ConfigError, UnknownBackendError) as error:
                complain(f"{path}: {error}. This setting is ignored")
                continue
            if getattr(self, name).source == "default":
                found[name] = Setting(value, os.path.basename(path))
        return self._replace(**found) if found else self


def parse_saved(name: str, text: object) -> object:
    """Return the value of the setting called `name` that is saved as `text`.

    Raises:
        ConfigError: `name` is not one of `SAVED`, or `text` is not allowed as its value.
        UnknownBackendError: `text` names a backend that is not installed.
    """
    require_saved(name)
    return next(each for each in VARIABLES if each.setting == name).parse(text, name=name)


def require_saved(name: str) -> None:
    """Raise an error if `name` is not the name of a setting that can be saved.

    Raises:
        ConfigError: `name` is not one of `SAVED`.
    """
    if name not in SAVED:
        more, allowed = did_you_mean(name, SAVED), ", ".join(sorted(SAVED))
        raise ConfigError(f"setting {name!r} can't be saved{more}; expected one of {allowed}")


def _from_variable(
    variable: Variable, text: str, complain: Callable[[str], object] | None
) -> Setting[Any]:
    """Return the setting for a variable that is set to `text`; see `Config.load`."""
    try:
        return Setting(variable.parse(text, name=variable.name), variable.name)
    except (ConfigError, UnknownBackendError) as error:
        if complain is None:
            raise
        # Do not use the default directory: the user did not want it, as it may be full or shared.
        nowhere = variable.setting == "directory"
        effect = "This process caches in memory alone" if nowhere else "The variable is ignored"
        complain(f"{error}. {effect}")
    return Setting(variable.default, variable.name if nowhere else "default")


def unknown_variables(environ: Mapping[str, str]) -> dict[str, str | None]:
    """Return the variables that begin with `KCACHE_` but that kcache does not read.

    Each is mapped to the variable that was probably meant, or to None if none has a similar name.
    """
    known = {variable.name for variable in VARIABLES} | {REMOTE_TOKEN}
    plain = {name.removeprefix(_PREFIX): name for name in known}
    ours = (name for name in environ if name.startswith(_PREFIX))
    unknown = sorted(each for each in ours if each not in known and not each.startswith(_OF_DROPIN))
    return {name: plain.get(nearest(name.removeprefix(_PREFIX), plain) or "") for name in unknown}
