/* base/open_library: which file is opened, and the words where something is missing. */
#define _GNU_SOURCE /* mkstemp */
#include "base/open_library.h"
#include "tests/fixtures/test.h"

#include <sys/stat.h>
#include <unistd.h>

#define VARIABLE "QCONV_TEST_LIBRARY"

/* A driver as older ones are: it has nvmlShutdown, but no nvmlSystemGetDriverVersion. */
typedef struct {
    int (*shutdown)(void);
    int (*version)(char *, unsigned);
} functions;

static const char *const names[] = {"nvmlShutdown", "nvmlSystemGetDriverVersion"};
static const char *const files[] = {"libqconv_nowhere.so.2", "libqconv_nowhere.so.1", NULL};
static const qc_library_place places[] = {{"QCONV_TEST_PLACE", "/*"}, {NULL, NULL}};

static qc_library wanted(const char *named, size_t file_count, size_t needed)
{
    assert_int_equal(named ? setenv(VARIABLE, named, 1) : unsetenv(VARIABLE), 0);
    return (qc_library){
        .variable = VARIABLE,
        .files = files + 2 - file_count,
        .places = places,
        .function_names = names,
        .function_count = 2,
        .needed_count = needed,
        .missing = QC_ERR_UNSUPPORTED,
        .title = "it cannot be loaded",
        .no_file = {"there is no ", ", sorry"},
        .none = "there is none",
        .no_function = {"in ", " there is no ", "; get another"},
    };
}

static void opens(const qc_library *l)
{
    functions f = {0};
    void *library = NULL;
    qc_error err;
    assert_int_equal(qc_library_open(&library, &f, l, &err), QC_OK);
    assert_non_null(library);
    assert_int_equal(f.shutdown(), 0);
    assert_true(f.version == NULL);
    qc_library_close(library);
}

static void fails(const qc_library *l, const char *message)
{
    functions f = {0};
    void *library = &f;
    qc_error err;
    assert_int_equal(qc_library_open(&library, &f, l, &err), QC_ERR_UNSUPPORTED);
    assert_null(library);
    if (strncmp(err.msg, message, strlen(message)) != 0)
        assert_string_equal(err.msg, message);
}

TEST(a_later_function_may_be_missing)
{
    const qc_library l = wanted(QC_FAKE_NVML_OLD, 2, 1);
    opens(&l);
}

TEST(a_needed_function_may_not)
{
    const qc_library l = wanted(QC_FAKE_NVML_OLD, 2, 2);
    fails(&l, "in " QC_FAKE_NVML_OLD " there is no nvmlSystemGetDriverVersion; get another");
}

TEST(missing_files_are_named)
{
    const qc_library named = wanted("/nowhere/lib.so", 2, 1);
    fails(&named, "it cannot be loaded: there is no /nowhere/lib.so, sorry");
    for (size_t count = 1; count <= 2; count++) {
        const qc_library l = wanted(count == 1 ? NULL : "", count, 1);
        fails(&l, "it cannot be loaded: there is none");
    }
}

TEST(damaged_files_say_why)
{
    char path[] = "/tmp/qconv-library-XXXXXX", message[128];
    const int fd = mkstemp(path);
    assert_true(fd >= 0 && write(fd, "not a library", 13) == 13 && close(fd) == 0);
    const qc_library l = wanted(path, 2, 1);
    (void)snprintf(message, sizeof message, "it cannot be loaded: %s: %s: ", path, path);
    fails(&l, message);
    test_remove(path);
}

TEST(places_are_searched)
{
    char root[256], path[512];
    test_folder(root, sizeof root);
    const qc_library l = wanted(NULL, 2, 1);
    assert_int_equal(setenv("QCONV_TEST_PLACE", root, 1), 0);
    fails(&l, "it cannot be loaded: there is none");
    (void)snprintf(path, sizeof path, "%s/folder", root);
    assert_int_equal(mkdir(path, 0700), 0);
    (void)strncat(path, "/libqconv_nowhere.so.1", sizeof path - strlen(path) - 1);
    assert_int_equal(symlink(QC_FAKE_NVML_OLD, path), 0);
    opens(&l);
    assert_int_equal(setenv("QCONV_TEST_PLACE", "", 1), 0);
    fails(&l, "it cannot be loaded: there is none");
}
