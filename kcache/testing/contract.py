"""BackendContract: the pytest suite of what a backend promises, for anyone's backend.

```python
from kcache.testing import BackendContract


class TestMyBackend(BackendContract):
    def open(self, place, *, max_size=1 << 26, read_only=False, clock=None):
        return MyBackend(place, max_size=max_size, read_only=read_only, clock=clock or time_ns)

    def look(self, place):
        return {path.name: path.stat().st_size for path in place.glob("*")}
```
"""

from __future__ import annotations

import hypothesis
from hypothesis.stateful import (
    run_state_machine_as_test,  # pyright: ignore[reportUnknownVariableType]
)

from kcache.testing._processes import BatchTests, ProcessTests
from kcache.testing._trouble import StrangerTests, TroubleTests
from kcache.testing._values import RecencyTests, ValueTests
from kcache.testing.machine import DEFAULTS, CacheMachine


class BackendContract(
    ValueTests,
    RecencyTests,
    BatchTests,
    ProcessTests,
    TroubleTests,
    StrangerTests,
):
    """Subclass it in a test module, supply `open` and `look`, and pytest runs every promise.

    Each test checks one promise, which its docstring states. The tests compare the answers of the
    backend with `look` and the other hooks. These read the medium itself, so the backend can't
    confirm its own mistakes. A correct backend passes in well under a minute. A test that hangs is
    ended after a minute.

    The tests fork and kill processes, where the system can fork.

    Attributes:
        machine_settings: Hypothesis's settings for `CacheMachine`; None for its own.
    """

    machine_settings: hypothesis.settings | None = None

    def test_an_engine_behaves_as_its_model(self) -> None:
        """With this backend an engine is an LRU map of at most the cap, whatever is damaged."""
        suite = self

        class Exact(CacheMachine):
            def __init__(self) -> None:
                super().__init__(suite)

        class Harmed(Exact):
            exact = False

        for machine in (Exact, Harmed) if self.exact_order else (Harmed,):
            run_state_machine_as_test(machine, settings=self.machine_settings or DEFAULTS)
