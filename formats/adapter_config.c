/* adapter_config.json, as peft writes it. What is not known to leave the merged weights as they are
 * is refused. */
#include "formats/adapter_internal.h"

#include "formats/checkpoint_internal.h"

#include <math.h>
#include <string.h>

#define CONFIG_MAX_BYTES  ((size_t)4 << 20)
#define PATTERN_MAX_BYTES 512u
#define PATTERNS_MOST     4096u

/* Members that make an adapter something other than W + scaling * B * A. */
static const char *const foreign_kinds[] = {"use_qalora",
                                            "use_bdlora",
                                            "layer_replication",
                                            "alora_invocation_tokens",
                                            "arrow_config",
                                            "kasa_config",
                                            "trainable_token_indices",
                                            "target_parameters",
                                            "megatron_config",
                                            "monteclora_config",
                                            NULL};
/* The members that do not change what is merged, or are read below. Source: LoraConfig and its
 * bases in peft 0.21.2, and what earlier versions wrote. */
static const char plain_members[] =
    " alpha_pattern auto_mapping base_model_name_or_path bias corda_config ensure_weight_tying "
    "eva_config exclude_modules fan_in_fan_out inference_mode init_lora_weights layers_pattern "
    "layers_to_transform loftq_config lora_alpha lora_bias lora_dropout lora_ga_config "
    "megatron_core modules_to_save peft_type peft_version qalora_group_size r rank_pattern "
    "revision runtime_config target_modules task_type use_dora use_rslora velora_config "
    "enable_lora merge_weights ";
/* Ways to begin after which peft trains beside a changed base weight, not beside MODEL's. */
static const char *const changing_starts[] = {"pissa", "olora", "corda", "loftq", "lora_ga", NULL};

/* Is the member absent, null, false or empty? */
static int is_off(const qc_json_node *n)
{
    if (!n)
        return 1;
    qc_json_kind kind = qc_json_kind_of(n);
    if (kind == QC_JSON_ARRAY || kind == QC_JSON_OBJECT)
        return qc_json_count(n) == 0;
    return kind == QC_JSON_NULL || (kind == QC_JSON_BOOL && !qc_json_bool_or(n, 1));
}

static qc_status check_kind(const qc_json_node *root, qc_error *err)
{
    const char *kind = qc_json_string_or(qc_json_get(root, "peft_type"), NULL);
    const char *start = qc_json_string_or(qc_json_get(root, "init_lora_weights"), "");
    if (!kind || strcmp(kind, "LORA") != 0)
        QC_FAIL(err, QC_ERR_UNSUPPORTED,
                "peft_type is %s%s%s; qconv merges \"LORA\" (with DoRA and "
                "rank-stabilized)",
                kind ? "\"" : "", kind ? kind : "missing", kind ? "\"" : "");
    for (const char *const *f = foreign_kinds; *f; f++) {
        if (!is_off(qc_json_get(root, *f)))
            QC_FAIL(err, QC_ERR_UNSUPPORTED,
                    "%s is set, and such an adapter is not a product that is added to a weight; "
                    "qconv cannot merge it",
                    *f);
    }
    for (const char *const *s = changing_starts; *s; s++) {
        if (strncmp(start, *s, strlen(*s)) == 0)
            QC_FAIL(
                err, QC_ERR_UNSUPPORTED,
                "init_lora_weights is \"%s\", so the adapter belongs to base weights that "
                "training changed; save it with path_initial_model_for_weight_conversion, which "
                "makes an adapter of the original weights",
                start);
    }
    return QC_OK;
}

