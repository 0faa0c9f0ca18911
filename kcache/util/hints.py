"""Hints: what a message suggests: the name that was probably meant, and how to install more."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kcache._version import __version__
from kcache.util.forks import importing

NAME = "kcache-cuda"
#: Whether the package index has kcache's distribution. Until then, anybody could register that name
#: there, so no hint and no page may suggest installing it by name. This constant alone decides.
PUBLISHED = False


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that is most like `name`, or None if none is like it.

    Case and separators are ignored: `MAXSIZE` is like `max_size`.
    """
    with importing:
        from difflib import get_close_matches  # noqa: PLC0415  1 ms

    plain = {_letters(each): each for each in known}
    found = get_close_matches(_letters(name), plain, n=1, cutoff=0.65)
    return plain[found[0]] if found else None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ` (did you mean 'X'?)`, or nothing if no known name is like `name`."""
    found = nearest(name, known)
    return "" if found is None else f" (did you mean {found!r}?)"


def unexpected_argument(
    call: Callable[..., object], given: Iterable[str], options: type
) -> TypeError:
    """Return the error for the first given argument, which `call` does not have.

    `options` is the class whose fields are easily taken for arguments of the call.
    """
    with importing:
        from inspect import signature  # noqa: PLC0415  6 ms

    name, called = next(iter(given)), call.__qualname__.removesuffix(".__init__")
    if name in signature(options).parameters and called != "KernelCache":
        means = f"options={options.__name__}({name}=...)"
        return TypeError(f"{called}: {name!r} is an option; expected {means}")
    known = sorted({*signature(call).parameters} - {"self", "unknown"})
    more = did_you_mean(name, known) or f"; expected one of {', '.join(known)}"
    return TypeError(f"{called}: unexpected argument {name!r}{more}")


def _letters(name: str) -> str:
    return "".join(filter(str.isalnum, name.lower()))


def how_to_install(extras: str) -> str:
    """Return how to install kcache with extras such as `cu13,cli`: a command with a few words.

    Until kcache is published, there are two commands: for a checkout, and for a wheel.
    """
    if PUBLISHED:
        return f"pip install '{NAME}[{extras}]'"
    wheel = f"{NAME.replace('-', '_')}-{__version__}-py3-none-any.whl"
    return (
        f"pip install '.[{extras}]' in a checkout of kcache, or pip install './{wheel}[{extras}]'"
    )
