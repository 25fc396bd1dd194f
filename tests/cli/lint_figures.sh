#!/usr/bin/env bash
# `make lint`'s check of figures: two pages that tell one differently are found, and so is a figure that has no source.
# shellcheck source=tests/cli/lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
LINT=$KVB_ROOT/tools/scripts/lint_figures.py
# page FILE: its text from stdin. finds NAME PATTERN PAGE...: exactly one finding, which matches. clean NAME PAGE...
page() { cat >"$1"; }
finds() {
    "$PYTHON" "$LINT" "${@:3}" >found 2>&1
    if [ "$(wc -l <found)" = 1 ] && grep -qE "$2" found; then ok "$1"; else
        not_ok "$1"
        sed 's/^/    /' found
    fi
}
clean() {
    "$PYTHON" "$LINT" "${@:2}" >found 2>&1
    if [ -s found ]; then
        not_ok "$1"
        sed 's/^/    /' found
    else ok "$1"; fi
}

page README.md <<'PAGE_END'
| what | how much, by Llama 3.1 |
|---|---|
| 7 of 80 layers in 0.5.5 | 0.26<!--figure:loss-80--> and **1,080<!--figure:problems-->** |
PAGE_END
page a.md <<'PAGE_END'
It loses 0.26<!--figure:loss-80--> (0.2 .. 0.3) of 1,080<!--figure:problems--> problems; 0.31 is told once.
PAGE_END
clean 'two pages that agree, and what needs no marker' README.md a.md
sed 's/0\.26</0.27</' a.md >other.md
finds 'another value in the second page' 'figure loss-80: 0\.26 \(README\.md:3\), 0\.27 \(other\.md:1\)' \
    README.md other.md
page marked.md <<'PAGE_END'
Nothing stands here <!--figure:loss-80--> but the marker.
PAGE_END
finds 'a marker without a number' 'marked\.md:1: a figure.s marker without a number' README.md a.md marked.md
page alone.md <<'PAGE_END'
0.5<!--figure:alone-->
PAGE_END
finds 'a figure of one page alone' 'alone\.md:1: figure alone stands in one page only' README.md a.md alone.md
sed -i '3s/$/ 0.93 |/' README.md
finds 'a figure of README.md without a marker' 'README\.md:3: 0\.93 has no marker' README.md a.md
end
