#!/usr/bin/env bash
# Models with windows in some layers (Gemma 3, gpt-oss): learn, solve, profile, eval and all exports treat only the
# other layers; layers with a window keep everything.
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
"$PYTHON" - <<'PYTHON_END'
import json, random
letters = "abcdefghijklmnopqrstuvwxyzABCTWN0123456789.?:<>|_/"
vocab = {c: i for i, c in enumerate([*letters, "\u0120", "\u010a"])}
step = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
whole = {"normalizer": None, "pre_tokenizer": step, "added_tokens": [],
         "model": {"type": "BPE", "vocab": vocab, "merges": []}}
words = random.Random(1).choices(["Anna", "Bert", "box", "letter", "read", "in", "7", "twice."], k=90)
with open("tokenizer.json", "w", encoding="utf-8") as file:
    json.dump(whole, file)
with open("text.txt", "w", encoding="utf-8") as file:
    file.write(" ".join(words))
with open("calib.jsonl", "w", encoding="utf-8") as file:
    for i in range(3):
        text = " ".join(words[20 * i : 20 * i + 30])
        print(json.dumps({"sample_id": f"t{i}", "context": text, "questions": ["Who read?"]}), file=file)
PYTHON_END
for family in gemma3 gpt-oss; do
    model=$family
    cp -r "$KVB_ROOT/tests/golden/families/$family" .
    cp tokenizer.json "$model"
    expect 0 "$family: profile" profile "$model" calib.jsonl -o run.h5 --force --quiet --new-tokens 6 --ignore-eos \
        -m keydiff -m knorm
    expect 0 "$family: learn" learn run.h5 -o rank.safetensors
    says "$family: it says which layers have no part" \
        'layers with a sliding window \(0,2\) are not ranked: their caches do not grow'
    kvb inspect rank.safetensors
    says "$family: the ranking has all layers" 'n_layers: 4' out
    expect 0 "$family: solve" solve run.h5 --metric learned=rank.safetensors -o table.safetensors
    expect 0 "$family: the certificate holds" validate --certificate table.safetensors run.h5
    expect 0 "$family: profile by it" profile "$model" calib.jsonl -o scores.h5 --force --quiet --new-tokens 6 \
        --ignore-eos -m learned=rank.safetensors
    fails "$family: a table without its ranking" 'name the ranking' solve scores.h5 -m learned -o bare.safetensors
    expect 0 "$family: eval" eval "$model" table.safetensors text.txt --tokens 160 --next 12 -r 0.5 --json
    json "$family: it was evicted" out "all(row['kl'] > 0 for row in j['rows'])"
    expect 0 "$family: budgets" budgets table.safetensors --ratio 50% --tokens 100 --json
    json "$family: layers with a window keep all" out \
        "all((sum(h) == 100 * len(h)) == (layer in (0, 2)) for layer, h in enumerate(j['details'][0]['keep']))"
done

# ---- every format of `export`, of the last table
for format in npy varlen per-layer duo; do
    options=(-r 0.5 -t 100)
    [ $format = npy ] && options=()
    expect 0 "export $format" export table.safetensors --format "$format" "${options[@]}" -o "out.$format"
done
expect 0 'export lukv-steps' export run.h5 --format lukv-steps -o out.steps
holds 'every export leaves the layers with a window whole' "$PYTHON" - <<'PYTHON_END'
import json, struct, sys


def array(path):
    data = open(path, "rb").read()
    size = struct.unpack("<H", data[8:10])[0]
    header = eval(data[10 : 10 + size])
    kind = {"<f8": "d", "<f4": "f", "<i4": "i"}[header["descr"]]
    return header["shape"], [x[0] for x in struct.iter_unpack("<" + kind, data[10 + size :])]


def whole(layers, all_of):
    """Layers 0 and 2 keep all of it in each head, the others do not in some head."""
    return [min(heads) == all_of for heads in layers] == [True, False, True, False]


def cut(numbers, parts=4):
    return [numbers[i * len(numbers) // parts : (i + 1) * len(numbers) // parts] for i in range(parts)]


shape, prune = array("out.npy")
half = cut(prune, 99)[49]
lengths = array("out.varlen/lengths.npy")
per_layer = json.load(open("out.per-layer"))
shares = [float(x) for x in open("out.duo/full_attention_heads.tsv").read().split()]
steps = json.load(open("out.steps/kvbudget.json"))["attributes"]
good = {
    "npy": shape[:2] == (99, 4) and whole(cut([1 - p for p in half]), 1) and abs(sum(half) / len(half) - 0.25) < 0.01,
    "varlen": whole(cut(lengths[1]), 100) and sum(lengths[1]) == 100 * 3 * lengths[0][1],
    "per-layer": whole([[n] for n in per_layer["tokens"]], 100) and per_layer["compression_ratios"][::2] == [0, 0],
    "duo": whole(cut(shares), 1),
    "lukv-steps": steps["bounded_layers"] == "0,2",
}
sys.exit(", ".join(name for name, fine in good.items() if not fine) or 0)
PYTHON_END
end
