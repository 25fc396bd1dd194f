# Functions of more than MAX lines in sources that clang-format has laid out: a function's first brace stands alone in
# the first column, and so does its last. Prints "FILE:NAME N lines".
FNR == 1 { start = 0; head = "" }
/^{$/ && head != "" { start = FNR; next }
/^}/ && start {
    if (FNR - start - 1 > MAX) print FILENAME ":" head, FNR - start - 1 " lines"
    start = 0
    head = ""
    next
}
!start && /^[A-Za-z_].*\(/ {
    head = $0
    if (!sub(/^(UNIT_TEST|UNIT_ROUNDS)\(/, "", head)) sub(/[ ]*\(.*/, "", head)
    sub(/[,)].*/, "", head)
    sub(/.*[ *]/, "", head)
}
