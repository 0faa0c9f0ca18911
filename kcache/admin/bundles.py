"""Bundles: exports entries of a cache; lists, verifies, checks and imports bundles."""

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

#: Matches the name of a target, such as `sm_90a`: its kind, its number, and a letter if it has one.
_TARGET = re.compile(r"\w+_(\d+)[a-z]?")
#: A file's path, or an open binary file.
Source = str | os.PathLike[str] | BinaryIO
#: The metadata with the time and the duration of a compile. These differ from build to build.
_TIMES = ("created", "compile_seconds")


class Exported(NamedTuple):
    """The result of an export.

    Attributes:
        kernels, manifests: the numbers of exported kernels and manifests. Every entry that is not a
            manifest counts as a kernel.
        size: the size of the bundle in bytes.
        left_out: the entries that were not exported, because they are damaged, unreadable, too
            large or of another version of kcache.
    """

    kernels: int
    manifests: int
    size: int
    left_out: tuple[Item, ...]


class Compiled(TypedDict):
    """A summary of the kernels in a bundle that one compiler has compiled.

    Attributes:
        version: the version of the compiler, such as `"13.0"`; empty if unknown.
        driver: the lowest CUDA version that a driver must support to load all these kernels; empty
            if unknown.
        archs: the targets of the kernels, such as `"sm_90"`, sorted.
    """

    version: str
    driver: str
    archs: list[str]


class BundleContents(NamedTuple):
    """A summary of a bundle, all entries of which were checked.

    Attributes:
        kernels, manifests: the numbers of kernels and manifests.
        other_version: the number of entries of another version of kcache, which this version can't
            read.
        size: the size of the bundle in bytes.
        signed: whether every entry is signed with one of the signing keys; None if entries have
            signatures that were not verified, because there are no signing keys.
        compilers: maps the identity of each compiler to a summary of what it has compiled.
        functions: the names of the functions in the kernels, sorted.
    """

    kernels: int
    manifests: int
    other_version: int
    size: int
    signed: bool | None
    compilers: dict[str, Compiled]
    functions: list[str]

    @property
    def archs(self) -> list[str]:
        """The targets of all kernels, sorted."""
        return sorted({arch for each in self.compilers.values() for arch in each["archs"]})

    @property
    def driver(self) -> str:
        """The lowest CUDA version of a driver that loads all kernels; empty if unknown."""
        return max((each["driver"] for each in self.compilers.values()), key=numbers, default="")


class Imported(NamedTuple):
    """The result of an import.

    Attributes:
        added: the number of entries that the cache did not have.
        present: the number of entries that the cache already had. The cache keeps its own copies.
        merged: the number of manifests that the cache already had, and to which dependency sets
            were added.
        no_room: the number of entries that were not imported, because other entries of the bundle
            fill the cap.
        other_version: the number of entries that were not imported, because another version of
            kcache made them.
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

    With the same version of SQLite, equal entries make equal files. The machine, the backend and
    the order in which the entries were used make no difference. The file is written under a
    temporary name, and is renamed when it is complete. It replaces an existing bundle, but no other
    file. An export does not count as a use of an entry. With `KCACHE_SIGNING_KEY_FILE`, each entry
    is signed.

    Args:
        cache: a `KernelCache`.
        target: the path of the bundle, or a binary file that is open for writing.
        names: export only kernels whose source name or name expression contains one of these texts,
            or matches one of them as a pattern with `*` and `?`.
        archs: export only kernels for one of these targets, such as `"sm_90"`.
        used_within: export only kernels that were used within this time: a number of seconds, or a
            text such as `"30d"`.
        older_than: export only kernels that were not used within this time.
        reproducible: leave out when each kernel was compiled, and how long that took. Then equal
            kernels make equal files, even if they were compiled on different days. A hit on an
            exported kernel then adds nothing to the statistics of saved time.

    Raises:
        ConfigError: `used_within` or `older_than` is malformed, or the key file can't be used to
            sign.
        BundleError: `target` exists and is not a bundle, or the bundle can't be written.
        BackendError: the cache has no backend, or its entries can't be listed.
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
    """Yield the path of a temporary file, which becomes `target` at the end of the block.

    If the block raises an exception, the temporary file is removed. A killed process leaves the
    file behind.

    Raises:
        BundleError: `target` exists and is not a bundle.
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
    """Check that `path` does not exist, or is a bundle or an empty file.

    Raises:
        BundleError: another file exists at `path`, or the file can't be read.
    """
    try:
        is_ours = os.path.isfile(path) and (not os.path.getsize(path) or is_bundle(path))
        if os.path.lexists(path) and not is_ours:
            raise BundleError(f"{path} exists and is not a bundle; refusing to overwrite it")
    except OSError as error:
        raise BundleError(f"{path}: the existing file can't be read: {error.strerror}") from error


# -- list, verify, import --------------------------------------------------------------------------


def list_bundle(source: Source) -> Iterator[Item]:
    """Check each entry of a bundle, and yield a description of it, in the order of the keys.

    Signatures are verified if `KCACHE_SIGNING_KEY_FILE` names a key file. An entry of another
    version of kcache has the kind `"other"` and a `problem`.

    Raises:
        BundleError: `source` is not a bundle, is damaged, or is not signed with one of the keys.
        ConfigError: the key file can't be used.
        OSError: `source` can't be read.
    """
    with _opened(source, Config.load(complain=log.warning_once)) as bundle:
        for each in _contents(bundle):
            yield each.item


