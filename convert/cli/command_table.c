/* The commands, and the tables that help prints beside them. */
#include "convert/cli/option_table.h"

#include <stdio.h>
#include <string.h>

/* What other tools call the arguments that are no options here. */
#define READ_NAMES                                                                                 \
    "model in input i m src source from model-path model-dir model-id path checkpoint "            \
    "pretrained-model-name-or-path"
#define WRITTEN_NAMES                                                                              \
    "out output o output-dir out-dir outdir output-path outfile output-file output-folder dest "   \
    "dst destination target save save-to save-path to-dir"

const qc_command_row qc_command_table[] = {
    {.command = QC_CMD_CONVERT,
     .name = "convert",
     .foreign = "quantize quantise quant quantization compress cast dequantize dequantise run",
     .summary = "convert a checkpoint; the word convert may be left out",
     .text = "Convert the Hugging Face checkpoint MODEL (a directory, or one .safetensors "
             "file) and write the result to the directory OUT. Weights of linear layers "
             "are quantized or cast. Embeddings, norms, routers and the output head stay as "
             "they are unless options say otherwise.\n"
             "\n"
             "The output depends on the input and the options only, not on the number of "
             "threads. At the end a summary gives the time, the rate, the sizes, the bits per "
             "weight and the tensor with the largest error.",
     .places = {{"MODEL", QC_PLACE_PATH, 0, READ_NAMES}, {"OUT", QC_PLACE_DIR, 0, WRITTEN_NAMES}},
     .place_count = 2,
     .examples = "qconv --to nf4 Llama-3.1-8B llama-nf4\n"
                 "write 4-bit weights that transformers and bitsandbytes load\n"
                 "qconv --to int8 --keep '*.down_proj.*' model out\n"
                 "write 8-bit weights, and leave some layers alone\n"
                 "qconv --to nf4 --dry-run model\n"
                 "show what would become of every tensor, and how large the result is\n"
                 "qconv --to auto --vram 2x40GB model out\n"
                 "be as precise as two cards allow, with shards of its own for each\n"
                 "qconv --to bf16 llama-nf4 llama-bf16\n"
                 "go back to 16 bits\n"},
    {.command = QC_CMD_PLAN,
     .name = "plan",
     .foreign = "fit fits estimate memory mem vram size dry-run place",
     .summary = "work out what fits on which device; writes nothing",
     .text = "Work out where the converted checkpoint would lie on the devices of --vram. The "
             "plan shows the weights, the KV cache, the workspace and the CUDA context of each "
             "device, what is left there, the longest context and the largest batch. If the "
             "model does not fit, it says by how much, and what would fit. MODEL is a "
             "checkpoint (only headers are read), a config.json or a directory that holds one "
             "and no weights, or the name of a well-known model.\n"
             "\n"
             "A plan that does not fit is an answer too: its exit code is 0. "
             "docs/theory/sizes.md has every formula.",
     .places = {{"MODEL", QC_PLACE_PATH, 0, READ_NAMES}},
     .place_count = 1,
     .examples = "qconv plan Llama-3.3-70B-Instruct --vram 2x40GB\n"
                 "plan a well-known model in NF4 on two cards\n"
                 "qconv plan model --vram 24GB+16GB --to int8 --context 32768\n"
                 "plan unequal cards and a long context\n"
                 "qconv plan model --vram 3090+cpu:64GB\n"
                 "let layers that do not fit go to the host\n"
                 "qconv plan model --vram 2x40GB --to auto --explain\n"
                 "find the best precision that fits, and say why\n"},
    {.command = QC_CMD_HARDWARE,
     .name = "hardware",
     .foreign = "gpu gpus device devices hw cards system nvidia-smi smi",
     .summary = "show GPUs, processor and memory, and what qconv would choose",
     .text = "List the GPUs of this machine (or those of --as) and what they can do, the "
             "processor, the memory and the disk. Then say what qconv would choose for them, "
             "and why.",
     .place_count = 0,
     .examples = "qconv hardware\n"
                 "describe this machine\n"
                 "qconv hardware --as 2xA100-40GB\n"
                 "describe the machine that you will get\n"},
    {.command = QC_CMD_INSPECT,
     .name = "inspect",
     .foreign = "show info list ls cat dump stat stats view print describe",
     .summary = "list tensors with their dtypes, schemes and sizes",
     .text = "List the tensors of a checkpoint directory, of a qconv output, or of one "
             ".safetensors or .safetensors.zst file, with totals. Only headers are read. For a "
             "qconv output the facts of the manifest are shown too: the source, the options and "
             "the error of each tensor.",
     .places = {{"DIR|FILE", QC_PLACE_PATH, 0, READ_NAMES}},
     .place_count = 1,
     .examples = "qconv inspect llama-nf4\n"
                 "list tensors and totals\n"
                 "qconv inspect --json model-00001-of-00004.safetensors\n"
                 "list one file, for a program to read\n"},
    {.command = QC_CMD_VERIFY,
     .name = "verify",
     .foreign = "check checksum hash compare diff",
     .summary = "check every byte of an output against its hashes",
     .text = "Read the whole qconv output OUT and compare it with its manifest, qconv.json. If "
             "anything differs, verify names the first fault and ends with exit code 4.\n"
             "\n"
             "With --against it also compares OUT with the checkpoint that it was made from: "
             "the names, the bits of tensors that were not quantized, and whether the error of "
             "each quantized tensor is one that its scheme can be expected to leave. "
             "docs/verify.md says how.",
     .places = {{"OUT", QC_PLACE_DIR, 0, READ_NAMES}},
     .place_count = 1,
     .examples = "qconv verify llama-nf4\n"
                 "check an output after a copy\n"
                 "qconv verify llama-nf4 --against Llama-3.1-8B\n"
                 "prove that it is that model\n"},
    {.command = QC_CMD_UNPACK,
     .name = "unpack",
     .foreign = "decompress extract unzip unzst uncompress export",
     .summary = "decompress an output to plain .safetensors files",
     .text = "Write the qconv output OUT to the directory DIR with its shards decompressed, "
             "ready for from_pretrained. The hashes are checked on the way. The result is byte "
             "for byte what converting with --compress none writes. Without DIR the plain shards "
             "take the place of the compressed ones, once all are written and checked.",
     .places = {{"OUT", QC_PLACE_DIR, 0, READ_NAMES}, {"DIR", QC_PLACE_DIR, 1, WRITTEN_NAMES}},
     .place_count = 2,
     .examples = "qconv unpack llama-nf4 plain\n"
                 "make files for loaders that do not read .zst\n"
                 "qconv unpack llama-nf4\n"
                 "the same, in place of the compressed ones\n"},
    {.command = QC_CMD_VALIDATE,
     .name = "validate",
     .foreign = "test accuracy",
     .summary = "measure the products of an output and their speed beside fp16",
     .text = "Measure every quantized layer of the qconv output OUT: how far its weights, and "
             "the products with them, are from those of the checkpoint MODEL that it was made "
             "from, how much of that is the kernel's own rounding, and how long the "
             "multiplication takes beside fp16. Without a GPU the CPU's products of up to 16 rows "
             "are timed alone.\n"
             "\n"
             "If a layer is worse than --max-error or --baseline allow, validate ends with exit "
             "code 4. docs/validate.md says how everything is measured.",
     .places = {{"OUT", QC_PLACE_DIR, 0, READ_NAMES}},
     .place_count = 1,
     .examples = "qconv validate llama-nf4 --against Llama-3.1-8B\n"
                 "show errors and times of every layer\n"
                 "qconv validate out --against model --baseline good.json\n"
                 "test the accuracy in a pipeline\n"},
    {.command = QC_CMD_HELP,
     .name = "help",
     .summary = "show the help of a command",
     .text = "Show the overview, or the help of a command. With --json that is one object: "
             "commands, their options and the exit codes.",
     .places = {{"COMMAND", QC_PLACE_COMMAND, 1, NULL}},
     .place_count = 1},
};
const unsigned qc_command_count = sizeof qc_command_table / sizeof *qc_command_table;

