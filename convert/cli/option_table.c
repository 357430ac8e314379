#include "convert/cli/option_table.h"

#include "convert/cli/option_values.h"
#include "convert/plan/engines.h"

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

#define ROW(option, of_commands, of_group)                                                         \
    .name = option, .commands = of_commands, .group = QC_GROUP_##of_group
/* A row says with one of these what its value is, which member it sets, and how the value is read.
 * The member must have the type that the setter stores. */
#define SETS(value_kind, member, ...)                                                              \
    .kind = value_kind, .at = offsetof(qc_options, member),                                        \
    .set = _Generic(((const qc_options *)0)->member, __VA_ARGS__)
#define SWITCH(member) SETS(QC_ARG_NONE, member, int : qc_option_set_choice)
#define COUNT(member)  SETS(QC_ARG_NONE, member, int : qc_option_set_count)
/* The member is an enum, or an int that becomes the index of the choice or its value. */
#define CHOICE(member)                                                                             \
    SETS(QC_ARG_CHOICE, member, int : qc_option_set_choice, unsigned : qc_option_set_choice)
#define WORD(member) SETS(QC_ARG_CHOICE, member, const char * : qc_option_set_word)
#define NUMBER(member)                                                                             \
    SETS(QC_ARG_NUMBER, member, uint64_t : qc_option_set_u64, unsigned : qc_option_set_unsigned)
#define DECIMAL(member, lowest, highest)                                                           \
    SETS(QC_ARG_DECIMAL, member, double                                                            \
         : qc_option_set_decimal),                                                                 \
        .least = (lowest), .most = (highest)
#define SIZE(member)            SETS(QC_ARG_SIZE, member, uint64_t : qc_option_set_size)
#define TEXT(member)            SETS(QC_ARG_TEXT, member, const char * : qc_option_set_text)
#define LIST(member)            SETS(QC_ARG_TEXT, member, const char * : qc_option_set_list)
#define PATH(member)            SETS(QC_ARG_FILE, member, const char * : qc_option_set_path)
#define OWN(value_kind, setter) .kind = value_kind, .set = setter /* it knows its member */
#define GIVEN(member)           .given = offsetof(qc_options, member)
#define CHOICES(...)                                                                               \
    .choices = (const char *const[])                                                               \
    {                                                                                              \
        __VA_ARGS__, NULL                                                                          \
    }
#define VALUES(...)                                                                                \
    .values = (const int[])                                                                        \
    {                                                                                              \
        __VA_ARGS__                                                                                \
    }
