"""Independent readers of kvbudget's files for the command-line tests. They use only the standard library, so that they
run anywhere.

Each subcommand prints what it found wrong and exits 1, or exits 0.
"""
import hashlib
import json
import math
import os
import random
import re
import struct
import subprocess
import sys
import xml.dom.minidom


def table(path):
    """Returns a safetensors file as (metadata, {name: (dtype, shape, list of numbers)})."""
    data = open(path, "rb").read()
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    metadata = header.pop("__metadata__")
    tensors = {}
    for name, t in header.items():
        first, end = t["data_offsets"]
        code = {"F64": "d", "U8": "B"}[t["dtype"]]
        count = (end - first) // struct.calcsize("<" + code)
        tensors[name] = (t["dtype"], t["shape"],
                         list(struct.unpack_from("<%d%s" % (count, code), data, 8 + size + first)))
    return metadata, tensors


def npy(path):
    """Returns a version 1 .npy file as (descr, shape, list of numbers)."""
    data = open(path, "rb").read()
    assert data[:8] == b"\x93NUMPY\x01\x00", "not .npy version 1"
    (size,) = struct.unpack("<H", data[8:10])
    header = eval(data[10 : 10 + size], {"__builtins__": {}})  # a dictionary of literals by definition of the format
    assert (10 + size) % 64 == 0 and not header["fortran_order"]
    code = {"<f8": "d", "<f4": "f", "<i8": "q", "<i4": "i"}[header["descr"]]
    count = 1
    for n in header["shape"]:
        count *= n
    assert len(data) == 10 + size + count * struct.calcsize("<" + code), "length"
    return header["descr"], header["shape"], list(struct.unpack_from("<%d%s" % (count, code), data, 10 + size))


def check_table(path, n_layers, n_heads, metric):
    """Shapes and metadata are right, and so are the invariants of the method that need no second solver."""
    metadata, t = table(path)
    L, G = int(n_layers), int(n_heads)
    assert metadata["format"] == "kvbudget-table" and metadata["metric"] == metric, metadata
    assert [t[k][1] for k in ("prune_ratio", "std")] == [[99, L, G]] * 2
    for k in ("ratio", "loss", "lower_bound", "lambda", "table_loss", "effective_ratio", "saturated"):
        assert t[k][1] == [99], (k, t[k][1])
    r = t["prune_ratio"][2]
    rows = [r[i * L * G : (i + 1) * L * G] for i in range(99)]
    # Targets are whole tokens, so a row's mean is off by at most half a token over the heads that share a target, in
    # the shortest context.
    heads = G if metadata["scope"] == "layer" else L * G
    slack = 0.5 / (heads * min(int(x) for x in metadata["calibration_tokens"].split(","))) + 1e-12
    for i, row in enumerate(rows):
        ratio, mean = (i + 1) / 100, sum(row) / (L * G)
        assert abs(t["ratio"][2][i] - ratio) < 1e-12
        assert abs(t["effective_ratio"][2][i] - mean) < 1e-9, (i, t["effective_ratio"][2][i], mean)
        assert t["saturated"][2][i] or abs(mean - ratio) <= slack, (i, mean)
        assert t["lower_bound"][2][i] <= t["loss"][2][i] + 1e-12, i
        assert all(0 <= x <= 1 for x in row), i
        # nested
        if i and metadata.get("solver") != "exact" and (metadata["aggregate"] == "mean_ratio" or "solver" in metadata):
            assert all(a <= b + 1e-12 for a, b in zip(rows[i - 1], row)), i


