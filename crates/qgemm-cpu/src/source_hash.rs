//! Hash of the kernel sources.

/// The sources, by their paths under `src`. A
/// test finds missing ones.
macro_rules! sources {
    ($($path:literal)*) => {
        #[cfg(test)]
        const PATHS: &[&str] = &[$($path),*];

        /// FNV-1a of the sources, because the standard library's hashes
        /// may change with its version.
        pub const SOURCE_HASH: u64 = {
            let hash = OFFSET;
            // A constant for each file: compilers limit the steps of one.
            $(let hash = fnv1a(hash, &const { fnv1a(OFFSET, include_bytes!($path)) }.to_le_bytes());)*
            hash
        };
    };
}

sources! {
    "arena.rs" "convert.rs" "given_codes.rs" "job.rs" "operand.rs" "ordered.rs" "packed.rs" "planes.rs" "pool.rs" "processor.rs"
    "families/attention/cache.rs" "families/attention/cost.rs" "families/attention/job.rs" "families/attention/keys.rs"
    "families/attention/mod.rs" "families/attention/rows.rs" "families/attention/softmax.rs"
    "families/convert.rs" "families/experts.rs" "families/experts/combine.rs" "families/experts/index.rs" "families/mod.rs"
    "families/gemm/mod.rs" "families/gemm/fma.rs" "families/gemm/int8.rs" "families/gemm/share.rs"
    "families/matmul/mod.rs" "families/matmul/cut.rs" "families/matmul/factor.rs" "families/matmul/job.rs" "families/matmul/slope.rs"
    "families/dequantize.rs" "families/gather_rows.rs" "families/indexer.rs" "families/linear_attention/mod.rs" "families/linear_attention/gates.rs" "families/merge_attention.rs" "families/kv_append/cache.rs" "families/kv_append/hadamard.rs" "families/kv_append/head_norm.rs" "families/kv_append/mod.rs" "families/kv_append/rotary.rs" "families/unpack.rs"
    "families/quantize.rs"
    "families/norm.rs" "families/optimizer.rs"
    "families/routing/mod.rs" "families/routing/lists.rs" "families/routing/top_k.rs"
    "families/sampling/mod.rs" "families/sampling/row.rs"
    "families/short_conv.rs"
    "simd/mod.rs" "simd/activation.rs" "simd/attention.rs" "simd/avx2.rs" "simd/avx512.rs" "simd/checked.rs" "simd/codes.rs" "simd/convolution.rs" "simd/dense.rs"
    "simd/dot.rs" "simd/epilogue.rs" "simd/gate.rs" "simd/indexer.rs" "simd/kernel.rs" "simd/kv_tile.rs" "simd/level.rs" "simd/neon.rs" "simd/norm.rs" "simd/portable.rs"
    "simd/prefetch.rs" "simd/quantize.rs" "simd/recurrence.rs" "simd/scales.rs" "simd/vector.rs"
}

const OFFSET: u64 = 0xcbf2_9ce4_8422_2325;
const PRIME: u64 = 0x0100_0000_01b3;

const fn fnv1a(mut hash: u64, bytes: &[u8]) -> u64 {
    let mut i = 0;
    while i < bytes.len() {
        hash = (hash ^ bytes[i] as u64).wrapping_mul(PRIME);
        i += 1;
    }
    hash
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::path::Path;

    use super::*;

    #[test]
    fn the_hash_is_the_published_one() {
        assert_eq!(fnv1a(OFFSET, b"foobar"), 0x8594_4171_f739_67e8);
    }

    #[test]
    fn no_source_is_forgotten() {
        // The device description and this file do not affect kernels.
        const OTHERS: [&str; 3] = ["device.rs", "lib.rs", "source_hash.rs"];
        let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
        let (mut folders, mut found) = (vec![src.clone()], BTreeSet::new());
        while let Some(folder) = folders.pop() {
            for entry in folder.read_dir().expect("the crate's sources are there") {
                let path = entry.expect("an entry").path();
                if path.ends_with("tests") {
                    continue;
                } else if path.is_dir() {
                    folders.push(path);
                } else {
                    let name = path.strip_prefix(&src).expect("below it").to_str().expect("of plain letters");
                    found.insert(name.replace('\\', "/"));
                }
            }
        }
        let known: BTreeSet<String> = PATHS.iter().chain(&OTHERS).map(|&path| path.to_owned()).collect();
        assert_eq!(found, known);
    }
}
