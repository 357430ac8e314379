/* From names to segments.
 *
 *   order    names with '.' before every other byte: all that lies below a module is then one run
 *   places   per tensor: a region (vision tower), a layer of a stack, or loose
 *   loose    embeddings, norm, head by role and name; others by the module they name
 *   build    segments in the order of computing
 *   modules  the shortest prefixes that hold nothing of another segment
 *
 * The time is linear in the names. Sorting is needed only for names with a byte below '.', such as
 * '-'. */
#include "convert/model/segments.h"

#include "base/alloc.h"
#include "convert/families/config_fields.h"
#include "convert/families/type_table.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#define NONE       UINT32_MAX
#define MAX_STACKS 64u
#define MAX_DIGITS 9u

typedef enum {
    GROUP_EMBEDDING,
    GROUP_VISION,
    GROUP_BEFORE, /* encoder of an encoder-decoder */
    GROUP_MAIN,
    GROUP_EXTRA,
    GROUP_AFTER,
    GROUP_NORM,
    GROUP_HEAD,
    GROUP_UNKNOWN
} group;

/* Everything below one module: a layer, or a region. */
typedef struct {
    const char *name; /* a name below it */
    size_t len;       /* length of the module's path in that name */
    group group;
    uint32_t stack; /* NONE for a region */
    uint32_t number;
    uint32_t segment;
} unit;

typedef struct {
    const char *name;
    size_t len; /* "model.layers" */
    uint64_t bytes;
} stack;

typedef struct {
    qc_segments *out;
    qc_arena *arena;
    const qc_checkpoint *model;
    const qc_recipe *recipe;
    const qc_geometry *geometry;
    uint32_t count;
    const char **names; /* in order */
    uint32_t *order;    /* their tensors */
    uint32_t *unit_of;  /* in order; NONE for loose tensors */
    group *groups;      /* in order; for loose tensors */
    unit *units;
    uint32_t unit_count;
    stack stacks[MAX_STACKS];
    uint32_t stack_count, main_stack;
    uint32_t segment_of_group[GROUP_UNKNOWN];
} maker;

/* ---- order ---- */

static int byte_rank(char c)
{
    return c == '\0' ? 0 : (c == '.' ? 1 : (unsigned char)c + 1);
}

static int compare_paths(const char *a, const char *b)
{
    while (*a && *a == *b) {
        a++;
        b++;
    }
    return byte_rank(*a) - byte_rank(*b);
}

typedef struct {
    const char *name;
    uint32_t tensor;
} ordered;

static int compare_ordered(const void *pa, const void *pb)
{
    const ordered *a = pa, *b = pb;
    return compare_paths(a->name, b->name);
}

static qc_status put_in_order(maker *m, qc_error *err)
{
    int sorted = 1;
    QC_TRY(qc_arena_array(m->arena, &m->names, m->count, err));
    QC_TRY(qc_arena_array(m->arena, &m->order, m->count, err));
    for (uint32_t i = 0; i < m->count; i++) {
        m->names[i] = m->model->tensors[i].name;
        m->order[i] = i;
        sorted = sorted && (i == 0 || compare_paths(m->names[i - 1], m->names[i]) < 0);
    }
    ordered *rows = NULL;
    if (sorted)
        return QC_OK;
    QC_TRY(qc_calloc(&rows, m->count, sizeof *rows, err));
    for (uint32_t i = 0; i < m->count; i++)
        rows[i] = (ordered){m->names[i], i};
    qsort(rows, m->count, sizeof *rows, compare_ordered);
    for (uint32_t i = 0; i < m->count; i++) {
        m->names[i] = rows[i].name;
        m->order[i] = rows[i].tensor;
    }
    qc_free(rows);
    return QC_OK;
}

/* Does the module at this path hold the name? */
static int is_below(const char *name, const char *path, size_t len)
{
    return strncmp(name, path, len) == 0 && (name[len] == '.' || name[len] == '\0');
}

/* ---- places ---- */

