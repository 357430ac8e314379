/* Limits what a tokenizer.json may make of one text. Normalizers may multiply a text, patterns may
 * look at it again and again, and both may be chained, so a file of a few hundred bytes could ask
 * for any amount of memory and time. Real tokenizers stay far below both limits: their steps make
 * at most three bytes out of one (a space becomes U+2581), and their patterns take up to seventeen
 * steps for a byte. */
#include "base/workers.h"
#include "convert/tokenizer/tokenizer_internal.h"

#include <inttypes.h>

/* One step may write this much for each byte of the text, plus this much for any text. What is held
 * at a time is less than 200 times that: two texts, one for each step that rewrites, symbols,
 * candidates for merges, and ids, all with the room that growing leaves. */
#define BYTES_FOR_BYTE 16u
#define BYTES_FOR_TEXT ((uint64_t)64 << 10)
/* The same limits for the steps that patterns take. */
#define STEPS_FOR_BYTE 1024u
#define STEPS_FOR_TEXT ((uint64_t)16 << 20)

void qc_token_budget_init(qc_token_budget *b, size_t text_bytes)
{
    *b = (qc_token_budget){
        .text_bytes = text_bytes,
        .bytes = BYTES_FOR_TEXT + (uint64_t)text_bytes * BYTES_FOR_BYTE,
        .steps = STEPS_FOR_TEXT + (uint64_t)text_bytes * STEPS_FOR_BYTE,
    };
}

qc_status qc_token_budget_make(qc_token_budget *b, unsigned stage, size_t bytes, qc_error *err)
{
    if (bytes > b->bytes - b->made[stage])
        QC_FAIL(err, QC_ERR_INPUT,
                "the tokenizer's %s makes more than %" PRIu64 " bytes of the text's %zu",
                stage < QC_MAX_STEPS ? "normalizer" : "pre_tokenizer", b->bytes, b->text_bytes);
    b->made[stage] += bytes;
    return QC_OK;
}

int qc_token_budget_spend(qc_token_budget *b, uint64_t steps)
{
    b->taken = steps > b->steps - b->taken ? b->steps : b->taken + steps;
    return b->taken < b->steps && !qc_interrupted();
}

qc_status qc_token_budget_check(const qc_token_budget *b, qc_error *err)
{
    QC_TRY(qc_check_interrupted(err));
    if (b->taken >= b->steps)
        QC_FAIL(err, QC_ERR_INPUT,
                "the tokenizer's patterns take more than %" PRIu64
                " steps for the text's %zu bytes",
                b->steps, b->text_bytes);
    return QC_OK;
}
