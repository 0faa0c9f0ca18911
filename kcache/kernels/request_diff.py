"""Request diff: describes in words how one request differs from another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from kcache.nvrtc.metadata import RequestSummary
from kcache.nvrtc.options import ParsedOptions, parse_options
from kcache.nvrtc.request import called_by


class Cause(NamedTuple):
    """One reason why a request is compiled.

    Attributes:
        kind: one word for the reason, such as `option`; docs/reference/command-line.md lists them.
        what: a clause for people, such as "the option --std changed from c++17 to c++20".
        before: the old value, if it is known.
        after: the new value, if it is known.
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
    """Return the differences between `old`, the request of a cached entry, and `new`."""
    return [
        *_source(old, new),
        *_sets("names", "name expression", old.names, new.names),
        *_options(old, new),
        *_headers(old, new),
        *_rest(old, new),
        *_bound(old, new),
    ]


def _source(old: RequestSummary, new: RequestSummary) -> Iterator[Cause]:
    if old.source_hash != new.source_hash:
        yield Cause("source", "the source's text changed")
    was, now = old.source_name, new.source_name
    # The key contains the whole name if `bound` does, otherwise only the part from `called_by`.
    whole = any(each.startswith("name=") for each in (*old.bound, *new.bound))
    if was != now and (whole or called_by(was) != called_by(now)):
        yield Cause("source_name", f"the source's name changed from {was} to {now}", was, now)
    if old.arch != new.arch:
        what = f"the target changed from {old.arch or 'none'} to {new.arch}"
        yield Cause("arch", what, old.arch, new.arch)


def _rest(old: RequestSummary, new: RequestSummary) -> Iterator[Cause]:
    if old.extra_key != new.extra_key:
        how = "removed" if not new.extra_key else "changed" if old.extra_key else "added"
        yield Cause("extra_key", f"extra_key was {how}")
    if old.compiler != new.compiler:
        was, now = (
            each.compiler.removeprefix("nvrtc ")[:12] or "unknown" for each in (old, new)
        )  # the build id of NVRTC itself
        version = f"NVRTC {old.nvrtc}, " if old.nvrtc else ""
        what = f"the compiler changed: it was {version}build {was}, and is now build {now}"
        yield Cause("compiler", what, old.compiler, new.compiler)


def _sets(kind: str, noun: str, old: Iterable[str], new: Iterable[str]) -> Iterator[Cause]:
    """Yield a cause for each item that was removed or added, or one if only the order changed."""
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
    named = ("--gpu-architecture", "-D", "-I")
    return [str(option) for option in options if option.name not in named]


def _valued(kind: str, noun: str, old: Iterable[str], new: Iterable[str]) -> Iterator[Cause]:
    """Yield a cause for each difference between two lists of `NAME` and `NAME=VALUE`."""
    before, after = list(old), list(new)
    come = [each for each in after if each not in before]
    for was in [each for each in before if each not in after]:
        name, equals, value = was.partition("=")
        now = next((each for each in come if each.partition("=")[0] == name), None)
        if now is not None and (equals or "=" in now):
            given = now.partition("=")[2]
            what = f"the {noun} {name} changed from {value or 'no value'} to {given or 'no value'}"
            yield Cause(kind, what, was, now)
            before.remove(was)
            after.remove(now)
            come.remove(now)
    yield from _sets(kind, noun, before, after)


def _headers(old: RequestSummary, new: RequestSummary) -> Iterator[Cause]:
    """Yield a cause for each in-memory header that was removed, added or changed."""
    was, now = old.headers, new.headers
    yield from _sets("memory_header", "in-memory header", sorted(was), sorted(now))
    for name in sorted(was.keys() & now.keys()):
        if was[name] != now[name]:
            yield Cause("memory_header", f"the in-memory header {name} changed", name, name)


def _bound(old: RequestSummary, new: RequestSummary) -> Iterator[Cause]:
    """Yield a cause if the directories in the keys differ, and one if the variables in them do.

    Both are in `Request.bound`.
    """
    before, after = _kinds(old.bound), _kinds(new.bound)
    if before["paths"] and after["paths"] and before["paths"] != after["paths"]:
        was, now = before["paths"][0], after["paths"][0]
        what = "the output contains the directories of the source and its headers, which differ"
        yield Cause("directory", what, was, now)
    if before["variable"] != after["variable"]:
        was, now = (", ".join(kinds["variable"]) for kinds in (before, after))
        yield Cause("variable", "environment variables that the compiler reads differ", was, now)


def include_paths(old: RequestSummary, new: RequestSummary) -> Iterator[Cause]:
    """Yield a cause if both requests have equally many include directories, but not the same.

    `contrast` returns a cause for a different number.
    """
    before, after = (parse_options(each.flags).include_paths for each in (old, new))
    if before != after and len(before) == len(after):
        how = "in another order" if sorted(before) == sorted(after) else "different"
        what = f"the include directories (-I) are {how}"
        yield Cause("include_path", what, ", ".join(before), ", ".join(after))


def _kinds(bound: Iterable[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {"paths": [], "variable": [], "name": []}
    for each in bound:
        kind, _, value = each.partition("=")
        found[kind if kind in ("variable", "name") else "paths"].append(value)
    return found
