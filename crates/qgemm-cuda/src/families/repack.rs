//! `repack`: packs a weight's blocks into the packed
//! layout on the device. It runs when a weight is
//! loaded; no family schedules it.

use qgemm_formats::prepack::{FragmentLayout, PackedLayout};
use qgemm_formats::repack::Repacking;
use qgemm_formats::{Format, HostWeight};
use qgemm_hal::abi::RepackParams;
use qgemm_hal::{
    Buffer, BufferMut, BufferRef, Device, Geometry, HalError, KernelId, PackFragments, PackSpec, Spec, Stream, Variant,
};

use super::prelude::{Moves, Prelude};
use crate::arch;
use crate::function::Start;
use crate::gpu::Gpu;
use crate::memory::device_address;
use crate::probe;
use crate::source;
use crate::spec::KernelSpec;

const THREADS: u32 = 128;
/// Maximum bytes of a tile's rows that a CTA stages.
const STRIP_BYTES: usize = 16 * 1024;
/// Bytes of rows that are uploaded and packed at a time:
/// the extra memory of loading.
const CHUNK_BYTES: usize = 64 << 20;
/// Bytes of a vector access.
const ACCESS: usize = 16;

/// The packing kernel for one format and variant.
#[derive(Clone, Debug)]
pub struct Repack {
    layout: PackedLayout,
    spec: KernelSpec,
    strip_k_tiles: usize,
    shared_bytes: u32,
}

/// One launch for uploaded rows: whole tiles, except at the end.
#[derive(Debug)]
pub struct RepackLaunch<'a> {
    /// The rows, padded to a multiple of 16 bytes.
    pub rows: BufferRef<'a>,
    /// The packed tiles.
    pub packed: BufferMut<'a>,
    /// Grid, threads, shared memory.
    pub geometry: Geometry,
    params: RepackParams,
}

impl RepackLaunch<'_> {
    /// Kernel parameter, with addresses from `address`.
    ///
    /// # Errors
    /// Errors of `address`.
    pub fn params(
        &self,
        address: impl Fn(BufferRef<'_>, &'static str) -> Result<u64, HalError>,
    ) -> Result<RepackParams, HalError> {
        let rows = address(self.rows, "the rows of a weight")?;
        Ok(RepackParams { rows, packed: address(self.packed.view(), "the packed weight")?, ..self.params })
    }
}

impl Repack {
    /// The kernel that packs `format` for `variant`; `None` for formats whose
    /// packed bits do not come from their blocks (none at present).
    pub fn new(format: Format, variant: Variant) -> Option<Self> {
        let layout = PackedLayout::new(format, arch::fragment_layout(variant))?;
        let repacking = Repacking::new(&layout)?;
        let k_tile_row = layout.k_tile / format.block_len * format.block_bytes;
        let fitting = (STRIP_BYTES / layout.tile_rows / k_tile_row).max(1);
        let strip_k_tiles = (1 << fitting.ilog2()).min(16);
        // A row starts up to 15 bytes after its first chunk,
        // and the last window ends within 8 bytes of the row's
        // end. An odd number of chunks avoids bank conflicts between rows.
        let row_chunks = (ACCESS - 1 + strip_k_tiles * k_tile_row + 8).div_ceil(ACCESS) | 1;
        let shared_bytes = (layout.tile_rows * row_chunks * ACCESS) as u32;
        let prelude = Prelude {
            block_len: Some(format.block_len as u32),
            block_bytes: Some(format.block_bytes as u32),
            zero_code: Some(repacking.zero_code),
            strip_k_tiles: Some(strip_k_tiles as u32),
            row_chunks: Some(row_chunks as u32),
            threads: Some(THREADS),
            // A tile of 32 rows needs more shared memory, and for
            // some formats more than 64 registers.
            ctas_per_sm: Some(if layout.class == FragmentLayout::MmaM8N8K4 { 6 } else { 8 }),
            shared_bytes: Some(shared_bytes),
            moves: Some(Moves { repacking: &repacking, block_bytes: format.block_bytes }),
            ..Prelude::of(variant).with_layout(&layout)
        };
        let spec = KernelSpec {
            name: id(&layout, variant).to_string(),
            entry: "entry/repack.cu",
            text: source::entry("entry/repack.cu"),
            symbol: "qg_repack",
            prelude: prelude.text(),
            arch_specific: false,
        };
        Some(Self { layout, spec, strip_k_tiles, shared_bytes })
    }

    /// The kernel that packs `format` on `gpu`.
    ///
    /// # Errors
    /// [`HalError::KernelUnavailable`].
    pub(crate) fn of(gpu: &Gpu, format: Format) -> Result<Self, HalError> {
        Self::new(format, gpu.chip().variant).ok_or_else(|| HalError::KernelUnavailable {
            kernel: format!("repack_nt_{format}"),
            target: gpu.chip().info.arch.clone(),
            why: "its packed bits are not bits of its blocks".into(),
        })
    }

    /// The kernel.
    pub fn spec(&self) -> &KernelSpec {
        &self.spec
    }

