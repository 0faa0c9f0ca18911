"""Manifest: the dependency sets that one request has had so far.

A manifest is stored as an entry under the request's key. Its sections `set0`, `set1`, ... are the
dependency sets, the most recent one first. The section `stamps0.LOCATION` contains the stamps that
the files of `set0` had when they were last verified at the location whose digest is `LOCATION`.

A dependency set is a u32 length, a text of that length, and a digest of 16 bytes for each file that
was read. A long text is compressed by zlib. The text consists of groups, separated by two NULs. A
group consists of fields, separated by NULs. The first field is a letter, directly followed by the
number of a root. The letter decides what the other fields are; see also the class `Answers`:

- Any number of paths below the root: ``f`` files that were read, ``a`` absent paths, ``p`` files
  that were present and were not opened, ``d`` directories, ``n`` names of in-memory texts.
- ``i``: a number and a path. Paths with equal numbers lead to the same file, and paths with
  different numbers to different files.
- ``e``: an errno, and the path whose stat or open failed with it.
- ``v`` (root 0): a variable, as ``NAME=VALUE``, or as ``NAME`` if it was not set.
- Only for nvcc: ``u`` any number of paths that were not links; ``l`` the root and the path of a
  link's target, then the path of the link; ``m`` a mode, 1 if access(2) granted it and 0 if not,
  and the path; ``t`` two numbers and a path, see `Answers.times`.
- ``c`` (root 0): the conditions for using the result at another location; see `places`.
- ``x`` (root 0): the location of the compile.

The groups ``c`` and ``x`` come last. The key of a kernel covers the whole set except ``x``.

A stamp is five signed 64-bit integers (`files.Stamp`). They are zeros if the stamp can't be
trusted. A section of stamps has a stamp for each file that was read, then a u32 count of the
directories that were checked for absent files, the stamps of these directories, and their absolute
paths separated by NULs. Everything is little-endian.
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

#: A set keeps the stamps of at most this many locations. There may be several, because checkouts
#: and containers may share a cache.
MAX_LOCATIONS = 4


class DependencySet:
    """What one result depends on, and the stamps with which it was verified at each location.

    The encoding is decoded when it is needed for the first time.

    Threads: All methods may be called from several threads at the same time. The mapping `stamps`
    is replaced, never changed in place.

    Args:
        raw: the encoding of the set.

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
        #: The request's key of the last call of `result_key`, and the result's key.
        self._result = "", ""
        self._states: dict[str, LocationState] = {}

    def answers(self) -> Answers:
        """Return the answers in the set, decoded.

        Raises:
            CorruptEntryError: the encoding is malformed.
        """
        if self._answers is None:
            self._answers = Answers.decode(self.raw)
        return self._answers

    def dependencies(self, request: Request) -> tuple[str, ...]:
        """Return the absolute paths, sorted, of the files that were read.

        The paths are those at the location of `request`. All calls for one location return the same
        tuple object.
        """
        return self.state_at(request).dependencies

    def result_key(self, request_key: str) -> str:
        """Return the key of the result's entry, a digest of `request_key` and `identity`."""
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
        """Return whether every question of the compile would now get the same answer as in the set.

        If so, this process remembers the verified stamps.
        """
        verified: list[Stamp] = []
        if next(self.differences(request, digests, verified), None) is not None:
            return False
        self.state_at(request).stamps = verified
        return True

    def differences(
        self, request: Request, digests: FileDigests, verified: list[Stamp]
    ) -> Iterator[Difference]:
        """Yield the differences between the answers in the set and the present ones.

        Those that are cheapest to find come first.

        Args:
            request: the request, whose location decides where the files are.
            digests: what this process knows about the contents of files.
            verified: a list to which the stamps of the files that do not differ are appended.

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
        """Return what this process knows about the set's files at the location of `request`.

        At first, it knows the stamps that were stored for this location, or, if there are none, the
        stamps for another location.

        Raises:
            IndexError: the set has a root that the request does not have.
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
        """Add the stamps that were verified for `request` to `stamps`; return whether they are new.

        If they are new, the caller should store the manifest.
        """
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
        #: location -> the set that held at the last check of this location.
        self.checked: dict[str, DependencySet] = {}

    def was_checked_at(self, location: str) -> bool:
        """Return whether any of the dependency sets has ever been verified at `location`."""
        return any(location in each.stamps for each in self.dependency_sets)

    def holding(
        self, request: Request, digests: FileDigests, *, once: bool = False
    ) -> DependencySet | None:
        """Return the dependency set that holds now, or None if none holds.

        With `once`, a set that held at the last check of this location is not checked again.
        """
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
        """Insert `dependency_set` at the front, and remove an equal older set.

        The new set gets the stamps of the older one, in addition to its own. If there are more than
        `MAX_SETS` sets, the oldest one is removed, too.
        """
        kept: list[DependencySet] = []
        for old in self.dependency_sets:
            if old.identity == dependency_set.identity:
                dependency_set.stamps = {**old.stamps, **dependency_set.stamps}
            else:
                kept.append(old)
        self.dependency_sets = [dependency_set, *kept][:MAX_SETS]

    def without_stamps(self) -> Manifest:
        """Return a copy of the manifest without its stamps, which another machine has verified."""
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
