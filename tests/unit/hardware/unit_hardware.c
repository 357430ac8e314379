/* convert/hardware/hardware.h, nvml_gpu.h, host_facts.h: what is read of a machine, with a stand-in
 * for the driver's library and folders that look like /proc and /sys. */
#include "convert/hardware/hardware.h"

#include "convert/hardware/hardware_choice.h"
#include "convert/hardware/host_facts.h"
#include "tests/fixtures/alloc_faults.h"
#include "tests/fixtures/fixture_files.h"

#define COUNT(a) (sizeof(a) / sizeof *(a))
#define GIB      (1ull << 30)

static qc_arena arena;

static const char *const variables[] = {
    "QCONV_NVML",     "QCONV_DEVICE",   "QCONV_ISA",       "CUDA_VISIBLE_DEVICES",
    "FAKE_NVML_GPUS", "FAKE_NVML_INIT", "FAKE_NVML_PEERS", "FAKE_NVML_LOSE",
};

static int begin(void **state)
{
    (void)state;
    qc_arena_init(&arena);
    for (size_t i = 0; i < COUNT(variables); i++)
        assert_int_equal(unsetenv(variables[i]), 0);
    return 0;
}

static int end(void **state)
{
    (void)state;
    qc_arena_deinit(&arena);
    return 0;
}

static void set(const char *name, const char *value)
{
    assert_int_equal(setenv(name, value, 1), 0);
}

#define A100  "NVIDIA A100-SXM4-40GB,GPU-aaaa1111,80,42949672960,1073741824,5120,1215"
#define R3090 "NVIDIA GeForce RTX 3090,GPU-aaaa2222,86,25769803776,0,384,9751"
#define ODD   "NVIDIA Odd 1,GPU-bbbb3333,93,10737418240,0"

static void use_fake(const char *gpus)
{
    set("QCONV_NVML", QC_FAKE_NVML);
    set("FAKE_NVML_GPUS", gpus);
}

static qc_hardware read_hardware(void)
{
    qc_hardware h;
    qc_error err = {0};
    if (qc_hardware_read(&h, &arena, &err) != QC_OK)
        fail_msg("%s", err.msg);
    return h;
}

static void expect_error(qc_status status, const char *message)
{
    qc_hardware h;
    qc_error err = {0};
    qc_status st = qc_hardware_read(&h, &arena, &err);
    if (st != status || strcmp(err.msg, message) != 0)
        fail_msg("%s '%s', expected %s '%s'", qc_status_name(st), err.msg, qc_status_name(status),
                 message);
}

/* ---- CUDA_VISIBLE_DEVICES ---- */

TEST_WITH(cuda_rules_are_followed, begin, end)
{
    static const char *const uuids[] = {"GPU-aa11", "GPU-aa22", "GPU-bb33", ""};
    static const struct {
        const char *list;
        const char *shown; /* digits */
    } cases[] = {
        {NULL, "0123"},
        {"", ""},
        {"-1", ""},
        {"NoDevFiles", ""},
        {"0", "0"},
        {"2,0", "20"},
        {"3,2,1,0", "3210"},
        {" 1 , 0", "10"},
        {"0,-1,2", "0"},
        {"1,4,2", "1"},
        {"4", ""},
        {"0,x,1", "0"},
        {"0,99999999999,1", "0"},
        {"0,,1", "0"},
        {",0", ""},
        {"0,1,", "01"},
        {"0,1,0", ""},
        {"0,0", ""},
        {"0,9,0", "0"},
        {"GPU-bb33", "2"},
        {"GPU-bb", "2"},
        {"GPU-aa11,GPU-b", "02"},
        {"GPU-aa11, GPU-b", "0"},
        {"GPU-aa11,2", "0"},
        {"GPU-aa11,GPU-bb,GPU-aa1", ""},
        {"2,GPU-aa11", "2"},
        {"GPU-aa", ""},
        {"0,GPU-aa,1", "0"},
        {"GPU-", ""},
        {"GPU-zz", ""},
        {"gpu-bb33", ""},
        {"GPU-bb333", ""},
        {"bb33", ""},
        {"MIG-GPU-bb33", ""},
        {"99999999999999999999", ""},
        {"0x1", "0"},
        {"1gpu2,2ampere", "12"},
        {"2, +3, -0, 1x", "2301"},
        {"one,2", ""},
        {"+", ""},
    };
    for (size_t i = 0; i < COUNT(cases); i++) {
        unsigned visible[4], shown = 99;
        char text[8] = "";
        qc_cuda_visible(cases[i].list, uuids, 4, visible, &shown);
        assert_in_range(shown, 0, 4);
        for (unsigned k = 0; k < shown; k++)
            text[k] = (char)('0' + visible[k]);
        text[shown] = '\0';
        if (strcmp(text, cases[i].shown) != 0)
            fail_msg("'%s' shows '%s', expected '%s'", cases[i].list ? cases[i].list : "(unset)",
                     text, cases[i].shown);
    }
}

