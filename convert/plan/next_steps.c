/* The commands that a user types next to run an output. */
#include "convert/plan/loaders.h"

#include "base/text.h"
#include "convert/term/json_members.h"

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

static int all_shown(const char *s)
{
    for (size_t n = 0; *s; s += n)
        if (!is_shown(s, &n))
            return 0;
    return 1;
}

qc_status qc_shell_word(qc_strbuf *text, const char *path, qc_error *err)
{
    static const char plain[] =
        "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-/+,:@%=";
    if (*path == '-')
        QC_TRY(qc_strbuf_adds(text, "./", err));
    if (*path && strspn(path, plain) == strlen(path))
        return qc_strbuf_adds(text, path, err);
    /* We write $'...' where a byte has to be spelled, and '...' elsewhere. */
    int spelled = !all_shown(path);
    QC_TRY(qc_strbuf_adds(text, spelled ? "$'" : "'", err));
    for (size_t n = 0; *path; path += n) {
        if (!is_shown(path, &n)) {
            for (size_t i = 0; i < n; i++)
                QC_TRY(qc_strbuf_addf(text, err, "\\x%02x", (unsigned char)path[i]));
        } else if (*path == '\'') {
            QC_TRY(qc_strbuf_adds(text, spelled ? "\\'" : "'\\''", err));
        } else if (*path == '\\' && spelled) {
            QC_TRY(qc_strbuf_adds(text, "\\\\", err));
        } else {
            QC_TRY(qc_strbuf_add(text, path, n, err));
        }
    }
    return qc_strbuf_adds(text, "'", err);
}

/* Appends a string literal of Python. Python holds bytes that are not UTF-8 as lone surrogates. */
static qc_status python_string(qc_strbuf *text, const char *path, qc_error *err)
{
    QC_TRY(qc_strbuf_adds(text, "\"", err));
    for (size_t n = 0; *path; path += n) {
        uint32_t c = 0;
        if (!is_shown(path, &n)) {
            size_t known = qc_text_char(path, &c);
            QC_TRY(qc_strbuf_addf(text, err, known ? "\\U%08x" : "\\udc%02x",
                                  known ? c : (unsigned)(unsigned char)*path));
        } else if (*path == '"' || *path == '\\') {
            QC_TRY(qc_strbuf_addf(text, err, "\\%c", *path));
        } else {
            QC_TRY(qc_strbuf_add(text, path, n, err));
        }
    }
    return qc_strbuf_adds(text, "\"", err);
}

/* A path beside OUT, such as "out-plain" or "out-bf16". It lies inside OUT if OUT has no name of
 * its own. */
static qc_status beside(qc_strbuf *path, const char *out, const char *tail, qc_error *err)
{
    size_t len = strlen(out);
    while (len > 1 && out[len - 1] == '/')
        len--;
    if (out[len - 1] == '.' || out[len - 1] == '/')
        return qc_strbuf_adds(path, tail + 1, err);
    QC_TRY(qc_strbuf_add(path, out, len, err));
    return qc_strbuf_adds(path, tail, err);
}

/* ---- commands ---- */

typedef struct {
    qc_strbuf shell;  /* a command, or empty */
    qc_strbuf python; /* lines, each with its newline, or empty */
    qc_strbuf path;   /* where the plain files are */
} steps;

static int loads(const qc_loaders *l)
{
    return (l->row->transformers4 || l->row->transformers5) && l->has_config;
}

static qc_status add_command(qc_strbuf *to, const char *program, const char *words, const char *out,
                             const char *path, qc_error *err)
{
    QC_TRY(qc_shell_word(to, strchr(program, '/') ? program : "qconv", err));
    QC_TRY(qc_strbuf_adds(to, words, err));
    QC_TRY(qc_shell_word(to, out, err));
    QC_TRY(qc_strbuf_adds(to, " ", err));
    return qc_shell_word(to, path, err);
}

static qc_status make_python(steps *s, const qc_loaders *l, qc_error *err)
{
    QC_TRY(qc_strbuf_addf(&s->python, err, "%sfrom %s import %s\nmodel = %s.from_pretrained(",
                          l->placed ? "import json\n" : "", l->library, l->class_name,
                          l->class_name));
    QC_TRY(python_string(&s->python, s->path.data, err));
    if (l->placed) {
        QC_TRY(qc_strbuf_adds(&s->python, ", device_map=json.load(open(", err));
        QC_TRY(qc_strbuf_adds(&s->path, "/device_map.json", err));
        QC_TRY(python_string(&s->python, s->path.data, err));
        QC_TRY(qc_strbuf_adds(&s->python, "))", err));
    }
    return qc_strbuf_adds(&s->python, l->remote_code ? ", trust_remote_code=True)\n" : ")\n", err);
}

