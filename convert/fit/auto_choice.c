#include "convert/fit/auto_choice.h"

#include "base/checked.h"
#include "convert/fit/auto_traces.h"
#include "convert/fit/auto_weigh.h"
#include "convert/fit/plugin_share.h"
#include "convert/fit/tensor_parallel.h"
#include "convert/hardware/hardware_choice.h"
#include "convert/model/recipe_coded.h"
#include "convert/term/glob.h"
#include "formats/seekable.h"
#include "quant/quant_ops.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* At most this many experts of a group are measured. */
#define SAMPLED_EXPERTS 8u
/* Only the fit knows the workspace exactly. Where it says that room is short, the room is narrowed
 * at most this many times. */
#define MAX_ROUNDS 12

typedef struct {
    uint32_t segment; /* its own, or the one that this one follows in the end */
    uint32_t tensor;
    const char *key; /* "model.layers.12.mlp.experts.*.up_proj" */
} member;

/* What engines hold as one module is chosen as one: a fused group, the experts of a layer, or
 * else a weight by itself. */
typedef struct {
    uint32_t segment;
    uint32_t first;          /* a group of the module */
    const qc_fused_row *row; /* NULL for experts, and for a weight by itself */
    const char *name;        /* names a weight of the first group */
    size_t len;              /* bytes of the module's path in that name, or of its parent's */
} module;

typedef struct {
    qc_auto_result *out;
    qc_arena *arena; /* owns the result */
    qc_arena *scratch;
    qc_recipe *recipe;
    const qc_call *call;
    const qc_checkpoint *model;
    const qc_segments *segments;
    const qc_geometry *geometry;
    qc_geometry share; /* with --tp: of one card, for the fit */
    uint32_t ranks;    /* the cards of --tp; 0: layers are placed whole */
    const qc_plan_options *options;
    qc_fit_options fit; /* with the devices to fill only */
    unsigned candidates;
    member *members;
    uint32_t member_count;
    uint32_t *first_member; /* per group, and one more at the end */
    uint32_t *item_of;      /* per group: its item, or UINT32_MAX */
    module *modules;        /* per item */
    qc_auto_item *items;
    uint32_t item_count;
    /* Per group and candidate: its bytes where it lies. With --tp they are those of a card, or
     * QC_TP_UNSPLIT. */
    uint64_t (*room)[QC_CANDIDATES];
    uint64_t *fixed;         /* per segment: bytes of what is not chosen, in the same way */
    uint64_t *fixed_largest; /* per segment: elements of the largest quantized weight in that */
    unsigned *chosen;        /* per item */
    uint64_t *scale_bytes;   /* per tensor: scales that are written if it is kept coded */
} chooser;

/* Do average bits decide, wherever the model will lie? */
static int by_bits(const chooser *c)
{
    return c->options->recipe.bits > 0;
}

/* ---- groups ---- */

static uint32_t resolve(const qc_segments *s, uint32_t segment)
{
    while (s->segments[segment].follows != QC_NO_SEGMENT)
        segment = s->segments[segment].follows;
    return segment;
}

/* Returns NULL where the weight is not coded. */
static const qc_coded_weight *coded_of(const chooser *c, uint32_t tensor)
{
    return c->recipe->entries[tensor].coded;
}

static int is_choosable(const chooser *c, uint32_t i)
{
    const qc_recipe_entry *e = &c->recipe->entries[i];
    const qc_checkpoint_tensor *t = &c->model->tensors[i];
    if (!qc_scheme_is_quantized(e->scheme))
        return 0;
    return e->coded ? !e->transpose : t->ndim == 2 && qc_dtype_is_quantizable(t->dtype);
}

/* "....experts.17.up_proj.weight" -> "....experts.*.up_proj.weight" */
static qc_status make_key(chooser *c, const char *name, const char **key, qc_error *err)
{
    static const char mark[] = "experts.";
    const char *at = strstr(name, mark);
    *key = name;
    if (!at)
        return QC_OK;
    at += sizeof mark - 1;
    size_t digits = strspn(at, "0123456789");
    if (digits == 0 || at[digits] != '.')
        return QC_OK;
    return qc_arena_printf(c->scratch, key, err, "%.*s*%s", (int)(at - name), name, at + digits);
}

static int compare_members(const void *pa, const void *pb)
{
    const member *a = pa, *b = pb;
    if (a->segment != b->segment)
        return a->segment < b->segment ? -1 : 1;
    int d = qc_natural_compare(a->key, b->key);
    d = d ? d : strcmp(a->key, b->key);
    return d ? d : (a->tensor > b->tensor) - (a->tensor < b->tensor);
}

/* "layer 12 mlp.up_proj": the segment, and the path within it. */
static qc_status name_group(chooser *c, const member *m, const char **name, qc_error *err)
{
    const qc_segment *s = &c->segments->segments[c->segments->of_tensor[m->tensor]];
    const char *path = m->key;
    size_t tail = sizeof ".weight" - 1, cut = 0;
    for (uint32_t i = 0; i < s->module_count; i++) {
        size_t len = strlen(s->modules[i]);
        if (len > cut && strncmp(path, s->modules[i], len) == 0 && path[len] == '.')
            cut = len + 1;
    }
    path += strncmp(path + cut, "weight", tail) == 0 ? 0 : cut;
    size_t len = strlen(path);
    if (len > tail && strcmp(path + len - tail, ".weight") == 0)
        len -= tail;
    return qc_arena_printf(c->arena, name, err, "%s %.*s", s->name, (int)len, path);
}

