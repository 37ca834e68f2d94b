//! Host benchmarks: weight quantization, loading to
//! the CPU device, and reading kernels from the bundles
//! in `QGEMM_KERNELS`.

use std::cell::Cell;
use std::path::Path;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use qgemm_api::{Context, Format, quantize};
use qgemm_benches::{FORMATS, SIZE, values, weight};
use qgemm_cuda::{BUNDLES_VARIABLE, Bundle, KernelSpec, manifest};

fn quantizing(criterion: &mut Criterion) {
    let values = values();
    let mut group = criterion.benchmark_group("quantize");
    group.throughput(Throughput::Elements((SIZE * SIZE) as u64)).sample_size(10);
    for name in FORMATS {
        let format: Format = name.parse().expect("a format of this build");
        group.bench_function(name, |b| b.iter(|| quantize(&values, SIZE, SIZE, format).expect("valid values")));
    }
}

fn loading(criterion: &mut Criterion) {
    let ctx = Context::open("cpu").expect("every machine has a CPU");
    let mut group = criterion.benchmark_group("load");
    group.sample_size(10);
    for name in FORMATS {
        let host = weight(name);
        group.throughput(Throughput::Bytes(host.blocks().len() as u64));
        group.bench_function(name, |b| b.iter(|| ctx.load(&host).expect("enough memory")));
    }
}

/// Reads one kernel after another from a bundle: open the file,
/// read one frame, verify and decompress it.
fn reading_kernels(criterion: &mut Criterion) {
    let files = std::env::var_os(BUNDLES_VARIABLE).unwrap_or_default();
    let mut files = std::env::split_paths(&files).filter(|path| path.is_file()).peekable();
    if files.peek().is_none() {
        eprintln!("skipped: no bundle to read kernels from, {BUNDLES_VARIABLE} names no file");
    }
    for path in files {
        let (bundle, specs, chip) = open(&path);
        let next = Cell::new(0);
        let mut read = || {
            let at = next.replace(next.get() + 1);
            bundle.read(&specs[at % specs.len()], chip).expect("a bundle without damage").expect("listed")
        };
        criterion.bench_function(&format!("read one of {} kernels of {}", specs.len(), bundle.target()), |b| {
            b.iter(&mut read);
        });
    }
}

/// Bundle, its kernels, and a compute
/// capability that it supports.
fn open(path: &Path) -> (Bundle, Vec<KernelSpec>, u32) {
    let bundle = Bundle::open(path).expect("a bundle of these sources");
    let chip = bundle.target().arch();
    let mut specs = manifest(bundle.target().variant().expect("a chip with kernels"));
    specs.retain(|spec| matches!(bundle.read(spec, chip), Ok(Some(_))));
    (bundle, specs, chip)
}

criterion_group!(benches, quantizing, loading, reading_kernels);
criterion_main!(benches);
