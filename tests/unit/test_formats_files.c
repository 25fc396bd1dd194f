// Files that appear whole or not at all, mapped files, and SHA-256 against the standard's examples.
#include "formats/need.h"
#include "formats/sha256.h"
#include "formats_help.h"
#include <dirent.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>

static int count_files(void)
{
    int n = 0;
    DIR *dir = opendir(help_folder);
    while (readdir(dir)) n++;
    closedir(dir);
    return n - 2;
}

static void assert_content(const char *path, const char *text)
{
    size_t size;
    unsigned char *data = help_slurp(path, &size);
    ck_assert_str_eq((char *)data, text);
    free(data);
}

UNIT_TEST(blocks_that_grow)
{
    int *one = NULL;
    for (int i = 0; i < 100; i++) {
        one = need_one_more(one, (size_t)i, sizeof *one, "numbers");
        one[i] = i;
    }
    for (int i = 0; i < 100; i++) ck_assert_int_eq(one[i], i);
    free_each((void *[]){one, NULL, need(0, 1, "bytes")}, 3);
}

UNIT_TEST(write_and_replace)
{
    const char *path = help_path("a");
    help_ok(atomic_write(path, "one", 3, err));
    assert_content(path, "one");
    help_ok(atomic_write(path, "", 0, err));
    assert_content(path, "");
    atomic_file f;
    help_ok(atomic_file_begin(&f, path, err));
    fputs("two", f.stream);
    assert_content(path, "");
    ck_assert_int_eq(count_files(), 2);
    help_ok(atomic_file_commit(&f, err));
    atomic_file_abandon(&f); // allowed after a commit
    assert_content(path, "two");
    help_ok(atomic_file_begin(&f, path, err));
    fputs("three", f.stream);
    atomic_file_abandon(&f);
    assert_content(path, "two");
    ck_assert_int_eq(count_files(), 1);
}

UNIT_TEST(mode_follows_umask)
{
    struct stat st;
    umask(027);
    help_ok(atomic_write(help_path("a"), "x", 1, err));
    stat(help_path("a"), &st);
    ck_assert_uint_eq(st.st_mode & 0777, 0640);
}

UNIT_TEST(links_and_devices)
{
    struct stat st;
    help_ok(atomic_write(help_path("target"), "old", 3, err));
    ck_assert_int_eq(symlink("target", help_path("link")), 0);
    help_ok(atomic_write(help_path("link"), "new", 3, err));
    assert_content(help_path("target"), "new");
    lstat(help_path("link"), &st);
    ck_assert(S_ISLNK(st.st_mode));
    ck_assert_int_eq(mkfifo(help_path("pipe"), 0600), 0);
    help_fails(atomic_write(help_path("pipe"), "x", 1, err), KVB_ARGUMENT, "pipe");
    help_fails(atomic_write("/dev/null", "x", 1, err), KVB_ARGUMENT, "/dev/null");
    help_fails(atomic_write(help_folder, "x", 1, err), KVB_ARGUMENT, "folder");
    help_fails(atomic_write(help_path("no/such"), "x", 1, err), KVB_IO, "no/such");
}

UNIT_TEST(relative_path)
{
    ck_assert_int_eq(chdir(help_folder), 0);
    help_ok(atomic_write("here", "x", 1, err));
    assert_content(help_path("here"), "x");
    help_spew("here.0123abcd.partial", "junk", 4);
    help_spew("here.0123abcg.partial", "user", 4); // not hexadecimal, so not our file
    atomic_file_remove_stale("here");
    ck_assert(!help_exists("here.0123abcd.partial") && help_exists("here.0123abcg.partial") && help_exists("here"));
    ck_assert_int_eq(chdir("/"), 0);
}

UNIT_TEST(full_disk_keeps_the_old_file)
{
    const char *path = help_path("a");
    static char big[100000];
    help_ok(atomic_write(path, "old", 3, err));
    signal(SIGXFSZ, SIG_IGN);
    struct rlimit limit = {50000, 50000};
    setrlimit(RLIMIT_FSIZE, &limit);
    help_fails(atomic_write(path, big, sizeof big, err), KVB_IO, "File too large");
    assert_content(path, "old");
    ck_assert_int_eq(count_files(), 1);
    atomic_file f;
    help_ok(atomic_file_begin(&f, path, err));
    ck_assert_int_eq(truncate(f.temp_path, 49990), 0);
    ck_assert_int_eq(fseek(f.stream, 49990, SEEK_SET), 0);
    fputs("this is more than ten bytes", f.stream); // the error comes when the buffer is flushed
    help_fails(atomic_file_commit(&f, err), KVB_IO, "nothing was changed");
    assert_content(path, "old");
    ck_assert_int_eq(count_files(), 1);
}

