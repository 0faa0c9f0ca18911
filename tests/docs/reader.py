"""Reader: runs the blocks of a page in order, as a user would in one folder and one terminal.

The commands of a page are really run, with two exceptions. `pip`, `tox`, `docker` and `apt-get` are
rejected, because a test must not change the machine; `test_installing.py` tests installations. In
recipes for an image or a workflow, these commands, and those that need root (`useradd`, `chown`,
...), succeed without doing anything, because what they would install is already there.

A Dockerfile or a workflow of a CI service is translated as follows:

- absolute paths in an image (`/opt/kcache`) become paths below a folder beside the page's folder;
  those of the system (`/bin`, `/usr`, ...) are not changed;
- `FROM`, `USER` and `uses:` have no effect; `COPY` copies files from the page's folder, except
  wheels, because kcache is already installed;
- `pip`, `useradd`, `chown` and similar commands succeed without doing anything;
- `github.workspace` is the only expression of a workflow that is supported.
"""

import doctest
import json
import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import yaml
from core.helpers import command
from docs.pages import Block

#: Commands that would change the machine.
INSTALLING = ("pip", "pip3", "tox", "docker", "podman", "apt-get", "apt", "uv")
#: Commands in a recipe that need root.
AS_ROOT = ("useradd", "groupadd", "adduser", "chown")
#: The exit status of a rejected command.
REFUSED = 97

_SECONDS = 280
_FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE

#: Matches a `kcache` command that needs no shell and no new interpreter: it has no shell syntax,
#: and starts no program and no server.
_ALONE = re.compile(r"kcache (?!run\b|server\b)(?:[\w =.,:/+-]|'[^'\n]*')*\n?")

#: Makes several shells behave like one terminal: each gets the variables, the environment and the
#: working directory of the shell before it.
_TERMINAL = """
if test -e {variables}; then source {variables}; fi
_left() {{
    declare -p | grep '^declare -- ' | grep -vE ' (_|BASH|COMP_|IFS|OPT|PS4)' > {variables} || true
    env -0 > {state}
    pwd >> {state}
}}
trap _left EXIT
"""

#: A program that reads doctests as lines of JSON, runs them in one namespace, and answers with
#: their failures. The doctests may print, so the answers go to another descriptor.
_DOCTESTS = """
import doctest, json, os, sys
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
names = {"__name__": "__main__"}
# As Sphinx runs them.
flags = doctest.ELLIPSIS | doctest.IGNORE_EXCEPTION_DETAIL | doctest.DONT_ACCEPT_TRUE_FOR_1
for line in sys.stdin:
    block = json.loads(line)
    test = doctest.DocTestParser().get_doctest(
        block["text"], {}, block["page"], block["page"], block["line"]
    )
    test.globs = names
    told = []
    doctest.DocTestRunner(optionflags=flags).run(test, out=told.append, clear_globs=False)
    print(json.dumps([len(test.examples), "".join(told)]), file=answers, flush=True)
"""


