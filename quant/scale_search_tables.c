/* The constants of the search: factors, and the screen computed from them. */
#include "quant/scale_search_internal.h"

#include <math.h>
#include <pthread.h>

const float qc_search_factor[2][QC_SEARCH_FACTORS] = {QC_SEARCH_FACTOR_VALUES};

static qc_search_screen screen;
static pthread_once_t screen_once = PTHREAD_ONCE_INIT;

/* Squared distance of u from the nearest NF4 value times f. */
static double squared_distance(double u, double f)
{
    double least = INFINITY;
    for (unsigned code = 0; code < 16; code++) {
        double r = u - f * (double)qc_nf4_code[code];
        least = r * r < least ? r * r : least;
    }
    return least;
}

static void build(void)
{
    for (unsigned list = 0; list < 2; list++)
        for (unsigned row = 0; row < QC_SEARCH_LEVELS; row++)
            for (unsigned m = 0; m < QC_SEARCH_FACTORS; m++) {
                double u = ((double)row - 127.0) / 127.0;
                double f = (double)qc_search_factor[list][m];
                uint16_t *entries = screen.of[list][row];
                entries[m] = (uint16_t)rint(32768.0 * squared_distance(u, f));
                entries[m + QC_SEARCH_FACTORS] = (uint16_t)rint(32768.0 * squared_distance(u, -f));
            }
}

const qc_search_screen *qc_search_screen_get(void)
{
    (void)pthread_once(&screen_once, build);
    return &screen;
}
