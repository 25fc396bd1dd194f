#!/usr/bin/env bash
# `make install` below a DESTDIR: what a user of the library gets, and that it works with nothing but pkg-config.
# shellcheck source=tests/cli/lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
# Installing from the sanitised build would rebuild it without its flags.
case $KVB_BUILD in *-san) end ;; esac
make_it() { make --no-print-directory -s -C "$KVB_ROOT" BUILD="$KVB_BUILD" PREFIX=/opt/kvb DESTDIR="$T/root" "$@" \
    >make.out 2>&1; }
prefix=$T/root/opt/kvb

if make_it install; then ok 'make install'; else
    not_ok 'make install'
    tail -n 20 make.out
fi
for f in bin/kvbudget include/kvbudget.h lib/libkvbudget.a lib/libkvbudget.so.0 lib/pkgconfig/kvbudget.pc \
    lib/cmake/kvbudget/kvbudgetConfig.cmake lib/cmake/kvbudget/kvbudgetConfigVersion.cmake; do
    exists "installs $f" "$prefix/$f"
done
if [ "$(readlink "$prefix/lib/libkvbudget.so")" = libkvbudget.so.0 ]; then ok 'the link for linking'; else not_ok \
    'the link for linking'; fi
for f in code-c.jsonl plain/math-en.txt eval/story-en.txt; do
    exists "installs the text $f" "$prefix/share/kvbudget/calib-data/$f"
done
if [ "$(find "$T/root" ! -type d ! -path '*/calib-data/*' ! -path '*/tables/*' | wc -l)" = 8 ]; then
    ok 'and nothing else'
else
    not_ok 'and nothing else'
    find "$T/root" ! -type d
fi
KVB=$prefix/bin/kvbudget expect 0 'the installed program' --version
KVB=$prefix/bin/kvbudget expect 0 'finds its ready tables' tables
says 'where they were put' "share/kvbudget/tables/smollm2-135m-instruct.safetensors"

# The .pc file has the final prefix; pkg-config adds where it lies now.
export PKG_CONFIG_PATH=$prefix/lib/pkgconfig PKG_CONFIG_SYSROOT_DIR=$T/root
if [ "$(pkg-config --modversion kvbudget)" = "$("$KVB" --version | sed -n 's/^kvbudget //p')" ]; then
    ok 'pkg-config and program agree on the version'
else
    not_ok 'pkg-config and program agree on the version'
fi
# A tree that is moved: libraries are told relative to the prefix, as headers are.
if [ "$(PKG_CONFIG_SYSROOT_DIR='' pkg-config --define-variable=prefix=/else --libs-only-L kvbudget | tr -d ' ')" = \
    -L/else/lib ]; then ok 'pkg-config follows the prefix'; else
    not_ok 'pkg-config follows the prefix'
    cat "$prefix/lib/pkgconfig/kvbudget.pc"
fi
cat >user.c <<'C'
#include <kvbudget.h>
#include <stdio.h>
int main(int argc, char **argv)
{
    kvb_error err = {KVB_OK, ""};
    kvb_table *table;
    uint32_t keep[4096];
    if (kvb_table_open(&table, argv[argc - 1], NULL, &err) || kvb_budgets(table, 0.5, 1000, NULL, keep, 4096, &err)) {
        puts(err.message);
        return 1;
    }
    printf("%s %s %u\n", kvb_version(), kvb_table_info(table)->metric, keep[0]);
    kvb_table_close(table);
    return 0;
}
C
CC=${CC:-gcc}
unset PKG_CONFIG_SYSROOT_DIR
flags="-I$prefix/include"
tiny_model tiny.gguf
tiny_calib calib.jsonl
"$KVB" profile tiny.gguf calib.jsonl -o run.h5 --new-tokens 4 --metric keydiff --quiet \
    && "$KVB" solve run.h5 -m keydiff -o t.safetensors --quiet >solve.out
