"""The page and the picture of the board, from its CSV: tables between marks of docs/board.md, and docs/board.svg."""
import collections
import html
import math
import textwrap

from board_presses import LEFT_OUT, ROWS

RATIOS = [0.5, 0.75, 0.8, 0.875, 0.9375]
NAMES = {"smollm2-135m": "SmolLM2 135M", "gemma3-270m": "Gemma 3 270M", "qwen2.5-coder-0.5b": "Qwen2.5-Coder 0.5B",
         "qwen2.5-coder-1.5b": "Qwen2.5-Coder 1.5B"}
#: Student's t, two-sided 95 %, by degrees of freedom
T95 = [0, 12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131]
LEAST = 5  # observations for an interval
SPARE = 0.005  # a press that keeps more than its share by this much is not compared


def share(ratio):
    return f"{100 * ratio:g} %"


class Board:
    """Values by (model, measure), press and ratio: {text: value}."""

    def __init__(self, lines):
        self.values, self.lines = collections.defaultdict(dict), lines
        self.kept, self.notes = collections.defaultdict(list), {}
        for line in lines:
            key = line["model"], line["measure"], line["press"], float(line["ratio"])
            if line["value"]:
                self.values[key][line["text"]] = float(line["value"])
                self.kept[key].append(float(line["kept"]))
            else:
                self.notes[key] = line["note"]

    def texts(self, model, measure):
        """Returns the texts on which nearly all presses were measured; a press that lacks one of them has no mean."""
        seen = collections.Counter()
        keys = [k for k in self.values if k[:2] == (model, measure) and k[2] != "full"]
        for key in keys:
            seen.update(self.values[key].keys())
        most = max(seen.values(), default=0)
        return sorted(text for text, n in seen.items() if n >= 0.8 * most)

    def mean(self, model, measure, press, ratio, texts):
        found = self.values.get((model, measure, press, ratio), {})
        return sum(found[t] for t in texts) / len(texts) if texts and all(t in found for t in texts) else None

    def over(self, model, measure, press, ratio):
        """Returns how much more than the ratio allows a press keeps, as a share of the cache."""
        kept = self.kept.get((model, measure, press, ratio))
        return sum(kept) / len(kept) - (1 - ratio) if kept else 0.0

    def quotient(self, model, measure, ratio, above, below, texts):
        """Returns (mean KL of one divided by that of the other, low, high) over the same texts: Student's t with n - 2
        degrees on the logarithm and the jackknife's error, as in `kvbudget eval`. No interval below five texts."""
        a, b = ([self.values[model, measure, press, ratio][t] for t in texts] for press in (above, below))
        without = lambda values, out: sum(x for i, x in enumerate(values) if i != out)
        of = lambda out: math.log(without(a, out) / without(b, out))
        n, middle = len(texts), of(None)
        if n < LEAST:
            return math.exp(middle), None, None
        parts = [of(i) for i in range(n)]
        mean = sum(parts) / n
        error = math.sqrt((n - 1) / n * sum((p - mean) ** 2 for p in parts)) * T95[min(n - 2, len(T95) - 1)]
        return math.exp(middle), math.exp(middle - error), math.exp(middle + error)


def fair(board, model, measure, press, ratio, texts):
    return (board.mean(model, measure, press, ratio, texts) is not None
            and board.over(model, measure, press, ratio) < SPARE)


def models_of(board, measure):
    return [m for m in NAMES if any(k[0] == m and k[1] == measure for k in board.values)]


