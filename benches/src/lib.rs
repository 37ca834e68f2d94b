//! Criterion benchmarks of qgemm; see `benches/`.
