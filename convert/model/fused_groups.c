#include "convert/model/fused_groups.h"

#include "base/text.h"

#include <stdio.h>
#include <string.h>

#define NO_RULE UINT32_MAX

/* How the names of weights end: plain ones, and those that other tools packed. */
static const char *const tails[] = {".weight", ".weight_packed", ".qweight"};
#define TAIL_COUNT (sizeof tails / sizeof *tails)

int qc_fused_group_of(qc_fused_group *out, const qc_checkpoint *model, uint32_t i)
{
    const char *name = model->tensors[i].name;
    size_t tail = 0;
    while (tail < TAIL_COUNT && !qc_ends_with(name, tails[tail]))
        tail++;
    if (tail == TAIL_COUNT)
        return 0;
    size_t end = strlen(name) - strlen(tails[tail]), begin = end;
    while (begin > 0 && name[begin - 1] != '.')
        begin--;
    size_t parent_len = begin > 0 ? begin - 1 : 0, parent = parent_len;
    while (parent > 0 && name[parent - 1] != '.')
        parent--;
    *out = (qc_fused_group){.parent_len = parent_len};
    out->row = qc_fused_row_of(name + begin, end - begin, name + parent, parent_len - parent);
    for (unsigned k = 0; out->row && k < QC_FUSED_MEMBERS && out->row->members[k]; k++) {
        uint32_t t = UINT32_MAX;
        for (size_t e = 0; e < TAIL_COUNT && t == UINT32_MAX; e++) {
            char member[64];
            (void)snprintf(member, sizeof member, "%s%s", out->row->members[k], tails[e]);
            t = qc_checkpoint_beside(model, name, begin, member);
        }
        if (t != UINT32_MAX)
            out->tensors[out->count++] = t;
    }
    return out->count >= 2;
}

size_t qc_expert_stem(const char *name)
{
    static const char word[] = "experts.";
    for (const char *at = strstr(name, word); at; at = strstr(at + 1, word)) {
        size_t digits = strspn(at + sizeof word - 1, "0123456789");
        if ((at == name || at[-1] == '.') && digits > 0 && at[sizeof word - 1 + digits] == '.')
            return (size_t)(at - name) + sizeof word - 2;
    }
    return 0;
}

/* ---- rules ---- */

/* Writes the names of the members whose rule is r, or is not: "q_proj, k_proj and v_proj". */
static qc_status list_members(const char **text, qc_arena *arena, const qc_checkpoint *model,
                              const qc_fused_group *g, const uint32_t *rule_of, uint32_t r,
                              int with, qc_error *err)
{
    unsigned count = 0, done = 0;
    *text = "";
    for (unsigned k = 0; k < g->count; k++)
        count += (rule_of[g->tensors[k]] == r) == with;
    for (unsigned k = 0; k < g->count; k++) {
        const char *member = model->tensors[g->tensors[k]].name;
        member += g->parent_len ? g->parent_len + 1 : 0;
        if ((rule_of[g->tensors[k]] == r) != with)
            continue;
        const char *between = done == 0 ? "" : done + 1 == count ? " and " : ", ";
        QC_TRY(qc_arena_printf(arena, text, err, "%s%s%.*s", *text, between,
                               (int)strcspn(member, "."), member));
        done++;
    }
    return QC_OK;
}

/* Finds the last rule of a group, if the group is split now and would not be if that rule counted
 * for all of it. */
static uint32_t rule_that_splits(const qc_fused_group *g, const qc_rule *rules,
                                 const qc_fused_state *states, const uint32_t *rule_of)
{
    uint32_t last = NO_RULE;
    int quantized = 0, fixed = 0;
    for (unsigned k = 0; k < g->count; k++) {
        uint32_t r = rule_of[g->tensors[k]];
        if (r != NO_RULE && (last == NO_RULE || r > last))
            last = r;
        quantized += states[g->tensors[k]] == QC_FUSED_QUANTIZED;
        fixed |= states[g->tensors[k]] == QC_FUSED_FIXED;
    }
    if (quantized == 0 || quantized == (int)g->count || last == NO_RULE)
        return NO_RULE;
    return rules[last].quantize && fixed ? NO_RULE : last;
}

qc_status qc_fused_widen(qc_fused_widenings *out, qc_arena *arena, const qc_checkpoint *model,
                         const qc_recipe_options *options, const qc_fused_state *states,
                         uint32_t *rule_of, const char **why, qc_error *err)
{
    const qc_rule *rules = options->rules;
    qc_fused_group g;
    *out = (qc_fused_widenings){.count = options->rule_count};
    QC_TRY(qc_arena_array(arena, &out->list, options->rule_count, err));
    for (uint32_t i = 0; out->count > 0 && i < model->tensor_count; i++) {
        if (!qc_fused_group_of(&g, model, i) || g.tensors[0] != i)
            continue;
        uint32_t r = rule_that_splits(&g, rules, states, rule_of);
        if (r == NO_RULE)
            continue;
        qc_fused_widening *w = &out->list[r];
        if (w->groups++ == 0) {
            w->row = g.row;
            QC_TRY(qc_arena_strndup(arena, &w->first, model->tensors[i].name, g.parent_len, err));
            QC_TRY(list_members(&w->named, arena, model, &g, rule_of, r, 1, err));
            QC_TRY(list_members(&w->added, arena, model, &g, rule_of, r, 0, err));
        }
        for (unsigned k = 0; k < g.count; k++) {
            if (rule_of[g.tensors[k]] != r)
                QC_TRY(qc_arena_printf(arena, &why[g.tensors[k]], err, "%s %s, for %s",
                                       rules[r].quantize ? "--quantize" : "--keep", rules[r].glob,
                                       g.row->fused));
            rule_of[g.tensors[k]] = r;
        }
    }
    return QC_OK;
}
