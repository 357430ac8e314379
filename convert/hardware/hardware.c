#include "convert/hardware/hardware.h"

#include "convert/hardware/host_facts.h"
#include "convert/hardware/nvml_gpu.h"
#include "formats/file_io.h"

#include <stdlib.h>
#include <string.h>

/* ---- which GPUs count ---- */

static const char uuid_prefix[] = "GPU-";

/* Reads an index as strtoul does, because CUDA does so: there may be blanks and a sign before it,
 * and anything behind it ("1gpu" is 1). */
static int index_of_entry(const char *entry, size_t len, unsigned *out)
{
    unsigned v = 0;
    size_t i = 0;
    while (len > 0 && *entry == ' ') {
        entry++;
        len--;
    }
    int minus = len > 0 && *entry == '-';
    if (len > 0 && (*entry == '-' || *entry == '+')) {
        entry++;
        len--;
    }
    for (; i < len && entry[i] >= '0' && entry[i] <= '9'; i++) {
        if (v > 100000) /* too large for any GPU's index */
            return 0;
        v = v * 10 + (unsigned)(entry[i] - '0');
    }
    *out = v;
    return i > 0 && (!minus || v == 0);
}

/* Finds the one GPU whose UUID starts like this. Returns 0 if there is none, or more than one. */
static int find_uuid(const char *entry, size_t len, const char *const *uuids, unsigned count,
                     unsigned *out)
{
    unsigned found = 0;
    if (len < sizeof uuid_prefix - 1 || strncmp(entry, uuid_prefix, sizeof uuid_prefix - 1) != 0)
        return 0;
    for (unsigned i = 0; i < count; i++) {
        if (strncmp(uuids[i], entry, len) != 0)
            continue;
        *out = i;
        found++;
    }
    return found == 1;
}

/* The rules are those of the CUDA Programming Guide, "CUDA Environment Variables". What it leaves
 * open is done as in PyTorch's torch.cuda, whose authors tried it: the start of the list decides
 * whether it has UUIDs or indices, and a GPU that is named twice hides all. */
void qc_cuda_visible(const char *list, const char *const *uuids, unsigned count, unsigned *visible,
                     unsigned *shown)
{
    *shown = 0;
    if (!list) {
        for (; *shown < count; ++*shown)
            visible[*shown] = *shown;
        return;
    }
    int by_uuid = strncmp(list, uuid_prefix, sizeof uuid_prefix - 1) == 0;
    for (const char *entry = list;; entry++) {
        size_t len = strcspn(entry, ",");
        unsigned gpu = 0;
        int ok = by_uuid ? find_uuid(entry, len, uuids, count, &gpu)
                         : index_of_entry(entry, len, &gpu) && gpu < count;
        if (!ok)
            return;
        for (unsigned i = 0; i < *shown; i++) {
            if (visible[i] == gpu) {
                *shown = 0;
                return;
            }
        }
        visible[(*shown)++] = gpu;
        entry += len;
        if (*entry == '\0')
            return;
    }
}

/* Leaves only the GPUs that the user wishes for. */
static qc_status apply_wish(qc_hardware *h, const qc_device_wish *w, qc_error *err)
{
    uint32_t kept = 0;
    uint64_t there = 0;
    if (!w->cuda)
        return QC_OK;
    if (h->gpu_count == 0)
        QC_FAIL(err, QC_ERR_DEVICE, "%s%s: there is no GPU: %s", w->from, w->text, h->no_gpu);
    for (uint32_t i = 0; i < h->gpu_count; i++) {
        there |= 1ull << h->gpus[i].index;
        if (w->gpus == 0 || w->gpus >> h->gpus[i].index & 1)
            h->gpus[kept++] = h->gpus[i];
    }
    for (unsigned i = 0; i < QC_MAX_GPUS; i++)
        if ((w->gpus & ~there) >> i & 1)
            QC_FAIL(err, QC_ERR_DEVICE, "%s%s: there is no cuda:%u", w->from, w->text, i);
    h->gpu_count = kept;
    return QC_OK;
}

/* ---- the driver's GPUs ---- */

typedef struct {
    qc_nvml *nvml;
    unsigned count; /* number of GPUs that are looked at */
    qc_nvml_facts *facts;
    const char **uuids;
    const char **trouble; /* why a GPU did not answer, or NULL */
} driver_gpus;

/* Adds one more sentence to the warning. */
static qc_status add_warning(qc_hardware *h, qc_arena *arena, const char *text, qc_error *err)
{
    const char *before = h->warning;
    return qc_arena_printf(arena, &h->warning, err, "%s%s%s", before ? before : "",
                           before ? "; " : "", text);
}

