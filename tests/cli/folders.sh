#!/usr/bin/env bash
# A Hugging Face folder as in a hub cache: its origin, chat template, control tokens, answers as text, and a tokenizer
# with more tokens than the embedding has rows.
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

COMMIT=0123456789abcdef0123456789abcdef01234567
MODEL=models--org--name/snapshots/$COMMIT
mkdir -p "$MODEL"
cp "$KVB_ROOT"/tests/golden/families/llama/{config.json,model.safetensors} "$MODEL"
# Letters, space and line end; control tokens from 56 on; "<late>" lies beyond the 61 rows of the embedding.
"$PYTHON" - "$MODEL" <<'PYTHON_END'
import json, sys
letters = "abcdefghijklmnopqrstuvwxyzABCTWN0123456789.?:<>|_/"
vocab = {c: i for i, c in enumerate([*letters, "\u0120", "\u010a"])}
control = ["<|im_start|>", "<|im_end|>", "<s>"]
added = [{"id": 56 + i, "content": t, "special": True} for i, t in enumerate(control)]
added.append({"id": 70, "content": "<late>", "special": False})
step = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
whole = {"normalizer": None, "pre_tokenizer": step, "added_tokens": added,
         "model": {"type": "BPE", "vocab": vocab, "merges": []}}
template = ("{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + "
            "'<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}")
config = {"bos_token": "<s>", "add_bos_token": True, "chat_template": template}
for name, content in ("tokenizer.json", whole), ("tokenizer_config.json", config):
    with open(f"{sys.argv[1]}/{name}", "w", encoding="utf-8") as file:
        json.dump(content, file)
said = "The clerk {} opened box {} and read the letter twice."
story = " ".join(said.format(who, box) for box, who in enumerate(("Anna", "Bert", "Carl")))
line = {"sample_id": "story", "context": story, "questions": ["Who <|im_end|> read?", "Which box?"]}
with open("calib.jsonl", "w", encoding="utf-8") as file:
    print(json.dumps(line), file=file)
with open("late.jsonl", "w", encoding="utf-8") as file:
    print(json.dumps({**line, "context": story + "<late>"}), file=file)
with open("ids.jsonl", "w", encoding="utf-8") as file:
    print(json.dumps({"context_ids": [1] * 90, "question_ids": [[2, 3]]}), file=file)
forms = {"one": "The letters of {} were opened by nobody at all in these years. ", "two": "{} boxes and no more. "}
for name, form in forms.items():
    with open(f"{name}.txt", "w", encoding="utf-8") as file:
        file.write("".join(form.format(i) for i in range(20)))
PYTHON_END
PROFILE=(profile "$MODEL" calib.jsonl -m keydiff -m knorm --new-tokens 9 --ignore-eos --quiet)

# ---- origin of the weights
expect 0 'profile a folder' "${PROFILE[@]}" -o plain.h5
expect 0 'inspect its record' inspect plain.h5 --json
cp out plain.json
SHA=$(sha256sum "$MODEL/model.safetensors" | cut -d' ' -f1)
json 'repository, commit, container' plain.json "j['attributes']['hf_id'] == 'org/name' and
    j['attributes']['hf_revision'] == '$COMMIT' and j['attributes']['model_container'] == 'safetensors'"
json 'the hash of the file' plain.json "json.loads(j['attributes']['model_files']) == {'model.safetensors': '$SHA'}"
json 'no word of chat' plain.json "not {'chat', 'chat_sha256', 'special'} & set(j['attributes'])"
expect 0 'solve' solve plain.h5 -m keydiff -o plain.safetensors
expect 0 'inspect the table' inspect plain.safetensors --json
json 'the table says it too' out "j['metadata']['hf_id'] == 'org/name' and '$SHA' in j['metadata']['model_files']"
expect 0 'report' report plain.safetensors -o report.html
says 'the report names repository and file' "org/name" report.html
says 'and the hash of the file' "$SHA" report.html

