#!/usr/bin/env bash
# One program serves processors with and without AVX-512, bfloat16 and a matrix unit. On every path that this machine
# has, operations agree with the plain C reference and with PyTorch's numbers, logits of a quantised model with the
# reference's, and a record has the same bytes for any number of threads and any batch.
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
default_model 'NO PATH WAS TESTED'
"$PYTHON" -c 'import json, sys; print(json.loads(open(sys.argv[1], encoding="utf-8").readline())["context"][:300])' \
    "$KVB_ROOT/calib-data/narrative-en.jsonl" >text
holds 'the ids of a text' "$KVB_BUILD/tests/tokens" "$MODEL" text --npy ids.npy
holds 'logits of the reference' "$KVB_BUILD/tests/logits" "$MODEL" ids.npy ref.npy ref
head -qn 1 "$KVB_ROOT"/calib-data/*-en.jsonl | head -n 3 >three.jsonl
PROFILE=(profile "$MODEL" three.jsonl --max-tokens 200 --questions 3 --new-tokens 9 --ignore-answers --quiet)
for path in AVX2:avx2 AVX512_CORE:avx512bw AVX512_CORE_BF16:avx512_bf16 AVX512_CORE_AMX:amx_bf16; do
    isa=${path%:*}
    grep -qw "${path#*:}" /proc/cpuinfo || { skip "$isa: this processor has no ${path#*:}" && continue; }
    export DNNL_MAX_CPU_ISA=$isa
    for judge in backend golden; do
        holds "$isa: test_profiler_$judge" env -C "$KVB_ROOT" "$KVB_BUILD/tests/test_profiler_$judge"
    done
    holds "$isa: logits" "$KVB_BUILD/tests/logits" "$MODEL" ids.npy cpu.npy cpu
    check "$isa: they are the reference's" close_npy cpu.npy ref.npy 1e-3
    expect 0 "$isa: a record" "${PROFILE[@]}" -o "$isa.h5" --threads 2
    for how in '--threads 1' '--threads 7' '--batch 1' '--held 7'; do
        # shellcheck disable=SC2086 # several words
        expect 0 "$isa: $how" "${PROFILE[@]}" -o other.h5 --force $how
        same "$isa: the same bytes with $how" "$isa.h5" other.h5
    done
done
end
