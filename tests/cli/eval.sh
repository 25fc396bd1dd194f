#!/usr/bin/env bash
# kvbudget eval on the tiny model: what is printed and written, going on after a stop, and what is refused.
# shellcheck source=tests/cli/lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
tiny_model tiny.gguf
"$KVB_BUILD/tests/tiny_model" --seed 7 other.gguf >/dev/null
tiny_calib calib.jsonl
expect 0 'profile' profile tiny.gguf calib.jsonl -o run.h5 --quiet --new-tokens 8 --ignore-eos --metric keydiff \
    --metric snapkv:kvpress:window=16
for m in keydiff snapkv; do expect 0 "solve $m" solve run.h5 --metric $m -o $m.safetensors --paper --quiet; done
"$PYTHON" -c '
for k in range(2):
    print("\n".join(f"line {i * (k + 3) % 101} of text {k} says {i * i % 97}"
    for i in range(60)), file=open(f"text{k}.txt", "w"))'
SIZE='--tokens 160 --next 12'
# holds NAME: the Python program on stdin ends without a complaint.
holds() {
    if "$PYTHON" - >holds.out 2>&1; then ok "$1"; else
        not_ok "$1"
        tail -n 3 holds.out | sed 's/^/    /'
    fi
}

# ---- results
# shellcheck disable=SC2086
expect 0 'eval' eval tiny.gguf keydiff.safetensors snapkv.safetensors text0.txt text1.txt $SIZE -r 0,0.5,0.8 \
    -a uniform -a ada -a oracle -o worth
says 'a block for keydiff' '^keydiff, 4 sinks and 1 last tokens stay'
says 'a block for snapkv with the table'"'"'s window' '^snapkv:kvpress:window=16, 4 sinks and 16 last'
says 'the table is called lukv' '^ +80 %  lukv '
says 'runs per second' 'runs in .* a second' err
exists 'CSV' worth.csv
json 'JSON: every metric, allocator and ratio' worth.json \
    '(len(j["rows"]) == 2 * 4 * 3 and j["schema"] == "kvbudget-results" and j["command"] == "eval" and
    all(len(d["texts"]) == 2 and len(d["layer_output_error"]) == 2 for d in j["details"]))'
json 'ratio 0 is the full cache to the bit' worth.json \
    'all(r["kl"] == r["kl_low"] == r["kl_high"] == 0 and r["top1"] == 1
    and r["output_error"] == 0 and abs(r["nll"] - r["full_nll"]) < 1e-12
    for r in j["rows"] if r["ratio"] == 0)'
json 'what is evicted costs something, and two texts are too few for intervals' worth.json \
    'all(r["kl_low"] is None
    and r["kl"] > 0 and 0 < r["loss"] < 1 for r in j["rows"] if r["ratio"] > 0)'
json 'the cache is as small as promised' worth.json 'all(abs(r["effective_ratio"] - r["ratio"]) < 0.02 and
    r["cache_bytes"] == round((1 - r["effective_ratio"]) * 160 * 4) * 2 * 16 * 4 for r in j["rows"])'
json 'no method loses less than the oracle' worth.json \
    'all(o["loss"] <= r["loss"] + 1e-9 for o in j["rows"] for r in j["rows"]
    if o["allocator"] == "oracle" and all(o[k] == r[k] for k in ("metric", "ratio"))
    and r["effective_ratio"] > o["effective_ratio"] - 1e-3)'
check 'the picture has a chart of KL and one of agreement for each metric' charts worth.svg 4
cp worth.json first.json
expect 0 'inspect knows the results' inspect worth.json --json
json 'and counts what is in them' out 'j["kind"] == "results" and j["n_rows"] == 24 and "kl_to_ada" in j["columns"]'

# ---- a table that is made to lose: one layer keeps everything, the other gives it all
for k in 2 3 4; do sed "s/says/tells $k/" text1.txt >"text$k.txt"; done
expect 0 'solve with a layer pinned' solve run.h5 --metric keydiff --pin 1 --ratios 0.1,0.3 -o loses.safetensors
# shellcheck disable=SC2086
expect 0 'eval of it' eval tiny.gguf loses.safetensors text?.txt $SIZE -r 0.1,0.3 -a uniform -q
says 'eval says in words that it loses' '^    It does not beat uniform budgets on these texts\.'
says 'and what to do' 'Profile texts of this kind and length and solve again, or prune less\.$'
# shellcheck disable=SC2086
expect 0 'eval of it on two texts' eval tiny.gguf loses.safetensors text0.txt text1.txt $SIZE -r 0.1 -a uniform -q
says 'two texts do not tell' 'on these texts, or too few were judged to tell\.'

