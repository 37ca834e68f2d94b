//! Stream-K on the device: every CTA processes the work tiles
//! of [`LaunchPlan::work_tiles`], and the CTA order does not
//! change a bit of the sums.

use bytemuck::{Pod, Zeroable};
use qgemm_cuda::KernelSpec;
use qgemm_emu::{Access, Geometry, Region, device_address, launch_spec, set_block_order};
use qgemm_formats::{DType, XFormat};
use qgemm_hal::abi::{CudaGemmShape, GemmPointers, TileSchedule};
use qgemm_hal::{
    Buffer, Device, HalError, LaunchPlan, Math, Name, Schedule, StreamK, TileConfig, WorkTile, WorkspaceLayout,
};

const THREADS: u32 = 64;
const ORDERS: u64 = 20;
/// Words per listed work tile. The first is 1.
const FIELDS: usize = 9;

/// `GemmParams` in `sched/params.cuh`.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct Params {
    shape: CudaGemmShape,
    at: GemmPointers,
    tiles: TileSchedule,
}

/// Launch of `blocks` CTAs. A tile has as many
/// outputs as a CTA has threads.
fn plan([n_tiles, m_tiles, k_tiles]: [u32; 3], stream_k: StreamK, blocks: u32) -> LaunchPlan {
    let config = TileConfig {
        family: "listing",
        main_loop: Name::new("listing"),
        variant: None,
        math: Math::FmaF32,
        tile_n: THREADS,
        tile_m: 1,
        tile_k: 64,
        threads: THREADS,
        ctas_per_unit: 1,
        cluster: 1,
        schedule: Schedule::StreamK,
        max_splits: 16,
        warps_n: 2,
        k_groups: 1,
        stages: 1,
        shared_bytes: 16,
        x_format: XFormat::Plain(DType::F32),
        x_prologue: None,
        rounded_weights: None,
        normalizes_x: false,
        efficiency: (1000, 1000),
    };
    let workspace = WorkspaceLayout::stream_k(&stream_k, THREADS.into()).unwrap();
    let stream_k = Some(stream_k);
    LaunchPlan {
        config,
        n_tiles,
        m_tiles,
        k_tiles,
        splits: 1,
        stream_k,
        grid: [blocks, 1, 1],
        workspace,
        estimate: 0.0,
    }
}

fn plans() -> Vec<LaunchPlan> {
    let cut =
        |cut_tiles, cut_ctas, cut_k_tiles, swizzle_group| StreamK { cut_tiles, cut_ctas, cut_k_tiles, swizzle_group };
    vec![
        // No split tile. The last wave and the last swizzle group are ragged.
        plan([5, 3, 7], cut(0, 0, 1, 2), 4),
        // Fewer tiles than CTAs: many peers per tile, ranges
        // that start within tiles.
        plan([2, 1, 40], cut(2, 7, 1, 1), 7),
        plan([3, 1, 13], cut(3, 8, 2, 3), 8),
        // One tile, with one CTA per part.
        plan([1, 1, 16], cut(1, 5, 1, 1), 5),
        // A ragged wave is split before whole waves. Then one more wave is split.
        plan([3, 3, 11], cut(1, 4, 1, 3), 4),
        plan([3, 3, 11], cut(5, 4, 1, 2), 4),
        // Ranges that end at tile borders.
        plan([4, 1, 6], cut(4, 8, 1, 4), 8),
        // CTAs without a range.
        plan([7, 1, 4], cut(2, 3, 2, 7), 5),
    ]
}

fn spec() -> KernelSpec {
    KernelSpec {
        name: "listing".into(),
        entry: "schedule/listing.cu",
        text: include_str!("schedule/listing.cu"),
        symbol: "listing",
        prelude: format!(
            "#define QG_VARIANT 80\n#define QG_EXPERTS 0\n#define QG_EXPERT_TILES 0\n#define QG_PROJECTION 0\n\
             #define QG_SEGMENT_TILES 0\n#define QG_CLUSTER 1\n\
             constexpr unsigned QG_THREADS = {THREADS}, QG_CONSUMERS = {THREADS};\n"
        ),
        arch_specific: false,
    }
}

/// Device. `None`, with a note, without a C++ compiler.
fn device(test: &str) -> Option<std::sync::Arc<dyn Device>> {
    match qgemm_emu::open(80) {
        Ok(device) => Some(device),
        Err(why @ HalError::NoDevice { .. }) => {
            qgemm_testkit::skipped(test, &why.to_string());
            None
        }
        Err(other) => panic!("{other}"),
    }
}

/// Weights of k-tiles whose sum depends on the order of additions.
fn k_tile_weights(k_tiles: u32) -> Vec<f32> {
    (0..k_tiles).map(|i| 1.0 / (1 + i % 7) as f32 + 1000.0 * (i % 3) as f32).collect()
}

/// Memory of the launch, reused for each CTA order.
struct Launch<'a> {
    device: &'a dyn Device,
    plan: LaunchPlan,
    x: Buffer,
    list: Buffer,
    sums: Buffer,
    workspace: Buffer,
}

impl<'a> Launch<'a> {
    fn new(device: &'a dyn Device, plan: LaunchPlan) -> Self {
        let memory = |bytes: usize| device.allocate(bytes.max(4), "a test").unwrap();
        let mut x = memory(plan.k_tiles as usize * 4);
        let weights = k_tile_weights(plan.k_tiles);
        device.upload(&device.default_stream(), bytemuck::cast_slice(&weights), (&mut x).into()).unwrap();
        let tiles = (plan.n_tiles * plan.m_tiles) as usize;
        let list = memory(plan.grid[0] as usize * (tiles + 1) * FIELDS * 4);
        Self {
            device,
            plan,
            x,
            list,
            sums: memory(tiles * THREADS as usize * 4),
            workspace: memory(plan.workspace.bytes),
        }
    }

