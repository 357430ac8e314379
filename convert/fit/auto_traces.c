#include "convert/fit/auto_traces.h"

#include <math.h>
#include <string.h>

#define MAX_FILE_BYTES (64u << 20)

static qc_status read_pair(const qc_json_node *pair, double *product, qc_error *err)
{
    const char *name = qc_json_key(pair);
    double traces[2] = {0, 0};
    unsigned n = 0;
    QC_TRY(qc_json_expect(pair, QC_JSON_ARRAY, name, err));
    if (qc_json_count(pair) != 2)
        QC_FAIL(err, QC_ERR_INPUT, "'%s' has %zu numbers; expected two, the traces of H and G",
                name, qc_json_count(pair));
    for (const qc_json_node *t = qc_json_first(pair); t; t = qc_json_next(t), n++) {
        QC_TRY(qc_json_as_double(t, name, &traces[n], err));
        if (traces[n] < 0)
            QC_FAIL(err, QC_ERR_INPUT, "'%s' has the trace %g; expected 0 or more", name,
                    traces[n]);
    }
    *product = traces[0] * traces[1];
    if (!isfinite(*product))
        QC_FAIL(err, QC_ERR_INPUT, "'%s' has traces whose product is too large", name);
    return QC_OK;
}

static qc_status read_traces(double *products, const qc_checkpoint *model, const qc_json_node *root,
                             qc_error *err)
{
    const char *text = NULL;
    uint64_t number = 0;
    QC_TRY(qc_json_expect(root, QC_JSON_OBJECT, "the text", err));
    QC_TRY(qc_json_as_u64(qc_json_get(root, "format"), "format", &number, err));
    if (number != 1)
        QC_FAIL(err, QC_ERR_INPUT,
                "its format is %llu; expected 1, which this version of 'python -m qconv "
                "importance' writes",
                (unsigned long long)number);
    QC_TRY(qc_json_as_string(qc_json_get(root, "model"), "model", &text, err));
    QC_TRY(qc_json_as_string(qc_json_get(root, "text"), "text", &text, err));
    QC_TRY(qc_json_as_u64(qc_json_get(root, "tokens"), "tokens", &number, err));
    const qc_json_node *weights = qc_json_get(root, "weights");
    QC_TRY(qc_json_expect(weights, QC_JSON_OBJECT, "weights", err));
    for (const qc_json_node *w = qc_json_first(weights); w; w = qc_json_next(w)) {
        const char *name = qc_json_key(w);
        uint32_t tensor = qc_checkpoint_find_index(model, name);
        if (tensor == UINT32_MAX)
            tensor = qc_checkpoint_beside(model, name, strlen(name), "_blocks");
        if (tensor == UINT32_MAX)
            QC_FAIL(err, QC_ERR_INPUT,
                    "it is of another model, as this one has no weight '%s'; 'python -m qconv "
                    "importance MODEL' writes the file of MODEL",
                    name);
        QC_TRY(read_pair(w, &products[tensor], err));
    }
    return QC_OK;
}

qc_status qc_auto_read_traces(double **products, qc_arena *arena, const qc_checkpoint *model,
                              const char *path, qc_error *err)
{
    qc_json *doc = NULL;
    QC_TRY(qc_arena_array(arena, products, model->tensor_count, err));
    for (size_t i = 0; i < model->tensor_count; i++)
        (*products)[i] = (double)NAN;
    QC_TRY(qc_json_read_file(&doc, path, "--importance ", MAX_FILE_BYTES, err));
    qc_status st = read_traces(*products, model, qc_json_root(doc), err);
    if (st != QC_OK)
        qc_error_prefix(err, "--importance %s", path);
    qc_json_destroy(doc);
    return st;
}
