//! Integer-group layers for the tests of model files, packed bit
//! by bit as GPTQ and AWQ do.

use crate::checkpoint::{Checkpoint, Numbers};
use half::f16;
use safetensors::tensor::Dtype;

/// Unpacked layer.
pub struct Layer {
    pub n: usize,
    pub k: usize,
    pub bits: usize,
    pub groups: usize,
    pub group_of: Vec<u32>,
    /// `[n][k]`
    pub codes: Vec<u32>,
    /// `[groups][n]`
    pub zeros: Vec<u32>,
    pub scales: Vec<f16>,
}

impl Layer {
    pub fn random(n: usize, bits: usize, group_of: Vec<u32>, groups: usize) -> Self {
        let mut numbers = Numbers::new((n * 1000 + bits * 10 + groups) as u64);
        let (k, limit) = (group_of.len(), 1 << bits);
        let codes = (0..n * k).map(|_| numbers.below(limit)).collect();
        let zeros = (0..groups * n).map(|_| numbers.below(limit)).collect();
        let scales = (0..groups * n).map(|_| f16::from_f32(0.001 + numbers.below(1000) as f32 * 1e-4)).collect();
        Self { n, k, bits, groups, group_of, codes, zeros, scales }
    }

    pub fn in_groups_of(n: usize, k: usize, bits: usize, size: usize) -> Self {
        let group_of = (0..k).map(|column| (column / size) as u32).collect();
        Self::random(n, bits, group_of, k.div_ceil(size))
    }

    pub fn expected(&self) -> Vec<f32> {
        self.expected_modulo(u32::MAX)
    }

    /// Expected values when zero points are stored modulo `limit`.
    pub fn expected_modulo(&self, limit: u32) -> Vec<f32> {
        let value = |row: usize, column: usize| {
            let at = self.group_of[column] as usize * self.n + row;
            let step = self.codes[row * self.k + column] as i32 - (self.zeros[at] % limit) as i32;
            self.scales[at].to_f32() * step as f32
        };
        (0..self.n).flat_map(|row| (0..self.k).map(move |column| value(row, column))).collect()
    }

    pub fn scale_bytes(&self) -> Vec<u8> {
        self.scales.iter().flat_map(|s| s.to_le_bytes()).collect()
    }

    /// `qweight` and `qzeros`, with zero points stored minus `subtract`.
    pub fn gptq(&self, subtract: u32) -> Checkpoint {
        let mask = (1u32 << self.bits) - 1;
        let words = (self.k * self.bits).div_ceil(32);
        let mut qweight = vec![0u32; words * self.n];
        for row in 0..self.n {
            let column = stream((0..self.k).map(|k| self.codes[row * self.k + k]), self.bits);
            for (i, &word) in column.iter().enumerate() {
                qweight[i * self.n + row] = word;
            }
        }
        let zero_words = (self.n * self.bits).div_ceil(32);
        let qzeros: Vec<u32> = self
            .zeros
            .chunks(self.n)
            .flat_map(|zeros| stream(zeros.iter().map(|&z| z.wrapping_sub(subtract) & mask), self.bits))
            .collect();
        Checkpoint::default()
            .add("layer.qweight", Dtype::I32, &[words, self.n], le_bytes(&qweight))
            .add("layer.qzeros", Dtype::I32, &[self.groups, zero_words], le_bytes(&qzeros))
            .add("layer.scales", Dtype::F16, &[self.groups, self.n], self.scale_bytes())
            .add_f32("layer.bias", &[self.n], &vec![0.5; self.n])
    }

    pub fn awq(&self) -> Checkpoint {
        let pack = |line: &dyn Fn(usize) -> u32| -> Vec<u32> {
            let word = |c: usize| {
                [0, 2, 4, 6, 1, 3, 5, 7].iter().enumerate().fold(0, |word, (i, j)| word | line(8 * c + j) << (4 * i))
            };
            (0..self.n / 8).map(word).collect()
        };
        let qweight: Vec<u32> = (0..self.k).flat_map(|k| pack(&|row| self.codes[row * self.k + k])).collect();
        let qzeros: Vec<u32> = (0..self.groups).flat_map(|g| pack(&|row| self.zeros[g * self.n + row])).collect();
        Checkpoint::default()
            .add("layer.qweight", Dtype::I32, &[self.k, self.n / 8], le_bytes(&qweight))
            .add("layer.qzeros", Dtype::I32, &[self.groups, self.n / 8], le_bytes(&qzeros))
            .add("layer.scales", Dtype::F16, &[self.groups, self.n], self.scale_bytes())
    }
}

pub fn le_bytes(words: &[u32]) -> Vec<u8> {
    bytemuck::cast_slice(words).to_vec()
}

/// Packs a stream of fields into words, bit by bit.
fn stream(fields: impl Iterator<Item = u32>, bits: usize) -> Vec<u32> {
    let flat: Vec<u32> = fields.flat_map(|field| (0..bits).map(move |bit| field >> bit & 1)).collect();
    flat.chunks(32).map(|chunk| chunk.iter().enumerate().fold(0, |word, (i, bit)| word | bit << i)).collect()
}
