/* The stack machine. Opcodes move values; only GLOBAL, BINPERSID and REDUCE have a meaning beyond
 * that, which is in torch_rebuild.c.
 *
 * A value is 16 bytes and owns nothing: tuples are runs in `items`, lists and dicts are chains in
 * `pairs`. A memo bomb (a list that holds the list before it twice, and so on) is therefore as
 * small as the text that describes it, and nothing here follows such links.
 *
 * Marks: `marks` holds the stack's height at each MARK; nothing is popped from below the last. */
#include "formats/torch_pickle.h"

#include "base/alloc.h"
#include "base/bytes.h"
#include "formats/torch_pickle_internal.h"

#include <inttypes.h>
#include <string.h>

#define PROTOCOL_MIN   2
#define PROTOCOL_MAX   5
#define NAME_MAX_BYTES 256u /* of a module or a class */

typedef struct {
    qc_pickle *p;
    size_t pos;
    size_t op_pos; /* of the opcode being run, for messages */
    int stopped;
    qc_pickle_value *stack;
    size_t stack_count, stack_cap;
    size_t *marks;
    size_t mark_count, mark_cap;
    qc_pickle_value *memo;
    size_t memo_cap;
    size_t memo_used; /* entries that are set */
} machine;

/* ---- stack and memo ---- */

static size_t floor_of(const machine *m)
{
    return m->mark_count ? m->marks[m->mark_count - 1] : 0;
}

static qc_status push(machine *m, qc_pickle_value value, qc_error *err)
{
    QC_TRY(qc_pickle_grow(&m->stack, &m->stack_cap, m->stack_count, qc_pickle_limit(m->p),
                          sizeof *m->stack, err));
    m->stack[m->stack_count++] = value;
    return QC_OK;
}

static qc_status need(const machine *m, size_t values, qc_error *err)
{
    size_t have = m->stack_count - floor_of(m);
    if (have < values)
        QC_FAIL(err, QC_ERR_INPUT, "opcode 0x%02x takes %zu values, but the stack has %zu",
                m->p->text[m->op_pos], values, have);
    return QC_OK;
}

static qc_status pop(machine *m, qc_pickle_value *out, qc_error *err)
{
    QC_TRY(need(m, 1, err));
    /* need() saw a value. NOLINTNEXTLINE(clang-analyzer-core.NullDereference) */
    *out = m->stack[--m->stack_count];
    return QC_OK;
}

static qc_status push_mark(machine *m, qc_error *err)
{
    QC_TRY(qc_pickle_grow(&m->marks, &m->mark_cap, m->mark_count, qc_pickle_limit(m->p),
                          sizeof *m->marks, err));
    m->marks[m->mark_count++] = m->stack_count;
    return QC_OK;
}

/* Pops the last mark; the values above it stay on the stack. */
static qc_status pop_mark(machine *m, size_t *first, qc_error *err)
{
    if (m->mark_count == 0)
        QC_FAIL(err, QC_ERR_INPUT, "opcode 0x%02x needs a mark, but there is none",
                m->p->text[m->op_pos]);
    *first = m->marks[--m->mark_count];
    return QC_OK;
}

static qc_status memo_put(machine *m, uint64_t index, qc_error *err)
{
    QC_TRY(need(m, 1, err));
    /* Picklers number from 0, and each number costs at least one byte of text. */
    if (index >= m->p->len)
        QC_FAIL(err, QC_ERR_INPUT, "memo number %" PRIu64 " cannot be in a pickle of %zu bytes",
                index, m->p->len);
    if (index >= m->memo_cap) {
        size_t cap = m->memo_cap ? m->memo_cap * 2 : 256;
        void *v = m->memo;
        if (cap <= index)
            cap = (size_t)index + 1;
        QC_TRY(qc_realloc_array(&v, cap, sizeof *m->memo, err));
        m->memo = v;
        memset(m->memo + m->memo_cap, 0, (cap - m->memo_cap) * sizeof *m->memo);
        m->memo_cap = cap;
    }
    m->memo_used += m->memo[index].kind == QC_PICKLE_UNSET;
    /* need() saw a value. NOLINTNEXTLINE(clang-analyzer-core.NullDereference) */
    m->memo[index] = m->stack[m->stack_count - 1];
    return QC_OK;
}

