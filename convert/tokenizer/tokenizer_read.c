/* Reads tokenizer.json. Every member that changes the ids is read, or refused by name. Members that
 * do not (decoder, truncation and padding, offsets) are left alone. */
#include "convert/tokenizer/tokenizer_internal.h"

#include <inttypes.h>
#include <string.h>
#include <utf8proc.h>

#define BYTE_LEVEL                                                                                 \
    "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+"
#define WORD_CHARACTER "[\\p{L}\\p{M}\\p{Nd}\\p{Nl}\\p{Pc}]"
#define PUNCTUATION    "[!-/:-@\\[-`{-~\\p{P}]" /* BERT takes all signs of ASCII for it */
#define ADDED_MAX      1000000u
#define WORD_CHARS     100u /* max_input_chars_per_word where it is missing */
#define MAX_NESTING    16u
#define TEMPLATE_MAX   64u /* how many tokens may be put in front of a text, and behind it */

typedef struct {
    qc_tokenizer *t;
    qc_error *err;
    int metaspace_first, removes; /* see check_metaspace */
    unsigned depth;
    uint32_t next_added; /* id of the next added token that is not in the vocabulary */
} reader;

#define REFUSE(r, ...) QC_FAIL((r)->err, QC_ERR_UNSUPPORTED, __VA_ARGS__)
#define BAD(r, ...)    QC_FAIL((r)->err, QC_ERR_INPUT, __VA_ARGS__)

/* ---- small ---------------------------------------------------------------------------------- */

/* A member that is there and is not null. */
static const qc_json_node *given(const qc_json_node *n, const char *key)
{
    const qc_json_node *m = qc_json_get(n, key);
    return m && qc_json_kind_of(m) != QC_JSON_NULL ? m : NULL;
}

static qc_status type_of(reader *r, const qc_json_node *n, const char *what, const char **type)
{
    if (qc_json_kind_of(n) != QC_JSON_OBJECT)
        BAD(r, "%s: expected an object with a type", what);
    qc_status st = qc_json_as_string(qc_json_get(n, "type"), "type", type, r->err);
    if (st != QC_OK)
        qc_error_prefix(r->err, "%s", what);
    return st;
}

static qc_status flag(reader *r, const qc_json_node *n, const char *key, int dflt, int *out)
{
    const qc_json_node *m = given(n, key);
    *out = dflt;
    return m ? qc_json_as_bool(m, key, out, r->err) : QC_OK;
}

static qc_status copy(reader *r, const char *s, const char **out)
{
    return qc_arena_strndup(&r->t->arena, out, s, strlen(s), r->err);
}

/* Calls fn for each object of the list in member `key`. */
typedef qc_status (*part_fn)(reader *r, const qc_json_node *n);

static qc_status sequence(reader *r, const qc_json_node *n, const char *key, part_fn fn)
{
    const qc_json_node *list = qc_json_get(n, key);
    if (!list || qc_json_kind_of(list) != QC_JSON_ARRAY)
        BAD(r, "%s: expected an array", key);
    if (++r->depth > MAX_NESTING)
        BAD(r, "%s: nested too deep", key);
    for (const qc_json_node *p = qc_json_first(list); p; p = qc_json_next(p))
        QC_TRY(fn(r, p));
    r->depth--;
    return QC_OK;
}

/* {"String": ...} or {"Regex": ...} */
static qc_status pattern(reader *r, const qc_json_node *n, qc_pattern **out)
{
    const char *text = qc_json_string_or(qc_json_get(n, "String"), NULL);
    if (text && *text)
        return qc_pattern_literal(out, text, r->err);
    text = qc_json_string_or(qc_json_get(n, "Regex"), NULL);
    if (text && *text)
        return qc_pattern_compile(out, text, r->err);
    BAD(r, "pattern: expected {\"String\": TEXT} or {\"Regex\": TEXT}, not empty");
}

/* ---- normalizer ----------------------------------------------------------------------------- */

static qc_status add_norm(reader *r, qc_norm **out)
{
    qc_tokenizer *t = r->t;
    if (t->norm_count == QC_MAX_STEPS)
        REFUSE(r, "a normalizer of more than %u parts is not supported", QC_MAX_STEPS);
    *out = &t->norms[t->norm_count++];
    return QC_OK;
}

