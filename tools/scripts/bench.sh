#!/usr/bin/env bash
# Measures profile and solve on this machine with the default model and narrative; prints CSV. Called by `make bench`.
# TOKENS and QUESTIONS are lists of context lengths and numbers of questions. Where PEER_PYTHON names a Python with the
# packages of tests/peer/requirements.txt, PAIRS (3) runs are timed beside the published protocol in PyTorch, in the
# precisions COMPUTE, a few minutes each.
set -eu
cd "$(dirname "$0")/../.."
BUILD=${BUILD:-build}
KVB=$BUILD/kvbudget
model=$(tools/scripts/get-model.sh)
work=$(mktemp -d "${TMPDIR:-/tmp}/kvbudget-bench.XXXXXX")
trap 'rm -rf "$work"' EXIT

now() { date +%s.%N; }
cpu=$(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -n 1 | tr ',' ' ')
commit=$(git rev-parse --short HEAD 2>/dev/null || echo unknown)
# row STEP TOKENS QUESTIONS COMMAND...: runs the command and prints a line of the table.
row() {
    local step=$1 tokens=$2 questions=$3 start
    shift 3
    start=$(now)
    "$@" >"$work/log" 2>&1 || { cat "$work/log" >&2 && exit 1; }
    awk -v a="$start" -v b="$(now)" -v p="$commit,$cpu,$(nproc),$step,$tokens,$questions" \
        -v n="$(grep 'peak memory' "$work/log" | tr ',' ';')" \
        'BEGIN { printf "%s,%.2f,%s\n", p, b - a, n }'
}

echo 'commit,cpu,cores,step,tokens,questions,seconds,note'
for tokens in ${TOKENS:-1024 2048 4096}; do
    for questions in ${QUESTIONS:-1 10 30}; do
        row profile "$tokens" "$questions" "$KVB" profile "$model" calib-data/narrative-en.jsonl -o "$work/run.h5" \
            --force \
            --max-tokens "$tokens" --questions "$questions" --ignore-answers --ignore-eos
        for metric in snapkv:kvpress keydiff ea:kvpress; do
            row "solve $metric" "$tokens" "$questions" "$KVB" solve "$work/run.h5" --metric "$metric" \
                -o "$work/table.safetensors" --quiet
        done
    done
done

if [ -n "${PEER_PYTHON:-}" ]; then
    # shellcheck disable=SC2086 # a list
    "$PEER_PYTHON" tests/peer/time_protocol.py "$KVB" "$model" calib-data/narrative-en.jsonl --pairs "${PAIRS:-3}" \
        --compute ${COMPUTE:-f32 bf16x3 bf16}
    # shellcheck disable=SC2086
    "$PEER_PYTHON" tests/peer/compute_effect.py "$KVB" "$model" calib-data/narrative-en.jsonl
fi
