#include "convert/hardware/card_table.h"

#include "base/edit_distance.h"
#include "base/text.h"

#include <stdlib.h>
#include <string.h>

/* Memory. There are two kinds of figures, in hundredths of a GiB and in MiB:
 *
 *   SEEN(h)     The lowest "total capacity" (cudaMemGetInfo) in public out-of-memory messages of
 *               PyTorch that fit the card. Not every message names the card, so for cards with
 *               equal memory (A100 and H100, A10 and L4, 5070 Ti and 5080) the lowest figure
 *               stands for both. It differs by up to 1% between drivers.
 *   DERIVED(m)  Where there is no such message: the total of m MiB that nvidia-smi shows, less 3%,
 *               the largest share that a driver was seen to keep (T4: 15360 MiB are shown and
 *               14.56 GiB can be had). Cards with GDDR6 and ECC on show 15/16 of their memory.
 *
 * Bandwidth and NVLink are those of NVIDIA's data sheets (data centre and workstation cards) and
 * specification pages (GeForce, Titan). Where these give only clock and width, the bandwidth is
 * 2 x clock x width / 8. A later variant with slower memory (4070) counts as the first one. These
 * cards were checked against public tables: P100, V100, T4, A100-40GB, A10G, A40, L40, L40S, A4000,
 * A4500, A6000, RTX 6000, GeForce 3060 to 5060 Ti, H100 SXM, H200, B200, B300, GB200. The others
 * have not been compared with their documents a second time. Nothing but advice and estimates of
 * time rests on them, and for a GPU that is in the machine NVML's figure counts.
 *
 * NVLink is given one way (half of the data sheets' figure), and only for cards that always have
 * it: bridges between PCIe cards are optional and join two.
 *
 * PCIe has 16 lanes of 8, 16 or 32 GT/s with 128b/130b coding. */
#define SEEN(hundredths) ((uint64_t)(hundredths) * (1ull << 30) / 100)
#define DERIVED(mebi)    ((uint64_t)(mebi) * (1ull << 20) / 100 * 97)
#define PCIE3_X16        15.75e9
#define PCIE4_X16        31.5e9
#define PCIE4_X8         15.75e9
#define PCIE5_X16        63.0e9

