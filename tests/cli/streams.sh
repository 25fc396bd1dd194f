#!/usr/bin/env bash
# Standard streams that are closed, and signals: no message gets into a data file, Ctrl-C ends a shell's loop.
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
tiny_inputs
TASK=(task tiny.gguf -k niah_single_1 -t 700 -c 1 --quiet)
expect 0 'samples of a task' "${TASK[@]}" --output whole.jsonl
expect 0 'profile' profile tiny.gguf calib.jsonl -o run.h5 --new-tokens 6 --ignore-eos --quiet
expect 0 'solve' solve run.h5 --metric keydiff -o whole.safetensors --quiet

# ---- Closed streams ----
# closed CODE NAME COMMAND WHOLE FILE: a shell runs the command, which includes redirections; FILE must then have the
# bytes of WHOLE.
closed() {
    CODE=0
    "$BASH" -c "$3" "$KVB" >out 2>err || CODE=$?
    ended "$1" "$2"
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
# after_one SIGNAL COMMAND...: runs the command and sends the signal once the first question is done.
after_one() {
    rm -rf k.h5 k.h5.parts
    interrupt "$1" 'ls k.h5.parts/question-*' "${@:2}"
}
# A shell makes background commands ignore SIGINT; env resets that.
after_one INT env --default-signal=INT "$KVB" "${LONG[@]}" -o k.h5
ended 130 'Ctrl-C ends as a signal does'
says 'and says that it stops' 'stopping' err
exists 'what is finished stays' "$(find k.h5.parts -name 'question-*' | head -n 1)"
expect 0 'and goes on' "${LONG[@]}" -o k.h5 --resume
after_one TERM env --default-signal=INT "$KVB" "${LONG[@]}" -o k.h5
ended 143 'so does a termination'
after_one HUP env --default-signal=HUP "$KVB" "${LONG[@]}" -o k.h5
ended 129 'and a terminal that is closed'
after_one INT env --ignore-signal=INT "$KVB" "${LONG[@]}" -o k.h5
ended 0 'a signal that was ignored stays so'

# ---- No room for outputs ----
CODE=0
(ulimit -f 1 && exec "$KVB" export whole.safetensors --format npy -o big.npy) >out 2>err || CODE=$?
ended 1 'a file that may not grow is an error'
says 'which names it' 'big.npy: .*File too large' err
CODE=0
"$KVB" inspect whole.safetensors >/dev/full 2>err || CODE=$?
ended 1 'a full device behind standard output is an error'
says 'with its reason' 'standard output: No space left on device' err
end
