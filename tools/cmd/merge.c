// kvbudget merge: shards of one profiling run, or records of one model, in; one record out.
#include "formats/record.h"
#include "runtime/fail.h"
#include "tools/cli.h"
#include "tools/report/words.h"
#include <stdio.h>
#include <sys/resource.h>

// Raises the limit of open files: every shard is one, and a job array may have thousands.
static void allow_many_files(void)
{
    struct rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur == limit.rlim_max) return;
    limit.rlim_cur = limit.rlim_max;
    setrlimit(RLIMIT_NOFILE, &limit); // if this is refused, opening the files fails with a message
}

static int merge_main(const cli_command *self, int argc, char **argv)
{
    bool force = false, quiet = false;
    const cli_option options[] = {{"force", 0, CLI_FLAG, &force, NULL, "replace OUT.h5 when it exists"},
                                  {"quiet", 0, CLI_FLAG, &quiet, NULL, "no summary"},
                                  {0}};
    int first, code = cli_parse_output(self, options, FILE_RECORD, argc, argv, &first);
    if (code != EXIT_DONE) return code < 0 ? EXIT_DONE : code;
    if (argc - first < 2)
        return cli_usage_error(self, "expected the record to write and at least one shard or record: kvbudget %s",
                               self->synopsis);
    allow_many_files();
    kvb_error err = {0};
    double start = seconds_now();
    size_t n = (size_t)(argc - first - 1);
    if (record_merge(argv[first], (const char *const *)argv + first + 1, n, force, &err) != KVB_OK)
        return cli_failed(self, &err);
    record *merged;
    kvb_error why;
    if (record_open(&merged, argv[first], &why) != KVB_OK) {
        kvb_fail(&err, why.status,
                 "%s is written, but reading it back failed, so do not rely on it: %s; the files that were merged are "
                 "unchanged: check the disk, and merge them again with --force",
                 argv[first], why.message);
        return cli_failed(self, &err);
    }
    size_t questions = 0, contexts = record_context_count(merged);
    for (size_t i = 0; i < contexts; i++) questions += record_context(merged, i)->n_questions;
    record_close(merged);
    if (!quiet)
        fprintf(stderr, "%s: %zu %s, %zu %s from %zu files (%.1f s)\n", argv[first], contexts,
                plural(contexts, "context", "contexts"), questions, plural(questions, "question", "questions"), n,
                seconds_now() - start);
    return EXIT_DONE;
}

const cli_command cmd_merge = {
    "merge", "merge OUT.h5 RECORD.h5... [--force]", "join the shards of a profile, or records of one model",
    "Shards: each element of a job array profiles one share of the work (`kvbudget profile --shard I/N -o\n"
    "run.I.h5`); merge makes the record of the whole run, with the same bytes as one process would have written.\n"
    "It names what is missing; profile that shard again (--resume if it was stopped) and repeat the merge.\n"
    "\n"
    "Records of one model: of different texts, of the same texts with different metrics, or both. The result has\n"
    "the bytes of one profile over all texts with all metrics, in the order given. To add to a record in place,\n"
    "see `kvbudget help profile`, --add.\n"
    "\n"
    "It refuses different models, seeds or options; texts of the same name from different files;\n"
    "different numbers for the same thing; a metric that only some texts have. The message says which.\n"
    "\n"
    "Examples:\n"
    "  kvbudget merge run.h5 run.*.h5\n"
    "  kvbudget merge all.h5 monday.h5 tuesday.h5\n"
    "  # Slurm: sbatch --array=1-8 with this line in the script, then merge\n"
    "  kvbudget profile model.gguf calib.jsonl -o run.$SLURM_ARRAY_TASK_ID.h5 --resume \\\n"
    "      --shard $SLURM_ARRAY_TASK_ID/$SLURM_ARRAY_TASK_COUNT\n",
    merge_main};
