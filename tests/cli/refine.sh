#!/usr/bin/env bash
# kvbudget refine on the tiny model: less damage than the table, reproducible bytes, stops, and tables with constraints.
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
tiny_table
expect 0 'solve with pages, levels and a floor' solve run.h5 --metric keydiff --block 8 --levels 1 --floor 0.05 \
    -o paged.safetensors --quiet
tiny_texts 7 50
REFINE=(refine tiny.gguf --tokens 150 --next 12 --evaluations 40 -r '50%,80%')
# refine NAME OUT ARGUMENT...: refines the table on the seven texts.
refine() {
    local name=$1 to=$2
    shift 2
    expect 0 "$name" "${REFINE[@]}" table.safetensors text?.txt --quiet --json -o "$to" "$@"
}

refine 'refine' one.safetensors
cp out one.json
json 'texts are dealt: two to search on, two to choose, three to judge' one.json \
    '[len(j["settings"]["refined"][s]["texts"]) for s in ("calibration", "selection", "test")] == [2, 2, 3]'
json 'the search began at budgets by each head alone' one.json 'j["settings"]["refined"]["start_texts"] == 2'
json 'no ratio is worse on the texts that choose' one.json \
    'all(r["kl"] <= r["kl_before"] for r in j["rows"] if r["set"] == "selection")'
json 'and something is gained' one.json \
    'any(r["kl"] < r["kl_before"] for r in j["rows"] if r["set"] == "selection") and len(j["rows"]) == 3 * 2'
json 'what is left has an interval where texts are enough, and every text its KL' one.json \
    'all(r["kl_left"] is None or abs(r["kl_left"] * r["kl_before"] - r["kl"]) < 1e-9 for r in j["rows"]) and
    len(j["details"]) == 6 and all(len(d["kl"]) == len(d["kl_before"]) in (2, 3) for d in j["details"])'
# told_by_eval NAME [--refit]: eval measures the same damage on the test texts as refine reported for NAME.safetensors.
told_by_eval() {
    expect 0 "eval of $1" eval tiny.gguf table.safetensors "$1.safetensors" text1.txt text3.txt text5.txt -a none \
        --tokens 150 --next 12 -r 0.5,0.8 --quiet --json "${@:2}"
    cp out worth.json
    holds "eval: same $1" "$PYTHON" - "$1.json" <<'PYTHON_END'
import json, sys
told = json.load(open(sys.argv[1]))["settings"]["refined"]
found = json.load(open("worth.json"))["rows"]
for label, name in (("kvbudget", "kl_before"), ("kvbudget-refined", "kl")):
    for i, ratio in enumerate((0.5, 0.8)):
        row, = [r for r in found if r["allocator"] == label and abs(r["ratio"] - ratio) < 1e-9]
        assert abs(row["kl"] - told["test"][name][i]) < 1e-9 * max(1, row["kl"]), (label, ratio, row["kl"])
        assert told.get("refit", 0) == row["refit"]
PYTHON_END
}
told_by_eval one
cp one.safetensors.cells refitted.safetensors.cells
refine 'refine of refitted cuts, with the log of bare ones' refitted.safetensors --refit
cp out refitted.json
told_by_eval refitted --refit
json 'other budgets are worth most then' refitted.json \
    'j["settings"]["refined"]["refit"] > 0 and j["settings"]["refined"]["start_texts"] == 2 and
    all(a["kl_before"] != b["kl_before"] for a, b in zip(j["rows"], json.load(open("one.json"))["rows"]))'
expect 0 'the table says how it was found' inspect one.safetensors --json
says 'with the sets' 'refined.*selection.*kl_before' out
json 'evaluations, and hashes of table and texts' out \
    '(lambda r: r["evaluations"] > 0 and len(r["from"]) == 64 and all(len(r[s]["kl"]) == 2 and
    all(len(t) == 64 for t in r[s]["texts"]) for s in ("calibration", "selection", "test")))(
    json.loads(j["metadata"]["refined"]) if isinstance(j["metadata"]["refined"], str) else j["metadata"]["refined"])'

