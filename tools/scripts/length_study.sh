#!/usr/bin/env bash
# Do tables from short contexts serve long ones? Profiles the same texts cut to several lengths, and compares their
# tables.
#
#   tools/scripts/length_study.sh MODEL.gguf OUT TEXT...
#
# Every TEXT is a plain file with at least as many tokens as the longest of LENGTHS="1000 2000 4000 8000". QUESTIONS=6
# each, of which SAMPLED=32 tokens are decoded; COMPUTE=bf16x3 is the precision, METRICS the metrics. OUT gets the
# records; what the tables lose is printed.
set -eu
[ $# -ge 4 ] || { sed -n '2,8s/^# \{0,1\}//p' "$0" >&2; exit 2; }
model=$1 out=$2
shift 2
KVB=${BUILD:-build}/kvbudget
mkdir -p "$out"

"${PYTHON:-python3}" - "$@" >"$out/texts.jsonl" <<'EOF'
import json, os, sys
questions = ["What is this text about?", "Summarise the text in one sentence.", "Which names occur in the text?",
             "What is said at the beginning of the text?", "What is the most important point, and why?",
             "Quote a sentence from the text, word for word."]
for path in sys.argv[1:]:
    with open(path, encoding="utf-8") as file:
        print(json.dumps({"sample_id": os.path.basename(path).split(".")[0], "context": file.read(),
                          "questions": questions, "answer_prefix": "\nAnswer:"}))
EOF

records=()
for tokens in ${LENGTHS:-1000 2000 4000 8000}; do
    "$KVB" profile "$model" "$out/texts.jsonl" -o "$out/r$tokens.h5" --max-tokens "$tokens" \
        --questions "${QUESTIONS:-6}" --new-tokens "${SAMPLED:-32}" --ignore-eos \
        --compute "${COMPUTE:-bf16x3}" --force
    records+=("$out/r$tokens.h5")
done
for metric in ${METRICS:-snapkv:kvpress keydiff ea:kvpress}; do
    "$KVB" solve "${records[@]}" --metric "$metric" --lengths
done
