"""The board: compares kvbudget's ready tables with every press of kvpress, at equal memory, on four models.

usage: board.py [--budget MINUTES] [--models NAME...] [--measures kl TASK...] [--rows NAME...] [--texts N] [--samples N]
                [--csv docs/board.csv] [--work build/board]
       board.py --check

Measures: `kl` is the KL to the full cache's predictions of the 64 tokens after a context of 2,048 (texts of
calib-data/eval); the others are tasks of RULER as `kvbudget task` makes them: the context is compressed before the
question is seen, and kvpress's score is used. Every cell is a line of the CSV, written when it is measured: the same
command resumes where it was stopped, and measures cells again that come from another table or version of kvpress. The
order of cells makes a part of them a fair board: all presses on a text, then the next text, then the next model. At the
end the tables of the page beside the CSV (docs/board.md) and the picture are written; --budget 0 does only that.

--check compares the harness with others: the table's KL with `kvbudget eval`, kept positions and answers with kvpress's
own pipeline, and the really cut cache of kvbudget with its mask. The last line is PASS or FAIL.
Needs the packages of requirements.txt, and PYTHONPATH, KVBUDGET_LIBRARY and KVBUDGET_PROGRAM as `make bench-board` sets
them.
"""
import argparse
import csv
import hashlib
import json
import logging
import pathlib
import re
import subprocess
import sys
import time
import warnings

import board_check
import board_page
import torch
from board_context import PROGRAM, ROOT, Context, Subject, divergence
from board_page import RATIOS
from board_presses import ROWS, Absent

MODELS = list(board_page.NAMES)
TOKENS, NEXT = 2048, 64
#: rows whose answers are decoded at once: those that leave keys and values alone share one product with them
ROWS_TOGETHER = 6
#: tokens that NVIDIA's generator reserves for an answer
ANSWER = {"niah": 128, "vt": 30, "cwe": 120, "fwe": 50}
FIELDS = ["model", "measure", "text", "press", "prefills", "ratio", "value", "kept", "held", "full", "seconds",
          "prefill", "of", "note"]
#: text first, so that a part of the cells is a fair board
ORDER = ["story-en", "code-py", "dialogue-en", "log-table", "lecture-en", "essay-de", "manual-en", "code-c"]


def arguments():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--budget", type=float, default=1e9, metavar="MINUTES", help="stop then; what is measured stays")
    p.add_argument("--models", nargs="+", default=MODELS, choices=MODELS)
    p.add_argument("--measures", nargs="+", default=["kl"], help="kl, or tasks of RULER")
    p.add_argument("--rows", nargs="+", choices=[row.name for row in ROWS], help="these presses alone")
    p.add_argument("--texts", type=int, default=len(ORDER), help="how many texts for kl")
    p.add_argument("--samples", type=int, default=5, help="how many samples of a task")
    p.add_argument("--tokens", type=int, default=TOKENS, help="of a task, with question and answer")
    p.add_argument("--csv", type=pathlib.Path, default=ROOT / "docs/board.csv")
    p.add_argument("--work", type=pathlib.Path, default=ROOT / "build/board")
    p.add_argument("--check", action="store_true")
    return p.parse_args()


class Log:
    """The CSV. A cell is done if it has a line for the present table or kvpress; later lines replace earlier ones."""

    def __init__(self, path):
        self.path, self.done = path, {}
        for line in read(path):
            self.done[key_of(line)] = line["of"]

    def add(self, **cell):
        new = not self.path.exists()
        with open(self.path, "a", newline="", encoding="utf-8") as f:
            out = csv.DictWriter(f, FIELDS, lineterminator="\n")
            if new:
                out.writeheader()
            out.writerow({name: f"{x:.6g}" if isinstance(x := cell.get(name, ""), float) else x for name in FIELDS})
        self.done[key_of({k: str(v) for k, v in cell.items()})] = cell["of"]

    def lacks(self, row, of, **where):
        return [r for r in RATIOS if self.done.get(key_of({**where, "press": row.name, "ratio": str(r)})) != of]


def key_of(line):
    return tuple(line[name] for name in ("model", "measure", "text", "press", "ratio"))


def read(path):
    """Returns the lines of the CSV, the latest of every cell."""
    if not path.exists():
        return []
    with open(path, newline="", encoding="utf-8") as f:
        return list({key_of(line): line for line in csv.DictReader(f)}.values())


def version_of(row, subject):
    """Returns which table or version of kvpress a cell is about."""
    if not row.ours:
        return row.version
    table = subject.tables[row.packed, row.refit]
    return "table " + hashlib.sha256(table._data).hexdigest()[:12]


def cuts_of(row, context, ratios):
    """Returns a list of (ratio, Cut or the reason why there is none)."""
    try:
        at = row.of(context)
    except Absent as why:
        return [(r, str(why)) for r in ratios]
    except Exception as why:  # a press that fails on a model has a line that says so
        return [(r, f"{type(why).__name__}: {why}"[:120]) for r in ratios]
    found = []
    for ratio in ratios:
        try:
            found.append((ratio, at(ratio)))
        except Exception as why:
            text = str(why) if isinstance(why, Absent) else f"{type(why).__name__}: {why}"
            found.append((ratio, re.sub(r"\s+", " ", text)[:120]))
    return found


