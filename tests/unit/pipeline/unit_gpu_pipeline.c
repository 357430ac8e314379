/* Converting through rings of slots gives the bytes of converting on the CPU, whatever the number
 * of threads, GPUs and slots, and whatever runs out of room when. The GPUs here are threads of the
 * CPU that work behind the caller's back, as streams do: this program is also for the thread
 * sanitizer. The kernels themselves are tested elsewhere (kernel_*.c, cli/test_device.py). */
#include "base/alloc.h"
#include "convert/cli/commands.h"
#include "convert/device/device_choice.h"
#include "convert/device/device_quantizer.h"
#include "quant/quant_internal.h"
#include "tests/fixtures/test.h"
#include "tests/fixtures/test_model.h"

#include <limits.h>
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>

#define RUN_COLS QC_ROW_FLUSH

/* ---- GPUs of threads ---- */

static struct {
    int count;
    size_t room;            /* largest slot that can be had; 0: none */
    const char *no_room_on; /* GPU without any room, or NULL */
    unsigned dead;          /* bit i: cuda:i cannot be opened */
    qc_status create_fails; /* as this, where not QC_OK */
    /* The n-th start, or finish, from now (1 is the next) and all after it fail as fail_as. */
    atomic_int starts_left, finishes_left;
    qc_status fail_as;
    atomic_uint asked, created, started; /* calls */
    atomic_uint used;                    /* bit i: cuda:i got a ring */
} fake;

typedef struct {
    unsigned char *source, *codes;
    float *absmax, *errors;
    uint64_t bad;
    qc_gpu_form form;
    uint64_t n;
    pthread_t thread;
    int running;
} fake_slot;

struct qc_gpu_ring {
    size_t slot_bytes;
    fake_slot slots[QC_GPU_SLOTS];
};

static float value_at(const void *src, qc_dtype dtype, uint64_t i)
{
    const qc_quant_ops *ops = qc_quant_ops_for(QC_ISA_SCALAR);
    float v;
    uint64_t overflow, each = qc_dtype_bits(dtype) / 8;
    ops->cast((const unsigned char *)src + i * each, dtype, 1, &v, QC_DTYPE_F32, &overflow);
    return v;
}

/* The float sums of a block as quant_internal.h has them; y and c are found again from the codes,
 * for blocks that are not tiny. */
static void block_errors(const fake_slot *s, uint64_t first, uint64_t n, float absmax, float *out)
{
    float rr[QC_LANES] = {0}, rc[QC_LANES] = {0}, cc[QC_LANES] = {0}, peak = 0;
    float inv = absmax > 0 ? 1.0f / absmax : 0;
    for (uint64_t i = 0; i < n; i++) {
        uint64_t at = first + i;
        float y = value_at(s->source, s->form.dtype, at) * inv, c;
        if (s->form.form.ops == &qc_form_nf4)
            c = qc_nf4_code[at % 2 ? s->codes[at / 2] & 15 : s->codes[at / 2] >> 4];
        else
            c = (float)((const int8_t *)s->codes)[at] * QC_INT8_STEP;
        float r = y - c;
        uint64_t lane = i / 2 % QC_LANES;
        rr[lane] = fmaf(r, r, rr[lane]);
        rc[lane] = fmaf(r, c, rc[lane]);
        cc[lane] = fmaf(c, c, cc[lane]);
        peak = fabsf(r) > peak ? fabsf(r) : peak;
    }
    out[0] = qc_fold16(rr);
    out[1] = qc_fold16(rc);
    out[2] = qc_fold16(cc);
    out[3] = peak;
}

static void run_errors(const fake_slot *s, uint64_t row, uint64_t col, uint64_t n, float *out)
{
    float ee[QC_LANES] = {0}, xx[QC_LANES] = {0}, worst = 0;
    uint32_t at_worst = 0;
    for (uint32_t i = 0; i < n; i++) {
        uint64_t at = row * s->form.form.cols + col + i;
        float x = value_at(s->source, s->form.dtype, at);
        float e = x - ((float)((const int8_t *)s->codes)[at] * s->absmax[row]) * QC_INT8_STEP;
        ee[i % QC_LANES] = fmaf(e, e, ee[i % QC_LANES]);
        xx[i % QC_LANES] = fmaf(x, x, xx[i % QC_LANES]);
        if (fabsf(e) > worst) {
            worst = fabsf(e);
            at_worst = i;
        }
    }
    out[0] = qc_fold16(ee);
    out[1] = qc_fold16(xx);
    out[2] = worst;
    memcpy(out + 3, &at_worst, sizeof at_worst);
}

