/* The calculator of shapes and conditions, and the rows of all families that it has to read. */
#include "convert/families/shape_text.h"
#include "tests/fixtures/test_model.h"

#include <inttypes.h>

static const char config_text[] =
    "{\"width\":48,\"none\":null,\"zero\":0,\"big\":1073741824,\"flag\":true,\"off\":false,"
    "\"list\":[1,2,3],\"word\":\"x\",\"vision_config\":{\"width\":7}}";

typedef struct {
    qc_json *doc;
    qc_config config;
    qc_shape_facts facts;
} place;

static void open_place(place *p)
{
    qc_error err = {0};
    test_must(qc_json_parse(&p->doc, config_text, strlen(config_text), QC_JSON_PYTHON, &err), &err);
    qc_config_open(&p->config, p->doc);
    p->facts = (qc_shape_facts){
        .config = &p->config, .family = qc_family_find("gemma2"), .hidden = 64, .q = 96};
}

TEST(sums)
{
    static const struct {
        const char *text;
        uint64_t result;
    } cases[] = {
        {"7", 7},
        {"2*3+4", 10},
        {"2+3*4", 14},
        {"2*(3+4)", 14},
        {"hidden/5*2", 24}, /* from the left, without fractions */
        {"hidden/0", 0},
        {"!hidden", 0},
        {"!(state+cross)*3", 3},
        {"!zero?*5", 5},
        {"q+2*width", 192},
        {"vision.width", 7},
        {"#list+1", 4},
        {"absent?9+absent?", 9},
        {"none?4", 4},
        {"flag~+off~1+absent~1+absent~", 2},
        {"word~1", 1}, /* no flag, and so as if it were missing */
        {"FOUR_NORMS*2+LATENT", 2},
    };
    place p;
    open_place(&p);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        qc_error err = {0};
        uint64_t out = 0;
        test_must(qc_shape_when(&out, cases[i].text, 0, &p.facts, &err), &err);
        if (out != cases[i].result)
            fail_msg("%s is %" PRIu64, cases[i].text, out);
    }
    uint64_t dims[3] = {0}, out = 0;
    unsigned count = 0;
    assert_int_equal(qc_shape_read(dims, 3, &count, "2*q, hidden,1", &p.facts, NULL), QC_OK);
    assert_int_equal(count, 3);
    assert_true(dims[0] == 192 && dims[1] == 64 && dims[2] == 1);
    assert_int_equal(qc_shape_when(&out, NULL, 5, &p.facts, NULL), QC_OK);
    assert_int_equal(out, 5);
    qc_json_destroy(p.doc);
}

TEST(refused)
{
    static const struct {
        const char *text, *words;
        qc_status code;
    } cases[] = {
        {"absent", "absent is missing", QC_ERR_INPUT},
        {"none", "none is missing", QC_ERR_INPUT},
        {"zero", "zero is 0", QC_ERR_INPUT},
        {"word?", "word", QC_ERR_INPUT},
        {"flag?", "flag", QC_ERR_INPUT},
        {"vision.height", "height is missing", QC_ERR_INPUT},
        {"#width", "width is missing", QC_ERR_INPUT},
        {"big*big*big", "overflow", QC_ERR_INPUT},
        {"big*big*8+big*big*8", "overflow", QC_ERR_INPUT},
        {"hidden*", "cannot be read", QC_ERR_INTERNAL},
        {"hidden hidden hidden hidden", "cannot be read", QC_ERR_INTERNAL},
    };
    place p;
    open_place(&p);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        qc_error err = {0};
        uint64_t out[3];
        unsigned count = 0;
        qc_status st = qc_shape_read(out, 3, &count, cases[i].text, &p.facts, &err);
        if (st != cases[i].code || !strstr(err.msg, cases[i].words))
            fail_msg("%s: %s: %s", cases[i].text, qc_status_name(st), err.msg);
    }
    qc_json_destroy(p.doc);
}

static void expect_readable(const char *text, unsigned max, const qc_shape_facts *facts)
{
    uint64_t out[QC_MAX_DIMS];
    unsigned count = 0;
    qc_error err = {0};
    if (text && qc_shape_read(out, max, &count, text, facts, &err) == QC_ERR_INTERNAL)
        fail_msg("%s", err.msg);
}

/* Nothing that a row says is unreadable; a field that this configuration lacks is no matter. */
TEST(every_row_can_be_read)
{
    size_t rows = 0;
    place p;
    open_place(&p);
    for (size_t i = 0; i < qc_family_count; i++) {
        p.facts.family = &qc_families[i];
        for (const qc_family_group *g = qc_families[i].groups; g->prefix; g++) {
            expect_readable(g->count, 1, &p.facts);
            expect_readable(g->when, 1, &p.facts);
            for (const qc_family_row *r = g->rows; r->name; r++, rows++) {
                expect_readable(r->shape, QC_MAX_DIMS, &p.facts);
                expect_readable(r->when, 1, &p.facts);
                expect_readable(r->bias, 1, &p.facts);
            }
        }
        assert_ptr_equal(qc_family_find(qc_families[i].type), &qc_families[i]); /* no type twice */
    }
    assert_true(rows > 500);
    qc_json_destroy(p.doc);
}