def check_heads_differ(path):
    """At 80 % some head keeps more than twice and some less than half of what uniform budgets give; otherwise the tests
    would judge next to nothing."""
    kept = [1 - r for r in table(path)[1]["prune_ratio"][2]]
    row = kept[79 * len(kept) // 99 : 80 * len(kept) // 99]
    assert max(row) > 0.4 and min(row) < 0.1, (min(row), max(row))


def check_close_npy(a, b, tolerance):
    x, y = npy(a), npy(b)
    assert x[:2] == y[:2], (x[:2], y[:2])
    worst = max(abs(p - q) for p, q in zip(x[2], y[2]))
    assert worst <= float(tolerance), worst


def check_npy_is_table(npy_path, table_path):
    descr, shape, values = npy(npy_path)
    _, t = table(table_path)
    assert descr == "<f8" and list(shape) == t["prune_ratio"][1], (descr, shape)
    assert values == t["prune_ratio"][2], "values differ"


def check_same_budgets(a, b):
    x, y = table(a)[1], table(b)[1]
    for k in ("prune_ratio", "loss", "lower_bound", "saturated"):
        assert x[k] == y[k], k


def check_maps(path, panels, heads):
    """The head maps of a report: well-formed, one cell per panel and head, and no number outside 0 to 100 %."""
    cells = 0
    for svg in re.findall("<svg.*?</svg>", open(path).read(), re.S):
        if "KV head" not in svg: continue
        document = xml.dom.minidom.parseString(svg)
        cells += sum(e.hasAttribute("fill") for e in document.getElementsByTagName("rect"))
        for e in document.getElementsByTagName("text"):
            if e.getAttribute("class").startswith("n"): assert 0 <= float(e.firstChild.data) <= 100
    assert cells == int(panels) * int(heads), cells


def check_charts(path, charts):
    """Well-formed, that many plotted areas, and every line has points."""
    document = xml.dom.minidom.parse(path)
    areas = [e for e in document.getElementsByTagName("rect") if e.getAttribute("class") == "f"]
    assert len(areas) == int(charts), len(areas)
    lines = [e for e in document.getElementsByTagName("path") if e.getElementsByTagName("title")]
    assert lines and all(e.getAttribute("d").startswith("M") for e in lines), [e.getAttribute("d")[:20] for e in lines]
    assert "nan" not in document.toxml() and "inf" not in document.toxml()


def check_metadata(path, key, value):
    """The table's metadata entry has this value; "None" if there is none."""
    assert str(table(path)[0].get(key)) == value, table(path)[0].get(key)


def check_damage(source, target, tensor, row):
    """Not a check: copies a table with one number of a [99] tensor changed so that it cannot be right, and with a hash
    that fits the changed content."""
    data = bytearray(open(source, "rb").read())
    (size,) = struct.unpack("<Q", data[:8])
    first = 8 + size + json.loads(data[8 : 8 + size])[tensor]["data_offsets"][0] + 8 * int(row)
    (value,) = struct.unpack_from("<d", data, first)
    if tensor == "formats":  # all of two layers of two heads in 16 bits
        data[first : first + 8] = bytes(8)
    else:
        struct.pack_into("<d", data, first, value * 0.5 if tensor == "loss" else value * 1.000001 + 1e-6)
    said = json.loads(data[8 : 8 + size])["__metadata__"]["content_sha256"].encode()
    zeros = data.replace(said, b"0" * 64)
    open(target, "wb").write(data.replace(said, hashlib.sha256(zeros).hexdigest().encode()))


def check_flips(program, source):
    """None of 300 random flipped bits changes exported ratios: the copy is refused, or its ratios are the same."""
    whole, rng = open(source, "rb").read(), random.Random(7)
    subprocess.run([program, "export", source, "-o", "whole.npy"], check=True)
    ratios = open("whole.npy", "rb").read()
    for _ in range(300):
        data = bytearray(whole)
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        open("flipped.safetensors", "wb").write(data)
        command = [program, "export", "flipped.safetensors", "-o", "flipped.npy"]
        run = subprocess.run(command, capture_output=True)
        refused = run.returncode == 1 and b"flipped.safetensors: " in run.stderr
        assert refused or open("flipped.npy", "rb").read() == ratios


def check_budgets_add_up(path, expected_total):
    """`budgets --json`: every list of counts in it adds up to the total that it reports."""
    j = json.load(open(path, encoding="utf-8"))
    keep = j["details"][0]["keep"]
    total = sum(sum(row) for row in keep)
    assert total == j["settings"]["total"], (total, j["settings"])
    assert sum(keep, []) == [r["kept"] for r in j["rows"]], "rows"
    assert expected_total == "-" or total == int(expected_total), total


def check_exports():
    """The files that exports.sh has written hold the budgets of budgets.json, in every format."""
    found = json.load(open("budgets.json"))
    b, keep = found["settings"], found["details"][0]["keep"]
    T = b["n_tokens"]
    flat, L, G = [k for layer in keep for k in layer], b["n_layers"], b["n_kv_heads"]
    assert npy("arrays/lengths.npy") == ("<i4", (L, G), flat)
    ends = [sum(layer[:g]) for layer in keep for g in range(G + 1)]
    assert npy("arrays/cu_seqlens.npy") == ("<i4", (L, G + 1), ends)
    layers = json.load(open("layers.json"))
    means = [sum(layer) / G for layer in keep]
    assert all(abs(n - mean) < 1 for n, mean in zip(layers["tokens"], means)), (layers["tokens"], means)
    assert sum(layers["tokens"]) == round(sum(means)) and layers["sink"] == b["sink"]
    assert abs(layers["effective_ratio"] - (1 - sum(layers["tokens"]) / L / T)) < 1e-12
    assert [int(T * (1 - r)) for r in layers["compression_ratios"]] == layers["tokens"]
    shares = [[float(x) for x in line.split("\t")] for line in open("duo/full_attention_heads.tsv")]
    assert all(abs(s - k / T) < 1e-8 for row, layer in zip(shares, keep) for s, k in zip(row, layer))
    few = [k for k in flat if 2 * k < T]
    config = json.load(open("duo/config.json"))
    assert abs(config["head_compression_ratio"] - len(few) / len(flat)) < 1e-12 and config["sink_size"] == b["sink"]
    assert config["recent_size"] == max(b["window"], 1, round(sum(few) / len(few)) - b["sink"])
    shares = json.load(open("shares.json"))
    assert list(shares) == ["L%dH%d" % (i // G, i % G) for i in range(L * G)] and abs(sum(shares.values()) - 1) < 1e-11
    assert [int(share * sum(flat)) for share in shares.values()] == flat


def write_curves(path, loss, kept, shape, **metadata):
    """Writes a file for `import`: loss [contexts, layers, KV heads, budgets], kept [budgets]."""
    header, data = {"__metadata__": {k: str(v) for k, v in metadata.items()}}, b""
    for name, numbers, shape in ("loss", loss, [*shape, len(kept)]), ("kept", kept, [len(kept)]):
        more = struct.pack("<%dd" % len(numbers), *numbers)
        header[name] = {"dtype": "F64", "shape": shape, "data_offsets": [len(data), len(data) + len(more)]}
        data += more
    text = json.dumps(header).encode()
    open(path, "wb").write(struct.pack("<Q", len(text)) + text + data)


def check_curves_by_hand():
    """Writes curves of two heads with 100 tokens: keeping 0, 50, 100, the first loses 10, 2, 0, the second 5, 1, 0."""
    write_curves("hand.safetensors", [10, 2, 0, 5, 1, 0], [0, 50, 100], [1, 1, 2], method="mine", n_tokens=100)
    write_curves("rises.safetensors", [10, 2, 0, 5, 6, 0], [0, 50, 100], [1, 1, 2], method="mine", n_tokens=100)


def check_optimum_by_hand(path):
    """Each of the first head's first 50 tokens is worth 0.16, of the second's 0.08; then 0.04 and 0.02 each."""
    t = table(path)[1]
    for percent, first, second in (50, 50, 50), (75, 49, 1), (40, 70, 50), (20, 100, 60), (90, 19, 1):
        lost = (10 - 0.16 * first if first < 50 else 4 - 0.04 * first) + (5 - 0.08 * second if second < 50
                                                                          else 2 - 0.02 * second)
        row = percent - 1
        keep = [round(100 * (1 - x)) for x in t["prune_ratio"][2][2 * row : 2 * row + 2]]
        assert keep == [first, second], (percent, keep)
        for name in "loss", "lower_bound", "table_loss":
            assert abs(t[name][2][row] - lost / 15) < 1e-6, (percent, name, t[name][2][row], lost / 15)


def check_curves_of_record(context, metric, sink, window, out):
    """Writes a metric's loss at every count of kept tokens, from one context of `export --format lukv-steps`."""
    sink, window, loss, questions = int(sink), int(window), [], 0
    folder = "steps/context_%s/" % context
    (L, G, T), scores = npy(folder + metric + ".npy")[1:]
    while os.path.exists(folder + "question_%d.npy" % questions):
        oracle = npy(folder + "question_%d.npy" % questions)[2]
        for h in range(L * G):
            middle = range(h * T + sink, (h + 1) * T - window)
            curve = [0.0]
            for i in sorted(middle, key=lambda i: (scores[i], -i)):  # the worst token goes first
                curve.append(curve[-1] + oracle[i])
            loss += curve[::-1]
        questions += 1
    write_curves(out, loss, range(sink + window, T + 1), [questions, L, G], method="copied", n_tokens=T, sink=sink,
                 window=window)


def check_shares_to_curves(tokens):
    """Writes Attention Matching's shares p as losses p log(T / n), whose sum is least if n is proportional to p."""
    shares, T = json.load(open("shares.json")), int(tokens)
    L, G = (int(x) + 1 for x in list(shares)[-1][1:].split("H"))
    loss = [p * math.log(T / n) for p in shares.values() for n in range(1, T + 1)]
    write_curves("shares.safetensors", loss, range(1, T + 1), [1, L, G], method="shares", n_tokens=T)


def check_same_keep(a, b):
    a, b = (json.load(open(name))["details"][0]["keep"] for name in (a, b))
    assert a == b, (a, b)


def check_same_tensors(a, b):
    (_, x), (_, y) = table(a), table(b)
    assert x == y, [name for name in x if x[name] != y[name]]


if __name__ == "__main__":
    try:
        globals()["check_" + sys.argv[1]](*sys.argv[2:])
    except Exception as e:  # the message is the test's output
        print("%s %s: %s: %s" % (sys.argv[1], " ".join(sys.argv[2:]), type(e).__name__, e))
        sys.exit(1)
