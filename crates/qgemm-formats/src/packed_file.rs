//! Packed-weight files: weights in a device's layout, which load without packing.
//!
//! ```text
//! magic "qgemm-pw" | version u32 | class u8 | flags u8 | length of the name u16 | rows u64 | k u64 | stored k u64
//! | fingerprint of the layout u64 | features u64 | name of the format
//! | blocks or k-tiles | row scales, f32 each | column order, u32 each | checksum u64 of everything before it
//! ```
//!
//! Numbers are little-endian. The fingerprint depends on the position of every bit.
//! A file of an older layout is therefore refused.

use std::io::Write;

use rayon::prelude::*;

use crate::desc::Format;
use crate::error::FormatError;
use crate::gated::pair_rows;
use crate::prepack::{FragmentLayout, PackedLayout};
use crate::sample::sample;
use crate::weight::{HostWeight, NO_COLUMN, SharedBytes};
use crate::x_format::XFormat;

const MAGIC: [u8; 8] = *b"qgemm-pw";
const VERSION: u32 = 1;
const HEADER_BYTES: usize = 56;
const CHECKSUM_BYTES: usize = 8;
const HAS_ROW_SCALE: u8 = 1;
const HAS_K_ORDER: u8 = 2;
const FITS_F16: u8 = 4;
const IS_GATED: u8 = 8;
const FITS_F16_SCALED: u8 = 16;
/// Bits with the index into [`STATED_X`].
const STATES_X: u8 = 32 | 64;
/// Stated X formats, by their number in a file.
const STATED_X: [Option<XFormat>; 4] =
    [None, Some(XFormat::E4M3Token), Some(XFormat::E4M3Block), Some(XFormat::E4M3Tensor)];
/// Maximum rows and columns: kernels use 32-bit counts.
const MAX_DIMENSION: usize = u32::MAX as usize;
/// Name of a file in error messages.
const WHAT: &str = "packed weight";

/// Weight in host memory, in a device's packed layout. Its parts are checked,
/// so kernels stay in bounds.
#[derive(Clone, Debug)]
pub struct PackedWeight(PackedParts);

/// Parts of a [`PackedWeight`].
#[derive(Clone, Debug)]
pub struct PackedParts {
    /// Weight format.
    pub format: Format,
    /// Packed layout.
    pub class: FragmentLayout,
    /// Packed rows. A gated pair has the interleaved rows of [`HostWeight::gated_pair`].
    pub n: usize,
    /// Output features: `n`, or the rows of each weight of a gated pair.
    pub features: usize,
    /// Whether it is a gated pair.
    pub gated: bool,
    /// Input features.
    pub k: usize,
    /// Columns of a stored row: `k` plus act-order padding.
    pub stored_k: usize,
    /// Result of [`HostWeight::fits_f16`].
    pub fits_f16: bool,
    /// Result of [`HostWeight::fits_f16_scaled`].
    pub fits_f16_scaled: bool,
    /// Result of [`HostWeight::stated_x`]. Files store only X formats
    /// that checkpoints can state.
    pub stated_x: Option<XFormat>,
    /// K-tiles of the layout. [`FragmentLayout::Canonical`] has rows of blocks instead.
    pub data: SharedBytes,
    /// Row factors, f32.
    pub row_scale: Option<SharedBytes>,
    /// Input feature of each stored column, u32. [`NO_COLUMN`] pads to
    /// whole k-tiles (or blocks).
    pub k_order: Option<SharedBytes>,
}

impl std::ops::Deref for PackedWeight {
    type Target = PackedParts;
    fn deref(&self) -> &PackedParts {
        &self.0
    }
}

impl PackedWeight {
    /// Checks the parts and makes a weight of them.
    ///
    /// # Errors
    /// A [`FormatError`] when a dimension is 0 or exceeds 32 bits, K does not
    /// fit the format or the stored columns, a part has the wrong length, or the
    /// column order is out of range.
    pub fn new(parts: PackedParts) -> Result<Self, FormatError> {
        let PackedParts { format, class, n, features, gated, k, stored_k, .. } = parts;
        check_shape(format, n, k, stored_k, parts.k_order.is_some())?;
        let lengths = Lengths::of(format, class, n, stored_k);
        let sections = [
            ("data", Some(&parts.data), lengths.data),
            ("row scales", parts.row_scale.as_ref(), lengths.row_scale),
            ("column order", parts.k_order.as_ref(), lengths.k_order),
        ];
        for (name, section, expected) in sections {
            if section.is_some_and(|s| s.len() as u128 != expected) {
                let (what, got) = (format!("{WHAT}: {name}"), section.map_or(0, |s| s.len()));
                return Err(FormatError::WrongLength { what, expected: saturated(expected), got });
            }
        }
        if let Some(order) = &parts.k_order {
            check_order(order, k, stored_k)?;
        }
        check_features(n, features, gated)?;
        Ok(Self(parts))
    }

