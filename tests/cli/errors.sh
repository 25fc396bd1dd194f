#!/usr/bin/env bash
# Wrong files: missing, empty, of another kind, cut short, damaged, not writable. The message names the file; nothing
# half-written is left; sanitisers report nothing.
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
tiny_table --metric snapkv:kvpress
expect 0 'export' export table.safetensors --format npy -o table.npy
: >empty
mkdir folder
head -c 4096 /dev/zero >zeros

# commands_for KIND: prints every command that reads such a file, one per line, with FILE for its name.
commands_for() {
    case $1 in
    gguf) printf '%s\n' "profile FILE calib.jsonl -o x.h5 --quiet" "calib FILE calib.jsonl -o x.jsonl" ;;
    jsonl) printf '%s\n' "profile tiny.gguf FILE -o x.h5 --quiet" "calib tiny.gguf FILE -o x.jsonl" ;;
    txt) printf '%s\n' "calib tiny.gguf FILE -o x.jsonl --lines 1" ;;
    h5) printf '%s\n' "inspect FILE" "solve FILE --metric keydiff -o x.safetensors" \
        "export FILE --format lukv-steps -o x.steps" "report table.safetensors --record FILE -o x.html" ;;
    safetensors) printf '%s\n' "inspect FILE" "budgets FILE --ratio 0.5 --tokens 100" \
        "export FILE --format npy -o x.npy" "report FILE -o x.html" ;;
    json) printf '%s\n' "report table.safetensors --results FILE -o x.html" ;;
    esac
}

for kind in gguf jsonl txt h5 safetensors json; do
    while read -r line; do
        for file in missing.$kind empty zeros folder; do
            # shellcheck disable=SC2086 # words of a command
            fails "${line/FILE/$file}" "$file" ${line/FILE/$file}
        done
    done < <(commands_for $kind)
done

# Files of another kind, for instance swapped operands: the message says which kind was found.
kind_of() {
    case $1 in
    *.gguf) echo 'a model' ;;
    *.h5) echo 'a record' ;;
    *.safetensors) echo 'safetensors' ;;
    *.npy) echo 'an array' ;;
    esac
}
while read -r own line; do
    for file in tiny.gguf run.h5 table.safetensors table.npy; do
        [ "$file" = "$own" ] && continue
        # shellcheck disable=SC2086 # words of a command
        fails "$file in ${line}" "$file: .*found $(kind_of $file)" ${line/FILE/$file}
    done
done <<'END'
tiny.gguf profile FILE calib.jsonl -o x.h5 --quiet
calib.jsonl profile tiny.gguf FILE -o x.h5 --quiet
calib.jsonl calib tiny.gguf FILE -o x.jsonl --lines 1
tiny.gguf calib FILE calib.jsonl -o x.jsonl
run.h5 solve FILE --metric keydiff -o x.safetensors
table.safetensors budgets FILE --ratio 0.5 --tokens 100
END

# Output that cannot be written.
fails 'profile into a folder that is not there' 'no/such' profile tiny.gguf calib.jsonl -o no/such/run.h5
fails 'solve onto a device' '/dev/full' solve run.h5 --metric keydiff -o /dev/full

# A full disk, imitated by a limit on the size of files: the old file is unchanged.
cp table.safetensors old.safetensors
(
    ulimit -f 1 # blocks of 1024 bytes; if the signal is ignored, write fails instead
    trap '' XFSZ
    "$KVB" solve run.h5 --metric keydiff -o old.safetensors >out 2>err
    echo $? >code
)
holds 'a file size limit is an error' [ "$(cat code)" = 1 ]
same 'and the old table is untouched' table.safetensors old.safetensors

# Names of metrics that need care in exports: two that give the same file name; quotes in a line of Python.
expect 0 'export steps' export run.h5 --format lukv-steps -o steps
sed 's/"snapkv:kvpress"/"a:b"/; s/"keydiff"/"a_b"/' steps/kvbudget.json >side.json
cp side.json steps/kvbudget.json
expect 0 'a record of two metrics a:b and a_b' import steps -o two.h5 --force
for wrong in '"x"' -1 1.5 1e30 null; do
    expect 0 "a record that protects $wrong" import steps -o bad.h5 --force \
        --attribute "metrics={\"a_b\":{\"protect_sink\":$wrong}}"
    fails "protects $wrong" 'metric a_b: protect_sink: expected a whole number' solve bad.h5 -m a_b -o bad.safetensors
done
expect 0 'a record with a key twice' import steps -o bad.h5 --force \
    --attribute 'metrics={"a_b":{"protect_sink":4,"protect_sink":5}}'
fails 'a key twice' '"protect_sink" occurs twice' solve bad.h5 -m a_b -o bad.safetensors
mkdir tables
fails 'two metrics in one file' 'a_b.* written to the same file' solve two.h5 -m all -o tables
holds 'and none is written' [ -z "$(ls tables)" ]
expect 0 'one after the other' solve two.h5 -m a:b -o 'tables/it"s.safetensors'
expect 0 'export into a name with quotes' export 'tables/it"s.safetensors' --format npy -o 'it"s a \ name.npy'
json 'the line that loads it is Python' 'it"s a \ name.json' \
    '[n.value for n in __import__("ast").walk(__import__("ast").parse(j["kvpress"]["load"]))
    if getattr(n, "value", 0) == j["npy"]]'

