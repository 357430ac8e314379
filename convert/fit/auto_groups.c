/* The groups of --to auto: which weights are chosen together, and what can hold them. */
#include "convert/fit/auto_internal.h"

#include "base/checked.h"
#include "convert/model/recipe_coded.h"
#include "convert/term/glob.h"
#include "formats/seekable.h"

#include <stdlib.h>
#include <string.h>

/* ---- groups ---- */

uint32_t qc_auto_resolve(const qc_segments *s, uint32_t segment)
{
    while (s->segments[segment].follows != QC_NO_SEGMENT)
        segment = s->segments[segment].follows;
    return segment;
}

/* Returns NULL where the weight is not coded. */
const qc_coded_weight *qc_auto_coded_of(const qc_chooser *c, uint32_t tensor)
{
    return c->recipe->entries[tensor].coded;
}

int qc_auto_is_choosable(const qc_chooser *c, uint32_t i)
{
    const qc_recipe_entry *e = &c->recipe->entries[i];
    const qc_checkpoint_tensor *t = &c->model->tensors[i];
    if (!qc_scheme_is_quantized(e->scheme))
        return 0;
    return e->coded ? !e->transpose : t->ndim == 2 && qc_dtype_is_quantizable(t->dtype);
}

/* "....experts.17.up_proj.weight" -> "....experts.*.up_proj.weight" */
static qc_status make_key(qc_chooser *c, const char *name, const char **key, qc_error *err)
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
    const qc_auto_member *a = pa, *b = pb;
    if (a->segment != b->segment)
        return a->segment < b->segment ? -1 : 1;
    int d = qc_natural_compare(a->key, b->key);
    d = d ? d : strcmp(a->key, b->key);
    return d ? d : (a->tensor > b->tensor) - (a->tensor < b->tensor);
}

/* "layer 12 mlp.up_proj": the segment, and the path within it. */
static qc_status name_group(qc_chooser *c, const qc_auto_member *m, const char **name,
                            qc_error *err)
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

