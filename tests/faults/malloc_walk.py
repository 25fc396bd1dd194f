#!/usr/bin/env python3
"""Runs every command with one failing allocation: each one (--all); the first two and the last of those with the same
call stack (--ways); or a sample of these.

Allowed: exit status 0 and the undisturbed output; or 1, a message about memory and not about damage, and intact output
files, old or new. After a profile that failed, --resume must give the same bytes. INPUTS is the folder that
tests/cli/malloc_faults.sh fills. Prints one line per command, "ok - " or "not ok - ".
"""
import argparse
import os
import random
import shutil
import subprocess
import sys
import tempfile

PROFILE = "profile tiny.gguf calib.jsonl -n 4 --ignore-eos -q 1 --quiet --threads 1 -m keydiff -m snapkv -o run.h5"
SMALL = "-t 200 --quiet --threads 1"
SHORT = "-t 64 --quiet --threads 1"
# name: (command, number of points in a short run). Words that name inputs become paths in INPUTS.
COMMANDS = {
    "help": ("help", 3),
    "help metrics": ("help metrics", 3),
    "profile": (PROFILE, 30),
    "profile --resume": (PROFILE + " --resume", 20),  # from the parts of a killed run, run.h5.parts of INPUTS
    "profile --plan": (PROFILE + " --plan", 10),
    "merge": ("merge whole.h5 s1.h5 s2.h5 --force", 20),
    "solve": ("solve run.h5 -m keydiff -o t.safetensors --json", 30),
    "solve --exact": (
        "solve run.h5 -m keydiff --block 16 --ratios 0.3,0.5 --exact --budgets b.npy -o t.safetensors", 20),
    "solve --holdout": ("solve run.h5 -m keydiff --holdout --json", 15),
    "solve --ablation": ("solve run.h5 -m keydiff --ablation", 15),
    "validate": ("validate run.h5 -m keydiff --json", 15),
    "validate --certificate": ("validate --certificate table.safetensors run.h5", 15),
    "eval": ("eval tiny.gguf table.safetensors text.txt -a uniform -a ada -r 0.5 -n 3 -o worth " + SMALL, 30),
    "task": (
        "task tiny.gguf table.safetensors -k niah_single_1 -c 1 -a uniform -r 0.5 --results r --output s.jsonl "
        "-t 700 --quiet --threads 1", 30),
    "learn": ("learn run.h5 -o rank.safetensors --json", 20),
    "recommend": ("recommend tiny.gguf table.safetensors texts.jsonl --max-kl 9 --confidence 0.5 -r 0.5 -n 3 --json "
                  "--csv rows.csv " + SHORT, 20),
    "refine": ("refine tiny.gguf table.safetensors texts.jsonl -r 0.5 -n 2 --evaluations 1 --json -o r.safetensors "
               + SHORT, 30),
    "report": ("report table.safetensors --record run.h5 -r worth.json -o page.html", 20),
    "budgets": ("budgets table.safetensors --ratio 0.5 --tokens 100 --json", 15),
    "export npy": ("export table.safetensors --format npy -o t.npy", 15),
    "export lukv-steps": ("export run.h5 --format lukv-steps -o steps", 15),
    "export varlen": ("export table.safetensors -f varlen -r 0.5 -t 99 --block 16 -o arrays", 15),
    "export duo": ("export table.safetensors -f duo -r 0.5 -t 99 -o duo", 15),
    "export per-layer": ("export table.safetensors -f per-layer -r 0.5 -t 99 -o layers.json", 15),
    "import": ("import steps.in -o imported.h5", 20),
    "inspect h5": ("inspect run.h5", 10),
    "inspect table": ("inspect table.safetensors --json", 10),
    "inspect jsonl": ("inspect calib.jsonl", 8),
    "calib": ("calib tiny.gguf text.txt -o c.jsonl -t 300 --lines 2 --continue 1 -n 4 --quiet", 20),
    "calib of jsonl": ("calib tiny.gguf texts.jsonl calib.jsonl -o c.jsonl -t 64 --continue 1 -n 4 -q 1 --quiet", 20),
}