static qc_status find_groups(chooser *c, qc_error *err)
{
    uint32_t count = (uint32_t)c->model->tensor_count;
    QC_TRY(qc_arena_array(c->scratch, &c->members, count, err));
    for (uint32_t i = 0; i < count; i++) {
        if (!is_choosable(c, i))
            continue;
        member *m = &c->members[c->member_count++];
        m->segment = resolve(c->segments, c->segments->of_tensor[i]);
        m->tensor = i;
        QC_TRY(make_key(c, coded_of(c, i) ? coded_of(c, i)->name : c->model->tensors[i].name,
                        &m->key, err));
    }
    qsort(c->members, c->member_count, sizeof *c->members, compare_members);
    QC_TRY(qc_arena_array(c->scratch, &c->first_member, (size_t)c->member_count + 1, err));
    uint32_t groups = 0;
    for (uint32_t i = 0; i < c->member_count; i++) {
        const member *m = &c->members[i];
        if (i == 0 || m->segment != m[-1].segment || strcmp(m->key, m[-1].key) != 0)
            c->first_member[groups++] = i;
    }
    c->first_member[groups] = c->member_count;
    QC_TRY(qc_arena_array(c->arena, &c->out->groups, groups, err));
    c->out->group_count = groups;
    for (uint32_t g = 0; g < groups; g++)
        QC_TRY(name_group(c, &c->members[c->first_member[g]], &c->out->groups[g].name, err));
    return QC_OK;
}

static void shape_of(const chooser *c, uint32_t tensor, uint64_t *rows, uint64_t *cols)
{
    const qc_checkpoint_tensor *t = &c->model->tensors[tensor];
    const qc_coded_weight *coded = coded_of(c, tensor);
    if (coded) { /* a stack counts the rows of all experts */
        *rows = coded->dims[0] * (coded->ndim == 3 ? coded->dims[1] : 1);
        *cols = coded->dims[coded->ndim - 1];
        return;
    }
    int turned = c->recipe->entries[tensor].transpose;
    *rows = t->dims[turned ? 1 : 0];
    *cols = t->dims[turned ? 0 : 1];
}

/* The dtype in which a weight left in 16 bit is written: --rest casts it unless it stays coded. */
static qc_dtype kept_dtype(const chooser *c, uint32_t tensor)
{
    const qc_checkpoint_tensor *t = &c->model->tensors[tensor];
    if (coded_of(c, tensor) && !qc_coding_is_integer(coded_of(c, tensor)->coding))
        return t->dtype;
    if (c->options->recipe.rest == QC_REST_BF16)
        return QC_DTYPE_BF16;
    if (c->options->recipe.rest == QC_REST_FP16)
        return QC_DTYPE_F16;
    return coded_of(c, tensor) ? coded_of(c, tensor)->dtype : qc_checkpoint_dtype(t);
}

static qc_candidate_form form_of(const chooser *c, uint32_t g, unsigned k)
{
    qc_candidate_form form;
    (void)qc_candidate_step(&c->out->rows[k], c->out->groups[g].step[k], &form);
    return form;
}

static uint64_t quantized_bytes(const chooser *c, uint32_t tensor, qc_scheme scheme,
                                uint32_t block_elems)
{
    const int nested = c->options->recipe.double_quant;
    const qc_coded_weight *w = coded_of(c, tensor);
    const qc_dtype dtype = qc_checkpoint_dtype(&c->model->tensors[tensor]);
    uint64_t dims[2];
    shape_of(c, tensor, &dims[0], &dims[1]);
    return w ? qc_plan_weight_bytes(w->dims, w->ndim, w->dtype, scheme, block_elems, nested)
             : qc_plan_weight_bytes(dims, 2, dtype, scheme, block_elems, nested);
}

static uint64_t kept_bytes(const chooser *c, uint32_t tensor)
{
    uint64_t rows, cols;
    if (coded_of(c, tensor) && !qc_coding_is_integer(coded_of(c, tensor)->coding))
        return c->model->tensors[tensor].bytes + c->scale_bytes[tensor];
    shape_of(c, tensor, &rows, &cols);
    return rows * cols * (qc_dtype_bits(kept_dtype(c, tensor)) / 8);
}

/* Counts a group's weights, and the bytes of candidate k at the group's step. */
static void size_group(chooser *c, uint32_t g, unsigned k)
{
    qc_auto_group *group = &c->out->groups[g];
    const qc_candidate_form form = form_of(c, g, k);
    uint64_t last_rows = 0, last_cols = 0, each = 0;
    qc_dtype last = QC_DTYPE_COUNT;
    group->bytes[k] = group->elems = 0;
    for (uint32_t i = c->first_member[g]; i < c->first_member[g + 1]; i++) {
        uint32_t tensor = c->members[i].tensor;
        qc_dtype dtype = qc_checkpoint_dtype(&c->model->tensors[tensor]);
        uint64_t rows, cols;
        shape_of(c, tensor, &rows, &cols);
        group->elems += rows * cols;
        if (k == QC_CANDIDATE_16BIT)
            each = kept_bytes(c, tensor);
        else if (rows != last_rows || cols != last_cols || dtype != last)
            each = quantized_bytes(c, tensor, form.scheme, form.block_elems);
        last_rows = rows;
        last_cols = cols;
        last = dtype;
        group->bytes[k] += each;
    }
}

