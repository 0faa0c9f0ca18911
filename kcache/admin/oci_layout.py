"""OciLayout: a bundle as an OCI image layout, which registries and Kubernetes accept.

The image has one layer, a plain tar archive with `kernels.kcb` in it. Its labels describe the
kernels. See https://github.com/opencontainers/image-spec, `image-layout.md` and `config.md`.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import stat
import tarfile
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kcache.admin.bundles import BundleContents, Exported, export_bundle, verify_bundle
from kcache.admin.transfer import HasEngine
from kcache.errors import BundleError

#: The name of the bundle in the layer.
BUNDLE = "kernels.kcb"
_TYPE = "application/vnd.oci.image."
_LAYOUT = {"imageLayoutVersion": "1.0.0"}
#: Maps names of processors to their names in OCI images, which are the names in Go.
_MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}
#: The exceptions that are raised for a malformed archive, and for JSON that is nested too deeply.
_MALFORMED = (tarfile.TarError, RecursionError)

Json = dict[str, Any]


def export_layout(cache: HasEngine, directory: str, **options: Any) -> Exported:  # noqa: ANN401
    """Write kernels of a cache as an image layout into a new or empty directory.

    On the same platform, equal bundles make equal layouts. The layout is written under a temporary
    name, and is renamed to `directory` when it is complete.

    Args:
        cache: a `KernelCache`.
        directory: the path of the layout; its parent must exist.
        options: the same keyword arguments as for `export_bundle`.

    Raises:
        BundleError: `directory` is not empty, or is not a directory.
        BackendError, ConfigError, OSError: in the same cases as in `export_bundle`.
    """
    target = os.path.realpath(directory)
    if os.path.lexists(target) and not (os.path.isdir(target) and not os.listdir(target)):
        raise BundleError(f"{directory}: expected a new or an empty directory")
    with tempfile.TemporaryDirectory(prefix=".kcache-", dir=os.path.dirname(target)) as folder:
        _let_owner_in(folder)
        bundle = os.path.join(folder, BUNDLE)
        done = export_bundle(cache, bundle, **options)
        layout = os.path.join(folder, "layout")
        _write(Path(layout), bundle, labels(verify_bundle(bundle)))
        os.rename(layout, target)
    return done


def labels(contents: BundleContents) -> dict[str, str]:
    """Return the labels of an image, which describe the kernels.

    Besides kcache's own labels, these are labels in the form of MCV, another tool that puts kernels
    into images.
    """
    ours = {
        "archs": contents.archs,
        "compilers": contents.compilers,
        "functions": contents.functions,
        "kernels": contents.kernels,
        "size": contents.size,
    }
    targets = [
        {"backend": "cuda", "arch": arch.partition("_")[2], "warp_size": 32}
        for arch in contents.archs
    ]
    return {
        **{
            f"kcache.image/{name}": json.dumps(value, sort_keys=True)
            for name, value in ours.items()
        },
        "kcache.image/driver": contents.driver,
        "kcache.image/platform": "/".join(_platform().values()),
        "cache.kcache.image/entry-count": str(contents.kernels),
        "cache.kcache.image/cache-size-bytes": str(contents.size),
        "cache.kcache.image/summary": json.dumps({"targets": targets}),
    }


def _let_owner_in(folder: str | Path) -> None:
    """Give the owner all rights on a new directory, because some umasks take them away."""
    os.chmod(folder, stat.S_IMODE(os.stat(folder).st_mode) | stat.S_IRWXU)


def _platform() -> dict[str, str]:
    machine = platform.machine()
    return {"os": platform.system().lower(), "architecture": _MACHINES.get(machine, machine)}


def _write(layout: Path, bundle: str, labels: dict[str, str]) -> None:
    blobs = layout / "blobs" / "sha256"
    for each in (layout, blobs.parent, blobs):
        each.mkdir()
        _let_owner_in(each)
    packed = layout / "layer"
    with tarfile.open(packed, "w") as archive, open(bundle, "rb") as file:
        member = tarfile.TarInfo(BUNDLE)
        member.size, member.mode = os.path.getsize(bundle), 0o444
        archive.addfile(member, file)
    with open(packed, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    layer = _descriptor("layer.v1.tar", digest, os.path.getsize(packed))
    packed.rename(blobs / digest)
    config = _put(
        blobs,
        "config.v1+json",
        {
            **_platform(),
            "config": {"Labels": labels},
            "rootfs": {"type": "layers", "diff_ids": [layer["digest"]]},
        },
    )
    manifest = _put(blobs, "manifest.v1+json", _listed("manifest", config=config, layers=[layer]))
    named = {"platform": _platform(), "annotations": {f"{_REF}.name": "latest"}}
    index = _listed("index", manifests=[{**manifest, **named}])
    (layout / "index.json").write_bytes(_encoded(index))
    (layout / "oci-layout").write_bytes(_encoded(_LAYOUT))


_REF = "org.opencontainers.image.ref"


def _listed(kind: str, **parts: object) -> Json:
    return {"schemaVersion": 2, "mediaType": f"{_TYPE}{kind}.v1+json", **parts}


def _put(blobs: Path, kind: str, value: Json) -> Json:
    data = _encoded(value)
    digest = hashlib.sha256(data).hexdigest()
    (blobs / digest).write_bytes(data)
    return _descriptor(kind, digest, len(data))


def _descriptor(kind: str, digest: str, size: int) -> Json:
    return {"mediaType": _TYPE + kind, "digest": f"sha256:{digest}", "size": size}


def _encoded(value: Json) -> bytes:
    return json.dumps(value, sort_keys=True, indent=1).encode()


@contextmanager
def bundle_at(path: str) -> Generator[str]:
    """Yield the path of the bundle that is at `path`, or in the directory at `path`.

    Such a directory contains a file `kernels.kcb`, or it is an OCI image layout. From a layout, the
    bundle is unpacked into a temporary file, which is removed at the end of the block.

    Raises:
        BundleError: `path` is a directory without a bundle, or with a malformed layout.
        OSError: a file can't be read.
    """
    if not os.path.isdir(path):
        yield path
    elif os.path.exists(mounted := os.path.join(path, BUNDLE)):
        yield mounted
    else:
        with tempfile.NamedTemporaryFile(prefix="kcache-") as unpacked:
            try:
                _unpack(Path(path), unpacked.name)
            except (LookupError, TypeError, ValueError, OSError, *_MALFORMED) as error:
                expected = f"expected a directory or an OCI image layout with {BUNDLE}"
                raise BundleError(f"{path}: {expected} ({error})") from error
            yield unpacked.name


def _unpack(layout: Path, target: str) -> None:
    (manifest,) = json.loads((layout / "index.json").read_bytes())["manifests"]
    (layer,) = json.loads(_blob(layout, manifest).read_bytes())["layers"]
    with tarfile.open(_blob(layout, layer)) as archive, open(target, "wb") as file:
        member = archive.extractfile(BUNDLE)
        if member is None:
            raise ValueError(f"{BUNDLE} is not a file")
        shutil.copyfileobj(member, file)


def _blob(layout: Path, descriptor: Json) -> Path:
    algorithm, _, digest = str(descriptor["digest"]).partition(":")
    if algorithm != "sha256" or not digest.isalnum():
        raise ValueError(f"expected a SHA-256 digest, got {descriptor['digest']}")
    return layout / "blobs" / algorithm / digest
