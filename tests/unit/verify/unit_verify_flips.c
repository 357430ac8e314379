/* verify and unpack against damage: one bit flipped in every byte of every file of an output, every
 * file cut at every length, bytes behind the end. Each time: QC_ERR_CHECK, and the file, header or
 * tensor that is damaged is named.
 *
 * With --slow all eight bits of every byte, and unpack as well. */
#include "convert/cli/commands.h"
#include "convert/verify/output_scan.h"
#include "tests/fixtures/sanitized.h"
#include "tests/fixtures/test.h"
#include "tests/fixtures/test_model.h"
#include "tests/fixtures/test_world.h"

#include <fcntl.h>

static int slow;

static int setup(void **state)
{
    const world *w = *state = world_in(test_folder);
    test_write_model(w->model);
    return 0;
}

/* The words of a command line, NULL at the end. */
static qc_status run(qc_error *err, const char *const *words)
{
    char *argv[12];
    char text[12][96];
    int argc = 0;
    for (; words[argc]; argc++) {
        (void)snprintf(text[argc], sizeof text[argc], "%s", words[argc]);
        argv[argc] = text[argc];
    }
    qc_options o;
    SCOPED(qc_arena) a = {0};
    memset(err, 0, sizeof *err);
    qc_status st = qc_options_parse(&o, &a, argc, argv, err);
    if (st == QC_OK)
        o.convert.incomplete = 1;
    if (st == QC_OK)
        st = o.command == QC_CMD_CONVERT  ? qc_cmd_convert(&o, err)
             : o.command == QC_CMD_VERIFY ? qc_cmd_verify(&o, err)
                                          : qc_cmd_unpack(&o, err);
    return st;
}

static qc_status run_verify(const world *w, qc_error *err)
{
    return run(err, (const char *const[]){"qconv", "verify", "-q", "--threads=1", w->out, NULL});
}

static qc_status run_unpack(const world *w, qc_error *err)
{
    return run(
        err, (const char *const[]){"qconv", "unpack", "-q", "--threads=1", w->out, w->other, NULL});
}

/* ---- Who owns a byte ------------------------------------------------------------------------ */

typedef struct {
    const char *file; /* in OUT */
    char path[256];
    uint64_t bytes;
    int shard; /* or -1 */
} out_file;

typedef struct {
    qc_arena arena;
    qc_manifest m;
    out_file files[32];
    size_t count;
} out_view;

static void add_file(out_view *v, const world *w, const char *name, int shard)
{
    out_file *f = &v->files[v->count++];
    qc_path_kind kind = QC_PATH_MISSING;
    qc_error err = {0};
    assert_true(v->count < sizeof v->files / sizeof *v->files);
    f->file = name;
    f->shard = shard;
    (void)snprintf(f->path, sizeof f->path, "%s/%s", w->out, name);
    test_must(qc_path_stat(f->path, &kind, &f->bytes, &err), &err);
    assert_int_equal(kind, QC_PATH_FILE);
}

static void view_open(out_view *v, const world *w)
{
    qc_error err = {0};
    memset(v, 0, sizeof *v);
    qc_arena_init(&v->arena);
    test_must(qc_manifest_load(&v->m, &v->arena, w->out, &err), &err);
    add_file(v, w, QC_MANIFEST_NAME, -1);
    for (size_t i = 0; i < v->m.file_count; i++)
        add_file(v, w, v->m.files[i].path, -1);
    for (size_t i = 0; i < v->m.shard_count; i++) {
        const char *name = v->m.shards[i].name;
        if (v->m.compressed)
            test_must(qc_arena_printf(&v->arena, &name, &err, "%s.zst", name), &err);
        add_file(v, w, name, (int)i);
    }
}

/* What the message must name when byte `at` of f is damaged. */
static const char *owner_of(const out_view *v, const out_file *f, uint64_t at)
{
    if (f->shard < 0)
        return f->file;
    const qc_manifest *m = &v->m;
    const qc_manifest_shard *s = &m->shards[f->shard];
    for (size_t i = 0; i < m->tensor_count; i++) {
        const qc_manifest_tensor *t = &m->tensors[i];
        uint64_t begin = m->compressed ? t->stored_offset : s->header_bytes + t->begin;
        uint64_t end = m->compressed ? begin + t->stored_bytes : s->header_bytes + t->end;
        if (t->shard == (uint32_t)f->shard && at >= begin && at < end)
            return t->name;
    }
    return s->name; /* the header and the seek table */
}

static void assert_caught(qc_status st, const qc_error *err, const char *owner, const char *what,
                          const out_file *f, uint64_t at)
{
    if (st != QC_ERR_CHECK || !strstr(err->msg, owner))
        print_error("%s of %s at %llu: %s: %s; expected %s\n", what, f->file,
                    (unsigned long long)at, qc_status_name(st), err->msg, owner);
    assert_int_equal(st, QC_ERR_CHECK);
    assert_non_null(strstr(err->msg, owner));
}

/* ---- Damage --------------------------------------------------------------------------------- */

static void flip(int fd, uint64_t at, unsigned bit)
{
    unsigned char c;
    assert_int_equal(pread(fd, &c, 1, (off_t)at), 1);
    c ^= (unsigned char)(1u << bit);
    assert_int_equal(pwrite(fd, &c, 1, (off_t)at), 1);
}

