#include "convert/family/experts_shape.h"

#include "convert/model/config_fields.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

enum { NORM_NEVER, NORM_ALWAYS, NORM_UNLESS_SAID, NORM_IF_SAID };
enum { SPARSE_ALL, SPARSE_STEPS, SPARSE_BEHIND }; /* behind first_k_dense_replace layers */

/* What a family has, and the values of fields that are missing. */
typedef struct {
    const char *model_type;
    qc_experts_names names;
    qc_expert_scores scores;
    qc_expert_group_rule group_rule;
    int normalized, sparse;
    uint64_t experts, chosen, first_dense;
    const char *inner; /* the field of an expert's size */
    uint64_t inner_missing;
    const char *shared; /* the field of the shared experts' size, or of their number */
    uint64_t shared_missing;
    int shared_is_number; /* shared experts have the size of other experts */
    int grouped;          /* n_group and topk_group are read */
    uint64_t groups, groups_chosen;
    double scale; /* routed_scaling_factor; 0: it is not read */
    int clamped;
} family;

#define PROJECTIONS "mlp.experts", "gate_proj", "up_proj", "down_proj"
#define CORRECTION  "mlp.gate.e_score_correction_bias"

static const family families[] = {
    {.model_type = "mixtral",
     .names = {"block_sparse_moe.gate", NULL, "block_sparse_moe.experts", "w1", "w3", "w2", NULL,
               NULL},
     .normalized = NORM_ALWAYS,
     .experts = 8,
     .chosen = 2,
     .inner = "intermediate_size",
     .inner_missing = 14336},
    {.model_type = "qwen2_moe",
     .names = {"mlp.gate", NULL, PROJECTIONS, "mlp.shared_expert", "mlp.shared_expert_gate"},
     .normalized = NORM_IF_SAID,
     .sparse = SPARSE_STEPS,
     .experts = 60,
     .chosen = 4,
     .inner = "moe_intermediate_size",
     .inner_missing = 1408,
     .shared = "shared_expert_intermediate_size",
     .shared_missing = 5632},
    {.model_type = "qwen3_moe",
     .names = {"mlp.gate", NULL, PROJECTIONS, NULL, NULL},
     .normalized = NORM_IF_SAID,
     .sparse = SPARSE_STEPS,
     .experts = 128,
     .chosen = 8,
     .inner = "moe_intermediate_size",
     .inner_missing = 768},
    {.model_type = "olmoe",
     .names = {"mlp.gate", NULL, PROJECTIONS, NULL, NULL},
     .normalized = NORM_IF_SAID,
     .experts = 64,
     .chosen = 8,
     .inner = "intermediate_size",
     .inner_missing = 2048},
    {.model_type = "glm4_moe",
     .names = {"mlp.gate", CORRECTION, PROJECTIONS, "mlp.shared_experts", NULL},
     .scores = QC_SCORES_SIGMOID,
     .group_rule = QC_GROUP_BY_TWO,
     .normalized = NORM_UNLESS_SAID,
     .sparse = SPARSE_BEHIND,
     .experts = 128,
     .chosen = 8,
     .first_dense = 1,
     .inner = "moe_intermediate_size",
     .inner_missing = 1408,
     .shared = "n_shared_experts",
     .shared_missing = 1,
     .shared_is_number = 1,
     .grouped = 1,
     .groups = 1,
     .groups_chosen = 1,
     .scale = 1.0},
    {.model_type = "deepseek_v3",
     .names = {"mlp.gate", CORRECTION, PROJECTIONS, "mlp.shared_experts", NULL},
     .scores = QC_SCORES_SIGMOID,
     .group_rule = QC_GROUP_BY_TWO,
     .normalized = NORM_UNLESS_SAID,
     .sparse = SPARSE_BEHIND,
     .experts = 256,
     .chosen = 8,
     .first_dense = 3,
     .inner = "moe_intermediate_size",
     .inner_missing = 2048,
     .shared = "n_shared_experts",
     .shared_missing = 1,
     .shared_is_number = 1,
     .grouped = 1,
     .groups = 8,
     .groups_chosen = 4,
     .scale = 2.5},
    {.model_type = "deepseek_v2",
     .names = {"mlp.gate", NULL, PROJECTIONS, "mlp.shared_experts", NULL},
     .sparse = SPARSE_BEHIND,
     .experts = 64,
     .inner = "moe_intermediate_size",
     .inner_missing = 1407,
     .shared = "n_shared_experts",
     .shared_missing = 2,
     .shared_is_number = 1,
     .grouped = 1,
     .groups = 1,
     .groups_chosen = 1,
     .scale = 1.0},
    {.model_type = "gpt_oss",
     .names = {"mlp.router", NULL, "mlp.experts", "gate_up_proj", NULL, "down_proj", NULL, NULL},
     .scores = QC_SCORES_OF_CHOSEN,
     .experts = 128,
     .chosen = 4,
     .inner = "intermediate_size",
     .inner_missing = 2880,
     .clamped = 1},
};

