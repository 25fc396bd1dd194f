#!/usr/bin/env bash
# Records that grow have the bytes of one profile over everything: records of one model that are merged, and what is
# added to a finished record.
# shellcheck source=tests/cli/lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
tiny_model tiny.gguf
tiny_calib calib.jsonl
head -n 1 calib.jsonl >long.jsonl
tail -n 1 calib.jsonl >short.jsonl
PROFILE=(profile tiny.gguf --new-tokens 8 --ignore-eos --quiet)

expect 0 'both texts at once, three metrics' "${PROFILE[@]}" long.jsonl short.jsonl -m keydiff -m tova -m knorm -o all.h5
expect 0 'one text' "${PROFILE[@]}" long.jsonl -m keydiff -m tova -o long.h5
expect 0 'the other' "${PROFILE[@]}" short.jsonl -m keydiff -m tova -o short.h5
expect 0 'the third metric of both' "${PROFILE[@]}" long.jsonl short.jsonl -m knorm -o knorm.h5

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
expect 0 'another model' profile other.gguf --new-tokens 8 --ignore-eos --quiet short.jsonl -m keydiff -m tova -o other.h5
fails 'records of two models' 'cannot be joined: model_sha256 is' merge x.h5 long.h5 other.h5
sed 's/"short"/"long"/' short.jsonl >same-name.jsonl
expect 0 'another text of that name' "${PROFILE[@]}" same-name.jsonl -m keydiff -m tova -o same-name.h5
fails 'texts of one name' 'both have context long, and none of their calibration files is the same' \
    merge x.h5 long.h5 same-name.h5
if [ -e x.h5 ]; then not_ok 'a refused merge leaves nothing'; else ok 'a refused merge leaves nothing'; fi
end