expect 0 'with progress' "${REFINE[@]}" table.safetensors text?.txt -o shown.safetensors
says 'it shows the heads alone' 'heads alone at 6 budgets each, text 2 of 2, 0 s left' err
says 'and their rate' '48 cuts of heads alone, [0-9.]+ a second' err
says 'it shows the KL of both sets as they fall' 'round 1, .* KL on calibration [0-9.]+ .* on selection [0-9.]+ ' err
says 'and the KL of all three' 'calibration +selection +test' out
refine 'again, with one thread and other batches' two.safetensors --threads 1 --batch 3
same 'gives the same table' one.safetensors two.safetensors
mkdir long && (cd long && tiny_texts 60 200)
# refine_stopped OUT: refines on long texts; a signal comes when heads have been cut on a few of them.
refine_stopped() {
    interrupt TERM "grep 'text [2-9] of' err" "$KVB" refine tiny.gguf --tokens 1000 --next 60 -r '50%,80%' --threads 1 \
        table.safetensors long/text*.txt --evaluations 100000 -o "$1"
}
refine_stopped four.safetensors
ended 143 'a signal ends it'
says 'and says what is left' 'nothing is written, and the same command continues' err
absent 'no table' four.safetensors
exists 'but what was measured' four.safetensors.cells
# A finished table is kept unchanged, however late a search for another is stopped.
refine 'a finished search' six.safetensors
cp six.safetensors kept.safetensors
refine_stopped six.safetensors
ended 143 'a signal ends the other'
same 'the finished table is not replaced' six.safetensors kept.safetensors

expect 0 'a table with limits' "${REFINE[@]}" paged.safetensors text?.txt --quiet -o p.safetensors
expect 0 'its budgets' budgets p.safetensors --ratio 0.5 --tokens 160 --json
cp out p.json
holds 'pages and levels hold' "$PYTHON" - <<'PYTHON_END'
import json
def lists(x):
    if isinstance(x, list):
        yield x
        for y in x: yield from lists(y)
    elif isinstance(x, dict):
        for y in x.values(): yield from lists(y)
layers = [x for x in lists(json.load(open("p.json"))) if len(x) == 2 and all(isinstance(k, int) for k in x)]
assert len(layers) == 2 and all(a == b and a % 8 == 0 for a, b in layers), layers
PYTHON_END
expect 0 'another table for the same metric' solve run.h5 --metric keydiff --paper -o paper.safetensors --quiet
refine 'with a candidate' tried.safetensors --candidate paper.safetensors --evaluations 1
json 'its budgets, those between and four by depth are all that is measured' out \
    'j["settings"]["refined"]["rounds"] == 7'
json 'and no ratio is worse on the texts that choose' out \
    'all(r["kl"] <= r["kl_before"] for r in j["rows"] if r["set"] == "selection")'
"$KVB" profile tiny.gguf calib.jsonl -o other.h5 --quiet --new-tokens 8 --ignore-eos --metric knorm >out 2>err &&
    "$KVB" solve other.h5 --metric knorm -o other.safetensors --quiet >out 2>err
fails 'a candidate for another metric' 'knorm.*keydiff|keydiff.*knorm' "${REFINE[@]}" table.safetensors text?.txt \
    -o x.safetensors --candidate other.safetensors
fails 'two texts are too few' 'at least 3 texts' "${REFINE[@]}" table.safetensors text0.txt text1.txt -o x.safetensors
fails 'a text in two sets' 'same tokens' "${REFINE[@]}" table.safetensors text0.txt --select text0.txt -o x.safetensors
echo '{"key": 1}' >y.safetensors.cells
fails 'a log of something else' 'line 1: expected a result' "${REFINE[@]}" table.safetensors text?.txt -o y.safetensors
misused 'without -o' 'where should the refined table go' refine tiny.gguf table.safetensors text0.txt
end
