#!/usr/bin/env python3
"""Runs the command blocks of all pages as they are written: check_docs.py BUILD [--long] [PAGE...]

README.md runs first, in a clean copy of the tree; every other page in a copy of the tree that README.md leaves. So that
this takes two minutes and not an hour, the copy's model is the default one cut to its first layers, and its texts are
shortened; with --long both are whole, and blocks that directions.json calls long run too.
The last line is "N passed, N failed".
"""

import argparse
import ast
import concurrent.futures
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from pages import Block, Page, apply_diff, read_page, same_output

ROOT = Path(__file__).resolve().parents[2]
LAYERS, QUESTIONS, BYTES = 2, 2, 3000
LEFT_OUT = ("essay-de", "log-table", "manual-en")  # five texts are left, the fewest that give intervals
TIMEOUT, LONG_TIMEOUT = 1200, 7200


def all_pages() -> list[str]:
    """Returns the pages for users; README.md runs before all others."""
    folders = ("docs", "runtime", "python", "solver", "evaluator", "study", "formats", "calib-data")
    names = [str(p.relative_to(ROOT)) for folder in folders for p in sorted((ROOT / folder).glob("*.md"))]
    return ["README.md", *names, "ARCHITECTURE.md", "CONTRIBUTING.md"]


def copy_tree(target: Path, build: Path) -> None:
    """Copies the files of the project without results; build/ is a link to BUILD."""
    ignored = shutil.ignore_patterns("build*", ".git", "out", "venv", "__pycache__", "*.partial", ".mypy_cache")
    shutil.copytree(ROOT, target, ignore=ignored, symlinks=True)
    (target / "build").symlink_to(build)


def copy_build(target: Path, build: Path) -> None:
    """Gives a page that changes sources a build folder of its own; objects are copied with their times."""
    (target / "build").unlink()
    shutil.copytree(
        build, target / "build", ignore=shutil.ignore_patterns("tests", "fuzz", "cuda", "tiles"), symlinks=True
    )


def shorten(tree: Path, model: Path) -> None:
    """Makes the default model and the project's texts so small that commands take seconds."""
    cache = tree.parent / "cache"
    cache.mkdir()
    small = cache / model.name
    subprocess.run([sys.executable, ROOT / "tests/docs/cut_model.py", model, str(LAYERS), small], check=True)
    script = tree / "tools/scripts/get-model.sh"
    script.write_text(f"#!/bin/sh\necho '{small}'\n")
    for path in (tree / "calib-data").glob("*.jsonl"):
        sample = json.loads(path.read_text(encoding="utf-8"))
        sample["context"] = sample["context"].encode()[:BYTES].decode(errors="ignore")
        for key in ("questions", "answers"):
            sample[key] = sample[key][:QUESTIONS]
        path.write_text(json.dumps(sample) + "\n", encoding="utf-8")
    for name in LEFT_OUT:
        (tree / f"calib-data/eval/{name}.txt").unlink()


def python_with_packages() -> str:
    """Returns KVBUDGET_PYTHON, else the interpreter of `make check-python` if there is one, else this one."""
    named = os.environ.get("KVBUDGET_PYTHON")
    cache = Path(
        os.environ.get("KVBUDGET_CACHE") or Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "kvbudget"
    )
    made = [str(p.parent / "bin/python") for p in sorted(cache.glob("python-*/complete"))]
    return named or (made[-1] if made else sys.executable)


def missing_modules(block: Block, python: str) -> str:
    """Returns the first module that a Python block imports and PYTHON does not have, or ""."""
    tree = ast.parse(block.text)
    names = [a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names]
    names += [n.module or "" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)]
    for name in sorted({n.split(".")[0] for n in names} - {"kvbudget"}):
        code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec('{name}') is None)"
        if subprocess.run([python, "-c", code], check=False).returncode:
            return name
    return ""


