#!/usr/bin/env bash
# File calls that fail, at a sample of the points that long_faults.sh tries; and several processes writing one record.
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
SHIM=$KVB_BUILD/tests/fault_shim.so
if grep -q __asan_init "$KVB"; then
    skip 'failing file calls: a sanitised program must come before what LD_PRELOAD names'
    end
fi

# ---- One call fails
"$PYTHON" "$KVB_ROOT/tests/faults/faults.py" --build "$KVB_BUILD" --points "${FAULT_POINTS:-1}" | tee faults.out
[ "${PIPESTATUS[0]}" = 0 ] || not_ok 'no output is lost and no fault is silent'

# ---- Several processes and one record: a lock must be on the file that has the name now, however late it is taken
tiny_inputs
PROFILE=(profile tiny.gguf calib.jsonl --new-tokens 4 --ignore-eos -q 1 --quiet --threads 1)
for seed in 1 2 3; do expect 0 "seed $seed alone" "${PROFILE[@]}" -o "alone$seed.h5" --seed $seed; done
mixed=0 finished=0
for round in 1 2 3 4 5 6; do
    rm -rf shared.h5 shared.h5.parts
    for seed in 1 2 3; do
        (sleep "0.0$((round * seed % 7))"
            LD_PRELOAD=$SHIM FAULT_LOCK_US=$((20000 * seed)) \
                "$KVB" "${PROFILE[@]}" -o shared.h5 --seed $seed --resume) 2>>shared.err &
    done
    wait
    [ -e shared.h5 ] || continue
    finished=$((finished + 1))
    cmp -s shared.h5 alone1.h5 || cmp -s shared.h5 alone2.h5 || cmp -s shared.h5 alone3.h5 || mixed=$((mixed + 1))
done
holds "three processes and one output, $finished rounds: $mixed mixtures" [ "$((finished >= 4))$mixed" = 10 ]

# ---- Outputs that cannot be written are reported before the work, and nothing is left behind
printf 'line %s of a text that is not long\n' $(seq 60) >text.txt
expect 0 'a table' solve alone1.h5 --metric keydiff -o t.safetensors --quiet
mkdir -p a.h5 worth.json s.safetensors
ln -s loop.h5 loop.h5
ln -s nowhere dangling.html
cp t.safetensors kept.safetensors
chmod 444 kept.safetensors
long=$(printf 'n%.0s' $(seq 240))
EVAL=(eval tiny.gguf t.safetensors text.txt --tokens 64 --next 4 -r 0.5 -a none --quiet)
fails 'a record that is a folder' 'a.h5: is a folder' "${PROFILE[@]}" -o a.h5
fails 'a record that is a loop of links' 'loop.h5: .*leads nowhere' "${PROFILE[@]}" -o loop.h5
fails 'a record that is a device' '/dev/full: is a device' "${PROFILE[@]}" -o /dev/full
fails 'a name that is too long' 'at most|1 to 238 bytes' "${PROFILE[@]}" -o "$long.h5"
fails 'a metric whose window is longer than a context' 'sample long.*230 tokens, expected at least 301' \
    "${PROFILE[@]}" -o short.h5 --metric snapkv:kvpress:window=300
fails '--plan says so too' 'expected at least 301' "${PROFILE[@]}" --metric snapkv:kvpress:window=300 --plan
fails 'results that are a folder' 'worth.json: is a folder' "${EVAL[@]}" -o worth
fails 'task: results that are a folder' 'worth.json: is a folder' task tiny.gguf --task niah_single_1 -o worth --quiet
fails 'a table that is read-only' 'kept.safetensors: is read-only' solve alone1.h5 --metric keydiff -o kept.safetensors
fails 'a page through a link to nothing' 'dangling.html: .*leads nowhere' report t.safetensors -o dangling.html
same 'the read-only table is as it was' t.safetensors kept.safetensors
left=$(find . -name '*.parts' -o -name '*.partial' -o -name '*.cells' -o -name nowhere -o -name short.h5)
if [ -z "$left" ]; then ok 'nothing is left behind'; else not_ok "left behind: $left"; fi

# ---- An addition that was stopped does not block other additions for good
expect 0 'a record to add to' profile tiny.gguf calib.jsonl -o base.h5 --quiet --new-tokens 3 --ignore-eos -m keydiff
cp base.h5 whole.h5
FAULT_DIR=$PWD FAULT_AT=40 FAULT_MODE=kill LD_PRELOAD=$SHIM "$KVB" profile tiny.gguf --add -o base.h5 -m knorm --quiet \
    2>/dev/null
exists 'it was stopped' base.h5.parts/head.h5
fails 'another one says what to do' 'holds an addition that was stopped, with .*--add --force' profile tiny.gguf --add \
    -o base.h5 -m tova --quiet
fails 'so does another profile' 'begun with metrics.*--force' profile tiny.gguf calib.jsonl -o base.h5 --quiet \
    --new-tokens 3 --ignore-eos -m keydiff --resume
same 'the record is as it was' base.h5 whole.h5
expect 0 'which helps' profile tiny.gguf --add -o base.h5 -m tova --quiet --force
expect 0 'the same without the other' profile tiny.gguf --add -o whole.h5 -m tova --quiet
same 'and comes to the same bytes' base.h5 whole.h5

# ---- A record that was merged and cannot be read back
CODE=0
FAULT_DIR=$PWD FAULT_MODE=unread LD_PRELOAD=$SHIM "$KVB" merge merged.h5 whole.h5 >out 2>err || CODE=$?
holds 'reading back fails' [ "$CODE" = 1 ]
says 'and the message says that the record is there' 'merged.h5 is written, but reading it back failed' err
exists 'as it is' merged.h5

# ---- A bad line in one of several files
echo '{"sample_id": "other", "context_ids": [3, 4, 5], "question_ids": [[99999]]}' >other.jsonl
fails 'the message names the file' 'other.jsonl: line 1, sample other: question 1' profile tiny.gguf calib.jsonl \
    other.jsonl -o x.h5 -m keydiff --quiet
end
