#!/usr/bin/env bash
# Prints hashes of a fixed set of results, to prove that a change of the code changed no number: run it with the program
# before and after the change, on one machine, and compare.
#   tests/peer/fixed_set.sh BUILD [--tiny] >after.txt; diff before.txt after.txt
# BUILD holds kvbudget and tests/tiny_model, tokens and logits. --tiny leaves out the default model. Contents are
# hashed, as exported, not files, whose attributes may name versions.
set -euo pipefail
BUILD=$(cd "${1:?BUILD}" && pwd)
only=${2:-}
cd "$(dirname "$0")/../.."
root=$PWD
work=$(mktemp -d "${TMPDIR:-/tmp}/kvbudget-fixed.XXXXXX")
trap 'rm -rf "$work"' EXIT
kvbudget() { "$BUILD/kvbudget" "$@" --quiet >>"$work/log" 2>&1 \
    || { tail -n 3 "$work/log" >&2; echo "failed: kvbudget $*" >&2; exit 1; }; }
plain() { "$BUILD/kvbudget" "$@" 2>>"$work/log" || { tail -n 3 "$work/log" >&2; echo "failed: kvbudget $*" >&2; exit \
    1; }; }
hash_file() { printf '%s  %s\n' "$(sha256sum <"$1" | cut -c1-24)" "$2"; }
# hash_worth NAME: hashes an evaluation's numbers, except those that differ between runs: malloc's bytes, seconds.
hash_worth() { cut -d, -f1-27 "$work/worth.csv" >"$work/out"; hash_file "$work/out" "$1"; }
# ratios TABLE: prints its prune ratios as they are in the file.
ratios() { python3 -c 'import json, sys
data = open(sys.argv[1], "rb").read()
start = 8 + int.from_bytes(data[:8], "little")
begin, end = json.loads(data[8:start])["prune_ratio"]["data_offsets"]
sys.stdout.buffer.write(data[start + begin : start + end])' "$1"; }
# hash_folder FOLDER NAME: hashes all files in it, in order of name.
hash_folder() { printf '%s  %s\n' \
    "$(cd "$1" && find . -type f | LC_ALL=C sort | while read -r f; do echo "$f"; cat "$f"; done | sha256sum \
    | cut -c1-24)" "$2"; }

# from_record RECORD NAME RANKS: hashes what is made from a record; RANKS divides the KV heads of a layer.
from_record() {
    local record=$1 name=$2 ranks=$3 how metric table
    plain export "$record" --format lukv-steps -o "$work/steps" >/dev/null
    find "$work/steps" -type f ! -name '*.npy' -delete # arrays alone: attributes name versions and parameters
    hash_folder "$work/steps" "$name record"
    rm -r "$work/steps"
    for how in '' --paper '--aggregate worst' '--scope layer' '--order oracle' '--block 16 --pin 0' \
        '--ratios 0.3,0.8 --exact' "--block 8 --ranks $ranks" '--layer-cap 0.6' '--levels 1 --floor 0.05' \
        '--ratios 0.3,0.8 --layer-cap 0.6 --block 4 --exact' '--ratios 0.3,0.8 --levels 1 --block 4 --exact'; do
        mkdir -p "$work/tables"
        # shellcheck disable=SC2086 # options
        kvbudget solve "$record" -m all $how -o "$work/tables"
        for table in "$work"/tables/*.safetensors; do
            ratios "$table" >"${table%.safetensors}.bytes"
            rm "$table"
        done
        hash_folder "$work/tables" "$name solve $how"
        rm -r "$work/tables"
    done
    metric=keydiff
    plain solve "$record" -m $metric --holdout --csv "$work/out" >/dev/null
    hash_file "$work/out" "$name holdout"
    plain solve "$record" -m $metric --ablation --csv "$work/out" >/dev/null
    hash_file "$work/out" "$name ablation"
    kvbudget solve "$record" -m $metric -o "$work/$metric.safetensors"
    plain budgets "$work/$metric.safetensors" --ratio 0.8 --tokens 3000 --csv "$work/out" >/dev/null
    hash_file "$work/out" "$name budgets"
}

python3 - "$work" <<'PY'
import json, sys
words = ("the clerk wrote seven letters about old rivers and new bridges "
         "while nobody in town could count further than").split()
def text(k, n):
    return " ".join(words[(i * i * (k + 3) + i // 7) % len(words)] + ("." if i % 11 == 10 else "") for i in range(n))
with open(sys.argv[1] + "/calib.jsonl", "w") as f:
    for k in range(3):
        print(json.dumps({"sample_id": f"s{k}", "context": text(k, 120),
                          "questions": ["Who wrote?", "How many letters?"]}), file=f)
for k in range(2): open(f"{sys.argv[1]}/text{k}.txt", "w").write(text(k + 5, 400))
PY

metrics='-m snapkv:kvpress:window=16 -m snapkv:lukv:window=16 -m keydiff -m ea:kvpress -m ea:lukv -m knorm -m h2o'
metrics+=' -m tova -m lagkv -m morphkv:window=16'
"$BUILD/tests/tiny_model" "$work/tiny.gguf" >/dev/null
for kind in 'ref f32' 'cpu f32' 'cpu bf16x3' 'cpu bf16'; do
    read -r backend compute <<<"$kind"
    # shellcheck disable=SC2086 # options
    kvbudget profile "$work/tiny.gguf" "$work/calib.jsonl" -o "$work/run.h5" --force -n 8 --ignore-eos $metrics \
        -b "$backend" --compute "$compute"
    from_record "$work/run.h5" "tiny $kind" 2
    kvbudget eval "$work/tiny.gguf" "$work/keydiff.safetensors" "$work/text0.txt" "$work/text1.txt" -t 160 -n 12 \
        -r 0.5,0.8 -a uniform -a pyramid -a ada \
        -a oracle -b "$backend" --compute "$compute" -o "$work/worth"
    hash_worth "tiny $kind eval"
    rm -f "$work"/worth.*
    "$BUILD/tests/tokens" "$work/tiny.gguf" "$work/text0.txt" --npy "$work/ids.npy"
    "$BUILD/tests/logits" "$work/tiny.gguf" "$work/ids.npy" "$work/logits.npy" "$backend" "$compute"
    hash_file "$work/logits.npy" "tiny $kind logits"
done
[ "$only" = --tiny ] && exit

model=$("$root/tools/scripts/get-model.sh" 2>/dev/null)
for compute in f32 bf16x3 bf16; do
    kvbudget profile "$model" "$root/calib-data/narrative-en.jsonl" "$root/calib-data/code-c.jsonl" -o "$work/real.h5" \
        --force --max-tokens 700 -q 3 -n 12 \
        --ignore-answers --compute "$compute" -m snapkv:kvpress -m keydiff -m ea:kvpress -m h2o -m lagkv
    from_record "$work/real.h5" "SmolLM2 $compute" 3
    kvbudget eval "$model" "$work/keydiff.safetensors" "$root/LICENSE" -t 500 -n 16 -r 0.5,0.8 -a uniform -a ada \
        --compute "$compute" -o "$work/worth"
    hash_worth "SmolLM2 $compute eval"
    rm -f "$work"/worth.*
done
