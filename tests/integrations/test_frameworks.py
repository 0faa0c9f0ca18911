"""`kcache integrations`: the frameworks that are installed, and the lines that it prints."""

import json
from importlib import import_module
from importlib.metadata import version

import pytest
from click.testing import CliRunner

from kcache.cli.app import app
from kcache.cli.commands.cmd_doctor import installed


def test_the_command_shows_what_is_installed(nvrtc: tuple[int, int]) -> None:
    told = json.loads(CliRunner().invoke(app, ["integrations", "--json"]).stdout)
    assert [each["framework"] for each in told] == [each.framework for each in installed()]
    bindings = next(each for each in told if each["framework"] == "cuda.bindings")
    assert bindings == {
        "framework": "cuda.bindings",
        "installed": version("cuda-bindings"),
        "tested_with": "13.5",
        "covered_by": "kcache run",
        "line": "kcache run -- COMMAND",
    }
    table = CliRunner().invoke(app, ["integrations"]).stdout.splitlines()
    assert table[0].split()[:2] == ["FRAMEWORK", "INSTALLED"]
    assert len(table) == len(told) + 1


@pytest.mark.parametrize("framework", ["cuda.core", "triton"])
def test_what_a_line_names_is_there(framework: str) -> None:
    pytest.importorskip(framework)
    names = {"cuda.core": ("cuda_core", "ProgramCache"), "triton": ("triton", "CacheManager")}
    module, name = names[framework]
    assert hasattr(import_module(f"kcache.integrations.{module}"), name)
    (line,) = [each.line for each in installed() if each.framework.lower() == framework]
    assert f"kcache.integrations.{module}" in line
    assert name in line
