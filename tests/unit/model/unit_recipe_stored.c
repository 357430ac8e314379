/* Weights that are quantized already: recognised, described, and refused when their parts do not
 * fit. Files on disk, because the state of a weight is read. */
#include "convert/model/recipe.h"
#include "formats/bnb_state.h"

#include "tests/fixtures/alloc_faults.h"
#include "tests/fixtures/fixture_files.h"
#include "tests/fixtures/st_header.h"

typedef struct {
    const char *name;
    qc_dtype dtype;
    unsigned ndim;
    uint64_t dims[2];
    const char *bytes; /* NULL: zeros */
} part;

typedef struct {
    fx_dir dir;
    qc_checkpoint *model;
    qc_arena arena;
    qc_recipe_options options;
    qc_rule rule;
    qc_recipe recipe;
    qc_error err;
    part parts[32];
    size_t count;
} fixture;

static void fixture_deinit(fixture *f)
{
    qc_checkpoint_close(f->model);
    qc_arena_deinit(&f->arena);
}

static void init(fixture *f, qc_to to)
{
    fixture_deinit(f);
    memset(f, 0, sizeof *f);
    fx_make_dir(&f->dir);
    qc_arena_init(&f->arena);
    f->options.to = to;
    f->options.rules = &f->rule;
}

static part *add(fixture *f, const char *name, qc_dtype dtype, unsigned ndim, uint64_t rows,
                 uint64_t cols)
{
    assert_true(f->count < 32);
    part *p = &f->parts[f->count++];
    *p = (part){name, dtype, ndim, {rows, cols}, NULL};
    return p;
}

static part *find(fixture *f, const char *name)
{
    for (size_t i = 0; i < f->count; i++) {
        if (strcmp(f->parts[i].name, name) == 0)
            return &f->parts[i];
    }
    fail_msg("no part '%s'", name);
    return NULL;
}

static void drop(fixture *f, const char *name)
{
    part *p = find(f, name);
    *p = f->parts[--f->count];
}

static void add_text(fixture *f, const char *name, const char *text)
{
    add(f, name, QC_DTYPE_U8, 1, strlen(text), 0)->bytes = text;
}

#define Q "model.layers.0.self_attn.q_proj."

/* The text that says how a weight was quantized. */
#define STATE(type, block_size, dtype, shape)                                                      \
    "{\"quant_type\": \"" type "\", \"blocksize\": " block_size ", \"dtype\": \"" dtype            \
    "\", \"shape\": " shape "}"

/* 96 x 100 weights, 150 blocks of 64. */
static void add_nf4(fixture *f, int nested)
{
    add(f, Q "weight", QC_DTYPE_U8, 2, 4800, 1);
    add(f, Q "weight.absmax", nested ? QC_DTYPE_U8 : QC_DTYPE_F32, 1, 150, 0);
    add(f, Q "weight.quant_map", QC_DTYPE_F32, 1, 16, 0);
    if (nested) {
        add(f, Q "weight.nested_absmax", QC_DTYPE_F32, 1, 1, 0);
        add(f, Q "weight.nested_quant_map", QC_DTYPE_F32, 1, 256, 0);
    }
    add_text(f, Q "weight.quant_state.bitsandbytes__nf4",
             nested ? "{\"quant_type\": \"nf4\", \"blocksize\": 64, \"dtype\": \"bfloat16\", "
                      "\"shape\": [96, 100], \"nested_blocksize\": 256, "
                      "\"nested_dtype\": \"float32\", \"nested_offset\": 0.5}"
                    : STATE("nf4", "64", "float16", "[96, 100]"));
}

static void add_rows(fixture *f)
{
    add(f, Q "weight", QC_DTYPE_I8, 2, 96, 100);
    add(f, Q "SCB", QC_DTYPE_F32, 1, 96, 0);
    add(f, Q "weight_format", QC_DTYPE_U8, 0, 0, 0);
}

static void add_block_int8(fixture *f)
{
    add(f, Q "weight", QC_DTYPE_I8, 2, 9600, 1);
    add(f, Q "weight.absmax", QC_DTYPE_F32, 1, 75, 0);
    add_text(f, Q "weight.quant_state.qconv__int8", STATE("int8", "128", "float32", "[96, 100]"));
}

