"""Sphinx configuration. Nothing here needs a network."""

import kcache

project = "kcache"
author = "the kcache authors"
copyright = "2026, the kcache authors"
release = version = kcache.__version__

extensions = ["myst_parser", "sphinx.ext.doctest"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"kcache {release}"
html_static_path = ["_static"]
html_css_files = ["kcache.css"]
html_copy_source = False
pygments_dark_style = "a11y-high-contrast-dark"  # furo's own style underlines the names of modules
myst_enable_extensions = ["colon_fence", "deflist", "html_image"]
myst_heading_anchors = 4  # the methods on the page about Python
