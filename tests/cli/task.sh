#!/usr/bin/env bash
# kvbudget task on the tiny model: the same seed gives the same bytes, and the rest of the chain accepts them.
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

tiny_model tiny.gguf
expect 0 'task --list' task --list
says 'the list names tasks and parameters' '^niah_multikey_2 '
says 'with their ranges' ':keys=4 \(1 to 256\)'
printf 'He had a boat. It was old!\nNobody knew where. ' >hay.txt
TASKS=(-k niah_single_1 -k niah_multiquery --haystack hay.txt -k vt -k fwe -k kv:uuid=0)
expect 0 'task --output' task tiny.gguf "${TASKS[@]}" -t 2000 -c 2 -s 5 --output a.jsonl
expect 0 'task --output, another seed' task tiny.gguf "${TASKS[@]}" -t 2000 -c 2 -s 6 --output c.jsonl
differ 'another seed, other bytes' a.jsonl c.jsonl
json 'a line has what scoring needs' <(head -n 1 a.jsonl) \
    'j["task"] == "niah_single_1" and j["seed"] == 5 and j["n_tokens"] <= 2000 and j["gold"][0][0] in j["context"]
    and j["gold"][0][0] in j["answers"][0]'
expect 0 'profile takes the tasks' profile tiny.gguf a.jsonl --metric keydiff -o run.h5 --quiet
exists 'their record' run.h5
empty '--output alone answers nothing' out
expect 0 'a task alone is answered' task tiny.gguf -k niah_multikey_2:questions=2 -t 900 -c 2
says 'with its mean' '^niah_multikey_2:questions=2, [0-9]+ tokens, 4 questions'
POLICIES=()
for p in full morphkv:window=8 morphkv:window=8:fusion=max tova h2o streaming keydiff keydiff:block=16:window=0.2 \
    lagkv:lag=16:sink=4 topk quest sparq:channels=4 \
    rocketkv rocketkv-mt; do POLICIES+=(--policy "$p"); done
expect 0 'task with metrics and policies' task tiny.gguf -k niah_single_1 -t 900 -c 1 --answer --metric snapkv \
    --metric keydiff --allocator uniform --allocator ada "${POLICIES[@]}" --ratio 0.8 -o cells
says 'what the full cache does not solve is said to tell little' '^niah_single_1: 0 of 100 with the full cache' err
says 'a metric keeps its share' 'keydiff +ada +0.8 +(19\.[5-9]|20\.)'
says 'a policy that evicts keeps its share' 'morphkv:window=8 +uniform +0.8 +(19\.[5-9]|20\.)'
says 'one that looks keeps all' 'quest +uniform +0.8 +100.00 +(1[5-9]|2[0-2])\.'
holds 'one line per cell, and one for the full cache' [ "$(wc -l <cells.csv)" = $((2 + 2 * 2 + 14)) ]
check 'the picture has a chart for each method' charts cells.svg 16
json 'JSON has every score, one sample being too few for an interval, model, seed and allocators' cells.json \
    '(len(j["rows"]) == 19 and j["settings"]["seed"] == 1 and j["command"] == "task" and
    len(j["inputs"][0]["sha256"]) == 64 and j["settings"]["allocators"][1]["label"] == "ada" and
    all(r["score_low"] is None and 0 <= r["score"] <= 1 and len(d["samples"]) == 1
    for r, d in zip(j["rows"], j["details"])))'
expect 0 'a ratio alone' task tiny.gguf -k niah_single_1 -t 900 -c 1 -r 0.5 --json --quiet --threads 1
json 'compares three metrics under three allocators, and prints JSON' out '(len(j["rows"]) == 10 and
    {r["metric"] for r in j["rows"]} == {"full", "snapkv:kvpress", "keydiff", "ea:kvpress"})'
ONE=(-k niah_single_1 -t 900 -c 1 -m keydiff -a uniform -r '0.5,0.8' -o one -q)
expect 0 'one metric' task tiny.gguf "${ONE[@]}"
cp one.json plain.json
expect 0 'refitted, from the log of it' task tiny.gguf "${ONE[@]/-q/--answer}" --refit
says 'answers cut caches anew, and not the full one' '^niah_single_1: 2 answered, 1 more from one.cells' err
json 'the rows say so' one.json '([r["refit"] > 0 for r in j["rows"]] == [False, True, True] and
    all(a["refit"] == 0 and a["kept"] == b["kept"] for a, b in zip(json.load(open("plain.json"))["rows"], j["rows"])))'
misused 'policies are not refitted' 'leave no time to refit' task tiny.gguf -k vt -t 600 -p tova --refit
expect 0 'another precision' task tiny.gguf -k niah_single_1 -t 900 -c 1 -m none --allocator uniform \
    -p keydiff:block=64 -p lagkv:lag=32 -r 0.8 --compute bf16x3
says 'keeps its share' 'keydiff:block=64 +uniform +0.8 +20\.'
misused 'a precision that does not exist' "no 'f8'" task tiny.gguf -k vt -t 600 --compute f8
misused 'a ratio beyond 1' 'below 1' task tiny.gguf -k vt -t 600 -p morphkv -r 80
echo '{"context": "Anna lives in Oslo.", "questions": ["Where does Anna live?"], "answers": [" Oslo."]}' >texts.jsonl
expect 0 'task qa' task tiny.gguf -k qa --texts texts.jsonl --answer
says 'one text, one question' '^qa, .* 1 question '
expect 0 'nine allocators' task tiny.gguf -k niah_single_1 -t 900 -c 1 -m keydiff -r 0.5 -o nine -a uniform -a pyramid \
    -a pyramid:beta=5 -a pyramid:beta=10 -a pyramid:beta=15 -a ada -a ada:alpha=0.4 -a ada-original -a ada-global
says 'are more than a picture shows, and it says so' 'only the first eight allocators' nine.svg
fails 'what no task knows' 'compare with it in kvbudget eval' task tiny.gguf -k vt -t 600 -a oracle
fails 'no text to hide a needle in' 'give one with --haystack' task tiny.gguf -k niah_single_2 -t 900
printf 'caf\351' >latin.txt
fails 'a haystack of another encoding' 'latin.txt: byte 3 is 0xe9' task tiny.gguf -k niah_single_2 -t 900 \
    --haystack latin.txt
misused 'a length that nobody waits for' '--tokens: expected at most 16777216' task tiny.gguf -k vt -t 4294967295
fails 'no length' 'give --tokens' task tiny.gguf -k vt
says 'and no samples' '^vt: failed' err
fails 'a length that is too short' 'does not fit into 20 tokens' task tiny.gguf -k vt -t 20 --output x.jsonl
absent 'a failure leaves no file' x.jsonl
misused 'an operand that is no table' "'uniform' is no table" task tiny.gguf uniform -k vt -t 500
misused 'no model' 'a model is needed' task
misused 'no task' 'no task is given' task tiny.gguf -t 500
end
