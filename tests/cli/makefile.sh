#!/usr/bin/env bash
# The Makefile: every target that help names exists, and objects are rebuilt if flags change, also those of one file.
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

case $KVB_BUILD in *-san) end ;; esac # does not depend on how the program was built
plain_make() { env -u MAKEFLAGS make --no-print-directory -C "$KVB_ROOT" BUILD="$T/b" CUDA=0 MPI=0 V=1 "$@"; }

plain_make help >help.out 2>/dev/null
while read -r _ target; do
    holds "make $target is a target" plain_make -n "$target"
done < <(grep -oE 'make [a-z0-9-]+' help.out)
exists 'help names targets' help.out
absent 'make -n writes nothing' "$T/b"
plain_make showconfig >config.out 2>/dev/null
for word in CC CFLAGS BUILD hdf5 MPI CUDA; do says "showconfig shows $word" "^$word " config.out; done

# recompiles FILE ARGUMENT...: succeeds if make with these arguments would compile FILE.
recompiles() {
    plain_make -n -k "$T/b/${1%.c}.o" "${@:2}" 2>/dev/null | grep -q -- "-c $1 "
}
files='runtime/fail.c evaluator/attend.c'
for f in $files; do plain_make "$T/b/${f%.c}.o" >make.out 2>&1; done
for f in $files; do
    if recompiles "$f"; then not_ok "$f stays as it is"; else ok "$f stays as it is"; fi
    for change in CFLAGS=-O1 CPPFLAGS=-DX LDFLAGS=-s "FLAGS_$(tr / _ <<<"${f%.c}")=-O1"; do
        holds "$f: ${change%%=*} compiles it anew" recompiles "$f" "$change"
    done
done
end
