#include "convert/run/side_files.h"

#include "base/alloc.h"
#include "base/text.h"
#include "convert/model/recipe_skip.h"
#include "formats/json_writer.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define SIDE_TEXT_MAX ((size_t)256 << 20)
#define QUANTIZATION  "quantization_config"
#define GROUPS_MAX    (QC_SCHEME_COUNT * 4) /* schemes by block sizes */

const char *qc_compute_dtype(const qc_plan *plan)
{
    if (plan->options->recipe.compute_dtype)
        return plan->options->recipe.compute_dtype;
    uint64_t f16 = 0, bf16 = 0;
    for (uint32_t i = 0; i < plan->job_count; i++) {
        const qc_job *j = &plan->jobs[i];
        if (qc_schemes[j->scheme].bits != 4 || !qc_schemes[j->scheme].quant_type)
            continue;
        qc_dtype t = qc_job_state_of(j).source_dtype;
        f16 += t == QC_DTYPE_F16 ? j->elems : 0;
        bf16 += t == QC_DTYPE_BF16 ? j->elems : 0;
    }
    return f16 > bf16 ? "float16" : "bfloat16";
}

static void write_skip_modules(qc_json_writer *w, const char *key, const qc_plan *plan)
{
    qc_json_put_texts(w, key, plan->recipe->skip_modules, plan->recipe->skip_count);
}

/* Writes the members as transformers writes them, in its order (sorted). */
static void write_bnb_config(qc_json_writer *w, const qc_plan *plan)
{
    int four_bit = 0;
    for (uint32_t i = 0; i < plan->job_count; i++)
        four_bit |= qc_schemes[plan->jobs[i].scheme].bits == 4;
    int double_quant = four_bit && plan->options->recipe.double_quant;
    qc_json_put_bool(w, "_load_in_4bit", four_bit);
    qc_json_put_bool(w, "_load_in_8bit", !four_bit);
    qc_json_put_text(w, "bnb_4bit_compute_dtype", four_bit ? qc_compute_dtype(plan) : "float32");
    qc_json_put_text(w, "bnb_4bit_quant_storage", "uint8");
    qc_json_put_text(w, "bnb_4bit_quant_type", four_bit ? "nf4" : "fp4");
    qc_json_put_bool(w, "bnb_4bit_use_double_quant", double_quant);
    qc_json_put_bool(w, "llm_int8_enable_fp32_cpu_offload", 0);
    qc_json_put_bool(w, "llm_int8_has_fp16_weight", 0);
    write_skip_modules(w, "llm_int8_skip_modules", plan);
    qc_json_put_double(w, "llm_int8_threshold", 6.0);
    qc_json_put_bool(w, "load_in_4bit", four_bit);
    qc_json_put_bool(w, "load_in_8bit", !four_bit);
    qc_json_put_text(w, "quant_method", "bitsandbytes");
}

static const qc_job *first_quantized(const qc_plan *plan)
{
    uint32_t i = 0;
    while (!qc_scheme_is_quantized(plan->jobs[i].scheme))
        i++; /* a plan of an own form has one */
    return &plan->jobs[i];
}

/* bitsandbytes does not load these, so nothing here claims so. What stops a loader that ignores the
 * method is the shape of the codes (docs/format.md 3.6). */
static void write_own_config(qc_json_writer *w, const qc_plan *plan)
{
    const qc_json_node *q = qc_json_get(qc_json_root(plan->model->config), QUANTIZATION);
    const qc_json_node *size = qc_json_get(q, "weight_block_size");
    const qc_job *j = first_quantized(plan);
    uint64_t n = 0;
    qc_json_put_u64(w, "block_size", j->block_elems); /* 0: row-wise */
    qc_json_put_bool(w, "double_quant", j->nested);
    write_skip_modules(w, "modules_to_not_convert", plan);
    qc_json_put_text(w, "quant_method", "qconv");
    qc_json_put_text(w, "quant_type", plan->own_form);
    /* The reader of weights that stay in FP8 needs their block size, and the reader of those that
     * stay in GPTQ's form needs to know how their zero points are stored. */
    if (strstr(plan->own_form, "fp8") && size && qc_json_kind_of(size) == QC_JSON_ARRAY) {
        qc_json_begin_list(w, "weight_block_size");
        for (size = qc_json_first(size); size; size = qc_json_next(size)) {
            if (qc_json_as_u64(size, "weight_block_size", &n, NULL) == QC_OK)
                qc_json_put_u64(w, NULL, n); /* both are, or the recipe would have failed */
        }
        qc_json_end(w);
    }
    if (strstr(plan->own_form, "gptq"))
        qc_json_put_text(w, "checkpoint_format",
                         qc_json_string_or(qc_json_get(q, "checkpoint_format"), "gptq"));
}

