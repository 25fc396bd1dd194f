"""The figures of the LU-KV paper (arXiv 2602.08585) for models that can be had here: 1, 2a, 2b, 3, 4, and its table 3.

usage: paper_figures.py [NAME...] [--work build/paper] [--svg docs/paper.svg] [--page docs/paper.md] [--samples 10]
NAME is one of tools/scripts/get-model.sh (default: all four). Everything is made by the program from one record of
calib-data's four texts: 1 and 3 to 4 by `solve --ablation`, 2a by `validate`, 2b by `solve --paper -c TEXT`, the
ablation by `eval` on calib-data/eval and by `task`. What a step has written into --work is not made again, so a run can
be stopped. Needs matplotlib, h5py, the package kvbudget in PYTHONPATH, KVBUDGET_PROGRAM and KVBUDGET_LIBRARY.
"""
import argparse
import functools
import itertools
import json
import os
import pathlib
import subprocess

import board_page
import h5py
import kvbudget
import matplotlib
import numpy as np

matplotlib.use("svg")
matplotlib.rcParams.update({"svg.hashsalt": "kvbudget", "font.size": 8, "svg.fonttype": "none"})
import matplotlib.pyplot as plt

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROGRAM = os.environ.get("KVBUDGET_PROGRAM", str(ROOT / "build/kvbudget"))
METRICS = {"snapkv:kvpress": "SnapKV", "keydiff": "KeyDiff", "ea:kvpress": "Expected Attention", "knorm": "Knorm",
           "lagkv:kvpress": "LagKV"}
SPLITS = {"uniform": "uniform", "PyramidKV": "PyramidKV", "AdaKV": "AdaKV", "without gap": "LU-KV, gap ignored",
          "optimum": "LU-KV"}
TASKS = ("niah_single_1", "niah_multikey_2", "vt:hops=1", "fwe")
p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
p.add_argument("names", nargs="*", default=list(board_page.NAMES))
p.add_argument("--work", type=pathlib.Path, default=ROOT / "build/paper")
p.add_argument("--svg", type=pathlib.Path, default=ROOT / "docs/paper.svg")
p.add_argument("--page", type=pathlib.Path, default=ROOT / "docs/paper.md")
p.add_argument("--samples", type=int, default=10)
p.add_argument("--ratio", type=float, default=0.8)
a = p.parse_args()


def run(*words):
    return subprocess.run([PROGRAM, *map(str, words)], check=True, stdout=subprocess.PIPE, text=True).stdout


def results(path, *words):
    """The JSON document of a command, made once."""
    if not path.exists():
        path.write_text(run(*words, "--json"))
    return json.loads(path.read_text())


