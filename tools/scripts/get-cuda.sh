#!/bin/sh
# Gets a CUDA compiler that is enough to build profiler/backend/backend_cuda.cu, out of NVIDIA's Python packages
# (tools/scripts/cuda-packages.txt, with checksums), and prints its folder. It is kept in a cache folder; one that is
# there is not fetched again. cuBLAS is not among them: the program opens it when it starts on a machine with a device.
set -eu

NAME=cuda-13.0
HERE=$(cd "$(dirname "$0")" && pwd)
PYTHON=${PYTHON:-python3}

usage() {
    cat <<EOF
usage: tools/scripts/get-cuda.sh [--path | --optional]
  --path      print where the compiler is or would be, and do nothing
  --optional  print nothing; a failure is a message, and the exit status 0
The cache folder is \$KVBUDGET_CACHE, or else \${XDG_CACHE_HOME:-~/.cache}/kvbudget.
Needs $PYTHON with pip, x86-64 Linux, and 400 MB for a moment.
EOF
}

fail() {
    printf 'get-cuda: %s\n' "$1" >&2
    [ "$optional" = yes ] || exit 1
    printf 'get-cuda: going on without: the cuda backend is not built, and its compilation is not tested\n' >&2
    exit 0
}

optional=no path_only=no
case ${1:-} in
--path) path_only=yes ;;
--optional) optional=yes ;;
-h | --help) usage && exit 0 ;;
'') ;;
*) usage >&2 && exit 2 ;;
esac

if [ -n "${KVBUDGET_CACHE:-}" ]; then
    cache=$KVBUDGET_CACHE
else
    [ -n "${XDG_CACHE_HOME:-}${HOME:-}" ] || fail "no cache folder: set KVBUDGET_CACHE, XDG_CACHE_HOME or HOME"
    cache=${XDG_CACHE_HOME:-${HOME:-}/.cache}/kvbudget
fi
home=$cache/$NAME
if [ "$path_only" = yes ]; then
    printf '%s\n' "$home"
    exit 0
fi
if [ -x "$home/bin/nvcc" ]; then
    [ "$optional" = yes ] || printf '%s\n' "$home"
    exit 0
fi
[ ! -e "$home" ] || fail "$home is there without bin/nvcc; move it away"
[ "$(uname -s) $(uname -m)" = 'Linux x86_64' ] || fail \
    "the packages are for x86-64 Linux; install NVIDIA's toolkit and set CUDA_HOME"
"$PYTHON" -m pip --version >/dev/null 2>&1 || fail "$PYTHON -m pip does not work; install python3-pip (run 'make deps')"

mkdir -p "$cache" || fail "$cache cannot be made; set KVBUDGET_CACHE to a folder that can be written"
# Whoever holds the lock is the only one at work, so folders of runs that were killed can go.
exec 9>"$cache/get-cuda.lock" || fail "$cache cannot be written; set KVBUDGET_CACHE to another folder"
if command -v flock >/dev/null && flock 9; then rm -rf "$cache"/get-cuda.??????; fi
# Inside of the cache folder, so that the last step is a rename within one file system: the compiler is there whole, or
# not at all.
work=$(mktemp -d "$cache/get-cuda.XXXXXX") || fail "$cache cannot be written; set KVBUDGET_CACHE to another folder"
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

printf 'get-cuda: downloading the CUDA compiler (100 MB)\n' >&2
"$PYTHON" -m pip --disable-pip-version-check download --quiet --no-deps --no-cache-dir --only-binary :all: \
    --require-hashes \
    --dest "$work" -r "$HERE/cuda-packages.txt" >&2 ||
    fail "the download failed (pip says why above); without a network, install NVIDIA's toolkit and set CUDA_HOME"
for wheel in "$work"/*.whl; do
    "$PYTHON" -m zipfile -e "$wheel" "$work/unpacked" || fail "$wheel cannot be unpacked (is the disk full?)"
done
chmod -R u+w "$work/unpacked"
found=$work/unpacked/nvidia/cu13
[ -f "$found/bin/nvcc" ] || fail "the packages do not hold nvidia/cu13/bin/nvcc"
# zipfile does not restore the execute permission of programs.
chmod +x "$found"/bin/* "$found"/nvvm/bin/*
"$found/bin/nvcc" --version >/dev/null || fail "nvcc does not start"
if ! mv -T "$found" "$home" 2>/dev/null; then # another run may have been quicker
    [ -x "$home/bin/nvcc" ] || fail "$home cannot be written"
fi
[ "$optional" = yes ] || printf '%s\n' "$home"