static void add_rest(fixture *f)
{
    add(f, "model.norm.weight", QC_DTYPE_F32, 1, 100, 0);
    add(f, "model.embed_tokens.weight", QC_DTYPE_F32, 2, 512, 100);
}

/* Write the parts as model.safetensors and make the recipe. */
static qc_status make(fixture *f, const char *config)
{
    qc_st_tensor t[32];
    uint64_t at = 0;
    memset(t, 0, sizeof t);
    for (size_t i = 0; i < f->count; i++) {
        uint64_t bytes = 0;
        t[i] = (qc_st_tensor){.name = f->parts[i].name,
                              .dtype = f->parts[i].dtype,
                              .ndim = f->parts[i].ndim,
                              .dims = {f->parts[i].dims[0], f->parts[i].dims[1]},
                              .begin = at};
        assert_int_equal(qc_shape_bytes(t[i].dims, t[i].ndim, t[i].dtype, &bytes, NULL), QC_OK);
        at += bytes;
        t[i].end = at;
    }
    qc_strbuf out;
    qc_strbuf_init(&out, 100000000);
    assert_int_equal(st_header_build(&out, t, f->count, NULL, 0, NULL), QC_OK);
    for (size_t i = 0; i < f->count; i++) {
        static const char zeros[250000];
        const char *bytes = f->parts[i].bytes ? f->parts[i].bytes : zeros;
        assert_int_equal(qc_strbuf_add(&out, bytes, (size_t)(t[i].end - t[i].begin), NULL), QC_OK);
    }
    fx_put(f->dir.path, "model.safetensors", out.data, out.len);
    fx_puts(f->dir.path, "config.json", config);
    qc_strbuf_deinit(&out);
    qc_checkpoint_close(f->model);
    f->model = NULL;
    if (qc_checkpoint_open(&f->model, f->dir.path, &f->err) != QC_OK)
        fail_msg("open: %s", f->err.msg);
    return qc_recipe_make(&f->recipe, &f->arena, f->model, &f->options, &f->err);
}

static const char llama[] = "{\"model_type\":\"llama\",\"torch_dtype\":\"bfloat16\"}";

static void make_ok(fixture *f)
{
    qc_status st = make(f, llama);
    if (st != QC_OK)
        fail_msg("%s: %s", qc_status_name(st), f->err.msg);
}

static const qc_recipe_entry *entry(const fixture *f, const char *name)
{
    const qc_checkpoint_tensor *t = qc_checkpoint_find(f->model, name);
    assert_non_null(t);
    return &f->recipe.entries[t - f->model->tensors];
}

static void expect(const fixture *f, const char *name, qc_scheme scheme, qc_role role)
{
    const qc_recipe_entry *e = entry(f, name);
    if (e->scheme != scheme || e->role != role)
        fail_msg("'%s' is %s (%s): %s", name, qc_scheme_name(e->scheme), qc_role_name(e->role),
                 e->why);
}

static void expect_tensor(const fixture *f, uint32_t index, const char *name)
{
    if (!name) {
        assert_int_equal(index, UINT32_MAX);
        return;
    }
    assert_true(index < f->model->tensor_count);
    assert_string_equal(f->model->tensors[index].name, name);
}

