//! `short_conv`: short causal depthwise convolution in one
//! memory-bound launch.

use std::mem::size_of;
use std::sync::Arc;

use bytemuck::{Pod, Zeroable};
use qgemm_formats::DType;
use qgemm_hal::abi::{self, ShortConvPointers, ShortConvShape, dtype_code};
use qgemm_hal::op::short_conv::ShortConvStep;
use qgemm_hal::{
    CheckedShortConv, Device, DeviceInfo, Families, Family, Geometry, HalError, KernelId, LaunchSequence, Operand,
    Operands, Operation, ShortConvConfig, ShortConvLaunch, ShortConvOperand, ShortConvSpec, Spec, Unsupported, Variant,
};

use super::kernel_launch::{Addresses, KernelLaunch, MakeKernel, Params, load};
use super::launch_params::LaunchParams;
use super::prelude::Prelude;
use crate::source;
use crate::spec::KernelSpec;

/// Families of `short_conv`.
pub(super) const FAMILIES: Families<CheckedShortConv> = &[&ShortConv];

/// Family name.
const NAME: &str = "short_conv";
const ENTRY: &str = "entry/short_conv.cu";
/// Threads of a CTA.
const THREADS: u32 = 128;
/// Channels of a thread, where rows are aligned; otherwise one.
const GROUP: usize = 8;
/// Bytes of a vector access.
const ACCESS: u64 = 16;
/// Most tokens of a CTA: beyond, the inputs that neighbours read
/// twice are too few to matter.
const MOST_TILE: usize = 64;
/// CTAs per SM below which a CTA gets fewer tokens.
const FULL_CTAS: usize = 8;
/// Maximum CTAs along the channels: a limit of grids.
const MOST_CHANNEL_CTAS: usize = 65_535;
/// Expected share of the bandwidth, per mille.
const EFFICIENCY: u32 = 750;

/// The kernel family.
#[derive(Debug)]
struct ShortConv;

fn id(x: DType, variant: Variant) -> KernelId {
    KernelId::new(NAME, Some(variant), Spec::ShortConv(ShortConvSpec { step: ShortConvStep::All, x }))
}

fn source(x: DType, variant: Variant) -> KernelSpec {
    let prelude = Prelude { x_dtype: Some(dtype_code(x)), threads: Some(THREADS), ..Prelude::of(variant) };
    KernelSpec {
        name: id(x, variant).to_string(),
        entry: ENTRY,
        text: source::entry(ENTRY),
        symbol: "qg_short_conv",
        prelude: prelude.text(),
        arch_specific: false,
    }
}

/// All kernels of the family for `variant`.
pub(super) fn specs(variant: Variant) -> impl Iterator<Item = KernelSpec> {
    DType::ALL.into_iter().map(move |x| source(x, variant))
}

/// `ShortConvParams` in `entry/short_conv.cu`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
struct ShortConvParams {
    shape: ShortConvShape,
    at: ShortConvPointers,
}

const _: () = assert!(size_of::<ShortConvShape>().is_multiple_of(8), "pointers follow without a gap");

impl Params for ShortConvParams {
    fn with(&self, operands: &Operands<'_>, at: &Addresses<'_>) -> Result<LaunchParams, HalError> {
        use ShortConvOperand as O;
        let mut params = *self;
        let own = &mut params.at;
        let pointers = [
            (&mut own.x, O::X),
            (&mut own.weight, O::Weight),
            (&mut own.bias, O::Bias),
            (&mut own.input_gate, O::InputGate),
            (&mut own.output_gate, O::OutputGate),
            (&mut own.q_offsets, O::QOffsets),
            (&mut own.slots, O::Slots),
            (&mut own.advance, O::Advance),
            (&mut own.state, O::State),
            (&mut own.d, O::D),
        ];
        at.fill(operands, pointers)?;
        if (own.weight | own.bias).is_multiple_of(ACCESS) {
            params.shape.flags |= abi::FLAG_BIAS_ALIGNED16;
        }
        Ok(LaunchParams::of(&params))
    }
}

/// Whether a thread has eight channels.
fn is_wide(op: &CheckedShortConv) -> bool {
    op.is_aligned() && op.channels.is_multiple_of(GROUP)
}

/// CTAs along the channels.
fn channel_ctas(op: &CheckedShortConv) -> usize {
    let of_thread = if is_wide(op) { GROUP } else { 1 };
    op.channels.div_ceil(of_thread * THREADS as usize)
}

