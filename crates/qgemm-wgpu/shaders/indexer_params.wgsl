// Indexer: immediates, and the visible keys of a query.

struct Params {
    q_base: u32,  // offsets in elements, as in `params.wgsl`
    k_base: u32,
    weights_base: u32,
    q_scales_base: u32,
    k_scales_base: u32,
    starts_base: u32,  // or lengths
    ends_base: u32,  // or the block table
    scores_base: u32,
    indices_base: u32,
    first_query: u32,
    part_queries: u32,  // queries of the dispatch
    each: u32,  // queries per sequence
    most_keys: u32,
    key_groups: u32,  // workgroups along the keys
    pages: u32,
    page_size: u32,
    table_width: u32,
    scores_row: u32,  // stride between the scores of queries
    masked_score: u32,  // score bits of a masked key
    chosen: u32,
}

var<immediate> p: Params;

// First visible key of a query,
// and the end of its visible keys.
fn visible_range(query: u32) -> vec2<u32> {
    if (PAGES) {
        let end = min(starts[p.starts_base + query / p.each], p.most_keys) + query % p.each + 1u;
        return vec2<u32>(0u, end - min(end, p.each));
    }
    if (RANGES) {
        let end = min(ends[p.ends_base + query], p.most_keys);
        return vec2<u32>(min(starts[p.starts_base + query], end), end);
    }
    return vec2<u32>(0u, p.most_keys);
}
