#!/usr/bin/env bash
# A record has the same bytes from one process, from any number of ranks, from shards that are merged, and from runs in
# which a rank was killed. Ranks need MPI: without it those checks are skipped.
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
tiny_inputs
"$KVB_BUILD/tests/tiny_model" --seed 2 other.gguf >/dev/null
PROFILE=(profile tiny.gguf calib.jsonl --new-tokens 24 --ignore-eos --quiet)
export LSAN_OPTIONS=detect_leaks=0

expect 0 'one process' "${PROFILE[@]}" -o one.h5

# ---- Shards ----
for n in 1 2 3 7; do # 5 questions: with 7 shards some are empty
    shards=()
    for i in $(seq $n); do
        kvb "${PROFILE[@]}" -o "s$i.h5" --force --shard "$i/$n"
        shards=("s$i.h5" "${shards[@]}") # merged in reverse order
    done
    expect 0 "$n shards are merged" merge merged.h5 "${shards[@]}" --force
    same "$n shards: the same bytes" one.h5 merged.h5
done
says 'merge says what it made' '2 contexts, 5 questions from 7 files' err
for i in 1 2 3; do kvb "${PROFILE[@]}" -o "s$i.h5" --force --shard "$i/3"; done
fails 'a missing shard is named' 'merged2.h5: cannot be merged, missing: .*shard 2/3 is not among the files' \
    merge merged2.h5 s1.h5 s3.h5
fails 'an existing record stays' 'exists; replace it with --force' merge merged.h5 s1.h5 s2.h5 s3.h5
kvb profile other.gguf calib.jsonl --new-tokens 24 --ignore-eos --quiet -o o2.h5 --shard 2/3
fails 'shards of two models' 's1.h5 and o2.h5 are not of one run: model_(files|sha256) is' \
    merge merged2.h5 s1.h5 o2.h5 s3.h5
