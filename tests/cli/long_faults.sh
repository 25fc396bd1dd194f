#!/usr/bin/env bash
# Every state-changing file call of every command that writes fails once: EIO, ENOSPC, EINTR, a short write, a kill.
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
"$PYTHON" "$KVB_ROOT/tests/faults/faults.py" --build "$KVB_BUILD" --jobs "$(nproc)" ||
    not_ok 'no output is lost and no fault is silent'
end
