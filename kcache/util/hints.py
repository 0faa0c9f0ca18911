"""Hints: suggestions in messages: the name that was probably meant, and how to install packages."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kcache._version import __version__
from kcache.util.forks import importing

NAME = "kcache-cuda"
#: Whether kcache's distribution is on the package index. Until it is, anybody could register its
#: name there, so no hint and no page may suggest installing it by name. All hints and pages depend
#: on this constant.
PUBLISHED = False


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the name in `known` that is most similar to `name`, or None if none is similar.

    Case and separators are ignored, so `MAXSIZE` is similar to `max_size`.
    """
    with importing:
        from difflib import get_close_matches  # noqa: PLC0415  1 ms

    plain = {_letters(each): each for each in known}
    found = get_close_matches(_letters(name), plain, n=1, cutoff=0.65)
    return plain[found[0]] if found else None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ` (did you mean 'X'?)` with the name X in `known` that is most similar to `name`.

    If no name is similar, return an empty text.
    """
    found = nearest(name, known)
    return "" if found is None else f" (did you mean {found!r}?)"


def unexpected_argument(
    call: Callable[..., object], given: Iterable[str], options: type
) -> TypeError:
    """Return a TypeError for the first argument in `given`, because `call` has no such parameter.

    `options` is a class whose fields are easily mistaken for parameters of `call`. If the argument
    is one of these fields, the message says how to pass it.
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
    """Return the command that installs kcache with `extras`, such as `cu13,cli`.

    Until kcache is on the package index, the text has two commands: one for a checkout, and one for
    a wheel.
    """
    if PUBLISHED:
        return f"pip install '{NAME}[{extras}]'"
    wheel = f"{NAME.replace('-', '_')}-{__version__}-py3-none-any.whl"
    return (
        f"pip install '.[{extras}]' in a checkout of kcache, or pip install './{wheel}[{extras}]'"
    )
