/* formats/safetensors_header.h: the acceptance cases of docs/reading.md, numbered as there. */
#include "base/bytes.h"
#include "tests/fixtures/alloc_faults.h"
#include "tests/fixtures/st_header.h"
#include "tests/fixtures/test.h"

#include <inttypes.h>
#include <time.h>

#define COUNT(a)   (sizeof(a) / sizeof *(a))
#define HEAD_BYTES 64u

static double now_seconds(void)
{
    struct timespec t;
    (void)clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* What opening a file does, on bytes that lie in blocks of exactly their size. claimed: size of the
 * file as far as its directory entry goes (0: len). */
static qc_status open_bytes(qc_st_header *h, const void *bytes, size_t len, uint64_t claimed,
                            qc_error *err)
{
    uint64_t n = 0;
    uint64_t file_bytes = claimed ? claimed : len;
    size_t head_len = len < HEAD_BYTES ? len : HEAD_BYTES;
    memset(h, 0, sizeof *h);
    unsigned char *head = malloc(head_len ? head_len : 1);
    assert_non_null(head);
    if (head_len)
        memcpy(head, bytes, head_len);
    qc_status st = qc_st_header_length(head, head_len, file_bytes, &n, err);
    free(head);
    if (st != QC_OK) {
        assert_true(n == 0);
        return st;
    }
    assert_true(n <= len - 8);
    char *json = malloc(n);
    assert_non_null(json);
    memcpy(json, (const unsigned char *)bytes + 8, n);
    st = qc_st_header_parse(h, json, n, file_bytes - 8 - n, err);
    free(json);
    return st;
}

static void assert_empty(const qc_st_header *h)
{
    assert_null(h->tensors);
    assert_null(h->meta);
    assert_null(h->arena.head);
    assert_true(h->tensor_count == 0 && h->meta_count == 0);
}

/* In JSON here, ' stands for ". */
typedef struct {
    const char *id;
    const char *json;
    uint64_t data_bytes;
    const char *message; /* whole, but for what stands before it in all of a table */
} header_case;

#define T(dtype, shape, offsets)                                                                   \
    "{'dtype':'" dtype "','shape':" shape ",'data_offsets':" offsets "}"
#define A(dtype, shape, offsets) "{'a':" T(dtype, shape, offsets) "}"
#define DIGITS_2_64              "18446744073709551616"
#define AS_DIGITS                "expected an integer of 0 to 2^53 - 1 written as digits"
#define FRACTION                 "a number has a fraction or an exponent where only integers are accepted"

/* "header: JSON byte ..." */
static const header_case not_json[] = {
    {"8b", "{'\xff':1}", 0, "2: the text is not valid UTF-8"},
    {"10d", "{}x", 0, "2: expected the end of the text, found 'x'"},
    {"10f", "\xef\xbb\xbf{}", 0, "0: a byte order mark is not accepted"},
    {"10g", "{'a':NaN}", 0, "5: expected a JSON value, found 'N'"},
    {"10h", "{'\\ud800':1}", 0, "2: one half of a surrogate pair stands without the other"},
    {"10i", "{'a\\u0000':1}", 0, "3: \\u0000 is not accepted in a string"},
    {"12c", "{'__metadata__':{},'__metadata__':{}}", 0,
     "19: key '__metadata__' appears a second time in one object (first at byte 1)"},
    {"13a", "{'a':" T("U8", "[1]", "[0,1]") ",'a':" T("U8", "[1]", "[0,1]") "}", 1,
     "53: key 'a' appears a second time in one object (first at byte 1)"},
    {"13b", "{'a':" T("U8", "[1]", "[0,1]") ",'\\u0061':" T("U8", "[1]", "[1,2]") "}", 2,
     "53: key 'a' appears a second time in one object (first at byte 1)"},
    {"13c", "{'a':{'dtype':'U8','shape':[0],'dtype':'U8','data_offsets':[0,0]}}", 0,
     "31: key 'dtype' appears a second time in one object (first at byte 6)"},
    {"14j", A("F32", "[1.0]", "[0,4]"), 4, "29: " FRACTION},
    {"14k", A("F32", "[1]", "[0,4e0]"), 4, "50: " FRACTION},
    {"14n", A("F32", "[" DIGITS_2_64 "]", "[0,4]"), 4, "29: an integer is beyond 2^53 - 1"},
    {"26", A("F32", "[2,18446744073709551614]", "[0,4]"), 4, "31: an integer is beyond 2^53 - 1"},
    {"27", A("I32", "[2,9223372036854775807]", "[0,4]"), 4, "31: an integer is beyond 2^53 - 1"},
    {"x2", "{'e\x1b[31m':1}", 0, "3: no control character may stand in a string, found byte 0x1b"},
};

/* "tensor 'a': ..." */
static const header_case bad_entries[] = {
    {"14c", "{'a':{'shape':[1],'data_offsets':[0,4]}}", 4, "dtype is missing; expected a string"},
    {"14d", "{'a':{'dtype':'F32','data_offsets':[0,4]}}", 4, "shape is missing; expected an array"},
    {"14e", "{'a':{'dtype':'F32','shape':[1]}}", 4, "data_offsets is missing; expected an array"},
    {"14f", A("F32", "[1]", "[0]"), 4, "data_offsets: expected 2 numbers, found 1"},
    {"14g", A("F32", "[1]", "[0,4,4]"), 4, "data_offsets: expected 2 numbers, found 3"},
    {"14h", A("F32", "[-1]", "[0,4]"), 4, "a dimension is -1; " AS_DIGITS},
    {"14i", A("F32", "[1]", "[-4,0]"), 4, "an offset of data_offsets is -4; " AS_DIGITS},
    {"14l", A("F32", "['1']", "[0,4]"), 4, "a dimension is of kind string; expected a number"},
    {"14m", A("F32", "[1]", "['0',4]"), 4,
     "an offset of data_offsets is of kind string; expected a number"},
    {"14o", A("F32", "1", "[0,4]"), 4, "shape is of kind number; expected an array"},
    {"14p", A("F32", "[1]", "{'0':4}"), 4, "data_offsets is of kind object; expected an array"},
    {"14q", "{'a':{'dtype':7,'shape':[1],'data_offsets':[0,4]}}", 4,
     "dtype is of kind number; expected a string"},
    {"14r", "{'a':[1]}", 4, "its entry is of kind array; expected an object"},
    {"14t", "{'a':{'Dtype':'F32','shape':[1],'data_offsets':[0,4]}}", 4,
     "dtype is missing; expected a string"},
    {"21c", A("U8", "[2]", "[2,0]"), 2,
     "data_offsets: expected a begin that is not behind the end, found 2 and 0"},
    {"26b", A("F32", "[4294967296,4294967296]", "[0,4]"), 4,
     "the number of elements overflows 64 bits"},
    {"27b", A("I32", "[4611686018427,1048576]", "[0,4]"), 4,
     "the number of bits overflows 64 bits"},
    {"29", A("F4", "[1,3]", "[0,1]"), 1, "its elements of type F4 do not fill whole bytes"},
    {"29b", A("F6_E2M3", "[2]", "[0,1]"), 1,
     "its elements of type F6_E2M3 do not fill whole bytes"},
    {"30", A("F4", "[1,2]", "[0,2]"), 2,
     "dtype F4 and shape take 1 bytes, but data_offsets 0..2 hold 2"},
    {"30b", A("U8", "[0]", "[0,1]"), 1,
     "dtype U8 and shape take 0 bytes, but data_offsets 0..1 hold 1"},
};

static const header_case unknown_entries[] = {
    {"14a", A("F128", "[1]", "[0,16]"), 16, "dtype 'F128' is not known"},
    {"14b", A("f32", "[1]", "[0,4]"), 4, "dtype 'f32' is not known"},
    {"14s", A("F32", "[1,1,1,1,1,1,1,1,1]", "[0,4]"), 4, "the shape has more than 8 dimensions"},
};

static const header_case bad_headers[] = {
    {"10a", "[]", 0, "header is of kind array; expected an object"},
    {"10b", "null", 0, "header is of kind null; expected an object"},
    {"10c", "'x'", 0, "header is of kind string; expected an object"},
    {"12a", "{'__metadata__':{'a':1}}", 0,
     "__metadata__: the value of 'a' is of kind number; expected a string"},
    {"12b", "{'__metadata__':{'a':{'b':'c'}}}", 0,
     "__metadata__: the value of 'a' is of kind object; expected a string"},
    {"12d", "{'__metadata__':'pt'}", 0, "__metadata__ is of kind string; expected an object"},
    {"12e", "{'__metadata__':{'a':null}}", 0,
     "__metadata__: the value of 'a' is of kind null; expected a string"},
    {"16", "{'test':" T("I32", "[2,2]", "[0,4]") "}", 0,
     "tensor 'test': dtype I32 and shape take 16 bytes, but data_offsets 0..4 hold 4"},
    {"21a", "{'a':" T("U8", "[2]", "[0,2]") ",'b':" T("U8", "[2]", "[4,6]") "}", 6,
     "tensor 'b' begins at byte 4 of the data, but 'a' before it ends at 2: the bytes between them "
     "belong to none"},
    {"21b", A("U8", "[2]", "[1,3]"), 3,
     "tensor 'a' begins at byte 1 of the data, but the first one must begin at 0"},
    {"21d", "{'a':" T("U8", "[2]", "[0,2]") ",'b':" T("U8", "[2]", "[1,3]") "}", 3,
     "tensor 'b' begins at byte 1 of the data, but 'a' before it ends at 2: they overlap"},
    {"x1", "{}", 1, "the data has 1 bytes, but the tensors end at 0: the last 1 belong to none"},
    {"x3", "{'e\\u001b[31m':1}", 0,
     "tensor 'e?[31m': its entry is of kind number; expected an object"},
};

static const header_case short_data[] = {
    {"25", "{'a':" T("U8", "[4]", "[0,4]") ",'b':" T("U8", "[9]", "[4,13]") "}", 6,
     "the data has 6 bytes, but the tensors need 13: 7 are missing, and 'b' is the first tensor "
     "that is not whole; download or copy it again"},
};

/* Opens a file of the header and as much data. */
static qc_status open_json(qc_st_header *h, const char *json, uint64_t data_bytes, qc_error *err)
{
    unsigned char file[512];
    size_t n = strlen(json);
    assert_true(8 + n <= sizeof file);
    qc_store_le64(file, n);
    for (size_t i = 0; i < n; i++)
        file[8 + i] = json[i] == '\'' ? '"' : (unsigned char)json[i];
    return open_bytes(h, file, 8 + n, 8 + n + data_bytes, err);
}

static void assert_fails(const char *id, const qc_st_header *h, qc_status st, const qc_error *err,
                         qc_status expected, const char *begins, const char *message)
{
    size_t skip = strlen(begins);
    if (st != expected || strncmp(err->msg, begins, skip) != 0 ||
        strcmp(err->msg + skip, message) != 0)
        fail_msg("case %s: %s '%s', expected %s '%s%s'", id, qc_status_name(st), err->msg,
                 qc_status_name(expected), begins, message);
    assert_int_equal(qc_status_exit_code(st), 3);
    assert_empty(h);
}

static void assert_refused(const header_case *cases, size_t count, qc_status expected,
                           const char *begins)
{
    for (const header_case *c = cases; c < cases + count; c++) {
        qc_st_header h;
        qc_error err = {0};
        qc_status st = open_json(&h, c->json, c->data_bytes, &err);
        assert_fails(c->id, &h, st, &err, expected, begins, c->message);
    }
}

TEST(refuses_broken_headers)
{
    assert_refused(not_json, COUNT(not_json), QC_ERR_INPUT, "header: JSON byte ");
    assert_refused(bad_entries, COUNT(bad_entries), QC_ERR_INPUT, "tensor 'a': ");
    assert_refused(unknown_entries, COUNT(unknown_entries), QC_ERR_UNSUPPORTED, "tensor 'a': ");
    assert_refused(bad_headers, COUNT(bad_headers), QC_ERR_INPUT, "");
    assert_refused(short_data, COUNT(short_data), QC_ERR_TRUNCATED, "");
}

static const struct {
    const char *id;
    const char *json;
    uint64_t data_bytes;
    size_t tensors, meta, unknown;
} accepted[] = {
    {"empty", "{}", 0, 0, 0, 0},
    {"padded", "{}      ", 0, 0, 0, 0},
    {"leading", " \t\r\n{}", 0, 0, 0, 0},
    {"trailing", "{}\n\r\t ", 0, 0, 0, 0},
    {"metadata only", "{'__metadata__':{'format':'pt','b':''}}", 0, 0, 2, 0},
    {"metadata null", "{'__metadata__':null}", 0, 0, 0, 0},
    {"metadata empty", "{'__metadata__':{}}", 0, 0, 0, 0},
    {"metadata last", "{'a':" T("U8", "[2]", "[0,2]") ",'__metadata__':{'k':'v'}}", 2, 1, 1, 0},
    {"scalar", A("F64", "[]", "[0,8]"), 8, 1, 0, 0},
    {"zero size", A("F32", "[2,0]", "[0,0]"), 0, 1, 0, 0},
    {"zero size first and last",
     "{'z':" T("F32", "[0]", "[2,2]") ",'a':" T("U8", "[2]", "[0,2]") ",'b':" T("I64", "[0,5]",
                                                                                "[0,0]") "}",
     2, 3, 0, 0},
    {"zero with huge dims", A("F32", "[0,9007199254740991,9007199254740991]", "[0,0]"), 0, 1, 0, 0},
    {"F4", A("F4", "[1,2]", "[0,1]"), 1, 1, 0, 0},
    {"F6", A("F6_E3M2", "[4]", "[0,3]"), 3, 1, 0, 0},
    {"C64", A("C64", "[3]", "[0,24]"), 24, 1, 0, 0},
    {"unordered", "{'a':" T("U8", "[2]", "[3,5]") ",'b':" T("U8", "[3]", "[0,3]") "}", 5, 2, 0, 0},
    {"unaligned tensor", "{'a':" T("U8", "[1]", "[0,1]") ",'b':" T("F32", "[1]", "[1,5]") "}", 5, 2,
     0, 0},
    {"eight dimensions", A("U8", "[1,2,1,2,1,2,1,2]", "[0,16]"), 16, 1, 0, 0},
    {"unknown field (case 15)",
     "{'a':{'dtype':'U8','x':{'y':[1]},'shape':[1],'data_offsets':[0,1],'z':null}}", 1, 1, 0, 2},
    {"empty name", "{'':" T("U8", "[1]", "[0,1]") "}", 1, 1, 0, 0},
    {"same name but for case", "{'A':" T("U8", "[1]", "[0,1]") ",'a':" T("U8", "[1]", "[1,2]") "}",
     2, 2, 0, 0},
};

TEST(accepts_valid_headers)
{
    for (size_t i = 0; i < COUNT(accepted); i++) {
        SCOPED(qc_st_header) h;
        qc_error err = {0};
        if (open_json(&h, accepted[i].json, accepted[i].data_bytes, &err) != QC_OK)
            fail_msg("case %s: %s", accepted[i].id, err.msg);
        assert_true(h.tensor_count == accepted[i].tensors);
        assert_true(h.meta_count == accepted[i].meta);
        assert_true(h.unknown_fields == accepted[i].unknown);
    }
}

TEST(knows_every_dtype)
{
    for (int t = 0; t < QC_DTYPE_COUNT; t++) {
        char json[200];
        SCOPED(qc_st_header) h;
        unsigned bytes = qc_dtype_bits((qc_dtype)t);
        (void)snprintf(json, sizeof json, A("%s", "[8]", "[0,%u]"), qc_dtype_name((qc_dtype)t),
                       bytes);
        assert_int_equal(open_json(&h, json, bytes, NULL), QC_OK);
        assert_int_equal(h.tensors->dtype, t);
    }
}

/* Cases that concern the length field, and files that are something else. */
typedef struct {
    const char *id;
    const char *bytes;
    size_t len;
    uint64_t claimed;
    const char *message;
} length_case;

#define AT_MOST     "; at most 100000000 are allowed (is it a safetensors file?)"
#define BEGINS_WITH "; a safetensors file begins with 8 bytes of header length"
#define HTML_PAGE   "the file is an HTML page, not safetensors (a failed download?)"

static const length_case cut_off[] = {
    {"1 empty", "", 0, 0, "the file has 0 bytes" BEGINS_WITH},
    {"1 seven bytes", "\x02\0\0\0\0\0\0", 7, 0, "the file has 7 bytes" BEGINS_WITH},
    {"2", "\x3c\0\0\0\0\0\0\0", 8, 0,
     "the header of 60 bytes is cut off: the file has 8 bytes, so 60 are missing; download or copy "
     "it again"},
    {"3", "\xe8\x03\0\0\0\0\0\0{}", 10, 0,
     "the header of 1000 bytes is cut off: the file has 10 bytes, so 998 are missing; download or "
     "copy it again"},
    {"6", "\0\xe1\xf5\x05\0\0\0\0{}", 10, 0,
     "the header of 100000000 bytes is cut off: the file has 10 bytes, so 99999998 are missing; "
     "download or copy it again"},
};

static const length_case wrong_begin[] = {
    {"4", "\x3c\0\0\0\0\xff\xff\xff", 8, 0,
     "the header length is 18446742974197923900 bytes" AT_MOST},
    {"5a", "\x01\xe1\xf5\x05\0\0\0\0", 8, 200000000,
     "the header length is 100000001 bytes" AT_MOST},
    {"5b", "\xff\xff\xff\xff\xff\xff\xff\xff", 8, 0,
     "the header length is 18446744073709551615 bytes" AT_MOST},
    {"7", "\0\0\0\0\0\0\0\0{}", 10, 0,
     "the header length is 0; expected at least the 2 bytes {} (is it a file of zeros?)"},
    {"8", "\x01\0\0\0\0\0\0\0\xff", 9, 0,
     "header: JSON byte 0: expected a JSON value, found byte 0xff"},
    {"9", "\x01\0\0\0\0\0\0\0{", 9, 0,
     "header: JSON byte 1: expected a key in quotes, found the end of the text"},
    {"10e", "\x08\0\0\0\0\0\0\0{}\0\0\0\0\0\0", 16, 0,
     "header: JSON byte 2: expected the end of the text, found byte 0x00"},
    {"R2 lfs",
     "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb",
     90, 133, "the file is a git-lfs pointer, not the file itself (run 'git lfs pull')"},
    {"R2 html", "<!DOCTYPE html>\n<html lang=\"en\">", 32, 0, HTML_PAGE},
    {"R2 html2", "\n  <HTML><head>", 15, 0, HTML_PAGE},
    {"R2 xml", "<?xml version=\"1.0\"?><Error>", 28, 0, HTML_PAGE},
    {"R2 path", "/data/models/mini/model.safetensors", 35, 0, "the file is text, not safetensors"},
    {"R2 short text", "<html>!!", 8, 0, HTML_PAGE},
    {"not pickle 1", "\x80\x01\x8a\x0al\xfc\x9c\x46\xf9", 9, 0,
     "the header length is 5088219219985301888 bytes" AT_MOST},
    {"not pickle 6", "\x80\x06\x8a\x0al\xfc\x9c\x46\xf9", 9, 0,
     "the header length is 5088219219985303168 bytes" AT_MOST},
    {"blank", "\n\n\n\n\n\n\n\n\n", 9, 0, "the file is text, not safetensors"},
};

static const length_case other_files[] = {
    {"zip", "PK\x03\x04\0\0\x08\x08\0\0\0\0\0\0\0\0archive/data.pkl", 32, 0,
     "the file is a zip archive (a PyTorch checkpoint?), not safetensors"},
    {"pickle", "\x80\x02\x8a\x0al\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19.", 15, 0,
     "the file is a Python pickle (an old PyTorch checkpoint?), not safetensors"},
    {"gguf", "GGUF\x03\0\0\0\x23\x01\0\0", 12, 0,
     "the file is a GGUF file, not safetensors (take the checkpoint that it was made from)"},
    {"hdf5", "\x89HDF\r\n\x1a\n", 8, 0, "the file is an HDF5 file, not safetensors"},
};

static void assert_not_opened(const length_case *cases, size_t count, qc_status expected)
{
    for (const length_case *c = cases; c < cases + count; c++) {
        qc_st_header h;
        qc_error err = {0};
        qc_status st = open_bytes(&h, c->bytes, c->len, c->claimed, &err);
        assert_fails(c->id, &h, st, &err, expected, "", c->message);
    }
}

TEST(checks_the_length_first)
{
    assert_not_opened(cut_off, COUNT(cut_off), QC_ERR_TRUNCATED);
    assert_not_opened(wrong_begin, COUNT(wrong_begin), QC_ERR_INPUT);
    assert_not_opened(other_files, COUNT(other_files), QC_ERR_UNSUPPORTED);
    /* A valid length may look like a pickle's first bytes: 0x0280 = 640. */
    char file[8 + 640];
    qc_st_header h;
    memset(file, ' ', sizeof file);
    memcpy(file, "\x80\x02\0\0\0\0\0\0{}", 10);
    assert_int_equal(open_bytes(&h, file, sizeof file, 0, NULL), QC_OK);
    qc_st_header_deinit(&h);
    uint64_t n = 1;
    assert_int_equal(qc_st_header_length((const unsigned char *)"abc", 3, 100, &n, NULL),
                     QC_ERR_TRUNCATED);
    assert_true(n == 0);
    /* exactly the limit is legal */
    assert_int_equal(qc_st_header_length((const unsigned char *)"\0\xe1\xf5\x05\0\0\0\0", 8,
                                         100000008, &n, NULL),
                     QC_OK);
    assert_true(n == QC_ST_MAX_HEADER_BYTES);
}

TEST(refuses_a_header_over_the_limit)
{
    SCOPED(qc_st_header) h;
    qc_error err = {0};
    assert_int_equal(qc_st_header_parse(&h, "", 0, 0, &err), QC_ERR_INPUT);
    assert_string_equal(err.msg,
                        "header: JSON byte 0: expected a JSON value, found the end of the text");
    /* The text is not looked at. */
    assert_int_equal(qc_st_header_parse(&h, "", (size_t)QC_ST_MAX_HEADER_BYTES + 1, 0, &err),
                     QC_ERR_INPUT);
    assert_string_equal(err.msg, "the header has 100000001 bytes; at most 100000000 are allowed");
    qc_st_header_deinit(NULL);
}

/* ---- attacks of the reference's own collection ---- */

/* count tensors, all on the same bytes: cases 17 and 19. */
static void attack_same_bytes(size_t count, const char *entry, uint64_t data_bytes)
{
    qc_st_header h;
    qc_error err = {0};
    SCOPED(qc_strbuf) json = {.max = 100000000};
    for (size_t i = 0; i < count; i++)
        assert_int_equal(qc_strbuf_addf(&json, NULL, "%c\"w_%zu\":%s", i ? ',' : '{', i, entry),
                         QC_OK);
    assert_int_equal(qc_strbuf_adds(&json, "}", NULL), QC_OK);
    for (size_t i = 0; i < json.len; i++)
        json.data[i] = json.data[i] == '\'' ? '"' : json.data[i];
    double start = now_seconds();
    assert_int_equal(qc_st_header_parse(&h, json.data, json.len, data_bytes, &err), QC_ERR_INPUT);
    double took = now_seconds() - start;
    assert_non_null(strstr(err.msg, "they overlap"));
    print_message("%zu tensors on the same bytes: refused in %.3f s\n", count, took);
}

TEST(refuses_tensors_on_the_same_bytes)
{
    attack_same_bytes(10, T("F32", "[2,2]", "[0,16]"), 16);
    attack_same_bytes(100000, T("F32", "[200,200]", "[0,160000]"), 160000);
}

/* ---- a small fixture: truncated everywhere, every allocation failed ---- */

static const qc_st_tensor fixture_tensors[] = {
    {"embed.weight", QC_DTYPE_F32, 2, {2, 3}, 0, 24},
    {"scalar", QC_DTYPE_BF16, 0, {0}, 24, 26},
    {"norm\xc3\xa9\"\n", QC_DTYPE_U8, 1, {3}, 26, 29},
    {"packed", QC_DTYPE_F4, 2, {1, 2}, 29, 30},
};
static const qc_st_meta fixture_meta[] = {{"format", "pt"}, {"k\\", "\x01\t"}};

static void make_fixture(qc_strbuf *file)
{
    static const unsigned char data[30] = {1, 2, 3};
    qc_strbuf_init(file, 100000);
    assert_int_equal(st_header_build(file, fixture_tensors, COUNT(fixture_tensors), fixture_meta,
                                     COUNT(fixture_meta), NULL),
                     QC_OK);
    assert_int_equal(qc_strbuf_add(file, data, sizeof data, NULL), QC_OK);
}

TEST(refuses_every_truncation)
{
    qc_strbuf file;
    make_fixture(&file);
    uint64_t header = 8 + qc_load_le64(file.data);
    for (size_t n = 0; n < file.len; n++) {
        qc_st_header h;
        qc_error err = {0};
        assert_int_equal(open_bytes(&h, file.data, n, 0, &err), QC_ERR_TRUNCATED);
        assert_empty(&h);
        if (n >= header) {
            char expected[64];
            (void)snprintf(expected, sizeof expected, "%zu are missing", file.len - n);
            assert_non_null(strstr(err.msg, expected));
        }
    }
    /* and one byte too many */
    qc_st_header h;
    assert_int_equal(qc_strbuf_add(&file, "", 1, NULL), QC_OK);
    assert_int_equal(open_bytes(&h, file.data, file.len, 0, NULL), QC_ERR_INPUT);
    qc_strbuf_deinit(&file);
}

TEST(survives_every_failed_allocation)
{
    qc_strbuf file;
    make_fixture(&file);
    size_t n = (size_t)qc_load_le64(file.data);
    for (int persistent = 0; persistent < 2; persistent++) {
        EACH_ALLOCATION_FAILS (fault, persistent) {
            SCOPED(qc_st_header) h;
            fault.st = qc_st_header_parse(&h, file.data + 8, n, 30, NULL);
            if (fault.st != QC_OK)
                assert_empty(&h);
        }
    }
    qc_strbuf_deinit(&file);
}

/* ---- building ---- */

/* Written by the reference's Python package (0.8.0):
 *   save({'b"\u00e9\n\x01\\': zeros((2, 3), float32), 'a': zeros((0,), int8),
 *         'z/\x7f': zeros((), float16), 'c': ones(3, uint8)}, metadata={'format': 'pt'}) */
static const char reference_header[] =
    "\x10\x01\0\0\0\0\0\0{\"__metadata__\":{\"format\":\"pt\"},\"b\\\"\xc3\xa9\\n\\u0001\\\\\":"
    "{\"dtype\":\"F32\",\"shape\":[2,3],\"data_offsets\":[0,24]},\"z/\x7f\":{\"dtype\":\"F16\","
    "\"shape\":[],\"data_offsets\":[24,26]},\"a\":{\"dtype\":\"I8\",\"shape\":[0],\"data_offsets\":"
    "[26,26]},\"c\":{\"dtype\":\"U8\",\"shape\":[3],\"data_offsets\":[26,29]}}      ";

static int order_tensors(const void *a, const void *b)
{
    return qc_st_tensor_order(a, b);
}

TEST(builds_as_the_reference)
{
    static const qc_st_meta meta = {"format", "pt"};
    qc_st_tensor t[] = {
        {"a", QC_DTYPE_I8, 1, {0}, 0, 0},
        {"c", QC_DTYPE_U8, 1, {3}, 0, 0},
        {"z/\x7f", QC_DTYPE_F16, 0, {0}, 0, 0},
        {"b\"\xc3\xa9\n\x01\\", QC_DTYPE_F32, 2, {2, 3}, 0, 0},
    };
    uint64_t end = 0;
    qsort(t, COUNT(t), sizeof *t, order_tensors);
    for (size_t i = 0; i < COUNT(t); i++) {
        uint64_t bytes = 0;
        assert_int_equal(qc_shape_bytes(t[i].dims, t[i].ndim, t[i].dtype, &bytes, NULL), QC_OK);
        t[i].begin = end;
        t[i].end = end += bytes;
    }
    SCOPED(qc_strbuf) out = {.max = 10000};
    assert_int_equal(qc_strbuf_adds(&out, "before", NULL), QC_OK);
    assert_int_equal(st_header_build(&out, t, COUNT(t), &meta, 1, NULL), QC_OK);
    assert_true(out.len == 6 + sizeof reference_header - 1);
    assert_memory_equal(out.data + 6, reference_header, sizeof reference_header - 1);

    out.len = 0;
    assert_int_equal(st_header_build(&out, NULL, 0, NULL, 0, NULL), QC_OK);
    assert_true(out.len == 16);
    assert_memory_equal(out.data, "\x08\0\0\0\0\0\0\0{}      ", 16);
}

TEST(too_little_room_for_a_header_is_said)
{
    qc_strbuf whole;
    make_fixture(&whole);
    size_t need = 8 + (size_t)qc_load_le64(whole.data);
    for (size_t max = 1; max < 1 + need; max++) {
        SCOPED(qc_strbuf) out = {.max = max};
        assert_int_equal(qc_strbuf_adds(&out, "x", NULL), QC_OK);
        assert_int_equal(st_header_build(&out, fixture_tensors, COUNT(fixture_tensors),
                                         fixture_meta, COUNT(fixture_meta), NULL),
                         QC_ERR_NOMEM);
    }
    qc_strbuf_deinit(&whole);
}

/* Case 31. */
TEST(refuses_to_write_too_much)
{
    qc_error err = {0};
    size_t n = QC_ST_MAX_HEADER_BYTES;
    char *value = malloc(n + 1);
    assert_non_null(value);
    memset(value, 'x', n);
    value[n] = '\0';
    qc_st_meta meta = {"k", value};
    SCOPED(qc_strbuf) out = {.max = 300000000};
    assert_int_equal(st_header_build(&out, NULL, 0, &meta, 1, &err), QC_ERR_INPUT);
    assert_string_equal(err.msg,
                        "the header would have 100000032 bytes; at most 100000000 are allowed");
    out.len = 0;
    value[n - 25] = '\0'; /* exactly the limit */
    assert_int_equal(st_header_build(&out, NULL, 0, &meta, 1, &err), QC_OK);
    assert_true(out.len == 8 + n);
    free(value);
}

TEST(orders_as_the_reference)
{
    qc_st_tensor f32 = {.name = "z", .dtype = QC_DTYPE_F32};
    qc_st_tensor bf16 = {.name = "a", .dtype = QC_DTYPE_BF16};
    qc_st_tensor i32 = {.name = "a", .dtype = QC_DTYPE_I32};
    qc_st_tensor accent = {.name = "\xc3\xa9", .dtype = QC_DTYPE_F32};
    assert_true(qc_st_tensor_order(&f32, &bf16) < 0);
    assert_true(qc_st_tensor_order(&bf16, &f32) > 0);
    assert_true(qc_st_tensor_order(&f32, &i32) < 0);
    assert_true(qc_st_tensor_order(&f32, &accent) < 0);
    assert_true(qc_st_tensor_order(&f32, &f32) == 0);
}

/* ---- sizes ---- */

/* Headers of every length around a buffer size that has hurt others. */
TEST(takes_headers_around_100000_bytes)
{
    for (size_t n = 99990; n <= 100010; n++) {
        SCOPED(qc_st_header) h;
        unsigned char *file = malloc(8 + n);
        assert_non_null(file);
        qc_store_le64(file, n);
        memset(file + 8, 'x', n);
        memcpy(file + 8, "{\"__metadata__\":{\"k\":\"", 22);
        memcpy(file + 8 + n - 3, "\"}}", 3);
        assert_int_equal(open_bytes(&h, file, 8 + n, 0, NULL), QC_OK);
        assert_true(strlen(st_header_meta(&h, "k")) == n - 25);
        free(file);
    }
}

#define MANY 90000u

TEST(takes_90000_tensors_in_20_megabytes)
{
    qc_st_tensor *t = calloc(MANY, sizeof *t);
    char *names = malloc(MANY * (size_t)192);
    SCOPED(qc_st_header) h;
    assert_non_null(t);
    assert_non_null(names);
    SCOPED(qc_strbuf) out = {.max = QC_ST_MAX_HEADER_BYTES};
    for (size_t i = 0; i < MANY; i++) {
        size_t k = i * 7919 % MANY; /* not in the order of names */
        char *name = names + i * 192;
        (void)snprintf(name, 192, "model.layers.%zu.mlp.experts.%zu.down_proj.%0100zu.weight",
                       k / 1000, k % 1000, k);
        t[i] = (qc_st_tensor){name, QC_DTYPE_BF16, 2, {7168, 2048}, i * 29360128, 0};
        t[i].end = t[i].begin + 29360128;
    }
    assert_int_equal(st_header_build(&out, t, MANY, NULL, 0, NULL), QC_OK);
    assert_true(out.len >= 20000000);
    double start = now_seconds();
    assert_int_equal(open_bytes(&h, out.data, out.len, out.len + (uint64_t)MANY * 29360128, NULL),
                     QC_OK);
    double took = now_seconds() - start;
    print_message("header of %zu bytes with %u tensors: opened in %.3f s\n", out.len, MANY, took);
    assert_true(h.tensor_count == MANY);
    for (size_t i = 0; i < MANY; i++) {
        assert_string_equal(h.tensors[i].name, t[i].name);
        assert_true(h.tensors[i].begin == t[i].begin && h.tensors[i].end == t[i].end);
    }
    free(names);
    free(t);
}
