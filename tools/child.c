#include "tools/child.h"
#include "formats/need.h"
#include "runtime/fail.h"
#include "tools/cli.h"
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

// Runs in the child. It gets a process group of its own, so that a Ctrl-C reaches it once, from its parent, and not
// from the terminal too.
static void become(char *const *words, int output, pid_t parent)
{
    sigset_t none;
    setpgid(0, 0);
    prctl(PR_SET_PDEATHSIG, SIGTERM); // if the parent is killed, so is this process
    if (getppid() != parent) _exit(EXIT_FAILED);
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    if (output >= 0) dup2(output, STDOUT_FILENO);
    execv("/proc/self/exe", words);
    _exit(EXIT_FAILED);
}

static int wait_for(pid_t child)
{
    const struct timespec pause = {0, 20000000};
    bool told = false;
    int status;
    while (waitpid(child, &status, WNOHANG) == 0) {
        if (cli_stop_requested && !told) told = kill(child, SIGTERM) == 0;
        nanosleep(&pause, NULL);
    }
    return status;
}

kvb_status child_run(char *const *argv, const char *output, kvb_error *err)
{
    size_t n = 0;
    while (argv[n]) n++;
    char **words = need(n + 2, sizeof *words, "words"), name[] = "kvbudget";
    words[0] = name;
    memcpy(words + 1, argv, n * sizeof *words);
    int to = output ? open(output, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666) : -1;
    pid_t self = getpid(), child = output && to < 0 ? -1 : fork();
    if (child == 0) become(words, to, self);
    kvb_status status = KVB_OK;
    if (child < 0) status = kvb_fail(err, KVB_IO, "%s: kvbudget %s: %s", output, argv[0], strerror(errno));
    int ended = child > 0 ? wait_for(child) : 0;
    if (to >= 0) (void)close(to); // only the child wrote to it
    free(words);
    if (ended == 0) return status;
    if (cli_stop_requested) return kvb_fail(err, KVB_INTERRUPTED, "stopped; the same command continues");
    return kvb_fail(err, KVB_IO, "kvbudget %s %s %d; what it printed is in %s", argv[0],
                    WIFEXITED(ended) ? "ended with status" : "was ended by signal",
                    WIFEXITED(ended) ? WEXITSTATUS(ended) : WTERMSIG(ended), output ? output : "standard output");
}