static const char vision_words[] =
    " vision_model vision_tower visual vision_encoder vision_embed_tokens vision_backbone "
    "multi_modal_projector mm_projector connector modality_projection resampler "
    "image_newline embed_vision audio_tower embed_audio vision_projection ";
static const char stack_words[] = " layers layer h blocks block decoder_layers ";

static uint32_t find_stack(maker *m, const char *name, size_t len)
{
    for (uint32_t i = m->stack_count; i-- > 0;) {
        if (m->stacks[i].len == len && memcmp(m->stacks[i].name, name, len) == 0)
            return i;
    }
    if (m->stack_count == MAX_STACKS)
        return NONE;
    m->stacks[m->stack_count] = (stack){name, len, 0};
    return m->stack_count++;
}

/* Reads a layer's number. Returns NONE if the digits are not how a list is numbered. */
static uint32_t layer_number(const char *digits, size_t len)
{
    uint32_t n = 0;
    if (len == 0 || len > MAX_DIGITS || (digits[0] == '0' && len > 1))
        return NONE;
    for (size_t i = 0; i < len; i++) {
        if (digits[i] < '0' || digits[i] > '9')
            return NONE;
        n = n * 10 + (uint32_t)(digits[i] - '0');
    }
    return n;
}

/* Finds the first component that says where a name belongs. Returns 0 if none does. */
static int find_place(maker *m, const char *name, unit *u)
{
    size_t word = 0, word_len = 0;
    for (size_t at = 0;;) {
        size_t len = strcspn(name + at, ".");
        uint32_t number = layer_number(name + at, len);
        *u = (unit){.name = name, .len = at + len, .stack = NONE, .segment = NONE};
        if (qc_config_part_in(name + at, len, vision_words)) {
            u->group = GROUP_VISION;
            return 1;
        }
        if (qc_config_part_in(name + at, len, " mtp ")) {
            u->group = GROUP_EXTRA;
            return 1;
        }
        if (number != NONE && qc_config_part_in(name + word, word_len, stack_words)) {
            u->group = GROUP_MAIN;
            u->number = number;
            u->stack = find_stack(m, name, at - 1);
            return u->stack != NONE;
        }
        if (name[at + len] == '\0')
            return 0;
        word = at;
        word_len = len;
        at += len + 1;
    }
}

static qc_status find_places(maker *m, qc_error *err)
{
    QC_TRY(qc_arena_array(m->arena, &m->unit_of, m->count, err));
    for (uint32_t i = 0; i < m->count; i++) {
        const unit *last = m->unit_count ? &m->units[m->unit_count - 1] : NULL;
        m->unit_of[i] = NONE;
        if (!last || !is_below(m->names[i], last->name, last->len)) {
            unit u;
            if (!find_place(m, m->names[i], &u))
                continue;
            QC_TRY(qc_arena_more(m->arena, &m->units, m->unit_count, err));
            last = &m->units[m->unit_count];
            m->units[m->unit_count++] = u;
        }
        m->unit_of[i] = m->unit_count - 1;
        if (last->stack != NONE)
            m->stacks[last->stack].bytes += m->model->tensors[m->order[i]].bytes;
    }
    return QC_OK;
}

static int stack_says(const stack *s, const char *three_letters)
{
    for (size_t k = 0; k + 3 <= s->len; k++) {
        if (memcmp(s->name + k, three_letters, 3) == 0)
            return 1;
    }
    return 0;
}

/* The stack with the most bytes is the model. In an encoder-decoder it is the decoder, however
 * small, because it holds the cache. Other stacks run before it (encoders) or after it. */
static void rank_stacks(maker *m)
{
    int best_decodes = 0;
    for (uint32_t i = 0; i < m->stack_count; i++) {
        int decodes = m->geometry->encoder_decoder && stack_says(&m->stacks[i], "dec") &&
                      !stack_says(&m->stacks[i], "enc");
        if (decodes < best_decodes || (decodes == best_decodes && i > 0 &&
                                       m->stacks[i].bytes <= m->stacks[m->main_stack].bytes))
            continue;
        m->main_stack = i;
        best_decodes = decodes;
    }
    for (uint32_t i = 0; i < m->unit_count; i++) {
        unit *u = &m->units[i];
        if (u->stack == NONE)
            continue;
        const stack *s = &m->stacks[u->stack];
        if (u->stack == m->main_stack) {
            int extra = m->geometry->layer_count != 0 && u->number >= m->geometry->layer_count;
            u->group = extra ? GROUP_EXTRA : GROUP_MAIN;
            continue;
        }
        u->group = stack_says(s, "enc") ? GROUP_BEFORE : GROUP_AFTER;
    }
}