def verify_bundle(source: Source) -> BundleContents:
    """Read and check every entry of a bundle, and return a summary.

    Only one entry is in memory at a time. Signatures are verified if `KCACHE_SIGNING_KEY_FILE`
    names a key file.

    Args:
        source: the path of the bundle, or an open binary file, which is copied to a temporary file.

    Raises:
        BundleError, ConfigError, OSError: in the same cases as in `list_bundle`.
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
            bundle.signed,
            dict(sorted(compilers.items())),
            sorted(functions),
        )


def _note(compilers: dict[str, Compiled], item: Item, entry: Entry) -> None:
    """Add a kernel to the summary of the compiler that made it.

    A driver loads machine code from compilers up to its own major version, but PTX only from
    compilers that are not newer than the driver ("CUDA Compatibility", minor version
    compatibility).
    """
    version = text_of(entry.metadata.get("nvrtc"))
    driver = version.partition(".")[0] + ".0" if entry.payload.get("cubin") else version
    by = compilers.setdefault(item.compiler, {"version": version, "driver": "", "archs": []})
    by["driver"] = max(by["driver"], driver if numbers(version) else "", key=numbers)
    by["archs"] = sorted({*by["archs"], item.arch} - {""})


def numbers(version: str) -> tuple[int, ...]:
    """Return the numbers in a version such as `"13.0"`; empty if the text is not a version.

    Two versions can be compared by their numbers.
    """
    return tuple(map(int, version.split("."))) if re.fullmatch(r"\d+\.\d+", version) else ()


def problems(path: str, contents: BundleContents, archs: tuple[str, ...]) -> Iterator[str]:
    """Yield each reason why programs on this machine would compile although they use a bundle.

    The driver is checked only if this machine has one.

    Args:
        path: the path of the bundle.
        contents: a summary of the bundle.
        archs: the targets that programs need. If `archs` is empty, they need the target of this
            machine's GPU, and a missing GPU is a reason, too.
    """
    if not contents.kernels:
        yield "the bundle has no kernels"
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
        yield "arch: expected --arch, because this machine has no GPU whose target could be used"
    for arch in archs:
        if _number(arch) not in map(_number, has):
            yield f"arch: expected kernels for {arch}, got {', '.join(has) or 'none'}"
    driver, needed = driver_version(), contents.driver if by is None else by["driver"]
    if driver is not None and driver < numbers(needed):
        got = ".".join(map(str, driver))
        yield f"driver: expected a driver for CUDA {needed} or newer, got one for CUDA {got}"


def _number(arch: str) -> str:
    found = _TARGET.fullmatch(arch)
    return arch if found is None else found[1]


def import_bundle(cache: HasEngine, source: Source) -> Imported:
    """Put the entries of a bundle into a cache.

    The whole bundle is read and checked before the first entry is written, so a malformed bundle
    leaves the cache unchanged. If the cache already has an entry, it keeps its own copy. If it has
    a manifest, the manifest keeps its dependency sets, and those in the bundle are added. The cap
    is not exceeded: the least recently used entries are evicted for imported ones. But an entry
    that would evict other entries of the bundle is not imported.

    Processes: Other processes may use the cache. If another process stores a dependency set of the
    same source at the same instant, one of the two sets may be lost, which costs one compile.
    Crash: An import that was killed can be run again.

    A bundle is code that will run on your GPU. With `KCACHE_SIGNING_KEY_FILE`, a bundle is accepted
    only if each entry is signed with one of the keys in that file. Without signing keys, nothing
    proves who made a bundle.

    Args:
        cache: a `KernelCache` that may write.
        source: the path of the bundle, or an open binary file, which is copied to a temporary file.

    Raises:
        ConfigError: the cache is open for reading only, or the key file can't be used.
        BundleError: `source` is not a bundle, is damaged, or is not signed with one of the keys.
        BackendError: the cache has no backend, or it can't be written to.
        OSError: the bundle can't be read.
    """
    engine = cache.engine
    if engine.read_only:
        raise ConfigError("nothing can be imported: the cache is open for reading only")
    backend_of(cache, "imported")
    counts: Counter[str] = Counter()
    # An eviction leaves this many bytes, the most recently used ones, in the cache. So it evicts no
    # imported entry as long as these take less.
    room = int(engine.max_size * LOW_WATER)
    with _opened(source, cache.config) as bundle:
        other = sum(each.entry is None for each in _contents(bundle))
        # The kernels come first, because a manifest must not lead to a missing kernel.
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
    """Check each entry of a bundle, and yield it with its description.

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
    """Open a bundle, and close it at the end of the block.

    If `source` is an open file, the bundle is first copied to a temporary file.

    Raises:
        BundleError, ConfigError: in the same cases as in `list_bundle`.
        OSError: `source` can't be read or copied.
    """
    sealer = make_sealer(config.signing_key_file.value)
    if isinstance(source, (str, os.PathLike)):
        with closing(Bundle(source, sealer=sealer)) as bundle:
            yield bundle
        return
    name = "the input"
    head = source.read(HEAD_SIZE)
    if not is_head(head):  # before gigabytes of something else are copied
        raise BundleError(f"{name}: it is not a bundle")
    with tempfile.NamedTemporaryFile(prefix="kcache-") as file:
        file.write(head)
        shutil.copyfileobj(source, file)
        file.flush()
        with closing(Bundle(file.name, sealer=sealer, name=name)) as bundle:
            yield bundle