TEST_WITH(visible_gpus_are_renumbered, begin, end)
{
    use_fake(A100 ";" R3090 ";" ODD);
    set("CUDA_VISIBLE_DEVICES", "GPU-bbbb3333,GPU-aaaa1");
    qc_hardware h = read_hardware();
    assert_int_equal(h.gpu_count, 2);
    assert_int_equal(h.gpus[0].index, 0);
    assert_int_equal(h.gpus[0].driver_index, 2);
    assert_string_equal(h.gpus[0].name, "NVIDIA Odd 1");
    assert_int_equal(h.gpus[1].index, 1);
    assert_int_equal(h.gpus[1].driver_index, 0);
    set("CUDA_VISIBLE_DEVICES", "7");
    h = read_hardware();
    assert_int_equal(h.gpu_count, 0);
    assert_string_equal(h.no_gpu, "CUDA_VISIBLE_DEVICES='7' hides all there are");
    set("CUDA_VISIBLE_DEVICES", "MIG-1234");
    assert_non_null(strstr(read_hardware().no_gpu, "MIG"));
}

/* ---- the driver ---- */

TEST_WITH(gpus_are_read, begin, end)
{
    use_fake(A100 ";" R3090 ";" ODD);
    set("FAKE_NVML_PEERS", "0-2");
    qc_hardware h = read_hardware();
    assert_int_equal(h.gpu_count, 3);
    assert_null(h.no_gpu);
    assert_null(h.warning);
    assert_false(h.assumed);
    assert_string_equal(h.driver, "999.1");
    const qc_gpu *g = h.gpus;
    assert_string_equal(g[0].name, "NVIDIA A100-SXM4-40GB");
    assert_string_equal(g[0].uuid, "GPU-aaaa1111");
    assert_int_equal(g[0].sm, 80);
    assert_int_equal(g[0].total_bytes, 40 * GIB);
    assert_int_equal(g[0].used_bytes, GIB);
    assert_int_equal(g[0].free_bytes, 39 * GIB);
    assert_true(g[0].bandwidth == 1555.2e9);
    assert_string_equal(g[0].card->name, "A100-40GB");
    assert_int_equal(g[0].peers, 4);
    assert_int_equal(g[1].peers, 0);
    assert_int_equal(g[2].peers, 1);
    assert_true(g[0].peers_known && g[1].peers_known);
    assert_string_equal(g[1].card->name, "RTX3090");
    assert_true(g[1].bandwidth > 936e9 && g[1].bandwidth < 937e9);
    assert_null(g[2].card);
    assert_int_equal(g[2].sm, 93);
    assert_true(g[2].bandwidth == 0);
}

/* A driver that lacks what is optional: the card table fills in what it can. */
TEST_WITH(old_drivers_are_read, begin, end)
{
    use_fake(A100 ";" ODD);
    set("QCONV_NVML", QC_FAKE_NVML_OLD);
    qc_hardware h = read_hardware();
    assert_int_equal(h.gpu_count, 2);
    assert_null(h.driver);
    assert_null(h.gpus[0].uuid);
    assert_int_equal(h.gpus[0].sm, 80);
    assert_true(h.gpus[0].bandwidth == 1555e9);
    assert_false(h.gpus[0].peers_known);
    assert_int_equal(h.gpus[1].sm, 0);
}