/* ---- loose tensors ---- */

static group loose_group(const qc_recipe_entry *e, const char *name)
{
    static const char heads[] = " lm_head embed_out pooler cls classifier score qa_outputs head "
                                "proj_out output_projection vocab_projector vocab_transform ";
    static const char tables[] = " wte wpe position_ids token_type_ids ";
    int norm = e->role == QC_ROLE_NORM;
    if (e->role == QC_ROLE_HEAD)
        return GROUP_HEAD;
    for (const char *p = name; *p;) {
        size_t len = strcspn(p, ".");
        if (qc_config_part_in(p, len, heads))
            return GROUP_HEAD;
        if (qc_config_part_in(p, len, tables))
            return GROUP_EMBEDDING;
        for (size_t k = 0; k + 3 <= len; k++) {
            if (memcmp(p + k, "emb", 3) == 0)
                return GROUP_EMBEDDING;
            norm |= k + 4 <= len && memcmp(p + k, "norm", 4) == 0;
        }
        norm |= qc_config_part_in(p, len, " ln_f ");
        p += len + (p[len] == '.');
    }
    if (e->role == QC_ROLE_EMBEDDING)
        return GROUP_EMBEDDING;
    return norm ? GROUP_NORM : GROUP_UNKNOWN;
}

static size_t parent_len(const char *name)
{
    const char *dot = strrchr(name, '.');
    return dot ? (size_t)(dot - name) : 0;
}

/* A loose tensor whose place is not known takes that of a neighbour in its own module. */
static group group_beside(const maker *m, uint32_t i, uint32_t neighbour)
{
    const char *name = m->names[i];
    size_t parent = parent_len(name);
    if (neighbour >= m->count || m->unit_of[neighbour] != NONE || parent == 0 ||
        !is_below(m->names[neighbour], name, parent))
        return GROUP_UNKNOWN;
    if (m->stack_count && is_below(m->stacks[m->main_stack].name, name, parent))
        return GROUP_UNKNOWN;
    return m->groups[neighbour];
}

static qc_status place_loose(maker *m, qc_error *err)
{
    QC_TRY(qc_arena_array(m->arena, &m->groups, m->count, err));
    for (uint32_t i = 0; i < m->count; i++) {
        m->groups[i] = GROUP_UNKNOWN;
        if (m->unit_of[i] == NONE)
            m->groups[i] = loose_group(&m->recipe->entries[m->order[i]], m->names[i]);
        if (m->unit_of[i] == NONE && m->groups[i] == GROUP_UNKNOWN && i > 0)
            m->groups[i] = group_beside(m, i, i - 1);
    }
    for (uint32_t i = m->count; i-- > 0;) {
        if (m->unit_of[i] == NONE && m->groups[i] == GROUP_UNKNOWN)
            m->groups[i] = group_beside(m, i, i + 1);
    }
    return QC_OK;
}

/* ---- segments ---- */

static qc_segment *add_segment(maker *m, qc_segment_kind kind, const char *name)
{
    qc_segment *s = &m->out->segments[m->out->count++];
    *s = (qc_segment){.kind = kind, .layer = UINT32_MAX, .name = name, .follows = QC_NO_SEGMENT};
    return s;
}

static void add_group(maker *m, group g, qc_segment_kind kind, const char *name)
{
    int there = 0;
    for (uint32_t i = 0; i < m->count && !there; i++)
        there = m->unit_of[i] == NONE && m->groups[i] == g;
    for (uint32_t i = 0; i < m->unit_count && !there; i++)
        there = m->units[i].stack == NONE && m->units[i].group == g;
    if (!there)
        return;
    m->segment_of_group[g] = m->out->count;
    (void)add_segment(m, kind, name);
}

