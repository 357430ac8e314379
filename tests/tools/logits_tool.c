/* Logits of a model for given tokens, for comparisons from other languages; of an encoder its
 * hidden states.
 *
 * usage: logits_tool [--threads N] [--images FILE] [--moments BLOCK] MODEL IDS OUT
 *
 * With --moments OUT gets G of every linear layer of a layer (convert/backward/backward.h) in
 * blocks of at most BLOCK outputs, one after the other, and stdout has "NAME OUTPUTS" in their
 * order; NAME[I] for expert I of a stack.
 *
 * IDS: one sequence a line, decimal ids separated by blanks. OUT: float32, [tokens, vocabulary] of
 * all sequences one after the other. The environment variable QCONV_ISA picks the code path. Exit
 * codes: as of qconv. */
#include "convert/backward/backward.h"
#include "convert/forward/forward.h"
#include "convert/model/expert_split.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef struct {
    uint32_t *ids;
    uint64_t *lengths;
    uint64_t tokens, windows;
} text;

static void *grown(void *p, uint64_t count, size_t each)
{
    if (count < 64 || (count & (count - 1)) == 0) {
        void *more = realloc(p, (size_t)(count < 64 ? 64 : 2 * count) * each);
        if (!more) {
            (void)fprintf(stderr, "logits_tool: out of memory\n");
            exit(1);
        }
        return more;
    }
    return p;
}

static qc_status read_ids(text *t, const char *path, qc_error *err)
{
    FILE *f = fopen(path, "r");
    char *line = NULL;
    size_t room = 0;
    if (!f)
        QC_FAIL(err, QC_ERR_IO, "%s: %s", path, strerror(errno));
    while (getline(&line, &room, f) > 0) {
        uint64_t n = 0;
        char *end = line;
        for (char *p = line;; p = end, n++) {
            unsigned long id = strtoul(p, &end, 10);
            if (end == p)
                break;
            t->ids = grown(t->ids, t->tokens, sizeof *t->ids);
            t->ids[t->tokens++] = (uint32_t)id;
        }
        t->lengths = grown(t->lengths, t->windows, sizeof *t->lengths);
        t->lengths[t->windows++] = n;
    }
    free(line);
    (void)fclose(f);
    return QC_OK;
}

