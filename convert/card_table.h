/* Graphics cards people have: what to plan for on a machine that is not at hand.
 *
 * Memory is what the driver reports as total (a "40 GB" A100 has 42.3e9 bytes, a "24 GB" 3090
 * 25.4e9), not the figure on the box. Sources are named beside the rows in card_table.c.
 * Thread-safe: constant. Nothing allocates. */
#ifndef QC_CONVERT_CARD_TABLE_H
#define QC_CONVERT_CARD_TABLE_H

#include <stddef.h>
#include <stdint.h>

typedef struct {
    const char *name;      /* "A100-40GB": as printed */
    const char *aliases;   /* " a100-40 a100-sxm4-40gb ": lower case, between blanks */
    const char *product;   /* in NVML's and the driver's names: "A100-SXM4-40GB" */
    unsigned sm;           /* compute capability times ten: 70, 75, 80, 86, 89, 90, 100 */
    uint64_t memory_bytes; /* total, as the driver reports */
    double bandwidth;      /* of its memory, bytes a second, data sheet */
    double host_link;      /* to the host, bytes a second one way, data sheet (PCIe) */
    double peer_link;      /* to a peer, bytes a second one way (NVLink); 0: through the host */
} qc_card;

extern const qc_card qc_card_table[];
extern const unsigned qc_card_count;

/* By name or alias: case, blanks, '-' and '_' do not matter ("a100 40gb", "RTX 3090", "3090");
 * "A100" alone is the smaller one. NULL if there is none. */
const qc_card *qc_card_find(const char *text, size_t len);
/* The card a driver's product name belongs to, by longest product; total_bytes tells apart those
 * that share a product name (0: unknown). NULL if none. */
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
