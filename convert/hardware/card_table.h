/* The graphics cards that people have, so that one can plan for a machine that is not at hand.
 *
 * Memory is what a CUDA program sees as total. It is less than the box says, and some hundred MiB
 * less than nvidia-smi shows, because the driver keeps these to itself (a "40 GB" A100 has 42.3e9
 * bytes, a "24 GB" 3090 has 25.3e9). card_table.c names the sources beside the rows. Thread-safe:
 * the table is constant, and nothing allocates. */
#ifndef QC_CONVERT_CARD_TABLE_H
#define QC_CONVERT_CARD_TABLE_H

#include <stddef.h>
#include <stdint.h>

typedef struct qc_card {
    const char *name;    /* the name that is printed: "A100-40GB" */
    const char *aliases; /* lower case, between blanks: " a100-40 a100-sxm4-40gb " */
    /* The names that the driver gives it, without the maker's words, separated by '|':
     * "V100-SXM2-16GB|V100-PCIE-16GB". */
    const char *product;
    unsigned sm;           /* compute capability times ten: 70 to 121 */
    uint64_t memory_bytes; /* total, as a CUDA program sees it */
    double bandwidth;      /* memory's, in bytes per second, from the data sheet */
    /* to the host, in bytes per second one way, from the data sheet (PCIe) */
    double host_link;
    /* to a peer, in bytes per second one way (NVLink); 0: through the host */
    double peer_link;
} qc_card;

extern const qc_card qc_card_table[];
extern const unsigned qc_card_count;

/* Finds a card by its name, an alias or its product name. Case, blanks, '-', '_' and the words
 * NVIDIA, GeForce, Tesla and Quadro do not matter ("a100 40gb", "RTX 3090", "3090"). "A100" alone
 * means the smaller one. NULL if there is none. */
const qc_card *qc_card_find(const char *text, size_t len);
/* Is the card sold with so many GB, by its name or an alias ("a100-40gb" for A100-40GB)? */
int qc_card_sold_with(const qc_card *card, uint64_t gigabytes);
/* Finds the card with the product name that a driver gives. Where several share a name, total_bytes
 * (as the driver reports it) tells them apart; if it is 0 (unknown), the smallest is taken. NULL if
 * there is none, or if the memory of those with that name differs from total_bytes by more than an
 * eighth: then it is a laptop's card or another edition. */
const qc_card *qc_card_of_product(const char *product, uint64_t total_bytes);
/* The nearest name for "did you mean", or NULL if nothing is near. */
const char *qc_card_near(const char *text, size_t len);

/* What an architecture can do, which sm alone tells. */
typedef struct {
    unsigned sm;
    const char *architecture; /* "Volta", "Turing", "Ampere", "Ada", "Hopper", "Blackwell", "" */
    int fp16_tensor, bf16_tensor, tf32_tensor, int8_tensor, fp8_tensor;
    const char *compute_dtype; /* "float16" up to Turing, "bfloat16" from Ampere on */
} qc_arch_facts;
qc_arch_facts qc_arch_of(unsigned sm);

#endif
