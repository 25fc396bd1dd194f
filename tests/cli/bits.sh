#!/usr/bin/env bash
# Tokens and formats per head under one budget of bytes: profiled, solved, certified, stored in tables and evaluated.
# shellcheck source=tests/cli/lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
tiny_inputs
tiny_texts 4 60
SIZE=(--tokens 200 --next 8)
TEXTS=(text2.txt text3.txt --select text1.txt)

expect 0 'profile with curves' profile tiny.gguf calib.jsonl -o nats.h5 --quiet --curves --metric keydiff \
    --new-tokens 8 --ignore-eos
expect 0 'profile without' profile tiny.gguf calib.jsonl -o bare.h5 --quiet --metric keydiff --new-tokens 8 --ignore-eos
fails 'formats need what formats do' 'no curves of output errors' solve bare.h5 -m keydiff --loss output --formats bf16
SOLVE=(solve nats.h5 -m keydiff --loss output --quiet)
expect 0 'solve for tokens and formats' "${SOLVE[@]}" --formats bf16,int8,int4,int2 -o bits.safetensors --json
mv out bits.json
expect 0 'solve for bf16 alone' "${SOLVE[@]}" --formats bf16 -o bf16.safetensors --json
mv out bf16.json
holds 'more choice never loses more, and fewer bits keep more tokens' "$PYTHON" - <<'PYTHON_END'
import json, struct
def rows(name):
    return [r for r in json.load(open(name))["rows"]]
for many, one in zip(rows("bits.json"), rows("bf16.json")):
    assert many["saturated"] or many["table_bound"] <= one["table_loss"] + 1e-12, (many, one)
    assert many["table_bound"] <= many["table_loss"] + 1e-12
raw = open("bits.safetensors", "rb").read()
header = json.loads(raw[8:8 + struct.unpack("<Q", raw[:8])[0]])
about = header["__metadata__"]
assert about["format_version"] == "2" and about["packings"] == "bf16,int8,int4,int2", about
assert header["formats"]["shape"] == [99, 2, 2, 2] and header["formats"]["dtype"] == "U8", header["formats"]
data = raw[8 + struct.unpack("<Q", raw[:8])[0]:]
tensor = lambda name: data[slice(*header[name]["data_offsets"])]
formats = [tensor("formats")[8 * r:8 * r + 8] for r in range(99)]
prune = struct.unpack("<396d", tensor("prune_ratio"))
assert set(formats[0]) != {0} or set(formats[90]) != {0}
tokens = int(about["calibration_tokens"].split(",")[0])
d = int(about["head_dim"])
def size(bits, n, keys):
    groups = lambda m: m // 32 * (4 + 32 * bits // 8) + (4 + (m % 32 * bits + 7) // 8 if m % 32 else 0)
    return 2 * n * d if bits == 16 else d * groups(n) if keys else n * groups(d)
longest = max(int(t) for t in about["calibration_tokens"].split(","))
for r in range(99):
    used = 0
    for h in range(4):
        n = round((1 - prune[4 * r + h]) * longest)
        used += sum(size(16 >> f, n, i == 0) for i, f in enumerate(formats[r][2 * h:2 * h + 2]))
    saturated = tensor("saturated")[r]
    assert saturated or used <= (1 - (r + 1) / 100) * 4 * longest * 4 * d + 1e-3, (r, used)
PYTHON_END
expect 0 'the bounds are proved' validate nats.h5 --certificate bits.safetensors
for tensor in lower_bound table_loss loss lambda formats; do
    "$PYTHON" "$KVB_ROOT/tests/cli/check.py" damage bits.safetensors bad.safetensors $tensor 69 >/dev/null
    expect 1 "a wrong $tensor is found" validate nats.h5 --certificate bad.safetensors --quiet
    says 'in its row' '^  70 %: '
done
says 'as more bytes than there are' 'takes more bytes than its ratio leaves'
fails 'a comparison of tokens alone' 'has formats.*--certificate' validate nats.h5 bits.safetensors
for wrong in '--formats int3' '--formats int4,int4' '--formats int4 --exact' '--formats int4 --block 16' \
    '--formats int4 --bytes 1MB --tokens 60 --dtype fp8'; do
    # shellcheck disable=SC2086
    expect 2 "refused: $wrong" "${SOLVE[@]}" $wrong
