// What could lose or mix up a record: closes that fail, locks that race, links, files cut short while they are read.
#include "formats/file_io.h"
#include "formats/json_file.h"
#include "formats/sha256.h"
#include "formats_record_help.h"
#include <dlfcn.h>
#include <errno.h>
#include <hdf5.h>
#include <sys/file.h>
#include <sys/wait.h>

// ---- Replacements of library functions, which do once what a test wants ----

static void (*before_flock)(void);
static int failing_close; // this many calls of H5Dclose from now, one fails; 0: none

__attribute__((visibility("default"))) int flock(int file, int how)
{
    static int (*real)(int, int);
    if (!real) *(void **)&real = dlsym(RTLD_NEXT, "flock");
    void (*before)(void) = before_flock;
    before_flock = NULL;
    if (before) before();
    return real(file, how);
}

__attribute__((visibility("default"))) herr_t H5Dclose(hid_t set)
{
    static herr_t (*real)(hid_t);
    if (!real) *(void **)&real = dlsym(RTLD_NEXT, "H5Dclose");
    herr_t result = real(set);
    return failing_close > 0 && --failing_close == 0 ? -1 : result;
}

static int interruptions; // so many writes go wrong: the last three write half, the ones before are interrupted

__attribute__((visibility("default"))) ssize_t write(int file, const void *data, size_t n)
{
    static ssize_t (*real)(int, const void *, size_t);
    if (!real) *(void **)&real = dlsym(RTLD_NEXT, "write");
    if (interruptions == 0) return real(file, data, n);
    errno = EINTR;
    return interruptions-- > 3 ? -1 : real(file, data, n > 1 ? n / 2 : n);
}

// ---- Calls that go on ----

UNIT_TEST(calls_go_on)
{
    char back[20] = "";
    const char *path = help_path("a");
    file_identity before, after;
    int file = file_open(path, O_RDWR | O_CREAT, 0600);
    ck_assert_int_ge(file, 0);
    interruptions = 6;
    ck_assert(file_write_all(file, "hello, world", 12) && interruptions == 0);
    ck_assert_int_eq(pread(file, back, sizeof back, 0), 12);
    ck_assert_str_eq(back, "hello, world");
    ck_assert(file_sync(file) && file_identify(&before, file) && before.size == 12 && file_same(&before, &before));
    ck_assert(file_truncate(file, 5) && file_identify(&after, file) && after.size == 5 && !file_same(&before, &after));
    int other = file_open(path, O_RDONLY, 0);
    ck_assert(file_lock(file, true) && !file_lock(other, false));
    ck_assert(file_close(file) && file_lock(other, false) && file_close(other));
    ck_assert(!file_close(other)); // already closed
    ck_assert(file_sync_folder(path) && !file_sync_folder(help_path("no/such")));
    char *folder = file_folder(path);
    unit_strings(folder, help_folder, file_base(path), "a");
    free(folder);
    int dir = file_open(help_folder, O_RDONLY | O_DIRECTORY, 0);
    ck_assert_int_ge(file = file_open_at(dir, "a", O_RDONLY, 0), 0);
    ck_assert(file_close(file) && file_close(dir));
}

// A stream copes with interrupted and short writes.
UNIT_TEST(streams_go_on)
{
    static char text[200001], hash[65], again[65];
    memset(text, 'x', sizeof text - 1);
    interruptions = 7;
    help_ok(atomic_write(help_path("a"), text, sizeof text - 1, err));
    ck_assert_int_eq(interruptions, 0);
    sha256_hex(text, sizeof text - 1, hash);
    int file = file_open(help_path("a"), O_RDONLY, 0);
    help_ok(sha256_descriptor_hex(file, "a", again, err));
    ck_assert_str_eq(hash, again);
    ck_assert(file_close(file));
}

// What is printed is read back with the same bits.
UNIT_TEST(numbers_keep_all_digits)
{
    srand(help_seed());
    for (int i = 0; i < 2000; i++) {
        double x = ldexp((double)rand() / 7 + (double)rand() * 1e-10, rand() % 200 - 100);
        cJSON *o = cJSON_CreateObject();
        ck_assert(json_add_exact(o, "x", x) && cJSON_AddItemToObject(o, "nan", json_exact((double)NAN)));
        char *text = cJSON_PrintUnformatted(o);
        cJSON_Delete(o);
        o = cJSON_Parse(text);
        ck_assert_msg(cJSON_GetObjectItem(o, "x")->valuedouble == x, "%s is not %.17g", text, x);
        ck_assert(cJSON_IsNull(cJSON_GetObjectItem(o, "nan")));
        cJSON_Delete(o);
        cJSON_free(text);
    }
}

// ---- Closes ----

