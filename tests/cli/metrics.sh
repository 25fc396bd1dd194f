#!/usr/bin/env bash
# Every eviction metric on the tiny model: all in one profile, then a table for each; metrics that cannot be profiled
# are refused.
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
METRICS=(snapkv:kvpress:window=16 snapkv:lukv:window=16 snapkv:adakv:window=16 snapkv:factory snapkv:keydiff:window=16
    keydiff keydiff:anchor=raw keydiff:anchor=median keydiff:similarity=dot keydiff:similarity=euclid ea:kvpress ea:lukv
    lagkv:kvpress:lag=16 lagkv:kvpress:lag=16:cross=1 lagkv:paper:sink=4:lag=16:mode=local \
        lagkv:paper:sink=4:lag=16:mode=l2norm
    morphkv:window=16 morphkv:window=16:fusion=max rocketkv:window=16 h2o:window=16 h2o:kvpress tova tova:scope=group
    knorm streaming random random:seed=2 critical:share=0+snapkv:kvpress:window=16 critical:share=0+keydiff)

tiny_inputs
ARGUMENTS=()
for m in "${METRICS[@]}"; do ARGUMENTS+=(--metric "$m"); done
PROFILE=(profile tiny.gguf calib.jsonl --new-tokens 6 --ignore-eos "${ARGUMENTS[@]}")

expect 0 'all metrics in one pass' "${PROFILE[@]}" -o run.h5
for m in "${METRICS[@]}"; do
    if grep -q -F " $m " err; then ok "the cost of $m is printed"; else not_ok "the cost of $m is printed"; fi
done
says 'and what they share' 'shared [0-9.]+ s' err
expect 0 'one thread' "${PROFILE[@]}" -o one.h5 --threads 1 --batch 1 --quiet
same 'gives the same bytes' run.h5 one.h5

for m in "${METRICS[@]}"; do
    expect 0 "solve $m" solve run.h5 --metric "$m" -o table.safetensors
    check "the table of $m keeps the invariants" table table.safetensors 2 2 "$m"
done
# ---- the JSON file beside an export names the kvpress scorer with the calibrated parameters
press() {
    expect 0 "solve $1" solve run.h5 --metric "$1" -o press.safetensors
    expect 0 "export $1" export press.safetensors --format npy -o press.npy
    # A warning about heads at their floor ("from ratio ...") is not one about the scorer.
    json "names $2" press.json "j[\"kvpress\"][\"press\"] == \"$2\" and \
        (not j[\"kvpress\"].get(\"warning\", \"from ratio\").startswith(\"from ratio\")) == $3"
}
press tova 'TOVAPress()' False
press tova:scope=group 'YourPress()' True
press knorm 'KnormPress()' False
press keydiff 'KeyDiffPress()' False
press keydiff:similarity=dot 'KeyDiffPress()' True
press lagkv:kvpress:lag=16 'LagKVPress(n_sink=4, lag_size=16, cross_scoring=False)' False
press lagkv:paper:sink=4:lag=16:mode=local 'LagKVPress(n_sink=4, lag_size=16, cross_scoring=False)' True
press snapkv:keydiff:window=16 'SnapKVPress(window_size=16, kernel_size=7)' False
press snapkv:lukv:window=16 'SnapKVPress(window_size=16, kernel_size=7)' True
press ea:lukv \
    'ExpectedAttentionPress(n_future_positions=512, n_sink=4, use_covariance=True, use_vnorm=True, epsilon=0.02)' True
press ea:kvpress \
    'ExpectedAttentionPress(n_future_positions=512, n_sink=4, use_covariance=True, use_vnorm=True, epsilon=0.02)' False

# ---- metrics that cannot be profiled can be evaluated, with the table of a form that can be profiled, or without one
expect 0 'a table for CriticalKV' solve run.h5 --metric critical:share=0+keydiff -o critical.safetensors
expect 0 'serves both of its stages' eval tiny.gguf critical.safetensors calib.jsonl --metric critical+keydiff \
    --metric h2o:half --metric streaming --metric streaming:kvpress -a uniform -t 140 -n 8 --ratio 0.8 --sink 0 \
    --window 0 --quiet --dump-kept kept.jsonl
says 'and is one of its allocators' '^ +80 %  kvbudget '
"$PYTHON" - >kept.txt <<'PYTHON_END'
import json
rows = [json.loads(line) for line in open("kept.jsonl")]
kept = {(r["metric"], r["text"]): r["kept"] for r in rows if r["allocator"] == "uniform"}
texts = {text for _, text in kept}
print("same", texts and all(kept["streaming", t] == kept["streaming:kvpress", t] for t in texts))
print("half", all(set(range(126, 140)) <= set(head) for t in texts for head in kept["h2o:half", t]))
PYTHON_END
says 'both forms of StreamingLLM keep the same tokens' '^same True' kept.txt
says 'H2O keeps half of its budget for recent tokens' '^half True' kept.txt

for m in h2o:half streaming:kvpress critical+keydiff; do
    misused "$m cannot be profiled" 'cannot be profiled, its order of tokens depends on the budget' \
        profile tiny.gguf calib.jsonl -o no.h5 --metric "$m"
done
misused 'a wrong choice lists the right ones' 'expects one of mean\|raw\|median' profile tiny.gguf calib.jsonl \
    -o no.h5 --metric keydiff:anchor=mode
misused 'CriticalKV needs a metric' 'critical\+METRIC' profile tiny.gguf calib.jsonl -o no.h5 --metric critical
fails 'a context that is too short for LagKV' '100 tokens, expected at least 260' profile tiny.gguf calib.jsonl \
    -o no.h5 --metric lagkv --max-tokens 100
absent 'no record is left' no.h5
end
