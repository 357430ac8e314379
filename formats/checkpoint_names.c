/* What the names of weight files say: which library writes them, and which variant they are. Then
 * warnings about a checkpoint, and the lists of names that stand in them. */
#include "formats/checkpoint_internal.h"

#include "base/text.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#define WARNINGS_MAX     64u
#define NAMES_SHOWN      5u
#define NAMES_MORE_BYTES 32u /* room for " and N more" */

static const struct {
    const char *stem;
    const char *suffix;
    int torch;
} kinds[] = {
    {"model", ".safetensors", 0},
    {QC_CHECKPOINT_DIFFUSERS_STEM, ".safetensors", 0},
    {"pytorch_model", ".bin", 1},
    {QC_CHECKPOINT_DIFFUSERS_STEM, ".bin", 1},
};

/* If *p begins with text, moves *p behind it. */
static int take(const char **p, const char *text)
{
    size_t n = strlen(text);
    if (strncmp(*p, text, n) != 0)
        return 0;
    *p += n;
    return 1;
}

/* Takes ".V" as a variant, where V has no dot. Where there is none, nothing is taken. */
static void take_variant(const char **p, qc_checkpoint_name *out, const char *ends)
{
    size_t n = **p == '.' ? strcspn(*p + 1, ends) : 0;
    if (n == 0 || (*p)[1 + n] == '\0')
        return;
    out->variant = *p + 1;
    out->variant_len = n;
    *p += 1 + n;
}

static int read_as(qc_checkpoint_name *out, const char *name, const char *stem, const char *suffix)
{
    const char *p = name;
    memset(out, 0, sizeof *out);
    if (!take(&p, stem))
        return 0;
    if (!qc_begins_with(p, suffix))
        take_variant(&p, out, ".-/");
    if (*p == '-') {
        out->shard = 1;
        p += strcspn(p, "./");
    }
    if (!take(&p, suffix))
        return 0;
    if (*p == '\0' || strcmp(p, ".zst") == 0)
        return 1;
    if (out->variant || out->shard || !take(&p, ".index"))
        return 0;
    out->index = 1;
    if (strcmp(p, ".json") != 0)
        take_variant(&p, out, "./");
    return strcmp(p, ".json") == 0;
}

int qc_checkpoint_name_read(qc_checkpoint_name *out, const char *name)
{
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        if (!read_as(out, name, kinds[i].stem, kinds[i].suffix))
            continue;
        out->torch = kinds[i].torch;
        return 1;
    }
    memset(out, 0, sizeof *out);
    return 0;
}

int qc_checkpoint_name_is_torch(const char *path)
{
    static const char *const suffixes[] = {".bin", ".pt", ".pth", ".ckpt", ".bin.index.json"};
    static const char *const of_trainers[] = {"training_args", "optimizer", "scheduler",
                                              "rng_state"};
    const char *name = qc_last_name(path);
    for (size_t i = 0; i < sizeof of_trainers / sizeof *of_trainers; i++) {
        if (strncmp(name, of_trainers[i], strlen(of_trainers[i])) == 0)
            return 0;
    }
    for (size_t i = 0; i < sizeof suffixes / sizeof *suffixes; i++) {
        if (qc_ends_with(name, suffixes[i]))
            return 1;
    }
    return 0;
}

qc_status qc_checkpoint_refuse_torch(const char *path, const char *found, qc_error *err)
{
    if (found)
        QC_FAIL(err, QC_ERR_UNSUPPORTED,
                "%s has no .safetensors file, but what torch.save wrote: %s; 'python -m qconv "
                "from-torch %s OUT' writes safetensors from it",
                path, found, qc_text_word_or(path, "DIR"));
    QC_FAIL(err, QC_ERR_UNSUPPORTED,
            "%s is a file of torch.save; 'python -m qconv from-torch %s OUT' writes safetensors "
            "from it",
            path, qc_text_word_or(path, "FILE"));
}

int qc_checkpoint_name_is_adapter(const char *path)
{
    static const char *const stems[] = {"adapter_model", "pytorch_lora_weights"};
    const char *name = qc_last_name(path);
    if (!qc_ends_with(name, ".safetensors") && !qc_ends_with(name, ".bin"))
        return 0;
    for (size_t i = 0; i < sizeof stems / sizeof *stems; i++) {
        size_t n = strlen(stems[i]);
        if (strncmp(name, stems[i], n) == 0 && (name[n] == '.' || name[n] == '-'))
            return 1;
    }
    return 0;
}

/* ---- warnings ---- */

void qc_checkpoint_names_add(qc_checkpoint_names *list, const char *name)
{
    size_t room = sizeof list->text - NAMES_MORE_BYTES - list->used;
    list->count++;
    if (list->shown + 1 != list->count || list->shown == NAMES_SHOWN)
        return;
    int n = snprintf(list->text + list->used, room, "%s" QC_NAME, list->shown ? ", " : "", name);
    if (n < 0 || (size_t)n >= room) {
        list->text[list->used] = '\0';
        return;
    }
    list->used += (size_t)n;
    list->shown++;
}

const char *qc_checkpoint_names_text(qc_checkpoint_names *list)
{
    if (list->count > list->shown) {
        (void)snprintf(list->text + list->used, sizeof list->text - list->used, " and %zu more",
                       list->count - list->shown);
        list->shown = list->count;
    }
    return list->text;
}

qc_status qc_checkpoint_warn(qc_checkpoint *c, qc_error *err, const char *fmt, ...)
{
    qc_error text; /* used for its length and because it cleans control characters */
    va_list ap;
    if (c->warning_count == WARNINGS_MAX)
        return QC_OK;
    char raw[sizeof text.msg];
    va_start(ap, fmt);
    int n = vsnprintf(raw, sizeof raw, fmt, ap);
    va_end(ap);
    if (n < 0)
        QC_FAIL(err, QC_ERR_INTERNAL, "a text could not be formatted");
    (void)QC_ERROR(&text, QC_OK, "%s", raw);
    if (!c->warnings) {
        void *p = NULL;
        QC_TRY(qc_arena_alloc(&c->arena, &p, WARNINGS_MAX, sizeof *c->warnings, err));
        c->warnings = p;
    }
    QC_TRY(qc_arena_strdup(&c->arena, &c->warnings[c->warning_count], text.msg, err));
    c->warning_count++;
    return QC_OK;
}
