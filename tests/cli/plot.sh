#!/usr/bin/env bash
# kvbudget plot: head maps and results as SVG, and what is refused.
# shellcheck source=tests/cli/lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
tiny_model tiny.gguf
tiny_calib calib.jsonl
expect 0 'profile' profile tiny.gguf calib.jsonl -o run.h5 --quiet --new-tokens 8 --ignore-eos --metric keydiff \
    --metric snapkv:kvpress:window=16
expect 0 'solve keydiff' solve run.h5 --metric keydiff -o keydiff.safetensors --quiet
expect 0 'a table of each text' solve run.h5 --metric keydiff --contexts long -o long.safetensors --quiet
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
expect 0 'results' plot worth.json -o worth.svg
check 'KL and agreement' charts worth.svg 2
for r in 50 80 95; do says "a tick at $r" ">$r</text>" worth.svg; done
says 'the even split in its colour' 'stroke="#d55e00"' worth.svg
says 'and the table in its own' 'stroke="#0072b2"' worth.svg
echo '{"schema":"kvbudget-results","schema_version":1,"command":"solve","rows":[]}' >nothing.json
fails 'results without allocators' 'nothing.json: no row of an allocator' plot nothing.json -o x.svg
expect 0 'held-out losses as a picture' plot holdout.json -o holdout.svg
check 'one chart of them' charts holdout.svg 1

# ---- Values that differ in the last bit alone
"$PYTHON" - <<'PYTHON_END'
import json
j = json.load(open("worth.json"))
for i, r in enumerate(j["rows"]): r["kl"] = 9.000000000000002 if i % 2 else 9.0
json.dump(j, open("equal.json", "w"))
PYTHON_END
if (ulimit -f 1000 && timeout 60 "$KVB" plot equal.json -o equal.svg); then
    ok 'they are drawn in a small picture'; else not_ok 'they are drawn in a small picture'; fi

# ---- What is refused
for name in x.jpg x x.svg.gz .svg x.pdf x.png; do fails "a picture called $name" 'ends in .svg; .rsvg-convert' plot \
    keydiff.safetensors -o $name; done
misused 'tables and results' 'do not fit into one picture' plot keydiff.safetensors worth.json -o x.svg
misused 'lines in the terminal' '--output is needed' plot worth.json
misused 'ratios of results' '--ratios is for' plot worth.json -o x.svg --ratios 50
if [ -e x.svg ] || [ -e x.jpg ]; then not_ok 'nothing is left'; else ok 'nothing is left'; fi
end
