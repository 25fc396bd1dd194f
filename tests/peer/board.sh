#!/usr/bin/env bash
# Runs tests/peer/board.py in the environment of `make check-python`. `make bench-board` calls it with the arguments in
# BOARD. KVBUDGET_PYTHON names another interpreter that has torch, transformers, kvpress and gguf.
set -eu
cd "$(dirname "$0")/../.."
BUILD=$PWD/${BUILD:-build}
CACHE=${KVBUDGET_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/kvbudget}
packages=$BUILD/board/packages

python=${KVBUDGET_PYTHON:-}
if [ -z "$python" ]; then
    for done in "$CACHE"/python-*/complete; do python=${done%/complete}/bin/python; done
    [ -x "$python" ] || { echo "no environment in $CACHE: make check-python makes it" >&2; exit 1; }
fi
export PYTHONPATH=$PWD/python:$packages${PYTHONPATH:+:$PYTHONPATH} HF_HUB_OFFLINE=1 TQDM_DISABLE=1
export KVBUDGET_LIBRARY=$BUILD/libkvbudget.so KVBUDGET_PROGRAM=$BUILD/kvbudget OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
"$python" -c 'import gguf' 2>/dev/null || "$python" -m pip install --quiet --no-deps --target "$packages" gguf
exec "$python" tests/peer/board.py --work "$BUILD/board" "$@"
