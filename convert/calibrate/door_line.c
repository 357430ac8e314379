#include "convert/calibrate/door_line.h"

#include "base/interrupt.h"
#include "base/workers.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define WAIT_MS     100
#define CHUNK_BYTES ((size_t)1 << 16)

qc_status qc_door_line_open(qc_door_line *l, const char *name, int fd, qc_error *err)
{
    int type = 0;
    socklen_t len = sizeof type;
    struct sockaddr_storage peer;
    socklen_t peer_len = sizeof peer;
    *l = (qc_door_line){.fd = -1, .name = name};
    qc_strbuf_init(&l->unread, QC_DOOR_LINE_MOST + CHUNK_BYTES);
    if (getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &len) != 0 || type != SOCK_STREAM ||
        getpeername(fd, (struct sockaddr *)&peer, &peer_len) != 0 || peer.ss_family != AF_UNIX)
        QC_FAIL(err, QC_ERR_USAGE,
                "--hessians %s: expected the number of a connected Unix stream socket that this "
                "process inherits; a file of that name is ./%s",
                name, name);
    (void)fcntl(fd, F_SETFD, FD_CLOEXEC);
    l->fd = fd;
    return QC_OK;
}

void qc_door_line_close(qc_door_line *l)
{
    if (l->fd >= 0)
        (void)close(l->fd);
    l->fd = -1;
    qc_strbuf_deinit(&l->unread);
}

static qc_status wait_for(const qc_door_line *l, short events, qc_error *err)
{
    for (;;) {
        struct pollfd p = {.fd = l->fd, .events = events};
        QC_TRY(qc_check_interrupted(err));
        const int n = poll(&p, 1, WAIT_MS);
        if (n > 0)
            return QC_OK;
        if (n < 0 && errno != EINTR)
            QC_FAIL(err, QC_ERR_IO, "--hessians %s: %s", l->name, strerror(errno));
    }
}

static qc_status is_gone(const qc_door_line *l, qc_error *err)
{
    QC_FAIL(err, QC_ERR_IO,
            "--hessians %s: the program that calibrates closed the socket before it was done",
            l->name);
}

static qc_status read_more(qc_door_line *l, qc_error *err)
{
    char chunk[CHUNK_BYTES];
    for (;;) {
        QC_TRY(wait_for(l, POLLIN, err));
        const ssize_t n = recv(l->fd, chunk, sizeof chunk, MSG_DONTWAIT);
        if (n > 0)
            return qc_strbuf_add(&l->unread, chunk, (size_t)n, err);
        if (n == 0 || errno == ECONNRESET)
            return is_gone(l, err);
        if (errno != EINTR && errno != EAGAIN && errno != EWOULDBLOCK)
            QC_FAIL(err, QC_ERR_IO, "--hessians %s: %s", l->name, strerror(errno));
    }
}

qc_status qc_door_line_read(qc_door_line *l, qc_json **out, qc_error *err)
{
    const char *end = NULL;
    size_t seen = 0;
    *out = NULL;
    while (!end) {
        if (l->unread.len > seen)
            end = memchr(l->unread.data + seen, '\n', l->unread.len - seen);
        seen = l->unread.len;
        if (!end && seen > QC_DOOR_LINE_MOST)
            QC_FAIL(err, QC_ERR_INPUT, "--hessians %s: a line of more than %zu bytes", l->name,
                    QC_DOOR_LINE_MOST);
        if (!end)
            QC_TRY(read_more(l, err));
    }
    const size_t len = (size_t)(end - l->unread.data);
    qc_status st = qc_json_parse(out, l->unread.data, len, 0, err);
    if (st == QC_OK)
        st = qc_json_expect(qc_json_root(*out), QC_JSON_OBJECT, "a line", err);
    memmove(l->unread.data, end + 1, l->unread.len - len); /* the NUL as well */
    l->unread.len -= len + 1;
    if (st != QC_OK) {
        qc_json_destroy(*out);
        *out = NULL;
        qc_error_prefix(err, "--hessians %s", l->name);
    }
    return st;
}

qc_status qc_door_line_write(const qc_door_line *l, const qc_strbuf *text, qc_error *err)
{
    for (size_t at = 0; at < text->len;) {
        QC_TRY(wait_for(l, POLLOUT, err));
        const ssize_t n = send(l->fd, text->data + at, text->len - at, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (n > 0)
            at += (size_t)n;
        else if (n < 0 && (errno == EPIPE || errno == ECONNRESET))
            return is_gone(l, err);
        else if (n < 0 && errno != EINTR && errno != EAGAIN && errno != EWOULDBLOCK)
            QC_FAIL(err, QC_ERR_IO, "--hessians %s: %s", l->name, strerror(errno));
    }
    return QC_OK;
}
