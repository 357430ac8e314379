#include "convert/option_table.h"

#include <stdio.h>
#include <string.h>

#define CONVERT   QC_CMD_BIT(QC_CMD_CONVERT)
#define INSPECT   QC_CMD_BIT(QC_CMD_INSPECT)
#define VERIFY    QC_CMD_BIT(QC_CMD_VERIFY)
#define UNPACK    QC_CMD_BIT(QC_CMD_UNPACK)
#define PLAN      QC_CMD_BIT(QC_CMD_PLAN)
#define HARDWARE  QC_CMD_BIT(QC_CMD_HARDWARE)
#define VALIDATE  QC_CMD_BIT(QC_CMD_VALIDATE)
#define BENCH     QC_CMD_BIT(QC_CMD_BENCH)
#define EVAL      QC_CMD_BIT(QC_CMD_EVAL)
#define REPORT    QC_CMD_BIT(QC_CMD_REPORT)
#define FITTING   (CONVERT | PLAN)
#define READING   (EVAL | REPORT)
#define MEASURING (VALIDATE | BENCH)
#define WORKING   (CONVERT | VERIFY | UNPACK | VALIDATE | READING)
#define ANSWERS   (CONVERT | VERIFY | INSPECT | UNPACK | PLAN | HARDWARE | MEASURING | READING)
#define ANYWHERE  (ANSWERS | QC_CMD_BIT(QC_CMD_HELP))

const char *const qc_option_group_titles[QC_GROUP_COUNT] = {
    [QC_GROUP_OUTPUT] = "What is written",
    [QC_GROUP_TENSORS] = "Which tensors",
    [QC_GROUP_FIT] = "Where it is to run",
    [QC_GROUP_TRAIN] = "Training",
    [QC_GROUP_MEASURE] = "What is measured",
    [QC_GROUP_RUN] = "How it runs",
    [QC_GROUP_OTHER] = "Other",
};

