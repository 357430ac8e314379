/* WordPiece (Schuster and Nakajima 2012, as BERT has it): from the left, the longest piece that the
 * vocabulary has, until the word is over. A word with a rest that has no piece is unknown as a
 * whole. */
#include "convert/tokenizer/tokenizer_internal.h"

#include <string.h>

#define BYTES_A_STEP 8u /* that are hashed, as one step of the budget */

static int begins_character(char c)
{
    return ((unsigned char)c & 0xc0) != 0x80;
}

static uint64_t characters(qc_span s)
{
    uint64_t n = 0;
    for (size_t i = 0; i < s.len; i++)
        n += (uint64_t)begins_character(s.text[i]);
    return n;
}

/* Finds the longest piece of the encoder's word s that begins at `at`, and sets its end. */
static qc_status longest_piece(qc_encoder *e, qc_span s, size_t at, size_t *end, uint32_t *id,
                               qc_error *err)
{
    const qc_wordpiece *w = &e->t->wordpiece;
    qc_strbuf *piece = &e->step_text[QC_MAX_STEPS];
    size_t n = s.len - at < w->longest ? s.len - at : w->longest;
    piece->len = 0;
    if (at > 0)
        QC_TRY(qc_strbuf_adds(piece, w->prefix, err));
    const size_t before = piece->len;
    QC_TRY(qc_strbuf_add(piece, s.text + at, n, err));
    *id = QC_NO_TOKEN;
    for (; n > 0 && *id == QC_NO_TOKEN; n--) {
        if (at + n < s.len && !begins_character(s.text[at + n]))
            continue;
        if (!qc_token_budget_spend(&e->budget, 1 + (before + n) / BYTES_A_STEP))
            return qc_token_budget_check(&e->budget, err);
        *id = qc_bpe_find(&e->t->bpe, piece->data, before + n);
        *end = at + n;
    }
    return QC_OK;
}

qc_status qc_wordpiece_encode(qc_encoder *e, qc_span s, qc_error *err)
{
    const qc_wordpiece *w = &e->t->wordpiece;
    qc_bpe_room *r = &e->bpe;
    const size_t count = r->count;
    if (characters(s) > w->most)
        return qc_bpe_push(r, w->unk_id, err);
    for (size_t at = 0, end = 0; at < s.len; at = end) {
        uint32_t id = QC_NO_TOKEN;
        QC_TRY(longest_piece(e, s, at, &end, &id, err));
        if (id == QC_NO_TOKEN) {
            r->count = count;
            return qc_bpe_push(r, w->unk_id, err);
        }
        QC_TRY(qc_bpe_push(r, id, err));
    }
    return QC_OK;
}