static const family *find_family(const qc_json_node *root)
{
    const char *type = qc_json_string_or(qc_json_get(root, "model_type"), "");
    for (size_t i = 0; i < sizeof families / sizeof *families; i++)
        if (strcmp(type, families[i].model_type) == 0)
            return &families[i];
    return NULL;
}

static qc_status count(const qc_json_node *root, const char *names, uint64_t max, uint64_t missing,
                       uint64_t *out, qc_error *err)
{
    const qc_json_node *n = qc_config_field(root, names);
    QC_TRY(qc_config_count(out, n, max, missing, err));
    if (*out == 0)
        QC_FAIL(err, QC_ERR_INPUT, "config.json: %.*s is %s", (int)strcspn(names, " "), names,
                n ? "0" : "missing");
    return QC_OK;
}

static qc_status number(const qc_json_node *root, const char *name, double missing, float *out,
                        qc_error *err)
{
    const qc_json_node *n = qc_config_field(root, name);
    double v = missing;
    char what[64];
    (void)snprintf(what, sizeof what, "config.json: %s", name);
    if (n)
        QC_TRY(qc_json_as_double(n, what, &v, err));
    *out = (float)v;
    if (!(*out > 0.0f) || isinf(*out))
        QC_FAIL(err, QC_ERR_INPUT, "%s is %g, expected a number above 0", what, v);
    return QC_OK;
}

static qc_status flag(const qc_json_node *root, const char *name, int missing, int *out,
                      qc_error *err)
{
    const qc_json_node *n = qc_config_field(root, name);
    char what[64];
    *out = missing;
    (void)snprintf(what, sizeof what, "config.json: %s", name);
    return n ? qc_json_as_bool(n, what, out, err) : QC_OK;
}

/* ---- which layers ---- */

static qc_status read_sparse(qc_experts_shape *out, const family *f, qc_arena *arena,
                             const qc_json_node *root, uint64_t layers, qc_error *err)
{
    uint64_t step = 1, first = 0, every = 1;
    QC_TRY(qc_arena_alloc(arena, &out->sparse, (size_t)layers, 1, err));
    QC_TRY(count(root, "moe_layer_freq", QC_CONFIG_MAX_LAYERS, 1, &every, err));
    if (every != 1)
        QC_FAIL(err, QC_ERR_UNSUPPORTED,
                "config.json: moe_layer_freq is %" PRIu64 ", and only 1 is computed", every);
    if (f->sparse == SPARSE_STEPS)
        QC_TRY(count(root, "decoder_sparse_step", QC_CONFIG_MAX_LAYERS, 1, &step, err));
    if (f->sparse == SPARSE_BEHIND)
        QC_TRY(qc_config_count(&first, qc_config_field(root, "first_k_dense_replace"),
                               QC_CONFIG_MAX_LAYERS, f->first_dense, err));
    const qc_json_node *dense =
        f->sparse == SPARSE_STEPS ? qc_config_field(root, "mlp_only_layers") : NULL;
    if (dense)
        QC_TRY(qc_config_mark_layers(out->sparse, (uint32_t)layers, dense, err));
    for (uint64_t i = 0; i < layers; i++)
        out->sparse[i] = !out->sparse[i] && i >= first && (i + 1) % step == 0;
    return QC_OK;
}

/* ---- routing ---- */

/* DeepSeek-V2 has groups only where topk_method says so. */
static qc_status read_method(const family *f, const qc_json_node *root, int *grouped, qc_error *err)
{
    *grouped = f->grouped;
    if (!f->grouped || f->scores != QC_SCORES_SOFTMAX)
        return QC_OK;
    int normalized = 0;
    const char *method = qc_json_string_or(qc_config_field(root, "topk_method"), "greedy");
    *grouped = strcmp(method, "group_limited_greedy") == 0;
    if (!*grouped && strcmp(method, "greedy") != 0)
        QC_FAIL(err, QC_ERR_UNSUPPORTED,
                "config.json: topk_method is '%.40s', and only greedy and group_limited_greedy are "
                "computed",
                method);
    QC_TRY(flag(root, "norm_topk_prob", 0, &normalized, err));
    if (normalized)
        QC_FAIL(err, QC_ERR_UNSUPPORTED,
                "config.json: norm_topk_prob is true; transformers and DeepSeek's own code differ "
                "in what it does in a %s, so it is not computed",
                f->model_type);
    return QC_OK;
}