const qc_text_row qc_python_command_table[] = {
    {"eval", "measure perplexity and KL divergence of a model on a text", 0},
    {"calibrate", "convert with codes and scales that a text chooses", 0},
    {"importance", "weigh errors of weights by a text, for --to auto", 0},
    {"plan-training", "find settings for fine-tuning that fit the GPUs", 0},
    {"from-torch", "write the .bin files of PyTorch as .safetensors", 0},
    {"report", "write one HTML page about an output: sizes, errors, perplexity", 0},
};
const unsigned qc_python_command_count =
    sizeof qc_python_command_table / sizeof *qc_python_command_table;

const qc_text_row qc_exit_code_table[] = {
    {"0", "done", 0},
    {"1", "input or output failed, memory ran out, or qconv has an internal error", 0},
    {"2", "the command line is wrong", 0},
    {"3", "the input breaks a rule of its format, is not supported, or holds a bad value", 0},
    {"4", "a check failed",
     QC_CMD_BIT(QC_CMD_CONVERT) | QC_CMD_BIT(QC_CMD_VERIFY) | QC_CMD_BIT(QC_CMD_UNPACK) |
         QC_CMD_BIT(QC_CMD_VALIDATE) | QC_CMD_BIT(QC_CMD_INSPECT) | QC_CMD_BIT(QC_CMD_PLAN)},
    {"5", "there is no such device", ~(QC_CMD_BIT(QC_CMD_UNPACK) | QC_CMD_BIT(QC_CMD_INSPECT))},
    {"130", "it was interrupted", 0},
};
const unsigned qc_exit_code_count = sizeof qc_exit_code_table / sizeof *qc_exit_code_table;

