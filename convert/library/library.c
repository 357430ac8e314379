#include "convert/library/library.h"

#include "convert/library/values.h"
#include "formats/device_reader.h"
#include "kernels/matmul_experts.h"
#include "kernels/matmul_plan.h"
#include "quant/weight_slice.h"

#include <string.h>

const char *qc_version(void)
{
    return QCONV_VERSION;
}

size_t qc_abi_size(const char *name)
{
#define ROW(type) #type, sizeof(type)
    static const struct {
        const char *name;
        size_t bytes;
    } rows[] = {{ROW(qc_cuda_device)},   {ROW(qc_error)},          {ROW(qc_form)},
                {ROW(qc_matmul_cpu_io)}, {ROW(qc_matmul_experts)}, {ROW(qc_matmul_experts_io)},
                {ROW(qc_matmul_io)},     {ROW(qc_matmul_planned)}, {ROW(qc_matmul_weights)},
                {ROW(qc_reader_device)}, {ROW(qc_reader_options)}, {ROW(qc_reader_pieces)},
                {ROW(qc_reader_slice)},  {ROW(qc_reader_tensor)},  {ROW(qc_values_options)},
                {ROW(qc_values_tensor)}, {ROW(qc_weights)},        {ROW(qc_weights_cuts)},
                {ROW(qc_weights_part)},  {ROW(qc_weights_read)}};
#undef ROW
    for (size_t i = 0; name && i < sizeof rows / sizeof *rows; i++)
        if (strcmp(rows[i].name, name) == 0)
            return rows[i].bytes;
    return 0;
}
