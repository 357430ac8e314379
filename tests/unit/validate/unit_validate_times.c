/* The times of the CPU's products in validate: which batch sizes are timed, what the kernel is
 * called, and when there is a share of the rate of reading. How long products take, nobody tests;
 * how near they are to the exact ones, unit_cpu_matmul.c does. */
#include "convert/validate/validate_times.h"
#include "tests/fixtures/matmul_testing.h"
#include "tests/fixtures/test.h"

enum { ROWS = 24, COLS = 128, M = QC_VALIDATE_ROWS };

typedef struct {
    mt_weights t;
    qc_arena arena;
    qc_cpu_matmul *products;
    uint16_t x[M * COLS];
    qc_validate_input in;
    qc_validate_pair pair;
    qc_validate_layer layer;
} world;

static void open_world(world *w, uint64_t cols)
{
    qt_rng rng = qt_rng_start("times");
    qc_error err = {0};
    memset(w, 0, sizeof *w);
    qc_arena_init(&w->arena);
    mt_make(&w->t, &rng, QC_FORM_NF4, ROWS, cols, 64, 0);
    mt_random_x(&rng, w->x, QC_DTYPE_F16, M * cols);
    w->in = (qc_validate_input){.x = w->x, .dtype = QC_DTYPE_F16, .rows = M, .cols = cols};
    w->pair = (qc_validate_pair){.name = "w", .rows = ROWS, .cols = cols, .bytes = ROWS * cols / 2};
    w->layer = (qc_validate_layer){.pair = &w->pair, .output_error = 0.5, .kernel_error = 0.25};
    assert_int_equal(qc_cpu_matmul_create(&w->products, 2, &err), QC_OK);
}

static void close_world(world *w)
{
    qc_cpu_matmul_destroy(w->products);
    qc_arena_deinit(&w->arena);
    mt_free(&w->t);
}

static void take(world *w, const uint64_t *m, unsigned count, uint64_t weight_bytes, double *rate)
{
    qc_validate_timer t;
    qc_error err = {0};
    assert_int_equal(
        qc_validate_timer_open(&t, w->products, m, count, weight_bytes, &w->arena, &err), QC_OK);
    assert_int_equal(qc_validate_take_times(&t, &w->layer, &w->t.w, &w->in, &err), QC_OK);
    *rate = qc_validate_read_rate(&t);
    qc_validate_timer_close(&t);
}

TEST(test_batch_sizes_and_kernels)
{
    static const uint64_t m[] = {17, 16, 1000, 1};
    for (uint64_t cols = COLS - 1; cols <= COLS; cols++) {
        world w;
        double rate = 0.0;
        open_world(&w, cols);
        take(&w, m, 4, 1000, &rate);
        assert_true(isnan(rate));
        assert_int_equal(w.layer.time_count, 2);
        for (unsigned i = 0; i < 2; i++) {
            const qc_validate_time *t = &w.layer.times[i];
            assert_int_equal(t->m, i == 0 ? 16 : 1);
            assert_string_equal(t->path, cols == COLS ? "integers" : "floats");
            assert_true(t->seconds > 0.0 && t->fp16_seconds == 0.0 && isnan(t->roof));
            assert_true(t->output_error == 0.5 && t->kernel_error == 0.25);
        }
        take(&w, m, 1, 1000, &rate);
        assert_int_equal(w.layer.time_count, 0);
        close_world(&w);
    }
}

/* Where the weights of OUT are more than caches hold, the share of the rate of reading is known. */
TEST(test_share_of_the_rate_of_reading)
{
    static const uint64_t m[] = {1};
    for (uint64_t less = 0; less < 2; less++) {
        world w;
        double rate = 0.0;
        open_world(&w, COLS);
        take(&w, m, 1, QC_VALIDATE_PASS_BYTES - less, &rate);
        const qc_validate_time *t = &w.layer.times[0];
        assert_int_equal(isnan(rate), less);
        assert_int_equal(isnan(t->roof), less);
        if (!less) {
            const double floor = (double)w.pair.bytes / rate;
            assert_true(rate > 0.0);
            /* The rate of the median's round and that of all rounds differ. */
            assert_true(t->roof > 0.01 * floor / t->seconds &&
                        t->roof < 100.0 * floor / t->seconds);
        }
        close_world(&w);
    }
}
