#!/usr/bin/env bash
# From nothing to a table: the default model, and what `kvbudget tune` makes for it in about two minutes. Called by
# `make quickstart`, which has installed what is needed and built the program. What is done is not done again.
set -eu
cd "$(dirname "$0")/../.."

BUILD=${BUILD:-build}
OUT=${OUT:-out}
KVB=$BUILD/kvbudget
TABLE=$OUT/smollm2.safetensors
mkdir -p "$OUT"

step() { printf '\n== %s\n' "$*"; }

step '1. The model'
MODEL=$(tools/scripts/get-model.sh)
echo "$MODEL"

step '2. A table for it, in about two minutes: which tokens each head keeps, and how many, for 99 compression ratios'
"$KVB" tune "$MODEL" -o "${TABLE%.safetensors}" --time 2min

step '3. What an engine would get for a context of 4096 tokens, 80 % pruned'
"$KVB" budgets "$TABLE" --ratio 0.8 --tokens 4096

step 'What to do with it'
cat <<TEXT
What it is worth, to read in a browser:
    ${TABLE%.safetensors}.html

In Python with transformers (\`make wheel\` makes the package, python/README.md tells how to use it):
    with kvbudget.compress(model, "${TABLE%.safetensors}-packed.safetensors", 0.9, refit=True): model.generate(...)

In C with the runtime (runtime/kvbudget.h; programs in runtime/examples; \`make install\` installs the library):
    kvb_table_open(&table, "$TABLE", NULL, &err);
    kvb_budgets(table, 0.8, n_tokens, NULL, keep, n_heads, &err);         // keep[l * n_kv_heads + g]: tokens per head
    kvb_select(scores, n_tokens, keep[h], sink, window, positions, cap, &err); // which ones, by the ranking's scores

With your own model and texts, and without a time limit:
    $KVB tune model.gguf texts/*.txt -o mine
TEXT
