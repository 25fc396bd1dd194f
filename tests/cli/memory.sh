#!/usr/bin/env bash
# How much memory a profile takes, limits on it, and contexts beyond the trained length. The tiny model was made for
# 4096 positions.
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
tiny_model tiny.gguf
# long_calib TOKENS QUESTIONS: prints calibration data with one context of token ids.
long_calib() {
    awk -v n="$1" -v q="$2" 'BEGIN {
        printf "{\"sample_id\":\"long\",\"context_ids\":["
        for (i = 0; i < n; i++) printf "%s%d", i ? "," : "", 3 + i * 7919 % 250
        printf "],\"question_ids\":["
        for (i = 0; i < q; i++) printf "%s[%d,6]", i ? "," : "", 5 + i % 200
        print "]}"
    }'
}
long_calib 4000 300 >long.jsonl
long_calib 4090 1 >edge.jsonl
long_calib 5000 1 >beyond.jsonl
PROFILE=(profile tiny.gguf long.jsonl --new-tokens 5 --ignore-eos --metric keydiff)

expect 0 'as much memory as it likes' "${PROFILE[@]}" -o free.h5
says 'the peak and what was planned are told' 'peak memory [0-9.]+ GiB \(planned [0-9.]+\)' err
kvb "${PROFILE[@]}" --plan
says 'the plan tells its memory' '^memory +[0-9.]+ GiB at its peak' out
says 'all questions at a time' '^batch +300 questions' out
# The program itself takes more under sanitisers: allow a little more than it takes with one question at a time.
kvb "${PROFILE[@]}" --plan --batch 1
peak=$(awk '/^memory/ { print int($2 * 1024) }' out)
kvb "${PROFILE[@]}" --plan --memory "$((peak + 8))MiB"
batch=$(awk '/^batch/ { print $2 }' out)
holds "less memory, smaller batches ($batch)" [ "$((batch >= 1 && batch < 300))" = 1 ]
expect 0 'little memory' "${PROFILE[@]}" -o little.h5 --memory "$((peak + 8))MiB"
same 'changes no number' free.h5 little.h5
fails 'the program does not fit' '--memory 1MB: this program alone takes' "${PROFILE[@]}" -o x.h5 --memory 1MB
fails 'not one question fits' 'for 1 question at a time over 4000 tokens, but .* use .*--max-tokens' "${PROFILE[@]}" \
    -o x.h5 --memory "$((peak - 4))MiB"
fails 'the batch that was asked for does not fit' '300 questions at a time' "${PROFILE[@]}" -o x.h5 \
    --memory "$((peak + 8))MiB" --batch 300
misused 'no size' 'expected a size' "${PROFILE[@]}" --plan --memory much

fails 'a context longer than the model was trained for' '5000 tokens, expected 1 to 4096.*--beyond-trained' profile \
    tiny.gguf beyond.jsonl -o x.h5
expect 0 'allowed with an option' profile tiny.gguf beyond.jsonl -o x.h5 --beyond-trained --new-tokens 4 --quiet
says 'and a warning' 'warning: 1 of 1 contexts reach beyond the 4096 positions' err
expect 0 'a context that ends within, and its answer beyond' profile tiny.gguf edge.jsonl -o y.h5 --new-tokens 20 \
    --quiet
says 'is a warning' 'warning: 1 of 1 contexts reach beyond the 4096 positions' err

expect 0 'one layer of two' "${PROFILE[@]}" -o layer.h5 --layers 1 --questions 1
says 'is a warning too' 'warning: --layers 1' err
kvb inspect layer.h5
says 'and shows in the record' 'n_layers: 1' out

# Many short contexts: the record's description takes more than its arrays.
awk 'BEGIN {
    line = "{\"sample_id\":\"c%d\",\"context_ids\":[3,4,5,6,7,8,9,10],\"question_ids\":[[%d]]}\n"
    for (i = 0; i < 200; i++) printf line, i, 3 + i % 40
}' >many.jsonl
MANY=(profile tiny.gguf many.jsonl --new-tokens 2 --ignore-eos --metric keydiff --threads 1)
kvb "${MANY[@]}" --plan
says 'the plan counts the index of many contexts' 'index 0.00[5-9]' out
kvb "${MANY[@]}" -o many.h5
if awk '/peak memory/ { for (i = 1; i < NF; i++) if ($i == "memory") peak = $(i + 1); sub(/.*planned /, ""); found = 1
    exit !(peak <= ($0 + 0) * 1.05) } END { if (!found) exit 1 }' err; then
    ok 'and it does not take more'
elif ldd "$KVB" | grep -q libasan; then
    skip 'what it takes: a sanitiser takes more'
else
    not_ok "and it does not take more ($(grep 'peak memory' err))"
fi

fails 'more layers than there are' 'has 2 layers, 3 were asked for' "${PROFILE[@]}" -o x.h5 --layers 3 --force
# OpenMP's library accepts any number of threads, until its stack overflows.
OMP_NUM_THREADS=100000 kvb inspect missing.safetensors
says 'a hundred thousand threads: said and bounded' 'OMP_NUM_THREADS: 100000 threads; 1024 are taken' err
ended 1 'and the command goes on'

# The math library ends the program if address space runs out: too small a limit is refused before the work.
# Not tested with sanitisers, which reserve terabytes of it.
if ! grep -q __asan_init "$KVB"; then
    head -c 2000 "$KVB_ROOT/LICENSE" >text.txt
    wrong='' refused=0 went=0
    for limit in $(seq 70 14 420); do
        (
            ulimit -v $((limit * 1024))
            "$KVB" eval tiny.gguf text.txt -m keydiff -a uniform -r 0.5 -t 40 -n 4 --quiet >out 2>err
        ) 2>/dev/null
        CODE=$?
        if [ "$CODE" = 0 ]; then went=$((went + 1))
        elif [ "$CODE" = 1 ] && grep -q 'address space is limited' err; then refused=$((refused + 1))
        elif [ "$CODE" != 127 ]; then wrong="$wrong $limit:$CODE"; fi # 127: the loader found no room for libraries
    done
    if [ -z "$wrong" ] && [ $refused -gt 0 ] && [ $went -gt 0 ]; then ok 'limits of the address space: done or refused'
    else not_ok "limits of the address space ($refused refused, $went done): exit statuses$wrong"; fi
fi
end
