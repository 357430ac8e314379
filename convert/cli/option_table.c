#include "convert/cli/option_table.h"

#include "convert/cli/option_values.h"

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

/* A row says with one of these which member it sets, and how its value is read. The member must
 * have the type that the setter stores. */
#define SETS(member, ...)                                                                          \
    .at = offsetof(qc_options, member),                                                            \
    .set = _Generic(((const qc_options *)0)->member, __VA_ARGS__)
#define SWITCH(member)     SETS(member, int : qc_option_set_on)
#define SWITCH_OFF(member) SETS(member, int : qc_option_set_off)
/* The member is an enum, or an int that becomes the index of the choice. */
#define CHOICE(member) SETS(member, int : qc_option_set_choice, unsigned : qc_option_set_choice)
#define NUMBER(member) SETS(member, uint64_t : qc_option_set_u64, unsigned : qc_option_set_unsigned)
#define SIZE(member)   SETS(member, uint64_t : qc_option_set_size)
#define WORD(member)   SETS(member, const char * : qc_option_set_word) /* one of the choices */
#define TEXT(member)   SETS(member, const char * : qc_option_set_text)
#define LIST(member)   SETS(member, const char * : qc_option_set_list)
#define PATH(member)   SETS(member, const char * : qc_option_set_path)
#define DECIMAL(member, lowest, highest)                                                           \
    SETS(member, double : qc_option_set_decimal), .least = (lowest), .most = (highest)
