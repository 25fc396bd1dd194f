#!/usr/bin/env bash
# validate: the exact solution and the check of certificates, on the tiny model.
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
tiny_record --metric snapkv:kvpress

# ---- validate
expect 0 'validate' validate run.h5 --metric keydiff
holds 'a line for each ratio' [ "$(grep -Ec '^ +[0-9]+ % ' out)" = 99 ]
for o in '--scope layer' '--aggregate mean_loss' '--questions 1' '--contexts short --scope layer'; do
    # shellcheck disable=SC2086
    expect 0 "validate $o" validate run.h5 --metric all --json --quiet $o
    cp out v.json
    json 'bound <= optimum <= greedy' v.json '
        len(j["rows"]) == 2 * 99 and all(
        r["proved"] and 0 <= r["lower_bound"] <= r["optimum"] <= r["greedy"] + 1e-12
        for r in j["rows"])'
    json 'exactness gains something here' v.json 'any(r["greedy"] > r["optimum"] * 1.001 for r in j["rows"])'
done

# ---- solve --exact
for a in mean_ratio mean_loss; do
    for o in '--exact' '--exact --scope layer'; do
        # shellcheck disable=SC2086
        expect 0 "solve $o, $a" solve run.h5 --metric keydiff --aggregate $a $o -o exact.safetensors
        says 'it says what exactness gains' '^  Exact: the optimum loses [0-9.]+ % less'
        check 'the table keeps the invariants' table exact.safetensors 2 2 keydiff
        expect 0 'its certificate holds' validate --certificate exact.safetensors run.h5 --quiet
        says 'in all rows' '99 of 99 rows hold'
    done
    expect 0 "solve --exact --json, $a" solve run.h5 --metric keydiff --aggregate $a --exact --json --quiet
    json 'the loss is the optimum, between bound and greedy' out 'j["details"][0]["solver"] == "exact" and all(
        r["proved"] and r["lower_bound"] <= r["loss"] + 1e-12 and abs(r["loss"] - r["optimum"]) < 1e-12
        and r["optimum"] <= r["greedy"] + 1e-12 for r in j["rows"])'
done
misused '--exact with full hulls' 'no hulls' solve run.h5 --metric keydiff --exact --hull full

# ---- certificates
for o in '' --paper '--scope layer' '--paper --scope layer' '--aggregate mean_loss --shrink 0' '--paper --hull full' \
    '--questions 1' '--aggregate mean_ratio --shrink 0.3' '--shrink 0.5 --min-keep 0.2' '--aggregate worst' \
    '--aggregate cvar:0.6 --scope layer --min-keep 0.15' '--contexts short'; do
    # shellcheck disable=SC2086
    expect 0 "solve $o" solve run.h5 --metric snapkv:kvpress $o -o t.safetensors
    case $o in --questions* | --contexts*) same_pairs=$o ;; *) same_pairs= ;; esac
    # shellcheck disable=SC2086
    expect 0 'its certificate holds' validate --certificate t.safetensors run.h5 --quiet $same_pairs
done
expect 0 'solve --aggregate worst' solve run.h5 --metric keydiff --aggregate worst -o worst.safetensors --quiet
holds 'a table of the worst text' "$PYTHON" - worst.safetensors <<'EOF'
import json, struct, sys
data = open(sys.argv[1], "rb").read()
n = struct.unpack("<Q", data[:8])[0]
header = json.loads(data[8:8 + n])
del header["__metadata__"]["content_sha256"]  # because the header is changed on purpose
w = json.loads(header["__metadata__"]["text_weights"])
assert len(w) == 99 and all(len(row) == 2 and abs(sum(row) - 1) < 1e-9 for row in w), w[0]
# Invalid weights are refused; other valid weights prove less.
for name, row in (("none.safetensors", "[2,-1]"), ("other.safetensors", "[1,0]")):
    header["__metadata__"]["text_weights"] = "[" + ",".join([row] * 99) + "]"
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    open(name, "wb").write(struct.pack("<Q", len(text)) + text + data[8 + n:])
EOF
fails 'weights that are none' 'numbers from 0 to 1 with the sum 1' validate --certificate none.safetensors run.h5 \
    --quiet
