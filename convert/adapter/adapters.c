/* Which tensors of a checkpoint the tensors of adapters belong to. */
#include "convert/adapter/adapters_internal.h"

#include "base/alloc.h"
#include "base/checked.h"
#include "base/text.h"
#include "convert/term/size_text.h"
#include "formats/checkpoint_internal.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

typedef struct {
    qc_checkpoint *c;
    qc_merge_set *set;
    const qc_merge_names *names;
    const qc_attached_adapter *of; /* the adapter that is being attached */
    int heads; /* only what belongs to a tied head is attached, or only the rest */
} attaching;

static void close_set(qc_checkpoint_changes *changes)
{
    qc_merge_set *set = (qc_merge_set *)(void *)changes;
    for (size_t i = 0; i < set->merge_count; i++)
        qc_merge_free(set->merges[i]);
    for (size_t i = 0; i < set->adapter_count; i++)
        qc_adapter_close(set->adapters[i].adapter);
    if (set->have_lock) {
        pthread_cond_destroy(&set->ready);
        pthread_mutex_destroy(&set->lock);
    }
    qc_free(set->merges);
    qc_free(set);
}

/* ---- a tensor ---- */

/* decodable: FP8 will do as well. */
static qc_status check_dtype(const attaching *a, const qc_checkpoint_tensor *t, int decodable,
                             qc_error *err)
{
    qc_dtype dtype = qc_checkpoint_dtype(t);
    if ((qc_dtype_is_quantizable(dtype) && dtype != QC_DTYPE_F64) ||
        (decodable && qc_dtype_is_fp8(dtype)))
        return QC_OK;
    QC_FAIL(err, QC_ERR_UNSUPPORTED,
            "%s: '%s' of %s is %s, and qconv merges adapters into F32, F16 and BF16%s; --to bf16 "
            "first makes such a model of one that is quantized",
            a->of->adapter->path, t->name, a->c->path, qc_dtype_name(dtype),
            decodable ? ", and plain ones into FP8" : "");
}

/* Makes t a tensor that is changed, if it is none yet. */
static qc_status change(const attaching *a, qc_checkpoint_tensor *t, qc_merge **out, qc_error *err)
{
    qc_merge *m = NULL;
    if (t->change) {
        *out = qc_merge_of(t);
        return QC_OK;
    }
    QC_TRY(qc_arena_array(&a->c->arena, &m, 1, err));
    m->change = (qc_tensor_change){.stored = *t,
                                   .decoded = qc_dtype_is_fp8(t->dtype),
                                   .read = qc_merge_read,
                                   .apply = qc_merge_apply};
    m->set = a->set;
    m->cols = t->ndim ? t->dims[t->ndim - 1] : 1;
    m->rows = 1;
    for (unsigned i = 0; i + 1 < t->ndim; i++)
        m->rows *= t->dims[i];
    a->set->merges[a->set->merge_count++] = m;
    t->change = &m->change;
    if (!m->change.decoded) {
        t->dtype = QC_DTYPE_F32;
        QC_TRY(qc_shape_bytes(t->dims, t->ndim, t->dtype, &t->bytes, err));
    }
    *out = m;
    return QC_OK;
}

static qc_status add_step(const attaching *a, qc_merge *m, const qc_merge_step *step, qc_error *err)
{
    qc_merge_step *s = NULL, **at = &m->steps;
    QC_TRY(qc_arena_array(&a->c->arena, &s, 1, err));
    *s = *step;
    for (; *at; at = &(*at)->next) {
        if (step->kind == QC_STEP_LOW_RANK && (*at)->kind == step->kind &&
            (*at)->adapter == step->adapter && (*at)->module->embedding == step->module->embedding)
            QC_FAIL(err, QC_ERR_INPUT, "%s: modules '%s' and '%s' are both '%s' of %s",
                    step->adapter->path, (*at)->module->module, step->module->module,
                    m->change.stored.name, a->c->path);
    }
    if (a->heads && step->kind == QC_STEP_WHOLE && m->steps && m->steps->adapter == step->adapter) {
        m->steps->whole = step->whole; /* peft copies both to the same place, the head later */
        return QC_OK;
    }
    if (step->kind == QC_STEP_WHOLE && m->steps)
        QC_FAIL(err, QC_ERR_INPUT,
                "%s: '%s' would take the place of '%s', which %s changes as well",
                step->adapter->path, qc_adapter_tensor_name(step->adapter, step->whole),
                m->change.stored.name, m->steps->adapter->path);
    *at = s;
    return QC_OK;
}