#define FOREIGN(...)                                                                               \
    .foreign = (const qc_foreign_name[])                                                           \
    {                                                                                              \
        __VA_ARGS__,                                                                               \
        {                                                                                          \
            .names = NULL                                                                          \
        }                                                                                          \
    }

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
const qc_option_row qc_option_table[] = {
    {ROW("to", FITTING, OUTPUT), CHOICE(convert.plan.recipe.to), CHOICES(QC_TO_NAMES),
     GIVEN(convert.plan.recipe.to_given), .dflt_note = "required",
     .dflt_of = {PLAN, "nf4, or keep for what is quantized already"}, .since = "0.1.0",
     FOREIGN({.names = "bits wbits nbits w-bit quant quant-type quantization quantization-type "
                       "quant-method qtype q outtype out-type scheme type precision "
                       "dtype torch-dtype method target",
              .meant = "--to nf4 (4 bits), --to int8 (8 bits) or --to bf16"},
             {.names = "load-in-4bit 4bit 4-bit nf4 fp4 q4 bnb-4bit-quant-type",
              .meant = "--to nf4"},
             {.names = "int4 w4a16", .meant = "--to int4"},
             {.names = "load-in-8bit 8bit 8-bit int8 q8", .meant = "--to int8"},
             {.names = "bf16 bfloat16", .meant = "--to bf16"},
             {.names = "fp16 float16 half", .meant = "--to fp16"},
             {.names = "auto", .meant = "--to auto"},
             {.names = "dequantize", .meant = "--to bf16"}),
     .help = "what the weights of linear layers become",
     .more = "nf4: 4-bit NormalFloat in blocks, as bitsandbytes stores it. int8: one scale per "
             "row, as LLM.int8 stores it, or per block with --block-size. int4: 4-bit integers in "
             "groups, which vLLM and SGLang split over cards. auto: each weight "
             "becomes one of these or stays in 16 bits, so that the predicted error is as small "
             "as --vram allows. fp16 and bf16: every floating-point tensor is cast; if the "
             "checkpoint is quantized already, its quantized weights are turned back, and --rest "
             "decides about the others. keep: every tensor stays as it is, bit for bit, and the "
             "shards are cut, compressed and hashed anew."},
    {ROW("format", FITTING, OUTPUT), CHOICE(convert.plan.recipe.format),
     CHOICES(QC_FORMAT_NAMES), .dflt_note = "bitsandbytes; compressed-tensors for int4",
     .quantizes = 1, .since = "0.5.0",
     .help = "whose format the quantized weights have",
     .more = "bitsandbytes is what transformers loads for inference and for training adapters. "
             "compressed-tensors is what vLLM and SGLang split over several cards: --to int8 is "
             "W8A8, --to int4 is W4A16, and --to auto mixes W4A16, W8A16 and 16 bits."},
    {ROW("activation-bits", FITTING, OUTPUT), CHOICE(convert.plan.recipe.activations_16),
     CHOICES("8", "16"), .quantizes = 1, .dflt_note = "8, or 16 with --to auto", .since = "0.5.0",
     .help = "what int8 weights of --format compressed-tensors are multiplied with",
     .more = "8: W8A8, whose loader rounds the inputs of a layer to 8 bits, token by token. "
             "16: W8A16, where only the weights are integers; it takes --block-size."},
    {ROW("block-size", FITTING, OUTPUT), OWN(QC_ARG_NUMBER, qc_option_set_block_size),
     .arg = "N|channel",
     .min = 32, .max = 4096, .dflt_note = "64 for nf4, 128 for int4; int8 goes by rows",
     .power_of_two = 1, .quantizes = 1, .not_with = "--to auto, which chooses it; see --schemes", .since = "0.1.0",
     FOREIGN({.names = "group-size groupsize q-group-size gs blocksize bs"}),
     .help = "weights that share one scale: a power of two, 32 to 4096; or channel",
     .more = "With --to int8 a number chooses block-wise int8, a form of qconv's own that "
             "bitsandbytes does not load. channel goes with --to int4 and int8 of --format "
             "compressed-tensors, whose groups have 32, 64 or 128 weights: a scale for each row."},
    {ROW("no-double-quant", FITTING, OUTPUT), SWITCH(convert.plan.recipe.double_quant), VALUES(0),
     .quantizes = 1, .since = "0.1.0",
     FOREIGN({.names = "double-quant use-double-quant bnb-4bit-use-double-quant nested",
              .meant = "nothing: NF4 is doubly quantized unless --no-double-quant is given"}),
     .help = "keep block scales as float32 instead of quantizing them too",
     .more = "Costs about 0.37 bits per weight at block size 64. With --to int8 it needs "
             "--block-size."},
    {ROW("scale", CONVERT, OUTPUT), CHOICE(convert.plan.recipe.scale), CHOICES(QC_SCALE_NAMES),
     .dflt = "search", .quantizes = 1, .since = "0.4.0",
     .help = "how the scale of a block or row is chosen",
     .more = "absmax: the largest absolute value, as bitsandbytes does. search: of the scales "
             "that can be stored, the one with the least squared error. refit: as search, and the "
             "scales of the scales are fitted too, which is slower. The files have the same form "
             "and size in all three cases."},
    {ROW("calibrate", CONVERT, OUTPUT), PATH(convert.plan.calibrate.text), .arg = "FILE|default",
     .quantizes = 1, .excludes = {"--hessians: either says what the inputs are"}, .since = "0.5.0",
     FOREIGN({.names = "calib calib-data calibration calibration-data calibration-dataset "
                       "dataset imatrix"}),
     .help = "choose codes and scales for least error in the layers' outputs on this text",
     .more = "Text, or token ids in a file whose name ends in .ids; default is a text that comes "
             "with qconv. The model reads it layer by layer, and each weight is quantized for the "
             "inputs that it sees. The files have the same form and size. This works with --to "
             "nf4 and --to int8; weights without such inputs are quantized as --scale says. "
             "docs/calibration.md has more."},
    {ROW("hessians", CONVERT, OUTPUT), PATH(convert.plan.calibrate.hessians), .arg = "PATH",
     .quantizes = 1, .since = "0.5.0",
     .help = "calibrate with second moments of inputs that were captured elsewhere",
     .more = "A safetensors file, or a folder of them, as docs/calibration.md describes: for "
             "models whose forward pass qconv does not know."},
    {ROW("calibration-tokens", CONVERT, OUTPUT), NUMBER(convert.plan.calibrate.max_tokens),
     .arg = "N", .min = 2, .max = 1000000000000, .dflt_note = "131072, or all of the text",
     .only_with = {"--calibrate"}, .since = "0.5.0",
     .help = "read at most this many tokens of the calibration text",
     .more = "From a longer text, windows are taken that are spread over all of it."},
    {ROW("calibration-context", CONVERT, OUTPUT), NUMBER(convert.plan.calibrate.context),
     .arg = "TOKENS", .min = 2, .max = 1000000000, .dflt_note = "2048, or the model's limit",
     .only_with = {"--calibrate"}, .since = "0.5.0",
     .help = "tokens in each window that the calibration text is cut into"},
    {ROW("damping", CONVERT, OUTPUT), DECIMAL(convert.plan.calibrate.damping, 0, 1), .arg = "X",
     .dflt_note = "0.1, more with few tokens", .only_with = {"--calibrate", "--hessians"},
     .since = "0.5.0",
     .help = "how far calibrating trusts the weights over the text",
     .more = "This share of each input's mean square, and of a tenth of the average of them all, "
             "is added to that mean square. It is above 0 and at most 1. The default is 0.1 + 4 N "
             "/ tokens for N inputs. A value that is too small to compute with is raised, with a "
             "message."},
    {ROW("compute-dtype", CONVERT, OUTPUT), WORD(convert.plan.recipe.compute_dtype),
     CHOICES("bfloat16", "float16", "float32"), .dflt_note = "the model's own dtype",
     .quantizes = 1, .since = "0.1.0",
     FOREIGN({.names = "bnb-4bit-compute-dtype"}),
     .help = "dtype that loaders are told to compute in",
     .more = "Goes to quantization_config in config.json; no stored weight depends on it."},
    {ROW("compress", CONVERT, OUTPUT), OWN(QC_ARG_TEXT, qc_option_set_compress),
     .arg = "none|zstd[:LEVEL]", .dflt = "zstd:1", .since = "0.1.0",
     FOREIGN({.names = "compression no-compress no-compression uncompressed plain",
              .meant = "--compress none"}),
     .help = "compression of the shards, level 1 to 19",
     .more = "zstd writes .safetensors.zst files in the Zstandard seekable format; 'zstd -d' and "
             "'qconv unpack' both turn them into plain .safetensors files. none writes plain "
             ".safetensors files right away."},
    {ROW("max-shard-size", FITTING, OUTPUT), SIZE(convert.plan.max_shard_bytes), .arg = "SIZE",
     .dflt = "5GB", .min = 1, .since = "0.1.0",
     FOREIGN({.names = "shard-size split-size split-max-size max-shard"}),
     .help = "bytes of tensors in one shard, before compression",
     .more = "A weight and its scales stay together, so one that is larger gets a shard of its "
             "own."},
    {ROW("rest", FITTING, TENSORS), CHOICE(convert.plan.recipe.rest), CHOICES(QC_REST_NAMES),
     .dflt = "keep", .since = "0.1.0",
     .help = "what floating-point tensors that are not quantized become",
     .more = "keep leaves them bit for bit as they are. With --to fp16 and --to bf16 it counts "
             "only for a checkpoint that is quantized already."},
    {ROW("keep", FITTING, TENSORS), OWN(QC_ARG_TEXT, qc_option_set_rule), .arg = "GLOB",
     .repeats = 1, .since = "0.1.0",
     FOREIGN({.names = "skip skip-modules exclude ignore no-quantize modules-to-not-convert "
                       "llm-int8-skip-modules leave"}),
     .help = "leave tensors with these names as they are; may be repeated",
     .more = "'*' stands for any run of characters, dots included, '?' for one, '[a-z]' for one "
             "of a class. The glob must match the whole name. Of several --keep and --quantize "
             "that match, the last one wins. A glob that matches no tensor is an error."},
    {ROW("quantize", FITTING, TENSORS), OWN(QC_ARG_TEXT, qc_option_set_rule), .arg = "GLOB",
     .quantizes = 1, .repeats = 1, .since = "0.1.0",
     FOREIGN({.names = "include only target-modules targets"}),
     .help = "quantize tensors with these names; may be repeated",
     .more = "For what --keep excluded before, or a linear layer that the model's recipe leaves "
             "alone. Only with --to nf4 and --to int8."},
    {ROW("recipe", FITTING, TENSORS), PATH(recipe_file), .arg = "FILE", .since = "0.1.0",
     FOREIGN({.names = "config recipe-file"}),
     .help = "read --keep and --quantize rules from a JSON file",
     .more = "{\"rules\": [{\"keep\": \"GLOB\"}, {\"quantize\": \"GLOB\"}]}. Its rules come "
             "before those of the command line. Unknown members are refused."},
    {ROW("split-fused", FITTING, TENSORS), SWITCH(convert.plan.recipe.split_fused), .since = "0.5.0",
     .help = "let rules and --to auto split what engines load as one",
     .more = "vLLM and SGLang hold q, k and v as one module, gate and up as another, and the "
             "experts of a layer as one. Without this option a --keep or --quantize that names "
             "some of them counts for all of them, and --to auto chooses once for them."},
    {ROW("for", FITTING | INSPECT, TENSORS), CHOICE(engines), CHOICES(QC_ENGINE_NAMES),
     VALUES(QC_ENGINE_BITS), .since = "0.5.0",
     FOREIGN({.names = "engine target-engine runtime serve"}),
     .help = "refuse what this engine cannot load, and say what helps",
     .more = "transformers with bitsandbytes, vLLM with its plug-in for it, SGLang or Unsloth; all "
             "asks for all of them. docs/interop.md has their versions, what was run and what was "
             "only read. inspect asks a finished output, and ends with exit code 4 if one of them "
             "does not load it."},
    {ROW("requantize", FITTING, TENSORS), SWITCH(convert.plan.recipe.requantize), .since = "0.2.0",
     .help = "quantize MXFP4 experts anew instead of passing them through",
     .more = "This is for gpt-oss, whose experts are MXFP4 already. Passing them through loses "
             "nothing; rounding them again to NF4 saves 3% of them."},
    {ROW("drop-mtp", FITTING, TENSORS), SWITCH(convert.plan.recipe.drop_mtp), .since = "0.2.0",
     .help = "leave out multi-token prediction layers",
     .more = "DeepSeek-V3 has one behind its last layer; plain decoding does not use it."},
    {ROW("schemes", FITTING, TENSORS), LIST(convert.plan.recipe.schemes), .arg = "LIST",
     .dflt_note = "nf4,nf4-32,int8,16bit", .only_with = {"--to auto"}, .since = "0.2.0",
     .help = "what --to auto may choose from",
     .more = "Write commas between the names. nf4-32 is NF4 in blocks of 32; with --format "
             "compressed-tensors int4 and int4-32 stand for both. 16bit leaves a weight as it is, "
             "even if that is FP8. By default int8 is left out if a card does not run it (V100). "
             "If the checkpoint is in 16 bits and int8 is not on the list, "
             "transformers loads the result whatever is chosen."},
    {ROW("explain", FITTING, TENSORS), SWITCH(convert.explain), .only_with = {"--to auto"},
     .since = "0.2.0",
     .help = "with --to auto: show what was chosen for which weights, and why",
     .more = "It lists kinds of weights and ranges of layers; with -v it has a line for every "
             "weight."},
    {ROW("vram", FITTING, FIT), TEXT(convert.plan.fit.vram), .arg = "SPEC",
     .dflt_of = {PLAN, "auto"}, .since = "0.2.0",
     FOREIGN({.names = "gpu gpus", .meant = "--vram 2x40GB", .of_commands = PLAN},
             {.names = "gpu-memory gpu-mem memory mem max-memory budget devices cards vram-gb "
                       "size", .meant = "--vram 2x40GB"}),
     .help = "the devices: 2x40GB, 24GB+16GB, 2xA100-40GB, auto, +cpu:64GB, +disk",
     .more = "Terms are joined by '+'. A term is a size (GB is 10^9 bytes, GiB is 2^30) or the "
             "name of a card, and a count and an x may stand before it. auto means this machine's "
             "GPUs as they are now. cpu and disk, with a size after a colon, take what the GPUs "
             "cannot hold. convert then cuts shards where devices change and writes "
             "device_map.json. docs/hardware.md lists the cards."},
    {ROW("parallel", FITTING, FIT), CHOICE(convert.plan.fit.parallel),
     CHOICES("layers", "tensor"), .dflt = "layers", .only_with = {"--vram"},
     .not_with = "--mode train", .since = "0.5.0",
     .help = "how a model lies on several GPUs: whole layers, or a share of each",
     .more = "layers puts each layer on one GPU, as a device map of transformers does. tensor "
             "gives every GPU of --vram a share of every layer, as vLLM splits them; see --tp."},
    {ROW("tp", FITTING, FIT), NUMBER(convert.plan.fit.tensor_parallel), .arg = "N", .min = 1,
     .max = 256, .only_with = {"--vram"}, .not_with = "--mode train",
     .excludes = {"--parallel: --tp means --parallel tensor"}, .since = "0.5.0",
     FOREIGN({.names = "tensor-parallel-size tensor-parallel tp-size"}),
     .help = "split every layer over N GPUs, as vLLM does with tensor parallelism",
     .more = "--vram has to name N GPUs. Weights, KV cache and workspace are then those that vLLM "
             "has on each of them, and the plan ends with the command that serves the model so. "
             "convert writes one set of shards, which vLLM splits when it loads them. Without "
             "--to the model stays as it is. bitsandbytes' forms cannot be split."},
    {ROW("margin", FITTING, FIT), DECIMAL(convert.plan.fit.margin, 0, 1), .arg = "SHARE",
     .dflt = "0.9", .only_with = {"--vram"}, .since = "0.2.0",
     FOREIGN({.names = "gpu-memory-utilization utilization headroom reserve"}),
     .help = "share of each device that may be used, above 0 and at most 1"},
    {ROW("context", FITTING, FIT), NUMBER(convert.plan.fit.context), .arg = "TOKENS", .min = 1,
     .max = 1000000000, .dflt_note = "8192, or the model's limit", .only_with = {"--vram"},
     .since = "0.2.0",
     FOREIGN({.names = "ctx ctx-size n-ctx context-length context-size max-length max-model-len "
                       "max-seq-len max-seq-length seq-len seq-length sequence-length c"}),
     .help = "tokens of one sequence that the KV cache is to hold"},
    {ROW("batch", FITTING, FIT), NUMBER(convert.plan.fit.batch), .arg = "N", .min = 1,
     .max = 1000000, .dflt = "1", .only_with = {"--vram"},
     .not_with = "--mode train, which finds the batch; see --effective-batch", .since = "0.2.0",
     FOREIGN({.names = "batch-size b bs"}),
     .help = "sequences at once"},
    {ROW("images", FITTING, FIT), NUMBER(convert.plan.fit.images), .arg = "N", .min = 0,
     .max = 1000, .dflt = "1", .only_with = {"--vram"}, .not_with = "--mode train",
     .since = "0.2.0",
     .help = "images per sequence, for models with cross-attention"},
    {ROW("kv-dtype", FITTING, FIT), CHOICE(convert.plan.fit.kv_bits),
     CHOICES("fp16", "bf16", "fp8", "fp32"), VALUES(16, 16, 8, 32), .dflt = "fp16",
     .only_with = {"--vram"}, .not_with = "--mode train", .since = "0.2.0",
     FOREIGN({.names = "kv-cache-dtype cache-type cache-type-k cache-dtype kv"}),
     .help = "element type of the KV cache"},
    {ROW("mla", FITTING, FIT), OWN(QC_ARG_CHOICE, qc_option_set_mla),
     CHOICES("latent", "absorbed", "expanded"), .dflt = "latent", .only_with = {"--vram"},
     .not_with = "--mode train", .since = "0.2.0",
     .help = "form in which DeepSeek's attention is cached and computed",
     .more = "latent: the latent and the rotary part of a token are cached, and every layer "
             "computes the keys and values of the whole context from them, as transformers 5 "
             "does. absorbed: the cache is the same, and attention computes with the latent "
             "itself, as vLLM does. expanded: keys and values of every head are cached, as "
             "transformers 4 does, which takes 71 times as much for DeepSeek-V2.5."},
    {ROW("prefill", FITTING, FIT), OWN(QC_ARG_TEXT, qc_option_set_prefill), .arg = "TOKENS",
     .min = 1, .max = 1000000000, GIVEN(convert.plan.fit.prefill_given),
     .dflt_note = "whole; 2048 with --tp", .only_with = {"--vram"},
     .not_with = "--mode train", .since = "0.5.0",
     .help = "tokens of a prompt that are read at once, or whole",
     .more = "transformers reads a prompt whole unless its prefill_chunk_size is set; vLLM reads "
             "as many tokens at once as --max-num-batched-tokens says. The more at once, the more "
             "workspace, and the less room for context."},
    {ROW("cuda-context", FITTING, FIT), SIZE(convert.plan.fit.cuda_context_bytes), .arg = "SIZE",
     .dflt = "500MB", .only_with = {"--vram"}, .since = "0.2.0",
     .help = "what a CUDA context and its kernels take on every GPU"},
    {ROW("html", PLAN, FIT), PATH(html), .arg = "FILE", .since = "0.2.0",
     .help = "also write the plan as one HTML page"},
    {ROW("device-map", PLAN, FIT), PATH(device_map), .arg = "FILE", .not_with = "--mode train",
     .excludes = {"--tp: a device map places whole layers"}, .since = "0.2.0",
     .help = "also write the placement as accelerate's device_map"},
    {ROW("device", QC_CMD_BIT(QC_CMD_UNPACK), OUTPUT), LIST(device), .arg = "NAME",
     .since = "0.2.0",
     .help = "only the shards of one device of the plan: cuda:0, cpu",
     .more = "For an output that was made with --vram."},
    {ROW("device", CONVERT | MEASURING | READING, RUN), OWN(QC_ARG_TEXT, qc_option_set_run_device),
     .arg = "auto|cpu|cuda[:N,...]", .dflt_note = "auto", .since = "0.3.0",
     FOREIGN({.names = "gpu gpus cuda use-gpu use-cuda gpu-id gpu-ids cuda-device "
                       "cuda-visible-devices ngl", .meant = "--device cuda, or cuda:0,2"},
             {.names = "cpu cpu-only no-gpu no-cuda use-cpu", .meant = "--device cpu"}),
     .help = "what does the work: cpu, every GPU, or GPUs 0 and 2 with cuda:0,2",
     .more = "auto takes the GPUs if there are any and this build has kernels for them, else the "
             "CPU. cpu does not even ask the driver. QCONV_DEVICE says the same where --device is "
             "not given. The bytes that are written do not depend on it, except with --calibrate."},
    {ROW("mode", PLAN, TRAIN), CHOICE(train.on), CHOICES("infer", "train"), .dflt = "infer",
     .since = "0.2.0",
     FOREIGN({.names = "train training finetune fine-tune", .meant = "--mode train"}),
     .help = "what the model is to do"},
    {ROW("method", PLAN, TRAIN), CHOICE(train.method), CHOICES("full", "lora", "qlora"),
     GIVEN(train.method_given), .dflt_note = "all are tried", .only_with = {"--mode train"},
     .since = "0.2.0",
     .help = "what is trained"},
    {ROW("optimizer", PLAN, TRAIN), CHOICE(train.optimizer),
     CHOICES("adamw", "adam", "adam8bit", "sgd"), GIVEN(train.optimizer_given),
     .dflt_note = "adamw, and adam8bit where it helps", .only_with = {"--mode train"},
     .since = "0.2.0",
     .help = "optimizer whose states are counted"},
    {ROW("precision", PLAN, TRAIN), CHOICE(train.precision), CHOICES("bf16", "fp16", "fp32"),
     GIVEN(train.precision_given), .dflt_note = "bf16; fp16 on Volta and Turing",
     .only_with = {"--mode train"}, .since = "0.2.0",
     .help = "number format of the computation; 16 bits keep float32 master weights"},
    {ROW("zero", PLAN, TRAIN), NUMBER(train.zero), GIVEN(train.zero_given), .arg = "STAGE",
     .min = 0, .max = 3, .dflt_note = "chosen", .only_with = {"--mode train"}, .since = "0.2.0",
     .help = "ZeRO stage over the GPUs, 0 to 3"},
    {ROW("checkpointing", PLAN, TRAIN), CHOICE(train.checkpointing), CHOICES("on", "off"),
     VALUES(1, 0), GIVEN(train.checkpointing_given), .dflt_note = "chosen",
     .only_with = {"--mode train"}, .since = "0.2.0",
     .help = "keep only the inputs of layers and compute the rest again"},
    {ROW("lora-rank", PLAN, TRAIN), NUMBER(train.lora_rank), .arg = "R", .min = 1, .max = 65536,
     .dflt = "16", .only_with = {"--mode train"}, .since = "0.2.0",
     FOREIGN({.names = "rank lora-r r"}),
     .help = "rank of the adapters, on every linear layer"},
    {ROW("effective-batch", PLAN, TRAIN), NUMBER(train.effective_batch), .arg = "N", .min = 1,
     .max = 1000000000, .dflt = "32", .only_with = {"--mode train"}, .since = "0.2.0",
     .help = "sequences per optimizer step over all GPUs; sets the accumulation"},
    {ROW("apply", PLAN, TRAIN), PATH(train.apply), .arg = "FILE", .only_with = {"--mode train"},
     .since = "0.2.0",
     .help = "write the best setting as an accelerate or DeepSpeed configuration",
     .more = "JSON. A name with 'deepspeed' or 'ds_' in it gets DeepSpeed's form, any other "
             "accelerate's. What was in FILE is kept as FILE.backup."},
    {ROW("profile", PLAN, TRAIN), SWITCH(train.profile), .only_with = {"--mode train"},
     .since = "0.2.0",
     .help = "also allocate on this machine's GPU and measure, to check the estimate"},
    {ROW("as", HARDWARE, FIT), TEXT(hardware.as), .arg = "CARDS", .since = "0.2.0",
     .help = "describe these cards instead of this machine's: 2xA100-40GB, 3090",
     .more = "docs/hardware.md lists the cards."},
    {ROW("watch", HARDWARE, RUN), SWITCH(hardware.watch),
     .excludes = {"--as: what is not here cannot be watched"}, .since = "0.2.0",
     .help = "follow the memory of every GPU and process"},
    {ROW("csv", HARDWARE, RUN), PATH(hardware.csv), .arg = "FILE", .only_with = {"--watch"},
     .since = "0.2.0",
     .help = "with --watch: also write every sample to a CSV file"},
    {ROW("interval", HARDWARE, RUN), DECIMAL(hardware.interval, 0.01, 3600), .arg = "SECONDS",
     .dflt = "1", .only_with = {"--watch"}, .since = "0.2.0",
     .help = "with --watch: time between samples, 0.01 to 3600"},
    {ROW("samples", HARDWARE, RUN), NUMBER(hardware.samples), .arg = "N", .min = 1,
     .max = 1000000000, .dflt_note = "until interrupted", .only_with = {"--watch"},
     .since = "0.2.0",
     .help = "with --watch: stop after this many"},
    {ROW("against", VERIFY | VALIDATE | READING, MEASURE), PATH(call.against), .arg = "MODEL",
     .dflt_of = {VALIDATE, "required"}, .missing = "the checkpoint that OUT was made from",
     .since = "0.3.0",
     FOREIGN({.names = "original reference ref base base-model source model baseline-model "
                       "compare m"}),
     .help = "the checkpoint that OUT was made from"},
    {ROW("text", READING, MEASURE), PATH(eval.text), .arg = "FILE", .dflt_of = {EVAL, "required"},
     .missing = "a file of text, or of token ids", .since = "0.4.0",
     FOREIGN({.names = "file data dataset corpus prompt prompts input f"}),
     .help = "the text to read, or FILE.ids with token ids, one sequence per line",
     .more = "The text is UTF-8. A file whose name ends in .ids holds decimal token ids with "
             "spaces between them, one sequence per line; they are taken as they are."},
    {ROW("tokenizer", READING | CONVERT, MEASURE), PATH(call.tokenizer), .arg = "PATH",
     .dflt_note = "the model's own", .only_with = {"--calibrate", "--text"}, .since = "0.4.0",
     .help = "a tokenizer.json, or a directory that has one"},
    {ROW("context", READING, MEASURE), NUMBER(eval.context), .arg = "TOKENS", .min = 2,
     .max = 1000000000, .dflt_note = "2048, or the model's limit", .only_with = {"--text"},
     .since = "0.4.0",
     FOREIGN({.names = "ctx ctx-size n-ctx context-length context-size max-length max-model-len "
                       "max-seq-len max-seq-length seq-len seq-length sequence-length c"}),
     .help = "tokens in each window that the text is cut into"},
    {ROW("max-tokens", READING, MEASURE), NUMBER(eval.max_tokens), .arg = "N", .min = 2,
     .max = 1000000000000, .dflt_note = "all", .only_with = {"--text"}, .since = "0.4.0",
     .help = "read at most this many tokens of the text"},
    {ROW("max-kl", EVAL, MEASURE), DECIMAL(eval.max_kl, 0, 100), .arg = "X",
     .only_with = {"--against"}, .since = "0.4.0",
     .help = "exit code 4 if the mean KL divergence is larger",
     .more = "In nats, above 0 and at most 100."},
    {ROW("eval", REPORT, MEASURE), PATH(report.eval), .arg = "FILE", .excludes = {"--text"},
     .since = "0.4.0",
     .help = "include the result of an earlier 'qconv eval --json'"},
    {ROW("bench", REPORT, MEASURE), PATH(report.bench), .arg = "FILE", .since = "0.4.0",
     .help = "include the result of an earlier 'qconv bench --json'"},
    {ROW("sample", VALIDATE, MEASURE), NUMBER(validate.sample), .arg = "N", .min = 1,
     .max = 1000000, .dflt_note = "all", .since = "0.3.0",
     .help = "measure only this many of the quantized layers, evenly spread"},
    {ROW("shapes", BENCH, MEASURE), LIST(bench.shapes), .arg = "LIST",
     .dflt_note = "the layers of Llama-3.3-70B and Llama-3.1-8B", .since = "0.3.0",
     .help = "weights, outputs x inputs: 8192x8192,8192+1024+1024x8192",
     .more = "A + between outputs joins weights that share their input (q, k and v): qconv "
             "multiplies them in one launch, cuBLAS one after another."},
    {ROW("scheme", BENCH, MEASURE), LIST(bench.schemes), .arg = "LIST", .dflt_note = "nf4,int8",
     .since = "0.3.0",
     .help = "what to measure, of nf4, nf4-plain, int8 and int8-blocks",
     .more = "nf4-plain has float32 scales instead of double-quantized ones; int8-blocks has a "
             "scale per block instead of per row."},
    {ROW("m", MEASURING, MEASURE), OWN(QC_ARG_TEXT, qc_option_set_m), .arg = "LIST", .min = 1,
     .max = 1048576, .dflt_note = "1,4,16,64,256,1024",
     .dflt_of = {BENCH, "1 to 4096 by powers of two"}, .since = "0.3.0",
     .help = "numbers of rows of activations, with commas between them"},
    {ROW("activations", VALIDATE, MEASURE), PATH(validate.activations), .arg = "FILE",
     .dflt_note = "random", .since = "0.3.0",
     .help = "take activations from this .safetensors file",
     .more = "docs/validate.md says what the file holds, and how random ones are made."},
    {ROW("dtype", BENCH, MEASURE), CHOICE(bench.bf16), CHOICES("fp16", "bf16"), .dflt = "fp16",
     .since = "0.3.0",
     .help = "dtype of activations and results"},
    {ROW("seed", MEASURING, MEASURE), NUMBER(products.seed), .arg = "N", .min = 0,
     .max = 9007199254740991, .dflt = "1", .since = "0.3.0",
     .help = "seed of the random numbers"},
    {ROW("path", BENCH, MEASURE), WORD(bench.path),
     CHOICES("gemv", "mma-884", "mma-16816", "dequant-gemm"), .dflt_note = "by shape and GPU",
     .since = "0.3.0",
     .help = "the kernel to use for every shape"},
    {ROW("rounds", BENCH, MEASURE), NUMBER(bench.rounds), .arg = "N", .min = 1, .max = 10000,
     .dflt = "30", .since = "0.3.0",
     .help = "measure everything at most this many times; the median counts"},
    {ROW("seconds", BENCH, MEASURE), NUMBER(bench.seconds), .arg = "S", .min = 1, .max = 1000000,
     .dflt = "150", .since = "0.3.0",
     .help = "about how long all of it may take",
     .more = "If the time is short there are fewer rounds. Whatever does not fit at all is left "
             "out, and the result says how much that is."},
    {ROW("tune", BENCH, MEASURE), SWITCH(bench.tune),
     .excludes = {"--path", "--markdown", "--tuning"}, .since = "0.5.0",
     .help = "find the best kernel, and how to cut its work, for each shape and M",
     .more = "Measures every choice there is against the one that qconv makes by itself, and "
             "takes another one only where it is faster by more than the times spread. "
             "docs/bench.md says how."},
    {ROW("save", BENCH, MEASURE), PATH(bench.save), .arg = "FILE", .only_with = {"--tune"},
     .since = "0.5.0",
     .help = "with --tune: write the better choices as a table for --tuning",
     .more = "An existing file is replaced as a whole after each row that was measured."},
    {ROW("tuning", MEASURING | READING, RUN), PATH(call.tuning), .arg = "FILE",
     .dflt_note = "the file that QCONV_TUNING names", .only_with = {"--text"}, .since = "0.5.0",
     .help = "choose GPU kernels by this table of 'qconv bench --tune --save'",
     .more = "A table that was made on another GPU is not used, and a warning says so. The order "
             "of sums, and so the last bits of products, depend on the table."},
    {ROW("max-error", VALIDATE, MEASURE), DECIMAL(validate.max_error, 0, 10), .arg = "X",
     .since = "0.3.0",
     .help = "exit code 4 if the relative output error of a layer is larger",
     .more = "Above 0 and at most 10: 0.1 is 10%."},
    {ROW("baseline", VALIDATE, MEASURE), PATH(validate.baseline), .arg = "FILE", .since = "0.3.0",
     .help = "exit code 4 if a layer is worse than in this earlier run"},
    {ROW("save-baseline", VALIDATE, MEASURE), PATH(validate.save_baseline), .arg = "FILE",
     .since = "0.3.0",
     .help = "write this run's errors for --baseline"},
    {ROW("tolerance", VALIDATE, MEASURE), DECIMAL(validate.tolerance, 0, 10), .arg = "X",
     .dflt = "0.001", .only_with = {"--baseline"}, .since = "0.3.0",
     .help = "with --baseline: how much worse still passes",
     .more = "A share of the earlier error, above 0 and at most 10: 0.001 is 0.1%."},
    {ROW("html", VALIDATE | REPORT, OTHER), PATH(html), .arg = "FILE",
     .dflt_of = {REPORT, "standard output"}, .since = "0.3.0",
     FOREIGN({.names = "out output outfile output-file o save page"}),
     .help = "write the result as one HTML page, with plots, to a file"},
    {ROW("markdown", BENCH, OTHER), SWITCH(bench.markdown), .since = "0.3.0",
     .help = "write the result to standard output as Markdown tables"},
    {ROW("output", BENCH, OTHER), PATH(bench.output), .arg = "FILE", .since = "0.3.0",
     FOREIGN({.names = "out outfile output-file o"}),
     .help = "also write the JSON of --json to a file",
     .more = "The file is replaced as a whole after everything that was measured, with "
             "\"complete\": false until the end, so that a run that is killed leaves what it has "
             "measured."},
    {ROW("dry-run", CONVERT, RUN), SWITCH(convert.dry_run), .since = "0.1.0",
     FOREIGN({.names = "dry simulate no-op noop whatif n"}),
     .help = "show what would be written, with exact sizes; write nothing",
     .more = "OUT may be left out; if it is given, it is checked."},
    {ROW("force", CONVERT | UNPACK, RUN), SWITCH(convert.force), .since = "0.1.0",
     FOREIGN({.names = "overwrite clobber replace yes y f"}),
     .help = "replace another output, or write into a directory that holds other files",
     .more = "Deletes only what the manifest of the old output lists, and names files of others "
             "that it replaces. Weights that no manifest lists are never touched: they refuse the "
             "run. Without --force an output that is what would be made is complete already. "
             "Nothing is ever written to the source or below it, or through a link in the "
             "directory."},
    {ROW("restart", CONVERT, RUN), SWITCH(convert.restart), .since = "0.5.0",
     FOREIGN({.names = "resume continue",
              .meant = "nothing: an interrupted conversion is continued by the same command"}),
     .help = "begin anew instead of continuing an interrupted conversion",
     .more = "What the interrupted one left in OUT is removed. Refused when it has deleted files "
             "of its source (--consume-source): then only continuing gives a whole model."},
    {ROW("consume-source", CONVERT, RUN), SWITCH(convert.consume_source), .since = "0.5.0",
     FOREIGN({.names = "delete-source remove-source move in-place inplace"}),
     .help = "delete each weight file of MODEL once all of it is written to OUT and synced",
     .more = "For disks that hold one copy only. A kill at any moment loses nothing: the same "
             "command continues. What was deleted cannot be checked against OUT afterwards. "
             "Weight files that are links are refused. See docs/cli.md."},
    {ROW("part", CONVERT, RUN), OWN(QC_ARG_TEXT, qc_option_set_part), .arg = "I/N",
     .dflt_note = "in a Slurm step with several tasks, that of the task", .since = "0.5.0",
     .help = "do the I-th of N parts of the work, 1 to N; the last to finish completes OUT",
     .more = "For several machines that share MODEL and OUT: the same command on each, with its "
             "own I. 1/1 does all of it whatever the scheduler says. See docs/cluster.md."},
    {ROW("threads", WORKING, RUN), NUMBER(call.threads), .arg = "N", .min = 1, .max = 1024,
     .dflt_note = "one per processor", .since = "0.1.0",
     FOREIGN({.names = "jobs j workers num-workers nthreads n-threads num-threads thread cores "
                       "nproc t"}),
     .help = "number of threads, 1 to 1024",
     .more = "The bytes written do not depend on it."},
    {ROW("progress", WORKING | BENCH, RUN), CHOICE(call.progress),
     CHOICES("auto", "always", "never"), .dflt = "auto", .since = "0.1.0",
     .help = "whether to show progress on standard error",
     .more = "auto: a bar on a terminal, a plain line now and then elsewhere. always: the bar "
             "wherever standard error goes."},
    {ROW("json", ANSWERS, OTHER), SWITCH(call.json), .excludes = {"--markdown"}, .since = "0.1.0",
     .help = "write the result to standard output as one JSON object"},
    {ROW("quiet", ANYWHERE, OTHER), .letter = 'q', SWITCH(call.quiet), .excludes = {"--verbose"},
     .since = "0.1.0",
     FOREIGN({.names = "silent s no-progress"}),
     .help = "no progress, no summary, no warnings; errors only",
     .more = "The answers of plan, inspect, hardware, bench, eval, validate and report, --dry-run "
             "and --json are still printed. convert, unpack and verify print nothing when all is "
             "well: their exit code says so."},
    {ROW("verbose", ANYWHERE, OTHER), .letter = 'v', COUNT(call.verbose), .repeats = 1,
     .since = "0.1.0",
     FOREIGN({.names = "debug log-level loglevel"}),
     .help = "say more; -vv still more",
     .more = "-v: what is about to be done, every stored tensor with inspect, and where in the "
             "source an error was found. -vv: the error of every quantized tensor."},
    {ROW("help", ANYWHERE, OTHER), .letter = 'h', .since = "0.1.0",
     FOREIGN({.names = "usage ?"}),
     .help = "show this help"},
    {ROW("version", ANYWHERE, OTHER), .alone = QC_CMD_VERSION, .since = "0.1.0",
     FOREIGN({.names = "v V"}),
     .help = "show the version"},
    {ROW("man", ANYWHERE, OTHER), .hidden = 1, .alone = QC_CMD_MAN, .since = "0.1.0",
     .help = "write this manual page",
     .more = "To read it: qconv --man > qconv.1, then man -l qconv.1."},
    {ROW("completion", ANYWHERE, OTHER), WORD(shell), CHOICES("bash", "zsh", "fish"), .hidden = 1,
     .alone = QC_CMD_COMPLETION, .since = "0.1.0",
     .help = "write the completion for a shell",
     .more = "In bash: source <(qconv --completion bash)."},
    {.name = NULL},
};
/* clang-format on */

const char *qc_option_note(const qc_option_row *row, qc_command command)
{
    return row->dflt_of.commands & QC_CMD_BIT(command) ? row->dflt_of.note : row->dflt_note;
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
