"""Sphinx configuration. Nothing here needs a network."""

import sys
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

import kcache

sys.path.insert(0, str(Path(__file__).parent))
from from_code import command

project = "kcache"
author = "the kcache authors"
copyright = "2026, the kcache authors"
release = version = kcache.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.doctest",
    "sphinx.ext.napoleon",
]
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
default_role = "py:obj"  # docstrings put names and code into single backticks
maximum_signature_line_length = 88
napoleon_use_ivar = True
python_use_unqualified_type_names = True
# Not every name in a docstring or an annotation has a place on the page about Python.
nitpick_ignore_regex = [(r"py:.*", r".*")]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"kcache {release}"
html_static_path = ["_static"]
html_css_files = ["kcache.css"]
html_copy_source = False
pygments_dark_style = "a11y-high-contrast-dark"  # furo's own style underlines the names of modules
myst_enable_extensions = ["colon_fence", "deflist", "html_image"]
myst_heading_anchors = 3


class Command(SphinxDirective):
    """The usage and the options of a command, at this place of a page in Markdown."""

    required_arguments = 1
    optional_arguments = 1

    def run(self) -> list[nodes.Node]:
        return self.parse_text_to_nodes("\n".join(command(*self.arguments)))


def setup(app: Sphinx) -> None:
    app.add_directive("command", Command)
