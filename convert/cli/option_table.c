#include "convert/cli/option_table.h"

#include "convert/cli/option_values.h"
#include "convert/plan/engines.h"

#define CONVERT  QC_CMD_BIT(QC_CMD_CONVERT)
#define INSPECT  QC_CMD_BIT(QC_CMD_INSPECT)
#define VERIFY   QC_CMD_BIT(QC_CMD_VERIFY)
#define UNPACK   QC_CMD_BIT(QC_CMD_UNPACK)
#define PLAN     QC_CMD_BIT(QC_CMD_PLAN)
#define HARDWARE QC_CMD_BIT(QC_CMD_HARDWARE)
#define VALIDATE QC_CMD_BIT(QC_CMD_VALIDATE)
#define FITTING  (CONVERT | PLAN)
#define WORKING  (CONVERT | VERIFY | UNPACK | VALIDATE)
#define ANSWERS  (CONVERT | VERIFY | INSPECT | UNPACK | PLAN | HARDWARE | VALIDATE)
#define ANYWHERE (ANSWERS | QC_CMD_BIT(QC_CMD_HELP))

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
#define RULES(...)                                                                                 \
    .rules = (const qc_option_rule[])                                                              \
    {                                                                                              \
        __VA_ARGS__,                                                                               \
        {                                                                                          \
            .of = NULL                                                                             \
        }                                                                                          \
    }
#define WORDS(...)                                                                                 \
    .words = (const qc_choice_words[])                                                             \
    {                                                                                              \
        __VA_ARGS__,                                                                               \
        {                                                                                          \
            NULL, NULL                                                                             \
        }                                                                                          \
    }
/* What several rows say. */
#define WHOLE_MODEL                                                                                \
    {                                                                                              \
        .not_with = "--part !1/1",                                                                 \
        .why = ": a part has no inputs of later layers without those of the earlier"               \
    }
/* The values of --to that compressed-tensors alone has. */
#define PACKED_INTEGERS "int2|int3|int4|int5|int6|int7"
#define SIXTEEN_BITS    "16 16bit 16-bit f16 float half-precision"
#define KEEP_WORDS      "none same copy original asis as-is"
#define YES_WORDS       "yes true 1"
#define NO_WORDS        "no false 0"
#define FOREIGN(...)                                                                               \
    .foreign = (const qc_foreign_name[])                                                           \
    {                                                                                              \
        __VA_ARGS__,                                                                               \
        {                                                                                          \
            .names = NULL                                                                          \
        }                                                                                          \
    }

const char *const qc_option_group_titles[QC_GROUP_COUNT] = {
    [QC_GROUP_OUTPUT] = "What is written", [QC_GROUP_TENSORS] = "Which tensors",
    [QC_GROUP_FIT] = "Where it is to run", [QC_GROUP_MEASURE] = "What is measured",
    [QC_GROUP_RUN] = "How it runs",        [QC_GROUP_OTHER] = "Other",
};

