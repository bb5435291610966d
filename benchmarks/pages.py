"""Copy the plot library next to the pages in benchmarks/results that need it.

    python benchmarks/pages.py

The library is that of the installed plotly; the pages load nothing from the network."""

from __future__ import annotations

import argparse

from lib.kept_pages import LIBRARY, REFERENCE
from lib.results_file import ROOT
from plotly.offline import get_plotlyjs


def main() -> None:
    argparse.ArgumentParser(description=__doc__.partition("\n")[0]).parse_args()
    results = ROOT / "benchmarks" / "results"
    (results / LIBRARY).write_text(get_plotlyjs())
    for page in sorted(results.glob("*.html")):
        if REFERENCE in page.read_text():
            print(page.relative_to(ROOT))


if __name__ == "__main__":
    main()
