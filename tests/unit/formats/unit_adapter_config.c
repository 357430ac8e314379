/* formats/adapter_internal.h: which keys of rank_pattern and alpha_pattern mean which modules. What
 * is refused: tests/cli/test_lora.py. */
#include "formats/adapter_internal.h"
#include "tests/fixtures/alloc_faults.h"
#include "tests/fixtures/test.h"

#include <unistd.h>

static qc_status read_text(qc_adapter_config *c, qc_arena *arena, const char *text, qc_error *err)
{
    char path[] = "adapter_config_XXXXXX";
    int fd = mkstemp(path);
    assert_true(fd >= 0);
    assert_int_equal(write(fd, text, strlen(text)), (ssize_t)strlen(text));
    assert_int_equal(close(fd), 0);
    qc_status st = qc_adapter_config_read(c, arena, path, err);
    assert_int_equal(unlink(path), 0);
    return st;
}

/* As Python's re.match(r"(.*\.)?(KEY)$", module) has it. */
static const struct {
    const char *key, *module;
    int matches;
} cases[] = {
    {"q_proj", "model.layers.0.self_attn.q_proj", 1},
    {"q_proj", "q_proj", 1},
    {"q_proj", "model.layers.0.self_attn.xq_proj", 0},
    {"q_proj", "model.layers.0.self_attn.q_proj.inner", 0},
    {"layers.0.self_attn.q_proj", "model.layers.0.self_attn.q_proj", 1},
    {"layers.0.self_attn.q_proj", "model.layers.10.self_attn.q_proj", 0},
    {"layers\\\\.\\\\d+\\\\.mlp\\\\.(up|down)_proj", "model.layers.17.mlp.down_proj", 1},
    {"layers\\\\.\\\\d+\\\\.mlp\\\\.(up|down)_proj", "model.layers.17.mlp.gate_proj", 0},
    {"layers\\\\.\\\\d+\\\\.mlp\\\\.(up|down)_proj", "model.layers.x.mlp.up_proj", 0},
    {"layers.[0-3].x", "layers.2.x", 1},
    {"layers.[^0-3].x", "layers.2.x", 0},
    {"^lm_head", "lm_head", 1},
    {"^lm_head", "model.lm_head", 0},
    {".*", "anything.at.all", 1},
    {"a|b.c", "x.a", 1},
    {"a|b.c", "x.b.c", 1},
    {"a.c", "abc", 1},
    {"a\\\\.c", "abc", 0},
};

TEST(patterns_mean_what_they_mean_in_python)
{
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char text[512];
        SCOPED(qc_arena) arena = {0};
        SCOPED(qc_adapter_config) c;
        qc_error err = {0};
        (void)snprintf(text, sizeof text,
                       "{\"peft_type\": \"LORA\", \"r\": 8, \"lora_alpha\": 16, \"rank_pattern\": "
                       "{\"nothing\": 1, \"%s\": 3, \".*\": 5}, \"alpha_pattern\": {\"%s\": 2.5}}",
                       cases[i].key, cases[i].key);
        /* A key may be there once only. */
        if (strcmp(cases[i].key, ".*") == 0)
            memcpy(strstr(text, "\".*\": 5"), "\"xy\": 5", 7);
        if (read_text(&c, &arena, text, &err) != QC_OK)
            fail_msg("%s: %s", cases[i].key, err.msg);
        double rank = qc_adapter_config_rank(&c, cases[i].module);
        double alpha = qc_adapter_config_alpha(&c, cases[i].module);
        /* The first key that matches counts. */
        if (rank != (cases[i].matches ? 3 : 5) || alpha != (cases[i].matches ? 2.5 : 16))
            fail_msg("'%s' and '%s': %g, %g", cases[i].key, cases[i].module, rank, alpha);
    }
}

TEST(what_is_off_is_no_obstacle)
{
    qc_adapter_config c;
    qc_error err = {0};
    SCOPED(qc_arena) arena = {0};
    qc_status st = read_text(
        &c, &arena,
        "{\"peft_type\": \"LORA\", \"r\": 4, \"lora_alpha\": 0, \"layer_replication\": null, "
        "\"use_qalora\": false, \"target_parameters\": [], \"trainable_token_indices\": null, "
        "\"megatron_config\": {}, \"init_lora_weights\": true, \"use_rslora\": true, "
        "\"fan_in_fan_out\": true, \"use_dora\": null, \"rank_pattern\": {}, \"unknown\": [1]}",
        &err);
    if (st != QC_OK)
        fail_msg("%s", err.msg);
    assert_true(c.r == 4 && c.alpha == 0 && c.use_rslora && c.fan_in_fan_out && !c.use_dora);
    qc_adapter_config_deinit(&c);
}

/* Wherever memory ends, it says so and leaves nothing. */
TEST(memory_ends)
{
    static const char text[] = "{\"peft_type\": \"LORA\", \"r\": 8, \"lora_alpha\": 16, "
                               "\"rank_pattern\": {\"q_proj\": 3}, \"alpha_pattern\": {\"v\": 2}}";
    EACH_ALLOCATION_FAILS (fault, 1) {
        SCOPED(qc_arena) arena = {0};
        SCOPED(qc_adapter_config) c;
        fault.st = read_text(&c, &arena, text, NULL);
    }
}
