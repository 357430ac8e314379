/* What the files that read pickles share. Nobody else includes this.
 *
 *   torch_pickle.c    the stack machine and its opcodes
 *   torch_rebuild.c   what names, calls and persistent ids mean
 *   torch_value.c     the values that both make */
#ifndef QC_FORMATS_TORCH_PICKLE_INTERNAL_H
#define QC_FORMATS_TORCH_PICKLE_INTERNAL_H

#include "formats/torch_pickle.h"

/* ---- values (torch_value.c) ---- */

/* Makes room in the array for one more element of bytes_each. array is the address of a typed
 * pointer; it has `count` of at most `limit`. */
QC_NODISCARD qc_status qc_pickle_grow(void *array, size_t *cap, size_t count, size_t limit,
                                      size_t bytes_each, qc_error *err);
/* Returns how many values of one kind the text of p can hold at most. The smallest tensor that
 * torch writes takes 80 bytes of text and makes 16 items of tuples, one dict and one pair. */
size_t qc_pickle_limit(const qc_pickle *p);
/* Makes a new empty list or dict. */
QC_NODISCARD qc_status qc_pickle_container_new(qc_pickle *p, qc_pickle_kind kind,
                                               qc_pickle_value *out, qc_error *err);

/* Appends to a list (key NULL) or a dict. */
QC_NODISCARD qc_status qc_pickle_add_pair(qc_pickle *p, const qc_pickle_value *to,
                                          const qc_pickle_value *key, const qc_pickle_value *value,
                                          qc_error *err);

/* ---- names and calls (torch_rebuild.c) ---- */

/* Gives the value of module.name; a name that is not on the list is QC_ERR_UNSUPPORTED. */
QC_NODISCARD qc_status qc_pickle_global(const char *module, size_t module_bytes, const char *name,
                                        size_t name_bytes, qc_pickle_value *out, qc_error *err);
/* Makes what torch would return for callee(*args). args is a TUPLE. */
QC_NODISCARD qc_status qc_pickle_call(qc_pickle *p, const qc_pickle_value *callee,
                                      const qc_pickle_value *args, qc_pickle_value *out,
                                      qc_error *err);
/* Makes a storage of its persistent id, ('storage', type, key, location, elements[, None]). */
QC_NODISCARD qc_status qc_pickle_persistent(qc_pickle *p, const qc_pickle_value *id,
                                            qc_pickle_value *out, qc_error *err);

#endif