/* Where cards share a first name, a search for it finds the one that comes first. */
/* clang-format off */
const qc_card qc_card_table[] = {
    /* Pascal, on which bitsandbytes runs and qconv's own kernels do not */
    {"P100-16GB", " p100 p100-16 p100-pcie ", "P100-PCIE-16GB|P100-SXM2-16GB",
     60, DERIVED(16280), 732e9, PCIE3_X16, 0},
    /* Volta */
    {"V100-16GB", " v100 v100-16 v100-sxm2 v100-sxm2-16gb ", "V100-SXM2-16GB",
     70, SEEN(1577), 900e9, PCIE3_X16, 150e9},
    {"V100-32GB", " v100-32 v100-sxm2-32gb v100-sxm3-32gb ", "V100-SXM2-32GB|V100-SXM3-32GB",
     70, SEEN(3173), 900e9, PCIE3_X16, 150e9},
    {"V100-PCIe-16GB", " v100-pcie ", "V100-PCIE-16GB|V100-FHHL-16GB",
     70, SEEN(1577), 900e9, PCIE3_X16, 0},
    {"V100-PCIe-32GB", " ", "V100-PCIE-32GB", 70, SEEN(3173), 900e9, PCIE3_X16, 0},
    {"V100S-32GB", " v100s ", "V100S-PCIE-32GB", 70, SEEN(3173), 1134e9, PCIE3_X16, 0},
    /* Turing */
    {"T4", " t4-16gb ", "T4", 75, SEEN(1456), 320e9, PCIE3_X16, 0},
    {"RTX2080Ti", " 2080ti 2080ti-11gb ", "RTX 2080 Ti", 75, DERIVED(11264), 616e9, PCIE3_X16, 0},
    {"TitanRTX", " titan-rtx-24gb ", "TITAN RTX", 75, DERIVED(24220), 672e9, PCIE3_X16, 0},
    {"RTX6000-Turing", " quadro-rtx-6000 ", "RTX 6000", 75, DERIVED(22698), 672e9, PCIE3_X16, 0},
    {"RTX8000", " quadro-rtx-8000 ", "RTX 8000", 75, DERIVED(45556), 672e9, PCIE3_X16, 0},
    /* Ampere, data centre */
    {"A100-40GB", " a100 a100-40 a100-sxm a100-sxm4 a100-sxm-40gb ", "A100-SXM4-40GB",
     80, SEEN(3939), 1555e9, PCIE4_X16, 300e9},
    {"A100-PCIe-40GB", " a100-pcie a100-40gb-pcie ", "A100-PCIE-40GB",
     80, SEEN(3939), 1555e9, PCIE4_X16, 0},
    {"A100-80GB", " a100-80 a100-sxm-80gb ", "A100-SXM4-80GB",
     80, SEEN(7914), 2039e9, PCIE4_X16, 300e9},
    {"A100-80GB-PCIe", " a100-pcie-80gb ", "A100 80GB PCIe",
     80, SEEN(7914), 1935e9, PCIE4_X16, 0},
    {"A30", " a30-24gb ", "A30", 80, DERIVED(24258), 933e9, PCIE4_X16, 0},
    {"A10", " a10-24gb a10g a10g-24gb ", "A10|A10G", 86, SEEN(2203), 600e9, PCIE4_X16, 0},
    /* This is one of the four GPUs of a board, which share its 16 lanes. */
    {"A16", " a16-16gb ", "A16", 86, DERIVED(15356), 200e9, PCIE4_X16 / 4, 0},
    {"A2", " a2-16gb ", "A2", 86, DERIVED(15356), 200e9, PCIE4_X8, 0},
    {"A40", " a40-48gb ", "A40", 86, DERIVED(45634), 696e9, PCIE4_X16, 0},
    /* Ampere, workstation */
    {"A4000", " rtx-a4000 a4000-16gb ", "RTX A4000", 86, DERIVED(16376), 448e9, PCIE4_X16, 0},
    {"A4500", " rtx-a4500 a4500-20gb ", "RTX A4500", 86, DERIVED(20470), 640e9, PCIE4_X16, 0},
    {"A5000", " rtx-a5000 a5000-24gb ", "RTX A5000", 86, DERIVED(24564), 768e9, PCIE4_X16, 0},
    {"A6000", " rtx-a6000 a6000-48gb ", "RTX A6000", 86, SEEN(4740), 768e9, PCIE4_X16, 0},
    /* Ampere, GeForce */
    {"RTX3060-12GB", " 3060 3060-12gb rtx3060 ", "RTX 3060",
     86, DERIVED(12288), 360e9, PCIE4_X16, 0},
    {"RTX3060Ti", " 3060ti 3060ti-8gb ", "RTX 3060 Ti", 86, DERIVED(8192), 448e9, PCIE4_X16, 0},
    {"RTX3070", " 3070 3070-8gb ", "RTX 3070", 86, DERIVED(8192), 448e9, PCIE4_X16, 0},
    {"RTX3070Ti", " 3070ti 3070ti-8gb ", "RTX 3070 Ti", 86, DERIVED(8192), 608e9, PCIE4_X16, 0},
    {"RTX3080-10GB", " 3080 3080-10gb rtx3080 ", "RTX 3080",
     86, DERIVED(10240), 760e9, PCIE4_X16, 0},
    {"RTX3080-12GB", " 3080-12gb ", "RTX 3080", 86, DERIVED(12288), 912e9, PCIE4_X16, 0},
    {"RTX3080Ti", " 3080ti 3080ti-12gb ", "RTX 3080 Ti", 86, DERIVED(12288), 912e9, PCIE4_X16, 0},
    {"RTX3090", " 3090 3090-24gb ", "RTX 3090", 86, SEEN(2356), 936e9, PCIE4_X16, 0},
    {"RTX3090Ti", " 3090ti 3090ti-24gb ", "RTX 3090 Ti", 86, DERIVED(24564), 1008e9, PCIE4_X16, 0},
    /* Ada */
    {"L4", " l4-24gb ", "L4", 89, SEEN(2203), 300e9, PCIE4_X16, 0},
    {"L40", " l40-48gb ", "L40", 89, DERIVED(46068), 864e9, PCIE4_X16, 0},
    {"L40S", " l40s-48gb ", "L40S", 89, DERIVED(46068), 864e9, PCIE4_X16, 0},
    {"RTX4000-Ada", " 4000ada rtx-4000-ada-20gb ", "RTX 4000 Ada Generation",
     89, DERIVED(20475), 360e9, PCIE4_X16, 0},
    {"RTX6000-Ada", " 6000ada rtx-6000-ada-48gb ", "RTX 6000 Ada Generation",
     89, DERIVED(49140), 960e9, PCIE4_X16, 0},
    {"RTX4060", " 4060 4060-8gb ", "RTX 4060", 89, DERIVED(8188), 272e9, PCIE4_X8, 0},
    {"RTX4060Ti-16GB", " 4060ti 4060ti-16gb rtx4060ti ", "RTX 4060 Ti",
     89, DERIVED(16380), 288e9, PCIE4_X8, 0},
    {"RTX4060Ti-8GB", " 4060ti-8gb ", "RTX 4060 Ti", 89, DERIVED(8188), 288e9, PCIE4_X8, 0},
    {"RTX4070", " 4070 4070-12gb ", "RTX 4070", 89, DERIVED(12282), 504e9, PCIE4_X16, 0},
    {"RTX4070Super", " 4070s 4070super rtx4070s ", "RTX 4070 SUPER",
     89, DERIVED(12282), 504e9, PCIE4_X16, 0},
    {"RTX4070Ti", " 4070ti 4070ti-12gb ", "RTX 4070 Ti", 89, DERIVED(12282), 504e9, PCIE4_X16, 0},
    {"RTX4070TiSuper", " 4070tis 4070tisuper rtx4070tis ", "RTX 4070 Ti SUPER",
     89, DERIVED(16376), 672e9, PCIE4_X16, 0},
    {"RTX4080", " 4080 4080-16gb ", "RTX 4080", 89, DERIVED(16376), 716e9, PCIE4_X16, 0},
    {"RTX4080Super", " 4080s 4080super rtx4080s ", "RTX 4080 SUPER",
     89, DERIVED(16376), 736e9, PCIE4_X16, 0},
    {"RTX4090", " 4090 4090-24gb ", "RTX 4090", 89, SEEN(2351), 1008e9, PCIE4_X16, 0},
    /* Hopper */
    {"H100-80GB", " h100 h100-sxm h100-sxm5 h100-sxm-80gb ", "H100 80GB HBM3",
     90, SEEN(7914), 3350e9, PCIE5_X16, 450e9},
    {"H100-PCIe-80GB", " h100-pcie h100-80gb-pcie ", "H100 PCIe",
     90, SEEN(7914), 2000e9, PCIE5_X16, 0},
    {"H100-NVL-94GB", " h100-nvl h100-94gb ", "H100 NVL", 90, SEEN(9300), 3900e9, PCIE5_X16, 0},
    {"H200-141GB", " h200 h200-sxm ", "H200", 90, SEEN(13972), 4800e9, PCIE5_X16, 450e9},
    {"H200-NVL-141GB", " h200-nvl ", "H200 NVL", 90, SEEN(13972), 4800e9, PCIE5_X16, 0},
    /* The host link is NVLink-C2C. */
    {"GH200-96GB", " gh200 gh200-480gb ", "GH200 480GB", 90, SEEN(9450), 4000e9, 450e9, 0},
    /* Blackwell */
    {"B200-180GB", " b200 b200-192gb ", "B200", 100, SEEN(17835), 8000e9, PCIE5_X16, 900e9},
    /* Two of them share the link of their host, which is NVLink-C2C. */
    {"GB200-186GB", " gb200 gb200-192gb gb200-nvl72 ", "GB200", 100, DERIVED(189471), 8000e9,
     450e9 / 2, 900e9},
    {"B300-288GB", " b300 b300-275gb b300-sxm6 ", "B300 SXM6 AC|B300", 103, SEEN(26769), 8000e9,
     PCIE5_X16, 900e9},
    {"RTX5060", " 5060 5060-8gb ", "RTX 5060", 120, DERIVED(8151), 448e9, PCIE5_X16 / 2, 0},
    {"RTX5060Ti-16GB", " 5060ti 5060ti-16gb rtx5060ti ", "RTX 5060 Ti",
     120, DERIVED(16311), 448e9, PCIE5_X16 / 2, 0},
    {"RTX5060Ti-8GB", " 5060ti-8gb ", "RTX 5060 Ti", 120, DERIVED(8151), 448e9, PCIE5_X16 / 2, 0},
    {"RTX5070", " 5070 5070-12gb ", "RTX 5070", 120, DERIVED(12227), 672e9, PCIE5_X16, 0},
    {"RTX5070Ti", " 5070ti 5070ti-16gb ", "RTX 5070 Ti", 120, SEEN(1545), 896e9, PCIE5_X16, 0},
    {"RTX5080", " 5080 5080-16gb ", "RTX 5080", 120, SEEN(1545), 960e9, PCIE5_X16, 0},
    {"RTX5090", " 5090 5090-32gb ", "RTX 5090", 120, SEEN(3134), 1792e9, PCIE5_X16, 0},
    {"RTXPRO6000", " pro6000 pro6000-96gb rtx-pro-6000-blackwell ",
     "RTX PRO 6000 Blackwell Workstation Edition|"
     "RTX PRO 6000 Blackwell Max-Q Workstation Edition",
     120, SEEN(9496), 1792e9, PCIE5_X16, 0},
    {"RTXPRO6000-Server", " pro6000-server rtx-pro-6000-blackwell-server ",
     "RTX PRO 6000 Blackwell Server Edition", 120, SEEN(9496), 1597e9, PCIE5_X16, 0},
    /* The GPU and the host share this memory (128 GB LPDDR5X). So a copy from the host is a copy
     * within it, and what is planned for the GPU is no longer there for the host. */
    {"GB10", " gb10-128gb dgx-spark ", "GB10", 121, SEEN(11961), 273e9, 273e9, 0},
};
/* clang-format on */
const unsigned qc_card_count = sizeof qc_card_table / sizeof *qc_card_table;