/* ---- the tensors of an adapter ---- */

static qc_status add_whole(attaching *a, const qc_adapter_whole *w, qc_error *err)
{
    const qc_adapter *adapter = a->of->adapter;
    const qc_checkpoint_tensor *mine = &adapter->weights->tensors[w->tensor];
    qc_merge_place place;
    qc_merge *m = NULL;
    char here[QC_SHAPE_TEXT_BYTES], there[QC_SHAPE_TEXT_BYTES];
    QC_TRY(qc_merge_find(a->names, adapter, w->name, w->tensor, &place, err));
    qc_checkpoint_tensor *t = place.t;
    if (place.head != a->heads)
        return QC_OK;
    if (t->ndim != mine->ndim || memcmp(t->dims, mine->dims, t->ndim * sizeof *t->dims) != 0)
        QC_FAIL(err, QC_ERR_SHAPE,
                "%s: '%s' is %s, and '%s' of %s is %s; where a vocabulary was extended, save the "
                "model with it first",
                adapter->path, mine->name, qc_text_shape(here, mine->dims, mine->ndim), t->name,
                a->c->path, qc_text_shape(there, t->dims, t->ndim));
    if (!qc_dtype_is_quantizable(mine->dtype) || mine->dtype == QC_DTYPE_F64)
        QC_FAIL(err, QC_ERR_UNSUPPORTED, "%s: tensor '%s' is %s; expected F32, F16 or BF16",
                adapter->path, mine->name, qc_dtype_name(mine->dtype));
    QC_TRY(check_dtype(a, t, 0, err));
    QC_TRY(change(a, t, &m, err));
    return add_step(
        a, m, &(qc_merge_step){.kind = QC_STEP_WHOLE, .adapter = adapter, .whole = w->tensor}, err);
}

/* Is the product to be transposed? QC_ERR_SHAPE where it does not fit either way. */
static qc_status fit_weight(const attaching *a, const qc_adapter_module *mod,
                            const qc_checkpoint_tensor *t, int *turned, qc_error *err)
{
    const qc_adapter *adapter = a->of->adapter;
    const qc_checkpoint_tensor *ta = &adapter->weights->tensors[mod->a];
    const qc_checkpoint_tensor *tb = &adapter->weights->tensors[mod->b];
    uint64_t in = ta->dims[1], out = tb->dims[0];
    char text[QC_SHAPE_TEXT_BYTES];
    int plain_fits = t->ndim == 2 && t->dims[0] == out && t->dims[1] == in;
    int turned_fits = t->ndim == 2 && t->dims[0] == in && t->dims[1] == out;
    *turned = mod->embedding || (adapter->fan_in_fan_out && (turned_fits || !plain_fits));
    if (*turned ? turned_fits : plain_fits)
        return QC_OK;
    QC_FAIL(err, QC_ERR_SHAPE,
            "%s: module '%s' changes a weight of [%" PRIu64 ", %" PRIu64
            "], but '%s' of %s is %s%s",
            adapter->path, mod->module, *turned ? in : out, *turned ? out : in, t->name, a->c->path,
            qc_text_shape(text, t->dims, t->ndim),
            turned_fits ? ", which fits only if fan_in_fan_out is true" : "");
}

static qc_status check_vector(const attaching *a, uint32_t tensor, uint64_t outputs, qc_error *err)
{
    const qc_checkpoint_tensor *v = &a->of->adapter->weights->tensors[tensor];
    char text[QC_SHAPE_TEXT_BYTES];
    uint64_t n = 0;
    QC_TRY(qc_shape_elems(v->dims, v->ndim, &n, err));
    if (n != outputs)
        QC_FAIL(err, QC_ERR_SHAPE,
                "%s: tensor '%s' is %s; expected %" PRIu64 " elements, one for "
                "each output",
                a->of->adapter->path, v->name, qc_text_shape(text, v->dims, v->ndim), outputs);
    return QC_OK;
}

static qc_status add_bias(attaching *a, const qc_adapter_module *mod, double scale, qc_error *err)
{
    const char *name = NULL;
    qc_merge_place place;
    qc_merge *m = NULL;
    QC_TRY(qc_arena_printf(&a->c->arena, &name, err, "%s.bias", mod->module));
    QC_TRY(qc_merge_find(a->names, a->of->adapter, name, mod->bias, &place, err));
    qc_checkpoint_tensor *t = place.t;
    QC_TRY(check_dtype(a, t, 0, err));
    QC_TRY(check_vector(a, mod->bias, t->ndim == 1 ? t->dims[0] : 0, err));
    QC_TRY(change(a, t, &m, err));
    return add_step(
        a, m,
        &(qc_merge_step){
            .kind = QC_STEP_BIAS, .adapter = a->of->adapter, .module = mod, .scale = scale},
        err);
}

