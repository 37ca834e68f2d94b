//! The suite of `kv_append`: cases that every backend must pass.

use qgemm_api::RotaryScaling;
use qgemm_formats::DType;
use qgemm_hal::{KvFormat, RotaryPairs};

use super::case::{KvAppendCase, RotaryCase};
use crate::attention::{AttentionCase, AttentionStorage, AttentionValues};
use crate::suite::{Cases, group};

/// All groups.
pub(super) const GROUPS: &[Cases<KvAppendCase>] = &[
    group("kv_append_lengths", "no tokens, one, many, more than keys; ragged, offsets, pages of every size", lengths),
    group("kv_append_heads", "every head dimension and pair of types, parts of heads rotated, no queries", heads),
    group("kv_append_angles", "both kinds of pairs, bases, scalings, late positions, tables", angles),
    group("kv_append_layouts", "strides, heads before tokens, unaligned operands", layouts),
    group("kv_append_hadamard", "Hadamard rotation of keys and values in every format and dim", hadamard),
    group("kv_append_head_norm", "norms of query and key heads before every rotation, format and dim", head_norm),
    group("kv_append_in_place", "heads rotated in place: Hadamard, inverse rotary embedding, both", in_place),
];

/// Numbers the seeds of cases, so that random values differ.
fn numbered(cases: Vec<KvAppendCase>) -> Vec<KvAppendCase> {
    let seeded =
        |(i, case): (usize, KvAppendCase)| KvAppendCase { of: AttentionCase { seed: i as u64, ..case.of }, ..case };
    cases.into_iter().enumerate().map(seeded).collect()
}

fn types(i: usize) -> DType {
    [DType::F16, DType::BF16, DType::F32][i % 3]
}

fn pairs(i: usize) -> RotaryPairs {
    RotaryPairs::ALL[i % 2]
}

fn lengths() -> Vec<KvAppendCase> {
    let all: [&[(usize, usize)]; 8] = [
        &[(1, 1)],
        &[(0, 0), (0, 3)],
        &[(1, 9), (1, 0), (1, 64)],
        &[(5, 5), (5, 2)],
        &[(0, 3), (3, 0), (1, 9), (0, 0), (7, 7)],
        &[(33, 40)],
        &[(2, 100); 9],
        &[(1, 7); 70],
    ];
    let pages = [1, 3, 16].map(AttentionStorage::Paged);
    let places = [AttentionStorage::Offsets, AttentionStorage::Lengths(0), AttentionStorage::Lengths(5)];
    let mut cases = Vec::new();
    for (i, lengths) in all.into_iter().enumerate() {
        let plain = AttentionCase::new(lengths, (4, 2), 64, types(i));
        cases.push(KvAppendCase::new(plain.clone()));
        for (j, places) in places.into_iter().chain(pages).enumerate() {
            let ragged = plain.ragged || j % 2 == 0;
            let values = if j == 4 { AttentionValues::BadPages } else { AttentionValues::Normal };
            let of = AttentionCase { places, ragged, values, ..plain.clone() };
            cases.push(KvAppendCase { rotary: Some(RotaryCase::new(64, pairs(j))), ..KvAppendCase::new(of) });
        }
    }
    numbered(cases)
}

fn heads() -> Vec<KvAppendCase> {
    let mut cases = Vec::new();
    let dims = [(64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256), (8, 8), (72, 40), (24, 200)];
    for (i, dims) in dims.into_iter().enumerate() {
        let heads = [(2, 2), (4, 1), (32, 8), (3, 1)][i % 4];
        let of = AttentionCase { dims, ..AttentionCase::new(&[(3, 7), (3, 3)], heads, 8, types(i)) };
        for (j, rotated) in [dims.0, dims.0 / 2, 2, 20.min(dims.0), 16.min(dims.0)].into_iter().enumerate() {
            let rotary = Some(RotaryCase::new(rotated, pairs(i + j)));
            cases.push(KvAppendCase { rotary, has_queries: j != 2, ..KvAppendCase::new(of.clone()) });
        }
        cases.push(KvAppendCase { rotary: None, ..KvAppendCase::new(of) });
    }
    for kv in KvFormat::ALL {
        for (i, dtype) in DType::ALL.into_iter().enumerate() {
            let of = AttentionCase { kv, ..AttentionCase::new(&[(2, 9), (2, 2)], (4, 2), 64, dtype) };
            cases.push(KvAppendCase { rotary: Some(RotaryCase::new(48, pairs(i))), ..KvAppendCase::new(of) });
        }
    }
    numbered(cases)
}

