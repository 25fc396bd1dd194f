#!/usr/bin/env bash
# Checks of the pages: figures that a page tells otherwise than docs/figures.json, and directions that no block has.
# shellcheck source=tests/cli/lib.sh disable=SC2317
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
# finds NAME PATTERN COMMAND...: it prints exactly one line, which matches; with the pattern '' it prints nothing.
finds() {
    "${@:3}" >found 2>&1
    if [ "$(wc -l <found)" = "$((${#2} > 0))" ] && { [ "$2" = '' ] || grep -qE "$2" found; }; then ok "$1"; else
        not_ok "$1"
        sed 's/^/    /' found
    fi
}

# ---- figures ---------------------------------------------------------------------------------------------------------
mkdir docs
cat >README.md <<'PAGE_END'
| what | 80 % | how much, by Llama 3.1 |
|---|---|---|
| 7 of 80 layers in 0.5.5 | **0.26** | [1,080](docs/a.md) |
| 7 of 80 layers, `:strict` | 12 | 13 |
PAGE_END
cat >docs/a.md <<'PAGE_END'
It loses 0.26 (0.2 .. 0.3)
of 1,080 problems; 0.31 is told once.
PAGE_END
# figures [EDIT]: docs/figures.json, changed by sed.
figures() {
    sed "${1:-}" >docs/figures.json <<'JSON_END'
{"commands": {"eval": "kvbudget eval"}, "figures": {
  "loss": {"value": "0.26", "unit": "nats", "by": "eval",
    "README.md": "7 of 80 layers in 0.5.5 > 80 %", "docs/a.md": "It loses"},
  "sum": {"value": "1,080", "unit": "problems", "by": "eval",
    "README.md": "in 0.5.5", "docs/a.md": "problems;"}}}
JSON_END
}
lint() { "$PYTHON" "$KVB_ROOT/tools/scripts/lint_figures.py"; }
figures
finds 'pages that agree with the file, in cells, rows and paragraphs' '' lint
sed -i 's/0\.26/0.27/' docs/a.md
finds 'another value in a page' "^docs/a\.md: 'It loses' does not say 0\.26, which is figure loss" lint
sed -i 's/0\.27/0.26/' docs/a.md
figures 's/It loses/It gains/'
finds 'a place that is not there' "^docs/a\.md: 'It gains' of figure loss is there 0 times" lint
figures
printf '\nIt loses 0.26 again.\n' >>docs/a.md
finds 'a place that two paragraphs have' "^docs/a\.md: 'It loses' of figure loss is there 2 times" lint
sed -i '$d' docs/a.md
figures 's/, "docs\/a\.md": "It loses"//'
finds 'a figure of one page alone' '^docs/figures\.json: loss needs .* two pages' lint
figures 's/{"eval"/{"old": "kvbudget task", "eval"/'
finds 'a command that measures nothing' "^docs/figures\.json: no figure is measured by 'old'" lint
figures
sed -i '3s/$/ 0.93 |/; 1,2s/$/ - |/' README.md
finds 'a figure in a table of README.md that the file does not have' '^README\.md: 0\.93 in the row .* is not in' lint

# ---- directions ------------------------------------------------------------------------------------------------------
mkdir -p tests/docs
printf '%s\n' '```sh' 'make check' '```' '' 'Then:' '' '```sh' 'make check LONG=1' 'make wheel' '```' >page.md
# directions WORDS KIND: what page.md's reader finds.
directions() {
    printf '{"own build": [], "blocks": {"page.md": {"%s": ["%s", "takes long"]}}}\n' "$@" >tests/docs/directions.json
    PYTHONPATH=$KVB_ROOT/tests/docs "$PYTHON" -c 'import pathlib, pages
page = pages.read_page(pathlib.Path("."), "page.md")
print(*page.faults, *(f"{b.line} {b.marker} {b.reason}" for b in page.blocks if b.marker), sep="\n")'
}
finds 'a direction reaches the block that it names' '^7 skip takes long$' directions 'make wheel' skip
finds 'words that two blocks have' "2 blocks hold 'make check', one was expected" directions 'make check' skip
finds 'words that no block has' "0 blocks hold 'make bench', one was expected" directions 'make bench' skip
finds 'a direction that nobody knows' "unknown direction 'jump'" directions 'make wheel' jump
end
