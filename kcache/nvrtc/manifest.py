"""Manifest: the dependency sets that one request has had so far.

A manifest is stored as an entry under the request's key. Its sections `set0`, `set1`, ... are the
dependency sets, the most recent one first. `stamps0.LOCATION` has the stamps under which the files
of set 0 were verified at the location with that digest.

A set is a u32 length, a text of that length, and a digest of 16 bytes for each file that was read.
A long text is compressed by zlib. The text has groups, separated by two NULs. A group is a KIND and
a root's number, then fields separated by NULs. Kinds whose fields are paths below the root: ``f``
files that were read, ``a`` absent, ``p`` present and not opened, ``d`` directories, ``n`` names of
in-memory texts. Others: ``i`` a number and a path: paths with equal numbers are one file, paths
with different numbers are not; ``e`` an errno and a path; ``v`` (root 0) a variable, ``NAME=VALUE``
or ``NAME`` if it is not set. Only for nvcc: ``u`` names that were not links; ``l`` the root and the
path that a link leads to, and the link; ``m`` a mode, whether access(2) granted it, and a path;
``t`` two numbers and a path, see `Answers.times`.

Two groups come last: ``c`` (root 0) has the conditions for the use of the result elsewhere, see
`places`; ``x`` (root 0) has the location of the compile. The key of a kernel covers the whole set
except ``x``.

A stamp is five signed 64-bit integers (`Stamp`), which are zeros if it is not trusted. A section of
stamps has one stamp for each file, then a u32 count of directories, their stamps, and their
absolute paths separated by NULs. Everything is little-endian.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from kcache.entry import MAX_SETS, Entry, sets_in
from kcache.errors import CorruptEntryError
from kcache.nvrtc.answers import Answers, text_in
from kcache.nvrtc.files import FileDigests, Stamp
from kcache.nvrtc.request import Request, digest_fields
from kcache.nvrtc.verification import Difference, LocationState, differences, misplaced

#: For how many locations a set keeps stamps; checkouts and containers may share a cache.
MAX_LOCATIONS = 4


class DependencySet:
    """What one result depends on, and what was verified about it in each location.

    It is decoded at its first use. Threads: safe to share; `stamps` is replaced, never changed in
    place.

    Args:
        raw: the encoding.

    Attributes:
        raw: as given.
        stamps: location -> encoded stamps.
    """

    __slots__ = ("_answers", "_identity", "_result", "_states", "raw", "stamps")

    def __init__(self, raw: bytes) -> None:
        self.raw = raw
        self.stamps: dict[str, bytes] = {}
        self._answers: Answers | None = None
        self._identity = ""
        #: The last key of a request, and that of its result.
        self._result = "", ""
        self._states: dict[str, LocationState] = {}

    def answers(self) -> Answers:
        """Return the decoded set.

        Raises:
            CorruptEntryError: the encoding is malformed.
        """
        if self._answers is None:
            self._answers = Answers.decode(self.raw)
        return self._answers

    def dependencies(self, request: Request) -> tuple[str, ...]:
        """Return the absolute paths of the headers, sorted. A location has one tuple object."""
        return self.state_at(request).dependencies

    def result_key(self, request_key: str) -> str:
        """Return the key of the result, a digest of the request's key and `identity`."""
        known, key = self._result
        if known != request_key:
            fields = [("request", request_key.encode()), ("headers", self.identity.encode())]
            key = digest_fields("kcache-result/5", fields)
            self._result = request_key, key
        return key

    @property
    def identity(self) -> str:
        """The digest of the answers and the conditions, without the location of the compile."""
        if not self._identity:
            text, digests = self.raw, b""
            with suppress(CorruptEntryError):  # intact, but not a dependency set
                digests = self.answers().digests
                text = text_in(self.raw).rpartition(b"\0\0")[0]  # without `home`
            self._identity = digest_fields("kcache-set/2", [("set", text), ("digests", digests)])
        return self._identity

    # -- whether it holds ------------------------------------------------------------------------

    def holds(self, request: Request, digests: FileDigests) -> bool:
        """Return whether every answer is as in the set; if so, remember the verified stamps."""
        verified: list[Stamp] = []
        if next(self.differences(request, digests, verified), None) is not None:
            return False
        self.state_at(request).stamps = verified
        return True

    def differences(
        self, request: Request, digests: FileDigests, verified: list[Stamp]
    ) -> Iterator[Difference]:
        """Yield the differences between the set and now, the cheapest to find first.

        Args:
            request: the request.
            digests: the contents of files.
            verified: gets the stamps of the files that do not differ.

        Raises:
            CorruptEntryError: the set is malformed.
        """
        answers = self.answers()
        try:
            state = self.state_at(request)
        except IndexError:
            yield Difference("root", "")
            return
        if answers.home != request.location:
            if state.misplaced is None:
                state.misplaced = tuple(misplaced(self, request, state))
            yield from state.misplaced
            for each in state.readings:
                yield from differences(answers, self.state_at(each), each.search, digests, [])
        yield from differences(answers, state, request.search, digests, verified)

    def state_at(self, request: Request) -> LocationState:
        """Return this process's state of the files at the request's location.

        A new state has the stamps that were stored for this location, or else for another one.
        """
        location = request.location
        state = self._states.get(location)
        if state is None:
            state = LocationState(self.answers(), request.search)
            if location in self.stamps:
                state.unpack(self.stamps[location])
            elif self.stamps:  # the same files may have been verified at another location
                state.unpack([*self.stamps.values()][-1])
                state.directories = None
            if len(self._states) >= MAX_LOCATIONS:
                self._states.pop(next(iter(self._states)), None)
            self._states[location] = state
        return state

    # -- what was verified -----------------------------------------------------------------------

    def remember(self, request: Request) -> bool:
        """Add the verified stamps to `stamps`, to be stored; return whether they are new."""
        location, raw = request.location, self.state_at(request).pack()
        if self.stamps.get(location) == raw:
            return False
        # A new mapping, not a changed one: another thread may be storing the old one.
        others = [(each, old) for each, old in self.stamps.items() if each != location]
        self.stamps = dict([*others, (location, raw)][-MAX_LOCATIONS:])
        return True


