// The sections of the page (page.h): all write to the writer's stream, and what cannot be written shows when the file
// is finished.
#pragma once
#include "tools/report/page.h"
#include <stdio.h>

typedef struct page_writer {
    const page *p;
    FILE *out;
} page_writer;

// "snapkv:kvpress", with the file's name behind it where two tables are for one metric.
void page_put_name(const page_writer *w, const page_table *t);
// The verdict on each table: is it worth anything, how much can go, what is not known.
void page_put_verdicts(page_writer *w);
// What each table is for and what it was made from.
void page_put_origin(page_writer *w);
// Head maps at the row nearest to 80 %, with the slider that the script brings to life.
void page_put_maps(page_writer *w);
void page_put_losses(page_writer *w);
void page_put_unsure(page_writer *w);
void page_put_bytes(page_writer *w);
// eval and task; held-out losses.
void page_put_worth(page_writer *w);
void page_put_holdout(page_writer *w);
void page_put_use(page_writer *w);
void page_put_repeat(page_writer *w);

// What the script needs of the tables: shares kept and deviations in thousandths.
cJSON *page_map_data(const page *p);

// What an `eval` says of a table at one ratio, or of another allocator.
typedef struct worth {
    double ratio;
    interval kl, to_uniform, agree; // nats per token; of uniform's KL; share of equal next tokens
    interval uniform_kl, uniform_agree;
    double texts; // how many; NaN: not told
} worth;

// The rows of all results about a table, by ratio. Returns how many there are, at most `room`.
size_t page_find_worth(const page *p, const page_table *t, worth *out, size_t room);
// Loss of the even split at a ratio on the texts of a table, as `solve --json` tells it; NaN where nothing does.
double page_find_uniform_loss(const page *p, const page_table *t, double ratio);
// The row of a table nearest to a ratio.
kvb_row page_row_near(const kvb_table *t, double ratio);