UNIT_TEST(every_close_counts)
{
    const char *path = help_path("run.h5");
    size_t size, again;
    help_ok(small_write(path, false, err));
    unsigned char *data = help_slurp(path, &size);
    int failures = 0;
    // One close in nine fails, another ninth in each run; failing to close a dataset that is only read changes nothing.
    for (int n = 1 + (int)(help_seed() % 9); failures < 1000; n += 9) {
        kvb_error e = {0};
        record_writer *w;
        cJSON *a = small_attributes();
        failing_close = n;
        kvb_status status = record_begin(&w, path, &small_shape, a, RECORD_REPLACE, &e);
        if (status == KVB_OK) status = small_put_missing(w, &e);
        if (status == KVB_OK) status = record_finish(w, small_ids, SMALL_CONTEXTS, &e);
        record_writer_free(w);
        cJSON_Delete(a);
        bool reached = failing_close == 0;
        failing_close = 0;
        if (!reached) break;
        failures += status != KVB_OK;
        unsigned char *now = help_slurp(path, &again);
        ck_assert_msg(again == size && memcmp(now, data, size) == 0, "close %d: another record", n);
        free(now);
        if (status == KVB_OK) continue; // a dataset that was only read
        ck_assert_int_eq(status, KVB_IO);
        ck_assert_msg(strstr(e.message, "run.h5") != NULL, "%s", e.message);
    }
    printf("%d failing closes of written datasets\n", failures);
    ck_assert_int_ge(failures, 1); // parts and record have 66: 3 contexts, 9 questions
    free(data);
}

// ---- Locks ----

static char *lock_path, *parts_folder;

static void finish_elsewhere(void) // the process that held the lock ends its run
{
    ck_assert_int_eq(unlink(lock_path), 0);
    ck_assert_int_eq(rmdir(parts_folder), 0);
}

static void another_begins(void) // and a third one begins a run
{
    finish_elsewhere();
    ck_assert_int_eq(mkdir(parts_folder, 0777), 0);
    help_spew(lock_path, "", 0);
}

UNIT_ROUNDS(lock_is_that_under_the_name, 2)
{
    const char *path = help_path("run.h5");
    parts_folder = strdup(help_path("run.h5.parts"));
    lock_path = strdup(help_path("run.h5.parts/lock"));
    before_flock = _i ? another_begins : finish_elsewhere;
    record_writer *w, *second;
    help_ok(small_begin(&w, path, false, err));
    ck_assert(help_exists(lock_path));
    help_fails(small_begin(&second, path, true, err), KVB_IO, "another process");
    help_ok(small_put_missing(w, err));
    help_ok(record_finish(w, small_ids, SMALL_CONTEXTS, err));
    record_writer_free(w);
    free(lock_path);
    free(parts_folder);
}

// ---- Links ----

UNIT_TEST(parts_through_a_link_are_refused)
{
    record_writer *w;
    ck_assert_int_eq(mkdir(help_path("mine"), 0777), 0);
    help_spew(help_path("mine/thesis.partial"), "x", 1);
    help_spew(help_path("mine/context-a.h5"), "x", 1);
    ck_assert_int_eq(symlink("mine", help_path("run.h5.parts")), 0);
    help_fails(small_begin(&w, help_path("run.h5"), true, err), KVB_IO, "symbolic link");
    ck_assert(help_exists(help_path("mine/thesis.partial")) && help_exists(help_path("mine/context-a.h5")));
    ck_assert(!help_exists(help_path("mine/lock")));
}

UNIT_TEST(lock_through_a_link_is_refused)
{
    record_writer *w;
    ck_assert_int_eq(mkdir(help_path("run.h5.parts"), 0777), 0);
    ck_assert_int_eq(symlink("../victim", help_path("run.h5.parts/lock")), 0);
    help_fails(small_begin(&w, help_path("run.h5"), true, err), KVB_IO, "symbolic link");
    ck_assert(!help_exists(help_path("victim")));
}

UNIT_TEST(only_own_names_are_removed)
{
    record_writer *w;
    static const char *const own[] = {"context-a.h5.0123abcd.partial", "head.h5.00000000.partial", "context-a.h5"};
    static const char *const others[] = {"thesis.partial", "context-a.h5.partial", "x.0123abcd.partial", "notes"};
    ck_assert_int_eq(mkdir(help_path("run.h5.parts"), 0777), 0);
    for (size_t i = 0; i < 3; i++) help_spew(help_path("run.h5.parts/%s", own[i]), "x", 1);
    for (size_t i = 0; i < 4; i++) help_spew(help_path("run.h5.parts/%s", others[i]), "x", 1);
    help_ok(small_begin(&w, help_path("run.h5"), false, err));
    record_writer_free(w);
    for (size_t i = 0; i < 3; i++) ck_assert_msg(!help_exists(help_path("run.h5.parts/%s", own[i])), "%s", own[i]);
    for (size_t i = 0; i < 4; i++) ck_assert_msg(help_exists(help_path("run.h5.parts/%s", others[i])), "%s", others[i]);
}

// ---- What is replaced ----