class Measuring:
    """Measures cuts of contexts and writes cells."""

    def __init__(self, log, subject, rows, stop):
        self.log, self.subject, self.rows, self.stop = log, subject, rows, stop

    def cells(self, where, context, values, together=1):
        """Writes lines for every row and ratio that lacks one. values(cuts) measures the cuts of `together` rows."""
        todo = [(row, of, ratios) for row in self.rows for of in [version_of(row, self.subject)]
                if (ratios := self.log.lacks(row, of, **where))]
        for at in range(0, len(todo), together):
            if time.time() > self.stop:
                return False
            found = [(row, of, cuts_of(row, context, ratios)) for row, of, ratios in todo[at : at + together]]
            cuts = [cut for *_, pairs in found for _, cut in pairs if not isinstance(cut, str)]
            measured = iter(values(cuts) if cuts else ())
            for row, of, pairs in found:
                self.write(where, context, row, of, pairs, measured)
        return True

    def write(self, where, context, row, of, pairs, measured):
        """Writes a row's lines: pairs of a ratio and a Cut, which takes the next value, or why there is none."""
        for ratio, cut in pairs:
            common = dict(where, press=row.name, prefills=row.prefills, ratio=ratio, of=of)
            if isinstance(cut, str):
                self.log.add(**common, note=cut)
            else:
                self.log.add(**common, value=float(next(measured)), kept=cut.kept, held=cut.held or context.bytes,
                             full=context.bytes, seconds=cut.seconds, prefill=context.seconds)
        print(f"{where['model']} {where['measure']} {where['text']} {row.name}: "
              + " ".join("-" if isinstance(c, str) else f"{c.kept:.4f}" for _, c in pairs), flush=True)

    def left(self, where):
        return any(self.log.lacks(row, version_of(row, self.subject), **where) for row in self.rows)

    def kl(self, text):
        where = dict(model=self.subject.name, measure="kl", text=text)
        if not self.left(where):
            return True
        ids = self.subject.ids(ROOT / f"calib-data/eval/{text}.txt")
        if ids.shape[1] < TOKENS + NEXT:
            print(f"{self.subject.name}: {text} has {ids.shape[1]} tokens, {TOKENS + NEXT} are needed; left out")
            return True
        context, following = Context(self.subject, ids[:, :TOKENS]), ids[:, TOKENS : TOKENS + NEXT]
        full = context.logits([context.whole()], following)[0]
        return self.cells(where, context, lambda cuts: [
            divergence(full, other).mean().item() for other in context.logits(cuts, following)])

    def task(self, task, sample):
        where = dict(model=self.subject.name, measure=task, text=str(sample["number"]))
        if not self.left(where):
            return True
        text, most = self.subject.work / "context.txt", ANSWER[task.split("_")[0]]
        text.write_text(sample["context"], encoding="utf-8")
        context = Context(self.subject, self.subject.ids(text))
        if self.log.done.get(key_of({**where, "press": "full", "ratio": "0"})) is None:
            value = self.scores(context, sample, most, [context.whole()])[0]
            self.log.add(**where, press="full", prefills=1, ratio=0, value=value, kept=1.0, held=context.bytes,
                         full=context.bytes, seconds=0.0, prefill=context.seconds, of="model")
        return self.cells(where, context, lambda cuts: self.scores(context, sample, most, cuts), ROWS_TOGETHER)

    def scores(self, context, sample, most, cuts):
        """Returns scores up to 100: the mean over the sample's questions, each asked after the cut context."""
        total = [0.0] * len(cuts)
        for question, gold in zip(sample["questions"], sample["gold"]):
            ids = self.encode(question + sample["answer_prefix"])
            answers = context.answers(cuts, ids, most, lambda text: score(text, gold) == 100)
            total = [t + score(text, gold) / len(sample["questions"]) for t, text in zip(total, answers)]
        return total

    def encode(self, text):
        """Returns ids [1, n] of a question by the program's tokenizer, without BOS: what transformers makes of a GGUF
        file's tokenizer splits Gemma's words."""
        path = self.subject.work / "question.txt"
        path.write_text(text, encoding="utf-8")
        ids = self.subject.ids(path)
        return ids[:, 1:] if ids[0, 0] == self.subject.tokenizer.bos_token_id else ids


def score(text, gold):
    """Returns kvpress's score of RULER: the share of strings found in the answer. It never falls as an answer grows."""
    text = re.sub(r"[\x00-\x1f]", "\n", text).strip().lower()
    return 100 * sum(g.lower() in text for g in gold) / len(gold)


def samples_of(task, subject, a):
    """Yields the samples of `kvbudget task`, in NVIDIA's words."""
    out, haystack = a.work / "samples.jsonl", a.work / "haystack.txt"
    haystack.write_text("\n".join((ROOT / f"calib-data/eval/{name}.txt").read_text()
                                  for name in ("story-en", "lecture-en", "dialogue-en", "manual-en")))
    subprocess.run([PROGRAM, "task", subject.path, "-k", task, "-t", str(a.tokens), "-c", str(a.samples), "--haystack",
                    haystack, "--output", out, "--quiet", "--force"], check=True)
    for number, line in enumerate(out.read_text().splitlines()):
        yield json.loads(line) | {"number": number}


@torch.no_grad()
def measure(a):
    log, stop = Log(a.csv), time.time() + 60 * a.budget
    rows = [row for row in ROWS if not a.rows or row.name in a.rows]
    for model in a.models:
        subject = None
        for name in a.measures:
            if time.time() > stop:
                return
            subject = subject or Subject(model, a.work)
            bench = Measuring(log, subject, rows, stop)
            todo = ((bench.kl, (text,)) for text in ORDER[: a.texts]) if name == "kl" else (
                (bench.task, (name, sample)) for sample in samples_of(name, subject, a))
            for step, given in todo:
                if not step(*given):
                    return


def main():
    a = arguments()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    a.work.mkdir(parents=True, exist_ok=True)
    if a.check:
        subject = Subject(a.models[0], a.work)
        return board_check.check(subject, next(samples_of("niah_single_1", subject, a)))
    measure(a)
    page = a.csv.with_suffix(".md")
    if page.exists():
        board_page.write(read(a.csv), page, a.csv.with_suffix(".svg"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