/* Makes candidate k an entry's scheme, as the weight's group holds it. */
static void set_entry(const chooser *c, uint32_t g, qc_recipe_entry *e, uint32_t tensor, unsigned k)
{
    const qc_candidate_form form = form_of(c, g, k);
    e->scheme = form.scheme;
    e->block_elems = form.block_elems;
    if (k != QC_CANDIDATE_16BIT)
        return;
    e->transpose = 0;
    e->out_dtype = kept_dtype(c, tensor);
    if (e->out_dtype != c->model->tensors[tensor].dtype)
        e->scheme = QC_SCHEME_CAST;
}

/* ---- errors ---- */

static void expect_group(chooser *c, uint32_t g)
{
    uint64_t rows, cols;
    shape_of(c, c->members[c->first_member[g]].tensor, &rows, &cols);
    for (unsigned k = 0; k < QC_CANDIDATES; k++)
        c->out->groups[g].rel_mse[k] =
            c->out->groups[g].holds & 1u << k
                ? qc_auto_normal_mse(form_of(c, g, k), cols, c->options->recipe.scale)
                : (double)NAN;
}

static uint32_t sampled_of(const chooser *c, uint32_t g)
{
    uint32_t n = c->first_member[g + 1] - c->first_member[g];
    return n < SAMPLED_EXPERTS ? n : SAMPLED_EXPERTS;
}

static qc_status measure_groups(chooser *c, qc_error *err)
{
    uint32_t count = 0, at = 0;
    for (uint32_t g = 0; g < c->out->group_count; g++)
        count += sampled_of(c, g);
    qc_auto_sample *samples = NULL;
    qc_candidate_form(*forms)[QC_CANDIDATES] = NULL;
    QC_TRY(qc_arena_array(c->scratch, &samples, count, err));
    QC_TRY(qc_arena_array(c->scratch, &forms, c->out->group_count, err));
    for (uint32_t g = 0; g < c->out->group_count; g++) {
        uint64_t n = c->first_member[g + 1] - c->first_member[g], k = sampled_of(c, g);
        for (unsigned candidate = 0; candidate < QC_CANDIDATES; candidate++)
            forms[g][candidate] = form_of(c, g, candidate);
        for (uint64_t i = 0; i < k; i++) {
            qc_auto_sample *s = &samples[at++];
            s->tensor = c->members[c->first_member[g] + (2 * i + 1) * n / (2 * k)].tensor;
            shape_of(c, s->tensor, &s->rows, &s->cols);
            s->transpose = c->recipe->entries[s->tensor].transpose;
            s->coded = coded_of(c, s->tensor);
            s->wanted = c->out->groups[g].holds;
            s->forms = forms[g];
        }
    }
    unsigned threads = c->call->threads ? c->call->threads : qc_cpu_count();
    QC_TRY(qc_auto_measure(samples, count, c->model, &c->options->recipe, threads, err));
    at = 0;
    for (uint32_t g = 0; g < c->out->group_count; at += sampled_of(c, g), g++) {
        qc_auto_group *group = &c->out->groups[g];
        if (qc_auto_combine(group->rel_mse, &group->mean_square, samples + at, sampled_of(c, g)))
            group->reason = "not finite";
        if (!(group->holds & 1u << QC_CANDIDATE_16BIT))
            group->rel_mse[QC_CANDIDATE_16BIT] = (double)NAN;
    }
    for (uint32_t i = 0; i < count; i++) {
        c->out->sampled_rows += samples[i].rows_read;
        c->out->sampled_bytes += samples[i].bytes_read;
    }
    return QC_OK;
}

/* Finds costs by second moments where they are at hand, else by --importance. Without either the
 * roles of weights decide. */
static qc_status weigh_groups(chooser *c, const qc_plan_subject *subject, qc_error *err)
{
    const char *path = c->options->recipe.importance;
    qc_plan plan;
    uint32_t *tensors = NULL;
    double *products = NULL;
    QC_TRY(qc_arena_array(c->scratch, &tensors, c->member_count, err));
    for (uint32_t i = 0; i < c->member_count; i++)
        tensors[i] = c->members[i].tensor;
    const qc_auto_weights w = {c->arena, &plan, c->first_member, tensors};
    if (path && !subject->has_weights)
        QC_FAIL(err, QC_ERR_USAGE,
                "--importance needs the weights of the model, whose errors it weighs, and only "
                "their shapes are known; download the model and give its folder");
    if (path && !subject->weigh) {
        QC_TRY(qc_auto_read_traces(&products, c->scratch, c->model, path, err));
        return qc_auto_weigh_by_traces(c->out, &w, products, err);
    }
    if (!subject->weigh)
        return QC_OK;
    QC_TRY(qc_plan_begin(&plan, c->scratch, c->model, c->recipe, c->call, c->options, err));
    return qc_auto_weigh_groups(c->out, &w, subject->weigh, err);
}

/* ---- what is chosen as one ---- */

static module module_of(const chooser *c, uint32_t g)
{
    const member *first = &c->members[c->first_member[g]];
    const char *name = c->model->tensors[first->tensor].name;
    module m = {.segment = first->segment, .first = g, .name = name, .len = strlen(name)};
    qc_fused_group fused;
    size_t stem = qc_expert_stem(name);
    if (c->options->recipe.split_fused)
        return m;
    if (stem > 0) {
        m.len = stem;
    } else if (qc_fused_group_of(&fused, c->model, first->tensor)) {
        m.row = fused.row;
        m.len = fused.parent_len;
    }
    return m;
}

