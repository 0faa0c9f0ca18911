"""Precompiled (later)."""

from __future__ import annotations

from kcache.nvrtc.workers.messages import Ask
from kcache.nvrtc.workers.nvrtc import Nvrtc, Outputs
from kcache.nvrtc.workers.recorder import Recorder


class Precompiled:
    def __init__(self, nvrtc: Nvrtc, recorder: Recorder) -> None:
        self._nvrtc = nvrtc

    def compile(self, ask: Ask) -> Outputs:
        return self._nvrtc.compile(
            ask.source.encode(),
            ask.source_name.encode(),
            [flag.encode("utf-8", "surrogateescape") for flag in ask.flags],
            names=[name.encode() for name in ask.names],
            headers={name.encode(): text.encode() for name, text in ask.headers.items()},
        )
