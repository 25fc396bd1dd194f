#!/usr/bin/env bash
# Every operation of every backend on all groups, head sizes and lengths, where `make check` takes a sample.
# shellcheck source=tests/cli/lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
cd "$KVB_ROOT" || exit 1
for judge in "$KVB_BUILD"/tests/test_profiler_backend*; do
    [ -x "$judge" ] && [ -f "$judge" ] || continue
    if KVB_JUDGE=all "$judge" >"$T/judge.out" 2>&1; then ok "$(basename "$judge")"; else
        not_ok "$(basename "$judge")"
        tail -n 5 "$T/judge.out" | sed 's/^/    /'
    fi
done
end