static int compare_units(const void *pa, const void *pb)
{
    const unit *a = *(const unit *const *)pa, *b = *(const unit *const *)pb;
    if (a->group != b->group)
        return a->group < b->group ? -1 : 1;
    if (a->stack != b->stack)
        return a->stack < b->stack ? -1 : 1;
    return (a->number > b->number) - (a->number < b->number);
}

/* Adds one segment per unit of a stack, in the order of their numbers. */
static qc_status add_layers(maker *m, qc_error *err)
{
    unit **rows = NULL;
    uint32_t n = 0;
    QC_TRY(qc_arena_array(m->arena, &rows, m->unit_count, err));
    for (uint32_t i = 0; i < m->unit_count; i++) {
        if (m->units[i].stack != NONE)
            rows[n++] = &m->units[i];
    }
    if (n)
        qsort(rows, n, sizeof(unit *), compare_units);
    for (uint32_t i = 0; i < n; i++) {
        unit *u = rows[i];
        int own = u->stack == m->main_stack;
        const char *name = NULL;
        if (own)
            QC_TRY(qc_arena_printf(m->arena, &name, err, "layer %" PRIu32, u->number));
        else
            QC_TRY(qc_arena_strndup(m->arena, &name, u->name, u->len, err));
        u->segment = m->out->count;
        qc_segment *s =
            add_segment(m, u->group == GROUP_MAIN ? QC_SEGMENT_LAYER : QC_SEGMENT_EXTRA, name);
        if (own)
            s->layer = u->number;
    }
    return QC_OK;
}

static int head_is_tied(const maker *m)
{
    qc_config c;
    qc_config_open(&c, m->model->config);
    return qc_config_flag(&c, "tie_word_embeddings",
                          qc_family_is(qc_family_find(c.model_type), "TIED"));
}

static int has_head_weight(const maker *m)
{
    for (uint32_t i = 0; i < m->count; i++) {
        if (m->unit_of[i] == NONE && m->recipe->entries[m->order[i]].role == QC_ROLE_HEAD)
            return 1;
    }
    return 0;
}

static qc_status build(maker *m, qc_error *err)
{
    uint32_t most = m->unit_count + GROUP_UNKNOWN;
    QC_TRY(qc_arena_array(m->arena, &m->out->segments, most, err));
    for (unsigned g = 0; g < GROUP_UNKNOWN; g++)
        m->segment_of_group[g] = NONE;
    add_group(m, GROUP_EMBEDDING, QC_SEGMENT_EMBEDDING, "embeddings");
    /* Only one table is stored, under the head's name, so the embeddings have no tensor of their
     * own. */
    if (m->segment_of_group[GROUP_EMBEDDING] == NONE && m->geometry->decoder &&
        has_head_weight(m) && head_is_tied(m)) {
        m->segment_of_group[GROUP_EMBEDDING] = m->out->count;
        (void)add_segment(m, QC_SEGMENT_EMBEDDING, "embeddings");
    }
    add_group(m, GROUP_VISION, QC_SEGMENT_VISION, "vision");
    QC_TRY(add_layers(m, err));
    add_group(m, GROUP_EXTRA, QC_SEGMENT_EXTRA, "mtp");
    add_group(m, GROUP_NORM, QC_SEGMENT_NORM, "norm");
    add_group(m, GROUP_HEAD, QC_SEGMENT_HEAD, "head");
    if (m->out->count == 0 && m->count != 0)
        (void)add_segment(m, QC_SEGMENT_EMBEDDING, "embeddings");
    uint32_t table = m->segment_of_group[GROUP_EMBEDDING];
    if (!m->geometry->decoder || table == NONE)
        return QC_OK;
    int head = has_head_weight(m);
    if (!head && m->segment_of_group[GROUP_HEAD] == NONE) {
        m->segment_of_group[GROUP_HEAD] = m->out->count;
        (void)add_segment(m, QC_SEGMENT_HEAD, "head");
    }
    if (!head || head_is_tied(m))
        m->out->segments[m->segment_of_group[GROUP_HEAD]].follows = table;
    return QC_OK;
}

