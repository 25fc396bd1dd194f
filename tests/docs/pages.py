"""The blocks of a page, and their directions in directions.json.

That file names a block by words that no other block of its page has, and says what to do with it and why:

    ["long", "evaluates eight texts"]   run with LONG=1 only, for this reason
    ["skip", "needs a GPU"]             never run, for this reason
    ["exit 1"]                          the block must end with this status
    ["numbers vary"]                    of a `text` block: compare only words, not numbers
    ["default model"]                   of a `text` block: compare numbers only with LONG=1
    ["file", "profiler/x.c"]            write the block to this file
    ["patch"]                           apply the block, a diff

"own build" lists the pages with commands that build the program. A `text` block after a command block is the output of
its commands; a line `...` in it stands for any number of lines.
"""

import json
import re
from dataclasses import dataclass, field
from pathlib import Path

DIRECTIONS = "tests/docs/directions.json"
FENCE = re.compile(r"```(\w*)\s*")
KINDS = {"long", "skip", "exit 1", "numbers vary", "default model", "file", "patch"}
LANGUAGES = {"sh", "python", "c", "cmake", "json", "text", "diff"}
# An indented line that begins like this is a command that would not be run.
COMMAND = re.compile(r" {4}(kvbudget|build/|make\b|tools/|python3?\b|pip\b|mpirun|cc\b|OMP_|[A-Z_]+=\S+ \S)")


@dataclass
class Block:
    """A fenced block: its language, its text, its directions; for commands, their expected output."""

    page: str
    line: int
    language: str
    text: str
    marker: str = ""
    reason: str = ""
    output: "Block | None" = None

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"


@dataclass
class Page:
    name: str
    blocks: list[Block] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    own_build: bool = False


def direct(page: Page, every: list[Block], directions: dict) -> None:
    """Gives each block its directions."""
    page.own_build = page.name in directions["own build"]
    for words, (kind, *reason) in directions["blocks"].get(page.name, {}).items():
        found = [block for block in every if words in block.text]
        if len(found) != 1:
            page.faults.append(f"{page.name}: {DIRECTIONS}: {len(found)} blocks hold '{words}', one was expected")
        elif kind not in KINDS:
            page.faults.append(f"{page.name}: {DIRECTIONS}: unknown direction '{kind}'")
        else:
            found[0].marker, found[0].reason = kind, "".join(reason)


def read_page(root: Path, name: str) -> Page:
    """Reads a page's blocks; its faults are what readers or this check cannot follow."""
    page = Page(name)
    every, block, last, before = [], None, None, ""
    for number, line in enumerate((root / name).read_text(encoding="utf-8").splitlines(), 1):
        if block is not None:
            if line.strip() != "```":
                block.text += line + "\n"
                continue
            if block.language == "text" and last is not None and last.language in ("sh", "python"):
                last.output = block
            else:
                page.blocks.append(block)
                last = block
            block = None
        elif found := FENCE.fullmatch(line):
            block = Block(name, number, found[1], "")
            every.append(block)
            if block.language not in LANGUAGES:
                page.faults.append(
                    f"{name}:{number}: a block needs one of the languages {', '.join(sorted(LANGUAGES))}"
                )
        elif line.strip():
            if COMMAND.match(line) and not before.strip():
                page.faults.append(f"{name}:{number}: commands belong into a block ```sh, so that they are run")
            last = None
        before = line
    direct(page, every, json.loads((root / DIRECTIONS).read_text(encoding="utf-8")))
    return page


def apply_diff(tree: Path, diff: str) -> str:
    """Applies a unified diff if its old lines occur exactly once in the file; else returns a message, not ""."""
    for part in re.split(r"^--- .*\n\+\+\+ b/", diff, flags=re.MULTILINE)[1:]:
        name, _, hunks = part.partition("\n")
        text = (tree / name).read_text(encoding="utf-8")
        for hunk in re.split(r"^@@.*\n", hunks, flags=re.MULTILINE)[1:]:
            lines = [line if line.strip() else " \n" for line in hunk.splitlines(keepends=True)]
            old = "".join(line[1:] for line in lines if line[0] in " -")
            if text.count(old) != 1:
                return f"{name} has these lines {text.count(old)} times, once was expected:\n{old}"
            text = text.replace(old, "".join(line[1:] for line in lines if line[0] in " +"))
        (tree / name).write_text(text, encoding="utf-8")
    return ""


def same_output(wanted: str, found: str, numbers_vary: bool) -> bool:
    """Returns whether FOUND matches WANTED; `...` is any number of lines, blanks at the end of a line do not count."""

    def pattern(line: str) -> str:
        if line.strip() == "...":
            return r"(?:.*\n)*?"
        line = line.rstrip()
        if not numbers_vary:
            return re.escape(line) + r" *\n"
        words = re.split(r"[-+]?\d[\d,.]*(?:e[-+]?\d+)?", re.sub(r"\s+", " ", line))
        return r"[-+]?\d[\d,.]*(?:e[-+]?\d+)?".join(re.escape(w).replace(r"\ ", r" *") for w in words) + r" *\n"

    if numbers_vary:
        found = "".join(re.sub(r"[ \t]+", " ", line) + "\n" for line in found.splitlines())
    return re.fullmatch("".join(pattern(line) for line in wanted.splitlines()), found) is not None