static qc_status memo_get(machine *m, uint64_t index, qc_error *err)
{
    if (index >= m->memo_cap || m->memo[index].kind == QC_PICKLE_UNSET)
        QC_FAIL(err, QC_ERR_INPUT, "memo number %" PRIu64 " was never set", index);
    return push(m, m->memo[index], err);
}

/* ---- arguments in the text ---- */

static qc_status take(machine *m, uint64_t n, const unsigned char **bytes, qc_error *err)
{
    if (n > m->p->len - m->pos)
        QC_FAIL(err, QC_ERR_TRUNCATED, "expected %" PRIu64 " bytes, found %zu", n,
                m->p->len - m->pos);
    *bytes = m->p->text + m->pos;
    m->pos += (size_t)n;
    return QC_OK;
}

/* Takes a little-endian number of 1, 2, 4 or 8 bytes. */
static qc_status take_uint(machine *m, unsigned bytes, uint64_t *out, qc_error *err)
{
    const unsigned char *b = NULL;
    QC_TRY(take(m, bytes, &b, err));
    *out = 0;
    for (unsigned i = bytes; i-- > 0;)
        *out = *out << 8 | b[i];
    return QC_OK;
}

static qc_status push_int(machine *m, uint64_t twos_complement, qc_error *err)
{
    return push(m, (qc_pickle_value){.kind = QC_PICKLE_INT, .at = twos_complement}, err);
}

/* Pushes n bytes of text or of something else. */
static qc_status push_run(machine *m, uint64_t n, qc_pickle_kind kind, qc_error *err)
{
    const unsigned char *b = NULL;
    QC_TRY(take(m, n, &b, err));
    /* It is at most as long as the text, which is below 2^32. */
    return push(
        m, (qc_pickle_value){.kind = kind, .count = (uint32_t)n, .at = (uint64_t)(b - m->p->text)},
        err);
}

/* Pushes an integer of n bytes, two's complement; one that does not fit 64 bits becomes OPAQUE. */
static qc_status push_long(machine *m, uint64_t n, qc_error *err)
{
    const unsigned char *b = NULL;
    uint64_t v = 0;
    if (n > 8)
        return push_run(m, n, QC_PICKLE_OPAQUE, err);
    QC_TRY(take(m, n, &b, err));
    if (n > 0 && b[n - 1] & 0x80u)
        v = UINT64_MAX;
    for (size_t i = (size_t)n; i-- > 0;)
        v = v << 8 | b[i];
    return push_int(m, v, err);
}

static qc_status take_line(machine *m, const char **line, size_t *bytes, qc_error *err)
{
    const unsigned char *at = m->p->text + m->pos;
    size_t left = m->p->len - m->pos;
    const unsigned char *end = memchr(at, '\n', left < NAME_MAX_BYTES ? left : NAME_MAX_BYTES);
    if (!end && left < NAME_MAX_BYTES)
        QC_FAIL(err, QC_ERR_TRUNCATED, "a name is cut off after %zu bytes", left);
    if (!end)
        QC_FAIL(err, QC_ERR_UNSUPPORTED, "a name has more than %u bytes", NAME_MAX_BYTES);
    *line = (const char *)at;
    *bytes = (size_t)(end - at);
    m->pos += *bytes + 1;
    return QC_OK;
}

/* ---- opcodes with a meaning ---- */

static qc_status do_global(machine *m, qc_error *err)
{
    const char *module = NULL;
    const char *name = NULL;
    size_t module_bytes = 0;
    size_t name_bytes = 0;
    qc_pickle_value v;
    QC_TRY(take_line(m, &module, &module_bytes, err));
    QC_TRY(take_line(m, &name, &name_bytes, err));
    QC_TRY(qc_pickle_global(module, module_bytes, name, name_bytes, &v, err));
    return push(m, v, err);
}

static qc_status do_stack_global(machine *m, qc_error *err)
{
    qc_pickle_value module;
    qc_pickle_value name;
    qc_pickle_value v;
    QC_TRY(pop(m, &name, err));
    QC_TRY(pop(m, &module, err));
    if (name.kind != QC_PICKLE_STRING || module.kind != QC_PICKLE_STRING)
        QC_FAIL(err, QC_ERR_INPUT, "STACK_GLOBAL needs two strings");
    QC_TRY(qc_pickle_global((const char *)m->p->text + module.at, module.count,
                            (const char *)m->p->text + name.at, name.count, &v, err));
    return push(m, v, err);
}

