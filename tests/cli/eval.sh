#!/usr/bin/env bash
# kvbudget eval on the tiny model: what it prints and writes, how it resumes after a stop, and what it refuses.
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
tiny_record --metric snapkv:kvpress:window=16
"$KVB_BUILD/tests/tiny_model" --seed 7 other.gguf >/dev/null
for m in keydiff snapkv; do expect 0 "solve $m" solve run.h5 --metric $m -o $m.safetensors --paper --quiet; done
tiny_texts 2 60
EVAL=(eval tiny.gguf --tokens 160 --next 12)

# ---- results
expect 0 'eval' "${EVAL[@]}" keydiff.safetensors snapkv.safetensors text0.txt text1.txt -r 0,0.5,0.8 -a uniform -a ada \
    -a oracle -o worth
says 'a block for keydiff' '^keydiff, 4 sinks and 1 last tokens stay'
says 'a block for snapkv with the table'"'"'s window' '^snapkv:kvpress:window=16, 4 sinks and 16 last'
says 'the table is called lukv' '^ +80 %  lukv '
says 'runs per second' 'runs in .* a second' err
exists 'CSV' worth.csv
json 'JSON: every metric, allocator and ratio' worth.json \
    '(len(j["rows"]) == 2 * 4 * 3 and j["schema"] == "kvbudget-results" and j["command"] == "eval" and
    all(len(d["texts"]) == 2 for d in j["details"]))'
json 'ratio 0 is the full cache to the bit' worth.json \
    'all(r["kl"] == r["kl_low"] == r["kl_high"] == 0 and r["top1"] == 1
    and abs(r["nll"] - r["full_nll"]) < 1e-12
    for r in j["rows"] if r["ratio"] == 0)'
json 'what is evicted costs something, and two texts are too few for intervals' worth.json 'all(r["kl_low"] is None
    and r["kl"] > 0 and 0 < r["loss"] < 1 for r in j["rows"] if r["ratio"] > 0)'
json 'the cache is as small as promised' worth.json 'all(abs(r["effective_ratio"] - r["ratio"]) < 0.02 and
    r["cache_bytes"] == round((1 - r["effective_ratio"]) * 160 * 4) * 2 * 16 * 4 for r in j["rows"])'
json 'no method loses less than the oracle' worth.json \
    'all(o["loss"] <= r["loss"] + 1e-9 for o in j["rows"] for r in j["rows"]
    if o["allocator"] == "oracle" and all(o[k] == r[k] for k in ("metric", "ratio"))
    and r["effective_ratio"] > o["effective_ratio"] - 1e-3)'
check 'the picture has a chart of KL and one of agreement for each metric' charts worth.svg 4
cp worth.json first.json
json 'all rows and what they are compared with' worth.json 'len(j["rows"]) == 24 and "kl_to_ada" in j["rows"][0]'

# ---- a table that is made to lose: one layer keeps everything, so that the other loses all of it
for k in 2 3 4; do sed "s/says/tells $k/" text1.txt >"text$k.txt"; done
expect 0 'solve with a layer pinned' solve run.h5 --metric keydiff --pin 1 --ratios 0.1,0.3 -o loses.safetensors
expect 0 'eval of it' "${EVAL[@]}" loses.safetensors text?.txt -r 0.1,0.3 -a uniform -q
says 'eval says in words that it loses' '^    It does not beat uniform budgets on these texts\.'
says 'and what to do' 'Profile texts of this kind and length and solve again, or prune less\.$'
expect 0 'eval of it on two texts' "${EVAL[@]}" loses.safetensors text0.txt text1.txt -r 0.1 -a uniform -q
says 'two texts do not tell' 'on these texts, or too few were judged to tell\.'

# ---- a table in nats: the predicted KL beside the measured one
expect 0 'profile with curves' profile tiny.gguf calib.jsonl -o nats.h5 --quiet --curves --new-tokens 8 --ignore-eos \
    --metric keydiff