static void *work_on(void *slot)
{
    fake_slot *s = slot;
    const qc_quant_ops *ops = qc_quant_ops_for(QC_ISA_SCALAR);
    qc_piece_sums sums = {0};
    s->bad = UINT64_MAX;
    if (s->form.form.ops == &qc_form_int8_rows) {
        uint64_t rows = s->n / s->form.form.cols;
        ops->int8_rows_quantize(s->source, s->form.dtype, rows, s->form.form.cols,
                                (int8_t *)s->codes, s->absmax, &sums);
        float *out = s->errors;
        for (uint64_t row = 0; row < rows && sums.bad == QC_BAD_NONE; row++)
            for (uint64_t col = 0; col < s->form.form.cols; col += RUN_COLS, out += 4)
                run_errors(s, row, col,
                           s->form.form.cols - col < RUN_COLS ? s->form.form.cols - col : RUN_COLS,
                           out);
    } else {
        uint32_t block = s->form.form.block_elems;
        if (s->form.form.ops == &qc_form_nf4)
            ops->nf4_quantize(s->source, s->form.dtype, s->n, block, s->codes, s->absmax, NULL,
                              &sums);
        else
            ops->int8_blocks_quantize(s->source, s->form.dtype, s->n, block, (int8_t *)s->codes,
                                      s->absmax, NULL, &sums);
        for (uint64_t b = 0; b * block < s->n && sums.bad == QC_BAD_NONE; b++)
            block_errors(s, b * block, s->n - b * block < block ? s->n - b * block : block,
                         s->absmax[b], s->errors + 4 * b);
    }
    if (sums.bad != QC_BAD_NONE)
        s->bad = sums.bad_index;
    return NULL;
}

static void ring_destroy(qc_gpu_ring *r)
{
    if (!r)
        return;
    for (unsigned i = 0; i < QC_GPU_SLOTS; i++) {
        fake_slot *s = &r->slots[i];
        if (s->running)
            (void)pthread_join(s->thread, NULL);
        free(s->source);
        free(s->codes);
        free(s->absmax);
        free(s->errors);
    }
    free(r);
}

static qc_status ring_create(qc_gpu_ring **out, const qc_cuda_device *device, size_t slot_bytes,
                             size_t min_bytes, qc_error *err)
{
    atomic_fetch_add(&fake.created, 1);
    *out = NULL;
    if (fake.create_fails != QC_OK)
        QC_FAIL(err, fake.create_fails, "the GPU is away");
    while (slot_bytes > fake.room && slot_bytes / 2 >= min_bytes)
        slot_bytes /= 2;
    if (slot_bytes > fake.room || (fake.no_room_on && strcmp(fake.no_room_on, device->name) == 0))
        QC_FAIL(err, QC_ERR_NOMEM,
                "CUDA: allocating %zu bytes of device memory failed: out of memory", slot_bytes);
    qc_gpu_ring *r = calloc(1, sizeof *r);
    assert_non_null(r);
    r->slot_bytes = slot_bytes;
    for (unsigned i = 0; i < QC_GPU_SLOTS; i++) {
        fake_slot *s = &r->slots[i];
        s->source = malloc(slot_bytes);
        s->codes = malloc(slot_bytes);
        s->absmax = malloc(slot_bytes);
        s->errors = malloc(4 * slot_bytes);
        assert_true(s->source && s->codes && s->absmax && s->errors);
    }
    atomic_fetch_or(&fake.used, 1u << device->index);
    *out = r;
    return QC_OK;
}

static size_t ring_slot_bytes(const qc_gpu_ring *r)
{
    return r->slot_bytes;
}

static uint64_t ring_elems(const qc_gpu_ring *r, const qc_gpu_form *form, uint64_t step)
{
    uint64_t room = r->slot_bytes / (qc_dtype_bits(form->dtype) / 8);
    return room - room % step;
}

static void *ring_source(qc_gpu_ring *r, unsigned slot)
{
    assert_false(r->slots[slot].running); /* nobody writes to what is being read */
    return r->slots[slot].source;
}