TEST_WITH(machines_without_gpus_are_fine, begin, end)
{
    set("QCONV_NVML", "/nowhere/libnvidia-ml.so.1");
    qc_hardware h = read_hardware();
    assert_int_equal(h.gpu_count, 0);
    assert_string_equal(
        h.no_gpu, "the NVIDIA driver was not found: /nowhere/libnvidia-ml.so.1 cannot be opened");
    set("QCONV_NVML", "libm.so.6");
    assert_string_equal(read_hardware().no_gpu,
                        "the NVIDIA driver is too old: libm.so.6 has no nvmlInit_v2");
    use_fake(A100);
    set("FAKE_NVML_INIT", "9");
    assert_string_equal(read_hardware().no_gpu,
                        "the NVIDIA driver does not answer: Driver Not Loaded");
    set("FAKE_NVML_INIT", "0");
    use_fake("");
    assert_string_equal(read_hardware().no_gpu, "the NVIDIA driver finds none");
}

TEST_WITH(lost_gpus_are_left_out, begin, end)
{
    use_fake(A100 ";" R3090);
    set("FAKE_NVML_LOSE", "0@0");
    qc_hardware h = read_hardware();
    assert_int_equal(h.gpu_count, 1);
    assert_int_equal(h.gpus[0].index, 1);
    assert_string_equal(h.warning,
                        "cuda:0 is left out: GPU 0 of the driver does not answer: GPU is lost");
    /* The others keep their numbers, also as peers. */
    use_fake(A100 ";" R3090 ";" ODD);
    set("FAKE_NVML_PEERS", "1-2");
    h = read_hardware();
    assert_int_equal(h.gpu_count, 2);
    assert_int_equal(h.gpus[0].peers, 4);
    assert_int_equal(h.gpus[1].peers, 2);
    use_fake(A100);
    h = read_hardware();
    assert_int_equal(h.gpu_count, 0);
    assert_string_equal(h.no_gpu, "the GPUs that are there do not answer");
}

TEST_WITH(many_gpus_are_cut_off, begin, end)
{
    char list[70 * 20] = "";
    for (int i = 0; i < 66; i++) {
        size_t used = strlen(list);
        (void)snprintf(list + used, sizeof list - used, "%sG%d,GPU-%d,80,9,0", i ? ";" : "", i, i);
    }
    use_fake(list);
    qc_hardware h = read_hardware();
    assert_int_equal(h.gpu_count, 64);
    assert_string_equal(h.gpus[63].name, "G63");
    assert_string_equal(h.warning, "only the driver's first 64 GPUs are looked at");
    set("FAKE_NVML_LOSE", "3@0");
    assert_string_equal(read_hardware().warning,
                        "only the driver's first 64 GPUs are looked at; cuda:3 is left out: GPU 3 "
                        "of the driver does not answer: GPU is lost");
}

/* Every allocation may fail: said as such, and nothing is leaked. */
TEST_WITH(running_out_of_memory_is_an_error, begin, end)
{
    use_fake(A100 ";" R3090);
    EACH_ALLOCATION_FAILS (fault, 0) {
        qc_hardware h;
        qc_strategy s;
        SCOPED(qc_arena) own = {0};
        fault.st = qc_hardware_read(&h, &own, NULL);
        if (fault.st == QC_OK)
            fault.st = qc_strategy_choose(&s, &h, &own, NULL);
    }
}

/* ---- QCONV_DEVICE ---- */