/// Tokens of a CTA: few enough that every SM has work.
fn tile_tokens(op: &CheckedShortConv, info: &DeviceInfo) -> usize {
    let wanted = FULL_CTAS * info.units as usize;
    let mut tile = MOST_TILE;
    while tile > 1 && op.tokens.div_ceil(tile) * channel_ctas(op) < wanted {
        tile /= 2;
    }
    tile
}

fn params(op: &CheckedShortConv, tile_tokens: usize) -> ShortConvParams {
    let from_zeros = op.state.is_some_and(|state| state.from_zeros);
    let flags = [(abi::FLAG_SILU, op.silu), (abi::FLAG_FROM_ZEROS, from_zeros), (abi::FLAG_ALIGNED16, is_wide(op))];
    let shape = ShortConvShape {
        sequences: op.sequences as u32,
        tokens: op.tokens as u32,
        most_queries: op.most_queries() as u32,
        channels: op.channels as u32,
        width: op.width as u32,
        slots: op.state.map_or(0, |state| state.slots as u32),
        flags: flags.iter().filter(|(_, set)| *set).fold(0, |flags, (flag, _)| flags | flag),
        dtype: dtype_code(op.x.dtype),
    };
    let at = ShortConvPointers {
        x_row: op.x.row_stride,
        input_gate_row: op.input_gate.map_or(0, |gate| gate.row_stride),
        output_gate_row: op.output_gate.map_or(0, |gate| gate.row_stride),
        d_row: op.d.row_stride,
        slot_stride: op.state.map_or(0, |state| state.slot_stride),
        tile_tokens: tile_tokens as u64,
        ..ShortConvPointers::default()
    };
    ShortConvParams { shape, at }
}

/// Launch sequence of a plan. `make` prepares its kernel.
///
/// # Errors
/// [`HalError::WrongDevice`] when the device has no kernel
/// variant, and errors of `make`.
pub(super) fn sequence(
    op: &CheckedShortConv,
    _: &ShortConvLaunch,
    info: &DeviceInfo,
    make: &mut MakeKernel<'_>,
) -> Result<LaunchSequence, HalError> {
    let variant = info.variant.ok_or(HalError::WrongDevice { device: info.id, what: "a CUDA kernel" })?;
    let tile_tokens = tile_tokens(op, info);
    let grid = [op.tokens.div_ceil(tile_tokens) as u32, channel_ctas(op) as u32, 1];
    let launch = KernelLaunch {
        id: id(op.x.dtype, variant),
        spec: source(op.x.dtype, variant),
        geometry: Geometry { grid, threads: THREADS, shared_bytes: 0 },
        // These kernels call `griddepcontrol_wait` themselves (atoms/sync.cuh).
        starts_early: variant >= Variant::Sm90,
        operands: ShortConvOperand::ALL,
        updated: None,
        params: Arc::new(params(op, tile_tokens)),
    };
    let step = launch.step::<ShortConvOperand>(make)?;
    let step = step.bind_all(op.operands());
    Ok(LaunchSequence::new::<ShortConvOperand>(op.kernel_name(), vec![step]))
}

impl Family<CheckedShortConv> for ShortConv {
    fn name(&self) -> &'static str {
        NAME
    }

    fn configs(&self, op: &CheckedShortConv, info: &DeviceInfo) -> Result<Vec<ShortConvConfig>, Unsupported> {
        let variant = info.variant.ok_or_else(|| Unsupported::new("runs on CUDA devices only"))?;
        if channel_ctas(op) > MOST_CHANNEL_CTAS {
            let most = op.channels / channel_ctas(op) * MOST_CHANNEL_CTAS;
            return Err(Unsupported::new(format!("convolves about {most} channels at most")));
        }
        Ok(vec![ShortConvConfig { kernel: id(op.x.dtype, variant), launches: 1, efficiency: EFFICIENCY }])
    }

    fn prepare(
        &self,
        device: &dyn Device,
        op: &CheckedShortConv,
        plan: &ShortConvLaunch,
    ) -> Result<LaunchSequence, HalError> {
        sequence(op, plan, device.info(), &mut load(device))
    }

    fn source_hash(&self, op: &CheckedShortConv, config: &ShortConvConfig) -> u64 {
        config.kernel.variant.map_or(0, |variant| source(op.x.dtype, variant).source_hash().short())
    }
}
