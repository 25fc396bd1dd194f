#!/usr/bin/env bash
# kvbudget recommend on the tiny model: the promise, what it saves, refusals with the number of texts.
# shellcheck source=tests/cli/lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
tiny_model tiny.gguf
tiny_calib calib.jsonl
expect 0 'profile' profile tiny.gguf calib.jsonl -o run.h5 --quiet --new-tokens 8 --ignore-eos --metric keydiff
expect 0 'solve' solve run.h5 --metric keydiff -o table.safetensors --quiet
"$PYTHON" -c '
import json
for name, n in (("many", 60), ("few", 5)):
    with open(name + ".jsonl", "w") as f:
        for k in range(n):
            text = "\n".join(f"line {i * (k + 3) % 101} of text {k} says {i * i % (97 + k)}" for i in range(40))
            print(json.dumps({"sample_id": f"{name}{k}", "context": text, "questions": ["?"]}), file=f)'
SIZE='--tokens 120 --next 8'

# The tiny model is random: what it loses is tiny too, so the limit is found first.
# shellcheck disable=SC2086
expect 0 'measure' recommend tiny.gguf table.safetensors many.jsonl $SIZE --json --quiet --max-kl 1e6
cp out all.json
json 'ratios are promised up to the end where nothing is above the limit' all.json \
    'j["settings"]["promised_ratio"] == 0.95 and all(r["promised"] for r in j["rows"]) and len(j["rows"]) == 19'
LIMIT=$("$PYTHON" -c '
import json
rows = json.load(open("all.json"))["rows"]
print(next(r["mean"] for r in rows if abs(r["ratio"] - 0.6) < 1e-9))')
# shellcheck disable=SC2086
expect 0 'a promise' recommend tiny.gguf table.safetensors many.jsonl $SIZE --max-kl "$LIMIT" --confidence 0.9 \
    --length 1000
says 'the ratio and the method' 'Learn then Test'
says 'what it saves' 'At 1000 tokens that saves .* of .* MiB'
# shellcheck disable=SC2086
expect 0 'the same as JSON' recommend tiny.gguf table.safetensors many.jsonl $SIZE --max-kl "$LIMIT" --confidence 0.9 \
    --json --quiet --threads 1
cp out one.json
json 'it is below the ratio whose mean is the limit' one.json '0 < j["settings"]["promised_ratio"] < 0.6'
if "$PYTHON" "$KVB_ROOT/tests/peer/promise_halves.py" one.json; then ok 'promises are kept'; else
    not_ok 'promises are kept'
fi
json 'the sequence ends at the first p above the error' one.json \
    'all(r["promised"] == (r["p"] <= 0.1) for r in j["rows"] if r["ratio"] <= j["settings"]["promised_ratio"] + 0.051)'
json 'memory is counted' one.json '0 < j["settings"]["bytes_saved"] < j["settings"]["bytes"] == 2 * 2 * 120 * 4 * 16'
# shellcheck disable=SC2086
expect 0 'again with other batches and threads' recommend tiny.gguf table.safetensors many.jsonl $SIZE \
    --max-kl "$LIMIT" --confidence 0.9 --json --quiet --batch 7 --csv rows.csv
cp out two.json
json 'gives the same rows' one.json '(j["rows"], j["details"]) == (lambda k: (k["rows"], k["details"]))(
    json.load(open("two.json")))'
exists 'rows as CSV' rows.csv
# shellcheck disable=SC2086
expect 0 'three limits' recommend tiny.gguf table.safetensors many.jsonl $SIZE --json \
    --quiet --max-kl 1e3 --max-flips 0.9 --max-nll 1e3 -r 30%,60%
cp out two.json
json 'all limits are shown' two.json \
    '[r["measure"] for r in j["rows"]] == 2 * ["kl", "flips", "nll"] and j["settings"]["p_value"] == "betting"'
# shellcheck disable=SC2086
expect 0 'refitted cuts' recommend tiny.gguf table.safetensors many.jsonl $SIZE --max-kl 1e6 --json --quiet --refit
cp out refitted.json
json 'lose something else where they are deep, and the settings say so' refitted.json \
    '(lambda bare: j["settings"]["refit"] > 0 == bare["settings"]["refit"] and
    all((a["mean"] == b["mean"]) == (a["ratio"] < 0.1) for a, b in zip(j["rows"], bare["rows"])
    if not 0.1 <= a["ratio"] < 0.7))(json.load(open("all.json")))'
# shellcheck disable=SC2086
fails 'too few texts are refused before any work, with the number that it takes' \
    '5 texts promise nothing.*at least [0-9]+ texts' recommend tiny.gguf table.safetensors few.jsonl $SIZE
# shellcheck disable=SC2086
expect 1 'a limit that nothing meets' recommend tiny.gguf table.safetensors many.jsonl $SIZE --max-kl 1e-12
says 'is refused with the reason' 'nothing can be promised|promise nothing' err
# shellcheck disable=SC2086
misused 'a wrong confidence' 'confidence' recommend tiny.gguf table.safetensors many.jsonl $SIZE --confidence 2
misused 'two tables' 'expected one' recommend tiny.gguf table.safetensors table.safetensors many.jsonl
end
