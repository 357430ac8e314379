/* A model whose head is tied to its embeddings, made one with two tensors. */
#include "formats/adapter.h"
#include "formats/checkpoint_internal.h"

#include "base/alloc.h"
#include "base/text.h"

#include <stdlib.h>
#include <string.h>

#define TIE "tie_word_embeddings"

/* Says in config.json that nothing is tied. text_config has the flag as well: engines that load the
 * language model alone look there. */
static qc_status set_config(qc_checkpoint *c, qc_error *err)
{
    qc_strbuf text;
    qc_json *was = c->config;
    char *was_text = c->config_text;
    if (!was)
        return QC_OK;
    qc_strbuf_init(&text, c->config_len + 256);
    qc_status st = qc_strbuf_add(&text, c->config_text, c->config_len, err);
    if (st == QC_OK)
        st = qc_json_splice(&text, NULL, TIE, "false", err);
    const qc_json_node *part = qc_json_get(qc_json_root(was), "text_config");
    if (st == QC_OK && part && qc_json_kind_of(part) == QC_JSON_OBJECT)
        st = qc_json_splice(&text, "text_config", TIE, "false", err);
    if (st == QC_OK)
        st = qc_checkpoint_take_config(c, &text, err);
    qc_strbuf_deinit(&text);
    if (st == QC_OK) {
        qc_json_destroy(was);
        qc_free(was_text);
    }
    return st;
}

qc_status qc_checkpoint_untie(qc_checkpoint *c, uint32_t table, const char *head, qc_error *err)
{
    qc_checkpoint_tensor *all = NULL;
    QC_TRY(set_config(c, err));
    if (!head)
        return QC_OK;
    QC_TRY(qc_arena_array(&c->arena, &all, c->tensor_count + 1, err));
    memcpy(all, c->tensors, c->tensor_count * sizeof *all);
    all[c->tensor_count] = all[table];
    QC_TRY(qc_arena_strdup(&c->arena, &all[c->tensor_count].name, head, err));
    c->tensor_bytes += all[table].bytes;
    c->tensors = all;
    qsort(all, ++c->tensor_count, sizeof *all, qc_by_text);
    return QC_OK;
}
