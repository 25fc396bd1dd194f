#!/usr/bin/env bash
# kvbudget recommend on the tiny model: the promised ratio, what it saves, and how many texts a refusal asks for.
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
tiny_table
sample_lines many 60 >many.jsonl
sample_lines few 5 >few.jsonl
RECOMMEND=(recommend tiny.gguf table.safetensors --tokens 120 --next 8)

# The tiny model is random, and its losses are tiny, so the limit is derived from a measurement.
expect 0 'measure' "${RECOMMEND[@]}" many.jsonl --json --quiet --max-kl 1e6
cp out all.json
json 'ratios are promised up to the end where nothing is above the limit' all.json \
    'j["settings"]["promised_ratio"] == 0.95 and all(r["promised"] for r in j["rows"]) and len(j["rows"]) == 19'
LIMIT=$("$PYTHON" -c '
import json
rows = json.load(open("all.json"))["rows"]
print(next(r["mean"] for r in rows if abs(r["ratio"] - 0.6) < 1e-9))')
expect 0 'a promise' "${RECOMMEND[@]}" many.jsonl --max-kl "$LIMIT" --confidence 0.9 --length 1000
says 'the ratio and the method' 'Learn then Test'
says 'what it saves' 'At 1000 tokens that saves .* of .* MiB'
expect 0 'the same as JSON' "${RECOMMEND[@]}" many.jsonl --max-kl "$LIMIT" --confidence 0.9 --json --quiet --threads 1
cp out one.json
json 'it is below the ratio whose mean is the limit' one.json '0 < j["settings"]["promised_ratio"] < 0.6'
holds 'promises are kept' "$PYTHON" "$KVB_ROOT/tests/peer/promise_halves.py" one.json
json 'the sequence ends at the first p above the error' one.json \
    'all(r["promised"] == (r["p"] <= 0.1) for r in j["rows"] if r["ratio"] <= j["settings"]["promised_ratio"] + 0.051)'
json 'memory is counted' one.json '0 < j["settings"]["bytes_saved"] < j["settings"]["bytes"] == 2 * 2 * 120 * 4 * 16'
expect 0 'again with other batches and threads' "${RECOMMEND[@]}" many.jsonl --max-kl "$LIMIT" --confidence 0.9 --json \
    --quiet --batch 7 --csv rows.csv
json 'gives the same rows' one.json '(j["rows"], j["details"]) == (lambda k: (k["rows"], k["details"]))(
    json.load(open("out")))'
exists 'rows as CSV' rows.csv
expect 0 'three limits' "${RECOMMEND[@]}" many.jsonl --json --quiet --max-kl 1e3 --max-flips 0.9 --max-nll 1e3 \
    -r 30%,60%
json 'all limits are shown' out \
    '[r["measure"] for r in j["rows"]] == 2 * ["kl", "flips", "nll"] and j["settings"]["p_value"] == "betting"'
expect 0 'refitted cuts' "${RECOMMEND[@]}" many.jsonl --max-kl 1e6 --json --quiet --refit
json 'lose something else where they are deep, and the settings say so' out \
    '(lambda bare: j["settings"]["refit"] > 0 == bare["settings"]["refit"] and
    all((a["mean"] == b["mean"]) == (a["ratio"] < 0.1) for a, b in zip(j["rows"], bare["rows"])
    if not 0.1 <= a["ratio"] < 0.7))(json.load(open("all.json")))'
fails 'too few texts are refused before any work, with the number that it takes' \
    '5 texts promise nothing.*at least [0-9]+ texts' "${RECOMMEND[@]}" few.jsonl
expect 1 'a limit that nothing meets' "${RECOMMEND[@]}" many.jsonl --max-kl 1e-12
says 'is refused with the reason' 'nothing can be promised|promise nothing' err
misused 'a wrong confidence' 'confidence' "${RECOMMEND[@]}" many.jsonl --confidence 2
misused 'two tables' 'expected one' recommend tiny.gguf table.safetensors table.safetensors many.jsonl
end
