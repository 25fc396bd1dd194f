#!/usr/bin/env bash
# The default model's tokenizer against the golden ids of the transformers tokenizer (tests/golden/make_tokens.py). A
# larger comparison, 1 MB of mixed text with transformers itself: tests/peer/compare_tokens.py.
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
default_model 'ITS TOKENIZER WAS NOT TESTED'
TOKENS=$KVB_BUILD/tests/tokens

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
    "$TOKENS" "$MODEL" "$i.text" "${options[@]}" >ids
    same "ids of text $i, $pre, special $special, $(stat -c %s "$i.text") bytes" "$i.ids" ids
done <cases

printf 'The end <|im_end|>' >text
holds 'BOS as the file says: none' "$TOKENS" "$MODEL" text --special
says 'no BOS' '^504 1112 216 2$' held
holds 'BOS by force' "$TOKENS" "$MODEL" text --special --bos yes
says 'BOS' '^1 504 1112 216 2$' held
# The hash must never change, because records and tables contain it.
holds 'the hash' "$TOKENS" "$MODEL" text --hash
says 'is as it was' '^43279c66b8b839ca43fe3aac4d57efd3c2698011aebe7c0bb9b143fdda25dfe6$' held
# Code has spaces before digits, where the two interpretations of SmolLM2's tokenizer differ.
expect 0 'a plan with the model as trained' profile "$MODEL" "$KVB_ROOT/calib-data/code-c.jsonl" --plan
says 'tokens as trained' ' 3142 tokens'
expect 0 'a plan with another pre-tokenizer' profile "$MODEL" "$KVB_ROOT/calib-data/code-c.jsonl" --plan --pre gpt-2
says 'tokens as transformers loads the file' ' 3152 tokens'
fails 'an unknown pre-tokenizer' 'expected one of smollm' profile "$MODEL" "$KVB_ROOT/calib-data/code-c.jsonl" --plan \
    --pre none
end