const qc_text_row qc_environment_table[] = {
    {"NO_COLOR", "nothing is coloured if this is set and not empty", 0},
    {"CUDA_VISIBLE_DEVICES", "the GPUs that count, as indices or UUIDs; none if it is empty", 0},
    {"QCONV_DEVICE", "the devices to use, as --device says it: auto, cpu, cuda or cuda:0,2", 0},
    {"QCONV_ISA", "the code path to take: scalar, avx2 or avx512; the best one if it is not set",
     0},
};
const unsigned qc_environment_count = sizeof qc_environment_table / sizeof *qc_environment_table;

const qc_command_row *qc_command_row_of(qc_command command)
{
    for (unsigned i = 0; i < qc_command_count; i++)
        if (qc_command_table[i].command == command)
            return &qc_command_table[i];
    return NULL;
}

const qc_command_row *qc_command_row_named(const char *name)
{
    for (unsigned i = 0; i < qc_command_count; i++)
        if (strcmp(qc_command_table[i].name, name) == 0)
            return &qc_command_table[i];
    return NULL;
}

void qc_option_spell(const qc_option_row *row, char out[QC_SPELLED_BYTES])
{
    size_t used = 0;
    int n = snprintf(out, QC_SPELLED_BYTES, "--%s", row->name);
    used = n > 0 ? (size_t)n : 0;
    if (row->arg) {
        (void)snprintf(out + used, QC_SPELLED_BYTES - used, " %s", row->arg);
        return;
    }
    for (unsigned i = 0; row->choices && row->choices[i]; i++) {
        n = snprintf(out + used, QC_SPELLED_BYTES - used, "%s%s", i ? "," : " {", row->choices[i]);
        used += n > 0 ? (size_t)n : 0;
    }
    if (row->choices)
        (void)snprintf(out + used, QC_SPELLED_BYTES - used, "}");
}

static void put(char out[QC_USAGE_BYTES], const char *before, const char *text, const char *after)
{
    size_t used = strlen(out);
    (void)snprintf(out + used, QC_USAGE_BYTES - used, "%s%s%s", before, text, after);
}

void qc_command_usage(const qc_command_row *row, const qc_option_row *rows,
                      char out[QC_USAGE_BYTES])
{
    char spelled[QC_SPELLED_BYTES];
    const int first = row == qc_command_table; /* its name may be left out */
    out[0] = '\0';
    put(out, first ? "[" : "", row->name, first ? "]" : "");
    for (const qc_option_row *r = rows; r->name; r++)
        if (r->required & QC_CMD_BIT(row->command)) {
            qc_option_spell(r, spelled);
            put(out, " ", spelled, "");
        }
    if (row->command != QC_CMD_HELP)
        put(out, "", " [OPTION]...", "");
    for (unsigned i = 0; i < row->place_count; i++)
        put(out, row->places[i].optional ? " [" : " ", row->places[i].name,
            row->places[i].optional ? "]" : "");
}