/* Finds the item that a group belongs to. Segments come in order, so it is among the last ones. */
static uint32_t item_with(const chooser *c, const module *m)
{
    for (uint32_t i = c->item_count; i > 0 && c->modules[i - 1].segment == m->segment; i--) {
        const module *other = &c->modules[i - 1];
        if (other->row == m->row && other->len == m->len &&
            memcmp(other->name, m->name, m->len) == 0)
            return i - 1;
    }
    return c->item_count;
}

static qc_status find_items(chooser *c, qc_error *err)
{
    const uint32_t groups = c->out->group_count;
    QC_TRY(qc_arena_array(c->scratch, &c->items, groups, err));
    QC_TRY(qc_arena_array(c->scratch, &c->item_of, groups, err));
    QC_TRY(qc_arena_array(c->scratch, &c->modules, groups, err));
    QC_TRY(qc_arena_array(c->scratch, &c->chosen, groups, err));
    for (uint32_t g = 0; g < groups; g++) {
        module m = module_of(c, g);
        const uint32_t i = c->item_of[g] = item_with(c, &m);
        if (i < c->item_count) {
            c->out->together = 1;
            continue;
        }
        c->items[i] = (qc_auto_item){.segment = m.segment};
        c->modules[c->item_count++] = m;
    }
    return QC_OK;
}

/* Adds what a group costs and takes to its item. Costs that are NaN stay so. */
static void add_to_item(chooser *c, uint32_t g)
{
    qc_auto_group *group = &c->out->groups[g];
    qc_auto_item *it = &c->items[c->item_of[g]];
    for (unsigned k = 0; k < QC_CANDIDATES; k++) {
        if (!c->out->weighed || isnan(group->rel_mse[k]))
            group->cost[k] = group->importance * group->rel_mse[k];
        it->cost[k] += group->reason ? (double)NAN : group->cost[k];
        it->bytes[k] =
            qc_sat_add(it->bytes[k], by_bits(c) ? group->bytes[k] : c->room[g][k]);
    }
    group->chosen = QC_CANDIDATE_16BIT;
}

static int has_candidate(const double *errors)
{
    int has = 0;
    for (unsigned k = 0; k < QC_CANDIDATES; k++)
        has |= !isnan(errors[k]);
    return has;
}

/* Takes out the items that have no candidate, whose groups stay as they are. A group that has no
 * reason of its own gets one: another group of its module cannot be quantized, or no scheme can
 * hold the group's weights. */
static void drop_items(chooser *c, uint32_t *now)
{
    uint32_t kept = 0;
    for (uint32_t i = 0; i < c->item_count; i++) {
        int stays = has_candidate(c->items[i].cost);
        now[i] = stays ? kept : UINT32_MAX;
        c->items[kept] = c->items[i];
        c->modules[kept] = c->modules[i];
        kept += stays ? 1 : 0;
    }
    c->item_count = kept;
    for (uint32_t g = 0; g < c->out->group_count; g++) {
        qc_auto_group *group = &c->out->groups[g];
        c->item_of[g] = now[c->item_of[g]];
        if (c->item_of[g] != UINT32_MAX)
            continue;
        if (!group->reason)
            group->reason = has_candidate(group->rel_mse)
                                ? "loaded as one with what cannot be quantized"
                                : "beyond what the schemes can hold";
        group->rel_mse[QC_CANDIDATE_16BIT] = 0;
    }
}

/* ---- devices ---- */

/* Adds up what the segments take beside the weights whose schemes are chosen. */
static qc_status sum_fixed(chooser *c, qc_error *err)
{
    qc_plan plan;
    uint64_t *largest = NULL;
    QC_TRY(qc_plan_begin(&plan, c->scratch, c->model, c->recipe, c->call, c->options, err));
    QC_TRY(qc_fit_sum_segments(c->scratch, &plan, c->segments, &c->fixed, &largest, err));
    for (uint32_t i = 0; i < c->member_count; i++) {
        uint32_t tensor = c->members[i].tensor;
        const qc_recipe_entry *e = &c->recipe->entries[tensor];
        c->fixed[c->segments->of_tensor[tensor]] -=
            quantized_bytes(c, tensor, e->scheme, e->block_elems);
    }
    for (uint32_t i = 0; i < plan.job_count; i++) {
        const qc_job *j = &plan.jobs[i];
        uint32_t s = c->segments->of_tensor[j->source];
        if (qc_scheme_is_quantized(j->scheme) && !is_choosable(c, j->source) &&
            j->elems > c->fixed_largest[s])
            c->fixed_largest[s] = j->elems;
    }
    return QC_OK;
}

/* Finds what each tensor takes on a card of --tp where the groups of `items` that lack candidate k
 * have it, at the step that is in the groups. */
static qc_status sum_shares(chooser *c, unsigned k, uint64_t **bytes, qc_error *err)
{
    const qc_tp_split split = {qc_family_of(c->model), c->geometry, c->ranks};
    const uint32_t count = (uint32_t)c->model->tensor_count;
    qc_recipe trial = *c->recipe;
    qc_plan plan;
    QC_TRY(qc_arena_array(c->scratch, &trial.entries, count, err));
    memcpy(trial.entries, c->recipe->entries, count * sizeof *trial.entries);
    for (uint32_t g = 0; g < c->out->group_count; g++)
        for (uint32_t i = c->first_member[g]; i < c->first_member[g + 1]; i++)
            set_entry(c, g, &trial.entries[c->members[i].tensor], c->members[i].tensor, k);
    qc_recipe_settle_scales(&trial, c->model);
    QC_TRY(qc_plan_begin(&plan, c->scratch, c->model, &trial, c->call, c->options, err));
    return qc_tp_sum_tensors(bytes, c->scratch, &plan, c->segments, &split,
                             k != QC_CANDIDATE_16BIT, err);
}

