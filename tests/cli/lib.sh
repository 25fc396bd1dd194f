# Sourced by every tests/cli/*.sh. Each check prints one line, "ok - what" or "not ok - what"; tests/run.sh counts them.
# Run one script alone with: KVB_BUILD=$PWD/build bash tests/cli/help.sh
# shellcheck shell=bash
set -u

KVB_ROOT=${KVB_ROOT:-$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)}
KVB_BUILD=${KVB_BUILD:-$KVB_ROOT/build}
PYTHON=${PYTHON:-python3}
KVB=$KVB_BUILD/kvbudget
T=$(mktemp -d "${TMPDIR:-/tmp}/kvbudget-cli.XXXXXX") || exit 1
FAILED=0
finish() {
    rm -rf "$T"
}
trap finish EXIT
cd "$T" || exit 1

ok() { echo "ok - $1"; }
not_ok() {
    echo "not ok - $1"
    FAILED=$((FAILED + 1))
}
skip() { echo "skip - $1"; }
end() {
    echo "end of tests"
    [ "$FAILED" = 0 ]
    exit
}

# kvb ARGUMENT...: runs the program; its streams go to out and err, its exit status to CODE.
kvb() {
    CODE=0
    "$KVB" "$@" >out 2>err </dev/null || CODE=$?
}

# Shows what the last kvb printed, after a check that failed.
show() {
    echo "    exit status $CODE"
    head -n 20 out | sed 's/^/    out: /'
    head -n 20 err | sed 's/^/    err: /'
}

# expect CODE NAME ARGUMENT...: the program must end with this status. A sanitiser's finding never counts as the
# expected failure.
expect() {
    local code=$1 name=$2
    shift 2
    kvb "$@"
    ended "$code" "$name"
}
# ended CODE NAME: the same check for the command that ran last.
ended() {
    if [ "$CODE" = "$1" ] && ! grep -q -e 'Sanitizer' -e 'runtime error:' err; then ok "$2"; else
        not_ok "$2 (expected exit status $1)"
        show
        return 1
    fi
}

# fails NAME PATTERN ARGUMENT...: exit status 1, one line on stderr that matches, nothing on stdout, no temporary file
# left.
fails() { refused 1 "$@"; }
# misused NAME PATTERN ARGUMENT...: exit status 2 and a hint how to get help.
misused() { refused 2 "$@"; }
refused() {
    local code=$1 name=$2 pattern=$3
    shift 3
    expect "$code" "$name" "$@" || return
    if ! grep -Eq -- "$pattern" err; then
        not_ok "$name: the message matches '$pattern'"
        show
    elif [ "$code" = 2 ] && ! grep -q "kvbudget help" err; then
        not_ok "$name: the message says where the help is"
        show
    elif [ -n "$(find . -name '*.partial')" ]; then
        not_ok "$name: leaves no temporary file"
    else
        ok "$name: says why"
    fi
}

# says NAME PATTERN [FILE]: the output of the last kvb (or FILE) has a line that matches.
says() {
    if grep -Eq -- "$2" "${3:-out}"; then ok "$1"; else
        not_ok "$1 (no line matches '$2')"
        head -n 20 "${3:-out}" | sed 's/^/    /'
    fi
}

# lacks NAME PATTERN FILE: no line matches.
lacks() { if grep -Eq -- "$2" "$3"; then not_ok "$1 ($(grep -E -m 1 -- "$2" "$3"))"; else ok "$1"; fi; }

# same NAME FILE FILE: equal bytes.
same() { if cmp -s "$2" "$3"; then ok "$1"; else not_ok "$1 ($(cmp "$2" "$3" 2>&1 | head -n 1))"; fi; }
# same_results NAME FILE FILE: equal JSON results, apart from the arguments.
same_results() {
    holds "$1" "$PYTHON" -c '
import json, sys
a, b = (json.load(open(n, encoding="utf-8")) for n in sys.argv[1:])
sys.exit(not (a.pop("arguments") and b.pop("arguments") and a == b))' "$2" "$3"
}
exists() { if [ -s "$2" ]; then ok "$1"; else not_ok "$1 ($2 is missing or empty)"; fi; }

# json NAME FILE [EXPRESSION]: FILE is JSON, and the Python expression over its content `j` is true. `rows` gives the
# rows of results that have these values: rows(allocator="uniform").
json() {
    holds "$1" "$PYTHON" -c '
import json, sys
j = json.load(open(sys.argv[1], encoding="utf-8"))
def rows(**cells): return [r for r in j["rows"] if all(r.get(k) == v for k, v in cells.items())]
sys.exit(0 if eval("(" + sys.argv[2] + ")") else " ".join(sys.argv[1:]))' "$2" "${3:-True}"
}

# check NAME CHECK ARGUMENT...: runs a check of check.py, which reads files independently of kvbudget.
check() {
    holds "$1" "$PYTHON" "$KVB_ROOT/tests/cli/check.py" "${@:2}"
}

# killed_after MILLISECONDS COMMAND...: kills the command after that time, and waits until it is gone. Without
# --foreground, `timeout -s KILL` kills itself as well and ends while the command is still dying and holds its locks (on
# a busy machine for up to a tenth of a second): the next command would find the record in use.
# --preserve-status: a command that ends by itself just then has its own status, not 124.
killed_after() {
    local milliseconds=$1
    shift
    timeout --foreground --preserve-status -s KILL \
        "$((milliseconds / 1000)).$(printf %03d $((milliseconds % 1000)))" "$@"
}

