#!/usr/bin/env bash
# The tests of the Python package: check-python.sh BUILD, with libkvbudget.so and the program of BUILD.
# The last line is "N passed, N failed". Needs a Python 3.10 or newer and, once, a network: the pinned packages are kept
# in the cache folder (about 6 GB). Without them the tests are skipped, with a line that says why. KVBUDGET_PYTHON names
# an interpreter that has torch, transformers and pytest already.
set -uo pipefail
cd "$(dirname "$0")/../.." || exit 1

BUILD=$1
PYTHON=${PYTHON:-python3}
PINS="torch==2.15.0 transformers==5.2.0 kvpress==0.5.5 pytest==9.2.0 h5py==3.16.0"
CACHE=${KVBUDGET_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/kvbudget}
NEEDED_KB=16000000

skip() {
    printf 'SKIPPED: tests of the Python package: %s\n0 passed, 0 failed\n' "$1"
    exit 0
}

# An environment with the pinned packages, made once per list of pins; its last file says that it is complete.
environment() {
    local venv
    venv=$CACHE/python-$(printf '%s' "$PINS" | sha256sum | cut -c 1-12)
    python=$venv/bin/python
    [ -e "$venv/complete" ] && return
    "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null \
        || skip "$PYTHON is not Python 3.10 or newer"
    mkdir -p "$CACHE" || skip "cannot write $CACHE"
    [ "$(df -Pk "$CACHE" | awk 'END { print $4 }')" -gt "$NEEDED_KB" ] \
        || skip "less than $NEEDED_KB kB are free in $CACHE"
    rm -rf "$venv"
    "$PYTHON" -m venv "$venv" >/dev/null 2>&1 || skip "$PYTHON -m venv does not work (Debian: python3-venv)"
    printf 'check-python: installing %s into %s\n' "$PINS" "$venv" >&2
    # shellcheck disable=SC2086 # a list of words
    if ! timeout 900 "$venv/bin/pip" --disable-pip-version-check install --quiet --no-cache-dir --retries 1 \
        --timeout 30 $PINS; then
        rm -rf "$venv"
        skip "the packages could not be installed (no network?)"
    fi
    touch "$venv/complete"
}

python=${KVBUDGET_PYTHON:-}
[ -n "$python" ] || environment
[ -d "$BUILD" ] || skip "no folder $BUILD"

log=$(mktemp)
trap 'rm -f "$log"' EXIT
export KVBUDGET_LIBRARY=$PWD/$BUILD/libkvbudget.so KVBUDGET_PROGRAM=$PWD/$BUILD/kvbudget HF_HUB_OFFLINE=1 TQDM_DISABLE=1
case $BUILD in /*) KVBUDGET_LIBRARY=$BUILD/libkvbudget.so KVBUDGET_PROGRAM=$BUILD/kvbudget ;; esac
code=0
(cd python && timeout 1500 "$python" -m pytest -q -rs --tb=short -p no:cacheprovider) 2>&1 | tee "$log" || code=$?

# Checks types, as one more test. mypy is not among the environment's pins: a new pin makes all 6 GB anew.
typed=0 mistyped=0
if "$python" -m mypy --version >/dev/null 2>&1 || { [ -z "${KVBUDGET_PYTHON:-}" ] \
    && timeout 120 "$python" -m pip --disable-pip-version-check install --quiet --retries 1 mypy==2.4.1; }; then
    if (cd python && "$python" -m mypy --cache-dir "$CACHE/mypy"); then typed=1; else mistyped=1; fi
fi

count() { tail -n 1 "$log" | sed -n "s/.*[^0-9]\([0-9][0-9]*\) $1.*/\1/p; s/^\([0-9][0-9]*\) $1.*/\1/p" | head -n 1; }
passed=$(count passed) failed=$(count failed) errors=$(count error)
failed=$((${failed:-0} + ${errors:-0} + mistyped))
[ "$code" = 0 ] || [ "$failed" -gt 0 ] || failed=1
[ "${passed:-0}" -gt 0 ] || [ "$failed" -gt 0 ] || failed=1
printf '%d passed, %d failed\n' "$((${passed:-0} + typed))" "$failed"
[ "$failed" = 0 ]
