/* Fit: numbers worked out by hand. */
#include "tests/fixtures/alloc_faults.h"
#include "tests/fixtures/fit_fixture.h"

static fixture x;
static qc_arena arena;
static qc_fit f;

static int free_arena(void **state)
{
    (void)state;
    qc_arena_deinit(&arena);
    return 0;
}

static void place(void)
{
    make(&x, &arena, &f);
}

static void fits(void)
{
    place();
    assert_true(f.fits);
}

TEST(budgets_are_rounded_down)
{
    assert_int_equal(qc_fit_budget_bytes(40000000000, 0.9), 36000000000);
    assert_int_equal(qc_fit_budget_bytes(42949672960, 0.9), 38654705664);
    assert_int_equal(qc_fit_budget_bytes(11, 0.5), 5);
    assert_int_equal(qc_fit_budget_bytes(0, 0.5), 0);
    assert_int_equal(qc_fit_budget_bytes(7, 1.0), 7);
    assert_int_equal(qc_fit_budget_bytes(UINT64_MAX, 0.5), UINT64_MAX);
    assert_true(qc_fit_budget_bytes(UINT64_MAX - 1, 0.9999999999999999) <= UINT64_MAX - 1);
}

TEST(contexts_are_chosen)
{
    qc_geometry g = {.max_context = 512};
    qc_fit_options o = {.context = 0};
    assert_int_equal(qc_fit_context(&g, &o), 512);
    g.max_context = 131072;
    assert_int_equal(qc_fit_context(&g, &o), 8192);
    g.max_context = 0;
    assert_int_equal(qc_fit_context(&g, &o), 8192);
    o.context = 9;
    assert_int_equal(qc_fit_context(&g, &o), 9);
}

static void expect_workspace(qc_segment_kind kind, uint32_t layer, uint64_t largest_weight,
                             uint64_t want)
{
    assert_int_equal(qc_workspace_bytes(&x.geometry, &x.options, kind, layer, largest_weight,
                                        qc_fit_has_cross(&x.geometry)),
                     want);
}

/* docs/theory/sizes.md, "Workspace", with hidden 100, heads 2 x 50, MLP 400, vocabulary 1000. */
TEST(workspaces_are_as_documented)
{
    begin_fixture(&x);
    add_layer(&x, 0);
    /* 2 B * 1000 tokens * (4 * 100 + 2 * 50 + 12 + 3 * 400) */
    expect_workspace(QC_SEGMENT_LAYER, 0, 0, 3424000);
    expect_workspace(QC_SEGMENT_LAYER, 0, 77, 3424154);
    expect_workspace(QC_SEGMENT_EMBEDDING, UINT32_MAX, 0, 200000);
    expect_workspace(QC_SEGMENT_NORM, UINT32_MAX, 0, 400000);
    expect_workspace(QC_SEGMENT_HEAD, UINT32_MAX, 0, 204000);
    expect_workspace(QC_SEGMENT_EXTRA, 5, 1000, 0);
    /* A prompt is read whole, or in steps; every sequence of a batch takes one. */
    x.options.context = 100000;
    expect_workspace(QC_SEGMENT_LAYER, 0, 0, 2 * 100000 * 1712);
    expect_workspace(QC_SEGMENT_HEAD, 0, 0, 100000 * 200 + 4000);
    x.options.prefill = 100001;
    expect_workspace(QC_SEGMENT_LAYER, 0, 0, 2 * 100000 * 1712);
    x.options.prefill = 2048;
    expect_workspace(QC_SEGMENT_LAYER, 0, 0, 2 * 2048 * 1712);
    x.options.batch = 3;
    expect_workspace(QC_SEGMENT_LAYER, 0, 0, 3 * 2 * 2048 * 1712);
    expect_workspace(QC_SEGMENT_HEAD, 0, 0, 3 * (2048 * 200 + 4000));
    /* An encoder sees its text whole and gives no logits. */
    x.geometry.decoder = 0;
    expect_workspace(QC_SEGMENT_LAYER, 0, 0, (uint64_t)3 * 2 * 100000 * 1712);
    expect_workspace(QC_SEGMENT_HEAD, 0, 0, 3 * 100000 * 200);
    x.options.context = UINT64_MAX;
    expect_workspace(QC_SEGMENT_LAYER, 0, 0, UINT64_MAX);
}

