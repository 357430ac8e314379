/* An output of four devices (one of them empty), compressed or not, for tests of its reader. */
#ifndef QC_TESTS_DEVICE_OUTPUT_FIXTURE_H
#define QC_TESTS_DEVICE_OUTPUT_FIXTURE_H

#include "formats/device_reader.h"

#include "fixture_files.h"
#include "formats/manifest.h"
#include "formats/seekable.h"
#include "formats/shard_layout.h"
#include "layout_array.h"

#define MIB     (1u << 20)
#define TENSORS 9u
#define LIMIT   (4u * MIB)

static const struct {
    const char *name;
    uint64_t bytes, piece;
    uint32_t device;
} made[TENSORS] = {
    {"embed", 3 * MIB + 5, MIB, 0}, {"l0.w", 1000, 1000, 0},
    {"l0.empty", 0, 1, 0},          {"l0.s", 4, 4, 0},
    {"l1.w", 5 * MIB, MIB, 1},      {"l1.s", 77, 77, 1},
    {"l2.w", 2 * MIB, 2 * MIB, 1},  {"norm", 16, 16, 3},
    {"head", 2 * MIB + 1, MIB, 3},
};
static const char *const names[] = {"cuda:0", "cuda:1", "cuda:2", "cpu"};

typedef struct {
    fx_dir dir;
    qc_arena arena;
    qc_layout layout;
    qc_out_tensor tensors[TENSORS];
    qc_manifest m;
    int placed;
} world;

static unsigned char *contents[TENSORS];

static inline int make_contents(void **state)
{
    (void)state;
    for (size_t k = 0; k < TENSORS; k++) {
        contents[k] = malloc(made[k].bytes + 1);
        assert_non_null(contents[k]);
        /* Runs, so that zstd has something to do; and one of noise, that is stored. */
        uint64_t noise = strcmp(made[k].name, "l2.w") == 0 ? 88172645463325252u : 0;
        for (uint64_t i = 0; i < made[k].bytes; i++) {
            noise ^= noise << 13;
            noise ^= noise >> 7;
            noise ^= noise << 17;
            contents[k][i] = noise    ? (unsigned char)(noise >> 30)
                             : i % 64 ? contents[k][i - 1]
                                      : fx_byte(made[k].name, i / 64);
        }
    }
    return 0;
}

static inline int free_contents(void **state)
{
    (void)state;
    for (size_t k = 0; k < TENSORS; k++)
        free(contents[k]);
    return 0;
}

static const unsigned char *content_of(const char *name)
{
    size_t k = 0;
    while (strcmp(made[k].name, name) != 0)
        k++;
    return contents[k];
}

/* Append the frames (or the bytes) of a stretch; root of content and stored bytes. */
static inline void put_stretch(qc_strbuf *file, qc_frame *frames, size_t *count, int compressed,
                               const unsigned char *p, uint64_t bytes, uint64_t piece,
                               qc_digest *content, qc_digest *stored)
{
    qc_digest c[16], s[16];
    size_t n = 0;
    qc_frame_coder *coder = NULL;
    assert_int_equal(qc_frame_coder_create(&coder, NULL), QC_OK);
    for (uint64_t at = 0; at < bytes; at += piece, n++) {
        size_t len = (size_t)(bytes - at < piece ? bytes - at : piece), out = len;
        assert_true(n < 16);
        c[n] = qc_digest_bytes(p + at, len);
        if (!compressed) {
            assert_int_equal(qc_strbuf_add(file, p + at, len, NULL), QC_OK);
            continue;
        }
        void *dst = malloc(qc_frame_bound(len));
        assert_non_null(dst);
        assert_int_equal(
            qc_frame_encode(coder, 1, p + at, len, dst, qc_frame_bound(len), &out, NULL), QC_OK);
        s[n] = qc_digest_bytes(dst, out);
        const qc_frame *last = *count > 0 ? &frames[*count - 1] : NULL;
        frames[(*count)++] =
            (qc_frame){.stored_offset = file->len,
                       .content_offset = last ? last->content_offset + last->content_bytes : 0,
                       .stored_bytes = (uint32_t)out,
                       .content_bytes = (uint32_t)len};
        assert_int_equal(qc_strbuf_add(file, dst, out, NULL), QC_OK);
        free(dst);
    }
    *content = qc_digest_root(c, n);
    *stored = qc_digest_root(s, compressed ? n : 0);
    qc_frame_coder_destroy(coder);
}

