/* Status codes and error context.
 *
 * Every function that can fail returns a qc_status; pointers and booleans never signal failure.
 * What went wrong, in words, goes to the caller's qc_error (the last parameter, may be NULL).
 * There is no thread-local or global last error, so a message can never be stale.
 *
 * A message is one line without a full stop. It names the subject, what was expected, what was
 * found and, where it is not obvious, what to do. Library code never prints, never exits, never
 * aborts on input. */
#ifndef QC_BASE_STATUS_H
#define QC_BASE_STATUS_H

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define QC_NODISCARD        __attribute__((warn_unused_result))
#define QC_PRINTF(fmt, arg) __attribute__((format(printf, fmt, arg)))
/* Marks what programs outside may call; everything else is hidden in the installed library. */
#define QC_API __attribute__((visibility("default")))
#else
#define QC_NODISCARD
#define QC_PRINTF(fmt, arg)
#define QC_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* X(name, exit code of the program, meaning). Values are pinned by their order: append only. */
#define QC_STATUS_MAP(X)                                                                           \
    X(OK, 0, "done")                                                                               \
    X(ERR_IO, 1, "input or output failed")                                                         \
    X(ERR_NOMEM, 1, "out of memory")                                                               \
    X(ERR_INTERNAL, 1, "internal error")                                                           \
    X(ERR_NOSPACE, 1, "no space left on the device")                                               \
    X(ERR_USAGE, 2, "wrong usage")                                                                 \
    X(ERR_INPUT, 3, "the input breaks a rule of its format")                                       \
    X(ERR_TRUNCATED, 3, "the input is shorter than it says")                                       \
    X(ERR_UNSUPPORTED, 3, "the input is of a kind that is not supported")                          \
    X(ERR_SHAPE, 3, "the shape is not supported")                                                  \
    X(ERR_NONFINITE, 3, "a weight is not finite")                                                  \
    X(ERR_RANGE, 3, "a value does not fit its type")                                               \
    X(ERR_CHECK, 4, "a check failed")                                                              \
    X(ERR_DEVICE, 5, "there is no such device")                                                    \
    X(ERR_INTERRUPTED, 130, "interrupted")                                                         \
    X(ERR_CHANGED, 3, "the input changed while it was read")

typedef enum {
#define QC_STATUS_ENUM(name, exit_code, meaning) QC_##name,
    QC_STATUS_MAP(QC_STATUS_ENUM)
#undef QC_STATUS_ENUM
        QC_STATUS_COUNT
} qc_status;

typedef struct {
    qc_status code;
    char msg[512];    /* one line of UTF-8; other bytes and control characters become '?'
                         (base/text.h) */
    const char *file; /* where in qconv's source the error was made */
    int line;
} qc_error;

/* "ERR_IO" and so on; never NULL. */
QC_API const char *qc_status_name(qc_status code);
/* One clause in words; never NULL. */
QC_API const char *qc_status_meaning(qc_status code);
/* Returns the program's exit code for a status: 0, 1, 2, 3, 4, 5 or 130. */
QC_API int qc_status_exit_code(qc_status code);
/* Returns whether the caller's command or the input is bad (exit codes 2 and 3), so that the same
 * call would fail again. */
int qc_status_is_refusal(qc_status code);

/* A name in the format of a message, which has room for the rest of its sentence. */
#define QC_NAME "'%.160s'"

/* Fills *err (if not NULL) and returns code. Use it through QC_FAIL or QC_ERROR. */
QC_API qc_status qc_error_set(qc_error *err, qc_status code, const char *file, int line,
                              const char *fmt, ...) QC_PRINTF(5, 6);

/* Puts "prefix: " before the message of an error that is already set. Callers that know the file
 * use it. */
QC_API void qc_error_prefix(qc_error *err, const char *fmt, ...) QC_PRINTF(2, 3);

/* For functions that store a pointer of any type through `void *out`: it makes p, the address of a
 * pointer, a void *, and does not compile where p is anything else. */
#define QC_POINTER_AT(p) ((void)sizeof(*(p) == (void *)0), (void *)(p))

/* Hands on the error of a call whose failure did not have to count, and returns st, the status of
 * that call; QC_OK leaves *err as it is. */
static inline qc_status qc_error_pass(qc_error *err, const qc_error *why, qc_status st)
{
    if (st != QC_OK && err)
        *err = *why;
    return st;
}

/* Gives an error that is already set another code, and returns that. */
qc_status qc_error_recode(qc_error *err, qc_status code);

/* Sets an error and gives its code as a value: st = QC_ERROR(err, QC_ERR_CHECK, "..."). */
#define QC_ERROR(err, code, ...) qc_error_set((err), (code), __FILE__, __LINE__, __VA_ARGS__)

/* Sets an error and returns it from the enclosing function. The macro returns the code itself,
 * because a static analyzer does not see into qc_error_set and would not know that it is a
 * failure. */
#define QC_FAIL(err, code, ...)                                                                    \
    do {                                                                                           \
        (void)QC_ERROR((err), (code), __VA_ARGS__);                                                \
        return (code);                                                                             \
    } while (0)

/* Returns from the enclosing function if expr is not QC_OK. */
#define QC_TRY(expr)                                                                               \
    do {                                                                                           \
        qc_status qc_try_status_ = (expr);                                                         \
        if (qc_try_status_ != QC_OK)                                                               \
            return qc_try_status_;                                                                 \
    } while (0)

/* Like QC_TRY, but jumps to a label with the status stored in the variable st. */
#define QC_TRY_GOTO(st, label, expr)                                                               \
    do {                                                                                           \
        (st) = (expr);                                                                             \
        if ((st) != QC_OK)                                                                         \
            goto label;                                                                            \
    } while (0)

#ifdef __cplusplus
}
#endif
#endif