    /// Packs `weight` on the host in layout `class`. Runs on all threads
    /// of the current rayon pool.
    ///
    /// # Errors
    /// [`FormatError::Overflow`] when a dimension exceeds 32 bits.
    pub fn pack(weight: &HostWeight, class: FragmentLayout) -> Result<Self, FormatError> {
        let format = weight.format();
        let layout = PackedLayout::new(format, class);
        let step = k_step(format, layout.as_ref());
        let row_scale = weight.row_scale().map(|s| s.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>());
        Self::new(PackedParts {
            format,
            class,
            n: weight.n(),
            features: weight.n(),
            gated: false,
            k: weight.k(),
            stored_k: weight.stored_k(),
            fits_f16: weight.fits_f16(),
            fits_f16_scaled: weight.fits_f16_scaled(),
            stated_x: weight.stated_x(),
            data: layout.map_or_else(|| weight.blocks().to_vec(), |layout| layout.pack(weight)).into(),
            row_scale: row_scale.map(SharedBytes::from),
            k_order: weight.k_order().map(|order| padded_k_order(order, step).into()),
        })
    }

    /// Packs a gated pair.
    ///
    /// # Errors
    /// As [`HostWeight::gated_pair`] and [`PackedWeight::pack`].
    pub fn pack_gated(gate: &HostWeight, up: &HostWeight, class: FragmentLayout) -> Result<Self, FormatError> {
        let pair = Self::pack(&HostWeight::gated_pair(gate, up)?, class)?;
        Self::new(PackedParts { features: gate.n(), gated: true, ..pair.0 })
    }

    /// Writes the file.
    ///
    /// # Errors
    /// [`FormatError::WriteFailed`].
    pub fn write(&self, mut to: impl Write) -> Result<(), FormatError> {
        let name = self.format.name.as_bytes();
        let flag = |present: bool, flag: u8| if present { flag } else { 0 };
        let flags = flag(self.row_scale.is_some(), HAS_ROW_SCALE)
            | flag(self.k_order.is_some(), HAS_K_ORDER)
            | flag(self.fits_f16, FITS_F16)
            | flag(self.fits_f16_scaled, FITS_F16_SCALED)
            | flag(self.gated, IS_GATED)
            | stated_flags(self.stated_x);
        let mut header = Vec::with_capacity(HEADER_BYTES + name.len());
        header.extend(MAGIC);
        header.extend(VERSION.to_le_bytes());
        header.extend([class_code(self.class), flags]);
        header.extend((name.len() as u16).to_le_bytes());
        for dimension in [self.n, self.k, self.stored_k] {
            header.extend((dimension as u64).to_le_bytes());
        }
        header.extend(fingerprint(self.format, self.class).to_le_bytes());
        header.extend((self.features as u64).to_le_bytes());
        header.extend(name);
        let sections = [Some(&self.data), self.row_scale.as_ref(), self.k_order.as_ref()];
        let parts = || std::iter::once(header.as_slice()).chain(sections.into_iter().flatten().map(|s| &**s));
        let sum = parts().fold(0, checksum);
        let mut write = |bytes: &[u8]| {
            let failed = |e: std::io::Error| FormatError::WriteFailed { file: WHAT.into(), why: e.to_string() };
            to.write_all(bytes).map_err(failed)
        };
        parts().try_for_each(&mut write)?;
        write(&sum.to_le_bytes())
    }