# interrupt SIGNAL WHEN COMMAND...: runs the command and sends the signal as soon as the shell command WHEN succeeds;
# its exit status goes to CODE. There is no time limit, and the command has a lower priority than this loop: on a busy
# machine it could otherwise end before WHEN is tried again.
interrupt() {
    local signal=$1 when=$2 pid
    shift 2
    CODE=0
    rm -f out err # WHEN must not match the output of an earlier command
    nice -n 5 "$@" >out 2>err </dev/null &
    pid=$!
    until eval "$when" >/dev/null 2>&1; do
        kill -0 $pid 2>/dev/null || break
        sleep 0.05
    done
    kill "-$signal" $pid 2>/dev/null
    wait $pid || CODE=$?
}

# tiny_model FILE: writes the generated two-layer model.
tiny_model() { "$KVB_BUILD/tests/tiny_model" "$1" >/dev/null; }

# tiny_texts COUNT LINES: writes text0.txt, text1.txt, ... of that many lines each.
tiny_texts() {
    "$PYTHON" -c '
import sys
for k in range(int(sys.argv[1])):
    print("\n".join(f"line {i * (k + 3) % 101} of text {k} says {i * i % (97 + k)}" for i in range(int(sys.argv[2]))),
        file=open(f"text{k}.txt", "w"))' "$1" "$2"
}

# tiny_record OPTION...: makes the inputs of tiny_inputs and run.h5, their profile with the metric keydiff.
tiny_record() {
    tiny_inputs
    expect 0 'profile' profile tiny.gguf calib.jsonl -o run.h5 --quiet --new-tokens 8 --ignore-eos --metric keydiff \
        "${@:1}"
}

# tiny_table OPTION...: makes such a record, and solves the table of keydiff from it.
tiny_table() {
    tiny_record "$@"
    expect 0 'solve' solve run.h5 --metric keydiff -o table.safetensors --quiet
}

# sample_lines NAME COUNT: prints calibration data with COUNT texts of 40 lines, called NAME0, NAME1, ...
sample_lines() {
    "$PYTHON" -c '
import json, sys
for k in range(int(sys.argv[2])):
    text = "\n".join(f"line {i * (k + 3) % 101} of text {k} says {i * i % (97 + k)}" for i in range(40))
    print(json.dumps({"sample_id": f"{sys.argv[1]}{k}", "context": text, "questions": ["?"]}))' "$@"
}

# default_model WHAT: sets MODEL to the default model's file; if it cannot be fetched, skips WHAT and ends the test.
default_model() {
    if MODEL=$(cd "$KVB_ROOT" && tools/scripts/get-model.sh 2>"$T/get-model.err") && [ -s "$MODEL" ]; then
        case $MODEL in /*) ;; *) MODEL=$KVB_ROOT/$MODEL ;; esac
    else
        cat get-model.err
        skip "the default model could not be fetched: $1"
        end
    fi
}

# holds NAME COMMAND...: the command succeeds; its output goes to the file held, and is shown if it fails.
holds() {
    local name=$1
    shift
    if "$@" >held 2>&1; then ok "$name"; else
        not_ok "$name"
        tail -n 20 held | sed 's/^/    /'
        return 1
    fi
}
# absent NAME FILE: there is no such file or folder.
absent() { if [ ! -e "$2" ]; then ok "$1"; else not_ok "$1 ($2 is there)"; fi; }
# empty NAME FILE: the file, or pipe, has no content.
empty() {
    local found
    found=$(head -c 200 "$2" && echo .)
    if [ "$found" = . ]; then ok "$1"; else not_ok "$1 (${found%.})"; fi
}
# differ NAME FILE FILE: both can be read, and their bytes differ.
differ() {
    local code=0
    cmp -s "$2" "$3" || code=$?
    if [ $code = 1 ]; then ok "$1"; else not_ok "$1"; fi
}

# id_lines FILE FIRST COUNT: evaluates each line of standard input as a Python expression and writes its JSON to FILE;
# ids(n) returns n pseudorandom token ids from FIRST to FIRST + COUNT - 1.
id_lines() {
    "$PYTHON" -c '
import json, sys
first, count, state = int(sys.argv[1]), int(sys.argv[2]), 1
def ids(n):
    global state
    out = []
    for _ in range(n):
        state = state * 1103515245 + 12345 & 0x7FFFFFFF
        out.append(first + (state >> 16) % count)
    return out
for line in sys.stdin:
    print(json.dumps(eval(line)))' "$2" "$3" >"$1"
}

# tiny_calib FILE: writes two contexts of token ids that any model has, one with answers.
tiny_calib() {
    id_lines "$1" 3 40 <<'LINES_END'
{"sample_id": "long", "context_ids": ids(230), "question_ids": [ids(5), ids(9), ids(7)]}
{"sample_id": "short", "context_ids": ids(150), "question_ids": [ids(6), ids(4)], "answer_ids": [ids(8), ids(12)]}
LINES_END
}
tiny_inputs() {
    tiny_model tiny.gguf
    tiny_calib calib.jsonl
}
