"""Settings of the documentation site; `make docs` builds it without a network, with warnings as errors."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent
sys.path.insert(0, str(ROOT / "src"))

from neuralmean import __version__  # noqa: E402  # the path above comes first

project = "neuralmean"
author = "the neuralmean developers"
copyright = author  # noqa: A001  # Sphinx reads this name
version = release = __version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_design",
]
exclude_patterns = ["_build", "conf.py"]
templates_path: list[str] = []
default_role = "code"  # docstrings put code between single backticks
toc_object_entries_show_parents = "hide"

html_theme = "furo"
pygments_dark_style = "github-dark"
html_title = "neuralmean"
html_static_path = ["_static", "img"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#1f5fae", "color-brand-content": "#1f5fae"},
    "dark_css_variables": {"color-brand-primary": "#7db4f5", "color-brand-content": "#7db4f5"},
}

myst_enable_extensions = ["colon_fence", "deflist", "dollarmath", "attrs_block", "attrs_inline"]
myst_heading_anchors = 3
html_math_renderer = "mathml"

nb_execution_mode = "cache"
nb_execution_cache_path = str(HERE / "_build" / "jupyter")
nb_execution_raise_on_error = True
nb_execution_timeout = 300
nb_custom_formats = {".py": ["jupytext.reads", {"fmt": "py:percent"}]}
nb_merge_streams = True

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
python_maximum_signature_line_length = 88
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True


def _write_command_page() -> None:
    """Write the reference of the command, as `nmd --help` prints it, as Markdown."""
    import typer
    from typer.cli import get_docs_for_click

    from neuralmean.cli.app import load_commands

    command: Any = typer.main.get_command(load_commands())
    for one in command.commands.values():
        one.short_help = (one.help or "").split("\n\n")[0].replace("\n", " ")  # else it is cut after a few words
    text = get_docs_for_click(obj=command, ctx=typer.Context(command), name="nmd", title="The command: `nmd`")
    (HERE / "api" / "command.md").write_text(text, encoding="utf-8")


def _copy_examples() -> None:
    """Put the scripts of `examples/` where Sphinx finds them; each becomes an executed page."""
    target = HERE / "examples"
    target.mkdir(exist_ok=True)
    for script in ROOT.glob("examples/*.py"):
        shutil.copyfile(script, target / script.name)


def _math(writer: Any, node: Any) -> None:
    """Write a formula as MathML, so that no page loads a script from another site."""
    from docutils import nodes
    from latex2mathml.converter import convert

    writer.body.append(convert(node.astext(), display="block" if isinstance(node, nodes.math_block) else "inline"))
    raise nodes.SkipNode


def setup(app: Any) -> None:
    """Register the formulas, and write the pages that are made from code."""
    app.add_html_math_renderer("mathml", (_math, None), (_math, None))
    _write_command_page()
    _copy_examples()