static uint64_t flip_all(const world *w, const out_view *v, int unpack, uint64_t stride)
{
    uint64_t tried = 0;
    qc_error err;
    for (size_t i = 0; i < v->count; i++) {
        const out_file *f = &v->files[i];
        int fd = open(f->path, O_RDWR);
        assert_true(fd >= 0);
        for (uint64_t at = 0; at < f->bytes; at++) {
            /* Codes are all alike: of them every fifth byte does. */
            int payload = f->shard >= 0 && owner_of(v, f, at) != v->m.shards[f->shard].name;
            if (at % (payload && !slow && stride == 1 ? 5 : stride))
                continue;
            if (TEST_SANITIZED && at % 7)
                continue;
            for (unsigned k = 0; k < (slow ? 8 : 1); k++) {
                unsigned bit = (unsigned)(at * 5 + i + k) % 8;
                flip(fd, at, bit);
                qc_status st = unpack ? run_unpack(w, &err) : run_verify(w, &err);
                assert_caught(st, &err, owner_of(v, f, at), "a flipped bit", f, at);
                if (unpack)
                    assert_int_not_equal(access(w->other, F_OK), 0);
                flip(fd, at, bit);
                tried++;
            }
        }
        close(fd);
    }
    test_must(run_verify(w, &err), &err);
    return tried;
}

/* Cut at every length, then with bytes too many. */
static uint64_t cut_all(const world *w, const out_view *v)
{
    uint64_t tried = 0;
    qc_error err;
    for (size_t i = 0; i < v->count; i++) {
        const out_file *f = &v->files[i];
        SCOPED(qc_strbuf) whole = {.max = 1u << 24};
        test_must(qc_file_slurp(f->path, &whole, &err), &err);
        const char *owner = f->shard < 0 ? f->file : v->m.shards[f->shard].name;
        uint64_t stride = slow || f->bytes < 1000 ? 1 : f->bytes / 1000;
        for (uint64_t at = f->bytes; at-- > 0;) {
            if (at % stride && at + 100 < f->bytes)
                continue;
            if (TEST_SANITIZED && at % 7)
                continue;
            assert_int_equal(truncate(f->path, (off_t)at), 0);
            assert_caught(run_verify(w, &err), &err, owner, "a cut", f, at);
            tried++;
        }
        int fd = open(f->path, O_RDWR | O_TRUNC);
        assert_true(fd >= 0);
        for (int more = 0; more < 3; more++) {
            static const char tail[2][5000] = {"\n", "{}"};
            size_t len = (size_t[]){1, sizeof tail[1], 0}[more];
            assert_int_equal(ftruncate(fd, 0), 0);
            assert_int_equal(pwrite(fd, whole.data, whole.len, 0), whole.len);
            if (len) {
                assert_int_equal(pwrite(fd, tail[more], len, (off_t)whole.len), len);
                assert_caught(run_verify(w, &err), &err, owner, "a tail", f, f->bytes);
                tried++;
            }
        }
        close(fd);
    }
    test_must(run_verify(w, &err), &err);
    return tried;
}

/* Removed, or a folder in its place. */
static void lose_all(const world *w, const out_view *v)
{
    qc_error err;
    char aside[160];
    (void)snprintf(aside, sizeof aside, "%s/aside", w->root);
    for (size_t i = 0; i < v->count; i++) {
        const out_file *f = &v->files[i];
        assert_int_equal(rename(f->path, aside), 0);
        for (int folder = 0; folder < 2; folder++) {
            if (folder)
                assert_int_equal(mkdir(f->path, 0777), 0);
            qc_status st = run_verify(w, &err);
            if (st == QC_OK || !strstr(err.msg, f->file))
                print_error("%s lost: %s: %s\n", f->file, qc_status_name(st), err.msg);
            /* Without its manifest a folder is no output at all. */
            assert_int_equal(st, i == 0 ? QC_ERR_INPUT : QC_ERR_CHECK);
            assert_non_null(strstr(err.msg, f->file));
        }
        assert_int_equal(rmdir(f->path), 0);
        assert_int_equal(rename(aside, f->path), 0);
    }
    test_must(run_verify(w, &err), &err);
}

static void damage_all(const world *w, const char *to, const char *form, const char *compress)
{
    qc_error err;
    out_view v;
    test_must(run(&err, (const char *const[]){"qconv", to, form, compress, "-q", "--threads=1",
                                              "--max-shard-size=20KB", w->model, w->out, NULL}),
              &err);
    view_open(&v, w);
    assert_true(v.m.shard_count > 1);
    uint64_t flips = flip_all(w, &v, 0, 1);
    uint64_t cuts = cut_all(w, &v);
    lose_all(w, &v);
    uint64_t unpacks = flip_all(w, &v, 1, slow ? 7 : 41);
    print_message("%s %s: %llu flips, %llu cuts and tails; unpack: %llu flips\n", to, compress,
                  (unsigned long long)flips, (unsigned long long)cuts, (unsigned long long)unpacks);
    qc_arena_deinit(&v.arena);
    test_remove(w->out);
}

TEST(test_compressed)
{
    damage_all(*state, "--to=nf4", "--rest=bf16", "--compress=zstd");
}

TEST(test_plain)
{
    damage_all(*state, "--to=int8", "--block-size=64", "--compress=none");
}

TEST(test_placed)
{
    damage_all(*state, "--to=nf4", "--vram=2x2GB", "--compress=zstd");
}

TEST_GROUP(setup, NULL)

int main(int argc, char **argv)
{
    slow = argc > 1 && strcmp(argv[1], "--slow") == 0;
    return test_run_all(NULL);
}
