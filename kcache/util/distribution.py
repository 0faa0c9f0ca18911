"""Distribution: the name under which kcache is installed, and how to install more of it."""

from __future__ import annotations

from kcache._version import __version__

NAME = "kcache-cuda"
#: Whether the package index has our distribution. Until then anybody could register that name
#: there, so no hint and no page may tell users to install it by name. This constant alone decides.
PUBLISHED = False


def how_to_install(extras: str) -> str:
    """Return how to install kcache with extras such as `cu13,cli`, as a command with a few words.

    Until kcache is published, the command names the source of this installation: a checkout or a
    wheel.
    """
    if PUBLISHED:
        return f"pip install '{NAME}[{extras}]'"
    origin = _origin()
    if origin:
        return f"pip install '{origin}[{extras}]'"
    wheel = f"{NAME.replace('-', '_')}-{__version__}-py3-none-any.whl"
    return (
        f"pip install '.[{extras}]' in a checkout of kcache, or pip install './{wheel}[{extras}]'"
    )


def _origin() -> str:
    """Return the folder or the wheel that kcache was installed from; empty if it is gone."""
    import json  # imported only if something is missing
    import os
    from importlib import metadata
    from urllib.parse import urlsplit
    from urllib.request import url2pathname

    try:
        text = metadata.distribution(NAME).read_text("direct_url.json")  # PEP 610
        found: dict[str, object] = json.loads(text or "{}")
        url = urlsplit(str(found.get("url", "")))
    except (metadata.PackageNotFoundError, ValueError, OSError):
        return ""
    path = url2pathname(url.path) if url.scheme == "file" else ""
    return path if os.path.exists(path) else ""
