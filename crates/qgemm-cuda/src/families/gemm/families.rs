//! GEMM families, and the kernels they offer for a problem.

use qgemm_formats::{DType, XCode, XFormat};
use qgemm_hal::{
    CheckedGemm, Device, DeviceInfo, Families, Family, HalError, LaunchPlan, LaunchSequence, TileConfig, Unsupported,
    Variant, XPlanes,
};

use super::fp8_kernels::{fp8_kernels, serving};
use super::instance::Instance;
use super::instances::{instances, of_planes};
use super::main_loop::MainLoopKind;
use super::projection::{NAME as PROJECTION, projection_configs, projection_source_hash};
use super::sequence::sequence;
use super::sm120_block_scaled::{BlockScaledKernel, block_scaled_kernels};
use super::x_prologue::{gathers, x_prologue};
use crate::arch::{self, check_shared};
use crate::families::kernel_launch::load;

/// Families of `gemm`.
pub(in crate::families) const FAMILIES: Families<CheckedGemm> = &[&Gemv, &Gemm, &Projection];

/// Few tokens: the kernel with the smallest tile
/// that holds all tokens.
#[derive(Debug)]
struct Gemv;

/// Any number of tokens: every kernel that supports them.
#[derive(Debug)]
struct Gemm;

/// Few tokens with a fused norm or several output
/// segments, in one launch.
#[derive(Debug)]
struct Projection;

/// Maximum tokens of `gemv` without matrix instructions, which is
/// compute-bound beyond.
const MOST_FMA_TOKENS: usize = 2;

/// Kernels for these types, of `gemv` or of all other main loops.
fn of_family(is_gemv: bool, op: &CheckedGemm, x: DType, variant: Variant) -> impl Iterator<Item = &'static Instance> {
    instances(op.format, x, variant).iter().filter(move |i| (i.main_loop.kind == MainLoopKind::Gemv) == is_gemv)
}

/// Kernel variant of the device. Its fragment layout must
/// match the packed weight of `op`.
fn variant_for(op: &CheckedGemm, info: &DeviceInfo) -> Result<Variant, Unsupported> {
    let variant = info.variant.ok_or_else(|| Unsupported::new("runs on CUDA devices only"))?;
    let expected = arch::fragment_layout(variant);
    if op.class != expected {
        return Err(Unsupported::new(format!("reads weights in layout {expected:?}, not {:?}", op.class)));
    }
    Ok(variant)
}

/// As [`variant_for`], for kernels that write one output matrix.
fn variant_for_one(op: &CheckedGemm, info: &DeviceInfo) -> Result<Variant, Unsupported> {
    match op.segments.is_empty() {
        true => variant_for(op, info),
        false => Err(Unsupported::new("writes all outputs of a product to one matrix")),
    }
}

/// Kernels that multiply the codes of a quantized X directly.
fn multiplying_codes(op: &CheckedGemm, variant: Variant, info: &DeviceInfo) -> Result<Vec<TileConfig>, Unsupported> {
    if op.k_order {
        return Err(Unsupported::new("multiplies codes of X in the order of its columns"));
    }
    let block_scaled = block_scaled_kernels(op.format, op.x.format, variant);
    let all = fp8_kernels(op.format, op.x.format, variant);
    if all.is_empty() && block_scaled.is_empty() {
        return Err(Unsupported::new(format!(
            "has no kernel that multiplies codes of {} and {}",
            op.format, op.x.format
        )));
    }
    let all = serving(all, |kernel| kernel.serves(op))?;
    let block_scaled = serving(block_scaled, |kernel| kernel.serves(op))?;
    let configs =
        all.iter().map(|kernel| kernel.config_on(info)).chain(block_scaled.iter().map(BlockScaledKernel::config));
    Ok(configs.filter(|config| config.shared_bytes <= info.shared_bytes).collect())
}