/* Fills g from the driver's GPU. If the GPU does not answer, h->warning says so and *ok is 0. */
static qc_status read_gpu(qc_hardware *h, driver_gpus *d, qc_arena *arena, qc_gpu *g, int *ok,
                          qc_error *err)
{
    const qc_nvml_facts *f = &d->facts[g->driver_index];
    qc_nvml_memory memory = {0, 0, 0};
    qc_error why = {0};
    const char *trouble = d->trouble[g->driver_index];
    if (!trouble && qc_nvml_read_memory(d->nvml, g->driver_index, &memory, &why) != QC_OK)
        trouble = why.msg;
    *ok = trouble == NULL;
    if (trouble) {
        const char *text = NULL;
        QC_TRY(qc_arena_printf(arena, &text, err, "cuda:%u is left out: %s", g->index, trouble));
        return add_warning(h, arena, text, err);
    }
    QC_TRY(qc_arena_strndup(arena, &g->name, f->name, strlen(f->name), err));
    if (f->uuid[0])
        QC_TRY(qc_arena_strndup(arena, &g->uuid, f->uuid, strlen(f->uuid), err));
    g->card = qc_card_of_product(f->name, memory.total_bytes);
    g->sm = f->sm ? f->sm : g->card ? g->card->sm : 0;
    g->bandwidth = f->bandwidth > 0 ? f->bandwidth : g->card ? g->card->bandwidth : 0;
    g->total_bytes = memory.total_bytes;
    g->used_bytes = memory.used_bytes;
    g->free_bytes = memory.free_bytes;
    return QC_OK;
}

static void read_peers(qc_hardware *h, qc_nvml *nvml)
{
    for (uint32_t i = 0; i < h->gpu_count; i++) {
        qc_gpu *a = &h->gpus[i];
        a->peers_known = 1;
        for (uint32_t j = 0; j < h->gpu_count; j++) {
            int reach = i == j ? 0 : qc_nvml_peer(nvml, a->driver_index, h->gpus[j].driver_index);
            if (reach < 0)
                a->peers_known = 0;
            else if (reach)
                a->peers |= 1ull << h->gpus[j].index;
        }
    }
}

static qc_status read_visible(qc_hardware *h, driver_gpus *d, qc_arena *arena, qc_error *err)
{
    const char *list = getenv("CUDA_VISIBLE_DEVICES");
    unsigned visible[QC_MAX_GPUS], shown = 0;
    d->count = qc_nvml_count(d->nvml);
    if (d->count > QC_MAX_GPUS)
        d->count = QC_MAX_GPUS;
    QC_TRY(qc_arena_array(arena, &d->facts, d->count, err));
    QC_TRY(qc_arena_array(arena, &d->uuids, d->count, err));
    QC_TRY(qc_arena_array(arena, &d->trouble, d->count, err));
    for (unsigned i = 0; i < d->count; i++) {
        qc_error why = {0};
        if (qc_nvml_read_facts(d->nvml, i, &d->facts[i], &why) != QC_OK)
            QC_TRY(qc_arena_strndup(arena, &d->trouble[i], why.msg, strlen(why.msg), err));
        d->uuids[i] = d->facts[i].uuid;
    }
    if (qc_nvml_count(d->nvml) > d->count)
        QC_TRY(add_warning(h, arena, "only the driver's first 64 GPUs are looked at", err));
    qc_cuda_visible(list, d->uuids, d->count, visible, &shown);
    QC_TRY(qc_arena_alloc(arena, &h->gpus, shown, sizeof *h->gpus, err));
    for (unsigned i = 0; i < shown; i++) {
        int ok = 0;
        qc_gpu *g = &h->gpus[h->gpu_count];
        *g = (qc_gpu){.index = i, .driver_index = visible[i]};
        QC_TRY(read_gpu(h, d, arena, g, &ok, err));
        h->gpu_count += ok != 0;
    }
    read_peers(h, d->nvml);
    if (h->gpu_count > 0)
        return QC_OK;
    if (d->count == 0)
        h->no_gpu = "the NVIDIA driver finds none";
    else if (shown > 0)
        h->no_gpu = "the GPUs that are there do not answer";
    else if (strstr(list, "MIG-"))
        h->no_gpu = "CUDA_VISIBLE_DEVICES names an instance of a divided GPU (MIG), which qconv "
                    "does not read";
    else
        return qc_arena_printf(arena, &h->no_gpu, err, "CUDA_VISIBLE_DEVICES='%s' hides %s", list,
                               d->count == 1 ? "the one there is" : "all there are");
    return QC_OK;
}

static qc_status read_gpus(qc_hardware *h, qc_arena *arena, qc_error *err)
{
    driver_gpus d = {.nvml = NULL};
    qc_error why = {0};
    qc_status st = qc_nvml_open(&d.nvml, &why);
    if (st == QC_ERR_DEVICE)
        return qc_arena_strndup(arena, &h->no_gpu, why.msg, strlen(why.msg), err);
    if (st != QC_OK)
        return qc_error_pass(err, &why, st);
    const char *version = qc_nvml_driver(d.nvml);
    if (*version)
        st = qc_arena_strndup(arena, &h->driver, version, strlen(version), err);
    if (st == QC_OK)
        st = read_visible(h, &d, arena, err);
    qc_nvml_close(d.nvml);
    return st;
}