static int unicode_form(const char *type)
{
    static const char *const names[] = {"NFC", "NFD", "NFKC", "NFKD"};
    static const int forms[] = {UTF8PROC_STABLE | UTF8PROC_COMPOSE,
                                UTF8PROC_STABLE | UTF8PROC_DECOMPOSE,
                                UTF8PROC_STABLE | UTF8PROC_COMPOSE | UTF8PROC_COMPAT,
                                UTF8PROC_STABLE | UTF8PROC_DECOMPOSE | UTF8PROC_COMPAT};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (strcmp(type, names[i]) == 0)
            return forms[i];
    return 0;
}

/* Adds a norm for what there is to do with characters, if there is anything. */
static qc_status add_characters(reader *r, int does)
{
    qc_norm *norm = NULL;
    if (does == 0)
        return QC_OK;
    QC_TRY(add_norm(r, &norm));
    *norm = (qc_norm){.kind = QC_NORM_CHARACTERS, .form = does};
    r->removes |= (does & (QC_CHARS_CLEAN | QC_CHARS_STRIP)) != 0;
    return QC_OK;
}

static qc_status bert_normalizer(reader *r, const qc_json_node *n)
{
    int clean = 0, apart = 0, strip = 0, lower = 0;
    qc_norm *norm = NULL;
    QC_TRY(flag(r, n, "clean_text", 1, &clean));
    QC_TRY(flag(r, n, "handle_chinese_chars", 1, &apart));
    QC_TRY(flag(r, n, "lowercase", 1, &lower));
    QC_TRY(flag(r, n, "strip_accents", lower, &strip));
    QC_TRY(add_characters(r, (clean ? QC_CHARS_CLEAN : 0) | (apart ? QC_CHARS_APART : 0)));
    if (strip) {
        QC_TRY(add_norm(r, &norm));
        *norm = (qc_norm){.kind = QC_NORM_UNICODE, .form = unicode_form("NFD")};
    }
    return add_characters(r, (strip ? QC_CHARS_STRIP : 0) | (lower ? QC_CHARS_LOWER : 0));
}

static qc_status normalizer(reader *r, const qc_json_node *n)
{
    const char *type = NULL, *text = NULL;
    qc_norm *norm = NULL;
    QC_TRY(type_of(r, n, "normalizer", &type));
    if (strcmp(type, "Sequence") == 0)
        return sequence(r, n, "normalizers", normalizer);
    if (strcmp(type, "BertNormalizer") == 0)
        return bert_normalizer(r, n);
    int form = unicode_form(type);
    if (!form && strcmp(type, "Prepend") != 0 && strcmp(type, "Replace") != 0)
        REFUSE(r, "the normalizer '%s' is not supported", type);
    QC_TRY(add_norm(r, &norm));
    norm->form = form;
    if (form) {
        norm->kind = QC_NORM_UNICODE;
    } else if (strcmp(type, "Prepend") == 0) {
        norm->kind = QC_NORM_PREPEND;
        QC_TRY(qc_json_as_string(qc_json_get(n, "prepend"), "prepend", &text, r->err));
        return copy(r, text, &norm->content);
    } else {
        norm->kind = QC_NORM_REPLACE;
        QC_TRY(qc_json_as_string(qc_json_get(n, "content"), "content", &text, r->err));
        r->removes |= *text == '\0';
        QC_TRY(copy(r, text, &norm->content));
        return pattern(r, qc_json_get(n, "pattern"), &norm->pattern);
    }
    return QC_OK;
}

/* ---- pre-tokenizer -------------------------------------------------------------------------- */

static qc_status add_step(reader *r, qc_step **out)
{
    qc_tokenizer *t = r->t;
    if (t->step_count == QC_MAX_STEPS)
        REFUSE(r, "a pre_tokenizer of so many parts is not supported");
    *out = &t->steps[t->step_count++];
    return QC_OK;
}

