#!/usr/bin/env bash
# Tests the wheel as users get it: check-wheel.sh FOLDER MODEL.gguf, with one wheel in FOLDER. A fresh environment gets
# the wheel with what README names and nothing else of this project; then the commands and Python lines of
# python/README.md, sections "From a model to a table" and "Use a table", are run as they stand, in an empty folder.
# KVBUDGET_VENV names an environment that has torch and transformers already (they are several GB): then only the wheel
# is installed, anew. The wheel of the library alone is looked for in FOLDER-library.
# The last line is "N passed, N failed".
set -uo pipefail
cd "$(dirname "$0")/../.." || exit 1

WHEEL=$(realpath "$1"/kvbudget-*.whl) MODEL=$(realpath "$2")
LIBRARY_WHEEL=$(realpath "$1-library"/kvbudget_library-*.whl)
PYTHON=${PYTHON:-python3}
passed=0 failed=0
work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT

# judge NAME COMMAND...: runs a test, and shows the output of a failed one.
judge() {
    local name=$1
    shift
    if "$@" >"$work/log" 2>&1; then
        echo "ok - $name"
        passed=$((passed + 1))
    else
        echo "not ok - $name"
        tail -n 20 "$work/log" | sed 's/^/    /'
        failed=$((failed + 1))
    fi
}

# block KIND N: the Nth fenced block of that kind in the package's README.
block() {
    awk -v kind="$1" -v n="$2" '$0 == "```" kind { on = ++seen == n; next } $0 == "```" { on = 0 } on' python/README.md
}

# as_user COMMAND...: runs it in the empty folder, with only the environment's and the system's own programs.
as_user() {
    (cd "$work/home" && env -i HOME="$work/home" PATH="$venv/bin:/usr/bin:/bin" MODEL=model.gguf HF_HUB_OFFLINE=1 \
        TQDM_DISABLE=1 OMP_NUM_THREADS="${OMP_NUM_THREADS:-2}" "$@")
}

reports_less() { as_user python use.py && grep -q 'Report(bytes_full=.*layers_cut=[1-9]' "$work/log"; }

venv=${KVBUDGET_VENV:-}
if [ -n "$venv" ]; then
    venv=$(realpath "$venv")
    judge 'the wheel alone is installed' "$venv/bin/pip" install --quiet --force-reinstall --no-deps "$WHEEL"
else
    venv=$work/venv
    "$PYTHON" -m venv "$venv" || exit 1
    judge 'the wheel and its extras are installed' "$venv/bin/pip" install --quiet "${WHEEL}[transformers,gguf]"
fi

mkdir -p "$work/home/calib-data"
ln -s "$MODEL" "$work/home/model.gguf"
head -c 4000 LICENSE >"$work/home/long.txt"
"$PYTHON" - >"$work/home/calib-data/licence.jsonl" <<'LINES'
import json

text = open("LICENSE").read()[3000:6000]
print(json.dumps({"sample_id": "a", "context": text, "questions": [" What may be copied?"], "answers": [" The Work."]}))
LINES
block sh 2 >"$work/home/table.sh"
{ block python 1 && block python 2; } >"$work/home/use.py"

# licence WHEEL EXPRESSION: what its metadata say; brings WHEEL PATTERN: whether a file of it has such a name.
licence() { unzip -p "$1" '*/METADATA' | grep -x "License-Expression: $2"; }
brings() { unzip -Z1 "$1" | grep -E "$2"; } # without -q, which would leave unzip to a broken pipe
brings_not() { ! brings "$@"; }

# library_alone: it opens a table in an environment that has NumPy and nothing else.
library_alone() {
    "$PYTHON" -m venv "$work/plain" && "$work/plain/bin/pip" install --quiet numpy "$LIBRARY_WHEEL" \
        && cd "$work/home" && "$work/plain/bin/python" -c \
        'import kvbudget; print(kvbudget.Table("keydiff.safetensors").budgets(0.8, 4096))'
}

judge 'the wheel says that GSL is under the GPL' licence "$WHEEL" 'Apache-2.0 AND GPL-3.0-or-later'
judge 'and has its text' brings "$WHEEL" 'licenses/GPL-3.txt'
judge 'no library of S3, LDAP or Kerberos comes along' brings_not "$WHEEL" 'libs/lib(curl|ldap|krb5|gnutls|ssl)'
judge 'the wheel of the library is Apache-2.0' licence "$LIBRARY_WHEEL" 'Apache-2.0'
judge 'and brings cJSON alone' brings_not "$LIBRARY_WHEEL" 'libs/lib[^c]|libs/libc[^j]|bin/'
judge 'and knows the metrics' brings "$LIBRARY_WHEEL" 'kvbudget/metrics.json'
judge 'kvbudget --version' as_user kvbudget --version
judge 'a GGUF becomes a table' as_user bash -e table.sh
judge 'the table is used in transformers' reports_less
judge 'and by the library alone' library_alone
printf '%d passed, %d failed\n' "$passed" "$failed"
[ "$failed" = 0 ]
