/* The commands that a user types next to run an output. */
#include "convert/plan/loaders.h"

#include "base/text.h"
#include "formats/json_writer.h"

#include <string.h>

/* ---- words of a shell and of Python ---- */

/* Can the character at s be shown, because it is text and has no effect on a terminal? */
static int is_shown(const char *s, size_t *bytes)
{
    uint32_t c = 0;
    *bytes = qc_text_char(s, &c);
    if (*bytes == 0) {
        *bytes = 1;
        return 0;
    }
    return !qc_text_is_control(c);
}

void qc_shell_word(qc_strbuf *text, const char *path)
{
    static const char plain[] =
        "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-/+,:@%=";
    if (*path == '-')
        qc_strbuf_puts(text, "./");
    if (*path && strspn(path, plain) == strlen(path)) {
        qc_strbuf_puts(text, path);
        return;
    }
    /* We write $'...' where a byte has to be spelled, and '...' elsewhere. */
    int spelled = 0;
    for (size_t n = 0, at = 0; path[at]; at += n)
        spelled |= !is_shown(path + at, &n);
    qc_strbuf_puts(text, spelled ? "$'" : "'");
    for (size_t n = 0; *path; path += n) {
        if (!is_shown(path, &n)) {
            for (size_t i = 0; i < n; i++)
                qc_strbuf_putf(text, "\\x%02x", (unsigned char)path[i]);
        } else if (*path == '\'') {
            qc_strbuf_puts(text, spelled ? "\\'" : "'\\''");
        } else if (*path == '\\' && spelled) {
            qc_strbuf_puts(text, "\\\\");
        } else {
            qc_strbuf_put(text, path, n);
        }
    }
    qc_strbuf_puts(text, "'");
}

/* Appends a string literal of Python. Python holds bytes that are not UTF-8 as lone surrogates. */
static void python_string(qc_strbuf *text, const char *path)
{
    qc_strbuf_puts(text, "\"");
    for (size_t n = 0; *path; path += n) {
        uint32_t c = 0;
        if (!is_shown(path, &n)) {
            size_t known = qc_text_char(path, &c);
            qc_strbuf_putf(text, known ? "\\U%08x" : "\\udc%02x",
                           known ? c : (unsigned)(unsigned char)*path);
        } else if (*path == '"' || *path == '\\') {
            qc_strbuf_putf(text, "\\%c", *path);
        } else {
            qc_strbuf_put(text, path, n);
        }
    }
    qc_strbuf_puts(text, "\"");
}

/* A path beside OUT, such as "out-plain" or "out-bf16". It lies inside OUT if OUT has no name of
 * its own. */
static void beside(qc_strbuf *path, const char *out, const char *tail)
{
    size_t len = strlen(out);
    while (len > 1 && out[len - 1] == '/')
        len--;
    if (out[len - 1] == '.' || out[len - 1] == '/') {
        qc_strbuf_puts(path, tail + 1);
        return;
    }
    qc_strbuf_put(path, out, len);
    qc_strbuf_puts(path, tail);
}

/* ---- commands ---- */

/* The texts that are made of OUT's name. */
enum {
    SHELL,  /* a command, or empty */
    PYTHON, /* lines, each with its newline, or empty */
    LOAD,   /* the same with qconv.load */
    SERVE,  /* a command, or empty */
    PATH,   /* where the plain files are */
    STEPS
};

static int loads(const qc_loaders *l)
{
    return (l->row.transformers4 || l->row.transformers5 || l->import_qconv) && !l->lacks;
}

static void add_command(qc_strbuf *to, const char *program, const char *words, const char *out,
                        const char *path)
{
    qc_shell_word(to, strchr(program, '/') ? program : "qconv");
    qc_strbuf_puts(to, words);
    qc_shell_word(to, out);
    qc_strbuf_puts(to, " ");
    qc_shell_word(to, path);
}

static qc_status make_steps(qc_strbuf s[STEPS], const qc_loaders *l, const char *program,
                            const char *out, qc_error *err)
{
    for (int i = 0; i < STEPS; i++)
        qc_strbuf_init(&s[i], (size_t)1 << 20);
    if (l->own_form || l->compressed)
        beside(&s[PATH], out, l->own_form ? "-bf16" : "-plain");
    else
        qc_strbuf_puts(&s[PATH], out);
    if (l->own_form)
        add_command(&s[SHELL], program, " --to bf16 --compress none ", out, s[PATH].data);
    else if (l->compressed)
        add_command(&s[SHELL], program, " unpack ", out, s[PATH].data);
    if (!l->lacks && l->lmdeploy) {
        qc_strbuf_puts(&s[SERVE], "lmdeploy serve api_server ");
        qc_shell_word(&s[SERVE], s[PATH].data);
        qc_strbuf_putf(&s[SERVE], " %s", l->lmdeploy);
    } else if (!l->lacks && (l->vllm || qc_loaders_need_plugin(l) || qc_loaders_plain_vllm(l))) {
        qc_strbuf_puts(&s[SERVE], "vllm serve ");
        qc_shell_word(&s[SERVE], l->plugin ? out : s[PATH].data);
        qc_strbuf_putf(&s[SERVE], "%s%s", l->vllm ? " " : "", l->vllm ? l->vllm : "");
    }
    if (l->qconv_load) {
        qc_strbuf_puts(&s[LOAD], "import qconv\nmodel = qconv.load(");
        python_string(&s[LOAD], out);
        qc_strbuf_puts(&s[LOAD], ")\n");
    }
    if (loads(l)) {
        qc_strbuf *python = &s[PYTHON];
        qc_strbuf_putf(python, "%s%sfrom %s import %s\nmodel = %s.from_pretrained(",
                       l->import_qconv ? "import qconv  # transformers 5 needs it for experts\n"
                                       : "",
                       l->placed ? "import json\n" : "", l->library, l->class_name, l->class_name);
        python_string(python, s[PATH].data);
        if (l->placed) {
            qc_strbuf_puts(python, ", device_map=json.load(open(");
            qc_strbuf_puts(&s[PATH], "/device_map.json");
            python_string(python, s[PATH].data);
            qc_strbuf_puts(python, "))");
        }
        qc_strbuf_puts(python, l->remote_code ? ", trust_remote_code=True)\n" : ")\n");
    }
    for (int i = 0; i < STEPS; i++)
        QC_TRY(qc_strbuf_status(&s[i], err));
    return QC_OK;
}