TEST(nf4_is_dequantized)
{
    for (int nested = 0; nested < 2; nested++) {
        SCOPED(fixture) f = {0};
        init(&f, QC_TO_BF16);
        add_nf4(&f, nested);
        add_rest(&f);
        make_ok(&f);
        assert_int_equal(f.recipe.input_is_quantized, 1);
        assert_int_equal(f.recipe.skip_count, 0);
        expect(&f, Q "weight", QC_SCHEME_DEQUANT, QC_ROLE_PACKED);
        expect(&f, Q "weight.absmax", QC_SCHEME_ABSORBED, QC_ROLE_STATE);
        expect(&f, Q "weight.quant_map", QC_SCHEME_ABSORBED, QC_ROLE_STATE);
        expect(&f, Q "weight.quant_state.bitsandbytes__nf4", QC_SCHEME_ABSORBED, QC_ROLE_STATE);
        /* The rest stays as it is, unless --rest says otherwise. */
        expect(&f, "model.norm.weight", QC_SCHEME_KEEP, QC_ROLE_NORM);
        const qc_recipe_entry *e = entry(&f, Q "weight");
        assert_int_equal(e->out_dtype, QC_DTYPE_BF16);
        const qc_stored_weight *w = e->stored;
        assert_non_null(w);
        assert_int_equal(w->stored_as, QC_SCHEME_NF4);
        assert_int_equal(w->fp4, 0);
        assert_int_equal(w->block_elems, 64);
        assert_int_equal(w->ndim, 2);
        assert_int_equal(w->dims[0], 96);
        assert_int_equal(w->dims[1], 100);
        assert_int_equal(w->dtype, nested ? QC_DTYPE_BF16 : QC_DTYPE_F16);
        expect_tensor(&f, w->absmax, Q "weight.absmax");
        expect_tensor(&f, w->quant_map, Q "weight.quant_map");
        expect_tensor(&f, w->nested_absmax, nested ? Q "weight.nested_absmax" : NULL);
        expect_tensor(&f, w->nested_map, nested ? Q "weight.nested_quant_map" : NULL);
        assert_int_equal(w->nested_block_elems, nested ? 256 : 0);
        assert_true(w->nested_offset == (nested ? 0.5f : 0.0f));
        f.options.to = QC_TO_FP16;
        f.options.rest = QC_REST_FP16;
        make_ok(&f);
        assert_int_equal(entry(&f, Q "weight")->out_dtype, QC_DTYPE_F16);
        expect(&f, "model.norm.weight", QC_SCHEME_CAST, QC_ROLE_NORM);
    }
}

TEST(fp4_names_its_own_map)
{
    SCOPED(fixture) f = {0};
    init(&f, QC_TO_BF16);
    add_nf4(&f, 0);
    drop(&f, Q "weight.quant_state.bitsandbytes__nf4");
    add_text(&f, Q "weight.quant_state.bitsandbytes__fp4",
             STATE("fp4", "64", "float16", "[96, 100]"));
    make_ok(&f);
    assert_int_equal(entry(&f, Q "weight")->stored->stored_as, QC_SCHEME_NF4);
    assert_int_equal(entry(&f, Q "weight")->stored->fp4, 1);
}

TEST(int8_by_rows_and_by_blocks)
{
    SCOPED(fixture) f = {0};
    init(&f, QC_TO_BF16);
    add_rows(&f);
    make_ok(&f);
    expect(&f, Q "weight", QC_SCHEME_DEQUANT, QC_ROLE_PACKED);
    expect(&f, Q "SCB", QC_SCHEME_ABSORBED, QC_ROLE_STATE);
    expect(&f, Q "weight_format", QC_SCHEME_ABSORBED, QC_ROLE_STATE);
    const qc_stored_weight *w = entry(&f, Q "weight")->stored;
    assert_int_equal(w->stored_as, QC_SCHEME_INT8_ROWS);
    assert_int_equal(w->dtype, QC_DTYPE_BF16);
    assert_int_equal(w->dims[0], 96);
    expect_tensor(&f, w->absmax, Q "SCB");
    expect_tensor(&f, w->quant_map, NULL);
    drop(&f, Q "weight_format"); /* older releases wrote none */
    make_ok(&f);
    expect(&f, Q "weight", QC_SCHEME_DEQUANT, QC_ROLE_PACKED);

    init(&f, QC_TO_BF16);
    add_rows(&f);
    find(&f, Q "weight")->dims[0] = 9600; /* qconv's own: the scales know the rows */
    find(&f, Q "weight")->dims[1] = 1;
    make_ok(&f);
    w = entry(&f, Q "weight")->stored;
    assert_int_equal(w->stored_as, QC_SCHEME_INT8_ROWS);
    assert_int_equal(w->ndim, 2);
    assert_int_equal(w->dims[0], 96);
    assert_int_equal(w->dims[1], 100);
    assert_int_equal(w->block_elems, 100);

    init(&f, QC_TO_BF16);
    add_block_int8(&f);
    make_ok(&f);
    expect(&f, Q "weight", QC_SCHEME_DEQUANT, QC_ROLE_PACKED);
    expect(&f, Q "weight.absmax", QC_SCHEME_ABSORBED, QC_ROLE_STATE);
    w = entry(&f, Q "weight")->stored;
    assert_int_equal(w->stored_as, QC_SCHEME_INT8_BLOCKS);
    assert_int_equal(w->block_elems, 128);
    assert_int_equal(w->dtype, QC_DTYPE_F32);
    expect_tensor(&f, w->quant_map, NULL);
}

