//! Fuzz target: packed weights, with damage that the checksum
//! detects, and with corrected checksums.

use qgemm_api::{Context, Error, XPrecision};
use qgemm_formats::packed_file::PackedWeight;
use qgemm_formats::prepack::FragmentLayout;
use qgemm_formats::{Format, HostWeight, SharedBytes, quantize_matrix};
use rand::Rng;
use rand::rngs::StdRng;

use super::{FuzzCase, FuzzTarget, FuzzVerdict, mutate};

/// Bytes before the name of the format.
const FIXED: usize = 56;
const CHECKSUM: usize = 8;

/// Mutated files of packed weights.
#[derive(Debug)]
pub struct PackedTarget {
    ctx: Context,
    files: Vec<Vec<u8>>,
}

impl PackedTarget {
    /// # Errors
    /// When a weight cannot be packed.
    pub fn new() -> Result<Self, Error> {
        let mut files = Vec::new();
        for (name, class) in [
            ("q4_0", FragmentLayout::Simd16),
            ("q8_0", FragmentLayout::Canonical),
            ("q4_k", FragmentLayout::Simd16),
            ("int8_channel", FragmentLayout::Simd16),
            ("q4_0", FragmentLayout::MmaM16),
        ] {
            let weight = weight(name.parse()?)?;
            let packed = match name {
                "q8_0" => PackedWeight::pack_gated(&weight, &weight, class)?,
                _ => PackedWeight::pack(&weight, class)?,
            };
            let mut file = Vec::new();
            packed.write(&mut file)?;
            files.push(file);
        }
        files.push(act_order()?);
        let target = Self { ctx: Context::open("cpu")?, files };
        for file in &target.files {
            assert_eq!(target.judge(file, file), FuzzVerdict::Accepted);
            assert_eq!(checksum(&file[..file.len() - CHECKSUM]), file[file.len() - CHECKSUM..]);
        }
        Ok(target)
    }

    fn judge(&self, file: &[u8], before: &[u8]) -> FuzzVerdict {
        let Ok(weight) = PackedWeight::read(&SharedBytes::from(file.to_vec())) else { return FuzzVerdict::Refused };
        let is_intact = file.last_chunk::<CHECKSUM>() == before.last_chunk::<CHECKSUM>();
        if is_intact && file != before {
            return FuzzVerdict::Wrong("damage that the checksum does not find".into());
        }
        let number = |at: usize| file.get(at..at + 8).map(|b| b.iter().rev().fold(0u64, |n, b| n << 8 | u64::from(*b)));
        let stated = [16, 24, 32, 48].map(number);
        let read = [weight.n, weight.k, weight.stored_k, weight.features].map(|n| Some(n as u64));
        let name = file.get(FIXED..FIXED + weight.format.name.len());
        let data = FIXED + weight.format.name.len();
        if stated != read
            || !name.is_some_and(|name| name.eq_ignore_ascii_case(weight.format.name.as_bytes()))
            || file.get(data..data + weight.data.len()) != Some(&weight.data)
        {
            return FuzzVerdict::Wrong(format!("read as {read:?} of {}, stated {stated:?}", weight.format));
        }
        // Kernels rely on these checks.
        if let Ok(loaded) = self.ctx.load_packed(&weight)
            && weight.k <= 4096
        {
            let _ = self.ctx.linear(&loaded, &vec![0.5; weight.k], 1, XPrecision::Exact);
        }
        FuzzVerdict::Accepted
    }
}

fn weight(format: Format) -> Result<HostWeight, Error> {
    let (n, k) = (40, 512);
    let values: Vec<f32> = (0..n * k).map(|i| (i * 31 % 97) as f32 / 48.0 - 1.0).collect();
    Ok(quantize_matrix(&values, n, k, format)?.weight)
}

fn act_order() -> Result<Vec<u8>, Error> {
    let weight = weight("q4_0".parse()?)?;
    let order = (0..weight.k() as u32).map(|column| column ^ 1).collect();
    let weight =
        HostWeight::with_k_order(weight.format(), weight.n(), weight.k(), weight.blocks().to_vec().into(), order)?;
    let mut file = Vec::new();
    PackedWeight::pack(&weight, FragmentLayout::Simd16)?.write(&mut file)?;
    Ok(file)
}

/// Checksum of a file below one mebibyte. Its sections are hashed
/// separately.
fn checksum(file: &[u8]) -> [u8; CHECKSUM] {
    let step = |sum: u64, word: u64| (sum ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29);
    let section = |sum: u64, bytes: &[u8]| {
        let (words, rest) = bytes.as_chunks::<8>();
        let part = words.iter().fold(0, |sum, word| step(sum, u64::from_le_bytes(*word)));
        let part = rest.iter().fold(part, |sum, byte| step(sum, u64::from(*byte)));
        let sum = if bytes.is_empty() { sum } else { step(sum, part) };
        step(sum, bytes.len() as u64)
    };
    sections(file).into_iter().fold(0, section).to_le_bytes()
}

/// Header, data, row scales and column order, as the header
/// describes them. If the header is nonsense, the rest of the
/// file.
fn sections(file: &[u8]) -> Vec<&[u8]> {
    let length = |at: usize, size: usize| {
        file.get(at..at + size).map_or(0, |b| b.iter().rev().fold(0, |n, b| n << 8 | usize::from(*b)))
    };
    let (flags, name, n, stored_k) = (length(13, 1), length(14, 2), length(16, 8), length(32, 8));
    let header = (FIXED + name).min(file.len());
    // Weights here have whole k-tiles.
    let scales = if flags & 1 == 0 { 0 } else { n.saturating_mul(4) };
    let order = if flags & 2 == 0 { 0 } else { stored_k.saturating_mul(4) };
    let data = file.len().saturating_sub(scales.saturating_add(order)).max(header);
    let scales_end = data.saturating_add(scales).min(file.len());
    let all = [
        &file[..header],
        &file[header..data.min(file.len())],
        &file[data.min(file.len())..scales_end],
        &file[scales_end..],
    ];
    all.into_iter()
        .enumerate()
        .filter(|(i, section)| *i < 2 || !section.is_empty())
        .map(|(_, section)| section)
        .collect()
}

impl FuzzTarget for PackedTarget {
    fn name(&self) -> &'static str {
        "packed weights"
    }

    fn draw<'a>(&'a self, rng: &mut StdRng) -> FuzzCase<'a> {
        let before = &self.files[rng.random_range(0..self.files.len())];
        let mut file = before.clone();
        let mut said: Vec<String> =
            (0..rng.random_range(1..3)).map(|_| mutate::bytes(rng, &mut file, FIXED + 8)).collect();
        if rng.random_ratio(2, 3) && file.len() > CHECKSUM {
            let end = file.len() - CHECKSUM;
            let sum = checksum(&file[..end]);
            file[end..].copy_from_slice(&sum);
            said.push("the checksum made to fit".into());
        }
        FuzzCase { mutations: said.join("; "), read: Box::new(move || self.judge(&file, before)) }
    }
}
