/* What a command line sets. How wrong ones are refused is tested from outside (cli/test_usage.py).
 */
#include "convert/cli/option_table.h"
#include "tests/fixtures/alloc_faults.h"
#include "tests/fixtures/test.h"

#define MAX_ARGS 24

typedef struct {
    qc_arena arena;
    qc_options o;
    qc_error err;
} parsed;

static qc_status parse_line(parsed *p, const char *line)
{
    static char text[512];
    char *argv[MAX_ARGS + 1] = {text};
    int argc = 0;
    size_t n = strlen(line);
    assert_true(n < sizeof text);
    memcpy(text, line, n + 1);
    for (char *s = text; *s; argc++) {
        assert_true(argc < MAX_ARGS);
        argv[argc] = s;
        s += strcspn(s, " ");
        if (*s)
            *s++ = '\0';
    }
    qc_arena_init(&p->arena);
    memset(&p->err, 0, sizeof p->err);
    return qc_options_parse(&p->o, &p->arena, argc, argv, &p->err);
}

static void parse_ok(parsed *p, const char *line)
{
    qc_status st = parse_line(p, line);
    if (st != QC_OK)
        fail_msg("%s: %s", line, p->err.msg);
}

TEST(table_is_in_order)
{
    for (unsigned i = 0; qc_option_table[i].name; i++) {
        const qc_option_row *row = &qc_option_table[i];
        assert_true(row->name && row->help && row->since);
        assert_true(row->kind != QC_ARG_CHOICE || row->choices);
        assert_true(row->kind == QC_ARG_NONE || row->choices || row->arg);
        assert_true(!row->letter || row->kind == QC_ARG_NONE);
        for (unsigned j = 0; j < i; j++) {
            if (strcmp(row->name, qc_option_table[j].name) == 0) {
                assert_int_equal(row->commands & qc_option_table[j].commands, 0);
                assert_int_equal(row->kind, qc_option_table[j].kind);
                assert_null(row->choices);
            }
            assert_true(!row->letter || row->letter != qc_option_table[j].letter);
        }
    }
}

TEST(same_name_other_command)
{
    parsed p;
    parse_ok(&p, "qconv unpack --device cuda:1 out dir");
    assert_string_equal(p.o.device, "cuda:1");
    assert_null(p.o.devices.wish);
    qc_arena_deinit(&p.arena);
    parse_ok(&p, "qconv --device cuda:0,2 --to nf4 model out");
    assert_string_equal(p.o.devices.wish, "cuda:0,2");
    assert_null(p.o.device);
    qc_arena_deinit(&p.arena);
}

TEST(measuring)
{
    parsed p;
    parse_ok(&p, "qconv validate out --against model");
    assert_string_equal(p.o.model, "out");
    assert_string_equal(p.o.against, "model");
    assert_int_equal(p.o.products.m_count, 6);
    assert_int_equal(p.o.products.m[5], 1024);
    assert_int_equal(p.o.products.seed, 1);
    assert_true(p.o.validate.max_error <= 0);
    assert_true(p.o.validate.tolerance > 0.00099 && p.o.validate.tolerance < 0.00101);
    qc_arena_deinit(&p.arena);
    parse_ok(&p, "qconv validate out --against model --m 7,1 --sample 3 --seed 0 "
                 "--baseline a --save-baseline b --tolerance 0.5 --activations x");
    assert_int_equal(p.o.products.m_count, 2);
    assert_int_equal(p.o.products.m[0], 7);
    assert_int_equal(p.o.products.m[1], 1);
    assert_int_equal(p.o.validate.sample, 3);
    assert_int_equal(p.o.products.seed, 0);
    assert_string_equal(p.o.validate.baseline, "a");
    assert_string_equal(p.o.validate.save_baseline, "b");
    assert_string_equal(p.o.validate.activations, "x");
    qc_arena_deinit(&p.arena);
}

TEST(defaults)
{
    parsed p;
    parse_ok(&p, "qconv --to nf4 model out");
    assert_int_equal(p.o.command, QC_CMD_CONVERT);
    assert_string_equal(p.o.model, "model");
    assert_string_equal(p.o.out, "out");
    assert_int_equal(p.o.convert.plan.recipe.to, QC_TO_NF4);
    assert_int_equal(p.o.convert.plan.recipe.block_elems, 0);
    assert_int_equal(p.o.convert.plan.recipe.double_quant, 1);
    assert_int_equal(p.o.convert.plan.recipe.rest, QC_REST_KEEP);
    assert_int_equal(p.o.convert.plan.recipe.rule_count, 0);
    assert_null(p.o.convert.plan.recipe.compute_dtype);
    assert_int_equal(p.o.convert.plan.compress, 1);
    assert_int_equal(p.o.convert.plan.compress_level, 1);
    assert_int_equal(p.o.convert.plan.max_shard_bytes, 5000000000u);
    assert_int_equal(p.o.convert.dry_run | p.o.convert.force | p.o.call.json | p.o.call.quiet |
                         p.o.call.verbose,
                     0);
    assert_int_equal(p.o.call.threads, 0);
    assert_int_equal(p.o.call.progress, QC_PROGRESS_AUTO);
    qc_arena_deinit(&p.arena);
}

