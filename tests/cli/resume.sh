#!/usr/bin/env bash
# A profile that is killed again and again, at any moment, ends with the same bytes as an undisturbed one.
# shellcheck source=tests/cli/lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
tiny_model tiny.gguf
tiny_calib calib.jsonl
PROFILE=(profile tiny.gguf calib.jsonl --new-tokens 64 --ignore-eos --batch 1)

start=$(date +%s%N)
expect 0 'undisturbed' "${PROFILE[@]}" -o whole.h5
took=$((($(date +%s%N) - start) / 1000000))

# Steps of a tenth of the whole time, each life a little longer than the last, so that kills fall everywhere.
lives=0
for tenth in 1 2 3 4 5 6 7 8 9 10 11 12 14 16 20 30 50 100 400; do
    milliseconds=$((took * tenth / 10))
    lives=$((lives + 1))
    code=0
    killed_after "$milliseconds" "$KVB" "${PROFILE[@]}" -o killed.h5 --resume --quiet 2>err >out </dev/null || code=$?
    [ "$code" = 0 ] && break
    if [ "$code" != 137 ]; then
        not_ok "life $lives ends by the kill, not by status $code"
        sed 's/^/    /' err
        break
    fi
    if [ -e killed.h5 ] && ! cmp -s whole.h5 killed.h5; then not_ok "life $lives left half a record"; fi
done
if [ "$lives" -gt 1 ]; then ok "killed $((lives - 1)) times, then finished"; else not_ok 'no kill hit'; fi
same 'the same bytes' whole.h5 killed.h5
if [ -e killed.h5.parts ]; then not_ok 'nothing else is left'; else ok 'nothing else is left'; fi

# A stop by Ctrl-C is clean and says how to go on.
code=0
timeout --foreground -s INT "0.$(printf %03d $((took / 3 > 999 ? 999 : took / 3)))" "$KVB" "${PROFILE[@]}" \
    -o stopped.h5 2>err >out </dev/null || code=$?
if [ -e stopped.h5 ]; then
    skip 'Ctrl-C: the run was over before'
else
    says 'Ctrl-C says that --resume goes on' '--resume' err
    fails 'without --resume the parts are not touched' 'resume' "${PROFILE[@]}" -o stopped.h5
    fails 'an unfinished record is not a record' 'resume' solve stopped.h5 --metric keydiff -o t.safetensors
    expect 0 'it goes on' "${PROFILE[@]}" -o stopped.h5 --resume
    same 'to the same bytes' whole.h5 stopped.h5
fi

# What the stop keeps of the prefill is used, and is refused where it is not whole.
kept=stopped.h5.parts/prefill-a.kept
for tenth in 3 5 2 7 4 6 1; do
    rm -rf stopped.h5 stopped.h5.parts
    milliseconds=$((took * tenth / 10))
    timeout --foreground -s TERM "$((milliseconds / 1000)).$(printf %03d $((milliseconds % 1000)))" \
        "$KVB" "${PROFILE[@]}" -o stopped.h5 --keep-after 0 2>err >out </dev/null
    kept=$(find stopped.h5.parts -name '*.kept' 2>/dev/null)
    [ -n "$kept" ] && break
done
if [ -n "$kept" ]; then ok 'a stop keeps the prefill'; else not_ok 'a stop keeps the prefill'; fi
says 'and says so' 'layers of its prefill are kept \([0-9.]+ MB\)' err
cp -r stopped.h5.parts saved.parts
expect 0 'it goes on with it' "${PROFILE[@]}" -o stopped.h5 --resume
if grep -q 'starts again' err; then not_ok 'which is used'; else ok 'which is used'; fi
same 'to the same bytes again' whole.h5 stopped.h5
if [ -e stopped.h5.parts ]; then not_ok 'and nothing is left'; else ok 'and nothing is left'; fi
rm -f stopped.h5
mv saved.parts stopped.h5.parts
printf x | dd of="$kept" bs=1 seek=$(($(stat -c %s "$kept") - 100)) conv=notrunc status=none
fails 'another seed is refused' 'seed' "${PROFILE[@]}" -o stopped.h5 --resume --seed 7
fails 'another precision is refused' 'compute' "${PROFILE[@]}" -o stopped.h5 --resume --compute bf16
expect 0 'a damaged one is not used' "${PROFILE[@]}" -o stopped.h5 --resume
says 'which is said' 'prefill-.*damaged.*starts again' err
same 'and changes nothing' whole.h5 stopped.h5
end