fn angles() -> Vec<KvAppendCase> {
    let scalings = [
        RotaryScaling::None,
        RotaryScaling::Linear { factor: 4.0 },
        RotaryScaling::Llama3 { factor: 8.0, low: 1.0, high: 4.0, original: 8192 },
        RotaryScaling::Yarn { factor: 16.0, fast: 32.0, slow: 1.0, original: 4096, truncate: true },
        RotaryScaling::Yarn { factor: 32.0, fast: 32.0, slow: 1.0, original: 4096, truncate: false },
    ];
    let mut cases = Vec::new();
    for (i, scaling) in scalings.into_iter().enumerate() {
        for (j, base) in [10_000.0, 500_000.0, 100.0].into_iter().enumerate() {
            for (k, from) in [None, Some(0), Some(131_000), Some(16_000_000)].into_iter().enumerate() {
                let of = AttentionCase::new(&[(4, 300)], (2, 1), 128, [DType::F32, DType::F16][k % 2]);
                let rotary = Some(RotaryCase { base, scaling, ..RotaryCase::new(128, pairs(i + j + k)) });
                cases.push(KvAppendCase { rotary, positions_from: from, ..KvAppendCase::new(of) });
            }
        }
    }
    for (i, tables) in [0, 1, 7, 400].into_iter().enumerate() {
        for (j, from) in [None, Some(3)].into_iter().enumerate() {
            let of = AttentionCase::new(&[(5, 9), (1, 300), (3, 3)], (3, 3), 64, types(i + j));
            let rotary = Some(RotaryCase { tables: Some(tables), ..RotaryCase::new([64, 40][j], pairs(i)) });
            cases.push(KvAppendCase { rotary, positions_from: from, ..KvAppendCase::new(of) });
        }
    }
    numbered(cases)
}

fn layouts() -> Vec<KvAppendCase> {
    let mut cases = Vec::new();
    for (i, (gap, offset, head_major)) in
        [(3, 0, false), (8, 0, false), (0, 1, false), (5, 2, true), (16, 0, true), (0, 3, true)].into_iter().enumerate()
    {
        let places = [AttentionStorage::Paged(10), AttentionStorage::Lengths(2), AttentionStorage::Offsets][i % 3];
        for (j, kv) in KvFormat::ALL.into_iter().enumerate() {
            let of =
                AttentionCase::new(&[(4, 15), (4, 4)], (4, 2), if kv.has_scales() { 64 } else { 40 }, types(i + j));
            let of = AttentionCase { places, gap, offset, head_major, kv, ..of };
            cases.push(KvAppendCase { rotary: Some(RotaryCase::new(32, pairs(j))), ..KvAppendCase::new(of) });
        }
    }
    numbered(cases)
}

fn hadamard() -> Vec<KvAppendCase> {
    let mut cases = Vec::new();
    let rotated = [[true, false], [false, true], [true, true]];
    for (i, kv) in KvFormat::ALL.into_iter().enumerate() {
        for (j, dim) in [64, 80, 96, 128, 256].into_iter().filter(|dim| dim % kv.step() == 0).enumerate() {
            let heads = [(4, 2), (3, 1), (8, 8)][(i + j) % 3];
            let places = [AttentionStorage::Each, AttentionStorage::Paged(3)][j % 2];
            for (k, hadamard) in rotated.into_iter().enumerate() {
                let of = AttentionCase { kv, places, ..AttentionCase::new(&[(3, 9); 2], heads, dim, types(i + j + k)) };
                let rotary = RotaryCase::new([dim, dim / 2, 12][(j + k) % 3], pairs(i + k));
                let rotary = (j + k != 1).then_some(rotary);
                cases.push(KvAppendCase { hadamard, rotary, has_queries: k != 1, ..KvAppendCase::new(of) });
            }
        }
    }
    for (i, dims) in [(8, 256), (256, 8), (192, 128), (72, 40)].into_iter().enumerate() {
        let (gap, offset) = [(0, 0), (3, 1), (8, 0), (5, 2)][i];
        let of = AttentionCase { dims, gap, offset, ..AttentionCase::new(&[(2, 5), (2, 2)], (4, 2), 8, types(i)) };
        cases.push(KvAppendCase { hadamard: [true, true], ..KvAppendCase::new(of) });
    }
    numbered(cases)
}

