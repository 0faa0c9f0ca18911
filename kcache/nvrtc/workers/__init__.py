"""Worker processes, which compile and do nothing else."""

from __future__ import annotations

#: The process id that the compiler is told in every worker. It stands, behind eight digits that
#: depend on the clock and the working directory, in the names of internal symbols.
PROCESS_ID = 10_007