class Manifest:
    """The dependency sets of one request, most recently stored first."""

    __slots__ = ("checked", "dependency_sets")

    def __init__(self, dependency_sets: list[DependencySet]) -> None:
        self.dependency_sets = dependency_sets
        #: location -> the set that held at the last check there.
        self.checked: dict[str, DependencySet] = {}

    def was_checked_at(self, location: str) -> bool:
        """Return whether a dependency set has held at a location."""
        return any(location in each.stamps for each in self.dependency_sets)

    def holding(
        self, request: Request, digests: FileDigests, *, once: bool = False
    ) -> DependencySet | None:
        """Return the dependency set that holds now, or None; with `once`, trust the last check."""
        last = self.checked.get(request.location)
        if last is not None and (once or last.holds(request, digests)):
            return last
        for dependency_set in self.dependency_sets:
            with suppress(CorruptEntryError):  # intact, but not a dependency set
                if dependency_set.holds(request, digests):
                    self.checked[request.location] = dependency_set
                    return dependency_set
        return None

    def add(self, dependency_set: DependencySet) -> None:
        """Insert a dependency set at the front; it replaces an equal set and gets its stamps."""
        kept: list[DependencySet] = []
        for old in self.dependency_sets:
            if old.identity == dependency_set.identity:
                dependency_set.stamps = {**old.stamps, **dependency_set.stamps}
            else:
                kept.append(old)
        self.dependency_sets = [dependency_set, *kept][:MAX_SETS]

    def without_stamps(self) -> Manifest:
        """Return the dependency sets without what was verified about them on another machine."""
        return Manifest([DependencySet(each.raw) for each in self.dependency_sets])

    def to_entry(self) -> Entry:
        """Return the entry that holds this manifest."""
        payload: dict[str, bytes] = {}
        for number, dependency_set in enumerate(self.dependency_sets):
            payload[f"set{number}"] = dependency_set.raw
            for location, raw in dependency_set.stamps.items():
                payload[f"stamps{number}.{location}"] = raw
        return Entry(payload, {"kind": "manifest"})

    @classmethod
    def from_entry(cls, entry: Entry) -> Manifest:
        """Return the manifest in an entry.

        Raises:
            CorruptEntryError: the entry is not a manifest.
        """
        dependency_sets = [DependencySet(raw) for raw in sets_in(entry)]
        for name, raw in entry.payload.items():
            which, dot, location = name.removeprefix("stamps").partition(".")
            if dot and which.isdecimal() and int(which) < len(dependency_sets):
                dependency_sets[int(which)].stamps[location] = raw
        return cls(dependency_sets)