UNIT_TEST(outputs_that_are_refused)
{
    char name[400];
    record_writer *w;
    help_ok(atomic_write(help_path("old"), "old", 3, err));
    ck_assert_int_eq(chmod(help_path("old"), 0444), 0);
    help_fails(atomic_write(help_path("old"), "new", 3, err), KVB_IO, "read-only");
    help_fails(atomic_file_check(help_path("old"), err), KVB_IO, "read-only");
    ck_assert_int_eq(symlink("nowhere", help_path("dangling")), 0);
    help_fails(atomic_write(help_path("dangling"), "new", 3, err), KVB_IO, "leads nowhere");
    ck_assert_int_eq(symlink("loop", help_path("loop")), 0);
    help_fails(atomic_file_check(help_path("loop"), err), KVB_IO, "leads nowhere");
    int folder = snprintf(name, sizeof name, "%s/", help_folder);
    memset(name + folder, 'n', 239);
    name[folder + 239] = 0;
    help_fails(atomic_file_check(name, err), KVB_ARGUMENT, "1 to 238 bytes, this one 239");
    name[folder + 238] = 0;
    help_ok(atomic_write(name, "new", 3, err));
    help_fails(atomic_file_check("/dev/full", err), KVB_ARGUMENT, "device");
    help_fails(atomic_file_check(help_folder, err), KVB_ARGUMENT, "folder");
    help_fails(atomic_file_check(help_path("no/such"), err), KVB_IO, "No such file");
    help_fails(small_begin(&w, help_path("dangling"), true, err), KVB_IO, "leads nowhere");
    ck_assert(!help_exists(help_path("dangling.parts")));
}

UNIT_TEST(mode_is_kept)
{
    struct stat st;
    umask(022);
    help_ok(atomic_write(help_path("secret"), "old", 3, err));
    ck_assert_int_eq(chmod(help_path("secret"), 0600), 0);
    help_ok(atomic_write(help_path("secret"), "new", 3, err));
    stat(help_path("secret"), &st);
    ck_assert_uint_eq(st.st_mode & 07777, 0600);
}

UNIT_TEST(killed_writers_leave_nothing_for_long)
{
    const char *path = help_path("a");
    atomic_file living;
    help_ok(atomic_file_begin(&living, path, err));
    pid_t child = fork();
    if (child == 0) {
        atomic_file f;
        if (atomic_file_begin(&f, path, NULL) == KVB_OK) raise(SIGKILL);
        _exit(1);
    }
    int how;
    waitpid(child, &how, 0);
    ck_assert(WIFSIGNALED(how));
    help_ok(atomic_write(path, "new", 3, err)); // removes what a dead process left, but not what a living one writes
    char command[300];
    snprintf(command, sizeof command, "test $(ls %s | wc -l) = 2", help_folder);
    ck_assert_int_eq(system(command), 0);
    fputs("newest", living.stream);
    help_ok(atomic_file_commit(&living, err));
}

// ---- Reading what changes ----

UNIT_TEST(cut_short_while_it_is_read)
{
    const char *path = help_path("run.h5");
    record *r;
    char hash[65];
    struct stat st;
    help_ok(small_write(path, false, err));
    help_ok(record_open(&r, path, err));
    help_ok(record_file_sha256(r, hash, err));
    stat(path, &st);
    ck_assert_int_eq(truncate(path, st.st_size / 2), 0);
    ck_assert_int_eq(truncate(path, st.st_size), 0); // the same size again, half of it zeros
    kvb_error e = {0};
    ck_assert_int_ne(small_read_all(r, &e), KVB_OK);
    ck_assert_msg(strstr(e.message, path) != NULL, "%s", e.message);
    help_fails(record_file_sha256(r, hash, err), KVB_IO, "was changed while it was read");
    record_close(r);
}

UNIT_TEST(replaced_while_it_is_read)
{
    const char *path = help_path("run.h5");
    record *r;
    char before[65], after[65];
    help_ok(small_write(path, false, err));
    help_ok(sha256_file_hex(path, before, err));
    help_ok(record_open(&r, path, err));
    help_ok(atomic_write(path, "something else", 14, err));
    help_ok(small_read_all(r, err));
    help_ok(record_file_sha256(r, after, err));
    ck_assert_str_eq(before, after); // the hash of what was read
    record_close(r);
}

// A chunk of zeros with its right Fletcher-32: that of zeros is zero.
UNIT_TEST(chunk_of_zeros)
{
    const char *path = help_path("run.h5");
    help_ok(small_write(path, false, err));
    hid_t file = H5Fopen(path, H5F_ACC_RDONLY, H5P_DEFAULT);
    hid_t set = H5Dopen2(file, "/contexts/zeta/questions/0/oracle", H5P_DEFAULT);
    const hsize_t start[3] = {1, 0, 0};
    unsigned mask;
    haddr_t address;
    hsize_t size;
    ck_assert_int_ge(H5Dget_chunk_info_by_coord(set, start, &mask, &address, &size), 0);
    H5Dclose(set);
    H5Fclose(file);
    static const char zeros[4096];
    int fd = open(path, O_WRONLY);
    ck_assert_int_eq(pwrite(fd, zeros, size, (off_t)address), (ssize_t)size);
    close(fd);
    record *r;
    float oracle[SMALL_MAX];
    help_ok(record_open(&r, path, err));
    help_fails(record_read_oracle(r, 0, 0, oracle, err), KVB_FORMAT, "/contexts/zeta/questions/0/oracle: damaged");
    record_close(r);
}

UNIT_MAIN_EACH("formats_safety", help_setup, help_teardown)