static inline void write_shard(world *w, uint32_t shard, size_t *tensor)
{
    const qc_shard *sh = &w->layout.shards[shard];
    qc_manifest_shard *ms = &w->m.shards[shard];
    qc_frame frames[64];
    size_t count = 0;
    qc_strbuf file;
    qc_strbuf_init(&file, 64 * MIB);
    *ms = (qc_manifest_shard){.name = sh->name,
                              .content_bytes = sh->header_bytes + sh->data_bytes,
                              .header_bytes = sh->header_bytes,
                              .device = w->placed ? sh->device : 0};
    qc_strbuf header;
    qc_strbuf_init(&header, MIB);
    assert_int_equal(
        qc_layout_header(&header, &w->layout, shard, array_tensors(w->tensors, TENSORS), NULL),
        QC_OK);
    put_stretch(&file, frames, &count, w->m.compressed, (const unsigned char *)header.data,
                sh->header_bytes, sh->header_bytes, &ms->header, &ms->header_stored);
    qc_strbuf_deinit(&header);
    if (w->m.compressed)
        ms->header_stored_bytes = file.len;
    for (uint32_t k = 0; k < sh->count; k++) {
        const qc_out_tensor *o = &w->tensors[sh->order[k]];
        qc_manifest_tensor *t = &w->m.tensors[(*tensor)++];
        uint64_t bytes = o->st.end - o->st.begin, before = file.len;
        const unsigned char *p = content_of(o->st.name);
        *t = (qc_manifest_tensor){.name = o->st.name,
                                  .scheme = "keep",
                                  .dtype = QC_DTYPE_U8,
                                  .ndim = 1,
                                  .dims = {bytes},
                                  .begin = o->st.begin,
                                  .end = o->st.end,
                                  .piece_bytes = o->piece_bytes,
                                  .shard = shard};
        put_stretch(&file, frames, &count, w->m.compressed, p, bytes, o->piece_bytes, &t->content,
                    &t->stored);
        if (w->m.compressed && bytes > 0) {
            t->stored_offset = before;
            t->stored_bytes = file.len - before;
        }
    }
    if (w->m.compressed) {
        qc_strbuf table;
        qc_strbuf_init(&table, MIB);
        assert_int_equal(qc_seek_table_build(&table, frames, count, NULL), QC_OK);
        ms->table_bytes = table.len;
        ms->table = qc_digest_bytes(table.data, table.len);
        assert_int_equal(qc_strbuf_add(&file, table.data, table.len, NULL), QC_OK);
        qc_strbuf_deinit(&table);
        ms->file_bytes = file.len;
    }
    char name[128];
    (void)snprintf(name, sizeof name, "%s%s", sh->name, w->m.compressed ? ".zst" : "");
    fx_put(w->dir.path, name, file.data, file.len);
    qc_strbuf_deinit(&file);
}

static inline void write_manifest(const world *w)
{
    qc_strbuf text;
    qc_error err = {0};
    qc_strbuf_init(&text, MIB);
    if (qc_manifest_write(&w->m, &text, &err) != QC_OK)
        fail_msg("%s", err.msg);
    fx_put(w->dir.path, QC_MANIFEST_NAME, text.data, text.len);
    qc_strbuf_deinit(&text);
}

static inline void make_output(world *w, int compressed, int placed)
{
    static qc_manifest_shard shards[16];
    static qc_manifest_tensor tensors[TENSORS];
    static qc_manifest_device devices[4];
    qc_error err = {0};
    size_t tensor = 0;
    memset(w, 0, sizeof *w);
    fx_make_dir(&w->dir);
    qc_arena_init(&w->arena);
    w->placed = placed;
    for (uint32_t i = 0; i < TENSORS; i++)
        w->tensors[i] = (qc_out_tensor){
            .st = {.name = made[i].name, .dtype = QC_DTYPE_U8, .ndim = 1, .dims = {made[i].bytes}},
            .group = i,
            .device = placed ? made[i].device : 0,
            .piece_bytes = made[i].piece,
            .align_bytes = 1};
    assert_int_equal(layout_array(&w->layout, &w->arena, w->tensors, TENSORS, LIMIT, &err), QC_OK);
    w->m = (qc_manifest){.qconv_version = "0.1.0",
                         .zstd_version = compressed ? "1.5.4" : NULL,
                         .compressed = compressed,
                         .level = compressed,
                         .to = "nf4",
                         .rest = "keep",
                         .max_shard_bytes = LIMIT,
                         .shards = shards,
                         .shard_count = w->layout.count,
                         .tensors = tensors,
                         .tensor_count = TENSORS};
    for (uint32_t i = 0; i < w->layout.count; i++)
        write_shard(w, i, &tensor);
    if (placed) {
        memset(devices, 0, sizeof devices);
        for (size_t i = 0; i < 4; i++)
            devices[i].name = names[i];
        for (uint32_t i = 0; i < w->layout.count; i++) {
            devices[shards[i].device].shard_bytes += shards[i].content_bytes;
            devices[shards[i].device].tensor_bytes += w->layout.shards[i].data_bytes;
        }
        w->m.placement = (qc_manifest_placement){.vram = "3x1MB+cpu",
                                                 .margin = 0.9,
                                                 .context = 1,
                                                 .batch = 1,
                                                 .kv_bits = 16,
                                                 .devices = devices,
                                                 .device_count = 4};
    }
    write_manifest(w);
}

static inline void drop_output(world *w)
{
    qc_arena_deinit(&w->arena);
    fx_remove_dir(w->dir.path);
}

static inline void shard_path(char out[FX_PATH_BYTES], const world *w, uint32_t shard)
{
    char name[128];
    (void)snprintf(name, sizeof name, "%s%s", w->layout.shards[shard].name,
                   w->m.compressed ? ".zst" : "");
    fx_join(out, w->dir.path, name);
}

static inline void flip_byte(const char *path, uint64_t at)
{
    FILE *f = fopen(path, "r+b");
    assert_non_null(f);
    assert_int_equal(fseek(f, (long)at, SEEK_SET), 0);
    int c = fgetc(f);
    assert_int_equal(fseek(f, (long)at, SEEK_SET), 0);
    assert_int_equal(fputc(c ^ 1, f), c ^ 1);
    assert_int_equal(fclose(f), 0);
}

static inline qc_reader *open_reader(const world *w)
{
    qc_reader *r = NULL;
    qc_error err = {0};
    if (qc_reader_open(&r, w->dir.path, &err) != QC_OK)
        fail_msg("%s", err.msg);
    return r;
}

#endif
