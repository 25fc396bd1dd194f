#!/usr/bin/env bash
# kvbudget refine on the tiny model: less damage than the table, the same bytes again, stops, and tables with limits.
# shellcheck source=tests/cli/lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
tiny_model tiny.gguf
tiny_calib calib.jsonl
expect 0 'profile' profile tiny.gguf calib.jsonl -o run.h5 --quiet --new-tokens 8 --ignore-eos --metric keydiff
expect 0 'solve' solve run.h5 --metric keydiff -o table.safetensors --quiet
expect 0 'solve with pages, levels and a floor' solve run.h5 --metric keydiff --block 8 --levels 1 --floor 0.05 \
    -o paged.safetensors --quiet
"$PYTHON" -c '
for k in range(7):
    print("\n".join(f"line {i * (k + 3) % 101} of text {k} says {i * i % (97 + k)}" for i in range(50)),
        file=open(f"text{k}.txt", "w"))'
SIZE='--tokens 150 --next 12 --evaluations 40 -r 50%,80% --quiet --json'
# refine NAME OUT ARGUMENT...: on the seven texts.
refine() {
    local name=$1 to=$2
    shift 2
    # shellcheck disable=SC2086
    expect 0 "$name" refine tiny.gguf table.safetensors text?.txt $SIZE -o "$to" "$@"
}

refine 'refine' one.safetensors
cp out one.json
json 'texts are dealt: two to search on, two to choose, three to judge' one.json \
    '[len(j["settings"]["refined"][s]["texts"]) for s in ("calibration", "selection", "test")] == [2, 2, 3]'
json 'the search began at budgets by each head alone' one.json 'j["settings"]["refined"]["start_texts"] == 2'
json 'no ratio is worse on the texts that choose' one.json \
    'all(r["kl"] <= r["kl_before"] for r in j["rows"] if r["set"] == "selection")'
json 'and something is gained' one.json \
    'any(r["kl"] < r["kl_before"] for r in j["rows"] if r["set"] == "selection") and len(j["rows"]) == 3 * 2'
json 'what is left has an interval where texts are enough, and every text its KL' one.json \
    'all(r["kl_left"] is None or abs(r["kl_left"] * r["kl_before"] - r["kl"]) < 1e-9 for r in j["rows"]) and
    len(j["details"]) == 6 and all(len(d["kl"]) == len(d["kl_before"]) in (2, 3) for d in j["details"])'
expect 0 'eval the result' eval tiny.gguf table.safetensors one.safetensors text1.txt text3.txt text5.txt -a none \
    --tokens 150 --next 12 -r 0.5,0.8 --quiet --json
cp out worth.json
if "$PYTHON" - <<'PYTHON_END'; then ok 'eval finds the same damage'; else not_ok 'eval finds the same damage'; fi
import json
told = json.load(open("one.json"))["settings"]["refined"]
found = json.load(open("worth.json"))["rows"]
for label, name in (("kvbudget", "kl_before"), ("kvbudget-refined", "kl")):
    for i, ratio in enumerate((0.5, 0.8)):
        row, = [r for r in found if r["allocator"] == label and abs(r["ratio"] - ratio) < 1e-9]
        assert abs(row["kl"] - told["test"][name][i]) < 1e-9 * max(1, row["kl"]), (label, ratio, row["kl"])
PYTHON_END
expect 0 'the table says how it was found' inspect one.safetensors --json
says 'with the sets and the seed' 'refined.*selection.*kl_before' out
json 'evaluations, seed, and hashes of table and texts' out \
    '(lambda r: r["evaluations"] > 0 and r["seed"] == 1 and len(r["from"]) == 64 and all(len(r[s]["kl"]) == 2 and
    all(len(t) == 64 for t in r[s]["texts"]) for s in ("calibration", "selection", "test")))(
    json.loads(j["metadata"]["refined"]) if isinstance(j["metadata"]["refined"], str) else j["metadata"]["refined"])'

