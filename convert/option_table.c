#include "convert/option_table.h"

#include <stdio.h>
#include <string.h>

#define CONVERT  QC_CMD_BIT(QC_CMD_CONVERT)
#define INSPECT  QC_CMD_BIT(QC_CMD_INSPECT)
#define VERIFY   QC_CMD_BIT(QC_CMD_VERIFY)
#define UNPACK   QC_CMD_BIT(QC_CMD_UNPACK)
#define WORKING  (CONVERT | VERIFY | UNPACK)
#define ANSWERS  (CONVERT | VERIFY | INSPECT | UNPACK)
#define ANYWHERE (ANSWERS | QC_CMD_BIT(QC_CMD_HELP))

const char *const qc_option_group_titles[QC_GROUP_COUNT] = {
    [QC_GROUP_OUTPUT] = "What is written",
    [QC_GROUP_TENSORS] = "Which tensors",
    [QC_GROUP_RUN] = "How it runs",
    [QC_GROUP_OTHER] = "Other",
};

/* clang-format off */
const qc_option_row qc_option_table[QC_OPT_COUNT] = {
    {.id = QC_OPT_TO, .name = "to", .commands = CONVERT, .group = QC_GROUP_OUTPUT,
     .kind = QC_ARG_CHOICE, .choices = {"nf4", "int8", "fp16", "bf16"},
     .dflt_note = "required", .since = "0.1.0",
     .help = "what the weights of linear layers become",
     .more = "nf4: 4-bit NormalFloat in blocks, as bitsandbytes stores it. int8: one scale per "
             "row, as LLM.int8 stores it, or per block with --block-size. fp16 and bf16: every "
             "floating-point tensor is cast; of a checkpoint that is quantized already the "
             "quantized weights are turned back and the others go by --rest."},
    {.id = QC_OPT_BLOCK_SIZE, .name = "block-size", .commands = CONVERT, .group = QC_GROUP_OUTPUT,
     .kind = QC_ARG_NUMBER, .arg = "N", .min = 32, .max = 4096,
     .dflt_note = "64 for nf4; int8 goes by rows", .since = "0.1.0",
     .help = "weights that share one scale: a power of two, 32 to 4096",
     .more = "With --to int8 this chooses block-wise int8, a form of qconv's own that "
             "bitsandbytes does not load."},
    {.id = QC_OPT_NO_DOUBLE_QUANT, .name = "no-double-quant", .commands = CONVERT,
     .group = QC_GROUP_OUTPUT, .kind = QC_ARG_NONE, .since = "0.1.0",
     .help = "keep block scales as float32 instead of quantizing them too",
     .more = "Costs about 0.37 bits per weight at block size 64. With --to int8 it needs "
             "--block-size."},
    {.id = QC_OPT_COMPUTE_DTYPE, .name = "compute-dtype", .commands = CONVERT,
     .group = QC_GROUP_OUTPUT, .kind = QC_ARG_CHOICE,
     .choices = {"bfloat16", "float16", "float32"}, .dflt_note = "the model's own dtype",
     .since = "0.1.0", .help = "dtype that loaders are told to compute in",
     .more = "Goes to quantization_config in config.json; no stored weight depends on it."},
    {.id = QC_OPT_COMPRESS, .name = "compress", .commands = CONVERT, .group = QC_GROUP_OUTPUT,
     .kind = QC_ARG_TEXT, .arg = "none|zstd[:LEVEL]", .dflt = "zstd:1", .since = "0.1.0",
     .help = "compression of the shards, level 1 to 19",
     .more = "zstd writes .safetensors.zst files in the Zstandard seekable format; 'zstd -d' and "
             "'qconv unpack' both turn them into plain .safetensors files. none writes those at "
             "once."},
    {.id = QC_OPT_MAX_SHARD_SIZE, .name = "max-shard-size", .commands = CONVERT,
     .group = QC_GROUP_OUTPUT, .kind = QC_ARG_SIZE, .arg = "SIZE", .dflt = "5GB",
     .since = "0.1.0", .help = "bytes of tensors in one shard, before compression",
     .more = "A weight and its scales stay together, so one that is larger gets a shard of its "
             "own."},
    {.id = QC_OPT_REST, .name = "rest", .commands = CONVERT, .group = QC_GROUP_TENSORS,
     .kind = QC_ARG_CHOICE, .choices = {"keep", "bf16", "fp16"}, .dflt = "keep",
     .since = "0.1.0", .help = "what floating-point tensors that are not quantized become",
     .more = "keep leaves them bit for bit as they are. With --to fp16 and --to bf16 it counts "
             "only for a checkpoint that is quantized already."},
    {.id = QC_OPT_KEEP, .name = "keep", .commands = CONVERT, .group = QC_GROUP_TENSORS,
     .kind = QC_ARG_TEXT, .arg = "GLOB", .since = "0.1.0",
     .help = "leave tensors with these names as they are; may be repeated",
     .more = "'*' stands for any run of characters, dots included, '?' for one, '[a-z]' for one "
             "of a class. The glob must match the whole name. Of several --keep and --quantize "
             "that match, the last one wins. A glob that matches no tensor is an error."},
    {.id = QC_OPT_QUANTIZE, .name = "quantize", .commands = CONVERT, .group = QC_GROUP_TENSORS,
     .kind = QC_ARG_TEXT, .arg = "GLOB", .since = "0.1.0",
     .help = "quantize tensors with these names; may be repeated",
     .more = "For what --keep excluded before, or a linear layer that the model's recipe leaves "
             "alone. Only with --to nf4 and --to int8."},
    {.id = QC_OPT_RECIPE, .name = "recipe", .commands = CONVERT, .group = QC_GROUP_TENSORS,
     .kind = QC_ARG_FILE, .arg = "FILE", .since = "0.1.0",
     .help = "read --keep and --quantize rules from a JSON file",
     .more = "{\"rules\": [{\"keep\": \"GLOB\"}, {\"quantize\": \"GLOB\"}]}. Its rules come "
             "before those of the command line. Unknown members are refused."},
    {.id = QC_OPT_DRY_RUN, .name = "dry-run", .commands = CONVERT, .group = QC_GROUP_RUN,
     .kind = QC_ARG_NONE, .since = "0.1.0",
     .help = "show what would be written, with exact sizes; write nothing",
     .more = "OUT may be left out; if it is given, it is checked."},
    {.id = QC_OPT_FORCE, .name = "force", .commands = CONVERT | UNPACK, .group = QC_GROUP_RUN,
     .kind = QC_ARG_NONE, .since = "0.1.0",
     .help = "write into a directory that holds other files than a qconv output",
     .more = "An empty directory and one that holds a qconv output need no --force: the old "
             "output is replaced. Nothing is ever written to the source or below it."},
    {.id = QC_OPT_THREADS, .name = "threads", .commands = WORKING, .group = QC_GROUP_RUN,
     .kind = QC_ARG_NUMBER, .arg = "N", .min = 1, .max = 1024,
     .dflt_note = "one per processor", .since = "0.1.0",
     .help = "threads that work, 1 to 1024",
     .more = "The bytes written do not depend on it."},
    {.id = QC_OPT_PROGRESS, .name = "progress", .commands = WORKING, .group = QC_GROUP_RUN,
     .kind = QC_ARG_CHOICE, .choices = {"auto", "always", "never"}, .dflt = "auto",
     .since = "0.1.0", .help = "progress on standard error",
     .more = "auto: a bar on a terminal, a plain line now and then elsewhere. always: the bar "
             "wherever standard error goes."},
    {.id = QC_OPT_JSON, .name = "json", .commands = ANSWERS, .group = QC_GROUP_OTHER,
     .kind = QC_ARG_NONE, .since = "0.1.0",
     .help = "write the result to standard output as one JSON object"},
    {.id = QC_OPT_QUIET, .name = "quiet", .letter = 'q', .commands = ANYWHERE,
     .group = QC_GROUP_OTHER, .kind = QC_ARG_NONE, .since = "0.1.0",
     .help = "no progress, no summary, no warnings; errors only",
     .more = "What was asked for with --json, --dry-run or inspect is still printed."},
    {.id = QC_OPT_VERBOSE, .name = "verbose", .letter = 'v', .commands = ANYWHERE,
     .group = QC_GROUP_OTHER, .kind = QC_ARG_NONE, .since = "0.1.0",
     .help = "say more; -vv still more",
     .more = "-v: what is about to be done, every stored tensor with inspect, and where in the "
             "source an error was found. -vv: the error of every quantized tensor."},
    {.id = QC_OPT_HELP, .name = "help", .letter = 'h', .commands = ANYWHERE,
     .group = QC_GROUP_OTHER, .kind = QC_ARG_NONE, .since = "0.1.0",
     .help = "show this help"},
    {.id = QC_OPT_VERSION, .name = "version", .commands = ANYWHERE, .group = QC_GROUP_OTHER,
     .kind = QC_ARG_NONE, .since = "0.1.0", .alone = 1, .help = "show the version"},
    {.id = QC_OPT_MAN, .name = "man", .commands = ANYWHERE, .group = QC_GROUP_OTHER,
     .kind = QC_ARG_NONE, .since = "0.1.0", .hidden = 1, .alone = 1,
     .help = "write this manual page",
     .more = "To read it: qconv --man > qconv.1, then man -l qconv.1."},
    {.id = QC_OPT_COMPLETION, .name = "completion", .commands = ANYWHERE, .group = QC_GROUP_OTHER,
     .kind = QC_ARG_CHOICE, .choices = {"bash", "zsh", "fish"}, .since = "0.1.0", .hidden = 1,
     .alone = 1, .help = "write the completion for a shell",
     .more = "In bash: source <(qconv --completion bash)."},
};
/* clang-format on */