#define GIVEN(member) .given = offsetof(qc_options, member)

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
     .choices = {QC_TO_NAMES},
     .dflt_note = "required", .dflt_of = {PLAN, "nf4, or keep for what is quantized already"}, .since = "0.1.0",
     CHOICE(convert.plan.recipe.to), GIVEN(convert.plan.recipe.to_given),
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
     NUMBER(convert.plan.recipe.block_elems), .power_of_two = 1, .quantizes = 1,
     .not_with = "--to auto, which chooses it; see --schemes",
     .help = "weights that share one scale: a power of two, 32 to 4096",
     .more = "With --to int8 this chooses block-wise int8, a form of qconv's own that "
             "bitsandbytes does not load."},
    {.id = QC_OPT_NO_DOUBLE_QUANT, .name = "no-double-quant", .commands = FITTING,
     .group = QC_GROUP_OUTPUT, .kind = QC_ARG_NONE, .since = "0.1.0",
     SWITCH_OFF(convert.plan.recipe.double_quant), .quantizes = 1,
     .help = "keep block scales as float32 instead of quantizing them too",
     .more = "Costs about 0.37 bits per weight at block size 64. With --to int8 it needs "
             "--block-size."},
    {.id = QC_OPT_SCALE, .name = "scale", .commands = CONVERT, .group = QC_GROUP_OUTPUT,
     .kind = QC_ARG_CHOICE, .choices = {QC_SCALE_NAMES}, .dflt = "search",
     .since = "0.4.0", CHOICE(convert.plan.recipe.scale), .quantizes = 1,
     .help = "how the scale of a block, or of a row, is found",
     .more = "absmax: its largest value, as bitsandbytes does. search: the scale of least squared "
             "error among those that can be stored. refit: that, with the scales of the scales "
             "fitted to it too; slower. The files have the same form and size."},
    {.id = QC_OPT_CALIBRATE, .name = "calibrate", .commands = CONVERT, .group = QC_GROUP_OUTPUT,
     .kind = QC_ARG_FILE, .arg = "FILE|default", .since = "0.5.0",
     PATH(convert.plan.calibrate.text),
     .help = "choose codes and scales for least error in the layers' outputs on this text",
     .more = "Text, or token ids in a file whose name ends in .ids; default is a text that comes "
             "with qconv. The model reads it layer by layer, and each weight is quantized for the "
             "inputs that it sees. The files have the same form and size. With --to nf4 and --to "
             "int8; what has no such inputs goes by --scale. docs/calibration.md has more."},
    {.id = QC_OPT_HESSIANS, .name = "hessians", .commands = CONVERT, .group = QC_GROUP_OUTPUT,
     .kind = QC_ARG_FILE, .arg = "PATH", .since = "0.5.0",
     PATH(convert.plan.calibrate.hessians),
     .help = "as --calibrate, from second moments of inputs that were captured elsewhere",
     .more = "A safetensors file, or a folder of them, as docs/calibration.md describes: for "
             "models whose forward pass qconv does not know."},
    {.id = QC_OPT_CALIBRATION_TOKENS, .name = "calibration-tokens", .commands = CONVERT,
     .group = QC_GROUP_OUTPUT, .kind = QC_ARG_NUMBER, .arg = "N", .min = 2, .max = 1000000000000,
     .dflt_note = "131072, or all of the text", .since = "0.5.0",
     NUMBER(convert.plan.calibrate.max_tokens),
     .help = "read no more of the calibration text than this",
     .more = "Of a longer text windows are taken that are spread over all of it."},
    {.id = QC_OPT_CALIBRATION_CONTEXT, .name = "calibration-context", .commands = CONVERT,
     .group = QC_GROUP_OUTPUT, .kind = QC_ARG_NUMBER, .arg = "TOKENS", .min = 2,
     .max = 1000000000, .dflt_note = "2048, or the model's limit", .since = "0.5.0",
     NUMBER(convert.plan.calibrate.context),
     .help = "tokens of a window; the calibration text is cut into such"},
    {.id = QC_OPT_DAMPING, .name = "damping", .commands = CONVERT, .group = QC_GROUP_OUTPUT,
     .kind = QC_ARG_DECIMAL, .arg = "X", .dflt_note = "0.1, more with few tokens", .since = "0.5.0",
     DECIMAL(convert.plan.calibrate.damping, 0, 1),
     .help = "how much calibrating trusts weights more than the text",
     .more = "A share of each input's mean square, and of a tenth of their mean, that is added to "
             "it; above 0 and at most 1. "
             "Default: 0.1 + 4 N / tokens for N inputs. Raised, with a message, where it is too "
             "small to compute with."},
    {.id = QC_OPT_COMPUTE_DTYPE, .name = "compute-dtype", .commands = CONVERT,
     .group = QC_GROUP_OUTPUT, .kind = QC_ARG_CHOICE,
     .choices = {"bfloat16", "float16", "float32"}, .dflt_note = "the model's own dtype",
     .since = "0.1.0", WORD(convert.plan.recipe.compute_dtype), .quantizes = 1,
     .help = "dtype that loaders are told to compute in",
     .more = "Goes to quantization_config in config.json; no stored weight depends on it."},
    {.id = QC_OPT_COMPRESS, .name = "compress", .commands = CONVERT, .group = QC_GROUP_OUTPUT,
     .kind = QC_ARG_TEXT, .arg = "none|zstd[:LEVEL]", .dflt = "zstd:1", .since = "0.1.0",
     .set = qc_option_set_compress,
     .help = "compression of the shards, level 1 to 19",
     .more = "zstd writes .safetensors.zst files in the Zstandard seekable format; 'zstd -d' and "
             "'qconv unpack' both turn them into plain .safetensors files. none writes those at "
             "once."},
    {.id = QC_OPT_MAX_SHARD_SIZE, .name = "max-shard-size", .commands = FITTING,
     .group = QC_GROUP_OUTPUT, .kind = QC_ARG_SIZE, .arg = "SIZE", .dflt = "5GB",
     .since = "0.1.0", SIZE(convert.plan.max_shard_bytes), .min = 1,
     .help = "bytes of tensors in one shard, before compression",
     .more = "A weight and its scales stay together, so one that is larger gets a shard of its "
             "own."},
    {.id = QC_OPT_REST, .name = "rest", .commands = FITTING, .group = QC_GROUP_TENSORS,
     .kind = QC_ARG_CHOICE, .choices = {QC_REST_NAMES}, .dflt = "keep",
     .since = "0.1.0", CHOICE(convert.plan.recipe.rest),
     .help = "what floating-point tensors that are not quantized become",
     .more = "keep leaves them bit for bit as they are. With --to fp16 and --to bf16 it counts "
             "only for a checkpoint that is quantized already."},
    {.id = QC_OPT_KEEP, .name = "keep", .commands = FITTING, .group = QC_GROUP_TENSORS,
     .kind = QC_ARG_TEXT, .arg = "GLOB", .since = "0.1.0",
     .set = qc_option_set_rule, .repeats = 1,
     .help = "leave tensors with these names as they are; may be repeated",
     .more = "'*' stands for any run of characters, dots included, '?' for one, '[a-z]' for one "
             "of a class. The glob must match the whole name. Of several --keep and --quantize "
             "that match, the last one wins. A glob that matches no tensor is an error."},
    {.id = QC_OPT_QUANTIZE, .name = "quantize", .commands = FITTING, .group = QC_GROUP_TENSORS,
     .kind = QC_ARG_TEXT, .arg = "GLOB", .since = "0.1.0",
     .set = qc_option_set_rule, .quantizes = 1, .repeats = 1,
     .help = "quantize tensors with these names; may be repeated",
     .more = "For what --keep excluded before, or a linear layer that the model's recipe leaves "
             "alone. Only with --to nf4 and --to int8."},
    {.id = QC_OPT_RECIPE, .name = "recipe", .commands = FITTING, .group = QC_GROUP_TENSORS,
     .kind = QC_ARG_FILE, .arg = "FILE", .since = "0.1.0",
     PATH(recipe_file),
     .help = "read --keep and --quantize rules from a JSON file",
     .more = "{\"rules\": [{\"keep\": \"GLOB\"}, {\"quantize\": \"GLOB\"}]}. Its rules come "
             "before those of the command line. Unknown members are refused."},
    {.id = QC_OPT_REQUANTIZE, .name = "requantize", .commands = FITTING,
     .group = QC_GROUP_TENSORS, .kind = QC_ARG_NONE, .since = "0.2.0",
     SWITCH(convert.plan.recipe.requantize),
     .help = "quantize MXFP4 experts anew instead of passing them through",
     .more = "For gpt-oss, whose experts are MXFP4 already: passing them through loses nothing, a "
             "second rounding to NF4 saves 3% of them."},
    {.id = QC_OPT_DROP_MTP, .name = "drop-mtp", .commands = FITTING, .group = QC_GROUP_TENSORS,
     .kind = QC_ARG_NONE, .since = "0.2.0",
     SWITCH(convert.plan.recipe.drop_mtp),
     .help = "leave out multi-token prediction layers",
     .more = "DeepSeek-V3 has one behind its last layer; plain decoding does not use it."},
    {.id = QC_OPT_SCHEMES, .name = "schemes", .commands = FITTING, .group = QC_GROUP_TENSORS,
     .kind = QC_ARG_TEXT, .arg = "LIST", .dflt_note = "nf4,nf4-32,int8,16bit", .since = "0.2.0",
     LIST(convert.plan.recipe.schemes), .only_with = "--to auto",
     .help = "what --to auto may choose from",
     .more = "Commas between. nf4-32 is NF4 in blocks of 32; 16bit is what a weight is now, FP8 "
             "too. int8 is left out by default where a card does not run it (V100). Of a "
             "checkpoint in 16 bit the result loads in transformers whatever is chosen, if int8 "
             "is not on the list."},
    {.id = QC_OPT_EXPLAIN, .name = "explain", .commands = FITTING, .group = QC_GROUP_TENSORS,
     .kind = QC_ARG_NONE, .since = "0.2.0",
     SWITCH(convert.explain), .only_with = "--to auto",
     .help = "with --to auto: show what was chosen for which weights, and why",
     .more = "By kind of weight and range of layers; with -v a line for every weight."},
    {.id = QC_OPT_VRAM, .name = "vram", .commands = FITTING, .group = QC_GROUP_FIT,
     .kind = QC_ARG_TEXT, .arg = "SPEC", .dflt_of = {PLAN, "auto"}, .since = "0.2.0",
     TEXT(convert.plan.fit.vram),
     .help = "the devices: 2x40GB, 24GB+16GB, 2xA100-40GB, auto, +cpu:64GB, +disk",
     .more = "Terms joined by '+'. A size (GB is 10^9, GiB is 2^30) or the name of a card, with a "
             "count and an x before it; auto for this machine's GPUs as they are now; cpu and "
             "disk, with a size after a colon, for what the GPUs cannot hold. convert then cuts "
             "shards where devices change and writes device_map.json. docs/hardware.md lists the "
             "cards."},
    {.id = QC_OPT_MARGIN, .name = "margin", .commands = FITTING, .group = QC_GROUP_FIT,
     .kind = QC_ARG_DECIMAL, .arg = "SHARE", .dflt = "0.9", .since = "0.2.0",
     DECIMAL(convert.plan.fit.margin, 0, 1), .only_with = "--vram",
     .help = "share of each device that may be used, above 0 and at most 1"},
    {.id = QC_OPT_CONTEXT, .name = "context", .commands = FITTING, .group = QC_GROUP_FIT,
     .kind = QC_ARG_NUMBER, .arg = "TOKENS", .min = 1, .max = 1000000000,
     .dflt_note = "8192, or the model's limit", .since = "0.2.0",
     NUMBER(convert.plan.fit.context), .only_with = "--vram",
     .help = "tokens of one sequence that the KV cache is to hold"},
    {.id = QC_OPT_BATCH, .name = "batch", .commands = FITTING, .group = QC_GROUP_FIT,
     .kind = QC_ARG_NUMBER, .arg = "N", .min = 1, .max = 1000000, .dflt = "1", .since = "0.2.0",
     NUMBER(convert.plan.fit.batch), .only_with = "--vram",
     .not_with = "--mode train, which finds the batch; see --effective-batch",
     .help = "sequences at once"},
    {.id = QC_OPT_IMAGES, .name = "images", .commands = FITTING, .group = QC_GROUP_FIT,
     .kind = QC_ARG_NUMBER, .arg = "N", .min = 0, .max = 1000, .dflt = "1", .since = "0.2.0",
     NUMBER(convert.plan.fit.images), .only_with = "--vram", .not_with = "--mode train",
     .help = "images per sequence, for models with cross-attention"},
    {.id = QC_OPT_KV_DTYPE, .name = "kv-dtype", .commands = FITTING, .group = QC_GROUP_FIT,
     .kind = QC_ARG_CHOICE, .choices = {"fp16", "bf16", "fp8", "fp32"}, .dflt = "fp16",
     .since = "0.2.0", .set = qc_option_set_kv_dtype, .only_with = "--vram",
     .not_with = "--mode train",
     .help = "element type of the KV cache"},
    {.id = QC_OPT_MLA, .name = "mla", .commands = FITTING, .group = QC_GROUP_FIT,
     .kind = QC_ARG_CHOICE, .choices = {"latent", "absorbed", "expanded"}, .dflt = "latent",
     .since = "0.2.0", .set = qc_option_set_mla, .only_with = "--vram", .not_with = "--mode train",
     .help = "form in which DeepSeek's attention is cached and computed",
     .more = "latent: the latent and the rotary part of a token are cached, and every layer makes "
             "keys and values of the whole context of them, as transformers 5 does. absorbed: the "
             "same cache, and attention computes with the latent, as vLLM does. expanded: keys and "
             "values of every head are cached, as transformers 4 does; 71 times as much for "
             "DeepSeek-V2.5."},
    {.id = QC_OPT_PREFILL, .name = "prefill", .commands = FITTING, .group = QC_GROUP_FIT,
     .kind = QC_ARG_TEXT, .arg = "TOKENS", .min = 1, .max = 1000000000, .dflt = "whole",
     .since = "0.5.0", .set = qc_option_set_prefill, .only_with = "--vram",
     .not_with = "--mode train",
     .help = "tokens of a prompt that are read at once, or whole",
     .more = "transformers reads a prompt whole unless its prefill_chunk_size is set; vLLM reads "
             "as many tokens at once as --max-num-batched-tokens says. The more at once, the more "
             "workspace, and the less room for context."},
    {.id = QC_OPT_CUDA_CONTEXT, .name = "cuda-context", .commands = FITTING,
     .group = QC_GROUP_FIT, .kind = QC_ARG_SIZE, .arg = "SIZE", .dflt = "500MB",
     .since = "0.2.0", SIZE(convert.plan.fit.cuda_context_bytes), .only_with = "--vram",
     .help = "what a CUDA context and its kernels take on every GPU"},
    {.id = QC_OPT_HTML, .name = "html", .commands = PLAN, .group = QC_GROUP_FIT,
     .kind = QC_ARG_FILE, .arg = "FILE", .since = "0.2.0",
     PATH(html),
     .help = "also write the plan as one HTML page"},
    {.id = QC_OPT_DEVICE_MAP, .name = "device-map", .commands = PLAN, .group = QC_GROUP_FIT,
     .kind = QC_ARG_FILE, .arg = "FILE", .since = "0.2.0",
     PATH(device_map), .not_with = "--mode train",
     .help = "also write the placement as accelerate's device_map"},
    {.id = QC_OPT_DEVICE, .name = "device", .commands = QC_CMD_BIT(QC_CMD_UNPACK),
     .group = QC_GROUP_OUTPUT, .kind = QC_ARG_TEXT, .arg = "NAME", .since = "0.2.0",
     LIST(device),
     .help = "only the shards of one device of the plan: cuda:0, cpu",
     .more = "For an output that was made with --vram."},
    {.id = QC_OPT_RUN_DEVICE, .name = "device", .commands = CONVERT | MEASURING | READING,
     .group = QC_GROUP_RUN, .kind = QC_ARG_TEXT, .arg = "auto|cpu|cuda[:N,...]",
     .dflt_note = "auto", .since = "0.3.0",
     .set = qc_option_set_run_device,
     .help = "what does the work: cpu, every GPU, or GPUs 0 and 2 with cuda:0,2",
     .more = "auto takes the GPUs if there are any and this build has kernels for them, else the "
             "CPU. cpu does not even ask the driver. QCONV_DEVICE says the same where --device is "
             "not given. The bytes written do not depend on it, but for those of --calibrate."},
    {.id = QC_OPT_MODE, .name = "mode", .commands = PLAN, .group = QC_GROUP_TRAIN,
     .kind = QC_ARG_CHOICE, .choices = {"infer", "train"}, .dflt = "infer", .since = "0.2.0",
     CHOICE(train.on),
     .help = "what the model is to do"},
    {.id = QC_OPT_METHOD, .name = "method", .commands = PLAN, .group = QC_GROUP_TRAIN,
     .kind = QC_ARG_CHOICE, .choices = {"full", "lora", "qlora"},
     .dflt_note = "all are tried", .since = "0.2.0", CHOICE(train.method), GIVEN(train.method_given),
     .only_with = "--mode train",
     .help = "what is trained"},
    {.id = QC_OPT_OPTIMIZER, .name = "optimizer", .commands = PLAN, .group = QC_GROUP_TRAIN,
     .kind = QC_ARG_CHOICE, .choices = {"adamw", "adam", "adam8bit", "sgd"},
     .dflt_note = "adamw, and adam8bit where it helps", .since = "0.2.0",
     CHOICE(train.optimizer), GIVEN(train.optimizer_given), .only_with = "--mode train",
     .help = "whose states are kept"},
    {.id = QC_OPT_PRECISION, .name = "precision", .commands = PLAN, .group = QC_GROUP_TRAIN,
     .kind = QC_ARG_CHOICE, .choices = {"bf16", "fp16", "fp32"},
     .dflt_note = "bf16; fp16 on Volta and Turing", .since = "0.2.0",
     CHOICE(train.precision), GIVEN(train.precision_given), .only_with = "--mode train",
     .help = "what is computed in; 16 bit keeps float32 master weights"},
    {.id = QC_OPT_ZERO, .name = "zero", .commands = PLAN, .group = QC_GROUP_TRAIN,
     .kind = QC_ARG_NUMBER, .arg = "STAGE", .min = 0, .max = 3, .dflt_note = "chosen",
     .since = "0.2.0", NUMBER(train.zero), GIVEN(train.zero_given), .only_with = "--mode train",
     .help = "ZeRO stage over the GPUs, 0 to 3"},
    {.id = QC_OPT_CHECKPOINTING, .name = "checkpointing", .commands = PLAN,
     .group = QC_GROUP_TRAIN, .kind = QC_ARG_CHOICE, .choices = {"on", "off"},
     .dflt_note = "chosen", .since = "0.2.0",
     .set = qc_option_set_checkpointing, GIVEN(train.checkpointing_given),
     .only_with = "--mode train",
     .help = "keep only the inputs of layers and compute the rest again"},
    {.id = QC_OPT_LORA_RANK, .name = "lora-rank", .commands = PLAN, .group = QC_GROUP_TRAIN,
     .kind = QC_ARG_NUMBER, .arg = "R", .min = 1, .max = 65536, .dflt = "16", .since = "0.2.0",
     NUMBER(train.lora_rank), .only_with = "--mode train",
     .help = "rank of the adapters, on every linear layer"},
    {.id = QC_OPT_EFFECTIVE_BATCH, .name = "effective-batch", .commands = PLAN,
     .group = QC_GROUP_TRAIN, .kind = QC_ARG_NUMBER, .arg = "N", .min = 1, .max = 1000000000,
     .dflt = "32", .since = "0.2.0",
     NUMBER(train.effective_batch), .only_with = "--mode train",
     .help = "sequences per optimizer step over all GPUs; gives the accumulation"},
    {.id = QC_OPT_APPLY, .name = "apply", .commands = PLAN, .group = QC_GROUP_TRAIN,
     .kind = QC_ARG_FILE, .arg = "FILE", .since = "0.2.0",
     PATH(train.apply), .only_with = "--mode train",
     .help = "write the best setting as an accelerate or DeepSpeed configuration",
     .more = "JSON. A name with 'deepspeed' or 'ds_' in it gets DeepSpeed's form, any other "
             "accelerate's. What was in FILE is kept as FILE.backup."},
    {.id = QC_OPT_PROFILE, .name = "profile", .commands = PLAN, .group = QC_GROUP_TRAIN,
     .kind = QC_ARG_NONE, .since = "0.2.0",
     SWITCH(train.profile), .only_with = "--mode train",
     .help = "allocate on this machine's GPU and measure, beside the estimate"},
    {.id = QC_OPT_AS, .name = "as", .commands = HARDWARE, .group = QC_GROUP_FIT,
     .kind = QC_ARG_TEXT, .arg = "CARDS", .since = "0.2.0",
     TEXT(hardware.as),
     .help = "speak of these cards instead of this machine's: 2xA100-40GB, 3090",
     .more = "docs/hardware.md lists the cards."},
    {.id = QC_OPT_WATCH, .name = "watch", .commands = HARDWARE, .group = QC_GROUP_RUN,
     .kind = QC_ARG_NONE, .since = "0.2.0",
     SWITCH(hardware.watch),
     .help = "follow the memory of every GPU and process"},
    {.id = QC_OPT_CSV, .name = "csv", .commands = HARDWARE, .group = QC_GROUP_RUN,
     .kind = QC_ARG_FILE, .arg = "FILE", .since = "0.2.0",
     PATH(hardware.csv), .only_with = "--watch",
     .help = "with --watch: also write every sample to a CSV file"},
    {.id = QC_OPT_INTERVAL, .name = "interval", .commands = HARDWARE, .group = QC_GROUP_RUN,
     .kind = QC_ARG_DECIMAL, .arg = "SECONDS", .dflt = "1", .since = "0.2.0",
     DECIMAL(hardware.interval, 0.01, 3600), .only_with = "--watch",
     .help = "with --watch: time between samples, 0.01 to 3600"},
    {.id = QC_OPT_SAMPLES, .name = "samples", .commands = HARDWARE, .group = QC_GROUP_RUN,
     .kind = QC_ARG_NUMBER, .arg = "N", .min = 1, .max = 1000000000, .since = "0.2.0",
     .dflt_note = "until interrupted", NUMBER(hardware.samples), .only_with = "--watch",
     .help = "with --watch: stop after this many"},
    {.id = QC_OPT_AGAINST, .name = "against", .commands = VERIFY | VALIDATE | READING, .group = QC_GROUP_MEASURE,
     .kind = QC_ARG_FILE, .arg = "MODEL", .dflt_of = {VALIDATE, "required"},
     .since = "0.3.0", PATH(call.against),
     .help = "the checkpoint that OUT was made from"},
    {.id = QC_OPT_TEXT, .name = "text", .commands = READING, .group = QC_GROUP_MEASURE,
     .kind = QC_ARG_FILE, .arg = "FILE", .dflt_of = {EVAL, "required"}, .since = "0.4.0",
     PATH(eval.text),
     .help = "the text to read; FILE.ids: token ids, a sequence a line",
     .more = "UTF-8. A file whose name ends in .ids holds decimal token ids with spaces between, one "
             "sequence a line, taken as they are."},
    {.id = QC_OPT_TOKENIZER, .name = "tokenizer", .commands = READING | CONVERT, .group = QC_GROUP_MEASURE,
     .kind = QC_ARG_FILE, .arg = "PATH", .dflt_note = "the model's own", .since = "0.4.0",
     PATH(call.tokenizer),
     .help = "a tokenizer.json, or a directory that has one"},
    {.id = QC_OPT_EVAL_CONTEXT, .name = "context", .commands = READING,
     .group = QC_GROUP_MEASURE, .kind = QC_ARG_NUMBER, .arg = "TOKENS", .min = 2,
     .max = 1000000000, .dflt_note = "2048, or the model's limit", .since = "0.4.0",
     NUMBER(eval.context),
     .help = "tokens of a window; the text is cut into such"},
    {.id = QC_OPT_MAX_TOKENS, .name = "max-tokens", .commands = READING,
     .group = QC_GROUP_MEASURE, .kind = QC_ARG_NUMBER, .arg = "N", .min = 2,
     .max = 1000000000000, .dflt_note = "all", .since = "0.4.0",
     NUMBER(eval.max_tokens),
     .help = "read no more of the text than this"},
    {.id = QC_OPT_MAX_KL, .name = "max-kl", .commands = EVAL, .group = QC_GROUP_MEASURE,
     .kind = QC_ARG_DECIMAL, .arg = "X", .since = "0.4.0",
     DECIMAL(eval.max_kl, 0, 100),
     .help = "exit code 4 if the mean KL divergence is larger",
     .more = "In nats, above 0 and at most 100."},
    {.id = QC_OPT_EVAL_FILE, .name = "eval", .commands = REPORT, .group = QC_GROUP_MEASURE,
     .kind = QC_ARG_FILE, .arg = "FILE", .since = "0.4.0",
     PATH(report.eval),
     .help = "take up the result of an earlier 'qconv eval --json'"},
    {.id = QC_OPT_BENCH_FILE, .name = "bench", .commands = REPORT, .group = QC_GROUP_MEASURE,
     .kind = QC_ARG_FILE, .arg = "FILE", .since = "0.4.0",
     PATH(report.bench),
     .help = "take up the result of an earlier 'qconv bench --json'"},
    {.id = QC_OPT_SAMPLE, .name = "sample", .commands = VALIDATE, .group = QC_GROUP_MEASURE,
     .kind = QC_ARG_NUMBER, .arg = "N", .min = 1, .max = 1000000, .dflt_note = "all",
     .since = "0.3.0", NUMBER(validate.sample),
     .help = "look at this many of the quantized layers, evenly spread"},
    {.id = QC_OPT_SHAPES, .name = "shapes", .commands = BENCH, .group = QC_GROUP_MEASURE,
     .kind = QC_ARG_TEXT, .arg = "LIST",
     .dflt_note = "the layers of Llama-3.3-70B and Llama-3.1-8B", .since = "0.3.0",
     LIST(bench.shapes),
     .help = "weights, outputs x inputs: 8192x8192,8192+1024+1024x8192",
     .more = "With + between outputs, weights that share their input (q, k and v): one launch "
             "of ours, and a product of cuBLAS for each."},
    {.id = QC_OPT_BENCH_SCHEME, .name = "scheme", .commands = BENCH, .group = QC_GROUP_MEASURE,
     .kind = QC_ARG_TEXT, .arg = "LIST", .dflt_note = "nf4,int8", .since = "0.3.0",
     LIST(bench.schemes),
     .help = "of nf4, nf4-plain, int8 and int8-blocks",
     .more = "nf4-plain has float32 scales instead of double-quantized ones; int8-blocks has a "
             "scale per block instead of per row."},
    {.id = QC_OPT_M, .name = "m", .commands = MEASURING, .group = QC_GROUP_MEASURE,
     .kind = QC_ARG_TEXT, .arg = "LIST", .min = 1, .max = 1048576,
     .dflt_note = "1,4,16,64,256,1024",
     .dflt_of = {BENCH, "1 to 4096 by powers of two"}, .since = "0.3.0",
     .set = qc_option_set_m,
     .help = "rows of activations at once, with commas between"},
    {.id = QC_OPT_ACTIVATIONS, .name = "activations", .commands = VALIDATE,
     .group = QC_GROUP_MEASURE, .kind = QC_ARG_FILE, .arg = "FILE", .dflt_note = "random",
     .since = "0.3.0", PATH(validate.activations),
     .help = "take activations from this .safetensors file",
     .more = "docs/validate.md says what it holds, and how random ones are made."},
    {.id = QC_OPT_BENCH_DTYPE, .name = "dtype", .commands = BENCH, .group = QC_GROUP_MEASURE,
     .kind = QC_ARG_CHOICE, .choices = {"fp16", "bf16"}, .dflt = "fp16", .since = "0.3.0",
     CHOICE(bench.bf16),
     .help = "of activations and results"},
    {.id = QC_OPT_SEED, .name = "seed", .commands = MEASURING, .group = QC_GROUP_MEASURE,
     .kind = QC_ARG_NUMBER, .arg = "N", .min = 0, .max = 9007199254740991, .dflt = "1",
     .since = "0.3.0", NUMBER(products.seed),
     .help = "of random numbers"},
    {.id = QC_OPT_PATH, .name = "path", .commands = BENCH, .group = QC_GROUP_MEASURE,
     .kind = QC_ARG_CHOICE, .choices = {"gemv", "mma-884", "mma-16816", "dequant-gemm"},
     .dflt_note = "by shape and GPU", .since = "0.3.0",
     WORD(bench.path),
     .help = "the kernel to use for every shape"},
    {.id = QC_OPT_ROUNDS, .name = "rounds", .commands = BENCH, .group = QC_GROUP_MEASURE,
     .kind = QC_ARG_NUMBER, .arg = "N", .min = 1, .max = 10000, .dflt = "30", .since = "0.3.0",
     NUMBER(bench.rounds),
     .help = "times everything is measured, at most; the median counts"},
    {.id = QC_OPT_SECONDS, .name = "seconds", .commands = BENCH, .group = QC_GROUP_MEASURE,
     .kind = QC_ARG_NUMBER, .arg = "S", .min = 1, .max = 1000000, .dflt = "150", .since = "0.3.0",
     NUMBER(bench.seconds),
     .help = "time for all of it, about",
     .more = "Where it is short there are fewer rounds; what does not fit at all is left out, and "
             "the result says how much."},
    {.id = QC_OPT_TUNE, .name = "tune", .commands = BENCH, .group = QC_GROUP_MEASURE,
     .kind = QC_ARG_NONE, .since = "0.5.0",
     SWITCH(bench.tune),
     .help = "find the best kernel, and how to cut its work, for each shape and M",
     .more = "Measures every choice there is against the one that qconv makes by itself, and takes "
             "another one only where it is faster by more than the times spread. docs/bench.md "
             "says how."},
    {.id = QC_OPT_SAVE, .name = "save", .commands = BENCH, .group = QC_GROUP_MEASURE,
     .kind = QC_ARG_FILE, .arg = "FILE", .since = "0.5.0",
     PATH(bench.save), .only_with = "--tune",
     .help = "with --tune: write the better choices as a table for --tuning",
     .more = "An existing file is replaced, at once, after each row that was measured."},
    {.id = QC_OPT_TUNING, .name = "tuning", .commands = MEASURING | READING,
     .group = QC_GROUP_RUN, .kind = QC_ARG_FILE, .arg = "FILE",
     .dflt_note = "the file that QCONV_TUNING names", .since = "0.5.0",
     PATH(call.tuning),
     .help = "choose GPU kernels by this table of 'qconv bench --tune --save'",
     .more = "One that was made on another GPU is not used, with a warning. The order of sums, and "
             "so the last bits of products, depend on the table."},
    {.id = QC_OPT_MAX_ERROR, .name = "max-error", .commands = VALIDATE,
     .group = QC_GROUP_MEASURE, .kind = QC_ARG_DECIMAL, .arg = "X", .since = "0.3.0",
     DECIMAL(validate.max_error, 0, 10),
     .help = "exit code 4 if the relative output error of a layer is larger",
     .more = "Above 0 and at most 10: 0.1 is 10%."},
    {.id = QC_OPT_BASELINE, .name = "baseline", .commands = VALIDATE, .group = QC_GROUP_MEASURE,
     .kind = QC_ARG_FILE, .arg = "FILE", .since = "0.3.0",
     PATH(validate.baseline),
     .help = "exit code 4 if a layer is worse than in this earlier run"},
    {.id = QC_OPT_SAVE_BASELINE, .name = "save-baseline", .commands = VALIDATE,
     .group = QC_GROUP_MEASURE, .kind = QC_ARG_FILE, .arg = "FILE", .since = "0.3.0",
     PATH(validate.save_baseline),
     .help = "write this run's errors for --baseline"},
    {.id = QC_OPT_TOLERANCE, .name = "tolerance", .commands = VALIDATE,
     .group = QC_GROUP_MEASURE, .kind = QC_ARG_DECIMAL, .arg = "X", .dflt = "0.001",
     .since = "0.3.0", DECIMAL(validate.tolerance, 0, 10), .only_with = "--baseline",
     .help = "with --baseline: how much worse still passes",
     .more = "A share of the earlier error, above 0 and at most 10: 0.001 is 0.1%."},
    {.id = QC_OPT_REPORT_HTML, .name = "html", .commands = VALIDATE | REPORT, .group = QC_GROUP_OTHER,
     .kind = QC_ARG_FILE, .arg = "FILE", .dflt_of = {REPORT, "standard output"}, .since = "0.3.0",
     PATH(html),
     .help = "write the result as one HTML page, with plots, to a file"},
    {.id = QC_OPT_MARKDOWN, .name = "markdown", .commands = BENCH, .group = QC_GROUP_OTHER,
     .kind = QC_ARG_NONE, .since = "0.3.0",
     SWITCH(bench.markdown),
     .help = "write the result to standard output as Markdown tables"},
    {.id = QC_OPT_OUTPUT, .name = "output", .commands = BENCH, .group = QC_GROUP_OTHER,
     .kind = QC_ARG_FILE, .arg = "FILE", .since = "0.3.0",
     PATH(bench.output),
     .help = "also write the JSON of --json to a file",
     .more = "It is replaced whole after everything that was measured, with \"complete\": false until "
             "the end, so that a run that is killed leaves what it has."},
    {.id = QC_OPT_DRY_RUN, .name = "dry-run", .commands = CONVERT, .group = QC_GROUP_RUN,
     .kind = QC_ARG_NONE, .since = "0.1.0",
     SWITCH(convert.dry_run),
     .help = "show what would be written, with exact sizes; write nothing",
     .more = "OUT may be left out; if it is given, it is checked."},
    {.id = QC_OPT_FORCE, .name = "force", .commands = CONVERT | UNPACK, .group = QC_GROUP_RUN,
     .kind = QC_ARG_NONE, .since = "0.1.0",
     SWITCH(convert.force),
     .help = "replace another output, or write into a directory that holds other files",
     .more = "Deletes only what the manifest of the old output lists, and names files of others that "
             "it replaces. Weights that no manifest lists are never touched: they refuse the run. "
             "Without --force an output that is what would be made is complete already. Nothing is "
             "ever written to the source or below it, or through a link in the directory."},
    {.id = QC_OPT_RESTART, .name = "restart", .commands = CONVERT, .group = QC_GROUP_RUN,
     .kind = QC_ARG_NONE, .since = "0.5.0",
     SWITCH(convert.restart),
     .help = "begin anew instead of continuing an interrupted conversion",
     .more = "What the interrupted one left in OUT is removed. Refused when it has deleted files of "
             "its source (--consume-source): then only continuing gives a whole model."},
    {.id = QC_OPT_CONSUME_SOURCE, .name = "consume-source", .commands = CONVERT,
     .group = QC_GROUP_RUN, .kind = QC_ARG_NONE, .since = "0.5.0",
     SWITCH(convert.consume_source),
     .help = "delete each weight file of MODEL once all of it is written to OUT and synced",
     .more = "For disks that hold one copy only. A kill at any moment loses nothing: the same command "
             "continues. What was deleted cannot be checked against OUT afterwards. Weight files "
             "that are links are refused. See docs/cli.md."},
    {.id = QC_OPT_PART, .name = "part", .commands = CONVERT, .group = QC_GROUP_RUN,
     .kind = QC_ARG_TEXT, .arg = "I/N", .dflt_note = "of a Slurm step with several tasks, the task's",
     .since = "0.5.0",
     .set = qc_option_set_part,
     .help = "do the I-th of N parts of the work, 1 to N; the last to finish completes OUT",
     .more = "For several machines that share MODEL and OUT: the same command on each, with its own "
             "I. 1/1 does all of it whatever the scheduler says. See docs/cluster.md."},
    {.id = QC_OPT_THREADS, .name = "threads", .commands = WORKING, .group = QC_GROUP_RUN,
     .kind = QC_ARG_NUMBER, .arg = "N", .min = 1, .max = 1024,
     .dflt_note = "one per processor", .since = "0.1.0",
     NUMBER(call.threads),
     .help = "threads that work, 1 to 1024",
     .more = "The bytes written do not depend on it."},
    {.id = QC_OPT_PROGRESS, .name = "progress", .commands = WORKING | BENCH, .group = QC_GROUP_RUN,
     .kind = QC_ARG_CHOICE, .choices = {"auto", "always", "never"}, .dflt = "auto",
     .since = "0.1.0", CHOICE(call.progress),
     .help = "progress on standard error",
     .more = "auto: a bar on a terminal, a plain line now and then elsewhere. always: the bar "
             "wherever standard error goes."},
    {.id = QC_OPT_JSON, .name = "json", .commands = ANSWERS, .group = QC_GROUP_OTHER,
     .kind = QC_ARG_NONE, .since = "0.1.0",
     SWITCH(call.json),
     .help = "write the result to standard output as one JSON object"},
    {.id = QC_OPT_QUIET, .name = "quiet", .letter = 'q', .commands = ANYWHERE,
     .group = QC_GROUP_OTHER, .kind = QC_ARG_NONE, .since = "0.1.0",
     SWITCH(call.quiet),
     .help = "no progress, no summary, no warnings; errors only",
     .more = "The answers of plan, inspect, hardware, bench, eval, validate and report, --dry-run "
             "and --json are still printed. convert, unpack and verify print nothing when all is "
             "well: their exit code says so."},
    {.id = QC_OPT_VERBOSE, .name = "verbose", .letter = 'v', .commands = ANYWHERE,
     .group = QC_GROUP_OTHER, .kind = QC_ARG_NONE, .since = "0.1.0",
     .set = qc_option_set_verbose, .repeats = 1,
     .help = "say more; -vv still more",
     .more = "-v: what is about to be done, every stored tensor with inspect, and where in the "
             "source an error was found. -vv: the error of every quantized tensor."},
    {.id = QC_OPT_HELP, .name = "help", .letter = 'h', .commands = ANYWHERE,
     .group = QC_GROUP_OTHER, .kind = QC_ARG_NONE, .since = "0.1.0",
     .help = "show this help"},
    {.id = QC_OPT_VERSION, .name = "version", .commands = ANYWHERE, .group = QC_GROUP_OTHER,
     .kind = QC_ARG_NONE, .since = "0.1.0", .alone = 1, .set = qc_option_set_version,
     .help = "show the version"},
    {.id = QC_OPT_MAN, .name = "man", .commands = ANYWHERE, .group = QC_GROUP_OTHER,
     .kind = QC_ARG_NONE, .since = "0.1.0", .hidden = 1, .alone = 1,
     .set = qc_option_set_man,
     .help = "write this manual page",
     .more = "To read it: qconv --man > qconv.1, then man -l qconv.1."},
    {.id = QC_OPT_COMPLETION, .name = "completion", .commands = ANYWHERE, .group = QC_GROUP_OTHER,
     .kind = QC_ARG_CHOICE, .choices = {"bash", "zsh", "fish"}, .since = "0.1.0", .hidden = 1,
     .alone = 1, .set = qc_option_set_completion,
     .help = "write the completion for a shell",
     .more = "In bash: source <(qconv --completion bash)."},
};
/* clang-format on */

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
