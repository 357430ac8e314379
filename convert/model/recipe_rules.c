/* The general rules say what a tensor is from its name and shape alone, for model types without a
 * table and for names that a table does not know. docs/recipes.md states them in the same order;
 * keep both in step. Where we cannot foresee what transformers does, the tensor is kept and its
 * module goes on the skip list, so that a wrong guess costs size but never gives a checkpoint that
 * does not load. */
#include "convert/model/recipe_rules.h"

#include "base/text.h"
#include "convert/families/type_table.h"

#include <stdlib.h>
#include <string.h>

/* Words that mean something as a component of a name. One scan of a component finds them all. */
enum {
    WORD_HEAD = 1,
    WORD_PREDICTIONS = 2,
    WORD_LABELS = 4,
    WORD_EMBEDDING = 8,
    WORD_ROUTER = 16,
    WORD_GATE = 32,
    WORD_INDEXER = 64,
    WORD_QFORMER = 128,
    WORD_COMPRESSOR = 256,
    WORD_BUFFER = 512,
    WORD_PACKED = 1024,
    WORD_STATE = 2048,
    WORD_DETECTOR = 4096
};

/* Lists end with NULL. */
static const struct {
    unsigned flag;
    const char *texts[16];
} words[] = {
    {WORD_HEAD, {"lm_head", "lm_heads", "generator_lm_head", "embed_out", "vocab_projector"}},
    {WORD_PREDICTIONS, {"predictions", "entity_predictions"}},
    {WORD_LABELS, {"classifier", "score", "qa_outputs"}},
    {WORD_DETECTOR, {"bbox_embed", "class_embed"}},
    {WORD_EMBEDDING,
     {"embed_tokens", "wte", "wpe", "word_embeddings", "position_embeddings",
      "token_type_embeddings", "tok_embeddings", "embed_in", "embed_positions",
      "relative_attention_bias", "tokens_embed", "positions_embed"}},
    {WORD_ROUTER, {"router"}},
    {WORD_GATE, {"gate", "wg", "shared_expert_gate"}},
    {WORD_INDEXER, {"indexer"}},
    {WORD_QFORMER, {"qformer"}},
    {WORD_COMPRESSOR, {"compressor"}},
    {WORD_BUFFER,
     {"inv_freq", "position_ids", "token_type_ids", "masked_bias", "cos_cached", "sin_cached",
      "e_score_correction_bias", "relative_position_index", "running_mean", "running_var",
      "num_batches_tracked"}},
    {WORD_PACKED, {"qweight", "weight_packed", "q_weight", "trellis"}},
    {WORD_STATE,
     {"SCB", "weight_format", "weight_scale", "weight_scale_inv", "weight_scale_2", "input_scale",
      "scales", "qzeros", "g_idx", "weight_shape", "weight_zero_point", "scale_weight",
      "scale_input", "comfy_quant", "scaled_fp8"}},
};

static unsigned word_flag(const char *s, size_t len)
{
    for (size_t i = 0; i < sizeof words / sizeof *words; i++) {
        for (const char *const *text = words[i].texts; *text; text++) {
            if (**text == *s && strncmp(*text, s, len) == 0 && (*text)[len] == '\0')
                return words[i].flag;
        }
    }
    return 0;
}

/* A name taken apart. "a.b.3.weight" has the module path "a.b.3", whose last component is "3" and
 * whose last component that is not a number is "b"; the leaf is "weight". */
typedef struct {
    const char *name;
    const char *leaf;
    const char *module; /* len 0 where there is none */
    const char *word;
    size_t leaf_len, module_len, word_len, path_len;
    unsigned path_flags, module_flag, word_flag, leaf_flag;
} name_parts;

static int is_number(const char *s, size_t len)
{
    size_t i = 0;
    while (i < len && qc_is_digit(s[i]))
        i++;
    return i == len;
}

static name_parts take_apart(const char *name)
{
    name_parts n = {.name = name, .leaf = name, .module = name, .word = name};
    const char *dot = strrchr(name, '.');
    if (dot) {
        n.leaf = dot + 1;
        n.path_len = (size_t)(dot - name);
    }
    n.leaf_len = strlen(n.leaf);
    n.leaf_flag = word_flag(n.leaf, n.leaf_len);
    for (size_t at = 0; dot && at <= n.path_len;) {
        n.module = name + at;
        n.module_len = strcspn(n.module, ".");
        int number = is_number(n.module, n.module_len);
        n.module_flag = number ? 0 : word_flag(n.module, n.module_len);
        n.path_flags |= n.module_flag;
        if (!number) {
            n.word = n.module;
            n.word_len = n.module_len;
            n.word_flag = n.module_flag;
        }
        at += n.module_len + 1;
    }
    return n;
}

static int equals(const char *s, size_t len, const char *word)
{
    return strlen(word) == len && memcmp(s, word, len) == 0;
}

