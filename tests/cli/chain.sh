#!/usr/bin/env bash
# The whole chain on the tiny model: every file between two steps can be read by other code.
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
L=2 G=2
PROFILE=(profile tiny.gguf calib.jsonl --new-tokens 8 --ignore-eos --metric snapkv:kvpress --metric keydiff \
    --metric ea:kvpress --metric snapkv:lukv --metric ea:lukv)

tiny_inputs
exists 'the tiny model is written' tiny.gguf

# ---- profile
expect 0 'profile --plan' "${PROFILE[@]}" --plan
says 'the plan tells memory' '^memory +[0-9.]+ GiB'
says 'the plan tells time' '^time +about [0-9.]+ s'
absent 'a plan writes nothing' run.h5
expect 0 'profile' "${PROFILE[@]}" -o run.h5
exists 'a record' run.h5
absent 'the folder of parts is gone' run.h5.parts
says 'a log gets lines, not a bar' '^profile: run.h5' err
expect 0 'profile --quiet' "${PROFILE[@]}" -o quiet.h5 --quiet
if [ -s out ] || [ -s err ]; then not_ok 'quiet is quiet' && show; else ok 'quiet is quiet'; fi
same 'the same command writes the same bytes' run.h5 quiet.h5
fails 'a record is not overwritten' 'run.h5.*(--resume|--force)' "${PROFILE[@]}" -o run.h5
expect 0 'profile --force replaces it' "${PROFILE[@]}" -o run.h5 --force --quiet
same 'by the same bytes' run.h5 quiet.h5
expect 0 'profile --resume of a finished record' "${PROFILE[@]}" -o run.h5 --resume --quiet
same 'changes nothing' run.h5 quiet.h5
fails 'resume with another seed' 'seed' "${PROFILE[@]}" -o run.h5 --resume --seed 5

# ---- solve
for m in snapkv:kvpress keydiff ea:kvpress; do
    t=${m%%:*}.safetensors
    expect 0 "solve $m" solve run.h5 --metric "$m" -o "$t"
    check "the table of $m keeps the invariants" table "$t" $L $G "$m"
done
expect 0 'solve again' solve quiet.h5 --metric keydiff -o again.safetensors
same 'the same record gives the same table' keydiff.safetensors again.safetensors
expect 0 'solve, mean loss, full hull, per layer' solve run.h5 --metric keydiff --aggregate mean_loss --hull full \
    --scope layer -o loss.safetensors
check 'that table keeps the invariants too' table loss.safetensors $L $G keydiff
misused 'refitting without curves' 'give --curves, too' profile tiny.gguf calib.jsonl -o nats.h5 --refit
expect 0 'the plan of losses in nats' profile tiny.gguf calib.jsonl --plan --curves --metric keydiff
says 'counts what they take' '^losses +curves and gains: [0-9.]+ MB of these'
expect 0 'losses in nats' profile tiny.gguf calib.jsonl -o nats.h5 --quiet --curves --metric keydiff --new-tokens 8 \
    --ignore-eos
expect 0 'solve for them' solve nats.h5 --metric keydiff --loss output -o nats.safetensors --quiet
says 'it compares ratio by ratio' 'Taken: own budgets at [0-9]+ ratios, uniform at [0-9]+, published at [0-9]+'
check 'the table keeps the invariants' table nats.safetensors $L $G keydiff
while read -r name options; do # every way to solve knows this loss
    # shellcheck disable=SC2086
    expect 0 "losses in nats: $name" solve nats.h5 --metric keydiff --loss output $options --json --quiet
    # shellcheck disable=SC2016
    json "losses in nats: $name, predicted KL that grows with the ratio" out \
        '(lambda x: x == sorted(x) and x[-1] > 0 and all(v >= 0 for v in x))([r.get("table_loss", r.get("loss"))
        for r in j["rows"] if r.get("allocator", r.get("aggregate", "")) in ("", "mean_loss", "mean_ratio", "worst",
        "cvar:0.5")][-3:])'