TEST(attention_counts_where_it_is_wider)
{
    begin_fixture(&x);
    add_layer(&x, 0);
    x.geometry.intermediate = 0;
    /* q and its output 2 * 100, k and v 2 * 50 */
    expect_workspace(QC_SEGMENT_LAYER, 0, 0, 2 * 1000 * (512 + 300));
    /* latent: q 2 * 100, latent 60; keys and values of the whole context twice, 2 * 160, also where
     * the prompt comes in steps of 10 */
    x.layers[0] = (qc_layer_geometry){
        .attention = QC_ATTENTION_MLA, .kv_elems = 60, .kv_elems_expanded = 160};
    expect_workspace(QC_SEGMENT_LAYER, 0, 0, 2 * 1000 * (512 + 260 + 320));
    x.options.prefill = 10;
    expect_workspace(QC_SEGMENT_LAYER, 0, 0, 2 * (10 * (512 + 260) + 1000 * 320));
    x.options.prefill = 0;
    /* absorbed: q 2 * 100, latent 60, q and output against it 2 * 2 * 60 */
    x.options.mla_absorbed = 1;
    expect_workspace(QC_SEGMENT_LAYER, 0, 0, 2 * 1000 * (512 + 500));
    x.options.mla_expanded = 1;
    expect_workspace(QC_SEGMENT_LAYER, 0, 0, 2 * 1000 * (512 + 360));
    /* Images: what the tower hands to the layers stays while the prompt is read. */
    x.layers[0] = (qc_layer_geometry){.attention = QC_ATTENTION_CROSS, .kv_elems = 100};
    x.geometry.media_positions = 7;
    x.geometry.vision_hidden = 11;
    x.options.images = 2;
    expect_workspace(QC_SEGMENT_LAYER, 0, 0, 2 * (1000 * (512 + 200) + 2 * 7 * 100));
    expect_workspace(QC_SEGMENT_VISION, 0, 0, 2 * 2 * 7 * 10 * 11);
}

/* Embedding 10, four layers of 20 with a cache of 2 each, norm, head 10 (MB), on one GPU, a CPU or
 * both. */
static void four_layers(uint64_t gpu, uint64_t cpu)
{
    begin_fixture(&x);
    add_segment(&x, QC_SEGMENT_EMBEDDING, 10 * MB);
    for (int i = 0; i < 4; i++)
        add_layer(&x, 20 * MB);
    add_segment(&x, QC_SEGMENT_NORM, 200);
    add_segment(&x, QC_SEGMENT_HEAD, 10 * MB);
    if (gpu)
        add_device(&x, QC_TIER_GPU, gpu);
    if (cpu)
        add_device(&x, QC_TIER_CPU, cpu);
}

TEST(two_gpus_share_by_hand)
{
    four_layers(100 * MB, 0);
    add_device(&x, QC_TIER_GPU, 100 * MB);
    x.options.margin = 0.8;
    fits();
    assert_int_equal(f.weight_bytes, 100 * MB + 200);
    assert_int_equal(f.kv_bytes_per_token, 4 * 2000);
    assert_int_equal(f.kv_bytes, 8 * MB);
    for (int d = 0; d < 2; d++) {
        assert_int_equal(f.devices[d].budget_bytes, 80 * MB);
        assert_int_equal(f.devices[d].weight_bytes, 50 * MB + (d ? 200 : 0));
        assert_int_equal(f.devices[d].kv_bytes, 4 * MB);
        assert_int_equal(f.devices[d].workspace_bytes, 3424000);
        assert_int_equal(f.devices[d].context_bytes, 5 * MB);
        assert_int_equal(f.devices[d].free_bytes, 80 * MB - 62424000 - (d ? 200 : 0));
        assert_int_equal(f.devices[d].short_by_bytes, 0);
        assert_int_equal(f.devices[d].layers, 2);
        assert_int_equal(f.devices[d].first_layer, d ? 2 : 0);
    }
    assert_int_equal(f.devices[0].segments, 3);
    assert_int_equal(f.devices[1].segments, 4);
    assert_int_equal(f.transfer_bytes_per_token, 0);
    assert_true(f.transfer_seconds == 0.0);
}