#define KEY_BYTES 64

/* ---- names ---- */

/* Writes the letters and digits of text in lower case, without the maker's words. Returns 0 if text
 * is too long for a name, or if nothing is left. */
static int make_key(char key[KEY_BYTES], const char *text, size_t len)
{
    static const char *const words[] = {"nvidia", "geforce", "tesla", "quadro"};
    size_t n = 0;
    for (size_t i = 0; i < len; i++) {
        char c = text[i];
        if (c == ' ' || c == '-' || c == '_')
            continue;
        if (n + 1 >= KEY_BYTES)
            return 0;
        key[n++] = qc_lower(c);
    }
    key[n] = '\0';
    for (size_t i = 0; i < sizeof words / sizeof *words; i++) {
        size_t k = strlen(words[i]);
        if (n > k && memcmp(key, words[i], k) == 0) {
            n -= k;
            memmove(key, key + k, n + 1);
            i = (size_t)-1; /* start again from the first word, for "NVIDIA GeForce" */
        }
    }
    return n > 0;
}

/* Finds the next word of a list from *at on and skips empty ones. Returns 0 at the end. */
static int next_part(const char *list, char separator, size_t *at, const char **part, size_t *len)
{
    while (list[*at] == separator)
        ++*at;
    *part = list + *at;
    while (list[*at] && list[*at] != separator)
        ++*at;
    *len = (size_t)(list + *at - *part);
    return *len > 0;
}