class Subject:
    def __init__(self, name):
        self.name, self.at = name, a.work / name
        self.at.mkdir(parents=True, exist_ok=True)
        found = subprocess.check_output([ROOT / "tools/scripts/get-model.sh", name], text=True)
        self.model, self.record = found.strip(), self.at / "run.h5"
        if not self.record.exists():
            metrics = [word for m in METRICS for word in ("-m", m)]
            run("profile", self.model, *sorted((ROOT / "calib-data").glob("*.jsonl")), "-o", self.record, *metrics,
                "-q", 8, "--ignore-answers", "--max-tokens", 2048, "--resume")  # fmt: skip
        shown = json.loads(run("inspect", self.record, "--json"))
        self.contexts, self.n_kv_heads = [c["id"] for c in shown["contexts"]], shown["n_kv_heads"]

    @functools.cache
    def study(self, metric):
        return results(self.at / f"ablation-{metric[:6]}.json", "solve", self.record, "-m", metric, "--ablation")

    def losses(self, metric, split):
        """(pruned shares, loss), mean over the questions."""
        rows = [r for r in self.study(metric)["rows"] if r["allocator"] == split]
        return [r["ratio"] for r in rows], [r["loss"] for r in rows]

    def head_losses(self, metric, split):
        """[L, G] at --ratio."""
        found = self.study(metric)["details"][0]
        of_heads = found["head_loss"][split][int(np.argmin(np.abs(np.array(found["ratios"]) - a.ratio)))]
        return np.array(of_heads).reshape(-1, self.n_kv_heads)

    @functools.cache
    def perfect(self):
        """(pruned shares, loss) of uniform budgets in the oracle's order, with KeyDiff's protected tokens."""
        x, found = self.losses("keydiff", "uniform")[0], []
        sink, window = (getattr(self.table("keydiff", "with").info, name) for name in ("sink", "window"))
        with h5py.File(self.record) as record:
            for question in (q for c in record["contexts"].values() for q in c["questions"].values() if "oracle" in q):
                oracle = question["oracle"][:]
                least_first = np.sort(oracle[..., sink : oracle.shape[-1] - window], -1).cumsum(-1).sum((0, 1))
                gone = [min(round(r * oracle.shape[-1]), len(least_first)) for r in x]
                found.append([least_first[n - 1] / least_first[-1] for n in gone])
        return x, np.mean(found, 0)

    def greedy_and_exact(self):
        return results(self.at / "validate.json", "validate", self.record, "-m", "keydiff")["rows"]

    def table(self, metric, which):
        path = self.at / f"{which}-{metric[:6]}.safetensors"
        if not path.exists():
            more = {"with": [], "without": ["--order", "oracle"]}.get(which, ["-c", which])
            run("solve", self.record, "-m", metric, "--paper", "--alone", "-o", path, "--quiet", *more)
        return kvbudget.Table(path)

    def profiles(self):
        """Pruned share of every head with a budget at --ratio, one row for each text: what is best for it alone."""
        tables = [self.table("keydiff", c) for c in self.contexts]
        shares = [np.delete(t.prune_ratios[round(100 * a.ratio) - 1], t.info.bounded, 0).ravel() for t in tables]
        return np.array(shares)

    @functools.cached_property
    def texts(self):
        """Those of calib-data/eval that `eval` can take, with a context of 2,048 tokens and the next 64."""
        tool = [pathlib.Path(PROGRAM).parent / "tests/tokens", self.model]
        texts = sorted((ROOT / "calib-data/eval").glob("*.txt"))
        return [t for t in texts if len(subprocess.check_output([*tool, t, "--bos", "auto"]).split()) >= 2112]

    def ablation(self, metric):
        """{split: [KL, score of each task]} with the table that knows how well the metric ranks, and without."""
        tables = []
        for which in ("without", "with"):
            self.table(metric, which)
            tables.append(f"{which}={self.at / f'{which}-{metric[:6]}.safetensors'}")
        splits = ["-a", "uniform", "-a", "pyramid", "-a", "ada", "-r", a.ratio]
        worth = results(self.at / f"eval-{metric[:6]}-{a.ratio}.json", "eval", self.model, *tables, *self.texts,
                        *splits)  # fmt: skip
        out = {r["allocator"]: [r["kl"]] for r in worth["rows"] if r["allocator"]}
        words = [word for t in TASKS for word in ("-k", t)]
        asked = results(self.at / f"task-{metric[:6]}-{a.ratio}-{a.samples}.json", "task", self.model, *tables, *words,
                        "-t", 1000, "-c", a.samples, *splits)["rows"]  # fmt: skip
        for row in asked:
            out.setdefault(row["allocator"] or "full", [0.0]).append(100 * row["score"])
        return out


