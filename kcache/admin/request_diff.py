"""Request diff: says in words how one request differs from another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from kcache.nvrtc.metadata import RequestSummary
from kcache.nvrtc.parsed_options import ParsedOptions, parse_options

__all__ = ["Cause", "contrast", "include_paths"]


class Cause(NamedTuple):
    """One reason why a request is compiled.

    Attributes:
        kind: one word for the reason, such as `option`; docs/reference/command-line.md lists them.
        what: a clause for people, such as "the option --std changed from c++17 to c++20".
        before: the old value, if it is known; likewise `after`, the new one.
        path: absolute path of the file that the reason is about.
        at: when it happened, in seconds since the epoch, if that is known.
    """

    kind: str
    what: str
    before: str = ""
    after: str = ""
    path: str = ""
    at: float | None = None


def contrast(old: RequestSummary, new: RequestSummary) -> list[Cause]:
    """Return the differences between a request and the one that an entry answers.

    Facts that an entry of an older version does not tell count as equal.
    """
    return [
        *_source(old, new),
        *_target(old, new),
        *_sets("names", "name expression", old.names, new.names),
        *_options(old, new),
        *_headers(old, new),
        *_extra_key(old, new),
        *_compiler(old, new),
        *_bound(old, new),
    ]


def _source(old: RequestSummary, new: RequestSummary) -> Iterator[Cause]:
    if old.source_hash is not None and old.source_hash != new.source_hash:
        yield Cause("source", "the source's text changed")
    named = _is_named(old) or _is_named(new)
    if old.source_name != new.source_name and named:
        yield Cause(
            "source_name",
            f"the source is called {new.source_name}, and was {old.source_name}",
            old.source_name,
            new.source_name,
        )


def _is_named(about: RequestSummary) -> bool:
    """Tell whether the source's name is part of the key, or was in the key of older versions."""
    return about.bound is None or any(each.startswith("name=") for each in about.bound)


def _target(old: RequestSummary, new: RequestSummary) -> Iterator[Cause]:
    if old.arch != new.arch:
        what = f"the target changed from {old.arch or 'none'} to {new.arch}"
        yield Cause("arch", what, old.arch, new.arch)


def _sets(kind: str, noun: str, old: Iterable[str], new: Iterable[str]) -> Iterator[Cause]:
    """Yield what was added to a list, what was removed, or that its order changed."""
    before, after = list(old), list(new)
    gone, come = Counter(before) - Counter(after), Counter(after) - Counter(before)
    for each in gone:
        yield Cause(kind, f"the {noun} {each} was removed", before=each)
    for each in come:
        yield Cause(kind, f"the {noun} {each} was added", after=each)
    if not gone and not come and before != after:
        what = f"the {noun}s are in another order"
        yield Cause(kind, what, ", ".join(before), ", ".join(after))


def _options(old: RequestSummary, new: RequestSummary) -> Iterator[Cause]:
    before, after = parse_options(old.flags), parse_options(new.flags)
    yield from _valued("define", "macro", before.defines, after.defines)
    yield from _valued("option", "option", _plain(before), _plain(after))
    if len(before.include_paths) != len(after.include_paths):
        was, now = len(before.include_paths), len(after.include_paths)
        yield Cause(
            "include_path",
            f"the number of include directories (-I) changed from {was} to {now}",
            ", ".join(before.include_paths),
            ", ".join(after.include_paths),
        )


def _plain(options: ParsedOptions) -> list[str]:
    """Return the options other than target, macros and include directories."""
    told = ("--gpu-architecture", "-D", "-I")
    return [str(option) for option in options if option.name not in told]


def _valued(kind: str, noun: str, old: Iterable[str], new: Iterable[str]) -> Iterator[Cause]:
    """Yield the differences of lists of `NAME` and `NAME=VALUE`."""
    before, after = list(old), list(new)
    gone, come = Counter(before) - Counter(after), Counter(after) - Counter(before)
    for was in list(gone):
        name, equals, value = was.partition("=")
        now = next((each for each in come if each.partition("=")[0] == name), None)
        if now is not None and (equals or "=" in now):
            given = now.partition("=")[2]
            what = f"the {noun} {name} changed from {value or 'no value'} to {given or 'no value'}"
            yield Cause(kind, what, was, now)
            gone[was] -= 1
            come[now] -= 1
    yield from _sets(kind, noun, (+gone).elements(), (+come).elements())
    if Counter(before) == Counter(after) and before != after:
        yield from _sets(kind, noun, before, after)


def _headers(old: RequestSummary, new: RequestSummary) -> Iterator[Cause]:
    """Yield the differences of the in-memory headers."""
    if old.headers is None or new.headers is None:
        return
    for name in sorted({*old.headers, *new.headers}):
        if name not in new.headers:
            yield Cause("memory_header", f"the in-memory header {name} was removed", before=name)
        elif name not in old.headers:
            yield Cause("memory_header", f"the in-memory header {name} was added", after=name)
        elif old.headers[name] != new.headers[name]:
            yield Cause("memory_header", f"the in-memory header {name} changed", name, name)


def _extra_key(old: RequestSummary, new: RequestSummary) -> Iterator[Cause]:
    if old.extra_key is not None and old.extra_key != new.extra_key:
        how = "changed" if old.extra_key and new.extra_key else "added" if new.extra_key else ""
        yield Cause("extra_key", f"extra_key {how or 'removed'}".replace("key ", "key was ", 1))


def _compiler(old: RequestSummary, new: RequestSummary) -> Iterator[Cause]:
    if old.compiler != new.compiler:
        version = f"NVRTC {old.nvrtc}, " if old.nvrtc else ""
        what = f"the compiler is another one: it was {version}build {_short(old.compiler)}, "
        what += f"and is build {_short(new.compiler)}"
        yield Cause("compiler", what, old.compiler, new.compiler)


def _short(compiler: str) -> str:
    """Return the first digits of the build id of NVRTC itself."""
    return compiler.removeprefix("nvrtc ")[:12] or "unknown"


def _bound(old: RequestSummary, new: RequestSummary) -> Iterator[Cause]:
    """Yield the differences of the directories that a key holds; see `Request.bound`."""
    if old.bound is None or new.bound is None:
        return
    before, after = _kinds(old.bound), _kinds(new.bound)
    if before["paths"] and after["paths"] and before["paths"] != after["paths"]:
        was, now = before["paths"][0], after["paths"][0]
        what = "the output names the directories of the source and its headers, which are others"
        yield Cause("directory", what, was, now)
    if before["variable"] != after["variable"]:
        was, now = (", ".join(kinds["variable"]) for kinds in (before, after))
        yield Cause("variable", "environment variables that the compiler reads differ", was, now)
    if before["nested"] != after["nested"]:
        found = list(include_paths(old, new))
        yield from found or [Cause("include_path", "the include directories lie elsewhere")]


def include_paths(old: RequestSummary, new: RequestSummary) -> Iterator[Cause]:
    """Yield that the include directories differ, if their number is the same."""
    before, after = (parse_options(each.flags).include_paths for each in (old, new))
    if before != after and len(before) == len(after):
        how = "in another order" if sorted(before) == sorted(after) else "others"
        what = f"the include directories (-I) are {how}"
        yield Cause("include_path", what, ", ".join(before), ", ".join(after))


def _kinds(bound: Iterable[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {"paths": [], "nested": [], "variable": [], "name": []}
    for each in bound:
        kind, _, value = each.partition("=")
        found[kind if kind in ("nested", "variable", "name") else "paths"].append(value)
    return found
