#include "convert/run/side_files.h"

#include "base/alloc.h"
#include "base/text.h"
#include "convert/model/recipe_coded.h"
#include "convert/model/recipe_skip.h"
#include "formats/json_writer.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define SIDE_TEXT_MAX ((size_t)256 << 20)
#define QUANTIZATION  "quantization_config"
#define GROUPS_MAX    (QC_SCHEME_COUNT * 4) /* schemes by block sizes */

/* The dtype that transformers loads the rest in, where the weights are in F32. */
static const char *dtype_of_config(const qc_checkpoint *model)
{
    const char *said = qc_json_string_or(qc_config_get(model, "torch_dtype"), "float32");
    said = qc_json_string_or(qc_config_get(model, "dtype"), said);
    return strcmp(said, "bfloat16") == 0  ? "bfloat16"
           : strcmp(said, "float16") == 0 ? "float16"
                                          : "float32";
}

const char *qc_compute_dtype(const qc_plan *plan)
{
    if (plan->options->recipe.compute_dtype)
        return plan->options->recipe.compute_dtype;
    uint64_t f16 = 0, bf16 = 0, f32 = 0;
    for (uint32_t i = 0; i < plan->job_count; i++) {
        const qc_job *j = &plan->jobs[i];
        if (qc_schemes[j->scheme].bits != 4 || !qc_schemes[j->scheme].quant_type)
            continue;
        qc_dtype t = qc_job_state_of(j).source_dtype;
        f16 += t == QC_DTYPE_F16 ? j->elems : 0;
        bf16 += t == QC_DTYPE_BF16 ? j->elems : 0;
        f32 += t == QC_DTYPE_F32 ? j->elems : 0;
    }
    if (f32 > f16 && f32 > bf16)
        return dtype_of_config(plan->model);
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
    qc_json_put_u64(w, "block_size", j->form.block_elems); /* 0: row-wise */
    qc_json_put_bool(w, "double_quant", j->form.nested);
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
    return a->scheme == b->scheme && a->form.block_elems == b->form.block_elems;
}

static const char *format_word(const qc_job *j)
{
    return qc_schemes[j->scheme].role_tensors >> QC_ROLE_TENSOR_SHAPE & 1 ? "pack-quantized"
                                                                          : "int-quantized";
}

