#include "convert/llama/family.h"

#include <string.h>

static const struct {
    const qc_llama_family *types;
    size_t count;
} families[] = {
    {qc_family_llama, sizeof qc_family_llama / sizeof *qc_family_llama},
    {qc_family_mixtures, sizeof qc_family_mixtures / sizeof *qc_family_mixtures},
};

const qc_llama_family *qc_llama_family_of(const char *model_type)
{
    for (size_t i = 0; i < sizeof families / sizeof *families; i++)
        for (size_t t = 0; t < families[i].count; t++)
            if (strcmp(model_type, families[i].types[t].model_type) == 0)
                return &families[i].types[t];
    return NULL;
}

const char *qc_llama_family_list(void)
{
    return "llama, mistral, qwen2, qwen3, mixtral, qwen2_moe and qwen3_moe";
}
