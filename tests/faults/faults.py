#!/usr/bin/env python3
"""Runs every command that writes, with every one of its state-changing file calls failing once.

faults.py --build BUILD [--points N] [--seed S] [--case NAME]... [--jobs J]

fault_shim.so counts the calls; each run makes one of them fail: EIO, ENOSPC, EINTR, a short write, a kill, or SIGTERM.
Afterwards the old or the new output must be intact; exit status 0 is allowed only with the result of the undisturbed
run; otherwise one error line must name a file of the command. Nothing temporary may be left, the parts of an unfinished
record must survive, and the same command must then give the undisturbed result. --points N takes N points per case and
mode, drawn with the seed; without it all of them. Prints one line per case and mode, as tests/cli does; the exit status
is 1 if anything was lost or silent.
"""
import argparse
import collections
import concurrent.futures
import hashlib
import json
import os
import pathlib
import random
import re
import shutil
import subprocess
import sys
import tempfile

MODES = {  # the calls that can end like this
    "eio": "open write pwrite ftruncate fallocate fsync fdatasync close rename link unlink mkdir rmdir fchmod fflush "
           "fclose",
    "enospc": "open write pwrite ftruncate fallocate fsync fdatasync close rename link mkdir fflush fclose",
    "eintr": "open write pwrite ftruncate fallocate fsync fdatasync close flock",
    "short": "write pwrite",
    "kill": "open write pwrite ftruncate fallocate fsync fdatasync close rename link unlink mkdir rmdir fchmod flock",
    "term": "open write pwrite fsync rename link mkdir fchmod",
}
ENDS = {"kill": -9, "term": -15}  # exit codes after signals
Case = collections.namedtuple("Case", "name args before again stdout")
PROFILE = ("profile IN/tiny.gguf IN/calib.jsonl -o run.h5 --new-tokens 3 --ignore-eos -q 1 --quiet --threads 1 "
           "--metric keydiff")
ADD = "profile IN/tiny.gguf --add -o run.h5 --quiet --threads 1 --metric knorm"
EVAL = "eval IN/tiny.gguf IN/keydiff.safetensors IN/text.txt --tokens 64 --next 4 -r 0.5 -a none --threads 1 --quiet"
TASK = ("task IN/tiny.gguf IN/keydiff.safetensors --task niah_single_1 --tokens 700 -c 1 -r 0.5 -a none --threads 1 "
        "--quiet --compute f32")
DAMAGE = "--tokens 64 --next 4 -r 0.5 --threads 1 --quiet"  # options of recommend and refine, for short texts


def case(name, args, before="", again=None, stdout=None):
    return Case(name, args.split(), before.split(), (again or args).split(), stdout)


