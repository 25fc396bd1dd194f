// How long idle OpenMP threads spin. It must be said before main, and the program used to start itself again for that,
// which broke `valgrind kvbudget` and `ld.so kvbudget`; now it happens between the loader and the libraries.
//
// libgomp's threads spin for milliseconds while they wait for work. On a shared machine that keeps the very thread from
// running that they wait for: with two busy cores a small profile took 12 s instead of 1. Sleeping at once costs too:
// decoding waits thousands of times a second for microseconds, and was a tenth slower on an idle machine. So they spin
// for some 10 microseconds, as long as it takes to wake a thread. Measured on two cores with other work, two rounds: 48
// tokens of SmolLM2 take 20 s of processor time when they spin 20,000 times, 6.2 at 1,000 and 5.6 at 200 or 0; a small
// profile beside four busy processes 2.2 to 14 s at 20,000, 0.7 at 500, 0.5 at 0.
//
// libgomp reads its environment in a constructor, which runs before any of this program's. Only functions in
// .preinit_array run earlier, so early that setenv() is of no use: libc sets `environ` to what the kernel gave
// afterwards. That list has no room for one more, so a variable that no library's constructor asks for lends its place
// until they have all run. Where there is none, or no .preinit_array, the program works all the same, only slower
// beside busy neighbours.
#include <stdbool.h>
#include <stddef.h>

static char spin[] = "GOMP_SPINCOUNT=500";

static struct {
    char **place, *variable; // where `spin` stands, and what belongs there; NULL: nothing was lent
} lent;

// Neither libc nor the sanitisers are there yet: no strncmp, no checks.
#define BEFORE_ALL __attribute__((no_sanitize("address", "undefined", "thread")))

static BEFORE_ALL bool has_name(const char *variable, const char *name)
{
    while (*name && *variable == *name) ++variable, ++name;
    return *name == '\0' && *variable == '=';
}

static BEFORE_ALL char **find_variable(char **environment, const char *name)
{
    for (char **at = environment; *at; at++)
        if (has_name(*at, name)) return at;
    return NULL;
}

static BEFORE_ALL void lend_place(int argc, char **argv, char **environment)
{
    static const char *const said[] = {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"}; // the user knows better
    static const char *const idle[] = {"_",    "OLDPWD",  "SHLVL", "LS_COLORS",     "PWD",
                                       "MAIL", "LOGNAME", "USER",  "INVOCATION_ID", "HOME"};
    (void)argc, (void)argv;
    for (size_t i = 0; i < sizeof said / sizeof *said; i++)
        if (find_variable(environment, said[i])) return;
    for (size_t i = 0; i < sizeof idle / sizeof *idle && !lent.place; i++)
        lent.place = find_variable(environment, idle[i]);
    if (!lent.place) return;
    lent.variable = *lent.place;
    *lent.place = spin;
}

// The program's own constructors run after those of all libraries.
static __attribute__((constructor)) void give_back(void)
{
    if (lent.place) *lent.place = lent.variable;
    lent.place = NULL;
}

static
    __attribute__((section(".preinit_array"), used)) void (*const before_libraries)(int, char **, char **) = lend_place;