/// Source hash of the config's kernel.
fn source_hash(op: &CheckedGemm, config: &TileConfig) -> u64 {
    let id = config.kernel_id(op.format);
    if let (Some(_), Some(variant)) = (op.x.planes, config.variant) {
        let mut fp8 = fp8_kernels(op.format, op.x.format, variant).into_iter();
        let fp8 = fp8.find(|k| k.config().kernel_id(op.format) == id).map(|k| k.spec());
        let mut block_scaled = block_scaled_kernels(op.format, op.x.format, variant).into_iter();
        let block_scaled = || block_scaled.find(|k| k.config().kernel_id(op.format) == id).map(|k| k.spec());
        let integer = || of_planes(op.format, variant).iter().find(|i| i.id() == id).map(Instance::spec);
        return fp8.or_else(integer).or_else(block_scaled).map_or(0, |spec| spec.source_hash().short());
    }
    let x = config.x_format.plain().zip(config.variant);
    let mut all = x.into_iter().flat_map(|(x, variant)| instances(op.format, x, variant));
    all.find(|i| i.id() == id).map_or(0, |i| i.spec().source_hash().short())
}

fn unsupported_tokens(most: usize, op: &CheckedGemm) -> Unsupported {
    Unsupported::new(format!("serves at most {most} tokens, not {}", op.m))
}

impl Family<CheckedGemm> for Gemv {
    fn name(&self) -> &'static str {
        "gemv"
    }

    fn configs(&self, op: &CheckedGemm, info: &DeviceInfo) -> Result<Vec<TileConfig>, Unsupported> {
        let (variant, x) = (variant_for_one(op, info)?, op.plain_x()?.dtype);
        let kernels = || of_family(true, op, x, variant);
        let held = |i: &Instance| i.tile_m as usize;
        // Without matrix instructions, two tiles of one token serve two.
        let most_of = |i: &Instance| if i.types.engine.is_mma() { held(i) } else { held(i).max(MOST_FMA_TOKENS) };
        let most = kernels().map(most_of).max();
        let serving = kernels().find(|i| held(i) >= op.m).or_else(|| kernels().find(|i| most_of(i) >= op.m));
        let instance = serving.ok_or_else(|| unsupported_tokens(most.unwrap_or(0), op))?;
        check_shared(instance.shared_bytes, info)?;
        Ok(vec![instance.config_on(info)])
    }

    fn prepare(&self, device: &dyn Device, op: &CheckedGemm, plan: &LaunchPlan) -> Result<LaunchSequence, HalError> {
        sequence(op, plan, device.info(), &mut load(device))
    }

    fn source_hash(&self, op: &CheckedGemm, config: &TileConfig) -> u64 {
        source_hash(op, config)
    }
}

impl Family<CheckedGemm> for Projection {
    fn name(&self) -> &'static str {
        PROJECTION
    }

    fn configs(&self, op: &CheckedGemm, info: &DeviceInfo) -> Result<Vec<TileConfig>, Unsupported> {
        projection_configs(op, variant_for(op, info)?, info)
    }

    fn prepare(&self, device: &dyn Device, op: &CheckedGemm, plan: &LaunchPlan) -> Result<LaunchSequence, HalError> {
        sequence(op, plan, device.info(), &mut load(device))
    }

    fn source_hash(&self, op: &CheckedGemm, config: &TileConfig) -> u64 {
        projection_source_hash(op, config)
    }
}