done
expect 2 'importance knows no formats' solve nats.h5 -m keydiff --loss importance --formats int4
expect 0 'a size in bytes' "${SOLVE[@]}" --formats bf16,int8,int4 --bytes 6000 --tokens 60 -o size.safetensors

expect 0 'really packed caches' eval tiny.gguf bits.safetensors tokens=bf16.safetensors text[01].txt "${SIZE[@]}" \
    -r 0.5,0.8 -a packed -a packed:keys=8:values=2 -a packed:keys=16:values=16 -q --json
mv out worth.json
holds 'no row takes more than its bytes' "$PYTHON" - <<'PYTHON_END'
import json
full = 200 * 2 * 2 * 2 * 2 * 16
for row in json.load(open("worth.json"))["rows"]:
    assert 0 < row["cache_bytes"] <= (1 - row["ratio"]) * full * 1.05, row
PYTHON_END
expect 0 'everything kept' eval tiny.gguf text[01].txt -m keydiff "${SIZE[@]}" -r 0 -a packed -a uniform -q --json
holds 'in int4, at the bytes of int4' "$PYTHON" - <<'PYTHON_END'
import json
rows = {r["allocator"]: r for r in json.load(open("out"))["rows"]}
assert rows["packed"]["cache_bytes"] == 4 * (16 * (6 * (4 + 16) + 4 + 4) + 200 * (4 + 8)), rows["packed"]
assert rows["uniform"]["kl"] == 0 or rows["uniform"]["kl"] < 1e-9, rows["uniform"]
assert 0 < rows["packed"]["kl"] < 1, rows["packed"]
PYTHON_END
expect 0 'refitted, then packed' eval tiny.gguf bits.safetensors text0.txt "${SIZE[@]}" -r 0.5 -a none -q --refit
fails 'policies change the cache' 'packs the cache' eval tiny.gguf text0.txt -p tova -a packed -m none \
    "${SIZE[@]}" -r 0.5
fails 'refine knows tokens alone' 'bits.*has formats.*without --formats' refine tiny.gguf bits.safetensors \
    "${TEXTS[@]}" "${SIZE[@]}" -o r
expect 0 'a table of tokens' "${SOLVE[@]}" -o tokens.safetensors
fails 'also as a candidate' 'bits.*has formats.*without --formats' refine tiny.gguf tokens.safetensors \
    "${TEXTS[@]}" --candidate bits.safetensors "${SIZE[@]}" -o r --evaluations 1
fails 'so do other programs' 'has formats.*without --formats' export bits.safetensors -o x.npy
fails 'at one ratio too' 'has formats.*without --formats' export bits.safetensors --format varlen --ratio 50% \
    --tokens 60 -o x
misused 'tune makes its own tables' 'found a table; tune makes its own' tune tiny.gguf bits.safetensors -o tuned
sample_lines many 60 >many.jsonl
for table in bits tokens; do
    expect 0 "recommend $table" recommend tiny.gguf $table.safetensors many.jsonl --tokens 120 --next 8 --max-kl 1e6 \
        -r 50% --json --quiet
    mv out $table.json
done
holds 'formats lose less in no more bytes' "$PYTHON" - <<'PYTHON_END'
import json
bits, tokens = (json.load(open(f"{name}.json")) for name in ("bits", "tokens"))
assert bits["settings"]["bytes"] == tokens["settings"]["bytes"] == 2 * 2 * 120 * 4 * 16
assert bits["settings"]["bytes_saved"] >= 0.45 * bits["settings"]["bytes"], bits["settings"]
assert 0 < bits["rows"][0]["mean"] < tokens["rows"][0]["mean"], (bits["rows"], tokens["rows"])
PYTHON_END
expect 0 'budgets tell formats' budgets bits.safetensors --ratio 50% --tokens 60 --json
json 'two for each head' out 'len(j["details"][0]["formats"]) == 2 and all(f in ("bf16", "int8", "int4", "int2")
    for l in j["details"][0]["formats"]
    for h in l for f in h.split(","))'
end
