//! Stacks of experts: a tensor `[E, N, K]` of codes
//! with its scales. Each expert's slice is a layer.
//!
//! ```text
//! FP8, INT8  weight […]   [E, N, K]        scales one, [E], [E, 1, 1], [E, N], [E, N, 1], or [E] times those of blocks
//! NVFP4      codes        [E, N, K/2]      scales [E, N, K/16], the tensor's scale one, [E] or [E, 1, 1]
//! ```
//!
//! Scales `[E]` are per expert, even if E = N. K is
//! the last dimension, along which codes are packed.
//! Llama 4 stores `[E, K, N]`. If the scales reveal
//! that, the stack is refused, never transposed.
//! A single scale reveals nothing: then the stack has N
//! and K by its shape.

use std::fmt;
use std::sync::Arc;

use super::layer::{Layer, erase, stack_slice};
use super::raw::{RawTensor, bad, unsupported};
use crate::desc::Format;
use crate::error::FormatError;
use crate::weight::HostWeight;

/// Stack of expert layers, which are
/// created when loaded.
pub(super) struct StackLayer<F, L, const SCALES: usize> {
    experts: usize,
    codes: RawTensor,
    scales: [RawTensor; SCALES],
    first: L,
    make: F,
}

impl<F, L, const SCALES: usize> StackLayer<F, L, SCALES>
where
    L: Layer,
    F: Fn(RawTensor, [RawTensor; SCALES]) -> Result<L, FormatError>,
{
    /// Stack of `codes` with scales of any kind. `make`
    /// creates the layer of one expert from its slices.
    ///
    /// All experts have the slice shapes of expert 0, whose
    /// layer checks them.
    ///
    /// # Errors
    /// [`FormatError::BadFile`] when scales have another
    /// number of experts. [`FormatError::UnsupportedFile`]
    /// for stacks `[E, K, N]`. Errors of
    /// `make` for expert 0.
    pub fn new(codes: RawTensor, scales: [RawTensor; SCALES], make: F) -> Result<Self, FormatError> {
        let &[experts, rows, columns] = &codes.shape[..] else {
            return Err(bad(&codes.name, format!("expected shape [E, N, K], got {:?}", codes.shape)));
        };
        if codes.elements() == 0 {
            return Err(bad(&codes.name, format!("has no elements: shape {:?}", codes.shape)));
        }
        for scales in &scales {
            refuse_transposed(scales, experts, [rows, columns])?;
            if scales.elements() != 1 && scales.shape.first() != Some(&experts) {
                let what = format!("expected one scale, or those of {experts} experts, got shape {:?}", scales.shape);
                return Err(bad(&scales.name, what));
            }
        }
        let first = expert(0, experts, &codes, &scales, &make)?;
        Ok(Self { experts, codes, scales, first, make })
    }
}

/// Layer whose `codes` are `[N, K]`, or stack of experts whose
/// `codes` are `[E, N, K]`.
///
/// # Errors
/// Those of `make`, and of [`StackLayer::new`].
pub(super) fn layer_or_stack<L, const SCALES: usize>(
    codes: RawTensor,
    scales: [RawTensor; SCALES],
    make: impl Fn(RawTensor, [RawTensor; SCALES]) -> Result<L, FormatError> + Send + Sync + 'static,
) -> Result<Arc<dyn Layer>, FormatError>
where
    L: Layer + 'static,
{
    if codes.shape.len() < 3 { erase(make(codes, scales)) } else { erase(StackLayer::new(codes, scales, make)) }
}

/// Layer of expert `index` of `experts`.
fn expert<L, const SCALES: usize>(
    index: usize,
    experts: usize,
    codes: &RawTensor,
    scales: &[RawTensor; SCALES],
    make: impl Fn(RawTensor, [RawTensor; SCALES]) -> Result<L, FormatError>,
) -> Result<L, FormatError> {
    let part = |tensor: &RawTensor| part_of(tensor, index, experts);
    make(part(codes), scales.each_ref().map(part))
}

/// Refuses scales of columns, or of groups of rows:
/// then K is the dimension before the last.
fn refuse_transposed(scales: &RawTensor, experts: usize, [rows, columns]: [usize; 2]) -> Result<(), FormatError> {
    /// NVFP4 code bytes per scale.
    const NV_CODES: usize = 8;
    let by_column = rows > 1 && columns > 1 && scales.shape == [experts, 1, columns];
    let by_rows = rows.is_multiple_of(NV_CODES) && scales.shape == [experts, rows / NV_CODES, columns];
    if by_column || by_rows {
        let what = format!(
            "scales {:?} of codes [{experts}, {rows}, {columns}] are those of a stack [E, K, N], as Llama 4 stores it: \
             expected [E, N, K]; transpose the experts",
            scales.shape
        );
        return Err(unsupported(&scales.name, what));
    }
    Ok(())
}

/// Slice of `expert` in a stacked tensor. A single
/// scale belongs to all experts.
fn part_of(tensor: &RawTensor, expert: usize, experts: usize) -> RawTensor {
    if tensor.shape.first() != Some(&experts) {
        return RawTensor { shape: Vec::new(), ..tensor.clone() };
    }
    let bytes = stack_slice(&tensor.bytes, expert, experts);
    RawTensor { shape: tensor.shape[1..].to_vec(), bytes, ..tensor.clone() }
}

impl<F, L: Layer, const SCALES: usize> fmt::Debug for StackLayer<F, L, SCALES> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StackLayer").field("experts", &self.experts).field("first", &self.first).finish()
    }
}

impl<F, L, const SCALES: usize> Layer for StackLayer<F, L, SCALES>
where
    L: Layer,
    F: Fn(RawTensor, [RawTensor; SCALES]) -> Result<L, FormatError> + Send + Sync,
{
    fn format(&self) -> Format {
        self.first.format()
    }

    fn shape(&self) -> Vec<usize> {
        [vec![self.experts], self.first.shape()].concat()
    }

    fn bytes(&self) -> usize {
        self.codes.bytes.len() + self.scales.iter().map(|scales| scales.bytes.len()).sum::<usize>()
    }

    fn weight(&self, index: usize) -> Result<HostWeight, FormatError> {
        expert(index, self.experts, &self.codes, &self.scales, &self.make)?.weight(0)
    }
}
