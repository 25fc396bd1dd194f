#!/usr/bin/env bash
# For a machine with an NVIDIA GPU: everything that needs one. tools/check-cuda.sh [--quick]
#   every operation against the plain-C reference; the same under compute-sanitizer (memory, races, barriers, uninitialised memory);
#   the default model's logits on cuda against cpu; seconds of a model of the shape of Llama 3.1 8B (not with --quick).
# Without a device it says so and does nothing. Run `make` first.
set -eu
cd "$(dirname "$0")/.."
BUILD=${BUILD:-build}
test=$BUILD/tests/test_profiler_backend_cuda
[ -x "$test" ] || { echo "check-cuda: $test is not built: no nvcc was found (make showconfig; tools/get-cuda.sh; make $test)" >&2; exit 1; }
log=$(mktemp)
trap 'rm -f "$log"' EXIT

"$test" | tee "$log"
if grep -q '^skip - ' "$log"; then
    echo "check-cuda: no device, nothing was checked on one"
    exit 0
fi
for compute in bf16x3 bf16; do "${test}_$compute"; done
if command -v compute-sanitizer >/dev/null; then
    for tool in memcheck racecheck synccheck initcheck; do
        echo "compute-sanitizer --tool $tool"
        compute-sanitizer --tool "$tool" --error-exitcode 3 "$test"
    done
else
    echo "skip - compute-sanitizer is not installed (it is part of NVIDIA's toolkit)"
fi

model=$(tools/get-model.sh)
work=$(mktemp -d)
trap 'rm -rf "$log" "$work"' EXIT
for backend in cpu cuda; do
    "$BUILD/kvbudget" logits "$model" README.md -o "$work/$backend.npy" --backend "$backend"
done
"${PYTHON:-python3}" - "$work" <<'EOF'
import struct, sys, array
def load(path):
    data = open(path, 'rb').read()
    return array.array('f', data[10 + struct.unpack('<H', data[8:10])[0]:])
a, b = (load(f'{sys.argv[1]}/{n}.npy') for n in ('cpu', 'cuda'))
assert len(a) == len(b)
worst = max(abs(x - y) for x, y in zip(a, b))
print(f'logits of the default model: largest difference between cuda and cpu {worst:.2e}')
sys.exit(worst > 2e-3)
EOF
[ "${1:-}" = --quick ] || "$BUILD/tests/bench_cuda"