qc_status qc_auto_find_groups(qc_chooser *c, qc_error *err)
{
    uint32_t count = (uint32_t)c->model->tensor_count;
    QC_TRY(qc_arena_array(c->scratch, &c->members, count, err));
    for (uint32_t i = 0; i < count; i++) {
        if (!qc_auto_is_choosable(c, i))
            continue;
        qc_auto_member *m = &c->members[c->member_count++];
        m->segment = qc_auto_resolve(c->segments, c->segments->of_tensor[i]);
        m->tensor = i;
        QC_TRY(make_key(
            c, qc_auto_coded_of(c, i) ? qc_auto_coded_of(c, i)->name : c->model->tensors[i].name,
            &m->key, err));
    }
    qsort(c->members, c->member_count, sizeof *c->members, compare_members);
    QC_TRY(qc_arena_array(c->scratch, &c->first_member, (size_t)c->member_count + 1, err));
    uint32_t groups = 0;
    for (uint32_t i = 0; i < c->member_count; i++) {
        const qc_auto_member *m = &c->members[i];
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

void qc_auto_shape_of(const qc_chooser *c, uint32_t tensor, uint64_t *rows, uint64_t *cols)
{
    const qc_checkpoint_tensor *t = &c->model->tensors[tensor];
    const qc_coded_weight *coded = qc_auto_coded_of(c, tensor);
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
static qc_dtype kept_dtype(const qc_chooser *c, uint32_t tensor)
{
    const qc_checkpoint_tensor *t = &c->model->tensors[tensor];
    if (qc_auto_coded_of(c, tensor) && !qc_coding_is_packed(qc_auto_coded_of(c, tensor)->coding))
        return t->dtype;
    if (c->options->recipe.rest == QC_REST_BF16)
        return QC_DTYPE_BF16;
    if (c->options->recipe.rest == QC_REST_FP16)
        return QC_DTYPE_F16;
    return qc_auto_coded_of(c, tensor) ? qc_auto_coded_of(c, tensor)->dtype
                                       : qc_checkpoint_dtype(t);
}

qc_candidate_form qc_auto_form_of(const qc_chooser *c, uint32_t g, unsigned k)
{
    qc_candidate_form form;
    (void)qc_candidate_step(&c->out->rows[k], c->out->groups[g].step[k], &form);
    return form;
}

uint64_t qc_auto_quantized_bytes(const qc_chooser *c, uint32_t tensor, qc_scheme scheme,
                                 uint32_t block_elems)
{
    const int nested = c->options->recipe.double_quant;
    const qc_coded_weight *w = qc_auto_coded_of(c, tensor);
    const qc_dtype dtype = qc_checkpoint_dtype(&c->model->tensors[tensor]);
    uint64_t dims[2];
    qc_auto_shape_of(c, tensor, &dims[0], &dims[1]);
    return w ? qc_plan_weight_bytes(w->dims, w->ndim, w->dtype, scheme, block_elems, nested)
             : qc_plan_weight_bytes(dims, 2, dtype, scheme, block_elems, nested);
}

static uint64_t kept_bytes(const qc_chooser *c, uint32_t tensor)
{
    uint64_t rows, cols;
    if (qc_auto_coded_of(c, tensor) && !qc_coding_is_packed(qc_auto_coded_of(c, tensor)->coding))
        return c->model->tensors[tensor].bytes + c->scale_bytes[tensor];
    qc_auto_shape_of(c, tensor, &rows, &cols);
    return rows * cols * (qc_dtype_bits(kept_dtype(c, tensor)) / 8);
}

/* Counts a group's weights, and the bytes of candidate k at the group's step. */
static void size_group(qc_chooser *c, uint32_t g, unsigned k)
{
    qc_auto_group *group = &c->out->groups[g];
    const qc_candidate_form form = qc_auto_form_of(c, g, k);
    uint64_t last_rows = 0, last_cols = 0, each = 0;
    qc_dtype last = QC_DTYPE_COUNT;
    group->bytes[k] = group->elems = 0;
    for (uint32_t i = c->first_member[g]; i < c->first_member[g + 1]; i++) {
        uint32_t tensor = c->members[i].tensor;
        qc_dtype dtype = qc_checkpoint_dtype(&c->model->tensors[tensor]);
        uint64_t rows, cols;
        qc_auto_shape_of(c, tensor, &rows, &cols);
        group->elems += rows * cols;
        if (k == QC_CANDIDATE_16BIT)
            each = kept_bytes(c, tensor);
        else if (rows != last_rows || cols != last_cols || dtype != last)
            each = qc_auto_quantized_bytes(c, tensor, form.scheme, form.block_elems);
        last_rows = rows;
        last_cols = cols;
        last = dtype;
        group->bytes[k] += each;
    }
}

/* Makes candidate k an entry's scheme, as the weight's group holds it. */
void qc_auto_set_entry(const qc_chooser *c, uint32_t g, qc_recipe_entry *e, uint32_t tensor,
                       unsigned k)
{
    const qc_candidate_form form = qc_auto_form_of(c, g, k);
    e->scheme = form.scheme;
    e->block_elems = form.block_elems;
    if (k != QC_CANDIDATE_16BIT)
        return;
    e->transpose = 0;
    e->out_dtype = kept_dtype(c, tensor);
    if (e->out_dtype != c->model->tensors[tensor].dtype)
        e->scheme = QC_SCHEME_CAST;
}

/* ---- what is chosen as one ---- */

static qc_auto_module module_of(const qc_chooser *c, uint32_t g)
{
    const qc_auto_member *first = &c->members[c->first_member[g]];
    const char *name = c->model->tensors[first->tensor].name;
    qc_auto_module m = {.segment = first->segment, .first = g, .name = name, .len = strlen(name)};
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
static uint32_t item_with(const qc_chooser *c, const qc_auto_module *m)
{
    for (uint32_t i = c->item_count; i > 0 && c->modules[i - 1].segment == m->segment; i--) {
        const qc_auto_module *other = &c->modules[i - 1];
        if (other->row == m->row && other->len == m->len &&
            memcmp(other->name, m->name, m->len) == 0)
            return i - 1;
    }
    return c->item_count;
}

qc_status qc_auto_find_items(qc_chooser *c, qc_error *err)
{
    const uint32_t groups = c->out->group_count;
    QC_TRY(qc_arena_array(c->scratch, &c->items, groups, err));
    QC_TRY(qc_arena_array(c->scratch, &c->item_of, groups, err));
    QC_TRY(qc_arena_array(c->scratch, &c->modules, groups, err));
    QC_TRY(qc_arena_array(c->scratch, &c->chosen, groups, err));
    for (uint32_t g = 0; g < groups; g++) {
        qc_auto_module m = module_of(c, g);
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

/* ---- candidates ---- */

/* Finds what each tensor takes on a card of --tp where the groups of `items` that lack candidate k
 * have it, at the step that is in the groups. */
static qc_status sum_shares(qc_chooser *c, unsigned k, uint64_t **bytes, qc_error *err)
{
    const qc_tp_split split = {qc_family_of(c->model), c->geometry, c->ranks};
    const uint32_t count = (uint32_t)c->model->tensor_count;
    qc_recipe trial = *c->recipe;
    qc_plan plan;
    QC_TRY(qc_arena_array(c->scratch, &trial.entries, count, err));
    memcpy(trial.entries, c->recipe->entries, count * sizeof *trial.entries);
    for (uint32_t g = 0; g < c->out->group_count; g++)
        for (uint32_t i = c->first_member[g]; i < c->first_member[g + 1]; i++)
            qc_auto_set_entry(c, g, &trial.entries[c->members[i].tensor], c->members[i].tensor, k);
    qc_recipe_settle_scales(&trial, c->model);
    QC_TRY(qc_plan_begin(&plan, c->scratch, c->model, &trial, c->call, c->options, err));
    return qc_tp_sum_tensors(bytes, c->scratch, &plan, c->segments, &split, k != QC_CANDIDATE_16BIT,
                             err);
}

/* Can candidate k hold a group at the group's step? bytes [tensor_count]: what each tensor then
 * takes on a card of --tp; NULL without it. */
static int can_hold(const qc_chooser *c, uint32_t g, unsigned k, const uint64_t *bytes)
{
    const qc_candidate_form form = qc_auto_form_of(c, g, k);
    const qc_scheme_row *row = &qc_schemes[form.scheme];
    const int head = c->recipe->entries[c->members[c->first_member[g]].tensor].role == QC_ROLE_HEAD;
    /* An output head counts for more than its relative error says: with 6 bits it costs 5 to 12% of
     * the KL divergence of a mixture of 5.1 bits, and with 8 less than 1%. Fewer have to be
     * named. */
    int can = !head || row->format != QC_FORMAT_COMPRESSED_TENSORS || row->bits == 0 ||
              row->bits >= 6 || c->options->recipe.schemes;
    /* vLLM 0.32 asserts that experts with 16-bit activations have groups, unless Marlin takes them:
     * not in 2, 3 and 5 to 7 bits, nor on sm_90, where Humming goes before it. So rows are what is
     * left when no groups divide them. */
    qc_candidate_form next;
    if (row->by_rows && row->activation_bits == 16 &&
        qc_candidate_step(&c->out->rows[k], c->out->groups[g].step[k] + 1u, &next))
        can &= qc_expert_stem(c->model->tensors[c->members[c->first_member[g]].tensor].name) == 0;
    for (uint32_t i = c->first_member[g]; can && i < c->first_member[g + 1]; i++) {
        const uint32_t tensor = c->members[i].tensor;
        uint64_t rows, cols;
        qc_auto_shape_of(c, tensor, &rows, &cols);
        can = !qc_candidate_obstacle(form, cols) && !(bytes && bytes[tensor] == QC_TP_UNSPLIT);
        /* Rows that have one scale have a limit of their own. */
        can &= !row->by_rows || cols <= QC_FRAME_MAX_BYTES;
    }
    return can;
}

/* Finds the first step at which candidate k holds all groups of each item, and what they take then.
 * Groups of items without such a step do not hold it. */
static qc_status find_steps(qc_chooser *c, unsigned k, qc_error *err)
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
        if (!qc_auto_is_choosable(c, i) && bytes[i] > 0)
            c->fixed[c->segments->of_tensor[i]] += bytes[i];
    return QC_OK;
}

/* Finds the candidates that each group may have, and the bytes of each. 16 bits are looked at even
 * if they are no candidate, as a group that has none stays so. */
qc_status qc_auto_find_candidates(qc_chooser *c, qc_error *err)
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
