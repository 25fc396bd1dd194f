// What the page is about: opened, and matched with each other.
#include "formats/sha256.h"
#include "formats/table_export.h"
#include "runtime/fail.h"
#include "tools/report/page.h"
#include <string.h>

static bool is_known(const kvb_table *table, const char *tensor)
{
    const char *unknown = kvb_table_metadata(table, "unknown");
    return !unknown || !strstr(unknown, tensor);
}

static kvb_status open_table(page_table *t, const char *path, kvb_error *err)
{
    *t = (page_table){.path = path};
    kvb_status status = kvb_table_open(&t->file, path, NULL, err);
    if (status == KVB_OK) status = table_metadata_read(&t->metadata, path, err);
    if (status == KVB_OK) status = sha256_file_hex(path, t->sha256, err);
    if (status != KVB_OK) return status;
    t->knows_losses = is_known(t->file, "table_loss");
    // Of one question there is no deviation.
    t->knows_deviation = is_known(t->file, "std") && kvb_table_info(t->file)->n_questions > 1;
    return KVB_OK;
}

static kvb_status open_record(page_record *r, const char *path, kvb_error *err)
{
    *r = (page_record){.path = path};
    kvb_status status = record_open(&r->file, path, err);
    return status == KVB_OK ? record_file_sha256(r->file, r->sha256, err) : status;
}

// A record says nothing about a table that was not made from it.
static kvb_status match_record(page *p, const page_record *r, kvb_error *err)
{
    size_t n = 0;
    for (size_t i = 0; i < p->n_tables; i++) {
        if (strcmp(kvb_table_info(p->tables[i].file)->record_sha256, r->sha256) != 0) continue;
        p->tables[i].from = r;
        n++;
    }
    if (n > 0) return KVB_OK;
    return kvb_fail(err, KVB_MISMATCH,
                    "%s: no table of the report was made from this record: its SHA-256 is %.16s..., %s names %.16s...; "
                    "give the record that was solved, or leave --record out",
                    r->path, r->sha256, p->tables[0].path, kvb_table_info(p->tables[0].file)->record_sha256);
}

kvb_status page_open(page *p, const page_paths *paths, kvb_error *err)
{
    *p = (page){0};
    if (paths->n_tables == 0 || paths->n_tables > PAGE_TABLES_MAX || paths->n_records > PAGE_RECORDS_MAX ||
        paths->n_results > PAGE_RESULTS_MAX)
        return kvb_fail(err, KVB_ARGUMENT,
                        "a report takes 1 to %d tables, %d records and %d results, found %zu, %zu and %zu; make "
                        "several reports",
                        PAGE_TABLES_MAX, PAGE_RECORDS_MAX, PAGE_RESULTS_MAX, paths->n_tables, paths->n_records,
                        paths->n_results);
    kvb_status status = KVB_OK;
    for (size_t i = 0; i < paths->n_tables && status == KVB_OK; i++) {
        p->n_tables++; // counted before, so that what a failure leaves open is closed
        status = open_table(&p->tables[i], paths->tables[i], err);
    }
    for (size_t i = 0; i < paths->n_records && status == KVB_OK; i++) {
        p->n_records++;
        status = open_record(&p->records[i], paths->records[i], err);
        if (status == KVB_OK) status = match_record(p, &p->records[i], err);
    }
    for (size_t i = 0; i < paths->n_results && status == KVB_OK; i++) {
        p->n_results++;
        status = results_open(&p->results[i], paths->results[i], err);
    }
    return status;
}

void page_free(page *p)
{
    for (size_t i = 0; i < p->n_tables; i++) {
        kvb_table_close(p->tables[i].file);
        cJSON_Delete(p->tables[i].metadata);
    }
    for (size_t i = 0; i < p->n_records; i++) record_close(p->records[i].file);
    for (size_t i = 0; i < p->n_results; i++) results_close(&p->results[i]);
    *p = (page){0};
}