static qc_status make_steps(steps *s, const qc_loaders *l, const char *program, const char *out,
                            qc_error *err)
{
    int turned_back = l->own_form != NULL;
    if (turned_back || l->compressed)
        QC_TRY(beside(&s->path, out, turned_back ? "-bf16" : "-plain", err));
    else
        QC_TRY(qc_strbuf_adds(&s->path, out, err));
    if (turned_back)
        QC_TRY(
            add_command(&s->shell, program, " --to bf16 --compress none ", out, s->path.data, err));
    else if (l->compressed)
        QC_TRY(add_command(&s->shell, program, " unpack ", out, s->path.data, err));
    return loads(l) ? make_python(s, l, err) : QC_OK;
}

static void init_steps(steps *s)
{
    qc_strbuf_init(&s->shell, (size_t)1 << 20);
    qc_strbuf_init(&s->python, (size_t)1 << 20);
    qc_strbuf_init(&s->path, (size_t)1 << 20);
}

static void deinit_steps(steps *s)
{
    qc_strbuf_deinit(&s->shell);
    qc_strbuf_deinit(&s->python);
    qc_strbuf_deinit(&s->path);
}

/* ---- text ---- */

static qc_status add_indented(qc_strbuf *text, const char *lines, qc_error *err)
{
    for (const char *s = lines; *s;) {
        size_t n = strcspn(s, "\n");
        QC_TRY(qc_strbuf_addf(text, err, "    %.*s\n", (int)n, s));
        s += n + (s[n] == '\n');
    }
    return QC_OK;
}

static qc_status add_steps(const qc_loaders *l, const steps *s, const char *out, qc_strbuf *text,
                           qc_error *err)
{
    const char *shell = s->shell.len ? s->shell.data : "";
    QC_TRY(qc_strbuf_addf(text, err, "  loads in  %s\n", qc_loaders_names(l)));
    if (l->own_form) {
        QC_TRY(qc_strbuf_addf(text, err,
                              "%s and bitsandbytes do not load this form (%s). libqconv "
                              "reads it as it is;\nthis turns it back into 16 bits for others:\n",
                              l->library, l->own_form));
        return add_indented(text, shell, err);
    }
    if (l->of_pipeline)
        return QC_OK;
    if (!l->has_config)
        QC_TRY(qc_strbuf_adds(text, "transformers needs a config.json, which the source has not.\n",
                              err));
    if (l->compressed) {
        QC_TRY(qc_strbuf_addf(text, err, "%s reads plain files, so first:\n",
                              strcmp(l->row->form, "stored") == 0 ? "That" : l->library));
        QC_TRY(add_indented(text, shell, err));
    }
    if (s->python.len) {
        QC_TRY(qc_strbuf_adds(text, l->compressed ? "then in Python:\n" : "In Python:\n", err));
        QC_TRY(add_indented(text, s->python.data, err));
    }
    if (!l->compressed)
        return QC_OK;
    QC_TRY(qc_strbuf_adds(text, "from_pretrained(", err));
    QC_TRY(python_string(text, out, err));
    return qc_strbuf_adds(text,
                          ") fails: it does not read .zst files. With --compress none convert "
                          "writes\nplain files at once.\n",
                          err);
}

qc_status qc_next_steps_text(const qc_loaders *l, const char *program, const char *out,
                             qc_strbuf *text, qc_error *err)
{
    steps s;
    init_steps(&s);
    qc_status st = make_steps(&s, l, program, out, err);
    if (st == QC_OK)
        st = add_steps(l, &s, out, text, err);
    deinit_steps(&s);
    return st;
}

/* ---- JSON ---- */

static void put_loads(const qc_loaders *l, const steps *s, qc_json_writer *w)
{
    qc_jw_key(w, "loads");
    qc_jw_begin_object(w);
    qc_jm_string(w, "form", l->own_form ? l->own_form : l->row->form);
    qc_jw_key(w, "transformers");
    qc_jw_compact_next(w);
    qc_jw_begin_array(w);
    int transformers = loads(l) && strcmp(l->library, "transformers") == 0;
    if (transformers && l->row->transformers4)
        qc_jw_u64(w, 4);
    if (transformers && l->row->transformers5)
        qc_jw_u64(w, 5);
    qc_jw_end_array(w);
    qc_jm_bool(w, "diffusers", loads(l) && !transformers);
    qc_jm_string(w, "with", l->row->with);
    qc_jm_bool(w, "unpack_first", l->compressed);
    qc_jm_string(w, "instead", l->instead);
    if (s) {
        qc_jm_string(w, "command", s->shell.len ? s->shell.data : NULL);
        qc_jm_string(w, "python", s->python.len ? s->python.data : NULL);
    }
    qc_jw_end_object(w);
}

qc_status qc_next_steps_json(const qc_loaders *l, const char *program, const char *out,
                             qc_json_writer *w, qc_error *err)
{
    steps s;
    init_steps(&s);
    qc_status st = out ? make_steps(&s, l, program, out, err) : QC_OK;
    if (st == QC_OK)
        put_loads(l, out ? &s : NULL, w);
    deinit_steps(&s);
    return st;
}