static qc_status do_reduce(machine *m, qc_error *err)
{
    qc_pickle_value callee;
    qc_pickle_value args;
    qc_pickle_value v;
    QC_TRY(pop(m, &args, err));
    QC_TRY(pop(m, &callee, err));
    if (callee.kind != QC_PICKLE_GLOBAL || args.kind != QC_PICKLE_TUPLE)
        QC_FAIL(err, QC_ERR_UNSUPPORTED, "a call has something else than a name and its arguments");
    QC_TRY(qc_pickle_call(m->p, &callee, &args, &v, err));
    return push(m, v, err);
}

/* Attributes of an OrderedDict (_metadata, versions of modules) say nothing about tensors. */
static qc_status do_build(machine *m, qc_error *err)
{
    qc_pickle_value state;
    QC_TRY(need(m, 2, err));
    QC_TRY(pop(m, &state, err));
    if (m->stack[m->stack_count - 1].kind != QC_PICKLE_DICT)
        QC_FAIL(err, QC_ERR_UNSUPPORTED, "BUILD needs a dict");
    return QC_OK;
}

static qc_status do_persistent(machine *m, qc_error *err)
{
    qc_pickle_value id;
    qc_pickle_value v;
    QC_TRY(pop(m, &id, err));
    QC_TRY(qc_pickle_persistent(m->p, &id, &v, err));
    return push(m, v, err);
}

static qc_status make_tuple(machine *m, size_t first, qc_error *err)
{
    qc_pickle *p = m->p;
    size_t n = m->stack_count - first;
    qc_pickle_value v = {.kind = QC_PICKLE_TUPLE, .count = (uint32_t)n, .at = p->item_count};
    for (size_t i = 0; i < n && m->stack; i++) {
        QC_TRY(qc_pickle_grow(&p->items, &p->item_cap, p->item_count, qc_pickle_limit(p),
                              sizeof *p->items, err));
        p->items[p->item_count++] = m->stack[first + i];
    }
    m->stack_count = first;
    return push(m, v, err);
}

static qc_status do_tuple_of(machine *m, size_t n, qc_error *err)
{
    QC_TRY(need(m, n, err));
    return make_tuple(m, m->stack_count - n, err);
}

/* Moves the values from first on into the list or dict below them: one each, or key and value. */
static qc_status add_values(machine *m, size_t first, qc_pickle_kind kind, qc_error *err)
{
    size_t step = kind == QC_PICKLE_DICT ? 2 : 1;
    if (!m->stack || first <= floor_of(m) || (m->stack_count - first) % step != 0)
        QC_FAIL(err, QC_ERR_INPUT, "opcode 0x%02x has nothing to add to, or only half a pair",
                m->p->text[m->op_pos]);
    qc_pickle_value to = m->stack[first - 1];
    if (to.kind != (uint32_t)kind)
        QC_FAIL(err, QC_ERR_UNSUPPORTED, "opcode 0x%02x needs a %s", m->p->text[m->op_pos],
                kind == QC_PICKLE_DICT ? "dict" : "list");
    for (size_t i = first; i < m->stack_count; i += step)
        QC_TRY(qc_pickle_add_pair(m->p, &to, step == 2 ? &m->stack[i] : NULL,
                                  &m->stack[i + step - 1], err));
    m->stack_count = first;
    return QC_OK;
}

static qc_status add_some(machine *m, size_t values, qc_pickle_kind kind, qc_error *err)
{
    QC_TRY(need(m, values + 1, err));
    return add_values(m, m->stack_count - values, kind, err);
}

static qc_status add_marked(machine *m, qc_pickle_kind kind, qc_error *err)
{
    size_t first = 0;
    QC_TRY(pop_mark(m, &first, err));
    return add_values(m, first, kind, err);
}

