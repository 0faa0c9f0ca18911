"""Worker processes, which compile and do nothing else."""

from __future__ import annotations

#: The process ids that the compiler gets in every worker: the first, and the second for a proof. It
#: is part of the names of internal symbols, behind eight digits that depend on the clock and the
#: working directory.
PROCESS_IDS = (10_007, 20_011)
