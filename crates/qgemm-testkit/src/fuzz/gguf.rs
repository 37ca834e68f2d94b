//! Fuzz target: GGUF files with changed, cut and moved bytes. The
//! oracle is a reader written from the format's definition.

use half::f16;
use qgemm_formats::SharedBytes;
use qgemm_formats::model::gguf::GgufHeader;
use qgemm_formats::model::{Model, ModelOptions};
use rand::Rng;
use rand::rngs::StdRng;

use super::{FuzzCase, FuzzTarget, FuzzVerdict, mutate};

const FORMATS: [&str; 7] = ["f32", "f16", "q4_0", "q4_1", "q8_0", "iq4_nl", "tq2_0"];

/// Mutated GGUF files.
#[derive(Debug)]
pub struct GgufTarget {
    file: Vec<u8>,
    header: usize,
}

impl GgufTarget {
    /// # Panics
    /// When the file cannot be made, or is not read.
    pub fn new() -> Self {
        let mut header = GgufHeader::new();
        header.metadata("general.architecture", "llama".into()).expect("a new key");
        header.metadata("general.alignment", 32u32.into()).expect("a new key");
        header.metadata("llama.block_count", 3u32.into()).expect("a new key");
        let sizes: Vec<usize> = FORMATS
            .iter()
            .map(|name| {
                header.tensor(&format!("{name}.weight"), &[3, 256], name.parse().expect("a format")).expect("it fits")
            })
            .collect();
        let mut writer = header.write(Vec::new()).expect("in memory");
        for (format, size) in FORMATS.iter().zip(&sizes) {
            // As f16 and f32, these bytes are small numbers.
            let bytes: Vec<u8> = (0..*size).map(|i| (i * 7 + format.len()) as u8 & 0x3f).collect();
            writer.tensor(&bytes).expect("the right size");
        }
        let file = writer.finish().expect("complete");
        let target = Self { header: file.len() - sizes.iter().sum::<usize>(), file };
        assert_eq!(target.judge(&target.file), FuzzVerdict::Accepted);
        assert_eq!(tensors(&target.file).map(|tensors| tensors.len()), Some(FORMATS.len()));
        target
    }

    fn judge(&self, file: &[u8]) -> FuzzVerdict {
        let Ok(model) = Model::from_bytes(SharedBytes::from(file.to_vec()), None, ModelOptions::default()) else {
            return FuzzVerdict::Refused;
        };
        let Some(meant) = tensors(file) else { return FuzzVerdict::Wrong("read, but no GGUF file".into()) };
        for info in model.tensors() {
            let Some(tensor) = meant.iter().find(|tensor| tensor.name == info.name) else {
                return FuzzVerdict::Wrong(format!("there is no tensor {}", info.name));
            };
            let _ = model.dense(&info.name);
            let Ok(weight) = model.weight(&info.name) else { continue };
            let values: Vec<f32> = (0..weight.n()).flat_map(|row| weight.dequantize_row(row)).collect();
            match tensor.values(file) {
                Some(Ok(meant)) if !same(&meant, &values) => {
                    return FuzzVerdict::Wrong(format!(
                        "{} is {:?}, meant {:?}",
                        info.name,
                        values.get(..3),
                        meant.get(..3)
                    ));
                }
                Some(Err(())) => return FuzzVerdict::Wrong(format!("{} leaves the file", info.name)),
                _ => {}
            }
        }
        FuzzVerdict::Accepted
    }
}

impl Default for GgufTarget {
    fn default() -> Self {
        Self::new()
    }
}

impl FuzzTarget for GgufTarget {
    fn name(&self) -> &'static str {
        "GGUF"
    }

    fn draw<'a>(&'a self, rng: &mut StdRng) -> FuzzCase<'a> {
        let mut file = self.file.clone();
        let said: Vec<String> =
            (0..rng.random_range(1..4)).map(|_| mutate::bytes(rng, &mut file, self.header)).collect();
        FuzzCase { mutations: said.join("; "), read: Box::new(move || self.judge(&file)) }
    }
}

fn same(a: &[f32], b: &[f32]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a == b || a.is_nan() && b.is_nan())
}

struct Tensor {
    name: String,
    elements: u64,
    kind: u32,
    /// Offset in the file.
    offset: u64,
}

/// The tensors that a file describes.
fn tensors(file: &[u8]) -> Option<Vec<Tensor>> {
    let mut at = Cursor { file, at: 0 };
    (at.take(4)? == b"GGUF" && matches!(at.u32()?, 2 | 3)).then_some(())?;
    let (count, pairs) = (at.u64()?, at.u64()?);
    let mut alignment = 32;
    for _ in 0..pairs {
        let key = at.text()?;
        let kind = at.u32()?;
        let value = at.value(kind, 0)?;
        if key == "general.alignment" {
            alignment = value?;
        }
    }
    let mut tensors = Vec::new();
    for _ in 0..count {
        let name = at.text()?;
        let dimensions = at.u32()?;
        let mut elements = 1u64;
        for _ in 0..dimensions {
            elements = elements.checked_mul(at.u64()?)?;
        }
        tensors.push(Tensor { name, elements, kind: at.u32()?, offset: at.u64()? });
    }
    let data = (at.at as u64).checked_next_multiple_of(alignment)?;
    for tensor in &mut tensors {
        tensor.offset = tensor.offset.checked_add(data)?;
    }
    Some(tensors)
}