UNIT_TEST(killed_while_writing)
{
    srand(help_seed());
    char *path = strdup(help_path("a"));
    static char text[2][200001];
    memset(text[0], 'a', 200000);
    memset(text[1], 'b', 200000);
    help_ok(atomic_write(path, text[0], 200000, err));
    for (int i = 0; i < 30; i++) {
        pid_t child = fork();
        if (child == 0)
            for (int k = 0;; k++) atomic_write(path, text[k % 2], 200000, NULL);
        struct timespec pause = {0, 1000L * (rand() % 8000)};
        nanosleep(&pause, NULL);
        kill(child, SIGKILL);
        waitpid(child, NULL, 0);
        size_t size;
        unsigned char *data = help_slurp(path, &size);
        ck_assert(size == 200000 && (memcmp(data, text[0], size) == 0 || memcmp(data, text[1], size) == 0));
        free(data);
    }
    atomic_file_remove_stale(path);
    ck_assert_int_eq(count_files(), 1);
    free(path);
}

UNIT_TEST(mapping)
{
    file_view v;
    help_spew(help_path("a"), "hello", 5);
    help_ok(file_map(&v, help_path("a"), err));
    ck_assert(v.size == 5 && memcmp(v.data, "hello", 5) == 0);
    file_unmap(&v);
    file_unmap(&v);
    ck_assert_ptr_null(v.data);
    help_spew(help_path("empty"), "", 0);
    help_fails(file_map(&v, help_path("empty"), err), KVB_FORMAT, "empty");
    help_fails(file_map(&v, help_folder, err), KVB_ARGUMENT, "folder");
    help_fails(file_map(&v, "/dev/zero", err), KVB_ARGUMENT, "device");
    help_fails(file_map(&v, help_path("none"), err), KVB_IO, "No such file");
    mkfifo(help_path("pipe"), 0600);
    help_fails(file_map(&v, help_path("pipe"), err), KVB_ARGUMENT, "pipe"); // and does not wait for a writer
    ck_assert_ptr_null(v.data);
}

UNIT_TEST(hashes)
{
    char hex[65]; // FIPS 180-2, appendix B
    sha256_hex("abc", 3, hex);
    ck_assert_str_eq(hex, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    sha256_hex(NULL, 0, hex);
    ck_assert_str_eq(hex, "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
    sha256_state *s = sha256_begin();
    for (int i = 0; i < 1000000; i += 1000) {
        char block[1000];
        memset(block, 'a', sizeof block);
        sha256_add(s, block, sizeof block);
    }
    sha256_end(s, hex);
    sha256_free(NULL);
    ck_assert_str_eq(hex, "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
    help_spew(help_path("a"), "abc", 3);
    help_ok(sha256_file_hex(help_path("a"), hex, err));
    ck_assert_str_eq(hex, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
}

// A file that is cut short while it is mapped reads as zeros past its end, on any thread, and file_check reports it.
UNIT_TEST(test_mapped_files_that_change)
{
    enum { PAGES = 40, PAGE = 4096 };
    char *bytes = malloc(PAGES * PAGE), path[512];
    snprintf(path, sizeof path, "%s", help_path("mapped"));
    for (int how = 0; how < 4; how++) {
        file_view v;
        memset(bytes, 'x', PAGES * PAGE);
        help_spew(path, bytes, PAGES * PAGE);
        help_ok(file_map(&v, path, err));
        help_ok(file_check(&v, path, err));
        if (how == 1) ck_assert_int_eq(truncate(path, 3 * PAGE + 10), 0);
        if (how == 2) ck_assert_int_eq(truncate(path, 0), 0);
        if (how == 3) ck_assert_int_eq(utimensat(AT_FDCWD, path, NULL, 0), 0);
        size_t left = how == 1 ? 3 * PAGE + 10 : how == 2 ? 0 : PAGES * PAGE, n = 0;
#pragma omp parallel for reduction(+ : n)
        for (size_t i = 0; i < v.size; i++) n += v.data[i] == 'x';
        ck_assert_uint_eq(n, left);
        if (how == 0) help_ok(file_check(&v, path, err));
        else help_fails(file_check(&v, path, err), KVB_IO, "another program");
        file_unmap(&v);
        help_ok(file_check(&v, path, err)); // nothing is mapped
    }
    free(bytes);
}

// A process that a signal or a lack of memory ends leaves no temporary files or folders, but keeps finished ones.
UNIT_TEST(removed_at_an_end)
{
    for (int ending = 0; ending < 2; ending++) {
        pid_t child = fork();
        if (child == 0) {
            atomic_file done, file;
            atomic_folder folder;
            bool good = atomic_file_begin(&done, help_path("done"), NULL) == KVB_OK &&
                        atomic_file_begin(&file, help_path("file"), NULL) == KVB_OK &&
                        atomic_folder_begin(&folder, help_path("folder"), NULL) == KVB_OK;
            char *inner = need_text("%s/inner", folder.temp_path);
            good = good && atomic_file_begin_own(&file, inner, NULL) == KVB_OK &&
                   atomic_file_commit(&done, NULL) == KVB_OK && atomic_write(inner, "x", 1, NULL) == KVB_OK;
            if (!good) _exit(2);
            if (ending) need(SIZE_MAX / 2, 1, "bytes that no machine has");
            atomic_files_remove();
            _exit(1);
        }
        int status;
        ck_assert_int_eq(waitpid(child, &status, 0), child);
        ck_assert_int_eq(status, 1 << 8);
        ck_assert_uint_eq(count_files(), 1);
    }
}

UNIT_MAIN_EACH("formats_files", help_setup, help_teardown)
