/* Fit over random models and budgets. QC_SEED=n replays one run. */
#include "tests/fixtures/fit_fixture.h"
#include "tests/fixtures/test_random.h"

#define ROUNDS 3000

static qc_attention random_attention(void)
{
    static const qc_attention kinds[] = {QC_ATTENTION_NONE, QC_ATTENTION_FULL, QC_ATTENTION_SLIDING,
                                         QC_ATTENTION_MLA, QC_ATTENTION_CROSS};
    return kinds[below(5)];
}

static void random_fixture(fixture *x)
{
    begin_fixture(x);
    qc_attention attention = random_attention();
    int mixed = (int)below(2);
    x->geometry.hidden = below(200);
    x->geometry.intermediate = below(900);
    x->geometry.max_context = below(2) ? 1 + below(300) : 0;
    x->geometry.vocab = below(3000);
    x->geometry.decoder = below(5) != 0;
    x->geometry.media_positions = below(40);
    x->geometry.vision_hidden = below(30);
    x->geometry.experts = below(2) ? 8 : 0;
    x->geometry.experts_per_token = x->geometry.experts ? 2 : 0;
    add_segment(x, QC_SEGMENT_EMBEDDING, below(400000));
    if (below(3) == 0)
        add_segment(x, QC_SEGMENT_VISION, below(400000));
    for (uint64_t n = below(9); n > 0; n--) {
        add_layer(x, below(4) ? 300000 : below(600000));
        qc_layer_geometry *l = &x->layers[x->geometry.layer_count - 1];
        l->attention = mixed ? random_attention() : attention;
        l->kv_elems = below(900);
        l->kv_elems_expanded = below(3000);
        l->window = 1 + below(100);
    }
    if (below(4) == 0)
        add_segment(x, QC_SEGMENT_EXTRA, below(400000));
    add_segment(x, QC_SEGMENT_NORM, below(100));
    add_segment(x, QC_SEGMENT_HEAD, below(400000));
    if (below(3) == 0) {
        x->segment[x->segments.count - 1].follows = 0;
        x->bytes[x->segments.count - 1] = 0;
    }
    for (uint32_t i = 0; i < x->segments.count; i++)
        x->largest[i] = below(3) ? 0 : below(50000);
    uint64_t each = 300000 + below(2000000), gpus = below(4);
    int equal = (int)below(2);
    for (uint64_t d = 0; d < gpus; d++)
        add_device(x, QC_TIER_GPU, equal ? each : below(2000000));
    if (gpus == 0 || below(2))
        add_device(x, QC_TIER_CPU, below(2000000));
    if (below(3) == 0)
        add_device(x, QC_TIER_DISK, below(2) ? UINT64_MAX : below(2000000));
    x->options.margin = below(2) ? 1.0 : 0.9;
    x->options.context = 1 + below(300);
    x->options.batch = 1 + below(6);
    x->options.images = below(3);
    x->options.cuda_context_bytes = below(100000);
    x->options.mla_expanded = (int)below(2);
}

/* What must hold of any fit. */
static void check_sums(const fixture *x, const qc_fit *f)
{
    uint64_t weights = 0, kv = 0, worst = 0;
    uint32_t computing = x->budget.gpu_count ? x->budget.gpu_count : 1, from = 0, segments = 0;
    int all = 1;
    for (uint32_t d = 0; d < x->budget.count; d++) {
        const qc_fit_device *v = &f->devices[d];
        weights += v->weight_bytes;
        kv += v->kv_bytes;
        segments += v->segments;
        uint64_t needed = v->weight_bytes + v->kv_bytes + v->workspace_bytes + v->context_bytes;
        if (v->budget_bytes != UINT64_MAX)
            assert_int_equal(v->budget_bytes + v->short_by_bytes, needed + v->free_bytes);
        assert_true(v->short_by_bytes == 0 || v->free_bytes == 0);
        assert_true(v->staging_bytes <= v->workspace_bytes);
        worst = v->short_by_bytes > worst ? v->short_by_bytes : worst;
        all = all && v->short_by_bytes == 0;
    }
    assert_int_equal(weights, f->weight_bytes);
    assert_int_equal(kv, f->kv_bytes);
    assert_int_equal(segments, x->segments.count);
    assert_int_equal(f->fits, all);
    assert_int_equal(f->short_by_bytes, worst);
    if (!f->fits)
        assert_int_equal(f->devices[f->short_device].short_by_bytes, worst);
    for (uint32_t i = 0; i < x->segments.count; i++) {
        assert_true(f->device_of[i] < x->budget.count);
        if (x->segment[i].follows != QC_NO_SEGMENT) {
            assert_int_equal(f->device_of[i], f->device_of[x->segment[i].follows]);
        } else if (f->device_of[i] < computing) {
            assert_true(f->device_of[i] >= from);
            from = f->device_of[i];
        }
    }
    assert_int_equal(f->spilled > 0 && f->transfer_bytes_per_token > 0, f->transfer_seconds > 0);
}

