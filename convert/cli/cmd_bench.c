/* qconv bench: how fast the kernels are on this machine's GPU. */
#include "convert/cli/commands.h"

#include "base/text.h"
#include "convert/device/bench.h"
#include "convert/device/device_choice.h"
#include "convert/device/tuning_file.h"
#include "convert/term/console.h"
#include "convert/term/target_file.h"
#include "formats/file_io.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define MAX_TEXT_BYTES (1u << 26)

/* ---- which GPU ---- */

static qc_status choose_device(int *out, qc_devices *devices, const qc_options *o, qc_arena *arena,
                               qc_error *err)
{
    qc_device_wish wish;
    QC_TRY(qc_device_wish_read(&wish, o->call.run_device, err));
    if (wish.kind == QC_WISH_CPU)
        QC_FAIL(err, QC_ERR_DEVICE, "%s%s: bench measures the kernels of a GPU; expected cuda:N",
                wish.from, wish.text);
    if (wish.gpus & (wish.gpus - 1))
        QC_FAIL(err, QC_ERR_USAGE, "%s%s: bench runs on one GPU; expected cuda:N", wish.from,
                wish.text);
    QC_TRY(qc_devices_choose(devices, o->call.gpu, o->call.run_device, UINT64_MAX, arena, err));
    if (devices->gpu_count == 0)
        QC_FAIL(err, QC_ERR_DEVICE, "there is no GPU to measure: %s", devices->why);
    *out = devices->gpus[0].index;
    return QC_OK;
}

/* ---- files ---- */

/* Writes the JSON and the table to the files that were asked for. */
static qc_status put_files(const qc_options *o, const qc_bench_request *q, const qc_bench_result *r,
                           qc_error *err)
{
    const char *const paths[] = {o->bench.output, o->bench.save};
    for (unsigned i = 0; i < 2; i++) {
        qc_strbuf out;
        qc_arena arena;
        /* An old table is not given up before there is a row to take its place. */
        if (!paths[i] || (i == 1 && !r->tuned_count && !r->complete))
            continue;
        qc_strbuf_init(&out, MAX_TEXT_BYTES);
        qc_arena_init(&arena);
        qc_status st =
            i == 0 ? qc_bench_json(q, r, &out, err) : qc_bench_tuning_file(q, r, &arena, &out, err);
        st = qc_console_deliver(st, &out, paths[i], err);
        qc_arena_deinit(&arena);
        QC_TRY(st);
    }
    return QC_OK;
}

/* ---- progress ---- */

typedef struct {
    const qc_options *o;
    const qc_bench_request *q;
    int lines, bar;
} teller;

/* Failing to write here is no error, and measuring goes on: a disk that is full now may have room
 * at the end, when failing is one. */
static void save(void *ctx, const qc_bench_result *so_far)
{
    const teller *t = ctx;
    qc_error why = {0};
    if (put_files(t->o, t->q, so_far, &why) != QC_OK)
        qc_console_warn(&t->o->call, "what was measured so far could not be written: %s", why.msg);
}

/* A missing line of progress is no reason to stop. */
static void end_line(qc_status made, qc_strbuf *line)
{
    if (made == QC_OK)
        qc_console_line(line->data);
    qc_strbuf_deinit(line);
}

static void tell_row(void *ctx, const qc_bench_result *so_far, const qc_bench_row *row)
{
    const teller *t = ctx;
    qc_strbuf line;
    if (!t->lines)
        return;
    qc_strbuf_init(&line, 1024);
    end_line(qc_bench_row_line(t->q, so_far, row, &line, NULL), &line);
}

static void tell_tuned(void *ctx, const qc_bench_tuned *tuned)
{
    const teller *t = ctx;
    qc_strbuf line;
    if (!t->lines)
        return;
    qc_strbuf_init(&line, 1024);
    end_line(qc_bench_tuned_line(t->q, tuned, &line, NULL), &line);
}

static void tell_text(void *ctx, const char *text)
{
    const teller *t = ctx;
    if (t->bar)
        qc_console_bar(text);
    else if (t->lines)
        qc_console_line(text);
}

/* ---- answer ---- */

