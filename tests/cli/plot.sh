#!/usr/bin/env bash
# kvbudget plot: maps, heads, losses and results as SVG, PDF and PNG, and what is refused.
# shellcheck source=tests/cli/lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
tiny_model tiny.gguf
tiny_calib calib.jsonl
expect 0 'profile' profile tiny.gguf calib.jsonl -o run.h5 --quiet --new-tokens 8 --ignore-eos --metric keydiff \
    --metric snapkv:kvpress:window=16
expect 0 'solve keydiff' solve run.h5 --metric keydiff -o keydiff.safetensors --quiet
expect 0 'a table of each text' solve run.h5 --metric keydiff --contexts long -o long.safetensors --quiet
expect 0 'a table of the other' solve run.h5 --metric keydiff --contexts short -o short.safetensors --quiet
expect 0 'held-out losses' solve run.h5 --metric keydiff --holdout --json --quiet
mv out holdout.json
"$PYTHON" - <<'PYTHON_END'
import json
rows = [{"metric": "keydiff", "allocator": a, "ratio": r, "sink": 4, "window": 1, "kl": k * r, "kl_low": k * r / 2,
         "kl_high": k * r * 2, "kl_to_uniform": k, "kl_to_uniform_low": k / 2, "kl_to_uniform_high": k * 2,
         "top1": 1 - k * r / 2, "top1_low": 1 - k * r, "top1_high": 1} for a, k in (("uniform", 1), ("kvbudget", 0.4))
        for r in (0.5, 0.8, 0.95)]
json.dump({"schema": "kvbudget-results", "schema_version": 1, "command": "eval", "rows": rows}, open("worth.json", "w"))
PYTHON_END

# ---- Kinds
expect 0 'maps' plot keydiff.safetensors long.safetensors -o maps.svg --ratios 50,80
check 'a cell for every head' svg maps.svg 4 4
expect 0 'heads' plot long.safetensors short.safetensors -o heads.svg --kind heads --ratios 80,90
check 'a chart for each ratio' charts heads.svg 2
says 'a line for each table' 'keydiff \(short.safetensors\)</title>' heads.svg
expect 0 'losses of a table' plot keydiff.safetensors -o losses.svg --kind losses
check 'one chart' charts losses.svg 1
for name in 'this table' 'as solved' 'lower bound'; do says "a line of $name" "<title>$name</title>" losses.svg; done
expect 0 'losses of two tables, relative' plot long.safetensors short.safetensors -o relative.svg --kind losses \
    -a relative
says 'to the bound' 'as a multiple of the lower bound' relative.svg
expect 0 'results' plot worth.json -o worth.svg
check 'KL and agreement' charts worth.svg 2
for r in 50 80 95; do says "a tick at $r" ">$r</text>" worth.svg; done
says 'the even split in its colour' 'stroke="#d55e00"' worth.svg
says 'and the table in its own' 'stroke="#0072b2"' worth.svg
expect 0 'held-out losses as a picture' plot holdout.json -o holdout.svg
check 'one chart of them' charts holdout.svg 1

# ---- Axes, series, titles, sizes
expect 0 'a linear axis' plot worth.json -o linear.svg --column kl --axis linear --series kvbudget --title 'Mine <&>' \
    --size 640x400
check 'one chart of one column' charts linear.svg 1
says 'the size that was asked for' '<svg .* width="640" height="400"' linear.svg
says 'the title that was asked for' '<title>Mine &lt;&amp;&gt;</title>' linear.svg
if grep -q '<title>uniform' linear.svg; then not_ok 'only the series that was asked for'; else ok \
    'only the series that was asked for'; fi
expect 0 'a relative axis' plot worth.json -o relative.svg --column kl --axis relative --series kvbudget
says 'says of what' "of the even split" relative.svg

# ---- Values that differ in the last bit alone
"$PYTHON" - <<'PYTHON_END'
import json
j = json.load(open("worth.json"))
for i, r in enumerate(j["rows"]): r["nll"] = 9.000000000000002 if i % 2 else 9.0
json.dump(j, open("equal.json", "w"))
PYTHON_END
if (ulimit -f 1000 && timeout 60 "$KVB" plot equal.json --column nll -o equal.svg); then
    ok 'they are drawn in a small picture'; else not_ok 'they are drawn in a small picture'; fi

# ---- What is refused
for name in x.jpg x x.svg.gz .svg x.pdf x.png; do fails "a picture called $name" 'ends in .svg; .rsvg-convert' plot \
    keydiff.safetensors -o $name; done
fails 'a study to a picture of another form' 'ends in .svg' solve run.h5 --metric keydiff --holdout --picture x.gif
fails 'a column that there is not' 'no row of an allocator has a column nothing' plot worth.json -o x.svg -c nothing
misused 'tables and results' 'do not fit into one picture' plot keydiff.safetensors worth.json -o x.svg
misused 'another kind' "losses or weights, found 'pie'" plot keydiff.safetensors -o x.svg --kind pie
misused 'another axis' "linear, log or relative, found 'cubic'" plot worth.json -o x.svg --axis cubic
for size in 10x10 640 640x x400 640x400x2 99999x400; do
    misused "size $size" 'expected WIDTHxHEIGHT' plot worth.json -o x.svg --size $size
done
misused 'lines in the terminal' '--output is needed' plot keydiff.safetensors --kind losses
misused 'ratios of results' '--ratios is for' plot worth.json -o x.svg --ratios 50
misused 'an axis of maps' '--axis is for' plot keydiff.safetensors -o x.svg --axis log
misused 'a column of tables' '--column is for' plot keydiff.safetensors -o x.svg --column kl
if [ -e x.svg ] || [ -e x.jpg ]; then not_ok 'nothing is left'; else ok 'nothing is left'; fi
end