CASES = [
    case("profile", PROFILE, again=PROFILE + " --resume"),
    case("profile --force", PROFILE + " --force", before="other.h5:run.h5"),
    case("profile --resume", PROFILE + " --resume", before="parts:run.h5.parts"),
    case("profile --add", ADD, before="run.h5:run.h5"),
    case("merge of records", "merge merged.h5 IN/run.h5 IN/knorm.h5 --force", before="other.h5:merged.h5"),
    case("merge", "merge merged.h5 IN/shard1.h5 IN/shard2.h5"),
    case("merge --force", "merge merged.h5 IN/shard1.h5 IN/shard2.h5 --force", before="other.h5:merged.h5"),
    case("import steps", "import IN/steps -o steps.h5", again="import IN/steps -o steps.h5 --force"),
    case("import steps --force", "import IN/steps -o steps.h5 --force", before="other.h5:steps.h5"),
    case("solve", "solve IN/run.h5 --metric keydiff -o t.safetensors --budgets b.npy --quiet",
         before="old.safetensors:t.safetensors"),
    case("solve --holdout", "solve IN/two.h5 --metric keydiff --holdout --csv h.csv --quiet"),
    case("validate", "validate IN/run.h5 --metric keydiff --csv v.csv --quiet", before="old.csv:v.csv"),
    case("export npy", "export IN/keydiff.safetensors --format npy -o t.npy", before="old.npy:t.npy"),
    case("export lukv-steps", "export IN/run.h5 --format lukv-steps -o steps"),
    case("export varlen", "export IN/keydiff.safetensors -f varlen -r 0.5 -t 99 --block 16 -o arrays"),
    case("export duo", "export IN/keydiff.safetensors -f duo -r 0.5 -t 99 -o duo"),
    case("export per-layer", "export IN/keydiff.safetensors -f per-layer -r 0.5 -t 99 -o l.json"),
    case("export shares", "export IN/keydiff.safetensors -f shares -r 0.5 -t 99 -o s.json"),
    case("import curves", "import IN/hand.safetensors -o c.h5 --force", before="other.h5:c.h5"),
    case("tables --add", "tables --add IN/keydiff.safetensors --name Org/T --results IN/worth.json",
         before="old.safetensors:t.safetensors"),
    case("calib", "calib IN/tiny.gguf IN/text.txt IN/texts.jsonl -o c.jsonl -t 64 --continue 1 -n 4 --quiet",
         before="old.jsonl:c.jsonl"),
    case("learn", "learn IN/two.h5 -o rank.safetensors --quiet", before="old_rank.safetensors:rank.safetensors"),
    case("recommend", "recommend IN/tiny.gguf IN/keydiff.safetensors IN/texts.jsonl --max-kl 9 --confidence 0.5 "
         f"--csv rows.csv {DAMAGE}", before="old.csv:rows.csv"),
    case("refine", "refine IN/tiny.gguf IN/keydiff.safetensors IN/texts.jsonl --evaluations 6 -o r.safetensors "
         f"--csv rows.csv {DAMAGE}", before="old.safetensors:r.safetensors"),
    case("report", "report IN/keydiff.safetensors --record IN/run.h5 --results IN/worth.json -o page.html --quiet",
         before="old.html:page.html"),
    case("tune", "tune IN/tiny.gguf --tokens 100 -o t --threads 1 --quiet", before="old.safetensors:t.safetensors"),
    case("eval", EVAL + " -o worth --dump-kept kept.jsonl", before="old.svg:worth.svg"),
    case("task", TASK + " -o worth"),
    case("task --output", "task IN/tiny.gguf -k niah_single_1 --tokens 700 -c 2 --output s.jsonl --quiet --threads 1",
         before="old.jsonl:s.jsonl"),
    case("budgets >", "budgets IN/keydiff.safetensors --ratio 0.5 --tokens 1000", stdout="out.txt"),
    case("inspect >", "inspect IN/run.h5 --json", stdout="out.txt"),
]