TEST_WITH(devices_are_chosen, begin, end)
{
    use_fake(A100 ";" R3090 ";" ODD);
    set("QCONV_DEVICE", "");
    assert_int_equal(read_hardware().gpu_count, 3);
    set("QCONV_DEVICE", "cuda");
    assert_int_equal(read_hardware().gpu_count, 3);
    set("QCONV_DEVICE", "auto");
    assert_int_equal(read_hardware().gpu_count, 3);
    set("QCONV_DEVICE", "cuda:0,2");
    assert_int_equal(read_hardware().gpu_count, 2);
    set("QCONV_DEVICE", "cuda:2,cuda:0");
    qc_hardware h = read_hardware();
    assert_int_equal(h.gpu_count, 2);
    assert_int_equal(h.gpus[0].index, 0);
    assert_int_equal(h.gpus[1].index, 2);
    set("CUDA_VISIBLE_DEVICES", "2,1");
    set("QCONV_DEVICE", "cuda:1");
    h = read_hardware();
    assert_int_equal(h.gpu_count, 1);
    assert_int_equal(h.gpus[0].index, 1);
    assert_int_equal(h.gpus[0].driver_index, 1);
    set("QCONV_DEVICE", "cuda:2");
    expect_error(QC_ERR_DEVICE, "QCONV_DEVICE=cuda:2: there is no cuda:2");
    set("QCONV_DEVICE", "cuda:64");
    expect_error(QC_ERR_DEVICE, "QCONV_DEVICE=cuda:64: there is no cuda:64");
    set("CUDA_VISIBLE_DEVICES", "");
    set("QCONV_DEVICE", "cuda");
    expect_error(QC_ERR_DEVICE, "QCONV_DEVICE=cuda: there is no GPU: CUDA_VISIBLE_DEVICES='' hides "
                                "all there are");
    set("QCONV_DEVICE", "cpu");
    h = read_hardware();
    assert_int_equal(h.gpu_count, 0);
    assert_string_equal(h.no_gpu, "QCONV_DEVICE=cpu");
    static const char *const bad[] = {"gpu",      "cuda:",   "cuda:x",      "cuda:0,",
                                      ",cuda:0",  "cuda: 0", "cuda:0,cuda", "CPU",
                                      "cuda:-1",  "0",       "cpu,cuda:0",  "cuda:0 ",
                                      "auto,cpu", "0,1",     "cuda:0,,1",   "cuda:0000"};
    static const char *const meant[COUNT(bad)] = {[0] = "; did you mean cuda?",
                                                  [9] = "; did you mean cuda:0?",
                                                  [13] = "; did you mean cuda:0,1?"};
    for (size_t i = 0; i < COUNT(bad); i++) {
        char message[200];
        set("QCONV_DEVICE", bad[i]);
        (void)snprintf(message, sizeof message,
                       "QCONV_DEVICE: expected auto, cpu, cuda, cuda:0 or cuda:0,2, found '%s'%s",
                       bad[i], meant[i] ? meant[i] : "");
        expect_error(QC_ERR_USAGE, message);
    }
    set("QCONV_DEVICE", "cuda:1,cuda:1");
    expect_error(QC_ERR_USAGE, "QCONV_DEVICE: cuda:1 is there twice in 'cuda:1,cuda:1'");
}

/* ---- --as ---- */

TEST_WITH(machines_are_assumed, begin, end)
{
    qc_hardware h;
    qc_error err = {0};
    set("QCONV_NVML", "/nowhere");
    assert_int_equal(qc_hardware_assume(&h, &arena, "2xA100-40GB+3090", &err), QC_OK);
    assert_true(h.assumed);
    assert_int_equal(h.gpu_count, 3);
    assert_string_equal(h.gpus[1].name, "A100-40GB");
    assert_string_equal(h.gpus[2].name, "RTX3090");
    assert_int_equal(h.gpus[2].index, 2);
    assert_int_equal(h.gpus[0].free_bytes, h.gpus[0].card->memory_bytes);
    assert_int_equal(h.gpus[0].peers, 2);
    assert_int_equal(h.gpus[1].peers, 1);
    assert_int_equal(h.gpus[2].peers, 0);
    assert_true(h.cpu_threads >= 1);
    assert_int_equal(qc_hardware_assume(&h, &arena, "64xT4", &err), QC_OK);
    assert_int_equal(h.gpu_count, 64);
    assert_int_equal(qc_hardware_assume(&h, &arena, "3090", &err), QC_OK);
    assert_int_equal(h.gpu_count, 1);
    static const struct {
        const char *as, *message;
    } bad[] = {
        {"A100-48GB", "--as: unknown card 'A100-48GB'; did you mean A100-40GB?"},
        {"2xA100-48GB", "--as: unknown card 'A100-48GB'; did you mean A100-40GB?"},
        {"Radeon", "--as: unknown card 'Radeon'; expected one such as A100-40GB, V100-16GB, 3090, "
                   "4090, A6000 or H100-80GB; docs/hardware.md lists them"},
        {"", "--as: expected cards with '+' between them, found nothing where one should be in ''"},
        {"3090+", "--as: expected cards with '+' between them, found nothing where one should be "
                  "in '3090+'"},
        {"+3090", "--as: expected cards with '+' between them, found nothing where one should be "
                  "in '+3090'"},
        {"2x",
         "--as: expected cards with '+' between them, found nothing where one should be in '2x'"},
        {"0x3090", "--as: expected a count of 1 to 64 cards, found '0x3090'"},
        {"65x3090", "--as: expected a count of 1 to 64 cards, found '65x3090'"},
        {"60x3090+5xT4", "--as: expected at most 64 cards, found more in '60x3090+5xT4'"},
    };
    for (size_t i = 0; i < COUNT(bad); i++) {
        assert_int_equal(qc_hardware_assume(&h, &arena, bad[i].as, &err), QC_ERR_USAGE);
        assert_string_equal(err.msg, bad[i].message);
    }
}

