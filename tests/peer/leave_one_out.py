"""Judges the defaults of `learn` and `solve` on models that they were not chosen on.

usage: leave_one_out.py measure KVBUDGET MODEL FOLDER [--calibrate TEXT...] [--judge TEXT...]
       leave_one_out.py report FOLDER... [--csv FILE]
measure: texts are read once as `tune` reads them, then every choice of every default is varied alone: a ranking is
learned, a table solved, and tokens are really evicted on the texts that judge (default: those of calib-data). Whatever
is in FOLDER is not made again.
report: the score of a choice is its KL relative to the default's, as a geometric mean over 50, 80, 90 and 95 %. For
each model: what the default has relative to the choice that is best there, and what the choice has that is best on
average over the other models. 1 means that nothing was lost; with only so many texts, 1.1 is often chance.
"""

import argparse
import csv
import math
import pathlib
import re
import subprocess

FEATURES = ("keydiff", "ea:kvpress", "ea:kvpress:epsilon=0", "knorm")
RATIOS = (0.5, 0.8, 0.9, 0.95)
RANKINGS = {
    "learned": "--target mean",
    "own": "--target mean --own",
    "ridge0.001": "--target mean --lambda 0.001",
    "ridge0.1": "--target mean --lambda 0.1",
}
# default: its choices, the one in use first, each a ranking, options of solve, and what goes behind the table in eval
OUTPUT, IMPORTANCE = ("learned", "", ""), ("learned", "--loss importance --window 16", "")
CHOICES = {
    "loss": {"output": OUTPUT, "importance": IMPORTANCE},
    "aggregate": {"mean_loss": OUTPUT} | {x: ("learned", f"--aggregate {x}", "")
                                          for x in ("mean_ratio", "worst", "cvar:0.2")},
    "shrink": {"0.1": OUTPUT} | {x: ("learned", f"--shrink {x}", "") for x in ("0", "0.3")},
    "protection": {"as solved": OUTPUT, "strict": ("learned", "", ":strict")},
    "window": {"16": IMPORTANCE} | {x: ("learned", f"--loss importance --window {x}", "") for x in ("1", "64")},
    "features": {"all": IMPORTANCE, "own": ("own", *IMPORTANCE[1:])},
    "lambda": {"held out": IMPORTANCE} | {x: (f"ridge{x}", *IMPORTANCE[1:]) for x in ("0.001", "0.1")},
}


def name_of(choice):
    """Returns the name of a choice's table. What several defaults have in common is measured once."""
    return "-".join(["table", *re.findall("[a-z0-9_]+", " ".join(choice))])


def measure(a):
    calib = pathlib.Path(__file__).parents[2] / "calib-data"
    work = pathlib.Path(a.files[2])
    work.mkdir(parents=True, exist_ok=True)

    def make(name, *command):
        if not (work / name).exists():
            subprocess.run([a.files[0], *map(str, command)], cwd=work, check=True)

    model = pathlib.Path(a.files[1]).resolve()
    texts = [pathlib.Path(x).resolve() for x in a.calibrate or sorted((calib / "plain").glob("*.txt"))]
    kept = [pathlib.Path(x).resolve() for x in a.judge or sorted((calib / "eval").glob("*.txt"))]
    kept = [x for x in kept if not subprocess.run([a.files[0], "calib", model, x, "-o", work / "kept.jsonl", "--force",
                                                   "--continue", "1"], capture_output=True).returncode]  # long enough
    curves = "--curves --gain-rows 48 --curve-queries 128".split()
    make("calib.jsonl", "calib", model, *texts, "-o", "calib.jsonl", "--continue", 1, "-n", 129)
    make("run.h5", "profile", model, "calib.jsonl", "-o", "run.h5", *(f"--metric={x}" for x in FEATURES), *curves)
    for name, options in RANKINGS.items():
        make(f"{name}.safetensors", "learn", "run.h5", "-o", f"{name}.safetensors", *options.split(),
             *(f"--feature={x}" for x in FEATURES))
    learned = "--metric=learned=learned.safetensors"
    make("added", "profile", model, "--add", "-o", "run.h5", learned, "--window", 16, *curves)
    (work / "added").touch()
    evals = {"kl": [], "kl-1": [], "kl-64": []}  # one run of eval protects the same tokens everywhere
    for choice in dict.fromkeys(x for choices in CHOICES.values() for x in choices.values()):
        (ranking, options, behind), name = choice, name_of(choice)
        make(f"{name}.safetensors", "solve", "run.h5", f"--metric=learned={ranking}.safetensors", "--alone",
             *options.split(), "-o", f"{name}.safetensors")
        window = re.search("window (1|64)$", options)
        evals[f"kl-{window[1]}" if window else "kl"].append(f"{name}={name}.safetensors{behind}")
    for name, tables in evals.items():
        make(f"{name}.csv", "eval", model, *tables, *kept, "--allocator", "none", "--ratio", ",".join(map(str, RATIOS)),
             "--tokens", 2048, "-o", name)


def scores(folder):
    """Returns, for each default whose choices were all measured, the score of each of them on one model."""
    kl = {(row["allocator"], float(row["ratio"])): float(row["kl"])
          for path in pathlib.Path(folder).glob("kl*.csv") for row in csv.DictReader(open(path))}

    def score(choice, base):
        logs = [math.log(kl[name_of(choice), r] / kl[name_of(base), r]) for r in RATIOS]
        return sum(logs) / len(logs)

    return {default: {x: score(choice, next(iter(choices.values()))) for x, choice in choices.items()}
            for default, choices in CHOICES.items()
            if all((name_of(x), r) in kl for x in choices.values() for r in RATIOS)}


def report(a):
    models = {pathlib.Path(x).name: scores(x) for x in a.files}
    lines = [("default", "model", "in_use", "in_use_to_best", "chosen_on_the_others", "chosen_to_best",
              "best", *(f"choice_{i}" for i in range(1, 5)))]
    for default, choices in CHOICES.items():
        known = {name: found[default] for name, found in models.items() if default in found}
        for name, own in known.items():
            others = [x for key, x in known.items() if key != name]
            chosen = min(choices, key=lambda x: sum(other[x] for other in others))
            best = min(own, key=own.get)
            lines.append((default, name, next(iter(choices)), f"{math.exp(-own[best]):.2f}", chosen,
                          f"{math.exp(own[chosen] - own[best]):.2f}", best,
                          *(f"{x} {math.exp(own[x]):.2f}" for x in choices)))
    for line in lines:
        print("  ".join(line))
    if a.csv:
        csv.writer(open(a.csv, "w", newline=""), lineterminator="\n").writerows(lines)


p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
p.add_argument("act", choices=("measure", "report"))
p.add_argument("files", nargs="+")
p.add_argument("--calibrate", nargs="+")
p.add_argument("--judge", nargs="+")
p.add_argument("--csv")
arguments = p.parse_args()
{"measure": measure, "report": report}[arguments.act](arguments)
