#!/usr/bin/env bash
# The whole default calibration: 4,000 words, 30 questions, 64 tokens each, three metrics; then the exact solver's side.
# shellcheck source=tests/cli/lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
if ! MODEL=$(cd "$KVB_ROOT" && tools/scripts/get-model.sh 2>"$T/get-model.err") || [ ! -s "$MODEL" ]; then
    cat get-model.err
    skip 'the default model could not be fetched'
    end
fi
case $MODEL in /*) ;; *) MODEL=$KVB_ROOT/$MODEL ;; esac
for text in narrative-en technical-en narrative-zh code-c; do
    expect 0 "profile $text" profile "$MODEL" "$KVB_ROOT/calib-data/$text.jsonl" -o "$text.h5"
    tail -n 1 err
    for m in snapkv:kvpress keydiff ea:kvpress; do
        t=$text-${m%%:*}.safetensors
        expect 0 "solve $m of $text" solve "$text.h5" --metric "$m" -o "$t"
        check "the table of $m of $text keeps the invariants" table "$t" 30 3 "$m"
    done
done
expect 0 'profile four texts at once' profile "$MODEL" "$KVB_ROOT"/calib-data/*.jsonl -o all.h5 --questions 6
expect 0 'solve them' solve all.h5 --metric keydiff --aggregate mean_loss -o all.safetensors
check 'the table keeps the invariants' table all.safetensors 30 3 keydiff
end