/* ---- processor and memory ---- */

static fx_dir root;

static void put_text(const char *name, const char *text)
{
    fx_put(root.path, name, text, strlen(text));
}

static qc_host_facts read_root(void)
{
    qc_host_facts f;
    qc_error err = {0};
    assert_int_equal(qc_host_read(&f, &arena, root.path, &err), QC_OK);
    return f;
}

TEST_WITH(hosts_are_read, begin, end)
{
    fx_make_dir(&root);
    qc_host_facts f = read_root();
    assert_null(f.cpu_name);
    assert_int_equal(f.memory_bytes, 0);
    put_text("proc/cpuinfo", "processor\t: 0\nmodel name\t: Some CPU @ 2 GHz\nflags : x\n");
    put_text("proc/meminfo", "MemTotal:       1000 kB\nMemFree: 1 kB\nMemAvailable:    600 kB\n");
    f = read_root();
    assert_string_equal(f.cpu_name, "Some CPU @ 2 GHz");
    assert_int_equal(f.memory_bytes, 1024000);
    assert_int_equal(f.memory_free_bytes, 614400);

    /* Version 2: the tightest of the group and those above it. */
    put_text("proc/self/cgroup", "0::/job/step\n");
    put_text("sys/fs/cgroup/job/step/memory.max", "max\n");
    put_text("sys/fs/cgroup/job/memory.max", "500000\n");
    put_text("sys/fs/cgroup/job/memory.current", "400000\n");
    put_text("sys/fs/cgroup/job/memory.stat", "anon 7\ninactive_file 300000\n");
    f = read_root();
    assert_int_equal(f.memory_bytes, 500000);
    assert_int_equal(f.memory_free_bytes, 400000);
    put_text("sys/fs/cgroup/job/memory.current", "900000\n");
    assert_int_equal(read_root().memory_free_bytes, 0);
    /* A limit above what there is, and a path that leads nowhere but to the mount. */
    put_text("sys/fs/cgroup/job/memory.max", "5000000\n");
    assert_int_equal(read_root().memory_bytes, 1024000);
    put_text("proc/self/cgroup", "0::/elsewhere/x\n");

    /* Version 1. */
    put_text("proc/self/cgroup", "4:cpuacct,cpu:/a\n3:cpuset:/z\n7:memory:/a\n0::/none\nbad\n");
    put_text("sys/fs/cgroup/memory/a/memory.limit_in_bytes", "300000\n");
    put_text("sys/fs/cgroup/memory/a/memory.usage_in_bytes", "200000\n");
    put_text("sys/fs/cgroup/memory/a/memory.stat", "inactive_file 1\ntotal_inactive_file 50000\n");
    f = read_root();
    assert_int_equal(f.memory_bytes, 300000);
    assert_int_equal(f.memory_free_bytes, 150000);
    test_remove(root.path);
}

TEST_WITH(this_host_is_plausible, begin, end)
{
    set("QCONV_DEVICE", "cpu");
    qc_hardware h = read_hardware();
    assert_in_range(h.cpu_threads, 1, 100000);
    assert_true(h.memory_bytes > 0 && h.memory_free_bytes <= h.memory_bytes);
    assert_true(h.disk_free_bytes > 0);
    assert_true(qc_isa_available(h.isa));
    set("QCONV_ISA", "scalar");
    assert_int_equal(read_hardware().isa, QC_ISA_SCALAR);
}

/* ---- what would be chosen ---- */