static qc_status count_down(atomic_int *left, const char *what, qc_error *err)
{
    int before = atomic_load(left);
    while (before > 1 && !atomic_compare_exchange_weak(left, &before, before - 1))
        ;
    if (before == 1)
        QC_FAIL(err, fake.fail_as, "CUDA: %s: it broke", what);
    return QC_OK;
}

static qc_status ring_start(qc_gpu_ring *r, unsigned slot, const qc_gpu_form *form, uint64_t n,
                            qc_error *err)
{
    fake_slot *s = &r->slots[slot];
    assert_false(s->running);
    assert_true(n > 0 && n * qc_dtype_bits(form->dtype) / 8 <= r->slot_bytes);
    atomic_fetch_add(&fake.started, 1);
    QC_TRY(count_down(&fake.starts_left, "starting", err));
    s->form = *form;
    s->n = n;
    assert_int_equal(pthread_create(&s->thread, NULL, work_on, s), 0);
    s->running = 1;
    return QC_OK;
}

static qc_status ring_finish(qc_gpu_ring *r, unsigned slot, qc_gpu_result *out, qc_error *err)
{
    fake_slot *s = &r->slots[slot];
    assert_true(s->running);
    assert_int_equal(pthread_join(s->thread, NULL), 0);
    s->running = 0;
    QC_TRY(count_down(&fake.finishes_left, "waiting", err));
    *out =
        (qc_gpu_result){.codes = s->codes, .absmax = s->absmax, .errors = s->errors, .bad = s->bad};
    return QC_OK;
}

static void device_count(int *count, char *why, size_t why_bytes)
{
    atomic_fetch_add(&fake.asked, 1);
    *count = fake.count;
    if (fake.count == 0)
        (void)snprintf(why, why_bytes, "the NVIDIA driver was not found");
}

static qc_status device_open(qc_cuda_device *out, int index, qc_error *err)
{
    memset(out, 0, sizeof *out);
    out->index = index;
    (void)snprintf(out->name, sizeof out->name, "Fake %d", index);
    if (fake.dead >> index & 1)
        QC_FAIL(err, QC_ERR_DEVICE, "cuda:%d (%s) is an sm_30, and this build has no code for it",
                index, out->name);
    return QC_OK;
}

static const qc_gpu_quantizer quantizer = {.ring_create = ring_create,
                                           .ring_destroy = ring_destroy,
                                           .ring_slot_bytes = ring_slot_bytes,
                                           .ring_elems = ring_elems,
                                           .ring_source = ring_source,
                                           .ring_start = ring_start,
                                           .ring_finish = ring_finish};
static const qc_gpu_work fake_gpus = {
    .device_count = device_count, .device_open = device_open, .quantizer = &quantizer};

static void fake_reset(void)
{
    memset(&fake, 0, sizeof fake);
    fake.count = 2;
    fake.room = SIZE_MAX;
}

/* ---- a model, and converting it ---- */

typedef struct {
    char root[64];
    char model[96], cpu[96], gpu[96];
} world;

/* Overwrites so many bytes of a model's file, counted from its end. */
static void patch(const char *dir, long from_end, const void *bytes, size_t count)
{
    char path[128];
    (void)snprintf(path, sizeof path, "%s/model.safetensors", dir);
    FILE *f = fopen(path, "r+b");
    if (!f || fseek(f, -from_end, SEEK_END) != 0 || fwrite(bytes, count, 1, f) != 1 ||
        fclose(f) != 0)
        _exit(99);
}