class Bench:
    def __init__(self, build, shim, work):
        self.kvb = str(pathlib.Path(build).resolve() / "kvbudget")
        self.tiny = str(pathlib.Path(build).resolve() / "tests/tiny_model")
        self.shim = str(pathlib.Path(shim).resolve())
        self.work = pathlib.Path(work).resolve()
        self.inputs = self.work / "in"
        self.inputs.mkdir()
        self.make_inputs()

    def plain(self, args, cwd=None, ok=(0,)):
        done = subprocess.run([self.kvb, *args.split()], cwd=cwd or self.inputs, capture_output=True,
                              stdin=subprocess.DEVNULL)
        if done.returncode not in ok:
            sys.exit(f"{args}: exit status {done.returncode}: {done.stderr.decode(errors='replace')}")

    def make_inputs(self):
        subprocess.run([self.tiny, "tiny.gguf"], cwd=self.inputs, check=True, capture_output=True)
        draw = random.Random(5)
        ids = lambda n: [3 + draw.randrange(40) for _ in range(n)]
        with open(self.inputs / "calib.jsonl", "w", encoding="ascii") as out:
            for name, n in (("a", 40), ("b", 30)):
                print(f'{{"sample_id": "{name}", "context_ids": {ids(n)}, "question_ids": {[ids(5), ids(4)]}}}',
                      file=out)
        (self.inputs / "text.txt").write_text("".join(f"line {i * 7 % 101} says {i * i % 97}\n" for i in range(60)))
        with open(self.inputs / "texts.jsonl", "w", encoding="ascii") as out:
            for k in range(8):
                lines = "".join(f"line {i * (k + 3) % 101} says {i * i % (90 + k)}\n" for i in range(30))
                print(f'{{"sample_id": "t{k}", "context": {json.dumps(lines)}, "questions": ["?"]}}', file=out)
        for k in range(12):  # tune's own texts
            path = self.inputs / ("data/eval" if k % 2 else "data/plain") / f"{k}.txt"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(f"line {i * (k + 3) % 101} says {i * i % (90 + k)}\n" for i in range(30)))
        for name, text in (("svg", "<svg>old</svg>\n"), ("csv", "old,rows\n1,2\n"),
                           ("jsonl", '{"old": 1}\n{"old": 2}\n'), ("html", "<!DOCTYPE html>\nold\n")):
            (self.inputs / f"old.{name}").write_text(text)
        run = PROFILE.replace("IN/", "")
        self.plain(run)
        self.plain(run.replace("run.h5", "two.h5").replace("-q 1", "-q 2"))
        self.plain(run.replace("run.h5", "other.h5") + " --seed 9")
        self.plain(run.replace("run.h5", "knorm.h5").replace("keydiff", "knorm"))
        for k in (1, 2):
            self.plain(run.replace("run.h5", f"shard{k}.h5") + f" --shard {k}/2")
        self.plain("solve run.h5 --metric keydiff -o keydiff.safetensors --quiet")
        self.plain("solve other.h5 --metric keydiff -o old.safetensors --quiet")
        self.plain("learn other.h5 -o old_rank.safetensors --quiet")
        self.plain(EVAL.replace("IN/", "") + " -o worth")
        self.plain("export keydiff.safetensors --format npy -o keydiff.npy")
        self.plain("export old.safetensors --format npy -o old.npy")
        self.plain("export run.h5 --format lukv-steps -o steps")
        check = pathlib.Path(__file__).parents[1] / "cli/check.py"
        subprocess.run([sys.executable, check, "curves_by_hand"], cwd=self.inputs, check=True)
        # The parts of a run that was killed after all parts were written, before the record was assembled.
        folder = self.work / "killed"
        folder.mkdir()
        calls = self.calls(PROFILE.split(), folder, None)
        record = re.compile(r"/run\.h5\.[0-9a-f]{8}\.partial")
        at = next(n for n, name, path in calls if name == "open" and record.fullmatch(path))
        shutil.rmtree(folder)
        folder.mkdir()
        self.run(PROFILE.split(), folder, None, at, "kill")
        shutil.copytree(folder / "run.h5.parts", self.inputs / "parts")

    def expand(self, args):
        return [self.kvb] + [a.replace("IN/", f"{self.inputs}/") for a in args]

    def run(self, args, folder, stdout, at=0, mode="", log=None):
        env = dict(os.environ, LD_PRELOAD=self.shim, FAULT_DIR=str(folder), OMP_NUM_THREADS="1",
                   OMP_WAIT_POLICY="passive", KVBUDGET_TABLES=".", KVBUDGET_DATA=str(self.inputs / "data"))
        if at:
            env.update(FAULT_AT=str(at), FAULT_MODE=mode)
        if log:
            env["FAULT_LOG"] = str(log)
        out = open(folder / stdout, "wb") if stdout else subprocess.DEVNULL
        try:
            done = subprocess.run(self.expand(args), cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=out,
                                  stderr=subprocess.PIPE, timeout=900)
        finally:
            if stdout:
                out.close()
        return done.returncode, done.stderr.decode(errors="replace")

    def calls(self, args, folder, stdout):
        log = folder.parent / (folder.name + ".log")
        log.unlink(missing_ok=True)
        code, err = self.run(args, folder, stdout, log=log)
        if code != 0:
            sys.exit(f"{' '.join(args)}: exit status {code} undisturbed: {err}")
        lines = log.read_text().splitlines() if log.exists() else []
        return [(int(n), name, path) for n, name, path in (line.split(" ", 2) for line in lines)]

    def prepare(self, case, folder):
        folder.mkdir()
        for pair in case.before:
            source, target = pair.split(":")
            if (self.inputs / source).is_dir():
                shutil.copytree(self.inputs / source, folder / target)
            else:
                shutil.copyfile(self.inputs / source, folder / target)


def digest(path):
    data = path.read_bytes()
    if path.suffix in (".json", ".cells", ".csv", ".svg", ".txt"):  # seconds and allocated bytes are no results
        data = re.sub(rb'"(\w*seconds|\w*allocated)":\s*[-+0-9.e]+', b'"time": 0', data)
        if path.suffix == ".cells":
            data = re.sub(rb'"sha256":"[0-9a-f]{64}"', b"", data)  # the hash of a line covers its times
            data = b"\n".join(sorted(set(data.split(b"\n"))))  # in any order; a cut may be measured twice in one round
        if path.suffix == ".csv" and b"seconds" in data.split(b"\n")[0]:
            data = re.sub(rb",\d+,[-+0-9.e]+(?=\n)", b"", data)
    return hashlib.sha256(data).hexdigest()


def snapshot(folder):
    return {str(p.relative_to(folder)): digest(p) for p in sorted(folder.rglob("*"))
            if p.is_file() and not re.search(r"\.tune/(log\.txt|.*\.done)$", str(p))}  # these hold times


