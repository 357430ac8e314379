#include "convert/family/family.h"

#include "base/checked.h"

#include <stdio.h>
#include <string.h>

#define TYPES(array)                                                                               \
    {                                                                                              \
        array, sizeof(array) / sizeof *(array)                                                     \
    }

static const struct {
    const qc_family *types;
    size_t count;
} families[] = {TYPES(qc_family_llama),   TYPES(qc_family_gemma),    TYPES(qc_family_phi3),
                TYPES(qc_family_granite), TYPES(qc_family_olmo2),    TYPES(qc_family_smollm3),
                TYPES(qc_family_glm4),    TYPES(qc_family_deepseek), TYPES(qc_family_mixtures),
                TYPES(qc_family_gpt_oss), TYPES(qc_family_gpt2),     TYPES(qc_family_gpt_neox),
                TYPES(qc_family_bert)};

#define FAMILIES (sizeof families / sizeof *families)

const qc_family *qc_family_of(const char *model_type)
{
    for (size_t i = 0; i < FAMILIES; i++)
        for (size_t t = 0; t < families[i].count; t++)
            if (strcmp(model_type, families[i].types[t].model_type) == 0)
                return &families[i].types[t];
    return NULL;
}

const char *qc_family_list(char text[QC_FAMILY_LIST_BYTES])
{
    size_t used = 0;
    text[0] = '\0';
    for (size_t i = 0; i < FAMILIES; i++)
        for (size_t t = 0; t < families[i].count && used < QC_FAMILY_LIST_BYTES; t++) {
            const int last = i + 1 == FAMILIES && t + 1 == families[i].count;
            used += (size_t)snprintf(text + used, QC_FAMILY_LIST_BYTES - used, "%s%s",
                                     used == 0 ? ""
                                     : last    ? " and "
                                               : ", ",
                                     families[i].types[t].model_type);
        }
    return text;
}