static int key_is(const char *key, const char *text, size_t len)
{
    char other[KEY_BYTES];
    return make_key(other, text, len) && strcmp(key, other) == 0;
}

static int list_has(const char *list, char separator, const char *key)
{
    const char *part;
    size_t at = 0, len;
    while (next_part(list, separator, &at, &part, &len))
        if (key_is(key, part, len))
            return 1;
    return 0;
}

const qc_card *qc_card_find(const char *text, size_t len)
{
    char key[KEY_BYTES];
    if (!make_key(key, text, len))
        return NULL;
    for (unsigned i = 0; i < qc_card_count; i++) {
        const qc_card *c = &qc_card_table[i];
        if (key_is(key, c->name, strlen(c->name)) || list_has(c->aliases, ' ', key))
            return c;
    }
    for (unsigned i = 0; i < qc_card_count; i++)
        if (list_has(qc_card_table[i].product, '|', key))
            return &qc_card_table[i];
    return NULL;
}

int qc_card_sold_with(const qc_card *card, uint64_t gigabytes)
{
    const char *const lists[] = {card->name, card->aliases};
    uint64_t bytes = gigabytes * 1000000000u, memory = card->memory_bytes;
    uint64_t off = bytes > memory ? bytes - memory : memory - bytes;
    if (gigabytes == 0 || gigabytes > 100000 || off > bytes / 8)
        return 0; /* such as the 480 GB of a GH200, which are the host's memory */
    for (size_t i = 0; i < sizeof lists / sizeof *lists; i++)
        for (const char *s = strchr(lists[i], '-'); s; s = strchr(s + 1, '-')) {
            char *end = NULL;
            if (s[1] >= '0' && s[1] <= '9' && strtoull(s + 1, &end, 10) == gigabytes &&
                (qc_begins_with(end, "gb") || qc_begins_with(end, "GB")))
                return 1;
        }
    return 0;
}