static qc_status print(const qc_options *o, const qc_bench_request *q, const qc_bench_result *r,
                       qc_arena *arena, qc_error *err)
{
    qc_strbuf out;
    qc_strbuf_init(&out, MAX_TEXT_BYTES);
    qc_status st = o->call.json        ? qc_bench_json(q, r, &out, err)
                   : o->bench.markdown ? qc_bench_markdown(q, r, arena, &out, err)
                                       : qc_bench_text(q, r, arena, &out, err);
    return qc_console_deliver(st, &out, NULL, err);
}

/* Says each failure in a sentence on standard error. */
static qc_status name_failures(const qc_bench_request *q, const qc_bench_result *r, qc_error *err)
{
    for (uint32_t i = 0; i < r->failed_count; i++) {
        qc_error one;
        qc_strbuf line;
        qc_strbuf_init(&line, 4096);
        qc_status st = qc_bench_failure_line(q, &r->failed[i], &line, err);
        if (st == QC_OK) {
            (void)QC_ERROR(&one, QC_ERR_CHECK, "%s", line.data);
            qc_console_error(&one, NULL, 0);
        }
        qc_strbuf_deinit(&line);
        QC_TRY(st);
    }
    return QC_OK;
}

static qc_status run(const qc_options *o, qc_arena *arena, qc_error *err)
{
    qc_devices devices;
    qc_tuning tuning = {0};
    qc_bench_request q = {.bf16 = o->bench.bf16,
                          .path = o->bench.path,
                          .seed = o->products.seed,
                          .rounds = (uint32_t)o->bench.rounds,
                          .seconds = (double)o->bench.seconds,
                          .tune = o->bench.tune,
                          .packed = o->bench.packed};
    QC_TRY(qc_bench_parse_shapes(o->bench.shapes, arena, &q, err));
    for (uint32_t i = 0; q.tune && i < q.shape_count; i++)
        if (q.shapes[i].part_count)
            QC_FAIL(err, QC_ERR_USAGE,
                    "--tune measures one weight at a time, and --shapes has %s; give their sum, "
                    "which holds for weights that share their input",
                    q.shapes[i].layer);
    QC_TRY(qc_bench_parse_schemes(o->bench.schemes, arena, &q, err));
    QC_TRY(qc_bench_set_m(o->products.m, o->products.m_count, arena, &q, err));
    QC_TRY(qc_target_file_check("--output", o->bench.output, err));
    QC_TRY(qc_target_file_check("--save", o->bench.save, err));
    QC_TRY(qc_target_file_differs("--save", o->bench.save, "--output", o->bench.output, err));
    if (!q.tune) /* tuning compares with what qconv does without a table */
        QC_TRY(qc_tuning_open(&tuning, &o->call, arena, err));
    QC_TRY(choose_device(&q.device, &devices, o, arena, err));
    q.tuning = qc_tuning_for(&tuning, &o->call, &devices.gpus[0]);
    if (tuning.path && qc_tuning_suits(&tuning, &devices.gpus[0]))
        q.tuned_by = tuning.path;
    qc_bench_result *result = NULL;
    QC_TRY(qc_arena_alloc(arena, &result, 1, sizeof *result, err));
    int shown = !o->call.quiet && o->call.progress != QC_PROGRESS_NEVER;
    teller t = {o, &q, shown,
                shown &&
                    (o->call.progress == QC_PROGRESS_ALWAYS || qc_console_terminal(STDERR_FILENO))};
    qc_bench_sink sink = {&t, tell_row, tell_text, tell_tuned, save};
    qc_status st = devices.work->bench->run(&q, &sink, arena, result, err);
    if (t.bar)
        qc_console_bar("");
    if (st != QC_OK) {
        qc_status named = name_failures(&q, result, NULL);
        return named == QC_OK ? st : named;
    }
    /* A file that cannot be written is no reason to keep the result from standard output. */
    st = put_files(o, &q, result, err);
    QC_TRY(print(o, &q, result, arena, st == QC_OK ? err : NULL));
    QC_TRY(name_failures(&q, result, st == QC_OK ? err : NULL));
    QC_TRY(st);
    if (result->failed_count)
        QC_FAIL(err, QC_ERR_CHECK,
                "%u of the results that were asked for %s wrong or missing, as said above",
                result->failed_count, qc_are(result->failed_count));
    return QC_OK;
}

qc_status qc_cmd_bench(const qc_options *o, qc_error *err)
{
    qc_arena arena;
    qc_arena_init(&arena);
    qc_status st = run(o, &arena, err);
    qc_arena_deinit(&arena);
    return st;
}
