#!/usr/bin/env bash
# Compares kvbudget with other code: tokenizer, logits, scores and oracle of transformers and PyTorch, the published
# solver, and kvpress. Needs a gigabyte of Python packages; PEER_PYTHON names a Python that has them
# (tests/peer/requirements.txt), otherwise a virtual environment is made in the build folder.
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
default_model 'nothing was compared'
if [ -z "${PEER_PYTHON:-}" ]; then
    PEER_PYTHON=$KVB_BUILD/peer-venv/bin/python
    if { [ -x "$PEER_PYTHON" ] || "$PYTHON" -m venv "$KVB_BUILD/peer-venv"; } >venv.out 2>&1 &&
        "$PEER_PYTHON" -m pip install --quiet --disable-pip-version-check -r "$KVB_ROOT/tests/peer/requirements.txt" \
            >>venv.out 2>&1; then
        ok 'the Python packages'
    else
        tail -n 5 venv.out
        skip 'the Python packages could not be installed (PEER_PYTHON names a Python that has them)'
        end
    fi
fi

# peer NAME SCRIPT ARGUMENT...: runs a comparison of tests/peer and shows its last lines.
peer() {
    local name=$1 script=$2
    shift 2
    if "$PEER_PYTHON" "$KVB_ROOT/tests/peer/$script.py" "$@" >peer.out 2>&1 \
        && ! grep -q '^FAIL' peer.out; then ok "$name"; else not_ok "$name"; fi
    tail -n 12 peer.out | sed 's/^/    /'
}

peer 'tokens are those of the Hugging Face tokenizers' compare_tokens "$MODEL" --kvbudget "$KVB"
"$PYTHON" -c 'import json, sys; print(json.loads(open(sys.argv[1], encoding="utf-8").readline())["context"])' \
    "$KVB_ROOT/calib-data/narrative-en.jsonl" >text
peer 'logits of 1,500 tokens are those of transformers' compare_logits "$KVB" "$MODEL" text
expect 0 'profile 1,600 tokens, three questions, every variant of every metric' profile "$MODEL" \
    "$KVB_ROOT/calib-data/narrative-en.jsonl" -o run.h5 --max-tokens 1600 --questions 3 --ignore-answers --ignore-eos \
    --quiet --metric snapkv:kvpress --metric snapkv:lukv --metric keydiff --metric ea:kvpress --metric ea:lukv
peer 'scores and oracle are those of the PyTorch protocol' compare_record "$MODEL" run.h5
peer 'budgets are those of the published solver' solver_parity run.h5 --kvbudget "$KVB"
peer 'the same on synthetic arrays' solver_parity --synthetic --kvbudget "$KVB"
for m in snapkv:kvpress keydiff ea:kvpress; do
    expect 0 "solve $m" solve run.h5 --metric "$m" -o "${m%%:*}.safetensors" --quiet
    expect 0 "export it" export "${m%%:*}.safetensors" -o "${m%%:*}.npy"
    peer "counts and positions of $m are those of kvpress" kvpress_budgets "${m%%:*}.npy" "${m%%:*}.safetensors" "$KVB"
done
peer 'counts and positions of random tables are those of kvpress' kvpress_budgets --random "$KVB"
end