static qc_status fail_opcode(unsigned char op, qc_error *err)
{
    static const struct {
        unsigned char op;
        const char *name;
    } names[] = {
        {'i', "INST"},         {'o', "OBJ"},
        {'P', "PERSID"},       {0x81, "NEWOBJ"},
        {0x82, "EXT1"},        {0x83, "EXT2"},
        {0x84, "EXT4"},        {0x8f, "EMPTY_SET"},
        {0x90, "ADDITEMS"},    {0x91, "FROZENSET"},
        {0x92, "NEWOBJ_EX"},   {0x96, "BYTEARRAY8"},
        {0x97, "NEXT_BUFFER"}, {0x98, "READONLY_BUFFER"},
    };
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        if (names[i].op == op)
            QC_FAIL(err, QC_ERR_UNSUPPORTED, "opcode %s is not one that tensors need",
                    names[i].name);
    }
    QC_FAIL(err, QC_ERR_UNSUPPORTED, "opcode 0x%02x is not one that tensors need", op);
}

/* ---- the loop ---- */

static qc_status do_frame(machine *m, qc_error *err)
{
    uint64_t n = 0;
    QC_TRY(take_uint(m, 8, &n, err));
    if (n > m->p->len - m->pos)
        QC_FAIL(err, QC_ERR_TRUNCATED,
                "a frame of %" PRIu64 " bytes does not fit the %zu that are left", n,
                m->p->len - m->pos);
    return QC_OK;
}

/* Opcodes that push a text or bytes, or use the memo; their argument begins with a number. */
static const struct {
    unsigned char op;
    unsigned char number_bytes;
    enum { PUSH_TEXT, PUSH_BYTES, PUSH_LONG, PUSH_INT, MEMO_PUT, MEMO_GET } does;
} numbered[] = {
    {'X', 4, PUSH_TEXT},   /* BINUNICODE */
    {'T', 4, PUSH_TEXT},   /* BINSTRING */
    {0x8c, 1, PUSH_TEXT},  /* SHORT_BINUNICODE */
    {'U', 1, PUSH_TEXT},   /* SHORT_BINSTRING */
    {0x8d, 8, PUSH_TEXT},  /* BINUNICODE8 */
    {'B', 4, PUSH_BYTES},  /* BINBYTES */
    {'C', 1, PUSH_BYTES},  /* SHORT_BINBYTES */
    {0x8e, 8, PUSH_BYTES}, /* BINBYTES8 */
    {0x8a, 1, PUSH_LONG},  /* LONG1 */
    {0x8b, 4, PUSH_LONG},  /* LONG4 */
    {'K', 1, PUSH_INT},    /* BININT1 */
    {'M', 2, PUSH_INT},    /* BININT2 */
    {'J', 4, PUSH_INT},    /* BININT: signed */
    {'q', 1, MEMO_PUT},    /* BINPUT */
    {'r', 4, MEMO_PUT},    /* LONG_BINPUT */
    {'h', 1, MEMO_GET},    /* BINGET */
    {'j', 4, MEMO_GET},    /* LONG_BINGET */
};

static qc_status step_numbered(machine *m, unsigned char op, qc_error *err)
{
    uint64_t n = 0;
    size_t i = 0;
    while (i < sizeof numbered / sizeof *numbered && numbered[i].op != op)
        i++;
    if (i == sizeof numbered / sizeof *numbered)
        return fail_opcode(op, err);
    QC_TRY(take_uint(m, numbered[i].number_bytes, &n, err));
    switch (numbered[i].does) {
    case PUSH_TEXT:
        return push_run(m, n, QC_PICKLE_STRING, err);
    case PUSH_BYTES:
        return push_run(m, n, QC_PICKLE_OPAQUE, err);
    case PUSH_LONG:
        return push_long(m, n, err);
    case PUSH_INT:
        return push_int(m, op == 'J' && n & 0x80000000u ? n | 0xffffffff00000000u : n, err);
    case MEMO_PUT:
        return memo_put(m, n, err);
    case MEMO_GET:
        return memo_get(m, n, err);
    }
    return fail_opcode(op, err);
}