static qc_status add_module(attaching *a, const qc_adapter_module *mod, qc_error *err)
{
    int dora = mod->magnitude != QC_ADAPTER_NO_TENSOR;
    qc_merge_step step = {.kind = QC_STEP_LOW_RANK,
                          .adapter = a->of->adapter,
                          .module = mod,
                          .scale = mod->scaling * a->of->scale};
    const char *name = NULL;
    qc_merge_place place;
    qc_merge *m = NULL;
    QC_TRY(qc_arena_printf(&a->c->arena, &name, err, "%s.weight", mod->module));
    QC_TRY(qc_merge_find(a->names, a->of->adapter, name, mod->a, &place, err));
    qc_checkpoint_tensor *t = place.t;
    if (place.head != a->heads)
        return QC_OK;
    QC_TRY(check_dtype(a, t, !dora, err));
    QC_TRY(fit_weight(a, mod, t, &step.turned, err));
    if (dora)
        QC_TRY(check_vector(a, mod->magnitude, t->dims[step.turned], err));
    QC_TRY(change(a, t, &m, err));
    QC_TRY(add_step(a, m, &step, err));
    return mod->bias == QC_ADAPTER_NO_TENSOR ? QC_OK : add_bias(a, mod, step.scale, err);
}

/* Attaches an adapter. What it does to a tied head comes last, as peft has it. */
static qc_status attach(attaching *a, qc_attached_adapter *of, qc_error *err)
{
    const qc_adapter *adapter = of->adapter;
    a->of = of;
    of->weights = adapter->module_count;
    of->wholes = adapter->whole_count;
    for (size_t k = 0; k < adapter->module_count; k++)
        of->biases += adapter->modules[k].bias != QC_ADAPTER_NO_TENSOR;
    for (a->heads = 0; a->heads < 2; a->heads++)
        for (size_t k = 0; k < adapter->whole_count; k++)
            QC_TRY(add_whole(a, &adapter->wholes[k], err));
    for (a->heads = 0; a->heads < 2; a->heads++)
        for (size_t k = 0; k < adapter->module_count; k++)
            QC_TRY(add_module(a, &adapter->modules[k], err));
    return QC_OK;
}

/* ---- what is said of an adapter ---- */

/* Sets *zero if the product of every module is zero, because one of the two matrices is. */
static qc_status products_are_zero(const qc_adapter *a, qc_st_cursor *cursor, int *zero,
                                   qc_error *err)
{
    unsigned char part[4096];
    *zero = 1;
    for (size_t i = 0; i < 2 * a->module_count && *zero; i++) {
        const qc_adapter_module *m = &a->modules[i / 2];
        const qc_checkpoint_tensor *t = &a->weights->tensors[i % 2 ? m->a : m->b];
        for (uint64_t at = 0; at < t->bytes && *zero; at += sizeof part) {
            size_t n = (size_t)qc_min_u64(sizeof part, t->bytes - at);
            QC_TRY(qc_checkpoint_read(a->weights, cursor, t, at, part, n, err));
            for (size_t b = 0; b < n; b++)
                *zero &= part[b] == 0;
        }
        if (i % 2 == 0 && *zero)
            i++; /* the other matrix does not matter */
        else if (i % 2 == 0)
            *zero = 1; /* then perhaps the other one is */
    }
    return QC_OK;
}

/* Warns of an adapter that changes nothing, and of what peft would warn of. */
static qc_status judge(const qc_adapter *a, qc_checkpoint *c, qc_error *err)
{
    double most = 0;
    int plain = a->whole_count == 0, zero = 0;
    qc_st_cursor *cursor = NULL;
    if (a->unknown[0])
        QC_TRY(qc_checkpoint_warn(c, err,
                                  "%s: " QC_ADAPTER_CONFIG_NAME " has %s, which peft 0.21 does not "
                                  "know; it is ignored, as by peft",
                                  a->path, a->unknown));
    for (size_t i = 0; i < a->module_count; i++) {
        const qc_adapter_module *m = &a->modules[i];
        plain &= m->magnitude == QC_ADAPTER_NO_TENSOR && m->bias == QC_ADAPTER_NO_TENSOR;
        most = fmax(most, fabs(m->scaling));
    }
    if (!plain)
        return QC_OK;
    if (most == 0)
        return qc_checkpoint_warn(c, err, "%s: lora_alpha is 0, so the adapter changes nothing",
                                  a->path);
    QC_TRY(qc_st_cursor_create(&cursor, err));
    qc_status st = products_are_zero(a, cursor, &zero, err);
    qc_st_cursor_destroy(cursor);
    if (st == QC_OK && zero)
        st = qc_checkpoint_warn(c, err,
                                "%s: every product of its matrices is zero, so the adapter "
                                "changes nothing; it is as before the first step of a training",
                                a->path);
    return st;
}

