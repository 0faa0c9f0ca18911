"""Bundles: writes entries of a cache into a bundle; lists, verifies, checks and imports one."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing, contextmanager
from typing import BinaryIO, NamedTuple, TypedDict

from kcache.admin.transfer import (
    HasEngine,
    backend_of,
    chosen,
    cost_of,
    envelope_of,
    missing_part,
    put_or_fail,
    selection,
    signer_of,
)
from kcache.backend import EntryInfo
from kcache.config import Config
from kcache.directory import require_safe_layer
from kcache.engine.eviction import LOW_WATER
from kcache.entry import Entry
from kcache.errors import BundleError, ConfigError
from kcache.nvrtc import library
from kcache.nvrtc.entries import DAMAGED, MANIFEST, Item, Opened, look_at
from kcache.nvrtc.metadata import text_of
from kcache.readonly.bundle_file import (
    HEAD_SIZE,
    MAX_VALUE,
    Bundle,
    is_bundle,
    is_head,
    write_bundle,
)
from kcache.remote.signing import SEAL_ROOM, make_sealer
from kcache.util import log
from kcache.util.cuda_driver import current_arch, driver_version
from kcache.util.open_file import replacing

#: A target's name: its kind, its number, and the letter of a variant, such as `sm_90a`.
_TARGET = re.compile(r"\w+_(\d+)[a-z]?")
#: A file's path, or an open binary file.
Source = str | os.PathLike[str] | BinaryIO
#: Fields with the time and the duration of a compile. They differ from build to build.
_TIMES = ("created", "compile_seconds")


class Exported(NamedTuple):
    """The result of an export.

    Attributes:
        kernels, manifests: their numbers; every entry that is not a manifest counts as a kernel.
        size: bytes of the file.
        left_out: entries that are damaged, unreadable, too large or of other versions of kcache.
    """

    kernels: int
    manifests: int
    size: int
    left_out: tuple[Item, ...]


class Compiled(TypedDict):
    """What one compiler has compiled.

    Attributes:
        version: such as `"13.0"`; empty if unknown.
        driver: the oldest CUDA version whose driver loads every kernel; empty if unknown.
        archs: the targets, such as `"sm_90"`, sorted.
    """

    version: str
    driver: str
    archs: list[str]


class BundleContents(NamedTuple):
    """The contents of a bundle, after a check of every entry.

    Attributes:
        kernels, manifests: their numbers.
        other_version: number of entries of another version of kcache, which this one can't read.
        size: bytes of the file.
        signed: whether a signature was required of every entry, and is there.
        compilers: identity of each compiler -> what it has compiled.
        functions: the names of the bundle's kernels, sorted.
    """

    kernels: int
    manifests: int
    other_version: int
    size: int
    signed: bool
    compilers: dict[str, Compiled]
    functions: list[str]

    @property
    def archs(self) -> list[str]:
        """The targets of all kernels."""
        return sorted({arch for each in self.compilers.values() for arch in each["archs"]})

    @property
    def driver(self) -> str:
        """The oldest CUDA version whose driver loads every kernel; empty if unknown."""
        return max((each["driver"] for each in self.compilers.values()), key=numbers, default="")


class Imported(NamedTuple):
    """The result of an import.

    Attributes:
        added: entries that the cache did not have.
        present: entries that the cache had; it keeps its own.
        merged: manifests that the cache had, and to which dependency sets were added.
        no_room: entries that were left out, because other parts of the bundle fill the cap.
        other_version: entries that another version of kcache made.
    """

    added: int = 0
    present: int = 0
    merged: int = 0
    no_room: int = 0
    other_version: int = 0


# -- export ----------------------------------------------------------------------------------------


def export_bundle(
    cache: HasEngine,
    target: Source,
    *,
    names: Iterable[str] = (),
    archs: Iterable[str] = (),
    used_within: float | str | None = None,
    older_than: float | str | None = None,
    reproducible: bool = False,
) -> Exported:
    """Write the kernels of a cache, and the manifests that lead to them, into one file.

    Equal entries make equal files, with the same version of SQLite, whatever the machine, the
    backend and the order of use. The file gets its name when it is complete. It replaces an
    existing bundle, but no other file. An export does not count as a use of an entry. With
    `KCACHE_SIGNING_KEY_FILE`, each entry is signed.

    Args:
        cache: a `KernelCache`.
        target: path of the bundle, or a binary file that is open for writing.
        names: only kernels whose source name or name expression contains one of these texts, or
            matches it as a pattern with `*` and `?`.
        archs: only kernels for one of these targets, such as `"sm_90"`.
        used_within: only kernels that were used in the last so many seconds, or `"30d"`.
        older_than: only kernels that were not used for that long.
        reproducible: leave out when each kernel was compiled, and how long that took. Then equal
            kernels make equal files, even if they were compiled on different days. Hits on such
            kernels add nothing to the time saved.

    Raises:
        ConfigError: an age is malformed, or the key file can't be used to sign.
        BundleError: there is another file at the path, or the bundle can't be written.
        BackendError: the entries can't be listed.
        OSError: the file can't be made.
    """
    wanted = selection(names, archs, used_within, older_than)
    sealer, backend = signer_of(cache), backend_of(cache, "exported")
    left_out: list[Item] = []
    manifests = 0

    def rows() -> Iterator[tuple[str, bytes]]:
        nonlocal manifests
        for item, entry in chosen(backend, wanted, left_out):
            kept = {n: v for n, v in entry.metadata.items() if not (reproducible and n in _TIMES)}
            envelope = envelope_of(item.key, Entry(entry.payload, kept))
            if len(envelope) > MAX_VALUE - SEAL_ROOM:
                left_out.append(item._replace(problem=f"larger than {MAX_VALUE} bytes"))
            else:
                manifests += item.kind == MANIFEST
                yield item.key, sealer.seal(envelope)

    with _replacing(target) as path:
        count = write_bundle(path, rows())
        size = os.stat(path).st_size
    return Exported(count - manifests, manifests, size, tuple(left_out))


@contextmanager
def _replacing(target: Source) -> Generator[str]:
    """Yield the path of an empty file, which becomes the target at the end of the block.

    If the block raises, the file is removed. Only a killed process leaves it behind.

    Raises:
        BundleError: the file at the target's path is not a bundle.
        OSError: the file can't be made.
    """
    if not isinstance(target, (str, os.PathLike)):
        with tempfile.TemporaryDirectory(prefix="kcache-") as folder:
            path = os.path.join(folder, "bundle")
            yield path
            with open(path, "rb") as file:
                shutil.copyfileobj(file, target)
        return
    path = os.path.realpath(target)
    _refuse_others(path)
    with replacing(path) as temporary:
        yield temporary
        _refuse_others(path)


def _refuse_others(path: str) -> None:
    """Refuse to replace a file that is not a bundle, unless it is empty.

    Raises:
        BundleError: there is such a file.
    """
    try:
        is_ours = os.path.isfile(path) and (not os.path.getsize(path) or is_bundle(path))
        if os.path.lexists(path) and not is_ours:
            raise BundleError(f"{path} exists and is not a bundle; refusing to overwrite it")
    except OSError as error:
        raise BundleError(f"{path}: what is there can't be read: {error.strerror}") from error


# -- list, verify, import --------------------------------------------------------------------------


def list_bundle(source: Source) -> Iterator[Item]:
    """Check and yield each entry of a bundle, by ascending key.

    Signatures are checked if `KCACHE_SIGNING_KEY_FILE` names a file of keys. An entry of another
    version of kcache has the kind `"other"` and a `problem`.

    Raises:
        BundleError: it is not a bundle, a damaged one, or not signed with one of the keys.
        ConfigError: the file of keys can't be used.
        OSError: it can't be read.
    """
    with _opened(source, Config.load(complain=log.warning_once)) as bundle:
        for each in _contents(bundle):
            yield each.item


def verify_bundle(source: Source) -> BundleContents:
    """Read and check every entry of a bundle. Only one entry is in memory at a time.

    Signatures are checked if `KCACHE_SIGNING_KEY_FILE` names a file of keys.

    Args:
        source: path, or an open binary file, which is copied to a temporary file.

    Raises:
        BundleError, ConfigError, OSError: as `list_bundle`.
    """
    with _opened(source, Config.load(complain=log.warning_once)) as bundle:
        kinds: Counter[str] = Counter()
        functions: set[str] = set()
        compilers: dict[str, Compiled] = {}
        for item, entry in _contents(bundle):
            kinds["" if entry is None else item.kind] += 1
            if entry is not None and item.kind != MANIFEST:
                functions.update(item.names)
                _note(compilers, item, entry)
        return BundleContents(
            kinds.total() - kinds[MANIFEST] - kinds[""],
            kinds[MANIFEST],
            kinds[""],
            bundle.size,
            not bundle.unsigned,
            dict(sorted(compilers.items())),
            sorted(functions),
        )


def _note(compilers: dict[str, Compiled], item: Item, entry: Entry) -> None:
    """Add a kernel to the summary of the compiler that made it.

    A driver loads machine code from any compiler of its own major version, but PTX only from
    compilers that are not newer than itself ("CUDA Compatibility", minor version compatibility).
    """
    version = text_of(entry.metadata.get("nvrtc"))
    driver = version.partition(".")[0] + ".0" if entry.payload.get("cubin") else version
    by = compilers.setdefault(item.compiler, {"version": version, "driver": "", "archs": []})
    by["driver"] = max(by["driver"], driver if numbers(version) else "", key=numbers)
    by["archs"] = sorted({*by["archs"], item.arch} - {""})


def numbers(version: str) -> tuple[int, ...]:
    """Return the numbers of a version, to compare it; empty if the text is not a version."""
    return tuple(map(int, version.split("."))) if re.fullmatch(r"\d+\.\d+", version) else ()


def problems(path: str, contents: BundleContents, archs: tuple[str, ...]) -> Iterator[str]:
    """Yield each reason why programs here would compile in spite of a bundle.

    Args:
        path: of the bundle.
        contents: of the bundle.
        archs: the targets that are needed; empty for the target of this machine's GPU. If none is
            given and there is no GPU, that is a reason, too. If there is a driver, it is checked.
    """
    if not contents.kernels:
        yield "it has no kernels"
        return
    try:
        require_safe_layer(os.path.abspath(path))
    except ConfigError as error:
        yield str(error)
    compilers = contents.compilers
    found = library.find()
    by = compilers.get("" if found is None else found.identity)
    if by is None:
        expected = " or ".join(f"{name} ({each['version']})" for name, each in compilers.items())
        got = "no NVRTC" if found is None else f"{found.identity} ({found.path})"
        yield f"compiler: expected {expected}, got {got}"
    has = contents.archs if by is None else by["archs"]
    try:
        archs = archs or (current_arch(),)
    except ConfigError:
        yield "arch: no GPU to take the target from; pass --arch"
    for arch in archs:
        if _number(arch) not in map(_number, has):
            yield f"arch: expected kernels for {arch}, got {', '.join(has) or 'none'}"
    driver, needed = driver_version(), contents.driver if by is None else by["driver"]
    if driver is not None and driver < numbers(needed):
        got = ".".join(map(str, driver))
        yield f"driver: expected one for CUDA {needed} or newer, got one for CUDA {got}"


def _number(arch: str) -> str:
    found = _TARGET.fullmatch(arch)
    return arch if found is None else found[1]


def import_bundle(cache: HasEngine, source: Source) -> Imported:
    """Put the entries of a bundle into a cache.

    All of the bundle is read and checked before the first entry is written, so a malformed bundle
    leaves the cache as it was. The cache keeps its own copy of an entry. It keeps all dependency
    sets of a manifest, and gets those of the bundle in addition. The cap holds: older entries are
    evicted for new ones, and an entry that would evict other parts of the bundle is left out.

    Processes: others may use the cache. If another process stores a dependency set of the same
    source at the same instant, one of the two sets may be lost, which costs one compile. Crash: an
    import that was killed can be run again.

    A bundle is code that will run on your GPU. With `KCACHE_SIGNING_KEY_FILE`, an entry is accepted
    only if one of the keys in that file has signed it. Without it, nothing shows who made a bundle.

    Args:
        cache: a `KernelCache` that may write.
        source: as for `verify_bundle`.

    Raises:
        ConfigError: the cache is open for reading only, or the file of keys can't be used.
        BundleError: it is not a bundle, a damaged one, or not signed with one of the keys.
        BackendError: the cache can't be written to.
        OSError: the bundle can't be read.
    """
    engine = cache.engine
    if engine.read_only:
        raise ConfigError("the cache is open for reading only: nothing can be imported")
    backend_of(cache, "imported")
    counts: Counter[str] = Counter()
    # An eviction leaves this much in the cache, so it evicts no entry of this import.
    room = int(engine.max_size * LOW_WATER)
    with _opened(source, cache.config) as bundle:
        other = sum(each.entry is None for each in _contents(bundle))
        # The kernels come first: a manifest must not promise a kernel that is not there.
        for manifests in (False, True):
            for item, entry in _contents(bundle):
                if entry is None or (item.kind == MANIFEST) is not manifests:
                    continue
                what, wanted = missing_part(engine, item, entry)
                if wanted is not None:
                    cost = cost_of(engine, item, wanted)
                    stored = cost <= room and put_or_fail(engine, item.key, wanted)
                    room -= cost if stored else 0
                    what = what if stored else "no_room"
                counts[what] += 1
    return Imported(**counts, other_version=other)


def _contents(bundle: Bundle) -> Iterator[Opened]:
    """Check each entry of a bundle and yield it.

    Raises:
        BundleError: an entry is damaged, or not signed as required.
    """
    for key, envelope in bundle.items():
        found = look_at(envelope, EntryInfo(key, len(envelope), 0))
        if found.item.kind == DAMAGED:
            raise BundleError(f"{bundle.name}: entry {key}: {found.item.problem}")
        yield found


@contextmanager
def _opened(source: Source, config: Config) -> Generator[Bundle]:
    """Open a bundle for the block; an open file is copied to a temporary one first.

    Raises:
        BundleError, ConfigError, OSError: as `list_bundle`; or there is no room for the copy.
    """
    sealer = make_sealer(config.signing_key_file.value)
    if isinstance(source, (str, os.PathLike)):
        with closing(Bundle(source, sealer=sealer)) as bundle:
            yield bundle
        return
    name = "what was piped in"
    head = source.read(HEAD_SIZE)
    if not is_head(head):  # before gigabytes of something else are copied
        raise BundleError(f"{name}: it is not a bundle")
    with tempfile.NamedTemporaryFile(prefix="kcache-") as file:
        file.write(head)
        shutil.copyfileobj(source, file)
        file.flush()
        with closing(Bundle(file.name, sealer=sealer, name=name)) as bundle:
            yield bundle