static int setup(void **state)
{
    /* Frames of several steps; rows longer and shorter than a run of sums; an odd end. */
    static const test_tensor rows[] = {
        {"model.layers.0.mlp.down_proj.weight", QC_DTYPE_BF16, 2, {700, 1300}},
        {"model.layers.0.mlp.up_proj.weight", QC_DTYPE_F32, 2, {301, 1001}},
        {"model.layers.0.self_attn.k_proj.weight", QC_DTYPE_F16, 2, {3, 65}},
        {"model.layers.0.self_attn.o_proj.weight", QC_DTYPE_F64, 2, {33, 64}},
        {"model.norm.weight", QC_DTYPE_F32, 1, {7}},
    };
    static world w;
    /* The pattern's bytes would be too large for float, and for float16. */
    static double doubles[33 * 64];
    static uint16_t brains[700 * 1300];
    const long behind = 301 * 1001 * 4 + 3 * 65 * 2 + (long)sizeof doubles + 7 * 4;
    test_folder(w.root, sizeof w.root);
    (void)snprintf(w.model, sizeof w.model, "%s/model", w.root);
    (void)snprintf(w.cpu, sizeof w.cpu, "%s/cpu", w.root);
    (void)snprintf(w.gpu, sizeof w.gpu, "%s/gpu", w.root);
    test_write_checkpoint(w.model, rows, sizeof rows / sizeof *rows, "{\"model_type\": \"llama\"}");
    for (int i = 0; i < 33 * 64; i++)
        doubles[i] = (double)(i % 97 - 48) / 64;
    for (unsigned i = 0; i < 700 * 1300; i++)
        brains[i] = (uint16_t)(0x3c00u + (i * 2654435761u >> 22) + (i & 1 ? 0x8000u : 0));
    patch(w.model, (long)sizeof doubles + 7 * 4, doubles, sizeof doubles);
    patch(w.model, (long)sizeof brains + behind, brains, sizeof brains);
    *state = &w;
    return 0;
}

QC_PRINTF(2, 3)
static qc_status convert(qc_error *err, const char *fmt, ...)
{
    char line[512], *argv[32] = {NULL}, *rest = NULL;
    int argc = 0;
    va_list args;
    qc_options o;
    va_start(args, fmt);
    (void)vsnprintf(line, sizeof line, fmt, args);
    va_end(args);
    for (char *w = strtok_r(line, " ", &rest); w; w = strtok_r(NULL, " ", &rest))
        argv[argc++] = w;
    memset(err, 0, sizeof *err);
    SCOPED(qc_arena) a = {0};
    qc_status st = qc_options_parse(&o, &a, argc, argv, err);
    o.devices.work = &fake_gpus;
    if (st == QC_OK)
        st = qc_cmd_convert(&o, err);
    return st;
}

static void same_file(const char *a, const char *b, const char *name)
{
    char path[2][512];
    qc_strbuf text[2];
    qc_error err = {0};
    (void)snprintf(path[0], sizeof path[0], "%s/%s", a, name);
    (void)snprintf(path[1], sizeof path[1], "%s/%s", b, name);
    for (int i = 0; i < 2; i++) {
        qc_strbuf_init(&text[i], 1u << 30);
        test_must(qc_file_slurp(path[i], &text[i], &err), &err);
    }
    if (text[0].len != text[1].len || memcmp(text[0].data, text[1].data, text[0].len) != 0)
        fail_msg("%s differs", name);
    qc_strbuf_deinit(&text[0]);
    qc_strbuf_deinit(&text[1]);
}

/* Every file of one folder is in the other, byte for byte. */
static void same_folders(const char *a, const char *b)
{
    unsigned counts[2] = {0, 0};
    for (int i = 0; i < 2; i++) {
        DIR *d = opendir(i ? b : a);
        assert_non_null(d);
        const struct dirent *e;
        while ((e = readdir(d))) {
            if (e->d_name[0] == '.')
                continue;
            counts[i]++;
            if (i == 0)
                same_file(a, b, e->d_name);
        }
        closedir(d);
    }
    assert_int_equal(counts[0], counts[1]);
    assert_true(counts[0] >= 3);
}

static void must_convert(const world *w, const char *to, const char *device, unsigned threads,
                         const char *out)
{
    qc_error err;
    test_remove(out);
    test_must(convert(&err, "qconv --scale absmax --to %s -q --threads %u --device %s %s %s", to,
                      threads, device, w->model, out),
              &err);
}

static const char *const forms[] = {
    "nf4",
    "nf4 --compress none --no-double-quant --block-size 32",
    "int8",
    "int8 --block-size 4096 --compress none",
};
enum { FORMS = sizeof forms / sizeof *forms };

/* ---- tests ---- */

