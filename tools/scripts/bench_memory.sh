#!/usr/bin/env bash
# Peak memory of a profile against the context's length, measured and planned; prints CSV, and says at the end whether
# every plan was within 15 % of what was measured. LAYERS=0 is the whole model (32,768 tokens then take minutes); fewer
# layers are the same line with another slope. COMPUTE=bf16 is the fastest. Called by `make bench-memory`.
set -eu
cd "$(dirname "$0")/../.."
BUILD=${BUILD:-build}
LAYERS=${LAYERS:-4}
COMPUTE=${COMPUTE:-f32}
model=$(tools/scripts/get-model.sh)
work=$(mktemp -d "${TMPDIR:-/tmp}/kvbudget-memory.XXXXXX")
trap 'rm -rf "$work"' EXIT
awk 'BEGIN { srand(1); printf "{\"sample_id\":\"random\",\"context_ids\":["
    for (i = 0; i < 131072; i++) printf "%s%d", i ? "," : "", 100 + int(rand() * 40000)
    print "],\"question_ids\":[[101,102,103,104,105]]}" }' >"$work/long.jsonl"

layers=()
[ "$LAYERS" = 0 ] || layers=(--layers "$LAYERS")
echo 'layers,tokens,seconds,peak_gib,planned_gib' | tee "$work/memory.csv"
for tokens in ${TOKENS:-1024 2048 4096 8192 16384 32768}; do
    "$BUILD/kvbudget" profile "$model" "$work/long.jsonl" -o "$work/run.h5" --force --max-tokens "$tokens" \
        --new-tokens 4 --ignore-eos \
        --beyond-trained --compute "$COMPUTE" "${layers[@]}" 2>"$work/log" || { cat "$work/log" >&2 && exit 1; }
    sed -n "s/^\([0-9.]*\) s: .*peak memory \([0-9.]*\) GiB (planned \([0-9.]*\)).*/$LAYERS,$tokens,\1,\2,\3/p" \
        "$work/log" | tee -a "$work/memory.csv"
done
awk -F, \
    'NR > 1 { off = $5 / $4 - 1; worst = off < 0 ? (-off > worst ? -off : worst) : (off > worst ? off : worst); n++ }
    END {
        printf "plan against measured peak: at most %.1f %% off at %d lengths\n", 100 * worst, n
        exit n == 0 || worst > 0.15
    }' "$work/memory.csv" >&2