done <<'WAYS'
the_average --alone
worst --aggregate worst --alone
cvar --aggregate cvar:0.5 --alone
exact --exact --ratios 0.3,0.5,0.8
floors --floor 0.2@0 --ratios 0.3,0.5,0.8
pages --block 16 --ratios 0.3,0.5,0.8
layers --scope layer --alone
holdout --holdout
WAYS
expect 0 'without a word about the loss' solve nats.h5 -m keydiff -o best.safetensors --quiet
expect 0 'and with it' solve nats.h5 -m keydiff --loss output -o output.safetensors --quiet
same 'a record with curves gives the same table' best.safetensors output.safetensors
expect 0 'solve for another window than that of the curves' solve nats.h5 -m keydiff --window 3
says 'says that it minimises importance, and why' \
    'evicted importance; .* curves keep 4 sinks and a window of 1 tokens, not 4 and 3' err
lacks 'and does not send anybody for curves' 'profile --curves' err
expect 0 'the curves own window' solve nats.h5 -m keydiff --window 1
lacks 'is no reason for a note' 'evicted importance' err
expect 0 'gains and losses of layers' inspect nats.h5 --json
json 'are of all layers' out "([x['layer'] for x in j['predicted_loss_at_80_percent']] == list(range($L)) and
    all(x['gain'] > 0 and x['keydiff'] > 0 for x in j['predicted_loss_at_80_percent']))"
expect 0 'a page of it' report nats.safetensors --record nats.h5 -o nats.html
says 'it says what is predicted' 'predicts a KL of' nats.html
kvb inspect nats.safetensors --json
kvb recommend tiny.gguf nats.safetensors calib.jsonl -t 64 -n 4 --confidence 0.2 --json \
    --max-kl "$("$PYTHON" -c 'import json; print(1.0001 * json.load(open("out"))["rows"][0]["table_loss"])')" # at 50 %
json 'recommend tries ratios up to where the limit is predicted' out '0.5 == [r["ratio"] for r in j["rows"]][-1]'
expect 0 'solve without curves' solve run.h5 --metric keydiff
says 'says what is minimised and what there is beyond' 'importance[; ].*profile --curves' err
fails 'a metric that was not recorded' 'keydiff' solve run.h5 --metric snapkv:lukv:window=8 -o no.safetensors

cp nats.h5 grown.h5
expect 0 'a metric is added without curves' profile tiny.gguf --add -o grown.h5 --metric knorm
says 'says what that costs' 'has curves, and what is added gets none: give --curves' err
fails 'solve says how they are added' 'profile --add -m METRIC --curves' solve grown.h5 --metric knorm --loss output
expect 0 'a new one with them' profile tiny.gguf --add -o grown.h5 --metric tova --curves --quiet
expect 0 'both can be solved' solve grown.h5 --metric knorm --metric tova --loss output --quiet

# ---- budgets
expect 0 'budgets' budgets keydiff.safetensors --ratio 0.5 --tokens 1000
expect 0 'budgets --json' budgets keydiff.safetensors --ratio 0.5 --tokens 1000 --json
check 'the budgets add up' budgets_add_up out 2000
misused 'a ratio beyond 1' 'ratio' budgets keydiff.safetensors --ratio 1.5 --tokens 1000

# ---- export, import
expect 0 'export npy' export keydiff.safetensors --format npy -o keydiff.npy
check 'the .npy is the table' npy_is_table keydiff.npy keydiff.safetensors
json 'the side-car tells how to load it' keydiff.json '"kvpress" in j and "keydiff" in json.dumps(j)'
expect 0 'export lukv-steps' export run.h5 --format lukv-steps -o steps
exists 'the published layout' steps/context_long/question_0.npy
expect 0 'import lukv-steps' import steps -o imported.h5
for m in keydiff snapkv:lukv ea:lukv; do
    expect 0 "solve $m" solve run.h5 --metric "$m" --loss importance -o a.safetensors
    expect 0 "solve the imported $m" solve imported.h5 --metric "$m" -o b.safetensors
    check "the imported $m gives the same budgets" same_budgets a.safetensors b.safetensors
done
cp -r steps bare && rm bare/kvbudget.json
expect 0 'import arrays that say nothing of the model' import bare -o bare.h5
fails 'a table needs its query heads' 'import it again with --model-heads' solve bare.h5 --metric keydiff \
    -o none.safetensors

# ---- inspect
for f in run.h5 imported.h5 keydiff.safetensors calib.jsonl; do
    expect 0 "inspect $f" inspect "$f"
    expect 0 "inspect --json $f" inspect --json "$f"
    json "inspect --json $f is JSON" out 'isinstance(j, dict)'
done

# ---- report
expect 0 'report' report keydiff.safetensors ea.safetensors -o two.html
check 'it has a cell for every head' maps two.html 6 $((L * G))
end
