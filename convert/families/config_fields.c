#include "convert/families/config_fields.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#define NAME_SHOWN_BYTES 80
#define NAME_BYTES       64u

static const qc_json_node *object_at(const qc_json_node *object, const char *names)
{
    const qc_json_node *n = qc_config_field(object, names);
    return n && qc_json_kind_of(n) == QC_JSON_OBJECT ? n : NULL;
}

const qc_json_node *qc_config_root(const qc_json *doc)
{
    return doc ? qc_json_root(doc) : NULL;
}

const qc_json_node *qc_config_quantization(const qc_json *doc)
{
    return qc_json_get(qc_config_root(doc), "quantization_config");
}

const char *qc_config_type(const qc_json *doc)
{
    return qc_json_string_or(qc_json_get(qc_config_root(doc), "model_type"), "");
}

const char *qc_config_quant_method(const qc_json *doc)
{
    return qc_json_string_or(qc_json_get(qc_config_quantization(doc), "quant_method"), "");
}

void qc_config_open(qc_config *out, const qc_json *doc)
{
    const qc_json_node *root = qc_config_root(doc);
    const char *type = qc_config_type(doc);
    *out = (qc_config){.root = root, .text = root, .model_type = type, .text_type = type};
    out->vision = object_at(root, "vision_config");
    /* The text model within a composite one: Qwen's speech models keep it one level deeper, and
     * pairs of an encoder and a decoder call it decoder. */
    const qc_json_node *text = object_at(root, "text_config llm_config language_config");
    if (!text)
        text = object_at(object_at(root, "thinker_config"), "text_config");
    if (!text && object_at(root, "encoder text_encoder"))
        text = object_at(root, "decoder");
    if (!text)
        return;
    out->text = text;
    out->text_type = qc_json_string_or(qc_json_get(text, "model_type"), type);
}

int qc_config_word_in(const char *word, const char *list)
{
    size_t len = strlen(word);
    if (len == 0 || strchr(word, ' '))
        return 0;
    for (const char *p = list; (p = strstr(p, word)) != NULL; p += len) {
        if (p > list && p[-1] == ' ' && p[len] == ' ')
            return 1;
    }
    return 0;
}

int qc_config_part_in(const char *word, size_t len, const char *list)
{
    char text[32];
    if (len >= sizeof text)
        return 0;
    memcpy(text, word, len);
    text[len] = '\0';
    return qc_config_word_in(text, list);
}

const qc_json_node *qc_config_field(const qc_json_node *object, const char *names)
{
    while (object && *names) {
        char name[NAME_BYTES];
        size_t len = strcspn(names, " ");
        if (len > 0 && len < sizeof name) {
            memcpy(name, names, len);
            name[len] = '\0';
            const qc_json_node *n = qc_json_get(object, name);
            if (n && qc_json_kind_of(n) != QC_JSON_NULL)
                return n;
        }
        names += len + (names[len] == ' ');
    }
    return NULL;
}

const qc_json_node *qc_config_text_field(const qc_config *c, const char *names)
{
    const qc_json_node *n = qc_config_field(c->text, names);
    return n || c->text == c->root ? n : qc_config_field(c->root, names);
}

qc_status qc_config_count(uint64_t *out, const qc_json_node *n, uint64_t max, uint64_t missing,
                          qc_error *err)
{
    *out = missing;
    if (!n)
        return QC_OK;
    char what[NAME_SHOWN_BYTES + 32];
    const char *key = qc_json_key(n);
    (void)snprintf(what, sizeof what, "config.json: %.*s", NAME_SHOWN_BYTES,
                   key ? key : "an entry of a list");
    QC_TRY(qc_json_as_u64(n, what, out, err));
    if (*out > max)
        QC_FAIL(err, QC_ERR_INPUT, "%s is %" PRIu64 ", expected at most %" PRIu64, what, *out, max);
    return QC_OK;
}

qc_status qc_config_read(uint64_t *out, const qc_config *c, const char *names, uint64_t max,
                         uint64_t missing, qc_error *err)
{
    return qc_config_count(out, qc_config_text_field(c, names), max, missing, err);
}

qc_status qc_config_size(uint64_t *out, const qc_config *c, const char *names, uint64_t missing,
                         qc_error *err)
{
    const qc_json_node *n = qc_config_text_field(c, names);
    if (!n || qc_json_kind_of(n) != QC_JSON_ARRAY || !qc_json_first(n))
        return qc_config_count(out, n, QC_CONFIG_MAX_SIZE, missing, err);
    *out = 0;
    for (const qc_json_node *each = qc_json_first(n); each; each = qc_json_next(each)) {
        uint64_t size = 0;
        if (qc_json_kind_of(each) == QC_JSON_ARRAY)
            continue; /* these are stages of a vision tower, which a text does not pass */
        QC_TRY(qc_config_count(&size, each, QC_CONFIG_MAX_SIZE, 0, err));
        *out = size > *out ? size : *out;
    }
    return QC_OK;
}

int qc_config_flag(const qc_config *c, const char *name, int missing)
{
    return qc_json_bool_or(qc_config_text_field(c, name), missing);
}

qc_status qc_config_mark_layers(unsigned char *marks, uint32_t layer_count,
                                const qc_json_node *list, uint64_t first, qc_error *err)
{
    if (!list)
        return QC_OK;
    const char *key = qc_json_key(list);
    if (qc_json_kind_of(list) != QC_JSON_ARRAY)
        QC_FAIL(err, QC_ERR_INPUT, "config.json: %.*s is %s, expected a list of layers",
                NAME_SHOWN_BYTES, key, qc_json_kind_name(qc_json_kind_of(list)));
    for (const qc_json_node *n = qc_json_first(list); n; n = qc_json_next(n)) {
        uint64_t layer = 0;
        QC_TRY(qc_json_as_u64(n, key, &layer, err));
        if (layer < first || layer - first >= layer_count)
            QC_FAIL(err, QC_ERR_INPUT,
                    "config.json: %.*s names layer %" PRIu64 ", but there are only %" PRIu32
                    " layers",
                    NAME_SHOWN_BYTES, key, layer, layer_count);
        marks[layer - first] = 1;
    }
    return QC_OK;
}