/* clang-format off */
const qc_option_row qc_option_table[QC_OPT_COUNT] = {
    {.id = QC_OPT_TO, .name = "to", .commands = FITTING, .group = QC_GROUP_OUTPUT,
     .kind = QC_ARG_CHOICE,
     .choices = {"nf4", "int8", "auto", "fp16", "bf16", "keep"},
     .dflt_note = "required; plan: nf4, or keep for what is quantized already", .since = "0.1.0",
     .help = "what the weights of linear layers become",
     .more = "nf4: 4-bit NormalFloat in blocks, as bitsandbytes stores it. int8: one scale per "
             "row, as LLM.int8 stores it, or per block with --block-size. auto: for each weight one "
             "of these or 16 bit, so that the predicted error is least within --vram. fp16 and bf16: every "
             "floating-point tensor is cast; of a checkpoint that is quantized already the "
             "quantized weights are turned back and the others go by --rest. keep: every tensor bit "
             "for bit, in shards cut, compressed and hashed anew."},
    {.id = QC_OPT_BLOCK_SIZE, .name = "block-size", .commands = FITTING, .group = QC_GROUP_OUTPUT,
     .kind = QC_ARG_NUMBER, .arg = "N", .min = 32, .max = 4096,
     .dflt_note = "64 for nf4; int8 goes by rows", .since = "0.1.0",
     .help = "weights that share one scale: a power of two, 32 to 4096",
     .more = "With --to int8 this chooses block-wise int8, a form of qconv's own that "
             "bitsandbytes does not load."},
    {.id = QC_OPT_NO_DOUBLE_QUANT, .name = "no-double-quant", .commands = FITTING,
     .group = QC_GROUP_OUTPUT, .kind = QC_ARG_NONE, .since = "0.1.0",
     .help = "keep block scales as float32 instead of quantizing them too",
     .more = "Costs about 0.37 bits per weight at block size 64. With --to int8 it needs "
             "--block-size."},
    {.id = QC_OPT_SCALE, .name = "scale", .commands = CONVERT, .group = QC_GROUP_OUTPUT,
     .kind = QC_ARG_CHOICE, .choices = {"absmax", "search", "refit"}, .dflt = "search",
     .since = "0.4.0", .help = "how the scale of a block, or of a row, is found",
     .more = "absmax: its largest value, as bitsandbytes does. search: the scale of least squared "
             "error among those that can be stored. refit: that, with the scales of the scales "
             "fitted to it too; slower. The files have the same form and size."},
    {.id = QC_OPT_CALIBRATE, .name = "calibrate", .commands = CONVERT, .group = QC_GROUP_OUTPUT,
     .kind = QC_ARG_FILE, .arg = "FILE|default", .since = "0.5.0",
     .help = "choose codes and scales for least error in the layers' outputs on this text",
     .more = "Text, or token ids in a file whose name ends in .ids; default is a text that comes "
             "with qconv. The model reads it layer by layer, and each weight is quantized for the "
             "inputs that it sees. The files have the same form and size. With --to nf4 and --to "
             "int8; what has no such inputs goes by --scale. docs/calibration.md has more."},
    {.id = QC_OPT_HESSIANS, .name = "hessians", .commands = CONVERT, .group = QC_GROUP_OUTPUT,
     .kind = QC_ARG_FILE, .arg = "PATH", .since = "0.5.0",
     .help = "as --calibrate, from second moments of inputs that were captured elsewhere",
     .more = "A safetensors file, or a folder of them, as docs/calibration.md describes: for "
             "models whose forward pass qconv does not know."},
    {.id = QC_OPT_CALIBRATION_TOKENS, .name = "calibration-tokens", .commands = CONVERT,
     .group = QC_GROUP_OUTPUT, .kind = QC_ARG_NUMBER, .arg = "N", .min = 2, .max = 1000000000000,
     .dflt_note = "131072, or all of the text", .since = "0.5.0",
     .help = "read no more of the calibration text than this",
     .more = "Of a longer text windows are taken that are spread over all of it."},
    {.id = QC_OPT_CALIBRATION_CONTEXT, .name = "calibration-context", .commands = CONVERT,
     .group = QC_GROUP_OUTPUT, .kind = QC_ARG_NUMBER, .arg = "TOKENS", .min = 2,
     .max = 1000000000, .dflt_note = "2048, or the model's limit", .since = "0.5.0",
     .help = "tokens of a window; the calibration text is cut into such"},
    {.id = QC_OPT_DAMPING, .name = "damping", .commands = CONVERT, .group = QC_GROUP_OUTPUT,
     .kind = QC_ARG_DECIMAL, .arg = "X", .dflt_note = "0.1, more with few tokens", .since = "0.5.0",
     .help = "how much calibrating trusts weights more than the text",
     .more = "A share of each input's mean square, and of a tenth of their mean, that is added to "
             "it; above 0 and at most 1. "
             "Default: 0.1 + 4 N / tokens for N inputs. Raised, with a message, where it is too "
             "small to compute with."},
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
    {.id = QC_OPT_MAX_SHARD_SIZE, .name = "max-shard-size", .commands = FITTING,
     .group = QC_GROUP_OUTPUT, .kind = QC_ARG_SIZE, .arg = "SIZE", .dflt = "5GB",
     .since = "0.1.0", .help = "bytes of tensors in one shard, before compression",
     .more = "A weight and its scales stay together, so one that is larger gets a shard of its "
             "own."},
    {.id = QC_OPT_REST, .name = "rest", .commands = FITTING, .group = QC_GROUP_TENSORS,
     .kind = QC_ARG_CHOICE, .choices = {"keep", "bf16", "fp16"}, .dflt = "keep",
     .since = "0.1.0", .help = "what floating-point tensors that are not quantized become",
     .more = "keep leaves them bit for bit as they are. With --to fp16 and --to bf16 it counts "
             "only for a checkpoint that is quantized already."},
    {.id = QC_OPT_KEEP, .name = "keep", .commands = FITTING, .group = QC_GROUP_TENSORS,
     .kind = QC_ARG_TEXT, .arg = "GLOB", .since = "0.1.0",
     .help = "leave tensors with these names as they are; may be repeated",
     .more = "'*' stands for any run of characters, dots included, '?' for one, '[a-z]' for one "
             "of a class. The glob must match the whole name. Of several --keep and --quantize "
             "that match, the last one wins. A glob that matches no tensor is an error."},
    {.id = QC_OPT_QUANTIZE, .name = "quantize", .commands = FITTING, .group = QC_GROUP_TENSORS,
     .kind = QC_ARG_TEXT, .arg = "GLOB", .since = "0.1.0",
     .help = "quantize tensors with these names; may be repeated",
     .more = "For what --keep excluded before, or a linear layer that the model's recipe leaves "
             "alone. Only with --to nf4 and --to int8."},
    {.id = QC_OPT_RECIPE, .name = "recipe", .commands = FITTING, .group = QC_GROUP_TENSORS,
     .kind = QC_ARG_FILE, .arg = "FILE", .since = "0.1.0",
     .help = "read --keep and --quantize rules from a JSON file",
     .more = "{\"rules\": [{\"keep\": \"GLOB\"}, {\"quantize\": \"GLOB\"}]}. Its rules come "
             "before those of the command line. Unknown members are refused."},
    {.id = QC_OPT_REQUANTIZE, .name = "requantize", .commands = FITTING,
     .group = QC_GROUP_TENSORS, .kind = QC_ARG_NONE, .since = "0.2.0",
     .help = "quantize MXFP4 experts anew instead of passing them through",
     .more = "For gpt-oss, whose experts are MXFP4 already: passing them through loses nothing, a "
             "second rounding to NF4 saves 3% of them."},
    {.id = QC_OPT_DROP_MTP, .name = "drop-mtp", .commands = FITTING, .group = QC_GROUP_TENSORS,
     .kind = QC_ARG_NONE, .since = "0.2.0",
     .help = "leave out multi-token prediction layers",
     .more = "DeepSeek-V3 has one behind its last layer; plain decoding does not use it."},
    {.id = QC_OPT_SCHEMES, .name = "schemes", .commands = FITTING, .group = QC_GROUP_TENSORS,
     .kind = QC_ARG_TEXT, .arg = "LIST", .dflt_note = "nf4,nf4-32,int8,16bit", .since = "0.2.0",
     .help = "what --to auto may choose from",
     .more = "Commas between. nf4-32 is NF4 in blocks of 32; 16bit is what a weight is now, FP8 "
             "too. int8 is left out by default where a card does not run it (V100). Of a "
             "checkpoint in 16 bit the result loads in transformers whatever is chosen, if int8 "
             "is not on the list."},
    {.id = QC_OPT_EXPLAIN, .name = "explain", .commands = FITTING, .group = QC_GROUP_TENSORS,
     .kind = QC_ARG_NONE, .since = "0.2.0",
     .help = "with --to auto: show what was chosen for which weights, and why"},
    {.id = QC_OPT_VRAM, .name = "vram", .commands = FITTING, .group = QC_GROUP_FIT,
     .kind = QC_ARG_TEXT, .arg = "SPEC", .dflt_note = "plan: auto", .since = "0.2.0",
     .help = "the devices: 2x40GB, 24GB+16GB, 2xA100-40GB, auto, +cpu:64GB, +disk",
     .more = "Terms joined by '+'. A size (GB is 10^9, GiB is 2^30) or the name of a card, with a "
             "count and an x before it; auto for this machine's GPUs as they are now; cpu and "
             "disk, with a size after a colon, for what the GPUs cannot hold. convert then cuts "
             "shards where devices change and writes device_map.json. docs/hardware.md lists the "
             "cards."},
    {.id = QC_OPT_MARGIN, .name = "margin", .commands = FITTING, .group = QC_GROUP_FIT,
     .kind = QC_ARG_DECIMAL, .arg = "SHARE", .dflt = "0.9", .since = "0.2.0",
     .help = "share of each device that may be used, above 0 and at most 1"},
    {.id = QC_OPT_CONTEXT, .name = "context", .commands = FITTING, .group = QC_GROUP_FIT,
     .kind = QC_ARG_NUMBER, .arg = "TOKENS", .min = 1, .max = 1000000000,
     .dflt_note = "8192, or the model's limit", .since = "0.2.0",
     .help = "tokens of one sequence that the KV cache is to hold"},
    {.id = QC_OPT_BATCH, .name = "batch", .commands = FITTING, .group = QC_GROUP_FIT,
     .kind = QC_ARG_NUMBER, .arg = "N", .min = 1, .max = 1000000, .dflt = "1", .since = "0.2.0",
     .help = "sequences at once"},
    {.id = QC_OPT_IMAGES, .name = "images", .commands = FITTING, .group = QC_GROUP_FIT,
     .kind = QC_ARG_NUMBER, .arg = "N", .min = 0, .max = 1000, .dflt = "1", .since = "0.2.0",
     .help = "images per sequence, for models with cross-attention"},
    {.id = QC_OPT_KV_DTYPE, .name = "kv-dtype", .commands = FITTING, .group = QC_GROUP_FIT,
     .kind = QC_ARG_CHOICE, .choices = {"fp16", "bf16", "fp8", "fp32"}, .dflt = "fp16",
     .since = "0.2.0", .help = "element type of the KV cache"},
    {.id = QC_OPT_MLA, .name = "mla", .commands = FITTING, .group = QC_GROUP_FIT,
     .kind = QC_ARG_CHOICE, .choices = {"absorbed", "expanded"}, .dflt = "absorbed",
     .since = "0.2.0", .help = "form in which DeepSeek's attention is cached",
     .more = "absorbed: the latent and the rotary part of a token. expanded: keys and values of "
             "every head, as transformers caches them; 71 times as much for DeepSeek-V2.5."},
    {.id = QC_OPT_CUDA_CONTEXT, .name = "cuda-context", .commands = FITTING,
     .group = QC_GROUP_FIT, .kind = QC_ARG_SIZE, .arg = "SIZE", .dflt = "500MB",
     .since = "0.2.0", .help = "what a CUDA context and its kernels take on every GPU"},
    {.id = QC_OPT_HTML, .name = "html", .commands = PLAN, .group = QC_GROUP_FIT,
     .kind = QC_ARG_FILE, .arg = "FILE", .since = "0.2.0",
     .help = "also write the plan as one HTML page"},
    {.id = QC_OPT_DEVICE_MAP, .name = "device-map", .commands = PLAN, .group = QC_GROUP_FIT,
     .kind = QC_ARG_FILE, .arg = "FILE", .since = "0.2.0",
     .help = "also write the placement as accelerate's device_map"},
    {.id = QC_OPT_DEVICE, .name = "device", .commands = QC_CMD_BIT(QC_CMD_UNPACK),
     .group = QC_GROUP_OUTPUT, .kind = QC_ARG_TEXT, .arg = "NAME", .since = "0.2.0",
     .help = "only the shards of one device of the plan: cuda:0, cpu",
     .more = "For an output that was made with --vram."},
    {.id = QC_OPT_RUN_DEVICE, .name = "device", .commands = CONVERT | MEASURING | READING,
     .group = QC_GROUP_RUN, .kind = QC_ARG_TEXT, .arg = "auto|cpu|cuda[:N,...]",
     .dflt_note = "auto", .since = "0.3.0",
     .help = "what does the work: cpu, every GPU, or GPUs 0 and 2 with cuda:0,2",
     .more = "auto takes the GPUs if there are any and this build has kernels for them, else the "
             "CPU. cpu does not even ask the driver. QCONV_DEVICE says the same where --device is "
             "not given. The bytes written do not depend on it, but for those of --calibrate."},
    {.id = QC_OPT_MODE, .name = "mode", .commands = PLAN, .group = QC_GROUP_TRAIN,
     .kind = QC_ARG_CHOICE, .choices = {"infer", "train"}, .dflt = "infer", .since = "0.2.0",
     .help = "what the model is to do"},
    {.id = QC_OPT_METHOD, .name = "method", .commands = PLAN, .group = QC_GROUP_TRAIN,
     .kind = QC_ARG_CHOICE, .choices = {"full", "lora", "qlora"},
     .dflt_note = "all are tried", .since = "0.2.0", .help = "what is trained"},
    {.id = QC_OPT_OPTIMIZER, .name = "optimizer", .commands = PLAN, .group = QC_GROUP_TRAIN,
     .kind = QC_ARG_CHOICE, .choices = {"adamw", "adam", "adam8bit", "sgd"},
     .dflt_note = "adamw, and adam8bit where it helps", .since = "0.2.0",
     .help = "whose states are kept"},
    {.id = QC_OPT_PRECISION, .name = "precision", .commands = PLAN, .group = QC_GROUP_TRAIN,
     .kind = QC_ARG_CHOICE, .choices = {"bf16", "fp16", "fp32"},
     .dflt_note = "bf16; fp16 on Volta and Turing", .since = "0.2.0",
     .help = "what is computed in; 16 bit keeps float32 master weights"},
    {.id = QC_OPT_ZERO, .name = "zero", .commands = PLAN, .group = QC_GROUP_TRAIN,
     .kind = QC_ARG_NUMBER, .arg = "STAGE", .min = 0, .max = 3, .dflt_note = "chosen",
     .since = "0.2.0", .help = "ZeRO stage over the GPUs, 0 to 3"},
    {.id = QC_OPT_CHECKPOINTING, .name = "checkpointing", .commands = PLAN,
     .group = QC_GROUP_TRAIN, .kind = QC_ARG_CHOICE, .choices = {"on", "off"},
     .dflt_note = "chosen", .since = "0.2.0",
     .help = "keep only the inputs of layers and compute the rest again"},
    {.id = QC_OPT_LORA_RANK, .name = "lora-rank", .commands = PLAN, .group = QC_GROUP_TRAIN,
     .kind = QC_ARG_NUMBER, .arg = "R", .min = 1, .max = 65536, .dflt = "16", .since = "0.2.0",
     .help = "rank of the adapters, on every linear layer"},
    {.id = QC_OPT_EFFECTIVE_BATCH, .name = "effective-batch", .commands = PLAN,
     .group = QC_GROUP_TRAIN, .kind = QC_ARG_NUMBER, .arg = "N", .min = 1, .max = 1000000000,
     .dflt = "32", .since = "0.2.0",
     .help = "sequences per optimizer step over all GPUs; gives the accumulation"},
    {.id = QC_OPT_APPLY, .name = "apply", .commands = PLAN, .group = QC_GROUP_TRAIN,
     .kind = QC_ARG_FILE, .arg = "FILE", .since = "0.2.0",
     .help = "write the best setting as an accelerate or DeepSpeed configuration",
     .more = "JSON. A name with 'deepspeed' or 'ds_' in it gets DeepSpeed's form, any other "
             "accelerate's. What was in FILE is kept as FILE.backup."},
    {.id = QC_OPT_PROFILE, .name = "profile", .commands = PLAN, .group = QC_GROUP_TRAIN,
     .kind = QC_ARG_NONE, .since = "0.2.0",
     .help = "allocate on this machine's GPU and measure, beside the estimate"},
    {.id = QC_OPT_AS, .name = "as", .commands = HARDWARE, .group = QC_GROUP_FIT,
     .kind = QC_ARG_TEXT, .arg = "CARDS", .since = "0.2.0",
     .help = "speak of these cards instead of this machine's: 2xA100-40GB, 3090",
     .more = "docs/hardware.md lists the cards."},
    {.id = QC_OPT_WATCH, .name = "watch", .commands = HARDWARE, .group = QC_GROUP_RUN,
     .kind = QC_ARG_NONE, .since = "0.2.0",
     .help = "follow the memory of every GPU and process"},
    {.id = QC_OPT_CSV, .name = "csv", .commands = HARDWARE, .group = QC_GROUP_RUN,
     .kind = QC_ARG_FILE, .arg = "FILE", .since = "0.2.0",
     .help = "with --watch: also write every sample to a CSV file"},
    {.id = QC_OPT_INTERVAL, .name = "interval", .commands = HARDWARE, .group = QC_GROUP_RUN,
     .kind = QC_ARG_DECIMAL, .arg = "SECONDS", .dflt = "1", .since = "0.2.0",
     .help = "with --watch: time between samples, 0.01 to 3600"},
    {.id = QC_OPT_SAMPLES, .name = "samples", .commands = HARDWARE, .group = QC_GROUP_RUN,
     .kind = QC_ARG_NUMBER, .arg = "N", .min = 1, .max = 1000000000, .since = "0.2.0",
     .dflt_note = "until interrupted", .help = "with --watch: stop after this many"},
    {.id = QC_OPT_AGAINST, .name = "against", .commands = VERIFY | VALIDATE | READING, .group = QC_GROUP_MEASURE,
     .kind = QC_ARG_FILE, .arg = "MODEL", .dflt_note = "validate: required",
     .since = "0.3.0", .help = "the checkpoint that OUT was made from"},
    {.id = QC_OPT_TEXT, .name = "text", .commands = READING, .group = QC_GROUP_MEASURE,
     .kind = QC_ARG_FILE, .arg = "FILE", .dflt_note = "eval: required", .since = "0.4.0",
     .help = "the text to read; FILE.ids: token ids, a sequence a line",
     .more = "UTF-8. A file whose name ends in .ids holds decimal token ids with spaces between, one "
             "sequence a line, taken as they are."},
    {.id = QC_OPT_TOKENIZER, .name = "tokenizer", .commands = READING | CONVERT, .group = QC_GROUP_MEASURE,
     .kind = QC_ARG_FILE, .arg = "PATH", .dflt_note = "the model's own", .since = "0.4.0",
     .help = "a tokenizer.json, or a directory that has one"},
    {.id = QC_OPT_EVAL_CONTEXT, .name = "context", .commands = READING,
     .group = QC_GROUP_MEASURE, .kind = QC_ARG_NUMBER, .arg = "TOKENS", .min = 2,
     .max = 1000000000, .dflt_note = "2048, or the model's limit", .since = "0.4.0",
     .help = "tokens of a window; the text is cut into such"},
    {.id = QC_OPT_MAX_TOKENS, .name = "max-tokens", .commands = READING,
     .group = QC_GROUP_MEASURE, .kind = QC_ARG_NUMBER, .arg = "N", .min = 2,
     .max = 1000000000000, .dflt_note = "all", .since = "0.4.0",
     .help = "read no more of the text than this"},
    {.id = QC_OPT_MAX_KL, .name = "max-kl", .commands = EVAL, .group = QC_GROUP_MEASURE,
     .kind = QC_ARG_DECIMAL, .arg = "X", .since = "0.4.0",
     .help = "exit code 4 if the mean KL divergence is larger",
     .more = "In nats, above 0 and at most 100."},
    {.id = QC_OPT_EVAL_FILE, .name = "eval", .commands = REPORT, .group = QC_GROUP_MEASURE,
     .kind = QC_ARG_FILE, .arg = "FILE", .since = "0.4.0",
     .help = "take up the result of an earlier 'qconv eval --json'"},
    {.id = QC_OPT_BENCH_FILE, .name = "bench", .commands = REPORT, .group = QC_GROUP_MEASURE,
     .kind = QC_ARG_FILE, .arg = "FILE", .since = "0.4.0",
     .help = "take up the result of an earlier 'qconv bench --json'"},
    {.id = QC_OPT_SAMPLE, .name = "sample", .commands = VALIDATE, .group = QC_GROUP_MEASURE,
     .kind = QC_ARG_NUMBER, .arg = "N", .min = 1, .max = 1000000, .dflt_note = "all",
     .since = "0.3.0", .help = "look at this many of the quantized layers, evenly spread"},
    {.id = QC_OPT_SHAPES, .name = "shapes", .commands = BENCH, .group = QC_GROUP_MEASURE,
     .kind = QC_ARG_TEXT, .arg = "LIST",
     .dflt_note = "the layers of Llama-3.3-70B and Llama-3.1-8B", .since = "0.3.0",
     .help = "weights, outputs x inputs: 8192x8192,8192+1024+1024x8192",
     .more = "With + between outputs, weights that share their input (q, k and v): one launch "
             "of ours, and a product of cuBLAS for each."},
    {.id = QC_OPT_BENCH_SCHEME, .name = "scheme", .commands = BENCH, .group = QC_GROUP_MEASURE,
     .kind = QC_ARG_TEXT, .arg = "LIST", .dflt_note = "nf4,int8", .since = "0.3.0",
     .help = "of nf4, nf4-plain, int8 and int8-blocks",
     .more = "nf4-plain has float32 scales instead of double-quantized ones; int8-blocks has a "
             "scale per block instead of per row."},
    {.id = QC_OPT_M, .name = "m", .commands = MEASURING, .group = QC_GROUP_MEASURE,
     .kind = QC_ARG_TEXT, .arg = "LIST", .min = 1, .max = 1048576,
     .dflt_note = "1,4,16,64,256,1024; bench: 1 to 4096 by powers of two", .since = "0.3.0",
     .help = "rows of activations at once, with commas between"},
    {.id = QC_OPT_ACTIVATIONS, .name = "activations", .commands = VALIDATE,
     .group = QC_GROUP_MEASURE, .kind = QC_ARG_FILE, .arg = "FILE", .dflt_note = "random",
     .since = "0.3.0", .help = "take activations from this .safetensors file",
     .more = "docs/validate.md says what it holds, and how random ones are made."},
    {.id = QC_OPT_BENCH_DTYPE, .name = "dtype", .commands = BENCH, .group = QC_GROUP_MEASURE,
     .kind = QC_ARG_CHOICE, .choices = {"fp16", "bf16"}, .dflt = "fp16", .since = "0.3.0",
     .help = "of activations and results"},
    {.id = QC_OPT_SEED, .name = "seed", .commands = MEASURING, .group = QC_GROUP_MEASURE,
     .kind = QC_ARG_NUMBER, .arg = "N", .min = 0, .max = 9007199254740991, .dflt = "1",
     .since = "0.3.0", .help = "of random numbers"},
    {.id = QC_OPT_PATH, .name = "path", .commands = BENCH, .group = QC_GROUP_MEASURE,
     .kind = QC_ARG_CHOICE, .choices = {"gemv", "mma-884", "mma-16816", "dequant-gemm"},
     .dflt_note = "by shape and GPU", .since = "0.3.0",
     .help = "the kernel to use for every shape"},
    {.id = QC_OPT_ROUNDS, .name = "rounds", .commands = BENCH, .group = QC_GROUP_MEASURE,
     .kind = QC_ARG_NUMBER, .arg = "N", .min = 1, .max = 10000, .dflt = "30", .since = "0.3.0",
     .help = "times everything is measured, at most; the median counts"},
    {.id = QC_OPT_SECONDS, .name = "seconds", .commands = BENCH, .group = QC_GROUP_MEASURE,
     .kind = QC_ARG_NUMBER, .arg = "S", .min = 1, .max = 1000000, .dflt = "150", .since = "0.3.0",
     .help = "time for all of it, about",
     .more = "Where it is short there are fewer rounds; what does not fit at all is left out, and "
             "the result says how much."},
    {.id = QC_OPT_TUNE, .name = "tune", .commands = BENCH, .group = QC_GROUP_MEASURE,
     .kind = QC_ARG_NONE, .since = "0.5.0",
     .help = "find the best kernel, and how to cut its work, for each shape and M",
     .more = "Measures every choice there is against the one that qconv makes by itself, and takes "
             "another one only where it is faster by more than the times spread. docs/bench.md "
             "says how."},
    {.id = QC_OPT_SAVE, .name = "save", .commands = BENCH, .group = QC_GROUP_MEASURE,
     .kind = QC_ARG_FILE, .arg = "FILE", .since = "0.5.0",
     .help = "with --tune: write the better choices as a table for --tuning",
     .more = "An existing file is replaced, at once."},
    {.id = QC_OPT_TUNING, .name = "tuning", .commands = MEASURING | READING,
     .group = QC_GROUP_RUN, .kind = QC_ARG_FILE, .arg = "FILE",
     .dflt_note = "the file that QCONV_TUNING names", .since = "0.5.0",
     .help = "choose GPU kernels by this table of 'qconv bench --tune --save'",
     .more = "One that was made on another GPU is not used, with a warning. The order of sums, and "
             "so the last bits of products, depend on the table."},
    {.id = QC_OPT_MAX_ERROR, .name = "max-error", .commands = VALIDATE,
     .group = QC_GROUP_MEASURE, .kind = QC_ARG_DECIMAL, .arg = "X", .since = "0.3.0",
     .help = "exit code 4 if the relative output error of a layer is larger",
     .more = "Above 0 and at most 10: 0.1 is 10%."},
    {.id = QC_OPT_BASELINE, .name = "baseline", .commands = VALIDATE, .group = QC_GROUP_MEASURE,
     .kind = QC_ARG_FILE, .arg = "FILE", .since = "0.3.0",
     .help = "exit code 4 if a layer is worse than in this earlier run"},
    {.id = QC_OPT_SAVE_BASELINE, .name = "save-baseline", .commands = VALIDATE,
     .group = QC_GROUP_MEASURE, .kind = QC_ARG_FILE, .arg = "FILE", .since = "0.3.0",
     .help = "write this run's errors for --baseline"},
    {.id = QC_OPT_TOLERANCE, .name = "tolerance", .commands = VALIDATE,
     .group = QC_GROUP_MEASURE, .kind = QC_ARG_DECIMAL, .arg = "X", .dflt = "0.001",
     .since = "0.3.0", .help = "with --baseline: how much worse still passes",
     .more = "A share of the earlier error, above 0 and at most 10: 0.001 is 0.1%."},
    {.id = QC_OPT_REPORT_HTML, .name = "html", .commands = VALIDATE | REPORT, .group = QC_GROUP_OTHER,
     .kind = QC_ARG_FILE, .arg = "FILE", .dflt_note = "report: standard output", .since = "0.3.0",
     .help = "write the result as one HTML page, with plots, to a file"},
    {.id = QC_OPT_MARKDOWN, .name = "markdown", .commands = BENCH, .group = QC_GROUP_OTHER,
     .kind = QC_ARG_NONE, .since = "0.3.0",
     .help = "write the result to standard output as Markdown tables"},
    {.id = QC_OPT_OUTPUT, .name = "output", .commands = BENCH, .group = QC_GROUP_OTHER,
     .kind = QC_ARG_FILE, .arg = "FILE", .since = "0.3.0",
     .help = "also write the JSON of --json to a file"},
    {.id = QC_OPT_DRY_RUN, .name = "dry-run", .commands = CONVERT, .group = QC_GROUP_RUN,
     .kind = QC_ARG_NONE, .since = "0.1.0",
     .help = "show what would be written, with exact sizes; write nothing",
     .more = "OUT may be left out; if it is given, it is checked."},
    {.id = QC_OPT_FORCE, .name = "force", .commands = CONVERT | UNPACK, .group = QC_GROUP_RUN,
     .kind = QC_ARG_NONE, .since = "0.1.0",
     .help = "write into a directory that holds other files than a qconv output",
     .more = "An empty directory and one that holds a qconv output need no --force: the old "
             "output is replaced. Nothing is ever written to the source or below it."},
    {.id = QC_OPT_RESTART, .name = "restart", .commands = CONVERT, .group = QC_GROUP_RUN,
     .kind = QC_ARG_NONE, .since = "0.5.0",
     .help = "begin anew instead of continuing an interrupted conversion",
     .more = "What the interrupted one left in OUT is removed. Refused when it has deleted files of "
             "its source (--consume-source): then only continuing gives a whole model."},
    {.id = QC_OPT_CONSUME_SOURCE, .name = "consume-source", .commands = CONVERT,
     .group = QC_GROUP_RUN, .kind = QC_ARG_NONE, .since = "0.5.0",
     .help = "delete each weight file of MODEL once all of it is written to OUT and synced",
     .more = "For disks that hold one copy only. A kill at any moment loses nothing: the same command "
             "continues. What was deleted cannot be checked against OUT afterwards. Weight files "
             "that are links are refused. See docs/cli.md."},
    {.id = QC_OPT_PART, .name = "part", .commands = CONVERT, .group = QC_GROUP_RUN,
     .kind = QC_ARG_TEXT, .arg = "I/N", .dflt_note = "of a Slurm step with several tasks, the task's",
     .since = "0.5.0",
     .help = "do the I-th of N parts of the work, 1 to N; the last to finish completes OUT",
     .more = "For several machines that share MODEL and OUT: the same command on each, with its own "
             "I. 1/1 does all of it whatever the scheduler says. See docs/cluster.md."},
    {.id = QC_OPT_THREADS, .name = "threads", .commands = WORKING, .group = QC_GROUP_RUN,
     .kind = QC_ARG_NUMBER, .arg = "N", .min = 1, .max = 1024,
     .dflt_note = "one per processor", .since = "0.1.0",
     .help = "threads that work, 1 to 1024",
     .more = "The bytes written do not depend on it."},
    {.id = QC_OPT_PROGRESS, .name = "progress", .commands = WORKING | BENCH, .group = QC_GROUP_RUN,
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
     .synopsis = "[convert] --to {nf4,int8,auto,fp16,bf16,keep} [OPTION]... MODEL OUT",
     .summary = "convert a checkpoint; the word may be left out",
     .text = "Convert the Hugging Face checkpoint MODEL (a directory, or one .safetensors or .bin "
             "file) "
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
                 "qconv --to auto --vram 2x40GB model out\n"
                 "as precise as two cards allow, a shard or more for each\n"
                 "qconv --to bf16 llama-nf4 llama-bf16\n"
                 "back to 16 bits\n"},
    {.command = QC_CMD_PLAN,
     .name = "plan",
     .synopsis = "plan [OPTION]... MODEL",
     .summary = "what fits where: devices, memory, context; writes nothing",
     .text = "Work out where the converted checkpoint would lie on the devices of --vram: weights, "
             "KV cache, workspace and CUDA context of each, what is left, the longest context and "
             "the largest batch; or, where it does not fit, by how much, and what would. MODEL is "
             "a checkpoint (only headers are read), a config.json or a directory that holds one "
             "and no weights, or the name of a well-known model.\n"
             "\n"
             "A plan that says no is an answer too: the exit code is 0. docs/planning.md and "
             "docs/training.md have every formula.",
     .places = {{"MODEL", QC_PLACE_PATH, 0}},
     .place_count = 1,
     .examples = "qconv plan Llama-3.3-70B-Instruct --vram 2x40GB\n"
                 "a well-known model in NF4 on two cards\n"
                 "qconv plan model --vram 24GB+16GB --to int8 --context 32768\n"
                 "unequal cards, a long context\n"
                 "qconv plan model --vram 3090+cpu:64GB\n"
                 "layers that do not fit go to the host\n"
                 "qconv plan model --vram 2x40GB --to auto --explain\n"
                 "the best precision that fits, and why\n"
                 "qconv plan model --mode train --vram 4xA100-80GB\n"
                 "settings for fine-tuning\n"},
    {.command = QC_CMD_HARDWARE,
     .name = "hardware",
     .synopsis = "hardware [OPTION]...",
     .summary = "GPUs, processor, memory, and what qconv would choose",
     .text = "List the GPUs of this machine (or those of --as), what they can do, the processor, "
             "memory and disk, and what qconv would choose for them and why.",
     .place_count = 0,
     .examples = "qconv hardware\n"
                 "this machine\n"
                 "qconv hardware --as 2xA100-40GB\n"
                 "the machine you will get\n"
                 "qconv hardware --watch --csv memory.csv\n"
                 "follow memory while something runs\n"},
    {.command = QC_CMD_INSPECT,
     .name = "inspect",
     .synopsis = "inspect [OPTION]... DIR|FILE",
     .summary = "list tensors, dtypes, schemes and sizes",
     .text = "List the tensors of a checkpoint directory, of a qconv output, or of one "
             ".safetensors, .safetensors.zst or PyTorch .bin file, with totals. Only headers are "
             "read. For a "
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
     .synopsis = "verify [OPTION]... OUT [--against MODEL]",
     .summary = "check every byte of an output against its hashes",
     .text = "Read the whole qconv output OUT and compare it with its manifest, qconv.json. Exit "
             "code 4, and the first fault named, if anything differs.\n"
             "\n"
             "With --against also compare OUT with the checkpoint that it was made from: names, "
             "bits of tensors that were not quantized, and the error of every one that was against "
             "what its scheme can be expected to leave. docs/verify.md says how.",
     .places = {{"OUT", QC_PLACE_DIR, 0}},
     .place_count = 1,
     .examples = "qconv verify llama-nf4\n"
                 "check it after a copy\n"
                 "qconv verify llama-nf4 --against Llama-3.1-8B\n"
                 "prove that it is that model\n"},
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
    {.command = QC_CMD_VALIDATE,
     .name = "validate",
     .synopsis = "validate [OPTION]... OUT --against MODEL",
     .summary = "matmul accuracy and speed of an output against fp16",
     .text = "For every quantized layer of the qconv output OUT: how far its weights, and what "
             "they multiply to, are from those of the checkpoint MODEL that it was made from, "
             "how much of that is the kernel's own rounding, and how long the multiplication "
             "takes against fp16. Without a GPU the times are left out.\n"
             "\n"
             "Exit code 4 if a layer is worse than --max-error or --baseline allow. "
             "docs/validate.md says how everything is measured.",
     .places = {{"OUT", QC_PLACE_DIR, 0}},
     .place_count = 1,
     .examples = "qconv validate llama-nf4 --against Llama-3.1-8B\n"
                 "errors and times of every layer\n"
                 "qconv validate out --against model --baseline good.json\n"
                 "an accuracy test for a pipeline\n"},
    {.command = QC_CMD_BENCH,
     .name = "bench",
     .synopsis = "bench [OPTION]...",
     .summary = "speed of the GPU kernels against cuBLAS fp16",
     .text = "Time the multiplication with quantized weights on this machine's GPU, for the layer "
             "shapes of well-known models and many sizes of batch, against cuBLAS in fp16 and "
             "against the rate at which the GPU copies memory. docs/bench.md says how.",
     .place_count = 0,
     .examples = "qconv bench\n"
                 "all shapes, a table\n"
                 "qconv bench --shapes 8192x8192 --m 1,16 --json\n"
                 "one shape, for a program to read\n"
                 "qconv bench --tune --save tuning.json\n"
                 "a table of the best kernels on this GPU, for --tuning\n"},
    {.command = QC_CMD_EVAL,
     .name = "eval",
     .synopsis = "eval [OPTION]... OUT --text FILE",
     .summary = "perplexity and KL divergence of a language model",
     .text = "Read a text with the language model OUT, a qconv output or any checkpoint of the "
             "Llama family, and tell its perplexity; with --against also how far its predictions "
             "are from those of MODEL: KL divergence, how often both would say the same token, and "
             "the difference in perplexity with its standard error. One layer is in memory at a "
             "time, so the model need not fit.\n"
             "\n"
             "docs/eval.md says what is computed and how.",
     .places = {{"OUT", QC_PLACE_DIR, 0}},
     .place_count = 1,
     .examples = "qconv eval llama-nf4 --against Llama-3.1-8B --text wiki.txt\n"
                 "what quantizing cost\n"
                 "qconv eval llama-nf4 --text prompts.ids --json\n"
                 "perplexity over token ids\n"},
    {.command = QC_CMD_REPORT,
     .name = "report",
     .synopsis = "report [OPTION]... OUT",
     .summary = "one HTML page on an output: sizes, errors, perplexity, speed",
     .text = "Write one self-contained HTML page on the qconv output OUT: what was saved, what "
             "lies where, the error of every layer and kind of layer, histograms of codes, and "
             "the worst tensors; with --against and --text perplexity and KL divergence too; with "
             "--bench the speed of kernels.",
     .places = {{"OUT", QC_PLACE_DIR, 0}},
     .place_count = 1,
     .examples = "qconv report llama-nf4 --html report.html\n"
                 "from the manifest and the codes alone\n"
                 "qconv report llama-nf4 --against Llama-3.1-8B --text wiki.txt > report.html\n"
                 "with perplexity\n"},
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
    {"CUDA_VISIBLE_DEVICES", "GPUs that count: indices or UUIDs; empty for none"},
    {"QCONV_DEVICE", "devices to use, as --device says it: auto, cpu, cuda, cuda:0,2"},
    {"QCONV_TUNING", "table of GPU kernels to choose by, as --tuning says it"},
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