/* Can candidate k hold a group at the group's step? bytes [tensor_count]: what each tensor then
 * takes on a card of --tp; NULL without it. */
static int can_hold(const chooser *c, uint32_t g, unsigned k, const uint64_t *bytes)
{
    const qc_candidate_form form = form_of(c, g, k);
    int can = 1;
    for (uint32_t i = c->first_member[g]; can && i < c->first_member[g + 1]; i++) {
        const uint32_t tensor = c->members[i].tensor;
        uint64_t rows, cols;
        shape_of(c, tensor, &rows, &cols);
        can = !qc_candidate_obstacle(form, cols) && !(bytes && bytes[tensor] == QC_TP_UNSPLIT);
        /* Rows that have one scale have a limit of their own. */
        can &= !qc_schemes[form.scheme].by_rows || cols <= QC_FRAME_MAX_BYTES;
    }
    return can;
}

/* Finds the first step at which candidate k holds all groups of each item, and what they take then.
 * Groups of items without such a step do not hold it. */
static qc_status find_steps(chooser *c, unsigned k, qc_error *err)
{
    const uint32_t groups = c->out->group_count;
    unsigned char *lacks = NULL; /* per item: it has no step so far; 2: this step does not do */
    uint64_t *bytes = NULL;
    uint32_t left = c->item_count;
    qc_candidate_form form;
    QC_TRY(qc_arena_array(c->scratch, &lacks, c->item_count, err));
    memset(lacks, 1, c->item_count);
    for (unsigned step = 0; left > 0 && qc_candidate_step(&c->out->rows[k], step, &form); step++) {
        for (uint32_t g = 0; g < groups; g++)
            if (lacks[c->item_of[g]])
                c->out->groups[g].step[k] = (unsigned char)step;
        if (c->ranks > 0)
            QC_TRY(sum_shares(c, k, &bytes, err));
        for (uint32_t g = 0; g < groups; g++)
            if (lacks[c->item_of[g]] && !can_hold(c, g, k, bytes))
                lacks[c->item_of[g]] = 2;
        left = 0;
        for (uint32_t i = 0; i < c->item_count; i++) {
            lacks[i] = lacks[i] == 2;
            left += lacks[i];
        }
        for (uint32_t g = 0; g < groups; g++) {
            qc_auto_group *group = &c->out->groups[g];
            if (lacks[c->item_of[g]] || group->holds & 1u << k)
                continue;
            group->holds |= 1u << k;
            size_group(c, g, k);
            c->room[g][k] = bytes ? 0 : group->bytes[k];
            for (uint32_t i = c->first_member[g]; bytes && i < c->first_member[g + 1]; i++)
                c->room[g][k] = qc_sat_add(c->room[g][k], bytes[c->members[i].tensor]);
        }
    }
    /* What is not chosen has the same bytes with every candidate. */
    for (uint32_t i = 0; k == QC_CANDIDATE_16BIT && bytes && i < c->model->tensor_count; i++)
        if (!is_choosable(c, i) && bytes[i] > 0)
            c->fixed[c->segments->of_tensor[i]] += bytes[i];
    return QC_OK;
}

/* Finds the candidates that each group may have, and the bytes of each. 16 bits are looked at even
 * if they are no candidate, as a group that has none stays so. */
static qc_status find_candidates(chooser *c, qc_error *err)
{
    for (uint32_t g = 0; g < c->out->group_count; g++) {
        c->out->groups[g].weights = c->first_member[g + 1] - c->first_member[g];
        c->out->groups[g].importance = qc_auto_importance(c->members[c->first_member[g]].key);
    }
    for (unsigned k = 0; k < QC_CANDIDATES; k++)
        if (c->candidates & 1u << k || k == QC_CANDIDATE_16BIT)
            QC_TRY(find_steps(c, k, err));
    for (uint32_t g = 0; g < c->out->group_count; g++)
        c->out->groups[g].holds &= c->candidates;
    return QC_OK;
}

/* Fits a choice for every group on the devices that are filled. */
static qc_status fit_groups(const chooser *c, qc_fit *fit, qc_error *err)
{
    const qc_tp_split split = {qc_family_of(c->model), c->geometry, c->ranks};
    uint32_t n = c->segments->count;
    uint64_t *bytes = NULL, *largest = NULL;
    QC_TRY(qc_arena_array(c->scratch, &bytes, n, err));
    QC_TRY(qc_arena_array(c->scratch, &largest, n, err));
    memcpy(bytes, c->fixed, n * sizeof *bytes);
    memcpy(largest, c->fixed_largest, n * sizeof *largest);
    for (uint32_t g = 0; g < c->out->group_count; g++) {
        const qc_auto_group *group = &c->out->groups[g];
        uint32_t tensor = c->members[c->first_member[g]].tensor;
        uint32_t s = c->segments->of_tensor[tensor];
        bytes[s] += c->room[g][group->chosen];
        /* A stack is dequantized expert by expert, whether its form is its own or not. */
        const qc_coded_weight *coded = coded_of(c, tensor);
        int stack = c->ranks == 0 && coded && coded->coding == QC_CODING_MXFP4;
        uint64_t elems = group->elems / group->weights / (stack ? coded->dims[0] : 1);
        if (group->chosen != QC_CANDIDATE_16BIT || stack)
            largest[s] =
                qc_max_u64(largest[s], qc_plugin_elems(c->model->tensors[tensor].name, elems,
                                                       &split, c->options->recipe.format));
    }
    const qc_fit_load load = {c->segments, c->ranks > 0 ? &c->share : c->geometry, bytes, largest};
    return qc_fit_make(fit, c->scratch, &load, &c->fit, err);
}

