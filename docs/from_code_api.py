"""The Python interface for the reference pages: signatures and docstrings."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator, Sequence
from typing import Any

from from_code_markdown import PART, REFERENCE, items, plain, sections, slug

from kcache.engine.stats import Stats

#: How many columns a signature may take on one line.
_WIDTH = 88


def documented() -> Iterator[tuple[str, str, list[str]]]:
    """Yields kind, dotted name and members of what the page about Python describes, in order."""
    for found in PART.finditer((REFERENCE / "api.md").read_text(encoding="utf-8")):
        kind, (name, *members) = found[2], found[3].split()
        if kind not in ("class", "function", "module"):
            continue
        if kind == "module":
            yield from (("class", f"{name}.{each}", []) for each in _named(name, members))
        else:
            yield kind, name, members


def _named(name: str, members: Sequence[str]) -> list[str]:
    """Returns the public names of a module in the order of its source, or those that are given."""
    module = importlib.import_module(name)
    return list(members) or [each for each in vars(module) if each in module.__all__]


def module(name: str, *members: str) -> Iterator[str]:
    """Every class of a module, or those that are named."""
    for each in _named(name, members):
        yield from class_(f"{name}.{each}")


def function(name: str) -> Iterator[str]:
    """One function."""
    yield from (f"### {name.rpartition('.')[2]}", "", *_about(_found(name), name))


def class_(name: str, *members: str) -> Iterator[str]:
    """One class with its public members, or with those that are named; `-` stands for none."""
    kind = _found(name)
    short = name.rpartition(".")[2]
    yield from (f"### {short}", "", *_about(kind, name))
    for member in () if members == ("-",) else members or _members(kind):
        found = inspect.getattr_static(kind, member)
        yield from (f"#### {short}.{member}", "")
        yield from _about(_plain_function(found), f"{_prefix(found)}{member}", owner=kind)


def _found(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def _members(kind: type) -> list[str]:
    """Returns the public methods and properties of a class that say what they do."""
    return [
        name
        for name, found in vars(kind).items()
        if not name.startswith("_")
        and (callable(found) or isinstance(found, (property, classmethod, staticmethod)))
        and inspect.getdoc(_plain_function(found))
        and getattr(_plain_function(found), "__doc__", None)
    ]


def _plain_function(found: Any) -> Any:
    if isinstance(found, property):
        return found.fget
    return getattr(found, "__func__", found)


def _prefix(found: Any) -> str:
    kinds: tuple[tuple[object, str], ...] = (
        (property, "property "),
        (classmethod, "classmethod "),
        (staticmethod, "staticmethod "),
    )
    is_async = inspect.iscoroutinefunction(found)
    return next((word for kind, word in kinds if isinstance(found, kind)), "async " * is_async)


def _about(found: Any, title: str, owner: type | None = None) -> Iterator[str]:
    """Yields the signature and the docstring."""
    yield from ("```python", *_wrapped(f"{title}{_signature(found, title, owner)}"), "```", "")
    if inspect.isclass(found):
        bases = [base.__name__ for base in found.__bases__ if base.__name__ in _links()]
        if bases:
            yield from (f"A subclass of {', '.join(_linked(f'`{base}`') for base in bases)}.", "")
    parts = sections(found)
    if found is Stats:
        parts["Attributes"] = "those on the page about statistics."
    for paragraph in parts.pop("").split("\n\n"):
        if paragraph.strip():
            yield from (*_paragraph(paragraph), "")
    for title_, section in parts.items():
        yield from (f"{_TITLES.get(title_, title_)}:", "", *_items(section), "")


_TITLES = {"Args": "Arguments"}


def _paragraph(text: str) -> Iterator[str]:
    """Yields a paragraph; a list or an indented block stays as it is."""
    text = text.strip("\n")
    if text.startswith(("- ", "* ", "    ")):
        yield text
    else:
        yield _linked(plain(text))


def _items(section: str) -> Iterator[str]:
    found = items(section)
    if not found:
        yield _linked(plain(section))
    for name, about in found.items():
        yield f"- {_linked(f'`{name}`')}: {_linked(plain(about))}"


def _signature(found: Any, title: str, owner: type | None) -> str:
    if title.startswith("property "):
        return f": {found.__annotations__.get('return', 'Any')}"
    if (
        inspect.isclass(found)
        and issubclass(found, BaseException)
        and "__init__" not in vars(found)
    ):
        return ""
    if re.search("rguments and errors are (those|the same)", inspect.getdoc(found) or ""):
        return "(...)"
    signature = inspect.signature(found)
    own = _own_annotations(found)
    parameters = [
        parameter.replace(
            annotation=_Text(own.get(name, parameter.annotation)),
            default=_default(parameter.default),
        )
        for name, parameter in signature.parameters.items()
        if not (owner is not None and name in ("self", "cls")) and own.get(name) != "Never"
    ]
    back = inspect.Signature.empty if inspect.isclass(found) else own.get("return", "None")
    return str(
        signature.replace(
            parameters=parameters,
            return_annotation=back if back is inspect.Signature.empty else _Text(back),
        )
    )


def _default(value: object) -> object:
    """Returns a default that shows a function by its name, such as `time.monotonic`."""
    if inspect.isbuiltin(value):
        return _Text(f"{value.__module__}.{value.__name__}")
    return value


def _wrapped(call: str) -> list[str]:
    """Returns a signature, with a line for each parameter if it is long."""
    head, _, rest = call.partition("(")
    inside, _, back = rest.rpartition(")")
    if len(call) <= _WIDTH:
        return [call]
    parameters = re.split(r", (?=\*{0,2}\w+: |\*,|/,)|(?<=[*/]), ", inside)
    return [f"{head}(", *(f"    {each}," for each in parameters), f"){back}"]


def _own_annotations(found: Any) -> dict[str, str]:
    """Returns the annotations as they are written: shorter than what they evaluate to."""
    init = vars(found).get("__init__") if inspect.isclass(found) else None
    return dict(getattr(init, "__annotations__", None) or getattr(found, "__annotations__", {}))


class _Text:
    """An annotation that shows itself as it is written."""

    def __new__(cls, text: object) -> Any:
        return text if text is inspect.Parameter.empty else super().__new__(cls)

    def __init__(self, text: object) -> None:
        text = getattr(text, "__forward_arg__", text)  # of a named tuple
        self._text = text if isinstance(text, str) else inspect.formatannotation(text)

    def __repr__(self) -> str:
        return self._text


def _links() -> dict[str, str]:
    """Returns the anchor of each name that the page describes."""
    if not _known:
        _known.update({name.rpartition(".")[2]: name for _, name, _ in documented()})
    return {name: f"#{slug(name)}" for name in _known}


_known: dict[str, str] = {}


def _linked(text: str) -> str:
    """Returns Markdown in which a documented name in backticks leads to its heading."""
    links = _links()

    def made(found: re.Match[str]) -> str:
        target = links.get(found[1])
        return f"[{found[0]}]({target})" if target else found[0]

    return re.sub(r"`(?:kcache\.)?(\w+)`", made, text)