expect 1 'weights of another kind prove less' validate --certificate other.safetensors run.h5 --quiet
says 'and it says so' 'no multiplier proves the bound'
expect 0 'a table of pulled curves' solve run.h5 --metric keydiff
says 'says what is proved, and of what' 'Proved: no budgets that all questions share lose less than the bound'
expect 0 'a table pulled all the way' solve run.h5 --metric keydiff --shrink 1 --loss importance --json --quiet
json 'is uniform, but for single tokens' out 'all(abs(r["table_loss"] - r["uniform_loss"]) < 0.05 for r in j["rows"])'
expect 0 'a high floor' solve run.h5 --metric keydiff --min-keep 0.25 --json --quiet
json 'caps what is pruned' out 'abs(j["rows"][98]["effective_ratio"] - 0.75) < 0.02 and j["rows"][90]["saturated"]'
misused '--paper with --shrink' 'the paper has none' solve run.h5 --metric keydiff --paper --shrink 0.1
misused '--paper with --aggregate' 'give one of them' solve run.h5 --metric keydiff --paper --aggregate worst
misused '--shrink 2' 'expected 0 to 1' solve run.h5 --metric keydiff --shrink 2
misused '--min-keep 1' 'less than 1' solve run.h5 --metric keydiff --min-keep 1
misused 'the worst text exactly' 'found by solving many' solve run.h5 --metric keydiff --aggregate worst --exact
fails 'other questions than it was solved with' 'give the --contexts' validate --certificate t.safetensors run.h5 \
    --quiet
expect 0 'solve' solve run.h5 --metric keydiff -o good.safetensors
for tensor in lower_bound table_loss loss; do
    check "damage $tensor" damage good.safetensors bad.safetensors $tensor 49
    expect 1 "a wrong $tensor is found" validate --certificate bad.safetensors run.h5 --quiet
    says 'in its row' '^  50 %: '
    says 'and it fails' 'does not hold' err
done
expect 1 'as JSON too' validate --certificate bad.safetensors run.h5 --quiet --json
json 'naming the row' out '[i for i, r in enumerate(j["rows"]) if r["fault"]] == [49]'
expect 0 'another record' profile tiny.gguf calib.jsonl -o other.h5 --quiet --new-tokens 8 --ignore-eos \
    --metric keydiff --seed 9
fails 'a table of another record' 'another record' validate --certificate good.safetensors other.h5 --quiet
# ---- a table against the best one
for o in '' --paper '--aggregate worst' '--scope layer' '--order oracle' '--min-keep 0.2' '--ratios 0.3,0.8' \
    '--block 8 --ranks 2'; do
    # shellcheck disable=SC2086
    expect 0 "solve $o" solve run.h5 --metric keydiff --loss importance $o -o t.safetensors --quiet
    expect 0 'against the optimum' validate run.h5 t.safetensors --json --quiet
    json 'bound <= optimum <= greedy, and no table loses less' out \
        'len(j["details"]) == 1 and len(j["rows"]) in (2, 99) and all(
        r["proved"] and r["lower_bound"] <= r["optimum"] + 1e-12 and r["optimum"] <= r["greedy"] + 1e-12
        and r["optimum"] <= r["table_loss"] + 0.01 for r in j["rows"]) and j["details"][0]["aggregate"] == "mean_loss"'
done
expect 0 'as text' validate run.h5 t.safetensors
says 'with the table beside' 'table %  table-optimum'
expect 0 'against what is best for another record' validate other.h5 good.safetensors --json --quiet
"$KVB_BUILD/tests/tiny_model" --seed 7 else.gguf >model.out
expect 0 'a record from another model' profile else.gguf calib.jsonl -o else.h5 --quiet --new-tokens 8 --ignore-eos \
    --metric keydiff
fails 'a table for another model than the record' 'else.h5 and good.safetensors are of different models' validate \
    else.h5 good.safetensors
fails 'its certificate against such a record' 'of different models' validate --certificate good.safetensors else.h5
misused 'a metric beside a table' 'already says' validate run.h5 good.safetensors --metric keydiff
misused 'constraints beside a table' 'already says' validate run.h5 good.safetensors --block 16
misused 'settings beside --certificate' 'from the table' validate --certificate good.safetensors run.h5 --shrink 0.5
expect 0 'greedy under constraints' validate run.h5 --metric all --block 16 --layer-cap 0.8 --floor 0.1 --json --quiet
json 'has rows as far as floors allow' out 'len(j["rows"]) == 2 * 90 and all(
    d["constrained"] for d in j["details"]) and all(
    r["proved"] and r["lower_bound"] <= r["optimum"] <= r["greedy"] + 1e-12
    and "nested" not in r for r in j["rows"])'
fails 'no table at all' 'calib.jsonl' validate --certificate calib.jsonl run.h5 --quiet
misused 'a metric beside --certificate' 'from the table' validate --certificate good.safetensors run.h5 --metric keydiff
misused 'no metric' 'metric' validate run.h5
end
