#!/usr/bin/env bash
# Every command with one allocation that fails, at sampled points (WALK=--all: at every one). If it succeeds, it has the
# same output; otherwise it says that memory ran out, calls nothing damaged, leaves nothing half-written, and loses
# nothing.
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
if ldd "$KVB" | grep -q -e libasan -e libtsan; then
    skip 'failing allocations: the sanitiser has a malloc of its own'
    end
fi
CC=${CC:-gcc}
# shellcheck disable=SC2086 # words of a command
holds 'the shim is built' $CC -shared -fPIC -O1 -D_GNU_SOURCE -o fail_malloc.so \
    "$KVB_ROOT/tests/faults/fail_malloc.c" -ldl || end
mkdir inputs
cd inputs || exit 1
tiny_inputs
head -c 3000 "$KVB_ROOT/LICENSE" >text.txt
PROFILE=(profile tiny.gguf calib.jsonl -n 4 --ignore-eos -q 1 --quiet --threads 1 -m keydiff -m snapkv)
expect 0 'a record' "${PROFILE[@]}" -o run.h5
# The parts of a run that was killed after all parts were written, before the record was assembled.
kill_at() { FAULT_DIR=$PWD LD_PRELOAD=$KVB_BUILD/tests/fault_shim.so "$@" "$KVB" "${PROFILE[@]}" -o killed.h5; }
kill_at env FAULT_LOG=calls >/dev/null 2>&1
rm -rf killed.h5*
at=$(grep -m 1 -E ' open /killed\.h5\.[0-9a-f]{8}\.partial$' calls | cut -d ' ' -f 1)
kill_at env FAULT_MODE=kill FAULT_AT="$at" >/dev/null 2>&1
rm -f killed.h5.*.partial calls
mv killed.h5.parts run.h5.parts
exists 'parts of a killed run' run.h5.parts/head.h5
expect 0 'a shard' "${PROFILE[@]}" -o s1.h5 --shard 1/2
expect 0 'another' "${PROFILE[@]}" -o s2.h5 --shard 2/2
expect 0 'a table' solve run.h5 -m keydiff -o table.safetensors
expect 0 'results' eval tiny.gguf table.safetensors text.txt -a uniform -r 0.5 -t 200 -n 3 -o worth --quiet
rm worth.svg worth.csv
sample_lines t 6 >texts.jsonl
expect 0 'steps' export run.h5 --format lukv-steps -o steps.in
cd .. || exit 1
# Runs are short and files small: a disk would wait for each fsync, memory does not.
[ -w /dev/shm ] && TMPDIR=$(mktemp -d /dev/shm/kvbudget-faults.XXXXXX) && export TMPDIR
# shellcheck disable=SC2086
"$PYTHON" "$KVB_ROOT/tests/faults/malloc_walk.py" "$KVB" fail_malloc.so inputs ${WALK:---scale 0.5} >walk.out 2>&1
code=$?
case $TMPDIR in /dev/shm/kvbudget-faults.*) rm -rf "$TMPDIR" ;; esac
cat walk.out
holds "$(tail -n 1 walk.out)" [ "$code" = 0 ]
end
