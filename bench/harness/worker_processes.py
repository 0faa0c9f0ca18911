"""Worker processes: stay alive, and do the same at the same time when they are told to."""

import json
import subprocess
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import IO, Any, Self

_CODE = """\
import sys
sys.path.insert(0, {bench!r})
from harness.worker_processes import serve
serve()
"""


class Workers:
    """Processes that each call `MODULE.work(number, *arguments)`, then what it returned.

    The arguments and what comes back are JSON. The processes are told one after another, without
    waiting in between, and are waited for together.

    Raises RuntimeError if one of them ends.
    """

    def __init__(self, module: str, count: int, arguments: Sequence[object]) -> None:
        code = _CODE.format(bench=str(Path(__file__).parents[1]))
        command = [sys.executable, "-c", code]
        pipe = subprocess.PIPE
        self._processes = [
            subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) for _ in range(count)
        ]
        try:
            for number, process in enumerate(self._processes):
                _tell(process, [module, number, *arguments])
            for process in self._processes:
                _answer(process)
        except BaseException:
            self.__exit__()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.communicate()

    def run(self, count: int, *arguments: object) -> list[Any]:
        """Has the first `count` of them do it; returns what each of them returned."""
        chosen = self._processes[:count]
        for process in chosen:
            _tell(process, arguments)
        return [_answer(process) for process in chosen]


def _tell(process: "subprocess.Popen[str]", what: Sequence[object]) -> None:
    _pipe(process.stdin).write(json.dumps(what) + "\n")
    _pipe(process.stdin).flush()


def _answer(process: "subprocess.Popen[str]") -> Any:
    line = _pipe(process.stdout).readline()
    if not line:
        raise RuntimeError(f"a worker ended with status {process.wait()}")
    return json.loads(line)


def _pipe(pipe: IO[str] | None) -> IO[str]:
    if pipe is None:
        raise RuntimeError("no pipe")
    return pipe


def serve() -> None:
    """Runs the commands of the parent until the pipe is closed."""
    module, number, *arguments = json.loads(sys.stdin.readline())
    do = import_module(module).work(number, *arguments)
    result: object = None
    while True:
        sys.stdout.write(json.dumps(result) + "\n")
        sys.stdout.flush()
        line = sys.stdin.readline()
        if not line:
            return
        result = do(*json.loads(line))
