"""Surroundings: directory, variables and NVRTC of another process that wants a kernel."""

from __future__ import annotations

from typing import NamedTuple

from kcache.config import COMPILER_VARIABLES

__all__ = ["Surroundings"]


class Surroundings(NamedTuple):
    """The parts of a process that asks for a kernel which a compiler can see.

    The drop-in's server compiles for programs. Each has a working directory, an environment and an
    NVRTC of its own.

    Attributes:
        library: path of the NVRTC that compiles.
        compiler: identity of that NVRTC; see `library`.
        directory: the working directory.
        environment: variables as that process has them, as (name, value) in any fixed order; None
            for one that is not set. Variables that are not named are as in this process.
        alone: whether the source lies alone in its directory, which may have been made for it, so
            that the next process will use another.
    """

    library: str
    compiler: str
    directory: str
    environment: tuple[tuple[str, str | None], ...]
    alone: bool = False

    def variable(self, name: str) -> str | None:
        """Return the value of a variable, or None."""
        for each, value in self.environment:
            if each == name:
                return value
        from kcache import config

        return config.variable(name)

    def compiler_variables(self) -> tuple[str, ...]:
        """Return what `kcache.config.compiler_variables` returns in that process."""
        found = ((name, self.variable(name)) for name in COMPILER_VARIABLES)
        return tuple(f"{name}={value}" for name, value in found if value is not None)