static qc_status behavior(reader *r, const qc_json_node *n, qc_split_behavior *out)
{
    static const char *const names[] = {"Isolated", "Removed", "MergedWithPrevious",
                                        "MergedWithNext", "Contiguous"};
    const char *name = NULL;
    QC_TRY(qc_json_as_string(qc_json_get(n, "behavior"), "behavior", &name, r->err));
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (strcmp(name, names[i]) == 0) {
            *out = (qc_split_behavior)i;
            return QC_OK;
        }
    BAD(r,
        "behavior '%s': expected Isolated, Removed, MergedWithPrevious, MergedWithNext or "
        "Contiguous",
        name);
}

static qc_status split_step(reader *r, const qc_json_node *n)
{
    qc_step *s = NULL;
    QC_TRY(add_step(r, &s));
    s->kind = QC_STEP_SPLIT;
    QC_TRY(behavior(r, n, &s->behavior));
    QC_TRY(flag(r, n, "invert", 0, &s->invert));
    return pattern(r, qc_json_get(n, "pattern"), &s->pattern);
}

static qc_status byte_level(reader *r, const qc_json_node *n)
{
    qc_step *s = NULL;
    int regex = 1;
    QC_TRY(add_step(r, &s));
    s->kind = QC_STEP_SPLIT;
    QC_TRY(flag(r, n, "add_prefix_space", 1, &s->prefix_space));
    QC_TRY(flag(r, n, "use_regex", 1, &regex));
    if (regex)
        QC_TRY(qc_pattern_compile(&s->pattern, BYTE_LEVEL, r->err));
    QC_TRY(add_step(r, &s));
    s->kind = QC_STEP_BYTES;
    r->t->kind = "byte-level BPE";
    return QC_OK;
}

static qc_status prepend_scheme(reader *r, const qc_json_node *n, qc_prepend *out)
{
    static const char *const names[] = {"never", "first", "always"};
    const char *name = qc_json_string_or(given(n, "prepend_scheme"), "always");
    size_t i = 0;
    int prefix = 1;
    while (i < 3 && strcmp(name, names[i]) != 0)
        i++;
    if (i == 3)
        BAD(r, "prepend_scheme '%s': expected never, first or always", name);
    *out = (qc_prepend)i;
    QC_TRY(flag(r, n, "add_prefix_space", 1, &prefix));
    if (!prefix && *out != QC_PREPEND_NEVER)
        BAD(r, "add_prefix_space is false, but prepend_scheme is '%s'", name);
    r->metaspace_first |= *out == QC_PREPEND_FIRST;
    return QC_OK;
}

static qc_status metaspace(reader *r, const qc_json_node *n)
{
    const char *text = NULL;
    qc_step *s = NULL;
    int cuts = 1;
    QC_TRY(add_step(r, &s));
    s->kind = QC_STEP_METASPACE;
    s->behavior = QC_SPLIT_NEXT;
    QC_TRY(qc_json_as_string(qc_json_get(n, "replacement"), "replacement", &text, r->err));
    if (!*text)
        BAD(r, "replacement: expected a character");
    QC_TRY(copy(r, text, &s->space));
    QC_TRY(prepend_scheme(r, n, &s->prepend));
    QC_TRY(flag(r, n, "split", 1, &cuts));
    return cuts ? qc_pattern_literal(&s->pattern, text, r->err) : QC_OK;
}

static qc_status digits(reader *r, const qc_json_node *n)
{
    qc_step *s = NULL;
    int alone = 0;
    QC_TRY(add_step(r, &s));
    s->kind = QC_STEP_SPLIT;
    QC_TRY(flag(r, n, "individual_digits", 0, &alone));
    s->behavior = alone ? QC_SPLIT_ISOLATED : QC_SPLIT_CONTIGUOUS;
    return qc_pattern_compile(&s->pattern, "\\p{N}", r->err);
}

static qc_status bert_pre_tokenizer(reader *r)
{
    qc_step *s = NULL;
    QC_TRY(add_step(r, &s));
    *s = (qc_step){.kind = QC_STEP_SPLIT, .behavior = QC_SPLIT_REMOVED};
    QC_TRY(qc_pattern_compile(&s->pattern, "\\s", r->err));
    QC_TRY(add_step(r, &s));
    *s = (qc_step){.kind = QC_STEP_SPLIT, .behavior = QC_SPLIT_ISOLATED};
    return qc_pattern_compile(&s->pattern, PUNCTUATION, r->err);
}

