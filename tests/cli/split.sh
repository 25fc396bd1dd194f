#!/usr/bin/env bash
# A GGUF file in parts: any part may be given as the model, budgets equal those of the whole file, and the record has
# the hash of every part.
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
cp "$KVB_ROOT"/tests/golden/split/*.gguf .
"$KVB_BUILD/tests/tiny_model" --type q8_0 tiny.gguf >/dev/null
tiny_calib calib.jsonl
for model in tiny.gguf tiny-0000{1,2,3}-of-00003.gguf; do
    expect 0 "profile $model" profile "$model" calib.jsonl -o "$model.h5" --quiet --new-tokens 6 --ignore-eos -m keydiff
    expect 0 "solve $model" solve "$model.h5" -m keydiff -o table.safetensors
    expect 0 "budgets $model" budgets table.safetensors --ratio 60% --tokens 100
    cp out "$model.budgets"
done
same 'budgets from parts are those of the whole' tiny.gguf.budgets tiny-00001-of-00003.gguf.budgets
for part in 2 3; do
    same "part $part opens the same model" tiny-00001-of-00003.gguf.h5 "tiny-0000$part-of-00003.gguf.h5"
done
expect 0 'inspect' inspect tiny-00001-of-00003.gguf.h5 --json
files=$(sha256sum tiny-*-of-00003.gguf | awk '{printf "%s\"%s\": \"%s\"", (NR > 1 ? ", " : ""), $2, $1}')
json 'the hash of every part' out "json.loads(j['attributes']['model_files']) == {$files}"
fails 'no part is written over, even by force' '00002-of-00003.gguf: would be both read and written' profile \
    tiny-00001-of-00003.gguf calib.jsonl -m keydiff --force -o tiny-00002-of-00003.gguf
end