/// Kernels for a quantized X with these planes.
fn codes(
    op: &CheckedGemm,
    planes: &XPlanes,
    variant: Variant,
    info: &DeviceInfo,
) -> Result<Vec<TileConfig>, Unsupported> {
    const SCALE_BYTES: u64 = 4;
    let refuse = |why: &str| Err(Unsupported::new(why));
    let x_format = match (planes.parts.code, planes.parts.block) {
        (XCode::Int8, Some(_)) => XFormat::Q8_0,
        (XCode::Int8, None) if op.m > 1 && planes.scales_row != SCALE_BYTES => {
            return refuse("multiplies codes with a scale a token where these lie one behind the other");
        }
        (XCode::Int8, None) => XFormat::Int8Token,
        (XCode::E4M3, _) => op.x.format,
        _ => return refuse("multiplies no codes but integers and E4M3"),
    };
    if op.k_order {
        return refuse("multiplies no codes of a weight whose columns are permuted");
    }
    let serving =
        |i: &&Instance| i.x_format == x_format && i.serves(op, true) && check_shared(i.shared_bytes, info).is_ok();
    let all: Vec<_> = of_planes(op.format, variant).iter().filter(serving).map(|i| i.config_on(info)).collect();
    if all.is_empty() { refuse("has no kernel for such codes with these weights on this chip") } else { Ok(all) }
}

/// Loads for a group of eight columns that is not
/// contiguous, instead of one.
const GATHER_LOADS: u32 = 8;

impl Gemm {
    /// Kernels for activations of type `x`. `in_order` says whether rows are
    /// aligned and columns in the order of the weight's.
    fn serving(
        &self,
        op: &CheckedGemm,
        x: DType,
        in_order: bool,
        variant: Variant,
        info: &DeviceInfo,
    ) -> Result<Vec<TileConfig>, Unsupported> {
        let mut all: Vec<_> = of_family(false, op, x, variant).filter(|i| i.serves(op, in_order)).collect();
        let most = all.iter().map(|i| i.most_tokens()).max().unwrap_or(0);
        all.retain(|i| op.m <= i.most_tokens());
        if all.is_empty() {
            return Err(unsupported_tokens(most, op));
        }
        all.retain(|i| check_shared(i.shared_bytes, info).is_ok());
        if all.is_empty() {
            return Err(Unsupported::new("needs more shared memory than the device has"));
        }
        Ok(all.into_iter().map(|i| i.config_on(info)).collect())
    }
}

impl Family<CheckedGemm> for Gemm {
    fn name(&self) -> &'static str {
        "gemm"
    }

    /// Kernels that read X in place, and kernels
    /// with an X prologue.
    fn configs(&self, op: &CheckedGemm, info: &DeviceInfo) -> Result<Vec<TileConfig>, Unsupported> {
        let variant = variant_for_one(op, info)?;
        if let Some(planes) = &op.x.planes {
            return match planes.parts.code {
                // Each of the two refuses what the other supports.
                XCode::Int8 => match (codes(op, planes, variant, info), multiplying_codes(op, variant, info)) {
                    (Ok(staged), Ok(direct)) => Ok(direct.into_iter().chain(staged).collect()),
                    (staged, direct) => direct.or(staged),
                },
                XCode::E4M3 => multiplying_codes(op, variant, info)
                    .or_else(|refused| codes(op, planes, variant, info).map_err(|_| refused)),
                XCode::E2M1 => multiplying_codes(op, variant, info),
            };
        }
        let x = op.plain_x()?;
        let mut direct = self.serving(op, x.dtype, x.aligned16 && !op.k_order, variant, info);
        let Some((dtype, prologue)) = x_prologue(op, &x, variant) else { return direct };
        if gathers(op) {
            for config in direct.iter_mut().flatten() {
                config.efficiency.0 = (config.efficiency.0 / GATHER_LOADS).max(1);
            }
        }
        let converted = self.serving(op, dtype, true, variant, info).into_iter().flatten();
        let converted = converted.map(|config| TileConfig { x_prologue: Some(prologue), ..config });
        let all: Vec<_> = direct.iter().flatten().copied().chain(converted).collect();
        if all.is_empty() { direct } else { Ok(all) }
    }

    fn prepare(&self, device: &dyn Device, op: &CheckedGemm, plan: &LaunchPlan) -> Result<LaunchSequence, HalError> {
        sequence(op, plan, device.info(), &mut load(device))
    }

    fn source_hash(&self, op: &CheckedGemm, config: &TileConfig) -> u64 {
        source_hash(op, config)
    }
}
