"""Worker processes, which compile and do nothing else."""

from __future__ import annotations

#: The process id that the compiler gets in every worker. It is part of the names of internal
#: symbols, behind eight digits that depend on the clock and the working directory.
PROCESS_ID = 10_007
