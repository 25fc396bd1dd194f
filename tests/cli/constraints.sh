#!/usr/bin/env bash
# Constraints of engines, chosen ratios and budgets in bytes, from the command line to the runtime's token counts.
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
tiny_record --metric snapkv:kvpress

# budgets NAME EXPRESSION PLACE...: an expression about keep [layer][head] and T holds at places TOKENS:RATIO. One
# Python process checks all answers; each follows a line with its place.
budgets() {
    local name=$1 expression=$2 bad place
    shift 2
    for place; do
        kvb budgets t.safetensors --tokens "${place%:*}" --ratio "${place#*:}" --json
        echo "$place"
        if [ "$CODE" = 0 ]; then tr -d '\n' <out && echo; else echo null; fi
    done >answers
    bad=$("$PYTHON" - "$expression" answers <<'PY'
import json, math, sys
lines = open(sys.argv[2]).read().splitlines()
assert len(lines) in (8, 32), len(lines)
for name, line in zip(lines[::2], lines[1::2]):
    doc = json.loads(line)
    keep = doc and doc["details"][0]["keep"]
    known = {"keep": keep, "flat": sum(keep or [], []), "T": int(name.split(":")[0]), "math": math, "e": 1e-6}
    if not doc or not eval(sys.argv[1], known):
        print(name)
PY
    ) && [ -z "$bad" ] && ok "$name" && return
    not_ok "$name: $bad"
}

while IFS='|' read -r options expression; do
    for how in '' '--aggregate mean_ratio' '--exact'; do
        # shellcheck disable=SC2086
        expect 0 "solve $options $how" solve run.h5 --metric keydiff $options $how -o t.safetensors --quiet
        expect 0 'its certificate holds' validate --certificate t.safetensors run.h5 --quiet
        says 'in all rows' ' ([0-9]+) of \1 rows hold'
        # The runtime does not know how a table was solved: one way is tried at all lengths and ratios, others at a few.
        places=(100:0.95 777:0.8 4096:0.5 131072:0.1)
        [ -n "$how" ] || places=({100,777,4096,131072}:{0.1,0.5,0.8,0.95})
        budgets "the runtime keeps to $options" "$expression" "${places[@]}"
    done
done <<'LIST'
--block 16|all(k % 16 == 0 or k == T for k in flat)
--levels 1|all(len(set(row)) == 1 for row in keep)
--ranks 2|sum(r[0] for r in keep) == sum(r[1] for r in keep)
--ranks 2 --scope layer|all(r[0] == r[1] for r in keep)
--layer-cap 0.75|all(sum(r) <= 0.75 * len(r) * T + 1e-6 for r in keep)
--layer-cap 0.6@1|sum(keep[1]) <= 0.6 * 2 * T + 1e-6
--floor 0.1 --floor 0.3@1.0 --ceiling 0.8|min(flat) >= .1*T - e and max(flat) <= .8*T + e and keep[1][0] >= .3*T - e
--pin 0.1|keep[0][1] == T
--block 8 --ranks 2 --layer-cap 0.9 --floor 0.1|not any(k % 8 for k in flat) and sum(flat[::2]) == sum(flat[1::2])
LIST

# ---- constraints that cannot be met
# A table for every per cent ends where the floors allow no more pruning: at 70 % with a floor of 30 %, at 62 % with
# one level, which rises to the highest floor.
for limit in '--floor 0.3|70' '--floor 0.3 --aggregate mean_ratio --exact|70' \
    '--floor 0.3@0.1 --floor 0.45@1.0 --levels 1|62' \
    '--floor 0.3@0.1 --floor 0.45@1.0|81' '--floor 0.3@0 --ranks 2 --scope layer|70' '--pin 0.0 --ranks 2|50' \
    '--pin 0.0 --block 16|75'; do
    options=${limit%|*}
    rows=${limit#*|}
    # shellcheck disable=SC2086
    expect 0 "solve $options" solve run.h5 --metric keydiff $options -o t.safetensors --json --quiet
    json "ends at $rows %" out "[r['ratio'] for r in j['rows']] == [i / 100 for i in range(1, $rows + 1)]"
    says 'and says why' 'floors and pins demand at least .*ends at' err
    expect 0 'its certificate holds' validate --certificate t.safetensors run.h5 --quiet
    says 'in its rows' " $rows of $rows rows hold"
    expect 0 'it can be compared with the optimum' validate run.h5 t.safetensors --json --quiet
    json 'which it does not pass' out "len(j['rows']) == $rows and all(
        r['lower_bound'] <= r['optimum'] <= r['table_loss'] + 0.02 for r in j['rows'])"
    expect 0 'the runtime serves the last row beyond' budgets t.safetensors --ratio 0.95 --tokens 1000
    says 'and warns' "outside the table's rows, 1 to $rows %" err
done
misused 'worst with constraints' 'breaks constraints' solve run.h5 --metric keydiff --block 16 --aggregate worst \
    -o no.safetensors
absent 'nothing was written' no.safetensors

fails 'protected tokens that are all' 'nothing to choose' solve run.h5 --metric keydiff --sink 100000 -o no.safetensors

# ---- chosen ratios
expect 0 'three ratios' solve run.h5 --metric keydiff --ratios 0.3,0.375,0.8 -o t.safetensors --json --quiet
json 'three rows' out '[r["ratio"] for r in j["rows"]] == [0.3, 0.375, 0.8]'
expect 0 'its certificate holds' validate --certificate t.safetensors run.h5 --quiet
says 'in its rows' '3 of 3 rows hold'
expect 0 'the nearest row serves' budgets t.safetensors --ratio 0.36 --tokens 1000 --json
json 'which is 0.375' out 'abs(sum(map(sum, j["details"][0]["keep"])) / 4000 - 0.625) < 0.01'
expect 0 'inspect shows the rows that there are' inspect --json t.safetensors
json 'those three' out 'j["n_rows"] == 3 and [r["ratio"] for r in j["rows"]] == [0.3, 0.375, 0.8] and all(
    0 <= r["unsure_heads"] <= 4 for r in j["rows"])'
expect 0 'a page of them' report t.safetensors -o three.html
check 'one map each of those near 50, 80 and 90 %' maps three.html 2 4
says 'named as they were asked for' '37\.5 % pruned' three.html
expect 0 '99 ratios that are no per cents' solve run.h5 --metric keydiff --ratios 0.005:0.495:0.005 \
    -o fine.safetensors --quiet
expect 0 'inspect shows them all' inspect --json fine.safetensors
json 'all 99' out '[round(1000 * r["ratio"]) for r in j["rows"]] == list(range(5, 500, 5))'

# ---- budgets in bytes: keys and values of 2 bytes take 4 x dim bytes per token and head; of the 4 heads' bytes a third
dim=$("$KVB" inspect run.h5 --json | "$PYTHON" -c 'import json,sys; print(json.load(sys.stdin)["head_dim"])')
size=$((4 * dim * 1024 * 4 / 3))
expect 0 'a budget in bytes' solve run.h5 --metric keydiff --bytes $size --dtype f16 --tokens 1024 -o t.safetensors \
    --json --quiet
ratio=$("$PYTHON" -c 'import json; print(repr(json.load(open("out"))["rows"][0]["ratio"]))')
expect 0 'its budgets' budgets t.safetensors --ratio "$ratio" --tokens 1024 --json
json 'fit, and are used' out "0.97 * $size < sum(map(sum, j['details'][0]['keep'])) * 4 * $dim <= $size"
end
