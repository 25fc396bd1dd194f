#!/usr/bin/env bash
# Records that grow, by merging records of one model or by adding to a finished record, have the bytes of one profile
# over everything.
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
tiny_inputs
head -n 1 calib.jsonl >long.jsonl
tail -n 1 calib.jsonl >short.jsonl
PROFILE=(profile tiny.gguf --new-tokens 8 --ignore-eos --quiet)

expect 0 'both texts at once, three metrics' "${PROFILE[@]}" long.jsonl short.jsonl -m keydiff -m tova -m knorm \
    -o all.h5
expect 0 'one text' "${PROFILE[@]}" long.jsonl -m keydiff -m tova -o long.h5
expect 0 'the other' "${PROFILE[@]}" short.jsonl -m keydiff -m tova -o short.h5
expect 0 'the third metric of both' "${PROFILE[@]}" long.jsonl short.jsonl -m knorm -o knorm.h5

expect 0 'what another program wrote' export long.h5 --format lukv-steps -o steps
rm steps/kvbudget.json
expect 0 'and was imported' import steps -o imported.h5

# ---- merge
expect 0 'texts and metrics are merged' merge merged.h5 long.h5 short.h5 knorm.h5
says 'merge says what it made' 'merged.h5: 2 contexts, 5 questions from 3 files' err
same 'merged: the bytes of one profile' all.h5 merged.h5
expect 0 'what a record has already changes nothing' merge again.h5 all.h5 long.h5
same 'merged again: the same bytes' all.h5 again.h5
fails 'a metric that one text lacks' 'knorm.h5|no scores of metric' merge x.h5 long.h5 knorm.h5
expect 0 'another seed' "${PROFILE[@]}" short.jsonl -m keydiff -m tova --seed 5 -o seed.h5
fails 'records of two seeds' 'long.h5 and seed.h5 cannot be joined: seed is "1" in the first, "5"' \
    merge x.h5 long.h5 seed.h5
"$KVB_BUILD/tests/tiny_model" --seed 2 other.gguf >/dev/null
expect 0 'another model' profile other.gguf --new-tokens 8 --ignore-eos --quiet short.jsonl -m keydiff -m tova \
    -o other.h5
fails 'records of two models' 'cannot be joined: model_sha256 is' merge x.h5 long.h5 other.h5
sed 's/"short"/"long"/' short.jsonl >same-name.jsonl
expect 0 'another text of that name' "${PROFILE[@]}" same-name.jsonl -m keydiff -m tova -o same-name.h5
fails 'texts of one name' 'both have context long, and none of their calibration files is the same' \
    merge x.h5 long.h5 same-name.h5
absent 'a refused merge leaves nothing' x.h5
# ---- profile --add
ADD=(profile tiny.gguf --add --quiet)
METRICS=(-m keydiff -m tova -m knorm)
cp long.h5 run.h5
expect 0 'a text is added' "${ADD[@]}" short.jsonl -o run.h5
cp tiny.gguf renamed.gguf
expect 0 'a metric is added, with the same model under another name' profile renamed.gguf --add --quiet -m knorm \
    -o run.h5
same 'text and metric: the bytes of one profile' all.h5 run.h5
expect 0 'what it has is asked for again' "${ADD[@]}" long.jsonl short.jsonl -m tova -o run.h5
same 'it stays as it is' all.h5 run.h5
cp short.h5 run.h5
expect 0 'all files again, in another order than they were profiled' "${ADD[@]}" long.jsonl short.jsonl -m knorm \
    -o run.h5
same 'the order is that of the files' all.h5 run.h5
expect 0 'two of three, in one text' "${PROFILE[@]}" long.jsonl "${METRICS[@]}" -q 2 -o two.h5
cp two.h5 run.h5
expect 0 'the third, a metric and a text' "${ADD[@]}" long.jsonl short.jsonl -q 0 -m streaming -o run.h5
expect 0 'the same at once' "${PROFILE[@]}" long.jsonl short.jsonl "${METRICS[@]}" -m streaming -o want.h5
same 'all three: the bytes of one profile' want.h5 run.h5
expect 0 'a record of the default metrics, greedy, with the first query' profile tiny.gguf long.jsonl -o greedy.h5 \
    --quiet --greedy --include-first --new-tokens 5 --max-tokens 120 --bos no --backend ref
