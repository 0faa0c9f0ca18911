"""docs/how-to/deliver-to-pods.md: its image goes through a registry, and then provides kernels."""

import json
import sys
from pathlib import Path

import pytest
from core.helpers import run
from docs.pages import DOCS, blocks
from docs.reader import Reader
from remote import servers

PAGE = DOCS / "how-to" / "deliver-to-pods.md"


@pytest.mark.usefixtures("nvrtc")
def test_through_a_registry(tmp_path: Path) -> None:
    """The page's commands push, inspect and pull an image. The bundle in the image can be used."""
    servers.program("skopeo", "skopeo")
    (pushing,) = (block for block in blocks(PAGE) if "skopeo copy" in block.text)
    before = [block for block in blocks(PAGE) if block.line < pushing.line]
    reader = Reader(tmp_path / "reader")
    try:
        for block in before:
            reader.follow(block)
        with servers.registry(tmp_path) as host:
            reader.environ["REGISTRY"] = host
            # This registry does not use TLS, unlike a user's registry.
            plain = pushing.text.replace("copy ", "copy --dest-tls-verify=false ")
            told = reader.shell(pushing, plain.replace("inspect ", "inspect --tls-verify=false "))
            pulled = tmp_path / "pulled"
            source = f"docker://{host}/kernels:v1"
            done = run("skopeo", "copy", "--src-tls-verify=false", source, f"oci:{pulled}:latest")
            assert done.returncode == 0, done.stderr
    finally:
        reader.close()
    labels = json.loads(told[told.index("{") :])["Labels"]
    assert json.loads(labels["kcache.image/archs"]) == ["sm_90"]
    assert json.loads(labels["kcache.image/functions"]) == ["twice"]
    assert labels["cache.kcache.image/entry-count"] == labels["kcache.image/kernels"] == "1"
    # skopeo has compressed the layer. The config, which has the digest of its content, is the same.
    sent, arrived = (
        {path.name for path in (layout / "blobs" / "sha256").iterdir()}
        for layout in (reader.folder / "image", pulled)
    )
    assert len(sent & arrived) == 1
    checked = run(sys.executable, "-m", "kcache", "bundle", "check", pulled, "--arch", "sm_90")
    assert (checked.returncode, checked.stdout) == (0, "serves: 1 kernel and 0 manifests, sm_90\n")