static double seconds(void)
{
    struct timespec t;
    (void)clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* A few rows at a time: a vocabulary is wide. */
static qc_status write_logits(qc_forward *m, const float *hidden, const text *t, const char *path,
                              qc_error *err)
{
    enum { ROWS = 256 };
    const qc_forward_config *c = qc_forward_config_of(m);
    const uint64_t wide = c->encoder ? c->hidden : c->vocabulary;
    FILE *f = fopen(path, "wb");
    float *rows = malloc((size_t)wide * ROWS * sizeof *rows);
    qc_status st = QC_OK;
    for (uint64_t at = 0; f && rows && st == QC_OK && at < t->tokens; at += ROWS) {
        uint64_t n = t->tokens - at < ROWS ? t->tokens - at : ROWS;
        const float *from = hidden + at * c->hidden;
        if (c->encoder)
            memcpy(rows, from, (size_t)(n * wide) * sizeof *rows);
        else
            st = qc_forward_logits(m, from, n, rows, err);
        if (st == QC_OK && fwrite(rows, (size_t)wide * sizeof *rows, (size_t)n, f) != (size_t)n)
            st = qc_error_set(err, QC_ERR_IO, __FILE__, __LINE__, "%s: cannot be written", path);
    }
    if (!f || !rows)
        st = qc_error_set(err, QC_ERR_IO, __FILE__, __LINE__, "%s: %s", path, strerror(errno));
    if (f && fclose(f) != 0 && st == QC_OK)
        st = qc_error_set(err, QC_ERR_IO, __FILE__, __LINE__, "%s: cannot be written", path);
    free(rows);
    return st;
}

static int all(const void *ctx, uint64_t layer, uint64_t which)
{
    (void)ctx;
    (void)layer;
    (void)which;
    return 1;
}

static void nothing(void *ctx, double operations)
{
    (void)ctx;
    (void)operations;
}

static void print_name(const qc_backward_task *task, uint64_t layer, uint64_t which)
{
    const qc_forward_linear *w = qc_backward_linear(task->tensors, layer, which);
    const qc_checkpoint_tensor *tensors = task->source->checkpoint->tensors;
    const qc_experts_layer *experts = task->tensors->layers[layer].experts;
    if (w->tensor != QC_NO_TENSOR) {
        (void)printf("%s %" PRIu64 "\n", tensors[w->tensor].name, w->rows);
        return;
    }
    const uint64_t i = which - QC_LAYER_ALL_MATRICES;
    (void)printf("%s[%" PRIu64 "] %" PRIu64 "\n",
                 tensors[experts->stacks[i % QC_EXPERT_MATRICES].tensor].name,
                 i / QC_EXPERT_MATRICES, w->rows);
}

static qc_status write_moments(const qc_backward_task *task, const char *path, qc_error *err)
{
    qc_backward *made = NULL;
    FILE *f = NULL;
    QC_TRY(qc_backward_run(&made, task, err));
    f = fopen(path, "wb");
    for (uint64_t l = 0; f && l < task->tensors->shape.config.layers; l++)
        for (uint64_t i = 0; i < qc_backward_count(task->tensors, l); i++) {
            const uint64_t rows = qc_backward_linear(task->tensors, l, i)->rows;
            const float *g = qc_backward_moments(made, l, i);
            const uint64_t block = rows < task->block ? rows : task->block;
            if (!g)
                continue;
            (void)fwrite(g, sizeof *g, (size_t)((rows + block - 1) / block * block * block), f);
            print_name(task, l, i);
        }
    qc_backward_close(made);
    return f && fclose(f) == 0
               ? QC_OK
               : qc_error_set(err, QC_ERR_IO, __FILE__, __LINE__, "%s cannot be written", path);
}

static qc_status moments(const qc_checkpoint *c, const text *t, const qc_forward_tools *tools,
                         uint64_t block, const char *path, qc_error *err)
{
    qc_forward_source source = {.checkpoint = c, .ops = qc_quant_ops_for(tools->isa)};
    const qc_forward_batch batch = {t->ids, t->lengths, t->windows, t->tokens, NULL};
    qc_forward_tensors tensors;
    qc_backward_task task = {.source = &source,
                             .tensors = &tensors,
                             .batch = &batch,
                             .tools = *tools,
                             .block = block,
                             .folder = ".",
                             .memory = UINT64_MAX,
                             .wants = all,
                             .did = nothing};
    qc_arena arena;
    qc_arena_init(&arena);
    qc_status st = qc_blas_open(&task.blas, err);
    if (st == QC_OK)
        st = qc_st_cursor_create(&source.cursor, err);
    if (st == QC_OK)
        st = qc_forward_tensors_find(&tensors, &arena, c, NULL, err);
    if (st == QC_OK && qc_backward_not_made(&tensors.shape))
        st = qc_error_set(err, QC_ERR_UNSUPPORTED, __FILE__, __LINE__, "%s",
                          qc_backward_not_made(&tensors.shape));
    if (st == QC_OK)
        st = write_moments(&task, path, err);
    qc_st_cursor_destroy(source.cursor);
    qc_arena_deinit(&arena);
    return st;
}

static qc_status run(char *const paths[3], const char *images, unsigned threads, uint64_t block,
                     qc_error *err)
{
    const char *model = paths[0], *ids = paths[1], *out = paths[2];
    qc_checkpoint *c = NULL;
    qc_forward *m = NULL;
    text t = {0};
    float *hidden = NULL;
    qc_forward_tools tools = {.threads = threads};
    qc_status st = qc_isa_select(&tools.isa, err);
    if (st == QC_OK)
        st = read_ids(&t, ids, err);
    if (st == QC_OK && images)
        st = qc_image_states_open(&tools.images, images, tools.isa, err);
    if (st == QC_OK)
        st = qc_checkpoint_open(&c, model, err);
    if (st == QC_OK)
        st = qc_experts_split(c, 0, err);
    if (st == QC_OK && block > 0)
        st = moments(c, &t, &tools, block, out, err);
    else if (st == QC_OK)
        st = qc_forward_open(&m, model, c, &tools, err);
    if (st == QC_OK && block == 0) {
        const qc_forward_batch b = {t.ids, t.lengths, t.windows, t.tokens, NULL};
        double start = seconds();
        hidden = malloc((size_t)(t.tokens * qc_forward_config_of(m)->hidden + 1) * sizeof *hidden);
        if (hidden)
            st = qc_forward_hidden(m, &b, hidden, err);
        else
            st = qc_error_set(err, QC_ERR_NOMEM, __FILE__, __LINE__, "out of memory");
        if (st == QC_OK)
            (void)fprintf(stderr, "hidden states: %" PRIu64 " tokens in %.3f s\n", t.tokens,
                          seconds() - start);
    }
    if (st == QC_OK && block == 0)
        st = write_logits(m, hidden, &t, out, err);
    free(hidden);
    free(t.ids);
    free(t.lengths);
    qc_forward_close(m);
    qc_checkpoint_close(c);
    qc_image_states_close(tools.images);
    return st;
}

int main(int argc, char **argv)
{
    unsigned threads = qc_cpu_count();
    const char *images = NULL;
    uint64_t block = 0;
    int first = 1;
    for (; argc - first > 3; first += 2) {
        if (strcmp(argv[first], "--threads") == 0)
            threads = (unsigned)strtoul(argv[first + 1], NULL, 10);
        else if (strcmp(argv[first], "--images") == 0)
            images = argv[first + 1];
        else if (strcmp(argv[first], "--moments") == 0)
            block = strtoull(argv[first + 1], NULL, 10);
        else
            break;
    }
    if (argc - first != 3) {
        (void)fprintf(
            stderr, "usage: logits_tool [--threads N] [--images FILE] [--moments BLOCK] MODEL IDS "
                    "OUT\n");
        return 2;
    }
    qc_error err = {0};
    qc_status st = run(argv + first, images, threads, block, &err);
    if (st != QC_OK)
        (void)fprintf(stderr, "logits_tool: %s\n", err.msg);
    return qc_status_exit_code(st);
}
