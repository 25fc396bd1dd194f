#!/usr/bin/env bash
# Checks that need no test run: style, headers, symbols, includes, scripts. `make lint` sets CC, BUILD, LINT_FLAGS,
# FOLDERS (all with C sources), TOOLS (those of them that may print and exit) and USES ("module: module ...;" each).
# A tool that is not installed is named and left out.
set -u
shopt -s lastpipe # `... | check` counts in this shell
cd "$(dirname "$0")/../.." || exit 1
CC=${CC:-gcc}
BUILD=${BUILD:-build}
for name in FOLDERS TOOLS USES; do
    [ -n "${!name:-}" ] || { echo "$name is not set: run 'make lint'" >&2; exit 2; }
done
failed=0
work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT
# shellcheck disable=SC2153
read -r -a folders <<<"$FOLDERS"

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
sources() { find "${folders[@]}" -maxdepth 1 -name "$1" | sort -u; }
mapfile -t headers < <(sources '*.h')
mapfile -t all_sources < <(sources '*.[ch]')

# ---- Style -----------------------------------------------------------------------------------------------------------
if have clang-format; then
    for f in "${all_sources[@]}"; do
        clang-format "$f" | cmp -s - "$f" || echo "$f: run 'make format'"
    done | check 'sources are formatted (.clang-format)'
fi
grep -nP '\t| +$' "${all_sources[@]}" | check 'no tabs, no spaces at the end of a line'
mapfile -t written < <(find "${folders[@]}" profiler/backend/*.cu* tests tools make Makefile .ci -type f \
    \( -name '*.[ch]' -o -name '*.cu*' -o -name '*.py' -o -name '*.sh' -o -name '*.mk' -o -name Makefile \) | sort -u)
# Rows of tables (a|b|c) may be longer, here and in pages: a row cannot be broken.
LC_ALL=C.UTF-8 grep -nE '.{121}' "${written[@]}" | grep -vE '^[^:]*:[0-9]+:[^ |]+\|[^ |]+\|' | cut -c 1-100 |
    check 'no line is longer than 120 columns'

# ---- Size, tests, citations: lint_exceptions.txt has what may pass, with reasons -------------------------------------
# but KIND: findings (whose first word is a name) except those; an exception that nothing needs any more is a finding.
but() {
    awk -v kind="$1" '
        FILENAME != "-" { if ($1 == kind && NF > 2) reason[$2] = 1; next }
        $1 in reason { used[$1] = 1; next }
        { print }
        END { for (name in reason) if (!(name in used)) print name ": the exception is not needed any more" }
    ' tools/scripts/lint_exceptions.txt -
}
wc -l "${written[@]}" | awk '$2 != "total" && $1 > 1200 { print $2, $1 " lines" }' |
    but file | check 'no file is longer than 1,200 lines'
# A budget of lines: additions must make room elsewhere. Judges (tests/peer) and what makes golden data are not counted.
# lines MOST WHAT: reads names of files.
lines() {
    local sum
    sum=$(grep -E '\.(c|h|cu|cuh|py|sh|js|css)$' | xargs -d '\n' cat | wc -l)
    echo "$sum lines of $2"
    [ "$sum" -le "$1" ] || echo "$2: $sum lines, expected at most $1" >>"$work/over"
}
: >"$work/over"
tree() { find . -path ./.git -prune -o -path './build*' -prune -o -path ./out -prune -o -type f -printf '%P\n'; }
tree | grep -vE '^(tests|python/tests|calib-data)/' | lines 70000 'the product'
tree | grep -E '^(tests|python/tests)/' | grep -vE '^tests/(peer|golden)/' | lines 37100 'tests'
check 'the product and its tests keep within their lines' <"$work/over"
mapfile -t in_c < <(printf '%s\n' "${written[@]}" | grep -E '\.(h|c|cu|cuh)$')
awk -v MAX=60 -f tools/scripts/lint_size.awk "${in_c[@]}" | but function | check 'no function is longer than 60 lines'

for f in tests/unit/test_*.c tests/fuzz/*.c; do sed -n '1{/^\/\/ .\{20\}/!p}' "$f" | sed "s|^|$f: |"; done |
    check 'the first line of a unit test and of a fuzz target says what it judges'
for f in tests/cli/*.sh; do sed -n "/^#!/d; /^# [A-Z\`-z].\{20\}/!s|^|$f: |p; q" "$f"; done |
    check 'the first line of a command-line test says what it judges'

# Public: declared in a header, and used by another folder than its own. What only its own folder uses is judged through
# that.
if have ctags; then
    cat tests/*.c tests/unit/*.[ch] tests/fuzz/*.c | grep -oE '\b[a-zA-Z_][a-zA-Z0-9_]*\b' | sort -u >"$work/words"
    for h in "${headers[@]}"; do
        folder=$(dirname "$h")
        case $h in tests*) continue ;; esac
        printf '%s\n' "${all_sources[@]}" | grep -vE "^(tests/.*|$folder/[^/]*)$" | xargs cat |
            grep -oE '\b[a-zA-Z_][a-zA-Z0-9_]*\b' | sort -u >"$work/elsewhere"
        ctags -x --language-force=C --kinds-C=p "$h" | awk -v h="$h" '$1 !~ /^[A-Z_]+$/ { print $1, h }' | sort -u |
            join - "$work/elsewhere" | join -v 1 - "$work/words"
    done | but untested | check 'every public function stands in a unit test or fuzz target'
fi

# A citation: methods.md N, methods.md N.M, or methods.md 6.N, the numbered points of its section 6.
{
    sed -nE 's/^#+ ([0-9]+(\.[0-9]+)?)[. ].*/\1/p' docs/methods.md
    sed -n '/^## 6\./,$p' docs/methods.md | sed -nE 's/^([0-9]+)\. .*/6.\1/p'
} >"$work/sections"
grep -noE 'methods\.md`?,? (section )?[0-9]+(\.[0-9]+)?(-[0-9]+\.[0-9]+)?' "${written[@]}" ./*.md ./*/*.md /dev/null |
    while IFS= read -r cited; do
        grep -oE '[0-9]+(\.[0-9]+)?' <<<"${cited##*methods.md}" | grep -vxF -f "$work/sections" |
            sed "s|^|$cited: no section |"
    done | check 'every section of docs/methods.md that is cited exists'

