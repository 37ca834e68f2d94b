// Attention: value features of a CTA. With QG_SLICED, CTAs
// that share queries and keys each have QG_V of them.
#pragma once
#include "attention/problem.cuh"

// First value feature of the CTA.
QG_DEVICE u32 first_feature() {
    return QG_SLICED ? cta_index().y * QG_V : 0;
}

// Value features from the first of the CTA on.
QG_DEVICE u32 features_of_cta(const AttentionParams& p) {
    return p.shape.v_dim - first_feature();
}
