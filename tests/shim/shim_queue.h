/* What the streams of the shim are made of. shim_stream.c, shim_copy.c and shim_graph.c share
 * it. */
#ifndef QC_SHIM_QUEUE_H
#define QC_SHIM_QUEUE_H

#include "shim_internal.h"

#include <pthread.h>

typedef enum { KERNEL, CALL, HOST_CALL, COPY, FILL, RECORD, WAIT, GRAPH } op_kind;

/* Each stream of one capture has a lane of its own. A clock says how many operations of each lane
 * come before. */
enum { QC_SHIM_LANES = 8 };
typedef struct {
    uint32_t done[QC_SHIM_LANES];
} lane_clock;

typedef struct op {
    struct op *next;
    op_kind kind;
    unsigned refs; /* of an operation of a graph: how many graphs have it */
    int device;
    qc_shim_grid grid; /* KERNEL */
    void (*call)(void *);
    void *data; /* owned: closure of KERNEL, argument of CALL, bytes of a pageable COPY */
    void *to;
    const void *from;
    size_t bytes;
    int byte;
    cudaEvent_t event;     /* RECORD */
    uint64_t stream_id;    /* KERNEL: its own. WAIT: the other's */
    uint64_t stream_place; /* WAIT: until that stream has done so many operations */
    struct CUgraphExec_st *graph;
    unsigned lane;     /* in a capture: the stream that it was given to */
    lane_clock behind; /* in a capture: what it waits for */
} op;

typedef struct {
    op *first, **last;
} op_list;

typedef struct capture {
    uint64_t id;
    struct CUstream_st *origin;
    enum cudaStreamCaptureMode mode;
    pthread_t thread;
    int broken;
    op_list ops;
    unsigned lanes;
    lane_clock given;
} capture;

struct CUstream_st {
    struct CUstream_st *next;
    uint64_t id;
    int device;
    op_list ops;
    uint64_t queued, done; /* operations so far */
    int busy;              /* somebody runs the first one */
    unsigned waiting;      /* threads that look at it */
    int destroyed;
    capture *capture;
    unsigned lane;     /* in the capture */
    lane_clock behind; /* what the next operation waits for */
};

struct CUevent_st {
    unsigned refs; /* the handle and RECORD operations */
    int device, timing, recorded;
    uint64_t stream_id, stream_place;
    double seconds;
    uint64_t captured; /* the capture that recorded it last; 0: none */
    lane_clock behind; /* in that capture */
};

struct CUgraph_st {
    op **ops;
    size_t count;
};
struct CUgraphExec_st {
    op **ops;
    size_t count;
    unsigned refs;
};

/* This guards everything of these types. Nobody holds it while an operation runs. */
extern pthread_mutex_t qc_shim_lock;
extern struct CUstream_st *qc_shim_streams;

/* Returns zeroed memory, never NULL. */
void *qc_shim_allocate(size_t bytes);
op *qc_shim_new_op(op_kind kind, int device);

/* The caller holds the lock for all of these. */

/* cudaSuccess, or why s cannot be used. */
cudaError_t qc_shim_usable(const struct CUstream_st *s);
/* Puts o, which it takes, at the end of s, or into the capture that s is in. */
void qc_shim_give(struct CUstream_st *s, op *o);
/* Runs s until it has done so many operations. A destroyed stream may be gone afterwards. */
void qc_shim_run_until(struct CUstream_st *s, uint64_t place);
/* NULL if it has ended. */
capture *qc_shim_capture_of_id(uint64_t id);
/* Puts s into c. What comes next on s waits for all that is in `behind`. */
void qc_shim_join(capture *c, struct CUstream_st *s, const lane_clock *behind);
void qc_shim_drop_ops(op **ops, size_t count);
void qc_shim_drop_graph(struct CUgraphExec_st *g);

/* This takes the lock itself. It returns an error for what may not be done while this thread
 * captures, or in the global mode while anybody does. */
cudaError_t qc_shim_no_capture(void);

#endif
