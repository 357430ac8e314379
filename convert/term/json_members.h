/* Members of a JSON object, key and value in one call. */
#ifndef QC_CONVERT_JSON_MEMBERS_H
#define QC_CONVERT_JSON_MEMBERS_H

#include "formats/json_writer.h"

#include <math.h>

static inline void qc_jm_u64(qc_json_writer *w, const char *key, uint64_t v)
{
    qc_jw_key(w, key);
    qc_jw_u64(w, v);
}

static inline void qc_jm_double(qc_json_writer *w, const char *key, double v)
{
    qc_jw_key(w, key);
    qc_jw_double(w, v);
}

/* Begins a list or an object under a key; qc_jw_end_array or qc_jw_end_object ends it. */
static inline void qc_jm_begin_array(qc_json_writer *w, const char *key)
{
    qc_jw_key(w, key);
    qc_jw_begin_array(w);
}

static inline void qc_jm_begin_object(qc_json_writer *w, const char *key)
{
    qc_jw_key(w, key);
    qc_jw_begin_object(w);
}

/* Begins an object if it is known; else it writes null and returns 0. */
static inline int qc_jm_begin_object_if(qc_json_writer *w, const char *key, int known)
{
    qc_jw_key(w, key);
    if (known)
        qc_jw_begin_object(w);
    else
        qc_jw_null(w);
    return known;
}

/* Begins an object on one line, in a list or under a key that was written. */
static inline void qc_jm_begin_row(qc_json_writer *w)
{
    qc_jw_compact_next(w);
    qc_jw_begin_object(w);
}

/* Writes null if the value is not known. */
static inline void qc_jm_u64_if(qc_json_writer *w, const char *key, int known, uint64_t v)
{
    qc_jw_key(w, key);
    if (known)
        qc_jw_u64(w, v);
    else
        qc_jw_null(w);
}

/* Writes null if v is not a finite number. */
static inline void qc_jm_number(qc_json_writer *w, const char *key, double v)
{
    qc_jw_key(w, key);
    if (isfinite(v))
        qc_jw_double(w, v);
    else
        qc_jw_null(w);
}

/* Writes a list on one line, such as a shape or a place in it. */
static inline void qc_jm_u64s(qc_json_writer *w, const char *key, const uint64_t *v, unsigned count)
{
    qc_jw_key(w, key);
    qc_jw_compact_next(w);
    qc_jw_begin_array(w);
    for (unsigned i = 0; i < count; i++)
        qc_jw_u64(w, v[i]);
    qc_jw_end_array(w);
}

/* Writes null for NULL. */
static inline void qc_jm_string(qc_json_writer *w, const char *key, const char *v)
{
    qc_jw_key(w, key);
    qc_jw_string(w, v);
}

/* Replaces bytes that are not UTF-8, and writes null for NULL. */
static inline void qc_jm_path(qc_json_writer *w, const char *key, const char *v)
{
    qc_jw_key(w, key);
    qc_jw_path(w, v);
}

static inline void qc_jm_bool(qc_json_writer *w, const char *key, int v)
{
    qc_jw_key(w, key);
    qc_jw_bool(w, v);
}

#endif
