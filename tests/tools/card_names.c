/* The names of the cards that qconv knows, a line each, in the order of its table. */
#include "convert/hardware/card_table.h"

#include <stdio.h>

int main(void)
{
    for (unsigned i = 0; i < qc_card_count; i++)
        (void)puts(qc_card_table[i].name);
    return 0;
}