expect 0 'solve in nats' solve nats.h5 --metric keydiff --loss output -o nats.safetensors --quiet
expect 0 'eval in nats' "${EVAL[@]}" nats.safetensors text0.txt text1.txt -r 0.5,0.8 -a uniform -o nats -q
expect 0 'report in nats' report nats.safetensors --results nats.json -o nats.html
holds 'the page has both' "$PYTHON" - <<'PYTHON_END'
import json, re
page = open("nats.html").read()
part = page[page.index('id="predicted"'):].split("</section>")[0]
cells = [re.findall(r"<td>([^<]*)", row) for row in part.split("<tr>")[2:]]
kl = [r["kl"] for r in json.load(open("nats.json"))["rows"] if r["allocator"] == "kvbudget-output"]
assert len(cells) == 2 and [float(c[1]) for c in cells] == [float(f"{x:.3g}") for x in kl], (cells, kl)
assert all(float(c[0]) > 0 for c in cells)
PYTHON_END

# ---- resuming
cp worth.cells all
head -n 20 all >worth.cells
printf '{"key": "cut sho' >>worth.cells
expect 0 'the same command after a kill' "${EVAL[@]}" keydiff.safetensors snapkv.safetensors text0.txt text1.txt \
    -r 0,0.5,0.8 -a uniform -a ada -a oracle -o worth
says 'takes what it had' '; 20 more from worth.cells' err
holds 'and measures the rest once' [ "$(wc -l <worth.cells)" = 48 ]
holds 'with the same numbers' "$PYTHON" - <<'PYTHON_END'
import json
a, b = (json.load(open(n))["rows"] for n in ("first.json", "worth.json"))
assert len(a) == len(b) and all(abs(x["kl"] - y["kl"]) < 1e-12 and abs(x["loss"] - y["loss"]) < 1e-12
    for x, y in zip(a, b))
assert [r["cache_allocated"] for r in a] == [r["cache_allocated"] for r in b] # computed, without malloc's rounding
PYTHON_END
# A table whose name has an equals sign, and one with a label.
cp keydiff.safetensors lambda=0.1.safetensors
expect 0 'a name with an equals sign' "${EVAL[@]}" lambda=0.1.safetensors other=keydiff.safetensors text0.txt -r 0.8 \
    -a none -q
says 'is no label where the file is there' '^ +80 %  lukv '
says 'and a label is one' '^ +80 %  other '
expect 0 'one run' "${EVAL[@]}" text0.txt -m keydiff -a uniform -r 0.8 --json --quiet
cp out bare.json
expect 0 'other batches and threads' "${EVAL[@]}" text0.txt -m keydiff -a uniform -r 0.8 --json --quiet --batch 1 \
    --threads 1
holds 'change no number' "$PYTHON" - <<'PYTHON_END'
import json
a, b = (json.load(open(n))["rows"] for n in ("bare.json", "out"))
assert [r["kl"] for r in a] == [r["kl"] for r in b]
PYTHON_END
expect 0 'the table without the gap' solve run.h5 --metric keydiff -o nogap.safetensors --paper --order oracle --quiet
expect 0 'beside the table with it' "${EVAL[@]}" keydiff.safetensors nogap.safetensors text0.txt -r 0.8
says 'is called no_gap' '^ +80 %  lukv-no_gap '
says 'and the other is not' '^ +80 %  lukv '

expect 0 'budgets by attention' "${EVAL[@]}" text0.txt -m keydiff -a lava -a cake:tau2=0.4 -r 0.5 --json -q
json 'spend what the ratio allows, each in its own way' out \
    'len({r["kl"] for r in j["rows"]}) == 2 and all(abs(r["effective_ratio"] - 0.5) < 0.01 for r in j["rows"])'

# ---- kept positions
expect 0 'kept positions' "${EVAL[@]}" keydiff.safetensors text0.txt -r 0.5 -a none --dump-kept kept.jsonl -o kept \
    --quiet
