#!/usr/bin/env bash
# Every format of `kvbudget export` for other programs, read back without our code and compared with `budgets`.
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
tiny_record --metric snapkv:window=8
expect 0 'a table' solve run.h5 -m keydiff -o t.safetensors --quiet
expect 0 'its budgets' budgets t.safetensors -r 0.7 -t 500 --json
cp out budgets.json
ask() { echo "t.safetensors --ratio 70% --tokens 500 --format $1 -o $2"; }

# shellcheck disable=SC2046
for pair in varlen:arrays per-layer:layers.json duo:duo shares:shares.json; do
    expect 0 "export ${pair%%:*}" export $(ask "${pair%%:*}" "${pair#*:}") && cp out "${pair%%:*}.out"
done
check 'all of them hold the budgets' exports
check 'shares are the best budgets of some curves' shares_to_curves 500
expect 0 'import of them' import shares.safetensors -o shares.h5 --model-heads 4 --head-dim 16
expect 0 'a table of them' solve shares.h5 -m shares --shrink 0 -o shares_table.safetensors --quiet
expect 0 'its budgets' budgets shares_table.safetensors -r 0.7 -t 500 --json
check 'are those that were exported' same_keep budgets.json out
expect 0 'the ending names the format' export t.safetensors -o again.npy
check 'a wrong bit changes no ratio without a word' flips "$KVB" t.safetensors
expect 0 'pages' export t.safetensors -r 0.7 -t 500 --block 16 -f varlen -o pages
exists 'a block table' pages/block_table.npy
expect 0 'strict' export t.safetensors -r 0.99 -t 100 --strict -f varlen -o strict

expect 0 'a table of chosen ratios' solve run.h5 -m keydiff --ratios 0.5:0.9:0.1 -o chosen.safetensors --quiet
fails 'is none for kvpress' 'has 5 rows up to ratio 0.9, and kvpress' export chosen.safetensors -o chosen.npy
if [ ! -e chosen.npy ]; then ok 'and nothing was written'; else not_ok 'chosen.npy was written'; fi
expect 0 'a table of pages' solve run.h5 -m keydiff --block 16 -o paged.safetensors --quiet
expect 0 'is one' export paged.safetensors -o paged.npy
says 'and it says what kvpress ignores' 'ignores the table.s constraints' err

fails 'a folder that is there' 'arrays' export t.safetensors -r 0.7 -t 500 -f varlen -o arrays
fails 'a record where a table is expected' 'run.h5' export run.h5 -r 0.7 -t 500 -f duo -o none
fails 'a table where a record is expected' 't.safetensors' export t.safetensors -f lukv-steps -o none
misused 'budgets without a length' 'expected --ratio R and --tokens T' export t.safetensors -f duo -r 0.7 -o none
misused 'a ratio of one' 'below 1' export t.safetensors -f duo -r 1 -t 5 -o none
misused 'a ratio without a meaning' 'no meaning' export t.safetensors -r 0.5 -o none.npy
misused 'an unknown format' 'varlen' export t.safetensors -f exl2 -o none
expect 0 'its help' help export
for format in npy lukv-steps varlen per-layer duo shares; do
    says "says for whom $format is" "^$format +(For|A|Of) " out
done
end