# ---- going on
cp worth.cells all
head -n 20 all >worth.cells
printf '{"key": "cut sho' >>worth.cells
# shellcheck disable=SC2086
expect 0 'the same command after a kill' eval tiny.gguf keydiff.safetensors snapkv.safetensors text0.txt text1.txt \
    $SIZE -r 0,0.5,0.8 -a uniform -a ada -a oracle -o worth
says 'takes what it had' '; 20 more from worth.cells' err
if [ "$(wc -l <worth.cells)" = 48 ]; then ok 'and measures the rest once'; else not_ok 'and measures the rest once'; fi
holds 'with the same numbers' <<'PYTHON_END'
import json
a, b = (json.load(open(n))["rows"] for n in ("first.json", "worth.json"))
assert len(a) == len(b) and all(abs(x["kl"] - y["kl"]) < 1e-12 and abs(x["loss"] - y["loss"]) < 1e-12
    for x, y in zip(a, b))
assert [r["cache_allocated"] for r in a] == [r["cache_allocated"] for r in b] # counted, not as malloc rounds it
PYTHON_END
# Kept positions: a run that was stopped goes on, and lists all of them, in the order of one run.
KEPT="keydiff.safetensors text0.txt text1.txt $SIZE -r 0.5,0.8 -a uniform -p morphkv:window=8 -q"
# shellcheck disable=SC2086
expect 0 'kept positions in one run' eval tiny.gguf $KEPT --dump-kept kept-1.jsonl -o kept-1
exists 'their log' kept-1.cells
sed -n '2p;5p;7p' kept-1.cells >kept-2.cells
# shellcheck disable=SC2086
expect 0 'and after a stop' eval tiny.gguf $KEPT --dump-kept kept-2.jsonl -o kept-2
if [ "$(wc -l <kept-2.cells)" = "$(wc -l <kept-1.cells)" ]; then ok 'what the log has is not measured again'; else
    not_ok 'what the log has is not measured again'; fi
same 'the same list' kept-1.jsonl kept-2.jsonl
# shellcheck disable=SC2086
"$KVB" eval tiny.gguf $KEPT --dump-kept kept-3.jsonl -o kept-3 -t 300 >/dev/null 2>err &
for _ in $(seq 100); do
    [ -s kept-3.cells ] && break
    sleep 0.05
done
kill -TERM $! 2>/dev/null
wait $!
if [ -s kept-3.cells ]; then ok 'a stop leaves what was measured'; else not_ok 'a stop leaves what was measured'; fi
# A table whose name has an equals sign, and one with a label.
cp keydiff.safetensors lambda=0.1.safetensors
# shellcheck disable=SC2086
expect 0 'a name with an equals sign' eval tiny.gguf lambda=0.1.safetensors other=keydiff.safetensors text0.txt $SIZE \
    -r 0.8 -a none -q
says 'is no label where the file is there' '^ +80 %  lukv '
says 'and a label is one' '^ +80 %  other '
# shellcheck disable=SC2086
expect 0 'without protection as well' eval tiny.gguf text0.txt -m keydiff -a uniform $SIZE -r 0.8 --no-protect --json \
    --quiet
cp out bare.json
json 'both kinds' bare.json '(sorted((r["sink"], r["window"]) for r in j["rows"]) == [(0, 0), (4, 1)] and
    j["rows"][0]["kl"] != j["rows"][1]["kl"])'
# shellcheck disable=SC2086
expect 0 'other batches and threads' eval tiny.gguf text0.txt -m keydiff -a uniform $SIZE -r 0.8 --no-protect --json \
    --quiet --batch 1 --threads 1
holds 'change no number' <<'PYTHON_END'
import json
a, b = (json.load(open(n))["rows"] for n in ("bare.json", "out"))
assert [r["kl"] for r in a] == [r["kl"] for r in b]
PYTHON_END
expect 0 'the table without the gap' solve run.h5 --metric keydiff -o nogap.safetensors --paper --order oracle --quiet
# shellcheck disable=SC2086
expect 0 'beside the table with it' eval tiny.gguf keydiff.safetensors nogap.safetensors text0.txt $SIZE -r 0.8
says 'is called no_gap' '^ +80 %  lukv-no_gap '
says 'and the other is not' '^ +80 %  lukv '
# shellcheck disable=SC2086
expect 0 'the reference backend' eval tiny.gguf text0.txt -m keydiff -a uniform $SIZE -r 0.8 --json --quiet \
    --backend ref
holds 'finds the same' <<'PYTHON_END'
import json
a, b = (json.load(open(n))["rows"][0] for n in ("bare.json", "out"))
assert abs(a["kl"] - b["kl"]) < 1e-4 * a["kl"], (a["kl"], b["kl"])
PYTHON_END

# ---- kept positions
# shellcheck disable=SC2086
expect 0 'kept positions' eval tiny.gguf keydiff.safetensors text0.txt $SIZE -r 0.5 -a none --dump-kept kept.jsonl \
    --quiet
