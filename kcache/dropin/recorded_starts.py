"""Recorded starts: repeats recorded starts of nvcc, so that the outputs of nvcc are in the cache.

A directory that no longer exists is replaced by a temporary one with the recorded sources, because
programs that compile at run time often use a temporary directory with a random name.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

from kcache.daemons import sockets, spawn
from kcache.dropin import libraries
from kcache.dropin import run_environment as env
from kcache.errors import CompileError, ConfigError
from kcache.kernel_cache import KernelCache
from kcache.kernels.compiled_kernel import CompiledKernel
from kcache.nvcc.request import Roots, Start


def start_of(recorded: Mapping[str, Any], stack: ExitStack) -> Start:
    """Return a start of nvcc that repeats a recorded start in directories that exist.

    Args:
        recorded: what `Start.recorded` has returned.
        stack: removes the temporary directories when it is closed.

    Raises:
        ConfigError: `recorded` is not a recorded start.
        OSError: the recorded sources can't be written to a temporary directory.
    """
    try:
        start = _made(recorded, lambda text: text)
        paths = {path: path for path in start.roots.directories}
        for path in paths:
            if not os.path.isdir(path):
                paths[path] = stack.enter_context(tempfile.TemporaryDirectory(prefix="kcache-"))
        if paths.keys() == {*paths.values()}:
            return start
        here = Roots(paths.values(), "/", {})
        for path, text in recorded["sources"].items():
            moved = here.named(start.roots.numbered_path(path))
            if not os.path.exists(moved):
                with open(moved, "xb") as file:
                    file.write(os.fsencode(text))
        return _made(recorded, lambda text: here.named(start.roots.numbered(text)))
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
        raise ConfigError(f"a recorded start of nvcc has a wrong field: {error!r}") from error


def _made(recorded: Mapping[str, Any], here: Callable[[str], str]) -> Start:
    return Start.make(
        here(recorded["program"]),
        here(recorded["directory"]),
        [*map(here, recorded["arguments"])],
        {name: here(value) for name, value in recorded["environment"].items()},
        mask=int(recorded["mask"]),
        streams=(bool(recorded["one_stream"]), False),
    )


def compile_all(
    cache: KernelCache, starts: Sequence[Start], jobs: int, done: Callable[[], object]
) -> list[CompiledKernel | CompileError]:
    """Return the result of each start, in order. nvcc runs only if the cache has no result.

    Args:
        cache: the cache to look into; nvcc's outputs are stored there.
        starts: the starts to repeat.
        jobs: how many starts may run at the same time.
        done: called after each start that did not fail.

    Raises:
        MissingError, OSError: nvcc can't be started and recorded here.
    """
    variables = env.of_service(env.current()) | {"KCACHE_DIR": str(cache.directory)}
    client = libraries.for_nvcc(variables, libraries.CLIENT)
    socket = spawn.spawn_own(env.service(variables), variables, logs=False)

    def make(start: Start) -> CompiledKernel | CompileError:
        found = cache._tiers.hit(start.request)
        if found is None:
            text = _run(client, socket, start)
            found = cache._tiers.hit(start.request)
            if found is None:
                return CompileError(text or "nvcc's output can't be stored", log=text)
            found = found._replace(cached=False)
        done()
        return found

    try:
        with ThreadPoolExecutor(jobs) as pool:
            return [*pool.map(make, starts)]
    finally:
        sockets.ask(socket, sockets.STOP)


def _run(client: str, socket: str, start: Start) -> str:
    """Run nvcc through kcache's `client`; return what nvcc printed, or why it can't be started."""
    try:
        done = subprocess.run(
            [client, "--program", start.program, *start.arguments],
            cwd=start.directory,
            env={**start.environment, env.SOCKET: socket},
            umask=start.mask,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT if start.one_stream else subprocess.PIPE,
            check=False,
        )
    except (OSError, ValueError) as error:  # such as a NUL in the recording
        return f"nvcc can't be started: {error}"
    return os.fsdecode(done.stdout + (done.stderr or b""))
