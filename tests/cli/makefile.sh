#!/usr/bin/env bash
# The Makefile: every target that help names exists, and a flag that changes, of one file too, makes objects anew.
# shellcheck source=tests/cli/lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

case $KVB_BUILD in *-san) end ;; esac # nothing of it depends on how the program was built
plain_make() { env -u MAKEFLAGS make --no-print-directory -C "$KVB_ROOT" BUILD="$T/b" CUDA=0 MPI=0 V=1 "$@" \
    2>make.err; }

plain_make help >help.out
while read -r _ target; do
    if plain_make -n "$target" >make.out; then ok "make $target is a target"; else
        not_ok "make $target is a target"
        head -n 5 make.err
    fi
done < <(grep -oE 'make [a-z-]+' help.out)
exists 'help names targets' help.out
if [ -e "$T/b" ]; then not_ok 'make -n writes nothing'; else ok 'make -n writes nothing'; fi
for word in CC CFLAGS BUILD hdf5 MPI CUDA; do says "showconfig shows $word" "^$word " <(plain_make showconfig); done

# recompiles FILE ARGUMENT...: make with these arguments would compile FILE.
recompiles() {
    plain_make -n -k "$T/b/${1%.c}.o" "${@:2}" | grep -q -- "-c $1 "
}
files='runtime/fail.c evaluator/attend.c'
for f in $files; do plain_make "$T/b/${f%.c}.o" >make.out; done
for f in $files; do
    if recompiles "$f"; then not_ok "$f stays as it is"; else ok "$f stays as it is"; fi
    for change in CFLAGS=-O1 CPPFLAGS=-DX LDFLAGS=-s "FLAGS_$(tr / _ <<<"${f%.c}")=-O1"; do
        if recompiles "$f" "$change"; then ok "$f: ${change%%=*} compiles it anew"; else
            not_ok "$f: ${change%%=*} compiles it anew"
        fi
    done
done
end
