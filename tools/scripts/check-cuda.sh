#!/usr/bin/env bash
# For a machine with an NVIDIA GPU: everything that needs one, unattended. tools/scripts/check-cuda.sh [--quick | --pack
# FILE]
#   every operation against the plain-C reference, in three precisions; a small model and every metric; operations at
# the size of Llama 3.1
#   8B, timed and judged; seconds of a model of that shape at 4k x 30 and 32k x 8; logits on cuda against cpu; the
# operations once more under
#   compute-sanitizer (memory, races, barriers, memory that nobody wrote).
# Every stage has a limit in seconds; one that fails does not keep the next ones from running; the last line counts.
# --quick: up to the metrics. --pack FILE.tar.xz: puts the programs, their libraries and this script into an archive for
# a machine that has neither compiler nor internet: there `tar xf FILE.tar.xz &&
# check-cuda/tools/scripts/check-cuda.sh`. Run `make` first. Without a device it says so.
set -u
cd "$(dirname "$0")/../.." || exit 1
BUILD=${BUILD:-build}
test=$BUILD/tests/test_profiler_backend_cuda
programs=("$BUILD/kvbudget" "$test" "${test}_bf16x3" "${test}_bf16")
for name in test_profiler_cuda_device bench_cuda bench_cuda_ops tiny_model; do programs+=("$BUILD/tests/$name"); done
passed=0 failed=0 skipped=0

fail() {
    echo "check-cuda: $*" >&2
    exit 1
}

# The libraries of C and C++ must be the other machine's own: its tools are loaded with them too.
pack() {
    local file
    case $1 in /*) file=$1 ;; *) file=$PWD/$1 ;; esac
    work=$(mktemp -d) || fail "no temporary folder"
    trap 'rm -rf "$work"' EXIT
    mkdir -p "$work/check-cuda/build/tests" "$work/check-cuda/tools/scripts" "$work/check-cuda/lib" \
        || fail "cannot write in $work"
    for program in "${programs[@]}"; do cp "$program" "$work/check-cuda/build/${program#"$BUILD"/}" \
        || fail "cannot copy $program"; done
    cp tools/scripts/check-cuda.sh "$work/check-cuda/tools/scripts/"
    ldd "${programs[@]}" | awk '$2 == "=>" && $3 ~ /^\// { print $3 }' | sort -u |
        grep -Ev '/(libc|libm|libdl|librt|libpthread|libresolv|libstdc\+\+|libgcc_s|ld-linux[^/]*)\.so' |
        while read -r library; do cp -L "$library" "$work/check-cuda/lib/" || exit 1; done \
            || fail "cannot copy the libraries"
    strip "$work"/check-cuda/build/kvbudget "$work"/check-cuda/build/tests/* "$work"/check-cuda/lib/* 2>/dev/null
    tar -C "$work" -cJf "$file" check-cuda || fail "cannot write $file"
    echo "$file: $(du -h "$file" | cut -f 1)"
}

# stage SECONDS NAME COMMAND...: runs it, whatever the stages before did. A command that prints a line "skip - " was
# skipped.
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

# cuBLAS is opened by name: where the system does not look, it may be with the toolkit or with a Python package.
find_cublas() {
    local folder
    ldconfig -p 2>/dev/null | grep -q 'libcublas\.so\.1[23]' && return
    for folder in "${CUDA_HOME:-/usr/local/cuda}"/lib64 /usr/local/cuda*/lib64 \
        /usr/local/cuda*/targets/x86_64-linux/lib \
        $("${PYTHON:-python3}" -c 'import glob, sys
for p in sys.path: print("\n".join(glob.glob(p + "/nvidia/*/lib")))' 2>/dev/null); do
        for library in "$folder"/libcublas.so.1[23]; do
            if [ -e "$library" ]; then
                export LD_LIBRARY_PATH="${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}$folder"
                echo "cuBLAS: $library"
                return
            fi
        done
    done
    echo "cuBLAS: not found by ldconfig, in CUDA_HOME, in /usr/local/cuda*, or among the packages of ${PYTHON:-python3}"
}

sanitize() {
    local tool=$1 program=$2
    if ! command -v compute-sanitizer >/dev/null; then
        echo "skip - compute-sanitizer --tool $tool: it is not installed (it is part of NVIDIA's toolkit)"
        return
    fi
    compute-sanitizer --tool "$tool" --error-exitcode 3 "$program"
}

# The default model where it is, else a tiny one: logits of a text, largest difference relative to the largest logit.
compare_logits() {
    local model backend
    model=$(tools/scripts/get-model.sh --path 2>/dev/null)
    if [ ! -f "$model" ]; then
        model=$work/tiny.gguf
        "$BUILD/tests/tiny_model" --type f32 "$model" || return 1
    fi
    head -c 4000 tools/scripts/check-cuda.sh >"$work/text"
    for backend in cpu cuda; do
        "$BUILD/kvbudget" logits "$model" "$work/text" -o "$work/$backend.npy" --backend "$backend" || return 1
    done
    env -u LD_LIBRARY_PATH "${PYTHON:-python3}" - "$work" <<'END'
import array, struct, sys
def load(path):
    data = open(path, 'rb').read()
    return array.array('f', data[10 + struct.unpack('<H', data[8:10])[0]:])
a, b = (load(f'{sys.argv[1]}/{n}.npy') for n in ('cpu', 'cuda'))
assert len(a) == len(b)
worst = max(abs(x - y) for x, y in zip(a, b))
print(f'logits: largest difference between cuda and cpu {worst:.2e}, largest logit {max(map(abs, a)):.2f}')
sys.exit(worst > 2e-3)
END
}

for program in "${programs[@]}"; do
    [ -x "$program" ] || fail "$program is not built: no nvcc was found (make showconfig;" \
        "tools/scripts/get-cuda.sh), or \`make check-cuda-build\` was not run"
done
case ${1:-} in
'' | --quick) [ $# -le 1 ] || fail "too many arguments; usage: tools/scripts/check-cuda.sh [--quick | --pack FILE]" ;;
--pack)
    [ $# = 2 ] || fail "--pack expects the archive's name"
    pack "$2"
    exit
    ;;
*) fail "unknown argument '$1'; usage: tools/scripts/check-cuda.sh [--quick | --pack FILE]" ;;
esac

