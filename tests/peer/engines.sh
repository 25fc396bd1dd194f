#!/usr/bin/env bash
# Tests a table in OpenVINO's runtime: engines.sh BUILD. Uses the environment of check-python; openvino and gguf are
# installed into BUILD/openvino. The last line is "N passed, N failed".
set -euo pipefail
cd "$(dirname "$0")/../.."

BUILD=$(realpath "$1")
CACHE=${KVBUDGET_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/kvbudget}
python=${KVBUDGET_PYTHON:-$(printf '%s\n' "$CACHE"/python-*/bin/python | tail -n 1)}
if ! "$python" -c 'import kvpress, torch' 2>/dev/null; then
    echo "SKIPPED: there is no environment with torch and transformers; make check-python makes one"
    echo "0 passed, 0 failed"
    exit
fi
[ -d "$BUILD/openvino/openvino" ] || "$python" -m pip --disable-pip-version-check install --quiet \
    --target "$BUILD/openvino" --no-deps openvino==2026.4.1 openvino-telemetry==2025.2.0 gguf==0.19.0
model=$(tools/scripts/get-model.sh)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$BUILD/kvbudget" profile "$model" calib-data/narrative-en.jsonl --max-tokens 1024 -q 4 -m keydiff \
    -o "$work/run.h5" --quiet
"$BUILD/kvbudget" solve "$work/run.h5" -m keydiff -o "$work/keydiff.safetensors" --quiet >/dev/null
export KVBUDGET_LIBRARY=$BUILD/libkvbudget.so KVBUDGET_PROGRAM=$BUILD/kvbudget HF_HUB_OFFLINE=1
PYTHONPATH=$PWD/python:$BUILD/openvino "$python" -W ignore tests/peer/engines.py "$model" "$work/keydiff.safetensors" \
    --tokens 512 --new 8 --pairs 1