holds 'are whole, ascending and protected' <<'PYTHON_END'
import json
(run,) = [json.loads(x) for x in open("kept.jsonl")]
assert len(run["ids"]) == 172 and len(run["kept"]) == 4 and run["allocator"] == "lukv" and run["kl"] > 0
for p in run["kept"]:
    assert p == sorted(set(p)) and p[:4] == [0, 1, 2, 3] and p[-1] == 159
assert abs(sum(map(len, run["kept"])) - 320) <= 4
PYTHON_END

# ---- predictions alone
for again in '' ' again'; do
    # shellcheck disable=SC2086
    expect 0 "predictions alone$again" eval tiny.gguf keydiff.safetensors snapkv.safetensors text0.txt text1.txt $SIZE \
        -r 0,0.5,0.8 -a uniform -a ada --predictions-only -o alone
    holds 'are those of the whole, and say what was not measured' <<'PYTHON_END'
import json
whole, alone = (json.load(open(n + ".json")) for n in ("worth", "alone"))
name = lambda r: (r["metric"], r["allocator"], r["ratio"])
found = {name(r): r for r in whole["rows"]}
assert len(alone["rows"]) == 18 and alone["settings"]["predictions_only"] and not whole["settings"]["predictions_only"]
for r in alone["rows"]:
    assert all(r[k] == found[name(r)][k] for k in ("kl", "top1", "nll", "kl_to_uniform", "effective_ratio")), r
    assert r["loss"] is None and r["output_error"] is None, r
PYTHON_END
done
says 'a line for what was not measured' '^ +80 %  lukv .*  -       -  ' out
# shellcheck disable=SC2086
misused 'an allocator that needs what is left away' 'predictions-only leaves away' eval tiny.gguf text0.txt -m keydiff \
    -a oracle $SIZE -r 0.8 --predictions-only

# ---- policies
# shellcheck disable=SC2086
expect 0 'policies, with and without a table' eval tiny.gguf keydiff.safetensors text0.txt text1.txt -p full \
    -p morphkv:window=8 -p quest -a uniform -a ada $SIZE -r 0.8 -o steps
says 'a block for each' '^morphkv:window=8, at every step'
json 'each with uniform capacities and with the table, and nothing that needs scores' steps.json \
    '([(r["metric"], r["allocator"]) for r in j["rows"] if r["acts"] == "every step"] ==
    [(p, a) for p in ("full", "morphkv:window=8", "quest") for a in ("uniform", "lukv")])'
json 'the full cache loses nothing; others do; only those that evict have evicted' steps.json \
    'all((r["kl"] < 1e-9) == (r["metric"] == "full") and
    (r["loss"] > 0) == r["metric"].startswith("morph") and r["output_error"] is None
    and (r["metric"] == "full") == (r["looked"] > 0.9)
    for r in j["rows"] if r["acts"] == "every step")'
check 'and a row of charts' charts steps.svg 8
# shellcheck disable=SC2086
expect 0 'the same command again' eval tiny.gguf keydiff.safetensors text0.txt text1.txt -p full -p morphkv:window=8 \
    -p quest -a uniform -a ada $SIZE -r 0.8 -o steps --json --quiet
same_results 'takes all from its log' out steps.json
# shellcheck disable=SC2086
expect 0 'another precision' eval tiny.gguf text0.txt -m keydiff -a uniform $SIZE -r 0.8 --json --quiet --compute bf16x3
holds 'says so, and finds nearly the same' <<'PYTHON_END'
import json
a, b = (json.load(open(n)) for n in ("bare.json", "out"))
x, y = a["rows"][0]["kl"], b["rows"][0]["kl"]
assert (a["settings"]["compute"], b["settings"]["compute"]) == ("f32", "bf16x3") and 0 < abs(x - y) < 1e-2 * x, (x, y)
PYTHON_END

# shellcheck disable=SC2086
expect 0 'a table that may not cut into the window' eval tiny.gguf snapkv.safetensors snapkv.safetensors:strict \
    text0.txt $SIZE -r 0.85 -a none --dump-kept strict.jsonl --quiet
says 'has a name of its own' '^ +85 %  lukv-strict '
holds 'and keeps the window in every head, which the plain one does not' <<'PYTHON_END'
import json
plain, strict = [json.loads(x)["kept"] for x in open("strict.jsonl")]
whole = set(range(4)) | set(range(144, 160))
assert all(whole <= set(p) for p in strict) and not all(whole <= set(p) for p in plain)
assert abs(sum(map(len, strict)) - sum(map(len, plain))) <= 4
PYTHON_END

# ---- head scores, names, speed
printf '1 2\n3 4\n' >heads.tsv
# shellcheck disable=SC2086
expect 0 'HeadKV and DuoAttention' eval tiny.gguf text0.txt -m keydiff -a headkv=heads.tsv -a duo=heads.tsv $SIZE \
    -r 0.5 --quiet