static void deinit_steps(qc_strbuf s[STEPS])
{
    for (int i = 0; i < STEPS; i++)
        qc_strbuf_deinit(&s[i]);
}

/* ---- text ---- */

static void add_indented(qc_strbuf *text, const char *lines)
{
    for (const char *s = lines; *s;) {
        size_t n = strcspn(s, "\n");
        qc_strbuf_putf(text, "    %.*s\n", (int)n, s);
        s += n + (s[n] == '\n');
    }
}

/* Commands with a line before them that says what they do. */
static void add_commands(qc_strbuf *text, const char *before, const qc_strbuf *commands)
{
    if (commands->len == 0)
        return;
    qc_strbuf_puts(text, before);
    add_indented(text, commands->data);
}

void qc_next_steps_names(const qc_loaders *l, qc_strbuf *text)
{
    qc_strbuf_puts(text, "  loads in  ");
    qc_loaders_put_names(l, text);
    qc_strbuf_puts(text, "\n");
}

static void add_steps(const qc_loaders *l, const qc_strbuf s[STEPS], qc_strbuf *text)
{
    const int plain = !l->compressed && !l->own_form;
    qc_next_steps_names(l, text);
    if (plain)
        add_commands(text, "In Python:\n", &s[PYTHON]);
    add_commands(text, plain ? "or with qconv's package:\n" : "In Python with qconv's package:\n",
                 &s[LOAD]);
    add_commands(text,
                 l->lmdeploy                 ? "With lmdeploy, on V100 and newer:\n"
                 : qc_loaders_need_plugin(l) ? "With vLLM and the plug-in of that package:\n"
                                             : "With vLLM:\n",
                 &s[SERVE]);
    /* How programs that read plain files get them. */
    if (l->own_form) {
        qc_strbuf_putf(text, "%s does not load this form (%s); libqconv reads it, too.\n",
                       l->library, l->own_form);
        add_commands(text, "This turns it back into 16 bits for others:\n", &s[SHELL]);
    } else if (!plain) {
        qc_strbuf_putf(text, "%s reads plain files, which this writes:\n",
                       l->lmdeploy                          ? "Every engine"
                       : strcmp(l->row.form, "stored") == 0 ? "What loads MODEL"
                                                            : l->library);
        add_indented(text, s[SHELL].data);
        add_commands(text, "then in Python:\n", &s[PYTHON]);
    }
}

qc_status qc_next_steps_text(const qc_loaders *l, const char *program, const char *out,
                             qc_strbuf *text, qc_error *err)
{
    qc_strbuf s[STEPS] = {{.data = NULL}};
    qc_status st = make_steps(s, l, program, out, err);
    if (st == QC_OK) {
        add_steps(l, s, text);
        st = qc_strbuf_status(text, err);
    }
    deinit_steps(s);
    return st;
}

/* ---- JSON ---- */

qc_status qc_next_steps_json(const qc_loaders *l, const char *program, const char *out,
                             qc_json_writer *w, qc_error *err)
{
    static const char *const names[] = {"command", "python", "load", "serve"};
    const int is_loaded = loads(l), transformers = strcmp(l->library, "transformers") == 0;
    qc_strbuf s[STEPS] = {{.data = NULL}};
    qc_status st = out ? make_steps(s, l, program, out, err) : QC_OK;
    qc_json_begin_object(w, "loads");
    qc_json_put_text(w, "form", l->own_form ? l->own_form : l->row.form);
    qc_json_begin_line(w, "transformers");
    if (is_loaded && transformers && l->row.transformers4)
        qc_json_put_u64(w, NULL, 4);
    if (is_loaded && transformers && l->row.transformers5)
        qc_json_put_u64(w, NULL, 5);
    qc_json_end(w);
    qc_json_put_bool(w, "diffusers", is_loaded && !transformers);
    qc_json_put_text(w, "with", l->row.with);
    qc_json_put_text(w, "lacks", l->lacks);
    qc_json_put_bool(w, "qconv", l->qconv_load);
    qc_json_put_bool(w, "vllm_plugin", l->plugin);
    qc_json_put_bool(w, "unpack_first", l->compressed);
    qc_json_put_text(w, "instead", l->instead);
    for (int i = 0; out && i < PATH; i++)
        qc_json_put_text(w, names[i], s[i].len ? s[i].data : NULL);
    qc_json_end(w);
    deinit_steps(s);
    return st;
}
