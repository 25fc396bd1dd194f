#!/usr/bin/env bash
# `make install` below a DESTDIR: which files are installed, and that programs are built with only pkg-config.
# shellcheck disable=SC2016
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
# Installing from the sanitised build would rebuild it without its flags.
case $KVB_BUILD in *-san) end ;; esac
make_it() { make --no-print-directory -s -C "$KVB_ROOT" BUILD="$KVB_BUILD" PREFIX=/opt/kvb DESTDIR="$T/root" "$@"; }
prefix=$T/root/opt/kvb

holds 'make install' make_it install
for f in bin/kvbudget include/kvbudget.h lib/libkvbudget.a lib/libkvbudget.so.0 lib/pkgconfig/kvbudget.pc \
    lib/cmake/kvbudget/kvbudgetConfig.cmake lib/cmake/kvbudget/kvbudgetConfigVersion.cmake; do
    exists "installs $f" "$prefix/$f"
done
holds 'the link for linking' [ "$(readlink "$prefix/lib/libkvbudget.so")" = libkvbudget.so.0 ]
for f in code-c.jsonl plain/math-en.txt eval/story-en.txt; do
    exists "installs the text $f" "$prefix/share/kvbudget/calib-data/$f"
done
holds 'and nothing else' [ "$(find "$T/root" ! -type d ! -path '*/calib-data/*' ! -path '*/tables/*' | wc -l)" = 8 ]
KVB=$prefix/bin/kvbudget expect 0 'the installed program' --version
KVB=$prefix/bin/kvbudget expect 0 'finds its ready tables' tables
says 'where they were put' "share/kvbudget/tables/smollm2-135m-instruct.safetensors"

# The .pc file has the final prefix; pkg-config puts the folder in front where it is now.
export PKG_CONFIG_PATH=$prefix/lib/pkgconfig PKG_CONFIG_SYSROOT_DIR=$T/root
same 'pkg-config and program agree on the version' <(pkg-config --modversion kvbudget) \
    <("$KVB" --version | sed -n 's/^kvbudget //p')
# A tree that is moved: the libraries' folder is relative to the prefix, like that of the headers.
says 'pkg-config follows the prefix' '^-L/else/lib ?$' \
    <(PKG_CONFIG_SYSROOT_DIR='' pkg-config --define-variable=prefix=/else --libs-only-L kvbudget)
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
tiny_inputs
"$KVB" profile tiny.gguf calib.jsonl -o run.h5 --new-tokens 4 --metric keydiff --quiet \
    && "$KVB" solve run.h5 -m keydiff -o t.safetensors --quiet >solve.out
# shellcheck disable=SC2086,SC2046
{
    holds 'a C99 program with the shared library is linked' $CC -std=c99 -Wall -Wextra -Wpedantic -Werror $flags \
        user.c -o shared -L"$prefix/lib" -lkvbudget
    holds 'and runs' env LD_LIBRARY_PATH="$prefix/lib" ./shared t.safetensors && mv held shared.out
    holds 'one with the static library is' $CC $flags user.c -o static "$prefix/lib/libkvbudget.a" \
        $(pkg-config --libs libcjson) -lm
    holds 'and runs' ./static t.safetensors && mv held static.out
    # With a copy of runtime/: no flags and no library of ours.
    cp -r "$KVB_ROOT/runtime" copied
    holds 'one with the folder copied into it is' $CC -std=c99 -Icopied $(pkg-config --cflags libcjson) user.c \
        copied/*.c -o copied/user $(pkg-config --libs libcjson) -lm
    holds 'and runs' ./copied/user t.safetensors && mv held copied.out
}
same 'shared and static say the same' shared.out static.out
same 'and so does the copy' shared.out copied.out
says 'the soname is versioned' 'SONAME.*libkvbudget\.so\.0' <(objdump -p "$prefix/lib/libkvbudget.so.0")
# example PROGRAM ARGUMENT...
example() { holds "example $1" "$KVB_BUILD/examples/$1" t.safetensors 0.8 "${@:2}" && mv held example.out; }
example 01_evict 4096
# A server's steps read the rows that the budgets keep, and no others.
holds 'example 03_serve' "$KVB_BUILD/examples/03_serve" t.safetensors 1000 2 3 0 0.8 && mv held serve.out
holds 'whose steps read few rows' awk '{ print; rows[NR] = $2 }
    END { exit !(NR == 3 && rows[2] > 0 && rows[3] < 0.22 * rows[2]) }' serve.out
example 02_grow 1000 512 && cp example.out grows.out
holds 'example 04_refit' "$KVB_BUILD/examples/04_refit" 256 64 && mv held refit.out
holds 'example 02_grow with a target' "$KVB_BUILD/examples/02_grow" t.safetensors 200 1000 512 && mv held stays.out
# $NF: rows after each cut. With a ratio they grow with the text; with a target size they do not.
holds 'with a ratio the cache grows' awk '{ print; if ($NF <= last) exit 1; last = $NF }' grows.out
holds 'with a target it stays as large as it is' awk '{ print } NR == 1 { first = $NF }
    $NF < 0.99 * first || $NF > 1.01 * first { bad = 1 } END { exit bad || NR != 5 }' stays.out

echo mine >"$prefix/share/kvbudget/tables/own.safetensors"
holds 'make uninstall' make_it uninstall
empty 'leaves nothing but a table that was added' <(find "$T/root" ! -type d ! -name own.safetensors)
says 'which stays' mine "$prefix/share/kvbudget/tables/own.safetensors"
absent 'nor folders' "$prefix/share/kvbudget/calib-data"
# A blank in PREFIX or DESTDIR must not split one folder into two.
mkdir -p notes
echo kept >notes/kvbudget
for where in "PREFIX=$T/with blank" "DESTDIR=$T/with blank" "PREFIX=$T/a;b" "LIBDIR=$T/with	tab"; do
    for target in uninstall install; do
        make_it "$where" $target >make.out 2>&1 && not_ok "make $target: $where is refused"
        says "make $target: $where is refused" 'holds a blank' make.out
    done
done
exists 'nothing was removed' notes/kvbudget
# A compiler command of several words does not count as missing; if it did, the stub keeps the test off the network.
mkdir stub
printf '#!/bin/sh\nexit 1\n' >stub/apt-get
chmod +x stub/apt-get
holds 'a compiler command of two words' env PATH="$T/stub:$PATH" CC="env $CC" CXX="env ${CXX:-g++}" \
    "$KVB_ROOT/tools/scripts/install-deps.sh"
empty 'lacks nothing' held
for target in help showconfig; do holds "make $target" make_it $target; done
says 'showconfig names oneDNN' '^oneDNN +[0-9]' held
end
