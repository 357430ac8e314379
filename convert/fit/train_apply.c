/* Writes settings as files that accelerate and DeepSpeed read. Sources: accelerate, "The command
 * line" (config_args, JSON form); DeepSpeed, "Configuration JSON". */
#include "base/alloc.h"
#include "convert/fit/train_plan.h"
#include "convert/term/json_members.h"
#include "formats/file_io.h"

#include <string.h>

static int is_deepspeed(const char *path)
{
    const char *slash = strrchr(path, '/');
    const char *name = slash ? slash + 1 : path;
    return strstr(name, "deepspeed") != NULL || strstr(name, "ds_") != NULL;
}

static void put_enabled(qc_json_writer *w, const char *key, int on)
{
    qc_jw_key(w, key);
    qc_jw_begin_object(w);
    qc_jm_bool(w, "enabled", on);
    qc_jw_end_object(w);
}

static void put_deepspeed(qc_json_writer *w, const qc_train_setting *s, const qc_train_place *place)
{
    const qc_train_options *t = &s->options;
    qc_jw_begin_object(w);
    qc_jm_u64(w, "train_micro_batch_size_per_gpu", s->micro_batch);
    qc_jm_u64(w, "gradient_accumulation_steps", s->accumulation);
    qc_jm_u64(w, "train_batch_size", s->micro_batch * s->accumulation * place->gpus);
    put_enabled(w, "bf16", t->precision == QC_PRECISION_BF16);
    put_enabled(w, "fp16", t->precision == QC_PRECISION_FP16);
    qc_jw_key(w, "zero_optimization");
    qc_jw_begin_object(w);
    qc_jm_u64(w, "stage", t->zero);
    qc_jw_end_object(w);
    qc_jw_end_object(w);
}

static void put_accelerate(qc_json_writer *w, const qc_train_setting *s,
                           const qc_train_place *place)
{
    static const char *const precision[] = {"bf16", "fp16", "no"};
    const qc_train_options *t = &s->options;
    qc_jw_begin_object(w);
    qc_jm_string(w, "compute_environment", "LOCAL_MACHINE");
    qc_jm_bool(w, "debug", 0);
    qc_jm_string(w, "distributed_type",
                 t->zero           ? "DEEPSPEED"
                 : place->gpus > 1 ? "MULTI_GPU"
                                   : "NO");
    if (t->zero) {
        qc_jw_key(w, "deepspeed_config");
        qc_jw_begin_object(w);
        qc_jm_u64(w, "zero_stage", t->zero);
        qc_jm_u64(w, "gradient_accumulation_steps", s->accumulation);
        qc_jm_string(w, "offload_optimizer_device", "none");
        qc_jm_string(w, "offload_param_device", "none");
        qc_jm_bool(w, "zero3_init_flag", t->zero == 3);
        qc_jm_bool(w, "zero3_save_16bit_model", t->zero == 3);
        qc_jw_end_object(w);
    }
    qc_jm_string(w, "downcast_bf16", "no");
    qc_jm_u64(w, "machine_rank", 0);
    qc_jm_string(w, "main_training_function", "main");
    qc_jm_string(w, "mixed_precision", precision[t->precision]);
    qc_jm_u64(w, "num_machines", 1);
    qc_jm_u64(w, "num_processes", place->gpus);
    qc_jm_bool(w, "use_cpu", 0);
    qc_jw_end_object(w);
}

qc_status qc_train_config(qc_strbuf *out, const char *path, const qc_train_setting *s,
                          const qc_train_place *place, qc_error *err)
{
    qc_json_writer w;
    qc_jw_init(&w, out, err);
    if (is_deepspeed(path))
        put_deepspeed(&w, s, place);
    else
        put_accelerate(&w, s, place);
    QC_TRY(qc_jw_finish(&w));
    return qc_strbuf_adds(out, "\n", err);
}

/* The old file is renamed first. If writing fails then, it is put back. */
qc_status qc_train_apply(const char *path, const qc_train_setting *s, const qc_train_place *place,
                         qc_error *err)
{
    qc_strbuf text, backup;
    qc_path_kind kind = QC_PATH_MISSING;
    uint64_t bytes = 0;
    qc_strbuf_init(&text, 1u << 20);
    qc_strbuf_init(&backup, 1u << 20);
    qc_status st = qc_train_config(&text, path, s, place, err);
    if (st == QC_OK)
        st = qc_strbuf_addf(&backup, err, "%s.backup", path);
    if (st == QC_OK)
        st = qc_path_stat(path, &kind, &bytes, err);
    if (st == QC_OK && kind != QC_PATH_MISSING && kind != QC_PATH_FILE)
        st = qc_error_set(err, QC_ERR_INPUT, __FILE__, __LINE__,
                          "%s: expected a file to write the configuration to", path);
    if (st == QC_OK && kind == QC_PATH_FILE)
        st = qc_path_rename(path, backup.data, err);
    if (st == QC_OK) {
        st = qc_file_put(path, text.data, text.len, err);
        if (st != QC_OK && kind == QC_PATH_FILE)
            (void)!qc_path_rename(backup.data, path, NULL);
    }
    qc_strbuf_deinit(&text);
    qc_strbuf_deinit(&backup);
    return st;
}
