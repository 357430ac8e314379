/* What becomes of the staging folder: what has to hold of every end with every set of facts. */
#include "convert/run/ending.h"
#include "tests/fixtures/test.h"

#define ENDS (QC_END_REFUSED + 1)

TEST(ends_of_statuses)
{
    assert_int_equal(qc_end_of(QC_OK, 0), QC_END_DONE);
    assert_int_equal(qc_end_of(QC_OK, 1), QC_END_DONE);
    assert_int_equal(qc_end_of(QC_ERR_CHANGED, 0), QC_END_CHANGED);
    assert_int_equal(qc_end_of(QC_ERR_INPUT, 0), QC_END_REFUSED);
    assert_int_equal(qc_end_of(QC_ERR_USAGE, 0), QC_END_REFUSED);
    assert_int_equal(qc_end_of(QC_ERR_INPUT, 1), QC_END_MISFIT);
    assert_int_equal(qc_end_of(QC_ERR_CHECK, 1), QC_END_MISFIT);
    assert_int_equal(qc_end_of(QC_ERR_INTERRUPTED, 0), QC_END_STOPPED);
    assert_int_equal(qc_end_of(QC_ERR_NOSPACE, 0), QC_END_STOPPED);
    assert_int_equal(qc_end_of(QC_ERR_DEVICE, 0), QC_END_STOPPED);
}

TEST(what_holds_of_every_end)
{
    for (int end = 0; end < (int)ENDS; end++)
        for (unsigned facts = 0; facts <= QC_ENDING_FACTS; facts++) {
            const qc_ending e = qc_ending_of((qc_end)end, facts);
            int opened = facts & QC_ENDING_OPENED ? 1 : 0;
            int work = facts & QC_ENDING_WORK ? 1 : 0;
            /* Only what is complete is closed, and nothing is told of what does not stay. */
            assert_int_equal(e.fate == QC_STAGING_CLOSE,
                             end == QC_END_DONE && !(facts & QC_ENDING_OTHERS_LEFT));
            assert_true(!e.tell || (e.fate == QC_STAGING_LEAVE && opened));
            if (end == QC_END_DONE) {
                if (facts & QC_ENDING_OTHERS_LEFT)
                    assert_int_equal(e.fate, QC_STAGING_LEAVE);
                continue;
            }
            /* Another run's journal is not this process's to drop. */
            if (!opened)
                assert_int_equal(e.fate,
                                 facts & QC_ENDING_JOURNAL ? QC_STAGING_LEAVE : QC_STAGING_DROP);
            /* Finished work outlives whatever may go better the next time. */
            if (opened && work && end != QC_END_REFUSED)
                assert_int_equal(e.fate, QC_STAGING_LEAVE);
            /* Nothing is left of a run that finished nothing. */
            if (opened && !work)
                assert_int_equal(e.fate, QC_STAGING_DROP);
            /* Whoever can go on is told so. */
            if (opened && work && (end == QC_END_STOPPED || end == QC_END_CHANGED))
                assert_int_equal(e.tell, 1);
            /* The same command would not go on after a misfit or a refusal. */
            if (end == QC_END_MISFIT || end == QC_END_REFUSED)
                assert_int_equal(e.tell, 0);
        }
}

/* A bad input is found by looking, by working, or after this process's share was made. */
TEST(refusals)
{
    const unsigned kept = QC_ENDING_OPENED | QC_ENDING_WORK;
    assert_int_equal(qc_ending_of(QC_END_REFUSED, kept).fate, QC_STAGING_LEAVE);
    assert_int_equal(qc_ending_of(QC_END_REFUSED, kept | QC_ENDING_WORKED).fate, QC_STAGING_DROP);
    assert_int_equal(
        qc_ending_of(QC_END_REFUSED, kept | QC_ENDING_WORKED | QC_ENDING_PART_MADE).fate,
        QC_STAGING_LEAVE);
}
