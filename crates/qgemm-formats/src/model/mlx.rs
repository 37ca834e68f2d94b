//! MLX layers (mlx-lm).
//!
//! ```text
//! weight [N, K · bits / 32] u32      codes of a row along K, low bits first; all may straddle words
//! scales [N, K / group]              affine: value = scale · code + bias
//! biases [N, K / group]
//! ```
//!
//! `bits`, `group_size` and `mode` are settings of the
//! checkpoint or of a module. The modes `mxfp4`, `nvfp4` and
//! `mxfp8` have no biases, and scales in U8: E8M0 for the MX
//! formats, E4M3 for NVFP4. Stacks of experts have another
//! dimension in front.
//!
//! Affine values are those of `mlx.core.dequantize` in f32.
//! MLX itself computes in the type of the scales and rounds
//! there.

use std::sync::Arc;

use half::f16;
use safetensors::tensor::Dtype;

use super::eight_bit::{EightBitLayer, EightBitSettings};
use super::exact::{ExactScales, exact_f16, row_scale, scaled_rows};
use super::four_bit::{Mxfp4Layer, Nvfp4Layer};
use super::layer::{Found, Layer, erase};
use super::raw::{RawTensor, RawTensors, bad, unsupported};
use super::settings::{LayerSettings, Settings};
use super::stack::layer_or_stack;
use crate::desc::{Format, FormatDesc};
use crate::error::FormatError;
use crate::formats::{affine_group, linear, q4_1::Q4_1, q5_1::Q5_1};
use crate::weight::{HostWeight, SharedBytes};

/// Groups of the affine mode.
const GROUPS: [usize; 3] = [32, 64, 128];
/// Bits of the affine mode.
const BITS: [usize; 6] = [2, 3, 4, 5, 6, 8];

/// Takes the layer whose codes are tensor `name`.
pub(super) fn take_mlx(tensors: &mut RawTensors, name: &str, settings: &Settings) -> Option<Found> {
    let base = name.strip_suffix(".weight")?;
    if tensors.get(name)?.dtype != Dtype::U32 {
        return None;
    }
    let scales = tensors.remove(&format!("{base}.scales"))?;
    let codes = tensors.remove(name)?;
    let biases = tensors.remove(&format!("{base}.biases"));
    let layer = Packing::of(name, &settings.layer(base)).and_then(|packing| match (packing.mode, biases) {
        (Mode::Affine, Some(biases)) => layer_or_stack(codes, [scales, biases], move |codes, [scales, biases]| {
            AffineLayer::new(codes, scales, biases, &packing)
        }),
        (Mode::Affine, None) => Err(FormatError::missing(name, "MLX affine", [format!("{base}.biases")])),
        (mode, None) => float_layer(mode, codes, scales, &EightBitSettings::of(&settings.layer(base))),
        (_, Some(biases)) => Err(bad(&biases.name, format!("{}: expected no biases", packing.who_says_mode))),
    });
    Some((name.to_owned(), layer))
}

/// Kind of codes and scales.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    Affine,
    Mxfp4,
    Nvfp4,
    Mxfp8,
}

impl Mode {
    /// The only bits and group of a mode of floating-point
    /// codes.
    fn float(self) -> Option<[usize; 2]> {
        match self {
            Mode::Affine => None,
            Mode::Mxfp4 => Some([4, 32]),
            Mode::Nvfp4 => Some([4, 16]),
            Mode::Mxfp8 => Some([8, 32]),
        }
    }
}

/// Stated packing of a layer.
#[derive(Clone, Debug)]
struct Packing {
    mode: Mode,
    bits: usize,
    group: usize,
    /// Sources of the settings, for errors.
    who_says_bits: String,
    who_says_group: String,
    who_says_mode: String,
}

