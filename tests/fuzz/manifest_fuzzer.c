/* Any text as qconv.json. No mutation survives the digest at its end, so the text is also tried
 * with the digest made right: refused, or a manifest whose writing reads back and writes the same
 * bytes again. */
#include "formats/manifest.h"
#include "fuzz_check.h"

#include <string.h>

static const char seal[] = ",\n  \"manifest_xxh3_128\": \"";

static void try_text(const char *text, size_t len)
{
    qc_manifest m;
    qc_manifest again;
    qc_arena arena;
    qc_strbuf first;
    qc_strbuf second;
    qc_error err = {0};
    qc_arena_init(&arena);
    qc_strbuf_init(&first, 100000000);
    qc_strbuf_init(&second, 100000000);
    qc_status st = qc_manifest_parse(&m, &arena, text, len, &err);
    if (st == QC_OK) {
        FUZZ_CHECK(qc_manifest_write(&m, &first, NULL) == QC_OK);
        FUZZ_CHECK(qc_manifest_parse(&again, &arena, first.data, first.len, NULL) == QC_OK);
        FUZZ_CHECK(qc_manifest_write(&again, &second, NULL) == QC_OK);
        FUZZ_CHECK(first.len == second.len && memcmp(first.data, second.data, first.len) == 0);
    } else {
        FUZZ_CHECK(st != QC_ERR_NOMEM && st != QC_ERR_INTERNAL && err.msg[0]);
        FUZZ_CHECK(m.tensor_count == 0 && !m.tensors && !m.shards);
    }
    qc_strbuf_deinit(&first);
    qc_strbuf_deinit(&second);
    qc_arena_deinit(&arena);
}

const fuzz_limits fuzz_may_allocate = {4u << 20, 256};

int fuzz_one(const uint8_t *data, size_t size)
{
    char hex[QC_DIGEST_HEX_BYTES];
    qc_strbuf text;
    size_t body = size;
    try_text((const char *)data, size);
    /* The text up to its last seal, or all of it, then a seal that fits. */
    for (size_t i = size; i-- > 0;) {
        if (size - i >= sizeof seal - 1 && memcmp(data + i, seal, sizeof seal - 1) == 0) {
            body = i;
            break;
        }
    }
    qc_strbuf_init(&text, size + 200);
    FUZZ_CHECK(qc_strbuf_add(&text, data, body, NULL) == QC_OK);
    FUZZ_CHECK(qc_strbuf_adds(&text, seal, NULL) == QC_OK);
    qc_digest d = qc_digest_bytes(text.data, text.len);
    qc_digest_hex(&d, hex);
    FUZZ_CHECK(qc_strbuf_addf(&text, NULL, "%s\"\n}\n", hex) == QC_OK);
    try_text(text.data, text.len);
    qc_strbuf_deinit(&text);
    return 0;
}