TEST(keep_leaves_weight_and_states)
{
    SCOPED(fixture) f = {0};
    init(&f, QC_TO_BF16);
    add_nf4(&f, 1);
    add_rest(&f);
    f.rule = (qc_rule){0, Q "weight"};
    f.options.rule_count = 1;
    make_ok(&f);
    expect(&f, Q "weight", QC_SCHEME_KEEP, QC_ROLE_PACKED);
    expect(&f, Q "weight.absmax", QC_SCHEME_KEEP, QC_ROLE_STATE);
    expect(&f, Q "weight.nested_quant_map", QC_SCHEME_KEEP, QC_ROLE_STATE);
    assert_non_null(entry(&f, Q "weight")->stored);
}

static void expect_failure(fixture *f, const char *config, qc_status code, const char *says)
{
    qc_status st = make(f, config);
    if (st != code || !strstr(f->err.msg, says))
        fail_msg("expected %s with '%s', got %s: %s", qc_status_name(code), says,
                 qc_status_name(st), f->err.msg);
}

TEST(quantizing_again_is_refused)
{
    static const qc_to to[] = {QC_TO_NF4, QC_TO_INT8};
    for (size_t i = 0; i < 2; i++) {
        SCOPED(fixture) f = {0};
        init(&f, to[i]);
        add_nf4(&f, 1);
        add(&f, "model.layers.1.self_attn.q_proj.weight", QC_DTYPE_BF16, 2, 96, 100);
        expect_failure(&f, llama, QC_ERR_UNSUPPORTED, "--to bf16");
        init(&f, to[i]);
        add_rows(&f);
        expect_failure(&f, llama, QC_ERR_UNSUPPORTED, "' is int8 (");
    }
}

TEST(conv1d_is_turned_back)
{
    SCOPED(fixture) f = {0};
    init(&f, QC_TO_BF16);
    add(&f, "h.0.attn.c_attn.weight", QC_DTYPE_I8, 2, 96, 32);
    add(&f, "h.0.attn.c_attn.SCB", QC_DTYPE_F32, 1, 96, 0);
    for (int gpt2 = 0; gpt2 < 2; gpt2++) {
        if (make(&f, gpt2 ? "{\"model_type\":\"gpt2\"}" : llama) != QC_OK)
            fail_msg("%s", f.err.msg);
        expect(&f, "h.0.attn.c_attn.weight", QC_SCHEME_DEQUANT, QC_ROLE_PACKED);
        assert_int_equal(entry(&f, "h.0.attn.c_attn.weight")->transpose, gpt2);
    }
}

/* Every part, one at a time: gone, of another type, of another length. */
TEST(parts_that_do_not_fit)
{
    void (*const forms[])(fixture *) = {add_rows, add_block_int8};
    for (unsigned form = 0; form < 4; form++) {
        for (size_t i = 0;; i++) {
            int done = 0;
            for (unsigned damage = 0; damage < 3; damage++) {
                SCOPED(fixture) f = {0};
                init(&f, QC_TO_BF16);
                if (form < 2)
                    add_nf4(&f, form == 1);
                else
                    forms[form - 2](&f);
                add_rest(&f);
                done = i + 2 >= f.count;
                part *p = &f.parts[i];
                int state_json = p->bytes != NULL;
                int optional = strcmp(p->name, Q "weight_format") == 0;
                /* Without SCB or the state there is a weight of U8 or I8, which is refused too. */
                int main_part = state_json || strcmp(p->name, Q "SCB") == 0;
                if (!done && !(optional && damage == 0)) {
                    if (damage == 0) {
                        drop(&f, p->name);
                    } else if (damage == 1) {
                        p->dtype = p->dtype == QC_DTYPE_F32 ? QC_DTYPE_I32 : QC_DTYPE_BF16;
                        p->bytes = NULL;
                    } else {
                        p->dims[0] += state_json ? (uint64_t)-1 : 1;
                        p->ndim = p->ndim ? p->ndim : 1;
                        p->dims[0] += (uint64_t)optional;
                    }
                    qc_status st = make(&f, llama);
                    qc_status want = main_part && damage == 0 ? QC_ERR_UNSUPPORTED : QC_ERR_INPUT;
                    if (st != want)
                        fail_msg("form %u, part %zu, damage %u: %s (%s)", form, i, damage,
                                 qc_status_name(st), f.err.msg);
                }
            }
            if (done)
                break;
        }
    }
}

