/* The layers of a Llama-like decoder on a GPU. The interface is forward_decoder.h; the arithmetic
 * between two products is in kernels/cuda_llama.h.
 *
 *   hidden --norm--> halves --q, k, v--> heads (norm, rotation) --attention--> halves --o--+
 *      |                                                                                  |
 *      +<------------------------------------ add -----------------------------------------+
 *      +--norm--> halves --gate, up--> SwiGLU --> halves --down--> add
 *
 * All weights of a layer are on the device and are made ready once. Tokens go through the layer in
 * chunks of whole windows with up to QC_GPU_TOKENS tokens, so that memory does not grow with the
 * text. The activations of a chunk, the weights of a layer, the workspace and the head are one
 * allocation each, which is made anew only where a larger one is needed.
 *
 * Dense weights go to the device as they are and are rounded there to float16 with one exponent;
 * integers are dequantized to floats first, and are dense then. cuBLAS computes their products, or
 * qc_cuda_llama_dense where there is no cuBLAS. */
#include "base/alloc.h"
#include "base/checked.h"
#include "base/workers.h"
#include "convert/gpu/gpu_forward.h"
#include "convert/gpu/gpu_table.h"

#define LOGITS_BYTES ((uint64_t)128 << 20)

struct qc_gpu_decoder {
    qc_gpu_forward f;
    qc_gpu_memory weights, head_weights, head_room;
    qc_gpu_device_matrix head; /* rows 0: none */
    uint64_t head_tokens;
};

static void decoder_destroy(qc_gpu_decoder *d)
{
    if (!d)
        return;
    qc_gpu_forward_settle(&d->f);
    qc_gpu_drop(&d->weights);
    qc_gpu_drop(&d->head_weights);
    qc_gpu_drop(&d->head_room);
    qc_gpu_forward_deinit(&d->f);
    qc_free(d);
}

static qc_status decoder_create(qc_gpu_decoder **out, const qc_cuda_device *device,
                                const qc_forward_shape *shape, uint64_t longest, qc_error *err)
{
    QC_TRY(qc_calloc(out, 1, sizeof **out, err));
    qc_status st = qc_gpu_forward_init(&(*out)->f, device, shape, longest, err);
    if (st != QC_OK) {
        decoder_destroy(*out);
        *out = NULL;
    }
    return st;
}

/* After an error, what was started may still read the host's arrays, so this waits for it. Returns
 * st. */
static qc_status settled(qc_gpu_decoder *d, qc_status st)
{
    if (st != QC_OK)
        qc_gpu_forward_settle(&d->f);
    return st;
}

/* ---- a layer --------------------------------------------------------------------------------- */

static qc_status take_layer(qc_gpu_decoder *d, const qc_forward_weights *layer, uint64_t window,
                            qc_gpu_layer_run *r, qc_error *err)
{
    unsigned char *vectors = NULL;
    const qc_gpu_weights w = {layer->matrices, r->matrices, QC_LAYER_MATRICES, d->f.act.tokens,
                              qc_gpu_vectors_bytes(&d->f)};
    QC_TRY(qc_gpu_take_weights(&d->f, &w, &d->weights, &vectors, err));
    QC_TRY(qc_gpu_take_vectors(&d->f, layer, window, vectors, r, err));
    /* After this the caller may change or free its arrays. */
    return qc_cuda_stream_synchronize(d->f.stream, err);
}

static qc_status run_layer(qc_gpu_decoder *d, const qc_forward_weights *layer, uint64_t window,
                           float *hidden, const uint64_t *lengths, uint64_t windows, qc_error *err)
{
    qc_gpu_layer_run r = {0};
    QC_TRY(qc_gpu_check_windows(&d->f, lengths, windows, err));
    QC_TRY(qc_cuda_use(&d->f.device, err));
    QC_TRY(take_layer(d, layer, window, &r, err));
    for (uint64_t first = 0, next = 0; first < windows; first = next) {
        uint64_t rows = qc_gpu_next_windows(lengths, windows, d->f.act.tokens, &next);
        QC_TRY(qc_check_interrupted(err));
        QC_TRY(qc_gpu_step_windows(&d->f, &r, lengths + first, next - first, err));
        QC_TRY(qc_gpu_step_layer(&d->f, &r, hidden, err));
        QC_TRY(qc_cuda_stream_synchronize(d->f.stream, err));
        hidden += rows * d->f.form.hidden;
    }
    return QC_OK;
}

