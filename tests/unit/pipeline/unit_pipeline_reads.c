/* A conversion whose source is read past the page cache makes the same bytes as one through it, of
 * every form and kind of source, and leaves the cache as it was. */
#include "base/random.h"
#include "tests/fixtures/pipeline_fixture.h"
#include "tests/fixtures/test.h"
#include "tests/fixtures/test_world.h"

static int setup(void **state)
{
    /* What lies in memory is read past no cache. */
    *state = world_in(test_folder_on_disk);
    return 0;
}

/* Every byte pattern of these is finite in every dtype here. */
static void fill(qc_strbuf *text, const qc_st_tensor *t)
{
    qc_error err = {0};
    uint64_t seed = t->begin + 3;
    for (uint64_t i = t->begin; i < t->end; i += 8) {
        uint64_t r = qc_random_next(&seed) & 0xbf3fbf3fbf3fbf3fu;
        test_must(qc_strbuf_add(text, &r, t->end - i < 8 ? (size_t)(t->end - i) : 8, &err), &err);
    }
}

/* 23 MB: weights of several frames, of one, and of a part of a page. */
static void write_model(const char *dir)
{
    static const test_tensor rows[] = {
        {"model.layers.0.mlp.up_proj.weight", QC_DTYPE_F32, 2, {1024, 2048}},
        {"model.layers.0.self_attn.k_proj.weight_scale_inv", QC_DTYPE_F32, 2, {8, 8}},
        {"model.layers.0.mlp.down_proj.weight", QC_DTYPE_BF16, 2, {3, 2048}},
        {"model.layers.0.self_attn.q_proj.weight", QC_DTYPE_BF16, 2, {2048, 3072}},
        {"model.layers.0.self_attn.k_proj.weight", QC_DTYPE_F8_E4M3, 2, {1024, 1024}},
    };
    test_write_filled(dir, rows, sizeof rows / sizeof *rows, "{\"model_type\": \"llama\"}", fill);
}

/* The page cache holds nothing of the source; 0 where that cannot be had. */
static int forget(const qc_checkpoint *m)
{
    int gone = 1;
    for (size_t i = 0; i < m->file_count; i++) {
        qc_file_hint_done(&m->files[i].st.file, 0, 0);
        gone &= qc_file_is_uncached(&m->files[i].st.file, 0, m->files[i].file_bytes);
    }
    return gone;
}

/* Of the pages of the source, in percent. */
static double cached_percent(const qc_checkpoint *m)
{
    unsigned cached = 0, all = 0;
    for (size_t i = 0; i < m->file_count; i++) {
        for (uint64_t at = 0; at < m->files[i].file_bytes; at += 4096, all++)
            cached += !qc_file_is_uncached(&m->files[i].st.file, at, 4096);
    }
    return 100.0 * cached / all;
}

/* A digest of all that was written and read. */
static qc_digest run(const char *words, const char *model, const char *out, int keep_cache)
{
    SCOPED(test_conversion) c;
    qc_error err = {0};
    test_conversion_begin(&c, "qconv -q --force %s %s %s", words, model, out);
    const qc_checkpoint *m = c.model;
    qc_pipeline *p = &c.pipeline;
    p->keep_cache = keep_cache;
    int gone = forget(m);
    test_must(qc_pipeline_run(p, &err), &err);
    /* Pages at the ends of tensors stay, and single ones that others were just looking at. */
    if (gone && !keep_cache)
        assert_true(cached_percent(m) < 5);
    if (gone && keep_cache)
        assert_true(cached_percent(m) > 50);
    SCOPED(qc_strbuf) all = {.max = 1u << 24};
    for (uint32_t i = 0; i < p->unit_count; i++) {
        const qc_unit *u = &p->units[i];
        qc_strbuf_put(&all, &u->content, sizeof u->content);
        qc_strbuf_put(&all, &u->stored, sizeof u->stored);
        qc_strbuf_put(&all, &u->source, sizeof u->source);
    }
    qc_digest digest = qc_digest_bytes(all.data, all.len);
    return digest;
}

static void both_ways(const char *words, const char *model, const char *out)
{
    qc_digest cached = run(words, model, out, 1), past = run(words, model, out, 0);
    if (memcmp(&cached, &past, sizeof cached) != 0)
        fail_msg("%s: other bytes past the page cache", words);
}

TEST(the_same_bytes)
{
    const world *w = *state;
    static const char *const forms[] = {"--to nf4 --threads 1",
                                        "--to nf4 --threads 3",
                                        "--to nf4 --scale absmax --compress none --threads 2",
                                        "--to int8 --threads 2",
                                        "--to bf16 --threads 2",
                                        "--to int8 --block-size 64 --threads 3"};
    write_model(w->model);
    for (size_t i = 0; i < sizeof forms / sizeof *forms; i++)
        both_ways(forms[i], w->model, w->out);
}

/* Frames of a compressed source, as well. */
TEST(of_what_convert_wrote)
{
    const world *w = *state;
    qc_error err = {0};
    test_must(test_run_line(test_command, &err, "qconv -q --force --to bf16 --threads 2 %s %s",
                            w->model, w->other),
              &err);
    both_ways("--to nf4 --threads 2", w->other, w->out);
    both_ways("--to keep --threads 3", w->other, w->out);
}

TEST_GROUP(setup, NULL)
