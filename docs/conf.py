"""Sphinx builds the site from here: `make docs`. Nothing is fetched, neither by the build nor by the pages."""

import ast
import re
from pathlib import Path

from sphinx.application import Sphinx

import expanded_nn
from expanded_nn.modules.registry import EXPANDED

ROOT = Path(__file__).parent.parent

project = "expanded_nn"
author = "expanded_nn contributors"
copyright = author
version = release = expanded_nn.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode", "sphinx_copybutton"]
exclude_patterns = ["_build"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
smartquotes = False
default_role = "code"  # docstrings say `B` as Markdown does
napoleon_use_ivar = True
napoleon_use_rtype = False
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
python_display_short_literal_types = True
python_use_unqualified_type_names = True
add_module_names = False
toc_object_entries_show_parents = "hide"
copybutton_exclude = ".linenos, .gp, .go"
pygments_style = "friendly"

html_theme = "furo"
html_title = "expanded_nn"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
html_theme_options = {"navigation_with_keys": True}


def gallery() -> str:
    """Each example: its docstring, its picture if it has drawn one, and where it is; the quickstart first.

    The second half of gallery.md, which a test compares. To write it anew: `python docs/conf.py`.
    """
    return "\n".join(map(entry, scripts()))


def scripts() -> list[Path]:
    return sorted((ROOT / "examples").glob("[!_]*.py"), key=lambda each: (each.stem != "quickstart", each.stem))


def entry(script: Path) -> str:
    name = script.stem
    title, _, text = (ast.get_docstring(ast.parse(script.read_text())) or name).partition("\n\n")
    has_picture = (ROOT / "docs" / "images" / f"{name}.png").exists()
    picture = f"![What {script.name} draws](images/{name}.png)" if has_picture else ""
    parts = ["## " + name.replace("_", " "), f"**{' '.join(title.split())}**", text, picture, where(script)]
    return "\n\n".join(filter(None, parts)) + "\n"


def where(script: Path) -> str:
    return f"Run it: `python examples/{script.name}`. The whole file: [{script.name}](../examples/{script.name})."


def with_code(text: str) -> str:
    """The gallery as it is on the site, with each file unfolded below where it is."""
    for script in scripts():
        include = f"```{{literalinclude}} ../examples/{script.name}\n```"
        code = f"<details><summary>The whole file</summary>\n\n{include}\n\n</details>"
        text = text.replace(where(script), f"```sh\npython examples/{script.name}\n```\n\n{code}")
    return text


def results() -> str:
    """What the benchmarks wrote when they were run last."""
    found = sorted((ROOT / "benchmarks" / "results").glob("*.md"))
    return "\n\n".join(re.sub(r"^#", "##", each.read_text(), flags=re.MULTILINE) for each in found)


def layers() -> str:
    """The classes that the library registers for those of torch.nn."""
    found = sorted(each.__name__ for each in EXPANDED.values() if each.__module__.startswith("expanded_nn.layers"))
    names = "\n".join(f".. autoclass:: {name}" for name in found if name in expanded_nn.__all__)
    return f"```{{eval-rst}}\n.. currentmodule:: expanded_nn\n\n{names}\n```"


def fill(app: Sphinx, docname: str, source: list[str]) -> None:
    """Puts what is made here in place of what the page has for its readers in the repository."""
    for name, text in {"results": results, "layers": layers}.items():
        before, mark, rest = source[0].partition(f"<!-- {name} -->")
        if mark:
            source[0] = before + text() + rest.partition("<!-- until here -->")[2]
    if docname == "gallery":
        source[0] = with_code(source[0])


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("source-read", fill)
    return {"parallel_read_safe": True}


if __name__ == "__main__":
    page = ROOT / "docs" / "gallery.md"
    page.write_text(page.read_text().partition("\n## ")[0] + "\n" + gallery())