def tables(board):
    for model in models_of(board, "kl"):
        texts = board.texts(model, "kl")
        yield f"\n### {NAMES[model]}\n"
        yield f"Mean KL in nats per token, {len(texts)} text{'s' * (len(texts) > 1)}.\n"
        yield "| press | prefills | " + " | ".join(map(share, RATIOS)) + " | processor seconds | cache at 80 % |"
        yield "|---|---:|" + "---:|" * (len(RATIOS) + 2)
        mean = lambda row, ratio: board.mean(model, "kl", row.name, ratio, texts)
        once = [row for row in ROWS if row.prefills == 1]
        best = {r: min((mean(row, r) for row in once if fair(board, model, "kl", row.name, r, texts)), default=None)
                for r in RATIOS}
        rows = [row for row in ROWS if any(mean(row, r) is not None for r in RATIOS)]
        own = [x for x in board.lines if x["model"] == model and x["measure"] == "kl" and x["value"]]
        for row in sorted(rows, key=lambda row: (mean(row, 0.8) is None, mean(row, 0.8) or 0)):
            cells = []
            for r in RATIOS:
                value = mean(row, r)
                if value is None:
                    cells.append("")
                    continue
                text = f"{value:.5f}" if value < 1e-4 else f"{value:.2g}" if value < 0.01 else f"{value:.3g}"
                if not fair(board, model, "kl", row.name, r, texts):
                    text = f"({text})"
                elif value == best[r] and row.prefills == 1:
                    text = f"**{text}**"
                cells.append(text)
            lines = [x for x in own if x["press"] == row.name and x["ratio"] == "0.8"]
            seconds = sum(float(x["seconds"]) for x in lines) / max(len(lines), 1)
            held = sum(float(x["held"]) / float(x["full"]) for x in lines) / max(len(lines), 1)
            name = f"**{row.name}**" if row.ours else row.name
            cells += [f"{seconds:.2f}" if lines else "", f"{100 * held:.0f} %" if lines else ""]
            yield f"| {name} | {row.prefills} | " + " | ".join(cells) + " |"
        prefill = [float(x["prefill"]) for x in own]
        yield f"\nThe prefill takes {sum(prefill) / len(prefill):.1f} processor seconds."


def tasks(board):
    measures = sorted({k[1] for k in board.values} - {"kl"})
    for measure in measures:
        for model in models_of(board, measure):
            texts = board.texts(model, measure)
            full = board.mean(model, measure, "full", 0.0, texts)
            if full is None:  # begun, but no sample is complete
                continue
            yield f"\n### {measure}, {NAMES[model]}\n"
            yield f"Score of 100, {len(texts)} sample{'s' * (len(texts) > 1)}; the full cache has {full:.0f}.\n"
            yield "| press | prefills | " + " | ".join(map(share, RATIOS)) + " |"
            yield "|---|---:|" + "---:|" * len(RATIOS)
            mean = lambda row, ratio: board.mean(model, measure, row.name, ratio, texts)
            rows = [row for row in ROWS if any(mean(row, r) is not None for r in RATIOS)]
            for row in sorted(rows, key=lambda row: -sum(mean(row, r) or 0 for r in RATIOS)):
                cells = ["" if mean(row, r) is None else f"{mean(row, r):.0f}" for r in RATIOS]
                yield f"| {'**' * row.ours}{row.name}{'**' * row.ours} | {row.prefills} | " + " | ".join(cells) + " |"


def behind(board):
    """Yields a table of the cases in which a press with one prefill, or KVzip, is ahead of kvbudget's best row."""
    ours = [row.name for row in ROWS if row.ours]
    yield "| model | pruned | ahead | its KL by kvbudget's, 95 % interval | texts |"
    yield "|---|---:|---|---|---:|"
    for model in models_of(board, "kl"):
        texts = board.texts(model, "kl")
        for ratio in RATIOS:
            mine = [p for p in ours if fair(board, model, "kl", p, ratio, texts)]
            if not mine:
                continue
            best = min(mine, key=lambda p: board.mean(model, "kl", p, ratio, texts))
            found = compared = 0
            for row in ROWS:
                if row.ours or not fair(board, model, "kl", row.name, ratio, texts):
                    continue
                middle, low, high = board.quotient(model, "kl", ratio, row.name, best, texts)
                compared += 1
                if middle >= 1:
                    continue
                found += 1
                interval = "no interval below five texts" if low is None else f"{low:.2f} .. {high:.2f}"
                sure = high is not None and high < 1
                name = row.name + (" (two prefills)" if row.prefills == 2 else "")
                name = f"**{name}**" if sure else name
                yield f"| {NAMES[model]} | {share(ratio)} | {name} | {middle:.2f}, {interval} | {len(texts)} |"
            if not found:
                yield f"| {NAMES[model]} | {share(ratio)} | none of {compared} presses | | {len(texts)} |"