def draw(subjects):
    figure, axes = plt.subplots(len(subjects), 6, figsize=(19, 3.1 * len(subjects)), squeeze=False,
                                gridspec_kw={"width_ratios": [1, 1, 1, 1, 0.55, 0.55]})
    for s, row in zip(subjects, axes):
        name = board_page.NAMES[s.name]
        x, loss = s.perfect()
        row[0].plot(x, 1 - np.array(loss), "k--", label="oracle")
        for metric, label in METRICS.items():
            x, loss = s.losses(metric, "uniform")
            row[0].plot(x, 1 - np.array(loss), label=label)
        row[0].set(title=f"1 · {name}: recall, uniform budgets", xlabel="pruned", ylabel="oracle importance kept")
        rows = s.greedy_and_exact()
        row[1].plot([r["ratio"] for r in rows], [r["optimum"] for r in rows], label="exact", lw=4, alpha=0.4)
        row[1].plot([r["ratio"] for r in rows], [r["greedy"] for r in rows], label="greedy", lw=1)
        row[1].set(title="2a · greedy and exact, KeyDiff", xlabel="pruned", ylabel="importance lost")
        profiles = s.profiles()
        order = np.argsort(profiles.mean(0))
        for text, of_heads in zip(s.contexts, profiles):
            row[2].plot(of_heads[order], lw=0.8, label=text)
        row[2].set(title=f"2b · best for each text, {a.ratio:.0%}, KeyDiff", xlabel="KV head", ylabel="pruned")
        for split, label in SPLITS.items():
            row[3].plot(s.head_losses("keydiff", split).sum(1), label=label)
        row[3].set(title=f"3 · loss by layer, {a.ratio:.0%}, KeyDiff", xlabel="layer with a budget",
                   ylabel="importance lost")
        high = max(s.head_losses("keydiff", split).max() for split in ("AdaKV", "optimum"))
        for axis, split in zip(row[4:], ("AdaKV", "optimum")):
            axis.imshow(s.head_losses("keydiff", split), aspect="auto", cmap="viridis", vmin=0, vmax=high)
            axis.set(title=f"4 · {SPLITS[split]}", xlabel="KV head", ylabel="layer with a budget")
            axis.locator_params(integer=True)
        for axis in row[:4]:
            axis.legend(fontsize=6)
    figure.tight_layout()
    figure.savefig(a.svg, metadata={"Date": None})


def mean_correlation(profiles):
    """Mean rank correlation of two texts' profiles."""
    ranks = profiles.argsort(1).argsort(1)
    return np.mean([np.corrcoef(x, y)[0, 1] for x, y in itertools.combinations(ranks, 2)])


def numbers(subjects):
    out = ["| model | figure | what | value |", "|---|---|---|---:|"]
    for s in subjects:
        name, at = board_page.NAMES[s.name], lambda x, y: y[int(np.argmin(np.abs(np.array(x) - a.ratio)))]
        kept = [f"oracle {1 - at(*s.perfect()):.2f}"]
        kept += [f"{label} {1 - at(*s.losses(m, 'uniform')):.2f}" for m, label in METRICS.items()]
        gap = max((r["greedy"] - r["optimum"]) / r["optimum"] for r in s.greedy_and_exact() if r["ratio"] >= 0.1)
        spread = {split: s.head_losses("keydiff", split) for split in SPLITS}
        out.append(f"| {name} | 1 | importance kept at {a.ratio:.0%}, uniform budgets | {', '.join(kept)} |")
        out.append(f"| {name} | 2a | greedy above exact at 10 % pruned and beyond, at most | {100 * gap:.2g} % |")
        like = mean_correlation(s.profiles())
        out.append(f"| {name} | 2b | rank correlation of two texts' budgets, mean | {like:.2f} |")
        for number, what, f in (("3", "all layers; the worst layer", lambda x: f"{x.sum():.3f}; {x.sum(1).max():.4f}"),
                                ("4", "the worst head", lambda x: f"{x.max():.4f}")):
            row = ", ".join(f"{SPLITS[split]} {f(x)}" for split, x in spread.items())
            out.append(f"| {name} | {number} | importance lost at {a.ratio:.0%}, KeyDiff: {what} | {row} |")
    return out


def ablations(subjects):
    out = ["| model | metric | budgets | KL | " + " | ".join(t.split(":")[0] for t in TASKS) + " |",
           "|---|---|---|---:|" + "---:|" * len(TASKS)]
    names = {"full": "full cache", "uniform": "uniform", "pyramid": "PyramidKV", "ada": "AdaKV",
             "without": "LU-KV, gap ignored", "with": "**LU-KV**"}
    for s in subjects:
        for metric in ("snapkv:kvpress", "keydiff"):
            found = s.ablation(metric)
            for split, label in names.items():
                kl, *scores = found[split]
                cells = [f"{kl:.3g}", *(f"{x:.0f}" for x in scores)]
                out.append(f"| {board_page.NAMES[s.name]} | {METRICS[metric]} | {label} | {' | '.join(cells)} |")
    return out


subjects = [Subject(name) for name in a.names]
for s in subjects:
    for metric in METRICS:
        s.study(metric)
draw(subjects)
board_page.put(a.page, "paper", (("numbers", numbers(subjects)), ("ablation", ablations(subjects))))