def judge(bench, case, folder, before, after, code, err, mode):
    """Returns what is wrong after a disturbed run, (kind, text), or None."""
    now = snapshot(folder)
    stdout = {case.stdout} if case.stdout else set()
    if code == 0:
        if now == after:
            return None
        return "silent", f"exit status 0 with another result: {sorted(set(now.items()) ^ set(after.items()))[:4]}"
    if mode in ENDS:
        if code != ENDS[mode] and not (code == 1 and "was ended by signal" in err):  # one of tune's commands
            return "silent", f"ended with {code}, not by the signal: {err[-300:]}"
    elif code != 1:
        return "lost", f"exit status {code}: {err[-300:]}"
    for name in set(before) | set(after):
        if name in stdout or ".parts/" in name or ".tune/" in name or name.endswith(".cells"):
            continue
        if now.get(name) not in (before.get(name), after.get(name)):
            return "lost", f"{name} is neither the old one nor the new one"
    parts = [n for n in before if ".parts/" in n and n.endswith(".h5")]
    for name in parts:
        record = name.split(".parts/")[0]
        if now.get(record) != after.get(record) and now.get(name) != before[name]:
            return "lost", f"{name} is gone, and {record} is not the new one"
    if mode in ENDS:
        return None
    lines = [line for line in err.splitlines() if line.strip()]
    names = {part for n in list(before) + list(after) for part in n.split("/")} | {"worth", "steps", "standard output"}
    if not lines or not any(n in lines[-1] for n in names):
        return "silent", f"no error line that names a file: {err[-300:]}"
    return None


def disturb(bench, case, before, after, number, call, mode):
    folder = bench.work / f"{abs(hash((case.name, mode, number))):x}"
    bench.prepare(case, folder)
    try:
        code, err = bench.run(case.args, folder, case.stdout, number, mode)
        wrong = judge(bench, case, folder, before, after, code, err, mode)
        left = [str(p.relative_to(folder)) for p in folder.rglob("*.partial")]
        if not wrong and left and mode != "kill" and call[1] != "unlink":
            wrong = "lost", f"left behind: {left}"
        if not wrong and code != 0:
            finished = snapshot(folder) == after  # a failure after the result was in place
            again = case.args if finished and "--resume" not in case.again and "--force" in case.args else case.again
            second, err2 = bench.run(again, folder, case.stdout)
            refused = second == 1 and finished and ("exists" in err2 or "not empty" in err2)
            if not refused and (second != 0 or snapshot(folder) != after):
                wrong = "lost", (f"the same command again: exit status {second}: {err2[-300:]} "
                                 f"{sorted(set(snapshot(folder).items()) ^ set(after.items()))[:4]}")
        return code, wrong
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--build", default="build")
    parser.add_argument("--points", type=int, default=0)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--case", action="append")
    parser.add_argument("--jobs", type=int, default=1)
    o = parser.parse_args()
    seed = o.seed if o.seed is not None else random.SystemRandom().randrange(10**6)
    draw = random.Random(seed)
    wrong = total = 0
    with tempfile.TemporaryDirectory(prefix="kvbudget-faults.") as work:
        bench = Bench(o.build, pathlib.Path(o.build) / "tests/fault_shim.so", work)
        print(f"seed {seed}")
        for c in CASES:
            if o.case and c.name not in o.case:
                continue
            folder = bench.work / "undisturbed"
            bench.prepare(c, folder)
            before = snapshot(folder)
            calls = bench.calls(c.args, folder, c.stdout)
            after = snapshot(folder)
            shutil.rmtree(folder)
            for mode, names in MODES.items():
                points = [call for call in calls if call[1] in names.split()]
                chosen = points if not o.points or len(points) <= o.points else draw.sample(points, o.points)
                found, failed = {"lost": [], "silent": []}, 0
                with concurrent.futures.ThreadPoolExecutor(o.jobs) as pool:
                    results = pool.map(
                        lambda call: (call, disturb(bench, c, before, after, call[0], call, mode)), chosen)
                    for call, (code, finding) in results:
                        failed += code != 0
                        if finding:
                            found[finding[0]].append((call, finding[1]))
                total += len(chosen)
                if not points:
                    continue
                lost, silent = len(found["lost"]), len(found["silent"])
                print(f"{'not ok' if lost + silent else 'ok'} - {c.name:24s} {mode:7s} {len(chosen):4d} of "
                      f"{len(points):4d} points, {failed:4d} ended in an error, lost {lost}, silent {silent}",
                      flush=True)
                for call, text in (found["lost"] + found["silent"])[:3]:
                    print(f"    call {call[0]}, {call[1]} {call[2]}: {text}", flush=True)
                wrong += lost + silent
    print(f"{total} points, {wrong} lost or silent")
    sys.exit(1 if wrong or not total else 0)


if __name__ == "__main__":
    main()
