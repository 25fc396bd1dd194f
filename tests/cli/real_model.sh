#!/usr/bin/env bash
# The chain on the default model and on our own narrative, shortened: real tokens, real heads, real effects.
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
default_model 'NOTHING WAS TESTED WITH A REAL MODEL'
CALIB=$KVB_ROOT/calib-data/narrative-en.jsonl
L=30 G=3

# ---- text and forward pass
"$PYTHON" -c 'import json, sys; print(json.loads(open(sys.argv[1], encoding="utf-8").readline())["context"][:300])' \
    "$CALIB" >text
head -c 90 text >beginning
holds 'the ids of a text' "$KVB_BUILD/tests/tokens" "$MODEL" text
n=$(wc -w <held)
holds "a few characters to a token: $n" [ $((n > 50 && n < 150)) = 1 ]
holds 'the ids of its beginning' "$KVB_BUILD/tests/tokens" "$MODEL" beginning --npy ids.npy
for backend in cpu ref; do
    holds "logits, $backend" "$KVB_BUILD/tests/logits" "$MODEL" ids.npy $backend.npy $backend
done
check 'both backends agree' close_npy cpu.npy ref.npy 1e-3

# ---- profile
PROFILE=(profile "$MODEL" "$CALIB" --max-tokens 700 --questions 4 --new-tokens 17 --ignore-answers --ignore-eos \
    --batch 2)
expect 0 'profile --plan' "${PROFILE[@]}" --plan
expect 0 'profile' "${PROFILE[@]}" -o run.h5

# ---- solve and the steps after it
for m in snapkv:kvpress keydiff ea:kvpress; do
    t=${m%%:*}
    expect 0 "solve $m" solve run.h5 --metric "$m" -o "$t.safetensors"
    check "the table of $m keeps the invariants" table "$t.safetensors" $L $G "$m"
    check "the heads of $m differ as the paper says" heads_differ "$t.safetensors"
done
expect 0 'report' report snapkv.safetensors keydiff.safetensors ea.safetensors -o budgets.html
check 'it has a cell for every head' maps budgets.html 9 $((L * G))
end