/* ---- compressed-tensors ----
 *
 * Groups of modules with the same scheme and block size; each names its modules, or every Linear
 * where there is one group only. Readers look a module up in "ignore" first. */

static int same_group(const qc_job *a, const qc_job *b)
{
    return a->scheme == b->scheme && a->block_elems == b->block_elems;
}

/* The number of groups; first[g] is the first job of group g. */
static uint32_t find_groups(const qc_plan *plan, const qc_job **first)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < plan->job_count; i++) {
        const qc_job *j = &plan->jobs[i];
        uint32_t g = 0;
        while (g < count && !same_group(first[g], j))
            g++;
        if (qc_scheme_is_quantized(j->scheme) && g == count && count < GROUPS_MAX)
            first[count++] = j;
    }
    return count;
}

static const char *format_word(const qc_job *j)
{
    return qc_schemes[j->scheme].role_tensors >> QC_ROLE_TENSOR_SHAPE & 1 ? "pack-quantized"
                                                                          : "int-quantized";
}

static void write_integers(qc_json_writer *w, unsigned bits, const char *strategy, int dynamic,
                           uint32_t group)
{
    qc_json_put_bool(w, "dynamic", dynamic);
    if (group)
        qc_json_put_u64(w, "group_size", group);
    qc_json_put_u64(w, "num_bits", bits);
    qc_json_put_text(w, "strategy", strategy);
    qc_json_put_bool(w, "symmetric", 1);
    qc_json_put_text(w, "type", "int");
    qc_json_end(w);
}

static qc_status write_targets(qc_json_writer *w, const qc_plan *plan, const qc_job *of, int all,
                               qc_error *err)
{
    qc_json_begin_list(w, "targets");
    if (all)
        qc_json_put_text(w, NULL, "Linear");
    for (uint32_t i = 0; !all && i < plan->job_count; i++) {
        const char *name = plan->jobs[i].name, *module = NULL;
        if (!same_group(&plan->jobs[i], of))
            continue;
        size_t n = strlen(name) - (qc_ends_with(name, ".weight") ? strlen(".weight") : 0);
        QC_TRY(qc_arena_strndup(plan->arena, &module, name, n, err));
        qc_json_put_text(w, NULL, module);
    }
    qc_json_end(w);
    return QC_OK;
}

static qc_status write_group(qc_json_writer *w, const qc_plan *plan, const qc_job *of, int all,
                             qc_error *err)
{
    const qc_scheme_row *row = &qc_schemes[of->scheme];
    qc_json_put_text(w, "format", format_word(of));
    if (row->activation_bits == 8) {
        qc_json_begin_object(w, "input_activations");
        write_integers(w, 8, "token", 1, 0);
    } else {
        qc_json_put_text(w, "input_activations", NULL);
    }
    qc_json_put_text(w, "output_activations", NULL);
    QC_TRY(write_targets(w, plan, of, all, err));
    qc_json_begin_object(w, "weights");
    write_integers(w, row->bits, of->block_elems ? "group" : "channel", 0, of->block_elems);
    return QC_OK;
}

static qc_status write_compressed_tensors_config(qc_json_writer *w, const qc_plan *plan,
                                                 qc_error *err)
{
    const qc_job *first[GROUPS_MAX];
    char name[32];
    uint32_t count = find_groups(plan, first);
    int mixed = 0;
    for (uint32_t g = 1; g < count; g++)
        mixed |= strcmp(format_word(first[g]), format_word(first[0])) != 0;
    qc_json_begin_object(w, "config_groups");
    for (uint32_t g = 0; g < count; g++) {
        (void)snprintf(name, sizeof name, "group_%u", g);
        qc_json_begin_object(w, name);
        QC_TRY(write_group(w, plan, first[g], count == 1, err));
        qc_json_end(w);
    }
    qc_json_end(w);
    qc_json_put_text(w, "format", mixed ? "mixed-precision" : format_word(first[0]));
    write_skip_modules(w, "ignore", plan);
    qc_json_put_text(w, "kv_cache_scheme", NULL);
    qc_json_put_text(w, "quant_method", "compressed-tensors");
    qc_json_put_text(w, "quantization_status", "compressed");
    return QC_OK;
}

/* Sets quantization_config, which lies one level deep. */
static qc_status set_quantization_config(qc_strbuf *text, const qc_plan *plan, qc_error *err)
{
    qc_strbuf value;
    qc_json_writer w;
    qc_status st = QC_OK;
    qc_strbuf_init(&value, SIDE_TEXT_MAX);
    qc_json_begin_text(&w, &value, err);
    w.indent = 1;
    if (plan->own_form)
        write_own_config(&w, plan);
    else if (qc_schemes[first_quantized(plan)->scheme].format == QC_FORMAT_COMPRESSED_TENSORS)
        st = write_compressed_tensors_config(&w, plan, err);
    else
        write_bnb_config(&w, plan);
    qc_json_end(&w);
    if (st == QC_OK)
        st = qc_json_write_finish(&w);
    if (st == QC_OK)
        st = qc_json_splice(text, NULL, QUANTIZATION, value.data, err);
    qc_strbuf_deinit(&value);
    return st;
}

