/* Conversions that take weights from the store: what is written, and what remains of a failure. */
#include "base/bytes.h"
#include "tests/fixtures/calibrated_fixture.h"
#include "tests/fixtures/pipeline_fixture.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>

static qc_status convert(const world *w, const char *words, qc_error *err)
{
    return test_run_line(test_command, err, "qconv %s --hessians %s -q --threads=2 %s %s", words,
                         w->text, w->model, w->out);
}

static qc_status verify(const world *w)
{
    qc_error err = {0};
    return test_run_line(test_command, &err, "qconv verify -q --threads=2 %s", w->out);
}

/* Bytes of the tensor `name` in the plain output; NULL where there is none. */
static const unsigned char *tensor_of(const qc_strbuf *file, const char *name, uint64_t *bytes)
{
    char key[160];
    unsigned long long begin = 0, end = 0;
    char *comma = NULL;
    uint64_t head = qc_load_le64(file->data);
    (void)snprintf(key, sizeof key, "\"%s\":{", name);
    const char *at = strstr(file->data + 8, key);
    at = at ? strstr(at, "\"data_offsets\":[") : NULL;
    if (!at)
        return NULL;
    begin = strtoull(at + strlen("\"data_offsets\":["), &comma, 10);
    end = strtoull(comma + 1, NULL, 10);
    *bytes = end - begin;
    return (const unsigned char *)file->data + 8 + head + begin;
}

static void assert_tensor(const qc_strbuf *file, const char *stem, const char *suffix,
                          const void *want, uint64_t bytes)
{
    char name[160];
    uint64_t have = 0;
    (void)snprintf(name, sizeof name, "%s%s", stem, suffix);
    const unsigned char *p = tensor_of(file, name, &have);
    if (!p)
        fail_msg("no tensor %s", name);
    assert_int_equal(have, bytes);
    assert_memory_equal(p, want, bytes);
}

static double error_of(const qc_job *j, const qc_calibrated_arrays *a, const float *source,
                       double *largest)
{
    double xx = 0, ee = 0;
    *largest = 0;
    for (uint64_t i = 0; i < j->elems; i++) {
        const uint8_t *b = a->codes;
        float y;
        if (j->scheme == QC_SCHEME_NF4)
            y = qc_nf4_code[i % 2 ? b[i / 2] & 15 : b[i / 2] >> 4] *
                a->absmax[i / j->form.block_elems];
        else if (j->scheme == QC_SCHEME_INT8_ROWS)
            y = (float)(int8_t)b[i] * a->absmax[i / j->form.cols] * 7.874015718698502e-3f;
        else
            y = (float)(int8_t)b[i] * 7.874015718698502e-3f * a->absmax[i / j->form.block_elems];
        double e = fabs((double)source[i] - (double)y);
        xx += (double)source[i] * (double)source[i];
        ee += e * e;
        *largest = e > *largest ? e : *largest;
    }
    return ee / xx;
}

