"""The contract detects broken backends: each fails the test that is meant to detect its fault."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from backends.broken import CAUGHT, suite_of

from kcache.errors import BackendError
from kcache.testing import _base
from kcache.testing.contract import BackendContract

#: The allowed results of a wrong backend's test: the test's own failure, or an error that the
#: backend should not raise.
VERDICTS = (
    *(AssertionError, ExceptionGroup, pytest.fail.Exception),
    *(BackendError, KeyError, OSError, StopIteration, ValueError),
)


@pytest.mark.parametrize(("broken", "test"), CAUGHT, ids=[f"{b.__name__}-{t}" for b, t in CAUGHT])
def test_a_wrong_backend_is_caught(
    broken: Callable[..., Any], test: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_base, "PATIENCE", 1)  # some of the backends hang
    method = getattr(suite_of(broken), test)
    arguments = {"place": tmp_path / "place", "tmp_path": tmp_path}
    wanted = inspect.signature(method).parameters
    try:
        method(**{name: arguments[name] for name in wanted})
    except VERDICTS:
        return
    except pytest.skip.Exception as skipped:
        pytest.fail(f"{test} was skipped: {skipped}")
    pytest.fail(f"{test} passed")


def test_every_promise_says_what_it_is() -> None:
    tests = {name: method for name, method in vars_of(BackendContract) if name.startswith("test_")}
    assert len(tests) > 15
    assert [name for name, method in tests.items() if not method.__doc__] == []


def vars_of(kind: type) -> list[tuple[str, Any]]:
    return inspect.getmembers(kind, inspect.isfunction)