/* Sets the recipe's list of plain modules in the quantization_config of the source. */
static qc_status set_skip_list(qc_strbuf *text, const qc_plan *plan, qc_error *err)
{
    const qc_json_node *q = qc_json_get(qc_json_root(plan->model->config), QUANTIZATION);
    qc_strbuf list;
    qc_json_writer w;
    qc_strbuf_init(&list, SIDE_TEXT_MAX);
    qc_json_write_init(&w, &list, err);
    w.indent = 2;
    write_skip_modules(&w, NULL, plan);
    qc_status st = qc_json_write_finish(&w);
    if (st == QC_OK)
        st = qc_json_splice(text, QUANTIZATION, qc_skip_key(q), list.data, err);
    qc_strbuf_deinit(&list);
    return st;
}

/* Sets the numbers of layers for multi-token prediction to 0, also in the text_config. */
static qc_status set_no_mtp(qc_strbuf *text, const qc_json_node *root, qc_error *err)
{
    static const char *const places[] = {NULL, "text_config"};
    static const char *const keys[] = {"num_nextn_predict_layers", "mtp_num_hidden_layers"};
    for (size_t i = 0; i < 4; i++) {
        const char *in = places[i / 2], *key = keys[i % 2];
        if (qc_json_get(in ? qc_json_get(root, in) : root, key))
            QC_TRY(qc_json_splice(text, in, key, "0", err));
    }
    return QC_OK;
}

qc_status qc_config_make(qc_strbuf *out, const qc_plan *plan, qc_error *err)
{
    const qc_checkpoint *m = plan->model;
    const qc_json_node *root = qc_json_root(m->config);
    QC_TRY(qc_strbuf_add(out, m->config_text, m->config_len, err));
    if (plan->weights_quantized > 0)
        QC_TRY(set_quantization_config(out, plan, err));
    else if ((plan->recipe->input_is_quantized || plan->recipe->input_is_coded) &&
             !plan->recipe->keeps_coded)
        QC_TRY(qc_json_splice(out, NULL, QUANTIZATION, NULL, err));
    else if (plan->recipe->skip_count > 0 && !qc_to_quantizes(plan->options->recipe.to))
        QC_TRY(set_skip_list(out, plan, err));
    /* The dtype that every floating tensor was asked to have. */
    const qc_recipe_options *o = &plan->options->recipe;
    const char *dtype = o->to == QC_TO_BF16 || (o->to != QC_TO_FP16 && o->rest == QC_REST_BF16)
                            ? "\"bfloat16\""
                        : o->to == QC_TO_FP16 || o->rest == QC_REST_FP16 ? "\"float16\""
                                                                         : NULL;
    static const char *const dtype_keys[] = {"torch_dtype", "dtype"};
    for (int i = 0; dtype && i < 2; i++)
        if (qc_json_get(root, dtype_keys[i]))
            QC_TRY(qc_json_splice(out, NULL, dtype_keys[i], dtype, err));
    return plan->recipe->mtp_dropped ? set_no_mtp(out, root, err) : QC_OK;
}

static qc_status write_index(qc_text_file *out, qc_index_row_fn row, void *ctx, size_t count,
                             uint64_t total_bytes, qc_error *err)
{
    qc_json_writer w;
    qc_index_entry e;
    qc_json_begin_text(&w, &out->text, err);
    qc_json_begin_object(&w, "metadata");
    qc_json_put_u64(&w, "total_size", total_bytes);
    qc_json_end(&w);
    qc_json_begin_object(&w, "weight_map");
    for (size_t i = 0; i < count; i++) {
        QC_TRY(row(ctx, i, &e, err));
        qc_json_put_text(&w, e.name, e.file);
        if (w.st == QC_OK)
            w.st = qc_text_file_step(out, err);
    }
    qc_json_end(&w);
    return qc_json_end_text(&w);
}