static qc_status pre_tokenizer(reader *r, const qc_json_node *n)
{
    const char *type = NULL;
    QC_TRY(type_of(r, n, "pre_tokenizer", &type));
    if (strcmp(type, "Sequence") == 0)
        return sequence(r, n, "pretokenizers", pre_tokenizer);
    if (strcmp(type, "Split") == 0)
        return split_step(r, n);
    if (strcmp(type, "ByteLevel") == 0)
        return byte_level(r, n);
    if (strcmp(type, "Metaspace") == 0)
        return metaspace(r, n);
    if (strcmp(type, "Digits") == 0)
        return digits(r, n);
    if (strcmp(type, "BertPreTokenizer") == 0)
        return bert_pre_tokenizer(r);
    REFUSE(r, "the pre_tokenizer '%s' is not supported", type);
}

/* ---- model ---------------------------------------------------------------------------------- */

static size_t children(const qc_json_node *n)
{
    size_t count = 0;
    for (const qc_json_node *c = qc_json_first(n); c; c = qc_json_next(c))
        count++;
    return count;
}

static void reserve_id(reader *r, uint32_t id)
{
    if (id >= r->t->vocabulary)
        r->t->vocabulary = id + 1;
}

static qc_status vocabulary(reader *r, const qc_json_node *n)
{
    qc_tokenizer *t = r->t;
    if (!n || qc_json_kind_of(n) != QC_JSON_OBJECT)
        BAD(r, "vocab: expected an object of tokens and ids");
    QC_TRY(qc_bpe_vocab_init(&t->bpe, &t->arena, children(n), r->err));
    for (const qc_json_node *c = qc_json_first(n); c; c = qc_json_next(c)) {
        uint64_t id = 0;
        const char *text = NULL;
        QC_TRY(qc_json_as_u64(c, qc_json_key(c), &id, r->err));
        if (id >= UINT32_MAX - 1)
            BAD(r, "vocab: the id %" PRIu64 " of '%s' is too large", id, qc_json_key(c));
        QC_TRY(copy(r, qc_json_key(c), &text));
        QC_TRY(qc_bpe_vocab_add(&t->bpe, text, strlen(text), (uint32_t)id, r->err));
        reserve_id(r, (uint32_t)id);
    }
    return QC_OK;
}

/* Reads the two sides of a merge: ["a", "b"], or "a b" with one space. */
static qc_status merge_sides(reader *r, const qc_json_node *n, qc_span *left, qc_span *right)
{
    if (qc_json_kind_of(n) == QC_JSON_STRING) {
        const char *text = qc_json_string_or(n, ""), *space = strchr(text, ' ');
        if (!space || strchr(space + 1, ' '))
            BAD(r, "merges: expected two tokens with a space between, found '%s'", text);
        *left = (qc_span){text, (size_t)(space - text)};
        *right = (qc_span){space + 1, strlen(space + 1)};
        return QC_OK;
    }
    const qc_json_node *a = qc_json_kind_of(n) == QC_JSON_ARRAY ? qc_json_first(n) : NULL;
    const qc_json_node *b = a ? qc_json_next(a) : NULL;
    const char *one = qc_json_string_or(a, NULL), *two = qc_json_string_or(b, NULL);
    if (!one || !two || qc_json_next(b))
        BAD(r, "merges: expected two tokens each");
    *left = (qc_span){one, strlen(one)};
    *right = (qc_span){two, strlen(two)};
    return QC_OK;
}

static qc_status merge(reader *r, qc_span left, qc_span right, uint32_t rank, qc_strbuf *whole)
{
    qc_bpe *b = &r->t->bpe;
    uint32_t one = qc_bpe_find(b, left.text, left.len);
    uint32_t two = qc_bpe_find(b, right.text, right.len);
    whole->len = 0;
    QC_TRY(qc_strbuf_add(whole, left.text, left.len, r->err));
    QC_TRY(qc_strbuf_add(whole, right.text, right.len, r->err));
    uint32_t id = qc_bpe_find(b, whole->data ? whole->data : "", whole->len);
    if (one == QC_NO_TOKEN || two == QC_NO_TOKEN || id == QC_NO_TOKEN)
        BAD(r, "merges: '%.*s' and '%.*s': one of them, or both together, is not in the vocabulary",
            (int)(left.len < 80 ? left.len : 80), left.text, (int)(right.len < 80 ? right.len : 80),
            right.text);
    return qc_bpe_merge_add(b, one, two, rank, id, r->err);
}

