#!/usr/bin/env bash
# Regenerates the golden data of tests/golden and the seeds of tests/fuzz/corpus with independent Python code, in a
# virtual environment below the build folder. Called by `make golden`; look at `git diff --stat` afterwards: nothing may
# change unless the references did. The first run downloads several hundred megabytes (PyTorch).
set -eu
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-python3}
venv=${GOLDEN_VENV:-build/golden-venv}
if [ ! -x "$venv/bin/python" ]; then
    "$PYTHON" -m venv "$venv" || { echo "Python's venv is missing (Debian: apt-get install python3-venv)" >&2 \
        && exit 1; }
fi
"$venv/bin/pip" install --quiet --disable-pip-version-check -r tests/golden/requirements.txt
for script in tests/golden/make_*.py; do
    echo "$script"
    "$venv/bin/python" "$script"
done
git status --short tests/golden tests/fuzz/corpus 2>/dev/null || true