class Walk:
    def __init__(self, options):
        self.o = options
        self.inputs = {n: os.path.join(options.inputs, n) for n in os.listdir(options.inputs)}

    def words(self, command):
        """Returns the command's words; inputs are replaced by paths, but not what follows -o and the like."""
        out, is_output = [], False
        for w in command.split():
            out.append(self.inputs[w] if w in self.inputs and not is_output else w)
            is_output = w in ("-o", "--output", "--npy", "--budgets", "--results")
        return out

    def run(self, folder, words, at=None, count=None, stacks=None):
        env = dict(os.environ, LD_PRELOAD=self.o.shim, LC_ALL="C", OMP_NUM_THREADS="1")
        for key, value in (("FAIL_MALLOC_AT", at), ("FAIL_MALLOC_COUNT", count), ("FAIL_MALLOC_STACKS", stacks),
                           ("FAIL_MALLOC_IN", self.o.objects)):
            if value is not None:
                env[key] = str(value)
        try:
            p = subprocess.run([self.o.kvbudget] + words, cwd=folder, env=env, stdin=subprocess.DEVNULL,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=900)
        except subprocess.TimeoutExpired:
            return 124, b"", b"it hung"
        return p.returncode, p.stdout, p.stderr


def files_below(folder):
    out = {}
    for path, _, names in os.walk(folder):
        for name in names:
            full = os.path.join(path, name)
            with open(full, "rb") as f:
                out[os.path.relpath(full, folder)] = f.read()
    return out


def masked(data, other):
    """Returns the lines that a second undisturbed run repeats, and None for others: seconds, measured speeds."""
    a, b = data.split(b"\n"), other.split(b"\n")
    b += [None] * (len(a) - len(b))
    return [x if x == y and b"measured" not in x and b"seconds" not in x else None for x, y in zip(a, b)]


def equals(mask, data):
    lines = data.split(b"\n")
    return len(lines) == len(mask) and all(m is None or m == line for m, line in zip(mask, lines))