static qc_status merges(reader *r, const qc_json_node *n)
{
    qc_strbuf whole;
    uint32_t rank = 0;
    qc_status st = QC_OK;
    if (!n || qc_json_kind_of(n) != QC_JSON_ARRAY)
        BAD(r, "merges: expected an array");
    QC_TRY(qc_bpe_merges_init(&r->t->bpe, &r->t->arena, children(n), r->err));
    qc_strbuf_init(&whole, QC_TOKENIZER_TEXT_MAX);
    for (const qc_json_node *c = qc_json_first(n); c && st == QC_OK; c = qc_json_next(c)) {
        qc_span left = {"", 0}, right = {"", 0};
        if (strncmp(qc_json_string_or(c, ""), "#version", 8) == 0)
            continue;
        st = merge_sides(r, c, &left, &right);
        if (st == QC_OK)
            st = merge(r, left, right, rank++, &whole);
    }
    qc_strbuf_deinit(&whole);
    return st;
}

static qc_status no_affix(reader *r, const qc_json_node *model, const char *key)
{
    const qc_json_node *n = given(model, key);
    if (n && *qc_json_string_or(n, "?"))
        REFUSE(r, "a model with '%s' is not supported", key);
    return QC_OK;
}

static qc_status wordpiece(reader *r, const qc_json_node *n)
{
    qc_tokenizer *t = r->t;
    qc_wordpiece *w = &t->wordpiece;
    const char *unk = qc_json_string_or(given(n, "unk_token"), "[UNK]");
    const qc_json_node *most = given(n, "max_input_chars_per_word");
    w->most = WORD_CHARS;
    if (most)
        QC_TRY(qc_json_as_u64(most, "max_input_chars_per_word", &w->most, r->err));
    QC_TRY(copy(r, qc_json_string_or(given(n, "continuing_subword_prefix"), "##"), &w->prefix));
    QC_TRY(vocabulary(r, qc_json_get(n, "vocab")));
    for (size_t i = 0; i < t->bpe.vocab_slots; i++)
        if (t->bpe.vocab[i].text && t->bpe.vocab[i].len > w->longest)
            w->longest = t->bpe.vocab[i].len;
    w->unk_id = qc_bpe_find(&t->bpe, unk, strlen(unk));
    if (w->unk_id == QC_NO_TOKEN)
        BAD(r, "unk_token: '%.80s' is not in the vocabulary", unk);
    t->kind = "WordPiece";
    return QC_OK;
}

static qc_status model(reader *r, const qc_json_node *n)
{
    qc_bpe *b = &r->t->bpe;
    const char *type = NULL, *unk = NULL;
    double dropout = 0.0;
    if (!n)
        BAD(r, "model: it is missing");
    QC_TRY(type_of(r, n, "model", &type));
    if (strcmp(type, "WordPiece") == 0)
        return wordpiece(r, n);
    if (strcmp(type, "BPE") != 0)
        REFUSE(r, "the model '%s' is not supported; expected BPE or WordPiece", type);
    if (given(n, "dropout"))
        QC_TRY(qc_json_as_double(given(n, "dropout"), "dropout", &dropout, r->err));
    if (dropout != 0.0)
        REFUSE(r, "a dropout of %g is not supported: ids would depend on chance", dropout);
    QC_TRY(no_affix(r, n, "continuing_subword_prefix"));
    QC_TRY(no_affix(r, n, "end_of_word_suffix"));
    QC_TRY(flag(r, n, "fuse_unk", 0, &b->fuse_unk));
    QC_TRY(flag(r, n, "byte_fallback", 0, &b->byte_fallback));
    QC_TRY(flag(r, n, "ignore_merges", 0, &b->ignore_merges));
    unk = qc_json_string_or(given(n, "unk_token"), NULL);
    if (unk)
        QC_TRY(copy(r, unk, &b->unk_token));
    QC_TRY(vocabulary(r, qc_json_get(n, "vocab")));
    QC_TRY(merges(r, qc_json_get(n, "merges")));
    qc_bpe_finish(b);
    r->t->kind = b->byte_fallback ? "BPE with byte fallback" : "BPE";
    return QC_OK;
}

