#!/usr/bin/env bash
# Every operation of every backend on all groups, head sizes and lengths, and every byte of a record damaged, where
# `make check` takes samples.
# shellcheck source=tests/cli/lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
cd "$KVB_ROOT" || exit 1
for judge in "$KVB_BUILD"/tests/test_profiler_backend*; do
    if [ ! -x "$judge" ] || [ ! -f "$judge" ]; then continue; fi
    if KVB_JUDGE=all "$judge" >"$T/judge.out" 2>&1; then ok "$(basename "$judge")"; else
        not_ok "$(basename "$judge")"
        tail -n 5 "$T/judge.out" | sed 's/^/    /'
    fi
done
if KVB_DAMAGE=all "$KVB_BUILD/tests/test_formats_damage" >"$T/damage.out" 2>&1; then ok 'every damaged byte'; else
    not_ok 'every damaged byte'
    tail -n 5 "$T/damage.out" | sed 's/^/    /'
fi
end