# shellcheck disable=SC2086
expect 0 'with progress' refine tiny.gguf table.safetensors text?.txt ${SIZE/--quiet --json/} -o shown.safetensors
says 'it shows the heads alone' 'heads alone at 6 budgets each, text 2 of 2, 0 s left' err
says 'and their rate' '48 cuts of heads alone, [0-9.]+ a second' err
says 'it shows the KL of both sets as they fall' 'round 1, .* KL on calibration [0-9.]+ .* on selection [0-9.]+ ' err
says 'and the KL of all three' 'calibration +selection +test' out
refine 'again, with one thread and other batches' two.safetensors --threads 1 --batch 3
same 'gives the same table' one.safetensors two.safetensors
head -n 5 one.safetensors.cells >three.safetensors.cells
printf '{"keys": ["cut sho' >>three.safetensors.cells
refine 'after a stop' three.safetensors
same 'the same again' one.safetensors three.safetensors
# refine_stopped OUT PATTERN ARGUMENT...: a search that would go on for long gets a signal when the pattern stands in
# what it says, 30 s at most; the exit status is left in $stopped.
refine_stopped() {
    local to=$1 pattern=$2 process
    shift 2
    # shellcheck disable=SC2086
    "$KVB" refine tiny.gguf table.safetensors text?.txt ${SIZE/--quiet --json/} --evaluations 100000 \
        -o "$to" "$@" >out 2>err &
    process=$!
    for _ in $(seq 300); do
        grep -qE "$pattern" err && break
        sleep 0.1
    done
    kill -TERM $process
    wait $process
    stopped=$?
}
refine_stopped four.safetensors 'round 4,'
if [ $stopped = 143 ]; then ok 'a signal ends it'; else not_ok 'a signal ends it'; fi
says 'and says what is left' 'four.safetensors is the best so far' err
expect 0 'and its account' inspect four.safetensors --json
says 'has what the search saw' 'stopped.*true.*loss_before' out
expect 0 'what is left is a table' budgets four.safetensors --ratio 0.8 --tokens 1000
# Stopped before any candidate was measured, and where a better table is there: nothing is lost.
refine_stopped five.safetensors 'heads alone at . budgets each, text 1'
if [ -e five.safetensors ]; then
    expect 0 'a table that a late stop left' inspect five.safetensors --json
    json 'is better than the one that it is from' out \
        '(lambda s: any(a < b for a, b in zip(s["loss"], s["loss_before"])))(json.loads(j["metadata"]["refined"]
        )["selection"] if isinstance(j["metadata"]["refined"], str) else j["metadata"]["refined"]["selection"])'
else
    says 'a stop without a candidate writes nothing' 'nothing is written, and the same command goes on' err
fi
cp four.safetensors kept.safetensors
rm four.safetensors.cells
refine_stopped four.safetensors 'heads alone at . budgets each, text 1'
if [ $stopped = 143 ]; then ok 'a signal ends the second run'; else not_ok 'a signal ends the second run'; fi
if cmp -s four.safetensors kept.safetensors; then
    ok 'a table that lost no more is as it was'
else # a late stop: what stands there now must be better
    "$KVB" inspect kept.safetensors --json >before.json
    "$KVB" inspect four.safetensors --json >after.json
    if "$PYTHON" - <<'PYTHON_END'; then ok 'a table is replaced by a better one only'; else not_ok \
        'a table is replaced by a better one only'; fi
import json
def left(f):
    r = json.load(open(f))["metadata"]["refined"]
    s = (json.loads(r) if isinstance(r, str) else r)["selection"]
    return sum(a / b for a, b in zip(s["loss"], s["loss_before"]))
