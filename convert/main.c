/* Parses options, sets signals, runs the command, prints the last message and returns the exit
 * code. */
#include "base/workers.h"
#include "convert/cli/commands.h"
#include "convert/cli/help.h"
#include "convert/gpu/gpu_table.h"
#include "convert/known/model_path.h"
#include "convert/term/console.h"
#include "formats/file_io.h"

#include <signal.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#define MAX_HELP_BYTES    (1u << 20)
#define STACK_LEAST_BYTES (1u << 20) /* many times what any command needs */

/* ---- signals ---- */

static void on_interrupt(int signal_number)
{
    (void)signal_number;
    qc_interrupt();
}

/* The first SIGINT or SIGTERM asks the work to stop and clean up. The default action is then
 * restored, so that a second one ends the process. A signal that is ignored already (nohup, a
 * shell's background job) stays ignored. */
static void set_signals(void)
{
    static const int stops[] = {SIGINT, SIGTERM, SIGHUP};
    struct sigaction act, old;
    memset(&act, 0, sizeof act);
    (void)sigemptyset(&act.sa_mask);
    act.sa_handler = on_interrupt;
    act.sa_flags = (int)SA_RESETHAND;
    for (size_t i = 0; i < sizeof stops / sizeof *stops; i++)
        if (sigaction(stops[i], NULL, &old) == 0 && old.sa_handler != SIG_IGN)
            (void)sigaction(stops[i], &act, NULL);
    act.sa_handler = SIG_IGN;
    act.sa_flags = 0;
    (void)sigaction(SIGPIPE, &act, NULL);
    (void)sigaction(SIGXFSZ, &act, NULL); /* a file size limit is then an error of write */
}

/* ---- commands that only print ---- */

static qc_status print_text(const qc_options *o, qc_error *err)
{
    qc_strbuf text;
    qc_strbuf_init(&text, MAX_HELP_BYTES);
    qc_status st = QC_OK;
    if (o->command == QC_CMD_VERSION)
        qc_strbuf_putf(&text, "qconv " QCONV_VERSION "\nkernels %s\n",
                       o->devices.work ? o->devices.work->build() : "none");
    else if (o->call.json)
        st = qc_help_json(&text, o->help_topic, err);
    else
        qc_help_command(&text, o->help_topic);
    return qc_console_deliver(st, &text, NULL, err);
}

/* Prints the overview for `qconv` without arguments, as an error. */
static int print_overview_as_error(void)
{
    qc_strbuf text;
    qc_strbuf_init(&text, MAX_HELP_BYTES);
    qc_help_overview(&text);
    qc_status st = qc_strbuf_status(&text, NULL);
    if (st == QC_OK && write(STDERR_FILENO, text.data, text.len) < 0)
        st = QC_ERR_IO;
    qc_strbuf_deinit(&text);
    return qc_status_exit_code(st == QC_OK ? QC_ERR_USAGE : st);
}

/* ---- dispatch ---- */

typedef qc_status (*command_fn)(const qc_options *o, qc_error *err);

static const struct {
    qc_command command;
    command_fn run;
} commands[] = {
    {QC_CMD_CONVERT, qc_cmd_convert},   {QC_CMD_INSPECT, qc_cmd_inspect},
    {QC_CMD_VERIFY, qc_cmd_verify},     {QC_CMD_UNPACK, qc_cmd_unpack},
    {QC_CMD_PLAN, qc_cmd_plan},         {QC_CMD_HARDWARE, qc_cmd_hardware},
    {QC_CMD_VALIDATE, qc_cmd_validate}, {QC_CMD_HELP, print_text},
    {QC_CMD_VERSION, print_text},
};

static qc_status run(const qc_options *o, qc_error *err)
{
    for (size_t i = 0; i < sizeof commands / sizeof *commands; i++)
        if (commands[i].command == o->command)
            return commands[i].run(o, err);
    QC_FAIL(err, QC_ERR_INTERNAL, "command %d has no function", (int)o->command);
}

/* Finds the folders of models as the hub's cache has them. 'plan' looks up ids by itself. */
static qc_status settle_paths(qc_options *o, qc_error *err)
{
    qc_path_kind kind = QC_PATH_MISSING;
    int reads_model = o->command == QC_CMD_CONVERT || o->command == QC_CMD_INSPECT;
    if (o->command == QC_CMD_PLAN)
        reads_model = qc_path_stat(o->model, &kind, NULL, NULL) == QC_OK && kind == QC_PATH_DIR;
    if (reads_model)
        QC_TRY(qc_model_path_settle(&o->model, o->call.arena, err));
    return o->against ? qc_model_path_settle(&o->against, o->call.arena, err) : QC_OK;
}

/* What the user can do next, where the kind of error tells it. */
static const char *hint_for(qc_status st, const qc_options *o)
{
    const char *hint = NULL;
    if (st == QC_ERR_USAGE) {
        const qc_command_row *row = qc_command_row_of(o->command);
        int overview = !row || o->command == QC_CMD_HELP;
        if (qc_arena_printf(o->call.arena, &hint, NULL, "try 'qconv %s%s--help'",
                            overview ? "" : row->name, overview ? "" : " ") != QC_OK)
            hint = "try 'qconv --help'";
    } else if (st == QC_ERR_INTERNAL) {
        hint = "this is a fault of qconv, please report it";
    }
    return hint;
}

static int run_program(int argc, char **argv)
{
    if (argc <= 1)
        return print_overview_as_error();
    qc_arena arena;
    qc_options options;
    qc_error err = {0};
    qc_arena_init(&arena);
    qc_status st = qc_options_parse(&options, &arena, argc, argv, &err);
    options.devices.work = qc_gpu_table();
    if (st == QC_OK)
        st = settle_paths(&options, &err);
    if (st == QC_OK)
        st = run(&options, &err);
    if (st != QC_OK) {
        err.code = st;
        qc_console_error(&err, hint_for(st, &options),
                         options.call.verbose > 0 && st != QC_ERR_USAGE);
    }
    qc_arena_deinit(&arena);
    return qc_status_exit_code(st);
}

typedef struct {
    int argc;
    char **argv;
    int exit_code;
} program;

static void *program_main(void *arg)
{
    program *p = arg;
    p->exit_code = run_program(p->argc, p->argv);
    return NULL;
}

/* A limit (ulimit -s) decides the stack of the first thread, and if it is too small, all that the
 * user sees is a crash. Other threads get the stack that they ask for. */
int main(int argc, char **argv)
{
    struct rlimit limit;
    program p = {argc, argv, 0};
    pthread_t thread;
    qc_error err = {0};
    set_signals();
    if (getrlimit(RLIMIT_STACK, &limit) != 0 || limit.rlim_cur >= STACK_LEAST_BYTES)
        return run_program(argc, argv);
    qc_status st = qc_thread_start(&thread, program_main, &p,
                                   "a thread with more stack than 'ulimit -s' allows", &err);
    if (st != QC_OK) {
        qc_console_error(&err, NULL, 0);
        return qc_status_exit_code(st);
    }
    (void)pthread_join(thread, NULL);
    return p.exit_code;
}
