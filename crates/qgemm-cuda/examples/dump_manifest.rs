//! Scratch: dumps manifest and candidates (never committed).
use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::io::Write as _;

use qgemm_cuda::{FAMILIES, launch_of, manifest, pack_class};
use qgemm_formats::{DType, Format};
use qgemm_hal::*;
use std::hash::{DefaultHasher, Hash, Hasher};

fn info(variant: Variant, shared_bytes: u32) -> DeviceInfo {
    DeviceInfo {
        id: DeviceId { kind: DeviceKind::Cuda, ordinal: 0 },
        name: String::new(),
        arch: format!("sm_{}", variant.number()),
        variant: Some(variant),
        units: 132,
        memory_bytes: 1 << 36,
        bandwidth: 4e12,
        cache_bytes: 50 << 20,
        shared_bytes,
        max_buffer_bytes: 1 << 36,
        rates: vec![(Math::FmaF32, 1e13), (Math::TensorF16, 4e14)],
        launch_seconds: 3e-6,
        features: BTreeSet::new(),
    }
}

fn main() {
    let stem = std::env::args().nth(1).unwrap();
    let mut out = String::new();
    for variant in Variant::ALL {
        for s in manifest(variant) {
            writeln!(out, "== {variant} {} {} {} {}\n{}", s.name, s.entry, s.symbol, s.arch_specific, s.prelude)
                .unwrap();
        }
    }
    std::fs::write(format!("{stem}-manifest.txt"), out).unwrap();
    let mut out = std::io::BufWriter::new(std::fs::File::create(format!("{stem}-plans.txt")).unwrap());
    for variant in Variant::ALL {
        let most = match variant {
            Variant::Sm70 => 96 << 10,
            Variant::Sm75 => 64 << 10,
            Variant::Sm80 => 163 << 10,
            Variant::Sm90 => 227 << 10,
            Variant::Sm89 | Variant::Sm120 => 99 << 10,
        };
        for shared in [most, 48 << 10, 99 << 10] {
            let info = info(variant, shared);
            for format in Format::all() {
                for x in DType::ALL {
                    for x_rounding in [XRounding::Exact, XRounding::F16, XRounding::BF16] {
                        for m in [1usize, 2, 9, 16, 17, 200, 70_000, 65_535 * 32 + 1] {
                            for (n, stored_k) in [(16usize, 4096usize), (4096, 4096), (4096, 1 << 30)] {
                                for (aligned16, k_order, col) in
                                    [(true, false, 1), (false, false, 1), (false, false, 7), (true, true, 1)]
                                {
                                    for weight_fits_f16 in [true, false] {
                                        let x =
                                            Dense { dtype: x, row_stride: stored_k as u64, col_stride: col, aligned16 };
                                        let d = Dense {
                                            dtype: DType::F32,
                                            row_stride: n as u64,
                                            col_stride: 1,
                                            aligned16: true,
                                        };
                                        let op = CheckedGemm {
                                            m,
                                            n,
                                            features: n,
                                            gated: false,
                                            k: stored_k,
                                            stored_k,
                                            format,
                                            class: pack_class(variant),
                                            row_scale: false,
                                            k_order,
                                            weight_fits_f16,
                                            x,
                                            x_rounding,
                                            d,
                                            c: None,
                                            bias: None,
                                            token_scale: false,
                                            residual: None,
                                            alpha: 1.0,
                                            beta: 0.0,
                                            activation: Activation::default(),
                                            batch_invariant: false,
                                        };
                                        let mut h = DefaultHasher::new();
                                        let mut text = String::new();
                                        for f in FAMILIES {
                                            let configs = f.candidates(&op, &info);
                                            format!("{configs:?} {:?}", f.supports(&op, &info)).hash(&mut h);
                                            write!(text, " {}", configs.len()).unwrap();
                                            for config in
                                                configs.iter().filter(|_| shared == most && m == 200 && n == 4096)
                                            {
                                                let plan = LaunchPlan {
                                                    config: *config,
                                                    n_tiles: 4,
                                                    m_tiles: 3,
                                                    k_steps: 7,
                                                    splits: 1,
                                                    stream_k: None,
                                                    grid: [4, 3, 1],
                                                    workspace_bytes: 1 << 20,
                                                    estimate: 0.0,
                                                };
                                                let launch = launch_of(f.name(), &op, &plan, &info);
                                                match launch {
                                                    Ok(l) => (
                                                        l.name,
                                                        l.spec.name,
                                                        l.starts_early,
                                                        l.staging.map(|s| s.spec.name),
                                                    )
                                                        .hash(&mut h),
                                                    Err(e) => e.to_string().hash(&mut h),
                                                }
                                            }
                                        }
                                        writeln!(out, "{variant} {shared} {format} {} {x_rounding:?} {m} {n} {stored_k} {aligned16} {k_order} {col} {weight_fits_f16}{text} {:016x}", op.x.dtype, h.finish()).unwrap();
                                    }
                                }
                            }
                        }
                    }
                }
            }
        }
    }
}