impl Packing {
    /// Reads the settings of a layer.
    ///
    /// # Errors
    /// [`FormatError::BadFile`] when bits or group are not
    /// stated, or the layer is stated as unquantized.
    /// [`FormatError::UnsupportedFile`] for other modes, bits
    /// and groups.
    fn of(name: &str, settings: &LayerSettings<'_>) -> Result<Self, FormatError> {
        let who_says_mode = settings.who_says(&["mode"]);
        let mode = match settings.word(&["mode"])?.as_deref() {
            None | Some("affine") => Mode::Affine,
            Some("mxfp4") => Mode::Mxfp4,
            Some("nvfp4") => Mode::Nvfp4,
            Some("mxfp8") => Mode::Mxfp8,
            Some(_) => {
                let what = format!("MLX codes ({who_says_mode}): expected affine, mxfp4, nvfp4 or mxfp8");
                return Err(unsupported(name, what));
            }
        };
        let who_says_bits = settings.who_says(LayerSettings::BITS);
        let who_says_group = settings.who_says(LayerSettings::GROUP_SIZE);
        let stated = (settings.bits()?, settings.group_size()?);
        if let Some(16..) = stated.0 {
            let what = format!("{who_says_bits}, so the layer is not quantized, but it has these codes");
            return Err(bad(name, what));
        }
        let (bits, group) = match (stated, mode.float()) {
            ((Some(bits), Some(group)), _) => (bits as usize, usize::try_from(group).unwrap_or(0)),
            ((bits, group), Some(only)) => {
                (bits.map_or(only[0], |bits| bits as usize), group.map_or(only[1], |group| group as usize))
            }
            _ => return Err(bad(name, "MLX codes: no settings state both `bits` and `group_size`")),
        };
        let is_known =
            mode.float().map_or(BITS.contains(&bits) && GROUPS.contains(&group), |only| only == [bits, group]);
        if !is_known {
            let what = format!(
                "MLX {mode:?} of {bits} bits in groups of {group} ({who_says_bits}, {who_says_group}): {}",
                mode.float().map_or_else(
                    || format!("expected bits out of {BITS:?} and groups out of {GROUPS:?}"),
                    |[bits, group]| format!("expected {bits} bits in groups of {group}"),
                )
            );
            return Err(unsupported(name, what));
        }
        Ok(Self { mode, bits, group, who_says_bits, who_says_group, who_says_mode })
    }
}

/// Layer of floating-point codes, or a stack of them.
fn float_layer(
    mode: Mode,
    codes: RawTensor,
    scales: RawTensor,
    settings: &EightBitSettings,
) -> Result<Arc<dyn Layer>, FormatError> {
    scales.expect_type(Dtype::U8)?;
    let codes_of = |dtype| of_bytes(codes.clone(), dtype);
    match mode {
        Mode::Nvfp4 => {
            let scales = RawTensor { dtype: Dtype::F8_E4M3, ..scales };
            layer_or_stack(codes_of(Dtype::U8)?, [scales], |codes, [scales]| {
                let one = SharedBytes::from(1f32.to_le_bytes().to_vec());
                let scale = RawTensor { name: codes.name.clone(), dtype: Dtype::F32, shape: vec![1], bytes: one };
                Nvfp4Layer::new(codes, scales, scale, false)
            })
        }
        Mode::Mxfp8 => {
            let settings = settings.clone();
            layer_or_stack(codes_of(Dtype::F8_E4M3)?, [scales], move |codes, [scales]| {
                EightBitLayer::new(codes, Some(scales), None, &settings)
            })
        }
        _ => erase(Mxfp4Layer::of_rows(codes_of(Dtype::U8)?, scales)),
    }
}

/// Tensor of words as one of bytes.
fn of_bytes(mut words: RawTensor, dtype: Dtype) -> Result<RawTensor, FormatError> {
    let bytes = words.shape.last().and_then(|words| words.checked_mul(4));
    match (words.shape.last_mut(), bytes) {
        (Some(last), Some(bytes)) => *last = bytes,
        _ => return Err(bad(&words.name, format!("expected shape [.., N, words], got {:?}", words.shape))),
    }
    Ok(RawTensor { dtype, ..words })
}

/// Blocks that hold a layer's codes unchanged. Q4_1, Q5_1
/// and 8-bit groups take groups of 32, the latter two thirds
/// of them as wider codes.
#[derive(Clone, Copy, Debug)]
enum Store {
    Packed(&'static FormatDesc),
    Bytes,
    Q4_1,
    Q5_1,
}

impl Store {
    fn of(bits: usize, group: usize) -> Self {
        match (group, bits) {
            (32, 0..=4) => Store::Q4_1,
            (32, 5) => Store::Q5_1,
            (32, _) => Store::Bytes,
            (_, 2) => Store::Packed(&affine_group::AFFINE2_G64),
            (_, 3) => Store::Packed(&affine_group::AFFINE3_G64),
            (_, 4) => Store::Packed(&affine_group::AFFINE4_G64),
            (_, 5) => Store::Packed(&affine_group::AFFINE5_G64),
            (_, 6) => Store::Packed(&affine_group::AFFINE6_G64),
            _ => Store::Packed(&affine_group::AFFINE8_G64),
        }
    }

    fn format(self) -> &'static FormatDesc {
        match self {
            Store::Packed(format) => format,
            Store::Bytes => &affine_group::AFFINE8_G32,
            Store::Q4_1 => &Q4_1,
            Store::Q5_1 => &Q5_1,
        }
    }

