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

from kcache.testing._batches import BatchTests
from kcache.testing._processes import ProcessTests
from kcache.testing._recency import RecencyTests
from kcache.testing._strangers import StrangerTests
from kcache.testing._threads import ThreadTests
from kcache.testing._trouble import TroubleTests
from kcache.testing._usage import UsageTests
from kcache.testing._values import ValueTests
from kcache.testing.machine import run_cache_machine

__all__ = ["BackendContract"]


class BackendContract(
    ValueTests,
    RecencyTests,
    UsageTests,
    BatchTests,
    ThreadTests,
    ProcessTests,
    TroubleTests,
    StrangerTests,
):
    """Subclass it in a test module, supply `open` and `look`, and pytest runs every promise.

    Each test checks one promise, which its docstring states. The tests compare the answers of the
    backend with `look` and the other hooks. These read the medium itself, so the backend can't
    confirm its own mistakes. A correct backend passes in well under a minute. A test that hangs is
    ended after a minute.

    The tests fork and kill processes, where the system can fork. A new process loads the subclass
    by its file and name, so define it at the top level of a module that can be imported alone.

    Attributes:
        machine_settings: Hypothesis's settings for `run_cache_machine`; None for its own.
    """

    machine_settings: hypothesis.settings | None = None

    def test_an_engine_behaves_as_its_model(self) -> None:
        """With this backend an engine is an LRU map of at most the cap, whatever is damaged."""
        kind = type(self)
        damages = kind.write_raw is not BackendContract.write_raw
        run_cache_machine(
            self.open,
            self.look,
            read_raw=self.read_raw if damages else None,
            write_raw=self.write_raw if damages else None,
            persistent=self.persistent,
            heals=self.heals,
            exact_order=self.exact_order,
            settings=self.machine_settings,
        )
