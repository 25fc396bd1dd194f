#!/usr/bin/env bash
# The frame of the program: help, version, unknown words, full disks.
# shellcheck source=tests/cli/lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
COMMANDS=$("$KVB" help | sed -n '/^Commands:/,/^$/s/^  \([a-z]*\) .*/\1/p')
if [ "$(wc -w <<<"$COMMANDS")" -ge 15 ]; then ok 'help lists commands'; else not_ok 'help lists commands'; fi

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
    if awk 'length > 132 { exit 1 }' out; then ok "help $c fits the screen"; else not_ok "help $c fits the screen"; fi
    sed -n 's/^ *\(-[A-Za-z]\), --\([a-z-]*\).*/\1 \2/p' out >"$c.letters"
    if [ -z "$(cut -d ' ' -f 1 "$c.letters" | sort | uniq -d)" ]; then ok "$c: a letter means one thing"; else not_ok \
        "$c: a letter means one thing"; fi
    cp out first
    expect 0 "$c --help" "$c" --help
    same "$c --help is help $c" first out
    misused "$c with an unknown option" "unknown or ambiguous option '--no-such-option'" "$c" --no-such-option
    misused "$c with an unknown letter" "unknown option '-!'" "$c" '-!'
    misused "$c without anything" '.' "$c"
done
# eval calls --output what task calls --results: NAME.json and its like.
if awk '
    FNR == NR { of[$1] = $2; next }
    $1 in of && of[$1] != $2 && !(of[$1] == "output" && $2 == "results") { bad = 1 }
    END { exit bad }' eval.letters task.letters; then
    ok 'a letter means the same in eval and task'
else
    not_ok 'a letter means the same in eval and task'
fi

expect 0 'help metrics' help metrics
for m in snapkv:kvpress snapkv:lukv keydiff ea:kvpress lagkv:paper morphkv rocketkv h2o:half tova knorm streaming \
    random critical+METRIC; do
    says "help metrics explains $m" "^${m/+/\\+}\$"
done
says 'help metrics gives sources' 'arXiv 2404.14469'
says 'help metrics gives parameters' '^    window +64 +1 to 65536: '
says 'help metrics says what cannot be profiled' 'half of every budget'
if awk 'length > 132 { exit 1 }' out; then ok 'help metrics fits the screen'; else not_ok \
    'help metrics fits the screen'; fi

# The same texts as a manual page, and as completion for two shells.
expect 0 'help man' help man
cp out kvbudget.1
for c in $COMMANDS; do says "the manual page has $c" "^\\.SS kvbudget $c\$" kvbudget.1; done
for c in $COMMANDS; do
    "$KVB" help "$c" | sed -n 's/^ .*--\([a-z-]*\) .*/\1/p'
done | sort -u | grep -v '^help$' >options
sed -n 's/\\-/-/g; s/^\(\\fB-.\\fR, \)*\\fB--\([a-z-]*\)\\fR.*/\2/p' kvbudget.1 | sort -u >described
if [ -s options ] && [ -z "$(comm -23 options described)" ]; then ok 'the manual page has every option'; else
    not_ok 'the manual page has every option'
    comm -23 options described
fi
if command -v groff >/dev/null; then
    groff -man -ww -z -Tutf8 kvbudget.1 2>roff.err
    if [ ! -s roff.err ]; then ok 'roff has nothing to say about it'; else
        not_ok 'roff has nothing to say about it'
        head roff.err
    fi
else
    skip 'the manual page in roff: groff is not installed'
fi

expect 0 'help bash' help bash
cp out kvbudget.bash
# complete WORD...: what bash offers for the last word.
complete_with() {
    bash -c '. ./kvbudget.bash; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _kvbudget; printf "%s\n" "${COMPREPLY[@]}"' \
        bash kvbudget "$@" >offered 2>&1
}
complete_with ''
for c in $COMMANDS; do says "bash offers $c" "^$c\$" offered; done
complete_with solve --ag
says 'bash completes an option' '^--aggregate$' offered
complete_with export --format ''
says 'bash offers the words of an option' '^lukv-steps$' offered
complete_with inspect kvbudget.b
says 'bash completes names of files' '^kvbudget\.bash$' offered
expect 0 'help zsh' help zsh
cp out _kvbudget
says 'zsh describes options' "--aggregate=\[.*\]" _kvbudget
if command -v zsh >/dev/null; then
    if zsh -n _kvbudget 2>zsh.err; then ok 'zsh reads it'; else
        not_ok 'zsh reads it'
        head zsh.err
    fi
else
    skip 'completion in zsh: zsh is not installed'
fi

misused 'no command' 'a command is missing'
misused 'a slip of the finger' "did you mean 'solve'" slove
misused 'another slip' "did you mean 'budgets'" budget
misused 'nonsense' "unknown command 'xyzzy'" xyzzy
if grep -q 'did you mean' err; then not_ok 'nonsense gets no suggestion'; else ok 'nonsense gets no suggestion'; fi
misused 'help for nonsense' "unknown command 'xyzzy'" help xyzzy
misused 'help for two commands' 'expected one command' help solve plot

if [ -w /dev/full ]; then
    CODE=0
    "$KVB" help >/dev/full 2>err || CODE=$?
    if [ "$CODE" = 1 ]; then ok 'a full disk behind stdout is an error'; else not_ok \
        'a full disk behind stdout is an error'; fi
    says 'and it says so' 'No space left' err
fi

# Idle threads spin less: libgomp finds the number in its environment, unless the user said how threads shall wait. One
# start is enough.
spins() { # [VARIABLE=VALUE]...: what libgomp says in an environment of nothing else
    env -i OMP_DISPLAY_ENV=verbose "$@" "$KVB" solve 2>&1 </dev/null |
        sed -n "s/.*GOMP_SPINCOUNT = '\([0-9]*\)'.*/\1/p" | tr '\n' ' '
}
spun() { # EXPECTED [VARIABLE=VALUE]...
    local expected=$1 found
    shift
    found=$(spins "$@")
    if [ "$found" = "$expected " ]; then ok "threads spin $expected times with '$*'"; else not_ok \
        "threads spin $found times with '$*', expected $expected"; fi
}
if [ -n "$(spins)" ]; then
    spun 500 PWD=/
    spun 500 HOME=/ LC_ALL=C
    spun 500 _=x OMP_PROC_BIND=true OMP_PLACES=cores
    spun 12345 PWD=/ GOMP_SPINCOUNT=12345
    spun 0 PWD=/ OMP_WAIT_POLICY=passive
    spun 300000 # no place for another variable
else
    skip 'spinning: this OpenMP library is not libgomp'
fi

# Started in another way than by the kernel: a second start through /proc/self/exe would be of the loader.
loader=$(command -v readelf >/dev/null && readelf -l "$KVB" | sed -n 's/.*interpreter: \(.*\)\]/\1/p')
if [ -x "$loader" ]; then
    CODE=0
    "$loader" "$KVB" solve missing.h5 --metric keydiff >out 2>err </dev/null || CODE=$?
    if [ "$CODE" = 1 ]; then ok 'runs under the loader'; else not_ok 'runs under the loader'; show; fi
    says 'and says what it has to say' 'missing.h5' err
fi
end
