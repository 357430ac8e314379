/* Links in a checkpoint's folder. Somebody else made the folder, so a link in it may point to any
 * file that the user can read; the contents of such a file must not end up in an output. */
#ifndef QC_FORMATS_PATH_LINK_H
#define QC_FORMATS_PATH_LINK_H

#include "base/status.h"

/* Sets *leaves if dir/name is a link to something that does not lie below dir. The hub's cache,
 * where snapshots/REVISION is full of links to ../../blobs, counts as one folder. A name that is
 * not a link, or that leads nowhere, does not leave the folder. Thread-safe. */
QC_NODISCARD qc_status qc_path_leaves(const char *dir, const char *name, int *leaves,
                                      qc_error *err);

#endif