TEST(bytes_are_equal)
{
    const world *w = *state;
    static const size_t rooms[] = {512u << 10, 1u << 20, SIZE_MAX};
    for (unsigned f = 0; f < FORMS; f++) {
        fake_reset();
        must_convert(w, forms[f], "cpu", 2, w->cpu);
        assert_int_equal(fake.asked, 0);
        for (unsigned i = 0; i < 3; i++) {
            fake_reset();
            fake.room = rooms[i];
            must_convert(w, forms[f], i == 1 ? "cuda" : "cuda:1", i + 1, w->gpu);
            same_folders(w->cpu, w->gpu);
            assert_int_equal(fake.created, i + 1);
            assert_int_equal(fake.used, i == 1 ? 3 : 2);
            assert_true(fake.started >= 3);
        }
    }
}

TEST(without_room)
{
    const world *w = *state;
    fake_reset();
    must_convert(w, "nf4", "cpu", 2, w->cpu);
    fake.room = (512u << 10) - 1; /* less than a step: no ring */
    must_convert(w, "nf4", "cuda:0", 2, w->gpu);
    same_folders(w->cpu, w->gpu);
    assert_int_equal(fake.started, 0);
    fake_reset();
    fake.no_room_on = "Fake 1"; /* its worker goes on with the CPU, the other does not */
    must_convert(w, "nf4", "cuda", 2, w->gpu);
    same_folders(w->cpu, w->gpu);
    assert_int_equal(fake.created, 2);
    assert_int_equal(fake.used, 1);
    for (int which = 0; which < 2; which++) {
        for (int n = 1;; n++) {
            fake_reset();
            fake.room = 512u << 10;
            fake.fail_as = QC_ERR_NOMEM;
            atomic_store(which ? &fake.starts_left : &fake.finishes_left, n);
            must_convert(w, "nf4", "cuda:0", 1, w->gpu);
            same_folders(w->cpu, w->gpu);
            assert_true(n < 100);
            if (atomic_load(which ? &fake.starts_left : &fake.finishes_left) > 1)
                break; /* there are fewer than n */
        }
    }
}

TEST(failures_end_it)
{
    const world *w = *state;
    qc_error err;
    test_remove(w->gpu);
    for (int which = 0; which < 2; which++) {
        for (int n = 1; n <= 4; n++) {
            fake_reset();
            fake.room = 512u << 10;
            fake.fail_as = QC_ERR_INTERNAL;
            atomic_store(which ? &fake.starts_left : &fake.finishes_left, n);
            qc_status st =
                convert(&err, "qconv --scale absmax --to nf4 -q --threads 2 --device cuda:0 %s %s",
                        w->model, w->gpu);
            assert_int_equal(st, QC_ERR_INTERNAL);
            assert_non_null(strstr(err.msg, "cuda:0 (Fake 0)"));
            assert_non_null(strstr(err.msg, "it broke"));
            /* What was finished before may stay for the same command; a whole output is not there.
             */
            char manifest[PATH_MAX + 16];
            (void)snprintf(manifest, sizeof manifest, "%s/qconv.json", w->gpu);
            assert_int_not_equal(access(manifest, F_OK), 0);
            test_remove(w->gpu);
        }
    }
    /* That a GPU cannot be set up matters where it was asked for. */
    fake_reset();
    fake.create_fails = QC_ERR_INTERNAL;
    assert_int_equal(
        convert(&err, "qconv --scale absmax --to nf4 -q --device cuda:0 %s %s", w->model, w->gpu),
        QC_ERR_INTERNAL);
    assert_non_null(strstr(err.msg, "the GPU is away; --device cpu goes without it"));
}

