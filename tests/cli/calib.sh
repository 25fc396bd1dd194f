#!/usr/bin/env bash
# kvbudget calib makes calibration data for profile from plain texts and from other calibration data; it refuses
# impossible requests before it writes anything.
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
tiny_inputs
for i in $(seq 90); do echo "line $i of the story tells what stands on page $((i * 7 % 91))"; done >story.txt
for i in $(seq 40); do echo "$i houses and $((i * 3)) gardens were counted in year $i"; done >other.txt
# line_of NAME FILE N CHECK: line N of the file passes the check.
line_of() {
    sed -n "$3p" "$2" >one.json
    json "$1" one.json "$4"
}

# ---- plain texts
MAKE=(calib tiny.gguf story.txt other.txt -t 300 -n 9 --lines 3 --continue 2)
expect 0 'two kinds of questions' "${MAKE[@]}" -o a.jsonl
says 'what was made' 'a.jsonl: 2 contexts of 300 tokens, 10 questions, 10 of them with an answer' err
expect 0 'the same again' "${MAKE[@]}" -o b.jsonl --quiet
same 'the same bytes' a.jsonl b.jsonl
empty 'quiet says nothing' err
expect 0 'another seed' "${MAKE[@]}" -o b.jsonl -s 2
differ 'another seed, other lines' a.jsonl b.jsonl
"$KVB_BUILD/tests/tokens" tiny.gguf story.txt >ids
# The context, and after it each continuation, have the ids of the text.
"$PYTHON" - ids a.jsonl >verdict <<'END'
import json, sys
ids = [int(i) for i in open(sys.argv[1]).read().split()]
made = json.loads(open(sys.argv[2]).readline())
pieces = [asked + said for asked, said in zip(made["question_ids"], made["answer_ids"])]
print(made["sample_id"], made["context_ids"] == ids[:300], pieces[0] == ids[300:310], pieces[1] == ids[300:319])
END
says 'a continuation begins where its context ends' '^story True True True$' verdict
expect 0 'profile takes it' profile tiny.gguf a.jsonl -o a.h5 --quiet -m keydiff
expect 0 'what was asked and answered' export a.h5 --format lukv-steps -o steps
"$KVB_BUILD/tests/tokens" tiny.gguf steps/context_story/suffix_ids_2.npy --decode >asked
"$KVB_BUILD/tests/tokens" tiny.gguf steps/context_story/answer_ids_2.npy --decode >>asked
says 'the answers are what was made' 'begins with "line 2 of the story.* tells what st' asked
expect 0 'as many contexts as fit' calib tiny.gguf story.txt -o many.jsonl -t 200 --contexts 0 --continue 1 -n 8
line_of 'each has its name' many.jsonl 2 'j["sample_id"] == "story-2" and len(j["context_ids"]) == 200'

# ---- other calibration data: its questions come first; those without an answer have null
expect 0 'questions behind those that are there' calib tiny.gguf calib.jsonl -o more.jsonl -q 2 -t 100 --continue 1 -n 5
says 'counted' '2 contexts of 100 tokens, 6 questions, 4 of them with an answer' err
line_of 'null where none is given' more.jsonl 1 'j["answer_ids"][:2] == [None, None] and len(j["answer_ids"][2]) == 5'
line_of 'answers are kept' more.jsonl 2 'len(j["answer_ids"][0]) == 8'
expect 0 'without the answers' calib tiny.gguf calib.jsonl -o bare.jsonl -q 2 -t 100 --continue 1 -n 5 --ignore-answers
line_of 'only the made one is left' bare.jsonl 2 '[a is None for a in j["answer_ids"]] == [True, True, False]'
kvb inspect more.jsonl
says 'inspect counts them' '"long" tokens 100 questions 3 answers 1 '
expect 0 'profile samples what is missing' profile tiny.gguf bare.jsonl -o bare.h5 -n 4 --ignore-eos --quiet -m keydiff
kvb inspect bare.h5 --json
json 'sampled and given answers in one record' out \
    '[q["n_queries"] for q in j["contexts"][0]["questions"]] == [3, 3, 4] and j["attributes"]["given_answers"] == 2'
expect 0 'a table of questions and of what goes on' solve bare.h5 -m keydiff -o both.safetensors --quiet
kvb inspect both.safetensors
says 'and how many of which' 'n_continued: "2"' out
expect 0 'contexts alone' calib tiny.gguf calib.jsonl -o short.jsonl -t 100
line_of 'cut, with their questions' short.jsonl 1 'len(j["context_ids"]) == 100 and len(j["question_ids"]) == 3'

# ---- refusals
echo '{"old": 1}' >old.jsonl
fails 'a text that is too short' 'has 0 tokens after.*expected 65' calib tiny.gguf other.txt -o old.jsonl --continue 1
fails 'too few contexts' 'expected 50 x 100' calib tiny.gguf story.txt -o old.jsonl --contexts 50 -t 100 --lines 1
fails 'too few lines' 'expected 99; give --lines' calib tiny.gguf story.txt -o old.jsonl --lines 99
fails 'nothing to ask' 'a text without questions' calib tiny.gguf story.txt -o old.jsonl
printf 'caf\351 au lait, for sixteen tokens and more' >latin.txt
fails 'another encoding' 'latin.txt: byte 3 is 0xe9, expected UTF-8' calib tiny.gguf latin.txt -o old.jsonl --lines 1
fails 'two texts of one name' 'there is a context "story" already' calib tiny.gguf story.txt ./story.txt -o old.jsonl \
    --lines 1
fails 'an input as output' 'would be both read and written' calib tiny.gguf calib.jsonl -o calib.jsonl
says 'a refusal leaves the old file' '^."old": 1.$' old.jsonl
misused 'no output' 'expected a model, texts and -o FILE' calib tiny.gguf story.txt --lines 1
misused 'a context of nothing' '--tokens: expected at least 16' calib tiny.gguf story.txt -o x.jsonl --lines 1 -t 0
misused 'an answer of one token' '--answer-tokens: expected at least 2' calib tiny.gguf story.txt -o x.jsonl -n 1
misused 'too many' '--lines: expected at most' calib tiny.gguf story.txt -o x.jsonl --lines 99999999
end
