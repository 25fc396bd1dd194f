// The host's half of layer_sums.h, from a view's tensors; included by layer_sums.c alone. The same contracts.
#pragma once
#include "profiler/metric/layer_sums.h"

kvb_status layer_host_window_votes(const layer_view *view, uint32_t window, float factor, float *votes, kvb_error *err);
kvb_status layer_host_group_votes(const layer_view *view, uint32_t window, bool maximum, float *votes, kvb_error *err);
void layer_host_norms(const layer_view *view, view_item item, double *norms);
kvb_status layer_host_query_moments(const layer_view *view, uint32_t from, double *mean, double *covariance,
                                    kvb_error *err);
void layer_host_key_means(const layer_view *view, bool normalised, double *mean);
kvb_status layer_host_key_forms(const layer_view *view, const key_form *form, double *z, kvb_error *err);
kvb_status layer_host_spreads(const layer_view *view, view_item item, partition_row row, float *out, kvb_error *err);
