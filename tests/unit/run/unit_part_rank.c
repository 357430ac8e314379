/* Which part of the work is whose. */
#include "convert/run/part_rank.h"
#include "tests/fixtures/test.h"

#define ITEMS_MAX 200
#define PARTS_MAX 40

/* ---- Rank ----------------------------------------------------------------------------------- */

static const char *const variables[] = {"SLURM_STEP_NUM_TASKS", "SLURM_STEP_ID", "SLURM_NTASKS",
                                        "SLURM_PROCID"};

typedef struct {
    const char *values[4]; /* of the variables, NULL: not set */
    unsigned index, count;
    const char *refusal; /* part of the message, or NULL */
} rank_case;

static void set_environment(const char *const *values)
{
    for (int i = 0; i < 4; i++)
        assert_int_equal(values[i] ? setenv(variables[i], values[i], 1) : unsetenv(variables[i]),
                         0);
}

TEST(a_step_has_a_rank)
{
    static const rank_case cases[] = {
        {{NULL, NULL, NULL, NULL}, 0, 1, NULL},
        {{"4", "0", "4", "0"}, 0, 4, NULL},
        {{"4", "0", "4", "3"}, 3, 4, NULL},
        {{"4", "0", NULL, "1"}, 1, 4, NULL},
        {{"4096", "12", "4096", "4095"}, 4095, 4096, NULL},
        {{"1", "0", "1", "0"}, 0, 1, NULL},
        /* A batch script; the shell of salloc. */
        {{NULL, NULL, "4", "0"}, 0, 1, NULL},
        {{NULL, NULL, "4", NULL}, 0, 1, NULL},
        /* A batch script submitted by a task of a step of two. */
        {{"2", "0", "1", "0"}, 0, 1, NULL},
        {{"2", NULL, "2", "0"}, 0, 1, NULL},
        {{"4", "0", "4", "4"}, 0, 0, "SLURM_PROCID is 4"},
        {{"4", "0", "4", NULL}, 0, 0, "SLURM_PROCID is ''"},
        {{"4", "0", "4", "x"}, 0, 0, "SLURM_PROCID is 'x'"},
        {{"-4", "0", "4", "0"}, 0, 0, "SLURM_STEP_NUM_TASKS is '-4'"},
        {{"", "0", "4", "0"}, 0, 0, "SLURM_STEP_NUM_TASKS is ''"},
        {{"4", "0", "4 ", "0"}, 0, 0, "SLURM_NTASKS is '4 '"},
        {{"99999999999999999999", "0", NULL, "0"}, 0, 0, "; expected a number; give --part I/N"},
        {{"4097", "0", "4097", "0"}, 0, 0, "expected at most 4096, one for each part"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const rank_case *c = &cases[i];
        qc_convert_options o;
        qc_rank rank;
        qc_error err = {0};
        memset(&o, 0, sizeof o);
        set_environment(c->values);
        qc_status st = qc_rank_choose(&rank, &o, &err);
        if (c->refusal) {
            assert_int_equal(st, QC_ERR_USAGE);
            assert_non_null(strstr(err.msg, c->refusal));
            continue;
        }
        assert_int_equal(st, QC_OK);
        assert_int_equal(rank.index, c->index);
        assert_int_equal(rank.count, c->count);
    }
}

TEST(the_option_wins)
{
    qc_convert_options o;
    qc_rank rank;
    memset(&o, 0, sizeof o);
    set_environment((const char *const[]){"4", "0", "4", "x"});
    o.part_index = 0;
    o.part_count = 1;
    assert_int_equal(qc_rank_choose(&rank, &o, NULL), QC_OK);
    assert_int_equal(rank.count, 1);
    o.part_index = 6;
    o.part_count = 7;
    assert_int_equal(qc_rank_choose(&rank, &o, NULL), QC_OK);
    assert_int_equal(rank.index, 6);
    assert_int_equal(rank.count, 7);
}

/* ---- Dealing out ---------------------------------------------------------------------------- */

static uint64_t next(uint64_t *seed) /* splitmix64 */
{
    uint64_t z = *seed += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

/* The rule in its plainest words. */
static void deal_plainly(uint32_t *part_of, const uint64_t *bytes, uint32_t count, unsigned parts)
{
    uint64_t load[PARTS_MAX] = {0};
    int taken[ITEMS_MAX] = {0};
    for (uint32_t n = 0; n < count; n++) {
        uint32_t largest = UINT32_MAX;
        for (uint32_t i = 0; i < count; i++)
            if (!taken[i] && (largest == UINT32_MAX || bytes[i] > bytes[largest]))
                largest = i;
        unsigned least = 0;
        for (unsigned p = 1; p < parts; p++)
            if (load[p] < load[least])
                least = p;
        taken[largest] = 1;
        part_of[largest] = least;
        load[least] += bytes[largest];
    }
}

TEST(dealing_is_the_plain_rule)
{
    uint64_t seed = 6;
    for (int round = 0; round < 2000; round++) {
        uint64_t bytes[ITEMS_MAX], range = next(&seed) % 3 ? 1000000 : 4; /* few: many equal */
        uint32_t part_of[ITEMS_MAX], plain[ITEMS_MAX];
        uint32_t count = (uint32_t)(next(&seed) % (round < 1900 ? 30 : ITEMS_MAX));
        unsigned parts = 1 + (unsigned)(next(&seed) % PARTS_MAX);
        for (uint32_t i = 0; i < count; i++)
            bytes[i] = next(&seed) % range;
        assert_int_equal(qc_parts_deal(part_of, bytes, count, parts, NULL), QC_OK);
        deal_plainly(plain, bytes, count, parts);
        assert_memory_equal(part_of, plain, count * sizeof *plain);
        uint64_t load[PARTS_MAX] = {0}, sum = 0, most = 0, largest = 0;
        for (uint32_t i = 0; i < count; i++) {
            assert_true(part_of[i] < parts);
            load[part_of[i]] += bytes[i];
            sum += bytes[i];
            largest = bytes[i] > largest ? bytes[i] : largest;
        }
        for (unsigned p = 0; p < parts; p++)
            most = load[p] > most ? load[p] : most;
        assert_true((most - (most < largest ? most : largest)) * parts <= sum);
    }
}

TEST(sums_do_not_wrap)
{
    const uint64_t bytes[] = {UINT64_MAX, UINT64_MAX, UINT64_MAX, 5};
    uint32_t part_of[4];
    assert_int_equal(qc_parts_deal(part_of, bytes, 4, 2, NULL), QC_OK);
    assert_int_equal(part_of[0], 0);
    assert_int_equal(part_of[1], 1);
    assert_int_equal(part_of[2], 0);
    assert_int_equal(qc_parts_deal(part_of, bytes, 4, 0, NULL), QC_ERR_INTERNAL);
}

/* A part that reads much for what it writes has as much to do as one that copies. */
TEST(a_plan_is_dealt_out_by_what_is_read_and_written)
{
    qc_checkpoint_tensor sources[3];
    qc_checkpoint model;
    qc_job jobs[3];
    qc_output outputs[3];
    uint64_t begins[3] = {0};
    qc_shard shards[3];
    qc_plan plan;
    uint32_t part_of[3];
    uint64_t load[2];
    static const qc_recipe_entry entry;
    memset(sources, 0, sizeof sources);
    memset(&model, 0, sizeof model);
    memset(jobs, 0, sizeof jobs);
    memset(outputs, 0, sizeof outputs);
    memset(shards, 0, sizeof shards);
    memset(&plan, 0, sizeof plan);
    static const uint64_t read[3] = {400, 100, 90}, written[3] = {90, 100, 90};
    for (uint32_t i = 0; i < 3; i++) {
        sources[i].bytes = read[i];
        jobs[i].source = i;
        jobs[i].first_output = i;
        jobs[i].roles = 1u << QC_ROLE_TENSOR_MAIN;
        jobs[i].name = sources[i].name = "t";
        jobs[i].scheme = QC_SCHEME_KEEP;
        jobs[i].entry = &entry;
        outputs[i] = (qc_output){i & 0xffffff, QC_ROLE_TENSOR_MAIN};
        shards[i].first = i;
        shards[i].count = 1;
        shards[i].header_bytes = 10;
        shards[i].data_bytes = written[i];
    }
    jobs[2].absorbed_bytes = 10;
    model.tensors = sources;
    plan.model = &model;
    plan.jobs = jobs;
    plan.job_count = 3;
    plan.outputs = outputs;
    plan.tensor_count = 3;
    plan.layout.begins = begins;
    plan.layout.shards = shards;
    plan.layout.count = 3;
    assert_int_equal(qc_parts_of_plan(part_of, load, &plan, 2, NULL), QC_OK);
    assert_int_equal(part_of[0], 0);
    assert_int_equal(part_of[1], 1);
    assert_int_equal(part_of[2], 1);
    assert_int_equal(load[0], 500);
    assert_int_equal(load[1], 410);
}
