#include "convert/families/family.h"

#include "base/text.h"
#include "convert/families/config_fields.h"

#include <string.h>

/* Matches a pattern at the start of what is from s to end (all of it if `whole`). Returns the end
 * of the match, or NULL. names is what '%' stands for. It recurses once per '{' and '%', and our
 * patterns have at most four of these. */
static const char *match(const char *p, const char *s, const char *end, const char *names,
                         int whole)
{
    while (*p) {
        if (*p == '#') {
            const char *digits = s;
            while (s < end && *s >= '0' && *s <= '9')
                s++;
            if (s == digits)
                return NULL;
            p++;
        } else if (*p == '%') {
            s = match(names, s, end, "", 0);
            if (!s)
                return NULL;
            p++;
        } else if (*p == '{') {
            const char *behind = strchr(p, '}') + 1;
            for (const char *alt = p + 1;;) {
                size_t n = strcspn(alt, "|}");
                const char *found = NULL;
                if ((size_t)(end - s) >= n && memcmp(s, alt, n) == 0)
                    found = match(behind, s + n, end, names, whole);
                if (found || alt[n] == '}')
                    return found;
                alt += n + 1;
            }
        } else if (s == end || *p++ != *s++) {
            return NULL;
        }
    }
    return whole && s != end ? NULL : s;
}

static const char *const role_words[] = {
    [QC_ROLE_LINEAR] = "linear",
    [QC_ROLE_EMBEDDING] = "embedding",
    [QC_ROLE_HEAD] = "output head",
    [QC_ROLE_ROUTER] = "router",
    [QC_ROLE_NORM] = "norm",
    [QC_ROLE_BIAS] = "bias",
    [QC_ROLE_CONV] = "convolution",
    [QC_ROLE_STATE] = "scale of a packed weight",
    [QC_ROLE_PACKED] = "packed weight",
    [QC_ROLE_OTHER] = "no weight of a Linear",
};

const qc_family *qc_family_find(const char *model_type)
{
    for (size_t i = 0; i < qc_family_count; i++) {
        if (strcmp(qc_families[i].type, model_type) == 0)
            return &qc_families[i];
    }
    return NULL;
}

const qc_family *qc_family_of(const qc_checkpoint *model)
{
    return qc_family_find(qc_config_type(model->config));
}

int qc_family_is(const qc_family *f, const char *word)
{
    return f && qc_config_word_in(word, f->words);
}

int qc_family_is_conv1d(const qc_family *f, const char *name)
{
    qc_tensor_class c;
    return f && qc_family_classify(f, name, &c) && (c.traits & QC_TRAIT_CONV1D) != 0;
}

/* What the names of a module's tensors end with, and the role that the tensor has then; the weight
 * has that of the module. */
static const struct {
    const char *tail;
    qc_role role;
    unsigned traits;
    int of_norms, of_others; /* which kinds of module have it */
} tails[] = {
    {".weight", QC_ROLE_OTHER, 0, 1, 1}, /* its own */
    {".bias", QC_ROLE_BIAS, 0, 1, 1},    {".weight_scale_inv", QC_ROLE_STATE, QC_TRAIT_FIXED, 0, 1},
    {".gamma", QC_ROLE_NORM, 0, 1, 0},   {".beta", QC_ROLE_NORM, 0, 1, 0},
};
enum { TAIL_COUNT = sizeof tails / sizeof *tails };

/* Does the row know the rest of a name, which ends in tails[tail]? */
static int row_knows(const qc_family_row *r, const char *rest, const char *end, size_t tail,
                     qc_tensor_class *out)
{
    const int whole = r->kind == QC_ROW_TENSOR, norm = r->kind == QC_ROW_NORM;
    if (r->kind == QC_ROW_SHAPE)
        return 0;
    if (!whole && (tail == TAIL_COUNT || !(norm ? tails[tail].of_norms : tails[tail].of_others)))
        return 0;
    const char *module_end = whole ? end : end - strlen(tails[tail].tail);
    if (module_end < rest || !match(r->name, rest, module_end, "", 1))
        return 0;
    const int own = whole || norm || tail == 0;
    out->role = own ? r->role : tails[tail].role;
    out->traits = (own ? r->traits : tails[tail].traits) & QC_TRAITS_OF_TENSOR;
    if (out->role == QC_ROLE_HEAD)
        out->traits |= QC_TRAIT_MODULE;
    out->why = own && r->why ? r->why : role_words[out->role];
    return 1;
}

int qc_family_classify(const qc_family *f, const char *name, qc_tensor_class *out)
{
    const char *end = name + strlen(name);
    size_t tail = 0;
    while (tail < TAIL_COUNT && !qc_ends_with(name, tails[tail].tail))
        tail++;
    for (const qc_family_group *g = f->groups; g->prefix; g++) {
        const char *rest = match(g->prefix, name, end, f->names, 0);
        for (const qc_family_row *r = g->rows; rest && r->name; r++) {
            if (row_knows(r, rest, end, tail, out))
                return 1;
        }
    }
    return 0;
}

const char *qc_family_place(const qc_family *f, const char *name, const char **prefix,
                            uint64_t *number)
{
    const char *end = name + strlen(name);
    for (const qc_family_group *g = f->groups; g->prefix; g++) {
        const char *rest = match(g->prefix, name, end, f->names, 0);
        if (!rest)
            continue;
        *prefix = g->prefix;
        *number = 0;
        const char *digits = rest - 1;
        while (qc_ends_with(g->prefix, "#.") && digits > name && digits[-1] >= '0' &&
               digits[-1] <= '9')
            digits--;
        for (; digits < rest - 1; digits++)
            *number = *number * 10 + (uint64_t)(*digits - '0');
        return rest;
    }
    return NULL;
}

const char *qc_family_parameter(const char *name)
{
    const char *dot = strrchr(name, '.');
    return dot && qc_config_word_in(dot + 1, " weight bias weight_packed weight_scale "
                                             "weight_scale_inv weight_shape weight_zero_point "
                                             "qweight qzeros scales input_scale weight_scale_2 "
                                             "input_global_scale weight_global_scale ")
               ? dot + 1
               : "";
}

qc_split qc_family_split(const qc_family *f, const char *name)
{
    const size_t tail = strlen(qc_family_parameter(name));
    const char *end = name + strlen(name) - (tail > 0 ? tail + 1 : 0);
    for (const qc_family_group *g = f ? f->groups : NULL; g && g->prefix; g++) {
        const char *rest = match(g->prefix, name, end, f->names, 0);
        for (const qc_family_row *r = g->rows; rest && r->name; r++) {
            if (match(r->name, rest, end, "", 1))
                return r->split;
        }
    }
    return QC_SPLIT_UNKNOWN;
}

int qc_family_rename(const qc_family *f, unsigned n, const char **from, const char **to)
{
    const qc_module_rename *r = f->renames;
    for (; r && r->from; r++, n--) {
        if (n > 0)
            continue;
        *from = r->from;
        *to = r->to;
        return 1;
    }
    return 0;
}