static qc_status step(machine *m, unsigned char op, qc_error *err)
{
    qc_pickle_value v;
    const unsigned char *b = NULL;
    size_t first = 0;
    switch (op) {
    case '(': /* MARK */
        return push_mark(m, err);
    case ')': /* EMPTY_TUPLE */
        return make_tuple(m, m->stack_count, err);
    case 't': /* TUPLE */
        QC_TRY(pop_mark(m, &first, err));
        return make_tuple(m, first, err);
    case 0x85: /* TUPLE1, TUPLE2, TUPLE3 */
    case 0x86:
    case 0x87:
        return do_tuple_of(m, op - 0x84u, err);
    case '}': /* EMPTY_DICT */
        QC_TRY(qc_pickle_container_new(m->p, QC_PICKLE_DICT, &v, err));
        return push(m, v, err);
    case ']': /* EMPTY_LIST */
        QC_TRY(qc_pickle_container_new(m->p, QC_PICKLE_LIST, &v, err));
        return push(m, v, err);
    case 's': /* SETITEM */
        return add_some(m, 2, QC_PICKLE_DICT, err);
    case 'u': /* SETITEMS */
        return add_marked(m, QC_PICKLE_DICT, err);
    case 'a': /* APPEND */
        return add_some(m, 1, QC_PICKLE_LIST, err);
    case 'e': /* APPENDS */
        return add_marked(m, QC_PICKLE_LIST, err);
    case 'c': /* GLOBAL */
        return do_global(m, err);
    case 0x93: /* STACK_GLOBAL */
        return do_stack_global(m, err);
    case 'Q': /* BINPERSID */
        return do_persistent(m, err);
    case 'R': /* REDUCE */
        return do_reduce(m, err);
    case 'b': /* BUILD */
        return do_build(m, err);
    case 0x95: /* FRAME */
        return do_frame(m, err);
    case 'G': /* BINFLOAT */
        QC_TRY(take(m, 8, &b, err));
        return push(m, (qc_pickle_value){.kind = QC_PICKLE_OPAQUE}, err);
    case 0x88: /* NEWTRUE */
    case 0x89: /* NEWFALSE */
        return push(m, (qc_pickle_value){.kind = QC_PICKLE_BOOL, .at = op == 0x88}, err);
    case 'N': /* NONE */
        return push(m, (qc_pickle_value){.kind = QC_PICKLE_NONE}, err);
    case 0x94: /* MEMOIZE */
        return memo_put(m, m->memo_used, err);
    case '.': /* STOP */
        QC_TRY(pop(m, &m->p->root, err));
        m->stopped = 1;
        return QC_OK;
    default:
        return step_numbered(m, op, err);
    }
}

static qc_status check_start(machine *m, qc_error *err)
{
    const unsigned char *b = NULL;
    QC_TRY(take(m, 2, &b, err));
    if (b[0] != 0x80)
        QC_FAIL(err, QC_ERR_INPUT, "expected byte 0x80 at the beginning of a pickle, found 0x%02x",
                b[0]);
    if (b[1] < PROTOCOL_MIN || b[1] > PROTOCOL_MAX)
        QC_FAIL(err, QC_ERR_UNSUPPORTED, "expected pickle protocol %d to %d, found %d",
                PROTOCOL_MIN, PROTOCOL_MAX, b[1]);
    return QC_OK;
}

static qc_status run(machine *m, qc_error *err)
{
    qc_status st = check_start(m, err);
    while (st == QC_OK && !m->stopped) {
        const unsigned char *op = NULL;
        m->op_pos = m->pos;
        st = take(m, 1, &op, err);
        if (st == QC_OK)
            st = step(m, *op, err);
    }
    if (st != QC_OK && st != QC_ERR_NOMEM)
        qc_error_prefix(err, "pickle byte %zu", m->op_pos);
    return st;
}

qc_status qc_pickle_run(qc_pickle *out, const void *text, size_t len, qc_error *err)
{
    machine m = {.p = out};
    memset(out, 0, sizeof *out);
    if (len > QC_PICKLE_MAX_BYTES)
        QC_FAIL(err, QC_ERR_UNSUPPORTED, "the pickle has %zu bytes; at most %u are read", len,
                QC_PICKLE_MAX_BYTES);
    out->text = text;
    out->len = len;
    qc_status st = run(&m, err);
    out->used_bytes = m.pos;
    qc_free(m.stack);
    qc_free(m.marks);
    qc_free(m.memo);
    if (st != QC_OK)
        qc_pickle_deinit(out);
    return st;
}
