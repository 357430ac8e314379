/* Links in a checkpoint's folder. Somebody else made the folder, so a link in it may name any file
 * of whoever opens it; its contents must not end up in what is handed on. */
#ifndef QC_FORMATS_PATH_LINK_H
#define QC_FORMATS_PATH_LINK_H

#include "base/status.h"

/* *leaves: dir/name is a link to something that does not lie below dir. The hub's cache, where
 * snapshots/REVISION is full of links to ../../blobs, counts as one folder. A name that is no link,
 * or that leads nowhere, leaves nothing. Thread-safe. */
QC_NODISCARD qc_status qc_path_leaves(const char *dir, const char *name, int *leaves,
                                      qc_error *err);

#endif
