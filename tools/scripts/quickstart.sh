#!/usr/bin/env bash
# From nothing to budgets: model, profile, tables for three metrics, a picture. Called by `make quickstart`, which has
# installed what is needed and built the program. A step is skipped when its result is newer than what it is made from.
set -eu
cd "$(dirname "$0")/../.."

BUILD=${BUILD:-build}
OUT=${OUT:-out}
# Texts of different kinds matter more to a table than many questions (solver/README.md, "What was measured").
ours=$(printf 'calib-data/%s.jsonl ' narrative-en technical-en narrative-zh code-c)
read -ra CALIB <<<"${CALIB:-$ours}"
QUESTIONS=${QUESTIONS:-8}
KVB=$BUILD/kvbudget
RECORD=$OUT/smollm2.h5
# name of the files, canonical name of the metric
METRICS=('snapkv snapkv:kvpress' 'keydiff keydiff' 'ea ea:kvpress')
mkdir -p "$OUT"

step() { printf '\n== %s\n' "$*"; }

# fresh RESULT SOURCE...: the result exists and no source is newer.
fresh() {
    local result=$1 source
    shift
    [ -s "$result" ] || return 1
    for source in "$@"; do
        if [ "$source" -nt "$result" ]; then return 1; fi
    done
}

step '1. The model'
MODEL=$(tools/scripts/get-model.sh)
echo "$MODEL"

step "2. Profile: watch the model answer questions about ${#CALIB[@]} texts with its full cache"
if fresh "$RECORD" "$MODEL" "${CALIB[@]}"; then
    echo "$RECORD is up to date"
else
    # An unfinished profile goes on; a finished one of an older text is replaced.
    again=(--resume)
    [ ! -e "$RECORD" ] || again=(--force)
    metrics=()
    for m in "${METRICS[@]}"; do metrics+=(--metric "${m#* }"); done
    "$KVB" profile "$MODEL" "${CALIB[@]}" "${metrics[@]}" --questions "$QUESTIONS" --ignore-answers --plan
    "$KVB" profile "$MODEL" "${CALIB[@]}" -o "$RECORD" "${metrics[@]}" --questions "$QUESTIONS" \
        --ignore-answers "${again[@]}"
fi

step '3. Solve: the best split of the cache over all heads, for 99 compression ratios and three eviction metrics'
tables=()
for m in "${METRICS[@]}"; do
    table=$OUT/${m%% *}.safetensors npy=$OUT/${m%% *}.npy
    tables+=("$table")
    if fresh "$table" "$RECORD" && fresh "$npy" "$RECORD"; then
        echo "$table and .npy are up to date"
    else
        "$KVB" solve "$RECORD" --metric "${m#* }" -o "$table" --npy "$npy"
    fi
done

step "4. The budgets at 50, 80 and 90 % pruned (also as $OUT/budgets.svg)"
if ! fresh "$OUT/budgets.svg" "${tables[@]}"; then "$KVB" plot "${tables[@]}" -o "$OUT/budgets.svg"; fi
"$KVB" plot "${tables[@]}"

step 'What to do with it'
cat <<TEXT
What an engine would get for a context of 4096 tokens, 80 % pruned:
    $KVB budgets $OUT/snapkv.safetensors --ratio 0.8 --tokens 4096

In Python with kvpress 0.5.5 (from $OUT/snapkv.json, which also says what the table is for):
$("${PYTHON:-python3}" -c 'import json, sys; print(json.load(open(sys.argv[1]))["kvpress"]["load"])' \
    "$OUT/snapkv.json" | sed "s|\"snapkv.npy\"|\"$OUT/snapkv.npy\"|; s/^/    /")

In C with the runtime (runtime/kvbudget.h; programs in runtime/examples; \`make install\` installs the library):
    kvb_table_open(&table, "$OUT/snapkv.safetensors", NULL, &err);
    kvb_budgets(table, 0.8, n_tokens, NULL, keep, n_heads, &err);         // keep[l * n_kv_heads + g]: tokens per head
    kvb_select(scores, n_tokens, keep[h], sink, window, positions, cap, &err); // which ones, by the metric's scores

With your own model and text:
    $KVB help profile
TEXT
