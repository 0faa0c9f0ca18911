"""`python -m kcache`: the same as the command `kcache`."""

from __future__ import annotations

import sys

from kcache.cli import main

if __name__ == "__main__":
    sys.exit(main())