# shellcheck disable=SC2086,SC2046
{
    if $CC -std=c99 -Wall -Wextra -Wpedantic -Werror $flags user.c -o shared -L"$prefix/lib" -lkvbudget >cc.out 2>&1 &&
        LD_LIBRARY_PATH=$prefix/lib ./shared t.safetensors >shared.out 2>&1; then ok \
            'a C99 program with the shared library'; else
        not_ok 'a C99 program with the shared library'
        cat cc.out shared.out
    fi
    if $CC $flags user.c -o static "$prefix/lib/libkvbudget.a" $(pkg-config --libs libcjson) -lm >cc.out 2>&1 &&
        ./static t.safetensors >static.out 2>&1; then ok 'with the static library'; else
        not_ok 'with the static library'
        cat cc.out static.out
    fi
    # A copied folder: no flags of ours, no library of ours.
    cp -r "$KVB_ROOT/runtime" copied
    if $CC -std=c99 -Icopied $(pkg-config --cflags libcjson) user.c copied/*.c -o copied/user \
        $(pkg-config --libs libcjson) -lm >cc.out 2>&1 &&
        ./copied/user t.safetensors >copied.out 2>&1; then ok 'with the folder copied into another program'; else
        not_ok 'with the folder copied into another program'
        cat cc.out copied.out
    fi
}
same 'shared and static say the same' shared.out static.out
same 'and so does the copy' shared.out copied.out
says 'the soname is versioned' 'SONAME.*libkvbudget\.so\.0' <(objdump -p "$prefix/lib/libkvbudget.so.0")
# example PROGRAM ARGUMENT...
example() {
    local program=$1
    shift
    if "$KVB_BUILD/examples/$program" t.safetensors 0.8 "$@" >example.out 2>&1; then ok "example $program"; else
        not_ok "example $program"
        head example.out
    fi
}
example 01_budgets 4096
example 02_evict 4096
example 04_batch 4096 100
if awk '/^cu_seqlens  / { rows = $NF } /^pages/ { pages = $NF; n = NF - 7 }
    END { exit !(rows && 16 * pages >= rows + 8 * n) }' example.out; then ok 'pages hold all rows'; else
    not_ok 'pages hold all rows'
    cat example.out
fi
# A server's steps read the rows that the budgets keep, and no others.
if "$KVB_BUILD/examples/07_serve" t.safetensors 1000 2 3 0 0.8 >serve.out 2>&1 &&
    awk '{ rows[NR] = $2 } END { exit !(NR == 3 && rows[2] > 0 && rows[3] < 0.22 * rows[2]) }' serve.out; then
    ok 'example 07_serve'
else
    not_ok 'example 07_serve'
    cat serve.out
fi
example 03_grow 1000 512
cp example.out grows.out
example 03_grow 1000 512 1000
# $NF: rows after each cut. Without a cap they grow with the text; with one they stay.
if awk '{ if ($NF <= last) exit 1; last = $NF }' grows.out && awk 'NR > 1 && $NF != last { exit 1 } { last = $NF }' \
    example.out && [ "$(wc -l <example.out)" = 5 ]; then ok 'a cap keeps the cache as large as it is'; else
    not_ok 'a cap keeps the cache as large as it is'
    cat grows.out example.out
fi

if make_it uninstall && [ -z "$(find "$T/root" ! -type d)" ]; then ok 'make uninstall leaves nothing'; else
    not_ok 'make uninstall leaves nothing'
    find "$T/root" ! -type d
fi
# A blank in PREFIX must not make two folders of one; nor in DESTDIR.
mkdir -p notes
echo kept >notes/kvbudget
for where in "PREFIX=$T/with blank" "DESTDIR=$T/with blank" "PREFIX=$T/a;b" "LIBDIR=$T/with	tab"; do
    for target in uninstall install; do
        if make_it "$where" $target; then not_ok "make $target: $where is refused"; else
            says "make $target: $where is refused" 'holds a blank' make.out
        fi
    done
done
exists 'nothing was removed' notes/kvbudget
# Nothing is missing, however many words the compiler's command has; a stub keeps the test off the network if it looks
# so.
mkdir stub
printf '#!/bin/sh\nexit 1\n' >stub/apt-get
chmod +x stub/apt-get
if PATH=$T/stub:$PATH CC="env $CC" CXX="env ${CXX:-g++}" "$KVB_ROOT/tools/scripts/install-deps.sh" >deps.out 2>&1 \
    && [ ! -s deps.out ]; then ok 'a compiler command of two words'; else
    not_ok 'a compiler command of two words'
    cat deps.out
fi
for target in help showconfig; do
    if make_it $target; then ok "make $target"; else not_ok "make $target"; fi
done
says 'showconfig names oneDNN' '^oneDNN +[0-9]' make.out
end