assert left("after.json") < left("before.json"), (left("before.json"), left("after.json"))
PYTHON_END
fi
refine 'a finished search' six.safetensors
cp six.safetensors kept.safetensors
refine_stopped six.safetensors 'round 0,' # resumed from its log, with the table's own losses known at once
if [ $stopped = 143 ]; then ok 'a signal ends the resumed run'; else not_ok 'a signal ends the resumed run'; fi
json_left() { "$KVB" inspect "$1" --json | "$PYTHON" -c '
import json, sys
r = json.load(sys.stdin)["metadata"]["refined"]
s = (json.loads(r) if isinstance(r, str) else r)["selection"]
print(sum(a / b for a, b in zip(s["loss"], s["loss_before"])))'; }
if "$PYTHON" -c 'import sys; sys.exit(float(sys.argv[1]) > float(sys.argv[2]))' "$(json_left six.safetensors)" \
    "$(json_left kept.safetensors)"; then
    ok 'the finished table is not replaced by a worse one'
else
    not_ok 'the finished table is not replaced by a worse one'
fi

# shellcheck disable=SC2086
expect 0 'a table with limits' refine tiny.gguf paged.safetensors text?.txt $SIZE -o p.safetensors
expect 0 'its budgets' budgets p.safetensors --ratio 0.5 --tokens 160 --json
cp out p.json
if "$PYTHON" - <<'PYTHON_END'; then ok 'pages and levels hold'; else not_ok 'pages and levels hold'; fi
import json
def lists(x):
    if isinstance(x, list):
        yield x
        for y in x: yield from lists(y)
    elif isinstance(x, dict):
        for y in x.values(): yield from lists(y)
layers = [x for x in lists(json.load(open("p.json"))) if len(x) == 2 and all(isinstance(k, int) for k in x)]
assert len(layers) == 2 and all(a == b and a % 8 == 0 for a, b in layers), layers
PYTHON_END
# Questions with answers in place of texts that go on.
for k in 0 1 2 3 4 5; do "$KVB" tokenize tiny.gguf text$k.txt --json >ids$k.json; done
"$PYTHON" - <<'PYTHON_END'
import json
plain, asked, several, other = (open(f"{name}.jsonl", "w") for name in ("plain", "asked", "several", "other"))
for k in range(6):
    ids = json.load(open(f"ids{k}.json"))["ids"]
    for to, line in (
        (plain, {"context_ids": ids[:162], "question_ids": [[1]]}),
        (asked, {"context_ids": ids[:150], "question_ids": [ids[150:151]], "answer_ids": [ids[151:162]]}),
        (several, {"context_ids": ids[: 100 + 9 * k], "question_ids": [ids[150 : 153 + k], ids[:4], ids[3:9]],
                   "answer_ids": [ids[160 : 161 + k], None, ids[:30]]}),
    ):
        print(json.dumps({"sample_id": f"text-{k}", **line}), file=to)
    if k == 0:
        print(json.dumps({"context_ids": ids[:100], "question_ids": [[7, 8]], "answer_ids": [[9]]}), file=other)
PYTHON_END
# shellcheck disable=SC2086
expect 0 'texts that go on' refine tiny.gguf table.safetensors plain.jsonl $SIZE -o plain-ids.safetensors
cp out plain.json
# shellcheck disable=SC2086
expect 0 '--questions' refine tiny.gguf table.safetensors asked.jsonl $SIZE --questions -o asked.safetensors
json 'is the same where question and answer are how the text goes on' out \
    'j["rows"] == json.load(open("plain.json"))["rows"]'
# shellcheck disable=SC2086
expect 0 'contexts and answers of any length' refine tiny.gguf table.safetensors several.jsonl $SIZE --questions \
    -o several.safetensors
json 'every question that has an answer is a text' out '[len(j["settings"]["refined"][s]["texts"]) for s in
    ("calibration", "selection", "test")] == [4, 2, 6] and j["settings"]["refined"]["questions"] and
    any(i["name"] == "text-3 question 3" for i in j["inputs"])'
json 'no ratio is worse on the questions that choose' out \
    'all(r["kl"] <= r["kl_before"] for r in j["rows"] if r["set"] == "selection")'
cp several.safetensors.cells again.safetensors.cells
# shellcheck disable=SC2086
expect 0 'again, from its log' refine tiny.gguf table.safetensors several.jsonl $SIZE --questions -o again.safetensors
same 'the same table' several.safetensors again.safetensors
head -n 1 several.jsonl >one-context.jsonl
# shellcheck disable=SC2086
fails 'questions about one context' 'at least 3 texts, of different contexts' refine tiny.gguf table.safetensors one-context.jsonl $SIZE \
    --questions -o x.safetensors
# shellcheck disable=SC2086
fails 'in two sets' 'have one context and stand in two sets' refine tiny.gguf table.safetensors one-context.jsonl \
    --select other.jsonl $SIZE --questions -o x.safetensors
# shellcheck disable=SC2086
fails 'no answers' 'no question has an answer' refine tiny.gguf table.safetensors plain.jsonl $SIZE --questions \
    -o x.safetensors
# shellcheck disable=SC2086
fails 'a text is no question' 'text0.txt: --questions needs questions with answers' refine tiny.gguf table.safetensors \
    text0.txt $SIZE --questions -o x.safetensors

# shellcheck disable=SC2086
fails 'two texts are too few' 'at least 3 texts' refine tiny.gguf table.safetensors text0.txt text1.txt $SIZE \
    -o x.safetensors
# shellcheck disable=SC2086
fails 'a text in two sets' 'same tokens' refine tiny.gguf table.safetensors text0.txt --select text0.txt $SIZE \
    -o x.safetensors
echo '{"key": 1}' >y.safetensors.cells
# shellcheck disable=SC2086
fails 'a log of something else' 'line 1: expected a result' refine tiny.gguf table.safetensors text?.txt $SIZE \
    -o y.safetensors
misused 'without -o' 'where the refined table goes' refine tiny.gguf table.safetensors text0.txt
end
