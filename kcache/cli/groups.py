"""Group: a command with commands. It answers a misspelt one with the most similar one."""

from __future__ import annotations

from collections.abc import Sequence

import click

from kcache.util.nearest import nearest

__all__ = ["Group"]

#: Other common names for our commands.
_ELSEWHERE = {
    **dict.fromkeys(("list", "dir"), "ls"),
    **dict.fromkeys(("ls", "contents"), "list"),
    **dict.fromkeys(("delete", "del", "remove", "evict"), "rm"),
    **dict.fromkeys(("gc", "prune", "cleanup", "clean"), "trim"),
    **dict.fromkeys(("wipe", "purge", "reset"), "clear"),
    **dict.fromkeys(("status", "size", "du", "statistics", "show-stats"), "stats"),
    **dict.fromkeys(("where", "directory"), "path"),
    **dict.fromkeys(("check", "fsck"), "verify"),
    **dict.fromkeys(("settings", "env"), "config"),
    **dict.fromkeys(("build", "nvcc"), "compile"),
    **dict.fromkeys(("explain", "miss"), "why"),
    **dict.fromkeys(("exec",), "run"),
    **dict.fromkeys(("export", "import"), "bundle"),
    **dict.fromkeys(("html",), "report"),
}


class Group(click.Group):
    """A command with commands."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command that the first argument names.

        Raises:
            UsageError: there is none; it says which one may be meant.
        """
        name = args[0]
        asked = not name.startswith("-") and not ctx.resilient_parsing
        if asked and self.get_command(ctx, name) is None:
            meant = _meant(name.lower(), self.list_commands(ctx))
            hint = "" if meant is None else f" Did you mean `{ctx.command_path} {meant}`?"
            ctx.fail(f"No such command {name!r}.{hint}")
        return super().resolve_command(ctx, args)


def _meant(name: str, known: Sequence[str]) -> str | None:
    elsewhere = _ELSEWHERE.get(name)
    if elsewhere in known:
        return elsewhere
    begun = [each for each in known if each.startswith(name)]
    return begun[0] if len(begun) == 1 else nearest(name, known)
