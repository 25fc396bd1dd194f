#!/usr/bin/env bash
# Measures time and memory of every command on this machine, as CSV, with the models MODELS. Called by `make bench`.
# Where PEER_PYTHON names a Python with the packages of tests/peer/requirements.txt, PAIRS (3) runs of `profile` are
# timed beside the published protocol in PyTorch, in the precisions COMPUTE, a few minutes each.
set -eu
cd "$(dirname "$0")/../.."
BUILD=${BUILD:-build}
KVB=$BUILD/kvbudget
# shellcheck disable=SC2086 # a list
python3 tests/peer/command_times.py "$KVB" ${MODELS:-smollm2-135m} --csv "$BUILD/times.csv" --work "$BUILD/times"
cat "$BUILD/times.csv"
if [ -n "${PEER_PYTHON:-}" ]; then
    model=$(tools/scripts/get-model.sh)
    # shellcheck disable=SC2086
    "$PEER_PYTHON" tests/peer/time_protocol.py "$KVB" "$model" calib-data/narrative-en.jsonl --pairs "${PAIRS:-3}" \
        --compute ${COMPUTE:-f32 bf16x3 bf16}
    # shellcheck disable=SC2086
    "$PEER_PYTHON" tests/peer/compute_effect.py "$KVB" "$model" calib-data/narrative-en.jsonl
fi
