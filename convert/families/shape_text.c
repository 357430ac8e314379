#include "convert/families/shape_text.h"

#include "base/checked.h"

#include <stddef.h>
#include <string.h>

enum { NAME_BYTES = 96 };

typedef struct {
    const char *at;
    const qc_shape_facts *facts;
} reader;

static qc_status read_sum(reader *r, uint64_t *out, qc_error *err);
static qc_status read_factor(reader *r, uint64_t *out, qc_error *err);

static const struct {
    const char *name;
    size_t offset;
} fact_names[] = {
#define FACT(name)                                                                                 \
    {                                                                                              \
#name, offsetof(qc_shape_facts, name)                                                      \
    }
    FACT(hidden), FACT(heads),   FACT(kv_heads), FACT(head_dim), FACT(q),     FACT(kv),
    FACT(layers), FACT(experts), FACT(vocab),    FACT(context),  FACT(inner), FACT(media),
    FACT(tied),   FACT(mxfp4),   FACT(bare),     FACT(masked),   FACT(moe),   FACT(state),
    FACT(cross),  FACT(indexed), FACT(extra),    FACT(layer),
#undef FACT
};

static int find_fact(const qc_shape_facts *facts, const char *name, uint64_t *out)
{
    for (size_t i = 0; i < sizeof fact_names / sizeof *fact_names; i++) {
        if (strcmp(fact_names[i].name, name) == 0) {
            memcpy(out, (const char *)facts + fact_names[i].offset, sizeof *out);
            return 1;
        }
    }
    return 0;
}

/* Finds a field. *name becomes what it is called in config.json. */
static const qc_json_node *find_field(const qc_shape_facts *facts, const char **name)
{
    static const char vision[] = "vision.";
    if (strncmp(*name, vision, sizeof vision - 1) != 0)
        return qc_config_text_field(facts->config, *name);
    *name += sizeof vision - 1;
    return qc_config_field(facts->config->vision, *name);
}

/* Reads a number that has to be there, or one or a flag (how: '?', '~') that may be missing. */
static qc_status read_field(const qc_shape_facts *facts, const char *name, char how,
                            uint64_t missing, uint64_t *out, qc_error *err)
{
    const qc_json_node *n = find_field(facts, &name);
    if (how == '~') {
        *out = (uint64_t)qc_json_bool_or(n, (int)missing);
        return QC_OK;
    }
    QC_TRY(qc_config_count(out, n, QC_CONFIG_MAX_SIZE, missing, err));
    if (how != '?' && *out == 0)
        QC_FAIL(err, QC_ERR_INPUT, "config.json: %s is %s, so the tensors cannot be worked out",
                name, n ? "0" : "missing");
    return QC_OK;
}

/* Reads how long a list is, or of a pattern that may be missing ('?') how many letters it has or
 * what number it is. */
static qc_status read_length(const qc_shape_facts *facts, const char *name, char how,
                             uint64_t missing, uint64_t *out, qc_error *err)
{
    const qc_json_node *list = find_field(facts, &name);
    if (how == '?' && list && qc_json_kind_of(list) == QC_JSON_STRING) {
        *out = strlen(qc_json_string_or(list, ""));
        return QC_OK;
    }
    if (how == '?')
        return qc_config_count(out, list, QC_CONFIG_MAX_LAYERS, missing, err);
    if (!list || qc_json_kind_of(list) != QC_JSON_ARRAY)
        QC_FAIL(err, QC_ERR_INPUT,
                "config.json: %s is missing, so the tensors cannot be worked out", name);
    *out = 0;
    for (const qc_json_node *n = qc_json_first(list); n; n = qc_json_next(n))
        ++*out;
    return QC_OK;
}

static uint64_t read_number(reader *r)
{
    uint64_t n = 0;
    for (; *r->at >= '0' && *r->at <= '9'; r->at++)
        n = n * 10 + (uint64_t)(*r->at - '0');
    return n;
}

