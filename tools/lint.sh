#!/usr/bin/env bash
# Checks that need no test run: style, headers, symbols, includes, scripts. `make lint` sets CC, BUILD and LINT_FLAGS.
# A tool that is not installed is named and left out.
set -u
shopt -s lastpipe # `... | check` counts in this shell
cd "$(dirname "$0")/.." || exit 1
CC=${CC:-gcc}
BUILD=${BUILD:-build}
FOLDERS='runtime formats solver profiler evaluator tools tests tests/unit tests/fuzz runtime/examples'
failed=0

good() { echo "ok - $1"; }
bad() {
    echo "not ok - $1"
    failed=$((failed + 1))
}
# check NAME: reads findings from stdin; none is good.
check() {
    local findings
    findings=$(cat)
    if [ -z "$findings" ]; then good "$1"; else
        bad "$1"
        head -n 40 <<<"$findings" | sed 's/^/    /'
    fi
}
have() {
    command -v "$1" >/dev/null && return
    echo "skip - $1 is not installed"
    return 1
}
sources() { for folder in $FOLDERS; do find "$folder" -maxdepth 1 -name "$1"; done | sort; }
mapfile -t headers < <(sources '*.h')
mapfile -t all_sources < <(sources '*.[ch]')

# ---- Style -------------------------------------------------------------------------------------------------------------------
if have clang-format; then
    for f in "${all_sources[@]}"; do
        clang-format "$f" | cmp -s - "$f" || echo "$f: run 'make format'"
    done | check 'sources are formatted (.clang-format)'
fi
grep -nP '\t| +$' "${all_sources[@]}" | check 'no tabs, no spaces at the end of a line'

# ---- Headers -----------------------------------------------------------------------------------------------------------------
read -r -a flags <<<"${LINT_FLAGS:--std=c11 -D_GNU_SOURCE -I.}"
check_cflags=$(pkg-config --cflags check 2>/dev/null)
for h in "${headers[@]}"; do
    # A header must stand alone; a second inclusion must be harmless. The declaration is for headers of macros alone.
    printf '#include "%s"\n#include "%s"\nextern int nothing;\n' "$h" "$h" |
        eval "$CC ${flags[*]} $check_cflags -Wno-unused-function -fsyntax-only -x c -" 2>&1
done | check 'every header compiles by itself, twice'
strict='-Wall -Wextra -Wpedantic -Werror -fsyntax-only'
# shellcheck disable=SC2086
echo '#include "runtime/kvbudget.h"' | $CC -std=c99 $strict -I. -x c - 2>&1 | check 'runtime/kvbudget.h is C99'
cxx=${CXX:-$(command -v g++ c++ clang++ | head -n 1)}
if [ -n "$cxx" ]; then
    # shellcheck disable=SC2086
    echo '#include "runtime/kvbudget.h"' | "$cxx" -std=c++11 $strict -I. -x c++ - 2>&1 |
        check 'runtime/kvbudget.h is C++'
else
    echo 'skip - no C++ compiler'
fi
# shellcheck disable=SC2046
for f in runtime/*.c; do
    $CC -std=c99 -Wall -Wextra -Wpedantic -Wno-overlength-strings $(pkg-config --cflags libcjson) -fsyntax-only "$f" 2>&1
done | check 'runtime/ is C99 and compiles copied into another tree, without any flag of ours'

# ---- Includes between the folders ----------------------------------------------------------------------------------------------
# allowed FOLDER OTHER...: quoted includes of FOLDER name a header beside it or one of the other folders.
allowed() {
    local folder=$1 others
    others=$(printf '|%s/' "$@")
    grep -nE '^ *# *include "' "$folder"/*.[ch] 2>/dev/null | grep -vE "include \"([a-z0-9_]+\.h\"${others})" |
        check "$folder/ includes nothing but: $*"
}
grep -nE '^ *# *include "[^"]*/' runtime/*.[ch] | check 'runtime/ includes nothing of the other folders'
allowed formats runtime
allowed solver formats runtime
allowed profiler formats runtime
allowed evaluator profiler formats runtime
grep -nE '\b(printf|fprintf *\( *(stdout|stderr)|puts|perror|exit|abort) *\(' {runtime,formats,solver,profiler,evaluator}/*.[ch] 2>/dev/null |
    grep -vE 'kvb_fail|^[^:]*:[0-9]+: *//' | check 'only tools/ prints or exits'
grep -nE '\bassert *\(' {runtime,formats,solver,profiler,evaluator,tools}/*.[ch] 2>/dev/null | grep -v static_assert | check 'no assert as a check of input'

# ---- Symbols -------------------------------------------------------------------------------------------------------------------
if have nm; then
    nm -D --defined-only "$BUILD/libkvbudget.so" | awk '$3 !~ /^kvb_/ { print }' | check 'libkvbudget.so exports kvb_ names only'
    nm -g --defined-only "$BUILD/libkvbudget.a" | awk 'NF == 3 && $3 !~ /^kvb_/ { print }' | check 'libkvbudget.a exports kvb_ names only'
    grep -oE 'kvb_[a-z_]+\(' runtime/kvbudget.h | tr -d '(' | sort -u | while read -r name; do
        nm -D --defined-only "$BUILD/libkvbudget.so" | grep -qw "$name" || echo "$name"
    done | check 'every function of the header is in the library'
    for f in "$BUILD"/runtime/*.o; do
        nm "$f" | awk -v f="$f" '$2 ~ /^[BbDCc]$/ { print f ": " $3 }'
    done | check 'runtime/ has no writable globals'
fi

# ---- Scripts -------------------------------------------------------------------------------------------------------------------
if have shellcheck; then
    mapfile -t scripts < <(find tools tests .ci -name '*.sh' -o -path .ci/run | sort)
    shellcheck -x "${scripts[@]}" | check 'shellcheck'
fi
if have cppcheck; then
    # One malloc'd block holding doubles and floats, and a pointer that travels through memcpy, are beyond it.
    cppcheck --quiet --std=c11 --enable=warning,portability --inline-suppr --error-exitcode=0 -D_GNU_SOURCE -DKVBUDGET_VERSION='"0"' -I. \
        --suppress=missingIncludeSystem --suppress=invalidPointerCast --suppress=memleak:formats/lukv_import.c runtime formats solver profiler evaluator tools 2>&1 | check 'cppcheck'
fi
version=$(sed -n 's/^VERSION *:= *//p' Makefile)
{
    grep -q "\"$version\"" runtime/kvbudget.c || echo "Makefile: $version; runtime/kvbudget.c: $(grep 'VERSION "' runtime/kvbudget.c)"
} | check 'the runtime and the Makefile agree on the version'

if [ "$failed" = 0 ]; then echo 'lint: nothing found'; else echo "lint: $failed checks failed"; fi
[ "$failed" = 0 ]