class Command:
    def __init__(self, walk, name, command):
        self.walk, self.name, self.words = walk, name, walk.words(command)
        self.what = []
        first, self.calls = self.undisturbed()
        second, _ = self.undisturbed()
        self.files = {n: masked(d, second[1].get(n, b"")) for n, d in first[1].items()}
        self.out = masked(first[0], second[0])

    def prepare(self, folder):
        """Copies the parts that the command resumes from into the folder; returns the folder's files."""
        if "--resume" in self.words:
            shutil.copytree(self.walk.inputs["run.h5.parts"], os.path.join(folder, "run.h5.parts"))
        return files_below(folder)

    def undisturbed(self):
        with tempfile.TemporaryDirectory() as folder, tempfile.NamedTemporaryFile() as count:
            self.prepare(folder)
            code, out, err = self.walk.run(folder, self.words, count=count.name)
            if code != 0:
                raise SystemExit("%s: undisturbed: exit status %d: %s" % (self.name, code, err.decode()))
            return (out, files_below(folder)), int(count.read() or 0)

    def ways(self):
        """Returns the numbers of the first two calls and of the last one with each call stack."""
        with tempfile.TemporaryDirectory() as folder, tempfile.NamedTemporaryFile() as stacks:
            self.prepare(folder)
            code, _, err = self.walk.run(folder, self.words, stacks=stacks.name)
            if code != 0:
                raise SystemExit("%s: undisturbed: exit status %d: %s" % (self.name, code, err.decode()))
            calls = {}
            for at, way in enumerate(stacks.read().split(), 1):
                calls.setdefault(way, []).append(at)
        return sorted({at for c in calls.values() for at in c[:2] + c[-1:]})

    def judge(self, at, old):
        """Returns None, or what is wrong."""
        with tempfile.TemporaryDirectory() as folder:
            before = self.prepare(folder)
            if old:  # files that the run would replace must be unchanged if it fails
                for name in self.files:
                    if "/" not in name and "--force" in self.words:
                        with open(os.path.join(folder, name), "wb") as f:
                            f.write(b"old")
            code, out, err = self.walk.run(folder, self.words, at=at)
            files = files_below(folder)
            if code == 0:
                if not equals(self.out, out):
                    return "exit status 0 with another output: %s" % err.decode(errors="replace")[-300:]
                if set(files) != set(self.files):
                    return "exit status 0 with other files: %s" % sorted(set(files) ^ set(self.files))
                for name, data in files.items():
                    if not equals(self.files[name], data):
                        return "exit status 0 with another %s" % name
                return None
            if code != 1:
                return "exit status %d: %s" % (code, err.decode(errors="replace")[-300:])
            if self.walk.o.objects is None and b"memory" not in err:
                return "no word of memory: %s" % err.decode(errors="replace")[-300:]
            if b"damaged" in err:
                return "damage reported: %s" % err.decode(errors="replace")[-300:]
            for name, data in files.items():
                if name.endswith(".partial") and "/" not in name:
                    return "%s is left" % name
                if name in self.files and data != b"old" and not equals(self.files[name], data) \
                        and not name.endswith((".cells", ".jsonl")):
                    return "exit status 1 with another %s: %s" % (name, err.decode(errors="replace")[-200:])
            whole = "run.h5" in files and equals(self.files["run.h5"], files["run.h5"])
            gone = [n for n, data in before.items() if n.endswith(".h5") and files.get(n) != data]
            if gone and not whole:
                return "lost: %s: %s" % (gone, err.decode(errors="replace")[-200:])
            if self.name in ("profile", "profile --resume", "eval", "task", "refine"):
                return self.resume(folder)
            return None

    def resume(self, folder):
        is_profile = self.name.startswith("profile")
        more = ["--resume"] if self.name == "profile" else []
        code, _, err = self.walk.run(folder, self.words + more)
        if code != 0:
            return "cannot go on: %s" % err.decode(errors="replace")[-300:]
        files = files_below(folder)
        for name, mask in self.files.items():
            exact = (is_profile or self.name == "refine") and not name.endswith(".cells")
            if name not in files or (exact and not equals(mask, files[name])):
                return "gone on: another %s" % name
        return None

    def walk_points(self, points, seed):
        every = range(1, self.calls + 1) if self.walk.o.all else self.ways()
        chosen = every if points is None or points >= len(every) else sorted(random.Random(seed).sample(every, points))
        wrong = [(at, w) for at in chosen for w in [self.judge(at, at % 2 == 1)] if w]
        mark = "not ok" if wrong else "ok"
        counts = (mark, self.name, len(chosen), self.calls, len(wrong))
        print("%s - %s: %d of %d allocations, %d wrong" % counts, flush=True)
        for at, w in wrong[:self.walk.o.show]:
            print("    %d: %s" % (at, " | ".join(w.strip().splitlines())))
        return len(chosen), len(wrong)


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("kvbudget")
    p.add_argument("shim")
    p.add_argument("inputs")
    p.add_argument("--all", action="store_true", help="every point")
    p.add_argument("--ways", action="store_true", help="the first two points and the last of every way of calls")
    p.add_argument("--seed", type=int, default=12)
    p.add_argument("--scale", type=float, default=1, help="times as many points")
    p.add_argument("--only", help="commands whose name contains this")
    p.add_argument("--objects", help="FAIL_MALLOC_IN: then a message need not speak of memory")
    p.add_argument("--show", type=int, default=5, help="wrong points shown per command")
    o = p.parse_args()
    o.inputs, o.kvbudget, o.shim = (os.path.abspath(x) for x in (o.inputs, o.kvbudget, o.shim))
    walk, points, wrong = Walk(o), 0, 0
    for name, (command, n) in COMMANDS.items():
        if o.only and o.only not in name:
            continue
        most = None if o.all or o.ways else max(1, round(n * o.scale))
        tried, bad = Command(walk, name, command).walk_points(most, o.seed)
        points, wrong = points + tried, wrong + bad
    print("%d points, %d wrong" % (points, wrong))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
