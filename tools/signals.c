// Signals that end the program: Ctrl-C, SIGTERM, SIGHUP. Temporary files are removed first, and long work may finish
// its current step.
#include "formats/atomic_file.h"
#include "tools/cli.h"
#include <pthread.h>
#include <signal.h>
#include <unistd.h>

atomic_int cli_stop_requested = 0;
static atomic_bool work_polls; // long work looks at cli_stop_requested

// A thread of its own waits for the signals, and all others block them. A handler would run on the stack of the thread
// that it interrupts, and dnnl_sgemm (oneDNN 2.6) has none at times: in products over many terms its stack pointer is
// at the front of a workspace on the heap, 4 % of the time in a profile of the tiny model. The signal's frame then
// overwrote what lies before the workspace: numbers that were written to disk afterwards, or the heap's own records
// ("corrupted size vs. prev_size").
static sigset_t stop_signals;

static void end_now(int number)
{
    atomic_files_remove();
    pthread_sigmask(SIG_UNBLOCK, &stop_signals, NULL);
    raise(number);
}

static int next_signal(void)
{
    int number;
    while (sigwait(&stop_signals, &number) != 0) {
    }
    return number;
}

static void *wait_for_stop(void *unused)
{
    static const char text[] = "\nkvbudget: stopping; what is finished stays on disk (once more kills)\n";
    int number = next_signal();
    if (work_polls) {
        cli_stop_requested = number;
        ssize_t written = write(STDERR_FILENO, text, sizeof text - 1);
        (void)written; // nothing sensible can be done about it here
        number = next_signal();
    }
    end_now(number);
    return unused;
}

void cli_watch_signals(void)
{
    enum { STACK = 256 << 10 }; // enough with a sanitiser too, and little under `ulimit -v`
    static const int numbers[] = {SIGINT, SIGTERM, SIGHUP};
    static bool watched;
    struct sigaction before;
    pthread_attr_t attributes;
    pthread_t waiting;
    if (watched) return;
    watched = true;
    signal(SIGXFSZ, SIG_IGN); // writing then fails, and the message names the file
    sigemptyset(&stop_signals);
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) {
        // Signals that are ignored stay so: Ctrl-C in a shell's background jobs, SIGHUP under nohup.
        if (sigaction(numbers[i], NULL, &before) != 0 || before.sa_handler == SIG_IGN) continue;
        sigaddset(&stop_signals, numbers[i]);
        signal(numbers[i], SIG_DFL); // replaces a library's handler, since the second signal must end the program
    }
    pthread_sigmask(SIG_BLOCK, &stop_signals, NULL);
    bool begun = pthread_attr_init(&attributes) == 0;
    if (begun) {
        pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
        pthread_attr_setstacksize(&attributes, STACK);
        begun = pthread_create(&waiting, &attributes, wait_for_stop, NULL) == 0;
        pthread_attr_destroy(&attributes);
    }
    // Without memory for a thread, signals end the program at once, which loses only what is in flight.
    if (!begun) pthread_sigmask(SIG_UNBLOCK, &stop_signals, NULL);
}

void cli_catch_signals(void)
{
    cli_watch_signals();
    work_polls = true;
}

void cli_end_by_signal(void)
{
    if (!cli_stop_requested) return;
    pthread_sigmask(SIG_UNBLOCK, &stop_signals, NULL);
    raise(cli_stop_requested);
}