    /// Parses `file` without copying its bytes.
    ///
    /// # Errors
    /// [`FormatError::NotPacked`] for another kind of file. [`FormatError::PackedVersion`]
    /// and [`FormatError::PackedLayout`] for files of other versions of this library.
    /// [`FormatError::WrongLength`] for a truncated file, [`FormatError::Checksum`] for
    /// a damaged one. Others for a shape that the format cannot have.
    pub fn read(file: &SharedBytes) -> Result<Self, FormatError> {
        let mut cursor = Cursor { file, at: 0 };
        let magic: [u8; 8] = cursor.array()?;
        if magic != MAGIC {
            return Err(FormatError::NotPacked { got: magic });
        }
        let version = u32::from_le_bytes(cursor.array()?);
        if version != VERSION {
            return Err(FormatError::PackedVersion { expected: VERSION, got: version });
        }
        let [class, flags] = cursor.array()?;
        let name_bytes = usize::from(u16::from_le_bytes(cursor.array()?));
        let mut dimension = || Ok::<_, FormatError>(saturated(u64::from_le_bytes(cursor.array()?).into()));
        let (n, k, stored_k) = (dimension()?, dimension()?, dimension()?);
        let got = u64::from_le_bytes(cursor.array()?);
        let features = saturated(u64::from_le_bytes(cursor.array()?).into());
        let name = cursor.take(name_bytes)?;
        let format: Format = String::from_utf8_lossy(&name).parse()?;
        let class = class_of(class)?;
        let expected = fingerprint(format, class);
        if got != expected {
            return Err(FormatError::PackedLayout { format: format.name, class, expected, got });
        }
        if flags & !(HAS_ROW_SCALE | HAS_K_ORDER | FITS_F16 | IS_GATED | FITS_F16_SCALED | STATES_X) != 0 {
            return Err(damaged(format!("unknown flags {flags:#x}")));
        }
        let has = |flag: u8| flags & flag != 0;
        check_shape(format, n, k, stored_k, has(HAS_K_ORDER))?;
        let mut lengths = Lengths::of(format, class, n, stored_k);
        lengths.row_scale *= u128::from(has(HAS_ROW_SCALE));
        lengths.k_order *= u128::from(has(HAS_K_ORDER));
        let expected = (cursor.at + CHECKSUM_BYTES) as u128 + lengths.data + lengths.row_scale + lengths.k_order;
        if file.len() as u128 != expected {
            return Err(FormatError::WrongLength { what: WHAT.into(), expected: saturated(expected), got: file.len() });
        }
        // The file holds all of these, so none exceeds the address space.
        let header = file.slice(0..cursor.at).ok_or_else(|| damaged("no header".into()))?;
        let data = cursor.take(lengths.data as usize)?;
        let row_scale = cursor.section(lengths.row_scale as usize)?;
        let k_order = cursor.section(lengths.k_order as usize)?;
        let parts = [Some(&header), Some(&data), row_scale.as_ref(), k_order.as_ref()];
        let sum = parts.into_iter().flatten().fold(0, |sum, part| checksum(sum, part));
        let stored = u64::from_le_bytes(cursor.array()?);
        if sum != stored {
            return Err(FormatError::Checksum { what: WHAT.into(), expected: stored, got: sum });
        }
        let (fits_f16, fits_f16_scaled, gated) = (has(FITS_F16), has(FITS_F16_SCALED), has(IS_GATED));
        Self::new(PackedParts {
            format,
            class,
            n,
            features,
            gated,
            k,
            stored_k,
            fits_f16,
            fits_f16_scaled,
            stated_x: STATED_X[usize::from((flags & STATES_X) / 32)],
            data,
            row_scale,
            k_order,
        })
    }
}

/// Section sizes of a weight with all sections, in bytes. Dimensions have 32 bits and
/// blocks a few thousand bytes, so u128 cannot overflow.
struct Lengths {
    data: u128,
    row_scale: u128,
    k_order: u128,
}

impl Lengths {
    fn of(format: Format, class: FragmentLayout, n: usize, stored_k: usize) -> Self {
        let layout = PackedLayout::new(format, class);
        let data = match &layout {
            Some(l) => [l.n_tiles(n), l.k_tiles(stored_k), l.k_tile_bytes],
            None => [n, format.blocks_per_row(stored_k), format.block_bytes],
        };
        Self {
            data: data.into_iter().map(|v| v as u128).product(),
            row_scale: n as u128 * 4,
            k_order: stored_k.next_multiple_of(k_step(format, layout.as_ref())) as u128 * 4,
        }
    }
}

fn check_shape(format: Format, n: usize, k: usize, stored_k: usize, k_order: bool) -> Result<(), FormatError> {
    for (name, got) in [("N", n), ("K", k), ("stored K", stored_k)] {
        if got == 0 {
            return Err(FormatError::ZeroDimension { name });
        }
        if got > MAX_DIMENSION {
            return Err(FormatError::Overflow { what: format!("{WHAT}: {name}"), dims: vec![got as u64] });
        }
    }
    format.check_k(stored_k)?;
    if k > stored_k || !k_order && k != stored_k {
        return Err(damaged(format!("{stored_k} stored columns for K = {k}")));
    }
    Ok(())
}

fn check_features(n: usize, features: usize, gated: bool) -> Result<(), FormatError> {
    let rows = if gated { pair_rows(features) } else { Some(features) };
    match features {
        0 => Err(FormatError::ZeroDimension { name: "features" }),
        _ if rows == Some(n) => Ok(()),
        _ => Err(damaged(format!("{n} rows for {features} output features{}", if gated { ", gated" } else { "" }))),
    }
}

/// Saturating conversion, for error messages and dimensions that are refused.
fn saturated(value: u128) -> usize {
    usize::try_from(value).unwrap_or(usize::MAX)
}