TEST(short_by_what_is_missing)
{
    four_layers(60 * MB, 0);
    add_device(&x, QC_TIER_GPU, 60 * MB);
    place();
    assert_false(f.fits);
    assert_int_equal(f.short_by_bytes, 2424200);
    assert_int_equal(f.short_device, 1);
    assert_int_equal(f.devices[0].short_by_bytes, 2424000);
    assert_int_equal(f.devices[0].free_bytes, 0);
    /* To the byte. */
    x.device[0].total_bytes += 2424000;
    x.device[1].total_bytes += 2424200;
    fits();
    assert_int_equal(f.devices[0].free_bytes, 0);
    assert_int_equal(f.devices[1].free_bytes, 0);
    x.device[1].total_bytes--;
    place();
    assert_int_equal(f.short_by_bytes, 1);
}

/* One GPU: what goes first is the embedding; a layer goes through a buffer of its size. */
TEST(spilling_by_hand)
{
    /* All of it needs 100.0002 + 8 + 3.424 + 5 = 116.4242 MB. */
    four_layers(107 * MB, 64 * MB);
    fits();
    assert_int_equal(f.device_of[0], 1);
    assert_int_equal(f.spilled, 1);
    assert_int_equal(f.devices[1].weight_bytes, 10 * MB);
    assert_int_equal(f.devices[1].workspace_bytes, 0);
    assert_int_equal(f.devices[1].context_bytes, 0);
    assert_int_equal(f.devices[0].staging_bytes, 0);
    assert_int_equal(f.transfer_bytes_per_token, 10000); /* one row of 1000 */
    assert_true(f.transfer_seconds == 10000 / QC_LINK_RATE);

    static const qc_card card = {.name = "slow", .host_link = 1e6};
    x.device[0].card = &card;
    place();
    assert_true(f.transfer_seconds == 10000 / 1e6);
    x.device[0].card = NULL;

    /* Head and two layers too: 32 + 13.4 MB of staging, workspace and context... */
    x.device[0].total_bytes = 80 * MB;
    fits();
    assert_int_equal(f.devices[0].layers, 2);
    assert_int_equal(f.devices[0].first_layer, 0);
    assert_int_equal(f.devices[1].layers, 2);
    assert_int_equal(f.devices[1].first_layer, 2);
    assert_int_equal(f.devices[1].weight_bytes, 60 * MB);
    assert_int_equal(f.devices[1].kv_bytes, 4 * MB);
    assert_int_equal(f.devices[0].staging_bytes, 22 * MB);
    assert_int_equal(f.devices[0].workspace_bytes, 22 * MB + 3424000);
    assert_int_equal(f.transfer_bytes_per_token, 10000 + 10 * MB + 2 * 22 * MB);

    /* A byte less in the cpu tier and disk has to help, with what was spilled last. */
    x.device[1].total_bytes = 64 * MB - 1;
    place();
    assert_false(f.fits);
    assert_int_equal(f.short_by_bytes, 1);
    assert_int_equal(f.short_device, 1);
    add_device(&x, QC_TIER_DISK, UINT64_MAX);
    fits();
    assert_int_equal(f.device_of[3], 2);
    assert_int_equal(f.devices[2].free_bytes, UINT64_MAX);
    assert_true(f.transfer_seconds == 10000 / QC_LINK_RATE + 22e6 / QC_DISK_RATE +
                                          22e6 / QC_LINK_RATE + 22e6 / QC_LINK_RATE +
                                          10e6 / QC_LINK_RATE);
}

/* It would pass a larger buffer, and cost a token more, than one more layer. */
TEST(a_large_head_stays)
{
    four_layers(99 * MB, 1000 * MB);
    x.bytes[6] = 21 * MB;
    fits();
    assert_int_equal(f.device_of[6], 0);
    assert_int_equal(f.devices[0].layers, 2);
    assert_int_equal(f.transfer_bytes_per_token, 10000 + 2 * 22 * MB);
    /* Of a layer of experts a token moves some only. */
    x.bytes[6] = 10 * MB;
    x.device[0].total_bytes = 88 * MB;
    x.geometry.experts = 8;
    x.geometry.experts_per_token = 2;
    fits();
    assert_int_equal(f.device_of[6], 0);
    x.device[0].total_bytes = 41 * MB;
    fits();
    assert_int_equal(f.device_of[1], 1); /* nothing is left but the head and the norm */
    assert_int_equal(f.device_of[6], 0);
    x.geometry.experts = 0;
    place();
    assert_int_equal(f.device_of[6], 1);
}

