#!/usr/bin/env bash
# Around the commands: help, version, unknown commands and options.
# shellcheck disable=SC2016
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
COMMANDS=$("$KVB" help | sed -n '/^Commands:/,/^$/s/^  \([a-z]*\) .*/\1/p')
holds 'help lists commands' [ "$(wc -w <<<"$COMMANDS")" -ge 15 ]

expect 0 'help' help
for c in $COMMANDS; do says "help lists $c" "^  $c +[A-Za-z]"; done
says 'help shows the way from a model to a table' 'kvbudget solve .*--metric'
expect 0 '--help' --help
cp out first
expect 0 'help help' help help
same 'help help is help' first out
expect 0 'version' --version
says 'version names the program' '^kvbudget [0-9]+\.[0-9]+\.[0-9]+$'
says 'version names oneDNN and the vector units' '^oneDNN +[0-9.]+, vector units'

for c in $COMMANDS; do
    expect 0 "help $c" help "$c"
    says "help $c has a usage line" "^Usage: kvbudget $c"
    says "help $c describes --help" '--help +print this text'
    lacks "help $c fits the screen" '.{133}' out
    sed -n 's/^ *\(-[A-Za-z]\), --\([a-z-]*\).*/\1 \2/p' out >"$c.letters"
    empty "$c: a letter means one thing" <(cut -d ' ' -f 1 "$c.letters" | sort | uniq -d)
    cp out first
    expect 0 "$c --help" "$c" --help
    same "$c --help is help $c" first out
    misused "$c with an unknown option" "unrecognized option '--no-such-option'" "$c" --no-such-option
    misused "$c with an unknown letter" "invalid option -- '!'" "$c" '-!'
    [ "$c" = tables ] || misused "$c without anything" '.' "$c" # tables alone lists them
done
# -o may differ: eval --output and task --results are the same thing (NAME.json and others).
holds 'a letter means the same in eval and task' awk '
    FNR == NR { of[$1] = $2; next }
    $1 in of && of[$1] != $2 && !(of[$1] == "output" && $2 == "results") { bad = 1 }
    END { exit bad }' eval.letters task.letters

expect 0 'help metrics as JSON' help metrics --json
json 'it has what Python builds metrics of' out 'j["snapkv:lukv"]["parameters"]["window"] == 32 and
    j["snapkv:lukv"]["constant"] == 0 != j["snapkv:kvpress"]["constant"] and j["ea:kvpress"]["real"] == ["epsilon"] and
    j["lagkv:paper"]["press_arguments"] == {"n_sink": "sink", "lag_size": "lag", "cross_scoring": "cross"} and
    j["keydiff"]["choices"]["anchor"] == "mean|raw|median" and j["lagkv:paper"]["protect_sink"] == 16'
expect 0 'help metrics' help metrics
for m in snapkv:kvpress snapkv:lukv keydiff ea:kvpress lagkv:paper morphkv rocketkv h2o:half tova knorm streaming \
    random critical+METRIC; do
    says "help metrics explains $m" "^${m/+/\\+}\$"
done
says 'help metrics gives sources' 'arXiv 2404.14469'
says 'help metrics gives parameters' '^    window +64 +1 to 65536: '
says 'help metrics says what cannot be profiled' 'half of every budget'
lacks 'help metrics fits the screen' '.{133}' out

misused 'no command' 'a command is missing'
misused 'nonsense' "unknown command 'xyzzy'" xyzzy
misused 'help for nonsense' "unknown command 'xyzzy'" help xyzzy
misused 'help for two commands' 'expected one command' help solve budgets

# Idle threads spin less, unless the user has set how threads wait.
spins() { # [VARIABLE=VALUE]...: prints libgomp's spin count at the last start, with only these variables set
    env -i OMP_DISPLAY_ENV=verbose "$@" "$KVB" --version 2>&1 </dev/null |
        sed -n "s/.*GOMP_SPINCOUNT = '\([0-9]*\)'.*/\1/p" | tail -n 1
}
spun() { # EXPECTED [VARIABLE=VALUE]...
    local expected=$1 found
    shift
    found=$(spins "$@")
    holds "threads spin $expected times with '$*', found $found" [ "$found" = "$expected" ]
}
if [ -n "$(spins)" ]; then
    spun 2000
    spun 2000 HOME=/ LC_ALL=C
    spun 2000 OMP_PROC_BIND=true OMP_PLACES=cores
    spun 12345 GOMP_SPINCOUNT=12345
    spun 0 OMP_WAIT_POLICY=passive
else
    skip 'spinning: this OpenMP library is not libgomp'
fi
end