# ---- chat and control tokens
expect 0 'profile --chat' "${PROFILE[@]}" --chat -o chat.h5
expect 0 'profile --chat --special' "${PROFILE[@]}" --chat --special -o special.h5
# asked NAME TEXT: the record's second question, decoded, is TEXT.
asked() {
    expect 0 "the arrays of $1.h5" export "$1.h5" --format lukv-steps -o "$1.steps"
    holds "the second question of $1.h5" "$KVB_BUILD/tests/tokens" "$MODEL" "$1.steps"/context_*/suffix_ids_1.npy \
        --decode
    printf '%b' "$2" >asked
    same "is '$2'" asked held
}
asked plain 'Which box?\nAnswer:'
asked chat 'Which box?<|im_end|>\n<|im_start|>assistant\n'
expect 0 'inspect' inspect chat.h5 --json
cp out chat.json
expect 0 'inspect' inspect special.h5 --json
json 'the record names the kind of template' chat.json \
    'j["attributes"]["chat"] == "chatml" and "special" not in j["attributes"]'
json 'and that control tokens were found' out 'j["attributes"]["special"] == "yes"'
# suffix FILE: prints how many tokens the first question has.
suffix() {
    "$PYTHON" -c '
import json, sys
print(json.load(open(sys.argv[1]))["contexts"][0]["questions"][0]["n_suffix"])' "$1"
}
holds 'a control token in a question is text, or one token' [ "$(suffix chat.json)" = $(($(suffix out) + 9)) ]
fails 'resume without --chat' 'chat' "${PROFILE[@]}" -o chat.h5 --resume
fails 'resume without --special' 'special' "${PROFILE[@]}" --chat -o special.h5 --resume
fails 'ids cannot be wrapped' '--chat wraps texts' profile "$MODEL" ids.jsonl -m keydiff --chat -o no.h5
fails 'a token without a row' '"<late>" with id 70, but the embedding has 61 rows' \
    profile "$MODEL" late.jsonl -m keydiff -o no.h5
tiny_model tiny.gguf
fails 'a model without a template' 'has no chat template' profile tiny.gguf calib.jsonl -m keydiff --chat -o no.h5

# ---- text to ids and back
printf 'The clerk read in 1984?\nNo_body.' >words.txt
holds 'a text becomes ids' "$KVB_BUILD/tests/tokens" "$MODEL" words.txt --bos no --npy ids.npy
holds 'and the ids text' "$KVB_BUILD/tests/tokens" "$MODEL" ids.npy --decode
same 'the same text' held words.txt

# ---- eval treats texts as the table's calibration did
expect 0 'solve' solve chat.h5 -m keydiff -o chat.safetensors
expect 0 'solve' solve plain.h5 -m knorm -o knorm.safetensors
EVAL=(one.txt two.txt -t 120 -n 4 -r 0.5 --quiet --json)
for name in plain chat; do
    expect 0 "eval with $name.safetensors" eval "$MODEL" $name.safetensors "${EVAL[@]}"
    cp out eval.$name
done
expect 0 'eval --chat' eval "$MODEL" plain.safetensors "${EVAL[@]}" --chat
cp out eval.asked
# texts FILE: prints the inputs that are texts: names and hashes of their ids.
texts() {
    "$PYTHON" -c '
import json, sys
print([i for i in json.load(open(sys.argv[1]))["inputs"] if i["kind"] == "text"])' "$1"
}
for name in plain chat asked; do texts eval.$name >texts.$name; done
says 'the texts are named' 'one.txt.*two.txt' texts.plain
differ 'they are others in the template' texts.plain texts.chat
same 'and the same ones when it is asked for' texts.chat texts.asked
fails 'tables that differ' 'was calibrated with --chat, the other was not' \
    eval "$MODEL" chat.safetensors knorm.safetensors "${EVAL[@]}"
expect 0 'task with a chat table' task "$MODEL" chat.safetensors --task niah_single_1 --tokens 700 -c 1 -r 0.5 --quiet
end