    /// Uploads `weight` to `device` in parts and packs them there; `launch`
    /// submits the kernel to `stream`. Temporary device memory is at most
    /// 64 MiB of rows (or one tile's rows).
    ///
    /// # Errors
    /// Errors of allocating, uploading and launching.
    pub fn run(
        &self,
        device: &dyn Device,
        stream: &Stream,
        weight: &HostWeight,
        mut launch: impl FnMut(&RepackLaunch<'_>) -> Result<(), HalError>,
    ) -> Result<Buffer, HalError> {
        let Self { layout, .. } = self;
        let k = weight.stored_k();
        let row_bytes = layout.format().row_bytes(k);
        let tile_bytes = layout.bytes(1, k);
        let mut packed = device.allocate(self.packed_bytes(weight.n(), k), "a weight")?;
        let chunk_tiles = (CHUNK_BYTES / (layout.tile_rows * row_bytes)).max(1);
        let chunk_rows = (chunk_tiles * layout.tile_rows).min(weight.n());
        let mut staged =
            device.allocate((chunk_rows * row_bytes).next_multiple_of(ACCESS), "rows of a weight to be packed")?;
        for first in (0..weight.n()).step_by(chunk_rows) {
            let n = chunk_rows.min(weight.n() - first);
            let bytes = n * row_bytes;
            device.upload(stream, &weight.blocks()[first * row_bytes..][..bytes], staged.slice_mut(0..bytes)?)?;
            let tile = first / layout.tile_rows;
            let to = tile * tile_bytes..(tile + layout.n_tiles(n)) * tile_bytes;
            let rows = staged.slice(0..bytes.next_multiple_of(ACCESS))?;
            launch(&self.launch(rows, packed.slice_mut(to)?, n, k))?;
        }
        // The staged rows are freed on return.
        device.synchronize(stream)?;
        Ok(packed)
    }

    /// Bytes of a packed weight.
    fn packed_bytes(&self, n: usize, k: usize) -> usize {
        self.layout.bytes(n, k)
    }

    /// The launch that packs `n` rows of `k`
    /// values into whole tiles.
    fn launch<'a>(&self, rows: BufferRef<'a>, packed: BufferMut<'a>, n: usize, k: usize) -> RepackLaunch<'a> {
        let k_tiles = self.layout.k_tiles(k);
        let blocks = self.layout.n_tiles(n) * k_tiles.div_ceil(self.strip_k_tiles);
        RepackLaunch {
            rows,
            packed,
            geometry: Geometry { grid: [blocks as u32, 1, 1], threads: THREADS, shared_bytes: self.shared_bytes },
            params: RepackParams {
                n: n as u32,
                blocks: self.layout.format().blocks_per_row(k) as u32,
                k_tiles: k_tiles as u32,
                ..RepackParams::default()
            },
        }
    }
}

/// Kernel identity.
fn id(layout: &PackedLayout, variant: Variant) -> KernelId {
    let fragments = match layout.class {
        FragmentLayout::MmaM8N8K4 => PackFragments::MmaM8N8K4,
        _ => PackFragments::MmaM16,
    };
    KernelId::new("repack", Some(variant), Spec::Pack(PackSpec { w: layout.format(), fragments }))
}

/// Packing throughput for a device-resident weight of `n` x `k` in
/// `format`: bytes read and written per second, best of seven runs.
///
/// # Errors
/// As [`read_bandwidth`](crate::read_bandwidth).
pub fn repack_bandwidth(device: &dyn Device, format: Format, n: usize, k: usize) -> Result<f64, HalError> {
    let gpu = Gpu::of(device)?;
    let repack = Repack::of(gpu, format)?;
    let function = gpu.kernel(repack.spec())?;
    let row_bytes = format.row_bytes(k);
    let rows = device.allocate((n * row_bytes).next_multiple_of(ACCESS), "the rows of a weight")?;
    let mut packed = device.allocate(repack.packed_bytes(n, k), "a weight")?;
    let moved = rows.len() + packed.len();
    let launch = repack.launch((&rows).into(), (&mut packed).into(), n, k);
    let params = launch.params(|view, what| device_address(device.info().id, view, what))?;
    let Geometry { grid, threads, shared_bytes } = launch.geometry;
    let stream = device.default_stream();
    let best = probe::best_time(device, &stream, || {
        // SAFETY: the parameter is the kernel's, made for these
        // buffers. They live until the end of this function, after
        // the last run was waited for.
        unsafe { function.launch(&stream, grid, threads, shared_bytes, bytemuck::bytes_of(&params), Start::InOrder) }
    })?;
    Ok(moved as f64 / best)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_format_is_packed_by_moving_bits() {
        for (format, variant) in Format::all().flat_map(|f| Variant::ALL.map(|v| (f, v))) {
            let repack = Repack::new(format, variant).unwrap_or_else(|| panic!("{format} {variant}"));
            // Available on every chip without opting in to more shared memory.
            assert!(repack.shared_bytes <= 48 * 1024, "{format} {variant}: {} bytes", repack.shared_bytes);
            // `MmaM8N8K4` has twice the rows and half the
            // columns in a strip. For wide k-tiles two of its
            // warps only store scale records.
            let codes_for = if repack.layout.class == FragmentLayout::MmaM8N8K4 { THREADS / 2 } else { THREADS };
            assert!(repack.strip_k_tiles * 32 >= codes_for as usize, "{format} {variant}: warps without a k_tile");
        }
    }
}