/* A head without weights of its own reads all of the table it follows. */
TEST(a_tied_table_spills_as_a_head)
{
    four_layers(90 * MB, 1000 * MB);
    x.segment[6].follows = 0;
    x.bytes[6] = 0;
    fits();
    assert_int_equal(f.device_of[0], 1);
    assert_int_equal(f.device_of[6], 1);
    assert_int_equal(f.devices[0].layers, 2);
    assert_int_equal(f.transfer_bytes_per_token, 10 * MB + 2 * 22 * MB);
}

TEST(without_gpus_the_cpu_computes)
{
    four_layers(0, 200 * MB);
    fits();
    assert_int_equal(f.devices[0].context_bytes, 0);
    assert_int_equal(f.devices[0].workspace_bytes, 3424000);
    assert_int_equal(f.devices[0].layers, 4);
    x.device[0].total_bytes = 110 * MB;
    add_device(&x, QC_TIER_DISK, UINT64_MAX);
    fits();
    assert_int_equal(f.device_of[0], 1);
    assert_true(f.transfer_seconds == 10000 / QC_DISK_RATE);
}

TEST(an_unused_gpu_needs_nothing)
{
    begin_fixture(&x);
    add_layer(&x, 10 * MB);
    add_device(&x, QC_TIER_GPU, 4 * MB); /* less than a context */
    add_device(&x, QC_TIER_GPU, 100 * MB);
    fits();
    assert_int_equal(f.devices[0].segments, 0);
    assert_int_equal(f.devices[0].context_bytes, 0);
    assert_int_equal(f.devices[0].free_bytes, 4 * MB);
    assert_int_equal(f.devices[1].layers, 1);
}

/* A plan of five tensors in two layers: an NF4 weight with its absmax, three routed experts of a
 * stack as NF4 codes, a shared expert, packed experts passed through, a norm. */
typedef struct {
    qc_checkpoint_tensor source[5];
    qc_recipe_entry entry[5];
    qc_job job[5];
    uint64_t kept_elems[5];
    qc_output output[6];
    uint32_t of_tensor[5];
    qc_checkpoint model;
    qc_plan plan;
} plan_fixture;

static void make_plan(plan_fixture *p, qc_segments *segments)
{
    static const struct {
        const char *name;
        unsigned ndim;
        uint64_t dims[QC_MAX_DIMS];
        qc_scheme scheme;
        qc_role role;
        uint32_t segment;
    } made[5] = {
        {"model.layers.0.mlp.down_proj.weight", 2, {64, 128}, QC_SCHEME_NF4, QC_ROLE_LINEAR, 0},
        {"model.layers.1.mlp.experts.up", 3, {3, 64, 128}, QC_SCHEME_NF4, QC_ROLE_LINEAR, 1},
        {"model.layers.1.mlp.shared_experts.up", 2, {2, 64}, QC_SCHEME_KEEP, QC_ROLE_LINEAR, 1},
        {"model.layers.0.mlp.experts.down_blocks",
         4,
         {4, 128, 9, 16},
         QC_SCHEME_KEEP,
         QC_ROLE_PACKED,
         0},
        {"model.layers.1.norm.weight", 1, {64}, QC_SCHEME_KEEP, QC_ROLE_NORM, 1},
    };
    memset(p, 0, sizeof *p);
    for (uint32_t i = 0; i < 5; i++) {
        p->source[i].name = made[i].name;
        p->source[i].ndim = made[i].ndim;
        p->source[i].dtype = made[i].role == QC_ROLE_PACKED ? QC_DTYPE_U8 : QC_DTYPE_BF16;
        p->job[i].elems = 1;
        for (unsigned d = 0; d < made[i].ndim; d++) {
            p->source[i].dims[d] = made[i].dims[d];
            p->job[i].elems *= made[i].dims[d];
        }
        p->entry[i] = (qc_recipe_entry){.scheme = made[i].scheme, .role = made[i].role};
        p->job[i].source = i;
        p->job[i].entry = &p->entry[i];
        p->job[i].scheme = made[i].scheme;
        p->job[i].form = qc_scheme_form(made[i].scheme, 0, 64, 0);
        p->of_tensor[i] = made[i].segment;
        /* Bytes of its output, where it is kept. */
        p->kept_elems[i] = ((uint64_t)1000 << 4 * i) / (qc_dtype_bits(p->source[i].dtype) / 8);
        p->job[i].name = made[i].name;
        p->job[i].ndim = 1;
        p->job[i].dims = &p->kept_elems[i];
        p->output[i].job = i & 0xffffff;
    }
    p->job[0].form.nested = 1;
    p->job[0].scales = 7;
    p->output[5] = (qc_output){.job = 0, .role = QC_ROLE_TENSOR_ABSMAX};
    p->model.tensors = p->source;
    p->model.tensor_count = 5;
    p->plan = (qc_plan){.model = &p->model,
                        .jobs = p->job,
                        .job_count = 5,
                        .outputs = p->output,
                        .tensor_count = 6};
    segments->of_tensor = p->of_tensor;
    segments->tensor_count = 5;
}