static void choose_groups(chooser *c, const unsigned *chosen, unsigned uniform)
{
    for (uint32_t g = 0; g < c->out->group_count; g++) {
        if (c->item_of[g] != UINT32_MAX)
            c->out->groups[g].chosen = chosen ? chosen[c->item_of[g]] : uniform;
    }
}

/* Makes the task of the solver. The bytes of followers count in the segment that they follow, with
 * the larger of their workspaces. A workspace is that of a choice that quantizes all weights. */
static qc_status make_task(chooser *c, qc_auto_task *t, uint64_t **room, qc_error *err)
{
    uint32_t n = c->segments->count;
    uint64_t *fixed = NULL, *scratch = NULL;
    QC_TRY(qc_arena_array(c->scratch, &fixed, n, err));
    QC_TRY(qc_arena_array(c->scratch, &scratch, n, err));
    QC_TRY(qc_arena_array(c->scratch, room, c->fit.vram.count, err));
    qc_fit fit;
    choose_groups(c, NULL, 0);
    QC_TRY(fit_groups(c, &fit, err));
    for (uint32_t s = 0; s < n; s++) {
        uint32_t at = resolve(c->segments, s);
        fixed[at] += c->fixed[s] + fit.segment_kv[s];
        if (fit.segment_workspace[s] > scratch[at])
            scratch[at] = fit.segment_workspace[s];
    }
    for (uint32_t g = 0; g < c->out->group_count; g++) {
        if (c->item_of[g] == UINT32_MAX)
            fixed[c->members[c->first_member[g]].segment] += c->room[g][QC_CANDIDATE_16BIT];
    }
    for (uint32_t d = 0; d < c->fit.vram.count; d++) {
        uint64_t budget = fit.devices[d].budget_bytes;
        uint64_t context =
            c->fit.vram.devices[d].tier == QC_TIER_GPU ? c->options->fit.cuda_context_bytes : 0;
        (*room)[d] = budget > context ? budget - context : 0;
        if (c->ranks > 0 && (*room)[d] < (*room)[0])
            (*room)[0] = (*room)[d]; /* all cards hold the same: they are one device to fill */
    }
    *t = (qc_auto_task){.items = c->items,
                        .item_count = c->item_count,
                        .segment_count = n,
                        .fixed = fixed,
                        .scratch = scratch,
                        .room = *room,
                        .device_count = c->ranks > 0 ? 1 : c->fit.vram.count};
    return QC_OK;
}

/* Returns the average bits of all items' weights where each has the smallest of its candidates. */
static double least_bits(const chooser *c, double elems)
{
    double bytes = 0;
    for (uint32_t i = 0; i < c->item_count; i++) {
        uint64_t least = UINT64_MAX;
        for (unsigned k = 0; k < QC_CANDIDATES; k++)
            if (!isnan(c->items[i].cost[k]))
                least = qc_min_u64(least, c->items[i].bytes[k]);
        bytes += (double)least;
    }
    return elems > 0 ? bytes * 8 / elems : 0;
}

/* Solves for --bits: all weights that are chosen share their bytes, as on one device without
 * anything else. */
static qc_status solve_by_bits(chooser *c, qc_error *err)
{
    const double bits = c->options->recipe.bits;
    qc_auto_solution solution = {.chosen = c->chosen};
    uint64_t *fixed = NULL, room = 0;
    uint32_t cut[1];
    double elems = 0;
    QC_TRY(qc_arena_array(c->scratch, &fixed, c->segments->count, err));
    for (uint32_t g = 0; g < c->out->group_count; g++)
        if (c->item_of[g] != UINT32_MAX)
            elems += (double)c->out->groups[g].elems;
    room = (uint64_t)(bits * elems / 8);
    const qc_auto_task task = {.items = c->items,
                               .item_count = c->item_count,
                               .segment_count = c->segments->count,
                               .fixed = fixed,
                               .room = &room,
                               .device_count = 1};
    solution.cut = cut;
    QC_TRY(qc_auto_solve(&task, &solution, err));
    if (!solution.fits)
        QC_FAIL(err, QC_ERR_USAGE,
                "--bits %g is less than this model can have; expected %.3f bits, its smallest "
                "choice with these --schemes, to 16",
                bits, ceil(least_bits(c, elems) * 1000) / 1000);
    choose_groups(c, c->chosen, 0);
    c->out->fits = 1;
    c->out->predicted = solution.cost;
    c->out->bound = solution.bound;
    memcpy(c->out->uniform, solution.uniform, sizeof solution.uniform);
    memcpy(c->out->uniform_fits, solution.uniform_fits, sizeof solution.uniform_fits);
    return QC_OK;
}

/* Solves the task. The fit makes its own cuts and has the last word: if it is short of room, the
 * solver gets less. */