const qc_card *qc_card_of_product(const char *product, uint64_t total_bytes)
{
    char key[KEY_BYTES];
    const qc_card *best = NULL;
    uint64_t best_off = 0;
    if (!make_key(key, product, strlen(product)))
        return NULL;
    for (unsigned i = 0; i < qc_card_count; i++) {
        const qc_card *c = &qc_card_table[i];
        if (!list_has(c->product, '|', key))
            continue;
        uint64_t off = total_bytes > c->memory_bytes ? total_bytes - c->memory_bytes
                                                     : c->memory_bytes - total_bytes;
        if (total_bytes == 0)
            off = c->memory_bytes;
        else if (off > c->memory_bytes / 8)
            continue;
        if (!best || off < best_off) {
            best = c;
            best_off = off;
        }
    }
    return best;
}

const char *qc_card_near(const char *text, size_t len)
{
    char key[KEY_BYTES], other[KEY_BYTES];
    const char *best = NULL;
    unsigned best_distance = 0;
    if (!make_key(key, text, len))
        return NULL;
    /* At most a third of the typed characters may differ, and at most three. */
    unsigned most = (unsigned)strlen(key) / 3;
    most = most > 3 ? 3 : most;
    for (unsigned i = 0; i < qc_card_count; i++) {
        const qc_card *c = &qc_card_table[i];
        const char *part = c->name;
        size_t at = 0, n = strlen(c->name);
        do {
            unsigned d = make_key(other, part, n)
                             ? qc_edit_distance(key, strlen(key), other, strlen(other))
                             : QC_EDIT_TOO_LONG;
            if (d <= most && (!best || d < best_distance)) {
                best = c->name;
                best_distance = d;
            }
        } while (next_part(c->aliases, ' ', &at, &part, &n));
    }
    return best;
}

/* ---- architectures ---- */

qc_arch_facts qc_arch_of(unsigned sm)
{
    /* Tensor core types by compute capability, from the CUDA C++ Programming Guide, "Compute
     * Capabilities". */
    static const struct {
        unsigned from, to;
        const char *name;
    } names[] = {
        {60, 61, "Pascal"}, {70, 72, "Volta"},  {75, 75, "Turing"},      {80, 88, "Ampere"},
        {89, 89, "Ada"},    {90, 90, "Hopper"}, {100, 121, "Blackwell"},
    };
    qc_arch_facts f = {.sm = sm, .architecture = ""};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (sm >= names[i].from && sm <= names[i].to)
            f.architecture = names[i].name;
    f.fp16_tensor = sm >= 70;
    f.int8_tensor = sm >= 72;
    f.bf16_tensor = sm >= 80;
    f.tf32_tensor = sm >= 80;
    f.fp8_tensor = sm >= 89;
    f.compute_dtype = f.bf16_tensor ? "bfloat16" : "float16";
    return f;
}
