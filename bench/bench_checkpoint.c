/* Write a synthetic checkpoint: Llama-3.1-8B layers with normal random bf16 weights.
 *
 *   bench_checkpoint [--layers N] [--embeddings] DIR
 *
 * Values are 65,536 quantile midpoints of the normal distribution with deviation 0.02, drawn
 * uniformly (splitmix64, fixed seed): as good as normal for a quantizer and fast to write. One
 * shard per layer, one for embeddings and head, an index, and a config.json. */
#include "base/alloc.h"
#include "base/arena.h"
#include "base/random.h"
#include "formats/file_io.h"
#include "formats/json_writer.h"
#include "formats/text_file.h"
#include "tests/fixtures/st_header.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHUNK_ELEMS (1u << 20)

static const struct {
    const char *name;
    uint64_t rows, cols; /* cols 0: a norm */
} layer_tensors[] = {
    {"input_layernorm.weight", 4096, 0},          {"mlp.down_proj.weight", 4096, 14336},
    {"mlp.gate_proj.weight", 14336, 4096},        {"mlp.up_proj.weight", 14336, 4096},
    {"post_attention_layernorm.weight", 4096, 0}, {"self_attn.k_proj.weight", 1024, 4096},
    {"self_attn.o_proj.weight", 4096, 4096},      {"self_attn.q_proj.weight", 4096, 4096},
    {"self_attn.v_proj.weight", 1024, 4096},
};
#define LAYER_TENSORS (sizeof layer_tensors / sizeof *layer_tensors)

static uint16_t quantiles[65536];

/* x with P(X < x) = p: Newton on erfc, from a crude start. */
static double normal_quantile(double p)
{
    double x = 0;
    for (int i = 0; i < 60; i++) {
        double f = 0.5 * erfc(-x / sqrt(2.0)) - p;
        double d = exp(-x * x / 2) / sqrt(2 * acos(-1.0));
        double step = f / (d > 1e-12 ? d : 1e-12);
        x -= step > 0.5 ? 0.5 : step < -0.5 ? -0.5 : step;
    }
    return x;
}