/* What the output must be, looked up in a plan of the same command. */
static void check_output(const world *w, const char *form)
{
    SCOPED(test_conversion) c;
    qc_error err = {0};
    qc_manifest m;
    char path[160], line[400], other[120];
    SCOPED(qc_strbuf) file = {.max = 1u << 24};
    SCOPED(qc_strbuf) source = {.max = 1u << 24};
    (void)snprintf(path, sizeof path, "%s/model.safetensors", w->out);
    test_must(qc_file_slurp(path, &file, &err), &err);
    (void)snprintf(path, sizeof path, "%s/model.safetensors", w->model);
    test_must(qc_file_slurp(path, &source, &err), &err);
    (void)snprintf(other, sizeof other, "%s/plan", w->root);
    (void)snprintf(line, sizeof line, "qconv %s --hessians %s -q %s %s", form, w->text, w->model,
                   other);
    test_conversion_begin(&c, "%s", line);
    test_must(qc_manifest_load(&m, &c.arena, w->out, &err), &err);
    unsigned seen = 0;
    for (uint32_t i = 0; i < c.plan.job_count; i++) {
        const qc_job *j = &c.plan.jobs[i];
        qc_calibrated_arrays a;
        uint64_t bytes = 0;
        double largest = 0;
        char stem[128];
        if (!qc_calibrated_takes(&c.plan, i))
            continue;
        make_up(&a, &c.plan, i);
        assert_tensor(&file, j->name, "", a.codes, a.codes_bytes);
        (void)snprintf(stem, sizeof stem, "%.*s", (int)(strlen(j->name) - strlen("weight")),
                       j->name);
        if (j->scheme == QC_SCHEME_INT8_ROWS)
            assert_tensor(&file, stem, "SCB", a.absmax, a.scales * sizeof(float));
        else if (!a.groups)
            assert_tensor(&file, j->name, ".absmax", a.absmax, a.scales * sizeof(float));
        else {
            assert_tensor(&file, j->name, ".absmax", a.absmax_codes, a.scales);
            assert_tensor(&file, j->name, ".nested_absmax", a.nested_absmax,
                          a.groups * sizeof(float));
        }
        const float *x = (const float *)(const void *)tensor_of(&source, j->name, &bytes);
        double mse = error_of(j, &a, x, &largest);
        for (size_t t = 0; t < m.tensor_count; t++) {
            const qc_manifest_tensor *row = &m.tensors[t];
            if (strcmp(row->name, j->name) != 0)
                continue;
            assert_true(fabs(row->rel_mse - mse) <= 1e-12 * mse);
            assert_true(fabs(row->max_err - largest) <= 0);
            assert_non_null(row->outputs);
            assert_true(fabs(row->outputs->rounded - result_of(i).rounded) <= 0);
            assert_true(fabs(row->outputs->calibrated - result_of(i).calibrated) <= 0);
            seen++;
        }
        qc_calibrated_free(&a);
    }
    assert_int_equal(seen, 2);
    assert_non_null(m.calibration);
    assert_string_equal(m.calibration->text, "some.txt");
    assert_string_equal(m.calibration->tokenizer, "bpe");
    assert_int_equal(m.calibration->tokens, 4096);
}

TEST_WITH(test_output_is_what_was_stored, setup, teardown)
{
    const world *w = *state;
    for (unsigned f = 0; f < FORMS; f++) {
        char words[128], staging[128];
        qc_error err = {0};
        struct stat st;
        memset(&calibrator, 0, sizeof calibrator);
        calibrator.digest = "one";
        (void)snprintf(words, sizeof words, "%s --compress none", forms[f]);
        test_must(convert(w, words, &err), &err);
        assert_int_equal(calibrator.runs, 1);
        assert_int_equal(verify(w), QC_OK);
        check_output(w, forms[f]);
        (void)snprintf(staging, sizeof staging, "%s/" TEST_STAGING, w->out);
        assert_int_equal(stat(staging, &st), -1);
        test_remove(w->out);
    }
}

static qc_strbuf model_text; /* of the model's file, for near_weights */

/* Scales by absmax and the nearest codes, but for one in 16, which is its neighbour: what
 * calibrating does, more or less. */
static void near_weights(qc_calibrated_arrays *a, const qc_plan *plan, uint32_t job)
{
    const qc_job *j = &plan->jobs[job];
    const qc_quant_ops *ops = qc_quant_ops_for(QC_ISA_SCALAR);
    uint64_t bytes = 0;
    const unsigned char *x = tensor_of(&model_text, j->name, &bytes);
    uint8_t *codes = a->codes;
    qc_piece_sums sums;
    assert_non_null(x);
    if (j->scheme == QC_SCHEME_INT8_ROWS) {
        ops->int8_rows_quantize(x, QC_DTYPE_F32, j->rows, j->form.cols, a->codes, a->absmax, &sums);
        for (uint64_t i = 0; i < j->elems; i += 16)
            codes[i] = (uint8_t)((int8_t)codes[i] + ((int8_t)codes[i] < 0 ? 1 : -1));
        return;
    }
    assert_int_equal(j->scheme, QC_SCHEME_NF4);
    ops->nf4_quantize(x, QC_DTYPE_F32, j->elems, j->form.block_elems, codes, a->absmax, NULL,
                      &sums);
    for (uint64_t i = 0; i < j->elems / 2; i += 8)
        codes[i] = (uint8_t)((codes[i] & 0xf0u) | ((codes[i] & 15u) < 8 ? (codes[i] & 15u) + 1u
                                                                        : (codes[i] & 15u) - 1u));
    ops->nested_quantize(a->absmax, a->scales, 0.0f, a->absmax_codes, a->nested_absmax);
    ops->nested_dequantize(a->absmax_codes, a->nested_absmax, qc_dynamic_map, a->scales,
                           QC_NESTED_BLOCK, 0.0f, a->absmax);
}

