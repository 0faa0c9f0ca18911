"""Nearest: finds the known name that is most like a wrong one."""

from __future__ import annotations

from collections.abc import Callable, Iterable


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that is most like `name`, or None if none is like it.

    Capitals and the signs between words do not count: `MAXSIZE` is like `max_size`.
    """
    from difflib import get_close_matches  # imported only if something is wrong

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
    from inspect import signature

    name, called = next(iter(given)), call.__qualname__.removesuffix(".__init__")
    if name in signature(options).parameters and called != "KernelCache":
        means = f"options={options.__name__}({name}=...)"
        return TypeError(f"{called}: {name!r} is an option; allowed: {means}")
    known = sorted({*signature(call).parameters} - {"self", "unknown"})
    more = did_you_mean(name, known) or f"; allowed: {', '.join(known)}"
    return TypeError(f"{called}: unexpected argument {name!r}{more}")


def _letters(name: str) -> str:
    return "".join(filter(str.isalnum, name.lower()))