cp kept.jsonl first.jsonl
expect 0 'and again' "${EVAL[@]}" keydiff.safetensors text0.txt -r 0.5 -a none --dump-kept kept.jsonl -o kept -q
same 'the same list, whatever the log has' first.jsonl kept.jsonl
exists 'what was measured stays for the next run' kept.cells
holds 'are whole, ascending and protected' "$PYTHON" - <<'PYTHON_END'
import json
(run,) = [json.loads(x) for x in open("kept.jsonl")]
assert len(run["ids"]) == 172 and len(run["kept"]) == 4 and run["allocator"] == "lukv" and run["kl"] > 0
for p in run["kept"]:
    assert p == sorted(set(p)) and p[:4] == [0, 1, 2, 3] and p[-1] == 159
assert abs(sum(map(len, run["kept"])) - 320) <= 4
PYTHON_END

# ---- policies
expect 0 'policies, with and without a table' "${EVAL[@]}" keydiff.safetensors text0.txt text1.txt -p full \
    -p morphkv:window=8 -p quest -a uniform -a ada -r 0.8 -o steps
says 'a block for each' '^morphkv:window=8, at every step'
json 'each with uniform capacities and with the table, and nothing that needs scores' steps.json \
    '([(r["metric"], r["allocator"]) for r in j["rows"] if r["acts"] == "every step"] ==
    [(p, a) for p in ("full", "morphkv:window=8", "quest") for a in ("uniform", "lukv")])'
json 'the full cache loses nothing; others do; only those that evict have evicted' steps.json \
    'all((r["kl"] < 1e-9) == (r["metric"] == "full") and
    (r["loss"] > 0) == r["metric"].startswith("morph")
    and (r["metric"] == "full") == (r["looked"] > 0.9)
    for r in j["rows"] if r["acts"] == "every step")'
check 'and a row of charts' charts steps.svg 8
expect 0 'another precision' "${EVAL[@]}" text0.txt -m keydiff -a uniform -r 0.8 --json --quiet --compute bf16x3
holds 'says so, and finds nearly the same' "$PYTHON" - <<'PYTHON_END'
import json
a, b = (json.load(open(n)) for n in ("bare.json", "out"))
x, y = a["rows"][0]["kl"], b["rows"][0]["kl"]
assert (a["settings"]["compute"], b["settings"]["compute"]) == ("f32", "bf16x3") and abs(x - y) < 1e-2 * x, (x, y)
assert (x == y) == ("bf16x3 is no faster than f32" in open("err").read()), (x, y)
PYTHON_END

expect 0 'a table that may not cut into the window' "${EVAL[@]}" snapkv.safetensors snapkv.safetensors:strict \
    text0.txt -r 0.85 -a none --dump-kept strict.jsonl --quiet
says 'has a name of its own' '^ +85 %  lukv-strict '
holds 'and keeps the window in every head, which the plain one does not' "$PYTHON" - <<'PYTHON_END'
import json
plain, strict = [json.loads(x)["kept"] for x in open("strict.jsonl")]
whole = set(range(4)) | set(range(144, 160))
assert all(whole <= set(p) for p in strict) and not all(whole <= set(p) for p in plain)
assert abs(sum(map(len, strict)) - sum(map(len, plain))) <= 4
PYTHON_END

# ---- names
expect 0 "solve's default" solve run.h5 --metric keydiff -o usual.safetensors --quiet
expect 0 'and its neighbour' solve run.h5 --metric keydiff --shrink 0.25 -o pulled.safetensors --quiet
expect 0 'beside the published way, a ratio in per cent' "${EVAL[@]}" usual.safetensors pulled.safetensors \
    keydiff.safetensors text0.txt -r 50%,0.8 -a none --quiet
says 'is called kvbudget' '^ +50 %  kvbudget '
says 'others after what differs' '^ +80 %  lukv-mean_loss-shrink0.25 '
# ---- metrics whose ranking depends on the budget
expect 0 'profile the second stage' profile tiny.gguf calib.jsonl -o two.h5 --quiet --new-tokens 8 --ignore-eos \
    --metric critical:share=0:epsilon=0.1+snapkv:kvpress:window=16
