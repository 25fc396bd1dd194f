#!/usr/bin/env bash
# Compares the tables of `kvbudget tune` on real models with published and with equal budgets: KL at equal memory on the
# texts of calib-data/eval. Prints CSV. All measurements stay in $OUT, so that a run that was stopped continues. Called
# by `make bench-quality`, which keeps the CSV as docs/models.csv. MODELS are names of get-model.sh.
set -eu
cd "$(dirname "$0")/../.."
BUILD=${BUILD:-build}
OUT=${OUT:-$BUILD/quality}
KVB=$BUILD/kvbudget
mkdir -p "$OUT"

# measured NAME ARGUMENT...: kvbudget eval at all ratios, unless it is there.
measured() {
    local name=$1 && shift
    [ -s "$OUT/$name.csv" ] || "$KVB" eval "$@" --ratio 0.5,0.8,0.9,0.95 -o "$OUT/$name" --quiet >&2
}

for name in ${MODELS:-smollm2-135m gemma3-270m qwen2.5-coder-0.5b qwen2.5-coder-1.5b}; do
    model=$(tools/scripts/get-model.sh "$name")
    "$KVB" tune "$model" -o "$OUT/$name" >&2
    texts=() # those that have 2,048 tokens and 64 more with this tokenizer
    for text in calib-data/eval/*.txt; do
        [ "$("$BUILD/tests/tokens" "$model" "$text" | wc -w)" -lt 2112 ] || texts+=("$text")
    done
    own=("tuned=$OUT/$name.safetensors" "packed=$OUT/$name-packed.safetensors")
    tables=("${own[@]}")
    record=$name # published tables are solved from contexts of 2,048 tokens, also where tune reads shorter ones
    if ! grep -q '"tokens":[[:space:]]*2048' "$OUT/$name.tune/settings.json"; then
        record=$name-2048
        "$KVB" tune "$model" --tokens 2048 -o "$OUT/$record" >&2
        longer=("tuned-2048=$OUT/$record.safetensors" "packed-2048=$OUT/$record-packed.safetensors"
            "packed-ready=$("$KVB" tables "$model" --packed)") # of more texts
        measured "$name-longer" "$model" "${longer[@]}" "${texts[@]}" --allocator none
        own+=("${longer[@]}")
    fi
    for metric in keydiff ea:kvpress snapkv:kvpress; do
        table=$OUT/$name-${metric%%:*}-paper.safetensors
        [ -s "$table" ] ||
            "$KVB" solve "$OUT/$record.tune/run.h5" --metric "$metric" --paper -q 1 -o "$table" --quiet >&2
        tables+=("paper=$table")
    done
    measured "$name-plain" "$model" "${tables[@]}" "${texts[@]}" --allocator uniform --allocator ada
    measured "$name-refit" "$model" "${own[@]}" "${texts[@]}" --allocator none --refit
    "$KVB" tune "$model" --refit -o "$OUT/$name-for-refit" >&2 # budgets for refitted caches
    own=("tuned-refit=$OUT/$name-for-refit.safetensors" "packed-refit=$OUT/$name-for-refit-packed.safetensors")
    measured "$name-solved" "$model" "${own[@]}" "${texts[@]}" --allocator none --refit
done

first=yes
for name in ${MODELS:-smollm2-135m gemma3-270m qwen2.5-coder-0.5b qwen2.5-coder-1.5b}; do
    for kind in plain longer refit solved; do
        [ -s "$OUT/$name-$kind.csv" ] || continue
        [ "$first" = no ] || sed -n '1s/^/model,/p' "$OUT/$name-$kind.csv"
        sed "1d; s/^/$name,/" "$OUT/$name-$kind.csv"
        first=no
    done
done
