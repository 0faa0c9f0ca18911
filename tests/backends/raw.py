"""Reads and changes an LMDB database in another process, because a process may open it only once.

Run as a script, this module answers the requests that `Looker` sends to its standard input. Each
request and each answer is a line of JSON.
"""

import atexit
import base64
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


class Looker:
    """A client of a process that runs this module. The first request starts the process."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._pid = 0

    def ask(self, command: str, place: Path, *arguments: str) -> Any:
        if self._process is None or self._pid != os.getpid():  # a forked child starts its own
            self._pid = os.getpid()
            self._process = subprocess.Popen(
                [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
        self._process.stdin.write(json.dumps([command, str(place), *arguments]) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def end(self) -> None:
        process, self._process = self._process, None
        if process is not None and self._pid == os.getpid():
            process.stdin.close()
            process.wait()
            process.stdout.close()


looker = Looker()
atexit.register(looker.end)


def look(place: Path) -> dict[str, int]:
    """Return the length of the value under each key of an LMDB backend."""
    return looker.ask("look", place)


def read(place: Path, key: str) -> bytes:
    """Return the value that LMDB holds for a key."""
    return base64.b64decode(looker.ask("read", place, key))


def write(place: Path, key: str, image: bytes) -> None:
    """Replace the value that LMDB holds for a key, and change nothing else."""
    looker.ask("write", place, key, base64.b64encode(image).decode())


def _answer(command: str, place: str, *arguments: str) -> Any:
    import lmdb

    folder = os.path.join(place, "db")
    if not os.path.exists(os.path.join(folder, "data.mdb")):
        return {}
    with lmdb.open(folder, readonly=True) as env:
        size = env.info()["map_size"]
        if command != "write":
            with env.begin() as txn:
                if command == "read":
                    value = txn.get(b"v" + bytes.fromhex(arguments[0]))
                    return base64.b64encode(value).decode()
                cursor = txn.cursor()
                cursor.set_range(b"v")
                rows = cursor.iternext(values=True)
                return {name[1:].hex(): len(value) for name, value in rows if name[:1] == b"v"}
    value = base64.b64decode(arguments[1])
    size += 2 * len(value) if len(value) > size else 0  # as a process with a larger cap would
    with lmdb.open(folder, map_size=size, lib_version=0) as env, env.begin(write=True) as txn:
        return txn.replace(b"v" + bytes.fromhex(arguments[0]), value) and 1


def _serve() -> None:
    import lmdb

    for line in sys.stdin:
        request = json.loads(line)
        for _ in range(5):
            try:
                answer = _answer(*request)
                break
            except (lmdb.Error, OSError):  # the file has just been replaced or removed
                answer = {}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    _serve()
