#!/usr/bin/env bash
# Wrong files: missing, empty, of another kind, cut short, damaged, not writable. The message names the file; nothing half-written
# is left; no sanitiser has anything to say.
# shellcheck source=tests/cli/lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
tiny_model tiny.gguf
tiny_calib calib.jsonl
expect 0 'profile' profile tiny.gguf calib.jsonl -o run.h5 --new-tokens 6 --ignore-eos --quiet
expect 0 'solve' solve run.h5 --metric keydiff -o table.safetensors
expect 0 'export' export table.safetensors --format npy -o table.npy
: >empty
mkdir folder
head -c 4096 /dev/zero >zeros

# try_all FILE: every command that reads such a file, with FILE in its place. Sets COMMANDS, one command per line.
commands_for() {
    case $1 in
    gguf) printf '%s\n' "inspect FILE" "profile FILE calib.jsonl -o x.h5 --quiet" "tokenize FILE calib.jsonl" "logits FILE calib.jsonl -o x.npy" ;;
    jsonl) printf '%s\n' "profile tiny.gguf FILE -o x.h5 --quiet" ;;
    h5) printf '%s\n' "inspect FILE" "solve FILE --metric keydiff -o x.safetensors" "export FILE --format lukv-steps -o x.steps" ;;
    safetensors) printf '%s\n' "inspect FILE" "budgets FILE --ratio 0.5 --tokens 100" "plot FILE -o x.svg" "export FILE --format npy -o x.npy" ;;
    npy) printf '%s\n' "inspect FILE" ;;
    esac
}

for kind in gguf jsonl h5 safetensors npy; do
    while read -r line; do
        for file in missing.$kind empty zeros folder; do
            # shellcheck disable=SC2086 # words of a command
            fails "${line/FILE/$file}" "$file" ${line/FILE/$file}
        done
    done < <(commands_for $kind)
done

# Output that cannot be written.
fails 'profile into a folder that is not there' 'no/such' profile tiny.gguf calib.jsonl -o no/such/run.h5
fails 'solve into a folder that is not there' 'no/such' solve run.h5 --metric keydiff -o no/such/t.safetensors
fails 'plot into a folder that is not there' 'no/such' plot table.safetensors -o no/such/p.svg
fails 'export into a folder that is not there' 'no/such' export table.safetensors --format npy -o no/such/t.npy
fails 'solve onto a device' '/dev/full' solve run.h5 --metric keydiff -o /dev/full

# A full disk: the old file stays as it was. Needs its own small file system, or a limit on the size of files.
cp table.safetensors old.safetensors
(
    ulimit -f 1 # blocks of 1024 bytes; the signal becomes an error where it is ignored
    trap '' XFSZ
    "$KVB" solve run.h5 --metric keydiff -o old.safetensors >out 2>err
    echo $? >code
)
if [ "$(cat code)" = 1 ]; then ok 'a file size limit is an error'; else not_ok 'a file size limit is an error'; fi
same 'and the old table is untouched' table.safetensors old.safetensors

# damage FILE KIND: copies that are cut short must be refused; copies with flipped bits must be refused or read, never worse.
damage() {
    local file=$1 kind=$2 size i cut flip line bad=0 runs=0
    size=$(stat -c %s "$file")
    while read -r line; do
        for i in 1 2 3 4 5 6 7 8 9 10 11 12 13 14; do
            # Half of the places near the front, where the headers are.
            if [ $((i % 2)) = 0 ]; then cut=$((size * i / 16)); else cut=$((i * i * 5 % size)); fi
            head -c "$cut" "$file" >"cut.$kind"
            # shellcheck disable=SC2086
            kvb ${line/FILE/cut.$kind}
            runs=$((runs + 1))
            # A cut between two lines of JSONL leaves a valid file.
            if { [ "$CODE" != 1 ] && ! { [ "$kind" = jsonl ] && [ "$CODE" = 0 ]; }; } || grep -q Sanitizer err || { [ "$CODE" = 1 ] && ! grep -q "cut.$kind" err; }; then
                bad=$((bad + 1))
                echo "    ${line/FILE/$file} cut to $cut bytes"
                show
            fi
            flip=$((i % 2 ? i * 37 % (size < 400 ? size : 400) : (size - 1) * i / 14))
            "$PYTHON" -c 'import sys; b = bytearray(open(sys.argv[1], "rb").read()); b[int(sys.argv[2])] ^= 1 << int(sys.argv[2]) % 8
open(sys.argv[3], "wb").write(b)' "$file" "$flip" "flip.$kind"
            # shellcheck disable=SC2086
            kvb ${line/FILE/flip.$kind}
            runs=$((runs + 1))
            if [ "$CODE" -gt 1 ] || grep -q Sanitizer err; then
                bad=$((bad + 1))
                echo "    ${line/FILE/$file} with a bit flipped in byte $flip"
                show
            fi
            rm -rf x.*
        done
    done < <(commands_for "$kind")
    if [ "$bad" = 0 ]; then ok "$runs damaged copies of $file are refused or harmless"; else not_ok "$bad of $runs damaged copies of $file"; fi
}
damage tiny.gguf gguf
damage calib.jsonl jsonl
damage run.h5 h5
damage table.safetensors safetensors
damage table.npy npy
end
