/* One quantizer call on raw numbers, for comparisons from other languages.
 *
 * usage: tensor_tool nf4 [--block N] [--dtype f32|f16|bf16] PREFIX     PREFIX.codes .absmax
 *        tensor_tool nested [--offset X] PREFIX                        PREFIX.codes .absmax .offset
 *        tensor_tool int8 --cols N [--dtype f32|f16|bf16] PREFIX       PREFIX.codes .scb
 *
 * Reads the tensor (nested: float32 absmax) from standard input. Scales are float32, little-endian.
 * X is anything strtof reads, hexadecimal too; without it the offset is qconv's own. The
 * environment variable QCONV_ISA picks the code path. Exit codes: 0, 1 (I/O), 2 (usage), 3 (a
 * number without a code). */
#include "base/alloc.h"
#include "base/cpu.h"
#include "quant/quant_ops.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    const char *command;
    const char *prefix;
    qc_dtype dtype;
    uint32_t block_elems;
    uint64_t cols;
    const char *offset;
} arguments;

typedef struct {
    unsigned char *data;
    size_t len;
} bytes;

static int usage(const char *what)
{
    (void)fprintf(stderr, "tensor_tool: %s\n", what);
    return 2;
}

static int parse(arguments *a, int argc, char **argv)
{
    *a = (arguments){.dtype = QC_DTYPE_F32, .block_elems = QC_BLOCK_DEFAULT};
    if (argc < 3)
        return usage("want a command and a prefix");
    a->command = argv[1];
    a->prefix = argv[argc - 1];
    for (int i = 2; i + 1 < argc; i += 2) {
        const char *name = argv[i], *value = argv[i + 1];
        if (i + 2 >= argc)
            return usage("an option without a value");
        if (strcmp(name, "--block") == 0)
            a->block_elems = (uint32_t)strtoul(value, NULL, 10);
        else if (strcmp(name, "--cols") == 0)
            a->cols = strtoull(value, NULL, 10);
        else if (strcmp(name, "--offset") == 0)
            a->offset = value;
        else if (strcmp(name, "--dtype") == 0 && strcmp(value, "f32") == 0)
            a->dtype = QC_DTYPE_F32;
        else if (strcmp(name, "--dtype") == 0 && strcmp(value, "f16") == 0)
            a->dtype = QC_DTYPE_F16;
        else if (strcmp(name, "--dtype") == 0 && strcmp(value, "bf16") == 0)
            a->dtype = QC_DTYPE_BF16;
        else
            return usage(name);
    }
    return qc_block_size_valid(a->block_elems) ? 0 : usage("--block");
}

static int read_input(bytes *in)
{
    size_t room = 0, got;
    *in = (bytes){0};
    do {
        if (in->len == room) {
            room = room ? 2 * room : (size_t)1 << 20;
            unsigned char *more = realloc(in->data, room);
            if (!more)
                return 1;
            in->data = more;
        }
        got = fread(in->data + in->len, 1, room - in->len, stdin);
        in->len += got;
    } while (got > 0);
    return ferror(stdin) != 0;
}

static int write_output(const char *prefix, const char *ending, const void *data, size_t len)
{
    char path[4096];
    int n = snprintf(path, sizeof path, "%s.%s", prefix, ending);
    FILE *f = n > 0 && (size_t)n < sizeof path ? fopen(path, "wb") : NULL;
    int ok = f && (len == 0 || fwrite(data, 1, len, f) == len);
    return f && fclose(f) == 0 && ok ? 0 : 1;
}

static int check_sums(const qc_piece_sums *sums)
{
    if (sums->bad == QC_BAD_NONE)
        return 0;
    (void)fprintf(stderr, "tensor_tool: element %" PRIu64 " has no code\n", sums->bad_index);
    return 3;
}

static int run_nf4(const qc_quant_ops *ops, const arguments *a, const bytes *in, uint8_t *codes,
                   float *scales)
{
    qc_piece_sums sums;
    uint64_t n = in->len / (qc_dtype_bits(a->dtype) / 8);
    uint64_t blocks = (n + a->block_elems - 1) / a->block_elems;
    ops->nf4_quantize(in->data, a->dtype, n, a->block_elems, codes, scales, NULL, &sums);
    int rc = check_sums(&sums);
    if (rc == 0)
        rc = write_output(a->prefix, "codes", codes, (n + 1) / 2);
    return rc ? rc : write_output(a->prefix, "absmax", scales, blocks * sizeof *scales);
}

static int run_nested(const qc_quant_ops *ops, const arguments *a, const bytes *in, uint8_t *codes,
                      float *scales)
{
    const float *absmax = (const void *)in->data;
    uint64_t n = in->len / sizeof *absmax;
    uint64_t groups = (n + QC_NESTED_BLOCK - 1) / QC_NESTED_BLOCK;
    float offset = a->offset ? strtof(a->offset, NULL) : qc_nested_offset(absmax, n);
    ops->nested_quantize(absmax, n, offset, codes, scales);
    int rc = write_output(a->prefix, "codes", codes, n);
    if (rc == 0)
        rc = write_output(a->prefix, "absmax", scales, groups * sizeof *scales);
    return rc ? rc : write_output(a->prefix, "offset", &offset, sizeof offset);
}

static int run_int8(const qc_quant_ops *ops, const arguments *a, const bytes *in, uint8_t *codes,
                    float *scales)
{
    qc_piece_sums sums;
    uint64_t n = in->len / (qc_dtype_bits(a->dtype) / 8);
    if (a->cols == 0 || n % a->cols)
        return usage("--cols does not divide the tensor");
    ops->int8_rows_quantize(in->data, a->dtype, n / a->cols, a->cols, (int8_t *)codes, scales,
                            &sums);
    int rc = check_sums(&sums);
    if (rc == 0)
        rc = write_output(a->prefix, "codes", codes, n);
    return rc ? rc : write_output(a->prefix, "scb", scales, n / a->cols * sizeof *scales);
}

int main(int argc, char **argv)
{
    arguments a;
    bytes in;
    qc_isa isa;
    qc_error err;
    int rc = parse(&a, argc, argv);
    if (rc)
        return rc;
    if (qc_isa_select(&isa, &err) != QC_OK)
        return usage(err.msg);
    rc = read_input(&in);
    /* as many as elements: enough for every command */
    uint8_t *codes = rc ? NULL : calloc(in.len + 1, 1);
    float *scales = rc ? NULL : calloc(in.len + 1, sizeof *scales);
    const qc_quant_ops *ops = qc_quant_ops_for(isa);
    if (rc || !codes || !scales)
        rc = 1;
    else if (strcmp(a.command, "nf4") == 0)
        rc = run_nf4(ops, &a, &in, codes, scales);
    else if (strcmp(a.command, "nested") == 0)
        rc = run_nested(ops, &a, &in, codes, scales);
    else if (strcmp(a.command, "int8") == 0)
        rc = run_int8(ops, &a, &in, codes, scales);
    else
        rc = usage(a.command);
    free(scales);
    free(codes);
    free(in.data);
    return rc;
}