expect 0 'added to, its settings are the defaults' "${ADD[@]}" short.jsonl -o greedy.h5
expect 0 'the same at once' profile tiny.gguf long.jsonl short.jsonl -o want.h5 --force --quiet --greedy \
    --include-first --new-tokens 5 --max-tokens 120 --bos no --backend ref
same 'its settings: the bytes of one profile' want.h5 greedy.h5

# What it prints.
cp long.h5 run.h5
expect 0 'plan of an addition' profile tiny.gguf --add short.jsonl -o run.h5 --plan
says 'the plan has the new text alone' '^work       1 context, 150 tokens'
same 'a plan changes nothing' long.h5 run.h5
expect 0 'not quiet' profile tiny.gguf --add short.jsonl -o run.h5
says 'it tells what was done' 'run.h5: 2 contexts now; prefilled 1, 150 tokens; added 2 questions' err

# Additions that do not fit the record.
cp long.h5 run.h5
fails 'another seed' 'run.h5 and this command cannot be joined: seed is "1" in the first, "5"' "${ADD[@]}" short.jsonl \
    --seed 5 -o run.h5
fails 'another model' 'run.h5 and this command cannot be joined: model_sha256' profile other.gguf --add short.jsonl \
    -o run.h5 --quiet
fails 'another text of that name' 'run.h5: has another text for sample long' "${ADD[@]}" same-name.jsonl -o run.h5
"$PYTHON" - <<'PYTHON_END'
import json
lines = [json.loads(line) for line in open("calib.jsonl", encoding="ascii")]
lines[0]["question_ids"].reverse()
json.dump(lines[0], open("reversed.jsonl", "w", encoding="ascii"))
lines[1]["answer_ids"][1][2] += 1
json.dump(lines[1], open("answers.jsonl", "w", encoding="ascii"))
PYTHON_END
fails 'other questions' 'run.h5: sample long: question 1 is another one there' "${ADD[@]}" reversed.jsonl -o run.h5
fails 'other answers' 'short.h5: sample short: the answer to question 2 is another' "${ADD[@]}" answers.jsonl \
    -o short.h5
fails 'a record that is not there' 'none.h5' "${ADD[@]}" short.jsonl -o none.h5
fails 'a record of another maker' 'does not say which model' profile tiny.gguf --add short.jsonl -o imported.h5 --quiet
misused 'nothing to add to' 'which record should be added to' profile tiny.gguf --add short.jsonl
misused '--add --shard' 'exclude each other' "${ADD[@]}" short.jsonl -o run.h5 --shard 1/2
same 'the record stays as it was' long.h5 run.h5

# Scores that this program would not compute, as in a record from another machine: they are not mixed with its own.
expect 0 'a record with its attributes' export long.h5 --format lukv-steps -o foreign
"$PYTHON" - foreign/context_long/keydiff.npy <<'PYTHON_END'
import sys
data = bytearray(open(sys.argv[1], "rb").read())
data[-200] ^= 1  # the last bit of a score
open(sys.argv[1], "wb").write(data)
PYTHON_END
expect 0 'and one bit of a score another' import foreign -o foreign.h5
for more in short.jsonl '-m knorm'; do
    # shellcheck disable=SC2086
    fails "a record with other numbers: $more" 'foreign.h5: sample long: the scores of .* differ by up to' "${ADD[@]}" \
        $more -o foreign.h5
    rm -rf foreign.h5.parts
done

# Stopped at any moment: the old record is intact, and the same command ends with the same bytes.
cp long.h5 run.h5
LONG=("${ADD[@]}" short.jsonl -m knorm -o run.h5 --batch 1 --threads 1)
lives=0 whole=1
for milliseconds in 5 10 15 20 25 30 35 40 50 60 80 100 150 200 300 500 1000 5000 0; do # 0: for as long as it takes
    lives=$((lives + 1)) code=0
    killed_after "$milliseconds" "$KVB" "${LONG[@]}" >out 2>err </dev/null || code=$?
    [ "$code" = 0 ] && break
    [ "$code" = 137 ] || { not_ok "life $lives ends by the kill, not by status $code"; sed 's/^/    /' err; }
    cmp -s run.h5 long.h5 || cmp -s run.h5 all.h5 || whole=0
done
if [ "$whole" = 1 ] && ((lives > 1)); then ok "$((lives - 1)) kills, no half record"; else not_ok 'half a record'; fi
same 'killed and gone on with: the same bytes' all.h5 run.h5
absent 'nothing else is left' run.h5.parts
end
