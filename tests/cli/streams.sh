#!/usr/bin/env bash
# Standard streams that are closed, and signals: no message gets into a data file, Ctrl-C ends a shell's loop.
# shellcheck source=tests/cli/lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
tiny_model tiny.gguf
tiny_calib calib.jsonl
TASK=(task tiny.gguf -k niah_single_1 -t 700 -c 1 --quiet)
expect 0 'samples of a task' "${TASK[@]}" --output whole.jsonl
expect 0 'profile' profile tiny.gguf calib.jsonl -o run.h5 --new-tokens 6 --ignore-eos --quiet
expect 0 'solve' solve run.h5 --metric keydiff -o whole.safetensors --quiet

# ---- Closed streams ----
# closed CODE NAME COMMAND WHOLE FILE: a command with the redirections in it, run by a shell; FILE must then have the
# bytes of WHOLE.
closed() {
    CODE=0
    "$BASH" -c "$3" "$KVB" >out 2>err || CODE=$?
    if [ "$CODE" = "$1" ]; then ok "$2"; else
        not_ok "$2 (expected exit status $1)"
        show
    fi
    same "$2: the file is whole" "$4" "$5"
    rm -f "$5"
}
closed 1 'answers without standard output' \
    "'$KVB' task tiny.gguf -k niah_single_1 -t 700 -c 1 --output s.jsonl --answer >&-" whole.jsonl s.jsonl
closed 0 'no standard error' \
    "'$KVB' task tiny.gguf -k niah_single_1 -t 700 -c 1 --output s.jsonl 2>&-" whole.jsonl s.jsonl
closed 0 'no standard input' "'$KVB' ${TASK[*]} --output s.jsonl <&-" whole.jsonl s.jsonl
closed 0 'no stream at all' "'$KVB' ${TASK[*]} --output s.jsonl <&- >&- 2>&-" whole.jsonl s.jsonl
closed 1 'no standard output, and something to say' \
    "'$KVB' solve run.h5 --metric keydiff -o t.safetensors >&-" whole.safetensors t.safetensors
says 'and why that failed' 'standard output: ' err

# ---- Signals ----
LONG=(profile tiny.gguf calib.jsonl --new-tokens 600 --ignore-eos --quiet --batch 1)
# interrupt SIGNAL COMMAND...: sends it once the first question is done; how it ended goes to CODE.
interrupt() {
    local signal=$1 pid
    shift
    rm -rf k.h5 k.h5.parts
    CODE=0
    "$@" >out 2>err </dev/null &
    pid=$!
    for _ in $(seq 6000); do
        ls k.h5.parts/question-* >/dev/null 2>&1 && break
        sleep 0.02
    done
    kill "-$signal" "$pid"
    wait "$pid" 2>/dev/null || CODE=$?
}
ended() { if [ "$CODE" = "$1" ] && ! grep -q -e 'Sanitizer' -e 'runtime error:' err; then ok "$2"; else
    not_ok "$2 (expected exit status $1)"
    show
fi; }
# A shell lets what it starts with & ignore SIGINT; env sets it back.
interrupt INT env --default-signal=INT "$KVB" "${LONG[@]}" -o k.h5
ended 130 'Ctrl-C ends as a signal does'
says 'and says that it stops' 'stopping' err
exists 'what is finished stays' "$(find k.h5.parts -name 'question-*' | head -n 1)"
expect 0 'and goes on' "${LONG[@]}" -o k.h5 --resume
interrupt TERM env --default-signal=INT "$KVB" "${LONG[@]}" -o k.h5
ended 143 'so does a termination'
interrupt HUP env --default-signal=HUP "$KVB" "${LONG[@]}" -o k.h5
ended 129 'and a terminal that is closed'
interrupt INT env --ignore-signal=INT "$KVB" "${LONG[@]}" -o k.h5
ended 0 'a signal that was ignored stays so'

# ---- Outputs that find no room ----
CODE=0
(ulimit -f 1 && exec "$KVB" export whole.safetensors --format npy -o big.npy) >out 2>err || CODE=$?
ended 1 'a file that may not grow is an error'
says 'which names it' 'big.npy: .*File too large' err
CODE=0
"$KVB" tokenize tiny.gguf calib.jsonl >/dev/full 2>err || CODE=$?
ended 1 'a full device behind standard output is an error'
says 'with its reason' 'standard output: No space left on device' err
end
