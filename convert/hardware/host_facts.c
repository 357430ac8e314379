#include "convert/hardware/host_facts.h"

#include "base/checked.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define PATH_BYTES 1024
#define TEXT_BYTES 16384

/* Reads the first bytes of dir/name as text. Returns 0 if there is no such file. Files of /proc and
 * /sys have no size and may change while they are read, so this is one pass to the end. */
static int read_text(char text[TEXT_BYTES], const char *dir, const char *name)
{
    char path[PATH_BYTES];
    size_t used = 0;
    int n = snprintf(path, sizeof path, "%s/%s", dir, name);
    if (n < 0 || (size_t)n >= sizeof path)
        return 0;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return 0;
    while (used + 1 < TEXT_BYTES) {
        ssize_t got = read(fd, text + used, TEXT_BYTES - 1 - used);
        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0)
            break;
        used += (size_t)got;
    }
    (void)close(fd);
    text[used] = '\0';
    return used > 0;
}

/* Reads the number at s. Blanks may stand before it. */
static int number_at(const char *s, uint64_t *out)
{
    char *end;
    s += strspn(s, " \t");
    if (*s < '0' || *s > '9')
        return 0;
    errno = 0;
    *out = strtoull(s, &end, 10);
    return errno == 0;
}

/* What follows "key" and blanks or a colon at the start of a line, or NULL. */
static const char *value_of(const char *text, const char *key)
{
    size_t len = strlen(key);
    for (const char *line = text; line; line = strchr(line, '\n')) {
        line += *line == '\n';
        if (strncmp(line, key, len) != 0)
            continue;
        const char *v = line + len;
        if (*v == ' ' || *v == '\t' || *v == ':')
            return v + strspn(v, " \t:");
    }
    return NULL;
}

static void read_memory(qc_host_facts *f, const char *root)
{
    char text[TEXT_BYTES];
    uint64_t total = 0, available = 0;
    if (!read_text(text, root, "proc/meminfo"))
        return;
    const char *t = value_of(text, "MemTotal"), *a = value_of(text, "MemAvailable");
    if (t && number_at(t, &total) && !qc_mul_u64(total, 1024, &total))
        f->memory_bytes = total;
    if (a && number_at(a, &available) && !qc_mul_u64(available, 1024, &available))
        f->memory_free_bytes = available;
}

/* ---- control groups ---- */

static int group_number(const char *dir, const char *file, uint64_t *out)
{
    char text[TEXT_BYTES];
    return read_text(text, dir, file) && number_at(text, out);
}

/* limit is below UINT64_MAX. used includes file caches, and those that are not in use would be
 * dropped. */
static void apply_memory_limit(qc_host_facts *f, const char *dir, uint64_t limit,
                               const char *used_file, const char *cache_key)
{
    char text[TEXT_BYTES];
    uint64_t used = 0, cache = 0;
    if (f->memory_bytes && limit >= f->memory_bytes)
        return;
    f->memory_bytes = limit;
    if (!group_number(dir, used_file, &used))
        return;
    const char *v = read_text(text, dir, "memory.stat") ? value_of(text, cache_key) : NULL;
    if (v && number_at(v, &cache))
        used -= cache < used ? cache : used;
    uint64_t left = used < limit ? limit - used : 0;
    if (left < f->memory_free_bytes)
        f->memory_free_bytes = left;
}

/* Applies the limits of mount + path and of every group above it. In a container the path may lead
 * nowhere; then the mount itself is the group. */
static void apply_groups(qc_host_facts *f, const char *mount, const char *path, size_t path_len)
{
    char dir[PATH_BYTES];
    uint64_t limit = 0;
    int n = snprintf(dir, sizeof dir, "%s%.*s", mount, (int)path_len, path);
    if (n < 0 || (size_t)n >= sizeof dir)
        return;
    size_t top = strlen(mount);
    for (;;) {
        char *slash = strrchr(dir, '/');
        if (group_number(dir, "memory.max", &limit)) /* "max" is no number */
            apply_memory_limit(f, dir, limit, "memory.current", "inactive_file");
        if (group_number(dir, "memory.limit_in_bytes", &limit))
            apply_memory_limit(f, dir, limit, "memory.usage_in_bytes", "total_inactive_file");
        if (strlen(dir) <= top || !slash || (size_t)(slash - dir) < top)
            return;
        *slash = '\0';
    }
}

static int list_holds(const char *list, size_t len, const char *word)
{
    size_t n = strlen(word);
    for (size_t at = 0; at + n <= len; at++)
        if (strncmp(list + at, word, n) == 0 && (at == 0 || list[at - 1] == ',') &&
            (at + n == len || list[at + n] == ','))
            return 1;
    return 0;
}

/* Reads the lines of /proc/self/cgroup: "0::/path", "4:cpu,cpuacct:/path", "7:memory:/path". */
static void read_groups(qc_host_facts *f, const char *root)
{
    char text[TEXT_BYTES], mount[PATH_BYTES];
    if (!read_text(text, root, "proc/self/cgroup"))
        return;
    for (const char *line = text; *line; line += strcspn(line, "\n"), line += *line == '\n') {
        size_t line_len = strcspn(line, "\n");
        const char *names = memchr(line, ':', line_len);
        const char *end =
            names ? memchr(names + 1, ':', line_len - (size_t)(names + 1 - line)) : NULL;
        if (!end)
            continue;
        names++;
        const char *where = end + 1;
        size_t where_len = line_len - (size_t)(where - line);
        const char *kind = names == end ? "" : NULL;
        if (list_holds(names, (size_t)(end - names), "memory"))
            kind = "/memory";
        if (!kind)
            continue;
        int n = snprintf(mount, sizeof mount, "%s/sys/fs/cgroup%s", root, kind);
        if (n > 0 && (size_t)n < sizeof mount)
            apply_groups(f, mount, where, where_len);
    }
}

qc_status qc_host_read(qc_host_facts *out, qc_arena *arena, const char *root, qc_error *err)
{
    char text[TEXT_BYTES];
    *out = (qc_host_facts){.cpu_name = NULL};
    const char *name = read_text(text, root, "proc/cpuinfo") ? value_of(text, "model name") : NULL;
    if (name && *name != '\n')
        QC_TRY(qc_arena_strndup(arena, &out->cpu_name, name, strcspn(name, "\n"), err));
    read_memory(out, root);
    read_groups(out, root);
    return QC_OK;
}