TEST(sums_are_of_outputs)
{
    plan_fixture p;
    begin_fixture(&x);
    add_layer(&x, 0);
    add_layer(&x, 0);
    make_plan(&p, &x.segments);
    uint64_t *bytes = NULL, *largest = NULL;
    assert_int_equal(qc_fit_sum_segments(&arena, &p.plan, &x.segments, &bytes, &largest, NULL),
                     QC_OK);
    assert_int_equal(bytes[0], 4096 + 7 + 4096000);
    assert_int_equal(bytes[1], 12288 + 256000 + 65536000);
    assert_int_equal(largest[0], 128 * 9 * 16 * 2); /* one of the four packed experts */
    assert_int_equal(largest[1], 64 * 128); /* one of the three; what is kept is no scratch */
    p.of_tensor[2] = QC_NO_SEGMENT;
    qc_error err = {0};
    assert_int_equal(qc_fit_sum_segments(&arena, &p.plan, &x.segments, &bytes, &largest, &err),
                     QC_ERR_INTERNAL);
}

TEST(a_token_moves_its_experts_only)
{
    plan_fixture p;
    begin_fixture(&x);
    add_layer(&x, 4096 + 7 + 4096000);
    add_layer(&x, 12288 + 256000 + 65536000);
    make_plan(&p, &x.segments);
    add_device(&x, QC_TIER_GPU, 75 * MB);
    add_device(&x, QC_TIER_CPU, 80 * MB);
    x.options.context = 10;
    fits();
    assert_int_equal(f.transfer_bytes_per_token, 0);
    /* The second layer alone would free nothing: it passes a buffer of its own size. */
    x.device[0].total_bytes = 74 * MB;
    fits();
    assert_int_equal(f.spilled, 2);
    uint64_t kv = 2 * 20000, rest = 256000 + 65536000 + 4103;
    assert_int_equal(f.transfer_bytes_per_token, kv + rest + 12288 + 4096000);
    assert_int_equal(qc_fit_count_experts(&f, &p.plan, NULL), QC_OK);
    assert_int_equal(f.transfer_bytes_per_token, kv + rest + 12288 + 4096000); /* dense */
    x.geometry.experts = 3;
    x.geometry.experts_per_token = 1;
    place();
    assert_int_equal(qc_fit_count_experts(&f, &p.plan, NULL), QC_OK);
    assert_int_equal(f.transfer_bytes_per_token, kv + rest + 4096 + 1365334); /* rounded up */
    assert_true(f.transfer_seconds > 0.0 && f.transfer_seconds < 1.0);
    x.options.batch = 2;
    place();
    assert_int_equal(qc_fit_count_experts(&f, &p.plan, NULL), QC_OK);
    assert_int_equal(f.transfer_bytes_per_token, 2 * kv + rest + 8192 + 2730667);
}

TEST(nothing_grows_without_a_geometry)
{
    begin_fixture(&x);
    x.geometry = (qc_geometry){.model_type = ""};
    add_segment(&x, QC_SEGMENT_EMBEDDING, MB);
    add_device(&x, QC_TIER_CPU, 2 * MB);
    place();
    uint64_t context = 0, batch = 0;
    assert_int_equal(qc_fit_max_context(&context, &f, &x.options, x.largest, NULL), QC_OK);
    assert_int_equal(qc_fit_max_batch(&batch, &f, &x.options, x.largest, NULL), QC_OK);
    assert_true(context == QC_NO_LIMIT && batch == QC_NO_LIMIT);
    x.device[0].total_bytes = MB - 1;
    assert_int_equal(qc_fit_max_context(&context, &f, &x.options, x.largest, NULL), QC_OK);
    assert_int_equal(context, 0);
}

TEST(no_memory_is_an_error)
{
    four_layers(100 * MB, 0);
    EACH_ALLOCATION_FAILS (fault, 1) {
        qc_arena_deinit(&arena);
        fault.st = try_to_make(&x, &arena, &f, NULL);
    }
}

TEST_GROUP(NULL, free_arena)
