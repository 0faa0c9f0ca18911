"""Markup: HTML and SVG as a tree of elements, and the document that they become.

The standard library's serializer escapes every text and every attribute, so no name that comes
from a cache can become markup, even if a caller forgets to escape it.
"""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path
from xml.etree import ElementTree

from kcache.cli.terminal import plain

__all__ = ["Node", "document", "el"]

Node = ElementTree.Element

_STYLE = Path(__file__).with_name("style.css")


def el(tag: str, *children: Node | str | None, **attributes: str | float) -> Node:
    r"""Return an element; None among the children is left out.

    Attributes: `class_` is `class`, other underscores become hyphens. Unprintable characters, in
    texts and attributes, become an escape such as `\u202e`.
    """
    node = ElementTree.Element(tag)
    for name, value in attributes.items():
        node.set(name.rstrip("_").replace("_", "-"), plain(_text(value)))
    last: Node | None = None
    for child in children:
        if isinstance(child, str):
            if last is None:
                node.text = (node.text or "") + plain(child)
            else:
                last.tail = (last.tail or "") + plain(child)
        elif child is not None:
            node.append(child)
            last = child
    return node


def document(title: str, *body: Node) -> str:
    """Return a whole page. It loads and runs nothing, because its own policy forbids it."""
    style = ElementTree.Element("style")
    style.text = "\n" + _STYLE.read_text("utf-8")
    digest = base64.b64encode(hashlib.sha256(style.text.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    head = el(
        "head",
        el("meta", charset="utf-8"),
        el("meta", http_equiv="Content-Security-Policy", content=policy),
        el("meta", name="viewport", content="width=device-width, initial-scale=1"),
        el("meta", name="color-scheme", content="light dark"),
        el("meta", name="referrer", content="no-referrer"),
        el("title", title),
        style,
    )
    page = el("html", head, el("body", *body), lang="en")
    ElementTree.indent(head, "")
    return "<!DOCTYPE html>\n" + ElementTree.tostring(page, "unicode", method="html") + "\n"


def _text(value: str | float) -> str:
    """Return a number with two decimals at most: the pages stay small."""
    return value if isinstance(value, str) else f"{value:.2f}".rstrip("0").rstrip(".")
