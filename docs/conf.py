"""Sphinx configuration. Nothing here needs a network."""

import builtins
import re
import sys
from pathlib import Path

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.errors import ConfigError

import kcache
import kcache.backend
import kcache.errors
import kcache.launch
import kcache.testing

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

project = "kcache"
author = "the kcache authors"
copyright = "2026, the kcache authors"
release = version = kcache.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.doctest",
    "sphinx.ext.napoleon",
    "from_code",
]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"kcache {release}"
html_static_path = ["_static"]
html_css_files = ["kcache.css"]
html_copy_source = False
pygments_dark_style = "a11y-high-contrast-dark"  # furo's own underlines the names of modules
myst_enable_extensions = ["colon_fence", "deflist", "html_image"]
myst_heading_anchors = 3

# `name` in a docstring is code, as in Markdown.
default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
napoleon_use_ivar = True
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88

# Cross-references are checked. Those into the standard library can't be without its inventory,
# which would have to be fetched.
_STDLIB = "|".join(sorted(map(re.escape, sys.stdlib_module_names)))
nitpick_ignore_regex = [
    (
        r"py:.*",
        "Path|Compiled|ExtraOptions|kcache.nvrtc.options.ExtraOptions|Module|Function",
    ),  # imported for types
    (r"py:.*", r"kcache\.nvrtc\.key\.SupportsFlags|kcache\.launch\.code\.Kernel"),  # protocols
    (r"py:.*", r"(kcache\.admin\.miss_causes\.)?Near"),  # described where it is an attribute
    (r"py:.*", r"hypothesis\..+|kcache\.testing\.machine\.Open"),
    (r"py:.*", "JSON"),  # a recursive alias, which autodoc shows by its name
    (r"py:.*", rf"({_STDLIB})(\..+)?"),
    (r"py:.*", "|".join(name for name in dir(builtins) if not name.startswith("_"))),
]


def resolve_public(
    app: Sphinx, env: BuildEnvironment, node: pending_xref, contnode: nodes.TextElement
) -> nodes.reference | None:
    """Lead a name from the module that defines it to its public place, on the reference page."""
    if node.get("refdomain") != "py":
        return None
    name = node["reftarget"].rpartition(".")[2]
    python = env.domains["py"]
    modules = ("errors", "backend", "launch", "stats", "journal")
    for place in ("kcache", *(f"kcache.{module}" for module in modules)):
        found = python.resolve_xref(
            env, node["refdoc"], app.builder, "obj", f"{place}.{name}", node, contnode
        )
        if found is not None:
            return found
    return None


def check_reference(app: Sphinx) -> None:
    """Refuse to build where a public name is not on the reference page."""
    page = Path(app.srcdir, "reference", "api.md").read_text(encoding="utf-8")
    named = set(re.findall(r"auto\w+:: (kcache\.[\w.]+)", page))
    whole = {*kcache.errors.__all__, *kcache.backend.__all__}  # pages of their own on that page
    public = {f"kcache.{name}" for name in {*kcache.__all__} - whole - {"__version__"}}
    for module in (kcache.launch, kcache.testing):
        public |= {f"{module.__name__}.{name}" for name in module.__all__}
    missing = public - named
    if missing:
        raise ConfigError(f"docs/reference/api.md lacks {', '.join(sorted(missing))}")


def setup(app: Sphinx) -> None:
    app.connect("missing-reference", resolve_public)
    app.connect("builder-inited", check_reference)