TEST_WITH(choices_follow_the_architecture, begin, end)
{
    static const struct {
        unsigned sm;
        int usable;
        const char *dtype, *kernels, *schemes;
    } cases[] = {
        {0, 1, "float16", "not known", "nf4,nf4-32,16bit"},
        {61, 0, "float16", "none", "nf4,nf4-32,16bit"},
        {70, 1, "float16", "sm_70: mma.m8n8k4", "nf4,nf4-32,16bit"},
        {72, 1, "float16", "sm_70: mma.m8n8k4", "nf4,nf4-32,16bit"},
        {75, 1, "float16", "sm_70: mma.m8n8k4", "nf4,nf4-32,int8,16bit"},
        {80, 1, "bfloat16", "sm_80: mma.m16n8k16, cp.async", "nf4,nf4-32,int8,16bit"},
        {89, 1, "bfloat16", "sm_80: mma.m16n8k16, cp.async", "nf4,nf4-32,int8,16bit"},
        {90, 1, "bfloat16", "sm_80: mma.m16n8k16, cp.async", "nf4,nf4-32,int8,16bit"},
        {120, 1, "bfloat16", "sm_80: mma.m16n8k16, cp.async", "nf4,nf4-32,int8,16bit"},
    };
    for (size_t i = 0; i < COUNT(cases); i++) {
        qc_gpu g = {.sm = cases[i].sm, .total_bytes = 20000000000u, .free_bytes = 10000000000u};
        qc_gpu_choice c = qc_gpu_choose(&g);
        assert_int_equal(c.usable, cases[i].usable);
        assert_string_equal(c.compute_dtype, cases[i].dtype);
        assert_string_equal(c.kernels, cases[i].kernels);
        assert_string_equal(c.schemes, cases[i].schemes);
        assert_true(*c.compute_why && *c.kernels_why && *c.schemes_why);
        /* 0.9 x free - 0.5e9, and its weights at 16, 8 + 32/4096 and 4 + 8/64 + 32/16384 bits. */
        assert_int_equal(c.room_bytes, 8500000000u);
        assert_int_equal(c.weights_16bit, 4250000000u);
        assert_in_range(c.weights_int8, 8491707000u, 8491708000u);
        assert_in_range(c.weights_nf4, 16477046000u, 16477048000u);
    }
    qc_gpu full = {.sm = 80, .total_bytes = 20000000000u, .free_bytes = 500000000u};
    assert_int_equal(qc_gpu_choose(&full).room_bytes, 0);
    assert_int_equal(qc_gpu_choose(&full).weights_nf4, 0);
}

static void expect_strategy(const qc_hardware *h, const char *name, const char *vram)
{
    qc_strategy s;
    qc_error err = {0};
    assert_int_equal(qc_strategy_choose(&s, h, &arena, &err), QC_OK);
    assert_string_equal(s.name, name);
    assert_string_equal(s.vram, vram);
    assert_true(*s.why);
}

TEST_WITH(strategies_follow_the_rule, begin, end)
{
    qc_gpu gpus[3] = {{.index = 0, .sm = 80, .free_bytes = 10},
                      {.index = 1, .sm = 80, .free_bytes = 10},
                      {.index = 2, .sm = 61, .free_bytes = 10}};
    qc_hardware h = {.gpus = gpus, .gpu_count = 2, .memory_free_bytes = 100};
    expect_strategy(&h, "gpus-balanced", "auto");
    h.gpu_count = 1;
    expect_strategy(&h, "gpu-and-cpu", "auto+cpu");
    h.memory_free_bytes = 10;
    expect_strategy(&h, "gpu-whole", "auto");
    h.gpu_count = 0;
    expect_strategy(&h, "cpu", "cpu");
    /* What is too old is no GPU to place anything on. */
    h.gpus = &gpus[1];
    h.gpu_count = 2;
    expect_strategy(&h, "gpu-whole", "auto");
    h.gpus = &gpus[2];
    h.gpu_count = 1;
    expect_strategy(&h, "cpu", "cpu");
    qc_error err = {0};
    assert_int_equal(qc_hardware_assume(&h, &arena, "3090+3090+a100+3090", &err), QC_OK);
    expect_strategy(&h, "gpus-balanced", "2xRTX3090+A100-40GB+RTX3090");
}
