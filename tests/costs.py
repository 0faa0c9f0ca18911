"""Costs: what a run of the tests took, printed at its end beside the slowest tests.

Counted is what the tests' own processes do: the processes that they start, not those that these
start, and the kernels that they have compiled, by the cache or directly.
"""

import sys
from collections import Counter
from typing import Any

import pytest

from kcache.nvrtc.workers.pool import WorkerPool

#: What an audit event counts as. Tests that call the compiler themselves raise the last one.
_EVENTS = {
    "subprocess.Popen": "processes",
    "os.fork": "processes",
    "os.posix_spawn": "processes",
    "tests.compile": "compiles",
}
#: What this process did.
_counts: Counter[str] = Counter()
#: What the processes of the run did, all together.
_total: Counter[str] = Counter()


def pytest_configure() -> None:
    """Begin to count."""
    sys.addaudithook(_note)
    compile_ = WorkerPool.compile

    def counted(self: WorkerPool, *args: Any, **kwargs: Any) -> Any:
        sys.audit("tests.compile")
        return compile_(self, *args, **kwargs)

    WorkerPool.compile = counted  # type: ignore[method-assign]


def _note(event: str, _: object) -> None:
    if event in _EVENTS:
        _counts[_EVENTS[event]] += 1


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Hand the counts over to the process that prints them."""
    output = getattr(session.config, "workeroutput", None)
    if output is None:
        _total.update(_counts)
    else:
        output["costs"] = dict(_counts)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Add the counts of a process of pytest-xdist."""
    _total.update(getattr(node, "workeroutput", {}).get("costs", {}))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the counts."""
    terminalreporter.write_line(
        f"{_total['processes']} processes started, {_total['compiles']} kernels compiled"
    )
