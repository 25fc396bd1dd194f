#!/usr/bin/env bash
# Imported loss curves: a known optimum, and curves computed from a record, which give the record's own table.
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
check 'a file of curves' curves_by_hand
expect 0 'import' import hand.safetensors -o hand.h5 --model-heads 2 --head-dim 8 --attribute model_id=mine
expect 0 'solve' solve hand.h5 -m mine --shrink 0 -o hand_table.safetensors
check 'has the optimum, and proves it' optimum_by_hand hand_table.safetensors
lacks 'nobody is told to profile' 'profile --curves' err
expect 0 'the certificate holds' validate --certificate hand_table.safetensors hand.h5 --quiet
expect 0 'a report' report hand_table.safetensors --record hand.h5 -o hand.html
fails 'a record that is there' 'hand.h5' import hand.safetensors -o hand.h5
fails 'a loss that rises' 'layer 0, KV head 1: 5 with 0 tokens and 6 with 50' import rises.safetensors -o none.h5
fails 'a table is none' 'expected a name' import hand_table.safetensors -o none.h5
fails 'a file that is not there' 'none.safetensors' import none.safetensors -o none.h5
misused 'two files' 'one file or folder' import hand.safetensors hand.safetensors -o none.h5
if ls none* >/dev/null 2>&1; then not_ok 'nothing was left behind'; else ok 'nothing was left behind'; fi

tiny_record
expect 0 'export of a record' export run.h5 --format lukv-steps -o steps
check 'its curves' curves_of_record long keydiff 4 1 copied.safetensors
expect 0 'import of its curves' import copied.safetensors -o copied.h5 --model-heads 4 --head-dim 16
for how in mean_loss mean_ratio; do
    expect 0 "its table, $how" solve run.h5 -m keydiff --contexts long -a "$how" -o a.safetensors --quiet
    expect 0 "that of the curves, $how" solve copied.h5 -m copied -a "$how" -o b.safetensors --quiet
    check "the same numbers, $how" same_tensors a.safetensors b.safetensors
done
end