static void make_quantiles(void)
{
    for (unsigned i = 0; i < 65536; i++) {
        float f = (float)(0.02 * normal_quantile((i + 0.5) / 65536.0));
        uint32_t bits;
        memcpy(&bits, &f, sizeof bits);
        quantiles[i] = (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
    }
}

static uint64_t seed = 0x9e3779b97f4a7c15u;

static qc_status write_tensor(const qc_file *f, uint64_t offset, uint64_t elems, int norm,
                              uint16_t *buf, qc_error *err)
{
    for (uint64_t done = 0; done < elems; done += CHUNK_ELEMS) {
        uint64_t n = elems - done < CHUNK_ELEMS ? elems - done : CHUNK_ELEMS;
        for (uint64_t i = 0; i < n; i += 4) {
            uint64_t r = qc_random_next(&seed);
            for (unsigned k = 0; k < 4 && i + k < n; k++)
                buf[i + k] = norm ? 0x3f80 : quantiles[(r >> (16 * k)) & 0xffff];
        }
        QC_TRY(qc_file_pwrite(f, buf, (size_t)n * 2, offset + done * 2, err));
    }
    return QC_OK;
}

static qc_status write_shard(qc_arena *a, const char *dir, const char *name, qc_st_tensor *tensors,
                             size_t count, qc_error *err)
{
    const char *path = NULL;
    qc_strbuf header;
    qc_st_meta meta = {"format", "pt"};
    void *buf = NULL;
    uint64_t at = 0;
    for (size_t i = 0; i < count; i++) {
        uint64_t bytes = 0;
        QC_TRY(qc_shape_bytes(tensors[i].dims, tensors[i].ndim, QC_DTYPE_BF16, &bytes, err));
        tensors[i].dtype = QC_DTYPE_BF16;
        tensors[i].begin = at;
        tensors[i].end = at += bytes;
    }
    qc_strbuf_init(&header, QC_ST_MAX_HEADER_BYTES + 8);
    QC_TRY(qc_path_join(a, &path, dir, name, err));
    QC_TRY(st_header_build(&header, tensors, count, &meta, 1, err));
    qc_file f = QC_FILE_CLOSED;
    QC_TRY(qc_file_create(&f, path, err));
    QC_TRY(qc_file_pwrite(&f, header.data, header.len, 0, err));
    QC_TRY(qc_malloc(&buf, CHUNK_ELEMS * 2, err));
    for (size_t i = 0; i < count; i++)
        QC_TRY(write_tensor(&f, header.len + tensors[i].begin,
                            (tensors[i].end - tensors[i].begin) / 2, tensors[i].ndim == 1, buf,
                            err));
    qc_free(buf);
    qc_strbuf_deinit(&header);
    return qc_file_close(&f, err);
}

static qc_status write_all(qc_arena *a, const char *dir, unsigned layers, int embeddings,
                           qc_error *err)
{
    qc_strbuf text;
    qc_json_writer w;
    const char *path = NULL;
    qc_strbuf_init(&text, 1u << 24);
    qc_json_write_init(&w, &text, err);
    qc_json_begin_object(&w, NULL);
    qc_json_begin_object(&w, "metadata");
    qc_json_end(&w);
    qc_json_begin_object(&w, "weight_map");
    QC_TRY(qc_dir_make(dir, err));
    /* Without --embeddings the vocabulary is so small that the layers are all there is to time. */
    const unsigned shards = layers + 1, vocabulary = embeddings ? 128256 : 64;
    for (unsigned s = 0; s < shards; s++) {
        qc_st_tensor tensors[LAYER_TENSORS];
        size_t count = s < layers ? LAYER_TENSORS : 3;
        const char *shard = NULL;
        memset(tensors, 0, sizeof tensors);
        QC_TRY(qc_arena_printf(a, &shard, err, "model-%05u-of-%05u.safetensors", s + 1, shards));
        for (size_t i = 0; i < count; i++) {
            if (s < layers) {
                QC_TRY(qc_arena_printf(a, &tensors[i].name, err, "model.layers.%u.%s", s,
                                       layer_tensors[i].name));
                tensors[i].ndim = layer_tensors[i].cols ? 2 : 1;
                tensors[i].dims[0] = layer_tensors[i].rows;
                tensors[i].dims[1] = layer_tensors[i].cols;
            } else {
                static const char *const rest[] = {"lm_head.weight", "model.embed_tokens.weight",
                                                   "model.norm.weight"};
                tensors[i].name = rest[i];
                tensors[i].ndim = i < 2 ? 2 : 1;
                tensors[i].dims[0] = i < 2 ? vocabulary : 4096;
                tensors[i].dims[1] = 4096;
            }
            qc_json_put_text(&w, tensors[i].name, shard);
        }
        QC_TRY(write_shard(a, dir, shard, tensors, count, err));
    }
    qc_json_end(&w);
    qc_json_end(&w);
    QC_TRY(qc_json_write_finish(&w));
    QC_TRY(qc_path_join(a, &path, dir, "model.safetensors.index.json", err));
    QC_TRY(qc_file_put(path, text.data, text.len, err));
    qc_strbuf_deinit(&text);
    QC_TRY(qc_strbuf_addf(&text, err,
                          "{\"architectures\": [\"LlamaForCausalLM\"], \"model_type\": \"llama\", "
                          "\"hidden_size\": 4096, \"intermediate_size\": 14336, "
                          "\"num_hidden_layers\": %u, \"num_attention_heads\": 32, "
                          "\"num_key_value_heads\": 8, \"vocab_size\": %u, "
                          "\"tie_word_embeddings\": false, \"torch_dtype\": \"bfloat16\"}\n",
                          layers, vocabulary));
    QC_TRY(qc_path_join(a, &path, dir, "config.json", err));
    QC_TRY(qc_file_put(path, text.data, text.len, err));
    qc_strbuf_deinit(&text);
    return QC_OK;
}

int main(int argc, char **argv)
{
    unsigned layers = 5;
    int embeddings = 0;
    const char *dir = NULL;
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--layers") == 0 && i + 1 < argc)
            layers = (unsigned)strtoul(argv[++i], NULL, 10);
        else if (strcmp(argv[i], "--embeddings") == 0)
            embeddings = 1;
        else if (argv[i][0] == '-' || dir)
            layers = 0; /* not a folder's name by mistake */
        else
            dir = argv[i];
    }
    if (!dir || layers == 0 || layers > 1000) {
        fprintf(stderr, "usage: bench_checkpoint [--layers N] [--embeddings] DIR\n");
        return 2;
    }
    qc_arena a;
    qc_error err = {0};
    qc_arena_init(&a);
    make_quantiles();
    qc_status st = write_all(&a, dir, layers, embeddings, &err);
    qc_arena_deinit(&a);
    if (st != QC_OK)
        fprintf(stderr, "bench_checkpoint: %s\n", err.msg);
    return qc_status_exit_code(st);
}