static qc_status check_routing(const qc_routing *r, qc_error *err)
{
    if (r->chosen > r->experts)
        QC_FAIL(err, QC_ERR_INPUT,
                "config.json: num_experts_per_tok is %" PRIu64 ", and there are %" PRIu64
                " experts",
                r->chosen, r->experts);
    if (r->groups == 1 && r->groups_chosen == 1)
        return QC_OK;
    uint64_t each = r->experts / r->groups;
    if (r->experts % r->groups != 0 || r->groups_chosen > r->groups ||
        each * r->groups_chosen < r->chosen || each < 2)
        QC_FAIL(err, QC_ERR_INPUT,
                "config.json: %" PRIu64 " experts cannot be chosen from %" PRIu64
                " (topk_group) of %" PRIu64 " groups (n_group) of %" PRIu64 " experts",
                r->chosen, r->groups_chosen, r->groups, r->experts);
    return QC_OK;
}

static qc_status read_routing(qc_routing *r, const family *f, const qc_json_node *root,
                              qc_error *err)
{
    int grouped = 0;
    *r = (qc_routing){.scores = f->scores,
                      .group_rule = f->group_rule,
                      .groups = 1,
                      .groups_chosen = 1,
                      .normalized = f->normalized == NORM_ALWAYS,
                      .guard = f->scores == QC_SCORES_SIGMOID ? 1e-20f : 0.0f,
                      .scale = 1.0f};
    QC_TRY(count(root, "num_local_experts num_experts n_routed_experts", QC_CONFIG_MAX_EXPERTS,
                 f->experts, &r->experts, err));
    QC_TRY(count(root, "num_experts_per_tok", QC_CONFIG_MAX_EXPERTS, f->chosen, &r->chosen, err));
    if (f->normalized == NORM_UNLESS_SAID || f->normalized == NORM_IF_SAID)
        QC_TRY(
            flag(root, "norm_topk_prob", f->normalized == NORM_UNLESS_SAID, &r->normalized, err));
    if (f->scale > 0.0)
        QC_TRY(number(root, "routed_scaling_factor", f->scale, &r->scale, err));
    QC_TRY(read_method(f, root, &grouped, err));
    if (grouped) {
        QC_TRY(count(root, "n_group", QC_CONFIG_MAX_EXPERTS, f->groups, &r->groups, err));
        QC_TRY(count(root, "topk_group", QC_CONFIG_MAX_EXPERTS, f->groups_chosen, &r->groups_chosen,
                     err));
    }
    return check_routing(r, err);
}

/* ---- all of it ---- */

static qc_status read_shared(qc_experts_shape *out, const family *f, const qc_json_node *root,
                             qc_error *err)
{
    /* Where the number of shared experts is null, there are none. */
    const qc_json_node *n = f->shared ? qc_json_get(root, f->shared) : NULL;
    if (!f->shared || (f->shared_is_number && n && qc_json_kind_of(n) == QC_JSON_NULL))
        return QC_OK;
    if (!f->shared_is_number)
        return count(root, f->shared, QC_CONFIG_MAX_SIZE, f->shared_missing, &out->shared, err);
    QC_TRY(qc_config_count(&out->shared, qc_config_field(root, f->shared), QC_CONFIG_MAX_EXPERTS,
                           f->shared_missing, err));
    out->shared *= out->inner;
    if (out->shared > QC_CONFIG_MAX_SIZE)
        QC_FAIL(err, QC_ERR_INPUT, "config.json: %s makes shared experts of %" PRIu64 " rows",
                f->shared, out->shared);
    return QC_OK;
}

qc_status qc_experts_shape_read(qc_experts_shape *out, qc_arena *arena, const qc_json_node *root,
                                uint64_t layers, qc_error *err)
{
    const family *f = find_family(root);
    memset(out, 0, sizeof *out);
    if (!f)
        return QC_OK;
    out->names = &f->names;
    out->clamped = f->clamped;
    QC_TRY(read_routing(&out->routing, f, root, err));
    QC_TRY(count(root, f->inner, QC_CONFIG_MAX_SIZE, f->inner_missing, &out->inner, err));
    QC_TRY(read_shared(out, f, root, err));
    if (f->clamped) {
        QC_TRY(number(root, "swiglu_limit", 7.0, &out->limit, err));
        QC_TRY(number(root, "swiglu_alpha", 1.702, &out->alpha, err));
    }
    return read_sparse(out, f, arena, root, layers, err);
}

int qc_experts_in(const qc_experts_shape *s, uint64_t layer)
{
    return s->names && s->sparse[layer];
}