fn head_norm() -> Vec<KvAppendCase> {
    let mut cases = Vec::new();
    for (i, dims) in
        [(64, 64), (80, 80), (96, 96), (128, 128), (256, 256), (8, 8), (192, 128), (72, 40)].into_iter().enumerate()
    {
        let heads = [(32, 8), (4, 1), (5, 5)][i % 3];
        let of = AttentionCase { dims, ..AttentionCase::new(&[(3, 7), (3, 3)], heads, 8, types(i)) };
        for (j, rotated) in [dims.0, dims.0 / 2, 12.min(dims.0), 0].into_iter().enumerate() {
            let rotary = (rotated > 0).then(|| RotaryCase::new(rotated, pairs(i + j)));
            let head_norm = Some(([1e-6, 1e-5][j % 2], types(i + j)));
            let case = KvAppendCase { head_norm, rotary, has_queries: j != 2, ..KvAppendCase::new(of.clone()) };
            cases.push(KvAppendCase { hadamard: [j == 1, j == 3], ..case });
        }
    }
    for (i, kv) in KvFormat::ALL.into_iter().enumerate() {
        for (j, lengths) in [&[(1, 300)][..], &[(40, 64); 3]].into_iter().enumerate() {
            let of = AttentionCase {
                kv,
                places: AttentionStorage::Paged(16),
                ..AttentionCase::new(lengths, (8, 2), 128, types(i))
            };
            let head_norm = Some((1e-6, types(i + j)));
            cases.push(KvAppendCase {
                head_norm,
                rotary: Some(RotaryCase::new(128, pairs(i + j))),
                ..KvAppendCase::new(of)
            });
        }
    }
    for (i, (gap, offset)) in [(3, 1), (8, 0), (0, 1)].into_iter().enumerate() {
        let of = AttentionCase { gap, offset, ..AttentionCase::new(&[(2, 9), (2, 2)], (4, 2), 64, types(i)) };
        let case = KvAppendCase { head_norm: Some((1e-6, types(i + 1))), ..KvAppendCase::new(of) };
        cases.extend([case.clone(), KvAppendCase { in_place: true, hadamard: [i == 1, false], ..case }]);
    }
    numbered(cases)
}

fn in_place() -> Vec<KvAppendCase> {
    let mut cases = Vec::new();
    let places = |i: usize| [AttentionStorage::Each, AttentionStorage::Paged(3), AttentionStorage::Lengths(2)][i % 3];
    for (i, dim) in [64, 80, 96, 128, 256, 8].into_iter().enumerate() {
        for (j, (is_rotated, rotary_dim)) in
            [(true, 0), (false, dim), (true, dim), (false, dim / 2), (true, dim / 2), (true, 6)].into_iter().enumerate()
        {
            let places = if j == 3 { AttentionStorage::Lengths(2) } else { places(i + j) };
            let (gap, offset) = [(0, 0), (0, 0), (3, 1), (8, 0)][(i + 3 * j) % 4];
            let lengths: &[(usize, usize)] = match j {
                3 => &[(5, 2), (1, 7)],
                _ if places == AttentionStorage::Each => &[(2, 9), (2, 9)],
                _ => &[(2, 9), (2, 2)],
            };
            let of =
                AttentionCase { places, gap, offset, ..AttentionCase::new(lengths, (5, 1), dim, types(i + 2 * j)) };
            let rotary = RotaryCase { inverse: j != 4, ..RotaryCase::new(rotary_dim, pairs(i + j / 2)) };
            let rotary = (rotary_dim > 0).then_some(rotary);
            let hadamard = [is_rotated, false];
            cases.push(KvAppendCase { in_place: true, hadamard, rotary, ..KvAppendCase::new(of) });
        }
    }
    let scaling = RotaryScaling::Yarn { factor: 16.0, fast: 32.0, slow: 1.0, original: 4096, truncate: true };
    for (i, (tables, from)) in [(None, Some(131_000)), (Some(9), None), (Some(7), Some(3))].into_iter().enumerate() {
        let of = AttentionCase::new(&[(4, 9); 3], (32, 8), 128, types(i));
        let rotary = RotaryCase { scaling, tables, inverse: true, ..RotaryCase::new(64, pairs(i)) };
        let positions_from = from;
        let case = KvAppendCase { rotary: Some(rotary), positions_from, in_place: true, ..KvAppendCase::new(of) };
        cases.push(KvAppendCase { hadamard: [i == 0, false], ..case });
    }
    numbered(cases)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_pair_of_types_occurs_turned_in_both_ways() {
        let all: Vec<KvAppendCase> = GROUPS.iter().flat_map(|(_, cases)| cases()).collect();
        for (dtype, kv) in DType::ALL.into_iter().flat_map(|dtype| KvFormat::ALL.map(|kv| (dtype, kv))) {
            assert!(all.iter().any(|case| case.of.dtype == dtype && case.of.kv == kv), "{dtype} {kv}");
        }
        for kv in KvFormat::ALL {
            for hadamard in [[true, false], [false, true], [true, true]] {
                assert!(all.iter().any(|case| case.of.kv == kv && case.hadamard == hadamard), "{kv} {hadamard:?}");
            }
        }
        for pairs in RotaryPairs::ALL {
            assert!(all.iter().any(|case| case.rotary.is_some_and(|rotary| rotary.pairs == pairs)), "{pairs}");
        }
    }
}