static qc_status verify_against(const world *w, qc_error *err)
{
    memset(err, 0, sizeof *err);
    return test_run_line(test_command, err, "qconv verify -q --threads=2 %s --against %s", w->out,
                         w->model);
}

/* Another error in the manifest's first row that has one: its leading digit, and its digest. */
static void change_error(const world *w)
{
    char path[160], hex[QC_DIGEST_HEX_BYTES];
    qc_error err = {0};
    (void)snprintf(path, sizeof path, "%s/qconv.json", w->out);
    SCOPED(qc_strbuf) text = {.max = 1u << 24};
    test_must(qc_file_slurp(path, &text, &err), &err);
    char *at = strstr(text.data, "\"rel_mse\": ");
    assert_non_null(at);
    at += strcspn(at, "0123456789");
    at += strspn(at, "0.");
    *at = *at == '9' ? '4' : '9';
    qc_digest d = qc_digest_bytes(text.data, text.len - 36);
    qc_digest_hex(&d, hex);
    memcpy(text.data + text.len - 36, hex, 32);
    test_must(qc_file_put(path, text.data, text.len, &err), &err);
}

/* Codes of calibrated weights need not be the nearest, but their error is known. */
TEST_WITH(test_against, setup, teardown)
{
    static const char *const words[] = {"--to nf4", "--to int8"};
    const world *w = *state;
    char path[160];
    qc_error err = {0};
    (void)snprintf(path, sizeof path, "%s/model.safetensors", w->model);
    for (size_t i = 0; i < 2; i++) {
        memset(&calibrator, 0, sizeof calibrator);
        calibrator.digest = "one";
        calibrator.change = near_weights;
        qc_strbuf_init(&model_text, 1u << 24);
        test_must(qc_file_slurp(path, &model_text, &err), &err);
        test_must(convert(w, words[i], &err), &err);
        assert_int_equal(calibrator.made, 2);
        test_must(verify_against(w, &err), &err);
        /* Without what the manifest says these codes are none. */
        char manifest[160];
        (void)snprintf(manifest, sizeof manifest, "%s/qconv.json", w->out);
        if (i == 0) {
            test_must(test_run_line(test_command, &err, "qconv unpack -q %s %s2", w->out, w->out),
                      &err);
            (void)snprintf(manifest, sizeof manifest, "%s2/qconv.json", w->out);
            assert_int_equal(unlink(manifest), 0);
            assert_int_equal(test_run_line(test_command, &err,
                                           "qconv verify -q --threads=2 %s2 --against %s", w->out,
                                           w->model),
                             QC_ERR_CHECK);
            assert_non_null(strstr(err.msg, "are not those of the weights in MODEL"));
        }
        test_remove(w->out);
        test_must(convert(w, words[i], &err), &err);
        change_error(w);
        assert_int_equal(verify(w), QC_OK);
        assert_int_equal(verify_against(w, &err), QC_ERR_CHECK);
        assert_non_null(strstr(err.msg, "where the manifest says"));
        test_remove(w->out);
        qc_strbuf_deinit(&model_text);
    }
}

/* What is left is as a search has it, and so is its size. */
TEST_WITH(test_left_weight_is_searched, setup, teardown)
{
    const world *w = *state;
    qc_error err = {0};
    qc_manifest plain, mixed;
    SCOPED(qc_arena) a = {0};
    for (unsigned f = 0; f < FORMS; f++) {
        memset(&calibrator, 0, sizeof calibrator);
        calibrator.digest = "one";
        calibrator.leave = "model.layers.0.mlp.up_proj.weight";
        test_must(test_run_line(test_command, &err, "qconv %s --scale search -q --threads=2 %s %s",
                                forms[f], w->model, w->out),
                  &err);
        test_must(qc_manifest_load(&plain, &a, w->out, &err), &err);
        test_remove(w->out);
        test_must(convert(w, forms[f], &err), &err);
        test_must(qc_manifest_load(&mixed, &a, w->out, &err), &err);
        assert_int_equal(verify(w), QC_OK);
        assert_int_equal(plain.tensor_count, mixed.tensor_count);
        for (size_t i = 0; i < plain.tensor_count; i++) {
            const qc_manifest_tensor *x = &plain.tensors[i], *y = &mixed.tensors[i];
            assert_string_equal(x->name, y->name);
            assert_int_equal(x->end, y->end);
            assert_int_equal(
                qc_digest_equal(&x->content, &y->content),
                strstr(x->name, "self_attn") == NULL || strstr(x->name, "map") != NULL ||
                    strstr(x->name, "weight_format") != NULL ||
                    (strstr(x->name, "quant_state") != NULL && strstr(forms[f], "nf4")) ||
                    (strstr(x->name, "quant_state") != NULL && strstr(forms[f], "no-double")));
        }
        test_remove(w->out);
    }
}