/* Lists what peft warns of and then ignores: members that it does not know. */
static qc_status list_unknown(qc_adapter_config *c, qc_arena *arena, const qc_json_node *root,
                              qc_error *err)
{
    qc_checkpoint_names names = {0};
    for (const qc_json_node *n = qc_json_first(root); n; n = qc_json_next(n)) {
        const char *key = qc_json_key(n), *at = plain_members;
        const size_t len = strlen(key);
        while (len > 0 && (at = strstr(at + 1, key)) != NULL && (at[-1] != ' ' || at[len] != ' '))
            continue;
        if ((!at || len == 0) && !is_off(n))
            qc_checkpoint_names_add(&names, key);
    }
    return qc_arena_strdup(arena, &c->unknown, qc_checkpoint_names_text(&names), err);
}

static qc_status read_saved(qc_adapter_config *c, qc_arena *arena, const qc_json_node *root,
                            qc_error *err)
{
    const qc_json_node *list = qc_json_get(root, "modules_to_save");
    if (!list || qc_json_kind_of(list) == QC_JSON_NULL)
        return QC_OK;
    QC_TRY(qc_json_expect(list, QC_JSON_ARRAY, "modules_to_save", err));
    QC_TRY(qc_arena_array(arena, &c->saved, qc_json_count(list), err));
    for (const qc_json_node *n = qc_json_first(list); n; n = qc_json_next(n)) {
        QC_TRY(qc_json_expect(n, QC_JSON_STRING, "modules_to_save", err));
        QC_TRY(qc_arena_strdup(arena, &c->saved[c->saved_count++], qc_json_string_or(n, ""), err));
    }
    return QC_OK;
}

static qc_status positive(const qc_json_node *n, const char *what, double *out, qc_error *err)
{
    QC_TRY(qc_json_as_double(n, what, out, err));
    if (!(*out > 0) || !isfinite(*out))
        QC_FAIL(err, QC_ERR_INPUT, "%s is %g; expected a number above 0", what, *out);
    return QC_OK;
}

static qc_status flag(const qc_json_node *root, const char *key, int *out, qc_error *err)
{
    const qc_json_node *n = qc_json_get(root, key);
    *out = 0;
    return !n || qc_json_kind_of(n) == QC_JSON_NULL ? QC_OK : qc_json_as_bool(n, key, out, err);
}

/* Compiles a key as peft uses it: it matches the end of a module's name, from a dot on. A key is a
 * regular expression of Python. Those that mean the same in POSIX are taken: without counts (which
 * could make a small text into a huge machine), groups with a '?', and escapes other than of a dot
 * or for a digit. */
static qc_status compile(qc_adapter_pattern *p, qc_arena *arena, qc_error *err)
{
    qc_strbuf text;
    qc_strbuf_init(&text, (size_t)16 * PATTERN_MAX_BYTES);
    qc_strbuf_puts(&text, "^(.*\\.)?(");
    int known = strlen(p->key) <= PATTERN_MAX_BYTES && !strstr(p->key, "(?") && *p->key;
    int in_class = 0;
    for (const char *s = p->key; known && *s; s++) {
        in_class = *s == '[' || (in_class && *s != ']');
        if (*s == '\\' && s[1] == 'd' && !in_class) {
            qc_strbuf_puts(&text, "[0-9]");
            s++;
        } else if (*s == '\\') {
            known = !in_class && s[1] != '\0' && strchr(".-_[](){}*+?|^$\\", s[1]) != NULL;
            qc_strbuf_put(&text, s, known ? 2 : 0);
            s += known;
        } else {
            known = *s != '{';
            qc_strbuf_put(&text, s, 1);
        }
    }
    qc_strbuf_puts(&text, ")$");
    qc_status st = qc_strbuf_status(&text, err);
    if (st == QC_OK) {
        p->compiled = known && regcomp(&p->pattern, text.data, REG_EXTENDED | REG_NOSUB) == 0;
        if (!p->compiled)
            st = QC_ERROR(err, QC_ERR_UNSUPPORTED,
                          "'%.80s' is a pattern that qconv does not understand; write the modules' "
                          "names instead",
                          p->key);
    }
    qc_strbuf_deinit(&text);
    return st == QC_OK ? qc_arena_strdup(arena, &p->key, p->key, err) : st;
}

