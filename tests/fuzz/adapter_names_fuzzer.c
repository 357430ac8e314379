/* Any lines as a configuration, the names of a model's tensors and those of an adapter of another
 * version of it: each of the adapter's names finds one tensor or is refused in words, the model's
 * own names find themselves, and embeddings and head are one tensor or two, never neither. Lines
 * are "m NAME" for the model, "s NAME" and "b NAME" for a tensor that replaces one (of
 * modules_to_save, or of the base), "l MODULE" for matrices; the first line is config.json. */
#include "base/alloc.h"
#include "base/text.h"
#include "convert/adapter/adapters_internal.h"
#include "fuzz_check.h"

#include <string.h>

const fuzz_limits fuzz_may_allocate = {4u << 20, 2048};

#define NAMES_MOST 64u

typedef struct {
    qc_checkpoint_tensor model[NAMES_MOST], mine[NAMES_MOST];
    qc_adapter_whole wholes[NAMES_MOST];
    qc_adapter_module modules[NAMES_MOST];
    uint32_t model_count, mine_count;
    qc_adapter adapter;
} lines;

static void read_line(lines *l, char kind, const char *name)
{
    const qc_checkpoint_tensor t = {.name = name, .dtype = QC_DTYPE_F32, .ndim = 2, .dims = {2, 2}};
    if (kind == 'm' && l->model_count < NAMES_MOST)
        l->model[l->model_count++] = t;
    if (!strchr("sbl", kind) || l->mine_count == NAMES_MOST)
        return;
    const uint32_t at = l->mine_count++;
    l->mine[at] = t;
    if (kind == 'l')
        l->modules[l->adapter.module_count++] = (qc_adapter_module){.module = name, .a = at};
    else
        l->wholes[l->adapter.whole_count++] =
            (qc_adapter_whole){.name = name, .tensor = at, .saved = kind == 's'};
}

static void look_up(const qc_merge_names *n, const lines *l)
{
    for (uint32_t i = 0; i < l->mine_count; i++) {
        const char *name = l->mine[i].name, *last = strrchr(name, '.');
        qc_merge_place place;
        qc_error err = {0};
        qc_status st = qc_merge_find(n, &l->adapter, name, i, &place, &err);
        FUZZ_CHECK(st == QC_OK || (qc_status_exit_code(st) == 3 && err.msg[0]));
        if (st != QC_OK)
            continue;
        FUZZ_CHECK(place.t >= n->c->tensors && place.t < n->c->tensors + n->c->tensor_count);
        FUZZ_CHECK(!place.head || (n->head && qc_ends_with(name, n->head)));
        FUZZ_CHECK(place.head || qc_ends_with(place.t->name, last ? last : name));
    }
    for (size_t i = 0; i < n->c->tensor_count; i++) {
        qc_merge_place place;
        FUZZ_CHECK(i == 0 || strcmp(n->c->tensors[i - 1].name, n->c->tensors[i].name) < 0);
        qc_status st = qc_merge_find(n, &l->adapter, n->c->tensors[i].name, 0, &place, NULL);
        FUZZ_CHECK(st == QC_OK && place.t == &n->c->tensors[i] && !place.head);
    }
}

static void place(lines *l, const char *config)
{
    const qc_checkpoint weights = {.tensors = l->mine, .tensor_count = l->mine_count};
    qc_checkpoint mine = weights, *c = NULL;
    const qc_attached_adapter attached = {.adapter = &l->adapter};
    qc_merge_names names;
    qc_error err = {0};
    if (qc_checkpoint_create_shapes(&c, "m", config, strlen(config), l->model, l->model_count,
                                    NULL) != QC_OK)
        return;
    l->adapter.path = "a";
    l->adapter.wholes = l->wholes;
    l->adapter.modules = l->modules;
    l->adapter.weights = &mine;
    const size_t before = c->tensor_count;
    qc_status st = qc_merge_names_make(&names, c, &attached, 1, &err);
    FUZZ_CHECK(st == QC_OK || (qc_status_exit_code(st) == 3 && err.msg[0]));
    if (st == QC_OK) {
        FUZZ_CHECK(c->tensor_count + 1 >= before && c->tensor_count <= before + 1);
        FUZZ_CHECK(names.count == c->tensor_count);
        FUZZ_CHECK(c->tensor_count <= before || c->warning_count > 0);
        FUZZ_CHECK(!names.head || names.table < c->tensor_count);
        look_up(&names, l);
    }
    qc_checkpoint_close(c);
}

int fuzz_one(const uint8_t *data, size_t size)
{
    lines *l = NULL;
    char *text = NULL, *next = NULL, *starts[NAMES_MOST];
    uint32_t count = 0;
    FUZZ_CHECK(qc_calloc(&l, 1, sizeof *l, NULL) == QC_OK);
    FUZZ_CHECK(qc_malloc(&text, size + 1, NULL) == QC_OK);
    memcpy(text, data, size);
    text[size] = '\0';
    for (char *line = strchr(text, '\n'); line; line = next) {
        *line++ = '\0';
        next = strchr(line, '\n');
        if (line[0] && line[1] == ' ')
            starts[count++ % NAMES_MOST] = line;
    }
    for (uint32_t i = 0; i < count && i < NAMES_MOST; i++)
        read_line(l, starts[i][0], starts[i] + 2);
    place(l, text);
    qc_free(text);
    qc_free(l);
    return 0;
}