/* ---- modules ---- */

typedef struct {
    const char *name; /* the path is len bytes of it */
    size_t len;
    uint32_t segment;
} module_ref;

typedef struct {
    module_ref *rows;
    uint32_t count;
    qc_arena *arena;
} module_list;

static qc_status add_module(module_list *l, const module_ref *r, qc_error *err)
{
    QC_TRY(qc_arena_more(l->arena, &l->rows, l->count, err));
    l->rows[l->count++] = *r;
    return QC_OK;
}

/* Returns the bytes that two names have in common, counted in whole components. */
static size_t common_path(const char *a, const char *b)
{
    size_t n = 0, whole = 0;
    for (;; n++) {
        int ends = (a[n] == '.' || a[n] == '\0') && (b[n] == '.' || b[n] == '\0');
        if (ends)
            whole = n;
        if (a[n] != b[n] || a[n] == '\0')
            return whole;
    }
}

/* Returns the length of the shortest path to names[i] that holds nothing before `first` and nothing
 * after `last`; all between these is of one segment. It is 0 if there is none, because the whole
 * name is also a path to one of those others. */
static size_t own_path(const maker *m, uint32_t i, uint32_t first, uint32_t last)
{
    const char *name = m->names[i];
    size_t shared = 0;
    if (first > 0)
        shared = common_path(name, m->names[first - 1]);
    if (last + 1 < m->count) {
        size_t n = common_path(name, m->names[last + 1]);
        shared = n > shared ? n : shared;
    }
    if (name[shared] == '\0')
        return 0;
    size_t from = shared ? shared + 1 : 0;
    return from + strcspn(name + from, ".");
}

/* int8's scales lie beside their weight, so they need a prefix of their own where only the weight
 * itself is one. */
static qc_status add_beside(module_list *l, const module_ref *r, qc_scheme scheme, qc_error *err)
{
    size_t parent = parent_len(r->name);
    if (!(qc_schemes[scheme].role_tensors & 1u << QC_ROLE_TENSOR_SCB) || r->name[r->len] != '\0' ||
        parent == 0)
        return QC_OK;
    static const char *const tails[] = {"SCB", "weight_format"};
    for (int i = 0; i < 2; i++) {
        module_ref more = {.segment = r->segment};
        QC_TRY(
            qc_arena_printf(l->arena, &more.name, err, "%.*s.%s", (int)parent, r->name, tails[i]));
        more.len = strlen(more.name);
        QC_TRY(add_module(l, &more, err));
    }
    return QC_OK;
}

static qc_status loose_modules(maker *m, module_list *l, uint32_t first, uint32_t last,
                               qc_error *err)
{
    module_ref row = {.name = NULL};
    for (uint32_t i = first; i <= last; i++) {
        if (row.name && is_below(m->names[i], row.name, row.len))
            continue;
        row =
            (module_ref){m->names[i], own_path(m, i, first, last), m->out->of_tensor[m->order[i]]};
        if (row.len == 0)
            QC_FAIL(err, QC_ERR_UNSUPPORTED,
                    "tensor " QC_NAME
                    " has the name of a module whose other tensors lie in several "
                    "segments",
                    row.name);
        QC_TRY(add_module(l, &row, err));
        QC_TRY(add_beside(l, &row, m->recipe->entries[m->order[i]].scheme, err));
    }
    return QC_OK;
}

/* Adds a module without tensors that transformers makes, unless the list has it or something below
 * it. */
static qc_status add_empty(module_list *l, const char *path, uint32_t segment, qc_error *err)
{
    size_t len = strlen(path);
    for (uint32_t i = 0; i < l->count; i++) {
        const module_ref *r = &l->rows[i];
        if (is_below(path, r->name, r->len) || is_below(r->name, path, len))
            return QC_OK;
    }
    return add_module(l, &(module_ref){path, len, segment}, err);
}

