/* Any files as an output of qconv (see fuzz_files.h). A seal that fits is put under the manifest,
 * so that what it says is read: refused, or found to be damaged, or whole; what a loader is given
 * then is what the scan found whole. */
#include "base/alloc.h"
#include "base/checked.h"
#include "convert/verify/output_scan.h"
#include "formats/device_reader.h"
#include "fuzz_check.h"
#include "fuzz_files.h"

#include <string.h>

/* The largest frame that is read, as stored and as decoded (QC_FRAME_READ_MAX_BYTES), and the
 * tensors, which the loader below takes up to LOAD_MOST of. */
const fuzz_limits fuzz_may_allocate = {520u << 20, 512};

#define LOAD_MOST (1u << 20)

static const char *const names[] = {
    "qconv.json",
    "config.json",
    "model.safetensors",
    "model.safetensors.zst",
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
    "model-00001-of-00002.safetensors.zst",
    "model-00002-of-00002.safetensors.zst",
    "model.safetensors.index.json",
    "generation_config.json",
};
#define NAME_COUNT (sizeof names / sizeof *names)
static const char seal[] = ",\n  \"manifest_xxh3_128\": \"";

static void put_sealed(const fuzz_part *p)
{
    char hex[QC_DIGEST_HEX_BYTES];
    qc_strbuf text;
    size_t body = p->size;
    for (size_t i = p->size; i-- > 0;) {
        if (p->size - i >= sizeof seal - 1 && memcmp(p->data + i, seal, sizeof seal - 1) == 0) {
            body = i;
            break;
        }
    }
    qc_strbuf_init(&text, p->size + 200);
    FUZZ_CHECK(qc_strbuf_add(&text, p->data, body, NULL) == QC_OK);
    FUZZ_CHECK(qc_strbuf_adds(&text, seal, NULL) == QC_OK);
    qc_digest d = qc_digest_bytes(text.data, text.len);
    qc_digest_hex(&d, hex);
    FUZZ_CHECK(qc_strbuf_addf(&text, NULL, "%s\"\n}\n", hex) == QC_OK);
    fuzz_folder_put("qconv.json", (const uint8_t *)text.data, text.len);
    qc_strbuf_deinit(&text);
}

typedef struct {
    unsigned char room[LOAD_MOST];
    uint64_t used;
    size_t placed, done;
} loader;

static void *place(void *ctx, const qc_reader_tensor *t)
{
    loader *l = ctx;
    if (t->bytes > LOAD_MOST - l->used)
        return NULL;
    l->placed++;
    l->used += t->bytes;
    return l->room + (l->used - t->bytes);
}

static qc_status done(void *ctx, const qc_reader_tensor *t, void *dst, qc_error *err)
{
    loader *l = ctx;
    (void)err;
    FUZZ_CHECK(t->bytes == 0 || (unsigned char *)dst + t->bytes <= l->room + LOAD_MOST);
    l->done++;
    return QC_OK;
}

/* Is everything that it loads right? */
static int load_all(const char *folder, uint64_t *bytes)
{
    static loader l;
    qc_reader *r = NULL;
    qc_error err = {0};
    int right = 1;
    qc_status st = qc_reader_open(&r, folder, &err);
    *bytes = 0;
    FUZZ_CHECK(st == QC_OK ? r != NULL : !r && err.msg[0]);
    for (size_t d = 0; r && d < qc_reader_device_count(r); d++) {
        const qc_reader_options o = {.threads = 1, .place = place, .done = done, .ctx = &l};
        const qc_reader_device *device = qc_reader_device_at(r, d);
        l.used = l.placed = l.done = 0;
        FUZZ_CHECK(!qc_add_u64(*bytes, device->tensor_bytes, bytes));
        st = qc_reader_load(r, d, &o, &err);
        FUZZ_CHECK(st == QC_OK || err.msg[0]);
        FUZZ_CHECK(st != QC_OK || l.done == device->tensor_count);
        right &= st == QC_OK;
    }
    qc_reader_close(r);
    return r != NULL && right;
}

int fuzz_one(const uint8_t *data, size_t size)
{
    fuzz_part parts[FUZZ_MOST_PARTS];
    qc_arena arena;
    qc_manifest m;
    qc_scan_result result;
    qc_error err = {0};
    uint64_t bytes = 0;
    fuzz_split(parts, data, size);
    const char *folder = fuzz_folder(names, parts, NAME_COUNT);
    if (parts[0].found)
        put_sealed(&parts[0]);
    int right = load_all(folder, &bytes);
    qc_arena_init(&arena);
    qc_status st = qc_manifest_load(&m, &arena, folder, &err);
    FUZZ_CHECK(st == QC_OK || err.msg[0]);
    if (st == QC_OK) {
        const qc_scan_options o = {.threads = 1, .shards_only = size & 1};
        st = qc_scan_output(&result, &arena, folder, &m, &o, &err);
        FUZZ_CHECK(st == QC_OK || err.msg[0]);
        /* A header that is wrong is the scan's alone to find. */
        if (st == QC_OK && result.problem_count == 0)
            FUZZ_CHECK(right || bytes > LOAD_MOST);
    } else {
        FUZZ_CHECK(!right);
    }
    qc_arena_deinit(&arena);
    (void)fuzz_folder(names, (fuzz_part[FUZZ_MOST_PARTS]){{0}}, NAME_COUNT);
    return 0;
}
