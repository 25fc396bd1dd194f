#!/usr/bin/env bash
# Models larger than memory: reading weights from the file gives the same records, and a plan needs no weights.
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
tiny_model tiny.gguf
printf '{"sample_id":"ids","context_ids":[%s],"question_ids":[[21,22],[23]]}\n' "$(seq -s, 5 20)" >ids.jsonl
PROFILE=(profile tiny.gguf ids.jsonl --new-tokens 5 --ignore-eos --metric keydiff --metric critical:share=0+keydiff)
for compute in f32 bf16x3 bf16; do
    kvb "${PROFILE[@]}" -o "$compute.h5" --compute "$compute"
    for held in 0 1; do
        expect 0 "$compute, $held layers held" "${PROFILE[@]}" -o other.h5 --compute "$compute" --force --held $held
        says "$compute, $held layers held: it says so" "note: the weights of $((2 - held)) of 2 layers" err
        same "$compute, $held layers held: the same record" "$compute.h5" other.h5
    done
done
expect 0 'the plan of an addition that the record has already' "${PROFILE[@]}" -o f32.h5 --add --plan
says 'has nothing to do' '^work +0 contexts' out

mkdir folder
cat >folder/config.json <<'END'
{"model_type": "llama", "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64,
 "hidden_size": 512, "intermediate_size": 1024, "vocab_size": 9000, "max_position_embeddings": 4096,
 "rms_norm_eps": 1e-5, "tie_word_embeddings": false, "torch_dtype": "bfloat16"}
END
for model in folder folder/config.json; do
    expect 0 "the plan of $model, without weights" profile $model ids.jsonl --plan --metric keydiff
    says 'it has the shape' '4 layers, 8 query heads, 4 KV heads, head size 64' out
    says 'it has memory' '^memory +0\.[0-9]+ GiB at its peak' out
    says 'it has a time' '^time +about [0-9.]+ s on backend cpu' out
done
kvb profile folder ids.jsonl --plan --held 1 --metric keydiff
says 'what does not fit stays in the file' '^weights +of 3 of 4 layers stay in the file, 0\.01[0-9] GiB' out
printf '{"sample_id":"text","context":"%0400d","questions":["%040d"]}\n' 0 0 >text.jsonl
expect 0 'texts without a tokenizer' profile folder text.jsonl --plan --memory 20GiB
says 'are counted by their bytes' '1 context, 101 tokens' out
# The more a prefill takes, the shorter are the contexts that tune reads.
"$PYTHON" -c 'import json
ids = {chr(x): i for i, x in enumerate([*range(33, 127), *range(161, 173), *range(174, 324)])}
print(json.dumps({"model": {"type": "BPE", "vocab": ids, "merges": []}}))' >folder/tokenizer.json
for layers in 4:2048 20:1024 80:512; do
    sed -i "s/\(layers\": \)[0-9]*/\1${layers%:*}/; s/\(intermediate_size\": \)[0-9]*/\150000/" folder/config.json
    kvb tune folder --plan
    says "${layers%:*} layers: contexts" "longest ${layers#*:}\\)" out
done
says 'the usual number of texts' '2 texts to calibrate on, 2 to choose by, 1 to judge' err
sed -i 's/\(layers": \)[0-9]*/\14/; s/\(intermediate_size": \)[0-9]*/\1100000/' folder/config.json
for tokens in 1024:8 2048:8 4000:4; do
    kvb tune folder --tokens "${tokens%:*}" --plan
    says "contexts of ${tokens%:*} tokens: texts" "^tune: ${tokens#*:} texts to calibrate on" err
done
misused 'contexts of no tokens' '--tokens: expected 64 to 1048576, found 0' tune folder -o none --tokens 0
fails 'a plan is no model' 'folder/model.safetensors: cannot open' profile folder ids.jsonl -o x.h5 --metric keydiff
end