def nearest(board):
    """Yields a table by model and ratio: the best press with one prefill, compared with kvbudget and KVzip."""
    yield "| model | pruned | first with one prefill | kvbudget's best row by it | KVzip by kvbudget's |"
    yield "|---|---:|---|---|---|"
    ours = [row.name for row in ROWS if row.ours]
    say = lambda q: f"{q[0]:.2f}" + ("" if q[1] is None else f" ({q[1]:.2f} .. {q[2]:.2f})")
    for model in models_of(board, "kl"):
        texts = board.texts(model, "kl")
        for ratio in RATIOS:
            mean = lambda name: board.mean(model, "kl", name, ratio, texts)
            once = [row.name for row in ROWS if row.prefills == 1 and fair(board, model, "kl", row.name, ratio, texts)]
            mine = [p for p in ours if p in once]
            if not mine:
                continue
            first, best = min(once, key=mean), min(mine, key=mean)
            by = say(board.quotient(model, "kl", ratio, best, first, texts)) if best != first else "first"
            zipped = ""
            if mean("KVzip") is not None:
                zipped = say(board.quotient(model, "kl", ratio, "KVzip", best, texts))
            yield f"| {NAMES[model]} | {share(ratio)} | {first} | {by} | {zipped} |"


def pooled(board, model, ratio):
    """Returns the scores of each press that has all answers of the model's tasks: {press: [score of each answer]}."""
    measures = {k[1] for k in board.values if k[0] == model} - {"kl"}
    asked = [(m, t) for m in sorted(measures) for t in board.texts(model, m)
             if t in board.values.get((model, m, "full", 0.0), {})]
    out = {}
    for row in ROWS:
        scores = [board.values.get((model, m, row.name, ratio), {}).get(t) for m, t in asked]
        if asked and None not in scores and all(board.over(model, m, row.name, ratio) < SPARE for m in measures):
            out[row.name] = scores
    return out


def ahead(scores, others):
    """Returns the mean difference of two presses' scores, with Student's interval over the answers from five on."""
    gaps = [x - y for x, y in zip(scores, others)]
    n, mean = len(gaps), sum(gaps) / len(gaps)
    if n < LEAST:
        return f"{mean:+.0f}"
    error = math.sqrt(sum((g - mean) ** 2 for g in gaps) / (n - 1) / n) * T95[min(n - 1, len(T95) - 1)]
    return f"{mean:+.0f} ({mean - error:+.0f} .. {mean + error:+.0f})"


def ruler(board):
    """Yields a table by model and ratio: all tasks together, kvbudget's best row beside the best others."""
    yield "| model | pruned | kvbudget's best | best other with one prefill | ahead by | KVzip | ahead by | answers |"
    yield "|---|---:|---|---|---:|---:|---:|---:|"
    ours, twice = {row.name for row in ROWS if row.ours}, {row.name for row in ROWS if row.prefills == 2}
    mean = lambda scores: sum(scores) / len(scores)
    for model in NAMES:
        for ratio in RATIOS:
            scores = pooled(board, model, ratio)
            best = lambda names: max(names, key=lambda name: mean(scores[name]))
            mine, others = [p for p in scores if p in ours], [p for p in scores if p not in ours | twice]
            if not mine or not others:
                continue
            first, other = best(mine), best(others)
            cells = [NAMES[model], share(ratio)] + [f"{name}: {mean(scores[name]):.0f}" for name in (first, other)]
            cells.append(ahead(scores[first], scores[other]))
            zipped = scores.get("KVzip")
            cells += [f"{mean(zipped):.0f}", ahead(scores[first], zipped)] if zipped else ["", ""]
            yield "| " + " | ".join([*cells, str(len(scores[first]))]) + " |"


def absent(board):
    found = collections.defaultdict(set)
    for (model, measure, press, ratio), note in board.notes.items():
        found[press, note].add((NAMES[model], ratio))
    for (press, note), where in sorted(found.items()):
        names = ", ".join(sorted({m for m, _ in where}))
        at = sorted({r for _, r in where})
        yield _item(f"{press} ({names}{'' if len(at) == len(RATIOS) else ', ' + ', '.join(map(share, at))}): {note}.")
    for names, why in LEFT_OUT.items():
        yield _item(f"{names}: {why}.")


