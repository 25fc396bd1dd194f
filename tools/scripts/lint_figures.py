#!/usr/bin/env python3
"""Compares the figures that several pages quote with docs/figures.json: lint_figures.py (in the root of the tree)

The file has under "commands" what measures a group of figures, and under "figures" a line for each: its value, its
unit, the command's name as "by", and for each page that quotes it a place, which must be there exactly once:

    "Greedy solver"             a paragraph, or a row of a table, that holds these words
    "KeyDiff, AdaKV > 50 %"     the cell under a column of that name, in the row that begins with these cells

Places are compared without markup. README.md repeats what other pages measure, so each figure in its tables must be
in the file. "models" says which tables quote docs/models.csv, and which of its rows each kind of row there is (null:
measured elsewhere). Prints a line per finding.
"""

import csv
import json
import re
from dataclasses import dataclass
from pathlib import Path

FIGURES = "docs/figures.json"
MODELS = "docs/models.csv"
NUMBER = r"\d[\d,.]*(?:e-?\d+)?"
# What a row of README.md counts or measures: a number that stands alone, no version, name or part of a link.
FIGURE = re.compile(rf"(?<![\w./(-])({NUMBER})(?![\w/-])")


@dataclass
class Piece:
    """A cell of a table, or a paragraph: `row` is the row's beginning, `column` the head of the cell's column."""

    text: str
    row: str = ""
    column: str = ""


def plain(text: str) -> str:
    """Without markup: bold, code, links; blanks and line ends are one blank."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return " ".join(re.sub(r"\*\*|`", "", text).split())


def pieces_of(page: str) -> list[Piece]:
    pieces: list[Piece] = []
    head: list[str] = []
    for block in re.split(r"\n\s*\n|\n(?=\|)", Path(page).read_text(encoding="utf-8")):
        if not block.startswith("|"):
            pieces.append(Piece(plain(block)))
            head = []
            continue
        row, *below = block.split("\n", 1)  # what stands directly below a table is a paragraph
        cells = [plain(c) for c in row.strip().strip("|").split("|")]
        if not head:
            head = cells
        elif not set(row) <= set("|-: "):
            pieces += [Piece(c, " | ".join(cells), column) for c, column in zip(cells[1:], head[1:])]
        if below and below[0].strip():
            pieces.append(Piece(plain(below[0])))
            head = []
    return pieces


def at(pieces: list[Piece], place: str) -> list[list[Piece]]:
    """What a place names: a list for each paragraph, row or cell."""
    row, _, column = place.partition(" > ")
    if column:
        return [[p] for p in pieces if p.column == column and f"{p.row} |".startswith(f"{row} |")]
    rows: dict[str, list[Piece]] = {}
    for p in pieces:
        if row in (p.row or p.text):
            rows.setdefault(p.row or p.text, []).append(p)
    return list(rows.values())


def compare_with_models(page: str, pieces: list[Piece], rows: dict[str, str | None]) -> set[tuple[int, str]]:
    """Compares the tables of a page whose rows begin with a model and a kind of row; gives what was quoted."""
    measured, quoted = {}, set()
    for r in csv.DictReader(Path(MODELS).read_text(encoding="utf-8").splitlines()):
        how = f"{r['metric'].split(':')[0]} {r['allocator']} {'as-cut' if r['refit'] == '0' else 'refitted'}"
        measured[r["model"].replace("-", ""), how, f"{float(r['ratio']):.0%}"] = float(r["kl"])
    for piece in pieces:
        name = re.sub("[ -]", "", piece.row.lower())
        model = next((m for m, _, _ in measured if name.startswith(m)), "")
        if not model or not piece.column.endswith(" %"):
            continue
        kind = piece.row.split(" | ")[1]
        known = [rows[k] for k in sorted(rows, key=len) if kind.endswith(k)]
        if not known:
            print(f"{page}: which row of {MODELS} is '{kind}'? {FIGURES}, models, does not say")
        elif known[-1]:
            kl = measured[model, known[-1], piece.column.replace(" ", "")]
            if piece.text != f"{kl:.{len(piece.text.partition('.')[2])}f}":
                print(f"{page}: {piece.text} in '{piece.row[:40]}', {piece.column}; {MODELS} has {kl:.4g}")
            quoted.add((id(piece), piece.text))
    if not quoted:
        print(f"{page}: no table quotes {MODELS}, one was expected")
    return quoted


def main() -> None:
    told = json.loads(Path(FIGURES).read_text(encoding="utf-8"))
    pages: dict[str, list[Piece]] = {}
    quoted: set[tuple[int, str]] = set()
    for name, figure in told["figures"].items():
        places = {key: place for key, place in figure.items() if key not in ("value", "unit", "by")}
        if figure.get("by") not in told["commands"] or "unit" not in figure or len(places) < 2:
            print(f"{FIGURES}: {name} needs value, unit, by (a name of commands) and two pages or more")
        for page, place in places.items():
            pieces = pages.setdefault(page, pieces_of(page))
            found = at(pieces, place)
            if len(found) != 1:
                print(f"{page}: '{place}' of figure {name} is there {len(found)} times, once was expected")
                continue
            value = re.compile(rf"(?<![\d.,]){re.escape(figure['value'])}(?![\d]|[.,]\d)")
            saying = [piece for piece in found[0] if value.search(piece.text)]
            quoted.update((id(piece), figure["value"]) for piece in saying)
            if not saying:
                print(f"{page}: '{place}' does not say {figure['value']}, which is figure {name}")
    for page in told["models"]["pages"]:
        quoted |= compare_with_models(page, pages.setdefault(page, pieces_of(page)), told["models"]["rows"])
    for used in {f["by"] for f in told["figures"].values()} ^ set(told["commands"]):
        print(f"{FIGURES}: no figure is measured by '{used}', or no command has that name")
    for piece in pages.setdefault("README.md", pieces_of("README.md")):
        for n in (n.rstrip(".,") for n in FIGURE.findall(piece.text) if piece.row and n.count(".") < 2):
            large = re.search(r"[.,e]\d", n) or int(n) >= 100
            if large and (id(piece), n) not in quoted:
                print(f"README.md: {n} in the row '{piece.row[:40]}' is not in {FIGURES}: which page measures it?")


main()