kvb "${PROFILE[@]}" --seed 2 -o o2.h5 --force --shard 2/3
fails 'shards of two seeds' 'not of one run: seed is "1" in the first, "2"' merge merged2.h5 s1.h5 o2.h5 s3.h5
expect 0 'overlapping shards of two cuts' merge merged2.h5 s1.h5 s2.h5 s3.h5 one.h5 s2.h5
same 'overlapping shards: the same bytes' one.h5 merged2.h5
"$PYTHON" - s2.h5 bad.h5 <<'PYTHON_END'
# The last kilobytes of a shard hold its arrays: this changes a number, but not the checksum.
import sys
data = bytearray(open(sys.argv[1], "rb").read())
data[len(data) * 3 // 4] ^= 1
open(sys.argv[2], "wb").write(data)
PYTHON_END
fails 'a damaged shard' 'bad.h5' merge merged3.h5 s1.h5 bad.h5 s3.h5
fails 'a shard is not a whole record' 's2.h5: is shard 2/3 of a run' solve s2.h5 --metric keydiff -o x.safetensors
misused '--shard 0/3' "expected I/N" "${PROFILE[@]}" -o x.h5 --shard 0/3
misused '--shard 4/3' "expected I/N" "${PROFILE[@]}" -o x.h5 --shard 4/3
misused 'merge of nothing' 'at least one shard' merge x.h5
kvb "${PROFILE[@]}" -o x.h5 --plan --shard 1/3
says 'the plan tells how the work divides' '^shards ' out

# ---- Ranks ----
if ! command -v mpirun >/dev/null || ! ldd "$KVB" 2>/dev/null | grep -q libmpi; then
    skip "ranks: $(command -v mpirun >/dev/null && echo 'this build has no MPI' || echo 'mpirun is not installed')"
    end
fi
# No shared memory: a limit on the size of files, below, would stop MPI itself. Bare machines have no ssh, which is not
# needed here.
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_btl=self,tcp PMIX_MCA_gds=hash \
    OMPI_MCA_plm_rsh_agent=true
export OMP_NUM_THREADS=1
# launch N COMMAND...: runs mpirun; its exit status goes to CODE, each rank's process id to pid.RANK. mpirun may end
# before ranks that it has killed are gone and have released their locks, so this waits for them.
launch() {
    local n=$1
    shift
    CODE=0
    rm -f pid.*
    # shellcheck disable=SC2016
    timeout -k 5 900 mpirun --oversubscribe --bind-to none -n "$n" sh -c 'echo $$ >pid.$OMPI_COMM_WORLD_RANK
        exec "$@"' sh "$@" >out 2>err </dev/null || CODE=$?
    cat pid.* 2>/dev/null | while read -r pid; do while kill -0 "$pid" 2>/dev/null; do sleep 0.02; done; done
}
stopped() { if [ "$CODE" != 0 ] && [ "$CODE" != 124 ] && [ "$CODE" != 137 ]; then ok "$1"; else
    not_ok "$1 (124, 137: it hung)"
    show
fi; }

for n in 1 2 3 4; do
    launch $n "$KVB" "${PROFILE[@]}" -o "r$n.h5"
    ended 0 "$n ranks"
    same "$n ranks: the same bytes" one.h5 "r$n.h5"
done
for n in 1 3; do # a text and two metrics are added by several ranks
    head -n 1 calib.jsonl >first.jsonl
    kvb profile tiny.gguf first.jsonl --new-tokens 24 --ignore-eos --quiet --metric keydiff -o add.h5 --force
    launch $n "$KVB" profile tiny.gguf calib.jsonl --add --quiet --metric snapkv --metric keydiff --metric ea -o add.h5
    ended 0 "$n ranks add to a record"
    kvb profile tiny.gguf calib.jsonl --new-tokens 24 --ignore-eos --quiet --metric keydiff --metric snapkv \
        --metric ea -o want.h5 --force
    same "$n ranks add to a record: the same bytes" want.h5 add.h5
done
absent 'ranks leave no parts' r4.h5.parts

# An error of one rank: all end, the message comes from that rank, the work of the others is kept.
# shellcheck disable=SC2016
launch 3 sh -c 'm=tiny.gguf; if [ "$OMPI_COMM_WORLD_RANK" = 1 ]; then m=other.gguf; fi
    exec "$0" profile $m calib.jsonl --new-tokens 24 --ignore-eos -o e.h5' "$KVB"
stopped 'another model on one rank ends all'
says 'and that rank says why' 'rank 1: .*model_(files|sha256)' err
says 'and rank 0 says which' 'rank 1 of 3 failed' err
rm -rf e.h5.parts
# shellcheck disable=SC2016
launch 3 sh -c 'if [ "$OMPI_COMM_WORLD_RANK" = 2 ]; then ulimit -f 1; trap "" XFSZ; fi; exec "$@"' sh "$KVB" \
    "${PROFILE[@]}" -o e.h5
stopped 'a rank that cannot write ends all'
exists 'what the others did stays' "$(find e.h5.parts -name '*.h5' | head -n 1)"
absent 'and is no record yet' e.h5
launch 2 "$KVB" "${PROFILE[@]}" -o e.h5 --resume
ended 0 'resumed by two ranks'
same 'resumed by two ranks: the same bytes' one.h5 e.h5

# A rank that is killed ends the run, but no finished question is lost; another number of ranks resumes it.
LONG=(profile tiny.gguf calib.jsonl --new-tokens 600 --ignore-eos --quiet --batch 1)
expect 0 'a longer run in one process' "${LONG[@]}" -o long.h5
for ranks in '3 1' '2 4'; do
    rm -rf k.h5 k.h5.parts
    read -r first second <<<"$ranks"
    launch "$first" nice -n 5 "$KVB" "${LONG[@]}" -o k.h5 &
    until ls k.h5.parts/question-* >/dev/null 2>&1; do # a question is done
        kill -0 $! 2>/dev/null || break
        sleep 0.02
    done
    if kill -9 "$(cat pid.1)" 2>/dev/null; then ok "killed rank 1 of $first"; else not_ok "killed rank 1 of $first"; fi
    wait
    done_before=$(find k.h5.parts -name 'question-*.h5' 2>/dev/null | wc -l)
    absent 'no record yet' k.h5
    holds "$done_before questions stay" [ "$done_before" -gt 0 ]
    if [ "$second" = 1 ]; then expect 0 'one process goes on' "${LONG[@]}" -o k.h5 --resume; else
        launch "$second" "$KVB" "${LONG[@]}" -o k.h5 --resume
        ended 0 "$second ranks go on"
    fi
    same "$first ranks, killed, then $second: the same bytes" long.h5 k.h5
done
end
