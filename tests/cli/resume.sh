#!/usr/bin/env bash
# A profile that is killed again and again, at any moment, ends with the same bytes as an undisturbed one.
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
tiny_inputs
PROFILE=(profile tiny.gguf calib.jsonl --new-tokens 64 --ignore-eos --batch 1)

start=$(date +%s%N)
expect 0 'undisturbed' "${PROFILE[@]}" -o whole.h5
took=$((($(date +%s%N) - start) / 1000000))

# Each attempt may run a little longer than the last, in tenths of the whole time, so that kills fall everywhere.
lives=0
for tenth in 1 2 3 4 5 6 7 8 9 10 11 12 14 16 20 30 50 100 400 0; do # 0: for as long as it takes
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
absent 'nothing else is left' killed.h5.parts

# A stop by Ctrl-C or SIGTERM is clean and says how to go on.
for stop in 'INT 3' 'TERM 5'; do
    read -r signal tenth <<<"$stop"
    rm -rf stopped.h5 stopped.h5.parts
    printf -v seconds '%d.%03d' $((took * tenth / 10000)) $((took * tenth / 10 % 1000))
    code=0
    timeout --foreground --preserve-status -s "$signal" "$seconds" "$KVB" "${PROFILE[@]}" -o stopped.h5 2>err >out \
        </dev/null || code=$?
    if [ -e stopped.h5 ] || [ ! -e stopped.h5.parts ]; then
        skip "$signal: the run was over before, or had not begun"
        continue
    fi
    expected=$((128 + $(kill -l "$signal")))
    if [ "$code" = $expected ]; then ok "$signal ends it"; else not_ok "$signal ends it: status $code"; fi
    says "$signal says that --resume goes on" '--resume' err
    fails "$signal: without --resume the parts are not touched" 'resume' "${PROFILE[@]}" -o stopped.h5
    fails "$signal: an unfinished record is not a record" 'resume' solve stopped.h5 --metric keydiff -o t.safetensors
    fails "$signal: another seed is refused" 'seed' "${PROFILE[@]}" -o stopped.h5 --resume --seed 7
    fails "$signal: another precision is refused" 'compute' "${PROFILE[@]}" -o stopped.h5 --resume --compute bf16
    expect 0 "$signal: it goes on" "${PROFILE[@]}" -o stopped.h5 --resume
    same "$signal: to the same bytes" whole.h5 stopped.h5
    absent "$signal: nothing is left" stopped.h5.parts
done
end