    /// Writes a block of the codes in `packed`.
    fn write(self, bits: usize, packed: &[u8], scales: [f16; 2], block: &mut [u8]) {
        let mut codes = [0u32; 32];
        if !matches!(self, Store::Packed(_)) {
            linear::unpack(bits, packed, &mut codes);
        }
        match self {
            Store::Packed(_) => affine_group::write_block(packed, scales, block),
            Store::Bytes => affine_group::write_block(&codes.map(|code| code as u8), scales, block),
            Store::Q4_1 => crate::formats::q4_1::write_block(&codes, scales, block),
            Store::Q5_1 => crate::formats::q5_1::write_block(&codes, scales, block),
        }
    }
}

/// A layer of affine groups.
#[derive(Debug)]
struct AffineLayer {
    n: usize,
    k: usize,
    bits: usize,
    group: usize,
    store: Store,
    codes: SharedBytes,
    scales: RawTensor,
    biases: RawTensor,
}

impl AffineLayer {
    /// Checks the shapes.
    ///
    /// # Errors
    /// [`FormatError::BadFile`] when the tensors do not match
    /// each other or the settings.
    fn new(codes: RawTensor, scales: RawTensor, biases: RawTensor, packing: &Packing) -> Result<Self, FormatError> {
        let Packing { bits, group, .. } = *packing;
        let name = &codes.name;
        let (n, words) = codes.matrix()?;
        scales.scale_type()?;
        biases.scale_type()?;
        biases.expect_shape(&scales.shape)?;
        let (rows, groups) = scales.matrix()?;
        if rows != n {
            return Err(bad(&scales.name, format!("expected scales of {n} rows, got shape {:?}", scales.shape)));
        }
        let row_bits = words.checked_mul(32);
        let k = row_bits.filter(|row| row.is_multiple_of(bits)).map(|row| row / bits);
        let expected = k.filter(|k| k.is_multiple_of(group)).map(|k| k / group);
        let (Some(k), true) = (k, expected == Some(groups)) else {
            let what = format!(
                "expected {words} words of {bits}-bit codes ({}) in groups of {group} ({}), but there are scales for \
                 {groups} groups",
                packing.who_says_bits, packing.who_says_group
            );
            return Err(bad(name, what));
        };
        Ok(Self { n, k, bits, group, store: Store::of(bits, group), codes: codes.bytes, scales, biases })
    }

    /// Scale and bias of every group of `row`, in f32.
    fn records(&self, row: usize) -> Result<Vec<[f32; 2]>, FormatError> {
        let types = [self.scales.scale_type()?, self.biases.scale_type()?];
        let groups = self.k / self.group;
        let read = |group| {
            let at = row * groups + group;
            [types[0].read(&self.scales.bytes, at), types[1].read(&self.biases.bytes, at)]
        };
        Ok((0..groups).map(read).collect())
    }

    /// Writes the blocks of a row, and returns its row scale.
    fn write_row(&self, row: usize, out: &mut [u8]) -> Result<f32, FormatError> {
        let format = self.store.format();
        let records = self.records(row)?;
        let is_f16 = [&self.scales, &self.biases].iter().all(|tensor| tensor.dtype == Dtype::F16);
        let factor = if is_f16 { 1.0 } else { row_scale(&records) };
        let code_bytes = format.block_len * self.bits / 8;
        let row_bytes = self.k * self.bits / 8;
        let blocks = out.chunks_exact_mut(format.block_bytes).zip(self.codes[row * row_bytes..].chunks(code_bytes));
        for (index, (block, packed)) in blocks.enumerate() {
            let group = index * format.block_len / self.group;
            let [scale, bias] = records[group];
            // The scale of zeros is 1e-7 in MLX, and has no effect.
            let has_scale = packed.iter().any(|&byte| byte != 0);
            let scale = if has_scale || !scale.is_finite() { scale } else { 0f32.copysign(scale) };
            let place = |tensor| ExactScales { tensor, row, group };
            let scales =
                [exact_f16(scale, factor, place(&self.scales))?, exact_f16(bias, factor, place(&self.biases))?];
            self.store.write(self.bits, packed, scales, block);
        }
        Ok(factor)
    }
}

impl Layer for AffineLayer {
    fn format(&self) -> Format {
        Format::new(self.store.format())
    }

    fn shape(&self) -> Vec<usize> {
        vec![self.n, self.k]
    }

    fn bytes(&self) -> usize {
        self.codes.len() + self.scales.bytes.len() + self.biases.bytes.len()
    }

    fn weight(&self, _index: usize) -> Result<HostWeight, FormatError> {
        let write = |row, out: &mut [u8]| self.write_row(row, out);
        let (blocks, row_scale) = scaled_rows(self.store.format(), [self.n, self.k], write)?;
        let weight = HostWeight::new(self.format(), self.n, self.k, blocks)?;
        if row_scale.iter().all(|&scale| scale == 1.0) { Ok(weight) } else { weight.with_row_scale(row_scale) }
    }
}
