#!/usr/bin/env bash
# kvbudget tune on the tiny model makes table and report: the same bytes for any number of threads and after stops.
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
tiny_model tiny.gguf
mkdir -p data/plain data/eval ready
"$PYTHON" -c '
import json
def text(k, lines=60):
    return "\n".join(f"line {i * (k + 3) % 101} of text {k} says {i * i % (97 + k)}" for i in range(lines))
for k in range(12):
    if k < 2:
        line = {"sample_id": f"s{k}", "context": text(k), "questions": ["?"]}
        print(json.dumps(line), file=open(f"data/s{k}.jsonl", "w"))
    else:
        print(text(k), file=open("data/{}/t{}.txt".format("plain" if k < 8 else "eval", k), "w"))
for name, k, lines in ("own", 20, 400), ("short", 21, 4): print(text(k, lines), file=open(name + ".txt", "w"))
print("\n".join(f"line {i} of text 22 says {i} of text 22" for i in range(100)), file=open("lines.txt", "w"))
open("latin.txt", "wb").write(b"caf\xe9")'
export KVBUDGET_DATA=$PWD/data KVBUDGET_TABLES=$PWD/ready
TUNE=(tune tiny.gguf --tokens 100)

expect 0 'tune' "${TUNE[@]}" -o one --threads 1
says 'it says what each step is for' 'tune 10 of 10: the report' err
says 'and which texts play which part' '6 texts to calibrate on, 2 to choose by, 4 to judge' err
says 'and ends with a verdict' '(hardly changes|prune less)' out
says 'with the KL at every ratio, of both tables' '^ +95 %( +[0-9.]+){4}' out
exists 'the table' one.safetensors
says 'the report holds the measured KL' 'SnapKV|published' one.html
expect 0 'the table works' budgets one.safetensors --ratio 0.8 --tokens 1000
expect 0 'and says that it was measured' inspect one.safetensors --json
says 'on the texts that choose, by 16 tokens, since contexts are short' 'refined.*n_next[^0-9]*16\b' out

expect 0 'again, with two threads' "${TUNE[@]}" -o two --threads 2 --quiet
same 'gives the same table' one.safetensors two.safetensors
same 'and the same with formats' one-packed.safetensors two-packed.safetensors
expect 0 'which says what heads are stored in' budgets one-packed.safetensors --ratio 0.9 --tokens 1000
says 'in fewer bits' 'int[248]' out
expect 0 'adding it' tables --add one-packed.safetensors --name Org/Tiny --results one.tune/worth.json
says 'puts it where tables with formats are' 'ready/packed/tiny.safetensors' out
fails 'other tables of the model' 'none of the 0 tables' tables tiny.gguf
expect 0 'finding it' tables tiny.gguf --packed
says 'takes the option' "^$PWD/ready/packed/tiny.safetensors\$" out
expect 0 'for caches that are refitted' "${TUNE[@]}" -o refitted --refit --quiet
expect 0 'its table' inspect refitted.safetensors --json
says 'says so' '"refit":.*"[0-9]' out
expect 0 'adding that, too' tables --add refitted-packed.safetensors --name Org/Tiny --results refitted.tune/worth.json
says 'with what it is worth refitted' 'at 95 % pruned, refitted;' out
expect 0 'finding it' tables tiny.gguf --packed --refit
says 'takes both options' "^$PWD/ready/refit-packed/tiny.safetensors\$" out
expect 0 'all tables' tables
says 'are listed' '^  worth KL to the full cache .* at 95 % pruned' out
grep -v '^warning' err >said || true
empty '--quiet says nothing but warnings' said
rm -f one.safetensors one.html one.tune/{tuned,worth,report}.done one.tune/worth.*
expect 0 'what is done is not done again' "${TUNE[@]}" -o one
says 'it says so' 'the model reads texts with its full cache .done before.' err
same 'and the table is the same' one.safetensors two.safetensors

# A stop in the middle leaves the best table so far, and the same command continues to the same table.
stop_at() { interrupt TERM "grep -E '$1' err" "$KVB" "${TUNE[@]}" -o three; }
stop_at 'tune 1 of'
ended 143 'stopped at once'
says 'there is no table yet' 'before there was a table' err
stop_at 'tune 9 of'
ended 143 'stopped while it judges'
same 'the best table is there' three.safetensors two.safetensors
expect 0 'goes on' "${TUNE[@]}" -o three --quiet
same 'to the same table' three.safetensors two.safetensors
rm -r three.tune
stop_at 'tune 8 of'
ended 143 'a search from the beginning is stopped before it is done'
same 'which does not cost the table that is there' three.safetensors two.safetensors
rm three.safetensors three-packed.safetensors
stop_at 'tune 8 of'
same 'a first search leaves the packed table, too' three-packed.safetensors two-packed.safetensors

expect 0 'with a text of the user' "${TUNE[@]}" own.txt -o own --quiet
says 'from which several contexts are taken' '"sample_id": ?"own-4"' own.tune/first.jsonl
# How many texts fit into a time depends on the machine: 0.01 s allows the fewest, 2 h all; the latter is stopped early.
expect 0 'with a time' "${TUNE[@]}" -o timed --time 0.01s
says 'it has a step more' 'tune 11 of 11: the report' err
says 'and judges with fewer texts' 'mean over 1 text that' out
interrupt TERM "grep 'tune 3 of 11' err" "$KVB" "${TUNE[@]}" -o long --time 2h
says 'texts are read in two parts' 'tune 2 of 11: and as many more' err
expect 0 'with lines to ask for' tune tiny.gguf lines.txt --tokens 200 -o asked --quiet
says 'four lines are asked for' '"question_ids": ?\[(\[[0-9,]+\],?){5}\]' asked.tune/first.jsonl
for table in asked asked-packed; do "$KVB" inspect $table.safetensors | grep n_questions; done >said
says 'for the packed table alone' '"26"' said && says 'the other one is for what follows' '"10"' said
expect 0 'for lookups' tune tiny.gguf lines.txt --tokens 200 -o facts --for lookup --quiet
mkdir plans && TMPDIR=$PWD/plans expect 0 'a plan needs no name' "${TUNE[@]}" --plan
says 'says what a pass takes' 'time +about' out
rmdir plans; absent 'and leaves nothing behind' plans
fails 'other settings in the same folder' 'of another model, other texts or settings' tune tiny.gguf -o one --tokens 120
fails 'a text that is too short' 'short.txt: .* tokens, expected at least 164' "${TUNE[@]}" short.txt -o x
fails 'a text of another encoding' 'latin.txt: byte 3 is 0xe9' "${TUNE[@]}" own.txt data/s0.jsonl latin.txt -o x
fails 'a text twice' 'the same text' tune tiny.gguf own.txt own.txt -o x --tokens 100
fails 'no model' 'nothing.gguf' tune nothing.gguf -o x
KVBUDGET_DATA=$PWD/none fails 'no texts' 'KVBUDGET_DATA' tune tiny.gguf -o x
misused 'without a name' 'expected a model and -o NAME' tune tiny.gguf
misused 'with a folder in place of one' 'expected a model and -o NAME' tune tiny.gguf -o x/
misused 'an unknown use' 'expected text.lookup' tune tiny.gguf -o x --for speed
misused 'a time that is none' 'expected seconds' tune tiny.gguf -o x --time soon
"$KVB_BUILD/tests/tiny_model" --seed 2 tiny.gguf >out
fails 'another model under the same name' 'of another model' "${TUNE[@]}" -o one
end