/* A calibration that stops goes on where it was, and the result is that of one that did not. */
TEST_WITH(test_stopped_and_continued, setup, teardown)
{
    const world *w = *state;
    qc_error err = {0};
    test_must(convert(w, "--to nf4", &err), &err);
    qc_digest whole = test_tree_digest(w->out);
    test_remove(w->out);
    calibrator.made = calibrator.runs = 0;
    calibrator.stop_after = 1;
    assert_int_equal(convert(w, "--to nf4", &err), QC_ERR_IO);
    assert_non_null(strstr(err.msg, "the calibrator stops here"));
    assert_non_null(strstr(err.msg, "1 weights are calibrated, and the same command continues"));
    calibrator.stop_after = 0;
    calibrator.made = 0;
    test_must(convert(w, "--to nf4", &err), &err);
    assert_int_equal(calibrator.runs, 2);
    assert_int_equal(calibrator.made, 1);
    qc_digest again = test_tree_digest(w->out);
    assert_true(qc_digest_equal(&whole, &again));
}

/* Nothing was made: the same can only fail again, and nothing stays behind. */
TEST_WITH(test_stopped_at_once, setup, teardown)
{
    const world *w = *state;
    qc_error err = {0};
    struct stat st;
    qc_io_fail_at(QC_IO_WRITE, 0, 0, 0);
    calibrator.stop_after = 1;
    calibrator.made = 1;
    assert_int_equal(convert(w, "--to nf4", &err), QC_ERR_IO);
    assert_int_equal(stat(w->out, &st), -1);
}

/* A disk that is full from the n-th write on, for every n: no weight is calibrated twice, and the
 * output is that of a run that did not fail. */
TEST_WITH(test_full_disk, setup, teardown)
{
    const world *w = *state;
    static const char words[] = "--to nf4 --compress none";
    qc_error err = {0};
    uint64_t n;
    test_must(convert(w, words, &err), &err);
    qc_digest whole = test_tree_digest(w->out);
    test_remove(w->out);
    for (n = 1;; n++) {
        calibrator.made = 0;
        qc_io_fail_at(QC_IO_WRITE, n, 1, ENOSPC);
        qc_status st = convert(w, words, &err);
        qc_io_fail_at(QC_IO_WRITE, 0, 0, 0);
        if (st == QC_OK)
            break;
        assert_int_equal(st, QC_ERR_NOSPACE);
        test_must(convert(w, words, &err), &err);
        assert_int_equal(calibrator.made, 2);
        qc_digest again = test_tree_digest(w->out);
        assert_true(qc_digest_equal(&whole, &again));
        test_remove(w->out);
    }
    assert_true(n > 10);
}

/* Another text is another conversion. */
TEST_WITH(test_other_text, setup, teardown)
{
    const world *w = *state;
    qc_error err = {0};
    calibrator.stop_after = 1;
    assert_int_equal(convert(w, "--to nf4", &err), QC_ERR_IO);
    calibrator.stop_after = 0;
    calibrator.digest = "two";
    assert_int_equal(convert(w, "--to nf4", &err), QC_ERR_USAGE);
    assert_non_null(strstr(err.msg, "calibration was 'one' then and is 'two' now"));
    calibrator.made = 0;
    test_must(convert(w, "--to nf4 --restart", &err), &err);
    assert_int_equal(calibrator.made, 2);
    assert_int_equal(verify(w), QC_OK);
}