static int contains(const char *s, size_t len, const char *word)
{
    size_t n = strlen(word);
    for (size_t i = 0; i + n <= len; i++) {
        if (s[i] == *word && memcmp(s + i, word, n) == 0)
            return 1;
    }
    return 0;
}

static void set(qc_tensor_class *out, qc_role role, unsigned traits, const char *why)
{
    out->role = role;
    out->traits = traits;
    out->why = why;
}

/* Classifies the tensors of weights that another tool packed. */
static int packed_role(const name_parts *n, qc_tensor_class *out)
{
    if (n->leaf_flag == WORD_PACKED || qc_ends_with(n->leaf, "_blocks"))
        set(out, QC_ROLE_PACKED, QC_TRAIT_FIXED, "packed weight");
    else if (n->leaf_flag == WORD_STATE || qc_ends_with(n->leaf, "_scales"))
        set(out, QC_ROLE_STATE, QC_TRAIT_FIXED, "scale of a packed weight");
    else
        return 0;
    return 1;
}

static int is_norm(const name_parts *n)
{
    return contains(n->module, n->module_len, "norm") ||
           contains(n->module, n->module_len, "Norm") ||
           (n->module_len >= 2 && memcmp(n->module, "ln", 2) == 0 &&
            (n->module_len == 2 || n->module[2] == '_' || qc_is_digit(n->module[2])));
}

static int embedding_class(const name_parts *n, qc_tensor_class *out)
{
    static const char *const hints[] = {"embed", "Embed", "position", "token_type"};
    static const char *const linear_hints[] = {"proj", "mapping", "linear", "dense", "transform"};
    if (n->word_flag == WORD_EMBEDDING || equals(n->module, n->module_len, "shared")) {
        set(out, QC_ROLE_EMBEDDING, 0, "embedding");
        return 1;
    }
    int found = n->word_len >= 4 && memcmp(n->word + n->word_len - 4, "_emb", 4) == 0;
    for (size_t i = 0; i < sizeof hints / sizeof *hints; i++)
        found |= contains(n->word, n->word_len, hints[i]);
    found |= (n->path_flags & WORD_EMBEDDING) != 0;
    for (size_t i = 0; found && i < sizeof linear_hints / sizeof *linear_hints; i++)
        found = !contains(n->word, n->word_len, linear_hints[i]);
    if (found)
        set(out, QC_ROLE_EMBEDDING, QC_TRAIT_MAYBE, "called as an embedding");
    return found;
}

/* Classifies a Linear that transformers holds in 32 bits (_keep_in_fp32_modules). */
static int held_in_float(const qc_model_facts *facts, const name_parts *n)
{
    if ((n->path_flags & WORD_INDEXER) && equals(n->module, n->module_len, "weights_proj"))
        return 1;
    if (equals(n->module, n->module_len, "wo"))
        return qc_type_is("wo_in_float", facts->model_type);
    if (n->path_flags & WORD_COMPRESSOR)
        return qc_type_is("compressor_in_float", facts->model_type);
    return (n->path_flags & WORD_QFORMER) && qc_type_is("qformer_in_float", facts->model_type);
}

/* Says why transformers 5.24 does not use this weight as that of a Linear; NULL if it does. Codes
 * in its place would be multiplied as if they were numbers, or not be found. */
static const char *used_otherwise(const qc_model_facts *facts, const name_parts *n)
{
    const char *type = facts->model_type;
    const int grouped =
        equals(n->module, n->module_len, "wo_a") || equals(n->module, n->module_len, "o_a_proj");
    if (grouped && qc_type_is("grouped_output", type))
        return "multiplied in groups, not as one matrix";
    if (equals(n->module, n->module_len, "dt_proj") && qc_type_is("dt_proj_by_hand", type))
        return "its model multiplies with the weight itself";
    return qc_type_is("linears_of_its_own", type) ? "in a layer of the model's own kind" : NULL;
}

/* Is it a head that predicts a label? "classifier" also counts at the end of a longer name, because
 * transformers 5 leaves a module plain that ends in a name on its list. */
static int is_label_head(const name_parts *n)
{
    size_t len = n->module_len;
    return (n->path_flags & WORD_LABELS) || equals(n->module, len, "head") ||
           (len >= 10 && memcmp(n->module + len - 10, "classifier", 10) == 0);
}

