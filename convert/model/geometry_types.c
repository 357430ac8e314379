/* Asks what model types keep, and reads what geometry*.c reads of config.json. */
#include "convert/model/geometry_internal.h"

#include <string.h>

/* cmake/embed.cmake makes it of convert/families/cache_types.txt, which explains it. */
extern const char qc_cache_types[];

/* Is the word, which some lines begin with, true of the type? */
static int is_listed(const char *word, const char *type)
{
    const size_t len = strlen(type), word_len = strlen(word);
    for (const char *line = qc_cache_types; len > 0 && !strchr(type, ' ') && *line;
         line += *line == '\n') {
        const char *end = line + strcspn(line, "\n");
        const int named = strncmp(line, word, word_len) == 0 && line[word_len] == ' ';
        for (const char *t = line + word_len; named && t < end; t += strcspn(t, " \n")) {
            t++;
            if (strncmp(t, type, len) == 0 && (t[len] == ' ' || t[len] == '\n'))
                return 1;
        }
        line = end;
    }
    return 0;
}

int qc_geometry_type_has_no_cache(const char *type)
{
    return is_listed("run_without_cache", type) || is_listed("worked_out_without_cache", type);
}

int qc_geometry_type_is_encoder(const char *type)
{
    return is_listed("encoder", type);
}

int qc_geometry_type_is_known(const char *type)
{
    return is_listed("compared", type) || is_listed("worked_out", type) ||
           qc_geometry_type_has_no_cache(type) || qc_geometry_type_is_encoder(type);
}

int qc_geometry_is(const qc_geometry_reader *r, const char *types)
{
    return qc_config_word_in(r->config.text_type, types);
}

qc_status qc_geometry_size(const qc_geometry_reader *r, uint64_t *out, const char *names,
                           uint64_t missing, qc_error *err)
{
    const qc_json_node *n = qc_config_text_field(&r->config, names);
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