TEST(states_that_do_not_fit)
{
    static const struct {
        const char *json, *says;
    } cases[] = {
        {"{}", "quant_state"},
        {"not json", "quant_state"},
        {STATE("fp4", "64", "float16", "[96, 100]"), "fp4"},
        {STATE("nf4", "0", "float16", "[96, 100]"), "quant_state"},
        {STATE("nf4", "64", "float16", "[96, 101]"), "take 4848 bytes, found 4800"},
        {STATE("nf4", "128", "float16", "[96, 100]"), "expected 75 values"},
        {STATE("nf4", "64", "float16", "[4294967296, 4294967296]"), ""},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        SCOPED(fixture) f = {0};
        init(&f, QC_TO_BF16);
        add_nf4(&f, 0);
        drop(&f, Q "weight.quant_state.bitsandbytes__nf4");
        add_text(&f, Q "weight.quant_state.bitsandbytes__nf4", cases[i].json);
        /* A block size that nobody writes is called unsupported, all else wrong. */
        int block_size = strstr(cases[i].json, "\"blocksize\": 0") != NULL;
        expect_failure(&f, llama, block_size ? QC_ERR_UNSUPPORTED : QC_ERR_INPUT, cases[i].says);
    }
}

TEST(odd_combinations)
{
    SCOPED(fixture) f = {0};
    init(&f, QC_TO_BF16); /* two states for one weight */
    add_nf4(&f, 0);
    add_text(&f, Q "weight.quant_state.bitsandbytes__fp4",
             STATE("fp4", "64", "float16", "[96, 100]"));
    expect_failure(&f, llama, QC_ERR_INPUT, "more than one");

    init(&f, QC_TO_BF16); /* nested tensors that the state does not know */
    add_nf4(&f, 0);
    add(&f, Q "weight.nested_absmax", QC_DTYPE_F32, 1, 1, 0);
    expect_failure(&f, llama, QC_ERR_INPUT, "nested_absmax");

    init(&f, QC_TO_BF16); /* row scales beside block scales */
    add_block_int8(&f);
    add(&f, Q "SCB", QC_DTYPE_F32, 1, 96, 0);
    expect_failure(&f, llama, QC_ERR_INPUT, "SCB");

    init(&f, QC_TO_BF16); /* Turing's column order */
    add_rows(&f);
    find(&f, Q "weight_format")->bytes = "\2";
    expect_failure(&f, llama, QC_ERR_UNSUPPORTED, "order 2");

    init(&f, QC_TO_BF16); /* the suffixes by themselves */
    add(&f, "SCB", QC_DTYPE_F32, 1, 4, 0);
    expect_failure(&f, llama, QC_ERR_INPUT, "missing");
    drop(&f, "SCB");
    add_text(&f, ".quant_state.bitsandbytes__nf4", "{}");
    expect_failure(&f, llama, QC_ERR_INPUT, "missing");
    drop(&f, ".quant_state.bitsandbytes__nf4");
    add(&f, "x.notSCB", QC_DTYPE_F32, 1, 4, 0);
    make_ok(&f);
    assert_int_equal(f.recipe.input_is_quantized, 0);
}

TEST(out_of_memory)
{
    SCOPED(fixture) f = {0};
    init(&f, QC_TO_BF16);
    add_nf4(&f, 1);
    make_ok(&f);
    EACH_ALLOCATION_FAILS (fault, 1) {
        qc_arena_deinit(&f.arena);
        fault.st = qc_recipe_make(&f.recipe, &f.arena, f.model, &f.options, &f.err);
    }
}