TEST(every_option)
{
    parsed p;
    parse_ok(&p, "qconv convert --to=int8 --block-size=128 --no-double-quant --rest fp16 "
                 "--compute-dtype float32 --compress zstd:19 "
                 "--max-shard-size 512MiB --dry-run --force --threads 7 --json -vv "
                 "--progress never model out");
    assert_int_equal(p.o.convert.plan.recipe.to, QC_TO_INT8);
    assert_int_equal(p.o.convert.plan.recipe.block_elems, 128);
    assert_int_equal(p.o.convert.plan.recipe.double_quant, 0);
    assert_int_equal(p.o.convert.plan.recipe.rest, QC_REST_FP16);
    assert_string_equal(p.o.convert.plan.recipe.compute_dtype, "float32");
    assert_int_equal(p.o.convert.plan.compress, 1);
    assert_int_equal(p.o.convert.plan.compress_level, 19);
    assert_int_equal(p.o.convert.plan.max_shard_bytes, 512u << 20);
    assert_int_equal(p.o.convert.dry_run, 1);
    assert_int_equal(p.o.convert.force, 1);
    assert_int_equal(p.o.call.threads, 7);
    assert_int_equal(p.o.call.json, 1);
    assert_int_equal(p.o.call.verbose, 2);
    assert_int_equal(p.o.call.progress, QC_PROGRESS_NEVER);
    qc_arena_deinit(&p.arena);

    parse_ok(&p, "qconv m --to fp16 o --compress none -q --progress always");
    assert_int_equal(p.o.convert.plan.recipe.to, QC_TO_FP16);
    assert_int_equal(p.o.convert.plan.compress, 0);
    assert_int_equal(p.o.call.quiet, 1);
    assert_int_equal(p.o.call.progress, QC_PROGRESS_ALWAYS);
    qc_arena_deinit(&p.arena);

    parse_ok(&p, "qconv --to bf16 m o --compress none --compress zstd --rest=keep --to nf4");
    assert_int_equal(p.o.convert.plan.recipe.to, QC_TO_NF4);
    assert_int_equal(p.o.convert.plan.compress, 1);
    assert_int_equal(p.o.convert.plan.compress_level, 1);
    qc_arena_deinit(&p.arena);
}

TEST(rules_keep_their_order)
{
    parsed p;
    parse_ok(&p, "qconv --keep a --quantize b --to nf4 --keep=--c m o --quantize d");
    static const char *const globs[] = {"a", "b", "--c", "d"};
    assert_int_equal(p.o.convert.plan.recipe.rule_count, 4);
    for (unsigned i = 0; i < 4; i++) {
        assert_int_equal(p.o.convert.plan.recipe.rules[i].quantize, i % 2);
        assert_string_equal(p.o.convert.plan.recipe.rules[i].glob, globs[i]);
    }
    qc_arena_deinit(&p.arena);
}

TEST(commands_and_words)
{
    static const struct {
        const char *line;
        qc_command command, topic;
        const char *model, *out;
    } cases[] = {
        {"qconv inspect p", QC_CMD_INSPECT, QC_CMD_HELP, "p", NULL},
        {"qconv -q verify p", QC_CMD_VERIFY, QC_CMD_HELP, "p", NULL},
        {"qconv unpack --force a b", QC_CMD_UNPACK, QC_CMD_HELP, "a", "b"},
        {"qconv --to nf4 -- verify b", QC_CMD_CONVERT, QC_CMD_HELP, "verify", "b"},
        {"qconv convert --to nf4 verify b", QC_CMD_CONVERT, QC_CMD_HELP, "verify", "b"},
        {"qconv --to nf4 - b", QC_CMD_CONVERT, QC_CMD_HELP, "-", "b"},
        {"qconv --help", QC_CMD_HELP, QC_CMD_HELP, NULL, NULL},
        {"qconv help", QC_CMD_HELP, QC_CMD_HELP, NULL, NULL},
        {"qconv help unpack", QC_CMD_HELP, QC_CMD_UNPACK, NULL, NULL},
        {"qconv unpack --help", QC_CMD_HELP, QC_CMD_UNPACK, NULL, NULL},
        {"qconv --zzz -h", QC_CMD_HELP, QC_CMD_CONVERT, NULL, NULL},
        {"qconv --version", QC_CMD_VERSION, QC_CMD_HELP, NULL, NULL},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        parsed p;
        parse_ok(&p, cases[i].line);
        assert_int_equal(p.o.command, cases[i].command);
        assert_int_equal(p.o.help_topic, cases[i].topic);
        if (cases[i].model)
            assert_string_equal(p.o.model, cases[i].model);
        else
            assert_null(p.o.model);
        if (cases[i].out)
            assert_string_equal(p.o.out, cases[i].out);
        else
            assert_null(p.o.out);
        qc_arena_deinit(&p.arena);
    }
}

/* Each allocation of a parse fails once: QC_ERR_NOMEM, nothing leaks (sanitizers see to that). */
TEST(out_of_memory)
{
    EACH_ALLOCATION_FAILS (fault, 0) {
        parsed p;
        fault.st = parse_line(&p, "qconv --to nf4 --keep a --quantize b m o");
        qc_arena_deinit(&p.arena);
    }
}
