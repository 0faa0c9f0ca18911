"""`--json`: which commands have it, and what those say that have no tests of their own."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import pytest
from cli.helpers import damage, fill, kernel, key

from kcache.cli.app import app

#: Commands that print no facts, but a file, or a program's own output, or that something was done.
WITHOUT = {
    *("kcache run", "kcache report", "kcache extract", "kcache key new"),
    *("kcache server start", "kcache server stop"),
}


def leaves(group: click.Group, name: str) -> Iterator[tuple[str, click.Command]]:
    """Yields every command that is no group, with its whole name."""
    context = click.Context(group)
    for each in group.list_commands(context):
        command = group.get_command(context, each)
        assert command is not None
        if isinstance(command, click.Group):
            yield from leaves(command, f"{name} {each}")
        else:
            yield f"{name} {each}", command


def test_every_command_that_prints_facts_has_it() -> None:
    found = dict(leaves(app, "kcache"))
    missing = {
        name
        for name, command in found.items()
        if not any("--json" in param.opts for param in command.params)
    }
    # The one of `info` comes with the count of kernels.
    assert missing - {"kcache info"} == WITHOUT
    assert len(found) > 20


def test_compile(work: Path, here: Callable, nvrtc: object) -> None:
    (work / "bad.cu").write_text("int x = ;\n")
    line = ["compile", "axpy.cu", "--arch", "sm_90", "--name", "axpy<float>", "--json"]
    said = here(*line)
    assert (said.code, said.err) == (0, "")
    (first,) = json.loads(said.out)
    assert (first["source"], first["arch"], first["names"]) == ("axpy.cu", "sm_90", ["axpy<float>"])
    assert (first["hit"], first["cached"], first["error"]) == (False, True, None)
    assert (first["output"], first["emit"]) == ("axpy.cubin", "cubin")
    assert first["size_bytes"] == (work / "axpy.cubin").stat().st_size
    assert list(first["lowered_names"]) == ["axpy<float>"]
    (second,) = json.loads(here(*line).out)
    assert second["hit"]
    assert second["compile_seconds"] == first["compile_seconds"]
    said = here(*line, "-o", "-")
    assert said.code == 2
    said = here("compile", "bad.cu", "--arch", "sm_90", "--json")
    assert said.code == 1
    (failed,) = json.loads(said.out)
    assert "error" in failed["log"]
    assert failed["error"]
    assert failed["source"] == "bad.cu"


def test_migrate(cache_directory: Path, here: Callable) -> None:
    nothing = json.loads(here("migrate", "--to", "zstd", "--json").out)
    assert (nothing["entries"], nothing["size_bytes"]) == (0, 0)
    assert not cache_directory.exists()
    fill(cache_directory, {key(n): kernel() for n in range(3)})
    damage(cache_directory, key(0))
    would = json.loads(here("migrate", "--to", "zstd", "--dry-run", "--json").out)
    assert (would["dry_run"], would["entries"]) == (True, 3)
    done = json.loads(here("migrate", "--to", "zstd", "--json").out)
    assert (done["from"], done["to"], done["keep"], done["dry_run"]) == (
        *("file", "zstd"),
        *(False, False),
    )
    assert done["entries"] == 2
    assert done["size_bytes"] > 2000
    assert done["left_out"] == {"damaged": 1, "unreadable": 0, "other": 0, "too_large": 0}


def test_keys(here: Callable, tmp_path: Path) -> None:
    path = tmp_path / "key"
    assert here("key", "new", path, "--kind", "hmac").code == 0
    (found,) = json.loads(here("key", "show", path, "--json").out)
    assert (found["kind"], found["signs"], len(found["id"]) > 4) == ("hmac", True, True)
    assert here("key", "show", path, "--json", "--public").code == 2


@pytest.mark.slow
def test_demo(here: Callable, nvrtc: object, cccl: Path) -> None:
    said = here("demo", "--arch", "sm_90", "--json")
    assert said.code == 0
    told = json.loads(said.out)
    first, second = told["processes"]
    assert (told["arch"], first["cached"], second["cached"]) == ("sm_90", False, True)
    assert first["digest"] == second["digest"]
    assert first["process_seconds"] > 0