/* ---- the rest of the machine ---- */

static qc_status read_host(qc_hardware *h, qc_arena *arena, qc_error *err)
{
    qc_host_facts host;
    QC_TRY(qc_host_read(&host, arena, "", err));
    h->cpu_name = host.cpu_name;
    h->cpu_threads = qc_cpu_count();
    h->memory_bytes = host.memory_bytes;
    h->memory_free_bytes = host.memory_free_bytes;
    QC_TRY(qc_isa_select(&h->isa, err));
    /* The current folder may have been removed, and then it has no disk. Nobody asked about
     * that. */
    if (qc_dir_free_bytes(".", &h->disk_free_bytes, NULL) != QC_OK)
        h->disk_free_bytes = 0;
    return QC_OK;
}

qc_status qc_hardware_read(qc_hardware *out, qc_arena *arena, qc_error *err)
{
    qc_device_wish wish;
    *out = (qc_hardware){.gpus = NULL};
    QC_TRY(qc_device_wish_read(&wish, NULL, err));
    QC_TRY(read_host(out, arena, err));
    if (wish.cpu) {
        out->no_gpu = "QCONV_DEVICE=cpu";
        return QC_OK;
    }
    QC_TRY(read_gpus(out, arena, err));
    return apply_wish(out, &wish, err);
}

/* ---- --as ---- */

/* Parses one term, "2xA100-40GB": the card, and how many of it. */
static qc_status parse_term(const char *as, const char *term, size_t len, const qc_card **card,
                            unsigned *count, qc_error *err)
{
    size_t digits = 0;
    unsigned n = 0;
    int shown = len > 64 ? 64 : (int)len;
    while (digits < len && term[digits] >= '0' && term[digits] <= '9' && digits < 6)
        n = n * 10 + (unsigned)(term[digits++] - '0');
    *count = 1;
    if (digits > 0 && digits < len && (term[digits] == 'x' || term[digits] == 'X')) {
        *count = n;
        term += digits + 1;
        len -= digits + 1;
        if (n == 0 || n > QC_MAX_GPUS)
            QC_FAIL(err, QC_ERR_USAGE, "--as: expected a count of 1 to %u cards, found '%.*s'",
                    QC_MAX_GPUS, shown, term - digits - 1);
    }
    shown = len > 64 ? 64 : (int)len;
    if (len == 0)
        QC_FAIL(
            err, QC_ERR_USAGE,
            "--as: expected cards with '+' between them, found nothing where one should be in '%s'",
            as);
    *card = qc_card_find(term, len);
    if (*card)
        return QC_OK;
    const char *near = qc_card_near(term, len);
    if (near)
        QC_FAIL(err, QC_ERR_USAGE, "--as: unknown card '%.*s'; did you mean %s?", shown, term,
                near);
    QC_FAIL(err, QC_ERR_USAGE,
            "--as: unknown card '%.*s'; expected one such as A100-40GB, V100-16GB, 3090, 4090, "
            "A6000 or H100-80GB; docs/hardware.md lists them",
            shown, term);
}

qc_status qc_hardware_assume(qc_hardware *out, qc_arena *arena, const char *as, qc_error *err)
{
    *out = (qc_hardware){.assumed = 1};
    QC_TRY(read_host(out, arena, err));
    QC_TRY(qc_arena_alloc(arena, &out->gpus, QC_MAX_GPUS, sizeof *out->gpus, err));
    for (const char *term = as;; term++) {
        const qc_card *card = NULL;
        unsigned count = 0;
        size_t len = strcspn(term, "+");
        QC_TRY(parse_term(as, term, len, &card, &count, err));
        if (count > QC_MAX_GPUS - out->gpu_count)
            QC_FAIL(err, QC_ERR_USAGE, "--as: expected at most %u cards, found more in '%s'",
                    QC_MAX_GPUS, as);
        while (count-- > 0) {
            out->gpus[out->gpu_count] = (qc_gpu){.index = out->gpu_count,
                                                 .driver_index = out->gpu_count,
                                                 .name = card->name,
                                                 .sm = card->sm,
                                                 .total_bytes = card->memory_bytes,
                                                 .free_bytes = card->memory_bytes,
                                                 .bandwidth = card->bandwidth,
                                                 .card = card};
            out->gpu_count++;
        }
        term += len;
        if (*term == '\0')
            break;
    }
    for (uint32_t i = 0; i < out->gpu_count; i++) {
        qc_gpu *g = &out->gpus[i];
        g->peers_known = 1;
        for (uint32_t j = 0; j < out->gpu_count; j++)
            if (i != j && g->card == out->gpus[j].card && g->card->peer_link > 0)
                g->peers |= 1ull << j;
    }
    return QC_OK;
}
