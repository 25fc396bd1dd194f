#!/usr/bin/env bash
# profile --compute: every precision gives the same bits for any number of threads and any batch.
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
tiny_inputs
PROFILE=(profile tiny.gguf calib.jsonl --new-tokens 24 --ignore-eos --quiet)

for compute in f32 bf16x3 bf16; do
    expect 0 "$compute" "${PROFILE[@]}" -o $compute.h5 --compute $compute --threads 2
    fewer_bits=$(grep -q "$compute is no faster than f32" err || echo yes)
    if [ $compute != f32 ] && [ -n "$fewer_bits" ]; then
        if cmp -s f32.h5 $compute.h5; then not_ok "$compute is not f32"; else ok "$compute is not f32"; fi
    fi
    for threads in 1 3 8; do
        expect 0 "$compute, $threads threads, one question at a time" "${PROFILE[@]}" -o other.h5 --force \
            --compute $compute --threads $threads --batch 1
        same "$compute: the same bytes with $threads threads" $compute.h5 other.h5
    done
    # OpenMP's variables for nested teams, limits and dynamic teams change no bits either, so that a record can be
    # continued in another environment.
    for said in OMP_NUM_THREADS=1,2 OMP_NUM_THREADS=4,3,2 OMP_THREAD_LIMIT=1 OMP_DYNAMIC=true \
        'OMP_NUM_THREADS=2,4 OMP_THREAD_LIMIT=1' 'OMP_NUM_THREADS=2,2 OMP_MAX_ACTIVE_LEVELS=3'; do
        # shellcheck disable=SC2086 # several variables
        env $said "$KVB" "${PROFILE[@]}" -o other.h5 --force --compute $compute >out 2>err </dev/null || show
        same "$compute: the same bytes with $said" $compute.h5 other.h5
    done
done
# Where fewer bits are no faster, they are not taken.
export DNNL_MAX_CPU_ISA=AVX2
expect 0 'a CPU without bfloat16' "${PROFILE[@]}" -o f32.h5 --force
expect 0 'a table' solve f32.h5 -m snapkv -o f32.safetensors
for compute in bf16x3 bf16; do
    expect 0 "$compute" "${PROFILE[@]}" -o other.h5 --force --compute $compute
    says 'it says so' "$compute is no faster than f32 on this CPU" err
    expect 0 "$compute: a table" solve other.h5 -m snapkv -o other.safetensors --force
    check 'of the same numbers' same_tensors f32.safetensors other.safetensors
done
unset DNNL_MAX_CPU_ISA
misused 'a precision that there is not' "backend cpu has no 'fp8'" "${PROFILE[@]}" -o x.h5 --compute fp8
misused 'a precision of the judge' "backend ref has no 'bf16'" "${PROFILE[@]}" -o x.h5 --backend ref --compute bf16
end
