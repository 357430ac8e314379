/* Any damage to what an interrupted conversion leaves, its journal (each record with a right
 * digest) and its staged shard: the same command refuses in words, or ends with the very bytes that
 * an uninterrupted run writes. The input says what to do to records and bytes of a conversion that
 * was stopped before its first rename. */
#define _GNU_SOURCE /* nftw */
#include "base/alloc.h"
#include "convert/cli/commands.h"
#include "formats/file_io.h"
#include "formats/journal.h"
#include "fuzz_check.h"
#include "fuzz_files.h"
#include "tests/fixtures/st_header.h"

#include <errno.h>
#include <ftw.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* Two workers' buffers: a conversion takes them whatever it is of. */
const fuzz_limits fuzz_may_allocate = {32u << 20, 1024};

#define RECORDS_MOST 64u
#define BYTES_MOST   65536u
#define SHARD        "model.safetensors.zst"
#define JOURNAL      "journal-00001-of-00001"

typedef struct {
    uint32_t type, bytes;
    unsigned char payload[4096];
} record;

static char folder[256], model[300], out[300], staging[340];
static record genuine[RECORDS_MOST];
static uint32_t genuine_count;
static unsigned char staged[BYTES_MOST], whole[BYTES_MOST];
static size_t staged_bytes, whole_bytes;

static int remove_one(const char *path, const struct stat *s, int kind, struct FTW *ftw)
{
    (void)s, (void)kind, (void)ftw;
    return remove(path);
}

static void remove_tree(const char *path)
{
    FUZZ_CHECK(nftw(path, remove_one, 8, FTW_DEPTH | FTW_PHYS) == 0 || errno == ENOENT);
}

static size_t slurp(const char *dir, const char *name, unsigned char *to)
{
    char path[512];
    (void)snprintf(path, sizeof path, "%s/%s", dir, name);
    FILE *f = fopen(path, "rb");
    FUZZ_CHECK(f != NULL);
    size_t n = fread(to, 1, BYTES_MOST, f);
    FUZZ_CHECK(n < BYTES_MOST && fclose(f) == 0);
    return n;
}

static void put(const char *dir, const char *name, const void *bytes, size_t n)
{
    char path[512];
    (void)snprintf(path, sizeof path, "%s/%s", dir, name);
    FILE *f = fopen(path, "wb");
    FUZZ_CHECK(f != NULL && fwrite(bytes, 1, n, f) == n && fclose(f) == 0);
}

static qc_status convert(qc_error *err)
{
    static char program[] = "qconv", quiet[] = "-q", threads[] = "--threads=1", to[] = "--to",
                nf4[] = "nf4";
    char *argv[] = {program, quiet, threads, to, nf4, model, out, NULL};
    qc_arena arena;
    qc_options o;
    qc_arena_init(&arena);
    FUZZ_CHECK(qc_options_parse(&o, &arena, 7, argv, err) == QC_OK);
    qc_status st = qc_cmd_convert(&o, err);
    qc_arena_deinit(&arena);
    return st;
}

static qc_status keep(void *ctx, const qc_journal_record *r, qc_error *err)
{
    (void)ctx, (void)err;
    FUZZ_CHECK(genuine_count < RECORDS_MOST && r->payload_bytes <= sizeof genuine->payload);
    record *to = &genuine[genuine_count++];
    to->type = r->type;
    to->bytes = r->payload_bytes;
    memcpy(to->payload, r->payload, r->payload_bytes);
    return QC_OK;
}

static void write_model(void)
{
    static const char *const names[] = {"model.layers.0.mlp.up_proj.weight",
                                        "model.layers.1.mlp.up_proj.weight", "model.norm.weight"};
    static float data[2 * 2048 + 8];
    qc_st_tensor t[3];
    qc_strbuf text;
    uint64_t at = 0;
    memset(t, 0, sizeof t);
    for (size_t i = 0; i < sizeof data / sizeof *data; i++)
        data[i] = (float)((i * 2654435761u) % 1001) / 500.0f - 1.0f;
    for (size_t i = 0; i < 3; i++) {
        t[i] = (qc_st_tensor){.name = names[i], .dtype = QC_DTYPE_F32, .ndim = i < 2 ? 2 : 1};
        t[i].dims[0] = i < 2 ? 32 : 8;
        t[i].dims[1] = i < 2 ? 64 : 0;
        t[i].begin = at;
        at += (i < 2 ? 2048 : 8) * sizeof *data;
        t[i].end = at;
    }
    qc_strbuf_init(&text, 1u << 20);
    FUZZ_CHECK(st_header_build(&text, t, 3, NULL, 0, NULL) == QC_OK);
    FUZZ_CHECK(qc_strbuf_add(&text, data, sizeof data, NULL) == QC_OK);
    put(model, "model.safetensors", text.data, text.len);
    put(model, "config.json", "{\"model_type\": \"llama\"}", 23);
    qc_strbuf_deinit(&text);
}

static void remove_all(void)
{
    remove_tree(folder);
}