static void write_integers(qc_json_writer *w, const char *key, unsigned bits, const char *strategy,
                           int dynamic, uint32_t group)
{
    qc_json_begin_object(w, key);
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

static qc_status write_compressed_tensors_config(qc_json_writer *w, const qc_plan *plan,
                                                 qc_error *err)
{
    const qc_job *first[GROUPS_MAX] = {NULL};
    char name[32];
    uint32_t count = 0;
    int mixed = 0;
    for (uint32_t i = 0; i < plan->job_count; i++) {
        const qc_job *j = &plan->jobs[i];
        uint32_t g = 0;
        while (g < count && !same_group(first[g], j))
            g++;
        if (qc_scheme_is_quantized(j->scheme) && g == count && count < GROUPS_MAX)
            first[count++] = j;
    }
    qc_json_begin_object(w, "config_groups");
    for (uint32_t g = 0; g < count; g++) {
        const qc_job *j = first[g];
        const qc_scheme_row *row = &qc_schemes[j->scheme];
        mixed |= strcmp(format_word(j), format_word(first[0])) != 0;
        (void)snprintf(name, sizeof name, "group_%u", g);
        qc_json_begin_object(w, name);
        qc_json_put_text(w, "format", format_word(j));
        if (row->activation_bits == 8)
            write_integers(w, "input_activations", 8, "token", 1, 0);
        else
            qc_json_put_null(w, "input_activations");
        qc_json_put_null(w, "output_activations");
        QC_TRY(write_targets(w, plan, j, count == 1, err));
        write_integers(w, "weights", row->bits, j->form.block_elems ? "group" : "channel", 0,
                       j->form.block_elems);
        qc_json_end(w);
    }
    qc_json_end(w);
    qc_json_put_text(w, "format", mixed ? "mixed-precision" : format_word(first[0]));
    write_skip_modules(w, "ignore", plan);
    qc_json_put_null(w, "kv_cache_scheme");
    qc_json_put_text(w, "quant_method", "compressed-tensors");
    qc_json_put_text(w, "quantization_status", "compressed");
    return QC_OK;
}

/* As AutoAWQ 0.2.9 writes it. */
static void write_awq_config(qc_json_writer *w, const qc_plan *plan)
{
    qc_json_put_u64(w, "bits", 4);
    qc_json_put_u64(w, "group_size", first_quantized(plan)->form.block_elems);
    write_skip_modules(w, "modules_to_not_convert", plan);
    qc_json_put_text(w, "quant_method", "awq");
    qc_json_put_text(w, "version", "gemm");
    qc_json_put_bool(w, "zero_point", 1);
}

/* Sets quantization_config, or only the list of plain modules in the source's. */
static qc_status set_quantization(qc_strbuf *text, const qc_plan *plan, int only_list,
                                  qc_error *err)
{
    const qc_json_node *q = qc_json_get(qc_json_root(plan->model->config), QUANTIZATION);
    qc_strbuf value;
    qc_json_writer w;
    qc_status st = QC_OK;
    qc_strbuf_init(&value, SIDE_TEXT_MAX);
    qc_json_write_init(&w, &value, err);
    w.indent = only_list ? 2 : 1;
    if (only_list) {
        write_skip_modules(&w, NULL, plan);
    } else {
        qc_json_begin_object(&w, NULL);
        if (plan->own_form)
            write_own_config(&w, plan);
        else if (qc_schemes[first_quantized(plan)->scheme].format == QC_FORMAT_COMPRESSED_TENSORS)
            st = write_compressed_tensors_config(&w, plan, err);
        else if (qc_schemes[first_quantized(plan)->scheme].format == QC_FORMAT_AWQ)
            write_awq_config(&w, plan);
        else
            write_bnb_config(&w, plan);
        qc_json_end(&w);
    }
    if (st == QC_OK)
        st = qc_json_write_finish(&w);
    if (st == QC_OK)
        st = qc_json_splice(text, only_list ? QUANTIZATION : NULL,
                            only_list ? qc_skip_key(q) : QUANTIZATION, value.data, err);
    qc_strbuf_deinit(&value);
    return st;
}

/* Are the weights no longer those that the source's descriptions of a quantization speak of? */
static int changes_quantization(const qc_plan *plan)
{
    const qc_recipe *r = plan->recipe;
    return plan->weights_quantized > 0 ||
           ((r->input_is_quantized || r->input_is_coded) && !r->keeps_coded);
}

/* Files that describe how the source's weights are quantized. vLLM 0.32 takes the first four where
 * config.json says nothing (get_config_filenames of its quantization methods), SGLang the first and
 * quant_model_description.json (ModelSlim), TensorRT-LLM the first and quant_cfg.json. quanto,
 * llm-compressor, Pruna, ExLlamaV2 and Neural Compressor write the others. */
static const char *const descriptions[] = {
    "hf_quant_config.json",     "quant_config.json", "quantize_config.json",
    "quantization_config.json", "quant_cfg.json",    "quant_model_description.json",
    "quanto_qmap.json",         "recipe.yaml",       "smash_config.json",
    "measurement.json",         "job_new.json",      "qconfig.json",
};

static int describes_quantization(const char *path)
{
    for (size_t i = 0; i < sizeof descriptions / sizeof *descriptions; i++)
        if (strcmp(path, descriptions[i]) == 0)
            return 1;
    return 0;
}

qc_status qc_config_make(qc_strbuf *out, const qc_plan *plan, qc_error *err)
{
    const qc_checkpoint *m = plan->model;
    const qc_json_node *root = qc_json_root(m->config);
    const qc_json_node *text_config = qc_json_get(root, "text_config");
    const int changes = changes_quantization(plan);
    QC_TRY(qc_strbuf_add(out, m->config_text, m->config_len, err));
    if (plan->weights_quantized > 0)
        QC_TRY(set_quantization(out, plan, 0, err));
    else if (changes)
        QC_TRY(qc_json_splice(out, NULL, QUANTIZATION, NULL, err));
    else if (plan->recipe->skip_count > 0 && !qc_to_quantizes(plan->options->recipe.to))
        QC_TRY(set_quantization(out, plan, 1, err));
    /* Engines read these, too: the first as older compressed-tensors wrote it. */
    if (changes && qc_json_get(root, "compression_config"))
        QC_TRY(qc_json_splice(out, NULL, "compression_config", NULL, err));
    if (changes && qc_json_get(text_config, QUANTIZATION))
        QC_TRY(qc_json_splice(out, "text_config", QUANTIZATION, NULL, err));
    /* The file that it names is not in the output. transformers leaves it out when it saves. */
    if (qc_json_get(root, "transformers_weights"))
        QC_TRY(qc_json_splice(out, NULL, "transformers_weights", NULL, err));
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
    /* No layers are left for multi-token prediction; text_config says how many, too. */
    static const char *const mtp_keys[] = {"num_nextn_predict_layers", "mtp_num_hidden_layers"};
    for (int i = 0; plan->recipe->mtp_dropped && i < 4; i++) {
        const char *in = i < 2 ? NULL : "text_config", *key = mtp_keys[i % 2];
        if (qc_json_get(in ? qc_json_get(root, in) : root, key))
            QC_TRY(qc_json_splice(out, in, key, "0", err));
    }
    return QC_OK;
}

qc_status qc_index_stage(qc_output_dir *d, qc_manifest_file *f, const char *shard,
                         qc_index_row_fn row, void *ctx, size_t count, uint64_t total_bytes,
                         qc_error *err)
{
    qc_text_file out = QC_TEXT_FILE_NONE;
    const char *path = NULL, *name = NULL;
    qc_json_writer w;
    qc_index_entry e;
    QC_TRY(qc_layout_index_name(&name, d->arena, shard, err));
    QC_TRY(qc_output_dir_stage(d, name, &path, err));
    qc_status st = QC_OK;
    QC_TRY_GOTO(st, done, qc_text_file_open(&out, path, err));
    qc_json_begin_text(&w, &out.text, err);
    qc_json_begin_object(&w, "metadata");
    qc_json_put_u64(&w, "total_size", total_bytes);
    qc_json_end(&w);
    qc_json_begin_object(&w, "weight_map");
    for (size_t i = 0; i < count; i++) {
        QC_TRY_GOTO(st, done, row(ctx, i, &e, err));
        qc_json_put_text(&w, e.name, e.file);
        if (w.st == QC_OK)
            w.st = qc_text_file_step(&out, err);
    }
    qc_json_end(&w);
    QC_TRY_GOTO(st, done, qc_json_end_text(&w));
    QC_TRY_GOTO(st, done, qc_text_file_finish(&out, err));
    *f = (qc_manifest_file){name, out.bytes, qc_text_file_digest(&out)};
done:
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

static qc_status stage(qc_output_dir *d, qc_manifest_file *f, const qc_plan *plan,
                       qc_side_kind kind, const char *device_map, qc_error *err)
{
    const char *from = NULL;
    qc_strbuf text;
    if (kind == QC_SIDE_INDEX)
        return stage_index(d, f, plan, err);
    if (kind == QC_SIDE_COPY) {
        QC_TRY(qc_path_join(d->arena, &from, plan->model->path, f->path, err));
        return qc_output_dir_copy(d, f->path, from, &f->bytes, &f->digest, err);
    }
    qc_strbuf_init(&text, SIDE_TEXT_MAX);
    qc_status st = kind == QC_SIDE_CONFIG
                       ? qc_config_make(&text, plan, err)
                       : qc_strbuf_add(&text, device_map, strlen(device_map), err);
    if (st == QC_OK) {
        f->bytes = text.len;
        f->digest = qc_digest_bytes(text.data, text.len);
        st = qc_output_dir_put(d, f->path, text.data, text.len, err);
    }
    qc_strbuf_deinit(&text);
    return st;
}

qc_status qc_side_files_list(qc_side_file **files, size_t *count, const qc_plan *plan,
                             qc_error *err)
{
    const qc_checkpoint *m = plan->model;
    qc_side_file *list = NULL;
    size_t n = 0;
    QC_TRY(qc_arena_alloc(plan->arena, &list, m->side_count + 3, sizeof *list, err));
    const int changes = changes_quantization(plan);
    for (size_t i = 0; i < m->side_count; i++) {
        if (changes && describes_quantization(m->side[i].path))
            continue; /* it speaks of other weights */
        if (!m->config || strcmp(m->side[i].path, QC_CONFIG_NAME) != 0)
            list[n++] = (qc_side_file){m->side[i].path, QC_SIDE_COPY};
    }
    if (m->config)
        list[n++] = (qc_side_file){QC_CONFIG_NAME, QC_SIDE_CONFIG};
    if (plan->layout.count > 1) {
        list[n].kind = QC_SIDE_INDEX;
        QC_TRY(
            qc_layout_index_name(&list[n++].name, plan->arena, plan->layout.shards[0].name, err));
    }
    if (plan->device_names)
        list[n++] = (qc_side_file){QC_DEVICE_MAP_NAME, QC_SIDE_DEVICE_MAP};
    if (n > 0)
        qsort(list, n, sizeof *list, qc_by_text);
    *files = list;
    *count = n;
    return QC_OK;
}

qc_status qc_side_files_stage(qc_output_dir *d, const qc_plan *plan, const char *device_map,
                              qc_manifest_file **files, size_t *count, qc_error *err)
{
    qc_side_file *side = NULL;
    QC_TRY(qc_side_files_list(&side, count, plan, err));
    QC_TRY(qc_arena_alloc(d->arena, files, *count, sizeof **files, err));
    for (size_t i = 0; i < *count; i++) {
        (*files)[i].path = side[i].name;
        QC_TRY(stage(d, &(*files)[i], plan, side[i].kind, device_map, err));
    }
    return QC_OK;
}
