"""World: a random include tree, random edits of it, and a request that includes its headers."""

import os
import random
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

from nvrtc.reference import PTX, write

import kcache

FOLDERS = ("src", "src/sub", "one", "one/sub", "two", "two/sub", "three")
NAMES = ("a.h", "b.h", "c.h", "sub/d.h", "sub/e.h", "f.h")
PROBED = ("p.h", "sub/q.h", "f.h", "no/r.h")
MEMORY = ("m.h", "sub/m.h", "b.h")
PATHS = (
    ("one", "two", "three"),
    ("one", "one/sub", "two"),
    ("two/sub", "one", "two", "missing"),
    ("src", "three", "two"),
)


def word(name: str) -> str:
    return "X_" + name.replace("/", "_").removesuffix(".h")


def defined(name: str, value: object) -> str:
    return f"#undef {word(name)}\n#define {word(name)} {value}\n"


class Writer:
    """Writes random headers and a random source."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance

    def include(self, name: str, folder: str = "") -> str:
        forms = [f"#include <{name}>", f'#include "{name}"'] * 3
        forms += [
            f"#include PICK({name})",
            f"#include {word(name)}_HDR",
            f"#include STR({name})",
            f"#include ALL({name})",
            f"#include GLUE({name.removesuffix('.h')}, .h)",
            f"#include IN(sub, {name.removeprefix('sub/')})",
            f"#if 0\n#include <{name}>\n#endif",
            f'#ifdef NEVER\n#include "{name}"\n#endif',
            f"#\\\ninclude /* {name} */ <{name}>",
        ]
        if folder:
            other = self.chance.choice(FOLDERS[2:])
            forms += [f'#include "../{other}/{name}"', f"#include STR(../{other}/{name})"]
            forms += [f"#include IN(AWAY, {name})", f"#include STR(AWAY/{name})"]
        form = self.chance.choice(forms)
        if self.chance.random() < 0.8:  # most often only if it exists, so that most trees compile
            form = f"#if __has_include(<{name}>)\n{form}\n#endif"
        return form + "\n"

    def probe(self, name: str) -> str:
        forms = (
            f"__has_include(<{name}>)",
            f'__has_include("{name}")',
            f"HAS(<{name}>)",
            f'HAS("{name}")',
            f"HAS_{word(name)}",
        )
        condition, value = self.chance.choice(forms), self.chance.randrange(1, 90)
        return f"#if {condition}\n#undef {word(name)}_P\n#define {word(name)}_P {value}\n#endif\n"

    def header(self, name: str, folder: str) -> str:
        chance = self.chance
        later = NAMES[NAMES.index(name) + 1 :] if name in NAMES else ()
        body = "".join(self.include(n, folder) for n in later if chance.random() < 0.35)
        if chance.random() < 0.4:
            body += self.probe(chance.choice(PROBED))
        if chance.random() < 0.12 and folder in ("one", "two"):
            body += f"#include_next <{name}>\n"
        # Few values, so that files are often equal.
        body += f"#ifdef {word(name)}_SEEN\n#define {word(name)}_TWICE 1\n#endif\n"
        body += f"#define {word(name)}_SEEN\n" + defined(name, chance.randrange(3))
        style = chance.random()
        if style < 0.35:
            return f"#pragma once\n{body}"
        if style < 0.7:
            guard = f"G_{word(name)}_{chance.randrange(2)}"
            return f"#ifndef {guard}\n#define {guard}\n{body}#endif\n"
        return body

    def source(self, memory: Iterable[str]) -> str:
        chance = self.chance
        text = "#define PICK(x) <x>\n#define STR_(x) #x\n#define STR(x) STR_(x)\n"
        text += "#define ALL(...) #__VA_ARGS__\n#define GLUE(x, y) <x##y>\n#define IN(x, y) <x/y>\n#ifndef AWAY\n"
        text += f"#define AWAY {chance.choice(('..', '../three', 'sub'))}\n#endif\n"
        text += "#define HAS(x) __has_include(x)\n"
        for name in NAMES:
            open_, close = chance.choice(('""', "<>"))
            macro = f"{word(name)}_HDR"
            text += f"#ifndef {macro}\n#define {macro} {open_}{name}{close}\n#endif\n"
        for name in PROBED:
            open_, close = chance.choice(('""', "<>"))
            text += f"#define HAS_{word(name)} __has_include({open_}{name}{close})\n"
        text += "".join(f'#include "{name}"\n' for name in memory)
        text += "".join(self.include(name) for name in chance.sample(NAMES, k=3))
        text += "".join(self.probe(name) for name in chance.sample(PROBED, k=2))
        shown = [word(n) for n in (*NAMES, *MEMORY[:2])] + [f"{word(n)}_TWICE" for n in NAMES]
        shown += [f"{word(n)}_P" for n in PROBED]
        text += "".join(f"#ifndef {w}\n#define {w} 90\n#endif\n" for w in shown)
        stores = "".join(f"    o[{n}] = {w};\n" for n, w in enumerate(shown))
        return f'{text}extern "C" __global__ void k(int* o) {{\n{stores}}}\n'


class World:
    """A folder with headers, random edits of it, and a request that includes the headers."""

    def __init__(self, top: Path, chance: random.Random) -> None:
        self.top = top
        self.chance = chance
        self.writer = writer = Writer(chance)
        self.history: dict[str, list[str]] = {}
        self.places = 0
        for folder in FOLDERS:
            (top / folder).mkdir(parents=True, exist_ok=True)
        for name in NAMES:
            for folder in chance.sample(("one", "two", "three"), k=chance.choice((1, 1, 2))):
                self.put(f"{folder}/{name}", writer.header(name, folder))
        self.source_name = chance.choice(("kernel.cu", "src/kernel.cu"))
        self.paths = chance.choice(PATHS)
        self.absolute = chance.random() < 0.5
        self.extra: list[str] = []
        self.headers: dict[str, str] = {}
        if chance.random() < 0.3:
            for name in chance.sample(MEMORY, k=chance.choice((1, 2))):
                self.headers[name] = writer.include("f.h") + defined(name, 5)
        self.source = writer.source(self.headers)
        if chance.random() < 0.2:
            self.extra = chance.choice((["-include", "f.h"], ["--no-source-include"]))[:]
        if chance.random() < 0.3:
            self.extra.append(f"-D{word('c.h')}_HDR=<sub/e.h>")

    def options(self) -> kcache.CompileOptions:
        base = self.top if self.absolute else Path()
        return PTX.replace(include_paths=[base / p for p in self.paths], extra_options=self.extra)

    def put(self, path: str, text: str) -> None:
        self.history.setdefault(path, []).append(text)
        try:
            write(self.top / path, text)
        except OSError:  # the path is a link into a missing folder, or a circle of links
            (self.top / path).unlink()
            write(self.top / path, text)

    def files(self) -> list[str]:
        found = (Path(folder, name) for folder, _, names in os.walk(self.top) for name in names)
        return sorted(str(path.relative_to(self.top)) for path in found)

    def state(self) -> str:
        """Return everything that a compile of the request can depend on, as text."""
        inodes: dict[int, int] = {}
        found: list[object] = [self.paths, self.absolute, sorted(self.headers.items()), self.extra]
        for where in self.files():
            path = self.top / where
            if path.is_symlink():
                found.append((where, os.readlink(path)))
            else:
                same = inodes.setdefault(path.stat().st_ino, len(inodes))
                found.append((where, path.read_text(), same))
        return repr(found)

    # -- edits -----------------------------------------------------------------------------------

    def step(self) -> str:
        """Make one random edit, and return a description of it."""
        edits = [self.change] * 4 + [self.revert] * 6 + [self.shadow] * 3 + [self.appear] * 3
        edits += [self.disappear] * 2 + [self.move] * 2 + [self.delete, self.touch, self.secret]
        edits += [self.rename, self.link, self.link, self.hard_link, self.copy, self.swap_folders]
        edits += [self.nothing] * 2 + [self.no_links]
        edit = self.chance.choice(edits)
        return f"{edit.__name__} {edit()}"

    def any_file(self) -> str:
        return self.chance.choice(self.files() or ["one/a.h"])

    def named(self, path: str) -> tuple[str, str]:
        """Return (include name, folder) of a path."""
        for name in (*NAMES, *PROBED):
            if path.endswith("/" + name):
                return name, path.removesuffix("/" + name)
        return "f.h", "one"

    def change(self) -> str:
        path = self.any_file()
        self.put(path, self.writer.header(*self.named(path)))
        return path

    def revert(self) -> str:
        path = self.chance.choice(sorted(self.history))
        self.put(path, self.chance.choice(self.history[path][-2:]))
        return path

    def shadow(self) -> str:
        name, folder = self.chance.choice(NAMES), self.chance.choice((*FOLDERS, "."))
        path = os.path.normpath(f"{folder}/{name}")
        self.put(path, self.writer.header(name, folder))
        return path

    def appear(self) -> str:
        name, folder = self.chance.choice(PROBED), self.chance.choice((*FOLDERS, "."))
        path = os.path.normpath(f"{folder}/{name}")
        self.put(path, self.writer.header(name, folder) if name in NAMES else "// there\n")
        return path

    def disappear(self) -> str:
        found = [path for path in self.files() if path.endswith(PROBED)]
        path = self.chance.choice(found or ["none"])
        (self.top / path).unlink(missing_ok=True)
        return path

    def delete(self) -> str:
        path = self.any_file()
        (self.top / path).unlink(missing_ok=True)
        return path

    def touch(self) -> str:
        path = self.any_file()
        if (self.top / path).exists():
            os.utime(self.top / path)
        return path

    def secret(self) -> str:
        """Change a file in place without changing its size, and restore its times."""
        path = self.any_file()
        file = self.top / path
        if file.is_file():
            status, text = file.stat(), file.read_text()
            file.write_text(re.sub(r" ([012])\n", lambda m: f" {(int(m[1]) + 1) % 3}\n", text))
            os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
        return path

    def rename(self) -> str:
        path = self.any_file()
        text = self.writer.header(*self.named(path))
        os.replace(write(self.top / "new.tmp", text), self.top / path)
        return path

    def _place_for(self, target: str) -> Path | None:
        """Return a free path for another file with the name of `target`, if that file exists."""
        path = self.top / self.chance.choice(FOLDERS) / self.named(target)[0]
        if path == self.top / target or not (self.top / target).is_file():
            return None
        path.unlink(missing_ok=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def link(self) -> str:
        target = self.any_file()
        path = self._place_for(target)
        if path is not None:
            path.symlink_to(os.path.relpath(self.top / target, path.parent))
        return f"{path} -> {target}"

    def hard_link(self) -> str:
        target = self.any_file()
        path = self._place_for(target)
        if path is not None and (self.top / target).is_file():
            os.link(self.top / target, path)
        return f"{path} = {target}"

    def copy(self) -> str:
        target = self.any_file()
        path = self._place_for(target)
        if path is not None and (self.top / target).is_file():
            shutil.copy2(self.top / target, path)
        return f"{path} of {target}"

    def swap_folders(self) -> str:
        one, two = self.chance.sample(("one", "two", "three"), k=2)
        (self.top / one).rename(self.top / "swap.tmp")
        (self.top / two).rename(self.top / one)
        (self.top / "swap.tmp").rename(self.top / two)
        return f"{one} {two}"

    def no_links(self) -> str:
        """Replace every link by a copy, as unpacking an archive does."""
        for path in map(self.top.joinpath, self.files()):
            if path.exists() and (path.is_symlink() or path.stat().st_nlink > 1):
                text = path.read_text()
                path.unlink()
                path.write_text(text)
        return ""

    def move(self) -> str:
        """Move the whole tree to another directory."""
        self.places += 1
        to = self.top.with_name(f"tree{self.places % 3}" + "x" * (self.places % 2))
        os.chdir("/")
        self.top.rename(to)
        self.top = to
        os.chdir(to)
        return to.name

    def nothing(self) -> str:
        return ""

    def heal(self, log: str) -> str:
        """Create the header that `log` reports as not found, or revert a change."""
        match = re.search(r'cannot open source file "([^"]+)"', log)
        if match is None or match[1].startswith("/"):
            return self.revert()
        path = os.path.normpath(f"{next(p for p in self.paths if p != 'missing')}/{match[1]}")
        if path.startswith("../"):
            return self.revert()
        self.put(path, f"#pragma once\n{defined(self.named(path)[0], 7)}")
        return path