    fn run(&mut self) {
        let plan = &self.plan;
        let layout = plan.workspace;
        let address = |buffer: &Buffer| device_address(self.device, buffer.into()).unwrap();
        let cut = plan.stream_k.unwrap();
        let workspace = address(&self.workspace);
        let params = Params {
            shape: CudaGemmShape { k_tiles: plan.k_tiles, splits: 1, ..CudaGemmShape::default() },
            at: GemmPointers {
                x: address(&self.x),
                c: address(&self.list),
                d: address(&self.sums),
                partials: workspace + layout.partials as u64,
                counters: workspace + layout.counters as u64,
                c_row: self.list.len() as u64 / u64::from(plan.grid[0]),
                ..GemmPointers::default()
            },
            tiles: TileSchedule {
                n_tiles: plan.n_tiles,
                m_tiles: plan.m_tiles,
                swizzle_group: cut.swizzle_group,
                cut_tiles: cut.cut_tiles,
                cut_ctas: cut.cut_ctas,
                cut_k_tiles: cut.cut_k_tiles,
            },
        };
        let region =
            |name, buffer: &Buffer, access| Region { name, start: address(buffer) as usize, len: buffer.len(), access };
        let part =
            |name, from: usize, len: usize, access| Region { name, start: workspace as usize + from, len, access };
        let mut regions = vec![
            region("x", &self.x, Access::Read),
            region("the list", &self.list, Access::Write),
            region("the sums", &self.sums, Access::Write),
        ];
        if layout.bytes > 0 {
            let counters = plan.shared_tiles() as usize * 4;
            regions.push(part("the counters", layout.counters, counters, Access::ReadWrite));
            regions.push(part("the partial sums", layout.partials, layout.partial_bytes, Access::Write));
        }
        let geometry = Geometry {
            blocks: plan.grid,
            threads: THREADS,
            shared_bytes: plan.config.shared_bytes,
            params: bytemuck::bytes_of(&params),
            starts_early: false,
        };
        // SAFETY: `Params` is the kernel's parameter; the buffers live as long as
        // `self`, and only this launch uses them.
        unsafe { launch_spec(self.device, &spec(), geometry, &regions) }.unwrap();
    }

    fn words(&self, buffer: &Buffer) -> Vec<u32> {
        let mut words = vec![0u32; buffer.len() / 4];
        let bytes = bytemuck::cast_slice_mut(&mut words);
        self.device.download(&self.device.default_stream(), buffer.into(), bytes).unwrap();
        words
    }

    /// Work tiles listed by each CTA.
    fn listed(&self) -> Vec<Vec<WorkTile>> {
        let words = self.words(&self.list);
        let of_block = words.chunks(words.len() / self.plan.grid[0] as usize);
        let work_tile = |f: &[u32]| WorkTile {
            tile: f[1],
            n_tile: f[2],
            m_tile: f[3],
            k_tiles: f[4]..f[5],
            peers: f[6],
            index: f[7],
            slot: f[8],
        };
        of_block.map(|words| words.chunks(FIELDS).take_while(|f| f[0] == 1).map(work_tile).collect()).collect()
    }

    /// Expected sums of a tile: k-tiles of each work tile, then
    /// the work tiles, in order.
    fn expected_sums(&self) -> Vec<u32> {
        let plan = &self.plan;
        let weights = k_tile_weights(plan.k_tiles);
        let mut work_tiles: Vec<_> = (0..plan.grid[0]).flat_map(|block| plan.work_tiles([block, 0, 0])).collect();
        work_tiles.sort_by_key(|w| (w.tile, w.index));
        let mut sums = vec![0f32; (plan.n_tiles * plan.m_tiles * THREADS) as usize];
        for work_tile in work_tiles {
            for thread in 0..THREADS {
                let k_tiles = work_tile.k_tiles.clone().map(|k_tile| weights[k_tile as usize] + thread as f32);
                sums[(work_tile.tile * THREADS + thread) as usize] += k_tiles.fold(0.0, |sum, v| sum + v);
            }
        }
        sums.into_iter().map(f32::to_bits).collect()
    }
}

#[test]
fn blocks_work_on_what_the_host_says() {
    let Some(device) = device("blocks_work_on_what_the_host_says") else { return };
    set_block_order(&*device, 0).unwrap();
    for plan in plans() {
        let mut launch = Launch::new(&*device, plan);
        launch.run();
        let expected: Vec<_> = (0..plan.grid[0]).map(|block| plan.work_tiles([block, 0, 0])).collect();
        assert_eq!(launch.listed(), expected, "{plan:?}");
    }
}

#[test]
fn no_order_of_the_blocks_changes_a_bit_of_a_cut_tile() {
    let Some(device) = device("no_order_of_the_blocks_changes_a_bit_of_a_cut_tile") else { return };
    for plan in plans() {
        let mut launch = Launch::new(&*device, plan);
        let expected = launch.expected_sums();
        for order in 0..ORDERS {
            set_block_order(&*device, order).unwrap();
            // The counters must be zero after the previous order.
            launch.run();
            assert!(launch.words(&launch.sums) == expected, "order {order} of {plan:?}");
        }
    }
}