says 'headkv' '^ +50 %  headkv'
says 'duo' '^ +50 %  duo'
# shellcheck disable=SC2086
expect 0 'a table under another name' eval tiny.gguf mine=keydiff.safetensors text0.txt $SIZE -r 0.5 -a none --quiet
says 'has that name' '^ +50 %  mine'
expect 0 "solve's default" solve run.h5 --metric keydiff -o usual.safetensors --quiet
expect 0 'and its neighbour' solve run.h5 --metric keydiff --shrink 0.25 -o pulled.safetensors --quiet
# shellcheck disable=SC2086
expect 0 'beside the published way, a ratio in per cent' eval tiny.gguf usual.safetensors pulled.safetensors \
    keydiff.safetensors text0.txt $SIZE -r 50%,0.8 -a none --quiet
says 'is called kvbudget' '^ +50 %  kvbudget '
says 'others after what differs' '^ +80 %  lukv-mean_loss-shrink0.25 '
expect 0 'speed' eval tiny.gguf keydiff.safetensors text0.txt --speed --tokens 160 --next 6 -a uniform --batch 2 --quiet
says 'the full cache' '^  full .* 1.00x$'
says 'and the cut ones' '^  lukv +[0-9.]+ %'

# ---- metrics whose ranking depends on the budget
expect 0 'profile the second stage' profile tiny.gguf calib.jsonl -o two.h5 --quiet --new-tokens 8 --ignore-eos \
    --metric critical:share=0:epsilon=0.1+snapkv:kvpress:window=16
expect 0 'solve it' solve two.h5 --metric critical -o critical.safetensors --quiet
# shellcheck disable=SC2086
expect 0 'deploy both stages' eval tiny.gguf critical.safetensors text0.txt \
    -m critical:epsilon=0.1+snapkv:kvpress:window=16 -m critical:share=0:epsilon=0.1+snapkv:kvpress:window=16 \
    -m h2o:half $SIZE -r 0.5 -a uniform --json --quiet
cp out two.json
json 'each with its own kept tokens' two.json \
    '(len({r["kl"] for r in j["rows"] if r["allocator"] == "uniform"}) == 3 and
    [r["metric"] for r in j["rows"] if r["allocator"] != "uniform"] == [
        "critical:epsilon=0.1+snapkv:kvpress:window=16", "critical:share=0:epsilon=0.1+snapkv:kvpress:window=16"])'

# ---- what is refused
# shellcheck disable=SC2086
fails 'a table of another model' 'not a table of this model' eval other.gguf keydiff.safetensors text0.txt $SIZE
# shellcheck disable=SC2086
fails 'a table of another metric' 'for metric keydiff, which --metric leaves out' eval tiny.gguf keydiff.safetensors \
    text0.txt $SIZE -m snapkv:kvpress:window=16
fails 'a text that is too short' 'text0.txt: [0-9]+ tokens, expected at least 4000' eval tiny.gguf text0.txt \
    --tokens 4000
fails 'a text twice' 'a text counts once' eval tiny.gguf text0.txt text0.txt --tokens 160
fails 'a record in the place of a table' 'run.h5: byte [0-9]+ is 0, expected text, found a record' \
    eval tiny.gguf run.h5 --tokens 160
fails 'no such text' 'nothing.txt' eval tiny.gguf nothing.txt --tokens 160
fails 'no such table' 'nothing.safetensors' eval tiny.gguf nothing.safetensors text0.txt --tokens 160
fails 'an unknown metric' "metric 'nonsense' is unknown" eval tiny.gguf text0.txt -m nonsense --tokens 160
fails 'an unknown allocator' "allocator 'nonsense' is unknown" eval tiny.gguf text0.txt -a nonsense --tokens 160
printf '1 2\n' >few.tsv
fails 'head scores of another model' 'expected one for each of 2 layers' eval tiny.gguf text0.txt -a duo=few.tsv \
    --tokens 160
misused 'a ratio of 1' 'below 1' eval tiny.gguf text0.txt -r 0.5,1
misused 'a ratio twice' 'given twice' eval tiny.gguf text0.txt -r 0.5,0.5
misused 'no text' 'no text is given' eval tiny.gguf keydiff.safetensors
misused 'an unknown backend' "there is no 'gpu9'" eval tiny.gguf text0.txt --backend gpu9
# shellcheck disable=SC2086
fails 'two tables of one name' 'give tables names' eval tiny.gguf keydiff.safetensors keydiff.safetensors text0.txt \
    $SIZE
echo nonsense >broken.cells
# shellcheck disable=SC2086
fails 'a log that is none' 'broken.cells: line 1' eval tiny.gguf text0.txt $SIZE -o broken
end