# A record of the first format has no checksums, and solve says so.
fails 'a record of format version 1' 'record format 1, this program reads 2; profile again' \
    solve "$KVB_ROOT/tests/fuzz/corpus/record/old_version.h5" -m keydiff

# Control characters and invalid UTF-8 do not get into messages and JSON.
odd=$(printf 'x\033[2J\377.h5')
fails 'a name with an escape sequence' 'x.\[2J..h5' inspect "$odd"
lacks 'no escape sequence is printed' "$(printf '\033')" err
cp table.safetensors "$odd"
expect 0 'JSON of such a file' inspect --json "$odd"
json 'it is JSON' out '"[2J" in j["path"]'
long=$(printf 'a%.0s' $(seq 200))/$(printf 'b%.0s' $(seq 200))/$(printf 'c%.0s' $(seq 200)).h5
fails 'a path of 600 bytes' '^kvbudget inspect: aaa.* \.\.\. .*ccc\.h5: .*No such file' inspect "$long"

# With --shard a process works alone, whatever a launcher's variables say, in builds with and without MPI.
CODE=0
PMI_RANK=1 PMI_SIZE=4 "$KVB" profile tiny.gguf calib.jsonl -o shard.h5 --new-tokens 6 --ignore-eos --quiet --shard 1/2 \
    >out 2>err </dev/null || CODE=$?
ended 0 'a shard under srun'

# Started through the loader, as some wrappers do: /proc/self/exe is then the loader.
loader=$(ldd "$KVB" | awk '/ld-linux/ { print $1 }')
if [ -n "$loader" ] && ! grep -q __asan_init "$KVB"; then
    CODE=0
    env -u OMP_WAIT_POLICY -u GOMP_SPINCOUNT "$loader" "$KVB" profile tiny.gguf calib.jsonl -n 4 --quiet \
        -o by_loader.h5 >out 2>err </dev/null || CODE=$?
    ended 0 'started by the loader'
    exists 'with its output' by_loader.h5
fi

# damage FILE KIND: copies that are cut short must be refused; copies with a flipped bit must be refused or read, and
# nothing may crash.
damage() {
    local file=$1 kind=$2 line copy bad=0 runs=0
    rm -f cut.* flip.*
    "$PYTHON" - "$file" "$kind" <<'PYTHON_END'
import sys
data, kind = open(sys.argv[1], "rb").read(), sys.argv[2]
size, n = len(data), 5  # readers' unit tests try every bit; this tests what commands do when a reader refuses
for i in range(n):  # half of the places are near the start, where the headers are
    cut = size * i // n if i % 2 else i * i * 7 % size
    open("cut.%d.%s" % (i, kind), "wb").write(data[:cut])
    at = (size - 1) * i // n if i % 2 else i * 37 % min(size, 400)
    open("flip.%d.%s" % (i, kind), "wb").write(data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1:])
PYTHON_END
    while read -r line; do
        for copy in cut.* flip.*; do
            # shellcheck disable=SC2086 # words of a command
            kvb ${line/FILE/$copy}
            runs=$((runs + 1))
            rm -rf x.*
            # A flipped bit in a number, and a cut between two lines of JSONL, leave a valid file.
            case $CODE,$copy in
            0,flip.* | 0,*.jsonl) ;;
            1,*) if grep -q "$copy" err && ! grep -q Sanitizer err; then continue; fi ;;&
            *)
                bad=$((bad + 1))
                echo "    ${line/FILE/$copy of $file}"
                show
                ;;
            esac
        done
    done < <(commands_for "$kind")
    if [ "$bad" = 0 ] && [ "$runs" -gt 0 ]; then ok "$runs damaged copies of $file are refused or harmless"; else \
        not_ok "$bad of $runs damaged copies of $file"; fi
}
damage tiny.gguf gguf
damage calib.jsonl jsonl
damage run.h5 h5
damage table.safetensors safetensors

# Impossible numbers: the message names the right option and its bounds.
misused 'a context that is too long' "--tokens: expected a whole number from 1 to 4294967295, found '4294967296'" \
    solve run.h5 --metric keydiff --bytes 1MB --tokens 4294967296
expect 0 'no number of questions is all of them' solve run.h5 --metric keydiff -q 0 --quiet
misused 'a context of nothing' "--tokens: expected a whole number from 1 to 4294967295, found '0'" \
    budgets table.safetensors -r 0.5 -t 0
CODE=0
(ulimit -n 4 && exec "$KVB" profile tiny.gguf calib.jsonl -o x.h5 --quiet) >out 2>err || CODE=$?
ended 1 'too few open files'
lacks 'and says which' '\(null\)' err
end
