"""The compiler: options, request, key, one compile, and which headers decided its outcome."""

from __future__ import annotations

#: Layout of what the NVRTC frontend stores. Raise it when that changes: older entries then miss.
PRODUCER = "kcache-nvrtc/2"