# ---- Pages -----------------------------------------------------------------------------------------------------------
# Rows of tables may be longer: a row cannot be broken.
mapfile -t pages < <(find . -path ./.git -prune -o -path './build*' -prune -o -name '*.md' -printf '%P\n' | sort)
LC_ALL=C.UTF-8 grep -nE '^[^|].{120}' "${pages[@]}" | cut -c 1-100 |
    check 'no line of a page but rows of tables is longer than 120 columns'
wc -l README.md | awk '$1 > 120 { print $2, $1 " lines" }' | check 'README.md has at most 120 lines'
grep -n -- '<!--' "${pages[@]}" | grep -v '^tests/fuzz/' | check 'no page has an HTML comment'
# A module's README lists its files: `name` or `name.c` in the first column of a table whose head is `file`.
for folder in runtime solver study evaluator; do
    awk -F '|' '!/^\|/ { on = 0 } $2 ~ /^ file / { on = 1; next } /^\|--/ { next } on {
        n = split($2, name, "`")
        for (i = 2; i <= n; i += 2) { sub(/\.[ch]$/, "", name[i]); print name[i] }
    }' "$folder/README.md" | sort -u >"$work/listed"
    for f in "$folder"/*.c; do basename "$f" .c; done | sort >"$work/there"
    comm -13 "$work/listed" "$work/there" | sed "s|^|$folder/README.md does not list |"
    comm -23 "$work/listed" "$work/there" | while read -r name; do
        [ -e "$folder/$name.h" ] || echo "$folder/README.md lists $name, which is not there"
    done
done | check 'the README of a module lists its files'
if have "${PYTHON:-python3}"; then
    "${PYTHON:-python3}" tools/scripts/lint_figures.py | check 'README and pages quote docs/figures.json'
fi

# An error may first show when a file is closed: code that wrote must check it, code that only read says (void).
mapfile -t sources_c < <(find runtime formats solver study profiler evaluator tools -name '*.c' | sort)
grep -nE '^ *(if \([^()]*\) |else )?(f?close|closedir|pclose|H5[A-Z]{1,2}close)\(' "${sources_c[@]}" |
    check 'every close is looked at, or is (void) where the file was only read'

# A mapped file that another program writes meanwhile reads as zeros or as a mixture: code that maps one must check it.
# gguf.c hands its mapping on (gguf_file.map).
grep -lE '\bfile_map\(' "${sources_c[@]}" | grep -vxF -e formats/file_read.c -e profiler/weights/gguf.c |
    while IFS= read -r f; do grep -qE '\bfile_check\(' "$f" || echo "$f: no file_check"; done |
    check 'who maps a file asks whether it changed meanwhile'

# ---- Headers ---------------------------------------------------------------------------------------------------------
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
    echo '#include "runtime/kvbudget.h"' | $cxx -std=c++11 $strict -I. -x c++ - 2>&1 |
        check 'runtime/kvbudget.h is C++'
else
    echo 'skip - no C++ compiler'
fi
# shellcheck disable=SC2046
for f in runtime/*.c; do
    $CC -std=c99 -Wall -Wextra -Wpedantic -Wno-overlength-strings $(pkg-config --cflags libcjson) -fsyntax-only "$f" \
        2>&1
done | check 'runtime/ is C99 and compiles copied into another tree, without any flag of ours'

# ---- Includes between the folders ------------------------------------------------------------------------------------
# allowed FOLDER OTHER...: quoted includes of FOLDER name a header beside it or one of the other folders.
allowed() {
    local folder=$1 others
    others=$(printf '|%s/' "$@")
    grep -nE '^ *# *include "' "$folder"/*.[ch] 2>/dev/null | grep -vE "include \"([a-z0-9_]+\.h\"${others})" |
        check "$folder/ includes nothing but: $*"
}
grep -nE '^ *# *include "[^"]*/' runtime/*.[ch] | check 'runtime/ includes nothing of the other folders'
modules=()
tr ';' '\n' <<<"$USES" | while IFS=': ' read -r folder used; do
    [ -n "$folder" ] || continue
    modules+=("$folder")
    # shellcheck disable=SC2086
    [ -z "$used" ] || allowed "$folder" $used