/* ---- added tokens --------------------------------------------------------------------------- */

/* The id that the package gives: the vocabulary's, or the next one behind all others. */
static uint32_t added_id(const reader *r, qc_span content)
{
    uint32_t id = qc_bpe_find(&r->t->bpe, content.text, content.len);
    return id != QC_NO_TOKEN ? id : r->next_added;
}

static qc_status added_token(reader *r, const qc_json_node *n)
{
    qc_tokenizer *t = r->t;
    const char *text = NULL;
    uint64_t id = 0;
    qc_added a = {.id = 0};
    QC_TRY(qc_json_as_string(qc_json_get(n, "content"), "content", &text, r->err));
    QC_TRY(qc_json_as_u64(qc_json_get(n, "id"), "id", &id, r->err));
    if (!*text)
        REFUSE(r, "an empty added token is not supported");
    QC_TRY(copy(r, text, &a.content.text));
    a.content.len = strlen(text);
    QC_TRY(flag(r, n, "special", 0, &a.special));
    QC_TRY(flag(r, n, "normalized", !a.special, &a.normalized));
    QC_TRY(flag(r, n, "single_word", 0, &a.single_word));
    QC_TRY(flag(r, n, "lstrip", 0, &a.lstrip));
    QC_TRY(flag(r, n, "rstrip", 0, &a.rstrip));
    if (id >= UINT32_MAX - 1)
        BAD(r, "added_tokens: the id %" PRIu64 " of '%s' is too large", id, text);
    a.id = added_id(r, a.content);
    if (a.id != id)
        REFUSE(r, "added_tokens: '%s' has the id %" PRIu64 ", but would be given %" PRIu32, text,
               id, a.id);
    t->added[t->added_count++] = a;
    if (a.id >= r->next_added)
        r->next_added = a.id + 1;
    reserve_id(r, a.id);
    return QC_OK;
}

static qc_status make_set(reader *r, qc_added_set *set, int normalized, qc_matcher *m)
{
    qc_tokenizer *t = r->t;
    void *v = NULL;
    qc_norm_room room;
    qc_status st = QC_OK;
    QC_TRY(qc_arena_alloc(&t->arena, &v, t->added_count + 1, sizeof *set->patterns, r->err));
    set->patterns = v;
    for (unsigned i = 0; i < 2; i++)
        qc_strbuf_init(&room.text[i], QC_TOKENIZER_TEXT_MAX);
    room.turn = 0;
    for (size_t i = 0; i < t->added_count && st == QC_OK; i++) {
        const qc_added *a = &t->added[i];
        qc_span s = a->content;
        const char *text = NULL;
        if (a->normalized != normalized)
            continue;
        if (normalized)
            st = qc_normalize(t->norms, t->norm_count, m, &room, s, &s, r->err);
        if (st == QC_OK && s.len == 0)
            st = QC_ERROR(r->err, QC_ERR_UNSUPPORTED,
                          "the added token '%s' is empty once it is normalized", a->content.text);
        if (st == QC_OK)
            st = qc_arena_strndup(&t->arena, &text, s.text, s.len, r->err);
        if (st == QC_OK)
            set->patterns[set->count++] = (qc_added_pattern){{text, s.len}, a};
    }
    for (unsigned i = 0; i < 2; i++)
        qc_strbuf_deinit(&room.text[i]);
    if (st == QC_OK)
        qc_added_set_sort(set);
    return st;
}

/* Refuses the same text twice, which would mean one id in one place and another in the other. */
static qc_status check_twice(reader *r, const qc_added_set *set)
{
    for (size_t i = 1; i < set->count; i++) {
        const qc_added *a = set->patterns[i - 1].token, *b = set->patterns[i].token;
        if (a->content.len == b->content.len &&
            memcmp(a->content.text, b->content.text, a->content.len) == 0)
            REFUSE(r, "added_tokens: '%s' is there twice", a->content.text);
    }
    return QC_OK;
}

