/* Every allocation of eval is made to fail in turn: an error that says so, no leak (the sanitizer
 * stage looks), and the same numbers when none fails. */
#include "convert/eval/eval.h"
#include "tests/fixtures/fault_fixture.h"

#define LINE "qconv eval -q --threads=1 --device=cpu --context=4 %s --against=%s --text=%s"

static qc_eval_result last;

static qc_status run_words(int argc, char **argv, qc_error *err)
{
    qc_options o;
    SCOPED(qc_arena) a = {0};
    qc_status st = qc_options_parse(&o, &a, argc, argv, err);
    if (st == QC_OK)
        st = o.command == QC_CMD_EVAL ? qc_eval_run(&last, &o.call, &o.eval, err)
                                      : qc_cmd_convert(&o, err);
    return st;
}

typedef struct {
    char model[96], out[96], text[96];
} eval_run;

static qc_status evaluate(void *ctx, qc_error *err)
{
    const eval_run *r = ctx;
    return test_run_line(run_words, err, LINE, r->out, r->model, r->text);
}

TEST(every_allocation)
{
    static const test_tensor rows[] = {
        {"model.embed_tokens.weight", QC_DTYPE_F32, 2, {40, 16}},
        {"model.norm.weight", QC_DTYPE_F32, 1, {16, 0}},
        {"lm_head.weight", QC_DTYPE_F32, 2, {40, 16}},
        {"model.layers.0.input_layernorm.weight", QC_DTYPE_F32, 1, {16, 0}},
        {"model.layers.0.post_attention_layernorm.weight", QC_DTYPE_F32, 1, {16, 0}},
        {"model.layers.0.mlp.up_proj.weight", QC_DTYPE_F32, 2, {24, 16}},
        {"model.layers.0.mlp.gate_proj.weight", QC_DTYPE_F32, 2, {24, 16}},
        {"model.layers.0.mlp.down_proj.weight", QC_DTYPE_F32, 2, {16, 24}},
        {"model.layers.0.self_attn.q_proj.weight", QC_DTYPE_F32, 2, {16, 16}},
        {"model.layers.0.self_attn.k_proj.weight", QC_DTYPE_F32, 2, {8, 16}},
        {"model.layers.0.self_attn.v_proj.weight", QC_DTYPE_F32, 2, {8, 16}},
        {"model.layers.0.self_attn.o_proj.weight", QC_DTYPE_F32, 2, {16, 16}},
    };
    char root[64];
    eval_run r;
    qc_error err = {0};
    test_folder(root, sizeof root);
    (void)snprintf(r.model, sizeof r.model, "%s/model", root);
    (void)snprintf(r.out, sizeof r.out, "%s/out", root);
    (void)snprintf(r.text, sizeof r.text, "%s/t.ids", root);
    test_write_checkpoint(
        r.model, rows, sizeof rows / sizeof *rows,
        "{\"model_type\": \"llama\", \"architectures\": [\"LlamaForCausalLM\"], \"vocab_size\": "
        "40, "
        "\"hidden_size\": 16, \"intermediate_size\": 24, \"num_hidden_layers\": 1, "
        "\"num_attention_heads\": 4, \"num_key_value_heads\": 2, \"rms_norm_eps\": 1e-5, "
        "\"hidden_act\": \"silu\", \"max_position_embeddings\": 64, \"rope_theta\": 10000.0, "
        "\"tie_word_embeddings\": false}");
    test_must(qc_file_put(r.text, "1 2 3 39 0 7\n5 5\n", 17, &err), &err);
    test_must(test_run_line(run_words, &err, "qconv --to=nf4 -q --threads=1 --device=cpu %s %s",
                            r.model, r.out),
              &err);
    test_must(evaluate(&r, &err), &err);
    double kl = last.kl_mean;
    assert_true(kl > 0.0 && last.predicted == 5 && last.windows == 3);
    test_every_allocation(evaluate, &r, 30);
    assert_true(last.kl_mean == kl);
}
