"""Write the pages that are not committed, and typeset formulas, while MkDocs builds the site.

A hook of mkdocs.yml. The pages `configuration.md` and `metrics.md` are what `asyncrl config
reference` and `asyncrl config metrics` print; the README is the home page, without links to what
the site lacks. The formulas become MathML:
`pymdownx.arithmatex` finds `$...$` and `$$...$$`. A browser draws MathML by itself, so the site
needs no script and no font for it.
"""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.exceptions import PluginError

from asyncrl.config import explain
from asyncrl.records import metrics

FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)
ELSEWHERE = re.compile(r"\[([^]]+)\]\((?:CONTRIBUTING|benchmarks/)[^)]*\)")  # not in the site
WORD = re.compile(r"<(?:mo|mi)>([a-zA-Z]{2,})</(?:mo|mi)>")  # log, min, clip: space around them


def to_mathml(formula: re.Match[str]) -> str:
    """Return the formula that arithmatex found as a `<math>` element.

    Raises:
        PluginError: a command is unknown, which the converter would print as it stands.
    """
    latex = html.unescape(formula[2]).strip()
    display = "block" if formula[1] == "div" else "inline"
    mathml = convert(latex, display=display)
    if "\\" in mathml or ">&<" in mathml:
        raise PluginError(f"formula {latex!r}: MathML does not know a command of it: {mathml}")
    return WORD.sub(r'<mo lspace="0.17em" rspace="0.12em">\1</mo>', mathml)


def on_pre_build(config: Any) -> None:
    docs = Path(config["docs_dir"])
    (docs / "configuration.md").write_text(explain.render_reference())
    (docs / "metrics.md").write_text(metrics.format_markdown())
    home = (docs.parent / "README.md").read_text().replace("](docs/", "](")
    (docs / "index.md").write_text(ELSEWHERE.sub(r"\1", home))


def on_page_content(page_html: str, **_: Any) -> str:
    return FORMULA.sub(to_mathml, page_html)
