#!/usr/bin/env python3
"""Finds figures that two pages tell differently: lint_figures.py PAGE.md...

A figure that stands in two places carries a marker, which no reader sees, behind the number in both:
`0.0261<!--figure:learned-80-->`. README.md only repeats what other pages measure, so there every figure of a table has
one. Prints a line per finding.
"""

import re
import sys
from pathlib import Path

NUMBER = r"\d[\d,.]*(?:e-?\d+)?"
MARKED = re.compile(rf"({NUMBER})[^\d<]*<!--figure:([a-z0-9-]+)-->")
# What a row of README.md counts or measures: a number that stands alone, no version, name or part of a link.
FIGURE = re.compile(rf"(?<![\w./(-])({NUMBER})(?![\w/-])")


def unmarked(row: str) -> list[str]:
    """Figures of a table's row without a marker; the first cell is a name."""
    rest = MARKED.sub("", row.split("|", 2)[-1])
    found = [n for n in FIGURE.findall(rest) if n.count(".") < 2]  # 0.5.5 is a version
    return [n for n in found if re.search(r"[.,e]\d", n) or int(n) >= 100]


def main() -> None:
    told: dict[str, list[tuple[str, str]]] = {}
    for page in sys.argv[1:]:
        lines = Path(page).read_text(encoding="utf-8").splitlines()
        for number, (line, below) in enumerate(zip(lines, [*lines[1:], ""]), 1):
            where = f"{page}:{number}"
            marked = MARKED.findall(line)
            if line.count("<!--figure:") != len(marked):
                print(f"{where}: a figure's marker without a number before it")
            for value, name in marked:
                told.setdefault(name, []).append((where, value.rstrip(".,")))
            if Path(page).name == page == "README.md" and line.startswith("|") and not below.startswith("|--"):
                for value in unmarked(line):
                    print(f"{where}: {value} has no marker: which page measures it?")
    for name, places in sorted(told.items()):
        if len({where.split(":")[0] for where, _ in places}) < 2:
            print(f"{places[0][0]}: figure {name} stands in one page only")
        if len({value for _, value in places}) > 1:
            print(f"figure {name}: " + ", ".join(f"{value} ({where})" for where, value in places))


main()