static qc_status added_tokens(reader *r, const qc_json_node *list)
{
    qc_tokenizer *t = r->t;
    qc_matcher *m = NULL;
    void *v = NULL;
    size_t count = 0, bytes = 0;
    qc_token_budget budget;
    if (list && qc_json_kind_of(list) != QC_JSON_ARRAY)
        BAD(r, "added_tokens: expected an array");
    count = list ? children(list) : 0;
    if (count > ADDED_MAX)
        BAD(r, "added_tokens: %zu are too many", count);
    QC_TRY(qc_arena_alloc(&t->arena, &v, count + 1, sizeof *t->added, r->err));
    t->added = v;
    r->next_added = (uint32_t)t->bpe.vocab_count;
    for (const qc_json_node *n = list ? qc_json_first(list) : NULL; n; n = qc_json_next(n))
        QC_TRY(added_token(r, n));
    for (size_t i = 0; i < t->added_count; i++)
        bytes += t->added[i].content.len;
    qc_token_budget_init(&budget, bytes);
    QC_TRY(qc_pattern_compile(&t->word, WORD_CHARACTER, r->err));
    QC_TRY(qc_matcher_create(&m, &budget, r->err));
    qc_status st = make_set(r, &t->raw, 0, m);
    if (st == QC_OK)
        st = make_set(r, &t->normalized, 1, m);
    qc_matcher_free(m);
    QC_TRY(st);
    QC_TRY(check_twice(r, &t->raw));
    return check_twice(r, &t->normalized);
}

/* ---- post-processor ------------------------------------------------------------------------- */

/* Puts new tokens around those that are there already. */
static qc_status surround(reader *r, const uint32_t *front, size_t front_count,
                          const uint32_t *back, size_t back_count)
{
    qc_tokenizer *t = r->t;
    void *v = NULL;
    if (front_count + t->front_count > TEMPLATE_MAX || back_count + t->back_count > TEMPLATE_MAX)
        REFUSE(r, "a post_processor that adds more than %u tokens is not supported", TEMPLATE_MAX);
    QC_TRY(
        qc_arena_alloc(&t->arena, &v, front_count + t->front_count + 1, sizeof *t->front, r->err));
    uint32_t *f = v;
    QC_TRY(qc_arena_alloc(&t->arena, &v, back_count + t->back_count + 1, sizeof *t->back, r->err));
    uint32_t *b = v;
    memcpy(f, front, front_count * sizeof *f);
    if (t->front_count)
        memcpy(f + front_count, t->front, t->front_count * sizeof *f);
    if (t->back_count)
        memcpy(b, t->back, t->back_count * sizeof *b);
    memcpy(b + t->back_count, back, back_count * sizeof *b);
    t->front = f;
    t->back = b;
    t->front_count += front_count;
    t->back_count += back_count;
    for (size_t i = 0; i < front_count; i++)
        reserve_id(r, front[i]);
    for (size_t i = 0; i < back_count; i++)
        reserve_id(r, back[i]);
    return QC_OK;
}

typedef struct {
    uint32_t ids[2][TEMPLATE_MAX]; /* those in front, and those behind */
    size_t count[2];
} template_ids;

static qc_status add_template(reader *r, template_ids *x, int behind, const qc_json_node *n)
{
    uint64_t id = 0;
    QC_TRY(qc_json_as_u64(n, "ids", &id, r->err));
    if (id >= UINT32_MAX - 1)
        BAD(r, "post_processor: the id %" PRIu64 " is too large", id);
    if (x->count[behind] == TEMPLATE_MAX)
        REFUSE(r, "a template of more than %u tokens is not supported", TEMPLATE_MAX);
    x->ids[behind][x->count[behind]++] = (uint32_t)id;
    return QC_OK;
}

static qc_status template_part(reader *r, template_ids *x, int behind, const qc_json_node *part,
                               const qc_json_node *specials)
{
    const char *name = NULL;
    QC_TRY(qc_json_as_string(qc_json_get(qc_json_get(part, "SpecialToken"), "id"), "id", &name,
                             r->err));
    const qc_json_node *ids = qc_json_get(qc_json_get(specials, name), "ids");
    if (!ids || qc_json_kind_of(ids) != QC_JSON_ARRAY)
        BAD(r, "post_processor: the special token '%s' has no ids", name);
    for (const qc_json_node *i = qc_json_first(ids); i; i = qc_json_next(i))
        QC_TRY(add_template(r, x, behind, i));
    return QC_OK;
}

