#!/usr/bin/env python3
"""Compares the prompts of `kvbudget task` with NVIDIA's own generator, byte for byte, and its scores with kvpress's.

    make build/tests/task_score
    ruler_prompts.py RULER KVPRESS build/kvbudget MODEL.gguf HAYSTACK.txt [--count 10] [--tokens 1000 4096 8000]

RULER and KVPRESS are checkouts of NVIDIA/RULER and NVIDIA/kvpress. Python's random numbers cannot be reproduced in C,
so a sample's random choices (words, numbers, places, orders) are read from its text and given to the generator in place
of `random`; the generator's code then makes the prompt. Sentences end at a full stop and a blank for both, without
NLTK's data. Scores: random answers are scored by kvpress's calculate_metrics and by build/tests/task_score.
"""
import argparse
import collections
import json
import math
import pathlib
import random as python_random
import re
import shutil
import subprocess
import sys
import tempfile
import types

import yaml

NEEDLE = re.compile(r"One of the special magic (?:numbers|uuids) for (\S+) is: (\S+)\.")
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."


class Draws:
    """Replaces the module `random`: every draw returns the next one of the sample."""

    def __init__(self, samples=(), shuffles=(), choices=()):
        self.samples, self.shuffles, self.given = list(samples), list(shuffles), list(choices)

    def sample(self, population, k):
        drawn = self.samples.pop(0)
        assert len(drawn) == k and all(x in population for x in drawn), (drawn, k)
        return list(drawn)

    def choices(self, letters, k):
        drawn = self.given.pop(0)
        assert len(drawn) == k and all(c in letters for c in drawn), drawn
        return list(drawn)

    def Random(self, seed):
        return self

    def shuffle(self, items):
        drawn = self.shuffles.pop(0)
        assert collections.Counter(items) == collections.Counter(drawn), "another set of items"
        items[:] = drawn

    def done(self):
        assert not (self.samples or self.shuffles or self.given), "draws are left"


def split_sentences(text):
    return re.findall(r"\S.*?(?:[.?!](?= |$)|$)", text, re.S)


class Generator:
    """One script of RULER, run with the arguments that prepare.py gives it for a task."""

    def __init__(self, folder, task, tokens, haystack):
        config = yaml.safe_load((folder / "scripts/synthetic.yaml").read_text())[task]
        here = folder / "scripts/data/synthetic"
        sys.path[:0] = [str(here)]
        stub = {"wonderwords": types.SimpleNamespace(random_word=types.SimpleNamespace(
                    _get_words_from_text_file=lambda name: [])),
                "tokenizer": types.SimpleNamespace(select_tokenizer=lambda *a: types.SimpleNamespace(
                    text_to_tokens=lambda text: [])),
                "manifest_utils": types.SimpleNamespace(write_manifest=None),
                "scipy": types.SimpleNamespace(),
                "scipy.special": types.SimpleNamespace(zeta=lambda alpha: math.pi ** 2 / 6),  # of 2.0, for fwe
                "nltk": types.SimpleNamespace(), "nltk.tokenize": types.SimpleNamespace(sent_tokenize=split_sentences)}
        before = {name: sys.modules.get(name) for name in stub}
        sys.modules.update(stub)
        (here / "json/PaulGrahamEssays.json").write_text(json.dumps({"text": haystack}))
        (here / "json/english_words.json").write_text("{}")
        from constants import TASKS
        base = TASKS[config["task"]]
        words = [f"--{k}={v}" for k, v in config["args"].items()]
        argv, sys.argv = sys.argv, ["x", "--save_dir=.", "--save_name=x", "--tokenizer_path=x", "--num_samples=1",
                                    f"--max_seq_length={tokens}", f"--tokens_to_generate={base['tokens_to_generate']}",
                                    f"--template={base['template'] + base['answer_prefix']}", *words]
        self.config, self.base, self.of = config["args"], base, {"__file__": str(here / "x.py"), "__name__": "ruler"}
        exec(compile((here / f"{config['task']}.py").read_text(), config["task"], "exec"), self.of)
        sys.argv = argv
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module

    def run(self, name, draws, *values, **named):
        self.of["random"] = draws
        result = self.of[name](*values, **named)
        draws.done()
        return result


