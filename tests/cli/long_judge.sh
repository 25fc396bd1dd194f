#!/usr/bin/env bash
# Every operation of every backend on all groups, head sizes and lengths, and damage to every byte of a record;
# `make check` takes samples of both.
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
cd "$KVB_ROOT" || exit 1
for judge in "$KVB_BUILD"/tests/test_profiler_backend*; do
    if [ ! -x "$judge" ] || [ ! -f "$judge" ]; then continue; fi
    holds "$(basename "$judge")" env KVB_JUDGE=all "$judge"
done
holds 'every damaged byte' env KVB_DAMAGE=all "$KVB_BUILD/tests/test_formats_damage"
end