/* clang-format off */
const qc_option_row qc_option_table[] = {
    {ROW("to", FITTING, OUTPUT), CHOICE(convert.plan.recipe.to), CHOICES(QC_TO_NAMES),
     GIVEN(convert.plan.recipe.to_given), .required = CONVERT,
     .dflt_of = {PLAN, "nf4, or keep for what has 4 bits or bitsandbytes' form already"}, .since = "0.1.0",
     FOREIGN({.names = "wbits nbits w-bit quant quant-type quantization quantization-type "
                       "quant-method qtype q outtype out-type scheme type precision "
                       "dtype torch-dtype method target",
              .meant = "--to nf4 (4 bits), --to int8 (8 bits) or --to bf16"},
             {.names = "load-in-4bit 4bit 4-bit nf4 fp4 q4 bnb-4bit-quant-type",
              .meant = "--to nf4"},
             {.names = "int4 w4a16", .meant = "--to int4"},
             {.names = "int5 w5a16 5bit 5-bit q5", .meant = "--to int5"},
             {.names = "int6 w6a16 6bit 6-bit q6", .meant = "--to int6"},
             {.names = "load-in-8bit 8bit 8-bit int8 q8", .meant = "--to int8"},
             {.names = "bf16 bfloat16", .meant = "--to bf16"},
             {.names = "fp16 float16 half", .meant = "--to fp16"},
             {.names = "auto", .meant = "--to auto"},
             {.names = "dequantize", .meant = "--to bf16"}),
     WORDS({"4bit 4-bit 4 fp4 q4 bnb bitsandbytes bnb4 nf4-double w4 4bits", "nf4"},
           {"8bit 8-bit 8 q8 llm.int8 w8 bnb8 8bits i8 uint8 w8a8", "int8"}, {"w4a16", "int4"},
           {"2bit 2-bit 2 q2 w2 2bits w2a16", "int2"}, {"3bit 3-bit 3 q3 w3 3bits w3a16", "int3"},
           {"5bit 5-bit 5 q5 w5 5bits w5a16", "int5"}, {"6bit 6-bit 6 q6 w6 6bits w6a16", "int6"},
           {"7bit 7-bit 7 q7 w7 7bits w7a16", "int7"},
           {SIXTEEN_BITS, "bf16"}, {"mixed best mix dynamic", "auto"}, {KEEP_WORDS, "keep"}),
     RULES({.of = PACKED_INTEGERS, .implies = "--format compressed-tensors"},
           /* What 8-bit activations cost is in no predicted error. */
           {.of = "auto", .implies = "--activation-bits 16"},
           {.of = "auto", .needs = "--vram or --bits",
            .why = ": the devices that the model has to fit, or the average bits of a weight"}),
     .help = "what the weights of linear layers become",
     .more = "nf4: 4-bit NormalFloat in blocks, as bitsandbytes stores it. int8: one scale per "
             "row, as LLM.int8 stores it, or per block with --block-size. int2 to int7: integers of "
             "so many bits in groups, which vLLM splits over cards. auto: each weight "
             "becomes one of these or stays in 16 bits, so that the predicted error is as small "
             "as --vram allows. fp16 and bf16: every floating-point tensor is cast; if the "
             "checkpoint is quantized already, its quantized weights are turned back, and --rest "
             "decides about the others. keep: every tensor stays as it is, bit for bit, and the "
             "shards are cut, compressed and hashed anew."},
    {ROW("format", FITTING, OUTPUT), CHOICE(convert.plan.recipe.format),
     CHOICES(QC_FORMAT_NAMES), .dflt_note = "bitsandbytes, or compressed-tensors for int2 to int7",
     .quantizes = 1, .since = "0.5.0",
     FOREIGN({.names = "quant-format backend"}),
     WORDS({"bnb", "bitsandbytes"}, {"autoawq lmdeploy turbomind gemm", "awq"}, {"ct compressed llm-compressor llmcompressor vllm",
                                     "compressed-tensors"}),
     RULES({.of = "compressed-tensors", .needs = "--to " PACKED_INTEGERS "|int8|auto"},
           {.of = "awq", .needs = "--to int4", .why = ", the one width that it has"},
           {.of = "bitsandbytes", .not_with = "--to " PACKED_INTEGERS,
            .why = ": it has --to nf4, of 4 bits, and --to int8"}),
     .help = "the library whose format the quantized weights have",
     .more = "bitsandbytes is what transformers loads for inference and for training adapters. "
             "compressed-tensors is what vLLM splits over several cards: --to int8 is "
             "W8A8, --to int2 to int7 are W2A16 to W7A16, and --to auto mixes W4A16, W8A16 and 16 bits. "
             "awq has the codes of --to int4 for lmdeploy, which serves V100s with tensor parallelism, and for "
             "vLLM and SGLang."},
    {ROW("activation-bits", FITTING, OUTPUT), CHOICE(convert.plan.recipe.activations_16),
     CHOICES("8", "16"), .quantizes = 1, .dflt_note = "8, or 16 with --to auto", .since = "0.5.0",
     RULES({.not_with = "--to " PACKED_INTEGERS, .why = ", whose activations have 16 bits always"},
           {.needs = "--format compressed-tensors"}),
     .help = "bits of the inputs that int8 weights are multiplied with",
     .more = "8: W8A8, whose loader rounds the inputs of a layer to 8 bits, token by token. "
             "16: W8A16, where only the weights are integers; it takes --block-size, too."},
    {ROW("block-size", FITTING, OUTPUT), OWN(QC_ARG_NUMBER, qc_option_set_block_size),
     .arg = "N|channel", .min = 32, .max = 4096, .dflt_note = "64 for nf4, 128 for int2 to int7, a whole row for int8",
     .power_of_two = 1, .quantizes = 1, .since = "0.1.0",
     FOREIGN({.names = "group-size groupsize q-group-size gs blocksize bs"}),
     RULES({.not_with = "--to auto", .why = ", which chooses it; see --schemes"},
           {.above = 128, .not_with = "--format compressed-tensors|awq",
            .why = ", whose readers have kernels for groups of 32, 64 and 128"},
           {.of = "channel", .needs = "--format compressed-tensors",
            .why = "; --to int8 of bitsandbytes has a scale for each row without it"},
           {.of = "!channel", .with = "--format compressed-tensors",
            .needs = "--to " PACKED_INTEGERS " or --activation-bits 16",
            .why = ": 8-bit activations go with a scale for each row"}),
     .help = "how many weights share one scale: a power of two from 32 to 4096, or channel",
     .more = "With --to int8 a number chooses block-wise int8, a form of qconv's own that "
             "bitsandbytes does not load. channel gives each row one scale; it goes with --format "
             "compressed-tensors, whose groups have 32, 64 or 128 weights."},
    {ROW("no-double-quant", FITTING, OUTPUT), SWITCH(convert.plan.recipe.double_quant),
     VALUES(0, 1), .quantizes = 1, .since = "0.1.0",
     RULES({.not_with = "--format compressed-tensors|awq", .why = ", whose scales are never quantized"},
           {.with = "--to int8", .needs = "--block-size",
            .why = ": scales of rows are never quantized"}),
     FOREIGN({.names = "double-quant use-double-quant bnb-4bit-use-double-quant nested",
              .meant = "nothing: NF4 is doubly quantized unless --no-double-quant is given"}),
     .help = "keep the scales of blocks as float32 instead of quantizing them too",
     .more = "This costs about 0.37 bits per weight at block size 64. With --to int8 it needs "
             "--block-size."},
    {ROW("scale", CONVERT, OUTPUT), CHOICE(convert.plan.recipe.scale), CHOICES(QC_SCALE_NAMES),
     .dflt = "search", .quantizes = 1, .since = "0.4.0",
     WORDS({"max minmax", "absmax"}, {"mse", "search"}),
     .help = "how the scale of a block or row is chosen",
     .more = "absmax takes the largest absolute value, as bitsandbytes does. search takes the "
             "scale with the least squared error of those that can be stored. refit does the "
             "same and also fits the scales of the scales, which is slower. The files have the "
             "same form and size in all three cases."},
    {ROW("hessians", CONVERT, OUTPUT), PATH(convert.plan.calibrate.hessians), .arg = "PATH",
     .quantizes = 1, .since = "0.5.0",
     FOREIGN({.names = "calib calib-data calibration calibration-data calibration-dataset "
                       "dataset imatrix",
              .meant = "'python -m qconv calibrate MODEL OUT --text FILE'"}),
     RULES(WHOLE_MODEL),
     .help = "calibrate with second moments of inputs that were captured elsewhere",
     .more = "PATH is a safetensors file or a folder of them, as docs/calibration.md describes. "
             "With fd:N another program sends the moments over a Unix socket that this process "
             "inherits, as python -m qconv calibrate does."},
    {ROW("damping", CONVERT, OUTPUT), DECIMAL(convert.plan.calibrate.damping, 0, 1), .arg = "X",
     .dflt_note = "0.1, and more with few tokens",
     .since = "0.5.0",
     RULES({.needs = "--hessians"}),
     .help = "how much more calibrating trusts the weights than the text",
     .more = "This share of each input's mean square, and of a tenth of the average of them all, "
             "is added to that mean square. It is above 0 and at most 1. The default is 0.1 + 4 N "
             "/ tokens for N inputs. A value that is too small to compute with is raised, with a "
             "message."},
    {ROW("sided", CONVERT, OUTPUT), CHOICE(convert.plan.calibrate.sided), CHOICES("one", "two"),
     VALUES(1, 2), .dflt_note = "two where the moments are there, else one", .since = "0.5.0",
     WORDS({"1 input inputs one-sided", "one"}, {"2 both output outputs two-sided", "two"}),
     RULES({.needs = "--hessians"}),
     .help = "whether all outputs of a layer count alike",
     .more = "one: an error counts the same in every output. two: it counts as much as it changes "
             "what the model answers, which the second moments of the outputs' gradients say. "
             "'qconv calibrate' of the Python package takes both sides by itself."},
    {ROW("compute-dtype", CONVERT, OUTPUT), WORD(convert.plan.recipe.compute_dtype),
     CHOICES("bfloat16", "float16", "float32"), .dflt_note = "the model's own dtype",
     .quantizes = 1, .since = "0.1.0",
     FOREIGN({.names = "bnb-4bit-compute-dtype"}),
     .help = "the dtype that loaders are told to compute in",
     .more = "It goes to quantization_config in config.json. No stored weight depends on it."},
    {ROW("compress", CONVERT, OUTPUT), OWN(QC_ARG_TEXT, qc_option_set_compress),
     .arg = "none|zstd[:LEVEL]", .dflt = "zstd:1", .since = "0.1.0",
     FOREIGN({.names = "compression no-compress no-compression uncompressed plain",
              .meant = "--compress none"}),
     WORDS({NO_WORDS " off never raw store", "none"}),
     .help = "how the shards are compressed; LEVEL is 1 to 19",
     .more = "zstd writes .safetensors.zst files in the Zstandard seekable format; 'zstd -d' and "
             "'qconv unpack' both turn them into plain .safetensors files. none writes plain "
             ".safetensors files right away."},
    {ROW("max-shard-size", FITTING, OUTPUT), SIZE(convert.plan.max_shard_bytes), .arg = "SIZE",
     .dflt = "5GB", .min = 1, .since = "0.1.0",
     FOREIGN({.names = "shard-size split-size split-max-size max-shard"}),
     .help = "the most bytes of tensors in one shard, before compression",
     .more = "A weight and its scales stay together, so a weight that is larger gets a shard of "
             "its own."},
    {ROW("rest", FITTING, TENSORS), CHOICE(convert.plan.recipe.rest), CHOICES(QC_REST_NAMES),
     .dflt = "keep", .since = "0.1.0",
     WORDS({SIXTEEN_BITS, "bf16"}, {KEEP_WORDS, "keep"}),
     .help = "what becomes of floating-point tensors that are not quantized",
     .more = "keep leaves them bit for bit as they are. With --to fp16 and --to bf16 the option "
             "counts only for a checkpoint that is quantized already."},
    {ROW("lora", FITTING, TENSORS), OWN(QC_ARG_FILE, qc_option_set_lora),
     .arg = "ADAPTER[:SCALE]", .repeats = 1, .since = "0.5.0",
     FOREIGN({.names = "adapter adapters peft lora-adapter lora-path merge merge-lora lora-scaled"}),
     .help = "merge a low-rank adapter of peft's into MODEL first; may be repeated",
     .more = "ADAPTER is a folder with adapter_config.json and adapter_model.safetensors, and "
             "ADAPTER:0.5 weakens what it does by a half. Several are added in the order given. "
             "The weights are merged in double precision while they are read, before they are "
             "quantized or cast."},
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
     .more = "This is for what a --keep before it excluded, and for linear layers that the "
             "model's recipe leaves alone."},
    {ROW("recipe", FITTING, TENSORS), PATH(recipe_file), .arg = "FILE", .since = "0.1.0",
     FOREIGN({.names = "config recipe-file"}),
     .help = "read --keep and --quantize rules from a JSON file",
     .more = "FILE holds {\"rules\": [{\"keep\": \"GLOB\"}, {\"quantize\": \"GLOB\"}]}. Its rules "
             "come before those of the command line. Unknown members are refused."},
    {ROW("split-fused", FITTING, TENSORS), SWITCH(convert.plan.recipe.split_fused),
     .since = "0.5.0",
     .help = "let --keep, --quantize and --to auto split what engines load as one",
     .more = "vLLM holds q, k and v as one module, gate and up as another, and the "
             "experts of a layer as one. Without this option a --keep or --quantize that names "
             "some of them counts for all of them, and --to auto chooses once for them."},
    {ROW("experts", FITTING, TENSORS), CHOICE(convert.plan.recipe.experts),
     CHOICES("separate", "stacked"), VALUES(QC_EXPERTS_SEPARATE, QC_EXPERTS_STACKED),
     .dflt_note = "separate", .since = "0.5.0",
     FOREIGN({.names = "moe stack-experts fuse-experts"}),
     WORDS({"fused joined stack", "stacked"}, {"split unfused released per-expert", "separate"}),
     RULES({.of = "stacked", .not_with = "--to auto|int4",
            .why = ", which has no form for stacks"},
           {.of = "stacked", .not_with = "--format compressed-tensors",
            .why = ", which has no form for stacks"},
           {.of = "stacked", .not_with = "--lora",
            .why = ", whose experts have names of their own"}),
     .help = "write the experts of a layer as one tensor each, or as one for all",
     .more = "separate: each expert has tensors of its own, as mixtures are published; transformers 4 "
             "and vLLM load these, and transformers 5 after `import qconv`. stacked: one tensor "
             "holds the experts of a layer, as transformers 5 has them in memory, and loads them "
             "after `import qconv`. With --to keep either form of NF4 and int8 becomes the other, "
             "and no weight is quantized again."},
    {ROW("for", FITTING | INSPECT, TENSORS), CHOICE(engines), CHOICES(QC_ENGINE_NAMES),
     VALUES(QC_ENGINE_BITS), .since = "0.5.0",
     FOREIGN({.names = "engine target-engine runtime serve"}),
     .help = "refuse what this engine cannot load, and say what helps",
     .more = "The engines are transformers with bitsandbytes, vLLM with its plug-in for it, qconv "
             "(qconv.load in Python) and vllm-qconv (vLLM with the plug-in of qconv's Python "
             "package, which serves NF4 and int8 with --tp, too); all stands for all of them, or "
             "all but the last two for what qconv has not written. docs/interop.md has their "
             "versions, and what was run. inspect looks at a finished output, and ends with exit "
             "code 4 if one of them does not load it."},
    {ROW("requantize", FITTING, TENSORS), SWITCH(convert.plan.recipe.requantize), .since = "0.2.0",
     .help = "quantize MXFP4 experts anew instead of passing them through",
     .more = "This is for gpt-oss, whose experts are MXFP4 already. Passing them through loses "
             "nothing; rounding them again to NF4 saves 3% of them."},
    {ROW("drop-mtp", FITTING, TENSORS), SWITCH(convert.plan.recipe.drop_mtp), .since = "0.2.0",
     .help = "leave out the layers for multi-token prediction",
     .more = "DeepSeek-V3 has one behind its last layer, Qwen3.5 has 'mtp.'; plain decoding does "
             "not use them."},
    {ROW("incomplete", FITTING, TENSORS), SWITCH(convert.incomplete), .since = "0.5.0",
     .help = "take MODEL although tensors of it are missing",
     .more = "Without it qconv refuses a checkpoint that lacks tensors which its config.json asks "
             "for, or has them in other shapes: a loader would put random weights in their place."},
    {ROW("schemes", FITTING, TENSORS), LIST(convert.plan.recipe.schemes), .arg = "LIST",
     .dflt_note = "nf4,nf4-32,int8,16bit, or int4,int5,int6,int8,16bit", .since = "0.2.0",
     RULES({.needs = "--to auto"}),
     .help = "the schemes that --to auto may choose from",
     .more = "Write commas between the names. nf4-32 is NF4 in blocks of 32. --format "
             "compressed-tensors has int2 to int8 and int4-32. Their groups have 128 weights, or "
             "64, 32 or a row, where rows or --tp leave no whole groups otherwise. 16bit leaves a weight as it is, "
             "even if that is FP8. By default int8 is left out if a card does not run it (V100). "
             "If the checkpoint is in 16 bits and int8 is not on the list, "
             "transformers loads the result whatever is chosen."},
    {ROW("bits", FITTING, TENSORS), DECIMAL(convert.plan.recipe.bits, 0, 16), .arg = "BITS",
     .since = "0.6.0",
     FOREIGN({.names = "bpw avg-bits average-bits target-bits bits-per-weight"}),
     RULES({.needs = "--to auto"}),
     .help = "with --to auto: the average bits of a weight that is quantized, scales counted",
     .more = "--to auto then takes as many bytes as these bits are, wherever the model will lie, "
             "and --vram is not needed. It is at most 16, and at least what the smallest of the "
             "schemes has, which is 4.125 for int4."},
    {ROW("importance", FITTING, TENSORS), PATH(convert.plan.recipe.importance), .arg = "FILE",
     .since = "0.6.0",
     RULES({.needs = "--to auto"}),
     .help = "with --to auto: choose by how much each weight counts, which FILE says",
     .more = "'python -m qconv importance MODEL' finds that from a text and writes FILE, which "
             "serves any number of budgets. Where weights are calibrated from both sides, their "
             "second moments say it better, and FILE is not read. Without either, the roles of "
             "weights have to do."},
    {ROW("explain", FITTING, TENSORS), SWITCH(convert.explain),
     .since = "0.2.0",
     RULES({.needs = "--to auto"}),
     .help = "with --to auto: show what was chosen for which weights, and why",
     .more = "It lists kinds of weights and ranges of layers; with -v it has a line for every "
             "weight."},
    {ROW("vram", FITTING, FIT), OWN(QC_ARG_TEXT, qc_option_set_vram), .arg = "SPEC",
     .dflt_of = {PLAN, "auto"}, .since = "0.2.0",
     FOREIGN({.names = "gpu gpus", .meant = "--vram 2x40GB", .of_commands = PLAN},
             {.names = "gpu-memory gpu-mem memory mem max-memory budget devices cards vram-gb "
                       "size", .meant = "--vram 2x40GB"}),
     .help = "the devices to fit the model to: 2x40GB, 24GB+16GB, 2xA100-40GB, auto, +cpu:64GB, "
             "+disk",
     .more = "Terms are joined by '+'. A term is a size (GB is 10^9 bytes, GiB is 2^30) or the "
             "name of a card, and a count and an x may stand before it. auto means this machine's "
             "GPUs as they are now. cpu and disk, with a size after a colon, take what the GPUs "
             "cannot hold. convert then cuts shards where devices change and writes "
             "device_map.json. docs/hardware.md lists the cards."},
    {ROW("parallel", FITTING, FIT), CHOICE(convert.plan.fit.parallel),
     CHOICES("layers", "tensor"), .dflt = "layers", .since = "0.5.0",
     RULES({.needs = "--vram"}),
     .help = "what each of several GPUs holds: whole layers, or a share of every layer",
     .more = "layers puts each layer on one GPU, as a device_map of transformers does. tensor "
             "gives every GPU of --vram a share of every layer, as vLLM splits them; see --tp."},
    {ROW("tp", FITTING, FIT), NUMBER(convert.plan.fit.tensor_parallel), .arg = "N", .min = 1,
     .max = 256, .since = "0.5.0",
     FOREIGN({.names = "tensor-parallel-size tensor-parallel tp-size"}),
     RULES({.needs = "--vram"},
           {.not_with = "--parallel", .why = ": --tp means --parallel tensor"}),
     .help = "split every layer over N GPUs, as vLLM does with tensor parallelism",
     .more = "--vram has to name N GPUs. Weights, KV cache and workspace are then those that vLLM "
             "has on each of them, and the plan ends with the command that serves the model so. "
             "convert writes one set of shards, which vLLM splits when it loads them. Without "
             "--to the model stays as it is. NF4 and int8 are split by the plug-in of qconv's "
             "Python package, and --to auto chooses among them with --for vllm-qconv."},
    {ROW("margin", FITTING, FIT), DECIMAL(convert.plan.fit.margin, 0, 1), .arg = "SHARE",
     .dflt = "0.9", .since = "0.2.0",
     FOREIGN({.names = "gpu-memory-utilization utilization headroom reserve"}),
     RULES({.needs = "--vram"}),
     .help = "the share of each device that may be used, above 0 and at most 1"},
    {ROW("context", FITTING, FIT), NUMBER(convert.plan.fit.context), .arg = "TOKENS", .min = 1,
     .max = 1000000000, .dflt_note = "8192, or the model's limit",
     .since = "0.2.0",
     FOREIGN({.names = "ctx ctx-size n-ctx context-length context-size max-length max-model-len "
                       "max-seq-len max-seq-length seq-len seq-length sequence-length c"}),
     RULES({.needs = "--vram"}),
     .help = "how many tokens of one sequence the KV cache is to hold"},
    {ROW("batch", FITTING, FIT), NUMBER(convert.plan.fit.batch), .arg = "N", .min = 1,
     .max = 1000000, .dflt = "1", .since = "0.2.0",
     FOREIGN({.names = "batch-size b bs"}),
     RULES({.needs = "--vram"}),
     .help = "how many sequences run at once"},
    {ROW("images", FITTING, FIT), NUMBER(convert.plan.fit.images), .arg = "N", .min = 0,
     .max = 1000, .dflt = "1",
     .since = "0.2.0",
     RULES({.needs = "--vram"}),
     .help = "how many images a sequence has, for models with cross-attention"},
    {ROW("kv-dtype", FITTING, FIT), CHOICE(convert.plan.fit.kv_bits),
     CHOICES("fp16", "bf16", "fp8", "fp32"), VALUES(16, 16, 8, 32), .dflt = "fp16",
     .since = "0.2.0",
     WORDS({SIXTEEN_BITS, "bf16"}),
     FOREIGN({.names = "kv-cache-dtype cache-type cache-type-k cache-dtype kv"}),
     RULES({.needs = "--vram"}),
     .help = "the dtype of the KV cache"},
    {ROW("mla", FITTING, FIT), OWN(QC_ARG_CHOICE, qc_option_set_mla),
     CHOICES("latent", "absorbed", "expanded"), .dflt = "latent", .since = "0.2.0",
     RULES({.needs = "--vram"}),
     .help = "the form in which DeepSeek's attention is cached and computed",
     .more = "latent: the latent and the rotary part of a token are cached, and every layer "
             "computes the keys and values of the whole context from them, as transformers 5 "
             "does. absorbed: the cache is the same, and attention computes with the latent "
             "itself, as vLLM does. expanded: keys and values of every head are cached, as "
             "transformers 4 does, which takes 71 times as much for DeepSeek-V2.5."},
    {ROW("prefill", FITTING, FIT), OWN(QC_ARG_TEXT, qc_option_set_prefill), .arg = "TOKENS",
     .min = 1, .max = 1000000000, GIVEN(convert.plan.fit.prefill_given),
     .dflt_note = "whole, or 2048 with --tp", .since = "0.5.0",
     RULES({.needs = "--vram"}),
     .help = "how many tokens of a prompt are read at once, or whole",
     .more = "transformers reads a prompt whole unless its prefill_chunk_size is set; vLLM reads "
             "as many tokens at once as --max-num-batched-tokens says. The more tokens are "
             "read at once, the more workspace that takes, and the less room is left for context."},
    {ROW("cuda-context", FITTING, FIT), SIZE(convert.plan.fit.cuda_context_bytes), .arg = "SIZE",
     .dflt = "500MB", .since = "0.2.0",
     RULES({.needs = "--vram"}),
     .help = "what a CUDA context and its kernels take on every GPU"},
    {ROW("device-map", PLAN, FIT), PATH(device_map), .arg = "FILE", .since = "0.2.0",
     RULES({.not_with = "--tp", .why = ": a device map places whole layers"}),
     .help = "also write the placement as a device_map for accelerate"},
    {ROW("device", QC_CMD_BIT(QC_CMD_UNPACK), OUTPUT), LIST(device), .arg = "NAME",
     .since = "0.2.0",
     .help = "write only the shards of one device of the plan, such as cuda:0 or cpu",
     .more = "This is for outputs that were made with --vram."},
    {ROW("device", CONVERT | VALIDATE, RUN), OWN(QC_ARG_TEXT, qc_option_set_run_device),
     .arg = "auto|cpu|cuda[:N,...]", .dflt_note = "auto", .since = "0.3.0",
     FOREIGN({.names = "gpu gpus cuda use-gpu use-cuda gpu-id gpu-ids cuda-device "
                       "cuda-visible-devices ngl", .meant = "--device cuda, or cuda:0,2"},
             {.names = "cpu cpu-only no-gpu no-cuda use-cpu", .meant = "--device cpu"}),
     .help = "what does the work: the CPU, every GPU, or GPUs 0 and 2 with cuda:0,2",
     .more = "auto takes the GPUs if there are any and this build has kernels for them, and the "
             "CPU otherwise. cpu does not even ask the driver. Without --device, QCONV_DEVICE "
             "says it. The bytes that are written do not depend on it, except with --hessians."},
    {ROW("as", HARDWARE, FIT), TEXT(as), .arg = "CARDS", .since = "0.2.0",
     .help = "describe these cards instead of this machine's: 2xA100-40GB, 3090",
     .more = "docs/hardware.md lists the cards."},
    {ROW("against", VERIFY | VALIDATE, MEASURE), PATH(against), .arg = "MODEL",
     .required = VALIDATE, .missing = "the checkpoint that OUT was made from",
     .since = "0.3.0",
     FOREIGN({.names = "original reference ref base base-model source model baseline-model "
                       "compare m"}),
     .help = "the checkpoint that OUT was made from"},
    {ROW("lora", VERIFY | VALIDATE, MEASURE), OWN(QC_ARG_FILE, qc_option_set_lora),
     .arg = "ADAPTER[:SCALE]", .repeats = 1, .since = "0.5.0",
     RULES({.needs = "--against"}),
     .help = "an adapter that OUT was made with, as convert took it; may be repeated",
     .more = "MODEL is compared with it merged. It must be the same adapter, with the same scale."},
    {ROW("sample", VALIDATE, MEASURE), NUMBER(validate.sample), .arg = "N", .min = 1,
     .max = 1000000, .dflt_note = "all", .since = "0.3.0",
     .help = "measure only this many of the quantized layers, spread evenly"},
    {ROW("m", VALIDATE, MEASURE), OWN(QC_ARG_TEXT, qc_option_set_m), .arg = "LIST", .min = 1,
     .max = 1048576, .dflt = "1,4,16,64,256,1024", .since = "0.3.0",
     .help = "how many rows of activations: numbers with commas between them",
     .more = "On a CPU those of at most 16 are timed."},
    {ROW("activations", VALIDATE, MEASURE), PATH(validate.activations), .arg = "FILE",
     .dflt_note = "random ones", .since = "0.3.0",
     .help = "take activations from this .safetensors file",
     .more = "docs/validate.md says what the file holds, and how random ones are made."},
    {ROW("seed", VALIDATE, MEASURE), NUMBER(products.seed), .arg = "N", .min = 0,
     .max = 9007199254740991, .dflt = "1", .since = "0.3.0",
     .help = "the seed of the random numbers"},
    {ROW("max-error", VALIDATE, MEASURE), DECIMAL(validate.max_error, 0, 10), .arg = "X",
     .since = "0.3.0",
     .help = "end with exit code 4 if the relative output error of a layer is larger",
     .more = "X is above 0 and at most 10; 0.1 is 10%."},
    {ROW("baseline", VALIDATE, MEASURE), PATH(validate.baseline), .arg = "FILE", .since = "0.3.0",
     .help = "end with exit code 4 if a layer is worse than in this earlier run"},
    {ROW("save-baseline", VALIDATE, MEASURE), PATH(validate.save_baseline), .arg = "FILE",
     .since = "0.3.0",
     .help = "write this run's errors for --baseline"},
    {ROW("tolerance", VALIDATE, MEASURE), DECIMAL(validate.tolerance, 0, 10), .arg = "X",
     .dflt = "0.001", .since = "0.3.0",
     RULES({.needs = "--baseline"}),
     .help = "with --baseline: how much worse a layer may be",
     .more = "X is a share of the earlier error, above 0 and at most 10; 0.001 is 0.1%."},
    {ROW("dry-run", CONVERT, RUN), SWITCH(convert.dry_run), .spares_out = 1,
     .since = "0.1.0",
     FOREIGN({.names = "dry simulate no-op noop whatif n"}),
     .help = "show what would be written, with exact sizes; write nothing",
     .more = "OUT may be left out; if it is given, it is checked."},
    {ROW("force", CONVERT | UNPACK, RUN), SWITCH(convert.force), .since = "0.1.0",
     FOREIGN({.names = "overwrite clobber replace yes y f"}),
     .help = "replace another output, or write into a directory that holds other files",
     .more = "Only what the manifest of the old output lists is deleted, and files of others that "
             "are replaced are named. Weights that no manifest lists are never touched: the run is "
             "refused. An output that is already what would be made needs no --force. "
             "Nothing is ever written to the source or below it, or through a link in the "
             "directory."},
    {ROW("restart", CONVERT, RUN), SWITCH(convert.restart), .since = "0.5.0",
     FOREIGN({.names = "resume continue",
              .meant = "nothing: an interrupted conversion is continued by the same command"}),
     .help = "begin anew instead of continuing an interrupted conversion",
     .more = "What the interrupted one left in OUT is removed."},
    {ROW("part", CONVERT, RUN), OWN(QC_ARG_TEXT, qc_option_set_part), .arg = "I/N",
     .dflt_note = "in a Slurm step of several tasks, the part of this task", .since = "0.5.0",
     .help = "do the I-th of N parts of the work, 1 to N; the last to finish completes OUT",
     .more = "This is for several machines that share MODEL and OUT: each runs the same command "
             "with its own I. 1/1 does all of it whatever the scheduler says. See "
             "docs/cluster.md."},
    {ROW("threads", WORKING, RUN), NUMBER(call.threads), .arg = "N", .min = 1, .max = 1024,
     .dflt_note = "one per processor", .since = "0.1.0",
     FOREIGN({.names = "jobs j workers num-workers nthreads n-threads num-threads thread cores "
                       "nproc t"}),
     .help = "how many threads work, 1 to 1024",
     .more = "The bytes written do not depend on it."},
    {ROW("progress", WORKING, RUN), CHOICE(call.progress),
     CHOICES("auto", "always", "never", "json"), .dflt = "auto", .since = "0.1.0",
     WORDS({NO_WORDS " off quiet", "never"}, {YES_WORDS " on", "always"}),
     .help = "when to show progress on standard error",
     .more = "auto shows a bar on a terminal, and elsewhere a plain line now and then. always "
             "shows the bar wherever standard error goes. json writes a line of JSON for a program "
             "to read whenever more is done, and a last one at the end."},
    {ROW("json", ANYWHERE, OTHER), SWITCH(call.json), .since = "0.1.0",
     RULES({.not_with = "--markdown"}),
     .help = "write the result to standard output as one JSON object"},
    {ROW("quiet", ANYWHERE, OTHER), .letter = 'q', SWITCH(call.quiet),
     .since = "0.1.0",
     FOREIGN({.names = "silent s no-progress"}),
     RULES({.not_with = "--verbose"}),
     .help = "show errors only: no progress, no summary and no warnings",
     .more = "The answers of plan, inspect, hardware, validate and report, --dry-run "
             "and --json are still printed. convert, unpack and verify print nothing when "
             "all is well: their exit code says so."},
    {ROW("verbose", ANYWHERE, OTHER), .letter = 'v', COUNT(call.verbose), .repeats = 1,
     .since = "0.1.0",
     FOREIGN({.names = "debug log-level loglevel"}),
     .help = "say more, and with -vv still more",
     .more = "-v shows what is about to be done, every stored tensor with inspect, and where in "
             "the code of qconv an error arose. -vv shows the error of every quantized tensor, "
             "too."},
    {ROW("help", ANYWHERE, OTHER), .letter = 'h', .since = "0.1.0",
     FOREIGN({.names = "usage ?"}),
     .help = "show this help"},
    {ROW("version", ANYWHERE, OTHER), .alone = QC_CMD_VERSION, .since = "0.1.0",
     FOREIGN({.names = "v V"}),
     .help = "show the version"},
    {.name = NULL},
};
/* clang-format on */

const char *qc_option_note(const qc_option_row *row, qc_command command)
{
    return row->dflt_of.commands & QC_CMD_BIT(command) ? row->dflt_of.note : row->dflt_note;
}