qc_status qc_index_stage(qc_output_dir *d, qc_manifest_file *f, const char *shard,
                         qc_index_row_fn row, void *ctx, size_t count, uint64_t total_bytes,
                         qc_error *err)
{
    qc_text_file out = QC_TEXT_FILE_NONE;
    const char *path = NULL, *name = NULL;
    QC_TRY(qc_layout_index_name(&name, d->arena, shard, err));
    QC_TRY(qc_output_dir_stage(d, name, &path, err));
    qc_status st = qc_text_file_open(&out, path, err);
    if (st == QC_OK)
        st = write_index(&out, row, ctx, count, total_bytes, err);
    if (st == QC_OK)
        st = qc_text_file_finish(&out, err);
    if (st == QC_OK)
        *f = (qc_manifest_file){name, out.bytes, qc_text_file_digest(&out)};
    qc_text_file_deinit(&out);
    return st;
}

typedef struct {
    const qc_plan *plan;
    uint32_t *order;
    qc_strbuf name;
} index_rows;

static qc_status index_row(void *ctx, size_t i, qc_index_entry *e, qc_error *err)
{
    index_rows *rows = ctx;
    const qc_out_tensor t = qc_plan_tensor(rows->plan, rows->order[i]);
    QC_TRY(qc_out_tensor_name(&rows->name, &t, err));
    *e = (qc_index_entry){rows->name.data, rows->plan->layout.shards[t.shard].name};
    return QC_OK;
}

static qc_status stage_index(qc_output_dir *d, qc_manifest_file *f, const qc_plan *plan,
                             qc_error *err)
{
    index_rows rows = {.plan = plan};
    QC_TRY(qc_malloc(&rows.order, plan->tensor_count * sizeof *rows.order, err));
    qc_strbuf_init(&rows.name, SIZE_MAX / 2);
    qc_out_tensors_by_name(qc_plan_tensors(plan), rows.order);
    qc_status st = qc_index_stage(d, f, plan->layout.shards[0].name, index_row, &rows,
                                  plan->tensor_count, plan->tensor_bytes, err);
    qc_strbuf_deinit(&rows.name);
    qc_free(rows.order);
    return st;
}

static qc_status put(qc_output_dir *d, qc_manifest_file *f, const char *name, const char *text,
                     size_t bytes, qc_error *err)
{
    f->path = name;
    f->bytes = bytes;
    f->digest = qc_digest_bytes(text, bytes);
    return qc_output_dir_put(d, name, text, bytes, err);
}

qc_status qc_side_file_names(const char ***names, size_t *count, qc_arena *arena,
                             const qc_plan *plan, qc_error *err)
{
    const qc_checkpoint *m = plan->model;
    size_t n = 0;
    QC_TRY(qc_arena_alloc(arena, names, m->side_count + 3, sizeof **names, err));
    for (size_t i = 0; i < m->side_count; i++) {
        if (!m->config || strcmp(m->side[i].path, QC_CONFIG_NAME) != 0)
            (*names)[n++] = m->side[i].path;
    }
    if (m->config)
        (*names)[n++] = QC_CONFIG_NAME;
    if (plan->layout.count > 1)
        QC_TRY(qc_layout_index_name(&(*names)[n++], arena, plan->layout.shards[0].name, err));
    if (plan->device_names)
        (*names)[n++] = QC_DEVICE_MAP_NAME;
    qc_output_sort_names(*names, n);
    *count = n;
    return QC_OK;
}

qc_status qc_side_files_stage(qc_output_dir *d, const qc_plan *plan, const char *device_map,
                              qc_manifest_file **files, size_t *count, qc_error *err)
{
    const qc_checkpoint *m = plan->model;
    qc_manifest_file *list = NULL;
    QC_TRY(qc_arena_alloc(d->arena, &list, m->side_count + 3, sizeof **files, err));
    size_t n = 0;
    qc_strbuf text;
    qc_strbuf_init(&text, SIDE_TEXT_MAX);
    qc_status st = QC_OK;
    for (size_t i = 0; st == QC_OK && i < m->side_count; i++) {
        const char *from = NULL;
        const char *name = m->side[i].path;
        if (m->config && strcmp(name, QC_CONFIG_NAME) == 0)
            continue;
        st = qc_path_join(d->arena, &from, m->path, name, err);
        list[n].path = name;
        if (st == QC_OK)
            st = qc_output_dir_copy(d, name, from, &list[n].bytes, &list[n].digest, err);
        n++;
    }
    if (st == QC_OK && m->config) {
        st = qc_config_make(&text, plan, err);
        if (st == QC_OK)
            st = put(d, &list[n++], QC_CONFIG_NAME, text.data, text.len, err);
    }
    qc_strbuf_deinit(&text);
    if (st == QC_OK && plan->layout.count > 1)
        st = stage_index(d, &list[n++], plan, err);
    if (st == QC_OK && device_map)
        st = put(d, &list[n++], QC_DEVICE_MAP_NAME, device_map, strlen(device_map), err);
    QC_TRY(st); /* then the last may have no name yet */
    qsort(list, n, sizeof *list, qc_by_text);
    *files = list;
    *count = n;
    return QC_OK;
}