done
# in_folders PATTERN FOLDER...: the lines of C sources that match.
in_folders() {
    local pattern=$1 folder
    shift
    for folder in "$@"; do grep -nE -- "$pattern" "$folder"/*.[ch] /dev/null; done
}
in_folders '\b(printf|fprintf *\( *(stdout|stderr)|puts|perror|exit|abort) *\(' "${modules[@]}" |
    grep -vE 'kvb_fail|^[^:]*:[0-9]+: *//' | grep -v '^formats/need.c:' |
    check 'only tools/ prints or exits, and need.c where memory is out'
# shellcheck disable=SC2153
read -r -a tools <<<"$TOOLS"
in_folders '\bassert *\(' "${modules[@]}" "${tools[@]}" | grep -v static_assert | check 'no assert as a check of input'

# ---- Symbols ---------------------------------------------------------------------------------------------------------
if have nm; then
    nm -D --defined-only "$BUILD/libkvbudget.so" | awk '$3 !~ /^kvb_/ { print }' \
        | check 'libkvbudget.so exports kvb_ names only'
    nm -g --defined-only "$BUILD/libkvbudget.a" | awk 'NF == 3 && $3 !~ /^kvb_/ { print }' \
        | check 'libkvbudget.a exports kvb_ names only'
    grep -oE 'kvb_[a-z_]+\(' runtime/kvbudget.h | tr -d '(' | sort -u | while read -r name; do
        nm -D --defined-only "$BUILD/libkvbudget.so" | grep -qw "$name" || echo "$name"
    done | check 'every function of the header is in the library'
    for f in "$BUILD"/runtime/*.o; do
        nm "$f" | awk -v f="$f" '$2 ~ /^[BbDCc]$/ { print f ": " $3 }'
    done | check 'runtime/ has no writable globals'
fi

# ---- Scripts ---------------------------------------------------------------------------------------------------------
if have shellcheck; then
    mapfile -t scripts < <(find tools tests .ci -name '*.sh' -o -path .ci/run | sort)
    shellcheck -x "${scripts[@]}" | check 'shellcheck'
fi
if have cppcheck; then
    # One malloc'd block holding doubles and floats, and a pointer that travels through memcpy, are beyond it,
    # and so is an array of which nothing is read where nothing was counted. It does not know cJSON's loop.
    cppcheck --quiet --std=c11 --enable=warning,portability --inline-suppr --error-exitcode=0 -D_GNU_SOURCE \
        -DKVBUDGET_VERSION='"0"' '-DcJSON_ArrayForEach(e,a)=while ((e = (a) ? (a)->child : 0))' -I. \
        --suppress=missingIncludeSystem --suppress=invalidPointerCast --suppress=uninitvar:tools/report/page.c \
        --suppress=memleak:formats/lukv_steps.c "${modules[@]}" tools 2>&1 | check 'cppcheck'
fi
version=$(sed -n 's/^VERSION *:= *//p' Makefile)
{
    grep -q "\"$version\"" runtime/table.c || echo \
        "Makefile: $version; runtime/table.c: $(grep 'VERSION "' runtime/table.c)"
} | check 'the runtime and the Makefile agree on the version'

if [ "$failed" = 0 ]; then echo 'lint: nothing found'; else echo "lint: $failed checks failed"; fi
[ "$failed" = 0 ]