static qc_status read_patterns(qc_adapter_pattern **out, size_t *count, qc_arena *arena,
                               const qc_json_node *root, const char *key, qc_error *err)
{
    const qc_json_node *n = qc_json_get(root, key);
    if (!n || qc_json_kind_of(n) == QC_JSON_NULL)
        return QC_OK;
    QC_TRY(qc_json_expect(n, QC_JSON_OBJECT, key, err));
    if (qc_json_count(n) > PATTERNS_MOST)
        QC_FAIL(err, QC_ERR_UNSUPPORTED, "%s has %zu members; at most %u are taken", key,
                qc_json_count(n), PATTERNS_MOST);
    QC_TRY(qc_arena_array(arena, out, qc_json_count(n), err));
    for (n = qc_json_first(n); n; n = qc_json_next(n)) {
        qc_adapter_pattern *p = &(*out)[*count];
        p->key = qc_json_key(n);
        qc_status st = positive(n, p->key, &p->value, err);
        if (st == QC_OK)
            st = compile(p, arena, err);
        *count += (size_t)p->compiled;
        if (st != QC_OK) {
            qc_error_prefix(err, "%s", key);
            return st;
        }
    }
    return QC_OK;
}

static qc_status read_members(qc_adapter_config *c, qc_arena *arena, const qc_json_node *root,
                              qc_error *err)
{
    QC_TRY(qc_json_expect(root, QC_JSON_OBJECT, "text", err));
    QC_TRY(check_kind(root, err));
    QC_TRY(positive(qc_json_get(root, "r"), "r", &c->r, err));
    QC_TRY(qc_json_as_double(qc_json_get(root, "lora_alpha"), "lora_alpha", &c->alpha, err));
    QC_TRY(flag(root, "use_rslora", &c->use_rslora, err));
    QC_TRY(flag(root, "use_dora", &c->use_dora, err));
    QC_TRY(flag(root, "fan_in_fan_out", &c->fan_in_fan_out, err));
    QC_TRY(flag(root, "ensure_weight_tying", &c->keeps_tied, err));
    QC_TRY(read_saved(c, arena, root, err));
    QC_TRY(list_unknown(c, arena, root, err));
    QC_TRY(read_patterns(&c->ranks, &c->rank_count, arena, root, "rank_pattern", err));
    return read_patterns(&c->alphas, &c->alpha_count, arena, root, "alpha_pattern", err);
}

qc_status qc_adapter_config_read(qc_adapter_config *out, qc_arena *arena, const char *path,
                                 qc_error *err)
{
    qc_json *doc = NULL;
    memset(out, 0, sizeof *out);
    QC_TRY(qc_json_read_file(&doc, path, "", CONFIG_MAX_BYTES, err));
    qc_status st = read_members(out, arena, qc_json_root(doc), err);
    if (st != QC_OK)
        qc_error_prefix(err, "%s", path);
    qc_json_destroy(doc);
    return st;
}

void qc_adapter_config_deinit(qc_adapter_config *c)
{
    for (size_t i = 0; i < c->rank_count; i++)
        regfree(&c->ranks[i].pattern);
    for (size_t i = 0; i < c->alpha_count; i++)
        regfree(&c->alphas[i].pattern);
    c->rank_count = c->alpha_count = 0;
}

/* The first key that matches counts. */
static double value_of(const qc_adapter_pattern *p, size_t count, double other, const char *module)
{
    for (size_t i = 0; i < count; i++) {
        if (regexec(&p[i].pattern, module, 0, NULL, 0) == 0)
            return p[i].value;
    }
    return other;
}

double qc_adapter_config_rank(const qc_adapter_config *c, const char *module)
{
    return value_of(c->ranks, c->rank_count, c->r, module);
}

double qc_adapter_config_alpha(const qc_adapter_config *c, const char *module)
{
    return value_of(c->alphas, c->alpha_count, c->alpha, module);
}
