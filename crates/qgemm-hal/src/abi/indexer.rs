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
        /// Weights of heads.
        pub weights: u64,
        /// Scales of heads; 0 where there are none.
        pub q_scales: u64,
        /// Scales of keys; 0 where there are none.
        pub k_scales: u64,
        /// First key of each query; 0 where all see all.
        pub starts: u64,
        /// Where the keys of each query end; 0
        /// where all see all.
        pub ends: u64,
        /// Keys of each sequence; 0 where there are no pages.
        pub lengths: u64,
        /// Pages of each sequence; 0 where there are no pages.
        pub block_table: u64,
        /// Scores of the queries of this launch, or which keys are
        /// gathered while they are scored.
        pub scores: u64,
        /// Keys with the highest scores.
        pub indices: u64,
        /// From one query to the next.
        pub q_token: u64,
        /// From one head of a query to the next.
        pub q_head: u64,
        /// From one query's weights to the next.
        pub weights_row: u64,
        /// From one page of keys to the next.
        pub k_page: u64,
        /// From one key to the next.
        pub k_row: u64,
        /// From one page of scales to the next.
        pub k_scale_page: u64,
        /// From one query's scores, or what is told of
        /// its keys, to the next.
        pub scores_row: u64,
        /// What is known of queries whose keys are gathered while they
        /// are scored; 0 where none are.
        pub notes: u64,
        /// Scores of keys that are gathered while they are scored.
        pub found: u64,
        /// What is known of all queries of such.
        pub found_header: u64,
        /// First query of this launch.
        pub first_query: u32,
        /// Keys of a CTA, where the kernel has no fixed number.
        pub cta_keys: u32,
        /// Heads.
        pub heads: u32,
        /// Features.
        pub features: u32,
        /// Keys that a query sees at most.
        pub most_keys: u32,
        /// Queries of a sequence, of those of this launch.
        pub sequence_queries: u32,
        /// CTAs along the queries of a sequence.
        pub query_ctas: u32,
        /// Queries of a CTA at most.
        pub cta_queries: u32,
        /// CTAs along the keys.
        pub key_ctas: u32,
        /// Pages.
        pub pages: u32,
        /// Rows of a page.
        pub page_size: u32,
        /// Pages of a row of the block table; 0 where
        /// there are no pages.
        pub table_width: u32,
        /// Keys that are chosen.
        pub chosen: u32,
        /// Whether sixteen bytes of queries are loaded at once.
        pub q_aligned: u32,
        /// Whether sixteen bytes of keys are loaded at once.
        pub k_aligned: u32,
        /// Bits of the score of a key that a
        /// query does not see.
        pub not_seen: u32,
        /// Keys from one that is scored to the next.
        pub key_step: u32,
        /// Keys that are scored.
        pub columns: u32,
        /// Chunks of scores for warps that gather more
        /// keys than are expected.
        pub spare_chunks: u32,
        /// Keys of a query that should be gathered
        /// while they are scored.
        pub aim: u32,
    }
}
