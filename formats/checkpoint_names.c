/* What the names of weight files say: which library writes them, and which variant they are. */
#include "formats/checkpoint_internal.h"

#include <string.h>

static const struct {
    const char *stem;
    const char *suffix;
    int torch;
} kinds[] = {
    {"model", ".safetensors", 0},
    {QC_CKPT_DIFFUSERS_STEM, ".safetensors", 0},
    {"pytorch_model", ".bin", 1},
    {QC_CKPT_DIFFUSERS_STEM, ".bin", 1},
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
static void take_variant(const char **p, qc_ckpt_name *out, const char *ends)
{
    size_t n = **p == '.' ? strcspn(*p + 1, ends) : 0;
    if (n == 0 || (*p)[1 + n] == '\0')
        return;
    out->variant = *p + 1;
    out->variant_len = n;
    *p += 1 + n;
}

static int read_as(qc_ckpt_name *out, const char *name, const char *stem, const char *suffix)
{
    const char *p = name;
    memset(out, 0, sizeof *out);
    if (!take(&p, stem))
        return 0;
    if (strncmp(p, suffix, strlen(suffix)) != 0)
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

int qc_ckpt_name_read(qc_ckpt_name *out, const char *name)
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

int qc_ckpt_name_is_adapter(const char *path)
{
    static const char *const stems[] = {"adapter_model", "pytorch_lora_weights"};
    const char *slash = strrchr(path, '/');
    const char *name = slash ? slash + 1 : path;
    if (!qc_ends_with(name, ".safetensors") && !qc_ends_with(name, ".bin"))
        return 0;
    for (size_t i = 0; i < sizeof stems / sizeof *stems; i++) {
        size_t n = strlen(stems[i]);
        if (strncmp(name, stems[i], n) == 0 && (name[n] == '.' || name[n] == '-'))
            return 1;
    }
    return 0;
}
