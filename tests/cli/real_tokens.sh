#!/usr/bin/env bash
# The default model's tokenizer against the golden ids of the transformers tokenizer (tests/golden/make_tokens.py). A
# larger comparison, 1 MB of mixed text with transformers itself: tests/peer/compare_tokens.py.
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
default_model 'ITS TOKENIZER WAS NOT TESTED'

# One line per case: number, pre-tokenizer, special yes or no; the texts and the expected lines of ids go to files.
"$PYTHON" - "$KVB_ROOT/tests/golden/tokens.json" >cases <<'PYTHON_END'
import json, sys
for i, case in enumerate(c for c in json.load(open(sys.argv[1])) if c["model"] == "smollm2"):
    open(f"{i}.text", "wb").write(bytes.fromhex(case["hex"]))
    open(f"{i}.ids", "w").write(" ".join(map(str, case["ids"])) + "\n")
    print(i, case["pre"], "yes" if case["special"] else "no")
PYTHON_END
while read -r i pre special; do
    options=(--bos no --pre "$pre")
    [ "$special" = no ] || options+=(--special)
    kvb tokenize "$MODEL" "$i.text" "${options[@]}"
    same "ids of text $i, $pre, special $special, $(stat -c %s "$i.text") bytes" "$i.ids" out
done <cases

printf 'The end <|im_end|>' >text
expect 0 'BOS as the file says: none' tokenize "$MODEL" text --special
says 'no BOS' '^504 1112 216 2$'
expect 0 'BOS by force' tokenize "$MODEL" text --special --bos yes
says 'BOS' '^1 504 1112 216 2$'
expect 0 'as JSON' tokenize "$MODEL" text --json --special
# Written down, because records and tables hold it.
json 'the ids and the hash' out \
    'j["ids"] == [504, 1112, 216, 2] and j["tokenizer_sha256"] ==
    "43279c66b8b839ca43fe3aac4d57efd3c2698011aebe7c0bb9b143fdda25dfe6"'
misused 'a wrong --bos' "expected yes.no.auto" tokenize "$MODEL" text --bos maybe
misused 'no text' 'expected a model and a text file' tokenize "$MODEL"
fails 'a missing text' 'absent.txt: cannot be opened' tokenize "$MODEL" absent.txt
# Code has spaces before digits, where the two readings of SmolLM2's tokenizer part.
expect 0 'a plan with the model as trained' profile "$MODEL" "$KVB_ROOT/calib-data/code-c.jsonl" --plan
says 'tokens as trained' ' 3142 tokens'
expect 0 'a plan with another pre-tokenizer' profile "$MODEL" "$KVB_ROOT/calib-data/code-c.jsonl" --plan --pre gpt-2
says 'tokens as transformers loads the file' ' 3152 tokens'
fails 'an unknown pre-tokenizer' 'expected one of smollm' profile "$MODEL" "$KVB_ROOT/calib-data/code-c.jsonl" --plan \
    --pre none
end