def _item(text):
    return textwrap.fill(text, 120, initial_indent="- ", subsequent_indent="  ")


# ---- The picture -----------------------------------------------------------------------------------------------------

#: the presses that are drawn: colour and dash
DRAWN = {"kvbudget": ("#c0392b", ""), "kvbudget, refitted": ("#c0392b", "6 3"),
         "kvbudget, packed, refitted": ("#c0392b", "2 3"), "KVzip": ("#000000", ""),
         "KVzip+": ("#000000", "6 3"), "LUKV(SnapKV)": ("#2471a3", ""), "AdaKV(ExpectedAttention)": ("#7d3c98", ""),
         "AdaKV(SnapKV)": ("#2471a3", "6 3"), "Compactor": ("#b7950b", ""), "SnapKV": ("#2471a3", "2 3"),
         "KeyDiff": ("#1e8449", "")}


def picture(board):
    models = models_of(board, "kl")
    wide, high, left, top = 300, 240, 52, 30
    size = f'width="{left + (wide + 40) * len(models) + 190}" height="{high + 90}"'
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="11">',
           '<rect width="100%" height="100%" fill="white"/>']
    for i, model in enumerate(models):
        texts, x0 = board.texts(model, "kl"), left + i * (wide + 40)
        drawn = {p: [(r, board.mean(model, "kl", p, r, texts)) for r in RATIOS] for p in DRAWN}
        drawn = {p: [(r, v) for r, v in points if v] for p, points in drawn.items()}
        values = [v for points in drawn.values() for _, v in points]
        low, top_value = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
        x = lambda r: x0 + wide * RATIOS.index(r) / (len(RATIOS) - 1)
        y = lambda v: top + high * (top_value - math.log10(v)) / (top_value - low)
        out.append(f'<text x="{x0}" y="18" font-size="13">{html.escape(NAMES[model])}, {len(texts)} '
                   f'text{"s" * (len(texts) > 1)}</text>')
        for power in range(low, top_value + 1):
            at = y(10.0**power)
            out.append(f'<line x1="{x0}" x2="{x0 + wide}" y1="{at:.1f}" y2="{at:.1f}" stroke="#ddd"/>'
                       f'<text x="{x0 - 5}" y="{at + 4:.1f}" text-anchor="end">{10.0**power:g}</text>')
        for r in RATIOS:
            out.append(f'<text x="{x(r):.1f}" y="{top + high + 18}" text-anchor="middle">{share(r)}</text>')
        for press, points in drawn.items():
            colour, dash = DRAWN[press]
            if points:
                path = " ".join(f"{x(r):.1f},{y(v):.1f}" for r, v in points)
                out.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.6" '
                           f'stroke-dasharray="{dash}"/>')
    for k, (press, (colour, dash)) in enumerate(DRAWN.items()):
        x1, y1 = left + len(models) * (wide + 40), top + 10 + 18 * k
        out.append(f'<line x1="{x1}" x2="{x1 + 28}" y1="{y1}" y2="{y1}" stroke="{colour}" stroke-width="1.6" '
                   f'stroke-dasharray="{dash}"/><text x="{x1 + 34}" y="{y1 + 4}">{html.escape(press)}</text>')
    of = "KL to the full cache, nats per token, against the pruned share"
    out.append(f'<text x="{left}" y="{high + 78}">{of}</text>')
    return "\n".join([*out, "</svg>"]) + "\n"


def put(page, of, blocks):
    """Replaces what stands between the marks of a page: blocks (name, lines)."""
    text = page.read_text(encoding="utf-8")
    for name, rows in blocks:
        begin, end = f"[{of}: {name}]: #", "[end]: #"
        if begin not in text:
            continue
        head, rest = text.split(begin, 1)
        text = head + begin + "\n\n" + "\n".join(rows).strip("\n") + "\n\n" + end + rest.split(end, 1)[1]
    page.write_text(text, encoding="utf-8")


def write(lines, page, svg):
    board = Board(lines)
    if models_of(board, "kl"):
        made = (("behind", behind), ("nearest", nearest), ("kl", tables), ("ruler", ruler), ("tasks", tasks),
                ("absent", absent))
        put(page, "board", [(name, rows(board)) for name, rows in made])
        svg.write_text(picture(board), encoding="utf-8")