TEST(devices_are_chosen)
{
    const world *w = *state;
    qc_error err;
    test_remove(w->gpu);
    const struct {
        const char *device;
        int count;
        unsigned dead;
        const char *message;
    } cases[] = {
        {"cuda:7", 2, 0,
         "--device cuda:7: there is no cuda:7; there are cuda:0 (Fake 0), cuda:1 (Fake 1)"},
        {"cuda:0,1", 1, 0, "--device cuda:0,1: there is no cuda:1; there is cuda:0 (Fake 0)"},
        {"cuda", 0, 0, "--device cuda: there is no GPU: the NVIDIA driver was not found"},
        {"cuda:1", 2, 2,
         "--device cuda:1: cuda:1 (Fake 1) is an sm_30, and this build has no code for it"},
        {"cuda", 1, 1,
         "--device cuda: cuda:0 (Fake 0) is an sm_30, and this build has no code for it"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        fake_reset();
        fake.count = cases[i].count;
        fake.dead = cases[i].dead;
        assert_int_equal(convert(&err, "qconv --scale absmax --to nf4 -q --device %s %s %s",
                                 cases[i].device, w->model, w->gpu),
                         QC_ERR_DEVICE);
        assert_string_equal(err.msg, cases[i].message);
        assert_int_equal(fake.created, 0);
    }
    fake_reset();
    fake.dead = 1; /* "cuda" takes those that there is code for */
    must_convert(w, "nf4", "cuda", 2, w->gpu);
    assert_int_equal(fake.used, 2);
}

/* auto: a model this small is not worth a GPU. */
TEST(auto_asks_when_it_pays)
{
    const qc_device_options not_given = {&fake_gpus, NULL}, auto_given = {&fake_gpus, "auto"};
    qc_error err = {0};
    qc_devices d;
    SCOPED(qc_arena) a = {0};
    fake_reset();
    test_must(qc_devices_choose(&d, not_given, QC_GPU_WORTH_BYTES - 1, &a, &err), &err);
    assert_int_equal(d.gpu_count, 0);
    assert_int_equal(fake.asked, 0);
    assert_string_equal(d.text, "cpu");
    test_must(qc_devices_choose(&d, auto_given, QC_GPU_WORTH_BYTES, &a, &err), &err);
    assert_int_equal(d.gpu_count, 2);
    assert_int_equal(d.wished, 0);
    assert_string_equal(d.text, "cuda:0 (Fake 0), cuda:1 (Fake 1)");
    fake.dead = 3;
    test_must(qc_devices_choose(&d, auto_given, UINT64_MAX, &a, &err), &err);
    assert_int_equal(d.gpu_count, 0);
    assert_non_null(strstr(d.why, "cuda:0 (Fake 0) is an sm_30"));
    fake.count = 0;
    test_must(qc_devices_choose(&d, not_given, UINT64_MAX, &a, &err), &err);
    assert_string_equal(d.why, "the NVIDIA driver was not found");
    assert_int_equal(setenv("QCONV_DEVICE", "cuda:1", 1), 0);
    assert_int_equal(qc_devices_choose(&d, not_given, UINT64_MAX, &a, &err), QC_ERR_DEVICE);
    assert_string_equal(err.msg,
                        "QCONV_DEVICE=cuda:1: there is no GPU: the NVIDIA driver was not found");
    test_must(qc_devices_choose(&d, (qc_device_options){&fake_gpus, "cpu"}, UINT64_MAX, &a, &err),
              &err);
    assert_string_equal(d.why, "--device cpu");
    assert_int_equal(unsetenv("QCONV_DEVICE"), 0);
}

/* The same words as on the CPU, wherever the weight is: first, at the end of a slot, in the last
 * one; infinite only in float16. */
TEST(bad_weights_are_named)
{
    const world *w = *state;
    char dir[96], said[512];
    qc_error err;
    static const test_tensor rows[] = {
        {"model.layers.0.mlp.up_proj.weight", QC_DTYPE_F32, 2, {500, 1001}}};
    static const struct {
        uint64_t index;
        float value;
        const char *to;
    } cases[] = {{0, INFINITY, "nf4"},
                 {131071, NAN, "nf4"},
                 {131072, -INFINITY, "int8 --block-size 64"},
                 {500499, NAN, "int8"},
                 {300300, 70000.0f, "int8"}};
    (void)snprintf(dir, sizeof dir, "%s/bad", w->root);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        test_remove(dir);
        test_write_checkpoint(dir, rows, 1, "{\"model_type\": \"llama\"}");
        patch(dir, 4 * (long)(500500 - cases[i].index), &cases[i].value, sizeof(float));
        test_remove(w->gpu);
        fake_reset();
        fake.room = 512u << 10;
        qc_status st =
            convert(&err, "qconv -q --threads 1 --device cpu --scale absmax --to %s %s %s",
                    cases[i].to, dir, w->gpu);
        memcpy(said, err.msg, sizeof said);
        assert_int_equal(convert(&err,
                                 "qconv -q --threads 1 --device cuda --scale absmax --to %s %s %s",
                                 cases[i].to, dir, w->gpu),
                         st);
        assert_true(st == QC_ERR_NONFINITE || st == QC_ERR_RANGE);
        assert_string_equal(err.msg, said);
        assert_true(fake.started > 0);
    }
}

TEST_GROUP(setup, NULL)
