#!/usr/bin/env bash
# What solve measures without writing a table: --holdout and --ablation, on the tiny model.
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
tiny_record --metric snapkv:kvpress

# ---- holdout
expect 0 'hold out texts' solve run.h5 --metric keydiff --holdout --json --quiet
cp out text.json
json 'every method at every ratio' text.json \
    'len(j["details"]) == 1 and len(j["rows"]) == 9 * 99 and len({r["allocator"] for r in j["rows"]}) == 9'
json 'two texts are too few for intervals' text.json 'all(r["loss_low"] is None and r["loss"] >= 0 for r in j["rows"])'
json 'no table passes the optimum of each question by more than its greedy gap' text.json 'all(
    o["loss"] <= r["loss"] * 1.02 + 0.002 for o in rows(allocator="question'"'"'s optimum")
    for r in rows(ratio=o["ratio"]) if r["ratio"] <= 0.8)'
json 'the paper is the measure' text.json 'all(
    r["change"] == 0 for r in rows(allocator="mean_ratio (paper)"))'
kvb solve run.h5 --metric keydiff --holdout --json --quiet
same_results 'the same again' out text.json
expect 0 'layer by layer' solve run.h5 --metric keydiff --holdout --scope layer --quiet
misused '--holdout with a table' 'writes no table' solve run.h5 --metric keydiff --holdout -o t.safetensors
misused 'a study under constraints' 'neither constraints' solve run.h5 --metric keydiff --holdout --block 16
misused 'both studies' 'one after the other' solve run.h5 --metric keydiff --holdout --ablation
misused 'several records' 'expected one record' solve run.h5 run.h5 --metric keydiff

# ---- ablation
expect 0 'ablation' solve run.h5 --metric all --ablation --json --quiet
cp out ablation.json
json 'every question is best off with its own optimum' ablation.json 'len(j["details"]) == 2 and all(
    best["loss"] <= r["loss"] * 1.02 + 0.002 for best in rows(allocator="optimum")
    for r in rows(metric=best["metric"], ratio=best["ratio"]))'
json 'heads add up' ablation.json 'all(abs(sum(heads) - r["loss"]) < 1e-9 for d in j["details"] for a in d["head_loss"]
    for r, heads in zip(rows(metric=d["metric"], allocator=a), d["head_loss"][a]))'
expect 0 'ablation as text' solve run.h5 --metric keydiff --ablation --quiet
says 'a line for each ratio' '^ +95 %'

# ---- the ablation's budgets as a table
one='--metric keydiff --contexts short --questions 1'
# shellcheck disable=SC2086
for order in metric oracle; do
    expect 0 "solve --order $order" solve run.h5 $one --paper --order $order -o $order.safetensors --json --quiet
    cp out $order.json
done
# shellcheck disable=SC2086
expect 0 'the same question as a study' solve run.h5 $one --paper --ablation --json --quiet
cp out study.json
json 'the table loses what the study says of budgets without the gap' oracle.json '
    j["details"][0]["order"] == "oracle" and all(
    abs(j["rows"][5 * i + 4]["table_loss"] - x["loss"]) < 1e-9
    for i, x in enumerate([r for r in json.load(open("study.json"))["rows"] if r["allocator"] == "without gap"]))'
json 'and with the metric, which ranks worse, what the optimum does' metric.json '
    j["details"][0]["order"] == "metric" and all(
    abs(j["rows"][5 * i + 4]["table_loss"] - x["loss"]) < 1e-9
    for i, x in enumerate([r for r in json.load(open("study.json"))["rows"] if r["allocator"] == "optimum"]))'
json 'a perfect metric would lose less, and this one more than it' oracle.json '(lambda pairs: all(
    o["loss"] <= m["loss"] + 1e-12 and o["loss"] <= o["table_loss"] + 1e-9 for o, m in pairs) and sum(
    o["table_loss"] - m["table_loss"] for o, m in pairs) > 0.1)(
    list(zip(j["rows"], json.load(open("metric.json"))["rows"])))'
expect 0 'a page of the table and the studies' report oracle.safetensors --results ablation.json --results text.json \
    -o studies.html
says 'a chart for each metric of the ablation' '<figcaption>snapkv:kvpress[^:]*: loss, share' studies.html
check 'the table says so' metadata oracle.safetensors order oracle
check 'others do not' metadata metric.safetensors order None
for how in '' '--exact' '--aggregate mean_ratio --shrink 0.2' '--aggregate worst' '--block 8 --ratios 0.3,0.5'; do
    # shellcheck disable=SC2086
    expect 0 "solve --order oracle $how" solve run.h5 --metric snapkv:kvpress --order oracle $how -o t.safetensors \
        --quiet
    expect 0 'its certificate holds' validate --certificate t.safetensors run.h5 --quiet
    says 'in all rows' '(99 of 99|2 of 2) rows hold'
done
misused 'an unknown order' 'metric.oracle' solve run.h5 --metric keydiff --order best
misused '--order with a study' 'leave out --order' solve run.h5 --metric keydiff --ablation --order oracle
end