/* Once: the model, what is written of it, and what is left of a run that could not rename. */
__attribute__((constructor)) static void prepare(void)
{
    char path[512];
    qc_error err = {0};
    const char *base = access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp";
    (void)snprintf(folder, sizeof folder, "%s/qconv-fuzz-XXXXXX", base);
    FUZZ_CHECK(mkdtemp(folder) != NULL);
    (void)atexit(remove_all);
    (void)snprintf(model, sizeof model, "%s/m", folder);
    (void)snprintf(out, sizeof out, "%s/o", folder);
    (void)snprintf(staging, sizeof staging, "%s/.qconv-partial", out);
    FUZZ_CHECK(mkdir(model, 0700) == 0);
    write_model();
    FUZZ_CHECK(convert(&err) == QC_OK);
    whole_bytes = slurp(out, SHARD, whole);
    remove_tree(out);
    qc_io_fail_at(QC_IO_RENAME, 1, 1, EIO);
    FUZZ_CHECK(convert(&err) == QC_ERR_IO);
    qc_io_fail_at(QC_IO_RENAME, 0, 0, 0);
    staged_bytes = slurp(staging, SHARD, staged);
    FUZZ_CHECK(staged_bytes == whole_bytes && memcmp(staged, whole, whole_bytes) == 0);
    (void)snprintf(path, sizeof path, "%s/%s", staging, JOURNAL);
    FUZZ_CHECK(qc_journal_read(path, keep, NULL, NULL, &err) == QC_OK && genuine_count > 4);
    remove_tree(out);
}

/* Instructions of 4 bytes: what, which record, where, value. Identity and times stay. */
static void damage(record *r, uint32_t *count, unsigned char *shard, size_t *shard_bytes,
                   const uint8_t *data, size_t size)
{
    for (; size >= 4; data += 4, size -= 4) {
        uint32_t i = 2 + data[1] % (*count > 2 ? *count - 2 : 1);
        size_t at = data[2];
        if (i >= *count)
            return;
        switch (data[0] % 8) {
        case 0: /* a byte of a payload */
            if (r[i].bytes)
                r[i].payload[at % r[i].bytes] ^= data[3];
            break;
        case 1: /* gone */
            memmove(&r[i], &r[i + 1], (*count - i - 1) * sizeof *r);
            --*count;
            break;
        case 2: /* twice */
            if (*count < RECORDS_MOST)
                r[(*count)++] = r[i];
            break;
        case 3: /* of another type */
            r[i].type = data[3];
            break;
        case 4: /* shorter, longer */
            r[i].bytes = (uint32_t)(at * 16 + data[3]) % sizeof r->payload;
            break;
        case 5: /* the journal ends here */
            *count = i;
            break;
        case 6: /* a byte of the shard */
            shard[(at << 8 | data[1]) % *shard_bytes] ^= data[3];
            break;
        default: /* the shard ends here */
            *shard_bytes = 1 + (at << 8 | data[3]) % *shard_bytes;
            break;
        }
    }
}

int fuzz_one(const uint8_t *data, size_t size)
{
    static record records[RECORDS_MOST];
    static unsigned char shard[BYTES_MOST];
    char path[512];
    uint32_t count = genuine_count;
    size_t shard_bytes = staged_bytes;
    qc_journal *j = NULL;
    qc_error err = {0};
    memcpy(records, genuine, sizeof records);
    memcpy(shard, staged, staged_bytes);
    damage(records, &count, shard, &shard_bytes, data, size < 256 ? size : 256);
    FUZZ_CHECK(mkdir(out, 0700) == 0 && mkdir(staging, 0700) == 0);
    put(staging, SHARD, shard, shard_bytes);
    (void)snprintf(path, sizeof path, "%s/%s", staging, JOURNAL);
    FUZZ_CHECK(qc_journal_open(&j, path, NULL, NULL, NULL, NULL) == QC_OK);
    for (uint32_t i = 0; i < count; i++)
        FUZZ_CHECK(qc_journal_append(j, records[i].type, records[i].payload, records[i].bytes,
                                     NULL) == QC_OK);
    qc_journal_close(j);
    qc_status st = convert(&err);
    if (st == QC_OK) {
        static unsigned char made[BYTES_MOST];
        size_t made_bytes = slurp(out, SHARD, made);
        if (made_bytes != whole_bytes || memcmp(made, whole, whole_bytes) != 0)
            (void)fprintf(stderr, "%zu bytes written, %zu are right\n", made_bytes, whole_bytes);
        FUZZ_CHECK(made_bytes == whole_bytes && memcmp(made, whole, whole_bytes) == 0);
    } else {
        if (st == QC_ERR_INTERNAL || st == QC_ERR_NOMEM)
            (void)fprintf(stderr, "%s: %s\n", qc_status_name(st), err.msg);
        FUZZ_CHECK(st != QC_ERR_INTERNAL && st != QC_ERR_NOMEM && err.msg[0]);
    }
    remove_tree(out);
    return 0;
}