static void classify_matrix(const qc_model_facts *facts, const qc_checkpoint_tensor *t,
                            const name_parts *n, qc_tensor_class *out)
{
    if (strcmp(n->leaf, "weight") != 0 || n->path_len == 0) {
        int embed = contains(n->leaf, n->leaf_len, "embed");
        set(out, embed ? QC_ROLE_EMBEDDING : QC_ROLE_OTHER, 0, "not the weight of a module");
    } else if (n->path_flags & WORD_HEAD) {
        set(out, QC_ROLE_HEAD, QC_TRAIT_MODULE, "output head");
    } else if (equals(n->module, n->module_len, "decoder") && (n->path_flags & WORD_PREDICTIONS)) {
        set(out, QC_ROLE_HEAD, QC_TRAIT_MODULE, "output head");
    } else if (n->path_flags & WORD_DETECTOR) {
        set(out, QC_ROLE_HEAD, QC_TRAIT_MODULE, "head of a detector, shared between layers");
    } else if (strcmp(n->name, "text_projection.weight") == 0) {
        set(out, QC_ROLE_HEAD, QC_TRAIT_MODULE, "last projection, which transformers leaves alone");
    } else if (is_label_head(n)) {
        set(out, QC_ROLE_HEAD, QC_TRAIT_MODULE, "classification head");
    } else if (embedding_class(n, out)) {
        return;
    } else if ((n->path_flags & WORD_ROUTER) ||
               (facts->has_experts && n->module_flag == WORD_GATE)) {
        set(out, QC_ROLE_ROUTER, QC_TRAIT_MODULE, "router");
    } else if (facts->vocab_size > 0 && t->dims[0] == facts->vocab_size) {
        int output = contains(n->module, n->module_len, "output") ||
                     contains(n->module, n->module_len, "out_proj");
        set(out, output ? QC_ROLE_HEAD : QC_ROLE_EMBEDDING, QC_TRAIT_MAYBE | QC_TRAIT_MODULE,
            "as many rows as the vocabulary");
    } else if (held_in_float(facts, n)) {
        set(out, QC_ROLE_LINEAR, QC_TRAIT_FLOAT, "held in 32 bit by transformers");
    } else if (used_otherwise(facts, n)) {
        set(out, QC_ROLE_OTHER, QC_TRAIT_MAYBE | QC_TRAIT_MODULE, used_otherwise(facts, n));
    } else if (t->dims[0] < QC_MIN_GUESSED_DIM || t->dims[1] < QC_MIN_GUESSED_DIM) {
        set(out, QC_ROLE_OTHER, QC_TRAIT_MAYBE | QC_TRAIT_MODULE, "a side shorter than 32");
    } else {
        set(out, QC_ROLE_LINEAR, 0, "linear by general rule");
    }
}

void qc_rules_classify(const qc_model_facts *facts, const qc_checkpoint_tensor *t,
                       qc_tensor_class *out)
{
    name_parts n = take_apart(t->name);
    if (n.leaf_flag == WORD_BUFFER) {
        set(out, QC_ROLE_OTHER, QC_TRAIT_FIXED, "buffer");
    } else if (packed_role(&n, out)) {
        return;
    } else if (is_norm(&n) || contains(n.leaf, n.leaf_len, "norm")) {
        set(out, QC_ROLE_NORM, 0, "norm");
    } else if (t->ndim > 2) {
        int conv = t->ndim > 3 || contains(t->name, n.path_len, "conv") ||
                   contains(t->name, n.path_len, "patch");
        set(out, conv ? QC_ROLE_CONV : QC_ROLE_OTHER, 0,
            conv                                           ? "convolution"
            : contains(t->name, strlen(t->name), "expert") ? "stack of experts, not 2-D"
                                                           : "not 2-D");
    } else if (equals(n.leaf, n.leaf_len, "bias") || qc_ends_with(n.leaf, "_bias")) {
        set(out, QC_ROLE_BIAS, 0, "bias");
    } else if (t->ndim < 2) {
        set(out, QC_ROLE_OTHER, 0, "not 2-D");
    } else {
        classify_matrix(facts, t, &n, out);
    }
}

int qc_rules_conv1d_name(const char *name)
{
    static const char *const names[] = {".c_attn.weight", ".q_attn.weight", ".c_proj.weight",
                                        ".c_fc.weight"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        if (qc_ends_with(name, names[i]))
            return 1;
    }
    return 0;
}

size_t qc_rules_predictions_path(const char *name)
{
    const char *path_end = strrchr(name, '.');
    if (!path_end || !strstr(name, "predictions."))
        return 0;
    for (const char *p = name; p < path_end;) {
        size_t len = strcspn(p, ".");
        if (word_flag(p, len) == WORD_PREDICTIONS)
            return (size_t)(p - name) + len;
        p += len + 1;
    }
    return 0;
}

int qc_rules_predicts_more(const char *name, uint64_t layers)
{
    static const char *const prefixes[] = {"model.layers.", "layers."};
    for (size_t i = 0; i < sizeof prefixes / sizeof *prefixes; i++) {
        size_t len = strlen(prefixes[i]);
        if (strncmp(name, prefixes[i], len) != 0)
            continue;
        size_t digits = strspn(name + len, "0123456789");
        if (digits > 0 && digits <= 9 && name[len + digits] == '.' &&
            strtoull(name + len, NULL, 10) >= layers)
            return 1;
    }
    for (const char *s = name; s; s = strchr(s, '.')) {
        s += *s == '.';
        if (qc_begins_with(s, "mtp.") || qc_begins_with(s, "mtp_"))
            return 1;
    }
    return 0;
}
