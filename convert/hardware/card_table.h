/* Graphics cards people have: what to plan for on a machine that is not at hand.
 *
 * Memory is what a CUDA program sees as total: less than the box says, and some hundred MiB less
 * than nvidia-smi shows, which the driver keeps to itself (a "40 GB" A100 has 42.3e9 bytes, a
 * "24 GB" 3090 25.3e9). Sources are named beside the rows in card_table.c.
 * Thread-safe: constant. Nothing allocates. */
#ifndef QC_CONVERT_CARD_TABLE_H
#define QC_CONVERT_CARD_TABLE_H

#include <stddef.h>
#include <stdint.h>

typedef struct {
    const char *name;      /* "A100-40GB": as printed */
    const char *aliases;   /* " a100-40 a100-sxm4-40gb ": lower case, between blanks */
    const char *product;   /* the driver's names without the maker's words, '|' between:
                              "V100-SXM2-16GB|V100-PCIE-16GB" */
    unsigned sm;           /* compute capability times ten: 70 to 121 */
    uint64_t memory_bytes; /* total, as a CUDA program sees it */
    double bandwidth;      /* of its memory, bytes a second, data sheet */
    double host_link;      /* to the host, bytes a second one way, data sheet (PCIe) */
    double peer_link;      /* to a peer, bytes a second one way (NVLink); 0: through the host */
} qc_card;

extern const qc_card qc_card_table[];
extern const unsigned qc_card_count;

/* By name, alias or product: case, blanks, '-', '_' and the words NVIDIA, GeForce, Tesla and Quadro
 * do not matter ("a100 40gb", "RTX 3090", "3090"); "A100" alone is the smaller one. NULL if there
 * is none. */
const qc_card *qc_card_find(const char *text, size_t len);
/* Whether the box says so many GB: by name or alias ("a100-40gb" of A100-40GB). */
int qc_card_sold_with(const qc_card *card, uint64_t gigabytes);
/* The card that a driver's product name is; total_bytes (as the driver reports it) tells apart
 * those that share a name, 0: unknown, the smallest. NULL if none, or if the memory of those with
 * that name differs by more than an eighth: a laptop's or another edition. */
const qc_card *qc_card_of_product(const char *product, uint64_t total_bytes);
/* The nearest name for "did you mean"; NULL if nothing is near. */
const char *qc_card_near(const char *text, size_t len);

/* What an architecture can do; told from sm alone. */
typedef struct {
    unsigned sm;
    const char *architecture; /* "Volta", "Turing", "Ampere", "Ada", "Hopper", "Blackwell", "" */
    int fp16_tensor, bf16_tensor, tf32_tensor, int8_tensor, fp8_tensor;
    const char *compute_dtype; /* "float16" up to Turing, "bfloat16" from Ampere on */
} qc_arch_facts;
qc_arch_facts qc_arch_of(unsigned sm);

#endif