static qc_status solve_and_fit(chooser *c, qc_error *err)
{
    qc_auto_task task;
    qc_auto_solution solution = {.chosen = c->chosen};
    uint64_t *room = NULL;
    if (by_bits(c))
        return solve_by_bits(c, err);
    QC_TRY(qc_arena_array(c->scratch, &solution.cut, c->fit.vram.count, err));
    QC_TRY(make_task(c, &task, &room, err));
    for (int round = 0;; round++) {
        qc_fit fit;
        QC_TRY(qc_auto_solve(&task, &solution, err));
        if (round == 0)
            c->out->bound = solution.bound;
        choose_groups(c, c->chosen, 0);
        QC_TRY(fit_groups(c, &fit, err));
        c->out->fits = fit.fits;
        if (fit.fits || !solution.fits || round == MAX_ROUNDS)
            break;
        for (uint32_t d = 0; d < task.device_count; d++)
            room[d] = room[d] > fit.short_by_bytes ? room[d] - fit.short_by_bytes : 0;
    }
    c->out->predicted = solution.cost;
    /* The choice is never worse than a uniform scheme that fits, and here the fit says what
     * fits. */
    unsigned better = QC_CANDIDATES;
    for (unsigned k = 0; k < QC_CANDIDATES; k++) {
        qc_fit fit;
        c->out->uniform[k] = solution.uniform[k];
        if (isnan(solution.uniform[k]))
            continue;
        choose_groups(c, NULL, k);
        QC_TRY(fit_groups(c, &fit, err));
        c->out->uniform_fits[k] = fit.fits;
        if (fit.fits && (!c->out->fits || solution.uniform[k] < c->out->predicted)) {
            better = k;
            c->out->fits = 1;
            c->out->predicted = solution.uniform[k];
        }
    }
    choose_groups(c, better == QC_CANDIDATES ? c->chosen : NULL, better);
    if (!(c->out->bound <= c->out->predicted)) /* the solver had ruled out this uniform choice */
        c->out->bound = c->out->fits ? c->out->predicted : (double)NAN;
    return QC_OK;
}

/* ---- the recipe ---- */

static const char *why_of(const chooser *c, const qc_auto_group *group, int coded)
{
    if (group->chosen != QC_CANDIDATE_16BIT)
        return c->out->rows[group->chosen].why;
    if (group->reason)
        return coded ? "auto: as it is, not to be quantized" : "auto: 16 bit, not to be quantized";
    return coded ? "auto: as it is" : c->out->rows[QC_CANDIDATE_16BIT].why;
}

static void apply_choice(chooser *c)
{
    for (uint32_t g = 0; g < c->out->group_count; g++) {
        const qc_auto_group *group = &c->out->groups[g];
        unsigned k = group->chosen;
        c->out->count_chosen[k] += group->weights;
        c->out->bytes_chosen[k] += group->bytes[k];
        for (uint32_t i = c->first_member[g]; i < c->first_member[g + 1]; i++) {
            uint32_t tensor = c->members[i].tensor;
            qc_recipe_entry *e = &c->recipe->entries[tensor];
            set_entry(c, g, e, tensor, k);
            e->unasked = k == QC_CANDIDATE_16BIT && group->reason && !e->coded;
            e->why = why_of(c, group, e->coded && !qc_coding_is_integer(e->coded->coding));
        }
    }
    qc_recipe_settle_scales(c->recipe, c->model);
    int has[QC_SCHEME_COUNT] = {0}, schemes = 0, fp8 = 0;
    for (size_t i = 0; i < c->model->tensor_count; i++) {
        const qc_recipe_entry *e = &c->recipe->entries[i];
        schemes += qc_scheme_is_quantized(e->scheme) && !has[e->scheme];
        has[e->scheme] = 1;
        fp8 |= e->scheme == QC_SCHEME_KEEP && e->coded && e->coded->coding == QC_CODING_FP8;
    }
    c->out->mixed = schemes > 1 && c->options->recipe.format != QC_FORMAT_COMPRESSED_TENSORS;
    c->out->mixed_fp8 = fp8 && schemes > 0;
}

/* ---- what the choice does not say by itself ---- */

/* Leaves int8 out where a card of the budget does not run it, because what fills the GPUs has to
 * run on them. Weights move between devices while the cuts are sought, so one such card is
 * enough. */
static qc_status leave_out_int8(chooser *c, qc_error *err)
{
    const qc_card *card = NULL;
    for (uint32_t i = 0; i < c->fit.vram.gpu_count && !card; i++) {
        const qc_card *k = c->fit.vram.devices[i].card;
        if (k && !qc_sm_runs_int8(k->sm))
            card = k;
    }
    if (!card || c->options->recipe.schemes || (c->ranks > 0 && c->options->fit.plugin))
        return QC_OK;
    for (unsigned k = 0; k < QC_CANDIDATES; k++) {
        if (qc_schemes[c->out->rows[k].scheme].needs_int8_matmul)
            c->candidates &= ~(1u << k);
    }
    return qc_arena_printf(
        c->arena, &c->out->notes[c->out->note_count++], err,
        "int8 is left out because bitsandbytes has no int8 matmul for a %s (compute capability "
        "%u.%u, expected 7.5 or more); name int8 in --schemes to have it all the same",
        card->name, card->sm / 10, card->sm % 10);
}

/* Notes that the smallest choice spills. GPUs that are too small are no dead end when a tier lies
 * beside them, but then the size matters more than the precision. */
