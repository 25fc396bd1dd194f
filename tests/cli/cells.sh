#!/usr/bin/env bash
# One bit of the results so far (NAME.cells) is flipped: the same command names the damaged line and refuses it, or
# comes to the same results; no damaged number is used.
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
tiny_table
tiny_texts 4 40
# flip NAME LOG RESULT COMMAND...: flips 12 bits of the command's log in turn; test_formats_pieces flips all of a line.
flip() {
    expect 0 "$1" "${@:4}"
    holds "$1: flipped bits" "$PYTHON" - "$KVB" "$2" "$3" "${@:4}" <<'END'
import json, random, re, subprocess, sys
kvb, log, result, *words = sys.argv[1:]
draw = random.Random(len(log))
whole = open(log, "rb").read()
def read():
    text = open(result, "rb").read()
    return re.sub(rb'"(\w*seconds|\w*allocated)":\s*[-+0-9.e]+', b"", text)
expected, refused = read(), 0
for _ in range(12):
    bit = draw.randrange(8 * len(whole))
    data = bytearray(whole)
    data[bit // 8] ^= 1 << bit % 8
    open(log, "wb").write(data)
    p = subprocess.run([kvb, *words], capture_output=True, text=True, errors="replace")
    if p.returncode == 1 and re.search(rf"{log}: line \d+: expected a result", p.stderr):
        refused += 1
    elif p.returncode != 0 or read() != expected:
        sys.exit(f"bit {bit}: status {p.returncode}, {p.stderr}")
    open(log, "wb").write(whole)
print(refused, "refused")
sys.exit(refused < 9)
END
}
SIZE=(--tokens 100 --next 6 --quiet)
flip eval worth.cells worth.json eval tiny.gguf table.safetensors text0.txt text1.txt -r 0.5 -a none "${SIZE[@]}" \
    -o worth
flip refine r.safetensors.cells r.safetensors refine tiny.gguf table.safetensors text?.txt --evaluations 4 \
    "${SIZE[@]}" -o r.safetensors
flip task found.cells found.json task tiny.gguf table.safetensors -k niah_single_1 -t 700 -c 2 -r 0.5 -q -o found
end