work=$(mktemp -d) || fail "no temporary folder"
trap 'rm -rf "$work"' EXIT
log=$work/log
[ -d lib ] && export LD_LIBRARY_PATH="$PWD/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
find_cublas
nvidia-smi --query-gpu=name,driver_version,memory.total,compute_cap --format=csv 2>/dev/null

stage 150 'operations, f32' "$test"
if grep -q '^skip - ' "$log"; then
    echo "check-cuda: no device, nothing was checked on one"
    exit 0
fi
for compute in bf16 bf16x3; do stage 150 "operations, $compute" "${test}_$compute"; done
stage 60 'a whole model, and metrics from sums of the device' env KVB_BUILD="$BUILD" \
    "$BUILD/tests/test_profiler_cuda_device"
if [ "${1:-}" != --quick ]; then
    for compute in bf16 f32; do stage 120 "operations at the size of 8B, $compute" "$BUILD/tests/bench_cuda_ops" \
        "$compute"; done
    stage 180 'model of the shape of Llama 3.1 8B, bf16' "$BUILD/tests/bench_cuda" bf16
    for compute in bf16x3 f32; do stage 120 "the same, $compute" "$BUILD/tests/bench_cuda" "$compute" 4096 30 8; done
    export -f sanitize compare_logits
    export BUILD work
    stage 60 'logits on cuda against cpu' bash -c compare_logits
    # In bf16 the long heads and the short windows still run the float32 kernels: one program has them all.
    for tool in memcheck racecheck synccheck initcheck; do
        stage 100 "compute-sanitizer $tool" bash -c 'sanitize "$@"' sanitize "$tool" "${test}_bf16"
    done
fi
printf '\ncheck-cuda: %d stages passed, %d failed, %d skipped, %d s\n' "$passed" "$failed" "$skipped" "$SECONDS"
[ "$failed" = 0 ]
