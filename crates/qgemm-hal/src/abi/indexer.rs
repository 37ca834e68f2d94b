//! Parameters of the indexer kernels.

use bytemuck::{Pod, Zeroable};

use super::{AbiField, AbiStruct};

abi_struct! {
    /// Parameters of an `indexer` kernel; CUDA only. Strides are in elements.
    pub struct IndexerParams {
        /// Queries.
        pub q: u64,
        /// Keys.
        pub k: u64,
        /// Weights of the query heads.
        pub weights: u64,
        /// Scales of the query heads, or 0.
        pub q_scales: u64,
        /// Scales of the keys, or 0.
        pub k_scales: u64,
        /// First visible key of each query; 0 without ranges.
        pub starts: u64,
        /// End of the visible keys of each query; 0 without ranges.
        pub ends: u64,
        /// Key count of each sequence; 0 without pages.
        pub lengths: u64,
        /// Block table of each sequence; 0 without pages.
        pub block_table: u64,
        /// Scores of this launch's queries, or records of gathered keys.
        pub scores: u64,
        /// Top-k keys.
        pub indices: u64,
        /// Stride between queries.
        pub q_token: u64,
        /// Stride between heads of a query.
        pub q_head: u64,
        /// Stride between the weights of queries.
        pub weights_row: u64,
        /// Stride between pages of keys.
        pub k_page: u64,
        /// Stride between keys.
        pub k_row: u64,
        /// Stride between pages of scales.
        pub k_scale_page: u64,
        /// Stride between the scores or records of queries.
        pub scores_row: u64,
        /// States of queries with gathered keys; 0 without gathering.
        pub query_states: u64,
        /// Scores of gathered keys.
        pub found: u64,
        /// Header for all queries with gathered keys.
        pub found_header: u64,
        /// First query of this launch.
        pub first_query: u32,
        /// Keys of a CTA, unless the kernel fixes the number.
        pub cta_keys: u32,
        /// Heads.
        pub heads: u32,
        /// Features.
        pub features: u32,
        /// Maximum visible keys of a query.
        pub most_keys: u32,
        /// Queries of each sequence in this launch.
        pub sequence_queries: u32,
        /// CTAs along the queries of a sequence.
        pub query_ctas: u32,
        /// Maximum queries of a CTA.
        pub cta_queries: u32,
        /// CTAs along the keys.
        pub key_ctas: u32,
        /// Pages.
        pub pages: u32,
        /// Rows of a page.
        pub page_size: u32,
        /// Columns of the block table; 0 without one.
        pub table_width: u32,
        /// Keys to choose (top-k).
        pub chosen: u32,
        /// Whether queries are loaded by 16-byte vectors.
        pub q_aligned: u32,
        /// Whether keys are loaded by 16-byte vectors.
        pub k_aligned: u32,
        /// Bits of a masked key's score.
        pub masked_score: u32,
        /// Distance between scored keys.
        pub key_step: u32,
        /// Number of scored keys.
        pub columns: u32,
        /// Spare score chunks for warps that gather more keys than expected.
        pub spare_chunks: u32,
        /// Keys to gather for a query.
        pub aim: u32,
    }
}