class Reader:
    """Runs the blocks of a page in a folder.

    Args:
        place: an empty folder that only this reader uses.
        lenient: whether commands that install something succeed without doing anything.
    """

    def __init__(self, place: Path, *, lenient: bool = False) -> None:
        self.folder = place / "page"
        self.cwd = self.folder
        self._place = place
        tools = _tools(place / "bin", lenient=lenient)
        home = place / "home"
        for folder in (self.folder, home):
            folder.mkdir(parents=True)
        (self.folder / ".venv").mkdir()
        (self.folder / ".venv" / "bin").symlink_to(tools)
        dropped = ("KCACHE_", "PYTHONSAFEPATH", "PYTHONPATH", "PYTHONUNBUFFERED", "VIRTUAL_ENV")
        self.environ = {
            **{name: text for name, text in os.environ.items() if not name.startswith(dropped)},
            "PATH": f"{tools}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
            "HOME": str(home),
            "XDG_CACHE_HOME": str(home / ".cache"),
        }
        self._doctests: subprocess.Popen[str] | None = None
        self._said: str | None = None

    def close(self) -> None:
        if self._doctests is not None:
            self._doctests.kill()
            self._doctests.communicate()

    # -- blocks ------------------------------------------------------------------------------------

    def follow(self, block: Block) -> None:
        """Run a block, or compares it with the output of the previous block.

        Raises:
            AssertionError: the block fails, or the output differs; the message names the place.
        """
        said, self._said = self._said, None
        if block.file is not None:
            target = self.cwd / block.file
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(block.text, encoding="utf-8")
        elif block.language == "text":
            if not block.follows or said is None:
                _fail(block, "expected a block that was run before this output")
            _compare(block, block.text, said)
        elif block.language == "python":
            (self.cwd / ".example.py").write_text(block.text, encoding="utf-8")
            self._said = self._run(block, [sys.executable, ".example.py"])
        elif block.language in ("sh", "bash"):
            self._said = self.shell(block, block.text)
        elif block.language == "console":
            self._console(block)
        elif block.language == "doctest":
            self._doctest(block)
        else:
            parsed(block)

    def shell(self, block: Block, script: str) -> str:
        """Run a script. Its variables and its working directory are kept for the next script."""
        if _ALONE.fullmatch(script):
            words = shlex.split(script)[1:]
            done = command(*words, environ=self.environ, before=self._enter, mixed=True)
            return self._ended(block, done)
        state, variables = self._place / "state", self._place / "variables"
        script = _TERMINAL.format(state=state, variables=variables) + script
        said = self._run(block, ["bash", "-euo", "pipefail", "-c", script])
        *environ, cwd = state.read_bytes().split(b"\0")
        texts = (os.fsdecode(text).partition("=") for text in environ)
        self.environ = {name: text for name, _, text in texts if name not in ("_", "SHLVL")}
        self.cwd = Path(os.fsdecode(cwd).removesuffix("\n"))
        return said

    def _console(self, block: Block) -> None:
        """Run each command after a `$`, and compare its output with the lines below it."""
        steps = commands(block)
        for number, (line, wanted) in enumerate(steps, 1):
            last = number == len(steps)
            marks = {name: text for name, text in block.marks.items() if last or name != "exit"}
            said = self.shell(replace(block, marks=marks), line)
            _compare(block, wanted, said, line)

    def _run(self, block: Block, arguments: list[str]) -> str:
        """Run a program to its end; return its output and its errors, mixed as on a terminal."""
        try:
            done = subprocess.run(
                arguments,
                cwd=self.cwd,
                env=self.environ,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                encoding="utf-8",
                errors="backslashreplace",
                timeout=_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            _fail(block, f"the program takes more than {_SECONDS} s; its output: {error.output!r}")
        return self._ended(block, done)

    def _enter(self) -> None:
        os.chdir(self.cwd)
        os.environ.clear()

    def _ended(self, block: Block, done: subprocess.CompletedProcess[str]) -> str:
        """Return the output of a program, and assert that its exit status is the expected one."""
        wanted = int(block.marks.get("exit", 0))
        if done.returncode != wanted:
            _fail(block, f"expected exit status {wanted}, got {done.returncode}:\n{done.stdout}")
        return done.stdout

    def _doctest(self, block: Block) -> None:
        if self._doctests is None:
            self._doctests = subprocess.Popen(
                [sys.executable, "-c", _DOCTESTS],
                cwd=self.cwd,
                env=self.environ,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        process = self._doctests
        assert process.stdout is not None
        asked = {"text": block.text, "page": block.page, "line": block.line}
        process.stdin.write(f"{json.dumps(asked)}\n")
        process.stdin.flush()
        answer = process.stdout.readline()
        if not answer:
            _fail(block, f"the interpreter of the doctests exited with {process.wait()}")
        examples, told = json.loads(answer)
        if not examples:
            _fail(block, "the doctest has no example")
        if told:
            _fail(block, told)


def commands(block: Block) -> list[tuple[str, str]]:
    """Return the commands of a console block, each with its expected output."""
    steps: list[tuple[str, str]] = []
    for line in block.text.splitlines(keepends=True):
        if line.startswith("$ "):
            steps.append((line[2:], ""))
        elif not steps:
            _fail(block, "expected a command after `$ ` on the first line of a console block")
        elif line.startswith("> ") and not steps[-1][1]:
            steps[-1] = (steps[-1][0] + line[2:], "")
        else:
            steps[-1] = (steps[-1][0], steps[-1][1] + line)
    return steps


def parsed(block: Block) -> object:
    """Return the value of a block of JSON, TOML or YAML.

    Raises:
        AssertionError: the block is in another language, or malformed.
    """
    if block.language not in ("json", "toml", "yaml"):
        _fail(
            block,
            f"nothing runs a block of {block.language or 'no language'!r}: "
            "name the file that it is (`<!-- file: NAME -->`), or the test that runs it",
        )
    try:
        if block.language == "json":
            return json.loads(block.text)
        if block.language == "toml":
            return tomllib.loads(block.text)
        return yaml.safe_load(block.text)
    except (ValueError, yaml.YAMLError) as error:
        _fail(block, f"the block is not {block.language}: {error}")


def _compare(block: Block, wanted: str, said: str, command: str = "") -> None:
    if not doctest.OutputChecker().check_output(wanted, said, _FLAGS):
        told = f"$ {command}" if command else ""
        _fail(block, f"{told}\nexpected, as on the page:\n{wanted}\ngot:\n{said}")


def _fail(block: Block, message: str) -> NoReturn:
    __tracebackhide__ = True
    raise AssertionError(f"{block.where}: {message}")


def _tools(folder: Path, *, lenient: bool) -> Path:
    """Make a folder of programs with the names that users type, such as `python` and `kcache`."""
    folder.mkdir(parents=True)
    beside = Path(sys.executable).parent
    programs = {
        "python": f'exec "{sys.executable}" "$@"',
        "python3": f'exec "{sys.executable}" "$@"',
        "kcache": f'exec "{sys.executable}" -P -m kcache "$@"',
        "pytest": f'exec "{beside / "pytest"}" "$@"',
        **dict.fromkeys(INSTALLING, _refusal(lenient=lenient)),
    }
    if lenient:
        programs |= dict.fromkeys(AS_ROOT, _refusal(lenient=True))
    for name, text in programs.items():
        program = folder / name
        program.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return folder


def _refusal(*, lenient: bool) -> str:
    if lenient:
        return "exit 0"
    return f'echo "$(basename "$0"): a test does not change the machine" >&2; exit {REFUSED}'


# -- recipes for images and workflows ----------------------------------------------------------------

_IMAGE = re.compile(r"(?<![\w./}~-])/(?=(?:app|data|home|opt)\b)")


def follow(reader: Reader, block: Block) -> None:
    """Run a block, which may also be a recipe for an image or a workflow."""
    if "dockerfile" in block.marks:
        _dockerfile(reader, block)
    elif "workflow" in block.marks:
        _workflow(reader, block)
    else:
        reader.follow(block)


def _dockerfile(reader: Reader, block: Block) -> None:
    """Run the commands of a Dockerfile; raise AssertionError if one fails."""
    root = reader.folder.with_name("image")
    root.mkdir(exist_ok=True)
    environ, reader.cwd = dict(reader.environ), root
    for line in filter(None, block.text.splitlines()):
        instruction, _, text = _IMAGE.sub(f"{root}/", line).partition(" ")
        match instruction:
            case "ENV":
                name, _, value = text.partition("=")
                reader.environ[name] = value
            case "WORKDIR":
                reader.cwd = root / text
                reader.cwd.mkdir(parents=True, exist_ok=True)
            case "COPY":
                *sources, target = text.split()
                for source in sources:
                    if not source.endswith(".whl"):
                        shutil.copy2(reader.folder / source, reader.cwd / target)
            case "RUN" | "CMD":
                cwd = reader.cwd
                reader.shell(block, shlex.join(json.loads(text)) if text[0] == "[" else text)
                reader.cwd = cwd
            case _:
                assert instruction in ("FROM", "USER"), f"{block.where}: not supported: {line}"
    reader.environ, reader.cwd = environ, reader.folder


def _workflow(reader: Reader, block: Block) -> None:
    """Run the commands of a GitHub workflow, in order."""
    found = parsed(block)
    assert isinstance(found, dict), f"{block.where}: not a workflow"
    for name, value in found["env"].items():
        reader.environ[name] = value.replace("${{ github.workspace }}", str(reader.folder))
        assert "${{" not in reader.environ[name], f"{block.where}: not supported: {value}"
    (job,) = found["jobs"].values()
    for step in job["steps"]:
        assert step.keys() & {"uses", "run"}, f"{block.where}: not supported: {step}"
        if "run" in step:
            reader.cwd = reader.folder
            reader.shell(block, step["run"])