static void more_room_never_hurts(const fixture *x, int fits)
{
    SCOPED(qc_arena) arena = {0};
    fixture y = *x;
    y.geometry.layers = y.layers;
    y.segments.segments = y.segment;
    y.budget.devices = y.device;
    uint32_t d = (uint32_t)below(y.budget.count);
    if (y.device[d].total_bytes < UINT64_MAX / 2)
        y.device[d].total_bytes += below(500000);
    qc_fit f;
    make(&y, &arena, &f);
    if (fits)
        assert_true(f.fits);
    /* Two of the devices that are the same but for their name. */
    for (uint32_t i = 1; i < y.budget.gpu_count; i++) {
        if (x->device[i].total_bytes != x->device[0].total_bytes)
            continue;
        fixture z = *x;
        z.geometry.layers = z.layers;
        z.segments.segments = z.segment;
        z.budget.devices = z.device;
        z.device[0] = x->device[i];
        z.device[i] = x->device[0];
        qc_fit a, b;
        make(&z, &arena, &b);
        fixture w = *x;
        w.geometry.layers = w.layers;
        w.segments.segments = w.segment;
        w.budget.devices = w.device;
        make(&w, &arena, &a);
        assert_memory_equal(a.device_of, b.device_of, x->segments.count * sizeof *a.device_of);
        assert_int_equal(a.short_by_bytes, b.short_by_bytes);
    }
}

/* A tier takes only what what computes cannot hold. */
static void spills_only_if_needed(const fixture *x, const qc_fit *f)
{
    SCOPED(qc_arena) arena = {0};
    fixture y = *x;
    y.geometry.layers = y.layers;
    y.segments.segments = y.segment;
    y.budget.devices = y.device;
    y.budget.count = y.budget.gpu_count ? y.budget.gpu_count : 1;
    qc_fit alone;
    make(&y, &arena, &alone);
    if (alone.fits)
        assert_int_equal(f->spilled, 0);
    if (f->fits)
        assert_true(alone.fits || f->spilled > 0);
}

static int fits_with(fixture *x, uint64_t context, uint64_t batch)
{
    SCOPED(qc_arena) arena = {0};
    qc_fit f;
    qc_fit_options old = x->options;
    x->options.context = context;
    x->options.batch = batch;
    make(x, &arena, &f);
    x->options = old;
    return f.fits;
}

/* Bisection against trying one after the other; on the way: once it does not fit, no more does. */
static void check_searches(fixture *x, const qc_fit *f)
{
    uint64_t context = 0, batch = 0, limit = x->geometry.max_context, scan = 0;
    assert_int_equal(qc_fit_max_context(&context, f, &x->options, x->largest, NULL), QC_OK);
    assert_int_equal(qc_fit_max_batch(&batch, f, &x->options, x->largest, NULL), QC_OK);
    uint64_t most = limit ? limit : 300;
    while (scan < most && fits_with(x, scan + 1, 1))
        scan++;
    for (uint64_t c = scan + 1; c <= most; c++)
        assert_false(fits_with(x, c, 1));
    assert_int_equal(context < most ? context : most, scan);
    for (scan = 0; scan < 20 && fits_with(x, x->options.context, scan + 1);)
        scan++;
    assert_int_equal(batch < 20 ? batch : 20, scan);
    if (batch != QC_NO_LIMIT && batch > 0)
        assert_false(fits_with(x, x->options.context, batch + 1));
}

TEST_WITH(properties_hold, NULL, print_seed)
{
    const char *given = getenv("QC_SEED");
    uint64_t seed = given ? strtoull(given, NULL, 0) : 20260117;
    int fitting = 0, spilling = 0;
    for (int round = 0; round < (given ? 1 : ROUNDS); round++, seed++) {
        random_begin(seed);
        SCOPED(qc_arena) arena = {0};
        fixture x;
        qc_fit f;
        random_fixture(&x);
        make(&x, &arena, &f);
        check_sums(&x, &f);
        more_room_never_hurts(&x, f.fits);
        spills_only_if_needed(&x, &f);
        if (round % 10 == 0)
            check_searches(&x, &f);
        fitting += f.fits;
        spilling += f.fits && f.spilled > 0;
    }
    assert_true(given || (fitting > ROUNDS / 10 && fitting < ROUNDS * 9 / 10));
    assert_true(given || spilling > ROUNDS / 20);
}
