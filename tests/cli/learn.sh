#!/usr/bin/env bash
# Rankings learned from a record, on the tiny model: learn, then solve, profile, eval, task and inspect with them.
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
tiny_record --metric knorm --metric snapkv:kvpress:window=8

# ---- learn
expect 0 'learn' learn run.h5 -o rank.safetensors
says 'it says which settings were chosen' 'chosen: lambda'
says 'it shows every metric alone' '^ .*   knorm$'
expect 0 'the same again' learn run.h5 -o again.safetensors --quiet
same 'the same bytes' rank.safetensors again.safetensors
OMP_NUM_THREADS=3 expect 0 'with three threads' learn run.h5 -o again.safetensors --quiet
same 'the same bytes with three threads' rank.safetensors again.safetensors
expect 0 'as JSON' learn run.h5 -o again.safetensors --quiet --json
json 'the chosen settings lose least' out '(lambda score, t: all(score(x) >= score(t[j["chosen"]]) for x in t[3:]))(
    lambda x: x["loss"][0] * x["loss"][1] * x["loss"][2], j["trials"])'
json 'the three metrics, and fits to all of them' out '[(x["plain"], len(x["metrics"])) for x in j["trials"]] == (
    [(True, 1)] * 3 + [(False, 3)] * 12)'
expect 0 'a chosen form' learn run.h5 -o two.safetensors --feature keydiff --feature snapkv \
    --target mean --lambda 0.01 --exponent 0.25 --quiet --json
json 'two features, one fit' out 'j["trials"][-1]["metrics"] == ["keydiff", "snapkv:kvpress:window=8"]'

expect 0 'heads by themselves' learn run.h5 -o own.safetensors --own --quiet
kvb inspect own.safetensors
says 'the file says so' 'layer_mean: false'
says 'and by the means of the calibration' 'frozen: true'
kvb inspect rank.safetensors
says 'the layer has a say by default' "layer's "

# ---- fitted to how far outputs move, then used on a record with LU-KV's importance
expect 0 'profile with the other oracle' profile tiny.gguf calib.jsonl -o output.h5 --oracle output --quiet \
    --new-tokens 8 --ignore-eos --metric keydiff --metric knorm --metric snapkv:kvpress:window=8
kvb inspect output.h5
says 'the record says which it was' 'mean output'
expect 0 'learn from it' learn output.h5 -o moved.safetensors --quiet
expect 0 'solve on the usual record' solve run.h5 --metric learned=moved.safetensors -o moved_table.safetensors --quiet
fails 'another oracle in the same record' 'oracle' profile tiny.gguf calib.jsonl -o output.h5 --resume --quiet \
    --new-tokens 8 --ignore-eos --metric keydiff --metric knorm --metric snapkv:kvpress:window=8
expect 0 'what is added has the same oracle' profile tiny.gguf -o output.h5 --add --metric streaming --quiet calib.jsonl
expect 0 'a ranking is added' profile tiny.gguf -o output.h5 --add --metric learned=moved.safetensors --quiet
fails 'which is not a feature' 'of another; name the metrics with --feature' learn output.h5 -o x.safetensors
misused 'an oracle of no kind' 'lukv.output' profile tiny.gguf calib.jsonl -o x.h5 --oracle max

# ---- solve and validate
expect 0 'solve' solve run.h5 --metric learned=rank.safetensors -o learned.safetensors --quiet
says 'the table is for the ranking' '^learned:[0-9a-f]{12}: '
expect 0 'the certificate holds' validate --certificate learned.safetensors run.h5 --quiet
expect 0 'beside the best table' validate run.h5 learned.safetensors --quiet
expect 0 'a study' solve run.h5 --metric learned=rank.safetensors --holdout --quiet
expect 0 'budgets' budgets learned.safetensors --ratio 50% --tokens 100
says 'an engine reads which metric' 'learned:'
expect 0 'solve for two rankings' solve run.h5 --metric learned=rank.safetensors --metric learned=two.safetensors \
    --metric keydiff -o '{metric}.safetensors' --quiet
n=$(find . -name 'learned_*.safetensors' | wc -l)
if [ "$n" = 2 ] && [ -e keydiff.safetensors ]; then ok 'three tables'; else not_ok "three tables ($n)"; fi

# ---- profile, eval, task with a ranking
expect 0 'profile by it' profile tiny.gguf calib.jsonl -o scores.h5 --quiet --new-tokens 8 --ignore-eos \
    --metric learned=rank.safetensors
head -c 400 "$KVB_ROOT/README.md" >text.txt
expect 0 'evaluate the table' eval tiny.gguf learned.safetensors text.txt -t 100 -n 8 -r 0.5 -o worth --quiet
json 'its metric is the ranking' worth.json 'all(r["metric"].startswith("learned:") for r in j["rows"])'
expect 0 'evaluate the metric' eval tiny.gguf text.txt --metric learned=rank.safetensors -t 100 -n 8 -r 0.5 -o bare \
    --quiet
expect 0 'a task' task tiny.gguf learned.safetensors -k niah_single_1 -t 900 -c 1 -r 0.5 --quiet

# ---- inspect
expect 0 'its table as curves for kvpress' export learned.safetensors -o learned.npy
expect 0 'inspect the ranking' inspect rank.safetensors
says 'what they weigh' 'recency: '

# ---- refusals
fails 'no such feature' 'the record has' learn run.h5 -o x.safetensors --feature h2o
fails 'a ranking as a feature' 'cannot be a feature' learn run.h5 -o x.safetensors --feature learned=rank.safetensors
misused 'no output' 'expected one record' learn run.h5
misused 'an unknown target' 'max.mean' learn run.h5 -o x.safetensors --target median
misused 'a lambda of nothing' 'above 0' learn run.h5 -o x.safetensors --lambda 0
fails 'a table is not a ranking' 'make one with' solve run.h5 --metric learned=keydiff.safetensors
misused 'profile by its name alone' 'RANK.safetensors' profile tiny.gguf calib.jsonl -o y.h5 \
    --metric learned:0123456789ab
end