def niah(generator, sample, tokens, haystack):
    arguments, context = generator.config, sample["context"]
    body = context.split("\n", 1)[1][:-1]
    found = NEEDLE.findall(body)
    asked = re.search(r" for (.*) mentioned", sample["questions"][0]).group(1).replace(", and ", ", ").split(", ")
    keys = asked + [k for k in dict.fromkeys(k for k, _ in found) if k not in asked]
    values = collections.defaultdict(list)
    n_needles = max(arguments["num_needle_k"], arguments["num_needle_q"]) * arguments["num_needle_v"]
    for key, value in found:
        values[key].append(value)
    if arguments["num_needle_v"] > 1:  # their order is that of the answer, not of the text
        values[asked[0]] = sample["gold"][0]
    draws, text = [], {(k, v): f"One of the special magic {arguments['type_needle_v']} for {k} is: {v}."
                       for k, v in found}
    others = []
    if arguments["type_haystack"] == "needle":
        lines = body.split("\n")
        others = [(k, v) for k, v in found if k != asked[0]]
        keys, shown = asked, [text[k, v] for k, v in found if k == asked[0]]
        places = [i - n for n, i in enumerate(i for i, line in enumerate(lines) if line in shown)]
        units, order = len(others), shown[::-1]
    elif arguments["type_haystack"] == "noise":
        lines = body.split("\n")
        shown = [line for line in lines if line != NOISE]
        places = [i - n for n, i in enumerate(i for i, line in enumerate(lines) if line != NOISE)]
        units, order = len(lines) - len(shown), shown[::-1]
    else:
        order = [text[pair] for pair in found]
        pieces = [""]
        rest = body
        for one in order:  # a piece, blank, needle, blank
            piece, rest = rest.split(one, 1)
            pieces[-1] += piece
            pieces.append("")
        pieces[-1] = rest
        words = [p.split() for p in pieces]
        units = sum(map(len, words))
        sentences = split_sentences(" ".join((haystack.split() * (units // len(haystack.split()) + 1))[:units]))
        places, at = [], 0
        for piece in words[:-1]:  # the sentences before each needle, and a depth that RULER may draw for it
            at += len(piece)
            n, total = 0, 0
            while total < at:
                total, n = total + len(sentences[n].split()), n + 1
            assert total == at, "a needle in the middle of a sentence"
            places.append(next(d for d in generator.of["DEPTHS"] if int(len(sentences) * (d / 100)) == n))
    for key in keys:
        draws += [key, *values[key]]
    draws += [word for pair in others for word in pair]
    assert len(order) == n_needles and len(keys) == n_needles // arguments["num_needle_v"]
    drawn = iter(draws)
    generator.of["generate_random"] = lambda kind: next(drawn)
    return generator.run("generate_input_output",
                         Draws([places, list(range(len(asked)))], [order]), units)


def variable_tracking(generator, sample, tokens, haystack):
    head = "Memorize and track the chain(s)"
    example, text = sample["context"].rsplit(head, 1)[0], head + sample["context"].rsplit(head, 1)[1]
    numbers = []
    generator.of["np"] = types.SimpleNamespace(random=types.SimpleNamespace(randint=lambda low, high: numbers.pop(0)))
    prompt = None
    for icl, body in ((True, example), (False, text)):
        lines = body.split("\n\n", 1)[1].split("\nQuestion")[0].rstrip("\n").split("\n")
        chain = [i for i, line in enumerate(lines) if line.startswith("VAR ")]
        names = [lines[i].split()[1] for i in chain]
        value = int(lines[chain[0]].split()[3])
        places = [i - n for n, i in enumerate(chain)]
        free = [c * 3 for c in "QXZJKWYPGH" if c * 3 not in body][:len(names)]
        numbers[:] = [value]
        assert 10000 <= value < 99999
        draws = Draws([places], choices=free if icl else names)
        made, answer = generator.run("generate_input_output", draws, len(lines) - len(chain), 1, len(names) - 1,
                                     is_icl=icl)
        if icl:  # as sys_vartrack_w_noise_random puts it in front
            numbers[:] = [value]
            shown = made + " " + " ".join(answer) + "\n"
            prompt = generator.run("randomize_icl", Draws(choices=names), shown) + "\n"
    return prompt + made, answer


def common_words_extraction(generator, sample, tokens, haystack):
    draws = Draws()
    example, text = sample["context"].split("Memorize the ones that appear most often.\n")[1:]
    shown = re.findall(r"\d+\. (\S+)", example.split("the list are:")[1])
    for body, gold in ((example, shown), (text, sample["gold"][0])):
        listed = re.findall(r"\d+\. (\S+)", body.split("\nQuestion")[0])
        words = gold + [w for w in dict.fromkeys(listed) if w not in gold]
        draws.samples.append(words)
        draws.shuffles.append(listed)
    generator.of["words"] = [w for drawn in draws.samples for w in drawn]
    return generator.run("generate_input_output", draws, len(draws.samples[1]))


def freq_words_extraction(generator, sample, tokens, haystack):
    listed = sample["context"].split("coded words. ", 1)[1].split()
    counts = collections.Counter(listed)
    gold = sample["gold"][0]
    longest = tokens - generator.base["tokens_to_generate"]
    rank = ["..."] + gold + sorted(set(counts) - set(gold) - {"..."}, key=lambda w: -counts[w])
    unseen = (f"zzz{chr(97 + i // 676)}{chr(97 + i // 26 % 26)}{chr(97 + i % 26)}" for i in range(9999))
    vocabulary = ["qqqqqq"] + rank[1:] + [next(unseen) for _ in range(longest // 50 - len(rank))]
    least = int(counts["..."] * 1.6449)
    for units in range(max(least - 3, 1), least + 8):
        # Equal counts may have any order: take the sample's.
        try:
            return generator.run("generate_input_output", Draws(shuffles=[vocabulary, listed, listed],
                                                                choices=vocabulary),
                                 longest, num_words=units, vocab_size=len(vocabulary))[:2]
        except AssertionError as wrong:
            if "another set" not in str(wrong):
                raise
    raise AssertionError("no number of words gives these counts")


def check_prompts(o, folder, work):
    haystack = pathlib.Path(o.haystack).read_text().strip()
    tasks = [t for t in yaml.safe_load((folder / "scripts/synthetic.yaml").read_text()) if not t.startswith("qa")]
    equal = 0
    for tokens in o.tokens:
        for task in tasks:
            out = work / "samples.jsonl"
            subprocess.run([o.kvbudget, "task", o.model, "-k", task, "-t", str(tokens), "-c", str(o.count),
                            "--haystack", o.haystack, "--output", out, "--quiet", "--force"], check=True)
            generator = Generator(folder, task, tokens, haystack)
            make = globals()[yaml.safe_load((folder / "scripts/synthetic.yaml").read_text())[task]["task"]]
            for line in out.read_text().splitlines():
                sample = json.loads(line)
                ours = sample["context"] + sample["questions"][0] + sample["answer_prefix"]
                theirs, gold = make(generator, sample, tokens, haystack)
                assert ours == theirs, (sample["sample_id"], ours, theirs)
                assert sample["gold"][0] == gold, (sample["sample_id"], sample["gold"], gold)
                equal += 1
            print(f"{task} {tokens}: {o.count} prompts and answers are the generator's", flush=True)
    return equal


def check_scores(o, kvpress, work):
    """Compares scores of answers with gold strings in any case, split by blanks or control characters, cut, missing."""
    space = {}
    source = (kvpress / "evaluation/benchmarks/ruler/calculate_metrics.py").read_text()
    exec(compile(source, "calculate_metrics", "exec"), space)
    dice = python_random.Random(1)
    cases = []
    for _ in range(2000):
        gold = ["".join(dice.choices("aAbB01", k=dice.randint(1, 4))) for _ in range(dice.randint(1, 5))]
        said = []
        for g in dice.sample(gold, dice.randint(0, len(gold))):
            g = dice.choice((g, g.upper(), g.lower(), g[:-1], g[:1] + dice.choice("\n\t\x01 .") + g[1:]))
            said += [g, dice.choice((" ", ", ", "\n", "\x1f", ".", "é"))]
        cases.append((gold, "".join(said)))
    given = work / "answers.jsonl"
    given.write_text("".join(json.dumps({"gold": g, "answer": a}) + "\n" for g, a in cases))
    ours = subprocess.run([o.scorer, given], check=True, text=True, capture_output=True).stdout.split()
    pandas = space["pd"]
    for i, (gold, answer) in enumerate(cases):
        frame = pandas.DataFrame({"predicted_answer": [answer], "answer": [gold], "task": ["niah_single_1"]})
        theirs = space["calculate_metrics"](frame)["niah_single_1"]["string_match"]
        assert round(100 * float(ours[i]), 2) == theirs, (gold, answer, ours[i], theirs)
    return len(cases)


def main():
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("ruler", "kvpress", "kvbudget", "model", "haystack"):
        words.add_argument(name)
    words.add_argument("--scorer", default="build/tests/task_score")
    words.add_argument("--count", type=int, default=10)
    words.add_argument("--tokens", type=int, nargs="+", default=[1000, 4096, 8000])
    o = words.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        work = pathlib.Path(folder)
        shutil.copytree(o.ruler, work / "ruler")
        print(f"{check_prompts(o, work / 'ruler', work)} prompts are byte for byte RULER's")
        print(f"{check_scores(o, pathlib.Path(o.kvpress), work)} scores are kvpress's")


if __name__ == "__main__":
    main()