qc_status qc_adapters_attach(qc_checkpoint *c, qc_loras loras, qc_error *err)
{
    qc_merge_set *set = NULL;
    qc_isa isa = QC_ISA_SCALAR;
    if (loras.count == 0)
        return QC_OK;
    QC_TRY(qc_isa_select(&isa, err));
    QC_TRY(qc_calloc(&set, 1, sizeof *set, err));
    set->changes.close = close_set;
    c->changes = &set->changes;
    set->ops = qc_quant_ops_for(isa);
    set->isa = isa;
    if (pthread_mutex_init(&set->lock, NULL) != 0 || pthread_cond_init(&set->ready, NULL) != 0)
        QC_FAIL(err, QC_ERR_NOMEM, "no lock could be made");
    set->have_lock = 1;
    QC_TRY(qc_arena_array(&c->arena, &set->adapters, loras.count, err));
    for (uint32_t i = 0; i < loras.count; i++) {
        qc_attached_adapter *of = &set->adapters[i];
        QC_TRY(qc_adapter_open(&of->adapter, loras.list[i].path, err));
        set->adapter_count++;
        of->scale = loras.list[i].scale;
        qc_checkpoint_leave_out_adapter(c, loras.list[i].path); /* it would count twice */
        QC_TRY(judge(of->adapter, c, err));
    }
    qc_merge_names names;
    attaching a = {.c = c, .set = set, .names = &names};
    QC_TRY(qc_merge_names_make(&names, c, set->adapters, set->adapter_count, err));
    QC_TRY(qc_calloc(&set->merges, c->tensor_count, sizeof *set->merges, err));
    for (uint32_t i = 0; i < loras.count; i++)
        QC_TRY(attach(&a, &set->adapters[i], err));
    return QC_OK;
}

const qc_attached_adapter *qc_adapters_of(const qc_checkpoint *c, size_t *count)
{
    const qc_merge_set *set = (const qc_merge_set *)(const void *)c->changes;
    *count = set ? set->adapter_count : 0;
    return set ? set->adapters : NULL;
}

qc_status qc_adapters_check(const qc_checkpoint *c, const qc_manifest *m, const char *out,
                            qc_error *err)
{
    size_t count = 0;
    const qc_attached_adapter *a = qc_adapters_of(c, &count);
    if (count < m->adapter_count)
        QC_FAIL(err, QC_ERR_USAGE,
                "%s has %zu adapter%s merged, and --lora gives %zu; the next one is '%s', times %g",
                out, m->adapter_count, qc_plural(m->adapter_count), count, m->adapters[count].name,
                m->adapters[count].scale);
    if (count > m->adapter_count)
        QC_FAIL(err, QC_ERR_USAGE,
                "%s has %zu adapter%s merged, and --lora gives %zu; leave out '%s'", out,
                m->adapter_count, qc_plural(m->adapter_count), count,
                a[m->adapter_count].adapter->path);
    for (size_t i = 0; i < count; i++) {
        const qc_manifest_adapter *was = &m->adapters[i];
        const qc_adapter *is = a[i].adapter;
        if (a[i].scale != was->scale)
            QC_FAIL(err, QC_ERR_USAGE,
                    "%s has '%s' merged with the scale %.17g, and --lora gives %.17g", out,
                    was->name, was->scale, a[i].scale);
        if (!qc_digest_equal(&is->config_digest, &was->config) ||
            !qc_digest_equal(&is->weights_digest, &was->weights))
            QC_FAIL(err, QC_ERR_CHECK,
                    "%s is not the adapter '%s' that %s has merged: its %s has another digest",
                    is->path, was->name, out,
                    qc_digest_equal(&is->config_digest, &was->config) ? "file of weights"
                                                                      : QC_ADAPTER_CONFIG_NAME);
    }
    return QC_OK;
}