static qc_status read_name(reader *r, uint64_t *out, qc_error *err)
{
    char name[NAME_BYTES];
    int list = *r->at == '#';
    r->at += list;
    size_t n = strcspn(r->at, " ,+-*/%=()!?~");
    if (n == 0 || n >= sizeof name)
        QC_FAIL(err, QC_ERR_INTERNAL, "a family's shape cannot be read at '%.80s'", r->at);
    memcpy(name, r->at, n);
    name[n] = '\0';
    for (char *bar = name; (bar = strchr(bar, '|')) != NULL;)
        *bar = ' ';
    r->at += n;
    if (name[0] >= 'A' && name[0] <= 'Z')
        *out = (uint64_t)qc_family_is(r->facts->family, name);
    else if (list || !find_fact(r->facts, name, out)) {
        char how = *r->at;
        uint64_t missing = 0;
        r->at += how == '?' || how == '~';
        if (how == '?' && *r->at == '(')
            QC_TRY(read_factor(r, &missing, err));
        else
            missing = read_number(r);
        return (list ? read_length : read_field)(r->facts, name, how, missing, out, err);
    }
    return QC_OK;
}

static qc_status read_factor(reader *r, uint64_t *out, qc_error *err)
{
    if (*r->at >= '0' && *r->at <= '9') {
        *out = read_number(r);
    } else if (*r->at == '!') {
        r->at++;
        QC_TRY(read_factor(r, out, err));
        *out = !*out;
    } else if (*r->at == '(') {
        r->at++;
        QC_TRY(read_sum(r, out, err));
        if (*r->at == '=') {
            uint64_t other = 0;
            r->at++;
            QC_TRY(read_sum(r, &other, err));
            *out = *out == other;
        }
        r->at += *r->at == ')';
    } else {
        return read_name(r, out, err);
    }
    return QC_OK;
}

static qc_status overflows(qc_error *err)
{
    QC_FAIL(err, QC_ERR_INPUT, "config.json: the model's sizes overflow 64 bits");
}

static qc_status read_product(reader *r, uint64_t *out, qc_error *err)
{
    QC_TRY(read_factor(r, out, err));
    while (*r->at == '*' || *r->at == '/' || *r->at == '%') {
        uint64_t by = 0;
        char how = *r->at++;
        QC_TRY(read_factor(r, &by, err));
        if (how != '*')
            *out = !by ? 0 : how == '/' ? *out / by : *out % by;
        else if (qc_mul_u64(*out, by, out))
            return overflows(err);
    }
    return QC_OK;
}

static qc_status read_sum(reader *r, uint64_t *out, qc_error *err)
{
    QC_TRY(read_product(r, out, err));
    while (*r->at == '+' || *r->at == '-') {
        uint64_t more = 0;
        int subtract = *r->at++ == '-';
        QC_TRY(read_product(r, &more, err));
        if (subtract)
            *out -= qc_min_u64(*out, more);
        else if (qc_add_u64(*out, more, out))
            return overflows(err);
    }
    return QC_OK;
}

qc_status qc_shape_read(uint64_t *out, unsigned max, unsigned *count, const char *text,
                        const qc_shape_facts *facts, qc_error *err)
{
    reader r = {text, facts};
    for (*count = 0; *count < max;) {
        QC_TRY(read_sum(&r, &out[(*count)++], err));
        if (*r.at == '\0')
            return QC_OK;
        r.at += strspn(r.at, ", ");
    }
    QC_FAIL(err, QC_ERR_INTERNAL, "a family's shape cannot be read: '%.80s'", text);
}

qc_status qc_shape_when(uint64_t *out, const char *text, uint64_t missing,
                        const qc_shape_facts *facts, qc_error *err)
{
    unsigned count = 0;
    *out = missing;
    return text ? qc_shape_read(out, 1, &count, text, facts, err) : QC_OK;
}

qc_status qc_shape_need(const char *name, const qc_shape_facts *facts, qc_error *err)
{
    uint64_t ignored = 0;
    return read_field(facts, name, '\0', 0, &ignored, err);
}
