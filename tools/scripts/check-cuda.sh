#!/usr/bin/env bash
# Runs all checks that need an NVIDIA GPU, unattended: every operation against the plain-C reference in three
# precisions, a small model and its metrics, logits on cuda against cpu, and the operations once more under
# compute-sanitizer (memory, barriers, races; its initcheck does not see what cuBLAS writes, so uninitialised memory is
# left to the emulated device, which fills it with NaN). `make check-cuda` builds what it runs. A stage that fails does
# not keep the next ones from running; the last line has the counts. Without a device it says so.
set -u
cd "$(dirname "$0")/../.." || exit 1
BUILD=${BUILD:-build}
test=$BUILD/tests/test_profiler_backend_cuda
passed=0 failed=0 skipped=0

# stage SECONDS NAME COMMAND...: runs it, whatever the earlier stages did. A command that prints a line "skip - " counts
# as skipped.
stage() {
    local limit=$1 name=$2 start=$SECONDS code
    shift 2
    printf '\n== %s\n' "$name"
    timeout -k 5 "$limit" "$@" 2>&1 | tee "$log"
    code=${PIPESTATUS[0]}
    if grep -q '^skip - ' "$log"; then
        skipped=$((skipped + 1))
    elif [ "$code" = 0 ]; then
        passed=$((passed + 1))
        echo "ok - $name ($((SECONDS - start)) s)"
    else
        failed=$((failed + 1))
        [ "$code" = 124 ] && code="$code, longer than $limit s"
        echo "not ok - $name (exit status $code; $((SECONDS - start)) s)"
    fi
}

sanitize() {
    if ! command -v compute-sanitizer >/dev/null; then
        echo "skip - compute-sanitizer --tool $1: it is not installed (it is part of NVIDIA's toolkit)"
        return
    fi
    KVB_DRAWS=1 compute-sanitizer --tool "$1" --error-exitcode 3 "$2"
}

# Compares the logits of cpu and cuda on a text, with the default model if it is there, else with a tiny one.
compare_logits() {
    local model backend
    model=$(tools/scripts/get-model.sh --path 2>/dev/null)
    if [ ! -f "$model" ]; then
        model=$work/tiny.gguf
        "$BUILD/tests/tiny_model" --type f32 "$model" || return 1
    fi
    "$BUILD/tests/tokens" "$model" <(head -c 3000 tools/scripts/check-cuda.sh) --npy "$work/ids.npy" || return 1
    for backend in cpu cuda; do
        "$BUILD/tests/logits" "$model" "$work/ids.npy" "$work/$backend.npy" "$backend" || return 1
    done
    "${PYTHON:-python3}" - "$work" <<'PY'
import array, struct, sys
def load(path):
    data = open(path, 'rb').read()
    return array.array('f', data[10 + struct.unpack('<H', data[8:10])[0]:])
a, b = (load(f'{sys.argv[1]}/{n}.npy') for n in ('cpu', 'cuda'))
assert len(a) == len(b)
worst = max(abs(x - y) for x, y in zip(a, b))
print(f'logits: largest difference between cuda and cpu {worst:.2e}, largest logit {max(map(abs, a)):.2f}')
sys.exit(worst > 2e-3)
PY
}

[ -x "$test" ] || {
    echo "check-cuda: $test is not built: no nvcc was found (make showconfig; tools/scripts/get-cuda.sh)" >&2
    exit 1
}
work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT
log=$work/log
nvidia-smi --query-gpu=name,driver_version,memory.total,compute_cap --format=csv 2>/dev/null

stage 150 'operations, f32' "$test"
if grep -q '^skip - ' "$log"; then
    echo "check-cuda: no device, nothing was checked on one"
    exit 0
fi
for compute in bf16 bf16x3; do stage 150 "operations, $compute" "${test}_$compute"; done
stage 60 'a whole model and its metrics' env KVB_BUILD="$BUILD" "$BUILD/tests/test_profiler_cuda_device"
export -f sanitize compare_logits
export BUILD work
stage 60 'logits on cuda against cpu' bash -c compare_logits
for tool in memcheck synccheck racecheck; do
    stage 900 "compute-sanitizer $tool" bash -c 'sanitize "$@"' sanitize "$tool" "${test}_bf16"
done
printf '\ncheck-cuda: %d stages passed, %d failed, %d skipped, %d s\n' "$passed" "$failed" "$skipped" "$SECONDS"
[ "$failed" = 0 ]