const qc_command_row qc_command_table[] = {
    {.command = QC_CMD_CONVERT,
     .name = "convert",
     .synopsis = "[convert] --to {nf4,int8,fp16,bf16} [OPTION]... MODEL OUT",
     .summary = "convert a checkpoint; the word may be left out",
     .text = "Convert the Hugging Face checkpoint MODEL (a directory, or one .safetensors file) "
             "and write the result to the directory OUT. Weights of linear layers are "
             "quantized or cast; embeddings, norms, routers and the output head stay as they "
             "are unless options say otherwise.\n"
             "\n"
             "The output depends on the input and the options only, not on the number of "
             "threads. At the end a summary gives time, rate, sizes, bits per weight and the "
             "tensor with the largest error.",
     .places = {{"MODEL", QC_PLACE_PATH, 0}, {"OUT", QC_PLACE_DIR, 0}},
     .place_count = 2,
     .examples = "qconv --to nf4 Llama-3.1-8B llama-nf4\n"
                 "4-bit weights that transformers and bitsandbytes load\n"
                 "qconv --to int8 --keep '*.down_proj.*' model out\n"
                 "8-bit weights, some layers left alone\n"
                 "qconv --to nf4 --dry-run model\n"
                 "what would become of every tensor, and how large the result is\n"
                 "qconv --to bf16 llama-nf4 llama-bf16\n"
                 "back to 16 bits\n"},
    {.command = QC_CMD_INSPECT,
     .name = "inspect",
     .synopsis = "inspect [OPTION]... DIR|FILE",
     .summary = "list tensors, dtypes, schemes and sizes",
     .text = "List the tensors of a checkpoint directory, of a qconv output, or of one "
             ".safetensors or .safetensors.zst file, with totals. Only headers are read. For a "
             "qconv output the manifest's facts are shown too: source, options, error per "
             "tensor.",
     .places = {{"DIR|FILE", QC_PLACE_PATH, 0}},
     .place_count = 1,
     .examples = "qconv inspect llama-nf4\n"
                 "tensors and totals\n"
                 "qconv inspect --json model-00001-of-00004.safetensors\n"
                 "one file, for a program to read\n"},
    {.command = QC_CMD_VERIFY,
     .name = "verify",
     .synopsis = "verify [OPTION]... OUT",
     .summary = "check every byte of an output against its hashes",
     .text = "Read the whole qconv output OUT and compare it with its manifest, qconv.json. Exit "
             "code 4, and the first fault named, if anything differs.",
     .places = {{"OUT", QC_PLACE_DIR, 0}},
     .place_count = 1,
     .examples = "qconv verify llama-nf4\n"
                 "check it after a copy\n"},
    {.command = QC_CMD_UNPACK,
     .name = "unpack",
     .synopsis = "unpack [OPTION]... OUT DIR",
     .summary = "decompress an output to plain .safetensors files",
     .text = "Write the qconv output OUT to the directory DIR with its shards decompressed, "
             "ready for from_pretrained, checking the hashes on the way. The result equals that "
             "of converting with --compress none, byte for byte.",
     .places = {{"OUT", QC_PLACE_DIR, 0}, {"DIR", QC_PLACE_DIR, 0}},
     .place_count = 2,
     .examples = "qconv unpack llama-nf4 plain\n"
                 "for loaders that do not read .zst\n"},
    {.command = QC_CMD_HELP,
     .name = "help",
     .synopsis = "help [COMMAND]",
     .summary = "show help on a command",
     .text = "Show the overview, or the help of a command.",
     .places = {{"COMMAND", QC_PLACE_COMMAND, 1}},
     .place_count = 1},
};
const unsigned qc_command_count = sizeof qc_command_table / sizeof *qc_command_table;

const qc_text_row qc_exit_code_table[] = {
    {"0", "done"},
    {"1", "input or output failed, no memory, or an internal error"},
    {"2", "wrong usage"},
    {"3", "the input breaks a rule of its format, is not supported, or holds a bad value"},
    {"4", "a check failed"},
    {"5", "no such device"},
    {"130", "interrupted"},
};
const unsigned qc_exit_code_count = sizeof qc_exit_code_table / sizeof *qc_exit_code_table;

const qc_text_row qc_environment_table[] = {
    {"NO_COLOR", "if set and not empty, nothing is coloured"},
    {"QCONV_ISA", "code path to take: scalar, avx2 or avx512; the best one if not set"},
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
    for (unsigned i = 0; i < QC_MAX_CHOICES && row->choices[i]; i++) {
        n = snprintf(out + used, QC_SPELLED_BYTES - used, "%s%s", i ? "," : " {", row->choices[i]);
        used += n > 0 ? (size_t)n : 0;
    }
    if (row->choices[0])
        (void)snprintf(out + used, QC_SPELLED_BYTES - used, "}");
}