/// Column order as kernels read it: u32, padded to a multiple of `step` columns.
pub fn padded_k_order(order: &[u32], step: usize) -> Vec<u8> {
    let padded = order.len().next_multiple_of(step);
    order.iter().copied().chain(std::iter::repeat(NO_COLUMN)).take(padded).flat_map(u32::to_le_bytes).collect()
}

/// Column multiple of the padded column order: a k-tile, or a block without k-tiles.
pub fn k_step(format: Format, layout: Option<&PackedLayout>) -> usize {
    layout.map_or(format.block_len, |l| l.k_tile)
}

fn class_code(class: FragmentLayout) -> u8 {
    match class {
        FragmentLayout::Canonical => 0,
        FragmentLayout::MmaM16 => 1,
        FragmentLayout::MmaM8N8K4 => 2,
        FragmentLayout::Simd16 => 3,
    }
}

fn class_of(code: u8) -> Result<FragmentLayout, FormatError> {
    let classes =
        [FragmentLayout::Canonical, FragmentLayout::MmaM16, FragmentLayout::MmaM8N8K4, FragmentLayout::Simd16];
    classes.get(usize::from(code)).copied().ok_or_else(|| damaged(format!("unknown layout {code}")))
}

/// Flag bits of the entry of [`STATED_X`].
fn stated_flags(stated: Option<XFormat>) -> u8 {
    STATED_X.iter().position(|known| *known == stated).unwrap_or(0) as u8 * 32
}

fn damaged(what: String) -> FormatError {
    FormatError::BadFile { file: WHAT.into(), what }
}

/// Fingerprint: hash of a packed sample, which changes with the position of any bit.
fn fingerprint(format: Format, class: FragmentLayout) -> u64 {
    let (rows, columns) = match PackedLayout::new(format, class) {
        Some(layout) => (layout.tile_rows + 1, layout.k_tile + format.block_len),
        None => (2, 2 * format.block_len),
    };
    let sample = sample(format, rows, columns, 1);
    let packed = match PackedLayout::new(format, class) {
        Some(layout) => layout.pack(&sample),
        None => sample.blocks().to_vec(),
    };
    checksum(format.block_bytes as u64, &packed)
}

/// Checks that the columns name every input feature exactly once.
fn check_order(order: &[u8], k: usize, stored_k: usize) -> Result<(), FormatError> {
    let mut taken = vec![false; k];
    for (i, column) in order.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).enumerate() {
        if column == NO_COLUMN {
            continue;
        }
        match taken.get_mut(column as usize) {
            Some(taken) if !*taken && i < stored_k => *taken = true,
            _ => {
                return Err(damaged(format!(
                    "column {i} takes feature {column} of {k}, or is not the first to take it"
                )));
            }
        }
    }
    Ok(())
}

/// Continues the checksum `sum` over `bytes`. A change of any one word, or of the
/// length, is always detected.
fn checksum(sum: u64, bytes: &[u8]) -> u64 {
    /// Bytes hashed by one thread.
    const PART: usize = 1 << 20;
    // Odd, so that multiplication is a bijection. The bits are those of the golden ratio.
    const FACTOR: u64 = 0x9e37_79b9_7f4a_7c15;
    let step = |sum: u64, word: u64| (sum ^ word).wrapping_mul(FACTOR).rotate_left(29);
    let part = |bytes: &[u8]| {
        let (words, rest) = bytes.as_chunks::<8>();
        let sum = words.iter().fold(0, |sum, word| step(sum, u64::from_le_bytes(*word)));
        rest.iter().fold(sum, |sum, &byte| step(sum, u64::from(byte)))
    };
    let parts: Vec<u64> = bytes.par_chunks(PART).map(part).collect();
    step(parts.into_iter().fold(sum, step), bytes.len() as u64)
}

/// Cursor over a file.
struct Cursor<'a> {
    file: &'a SharedBytes,
    at: usize,
}

impl Cursor<'_> {
    fn take(&mut self, bytes: usize) -> Result<SharedBytes, FormatError> {
        let end = self.at.saturating_add(bytes);
        let taken = self.file.slice(self.at..end).ok_or_else(|| FormatError::WrongLength {
            what: WHAT.into(),
            expected: end,
            got: self.file.len(),
        })?;
        self.at = end;
        Ok(taken)
    }

    fn array<const BYTES: usize>(&mut self) -> Result<[u8; BYTES], FormatError> {
        let mut array = [0; BYTES];
        array.copy_from_slice(&self.take(BYTES)?);
        Ok(array)
    }

    /// Optional section: absent when it has no bytes.
    fn section(&mut self, bytes: usize) -> Result<Option<SharedBytes>, FormatError> {
        if bytes == 0 { Ok(None) } else { self.take(bytes).map(Some) }
    }
}
