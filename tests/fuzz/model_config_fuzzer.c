/* Any text as config.json: its geometry is read or refused in words, caches add up, and where the
 * tensors can be worked out they can be cut into segments. */
#include "base/alloc.h"
#include "convert/known/model_tensors.h"
#include "convert/model/geometry.h"
#include "convert/model/segments.h"
#include "fuzz_check.h"

#include <string.h>

#define MOST_TENSORS 20000u /* more is right, but slow */

static void cut(const qc_model_tensors *t, const qc_geometry *g, const char *text, size_t len)
{
    qc_checkpoint *c = NULL;
    qc_arena arena;
    qc_recipe recipe;
    qc_segments s;
    qc_recipe_options o = {.to = QC_TO_NF4, .double_quant = 1};
    if (qc_checkpoint_create_shapes(&c, "fuzz", text, len, t->rows, t->count, NULL) != QC_OK)
        return;
    qc_arena_init(&arena);
    if (qc_recipe_make(&recipe, &arena, c, &o, NULL) == QC_OK &&
        qc_segments_make(&s, &arena, c, &recipe, g, NULL) == QC_OK) {
        FUZZ_CHECK(s.tensor_count == t->count);
        for (uint32_t i = 0; i < s.tensor_count; i++)
            FUZZ_CHECK(s.of_tensor[i] < s.count);
    }
    qc_arena_deinit(&arena);
    qc_checkpoint_close(c);
}

const fuzz_limits fuzz_may_allocate = {64u << 20, 4096};

int fuzz_one(const uint8_t *data, size_t size)
{
    const char *text = (const char *)data;
    qc_json *doc = NULL;
    qc_arena arena;
    qc_geometry g;
    qc_error err = {0};
    qc_kv_use use = {.context = 8192, .batch = 3, .images = 1, .kv_bits = 4};
    if (qc_json_parse(&doc, text, size, QC_JSON_PYTHON, NULL) != QC_OK)
        return 0;
    qc_arena_init(&arena);
    qc_status st = qc_geometry_read(&g, &arena, doc, &err);
    FUZZ_CHECK(st == QC_OK || (st == QC_ERR_INPUT && err.msg[0]));
    if (st == QC_OK) {
        FUZZ_CHECK(g.layer_count <= 10000 && (g.layer_count == 0 || g.layers));
        qc_kv_use longer = use;
        longer.context++;
        for (uint32_t i = 0; i < g.layer_count; i++)
            FUZZ_CHECK(qc_layer_kv_bytes(&g, i, &longer) >= qc_layer_kv_bytes(&g, i, &use));
        FUZZ_CHECK(qc_kv_bytes_per_token(&g, &use) >= qc_kv_bytes_per_token(&g, &longer));
        qc_model_tensors t;
        if (g.layer_count * (16 + 3 * g.experts) <= MOST_TENSORS) {
            st = qc_model_tensors_make(&t, &arena, doc, (int)(size % 2), &err);
            FUZZ_CHECK(st == QC_OK || err.msg[0]);
            if (st == QC_OK)
                cut(&t, &g, text, size);
        }
    }
    qc_json_destroy(doc);
    qc_arena_deinit(&arena);
    return 0;
}