static qc_status note_spilling(chooser *c, qc_error *err)
{
    const qc_budget *b = &c->fit.vram;
    uint32_t tiers = c->options->fit.vram.count - b->count;
    if (c->out->fits || tiers == 0)
        return QC_OK;
    c->out->spills = 1;
    return qc_arena_printf(
        c->arena, &c->out->notes[c->out->note_count++], err,
        "the %s not hold even the smallest choice, so every weight gets that; a better one might "
        "fit with %s%s%s, but what lies there crosses the host link for every token",
        b->gpu_count == 0   ? "cpu does"
        : b->gpu_count == 1 ? "GPU does"
                            : "GPUs do",
        b->devices[b->count].name, tiers > 1 ? " and " : "",
        tiers > 1 ? b->devices[b->count + 1].name : "");
}

/* Can the errors of an earlier choice be taken over? They can if it measured the same groups, and
 * every scheme that may be taken. */
static int was_measured(const chooser *c, const qc_auto_result *before)
{
    int same = before && before->measured && before->rows == c->out->rows &&
               before->group_count == c->out->group_count;
    for (uint32_t g = 0; same && g < before->group_count; g++) {
        const qc_auto_group *then = &before->groups[g], *now = &c->out->groups[g];
        same = (now->holds & ~then->holds) == 0;
        for (unsigned k = 0; same && k < QC_CANDIDATES; k++)
            same = !(now->holds & 1u << k) || now->step[k] == then->step[k];
    }
    return same;
}

static void take_measured(chooser *c, const qc_auto_result *before)
{
    for (uint32_t g = 0; g < before->group_count; g++) {
        const qc_auto_group *then = &before->groups[g];
        qc_auto_group *now = &c->out->groups[g];
        for (unsigned k = 0; k < QC_CANDIDATES; k++) {
            now->rel_mse[k] = now->holds & 1u << k ? then->rel_mse[k] : (double)NAN;
            now->cost[k] = then->cost[k];
        }
        now->mean_square = then->mean_square;
        now->reason = then->reason;
    }
    c->out->weighed = before->weighed;
    c->out->sampled_rows = before->sampled_rows;
    c->out->sampled_bytes = before->sampled_bytes;
}

static qc_status choose_schemes(chooser *c, const qc_plan_subject *subject, qc_error *err)
{
    uint32_t *now = NULL;
    QC_TRY(find_groups(c, err));
    QC_TRY(qc_arena_array(c->scratch, &c->scale_bytes, c->model->tensor_count, err));
    for (size_t i = 0; i < c->model->tensor_count; i++) {
        uint32_t owner = c->recipe->entries[i].owner;
        if (owner != UINT32_MAX)
            c->scale_bytes[owner] += c->model->tensors[i].bytes;
    }
    const uint32_t groups = c->out->group_count;
    QC_TRY(qc_arena_array(c->scratch, &c->room, groups, err));
    QC_TRY(qc_arena_array(c->scratch, &c->fixed, c->segments->count, err));
    QC_TRY(qc_arena_array(c->scratch, &c->fixed_largest, c->segments->count, err));
    QC_TRY(qc_arena_array(c->scratch, &now, groups, err));
    QC_TRY(find_items(c, err));
    QC_TRY(find_candidates(c, err));
    for (uint32_t g = 0; g < groups && !subject->has_weights; g++)
        expect_group(c, g);
    if (subject->has_weights && was_measured(c, subject->measured))
        take_measured(c, subject->measured);
    else if (subject->has_weights)
        QC_TRY(measure_groups(c, err));
    QC_TRY(weigh_groups(c, subject, err));
    QC_TRY(c->ranks > 0 ? qc_tp_geometry(&c->share, c->scratch, c->geometry, c->ranks, err)
                        : sum_fixed(c, err));
    for (uint32_t g = 0; g < groups; g++)
        add_to_item(c, g);
    drop_items(c, now);
    QC_TRY(solve_and_fit(c, err));
    apply_choice(c);
    QC_TRY(note_spilling(c, err));
    return qc_recipe_list_skipped(c->recipe, c->arena, c->model, &c->options->recipe, err);
}

qc_status qc_auto_choose(qc_auto_result *out, qc_arena *arena, qc_recipe *recipe,
                         const qc_plan_subject *subject, const qc_segments *segments,
                         const qc_plan_options *options, qc_error *err)
{
    qc_arena scratch;
    chooser c = {.out = out,
                 .arena = arena,
                 .scratch = &scratch,
                 .recipe = recipe,
                 .call = subject->call,
                 .model = subject->model,
                 .segments = segments,
                 .geometry = subject->geometry,
                 .options = options,
                 .fit = options->fit,
                 .ranks = qc_tp_ranks(&options->fit)};
    memset(out, 0, sizeof *out);
    out->measured = subject->has_weights;
    if (c.fit.vram.count == 0 && !by_bits(&c))
        QC_FAIL(err, QC_ERR_USAGE,
                "--to auto needs --vram, which names the devices that the model has to fit, or "
                "--bits");
    out->rows = qc_candidates_of(&options->recipe);
    QC_TRY(qc_candidates_parse(&options->recipe, &c.candidates, err));
    c.fit.vram.count = c.fit.vram.gpu_count    ? c.fit.vram.gpu_count
                       : c.fit.vram.count > 0 ? 1
                                              : 0;
    QC_TRY(leave_out_int8(&c, err));
    out->candidates = c.candidates;
    qc_arena_init(&scratch);
    qc_status st = choose_schemes(&c, subject, err);
    qc_arena_deinit(&scratch);
    return st;
}