class Run:
    """Runs one page: its blocks in order in one shell, until one fails."""

    def __init__(self, page: Page, tree: Path, long: bool, python: str) -> None:
        self.page, self.tree, self.long, self.python = page, tree, long, python
        self.work = tree.parent / (page.name.replace("/", "_") + ".run")
        self.work.mkdir()
        self.lines: list[str] = []
        self.passed = self.failed = self.skipped = 0
        self.seconds = 0.0

    def good(self) -> None:
        self.passed += 1

    def bad(self, where: str, why: str, detail: str = "") -> None:
        self.failed += 1
        self.lines.append(f"not ok - {where}: {why}")
        self.lines += ["    " + line for line in detail.rstrip().splitlines()[-20:]]

    def why_not(self, block: Block) -> str:
        """Returns why a block is not run, or ""."""
        if block.marker == "skip" or (block.marker == "long" and not self.long):
            return block.reason
        if block.language == "python" and (module := missing_modules(block, self.python)):
            return f"Python's {module} is not installed"
        return ""

    def commands(self, block: Block, number: int, before: str) -> str:
        """Returns the shell commands for a block."""
        file = self.work / f"{number}.block"
        file.write_text((before if block.language == "python" else "") + block.text, encoding="utf-8")
        if block.marker == "file":
            return f'cp "{file}" "{block.reason}"'
        if block.language == "python":
            return f'"{self.python}" "{file}"'
        if block.marker == "exit 1":
            return f'code=0; (set -e; . "{file}") || code=$?; [ "$code" = 1 ]'
        return f'. "{file}"'

    def script(self) -> list[tuple[int, Block]]:
        """Writes the page's script and returns its blocks with their numbers."""
        runs, python_before = [], ""
        out = ["set -e -o pipefail", *self.environment()]
        for number, block in enumerate(self.page.blocks):
            if block.marker not in ("file", "patch") and block.language not in ("sh", "python"):
                continue
            if block.language == "diff":
                if fault := apply_diff(self.tree, block.text):
                    self.bad(block.where, "the diff does not fit", fault)
                continue
            if reason := self.why_not(block):
                self.skipped += 1
                self.lines.append(f"skip - {block.where}: {reason}")
                continue
            out += [
                f'echo {number} >"{self.work}/at"', f'exec >"{self.work}/{number}.out" 2>"{self.work}/{number}.err"'
            ]
            out.append(self.commands(block, number, python_before))
            if block.language == "python":
                python_before += block.text
            runs.append((number, block))
        (self.work / "script").write_text("\n".join([*out, f'echo end >"{self.work}/at"', ""]), encoding="utf-8")
        return runs

    def environment(self) -> list[str]:
        """Returns shell lines for what README.md tells users to set up."""
        lines = [f'export PYTHONPATH="{self.tree}/python" KVBUDGET_LIBRARY="{self.tree}/build/libkvbudget.so"']
        if self.page.name != "README.md":
            lines.append("PATH=$PWD/build:$PATH MODEL=$(tools/scripts/get-model.sh)")
        return lines

    def judge(self, number: int, block: Block) -> None:
        """Compares the output of a block that has run with the page."""
        self.good()
        if block.output is None:
            return
        found = (self.work / f"{number}.out").read_text(encoding="utf-8", errors="replace")
        words_alone = block.output.marker in (("numbers vary",) if self.long else ("numbers vary", "default model"))
        if same_output(block.output.text, found, words_alone):
            self.good()
        else:
            self.bad(block.output.where, "the commands print something else", found)

    def run(self) -> "Run":
        for fault in self.page.faults:
            self.bad(*fault.split(": ", 1))
        runs = self.script()
        if not runs:
            return self
        shell = ["bash", str(self.work / "script")]
        start = time.monotonic()
        try:
            with open(self.work / "log", "wb") as log:
                subprocess.run(
                    shell, cwd=self.tree, stdin=subprocess.DEVNULL, stdout=log, stderr=log, check=False,
                    timeout=LONG_TIMEOUT if self.long else TIMEOUT,
                )  # fmt: skip
        except subprocess.TimeoutExpired:
            self.lines.append(f"    {self.page.name} took too long")
        self.seconds = time.monotonic() - start
        at = self.work / "at"
        stopped = at.read_text().strip() if at.exists() else "start"
        for number, block in runs:
            if str(number) == stopped:
                err = self.work / f"{number}.err"
                self.bad(block.where, "the commands fail", err.read_text(errors="replace"))
                self.lines += [f"    not run after it: {b.where}" for n, b in runs if n > number]
                break
            self.judge(number, block)
        else:
            if stopped != "end":
                self.bad(self.page.name, "its script did not start", (self.work / "log").read_text())
        return self


def report(run: Run) -> None:
    counts = f"{run.passed:3d} passed {run.failed:3d} failed {run.skipped:3d} skipped  {run.seconds:4.0f} s"
    print(f"{run.page.name:28} {counts}", flush=True)
    for line in run.lines:
        print("  " + line, flush=True)


def prepare(work: Path, build: Path, long: bool) -> Path:
    """Prepares the tree in which README.md runs, beginning with `make quickstart`."""
    model = Path(
        subprocess.run([ROOT / "tools/scripts/get-model.sh"], check=True, capture_output=True, text=True).stdout.strip()
    )
    tree = work / "README"
    copy_tree(tree, build)
    if not long:
        shorten(tree, model)
    return tree


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", type=Path)
    parser.add_argument("pages", nargs="*")
    parser.add_argument("--long", action="store_true")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 2)
    parser.add_argument("--keep", type=Path, help="leave the copies in this folder")
    args = parser.parse_args()
    os.environ["LC_ALL"] = "C.UTF-8"
    work = args.keep or Path(tempfile.mkdtemp(prefix="kvbudget-docs."))
    work.mkdir(exist_ok=True)
    try:
        return check(work, args)
    finally:
        if not args.keep:
            shutil.rmtree(work, ignore_errors=True)


def check(work: Path, args: argparse.Namespace) -> int:
    build, python = args.build.resolve(), python_with_packages()
    tree = prepare(work, build, args.long)
    first = Run(read_page(ROOT, "README.md"), tree, args.long, python).run()
    report(first)
    runs = [first]

    def one(name: str) -> Run:
        page = read_page(ROOT, name)
        own = work / name.replace("/", "_")
        if any(b.language in ("sh", "python") for b in page.blocks):
            shutil.copytree(tree, own, symlinks=True)
            if page.own_build:
                copy_build(own, build)
        return Run(page, own, args.long, python).run()

    names = [n for n in args.pages or all_pages() if n != "README.md"]
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        for run in pool.map(one, names):
            report(run)
            runs.append(run)
    passed, failed, skipped = (sum(getattr(r, k) for r in runs) for k in ("passed", "failed", "skipped"))
    if skipped:
        print(f"{skipped} SKIPPED (see above; LONG=1 runs those that are long)")
    print(f"{passed} passed, {failed} failed")
    return int(failed > 0 or passed == 0)


sys.exit(main())