impl Tensor {
    /// The values, or an error if they are out of the file; `None`
    /// for types that the oracle does not check.
    fn values(&self, file: &[u8]) -> Option<Result<Vec<f32>, ()>> {
        let (length, bytes): (usize, usize) = match self.kind {
            0 => (1, 4),
            1 => (1, 2),
            2 | 20 => (32, 18),
            3 => (32, 20),
            8 => (32, 34),
            34 => (256, 54),
            35 => (256, 66),
            41 => (128, 18),
            _ => return None,
        };
        let size = usize::try_from(self.elements).ok().and_then(|n| (n / length).checked_mul(bytes));
        let from = usize::try_from(self.offset).ok();
        let data = from.zip(size).and_then(|(from, size)| file.get(from..from.checked_add(size)?));
        let values = |data: &[u8]| data.chunks_exact(bytes).flat_map(|block| self.block(block)).collect();
        Some(data.map(values).ok_or(()))
    }

    fn block(&self, block: &[u8]) -> Vec<f32> {
        const IQ4_NL: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];
        let half = |at: usize| f16::from_le_bytes([block[at], block[at + 1]]).to_f32();
        // Low nibbles of all bytes first.
        let nibbles = |from: usize| -> Vec<u8> {
            let codes = &block[from..from + 16];
            codes.iter().map(|b| b & 15).chain(codes.iter().map(|b| b >> 4)).collect()
        };
        match self.kind {
            0 => vec![f32::from_le_bytes([block[0], block[1], block[2], block[3]])],
            1 => vec![half(0)],
            2 => nibbles(2).into_iter().map(|code| half(0) * (f32::from(code) - 8.0)).collect(),
            3 => nibbles(4).into_iter().map(|code| half(0) * f32::from(code) + half(2)).collect(),
            // Digits of fractions in base 3, the first of each byte first.
            34 => [&block[..32], &block[32..48], &block[48..52]]
                .iter()
                .flat_map(|run| (0..if run.len() == 4 { 4 } else { 5 }).map(move |digit| (*run, digit)))
                .flat_map(|(run, digit)| run.iter().map(move |&byte| u32::from(byte) * 3u32.pow(digit + 1) / 256 % 3))
                .map(|code| half(52) * (code as f32 - 1.0))
                .collect(),
            35 => (0..256)
                .map(|i| block[i / 128 * 32 + i % 32] >> (i / 32 % 4 * 2) & 3)
                .map(|code| half(64) * (f32::from(code) - 1.0))
                .collect(),
            41 => (0..128).map(|i| if block[2 + i / 8] >> (i % 8) & 1 == 1 { half(0) } else { -half(0) }).collect(),
            8 => block[2..].iter().map(|code| half(0) * f32::from(*code as i8)).collect(),
            _ => nibbles(2).into_iter().map(|code| half(0) * f32::from(IQ4_NL[usize::from(code)])).collect(),
        }
    }
}

struct Cursor<'a> {
    file: &'a [u8],
    at: usize,
}

impl<'a> Cursor<'a> {
    fn take(&mut self, count: u64) -> Option<&'a [u8]> {
        let end = self.at.checked_add(usize::try_from(count).ok()?)?;
        let taken = self.file.get(self.at..end)?;
        self.at = end;
        Some(taken)
    }

    fn u32(&mut self) -> Option<u32> {
        Some(u32::from_le_bytes(self.take(4)?.try_into().ok()?))
    }

    fn u64(&mut self) -> Option<u64> {
        Some(u64::from_le_bytes(self.take(8)?.try_into().ok()?))
    }

    fn text(&mut self) -> Option<String> {
        let length = self.u64()?;
        Some(String::from_utf8_lossy(self.take(length)?).into_owned())
    }

    /// Skips a value. Returns the value inside, if it is a
    /// non-negative integer.
    fn value(&mut self, kind: u32, depth: u32) -> Option<Option<u64>> {
        let size = match kind {
            0 | 1 | 7 => 1,
            2 | 3 => 2,
            4..=6 => 4,
            10..=12 => 8,
            8 => {
                self.text()?;
                return Some(None);
            }
            9 if depth < 8 => {
                let (kind, count) = (self.u32()?, self.u64()?);
                for _ in 0..count {
                    self.value(kind, depth + 1)?;
                }
                return Some(None);
            }
            _ => return None,
        };
        let bytes = self.take(size)?;
        let number = bytes.iter().rev().fold(0u64, |number, byte| number << 8 | u64::from(*byte));
        Some(matches!(kind, 0..=5 | 10 | 11).then_some(number))
    }
}