static qc_status decoder_run(qc_gpu_decoder *d, const qc_forward_weights *layer, uint64_t window,
                             float *hidden, const uint64_t *lengths, uint64_t windows,
                             qc_error *err)
{
    return settled(d, run_layer(d, layer, window, hidden, lengths, windows, err));
}

/* ---- the head -------------------------------------------------------------------------------- */

static qc_status take_head(qc_gpu_decoder *d, const qc_forward_matrix *head, qc_error *err)
{
    uint64_t row = qc_sat_mul(head->rows, sizeof(float));
    QC_TRY(qc_cuda_use(&d->f.device, err));
    d->head_tokens = row > 0 && row < LOGITS_BYTES ? LOGITS_BYTES / row : 1;
    d->head_tokens = qc_min_u64(d->head_tokens, QC_GPU_TOKENS);
    const qc_gpu_weights w = {.in = head, .out = &d->head, .count = 1, .tokens = d->head_tokens};
    QC_TRY(qc_gpu_take_weights(&d->f, &w, &d->head_weights, NULL, err));
    return qc_cuda_stream_synchronize(d->f.stream, err);
}

static qc_status run_logits(qc_gpu_decoder *d, const float *hidden, uint64_t n, float *out,
                            qc_error *err)
{
    const qc_gpu_device_matrix *w = &d->head;
    if (w->rows == 0)
        QC_FAIL(err, QC_ERR_USAGE, "logits were asked for before there was an output head");
    uint64_t most = d->head_tokens, k = w->cols;
    QC_TRY(qc_cuda_use(&d->f.device, err));
    for (int pass = 0; pass < 2; pass++) {
        qc_gpu_cutter c = {.base = pass ? d->head_room.base : NULL};
        float *states = qc_gpu_cut(&c, qc_gpu_bytes_of(most, k, sizeof(float)));
        uint16_t *x = qc_gpu_cut(&c, qc_gpu_bytes_of(most, k, sizeof(uint16_t)));
        int *exponent = qc_gpu_cut(&c, qc_gpu_bytes_of(most, 1, sizeof(int)));
        uint16_t *y = qc_gpu_cut(&c, qc_gpu_bytes_of(most, w->rows, sizeof(uint16_t)));
        float *logits = qc_gpu_cut(&c, qc_gpu_bytes_of(most, w->rows, sizeof(float)));
        if (pass == 0) {
            QC_TRY(qc_gpu_grow(&d->f, &d->head_room, c.used, err));
            continue;
        }
        for (uint64_t first = 0; first < n; first += most) {
            uint64_t rows = qc_min_u64(n - first, most);
            qc_cuda_halves halves = {.rows = rows, .cols = k, .half = x, .exponent = exponent};
            qc_cuda_product p;
            QC_TRY(qc_check_interrupted(err));
            QC_TRY(qc_cuda_to_device(states, hidden + first * k,
                                     (size_t)qc_gpu_bytes_of(rows, k, sizeof(float)), d->f.stream,
                                     err));
            QC_TRY(qc_cuda_llama_halves(states, NULL, 0.0f, &halves, d->f.stream, err));
            QC_TRY(qc_gpu_multiply(&d->f, w, x, exponent, rows, y, &p, err));
            QC_TRY(qc_cuda_llama_floats(&p, rows, w->rows, 0, logits, d->f.stream, err));
            QC_TRY(qc_cuda_to_host(out + first * w->rows, logits,
                                   (size_t)qc_gpu_bytes_of(rows, w->rows, sizeof(float)),
                                   d->f.stream, err));
            QC_TRY(qc_cuda_stream_synchronize(d->f.stream, err));
        }
    }
    return QC_OK;
}

static qc_status decoder_head(qc_gpu_decoder *d, const qc_forward_matrix *head, qc_error *err)
{
    qc_status st = settled(d, take_head(d, head, err));
    if (st != QC_OK)
        d->head.rows = 0;
    return st;
}

static qc_status decoder_logits(qc_gpu_decoder *d, const float *hidden, uint64_t n, float *out,
                                qc_error *err)
{
    return settled(d, run_logits(d, hidden, n, out, err));
}

const qc_gpu_llama qc_gpu_llama_table = {
    .create = decoder_create,
    .destroy = decoder_destroy,
    .layer = decoder_run,
    .head = decoder_head,
    .logits = decoder_logits,
};