expect 0 'solve it' solve two.h5 --metric critical -o critical.safetensors --quiet
expect 0 'deploy both stages' "${EVAL[@]}" critical.safetensors text0.txt \
    -m critical:epsilon=0.1+snapkv:kvpress:window=16 -m critical:share=0:epsilon=0.1+snapkv:kvpress:window=16 \
    -m h2o:half -r 0.5 -a uniform --json --quiet
json 'each with its own kept tokens' out '(len({r["kl"] for r in j["rows"] if r["allocator"] == "uniform"}) == 3 and
    [r["metric"] for r in j["rows"] if r["allocator"] != "uniform"] == [
        "critical:epsilon=0.1+snapkv:kvpress:window=16", "critical:share=0:epsilon=0.1+snapkv:kvpress:window=16"])'

# ---- what is refused
fails 'a table of another model' 'not a table of this model' eval other.gguf keydiff.safetensors text0.txt --tokens 160
fails 'a table of another metric' 'for metric keydiff, which --metric leaves out' "${EVAL[@]}" keydiff.safetensors \
    text0.txt -m snapkv:kvpress:window=16
fails 'a text that is too short' 'text0.txt: [0-9]+ tokens, expected at least 4000' eval tiny.gguf text0.txt \
    --tokens 4000
fails 'a text twice' 'a text counts once' eval tiny.gguf text0.txt text0.txt --tokens 160
fails 'a record in the place of a table' 'run.h5: byte [0-9]+ is 0, expected text, found a record' \
    eval tiny.gguf run.h5 --tokens 160
printf 'caf\351' >latin.txt
fails 'a text of another encoding' 'latin.txt: byte 3 is 0xe9, expected UTF-8' eval tiny.gguf latin.txt --tokens 160
fails 'no such text' 'nothing.txt' eval tiny.gguf nothing.txt --tokens 160
fails 'no such table' 'nothing.safetensors' eval tiny.gguf nothing.safetensors text0.txt --tokens 160
misused 'a ratio of 1' 'below 1' eval tiny.gguf text0.txt -r 0.5,1
misused 'a ratio twice' 'given twice' eval tiny.gguf text0.txt -r 0.5,0.5
misused 'no text' 'no text is given' eval tiny.gguf keydiff.safetensors
misused 'an unknown backend' "there is no 'gpu9'" eval tiny.gguf text0.txt --backend gpu9
fails 'two tables of one name' 'give tables names' "${EVAL[@]}" keydiff.safetensors keydiff.safetensors text0.txt
# ---- refitted caches have cells of their own, so that one log holds both
expect 0 'eval without --refit' "${EVAL[@]}" keydiff.safetensors text0.txt -r 0,0.8 -a uniform -o bare -q
cp bare.cells refitted.cells
expect 0 'eval --refit goes on from a log of bare caches' "${EVAL[@]}" keydiff.safetensors text0.txt -r 0,0.8 \
    -a uniform --refit -o refitted
says 'and measures all runs again' '^4 runs in .*; refitting ' err
json 'the CSV and the JSON tell refitted from bare' refitted.json 'all(r["refit"] > 0 for r in j["rows"])'
json 'and bare from refitted' bare.json 'all(r["refit"] == 0 for r in j["rows"])'
holds 'what is cut changes, and what is whole does not' "$PYTHON" - <<'EOP'
import json
bare, refitted = (json.load(open(f"{name}.json"))["rows"] for name in ("bare", "refitted"))
for a, b in zip(bare, refitted):
    assert a["cache_bytes"] == b["cache_bytes"] and a["loss"] == b["loss"], (a, b)
    assert (a["kl"] == b["kl"]) == (a["ratio"] == 0), (a, b)
EOP
misused 'policies are not refitted' 'policies evict at every step' "${EVAL[@]}" text0.txt -p tova --refit
end