static qc_status template_processing(reader *r, const qc_json_node *n)
{
    const qc_json_node *single = qc_json_get(n, "single");
    const qc_json_node *specials = qc_json_get(n, "special_tokens");
    template_ids x = {.count = {0, 0}};
    unsigned parts = 0;
    int seen = 0;
    if (!single || qc_json_kind_of(single) != QC_JSON_ARRAY)
        BAD(r, "post_processor: single: expected an array");
    for (const qc_json_node *p = qc_json_first(single); p; p = qc_json_next(p)) {
        const qc_json_node *text = qc_json_get(p, "Sequence");
        if (!text) {
            if (++parts > 2 * TEMPLATE_MAX)
                REFUSE(r, "a template of more than %u parts is not supported", 2 * TEMPLATE_MAX);
            QC_TRY(template_part(r, &x, seen, p, specials));
            continue;
        }
        if (seen || strcmp(qc_json_string_or(qc_json_get(text, "id"), ""), "A") != 0)
            REFUSE(r, "a template with other than one sequence, A, is not supported");
        seen = 1;
    }
    if (!seen)
        REFUSE(r, "a template with other than one sequence, A, is not supported");
    return surround(r, x.ids[0], x.count[0], x.ids[1], x.count[1]);
}

/* Reads ["<s>", 0]. */
static qc_status named_id(reader *r, const qc_json_node *n, const char *key, uint32_t *out)
{
    const qc_json_node *pair = qc_json_get(n, key), *name = NULL, *number = NULL;
    uint64_t id = 0;
    if (pair && qc_json_kind_of(pair) == QC_JSON_ARRAY)
        name = qc_json_first(pair);
    number = name ? qc_json_next(name) : NULL;
    QC_TRY(qc_json_as_u64(number, key, &id, r->err));
    if (id >= UINT32_MAX - 1)
        BAD(r, "post_processor: the id %" PRIu64 " is too large", id);
    *out = (uint32_t)id;
    return QC_OK;
}

static qc_status post_processor(reader *r, const qc_json_node *n)
{
    const char *type = NULL;
    uint32_t front = 0, back = 0;
    QC_TRY(type_of(r, n, "post_processor", &type));
    if (strcmp(type, "Sequence") == 0)
        return sequence(r, n, "processors", post_processor);
    if (strcmp(type, "ByteLevel") == 0)
        return QC_OK; /* this affects offsets only */
    if (strcmp(type, "TemplateProcessing") == 0)
        return template_processing(r, n);
    if (strcmp(type, "RobertaProcessing") == 0 || strcmp(type, "BertProcessing") == 0) {
        QC_TRY(named_id(r, n, "cls", &front));
        QC_TRY(named_id(r, n, "sep", &back));
        return surround(r, &front, 1, &back, 1);
    }
    REFUSE(r, "the post_processor '%s' is not supported", type);
}

/* ---- all of it ------------------------------------------------------------------------------ */

/* "first" depends on where in the original text a span begins, so we would have to know what was
 * removed in front of it. */
static qc_status check_metaspace(reader *r)
{
    if (r->metaspace_first && r->removes)
        REFUSE(r, "a normalizer that removes text before Metaspace with prepend_scheme 'first' is "
                  "not supported");
    return QC_OK;
}

qc_status qc_tokenizer_read(qc_tokenizer *t, const qc_json_node *root, qc_error *err)
{
    reader r = {.t = t, .err = err};
    if (qc_json_kind_of(root) != QC_JSON_OBJECT)
        BAD(&r, "expected an object");
    QC_TRY(model(&r, given(root, "model")));
    if (given(root, "normalizer"))
        QC_TRY(normalizer(&r, given(root, "normalizer")));
    if (given(root, "pre_tokenizer"))
        QC_TRY(pre_tokenizer(&r, given(root, "pre_tokenizer")));
    QC_TRY(check_metaspace(&r));
    QC_TRY(added_tokens(&r, given(root, "added_tokens")));
    if (given(root, "post_processor"))
        QC_TRY(post_processor(&r, given(root, "post_processor")));
    return QC_OK;
}
