#!/usr/bin/env bash
# kvbudget tables: lists shipped tables, finds a model's by hash or by shape and name, adds one, refuses wrong ones.
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
expect 0 'the tables of the tree are listed' tables
cp out listed
for name in gemma-3-270m qwen2.5-coder-0.5b-instruct qwen2.5-coder-1.5b-instruct smollm2-135m-instruct; do
    says "$name is there" "/$name.safetensors\$" listed
    for folder in tables tables/packed; do
        holds 'and small' [ "$(wc -c <"$KVB_ROOT/$folder/$name.safetensors")" -lt 300000 ]
    done
    hash=$(kvb inspect "$KVB_ROOT/tables/$name.safetensors" && sed -n 's/^  model_sha256: "\(.*\)"/\1/p' out)
    says 'it is of the weights that get-model.sh fetches' "|$hash|" "$KVB_ROOT/tools/scripts/get-model.sh"
done
says 'with names, shape and worth' 'HuggingFaceTB/SmolLM2-135M-Instruct: 30 layers, 3 KV heads of 64 numbers' listed
says 'as measured' 'KL to the full cache 0.001072 at 50 %, 0.01595 at 80 %, 0.0575 at 90 %, 0.1937 at 95 %' listed

tiny_table
seq 1 400 >text.txt
cp table.safetensors own.safetensors
expect 0 'eval' eval tiny.gguf mine=own.safetensors text.txt --tokens 100 --next 6 -r 0.5,0.8 -o worth --quiet
cp worth.json other.json
"$PYTHON" - <<'PY'
import json, sys
j = json.load(open("other.json"))
for one in j["inputs"]:
    one["sha256"] = one["sha256"][::-1]
json.dump(j, open("other.json", "w"))
PY

mkdir ready
fails 'an unknown model' 'no table for "tiny.gguf".*none of the 4 tables in .* is; .kvbudget tune.' tables tiny.gguf
export KVBUDGET_TABLES=$PWD/ready
expect 0 'an empty folder' tables
empty 'has nothing to list' out
fails 'results of another table' 'other.json: nothing there was measured with own.safetensors' tables \
    --add own.safetensors --name Org/Tiny-1M --results other.json
expect 0 'adding' tables --add own.safetensors --name Org/Tiny-1M,Org/Tiny-1M-GGUF --results worth.json
exists 'writes a file of that name' ready/tiny-1m.safetensors
says 'tells names' 'Org/Tiny-1M,Org/Tiny-1M-GGUF: 2 layers'
says 'tells the worth' 'KL to the full cache [0-9.e-]+ at 50 %, [0-9.e-]+ at 80 % pruned; mean over 1 texts, 6 tokens'
check 'with the same budgets' same_budgets own.safetensors ready/tiny-1m.safetensors
expect 0 'adding twice replaces it' tables --add ready/../own.safetensors --name Org/Tiny-1M --results worth.json
echo broken >ready/broken.safetensors
fails 'a file that is no table' 'ready/broken.safetensors' tables
expect 0 'the very weights' tables tiny.gguf
says 'are known by their hash' "^$PWD/ready/tiny-1m.safetensors\$"
rm ready/broken.safetensors

# With only config.json a table is found by shape and name.
"$PYTHON" - <<'PY'
import json, os
for name, layers in (("Tiny-1M", 2), ("Tiny-1M-chat", 2), ("Tiny-9M", 3)):
    os.mkdir(name)
    json.dump({"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": layers,
               "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "hidden_size": 64,
               "intermediate_size": 128, "vocab_size": 300, "rms_norm_eps": 1e-5,
               "max_position_embeddings": 2048, "rope_theta": 10000.0}, open(f"{name}/config.json", "w"))
PY
expect 0 'weights of this name and shape' tables Tiny-1M
says 'are found' "^$PWD/ready/tiny-1m.safetensors\$"
fails 'another name' 'no table for "Tiny-1M-chat", 2 layers.*has this shape and is for Org/Tiny-1M; if your weights' \
    tables Tiny-1M-chat
fails 'another shape' 'no table for "Tiny-9M", 3 layers with 4 query and 2 KV heads of 16 numbers: none of the 1' \
    tables Tiny-9M
fails 'a model that is not there' 'nothing.gguf' tables nothing.gguf
KVBUDGET_TABLES=$PWD/none fails 'no folder' 'there is no folder of tables; name it in KVBUDGET_TABLES' tables
for name in Tiny Org/ /Tiny Org/a/b 'Org/Tiny,' 'Org/Tiny M'; do
    misused "the name '$name'" 'expected ORGANISATION/NAME' tables --add own.safetensors --name "$name" \
        --results worth.json
done
misused 'tables with formats of no model' 'expected a model' tables --packed
misused '--name alone' 'expected at most one model' tables --name Org/Tiny
misused 'two models' 'expected at most one model' tables Tiny-1M Tiny-9M
end