/* Adds rotary tables, a tied head, and a table that is stored as the head it is tied to. */
static qc_status empty_modules(maker *m, module_list *l, qc_error *err)
{
    qc_config c;
    qc_config_open(&c, m->model->config);
    uint32_t table = m->segment_of_group[GROUP_EMBEDDING];
    if (table != NONE && m->stack_count && qc_family_is(qc_family_find(c.text_type), "ROTARY")) {
        const stack *s = &m->stacks[m->main_stack];
        const char *path = NULL;
        size_t stem = s->len;
        while (stem > 0 && s->name[stem - 1] != '.')
            stem--;
        QC_TRY(qc_arena_printf(m->arena, &path, err, "%.*srotary_emb", (int)stem, s->name));
        QC_TRY(add_empty(l, path, table, err));
        QC_TRY(qc_arena_printf(m->arena, &path, err, "%.*sembed_tokens", (int)stem, s->name));
        QC_TRY(add_empty(l, path, table, err));
    }
    uint32_t head = m->segment_of_group[GROUP_HEAD];
    if (head == NONE || !m->geometry->decoder || has_head_weight(m))
        return QC_OK;
    return add_empty(l, qc_type_hidden_head(c.model_type), head, err);
}

static qc_status make_modules(maker *m, qc_error *err)
{
    module_list l = {.arena = m->arena};
    for (uint32_t i = 0; i < m->unit_count; i++) {
        const unit *u = &m->units[i];
        module_ref row = {u->name, u->len,
                          u->stack != NONE ? u->segment : m->segment_of_group[u->group]};
        QC_TRY(add_module(&l, &row, err));
    }
    const uint32_t *of = m->out->of_tensor;
    for (uint32_t first = 0, last = 0; first < m->count; first = last + 1) {
        last = first;
        if (m->unit_of[first] != NONE)
            continue;
        while (last + 1 < m->count && m->unit_of[last + 1] == NONE &&
               of[m->order[last + 1]] == of[m->order[first]])
            last++;
        QC_TRY(loose_modules(m, &l, first, last, err));
    }
    QC_TRY(empty_modules(m, &l, err));
    for (uint32_t i = 0; i < l.count; i++)
        m->out->segments[l.rows[i].segment].module_count++;
    for (uint32_t s = 0; s < m->out->count; s++) {
        qc_segment *seg = &m->out->segments[s];
        QC_TRY(qc_arena_array(m->arena, &seg->modules, seg->module_count, err));
        seg->module_count = 0;
    }
    for (uint32_t i = 0; i < l.count; i++) {
        const module_ref *r = &l.rows[i];
        qc_segment *seg = &m->out->segments[r->segment];
        QC_TRY(
            qc_arena_strndup(m->arena, &seg->modules[seg->module_count++], r->name, r->len, err));
    }
    return QC_OK;
}

qc_status qc_segments_make(qc_segments *out, qc_arena *arena, const qc_checkpoint *model,
                           const qc_recipe *recipe, const qc_geometry *geometry, qc_error *err)
{
    maker m = {.out = out,
               .arena = arena,
               .model = model,
               .recipe = recipe,
               .geometry = geometry,
               .count = (uint32_t)model->tensor_count};
    memset(out, 0, sizeof *out);
    if (model->tensor_count >= UINT32_MAX)
        QC_FAIL(err, QC_ERR_UNSUPPORTED, "%zu tensors are too many", model->tensor_count);
    QC_TRY(put_in_order(&m, err));
    QC_TRY(find_places(&m, err));
    rank_stacks(&m);
    QC_TRY(place_loose(&m, err));
    QC_TRY(build(&m, err));
    QC_TRY(qc_arena_array(arena, &out->of_tensor, m.count, err));
    out->tensor_count = m.count;
    for (uint32_t i = 0; i < m.count; i++) {
        const unit *u = m.unit_of[i] == NONE ? NULL : &m.units[m.unit_of[i]];
        const group g = u ? u->group : m.groups[i];
        out->of_tensor[m.order[i]] = u && u->stack != NONE ? u->segment
                                     : g == GROUP_UNKNOWN  ? 0
                                                           : m.segment_of_group[g];
    }
    return make_modules(&m, err);
}
